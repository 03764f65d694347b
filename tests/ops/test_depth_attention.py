"""Depth attention: golden vectors, every gradient, masked sources, the published schedule, the two-phase form."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops import (
    DepthPartial,
    attention_residual,
    depth_attention,
    depth_attention_merge,
    depth_attention_snapshots,
)

SCHEDULE = pathlib.Path(__file__).parents[1] / "golden" / "attnres" / "schedule.json"


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)


def plain(sources, norm_weight, query, eps=1e-5):
    normal = sources / jnp.sqrt(jnp.mean(sources**2, axis=-1, keepdims=True) + eps)
    shares = jax.nn.softmax(jnp.sum(normal * norm_weight * query, axis=-1), axis=0)
    return jnp.sum(shares[..., None] * sources, axis=0)


def make(sources=4, tokens=17, width=8, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(sources, 2, tokens, width)),
        *rng.normal(size=(2, width)),
        rng.normal(size=(2, tokens, width)),
    )


@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("split", [False, True], ids=["sources", "snapshots and prefix"])
def test_golden_aggregate(n, split, golden):
    file = golden("attnres/aggregate.npz")
    sources, gamma, w, ct = (jnp.asarray(file[f"in_{name}_{n}"]) for name in ("sources", "gamma", "w", "ct"))

    def f(sources, gamma, w):
        sources = sources[:, None]
        mixed = depth_attention(sources[:-1], sources[-1], gamma, w) if split else attention_residual(sources, gamma, w)
        return mixed[0]

    mix, back = jax.vjp(f, sources, gamma, w)
    assert relative(mix, file[f"out_mix_{n}"]) < 1e-5
    for got, name in zip(back(ct), ("sources", "gamma", "w"), strict=True):
        want = file[f"grad_{name}_{n}"]
        # One source: the gradients of gamma and w are exactly 0.
        assert np.abs(got - want).max() <= 5e-5 * max(np.abs(want).max(), 1e-30) or (n == 1 and not np.any(got))


@pytest.mark.parametrize("tokens", [1, 65])
def test_value_and_every_gradient_against_float64(tokens):
    sources, gamma, w, ct = make(5, tokens)

    def run(f, dtype):
        out, back = jax.vjp(f, *(jnp.asarray(a, dtype) for a in (sources, gamma, w)))
        return [np.asarray(a) for a in (out, *back(jnp.asarray(ct, dtype)))]

    fast = jax.jit(lambda s, g, w: depth_attention(s[:-1], s[-1], g, w))
    with jax.enable_x64(True):
        want, exact = run(plain, jnp.float64), run(fast, jnp.float64)
    got = run(fast, jnp.float32)
    assert all(relative(e, x) < 1e-12 for e, x in zip(exact, want, strict=True))
    assert all(relative(g, x) < t for g, x, t in zip(got, want, (1e-5, 5e-5, 5e-5, 5e-5), strict=True))


@pytest.mark.parametrize("count, with_prefix", [(1, False), (2, True), (0, True)])
def test_masked_sources_are_not_read(count, with_prefix):
    sources, gamma, w, ct = (jnp.asarray(a, jnp.float32) for a in make(4))
    prefix = jnp.asarray(make(1, seed=3)[0][0], jnp.float32)
    chosen = jnp.concatenate([sources[:count], prefix[None][: int(with_prefix)]])
    want, want_back = jax.vjp(attention_residual, chosen, gamma, w)
    dirty = sources.at[count:].set(jnp.nan)
    dirty_prefix = prefix if with_prefix else jnp.full_like(prefix, jnp.nan)

    @jax.jit
    def run(snapshots, prefix, count, valid):
        def f(s, p, g, w):
            return depth_attention(s, p, g, w, count=count, prefix_valid=valid)

        out, back = jax.vjp(f, snapshots, prefix, gamma, w)
        return out, back(ct)

    out, (d_snapshots, d_prefix, d_gamma, d_w) = run(dirty, dirty_prefix, jnp.int32(count), jnp.bool_(with_prefix))
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
    d_chosen, want_gamma, want_w = want_back(ct)
    np.testing.assert_allclose(d_snapshots[:count], d_chosen[:count], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d_gamma, want_gamma, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_w, want_w, rtol=1e-5, atol=1e-5)
    assert not np.any(d_snapshots[count:])
    if with_prefix:
        np.testing.assert_allclose(d_prefix, d_chosen[-1], rtol=1e-5, atol=1e-6)
    else:
        assert not np.any(d_prefix)
    # The static forms take the same path.
    static = depth_attention(dirty, dirty_prefix, gamma, w, count=count, prefix_valid=with_prefix)
    np.testing.assert_allclose(static, out, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_source_is_returned_exactly(dtype):
    sources, gamma, w, _ = (jnp.asarray(a, dtype) for a in make(3))
    sources = sources.at[0, 0, 0, :4].set(jnp.asarray([1e-30, -1e30, 0, -1e-20], dtype))
    one = jax.jit(lambda s, n: attention_residual(s, gamma, w, count=n))(sources.at[1:].set(jnp.nan), jnp.int32(1))
    alone = jax.jit(lambda s, n: depth_attention(s, sources[0], gamma, w, count=n))(sources, jnp.int32(0))
    empty = depth_attention(sources[:0], sources[0], gamma, w)
    for out in (one, alone, empty):
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, sources[0])


def test_zero_query_is_the_mean_and_zero_rows_are_finite():
    sources, gamma, w, ct = (jnp.asarray(a, jnp.float32) for a in make(5))
    np.testing.assert_allclose(attention_residual(sources, gamma, 0 * w), sources.mean(0), rtol=1e-6, atol=1e-6)
    gradients = jax.vjp(attention_residual, sources.at[2].set(0), gamma, w)[1](ct)
    assert all(np.isfinite(g).all() for g in gradients)


def test_prefix_is_bit_equal_when_the_future_changes():
    sources, gamma, w, ct = (jnp.asarray(a, jnp.float32) for a in make(4, 63))
    ct = ct.at[:, 40:].set(0)

    @jax.jit
    def run(sources):
        out, back = jax.vjp(lambda s: depth_attention(s[:-1], s[-1], gamma, w), sources)
        return out[:, :40], back(ct)[0][:, :, :40]

    for a, b in zip(run(sources), run(sources.at[:, :, 40:].set(1e6)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_backward_keeps_the_arguments_only():
    sources, gamma, w, _ = (jnp.asarray(a, jnp.bfloat16) for a in make(4, 65, 64))
    _, back = jax.vjp(lambda s, p: depth_attention(s, p, gamma, w), sources[:-1], sources[-1])
    kept = sum(a.nbytes for a in jax.tree.leaves(back) if hasattr(a, "nbytes"))
    assert kept <= sources.nbytes + 4096, "no float32 copy of the sources may be saved"


def rollout(block, x, gamma, w, u, t):
    """The golden stack as one scan over layers with a static snapshot buffer: traced count and prefix_valid. -> 53
    query results."""
    layers = u.shape[0] // 2

    def layer(carry, row):
        buffer, count, prefix = carry
        (g_a, g_m), (w_a, w_m), (u_a, u_m), (t_a, t_m), index = row
        # Published order: at a block start the finished block is still the prefix while the pre-attention mix runs.
        h_a = depth_attention(buffer, prefix, g_a, w_a, count=count)
        start = index % block == 0
        buffer = jnp.where(start, buffer.at[count].set(prefix), buffer)
        count = count + start
        prefix = jnp.where(start, 0, prefix) + jnp.tanh(h_a * u_a + t_a)
        h_m = depth_attention(buffer, prefix, g_m, w_m, count=count, prefix_valid=jnp.bool_(True))
        return (buffer, count, prefix + jnp.tanh(h_m * u_m + t_m)), jnp.stack([h_a, h_m])

    buffer = jnp.full((-(-layers // block), *x.shape), jnp.nan, x.dtype)
    pairs = [a[: 2 * layers].reshape(layers, 2, -1) for a in (gamma, w, u, t)]
    rows = (*((a[:, 0], a[:, 1]) for a in pairs), jnp.arange(layers))
    (buffer, count, prefix), results = jax.lax.scan(layer, (buffer, jnp.int32(0), x), rows)
    last = depth_attention(buffer, prefix, gamma[-1], w[-1], count=count)
    return jnp.concatenate([results.reshape(2 * layers, *x.shape), last[None]])


def rollout_two_phase(block, x, gamma, w, u, t):
    """The same by blocks: all queries of a block against one buffer, then a merge per sub-layer; layer 0 needs no
    special case."""
    layers = u.shape[0] // 2
    buffer, prefix, results = jnp.full((-(-layers // block), *x.shape), jnp.nan, x.dtype), x, []

    def sub_layer(prefix, row):
        share, g, w, u, t = row
        h = depth_attention_merge(share, prefix, g, w)
        return prefix + jnp.tanh(h * u + t), h

    for number, first in enumerate(range(0, 2 * layers, 2 * block)):
        end = min(first + 2 * block, 2 * layers)
        queries = slice(first, end + (end == 2 * layers))
        buffer = buffer.at[number].set(prefix)
        shares = depth_attention_snapshots(buffer, gamma[queries], w[queries], jnp.int32(number + 1))
        results.append(depth_attention_merge(DepthPartial(*(a[0] for a in shares)), None, gamma[first], w[first])[None])
        prefix = jnp.tanh(results[-1][0] * u[first] + t[first])
        rows = (DepthPartial(*(a[1 : end - first] for a in shares)), *(a[first + 1 : end] for a in (gamma, w, u, t)))
        prefix, inputs = jax.lax.scan(sub_layer, prefix, rows)
        results.append(inputs)
    results.append(depth_attention_merge(DepthPartial(*(a[-1] for a in shares)), prefix, gamma[-1], w[-1])[None])
    return jnp.concatenate(results)


@pytest.mark.parametrize(
    "block, run",
    [(12, rollout), (5, rollout), (3, rollout), (1, rollout), (12, rollout_two_phase)],
)
def test_golden_stack(block, run, golden):
    file = golden("attnres/stack.npz")

    def evaluate(dtype):
        x, gamma, w, u, t, ct = (jnp.asarray(file[f"in_{n}"], dtype) for n in ("x", "gamma", "w", "u", "t", "ct"))

        @jax.jit
        def both(x, gamma, w, u):
            def f(x, gamma, w, u):
                return run(block, x[None], gamma, w, u, t)[:, 0]

            results, back = jax.vjp(f, x, gamma, w, u)
            return results, *back(jnp.zeros_like(results).at[-1].set(ct))

        return both(x, gamma, w, u)

    want = [file[f"{name}_b{block}"] for name in ("out_inputs", "grad_x", "grad_gamma", "grad_w", "grad_u")]
    with jax.enable_x64(True):
        exact = evaluate(jnp.float64)
    assert all(relative(e, x) < 1e-9 for e, x in zip(exact, want, strict=True))
    assert relative(exact[0][-1], file[f"out_final_b{block}"]) < 1e-9
    if block == 12:
        single = evaluate(jnp.float32)
        assert relative(single[0], want[0]) < 1e-5
        assert all(relative(g, x) < 5e-5 for g, x in zip(single[1:], want[1:], strict=True))


def test_source_counts_follow_the_published_schedule():
    """Snapshots taken before each query by the rule of `rollout`, plus the prefix, against every query of
    schedule.json."""
    for entry in json.loads(SCHEDULE.read_text()):
        layers, block = entry["layers"], entry["block"]
        assert len(entry["queries"]) == 2 * layers + 1
        for query in entry["queries"]:
            layer = query["layer"]
            snapshots = layer // block + 1 if query["use"] == "mlp" else -(-layer // block)
            sources = query["sources"] if isinstance(query["sources"], int) else len(query["sources"])
            assert sources == snapshots + 1 and query["mixed"] == (snapshots > 0), query


def test_two_phases_without_snapshots_and_with_large_logits():
    sources, gamma, w, _ = (jnp.asarray(a, jnp.float32) for a in make(3))
    prefix = sources[0]
    share = depth_attention_snapshots(sources, gamma[None], w[None], jnp.int32(0))
    assert (share.m == -jnp.inf).all() and not share.l.any() and not share.o.any()
    merged = depth_attention_merge(DepthPartial(*(a[0] for a in share)), prefix, gamma, w)
    np.testing.assert_array_equal(merged, prefix)
    big = 100 * w  # logits of several hundred: an unshifted exponential would overflow
    share = depth_attention_snapshots(sources[:2], gamma[None], big[None])
    merged = depth_attention_merge(DepthPartial(*(a[0] for a in share)), sources[2], gamma, big)
    np.testing.assert_allclose(merged, plain(sources, gamma, big), rtol=1e-4, atol=1e-4)


def test_bad_input_is_named():
    s, g = jnp.ones((3, 2, 5, 4)), jnp.ones(4)
    for call, text in (
        (lambda: attention_residual(s.astype(jnp.float16), g, g), "float16"),
        (lambda: attention_residual(s[0], g, g), "4 axes"),
        (lambda: attention_residual(s[:, :, :0], g, g), "empty"),
        (lambda: attention_residual(s, g, jnp.ones(5)), "D = 4"),
        (lambda: attention_residual(s, g, g, count=4), "count is 4"),
        (lambda: attention_residual(s, g, g, count=0), "no source"),
        (lambda: attention_residual(s, g, g, eps=0.0), "eps"),
        (lambda: depth_attention(s, s[0, :, :2], g, g), "prefix is"),
        (lambda: depth_attention(s, s[0].astype(jnp.bfloat16), g, g), "prefix is bfloat16"),
        (lambda: depth_attention(s, s[0], g, g, count=0, prefix_valid=False), "no source"),
        (lambda: depth_attention_snapshots(s, g, g), "2 axes"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
