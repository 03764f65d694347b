"""Rotary positions against complex numbers, relative distance, interpolation, and positions inside packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.rotary import positions_from_segments, rotary


def by_complex_numbers(x, positions, base, scale):
    half = x.shape[-1] // 2
    frequency = base ** (-2 * np.arange(half) / x.shape[-1])
    turn = np.exp(1j * (positions / scale)[:, :, None, None] * frequency)
    y = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([y.real, y.imag], -1)


@pytest.mark.parametrize("width", [2, 8])
def test_equals_complex_rotation_and_its_gradient_rotates_back(x64, width):
    rng = np.random.default_rng(0)
    x, ct = rng.normal(size=(2, 2, 17, 3, width))
    positions = rng.integers(0, 5000, (2, 17))

    def run(x):
        return rotary(x, jnp.asarray(positions), base=1e4, scale=4.0)

    out, pull = jax.vjp(run, jnp.asarray(x))
    np.testing.assert_allclose(out, by_complex_numbers(x, positions, 1e4, 4.0), atol=1e-11)
    np.testing.assert_allclose(pull(jnp.asarray(ct))[0], by_complex_numbers(ct, -positions, 1e4, 4.0), atol=1e-11)


def test_scores_depend_on_distance_only_and_interpolation_squeezes_it(x64):
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8))) for _ in range(2))

    def at(n):
        return jnp.asarray([[n]])

    def score(m, n, **kw):
        return float(jnp.sum(rotary(q, at(m), **kw) * rotary(k, at(n), **kw)))

    assert abs(score(7, 3) - score(1007, 1003)) < 1e-10
    assert abs(score(28, 12, scale=4.0) - score(7, 3)) < 1e-12
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


def test_bfloat16_keeps_float32_angles():
    x = jnp.ones((1, 1, 1, 4), jnp.bfloat16)
    out = rotary(x, jnp.asarray([[100003]]))
    expected = by_complex_numbers(np.ones((1, 1, 1, 4)), np.asarray([[100003]]), 1e4, 1.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=2e-2)


def test_positions_restart_with_each_document_and_skip_padding():
    ids = jnp.asarray([[0, 0, 1, 1, 0, 1, 2, 0, 4, 4, 4, 0], [3] * 12, [0] * 12], jnp.int32)
    expected = [[0, 0, 0, 1, 0, 2, 0, 0, 0, 1, 2, 0], list(range(12)), [0] * 12]
    np.testing.assert_array_equal(positions_from_segments(ids), expected)


def test_bad_input_is_refused():
    x = jnp.ones((1, 4, 2, 6))
    positions = jnp.zeros((1, 4), jnp.int32)
    bad = [
        (lambda: rotary(x[..., :5], positions), "even"),
        (lambda: rotary(x[0], positions), "axes"),
        (lambda: rotary(x.astype(jnp.float16), positions), "float16"),
        (lambda: rotary(x, positions[:, :2]), "positions"),
        (lambda: rotary(x, positions, scale=0.0), "scale=0.0"),
        (lambda: rotary(x, positions, base=-1.0), "base=-1.0"),
        (lambda: positions_from_segments(positions[0]), "axes"),
        (lambda: positions_from_segments(positions.astype(jnp.float32)), "int32"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
