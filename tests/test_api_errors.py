"""Bad calls: each is refused before anything runs, with a message that names the argument and the remedy."""

import ml_dtypes
import numpy as np
import pytest
from backends import forbid_launches

import cuflash
from cuflash import api


def arr(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q = arr(2, 5, 4, 8)
K = arr(2, 7, 2, 8)
V = arr(2, 7, 2, 6)
OUT = (2, 5, 4, 6)
READ_ONLY = arr(*OUT)
READ_ONLY.flags.writeable = False
UNALIGNED = np.zeros(1281, np.uint8)[1:].view(np.float32).reshape(Q.shape)
OVERLAP_BUFFER = arr(1000)

# name: (q, k, v, options, error, pattern)
TABLE = {
    "rank 1": (arr(8), arr(8), arr(8), {}, ValueError, r"q has 1 dimensions"),
    "rank 5": (arr(1, 2, 5, 4, 8), arr(1, 2, 5, 4, 8), arr(1, 2, 5, 4, 8), {}, ValueError, r"q has 5 dimensions"),
    "rank 0": (arr(), arr(), arr(), {}, ValueError, r"q has 0 dimensions"),
    "mixed ranks": (Q, K[0], V, {}, ValueError, r"same number of dimensions; their shapes are"),
    "mixed dtypes": (Q.astype(np.float16), K, V, {}, TypeError, r"q is float16 but k is float32; cast them to"),
    "mixed dtype of v": (Q, K, V.astype(np.float64), {}, TypeError, r"q is float32 but v is float64; cast"),
    "int32": (Q.astype(np.int32), K, V, {}, TypeError, r"q has dtype int32, .* use float16, bfloat16"),
    "bool": (Q, K.astype(bool), V, {}, TypeError, r"k has dtype bool, which cuflash does not take;"),
    "complex": (Q, K, V.astype(np.complex64), {}, TypeError, r"v has dtype complex64, which cuflash does not take;"),
    "longdouble": (Q.astype(np.longdouble), K, V, {}, TypeError, r"q has dtype (float128|float96|longdouble)"),
    "object": (Q.astype(object), K, V, {}, TypeError, r"q has dtype object"),
    "fp8 e4m3fn": (Q.astype(ml_dtypes.float8_e4m3fn), K, V, {}, TypeError, r"q has dtype float8_e4m3fn, .* yet;"),
    "fp8 e5m2": (Q.astype(ml_dtypes.float8_e5m2), K, V, {}, TypeError, r"q has dtype float8_e5m2, .* not take yet;"),
    "fp4": (Q.astype(ml_dtypes.float4_e2m1fn), K, V, {}, TypeError, r"q has dtype float4_e2m1fn, .* not take yet;"),
    "byte order": (Q.astype(">f4"), K, V, {}, ValueError, r"q has dtype '>f4' in a foreign byte order; use q.astype"),
    "unaligned": (UNALIGNED, K, V, {}, ValueError, r"q is not aligned to its 4-byte elements .* pass q.copy"),
    "head ratio": (arr(2, 5, 3, 8), K, V, {}, ValueError, r"heads of q \(3\) must be a positive .* \(2\)"),
    "no heads": (Q, arr(2, 7, 0, 8), arr(2, 7, 0, 8), {}, ValueError, r"the heads of q \(4\)"),
    "heads of k and v": (Q, K, arr(2, 7, 1, 6), {}, ValueError, r"same number of heads, not 2 and 1"),
    "batch": (Q, arr(3, 7, 2, 8), V, {}, ValueError, r"one batch size, not 2, 3 and 2"),
    "batch one": (Q, arr(1, 7, 2, 8), V, {}, ValueError, r"broadcast them first"),
    "seqlen": (Q, K, arr(2, 6, 2, 6), {}, ValueError, r"same seqlen, not 7 and 6"),
    "head_dim": (Q, arr(2, 7, 2, 9), V, {}, ValueError, r"same head_dim, not 8 and 9"),
    "head_dim 0": (arr(2, 5, 4, 0), arr(2, 7, 2, 0), V, {}, ValueError, r"head_dim of q and k is 0; .* 1 and 256"),
    "head_dim 257": (arr(1, 2, 1, 257), arr(1, 2, 1, 257), arr(1, 2, 1, 8), {}, ValueError, r"of q and k is 257"),
    "head_dim of v": (Q, K, arr(2, 7, 2, 0), {}, ValueError, r"head_dim of v is 0"),
    "list": (Q.tolist(), K, V, {}, TypeError, r"q is a list, not an array; .* numpy.asarray\(q\)"),
    "list k": (Q, K.tolist(), V, {}, TypeError, r"k is a list, not an array"),
    "None": (Q, K, None, {}, TypeError, r"v is a NoneType, not an array"),
    "scalar": (1.0, K, V, {}, TypeError, r"q is a float, not an array"),
    "masked": (np.ma.masked_array(Q), K, V, {}, TypeError, r"q is a MaskedArray, a subclass .* np.asarray\(q\)"),
    "matrix": (arr(5, 8).view(np.matrix), K, V, {}, TypeError, r"q is a matrix, a subclass .* np.asarray\(q\)"),
    "scale nan": (Q, K, V, {"scale": float("nan")}, ValueError, r"scale=nan must be finite"),
    "scale inf": (Q, K, V, {"scale": float("inf")}, ValueError, r"scale=inf must be finite"),
    "scale huge": (Q, K, V, {"scale": 10**400}, ValueError, r"scale is too large for a float"),
    "scale out of range": (Q, K, V, {"scale": 1e-40}, ValueError, r"scale=1e-40 is out of range for float32"),
    "softcap out of range": (Q, K, V, {"softcap": 1e40}, ValueError, r"softcap=1e\+40 is out of range for float32"),
    "softcap far from scale": (
        Q,
        K,
        V,
        {"scale": 1e-20, "softcap": 1e20},
        ValueError,
        r"scale=1e-20 over softcap=1e\+20",
    ),
    "layout array": (Q, K, V, {"layout": [1, 2]}, ValueError, r"layout=\[1, 2\] is not known"),
    "scale str": (Q, K, V, {"scale": "big"}, TypeError, r"scale='big' must be a real number"),
    "softcap negative": (Q, K, V, {"softcap": -1.0}, ValueError, r"softcap=-1.0 must be finite"),
    "softcap nan": (Q, K, V, {"softcap": float("nan")}, ValueError, r"softcap=nan must be finite"),
    "window negative": (Q, K, V, {"window": (-1, 0)}, ValueError, r"window=\(-1, 0\): the left side must be >= 0"),
    "window float": (Q, K, V, {"window": (1, 0.5)}, TypeError, r"the right side must be an int or None, not float"),
    "window int": (Q, K, V, {"window": 3}, TypeError, r"window=3 must be None or a pair"),
    "window of three": (Q, K, V, {"window": (1, 2, 3)}, TypeError, r"must be None or a pair"),
    "layout": (Q, K, V, {"layout": "sbhd"}, ValueError, r"layout='sbhd' is not known"),
    "layout list": (Q, K, V, {"layout": ["bshd"]}, ValueError, r"layout=\['bshd'\] is not known"),
    "causal str": (Q, K, V, {"causal": "left"}, ValueError, r"causal='left' is not understood"),
    "causal int": (Q, K, V, {"causal": 1}, ValueError, r"causal=1 is not understood"),
    "variant": (Q, K, V, {"variant": "sm1"}, ValueError, r"variant='sm1' is not known; .* 'sm80', 'numpy'"),
    "variant list": (Q, K, V, {"variant": ["numpy"]}, ValueError, r"variant=\['numpy'\] is not known"),
    "out shape": (Q, K, V, {"out": arr(2, 5, 4, 8)}, ValueError, r"out has shape .* it must be \(2, 5, 4, 6\)"),
    "out dtype": (Q, K, V, {"out": arr(*OUT, dtype=np.float64)}, TypeError, r"q is float32 but out is float64"),
    "out int": (Q, K, V, {"out": arr(*OUT, dtype=np.int32)}, TypeError, r"out has dtype int32"),
    "out list": (Q, K, V, {"out": []}, TypeError, r"out is a list, not an array"),
    "out read-only": (Q, K, V, {"out": READ_ONLY}, ValueError, r"out is read-only"),
    "out is q": (Q, K, arr(2, 7, 2, 8), {"out": Q}, ValueError, r"out shares memory with q"),
    "out overlaps v": (
        arr(1, 5, 2, 6),
        arr(1, 5, 2, 6),
        OVERLAP_BUFFER[:60].reshape(1, 5, 2, 6),
        {"out": OVERLAP_BUFFER[59:119].reshape(1, 5, 2, 6)},
        ValueError,
        r"out shares memory with v",
    ),
    "out broadcast": (
        Q,
        K,
        V,
        {"out": np.lib.stride_tricks.as_strided(arr(5, 4, 6), OUT, (0, 96, 24, 4))},
        ValueError,
        r"its elements share memory",
    ),
    "out rows overlap": (
        Q,
        K,
        V,
        {"out": np.lib.stride_tricks.as_strided(arr(1000), OUT, (400, 80, 20, 4))},
        ValueError,
        r"its elements share memory",
    ),
    "out last axis": (Q, K, V, {"out": arr(2, 5, 4, 12)[..., ::2]}, ValueError, r"its last axis is not contiguous"),
}


@pytest.fixture
def nothing_runs(monkeypatch):
    """A plan table with a warm plan for the good call, and a variant that must not be reached."""
    cuflash.attention(Q, K, V)
    cuflash.attention(Q, K, V, causal=True, window=(1, 0))
    cuflash.attention(Q, K, V, window=(1, 1))
    forbid_launches(monkeypatch)


@pytest.mark.parametrize("name", TABLE)
def test_refused(name, nothing_runs):
    q, k, v, options, error, pattern = TABLE[name]
    for _ in range(2):  # a refusal must not be cached as a plan
        with pytest.raises(error, match=pattern):
            cuflash.attention(q, k, v, **options)


@pytest.mark.parametrize("name", TABLE)
def test_explain_refuses_the_same(name):
    q, k, v, options, error, pattern = TABLE[name]
    if "shares memory" in pattern:
        pytest.skip("explain takes layouts, not addresses")
    with pytest.raises(error, match=pattern):
        cuflash.explain(q, k, v, **options)


def test_spelling_that_equals_a_good_one(nothing_runs):
    """1.0 == 1 == True as dictionary keys, yet only one of them is valid here."""
    with pytest.raises(TypeError, match="must be an int or None"):
        cuflash.attention(Q, K, V, window=(1.0, 1.0))
    with pytest.raises(ValueError, match="causal=1 is"):
        cuflash.attention(Q, K, V, causal=1, window=(1, 0))


def test_variant_that_cannot_run():
    with pytest.raises(cuflash.UnsupportedProblem, match=r"^variant='sm80' cannot run this float32") as caught:
        cuflash.attention(Q, K, V, variant="sm80")
    assert set(caught.value.reasons) == {"sm80"}
    assert "runs on CUDA arrays; these are on the CPU" in caught.value.reasons["sm80"]
    assert isinstance(caught.value, NotImplementedError)


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize(
    "dtype, yet", [("float8_e4m3fn", " yet"), ("float8_e5m2", " yet"), ("int64", ""), ("complex64", ""), ("bool", "")]
)
def test_torch_dtypes(torch, dtype, yet):
    q = torch.zeros(2, 5, 2, 8).to(getattr(torch, dtype))
    with pytest.raises(TypeError, match=f"^q has dtype {dtype}, which cuflash does not take{yet};"):
        cuflash.attention(q, q, q)


def test_torch_with_numpy(torch):
    q = torch.from_numpy(Q)
    with pytest.raises(TypeError, match=r"q is a torch array but k is a NumPy array \(ndarray\); pass arrays of one"):
        cuflash.attention(q, K, V)
    with pytest.raises(TypeError, match="q is a NumPy array but v is a torch array"):
        cuflash.attention(Q, K, torch.from_numpy(V))
    with pytest.raises(TypeError, match="q is a NumPy array but out is a torch array"):
        cuflash.attention(Q, K, V, out=torch.zeros(OUT))


def test_torch_without_data(torch):
    meta = torch.zeros(2, 5, 2, 8, device="meta")
    with pytest.raises(ValueError, match=r"q is on the meta device and has no data"):
        cuflash.attention(meta, meta, meta)
    with pytest.raises(ValueError, match="k is on the meta device"):
        cuflash.attention(torch.zeros(2, 5, 2, 8), meta, meta)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(2, 5, 2, 8)
    with pytest.raises(TypeError, match="q is a FakeTensor, which has no data"):
        cuflash.attention(fake, fake, fake)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_torch_sparse_and_quantised(torch):
    sparse = torch.zeros(5, 8).to_sparse()
    with pytest.raises(ValueError, match=r"q has layout torch.sparse_coo; .* q.to_dense\(\)"):
        cuflash.attention(sparse, sparse, sparse)
    quantised = torch.quantize_per_tensor(torch.zeros(5, 8), 0.1, 0, torch.quint8)
    with pytest.raises(TypeError, match=r"q is quantised .* q.dequantize\(\)"):
        cuflash.attention(quantised, quantised, quantised)


def test_torch_gradients_subclasses_and_transforms(torch):
    q = torch.zeros(5, 8)
    with pytest.raises(ValueError, match=r"v requires gradients.*torch.no_grad\(\) or pass v.detach\(\)"):
        cuflash.attention(q, q, torch.zeros(5, 8, requires_grad=True))
    with pytest.raises(ValueError, match="out requires gradients"):
        cuflash.attention(q, q, q, out=torch.zeros(5, 8, requires_grad=True))

    class Special(torch.Tensor):
        pass

    with pytest.raises(TypeError, match=r"q is a Special, a subclass .* q.as_subclass\(torch.Tensor\)"):
        cuflash.attention(q.as_subclass(Special), q, q)
    with pytest.raises(ValueError, match="no memory of its own"):
        torch.vmap(lambda x: cuflash.attention(x, x, x))(torch.zeros(3, 5, 8))


# ---- JAX -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


def test_jax_refusals(jax):
    q = jax.numpy.zeros((5, 8))
    with pytest.raises(TypeError, match="JAX arrays are immutable; leave out as None"):
        cuflash.attention(q, q, q, out=q)
    with pytest.raises(TypeError, match=r"q is a JAX tracer; call cuflash.attention outside jax.jit"):
        jax.jit(lambda x: cuflash.attention(x, x, x))(q)
    with pytest.raises(TypeError, match="q is a JAX array but k is a NumPy array"):
        cuflash.attention(q, np.zeros((5, 8), np.float32), q)
    eight_bits = q.astype("float8_e4m3fn")
    with pytest.raises(TypeError, match="q has dtype float8_e4m3fn, which cuflash does not take yet;"):
        cuflash.attention(eight_bits, eight_bits, eight_bits)
    gone = q + 1
    gone.delete()
    with pytest.raises(ValueError, match="k is a JAX array that was deleted or donated"):
        cuflash.attention(q, gone, q)


def test_jax_sharded():
    pytest.importorskip("jax")
    import os
    import subprocess
    import sys

    code = (
        "import jax, cuflash\n"
        "mesh = jax.sharding.Mesh(jax.devices(), ('x',))\n"
        "place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))\n"
        "q = jax.device_put(jax.numpy.zeros((4, 8)), place)\n"
        "try:\n    cuflash.attention(q, q, q)\n"
        "except ValueError as error:\n    assert 'q is sharded over 2 devices' in str(error), error\n"
        "else:\n    raise SystemExit('accepted')\n"
        "on_second = jax.device_put(jax.numpy.zeros((4, 8)), jax.devices()[1])\n"
        "assert cuflash.attention(on_second, on_second, on_second).devices() == {jax.devices()[1]}\n"
    )
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


# ---- DLPack ----------------------------------------------------------------------------------------------------------


class Exporter:
    def __init__(self, array, device=None):
        self.array, self.device = array, device

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()


def test_dlpack_refusals():
    q, k, v = Exporter(Q), Exporter(K), Exporter(V)
    with pytest.raises(TypeError, match="q has dtype int32"):
        cuflash.attention(Exporter(Q.astype(np.int32)), k, v)
    with pytest.raises(ValueError, match="out is read-only"):
        cuflash.attention(q, k, v, out=Exporter(READ_ONLY))
    with pytest.raises(ValueError, match="q is on a ROCm device"):
        cuflash.attention(Exporter(Q, (10, 0)), k, v)
    with pytest.raises(TypeError, match=r"q is a DLPack array but k is a NumPy array"):
        cuflash.attention(q, K, v)


def test_refusals_leave_no_plan(monkeypatch):
    monkeypatch.setattr(api, "_PLANS", {})
    for q, k, v, options, error, pattern in TABLE.values():
        if "shares memory" not in pattern:
            with pytest.raises(error):
                cuflash.attention(q, k, v, **options)
    assert api._PLANS == {}
