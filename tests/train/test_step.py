"""The train step: exact sums over micro-batches, skipped updates, and one contract for every balancing rule."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax import HybridLM, presets
from moejax.config import BALANCE_RULES
from moejax.ops.balance_rules import BALANCE_RULES as RULES_OF_OPS
from moejax.ops.balance_rules import BalanceStrength
from moejax.train import (
    OptimizerConfig,
    adamw,
    cosine_schedule,
    flops_per_token,
    init_state,
    make_eval_step,
    make_train_step,
)
from moejax.train.balance import by_layer, layer_paths
from moejax.train.flops import kda_scan_flops
from moejax.train.loss import chunked_cross_entropy, next_token_targets
from moejax.train.optimizers import decay_mask

OPTIMIZER = adamw(OptimizerConfig(learning_rate=1e-2, total_steps=20))


@pytest.fixture(scope="session")
def shallow(toy):
    """One MLA layer with experts: what the balancing contract needs, cheap to compile."""
    return toy.replace(layers=1, pattern="M", dense_layers=0, residual="plain")


@pytest.fixture(scope="session")
def batch():
    tokens = jax.random.randint(jax.random.key(4), (4, 18), 0, 64)
    segments = np.ones((4, 18), np.int32)
    segments[0, 7:] = 2
    segments[1, 12:] = 0
    segments[3, :] = 0
    return {"tokens": tokens, "segment_ids": jnp.asarray(segments)}


def start(config, optimizer=OPTIMIZER, **strengths):
    model = HybridLM(config)
    balance = BalanceStrength.create(**strengths)
    return model, jax.jit(lambda key: init_state(model, optimizer, key, balance=balance))(jax.random.key(0))


@pytest.fixture(scope="session")
def toy_step(toy):
    model, state = start(toy)
    return model, state, jax.jit(make_train_step(model, OPTIMIZER))


def numbers(tree):
    """The leaves as NumPy arrays, random keys as their words."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def leaves_equal(a, b):
    return all(np.array_equal(x, y, equal_nan=True) for x, y in zip(numbers(a), numbers(b), strict=True))


def test_same_bits_twice_and_learns(toy_step, batch):
    _, state, step = toy_step
    first, metrics = step(state, batch)
    second, again = step(state, batch)
    assert leaves_equal((first, metrics), (second, again))
    assert int(first.step) == 1 and int(first.skipped) == 0
    losses = [float(metrics["loss"])]
    for _ in range(8):
        first, metrics = step(first, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5
    assert float(metrics["tokens"]) == 6 + 10 + 11 + 17


def test_metrics_name_every_layer(toy, toy_step, batch):
    _, state, step = toy_step
    _, metrics = step(state, batch)
    assert metrics["expert_load"].shape == (toy.moe_layers, toy.moe.experts)
    real = int((batch["segment_ids"] != 0).sum())
    assert (np.asarray(metrics["expert_load"]).sum(1) == real * toy.moe.experts_per_token).all()
    for name in ("max_violation", "load_cv", "load_cv_floor", "dead_experts", "bias_min", "bias_max"):
        assert metrics[name].shape == (toy.moe_layers,)
    floor = (toy.moe.experts / (real * toy.moe.experts_per_token)) ** 0.5
    np.testing.assert_allclose(metrics["load_cv_floor"], floor, rtol=1e-6)


def test_non_finite_update_is_skipped(toy_step, batch):
    """Parameters, optimizer and router stay bit for bit; the batch counts as consumed."""
    _, state, step = toy_step
    state, _ = step(state, batch)
    broken = state.replace(params={**state.params, "head": state.params["head"].at[0, 0].set(jnp.inf)})
    after, metrics = step(broken, batch)
    assert not np.isfinite(float(metrics["loss"])) and int(metrics["skipped"]) == 1
    for name in ("params", "opt_state", "router_state", "balance"):
        assert leaves_equal(getattr(after, name), getattr(broken, name)), name
    assert int(after.step) == int(broken.step) + 1 and int(after.skipped) == 1


def test_first_update_moves_the_bias(toy_step, batch):
    _, state, step = toy_step
    after, metrics = step(state, batch)
    for bias in jax.tree.leaves(after.router_state):
        assert bias.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(bias).mean(-1), 0, atol=1e-6)
        assert (np.abs(bias).max(-1) > 0).all()
    assert (np.asarray(metrics["bias_max"]) > np.asarray(metrics["bias_min"])).all()


@pytest.mark.parametrize("rule", BALANCE_RULES)
def test_balancing_contract(shallow, batch, noisy, rule):
    """One suite for all rules: no gradient, micro-batches pooled, padding uncounted, evaluation silent, no recompile."""
    config = shallow.replace(moe={"balance": rule})
    sgd = optax.sgd(0.1)
    model, state = start(config, sgd)
    state = state.replace(params=noisy(state.params, jax.random.key(7)))  # a router that is not near even
    traces = []

    @jax.jit
    def step(state, batch):
        traces.append(batch["tokens"].shape)
        return make_train_step(model, sgd)(state, batch)

    state, _ = step(state, batch)  # a bias that is not zero
    whole, metrics = step(state, batch)
    bias_of = lambda s: np.asarray(jax.tree.leaves(s.router_state)[0])

    halves = {name: value.reshape(2, 2, -1) for name, value in batch.items()}
    split, split_metrics = step(state, halves)
    np.testing.assert_array_equal(split_metrics["expert_load"], metrics["expert_load"])
    np.testing.assert_allclose(split_metrics["loss"], metrics["loss"], rtol=1e-5)
    if rule != "aux_loss":  # its loss is a product of batch means, by definition not a sum over micro-batches
        np.testing.assert_allclose(bias_of(split), bias_of(whole), atol=1e-6)
        for a, b in zip(jax.tree.leaves(split.params), jax.tree.leaves(whole.params), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)

    if rule in ("aux_loss", "none"):
        np.testing.assert_array_equal(bias_of(whole), 0)
    else:
        assert np.abs(bias_of(whole)).max() > 0
        np.testing.assert_allclose(bias_of(whole).mean(), 0, atol=1e-6)

    other_pads = jnp.where(batch["segment_ids"] == 0, 63 - batch["tokens"], batch["tokens"])
    padded, _ = step(state, batch | {"tokens": other_pads})
    assert leaves_equal(padded, whole)

    evaluate = make_eval_step(model)
    scores = evaluate(state, batch)
    np.testing.assert_allclose(scores["loss_sum"] / scores["tokens"], metrics["loss"], rtol=1e-5)

    stronger = whole.replace(balance=whole.balance.change(step=0.5, band_step=0.7, ema=0.9, aux_coefficient=3.0))
    step(stronger, batch)
    assert traces == [batch["tokens"].shape, halves["tokens"].shape]  # a strength is no reason to compile


@pytest.mark.parametrize("rule", ["quantile", "median_band", "aux_loss"])
def test_recomputation_counts_and_weighs_once(toy, batch, noisy, rule):
    """Blocks recomputed in the backward pass: same bias, same gradients, the balancing loss's through the blocks included."""
    config = toy.replace(layers=2, pattern="M", dense_layers=0, residual_block=1, moe={"balance": rule})
    sgd = optax.sgd(1.0)
    after = []
    for remat in ("none", "full"):
        model, state = start(config.replace(remat=remat), sgd, aux_coefficient=1.0)
        state = state.replace(params=noisy(state.params, jax.random.key(7)))
        after.append(jax.jit(make_train_step(model, sgd, clip_norm=None))(state, batch)[0])
    for a, b in zip(numbers(after[0]), numbers(after[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_full_residual_trains(toy, batch):
    """Attention over every sub-layer, exact quantiles joined over micro-batches: as one batch."""
    config = toy.replace(
        residual="full", scan_layers=False, layers=2, pattern="M", remat="full", moe={"balance": "quantile_exact"}
    )
    sgd = optax.sgd(0.1)
    model, state = start(config, sgd)
    step = jax.jit(make_train_step(model, sgd))
    whole, metrics = step(state, batch)
    split, _ = step(state, {name: value.reshape(2, 2, -1) for name, value in batch.items()})
    assert metrics["expert_load"].shape == (1, config.moe.experts)
    for a, b in zip(numbers(whole), numbers(split), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_bfloat16_parameters_accumulate_in_float32(shallow, batch):
    """Moments, gradient norm and sums over micro-batches keep float32 although parameters and activations are bfloat16."""
    config = shallow.replace(param_dtype="bfloat16", dtype="bfloat16")
    model, state = start(config)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.opt_state)} == {"float32", "int32"}
    step = jax.jit(make_train_step(model, OPTIMIZER))
    whole, metrics = step(state, batch)
    split, split_metrics = step(state, {name: value.reshape(4, 1, -1) for name, value in batch.items()})
    assert metrics["grad_norm"].dtype == jnp.float32
    np.testing.assert_allclose(split_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-2)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(whole.params)} == {"bfloat16"}
    assert int(split.skipped) == 0


def test_batch_without_targets_changes_nothing(toy_step, batch):
    _, state, step = toy_step
    after, metrics = step(state, batch | {"segment_ids": jnp.zeros_like(batch["segment_ids"])})
    assert int(metrics["skipped"]) == 1 and float(metrics["loss"]) == 0
    assert leaves_equal((after.params, after.opt_state, after.router_state), (state.params, state.opt_state, state.router_state))


def test_strength_changes_the_next_bias(shallow, batch):
    model, state = start(shallow.replace(moe={"balance": "sign"}), step=1e-3)
    step = jax.jit(make_train_step(model, OPTIMIZER))
    small = jax.tree.leaves(step(state, batch)[0].router_state)[0]
    large = jax.tree.leaves(step(state.replace(balance=state.balance.change(step=1e-2)), batch)[0].router_state)[0]
    np.testing.assert_allclose(large, 10 * small, rtol=1e-4)


def test_rules_are_the_same_everywhere():
    assert set(BALANCE_RULES) == set(RULES_OF_OPS)


def test_balancing_rules_see_no_gradient(shallow, batch):
    """The bias selects; no loss reaches it."""
    model, state = start(shallow)

    def loss(router_state):
        logits = model.apply({"params": state.params, "router_state": router_state}, **batch)
        return jnp.sum(jnp.where((batch["segment_ids"] != 0)[..., None], logits, 0) ** 2)

    for grad in jax.tree.leaves(jax.jit(jax.grad(loss))(state.router_state)):
        np.testing.assert_array_equal(grad, 0)


def test_aux_loss_reaches_the_router(shallow, batch):
    model, state = start(shallow.replace(moe={"balance": "aux_loss"}), aux_coefficient=0.0)
    sgd = optax.sgd(1.0)
    step = jax.jit(make_train_step(model, sgd, clip_norm=None))
    state = state.replace(opt_state=sgd.init(state.params))
    without, _ = step(state, batch)
    with_loss, _ = step(state.replace(balance=BalanceStrength.create(aux_coefficient=1.0)), batch)
    moved = {
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(without.params), jax.tree.leaves(with_loss.params), strict=True
        )
        if not np.array_equal(a, b)
    }
    assert any("router" in name for name in moved)
    assert not any("expert_" in name or "shared" in name or "head" in name for name in moved)


def test_bf16_model_counts_and_biases_exactly(shallow, batch):
    """M2 and M3 (Megatron-LM #7081, vllm #50761): counts are integers and the bias stays float32 in a bfloat16 model."""
    config = shallow.replace(param_dtype="bfloat16", dtype="bfloat16", moe={"balance": "sign"})
    model, state = start(config)
    path = layer_paths(config)[0][0]
    fine = jnp.linspace(6.817, 7.063, config.moe.experts, dtype=jnp.float32)
    state = state.replace(router_state=jax.tree.map(lambda b: b + fine, state.router_state))
    after, metrics = jax.jit(make_train_step(model, OPTIMIZER))(state, batch)
    load = np.asarray(metrics["expert_load"])[0].astype(np.int64)
    bias = np.asarray(jax.tree.leaves(after.router_state)[0]).reshape(-1)
    moved = bias - bias.mean() - (np.asarray(fine) - np.asarray(fine).mean())
    sign = np.sign(load.sum() - load * config.moe.experts) * 1e-3
    np.testing.assert_allclose(moved, sign - sign.mean(), atol=2e-6)
    assert bias.dtype == np.float32 and path[-1] == "ffn"


def test_statistics_by_layer_ignore_the_loss():
    tree = {"a": {"ffn": {"load": 1, "aux_loss": 2}}, "aux_loss_total": 3}
    assert by_layer(tree) == {("a", "ffn"): {"load": 1}}


def test_targets_stay_inside_documents():
    tokens = jnp.array([[5, 6, 7, 8, 9, 3]])
    targets, valid = next_token_targets(tokens, jnp.array([[1, 1, 2, 2, 0, 0]]))
    assert valid.tolist() == [[True, False, True, False, False, False]]
    assert targets[0, 0] == 6 and targets[0, 2] == 8
    assert next_token_targets(tokens, None)[1].tolist() == [[True] * 5 + [False]]


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunked_cross_entropy(chunk, x64):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(13, 6)), rng.normal(size=(6, 11))
    targets, valid = jnp.asarray(rng.integers(0, 11, 13)), jnp.asarray(rng.random(13) < 0.7)
    poisoned = jnp.where(valid[:, None], hidden, jnp.nan)

    def plain(hidden, head):
        logs = jax.nn.log_softmax(hidden @ head)
        return -jnp.sum(jnp.where(valid, logs[jnp.arange(13), targets], 0))

    run = jax.value_and_grad(lambda h, w: chunked_cross_entropy(h, w, targets, valid, chunk=chunk), argnums=(0, 1))
    value, grads = run(poisoned, jnp.asarray(head))
    want, want_grads = jax.value_and_grad(plain, argnums=(0, 1))(jnp.asarray(hidden), jnp.asarray(head))
    np.testing.assert_allclose(value, want, rtol=1e-12)
    for got, expected in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


def test_logits_exist_a_chunk_at_a_time():
    """Neither the loss nor its gradient holds [N,V]: 64 tokens and 48 words never meet in one array."""
    arguments = (jax.ShapeDtypeStruct((64, 6), jnp.float32), jax.ShapeDtypeStruct((6, 48), jnp.float32))

    def loss(hidden, head):
        return chunked_cross_entropy(hidden, head, jnp.zeros(64, jnp.int32), jnp.ones(64, bool), chunk=8)

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).as_text()
    assert "8x48xf32" in text and "64x48x" not in text and "8x8x48x" not in text


def test_flops():
    """The scan of one 128 x 128 head: the count of kernels' chunked W/U form at 64 tokens; the rest is 6 a weight."""
    assert kda_scan_flops(128, 128) == 149_504
    config = presets.get("kimi_k3")
    short, long = (flops_per_token(config, context) for context in (8192, 1 << 20))
    mla = 3 * 24 * 2 * 96 * (128 + 64 + 128) / 2
    assert long - short == pytest.approx(mla * ((1 << 20) - 8192))
    assert short == pytest.approx(6 * 104.19e9 + 3 * 69 * 96 * 149_504 + mla * 8192, rel=1e-4)


def test_schedule_and_decay_mask(toy_step):
    schedule = cosine_schedule(OptimizerConfig(learning_rate=1.0, total_steps=100, warmup_fraction=0.1))
    values = [float(schedule(step)) for step in range(100)]
    np.testing.assert_allclose(values[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert all(a >= b for a, b in itertools.pairwise(values[9:]))
    np.testing.assert_allclose(float(schedule(100)), 0.1, rtol=1e-5)
    mask = decay_mask(toy_step[1].params)
    named = {(path[-1].key, keep) for path, keep in jax.tree_util.tree_leaves_with_path(mask)}
    assert {name for name, keep in named if not keep} == {
        "A_log", "dt_bias", "norm_weight", "query", "out_norm", "weight", "q_norm", "kv_norm", "latent_norm",
    }  # fmt: skip
    assert len({name for name, _ in named}) == len(named)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": jnp.zeros((1, 2), jnp.int32)}, "segment_ids"),
        ({"tokens": jnp.zeros((2,), jnp.int32), "segment_ids": jnp.zeros((2,), jnp.int32)}, r"\[B,T\]"),
        ({"tokens": jnp.zeros((1, 2), jnp.int32), "segment_ids": jnp.zeros((1, 3), jnp.int32)}, "equal"),
    ],
)
def test_bad_batches(toy_step, batch, message):
    with pytest.raises(ValueError, match=message):
        make_train_step(toy_step[0], OPTIMIZER)(toy_step[1], batch)


def test_bad_settings():
    with pytest.raises(ValueError, match="learning_rate"):
        OptimizerConfig(learning_rate=0)
    with pytest.raises(ValueError, match=r"warmup_fraction is 2; it must lie in \[0, 1\]"):
        OptimizerConfig(warmup_fraction=2)
    with pytest.raises(ValueError, match="clip_norm"):
        make_train_step(HybridLM(None), OPTIMIZER, clip_norm=-1.0)  # pyright: ignore[reportArgumentType]
