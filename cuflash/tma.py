"""Tensor maps: how the copy engine of compute capability 9.0 finds tiles of an array.

CUDA driver API, "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes

from cuflash.variants.base import Operand

MAP_BYTES = 128
_GRANULE = 16  # bytes; of the address and of every stride
_MAX_STRIDE = 2**40  # bytes
_SPAN = 64  # elements of 16 bits in one row of a box with 128-byte swizzle


def cannot_describe(operand: Operand, seqlen: int, itemsize: int) -> str | None:
    """Why no tensor map can describe an array, or None."""
    if operand.alignment < _GRANULE:
        return f"its rows start at multiples of {operand.alignment} bytes, not of {_GRANULE}"
    batch, row, head = (step * itemsize for step in operand.strides)
    if min(batch, row, head) < 0 or max(batch, row, head) >= _MAX_STRIDE:
        return f"its strides ({batch}, {row}, {head} bytes) must lie between 0 and 2**40"
    if row == 0 and seqlen > 1:
        return "all its rows lie at one address"
    return None


def panel_columns(tile_dim: int) -> int:
    """Columns of one panel of a tile in shared memory; PanelLayout of ``sm90/panel.cuh``."""
    return _SPAN if tile_dim % _SPAN == 0 else _SPAN // 2


class Encoder:
    """Makes the tensor maps of arrays that differ in address only: 4-D (dim, seqlen, heads, batch), one panel a box.

    Parameters
    ----------
    dtype : {"float16", "bfloat16"}
    operand : Operand
        With strides that :func:`cannot_describe` accepts; an axis of stride 0 has size 1 in the map.
    sizes : tuple of int
        (dim, seqlen, heads, batch).
    tile_rows, tile_dim : int
        Of the tile; elements beyond the array read as 0.
    """

    def __init__(
        self, dtype: str, operand: Operand, sizes: tuple[int, int, int, int], tile_rows: int, tile_dim: int
    ) -> None:
        from cuda.bindings import driver

        batch, row, head = operand.strides
        dim, seqlen, heads, entries = sizes
        steps = (row, head, batch)
        # No keys at all are never loaded, but a map has to have some.
        counts = [dim, max(seqlen, 1), *(size if step else 1 for size, step in ((heads, head), (entries, batch)))]
        strides = [max(2 * step, _GRANULE) for step in steps]  # that of an axis of size 1 only has to be valid
        columns = panel_columns(tile_dim)
        kind = driver.CUtensorMapDataType
        swizzle = driver.CUtensorMapSwizzle
        self._encode = driver.cuTensorMapEncodeTiled
        self._before = (
            kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if dtype == "bfloat16" else kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            4,
        )
        self._after = (
            [driver.cuuint64_t(x) for x in counts],
            [driver.cuuint64_t(x) for x in strides],
            [driver.cuuint32_t(x) for x in (columns, tile_rows, 1, 1)],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle.CU_TENSOR_MAP_SWIZZLE_128B if columns == _SPAN else swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def __call__(self, address: int) -> bytes:
        """The map of the array at `address`, 128 bytes.

        Raises
        ------
        RuntimeError
            If the driver refuses it.
        """
        status, tensor_map = self._encode(*self._before, address, *self._after)
        if status:
            counts, strides = ([int(x) for x in values] for values in self._after[:2])
            raise RuntimeError(
                f"cuTensorMapEncodeTiled failed with {status!r}: sizes {counts}, strides {strides} bytes"
            )
        return ctypes.string_at(tensor_map.getPtr(), MAP_BYTES)
