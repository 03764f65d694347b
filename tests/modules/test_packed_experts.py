"""MoEConfig.expert_weights: packed MXFP4 experts and quantisation-aware training, in the module, the model and the train step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax import HybridLM, presets
from moejax.config import MoEConfig
from moejax.modules.moe import LatentMoE
from moejax.ops import mxfp4_decode, mxfp4_encode, mxfp4_fake_quant
from moejax.parallel import MeshConfig, batch_sharding, make_mesh, parameter_shardings
from moejax.train import init_state, make_train_step

MATRICES = ("expert_gate", "expert_up", "expert_down")
SMALL = MoEConfig(experts=6, experts_per_token=2, expert_width=32, latent=64, shared_width=16)
TOKENS = jax.random.randint(jax.random.key(5), (4, 9), 1, 64)
SEGMENTS = jnp.ones((4, 9), jnp.int32).at[0, 4:].set(2).at[2, 6:].set(0)


def with_weights(config, kind):
    return config.replace(moe={"expert_weights": kind})


@pytest.fixture(scope="module")
def small(toy):
    """Two blocks of two equal MLA layers, so that both loops run; experts whole blocks wide."""
    return toy.replace(layers=4, pattern="M", dense_layers=0, moe={"expert_width": 32, "latent": 64})


@pytest.fixture(scope="module")
def packed_model(small):
    model = HybridLM(with_weights(small, "mxfp4"))
    return jax.jit(model.apply), jax.jit(model.init)(jax.random.key(0), TOKENS[:1, :1])


@pytest.fixture(scope="module")
def packed_logits(packed_model):
    run, variables = packed_model
    return run(variables, TOKENS, SEGMENTS)


def unpacked(tree):
    """Parameters of a packed model -> those of the same model with float experts."""
    if not isinstance(tree, dict):
        return tree
    out = {name: unpacked(leaf) for name, leaf in tree.items() if not name.endswith(("_codes", "_scales"))}
    for name in MATRICES:
        if f"{name}_codes" in tree:
            out[name] = jnp.swapaxes(mxfp4_decode(tree[f"{name}_codes"], tree[f"{name}_scales"]), -1, -2)
    return out


def quantised(tree):
    """Float experts rounded to MXFP4 along their input axis."""

    def leaf(path, w):
        return mxfp4_fake_quant(w, axis=-2) if path[-1].key in MATRICES else w

    return jax.tree_util.tree_map_with_path(leaf, tree)


@pytest.mark.parametrize("latent", [64, None])
def test_module_with_packed_experts(x64, latent):
    """Names, shapes and dtypes of the parameters; the output has the bits of the float module with decoded weights."""
    values = dict(experts=6, experts_per_token=2, expert_width=96, latent=latent)
    module = LatentMoE(MoEConfig(**values, expert_weights="mxfp4"), initializer_range=0.1)
    x = jax.random.normal(jax.random.key(1), (2, 9, 32), jnp.float32)
    variables = jax.jit(module.init)(jax.random.key(0), x)
    width = latent or 32
    found = {name: (leaf.shape, leaf.dtype.name) for name, leaf in variables["params"].items() if "expert" in name}
    assert found == {
        f"expert_{part}_{kind}": ((6, out, columns // size), "uint8")
        for part, out, columns in (("gate", 96, width), ("up", 96, width), ("down", width, 96))
        for kind, size in (("codes", 2), ("scales", 32))
    }
    params = unpacked(variables["params"])
    for name in MATRICES:  # a normal draw of the configured size, rounded
        assert abs(float(params[name].std()) / 0.1 - 1) < 0.03 and abs(float(params[name].mean())) < 0.003
    assert not np.array_equal(params["expert_gate"][0], params["expert_gate"][1])
    assert not np.array_equal(params["expert_gate"], params["expert_up"])
    plain = LatentMoE(MoEConfig(**values))
    for dtype in ("float32", "bfloat16"):
        a = jax.jit(module.apply)(variables, x.astype(dtype))
        b = jax.jit(plain.apply)({**variables, "params": params}, x.astype(dtype))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_wrong_parameters_of_a_packed_module():
    """Flax names the parameter; nothing is reshaped or cast on the way."""
    module = LatentMoE(MoEConfig(**{**vars(SMALL), "expert_weights": "mxfp4"}))
    x = jnp.ones((1, 2, 24))
    variables = jax.jit(module.init)(jax.random.key(0), x)
    params = variables["params"]
    short = {**params, "expert_up_scales": params["expert_up_scales"][..., :1]}
    with pytest.raises(Exception, match="expert_up_scales"):
        module.apply({**variables, "params": short}, x)
    with pytest.raises(ValueError, match=r"w_up\.codes is float32"):
        module.apply({**variables, "params": {**params, "expert_up_codes": params["expert_up_codes"] * 1.0}}, x)


def test_qat_sees_rounded_weights_and_passes_the_gradient(x64):
    """Output and gradients of the float parameters equal those of the float module at the rounded parameters."""
    config = MoEConfig(**{**vars(SMALL), "expert_weights": "mxfp4_qat"})
    qat, plain = (LatentMoE(c, initializer_range=0.3, param_dtype="float64") for c in (config, SMALL))
    x = jax.random.normal(jax.random.key(1), (2, 17, 24), jnp.float64)
    variables = jax.jit(qat.init)(jax.random.key(0), x)
    assert set(variables["params"]) >= set(MATRICES)

    def run(module):
        def loss(params, x):
            return jnp.sum(jnp.sin(module.apply({**variables, "params": params}, x)))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))

    value, (d_params, dx) = run(qat)(variables["params"], x)
    float_run = run(plain)
    expected, (d_expected, dx_expected) = float_run(quantised(variables["params"]), x)
    unrounded, _ = float_run(variables["params"], x)
    assert abs(value - expected) < 1e-12 < abs(value - unrounded)
    np.testing.assert_allclose(dx, dx_expected, rtol=0, atol=1e-12 * float(jnp.abs(dx).max()))
    assert set(d_params) == set(d_expected)
    for name, gradient in d_params.items():
        scale = float(jnp.abs(d_expected[name]).max())
        assert scale > 0
        np.testing.assert_allclose(gradient, d_expected[name], rtol=0, atol=1e-12 * scale, err_msg=name)


def test_packed_model_equals_the_float_model(small, packed_model, packed_logits):
    """Scanned layers: logits bit for bit."""
    _, variables = packed_model
    plain = {**variables, "params": unpacked(variables["params"])}
    expected = jax.jit(HybridLM(small).apply)(plain, TOKENS, SEGMENTS)
    np.testing.assert_array_equal(packed_logits, expected)


def test_gradient_around_frozen_packed_experts(small, packed_model):
    """LoRA's need: with remat="full", gradients of everything else pass through the packed experts."""
    _, variables = packed_model

    def gradient(config, params):
        model = HybridLM(config.replace(remat="full"))
        leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
        trained = {jax.tree_util.keystr(path): leaf for path, leaf in leaves if not path[-1].key.startswith("expert_")}

        def loss(trained):
            full = jax.tree.unflatten(treedef, [trained.get(jax.tree_util.keystr(path), leaf) for path, leaf in leaves])
            return jnp.sum(jnp.sin(model.apply({**variables, "params": full}, TOKENS, SEGMENTS)))

        return jax.jit(jax.grad(loss))(trained)

    packed = gradient(with_weights(small, "mxfp4"), variables["params"])
    expected = gradient(small, unpacked(variables["params"]))
    assert packed.keys() == expected.keys()
    assert any("router" in path for path in packed) and any("latent_down" in path for path in packed)
    for path, want in expected.items():
        scale = max(float(jnp.abs(want).max()), 1e-30)
        np.testing.assert_allclose(packed[path], want, rtol=0, atol=1e-6 * scale, err_msg=path)


def test_packed_model_on_an_expert_mesh(packed_model, packed_logits):
    """Codes and scales are sharded over experts; logits are those of one device."""
    run, variables = packed_model
    mesh = make_mesh(MeshConfig(expert=2, fsdp=2))
    sharded = jax.device_put(variables, parameter_shardings(variables, mesh))
    experts = [
        (path[-1].key, leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(sharded["params"])
        if path[-1].key.startswith("expert_")
    ]
    assert len({name for name, _ in experts}) == 6
    for name, leaf in experts:
        local = leaf.addressable_shards[0].data.shape
        embed = 3 if name.startswith("expert_down") else 4  # fsdp: the latent, outputs of "down" and inputs of the others
        divided = [axis for axis in range(5) if local[axis] * 2 == leaf.shape[axis]]
        assert divided == [2, embed], (name, leaf.shape, local)
    logits = run(sharded, *jax.device_put((TOKENS, SEGMENTS), batch_sharding(mesh)))
    real = np.asarray(SEGMENTS) != 0
    np.testing.assert_allclose(np.asarray(logits)[real], np.asarray(packed_logits)[real], atol=1e-5)


def test_qat_train_step_moves_the_float_weights(small):
    config = with_weights(small, "mxfp4_qat").replace(layers=1, residual="plain")
    model, optimizer = HybridLM(config), optax.sgd(0.5)
    state = jax.jit(lambda key: init_state(model, optimizer, key))(jax.random.key(0))
    step = jax.jit(make_train_step(model, optimizer))
    losses = []
    for _ in range(6):
        before, (state, metrics) = state, step(state, {"tokens": TOKENS, "segment_ids": SEGMENTS})
        losses.append(float(metrics["loss"]))
        assert int(metrics["skipped"]) == 0
    assert losses[-1] < losses[0] - 0.1
    old, new = (s.params["stack"]["blocks_0"]["run_0"]["layer_0"]["sub"]["ffn"] for s in (before, state))
    for name in MATRICES:
        moved = np.asarray(old[name]) != np.asarray(new[name])
        assert moved.mean() > 0.9
        assert not np.array_equal(new[name], mxfp4_fake_quant(new[name], axis=-2))  # masters stay unrounded


def test_packed_experts_are_not_trained(small):
    with pytest.raises(ValueError, match=r"read-only.*mxfp4_qat"):
        make_train_step(HybridLM(with_weights(small, "mxfp4")), optax.sgd(0.1))


def test_packing_a_trained_model_keeps_its_outputs(small, packed_model):
    """QAT's point: what was trained with rounding is what the packed weights compute, bit for bit."""
    run, _ = packed_model
    config = with_weights(small, "mxfp4_qat")
    trained = jax.jit(HybridLM(config).init)(jax.random.key(3), TOKENS[:1, :1])

    def pack(tree):
        if not isinstance(tree, dict):
            return tree
        out = {name: pack(leaf) for name, leaf in tree.items() if name not in MATRICES}
        for name in set(MATRICES) & set(tree):
            out[f"{name}_codes"], out[f"{name}_scales"] = mxfp4_encode(jnp.swapaxes(tree[name], -1, -2))
        return out

    expected = jax.jit(HybridLM(config).apply)(trained, TOKENS, SEGMENTS)
    logits = run({**trained, "params": pack(trained["params"])}, TOKENS, SEGMENTS)
    np.testing.assert_array_equal(logits, expected)


def test_configuration():
    tiny = presets.get("tiny")
    wide = {"expert_width": 64, "latent": 64}
    for kind in ("mxfp4", "mxfp4_qat"):
        config = tiny.replace(moe={**wide, "expert_weights": kind})
        assert type(config).from_dict(config.to_dict()) == config
        presets.get("kimi_k3").replace(moe={"expert_weights": kind})
        for changes, name in (({"expert_width": 48}, "expert_width is 48"), ({"latent": 40}, "latent is 40")):
            with pytest.raises(ValueError, match=rf"MoEConfig.{name}; with expert_weights = '{kind}' .* multiple of 32"):
                tiny.replace(moe={**wide, **changes, "expert_weights": kind})
        with pytest.raises(ValueError, match=r"ModelConfig.hidden is 72; .* multiple of 32"):
            tiny.replace(hidden=72, moe={**wide, "latent": None, "expert_weights": kind})
        tiny.replace(hidden=72, moe={**wide, "expert_weights": kind})
    with pytest.raises(ValueError, match="float, mxfp4_qat, mxfp4"):
        tiny.replace(moe={"expert_weights": "fp4"})
