"""The sm80 variant: its table of tiles and its launch without a GPU; on one, what only it can read and write."""

import ctypes
import itertools
import random
import re
import struct
import types

import numpy as np
import pytest
from backends import DTYPES, Target, assert_same_bits, bits
from problems import KIB, operands, problem

from cuflash import launch
from cuflash.device import known_device
from cuflash.jit import source_root
from cuflash.problem import Problem
from cuflash.variants.base import CPU, DeviceInfo, Operand, Operands
from cuflash.variants.sm80_forward import VARIANT

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90")


def config(arch="sm_90", alignment=16, **change):
    p = problem(**change)
    assert VARIANT.unsupported(p, operands(alignment), known_device(arch)) is None
    return VARIANT.config(p, operands(alignment), known_device(arch))


# ---- choice of tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "d", "tile", "parts"),
    [
        # Bytes of sQ; of the ring of K and V; of the weights and of the row maxima and sums that warp pairs swap.
        ("sm_90", 64, (128, 128), (2 * 128 * 64, 2 * 2 * 128 * (64 + 64), 0, 0)),
        ("sm_86", 128, (128, 64), (2 * 128 * 128, 2 * 2 * 64 * (128 + 128), 0, 0)),
        ("sm_90", 256, (64, 64), (2 * 64 * 256, 2 * 1 * 64 * (256 + 256), 2 * 64 * 64, 2 * 16 * 64)),
        ("sm_80", 256, (128, 64), (2 * 128 * 256, 2 * 1 * 64 * (256 + 256), 2 * 128 * 64, 2 * 16 * 128)),
        ("sm_86", 256, (64, 32), (2 * 64 * 256, 2 * 1 * 32 * (256 + 256), 2 * 64 * 32, 2 * 16 * 64)),
    ],
)
def test_shared_memory_by_hand(arch, d, tile, parts):
    chosen = config(arch, d=d)
    assert (chosen.tile_m, chosen.tile_n) == tile
    assert 0 <= chosen.shared_bytes - sum(parts) <= 64  # a few words beside the tiles
    assert chosen.describe()["shared_bytes"] == chosen.shared_bytes
    assert chosen.describe()["threads"] == 32 * chosen.warps


@pytest.mark.parametrize("arch", ARCHS)
def test_every_head_dim_fits_every_device(arch):
    device = known_device(arch)
    dims = [1, 8, 31, 32, 33, 64, 65, 96, 97, 128, 129, 160, 192, 255, 256]
    for d, dv in itertools.product(dims, dims):
        chosen = config(arch, d=d, dv=dv)
        assert chosen.shared_bytes <= device.shared_memory
        assert d <= chosen.tile_d < d + 32 and dv <= chosen.tile_dv < dv + 32
        assert chosen.tile_d % 32 == chosen.tile_dv % 32 == 0
        assert chosen.exact_dims == (d % 32 == dv % 32 == 0)
        # The output tile is staged where the queries and the ring were.
        assert 2 * chosen.tile_m * chosen.tile_dv <= chosen.shared_bytes


def test_grouping_of_keys_depends_on_head_dims_and_device_alone():
    rng = random.Random(0)
    for arch, (d, dv) in itertools.product(ARCHS, [(8, 8), (64, 64), (80, 48), (128, 128), (192, 128), (256, 256)]):
        groupings = set()
        for _ in range(50):
            change = {
                "dtype": rng.choice(["float16", "bfloat16"]),
                "b": rng.choice([1, 3, 1000]),
                "m": rng.choice([1, 17, 5000]),
                "n": rng.choice([1, 65, 100_000]),
                "hq": rng.choice([2, 64]),
                "causal": rng.choice([False, True, "top-left"]),
                "window": rng.choice([None, (0, 0), (1000, None)]),
                "softcap": rng.choice([0.0, 30.0]),
                "scale": rng.choice([None, -1.0, 0.0]),
            }
            chosen = config(arch, rng.choice([2, 4, 8, 16]), d=d, dv=dv, **change)
            groupings.add((chosen.tile_n, chosen.warps_n))
        assert len(groupings) == 1, (arch, d, dv)


def test_blocks_meant_to_share_a_multiprocessor_fit_it():
    assert config("sm_90", d=256).blocks_per_sm == 2
    assert config("sm_80", d=256).blocks_per_sm == 1  # 164 KiB hold one block of either tile: the larger one is better
    for arch, d in itertools.product(("sm_80", "sm_90"), (32, 64, 96, 128, 192, 256)):
        chosen, device = config(arch, d=d), known_device(arch)
        assert chosen.blocks_per_sm * chosen.shared_bytes <= device.shared_memory_sm


def test_scales_that_float32_cannot_fold():
    assert config(scale=2.0**-60).score == "score_folded" and config(scale=2.0**-90).score == "score_scaled"
    assert config(scale=1e30).score == "score_scaled"


def test_config_follows_alignment_mask_and_score():
    assert config().vector_bytes == 16 and config(alignment=2).vector_bytes == 2
    p = problem()
    chosen = VARIANT.config(p, operands(16, 8, 16, 4), known_device("sm_90"))
    assert (chosen.vector_bytes, chosen.out_vector_bytes) == (8, 4)
    assert not config().has_band and config(causal=True).has_band and config(window=(0, 0)).has_band
    assert not config(window=(1000, 1000)).has_band  # hides nothing
    assert config().score == "score_folded"
    assert config(scale=-1.0).score == config(scale=0.0).score == "score_scaled"
    assert config(softcap=20.0).score == config(softcap=20.0, scale=-1.0).score == "score_softcap"
    assert config(dtype="float16").element == "float16"


@pytest.mark.parametrize(
    ("change", "aligned", "device", "reason"),
    [
        ({}, 16, CPU, "CUDA device"),
        ({}, 16, DeviceInfo("cuda", 0, "Tesla T4", (7, 5), 64 * KIB, 64 * KIB, 40), r"8\.0 or more; Tesla T4 has 7\.5"),
        ({"dtype": "float32"}, 16, known_device("sm_90"), "float16 and bfloat16, not float32"),
        ({"dtype": "float64"}, 16, known_device("sm_80"), "float16 and bfloat16, not float64"),
        ({"hq": 65536, "hkv": 65536}, 16, known_device("sm_90"), "at most 65535 query heads, not 65536"),
        ({}, 1, known_device("sm_90"), "multiples of the element size"),
        ({"d": 256}, 16, DeviceInfo("cuda", 0, "small", (8, 7), 16 * KIB, 17 * KIB, 8), "256 fits 16384 bytes"),
    ],
)
def test_reasons_of_refusal(change, aligned, device, reason):
    assert re.search(reason, VARIANT.unsupported(problem(**change), operands(aligned), device) or "")


# ---- parameters and launch -------------------------------------------------------------------------------------------

STEPS = [f"{x}_{axis}" for x in ("q", "k", "v", "out") for axis in ("batch", "row", "head")]
INTS = "seqlen_q seqlen_k heads_q group head_dim head_dim_v diag_lower diag_upper query_tiles".split()
FLOATS = ["score_scale", "softcap", "exp2_scale"]


class ForwardParams(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_uint64) for name in ("q", "k", "v", "out", "lse")]
        + [(name, ctypes.c_int64) for name in STEPS]
        + [(name, ctypes.c_int32) for name in INTS]
        + [(name, ctypes.c_float) for name in FLOATS]
    )


def unpacked(p, layout=None, score="score_folded", query_tiles=7):
    raw = launch.forward_params(p, layout or operands(16), query_tiles, score)
    return ForwardParams.from_buffer_copy(bytes(40) + raw)


def test_struct_is_that_of_the_kernels():
    assert launch.FORWARD_PARAMS_BYTES == ctypes.sizeof(ForwardParams) == 5 * 8 + 12 * 8 + 9 * 4 + 3 * 4
    source = (source_root() / "core" / "params.cuh").read_text()
    body = re.search(r"struct ForwardParams \{(.*?)\n\};", source, re.DOTALL)[1]
    body = re.sub(r"//.*", "", body)
    kinds = {"const void*": 8, "void*": 8, "float*": 8, "int64": 8, "int": 4, "float": 4}
    fields = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        kind, names = re.match(r"(const void\*|void\*|float\*|int64|int|float)\s+(.*)", declaration, re.DOTALL).groups()
        fields += [(name.strip(), kinds[kind]) for name in names.split(",")]
    assert fields == [(name, ctypes.sizeof(kind)) for name, kind in ForwardParams._fields_]


def test_parameters():
    layout = Operands(Operand((1, 2, 3), 2), Operand((4, 5, 6), 2), Operand((0, 8, 9), 2), Operand((2**32, 11, 12), 2))
    p = problem(d=80, dv=48, m=100, n=300, hq=6, hkv=2, scale=0.5, causal=True)
    got = unpacked(p, layout)
    assert [getattr(got, name) for name in STEPS] == [2 * s for s in (1, 2, 3, 4, 5, 6, 0, 8, 9, 2**32, 11, 12)]
    assert [getattr(got, name) for name in INTS] == [100, 300, 6, 3, 80, 48, -100, 200, 7]
    log2_e = np.float32(np.log2(np.e))
    assert (got.score_scale, got.exp2_scale) == (1.0, np.float32(0.5 * np.log2(np.e)))
    got = unpacked(problem(scale=-0.5), score="score_scaled")
    assert (got.score_scale, got.exp2_scale) == (-0.5, log2_e)
    got = unpacked(problem(scale=0.5, softcap=4.0), score="score_softcap")
    assert (got.score_scale, got.softcap, got.exp2_scale) == (0.125, 4.0, log2_e)


def test_diagonals_fit_in_32_bits_and_hide_the_same():
    far = 2**30
    for lower, upper in itertools.product([None, -far, -9, -3, 0, 4, 9, far], repeat=2):
        m, n = 5, 8
        p = Problem(1, m, n, 1, 1, 8, 8, "bfloat16", 1.0, 0.0, lower, upper)
        got = unpacked(p)
        # Rows of the last tile reach past seqlen_q; adding one to a diagonal must not overflow.
        assert abs(got.diag_lower) <= max(m, n) and abs(got.diag_upper) <= max(m, n)
        for i, j in itertools.product(range(m), range(n)):
            want = (lower is None or j - i >= lower) and (upper is None or j - i <= upper)
            assert (got.diag_lower <= j - i <= got.diag_upper) == want, (lower, upper, i, j)


@pytest.fixture
def driver(monkeypatch):
    """A stand-in for cuLaunchKernel that records (grid, block, shared bytes, stream, the five pointers)."""
    module = pytest.importorskip("cupy.cuda", reason="CuPy is not installed").driver
    state = types.SimpleNamespace(calls=[], status=0)

    class DriverError(RuntimeError):
        def __init__(self, status):
            super().__init__(f"error {status}")
            self.status = status

    def launch_kernel(function, x, y, z, tx, ty, tz, shared, stream, arguments, extra):
        parameters = ctypes.c_void_p.from_address(arguments).value
        pointers = struct.unpack("5Q", ctypes.string_at(parameters, 40))
        state.calls.append(((x, y, z), (tx, ty, tz), shared, stream, pointers))
        if state.status:
            raise DriverError(state.status)

    monkeypatch.setattr(module, "launchKernel", launch_kernel)
    monkeypatch.setattr(module, "CUDADriverError", DriverError)
    return state


def forward_launch(grid, strides=(16, 32, 48, 64, 4)):
    compiled = types.SimpleNamespace(name="sm80_forward", config="some config")
    kernel = types.SimpleNamespace(function=0, compiled=compiled)
    params = bytes(launch.FORWARD_PARAMS_BYTES - 40)
    return launch.ForwardLaunch(kernel, 0, params, grid=grid, threads=128, shared_bytes=1000, batch_strides=strides)


def test_one_launch(driver):
    forward_launch((3, 5, 65535))(1000, 2000, 3000, 4000, 0, 77)
    assert driver.calls == [((3, 5, 65535), (128, 1, 1), 1000, 77, (1000, 2000, 3000, 4000, 0))]


@pytest.mark.parametrize("lse", [0, 5000])
def test_a_batch_larger_than_a_grid_is_launched_in_pieces(driver, lse):
    forward_launch((3, 5, 2 * 65535 + 10), (16, 0, 48, 64, 4))(1000, 2000, 3000, 4000, lse, 77)
    assert [call[0] for call in driver.calls] == [(3, 5, 65535), (3, 5, 65535), (3, 5, 10)]
    for start, call in zip((0, 65535, 2 * 65535), driver.calls, strict=True):
        at_lse = lse + 4 * start if lse else 0
        assert call[4] == (1000 + 16 * start, 2000, 3000 + 48 * start, 4000 + 64 * start, at_lse)


def test_a_thread_without_a_context_gets_one(driver, monkeypatch):
    run = forward_launch((1, 1, 1))

    def bind():
        driver.status = 0

    monkeypatch.setattr(run, "_bind_context", bind)
    driver.status = 201
    run(1, 2, 3, 4, 0, 0)
    assert len(driver.calls) == 2  # refused, then repeated


def test_a_failed_launch_names_kernel_and_config(driver):
    driver.status = 701
    with pytest.raises(RuntimeError, match=r"sm80_forward failed: error 701 \(some config\)"):
        forward_launch((1, 1, 1))(1, 2, 3, 4, 0, 0)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_alignment_of_every_operand_gives_the_same_bits():
    t = Target("cupy", "cuda", "sm80", "bfloat16")
    q, k, v = t.inputs(b=1, m=130, n=70, hq=2, hkv=1, d=40, dv=72)
    want, want_lse = t.attend(q, k, v, causal=True)

    def padded(x, elements):
        _, s, h, d = x.shape
        row = d + elements  # 40 and 72 are multiples of 8 elements, so `elements` is the alignment
        return t.scatter(x, (s * h * row, h * row, row, 1), elements)[1]

    for a, b, c, o in itertools.product((1, 2, 4, 8), repeat=4):
        out = padded(np.full(want.shape, np.nan, DTYPES["bfloat16"]), o)
        got, lse = t.call(padded(q, a), padded(k, b), padded(v, c), causal=True, out=out)
        assert_same_bits(got, want, (a, b, c, o))
        assert_same_bits(lse, want_lse, (a, b, c, o))
    assert bits(want).any()
