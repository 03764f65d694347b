"""The diagonal tiles of an unbounded gate: a pair's decay is carried row by row, so every exponent is one gate, <= 0.

Dense products would need e^(-sum of gates), which overflows float32 once 16 gates sum below -88 (a released model has -1736 in
one token). The forward pass holds one [R,K] array a tile, the backward pass R of them.

Shapes: "..." leading axes, I tiles, R = 16 rows of a tile, K key channels.
"""

import jax.numpy as jnp
from jax import lax

from ..varying import match_varying


def _rows_first(*arrays):
    """[...,I,R,D] -> [R,...,I,D] for a scan over the rows of all tiles at once."""
    return tuple(jnp.moveaxis(x, -2, 0) for x in arrays)


def _rows_back(*arrays):
    return tuple(jnp.moveaxis(x, 0, -2) for x in arrays)


def _insert(keys, i, key):
    """keys [...,R,K] with row i replaced: a select, which fuses with the decay before it."""
    return jnp.where(jnp.arange(keys.shape[-2])[:, None] == i, key[..., None, :], keys)


def pair_scores(q, k, decay):
    """sum_d x_i k_j prod(decay_{j+1..i}) for x = q and k: [...,I,R,K] each -> two [...,I,R,R]; columns after the row are 0."""
    rows = jnp.arange(k.shape[-2])
    zeros = match_varying(jnp.zeros_like(k), q, k, decay)

    def step(keys, row):
        i, q, k, decay = row
        keys = _insert(keys * decay[..., None, :], i, k)  # the row's own key enters undecayed
        return keys, (jnp.sum(keys * q[..., None, :], axis=-1), jnp.sum(keys * k[..., None, :], axis=-1))

    _, scores = lax.scan(step, zeros, (rows, *_rows_first(q, k, decay)))
    return _rows_back(*scores)


def pair_gradients(q, k, decay, d_q, d_k):
    """Gradients through pair_scores of its strictly lower part; d_q, d_k [...,I,R,R] are strictly lower triangular.

    Returns the gradients of q, of k as a row, of k as a column and of the log decays, each [...,I,R,K]. The last is summed over
    the pairs (i >= t > j) that the decay of row t really lies between: a difference of row and column sums would leave rounding
    of pairs that do not cross t, larger than the true value where e^g is tiny (measured: 1.4e-4 in the gradient of A_log).
    """
    rows = jnp.arange(k.shape[-2])
    zeros = match_varying(jnp.zeros_like(k), q, k, decay, d_q)
    q, k, decay, d_q, d_k = _rows_first(q, k, decay, d_q, d_k)

    def down(keys, row):
        i, k, decay, d_q, d_k = row
        before = keys * decay[..., None, :]
        sums = (jnp.sum(before * d_q[..., None], axis=-2), jnp.sum(before * d_k[..., None], axis=-2))
        return _insert(before, i, k), (before, *sums)

    def up(later, row):
        i, before, q, k, decay, d_q, d_k = row
        column = lax.dynamic_index_in_dim(later, i, -2, keepdims=False)
        here = later + d_q[..., None] * q[..., None, :] + d_k[..., None] * k[..., None, :]
        return here * decay[..., None, :], (column, jnp.sum(before * here, axis=-2))

    _, (before, grad_q, grad_row) = lax.scan(down, zeros, (rows, k, decay, d_q, d_k))
    _, (grad_column, grad_decay) = lax.scan(up, zeros, (rows, before, q, k, decay, d_q, d_k), reverse=True)
    return _rows_back(grad_q, grad_row, grad_column, grad_decay)
