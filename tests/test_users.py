"""The three kinds of user: a function in someone's own train step, a module in someone's own model, a small CPU mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moejax import KDAConfig, MoEConfig
from moejax.modules import KimiDeltaAttention, LatentMoE
from moejax.ops import gated_kda, updated_bias
from moejax.ops.balance_rules import BalanceStrength

MOE = MoEConfig(experts=8, experts_per_token=2, expert_width=16, latent=8)


def test_op_in_plain_jax():
    """Own parameters, own loss, own optimizer: nothing of ours but `gated_kda`."""
    heads, width = 2, 8
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "qkv": 0.3 * jax.random.normal(keys[0], (16, 3, heads, width)),
        "gates": 0.3 * jax.random.normal(keys[1], (16, heads, width + 1)),
        "out": 0.3 * jax.random.normal(keys[2], (heads, width, 16)),
    }
    x = jax.random.normal(jax.random.key(1), (2, 19, 16))
    target = jnp.roll(x, 1, axis=1)
    optimizer = optax.adam(1e-2)

    def loss(params):
        q, k, v = jnp.einsum("btd,dnhc->nbthc", x, params["qkv"])
        gates = jnp.einsum("btd,dhc->bthc", x, params["gates"])
        o, _ = gated_kda(q, k, v, gates[..., :-1], gates[..., -1], None, None)
        return jnp.mean((jnp.einsum("bthc,hcd->btd", o, params["out"]) - target) ** 2)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for _ in range(30):
        params, state, value = step(params, state)
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]


class ForeignLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + KimiDeltaAttention(KDAConfig(heads=2, key_dim=8, value_dim=8))(nn.LayerNorm()(x))
        return nn.Dense(3)(x + LatentMoE(MOE)(nn.LayerNorm()(x)))


def test_modules_in_a_foreign_linen_model():
    """Own model and state handling: the counts come out, the next bias goes in, gradients see `params` only."""
    x = jax.random.normal(jax.random.key(1), (2, 17, 12))
    model = ForeignLinen()
    variables = jax.jit(model.init)(jax.random.key(0), x)
    assert set(variables) == {"params", "router_state"}

    @jax.jit
    def step(params, router_state):
        def loss(params):
            out, written = model.apply({"params": params, "router_state": router_state}, x, mutable=["router_stats"])
            return jnp.mean(out**2), written["router_stats"]

        grads, stats = jax.grad(loss, has_aux=True)(params)
        bias = router_state["LatentMoE_0"]["bias"]
        new = updated_bias("quantile", stats["LatentMoE_0"], bias, MOE.experts_per_token, BalanceStrength())
        return grads, stats, {"LatentMoE_0": {"bias": new}}

    grads, stats, router_state = step(variables["params"], variables["router_state"])
    assert int(stats["LatentMoE_0"]["load"].sum()) == 2 * 17 * MOE.experts_per_token
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))
    assert float(jnp.abs(router_state["LatentMoE_0"]["bias"]).max()) > 0


def test_module_in_an_nnx_model():
    """Through nnx.bridge.ToNNX; the router state is a variable type of its own and no gradient reaches it."""
    x = jax.random.normal(jax.random.key(1), (2, 9, 12))

    class Foreign(nnx.Module):
        def __init__(self, rngs):
            self.moe = nnx.bridge.ToNNX(LatentMoE(MOE), rngs=rngs)
            nnx.bridge.lazy_init(self.moe, x)
            self.head = nnx.Linear(12, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(x + self.moe(x))

    model = Foreign(nnx.Rngs(0))
    paths = {path[-1]: type(variable) for path, variable in nnx.to_flat_state(nnx.state(model))}
    assert paths["router"] is nnx.Param and not issubclass(paths["bias"], nnx.Param)

    @nnx.jit
    def step(model):
        return nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)

    value, grads = step(model)
    names = {path[-1] for path, _ in nnx.to_flat_state(grads) if path[0] == "moe"}
    assert "router" in names and "bias" not in names
    np.testing.assert_array_equal(model.moe.bias[...], 0)
    assert np.isfinite(float(value))
    model.moe(x, mutable=["router_stats"])  # the bridge keeps the counts as variables of the module
    stats = {name: getattr(model.moe, name)[...] for name in ("load", "tokens", "histogram")}
    bias = model.moe.bias[...]
    model.moe.bias[...] = updated_bias("quantile", stats, bias, MOE.experts_per_token, BalanceStrength())
    assert float(jnp.abs(model.moe.bias[...]).max()) > 0


def test_op_on_a_callers_own_mesh():
    """Plain NamedShardings over batch and heads, no mesh of ours: same numbers, and the output stays sharded."""
    mesh = jax.make_mesh((2, 4), ("rows", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, gate = (jax.random.normal(key, (2, 33, 4, 8)) for key in keys[:4])
    beta = jax.random.normal(keys[4], (2, 33, 4))
    arguments = (q, k, v, gate, beta)

    def loss(q, k, v, gate, beta):
        return jnp.sum(gated_kda(q, k, v, gate, beta, None, None)[0] ** 2)

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)))
    sharded = [jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows", None, "h"))) for x in arguments]
    value, grads = run(*arguments)
    mesh_value, mesh_grads = run(*sharded)
    np.testing.assert_allclose(mesh_value, value, rtol=1e-5)
    for a, b in zip(mesh_grads, grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_names_of_the_contract():
    from moejax import ops

    for name in (
        "kda gated_kda kda_gate short_conv situ_glu attention_residual route quantile_bias margin_histogram "
        "bias_from_histogram sign_bias grouped_matmul"
    ).split():
        assert callable(getattr(ops, name)), name
    with pytest.raises(AttributeError):
        _ = ops.no_such_name
