"""What every CUDA variant must stand on a GPU: huge and far-apart arrays, extreme scores, repeats, races, graphs."""

from functools import partial

import numpy as np
import pytest
from backends import Target, assert_same_bits, differing, leave_nan_in_free_memory, on_eight_streams

import cuflash
from cuflash.reference import check_forward

VARIANTS = pytest.mark.parametrize("variant", ["sm80", "sm90"])


def target(variant, framework="torch", dtype="bfloat16"):
    return Target(framework, "cuda", variant, dtype)


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("way", ["grows", "shrinks", "jumps", "differs by row"])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_maxima_that_grow_from_tile_to_tile(variant, dtype, d, way, options):
    """Rows are rescaled again and again, or in some fragments of a warp only; never their neighbours."""
    t, n = target(variant, dtype=dtype), 700
    q, k, v = t.inputs(b=2, m=n, n=n, hq=2, hkv=2, d=d, seed=d)
    place = np.linspace(0, 1, n, dtype=np.float32)[None, :, None, None]
    factor = {
        "grows": 1 + 40 * (1 - place),  # the kernel walks the keys from the last to the first
        "shrinks": 1 + 40 * place,
        "jumps": np.where(place < 0.3, 60, 1),
        "differs by row": np.ones_like(place),
    }[way]
    k = (k.astype(np.float32) * factor).astype(k.dtype)
    if way == "differs by row":
        rows = np.where(np.arange(n) % 7 == 3, 50, 0.1)[None, :, None, None]
        q = (q.astype(np.float32) * rows).astype(q.dtype)
    out, lse, _ = t.check(q, k, v, **options)
    alone, alone_lse = t.attend(q[1:, :, 1:], k[1:, :, 1:], v[1:, :, 1:], **options)
    assert_same_bits(alone, out[1:, :, 1:])
    assert_same_bits(alone_lse, lse[1:, 1:])
    if not options:
        rows_alone, _ = t.attend(q[:, 330:343], k, v)
        assert_same_bits(rows_alone, out[:, 330:343])


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float16", 1e2), ("float16", 6e3), ("float16", 6e4), ("bfloat16", 1e8), ("bfloat16", 1e15), ("bfloat16", 1.2e19)],
)
def test_scores_far_from_zero(variant, dtype, size, d):
    """Each query agrees with one key so much that its output is that key's value and its lse that score."""
    t = target(variant, dtype=dtype)
    _, _, v = t.inputs(m=d, n=d, d=d, dv=d)
    eye = (np.eye(d) * size).astype(v.dtype)[None, :, None, :]
    ordinary = t.inputs(m=d, n=d, d=d, dv=d, seed=1)[0]
    rows = np.arange(d) % 3 == 0
    q = np.where(rows[None, :, None, None], eye, ordinary).astype(v.dtype)
    out, lse = t.attend(q, eye, v, scale=1.0)
    score = float(eye[0, 0, 0, 0]) ** 2
    assert_same_bits(out[:, rows], v[:, rows])
    np.testing.assert_allclose(lse[0, 0, rows], score, rtol=1e-6)


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sequences(variant, dtype):
    t, n = target(variant, "cupy", dtype), 65537
    q, k, v = t.inputs(m=n, n=n, d=16, dv=8)
    rows = np.unique(np.r_[0:16, 63:66, 32767:32770, 65500:65537])
    out, lse = t.attend(q, k, v)
    check_forward(out[:, rows], q[:, rows], k, v, lse=lse[..., rows])
    for options, reach in (({"causal": True}, n), ({"window": (1000, 0)}, 1000)):
        out, lse = t.attend(q, k, v, **options)
        for row in (0, 1000, 32768, 65535, 65536):
            row, keys = slice(row, row + 1), slice(max(0, row - reach), row + 1)
            check_forward(out[:, row], q[:, row], k[:, keys], v[:, keys], lse=lse[..., row])


@pytest.mark.gpu
@VARIANTS
def test_batch_larger_than_a_grid(variant):
    t, b = target(variant), 70000
    q, k, v = t.inputs(b=b, m=1, n=1, hq=2, hkv=1, d=8)
    out, lse = t.attend(q, k, v)
    assert_same_bits(out, np.repeat(v, 2, axis=2))  # one key has weight 1
    some = np.r_[0:8, 65528:65544, 69990:70000]
    check_forward(out[some], q[some], k[some], v[some], lse=lse[some])
    q, k, v = t.inputs(b=b, m=2, n=3, hq=2, hkv=1, d=8)
    out, lse = t.attend(q, k, v, causal=True)
    check_forward(out[some], q[some], k[some], v[some], lse=lse[some], causal=True)
    whole = [t.make(x) for x in (q, k, v)]
    shared = [whole[0], whole[1][:1].expand(b, -1, -1, -1), whole[2][:1].expand(b, -1, -1, -1)]
    got, _ = t.call(*shared)
    check_forward(got[some], q[some], k[[0] * len(some)], v[[0] * len(some)])


@pytest.mark.gpu
@VARIANTS
def test_more_than_2_to_the_31_elements(variant):
    t = target(variant)
    torch = t.kit.torch
    shape = 2, 1024, 16400, 64
    assert np.prod(shape, dtype=np.int64) > 2**31
    try:
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        out, lse = cuflash.attention(q, k, v, variant=variant, causal=True, return_lse=True)
        for b, h in ((0, 0), (0, 16399), (1, 0), (1, 16383), (1, 16399)):
            one = [t.kit.numpy(x[b : b + 1, :, h : h + 1]) for x in (out, q, k, v)]
            check_forward(*one, lse=t.kit.numpy(lse[b : b + 1, h : h + 1]), causal=True)
    finally:
        q = k = v = out = lse = None
        torch.cuda.empty_cache()


@pytest.mark.gpu
@VARIANTS
def test_rows_further_apart_than_2_to_the_31_elements(variant):
    t = target(variant)
    torch = t.kit.torch
    n, step = 33000, 65536
    assert n * step > 2**31
    try:
        buffer = torch.empty((n, step), dtype=torch.bfloat16, device="cuda")
        buffer[:, : 4 * 64] = torch.randn((n, 4 * 64), dtype=torch.bfloat16, device="cuda")
        q, k, v, out = (buffer[None, :, None, 64 * i : 64 * (i + 1)] for i in range(4))
        cuflash.attention(q, k, v, variant=variant, out=out)
        rows = torch.tensor([*range(8), *range(16000, 16008), *range(n - 16, n)], device="cuda")
        some = [t.kit.numpy(x[:, rows].contiguous()) for x in (out, q)]
        check_forward(*some, *(t.kit.numpy(x) for x in (k, v)))
    finally:
        buffer = q = k = v = out = None
        torch.cuda.empty_cache()


REPEATED = [(64, {}), (64, {"causal": True}), (128, {"causal": True}), (256, {}), (256, {"window": (100, 20)})]


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize(("d", "options"), REPEATED, ids=str)
def test_a_thousand_repeats_give_the_same_bits(variant, d, options):
    t = target(variant)
    torch = t.kit.torch
    q, k, v = (t.make(x) for x in t.inputs(b=2, m=700, n=650, hq=8, hkv=2, d=d))
    first, first_lse = cuflash.attention(q, k, v, variant=variant, return_lse=True, **options)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        out, lse = cuflash.attention(q, k, v, variant=variant, return_lse=True, **options)
        differences += differing(out, first) + differing(lse, first_lse)
    assert int(differences) == 0


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize(("d", "options"), REPEATED, ids=str)
def test_memory_traffic_on_another_stream_changes_nothing(variant, d, options):
    t = target(variant)
    torch = t.kit.torch
    q, k, v = (t.make(x) for x in t.inputs(b=4, m=600, n=700, hq=16, hkv=4, d=d))
    quiet = cuflash.attention(q, k, v, variant=variant, **options)
    source = torch.full((1 << 27,), float("nan"), dtype=torch.bfloat16, device="cuda")
    sink, side = torch.empty_like(source), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        with torch.cuda.stream(side):
            sink.copy_(source)
        out = cuflash.attention(q, k, v, variant=variant, **options)
        differences += differing(out, quiet)
    torch.cuda.synchronize()
    assert int(differences) == 0


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize("d", [31, 64, 256])
def test_fresh_memory_full_of_nan(variant, d):
    """Outputs come from memory that held NaN, and every element is written."""
    t = target(variant)
    torch = t.kit.torch
    q, k, v = t.inputs(b=2, m=333, n=222, hq=4, hkv=2, d=d)
    arrays = [t.make(x) for x in (q, k, v)]
    for options in ({}, {"causal": True}):
        torch.cuda.empty_cache()
        leave_nan_in_free_memory(torch)
        out, lse = t.call(*arrays, **options)
        check_forward(out, q, k, v, lse=lse, **options)


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize("d", [64, 128])
def test_launches_on_many_streams_share_nothing(variant, d):
    """Launches that overlap must not take each other's tiles."""
    t = target(variant)
    torch = t.kit.torch
    q, k, v = (t.make(x) for x in t.inputs(b=4, m=1500, n=1500, hq=8, hkv=8, d=d))
    want, want_lse = cuflash.attention(q, k, v, variant=variant, causal=True, return_lse=True)
    attend = partial(cuflash.attention, q, k, v, variant=variant, causal=True, return_lse=True)
    for out, lse in on_eight_streams(torch, 20, attend):
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.gpu
@VARIANTS
def test_a_graph_with_two_branches_replays_beside_eager_calls(variant):
    t = target(variant)
    torch = t.kit.torch
    q, k, v = (t.make(x) for x in t.inputs(b=4, m=1500, n=1500, hq=8, hkv=8, d=64))

    def run():
        return cuflash.attention(q, k, v, variant=variant, causal=True)

    run()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        one = run()
        with torch.cuda.stream(side):
            other = run()
        torch.cuda.current_stream().wait_stream(side)
    for seed in range(5):
        for x, fresh in zip((q, k, v), t.inputs(b=4, m=1500, n=1500, hq=8, hkv=8, d=64, seed=seed), strict=True):
            x.copy_(t.make(fresh))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.replay()
        eager = [run() for _ in range(3)]
        torch.cuda.synchronize()
        for out in (other, *eager):
            assert torch.equal(out, one)
        check_forward(t.kit.numpy(one[:1, :, :1]), *(t.kit.numpy(x[:1, :, :1]) for x in (q, k, v)), causal=True)


@pytest.mark.gpu
@VARIANTS
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_hidden_nan_and_inf_change_no_bit(variant, dtype, d):
    """In K and V, beside the diagonal, beyond the window, in every tile; visible ones reach the rows that see them."""
    t, m, n = target(variant, dtype=dtype), 500, 600
    q, k, v = t.inputs(b=1, m=m, n=n, hq=2, hkv=1, d=d)
    for options in ({"causal": True}, {"window": (90, 30)}):
        clean, clean_lse = t.attend(q, k, v, **options)
        for key, value in ((599, np.nan), (450, np.inf), (300, np.nan), (130, -np.inf)):
            dirty_k, dirty_v = k.copy(), v.copy()
            dirty_k[0, key], dirty_v[0, key] = np.nan, value
            out, lse = t.attend(q, dirty_k, dirty_v, **options)
            positions = np.arange(m) + n - m
            left, right = options.get("window", (n, 0))
            sees = (key >= positions - left) & (key <= positions + right)
            assert_same_bits(out[:, ~sees], clean[:, ~sees], (options, key))
            assert_same_bits(lse[..., ~sees], clean_lse[..., ~sees], (options, key))
            assert np.isnan(out[:, sees].astype(np.float32)).all()
            only_v, _ = t.attend(q, k, dirty_v, **options)
            assert_same_bits(only_v[:, ~sees], clean[:, ~sees], (options, key))
            assert not np.isfinite(only_v[:, sees].astype(np.float32)).any()
