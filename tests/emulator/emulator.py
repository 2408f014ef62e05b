"""Kernels compiled for the CPU: their logic under test where there is no GPU. See emulator.hpp."""

from __future__ import annotations

import ctypes
import functools
import math
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuflash import jit, tma
from cuflash.launch import BACKWARD_POINTERS, FORWARD_PARAMS_BYTES, POINTERS, backward_params, forward_params
from cuflash.problem import BackwardProblem, Problem
from cuflash.variants import sm80_backward as sm80_backward_variant
from cuflash.variants import sm90_backward as sm90_backward_variant
from cuflash.variants.base import BackwardOperands, DeviceInfo, Operands
from cuflash.variants.cuda import score_stage

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")

_RUN = """
extern "C" const char* emulate(const void* params, const unsigned* grid, unsigned threads, unsigned shared_bytes,
                               unsigned seed, int late) {{
  return emulator::run({kernel}, params, grid, threads, shared_bytes, seed, late);
}}
"""


@functools.cache
def _folder() -> Path:
    """The sources, with the headers here in the place of ptx/."""
    folder = tempfile.TemporaryDirectory(prefix="cuflash-emulator-")
    _kept.append(folder)
    root = Path(folder.name)
    for source in jit.source_root().iterdir():
        if source.is_dir() and source.name != "ptx":
            (root / source.name).symlink_to(source)
    (root / "ptx").symlink_to(HERE / "ptx")
    return root


_kept: list[Any] = []


@functools.cache
def compiled(config: Any) -> Any:
    """The kernel of a Config as a function of (params, grid, threads, shared_bytes, seed, late)."""
    root = _folder()
    text = '#include "emulator.hpp"\n' + jit.prelude(config) + jit.flatten(config.source, root)
    unit = root / f"{config.kernel}-{len(list(root.glob('*.cpp')))}.cpp"
    unit.write_text(text + _RUN.format(kernel=config.kernel))
    library = unit.with_suffix(".so")
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", f"-I{HERE}"]
    done = subprocess.run(
        [str(COMPILER), *flags, str(unit), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{config} does not compile for the CPU:\n{done.stderr[:4000]}")
    function = ctypes.CDLL(str(library)).emulate
    function.restype = ctypes.c_char_p
    return function


@dataclass(frozen=True)
class Way:
    """How a run goes: the seed of the order of warps, and whether asynchronous work is done late."""

    seed: int
    late: bool


def run(config: Any, params: bytes, grid: tuple[int, int, int], shared_bytes: int, way: Way) -> None:
    """Run a grid.

    Raises
    ------
    RuntimeError
        For an access outside shared memory, threads that wait for ever, and the like.
    """
    buffer = ctypes.create_string_buffer(params + bytes(64), len(params) + 64)
    blocks = (ctypes.c_uint * 3)(*grid)
    error = compiled(config)(buffer, blocks, config.threads, shared_bytes, way.seed, int(way.late))
    if error:
        raise RuntimeError(f"{config.kernel}: {error.decode()}")


def _encode(address: int, strides: tuple[int, ...], sizes: tuple[int, ...], tile_rows: int, tile_dim: int) -> bytes:
    """The emulator's tensor map; `strides` in elements of (batch, row, head), `sizes` as in tma.Encoder."""
    batch, row, head = strides
    dim, seqlen, heads, entries = sizes
    columns = tma.panel_columns(tile_dim)
    counts = (dim, seqlen, heads if head else 1, entries if batch else 1)
    packed = struct.pack("Q4q4q3i", address, *counts, 2, 2 * row, 2 * head, 2 * batch, columns, tile_rows, 2 * columns)
    return packed.ljust(tma.MAP_BYTES, b"\0")


def sm80_forward(config: Any, problem: Problem, operands: Operands, pointers: tuple[int, ...], way: Way) -> None:
    """As ForwardLaunch launches it."""
    tiles = -(-problem.seqlen_q // config.tile_m)
    params = POINTERS.pack(*pointers) + forward_params(problem, operands, tiles, config.score)
    run(config, params, (tiles, problem.heads_q, problem.batch), config.shared_bytes, way)


def sm90_forward(config: Any, problem: Problem, operands: Operands, pointers: tuple[int, ...], way: Way) -> None:
    """As Sm90Launch launches it, on a GPU of three multiprocessors, with tiles drawn from tickets by an odd seed."""
    p, m, n = problem, config.tile_m, config.tile_n
    tiles = -(-p.seqlen_q // m)
    maps = (
        _encode(pointers[0], operands.q.strides, (p.head_dim, p.seqlen_q, p.heads_q, p.batch), m, config.tile_d),
        _encode(pointers[1], operands.k.strides, (p.head_dim, p.seqlen_k, p.heads_kv, p.batch), n, config.tile_d),
        _encode(pointers[2], operands.v.strides, (p.head_dim_v, p.seqlen_k, p.heads_kv, p.batch), n, config.tile_dv),
    )
    work = tiles * p.heads_q * p.batch
    tickets = (ctypes.c_uint * 2)()
    address = ctypes.addressof(tickets) if way.seed % 2 else 0
    params = b"".join(maps) + POINTERS.pack(*pointers) + forward_params(p, operands, tiles, config.score)
    params += struct.pack("Q2i", address, work, 2 if way.seed % 2 else 1)
    run(config, params, (min(3, work), 1, 1), config.shared_bytes, way)
    if list(tickets) != [0, 0]:
        raise RuntimeError(f"tickets are left at {list(tickets)}")


def backward(
    variant: Any,
    problem: BackwardProblem,
    operands: BackwardOperands,
    device: DeviceInfo,
    pointers: dict[str, int],
    way: Way,
) -> None:
    """All launches of a backward pass; `pointers` has every array, those of the workspace too."""
    o, p = operands, pointers
    for config in variant.config(problem, operands, device).kernels:
        section, grid = _sections(config, problem, device, way)
        params = backward_params(
            problem,
            Operands(o.q, o.k, o.v, o.out),
            (o.dout, o.dq, o.dk, o.dv),
            score_stage(problem),
            sm80_backward_variant.padded_rows(problem),
            section,
        )
        names = ("dout", "dlse", "dq", "dk", "dv", "delta", "dq_sum", "turns", "shift", "marked_rows")
        head = POINTERS.pack(*(p[name] for name in ("q", "k", "v", "out", "lse")))
        tail = BACKWARD_POINTERS.pack(*(p.get(name, 0) for name in names))
        at = FORWARD_PARAMS_BYTES
        packed = head + params[POINTERS.size : at] + tail + params[at + BACKWARD_POINTERS.size :]
        if isinstance(config, sm90_backward_variant.Sm90BackwardConfig):
            packed = b"".join(_backward_maps(config, problem, operands, pointers)) + packed
        run(config, packed, grid, config.shared_bytes, way)


def _sections(config: Any, problem: BackwardProblem, device: DeviceInfo, way: Way) -> tuple[int, tuple[int, int, int]]:
    """The section and grid of a kernel: its own, or by an odd seed another section that any grid of its tiles suits."""
    grid = sm80_backward_variant.grid(config, problem, problem.batch)
    mingles = isinstance(config, sm90_backward_variant.Sm90BackwardConfig) and config.has_band and not config.ordered
    if not mingles:
        return 1 + way.seed % 3, grid
    if way.seed % 2:
        return -(1 + way.seed % 3), (math.prod(grid), 1, 1)
    return config.section(problem, device), grid


def _backward_maps(
    config: Any, problem: BackwardProblem, operands: BackwardOperands, pointers: dict[str, int]
) -> Iterator[bytes]:
    for name, sizes, rows, dim in sm90_backward_variant.mapped(config, problem):
        yield _encode(pointers[name], getattr(operands, name).strides, sizes, rows, dim)
