"""The DLPack decoder: layouts, dtypes, lifetimes and refusals."""

import ctypes
import gc
import sys
import weakref

import numpy as np
import pytest

from cuflash.dlpack import (
    DLDataType,
    DLDevice,
    DLManagedTensor,
    DLManagedTensorVersioned,
    DLPackVersion,
    DLTensor,
    from_dlpack_capsule,
    row_major,
)

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
# The dying capsule must not be turned into a Python object again, hence the bare addresses.
PYTHON = ctypes.PyDLL("python", handle=ctypes.pythonapi._handle)
PYTHON.PyCapsule_New.restype = ctypes.py_object
PYTHON.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
PYTHON.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
PYTHON.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
PYTHON.PyCapsule_GetPointer.restype = ctypes.c_void_p


class Producer:
    """A hand-made exporter that counts calls of its deleter, as a framework written in C would make it."""

    def __init__(
        self, array, *, version=(1, 0), strides=True, flags=0, offset=0, device=(1, 0), dtype=(2, 32, 1), null=False
    ):
        self.array, self.device, self.version, self.deleted, self.asked = array, device, version, [], []
        ndim = array.ndim
        self.shape = (ctypes.c_int64 * ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * ndim)(*(s // array.itemsize for s in array.strides))
        tensor = DLTensor(
            None if null else array.ctypes.data - offset,
            DLDevice(*device),
            ndim,
            DLDataType(*dtype),
            self.shape,
            self.strides if strides else None,
            offset,
        )
        self.deleter = DELETER(self.deleted.append)
        address = ctypes.cast(self.deleter, ctypes.c_void_p)
        if version is None:
            self.name, self.managed = b"dltensor", DLManagedTensor(tensor, None, address)
        else:
            self.name = b"dltensor_versioned"
            self.managed = DLManagedTensorVersioned(DLPackVersion(*version), None, address, flags, tensor)
        self.destructor = DELETER(self._destroy)

    def _destroy(self, capsule):
        if PYTHON.PyCapsule_IsValid(capsule, self.name):
            pointer = PYTHON.PyCapsule_GetPointer(capsule, self.name)
            self.deleter(pointer)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        if self.version is None and "max_version" in keywords:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        destructor = ctypes.cast(self.destructor, ctypes.c_void_p)
        return PYTHON.PyCapsule_New(ctypes.addressof(self.managed), self.name, destructor)


BLOCK = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("version", [None, (1, 0), (1, 9)])
def test_deleter_runs_once_when_the_view_is_dropped(version):
    producer = Producer(BLOCK, version=version)
    view = from_dlpack_capsule(producer)
    gc.collect()
    assert producer.deleted == []
    assert (view.pointer, view.shape, view.strides) == (BLOCK.ctypes.data, (2, 3, 4), (12, 4, 1))
    del view
    gc.collect()
    assert producer.deleted == [ctypes.addressof(producer.managed)]


def test_numpy_array_lives_as_long_as_the_view():
    array = np.ones(5)
    gone = weakref.ref(array)
    before = sys.getrefcount(array)
    view = from_dlpack_capsule(array)
    assert sys.getrefcount(array) == before + 1
    del array
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_byte_offset_and_null_strides():
    view = from_dlpack_capsule(Producer(BLOCK, offset=48, strides=False))
    assert view.pointer == BLOCK.ctypes.data
    assert view.strides == (12, 4, 1)


def test_strides_of_every_sign():
    array = np.broadcast_to(BLOCK[::-1, None, ::2], (2, 7, 2, 4))
    view = from_dlpack_capsule(array)
    assert view.strides == (-12, 0, 8, 1)
    assert view.pointer == array.ctypes.data


@pytest.mark.parametrize("flags, read_only", [(0, False), (1, True), (2, False), (3, True)])
def test_read_only_flag(flags, read_only):
    assert from_dlpack_capsule(Producer(BLOCK, flags=flags)).read_only is read_only


def test_numpy_read_only():
    array = BLOCK.copy()
    array.flags.writeable = False
    assert from_dlpack_capsule(array).read_only


def test_old_producer_is_asked_again_without_the_version():
    producer = Producer(BLOCK, version=None)
    from_dlpack_capsule(producer)
    assert producer.asked == [{"max_version": (1, 1)}, {}]


@pytest.mark.parametrize("stream, passed", [(7, 7), (0, 1), (1, 1)])
def test_stream_goes_to_cuda_producers_only(stream, passed):
    on_gpu = Producer(BLOCK, device=(2, 3))
    view = from_dlpack_capsule(on_gpu, stream=stream)
    assert on_gpu.asked == [{"stream": passed, "max_version": (1, 1)}]
    assert (view.device_kind, view.device_index) == ("cuda", 3)
    on_cpu = Producer(BLOCK)
    from_dlpack_capsule(on_cpu, stream=stream)
    assert "stream" not in on_cpu.asked[0]


@pytest.mark.parametrize("device, kind", [((1, 0), "cpu"), ((3, 2), "cpu"), ((2, 1), "cuda"), ((13, 1), "cuda")])
def test_devices(device, kind):
    assert from_dlpack_capsule(Producer(BLOCK, device=device)).device_kind == kind


@pytest.mark.parametrize("device, name", [((10, 0), "ROCm"), ((8, 0), "Metal"), ((99, 0), "type-99")])
def test_foreign_devices_are_refused_by_name(device, name):
    with pytest.raises(ValueError, match=rf"^q is on a .*{name} device"):
        from_dlpack_capsule(Producer(BLOCK, device=device), name="q")


@pytest.mark.parametrize(
    "dtype, name",
    [
        ((2, 16, 1), "float16"),
        ((2, 32, 1), "float32"),
        ((2, 64, 1), "float64"),
        ((4, 16, 1), "bfloat16"),
        ((10, 8, 1), "float8_e4m3fn"),
        ((12, 8, 1), "float8_e5m2"),
        ((14, 8, 1), "float8_e8m0fnu"),
        ((17, 4, 1), "float4_e2m1fn"),
        ((17, 4, 2), "float4_e2m1fnx2"),
        ((0, 32, 1), "int32"),
        ((1, 8, 1), "uint8"),
        ((5, 64, 1), "complex64"),
        ((6, 8, 1), "bool"),
        ((2, 32, 4), "float32x4"),
        ((77, 8, 1), "dlpack(77,8)"),
    ],
)
def test_dtype_names(dtype, name):
    assert from_dlpack_capsule(Producer(BLOCK, dtype=dtype)).dtype == name


def test_no_memory_is_refused_unless_empty():
    with pytest.raises(ValueError, match=r"k has shape .* but no memory"):
        from_dlpack_capsule(Producer(BLOCK, null=True), name="k")
    assert from_dlpack_capsule(Producer(BLOCK[:0], null=True)).pointer == 0


def test_newer_major_version_is_refused():
    with pytest.raises(ValueError, match="DLPack 2"):
        from_dlpack_capsule(Producer(BLOCK, version=(2, 0)))


def test_used_capsule_is_refused():
    producer = Producer(BLOCK)
    producer.name = b"used_dltensor_versioned"
    with pytest.raises(ValueError, match="not an unused DLPack capsule"):
        from_dlpack_capsule(producer)


def test_numpy_scalar_array():
    view = from_dlpack_capsule(np.array(3.0))
    assert (view.shape, view.strides) == ((), ())


def test_export_errors_name_the_array():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"^v \(Tensor\) cannot be read through DLPack"):
        from_dlpack_capsule(torch.ones(2, requires_grad=True), name="v")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float64"])
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, 4).to(getattr(torch, dtype)).T
    view = from_dlpack_capsule(tensor)
    assert (view.pointer, view.shape, view.strides, view.dtype) == (tensor.data_ptr(), (4, 3), (1, 4), dtype)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_torch_fake_tensor_has_no_memory():
    pytest.importorskip("torch")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 3)
    with pytest.raises(ValueError):
        from_dlpack_capsule(fake)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
def test_jax(dtype):
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.zeros((3, 4), dtype)
    view = from_dlpack_capsule(array)
    assert view.pointer == array.unsafe_buffer_pointer()
    assert (view.shape, view.strides, view.dtype) == ((3, 4), (4, 1), dtype)


@pytest.mark.parametrize("shape, strides", [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (4, 4, 1))])
def test_row_major(shape, strides):
    assert row_major(shape) == strides
