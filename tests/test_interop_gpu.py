"""Arrays of every framework on a GPU: the same bits, on the caller's stream, in its memory, without waiting."""

import gc

import numpy as np
import pytest
from backends import Foreign, Target, assert_same_bits

import cuflash
from cuflash.reference import check_forward

pytestmark = pytest.mark.gpu

OPTIONS = {"causal": True, "window": (200, None)}


def target(framework, dtype="bfloat16"):
    """Whatever variant is chosen for it."""
    return Target(framework, "cuda", None, dtype)


@pytest.fixture
def torch():
    return target("torch").kit.torch


@pytest.fixture
def cupy():
    return target("cupy").kit.xp


def inputs(dtype="bfloat16", seed=0):
    return target("torch", dtype).inputs(b=2, m=300, n=333, hq=4, hkv=2, d=64, seed=seed)


def sleep(torch, cycles=200_000_000):
    """Keep the current stream busy for a tenth of a second or more."""
    torch.cuda._sleep(cycles)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_same_bits_from_every_framework(framework, dtype):
    q, k, v = inputs(dtype)
    out, lse, _ = target("cupy", dtype).check(q, k, v, **OPTIONS)
    other = target(framework, dtype)
    got, got_lse = other.attend(q, k, v, **OPTIONS)
    assert_same_bits(got, out)
    assert_same_bits(got_lse, lse)


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_bare_dlpack(framework, cupy):
    t = target(framework, "float16")  # CuPy and others need not export bfloat16
    q, k, v = inputs("float16")
    want, want_lse = t.attend(q, k, v, **OPTIONS)
    foreign = [Foreign(t.make(x)) for x in (q, k, v)]
    out, lse = cuflash.attention(*foreign, return_lse=True, **OPTIONS)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    kit = target("cupy").kit
    assert_same_bits(kit.numpy(out), want)
    assert_same_bits(kit.numpy(lse), want_lse)
    mine = t.make(np.full(want.shape, np.nan, want.dtype))
    wrapped = Foreign(mine)
    assert cuflash.attention(*foreign, out=wrapped, **OPTIONS) is wrapped
    cupy.cuda.runtime.deviceSynchronize()
    assert_same_bits(t.kit.numpy(mine), want)


def test_bare_dlpack_of_bfloat16(cupy):
    t = target("torch")
    q, k, v = inputs()
    want, _ = t.attend(q, k, v, **OPTIONS)
    out = cuflash.attention(*(Foreign(t.make(x)) for x in (q, k, v)), **OPTIONS)
    assert out.dtype.name == "bfloat16"
    assert_same_bits(target("cupy").kit.numpy(out), want)


def test_expanded_tensors(torch):
    t = target("torch")
    q, k, v = inputs()
    k, v = k[:1, :, :1], v[:1, :, :1]
    want, _ = t.attend(q, np.repeat(np.repeat(k, 2, 0), 4, 2), np.repeat(np.repeat(v, 2, 0), 4, 2), **OPTIONS)
    expanded = [t.make(x).expand(2, -1, 4, -1) for x in (k, v)]
    gc.collect()  # tensors of earlier tests that are freed in between would count
    before = torch.cuda.memory_allocated()
    out = cuflash.attention(t.make(q), *expanded, **OPTIONS)
    # q itself is freed again: nothing but the output is left, and no copy of k or v was made on the way.
    assert torch.cuda.memory_allocated() - before == out.untyped_storage().nbytes()
    assert_same_bits(t.kit.numpy(out), want)


def test_jax_arrays_stay_on_the_gpu():
    t = target("jax")
    q, k, v = inputs()
    arrays = [t.make(x) for x in (q, k, v)]
    out, lse = cuflash.attention(*arrays, return_lse=True, **OPTIONS)
    assert out.devices() == lse.devices() == arrays[0].devices()
    assert out.dtype == "bfloat16" and lse.dtype == "float32"
    check_forward(np.asarray(out), q, k, v, lse=np.asarray(lse), **OPTIONS)
    # Work before and after, enqueued without waiting.
    doubled = cuflash.attention(arrays[0] * 2, *arrays[1:], scale=0.0625, **OPTIONS) * 1
    assert_same_bits(np.asarray(doubled), np.asarray(cuflash.attention(*arrays, scale=0.125, **OPTIONS)))


def test_gradients_are_refused():
    t = target("torch")
    q, k, v = (t.make(x) for x in inputs())
    q.requires_grad_()
    with pytest.raises(ValueError, match=r"q requires gradients, .* torch\.no_grad\(\) or pass q\.detach\(\)"):
        cuflash.attention(q, k, v)
    with t.kit.torch.no_grad():
        out = cuflash.attention(q, k, v)
    assert_same_bits(t.kit.numpy(out), t.kit.numpy(cuflash.attention(q.detach(), k, v)))


def test_negative_bit(torch):
    t = target("torch")
    q, k, v = (t.make(x) for x in inputs("float16"))
    minus = torch._neg_view(q)
    assert minus.is_neg()
    got = cuflash.attention(minus, k, v, **OPTIONS)
    assert_same_bits(t.kit.numpy(got), t.kit.numpy(cuflash.attention(-q, k, v, **OPTIONS)))


# ---- streams, graphs, devices ----------------------------------------------------------------------------------------


def test_torch_side_stream(torch):
    t = target("torch")
    q, k, v = (t.make(x) for x in inputs())
    want = t.kit.numpy(cuflash.attention(q, k, v, **OPTIONS))
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        sleep(torch)
        late.copy_(q)  # anything that runs on another stream reads zeros
        out = cuflash.attention(late, k, v, **OPTIONS)
        copy = out.clone()
    stream.synchronize()
    assert_same_bits(t.kit.numpy(copy), want)
    assert_same_bits(t.kit.numpy(out), want)


def test_cupy_side_stream(torch, cupy):
    t = target("cupy")
    q, k, v = (t.make(x) for x in inputs())
    want = t.kit.numpy(cuflash.attention(q, k, v, **OPTIONS))
    raw = q.view(np.uint16)
    late = cupy.zeros_like(raw)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            sleep(torch)
        late[...] = raw
        out = cuflash.attention(late.view(q.dtype), k, v, **OPTIONS)
        copy = out.view(np.uint16).copy()
    stream.synchronize()
    assert_same_bits(t.kit.numpy(copy.view(q.dtype)), want)


def test_dlpack_producer_on_a_side_stream(torch, cupy):
    """The consumer's stream is given to the producer, which makes it wait for its own."""
    t = target("torch", "float16")
    q, k, v = (t.make(x) for x in inputs("float16"))
    want = t.kit.numpy(cuflash.attention(q, k, v, **OPTIONS))
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        sleep(torch)
        late.copy_(q)
        out = cuflash.attention(Foreign(late), Foreign(k), Foreign(v), **OPTIONS)
    cupy.cuda.get_current_stream().synchronize()
    assert_same_bits(target("cupy").kit.numpy(out), want)


@pytest.mark.parametrize("framework", ["torch", "cupy"])
def test_the_host_does_not_wait(framework, torch, cupy):
    t = target(framework)
    q, k, v = (t.make(x) for x in inputs())
    want = t.kit.numpy(cuflash.attention(q, k, v, **OPTIONS))
    stream = torch.cuda.Stream()
    busy = torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        warm = cuflash.attention(q, k, v, **OPTIONS)  # with the allocators' blocks of this stream in hand
        stream.synchronize()
        del warm
        sleep(torch, 1_000_000_000)
        busy.record()
        out = cuflash.attention(q, k, v, **OPTIONS)
        waited = busy.query()
    stream.synchronize()
    assert not waited, "the call returned only after the work queued before it"
    assert_same_bits(t.kit.numpy(out), want)


@pytest.mark.parametrize("with_out", [False, True])
def test_torch_graph(torch, with_out):
    t = target("torch")
    q, k, v = (t.make(x) for x in inputs())
    result = torch.empty_like(q)
    options = {**OPTIONS, "out": result} if with_out else OPTIONS
    cuflash.attention(q, k, v, return_lse=True, **options)  # capturable after the first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    for seed in (1, 2):
        new = inputs(seed=seed)
        for old, x in zip((q, k, v), new, strict=True):
            old.copy_(t.make(x))
        graph.replay()
        torch.cuda.synchronize()
        want, want_lse = t.attend(*new, **OPTIONS)
        assert_same_bits(t.kit.numpy(out), want)
        assert_same_bits(t.kit.numpy(lse), want_lse)
        check_forward(want, *new, lse=want_lse, **OPTIONS)


def test_cupy_graph(cupy):
    t = target("cupy")
    q, k, v = (t.make(x) for x in inputs())
    out = t.make(np.zeros((2, 300, 4, 64), q.dtype))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        cuflash.attention(q, k, v, out=out, **OPTIONS)
        stream.synchronize()
        stream.begin_capture()
        cuflash.attention(q, k, v, out=out, **OPTIONS)
        graph = stream.end_capture()
    new = inputs(seed=1)
    for old, x in zip((q, k, v), new, strict=True):
        old.view(np.uint16)[...] = t.make(x).view(np.uint16)
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    assert_same_bits(t.kit.numpy(out), t.attend(*new, **OPTIONS)[0])


def two_devices(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


def test_arrays_decide_the_device(torch, cupy):
    two_devices(cupy)
    t = target("torch")
    arrays = [t.make(x) for x in inputs()]
    want = t.kit.numpy(cuflash.attention(*arrays, **OPTIONS))
    there = [x.to("cuda:1") for x in arrays]
    assert torch.cuda.current_device() == 0
    out = cuflash.attention(*there, **OPTIONS)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert_same_bits(t.kit.numpy(out), want)
    with cupy.cuda.Device(1):
        one = [target("cupy").make(x) for x in inputs()]
    out = cuflash.attention(*one, **OPTIONS)
    assert out.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
    assert_same_bits(target("cupy").kit.numpy(out), want)
    with pytest.raises(ValueError, match=r"q is on cuda:0 but k is on cuda:1; move them to one device"):
        cuflash.attention(arrays[0], *there[1:])


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_outputs_come_from_torch_and_nothing_else_does(torch, cupy):
    t = target("torch")
    q, k, v = (t.make(x) for x in inputs())
    cuflash.attention(q, k, v, return_lse=True, **OPTIONS)
    pool = cupy.get_default_memory_pool().used_bytes()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = cuflash.attention(q, k, v, return_lse=True, **OPTIONS)

    def block(x):
        return -(-x.numel() * x.element_size() // 512) * 512  # the allocator's rounding

    assert torch.cuda.memory_allocated() - before == block(out) + block(lse)
    assert torch.cuda.max_memory_allocated() - before == block(out) + block(lse)
    assert cupy.get_default_memory_pool().used_bytes() == pool
    before = torch.cuda.memory_allocated()
    cuflash.attention(q, k, v, out=out, **OPTIONS)
    assert torch.cuda.memory_allocated() == before


def test_outputs_come_from_cupy(cupy):
    t = target("cupy")
    q, k, v = (t.make(x) for x in inputs())
    cuflash.attention(q, k, v, **OPTIONS)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    out = cuflash.attention(q, k, v, **OPTIONS)
    assert pool.used_bytes() - before == -(-out.nbytes // 512) * 512


def test_copies_of_strided_inputs_are_freed(torch):
    t = target("torch")
    q, k, v = (t.make(x) for x in inputs())
    want = t.kit.numpy(cuflash.attention(q, k, v, **OPTIONS))
    strided = q.transpose(1, 3).contiguous().transpose(1, 3)
    assert strided.stride(3) != 1
    before = torch.cuda.memory_allocated()
    out = cuflash.attention(strided, k, v, **OPTIONS)
    assert torch.cuda.memory_allocated() - before == out.untyped_storage().nbytes()
    assert_same_bits(t.kit.numpy(out), want)


def test_plans_do_not_keep_memory(torch):
    t = target("torch")
    arrays = [t.make(x) for x in inputs()]
    cuflash.attention(*arrays, **OPTIONS)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seed in range(4):
        more = [t.make(x) for x in inputs(seed=seed)]
        cuflash.attention(*more, return_lse=True, scale=0.1 + seed, **OPTIONS)
        del more
    assert torch.cuda.memory_allocated() == before
