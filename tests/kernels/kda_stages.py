"""The stages of the GPU kernels of KDA in float64 NumPy: what each kernel reads and writes, and the oracle of their tests.

prep     inputs of a chunk -> what the walk over the states needs (Prepared)
forward  the walk: o, final state; for the backward pass also the state before each chunk and V'
reverse  the walk back: the state's gradient after each chunk and dV'
grads    everything else, chunk by chunk, from the two walks

Shapes: B batch, T tokens, H query/key heads, HV value heads, K, V channels; N chunks of C = 32 tokens (the last one filled up with
tokens that have k = v = g = beta = 0); scratch is [B,HV,N,...], so that the chunks of one walk follow each other. States are kept
transposed, [V,K]. S state before a chunk, dS+ gradient of the state after it.
"""

from typing import NamedTuple

import numpy as np

C, TILE = 32, 16
TINY_BETA = 1e-18  # |beta| below it is replaced by it: V'/beta gives the gradient of beta also where beta is 0


class Prepared(NamedTuple):
    neg_w: np.ndarray  # [B,HV,N,C,K]  -T K~; rows after a boundary in the chunk read no state: K~ = 0 there
    q_in: np.ndarray  # [B,HV,N,C,K]  Q~ = scale q e^G, 0 for rows after a boundary
    k_out: np.ndarray  # [B,HV,N,C,K]  K^ = k e^(G_C - G), 0 for rows of another document than the chunk's last one
    t: np.ndarray  # [B,HV,N,C,C]  T = (I + Diag(beta) L)^-1 Diag(beta)
    p: np.ndarray  # [B,HV,N,C,C]  P = tril(scale q k^T e^(Gi - Gj)), 0 between documents
    decay: np.ndarray  # [B,HV,N,K]  e^(G_C), 0 with a boundary in the chunk


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def chunks(x, heads, n):
    """[B,T,h,D] -> [B,heads,N,C,D], repeated to `heads`, zero-filled."""
    x = np.asarray(x, np.float64)
    x = np.pad(x, [(0, 0), (0, n * C - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], n, C, *x.shape[2:])
    return np.repeat(np.moveaxis(x, 3, 1), heads // x.shape[3], axis=1)


def unchunks(x, tokens):
    """[B,HV,N,C,D] -> [B,T,HV,D]"""
    x = np.moveaxis(x, 1, 3)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


def documents(ids, n):
    """[B,T] filled document ids -> per chunk [B,1,N,C]: segment number inside the chunk; a boundary at its first token counts as 1."""
    ids = np.pad(np.asarray(ids), [(0, 0), (0, n * C - np.shape(ids)[1])], mode="edge")
    starts = np.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    return np.cumsum(starts.reshape(len(ids), n, C), axis=2)[:, None]


class Operands(NamedTuple):
    """q, k of the recurrence, g, beta [B,HV,N,C,...] and the masks of documents."""

    q: np.ndarray
    k: np.ndarray
    g: np.ndarray
    beta: np.ndarray
    same: np.ndarray  # [B,1,N,C,C]
    enter: np.ndarray  # [B,1,N,C,1]
    leave: np.ndarray
    whole: np.ndarray  # [B,1,N,1]


def gated(q, k, raw, logits, A_log, dt_bias, lower_bound):
    """The fused front: L2 norm, safe gate, sigmoid. -> q, k, g, beta"""
    q, k, raw, logits = (np.asarray(x, np.float64) for x in (q, k, raw, logits))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    rate = 1 if A_log is None else np.exp(np.asarray(A_log, np.float64))[:, None]
    bias = 0 if dt_bias is None else np.asarray(dt_bias, np.float64)
    return q, k, lower_bound * sigmoid(rate * (raw + bias)), sigmoid(logits)


def gated_grads(q, k, raw, logits, A_log, dt_bias, lower_bound, dq, dk, dg, dbeta):
    """Gradients of what `gated` returns (dq, dk of the value heads) -> of its operands: dq, dk [B,T,HV,K], draw, dlogits, and
    dA_log [B,T,HV,K] token by token (draw is dt_bias's)."""
    q, k, raw, logits = (np.asarray(x, np.float64) for x in (q, k, raw, logits))
    group = raw.shape[2] // q.shape[2]

    def through_norm(x, d):
        x = np.repeat(x, group, axis=2)
        r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
        return r * (d - x * r * (x * r * d).sum(-1, keepdims=True))

    rate = np.exp(np.asarray(A_log, np.float64))[:, None]
    z = rate * (raw + np.asarray(dt_bias, np.float64))
    dz = dg * lower_bound * sigmoid(z) * sigmoid(-z)
    return through_norm(q, dq), through_norm(k, dk), dz * rate, dbeta * sigmoid(logits) * sigmoid(-logits), dz * z


def operands(q, k, g, beta, ids):
    heads, n = g.shape[2], -(-q.shape[1] // C)
    q, k, g = (chunks(x, heads, n) for x in (q, k, g))
    beta = chunks(np.asarray(beta)[..., None], heads, n)
    ids = np.ones((*beta.shape[:1], n * C), int) if ids is None else ids
    s = documents(ids, n)
    beta = np.where(np.abs(beta) < TINY_BETA, TINY_BETA, beta)
    return Operands(q, k, g, beta, s[..., :, None] == s[..., None, :], (s == 0)[..., None], (s == s[..., -1:])[..., None], s[..., -1:] == 0)


def prep(x: Operands, scale) -> Prepared:
    G = np.cumsum(x.g, axis=3)
    end = G[..., -1:, :]
    pair = np.exp(np.minimum(G[..., :, None, :] - G[..., None, :, :], 0))  # [B,HV,N,C,C,K], only here
    below, strict = np.tri(C, dtype=bool) & x.same, np.tri(C, k=-1, dtype=bool) & x.same
    p = np.where(below, np.einsum("...id,...jd,...ijd->...ij", scale * x.q, x.k, pair), 0)
    overlaps = np.where(strict, np.einsum("...id,...jd,...ijd->...ij", x.k, x.k, pair), 0)
    t = np.linalg.inv(np.eye(C) + x.beta * overlaps) * np.swapaxes(x.beta, -1, -2)
    k_in = np.where(x.enter, x.k * np.exp(G), 0)
    return Prepared(
        neg_w=-t @ k_in,
        q_in=np.where(x.enter, scale * x.q * np.exp(G), 0),
        k_out=np.where(x.leave, x.k * np.exp(end - G), 0),
        t=t,
        p=p,
        decay=np.where(x.whole, np.exp(end[..., 0, :]), 0),
    )


def forward(x: Prepared, v, initial):
    """v [B,T,HV,V], initial [B,HV,K,V] -> o [B,T,HV,V], final [B,HV,K,V], states [B,HV,N,V,K] before each chunk, v_new [B,HV,N,C,V]."""
    tokens, n = v.shape[1], x.p.shape[2]
    v = chunks(v, v.shape[2], n)
    s = np.swapaxes(np.asarray(initial, np.float64), -1, -2)
    o, states, v_new = [], [], []
    for i in range(n):
        states.append(s)
        new = x.t[:, :, i] @ v[:, :, i] + x.neg_w[:, :, i] @ np.swapaxes(s, -1, -2)
        o.append(x.q_in[:, :, i] @ np.swapaxes(s, -1, -2) + x.p[:, :, i] @ new)
        s = s * x.decay[:, :, i, None, :] + np.swapaxes(new, -1, -2) @ x.k_out[:, :, i]
        v_new.append(new)
    stack = lambda x: np.stack(x, axis=2)
    return unchunks(stack(o), tokens), np.swapaxes(s, -1, -2), stack(states), stack(v_new)


def reverse(x: Prepared, d_o, d_final):
    """d_o [B,T,HV,V], d_final [B,HV,K,V] -> d_initial [B,HV,K,V], d_states [B,HV,N,V,K] after each chunk, d_v_new [B,HV,N,C,V]."""
    n = x.p.shape[2]
    d_o = chunks(d_o, d_o.shape[2], n)
    ds = np.swapaxes(np.asarray(d_final, np.float64), -1, -2)
    d_states, d_v_new = [None] * n, [None] * n
    for i in reversed(range(n)):
        d_states[i] = ds
        d_v_new[i] = np.swapaxes(x.p[:, :, i], -1, -2) @ d_o[:, :, i] + x.k_out[:, :, i] @ np.swapaxes(ds, -1, -2)
        ds = (
            ds * x.decay[:, :, i, None, :]
            + np.swapaxes(d_o[:, :, i], -1, -2) @ x.q_in[:, :, i]
            + np.swapaxes(d_v_new[i], -1, -2) @ x.neg_w[:, :, i]
        )
    return np.swapaxes(ds, -1, -2), np.stack(d_states, axis=2), np.stack(d_v_new, axis=2)


def grads(x: Operands, t, d_o, states, v_new, d_states, d_v_new, scale, tokens):
    """-> dq, dk [B,T,HV,K] (of the value heads, not yet summed over a group), dv [B,T,HV,V], dg [B,T,HV,K], dbeta [B,T,HV].

    With R = T^T dV' = dv: M1 = scale tril(dO V'^T), M2 = -stril(dv V'^T); both act on keys through the decays between i and j.
    Two sums for dg, not one difference from a total: a document's gradient keeps no rounding of the next one's state.
    """
    n = t.shape[2]
    d_o = chunks(d_o, d_o.shape[2], n)
    G = np.cumsum(x.g, axis=3)
    pair = np.exp(np.minimum(G[..., :, None, :] - G[..., None, :, :], 0))
    below, strict = np.tri(C, dtype=bool) & x.same, np.tri(C, k=-1, dtype=bool) & x.same
    dv = np.swapaxes(t, -1, -2) @ d_v_new
    m1 = np.where(below, scale * d_o @ np.swapaxes(v_new, -1, -2), 0)
    m2 = np.where(strict, -dv @ np.swapaxes(v_new, -1, -2), 0)
    enter = np.where(x.enter, np.exp(G), 0)
    leave = np.where(x.leave, np.exp(G[..., -1:, :] - G), 0)
    dq = scale * enter * (d_o @ states) + np.einsum("...ij,...jd,...ijd->...id", m1, x.k, pair)
    dk_row = -enter * (dv @ states) + np.einsum("...ij,...jd,...ijd->...id", m2, x.k, pair)
    dk_col = np.einsum("...ij,...id,...ijd->...jd", m1, x.q, pair) + np.einsum("...ij,...id,...ijd->...jd", m2, x.k, pair)
    dk_out = leave * (v_new @ d_states)
    later = x.q * dq + x.k * (dk_row - dk_col)
    written = np.cumsum(x.k * dk_out, axis=3) - x.k * dk_out  # of the tokens before
    decay = np.where(x.whole, np.exp(G[..., -1, :]), 0) * np.sum(states * d_states, axis=-2)
    dg = np.cumsum(later[..., ::-1, :], axis=3)[..., ::-1, :] + written + decay[..., None, :]
    dbeta = np.sum((dv / x.beta) * (v_new / x.beta), axis=-1)
    back = lambda y: unchunks(y, tokens)
    return back(dq), back(dk_row + dk_col + dk_out), back(dv), back(dg), back(dbeta[..., None])[..., 0]
