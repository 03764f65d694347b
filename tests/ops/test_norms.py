"""rms_norm: value, gradients, the published rounding order, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops import rms_norm


def plain(x, weight, eps):
    return weight * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


def test_value_and_gradients_against_float64():
    rng = np.random.default_rng(0)
    x, w, ct = rng.normal(size=(2, 17, 33)), rng.normal(size=33), rng.normal(size=(2, 17, 33))
    x[0, 3] = 0  # an all-zero row: only eps keeps it finite
    x[1, 0] *= 1e-3
    with jax.enable_x64(True):
        want, back = jax.vjp(lambda x, w: plain(x, w, 1e-5), jnp.asarray(x), jnp.asarray(w))
        want_grads = [np.asarray(g) for g in back(jnp.asarray(ct))]
        want = np.asarray(want)
        exact = rms_norm(jnp.asarray(x), jnp.asarray(w), eps=1e-5)
        assert exact.dtype == jnp.float64 and np.abs(exact - want).max() < 1e-13
    got, back = jax.vjp(lambda x, w: rms_norm(x, w, eps=1e-5), jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
    for g, e in zip([got, *back(jnp.asarray(ct, jnp.float32))], [want, *want_grads], strict=True):
        assert np.isfinite(g).all() and np.abs(g - e).max() / np.abs(e).max() < 1e-5


def test_bfloat16_rounds_before_the_weight():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(64, 32)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=32), jnp.bfloat16)
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    y = rms_norm(x, w, eps=1e-6)
    assert y.dtype == jnp.bfloat16 and np.array_equal(np.asarray(y), np.asarray(normal.astype(jnp.bfloat16) * w))
    late = (normal * w.astype(jnp.float32)).astype(jnp.bfloat16)
    assert not np.array_equal(np.asarray(y), np.asarray(late)), (
        "the two orders must differ somewhere, or this test shows nothing"
    )


def test_eps_is_on_the_mean_and_matters():
    x = jnp.full((1, 4), 1e-3, jnp.float32)
    one = jnp.ones(4)
    np.testing.assert_allclose(rms_norm(x, one, eps=1e-6), 1e-3 / np.sqrt(2e-6) * np.ones((1, 4)), rtol=1e-6)
    np.testing.assert_allclose(rms_norm(x, one, eps=1e-5), 1e-3 / np.sqrt(1.1e-5) * np.ones((1, 4)), rtol=1e-6)


def test_rows_are_independent():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 15, 8)), jnp.float32)
    w = jnp.ones(8)
    bad = x.at[:, 9:].set(jnp.nan)
    f = jax.jit(lambda x: rms_norm(x, w, eps=1e-5))
    assert np.array_equal(f(x)[:, :9], f(bad)[:, :9])
    g = jax.jit(jax.grad(lambda x: rms_norm(x, w, eps=1e-5)[:, :9].sum()))
    assert np.array_equal(g(x)[:, :9], g(bad)[:, :9])


def test_bad_input_is_named():
    x, w = jnp.ones((2, 3)), jnp.ones(3)
    for args, eps, text in (
        ((x.astype(jnp.float16), w), 1e-5, "float16"),
        ((x, jnp.ones(4)), 1e-5, r"\[D\] = \[3\]"),
        ((x, jnp.ones((1, 3))), 1e-5, "weight has shape"),
        ((x[:0], w), 1e-5, "empty"),
        ((x, w), 0.0, "eps is 0.0"),
        ((x, w), -1e-5, "eps"),
    ):
        with pytest.raises(ValueError, match=text):
            rms_norm(*args, eps=eps)
