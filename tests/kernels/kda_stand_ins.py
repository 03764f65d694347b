"""Stand-ins of the GPU kernels of KDA in jax.numpy and float64: they follow kda_stages.py; what a kernel leaves unwritten is NaN here.

Shapes: B batch, T tokens, HV value heads, K, V channels, S walks of a row, n chunks of C = 32 tokens, D any number of channels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.kda import api, triton

C, NAN = 32, float("nan")


class Prepared(NamedTuple):
    neg_w: jax.Array
    q_in: jax.Array
    k_out: jax.Array
    t: jax.Array
    p: jax.Array
    decay: jax.Array


def to_chunks(x, heads, first, n):
    """[B,T,h,D] -> [B,heads,n,C,D], from chunk `first`; tokens past the end are 0."""
    x = x if x.ndim == 4 else x[..., None]
    x = jnp.pad(x, [(0, 0), (0, max(0, (first + n) * C - x.shape[1])), (0, 0), (0, 0)])[:, first * C : (first + n) * C]
    x = jnp.moveaxis(x.reshape(x.shape[0], n, C, *x.shape[2:]), 3, 1)
    return jnp.repeat(x, heads // x.shape[1], axis=1)


def to_tokens(x, out, tokens, first):
    """[B,HV,n,C,D] into out [B,T,HV,D] (NaN when None), from chunk `first`; NaN in x means not written."""
    x = jnp.moveaxis(x, 1, 3)
    x = x.reshape(x.shape[0], -1, *x.shape[3:])[:, : tokens - first * C]
    # Not x.at[].set: of a whole row it leaves a constant of size 0, over which Shardy of jaxlib 0.11.2 crashes in shard_map.
    x = jnp.pad(x, [(0, 0), (first * C, tokens - first * C - x.shape[1]), (0, 0), (0, 0)], constant_values=NAN)
    return x if out is None else jnp.where(jnp.isnan(x), out, x)


def operands(q, k, g, beta, A_log, dt_bias, ids, first, n, lower_bound, fused):
    """q, k, g, beta of the recurrence in chunks, and the masks of documents."""
    heads, tokens = g.shape[2], q.shape[1]
    if fused:
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        rate = 1.0 if A_log is None else jnp.exp(A_log)[:, None]
        g = lower_bound * jax.nn.sigmoid(rate * (g if dt_bias is None else g + dt_bias))
        beta = jax.nn.sigmoid(beta)
    q, k, g, beta = (to_chunks(x, heads, first, n) for x in (q, k, g, beta))
    starts = jnp.zeros((q.shape[0], tokens), int) if ids is None else jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    s = jnp.cumsum(to_chunks(starts[..., None].astype(int), 1, first, n)[..., 0], axis=-1)  # [B,1,n,C]
    same, enter, leave = s[..., :, None] == s[..., None, :], (s == 0)[..., None], (s == s[..., -1:])[..., None]
    return q, k, g, jnp.where(jnp.abs(beta) < 1e-18, 1e-18, beta), same, enter, leave, s[..., -1:] == 0


def pairs(g, same):
    G = jnp.cumsum(g, axis=3)
    below, strict = jnp.tri(C, dtype=bool) & same, jnp.tri(C, k=-1, dtype=bool) & same
    return G, jnp.exp(jnp.minimum(G[..., :, None, :] - G[..., None, :, :], 0)), below, strict


def inverse(lower):
    """(I + lower)^-1 of strictly lower triangular [C,C]. Not jnp.linalg.inv: its thread pool and collectives of 8 CPU devices deadlock."""
    power, x = -lower, jnp.eye(C) - lower
    for _ in range(4):
        power = power @ power
        x = x + power @ x
    return x


def prep(q, k, g, beta, A_log, dt_bias, ids, *, first, chunks, scale, lower_bound, fused):
    q, k, g, beta, same, enter, leave, whole = operands(q, k, g, beta, A_log, dt_bias, ids, first, chunks, lower_bound, fused)
    G, pair, below, strict = pairs(g, same)
    p = jnp.where(below, jnp.einsum("...id,...jd,...ijd->...ij", scale * q, k, pair), 0)
    overlaps = jnp.where(strict, jnp.einsum("...id,...jd,...ijd->...ij", k, k, pair), 0)
    t = inverse(beta * overlaps) * jnp.swapaxes(beta, -1, -2)
    end = G[..., -1:, :]
    return Prepared(
        neg_w=-t @ jnp.where(enter, k * jnp.exp(G), 0),
        q_in=jnp.where(enter, scale * q * jnp.exp(G), 0),
        k_out=jnp.where(leave, k * jnp.exp(end - G), 0),
        t=t,
        p=p,
        decay=jnp.where(whole, jnp.exp(end[..., 0, :]), 0),
    )


T_ = lambda x: jnp.swapaxes(x, -1, -2)


def walk(step, state, bounds, first, arrays, reverse=False):
    """step(state [B,S,HV,V,K], chunk's arrays [B,1,HV,...]) -> new state, (outputs,); of the one walk that has the chunk, else NaN."""

    def body(state, x):
        number, arrays = x
        active = (bounds[..., 0] <= number) & (number < bounds[..., 1])
        active = active[..., None, None, None]
        new, outputs = step(state, *(a[:, None] for a in arrays))
        pick = lambda y: jnp.where(jnp.any(active, axis=1), jnp.sum(jnp.where(active, y, 0), axis=1), NAN)
        return jnp.where(active, new, state), tuple(map(pick, outputs))

    arrays = tuple(jnp.moveaxis(a, 2, 0) for a in arrays)
    xs = (first + jnp.arange(arrays[0].shape[0]), arrays)
    state, outputs = lax.scan(body, state, xs, reverse=reverse)
    # The barrier: jaxlib 0.10.2 folds these transposes into a product with the batch axes in the wrong order.
    return state, lax.optimization_barrier(tuple(jnp.moveaxis(y, 0, 2) for y in outputs))


def forward(p, v, state, bounds, first):
    """-> final, o, states, v_new"""

    def step(s, neg_w, q_in, k_out, t, p, decay, v):
        new = t @ v + neg_w @ T_(s)
        o = q_in @ T_(s) + p @ new
        return s * decay[..., None, :] + T_(new) @ k_out, (o, s, new)

    v_chunks = to_chunks(v, v.shape[2], first, p.t.shape[2])
    final, outputs = walk(step, T_(state), bounds, first, (*p, v_chunks))
    return T_(final), *outputs


def walk_forward(p, v, state, bounds, *, first, out=None):
    final, o, _, _ = forward(p, v, state, bounds, first)
    return to_tokens(o, out, v.shape[1], first), final


def walk_both(p, v, state, d_o, d_state, bounds, *, first):
    return *forward(p, v, state, bounds, first)[2:], *reverse(p, d_o, d_state, bounds, first)


def walk_reverse(p, d_o, d_state, bounds, *, first):
    return reverse(p, d_o, d_state, bounds, first)[0]


def reverse(p, d_o, d_state, bounds, first):
    """-> d_initial, d_states, d_v_new"""

    def step(ds, neg_w, q_in, k_out, t, p, decay, d_o):
        d_v = T_(p) @ d_o + k_out @ T_(ds)
        return ds * decay[..., None, :] + T_(d_o) @ q_in + T_(d_v) @ neg_w, (ds, d_v)

    d_o = to_chunks(d_o, d_o.shape[2], first, p.t.shape[2])
    initial, (d_states, d_v_new) = walk(step, T_(d_state), bounds, first, (*p, d_o), reverse=True)
    return T_(initial), d_states, d_v_new


def walk_summary(p, v, bounds, *, first):
    batch, walks, (heads, keys), size = v.shape[0], bounds.shape[1], (p.decay.shape[1], p.decay.shape[3]), v.shape[3]
    start = jnp.concatenate([jnp.zeros((keys, size)), jnp.eye(keys)], axis=1)
    start = jnp.broadcast_to(start, (batch, walks, heads, keys, size + keys)) + 0 * v[:1, :1, :1, :1, None]
    wide = jnp.pad(v, [(0, 0)] * 3 + [(0, keys)])
    final = forward(p, wide, start, bounds, first)[0]
    return final[..., :size], final[..., size:]


def fold_states(state, add, matrix):
    states = [state]
    for s in range(add.shape[1]):
        states.append(matrix[:, s] @ states[-1] + add[:, s])
    return jnp.stack(states[:-1], axis=1), states[-1]


def fold_gradients(d_state, d_add, matrix):
    flip = lambda x: jnp.flip(x, axis=1)
    states, last = fold_states(d_state, flip(d_add), flip(T_(matrix)))
    return flip(states), last


def grads(q, k, g, beta, A_log, dt_bias, ids, t, d_o, states, v_new, d_states, d_v_new, *, first, scale, lower_bound, fused, out=None):
    n, heads, tokens = t.shape[2], g.shape[2], q.shape[1]

    def front(q, k, g, beta, A_log, dt_bias):
        return operands(q, k, g, beta, A_log, dt_bias, ids, first, n, lower_bound, fused)[:4]

    masks = operands(q, k, g, beta, A_log, dt_bias, ids, first, n, lower_bound, fused)[4:]
    x_q, x_k, x_g, x_beta = front(q, k, g, beta, A_log, dt_bias)
    same, enter, leave, whole = masks
    G, pair, below, strict = pairs(x_g, same)
    d_o = to_chunks(d_o, heads, first, n)
    dv = T_(t) @ d_v_new
    m1, m2 = jnp.where(below, scale * d_o @ T_(v_new), 0), jnp.where(strict, -dv @ T_(v_new), 0)
    entering, leaving = jnp.where(enter, jnp.exp(G), 0), jnp.where(leave, jnp.exp(G[..., -1:, :] - G), 0)
    dq = scale * entering * (d_o @ states) + jnp.einsum("...ij,...jd,...ijd->...id", m1, x_k, pair)
    dk_row = -entering * (dv @ states) + jnp.einsum("...ij,...jd,...ijd->...id", m2, x_k, pair)
    dk_col = jnp.einsum("...ij,...id,...ijd->...jd", m1, x_q, pair) + jnp.einsum("...ij,...id,...ijd->...jd", m2, x_k, pair)
    dk_out = leaving * (v_new @ d_states)
    later = x_q * dq + x_k * (dk_row - dk_col)
    decay = jnp.where(whole, jnp.exp(G[..., -1, :]), 0) * jnp.sum(states * d_states, axis=-2)
    written = jnp.cumsum(x_k * dk_out, axis=3) - x_k * dk_out
    dg = jnp.cumsum(later[..., ::-1, :], axis=3)[..., ::-1, :] + written + decay[..., None, :]
    dbeta = jnp.sum((dv / x_beta) * (v_new / x_beta), axis=-1, keepdims=True)
    chunked = [dq, dk_row + dk_col + dk_out, dg, dbeta]
    d_A = d_bias = None
    if fused:
        repeat = lambda x: jnp.repeat(x, heads // x.shape[2], axis=2)
        raws = [to_chunks(repeat(x), heads, first, n) for x in (q, k, g, beta)]
        real = (first * C + jnp.arange(n * C) < tokens).reshape(n, C, 1)
        spread = lambda x: None if x is None else jnp.broadcast_to(x[:, None, None], (q.shape[0], heads, n, 1, *x.shape[1:]))

        def gate(q, k, raw, logits, A, bias):
            unit = lambda x: x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
            rate = 1.0 if A is None else jnp.exp(A)[..., None]
            return [unit(q), unit(k), lower_bound * jax.nn.sigmoid(rate * (raw if bias is None else raw + bias)), jax.nn.sigmoid(logits)]

        A, bias = spread(A_log), spread(dt_bias)
        _, vjp = jax.vjp(gate, *raws, A, bias)
        *chunked, d_A, d_bias = vjp([jnp.where(real, x, 0) for x in chunked])
        d_A = None if A is None else d_A[..., 0]
        d_bias = None if bias is None else d_bias[..., 0, :]
    chunked.insert(2, dv)
    chunked[4] = chunked[4][..., 0][..., None]
    outs = (None,) * 5 if out is None else (*out[:4], out[4][..., None])
    written = [to_tokens(x, old, tokens, first) for x, old in zip(chunked, outs, strict=True)]
    return *written[:4], written[4][..., 0], d_A, d_bias


def use(monkeypatch):
    """kda and gated_kda take the kernels' path, over the stand-ins, for 8, 16 and 32 channels."""
    stand_ins = triton.Stages(prep, walk_forward, walk_both, walk_reverse, walk_summary, grads, fold_states, fold_gradients)
    monkeypatch.setattr(triton, "stages", lambda: stand_ins)
    monkeypatch.setattr(triton, "SIZES", (8, 16, 32))
    choose = api.resolve
    monkeypatch.setattr(api, "resolve", lambda name, *args: "triton" if name is None else choose(name, *args))


def cut(monkeypatch, window, segment):
    """How rows are cut from here on, in tokens."""
    monkeypatch.setattr(triton, "cut", lambda *sizes: (window, segment))
