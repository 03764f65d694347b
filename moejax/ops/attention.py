"""Blockwise softmax attention with its own gradient; memory grows linearly with length.

It runs everywhere. On an NVIDIA card `attention` takes a fused kernel instead where one fits: see attention_gpu.py.

Shapes: B batch, T queries, S keys, H query heads, J key and value heads (J divides H), K query and key width, V value
width.

Both passes walk pairs of (query block, key block) and keep only running statistics, so no [T,S] array exists. What is
saved for the gradient is the output and one log-sum-exp a row, in float32: rounding the output before the gradient uses
it biases the gradient of the scores (Kimi K3 report section 2.1.2 keeps it in float32 for that reason).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.common import accumulation_dtype, require_float, require_rank
from moejax.kernels.varying import match_varying
from moejax.ops.attention_gpu import AttentionFacts, attention_implementation, gpu_attention

LEAST_BLOCK, MOST_BLOCK = 128, 512


class Layout(NamedTuple):
    """What is static: `query` and `key` rows a block, their counts, the real lengths and the mask's shape."""

    query: int
    key: int
    queries: int
    keys: int
    query_length: int
    key_length: int
    causal: bool
    scale: float

    @property
    def offset(self) -> int:
        """Query t stands at key position t + offset: the last query sees the last key."""
        return self.key_length - self.query_length


def layout_of(T: int, S: int, scale: float, block: int | None, *, causal: bool = True) -> Layout:
    """T queries and S keys in blocks of at most `block` rows; None: see default_block."""
    block = default_block(max(T, S)) if block is None else block
    (queries, query), (keys, key) = split_rows(T, block), split_rows(S, block)
    return Layout(query, key, queries, keys, T, S, causal, float(scale))


class _Bounds(NamedTuple):
    """Smallest and largest document that matters to each block, [blocks] each: which pairs can be left out."""

    first_key: Any  # [query blocks] first key block a query block needs
    last_query: Any  # [key blocks] one past the last query block that needs a key block


def attention(q, k, v, *, scale=None, segment_ids=None, causal=True, block=None, implementation=None):
    """Softmax attention, `softmax(scale q k^T + mask) v`, computed in blocks.

    Args:
      q: [B,T,H,K].
      k: [B,S,J,K] with J dividing H; query head h uses key head h // (H // J).
      v: [B,S,J,V]; V may differ from K.
      scale: factor of the scores; None is K**-0.5.
      segment_ids: [B,T] int32 (needs S = T), 0 = padding, documents 1, 2, ... never decreasing along T but for
        padding. A token attends to its own document only. Padding may stand anywhere: it attends to nothing, its
        output is 0 and it is never read, in the gradient neither.
      causal: query t attends to keys at or before t + S - T (needs S >= T).
      block: most rows a block; None takes a 16th of the longer side, between 128 and 512. Lengths up to this take
        one block without a loop. Kernels of a card ignore it.
      implementation: "xla" (blockwise), "cudnn", "mosaic" (tokamax), or None to choose when it is lowered:
        `attention_implementation` tells which and why.

    Returns:
      [B,T,H,V] in v's dtype. Statistics and sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: wrong ranks, dtypes, shapes that do not agree, an empty axis, or an unknown implementation.
      NotImplementedError: a named implementation that cannot run here, with the reason.
    """
    _check(q, k, v, segment_ids, causal, block)
    T, S = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    real = None
    if segment_ids is not None:
        real = (segment_ids > 0)[:, :, None, None]
        q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
    layout = layout_of(T, S, scale, block, causal=causal)
    arrays = tuple(x for x in (q, k, v, segment_ids) if x is not None)
    q, k, v = (match_varying(x, *arrays) for x in (q, k, v))
    out: Any = _run(q, k, v, segment_ids, layout, implementation)
    return out if real is None else jnp.where(real, out, 0)


def _run(q, k, v, segment_ids, layout, implementation):
    """The implementation that is named, or the one chosen for the platform that this is lowered for."""
    name = attention_implementation("cuda", _facts(q, k, v, segment_ids, layout), implementation=implementation).name

    def blockwise(q, k, v):
        return _attention(q, k, v, segment_ids, layout)

    def kernel(q, k, v):
        return gpu_attention(name, blockwise, q, k, v, segment_ids, scale=layout.scale, causal=layout.causal)

    if name == "xla":
        return blockwise(q, k, v)
    if implementation is not None:
        return kernel(q, k, v)
    return lax.platform_dependent(q, k, v, cuda=kernel, default=blockwise)


def _facts(q, k, v, segment_ids, layout) -> AttentionFacts:
    dtypes = {str(x.dtype) for x in (q, k, v)}
    dtype = dtypes.pop() if len(dtypes) == 1 else "mixed"
    lengths = (layout.query_length, layout.key_length)
    return AttentionFacts(dtype, k.shape[3], v.shape[3], *lengths, layout.causal, segment_ids is not None)


def _check(q, k, v, segment_ids, causal, block):
    require_rank(4, "[B,T,H,K]", q=q, k=k, v=v)
    require_float(q=q, k=k, v=v)
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}: every axis must be at least 1; drop empty batches first."
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape} must be [B,T,H,K], [B,S,J,K], [B,S,J,V].")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads over {k.shape[2]} key heads: the key heads must divide the query heads."
        )
    if causal and k.shape[1] < q.shape[1]:
        raise ValueError(
            f"causal attention of {q.shape[1]} queries over {k.shape[1]} keys: keys must be at least as many."
        )
    check_block(block)
    check_segment_ids(segment_ids, q.shape[:2])
    if segment_ids is not None and k.shape[1] != q.shape[1]:
        raise ValueError(f"segment_ids need as many keys as queries, got {k.shape[1]} and {q.shape[1]}.")


def default_block(length: int) -> int:
    """Rows a block for a row of `length` tokens.

    CPU time of value and gradient on 2 cores, 4 heads: 8 rows of 256 tokens take 30, 35 and 60 ms with blocks of 64,
    128 and 256 rows; one row of 4096 tokens takes 443, 424, 645 and 1001 ms with 128, 256, 512 and 1024. Longer rows
    take larger blocks because an accelerator runs one step after the other.
    Command: python experiments/bench/attention_blocks.py
    """
    return min(max(-(-length // (16 * LEAST_BLOCK)) * LEAST_BLOCK, LEAST_BLOCK), MOST_BLOCK)


def check_block(block):
    """Raise ValueError unless block is None or an integer of at least 1."""
    if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(f"block={block!r}: it must be an integer of at least 1, or None.")


def check_segment_ids(segment_ids, shape):
    """Raise ValueError unless segment_ids is None or an int32 array of `shape` [B,T]."""
    if segment_ids is None:
        return
    if tuple(segment_ids.shape) != tuple(shape) or segment_ids.dtype != jnp.int32:
        raise ValueError(
            f"segment_ids has shape {tuple(segment_ids.shape)} and dtype {segment_ids.dtype}; "
            f"it must be int32 of shape {tuple(shape)}, 0 = padding, documents 1, 2, ..."
        )


def split_rows(length: int, block: int) -> tuple[int, int]:
    """(number of blocks, rows a block): as even as possible in multiples of 8, so 257 rows are not 256 + 1."""
    count = -(-length // block)
    if count == 1:
        return 1, length
    rows = min(block, (length + 8 * count - 1) // (8 * count) * 8)
    return -(-length // rows), rows


# Inside, blocks lead and heads come before rows: q [n,B,J,G,rows,K], k and v [n,B,J,rows,K], segments [n,B,rows].
# The pieces without a leading underscore also serve moejax.parallel, which walks latents of other shards.


def to_blocks(x, count, rows, heads):
    """[B,T,H,D] -> [count, B, *heads, rows, D], zero rows at the end."""
    x = jnp.pad(x, ((0, 0), (0, count * rows - x.shape[1]), (0, 0), (0, 0)))
    x = x.reshape(x.shape[0], count, rows, *heads, x.shape[-1])
    return jnp.moveaxis(jnp.moveaxis(x, 2, -2), 1, 0)


def from_blocks(x, length):
    """Inverse of to_blocks for any number of head axes: -> [B,T,H,D]."""
    x = jnp.moveaxis(jnp.moveaxis(x, 0, 1), -2, 2)
    batch, count, rows, width = x.shape[0], x.shape[1], x.shape[2], x.shape[-1]
    return x.reshape(batch, count * rows, -1, width)[:, :length]


def segment_blocks(segment_ids, count, rows):
    """[B,T] -> [count,B,rows], 0 at the end; None of None."""
    if segment_ids is None:
        return None
    padded = jnp.pad(segment_ids, ((0, 0), (0, count * rows - segment_ids.shape[1])))
    return jnp.moveaxis(padded.reshape(-1, count, rows), 1, 0)


def take_block(blocks, index) -> Any:
    """Block `index` of [n,...], or None of None."""
    return None if blocks is None else lax.dynamic_index_in_dim(blocks, index, keepdims=False)


def _mask(i, j, query_segments, key_segments, layout):
    """True where query block i may see key block j: [rows, rows] or [B,1,1,rows,rows]."""
    at_query = i * layout.query + jnp.arange(layout.query)[:, None] + layout.offset
    at_key = j * layout.key + jnp.arange(layout.key)[None, :]
    seen = at_key < layout.key_length
    if layout.causal:
        seen &= at_key <= at_query
    if query_segments is None:
        return seen
    same = (query_segments[:, :, None] == key_segments[:, None, :]) & (query_segments > 0)[:, :, None]
    return (seen & same)[:, None, None]


def _scores(q, k, mask, scale, dtype):
    scores = jnp.einsum("bjgqd,bjsd->bjgqs", q, k, preferred_element_type=dtype) * scale
    return jnp.where(mask, scores, -jnp.inf)


def _bounds(query_segments, key_segments, layout) -> _Bounds:
    """Pairs of blocks that can hold a visible pair, by position and, in packed rows, by document."""
    if query_segments is None:
        return _Bounds(jnp.zeros((layout.queries,), jnp.int32), jnp.full((layout.keys,), layout.queries, jnp.int32))
    return document_bounds(query_segments, key_segments)


def document_bounds(query_segments, key_segments) -> _Bounds:
    """Bounds by document alone of segments [blocks,B,rows]; documents never decrease along a row but for padding."""
    big = jnp.iinfo(jnp.int32).max
    lowest = lax.cummin(jnp.where(query_segments > 0, query_segments, big).min(-1), axis=0, reverse=True)  # [n,B]
    highest = lax.cummax(key_segments.max(-1), axis=0)
    before = jnp.sum(highest[:, None] < lowest[None], axis=0, dtype=jnp.int32)  # both rise: blocks of older documents
    reached = jnp.sum(lowest[:, None] <= highest[None], axis=0, dtype=jnp.int32)
    return _Bounds(before.min(-1), reached.max(-1))


def _key_range(i, bounds, layout):
    """Key blocks [start, stop) of query block i."""
    stop = jnp.asarray(layout.keys, jnp.int32)
    if layout.causal:
        stop = jnp.minimum(((i + 1) * layout.query + layout.offset - 1) // layout.key + 1, layout.keys)
    return bounds.first_key[i], stop


def _query_range(j, bounds, layout):
    """Query blocks [start, stop) of key block j."""
    start = jnp.asarray(0, jnp.int32)
    if layout.causal:
        start = jnp.clip((j * layout.key - layout.offset) // layout.query, 0, layout.queries)
    return start, bounds.last_query[j]


def _arrange(q, k, v, segment_ids, layout):
    heads = k.shape[2]
    qs = to_blocks(q, layout.queries, layout.query, (heads, q.shape[2] // heads))
    ks, vs = (to_blocks(x, layout.keys, layout.key, (heads,)) for x in (k, v))
    query_segments = segment_blocks(segment_ids, layout.queries, layout.query)
    key_segments = segment_blocks(segment_ids, layout.keys, layout.key)
    return qs, ks, vs, query_segments, key_segments


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, k, v, segment_ids, layout):
    return _forward(q, k, v, segment_ids, layout)[0]


def online_step(carry, q, k, v, mask, scale):
    """One key block of the running softmax: carry is (row maximum, sum of exponentials, weighted values)."""
    top, total, acc = carry
    scores = _scores(q, k, mask, scale, total.dtype)
    new_top = jnp.maximum(top, scores.max(-1))
    shift = jnp.where(new_top == -jnp.inf, 0, new_top)  # a row that has seen nothing: exp(-inf - 0) = 0, not NaN
    decay = jnp.exp(top - shift)
    p = jnp.exp(scores - shift[..., None])
    add = jnp.einsum("bjgqs,bjsv->bjgqv", p.astype(v.dtype), v, preferred_element_type=total.dtype)
    return new_top, total * decay + p.sum(-1), acc * decay[..., None] + add


def _forward(q, k, v, segment_ids, layout):
    dtype = accumulation_dtype(q, k, v)
    qs, ks, vs, query_segments, key_segments = _arrange(q, k, v, segment_ids, layout)

    def query_block(i, start, stop):
        q_i, segments_i = take_block(qs, i), take_block(query_segments, i)
        shape = q_i.shape[:-1]
        empty = (jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, vs.shape[-1]), dtype))
        carry = tuple(match_varying(x, q_i) for x in empty)

        def step(j, carry):
            mask = _mask(i, j, segments_i, take_block(key_segments, j), layout)
            return online_step(carry, q_i, take_block(ks, j), take_block(vs, j), mask, layout.scale)

        if layout.keys == 1:
            top, total, acc = step(0, carry)
        else:
            top, total, acc = lax.fori_loop(start, stop, step, carry)
        total = jnp.where(total == 0, 1, total)
        return acc / total[..., None], jnp.where(top == -jnp.inf, 0, top) + jnp.log(total)

    if layout.queries == layout.keys == 1:
        out, lse = (x[None] for x in query_block(0, 0, 1))
    else:
        bounds = _bounds(query_segments, key_segments, layout)
        out, lse = lax.map(
            lambda i: query_block(i, *_key_range(i, bounds, layout)), jnp.arange(layout.queries, dtype=jnp.int32)
        )
    result = from_blocks(out, layout.query_length).astype(v.dtype)
    return result, (q, k, v, segment_ids, out, lse)


def pair_gradient(q, k, v, d_out, lse, delta, mask, scale):
    """Gradients of one pair of blocks: (dq, dk, dv) in the accumulation dtype."""
    dtype = lse.dtype
    p = jnp.exp(_scores(q, k, mask, scale, dtype) - lse[..., None])
    dv = jnp.einsum("bjgqs,bjgqv->bjsv", p.astype(v.dtype), d_out, preferred_element_type=dtype)
    dp = jnp.einsum("bjgqv,bjsv->bjgqs", d_out, v, preferred_element_type=dtype)
    ds = (p * (dp - delta[..., None]) * scale).astype(q.dtype)
    dq = jnp.einsum("bjgqs,bjsd->bjgqd", ds, k, preferred_element_type=dtype)
    dk = jnp.einsum("bjgqs,bjgqd->bjsd", ds, q, preferred_element_type=dtype)
    return dq, dk, dv


def _backward(layout, saved, d_out):
    q, k, v, segment_ids, out, lse = saved
    dtype = lse.dtype
    qs, ks, vs, query_segments, key_segments = _arrange(q, k, v, segment_ids, layout)
    d_outs = to_blocks(d_out, layout.queries, layout.query, qs.shape[2:4])
    deltas = jnp.sum(out * d_outs.astype(dtype), -1)

    def pair(i, j, k_j, v_j, segments_j):
        mask = _mask(i, j, take_block(query_segments, i), segments_j, layout)
        q_i, d_out_i, lse_i, delta_i = (take_block(x, i) for x in (qs, d_outs, lse, deltas))
        return pair_gradient(q_i, k_j, v_j, d_out_i, lse_i, delta_i, mask, layout.scale)

    if layout.queries == layout.keys == 1:
        dq, dk, dv = (x[None] for x in pair(0, 0, ks[0], vs[0], take_block(key_segments, 0)))
    else:
        bounds = _bounds(query_segments, key_segments, layout)

        def key_block(dq, j):
            k_j, v_j, segments_j = take_block(ks, j), take_block(vs, j), take_block(key_segments, j)
            zeros = tuple(match_varying(jnp.zeros(x.shape, dtype), x) for x in (k_j, v_j))

            def step(i, carry):
                dq, dk, dv = carry
                dq_i, dk_i, dv_i = pair(i, j, k_j, v_j, segments_j)
                return lax.dynamic_update_index_in_dim(dq, take_block(dq, i) + dq_i, i, 0), dk + dk_i, dv + dv_i

            dq, dk, dv = lax.fori_loop(*_query_range(j, bounds, layout), step, (dq, *zeros))
            return dq, (dk, dv)

        zero = match_varying(jnp.zeros(qs.shape, dtype), qs)
        dq, (dk, dv) = lax.scan(key_block, zero, jnp.arange(layout.keys, dtype=jnp.int32))
    gradients = zip((dq, dk, dv), (q, k, v), strict=True)
    return (*(from_blocks(g, x.shape[1]).astype(x.dtype) for g, x in gradients), None)


_attention.defvjp(_forward, _backward)
