"""KDA in chunks of C = 16 tokens: what a chunk needs before its state is known, the walk over states, and the gradients.

With the chunk's cumulative decays G, Q~ = Q e^G, K~ = K e^G, K^ = K e^(G_C - G), the scores P = tril(Q K^T e^(Gi-Gj)) and
L = tril(K K^T e^(Gi-Gj), -1), and the unit lower triangular A = (I + L Diag(beta))^-1:
    X = V - K~ S        Y = A X        O = Q~ S + P Diag(beta) Y        S' = e^(G_C) S + K^^T Diag(beta) Y
P Diag(beta) A and K^^T Diag(beta) A do not depend on the state: a step of the walk is two products, [Q~; K~] S and [..; ..] X,
and its transpose is the reverse walk. beta stands on the columns of the inverse, not on its rows: then Y is at hand in the
backward pass and the gradient of beta needs no division by beta, which may be 0.
(Chunked delta rule: arXiv 2406.06484; decay a channel: Kimi Linear, arXiv 2510.26692.)

Shapes: lead = (n, B, HV) with n chunks; C tokens of a chunk; K, V channels; S [B,HV,K,V]; table [B,N,HV,K,V] of N documents.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .pairwise import pair_gradients, pair_scores
from .tiles import HIGHEST, Decays, decay_factors, inverse_unit_lower, running_sum, shifted


class Masks(NamedTuple):
    """Where documents share a chunk: bool arrays that broadcast over heads. None in a batch of unpacked rows."""

    pairs: jnp.ndarray  # [n,B,1,C,C] row and column belong to one document
    enter: jnp.ndarray  # [n,B,1,C,1] the row's document was running before the chunk
    leave: jnp.ndarray  # [n,B,1,C,1] the row's document is the chunk's last one
    whole: jnp.ndarray  # [n,B,1,1] one document throughout, begun before the chunk


class Rows(NamedTuple):
    """Per chunk of a table walk: the document's row in the table and whether the chunk is its first or last one. [n,B]"""

    row: jnp.ndarray
    first: jnp.ndarray
    last: jnp.ndarray


class Prepared(NamedTuple):
    """What does not depend on the state. q is scaled."""

    q: jnp.ndarray  # [lead,C,K]
    k: jnp.ndarray
    beta: jnp.ndarray  # [lead,C,1]
    decays: Decays
    both: jnp.ndarray  # [Q~; K~] e^shift [lead,2C,K]
    enter: jnp.ndarray | None  # [n,B,1,2C,1] bool: rows that read the state; None: all
    leave: jnp.ndarray  # e^(G_C - G) [lead,C,K], 0 for rows of an earlier document
    whole: jnp.ndarray  # e^(G_C) [lead,K], 0 where a document starts in the chunk
    reads: jnp.ndarray  # P [lead,C,C] lower triangular
    overlaps: jnp.ndarray  # L [lead,C,C] strictly lower triangular
    inverse: jnp.ndarray  # A [lead,C,C]
    mixes: jnp.ndarray  # [K^^T Diag(beta) A; P Diag(beta) A] [lead,K+C,C]


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)


def _halves(x):
    size = x.shape[-2] // 2
    return x[..., :size, :], x[..., size:, :]


def _triangles(masks: Masks | None, size):
    """Pairs that count, on and below the diagonal, and strictly below it."""
    below, strict = np.tri(size, dtype=bool), np.tri(size, k=-1, dtype=bool)
    return (below, strict) if masks is None else (masks.pairs & below, masks.pairs & strict)


def prepare(q, k, g, beta, masks: Masks | None, *, scale, lower_bound) -> Prepared:
    """q, k, g [lead,C,K]; beta [lead,C,1]; all in the accumulation dtype."""
    q, size = q * scale, q.shape[-2]
    if lower_bound is None:
        g = jnp.maximum(g, -1e4)  # e^-1e4 is 0 in float64 too; keeps 0 * g finite for g = -inf
    decays = decay_factors(g, lower_bound, None if masks is None else masks.pairs)
    both = jnp.concatenate([q * decays.row, k * decays.row], axis=-2)
    if decays.own is None:
        reads, overlaps = pair_scores(q, k, jnp.exp(g))
    else:
        reads, overlaps = _halves(jnp.matmul(both, _transposed(k * decays.own), precision=HIGHEST))
    below, strict = _triangles(masks, size)
    reads, overlaps = jnp.where(below, reads, 0), jnp.where(strict, overlaps, 0)
    enter, leave, whole = None, decays.leave, decays.whole
    if masks is not None:
        enter = jnp.concatenate([masks.enter, masks.enter], axis=-2)
        leave, whole = jnp.where(masks.leave, leave, 0), jnp.where(masks.whole, whole, 0)
    inverse = inverse_unit_lower(overlaps * _transposed(beta))
    mixes = jnp.concatenate([_transposed(k * leave * beta), reads * _transposed(beta)], axis=-2)
    mixes = jnp.matmul(mixes, inverse, precision=HIGHEST)
    return Prepared(q, k, beta, decays, both, enter, leave, whole, reads, overlaps, inverse, mixes)


def walk(p: Prepared, v, state, table, start_table, rows: Rows | None, precision, keep: bool):
    """n chunks in turn -> (state, table), and O [lead,C,V]; with `keep` instead of O the entry states [n,B,HV,K,V] and X.

    With `rows`, a document's first chunk starts from its row of start_table, and each chunk's end goes to its row of table.
    """
    batch, channels, unshift = jnp.arange(state.shape[0]), state.shape[-2], p.decays.unshift

    def step(carry, chunk):
        state, table = carry
        both, mixes, v, whole, enter, rows = chunk
        if rows is not None:
            state = jnp.where(rows.first[:, None, None, None], start_table[batch, rows.row], state)
        read = jnp.matmul(both, state, precision=precision) * unshift
        of_q, of_k = _halves(read if enter is None else jnp.where(enter, read, 0))
        mixed = jnp.matmul(mixes, v - of_k, precision=precision)
        end = whole[..., None] * state + mixed[..., :channels, :]
        if rows is not None:
            table = table.at[batch, rows.row].set(end)
        return (end, table), ((state, v - of_k) if keep else of_q + mixed[..., channels:, :])

    return lax.scan(step, (state, table), (p.both, p.mixes, v, p.whole, p.enter, rows))


class Back(NamedTuple):
    """What the reverse walk leaves for the gradients."""

    d_v: jnp.ndarray  # [lead,C,V], also the gradient of X
    on_state: jnp.ndarray  # [dO; -dX] S^T [lead,2C,K], 0 for rows that do not read the state
    on_leave: jnp.ndarray  # Y dS'^T [lead,C,K]
    on_whole: jnp.ndarray  # sum over V of S dS' [lead,K]


def walk_back(p: Prepared, d_o, states, y, d_state, d_table, d_final, rows: Rows | None, precision):
    """Reverse walk -> (d_state, d_table), Back.

    d_final [B,N,HV,K,V] is the cotangent of the final table; d_table collects the gradient of the start table.
    """
    batch, channels = jnp.arange(d_state.shape[0]), d_state.shape[-2]
    from_o = jnp.matmul(_transposed(p.mixes[..., channels:, :]), d_o, precision=precision)

    def step(carry, chunk):
        d_end, d_table = carry
        from_o, d_o, state, y, both, mixes, whole, enter, rows = chunk
        if rows is not None:
            d_end = jnp.where(rows.last[:, None, None, None], d_final[batch, rows.row], d_end)
        d_v = from_o + jnp.matmul(_transposed(mixes), d_end, precision=precision)
        d_read = jnp.concatenate([d_o, -d_v], axis=-2)
        d_read = d_read if enter is None else jnp.where(enter, d_read, 0)
        d_state = whole[..., None] * d_end + jnp.matmul(_transposed(both), d_read, precision=precision) * p.decays.unshift
        on_state = jnp.matmul(d_read, _transposed(state), precision=precision)
        on_leave = jnp.matmul(y, _transposed(d_end), precision=precision)
        if rows is not None:
            kept = jnp.where(rows.first[:, None, None, None], d_state, d_table[batch, rows.row])
            d_table = d_table.at[batch, rows.row].set(kept)
        return (d_state, d_table), Back(d_v, on_state, on_leave, jnp.sum(state * d_end, axis=-1))

    xs = (from_o, d_o, states, y, p.both, p.mixes[..., :channels, :], p.whole, p.enter, rows)
    return lax.scan(step, (d_state, d_table), xs, reverse=True)


def _pair_parts(p: Prepared, g, d_reads, d_overlaps):
    """Through the scores: gradients of q, of k (as row and as column) and of g [lead,C,K], from strictly lower gradients.

    The gradient of g is what is left to sum over the rows >= t of the chunk (bounded gate), or summed already (unbounded).
    """
    row, own = p.decays.row, p.decays.own
    if own is None:
        grad_q, grad_row, grad_column, d_g = pair_gradients(p.q, p.k, jnp.exp(g), d_reads, d_overlaps)
        return grad_q, grad_row + grad_column, None, d_g
    strips = jnp.concatenate([d_reads, d_overlaps], axis=-2)  # [...,2C,C]
    grad_q, grad_row = (x * row for x in _halves(jnp.matmul(strips, p.k * own, precision=HIGHEST)))
    grad_column = jnp.matmul(_transposed(strips), p.both, precision=HIGHEST) * own
    return grad_q, grad_row + grad_column, p.q * grad_q + p.k * (grad_row - grad_column), None


def gradients(p: Prepared, g, masks: Masks | None, d_o, y, back: Back, *, scale, precision):
    """Gradients of q, k, g [lead,C,K] and beta [lead,C] of all chunks at once."""
    size = p.q.shape[-2]
    below, strict = _triangles(masks, size)
    on_pairs = jnp.matmul(jnp.concatenate([d_o, -back.d_v], axis=-2), _transposed(y), precision=precision)  # [lead,2C,C]
    n_reads, n_overlaps = jnp.where(below, on_pairs[..., :size, :], 0), jnp.where(strict, on_pairs[..., size:, :], 0)
    k_leave = p.k * p.leave
    d_beta = jnp.sum(p.reads * n_reads + p.overlaps * n_overlaps, axis=-2) + jnp.sum(k_leave * back.on_leave, axis=-1)

    scaled = _transposed(p.beta)
    grad_q, grad_k, later, d_g = _pair_parts(p, g, jnp.where(strict, n_reads * scaled, 0), n_overlaps * scaled)
    state_q, state_row = (x * (p.decays.row * p.decays.unshift) for x in _halves(back.on_state))
    grad_leave = p.beta * back.on_leave
    from_state = p.q * state_q + p.k * state_row
    later = from_state if later is None else from_state + later
    # Two sums, not one difference from a total, and each over the row's own document: a gradient keeps no rounding of the others'.
    pairs = None if masks is None else masks.pairs
    before = shifted(running_sum(k_leave * grad_leave, pairs=pairs), 1)  # of another document's row it is 0: that one does not leave
    on_decay = running_sum(later, reverse=True, pairs=pairs) + before
    on_decay = on_decay + (p.whole * back.on_whole)[..., None, :]
    d_g = on_decay if d_g is None else on_decay + d_g
    # A pair of a token with itself has no decay: it is left out above, where it would only add rounding to d_g.
    own = jnp.sum(d_o * y, axis=-1, keepdims=True) * p.beta
    d_q = (grad_q + state_q + own * p.k) * scale
    d_k = grad_k + state_row + grad_leave * p.leave + own * p.q
    return d_q, d_k, d_g, d_beta
