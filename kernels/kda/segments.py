"""Segment ids of packed rows: what is padding, where a document starts.

Shapes: B batch, T tokens. Id 0 is padding, documents are 1, 2, ... in order.
"""

import jax.numpy as jnp
from jax import lax


def document_ids(segment_ids):
    """Ids with the padding filled: a padded token takes the id of the document before it, leading padding that of the first.

    A padded token with q = k = v = g = beta = 0 neither decays nor writes the state and outputs 0, so after this filling
    padding needs no further care, wherever it stands. A row of padding only keeps id 0. [B,T] -> [B,T].
    """
    filled = lax.cummax(segment_ids, axis=1)
    return jnp.where(filled == 0, first_document(segment_ids)[:, None], filled)


def first_document(segment_ids):
    """The first id that is not padding, 0 in a row of padding only. [B,T] -> [B]."""
    largest = jnp.iinfo(segment_ids.dtype).max
    first = jnp.min(jnp.where(segment_ids == 0, largest, segment_ids), axis=1)
    return jnp.where(first == largest, 0, first)


def drop_padding(segment_ids, *arrays):
    """Each array [B,T,...] with its padded tokens replaced by 0: a select, so that NaN there is neither read nor returned."""
    valid = segment_ids > 0
    return tuple(jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype)) for x in arrays)
