"""From arrays to a ready-made plan: everything about a call that can be decided once and reused.

A plan is looked up by the facts of the arrays and the options (:mod:`cuflash.api`); on a hit it only allocates the
outputs and launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from cuflash.arrays import Adapter, numpy_dtype, view_extent
from cuflash.dlpack import row_major
from cuflash.problem import Layout, Options, Problem, canonical_axes, make_problem
from cuflash.select import check_variant, device_of, select
from cuflash.variants.base import DeviceInfo, Launcher, Operand, Operands
from cuflash.view import View

NAMES = ("q", "k", "v")
_ALIGNMENT = 16  # of every fresh allocation, and the most that a kernel can use
_MAX_OVERLAP_WORK = 100_000  # beyond this, arrays count as overlapping


@dataclass(frozen=True, slots=True)
class Call:
    """One checked call: its arrays as views, the Problem, and what the kernel will see.

    Attributes
    ----------
    views : tuple of View
        q, k and v as passed.
    copies : tuple of (str or None)
        For q, k and v, why it is copied first, or None.
    out : View or None
        The caller's output array.
    out_shape, lse_shape : tuple of int
        In the caller's own axes.
    """

    options: Options
    views: tuple[View, View, View]
    copies: tuple[str | None, str | None, str | None]
    out: View | None
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    problem: Problem
    operands: Operands
    device: DeviceInfo


class Plan(Protocol):
    """What is cached: runs the call it was made for on arrays with the same facts."""

    def run(self, q: Any, k: Any, v: Any, out: Any, addresses: tuple[int, int, int, int]) -> Any:
        """Compute; `addresses` are those of q, k, v and out (0 when there is none)."""


def check_call(adapter: Adapter, arrays: Sequence[Any], options: Options, out: Any = None) -> Call:
    """Check the arrays against each other and describe the call; launches nothing.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, its value and the remedy.
    """
    q, k, v = (adapter.view(x, name) for x, name in zip(arrays, NAMES, strict=True))
    for name, view in (("k", k), ("v", v)):
        if view.dtype != q.dtype:
            raise TypeError(f"q is {q.dtype} but {name} is {view.dtype}; cast them to one dtype")
        if place_of(view) != place_of(q):
            raise ValueError(f"q is on {place_of(q)} but {name} is on {place_of(view)}; move them to one device")
    problem = make_problem(q.shape, k.shape, v.shape, q.dtype, options)
    out_shape = (*q.shape[:-1], v.shape[-1])
    out_view = None if out is None else check_result(adapter, "out", out, out_shape, "q with the head_dim of v", q)
    copies = tuple(adapter.copy_reason(x, view) for x, view in zip(arrays, (q, k, v), strict=True))
    q_operand, k_operand, v_operand = (
        fresh_operand(view.shape, problem, options.layout) if why else operand_of(view, problem, options.layout)
        for view, why in zip((q, k, v), copies, strict=True)
    )
    out_operand = (
        fresh_operand(out_shape, problem, options.layout)
        if out_view is None
        else operand_of(out_view, problem, options.layout)
    )
    lse4 = (problem.batch, problem.heads_q, problem.seqlen_q)
    return Call(
        options=options,
        views=(q, k, v),
        copies=(copies[0], copies[1], copies[2]),
        out=out_view,
        out_shape=out_shape,
        lse_shape=lse4[4 - len(q.shape) :],
        problem=problem,
        operands=Operands(q_operand, k_operand, v_operand, out_operand),
        device=device_of(q.device_kind, q.device_index),
    )


def place_of(view: View) -> str:
    """The device of an array in words."""
    return "the CPU" if view.device_kind == "cpu" else f"cuda:{view.device_index}"


def operand_of(view: View, problem: Problem, layout: Layout) -> Operand:
    """Layout of one array as a kernel sees it; strides of axes that are never stepped along become 0."""
    steps = tuple(stride if size > 1 else 0 for size, stride in zip(view.shape, view.strides, strict=True))
    batch, seqlen, heads, _ = canonical_axes("array", steps, layout, missing=0)
    low = (view.pointer | batch * problem.itemsize | seqlen * problem.itemsize | heads * problem.itemsize) % _ALIGNMENT
    return Operand((batch, seqlen, heads), low & -low or _ALIGNMENT)


def fresh_operand(shape: tuple[int, ...], problem: Problem, layout: Layout) -> Operand:
    """Layout of a C-contiguous array that is yet to be allocated."""
    return operand_of(View(0, shape, row_major(shape), problem.dtype, "cpu", 0, False), problem, layout)


def contiguous_operands(problem: Problem) -> Operands:
    """Layouts of C-contiguous bshd arrays, for explaining a Problem that no array has been made for."""
    p = problem
    return Operands(
        *(
            fresh_operand(shape, p, "bshd")
            for shape in (
                (p.batch, p.seqlen_q, p.heads_q, p.head_dim),
                (p.batch, p.seqlen_k, p.heads_kv, p.head_dim),
                (p.batch, p.seqlen_k, p.heads_kv, p.head_dim_v),
                (p.batch, p.seqlen_q, p.heads_q, p.head_dim_v),
            )
        )
    )


def check_like_q(name: str, view: View, shape: tuple[int, ...], source: str, q: View) -> None:
    """Refuse an array that has not the given shape (that of `source`), the dtype of q and its device."""
    if view.shape != shape:
        raise ValueError(f"{name} has shape {view.shape}; it must be {shape} (the shape of {source})")
    if view.dtype != q.dtype:
        raise TypeError(f"q is {q.dtype} but {name} is {view.dtype}; pass {name} in the dtype of q")
    if place_of(view) != place_of(q):
        raise ValueError(f"q is on {place_of(q)} but {name} is on {place_of(view)}; pass {name} on the device of q")


def check_result(adapter: Adapter, name: str, x: Any, shape: tuple[int, ...], source: str, q: View) -> View:
    """Describe the caller's array for a result, refusing one that does not fit or cannot be written."""
    view = adapter.view(x, name)
    check_like_q(name, view, shape, source, q)
    if view.read_only:
        raise ValueError(f"{name} is read-only; pass an array that can be written")
    if reason := adapter.copy_reason(x, view):
        raise ValueError(f"{name} cannot be written in place: {reason}; pass a C-contiguous array")
    if _may_self_overlap(view):
        raise ValueError(f"{name} has strides {view.strides} for shape {shape}: its elements share memory; pass a copy")
    return view


def _may_self_overlap(view: View) -> bool:
    """Whether two elements may share an address: true unless each stride steps over all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted((abs(stride), size) for stride, size in zip(view.strides, view.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


class _Ghost:
    """An array shape at an address, for address arithmetic only: its memory is never touched."""

    def __init__(self, address: int, view: View, itemsize: int) -> None:
        self.__array_interface__ = {
            "shape": view.shape,
            "strides": tuple(stride * itemsize for stride in view.strides),
            "typestr": f"|V{itemsize}",
            "data": (address, True),
            "version": 3,
        }


class OutGuard:
    """Refuses, at each call, results that share memory with an input or each other (addresses are not in the plan).

    Parameters
    ----------
    inputs, outs : mapping of str to View
        By their names in errors.
    """

    def __init__(self, inputs: Mapping[str, View], outs: Mapping[str, View]) -> None:
        self._names = (*inputs, *outs)
        self._inputs = len(inputs)
        # Without the owners: a plan must not keep the arrays of its first call alive.
        self._views = [replace(view, owner=None) for view in (*inputs.values(), *outs.values())]
        self._itemsizes = [numpy_dtype(view.dtype).itemsize for view in self._views]
        self._extents = [view_extent(*pair) for pair in zip(self._views, self._itemsizes, strict=True)]

    def check(self, addresses: Sequence[int]) -> None:
        """`addresses` are those of the inputs, then of the results."""
        spans = [(at + low, at + high) for at, (low, high) in zip(addresses, self._extents, strict=True)]
        for out in range(self._inputs, len(spans)):
            low, high = spans[out]
            for i, (first, last) in enumerate(spans[:out]):
                apart = high <= first or last <= low
                if not apart and first < last and low < high and self._share(i, out, addresses):
                    one, other = self._names[out], self._names[i]
                    why = f"which is read while {one} is written" if i < self._inputs else "which is written too"
                    raise ValueError(f"{one} shares memory with {other}, {why}; pass another")

    def _share(self, i: int, out: int, addresses: Sequence[int]) -> bool:
        """Exact test, for interleaved arrays such as slices of one packed buffer."""
        one, other = (np.asarray(_Ghost(addresses[n], self._views[n], self._itemsizes[n])) for n in (i, out))
        try:
            return np.shares_memory(one, other, max_work=_MAX_OVERLAP_WORK)  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


def make_plan(
    adapter: Adapter, arrays: Sequence[Any], options: Options, variant: str | None, return_lse: bool, out: Any
) -> Plan:
    """Check a call, choose its variant, compile or load the kernel and return the plan.

    Raises
    ------
    ValueError, TypeError, UnsupportedProblem, CompilationError
    """
    check_variant(variant)
    call = check_call(adapter, arrays, options, out)
    if call.problem.is_empty:
        return EmptyPlan(adapter, call, arrays[0], return_lse)
    chosen, config = select(call.problem, call.operands, call.device, variant)
    with adapter.device(call.device.index) if call.device.kind == "cuda" else nullcontext():
        launch = chosen.launcher(call.problem, call.operands, call.device, config)
    if call.device.kind == "cpu":
        return CpuPlan(adapter, call, arrays[0], return_lse, launch)
    if adapter.framework == "JAX":
        return JaxPlan(call, arrays[0], return_lse, launch)
    return CudaPlan(adapter, call, arrays[0], return_lse, launch)


class CopiesInputs:
    """Gives kernels compact copies of the inputs that they cannot read in place."""

    adapter: Adapter
    copies: tuple[bool, ...] | None  # which inputs; None for none of them

    def copied(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self.copies is None:
            return inputs
        return [self.adapter.contiguous(x) if copy else x for x, copy in zip(inputs, self.copies, strict=True)]


class _Outputs(CopiesInputs):
    """How a plan makes its results: allocators that hold no array of the call alive."""

    def __init__(self, adapter: Adapter, call: Call, q: Any, return_lse: bool) -> None:
        problem = call.problem
        self.adapter = adapter
        self.new_out = adapter.allocator(call.out_shape, problem.dtype, q)
        self.new_lse = adapter.allocator(call.lse_shape, problem.lse_dtype, q) if return_lse else None
        inputs = dict(zip(NAMES, call.views, strict=True))
        self.guard = None if call.out is None else OutGuard(inputs, {"out": call.out})
        self.copies = tuple(why is not None for why in call.copies) if any(call.copies) else None


class EmptyPlan(_Outputs):
    """For outputs with no element: nothing to compute."""

    def run(self, q: Any, k: Any, v: Any, out: Any, addresses: tuple[int, int, int, int]) -> Any:
        result = self.adapter.publish(self.new_out(), q) if out is None else out
        return result if self.new_lse is None else (result, self.adapter.publish(self.new_lse(), q))


class CpuPlan(_Outputs):
    """Runs a CPU launcher on NumPy views in bshd order; the memory is the caller's framework's."""

    def __init__(self, adapter: Adapter, call: Call, q: Any, return_lse: bool, launch: Launcher) -> None:
        super().__init__(adapter, call, q, return_lse)
        self.launch = launch
        self.layout = call.options.layout
        self.lse4 = (call.problem.batch, call.problem.heads_q, call.problem.seqlen_q)

    def run(self, q: Any, k: Any, v: Any, out: Any, addresses: tuple[int, int, int, int]) -> Any:
        adapter, layout = self.adapter, self.layout
        if self.guard is not None:
            self.guard.check(addresses)
        inputs = [as_bshd(adapter.to_numpy(x), layout) for x in self.copied((q, k, v))]
        result = self.new_out() if out is None else out
        lse = None if self.new_lse is None else self.new_lse()
        lse4 = None if lse is None else adapter.to_numpy(lse).reshape(self.lse4)
        self.launch(*inputs, as_bshd(adapter.to_numpy(result), layout), lse4)
        if out is None:
            result = adapter.publish(result, q)
        else:
            adapter.wrote(out)
        return result if lse is None else (result, adapter.publish(lse, q))


def as_bshd(x: np.ndarray[Any, Any], layout: Layout) -> np.ndarray[Any, Any]:
    """View of a 2-, 3- or 4-dimensional array as (batch, seqlen, heads, dim)."""
    if x.ndim == 2:
        return x[None, :, None, :]
    if x.ndim == 3:
        x = x[None]
    return x if layout == "bshd" else x.transpose(0, 2, 1, 3)


class CudaPlan(_Outputs):
    """Launches on the framework's current stream of the arrays' device, with outputs from its allocator."""

    def __init__(self, adapter: Adapter, call: Call, q: Any, return_lse: bool, launch: Launcher) -> None:
        super().__init__(adapter, call, q, return_lse)
        self.launch = launch
        self.index = call.device.index
        self.current_device = adapter.current_device
        self.stream = adapter.stream
        self.address = adapter.address

    def run(self, q: Any, k: Any, v: Any, out: Any, addresses: tuple[int, int, int, int]) -> Any:
        if self.current_device() != self.index:
            with self.adapter.device(self.index):
                return self.run(q, k, v, out, addresses)
        at_q, at_k, at_v, at_out = addresses
        result = out
        if out is None:
            result = self.new_out()
            at_out = self.address(result)
        elif self.guard is not None:
            self.guard.check(addresses)
        if self.copies is not None:
            q, k, v = self.copied((q, k, v))  # the names keep the copies alive until the launch is enqueued
            at_q, at_k, at_v = self.address(q), self.address(k), self.address(v)
        if self.new_lse is None:
            self.launch(at_q, at_k, at_v, at_out, 0, self.stream(self.index))
        else:
            lse = self.new_lse()
            self.launch(at_q, at_k, at_v, at_out, self.address(lse), self.stream(self.index))
            result = (result, lse)
        if out is not None:
            self.adapter.wrote(out)
        return result


class JaxPlan:
    """Launches from inside a jitted function: XLA allocates the outputs and gives its own stream."""

    def __init__(self, call: Call, q: Any, return_lse: bool, launch: Launcher) -> None:
        specs = [(call.out_shape, call.problem.dtype)]
        if return_lse:
            specs.append((call.lse_shape, call.problem.lse_dtype))
        from cuflash.arrays_jax import jax_function

        device = next(iter(q.sharding.device_set))
        self.return_lse = return_lse
        self.function = jax_function(launch, specs, device)

    def run(self, q: Any, k: Any, v: Any, out: Any, addresses: tuple[int, int, int, int]) -> Any:
        results = self.function(q, k, v)
        return tuple(results) if self.return_lse else results[0]
