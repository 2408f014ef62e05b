"""The sm90 variant without a GPU: its tiles, what TMA can read, the products it writes, and its parameters."""

import itertools
import re

import pytest
from problems import KIB, operands, problem

from cuflash import tma
from cuflash.device import known_device
from cuflash.jit import source_root
from cuflash.variants.base import CPU, Operand, Operands
from cuflash.variants.sm90_forward import VARIANT, _section
from cuflash.wgmma import wgmma_source

H200 = known_device("sm_90")


def config(alignment=16, **change):
    p = problem(**change)
    assert VARIANT.unsupported(p, operands(alignment), H200) is None
    return VARIANT.config(p, operands(alignment), H200)


def test_every_head_dim_fits():
    for d, dv in itertools.product([1, 8, 64, 65, 96, 97, 128, 129, 192, 193, 256], repeat=2):
        chosen = config(d=d, dv=dv)
        assert chosen.shared_bytes <= H200.shared_memory == 227 * KIB
        assert (
            d <= chosen.tile_d and dv <= chosen.tile_dv and {chosen.tile_d, chosen.tile_dv} <= {64, 96, 128, 192, 256}
        )
        assert chosen.exact_dim == (dv == chosen.tile_dv)
        limit = 232 if chosen.warpgroups == 2 else 160
        assert chosen.tile_n // 2 + chosen.tile_n // 4 + chosen.tile_dv // 2 <= limit - 30


@pytest.mark.parametrize(
    ("d", "causal", "tile", "parts"),
    [
        # Bytes of sQ, and of two stages of K and V.
        (64, False, (192, 128), (2 * 192 * 64, 2 * 2 * 128 * (64 + 64))),
        (128, False, (128, 176), (2 * 128 * 128, 2 * 2 * 176 * (128 + 128))),
        (128, True, (128, 128), (2 * 128 * 128, 2 * 2 * 128 * (128 + 128))),
        (256, False, (128, 80), (2 * 128 * 256, 2 * 2 * 80 * (256 + 256))),
    ],
)
def test_shared_memory_by_hand(d, causal, tile, parts):
    chosen = config(d=d, causal=causal)
    assert (chosen.tile_m, chosen.tile_n) == tile
    assert 1024 <= chosen.shared_bytes - sum(parts) <= 1024 + 256  # room to align, and barriers
    assert chosen.describe()["threads"] == 128 * (chosen.warpgroups + 1)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 5)}], ids=str)
def test_grouping_of_keys_depends_on_head_dims_and_on_having_a_mask_alone(options):
    changes = [{}, {"m": 1}, {"m": 1, "n": 1}, {"n": 9}, {"b": 9}, {"dtype": "float16"}, {"hq": 8}, {"scale": -1.0}]
    if options:  # whichever mask it is, and if it hides nothing
        changes += [{"causal": True}, {"window": (1000, 1000)}]
    for d in (64, 128, 256):
        assert len({config(d=d, **{**options, **change}).tile_n for change in changes}) == 1


def test_config_follows_out_mask_and_score():
    p = problem()
    for alignment, vector in ((16, 16), (8, 4), (4, 4), (2, 2)):
        assert VARIANT.config(p, operands(16, 16, 16, alignment), H200).out_vector_bytes == vector
    assert config(causal=True).has_band and not config(window=(1000, 1000)).has_band
    assert config(softcap=3.0).score == "score_softcap"


@pytest.mark.parametrize(
    ("change", "layout", "device", "reason"),
    [
        ({}, operands(16), CPU, "CUDA device"),
        ({}, operands(16), known_device("sm_80"), "needs compute capability 9.0; NVIDIA A100 has 8.0"),
        ({}, operands(16), known_device("sm_100"), "9.0; NVIDIA B200 has 10.0"),
        ({"dtype": "float32"}, operands(16), H200, "float16 and bfloat16, not float32"),
        ({}, operands(8, 16, 16, 16), H200, "TMA cannot read q: its rows start at multiples of 8 bytes, not of 16"),
        ({}, operands(16, 16, 2, 16), H200, "TMA cannot read v: its rows start at multiples of 2"),
        ({}, operands(16, 16, 16, 1), H200, "out"),
        ({"d": 256, "softcap": 3.0}, operands(16), H200, "no registers for softcap with head dims over 128"),
        ({"b": 2**20, "hq": 2048, "hkv": 2048}, operands(16), H200, "numbers its tiles in 32 bits"),
    ],
)
def test_reasons_of_refusal(change, layout, device, reason):
    assert reason in (VARIANT.unsupported(problem(**change), layout, device) or "")


@pytest.mark.parametrize(
    ("strides", "reason"),
    [((0, 64, 0), None), ((64, -64, 64), "0 and 2"), ((2**39, 64, 64), "2"), ((64, 0, 64), "all its rows lie at one")],
)
def test_what_tma_can_describe(strides, reason):
    told = tma.cannot_describe(Operand(strides, 16), 100, 2)
    assert told is None if reason is None else reason in told
    assert tma.cannot_describe(Operand((64, 0, 64), 16), 1, 2) is None


def test_heads_that_share_the_l2_cache():
    assert _section(problem(b=4, hq=8, hkv=8, m=999, n=999)) == 1  # no mask: tile after tile of one head
    assert _section(problem(b=4, hq=8, hkv=8, d=128, m=16384, n=16384, causal=True)) == 4  # 8 MiB each
    assert _section(problem(b=4, hq=8, hkv=2, d=128, m=16384, n=16384, causal=True)) == 16
    assert _section(problem(b=2, hq=4, hkv=4, m=64, n=64, causal=True)) == 8


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
@pytest.mark.parametrize("n", [8, 80, 128, 256])
def test_products(n, element):
    text = wgmma_source((n, n), element)
    assert text.count(f"struct Wgmma<{n}, {element}>") == 1
    kind = {"bfloat16": "bf16", "float16": "f16"}[element]
    shared, registers = re.findall(r'asm volatile\("(.*?)"', text)
    for instruction in (shared, registers):
        assert f"m64n{n}k16.f32.{kind}.{kind}" in instruction
        operands_named = {int(i) for i in re.findall(r"%(\d+)", instruction)}
        assert operands_named == set(range(n // 2 + (7 if instruction is registers else 5)))
    for i in range(n // 2):
        assert text.count(f'"+f"(d[0][{i // 4}][{i % 4}])') == 2


@pytest.mark.parametrize(
    ("width", "element", "match"), [(12, "bfloat16", "12"), (264, "float16", "264"), (8, "x", "x")]
)
def test_products_that_do_not_exist(width, element, match):
    with pytest.raises(ValueError, match=match):
        wgmma_source((width,), element)


def test_struct_is_that_of_the_kernel():
    source = (source_root() / "sm90" / "sm90_forward.cu").read_text()
    body = re.search(r"struct Sm90ForwardParams \{(.*?)\n\};", source, re.DOTALL)[1]
    assert re.findall(r"(\w+) (\w+(?:, \w+)*);", body) == [
        ("TensorMap", "q, k, v"),
        ("ForwardParams", "p"),
        ("WorkList", "work"),
    ]
    schedule = (source_root() / "sm90" / "schedule.cuh").read_text()
    assert re.search(r"struct WorkList \{\s*unsigned\* tickets;.*\n\s*int tiles, section;", schedule)
    assert "unsigned long long words[16]" in (source_root() / "ptx" / "tma.cuh").read_text()
    assert tma.MAP_BYTES == 16 * 8


def test_maps_of_arrays_with_broadcast_axes():
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    encoder = tma.Encoder("bfloat16", Operand((0, 512, 64), 16), (60, 100, 8, 3), 128, 64)
    counts, strides, box, *_ = ([int(x) for x in values] for values in encoder._after[:4])
    assert counts == [60, 100, 8, 1] and strides == [1024, 128, 16] and box == [64, 128, 1, 1]
    assert [int(x) for x in tma.Encoder("float16", Operand((0, 96, 0), 16), (96, 7, 1, 1), 80, 96)._after[2]] == [
        32,
        80,
        1,
        1,
    ]


def test_a_map_of_no_keys_has_a_size():
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    encoder = tma.Encoder("bfloat16", Operand((0, 64, 64), 16), (64, 0, 2, 1), 128, 64)
    assert [int(x) for x in encoder._after[0]] == [64, 1, 2, 1]


def test_operands_keep_their_order():
    assert list(Operands.__dataclass_fields__) == ["q", "k", "v", "out"]
