"""The variants: one module each, chosen by :mod:`cuflash.select`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def ci_configs() -> Iterator[tuple[Any, str, tuple[str, ...]]]:
    """Kernel Configs that CI compiles without a GPU, as (config, arch, SASS mnemonics it must contain).

    Every value that a Config field can take appears, and every combination of head dim, mask and architecture.
    """
    from cuflash.variants import sm80_backward, sm80_forward, sm90_backward, sm90_forward

    yield from sm80_forward.ci_configs()
    yield from sm90_forward.ci_configs()
    yield from sm80_backward.ci_configs()
    yield from sm90_backward.ci_configs()
