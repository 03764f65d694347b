"""Decay factors of one chunk and the inverse that the chunk needs.

Shapes: "..." any leading axes, C = 16 rows of a chunk, K key channels. Everything is in the accumulation dtype.

Every anchor is the start of the chunk (plus a constant), never a later row: with a middle anchor the rounding of a row would
depend on later gates (measured: 200 of 200 chunks change bits, with a past anchor none).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

HIGHEST = lax.Precision.HIGHEST


class Decays(NamedTuple):
    """Factors e^(...) of one chunk, from the sums G of its log decays up to and with a row."""

    row: jnp.ndarray  # [...,C,K] e^(G + shift); shift is 0 for an unbounded gate
    own: jnp.ndarray | None  # [...,C,K] 1 / row: row_i own_j = e^(G_i - G_j); None for an unbounded gate
    leave: jnp.ndarray  # [...,C,K] from the row to the chunk's end
    whole: jnp.ndarray  # [...,K] the whole chunk
    unshift: float  # e^-shift, which turns `row` into the decay from the chunk's start


def running_sum(x, reverse: bool = False, pairs=None):
    """Inclusive sum along axis -2. As a product with a 0/1 triangle: one dot, where a scan of shifted adds compiles 20% longer.

    pairs: bool [...,C,C], or None: row and column belong together. Then a row sums those of its own document only, and not a bit of
    it depends on the other documents of the chunk.
    """
    rows = x.shape[-2]
    triangle = np.tri(rows, dtype=bool).T if reverse else np.tri(rows, dtype=bool)
    triangle = jnp.asarray(triangle if pairs is None else pairs & triangle, x.dtype)
    return jnp.matmul(jnp.broadcast_to(triangle, (*x.shape[:-2], rows, rows)), x, precision=HIGHEST)


def shifted(x, by: int):
    """x [...,C,K] with its rows moved down by `by` (up when negative) and zeros in their place."""
    pad = (max(by, 0), max(-by, 0))
    kept = x[..., : x.shape[-2] - by, :] if by > 0 else x[..., -by:, :]
    return jnp.pad(kept, [(0, 0)] * (x.ndim - 2) + [pad, (0, 0)])


def decay_factors(g, lower_bound: float | None, pairs=None) -> Decays:
    """All factors of a chunk from its log decays g [...,C,K]; with a lower bound `row` and `own` lie within e^(+-8 * bound).

    pairs: as in `running_sum`. Factors then count from where the row's document enters the chunk; `leave` holds for rows of the
    chunk's last document, `whole` where one document fills the chunk.

    The shift centres that range: without it e^-80 times a small entry would be flushed to 0 in float32 (measured: output off by
    1.6e-3 at saturation). Without a bound nothing is divided: e^(decay to the end) is a sum of its own.
    """
    sums = running_sum(g, pairs=pairs)
    if lower_bound is None:
        row, leave = jnp.exp(sums), jnp.exp(shifted(running_sum(g, reverse=True), -1))
        return Decays(row, None, leave, row[..., -1, :], 1.0)
    shift = -lower_bound * g.shape[-2] / 2
    root = jnp.exp(sums / 2) * math.exp(shift / 2)  # sums + shift would round away the small gates of a slow channel
    row = root * root
    own = 1 / row
    # `whole` multiplies the state in every chunk, so it must be exactly 1 for g = 0: no shift forth and back.
    return Decays(row, own, row[..., -1:, :] * own, jnp.exp(sums[..., -1, :]), math.exp(-shift))


def inverse_unit_lower(lower):
    """(I + lower)^-1 for strictly lower triangular [...,C,C], C a power of 2, by merges of blocks 1 -> 2 -> 4 -> ... -> C.

    A merge is exact: the corner of two inverted blocks X is -X lower X. Never a power series: with keys of pairwise cosine 0.9
    that form is off by 4 at C = 64 even in float32.
    """
    size = lower.shape[-1]
    row, column = np.arange(size)[:, None], np.arange(size)
    inverse, width = jnp.eye(size, dtype=lower.dtype) - jnp.where(row // 2 == column // 2, lower, 0), 2
    while width < size:
        corner = (row // (2 * width) == column // (2 * width)) & (row // width != column // width)
        product = jnp.matmul(jnp.where(corner, lower, 0), inverse, precision=HIGHEST)
        inverse, width = inverse - jnp.matmul(inverse, product, precision=HIGHEST), 2 * width
    return inverse
