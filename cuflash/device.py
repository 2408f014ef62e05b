"""Facts about CUDA devices: asked of the driver through CuPy, or known by heart where there is no GPU."""

from __future__ import annotations

import functools

from cuflash.variants.base import DeviceInfo

_KIB = 1024

# Shared memory from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": per
# multiprocessor, and per block (1 KiB less, which the system keeps for each block).
_KNOWN = {
    (8, 0): ("NVIDIA A100", 163 * _KIB, 164 * _KIB, 108),
    (8, 6): ("NVIDIA A40", 99 * _KIB, 100 * _KIB, 84),
    (8, 9): ("NVIDIA L40S", 99 * _KIB, 100 * _KIB, 142),
    (9, 0): ("NVIDIA H200", 227 * _KIB, 228 * _KIB, 132),
}


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
    """A typical device of an architecture, for tests and compile checks on a machine with no GPU.

    Parameters
    ----------
    arch : str
        ``"sm_80"``, ``"sm_86"``, ``"sm_89"`` or ``"sm_90"``; a feature suffix as in ``"sm_90a"`` is allowed.

    Raises
    ------
    ValueError
        For any other architecture.
    """
    for capability, (name, per_block, per_sm, multiprocessors) in _KNOWN.items():
        if arch.rstrip("af") == "sm_{}{}".format(*capability):
            return DeviceInfo("cuda", 0, name, capability, per_block, per_sm, multiprocessors)
    known = ", ".join("sm_{}{}".format(*capability) for capability in _KNOWN)
    raise ValueError(f"arch={arch!r} is not in the table of known devices; use one of {known}")
