"""What the loss reads of a batch: targets inside documents, masks of 0 and 1, sums by domain and by position.

Shapes: B rows, T tokens, D domains.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.train import make_eval_step, make_train_step
from moejax.train.batch import POSITION_BUCKETS, check_batch, read_targets
from moejax.train.loss import chunked_cross_entropy
from moejax.train.optimizers import OptimizerConfig, adamw
from moejax.train.state import init_state

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [0, 1, 1, 1, 1, 1, 2, 2]], np.int32)
POSITIONS = [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 2, 3, 4, 0, 1]]


def batch(**more):
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    return {"tokens": jnp.asarray(tokens), "segment_ids": jnp.asarray(SEGMENTS)} | {k: jnp.asarray(v) for k, v in more.items()}


def test_without_targets_the_next_token_of_the_same_document():
    """MaxText commits d20a48da1 and 092c3e871: the mask is 0 or 1, not a segment number, and no target crosses a boundary."""
    read = read_targets(batch(), 0)
    assert read.groups is None and read.valid.dtype == bool
    assert read.valid.tolist() == [[True, True, False, True, True, True, False, False], [False, *[True] * 4, False, True, False]]
    assert read.targets[0, :2].tolist() == [1, 2]


def test_given_targets_count_where_the_mask_says_but_never_in_padding():
    targets, mask = np.full((2, 8), 9, np.int32), np.ones((2, 8), bool)
    mask[0, :4] = False
    read = read_targets(batch(targets=targets, loss_mask=mask), 0)
    assert np.array_equal(read.valid, mask & (SEGMENTS != 0)) and np.all(np.asarray(read.targets) == 9)


def test_groups_are_domain_and_the_highest_bit_of_the_position():
    domains = np.where(SEGMENTS == 2, 1, 0).astype(np.int8)
    bucket = np.array([0, 0, 1, 1, 2, 2, 2, 2])[np.array(POSITIONS)]
    for more in ({}, {"positions": np.array(POSITIONS, np.int32)}):
        read = read_targets(batch(domains=domains, **more), 2)
        inside = SEGMENTS != 0
        assert np.array_equal(np.asarray(read.groups)[inside], (domains * POSITION_BUCKETS + bucket)[inside])
    far = read_targets(batch(positions=np.full((2, 8), 2**30, np.int32)), 1)
    assert np.all(np.asarray(far.groups) == POSITION_BUCKETS - 1)
    for position, expected in ((2**20 - 1, 19), (2**20, 20)):
        assert int(read_targets(batch(positions=np.full((2, 8), position, np.int32)), 1).groups[0, 0]) == expected


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_sums_by_group_are_those_of_the_tokens_and_have_no_gradient(chunk, x64):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(23, 6)), rng.normal(size=(6, 11))
    targets, valid, groups = rng.integers(0, 11, 23), rng.random(23) < 0.7, rng.integers(0, 4, 23)
    hidden[~valid] = np.nan
    logits = np.where(valid[:, None], hidden, 0) @ head
    nats = np.log(np.exp(logits).sum(1)) - logits[np.arange(23), targets]

    def run(hidden, grouped):
        more = dict(groups=jnp.asarray(groups), num_groups=4) if grouped else {}
        return chunked_cross_entropy(hidden, jnp.asarray(head), jnp.asarray(targets), jnp.asarray(valid), chunk=chunk, **more)

    total, sums = run(jnp.asarray(hidden), True)
    expected = [[nats[valid & (groups == g)].sum() for g in range(4)], [(valid & (groups == g)).sum() for g in range(4)]]
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    np.testing.assert_allclose(total, nats[valid].sum(), rtol=1e-12)
    plain = jax.grad(run)(jnp.asarray(hidden), False)
    grouped = jax.grad(lambda h: run(h, True)[0] + 7 * run(h, True)[1][0].sum())(jnp.asarray(hidden))
    np.testing.assert_array_equal(plain, grouped)


def test_the_steps_read_masks_and_report_groups(toy):
    """One masked target less is one token less; micro-batches add; the sums of the groups are the loss."""
    config = toy.replace(layers=1, pattern="M", dense_layers=0, residual="plain")
    model, optimizer = HybridLM(config), adamw(OptimizerConfig(total_steps=4))
    state = init_state(model, optimizer, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 12), 0, config.vocab_size)
    segments = jnp.ones((4, 12), jnp.int32).at[0, 5:].set(2)
    targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    mask = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (0, 1)))
    domains = jnp.asarray([0, 0, 1, 1], jnp.int8)[:, None] * jnp.ones((1, 12), jnp.int8)
    given = {"tokens": tokens, "segment_ids": segments, "targets": targets, "loss_mask": mask, "domains": domains}
    evaluate = jax.jit(make_eval_step(model, domains=2))
    whole = evaluate(state, given)
    plain = jax.jit(make_eval_step(model))(state, {"tokens": tokens, "segment_ids": segments})
    np.testing.assert_allclose(whole["loss_sum"], plain["loss_sum"], rtol=1e-6)
    assert int(whole["tokens"]) == int(plain["tokens"]) == int(whole["token_groups"].sum()) == 43
    np.testing.assert_allclose(whole["loss_groups"].sum(), whole["loss_sum"], rtol=1e-5)
    assert int(evaluate(state, given | {"loss_mask": mask.at[1, 3].set(False)})["tokens"]) == 42
    step = jax.jit(make_train_step(model, optimizer, domains=2))
    _, metrics = step(state, {name: x.reshape(2, 2, -1) for name, x in given.items()})
    np.testing.assert_allclose(metrics["loss"], whole["loss_sum"] / 43, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss_groups"], whole["loss_groups"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(metrics["token_groups"], whole["token_groups"])


@pytest.mark.parametrize(
    "more, message",
    [
        ({"targets": np.zeros((2, 8), np.int32)}, "one of targets and loss_mask"),
        ({"targets": np.zeros((2, 8), np.int32), "loss_mask": SEGMENTS}, "loss_mask holds int32"),
        ({"labels": SEGMENTS}, "labels, which nothing reads"),
        ({"positions": np.zeros((2, 7), np.int32)}, r"positions has shape \(2, 7\)"),
    ],
)
def test_bad_batches(more, message):
    with pytest.raises(ValueError, match=message):
        check_batch(batch(**more))
