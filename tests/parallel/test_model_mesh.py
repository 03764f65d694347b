"""The whole model on meshes of 8 devices: the loss, every gradient, the routing and the next bias are one device's.

Rows are packed with documents that cross shards, one row begins with padding as long as a shard, row and length are not
divided by any mesh, and every token goes to expert 5 first while expert 2 gets none.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax import HybridLM, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moejax.ops import BalanceStrength, kda, latent_attention
from moejax.parallel import MeshConfig, batch_sharding, make_mesh, parameter_shardings
from moejax.parallel.layers import ModelParallel
from moejax.train import make_train_step
from moejax.train.balance import by_layer, update_router
from moejax.train.loss import next_token_targets
from moejax.train.state import make_state

CONFIG = ModelConfig(
    vocab_size=64,
    hidden=24,
    layers=2,
    pattern="KM",
    dense_width=40,
    residual_block=1,
    remat="none",
    dtype="float32",
    kda=KDAConfig(heads=4, key_dim=8, value_dim=12),
    mla=MLAConfig(heads=4, nope_dim=8, rope_dim=4, value_dim=12, q_latent=16, kv_latent=16),
    moe=MoEConfig(experts=8, experts_per_token=2, expert_width=16, latent=20, shared_width=16),
)
"""KDA with a dense feed-forward, then MLA with experts, in two blocks: every part once."""

FULL, EMPTY = 5, 2
"""The expert that all tokens choose, and the one that none chooses."""


def variables(noisy, config=CONFIG, scale=0.1):
    """Weights with noise of `scale` on every entry, and the skewed bias."""
    values = jax.jit(HybridLM(config).init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    values = noisy(values, jax.random.key(1), scale)
    bias = jnp.zeros(config.moe.experts).at[FULL].set(3.0).at[EMPTY].set(-3.0)
    state = jax.tree.map(lambda b: jnp.broadcast_to(bias, b.shape), values["router_state"])
    return {"params": values["params"], "router_state": state}


def packed_batch(rows, length):
    """Documents that begin and end anywhere; the second row begins with padding, the third ends with it.

    Each quarter of the length has tokens of its own, so that rows of the embedding's gradient belong to one shard of four.
    """
    quarter = np.arange(length) * 4 // length * (CONFIG.vocab_size // 4)
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab_size // 4, (rows, length), dtype=np.int32) + quarter.astype(np.int32)
    segments = np.ones((rows, length), np.int32)
    for row in range(rows):
        for cut in range(3 + 2 * row, length, 5 + 3 * row):
            segments[row, cut:] += 1
    segments[1 % rows, : length * 3 // 10] = 0
    segments[2 % rows, length * 6 // 10 :] = 0
    return {"tokens": jnp.asarray(tokens), "segment_ids": jnp.asarray(segments)}


def own_targets(tokens, segment_ids):
    """A target for each token alone: also a row of one token has a loss, and padding after it changes nothing."""
    return (7 * tokens + 3) % CONFIG.vocab_size, segment_ids != 0


def gradient_step(model, targets_of=next_token_targets):
    """f(params, router_state, batch) -> loss, gradients, logits, routing counts and the next bias."""

    def objective(params, router_state, batch):
        values = {"params": params, "router_state": router_state}
        logits, written = model.apply(values, batch["tokens"], batch["segment_ids"], mutable=["router_stats"])
        targets, valid = targets_of(batch["tokens"], batch["segment_ids"])
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.where(valid, nats, 0).sum() / jnp.maximum(valid.sum(), 1), (logits, by_layer(written["router_stats"]))

    def step(params, router_state, batch):
        (loss, (logits, stats)), grads = jax.value_and_grad(objective, has_aux=True)(params, router_state, batch)
        k = model.config.moe.experts_per_token
        bias = update_router("quantile", router_state, stats, k, BalanceStrength.create(), True)
        return {"loss": loss, "grads": grads, "logits": logits, "stats": stats, "bias": bias}

    return step


def error(value, wanted):
    """The largest difference over the largest magnitude; 0 when both are all 0."""
    value, wanted = np.asarray(value), np.asarray(wanted)
    assert np.all(np.isfinite(value)) and value.shape == wanted.shape
    difference = float(np.abs(value - wanted).max())
    return difference / float(np.abs(wanted).max()) if difference else 0.0


def check_equal(got, one, batch, bias, zero=()):
    """What a mesh computes against what one device does. zero: parameters whose gradient is 0 but for rounding."""
    np.testing.assert_allclose(got["loss"], one["loss"], rtol=1e-5)
    errors = jax.tree.map(error, got["grads"], one["grads"])
    wrong = {
        jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(errors) if e > 1e-5 and path[-1].key not in zero
    }
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(one["grads"]))
    for path, leaf in jax.tree_util.tree_leaves_with_path([got["grads"], one["grads"]]):
        assert path[-1].key not in zero or float(np.abs(leaf).max()) < 1e-6 * largest, path
    assert not wrong, wrong
    real = np.asarray(batch["segment_ids"]) > 0
    assert error(np.asarray(got["logits"])[real], np.asarray(one["logits"])[real]) < 1e-5
    for path, stats in one["stats"].items():
        for name in ("load", "tokens"):
            np.testing.assert_array_equal(got["stats"][path][name], stats[name])
        moved = np.cumsum(np.asarray(got["stats"][path]["histogram"]) - np.asarray(stats["histogram"]), axis=-1)
        assert np.abs(moved).max() <= 1 and not moved[..., -1].any()  # a margin on an edge may fall into the next bin
    one_bin = (float(bias.max() - bias.min()) + 2) / CONFIG.moe.histogram_bins
    for a, b in zip(jax.tree.leaves(got["bias"]), jax.tree.leaves(one["bias"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=one_bin)


def check_parts(got, one):
    """Gradients of the tokens of each quarter and of each KDA head, each against its own largest entry."""
    parts = [np.split(np.asarray(grads["embedding"]), 4) for grads in (got, one)]
    kda_layers = [grads["stack"]["blocks_0"]["run_0"]["layer_0"]["sub"]["mixer"] for grads in (got, one)]
    for name in ("q_proj", "k_proj", "v_proj", "out_gate"):
        for part, layer in zip(parts, kda_layers, strict=True):
            part += list(np.moveaxis(layer[name], -2, 0))
    assert len(parts[0]) == 4 + 4 * CONFIG.kda.heads
    errors = [error(value, wanted) for value, wanted in zip(*parts, strict=True)]
    assert max(errors) < 1e-5, errors


class Cases:
    """Runs of the same step on one device and on meshes; each program is compiled once, its text is kept."""

    def __init__(self, noisy):
        self.values = variables(noisy)
        self.bias = jax.tree.leaves(self.values["router_state"])[0]

    def compute(self, batch, attention="gather", axes=None, **options):
        """-> (results, text of the compiled program); no axes: one device, without a mesh."""
        params, parallel = self.values["params"], None
        if axes:
            mesh = make_mesh(MeshConfig(**axes))
            parallel = ModelParallel(mesh, attention=attention)
            params = jax.device_put(params, parameter_shardings(params, mesh))
        arguments = (params, self.values["router_state"], batch)
        compiled = jax.jit(gradient_step(HybridLM(CONFIG, parallel=parallel), **options)).lower(*arguments).compile()
        return jax.device_get(compiled(*arguments)), compiled.as_text()

    @functools.cache  # noqa: B019 - lives as long as the module's fixture
    def run(self, rows, length, attention="gather", /, **axes):
        return self.compute(packed_batch(rows, length), attention, axes)

    def compare(self, rows, length, attention, axes):
        got, one = self.run(rows, length, attention, **axes)[0], self.run(rows, length)[0]
        check_equal(got, one, packed_batch(rows, length), self.bias)
        check_parts(got["grads"], one["grads"])

    @functools.cached_property
    def short(self):
        """length -> a row of 5 tokens, of which `length` count, on one device: one program for all lengths."""
        tokens = packed_batch(1, 5)["tokens"]
        batches = {length: {"tokens": tokens, "segment_ids": (jnp.arange(5) < length).astype(jnp.int32)[None]} for length in (1, 2, 3, 5)}
        step = jax.jit(gradient_step(HybridLM(CONFIG), own_targets))
        return {length: jax.device_get(step(*self.values.values(), batch)) for length, batch in batches.items()}


@pytest.fixture(scope="module")
def cases(noisy):
    return Cases(noisy)


def test_the_inputs_are_what_the_meshes_need(cases):
    """The routing is skewed, nothing is 0 by accident, documents cross the shards of 2 and 4, one shard is only padding."""
    one, segments = cases.run(7, 33)[0], np.asarray(packed_batch(7, 33)["segment_ids"])
    (stats,) = one["stats"].values()
    real = int((segments > 0).sum())
    load = stats["load"].reshape(-1)
    assert load[FULL] == real and load[EMPTY] == 0 and load.sum() == 2 * real
    zero = {jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(one["grads"]) if not leaf.any()}
    first = "['stack']['blocks_0']['run_0']['layer_0']['mixer_residual']"
    assert zero == {f"{first}['norm_weight']", f"{first}['query']"}  # one source: the query does not matter
    for cut in (9, 17, 18, 27):
        assert (segments[:, cut - 1] == segments[:, cut])[segments[:, cut] > 0].any()
    assert not segments[1, :9].any() and not segments[2, 27:].any()


MESHES = {
    "data 8": ("gather", {"data": 8}),
    "fsdp 8": ("gather", {"fsdp": 8}),
    "expert 8": ("gather", {"expert": 8}),
    "sequence 4, ring": ("ring", {"sequence": 4}),
    "sequence 2, tensor 2": ("gather", {"sequence": 2, "tensor": 2}),
}
MORE = {
    "expert 2": ("gather", {"expert": 2}),
    "expert 4": ("gather", {"expert": 4}),
    "sequence 2, ring": ("ring", {"sequence": 2}),
    "sequence 4": ("gather", {"sequence": 4}),
    "sequence 8": ("gather", {"sequence": 8}),
    "sequence 8, ring": ("ring", {"sequence": 8}),
    "tensor 2": ("gather", {"tensor": 2}),
    "tensor 4": ("gather", {"tensor": 4}),
    "expert 4, tensor 2": ("gather", {"expert": 4, "tensor": 2}),
    "fsdp 2, expert 2, sequence 2": ("ring", {"fsdp": 2, "expert": 2, "sequence": 2}),
    "data 2, expert 2, sequence 2": ("gather", {"data": 2, "expert": 2, "sequence": 2}),
}


@pytest.mark.parametrize(("attention", "axes"), MESHES.values(), ids=MESHES.keys())
def test_a_mesh_computes_what_one_device_does(cases, attention, axes):
    cases.compare(7, 33, attention, axes)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "axes"), MORE.values(), ids=MORE.keys())
def test_more_meshes_compute_what_one_device_does(cases, attention, axes):
    cases.compare(7, 33, attention, axes)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "sequence"), [(4, 4), (64, 4), (66, 2)], ids=["1 token", "16 tokens", "33 tokens"])
def test_local_lengths(cases, length, sequence):
    """Whole rows, so that a shard holds exactly the length; 5, 9 and 17 are in the meshes of 33 tokens."""
    for attention in ("gather", "ring"):
        cases.compare(7, length, attention, {"sequence": sequence})


EXPERT_MATRICES = ("expert_gate", "expert_up", "expert_down")
SHORT = [({axis: 4}, length) for axis in ("tensor", "expert", "sequence") for length in (1, 2, 3, 5)] + [({"expert": 2}, 5)]
SHORT_IN_CI = [({"expert": 4}, 2), ({"sequence": 4}, 1)]


@pytest.mark.parametrize(
    ("axes", "length"),
    [pytest.param(*case, marks=() if case in SHORT_IN_CI else pytest.mark.slow, id=f"{case[0]}-{case[1]}") for case in SHORT],
)
def test_fewer_tokens_than_shards(cases, axes, length):
    """M7 (torchtitan #3622, pytorch #160285): one row of L tokens, down to one, works; no gradient of an expert is counted twice."""
    batch = {"tokens": packed_batch(1, 5)["tokens"][:, :length], "segment_ids": jnp.ones((1, length), jnp.int32)}
    got, one = cases.compute(batch, axes=axes, targets_of=own_targets)[0], cases.short[length]
    zero = ("q_down", "q_norm", "q_up", "k_up") if length == 1 else ()  # a softmax over one token is 1, whatever its score
    check_equal(got, {**one, "logits": one["logits"][:, :length]}, batch, cases.bias, zero)
    (stats,) = got["stats"].values()
    assert stats["load"].sum() == CONFIG.moe.experts_per_token * length
    ours, theirs = (result["grads"]["stack"]["blocks_1"]["run_0"]["layer_0"]["sub"]["ffn"] for result in (got, one))
    for name in EXPERT_MATRICES:
        assert np.linalg.norm(theirs[name]) > 0
        np.testing.assert_allclose(np.linalg.norm(ours[name]), np.linalg.norm(theirs[name]), rtol=1e-5)


def collectives(text):
    """Every collective of a compiled program between two devices or more: (name, ["f32[8,20]", ...])."""
    found = []
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast"
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        match = re.search(rf"= (.*?) ({names})(?:-start)?\(", line)
        if match and devices_of_a_group(line) != 1:
            found.append((match[2], re.findall(r"[a-z]+\d*\[[\d,]*\]", match[1])))
    return found


def devices_of_a_group(line):
    """How many devices take part, in the three ways to write groups; None for pairs of source and target. 1: no exchange."""
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(match[1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", match[2]))
    return None


def of_kind(found, name):
    return [shapes for kind, shapes in found if kind == name]


def test_train_steps_under_set_mesh_with_remat_and_scan(noisy):
    """data 2, expert 2, sequence 2: MLA with a dense feed-forward, then KDA with experts twice in one scan, all recomputed.

    The gradients of the first step and the losses of four steps are one device's.
    """
    config = CONFIG.replace(layers=3, pattern="MKK", remat="full", scan_layers=True)
    # The momentum of trace(0.0) is the gradient as it is.
    optimizer = optax.chain(optax.trace(0.0), optax.scale(-0.5))
    # Noise of 0.1 makes float32 gradients of two KDA layers differ by 2e-5 between any two orders of summing; in float64 the
    # mesh and one device agree within 1e-13 there too.
    values = variables(noisy, config, 0.05)
    start = make_state(values["params"], values["router_state"], optimizer)
    batch, mesh = packed_batch(8, 34), make_mesh(MeshConfig(data=2, expert=2, sequence=2))
    shardings = parameter_shardings(start, mesh)

    def train(model, state, batch, **options):
        step = jax.jit(make_train_step(model, optimizer, clip_norm=None), **options).lower(state, batch).compile()
        states, metrics = [], []
        for _ in range(4):
            state, more = step(state, batch)
            states.append(jax.device_get(state))
            metrics.append(jax.device_get(more))
        return states, metrics

    one, one_metrics = train(HybridLM(config), start, batch)
    with jax.set_mesh(mesh):
        placed = jax.device_put((start, batch), (shardings, batch_sharding(mesh)))
        got, metrics = train(HybridLM(config, parallel=ModelParallel(mesh)), *placed, out_shardings=(shardings, None))
    gradients = [states[0].opt_state[0].trace for states in (got, one)]
    errors = jax.tree.map(error, *gradients)
    wrong = {jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(errors) if e > 1e-5}
    assert not wrong, wrong
    np.testing.assert_array_equal(metrics[0]["expert_load"], one_metrics[0]["expert_load"])
    assert metrics[0]["expert_load"][:, FULL].tolist() == [int((batch["segment_ids"] > 0).sum())] * 2
    for a, b in zip(jax.tree.leaves(got[0].router_state), jax.tree.leaves(one[0].router_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=8 / config.moe.histogram_bins)  # one bin: biases from -3 to 3
    losses, wanted = ([float(m["loss"]) for m in run] for run in (metrics, one_metrics))
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert wanted[3] < wanted[0] - 0.05  # it trains, so that the later losses say something


def test_kda_and_latent_attention_on_a_mesh_of_your_own():
    """Rows over "x", heads over "y", no mesh of this package: right, and what is summed are gradients of shared inputs alone."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, heads, by_head = jax.P("x"), jax.P("x", None, "y"), jax.P(None, "y")
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    B, T, H, K, V, C, R = 4, 37, 8, 8, 12, 16, 4
    segments = packed_batch(B, T)["segment_ids"]
    decay, beta = -5 * jax.nn.sigmoid(draw(3, B, T, H, K)), jax.nn.sigmoid(draw(4, B, T, H))
    kda_inputs = (unit(draw(0, B, T, H, K)), unit(draw(1, B, T, H, K)), draw(2, B, T, H, V), decay, beta)
    mla_inputs = (draw(5, B, T, H, K + R), draw(6, B, T, C), draw(7, B, T, R), draw(8, C, H, K), draw(9, C, H, V))
    latent_shapes = {"f32[2,37,16]", "f32[2,37,4]"}  # summed over heads
    weight_shapes = {"f32[16,2,8]", "f32[2,8,16]", "f32[16,2,12]", "f32[2,12,16]"}  # summed over rows
    mla_specs = (heads, rows, rows, by_head, by_head)
    for op, inputs, specs, sums in (
        (lambda *a, ids: kda(*a, lower_bound=-5.0, segment_ids=ids)[0], kda_inputs, (heads,) * 5, set()),
        (lambda *a, ids: latent_attention(*a, segment_ids=ids), mla_inputs, mla_specs, latent_shapes | weight_shapes),
    ):

        def both(inputs, ids, d_out, op=op):
            out, pull = jax.vjp(lambda *a: op(*a, ids=ids), *inputs)
            return out, pull(d_out)

        arguments = (inputs, segments, draw(10, B, T, H, V))
        one = jax.jit(both)(*arguments)
        placed = jax.device_put(arguments, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), (specs, rows, heads)))
        compiled = jax.jit(both).lower(*placed).compile()
        errors = jax.tree.map(error, compiled(*placed), one)
        assert max(jax.tree.leaves(errors)) < 1e-5, errors
        found = collectives(compiled.as_text())
        assert all(name == "all-reduce" and set(shapes) <= sums for name, shapes in found), found
        assert bool(found) == bool(sums)


def sizes(shape):
    """The axes of "f32[8,20]" longer than 1, sorted: XLA moves axes and adds those of length 1."""
    return sorted(int(size) for size in re.findall(r"\d+", shape.split("[")[1]) if size != "1")


def flat(lists):
    return {shape for shapes in lists for shape in shapes}


def check_sums(found, tokens):
    """All-reduces are over gradients, counts and the loss: nothing that has an axis of local tokens."""
    sums = flat(of_kind(found, "all-reduce"))
    assert "s32[8,1000]" in sums  # the histogram of the balancing rule
    assert any(sizes(shape) == sizes("f32[24,8]") for shape in sums)  # the router's gradient
    assert not [shape for shape in sums if set(sizes(shape)) & set(tokens)], sums


def test_collectives_of_experts(cases):
    """Rows go to the experts and come back as latents of 20 channels, not 24; no matrix of an expert leaves its device."""
    found = collectives(cases.run(7, 33, "gather", expert=8)[1])
    assert {name for name, _ in found} == {"all-to-all", "all-gather", "all-reduce"}
    # Counts and the first row of each pair; latents; in the backward pass latents beside the gradients of the results.
    slot = 16  # 1.25 x 66 assignments / 8, rounded up
    assert flat(of_kind(found, "all-to-all")) == {"s32[1,2]", f"f32[{slot},20]", f"f32[{slot},40]"}
    assert of_kind(found, "all-gather") == [["f32[8,33,24]"]]  # the output: 8 devices do not divide 7 rows
    check_sums(found, (33, 66))
    matrices = [sizes("f32[8,20,16]"), sizes("f32[20,16]")]  # of all experts, of one
    assert not [shape for name, shapes in found for shape in shapes if name != "all-to-all" and sizes(shape) in matrices]


def test_collectives_of_sequence_ring(cases):
    """Halo and state summaries are gathered once each, latents go round; no key or value of a head leaves its device."""
    found = collectives(cases.run(7, 33, "ring", sequence=4)[1])
    halo = 3 * (32 + 32 + 48) + 3 * 4  # 3 inputs of the q, k and v convolutions, 3 numbers as bytes
    summary = 4 * 8 * (12 + 8) + 2 * 4  # a head's [K,V+K], 2 numbers as bytes
    gathered, summed = {f"f32[4,7,{halo}]", f"f32[4,7,{summary}]"}, {f"f32[1,7,{halo}]", f"f32[1,7,{summary}]"}
    output = "f32[7,36,24]"  # whole, as 4 devices do not divide 33 tokens
    assert {name for name, _ in found} == {"all-gather", "reduce-scatter", "collective-permute", "all-reduce"}
    assert sorted(of_kind(found, "all-gather")) == sorted([shape] for shape in (*gathered, output))
    assert flat(of_kind(found, "reduce-scatter")) == summed and len(of_kind(found, "reduce-scatter")) == 2
    assert flat(of_kind(found, "collective-permute")) == {"u32[1,7,9,21]", "f32[1,7,9,20]"}  # latent and id; its gradient
    check_sums(found, (9, 63))


def test_collectives_of_sequence_gather_and_tensor(cases):
    """The latent is gathered once, for both passes; with half of the heads, half of the halo and of the summaries."""
    found = collectives(cases.run(7, 33, "gather", sequence=2, tensor=2)[1])
    halo, summary = 3 * (16 + 16 + 24) + 3 * 4, 2 * 8 * (12 + 8) + 2 * 4
    assert {name for name, _ in found} == {"all-gather", "reduce-scatter", "all-reduce"}
    gathered = (f"f32[2,7,{halo}]", f"f32[2,7,{summary}]", "u32[2,7,17,21]", "f32[7,34,24]")
    assert sorted(of_kind(found, "all-gather")) == sorted([shape] for shape in gathered)
    scattered = (f"f32[1,7,{halo}]", f"f32[1,7,{summary}]", "f32[1,7,17,20]")
    assert sorted(of_kind(found, "reduce-scatter")) == sorted([shape] for shape in scattered)
