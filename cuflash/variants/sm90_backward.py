"""The sm90 backward kernel: TMA and WGMMA on compute capability 9.0 (cuda_src/sm90/sm90_backward.cu).

A backward pass is three launches, as in :mod:`cuflash.variants.sm80_backward`, whose first and last kernels it shares:

1. ``sm80_backward_prepare``: delta and the shift of the exponents of every row, and zeros in the sums of dq.
2. ``sm90_backward``, or ``sm90_backward_wide`` for head dims over 128: dk and dv, each key tile by one block; dq is
   added to its sums.
3. ``sm80_backward_finish``: the sums of dq, scaled and rounded, to dq.

References
----------
Shah et al., FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision, 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from cuflash import jit, tma
from cuflash.launch import BACKWARD_POINTERS, FORWARD_PARAMS_BYTES, POINTERS
from cuflash.problem import BackwardProblem, Problem
from cuflash.variants import sm80_backward as sm80
from cuflash.variants.base import BackwardOperands, DeviceInfo
from cuflash.variants.cuda import score_stage
from cuflash.variants.hopper import ARCH, CI_EXTRAS, HopperVariant, MappedLaunch, ci_problem, most_within, unreadable
from cuflash.wgmma import wgmma_source

_L2_BYTES = 40 << 20  # of q, dout and the sums of dq that may be live at once
_MAPPED = ("q", "dout", "k", "v")  # what has a tensor map


@dataclass(frozen=True, slots=True)
class Sm90BackwardConfig:
    """Template arguments of ``sm90_backward``; equal Configs are one kernel.

    Attributes
    ----------
    element : {"float16", "bfloat16"}
    tile_d, tile_dv : int
        Head dims rounded up to a tile.
    warpgroups : int
        Warpgroups that make dk and dv.
    tile_m, tile_n : int
        Query rows and keys of a tile.
    stages : int
        Tiles in each of the rings of q and dout.
    buffers : int
        Tiles in the ring of dS.
    dq_columns : int
        Columns of dq that are made at a time.
    consumer_registers, query_registers : int
        Registers of a thread that makes dk and dv, and of one that makes dq.
    query_group : bool
        Whether a warpgroup of its own makes dq; otherwise those of dk and dv do.
    bulk_add : bool
        Whether dq goes to its sums through shared memory and the copy engine; otherwise from registers.
    keys_in_registers, values_in_registers : int
        Of how many times 16 columns k and v are read from shared memory once, and not in every step.
    early_scores : bool
        Whether the scores of a step are begun before the products for dk and dv of the step before, which takes
        registers; where each warpgroup has keys of its own and dq is not theirs.
    take_turns : bool
        Whether the warpgroups of dk and dv take turns at issuing their products; where each has keys of its own.
    ordered : bool
        Whether the order of the additions to the sums of dq is fixed.
    out_vector_bytes : int
        Bytes (2, 4 or 16) that one store into dk and dv writes.
    exact_dims : bool
        Whether the head dims fill their tiles.
    has_band : bool
        Whether a causal mask or a window hides keys.
    score : str
        Score stage, a type of ``core/score.cuh``.
    """

    source: ClassVar[str] = "sm90/sm90_backward.cu"
    kernel: ClassVar[str] = "sm90_backward"

    element: str
    tile_d: int
    tile_dv: int
    warpgroups: int
    tile_m: int
    tile_n: int
    stages: int
    buffers: int
    dq_columns: int
    consumer_registers: int
    query_registers: int
    query_group: bool
    bulk_add: bool
    keys_in_registers: int
    values_in_registers: int
    early_scores: bool
    take_turns: bool
    ordered: bool
    out_vector_bytes: int
    exact_dims: bool
    has_band: bool
    score: str

    blocks_per_sm: ClassVar[int] = 1

    @property
    def threads(self) -> int:
        """Threads of a block: the warpgroup of dq comes on top."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: that of ``Shape`` in ``sm90/backward.cuh``, and room to align."""
        dims = self.tile_d + self.tile_dv
        tiles = self.tile_n * dims + self.stages * self.tile_m * dims + self.buffers * self.tile_n * self.tile_m
        barriers = 16 * (4 + 2 * self.stages + self.buffers)
        writers = self.bulk_add * (1 if self.query_group else self.warpgroups)
        sums = 4 * writers * 64 * self.dq_columns
        weights = 4 * self.tile_n * self.tile_m if self.tile_n == 64 else 0
        return 2 * tiles + 8 * self.tile_m * self.stages + 4 * (self.tile_n + 2) + sums + weights + barriers + 1024

    def grid(self, problem: Problem, batch: int) -> tuple[int, int, int]:
        """Blocks for `batch` entries: see ``KeyTileCoordinate``."""
        tiles, heads = -(-problem.seqlen_k // self.tile_n), problem.heads_kv
        if not self.has_band and not self.ordered:
            return tiles, heads, batch
        if self.ordered or (section := self._section_under_a_mask(problem)) < 0:
            return tiles * heads * batch, 1, 1
        return tiles * section, heads // section, batch

    def section(self, problem: Problem, device: DeviceInfo) -> int:
        """(batch, head) pairs whose key tiles mingle, or minus their number; see ``KeyTileCoordinate``."""
        if self.ordered:
            return sm80.section_in_turn(self, problem, device)
        return self._section_under_a_mask(problem) if self.has_band else 1

    def _section_under_a_mask(self, problem: Problem) -> int:
        """As many pairs as share the L2 cache; if half of them divide the heads, that power of two."""
        per_row = (problem.head_dim + problem.head_dim_v) * problem.itemsize + 4 * self.tile_d
        fitting = most_within(_L2_BYTES, problem.seqlen_q * problem.group * per_row)
        together = max(1, min(fitting, problem.heads_kv * problem.batch))
        power = min(fitting, problem.heads_kv & -problem.heads_kv)
        return power if 2 * power >= together else -together

    def written_source(self) -> str:
        """The products of this Config."""
        return wgmma_source((self.tile_m, self.tile_d, self.tile_dv, self.dq_columns), self.element)

    def describe(self) -> dict[str, Any]:
        """The fields, with the derived sizes."""
        tile = {"tile": (self.tile_m, self.tile_n), "threads": self.threads, "shared_bytes": self.shared_bytes}
        return tile | asdict(self)


@dataclass(frozen=True, slots=True)
class Sm90BackwardWideConfig(Sm90BackwardConfig):
    """The same of ``sm90_backward_wide``, whose two warpgroups share the keys: one makes dv, the other dk."""

    source: ClassVar[str] = "sm90/sm90_backward_wide.cu"
    kernel: ClassVar[str] = "sm90_backward_wide"


@dataclass(frozen=True, slots=True)
class _Tile:
    """How to tile one pair of head dims."""

    warpgroups: int
    tile_m: int
    tile_n: int
    stages: int
    buffers: int
    dq_columns: int
    consumer_registers: int = 216
    query_registers: int = 72
    query_group: bool = True
    bulk_add: bool = False
    keys_in_registers: int = 0
    values_in_registers: int = 0
    early_scores: bool = False
    take_turns: bool = True


# By (tile_d, tile_dv), smaller ones first.
_TILES = {
    (64, 64): _Tile(2, 64, 128, 4, 3, 64, keys_in_registers=4, values_in_registers=4),
    (96, 96): _Tile(2, 64, 128, 3, 2, 96, 208, 88),
    (128, 128): _Tile(2, 64, 128, 2, 3, 64, 240, 24, query_group=False, bulk_add=True),
    (192, 128): _Tile(2, 64, 64, 3, 2, 64, take_turns=False),
    (192, 192): _Tile(2, 64, 64, 3, 2, 64, take_turns=False),
    (256, 256): _Tile(2, 64, 64, 2, 2, 64, take_turns=False),
}
_TILES_UNDER_A_MASK = _TILES | {
    (64, 64): _Tile(2, 64, 128, 4, 3, 64, keys_in_registers=4, values_in_registers=3, early_scores=True),
}
# tanh needs registers, too.
_TILES_WITH_SOFTCAP = _TILES | {
    (96, 96): _Tile(2, 64, 64, 3, 2, 32, take_turns=False),
    (128, 128): _Tile(2, 64, 64, 3, 2, 64, take_turns=False),
}


def _tile_dims(problem: Problem) -> tuple[int, int]:
    """The smallest tile that holds the head dims, which are at most 256."""
    return next((d, dv) for d, dv in _TILES if problem.head_dim <= d and problem.head_dim_v <= dv)


def _workspace_shapes(problem: Problem, deterministic: bool, tile_d: int) -> dict[str, tuple[int, ...]]:
    """As in :func:`cuflash.variants.sm80_backward.workspace_shapes`, with what only this variant needs."""
    heads, rows = (problem.batch, problem.heads_q), sm80.padded_rows(problem)
    return {
        "shift": (*heads, rows),  # first, as delta, since both keep what follows aligned
        **sm80.workspace_shapes(problem, deterministic),
        "dq_sum": (*heads, rows, tile_d),
        "marked_rows": (*heads, rows // 64),
    }


def backward_config(problem: Problem, operands: BackwardOperands, *, deterministic: bool = False) -> Sm90BackwardConfig:
    """The Config of the kernel that computes dk, dv and the sums of dq."""
    tile_d, tile_dv = _tile_dims(problem)
    folded = score_stage(problem) == "score_folded"
    masked = _TILES_UNDER_A_MASK if problem.has_band and folded else _TILES
    tile = (_TILES_WITH_SOFTCAP if problem.softcap > 0 else masked)[tile_d, tile_dv]
    kind = Sm90BackwardWideConfig if tile.tile_n == 64 else Sm90BackwardConfig
    fields = asdict(tile)
    if not folded:  # the others need room
        fields["keys_in_registers"] = fields["values_in_registers"] = 0
    return kind(
        element=problem.dtype,
        tile_d=tile_d,
        tile_dv=tile_dv,
        ordered=deterministic,
        out_vector_bytes=min(x.store_bytes for x in (operands.dk, operands.dv)),
        exact_dims=(problem.head_dim, problem.head_dim_v) == (tile_d, tile_dv),
        has_band=problem.has_band,
        score=score_stage(problem),
        **fields,
    )


class Sm90Backward(HopperVariant, sm80.BackwardPassVariant):
    """The variant object; see :class:`cuflash.variants.base.BackwardVariant`."""

    def unsupported(self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo) -> str | None:
        """Why the problem cannot run, or None."""
        return (
            self.unsuitable(problem, device)
            or unreadable(problem, operands, _MAPPED)
            or sm80.unlaunchable(problem, operands)
        )

    def config(self, problem: BackwardProblem, operands: BackwardOperands, device: DeviceInfo) -> sm80.BackwardPass:
        """The tile of the table."""
        main = backward_config(problem, operands, deterministic=problem.deterministic)
        kernels: tuple[Any, ...] = (
            sm80.prepare_config(problem, operands, main.tile_d, check_query=problem.softcap > 0),
            main,
            sm80.finish_config(problem, operands, device, main.tile_d),
        )
        shapes = _workspace_shapes(problem, problem.deterministic, main.tile_d)
        return sm80.BackwardPass.with_workspace(kernels, shapes)

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
        if isinstance(config, Sm90BackwardConfig):
            return Sm90BackwardLaunch(kernel, config, problem, operands, device, params)
        return super().make_launch(kernel, config, problem, operands, device, params)


VARIANT = Sm90Backward()


def mapped(config: Sm90BackwardConfig, problem: Problem) -> Iterator[tuple[str, tuple[int, int, int, int], int, int]]:
    """(name, sizes, tile_rows, tile_dim) of what has a tensor map, in the order of ``Sm90BackwardParams``."""
    p = problem
    queries, keys = (p.seqlen_q, p.heads_q, p.batch), (p.seqlen_k, p.heads_kv, p.batch)
    yield "q", (p.head_dim, *queries), config.tile_m, config.tile_d
    yield "dout", (p.head_dim_v, *queries), config.tile_m, config.tile_dv
    yield "k", (p.head_dim, *keys), config.tile_n, config.tile_d
    yield "v", (p.head_dim_v, *keys), config.tile_n, config.tile_dv


class Sm90BackwardLaunch(MappedLaunch):
    """Launches ``sm90_backward``: four tensor maps, then BackwardParams."""

    def __init__(
        self,
        kernel: jit.LoadedKernel,
        config: Sm90BackwardConfig,
        problem: Problem,
        operands: BackwardOperands,
        device: DeviceInfo,
        params: bytes,
    ) -> None:
        encoders = [
            tma.Encoder(problem.dtype, getattr(operands, name), sizes, rows, dim)
            for name, sizes, rows, dim in mapped(config, problem)
        ]
        super().__init__(kernel, device.index, encoders, params, config.threads, config.shared_bytes)

    def __call__(self, pointers: Sequence[int], grid: tuple[int, int, int], stream: int) -> None:
        """Enqueue a grid; `pointers` in the order of ``BackwardLaunch.NAMES``."""
        q, k, v, dout = *pointers[:3], pointers[5]
        with self._lock:
            if self._packed != (q, dout, k, v):
                self._pack_maps((q, dout, k, v))
            POINTERS.pack_into(self._struct, self._params_at, *pointers[:5])
            BACKWARD_POINTERS.pack_into(self._struct, self._params_at + FORWARD_PARAMS_BYTES, *pointers[5:])
            self._enqueue(*grid, stream)


def ci_configs() -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """See :func:`cuflash.variants.ci_configs`."""
    cases: list[dict[str, Any]] = [{"d": dims} for dims in _TILES]
    extras = (*CI_EXTRAS, {"softcap": 30.0}, {"deterministic": True})
    cases += [{"d": dims, **extra} for dims in _TILES for extra in extras]
    cases += [{"d": (d - 8, dv - 8)} for d, dv in _TILES]
    for case in cases:
        for upper in (None, 0):
            problem, operand, result = ci_problem(case, upper)
            operands = BackwardOperands(*[operand] * 5, *[result] * 3)
            config = backward_config(problem, operands, deterministic=case.get("deterministic", False))
            adds = "UBLKRED" if config.bulk_add else "REDG"
            yield config, ARCH, ("HGMMA", "UTMALDG", "UBLKCP", "SYNCS", "STSM", adds)
