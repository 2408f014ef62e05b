"""One adapter per array framework: how to look at its arrays, allocate new ones and find its current stream.

No framework is ever imported here unless the caller has already done so: an adapter is found from the type of an
array, once per type. Each takes the cheapest public route that its framework offers; DLPack is the route for the rest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cuflash.dlpack import device_of, foreign_device, from_dlpack_capsule
from cuflash.problem import DTYPES
from cuflash.view import View


def check_dtype(name: str, dtype: str) -> None:
    """Refuse the dtypes that no variant computes in, naming them.

    Raises
    ------
    TypeError
    """
    if dtype not in DTYPES:
        yet = " yet" if dtype.startswith(("float8", "float6", "float4")) else ""
        remedy = "use float16, bfloat16, float32 or float64"
        raise TypeError(f"{name} has dtype {dtype}, which cuflash does not take{yet}; {remedy}")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of one of ``DTYPES``; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


class _Exposed:
    """Memory described by a View, in the form that NumPy imports without copying; keeps the view alive."""

    def __init__(self, view: View, typestr: str, itemsize: int) -> None:
        self.view = view
        self.__array_interface__ = {
            "shape": view.shape,
            "strides": tuple(stride * itemsize for stride in view.strides),
            "typestr": typestr,
            "data": (view.pointer, view.read_only),
            "version": 3,
        }


def numpy_from_view(view: View) -> np.ndarray[Any, Any]:
    """A NumPy array over the memory of a CPU view (no copy)."""
    dtype = numpy_dtype(view.dtype)
    if not math.prod(view.shape):
        return np.empty(view.shape, dtype)
    # NumPy's interface has no letter for bfloat16: pass bits, then name them.
    bits = f"<u{dtype.itemsize}" if sys.byteorder == "little" else f">u{dtype.itemsize}"
    return np.asarray(_Exposed(view, bits, dtype.itemsize)).view(dtype)


class Adapter:
    """What the rest of cuflash needs from one framework.

    Attributes
    ----------
    framework : str
        Its name in errors.
    immutable : bool
        Whether its arrays cannot be written, so that ``out`` is refused.
    """

    framework = "array"
    immutable = False

    def facts(self, x: Any, name: str) -> tuple[int, Hashable]:
        """Address and everything else that a plan depends on; the per-call part of looking at an array."""
        raise NotImplementedError

    def view(self, x: Any, name: str) -> View:
        """Full description, with the refusals that need to be made only once per plan."""
        raise NotImplementedError

    def copy_reason(self, x: Any, view: View) -> str | None:
        """Why the kernels need a compact copy of an input, or None when they read it in place."""
        if view.shape and view.shape[-1] > 1 and view.strides[-1] != 1:
            return f"its last axis is not contiguous (stride {view.strides[-1]} elements)"
        if view.device_kind == "cuda" and any(s < 0 and n > 1 for s, n in zip(view.strides, view.shape, strict=True)):
            return f"it has negative strides {view.strides}"
        return None

    def contiguous(self, x: Any) -> Any:
        """A C-contiguous copy in the same framework and on the same device."""
        raise NotImplementedError

    def allocator(self, shape: tuple[int, ...], dtype: str, like: Any) -> Callable[[], Any]:
        """A function that allocates an uninitialised array beside `like`; it does not keep `like` alive."""
        raise NotImplementedError

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """A NumPy array over a CPU array's memory (for outputs: writable, no copy)."""
        raise NotImplementedError

    def publish(self, x: Any, like: Any) -> Any:
        """Turn what :meth:`allocator` made into what the caller gets, once it is filled."""
        return x

    def wrote(self, x: Any) -> None:
        """Tell the framework that the caller's `out` was written behind its back."""

    def address(self, x: Any) -> int:
        """Address of a CUDA array's first element."""
        raise NotImplementedError

    def stream(self, device_index: int) -> int:
        """Address of the framework's current CUDA stream on a device."""
        raise NotImplementedError

    def current_device(self) -> int:
        """CUDA ordinal that the calling thread has selected."""
        raise NotImplementedError

    def device(self, device_index: int) -> AbstractContextManager[Any]:
        """Select a CUDA device for the duration of a ``with`` block."""
        return nullcontext()


def _element_strides(x: Any, pointer: int, name: str) -> tuple[int, ...]:
    """Strides in elements of a NumPy or CuPy array, refusing those that kernels cannot address."""
    itemsize = x.dtype.itemsize
    if pointer % itemsize or any(stride % itemsize for stride in x.strides):
        layout = f"strides {x.strides} bytes from address {pointer:#x}"
        raise ValueError(f"{name} is not aligned to its {itemsize}-byte elements ({layout}); pass {name}.copy()")
    return tuple(stride // itemsize for stride in x.strides)


class NumPyAdapter(Adapter):
    framework = "NumPy"

    def facts(self, x: Any, name: str) -> tuple[int, Hashable]:
        return x.ctypes.data, (x.shape, x.strides, x.dtype, x.flags.writeable)

    def view(self, x: Any, name: str) -> View:
        dtype = x.dtype
        if not dtype.isnative:
            remedy = f"use {name}.astype({name}.dtype.newbyteorder('='))"
            raise ValueError(f"{name} has dtype {dtype.str!r} in a foreign byte order; {remedy}")
        check_dtype(name, dtype.name)
        strides = _element_strides(x, x.ctypes.data, name)
        return View(x.ctypes.data, x.shape, strides, dtype.name, "cpu", 0, not x.flags.writeable, x)

    def contiguous(self, x: Any) -> Any:
        return np.ascontiguousarray(x)

    def allocator(self, shape: tuple[int, ...], dtype: str, like: Any) -> Callable[[], Any]:
        return partial(np.empty, shape, numpy_dtype(dtype))

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x)


class CuPyAdapter(Adapter):
    framework = "CuPy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._current_stream = cupy.cuda.get_current_stream
        self.current_device = cupy.cuda.runtime.getDevice  # type: ignore[method-assign]

    def facts(self, x: Any, name: str) -> tuple[int, Hashable]:
        data = x.data
        return data.ptr, (x.shape, x.strides, x.dtype, data.device_id)

    def view(self, x: Any, name: str) -> View:
        if self._cupy.cuda.runtime.is_hip:
            raise foreign_device(name, "ROCm")
        dtype = x.dtype
        check_dtype(name, dtype.name)
        strides = _element_strides(x, x.data.ptr, name)
        return View(x.data.ptr, x.shape, strides, dtype.name, "cuda", x.data.device_id, False, x)

    def contiguous(self, x: Any) -> Any:
        if x.dtype.itemsize == 2:  # copy bits, so that bfloat16 needs no arithmetic support in CuPy
            return self._cupy.ascontiguousarray(x.view(np.uint16)).view(x.dtype)
        return self._cupy.ascontiguousarray(x)

    def allocator(self, shape: tuple[int, ...], dtype: str, like: Any) -> Callable[[], Any]:
        # The constructor is what cupy.empty calls, at a third of its cost.
        return partial(self._cupy.ndarray, shape, numpy_dtype(dtype))

    def address(self, x: Any) -> int:
        return x.data.ptr  # type: ignore[no-any-return]

    def stream(self, device_index: int) -> int:
        return int(self._current_stream().ptr)  # the caller has selected the device

    def device(self, device_index: int) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self._cupy.cuda.Device(device_index)
        return device


class TorchAdapter(Adapter):
    framework = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._grad_enabled = torch.is_grad_enabled
        self._forward_ad = torch.autograd.forward_ad
        self.address = torch.Tensor.data_ptr  # type: ignore[method-assign]
        # The public spellings of these two cost 7 us and 0.5 us; these are what torch's own generated code calls.
        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.stream = raw_stream or (lambda index: torch.cuda.current_stream(index).cuda_stream)  # type: ignore[method-assign]
        self.current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)  # type: ignore[method-assign]

    def facts(self, x: Any, name: str) -> tuple[int, Hashable]:
        if x.requires_grad and self._grad_enabled():
            raise ValueError(
                f"{name} requires gradients, which cuflash does not record; "
                f"call it under torch.no_grad() or pass {name}.detach()"
            )
        forward_ad = self._forward_ad
        if getattr(forward_ad, "_current_level", -1) >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(f"{name} has a forward-mode tangent, which cuflash would drop; pass its primal")
        try:
            return x.data_ptr(), (x.shape, x.stride(), x.dtype, x.device, x.is_neg())
        except RuntimeError as error:
            self._check_dense(x, name)
            raise ValueError(
                f"{name} is a torch tensor with no memory of its own (inside torch.func or a trace); "
                "call cuflash.attention outside the transform"
            ) from error

    def _check_dense(self, x: Any, name: str) -> None:
        if x.layout is not self._torch.strided:
            raise ValueError(f"{name} has layout {x.layout}; pass a dense tensor, for example {name}.to_dense()")
        if x.is_quantized:
            raise TypeError(f"{name} is quantised ({x.dtype}); pass {name}.dequantize()")

    def view(self, x: Any, name: str) -> View:
        self._check_dense(x, name)
        kind, hip = x.device.type, getattr(self._torch.version, "hip", None)
        if kind == "meta":
            raise ValueError(f"{name} is on the meta device and has no data; pass a tensor on the CPU or on a CUDA GPU")
        if kind not in ("cpu", "cuda") or (kind == "cuda" and hip):
            raise foreign_device(name, "ROCm" if hip else kind)
        dtype = str(x.dtype).removeprefix("torch.")
        check_dtype(name, dtype)
        return View(x.data_ptr(), tuple(x.shape), tuple(x.stride()), dtype, kind, x.device.index or 0, False, x)

    def copy_reason(self, x: Any, view: View) -> str | None:
        if x.is_neg():
            return "its negative bit is set (the memory holds the opposite sign)"
        return super().copy_reason(x, view)

    def contiguous(self, x: Any) -> Any:
        return x.resolve_neg().contiguous()

    def allocator(self, shape: tuple[int, ...], dtype: str, like: Any) -> Callable[[], Any]:
        return partial(self._torch.empty, shape, dtype=getattr(self._torch, dtype), device=like.device)

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        return numpy_from_view(self.view(x, "tensor"))

    def wrote(self, x: Any) -> None:
        if not x.is_inference():  # autograd must notice a tensor that it saved and that has changed since
            self._torch.autograd.graph.increment_version(x)

    def device(self, device_index: int) -> AbstractContextManager[Any]:
        device: AbstractContextManager[Any] = self._torch.cuda.device(device_index)
        return device


class DLPackAdapter(Adapter):
    """Any other array with ``__dlpack__``: taken as a NumPy array on the CPU or a CuPy array on a GPU."""

    framework = "DLPack"

    def native(self, x: Any, name: str, written: bool = False) -> Any:
        """The same memory as a NumPy or CuPy array."""
        kind, index = device_of(x, name)
        if kind == "cpu":
            view = from_dlpack_capsule(x, name=name)
        else:
            import cupy

            with cupy.cuda.Device(index):
                view = from_dlpack_capsule(x, stream=cupy.cuda.get_current_stream().ptr, name=name)
        check_dtype(name, view.dtype)
        if written and view.read_only:
            raise ValueError(f"{name} is read-only; pass an array that can be written")
        return numpy_from_view(view) if kind == "cpu" else _cupy_from_view(view)


def _cupy_from_view(view: View) -> Any:
    """A CuPy array over the memory of a CUDA view (no copy)."""
    import cupy

    dtype = numpy_dtype(view.dtype)
    if not math.prod(view.shape):
        with cupy.cuda.Device(view.device_index):
            return cupy.empty(view.shape, dtype)
    low, high = view_extent(view, dtype.itemsize)
    memory = cupy.cuda.UnownedMemory(view.pointer + low, high - low, view, view.device_index)
    strides = tuple(stride * dtype.itemsize for stride in view.strides)
    return cupy.ndarray(view.shape, dtype, cupy.cuda.MemoryPointer(memory, -low), strides)


def view_extent(view: View, itemsize: int) -> tuple[int, int]:
    """First byte and one past the last byte of an array, relative to its pointer; (0, 0) when it has no element."""
    if not math.prod(view.shape):
        return (0, 0)
    reach = [stride * (size - 1) * itemsize for stride, size in zip(view.strides, view.shape, strict=True)]
    return sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach) + itemsize


@lru_cache
def _jax_adapter(jax: Any) -> Adapter:
    from cuflash.arrays_jax import JaxAdapter

    return JaxAdapter(jax)


_BY_TYPE: dict[type, Adapter] = {}
_NUMPY = NumPyAdapter()
_DLPACK = DLPackAdapter()
_cupy_adapter = lru_cache(CuPyAdapter)
_torch_adapter = lru_cache(TorchAdapter)


def adapter_of(x: Any, name: str) -> Adapter:
    """The adapter for an array, found from its type and remembered by type.

    Raises
    ------
    TypeError
        If it is no array, or a subclass whose meaning cuflash would lose.
    """
    adapter = _BY_TYPE.get(type(x))
    if adapter is None:
        adapter = _BY_TYPE[type(x)] = _find(x, name)
    return adapter


def _find(x: Any, name: str) -> Adapter:
    cls = type(x)
    if isinstance(x, np.ndarray):
        return _exact(name, cls, (np.ndarray, np.memmap), f"np.asarray({name})", _NUMPY)
    cupy, torch, jax = (sys.modules.get(root) for root in ("cupy", "torch", "jax"))
    if cupy is not None and isinstance(x, getattr(cupy, "ndarray", ())):
        return _exact(name, cls, (cupy.ndarray,), f"cupy.asarray({name})", _cupy_adapter(cupy))
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        if cls.__name__ in ("FakeTensor", "FunctionalTensor"):
            raise TypeError(f"{name} is a {cls.__name__}, which has no data; call cuflash.attention outside the trace")
        plain = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
        return _exact(name, cls, plain, f"{name}.as_subclass(torch.Tensor)", _torch_adapter(torch))
    if jax is not None and isinstance(x, getattr(jax, "Array", ())):
        if isinstance(x, jax.core.Tracer):
            raise TypeError(f"{name} is a JAX tracer; call cuflash.attention outside jax.jit, grad and vmap for now")
        return _jax_adapter(jax)
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        return _DLPACK
    raise TypeError(
        f"{name} is a {cls.__name__}, not an array; pass a NumPy, CuPy, torch or JAX array or any with __dlpack__, "
        f"for example numpy.asarray({name})"
    )


def _exact(name: str, cls: type, plain: tuple[type, ...], remedy: str, adapter: Adapter) -> Adapter:
    """Subclasses (masked arrays, matrices, units, distributed tensors) carry a meaning that would be lost."""
    if cls not in plain:
        raise TypeError(
            f"{name} is a {cls.__name__}, a subclass of {plain[0].__name__} whose meaning would be lost; pass {remedy}"
        )
    return adapter
