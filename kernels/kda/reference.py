"""KDA token by token: the plain twin of every faster form, and the oracle of the tests.

Shapes: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K key channels, V value channels,
N documents of a row.
"""

import jax.numpy as jnp
from jax import lax

from ..varying import match_varying


def kda_reference(q, k, v, g, beta, *, scale, initial_state, documents=None):
    """The recurrence as one `lax.scan` over tokens; exact in the dtype given, differentiable by autodiff.

    S <- Diag(exp g) S;  S <- S + beta k (v - S^T k)^T;  o = scale S^T q        (Kimi K3 report section 2.1.1)

    q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV,K]; beta [B,T,HV], all of one float dtype. initial_state [B,HV,K,V] and
    documents [B,T] (filled ids, or None): the state restarts from zero where the id changes. Or initial_state [B,N,HV,K,V]:
    one state a document, document i in row i - 1. Returns o [B,T,HV,V] and the final state, shaped as the initial one.
    Memory of the gradient: one state a token.
    """
    repeat = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(x, repeat, axis=2) for x in (q, k))
    per_document = initial_state.ndim == 5
    rows = jnp.arange(q.shape[0])
    if documents is None:
        documents = jnp.zeros(q.shape[:2], jnp.int32)
    starts = jnp.diff(documents, axis=1, prepend=documents[:, :1]) != 0

    def token(states, x):
        q, k, v, g, beta, document, start = x
        if per_document:
            row = jnp.maximum(document - 1, 0)
            state = states[rows, row]
        else:
            state = jnp.where(start[:, None, None, None], 0, states)
        state = jnp.exp(g)[..., None] * state
        error = v - jnp.einsum("bhkv,bhk->bhv", state, k, precision=lax.Precision.HIGHEST)
        state = state + (beta[..., None] * k)[..., None] * error[..., None, :]
        o = jnp.einsum("bhkv,bhk->bhv", state, q * scale, precision=lax.Precision.HIGHEST)
        return (states.at[rows, row].set(state) if per_document else state), o

    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, documents, starts))
    final, o = lax.scan(token, match_varying(initial_state, *xs), xs)
    return jnp.moveaxis(o, 0, 1), final
