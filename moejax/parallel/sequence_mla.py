"""Gated MLA on a row whose tokens are sharded over a mesh axis, called inside `jax.shard_map` on local arrays.

What crosses the axis is the latent and the shared key, C + R values a token (576 in Kimi K3 against 96 heads of 320), and
never a key or value. Kimi K3 report section 2.1.2, eq. 7; positions are a control, see moejax.ops.rotary.

Shapes: B batch, T tokens of a shard, R shards (or the width of the shared key, in array shapes), D model width, C
key-value latent, H heads, N key width a head from the latent, V value width a head. The whole row is the shards' T tokens
one after the other.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..kernels.common import accumulation_dtype, require_rank
from ..kernels.varying import match_varying
from ..ops.attention import check_block, check_segment_ids, default_block, from_blocks
from ..ops.mla import check_latent, mla_output, mla_project
from ..ops.rotary import positions_from_segments
from .latent_blocks import (
    Chunk,
    Saved,
    attend,
    empty_state,
    finish,
    gradients,
    local_gradients,
    make_layout,
    make_queries,
    output_gradient,
    pack,
    zero_gradients,
)
from .ring_attention import ring_latent_attention

FORMS = ("gather", "ring")


def sequence_gated_mla(
    x,
    weights,
    *,
    axis,
    segment_ids=None,
    scale=None,
    positions=None,
    rotary_base=10000.0,
    rotary_scale=1.0,
    form="gather",
    block=None,
):
    """moejax.ops.gated_mla on local tokens.

    Args:
      x: [B,T,D], this shard's normed layer inputs.
      weights: MLAWeights, the same on every shard of `axis`. Their gradients are summed over the shards in the weights'
        own dtype, before any cast. Heads may be sharded over another axis: the result is then a partial sum over it.
      axis: name of the mesh axis (or names) that shards the tokens.
      segment_ids: [B,T] int32, this shard's part of the row's ids; see sequence_latent_attention.
      positions: None (the published model), or [B,T] positions in the whole row's documents: sequence_positions.
      scale, rotary_base, rotary_scale: see gated_mla.
      form, block: see sequence_latent_attention.

    Returns:
      [B,T,D] in x's dtype, 0 at padding.

    Raises:
      ValueError: shapes, dtypes or settings that do not fit.
    """
    _axis_size(axis)
    check_segment_ids(segment_ids, x.shape[:2])
    if segment_ids is not None:
        x = jnp.where((segment_ids > 0)[:, :, None], x, 0)
    weights = jax.tree.map(lambda w: match_varying(w, x), weights)
    q, latent, shared_key = mla_project(x, weights, positions=positions, rotary_base=rotary_base, rotary_scale=rotary_scale)
    heads = sequence_latent_attention(
        q,
        latent,
        shared_key,
        weights.k_up,
        weights.v_up,
        axis=axis,
        scale=scale,
        segment_ids=segment_ids,
        form=form,
        block=block,
    )
    return mla_output(heads, x, weights)


def sequence_latent_attention(q, latent, shared_key, k_up, v_up, *, axis, scale=None, segment_ids=None, form="gather", block=None):
    """moejax.ops.latent_attention of the whole row, on local tokens: the mask counts positions over all shards.

    Args:
      q: [B,T,H,N+R], the N dimensions of the latent's key first.
      latent: [B,T,C], after its norm.
      shared_key: [B,T,R]. q, latent and shared_key have one dtype.
      k_up, v_up: [C,H,N], [C,H,V], the same on every shard; cast to the latent's dtype before use. Their gradients are
        summed over the shards in the accumulation dtype.
      axis: name of the mesh axis (or names) that shards the tokens.
      scale: None is (N+R)**-0.5.
      segment_ids: [B,T] int32 or None, this shard's part of the row's ids: 0 = padding, documents 1, 2, ... never
        decreasing along the whole row but for padding. A document may cross shards. Padding is never read.
      form: "gather" holds the whole row's latents (C + R values a token, and their gradient in the accumulation dtype):
        one all-gather forward; one again in the backward, which XLA drops where it still holds the first, and one
        reduce-scatter.
        "ring" never holds more than two shards' latents, for rows of a million tokens: R - 1 neighbour exchanges forward,
        2 R - 1 backward. The two sum keys in different orders and agree within rounding.
      block: most rows a block; None: see moejax.ops.attention.default_block, by the local length. Keys and values are
        written out for one block at a time.

    Returns:
      [B,T,H,V] in the latent's dtype; statistics and sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes, dtypes or settings that do not fit; `axis` is not a manual mesh axis here.
    """
    check_latent(q, latent, shared_key, k_up, v_up)
    if form not in FORMS:
        raise ValueError(f"form={form!r}: it must be one of {', '.join(FORMS)}.")
    if q.shape[1] != latent.shape[1]:
        raise ValueError(f"{q.shape[1]} queries and {latent.shape[1]} latents on a shard: each token has one of both.")
    if not q.dtype == latent.dtype == shared_key.dtype:
        raise ValueError(f"q {q.dtype}, latent {latent.dtype}, shared_key {shared_key.dtype} must have one dtype; cast them first.")
    check_block(block)
    check_segment_ids(segment_ids, q.shape[:2])
    _axis_size(axis)
    joint = jnp.concatenate([latent, shared_key], -1)
    if segment_ids is not None:
        real = (segment_ids > 0)[:, :, None]
        q, joint = jnp.where(real[..., None], q, 0), jnp.where(real, joint, 0)
    wide = accumulation_dtype(q)  # so that what sums the gradients of k_up and v_up over shards is wide too
    own = lax.axis_index(axis)
    arrays = [q, joint, k_up.astype(wide), v_up.astype(wide)] + ([] if segment_ids is None else [segment_ids])
    arrays = [match_varying(x, *arrays, own) for x in arrays]
    if segment_ids is None:
        arrays.append(None)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    layout = make_layout(q, latent, segment_ids, axis, scale, default_block(q.shape[1]) if block is None else block)
    attention = _gathered_latent_attention if form == "gather" else ring_latent_attention
    out: Any = attention(*arrays, layout)
    return out if segment_ids is None else jnp.where(real[..., None], out, 0)


def sequence_positions(segment_ids, *, axis):
    """moejax.ops.positions_from_segments of the whole row, for this shard's ids [B,T]: a document that crosses shards goes on.

    One all-gather of two numbers a row and shard; layers can share the result.

    Returns:
      [B,T] int32.

    Raises:
      ValueError: wrong shape or dtype; `axis` is not a manual mesh axis here.
    """
    require_rank(2, "[B,T]", segment_ids=segment_ids)
    check_segment_ids(segment_ids, segment_ids.shape)
    shards = _axis_size(axis)
    last = segment_ids.max(1)
    count = jnp.sum((segment_ids == last[:, None]) & (segment_ids > 0), axis=1, dtype=jnp.int32)
    ends = lax.all_gather(jnp.stack([last, count]), axis)  # [R,2,B]
    earlier = (jnp.arange(shards) < lax.axis_index(axis))[:, None]
    lasts, counts = jnp.where(earlier, ends[:, 0], 0), ends[:, 1]
    open_document = lasts.max(0)
    seen = jnp.sum(jnp.where(lasts == open_document, counts, 0) * earlier, axis=0)
    goes_on = (segment_ids == open_document[:, None]) & (segment_ids > 0)
    return positions_from_segments(segment_ids) + jnp.where(goes_on, seen[:, None], 0)


def _axis_size(axis) -> int:
    try:
        return lax.axis_size(axis)
    except NameError:
        raise ValueError(f"axis={axis!r} is not a manual mesh axis here: call this inside jax.shard_map over it.") from None


# The gathered form. As in the ring, the gradient is written by hand: one array of words moves latents and ids, and the
# latents' gradient is summed over the shards in the accumulation dtype.


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _gathered_latent_attention(q, joint, k_up, v_up, segment_ids, layout):
    return _forward(q, joint, k_up, v_up, segment_ids, layout)[0]


def _gather(joint, segment_ids, layout) -> Chunk:
    words = pack(joint, segment_ids, layout)
    return Chunk(lax.all_gather(words, layout.axis, tiled=True), 0)


def _forward(q, joint, k_up, v_up, segment_ids, layout):
    queries = make_queries(q, segment_ids, layout)
    chunk = _gather(joint, segment_ids, layout)
    k_up, v_up = k_up.astype(joint.dtype), v_up.astype(joint.dtype)
    out, lse = finish(attend(empty_state(queries, k_up, v_up, layout), queries, chunk, k_up, v_up, layout))
    result = from_blocks(out, layout.length).astype(joint.dtype)
    return result, Saved(q, joint, k_up, v_up, segment_ids, out, lse)


def _backward(layout, saved, d_out):
    queries = make_queries(saved.q, saved.segment_ids, layout)
    chunk = _gather(saved.joint, saved.segment_ids, layout)
    rows = output_gradient(saved, d_out, layout)
    d_joint = match_varying(jnp.zeros((*chunk.words.shape[:3], saved.joint.shape[-1]), saved.lse.dtype), saved.lse)
    sums, d_joint = gradients(zero_gradients(queries, saved), d_joint, queries, rows, chunk, saved, layout)
    d_joint = lax.psum_scatter(d_joint, layout.axis, scatter_dimension=0, tiled=True)
    return (*local_gradients(sums, d_joint, saved, layout), None)


_gathered_latent_attention.defvjp(_forward, _backward)
