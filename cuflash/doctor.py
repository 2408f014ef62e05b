"""The doctor: what is installed, what the GPU and the kernel cache look like, and whether attention computes."""

from __future__ import annotations

import importlib
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cuflash
from cuflash import cache, jit, select
from cuflash.measure import Place, gpu_problem
from cuflash.plan import contiguous_operands
from cuflash.precompile import planned_kernels, usual_problems
from cuflash.reference import check_forward

_FAILED = "failed"

# What is imported, and the distributions that may hold it.
_PACKAGES = {
    "numpy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "cuda.core": ("cuda-core",),
    "cuda.bindings": ("cuda-bindings",),
    "torch": ("torch",),
    "jax": ("jax",),
    "matplotlib": ("matplotlib",),
}


@dataclass(frozen=True)
class Check:
    """One part of the self-test; status is "ok", "failed" or "skipped"."""

    name: str
    status: str
    detail: str
    seconds: float


def run(as_json: bool) -> int:
    """The ``doctor`` command; returns the exit status, 1 when a check failed (a warning is not a failure)."""
    facts = {"packages": packages(), "gpu": gpus(), "cache": cache_facts(), "blas": blas()}
    if not as_json:
        for title, lines in facts.items():
            _print_section(title, lines)
        print("self-test")
    checks = []
    for check in self_test():
        checks.append(check)
        if not as_json:
            print(f"  {check.status:<8} {check.name}: {check.detail} ({check.seconds:.2f} s)", flush=True)
    failed = sum(check.status == _FAILED for check in checks)
    warnings = [] if facts["cache"]["writable"] else ["the cache cannot be written: every process compiles again"]
    if as_json:
        tests = [asdict(check) for check in checks]
        print(json.dumps({**facts, "self_test": tests, "warnings": warnings, "ok": not failed}, indent=1))
        return 1 if failed else 0
    for warning in warnings:
        print(f"  warning  {warning}")
    good = "no check failed" if warnings else "all is well"
    print(f"{failed} of {len(checks)} checks failed" if failed else good)
    return 1 if failed else 0


def _print_section(title: str, facts: dict[str, Any]) -> None:
    print(title)
    for name, value in facts.items():
        print(f"  {name:<14} {value}")


def packages() -> dict[str, str]:
    """Versions of Python, cuflash and what it works with; a package that is there but broken shows its error."""
    found = {"python": f"{platform.python_version()} ({platform.machine()})", "cuflash": cuflash.__version__}
    for module, distributions in _PACKAGES.items():
        found[module] = _version(module, distributions)
    try:
        found["NVRTC"] = jit.nvrtc_version()
    except ImportError as error:
        missing = "not installed" in found["cuda.bindings"]
        found["NVRTC"] = "not installed" if missing else f"cannot be loaded: {_first_line(error)}"
    return found


def _version(module: str, distributions: tuple[str, ...]) -> str:
    for distribution in distributions:
        try:
            number = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a broken install raises is the finding
            return f"{number}, but importing it fails: {_first_line(error)}"
        return number
    return "not installed"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def gpus() -> dict[str, str]:
    """The GPUs as CuPy sees them, and the driver."""
    facts = {}
    kernel_driver = Path("/proc/driver/nvidia/version")
    if kernel_driver.is_file():
        facts["kernel driver"] = kernel_driver.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    problem = gpu_problem()
    if problem:
        return {**facts, "none": problem}
    from cupy.cuda import runtime

    driver = runtime.driverGetVersion()
    facts["driver"] = f"for CUDA up to {driver // 1000}.{driver % 1000 // 10}"
    for index in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(index)
        memory = properties["totalGlobalMem"] / 2**30
        capability = f"compute capability {properties['major']}.{properties['minor']}"
        facts[f"cuda:{index}"] = f"{properties['name'].decode()}, {capability}, {memory:.0f} GiB"
    return facts


def cache_facts() -> dict[str, Any]:
    """Where compiled kernels are kept, how many there are, and whether more can be written."""
    root = cache.default_root()
    if root is None:
        return {"directory": "none (no home directory; set CUFLASH_CACHE_DIR)", "writable": False}
    entries = size = 0
    for meta in root.glob(f"??/*/{cache.META}"):
        entries += 1
        size += sum(path.stat().st_size for path in meta.parent.iterdir())
    return {"directory": str(root), "kernels": entries, "size": f"{size / 1e6:.1f} MB", "writable": _can_write(root)}


def _can_write(root: Path) -> bool:
    """Whether a directory can be made where the store would make one; permissions do not tell, for root above all."""
    try:
        there = next(path for path in (root / "tmp", root, *root.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix=".cuflash-doctor-", dir=there):
            return True
    except OSError:
        return False


def blas() -> dict[str, str]:
    """The BLAS libraries in this process, with their threads."""
    from threadpoolctl import threadpool_info

    found = {}
    for pool in threadpool_info():
        if pool["user_api"] == "blas":
            name = Path(pool["filepath"]).name.split(".")[0]
            found[name] = f"{pool['internal_api']} {pool['version']}, {pool['num_threads']} threads"
    return found or {"none": "threadpoolctl sees none"}


class _Skip(Exception):
    """A check that cannot run here; the message says why."""


def self_test() -> Iterator[Check]:
    """Run each check, one after the other."""
    tests: list[tuple[str, Callable[[], str]]] = [
        ("NumPy backend against float64", _check_numpy),
        ("kernel compiled without a GPU", _check_compiler),
    ]
    for variant, entry in select.REGISTRY.items():
        if entry.device_kind == "cuda":
            tests.append((f"variant {variant} against float64", partial(_check_cuda, variant)))
    for name, test in tests:
        started = time.perf_counter()
        try:
            status, detail = "ok", test()
        except _Skip as reason:
            status, detail = "skipped", str(reason)
        except Exception as error:  # every failure is a finding, and the other checks still count
            status, detail = _FAILED, f"{type(error).__name__}: {error}"
        yield Check(name, status, detail, time.perf_counter() - started)


# (seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, options): odd sizes, more rows than keys, both masks.
_CASES: tuple[tuple[int, int, int, int, int, dict[str, Any]], ...] = (
    (200, 333, 4, 2, 64, {}),
    (257, 130, 2, 2, 64, {"causal": True}),
    (150, 150, 6, 1, 128, {"causal": True, "window": (40, None), "softcap": 20.0}),
    (64, 300, 2, 1, 256, {"window": (100, 30)}),
)


def _check(place: Place, dtypes: tuple[Any, ...], variant: str) -> str:
    rng, worst = np.random.default_rng(0), 0.0
    for dtype in dtypes:
        for seqlen_q, seqlen_k, heads_q, heads_kv, dim, options in _CASES:
            shapes = ((2, seqlen_q, heads_q, dim), *[(2, seqlen_k, heads_kv, dim)] * 2)
            host = [rng.standard_normal(shape, dtype=np.float32).astype(dtype) for shape in shapes]
            q, k, v = (place.put(x) for x in host)
            out, lse = cuflash.attention(q, k, v, variant=variant, return_lse=True, **options)
            report = check_forward(place.get(out), *host, lse=place.get(lse), **options)
            worst = max(worst, report.max_error / report.max_bound)
    return f"{len(dtypes) * len(_CASES)} problems, largest error {worst:.0%} of what is allowed"


def _check_numpy() -> str:
    return _check(Place(np, gpu=False), (np.float32, np.float16, ml_dtypes.bfloat16), "numpy")


def _check_compiler() -> str:
    try:
        metadata.version("cuda-core")
    except metadata.PackageNotFoundError:
        raise _Skip("cuda-core is not installed; pip install 'cuflash[cuda13]' or 'cuflash[cuda12]'") from None
    from cuflash.device import known_device

    problems = usual_problems((64,), ("bfloat16",), (True,))
    [(config, arch)] = planned_kernels(problems, [known_device("sm_80")])
    with tempfile.TemporaryDirectory(prefix="cuflash-doctor-") as directory:
        report = jit.compile_config(config, arch, store=cache.Store(directory)).report
    return f"{config.kernel} for {arch}, {report.registers} registers"


def _check_cuda(variant: str) -> str:
    if gpu_problem():
        raise _Skip("there is no GPU to use; see above")
    from cuflash.device import device_info

    [sample] = usual_problems((64,), ("float16",), (False,))
    if reason := select.why_not(variant, sample, contiguous_operands(sample), device_info(0)):
        raise _Skip(reason)
    return _check(Place.choose("cuda"), (np.float16, ml_dtypes.bfloat16), variant)
