"""Decay factors and pair scores of one chunk, in tiles of 16 rows, and the inverse that the chunk needs.

Shapes: "..." any leading axes, C tokens of a chunk, I row tiles and J column tiles of a chunk, R = 16 rows of a tile,
K key channels. Everything is in the accumulation dtype.

Every anchor is a cumulative decay at or before the first row that uses it (plus a constant), never a later row: with a middle
anchor the rounding of a row would depend on later gates (measured: 200 of 200 tiles change bits, with a past anchor none).
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .varying import match_varying

ROWS = 16
HIGHEST = lax.Precision.HIGHEST


class Decays(NamedTuple):
    """Factors e^(...) of one chunk; `shift` is a constant that cancels in each product of a row and a column factor."""

    row: jnp.ndarray  # [...,I,R,K] from row 0 of the tile to the row, times e^shift
    own: jnp.ndarray | None  # [...,I,R,K] 1 / row: the column factor within the tile; None for an unbounded gate
    suffix: jnp.ndarray  # [...,J,R,K] from the row to the end of its tile
    across: jnp.ndarray  # [...,I,J,K] from the end of tile J to row 0 of tile I, times e^-shift; 0 unless J < I
    enter: jnp.ndarray  # [...,I,R,K] from the chunk's start to the row
    leave: jnp.ndarray  # [...,J,R,K] from the row to the chunk's end
    whole: jnp.ndarray  # [...,K] the whole chunk


def running_sum(x, reverse: bool = False):
    """Inclusive sum along axis -2. As a product with a 0/1 triangle: one dot, where a scan of shifted adds compiles 20% longer."""
    rows = x.shape[-2]
    triangle = np.tri(rows).T if reverse else np.tri(rows)
    triangle = jnp.broadcast_to(jnp.asarray(triangle, x.dtype), (*x.shape[:-2], rows, rows))
    return jnp.matmul(triangle, x, precision=HIGHEST)


def _tile_sums(tiles: int) -> np.ndarray:
    """0/1 matrix [tiles * tiles + 2 * tiles + 1, 2 * tiles] over (whole tile sums, first rows): rows across, enter, leave, whole."""
    out = np.zeros((tiles * tiles + 2 * tiles + 1, 2 * tiles))
    for i in range(tiles):
        for j in range(i):
            out[i * tiles + j, j + 1 : i] = 1
            out[i * tiles + j, tiles + i] = 1
        out[tiles * tiles + i, :i] = 1
        out[tiles * tiles + i, tiles + i] = 1
        out[tiles * tiles + tiles + i, i + 1 : tiles] = 1
    out[-1, :tiles] = 1
    return out


def decay_factors(g, lower_bound: float | None) -> Decays:
    """All factors of a chunk from its log decays g [...,C,K]; with a lower bound every factor lies within e^(+-7.5 * bound).

    Each exponent is a sum of gates of one sign over exactly the rows it spans, not a difference of long cumulative sums:
    e^(G_i - G_j) with |G| near 300 would be wrong by 1.5e-5 in float32.
    """
    tiles = g.shape[-2] // ROWS
    g = g.reshape(*g.shape[:-2], tiles, ROWS, g.shape[-1])
    first = jnp.arange(ROWS)[:, None] == 0
    within = running_sum(jnp.where(first, 0, g))
    backward = running_sum(g, reverse=True)
    suffix = jnp.exp(jnp.pad(backward[..., 1:, :], [(0, 0)] * (g.ndim - 2) + [(0, 1), (0, 0)]))
    ends = jnp.concatenate([backward[..., 0, :], g[..., 0, :]], axis=-2)  # [...,2I,K]
    pick = jnp.asarray(_tile_sums(tiles), g.dtype)
    factors = jnp.exp(jnp.sum(pick[:, :, None] * ends[..., None, :, :], axis=-2))
    across = factors[..., : tiles * tiles, :].reshape(*g.shape[:-3], tiles, tiles, g.shape[-1])
    enter, leave = (factors[..., tiles * (tiles + n) : tiles * (tiles + n + 1), None, :] for n in (0, 1))
    shift = 0.0 if lower_bound is None else -lower_bound * (ROWS - 1) / 2
    row = jnp.exp(within + shift)
    lower = (np.arange(tiles)[:, None] > np.arange(tiles))[:, :, None]
    across = jnp.where(lower, across * float(np.exp(-shift)), 0)
    return Decays(
        row=row,
        own=None if lower_bound is None else 1 / row,
        suffix=suffix,
        across=across,
        enter=row * (enter * float(np.exp(-shift))),
        leave=suffix * leave,
        whole=factors[..., -1, :],
    )


def column_factors(decays: Decays):
    """[...,I,J,R,K]: what a column's key is multiplied with for the rows of tile I; 0 for later tiles."""
    off = decays.suffix[..., None, :, :, :] * decays.across[..., None, :]
    if decays.own is None:
        return off
    tiles = off.shape[-3]
    return jnp.where(np.eye(tiles, dtype=bool)[:, :, None, None], decays.own[..., None, :, :, :], off)


def inverse_unit_lower(lower):
    """(I + lower)^-1 for strictly lower triangular [...,C,C]: substitution on 16-row blocks, then merges 16 -> 32 -> ... -> C.

    Never a power series: with keys of pairwise cosine 0.9 that form is off by 4 at C = 64 even in float32.
    """
    size = lower.shape[-1]
    tiles = size // ROWS
    blocks = lower.reshape(*lower.shape[:-2], tiles, ROWS, tiles, ROWS)
    diagonal = jnp.stack([blocks[..., i, :, i, :] for i in range(tiles)], axis=-3)  # [...,I,R,R]
    inverse = [x[..., 0, :, :] for x in jnp.split(_substitute(diagonal), tiles, axis=-3)]
    width = ROWS
    while width < size:
        merged = []
        for n in range(0, len(inverse), 2):
            top, bottom, at = inverse[n], inverse[n + 1], (n + 1) * width
            corner = lower[..., at : at + width, at - width : at]
            corner = -jnp.matmul(bottom, jnp.matmul(corner, top, precision=HIGHEST), precision=HIGHEST)
            upper = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
            merged.append(jnp.concatenate([upper, jnp.concatenate([corner, bottom], axis=-1)], axis=-2))
        inverse, width = merged, 2 * width
    return inverse[0]


def _substitute(blocks):
    """Forward substitution on unit lower triangular blocks I + blocks, [n0,...,I,R,R] -> the inverses, same shape.

    The axes n0 and I go last, so that each of the 16 steps is one wide vector operation.
    """
    lead = blocks.shape[:-2]
    x = jnp.moveaxis(blocks, (-2, -1), (0, 1))  # [R,R,n0,...,I]
    x = jnp.moveaxis(x, 2, -2)
    x = x.reshape(*x.shape[:-2], -1)  # [R,R,...,n0 * I]
    unit = jnp.eye(ROWS, dtype=x.dtype).reshape(ROWS, ROWS, *(1,) * (x.ndim - 2))

    def step(done, row):
        i, coefficients, one = row
        # 16 products written out: as a reduction XLA's CPU backend runs it 10 times slower
        new = one - sum(coefficients[j] * done[j] for j in range(ROWS))
        return lax.dynamic_update_index_in_dim(done, new, i, 0), None

    done, _ = lax.scan(step, match_varying(jnp.zeros_like(x), x), (jnp.arange(ROWS), x, unit))
    done = done.reshape(*done.shape[:-1], lead[0], lead[-1])
    return jnp.moveaxis(jnp.moveaxis(done, -2, 2), (0, 1), (-2, -1))
