"""The diagonal tiles of an unbounded gate: a pair's decay is carried row by row, so every exponent is one gate, <= 0.

Dense products would need e^(-sum of gates), which overflows float32 once 16 gates sum below -88 (a released model has -1736 in
one token). Memory is one [R,K] array a tile, never [R,R,K].

Shapes: "..." leading axes with n0 first and I (tiles) last, R = 16 rows of a tile, K key channels.
"""

import jax.numpy as jnp
from jax import lax

from .varying import match_varying


def _rows_first(x):
    """[n0,...,I,R,K] -> [R,K,...,n0 * I]: rows lead for the scan, tiles last for wide vectors."""
    x = jnp.moveaxis(jnp.moveaxis(x, (-2, -1), (0, 1)), 2, -2)
    return x.reshape(*x.shape[:-2], -1)


def _rows_back(x, lead):
    x = x.reshape(*x.shape[:-1], lead[0], lead[-1])
    return jnp.moveaxis(jnp.moveaxis(x, -2, 2), (0, 1), (-2, -1))


def _decayed_keys(keys, row):
    """Keys of the rows so far, decayed to this row; the row's own key enters undecayed."""
    i, key, decay = row
    return lax.dynamic_update_index_in_dim(keys * decay, key, i, 0)


def pair_scores(q, k, decay):
    """sum_d x_i k_j prod(decay_{j+1..i}) for x = q and k: [...,I,R,K] each -> two [...,I,R,R]; columns after the row are 0."""
    lead = q.shape[:-2]
    q, k, decay = (_rows_first(x) for x in (q, k, decay))

    def step(keys, row):
        i, q, k, decay = row
        keys = _decayed_keys(keys, (i, k, decay))
        return keys, (jnp.sum(keys * q, axis=1), jnp.sum(keys * k, axis=1))

    _, scores = lax.scan(step, match_varying(jnp.zeros_like(k), q, k, decay), (jnp.arange(k.shape[0]), q, k, decay))
    return tuple(_rows_back(x, lead) for x in scores)


def pair_gradients(q, k, decay, d_q, d_k):
    """Gradients through pair_scores of its strictly lower part; d_q, d_k [...,I,R,R] are strictly lower triangular.

    Returns the gradients of q, of k as a row and of k as a column, each [...,I,R,K].
    """
    lead = q.shape[:-2]
    q, k, decay, d_q, d_k = (_rows_first(x) for x in (q, k, decay, d_q, d_k))
    rows = jnp.arange(k.shape[0])

    def down(keys, row):
        i, k, decay, d_q, d_k = row
        keys = _decayed_keys(keys, (i, k, decay))
        return keys, (jnp.sum(keys * d_q[:, None], axis=0), jnp.sum(keys * d_k[:, None], axis=0))

    def up(later, row):
        i, q, k, decay, d_q, d_k = row
        column = lax.dynamic_index_in_dim(later, i, 0, keepdims=False)
        return (later + d_q[:, None] * q + d_k[:, None] * k) * decay, column

    zeros = match_varying(jnp.zeros_like(k), q, k, decay, d_q)
    _, (grad_q, grad_row) = lax.scan(down, zeros, (rows, k, decay, d_q, d_k))
    _, grad_column = lax.scan(up, zeros, (rows, q, k, decay, d_q, d_k), reverse=True)
    return tuple(_rows_back(x, lead) for x in (grad_q, grad_row, grad_column))
