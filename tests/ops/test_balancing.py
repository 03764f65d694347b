"""Balancing arithmetic: golden vectors, exact counts and comparisons, public case M2, properties."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.ops import (
    aux_loss,
    bias_from_histogram,
    centre,
    ema_bias,
    expert_load,
    load_metrics,
    load_quantile_bias,
    margin_histogram,
    median_band_bias,
    quantile_bias,
    sign_bias,
)
from moejax.ops.histogram import count_bins_product, count_bins_scatter
from moejax.ops.routing import select

SUMMARY = json.loads((pathlib.Path(__file__).parents[1] / "golden/quantile_balance/balance.json").read_text())


def mix(x):
    x = x.astype(np.uint64)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def golden_scores(seed, step, tokens, experts):
    """The counter generator of the golden README; exact in float32."""
    base = mix(mix(np.array(seed)) ^ np.uint64(step + 1))
    h = mix((base + np.arange(tokens * experts, dtype=np.uint64)) & 0xFFFFFFFF).reshape(tokens, experts)
    c = mix((mix(np.array(seed ^ 0xC0FFEE)) + np.arange(experts, dtype=np.uint64)) & 0xFFFFFFFF)
    return ((3 * (h >> 12) + (c >> 12) + 1) / 2**22).astype(np.float32)


@pytest.mark.parametrize("name, k, seed", [("small", 4, 900), ("small_padding", 4, 901), ("experts896", 16, 902)])
def test_golden_steps(name, k, seed, golden):
    """Three steps: load, exact bias, histogram bias from shards added up, sign bias; then the balance that they
    reach."""
    file, summary = golden(f"quantile_balance/{name}.npz"), SUMMARY[name]
    tokens, experts = file["token_valid"].shape[0], file["in_step0_bias"].shape[0]
    mask = jnp.asarray(file["token_valid"])
    load_of = jax.jit(lambda scores, bias: expert_load(select(scores, bias, k)[0], mask, experts))
    exact_of = jax.jit(lambda scores, bias: quantile_bias(scores, bias, k, mask=mask))
    counts_of = jax.jit(lambda scores, bias, mask: margin_histogram(scores, bias, k, mask=mask))
    slack = 4 if experts == 896 else 0  # float32 addition makes ties there
    for step in range(3):
        scores = golden_scores(seed, step, tokens, experts)
        if f"in_step{step}_scores" in file:
            np.testing.assert_array_equal(scores, file[f"in_step{step}_scores"])
        scores = jnp.asarray(np.where(file["token_valid"][:, None], scores, np.nan))  # padding must not be read
        bias = jnp.asarray(file[f"in_step{step}_bias"])
        load = load_of(scores, bias)
        assert np.abs(load - file[f"step{step}_load"]).max() <= slack and load.sum() == mask.sum() * k
        metrics = load_metrics(load, mask.sum(), k)
        assert abs(metrics.load_cv - summary["steps"][step]["load"]["cv"]) < 0.002
        assert abs(metrics.max_violation - summary["steps"][step]["load"]["maxvio"]) < (0.02 if slack else 1e-6)
        assert abs(metrics.load_cv_floor - summary["floor_cv"]) < 1e-6
        exact = exact_of(scores, bias)
        assert np.abs(exact - file[f"out_step{step}_exact_bias"]).max() < 2e-6
        shards = [
            counts_of(s, bias, m) for s, m in zip(scores.reshape(4, -1, experts), mask.reshape(4, -1), strict=True)
        ]
        counts = sum(shards)
        np.testing.assert_array_equal(counts, counts_of(scores, bias, mask))
        assert (counts.sum(1) == mask.sum()).all()
        new = bias_from_histogram(counts, bias, k)
        width = (bias.max() - bias.min() + 2) / 1000
        difference = np.abs(new - file[f"out_step{step}_hist_bias"])
        assert difference.max() < (width if experts == 896 else 1e-5) and np.median(difference) < 1e-6
        assert np.abs(new - exact).max() < 2 * width + summary["steps"][step]["hist_minus_exact_max"]
        if f"step{step}_shard_counts" in file:
            moved = np.abs(np.asarray(counts) - file[f"step{step}_shard_counts"].sum(0)).sum() / 2
            assert moved <= 2, "only margins within float32 rounding of an edge may change bins"
        sign = sign_bias(
            jnp.asarray(file[f"step{step}_sign_load"]), jnp.asarray(file[f"in_step{step}_sign_bias"]), 1e-3
        )
        assert np.abs(sign - file[f"out_step{step}_sign_bias_next"]).max() < 1e-6
    after = load_of(jnp.asarray(golden_scores(seed, 3, tokens, experts)), new)
    assert abs(load_metrics(after, mask.sum(), k).load_cv - summary["after"]["cv"]) < 0.005


@pytest.mark.parametrize("name", ["given_bias", "given_bias_exact"])
def test_golden_given_bias(name, golden):
    file = golden(f"quantile_balance/{name}.npz")
    scores, bias, k = jnp.asarray(file["in_scores"]), jnp.asarray(file["in_bias"]), int(file["top_k"])
    experts, cutoff = select(scores, bias, k)
    np.testing.assert_array_equal(np.sort(experts, 1), np.sort(file["routes"], 1))
    np.testing.assert_allclose(cutoff, file["out_alpha"], rtol=0, atol=1e-6)
    counts = margin_histogram(scores, bias, k)
    np.testing.assert_array_equal(counts, margin_histogram(scores, bias, k, cutoff=cutoff))
    if name == "given_bias_exact":
        np.testing.assert_array_equal(counts, file["counts"])
    else:
        assert np.abs(np.asarray(counts) - file["counts"]).sum() / 2 <= 4
    assert np.abs(bias_from_histogram(jnp.asarray(file["counts"]), bias, k) - file["out_hist_bias"]).max() < 1e-5
    assert np.abs(quantile_bias(scores, bias, k) - file["out_exact_bias"]).max() < 2e-6


@pytest.mark.parametrize("tokens, experts, bins", [(1, 3, 1), (17, 5, 7), (300, 4, 1000), (513, 3, 1000)])
def test_the_two_counting_forms_agree(tokens, experts, bins):
    rng = np.random.default_rng(bins)
    index, mask = rng.integers(0, bins, (tokens, experts)).astype(np.int32), rng.random(tokens) < 0.7
    want = np.stack([np.bincount(index[mask, e], minlength=bins) for e in range(experts)])
    for f in (count_bins_scatter, count_bins_product):
        got = f(jnp.asarray(index), jnp.asarray(mask), bins)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, want)


def test_histogram_clips_and_handles_extreme_scores():
    scores = jnp.asarray([[0.0, 1.0, 0.5, 1.0], [1.0, 0.0, 0.0, 0.0]], jnp.float32)
    bias = jnp.asarray([-5.0, 5.0, 0.0, 0.0])
    counts = margin_histogram(scores, bias, 2)
    assert (counts.sum(1) == 2).all()
    assert np.isfinite(bias_from_histogram(counts, bias, 2)).all()


def test_ranks_are_exact_beyond_int32_products():
    """2**30 tokens, k = 16: tokens * k overflows int32. Half the margins in bin 3, half in bin 6, q = m / 4 falls
    half-way into bin 3."""
    counts = jnp.zeros((64, 10), jnp.int32).at[:, 3].set(2**29).at[:, 6].set(2**29)
    counts = counts.at[0].set(jnp.zeros(10, jnp.int32).at[9].set(2**30))
    got = bias_from_histogram(counts, jnp.zeros(64), 16)
    raw = np.full(64, -1 + 3.5 * 0.2)
    raw[0] = -1 + 9.25 * 0.2
    np.testing.assert_allclose(got, raw - raw.mean(), atol=1e-6)


def test_m2_sign_is_exact_in_integers():
    zero = jnp.zeros(2)
    np.testing.assert_array_equal(sign_bias(jnp.asarray([40840, 41080]), zero, 1e-3), np.float32([1e-3, -1e-3]))
    load = jnp.asarray([16777217, 16777215, 16777216, 16777216])
    np.testing.assert_array_equal(np.sign(sign_bias(load, jnp.zeros(4), 1e-3)), [-1, 1, 0, 0])
    big = jnp.asarray([2**31 - 1, 2**31 - 2, 2**31 - 2, 2**31 - 1, 0], jnp.int32)  # the sum overflows int32
    np.testing.assert_array_equal(np.sign(sign_bias(big, jnp.zeros(5), 1.0)), [-1, -1, -1, -1, 1])
    with pytest.raises(ValueError, match="int32"):
        sign_bias(load.astype(jnp.float32), jnp.zeros(4), 1e-3)
    with pytest.raises(ValueError, match="int32"):
        sign_bias(load.astype(jnp.bfloat16), jnp.zeros(4), 1e-3)


def test_m2_64_shards_add_up_exactly():
    rng = np.random.default_rng(5)
    scores, mask = rng.random((64 * 8, 12), np.float32), rng.random(64 * 8) < 0.8
    bias = jnp.asarray(rng.normal(scale=0.2, size=12), jnp.float32)
    f = jax.jit(lambda s, m: margin_histogram(s, bias, 3, mask=m))
    total = jax.vmap(f)(jnp.asarray(scores.reshape(64, 8, 12)), jnp.asarray(mask.reshape(64, 8))).sum(0)
    whole = f(jnp.asarray(scores), jnp.asarray(mask))
    np.testing.assert_array_equal(total, whole)
    assert total.dtype == jnp.int32 and (total.sum(1) == mask.sum()).all()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 5), min_size=7, max_size=7),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]),
)
def test_integer_rules_against_exact_arithmetic(load, quantile):
    zero, array = jnp.zeros(7), jnp.asarray(np.array(load, np.int32))
    want = [np.sign(sum(load) - 7 * x) for x in load]
    np.testing.assert_array_equal(np.sign(sign_bias(array, zero, 1.0)), want)
    place = float(np.float32(quantile) * np.float32(6))
    low, order = int(place), sorted(load)
    # Order statistics either side of the quantile; compare 1000 * load with the interpolation, in Python integers.
    share = round(1000 * (place - low))
    value = 1000 * order[low] + share * (order[min(low + 1, 6)] - order[low])
    want = [np.sign(value - 1000 * x) for x in load]
    np.testing.assert_array_equal(np.sign(load_quantile_bias(array, zero, 1.0, quantile=quantile)), want)


def test_median_band():
    sums = jnp.asarray([1.0, 0.79, 0.81, 1.19, 1.21, 1.0, 1.0])
    np.testing.assert_allclose(median_band_bias(sums, jnp.full(7, 0.5)), [0.5, 0.6, 0.5, 0.5, 0.4, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(
        median_band_bias(sums, jnp.zeros(7), step=1.0, low=0.8, high=1.2), [0, 1, 0, 0, -1, 0, 0]
    )


def test_centre_and_ema():
    rng = np.random.default_rng(6)
    old, new = (jnp.asarray(rng.normal(size=9), jnp.float32) for _ in range(2))
    mixed = ema_bias(old, new, 0.9)
    want = 0.9 * np.asarray(old, np.float64) + 0.1 * np.asarray(new, np.float64)
    np.testing.assert_allclose(mixed, want - want.mean(), atol=1e-6)
    np.testing.assert_allclose(ema_bias(old, new, 0.0), centre(new), atol=1e-7)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), k=st.sampled_from([1, 3, 7]), kept=st.sampled_from([1, 20, 64]))
def test_quantile_properties(seed, k, kept):
    """Exact and histogram agree within two bins; masked rows are as absent; the quantile bias selects k N / E tokens
    an expert."""
    rng = np.random.default_rng(seed)
    scores = (rng.random((64, 8)) ** rng.uniform(0.3, 3, 8)).astype(np.float32)
    bias = jnp.asarray(rng.normal(scale=0.3, size=8), jnp.float32)
    mask = jnp.arange(64) < kept
    dirty = jnp.where(mask[:, None], scores, jnp.nan)
    exact = quantile_bias(dirty, bias, k, mask=mask)
    r = np.asarray(select(jnp.asarray(scores[:kept]), bias, k)[1])[:, None] - scores[:kept]
    want = np.quantile(r.astype(np.float64), k / 8, axis=0)
    np.testing.assert_allclose(exact, want - want.mean(), atol=1e-5)
    counts = margin_histogram(dirty, bias, k, mask=mask, bins=1000)
    assert (counts.sum(1) == kept).all()
    new = bias_from_histogram(counts, bias, k)
    assert abs(new.mean()) < 1e-6 and np.isfinite(new).all()
    # The quantile from counts lies between the order statistics around rank q, widened by one bin.
    width = float((bias.max() - bias.min() + 2) / 1000)
    order, rank = np.sort(r, 0), -(-kept * k // 8)
    raw = np.asarray(new) - np.asarray(new).mean()
    centred = order[rank - 1] - order[rank - 1].mean()
    assert np.abs(raw - centred).max() < 2 * width


def test_zero_tokens_leave_the_bias():
    bias = jnp.asarray([0.5, -0.25, 0.125, 1.0])
    scores, mask = jnp.full((6, 4), jnp.nan), jnp.zeros(6, bool)
    np.testing.assert_array_equal(quantile_bias(scores, bias, 2, mask=mask), bias)
    counts = margin_histogram(scores, bias, 2, mask=mask)
    assert not counts.any()
    np.testing.assert_array_equal(bias_from_histogram(counts, bias, 2), bias)
    metrics = load_metrics(jnp.zeros(4, jnp.int32), 0, 2)
    assert metrics.dead_experts == 4 and all(np.isfinite(m) for m in metrics)


def test_no_gradient():
    rng = np.random.default_rng(7)
    scores, bias = jnp.asarray(rng.random((32, 6)), jnp.float32), jnp.zeros(6)
    assert not jax.grad(lambda s: quantile_bias(s, bias, 2).max())(scores).any()


def test_load_metrics():
    got = load_metrics(jnp.asarray([0, 4, 8, 0]), 6, 2)
    np.testing.assert_allclose(got[:3], [8 / 3 - 1, np.std([0, 4, 8, 0]) / 3, np.sqrt(4 / 12)], rtol=1e-6)
    assert got.dead_experts == 2 and got.dead_experts.dtype == jnp.int32


def test_aux_loss_value_gradient_and_mask():
    rng = np.random.default_rng(8)
    logits, experts = rng.normal(size=(20, 6)), rng.integers(0, 6, (20, 2))
    mask = rng.random(20) < 0.7

    def plain(logits):
        p = jax.nn.softmax(logits[mask], axis=-1).mean(0)
        f = np.bincount(experts[mask].ravel(), minlength=6) / experts[mask].size
        return 6 * jnp.sum(f * p)

    with jax.enable_x64(True):
        want, want_gradient = jax.value_and_grad(plain)(jnp.asarray(logits))
    dirty = jnp.asarray(np.where(mask[:, None], logits, np.nan), jnp.float32)
    got, gradient = jax.value_and_grad(lambda l: aux_loss(l, jnp.asarray(experts), mask=jnp.asarray(mask)))(dirty)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.abs(gradient - want_gradient).max() / np.abs(want_gradient).max() < 1e-5
    assert not np.asarray(gradient)[~mask].any()
    even = jnp.asarray(np.arange(24).reshape(12, 2) % 6)
    np.testing.assert_allclose(aux_loss(jnp.zeros((12, 6)), even), 1, rtol=1e-6)
    assert aux_loss(jnp.full((3, 6), jnp.nan), jnp.zeros((3, 2), jnp.int32), mask=jnp.zeros(3, bool)) == 0


def test_bad_input_is_named():
    scores, bias, load = jnp.zeros((4, 6)), jnp.zeros(6), jnp.zeros(6, jnp.int32)
    for call, text in (
        (lambda: quantile_bias(scores, bias, 6), "nothing to balance"),
        (lambda: margin_histogram(scores, bias, 6), "k is 6 of 6"),
        (lambda: bias_from_histogram(jnp.zeros((6, 9), jnp.int32), bias, 6), "k is 6"),
        (lambda: margin_histogram(scores, bias, 7), "k is 7"),
        (lambda: margin_histogram(scores, bias, 2, bins=0), "bins is 0"),
        (lambda: margin_histogram(scores.astype(jnp.bfloat16), bias, 2), "scores is bfloat16"),
        (lambda: margin_histogram(scores, bias, 2, mask=jnp.ones(4)), "mask is float32"),
        (lambda: margin_histogram(scores, bias, 2, mask=jnp.ones(5, bool)), r"bool \[N\] = \[4\]"),
        (lambda: margin_histogram(scores, bias, 2, cutoff=jnp.zeros(3)), "cutoff has shape"),
        (lambda: quantile_bias(scores[:0], bias, 2), "N >= 1"),
        (lambda: bias_from_histogram(jnp.zeros((6, 9)), bias, 2), "counts has dtype float32"),
        (lambda: sign_bias(load[:5], bias, 1e-3), "bias has shape"),
        (lambda: load_quantile_bias(load, bias, 1e-3, quantile=1.5), "quantile is 1.5"),
        (lambda: median_band_bias(load, bias), "probability_sums is int32"),
        (lambda: load_metrics(jnp.zeros(4), 1, 1), "load is float32"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
