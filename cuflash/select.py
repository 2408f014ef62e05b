"""Which variant computes a problem on a device: an ordered registry, and the reasons of those that cannot."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from cuflash.device import device_info
from cuflash.errors import UnsupportedProblem
from cuflash.problem import Problem
from cuflash.variants.base import CPU, DeviceInfo, Operands, Variant
from cuflash.view import DeviceKind


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a variant lives; its module is imported only when a problem on its kind of device asks for it."""

    module: str
    device_kind: DeviceKind


# In order of preference: the first that can run a problem gets it.
REGISTRY: dict[str, Entry] = {
    "sm90": Entry("cuflash.variants.sm90_forward", "cuda"),
    "sm80": Entry("cuflash.variants.sm80_forward", "cuda"),
    "numpy": Entry("cuflash.variants.numpy_tiled", "cpu"),
}


def check_variant(variant: object) -> str | None:
    """Refuse a variant name that is not in the registry.

    Raises
    ------
    ValueError
    """
    if variant is None or (isinstance(variant, str) and variant in REGISTRY):
        return variant
    known = ", ".join(map(repr, REGISTRY))
    raise ValueError(f"variant={variant!r} is not known; pass None to choose automatically, or one of {known}")


def load(name: str) -> Variant:
    """Import a variant by name.

    Raises
    ------
    ImportError
        If its module or something that it needs is not installed.
    """
    variant: Variant = importlib.import_module(REGISTRY[name].module).VARIANT
    return variant


def why_not(name: str, problem: Problem, operands: Operands, device: DeviceInfo) -> str | None:
    """Why a variant cannot run a problem on a device, or None when it can."""
    kind = REGISTRY[name].device_kind
    if kind != device.kind:
        place = "the CPU" if device.kind == "cpu" else device.name
        return f"runs on {_place(kind)}; these are on {place}, and cuflash never moves data between devices"
    try:
        variant = load(name)
    except ImportError as error:
        return f"cannot be loaded ({error}); {_install(kind)}"
    return variant.unsupported(problem, operands, device)


def select(problem: Problem, operands: Operands, device: DeviceInfo, variant: str | None = None) -> tuple[Variant, Any]:
    """Choose the variant for a problem and its Config.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        Layouts of the arrays as the kernel will see them (after any copy).
    device : DeviceInfo
    variant : str, optional
        Name of the only variant to consider.

    Returns
    -------
    (Variant, config)

    Raises
    ------
    ValueError
        If `variant` is not a known name.
    UnsupportedProblem
        With the reason of each variant considered, when none can run the problem.
    """
    check_variant(variant)
    reasons: dict[str, str] = {}
    for name in REGISTRY if variant is None else (variant,):
        reason = why_not(name, problem, operands, device)
        if reason is None:
            chosen = load(name)
            return chosen, chosen.config(problem, operands, device)
        reasons[name] = reason
    raise UnsupportedProblem(_summary(problem, device, variant), reasons)


def _summary(problem: Problem, device: DeviceInfo, variant: str | None) -> str:
    who = "no variant can" if variant is None else f"variant={variant!r} cannot"
    return f"{who} run this {problem.dtype} attention (head_dim {problem.head_dim}) on {device.name}:"


def _place(kind: DeviceKind) -> str:
    return "CUDA arrays" if kind == "cuda" else "CPU arrays"


def _install(kind: DeviceKind) -> str:
    if kind == "cpu":
        return "reinstall cuflash"
    return "install the GPU packages with pip install 'cuflash[cuda13]' (or [cuda12])"


def device_of(kind: DeviceKind, index: int) -> DeviceInfo:
    """The facts about a device that selection needs.

    Raises
    ------
    UnsupportedProblem
        For a CUDA device when CuPy, which every CUDA variant needs, is not installed.
    """
    if kind == "cpu":
        return CPU
    try:
        return device_info(index)
    except ImportError as error:
        reasons = {name: _install("cuda") for name, entry in REGISTRY.items() if entry.device_kind == "cuda"}
        raise UnsupportedProblem(f"arrays on cuda:{index} need CuPy ({error}):", reasons) from error
