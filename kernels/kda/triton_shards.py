"""KDA of a row whose tokens are cut into shards, one a device, with the GPU kernels of triton.py; the caller brings the collectives.

As with the segments of one device: a first walk over each shard gives its affine map S -> M S + A, the caller folds the maps of the
shards before this one, a second walk starts from the true state. Backward the same from the right: a walk gives what the shard's own
outputs contribute to the gradient of its entry state, the caller folds, and the backward pass of triton.py starts from the true gradient.
One pass that gives the outputs of every entry state would need V + K value columns with outputs, kept states and gradients, so twice the
work of the backward pass at K = V (by count, not measured); here only the first walk has them. One prep serves both walks forward where
the shard is one window; over several windows it is done again, else SCRATCH would bound nothing.

Shapes: B batch, T tokens of the shard, H query/key heads, HV value heads, K, V channels, S segments of a window.
"""

import functools
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from jax import lax

from ..varying import match_varying
from . import triton
from .triton import Plan, as_kernels_take, backward_pass, cut_windows, over_rows, plan_of, walk_bounds


class Exchange(Protocol):
    """What the shards tell each other. Hashable. Each state and its gradient is [B,HV,K,V] float32, matrix [B,HV,K,K]."""

    def entry(self, add, matrix, initial, edges) -> tuple[Any, Any]:
        """The state that enters this shard, and what `leaving` needs to know of the others. initial: the row's; edges: the caller's."""
        ...

    def leaving(self, d_add, matrix, others) -> Any:
        """The gradient that the later shards give to this shard's end. d_add: what each shard's own results give at its start."""
        ...

    def of_first(self, d_entry) -> Any:
        """This shard's part of the gradient of the row's initial state."""
        ...


def kda_triton_shards(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    *,
    scale: float,
    lower_bound: float,
    fused: bool,
    initial_state,
    exchange: Exchange,
    documents=None,
    edges=None,
    window: int | None = None,
    segment: int | None = None,
):
    """As kda_triton on this shard's tokens, without a state per document: same operands, options and results.

    initial_state [B,HV,K,V]: of the whole row. edges: an integer array, or None, that is passed on to `exchange`.
    Returns (o [B,T,HV,V] in v.dtype, the state at this shard's end).
    """
    K, V = q.shape[3], v.shape[3]
    arrays, documents, edges = as_kernels_take(q, k, v, g, beta, A_log, dt_bias, initial_state, documents, edges)
    plan = plan_of(*arrays[:3], scale, lower_bound, fused, window, segment)
    o, end = cast(Any, _core)(plan, exchange, *arrays, documents, edges)
    return o[..., :V], end[..., :K, :V]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _core(plan: Plan, exchange: Exchange, q, k, v, g, beta, A_log, dt_bias, initial, ids, edges) -> Any:
    return _core_fwd(plan, exchange, q, k, v, g, beta, A_log, dt_bias, initial, ids, edges)[0]


def _core_fwd(plan, exchange, q, k, v, g, beta, A_log, dt_bias, initial, ids, edges):
    shared, rows = (A_log, dt_bias), (q, k, v, g, beta, ids)
    add, matrix, maps, prepared = over_rows(_summary, plan)(shared, rows)
    entry, others = exchange.entry(add, matrix, initial, edges)
    o, end, starts = over_rows(_outputs, plan)(shared, (*rows, entry, maps, prepared))
    matrices = tuple(None if m is None else m[1] for m in maps)
    return (o, end), (shared, rows, starts, matrices, matrix, others)


def _core_bwd(plan, exchange, residuals, cotangents):
    shared, rows, starts, matrices, matrix, others = residuals
    d_o, d_end = cotangents
    d_add = over_rows(_start_gradient, plan)(shared, (*rows, matrices, d_o, d_end))
    d_end = d_end + exchange.leaving(d_add, matrix, others)
    *grads, d_A, d_bias, d_entry = over_rows(backward_pass, plan)(shared, (*rows, None, starts, matrices, d_o, d_end))
    d_A, d_bias = (None if d is None else jnp.sum(d, axis=0).astype(x.dtype) for d, x in zip((d_A, d_bias), shared, strict=True))
    return (*grads, d_A, d_bias, exchange.of_first(d_entry), None, None)


_core.defvjp(_core_fwd, _core_bwd)


def _prepare(plan: Plan, shared, rows, first, chunks):
    q, k, _, g, beta, ids = rows
    options: dict[str, Any] = dict(scale=plan.scale, lower_bound=plan.lower_bound, fused=plan.fused)
    return triton.stages().prep(q, k, g, beta, *shared, ids, first=first, chunks=chunks, **options)


def _after(rows, *before):
    """rows, not before `before` is done: else XLA may prepare all windows at once, and SCRATCH would bound nothing."""
    beta, *_ = lax.optimization_barrier((rows[4], *before))
    return (*rows[:4], beta, rows[5])


def _summary(plan: Plan, shared, rows):
    """-> add [B,HV,K,V], matrix [B,HV,K,K] of the shard; (add, matrix) [B,S,HV,...] of each window's segments, None where S is 1;
    what prep gave, None unless the shard is one window."""
    run = triton.stages()
    v, total, maps, p = rows[2], None, [], None
    windows = cut_windows(plan, v.shape[1])
    for first, chunks in windows:
        rows = rows if total is None else _after(rows, total)
        p = _prepare(plan, shared, rows, first, chunks)
        bounds = walk_bounds(plan, first, chunks, v.shape[0], None)
        add, matrix = run.walk_summary(p, v, bounds, first=first)
        maps.append((add, matrix) if bounds.shape[1] > 1 else None)
        # [A | M] goes through a map as a state of V + K columns does, whose last K are added to nothing.
        wide = jnp.concatenate([add, jnp.zeros_like(matrix)], axis=-1)
        if total is None:
            total, wide, matrix = jnp.concatenate([add[:, 0], matrix[:, 0]], axis=-1), wide[:, 1:], matrix[:, 1:]
        if wide.shape[1]:
            _, total = run.fold_states(total, wide, matrix)
    size, total = v.shape[-1], cast(Any, total)
    return total[..., :size], total[..., size:], tuple(maps), p if len(windows) == 1 else None


def _outputs(plan: Plan, shared, rows):
    """The pass from the true entry state -> o, the state at the end, the states at the start of each window's walks [B,S,HV,K,V]."""
    run = triton.stages()
    *rows, entry, maps, prepared = rows
    v, state, o, starts = rows[2], entry[:, None], None, []
    for (first, chunks), segments in zip(cut_windows(plan, v.shape[1]), maps, strict=True):
        p = prepared
        if p is None:
            rows = _after(rows, state)
            p = _prepare(plan, shared, rows, first, chunks)
        if segments is not None:
            state, _ = run.fold_states(state[:, 0], *segments)
        starts.append(state)
        o, state = run.walk_forward(p, v, state, walk_bounds(plan, first, chunks, v.shape[0], None), first=first, out=o)
        state = state[:, -1:]
    return o, state[:, 0], tuple(starts)


def _start_gradient(plan: Plan, shared, rows):
    """What the shard's own results give to the gradient of the state at its start [B,HV,K,V]."""
    run = triton.stages()
    *rows, matrices, d_o, d_end = rows
    windows, d_state = cut_windows(plan, d_o.shape[1]), d_end[:, None]
    for (first, chunks), matrix in reversed(list(zip(windows, matrices, strict=True))):
        rows = _after(rows, d_o, d_state)
        p = _prepare(plan, shared, rows, first, chunks)
        bounds = walk_bounds(plan, first, chunks, d_o.shape[0], None)
        if matrix is None:
            d_state = run.walk_reverse(p, d_o, d_state, bounds, first=first)
        else:
            zero = jnp.zeros((*bounds.shape[:2], *d_state.shape[2:]), d_state.dtype)
            add = run.walk_reverse(p, d_o, match_varying(zero, d_state), bounds, first=first)
            d_state = run.fold_gradients(d_state[:, 0], add, matrix)[1][:, None]
    return d_state[:, 0]
