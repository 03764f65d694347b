"""KDA in chunks of C tokens: what a chunk needs before its state is known, the walk over states, outputs and gradients.

With the chunk's cumulative decays G, unit lower triangular A = (I + tril(K K^T e^(Gi-Gj), -1) Diag(beta))^-1:
    Y = A (V - K~ S)        v minus what the state already holds for k, K~ = K e^G
    O = Q~ S + P Diag(beta) Y,        S' = e^(G_C) S + K^^T Diag(beta) Y,        K^ = K e^(G_C - G)
beta stands on the columns of the inverse, not on its rows: then Y is at hand in the backward pass and the gradient of beta needs
no division by beta, which may be 0. (Chunked delta rule: arXiv 2406.06484; decay a channel: Kimi Linear, arXiv 2510.26692.)

Shapes: lead = (n, B, HV) with n chunks; C tokens of a chunk; K, V channels; S [B,HV,K,V]; table [B,N,HV,K,V] of N documents.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .pairwise import pair_gradients, pair_scores
from .tiles import HIGHEST, ROWS, Decays, column_factors, decay_factors, inverse_unit_lower, running_sum


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
    q_enter: jnp.ndarray  # Q~ [lead,C,K]
    k_leave: jnp.ndarray  # K^ [lead,C,K]
    whole: jnp.ndarray  # e^(G_C) [lead,K], 0 where a document starts in the chunk
    reads: jnp.ndarray  # P [lead,C,C] lower triangular
    overlaps: jnp.ndarray  # [lead,C,C] strictly lower triangular
    inverse: jnp.ndarray  # A [lead,C,C]
    u: jnp.ndarray  # A V [lead,C,V]
    w: jnp.ndarray  # A K~ [lead,C,K]


def _tiled(x):
    return x.reshape(*x.shape[:-2], x.shape[-2] // ROWS, ROWS, x.shape[-1])


def _untiled(x):
    return x.reshape(*x.shape[:-3], x.shape[-3] * ROWS, x.shape[-1])


def _transposed(x):
    return jnp.swapaxes(x, -1, -2)


def _lower(size, strict):
    rows = np.arange(size)
    return rows[:, None] > rows if strict else rows[:, None] >= rows


def _scores(q, k, g, decays: Decays):
    """sum_d x_i k_j e^(G_i - G_j) for x = q, k; two [...,C,C], valid on and below the diagonal only."""
    size, tiles = q.shape[-2], q.shape[-2] // ROWS
    q, k = _tiled(q), _tiled(k)
    rows = jnp.concatenate([q * decays.row, k * decays.row], axis=-2)  # [...,I,2R,K]
    columns = k[..., None, :, :, :] * column_factors(decays)  # [...,I,J,R,K]
    columns = columns.reshape(*columns.shape[:-3], size, columns.shape[-1])
    both = jnp.matmul(rows, _transposed(columns), precision=HIGHEST)  # [...,I,2R,C]
    scores = [x.reshape(*x.shape[:-3], size, size) for x in (both[..., :ROWS, :], both[..., ROWS:, :])]
    if decays.own is None:
        eye = np.eye(tiles, dtype=bool)[:, None, :, None]
        for n, tile in enumerate(pair_scores(q, k, jnp.exp(_tiled(g)))):
            scattered = jnp.where(eye, tile[..., None, :], 0)  # [...,I,R,J,R]
            scores[n] = scores[n] + scattered.reshape(scores[n].shape)
    return scores


def prepare(q, k, v, g, beta, masks: Masks | None, *, scale, lower_bound, precision) -> Prepared:
    """q, k, g [lead,C,K]; v [lead,C,V]; beta [lead,C,1]; all in the accumulation dtype."""
    q, size = q * scale, q.shape[-2]
    if lower_bound is None:
        g = jnp.maximum(g, -1e4)  # e^-1e4 is 0 in float64 too; keeps 0 * g finite for g = -inf
    decays = decay_factors(g, lower_bound)
    enter, leave, whole = _untiled(decays.enter), _untiled(decays.leave), decays.whole
    reads, overlaps = _scores(q, k, g, decays)
    below, strict = _lower(size, False), _lower(size, True)
    if masks is not None:
        enter, leave = jnp.where(masks.enter, enter, 0), jnp.where(masks.leave, leave, 0)
        whole = jnp.where(masks.whole, whole, 0)
        below, strict = masks.pairs & below, masks.pairs & strict
    reads, overlaps = jnp.where(below, reads, 0), jnp.where(strict, overlaps, 0)
    inverse = inverse_unit_lower(overlaps * _transposed(beta))
    return Prepared(
        q=q,
        k=k,
        beta=beta,
        decays=decays,
        q_enter=q * enter,
        k_leave=k * leave,
        whole=whole,
        reads=reads,
        overlaps=overlaps,
        inverse=inverse,
        u=jnp.matmul(inverse, v, precision=precision),
        w=jnp.matmul(inverse, k * enter, precision=precision),
    )


def walk(prepared: Prepared, state, table, start_table, rows: Rows | None, precision):
    """The states of n chunks in turn -> (state, table), entry states [n,B,HV,K,V], Y [n,B,HV,C,V].

    With `rows`, a document's first chunk starts from its row of start_table, and each chunk's end goes to its row of table.
    """
    batch = jnp.arange(state.shape[0])

    def step(carry, chunk):
        state, table = carry
        u, w, k_leave, beta, whole, rows = chunk
        if rows is not None:
            state = jnp.where(rows.first[:, None, None, None], start_table[batch, rows.row], state)
        y = u - jnp.matmul(w, state, precision=precision)
        end = whole[..., None] * state + jnp.matmul(_transposed(k_leave), beta * y, precision=precision)
        if rows is not None:
            table = table.at[batch, rows.row].set(end)
        return (end, table), (state, y)

    p = prepared
    carry, (states, y) = lax.scan(step, (state, table), (p.u, p.w, p.k_leave, p.beta, p.whole, rows))
    return carry, states, y


def outputs(prepared: Prepared, states, y, precision):
    """O [lead,C,V] from the entry states and Y."""
    inner = jnp.matmul(prepared.reads, prepared.beta * y, precision=precision)
    return jnp.matmul(prepared.q_enter, states, precision=precision) + inner


def walk_back(prepared: Prepared, d_o, d_state, d_table, d_final, rows: Rows | None, precision):
    """Reverse walk -> (d_state, d_table), gradient of each chunk's end state [n,B,HV,K,V], gradient of Y [n,B,HV,C,V].

    d_final [B,N,HV,K,V] is the cotangent of the final table; d_table collects the gradient of the start table.
    """
    batch = jnp.arange(d_state.shape[0])
    p = prepared
    from_o = jnp.matmul(_transposed(p.reads), d_o, precision=precision)
    state_from_o = jnp.matmul(_transposed(p.q_enter), d_o, precision=precision)

    def step(carry, chunk):
        d_end, d_table = carry
        from_o, state_from_o, k_leave, beta, w, whole, rows = chunk
        if rows is not None:
            d_end = jnp.where(rows.last[:, None, None, None], d_final[batch, rows.row], d_end)
        d_y = beta * (from_o + jnp.matmul(k_leave, d_end, precision=precision))
        d_state = whole[..., None] * d_end + state_from_o - jnp.matmul(_transposed(w), d_y, precision=precision)
        if rows is not None:
            kept = jnp.where(rows.first[:, None, None, None], d_state, d_table[batch, rows.row])
            d_table = d_table.at[batch, rows.row].set(kept)
        return (d_state, d_table), (d_end, d_y)

    xs = (from_o, state_from_o, p.k_leave, p.beta, p.w, p.whole, rows)
    carry, (d_ends, d_y) = lax.scan(step, (d_state, d_table), xs, reverse=True)
    return carry, d_ends, d_y


def _pair_parts(p: Prepared, g, d_reads, d_overlaps):
    """Through the scores: gradients of q, of k (as row and as column) and of g [lead,C,K], from strictly lower gradients.

    The gradient of g is split in two: what is left to sum over the rows >= t of the chunk, and the rest (None with a bound).
    """
    size, tiles = p.q.shape[-2], p.q.shape[-2] // ROWS
    q, k, decays = _tiled(p.q), _tiled(p.k), p.decays
    strips = jnp.concatenate([_tiled(d_reads), _tiled(d_overlaps)], axis=-2)  # [...,I,2R,C]
    factors = column_factors(decays)  # [...,I,J,R,K]
    columns = (k[..., None, :, :, :] * factors).reshape(*factors.shape[:-3], size, factors.shape[-1])
    rows = jnp.concatenate([q * decays.row, k * decays.row], axis=-2)
    by_row = jnp.matmul(strips, columns, precision=HIGHEST)  # [...,I,2R,K]
    grad_q, grad_row = by_row[..., :ROWS, :] * decays.row, by_row[..., ROWS:, :] * decays.row
    by_column = jnp.matmul(_transposed(strips), rows, precision=HIGHEST)  # [...,I,C,K]
    by_column = by_column.reshape(factors.shape) * factors
    # Written out: jaxlib 0.10.2's CPU backend crashes in the reduction over this axis that follows a dot.
    grad_column = sum(by_column[..., i, :, :, :] for i in range(tiles))
    if decays.own is not None:
        later = q * grad_q + k * (grad_row - grad_column)
        return _untiled(grad_q), _untiled(grad_row + grad_column), _untiled(later), None
    own = lambda x: jnp.stack([_tiled(x)[..., i, :, i * ROWS : (i + 1) * ROWS] for i in range(tiles)], axis=-3)
    own_q, own_row, own_column, d_g = pair_gradients(q, k, jnp.exp(_tiled(g)), own(d_reads), own(d_overlaps))
    across = jnp.sum(k[..., None, :, :, :] * by_column, axis=-2)  # [...,I,J,K] pairs of tiles
    d_g = d_g + running_sum(q * grad_q + k * grad_row, reverse=True) + _exclusive_sum(k * grad_column)
    d_g = d_g + _over(across)[..., None, :]
    return _untiled(grad_q + own_q), _untiled(grad_row + grad_column + own_row + own_column), None, _untiled(d_g)


def _exclusive_sum(x):
    return jnp.pad(running_sum(x)[..., :-1, :], [(0, 0)] * (x.ndim - 2) + [(1, 0), (0, 0)])


def _over(across):
    """For each tile the sum over pairs of tiles (I,J) with the tile between them: [...,I,J,K] -> [...,I,K]."""
    tile = np.arange(across.shape[-2])
    between = (tile[None, :, None] > tile[:, None, None]) & (tile[None, None, :] < tile[:, None, None])
    return jnp.sum(jnp.where(between[..., None], across[..., None, :, :, :], 0), axis=(-3, -2))


def _gate_gradient(later, earlier, whole):
    """sum over rows >= t of `later` plus sum over rows < t of `earlier` [lead,C,K], plus `whole` [lead,K].

    Two sums, not one difference from a total: a document's gradient keeps no rounding of the next one's state.
    """
    later, earlier = _tiled(later), _tiled(earlier)
    tiles = later.shape[-3]
    lower = jnp.asarray(_lower(tiles, True), later.dtype)[:, :, None]
    back = running_sum(later, reverse=True)
    after = jnp.sum(jnp.swapaxes(lower, 0, 1) * back[..., None, :, 0, :], axis=-2)  # [...,I,K] tiles after I
    before = jnp.sum(lower * jnp.sum(earlier, axis=-2)[..., None, :, :], axis=-2)
    return _untiled(back + _exclusive_sum(earlier) + (after + before + whole[..., None, :])[..., None, :])


def gradients(prepared: Prepared, g, masks: Masks | None, d_o, states, y, d_ends, d_y, *, scale, precision):
    """Gradients of q, k, v, g [lead,C,...] and beta [lead,C] of all chunks at once."""
    p, size = prepared, prepared.q.shape[-2]
    strict = _lower(size, True)
    pairs = strict if masks is None else masks.pairs & strict
    below = _lower(size, False) if masks is None else masks.pairs & _lower(size, False)
    d_v = jnp.matmul(_transposed(p.inverse), d_y, precision=precision)
    both = jnp.concatenate([d_o, -d_v], axis=-2)  # [lead,2C,V]
    on_pairs = jnp.matmul(both, _transposed(y), precision=precision)  # [lead,2C,C]
    on_state = jnp.matmul(both, _transposed(states), precision=precision)  # [lead,2C,K]
    on_leave = jnp.matmul(y, _transposed(d_ends), precision=precision)  # [lead,C,K]
    n_reads = jnp.where(below, on_pairs[..., :size, :], 0)
    n_overlaps = jnp.where(pairs, on_pairs[..., size:, :], 0)
    d_beta = jnp.sum(p.reads * n_reads + p.overlaps * n_overlaps, axis=-2) + jnp.sum(p.k_leave * on_leave, axis=-1)

    scaled = _transposed(p.beta)
    grad_q, grad_k, later, d_g = _pair_parts(p, g, jnp.where(pairs, n_reads * scaled, 0), n_overlaps * scaled)
    enter, leave = _untiled(p.decays.enter), _untiled(p.decays.leave)
    if masks is not None:
        enter, leave = jnp.where(masks.enter, enter, 0), jnp.where(masks.leave, leave, 0)
    state_q, state_row = on_state[..., :size, :] * enter, on_state[..., size:, :] * enter
    grad_leave = p.beta * on_leave
    from_state = p.q * state_q + p.k * state_row
    later = from_state if later is None else from_state + later
    from_ends = p.whole * jnp.sum(states * d_ends, axis=-1)
    on_decay = _gate_gradient(later, p.k_leave * grad_leave, from_ends)
    d_g = on_decay if d_g is None else on_decay + d_g
    # A pair of a token with itself has no decay: it is left out above, where it would only add rounding to d_g.
    own = jnp.sum(d_o * y, axis=-1, keepdims=True) * p.beta
    d_q = (grad_q + state_q + own * p.k) * scale
    d_k = grad_k + state_row + grad_leave * leave + own * p.q
    return d_q, d_k, d_v, d_g, d_beta
