"""The sm80 forward variant: FlashAttention-2 on mma.sync and cp.async (cuda_src/sm80/sm80_forward.cu).

Runs on every GPU of compute capability 8.0 or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from cuflash import jit
from cuflash.device import known_device
from cuflash.launch import ForwardLaunch, forward_params
from cuflash.problem import Problem
from cuflash.variants.base import DeviceInfo, Launcher, Operand, Operands
from cuflash.variants.cuda import CudaVariant, score_stage

_RESERVED_SHARED = 1024  # bytes of shared memory that the driver takes for each block
_MAX_HEADS = 65535  # of a grid's y axis


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


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


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
        if problem.heads_q > _MAX_HEADS:
            return f"takes at most {_MAX_HEADS} query heads, not {problem.heads_q}"
        if _alignment(operands) < 2 or operands.out.alignment < 2:
            return "needs addresses that are multiples of the element size"
        if not any(_fits(config, device) for config in _candidates(problem, operands)):
            return f"no tile for head_dim {problem.head_dim} fits {device.shared_memory} bytes of shared memory"
        return None

    def config(self, problem: Problem, operands: Operands, device: DeviceInfo) -> Sm80ForwardConfig:
        """The first tile of the table that suits the device."""
        fitting = [config for config in _candidates(problem, operands) if _fits(config, device)]
        return next((config for config in fitting if _fits_together(config, device)), fitting[0])

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


def _fits(config: Sm80ForwardConfig, device: DeviceInfo) -> bool:
    return config.shared_bytes <= device.shared_memory


def _fits_together(config: Sm80ForwardConfig, device: DeviceInfo) -> bool:
    return config.blocks_per_sm * (config.shared_bytes + _RESERVED_SHARED) <= device.shared_memory_sm


def _candidates(problem: Problem, operands: Operands) -> list[Sm80ForwardConfig]:
    largest = max(problem.head_dim, problem.head_dim_v)
    size = min(tile.max_dim for tile in _TILES if largest <= tile.max_dim)
    return [_config(tile, problem, operands) for tile in _TILES if tile.max_dim == size]


def _config(tile: _Tile, problem: Problem, operands: Operands) -> Sm80ForwardConfig:
    tile_d, tile_dv = _round_up(problem.head_dim, 32), _round_up(problem.head_dim_v, 32)
    shared_fields = asdict(tile)
    del shared_fields["max_dim"]
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
    masks: tuple[dict[str, Any], ...] = ({}, {"diag_upper": 0})
    dims = [(d, d) for d in range(32, 257, 32)] + [(192, 128), (64, 256), (256, 32)]
    fields: list[tuple[str, int, dict[str, Any]]] = []
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90"):
        fields += [(arch, 16, {"head_dim": d, "head_dim_v": dv}) for d, dv in dims]
    for d in (64, 128, 256):
        fields += [("sm_90", align, {"head_dim": d - 5, "head_dim_v": d - 5}) for align in (16, 8, 4, 2)]
        extras: tuple[dict[str, Any], ...] = ({"dtype": "float16"}, {"softcap": 30.0}, {"scale": -1.0})
        fields += [("sm_90", 16, {"head_dim": d, "head_dim_v": d, **extra}) for extra in extras]
    base = {
        "batch": 1,
        "seqlen_q": 256,
        "seqlen_k": 256,
        "heads_q": 1,
        "heads_kv": 1,
        "dtype": "bfloat16",
        "scale": 1.0,
    }
    for arch, alignment, extra in fields:
        for mask in masks:
            operand = Operand((0, 0, 0), alignment)
            operands = Operands(operand, operand, operand, operand)
            config = VARIANT.config(Problem(**{**base, **extra, **mask}), operands, known_device(arch))
            yield config, arch, ("HMMA", "LDSM") if alignment == 2 else ("HMMA", "LDSM", "LDGSTS")
