"""Settings of the whole suite: GPU tests skip where there is no GPU, and Hypothesis runs a fixed, short profile."""

import ctypes
import functools
import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

# Several test processes share one GPU: JAX must not take most of its memory at the first array. Before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

_COMMON = {"deadline": None, "database": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=8, derandomize=True, **_COMMON)
settings.register_profile("deep", max_examples=400, **_COMMON)
settings.load_profile(os.environ.get("CUFLASH_HYPOTHESIS", "ci"))


@functools.cache
def why_no_gpu():
    """Why GPU tests cannot run here, or None; asks the driver itself, so that no framework is imported for it."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver (libcuda.so.1)"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "no CUDA device"
    return None


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None and (reason := why_no_gpu()):
        pytest.skip(f"needs a GPU: {reason}")
