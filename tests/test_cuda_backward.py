"""What the CUDA backward passes must stand on a GPU: huge, long and many arrays, repeats, traffic, graphs, memory."""

import numpy as np
import pytest
from backends import Target, differing, leave_nan_in_free_memory, on_eight_streams

import cuflash
from cuflash.reference import attention_backward_reference, check_backward

pytestmark = pytest.mark.gpu
VARIANTS = pytest.mark.parametrize("variant", ["sm80", "sm90"])
MODES = pytest.mark.parametrize("deterministic", [False, True])


def target(variant, dtype="bfloat16"):
    return Target("torch", "cuda", variant, dtype)


def _part(batch, head, group):
    """Where one batch entry and key/value head stand in an array of queries' rows, and in one of keys'."""
    entry = slice(batch, batch + 1)
    return np.s_[entry, :, head * group : (head + 1) * group], np.s_[entry, :, head : head + 1]


class Pass:
    """Inputs of a backward pass as torch tensors, with the out and lse of the forward pass."""

    def __init__(self, variant, b=1, m=64, n=64, hq=1, hkv=1, d=64, dtype="bfloat16", **options):
        self.target = target(variant, dtype)
        torch, self.options, self.variant = self.target.kit.torch, options, variant
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        shapes = (b, m, hq, d), (b, m, hq, d), (b, n, hkv, d), (b, n, hkv, d)
        self.dout, self.q, self.k, self.v = (torch.randn(shape, device="cuda", dtype=kind) for shape in shapes)
        self.out, self.lse = cuflash.attention(self.q, self.k, self.v, variant=variant, return_lse=True, **self.options)

    @property
    def inputs(self):
        return self.dout, self.q, self.k, self.v, self.out, self.lse

    def run(self, *inputs, **how):
        inputs = inputs or self.inputs
        return cuflash.attention_backward(*inputs, variant=self.variant, **self.options, **how)

    def part(self, batch, head, group=1):
        """Inputs of one batch entry and key/value head, with its query heads."""
        queries, keys = _part(batch, head, group)
        lse = self.lse[queries[0], queries[2]]
        return self.dout[queries], self.q[queries], self.k[keys], self.v[keys], self.out[queries], lse

    def check(self, grads, batch, head, group=1):
        """Hold the gradients of one batch entry and key/value head to the error rule."""
        numpy = self.target.kit.numpy
        queries, keys = _part(batch, head, group)
        mine = [x[at] for x, at in zip(grads, (queries, keys, keys), strict=True)]
        inputs = [numpy(x.contiguous()) for x in self.part(batch, head, group)]
        check_backward([numpy(x.contiguous()) for x in mine], *inputs, **self.options)


@VARIANTS
@MODES
def test_batch_of_300_with_2048_tokens(variant, deterministic):
    case = Pass(variant, b=300, m=2048, n=2048, d=128, causal=True)
    grads = case.run(deterministic=deterministic)
    for batch in (0, 150, 299):
        case.check(grads, batch, 0)
    if deterministic:
        alone = case.run(*case.part(299, 0), deterministic=True)
        for x, y in zip(alone, grads, strict=True):
            assert int(differing(x, y[299:])) == 0


@VARIANTS
@MODES
def test_batch_larger_than_a_grid(variant, deterministic):
    case = Pass(variant, b=70_000, m=3, n=4, hq=2, d=8, causal=True)
    grads = case.run(deterministic=deterministic)
    for batch in (0, 9_999, 10_240, 65_534, 65_535, 65_536, 69_999):
        case.check(grads, batch, 0, group=2)


@VARIANTS
@MODES
def test_lengths_of_65537(variant, deterministic):
    n, reach, count = 65537, 200, 1000
    case = Pass(variant, m=n, n=n, d=16, window=(reach, 0))
    numpy = case.target.kit.numpy
    grads = [numpy(x) for x in case.run(deterministic=deterministic)]
    inputs = [numpy(x) for x in (case.dout, case.q, case.k, case.v)]
    for first in (0, 32_700, n - count):
        part = slice(first, first + count)
        exact = attention_backward_reference(*(x[:, part] for x in inputs), window=(reach, 0))
        # Rows that see all their keys in this part, and keys whose rows are such.
        start, stop = reach if first else 0, count if first + count == n else count - reach
        for got, want, last in zip(grads, exact, (count, stop, stop), strict=True):
            got, want = (x[:, start:last].astype(np.float64) for x in (got[:, part], want))
            np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)


@VARIANTS
@MODES
def test_more_than_2_to_the_31_elements(variant, deterministic):
    torch = target(variant).kit.torch
    try:
        case = Pass(variant, b=2, m=1024, n=1024, hq=16_400, hkv=16_400, causal=True)
        assert case.q.numel() > 2**31
        grads = case.run(deterministic=deterministic)
        for batch, head in ((0, 0), (0, 16_399), (1, 0), (1, 16_383), (1, 16_399)):
            case.check(grads, batch, head)
    finally:
        case = grads = None
        torch.cuda.empty_cache()


@VARIANTS
@pytest.mark.parametrize("d", [64, 128, 256])
def test_rows_further_apart_than_2_to_the_31_bytes(variant, d):
    torch = target(variant).kit.torch
    n, step = 1100, 1 << 21
    assert (n - 1) * step > 2**31
    try:
        buffer = torch.empty((n, step), dtype=torch.bfloat16, device="cuda")
        apart = [buffer[None, :, None, d * i : d * (i + 1)] for i in range(7)]
        case = Pass(variant, m=n, n=n, d=d, causal=True)
        for far, near in zip(apart, (case.dout, case.q, case.k, case.v), strict=False):
            far.copy_(near)
        want = case.run(deterministic=True)
        grads = case.run(*apart[:4], case.out, case.lse, deterministic=True, grads=tuple(apart[4:]))
        for x, y in zip(grads, want, strict=True):
            assert int(differing(x.contiguous(), y)) == 0
    finally:
        buffer = apart = case = grads = want = None
        torch.cuda.empty_cache()


REPEATED = [(64, {}), (64, {"causal": True}), (128, {"causal": True}), (128, {}), (256, {"window": (100, 20)})]


@VARIANTS
@pytest.mark.parametrize("traffic", [False, True])
@pytest.mark.parametrize(("d", "options"), REPEATED, ids=str)
def test_a_thousand_deterministic_repeats_give_the_same_bits(variant, d, options, traffic):
    case = Pass(variant, b=2, m=700, n=650, hq=8, hkv=2, d=d, **options)
    torch = case.target.kit.torch
    first = case.run(deterministic=True)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    source = torch.full((1 << 26,), float("nan"), dtype=torch.bfloat16, device="cuda")
    sink, side = torch.empty_like(source), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(1000):
        if traffic:
            with torch.cuda.stream(side):
                sink.copy_(source)
        for got, want in zip(case.run(deterministic=True), first, strict=True):
            differences += differing(got, want)
    torch.cuda.synchronize()
    assert int(differences) == 0
    for entry in range(2):  # and whatever the batch
        alone = case.run(*(x[entry : entry + 1] for x in case.inputs), deterministic=True)
        for got, want in zip(alone, first, strict=True):
            assert int(differing(got, want[entry : entry + 1])) == 0
    case.check(first, 1, 1, group=4)


@VARIANTS
@MODES
def test_traffic_and_other_streams_change_no_value(variant, deterministic):
    """Calls that overlap have workspaces of their own."""
    case = Pass(variant, b=2, m=1500, n=1500, hq=4, hkv=4, d=64, causal=True)
    torch = case.target.kit.torch
    case.run(deterministic=deterministic)
    results = on_eight_streams(torch, 5, lambda: case.run(deterministic=deterministic))
    case.check(results[0], 0, 0)
    for grads in results:
        for got, want in zip(grads, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0 if deterministic else 0.02, atol=0 if deterministic else 0.02)


@VARIANTS
@MODES
def test_a_graph_replays_with_new_contents(variant, deterministic):
    case = Pass(variant, b=2, m=300, n=400, hq=4, hkv=2, d=64, causal=True)
    torch = case.target.kit.torch
    case.run(deterministic=deterministic)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = case.run(deterministic=deterministic)
    for seed in range(3):
        torch.manual_seed(seed)
        for x in (case.dout, case.q, case.k, case.v):
            x.copy_(torch.randn_like(x))
        out, lse = cuflash.attention(case.q, case.k, case.v, variant=variant, causal=True, return_lse=True)
        case.out.copy_(out)
        case.lse.copy_(lse)
        graph.replay()
        torch.cuda.synchronize()
        case.check(grads, 0, 0, group=2)
        case.check(grads, 1, 1, group=2)


@VARIANTS
@MODES
@pytest.mark.parametrize("d", [31, 64, 128, 256])
def test_fresh_memory_full_of_nan(variant, d, deterministic):
    """Results and workspace come from memory that held NaN."""
    if variant == "sm90" and d % 8:
        pytest.skip("by design: TMA reads rows that are 16 bytes apart")
    case = Pass(variant, b=2, m=333, n=222, hq=4, hkv=2, d=d)
    torch = case.target.kit.torch
    torch.cuda.empty_cache()
    leave_nan_in_free_memory(torch)
    grads = case.run(deterministic=deterministic)
    for batch in range(2):
        case.check(grads, batch, 0, group=2)


@VARIANTS
@MODES
def test_memory_at_65536_tokens(variant, deterministic):
    """Never more than FlashAttention-2: dq and its row sums in float32, rows rounded up to 128; or on sm90
    FlashAttention-3, which has a second number for each row."""
    n, h, d = 65536, 2, 64
    case = Pass(variant, m=n, n=n, hq=h, hkv=h, d=d)
    torch = case.target.kit.torch
    case.run(deterministic=deterministic)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = case.run(deterministic=deterministic)
    torch.cuda.synchronize()
    temporary = torch.cuda.max_memory_allocated() - before - sum(x.numel() * x.element_size() for x in grads)
    flash = 4 * h * n * d + 4 * h * n * (2 if variant == "sm90" else 1)
    assert temporary <= flash + (1 << 20) < n * n // 100
    stated = cuflash.explain(*case.inputs[1:4], variant=variant, backward=True, deterministic=deterministic)
    assert temporary <= stated.config["workspace_bytes"] + (1 << 20)
