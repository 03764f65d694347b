"""Model probes against recomputation in float64 NumPy from captured layer inputs; the model itself is left as it is."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from moejax import HybridLM
from moejax.modules.block import DecoderLayer
from moejax.modules.kda import KimiDeltaAttention
from moejax.modules.mla import GatedMLA
from moejax.modules.plan import layer_locations
from moejax.ops.depth_attention import attention_residual, depth_attention
from moejax.ops.kda_layer import KDAWeights, kda_layer
from moejax.train import probes, report_panels
from moejax.train.probes import HALF_LIFE_EDGES, Probe, depth_weights, probe_record, probe_values, weight_rms
from moejax.train.run_history import read_history


def random_variables(model, seed=0):
    """Parameters without a compile of `init`: noise of 0.3 around 0, norms around 1."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))

    def draw(path, leaf):
        centre = 1.0 if "norm" in str(path[-2:]) else 0.0
        return jnp.asarray(centre + 0.3 * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def rows(seed=1):
    """3 rows of 18: two documents, a document and padding, padding alone."""
    tokens = np.random.default_rng(seed).integers(0, 64, (3, 18)).astype(np.int32)
    segments = np.ones((3, 18), np.int32)
    segments[0, 7:], segments[1, 11:], segments[2] = 2, 0, 0
    return tokens, segments


@pytest.fixture(scope="module")
def probed(toy):
    """A scanned model with block residuals and remat, its probe's figures, and beside them what its layers were given.

    Both come from one program: a second interceptor writes inputs and streams down the way the probe does its figures.
    """
    model = HybridLM(toy.replace(remat="full"))
    variables = random_variables(model)
    tokens, segments = rows()
    probe = Probe(model, rows=3)

    def keep(call, args, kwargs, context):
        out = call(*args, **kwargs)
        for kind, name in ((KimiDeltaAttention, "kda"), (GatedMLA, "mla"), (DecoderLayer, "stream")):
            if isinstance(context.module, kind) and context.method_name == "__call__":
                value = out[0] if name == "stream" else args[0]
                last = {"reduce_fn": lambda _, new: new, "init_fn": lambda: None}
                context.module.sow("intermediates", f"{probes.PREFIX}given_{name}", value, **last)
        return out

    with nn.intercept_methods(keep):
        values = probe(variables["params"], variables["router_state"], tokens, segments)
    given = {name: np.asarray(values[f"given_{name}"], np.float64) for name in ("kda", "mla", "stream")}
    return model, variables, probe, values, given


def layer(config, tree, number):
    """The subtree of one layer, out of the stacks."""
    location = layer_locations(config)[number]
    node = tree["stack"]
    for part in location.path:
        node = node[part]
    return jax.tree.map(lambda leaf: leaf[location.index], node)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_kda_figures(probed):
    """Layers 0 and 2: state by the token-by-token reference, gates in float64 from the inputs."""
    model, variables, _, values, inputs = probed
    _, segments = rows()
    real = segments != 0
    for at, number in enumerate((0, 2)):
        given = inputs["kda"][at]
        weights = layer(model.config, variables["params"], number)["sub"]["mixer"]
        wide = {name: np.asarray(leaf, np.float64) for name, leaf in weights.items()}
        raw = np.einsum("btr,rgk->btgk", given @ wide["decay_down"], wide["decay_up"])
        g = (-5.0 * sigmoid(np.exp(wide["A_log"])[:, None] * (raw + wide["dt_bias"])))[real]
        half_life = np.log(2) / -g.mean(0)
        np.testing.assert_allclose(values["half_life_above_1k"][at], (half_life > 1000).mean(), atol=1e-6)
        np.testing.assert_allclose(values["decay_at_floor"][at], (g <= -4.95).mean(), atol=2e-3)
        counts, _ = np.histogram(half_life, HALF_LIFE_EDGES)
        np.testing.assert_allclose(values["half_life_histogram"][at], counts / half_life.size, atol=1e-6)
        beta = sigmoid(given @ wide["beta_proj"])[real]
        np.testing.assert_allclose(values["beta_mean"][at], beta.mean(), rtol=1e-5)
        full = KDAWeights(**{name: weights.get(name) for name in KDAWeights._fields})
        _, state = jax.jit(
            lambda x, w: kda_layer(x, w, segment_ids=jnp.asarray(segments[:2]), return_state=True, implementation="reference")
        )(given[:2].astype(np.float32), full)
        norms = np.sqrt(np.square(np.asarray(state.recurrent, np.float64)).sum((-2, -1))).mean(0)
        np.testing.assert_allclose(values["state_norm"][at], norms, rtol=1e-4)
    assert values["state_norm"].min() > 0 and 0 < values["decay_at_floor"].max() < 1


def test_mla_depth_and_stream_figures(probed):
    model, variables, _, values, inputs = probed
    tokens, segments = rows()
    real, c = segments != 0, model.config
    gate = np.einsum("btd,dhv->bthv", inputs["mla"][0], np.asarray(layer(c, variables["params"], 1)["sub"]["mixer"]["gate"], np.float64))
    np.testing.assert_allclose(values["mla_gate_mean"], [sigmoid(gate)[real].mean()], rtol=1e-5)
    streams = inputs["stream"]
    np.testing.assert_allclose(values["hidden_rms"], [np.sqrt(np.square(s[real]).mean()) for s in streams], rtol=1e-4)

    # Layer 2 opens the second block: its mixer reads the embedding and the first block, and no running sum.
    x = np.where(real[..., None], np.asarray(variables["params"]["embedding"], np.float64)[tokens], 0)
    sources = np.stack([x, streams[1]])
    names = layer(c, variables["params"], 2)["mixer_residual"]
    normed = sources / np.sqrt(np.square(sources).mean(-1, keepdims=True) + c.norm_eps)
    logits = normed @ (np.asarray(names["norm_weight"], np.float64) * np.asarray(names["query"], np.float64))
    weights = np.exp(logits) / np.exp(logits).sum(0)
    np.testing.assert_allclose(values["depth_weights"][4], [*weights[:, real].mean(1), 0], rtol=1e-4, atol=1e-6)
    entropy = -(weights * np.log(weights)).sum(0)[real].mean()
    np.testing.assert_allclose(values["depth_entropy"][4], entropy, rtol=1e-4)
    assert values["depth_weights"].shape == (7, 3) and (values["depth_weights"][0] == [1, 0, 0]).all()
    np.testing.assert_allclose(values["depth_weights"].sum(1), 1, rtol=1e-5)


def test_weight_rms_counts_every_parameter_once(probed):
    _, variables, _, values, _ = probed
    names = {"depth_query", "norms", "kda_conv", "kda_gates", "mla_gate", "mixers", "router", "experts", "shared_expert", "latent", "dense"}
    assert set(values["weight_rms"]) == names | {"embedding", "head"}
    router = [
        np.asarray(leaf, np.float64).ravel()
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"])
        if getattr(path[-1], "key", "") == "router"
    ]
    np.testing.assert_allclose(values["weight_rms"]["router"], np.sqrt(np.square(np.concatenate(router)).mean()), rtol=1e-5)
    packed = {"codes": jnp.zeros((4, 4), jnp.uint8), "head": jnp.full((3,), 2.0, jnp.bfloat16)}
    assert {name: float(x) for name, x in weight_rms(packed).items()} == {"head": 2.0}


def test_padding_is_not_read(probed):
    """Other ids at padding: every figure stays bit for bit."""
    _, variables, probe, values, _ = probed
    tokens, segments = rows()
    again = probe(variables["params"], variables["router_state"], np.where(segments != 0, tokens, 63 - tokens), segments)
    for a, b in zip(jax.tree.leaves(values), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_model_is_left_as_it_is(probed):
    """After a probe the model traces to the same program as before and writes no figure of a probe."""
    model, variables, *_ = probed
    tokens, segments = rows()

    def traced():
        apply = lambda v: model.apply(v, tokens, segments, mutable=["router_stats"])
        return str(jax.make_jaxpr(apply)(variables))

    before = traced()
    jax.eval_shape(lambda v: probe_values(model, v["params"], v["router_state"], tokens, segments), variables)
    assert traced() == before
    _, written = jax.eval_shape(lambda v: model.apply(v, tokens, segments, mutable=["intermediates"]), variables)
    names = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(written)]
    assert names and not any(probes.PREFIX in name for name in names)


def test_cost_is_one_forward_pass(probed):
    """FLOPs of the probe's program against the forward pass of the same rows, before XLA drops anything."""
    model, variables, probe, *_ = probed
    tokens, segments = rows()
    arguments = (variables["params"], variables["router_state"], tokens, segments)
    forward = jax.jit(lambda p, r, t, s: model.apply({"params": p, "router_state": r}, t, s, return_hidden=True))
    flops = [run.lower(*arguments).cost_analysis()["flops"] for run in (forward, probe._run)]
    print(f"a probe takes {flops[1] / flops[0]:.2f} forward passes")
    assert flops[1] < 1.2 * flops[0]


@pytest.mark.parametrize("residual, reads", [("plain", None), ("full", (7, 7))])
def test_other_residuals(toy, residual, reads):
    config = toy.replace(residual=residual, scan_layers=residual == "plain", kda={"lower_bound": None})
    model = HybridLM(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    tokens, segments = rows()
    values = jax.eval_shape(lambda v: probe_values(model, v["params"], v["router_state"], tokens, segments), shapes)
    assert values["state_norm"].shape == (2, 4) and values["hidden_rms"].shape == (3,) and "decay_at_floor" not in values
    assert (values["depth_weights"].shape if reads else values.get("depth_weights")) == reads


def test_depth_weights_are_those_of_the_op():
    """The mix by these weights is the op's, also with sources that are not valid and hold NaN."""
    keys = jax.random.split(jax.random.key(3), 4)
    sources, prefix = jax.random.normal(keys[0], (3, 2, 5, 8)), jax.random.normal(keys[1], (2, 5, 8))
    norm, query = jax.random.normal(keys[2], (8,)), jax.random.normal(keys[3], (8,))

    @jax.jit
    def mixes(sources, count, valid):
        options = {"count": count, "eps": 1e-5}
        weights = depth_weights(sources, prefix, norm, query, prefix_valid=valid, **options)
        alone = depth_weights(sources, None, norm, query, **options)
        ops = depth_attention(sources, prefix, norm, query, prefix_valid=valid, **options)
        return weights, alone, ops, attention_residual(sources, norm, query, **options)

    for count, valid in ((3, True), (2, False), (1, True)):
        weights, alone, both, one = mixes(sources.at[count:].set(jnp.nan), count, valid)
        parts = np.concatenate([np.where(np.arange(3)[:, None, None, None] < count, sources, 0), prefix[None]])
        np.testing.assert_allclose(np.einsum("sbt,sbtd->btd", weights, parts), both, atol=1e-5)
        np.testing.assert_allclose(np.einsum("sbt,sbtd->btd", alone, parts[:3]), one, atol=1e-5)
        assert not np.asarray(weights)[count:3].any() and bool(np.asarray(weights)[3].any()) is valid


def test_long_rows_are_sampled(monkeypatch):
    """Means over every second token of 9 with room for 5, padding left out."""
    monkeypatch.setattr(probes, "MOST_TOKENS", 5)
    mask = jnp.asarray([[1.0] * 7 + [0.0] * 2])
    means = probes._Means(mask)
    x = jnp.asarray([[1.0, 50, 2, 50, 3, 50, 6, 50, jnp.nan]])
    assert float(means(means.sample(x))) == 3.0
    two = jnp.stack([x, 2 * x], -1)
    np.testing.assert_allclose(means(means.sample(two), keep=1), [3.0, 6.0])


def test_record_is_short_json():
    values = {"a": np.array([[1 / 3, np.nan]], np.float32), "weight_rms": {"head": np.float32(2e-9)}}
    record = probe_record(7, values)
    assert json.loads(json.dumps(record)) == {"step": 7, "a": [[0.33333, "nan"]], "weight_rms": {"head": 2e-9}}


def test_report_draws_what_a_probe_writes(probed, tmp_path):
    """One line of probes.jsonl is enough for every panel of the report that reads it."""
    values = {name: value for name, value in probed[3].items() if not name.startswith("given_")}
    (tmp_path / "probes.jsonl").write_text(json.dumps(probe_record(1, values)) + "\n")
    run = read_history(tmp_path)
    for draw in (report_panels.state_norms, report_panels.decays, report_panels.depth_attention, report_panels.streams):
        axes = draw(run).axes
        assert any(ax.images or ax.lines for ax in axes), draw.__name__


def test_due_and_bad_settings(toy):
    model = HybridLM(toy)
    assert [step for step in range(1, 8) if Probe(model, every=3).due(step)] == [1, 3, 6]
    for settings in ({"every": 0}, {"rows": 0}, {"every": 2.5}, {"rows": True}):
        with pytest.raises(ValueError, match="must be an integer of at least 1"):
            Probe(model, **settings)


@pytest.mark.slow
def test_over_a_mesh(toy):
    """One row on 2 x 2 devices: the row and the time are padded; figures as without a mesh."""
    from jax.sharding import Mesh

    from moejax.parallel.layers import ModelParallel

    tokens, segments = rows()
    plain = HybridLM(toy)
    variables = random_variables(plain)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "expert"))
    spread = HybridLM(toy, ModelParallel(mesh))
    want, found = (Probe(m, rows=1)(variables["params"], variables["router_state"], tokens, segments) for m in (plain, spread))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=1e-6, err_msg=str(path))
