"""What shards of one row tell each other: one all-gather of a few arrays, and which documents go on from shard to shard.

Shapes: R shards along `axis`, B batch, T local tokens, n any number. Functions here run inside `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..kernels.kda.segments import first_document
from ..kernels.varying import match_varying

Axis = str | tuple[str, ...]


class Documents(NamedTuple):
    """Real (not padding) document ids of every shard, 0 where there is none. Each [R,B]."""

    first: jax.Array
    last: jax.Array
    before: jax.Array  # the last id of all earlier shards


def first_and_last(segment_ids: jax.Array) -> jax.Array:
    """[B,T] -> [B,2]: the first and the last id that is not padding, 0 in a row of padding."""
    return jnp.stack([first_document(segment_ids), jnp.max(segment_ids, axis=1)], axis=1)


def all_documents(first: jax.Array, last: jax.Array) -> Documents:
    """From the gathered ids [R,B]. Ids never decrease along a row, so the last id so far is the largest one."""
    so_far = lax.cummax(last, axis=0)
    return Documents(first, last, jnp.concatenate([jnp.zeros_like(last[:1]), so_far[:-1]]))


def gather_shards(arrays: Sequence[jax.Array], ids: jax.Array | None, *, axis: Axis) -> tuple[list[jax.Array], jax.Array | None]:
    """Every shard's float arrays [B,...] (one dtype) and integers [B,n] >= 0, in one all-gather -> [R,B,...] each.

    The integers travel as digits of base 256, which bfloat16 too holds exactly: a second collective costs its latency again.
    """
    batch, dtype = arrays[0].shape[0], arrays[0].dtype
    flat = [x.reshape(batch, -1) for x in arrays]
    if ids is not None:
        shifts = 8 * jnp.arange(ids.dtype.itemsize, dtype=ids.dtype)
        flat.append(((ids[..., None] >> shifts) & 255).astype(dtype).reshape(batch, -1))
    own = jnp.concatenate([match_varying(x, *flat) for x in flat], axis=1)
    gathered = lax.all_gather(_varying(own, axis), axis)
    parts, start = [], 0
    for x, piece in zip(arrays, flat, strict=False):
        parts.append(gathered[..., start : start + piece.shape[1]].reshape(-1, *x.shape))
        start += piece.shape[1]
    if ids is None:
        return parts, None
    digits = gathered[..., start:].reshape(-1, *ids.shape, ids.dtype.itemsize)
    return parts, jnp.sum(digits.astype(ids.dtype) << shifts, axis=-1, dtype=ids.dtype)


def of_last_shard(x: jax.Array, *, axis: Axis) -> jax.Array:
    """The last shard's x on every shard, as a value that does not vary over `axis`. NaN of other shards is not read."""
    last = lax.axis_index(axis) == lax.axis_size(axis) - 1
    return lax.psum(jnp.where(last, x, 0), axis)


def own_row(x: jax.Array, *, axis: Axis) -> jax.Array:
    """x [R,...] -> this shard's entry."""
    return lax.dynamic_index_in_dim(x, lax.axis_index(axis), keepdims=False)


def _varying(x: jax.Array, axis: Axis) -> jax.Array:
    names = (axis,) if isinstance(axis, str) else axis
    missing = tuple(name for name in names if name not in jax.typeof(x).manual_axis_type.varying)
    # axis_index is what varies over the axis whether or not shard_map checks it.
    return match_varying(x, lax.axis_index(axis)) if missing else x
