"""Where documents lie in the chunks: masks for boundaries inside a chunk, or a chunk grid that restarts at each document.

Shapes: B batch, T tokens, NT chunks of C = 16 tokens, N documents of a row.
"""

from typing import NamedTuple

import jax.numpy as jnp

from .chunk import Masks, Rows

CHUNK = 16  # one tile of decays; on one CPU core a third faster forward than 32 or 64: no products between tiles


class Packed(NamedTuple):
    """Document ids of the padded row and the id that was running before each chunk."""

    ids: jnp.ndarray  # [B,NT*C]
    before: jnp.ndarray  # [B,NT]


def packed_layout(documents, tokens: int) -> Packed:
    """documents [B,T] (filled ids) extended to `tokens` by the last id."""
    ids = jnp.pad(documents, ((0, 0), (0, tokens - documents.shape[1])), mode="edge")
    ends = ids[:, CHUNK - 1 :: CHUNK]
    return Packed(ids, jnp.concatenate([ids[:, :1], ends[:, :-1]], axis=1))


def chunk_masks(packed: Packed) -> Masks:
    """Masks of the chunks of one window: packed.ids [B,n*C], packed.before [B,n]."""
    batch, chunks = packed.before.shape
    ids = jnp.swapaxes(packed.ids.reshape(batch, chunks, CHUNK), 0, 1)[:, :, None, :]  # [n,B,1,C]
    before = jnp.swapaxes(packed.before, 0, 1)[:, :, None, None]
    last = ids[..., -1:]
    return Masks(
        pairs=ids[..., :, None] == ids[..., None, :],
        enter=(ids == before)[..., None],
        leave=(ids == last)[..., None],
        whole=last == before,
    )


class Aligned(NamedTuple):
    """A row laid out anew so that each document starts a chunk; documents keep their order, absent ones take no chunk."""

    source: jnp.ndarray  # [B,NT*C] token of the row that stands here
    used: jnp.ndarray  # [B,NT*C] bool; False where nothing stands
    place: jnp.ndarray  # [B,T] where a token of the row went
    rows: Rows  # each [B,NT]
    bounds: jnp.ndarray  # [B,N,2] first chunk of each document and the chunk after its last


def aligned_chunks(tokens: int, documents: int, chunk: int = CHUNK) -> int:
    """The most chunks that `documents` documents of `tokens` tokens together can need."""
    return (tokens + (chunk - 1) * min(documents, tokens)) // chunk


def aligned_layout(documents, num_documents: int, chunks: int, chunk: int = CHUNK) -> Aligned:
    """documents [B,T] filled ids 1..N in order (0 in a row of padding only) -> the layout in `chunks` chunks of `chunk` tokens."""
    batch, tokens = documents.shape
    lines = jnp.arange(batch)[:, None]
    document = jnp.clip(documents - 1, 0, num_documents - 1)
    length = jnp.zeros((batch, num_documents), jnp.int32).at[lines, document].add(1)
    needed = (length + chunk - 1) // chunk
    chunk_end = jnp.cumsum(needed, axis=1)
    chunk_start = chunk_end - needed
    token_start = jnp.cumsum(length, axis=1) - length
    place = chunk_start[lines, document] * chunk + jnp.arange(tokens) - token_start[lines, document]

    number = jnp.arange(chunks)
    row = jnp.sum(chunk_end[:, None, :] <= number[:, None], axis=-1)  # documents that ended before the chunk
    row = jnp.minimum(row, document[:, -1:])  # chunks left over belong to the last document: no rows, state unchanged
    offset = (number - chunk_start[lines, row])[..., None] * chunk + jnp.arange(chunk)  # [B,NT,C] token of the document
    used = offset < length[lines, row][..., None]
    source = jnp.where(used, token_start[lines, row][..., None] + offset, 0)
    rows = Rows(row, first=number == chunk_start[lines, row], last=number == chunk_end[lines, row] - 1)
    bounds = jnp.stack([chunk_start, chunk_end], axis=-1)
    return Aligned(source.reshape(batch, -1), used.reshape(batch, -1), place, rows, bounds)
