"""The public functions: look the arrays up, find or make the plan for them, run it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping
from typing import Any

from cuflash.arrays import Adapter, DLPackAdapter, adapter_of
from cuflash.plan import Plan, make_plan
from cuflash.plan_backward import GRADS, INPUTS, BackwardPlan, make_backward_plan
from cuflash.problem import Causal, Layout, Options, check_deterministic, check_options

_MAX_PLANS = 4096  # a plan is a few kB; a program that has more shapes than this pays for making some again
_PLANS: dict[Hashable, Any] = {}  # of Plan and BackwardPlan; the keys of the latter start with "backward"
_PLANS_LOCK = threading.Lock()  # for the bound only: dictionary reads need none

# Values of these types never change and compare by value, so they can be part of a key as they are.
_PLAIN = frozenset({bool, int, float, str, type(None)})


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    variant: str | None = None,
    out: Any = None,
) -> Any:
    r"""Exact attention, ``softmax(mask(softcap(scale * q @ k.T))) @ v``, in memory linear in the sequence length.

    The computation runs where the arrays are (CPU or CUDA GPU), on the current stream of their framework and without
    waiting for it; the result is an array of the same framework on the same device. Nothing moves between devices.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        Queries. A NumPy, CuPy, torch or JAX array, or any other with ``__dlpack__`` (taken as, and answered with, a
        NumPy array on the CPU or a CuPy array on a GPU). float16, bfloat16 (in NumPy: ``ml_dtypes.bfloat16``), float32
        or float64. Three dimensions mean one batch entry, two also one head: (seqlen, heads, head_dim) and
        (seqlen, head_dim). Any strides; arrays whose last axis is not contiguous, on a GPU also those with negative
        strides, are copied first, and ``cuflash.explain`` says so.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        Keys. ``heads_q`` must be a multiple of ``heads_kv``: query head ``h`` uses key/value head
        ``h // (heads_q // heads_kv)``.
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values. Head dims are 1 to 256, and ``head_dim_v`` may differ from ``head_dim``. q, k and v have one framework,
        device, dtype and number of dimensions.
    causal : {False, True, "bottom-right", "top-left"}, optional
        Which keys query ``i`` sees. True is "bottom-right": key ``j`` is seen when ``j <= i + seqlen_k - seqlen_q``,
        so that the last query sees every key. "top-left": when ``j <= i`` (torch's and JAX's ``is_causal``).
    window : (left, right), optional
        Query ``i`` sees keys from ``c - left`` to ``c + right``, both included, where ``c = i + seqlen_k - seqlen_q``.
        None on a side leaves it open. Together with `causal`, a key must pass both.
    softcap : float, optional
        Scores become ``softcap * tanh(s / softcap)`` before the masks; 0 means no cap.
    scale : float, optional
        Factor on ``q @ k.T``; ``1 / sqrt(head_dim)`` when None.
    layout : {"bshd", "bhsd"}, optional
        Order of the axes of q, k, v and the output. "bhsd" has heads before seqlen: (batch, heads, seqlen, dim), or
        (heads, seqlen, dim) with three dimensions.
    return_lse : bool, optional
        Also return the log-sum-exp of each row of scores.
    variant : str, optional
        Name of the implementation to use; chosen from the problem and the device when None.
    out : array, optional
        Where to write the output: of the shape, dtype, device and framework of the result, writable, with a contiguous
        last axis and sharing no memory with q, k or v. Not for JAX, whose arrays are immutable.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        In the layout and number of dimensions of `q`, C-contiguous unless `out` was given.
    lse : array, shape (batch, heads_q, seqlen_q)
        Only with `return_lse`: natural log of the sum of exp of the visible scores, float32 (float64 for float64
        inputs), for both layouts; (heads_q, seqlen_q) with three dimensions and (seqlen_q,) with two.

    Raises
    ------
    TypeError
        For something that is no array, or arrays whose frameworks or dtypes differ or are not taken.
    ValueError
        For shapes, devices, options or an `out` that do not fit. Both name the argument, its value and the remedy, and
        are raised before anything is launched.
    UnsupportedProblem
        When the problem is well formed but no variant (or not the one asked for) can run it, with each one's reason.

    Notes
    -----
    A row that sees no key gives 0, with an lse of -inf. NaN and infinity in a visible key or value, or in a query,
    reach the rows that see it and no others; masked keys and values never matter, not even NaN. Scores and sums are
    accumulated in float32 or better, and repeated calls give the same bits, whatever else is in the batch. Gradients
    are not recorded: torch tensors that require them are refused outside ``torch.no_grad()``.

    Instead of the whole seqlen_q x seqlen_k matrix of scores, tiles of it are made and folded into a running maximum,
    sum and output per row [1]_, with queries in the outer loop and one division at the end ([2]_, section 3.1).

    References
    ----------
    .. [1] T. Dao, D. Y. Fu, S. Ermon, A. Rudra and C. Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention
       with IO-Awareness", NeurIPS 2022, arXiv:2205.14135.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", ICLR 2024,
       arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((1, 128, 4, 64), dtype=np.float32) for _ in range(3))
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 128, 4, 64), (1, 4, 128))
    >>> bool(np.allclose(out[0, 0], v[0, 0]))  # the first query sees only the first key
    True
    """
    adapter = adapter_of(q, "q")
    kind = type(q)
    if type(k) is not kind or type(v) is not kind or out is not None:
        check_frameworks(adapter, {"k": k, "v": v} | ({} if out is None else {"out": out}))
    if out is not None and adapter.immutable:
        raise TypeError(f"out={type(out).__name__}: {adapter.framework} arrays are immutable; leave out as None")
    caller_out = out
    if type(adapter) is DLPackAdapter:
        given = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
        adapter, given = to_native(adapter, given)
        q, k, v, out = given["q"], given["k"], given["v"], given.get("out")
    at_q, facts_q = adapter.facts(q, "q")
    at_k, facts_k = adapter.facts(k, "k")
    at_v, facts_v = adapter.facts(v, "v")
    at_out, facts_out = (0, None) if out is None else adapter.facts(out, "out")
    # Addresses matter only by their alignment.
    low: Any = (at_q | at_k | at_v | at_out) & 15
    if low:
        low = (at_q & 15, at_k & 15, at_v & 15, at_out & 15)
    arrays = (adapter, facts_q, facts_k, facts_v, facts_out, low)
    addresses = (at_q, at_k, at_v, at_out)
    try:
        # True == 1 == 1.0, and not each of them is valid: the types tell them apart.
        types = type(causal) if window is None else (type(causal), *map(type, window))
        key = (arrays, causal, window, types, softcap, scale, layout, variant, return_lse)
        plan = _PLANS.get(key)
    except TypeError:  # an option that cannot be hashed, such as a list
        plan = key = None
    if plan is None:
        options = check_options(causal, window, softcap, scale, layout)
        plan = _plan_for(adapter, (q, k, v), arrays, options, variant, bool(return_lse), out)
        if key is not None and _is_plain(causal, softcap, scale, layout, return_lse, *(window or ())):
            _remember(key, plan)
    result = plan.run(q, k, v, out, addresses)
    if caller_out is not out:
        return (caller_out, result[1]) if return_lse else caller_out
    return result


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    layout: Layout = "bshd",
    dlse: Any = None,
    deterministic: bool = False,
    variant: str | None = None,
    grads: tuple[Any, Any, Any] | None = None,
) -> tuple[Any, Any, Any]:
    r"""Gradients of :func:`attention` by q, k and v, in memory linear in the sequence length.

    The weights are computed again, tile by tile, from the lse of the forward pass; nothing of the size
    seqlen_q x seqlen_k is stored in either pass. The computation runs where the arrays are, as that of
    :func:`attention` does: on the CPU for all dtypes, on CUDA for float16 and bfloat16, not yet from JAX. There the
    temporary memory is one float32 number a row of q and the size of dq in float32.

    Parameters
    ----------
    dout : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        Gradient of the loss by `out`. Any strides, also 0 and others than those of `out`.
    q, k, v : array
        As given to :func:`attention`.
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        What :func:`attention` returned. It is read; where to write the results is `grads`.
    lse : array, shape (batch, heads_q, seqlen_q)
        The log-sum-exp that :func:`attention` returned with ``return_lse=True``: float32, or float64 for float64
        inputs, for both layouts.
    causal, window, softcap, scale, layout
        As given to :func:`attention`.
    dlse : array, shape (batch, heads_q, seqlen_q), optional
        Gradient of the loss by `lse`, for a loss that depends on it too; of the dtype of `lse`. 0 when None. That of
        rows without a key is ignored.
    deterministic : bool, optional
        Always give the same bits for the same call, whatever else is in the batch. The NumPy variant does so in any
        case; on CUDA the sums of dq are otherwise added in an order that changes from call to call.
    variant : str, optional
        Name of the implementation to use; chosen from the problem and the device when None.
    grads : (array, array, array), optional
        Where to write dq, dk and dv: of the shapes of q, k and v and of their dtype, device and framework, writable,
        each with a contiguous last axis and sharing no memory with each other or with what is read. Not for JAX.

    Returns
    -------
    dq, dk, dv : array
        Of the shapes and dtype of q, k and v, C-contiguous unless `grads` was given. Key/value heads that several query
        heads share have the sums over these.

    Raises
    ------
    TypeError
        For something that is no array, or arrays whose frameworks or dtypes differ or are not taken.
    ValueError
        For shapes, devices, options or `grads` that do not fit. Both name the argument, its value and the remedy, and
        are raised before anything is launched.
    UnsupportedProblem
        When the problem is well formed but no variant (or not the one asked for) can run it, with each one's reason.

    Notes
    -----
    Rows that see no key, those whose lse is -inf, have a zero dq and add nothing to dk and dv, whatever q and dout hold
    there; keys that no row sees have zero dk and dv. NaN and infinity reach the gradients of the rows and keys that see
    each other and no others. `out` and `lse` are trusted: with those of another call the results are meaningless.

    On CUDA the gradients of the scores are rounded to the dtype before they meet k and q. In float16 they must stay
    below 65504, also where dq and dk would be smaller; those that do not show as inf or NaN in dq and dk.

    With :math:`D_i = \sum_c dO_{ic} O_{ic}`, weights :math:`P = \exp(S - \mathrm{lse})` and :math:`dP = dO\, V^T`
    the gradient of the scores is :math:`P \circ (dP - D + d\mathrm{lse})` ([1]_, appendix B.2; [2]_, section 3.2).
    ``cuflash.reference.attention_backward_reference`` has all formulas and computes them in float64;
    ``cuflash.reference.check_backward`` has the error rule.

    References
    ----------
    .. [1] T. Dao, D. Y. Fu, S. Ermon, A. Rudra and C. Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention
       with IO-Awareness", NeurIPS 2022, arXiv:2205.14135.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", ICLR 2024,
       arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np
    >>> import cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (rng.standard_normal((1, 128, 4, 64), dtype=np.float32) for _ in range(4))
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> dq.shape, dk.shape, dv.shape
    ((1, 128, 4, 64), (1, 128, 4, 64), (1, 128, 4, 64))
    >>> bool((dq[0, 0] == 0).all())  # the first query sees only the first key, so its scores do not matter
    True
    """
    adapter = adapter_of(q, "q")
    named = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        named["dlse"] = dlse
    if grads is not None:
        named.update(_named_grads(grads, adapter))
    kind = type(q)
    if any(type(x) is not kind for x in named.values()):
        check_frameworks(adapter, named)
    if type(adapter) is DLPackAdapter:
        adapter, named = to_native(adapter, named, written=GRADS)
    addresses, facts = zip(*[adapter.facts(x, name) for name, x in named.items()], strict=True)
    # Addresses matter only by their alignment.
    arrays = (adapter, tuple(named), facts, tuple([address & 15 for address in addresses]))
    try:
        types = (type(causal), type(deterministic), *map(type, window or ()))  # True == 1 == 1.0, as in attention
        key = ("backward", arrays, causal, window, types, softcap, scale, layout, variant, deterministic)
        plan: BackwardPlan | None = _PLANS.get(key)
    except TypeError:  # an option that cannot be hashed, such as a list
        plan = key = None
    inputs = [named.get(name) for name in INPUTS]
    written = None if grads is None else [named[name] for name in GRADS]
    if plan is None:
        options = check_options(causal, window, softcap, scale, layout)
        plan = make_backward_plan(adapter, inputs, options, variant, check_deterministic(deterministic), written)
        if key is not None and _is_plain(causal, softcap, scale, layout, deterministic, *(window or ())):
            _remember(key, plan)
    results = plan.run(inputs, written, addresses)
    return results if grads is None else (grads[0], grads[1], grads[2])


def _named_grads(grads: object, adapter: Adapter) -> dict[str, Any]:
    """The caller's arrays for dq, dk and dv by name."""
    if not isinstance(grads, tuple | list) or len(grads) != len(GRADS):
        raise TypeError(f"grads={type(grads).__name__} must be None or a tuple of three arrays (dq, dk, dv)")
    if adapter.immutable:
        raise TypeError(f"grads: {adapter.framework} arrays are immutable; leave grads as None")
    return dict(zip(GRADS, grads, strict=True))


def _is_plain(*options: object) -> bool:
    return all(type(option) in _PLAIN for option in options)


def _remember(key: Hashable, plan: Plan | BackwardPlan) -> None:
    with _PLANS_LOCK:
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan


def _plan_for(
    adapter: Adapter,
    inputs: tuple[Any, Any, Any],
    facts: Hashable,
    options: Options,
    variant: str | None,
    return_lse: bool,
    out: Any,
) -> Plan:
    """The plan for checked options; found again when only the spelling of an option is new."""
    key = (facts, options, variant, return_lse) if variant is None or isinstance(variant, str) else None
    plan: Plan | None = _PLANS.get(key)
    if plan is None:
        plan = make_plan(adapter, inputs, options, variant, return_lse, out)
        _remember(key, plan)
    return plan


def check_frameworks(adapter: Adapter, arrays: Mapping[str, Any]) -> None:
    """Refuse arrays, given by name, of other frameworks than q's.

    Raises
    ------
    TypeError
    """
    for name, x in arrays.items():
        other = adapter_of(x, name)
        if other is not adapter:
            raise TypeError(
                f"q is a {adapter.framework} array but {name} is a {other.framework} array ({type(x).__name__}); "
                "pass arrays of one framework"
            )


def to_native(
    adapter: DLPackAdapter, arrays: Mapping[str, Any], written: Collection[str] = ("out",)
) -> tuple[Adapter, dict[str, Any]]:
    """Arrays of a framework without an adapter of its own, by name, as NumPy or CuPy arrays over the same memory."""
    natives = {name: adapter.native(x, name, written=name in written) for name, x in arrays.items()}
    native = adapter_of(natives["q"], "q")
    for name, x in natives.items():
        if adapter_of(x, name) is not native:
            raise ValueError(f"q and {name} are on different kinds of device (CPU and GPU); move them to one device")
    return native, natives
