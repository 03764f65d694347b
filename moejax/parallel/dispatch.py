"""The plan of an expert exchange: which rows a shard sends to which expert, from that shard's own routing alone.

Shapes: N tokens of this shard, k experts a token, A = N * k assignments, E experts in all, R shards of the expert axis.
A "row" is one assignment. Expert e belongs to shard e // (E / R), so rows sorted by expert are sorted by owner too.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from ..ops.experts import sort_by_expert


class DispatchPlan(NamedTuple):
    """Rows in the order in which they leave this shard; those that are not sent come last."""

    order: Any  # [A] assignment (token * k + column) of each row
    row: Any  # [N,k] row of each assignment
    sent: Any  # [N,k] bool, False: a masked token's or beyond the capacity
    sizes: Any  # [R,E/R] rows for each expert
    starts: Any  # [R] first row for each shard
    overflow: Any  # [] int32, assignments of unmasked tokens that the capacity drops


def plan_dispatch(experts, num_experts: int, shards: int, *, mask=None, capacity: int | None = None) -> DispatchPlan:
    """Sort this shard's assignments by expert and count them.

    Args:
      experts: [N,k] int32, global numbers in 0..num_experts-1.
      num_experts, shards: E and R; every shard holds E / R experts.
      mask: [N] bool or None; False tokens are not sent.
      capacity: most rows for one shard, or None for no limit. First choices (column 0) of all tokens go before second
        choices, and earlier tokens before later ones; what is over is not sent and counts as overflow.

    Raises:
      ValueError: E is not a multiple of R, or a capacity below 1.
    """
    check_shards(num_experts, shards)
    sent = jnp.ones(experts.shape, bool) if mask is None else jnp.broadcast_to(mask[:, None], experts.shape)
    wanted = jnp.sum(sent, dtype=jnp.int32)
    if capacity is not None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1 row, or None to drop nothing.")
        sent = sent & _within_capacity(experts // (num_experts // shards), sent, shards, capacity)
    rows = sort_by_expert(jnp.where(sent, experts, num_experts), None, num_experts)
    sizes = rows.sizes.reshape(shards, num_experts // shards)
    overflow = wanted - jnp.sum(sizes, dtype=jnp.int32)
    return DispatchPlan(rows.order, rows.row, sent, sizes, starts(jnp.sum(sizes, 1, dtype=jnp.int32)), overflow)


def starts(counts):
    """[R] counts -> [R] the sum of those before each."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts


def check_shards(num_experts: int, shards: int) -> None:
    """Raise ValueError unless the shards hold equally many experts."""
    if num_experts % shards:
        raise ValueError(
            f"{num_experts} experts over {shards} shards: every shard must hold equally many. Choose an expert axis whose "
            f"size divides {num_experts}."
        )


def _within_capacity(owner, sent, shards: int, capacity: int):
    by_rank = jnp.where(sent, owner, shards).T  # columns first: [k,N]
    rows = sort_by_expert(by_rank, None, shards)
    first = jnp.concatenate([starts(rows.sizes), jnp.zeros_like(rows.sizes[:1])])  # the last one belongs to what is not sent
    return (rows.row - first[by_rank] < capacity).T
