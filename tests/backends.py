"""What the shared suite runs on: one table of (framework, device, variant, dtype), and arrays in and out of each.

All data is made with NumPy and moved as bits, so that bfloat16 asks nothing of a framework but to hold it.
"""

import importlib
import re
from dataclasses import dataclass

import hypothesis
import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import select
from cuflash.reference import check_backward, check_forward

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)} | {n: np.dtype(n) for n in ("float16", "float32", "float64")}


def bits(x):
    """The memory of an array as unsigned integers, so that NaN equals NaN and -0 differs from 0."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def assert_same_bits(actual, expected, what=""):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    np.testing.assert_array_equal(bits(actual), bits(expected), err_msg=str(what))


def differing(a, b):
    """How many elements of two torch tensors differ in their bits, as a tensor: nothing is waited for."""
    torch = pytest.importorskip("torch")
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return (a.view(bits) != b.view(bits)).sum()


def leave_nan_in_free_memory(torch):
    """What is allocated next comes from CUDA memory that held NaN."""
    poison = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del poison


def on_eight_streams(torch, rounds, run):
    """Results of `run`, called on eight streams in turns without waiting in between; all are finished."""
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(8)]
    results = []
    for stream in streams * rounds:
        with torch.cuda.stream(stream):
            results.append(run())
    torch.cuda.synchronize()
    return results


class _Forbidden:
    """A variant that takes every problem and must not be reached."""

    def unsupported(self, *args):
        return None

    def config(self, *args):
        return None

    def launcher(self, *args):
        def launch(*args):
            raise AssertionError("a bad call was launched")

        return launch


def forbid_launches(monkeypatch):
    """From here on a call for which no plan was made yet fails if it gets as far as a launch."""
    monkeypatch.setattr(select, "load", lambda name, operation: _Forbidden())


def row_major(shape):
    """Strides in elements of a C-contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


# ---- one kit per framework: flat memory, strided views of it, and the way back ---------------------------------------


class NumPyLike:
    """NumPy, and CuPy, which has the same names."""

    negative_strides = True

    def __init__(self, module):
        self.xp = module
        self.array_type = module.ndarray

    def flat(self, x):
        return self.xp.asarray(bits(x).copy()).view(x.dtype)

    def view(self, flat, shape, strides, offset=0):
        size = flat.dtype.itemsize
        raw = flat.view(np.dtype(f"u{size}"))[offset:]
        return self.xp.lib.stride_tricks.as_strided(raw, shape, [s * size for s in strides]).view(flat.dtype)

    def numpy(self, x):
        raw = x.view(np.dtype(f"u{x.dtype.itemsize}"))
        return (raw if self.xp is np else self.xp.asnumpy(raw)).view(x.dtype)

    def place(self, x):
        return "cpu" if self.xp is np else f"cuda:{x.device.id}"

    def contiguous(self, x):
        return x.flags.c_contiguous


class Torch:
    negative_strides = False

    def __init__(self, torch, device):
        self.torch, self.device = torch, device
        self.array_type = torch.Tensor

    def flat(self, x):
        raw = bits(x).view(f"i{x.dtype.itemsize}").copy()
        return self.torch.from_numpy(raw).to(self.device).view(getattr(self.torch, x.dtype.name))

    def view(self, flat, shape, strides, offset=0):
        return flat.as_strided(shape, strides, offset)

    def numpy(self, x):
        dtype = DTYPES[str(x.dtype).removeprefix("torch.")]
        raw = x.view(getattr(self.torch, f"int{8 * dtype.itemsize}"))
        return raw.cpu().contiguous().numpy().view(dtype)

    def place(self, x):
        return str(x.device)

    def contiguous(self, x):
        return x.is_contiguous()


class Jax:
    """Arrays without strides: there is no ``view``."""

    negative_strides = False

    def __init__(self, jax, device):
        self.jax, self.device = jax, device
        self.array_type = jax.Array

    def make(self, x):
        return self.jax.device_put(np.array(x, order="C"), self.device)

    def numpy(self, x):
        return np.array(x)

    def place(self, x):
        return str(next(iter(x.devices())))

    def contiguous(self, x):
        return True


def _kit(framework, device):
    module = pytest.importorskip(framework, reason=f"{framework} is not installed")
    if framework in ("numpy", "cupy"):
        if framework == "cupy":
            importlib.import_module("cupy.lib.stride_tricks")
        return NumPyLike(module)
    if framework == "torch":
        if device == "cuda" and not module.cuda.is_available():
            pytest.skip("this build of torch has no CUDA")
        return Torch(module, "cpu" if device == "cpu" else "cuda:0")
    try:
        return Jax(module, module.devices("cpu" if device == "cpu" else "gpu")[0])
    except RuntimeError as error:
        pytest.skip(f"JAX has no {device} backend: {error}")


_kits = {}


@dataclass(frozen=True)
class Target:
    """A row of the table: where the arrays of a test come from, and the variant that has to compute it."""

    framework: str
    device: str
    variant: str
    dtype: str

    @property
    def id(self):
        return f"{self.framework}-{self.device}-{self.variant}-{self.dtype}"

    @property
    def np_dtype(self):
        return DTYPES[self.dtype]

    @property
    def has_strides(self):
        return self.framework != "jax"

    @property
    def kit(self):
        """The framework's kit; skips the test where the framework is missing."""
        key = self.framework, self.device
        if key not in _kits:
            _kits[key] = _kit(*key)
        return _kits[key]

    def draw(self, seed, *shape):
        """Standard normal NumPy data of the target's dtype."""
        return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(self.np_dtype)

    def inputs(self, b=1, m=64, n=64, hq=1, hkv=1, d=16, dv=None, seed=0):
        """NumPy q, k and v in bshd order."""
        shapes = (b, m, hq, d), (b, n, hkv, d), (b, n, hkv, d if dv is None else dv)
        return tuple(self.draw(3 * seed + i, *shape) for i, shape in enumerate(shapes))

    def make(self, x):
        """A C-contiguous array of the framework on the device, with the bits of a NumPy array."""
        if not self.has_strides:
            return self.kit.make(x)
        if self.variant == "sm90" and x.ndim and x.shape[-1] % 8:  # the copy engine wants rows 16 bytes apart
            padded = np.zeros((*x.shape[:-1], -(-x.shape[-1] // 8) * 8), x.dtype)
            padded[..., : x.shape[-1]] = x
            return self.kit.view(self.kit.flat(padded.reshape(-1)), x.shape, row_major(padded.shape))
        return self.kit.view(self.kit.flat(np.ascontiguousarray(x).reshape(-1)), x.shape, row_major(x.shape))

    def scatter(self, x, strides, offset=0, fill=np.nan):
        """(memory, view): `x` laid out with given strides (in elements) in a buffer that holds `fill` elsewhere."""
        reach = [step * (size - 1) for size, step in zip(x.shape, strides, strict=True)]
        start = offset - sum(min(r, 0) for r in reach)
        buffer = np.full(start + sum(max(r, 0) for r in reach) + 1 + 2 * offset + 16, fill, x.dtype)
        raw = buffer.view(f"u{x.dtype.itemsize}")
        steps = [step * x.dtype.itemsize for step in strides]
        np.lib.stride_tricks.as_strided(raw[start:], x.shape, steps)[...] = bits(x)
        memory = self.kit.flat(buffer)
        return memory, self.kit.view(memory, x.shape, strides, start)

    def call(self, q, k, v, **options):
        """Run on the framework's own arrays, check what kind of arrays come back, and return them as NumPy arrays."""
        kit = self.kit
        try:
            out, lse = cuflash.attention(q, k, v, variant=self.variant, return_lse=True, **options)
        except cuflash.UnsupportedProblem as error:
            self._skip_by_design(error)
        assert out is options.get("out", out)
        assert type(out) is type(q) and isinstance(lse, kit.array_type)
        assert out.dtype == q.dtype and tuple(out.shape) == (*q.shape[:-1], v.shape[-1])
        assert kit.place(out) == kit.place(lse) == kit.place(q)
        assert kit.contiguous(lse) and ("out" in options or kit.contiguous(out))
        out, lse = kit.numpy(out), kit.numpy(lse)
        assert out.dtype == self.np_dtype and lse.dtype == ("float64" if self.dtype == "float64" else "float32")
        return out, lse

    def _skip_by_design(self, error):
        if not (self.variant == "sm90" and re.search("TMA cannot read|no registers for softcap", str(error))):
            raise error
        if hypothesis.currently_in_test_context():
            hypothesis.reject()
        pytest.skip(f"by design: {error.reasons['sm90']}")

    def attend(self, q, k, v, **options):
        """(out, lse) of NumPy inputs, through contiguous arrays of the framework."""
        return self.call(*(self.make(x) for x in (q, k, v)), **options)

    def check(self, q, k, v, **options):
        """Run on NumPy inputs and hold the result to the error rule; returns (out, lse, ErrorReport)."""
        out, lse = self.attend(q, k, v, **options)
        return out, lse, check_forward(out, q, k, v, lse=lse, **options)

    def call_backward(self, dout, q, k, v, out, lse, **options):
        """(dq, dk, dv) of the framework's own arrays, as NumPy arrays, after a look at what kind of arrays they are."""
        kit = self.kit
        try:
            grads = cuflash.attention_backward(dout, q, k, v, out, lse, variant=self.variant, **options)
        except cuflash.UnsupportedProblem as error:
            self._skip_by_design(error)
        given = options.get("grads") or grads
        for grad, own, source in zip(grads, given, (q, k, v), strict=True):
            assert grad is own and type(grad) is type(q) and grad.dtype == q.dtype
            assert tuple(grad.shape) == tuple(source.shape) and kit.place(grad) == kit.place(q)
            assert "grads" in options or kit.contiguous(grad)
        return tuple(kit.numpy(grad) for grad in grads)

    def differentiate(self, dout, q, k, v, dlse=None, deterministic=False, **options):
        """(grads, out, lse) of NumPy inputs, through contiguous arrays of the framework."""
        out, lse = self.attend(q, k, v, **options)
        grads = self.backward(dout, q, k, v, out, lse, dlse, deterministic=deterministic, **options)
        return grads, out, lse

    def backward(self, dout, q, k, v, out, lse, dlse=None, **options):
        """(dq, dk, dv) of NumPy inputs, through contiguous arrays of the framework."""
        if dlse is not None:
            options["dlse"] = self.make(dlse)
        return self.call_backward(*(self.make(x) for x in (dout, q, k, v, out, lse)), **options)

    def check_backward(self, dout, q, k, v, dlse=None, **options):
        """Both passes on NumPy inputs, the gradients held to the error rule; returns (grads, ErrorReports)."""
        grads, out, lse = self.differentiate(dout, q, k, v, dlse, **options)
        return grads, check_backward(grads, dout, q, k, v, out, lse, dlse=dlse, **options)


def _table():
    rows = [("numpy", "cpu", "numpy", dtype) for dtype in DTYPES]
    # The other frameworks' CPU arrays run the same variant; one dtype keeps their way in and out honest.
    rows += [(framework, "cpu", "numpy", "bfloat16") for framework in ("torch", "jax")]
    rows += [(framework, "cuda", "sm80", dtype) for framework in ("cupy", "torch") for dtype in ("float16", "bfloat16")]
    rows += [("jax", "cuda", "sm80", "bfloat16")]
    rows += [("cupy", "cuda", "sm90", "bfloat16"), ("torch", "cuda", "sm90", "float16")]
    return [Target(*row) for row in rows]


TARGETS = _table()
BACKWARD_VARIANTS = ("numpy", "sm80", "sm90")


def targets(keep=lambda target: True):
    """Decorator: parametrise a test over the rows of the table that `keep` accepts."""
    return pytest.mark.parametrize(
        "target",
        [
            pytest.param(target, id=target.id, marks=[pytest.mark.gpu] if target.device == "cuda" else [])
            for target in TARGETS
            if keep(target)
        ],
    )


def backward_targets(keep=lambda target: True):
    """Like :func:`targets`, for the variants that have a backward pass."""

    def has_gradients(target):
        return target.variant in BACKWARD_VARIANTS and (target.framework, target.device) != ("jax", "cuda")

    return targets(lambda target: has_gradients(target) and keep(target))


def visible(m, n, causal=False, window=None, **_):
    """Which keys each query sees, (m, n): the contract's words in NumPy, independent of the package."""
    i, j = np.arange(m)[:, None], np.arange(n)[None, :]
    centre = i + n - m
    left, right = window or (None, None)
    mask = np.ones((m, n), bool)
    if causal:
        mask &= j <= (i if causal == "top-left" else centre)
    if left is not None:
        mask &= j >= centre - left
    if right is not None:
        mask &= j <= centre + right
    return mask


class Foreign:
    """An array of a framework that cuflash has no adapter for."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
