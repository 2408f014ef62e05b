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


def run_cases(variant: str) -> None:
    """Every head dim and mask once, rows without keys, NaN under a mask, and more tiles than multiprocessors."""
    import cupy
    import numpy as np

    import cuflash

    rng = np.random.default_rng(0)
    calls = skipped = 0

    def attend(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], poison: bool, **options: Any) -> None:
        nonlocal calls, skipped
        arrays = [cupy.asarray(rng.standard_normal(shape), np.float16) for shape in (q, k, v)]
        if poison:
            arrays[2][:, 200:210, :, 3] = np.nan
        try:
            cuflash.attention(*arrays, variant=variant, return_lse=True, **options)
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
    print(f"{variant}: {calls} calls, {skipped} that it does not take")


def start(variant: str, tool: str) -> subprocess.Popen[str]:
    """The cases of one variant under one tool, or under none."""
    command = [sys.executable, __file__, "--cases", variant]
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
    parser.add_argument("--variant", nargs="+", default=["sm80", "sm90"])
    parser.add_argument("--tool", nargs="+", default=["memcheck", "racecheck"])
    parser.add_argument("--seconds", type=float, default=300, help="for all of them, which run side by side")
    parser.add_argument("--cases", metavar="VARIANT", help="run the cases of one variant, under no tool")
    args = parser.parse_args()
    if args.cases:
        run_cases(args.cases)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.seconds
    plain = [(variant, start(variant, "")) for variant in args.variant]  # compiles, which under a tool takes long
    bad = sum(not finish(variant, process, deadline) for variant, process in plain)
    runs = [(f"{variant} {tool}", start(variant, tool)) for variant in args.variant for tool in args.tool]
    bad += sum(not finish(name, process, deadline) for name, process in runs)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
