"""The fast path from a loaded kernel to the GPU: parameters packed once, one driver call a launch.

A CuPy ``RawKernel`` call repacks every argument and costs about 20 us. Here the parameter struct of a plan is packed
when the plan is made, and a launch overwrites its five pointers and calls ``cuLaunchKernel`` by CuPy's thin wrapper,
which takes plain integers.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cuflash.jit import LoadedKernel
from cuflash.problem import Problem
from cuflash.variants.base import Operand, Operands

# struct ForwardParams of cuda_src/core/params.cuh, field by field: five pointers, then
#   int64 q_batch, q_row, q_head, k_..., v_..., out_...;  int seqlen_q, seqlen_k, heads_q, group, head_dim, head_dim_v,
#   diag_lower, diag_upper, query_tiles;  float score_scale, softcap, exp2_scale
POINTERS = struct.Struct("5Q")
_REST = struct.Struct("12q9i3f")
FORWARD_PARAMS_BYTES = POINTERS.size + _REST.size

# struct BackwardParams: a ForwardParams, then ten pointers (dout, dlse, dq, dk, dv, delta, dq_sum, turns, shift,
# marked_rows), then
#   int64 dout_batch, dout_row, dout_head, dq_..., dk_..., dv_...;  int padded_rows;  float gradient_scale;  int section
BACKWARD_POINTERS = struct.Struct("10Q")
_BACKWARD_REST = struct.Struct("12qifi4x")
BACKWARD_PARAMS_BYTES = FORWARD_PARAMS_BYTES + BACKWARD_POINTERS.size + _BACKWARD_REST.size

MAX_GRID_YZ = 65535  # blocks along y and z of a CUDA grid

_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT

_LOG2_E = 1.4426950408889634


def forward_params(problem: Problem, operands: Operands, query_tiles: int, score: str) -> bytes:
    """The constant part of ForwardParams: everything after the pointers."""
    p = problem
    arrays = (operands.q, operands.k, operands.v, operands.out)
    strides = [step * p.itemsize for x in arrays for step in x.strides]
    # The kernels add a row index to a diagonal in 32 bits: an open side becomes the nearest one that hides nothing.
    lower = -p.seqlen_q if p.diag_lower is None else min(max(p.diag_lower, -p.seqlen_q), p.seqlen_k)
    upper = p.seqlen_k if p.diag_upper is None else max(min(p.diag_upper, p.seqlen_k), -p.seqlen_q)
    score_scale, exp2_scale = _scales(p, score)
    sizes = (p.seqlen_q, p.seqlen_k, p.heads_q, p.group, p.head_dim, p.head_dim_v, lower, upper, query_tiles)
    return _REST.pack(*strides, *sizes, score_scale, p.softcap, exp2_scale)


def backward_params(
    problem: Problem,
    operands: Operands,
    gradients: tuple[Operand, Operand, Operand, Operand],
    score: str,
    padded_rows: int,
    section: int = 1,
) -> bytes:
    """The whole of BackwardParams with null pointers; those of the forward come first, at byte 0.

    Parameters
    ----------
    problem : Problem
    operands : Operands
        Layouts of q, k, v and out.
    gradients : tuple of Operand
        Layouts of dout, dq, dk and dv.
    score : str
        Score stage of cuda_src/core/score.cuh.
    padded_rows : int
        Rows of a head in the workspace.
    section : int
        Heads whose key tiles mingle in a pass whose blocks take turns.
    """
    forward = forward_params(problem, operands, 0, score)
    strides = [step * problem.itemsize for x in gradients for step in x.strides]
    rest = _BACKWARD_REST.pack(*strides, padded_rows, problem.scale, section)
    return bytes(POINTERS.size) + forward + bytes(BACKWARD_POINTERS.size) + rest


def _scales(problem: Problem, score: str) -> tuple[float, float]:
    """(score_scale, exp2_scale) for a score stage of cuda_src/core/score.cuh."""
    if score == "score_folded":
        return 1.0, problem.scale * _LOG2_E
    if score == "score_scaled":
        return problem.scale, _LOG2_E
    return problem.scale / problem.softcap, _LOG2_E


class KernelLaunch:
    """A kernel with one struct as its argument, packed once; see the module's text.

    Parameters
    ----------
    kernel : LoadedKernel
    device : int
        CUDA ordinal.
    params : bytes
        The struct; subclasses overwrite what changes from call to call.
    threads, shared_bytes : int
        Of a block.
    """

    def __init__(self, kernel: LoadedKernel, device: int, params: bytes, threads: int, shared_bytes: int) -> None:
        from cupy.cuda import driver

        self._kernel, self._device = kernel, device  # the first keeps the module loaded
        self._struct = ctypes.create_string_buffer(params, len(params))
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._struct))
        self._lock = threading.Lock()  # the struct is shared by the threads that run this plan
        self._launch: Callable[..., Any] = driver.launchKernel
        self._error: type[Exception] = driver.CUDADriverError
        self._function = int(kernel.function)
        self._arguments_address = ctypes.addressof(self._arguments)
        self._threads, self._shared_bytes = threads, shared_bytes

    def _bind_context(self) -> None:
        import cupy

        cupy.cuda.runtime.setDevice(self._device)
        cupy.cuda.runtime.free(0)

    def _enqueue(self, x: int, y: int, z: int, stream: int) -> None:
        """Launch a grid; the caller holds the lock and has filled in the struct."""
        shared, at = self._shared_bytes, self._arguments_address
        try:
            self._launch(self._function, x, y, z, self._threads, 1, 1, shared, stream, at, 0)
        except self._error as error:
            if getattr(error, "status", None) != _INVALID_CONTEXT:
                raise self._failure(error) from error
            self._bind_context()  # a thread that has not used CUDA yet
            try:
                self._launch(self._function, x, y, z, self._threads, 1, 1, shared, stream, at, 0)
            except self._error as second:
                raise self._failure(second) from second

    def _failure(self, error: Exception) -> RuntimeError:
        compiled = self._kernel.compiled
        return RuntimeError(f"cuLaunchKernel of {compiled.name} failed: {error} ({compiled.config})")


class ForwardLaunch(KernelLaunch):
    """Launches one kernel for one plan; calling it enqueues and returns at once.

    Parameters
    ----------
    kernel, device, threads, shared_bytes
        As in :class:`KernelLaunch`.
    params : bytes
        From :func:`forward_params`.
    grid : tuple of int
        (query tiles, heads, batch entries); a batch larger than a grid is launched in pieces.
    batch_strides : tuple of int
        Bytes from one batch entry to the next in q, k, v, out and lse.
    """

    def __init__(
        self,
        kernel: LoadedKernel,
        device: int,
        params: bytes,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        batch_strides: tuple[int, int, int, int, int],
    ) -> None:
        super().__init__(kernel, device, bytes(POINTERS.size) + params, threads, shared_bytes)
        self._grid, self._batch_strides = grid, batch_strides

    def __call__(self, q: int, k: int, v: int, out: int, lse: int, stream: int) -> None:
        x, y, z = self._grid
        if z > MAX_GRID_YZ:
            for start, count in self._pieces():
                pointers = zip((q, k, v, out, lse), self._batch_strides, strict=True)
                at = [pointer + start * step if pointer else 0 for pointer, step in pointers]
                with self._lock:
                    POINTERS.pack_into(self._struct, 0, *at)
                    self._enqueue(x, y, count, stream)
        else:
            with self._lock:
                POINTERS.pack_into(self._struct, 0, q, k, v, out, lse)
                self._enqueue(x, y, z, stream)

    def _pieces(self) -> Iterator[tuple[int, int]]:
        total = self._grid[2]
        for start in range(0, total, MAX_GRID_YZ):
            yield start, min(MAX_GRID_YZ, total - start)


class BackwardLaunch(KernelLaunch):
    """Launches one kernel of a backward pass.

    Parameters
    ----------
    kernel, device, threads, shared_bytes
        As in :class:`KernelLaunch`.
    params : bytes
        From :func:`backward_params`.
    """

    # The pointers.
    NAMES = (
        "q",
        "k",
        "v",
        "out",
        "lse",
        "dout",
        "dlse",
        "dq",
        "dk",
        "dv",
        "delta",
        "dq_sum",
        "turns",
        "shift",
        "marked_rows",
    )

    def __call__(self, pointers: Sequence[int], grid: tuple[int, int, int], stream: int) -> None:
        """Enqueue a grid; `pointers` in the order of ``NAMES``."""
        with self._lock:
            POINTERS.pack_into(self._struct, 0, *pointers[:5])
            BACKWARD_POINTERS.pack_into(self._struct, FORWARD_PARAMS_BYTES, *pointers[5:])
            self._enqueue(*grid, stream)
