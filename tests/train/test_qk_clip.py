"""QK-Clip (Kimi K2's MuonClip) on MLA layers: alone, under scan, in the model and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM, MLAConfig
from moejax.modules.mla import GatedMLA
from moejax.parallel import MeshConfig, make_mesh
from moejax.parallel.layers import ModelParallel
from moejax.train.qk_clip import clip_factors, qk_clip

MLA = MLAConfig(heads=4, nope_dim=8, rope_dim=4, value_dim=6, q_latent=16, kv_latent=12)
D = 20


@functools.cache
def layer(positions="none", q_latent=16):
    """-> (module, parameters with large and unlike heads, x, segment ids)."""
    module = GatedMLA(MLAConfig(**{**MLA.__dict__, "positions": positions, "q_latent": q_latent}))
    x = jax.random.normal(jax.random.key(1), (2, 24, D))
    params = jax.jit(module.init)(jax.random.key(0), x)["params"]
    params["q_up"] = params["q_up"] * jnp.array([1.0, 20.0, 80.0, 300.0])[:, None]
    params["k_up"] = params["k_up"] * 10
    ids = jnp.asarray(np.repeat([[0] * 3 + [1] * 10 + [2] * 11, [1] * 20 + [0] * 4], 1, axis=0), jnp.int32)
    return module, params, x, ids


@functools.partial(jax.jit, static_argnums=0)
def measured(module, params, x, ids):
    return module.apply({"params": params}, x, ids, mutable=["attention_stats"])[1]["attention_stats"]


@pytest.mark.parametrize(("positions", "q_latent"), [("none", 16), ("rotary", None)])
def test_clipped_logits_are_the_smaller_of_both(positions, q_latent):
    """Measured again, each head's largest logit is min(S, threshold); heads under it, the shared key and the rest keep their bits."""
    module, params, x, ids = layer(positions, q_latent)
    stats = measured(module, params, x, ids)
    before = np.asarray(stats["max_logits"])
    threshold = float(np.sort(before)[1:3].mean())
    clipped = jax.jit(lambda *a: qk_clip(*a, threshold))(params, stats)
    after = np.asarray(measured(module, clipped, x, ids)["max_logits"])
    assert (before > threshold).sum() == 2 and before.min() > 0
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-5)
    under = before <= threshold
    for name, leaf in params.items():
        if name in ("q_up", "k_up"):
            np.testing.assert_array_equal(clipped[name][:, under], leaf[:, under])
        else:
            np.testing.assert_array_equal(clipped[name], leaf)
    gamma = (threshold / before)[~under][:, None]
    np.testing.assert_allclose(clipped["q_up"][:, ~under, :8], params["q_up"][:, ~under, :8] * np.sqrt(gamma), rtol=1e-6)
    np.testing.assert_allclose(clipped["q_up"][:, ~under, 8:], params["q_up"][:, ~under, 8:] * gamma, rtol=1e-6)
    np.testing.assert_allclose(clipped["k_up"][:, ~under], params["k_up"][:, ~under] * np.sqrt(gamma), rtol=1e-6)


def test_statistics_change_nothing():
    """Bit for bit the same output and gradients with and without them, and none but the statistics is written."""
    module, params, x, ids = layer()

    def plain(params):
        y = module.apply({"params": params}, x, ids)
        return jnp.sum(y**2), y

    def counting(params):
        y, written = module.apply({"params": params}, x, ids, mutable=["attention_stats"])
        assert jax.tree.map(jnp.shape, written) == {"attention_stats": {"max_logits": (4,)}}
        return jnp.sum(y**2) + jnp.sum(written["attention_stats"]["max_logits"]) * 0, y

    want, got = (jax.jit(jax.grad(f, has_aux=True))(params) for f in (plain, counting))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "attention_stats" not in jax.eval_shape(module.init, jax.random.key(0), x)


@pytest.mark.parametrize(
    ("mesh", "positions"),
    [(MeshConfig(fsdp=2, tensor=4), "none"), (MeshConfig(data=2, sequence=2, tensor=2), "rotary"), (MeshConfig(sequence=8), "none")],
)
def test_on_a_mesh(mesh, positions):
    module, params, x, ids = layer(positions)
    want = measured(module, params, x, ids)["max_logits"]
    sharded = module.clone(parallel=ModelParallel(make_mesh(mesh)))
    np.testing.assert_allclose(measured(sharded, params, x, ids)["max_logits"], want, rtol=1e-5)


def test_rows_and_heads_sharded_by_the_compiler():
    """Without a ModelParallel, from the shardings of the arrays alone."""
    module, params, x, ids = layer()
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    place = lambda a, *spec: jax.device_put(a, jax.NamedSharding(mesh, jax.P(*spec)))
    rows = [place(a, "data") for a in (x, ids)]
    placed = {name: place(leaf, None, "tensor") if name in ("q_up", "k_up", "v_up") else place(leaf) for name, leaf in params.items()}
    np.testing.assert_allclose(measured(module, placed, *rows)["max_logits"], measured(module, params, x, ids)["max_logits"], rtol=1e-5)


def test_bfloat16_parameters_and_stacked_layers():
    """Leading axes of scanned layers go along; the factor is applied in float32 and rounded once."""
    rng = np.random.default_rng(0)
    params = {"a": {"q_up": jnp.asarray(rng.normal(size=(2, 3, 5, 4, 6)), jnp.bfloat16), "k_up": jnp.ones((2, 3, 7, 4, 4), jnp.bfloat16)}}
    stats = {"a": {"max_logits": jnp.asarray(rng.uniform(10, 400, (2, 3, 4)), jnp.float32)}}
    clipped = qk_clip(params, stats, 100.0)
    assert {leaf.dtype for leaf in jax.tree.leaves(clipped)} == {jnp.dtype("bfloat16")}
    gamma = np.minimum(1, 100 / np.asarray(stats["a"]["max_logits"]))[:, :, None, :, None]
    want = jnp.asarray(np.asarray(params["a"]["q_up"], np.float32)[..., 4:] * gamma, jnp.bfloat16)
    np.testing.assert_array_equal(clipped["a"]["q_up"][..., 4:], want)
    np.testing.assert_array_equal(clipped["a"]["k_up"], jnp.asarray(np.broadcast_to(np.sqrt(gamma), (2, 3, 7, 4, 4)), jnp.bfloat16))


def test_in_the_model(toy):
    """The collection reaches every MLA layer through blocks, scans and recomputation, and the clip finds its parameters."""
    config = toy.replace(layers=3, pattern="MMM", dense_layers=3, residual_block=2, remat="full", dtype="float32")
    model, tokens = HybridLM(config), jax.random.randint(jax.random.key(1), (2, 16), 0, 64)
    large = lambda path, leaf: leaf * 60 if path[-1].key in ("q_up", "k_up") else leaf
    params = jax.tree_util.tree_map_with_path(large, jax.jit(model.init)(jax.random.key(0), tokens)["params"])

    @jax.jit
    def measure(params):
        return model.apply({"params": params}, tokens, mutable=["attention_stats"])[1]["attention_stats"]

    stats = measure(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(stats)) == 3 * config.mla.heads
    first = jnp.stack([leaf.reshape(-1, config.mla.heads)[0] for leaf in jax.tree.leaves(stats)])
    threshold = float(np.median(first))
    after = measure(jax.jit(lambda *a: qk_clip(*a, threshold))(params, stats))
    # The first layer's input does not depend on what is clipped; those of later layers do, through the clipped heads.
    np.testing.assert_allclose(jax.tree.leaves(after)[0].reshape(-1, config.mla.heads)[0], np.minimum(first[0], threshold), rtol=1e-5)


def test_factors():
    values = jnp.array([-jnp.inf, -500.0, 0.0, 100.0, 200.0, jnp.inf, jnp.nan])
    np.testing.assert_array_equal(clip_factors(values, 100.0), [1, 1, 1, 1, 0.5, 1, 1])


def test_bad_arguments():
    params = {"a": {"q_up": jnp.ones((2, 4, 6)), "k_up": jnp.ones((2, 4, 4))}}
    with pytest.raises(ValueError, match="threshold is 0; it must be positive"):
        qk_clip(params, {}, 0)
    with pytest.raises(ValueError, match=r"do not agree on: a\. Apply the model with mutable"):
        qk_clip(params, {}, 100.0)
    with pytest.raises(ValueError, match="do not agree on: b"):
        qk_clip(params, {"a": {"max_logits": jnp.ones(4)}, "b": {"max_logits": jnp.ones(4)}}, 100.0)
