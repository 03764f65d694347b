"""KDA on NVIDIA Hopper: how the GPU kernels (triton_prep, triton_walk, triton_grads) make up a forward and a backward pass.

A row is cut into chunks of 32 tokens. Forward: `prep` brings every chunk into the form S -> decay * S + K^T V', then
`walk_forward` carries the state through the chunks. Backward: prep again, `walk_both` walks again (now keeping states) and carries the
state's gradient back, `grads` gives everything else chunk by chunk. What lies between the kernels (0.9 to 3.5 KB a token and
head) is bounded by doing this window by window, the backward pass from right to left; one state a window is kept for it.
A window's border changes no bit: the state crosses it in float32, as it crosses from chunk to chunk.

Few heads leave most of the GPU idle during a walk. Then the row is cut into segments of 4096 tokens that walk at the same time:
a first walk gives each segment's affine map S -> M S + A, the maps are folded in order, a second walk starts from the true states.
Exact, and by the sizes alone: what a token's numbers are never depends on values, nor on how many tokens follow.

Shapes: B batch, T tokens, H query/key heads, HV value heads, K, V channels, n chunks of C = 32 tokens, N documents of a row,
S walks of a row in one launch (1, segments, or documents).
"""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ..varying import match_varying
from .layout import aligned_chunks, aligned_layout
from .rows import fold_into_rows

CHUNK = 32
SIZES = (64, 128, 256)  # channels a kernel takes; others are filled up with zeros
SCRATCH = 3 * 2**30  # bytes between the kernels of one window: 8192 tokens of 96 heads at K = V = 128
WINDOW_TOKENS = (512, 2**20)
# Tokens of a segment, and the most rows * heads that are cut into segments: measured on one H200 (forward), it pays up to 8.
SEGMENT, FEW_HEADS = 4096, 8
CLOSED = -1e15  # a raw gate that is closed for any A_log in [-27, 50]: decay exactly 0, gradient exactly 0


class Plan(NamedTuple):
    """What is fixed at trace time; window and segment in chunks, segment 0: the row is one walk."""

    scale: float
    lower_bound: float
    fused: bool
    window: int
    segment: int


class Stages(NamedTuple):
    prep: Any
    walk_forward: Any
    walk_both: Any
    walk_reverse: Any
    walk_summary: Any
    grads: Any
    fold_states: Any
    fold_gradients: Any


@functools.cache
def stages() -> Stages:
    """The kernels. Imported at the first use, because they import Triton."""
    from .triton_grads import grads
    from .triton_prep import prep
    from .triton_segments import fold_gradients, fold_states
    from .triton_walk import walk_both, walk_forward, walk_reverse, walk_summary

    return Stages(prep, walk_forward, walk_both, walk_reverse, walk_summary, grads, fold_states, fold_gradients)


def kernel_size(channels: int) -> int:
    """Channels that a kernel works with for `channels` of the operands."""
    if channels > SIZES[-1]:
        raise ValueError(f"{channels} channels; the kernels take at most {SIZES[-1]}.")
    return next(size for size in SIZES if size >= channels)


def cut(rows: int, value_heads: int, key_dim: int, value_dim: int, tokens: int) -> tuple[int, int]:
    """(tokens of a window, tokens of a segment or 0) that kda_triton takes for B = rows; `tokens` decides only if 0 is right.

    key_dim, value_dim: as the kernels see them, see kernel_size.
    """
    prepared = 3 * 2 * key_dim + 2 * 2 * CHUNK + 4 * key_dim // CHUNK
    kept = 2 * 2 * key_dim * value_dim // CHUNK + 2 * 2 * value_dim
    most = SCRATCH // (rows * value_heads * (prepared + kept))
    window = min(max(2 ** int(math.log2(max(most, 1))), WINDOW_TOKENS[0]), WINDOW_TOKENS[1])
    few = rows * value_heads <= FEW_HEADS and tokens > SEGMENT
    return window, SEGMENT if few else 0


def kda_triton(
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
    documents=None,
    window: int | None = None,
    segment: int | None = None,
):
    """The recurrence of kda_reference on an NVIDIA Hopper GPU; same results.

    q, k [B,T,H,K], v [B,T,HV,V] bfloat16; g [B,T,HV,K], beta [B,T,HV] bfloat16 or float32; K, V <= 256.
    fused: L2 norm of q and k, gate and sigmoid of beta happen in the kernels: g is the raw gate, beta the logits, A_log [HV] or None,
    dt_bias [HV,K] or None. Padded tokens have q = k = v = 0 and g = CLOSED then. Not fused: g, beta as in `kda`, 0 at padded tokens.
    initial_state float32 [B,HV,K,V], or [B,N,HV,K,V] for a state per document; documents: filled ids [B,T], or None.
    window, segment: tokens, multiples of 32, segment a divisor of window; None: see `cut`.
    Returns (o [B,T,HV,V] in v.dtype, final state like initial_state).
    """
    tokens, K, V = q.shape[1], q.shape[3], v.shape[3]
    per_document = initial_state.ndim == 5
    arrays, documents = as_kernels_take(q, k, v, g, beta, A_log, dt_bias, initial_state, documents)
    plan = plan_of(*arrays[:3], scale, lower_bound, fused, window, 0 if per_document else segment)
    q, k, v, g, beta, A_log, dt_bias, initial = arrays
    core, move = cast(Any, _core), cast(Any, _move)
    if not per_document:
        o, final = core(plan, *arrays, documents, None)
    else:
        chunks = aligned_chunks(tokens, initial.shape[1], chunk=CHUNK)
        layout = aligned_layout(documents, initial.shape[1], chunks, chunk=CHUNK)
        there, back = (layout.source, layout.used), (layout.place, None)
        q, k, v, beta = (move(0.0, x, there, back) for x in (q, k, v, beta))
        g = move(CLOSED if fused else 0.0, g, there, back)
        o, final = core(plan, q, k, v, g, beta, A_log, dt_bias, initial, None, layout.bounds)
        o = move(0.0, o, back, there)
    return o[..., :V], final[..., :K, :V]


def plan_of(q, k, v, scale, lower_bound, fused, window, segment) -> Plan:
    """For operands that the kernels take; window, segment in tokens or None, as in kda_triton."""
    chosen = cut(q.shape[0], v.shape[2], q.shape[3], v.shape[3], q.shape[1])
    window, segment = (own if given is None else given for own, given in zip(chosen, (window, segment), strict=True))
    return Plan(scale, lower_bound, fused, window // CHUNK, segment // CHUNK)


def as_kernels_take(q, k, v, g, beta, A_log, dt_bias, initial_state, documents, *others):
    """-> (q, k, v, g, beta, A_log, dt_bias, initial_state) with channels filled up to a kernel's size and the gate's parameters in
    float32, documents in int32, others; all vary over the mesh axes of all."""
    wide_k, wide_v = kernel_size(q.shape[3]), kernel_size(v.shape[3])
    wide = lambda x: None if x is None else x.astype(jnp.promote_types(x.dtype, jnp.float32))
    documents = None if documents is None else documents.astype(jnp.int32)
    operands: Any = (q, k, v, g, beta, wide(A_log), wide(dt_bias), initial_state, documents, *others)
    operands = jax.tree.map(lambda x: match_varying(x, *jax.tree.leaves(operands)), operands)
    q, k, v, g, beta, A_log, dt_bias, initial, *others = operands
    q, k, g, dt_bias = (widen(x, wide_k) for x in (q, k, g, dt_bias))
    v, initial = widen(v, wide_v), widen(widen(initial, wide_k, axis=-2), wide_v)
    return (q, k, v, g, beta, A_log, dt_bias, initial), *others


def widen(x, size, axis=-1) -> Any:
    if x is None or x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(fill, x, there, back):
    """x [B,T,...] read at there = (source [B,L], used [B,L] or None); `fill` where not used. `back` undoes it.

    Every token has one place, so the gradient is a read as well: no sum, nothing that atomics could reorder.
    """
    source, used = there
    moved = jnp.take_along_axis(x, source.reshape(source.shape + (1,) * (x.ndim - 2)), axis=1)
    return moved if used is None else jnp.where(used.reshape(used.shape + (1,) * (x.ndim - 2)), moved, jnp.asarray(fill, x.dtype))


def _move_bwd(fill, residuals, d_moved):
    return cast(Any, _move)(0.0, d_moved, *residuals), None, None


_move.defvjp(lambda fill, x, there, back: (_move(fill, x, there, back), (back, there)), _move_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(plan: Plan, q, k, v, g, beta, A_log, dt_bias, initial, ids, ranges) -> Any:
    """-> o, final. ids [B,T] or None; ranges [B,N,2]: the chunks of each document when there is a state per document, else None."""
    return _core_fwd(plan, q, k, v, g, beta, A_log, dt_bias, initial, ids, ranges)[0]


def _core_fwd(plan, q, k, v, g, beta, A_log, dt_bias, initial, ids, ranges):
    shared, rows = (A_log, dt_bias), (q, k, v, g, beta, ids, ranges)
    o, final, starts, matrices = over_rows(_forward, plan)(shared, (*rows, initial))
    return (o, final), (shared, rows, starts, matrices)


def _core_bwd(plan, residuals, cotangents):
    shared, rows, starts, matrices = residuals
    *grads, d_A, d_bias, d_initial = over_rows(backward_pass, plan)(shared, (*rows, starts, matrices, *cotangents))
    d_A, d_bias = (None if d is None else jnp.sum(d, axis=0).astype(x.dtype) for d, x in zip((d_A, d_bias), shared, strict=True))
    return (*grads, d_A, d_bias, d_initial, None, None)


_core.defvjp(_core_fwd, _core_bwd)


@functools.cache
def over_rows(run, plan: Plan):
    """run(plan, shared, rows), where every array of `rows` and of the result starts with B; vmap makes the mapped axis part of B.

    As many examples go together as fit into SCRATCH, the others follow one group after the other.
    """
    call = custom_vmap(functools.partial(run, plan))

    call.def_vmap(lambda size, batched, *args: fold_into_rows(call, size, batched, *args, most=functools.partial(_most_rows, plan)))
    return call


def _most_rows(plan: Plan, rows) -> int:
    """How many examples of `rows` (each array [size,B,...]) may go together."""
    q, _, v = rows[:3]
    _, batch, tokens, _, K = q.shape
    window, _ = cut(batch, v.shape[3], K, v.shape[4], 0)
    return max(1, window // min(tokens, plan.window * CHUNK))


def cut_windows(plan: Plan, tokens: int) -> list[tuple[int, int]]:
    """(first chunk, chunks) of each window."""
    chunks = -(-tokens // CHUNK)
    return [(first, min(plan.window, chunks - first)) for first in range(0, chunks, plan.window)]


def walk_bounds(plan: Plan, first: int, chunks: int, batch: int, ranges):
    """[B,S,2] int32: the chunks of each walk in this window."""
    if ranges is not None:
        return jnp.clip(ranges, first, first + chunks).astype(jnp.int32)
    size = plan.segment or chunks
    begin = range(first, first + chunks, size)
    bounds = jnp.asarray([(b, min(b + size, first + chunks)) for b in begin], jnp.int32)
    return jnp.broadcast_to(bounds, (batch, *bounds.shape))


def _forward(plan: Plan, shared, rows):
    """-> o, final, the states at the start of each window's walks [B,S,HV,K,V], the segments' matrices [B,S,HV,K,K] (None without)."""
    run = stages()
    q, k, v, g, beta, ids, ranges, initial = rows
    state = initial[:, None] if ranges is None else initial  # [B,S,HV,K,V]
    o, starts, matrices = None, [], []
    for first, chunks in cut_windows(plan, q.shape[1]):
        if first:  # not before the window before is done: else XLA may prepare all windows at once, and SCRATCH would bound nothing
            beta, state = lax.optimization_barrier((beta, state))
        p = run.prep(
            q, k, g, beta, *shared, ids, first=first, chunks=chunks, scale=plan.scale, lower_bound=plan.lower_bound, fused=plan.fused
        )
        bounds, matrix = walk_bounds(plan, first, chunks, q.shape[0], ranges), None
        if ranges is None and bounds.shape[1] > 1:
            add, matrix = run.walk_summary(p, v, bounds, first=first)
            state, _ = run.fold_states(state[:, 0], add, matrix)
        starts.append(state)
        matrices.append(matrix)
        o, state = run.walk_forward(p, v, state, bounds, first=first, out=o)
        state = state if ranges is not None else state[:, -1:]
    return o, state if ranges is not None else state[:, 0], tuple(starts), tuple(matrices)


def backward_pass(plan: Plan, shared, rows):
    """-> dq, dk, dv, dg, dbeta like their operands, dA [B,HV], dbias [B,HV,K] float32 (None without), d_initial."""
    run = stages()
    q, k, v, g, beta, ids, ranges, starts, matrices, d_o, d_final = rows
    options: dict[str, Any] = dict(scale=plan.scale, lower_bound=plan.lower_bound, fused=plan.fused)
    # Without it XLA merges this prep with that of the forward pass in the same program, and keeps 0.9 KB a token and head until now.
    beta, d_o = lax.optimization_barrier((beta, d_o))
    d_state = d_final[:, None] if ranges is None else d_final
    out, sums = None, [None, None]
    windows = cut_windows(plan, q.shape[1])
    for number, (first, chunks) in reversed(list(enumerate(windows))):
        if out is not None:
            beta, out[4] = lax.optimization_barrier((beta, out[4]))
        bounds = walk_bounds(plan, first, chunks, q.shape[0], ranges)
        p = run.prep(q, k, g, beta, *shared, ids, first=first, chunks=chunks, **options)
        if matrices[number] is not None:
            zero = jnp.zeros((*bounds.shape[:2], *d_state.shape[2:]), d_state.dtype)
            add = run.walk_reverse(p, d_o, match_varying(zero, d_state), bounds, first=first)
            d_state, _ = run.fold_gradients(d_state[:, 0], add, matrices[number])
        states, v_new, d_state, d_states, d_v_new = run.walk_both(p, v, starts[number], d_o, d_state, bounds, first=first)
        *out, d_A, d_bias = run.grads(
            q, k, g, beta, *shared, ids, p.t, d_o, states, v_new, d_states, d_v_new, first=first, out=out and tuple(out), **options
        )
        used = None if ranges is None else first + jnp.arange(chunks) < jnp.max(ranges[..., 1], axis=1, keepdims=True)  # [B,n]
        sums = [_add(total, partial, used) for total, partial in zip(sums, (d_A, d_bias), strict=True)]
        d_state = d_state if ranges is not None else d_state[:, :1]
    d_q, d_k, *grads = cast(Any, out)
    return _sum_groups(d_q, q), _sum_groups(d_k, k), *grads, *sums, d_state if ranges is not None else d_state[:, 0]


def _add(total, partial, used):
    """total + the sum of partial [B,HV,n,...] over its chunks, without those that no document has: nobody wrote what they read."""
    if partial is None:
        return None
    if used is not None:
        partial = jnp.where(used.reshape(used.shape[0], 1, used.shape[1], *(1,) * (partial.ndim - 3)), partial, 0)
    partial = jnp.sum(partial, axis=2)
    return partial if total is None else total + partial


def _sum_groups(x, like):
    """[B,T,HV,K] -> [B,T,H,K]: the value heads of a key head summed in float32."""
    batch, tokens, heads, size = like.shape
    if x.shape == like.shape:
        return x
    wide = x.reshape(batch, tokens, heads, -1, size)
    return jnp.sum(wide, axis=3, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)
