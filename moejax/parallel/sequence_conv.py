"""The short convolution of a row whose tokens are sharded over a mesh axis.

Shapes: R shards along `axis`, B batch, T local tokens, C channels, W taps. x [B,T,C], weight [W,C], history [B,W-1,C].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..kernels.varying import match_varying
from ..ops.short_conv import check_short_conv, short_conv
from .sequence_documents import Axis, all_documents, first_and_last, gather_shards, of_last_shard, own_row


def sequence_short_conv(
    x: jax.Array,
    weight: jax.Array,
    *,
    axis: Axis,
    history: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`moejax.ops.short_conv` of a whole row, on this shard's tokens. Call it inside `jax.shard_map`.

    One all-gather of at most W-1 inputs a shard; local rows may be shorter than W-1 (a token's taps then reach over several
    shards). Source: Kimi K3 report section 2.1.1.

    Args:
      x: [B,T,C] this shard's inputs, shards in order along the row; float32, bfloat16 or float64; T >= 1.
      weight: [W,C], the same on all shards.
      axis: the mesh axis (or axes) that shards the tokens.
      history: [B,W-1,C], the inputs before the row's first token, the same on all shards. None = zeros.
      segment_ids: [B,T] this shard's ids: 0 = padding, documents 1, 2, ... in order along the whole row.
      implementation: as in short_conv.
    Returns: (y [B,T,C] in x.dtype; the whole row's last W-1 inputs as short_conv defines them, the same on all shards).
    Raises ValueError: a shape or dtype that breaks the rules above.
    Raises NotImplementedError: as short_conv.
    """
    options: Any = dict(histories=[history], segment_ids=segment_ids, implementation=implementation)
    ys, finals = sequence_short_convs([x], [weight], axis=axis, **options)
    assert finals is not None  # output_final_history is on
    return ys[0], finals[0]


def sequence_short_convs(
    xs: Sequence[jax.Array],
    weights: Sequence[jax.Array],
    *,
    axis: Axis,
    histories: Sequence[jax.Array | None] | None = None,
    segment_ids: jax.Array | None = None,
    output_final_history: bool = True,
    implementation: str | None = None,
) -> tuple[list[jax.Array], list[jax.Array] | None]:
    """Several convolutions of the same tokens, as q, k and v of a KDA layer, with one all-gather for all their inputs.

    xs: [B,T,C_i] of one dtype; weights: [W,C_i] of one W; histories: one a convolution, or None. The rest as in
    sequence_short_conv. Returns (ys, final histories); without `output_final_history` None and no collective for it.
    """
    incoming: list[jax.Array | None] = [None for _ in xs] if histories is None else list(histories)
    for x, weight, history in zip(xs, weights, incoming, strict=True):
        check_short_conv(x, weight, history, segment_ids)
    _check_common(xs, weights)
    width, sizes = weights[0].shape[0], [x.shape[2] for x in xs]
    if width > 1 and lax.axis_size(axis) > 1:
        start = jnp.concatenate([_start(x, h, width) for x, h in zip(xs, incoming, strict=True)], axis=-1)
        halo = _plain_halo(xs, start, axis) if segment_ids is None else _packed_halo(xs, start, segment_ids, axis)
        incoming = _split(halo, sizes)
    options: Any = dict(segment_ids=segment_ids, implementation=implementation)
    pairs = [short_conv(x, w, history=h, **options) for x, w, h in zip(xs, weights, incoming, strict=True)]
    ys = [y for y, _ in pairs]
    if not output_final_history:
        return ys, None
    return ys, _split(of_last_shard(jnp.concatenate([last for _, last in pairs], axis=-1), axis=axis), sizes)


def _start(x, history, width):
    """The row's history [B,W-1,C] in x.dtype, zeros for None."""
    history = jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype) if history is None else history.astype(x.dtype)
    return match_varying(history, x)


def _plain_halo(xs, history, axis):
    """The W-1 inputs before this shard [B,W-1,C], all of one document: a window of the history and the shards' ends."""
    rows = history.shape[1]
    ends = jnp.concatenate([x[:, -rows:] for x in xs], axis=-1)  # min(T, W-1) inputs
    (gathered,), _ = gather_shards([ends], None, axis=axis)
    earlier = jnp.moveaxis(gathered, 0, 1).reshape(ends.shape[0], -1, ends.shape[2])
    inputs = jnp.concatenate([match_varying(history, earlier), earlier], axis=1)
    return lax.dynamic_slice_in_dim(inputs, lax.axis_index(axis) * ends.shape[1], rows, axis=1)


def _packed_halo(xs, history, segment_ids, axis):
    """The last W-1 inputs of the document that this shard's first token goes on, 0 for others [B,W-1,C].

    A shard sends inputs of its last document only: no other one can go on. A shard of padding passes on what it receives.
    """
    rows, batch = history.shape[1], history.shape[0]
    edges = first_and_last(segment_ids)
    open_document = (segment_ids == edges[:, 1:]) & (segment_ids > 0)
    index, found = _last_places(open_document, rows)
    ends = jnp.concatenate([_take(x, index, found) for x in xs], axis=-1)
    integers = jnp.concatenate([edges, jnp.sum(found, axis=1, keepdims=True, dtype=edges.dtype)], axis=1)
    (gathered,), integers = gather_shards([ends], integers, axis=axis)
    assert integers is not None
    documents, count = all_documents(integers[..., 0], integers[..., 1]), integers[..., 2]

    first, before = own_row(documents.first, axis=axis), own_row(documents.before, axis=axis)
    wanted = jnp.where(first == 0, before, first)  # 0: nothing but padding so far
    largest = jnp.iinfo(first.dtype).max
    row_start = jnp.min(jnp.where(documents.first == 0, largest, documents.first), axis=0)
    of_history = (wanted == 0) | (wanted == row_start)
    shards = jnp.arange(documents.first.shape[0])[:, None]
    of_shard = (documents.last == wanted) & (wanted > 0) & (shards < lax.axis_index(axis))
    of_end = of_shard[..., None] & (jnp.arange(rows) >= rows - count[..., None])  # [R,B,W-1]: ends stand at the right
    valid = jnp.concatenate([jnp.broadcast_to(of_history[None, :, None], (1, batch, rows)), of_end])
    inputs = jnp.concatenate([match_varying(history, gathered)[None], gathered])
    in_order = lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])
    return _take(in_order(inputs), *_last_places(in_order(valid), rows))


def _last_places(mask, rows):
    """The last `rows` places where mask [B,N] holds, in order, at the right: (index [B,rows], whether there is one)."""
    from_end = lax.cumsum(mask.astype(jnp.int32), axis=1, reverse=True)
    hit = mask[:, None] & (from_end[:, None] == jnp.arange(rows, 0, -1, dtype=jnp.int32)[:, None])
    return jnp.argmax(hit, axis=2), jnp.any(hit, axis=2)


def _take(x, index, found):
    return jnp.where(found[..., None], jnp.take_along_axis(x, index[..., None], axis=1), 0)


def _split(x, sizes):
    parts, start = [], 0
    for size in sizes:
        parts.append(x[..., start : start + size])
        start += size
    return parts


def _check_common(xs, weights):
    dtypes, widths = [str(x.dtype) for x in xs], [w.shape[0] for w in weights]
    if len(set(dtypes)) > 1 or len(set(widths)) > 1:
        raise ValueError(f"inputs of dtypes {dtypes} with {widths} taps; one call takes one dtype and one number of taps. Call it twice.")
