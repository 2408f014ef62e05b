"""Tile sweep of the sm80 forward kernel: build Configs, check them, time them beside torch's FlashAttention-2.

    python benchmarks/tile_sweep.py                          # the tiles that cuflash uses
    python benchmarks/tile_sweep.py --d 128 "tile_n=48" "stages=1,blocks_per_sm=3"

Each positional argument is a set of Config fields to change from the tile that cuflash would take. Every Config is
compared with float64 before it is timed; all of them and the peer are timed in turns in one process, on random normal
inputs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from cuflash import jit
from cuflash.device import device_info
from cuflash.launch import ForwardLaunch
from cuflash.plan import contiguous_operands
from cuflash.problem import Options, Problem, make_problem
from cuflash.variants.sm80_forward import VARIANT, Sm80ForwardConfig

TOKENS = 16384
WIDTH = 2048  # heads * head_dim


@dataclass(frozen=True)
class Case:
    """One Config under test for one head dim and mask."""

    name: str
    config: Sm80ForwardConfig
    report: jit.CompileReport


def shape(batch: int, seqlen: int, heads: int, dim: int, causal: bool) -> Problem:
    """A self-attention problem in bshd."""
    sizes = (batch, seqlen, heads, dim)
    return make_problem(sizes, sizes, sizes, "bfloat16", Options(causal=causal))


def launcher(case: Case, problem: Problem) -> ForwardLaunch:
    """What runs the Config on a problem."""
    return VARIANT.launcher(problem, contiguous_operands(problem), device_info(0), case.config)


def run(launch: ForwardLaunch, q: Any, k: Any, v: Any, out: Any) -> None:
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


def is_right(case: Case, dim: int, causal: bool) -> bool:
    """Whether the relative error against float64 is that of rounding to bfloat16."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 333, 3, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    run(launcher(case, shape(2, 333, 3, dim, causal)), q, k, v, out)
    want = exact(q, k, v, causal)
    return bool((out.double() - want).norm() / want.norm() < 5e-3)


def build(dims: list[int], changes: list[str]) -> dict[tuple[int, bool], list[Case]]:
    """Compile all Configs, in parallel."""
    device = device_info(0)
    wanted = []
    for dim in dims:
        for causal in (False, True):
            base = VARIANT.config(
                shape(1, 4096, 1, dim, causal), contiguous_operands(shape(1, 4096, 1, dim, causal)), device
            )
            for change in ["", *changes]:
                fields = dict(part.split("=") for part in change.split(",") if part)
                wanted.append(
                    (dim, causal, change or "default", replace(base, **{k: int(x) for k, x in fields.items()}))
                )
    with ThreadPoolExecutor() as pool:
        built = list(pool.map(lambda item: jit.compile_config(item[3], device.arch), wanted))
    cases: dict[tuple[int, bool], list[Case]] = {}
    for (dim, causal, name, config), kernel in zip(wanted, built, strict=True):
        case = Case(name, config, kernel.report)
        if is_right(case, dim, causal):
            cases.setdefault((dim, causal), []).append(case)
        else:
            print(f"WRONG RESULT: d{dim} {'causal' if causal else 'full'} {name}")
    return cases


def time_in_turns(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each function, taking turns."""
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(500_000)  # the launches below queue up behind this, so host time does not count
            start.record()
            for _ in range(4):
                function()
            stop.record()
            events[name].append((start, stop))
        torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) / 4 for a, b in pairs) for name, pairs in events.items()}


def measure(cases: list[Case], dim: int, seqlen: int, causal: bool, rounds: int) -> dict[str, float]:
    """TFLOP/s of every case and of FlashAttention-2 at one length."""
    batch, heads = TOKENS // seqlen, WIDTH // dim
    q, k, v = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.empty_like(q)
    bhsd = [x.transpose(1, 2) for x in (q, k, v)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    functions: dict[str, Callable[[], Any]] = {"torch FA2": lambda: flash(*bhsd, 0.0, causal)}
    for case in cases:
        launch = launcher(case, shape(batch, seqlen, heads, dim, causal))
        functions[case.name] = lambda launch=launch: run(launch, q, k, v, out)  # type: ignore[misc]
    flops = 4 * batch * heads * seqlen * seqlen * dim / (2 if causal else 1)
    return {name: flops / ms / 1e9 for name, ms in time_in_turns(functions, rounds).items()}


def main() -> None:
    """Parse arguments, measure and print one table a head dim and mask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help='Config fields to change, such as "tile_n=32,blocks_per_sm=3"')
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "bfloat16,", TOKENS, "tokens, heads * head_dim =", WIDTH, "- TFLOP/s, medians")
    for (dim, causal), cases in build(args.d, args.changes).items():
        columns = [measure(cases, dim, seqlen, causal, args.rounds) for seqlen in args.seqlens]
        print(f"d{dim} {'causal' if causal else 'full'}".ljust(40), *(f"{s:>6}" for s in args.seqlens), "  regs spills")
        for name in columns[0]:
            report = next((c.report for c in cases if c.name == name), None)
            tail = f"{report.registers:>6} {report.spill_store_bytes:>6}" if report else ""
            print(name.ljust(40), *(f"{column[name]:>6.0f}" for column in columns), tail)
        ratios = (column["default"] / column["torch FA2"] for column in columns if "default" in column)
        print("default / torch FA2".ljust(40), *(f"{ratio:>6.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
