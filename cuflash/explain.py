"""What a call would do and why: variant, tiles, registers, predicted traffic, copies, and why not the others."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

from cuflash import select
from cuflash.api import check_frameworks, to_native
from cuflash.arrays import DLPackAdapter, adapter_of
from cuflash.device import is_present
from cuflash.io_model import Algorithm, backward_bytes, compulsory_bytes, forward_bytes
from cuflash.plan import NAMES, check_call
from cuflash.plan_backward import contiguous_layouts
from cuflash.problem import BackwardProblem, Causal, Layout, Problem, check_deterministic, check_options
from cuflash.variants.base import BackwardOperands, DeviceInfo, Operands

_ALGORITHMS: tuple[Algorithm, ...] = ("standard", "flash-1", "flash-2")
_CPU_CACHE = 1 << 20  # fast memory assumed for the traffic model on a CPU: a typical per-core L2
_TILE = 128  # query rows assumed where no variant says
_FOLLOWS: Mapping[str, Algorithm] = {
    "sm90": "flash-2",
    "sm80": "flash-2",
    "numpy": "flash-2",
}  # whose loop order a variant has
_FIRST = ("tile", "stages", "threads", "shared_bytes")  # of a Config, what tells most
_WIDTH = 120
_UNBROKEN = "\u00a0"  # a space at which textwrap does not break a line


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``cuflash.attention``, or ``cuflash.attention_backward``, would do with a call.

    Attributes
    ----------
    problem : Problem
    device : DeviceInfo
    variant : str or None
        The implementation chosen; None when none can run the problem.
    config : dict
        Its own account of tile, stages, threads and shared memory.
    build : dict
        Registers, spills and so on from the compiler, where the variant reports them; ``"unknown"`` with the reason
        where there is no compiler.
    hbm_bytes : dict
        Predicted bytes to and from device memory: ``"minimum"`` (each element that matters once), ``"standard"``
        (scores written out), ``"flash-1"`` and ``"flash-2"`` (no reuse between tiles beyond one block's fast memory);
        of a backward pass ``"minimum"`` and ``"flash-2"``.
    flops : int
        Of both matrix products over the visible pairs, or of the five of a backward pass.
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
        what = "backward, " if isinstance(self.problem, BackwardProblem) else ""
        lines = [
            f"problem   {what}{describe_problem(self.problem)}",
            f"device    {describe_device(self.device)}",
            f"variant   {self.variant or 'none can run this problem'}",
        ]
        if self.config:
            lines += _wrapped("config", (f"{name} {value}" for name, value in _telling_first(self.config)))
        if self.build:
            lines += _wrapped("build", _describe_build(self.build))
        lines.append(f"work      {self.flops:.4g} FLOP over {self.problem.visible_pairs()} visible pairs a head")
        order = _FOLLOWS.get(self.variant or "")
        own = f"; {self.variant} follows {order}" if order else ""
        traffic = ", ".join(f"{name} {_size(n)}" for name, n in self.hbm_bytes.items())
        lines.append(f"traffic   {traffic} (model{own})")
        lines += [f"copied    {name}: {reason}" for name, reason in self.copies.items()]
        lines += [f"not used  {name}: {reason}" for name, reason in self.others.items()]
        return "\n".join(lines)


def _wrapped(label: str, facts: Iterable[str]) -> list[str]:
    whole = ", ".join(fact.replace(" ", _UNBROKEN) for fact in facts)
    indent = " " * 10
    lines = textwrap.wrap(
        whole, _WIDTH, initial_indent=f"{label:<10}", subsequent_indent=indent, break_long_words=False
    )
    return [line.replace(_UNBROKEN, " ") for line in lines]


def _telling_first(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(config.items(), key=lambda fact: _FIRST.index(fact[0]) if fact[0] in _FIRST else len(_FIRST))


def _describe_build(build: Mapping[str, Any]) -> Iterable[str]:
    for name, value in build.items():
        if name == "unknown":
            yield f"not known: {value}"
        elif name == "from_cache":
            if value:
                yield "cached"
        else:
            yield f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}"


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
    """One line: name and, for a GPU, architecture, shared memory and whether it is there."""
    if device.kind == "cpu":
        return device.name
    shared = f"{device.shared_memory // 1024} KiB shared memory a block"
    if not is_present(device):
        return f"{device.arch}, as on an {device.name} ({device.multiprocessors} SMs, {shared})"
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
    backward: bool = False,
    deterministic: bool = False,
) -> Explanation:
    """Say what :func:`cuflash.attention` would do with the same arguments, without computing attention.

    Parameters
    ----------
    q, k, v, causal, window, softcap, scale, layout, return_lse, variant, out
        As for :func:`cuflash.attention`.
    backward : bool, optional
        Explain :func:`cuflash.attention_backward` for these arrays instead, with all others C-contiguous and no dlse:
        its ``config["workspace_bytes"]`` is the temporary memory that it takes on a GPU.
    deterministic : bool, optional
        As for :func:`cuflash.attention_backward`.

    Returns
    -------
    Explanation
        Print it, or take :meth:`Explanation.as_dict`. When no variant can run the problem it says why instead of
        raising.

    Raises
    ------
    TypeError, ValueError
        As :func:`cuflash.attention` does for arrays and options that do not fit.

    Examples
    --------
    >>> import cuflash, numpy as np
    >>> q = np.zeros((1, 1000, 8, 64), np.float32)
    >>> plan = cuflash.explain(q, q, q, causal=True)
    >>> plan.variant
    'numpy'
    >>> print(plan.others["sm80"])
    runs on CUDA arrays; these are on the CPU, and cuflash never moves data between devices
    >>> plan.hbm_bytes["minimum"]
    8192000
    """
    options = check_options(causal, window, softcap, scale, layout)
    adapter = adapter_of(q, "q")
    given = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    check_frameworks(adapter, given)
    if isinstance(adapter, DLPackAdapter):
        adapter, given = to_native(adapter, given)
    inputs = [given[name] for name in NAMES]
    for name, x in zip(NAMES, inputs, strict=True):
        adapter.facts(x, name)  # for its refusals
    call = check_call(adapter, inputs, options, given.get("out"))
    copies = {name: why for name, why in zip(NAMES, call.copies, strict=True) if why is not None}
    problem, operands = call.problem, call.operands
    if not backward:
        return explain_problem(problem, call.device, operands, variant=variant, copies=copies)
    gradients = BackwardProblem(**asdict(problem), deterministic=check_deterministic(deterministic))
    layouts = replace(contiguous_layouts(gradients), **{name: getattr(operands, name) for name in NAMES})
    return explain_problem(gradients, call.device, layouts, variant=variant, copies=copies)


def explain_problem(
    problem: Problem,
    device: DeviceInfo,
    operands: Operands | BackwardOperands | None = None,
    *,
    variant: str | None = None,
    copies: Mapping[str, str] | None = None,
) -> Explanation:
    """Explain a Problem on a device that need not be present, with no arrays.

    Parameters
    ----------
    problem : Problem
        A ``BackwardProblem`` for its gradients.
    device : DeviceInfo
    operands : Operands or BackwardOperands, optional
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
    arrays, operands = operands is not None, contiguous_layouts(problem) if operands is None else operands
    operation = select.operation_of(problem)
    chosen, others = None, {}
    for name, entry in select.REGISTRY.items():
        reason = select.why_not(name, problem, operands, device, operation)
        if not arrays and entry.device_kind != device.kind:  # select speaks of arrays that are somewhere
            kind = "CPU" if entry.device_kind == "cpu" else "CUDA"
            reason = f"runs on {kind} arrays, and cuflash never moves data between devices"
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
    name: str, problem: Problem, operands: Operands | BackwardOperands, device: DeviceInfo
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What the variant says of its Config, and what the compiler said if the variant can tell."""
    variant = select.load(name, select.operation_of(problem))
    config = variant.config(problem, operands, device)
    report = getattr(variant, "report", None)
    try:
        build: Any = {} if report is None else report(config, device)
    except ImportError:  # all but the compiler's own account can still be told
        build = {"unknown": "needs cuda-core and NVRTC; pip install 'cuflash[cuda13]'"}
    if is_dataclass(build) and not isinstance(build, type):
        build = asdict(build)
    described: Mapping[str, Any] = config.describe()
    return described, build or {}


def _traffic(problem: Problem, device: DeviceInfo, config: Mapping[str, Any]) -> dict[str, int]:
    cache = device.shared_memory or _CPU_CACHE
    tile = config.get("tile", (_TILE,))
    if isinstance(problem, BackwardProblem):
        return backward_bytes(problem, int(config.get("tile_n", config.get("tile_k", _TILE))))
    tile_m = int(config.get("tile_m", tile[0] if isinstance(tile, tuple | list) else _TILE))
    figures: dict[str, int] = {name: forward_bytes(problem, name, tile_m, cache) for name in _ALGORITHMS}
    return {"minimum": compulsory_bytes(problem), **figures}
