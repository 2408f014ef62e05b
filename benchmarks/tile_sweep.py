"""Tile sweep of a CUDA variant's forward kernel: build Configs, check them, time them beside its peers.

    python benchmarks/tile_sweep.py                          # the sm80 tiles that cuflash uses, beside torch's FA2
    python benchmarks/tile_sweep.py --variant sm90           # the same for sm90, beside torch cuDNN and FA3
    python benchmarks/tile_sweep.py --d 128 -- "tile_n=48" "stages=1,blocks_per_sm=3"

Each positional argument is a set of Config fields to change from the tile that cuflash would take;
"stages=1|2,tile_n=64|96" stands for all four combinations. Configs that spill registers are left out. The others are
compared with float64 before they are timed, all of them and the peers in turns in one process, on random normal
inputs. FA3 is the JAX package dew-flash-attn-cu13 where it is installed; it is timed on the host's clock, many calls in
one jitted function less a few.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from cuflash import jit, select
from cuflash.device import device_info
from cuflash.plan import contiguous_operands
from cuflash.problem import Options, Problem, make_problem

TOKENS = 16384
WIDTH = 2048  # heads * head_dim
CALLS = 12  # in one measurement, of every function: what runs longer at a time runs hotter, and slower

Timer = Callable[[], float]  # milliseconds of one call


@dataclass(frozen=True)
class Case:
    """One Config under test for one head dim and mask."""

    name: str
    config: Any
    report: jit.CompileReport


def shape(batch: int, seqlen: int, heads: int, dim: int, causal: bool) -> Problem:
    """A self-attention problem in bshd."""
    sizes = (batch, seqlen, heads, dim)
    return make_problem(sizes, sizes, sizes, "bfloat16", Options(causal=causal))


def launcher(variant: Any, case: Case, problem: Problem) -> Any:
    """What runs the Config on a problem."""
    return variant.launcher(problem, contiguous_operands(problem), device_info(0), case.config)


def run(launch: Any, q: Any, k: Any, v: Any, out: Any) -> None:
    """Enqueue on torch's current stream."""
    stream = torch.cuda.current_stream().cuda_stream
    launch(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), 0, stream)


def exact(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Float64 attention."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


def relative_error(variant: Any, case: Case, dim: int, causal: bool) -> float:
    """Against float64, over a few shapes; 0.003 or so is what rounding to bfloat16 costs."""
    torch.manual_seed(0)
    errors = []
    for batch, seqlen, heads in ((2, 333, 3), (1, 64, 1), (40, 700, 8)):
        q, k, v = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        out = torch.full_like(q, float("nan"))
        run(launcher(variant, case, shape(batch, seqlen, heads, dim, causal)), q, k, v, out)
        want = exact(q, k, v, causal)
        errors.append(float((out.double() - want).norm() / want.norm()))
    return max(errors, key=lambda error: (error != error, error))


def combinations(change: str) -> list[dict[str, str]]:
    """The changes of fields that one positional argument stands for."""
    names, values = zip(*(part.split("=") for part in change.split(",")), strict=True)
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*(v.split("|") for v in values))]


def case_name(fields: dict[str, str]) -> str:
    """What the tables call a Config with some fields changed."""
    return ",".join(f"{name}={x}" for name, x in fields.items()) or "default"


def changed(config: Any, fields: dict[str, str]) -> Any:
    """A Config with some fields replaced by what the command line says."""
    return replace(config, **{name: type(getattr(config, name))(int(x)) for name, x in fields.items()})


def build(variant: Any, dims: list[int], masks: list[str], changes: list[str]) -> dict[tuple[int, bool], list[Case]]:
    """Compile all Configs, in parallel, and keep those that are right."""
    device = device_info(0)
    wanted = []
    all_fields = [{}, *(fields for change in changes for fields in combinations(change))]
    for dim in dims:
        for causal in (mask == "causal" for mask in masks):
            problem = shape(1, 4096, 1, dim, causal)
            base = variant.config(problem, contiguous_operands(problem), device)
            for fields in all_fields:
                wanted.append((dim, causal, case_name(fields), changed(base, fields)))
    with ThreadPoolExecutor() as pool:
        built = list(pool.map(lambda item: jit.compile_config(item[3], variant.arch(device)), wanted))
    cases: dict[tuple[int, bool], list[Case]] = {}
    for (dim, causal, name, config), kernel in zip(wanted, built, strict=True):
        case = Case(name, config, kernel.report)
        if kernel.report.spill_store_bytes:
            print(f"spills: d{dim} {'causal' if causal else 'full'} {name}")
            continue
        error = relative_error(variant, case, dim, causal)
        if error < 5e-3:
            cases.setdefault((dim, causal), []).append(case)
        else:
            print(f"WRONG RESULT: d{dim} {'causal' if causal else 'full'} {name}: relative error {error:.3g}")
    return cases


def torch_timer(function: Callable[[], Any]) -> Timer:
    """Times calls on torch's stream by events."""

    def measure() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(500_000)  # the launches below queue up behind this, so host time does not count
        start.record()
        for _ in range(CALLS):
            function()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / CALLS

    function()
    return measure


def jax_timer(call: Callable[[int], Any]) -> Timer:
    """Times one of up to ``CALLS`` + 2 equal computations that a jitted function makes in one call."""
    import jax

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        jax.block_until_ready(call(count))
        return time.perf_counter() - started

    def measure() -> float:
        few = seconds(2)
        return (seconds(CALLS + 2) - few) / CALLS * 1e3  # without what one call costs on the host

    measure()
    return measure


def fa3_timer(q: Any, k: Any, v: Any, causal: bool) -> Timer | None:
    """FlashAttention-3 through JAX, or None where it is not installed. Several calls go into one jitted function."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
        from dew_flash_attn import flash_mha
    except ImportError:
        return None
    queries = [jax.dlpack.from_dlpack(q + 0) for _ in range(CALLS + 2)]  # equal calls would be made once
    keys, values = (jax.dlpack.from_dlpack(x) for x in (k, v))
    attend = jax.jit(lambda queries, k, v: [flash_mha(q, k, v, is_causal=causal) for q in queries])
    return jax_timer(lambda calls: attend(queries[:calls], keys, values))


def peers(variant: str, q: Any, k: Any, v: Any, causal: bool) -> dict[str, Timer]:
    """Timers of the peers of a variant, on (batch, seqlen, heads, head_dim) tensors."""
    bhsd = [x.transpose(1, 2) for x in (q, k, v)]
    aten = torch.ops.aten
    if variant == "sm80":
        flash = aten._scaled_dot_product_flash_attention
        return {"torch FA2": torch_timer(lambda: flash(*bhsd, 0.0, causal))}
    cudnn = aten._scaled_dot_product_cudnn_attention
    found = {"torch cuDNN": torch_timer(lambda: cudnn(*bhsd, None, False, 0.0, causal))}
    fa3 = fa3_timer(q, k, v, causal)
    return found | ({} if fa3 is None else {"FA3": fa3})


def medians(timers: dict[str, Timer], rounds: int) -> dict[str, float]:
    """Milliseconds of a call of each, timed in turns."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    order = list(timers)
    for turn in range(rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            samples[name].append(timers[name]())
    return {name: statistics.median(ms) for name, ms in samples.items()}


def measure(
    variant: Any, cases: list[Case], dim: int, seqlen: int, causal: bool, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """TFLOP/s of every case, and of the peers, at one length."""
    batch, heads = TOKENS // seqlen, WIDTH // dim
    q, k, v = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    timers = peers(variant.name, q, k, v, causal)
    names = list(timers)
    for case in cases:
        launch = launcher(variant, case, shape(batch, seqlen, heads, dim, causal))
        timers[case.name] = torch_timer(lambda launch=launch: run(launch, q, k, v, out))  # type: ignore[misc]
    flops = 4 * batch * heads * seqlen * seqlen * dim / (2 if causal else 1)
    speed = {name: flops / ms / 1e9 for name, ms in medians(timers, rounds).items()}
    return {name: speed[name] for name in speed if name not in names}, {name: speed[name] for name in names}


def print_rows(title: str, tails: dict[str, str], seqlens: list[int], columns: list[Any]) -> None:
    """Rows of TFLOP/s, the peers' and then ours, the fastest at the last length first; `tails` end the rows of ours."""
    print(title.ljust(40), *(f"{s:>6}" for s in seqlens), "  regs spills")
    for which in (1, 0):
        for name in sorted(columns[0][which], key=lambda name: -columns[-1][which][name]):
            print(name.ljust(40), *(f"{column[which][name]:>6.0f}" for column in columns), tails.get(name, ""))


def print_ratios(label: str, ratios: list[float]) -> None:
    """One more row of a table."""
    print(label.ljust(40), *(f"{ratio:>6.2f}" for ratio in ratios))


def print_table(dim: int, causal: bool, cases: list[Case], seqlens: list[int], columns: list[Any]) -> None:
    """Rows of TFLOP/s, and of the ratio of the first case to the best peer."""
    tails = {case.name: f"{case.report.registers:>6} {case.report.spill_store_bytes:>6}" for case in cases}
    print_rows(f"d{dim} {'causal' if causal else 'full'}", tails, seqlens, columns)
    first = cases[0].name
    print_ratios(f"{first} / best peer", [ours[first] / max(others.values()) for ours, others in columns])


def main() -> None:
    """Parse arguments, measure and print one table a head dim and mask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help='Config fields to change, such as "tile_n=32,blocks_per_sm=3"')
    parser.add_argument("--variant", default="sm80")
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=["full", "causal"])
    args = parser.parse_args()
    variant = select.load(args.variant)
    print(torch.cuda.get_device_name(), "bfloat16,", TOKENS, "tokens, heads * head_dim =", WIDTH, "- TFLOP/s, medians")
    for (dim, causal), cases in build(variant, args.d, args.masks, args.changes).items():
        columns = [measure(variant, cases, dim, seqlen, causal, args.rounds) for seqlen in args.seqlens]
        print_table(dim, causal, cases, args.seqlens, columns)


if __name__ == "__main__":
    main()
