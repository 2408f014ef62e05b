"""Fill the kernel cache ahead of the first call, on this machine or for GPUs of another one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cuflash.device import device_info, known_device
from cuflash.plan import contiguous_operands
from cuflash.problem import Options, Problem, make_problem
from cuflash.select import select
from cuflash.variants.base import DeviceInfo

if TYPE_CHECKING:
    from cuflash import jit

_SEQLEN = 4096  # kernels are built for any length; this one only has to be long enough for a mask to hide something


def usual_problems(
    head_dims: Iterable[int] = (64, 128),
    dtypes: Iterable[str] = ("bfloat16", "float16"),
    causal: Iterable[bool] = (False, True),
) -> list[Problem]:
    """One Problem for each head dim, dtype and causal setting.

    Raises
    ------
    ValueError
        For a head dim that cuflash does not take.
    """
    masks, names = tuple(causal), tuple(dtypes)
    problems = []
    for dim in head_dims:
        shape = (1, _SEQLEN, 1, dim)
        problems += [make_problem(shape, shape, shape, name, Options(causal=mask)) for name in names for mask in masks]
    return problems


def precompile(
    problems: Problem | Iterable[Problem] | None = None,
    *,
    arch: str | Iterable[str] | None = None,
    workers: int | None = None,
    on_progress: Callable[[str, int], None] | None = None,
) -> list[jit.CompiledKernel]:
    """Compile the kernels that calls would use into the on-disk cache, so that their first call does not wait.

    Parameters
    ----------
    problems : Problem or iterable of Problem, optional
        What will be computed (lengths and batch size do not matter to the kernels). None is head dims 64 and 128 in
        bfloat16 and float16, with and without a causal mask; see :func:`usual_problems` for others.
    arch : str or iterable of str, optional
        For example ``"sm_90"`` or ``["sm_80", "sm_90"]``, compiled with no GPU. None is the current CUDA device.
    workers : int, optional
        Threads that compile; one a core when None.
    on_progress : callable, optional
        Called as ``on_progress(label, count)`` before `count` kernels are compiled.

    Returns
    -------
    list of CompiledKernel
        One for each different kernel.

    Raises
    ------
    ValueError
        For an architecture that cuflash does not know.
    UnsupportedProblem
        When no CUDA variant can run a problem on the device.
    CompilationError
        When a kernel does not compile.
    ImportError
        When the compiler (or, without `arch`, CuPy) is not installed.
    """
    from cuflash import jit  # here, so that importing cuflash does not load the compiler's part

    if problems is None:
        problems = usual_problems()
    builds = planned_kernels([problems] if isinstance(problems, Problem) else list(problems), _devices(arch))
    step = workers or os.cpu_count() or 1
    compiled: list[jit.CompiledKernel] = []
    for start in range(0, len(builds), step):
        batch = builds[start : start + step]
        if on_progress is not None:
            on_progress(", ".join(f"{config.kernel} {name}" for config, name in batch), len(batch))
        for name in dict.fromkeys(name for _, name in batch):
            configs = [config for config, other in batch if other == name]
            compiled += jit.precompile(configs, name, workers=workers)
    return compiled


def planned_kernels(problems: Iterable[Problem], devices: Sequence[DeviceInfo]) -> list[tuple[Any, str]]:
    """The different (Config, arch) pairs that the problems need on the devices."""
    builds: dict[tuple[Any, str], None] = {}
    for problem in problems:
        for device in devices:
            _, config = select(problem, contiguous_operands(problem), device)
            builds[config, device.arch] = None
    return list(builds)


def _devices(arch: str | Iterable[str] | None) -> list[DeviceInfo]:
    if arch is not None:
        return [known_device(name) for name in ([arch] if isinstance(arch, str) else arch)]
    from cupy.cuda import runtime

    return [device_info(runtime.getDevice())]
