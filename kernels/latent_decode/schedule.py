"""Who reads what: the rows' entries, cut into one run of tiles for each program, however the rows differ in length.

Shapes: B rows, G programs. The tiles of all rows stand in one line, row after row; program g has those from g * size on, `size` of them.
It walks over the rows that these belong to; a row without entries has no tile and no place in the walk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Schedule(NamedTuple):
    """All int32."""

    offsets: jax.Array  # [B+1]: the first tile of each row, and the number of all
    order: jax.Array  # [B]: the rows that have tiles, in order; then B
    ranks: jax.Array  # [B]: the place of each row in `order`
    first: jax.Array  # [G]: the place in `order` of the row of each program's first tile
    size: jax.Array  # [1]: tiles of a program


def schedule(lengths, capacity: int, tile: int, programs: int) -> Schedule:
    """lengths: int32 [B]. What program g leaves of the row at place r stands in slot g + r: each step of the walk raises one or both."""
    rows = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    tiles = (jnp.clip(lengths, 0, capacity) + (tile - 1)) // tile
    # Sums over comparisons, not scans, scatters or sorts: XLA makes few small kernels of them.
    before = jnp.sum(jnp.where(rows[None, :] < rows[:, None], tiles, 0), axis=1, dtype=jnp.int32)
    total = tiles.sum(dtype=jnp.int32)
    ends = before + tiles
    size = jnp.maximum((total + (programs - 1)) // programs, 1)
    full = tiles > 0
    ranks = jnp.sum(full[None, :] & (rows[None, :] < rows[:, None]), axis=1, dtype=jnp.int32)
    order = jnp.sum((ranks + full)[None, :] <= rows[:, None], axis=1, dtype=jnp.int32)
    starts = jnp.arange(programs, dtype=jnp.int32) * size
    first = jnp.sum(full[None, :] & (ends[None, :] <= starts[:, None]), axis=1, dtype=jnp.int32)
    return Schedule(jnp.concatenate([before, total[None]]), order, ranks, first, size[None])
