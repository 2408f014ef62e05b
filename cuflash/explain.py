"""What a call would do and why: variant, tiles, registers, predicted traffic, copies, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from cuflash import select
from cuflash.api import check_frameworks, to_native
from cuflash.arrays import DLPackAdapter, adapter_of
from cuflash.io_model import Algorithm, compulsory_bytes, forward_bytes
from cuflash.plan import NAMES, check_call, contiguous_operands
from cuflash.problem import Causal, Layout, Problem, check_options
from cuflash.variants.base import DeviceInfo, Operands

_ALGORITHMS: tuple[Algorithm, ...] = ("standard", "flash-1", "flash-2")
_CPU_CACHE = 1 << 20  # fast memory assumed for the traffic model on a CPU: a typical per-core L2
_TILE = 128  # query rows assumed where no variant says


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``cuflash.attention`` would do with a call.

    Attributes
    ----------
    problem : Problem
    device : DeviceInfo
    variant : str or None
        The implementation chosen; None when none can run the problem.
    config : dict
        Its own account of tile, stages, threads and shared memory.
    build : dict
        Registers, spills and so on from the compiler, where the variant reports them.
    hbm_bytes : dict
        Predicted bytes to and from device memory: ``"minimum"`` (each array once), ``"standard"`` (scores written
        out), ``"flash-1"`` and ``"flash-2"`` (no reuse between tiles beyond one block's fast memory).
    flops : int
        Of both matrix products over the visible pairs.
    copies : dict
        Inputs that are copied first, each with the reason.
    others : dict
        Variants not chosen, each with the reason.
    """

    problem: Problem
    device: DeviceInfo
    variant: str | None
    config: Mapping[str, Any]
    build: Mapping[str, Any]
    hbm_bytes: Mapping[str, int]
    flops: int
    copies: Mapping[str, str]
    others: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries, numbers and strings."""
        plain = {name: dict(getattr(self, name)) for name in ("config", "build", "hbm_bytes", "copies", "others")}
        return {
            "problem": asdict(self.problem),
            "device": asdict(self.device),
            "variant": self.variant,
            "flops": self.flops,
            **plain,
        }

    def __str__(self) -> str:
        lines = [
            f"problem   {describe_problem(self.problem)}",
            f"device    {describe_device(self.device)}",
            f"variant   {self.variant or 'none can run this problem'}",
        ]
        for label, facts in (("config", self.config), ("build", self.build)):
            if facts:
                lines.append(f"{label:<10}" + ", ".join(f"{name} {value}" for name, value in facts.items()))
        lines.append(f"work      {self.flops:.4g} FLOP over {self.problem.visible_pairs()} visible pairs a head")
        lines.append("traffic   " + ", ".join(f"{name} {_size(n)}" for name, n in self.hbm_bytes.items()) + " (model)")
        lines += [f"copied    {name}: {reason}" for name, reason in self.copies.items()]
        lines += [f"not used  {name}: {reason}" for name, reason in self.others.items()]
        return "\n".join(lines)


def describe_problem(problem: Problem) -> str:
    """One line: sizes, dtype, mask and score options."""
    p = problem
    heads = f"{p.heads_q} heads" + (f" over {p.heads_kv} key/value heads" if p.group > 1 else "")
    dims = f"head_dim {p.head_dim}" + (f" ({p.head_dim_v} for v)" if p.head_dim_v != p.head_dim else "")
    band = f", query i sees keys j with {_band(p)}" if p.has_band else ""
    cap = f", softcap {p.softcap:g}" if p.softcap else ""
    sizes = f"batch {p.batch}, seqlen {p.seqlen_q} x {p.seqlen_k}"
    return f"{p.dtype}, {sizes}, {heads}, {dims}, scale {p.scale:g}{cap}{band}"


def describe_device(device: DeviceInfo) -> str:
    """One line: name and, for a GPU, architecture and shared memory."""
    if device.kind == "cpu":
        return device.name
    shared = f"{device.shared_memory // 1024} KiB shared memory a block"
    return f"cuda:{device.index} {device.name} ({device.arch}, {device.multiprocessors} SMs, {shared})"


def _band(problem: Problem) -> str:
    lower, upper = problem.diag_lower, problem.diag_upper
    if lower is None:
        return f"j - i <= {upper}"
    return f"j - i >= {lower}" if upper is None else f"{lower} <= j - i <= {upper}"


def _size(count: int) -> str:
    value, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.4g} {units[0]}"


def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    variant: str | None = None,
    out: Any = None,
) -> Explanation:
    """Say what :func:`cuflash.attention` would do with the same arguments, without computing attention.

    Parameters
    ----------
    q, k, v, causal, window, softcap, scale, layout, return_lse, variant, out
        As for :func:`cuflash.attention`.

    Returns
    -------
    Explanation
        Print it, or take :meth:`Explanation.as_dict`. When no variant can run the problem it says why instead of
        raising.

    Raises
    ------
    TypeError, ValueError
        As :func:`cuflash.attention` does for arrays and options that do not fit.
    """
    options = check_options(causal, window, softcap, scale, layout)
    adapter = adapter_of(q, "q")
    check_frameworks(adapter, k, v, out)
    if isinstance(adapter, DLPackAdapter):
        adapter, q, k, v, out = to_native(adapter, q, k, v, out)
    for name, x in zip(NAMES, (q, k, v), strict=True):
        adapter.facts(x, name)  # for its refusals
    call = check_call(adapter, (q, k, v), options, out)
    copies = {name: why for name, why in zip(NAMES, call.copies, strict=True) if why is not None}
    return explain_problem(call.problem, call.device, call.operands, variant=variant, copies=copies)


def explain_problem(
    problem: Problem,
    device: DeviceInfo,
    operands: Operands | None = None,
    *,
    variant: str | None = None,
    copies: Mapping[str, str] | None = None,
) -> Explanation:
    """Explain a Problem on a device that need not be present, with no arrays.

    Parameters
    ----------
    problem : Problem
    device : DeviceInfo
    operands : Operands, optional
        Layouts of the arrays; those of C-contiguous bshd arrays when None.
    variant : str, optional
        The only variant to consider.
    copies : mapping of str to str, optional
        Inputs that are copied first, with the reason.

    Raises
    ------
    ValueError
        If `variant` is not a known name.
    """
    select.check_variant(variant)
    operands = contiguous_operands(problem) if operands is None else operands
    chosen, others = None, {}
    for name in select.REGISTRY:
        reason = select.why_not(name, problem, operands, device)
        if variant is not None and name != variant:
            others[name] = reason or f"can run it, but variant={variant!r} was asked for"
        elif reason is not None:
            others[name] = reason
        elif chosen is not None:
            others[name] = f"can run it, but {chosen} comes first"
        else:
            chosen = name
    config, build = ({}, {}) if chosen is None else _account(chosen, problem, operands, device)
    return Explanation(
        problem, device, chosen, config, build, _traffic(problem, device, config), problem.flops(), copies or {}, others
    )


def _account(
    name: str, problem: Problem, operands: Operands, device: DeviceInfo
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What the variant says of its Config, and what the compiler said if the variant can tell."""
    variant = select.load(name)
    config = variant.config(problem, operands, device)
    report = getattr(variant, "report", None)
    build: Any = {} if report is None else report(config, device)
    if is_dataclass(build) and not isinstance(build, type):
        build = asdict(build)
    described: Mapping[str, Any] = config.describe()
    return described, build or {}


def _traffic(problem: Problem, device: DeviceInfo, config: Mapping[str, Any]) -> dict[str, int]:
    cache = device.shared_memory or _CPU_CACHE
    tile = config.get("tile", (_TILE,))
    tile_m = int(config.get("tile_m", tile[0] if isinstance(tile, tuple | list) else _TILE))
    figures: dict[str, int] = {name: forward_bytes(problem, name, tile_m, cache) for name in _ALGORITHMS}
    return {"minimum": compulsory_bytes(problem), **figures}
