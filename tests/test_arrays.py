"""Arrays in and out: every framework gives the same bits, whatever the layout; the CUDA and JAX plumbing on fakes."""

import ctypes
import gc
import subprocess
import sys
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from backends import Foreign

import cuflash
from cuflash import api, arrays, select
from cuflash.arrays import Adapter, NumPyAdapter, adapter_of, numpy_from_view
from cuflash.dlpack import row_major
from cuflash.plan import check_call, make_plan
from cuflash.problem import check_options
from cuflash.variants.base import Operand
from cuflash.view import View

DTYPES = ["float16", "bfloat16", "float32", "float64"]
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def make(shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(numpy_dtype(dtype))


def case(dtype="float32", batch=2, seqlen_q=19, seqlen_k=23, heads_q=4, heads_kv=2, dim=24, dim_v=16):
    """q, k, v in bshd."""
    return (
        make((batch, seqlen_q, heads_q, dim), dtype, 1),
        make((batch, seqlen_k, heads_kv, dim), dtype, 2),
        make((batch, seqlen_k, heads_kv, dim_v), dtype, 3),
    )


def reference(q, k, v, causal=False):
    """Two-pass attention in float64 on bshd arrays: (out, lse)."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    if causal:
        i, j = np.ogrid[: scores.shape[2], : scores.shape[3]]
        scores = np.where(j <= i + scores.shape[3] - scores.shape[2], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", p / total, v), (top + np.log(total))[..., 0]


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bits = BITS[actual.dtype.itemsize]
    np.testing.assert_array_equal(np.ascontiguousarray(actual).view(bits), np.ascontiguousarray(expected).view(bits))


def to_torch(x):
    torch = pytest.importorskip("torch")
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def from_torch(x):
    import torch

    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def to_jax(x):
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        return jax.numpy.asarray(x)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_against_float64(dtype):
    q, k, v = case(dtype)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = reference(q, k, v, causal=True)
    assert out.dtype == q.dtype and out.shape == (2, 19, 4, 16) and out.flags.c_contiguous
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32) and lse.shape == (2, 4, 19)
    # Values are below 4 in size, so one rounding of the result is at most 2 eps; the rest is headroom for the sums.
    eps = float(ml_dtypes.finfo(q.dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=0, atol=8 * eps)
    # float32 inputs are float32-accurate; half inputs are rounded to 16 bits only in P and the output.
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=8 * float(np.finfo(lse.dtype).eps) * 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to, back", [(to_torch, from_torch), (to_jax, np.asarray)], ids=["torch", "jax"])
def test_same_bits_from_every_framework(dtype, to, back):
    q, k, v = case(dtype)
    expected = cuflash.attention(q, k, v, causal=True, window=(7, None), return_lse=True)
    given = [to(x) for x in (q, k, v)]
    results = cuflash.attention(*given, causal=True, window=(7, None), return_lse=True)
    for actual, wanted in zip(results, expected, strict=True):
        assert type(actual) is type(given[0])
        assert_same_bits(back(actual), wanted)


def test_same_bits_through_dlpack():
    q, k, v = case()
    expected = cuflash.attention(q, k, v)
    actual = cuflash.attention(Foreign(q), Foreign(k), Foreign(v))
    assert type(actual) is np.ndarray
    assert_same_bits(actual, expected)
    torch_bf16 = [Foreign(to_torch(x)) for x in case("bfloat16")]
    assert_same_bits(cuflash.attention(*torch_bf16), cuflash.attention(*case("bfloat16")))
    out = Foreign(np.zeros_like(expected))
    got, lse = cuflash.attention(Foreign(q), Foreign(k), Foreign(v), out=out, return_lse=True)
    assert got is out and lse.shape == (2, 4, 19)
    assert_same_bits(out.array, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("to, back", [(lambda x: x, lambda x: x), (to_torch, from_torch), (to_jax, np.asarray)])
def test_layouts_and_ranks(dtype, to, back):
    q, k, v = case(dtype, batch=1)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)

    def check(arrays, layout, out, lse):
        got, got_lse = cuflash.attention(*(to(x) for x in arrays), causal=True, layout=layout, return_lse=True)
        assert_same_bits(back(got), out)
        assert_same_bits(back(got_lse), lse)

    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    check(swapped, "bhsd", out.swapaxes(1, 2), lse)
    check([x[0] for x in swapped], "bhsd", out[0].swapaxes(0, 1), lse[0])
    check([x[0] for x in (q, k, v)], "bshd", out[0], lse[0])
    one = [np.ascontiguousarray(x[0, :, 0]) for x in (q, k, v)]
    for layout in ("bshd", "bhsd"):
        check(one, layout, out[0, :, 0], lse[0, 0])


LAYOUTS = {
    "packed": lambda x: np.concatenate([x, x], -1)[..., : x.shape[-1]],
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "reversed": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "last axis strided": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "last axis outermost": lambda x: np.ascontiguousarray(np.moveaxis(x, -1, 0)).transpose(1, 2, 3, 0),
    "read-only": lambda x: (y := x.copy(), y.setflags(write=False))[0],
    "memmap-free copy": np.copy,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_do_not_matter(layout):
    q, k, v = case()
    arranged = [LAYOUTS[layout](x) for x in (q, k, v)]
    assert_same_bits(cuflash.attention(*arranged, causal=True), cuflash.attention(q, k, v, causal=True))
    if layout not in ("read-only", "reversed"):  # torch has neither
        torch_result = cuflash.attention(*(to_torch(x) for x in arranged), causal=True)
        assert_same_bits(from_torch(torch_result), cuflash.attention(q, k, v, causal=True))


def test_expanded_tensors():
    torch = pytest.importorskip("torch")
    q, k, v = (to_torch(x) for x in case(batch=1))
    expanded = [x.expand(3, -1, -1, -1) for x in (q, k, v)]
    assert expanded[0].stride(0) == 0
    result = cuflash.attention(*expanded)
    assert torch.equal(result, cuflash.attention(q, k, v).expand(3, -1, -1, -1))
    heads = k[:, :, :1].expand(-1, -1, 4, -1), v[:, :, :1].expand(-1, -1, 4, -1)
    assert torch.equal(cuflash.attention(q, *heads), cuflash.attention(q, k[:, :, :1], v[:, :, :1]))


def test_odd_strides_of_size_one_axes():
    torch = pytest.importorskip("torch")
    q, k, v = (to_torch(x) for x in case(batch=1, heads_q=1, heads_kv=1))
    odd = [torch.as_strided(x, x.shape, (12345, x.stride(1), 7, 1)) for x in (q, k, v)]
    assert torch.equal(cuflash.attention(*odd), cuflash.attention(q, k, v))
    adapter = adapter_of(q, "q")
    operands = check_call(adapter, odd, check_options(False, None, 0.0, None, "bshd")).operands
    assert operands.q == Operand((0, q.stride(1), 0), 16)
    dim_one = [torch.as_strided(x[..., :1].contiguous(), (1, x.shape[1], 1, 1), (3, 1, 9, 77)) for x in (q, k, v)]
    assert cuflash.explain(*dim_one).copies == {}
    assert torch.equal(cuflash.attention(*dim_one), cuflash.attention(*(x.contiguous() for x in dim_one)))


def test_negative_bit_is_resolved():
    torch = pytest.importorskip("torch")
    q, k, v = (to_torch(x) for x in case())
    negative = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negative.is_neg() and torch.equal(negative, q)
    assert torch.equal(cuflash.attention(q, k, v), cuflash.attention(negative, k, v))
    in_place = torch._neg_view(-q)  # the strides of q, so that only the bit tells them apart
    assert in_place.is_neg() and in_place.stride() == q.stride()
    assert torch.equal(cuflash.attention(in_place, k, v), cuflash.attention(q, k, v))
    assert "negative bit" in cuflash.explain(negative, k, v).copies["q"]


def test_parameters_and_gradients():
    torch = pytest.importorskip("torch")
    q, k, v = (to_torch(x) for x in case())
    parameter = torch.nn.Parameter(q)
    with torch.no_grad():
        expected = cuflash.attention(q, k, v)
        assert torch.equal(cuflash.attention(parameter, k, v), expected)
    with pytest.raises(ValueError, match="q requires gradients"):
        cuflash.attention(parameter, k, v)
    assert torch.equal(cuflash.attention(parameter.detach(), k, v), expected)


def test_memmap(tmp_path):
    q, k, v = case()
    mapped = np.memmap(tmp_path / "q", q.dtype, "w+", shape=q.shape)
    mapped[:] = q
    out = cuflash.attention(mapped, k, v)
    assert type(out) is np.ndarray
    assert_same_bits(out, cuflash.attention(q, k, v))


@pytest.mark.parametrize("to", [lambda x: x, to_torch, to_jax], ids=["numpy", "torch", "jax"])
@pytest.mark.parametrize("empty", ["batch", "seqlen_q", "seqlen_k"])
def test_empty(to, empty):
    q, k, v = (to(x) for x in case(**{empty: 0}))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    assert type(out) is type(q) and type(lse) is type(q)
    assert tuple(out.shape) == (*q.shape[:-1], 16) and tuple(lse.shape) == (q.shape[0], 4, q.shape[1])
    assert not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()


# ---- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [lambda x: x, to_torch], ids=["numpy", "torch"])
def test_out(to):
    q, k, v = case()
    expected = cuflash.attention(q, k, v)
    packed = np.full((2, 19, 3, 4, 16), 7, np.float32)
    target = to(packed)[:, :, 1]
    for _ in range(2):  # making the plan, then using it
        packed[:] = 7
        got = cuflash.attention(to(q), to(k), to(v), out=target)
        assert got is target
        assert_same_bits(packed[:, :, 1], expected)
        assert (packed[:, :, ::2] == 7).all()


def test_out_may_interleave_with_inputs_but_not_overlap():
    packed = make((2, 19, 4, 4, 16))
    q, k, v, out = (packed[:, :, i] for i in range(4))
    expected = cuflash.attention(q.copy(), k.copy(), v.copy())
    assert_same_bits(cuflash.attention(q, k, v, out=out), expected)
    with pytest.raises(ValueError, match="out shares memory with v"):
        cuflash.attention(q, k, v, out=v)
    shifted = packed[:, :, 2:4].reshape(2, 19, 8, 16)[:, :, 1:5]
    assert np.shares_memory(shifted, packed)
    if np.shares_memory(shifted, v):
        with pytest.raises(ValueError, match="out shares memory with v"):
            cuflash.attention(q, k, v, out=shifted)


def test_overlap_is_checked_on_every_call():
    memory = np.zeros(4 * 2 * 19 * 4 * 16, np.float32)
    arrays_ = memory.reshape(4, 2, 19, 4, 16)
    cuflash.attention(arrays_[0], arrays_[1], arrays_[2], out=arrays_[3])  # the plan exists from here on
    with pytest.raises(ValueError, match="out shares memory with q"):
        cuflash.attention(arrays_[3], arrays_[1], arrays_[2], out=arrays_[3])


def test_autograd_sees_the_write_to_out():
    torch = pytest.importorskip("torch")
    q, k, v = (to_torch(x) for x in case())
    out = torch.zeros(2, 19, 4, 16)
    before = out._version
    cuflash.attention(q, k, v, out=out)
    assert out._version > before


# ---- looking at arrays -----------------------------------------------------------------------------------------------


def test_views_are_not_copies():
    torch = pytest.importorskip("torch")
    array = make((3, 5), "bfloat16")
    over = numpy_from_view(adapter_of(array, "q").view(array, "q"))
    assert np.shares_memory(over, array) and over.dtype == array.dtype
    tensor = torch.zeros(3, 5, dtype=torch.bfloat16).T
    over = adapter_of(tensor, "q").to_numpy(tensor)
    over[1, 2] = 5
    assert tensor[1, 2] == 5 and over.ctypes.data == tensor.data_ptr()
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.zeros((3, 5), jnp.bfloat16)
    assert adapter_of(array, "q").to_numpy(array).ctypes.data == array.unsafe_buffer_pointer()


@pytest.mark.parametrize(
    "offset, strides, alignment",
    [(0, (64, 32), 16), (2, (64, 32), 4), (1, (64, 32), 2), (4, (64, 32), 8), (0, (34, 17), 2), (0, (40, 20), 8)],
)
def test_alignment_is_of_every_row(offset, strides, alignment):
    memory = np.zeros(4096, np.float16)
    base = (-memory.ctypes.data // 2) % 8 + offset
    q = np.lib.stride_tricks.as_strided(memory[base:], (8, 2, 16), (2 * strides[0], 2 * strides[1], 2))
    operands = check_call(adapter_of(q, "q"), (q, q, q), check_options(False, None, 0.0, None, "bshd")).operands
    assert operands.q == Operand((0, *strides), alignment)
    assert operands.out == Operand((0, 32, 16), 16)


def test_adapters_are_found_once_per_type():
    class Loud(Foreign):
        pass

    assert adapter_of(Loud(np.ones(3)), "q") is adapter_of(Foreign(np.ones(3)), "q")
    assert Loud in arrays._BY_TYPE


def test_import_brings_in_no_framework():
    code = (
        "import sys, numpy as np, cuflash\n"
        "q = np.ones((1, 4, 1, 8), np.float32)\n"
        "cuflash.attention(q, q, q); str(cuflash.explain(q, q, q))\n"
        "loaded = {'torch', 'jax', 'jaxlib', 'cupy', 'cuda'} & set(sys.modules)\n"
        "sys.exit(f'imported {loaded}' if loaded else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_plans_hold_no_array_alive():
    q, k, v = case(seqlen_q=21)
    out = np.zeros((2, 21, 4, 16), np.float32)
    cuflash.attention(q, k, v, out=out)
    cuflash.attention(q, k, v)
    gone = [weakref.ref(x) for x in (q, k, v, out)]
    del q, k, v, out
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_plan_table_is_bounded_and_thread_safe(monkeypatch):
    monkeypatch.setattr(api, "_MAX_PLANS", 6)
    monkeypatch.setattr(api, "_PLANS", {})
    failures = []

    def work(seed):
        for n in range(8):
            q, k, v = case(seqlen_q=n + 1, seqlen_k=5)
            if not np.array_equal(cuflash.attention(q, k, v), cuflash.attention(q, k, v)):
                failures.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and 0 < len(api._PLANS) <= 6


def test_a_plan_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(api, "_PLANS", {})
    monkeypatch.setattr(api, "make_plan", lambda *args: made.append(1) or make_plan(*args))
    q, k, v = case()
    for spelling in ({}, {"softcap": None}, {"window": [None, None]}, {"window": (None, None)}, {"causal": np.False_}):
        cuflash.attention(q.copy(), k, v, **spelling)
    assert len(made) == 1
    cuflash.attention(q, k, v, causal=True)
    cuflash.attention(q, k, v, return_lse=True)
    assert len(made) == 3


def test_options_that_are_tensors_are_refused():
    """Reading one may wait for its device, and its gradient would be lost."""
    torch = pytest.importorskip("torch")
    q, k, v = case()
    with pytest.raises(TypeError, match=r"scale=.* must be a real number, not Tensor"):
        cuflash.attention(q, k, v, scale=torch.tensor(0.5))
    assert_same_bits(cuflash.attention(q, k, v, scale=np.float32(0.5)), cuflash.attention(q, k, v, scale=0.5))


def test_forward_mode_tangents_are_refused():
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 8, 2, 16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(ValueError, match="q has a forward-mode tangent"):
            cuflash.attention(dual, x, x)
        assert cuflash.attention(x, x, x).shape == x.shape


def test_out_for_jax_is_refused_on_a_warm_plan_too():
    jnp = pytest.importorskip("jax.numpy")
    x = jnp.ones((1, 8, 2, 16))
    cuflash.attention(x, x, x)
    with pytest.raises(TypeError, match="JAX arrays are immutable"):
        cuflash.attention(x, x, x, out=x)


# ---- the CUDA plumbing, with a fake device ---------------------------------------------------------------------------


class FakeArray:
    """Claims to be on a CUDA device; its memory is a NumPy array's."""

    def __init__(self, array, index=1):
        self.array, self.index = array, index


class FakeCuda(Adapter):
    """A framework with a current device and a stream per device, which notes what is done where."""

    framework = "fake"

    def __init__(self):
        self.current, self.events = 0, []

    def current_device(self):
        return self.current

    def facts(self, x, name):
        return self.address(x), (x.array.shape, x.array.strides, x.array.dtype, x.index)

    def view(self, x, name):
        view = NumPyAdapter().view(x.array, name)
        return View(view.pointer, view.shape, view.strides, view.dtype, "cuda", x.index, view.read_only, x)

    def contiguous(self, x):
        self.events.append(("copy", self.current))
        return FakeArray(np.ascontiguousarray(x.array), x.index)

    def allocator(self, shape, dtype, like):
        def allocate():
            self.events.append(("allocate", shape, self.current))
            return FakeArray(np.empty(shape, numpy_dtype(dtype)), self.current)

        return allocate

    def address(self, x):
        return x.array.ctypes.data

    def stream(self, device_index):
        return 1000 + device_index

    def device(self, device_index):
        adapter = self

        class Guard:
            def __enter__(self):
                self.old, adapter.current = adapter.current, device_index

            def __exit__(self, *error):
                adapter.current = self.old

        return Guard()


class FakeVariant:
    """Computes on addresses, as a CUDA launcher does."""

    name, device_kind = "fake", "cuda"

    def __init__(self, adapter=None):
        self.adapter, self.operands, self.streams = adapter, None, []

    def unsupported(self, problem, operands, device):
        return None

    def config(self, problem, operands, device):
        return ("config",)

    def launcher(self, problem, operands, device, config):
        self.operands = operands
        shapes = {
            "q": (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim),
            "k": (problem.batch, problem.seqlen_k, problem.heads_kv, problem.head_dim),
            "v": (problem.batch, problem.seqlen_k, problem.heads_kv, problem.head_dim_v),
            "out": (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v),
        }

        def at(address, name):
            strides = getattr(operands, name).strides
            return numpy_from_view(View(address, shapes[name], (*strides, 1), problem.dtype, "cpu", 0, False))

        def launch(q, k, v, out, lse, stream):
            self.streams.append(stream)
            expected, expected_lse = reference(at(q, "q"), at(k, "k"), at(v, "v"))
            at(out, "out")[:] = expected
            if lse:
                rows = np.ascontiguousarray(expected_lse, np.float32)
                ctypes.memmove(lse, rows.ctypes.data, rows.nbytes)

        return launch


@pytest.fixture
def fake(monkeypatch):
    from cuflash.device import known_device

    adapter = FakeCuda()
    variant = FakeVariant(adapter)
    monkeypatch.setitem(arrays._BY_TYPE, FakeArray, adapter)
    monkeypatch.setattr(select, "REGISTRY", {"fake": select.Entry("fake", "cuda")})
    monkeypatch.setattr(select, "load", lambda name, operation: variant)
    monkeypatch.setattr(select, "device_info", lambda index: known_device("sm_90"))
    monkeypatch.setattr("cuflash.plan.device_of", lambda kind, index: _at(known_device("sm_90"), index))
    monkeypatch.setattr(api, "_PLANS", {})
    return adapter, variant


def _at(device, index):
    from dataclasses import replace

    return replace(device, index=index)


def test_cuda_launch(fake):
    adapter, variant = fake
    q, k, v = case()
    expected, expected_lse = reference(q, k, v)
    given = [FakeArray(x) for x in (q, k, v)]
    for _ in range(2):
        out, lse = cuflash.attention(*given, return_lse=True)
        np.testing.assert_array_equal(out.array, expected.astype(np.float32))
        np.testing.assert_array_equal(lse.array, expected_lse.astype(np.float32))
    assert variant.streams == [1001, 1001]
    assert adapter.events == [("allocate", (2, 19, 4, 16), 1), ("allocate", (2, 4, 19), 1)] * 2
    assert adapter.current == 0
    out = cuflash.attention(*given)
    assert type(out) is FakeArray and adapter.events[-1] == ("allocate", (2, 19, 4, 16), 1)


def test_cuda_copies_what_kernels_cannot_read(fake):
    adapter, variant = fake
    q, k, v = case()
    given = [FakeArray(q[:, ::-1]), FakeArray(k), FakeArray(np.repeat(v, 2, -1)[..., ::2])]
    for _ in range(2):
        out = cuflash.attention(*given)
        np.testing.assert_array_equal(out.array, reference(q[:, ::-1], k, v)[0].astype(np.float32))
    assert [event for event in adapter.events if event[0] == "copy"] == [("copy", 1)] * 4
    assert variant.operands.q == Operand((19 * 4 * 24, 4 * 24, 24), 16)


def test_cuda_out_and_layout(fake):
    _, variant = fake
    q, k, v = case()
    swapped = [FakeArray(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v)]
    out = FakeArray(np.zeros((2, 4, 19, 32), np.float32)[..., :16])
    assert cuflash.attention(*swapped, layout="bhsd", out=out) is out
    np.testing.assert_array_equal(out.array.swapaxes(1, 2), reference(q, k, v)[0].astype(np.float32))
    assert variant.operands.out.strides == (4 * 19 * 32, 32, 19 * 32)
    with pytest.raises(ValueError, match="out shares memory with q"):
        cuflash.attention(*swapped[:1] * 3, layout="bhsd", out=swapped[0])


def test_cuda_alignment_is_part_of_the_key(fake):
    _, variant = fake
    memory = np.zeros(1000, np.float16)
    base = (-memory.ctypes.data // 2) % 8

    def at(offset):
        return FakeArray(memory[base + offset : base + offset + 160].reshape(1, 5, 2, 16))

    seen = []
    for q, k in ((0, 0), (1, 0), (0, 1), (4, 0), (0, 4), (8, 8)):
        variant.operands = None
        cuflash.attention(at(q), at(k), at(0))
        if variant.operands is not None:
            seen.append((variant.operands.q.alignment, variant.operands.k.alignment))
    assert seen == [(16, 16), (2, 16), (16, 2), (8, 16), (16, 8)]


def test_cuda_devices_must_agree(fake):
    q, k, v = (FakeArray(x) for x in case())
    k.index = 0
    with pytest.raises(ValueError, match=r"q is on cuda:1 but k is on cuda:0; move them to one device"):
        cuflash.attention(q, k, v)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_callback_route_on_cpu_buffers(return_lse, dtype):
    """The route of JAX on a GPU, with CPU buffers: addresses, outputs of XLA's own, the right order."""
    jax = pytest.importorskip("jax")
    from cuflash.plan import JaxPlan

    q, k, v = case(dtype)
    given = [to_jax(x) for x in (q, k, v)]
    adapter = adapter_of(given[0], "q")
    call = check_call(adapter, given, check_options(False, None, 0.0, None, "bshd"))
    variant = FakeVariant()
    launch = variant.launcher(call.problem, call.operands, call.device, None)
    plan = JaxPlan(call, given[0], return_lse, launch)
    expected, expected_lse = reference(q, k, v)
    for _ in range(2):
        result = plan.run(*given, None, (0, 0, 0, 0))
        out, lse = result if return_lse else (result, None)
        assert isinstance(out, jax.Array) and out.devices() == given[0].devices()
        assert_same_bits(np.asarray(out), expected.astype(q.dtype))
        if return_lse:
            assert_same_bits(np.asarray(lse), expected_lse.astype(np.float32))
    assert len(variant.streams) == 2


def test_jax_transposed_storage():
    """XLA may keep an array in another axis order than its shape says."""
    jax = pytest.importorskip("jax")
    q, k, v = case()
    torch = pytest.importorskip("torch")
    stored = [torch.from_numpy(np.ascontiguousarray(x.transpose(3, 0, 1, 2))).permute(1, 2, 3, 0) for x in (q, k, v)]
    given = [jax.dlpack.from_dlpack(x) for x in stored]
    assert_same_bits(np.asarray(cuflash.attention(*given)), cuflash.attention(q, k, v))


def test_row_major_of_empty_axes():
    assert row_major((0, 3)) == (3, 1)
