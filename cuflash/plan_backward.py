"""From the arrays of a backward call to a ready-made plan; the counterpart of :mod:`cuflash.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from cuflash.arrays import Adapter
from cuflash.dlpack import row_major
from cuflash.errors import UnsupportedProblem
from cuflash.plan import (
    NAMES,
    CopiesInputs,
    OutGuard,
    as_bshd,
    check_call,
    check_like_q,
    check_result,
    contiguous_operands,
    fresh_operand,
    operand_of,
    place_of,
)
from cuflash.problem import BackwardProblem, Options, Problem
from cuflash.select import check_variant, operation_of, select
from cuflash.variants.base import BackwardOperands, DeviceInfo, Launcher, Operands
from cuflash.view import View

INPUTS = ("dout", "q", "k", "v", "out", "lse", "dlse")
GRADS = ("dq", "dk", "dv")
_ROWS = ("lse", "dlse")  # these have a shape and dtype of their own
_WORKSPACE_ITEM = 4  # workspaces are allocated as float32


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """One checked call: its arrays as views, the Problem, and what the kernel will see.

    Attributes
    ----------
    views : dict of str to View
        The inputs as passed, by name, without dlse when there is none.
    copies : dict of str to str
        The inputs that are copied first, each with the reason.
    grads : dict of str to View, or None
        The caller's arrays for the results.
    """

    options: Options
    views: dict[str, View]
    copies: dict[str, str]
    grads: dict[str, View] | None
    problem: BackwardProblem
    operands: BackwardOperands
    device: DeviceInfo


def contiguous_layouts(problem: Problem) -> Operands | BackwardOperands:
    """Layouts of C-contiguous bshd arrays of a Problem of either operation, as :func:`contiguous_operands`."""
    o = contiguous_operands(problem)
    return o if operation_of(problem) == "forward" else BackwardOperands(o.out, o.q, o.k, o.v, o.out, o.q, o.k, o.v)


class BackwardPlan(Protocol):
    """What is cached: runs the call it was made for on arrays with the same facts."""

    def run(self, inputs: Sequence[Any], grads: Sequence[Any] | None, addresses: Sequence[int]) -> tuple[Any, Any, Any]:
        """Compute; `inputs` in the order of ``INPUTS``, `addresses` those of all arrays that there are."""


def check_backward_call(
    adapter: Adapter, inputs: Sequence[Any], options: Options, deterministic: bool, grads: Sequence[Any] | None
) -> BackwardCall:
    """Check the arrays against each other and describe the call; launches nothing.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, its value and the remedy.
    """
    arrays = {name: x for name, x in zip(INPUTS, inputs, strict=True) if x is not None}
    forward = check_call(adapter, [arrays[name] for name in NAMES], options)
    views = dict(zip(NAMES, forward.views, strict=True))
    q = views["q"]
    for name in ("dout", "out"):
        views[name] = adapter.view(arrays[name], name)
        check_like_q(name, views[name], forward.out_shape, "q with the head_dim of v", q)
    for name in _ROWS:
        if name in arrays:
            views[name] = adapter.view(arrays[name], name)
            _check_rows(name, views[name], forward.lse_shape, forward.problem.lse_dtype, q)
    results = None
    if grads is not None:
        shapes = ((x, views[x].shape) for x in NAMES)
        results = {
            name: check_result(adapter, name, grad, shape, source, q)
            for name, grad, (source, shape) in zip(GRADS, grads, shapes, strict=True)
        }
    problem = BackwardProblem(**asdict(forward.problem), has_dlse="dlse" in arrays, deterministic=deterministic)
    copies = {name: why for name, x in arrays.items() if (why := _copy_reason(adapter, name, x, views[name]))}
    layouts = {
        name: fresh_operand(views[name].shape, problem, options.layout)
        if name in copies
        else operand_of(views[name], problem, options.layout)
        for name in INPUTS
        if name not in _ROWS
    }
    for grad, source in zip(GRADS, NAMES, strict=True):
        layouts[grad] = (
            fresh_operand(views[source].shape, problem, options.layout)
            if results is None
            else operand_of(results[grad], problem, options.layout)
        )
    return BackwardCall(options, views, copies, results, problem, BackwardOperands(**layouts), forward.device)


def _check_rows(name: str, view: View, shape: tuple[int, ...], dtype: str, q: View) -> None:
    if view.shape != shape:
        raise ValueError(
            f"{name} has shape {view.shape}; it must be {shape} (batch, heads_q, seqlen_q; those that q has)"
        )
    if view.dtype != dtype:
        raise TypeError(
            f"{name} is {view.dtype}; it must be {dtype} where q is {q.dtype}, as cuflash.attention gives it"
        )
    if place_of(view) != place_of(q):
        raise ValueError(f"q is on {place_of(q)} but {name} is on {place_of(view)}; move it to the device of q")


def _copy_reason(adapter: Adapter, name: str, x: Any, view: View) -> str | None:
    if name not in _ROWS:
        return adapter.copy_reason(x, view)
    steps = zip(view.shape, view.strides, row_major(view.shape), strict=True)
    if any(size > 1 and stride != compact for size, stride, compact in steps):
        return f"it is not C-contiguous (strides {view.strides} elements)"
    return adapter.copy_reason(x, view)


def make_backward_plan(
    adapter: Adapter,
    inputs: Sequence[Any],
    options: Options,
    variant: str | None,
    deterministic: bool,
    grads: Sequence[Any] | None,
) -> BackwardPlan:
    """Check a call, choose its variant, compile or load the kernel and return the plan.

    Raises
    ------
    ValueError, TypeError, UnsupportedProblem, CompilationError
    """
    check_variant(variant)
    call = check_backward_call(adapter, inputs, options, deterministic, grads)
    q = inputs[INPUTS.index("q")]
    if call.problem.has_no_gradients:
        return _Plan(adapter, call, q)
    chosen, config = select(call.problem, call.operands, call.device, variant, "backward")
    if call.device.kind == "cpu":
        return CpuBackwardPlan(adapter, call, q, chosen.launcher(call.problem, call.operands, call.device, config))
    if adapter.framework == "JAX":
        raise UnsupportedProblem(
            "gradients of JAX arrays on a GPU cannot be computed yet:", {chosen.name: "not yet reachable from JAX"}
        )
    with adapter.device(call.device.index):
        launch = chosen.launcher(call.problem, call.operands, call.device, config)
    return CudaBackwardPlan(adapter, call, q, launch, chosen.workspace_bytes(call.problem, call.device, config))


class _Plan(CopiesInputs):
    """How a plan makes its results; by itself, the plan for gradients with no element."""

    def __init__(self, adapter: Adapter, call: BackwardCall, q: Any) -> None:
        self.adapter = adapter
        self.new_grads = [adapter.allocator(call.views[name].shape, call.problem.dtype, q) for name in NAMES]
        inputs = {name: call.views[name] for name in INPUTS if name in call.views}
        self.guard = None if call.grads is None else OutGuard(inputs, call.grads)
        self.copies = tuple(name in call.copies for name in INPUTS) if call.copies else None

    def results(self, grads: Sequence[Any] | None, addresses: Sequence[int]) -> Sequence[Any]:
        """The caller's arrays once their addresses are found to be good, or new ones."""
        if grads is None:
            return [new() for new in self.new_grads]
        if self.guard is not None:
            self.guard.check(addresses)
        return grads

    def deliver(self, results: Sequence[Any], grads: Sequence[Any] | None, q: Any) -> tuple[Any, Any, Any]:
        """What the caller gets, once it is filled."""
        if grads is None:
            results = [self.adapter.publish(x, q) for x in results]
        else:
            for x in grads:
                self.adapter.wrote(x)
        return results[0], results[1], results[2]

    def run(self, inputs: Sequence[Any], grads: Sequence[Any] | None, addresses: Sequence[int]) -> tuple[Any, Any, Any]:
        return self.deliver(self.results(grads, addresses), grads, inputs[1])


class CpuBackwardPlan(_Plan):
    """Runs a CPU launcher on NumPy views in bshd order; the memory is the caller's framework's."""

    def __init__(self, adapter: Adapter, call: BackwardCall, q: Any, launch: Launcher) -> None:
        super().__init__(adapter, call, q)
        self.launch = launch
        self.layout = call.options.layout
        problem = call.problem
        self.rows = (problem.batch, problem.heads_q, problem.seqlen_q)

    def run(self, inputs: Sequence[Any], grads: Sequence[Any] | None, addresses: Sequence[int]) -> tuple[Any, Any, Any]:
        to_numpy, results = self.adapter.to_numpy, self.results(grads, addresses)
        *arrays, lse, dlse = self.copied(inputs)
        self.launch(
            *(as_bshd(to_numpy(x), self.layout) for x in arrays),
            to_numpy(lse).reshape(self.rows),
            None if dlse is None else to_numpy(dlse).reshape(self.rows),
            *(as_bshd(to_numpy(x), self.layout) for x in results),
        )
        return self.deliver(results, grads, inputs[1])


class CudaBackwardPlan(_Plan):
    """Launches on the framework's current stream of the arrays' device; all memory comes from its allocator."""

    def __init__(self, adapter: Adapter, call: BackwardCall, q: Any, launch: Launcher, workspace_bytes: int) -> None:
        super().__init__(adapter, call, q)
        self.launch = launch
        self.index = call.device.index
        items = -(-workspace_bytes // _WORKSPACE_ITEM)
        self.new_workspace = adapter.allocator((items,), "float32", q) if items else None

    def run(self, inputs: Sequence[Any], grads: Sequence[Any] | None, addresses: Sequence[int]) -> tuple[Any, Any, Any]:
        if self.adapter.current_device() != self.index:
            with self.adapter.device(self.index):
                return self._enqueue(inputs, grads, addresses)
        return self._enqueue(inputs, grads, addresses)

    def _enqueue(
        self, inputs: Sequence[Any], grads: Sequence[Any] | None, addresses: Sequence[int]
    ) -> tuple[Any, Any, Any]:
        address, results = self.adapter.address, self.results(grads, addresses)
        arrays = self.copied(inputs)  # keeps the copies alive until the launch is enqueued
        workspace = None if self.new_workspace is None else self.new_workspace()
        self.launch(
            *(0 if x is None else address(x) for x in (*arrays, *results, workspace)), self.adapter.stream(self.index)
        )
        return self.deliver(results, grads, inputs[1])
