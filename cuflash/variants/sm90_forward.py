"""The sm90 variant: FlashAttention-3 forward on TMA and WGMMA, for float16 and bfloat16 on compute capability 9.0."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from cuflash import jit, tma
from cuflash.device import known_device
from cuflash.launch import POINTERS, forward_params
from cuflash.problem import Problem
from cuflash.tickets import tickets
from cuflash.variants.base import DeviceInfo, Launcher, Operands
from cuflash.variants.cuda import score_stage
from cuflash.variants.hopper import ARCH, CI_EXTRAS, HopperVariant, MappedLaunch, ci_problem, most_within, unreadable
from cuflash.wgmma import wgmma_source

_DIMS = (64, 96, 128, 192, 256)
_STAGES = 2
_L2_BYTES = 32 << 20  # of keys and values that may be live at once
_MAX_SOFTCAP_DIM = 128
_MAX_TILES = 2**31 - 2**20  # a block counts past its last tile by at most a grid


@dataclass(frozen=True, slots=True)
class Sm90ForwardConfig:
    """Template arguments of ``sm90_forward``; equal Configs are one kernel.

    Attributes
    ----------
    element : {"float16", "bfloat16"}
    tile_d, tile_dv : int
        Head dims rounded up to a tile.
    warpgroups : int
        Warpgroups that compute, 64 query rows each.
    tile_n : int
        Keys of a tile.
    stages : int
        Tiles in each of the rings of K and V.
    take_turns : bool
        Whether the warpgroups take turns at issuing their products.
    lazy_rescale : bool
        Whether O is only rescaled when a row of the warp has a new maximum. Looking costs more than it saves while O
        is narrow.
    early_wait : bool
        Whether the product with V is waited for before the scores are staged, which frees the registers of P for that.
    out_vector_bytes : int
        Bytes (2, 4 or 16) that one store into out writes.
    exact_dim : bool
        Whether head_dim_v is tile_dv.
    has_band : bool
        Whether a causal mask or a window hides keys.
    score : str
        Score stage, a type of ``core/score.cuh``.
    """

    source: ClassVar[str] = "sm90/sm90_forward.cu"
    kernel: ClassVar[str] = "sm90_forward"

    element: str
    tile_d: int
    tile_dv: int
    warpgroups: int
    tile_n: int
    stages: int
    take_turns: bool
    lazy_rescale: bool
    early_wait: bool
    out_vector_bytes: int
    exact_dim: bool
    has_band: bool
    score: str

    @property
    def tile_m(self) -> int:
        """Query rows of a tile."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block: the producer's warpgroup comes on top."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: sQ, the rings of sK and sV, their barriers, and room to align."""
        tiles = self.tile_m * self.tile_d + self.stages * self.tile_n * (self.tile_d + self.tile_dv)
        return 2 * tiles + 16 * (2 * self.stages + 1) + 16 * 2 + 2 * 12 + 16 * 2 + 2 * 4 + 1024

    def written_source(self) -> str:
        """The products of this Config: scores are tile_n wide, outputs tile_dv."""
        return wgmma_source((self.tile_n, self.tile_dv), self.element)

    def describe(self) -> dict[str, Any]:
        """The fields, with the derived sizes."""
        tile = {"tile": (self.tile_m, self.tile_n), "threads": self.threads, "shared_bytes": self.shared_bytes}
        return tile | asdict(self)


# (warpgroups, tile_n) by (tile_d, tile_dv). The accumulators of S, P and O take tile_n / 2 + tile_n / 4 + tile_dv / 2
# registers of 232, or of 160 with three warpgroups; Q and two stages of K and V must fit 227 KiB. tile_n decides how a
# row's sums are grouped. So it may depend on whether there is a mask at all, where wider tiles cost at the diagonal
# more than they save, but not on whether the mask turns out to hide nothing, as for the last query alone.
_TILES = {
    (64, 64): (3, 128),
    (96, 96): (2, 128),
    (128, 128): (2, 128),
    (192, 128): (2, 128),
    (192, 192): (2, 112),
    (256, 256): (2, 80),
}
_TILES_WITHOUT_MASK = _TILES | {(128, 128): (2, 176)}
_TILES_WITH_SOFTCAP = _TILES | {(128, 128): (2, 112)}  # tanh needs registers, too


def _tile(problem: Problem, tile_d: int, tile_dv: int) -> tuple[int, int]:
    """The entry of a table, or that of the larger dim."""
    unmasked = problem.diag_lower is None and problem.diag_upper is None
    table = _TILES_WITH_SOFTCAP if problem.softcap > 0 else _TILES_WITHOUT_MASK if unmasked else _TILES
    largest = max(tile_d, tile_dv)
    return table.get((tile_d, tile_dv), table[largest, largest])


class Sm90Forward(HopperVariant):
    """The variant object; see :mod:`cuflash.variants.base`."""

    def unsupported(self, problem: Problem, operands: Operands, device: DeviceInfo) -> str | None:
        """Why the problem cannot run, or None."""
        if reason := self.unsuitable(problem, device):
            return reason
        if reason := unreadable(problem, operands, ("q", "k", "v")):
            return reason
        if operands.out.alignment < problem.itemsize:
            return "needs an address of out that is a multiple of the element size"
        if problem.softcap > 0 and max(problem.head_dim, problem.head_dim_v) > _MAX_SOFTCAP_DIM:
            return f"has no registers for softcap with head dims over {_MAX_SOFTCAP_DIM}"
        if _work_tiles(problem, 128) > _MAX_TILES:
            return f"numbers its tiles in 32 bits: {problem.batch} x {problem.heads_q} heads are too many"
        return None

    def config(self, problem: Problem, operands: Operands, device: DeviceInfo) -> Sm90ForwardConfig:
        """The tile of the table."""
        tile_d, tile_dv = (
            next(size for size in _DIMS if dim <= size) for dim in (problem.head_dim, problem.head_dim_v)
        )
        warpgroups, tile_n = _tile(problem, tile_d, tile_dv)
        return Sm90ForwardConfig(
            element=problem.dtype,
            tile_d=tile_d,
            tile_dv=tile_dv,
            warpgroups=warpgroups,
            tile_n=tile_n,
            stages=_STAGES,
            take_turns=True,
            lazy_rescale=tile_dv > 64,
            early_wait=problem.softcap > 0,
            out_vector_bytes=operands.out.store_bytes,
            exact_dim=problem.head_dim_v == tile_dv,
            has_band=problem.has_band,
            score=score_stage(problem),
        )

    def launcher(self, problem: Problem, operands: Operands, device: DeviceInfo, config: Sm90ForwardConfig) -> Launcher:
        """Compile or load the kernel and pack its parameters."""
        kernel = jit.load(config, device.index, arch=self.arch(device), dynamic_shared_bytes=config.shared_bytes)
        return Sm90Launch(kernel, problem, operands, device, config)


VARIANT = Sm90Forward()


def _work_tiles(problem: Problem, tile_m: int) -> int:
    return problem.batch * problem.heads_q * -(-problem.seqlen_q // tile_m)


def _section(problem: Problem) -> int:
    """(batch, query head) pairs whose tiles are taken together: as many as share the L2 cache, a power of two.

    Without a band all tiles take equally long, and the tiles of one head follow each other.
    """
    if not problem.has_band:
        return 1
    per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.itemsize
    return min(most_within(_L2_BYTES, per_head) * problem.group, problem.batch * problem.heads_q)


class Sm90Launch(MappedLaunch):
    """Launches the kernel for one plan; calling it enqueues and returns at once.

    The parameters are three tensor maps, ForwardParams and WorkList (Sm90ForwardParams of ``sm90_forward.cu``).
    """

    _WORK = struct.Struct("Q2i")
    _ADDRESS = struct.Struct("Q")

    def __init__(
        self,
        kernel: jit.LoadedKernel,
        problem: Problem,
        operands: Operands,
        device: DeviceInfo,
        config: Sm90ForwardConfig,
    ) -> None:
        query_tiles = -(-problem.seqlen_q // config.tile_m)
        work_tiles = _work_tiles(problem, config.tile_m)
        params = bytes(POINTERS.size) + forward_params(problem, operands, query_tiles, config.score)
        work = self._WORK.pack(0, work_tiles, _section(problem))
        p, m, n = problem, config.tile_m, config.tile_n
        encoders = (
            tma.Encoder(p.dtype, operands.q, (p.head_dim, p.seqlen_q, p.heads_q, p.batch), m, config.tile_d),
            tma.Encoder(p.dtype, operands.k, (p.head_dim, p.seqlen_k, p.heads_kv, p.batch), n, config.tile_d),
            tma.Encoder(p.dtype, operands.v, (p.head_dim_v, p.seqlen_k, p.heads_kv, p.batch), n, config.tile_dv),
        )
        super().__init__(kernel, device.index, encoders, params + work, config.threads, config.shared_bytes)
        self._work_at = self._params_at + len(params)
        self._blocks = min(device.multiprocessors, work_tiles)
        # Tiles that take equally long are shared out by turns. By turns a block may get the short last tile of a head
        # every time, or never.
        unequal = problem.has_band or problem.seqlen_q % config.tile_m
        self._tickets = tickets(device.index) if unequal and work_tiles > self._blocks else None

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
        with self._lock:
            if self._packed != (q, k, v):
                self._pack_maps((q, k, v))
            POINTERS.pack_into(self._struct, self._params_at, q, k, v, out, lse)
            if self._tickets is not None:
                self._ADDRESS.pack_into(self._struct, self._work_at, self._tickets.take(stream))
            self._enqueue(self._blocks, 1, 1, stream)


def ci_configs() -> Iterator[tuple[Sm90ForwardConfig, str, tuple[str, ...]]]:
    """See :func:`cuflash.variants.ci_configs`."""
    cases: list[dict[str, Any]] = [{"d": (d, dv)} for d, dv in (*_TILES, (64, 128), (128, 256), (256, 64), (96, 192))]
    for d in (64, 128, 256):
        cases += [{"d": (d, d), **extra} for extra in CI_EXTRAS]
        cases += [{"d": (d - 8, d - 8)}]
    cases += [{"d": (d, dv), "softcap": 30.0} for d, dv in _TILES if max(d, dv) <= _MAX_SOFTCAP_DIM]
    seen = set()
    for case in cases:
        for upper in (None, 0, 255):  # the last hides nothing
            problem, operand, out = ci_problem(case, upper)
            operands = Operands(operand, operand, operand, out)
            config = VARIANT.config(problem, operands, known_device("sm_90"))
            if config not in seen:
                seen.add(config)
                yield config, ARCH, ("HGMMA", "UTMALDG", "SYNCS")
