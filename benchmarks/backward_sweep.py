"""Tile sweep of the sm80 backward pass: build Configs, check them, time them beside torch's FlashAttention-2.

    python benchmarks/backward_sweep.py --deterministic      # the tiles that cuflash uses, in both passes
    python benchmarks/backward_sweep.py --d 128 -- "tile_n=128,warps=8,warps_n=4|2" "stages=1,blocks_per_sm=1"

Each positional argument is a set of fields to change from the Config of ``sm80_backward`` that cuflash would take.
"stages=1|2,tile_n=64|128" stands for all four combinations. What does not compile, spills registers or needs more
shared memory than there is, is left out. The others are compared with float64 gradients before they are timed, whole
passes with all their kernels and the peer in turns in one process, on random normal inputs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from tile_sweep import (
    TOKENS,
    WIDTH,
    Timer,
    case_name,
    changed,
    combinations,
    exact,
    medians,
    print_ratios,
    print_rows,
    shape,
    torch_timer,
)

import cuflash
from cuflash import jit
from cuflash.device import device_info
from cuflash.errors import CompilationError
from cuflash.plan_backward import contiguous_layouts
from cuflash.problem import BackwardProblem
from cuflash.variants.base import BackwardOperands
from cuflash.variants.sm80_backward import (
    ROW_TILE,
    TURN_ROWS,
    VARIANT,
    Sm80BackwardConfig,
    Sm80BackwardPass,
)

PEER = "torch FA2"
WORST_ERROR = 1e-2  # relative; 0.0025 or so is what rounding to bfloat16 costs
# What the problem, the layouts, the pass and the device decide, the same for all kernels of a pass.
FIXED = {"element", "tile_d", "tile_dv", "vector_bytes", "out_vector_bytes", "exact_dims", "has_band", "score"}
FIXED |= {"ordered", "reduce_width"}

Fields = dict[str, str]


@dataclass(frozen=True)
class Case:
    """One backward pass under test for one head dim and mask: its Configs in the order of their launches."""

    name: str
    kernels: tuple[Any, ...]
    deterministic: bool

    @property
    def main(self) -> Sm80BackwardConfig:
        """The Config of the kernel that walks tiles."""
        return next(x for x in self.kernels if isinstance(x, Sm80BackwardConfig))


@dataclass(frozen=True)
class Tensors:
    """Inputs of a backward pass, in bshd."""

    dout: Any
    q: Any
    k: Any
    v: Any

    @classmethod
    def draw(cls, batch: int, seqlen: int, heads: int, dim: int) -> Tensors:
        """Random normal."""
        sizes = (batch, seqlen, heads, dim)
        return cls(*(torch.randn(sizes, device="cuda", dtype=torch.bfloat16) for _ in range(4)))


def backward_shape(batch: int, seqlen: int, heads: int, dim: int, causal: bool, deterministic: bool) -> BackwardProblem:
    """The gradients of a self-attention problem in bshd."""
    return BackwardProblem(**asdict(shape(batch, seqlen, heads, dim, causal)), deterministic=deterministic)


def layouts(problem: BackwardProblem) -> BackwardOperands:
    """Of contiguous arrays."""
    operands = contiguous_layouts(problem)
    assert isinstance(operands, BackwardOperands)
    return operands


def check_fields(changes: list[Fields]) -> None:
    """Raise ValueError for what no Config can be made of.

    The workspace has a multiple of ``ROW_TILE`` rows for each head, which tiles of query rows must divide.
    """
    known = [field.name for field in fields(Sm80BackwardConfig) if field.name not in FIXED]
    for change in changes:
        for name, value in change.items():
            if name not in known:
                raise ValueError(f"{name}={value}: the fields to change are {', '.join(known)}")
            if name == "tile_m" and (int(value) < TURN_ROWS or ROW_TILE % int(value)):
                raise ValueError(f"{name}={value} must be {TURN_ROWS} or more and divide {ROW_TILE}")


def passes(dim: int, causal: bool, changes: list[Fields], deterministic: bool) -> Iterator[Case]:
    """All backward passes to build."""
    for change in ({}, *changes):
        for mode in (False, True) if deterministic else (False,):
            problem = backward_shape(1, 4096, 1, dim, causal, mode)
            kernels = [
                changed(config, change) if isinstance(config, Sm80BackwardConfig) else config
                for config in VARIANT.config(problem, layouts(problem), device_info(0)).kernels
            ]
            yield Case(case_name(change) + (" deterministic" if mode else ""), tuple(kernels), mode)


def compiled(config: Any) -> jit.CompileReport | str:
    """What the compiler says of a Config, or why it is of no use."""
    device = device_info(0)
    if config.shared_bytes > device.shared_memory:
        return f"{config.kernel} needs {config.shared_bytes} bytes of shared memory, of {device.shared_memory}"
    try:
        return jit.compile_config(config, VARIANT.arch(device)).report
    except CompilationError as error:
        wrong = (line for line in str(error).splitlines() if "error" in line)
        return f"{config.kernel} does not compile: {next(wrong, 'see the log of compile_config')}"


def launcher(case: Case, problem: BackwardProblem) -> tuple[Any, int]:
    """What runs the pass on a problem, and the bytes of its workspace."""
    operands, device = layouts(problem), device_info(0)
    config = Sm80BackwardPass(case.kernels, VARIANT.config(problem, operands, device).workspace)
    return VARIANT.launcher(problem, operands, device, config), VARIANT.workspace_bytes(problem, device, config)


def bind(case: Case, x: Tensors, out: Any, lse: Any, causal: bool) -> tuple[Any, tuple[Any, Any, Any]]:
    """A function that enqueues the pass on torch's current stream, and the (dq, dk, dv) that it fills."""
    batch, seqlen, heads, dim = x.q.shape
    launch, size = launcher(case, backward_shape(batch, seqlen, heads, dim, causal, case.deterministic))
    grads = tuple(torch.full_like(like, float("nan")) for like in (x.q, x.k, x.v))
    workspace = torch.empty(size, device="cuda", dtype=torch.uint8)
    tensors = (x.dout, x.q, x.k, x.v, out, lse, None, *grads, workspace)

    def enqueue() -> None:
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        launch(*addresses, torch.cuda.current_stream().cuda_stream)

    return enqueue, (grads[0], grads[1], grads[2])


def exact_gradients(x: Tensors, causal: bool) -> Any:
    """Float64 (dq, dk, dv)."""
    q, k, v = (tensor.double().requires_grad_() for tensor in (x.q, x.k, x.v))
    return torch.autograd.grad(exact(q, k, v, causal), (q, k, v), x.dout.double())


def relative_errors(cases: list[Case], dim: int, causal: bool) -> list[float]:
    """Of each case against float64: the worst of dq, dk and dv over a few shapes; NaN counts as the worst of all."""
    torch.manual_seed(0)
    errors = [0.0] * len(cases)
    for batch, seqlen, heads in ((2, 333, 3), (1, 64, 1), (4, 700, 8)):
        x = Tensors.draw(batch, seqlen, heads, dim)
        out, lse = cuflash.attention(x.q, x.k, x.v, causal=causal, return_lse=True)
        wanted = exact_gradients(x, causal)
        for i, case in enumerate(cases):
            enqueue, grads = bind(case, x, out, lse, causal)
            enqueue()
            for got, want in zip(grads, wanted, strict=True):
                error = float((got.double() - want).norm() / want.norm())
                errors[i] = max(errors[i], math.inf if math.isnan(error) else error)
    return errors


def build(cases: list[Case], dim: int, causal: bool, reports: dict[Any, Any]) -> list[Case]:
    """The cases that compile, do not spill and are right; says why the others are not among them."""
    title, good = f"d{dim} {'causal' if causal else 'full'}", []
    for case in cases:
        wrong = [reports[config] for config in case.kernels if isinstance(reports[config], str)]
        if not wrong and reports[case.main].spill_store_bytes:
            wrong = [f"{case.main.kernel} spills"]
        if wrong:
            print(f"left out: {title} {case.name}: {wrong[0]}")
        else:
            good.append(case)
    right = []
    for case, error in zip(good, relative_errors(good, dim, causal), strict=True):
        if error < WORST_ERROR:
            right.append(case)
        else:
            print(f"WRONG RESULT: {title} {case.name}: relative error {error:.3g}")
    return right


def peer(x: Tensors, causal: bool) -> Timer:
    """Times torch's FlashAttention-2 backward pass, with the out and lse of its own forward pass."""
    q, k, v, dout = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v, x.dout))
    aten = torch.ops.aten
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal
    )
    backward = aten._scaled_dot_product_flash_attention_backward
    inputs = (dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)
    return torch_timer(lambda: backward(*inputs))


def measure(cases: list[Case], dim: int, seqlen: int, causal: bool, rounds: int) -> tuple[Any, Any]:
    """TFLOP/s of every case, and of the peer, at one length."""
    batch, heads = TOKENS // seqlen, WIDTH // dim
    x = Tensors.draw(batch, seqlen, heads, dim)
    out, lse = cuflash.attention(x.q, x.k, x.v, causal=causal, return_lse=True)
    timers = {PEER: peer(x, causal)}
    for case in cases:
        timers[case.name] = torch_timer(bind(case, x, out, lse, causal)[0])
    flops = 2.5 * 4 * batch * heads * seqlen * seqlen * dim / (2 if causal else 1)
    speed = {name: flops / ms / 1e9 for name, ms in medians(timers, rounds).items()}
    return speed, {PEER: speed.pop(PEER)}


def print_table(title: str, cases: list[Case], reports: dict[Any, Any], seqlens: list[int], columns: list[Any]) -> None:
    """Rows of TFLOP/s with the registers of the kernel that walks tiles, and the ratios of the first case."""
    tails = {}
    for case in cases:
        tails[case.name] = f"{reports[case.main].registers:>6} {reports[case.main].spill_store_bytes:>6}"
    print_rows(title, tails, seqlens, columns)
    first = cases[0].name
    print_ratios(f"{first} / FA2", [ours[first] / others[PEER] for ours, others in columns])
    for case in cases:
        default = case.name.removesuffix(" deterministic")
        if case.deterministic and default in columns[0][0]:
            print_ratios(f"{case.name} / {default}", [ours[case.name] / ours[default] for ours, _ in columns])


def main() -> None:
    """Parse arguments, measure and print one table a head dim and mask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help='Config fields to change, such as "tile_n=128,stages=1|2"')
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--deterministic", action="store_true", help="time the deterministic pass, too")
    args = parser.parse_args()
    try:
        changes = [one for change in args.changes for one in combinations(change)]
        check_fields(changes)
    except ValueError as error:
        parser.error(str(error))
    kinds = [(dim, mask == "causal") for dim in args.d for mask in args.masks]
    wanted = {kind: list(passes(*kind, changes, args.deterministic)) for kind in kinds}
    configs = list({config: None for cases in wanted.values() for case in cases for config in case.kernels})
    with ThreadPoolExecutor() as pool:
        reports = dict(zip(configs, pool.map(compiled, configs), strict=True))
    print(torch.cuda.get_device_name(), "bfloat16,", TOKENS, "tokens, heads * head_dim =", WIDTH, "- TFLOP/s, medians")
    for (dim, causal), cases in wanted.items():
        cases = build(cases, dim, causal, reports)
        if cases:
            columns = [measure(cases, dim, seqlen, causal, args.rounds) for seqlen in args.seqlens]
            print_table(f"d{dim} {'causal' if causal else 'full'}", cases, reports, args.seqlens, columns)


if __name__ == "__main__":
    main()
