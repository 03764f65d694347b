"""One conformance suite over every balancing rule: no gradient, padding, shards, layers, centring, runtime
strengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.ops import (
    BALANCE_RULES,
    BalanceStrength,
    centre,
    combine_statistics,
    load_metrics,
    quantile_bias,
    route,
    router_statistics,
    updated_bias,
)

N, E, K = 48, 8, 3
ACTIVE = [name for name, rule in BALANCE_RULES.items() if rule.update]


def make(seed=0, tokens=N):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(tokens, E)) + np.linspace(-1, 1, E), jnp.float32)
    return (
        logits,
        centre(jnp.asarray(rng.normal(scale=0.2, size=E), jnp.float32)),
        jnp.asarray(rng.random(tokens) < 0.75),
    )


def statistics(rule, logits, bias, mask):
    return router_statistics(rule, route(logits, bias, K), logits, bias, K, mask=mask, bins=100)


def step(rule, logits, bias, mask, strength):
    return updated_bias(rule, statistics(rule, logits, bias, mask), bias, K, strength)


@pytest.fixture(params=BALANCE_RULES)
def rule(request):
    return request.param


def test_the_registry_is_the_documented_one():
    assert list(BALANCE_RULES) == [
        "quantile",
        "quantile_exact",
        "sign",
        "load_quantile",
        "median_band",
        "aux_loss",
        "none",
    ]
    with pytest.raises(ValueError, match="unknown balance rule 'greedy'; known: quantile, "):
        updated_bias("greedy", {}, jnp.zeros(4), 2, BalanceStrength())


def test_no_gradient(rule):
    logits, bias, mask = make()

    def f(logits, strength, bias):
        return (step(rule, logits, bias, mask, strength) * jnp.arange(E)).sum()

    value, (d_logits, _) = jax.value_and_grad(f, argnums=(0, 1))(logits, BalanceStrength(), bias)
    assert np.isfinite(value) and not d_logits.any()
    floats = {n: v for n, v in statistics(rule, logits, bias, mask).items() if jnp.issubdtype(v.dtype, jnp.floating)}
    for name in floats:
        assert not jax.grad(lambda l, name=name: statistics(rule, l, bias, mask)[name].sum())(logits).any()


def test_padding_is_neither_counted_nor_read(rule):
    logits, bias, mask = make()
    dirty = jnp.where(mask[:, None], logits, jnp.nan)
    got, clean = statistics(rule, dirty, bias, mask), statistics(rule, logits, bias, mask)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
    alone = statistics(rule, logits[mask], bias, None)
    assert got["tokens"] == mask.sum() == alone["tokens"] and got["load"].sum() == mask.sum() * K
    a, b = (updated_bias(rule, s, bias, K, BalanceStrength()) for s in (got, alone))
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_micro_batches_are_pooled_not_averaged(rule):
    logits, bias, mask = make()
    whole = statistics(rule, logits, bias, mask)
    parts = [statistics(rule, logits[i : i + 16], bias, mask[i : i + 16]) for i in (0, 16, 32)]
    pooled = combine_statistics(combine_statistics(*parts[:2]), parts[2])
    assert pooled.keys() == whole.keys()
    for name in whole:
        if name == "probability":
            np.testing.assert_allclose(pooled[name], whole[name], rtol=1e-5)
        else:
            np.testing.assert_array_equal(pooled[name], whole[name])
    a, b = (updated_bias(rule, s, bias, K, BalanceStrength()) for s in (pooled, whole))
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_shards_of_a_mesh_equal_one_device(rule):
    """Inside shard_map over 8 devices: psum of the sums, all_gather of scores and mask; the rule's forms pass the
    varying-axes check."""
    logits, bias, mask = make()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(logits, bias, mask):
        local = statistics(rule, logits, bias, mask)

        def gather(x):
            return jax.lax.all_gather(x, "data", tiled=True)

        return {
            n: gather(x)[None] if n in ("scores", "mask") else jax.lax.psum(x, "data")[None] for n, x in local.items()
        }

    f = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data")))
    got, want = f(logits, bias, mask), statistics(rule, logits, bias, mask)
    for name in want:
        np.testing.assert_allclose(got[name][0], want[name], rtol=1e-5)


def test_centred_finite_and_traced(rule):
    """jit + vmap over a layer axis equals layer by layer; new strengths compile nothing."""
    logits, bias, mask = (jnp.stack(a) for a in zip(*(make(seed) for seed in range(3)), strict=True))

    @jax.jit
    def layers(logits, bias, mask, strength):
        stacked = jax.vmap(lambda l, b, m: statistics(rule, l, b, m))(logits, bias, mask)
        return jax.vmap(lambda s, b: updated_bias(rule, s, b, K, strength))(combine_statistics(stacked, stacked), bias)

    new = layers(logits, bias, mask, BalanceStrength())
    assert new.shape == bias.shape and new.dtype == bias.dtype and np.isfinite(new).all()
    np.testing.assert_allclose(new.mean(1), 0, atol=1e-6)
    if rule not in ACTIVE:
        np.testing.assert_array_equal(new, bias)
    else:
        assert (jnp.abs(new - bias).max(1) > 1e-5).all()
    for i in range(3):
        # Twice the same tokens: the same quantiles up to the interpolation of the exact one, the same signs.
        s = statistics(rule, logits[i], bias[i], mask[i])
        one = updated_bias(rule, combine_statistics(s, s), bias[i], K, BalanceStrength())
        np.testing.assert_allclose(new[i], one, atol=1e-6)
    other = BalanceStrength.create(ema=0.5, step=0.01, quantile=0.25, band_step=0.2, band_low=0.9, band_high=1.1)
    changed = layers(logits, bias, mask, other)
    assert layers._cache_size() == 1, "a strength must be a runtime scalar"
    assert (rule in ACTIVE) == bool(jnp.abs(changed - new).max() > 1e-5)


def test_no_tokens_leave_the_bias(rule):
    logits, bias, _ = make()
    bias = bias + 0.5  # uncentred on purpose: it must come back bit for bit
    np.testing.assert_array_equal(
        step(rule, logits * jnp.nan, bias, jnp.zeros(N, bool), BalanceStrength.create(ema=0.9)), bias
    )


def test_k_equal_to_the_experts(rule):
    logits, bias, _ = make()
    routing = route(logits, bias, E)
    if rule == "none":
        assert (router_statistics(rule, routing, logits, bias, E)["load"] == N).all()
        assert updated_bias(rule, {}, bias, E, BalanceStrength()) is bias
        return
    with pytest.raises(ValueError, match="nothing to balance"):
        router_statistics(rule, routing, logits, bias, E)
    with pytest.raises(ValueError, match="nothing to balance"):
        updated_bias(rule, {}, bias, E, BalanceStrength())


def test_quantile_ema_is_the_documented_mix():
    logits, bias, mask = make()
    new = step("quantile_exact", logits, bias, mask, BalanceStrength.create(ema=0.9))
    plain = quantile_bias(jax.nn.sigmoid(logits), bias, K, mask=mask)
    np.testing.assert_allclose(new, centre(0.9 * bias + 0.1 * plain), atol=1e-6)


@pytest.mark.parametrize("rule", ACTIVE)
def test_each_rule_balances_a_skewed_router(rule):
    """Fresh tokens every step: the load's spread falls, to near the sampling floor for the quantile rules after two
    updates."""
    strength = BalanceStrength.create(step=0.02, band_step=0.02)

    @jax.jit
    def run(bias, key):
        logits = jax.random.normal(key, (1024, E)) + jnp.linspace(-1.5, 1.5, E)
        s = router_statistics(rule, route(logits, bias, 2), logits, bias, 2)
        return updated_bias(rule, s, bias, 2, strength), load_metrics(s["load"], s["tokens"], 2).load_cv

    bias, spread = jnp.zeros(E), []
    for key in jax.random.split(jax.random.key(0), 25):
        bias, cv = run(bias, key)
        spread.append(float(cv))
    floor = (E / 2048) ** 0.5
    assert spread[0] > 0.8
    if rule.startswith("quantile"):
        assert max(spread[3:]) < 3 * floor
    elif rule == "median_band":
        # It measures softmax mass, which its own bias does not change: the bias keeps growing. Only that it moved is
        # promised.
        assert abs(spread[-1] - spread[0]) > 0.1
    else:
        assert np.mean(spread[-5:]) < 0.35


def test_bad_input_is_named():
    logits, bias, mask = make()
    routing = route(logits, bias, K)
    for call, text in (
        (lambda: router_statistics("sign", routing, logits, bias[:4], K), "bias has shape"),
        (lambda: router_statistics("sign", routing, logits, bias, 2), "routing.experts has shape"),
        (lambda: router_statistics("sign", routing, logits, bias, K, mask=mask.astype(jnp.int32)), "mask is int32"),
        (
            lambda: combine_statistics(
                statistics("sign", logits, bias, mask), statistics("quantile", logits, bias, mask)
            ),
            "different rules",
        ),
        (lambda: BalanceStrength.create(ema=1.0), r"ema is 1.0; it must be in \[0, 1\)"),
        (lambda: BalanceStrength.create(step=-1), "step is -1.0"),
        (lambda: BalanceStrength.create(quantile=2), "quantile is 2.0"),
        (lambda: BalanceStrength.create(band_low=1.3), "the band is 1.3"),
        (lambda: BalanceStrength.create(speed=1), "unknown balance strength speed"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
