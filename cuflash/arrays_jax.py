"""JAX arrays: how to look at them, and how to launch a CUDA kernel on XLA's buffers and stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from cuflash.arrays import Adapter, check_dtype, numpy_dtype
from cuflash.dlpack import device_of, foreign_device, from_dlpack_capsule, row_major
from cuflash.variants.base import Launcher
from cuflash.view import View

ALIGNMENT = 16  # bytes that plans take for granted of XLA's buffers; its allocators give 64 and more


class JaxAdapter(Adapter):
    """JAX arrays. XLA may hold one in any axis order but hands it to kernels in row-major order, so views say that."""

    framework = "JAX"
    immutable = True

    def __init__(self, jax: Any) -> None:
        self._jax = jax

    def facts(self, x: Any, name: str) -> tuple[int, Hashable]:
        if x.is_deleted():
            raise ValueError(f"{name} is a JAX array that was deleted or donated; pass one that is still alive")
        return 0, (x.shape, x.dtype, x.sharding)

    def view(self, x: Any, name: str) -> View:
        check_dtype(name, str(x.dtype))
        devices = x.sharding.device_set
        if len(devices) > 1:
            raise ValueError(
                f"{name} is sharded over {len(devices)} devices; call cuflash.attention on the shards, "
                f"or gather it with jax.device_put({name}, device)"
            )
        platform = next(iter(devices)).platform
        if platform not in ("cpu", "gpu", "cuda", "rocm"):
            raise foreign_device(name, platform)
        kind, index = device_of(x, name)
        if platform != "cpu" and x.sharding.memory_kind not in (None, "device"):
            raise ValueError(f"{name} is in JAX memory {x.sharding.memory_kind!r}; move it to 'device' memory")
        shape = tuple(x.shape)
        return View(x.unsafe_buffer_pointer(), shape, row_major(shape), str(x.dtype), kind, index, True, x)

    def contiguous(self, x: Any) -> Any:
        return x

    def allocator(self, shape: tuple[int, ...], dtype: str, like: Any) -> Callable[[], Any]:
        return partial(np.empty, shape, numpy_dtype(dtype))  # filled on the host, then published

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        array = np.asarray(x)
        itemsize = array.dtype.itemsize
        if array.ndim and array.shape[-1] > 1 and array.strides[-1] != itemsize:  # an axis order other than row-major
            return np.ascontiguousarray(array)
        return array

    def publish(self, x: Any, like: Any) -> Any:
        device = next(iter(like.sharding.device_set))
        if x.dtype != np.float64:
            return self._jax.device_put(x, device)
        # float64 inputs can outlive the scope that allowed 64-bit types; the result must not be rounded.
        with self._enable_x64():
            return self._jax.device_put(x, device)

    def _enable_x64(self) -> AbstractContextManager[Any]:
        scope: AbstractContextManager[Any]
        if hasattr(self._jax, "enable_x64"):
            scope = self._jax.enable_x64(True)
        else:
            from jax.experimental import enable_x64

            scope = enable_x64()
        return scope

    def device(self, device_index: int) -> AbstractContextManager[Any]:
        import cupy

        device: AbstractContextManager[Any] = cupy.cuda.Device(device_index)
        return device

    def current_device(self) -> int:
        return -1  # JAX has no notion of it: always select


def jax_function(
    launch: Launcher, specs: Sequence[tuple[tuple[int, ...], str]], device: Any
) -> Callable[[Any, Any, Any], list[Any]]:
    """A jitted function of (q, k, v) that runs a CUDA launcher on XLA's buffers.

    Parameters
    ----------
    launch : callable
        Takes the addresses of q, k, v, out and lse (0 for none) and the stream.
    specs : sequence of (shape, dtype name)
        Of out, and of lse when it is wanted.
    device : jax.Device
        Where the inputs are; inputs and outputs are pinned to it, since JAX may otherwise move uncommitted arrays.
    """
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    def on_buffers(context: Any, outputs: list[Any], *inputs: Any) -> None:
        # A CPU context has no stream: it occurs only where a test runs this route without a GPU.
        views = [from_dlpack_capsule(buffer, name="buffer") for buffer in (*inputs, *outputs)]
        if any(view.pointer % ALIGNMENT for view in views):
            raise RuntimeError(f"XLA gave buffers that are not aligned to {ALIGNMENT} bytes: {views}")
        q, k, v, out, lse = [view.pointer for view in views] + [0] * (5 - len(views))
        if views[0].device_kind == "cpu":
            launch(q, k, v, out, lse, 0)
            return
        import cupy

        with cupy.cuda.Device(views[0].device_index):  # XLA calls from a thread of its own
            launch(q, k, v, out, lse, context.stream)

    with jax.default_device(device):
        shapes = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in specs]
        on_device = jax.sharding.SingleDeviceSharding(device)
        function: Callable[[Any, Any, Any], list[Any]] = jax.jit(
            buffer_callback(on_buffers, shapes), in_shardings=on_device, out_shardings=on_device
        )
        return function
