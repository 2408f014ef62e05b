"""How a backward call flows: bad calls and their messages, plans that are found again, CUDA launchers, frameworks."""

import ctypes
import doctest
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from backends import Foreign, Target, assert_same_bits, forbid_launches
from test_arrays import FakeArray, FakeCuda

import cuflash
from cuflash import api, arrays, select
from cuflash.arrays import numpy_from_view
from cuflash.device import known_device
from cuflash.reference import attention_backward_reference
from cuflash.variants.base import Operand
from cuflash.view import View

TARGET = Target("numpy", "cpu", "numpy", "float32")


def arr(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def good(**changes):
    """Arguments of a good call, by name, with some of them changed; None takes one away."""
    named = {
        "dout": arr(2, 5, 4, 6),
        "q": arr(2, 5, 4, 8),
        "k": arr(2, 7, 2, 8),
        "v": arr(2, 7, 2, 6),
        "out": arr(2, 5, 4, 6),
        "lse": arr(2, 4, 5),
    }
    return {name: x for name, x in (named | changes).items() if x is not None}


def grads(**changes):
    return tuple(({"dq": arr(2, 5, 4, 8), "dk": arr(2, 7, 2, 8), "dv": arr(2, 7, 2, 6)} | changes).values())


def read_only(x):
    x.flags.writeable = False
    return x


Q = arr(2, 5, 4, 8)
DV = arr(2, 7, 2, 6)
PACKED = arr(2, 7, 2, 14)
FLAT = PACKED.reshape(-1)

# name: (changes of the good call, error, pattern)
TABLE = {
    "dout shape": ({"dout": arr(2, 5, 4, 8)}, ValueError, r"dout has shape \(2, 5, 4, 8\); it must be \(2, 5, 4, 6\)"),
    "dout rank": ({"dout": arr(5, 4, 6)}, ValueError, r"dout has shape \(5, 4, 6\)"),
    "dout dtype": ({"dout": arr(2, 5, 4, 6, dtype=np.float64)}, TypeError, r"q is float32 but dout is float64; pass"),
    "dout int": ({"dout": arr(2, 5, 4, 6, dtype=np.int32)}, TypeError, r"dout has dtype int32, .* use float16"),
    "dout list": ({"dout": [1.0]}, TypeError, r"dout is a list, not an array"),
    "dout masked": ({"dout": np.ma.masked_array(arr(2, 5, 4, 6))}, TypeError, r"dout is a MaskedArray, a subclass"),
    "dout byte order": ({"dout": arr(2, 5, 4, 6, dtype=">f4")}, ValueError, r"dout has dtype '>f4' in a foreign"),
    "out shape": ({"out": arr(2, 4, 5, 6)}, ValueError, r"out has shape \(2, 4, 5, 6\); it must be \(2, 5, 4, 6\)"),
    "out dtype": ({"out": arr(2, 5, 4, 6, dtype=np.float16)}, TypeError, r"q is float32 but out is float16"),
    "lse shape": ({"lse": arr(2, 5, 4)}, ValueError, r"lse has shape \(2, 5, 4\); it must be \(2, 4, 5\)"),
    "lse dtype": ({"lse": arr(2, 4, 5, dtype=np.float64)}, TypeError, r"lse is float64; it must be float32 where q is"),
    "lse number": ({"lse": 1.0}, TypeError, r"lse is a float, not an array"),
    "dlse shape": ({"dlse": arr(2, 4, 6)}, ValueError, r"dlse has shape \(2, 4, 6\); it must be \(2, 4, 5\)"),
    "dlse dtype": ({"dlse": arr(2, 4, 5, dtype=np.float16)}, TypeError, r"dlse is float16; it must be float32"),
    "q rank": ({"q": arr(8)}, ValueError, r"same number of dimensions"),
    "mixed dtypes": ({"k": arr(2, 7, 2, 8, dtype=np.float16)}, TypeError, r"q is float32 but k is float16; cast them"),
    "head ratio": ({"q": arr(2, 5, 3, 8)}, ValueError, r"heads of q \(3\) must be a positive"),
    "fp8": ({"q": Q.astype(ml_dtypes.float8_e4m3fn)}, TypeError, r"q has dtype float8_e4m3fn, .* yet;"),
    "scale": ({"scale": float("nan")}, ValueError, r"scale=nan must be finite"),
    "window": ({"window": (-1, 0)}, ValueError, r"window=\(-1, 0\): the left side must be >= 0"),
    "causal": ({"causal": 1}, ValueError, r"causal=1 is not understood"),
    "layout": ({"layout": "sbhd"}, ValueError, r"layout='sbhd' is not known"),
    "layout list": ({"layout": ["bshd"]}, ValueError, r"layout=\['bshd'\] is not known"),
    "variant": ({"variant": "sm1"}, ValueError, r"variant='sm1' is not known; .* 'sm80', 'numpy'"),
    "deterministic": ({"deterministic": 1}, TypeError, r"deterministic=1 must be True or False, not int"),
    "deterministic None": ({"deterministic": "yes"}, TypeError, r"deterministic='yes' must be True or False"),
    "grads array": ({"grads": arr(3)}, TypeError, r"grads=ndarray must be None or a tuple of three arrays"),
    "two grads": ({"grads": grads()[:2]}, TypeError, r"grads=tuple must be None or a tuple of three arrays"),
    "grads None": ({"grads": (None, None, None)}, TypeError, r"dq is a NoneType, not an array"),
    "dq shape": ({"grads": grads(dq=arr(2, 5, 4, 6))}, ValueError, r"dq has shape .* must be \(2, 5, 4, 8\) .* of q\)"),
    "dk shape": ({"grads": grads(dk=arr(2, 7, 4, 8))}, ValueError, r"dk has shape .* must be \(2, 7, 2, 8\) .* of k\)"),
    "dv dtype": ({"grads": grads(dv=DV.astype(np.float64))}, TypeError, r"q is float32 but dv is float64; pass dv in"),
    "read-only": ({"grads": grads(dk=read_only(arr(2, 7, 2, 8)))}, ValueError, r"dk is read-only; pass an array"),
    "last axis": ({"grads": grads(dq=arr(2, 5, 4, 16)[..., ::2])}, ValueError, r"dq cannot be written in place"),
    "broadcast": (
        {"grads": grads(dv=np.lib.stride_tricks.as_strided(arr(7, 2, 6), (2, 7, 2, 6), (0, 48, 24, 4)))},
        ValueError,
        r"dv has strides .* its elements share memory",
    ),
    "dq is q": ({"q": Q, "grads": grads(dq=Q)}, ValueError, r"dq shares memory with q, which is read while dq is"),
    "dv is v": ({"v": DV, "grads": grads(dv=DV)}, ValueError, r"dv shares memory with v"),
    "dq overlaps lse": (
        {"lse": FLAT[300:340].reshape(2, 4, 5), "grads": grads(dq=FLAT[:320].reshape(Q.shape))},
        ValueError,
        r"dq shares memory with lse",
    ),
    "dk and dv overlap": (
        {"grads": grads(dk=PACKED[..., :8], dv=PACKED[..., 7:13])},
        ValueError,
        r"dv shares memory with dk, which is written too",
    ),
}  # fmt: skip


@pytest.fixture
def nothing_runs(monkeypatch):
    """Warm plans for good calls, and a variant that must not be reached."""
    cuflash.attention_backward(**good())
    cuflash.attention_backward(**good(), causal=True, window=(1, 0), deterministic=True)
    cuflash.attention_backward(**good(), grads=grads())
    forbid_launches(monkeypatch)


@pytest.mark.parametrize("name", TABLE)
def test_refused(name, nothing_runs):
    changes, error, pattern = TABLE[name]
    for _ in range(2):  # a refusal must not be cached as a plan
        with pytest.raises(error, match=pattern):
            cuflash.attention_backward(**good(**changes))


def test_refusals_leave_no_plan(monkeypatch):
    monkeypatch.setattr(api, "_PLANS", {})
    for changes, error, pattern in TABLE.values():
        if "shares memory" not in pattern:
            with pytest.raises(error):
                cuflash.attention_backward(**good(**changes))
    assert api._PLANS == {}


def test_forgotten_arguments():
    with pytest.raises(TypeError, match="lse"):
        cuflash.attention_backward(**good(lse=None))


def test_variant_without_a_backward_pass(monkeypatch):
    monkeypatch.delitem(select.BACKWARD, "sm90")
    with pytest.raises(
        cuflash.UnsupportedProblem, match=r"^variant='sm90' cannot run this float32 attention backward"
    ) as e:
        cuflash.attention_backward(**good(), variant="sm90")
    assert e.value.reasons == {"sm90": "has no backward pass yet"}


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_the_second_call_finds_the_plan_of_the_first(monkeypatch):
    monkeypatch.setattr(api, "_PLANS", {})
    q, k, v = TARGET.inputs(b=2, m=20, n=30, hq=4, hkv=2)
    dout = TARGET.draw(5, *q.shape)
    want, out, lse = TARGET.differentiate(dout, q, k, v, causal=True)
    plans = len(api._PLANS)
    monkeypatch.setattr(api, "make_backward_plan", None)
    inputs = [x.copy() for x in (dout, q, k, v, out, lse)]
    got = cuflash.attention_backward(*inputs, causal=True, variant="numpy")
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    assert len(api._PLANS) == plans
    for changes in ({"dlse": lse}, {"deterministic": True}, {"grads": tuple(np.empty_like(x) for x in (q, k, v))}):
        with pytest.raises(TypeError, match="NoneType"):  # each is another plan
            cuflash.attention_backward(*inputs, causal=True, variant="numpy", **changes)


def test_plans_do_not_keep_arrays_alive():
    import gc
    import weakref

    class Memory(np.ndarray):
        pass

    q, k, v = TARGET.inputs(m=21, n=31)
    dout = TARGET.draw(5, *q.shape)
    out, lse = TARGET.attend(q, k, v)
    results = [np.empty_like(x) for x in (q, k, v)]
    held = [np.asarray(x.view(Memory)) for x in (dout, q, k, v, out, lse)]
    owners = [weakref.ref(x) for x in (dout, q, k, v, out, lse)]
    cuflash.attention_backward(*held, grads=tuple(results))
    del dout, q, k, v, out, lse, held
    gc.collect()
    assert [owner() for owner in owners] == [None] * 6


# ---- frameworks ------------------------------------------------------------------------------------------------------


def test_mixed_frameworks():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"q is a NumPy array but dout is a torch array \(Tensor\); pass arrays of one"):
        cuflash.attention_backward(**good(dout=torch.zeros(2, 5, 4, 6)))
    with pytest.raises(TypeError, match="q is a NumPy array but dv is a torch array"):
        cuflash.attention_backward(**good(), grads=grads(dv=torch.zeros(2, 7, 2, 6)))
    tensors = {name: torch.from_numpy(x) for name, x in good().items()}
    with pytest.raises(ValueError, match=r"dout requires gradients.*torch.no_grad\(\) or pass dout.detach\(\)"):
        cuflash.attention_backward(**tensors | {"dout": torch.zeros(2, 5, 4, 6, requires_grad=True)})


def test_autograd_notices_that_grads_were_written():
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(x) for name, x in good().items()}
    given = tuple(torch.zeros(x.shape) for x in grads())
    versions = [x._version for x in given]
    cuflash.attention_backward(**tensors, grads=given)
    assert all(x._version > version for x, version in zip(given, versions, strict=True))


def test_expanded_gradient_of_a_torch_sum():
    """What autograd hands over for ``out.sum()`` has stride 0 along every axis."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in TARGET.inputs(m=20, n=20))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    dout = torch.ones(()).expand(out.shape)
    got = cuflash.attention_backward(dout, q, k, v, out, lse)
    want = cuflash.attention_backward(torch.ones(out.shape), q, k, v, out, lse)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_jax_has_no_grads_to_write():
    jnp = pytest.importorskip("jax.numpy")
    named = {name: jnp.asarray(x) for name, x in good().items()}
    with pytest.raises(TypeError, match="grads: JAX arrays are immutable; leave grads as None"):
        cuflash.attention_backward(**named, grads=(named["q"], named["k"], named["v"]))


def test_jax_float64_stays_float64():
    jax = pytest.importorskip("jax")
    target = Target("jax", "cpu", "numpy", "float64")
    with jax.enable_x64(True):
        q, k, v = target.inputs(m=20, n=20)
        got, *_ = target.differentiate(target.draw(5, *q.shape), q, k, v)
    want, *_ = Target("numpy", "cpu", "numpy", "float64").differentiate(target.draw(5, *q.shape), q, k, v)
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)


def test_bare_dlpack():
    q, k, v = TARGET.inputs(m=20, n=30)
    dout = TARGET.draw(5, *q.shape)
    want, out, lse = TARGET.differentiate(dout, q, k, v)
    foreign = [Foreign(x) for x in (dout, q, k, v, out, lse)]
    got = cuflash.attention_backward(*foreign)
    given = tuple(Foreign(np.empty_like(x)) for x in (q, k, v))
    assert cuflash.attention_backward(*foreign, grads=given) == given
    for a, b, c in zip(got, want, given, strict=True):
        assert_same_bits(a, b)
        assert_same_bits(c.array, b)
    with pytest.raises(ValueError, match="dk is read-only"):
        locked = Foreign(read_only(np.empty_like(k)))
        cuflash.attention_backward(*foreign, grads=(given[0], locked, given[2]))


# ---- the CUDA plumbing, with a fake device ---------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    adapter = FakeCuda()
    monkeypatch.setitem(arrays._BY_TYPE, FakeArray, adapter)
    monkeypatch.setattr("cuflash.plan.device_of", lambda kind, index: replace(known_device("sm_90"), index=index))
    monkeypatch.setattr(api, "_PLANS", {})
    return adapter


def test_cuda_arrays_are_refused_with_the_reason_of_each_variant(cuda):
    with pytest.raises(cuflash.UnsupportedProblem, match=r"^no variant can run this float32 attention back") as caught:
        cuflash.attention_backward(**{name: FakeArray(x, 0) for name, x in good().items()})
    reasons = caught.value.reasons
    assert set(reasons) == {"sm90", "sm80", "numpy"}
    assert "never moves data" in reasons["numpy"]
    assert reasons["sm80"] == reasons["sm90"] == "takes float16 and bfloat16, not float32; cast the inputs"


class FakeBackward:
    """Computes on addresses, as a CUDA launcher does."""

    name, device_kind = "fake", "cuda"

    def __init__(self):
        self.calls = []

    def unsupported(self, problem, operands, device):
        return None

    def config(self, problem, operands, device):
        return ("config",)

    def workspace_bytes(self, problem, device, config):
        return 10

    def launcher(self, problem, operands, device, config):
        self.problem, self.operands = problem, operands
        p = problem
        like_out = (p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)
        like_q = (p.batch, p.seqlen_q, p.heads_q, p.head_dim)
        like_k, like_v = ((p.batch, p.seqlen_k, p.heads_kv, d) for d in (p.head_dim, p.head_dim_v))
        shapes = {"dout": like_out, "q": like_q, "k": like_k, "v": like_v, "out": like_out}
        shapes |= {"dq": like_q, "dk": like_k, "dv": like_v}

        def at(address, name):
            strides = getattr(operands, name).strides
            return numpy_from_view(View(address, shapes[name], (*strides, 1), p.dtype, "cpu", 0, False))

        def launch(dout, q, k, v, out, lse, dlse, dq, dk, dv, workspace, stream):
            self.calls.append((stream, bool(dlse)))
            ctypes.memset(workspace, 0, 10)
            rows = np.empty((p.batch, p.heads_q, p.seqlen_q), np.float32)
            if dlse:
                ctypes.memmove(rows.ctypes.data, dlse, rows.nbytes)
            inputs = [at(x, name) for x, name in zip((dout, q, k, v), ("dout", "q", "k", "v"), strict=True)]
            exact = attention_backward_reference(*inputs, dlse=rows if dlse else None)
            for address, name, grad in zip((dq, dk, dv), ("dq", "dk", "dv"), exact, strict=True):
                at(address, name)[:] = grad

        return launch


def test_cuda_launch(cuda, monkeypatch):
    variant = FakeBackward()
    monkeypatch.setattr(select, "BACKWARD", {"fake": select.Entry("fake", "cuda")})
    monkeypatch.setattr(select, "load", lambda name, operation: variant)
    q, k, v = TARGET.inputs(b=2, m=19, n=20, hq=4, hkv=2, d=24, dv=16)
    dout, out = TARGET.draw(5, 2, 19, 4, 16), TARGET.draw(6, 2, 19, 4, 16)  # this variant needs no out and lse
    dlse, lse = TARGET.draw(7, 2, 4, 19), TARGET.draw(8, 2, 4, 19)
    wide_dout = np.repeat(dout, 2, -1)[..., ::2]
    turned = np.ascontiguousarray(dlse.swapaxes(1, 2)).swapaxes(1, 2)
    given = [FakeArray(x, 0) for x in (wide_dout, q, k, v, out, lse)]
    want = [x.astype(np.float32) for x in attention_backward_reference(dout, q, k, v, dlse=dlse)]
    for _ in range(2):
        got = cuflash.attention_backward(*given, dlse=FakeArray(turned, 0))
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a.array, b)
    allocations = [("allocate", x.shape, 0) for x in (q, k, v)] + [("copy", 0)] * 2 + [("allocate", (3,), 0)]
    assert cuda.events == allocations * 2  # the copies are of dout and dlse; ten bytes are three floats
    assert variant.calls == [(1000, True)] * 2
    assert variant.problem.has_dlse and not variant.problem.deterministic
    assert variant.operands.dout == Operand((19 * 4 * 16, 4 * 16, 16), 16)
    results = tuple(FakeArray(np.empty_like(x), 0) for x in (q, k, v))
    assert cuflash.attention_backward(*given, deterministic=True, grads=results) == results
    assert variant.calls[-1] == (1000, False) and variant.problem.deterministic
    with pytest.raises(ValueError, match="dk shares memory with k"):
        cuflash.attention_backward(*given, deterministic=True, grads=(results[0], given[2], results[2]))


def test_docstring_examples():
    tests = doctest.DocTestFinder().find(api.attention_backward, "attention_backward", globs={})
    assert sum(len(test.examples) for test in tests)
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0
