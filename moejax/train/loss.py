"""Next-token cross-entropy over a large vocabulary, in chunks of tokens.

Shapes: B batch, T tokens, N tokens in all, D model width, V vocabulary.
"""

from __future__ import annotations

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
    hidden: jax.Array, head: jax.Array, targets: jax.Array, valid: jax.Array, *, chunk: int = 1024
) -> jax.Array:
    """Sum of -log softmax(hidden @ head)[target] over valid tokens, in nats, without a [N,V] array in memory.

    Args:
      hidden: [N,D]. head: [D,V], cast to hidden.dtype. targets: [N] int32. valid: [N] bool.
      chunk: tokens whose logits exist at one time; the backward pass computes them again.

    Returns:
      [] float32 (float64 for float64 inputs). Invalid positions are not read.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1.")
    tokens = hidden.shape[0]
    chunk = min(chunk, tokens)
    wide = accumulation_dtype(hidden)
    hidden = jnp.where(valid[:, None], hidden, 0)
    pad = -tokens % chunk

    def split(x: jax.Array) -> jax.Array:
        """[N,...] -> [chunks,chunk,...]. A chunk takes tokens from all over, so that every shard of N works on each."""
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(chunk, -1, *x.shape[1:]), 1, 0)

    parts = (split(hidden), split(jnp.where(valid, targets, 0)), split(valid))
    head = head.astype(hidden.dtype)

    @jax.checkpoint
    def add(total, part):
        h, target, counted = part
        logits = jnp.matmul(h, head, preferred_element_type=wide)
        picked = jnp.take_along_axis(logits, target[:, None], axis=1)[:, 0]
        nats = jax.nn.logsumexp(logits, axis=1) - picked
        return total + jnp.sum(jnp.where(counted, nats, 0)), None

    with jax.named_scope("vocabulary_loss"):
        return jax.lax.scan(add, jnp.zeros((), wide), parts)[0]
