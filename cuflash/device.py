"""Facts about CUDA devices: asked of the driver through CuPy, or known by heart where there is no GPU."""

from __future__ import annotations

import functools
import re

from cuflash.variants.base import DeviceInfo

_KIB = 1024

# Shared memory from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": per block, and
# per multiprocessor (1 KiB more, which the system keeps for each block). Then the multiprocessors of a typical product.
_KNOWN = {
    (8, 0): ("NVIDIA A100", 163 * _KIB, 164 * _KIB, 108),
    (8, 6): ("NVIDIA A40", 99 * _KIB, 100 * _KIB, 84),
    (8, 7): ("NVIDIA Jetson Orin", 163 * _KIB, 164 * _KIB, 16),
    (8, 9): ("NVIDIA L40S", 99 * _KIB, 100 * _KIB, 142),
    (9, 0): ("NVIDIA H200", 227 * _KIB, 228 * _KIB, 132),
    (10, 0): ("NVIDIA B200", 227 * _KIB, 228 * _KIB, 148),
    (10, 3): ("NVIDIA B300", 227 * _KIB, 228 * _KIB, 148),
    (12, 0): ("NVIDIA GeForce RTX 5090", 99 * _KIB, 100 * _KIB, 170),
}
ARCHITECTURES = tuple("sm_{}{}".format(*capability) for capability in _KNOWN)
_NOT_THERE = -1  # index of a device that is known only by heart
_SPELLING = re.compile(r"(?:sm_)?(\d+)\.?(\d)[af]?")


@functools.cache
def device_info(index: int) -> DeviceInfo:
    """What selection and tiling need to know of CUDA device `index`; asked once per device.

    Raises
    ------
    ImportError
        When CuPy is not installed.
    cupy.cuda.runtime.CUDARuntimeError
        When there is no driver or no such device.
    """
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(index)
    return DeviceInfo(
        kind="cuda",
        index=index,
        name=properties["name"].decode(),
        compute_capability=(properties["major"], properties["minor"]),
        shared_memory=properties["sharedMemPerBlockOptin"],
        shared_memory_sm=properties["sharedMemPerMultiprocessor"],
        multiprocessors=properties["multiProcessorCount"],
    )


def known_device(arch: str) -> DeviceInfo:
    """A typical device of an architecture, with no GPU needed; its index is -1.

    Parameters
    ----------
    arch : str
        One of :data:`ARCHITECTURES`, for example ``"sm_90"``; ``"90"`` and ``"9.0"`` mean the same. A feature suffix
        as in ``"sm_90a"`` is allowed.

    Raises
    ------
    TypeError
        When `arch` is not a string.
    ValueError
        For any other architecture.
    """
    if not isinstance(arch, str):
        raise TypeError(f"arch={arch!r} must be a string, for example 'sm_90', not {type(arch).__name__}")
    known = ", ".join(ARCHITECTURES)
    spelling = _SPELLING.fullmatch(arch)
    capability = (int(spelling[1]), int(spelling[2])) if spelling else (0, 0)
    if spelling and capability < (8, 0):
        raise ValueError(f"arch={arch!r} is too old: cuflash needs compute capability 8.0 or newer; use one of {known}")
    if capability not in _KNOWN:
        raise ValueError(f"arch={arch!r} is not in the table of known devices; use one of {known}")
    name, per_block, per_sm, multiprocessors = _KNOWN[capability]
    return DeviceInfo("cuda", _NOT_THERE, name, capability, per_block, per_sm, multiprocessors)


def is_present(device: DeviceInfo) -> bool:
    """Whether a device is one of this machine, and not one of :func:`known_device`."""
    return device.index != _NOT_THERE
