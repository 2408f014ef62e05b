"""Which variant computes a problem on a device: ordered registries, and the reasons of those that cannot."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

from cuflash.device import device_info
from cuflash.errors import UnsupportedProblem
from cuflash.problem import BackwardProblem, Problem
from cuflash.variants.base import CPU, BackwardOperands, DeviceInfo, Operands
from cuflash.view import DeviceKind


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a variant lives; its module is imported only when a problem on its kind of device asks for it."""

    module: str
    device_kind: DeviceKind


Operation = Literal["forward", "backward"]

# In order of preference: the first that can run a problem gets it. REGISTRY is that of the forward pass.
REGISTRY: dict[str, Entry] = {
    "sm90": Entry("cuflash.variants.sm90_forward", "cuda"),
    "sm80": Entry("cuflash.variants.sm80_forward", "cuda"),
    "numpy": Entry("cuflash.variants.numpy_tiled", "cpu"),
}
# The faster sm90 stays behind sm80 until it has been through memcheck and racecheck with all its options.
BACKWARD: dict[str, Entry] = {
    "sm80": Entry("cuflash.variants.sm80_backward", "cuda"),
    "sm90": Entry("cuflash.variants.sm90_backward", "cuda"),
    "numpy": Entry("cuflash.variants.numpy_backward", "cpu"),
}


def registry(operation: Operation) -> dict[str, Entry]:
    """The variants of an operation, in order of preference."""
    return REGISTRY if operation == "forward" else BACKWARD


def operation_of(problem: Problem) -> Operation:
    """What a Problem is one of."""
    return "backward" if isinstance(problem, BackwardProblem) else "forward"


def _names(operation: Operation) -> list[str]:
    """All variants, those that have the operation first."""
    return list(dict.fromkeys([*registry(operation), *REGISTRY, *BACKWARD]))


def check_variant(variant: object) -> str | None:
    """Refuse a name that no variant has.

    Raises
    ------
    ValueError
    """
    names = _names("forward")
    if variant is None or (isinstance(variant, str) and variant in names):
        return variant
    known = ", ".join(map(repr, names))
    raise ValueError(f"variant={variant!r} is not known; pass None to choose automatically, or one of {known}")


def load(name: str, operation: Operation = "forward") -> Any:
    """Import a variant by name: a ``Variant``, or a ``BackwardVariant`` for the backward pass.

    Raises
    ------
    ImportError
        If its module or something that it needs is not installed.
    """
    return importlib.import_module(registry(operation)[name].module).VARIANT


def why_not(
    name: str,
    problem: Problem,
    operands: Operands | BackwardOperands,
    device: DeviceInfo,
    operation: Operation = "forward",
) -> str | None:
    """Why a variant cannot run a problem on a device, or None when it can."""
    entry = registry(operation).get(name)
    if entry is None:
        return f"has no {operation} pass yet"
    kind = entry.device_kind
    if kind != device.kind:
        place = "the CPU" if device.kind == "cpu" else device.name
        return f"runs on {_place(kind)}; these are on {place}, and cuflash never moves data between devices"
    try:
        variant = load(name, operation)
    except ImportError as error:
        return f"cannot be loaded ({error}); {_install(kind)}"
    reason: str | None = variant.unsupported(problem, operands, device)
    return reason


def select(
    problem: Problem,
    operands: Operands | BackwardOperands,
    device: DeviceInfo,
    variant: str | None = None,
    operation: Operation = "forward",
) -> tuple[Any, Any]:
    """Choose the variant for a problem and its Config.

    Parameters
    ----------
    problem : Problem
        A ``BackwardProblem`` for the backward pass.
    operands : Operands or BackwardOperands
        Layouts of the arrays as the kernel will see them (after any copy).
    device : DeviceInfo
    variant : str, optional
        Name of the only variant to consider.
    operation : {"forward", "backward"}

    Returns
    -------
    (Variant or BackwardVariant, config)

    Raises
    ------
    ValueError
        If `variant` is not a known name.
    UnsupportedProblem
        With the reason of each variant considered, when none can run the problem.
    """
    check_variant(variant)
    reasons: dict[str, str] = {}
    for name in _names(operation) if variant is None else (variant,):
        reason = why_not(name, problem, operands, device, operation)
        if reason is None:
            chosen = load(name, operation)
            return chosen, chosen.config(problem, operands, device)
        reasons[name] = reason
    raise UnsupportedProblem(_summary(problem, device, variant, operation), reasons)


def _summary(problem: Problem, device: DeviceInfo, variant: str | None, operation: Operation) -> str:
    who = "no variant can" if variant is None else f"variant={variant!r} cannot"
    what = "attention" if operation == "forward" else "attention backward"
    return f"{who} run this {problem.dtype} {what} (head_dim {problem.head_dim}) on {device.name}:"


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
