"""The bench: our variants beside the attention of whatever else is installed, on the same inputs in the same process.

Every implementation is checked against float64 before it is timed; they are timed in turns, and medians count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from cuflash.arrays import numpy_dtype
from cuflash.bench_peers import Runner, runners
from cuflash.measure import Array, Place, matplotlib_problem
from cuflash.problem import Options, make_problem
from cuflash.progress import Progress
from cuflash.reference import attention_reference, check_forward, two_pass

_ROUND_SECONDS = 0.02  # of each implementation in each round, at least one call
_CHECKED_ROWS = 48
_GPU_DEFAULTS = ("bfloat16", [64, 128, 256], [512, 1024, 2048, 4096, 8192, 16384], 16384, 2048)
_CPU_DEFAULTS = ("float32", [64], [512, 1024, 2048], 2048, 512)
_PEER_FACTOR = 10  # a peer this far past our error bound computes something else


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    dtype: str
    head_dim: int
    seqlen: int
    batch: int
    heads: int
    causal: bool

    @property
    def flops(self) -> float:
        """As papers count them, the basis of TFLOP/s: 4 batch heads seqlen^2 head_dim, half with a causal mask."""
        full = 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return full / 2 if self.causal else full

    @property
    def score_bytes(self) -> int:
        """All scores in float32."""
        return 4 * self.batch * self.heads * self.seqlen**2


@dataclass
class Timing:
    """What came of one implementation on one case; `note` says why there is no time."""

    name: str
    ours: bool
    times: list[float] = field(default_factory=list)
    error: float | None = None
    note: str = ""
    failed: bool = False

    @property
    def seconds(self) -> float | None:
        """Median of the rounds."""
        return statistics.median(self.times) if self.times else None


def run(args: argparse.Namespace, masks: Sequence[bool]) -> int:
    """The ``bench`` command; returns the exit status, 1 when a result of ours is wrong.

    Raises
    ------
    ImportError
        Before anything is timed, when a plot is asked for and matplotlib is not installed.
    """
    if args.plot and (problem := matplotlib_problem()):
        raise ImportError(f"--plot: {problem}")
    place = Place.choose(args.device)
    cases = list(_cases(args, masks, place))
    peers = runners(place)
    _print_head(place)
    results = []
    with Progress(len(cases) * len(peers) * (1 + args.rounds)) as progress:
        for case in cases:
            timings = measure(case, peers, args.rounds, progress.step, place)
            progress.clear()
            _print_case(case, timings)
            results.append((case, timings))
    record = _record(results, place)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        _plot(results, record["device"], args.plot)
    return 1 if any(timing.ours and timing.failed for _, timings in results for timing in timings) else 0


def _cases(args: argparse.Namespace, masks: Sequence[bool], place: Place) -> Iterator[Case]:
    dtype, dims, seqlens, tokens, hidden = _GPU_DEFAULTS if place.gpu else _CPU_DEFAULTS
    tokens, hidden = args.tokens or tokens, args.hidden or hidden
    for dim in args.head_dims or dims:
        for causal in masks:
            for seqlen in args.seqlens or seqlens:
                yield Case(args.dtype or dtype, dim, seqlen, max(tokens // seqlen, 1), max(hidden // dim, 1), causal)


def _limit(place: Place) -> float:
    """Bytes of scores that implementations with all of them in memory may hold (they make several copies)."""
    if place.gpu:
        return float(place.xp.cuda.runtime.memGetInfo()[1]) / 6
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 6


def measure(
    case: Case, peers: Sequence[Runner], rounds: int, step: Callable[[str], None], place: Place
) -> list[Timing]:
    """Check and time each implementation on one case."""
    score_limit = _limit(place)
    rng = np.random.default_rng(0)
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32).astype(numpy_dtype(case.dtype)) for _ in range(3))
    where = f"D {case.head_dim} seqlen {case.seqlen}{' causal' if case.causal else ''}"
    timings, ready = [], []
    for peer in peers:
        step(f"{where}: check {peer.name}")
        timing = Timing(peer.name, peer.ours)
        timings.append(timing)
        if peer.quadratic and case.score_bytes > score_limit:
            timing.note = f"skipped: {case.score_bytes / 1e9:.3g} GB of scores"
            continue
        try:
            with peer.context():
                call = peer.prepare(q, k, v, case.causal)
                _check(timing, peer.to_numpy(call()), q, k, v, case.causal)
                once = peer.seconds(call, 1)
        except Exception as error:  # peers refuse problems and run out of memory each in its own way
            timing.note = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:100]
            timing.failed = True
            continue
        if not timing.failed:
            ready.append((peer, call, timing, min(max(round(_ROUND_SECONDS / max(once, 1e-6)), 1), 200)))
    # On a CPU the threads of a BLAS spin for a while after a product and would steal cores from the next.
    pause = 0.0 if place.gpu else 0.05
    for number in range(rounds):
        for peer, call, timing, calls in ready:
            step(f"{where}: {peer.name}, round {number + 1}")
            with peer.context():
                time.sleep(pause)
                call()  # one that is not timed, so that the one before leaves no trace
                timing.times.append(peer.seconds(call, calls))
    return timings


def _check(timing: Timing, out: Array, q: Array, k: Array, v: Array, causal: bool) -> None:
    """Compare three blocks of rows with float64; ours must keep the error rule, peers come near it."""
    seqlen, last = q.shape[1], (q.shape[0] - 1, q.shape[2] - 1)
    rows = min(_CHECKED_ROWS, seqlen)
    for start, (b, h) in ((0, (0, 0)), ((seqlen - rows) // 2, last), (seqlen - rows, (0, last[1]))):
        stop = start + rows
        # With a causal mask the block's last row sees the keys up to its own: the bottom-right alignment of these.
        keys = slice(0, stop if causal else seqlen)
        at, kv = np.s_[b, start:stop, h], np.s_[b, keys, h]
        try:
            report = check_forward(out[at], q[at], k[kv], v[kv], causal=causal)
            error = report.max_error
        except AssertionError as problem:
            error = _error(out[at], q[at], k[kv], v[kv], causal)
            yardstick = check_forward(two_pass(q[at], k[kv], v[kv], causal=causal), q[at], k[kv], v[kv], causal=causal)
            if timing.ours or not error <= _PEER_FACTOR * yardstick.max_bound:
                timing.failed, timing.note = True, f"wrong: {problem}"[:160]
        timing.error = max(timing.error or 0.0, error)


def _error(out: Array, q: Array, k: Array, v: Array, causal: bool) -> float:
    return float(np.abs(out.astype(np.float64) - attention_reference(q, k, v, causal=causal)).max())


def _ratio(timing: Timing, timings: Sequence[Timing]) -> float | None:
    """How many times as fast as the fastest peer."""
    peers = [other.seconds for other in timings if not other.ours and other.seconds]
    return min(peers) / timing.seconds if timing.seconds and peers else None


def _print_head(place: Place) -> None:
    facts = _environment(place)
    print(f"{facts['device']}, {facts['date']}, " + ", ".join(f"{n} {v}" for n, v in facts["versions"].items()))
    print("random normal inputs; median of interleaved rounds; vs best: speed against the fastest peer")


def _print_case(case: Case, timings: Sequence[Timing]) -> None:
    mask = "causal" if case.causal else "full"
    print(f"\n{case.dtype} D {case.head_dim} seqlen {case.seqlen} batch {case.batch} heads {case.heads} {mask}")
    print(f"  {'':<18}{'ms':>10}{'TFLOP/s':>10}{'vs best':>9}{'max error':>11}")
    for timing in timings:
        error = "" if timing.error is None else f"{timing.error:.1e}"
        if timing.seconds is None:
            print(f"  {timing.name:<18}{'-':>10}{'-':>10}{'':>9}{error:>11}  {timing.note}")
            continue
        ratio = _ratio(timing, timings)
        shown = f"{ratio:.2f}" if ratio else ""
        speed = case.flops / timing.seconds / 1e12
        print(f"  {timing.name:<18}{timing.seconds * 1e3:>10.3f}{speed:>10.4g}{shown:>9}{error:>11}", flush=True)


def _environment(place: Place) -> dict[str, Any]:
    versions = {"Python": platform.python_version()}
    for name in ("cuflash", "numpy", "torch", "jax", "cupy-cuda13x", "cupy-cuda12x"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if place.gpu:
        from cuflash.device import device_info

        device = device_info(0).name
    else:
        device = f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    return {
        "device": device,
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "command": " ".join(["cuflash", *sys.argv[1:]]),
    }


def _record(results: Sequence[tuple[Case, Sequence[Timing]]], place: Place) -> dict[str, Any]:
    rows = []
    for case, timings in results:
        shape = (case.batch, case.seqlen, case.heads, case.head_dim)
        exact_flops = make_problem(shape, shape, shape, case.dtype, Options(causal=case.causal)).flops()
        for timing in timings:
            seconds = timing.seconds
            speed = case.flops / seconds / 1e12 if seconds else None
            figures = {"seconds": seconds, "tflops": speed, "ratio_to_best_peer": _ratio(timing, timings)}
            # "tflops" is of "flops", the convention; "visible_flops" counts the pairs that the mask leaves, exactly.
            flops = {"flops": case.flops, "visible_flops": exact_flops}
            rows.append({**asdict(case), **flops, **asdict(timing), **figures})
    return {**_environment(place), "results": rows}


def _plot(results: Sequence[tuple[Case, Sequence[Timing]]], device: str, path: Path) -> None:
    """One panel for each head dim and mask: TFLOP/s over seqlen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = sorted({(case.head_dim, case.causal) for case, _ in results}, key=lambda panel: panel[::-1])
    columns = min(len({dim for dim, _ in panels}), 4)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1.6 + 4.2 * columns, 0.8 + 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (dim, causal) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        chosen = [(case, timings) for case, timings in results if (case.head_dim, case.causal) == (dim, causal)]
        for index, name in enumerate(timing.name for timing in chosen[0][1]):
            points = [(c.seqlen, c.flops / t[index].seconds / 1e12) for c, t in chosen if t[index].seconds]  # type: ignore[operator]
            ours = chosen[0][1][index].ours
            style: dict[str, Any] = {"linewidth": 2.6, "zorder": 3} if ours else {"linewidth": 1.3, "linestyle": "--"}
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, color=f"C{index}", **style)
        axes.set(title=f"head_dim {dim}, {'causal' if causal else 'full'}", xlabel="seqlen", ylabel="TFLOP/s")
        ticks = sorted({case.seqlen for case, _ in chosen})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.suptitle(f"Attention forward, {results[0][0].dtype}, {device}")
    figure.savefig(path, dpi=120)
