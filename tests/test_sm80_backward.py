"""The sm80 backward kernels without a GPU: their tables of tiles, their parameters and their workspace."""

import ctypes
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from problems import KIB, operands, problem

from cuflash import jit, launch
from cuflash.device import known_device
from cuflash.variants.base import DeviceInfo, Operand, Operands
from cuflash.variants.sm80_backward import (
    ROW_TILE,
    TURN_ROWS,
    BackwardOperands,
    backward_config,
    ci_configs,
    configs,
    finish_config,
    grid,
    padded_rows,
    prepare_config,
    section,
    workspace_shapes,
)

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90")
NAMES = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


def layouts(alignment=16, **alignments):
    return BackwardOperands(**{name: Operand((64, 64, 64), alignments.get(name, alignment)) for name in NAMES})


def keys(arch="sm_90", deterministic=False, layout=None, **change):
    return backward_config(problem(**change), layout or layouts(), known_device(arch), deterministic=deterministic)


# ---- choice of tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "d", "tile", "parts"),
    [
        # Bytes of sK and sV; of the ring of sQ and sdO; of sP and sdS; of the row statistics.
        ("sm_90", 64, (128, 64), (2 * 64 * (64 + 64), 2 * 2 * 128 * (64 + 64), 2 * 2 * 128 * 64, 2 * 4 * 128)),
        # With three stages two of sP and sdS, and three of the row statistics.
        ("sm_90", 128, (64, 128), (2 * 128 * 256, 2 * 3 * 64 * 256, 2 * 2 * 2 * 64 * 128, 3 * 2 * 4 * 64)),
        ("sm_80", 128, (64, 128), (2 * 128 * (128 + 128), 2 * 2 * 64 * (128 + 128), 2 * 2 * 64 * 128, 2 * 4 * 64)),
        ("sm_86", 128, (64, 64), (2 * 64 * (128 + 128), 2 * 1 * 64 * (128 + 128), 2 * 2 * 64 * 64, 2 * 4 * 64)),
        ("sm_90", 256, (64, 64), (2 * 64 * (256 + 256), 2 * 2 * 64 * (256 + 256), 2 * 2 * 64 * 64, 2 * 4 * 64)),
        ("sm_86", 256, (32, 32), (2 * 32 * (256 + 256), 2 * 1 * 32 * (256 + 256), 2 * 2 * 32 * 32, 2 * 4 * 32)),
    ],
)
def test_shared_memory_by_hand(arch, d, tile, parts):
    chosen = keys(arch, d=d)
    assert (chosen.tile_m, chosen.tile_n) == tile
    assert chosen.shared_bytes == sum(parts)
    assert chosen.describe()["shared_bytes"] == chosen.shared_bytes
    assert chosen.describe()["threads"] == 32 * chosen.warps


@pytest.mark.parametrize(("d", "dv", "tile_dv", "exact"), [(64, 64, 64, True), (32, 250, 256, False)])
def test_the_kernel_before_holds_tiles_of_dout_and_out(d, dv, tile_dv, exact):
    chosen = prepare_config(problem(d=d, dv=dv), layouts(), d)
    assert (chosen.tile_m, chosen.tile_d, chosen.tile_dv, chosen.exact_dims) == (64, d, tile_dv, exact)
    assert chosen.shared_bytes == 2 * (2 * 64 * tile_dv)
    assert all(chosen.shared_bytes <= known_device(arch).shared_memory for arch in ARCHS)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_fits_every_device(arch):
    device = known_device(arch)
    dims = [1, 8, 31, 32, 33, 64, 65, 96, 97, 128, 129, 160, 192, 224, 255, 256]
    for d, dv in itertools.product(dims, dims):
        chosen = keys(arch, d=d, dv=dv)
        assert chosen.shared_bytes <= device.shared_memory
        assert d <= chosen.tile_d < d + 32 and dv <= chosen.tile_dv < dv + 32
        assert chosen.tile_d % 32 == chosen.tile_dv % 32 == 0
        assert chosen.exact_dims == (d % 32 == dv % 32 == 0)
        assert ROW_TILE % chosen.tile_m == 0 and chosen.tile_m <= chosen.threads
        assert chosen.tile_m % TURN_ROWS == 0
        # Every warp gets whole 16 x 16 blocks of each span of the swizzle, 64 columns or 32.
        warps_m = chosen.warps // chosen.warps_n
        assert chosen.tile_m % (16 * warps_m) == 0
        assert chosen.tile_n % (16 * warps_m) == 0  # the keys are rows of dK and dV
        assert chosen.tile_m % (16 * chosen.row_blocks) == 0
        for columns in (chosen.tile_n, chosen.tile_d, chosen.tile_dv):
            assert (64 if columns % 64 == 0 else 32) % (16 * chosen.warps_n) == 0


def test_blocks_meant_to_share_a_multiprocessor_fit_it():
    for arch, d in (("sm_90", 64), ("sm_80", 64), ("sm_86", 64)):
        chosen, device = keys(arch, d=d), known_device(arch)
        assert chosen.blocks_per_sm == 2
        assert 2 * (chosen.shared_bytes + KIB) <= device.shared_memory_sm


def test_a_device_too_small_for_any_tile():
    small = DeviceInfo("cuda", 0, "small", (8, 7), 16 * KIB, 17 * KIB, 8)
    with pytest.raises(ValueError, match=r"'small' has 16384 bytes of shared memory a block.*needs \d+; use a device"):
        backward_config(problem(d=256), layouts(), small)


def test_config_follows_alignment_mask_score_and_mode():
    chosen = keys(layout=layouts(q=8, out=2, dq=2, dk=16, dv=4))
    assert (chosen.vector_bytes, chosen.out_vector_bytes) == (8, 4)
    assert prepare_config(problem(), layouts(q=2, out=8), 64).vector_bytes == 8
    assert finish_config(problem(d=40), layouts(dq=8), known_device("sm_90"), 64).out_vector_bytes == 4
    assert not keys().has_band and keys(causal=True).has_band and not keys(window=(1000, 1000)).has_band
    assert keys(softcap=2.0).score == "score_softcap" and keys(scale=-1.0).score == "score_scaled"
    assert keys(dtype="float16").element == "float16"
    assert keys("sm_90").reduce_width == 4 and keys("sm_89").reduce_width == 1
    assert keys(deterministic=True) == replace(keys(), ordered=True) != keys()


@pytest.mark.parametrize("arch", ARCHS)
def test_finish_reads_the_order_that_the_sums_were_made_in(arch):
    first, main, last = configs(problem(d=80), layouts(), known_device(arch))
    assert main.reduce_width == last.reduce_width
    assert first.tile_d == main.tile_d == last.tile_d == 96


def test_order_of_the_launches():
    for deterministic in (False, True):
        kernels = [c.kernel for c in configs(problem(), layouts(), known_device("sm_90"), deterministic=deterministic)]
        assert kernels == ["sm80_backward_prepare", "sm80_backward", "sm80_backward_finish"]


def test_grids_cover_keys_and_rows():
    p = problem(m=300, n=1000, hq=8, hkv=2, b=3)
    first, main, last = configs(p, layouts(), known_device("sm_90"))
    assert grid(main, p, 3) == (-(-1000 // main.tile_n), 2, 3)
    assert grid(replace(main, ordered=True), p, 3) == (-(-1000 // main.tile_n) * 2 * 3, 1, 1)
    for config in (first, last):
        tiles, heads, batch = grid(config, p, 3)
        assert (tiles * config.tile_m, heads, batch) == (padded_rows(p), 8, 3)


@pytest.mark.parametrize(
    ("change", "heads"),
    [
        ({"m": 512}, 66),  # 4 steps of 128 rows, 2 blocks on each of 132 multiprocessors
        ({"m": 512, "hq": 16}, 33),  # each block walks two query heads
        ({"m": 100_000}, 1),
        ({"m": 512, "b": 3}, 24),  # all there are
        ({"m": 512, "causal": True}, 1),
    ],
    ids=str,
)
def test_heads_that_mingle_where_blocks_take_turns(change, heads):
    p, device = problem(**{"n": 512, "d": 64, "hq": 8, "hkv": 8, "b": 64} | change), known_device("sm_90")
    main = backward_config(p, layouts(), device, deterministic=True)
    assert section(main, p, device) == heads


@pytest.mark.parametrize(("m", "rows"), [(0, 0), (1, 128), (128, 128), (129, 256)])
def test_workspace(m, rows):
    p = problem(d=40, m=m, hq=4, b=2)
    default = {"delta": (2, 4, rows), "dq_sum": (2, 4, rows, 64)}
    assert workspace_shapes(p, deterministic=False) == default
    assert workspace_shapes(p, deterministic=True) == default | {"turns": (2, 4, rows // 32)}


# ---- what the kernels see --------------------------------------------------------------------------------------------


def test_kernels_use_every_field_of_their_configs_and_no_other():
    seen = {}
    for config, _, _ in ci_configs():
        seen.setdefault(config.kernel, config)
    assert len(seen) == 3
    for config in seen.values():
        fields = set(re.findall(r"(?:using (\w+) =|static constexpr \w+ (\w+) =)", jit.prelude(config)))
        fields = {a or b for a, b in fields}
        assert set(re.findall(r"\bConfig::(\w+)", jit.flatten(config.source))) == fields, config.kernel


def test_assembly_is_in_ptx_alone():
    for path in jit.source_root().rglob("*.cu*"):
        if path.parent.name != "ptx":
            assert not re.search(r"\basm\b", path.read_text()), path


POINTERS = "q k v out lse dout dlse dq dk dv delta dq_sum turns shift marked_rows".split()
FORWARD = [f"{x}_{axis}" for x in ("q", "k", "v", "out") for axis in ("batch", "row", "head")]
INTS = "seqlen_q seqlen_k heads_q group head_dim head_dim_v diag_lower diag_upper query_tiles".split()
STEPS = [f"{x}_{axis}" for x in ("dout", "dq", "dk", "dv") for axis in ("batch", "row", "head")]


class BackwardParams(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_uint64) for name in POINTERS[:5]]
        + [(name, ctypes.c_int64) for name in FORWARD]
        + [(name, ctypes.c_int32) for name in INTS]
        + [(name, ctypes.c_float) for name in ("score_scale", "softcap", "exp2_scale")]
        + [(name, ctypes.c_uint64) for name in POINTERS[5:]]
        + [(name, ctypes.c_int64) for name in STEPS]
        + [("padded_rows", ctypes.c_int32), ("gradient_scale", ctypes.c_float), ("section", ctypes.c_int32)]
    )


def test_struct_is_that_of_the_kernels():
    assert launch.BACKWARD_PARAMS_BYTES == ctypes.sizeof(BackwardParams) == launch.FORWARD_PARAMS_BYTES + 192
    source = (jit.source_root() / "core" / "params.cuh").read_text()
    kinds = {
        "const void*": 8,
        "const float*": 8,
        "void*": 8,
        "float*": 8,
        "unsigned*": 8,
        "int64": 8,
        "int": 4,
        "float": 4,
    }
    fields = []
    for struct in ("ForwardParams", "BackwardParams : ForwardParams"):
        body = re.sub(r"//.*", "", re.search(rf"struct {struct} \{{(.*?)\n\}};", source, re.DOTALL)[1])
        for declaration in filter(None, (part.strip() for part in body.split(";"))):
            kind, names = re.match(rf"({'|'.join(map(re.escape, kinds))})\s+(.*)", declaration, re.DOTALL).groups()
            fields += [(name.strip(), kinds[kind]) for name in names.split(",")]
    assert fields == [(name, ctypes.sizeof(kind)) for name, kind in BackwardParams._fields_]


def test_parameters():
    p = problem(d=80, dv=48, m=100, n=300, hq=6, hkv=2, scale=0.5, softcap=4.0, causal=True)
    q, k, v, out = (Operand((10 * i, 10 * i + 1, 10 * i + 2), 2) for i in range(4))
    gradients = tuple(Operand((2**40 + i, 200 * i + 1, 200 * i + 2), 2) for i in range(4))
    raw = launch.backward_params(p, Operands(q, k, v, out), gradients, "score_softcap", 128, 7)
    assert len(raw) == launch.BACKWARD_PARAMS_BYTES
    got = BackwardParams.from_buffer_copy(raw)
    assert [getattr(got, name) for name in POINTERS] == [0] * len(POINTERS)
    assert [getattr(got, name) for name in FORWARD] == [2 * s for x in (q, k, v, out) for s in x.strides]
    assert [getattr(got, name) for name in INTS] == [100, 300, 6, 3, 80, 48, -100, 200, 0]
    assert (got.score_scale, got.softcap, got.exp2_scale) == (0.125, 4.0, np.float32(np.log2(np.e)))
    assert [getattr(got, name) for name in STEPS] == [2 * s for x in gradients for s in x.strides]
    assert (got.padded_rows, got.gradient_scale, got.section) == (128, 0.5, 7)


def test_the_scale_of_the_gradients_does_not_depend_on_the_score_stage():
    for change in ({"scale": 0.25}, {"scale": -3.0}, {"scale": 2.0**-90}, {"scale": 0.25, "softcap": 5.0}):
        p = problem(**change)
        raw = launch.backward_params(p, operands(16), (Operand((1, 1, 1), 2),) * 4, keys(**change).score, 256)
        assert BackwardParams.from_buffer_copy(raw).gradient_scale == np.float32(change["scale"])
