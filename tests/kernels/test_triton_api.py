"""How the GPU kernels of KDA are put together, without a GPU: `kda_triton` over stand-ins of the kernels in jax.numpy and float64.

The stand-ins follow tests/kernels/kda_stages.py; what a kernel leaves unwritten is NaN here. Everything between the kernels is the
real thing: windows, segments, a state per document, padding, groups, vmap, shard_map, and which implementation is chosen.
"""

import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from moejax.kernels.kda import api, gated_kda, kda, kda_implementation, triton, triton_launch
from moejax.kernels.kda.segments import document_ids

C, NAN = 32, float("nan")
P = PartitionSpec
QUICK = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=QUICK)


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
    if out is None:
        out = jnp.full((x.shape[0], tokens, *x.shape[2:]), NAN, x.dtype)
    old = out[:, first * C : first * C + x.shape[1]]
    return out.at[:, first * C : first * C + x.shape[1]].set(jnp.where(jnp.isnan(x), old, x))


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
    below, strict = np.tri(C, dtype=bool) & same, np.tri(C, k=-1, dtype=bool) & same
    return G, jnp.exp(jnp.minimum(G[..., :, None, :] - G[..., None, :, :], 0)), below, strict


def prep(q, k, g, beta, A_log, dt_bias, ids, *, first, chunks, scale, lower_bound, fused):
    q, k, g, beta, same, enter, leave, whole = operands(q, k, g, beta, A_log, dt_bias, ids, first, chunks, lower_bound, fused)
    G, pair, below, strict = pairs(g, same)
    p = jnp.where(below, jnp.einsum("...id,...jd,...ijd->...ij", scale * q, k, pair), 0)
    overlaps = jnp.where(strict, jnp.einsum("...id,...jd,...ijd->...ij", k, k, pair), 0)
    t = jnp.linalg.inv(jnp.eye(C) + beta * overlaps) * jnp.swapaxes(beta, -1, -2)
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


def walk_forward(p, v, state, bounds, *, first, out=None, keep=False, write_o=True):
    def step(s, neg_w, q_in, k_out, t, p, decay, v):
        new = t @ v + neg_w @ T_(s)
        o = q_in @ T_(s) + p @ new
        return s * decay[..., None, :] + T_(new) @ k_out, (o, s, new)

    v_chunks = to_chunks(v, v.shape[2], first, p.t.shape[2])
    final, (o, states, v_new) = walk(step, T_(state), bounds, first, (*p, v_chunks))
    o = to_tokens(o, out, v.shape[1], first) if write_o else None
    return o, T_(final), states if keep else None, v_new if keep else None


def walk_reverse(p, d_o, d_state, bounds, *, first):
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
    _, final, _, _ = walk_forward(p, wide, start, bounds, first=first, write_o=False)
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


@pytest.fixture
def kernels(monkeypatch, x64):
    """kda and gated_kda take the kernels' path, over the stand-ins."""
    stand_ins = triton.Stages(prep, walk_forward, walk_reverse, walk_summary, grads, fold_states, fold_gradients)
    monkeypatch.setattr(triton, "stages", lambda: stand_ins)
    monkeypatch.setattr(triton, "SIZES", (8, 16, 32))
    choose = api._choose
    monkeypatch.setattr(api, "_choose", lambda name, *args: "triton" if name is None else choose(name, *args))
    return monkeypatch


def cut(monkeypatch, window, segment):
    monkeypatch.setattr(triton, "cut", lambda *sizes: (window, segment))


def make(rng, batch, tokens, heads, value_heads, K, V, documents=None):
    """q, k, v, raw gate, beta logits, A_log, dt_bias, initial state."""
    rows = () if documents is None else (documents,)
    shapes = [(batch, tokens, heads, K)] * 2 + [
        (batch, tokens, value_heads, V),
        (batch, tokens, value_heads, K),
        (batch, tokens, value_heads),
    ]
    shapes += [(value_heads,), (value_heads, K), (batch, *rows, value_heads, K, V)]
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def plain(q, k, v, raw, logits, A_log, dt_bias, initial, **options):
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    g = -5 * jax.nn.sigmoid(raw)
    return kda(unit(q), unit(k), v, g, jax.nn.sigmoid(logits), initial_state=initial, lower_bound=-5.0, output_final_state=True, **options)


def fused(q, k, v, raw, logits, A_log, dt_bias, initial, **options):
    return gated_kda(q, k, v, raw, logits, A_log, dt_bias, initial_state=initial, output_final_state=True, **options)


@functools.cache
def compiled(run, options, _cut):
    """Jitted once for each way of cutting rows."""

    def both(args, cotangents, ids):
        out, vjp = jax.vjp(lambda args: run(*args, segment_ids=ids, **dict(options)), args)
        return out, vjp(jax.tree.map(lambda x: jnp.resize(cotangents, x.shape), out))[0]

    return jit(both)


def value_and_gradients(run, args, segment_ids=None, **options):
    weights = jnp.asarray(np.random.default_rng(9).normal(size=4099))
    return compiled(run, tuple(options.items()), triton.cut)(args, weights, segment_ids)


WANTED = {}


def check(run, args, tolerance=1e-9, **options):
    """The kernels' path against the token recurrence: output, final state, every gradient."""
    got = value_and_gradients(run, args, **options)
    key = (run, *(x if x is None else float(jnp.sum(x)) for x in (*args, *options.values())))  # cases share their operands
    if key not in WANTED:
        WANTED[key] = value_and_gradients(run, args, implementation="reference", **options)
    wanted = WANTED[key]
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, y), x in zip(paths, jax.tree.leaves(got), strict=True):
        error = np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-300)
        assert error <= tolerance or np.max(np.abs(y)) == np.max(np.abs(x)) == 0, (jax.tree_util.keystr(path), error)
    return got


TOKENS = 101  # the last chunk, window and segment are not full
ROWS = [[1] * 20 + [2] * 20 + [0] * 3 + [2] * 7 + [4] * 40 + [5] * 11, [0] * 5 + [1] * 50 + [2] * 1 + [3] * 39 + [0] * 6]
PACKED = jnp.asarray(ROWS, jnp.int32)  # boundaries inside chunks and windows; some documents are absent


CASES = [(fused, None, 512, 0), (plain, None, 64, 0), (fused, PACKED, 64, 0), (plain, None, 64, 32), (fused, PACKED, 64, 32)]


@pytest.mark.parametrize("run, ids, window, segment", CASES)
def test_against_the_recurrence(kernels, run, ids, window, segment):
    """One window, several, and segments in several; one document and packed ones; two value heads to a key head."""
    cut(kernels, window, segment)
    check(run, make(np.random.default_rng(0), 2, TOKENS, 1, 2, 8, 16), segment_ids=ids)


@pytest.mark.parametrize("run, window", [(plain, 512), (fused, 64)])
def test_a_state_per_document(kernels, run, window):
    """Documents start a chunk each; document 3 is absent in the first row, 4 and 5 in the second."""
    cut(kernels, window, 64)
    check(run, make(np.random.default_rng(1), 2, TOKENS, 1, 2, 8, 8, documents=5), segment_ids=PACKED, num_segments=5)


@pytest.mark.parametrize("run, tokens, K, V", [(fused, 1, 6, 20), (plain, 33, 3, 16)])
def test_sizes(kernels, run, tokens, K, V):
    """Channels that no kernel has, and rows shorter than a chunk or one token longer."""
    check(run, make(np.random.default_rng(2), 1, tokens, 2, 2, K, V))


def test_without_gate_parameters(kernels):
    args = make(np.random.default_rng(3), 1, 40, 1, 1, 8, 8)
    args[5] = args[6] = None
    check(fused, args)
    args[6] = jnp.ones((1, 8))
    check(fused, args)


def test_padding_is_never_read(kernels):
    """NaN in padded tokens changes nothing: outputs, states and gradients stay what they are, gradients there are 0."""
    padded = PACKED == 0
    args = make(np.random.default_rng(4), 2, TOKENS, 1, 2, 8, 8)
    bare = lambda q, k, v, g, beta, *_, **options: (*kda(q, k, v, g, beta, lower_bound=-5.0, **options), None)[:1]
    for run in (bare, fused):
        changed = args if run is fused else [0.3 * x for x in args[:3]] + [-jnp.abs(x) for x in args[3:4]] + args[4:]
        poisoned = [jnp.where(padded.reshape(2, TOKENS, *(1,) * (x.ndim - 2)), NAN, x) for x in changed[:5]] + changed[5:]
        wanted = value_and_gradients(run, changed, segment_ids=PACKED)
        got = value_and_gradients(run, poisoned, segment_ids=PACKED)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert np.array_equal(x, y) and not np.any(np.isnan(x))
        assert all(not np.any(np.asarray(x)[np.asarray(padded)]) for x in got[1][:5])


@pytest.mark.parametrize("case", ["together", "in groups", "a gate of its own"])
def test_vmap(kernels, case):
    """Mapped over rows: all at once, one after the other, and each with parameters of its own."""
    args = make(np.random.default_rng(5), 3, 40, 1, 1, 8, 8)
    ids = jnp.asarray(np.repeat([[1, 2, 4]], [20, 15, 5], axis=1).repeat(3, axis=0), jnp.int32)

    def loss(*args):
        o, final = fused(*args[:-1], segment_ids=args[-1])
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(final))

    one = jax.grad(loss, argnums=range(8))
    rows = [*(x[:, None] for x in args[:5]), *args[5:7], args[7][:, None], ids[:, None]]
    quick, shared = jit(one), (5, 6)
    wanted = [quick(*(x if j in shared else x[i] for j, x in enumerate(rows))) for i in range(3)]
    axes = [None if j in shared else 0 for j in range(9)]
    if case == "in groups":
        kernels.setattr(triton, "_most_rows", lambda plan, rows: 2)  # three rows: one at a time
    if case == "a gate of its own":
        rows, axes = [jnp.broadcast_to(x, (3, *x.shape)) if j in shared else x for j, x in enumerate(rows)], 0
    got = jit(jax.vmap(one, in_axes=axes))(*rows)
    for x, *y in zip(got, *wanted, strict=True):
        np.testing.assert_allclose(x, jnp.stack(y), rtol=1e-9, atol=1e-11)


def test_vmap_over_cotangents(kernels):
    """A backward pass that is mapped where the forward pass was not."""
    args = make(np.random.default_rng(5), 1, 9, 1, 1, 8, 8)
    out, vjp = jax.vjp(lambda *a: gated_kda(*a)[0], *args[:7])
    cotangents, one = jnp.asarray(np.random.default_rng(6).normal(size=(2, *out.shape))), jit(vjp)
    for x, *y in zip(jit(jax.vmap(vjp))(cotangents), *(one(c) for c in cotangents), strict=True):
        np.testing.assert_allclose(x, jnp.stack(y), rtol=1e-9, atol=1e-11)


def test_shard_map_and_remat(kernels):
    """Rows over one mesh axis and heads over another, varying axes checked; a gate shared by the rows gets the sum of them."""
    *args, _ = make(np.random.default_rng(7), 4, 40, 2, 2, 8, 8)
    cut(kernels, 32, 0)
    ids = jnp.asarray(np.repeat([[1, 2]], 20, axis=1).repeat(4, axis=0), jnp.int32)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = P("data", None, "tensor")
    specs = ([rows] * 5 + [P("tensor")] * 2, P("data"))

    def local(args, ids):
        o, final = jax.checkpoint(lambda args: gated_kda(*args, segment_ids=ids, output_final_state=True))(args)
        return (jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(final)))[None]

    def sharded(args, ids):
        call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(("data", "tensor")), check_vma=True)
        return jax.grad(lambda a: jnp.sum(call(a, ids)))(args)

    wanted = jit(jax.grad(lambda args: local(args, ids)[0]))(args)
    for x, y in zip(jit(sharded)(args, ids), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


def test_how_a_row_is_cut():
    """By the sizes alone; more tokens never change the window."""
    assert triton.cut(1, 96, 128, 128, 8192) == (8192, 0)
    assert triton.cut(1, 32, 128, 128, 8192) == triton.cut(1, 32, 128, 128, 2**20) == (16384, 0)
    assert triton.cut(1, 4, 128, 128, 65536) == (131072, 4096) and triton.cut(1, 4, 128, 128, 4096)[1] == 0
    assert triton.cut(2, 4, 256, 256, 8192)[0] % 4096 == 0 and triton.cut(3, 4, 128, 128, 8192)[1] == 0
    assert triton.cut(64, 96, 256, 256, 8192) == (512, 0)


def test_what_is_chosen(monkeypatch):
    """Without Triton: xla, and a warning on a GPU. With it: by the platform that is lowered for; by name: it runs or says why not."""
    x = jnp.zeros((1, 5, 1, 16), jnp.bfloat16)
    args = (x, x, x, x, x[..., 0])
    monkeypatch.setattr(triton_launch, "available", lambda: "jax-triton is not installed")
    assert kda_implementation("cuda") == "xla"
    with pytest.raises(NotImplementedError, match="jax-triton is not installed; use implementation='xla'"):
        kda_implementation("cuda", implementation="triton")
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.setattr(jax, "default_backend", lambda: "gpu")
        for _ in range(2):
            kda(*args, lower_bound=-5.0)
    assert [str(w.message) for w in seen].count(
        "kda runs as plain XLA, several times slower than its kernels: jax-triton is not installed."
    ) == 1

    monkeypatch.setattr(triton_launch, "available", lambda: None)
    assert kda_implementation("cuda") == kda_implementation("cuda", implementation="triton") == "triton"
    assert kda_implementation("cpu") == kda_implementation("tpu") == kda_implementation("rocm") == "xla"
    for options in (dict(dtype=jnp.float32), dict(lower_bound=None), dict(key_dim=272), dict(value_dim=512)):
        assert kda_implementation("cuda", **options) == "xla"
        with pytest.raises(NotImplementedError, match="its kernels"):
            kda_implementation("cuda", implementation="triton", **options)
    with pytest.raises(NotImplementedError, match="NVIDIA GPUs, this is 'cpu'"):
        kda(*args, lower_bound=-5.0, implementation="triton")

    def kernels(q, k, v, *rest, initial_state, fused, **_):
        return v + 1 + fused, initial_state

    monkeypatch.setattr(api, "kda_triton", kernels)
    wide = [a.astype(jnp.float32) for a in args]
    for run in (lambda *a: kda(*a, lower_bound=-5.0)[0], lambda *a: gated_kda(*a, None, None)[0]):
        assert not np.any(jax.jit(run)(*args))  # on the CPU: xla, zeros in, zeros out
        for platform in ("cuda", "cpu"):
            text = jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
            assert ("while" in text or "dot_general" in text) == (platform == "cpu")
            assert "dot_general" in jax.jit(run).trace(*wide).lower(lowering_platforms=(platform,)).as_text()


def test_import_needs_no_triton():
    import subprocess
    import sys

    code = "import sys, moejax, moejax.ops; assert not {'triton', 'jax_triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ids_are_filled():
    """What kda_triton gets: padding has the id of the document before it."""
    assert document_ids(jnp.asarray([[0, 1, 0, 2, 0]])).tolist() == [[1, 1, 1, 2, 2]]


@pytest.mark.parametrize(
    "triton_version, word", [((3, 6, 0), "miscompile"), ((3, 9, 0), "never checked"), (None, "not installed"), ((3, 7, 1), None)]
)
def test_versions(monkeypatch, triton_version, word):
    """Only the versions that were checked on a card are used; the reason names what to install."""
    monkeypatch.setattr(triton_launch, "_version", lambda package: triton_version if package == "triton" else (0, 4, 1))
    monkeypatch.setattr(triton_launch.sys, "version_info", (3, 12, 0))
    reason = triton_launch._software.__wrapped__()
    assert (reason is None) if word is None else (word in reason and "3.7.1" in reason)
