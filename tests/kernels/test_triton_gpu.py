"""KDA on the card, forward and backward, against the token recurrence in float64 (itself run on the card, from the same bfloat16 inputs).

Run on a Hopper GPU: JAX_PLATFORMS=cuda,cpu python3 -m pytest -m gpu tests/kernels/test_triton_gpu.py

Heads differ in their gates, so that one call covers all regimes: head h has regime h % 6. Shapes: B batch, T tokens, H query/key heads,
HV value heads, K, V channels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from moejax.kernels.kda import gated_kda, kda, triton, triton_launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
REGIMES = ("production", "near 0", "saturated", "one slow channel", "keys of cosine 0.9", "keys of cosine 0.9, near 0")
NAMES = ("q", "k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias", "initial_state")
GROUP, LONGEST = 24, 800  # heads and tokens of one call of the reference, compiled once
BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture
def cut(monkeypatch):
    """cut(window, segment): how rows are cut from here on."""
    return lambda window, segment: monkeypatch.setattr(triton, "cut", lambda *sizes: (window, segment))


def make(T, H, HV, K=128, V=128, B=1, seed=0, documents=None):
    """The operands in NAMES and the cotangents of o and of the final state."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    raw, keys = normal(B, T, HV, K), normal(B, T, H, K)
    regime = np.arange(HV) % len(REGIMES)
    raw += np.choose(regime, [0, -6, 8, 2, 0, -6])[:, None]
    raw[:, :, regime == 3, 3] = -9
    common = normal(B, 1, H, K) * 3  # cosine of two keys c + x with |c|^2 = 9 |x|^2
    keys = np.where(np.isin(np.arange(H) * (HV // H) % len(REGIMES), [4, 5])[:, None], keys + common, keys)
    rows = () if documents is None else (documents,)
    bf16 = lambda x: jnp.asarray(x, BF16)
    operands = [bf16(normal(B, T, H, K)), bf16(keys), bf16(normal(B, T, HV, V)), bf16(raw), bf16(normal(B, T, HV))]
    operands += [jnp.asarray(0.3 * normal(HV)), jnp.asarray(0.3 * normal(HV, K)), jnp.asarray(normal(B, *rows, HV, K, V))]
    return operands, (bf16(normal(B, T, HV, V)), jnp.asarray(0.1 * normal(B, *rows, HV, K, V)))


def loss_free(run):
    """run(*operands, ids) -> (o, final): a jitted function of (operands, cotangents, ids) -> (o, final), gradients."""

    @jax.jit
    def both(operands, cotangents, ids):
        out, vjp = jax.vjp(lambda *a: run(*a, ids), *operands)
        return out, vjp(jax.tree.map(lambda c, o: c.astype(o.dtype), cotangents, out))

    return both


def call(*operands, implementation=None, num_segments=None):
    *operands, initial, ids = operands
    options = dict(segment_ids=ids, num_segments=num_segments, output_final_state=True, implementation=implementation)
    return gated_kda(*operands, initial_state=initial, **options)


def plain(*operands, implementation=None, num_segments=None):
    """The recurrence alone, on q and k as they are; the gates are made outside, in float32 or float64."""
    q, k, v, raw, logits, A_log, dt_bias, initial, ids = operands
    g = -5 * jax.nn.sigmoid(jnp.exp(A_log)[:, None] * (raw.astype(A_log.dtype) + dt_bias))
    options = dict(segment_ids=ids, num_segments=num_segments, output_final_state=True, implementation=implementation)
    return kda(q, k, v, g, jax.nn.sigmoid(logits.astype(g.dtype)), lower_bound=-5.0, initial_state=initial, **options)


@functools.cache
def kernels(run=call, N=None):
    return loss_free(functools.partial(run, num_segments=N))


@functools.cache
def recurrence(run=call, N=None):
    return loss_free(functools.partial(run, implementation="reference", num_segments=N))


def reference(operands, cotangents, ids=None, N=None, run=call):
    """In float64, GROUP heads and LONGEST tokens at a time (padding and absent heads are zeros), so that it compiles once."""
    ratio = operands[2].shape[2] // operands[0].shape[2]
    B, T, HV = operands[4].shape
    length = LONGEST if T <= LONGEST else T
    per_head = HV if T > LONGEST else GROUP if operands[0].shape[3] <= 128 else 6  # one float64 state a token must fit
    ids = np.ones((B, T), np.int32) if ids is None else np.asarray(ids)
    ids = np.pad(ids, ((0, 0), (0, length - T)))
    wide = [np.asarray(x.astype(F32), np.float64) for x in (*operands, *cotangents)]
    wide[:2] = [np.repeat(x, ratio, axis=2) for x in wide[:2]]
    axes = (2, 2, 2, 2, 2, 0, 0, -3, 2, -3)
    outs = []
    with jax.enable_x64(True):
        for first in range(0, HV, per_head):
            part = []
            for number, (x, axis) in enumerate(zip(wide, axes, strict=True)):
                x = np.take(x, range(first, min(first + per_head, HV)), axis=axis)
                pads = [(0, 0)] * x.ndim
                pads[axis] = (0, per_head - x.shape[axis])
                if number in (0, 1, 2, 3, 4, 8):
                    pads[1] = (0, length - T)
                part.append(np.pad(x, pads))
            (o, final), grads = recurrence(run, N)(part[:8], tuple(part[8:]), ids)
            heads = min(per_head, HV - first)
            taken = [np.take(np.asarray(x), range(heads), axis=a) for x, a in zip((o, final, *grads), (2, -3, *axes[:8]), strict=True)]
            outs.append([x[:, :T] if i in (0, 2, 3, 4, 5, 6) else x for i, x in enumerate(taken)])
    o, final, *grads = [np.concatenate(x, axis=a) for x, a in zip(zip(*outs, strict=True), (2, -3, *axes[:8]), strict=True)]
    grads[:2] = [x.reshape(B, T, HV // ratio, ratio, -1).sum(3) for x in grads[:2]]
    return o, final, grads


def per_head(x, axis):
    """[heads, everything else] float64."""
    x = np.asarray(x if isinstance(x, np.ndarray) else x.astype(F32) if x.dtype == BF16 else x, np.float64)
    return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def errors(got, wanted, operands):
    """{name: {regime: relative L2 error}}; for q and k the regime is that of a group's first value head.

    A_log has one number a head, a sum over all tokens and channels whose terms may cancel almost entirely: with fewer than 8 heads in
    a regime its error is measured against the root of the sum of the squared terms too, which is what errors of 1e-2 in the terms leave.
    """
    (o, final), grads = got
    axes = (2, -3, 2, 2, 2, 2, 2, 0, 0, -3)
    HV, found = o.shape[2], {}
    raw, bias = (np.asarray(operands[i].astype(F32), np.float64) for i in (3, 6))
    terms = np.sum((wanted[2][3] * (raw + bias)) ** 2, axis=(0, 1, 3))
    for name, x, y, axis in zip(("o", "final", *NAMES), (o, final, *grads), (wanted[0], wanted[1], *wanted[2]), axes, strict=True):
        x, y = per_head(x, axis), per_head(y, axis)
        assert np.all(np.isfinite(x)), name
        regime, found[name] = np.arange(len(x)) * (HV // len(x)) % len(REGIMES), {}
        for r in sorted(set(regime.tolist())):
            size = np.linalg.norm(y[regime == r])
            if name == "A_log" and np.sum(regime == r) < 8:
                size = np.sqrt(size**2 + terms[regime == r].sum())
            found[name][r] = float(np.linalg.norm((x - y)[regime == r]) / (size or 1))
    return found


def check(got, wanted, operands, label):
    found = errors(got, wanted, operands)
    print("\n" + label, *(f"{name} " + " ".join(f"{x:.1e}" for x in value.values()) for name, value in found.items()), sep="\n  ")
    # A_log of four heads with one slow channel, packed: 1.5e-2 was measured. The channel's gradients of many tokens err in one direction
    # (by 1.7% of their sum), and its raw gate of -9 makes them most of a sum that the other channels half cancel. 16 heads meet 1e-2.
    wide = lambda name, regime: 2 if regime >= 4 or (name == "A_log" and got[0][0].shape[2] < 8 * len(REGIMES)) else 1
    limit = lambda name, regime: (5e-3 if name in ("o", "final") else 1e-2) * wide(name, regime)
    worst = [(name, REGIMES[r], x) for name, value in found.items() for r, x in value.items() if not x <= limit(name, r)]
    assert not worst, (label, worst)


def same(x, y):
    """How many numbers of two trees differ in their bits."""
    as_bits = lambda x: lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])
    return sum(int(jnp.sum(as_bits(a) != as_bits(b))) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 64, 65, 783])
def test_lengths(T):
    operands, cotangents = make(T, 24, 24, seed=T)
    check(kernels()(operands, cotangents, None), reference(operands, cotangents), operands, f"T={T}")


@pytest.mark.parametrize("H, HV", [(1, 8), (3, 12), (12, 24), (96, 96)])
def test_heads(H, HV):
    """Groups of 8, 4, 2 and 1 value heads; few and many heads."""
    operands, cotangents = make(130, H, HV, seed=H)
    check(kernels()(operands, cotangents, None), reference(operands, cotangents), operands, f"H={H} HV={HV}")


@pytest.mark.parametrize("K, V", [(64, 64), (48, 80), (256, 256)])
def test_channels(K, V):
    operands, cotangents = make(130, 6, 6, K, V)
    check(kernels()(operands, cotangents, None), reference(operands, cotangents), operands, f"K={K} V={V}")


def ids_of(T):
    """Six documents with boundaries anywhere, 4 absent, and padding: at the start, between documents and inside them."""
    ids = np.repeat([1, 2, 3, 5, 6, 7], [100, 1, 31, 200, 64, T - 396])[None].astype(np.int32)
    ids[0, :7] = ids[0, 60:66] = ids[0, 98:105] = ids[0, 500:520] = ids[0, -9:] = 0
    return ids


@pytest.mark.parametrize("N", [None, 7])
def test_packed(N):
    """Also with NaN in the padding: no bit changes, and no gradient there."""
    T = 783
    ids = jnp.asarray(ids_of(T))
    operands, cotangents = make(T, 24, 24, seed=3, documents=N)
    got = kernels(N=N)(operands, cotangents, ids)
    check(got, reference(operands, cotangents, ids, N), operands, f"packed N={N}")
    poisoned = [jnp.where((ids > 0).reshape(1, T, *(1,) * (x.ndim - 2)), x, jnp.nan) for x in operands[:5]] + operands[5:]
    again = kernels(N=N)(poisoned, cotangents, ids)
    assert same(got, again) == 0
    assert all(not np.any(np.asarray(x.astype(F32))[np.asarray(ids) == 0]) for x in got[1][:5])


def test_not_fused():
    """`kda` itself, on unit keys and a float32 gate."""
    operands, cotangents = make(783, 24, 24, seed=4)
    operands[:2] = [(x / jnp.linalg.norm(x.astype(F32), axis=-1, keepdims=True)).astype(BF16) for x in operands[:2]]
    check(kernels(plain)(operands, cotangents, None), reference(operands, cotangents, run=plain), operands, "not fused")


def test_8192_tokens(cut):
    """8 heads: in two segments, in one walk, and in windows of 1024 tokens, which change no bit of the one walk."""
    operands, cotangents = make(8192, 8, 8, seed=5)
    wanted = reference(operands, cotangents)
    assert triton.cut(1, 8, 128, 128, 8192)[1] == 4096
    check(kernels()(operands, cotangents, None), wanted, operands, "T=8192 segments")
    cut(8192, 0)
    whole = loss_free(call)(operands, cotangents, None)
    check(whole, wanted, operands, "T=8192")
    cut(1024, 0)
    windows = loss_free(call)(operands, cotangents, None)
    # The sums over windows of the parameters' gradients are in another order; all else is the same.
    assert same((whole[0], whole[1][:5], whole[1][7]), (windows[0], windows[1][:5], windows[1][7])) == 0
    check(windows, wanted, operands, "T=8192 windows")


@pytest.mark.parametrize("T, longer, prefix, heads", [(500, 783, 401, 24), (5000, 9000, 4500, 8)])
def test_prefix_does_not_depend_on_the_future(T, longer, prefix, heads):
    """Other tokens after the prefix, or more of them: outputs and gradients of the prefix keep every bit. 8 heads: in segments."""
    (operands, (d_o, d_final)), (other, _) = make(longer, heads, heads, seed=6), make(longer, heads, heads, seed=7)
    other[3] = jnp.full_like(other[3], 20.0)
    joined = [jnp.concatenate([x[:, :prefix], y[:, prefix:]], axis=1) for x, y in zip(operands[:5], other[:5], strict=True)]
    d_o = d_o.at[:, prefix:].set(0)

    def run(arrays, T):
        (o, _), grads = kernels()([x[:, :T] for x in arrays[:5]] + operands[5:], (d_o[:, :T], 0 * d_final), None)
        return o[:, :prefix], [x[:, :prefix] for x in grads[:5]], grads[7]

    wanted = run(operands, T)
    assert same(wanted, run(joined, T)) == 0
    assert same(wanted, run(joined, longer)) == 0


def test_under_transformations():
    """vmap, remat, shard_map and ten layers in one jit give the bits of single calls."""
    operands, cotangents = make(200, 4, 8, B=3, seed=8)
    run = kernels()
    wanted = run(operands, cotangents, None)
    rows = lambda x: x[:, None]
    split = [*map(rows, operands[:5]), *operands[5:7], rows(operands[7])]

    def one(*args):
        out, vjp = jax.vjp(lambda *a: call(*a, None), *args[:8])
        return out, vjp(args[8:])

    axes = (0,) * 5 + (None,) * 2 + (0,) * 3
    got = jax.jit(jax.vmap(one, in_axes=axes))(*split, *map(rows, cotangents))
    rowwise = lambda out: (out[0], out[1][:5], out[1][7])  # the others are sums over rows, which XLA may order anew in another program
    assert same(jax.tree.map(lambda x: x[:, 0], rowwise(got)), rowwise(wanted)) == 0

    remat = loss_free(lambda *a: jax.checkpoint(lambda *b: call(*b, None))(*a[:8]))(operands, cotangents, None)
    assert same(rowwise(remat), rowwise(wanted)) == 0

    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    row, state = P("data", None, "tensor"), P("data", "tensor")
    specs = (*[row] * 5, P("tensor"), P("tensor"), state)
    mapped = jax.shard_map(lambda *a: call(*a, None), mesh=mesh, in_specs=specs, out_specs=(row, state), check_vma=True)
    assert same(rowwise(loss_free(lambda *a: mapped(*a[:8]))(operands, cotangents, None)), rowwise(wanted)) == 0


def test_windows_in_a_loop(cut):
    """Rows one after the other, in windows whose outputs are written in place: the bits of the rows in one call."""
    operands, cotangents = make(783, 4, 8, B=3, seed=12)
    cut(256, 128)

    def one(*args):
        out, vjp = jax.vjp(lambda *a: call(*a, None), *args[:8])
        return out, vjp(args[8:])

    split = [x[:, None] for x in (*operands[:5], operands[7], *cotangents)]
    row = lambda x: one(*x[:5], *operands[5:7], *x[5:])
    looped = jax.jit(lambda x: lax.map(row, x))(split)
    for i in range(3):
        single = jax.jit(row)([x[i] for x in split])
        rowwise = lambda out: (out[0], out[1][:5], out[1][7])
        assert same(rowwise(jax.tree.map(lambda x, i=i: x[i], looped)), rowwise(single)) == 0


def test_ten_layers_in_one_jit():
    """Unrolled and as a rematerialised scan, forward and backward, under the default flags (command buffers on)."""
    operands, _ = make(512, 8, 8, seed=9)

    def layer(q):
        o, _ = call(q, *operands[1:], None)
        return (q + 0.3 * o).astype(BF16)

    def loop(q):
        for _ in range(10):
            q = layer(q)
        return jnp.sum(q.astype(F32))

    def scan(q):
        q, _ = lax.scan(lambda q, _: (jax.checkpoint(layer)(q), None), q, length=10)
        return jnp.sum(q.astype(F32))

    grads = [jax.jit(jax.grad(f)) for f in (loop, scan)]
    first, second = (g(operands[0]) for g in grads)
    error = float(jnp.linalg.norm((first - second).astype(F32)) / jnp.linalg.norm(first.astype(F32)))
    assert error < 2e-2 and np.all(np.isfinite(np.asarray(first.astype(F32))))  # XLA fuses what is around the layers differently
    for g, x in zip(grads, (first, second), strict=True):
        for _ in range(5):
            assert same(g(operands[0]), x) == 0
    step, q = jax.jit(layer), operands[0]
    for _ in range(10):
        q = step(q)
    ten = jax.jit(lambda q: functools.reduce(lambda q, _: lax.optimization_barrier(layer(q)), range(10), q))(operands[0])
    assert same(q, ten) == 0


def test_offsets_beyond_two_to_the_31():
    """T * HV * K > 2^31: the last document, 992 tokens, of the last two heads is that of the row cut out."""
    T, H, tail = 262_144 + 64, 64, 992
    assert T * H * 128 > 2**31
    keys = iter(jax.random.split(jax.random.key(0), 7))
    # 4099 random tokens, again and again: the generator itself should not have to count beyond 2^31.
    draw = lambda size: jnp.tile(jax.random.normal(next(keys), (1, 4099, H, size), BF16), (1, 65, 1, 1))[:, :T]
    arrays = [draw(128) for _ in range(4)] + [draw(1)[..., 0]]
    d_o = draw(128)
    ids = jnp.where(jnp.arange(T) < T - tail, 1, 2)[None].astype(jnp.int32)
    cut_out = lambda x: x[:, -tail:, -2:]

    @jax.jit
    def both(arrays, d_o, ids):
        o, vjp = jax.vjp(lambda *a: gated_kda(*a, None, None, segment_ids=ids)[0], *arrays)
        return o, vjp(d_o)

    wanted = both([cut_out(x) for x in arrays], cut_out(d_o), jnp.ones((1, tail), jnp.int32))
    got = jax.tree.map(cut_out, both(arrays, d_o, ids))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = x.astype(F32), y.astype(F32)
        assert float(jnp.linalg.norm(x - y)) <= 1e-4 * float(jnp.linalg.norm(y))


def test_soak(cut):
    """A million chunks forward and backward on 96 heads: every run gives the bits of the first one, in windows as well, with memory
    that was full of NaN before. Counts every number that differs."""
    operands, cotangents = make(8192, 96, 96, seed=10)
    whole = kernels()
    wanted = whole(operands, cotangents, None)
    different = jax.jit(lambda x, y: jax.tree.map(lambda a, b: jnp.sum(a != b) + jnp.sum(a != a), x, y))
    cut(2048, 0)
    windows = loss_free(call)
    runs, counts = -(-1_000_000 // (96 * 8192 // 32)), []
    for number in range(runs):
        poison = [jnp.full((2**29,), jnp.nan, F32) for _ in range(6)] if number % 8 == 0 else []
        jax.block_until_ready(poison)
        del poison
        out, grads = (windows if number % 4 == 3 else whole)(operands, cotangents, None)
        if number % 4 == 3:  # the windows' sums of the parameters' gradients are in another order
            grads = (*grads[:5], *wanted[1][5:7], grads[7])
        counts.append(different((out, grads), wanted))
    total = sum(int(x) for x in jax.tree.leaves(counts))
    print(f"{runs} runs, {runs * 96 * 8192 // 32} chunks forward and as many backward: {total} numbers differ")
    assert total == 0


def test_no_software_is_missing():
    assert triton_launch.available() is None
