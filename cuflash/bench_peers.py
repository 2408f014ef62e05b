"""The implementations that the bench times: our variants, torch, JAX and two-pass attention."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuflash
from cuflash import select
from cuflash.arrays import numpy_dtype
from cuflash.measure import Array, Place, two_pass_attention

Call = Callable[[], Any]


@dataclass(frozen=True)
class Runner:
    """One implementation.

    Attributes
    ----------
    name : str
    ours : bool
    prepare : callable
        ``prepare(q, k, v, causal)`` takes NumPy arrays (batch, seqlen, heads, dim) and returns a function of nothing.
    to_numpy : callable
        Turns a result into a NumPy array of the same layout.
    seconds : callable
        ``seconds(call, calls)`` is the time of one call.
    context : callable
        Makes the context manager in which calls are made.
    quadratic : bool
        Whether it holds all scores in memory.
    """

    name: str
    ours: bool
    prepare: Callable[[Array, Array, Array, bool], Call]
    to_numpy: Callable[[Any], Array]
    seconds: Callable[[Call, int], float]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    quadratic: bool = False


def runners(place: Place) -> list[Runner]:
    """All that can run at a place, ours first."""
    torch = _import_torch(place)
    found = list(_ours(place, torch))
    found.append(_plain(place, "two-pass", lambda q, k, v, c: lambda: two_pass_attention(place.xp, q, k, v, causal=c)))
    if torch is not None:
        found += _torch_peers(torch, place)
    found += _jax_peers(place)
    return found


def _import_torch(place: Place) -> Any:
    """The torch module when it is installed and can compute at the place."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch if not place.gpu or torch.cuda.is_available() else None


def _plain(place: Place, name: str, attend: Callable[[Any, Any, Any, bool], Call]) -> Runner:
    def prepare(q: Array, k: Array, v: Array, causal: bool) -> Call:
        return attend(place.put(q), place.put(k), place.put(v), causal)

    return Runner(name, False, prepare, place.get, place.seconds, quadratic=True)


def _ours(place: Place, torch: Any) -> Iterator[Runner]:
    """Each variant of the place's kind of device; on a GPU from torch tensors where there is torch."""
    by_torch = place.gpu and torch is not None
    for variant, entry in select.REGISTRY.items():
        if entry.device_kind != ("cuda" if place.gpu else "cpu"):
            continue

        def prepare(q: Array, k: Array, v: Array, causal: bool, variant: str = variant) -> Call:
            arrays = [_to_torch(torch, x, place) if by_torch else place.put(x) for x in (q, k, v)]
            return lambda: cuflash.attention(*arrays, causal=causal, variant=variant)

        if by_torch:
            yield Runner(f"cuflash {variant}", True, prepare, _from_torch(torch), _torch_clock(torch))
        else:
            yield Runner(f"cuflash {variant}", True, prepare, place.get, place.seconds)


def _to_torch(torch: Any, x: Array, place: Place) -> Any:
    tensor = torch.from_numpy(x.view(np.int16)).view(getattr(torch, x.dtype.name)) if x.itemsize == 2 else None
    tensor = torch.from_numpy(x) if tensor is None else tensor
    return tensor.to("cuda") if place.gpu else tensor


def _from_torch(torch: Any, heads_first: bool = False) -> Callable[[Any], Array]:
    def to_numpy(x: Any) -> Array:
        x = (x.transpose(1, 2) if heads_first else x).contiguous()
        if x.element_size() != 2:
            return np.asarray(x.cpu())
        bits: Array = x.view(torch.int16).cpu().numpy()
        return bits.view(numpy_dtype(str(x.dtype).removeprefix("torch.")))

    return to_numpy


def _torch_clock(torch: Any) -> Callable[[Call, int], float]:
    def seconds(call: Call, calls: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3 / calls

    return seconds


def _torch_peers(torch: Any, place: Place) -> Iterator[Runner]:
    """scaled_dot_product_attention with each backend alone."""
    from torch.nn import attention

    attend = torch.nn.functional.scaled_dot_product_attention
    backends = attention.SDPBackend
    named = {"flash": backends.FLASH_ATTENTION, "math": backends.MATH}
    if place.gpu:
        named |= {"cudnn": backends.CUDNN_ATTENTION, "efficient": backends.EFFICIENT_ATTENTION}

    def prepare(q: Array, k: Array, v: Array, causal: bool) -> Call:
        tensors = [_to_torch(torch, x, place).transpose(1, 2) for x in (q, k, v)]
        return lambda: attend(*tensors, is_causal=causal)

    for name, backend in sorted(named.items()):

        def only(backend: Any = backend) -> AbstractContextManager[Any]:
            restricted: AbstractContextManager[Any] = attention.sdpa_kernel(backend)
            return restricted

        yield Runner(
            f"torch {name}",
            False,
            prepare,
            _from_torch(torch, heads_first=True),
            _torch_clock(torch) if place.gpu else place.seconds,
            only,
            quadratic=name == "math",
        )


def _jax_peers(place: Place) -> Iterator[Runner]:
    """jax.nn.dot_product_attention, timed on the host around calls that are waited for together."""
    if importlib.util.find_spec("jax") is None:
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the GPU's memory to the others
    import jax

    try:
        device = jax.devices("cuda" if place.gpu else "cpu")[0]
    except RuntimeError:  # a JAX without CUDA
        return

    def seconds(call: Call, calls: int) -> float:
        started = time.perf_counter()
        result = None
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / calls

    for implementation in ("cudnn", "xla") if place.gpu else ("xla",):

        def prepare(q: Array, k: Array, v: Array, causal: bool, implementation: str = implementation) -> Call:
            arrays = [jax.device_put(x, device) for x in (q, k, v)]

            def attend(q: Any, k: Any, v: Any) -> Any:
                return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)

            jitted = jax.jit(attend)
            return lambda: jitted(*arrays)

        yield Runner(f"jax {implementation}", False, prepare, np.asarray, seconds, quadratic=implementation == "xla")
