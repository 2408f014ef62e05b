"""Reading arrays of any framework through DLPack, with our own decoder of the capsule.

Owning the decoder lets bfloat16, read-only and odd-strided arrays in, and lets the types that cuflash does not
take be refused by name; the importers of NumPy and CuPy do neither.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from cuflash.view import DeviceKind, View

MAX_VERSION = (1, 1)

# The structs of dlpack.h (major version 1), each above its ctypes twin.


# typedef struct { DLDeviceType device_type; int32_t device_id; } DLDevice;
class DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


# typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


# typedef struct {
#   void* data; DLDevice device; int32_t ndim; DLDataType dtype;
#   int64_t* shape; int64_t* strides;  /* strides in elements; NULL for compact row-major */
#   uint64_t byte_offset;
# } DLTensor;
class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# typedef struct DLManagedTensor {
#   DLTensor dl_tensor; void* manager_ctx; void (*deleter)(struct DLManagedTensor* self);
# } DLManagedTensor;
class DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


# typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;
class DLPackVersion(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


# struct DLManagedTensorVersioned {
#   DLPackVersion version; void* manager_ctx; void (*deleter)(struct DLManagedTensorVersioned* self);
#   uint64_t flags; DLTensor dl_tensor;
# };
class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("version", DLPackVersion),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


_FLAG_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

# DLDeviceType values whose memory the CPU or a CUDA kernel can use (pinned and managed memory included).
_DEVICE_KINDS: dict[int, DeviceKind] = {1: "cpu", 3: "cpu", 2: "cuda", 13: "cuda"}
_FOREIGN_DEVICES = {
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    9: "VPI",
    10: "ROCm",
    11: "ROCm host",
    12: "extension",
    14: "oneAPI",
    15: "WebGPU",
    16: "Hexagon",
    17: "MAIA",
    18: "Trainium",
}

# DLDataTypeCode values of the narrow floats; each has one width.
_NARROW_FLOATS = {
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    15: "float6_e2m3fn",
    16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}
_SIZED = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL = 6

# A handle of our own: argument types set on ctypes.pythonapi itself would be shared with every other user of it.
_PYTHON = ctypes.PyDLL("python", handle=ctypes.pythonapi._handle)
_PYTHON.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_PYTHON.PyCapsule_IsValid.restype = ctypes.c_int
_PYTHON.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p


def from_dlpack_capsule(obj: Any, *, stream: int | None = None, name: str = "array") -> View:
    """Describe an array that implements ``__dlpack__``, without copying it.

    Parameters
    ----------
    obj : object
        Any array with ``__dlpack__`` and ``__dlpack_device__``.
    stream : int, optional
        Address of the CUDA stream that the data will be used on (0 stands for the legacy default stream); the producer
        makes that stream wait for its own work. Not passed on for CPU arrays.
    name : str, optional
        What to call the array in errors.

    Returns
    -------
    View
        Its `dtype` is any type that DLPack can name, not only those that cuflash computes with. Its `owner` is the
        capsule, which is never consumed: its own destructor releases the memory once the view is dropped.

    Raises
    ------
    ValueError
        If the array is on a device other than CPU and CUDA, cannot be exported, or has no memory behind it.
    """
    kind, index = device_of(obj, name)
    capsule = _export(obj, kind, stream, name)
    tensor, read_only = _tensor_of(capsule, name)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else row_major(shape)
    if not tensor.data and math.prod(shape):
        raise ValueError(f"{name} has shape {shape} but no memory (a fake or traced array); pass an array with data")
    pointer = (tensor.data or 0) + tensor.byte_offset if math.prod(shape) else 0
    return View(pointer, shape, strides, _dtype_name(tensor.dtype), kind, index, read_only, capsule)


def device_of(obj: Any, name: str) -> tuple[DeviceKind, int]:
    """The array's device from ``__dlpack_device__``, refusing by name those that cuflash does not run on."""
    device_type, device_id = (int(field) for field in obj.__dlpack_device__())
    kind = _DEVICE_KINDS.get(device_type)
    if kind is None:
        device = _FOREIGN_DEVICES.get(device_type, f"DLPack type-{device_type}")
        raise foreign_device(name, device)
    return kind, (0 if kind == "cpu" else device_id)


def foreign_device(name: str, kind: str) -> ValueError:
    """The error for an array on a device that cuflash does not run on."""
    return ValueError(f"{name} is on a {kind} device; cuflash runs on the CPU and on CUDA GPUs, so move {name} to one")


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _export(obj: Any, kind: DeviceKind, stream: int | None, name: str) -> Any:
    """Ask for a versioned capsule, then for an old one from producers that do not know the keyword."""
    # DLPack forbids stream 0 for CUDA as ambiguous: 1 is the legacy default stream.
    keywords = {} if kind == "cpu" or stream is None else {"stream": stream or 1}
    try:
        try:
            return obj.__dlpack__(**keywords, max_version=MAX_VERSION)
        except TypeError:
            return obj.__dlpack__(**keywords)
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"{name} ({type(obj).__name__}) cannot be read through DLPack: {error}") from error


def _tensor_of(capsule: Any, name: str) -> tuple[DLTensor, bool]:
    """The DLTensor inside a capsule that nobody has consumed, and whether it is read-only."""
    if _PYTHON.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        address = _PYTHON.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        managed = DLManagedTensorVersioned.from_address(address)
        if managed.version.major != MAX_VERSION[0]:
            raise ValueError(f"{name} exports DLPack {managed.version.major}; cuflash reads version {MAX_VERSION[0]}")
        return managed.dl_tensor, bool(managed.flags & _FLAG_READ_ONLY)
    if _PYTHON.PyCapsule_IsValid(capsule, b"dltensor"):
        return DLManagedTensor.from_address(_PYTHON.PyCapsule_GetPointer(capsule, b"dltensor")).dl_tensor, False
    raise ValueError(f"{name}.__dlpack__() returned {capsule!r}, which is not an unused DLPack capsule")


def _dtype_name(dtype: DLDataType) -> str:
    code, bits = dtype.code, dtype.bits
    if code == _BOOL:
        name = "bool"
    elif code in _NARROW_FLOATS:
        name = _NARROW_FLOATS[code]
    elif code in _SIZED:
        name = f"{_SIZED[code]}{bits}"
    else:
        name = f"dlpack({code},{bits})"
    return name if dtype.lanes == 1 else f"{name}x{dtype.lanes}"
