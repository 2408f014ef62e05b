"""Selection, explain and the traffic model, on made-up devices and by brute force."""

import doctest
import importlib
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

import cuflash
from cuflash import select
from cuflash.device import known_device
from cuflash.explain import explain_problem
from cuflash.io_model import backward_bytes, compulsory_bytes, forward_bytes
from cuflash.plan import contiguous_operands
from cuflash.problem import BackwardProblem, Problem
from cuflash.variants.base import CPU, Operand

PROBLEM = Problem(2, 100, 300, 4, 2, 64, 32, "bfloat16", 0.125)
GPU = known_device("sm_90")


class Fake:
    device_kind = "cuda"

    def __init__(self, name, reason=None):
        self.name, self.reason = name, reason

    def unsupported(self, problem, operands, device):
        return self.reason

    def config(self, problem, operands, device):
        return self

    def describe(self):
        return {"tile": (64, 32), "stages": 2}

    def report(self, config, device):
        return {"registers": 99, "spills": 0}


@pytest.fixture
def variants(monkeypatch):
    known = {"first": Fake("first", "head_dim is odd"), "second": Fake("second"), "third": Fake("third")}

    def load(name, operation="forward"):
        if name == "broken":
            raise ImportError("No module named 'cupy'")
        return known[name]

    monkeypatch.setattr(select, "load", load)
    registry = {name: select.Entry("", "cuda") for name in ("broken", *known)} | {"host": select.Entry("", "cpu")}
    monkeypatch.setattr(select, "REGISTRY", registry)
    monkeypatch.setattr(select, "BACKWARD", {})
    return known


def test_first_that_can_run_is_chosen(variants):
    chosen, config = select.select(PROBLEM, contiguous_operands(PROBLEM), GPU)
    assert chosen is variants["second"] and config is chosen
    assert select.select(PROBLEM, contiguous_operands(PROBLEM), GPU, "third")[0] is variants["third"]


def test_reasons_of_every_variant(variants):
    variants["second"].reason = variants["third"].reason = "no"
    with pytest.raises(cuflash.UnsupportedProblem) as caught:
        select.select(PROBLEM, contiguous_operands(PROBLEM), GPU)
    reasons = caught.value.reasons
    assert list(reasons) == ["broken", "first", "second", "third", "host"]
    assert "No module named 'cupy'" in reasons["broken"] and "cuflash[cuda13]" in reasons["broken"]
    assert reasons["first"] == "head_dim is odd" and "runs on CPU arrays" in reasons["host"]
    with pytest.raises(cuflash.UnsupportedProblem) as caught:
        select.select(PROBLEM, contiguous_operands(PROBLEM), GPU, "first")
    assert caught.value.reasons == {"first": "head_dim is odd"}


def test_explain_problem(variants):
    told = explain_problem(PROBLEM, GPU, copies={"q": "because"})
    assert told.variant == "second"
    assert told.config == {"tile": (64, 32), "stages": 2} and told.build == {"registers": 99, "spills": 0}
    assert told.others["third"] == "can run it, but second comes first"
    assert set(told.others) == {"broken", "first", "third", "host"}
    assert told.flops == 2 * 2 * 4 * 100 * 300 * 96
    assert told.hbm_bytes["flash-2"] == forward_bytes(PROBLEM, "flash-2", 64, GPU.shared_memory)
    text = str(told)
    for part in ("bfloat16", "sm_90", "second", "registers 99", "q: because", "first: head_dim is odd"):
        assert part in text
    assert "config    tile (64, 32), stages 2\n" in text
    assert told.others["host"] == "runs on CPU arrays, and cuflash never moves data between devices"
    json.dumps(told.as_dict())
    forced = explain_problem(PROBLEM, GPU, variant="first")
    assert forced.variant is None and forced.others["third"].startswith("can run it, but variant='first'")
    with pytest.raises(ValueError, match="variant='fast' is not known"):
        explain_problem(PROBLEM, GPU, variant="fast")


def test_explain_without_a_compiler(variants, monkeypatch):
    def report(*args):
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(variants["second"], "report", report)
    told = explain_problem(PROBLEM, GPU)
    assert told.variant == "second" and list(told.build) == ["unknown"]
    line = "\nbuild     not known: needs cuda-core and NVRTC; pip install 'cuflash[cuda13]'\n"
    assert line in str(told) and "traffic" in str(told)
    monkeypatch.setattr(variants["second"], "config", report)  # a broken variant is not a missing compiler
    with pytest.raises(ImportError, match="No module named 'cuda'"):
        explain_problem(PROBLEM, GPU)


def test_a_long_config_is_wrapped_between_facts_with_the_telling_ones_first(variants, monkeypatch):
    facts = {"element": "bfloat16", **{f"field_{i}": "two words" for i in range(20)}}
    facts |= {"shared_bytes": 98336, "threads": 128, "stages": 2, "tile": (64, 32)}
    monkeypatch.setattr(variants["second"], "describe", lambda: facts)
    lines = str(explain_problem(PROBLEM, GPU)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("config"))
    assert lines[start].startswith("config    tile (64, 32), stages 2, threads 128, shared_bytes 98336, element bf")
    rest = list(itertools.takewhile(lambda line: line.startswith(" " * 10), lines[start + 1 :]))
    assert len(rest) > 1 and all(len(line) <= 120 and line[10:].startswith("field_") for line in rest)


def test_build_seconds_are_rounded_and_a_hit_is_named(variants, monkeypatch):
    build = {"registers": 99, "compile_seconds": 1.273439, "from_cache": True}
    monkeypatch.setattr(variants["second"], "report", lambda config, device: build)
    assert "\nbuild     registers 99, compile_seconds 1.27, cached\n" in str(explain_problem(PROBLEM, GPU))
    build["from_cache"] = False
    assert "compile_seconds 1.27\n" in str(explain_problem(PROBLEM, GPU))


def test_a_device_is_called_present_only_when_it_is():
    absent = str(explain_problem(PROBLEM, known_device("sm_90"), variant="numpy"))
    assert "\ndevice    sm_90, as on an NVIDIA H200 (132 SMs, 227 KiB shared memory a block)\n" in absent
    present = str(explain_problem(PROBLEM, replace(known_device("sm_90"), index=2), variant="numpy"))
    assert "\ndevice    cuda:2 NVIDIA H200 (sm_90, 132 SMs, 227 KiB shared memory a block)\n" in present


def test_the_traffic_line_marks_the_variants_own_figure():
    assert re.search(r"flash-2 \S+ kB \(model; numpy follows flash-2\)", str(explain_problem(PROBLEM, CPU)))
    assert "(model)" in str(explain_problem(PROBLEM, CPU, variant="sm80"))


def test_docstring_example():
    module = importlib.import_module("cuflash.explain")
    assert doctest.testmod(module).attempted >= 5
    assert doctest.testmod(module).failed == 0


def test_explain_arrays():
    q, k = np.zeros((2, 5, 4, 16), np.float32)[..., ::2], np.zeros((2, 7, 2, 8), np.float32)
    told = cuflash.explain(q, k, k, causal="top-left", window=(3, None), softcap=2.0)
    assert told.variant == "numpy" and told.device == CPU
    assert list(told.copies) == ["q"] and "stride 2" in told.copies["q"]
    assert (told.problem.softcap, told.problem.diag_upper, told.problem.diag_lower) == (2.0, 0, -1)
    assert "sm80" in told.others
    assert "cannot" not in str(cuflash.explain(k, k, k, variant="numpy"))
    assert cuflash.explain(k, k, k, variant="sm80").variant is None


def test_contiguous_operands():
    operands = contiguous_operands(replace(PROBLEM, batch=1, heads_kv=1, head_dim_v=31))
    assert operands.q == Operand((0, 256, 64), 16)
    assert operands.k == Operand((0, 64, 0), 16)
    assert operands.v == Operand((0, 31, 0), 2)


# ---- the traffic model, counted element by element -------------------------------------------------------------------


def brute(problem, algorithm, tile_m, cache_bytes):
    """Walk the loops of the algorithm for one (batch, head) and count what each step moves."""
    p, total = problem, 0
    row_q, row_k, row_v = p.head_dim * p.itemsize, p.head_dim * p.itemsize, p.head_dim_v * p.itemsize

    def seen(i, j):
        return (p.diag_lower is None or p.diag_lower <= j - i) and (p.diag_upper is None or j - i <= p.diag_upper)

    if algorithm == "flash-1":
        block = max(-(-cache_bytes // (4 * max(p.head_dim, p.head_dim_v) * p.itemsize)), 1)
        total += p.seqlen_q * (row_v + 8)
        for start in range(0, p.seqlen_k, block):
            keys = range(start, min(start + block, p.seqlen_k))
            total += len(keys) * (row_k + row_v)
            for i in range(p.seqlen_q):
                if any(seen(i, j) for j in keys):
                    total += row_q + 2 * (row_v + 8)
    else:
        for start in range(0, p.seqlen_q, tile_m):
            rows = range(start, min(start + tile_m, p.seqlen_q))
            total += len(rows) * (row_q + row_v + 4)
            total += sum(row_k + row_v for j in range(p.seqlen_k) if any(seen(i, j) for i in rows))
    return total * p.batch * p.heads_q


@pytest.mark.parametrize("algorithm", ["flash-1", "flash-2"])
@pytest.mark.parametrize(
    "band", [(None, None), (None, 0), (None, 17), (-3, 4), (5, None), (60, 80), (-90, -70), (3, -3)]
)
@pytest.mark.parametrize("sizes", [(37, 23), (16, 48), (1, 50), (33, 1)])
def test_bytes_by_brute_force(algorithm, band, sizes):
    problem = Problem(2, *sizes, 4, 2, 8, 6, "float16", 1.0, 0.0, *band)
    for tile_m, cache in itertools.product((1, 5, 16, 64), (1, 200, 600)):
        if algorithm == "flash-2" and sizes[1] * 28 <= cache:
            continue
        assert forward_bytes(problem, algorithm, tile_m, cache) == brute(problem, algorithm, tile_m, cache)


def test_bytes_of_the_others():
    p = replace(PROBLEM, heads_kv=4)
    q, k, v, out = 2 * 100 * 4 * 64 * 2, 2 * 300 * 4 * 64 * 2, 2 * 300 * 4 * 32 * 2, 2 * 100 * 4 * 32 * 2
    assert compulsory_bytes(p) == q + k + v + out
    assert forward_bytes(p, "standard", 128, 1) == q + k + v + out + 4 * 2 * 4 * 100 * 300 * 2
    assert forward_bytes(p, "flash-2", 10, 300 * 96 * 2) == q + k + v + out + 2 * 4 * 100 * 4
    assert forward_bytes(p, "flash-2", 10, 300 * 96 * 2 - 1) > 5 * forward_bytes(p, "flash-2", 10, 300 * 96 * 2) / 2


BANDS = [(None, None), (None, 0), (None, -5), (-3, 4), (5, None), (60, 80), (-90, -70), (3, -3)]


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("sizes", [(37, 23), (16, 48), (1, 50), (33, 1), (7, 0), (0, 7), (0, 0)])
def test_no_algorithm_is_below_the_minimum(band, sizes):
    p = Problem(2, *sizes, 4, 2, 8, 6, "float16", 1.0, 0.0, *band)
    i, j = np.mgrid[: sizes[0], : sizes[1]]
    seen = (p.diag_lower is None or j - i >= p.diag_lower) & (p.diag_upper is None or j - i <= p.diag_upper)
    seen = np.broadcast_to(seen, sizes)
    read = 4 * 8 * seen.any(axis=1).sum() + 2 * (8 + 6) * seen.any(axis=0).sum()
    assert compulsory_bytes(p) == 2 * 2 * (read + 4 * 6 * sizes[0])
    for algorithm, tile_m, cache in itertools.product(("standard", "flash-1", "flash-2"), (1, 16), (1, 10**6)):
        moved = forward_bytes(p, algorithm, tile_m, cache)
        assert moved >= compulsory_bytes(p) and (moved == 0) == (sizes[0] == 0)


def test_growth_of_theorem_2():
    """Twice the length makes up to four times the bytes; four times the memory brings flash-1 towards a quarter."""
    long = Problem(1, 8192, 8192, 1, 1, 64, 64, "float16", 0.125)
    longer = replace(long, seqlen_q=16384, seqlen_k=16384)
    for algorithm in ("standard", "flash-1", "flash-2"):
        ratio = forward_bytes(longer, algorithm, 128, 2**15) / forward_bytes(long, algorithm, 128, 2**15)
        assert 3.5 < ratio <= 4
    assert 3 < forward_bytes(longer, "flash-1", 128, 2**15) / forward_bytes(longer, "flash-1", 128, 2**17) < 4


@pytest.mark.parametrize("arguments", [("flash-3", 1, 1), ("flash-1", 0, 1), ("flash-2", 1, 0)])
def test_bytes_refusals(arguments):
    with pytest.raises(ValueError):
        forward_bytes(PROBLEM, *arguments)


# ---- the backward pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_is_explained_with_its_temporary_memory(deterministic):
    problem = BackwardProblem(2, 100, 300, 4, 2, 64, 32, "bfloat16", 0.125, deterministic=deterministic)
    told = explain_problem(problem, GPU, variant="sm80")
    assert told.variant == "sm80"
    rows = 2 * 4 * 128  # a head's 100 rows rounded up
    assert told.config["workspace_bytes"] == 4 * rows * (1 + 64) + (4 * rows // 32 if deterministic else 0)
    assert told.config["launches"][-1] == "sm80_backward_finish"
    assert set(told.hbm_bytes) == {"minimum", "flash-2"}
    assert str(told).startswith("problem   backward, bfloat16")
    json.dumps(told.as_dict())


def test_backward_of_arrays():
    q, k = np.zeros((1, 40, 4, 16), np.float32), np.zeros((1, 50, 2, 16), np.float32)
    told = cuflash.explain(q, k, k, backward=True)
    assert told.variant == "numpy" and told.problem.deterministic is False
    assert told.flops == 5 * 2 * 4 * 40 * 50 * 16
    with pytest.raises(TypeError, match="deterministic='yes' must be True or False"):
        cuflash.explain(q, k, k, backward=True, deterministic="yes")


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("upper", [None, 0])
def test_backward_traffic_by_brute_force(upper, has_dlse):
    """Each read and write of each tile counted one by one."""
    tile, (b, m, n, hq, hkv, d, dv) = 32, (2, 50, 70, 4, 2, 16, 8)
    p = BackwardProblem(b, m, n, hq, hkv, d, dv, "float16", 1.0, diag_upper=upper, has_dlse=has_dlse)
    rows = {  # queries that see some key of a tile
        first: sum(any(upper is None or j <= i + upper for j in range(first, min(first + tile, n))) for i in range(m))
        for first in range(0, n, tile)
    }
    per_head = 0
    for first, seen in rows.items():
        per_head += 2 * (min(tile, n - first) * (d + dv))  # K and V, for each query head
        per_head += seen * (2 * (d + dv) + 4 + 4)  # Q, dO, lse and D
        per_head += seen * 2 * 4 * d  # sums of dQ, read and written
    per_head += 2 * 2 * m * dv + 4 * m + (4 * m if has_dlse else 0)  # O and dO read, D written, dlse read
    per_head += 2 * 4 * m * d + 2 * m * d  # the sums set to zero and read, dQ written
    keys = 2 * n * (d + dv)  # dK and dV of a head
    assert backward_bytes(p, tile)["flash-2"] == b * (hq * per_head + hkv * keys)
    with pytest.raises(ValueError, match="tile_n=0 must be positive"):
        backward_bytes(p, 0)
