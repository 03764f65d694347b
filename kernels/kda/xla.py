"""KDA in chunks of 16 tokens with its own gradient, in plain XLA: the form that runs on every platform.

Two levels: a scan over windows of chunks; inside a window everything that does not need the state is done for all chunks at once,
and a short scan carries the state. The forward pass keeps its inputs and one state a window; the backward pass redoes a window,
so memory beyond inputs and outputs does not grow with the number of chunks (arrays of size [C,C,K] never exist).

Shapes: B batch, T tokens, H query/key heads, HV value heads, K key channels, V value channels, n chunks of C = 16 tokens in a
window, W = n * C, N documents of a row.
"""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from ..varying import match_varying
from . import chunk as one
from .layout import CHUNK, Packed, aligned_chunks, aligned_layout, chunk_masks, packed_layout

# Numbers of one array [B,W,HV,K] of a window: at 256 KiB the arrays of a window stay in a core's caches (H = 8, K = V = 128,
# forward: 37 ms where windows of 512 tokens take 65 ms). At least 128 tokens, so that the states kept for the backward pass are
# no larger than an operand; at most 512. Never by T: the numbers of a prefix must not depend on the length.
WINDOW_SIZE, WINDOW_TOKENS = 2**16, (128, 512)


class Plan(NamedTuple):
    """What is fixed at trace time."""

    scale: float
    lower_bound: float | None
    windows: int
    chunks: int  # a window
    precision: lax.Precision


def kda_chunked(q, k, v, g, beta, *, scale, lower_bound, initial_state, documents=None, window: int | None = None):
    """The recurrence of kda_reference in chunks; same arguments and results, and lower_bound as in `kda`.

    q, k, v, g, beta in any of float32, bfloat16, float64; initial_state in the accumulation dtype. `window` is in tokens (None: chosen from
    the other sizes).
    Rows of several documents: without a state per document, boundaries fall anywhere in a chunk and are masked, nothing is moved;
    with one (initial_state of rank 5) each document is laid out from a chunk's start, at most 15 tokens more a document.
    """
    tokens = q.shape[1]
    if window is None:
        size = q.shape[0] * v.shape[2] * max(q.shape[3], v.shape[3])
        window = min(max(WINDOW_SIZE // size, WINDOW_TOKENS[0]), WINDOW_TOKENS[1])
    per_document = initial_state.ndim == 5
    needed = aligned_chunks(tokens, initial_state.shape[1]) if per_document else -(-tokens // CHUNK)
    windows = -(-needed * CHUNK // window)
    chunks = -(-needed // windows)
    precision = lax.Precision.DEFAULT if v.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    plan = Plan(scale, lower_bound, windows, chunks, precision)
    length = windows * chunks * CHUNK
    operands, run = (q, k, v, g, beta), cast(Any, _core)
    if per_document:
        aligned = aligned_layout(documents, initial_state.shape[1], windows * chunks)
        operands = (_move(x, aligned.source, aligned.used) for x in operands)
        o, final = run(plan, *operands, initial_state, aligned.rows)
        return _move(o, aligned.place, None), final
    layout = None if documents is None else packed_layout(documents, length)
    operands = (jnp.pad(x, [(0, 0), (0, length - tokens)] + [(0, 0)] * (x.ndim - 2)) for x in operands)
    o, final = run(plan, *operands, initial_state, layout)
    return o[:, :tokens], final


def _move(x, source, used):
    """x [B,T,...] read at source [B,S]; 0 where not used."""
    moved = jnp.take_along_axis(x, source.reshape(source.shape + (1,) * (x.ndim - 2)), axis=1)
    return moved if used is None else jnp.where(used.reshape(used.shape + (1,) * (x.ndim - 2)), moved, 0)


def _to_chunks(x, dtype, repeat=1):
    """[B,W,H,D] -> [n,B,H*repeat,C,D]; [B,W,H] -> [n,B,H,C,1]."""
    x = x if x.ndim == 4 else x[..., None]
    batch, tokens, heads, size = x.shape
    x = jnp.transpose(x.reshape(batch, tokens // CHUNK, CHUNK, heads, size), (1, 0, 3, 2, 4)).astype(dtype)
    return x if repeat == 1 else jnp.repeat(x, repeat, axis=2)


def _from_chunks(x, like):
    """[n,B,HV,C,D] -> [B,W,H,D] in the dtype of `like`, value heads of one key head summed when `like` has fewer heads."""
    n, batch, heads, _, size = x.shape
    if heads != like.shape[2]:
        x = jnp.sum(x.reshape(n, batch, like.shape[2], -1, CHUNK, size), axis=3)
    x = jnp.transpose(x.astype(like.dtype), (1, 0, 3, 2, 4))
    return x.reshape(batch, n * CHUNK, -1, size) if like.ndim == 4 else x.reshape(batch, n * CHUNK, -1)


def _over_windows(plan: Plan, body, carry, arrays, starts=None, reverse=False):
    """body(carry, window's slice of arrays [B,T,...], its start state) over the windows; outputs [B,W,...] joined along T.

    The first output of body is joined, the second stacked.
    """
    if plan.windows == 1:
        carry, (joined, stacked) = body(carry, arrays, jax.tree.map(lambda x: x[0], starts))
        return carry, joined, jax.tree.map(lambda x: x[None], stacked)

    def take(x, w):
        size = x.shape[1] // plan.windows
        return lax.dynamic_slice_in_dim(x, w * size, size, axis=1)

    def step(carry, x):
        w, start = x
        return body(carry, jax.tree.map(lambda a: take(a, w), arrays), start)

    carry, (joined, stacked) = lax.scan(step, carry, (jnp.arange(plan.windows), starts), reverse=reverse)
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    return carry, jax.tree.map(join, joined), stacked


def _window(plan: Plan, q, k, v, g, beta, *, layout, dtype):
    """Chunked v and g, what is prepared from the operands, masks and table rows, for one window."""
    repeat = v.shape[2] // q.shape[2]
    q, k = _to_chunks(q, dtype, repeat), _to_chunks(k, dtype, repeat)
    v, g, beta = (_to_chunks(x, dtype) for x in (v, g, beta))
    packed = isinstance(layout, Packed)
    masks = chunk_masks(layout) if packed else None
    rows = None if packed or layout is None else jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), layout)
    return one.prepare(q, k, g, beta, masks, scale=plan.scale, lower_bound=plan.lower_bound), v, g, masks, rows


def _forward(plan: Plan, q, k, v, g, beta, initial, layout):
    """-> o, final, the state at each window's start [windows,B,HV,K,V]."""
    table = initial if initial.ndim == 5 else None
    state = initial if table is None else match_varying(jnp.zeros_like(initial[:, 0]), initial)

    def body(carry, arrays, _):
        *operands, layout = arrays
        prepared, v_chunks, _, _, rows = _window(plan, *operands, layout=layout, dtype=initial.dtype)
        end, o = one.walk(prepared, v_chunks, carry[0], carry[1], table, rows, plan.precision, keep=False)
        return end, (_from_chunks(o, v), carry[0])

    (state, table), o, starts = _over_windows(plan, body, (state, table), (q, k, v, g, beta, layout))
    return o, (state if table is None else table), starts


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(plan: Plan, q, k, v, g, beta, initial, layout) -> Any:
    o, final, _ = _forward(plan, q, k, v, g, beta, initial, layout)
    return o, final


def _core_fwd(plan, q, k, v, g, beta, initial, layout):
    o, final, starts = _forward(plan, q, k, v, g, beta, initial, layout)
    return (o, final), (q, k, v, g, beta, initial, layout, starts)


def _core_bwd(plan, residuals, cotangents):
    q, k, v, g, beta, initial, layout, starts = residuals
    d_o, d_final = cotangents
    table = initial if initial.ndim == 5 else None
    d_state = d_final if table is None else match_varying(jnp.zeros_like(d_final[:, 0]), d_final)
    d_table = None if table is None else d_final

    def body(carry, arrays, start):
        *operands, layout, d_o = arrays
        prepared, v_chunks, g_chunks, masks, rows = _window(plan, *operands, layout=layout, dtype=initial.dtype)
        _, (states, x) = one.walk(prepared, v_chunks, start, table, table, rows, plan.precision, keep=True)
        y = jnp.matmul(prepared.inverse, x, precision=plan.precision)
        d_o = _to_chunks(d_o, initial.dtype)
        carry, back = one.walk_back(prepared, d_o, states, y, carry[0], carry[1], d_final, rows, plan.precision)
        d_q, d_k, d_g, d_beta = one.gradients(prepared, g_chunks, masks, d_o, y, back, scale=plan.scale, precision=plan.precision)
        grads = (d_q, d_k, back.d_v, d_g, d_beta[..., None])
        return carry, (tuple(_from_chunks(x, like) for x, like in zip(grads, operands, strict=True)), None)

    arrays = (q, k, v, g, beta, layout, d_o)
    (d_state, d_table), grads, _ = _over_windows(plan, body, (d_state, d_table), arrays, starts, reverse=True)
    return (*grads, d_state if table is None else d_table, None)


_core.defvjp(_core_fwd, _core_bwd)
