"""Routing: selection against argsort, gradients, the public cases M3 and M6, properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.ops import route


def plain(logits, bias, k, scaling=1.0, renormalize=True):
    """numpy float64: stable argsort of the biased scores, best first."""
    scores = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    biased = scores + np.asarray(bias, np.float64)
    order = np.argsort(-biased, axis=1, kind="stable")
    experts = order[:, :k]
    weights = np.take_along_axis(scores, experts, 1)
    if renormalize:
        weights = weights / (weights.sum(1, keepdims=True) + 1e-20)
    ranked = np.take_along_axis(biased, order, 1)
    return experts, weights * scaling, ranked


def clear_rows(ranked, k, gap=1e-5):
    """Rows whose first k+1 biased scores are all more than `gap` apart: there the choice and its order are certain in
    float32."""
    return (-np.diff(ranked[:, : k + 1], axis=1)).min(1) > gap


@pytest.mark.parametrize(
    "k, scaling, renormalize", [(1, 1.0, True), (4, 2.446, True), (4, 1.0, False), (11, 1.0, True)]
)
def test_against_argsort(k, scaling, renormalize):
    rng = np.random.default_rng(k)
    logits, bias = rng.normal(size=(65, 12)).astype(np.float32), rng.normal(scale=0.3, size=12).astype(np.float32)
    got = route(jnp.asarray(logits), jnp.asarray(bias), k, scaling=scaling, renormalize=renormalize)
    experts, weights, ranked = plain(logits, bias, k, scaling, renormalize)
    rows = clear_rows(ranked, k)
    assert rows.mean() > 0.9 and got.experts.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(got.experts)[rows], experts[rows])
    np.testing.assert_allclose(np.asarray(got.weights)[rows], weights[rows], rtol=1e-5)
    np.testing.assert_allclose(got.cutoff, ranked[:, k], rtol=0, atol=1e-6)


def test_all_experts_have_an_infinite_cutoff():
    got = route(jnp.asarray(np.random.default_rng(0).normal(size=(7, 6)), jnp.float32), jnp.zeros(6), 6)
    assert np.isposinf(got.cutoff).all() and (np.sort(got.experts, axis=1) == np.arange(6)).all()
    np.testing.assert_allclose(got.weights.sum(1), 1, rtol=1e-6)


def test_gradient_flows_through_the_chosen_scores_only():
    rng = np.random.default_rng(1)
    logits, ct = rng.normal(size=(17, 8)), rng.normal(size=(17, 3))
    bias = rng.normal(scale=0.3, size=8)

    def reference(logits, experts):
        scores = jax.nn.sigmoid(logits)
        weights = jnp.stack([scores[jnp.arange(17), experts[:, i]] for i in range(3)], 1)
        return (weights / (weights.sum(1, keepdims=True) + 1e-20) * 2.0 * ct).sum()

    with jax.enable_x64(True):
        want = np.asarray(jax.grad(reference)(jnp.asarray(logits), jnp.asarray(plain(logits, bias, 3)[0])))
        exact = jax.grad(lambda l: (route(l, jnp.asarray(bias), 3, scaling=2.0).weights * ct).sum())(
            jnp.asarray(logits)
        )
        assert np.abs(exact - want).max() / np.abs(want).max() < 1e-12

    def loss(logits, bias):
        routing = route(logits, bias, 3, scaling=2.0)
        return (routing.weights * ct.astype(np.float32)).sum() + routing.cutoff.sum()  # the cutoff must add nothing

    got, d_bias = jax.grad(loss, argnums=(0, 1))(jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32))
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-5 and not d_bias.any()
    chosen = np.zeros((17, 8), bool)
    np.put_along_axis(chosen, plain(logits, bias, 3)[0], True, 1)
    assert not np.asarray(got)[~chosen].any() and np.asarray(got)[chosen].all()


def test_m3_a_small_spread_on_a_large_offset():
    bias = np.linspace(6.817, 7.063, 238).astype(np.float32)
    logits = np.random.default_rng(2).normal(size=(512, 238)).astype(np.float32)
    a, b = (route(jnp.asarray(logits), jnp.asarray(x), 8) for x in (bias, bias - np.float32(7)))
    rows = clear_rows(plain(logits, bias, 8)[2], 8)
    assert rows.sum() > 400
    np.testing.assert_array_equal(np.asarray(a.experts)[rows], np.asarray(b.experts)[rows])
    np.testing.assert_array_equal(np.asarray(a.weights)[rows], np.asarray(b.weights)[rows])
    with pytest.raises(ValueError, match="float32"):
        route(jnp.asarray(logits), jnp.asarray(bias, jnp.bfloat16), 8)


def test_m6_negative_biased_scores_and_an_excluded_expert():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(40, 6)), jnp.float32)
    free, low = route(logits, jnp.zeros(6), 2), route(logits, jnp.full(6, -3.0), 2)
    np.testing.assert_array_equal(free.experts, low.experts)
    np.testing.assert_array_equal(free.weights, low.weights)
    shut = route(logits, jnp.full(6, -3.0).at[4].set(-1e4), 2)
    assert (
        (np.asarray(shut.experts) < 6).all()
        and (np.asarray(shut.experts) >= 0).all()
        and not (np.asarray(shut.experts) == 4).any()
    )
    np.testing.assert_array_equal(shut.experts, plain(logits, np.array([-3, -3, -3, -3, -1e4, -3]), 2)[0])


def test_bfloat16_logits_are_routed_in_float32():
    logits = jnp.asarray(np.random.default_rng(4).normal(size=(33, 8)), jnp.bfloat16)
    a, b = route(logits, jnp.zeros(8), 2), route(logits.astype(jnp.float32), jnp.zeros(8), 2)
    assert a.weights.dtype == a.scores.dtype == a.cutoff.dtype == jnp.float32
    np.testing.assert_array_equal(a.experts, b.experts)
    np.testing.assert_array_equal(a.weights, b.weights)


def test_ties_go_to_the_lower_index():
    assert np.asarray(route(jnp.zeros((2, 5)), None, 3).experts).tolist() == [[0, 1, 2]] * 2


def test_saturated_logits_stay_finite():
    logits = jnp.asarray([[-1e4, -1e4, -1e4, -1e4], [1e4, 1e4, -1e4, -1e4]], jnp.float32)
    value, gradient = jax.value_and_grad(lambda l: (route(l, jnp.zeros(4), 2).weights * jnp.arange(1.0, 3)).sum())(
        logits
    )
    assert np.isfinite(value) and np.isfinite(gradient).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), k=st.sampled_from([1, 3, 7]), shift=st.floats(-8, 8, width=32))
def test_properties(seed, k, shift):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(16, 8)) * rng.choice([0.1, 1, 10])).astype(np.float32)
    bias = rng.normal(scale=0.5, size=8).astype(np.float32)
    got = route(jnp.asarray(logits), jnp.asarray(bias), k)
    experts, weights, scores, cutoff = (np.asarray(a) for a in got)
    assert all(len(set(row)) == k for row in experts) and experts.min() >= 0 and experts.max() < 8
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    biased = scores + bias
    chosen = np.zeros((16, 8), bool)
    np.put_along_axis(chosen, experts, True, 1)
    assert (biased[chosen].reshape(16, k).min(1) >= cutoff).all() and (
        np.where(chosen, -np.inf, biased).max(1) == cutoff
    ).all()
    # A common shift of the bias, and a permutation of the experts, change nothing but names (where the gaps are clear).
    rows = clear_rows(plain(logits, bias, k)[2], k)
    shifted = route(jnp.asarray(logits), jnp.asarray(bias + np.float32(shift)), k)
    np.testing.assert_array_equal(np.asarray(shifted.experts)[rows], experts[rows])
    order = rng.permutation(8)
    moved = route(jnp.asarray(logits[:, order]), jnp.asarray(bias[order]), k)
    np.testing.assert_array_equal(order[np.asarray(moved.experts)][rows], experts[rows])


def test_bad_input_is_named():
    logits, bias = jnp.zeros((4, 6)), jnp.zeros(6)
    for call, text in (
        (lambda: route(logits, bias, 7), "k is 7"),
        (lambda: route(logits, bias, 0), "k is 0"),
        (lambda: route(logits, bias[:5], 2), r"\[E\] = \[6\]"),
        (lambda: route(logits[0], bias, 2), "2 axes"),
        (lambda: route(logits[:0], bias, 2), "at least one token"),
        (lambda: route(logits.astype(jnp.float16), bias, 2), "float16"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
