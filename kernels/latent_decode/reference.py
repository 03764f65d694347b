"""latent_decode by its formula: one softmax over all entries. It writes out scores [B,T,H,S]; for tests."""

import jax
import jax.numpy as jnp

from ..common import accumulation_dtype


def latent_decode_reference(q, latent, shared_key, lengths, valid, *, scale):
    """Operands as latent_decode; float64 in, float64 throughout. Returns [B,T,H,C] in the accumulation dtype."""
    dtype = accumulation_dtype(q, latent, shared_key)
    at = jnp.arange(latent.shape[1])
    exists = at < lengths[:, None]  # [B,S]
    if valid is not None:
        exists &= valid
    latent, shared_key = (jnp.where(exists[:, :, None], x, 0).astype(dtype) for x in (latent, shared_key))
    at_query = lengths[:, None] - q.shape[1] + jnp.arange(q.shape[1])  # [B,T]
    seen = (exists[:, None] & (at <= at_query[:, :, None]))[:, :, None]  # [B,T,1,S]
    keys = jnp.concatenate([latent, shared_key], -1)
    scores = scale * jnp.einsum("bthc,bsc->bths", q.astype(dtype), keys)
    p = jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), 0)  # a query that sees nothing has NaN here
    return jnp.einsum("bths,bsc->bthc", p, latent)
