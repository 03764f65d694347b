"""Needle grids and loss by position: against readers whose score is known, and against plain logits of a model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax import HybridLM
from moejax.data import ByteTokenizer
from moejax.data.needles import needle_baselines, needle_rows
from moejax.evals import bucket_name, document_rows, make_predict, needle_grid, position_loss
from moejax.train import make_eval_step, make_state

DEPTHS = (0.0, 0.5, 1.0)
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def rows():
    return {length: needle_rows(length, DEPTHS, 4, 7, rows_per_depth=5, digits=3) for length in (160, 320)}


def reader(answer):
    """A predict that reads the text before each position and gives `answer(key, facts, given)` for the next character."""

    def predict(variables, tokens, segment_ids, at):
        assert tokens.shape == segment_ids.shape and segment_ids.min() == 1
        out = np.zeros(at.shape, np.int64)
        for (row, column), place in np.ndenumerate(np.asarray(at)):
            text = TOKENIZER.decode(tokens[row, : place + 1])
            body, _, question = text.rpartition("\n? ")
            key, _, given = question.partition(" is ")
            found = [line.split(" is ") for line in body.split("\n") if " is " in line and line.endswith(".")]
            facts = {name: value.rstrip(".") for name, value in found}
            out[row, column] = ord(answer(key, facts, given))
        return out

    return predict


def right(key, facts, given):
    return facts[key][len(given)]


def nearest(key, facts, given):
    return list(facts.values())[-1][len(given)]


@pytest.mark.parametrize("batch_tokens", [1, 700, 10**6])
def test_a_reader_that_looks_up_the_key_finds_all(rows, batch_tokens):
    """Whatever the batch: 1, 4 (15 rows do not divide) and all rows at a time."""
    grid = needle_grid(reader(right), None, rows, batch_tokens=batch_tokens)
    assert grid.lengths == (160, 320) and grid.depths == DEPTHS
    assert np.array_equal(grid.accuracy, np.ones((2, 3))) and np.array_equal(grid.rows, np.full((2, 3), 5))
    assert np.array_equal(grid.guess, [1e-3, 1e-3]) and np.array_equal(grid.copy_any, [0.25, 0.25])


def test_the_copy_of_the_nearest_scores_its_baseline(rows):
    grid = needle_grid(reader(nearest), None, rows, batch_tokens=1000)
    assert np.array_equal(grid.accuracy, grid.copy_last)
    assert grid.accuracy[:, -1].min() == 1 and grid.accuracy[:, 0].max() < 1  # at depth 1 the asked needle is the nearest
    for i, made in enumerate(rows.values()):
        assert grid.copy_last[i].mean() == pytest.approx(needle_baselines(made)["copy_last"])
    assert grid.by_length() == {160: grid.accuracy[0].mean(), 320: grid.accuracy[1].mean()}
    assert grid.to_dict()["accuracy"] == grid.accuracy.tolist()


def test_one_wrong_character_is_a_miss(rows):
    """The last character wrong at one depth only: none of the values there count, all others do."""

    def almost(key, facts, given):
        wrong = len(given) == 2 and list(facts).index(key) == 0
        return "x" if wrong else right(key, facts, given)

    grid = needle_grid(reader(almost), None, rows, batch_tokens=1000)
    assert grid.accuracy[:, 0].max() == 0 and grid.accuracy[:, -1].min() == 1


def test_needle_grid_refuses(rows):
    one = rows[160]
    with pytest.raises(ValueError, match="at least one length"):
        needle_grid(reader(right), None, {}, batch_tokens=8)
    with pytest.raises(ValueError, match="batch_tokens=0"):
        needle_grid(reader(right), None, rows, batch_tokens=0)
    with pytest.raises(ValueError, match="rows under 161 have 160 tokens"):
        needle_grid(reader(right), None, {161: one}, batch_tokens=8)
    other = dataclasses.replace(rows[320], depths=rows[320].depths * 0.5)
    with pytest.raises(ValueError, match="depths differ between lengths"):
        needle_grid(reader(right), None, {160: one, 320: other}, batch_tokens=8)


@pytest.fixture(scope="module")
def model(toy, noisy):
    made = HybridLM(toy.replace(vocab_size=320, layers=1, pattern="M", dense_layers=1, residual="plain"))
    variables = jax.jit(made.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return made, {**variables, "params": noisy(variables["params"], jax.random.key(1), 0.5)}


@pytest.fixture(scope="module")
def logits(model, rows):
    made, variables = model
    return np.asarray(jax.jit(made.apply)(variables, rows[160].tokens, np.ones_like(rows[160].tokens)))


def test_predict_is_the_argmax_of_the_logits(model, logits, rows):
    made, variables = model
    one = rows[160]
    at = one.positions - 1
    given = make_predict(made)(variables, one.tokens, np.ones_like(one.tokens), at)
    assert np.array_equal(given, np.take_along_axis(logits.argmax(-1), at, axis=1))
    assert len(np.unique(given)) > 5  # not one token for all
    assert one.correct(logits.argmax(-1)).shape == (15,)


def test_position_loss_is_the_loss_of_each_position(model, logits, rows):
    """Buckets of the powers of two, over documents of full length and shorter ones, against plain log-softmax."""
    made, variables = model
    documents = [tokens[: 160 - 7 * i] for i, tokens in enumerate(rows[160].tokens[:5])]
    batches = document_rows(documents, length=160, rows=2, pad_id=256)
    assert len(batches) == 3 and batches[0]["tokens"].shape == (2, 160) and not batches[2]["segment_ids"][1].any()
    state = make_state(variables["params"], variables.get("router_state", {}), optax.identity())
    evaluate = jax.jit(make_eval_step(made, domains=1))
    measured = position_loss(evaluate, state, batches)
    nats = jax.nn.logsumexp(logits, axis=-1)[:, :-1] - np.take_along_axis(logits[:, :-1], rows[160].tokens[:, 1:, None], axis=2)[..., 0]
    for bucket in range(8):
        low, high = (2**bucket if bucket else 0), 2 ** (bucket + 1)
        parts = [np.asarray(nats[i, low : min(high, len(d) - 1)]) for i, d in enumerate(documents)]
        assert measured.tokens[bucket] == sum(map(len, parts))
        np.testing.assert_allclose(measured.nats[bucket], sum(part.sum() for part in parts), rtol=1e-5)
    assert measured.tokens[8:].sum() == 0 and np.isnan(measured.bits[8])
    assert measured.total_bits == pytest.approx(measured.nats.sum() / sum(len(d) - 1 for d in documents) / np.log(2))
    assert list(measured.to_dict()) == ["0-1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255"]


def test_position_loss_refuses():
    with pytest.raises(ValueError, match="0 batches hold no target"):
        position_loss(lambda state, batch: {}, None, [])
    with pytest.raises(ValueError, match=r"no loss_groups of shape .21.; build it by make_eval_step.model, domains=1."):
        position_loss(lambda state, batch: {"loss_groups": np.zeros(42), "token_groups": np.zeros(42)}, None, [{}])
    with pytest.raises(ValueError, match="length=1, rows=2"):
        document_rows([np.zeros(4, int)], length=1, rows=2, pad_id=0)
    with pytest.raises(ValueError, match="no documents"):
        document_rows([], length=4, rows=2, pad_id=0)
    assert bucket_name(0) == "0-1" and bucket_name(6) == "64-127"
