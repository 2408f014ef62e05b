"""Run the CUDA variants on small, odd problems under compute-sanitizer: ``python benchmarks/sanitize.py``.

Needs a GPU, CuPy and compute-sanitizer on the PATH. Exit status 1 when a tool found something or did not finish.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from typing import Any

HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (96, 80), (192, 128), (40, 24))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (70, 9)},
    {"causal": "top-left", "softcap": 20.0},
)


RUNS = ("sm80", "sm90", "sm80-backward", "sm90-backward")


def run_cases(run: str) -> None:
    """Every head dim and mask once, rows without keys, NaN under a mask, and more tiles than multiprocessors."""
    import cupy
    import numpy as np

    import cuflash

    variant, _, backward = run.partition("-")
    rng = np.random.default_rng(0)
    calls = skipped = 0

    def attend(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], poison: bool, **options: Any) -> None:
        nonlocal calls, skipped
        arrays = [cupy.asarray(rng.standard_normal(shape), np.float16) for shape in (q, k, v)]
        if poison and not backward:
            arrays[2][:, 200:210, :, 3] = np.nan
        try:
            out, lse = cuflash.attention(*arrays, variant=variant, return_lse=True, **options)
            for deterministic in (False, True) if backward else ():
                given = (out, *arrays, out, lse)  # out serves as its own gradient
                cuflash.attention_backward(*given, variant=variant, deterministic=deterministic, **options)
            calls += 1
        except cuflash.UnsupportedProblem:
            skipped += 1

    for d, dv in HEAD_DIMS:
        for options in OPTIONS:
            attend((1, 333, 2, d), (1, 450, 1, d), (1, 450, 1, dv), "window" in options, **options)
        attend((1, 5, 1, d), (1, 0, 1, d), (1, 0, 1, dv), False)
        attend((1, 300, 1, d), (1, 20, 1, d), (1, 20, 1, dv), False, causal=True)
    attend((2, 700, 50, 64), (2, 700, 50, 64), (2, 700, 50, 64), False, causal=True)
    cupy.cuda.runtime.deviceSynchronize()
    print(f"{run}: {calls} calls, {skipped} that it does not take")


def start(run: str, tool: str) -> subprocess.Popen[str]:
    """The cases of one run under one tool, or under none."""
    command = [sys.executable, __file__, "--cases", run]
    if tool:
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(name: str, process: subprocess.Popen[str], deadline: float) -> bool:
    """Print what a run found, and say whether it found nothing and finished."""
    try:
        output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        process.kill()
        print(f"{name}: not finished in time")
        return False
    clean = process.returncode == 0 and " calls, " in output
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", output)
    print(f"{name}: {'; '.join(summary) or f'exit status {process.returncode}'}")
    if not clean:
        print("\n".join(output.splitlines()[:40]))
    return clean


def main() -> int:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--tool", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--seconds", type=float, default=300, help="for all of them, which run side by side")
    parser.add_argument("--cases", choices=RUNS, help="run the cases of one of them, under no tool")
    args = parser.parse_args()
    if args.cases:
        run_cases(args.cases)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.seconds
    plain = [(run, start(run, "")) for run in args.run]  # compiles, which under a tool takes long
    bad = sum(not finish(run, process, deadline) for run, process in plain)
    runs = [(f"{run} {tool}", start(run, tool)) for run in args.run for tool in args.tool]
    bad += sum(not finish(name, process, deadline) for name, process in runs)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
