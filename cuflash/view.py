"""A framework-neutral view of one array: where its bytes are and how they are laid out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(slots=True)
class View:
    """Borrowed description of an array; keeping `owner` alive keeps the memory alive.

    Attributes
    ----------
    pointer : int
        Address of element 0 (any DLPack byte offset already added); may be 0 for an array with no element.
    shape, strides : tuple of int
        Sizes and strides in elements, in the array's own axis order.
    dtype : str
        NumPy-style name, for example ``"bfloat16"``.
    device_kind : {"cpu", "cuda"}
    device_index : int
        CUDA ordinal; 0 for the CPU.
    read_only : bool
        Whether writing through `pointer` is forbidden.
    owner : object
        Whatever must stay referenced while the view is used.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_kind: DeviceKind
    device_index: int
    read_only: bool
    owner: object = field(repr=False, default=None)
