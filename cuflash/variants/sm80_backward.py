"""The sm80 backward kernels: FlashAttention-2 on mma.sync and cp.async (cuda_src/sm80/sm80_backward*.cu).

Runs on every GPU of compute capability 8.0 or more. A backward pass is three launches, in this order:

1. ``sm80_backward_prepare``: ``delta = rowsum(dout * out) - dlse``, and zeros in the float32 sums of dq.
2. ``sm80_backward``: dk and dv, each key tile by one block; dq is added to its sums by atomic operations.
3. ``sm80_backward_finish``: the sums of dq, scaled and rounded, to dq.

In the deterministic pass the blocks take turns at adding, in a fixed order.

P and dS are rounded to the dtype for their products with dout, q and k. In float16 a dS past 65504 becomes inf, and inf
or NaN in dq and dk. A constant factor below 1 would move that bound, but dS would lose as many bits where it is near
the smallest float16, and gradients are small more often than they are large.

References
----------
Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023, section 3.2, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from cuflash import jit
from cuflash.device import known_device
from cuflash.launch import MAX_GRID_YZ, BackwardLaunch, backward_params
from cuflash.problem import BackwardProblem, Problem
from cuflash.variants.base import BackwardOperands, DeviceInfo, Launcher, Operand, Operands
from cuflash.variants.cuda import CudaVariant, ci_problems, first_that_fits, round_up, score_stage, tiles_of_size

ROW_TILE = 128  # the workspace holds this many rows of a head, or a multiple; every tile_m divides it
TURN_ROWS = 32  # for each of which there is a word in the deterministic workspace; divides every tile_m
_SMALL_TILE = 64  # rows of a block of the kernels before and after
_SMALL_WARPS = 4


@dataclass(frozen=True, slots=True)
class Sm80BackwardConfig:
    """Template arguments of sm80_backward.cu.

    Attributes
    ----------
    element : str
        ``"bfloat16"`` or ``"float16"``.
    tile_m, tile_n : int
        Query rows and keys of one tile.
    tile_d, tile_dv : int
        head_dim and head_dim_v rounded up to multiples of 32.
    warps, warps_n : int
        Warps of a block; how many of them share the rows of dk and dv and divide their columns.
    score_warps_n : int
        The same for S, dP and dq. With 1 the dS of a warp's rows goes to the product for dq in registers.
    stages : int
        Query tiles in shared memory; with 1 the next is fetched when all have done with this; with 3 two steps overlap.
    blocks_per_sm : int
        Blocks that registers and shared memory must leave room for on one multiprocessor.
    rolled_spans : int
        Spans of 64 columns in one step of the rolled loop over head_dim of the score products; 0 unrolls it.
    row_blocks : int
        Blocks of 16 rows in one step of the rolled loop over query rows of the products for dk and dv.
    reduce_width : int
        Numbers in one atomic addition to the sums of dq: 4 from sm_90 on, else 1.
    ordered : bool
        Whether the order of the additions to the sums of dq is fixed.
    vector_bytes, out_vector_bytes : int
        Width of loads and stores that the strides and addresses allow.
    exact_dims : bool
        Whether the head dims fill their tiles.
    has_band : bool
        Whether a causal mask or window hides keys.
    score : str
        Score stage of cuda_src/core/score.cuh.
    """

    source: ClassVar[str] = "sm80/sm80_backward.cu"
    kernel: ClassVar[str] = "sm80_backward"

    element: str
    tile_m: int
    tile_n: int
    tile_d: int
    tile_dv: int
    warps: int
    warps_n: int
    score_warps_n: int
    stages: int
    blocks_per_sm: int
    rolled_spans: int
    row_blocks: int
    reduce_width: int
    ordered: bool
    vector_bytes: int
    out_vector_bytes: int
    exact_dims: bool
    has_band: bool
    score: str

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: sK, sV, the ring of sQ and sdO, sP, sdS and the row statistics."""
        keys = self.tile_n * (self.tile_d + self.tile_dv)
        queries = self.stages * self.tile_m * (self.tile_d + self.tile_dv)
        buffers, row_stages = (2, 3) if self.stages == 3 else (1, 1)
        return 2 * (keys + queries + 2 * buffers * self.tile_m * self.tile_n) + 8 * row_stages * self.tile_m

    def grid(self, problem: Problem, batch: int) -> tuple[int, int, int]:
        """Blocks for `batch` entries; where they take turns, the kernel itself finds out which tile a block has."""
        tiles = -(-problem.seqlen_k // self.tile_n)
        return (tiles * problem.heads_kv * batch, 1, 1) if self.ordered else (tiles, problem.heads_kv, batch)

    def section(self, problem: Problem, device: DeviceInfo) -> int:
        """(batch, head) pairs whose key tiles mingle."""
        return section_in_turn(self, problem, device) if self.ordered else 1

    def describe(self) -> dict[str, Any]:
        """The fields, with the derived sizes."""
        tile = {"tile": (self.tile_m, self.tile_n), "threads": self.threads, "shared_bytes": self.shared_bytes}
        return tile | asdict(self)


@dataclass(frozen=True, slots=True)
class _RowsConfig:
    """Template arguments of the kernels before and after, which go by rows.

    Attributes
    ----------
    element : str
        ``"bfloat16"`` or ``"float16"``.
    tile_m, warps : int
        Query rows and warps of a block.
    tile_d : int
        head_dim rounded up to a multiple of 32: numbers in a row of the sums of dq.
    """

    element: str
    tile_m: int
    warps: int
    tile_d: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps


@dataclass(frozen=True, slots=True)
class Sm80BackwardPrepareConfig(_RowsConfig):
    """Template arguments of sm80_backward_prepare.cu.

    Attributes
    ----------
    tile_dv : int
        head_dim_v rounded up to a multiple of 32.
    vector_bytes : int
        Width of loads that the strides and addresses of out and dout allow.
    exact_dims : bool
        Whether head_dim_v fills its tile.
    check_query : bool
        Whether to look for inf and NaN in q, for the variants that ask for marked rows and where lse does not tell.
    """

    source: ClassVar[str] = "sm80/sm80_backward_prepare.cu"
    kernel: ClassVar[str] = "sm80_backward_prepare"

    tile_dv: int
    vector_bytes: int
    exact_dims: bool
    check_query: bool = False

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: tiles of dout and out."""
        return 2 * 2 * self.tile_m * self.tile_dv


@dataclass(frozen=True, slots=True)
class Sm80BackwardFinishConfig(_RowsConfig):
    """Template arguments of sm80_backward_finish.cu.

    Attributes
    ----------
    out_vector_bytes : int
        Width of stores that the strides and address of dq allow.
    exact_dims : bool
        Whether head_dim fills its tile.
    reduce_width : int
        That of the Sm80BackwardConfig, which decides the order of the sums.
    """

    source: ClassVar[str] = "sm80/sm80_backward_finish.cu"
    kernel: ClassVar[str] = "sm80_backward_finish"

    out_vector_bytes: int
    exact_dims: bool
    reduce_width: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the rounded rows on their way out."""
        return 2 * self.tile_m * self.tile_d


@dataclass(frozen=True, slots=True)
class _Tile:
    """How to tile head dims up to `max_dim`, and the blocks per multiprocessor to aim for.

    `warps_n` is lowered to 2 for head dims that are not multiples of 64: their swizzle has two parts.
    """

    max_dim: int
    tile_m: int
    tile_n: int
    warps: int
    warps_n: int
    stages: int
    blocks_per_sm: int
    rolled_spans: int = 0
    row_blocks: int = 2
    score_warps_n: int = 0  # that of dk and dv


# In order of preference for each size: the first whose blocks_per_sm fit a multiprocessor is taken, else the first that
# fits at all.
_TILES = (
    _Tile(64, 128, 64, warps=4, warps_n=2, score_warps_n=1, stages=2, blocks_per_sm=2, row_blocks=8),
    _Tile(64, 128, 64, warps=4, warps_n=2, stages=1, blocks_per_sm=2, row_blocks=8),
    _Tile(64, 64, 64, warps=4, warps_n=2, stages=1, blocks_per_sm=2),
    _Tile(128, 64, 128, warps=8, warps_n=4, stages=3, blocks_per_sm=1, rolled_spans=1, row_blocks=4),
    _Tile(128, 64, 128, warps=8, warps_n=4, stages=2, blocks_per_sm=1, rolled_spans=1, row_blocks=4),
    _Tile(128, 64, 64, warps=4, warps_n=2, stages=2, blocks_per_sm=2, rolled_spans=1),
    _Tile(128, 64, 64, warps=4, warps_n=2, stages=1, blocks_per_sm=2, rolled_spans=1),
    _Tile(128, 64, 64, warps=4, warps_n=2, stages=1, blocks_per_sm=1, rolled_spans=1),
    _Tile(256, 64, 64, warps=8, warps_n=4, stages=2, blocks_per_sm=1, rolled_spans=1),
    _Tile(256, 64, 64, warps=8, warps_n=4, stages=1, blocks_per_sm=1, rolled_spans=1),
    _Tile(256, 32, 32, warps=4, warps_n=2, stages=1, blocks_per_sm=1, rolled_spans=1),
)


def padded_rows(problem: Problem) -> int:
    """Rows of a head in the workspace."""
    return round_up(problem.seqlen_q, ROW_TILE)


def workspace_shapes(problem: Problem, deterministic: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of 4-byte words that a backward pass needs besides its results.

    They are contiguous and start with any value: ``delta`` (batch, heads_q, padded_rows) and ``dq_sum``
    (batch, heads_q, padded_rows, tile_d) of float32; in the deterministic pass also ``turns``
    (batch, heads_q, padded_rows / 32) of uint32.
    """
    heads, rows = (problem.batch, problem.heads_q), padded_rows(problem)
    shapes: dict[str, tuple[int, ...]] = {
        "delta": (*heads, rows),
        "dq_sum": (*heads, rows, round_up(problem.head_dim, 32)),
    }
    if deterministic:
        shapes["turns"] = (*heads, rows // TURN_ROWS)
    return shapes


def _reduce_width(device: DeviceInfo) -> int:
    return 4 if device.compute_capability >= (9, 0) else 1


def _config(tile: _Tile, problem: Problem, operands: BackwardOperands, **mode: Any) -> Sm80BackwardConfig:
    tile_d, tile_dv = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)
    fields = asdict(tile)
    del fields["max_dim"]
    if tile_d % 64 or tile_dv % 64:
        fields["warps_n"] = min(tile.warps_n, 2)
    fields["score_warps_n"] = tile.score_warps_n or fields["warps_n"]
    # In longer steps ptxas spills what it loads ahead.
    if tile.stages == 3 and mode["ordered"]:
        fields["row_blocks"] = min(tile.row_blocks, 2)
    return Sm80BackwardConfig(
        element=problem.dtype,
        tile_d=tile_d,
        tile_dv=tile_dv,
        vector_bytes=min(x.alignment for x in (operands.q, operands.k, operands.v, operands.dout)),
        out_vector_bytes=min(x.store_bytes for x in (operands.dk, operands.dv)),
        exact_dims=(problem.head_dim, problem.head_dim_v) == (tile_d, tile_dv),
        has_band=problem.has_band,
        score=score_stage(problem),
        **fields,
        **mode,
    )


def backward_config(
    problem: Problem, operands: BackwardOperands, device: DeviceInfo, *, deterministic: bool = False
) -> Sm80BackwardConfig:
    """The Config of the kernel that computes dk, dv and the sums of dq.

    Raises
    ------
    ValueError
        When no tile fits the device's shared memory.
    """
    mode = {"ordered": deterministic, "reduce_width": _reduce_width(device)}
    candidates = [_config(tile, problem, operands, **mode) for tile in tiles_of_size(_TILES, problem)]
    config: Sm80BackwardConfig | None = first_that_fits(candidates, device)
    if config is None:
        smallest = min(config.shared_bytes for config in candidates)
        raise ValueError(
            f"device {device.name!r} has {device.shared_memory} bytes of shared memory a block, and the smallest tile "
            f"needs {smallest}; use a device with more"
        )
    return config


def prepare_config(
    problem: Problem, operands: BackwardOperands, tile_d: int, *, check_query: bool = False
) -> Sm80BackwardPrepareConfig:
    """The Config of the kernel that runs first; `tile_d` numbers are in a row of the sums of dq."""
    tile_dv = round_up(problem.head_dim_v, 32)
    return Sm80BackwardPrepareConfig(
        element=problem.dtype,
        tile_m=_SMALL_TILE,
        warps=_SMALL_WARPS,
        tile_d=tile_d,
        tile_dv=tile_dv,
        vector_bytes=min(operands.out.alignment, operands.dout.alignment),
        exact_dims=problem.head_dim_v == tile_dv,
        check_query=check_query,
    )


def finish_config(
    problem: Problem, operands: BackwardOperands, device: DeviceInfo, tile_d: int
) -> Sm80BackwardFinishConfig:
    """The Config of the kernel that runs last."""
    return Sm80BackwardFinishConfig(
        element=problem.dtype,
        tile_m=_SMALL_TILE,
        warps=_SMALL_WARPS,
        tile_d=tile_d,
        out_vector_bytes=operands.dq.store_bytes,
        exact_dims=problem.head_dim == tile_d,
        reduce_width=_reduce_width(device),
    )


def configs(
    problem: Problem, operands: BackwardOperands, device: DeviceInfo, *, deterministic: bool = False
) -> tuple[Any, ...]:
    """The Configs of a whole backward pass in the order of their launches."""
    main = backward_config(problem, operands, device, deterministic=deterministic)
    return (
        prepare_config(problem, operands, main.tile_d),
        main,
        finish_config(problem, operands, device, main.tile_d),
    )


def grid(config: Any, problem: Problem, batch: int) -> tuple[int, int, int]:
    """Blocks of one of the kernels for `batch` entries, of which only those of the first dimension may pass 65535."""
    if isinstance(config, _RowsConfig):
        return -(-padded_rows(problem) // config.tile_m), problem.heads_q, batch
    blocks: tuple[int, int, int] = config.grid(problem, batch)
    return blocks


def section(config: Any, problem: Problem, device: DeviceInfo) -> int:
    """(batch, head) pairs whose key tiles mingle where blocks are numbered by the kernel itself."""
    return 1 if isinstance(config, _RowsConfig) else config.section(problem, device)


def section_in_turn(config: Any, problem: Problem, device: DeviceInfo) -> int:
    """The same where blocks take turns.

    A block is to begin when the one before it has had its turn at the first rows: about a step later. So as many heads
    as make the blocks of one head begin a step apart; no more, since its blocks share its rows in the L2 cache. Behind
    a mask they begin with different rows and need not wait.
    """
    if config.has_band:
        return 1
    steps = problem.group * -(-problem.seqlen_q // config.tile_m)
    together: int = -(-device.multiprocessors * config.blocks_per_sm // max(steps, 1))
    heads: int = problem.heads_kv * problem.batch
    return min(together, heads)


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """The Configs of a whole backward pass.

    Attributes
    ----------
    kernels : tuple
        In the order of their launches.
    workspace : tuple of (str, int)
        Names and bytes of the temporary arrays, in their order in one piece of memory.
    """

    kernels: tuple[Any, ...]
    workspace: tuple[tuple[str, int], ...]

    def describe(self) -> dict[str, Any]:
        """The fields of the kernel that computes dk and dv, the other kernels, and the temporary memory."""
        facts: dict[str, Any] = self.kernels[1].describe()
        facts["launches"] = tuple(config.kernel for config in self.kernels)
        return facts | {"workspace_bytes": self.workspace_bytes}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all temporary arrays."""
        return sum(size for _, size in self.workspace)

    @classmethod
    def with_workspace(cls, kernels: tuple[Any, ...], shapes: dict[str, tuple[int, ...]]) -> BackwardPass:
        """A pass whose temporary arrays, of 4-byte words, have these shapes."""
        return cls(kernels, tuple((name, 4 * math.prod(shape)) for name, shape in shapes.items()))


def unlaunchable(problem: BackwardProblem, operands: BackwardOperands) -> str | None:
    """Why the kernels of a pass cannot be launched for a problem, or None."""
    if problem.heads_q > MAX_GRID_YZ:
        return f"takes at most {MAX_GRID_YZ} query heads, not {problem.heads_q}"
    if any(getattr(operands, name).alignment < problem.itemsize for name in operands.__slots__):
        return "needs addresses that are multiples of the element size"
    return None


class BackwardPassVariant(CudaVariant):
    """Base of the variants whose Config is a :class:`BackwardPass`."""

    def report(self, config: BackwardPass, device: DeviceInfo) -> dict[str, Any]:
        """What the compiler says of the kernels: registers of each, the sum of the rest."""
        arch = self.arch(device)
        reports = [jit.compile_config(kernel, arch).report.summary(arch) for kernel in config.kernels]
        total = {name: sum(x[name] for x in reports) for name in ("spill_bytes", "compile_seconds")}
        registers = " + ".join(str(x["registers"]) for x in reports)
        return {"arch": arch, "registers": registers, **total, "from_cache": all(x["from_cache"] for x in reports)}

    def workspace_bytes(self, problem: BackwardProblem, device: DeviceInfo, config: BackwardPass) -> int:
        """Numbers for each row, the float32 sums of dq and, if deterministic, whose turn it is to add to them."""
        return config.workspace_bytes

    def launcher(
        self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo, config: BackwardPass
    ) -> Launcher:
        """Compile or load the kernels and pack their parameters."""
        return BackwardPassLaunch(problem, operands, device, config, self.arch(device), self.make_launch)

    def make_launch(
        self,
        kernel: jit.LoadedKernel,
        config: Any,
        problem: Problem,
        operands: BackwardOperands,
        device: DeviceInfo,
        params: bytes,
    ) -> Any:
        """What launches one of the kernels: a function of (pointers, grid, stream)."""
        return BackwardLaunch(kernel, device.index, params, config.threads, config.shared_bytes)


class Sm80Backward(BackwardPassVariant):
    """The variant object; see :class:`cuflash.variants.base.BackwardVariant`."""

    name = "sm80"
    needs = "8.0 or more"

    def runs_on(self, compute_capability: tuple[int, int]) -> bool:
        """On Ampere and all that came after it."""
        return compute_capability >= (8, 0)

    def unsupported(self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo) -> str | None:
        """Why the problem cannot run, or None."""
        if reason := self.unsuitable(problem, device) or unlaunchable(problem, operands):
            return reason
        try:
            configs(problem, operands, device, deterministic=problem.deterministic)
        except ValueError as error:
            return str(error)
        return None

    def config(self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo) -> BackwardPass:
        """The first tiles of the tables that suit the device."""
        kernels = configs(problem, operands, device, deterministic=problem.deterministic)
        return BackwardPass.with_workspace(kernels, workspace_shapes(problem, problem.deterministic))


VARIANT = Sm80Backward()


class BackwardPassLaunch:
    """Launches the kernels of one plan one after the other; calling it enqueues and returns at once.

    A batch larger than a grid goes in pieces, each with all its kernels.
    """

    def __init__(
        self,
        problem: BackwardProblem,
        operands: BackwardOperands,
        device: DeviceInfo,
        config: BackwardPass,
        arch: str,
        make: Callable[..., Any],
    ) -> None:
        p, o = problem, operands
        self._workspace = config.workspace
        self._kernels = []
        self._pieces = {start: min(MAX_GRID_YZ, p.batch - start) for start in range(0, p.batch, MAX_GRID_YZ)}
        for kernel in config.kernels:
            if 0 in grid(kernel, p, p.batch):  # no rows, or no keys
                continue
            loaded = jit.load(kernel, device.index, arch=arch, dynamic_shared_bytes=kernel.shared_bytes)
            params = backward_params(
                p,
                Operands(o.q, o.k, o.v, o.out),
                (o.dout, o.dq, o.dk, o.dv),
                score_stage(p),
                padded_rows(p),
                section(kernel, p, device),
            )
            launch = make(loaded, kernel, p, o, device, params)
            self._kernels.append((launch, {start: grid(kernel, p, count) for start, count in self._pieces.items()}))
        rows = 4 * p.heads_q * p.seqlen_q
        step = {name: getattr(o, name).strides[0] * p.itemsize for name in o.__slots__}
        step |= {"lse": rows, "dlse": rows} | {name: size // max(p.batch, 1) for name, size in config.workspace}
        self._steps = tuple(step.get(name, 0) for name in BackwardLaunch.NAMES)

    def __call__(
        self,
        dout: int,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int,
        dlse: int,
        dq: int,
        dk: int,
        dv: int,
        workspace: int,
        stream: int,
    ) -> None:
        at = {}
        for name, size in self._workspace:
            at[name] = workspace
            workspace += size
        rows = (at["delta"], at["dq_sum"], at.get("turns", 0), at.get("shift", 0), at.get("marked_rows", 0))
        pointers = (q, k, v, out, lse, dout, dlse, dq, dk, dv, *rows)
        for start in self._pieces:
            moved = [x + start * step if x else 0 for x, step in zip(pointers, self._steps, strict=True)]
            for launch, grids in self._kernels:
                launch(moved, grids[start], stream)


def ci_configs() -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """See :func:`cuflash.variants.ci_configs`; without the deterministic pass where another case is much like it."""
    seen = set()
    for problem, arch, alignment in ci_problems():
        operands, device = BackwardOperands(*[Operand((0, 0, 0), alignment)] * 8), known_device(arch)
        found = list(configs(problem, operands, device))
        if arch in ("sm_80", "sm_90"):
            found.append(backward_config(problem, operands, device, deterministic=True))
        for config in found:
            if (config, arch) not in seen:
                seen.add((config, arch))
                yield config, arch, _expected(config, alignment)


def _expected(config: Any, alignment: int) -> tuple[str, ...]:
    """SASS opcodes that a kernel must contain."""
    if isinstance(config, Sm80BackwardPrepareConfig | Sm80BackwardFinishConfig):
        return ("STG",)
    opcodes: tuple[str, ...] = ("HMMA", "LDSM") if alignment == 2 else ("HMMA", "LDSM", "LDGSTS")
    return (*opcodes, "REDG" if config.reduce_width == 4 else "RED")
