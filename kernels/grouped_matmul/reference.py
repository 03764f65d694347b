"""Plain grouped product: every group multiplies every row, a mask keeps what belongs to it. Work grows with N * E."""

import jax.numpy as jnp
from jax import lax

from ..common import accumulation_dtype
from ..varying import match_varying


def grouped_matmul(x, w, group_sizes):
    """x [N,K], w [E,K,M], group_sizes [E] -> [N,M]; see api.grouped_matmul."""
    stops = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])

    def add(out, group):
        start, stop, matrix = group
        mine = ((row >= start) & (row < stop))[:, None]
        product = jnp.matmul(jnp.where(mine, x, 0), matrix, preferred_element_type=out.dtype)
        return jnp.where(mine, product, out), None

    zero = match_varying(jnp.zeros((x.shape[0], w.shape[2]), accumulation_dtype(x, w)), x)
    return lax.scan(add, zero, (stops - group_sizes, stops, w))[0].astype(x.dtype)
