"""Tile sweep of a CUDA variant's backward pass: build Configs, check them, time them beside its peers.

    python benchmarks/backward_sweep.py --deterministic      # the sm80 tiles that cuflash uses, beside torch's FA2
    python benchmarks/backward_sweep.py --variant sm90       # the same for sm90, beside torch cuDNN and FA3
    python benchmarks/backward_sweep.py --d 128 -- "tile_n=128,warps=8,warps_n=4|2" "stages=1,blocks_per_sm=1"

Each positional argument is a set of fields to change from the Config of the main kernel that cuflash would take.
"stages=1|2,tile_n=64|128" stands for all four combinations. What does not compile, spills registers or needs more
shared memory than there is, is left out. The others are compared with float64 gradients before they are timed, whole
passes with all their kernels and the peers in turns in one process, on random normal inputs. FA3 is the JAX package
dew-flash-attn-cu13 where it is installed; see tile_sweep.py.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from tile_sweep import (
    CALLS,
    TOKENS,
    WIDTH,
    Timer,
    case_name,
    changed,
    combinations,
    exact,
    jax_timer,
    medians,
    print_ratios,
    print_rows,
    shape,
    torch_timer,
)

import cuflash
from cuflash import jit, select
from cuflash.device import device_info
from cuflash.errors import CompilationError
from cuflash.plan_backward import contiguous_layouts
from cuflash.problem import BackwardProblem
from cuflash.variants.base import BackwardOperands
from cuflash.variants.sm80_backward import ROW_TILE, TURN_ROWS, BackwardPass

WORST_ERROR = 1e-2  # relative; 0.0025 or so is what rounding to bfloat16 costs
# What the problem, the layouts, the pass and the device decide, the same for all kernels of a pass.
FIXED = {"element", "tile_d", "tile_dv", "vector_bytes", "out_vector_bytes", "exact_dims", "has_band", "score"}
FIXED |= {"ordered", "reduce_width"}

Fields = dict[str, str]


@dataclass(frozen=True)
class Case:
    """One backward pass under test for one head dim and mask: its Configs in the order of their launches."""

    name: str
    variant: Any
    kernels: tuple[Any, ...]
    deterministic: bool

    @property
    def main(self) -> Any:
        """The Config of the kernel that walks tiles."""
        return main_of(self.kernels)


def main_of(kernels: tuple[Any, ...]) -> Any:
    """The Config of the kernel that walks tiles, among those of a pass."""
    return kernels[1]


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


def check_fields(variant: Any, changes: list[Fields]) -> None:
    """Raise ValueError for what no Config can be made of.

    The workspace has a multiple of ``ROW_TILE`` rows for each head, which tiles of query rows must divide.
    """
    problem = backward_shape(1, 4096, 1, 64, False, False)
    config = main_of(variant.config(problem, layouts(problem), device_info(0)).kernels)
    known = [field.name for field in fields(config) if field.name not in FIXED]
    for change in changes:
        for name, value in change.items():
            if name not in known:
                raise ValueError(f"{name}={value}: the fields to change are {', '.join(known)}")
            if name == "tile_m" and (int(value) < TURN_ROWS or ROW_TILE % int(value)):
                raise ValueError(f"{name}={value} must be {TURN_ROWS} or more and divide {ROW_TILE}")


def passes(variant: Any, dim: int, causal: bool, changes: list[Fields], deterministic: bool) -> Iterator[Case]:
    """All backward passes to build."""
    for change in ({}, *changes):
        for mode in (False, True) if deterministic else (False,):
            problem = backward_shape(1, 4096, 1, dim, causal, mode)
            kernels = variant.config(problem, layouts(problem), device_info(0)).kernels
            changing = [changed(config, change) if config is main_of(kernels) else config for config in kernels]
            yield Case(case_name(change) + (" deterministic" if mode else ""), variant, tuple(changing), mode)


def compiled(variant: Any, config: Any) -> jit.CompileReport | str:
    """What the compiler says of a Config, or why it is of no use."""
    device = device_info(0)
    if config.shared_bytes > device.shared_memory:
        return f"{config.kernel} needs {config.shared_bytes} bytes of shared memory, of {device.shared_memory}"
    try:
        return jit.compile_config(config, variant.arch(device)).report
    except CompilationError as error:
        wrong = (line for line in str(error).splitlines() if "error" in line)
        return f"{config.kernel} does not compile: {next(wrong, 'see the log of compile_config')}"


def launcher(case: Case, problem: BackwardProblem) -> tuple[Any, int]:
    """What runs the pass on a problem, and the bytes of its workspace."""
    operands, device = layouts(problem), device_info(0)
    variant = case.variant
    config = BackwardPass(case.kernels, variant.config(problem, operands, device).workspace)
    return variant.launcher(problem, operands, device, config), variant.workspace_bytes(problem, device, config)


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


def flash_timer(x: Tensors, causal: bool) -> Timer:
    """Times torch's FlashAttention-2 backward pass, with the out and lse of its own forward pass."""
    q, k, v, dout = (tensor.transpose(1, 2) for tensor in (x.q, x.k, x.v, x.dout))
    aten = torch.ops.aten
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal
    )
    backward = aten._scaled_dot_product_flash_attention_backward
    inputs = (dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)
    return torch_timer(lambda: backward(*inputs))


def cudnn_timer(x: Tensors, causal: bool) -> Timer:
    """Times torch's cuDNN backward pass, through autograd."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = [tensor.detach().transpose(1, 2).requires_grad_() for tensor in (x.q, x.k, x.v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    dout = x.dout.transpose(1, 2)
    return torch_timer(lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True))


def fa3_timer(x: Tensors, causal: bool) -> Timer | None:
    """FlashAttention-3 through JAX, or None where it is not installed. Several calls go into one jitted function."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import dew_flash_attn as fa3
        import jax
    except ImportError:
        return None
    fa3._registered()
    scale, rest = x.q.shape[-1] ** -0.5, (None, None)
    q, k, v = (jax.dlpack.from_dlpack(tensor) for tensor in (x.q, x.k, x.v))
    out, lse = jax.jit(lambda *qkv: fa3._forward3(*qkv, *rest, scale, causal, (-1, -1)))(q, k, v)
    douts = [jax.dlpack.from_dlpack(x.dout + 0) for _ in range(CALLS + 2)]  # equal calls would be made once
    differentiate = jax.jit(
        lambda douts, *inputs: [fa3._backward3(dout, *inputs, *rest, scale, causal, (-1, -1)) for dout in douts]
    )
    return jax_timer(lambda calls: differentiate(douts[:calls], q, k, v, out, lse))


def peers(variant: str, x: Tensors, causal: bool) -> dict[str, Timer]:
    """Timers of the peers of a variant."""
    if variant == "sm80":
        return {"FA2": flash_timer(x, causal)}
    found = {"cuDNN": cudnn_timer(x, causal)}
    fa3 = fa3_timer(x, causal)
    return found | ({} if fa3 is None else {"FA3": fa3})


def measure(cases: list[Case], dim: int, seqlen: int, causal: bool, rounds: int) -> tuple[Any, Any]:
    """TFLOP/s of every case, and of the peers, at one length."""
    batch, heads = TOKENS // seqlen, WIDTH // dim
    x = Tensors.draw(batch, seqlen, heads, dim)
    out, lse = cuflash.attention(x.q, x.k, x.v, causal=causal, return_lse=True)
    timers = peers(cases[0].variant.name, x, causal)
    others = list(timers)
    for case in cases:
        timers[case.name] = torch_timer(bind(case, x, out, lse, causal)[0])
    flops = 2.5 * 4 * batch * heads * seqlen * seqlen * dim / (2 if causal else 1)
    speed = {name: flops / ms / 1e9 for name, ms in medians(timers, rounds).items()}
    return speed, {name: speed.pop(name) for name in others}


def print_table(title: str, cases: list[Case], reports: dict[Any, Any], seqlens: list[int], columns: list[Any]) -> None:
    """Rows of TFLOP/s with the registers of the kernel that walks tiles, and the ratios of the first case."""
    tails = {}
    for case in cases:
        tails[case.name] = f"{reports[case.main].registers:>6} {reports[case.main].spill_store_bytes:>6}"
    print_rows(title, tails, seqlens, columns)
    first = cases[0].name
    peer = "best peer" if len(columns[0][1]) > 1 else next(iter(columns[0][1]))
    print_ratios(f"{first} / {peer}", [ours[first] / max(others.values()) for ours, others in columns])
    for case in cases:
        default = case.name.removesuffix(" deterministic")
        if case.deterministic and default in columns[0][0]:
            print_ratios(f"{case.name} / {default}", [ours[case.name] / ours[default] for ours, _ in columns])


def main() -> None:
    """Parse arguments, measure and print one table a head dim and mask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help='Config fields to change, such as "tile_n=128,stages=1|2"')
    parser.add_argument("--variant", default="sm80")
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    parser.add_argument("--deterministic", action="store_true", help="time the deterministic pass, too")
    args = parser.parse_args()
    variant = select.load(args.variant, "backward")
    try:
        changes = [one for change in args.changes for one in combinations(change)]
        check_fields(variant, changes)
    except ValueError as error:
        parser.error(str(error))
    kinds = [(dim, mask == "causal") for dim in args.d for mask in args.masks]
    wanted = {kind: list(passes(variant, *kind, changes, args.deterministic)) for kind in kinds}
    configs = list({config: None for cases in wanted.values() for case in cases for config in case.kernels})
    with ThreadPoolExecutor() as pool:
        reports = dict(zip(configs, pool.map(lambda config: compiled(variant, config), configs), strict=True))
    print(torch.cuda.get_device_name(), "bfloat16,", TOKENS, "tokens, heads * head_dim =", WIDTH, "- TFLOP/s, medians")
    for (dim, causal), cases in wanted.items():
        cases = build(cases, dim, causal, reports)
        if cases:
            columns = [measure(cases, dim, seqlen, causal, args.rounds) for seqlen in args.seqlens]
            print_table(f"d{dim} {'causal' if causal else 'full'}", cases, reports, args.seqlens, columns)


if __name__ == "__main__":
    main()
