"""The loss is divided once, by the valid targets of all micro-batches (torchtitan PR 2206, torchtune PR 1875, mlx-lm PR 1544).

A mean over micro-batches of their own means weighs a target in a nearly empty micro-batch more than one in a full one.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax.train import make_state, make_train_step

VOCABULARY, WIDTH = 11, 6


def bigram_model(config):
    """What the step needs of a model: a hidden state a token from an embedding, and no experts."""

    def apply(variables, tokens, segment_ids, *, return_hidden, **_):
        del segment_ids
        assert return_hidden
        return jnp.tanh(variables["params"]["embedding"][tokens]), {}

    return types.SimpleNamespace(config=config, parallel=None, apply=apply)


def test_unequal_masks_over_micro_batches(toy):
    """Three micro-batches with 1, 16 and no target that counts: loss and gradient of the 17 targets, all with one weight."""
    sgd, rng = optax.sgd(1.0), np.random.default_rng(0)
    params = {"embedding": jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH))), "head": jnp.asarray(rng.normal(size=(WIDTH, VOCABULARY)))}
    state = make_state(params, {}, sgd)
    tokens, targets = (jnp.asarray(rng.integers(0, VOCABULARY, (3, 1, 18)), jnp.int32) for _ in range(2))
    mask = np.zeros((3, 1, 18), bool)
    mask[0, 0, 4] = mask[1, 0, 1:17] = True
    batch = {"tokens": tokens, "segment_ids": jnp.ones_like(tokens), "targets": targets, "loss_mask": jnp.asarray(mask)}

    def nats(params, part):
        logits = jnp.tanh(params["embedding"][tokens[part]]) @ params["head"]
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets[part]) * mask[part])

    sums, grads = zip(*(jax.value_and_grad(nats)(state.params, part) for part in (0, 1)), strict=True)
    after, metrics = jax.jit(make_train_step(bigram_model(toy.replace(dense_layers=toy.layers)), sgd, clip_norm=None))(state, batch)
    assert int(metrics["tokens"]) == 17 and int(metrics["skipped"]) == 0
    np.testing.assert_allclose(metrics["loss"], (sums[0] + sums[1]) / 17, rtol=1e-6)
    exact = jax.tree.map(lambda a, b: (a + b) / 17, *grads)
    mean_of_means = jax.tree.map(lambda a, b: (a + b / 16) / 2, *grads)
    moved = jax.tree.map(jnp.subtract, state.params, after.params)
    distance = lambda other: float(optax.tree.norm(jax.tree.map(jnp.subtract, moved, other)) / optax.tree.norm(exact))
    assert distance(exact) < 1e-5 and distance(mean_of_means) > 0.3
