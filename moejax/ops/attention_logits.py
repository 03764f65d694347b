"""Largest attention logit of each head, in blocks: what QK-Clip reads (Kimi K2, arXiv 2507.20534 section 2.1).

Shapes: B batch, T queries, S keys, H query heads, J key heads (J divides H), K query and key width, D model width, C
key-value latent, N key width a head from the latent, R width of the shared key.

Nothing here has a gradient. A block of keys is written out, then walked by the blocks of queries that may see it, so
neither [T,S] nor, from latents, the keys of a whole row exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..kernels.common import accumulation_dtype, require_float, require_rank
from ..kernels.varying import match_varying
from .attention import Layout, check_block, check_segment_ids, document_bounds, layout_of, segment_blocks, take_block, to_blocks
from .mla import MLAWeights, mla_project


def max_logits(q, k, *, scale=None, segment_ids=None, block=None) -> jax.Array:
    """Largest causal logit `scale q.k` of each head over all rows, inside documents.

    Args:
      q: [B,T,H,K].
      k: [B,T,J,K] with J dividing H; query head h uses key head h // (H // J).
      scale: None is K**-0.5.
      segment_ids: [B,T] int32 or None: 0 = padding, documents 1, 2, ... never decreasing along T but for padding. A token
        sees its own document only; padding is never read.
      block: most rows a block; None: see moejax.ops.attention.default_block.

    Returns:
      [H] float32 (float64 for float64 inputs); -inf where no token is real. No gradient flows. A NaN among the logits need not
      show: XLA's maximum over an array drops it on a CPU. It shows in the loss.

    Raises:
      ValueError: ranks, dtypes or shapes that do not fit, or an empty axis.
    """
    require_rank(4, "[B,T,H,K]", q=q, k=k)
    require_float(q=q, k=k)
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q {q.shape}, k {k.shape}: every axis must be at least 1; drop empty batches first.")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"q {q.shape}, k {k.shape} must be [B,T,H,K], [B,T,J,K] with J dividing H.")
    check_block(block)
    check_segment_ids(segment_ids, q.shape[:2])
    q, k = lax.stop_gradient((q, k))
    if segment_ids is not None:
        real = (segment_ids > 0)[:, :, None, None]
        q, k = jnp.where(real, q, 0), jnp.where(real, k, 0)
    layout = layout_of(q.shape[1], k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale, block)
    ks = to_blocks(k, layout.keys, layout.key, (k.shape[2],))
    return _walk(q, lambda j: take_block(ks, j), (k,), segment_ids, segment_ids, 0, layout, k.shape[2])


def latent_max_logits(
    q, latent, shared_key, k_up, *, scale=None, segment_ids=None, key_segment_ids=None, first_query: Any = 0, block=None
) -> jax.Array:
    """`max_logits` of MLA: keys come from latents, a block at a time. See moejax.ops.latent_attention.

    Args:
      q: [B,T,H,N+R], the N dimensions of the latent's key first.
      latent, shared_key: [B,S,C], [B,S,R]; S >= T.
      k_up: [C,H,N]; cast to the latent's dtype.
      segment_ids: [B,T] of the queries, or None.
      key_segment_ids: [B,S] of the keys; None: segment_ids.
      first_query: position of the first query among the keys (a shard of a row), an integer or an array [].

    Returns:
      [H], as max_logits. Shapes are checked by whoever makes q and the latents (mla_project).

    Raises:
      ValueError: key_segment_ids without segment_ids.
    """
    if segment_ids is None and key_segment_ids is not None:
        raise ValueError("key_segment_ids without segment_ids; give the queries' too.")
    q, latent, shared_key, k_up = lax.stop_gradient((q, latent, shared_key, k_up))
    key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
    if segment_ids is not None and key_segment_ids is not None:
        q = jnp.where((segment_ids > 0)[:, :, None, None], q, 0)
        real = (key_segment_ids > 0)[:, :, None]
        latent, shared_key = jnp.where(real, latent, 0), jnp.where(real, shared_key, 0)
    layout = layout_of(q.shape[1], latent.shape[1], q.shape[-1] ** -0.5 if scale is None else scale, block)
    joint = to_blocks(jnp.concatenate([latent, shared_key], -1)[:, :, None], layout.keys, layout.key, (1,))
    k_up, width = k_up.astype(latent.dtype), latent.shape[-1]

    def keys(j):
        rows = take_block(joint, j)[:, 0]
        own = jnp.einsum("bsc,chn->bhsn", rows[..., :width], k_up)
        shared = jnp.broadcast_to(rows[:, None, :, width:], (*own.shape[:3], rows.shape[-1] - width))
        return jnp.concatenate([own, shared], -1)

    return _walk(q, keys, (joint, k_up), segment_ids, key_segment_ids, first_query, layout, q.shape[2])


def mla_max_logits(x, weights: MLAWeights, *, segment_ids=None, scale=None, **rotary) -> jax.Array:
    """`max_logits` of a layer, from the arguments of moejax.ops.gated_mla: x [B,T,D] -> [H].

    In one program with gated_mla the compiler computes the projections once.
    """
    check_segment_ids(segment_ids, x.shape[:2])
    x, weights = lax.stop_gradient((x, weights))
    if segment_ids is not None:
        x = jnp.where((segment_ids > 0)[:, :, None], x, 0)
    q, latent, shared_key = mla_project(x, weights, **rotary)
    return latent_max_logits(q, latent, shared_key, weights.k_up, scale=scale, segment_ids=segment_ids)


def _walk(q, key_block: Callable[[Any], jax.Array], read, query_ids, key_ids, first_query, layout: Layout, key_heads: int) -> jax.Array:
    """key_block(j) -> [B,J,rows,K], made of the arrays `read`. Maxima are kept for each row of the batch: one reduction over
    it at the end, where rows may lie on many devices."""
    B, _, H, _ = q.shape
    qs = to_blocks(q, layout.queries, layout.query, (key_heads, H // key_heads))
    query_segments = segment_blocks(query_ids, layout.queries, layout.query)
    key_segments = segment_blocks(key_ids, layout.keys, layout.key)
    last = jnp.full((layout.keys,), layout.queries, jnp.int32)
    if query_segments is not None:
        last = document_bounds(query_segments, key_segments).last_query
    first_query = jnp.asarray(first_query, jnp.int32)

    def over_keys(top, j):
        keys, segments = key_block(j), take_block(key_segments, j)

        def over_queries(i, top):
            seen = _seen(i, j, take_block(query_segments, i), segments, first_query, layout)
            logits = jnp.einsum("bjgqd,bjsd->bjgqs", take_block(qs, i), keys, preferred_element_type=top.dtype) * layout.scale
            return jnp.maximum(top, jnp.where(seen, logits, -jnp.inf).max((-2, -1)))

        start = jnp.clip((j * layout.key - first_query) // layout.query, 0, layout.queries)
        return lax.fori_loop(start, last[j], over_queries, top), None

    top = jnp.full((B, key_heads, H // key_heads), -jnp.inf, accumulation_dtype(q))
    top = match_varying(top, q, first_query, *read, *(() if query_ids is None else (query_ids, key_ids)))
    top, _ = lax.scan(over_keys, top, jnp.arange(layout.keys, dtype=jnp.int32))
    return top.max(0).reshape(H)


def _seen(i, j, query_segments, key_segments, first_query, layout: Layout):
    """True where block i of the queries sees block j of the keys: [rows,rows] or [B,1,1,rows,rows]. Rows that only fill a
    block see nothing: their logits are 0, which may be more than any real one."""
    own = (i * layout.query + jnp.arange(layout.query))[:, None]
    at_key = (j * layout.key + jnp.arange(layout.key))[None, :]
    seen = (own < layout.query_length) & (at_key < layout.key_length) & (at_key <= own + first_query)
    if query_segments is None:
        return seen
    same = (query_segments[:, :, None] == key_segments[:, None, :]) & (query_segments > 0)[:, :, None]
    return (seen & same)[:, None, None]
