"""The sm90 backward kernels without a GPU: their table of tiles, their parameters and their workspace."""

import itertools
import re

import pytest
from problems import KIB, problem

from cuflash import jit, launch, tma
from cuflash.device import known_device
from cuflash.problem import BackwardProblem
from cuflash.variants.base import BackwardOperands, Operand
from cuflash.variants.sm90_backward import (
    VARIANT,
    Sm90BackwardConfig,
    Sm90BackwardWideConfig,
    backward_config,
    ci_configs,
    mapped,
)

HOPPER = known_device("sm_90")
NAMES = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")


def layouts(alignment=16, **alignments):
    return BackwardOperands(**{name: Operand((64, 64, 64), alignments.get(name, alignment)) for name in NAMES})


def gradients(deterministic=False, **change):
    p = problem(**change)
    values = {name: getattr(p, name) for name in p.__dataclass_fields__}
    return BackwardProblem(**values, deterministic=deterministic)


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_dim_has_a_tile_that_holds_it(causal):
    for d, dv in itertools.product((1, 33, 64, 72, 96, 100, 128, 130, 192, 200, 256), repeat=2):
        config = backward_config(problem(d=d, dv=dv, causal=causal), layouts())
        assert config.tile_d >= d and config.tile_dv >= dv
        assert config.exact_dims == ((d, dv) == (config.tile_d, config.tile_dv))
        assert config.shared_bytes <= HOPPER.shared_memory == 227 * KIB
        assert isinstance(config, Sm90BackwardWideConfig) == (config.tile_n == 64)


def test_registers_are_those_that_the_block_was_launched_with():
    for config, *_ in ci_configs():
        at_launch = 65536 // config.threads // 8 * 8
        used = config.warpgroups * config.consumer_registers + config.query_registers
        assert used <= (config.warpgroups + 1) * at_launch


def test_shared_memory_by_hand():
    config = backward_config(problem(d=128, dv=128), layouts())
    keys, queries, scores = 2 * 128 * 256, 2 * 2 * 64 * 256, 3 * 2 * 64 * 128
    rows, sums, marks, barriers = 2 * 2 * 4 * 64, 2 * 4 * 64 * 64, 4 * (128 + 2), 16 * (4 + 2 * 2 + 3)
    assert config.shared_bytes == keys + queries + scores + rows + sums + marks + barriers + 1024


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("b", "m", "hq"), [(1, 1, 1), (3, 129, 5)])
def test_workspace_is_aligned(b, m, hq, deterministic):
    """The sums of dq are added to 16 bytes at a time, and rows are copied 256 bytes at a time."""
    p = gradients(deterministic, b=b, m=m, hq=hq, hkv=1, d=72, dv=72)
    config = VARIANT.config(p, layouts(), HOPPER)
    names, sizes = zip(*config.workspace, strict=True)
    starts = dict(zip(names, itertools.accumulate(sizes[:-1], initial=0), strict=True))
    assert all(starts[name] % 256 == 0 for name in ("delta", "shift", "dq_sum"))
    assert ("turns" in starts) == deterministic
    rows = b * hq * -(-m // 128) * 128
    words = rows * (1 + 1 + 96) + rows // 64 + (rows // 32 if deterministic else 0)
    assert VARIANT.workspace_bytes(p, HOPPER, config) == 4 * words


def test_maps_in_the_order_of_the_struct():
    p = problem(b=3, m=100, n=300, hq=6, hkv=2, d=72, dv=40)
    config = backward_config(p, layouts())
    assert list(mapped(config, p)) == [
        ("q", (72, 100, 6, 3), 64, 96),
        ("dout", (40, 100, 6, 3), 64, 96),
        ("k", (72, 300, 2, 3), 128, 96),
        ("v", (40, 300, 2, 3), 128, 96),
    ]
    source = (jit.source_root() / "sm90" / "backward.cuh").read_text()
    body = re.search(r"struct Sm90BackwardParams \{(.*?)\n\};", source, re.DOTALL)[1]
    assert re.findall(r"(\w+) (\w+(?:, \w+)*);", body) == [("TensorMap", "q, dout, k, v"), ("BackwardParams", "p")]
    assert (4 * tma.MAP_BYTES) % 64 == 0 and launch.BACKWARD_PARAMS_BYTES % 8 == 0


def test_what_it_does_not_take():
    p = gradients(d=64, dv=64)
    assert VARIANT.unsupported(p, layouts(), HOPPER) is None
    assert "needs compute capability 9.0" in VARIANT.unsupported(p, layouts(), known_device("sm_80"))
    assert VARIANT.unsupported(p, layouts(dout=8), HOPPER).startswith("TMA cannot read dout")
    assert "multiples of the element size" in VARIANT.unsupported(p, layouts(dk=1), HOPPER)
    assert "float32" in VARIANT.unsupported(gradients(d=64, dv=64, dtype="float32"), layouts(), HOPPER)


def test_tiles_mingle_under_a_mask_only_and_within_the_cache():
    plain = backward_config(problem(m=2048, n=2048, hq=32, hkv=32, d=128, dv=128), layouts())
    p = problem(m=2048, n=2048, hq=32, hkv=32, d=128, dv=128, causal=True)
    masked = backward_config(p, layouts())
    assert plain.section(p, HOPPER) == 1
    section = masked.section(p, HOPPER)
    assert section == 16 and section * 2048 * (4 * 128 + 4 * 128) <= 40 << 20
    assert plain.grid(p, 3) == (16, 32, 3)
    assert masked.grid(p, 3) == (16 * 16, 2, 3)


@pytest.mark.parametrize(
    ("heads", "batch", "section"),
    [(32, 2, 16), (8, 2, 8), (24, 1, 8), (12, 2, -16), (3, 40, -16), (3, 1, -3), (1, 1, 1)],
)
def test_tiles_mingle_in_a_grid_without_divisions_if_that_costs_at_most_half(heads, batch, section):
    p = problem(b=batch, m=2048, n=2048, hq=heads, hkv=heads, d=128, dv=128, causal=True)
    config = backward_config(p, layouts())
    assert config.section(p, HOPPER) == section
    assert config.grid(p, batch) == (
        (16 * heads * batch, 1, 1) if section < 0 else (16 * section, heads // section, batch)
    )


def test_source_names():
    assert (Sm90BackwardConfig.kernel, Sm90BackwardWideConfig.kernel) == ("sm90_backward", "sm90_backward_wide")
