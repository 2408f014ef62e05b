"""Exact, IO-aware attention for NumPy, CuPy, PyTorch and JAX arrays."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from cuflash.api import attention, attention_backward
from cuflash.errors import CompilationError, UnsupportedProblem
from cuflash.explain import explain
from cuflash.precompile import precompile

try:
    __version__ = _version("cuflash")
except _PackageNotFoundError:  # imported from a checkout that is not installed
    __version__ = "0.0.0+unknown"

__all__ = [
    "CompilationError",
    "UnsupportedProblem",
    "__version__",
    "attention",
    "attention_backward",
    "explain",
    "precompile",
]
