"""Sorted rows cut into blocks of fixed size, each inside one group: the plan and the steps of a loop over it.

Shapes: N rows, E groups, G blocks at most, R rows a block.

The rows of a group lie together, so a block is a plain slice of R rows from its start. The last block of a group
reaches into the next group; a loop in ascending order writes those rows again with the right values, so no gather, no
scatter and no padded copy are needed. The loop runs over the blocks that exist, sum(ceil(size / R)), not over the worst
case.

CPU time of value and both gradients on 2 cores, float32, 8192 rows, (E, K, M) = (32, 64, 128) and (64, 128, 256): this
loop 8 and 45 ms; blocks gathered into one batched product 13 and 80 ms (it also copies a matrix a block); masked loop
over groups 274 and 1689 ms; jax.lax.ragged_dot 365 and 2500 ms. Command: python experiments/bench/grouped_matmul.py
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..varying import match_varying

MOST_ROWS = 128  # 32 to 256 are within a few per cent at 256 rows a group; 128 is the fastest at 128 rows a group
LEAST_ROWS = 8


class BlockPlan(NamedTuple):
    """Blocks in ascending order of rows; entries from `count` on are not used."""

    group: Any  # [G] int32
    start: Any  # [G] int32, first row
    stop: Any  # [G] int32, end of the block's own rows (at most start + R)
    count: Any  # [] int32
    rows: int  # R, static


def block_rows(rows: int, groups: int) -> int:
    """Rows a block for `rows` rows over `groups` groups: the power of two at the mean group size, from 8 to 128."""
    mean = max(rows // groups, 1)
    return min(max(1 << (mean - 1).bit_length(), LEAST_ROWS), MOST_ROWS)


def plan_blocks(group_sizes, rows: int) -> BlockPlan:
    """group_sizes [E] int32 over `rows` sorted rows -> BlockPlan. Sizes beyond `rows` in sum are cut off at `rows`."""
    groups = group_sizes.shape[0]
    size = block_rows(rows, groups)
    most = (rows + min(groups, rows) * (size - 1)) // size
    row_stop = jnp.minimum(jnp.cumsum(group_sizes, dtype=jnp.int32), rows)
    row_start = jnp.concatenate([jnp.zeros_like(row_stop[:1]), row_stop[:-1]])
    count = (row_stop - row_start + size - 1) // size
    block_stop = jnp.cumsum(count, dtype=jnp.int32)
    block = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(block_stop, block, side="right", method="scan_unrolled").astype(jnp.int32)
    group = jnp.minimum(group, groups - 1)
    start = row_start[group] + (block - (block_stop - count)[group]) * size
    return BlockPlan(group, start, jnp.minimum(row_stop[group], start + size), block_stop[-1], size)


def for_each_block(plan: BlockPlan, body, carry, like):
    """body(block index, carry) -> carry over the blocks in use; `like` varies over the mesh axes the results do."""
    carry = jax.tree.map(lambda x: match_varying(x, like), carry)
    return lax.fori_loop(jnp.zeros_like(plan.count), plan.count, body, carry)


def pad_rows(x, plan: BlockPlan):
    """[N,...] -> [N+R,...]: so that the last block's slice does not run out."""
    return jnp.pad(x, ((0, plan.rows), *((0, 0),) * (x.ndim - 1)))


def own_rows(plan: BlockPlan, block):
    """[R,1] bool: rows of the block's slice that belong to its group."""
    row = plan.start[block] + jnp.arange(plan.rows, dtype=jnp.int32)
    return (row < plan.stop[block])[:, None]


def read_rows(x, plan: BlockPlan, block):
    """Rows of a block from a padded array; includes rows of the next group (see own_rows)."""
    return lax.dynamic_slice_in_dim(x, plan.start[block], plan.rows)


def write_rows(out, value, plan: BlockPlan, block):
    """Write a block's rows; what it writes past its own rows is overwritten by the blocks after it."""
    return lax.dynamic_update_slice_in_dim(out, value.astype(out.dtype), plan.start[block], 0)


def read_group(w, plan: BlockPlan, block):
    """[E,...] -> the matrix of the block's group."""
    return lax.dynamic_index_in_dim(w, plan.group[block], keepdims=False)


def add_group(total, value, plan: BlockPlan, block):
    """Add to the entry of the block's group."""
    index = plan.group[block]
    old = lax.dynamic_index_in_dim(total, index, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, old + value.astype(total.dtype), index, 0)


def finish_rows(out, group_sizes, rows: int):
    """Cut the padding and set the rows past the sum of group_sizes to 0."""
    used = jnp.arange(rows, dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(used[:, None], out[:rows], 0)
