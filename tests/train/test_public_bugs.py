"""Faults that other training programs had, each a small case named after its thread; where one lives in another file, the table says so.

| thread | here |
|---|---|
| slime PR 1686, Automodel PR 2147, prime-rl #3000, SkyRL PR 2056 (documents leak) | below; meshes: tests/parallel/test_model_mesh.py |
| fla PR 1184 (the reference leaked too) | tests/kernels/test_kda_isolation.py |
| MaxText d20a48da1, 092c3e871 (segment ids as loss weights) | test_batch.py |
| torchtitan PR 1593, 3686, Automodel PR 3247 (recomputation counts twice) | test_step.py, test_recomputation_counts_and_weighs_once |
| torchtitan PR 4148 (evaluation fed the bias) | below |
| torchtitan #1506 (bias drifts without centring) | below |
| Automodel #3325 (recomputation routes otherwise) | test_step.py, the same |
| MaxText #4798, marin #8621, PaddleFleet PR 1704 (Muon) | test_muon.py, test_newton_schulz.py |
| torchtitan PR 2206, torchtune PR 1875, mlx-lm PR 1544 (mean of means) | below |
| verl PR 3287 (first response token not trained) | below |
| slime #2263, swiss-ai Megatron-LM PR 121 (whose tokens are trained) | tests/data/test_dialog.py |
| unsloth #416 (PAD = EOS) | tests/data/test_bpe.py |
| grain PR 1179, entrenar #294, KempnerForge #51, accelerate PR 4071 (place in the data lost) | tests/data/test_stream.py |
| KempnerForge #102, MaxText PR 5260, orbax #605, keras #23609 (failed saves) | test_checkpoint.py, test_caretaker.py |
| TensorRT-LLM PR 17332, fla PR 950 (dt_bias zero), fla #718 (a bias in the output gate) | below |

Shapes: B rows, T tokens, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax import HybridLM
from moejax.data import Mixture, TokenSource
from moejax.data.stream import DataStream
from moejax.modules.initializers import dt_bias
from moejax.ops import kda_gate
from moejax.train import init_state, make_eval_step, make_train_step
from moejax.train.batch import read_targets

LENGTH = 40


@pytest.fixture(scope="module")
def packed(toy):
    """-> run(tokens, segment_ids, weights): logits [1,T,V] and the gradient of sum(weights * logits) to the embedding."""
    model = HybridLM(toy)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    noise = lambda x, k: x + 0.3 * jax.random.normal(k, x.shape, x.dtype)
    leaves, form = jax.tree.flatten(variables)
    variables = jax.tree.unflatten(
        form, [noise(x, k) for x, k in zip(leaves, jax.random.split(jax.random.key(1), len(leaves)), strict=True)]
    )

    @jax.jit
    def run(tokens, segment_ids, weights):
        def loss(params):
            logits = model.apply({**variables, "params": params}, tokens, segment_ids)
            return jnp.sum(weights[..., None] * jnp.sin(jnp.arange(toy.vocab_size)) * logits), logits

        (_, logits), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return logits, grads

    return run


@pytest.mark.parametrize("boundary", [1, 3, 15, 16, 17])
def test_a_document_does_not_see_the_one_before_it(packed, boundary):
    """slime PR 1686, Automodel PR 2147, prime-rl #3000, fla PR 1184: A and B in one row; A's last token changes, and not a bit of B's
    logits does, nor of a gradient of B's loss; B alone in a row gives the same numbers."""
    rng = np.random.default_rng(boundary)
    tokens = rng.integers(0, 64, (1, LENGTH))
    tokens[0, boundary:] = tokens[0, boundary:] % 32  # A and B share no token, so that gradients of embeddings tell them apart
    tokens[0, :boundary] = 32 + tokens[0, :boundary] % 31
    segments = np.where(np.arange(LENGTH) < boundary, 1, 2)[None]
    weights = (segments == 2).astype(np.float32)
    other = tokens.copy()
    other[0, boundary - 1] = 63
    (logits, grads), (changed, changed_grads) = (packed(x, segments, weights) for x in (tokens, other))
    assert np.array_equal(logits[:, boundary:], changed[:, boundary:])
    assert not np.array_equal(logits[:, :boundary], changed[:, :boundary])
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(changed_grads), strict=True):
        if path[-1].key.startswith("expert_"):  # sums over B's rows, which A's rows push to other places: another order
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * float(np.abs(b).max()))
        else:
            np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))
    assert not np.any(np.asarray(grads["embedding"])[32:]) and np.any(np.asarray(grads["embedding"])[:32])
    size = LENGTH - boundary
    alone, ids, mask = np.zeros((1, LENGTH), int), np.zeros((1, LENGTH), int), np.zeros((1, LENGTH), np.float32)
    alone[0, :size], ids[0, :size], mask[0, :size] = tokens[0, boundary:], 1, 1
    single, single_grads = packed(alone, ids, mask)
    np.testing.assert_allclose(single[:, :size], logits[:, boundary:], rtol=0, atol=1e-5 * float(np.abs(logits).max()))
    for a, b in zip(jax.tree.leaves(single_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(np.abs(b).max())))


def test_missing_boundaries_are_no_silent_default(toy):
    """SkyRL PR 2056: a batch without segment ids is refused by the step, before anything is compiled."""
    step = make_train_step(HybridLM(toy), optax.sgd(0.1))
    with pytest.raises(ValueError, match="must have 'tokens' and 'segment_ids'"):
        jax.eval_shape(step, None, {"tokens": jnp.zeros((1, 4), jnp.int32)})


@pytest.fixture(scope="module")
def shallow_step(toy):
    """One MLA layer with experts under plain gradient descent."""
    model, optimizer = HybridLM(toy.replace(layers=1, pattern="M", dense_layers=0, residual="plain")), optax.sgd(0.1)
    state = jax.jit(lambda key: init_state(model, optimizer, key))(jax.random.key(0))
    return model, state, jax.jit(make_train_step(model, optimizer, clip_norm=None))


def test_evaluation_leaves_the_router_alone(shallow_step):
    """torchtitan PR 4148: a step after an evaluation is bit for bit the step without it."""
    model, state, step = shallow_step
    batch = {"tokens": jax.random.randint(jax.random.key(2), (2, 16), 0, 64), "segment_ids": jnp.ones((2, 16), jnp.int32)}
    before = step(state, batch)
    jax.jit(make_eval_step(model))(state, {name: x[:, ::-1] for name, x in batch.items()})
    after = step(state, batch)
    for a, b in zip(
        jax.tree.leaves((before[0].router_state, before[0].params)), jax.tree.leaves((after[0].router_state, after[0].params)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_the_selection_bias_stays_centred(shallow_step):
    """torchtitan #1506: after many updates the bias has mean 0, so that it cannot drift away from the scores."""
    _, state, step = shallow_step
    for i in range(30):
        batch = {"tokens": jax.random.randint(jax.random.key(i), (2, 16), 0, 64), "segment_ids": jnp.ones((2, 16), jnp.int32)}
        state, _ = step(state, batch)
    for bias in jax.tree.leaves(state.router_state):
        assert np.any(np.asarray(bias) != 0)
        np.testing.assert_allclose(np.asarray(bias).mean(-1), 0, atol=1e-6)


def test_the_loss_is_a_mean_over_tokens_not_over_micro_batches(shallow_step):
    """torchtitan PR 2206, torchtune PR 1875, mlx-lm PR 1544: micro-batches of 15 and 2 targets weigh as their tokens do."""
    _, state, step = shallow_step
    tokens = jax.random.randint(jax.random.key(3), (2, 16), 0, 64)
    segments = jnp.ones((2, 16), jnp.int32).at[1, 3:].set(0)
    batch = {"tokens": tokens, "segment_ids": segments}
    whole, metrics = step(state, batch)
    split, split_metrics = step(state, {name: x[:, None] for name, x in batch.items()})
    assert int(metrics["tokens"]) == int(split_metrics["tokens"]) == 17
    np.testing.assert_allclose(split_metrics["loss"], metrics["loss"], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(split.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    parts = [step(state, {name: x[i : i + 1] for name, x in batch.items()})[1] for i in range(2)]
    mean_of_means = sum(float(p["loss"]) for p in parts) / 2
    assert abs(mean_of_means - float(metrics["loss"])) > 1e-3  # the fault would show


def test_the_first_token_of_a_response_is_trained():
    """verl PR 3287: the mask belongs to the target, so the prompt's last position predicts the response's first token."""
    prompt, response = [5, 6, 7], [8, 9]
    source = TokenSource("chat", [prompt + response], masks=[[False] * 3 + [True] * 2])
    batch, _ = next(DataStream(Mixture([source]), context=8, rows=1, packing="one_doc", repeat=False, pad_id=0))
    read = read_targets({name: jnp.asarray(x) for name, x in batch.items()}, 0)
    trained = np.asarray(read.targets)[np.asarray(read.valid)]
    assert trained.tolist() == response and np.flatnonzero(np.asarray(read.valid)[0]).tolist() == [2, 3]


def test_memories_of_a_fresh_model_last_from_2_to_200_tokens():
    """TensorRT-LLM PR 17332, fla PR 950: dt_bias is log-uniform, not zero or whatever the memory held; with A_log = 0 the decays of K3's
    gate are about -5 dt, dt from 1e-3 to 0.1."""
    bias = dt_bias(jax.random.key(0), (64, 64), jnp.float32)
    decay = -np.asarray(kda_gate(jnp.zeros((1, 1, 64, 64)), jnp.zeros(64), bias, lower_bound=-5.0))
    assert np.all(decay > 5 * 0.9e-3) and np.all(decay < 5 * 0.11)
    quantiles = np.quantile(np.log(decay), [0.25, 0.5, 0.75])
    np.testing.assert_allclose(quantiles, np.log(5 * 10.0 ** np.array([-2.5, -2, -1.5])), atol=0.15)


def test_the_output_gate_has_no_bias(toy):
    """fla #718: a gate with a bias cannot hold the released weights. Every bias of a model is one of the names known here."""
    shapes = jax.eval_shape(HybridLM(toy).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(shapes["params"])}
    assert {name for name in names if "bias" in name} == {"dt_bias"}


def test_the_step_clips_queries_and_keys(toy):
    """Kimi K2's QK-Clip in the step: only the MLA's q_up and k_up differ from the unclipped step, by the heads' factors; of several
    micro-batches the largest logit decides."""
    from moejax.train.qk_clip import qk_clip

    config = toy.replace(layers=1, pattern="M", dense_layers=1, residual="plain")
    model, optimizer = HybridLM(config), optax.sgd(0.1)
    state = jax.jit(lambda key: init_state(model, optimizer, key))(jax.random.key(0))
    state = dataclasses.replace(state, params=jax.tree.map(lambda x: 3 * x, state.params))
    batch = {"tokens": jax.random.randint(jax.random.key(2), (4, 16), 0, 64), "segment_ids": jnp.ones((4, 16), jnp.int32)}
    split = {name: x.reshape(2, 2, 16) for name, x in batch.items()}
    variables = {"params": state.params, "router_state": state.router_state}
    _, written = model.apply(variables, batch["tokens"], batch["segment_ids"], mutable=["attention_stats"])
    largest = max(float(x.max()) for x in jax.tree.leaves(written))
    plain, _ = jax.jit(make_train_step(model, optimizer))(state, split)
    clipped, metrics = jax.jit(make_train_step(model, optimizer, qk_clip=largest / 2))(state, split)
    np.testing.assert_allclose(metrics["max_logit"], largest, rtol=1e-5)
    expected = qk_clip(plain.params, written["attention_stats"], largest / 2)
    changed = set()
    for (path, a), b, c in zip(
        jax.tree_util.tree_leaves_with_path(clipped.params), jax.tree.leaves(expected), jax.tree.leaves(plain.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        if not np.array_equal(a, c):
            changed.add(path[-1].key)
    assert changed == {"q_up", "k_up"}
    with pytest.raises(ValueError, match=r"qk_clip is 100\.0 for layers 'K'"):
        make_train_step(HybridLM(toy.replace(layers=1, pattern="K")), optimizer, qk_clip=100.0)
