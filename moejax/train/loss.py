"""Next-token cross-entropy over a large vocabulary, in chunks of tokens.

Shapes: B batch, T tokens, N tokens in all, D model width, V vocabulary, G groups.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..kernels.common import accumulation_dtype


def next_token_targets(tokens: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Targets of each position and whether the position counts: the next token must belong to the same document.

    Args:
      tokens: [B,T] int32. segment_ids: [B,T] int32, 0 = padding; None: one document a row.

    Returns:
      (targets [B,T] int32, valid [B,T] bool).
    """
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    # Not jnp.roll(...).at[:, -1].set(0): XLA of jax 0.10.2 computes that wrong where a mesh cuts T into unequal shards.
    targets, following = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (tokens, segment_ids))
    return targets, (segment_ids == following) & (segment_ids != 0)


def chunked_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    valid: jax.Array,
    *,
    chunk: int = 1024,
    groups: jax.Array | None = None,
    num_groups: int = 0,
) -> Any:
    """Sum of -log softmax(hidden @ head)[target] over valid tokens, in nats, without a [N,V] array in memory.

    Args:
      hidden: [N,D]. head: [D,V], cast to hidden.dtype. targets: [N] int32. valid: [N] bool.
      chunk: tokens whose logits exist at one time; the backward pass computes them again.
      groups: [N] int32 in [0, num_groups), to see which tokens the loss comes from; None: not asked.

    Returns:
      [] float32 (float64 for float64 inputs). Invalid positions are not read. With `groups`: that, and [2,G] float32: nats and
      tokens of each group, without a gradient.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1.")
    if (groups is None) != (num_groups == 0):
        raise ValueError(f"num_groups is {num_groups} {'without' if groups is None else 'with'} groups; give both or neither.")
    tokens = hidden.shape[0]
    chunk = min(chunk, tokens)
    wide = accumulation_dtype(hidden)
    hidden = jnp.where(valid[:, None], hidden, 0)
    pad = -tokens % chunk

    def split(x: jax.Array) -> jax.Array:
        """[N,...] -> [chunks,chunk,...]. A chunk takes tokens from all over, so that every shard of N works on each."""
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(chunk, -1, *x.shape[1:]), 1, 0)

    parts = (split(hidden), split(jnp.where(valid, targets, 0)), split(valid), None if groups is None else split(groups))
    head = head.astype(hidden.dtype)

    @jax.checkpoint
    def add(totals, part):
        h, target, counted, group = part
        logits = jnp.matmul(h, head, preferred_element_type=wide)
        picked = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        nats = jnp.where(counted, jax.nn.logsumexp(logits, axis=1) - picked, 0)
        total, sums = totals
        if group is not None:
            sums += _sums_by_group(jax.lax.stop_gradient(nats), counted, group, num_groups)
        return (total + jnp.sum(nats), sums), None

    with jax.named_scope("vocabulary_loss"):
        zeros = (jnp.zeros((), wide), jnp.zeros((2, num_groups), jnp.float32))
        (total, sums), _ = jax.lax.scan(add, zeros, parts)
    return total if groups is None else (total, sums)


def _sums_by_group(nats: jax.Array, counted: jax.Array, group: jax.Array, num_groups: int) -> jax.Array:
    """[2,G] float32. Sums under a mask, not a scatter: they shard over tokens and are the same bits in every run on a GPU."""
    member = (group[:, None] == jnp.arange(num_groups)) & counted[:, None]
    return jnp.stack([jnp.sum(jnp.where(member, nats[:, None], 0), axis=0), jnp.sum(member, axis=0)]).astype(jnp.float32)
