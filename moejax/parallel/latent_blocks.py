"""Blocks of latents against the queries of one shard: what the gathered and the ring form of sequence-parallel MLA share.

A row of R shards holds T tokens each. A chunk is the latents of one shard or of several neighbours, cut into blocks that
never straddle two shards. Keys and values are written out for one block at a time and serve every query block of the
shard before the next one, so each is expanded once a pass (the expansion of a block of 512 costs 0.8 of its product with
one query block at C = 512, N = V = 128).

Shapes: B batch, T tokens of a shard, n blocks of a shard, m blocks of a chunk, s rows of a block, H heads, N key width
from the latent, R width of the shared key, C latent, V value width, U words of a packed token.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ..kernels.common import accumulation_dtype
from ..kernels.varying import match_varying
from ..ops.attention import document_bounds, from_blocks, online_step, pair_gradient, split_rows, take_block, to_blocks


class Layout(NamedTuple):
    """What is static."""

    axis: Any  # mesh axis, or axes, that shard the tokens
    blocks: int  # n
    rows: int  # s
    length: int  # T
    latent: int  # C
    dtype: str  # of latent and shared key
    packed: bool  # there are segment ids
    scale: float


class Queries(NamedTuple):
    """The shard's own side."""

    q: Any  # [n,B,H,1,s,N+R]
    segments: Any  # [n,B,s] or None
    start: Any  # position of the shard's first token in the whole row


class Chunk(NamedTuple):
    """Latents to be attended to."""

    words: Any  # [m,B,s,U], see pack
    shard: Any  # number of the first shard it holds


def make_layout(q, latent, segment_ids, axis, scale, block) -> Layout:
    """The Layout of local arrays q [B,T,H,N+R] and latent [B,T,C]."""
    blocks, rows = split_rows(q.shape[1], block)
    return Layout(axis, blocks, rows, q.shape[1], latent.shape[2], str(latent.dtype), segment_ids is not None, float(scale))


def make_queries(q, segment_ids, layout) -> Queries:
    """Local q [B,T,H,N+R] and segment ids [B,T] in blocks."""
    segments = None if segment_ids is None else _blocks(segment_ids, layout)
    start = lax.axis_index(layout.axis) * layout.length
    return Queries(to_blocks(q, layout.blocks, layout.rows, (q.shape[2], 1)), segments, start)


def pack(joint, segment_ids, layout):
    """[B,T,C+R] latent and shared key, and segment ids [B,T] or None -> words [n,B,s,U], so that one collective moves both.

    Words are unsigned integers: a transport that flushes denormal floats would lose small ids.
    """
    unit = jnp.uint16 if joint.dtype == jnp.bfloat16 else jnp.uint32
    parts = [joint] if segment_ids is None else [joint, segment_ids[:, :, None]]
    words = [lax.bitcast_convert_type(x, unit).reshape(*joint.shape[:2], -1) for x in parts]
    return _blocks(jnp.concatenate(words, -1), layout)


def unpack(words, layout):
    """Words [...,U] -> ([...,C+R] in the latents' dtype, segment ids [...] or None)."""
    id_words = 0 if not layout.packed else 2 if words.dtype == jnp.uint16 else 1
    width = words.shape[-1] - id_words
    joint, ids = words[..., :width], words[..., width:]
    if layout.dtype == "float64":
        joint = joint.reshape(*joint.shape[:-1], -1, 2)
    joint = lax.bitcast_convert_type(joint, jnp.dtype(layout.dtype))
    if not layout.packed:
        return joint, None
    return joint, lax.bitcast_convert_type(ids if id_words == 2 else ids[..., 0], jnp.int32)


def _blocks(x, layout):
    """[B,T,...] -> [n,B,s,...], zero rows at the end."""
    x = jnp.pad(x, ((0, 0), (0, layout.blocks * layout.rows - layout.length), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(x.reshape(x.shape[0], layout.blocks, layout.rows, *x.shape[2:]), 1, 0)


def tokens_from_blocks(x, layout):
    """Inverse of the blocks of a shard: [n,B,s,D] -> [B,T,D]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, x.shape[-1])[:, : layout.length]


class _Range(NamedTuple):
    """Pairs of blocks that can hold a visible pair."""

    first: Any  # key blocks [first, stop) of the chunk: none of a later shard, none of documents that ended before
    stop: Any
    last_query: Any  # [m] one past the last query block that needs a key block, or None


def _range(queries, chunk, layout) -> _Range:
    own_shard = queries.start // layout.length
    count = chunk.words.shape[0]
    stop = jnp.clip((own_shard + 1 - chunk.shard) * layout.blocks, 0, count)
    if not layout.packed:
        return _Range(jnp.zeros_like(stop), stop, None)
    bounds = document_bounds(queries.segments, unpack(chunk.words, layout)[1])
    return _Range(bounds.first_key[0], stop, bounds.last_query)


def _query_blocks(j, span, queries, chunk, layout):
    """Query blocks [start, stop) that key block j of the chunk serves."""
    ahead = _key_start(j, chunk, layout) - queries.start
    start = jnp.clip(ahead // layout.rows, 0, layout.blocks)
    return start, jnp.full_like(start, layout.blocks) if span.last_query is None else span.last_query[j]


def _key_start(j, chunk, layout):
    """Position in the whole row of the first key of block j."""
    return (chunk.shard + j // layout.blocks) * layout.length + j % layout.blocks * layout.rows


def _mask(i, j, key_segments, queries, chunk, layout):
    """True where query block i may see key block j: [s,s] or [B,1,1,s,s]."""
    row = jnp.arange(layout.rows)
    at_query = queries.start + i * layout.rows + row
    at_key = _key_start(j, chunk, layout) + row
    seen = (j % layout.blocks * layout.rows + row < layout.length) & (at_key <= at_query[:, None])
    if not layout.packed:
        return seen
    segments = take_block(queries.segments, i)
    same = (segments[:, :, None] == key_segments[:, None, :]) & (segments > 0)[:, :, None]
    return (seen & same)[:, None, None]


def _expand(joint, k_up, v_up, layout):
    """A block's [B,s,C+R] -> keys [B,H,s,N+R] and values [B,H,s,V]; all in the latents' dtype."""
    latent, shared = joint[..., : layout.latent], joint[:, None, :, layout.latent :]
    k = jnp.einsum("bsc,chn->bhsn", latent, k_up)
    v = jnp.einsum("bsc,chv->bhsv", latent, v_up)
    return jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:3], shared.shape[-1]))], -1), v


def empty_state(queries, k_up, v_up, layout):
    """Running softmax of every query row before it has seen a key: (maximum, sum, weighted values)."""
    dtype = accumulation_dtype(queries.q, jnp.zeros((), layout.dtype))
    shape = queries.q.shape[:-1]
    empty = (jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, v_up.shape[2]), dtype))
    return tuple(match_varying(x, queries.q, k_up, v_up) for x in empty)


def attend(state, queries, chunk, k_up, v_up, layout):
    """The running softmax after the chunk. A chunk of a later shard costs nothing."""
    span = _range(queries, chunk, layout)

    def key_block(j, state):
        joint, segments = unpack(take_block(chunk.words, j), layout)
        k, v = _expand(joint, k_up, v_up, layout)

        def step(i, state):
            rows = tuple(take_block(x, i) for x in state)
            new = online_step(rows, take_block(queries.q, i), k, v, _mask(i, j, segments, queries, chunk, layout), layout.scale)
            return tuple(lax.dynamic_update_index_in_dim(x, y, i, 0) for x, y in zip(state, new, strict=True))

        return lax.fori_loop(*_query_blocks(j, span, queries, chunk, layout), step, state)

    return lax.fori_loop(span.first, span.stop, key_block, state)


def finish(state):
    """Running softmax -> (output [n,B,H,1,s,V], log-sum-exp [n,B,H,1,s]); 0 for a row that saw nothing."""
    top, total, acc = state
    total = jnp.where(total == 0, 1, total)
    return acc / total[..., None], jnp.where(top == -jnp.inf, 0, top) + jnp.log(total)


class Saved(NamedTuple):
    """What a gradient needs; nothing of it grows with the number of shards."""

    q: Any  # [B,T,H,N+R]
    joint: Any  # [B,T,C+R]
    k_up: Any  # [C,H,N], v_up [C,H,V], both in the latents' dtype
    v_up: Any
    segment_ids: Any
    out: Any  # [n,B,H,1,s,V], in the accumulation dtype: see moejax.ops.attention
    lse: Any  # [n,B,H,1,s]


class OutputGradient(NamedTuple):
    """The shard's own side of the backward pass, in blocks."""

    d_out: Any  # [n,B,H,1,s,V]
    lse: Any
    delta: Any  # [n,B,H,1,s], sum of out * d_out


class Gradients(NamedTuple):
    """Sums over key blocks, in the accumulation dtype."""

    q: Any  # [n,B,H,1,s,N+R]
    k_up: Any
    v_up: Any


def output_gradient(saved, d_out, layout) -> OutputGradient:
    """d_out [B,T,H,V] beside what was saved."""
    blocks = to_blocks(d_out, layout.blocks, layout.rows, (d_out.shape[2], 1))
    return OutputGradient(blocks, saved.lse, jnp.sum(saved.out * blocks.astype(saved.lse.dtype), -1))


def zero_gradients(queries, saved) -> Gradients:
    """Sums before the first block."""
    arrays = (queries.q, saved.k_up, saved.v_up)
    return Gradients(*(match_varying(jnp.zeros(x.shape, saved.lse.dtype), saved.lse) for x in arrays))


def gradients(sums, d_joint, queries, rows, chunk, saved, layout):
    """Add a chunk's part to `sums`, and to d_joint [m,B,s,C+R] what this shard's queries give to its latents."""
    dtype = saved.lse.dtype
    span = _range(queries, chunk, layout)
    width = saved.k_up.shape[2]

    def key_block(j, carry):
        sums, d_joint = carry
        joint, segments = unpack(take_block(chunk.words, j), layout)
        k, v = _expand(joint, saved.k_up, saved.v_up, layout)

        def step(i, carry):
            dq, dk, dv = carry
            q_i, d_out, lse, delta = (take_block(x, i) for x in (queries.q, *rows))
            mask = _mask(i, j, segments, queries, chunk, layout)
            dq_i, dk_i, dv_i = pair_gradient(q_i, k, v, d_out, lse, delta, mask, layout.scale)
            return lax.dynamic_update_index_in_dim(dq, take_block(dq, i) + dq_i, i, 0), dk + dk_i, dv + dv_i

        zeros = (match_varying(jnp.zeros(x.shape, dtype), saved.lse) for x in (k, v))
        dq, dk, dv = lax.fori_loop(*_query_blocks(j, span, queries, chunk, layout), step, (sums.q, *zeros))
        part, dk_up, dv_up = _unexpand(joint, dk[..., :width], dk[..., width:], dv, saved, layout)
        d_joint = lax.dynamic_update_index_in_dim(d_joint, take_block(d_joint, j) + part, j, 0)
        return Gradients(dq, sums.k_up + dk_up, sums.v_up + dv_up), d_joint

    return lax.fori_loop(span.first, span.stop, key_block, (sums, d_joint))


def _unexpand(joint, dk, d_shared, dv, saved, layout):
    """Transpose of _expand: gradients of a block's [B,s,C+R], of k_up and of v_up, summed in the accumulation dtype."""
    sums: dict[str, Any] = {"preferred_element_type": saved.lse.dtype}
    latent = joint[..., : layout.latent]
    dk, dv = dk.astype(joint.dtype), dv.astype(joint.dtype)
    d_latent = jnp.einsum("bhsn,chn->bsc", dk, saved.k_up, **sums)
    d_latent += jnp.einsum("bhsv,chv->bsc", dv, saved.v_up, **sums)
    dk_up = jnp.einsum("bsc,bhsn->chn", latent, dk, **sums)
    dv_up = jnp.einsum("bsc,bhsv->chv", latent, dv, **sums)
    return jnp.concatenate([d_latent, d_shared.sum(1)], -1), dk_up, dv_up


def local_gradients(sums, d_joint, saved, layout):
    """Gradients of q and joint in their dtype, of k_up and v_up in the accumulation dtype.

    d_joint [n,B,s,C+R] is already summed over the shards.
    """
    dq = from_blocks(sums.q, layout.length).astype(saved.q.dtype)
    d_joint = tokens_from_blocks(d_joint, layout).astype(saved.joint.dtype)
    return dq, d_joint, sums.k_up, sums.v_up
