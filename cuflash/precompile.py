"""Fill the kernel cache ahead of the first call, on this machine or for GPUs of another one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cuflash.device import device_info, known_device
from cuflash.measure import gpu_problem
from cuflash.plan_backward import contiguous_layouts
from cuflash.problem import BackwardProblem, Options, Problem, make_problem
from cuflash.select import operation_of, select
from cuflash.variants.base import DeviceInfo

if TYPE_CHECKING:
    from cuflash import jit

_SEQLEN = 4096  # kernels are built for any length; this one only has to be long enough for a mask to hide something


def usual_problems(
    head_dims: Iterable[int] = (64, 128),
    dtypes: Iterable[str] = ("bfloat16", "float16"),
    causal: Iterable[bool] = (False, True),
    backward: bool = False,
) -> list[Problem]:
    """One Problem for each head dim, dtype and causal setting, and with `backward` another for its gradients.

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
    return problems + [BackwardProblem(**asdict(p)) for p in problems if backward]


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
    problems : cuflash.problem.Problem or iterable of Problem, optional
        What will be computed (lengths and batch size do not matter to the kernels). None is head dims 64 and 128 in
        bfloat16 and float16, with and without a causal mask; `usual_problems` of the module ``cuflash.precompile``
        makes others of that kind, and ``cuflash.explain(...).problem`` is the Problem of a call.
    arch : str or iterable of str, optional
        For example ``"sm_90"`` (or ``"9.0"``) or ``["sm_80", "sm_90"]``, compiled with no GPU. None is the current CUDA
        device.
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
    TypeError
        When `problems`, `arch` or `workers` is of another type.
    ValueError
        For an architecture that cuflash does not know, or `workers` below 1.
    RuntimeError
        Without `arch`, when CuPy finds no GPU.
    UnsupportedProblem
        When no CUDA variant can run a problem on the device.
    CompilationError
        When a kernel does not compile.
    ImportError
        When the compiler is not installed.

    Examples
    --------
    >>> import cuflash
    >>> from cuflash.precompile import usual_problems
    >>> kernels = cuflash.precompile(usual_problems([96], ["float16"]), arch=["sm_80", "sm_90"])
    >>> [(kernel.arch, kernel.config.has_band) for kernel in kernels]
    [('sm_80', False), ('sm_80', True), ('sm_90a', False), ('sm_90a', True)]
    """
    from cuflash import jit  # here, so that importing cuflash does not load the compiler's part

    step = _workers(workers)
    builds = planned_kernels(_problems(problems), _devices(arch))
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
            layouts = contiguous_layouts(problem)
            variant, config = select(problem, layouts, device, operation=operation_of(problem))
            for kernel in getattr(config, "kernels", (config,)):
                builds[kernel, variant.arch(device)] = None
    return list(builds)


def _workers(workers: object) -> int:
    if workers is None:
        return os.cpu_count() or 1
    if not isinstance(workers, int):
        raise TypeError(f"workers={workers!r} must be an int or None, not {type(workers).__name__}")
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1; use None for one a core")
    return workers


def _problems(problems: Any) -> list[Problem]:
    if problems is None:
        return usual_problems()
    found = [problems] if isinstance(problems, Problem) or not isinstance(problems, Iterable) else list(problems)
    for problem in found:
        if not isinstance(problem, Problem):
            raise TypeError(
                f"problems holds {problem!r}, of type {type(problem).__name__}, which is no cuflash.problem.Problem; "
                "pass cuflash.explain(...).problem, or what cuflash.precompile.usual_problems() returns"
            )
    return found


def _devices(arch: Any) -> list[DeviceInfo]:
    if arch is not None:
        names = arch if isinstance(arch, Iterable) and not isinstance(arch, str) else [arch]
        return [known_device(name) for name in names]
    if problem := gpu_problem():
        raise RuntimeError(f"{problem}; name an architecture, for example arch='sm_90'")
    from cupy.cuda import runtime

    return [device_info(runtime.getDevice())]
