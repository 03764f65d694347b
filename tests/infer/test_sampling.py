"""Sampling: the right distribution, cuts as float64 NumPy makes them, and draws that know nothing of their batch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.infer.sampling import Sampling, _last_kept, make_sampling, sample

VOCABULARY = 12
run = jax.jit(sample)


@pytest.fixture(scope="module")
def logits():
    """Twelve logits with ties, and every probability above 1%."""
    return np.round(np.random.default_rng(0).normal(size=VOCABULARY) * 2) / 2


def repeated(row, count, *, start=0, **settings):
    """`count` draws from one row at successive positions, as one batch."""
    batch = jnp.broadcast_to(jnp.asarray(row, jnp.float32), (count, len(row)))
    return run(batch, make_sampling(count, **settings), jnp.arange(start, start + count, dtype=jnp.int32))


def kept_by_numpy(row, temperature, top_k, top_p):
    """Tokens that survive, and their probabilities; from the definition, in float64."""
    scaled = np.asarray(row, np.float64) / temperature
    order = sorted(range(len(row)), key=lambda token: (-scaled[token], token))
    if top_k:
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled.max())
    shares = weights / weights.sum()
    if top_p < 1:
        order = [token for token, before in zip(order, np.cumsum(shares) - shares, strict=True) if before < top_p]
    kept = np.zeros(len(row))
    kept[order] = np.exp(scaled[order] - scaled.max())
    return set(order), kept / kept.sum()


def chi_square(tokens, probabilities):
    expected = probabilities * len(tokens)
    seen = np.bincount(tokens, minlength=len(probabilities))
    assert not seen[probabilities == 0].any()
    return float(np.sum((seen - expected) ** 2 / np.where(expected, expected, 1)))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 5, 1.0), (1.0, 0, 0.8), (1.3, 7, 0.55), (1.0, 99, 1.0), (1.0, 1, 1.0), (1.0, 0, 1e-6)],
)
def test_distribution_and_cuts(logits, temperature, top_k, top_p):
    """Every token of the set that float64 keeps is drawn, no other, in its share: chi-square below the 99.99% quantile of 11 degrees."""
    drawn = repeated(logits, 8000, temperature=temperature, top_k=top_k, top_p=top_p, seed=7)
    kept, probabilities = kept_by_numpy(logits, temperature, top_k, top_p)
    tokens = np.asarray(drawn.tokens)
    assert set(tokens.tolist()) == kept
    assert chi_square(tokens, probabilities) < 37.4
    whole = logits / temperature - np.log(np.sum(np.exp(logits / temperature)))
    np.testing.assert_allclose(drawn.log_probs, whole[tokens], atol=2e-6)


def test_positions_and_seeds_are_independent(logits):
    """Pairs of neighbours in position, and in seed, fill the table of products: 121 degrees, 99.99% quantile 187."""
    probabilities = kept_by_numpy(logits, 1.0, 0, 1.0)[1]
    first = np.asarray(repeated(logits, 12000, temperature=1.0, seed=3).tokens)
    other = np.asarray(repeated(logits, 12000, temperature=1.0, seed=4).tokens)
    for tokens, after in ((first[:-1:2], first[1::2]), (first, other)):
        assert chi_square(tokens * VOCABULARY + after, np.outer(probabilities, probabilities).ravel()) < 187


def test_large_vocabulary_of_equal_logits():
    """Draws from 163,840 equal tokens do not lean to low ids (a maximum with ties would)."""
    tokens = np.asarray(repeated(np.zeros(163_840, np.float32), 24, temperature=1.0, seed=1).tokens)
    assert len(set(tokens.tolist())) == 24
    assert abs(tokens.mean() / 163_840 - 0.5) < 4 * (1 / 12 / 24) ** 0.5


@pytest.mark.parametrize("vocabulary", [1, 50_000])
def test_cuts_of_large_vocabularies(vocabulary):
    """The last token kept, against float64, over thresholds and ties at the threshold. A mass within 1e-4 of p may round either way."""
    rng = np.random.default_rng(vocabulary)
    row = np.round(rng.normal(size=vocabulary) * 3, 1).astype(np.float32)
    weights = np.exp(np.sort(row.astype(np.float64))[::-1] - row.max())
    masses = np.cumsum(weights) / weights.sum()
    cases = [(k, p) for k in (0, 1, 2, 57, 10**6) for p in (1.0,)] + [(0, p) for p in (0.1, 0.5, 0.9, 0.99)]
    cases = [(k, p) for k, p in cases if p == 1 or np.abs(masses - p).min() > 1e-4 * weights.max() / weights.sum()]
    batch = jnp.broadcast_to(jnp.asarray(row - row.max()), (len(cases), vocabulary))
    top_k, top_p = (jnp.asarray(values) for values in zip(*cases, strict=True))
    value, token = (np.asarray(x) for x in _last_kept(batch, top_k, top_p.astype(jnp.float32)))
    shifted, ids = row - row.max(), np.arange(vocabulary)
    for index, (k, p) in enumerate(cases):
        kept = (shifted > value[index]) | ((shifted == value[index]) & (ids <= token[index]))
        assert set(ids[kept].tolist()) == kept_by_numpy(row, 1.0, k, p)[0], (k, p)


def test_ties_at_a_cut_keep_the_lower_ids():
    drawn = lambda **settings: set(np.asarray(repeated(np.zeros(10), 600, temperature=1.0, **settings).tokens).tolist())
    assert drawn(top_k=3) == {0, 1, 2}
    assert drawn(top_p=0.5) == {0, 1, 2, 3, 4}
    assert drawn(top_p=0.3) == {0, 1, 2}  # 0.3 is a little more than 3/10 in float32; so is its product with 10
    assert drawn(top_p=0.31) == {0, 1, 2, 3}
    assert drawn(top_k=4, top_p=0.5) == {0, 1}  # half of what top_k left


def test_the_smallest_top_p_keeps_the_first_token():
    """Also one that the backend takes for 0, which `make_sampling` refuses and arrays made by hand may hold."""
    settings = make_sampling(64, temperature=1.0, top_p=float(np.finfo(np.float32).tiny))
    for least in (settings, settings._replace(top_p=np.full(64, 1e-39, np.float32))):
        assert not np.any(run(jnp.zeros((64, 5)), least, jnp.arange(64)).tokens)


def test_the_hottest_temperature_is_all_but_uniform():
    drawn = run(jnp.asarray([[90.0, 0.0], [0.0, 90.0]]), make_sampling(2, temperature=1e6), jnp.arange(2))
    np.testing.assert_allclose(drawn.log_probs, np.log(0.5), atol=1e-4)


def test_greedy():
    rows = jnp.asarray([[0.0, 3.0, 3.0, -1.0], [-jnp.inf, -5.0, -jnp.inf, -6.0], [1.0, 1.0, 1.0, 1.0]])
    drawn = run(rows, make_sampling(3), jnp.zeros(3, jnp.int32))
    assert drawn.tokens.tolist() == [1, 1, 0] and drawn.tokens.dtype == jnp.int32
    np.testing.assert_allclose(drawn.log_probs, jax.nn.log_softmax(rows)[jnp.arange(3), drawn.tokens], rtol=1e-6)
    cold = run(rows, make_sampling(3, temperature=[1e-6, 1e-6, 0.0]), jnp.arange(3))
    assert cold.tokens.tolist()[1:] == [1, 0] and int(cold.tokens[0]) in (1, 2)
    assert np.isfinite(cold.log_probs).all()


def test_a_row_is_drawn_the_same_in_any_batch(logits):
    """Alone, or in another place among others with other settings, one of them broken: the same bits."""
    rng = np.random.default_rng(5)
    batch = np.concatenate([rng.normal(size=(4, VOCABULARY)), logits[None], rng.normal(size=(2, VOCABULARY))]).astype(np.float32)
    batch[1, 3] = np.nan
    for mine in ({"temperature": 0.9}, {"temperature": 0.9, "top_k": 4, "top_p": 0.7}, {"temperature": 0.0}):
        others = Sampling(*(np.array(x) for x in make_sampling(7, temperature=[1, 0, 2, 0.5, 0, 1, 1], top_p=0.5, seed=range(7))))
        alone = make_sampling(1, seed=11, **mine)
        for values, value in zip(others, alone, strict=True):
            values[4] = value[0]
        for position in (0, 5, 2**31 - 1):
            positions = np.array([9, 9, 9, 9, position, 3, 4], np.int32)
            together = run(batch, others, positions)
            solo = run(batch[4:5], alone, positions[4:5])
            assert together.tokens[4] == solo.tokens[0]
            assert together.log_probs[4] == solo.log_probs[0]
            assert together.tokens[1] == -1 and np.isnan(together.log_probs[1])


@pytest.mark.parametrize("bad", [[0.0, np.nan, 1.0], [0.0, np.inf, 1.0], [-np.inf] * 3])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.9}])
def test_logits_that_are_no_distribution(bad, settings):
    drawn = run(jnp.asarray([bad, [0.0, 9.0, -np.inf]]), make_sampling(2, **settings), jnp.zeros(2, jnp.int32))
    assert int(drawn.tokens[0]) == -1 and np.isnan(drawn.log_probs[0])
    assert int(drawn.tokens[1]) in (0, 1) and np.isfinite(drawn.log_probs[1])


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 2}])
def test_public_case_r2(settings):
    """Log-probs are those of the tempered distribution, before cuts: the learner's, at equal weights."""
    drawn = repeated([2.0, 0.0], 256, temperature=0.6, **settings)
    tokens = np.asarray(drawn.tokens)
    assert set(tokens.tolist()) == ({0} if settings == {"top_p": 0.9} else {0, 1})  # the first token alone has 0.966
    np.testing.assert_allclose(drawn.log_probs, np.where(tokens == 0, -0.03505, -3.36839), atol=5e-6)
    learner = jax.nn.log_softmax(jnp.asarray([2.0, 0.0]) / jnp.float32(0.6))
    assert np.abs(np.asarray(drawn.log_probs) - np.asarray(learner)[tokens]).max() < 1e-6


def test_greedy_batches_pay_for_nothing_else():
    """The sort and the noise stand inside branches that a greedy batch, or one without cuts, does not take."""
    jaxpr = jax.make_jaxpr(sample)(jnp.zeros((2, 5)), make_sampling(2), jnp.zeros(2, jnp.int32)).jaxpr
    own = {equation.primitive.name for equation in jaxpr.eqns}
    assert "cond" in own and not {"sort", "random_bits", "random_seed", "cumsum"} & own
    inner = next(equation for equation in jaxpr.eqns if equation.primitive.name == "cond").params["branches"]
    names = [{equation.primitive.name for equation in branch.jaxpr.eqns} for branch in inner]
    assert any("cond" in one and "sort" not in one and "cumsum" not in one for one in names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0"),
        ({"temperature": 1e-7}, "temperature is 1e-07; it must be 0 (greedy), or from 1e-06 to 1e+06"),
        ({"temperature": 1e39}, "temperature is 1e+39; it must be 0 (greedy), or from 1e-06 to 1e+06"),
        ({"temperature": 2e6}, "temperature is 2000000.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": [1.0, float("nan")]}, "temperature is nan"),
        ({"temperature": [1.0]}, "temperature has shape"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.0}, "top_k is 2.0; it must be an integer"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": 2**31}, "top_k is 2147483648"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be in [1.18e-38, 1]"),
        ({"top_p": 1e-60}, "top_p is 1e-60"),
        ({"top_p": 1e-38}, "top_p is 1e-38"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"top_p": [0.5, 1.01]}, "top_p is 1.01"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296; it must be in"),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must be in"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_sampling(2, **settings)


def test_bad_arrays():
    good = make_sampling(2)
    with pytest.raises(ValueError, match="rows is 0"):
        make_sampling(0)
    with pytest.raises(ValueError, match="float16"):
        sample(jnp.zeros((2, 4), jnp.float16), good, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"\[B,V\]"):
        sample(jnp.zeros(4), good, jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="temperature has shape"):
        sample(jnp.zeros((3, 4)), good, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="positions has shape"):
        sample(jnp.zeros((2, 4)), good, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="integers"):
        sample(jnp.zeros((2, 4)), good, jnp.zeros(2))
    with pytest.raises(ValueError, match="at least one row"):
        sample(jnp.zeros((2, 0)), good, jnp.zeros(2, jnp.int32))


def test_dtypes(x64):
    rows = lambda dtype: jax.ShapeDtypeStruct((1, 3), dtype)
    for dtype, wide in ((jnp.float64, jnp.float64), (jnp.float32, jnp.float32), (jnp.bfloat16, jnp.float32)):
        drawn = jax.eval_shape(sample, rows(dtype), make_sampling(1, temperature=1.5, top_k=2), jnp.zeros(1, jnp.int32))
        assert drawn.log_probs.dtype == wide and drawn.tokens.dtype == jnp.int32
