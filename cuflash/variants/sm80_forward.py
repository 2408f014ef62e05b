"""The sm80 forward variant: FlashAttention-2 on mma.sync and cp.async (cuda_src/sm80/sm80_forward.cu).

Runs on every GPU of compute capability 8.0 or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from cuflash import jit
from cuflash.device import known_device
from cuflash.launch import MAX_GRID_YZ, ForwardLaunch, forward_params
from cuflash.problem import Problem
from cuflash.variants.base import DeviceInfo, Launcher, Operand, Operands
from cuflash.variants.cuda import CudaVariant, ci_problems, first_that_fits, round_up, score_stage, tiles_of_size


@dataclass(frozen=True, slots=True)
class Sm80ForwardConfig:
    """Template arguments of sm80_forward.cu.

    Attributes
    ----------
    element : str
        ``"bfloat16"`` or ``"float16"``.
    tile_m, tile_n : int
        Query rows and keys of one tile.
    tile_d, tile_dv : int
        head_dim and head_dim_v rounded up to multiples of 32.
    warps, warps_n : int
        Warps of a block; how many of them share the same query rows.
    stages : int
        K/V tiles in shared memory; with 1 the keys and values are fetched in turns.
    blocks_per_sm : int
        Blocks that registers and shared memory must leave room for on one multiprocessor.
    rolled_spans : int
        Spans of 64 columns in one step of the rolled loop over head_dim of Q K^T; 0 unrolls it.
    vector_bytes, out_vector_bytes : int
        Width of loads and stores that the strides and addresses allow.
    exact_dims : bool
        Whether the head dims fill their tiles.
    has_band : bool
        Whether a causal mask or window hides keys.
    score : str
        Score stage of cuda_src/core/score.cuh.
    """

    source: ClassVar[str] = "sm80/sm80_forward.cu"
    kernel: ClassVar[str] = "sm80_forward"

    element: str
    tile_m: int
    tile_n: int
    tile_d: int
    tile_dv: int
    warps: int
    warps_n: int
    stages: int
    blocks_per_sm: int
    rolled_spans: int
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
        """Dynamic shared memory of a block: sQ, the K/V ring, for warp pairs sP and sRow, and the parked words."""
        tiles = self.tile_m * max(self.tile_d, self.tile_dv) + self.stages * self.tile_n * (self.tile_d + self.tile_dv)
        pair = 2 * self.tile_m * self.tile_n + 32 * self.tile_m if self.warps_n == 2 else 0
        return 2 * tiles + pair + 64

    def describe(self) -> dict[str, Any]:
        """The fields, with the derived sizes."""
        tile = {"tile": (self.tile_m, self.tile_n), "threads": self.threads, "shared_bytes": self.shared_bytes}
        return tile | asdict(self)


@dataclass(frozen=True, slots=True)
class _Tile:
    """How to tile head dims up to `max_dim`, and the blocks per multiprocessor to aim for."""

    max_dim: int
    tile_m: int
    tile_n: int
    warps: int
    warps_n: int
    stages: int
    blocks_per_sm: int
    rolled_spans: int = 0


# In order of preference for each size: the first whose blocks_per_sm fit a multiprocessor is taken, else the first that
# fits at all. tile_n alone decides how a row's sums are grouped, so for one size of head on one device it must not
# depend on the problem.
_TILES = (
    _Tile(64, 128, 128, warps=4, warps_n=1, stages=2, blocks_per_sm=2),
    _Tile(64, 128, 64, warps=4, warps_n=1, stages=2, blocks_per_sm=2),
    _Tile(96, 128, 64, warps=4, warps_n=1, stages=2, blocks_per_sm=2),
    _Tile(128, 128, 64, warps=4, warps_n=1, stages=2, blocks_per_sm=2, rolled_spans=1),
    _Tile(128, 128, 64, warps=4, warps_n=1, stages=1, blocks_per_sm=2, rolled_spans=1),
    _Tile(256, 64, 64, warps=4, warps_n=2, stages=1, blocks_per_sm=2),
    _Tile(256, 128, 64, warps=8, warps_n=2, stages=1, blocks_per_sm=1),
    _Tile(256, 64, 32, warps=4, warps_n=2, stages=1, blocks_per_sm=2),
)


class Sm80Forward(CudaVariant):
    """The variant object; see :mod:`cuflash.variants.base`."""

    name = "sm80"
    needs = "8.0 or more"

    def runs_on(self, compute_capability: tuple[int, int]) -> bool:
        """On Ampere and all that came after it."""
        return compute_capability >= (8, 0)

    def unsupported(self, problem: Problem, operands: Operands, device: DeviceInfo) -> str | None:
        """Why the problem cannot run, or None."""
        if reason := self.unsuitable(problem, device):
            return reason
        if problem.heads_q > MAX_GRID_YZ:
            return f"takes at most {MAX_GRID_YZ} query heads, not {problem.heads_q}"
        if _alignment(operands) < 2 or operands.out.alignment < 2:
            return "needs addresses that are multiples of the element size"
        if first_that_fits(_candidates(problem, operands, device), device) is None:
            return f"no tile for head_dim {problem.head_dim} fits {device.shared_memory} bytes of shared memory"
        return None

    def config(self, problem: Problem, operands: Operands, device: DeviceInfo) -> Sm80ForwardConfig:
        """The first tile of the table that suits the device."""
        config = first_that_fits(_candidates(problem, operands, device), device)
        assert config is not None, "unsupported() has said so"
        return config

    def launcher(self, problem: Problem, operands: Operands, device: DeviceInfo, config: Sm80ForwardConfig) -> Launcher:
        """Compile or load the kernel and pack its parameters."""
        kernel = jit.load(config, device.index, arch=self.arch(device), dynamic_shared_bytes=config.shared_bytes)
        query_tiles = -(-problem.seqlen_q // config.tile_m)
        batch_strides = [x.strides[0] * problem.itemsize for x in (operands.q, operands.k, operands.v, operands.out)]
        return ForwardLaunch(
            kernel,
            device.index,
            forward_params(problem, operands, query_tiles, config.score),
            grid=(query_tiles, problem.heads_q, problem.batch),
            threads=config.threads,
            shared_bytes=config.shared_bytes,
            batch_strides=(*batch_strides, 4 * problem.heads_q * problem.seqlen_q),  # type: ignore[arg-type]
        )


VARIANT = Sm80Forward()


def _alignment(operands: Operands) -> int:
    return min(operands.q.alignment, operands.k.alignment, operands.v.alignment)


def _candidates(problem: Problem, operands: Operands, device: DeviceInfo) -> list[Sm80ForwardConfig]:
    return [_config(tile, problem, operands, device) for tile in tiles_of_size(_TILES, problem)]


def _config(tile: _Tile, problem: Problem, operands: Operands, device: DeviceInfo) -> Sm80ForwardConfig:
    tile_d, tile_dv = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)
    shared_fields = asdict(tile)
    del shared_fields["max_dim"]
    if device.compute_capability >= (9, 0) and problem.softcap == 0:
        shared_fields["rolled_spans"] = 0  # elsewhere ptxas spills what it loads ahead
    return Sm80ForwardConfig(
        element=problem.dtype,
        tile_d=tile_d,
        tile_dv=tile_dv,
        vector_bytes=_alignment(operands),
        out_vector_bytes=operands.out.store_bytes,
        exact_dims=(problem.head_dim, problem.head_dim_v) == (tile_d, tile_dv),
        has_band=problem.has_band,
        score=score_stage(problem),
        **shared_fields,
    )


def ci_configs() -> Iterator[tuple[Sm80ForwardConfig, str, tuple[str, ...]]]:
    """See :func:`cuflash.variants.ci_configs`."""
    for problem, arch, alignment in ci_problems():
        operand = Operand((0, 0, 0), alignment)
        config = VARIANT.config(problem, Operands(operand, operand, operand, operand), known_device(arch))
        yield config, arch, ("HMMA", "LDSM") if alignment == 2 else ("HMMA", "LDSM", "LDGSTS")
