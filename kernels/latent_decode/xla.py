"""latent_decode in plain XLA: a loop over blocks of entries with running softmax statistics, up to the longest row."""

import jax.numpy as jnp
from jax import lax

from ..common import accumulation_dtype
from ..varying import match_varying


def latent_decode_xla(q, latent, shared_key, lengths, valid, *, scale, block):
    """Operands as latent_decode; block at most S. Returns [B,T,H,C] in the accumulation dtype."""
    dtype = accumulation_dtype(q, latent, shared_key)
    cached, new = latent.shape[1], q.shape[1]
    at_query = lengths[:, None] - new + jnp.arange(new, dtype=jnp.int32)  # [B,T]

    def step(index, carry):
        top, total, acc = carry
        # The last block is a full one: no copy of the cache to pad it.
        start = jnp.minimum(index * block, cached - block)
        at_key = start + jnp.arange(block, dtype=jnp.int32)
        exists = (at_key >= index * block) & (at_key < lengths[:, None])  # [B,block]
        if valid is not None:
            exists &= lax.dynamic_slice_in_dim(valid, start, block, axis=1)
        cut = lambda x: jnp.where(exists[..., None], lax.dynamic_slice_in_dim(x, start, block, axis=1), 0)
        values, shared = cut(latent), cut(shared_key)
        keys = jnp.concatenate([values, shared], -1)
        seen = exists[:, None, :] & (at_key <= at_query[:, :, None])  # [B,T,block]
        scores = jnp.einsum("bthc,bsc->bths", q, keys, preferred_element_type=dtype) * scale
        scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(-1))
        shift = jnp.where(new_top == -jnp.inf, 0, new_top)
        decay, p = jnp.exp(top - shift), jnp.exp(scores - shift[..., None])
        add = jnp.einsum("bths,bsc->bthc", p.astype(values.dtype), values, preferred_element_type=dtype)
        return new_top, total * decay + p.sum(-1), acc * decay[..., None] + add

    rows = q.shape[:3]
    empty = (jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, latent.shape[2]), dtype))
    carry = tuple(match_varying(x, q, latent, lengths) for x in empty)
    # Every block starts below the longest length, so index * block stays an int32.
    stop = jnp.minimum((lengths.max() + block - 1) // block, -(-cached // block))
    _, total, acc = lax.fori_loop(jnp.zeros_like(stop), stop, step, carry)
    return acc / jnp.where(total == 0, 1, total)[..., None]
