"""HybridLM against a layer-by-layer reading of the specification, and what must not change its numbers. In float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.counting import count_parameters
from moejax.modules.block import SubLayers
from moejax.modules.plan import layer_locations, layer_specs
from moejax.ops import attention_residual, rms_norm

TOKENS = jax.random.randint(jax.random.key(5), (2, 21), 1, 64)
SEGMENTS = jnp.array([[1] * 9 + [2] + [3] * 11, [0] * 3 + [1] * 10 + [0] * 2 + [1] * 4 + [0] * 2], jnp.int32)


def init(config):
    return jax.jit(HybridLM(config).init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def toy(toy):
    return toy.replace(dtype="float64", param_dtype="float64")


@pytest.fixture(scope="module")
def toy_variables(toy, noisy):
    variables = init(toy)
    bias = jax.tree.map(lambda b: 0.1 * jax.random.normal(jax.random.key(3), b.shape), variables["router_state"])
    return {"params": noisy(variables["params"], jax.random.key(1), 0.2), "router_state": bias}


def loss_of(config, router_state, segment_ids=SEGMENTS):
    model, weights = HybridLM(config), jax.random.normal(jax.random.key(9), (*TOKENS.shape, config.vocab_size))

    def loss(params, tokens):
        logits = model.apply({"params": params, "router_state": router_state}, tokens, segment_ids)
        return jnp.sum(jnp.where((segment_ids != 0)[..., None], logits * weights, 0))

    return loss


@pytest.fixture(scope="module")
def toy_gradient(toy, toy_variables):
    """Loss and gradient of the scanned model without rematerialisation."""
    run = jax.jit(jax.value_and_grad(loss_of(toy, toy_variables["router_state"])))
    return run(toy_variables["params"], TOKENS)


def assert_close(actual, expected, tolerance):
    """Largest difference over largest entry, leaf by leaf."""
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        got = actual
        for key in path:
            got = got[key.key]
        scale = max(float(jnp.abs(want).max()), 1e-30)
        worst = float(jnp.abs(got - want).max()) / scale
        assert worst < tolerance, (jax.tree_util.keystr(path), worst)


def layerwise(config, variables, tokens, segment_ids):
    """The model as k3-spec section 5 writes it: python lists, one layer after the other, no scan, no static buffer."""
    params, eps = variables["params"], config.norm_eps

    def mix(sources, weights):
        return attention_residual(jnp.stack(sources), weights["norm_weight"], weights["query"], eps=eps)

    def layer_part(tree, location):
        for key in location.path:
            tree = tree[key]
        return jax.tree.map(lambda leaf: leaf[location.index], tree)

    prefix = params["embedding"][tokens]
    if segment_ids is not None:
        prefix = jnp.where((segment_ids != 0)[..., None], prefix, 0)
    snapshots = []
    for index, (spec, location) in enumerate(zip(layer_specs(config), layer_locations(config), strict=True)):
        own = layer_part(params["stack"], location)
        state = {} if spec.dense else layer_part(variables["router_state"]["stack"], location)["sub"]
        sub = SubLayers(config, spec)
        variables_of_layer = {"params": own["sub"], "router_state": state}
        plain = config.residual == "plain"
        h = prefix if plain or not snapshots else mix([*snapshots, prefix], own["mixer_residual"])
        fresh = not plain and index % config.residual_block == 0
        if fresh:
            snapshots.append(prefix)
        mixed = sub.apply(variables_of_layer, h, segment_ids, method="mix")
        prefix = mixed if fresh else prefix + mixed
        h = prefix if plain else mix([*snapshots, prefix], own["ffn_residual"])
        prefix = prefix + sub.apply(variables_of_layer, h, segment_ids, method="feed_forward")
    h = prefix if config.residual == "plain" else mix([*snapshots, prefix], params["output_residual"])
    return rms_norm(h, params["final_norm"]["weight"], eps=eps) @ params["head"]


@pytest.mark.parametrize(
    "changes",
    [
        {"residual_block": 3},
        {"residual": "plain", "layers": 6, "pattern": "KM"},  # one dense KDA layer, (MLA, KDA) twice, MLA
        {"layers": 7, "pattern": "M", "residual_block": 3},  # blocks dense + 2, 3 and 1: runs of equal layers inside blocks
    ],
    ids=["one block", "plain, repeated unit", "blocks of repeated layers"],
)
def test_matches_layer_by_layer(toy, noisy, changes):
    config = toy.replace(**changes)
    variables = init(config)
    variables = {**variables, "params": noisy(variables["params"], jax.random.key(1), 0.2)}
    actual = jax.jit(HybridLM(config).apply)(variables, TOKENS, SEGMENTS)
    expected = jax.jit(lambda v: layerwise(config, v, TOKENS, SEGMENTS))(variables)
    real = SEGMENTS != 0
    np.testing.assert_allclose(actual[real], expected[real], rtol=0, atol=1e-10 * float(jnp.abs(expected[real]).max()))


def test_layerwise_gradients(toy, toy_variables, toy_gradient):
    weights = jax.random.normal(jax.random.key(9), (*TOKENS.shape, toy.vocab_size))

    def loss(params):
        logits = layerwise(toy, toy_variables | {"params": params}, TOKENS, SEGMENTS)
        return jnp.sum(jnp.where((SEGMENTS != 0)[..., None], logits * weights, 0))

    assert_close(toy_gradient[1], jax.jit(jax.grad(loss))(toy_variables["params"]), 1e-9)


def test_remat_and_unrolling_change_nothing(toy, toy_variables, toy_gradient):
    config = toy.replace(remat="full", scan_layers=False)
    run = jax.jit(jax.value_and_grad(loss_of(config, toy_variables["router_state"])))
    value, grads = run(toy_variables["params"], TOKENS)
    np.testing.assert_allclose(value, toy_gradient[0], rtol=1e-12)
    assert_close(grads, toy_gradient[1], 1e-10)


def test_remat_of_a_repeated_block(toy, noisy):
    """Equal blocks share one scan whose backward pass recomputes from the snapshot buffer."""
    config = toy.replace(layers=4, pattern="M", dense_layers=2, residual_block=1)
    variables = init(config)
    params = noisy(variables["params"], jax.random.key(1), 0.2)
    results = [
        jax.jit(jax.value_and_grad(loss_of(config.replace(remat=remat), variables["router_state"])))(params, TOKENS)
        for remat in ("none", "full")
    ]
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-12)
    assert_close(results[1][1], results[0][1], 1e-10)


def test_remat_of_repeated_layers_inside_blocks(toy, noisy):
    """Runs of equal layers inside a block: scanned with recomputation, and unrolled without, against layer by layer."""
    config = toy.replace(layers=7, pattern="M", residual_block=3)
    variables = init(config)
    params = noisy(variables["params"], jax.random.key(1), 0.2)
    weights = jax.random.normal(jax.random.key(9), (*TOKENS.shape, config.vocab_size))

    def expected(params):
        logits = layerwise(config, variables | {"params": params}, TOKENS, SEGMENTS)
        return jnp.sum(jnp.where((SEGMENTS != 0)[..., None], logits * weights, 0))

    want = jax.jit(jax.grad(expected))(params)
    for changes in ({"remat": "full"}, {"scan_layers": False}):
        loss = loss_of(config.replace(**changes), variables["router_state"])
        assert_close(jax.jit(jax.grad(loss))(params, TOKENS), want, 1e-9)


def test_full_residual_reads_every_sublayer(toy, noisy):
    config = toy.replace(residual="full", scan_layers=False, layers=2, pattern="KM")
    variables = init(config)
    params = noisy(variables["params"], jax.random.key(1), 0.2)
    variables = {**variables, "params": params}

    def mix(sources, weights):
        return attention_residual(jnp.stack(sources), weights["norm_weight"], weights["query"], eps=config.norm_eps)

    def expected():
        sources = [params["embedding"][TOKENS]]
        for index, spec in enumerate(layer_specs(config)):
            own = params["stack"][f"layer_{index}"]
            state = {} if spec.dense else variables["router_state"]["stack"][f"layer_{index}"]["sub"]
            sub, values = SubLayers(config, spec), {"params": own["sub"], "router_state": state}
            sources.append(sub.apply(values, mix(sources, own["mixer_residual"]), None, method="mix"))
            sources.append(sub.apply(values, mix(sources, own["ffn_residual"]), None, method="feed_forward"))
        h = rms_norm(mix(sources, params["output_residual"]), params["final_norm"]["weight"], eps=config.norm_eps)
        return h @ params["head"]

    actual = jax.jit(HybridLM(config).apply)(variables, TOKENS)
    np.testing.assert_allclose(actual, jax.jit(expected)(), rtol=0, atol=1e-10 * float(jnp.abs(actual).max()))


def test_packed_documents_equal_single_ones(toy, toy_variables):
    run = jax.jit(HybridLM(toy).apply)
    packed = run(toy_variables, TOKENS[:1], jnp.array([[1] * 7 + [2] * 7 + [3] * 7], jnp.int32))
    for start in (0, 7, 14):
        alone = run(toy_variables, TOKENS[:1, start : start + 7])
        np.testing.assert_allclose(
            packed[:, start : start + 7], alone, rtol=0, atol=1e-10 * float(jnp.abs(alone).max())
        )


def test_left_padding_changes_nothing(toy, toy_variables):
    """K4 (maxtext #5295, transformers #46773): padding is invisible for one row and for three, values and gradients."""
    model = HybridLM(toy)
    tokens = TOKENS[:1, :7]
    weights = jax.random.normal(jax.random.key(2), (7, toy.vocab_size))

    def loss(params, tokens, segment_ids):
        logits = model.apply(toy_variables | {"params": params}, tokens, segment_ids)
        return jnp.sum(logits[0, -7:] * weights), logits[0, -7:]

    run = jax.jit(jax.grad(loss, has_aux=True))
    grads, alone = run(toy_variables["params"], tokens, jnp.ones((1, 7), jnp.int32))
    ids = jnp.array([[0] * 5 + [1] * 7], jnp.int32)
    for pad_id in (0, 17):
        padded = jnp.pad(tokens, ((0, 0), (5, 0)), constant_values=pad_id)
        for rows in (1, 3):
            batch = jnp.concatenate([padded, jnp.broadcast_to(TOKENS[:1, :12], (rows - 1, 12))])
            batch_ids = jnp.concatenate([ids, jnp.ones((rows - 1, 12), jnp.int32)])
            padded_grads, logits = run(toy_variables["params"], batch, batch_ids)
            np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-10 * float(jnp.abs(alone).max()))
            assert_close(padded_grads, grads, 1e-9)


def test_prefix_is_bit_equal_when_the_future_changes(toy, toy_variables):
    changed = TOKENS.at[:, 13:].set((TOKENS[:, 13:] + 7) % 64)
    run = jax.jit(HybridLM(toy).apply)
    before, after = run(toy_variables, TOKENS), run(toy_variables, changed)
    assert bool(jnp.all(before[:, :13] == after[:, :13]))
    assert not bool(jnp.any(jnp.all(before[:, 13:] == after[:, 13:], axis=-1)))


def test_counts_equal_the_initialised_parameters(toy):
    low_rank = {"output_gate_rank": 6, "lower_bound": None}
    for config in (
        toy,
        toy.replace(residual="plain", kda=low_rank, mla={"q_latent": None, "gate": False}),
        toy.replace(moe={"latent": None, "shared_width": None}, activation="swiglu", dense_layers=0),
        toy.replace(residual="full", scan_layers=False),
    ):
        shapes = jax.eval_shape(HybridLM(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        allocated = sum(leaf.size for leaf in jax.tree.leaves(shapes["params"]))
        assert count_parameters(config).total == allocated


def test_collections(toy, toy_variables):
    """The bias is a collection of its own, read and never written; counts appear only when asked for."""
    model = HybridLM(toy)
    assert set(init(toy)) == {"params", "router_state"}
    logits, written = jax.jit(lambda v: model.apply(v, TOKENS, SEGMENTS, mutable=["router_stats"]))(toy_variables)
    assert set(written) == {"router_stats"}
    silent = jax.jit(model.apply)(toy_variables, TOKENS, SEGMENTS)
    assert bool(jnp.all(jnp.where(SEGMENTS[..., None] != 0, logits == silent, True)))


def test_tokens_are_counted_once(toy, toy_variables):
    """Rematerialisation runs the forward again; padding is routed nowhere. Every layer counts each real token k times."""
    model = HybridLM(toy.replace(remat="full"))

    def loss(params):
        variables = toy_variables | {"params": params}
        logits, written = model.apply(variables, TOKENS, SEGMENTS, mutable=["router_stats"])
        return jnp.sum(logits), written["router_stats"]

    _, stats = jax.jit(jax.grad(loss, has_aux=True))(toy_variables["params"])
    real = int((SEGMENTS != 0).sum())
    loads = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(stats) if path[-1].key == "load"]
    assert sum(leaf.shape[0] * leaf.shape[1] for leaf in loads) == toy.moe_layers
    assert loads
    for leaf in loads:
        assert (np.asarray(leaf).sum(-1) == real * toy.moe.experts_per_token).all()


def test_return_hidden_and_dtypes(toy, toy_variables):
    config = toy.replace(dtype="bfloat16", param_dtype="bfloat16")
    variables = {
        "params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), toy_variables["params"]),
        "router_state": toy_variables["router_state"],
    }
    model = HybridLM(config)
    hidden, logits = jax.jit(
        lambda v: (model.apply(v, TOKENS, SEGMENTS, return_hidden=True), model.apply(v, TOKENS, SEGMENTS))
    )(variables)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    assert bool(jnp.isfinite(logits).all())
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    wide = {path[-1].key for path, leaf in jax.tree_util.tree_leaves_with_path(shapes) if leaf.dtype == jnp.float32}
    assert wide == {"A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "out_norm", "bias"}


@pytest.mark.parametrize(
    ("tokens", "segment_ids", "message"),
    [
        (jnp.zeros((3,), jnp.int32), None, r"\[B,T\]"),
        (jnp.zeros((1, 0), jnp.int32), None, "T >= 1"),
        (jnp.zeros((1, 3)), None, "integer"),
        (jnp.full((1, 3), 64), None, r"\[0, 64\)"),
        (jnp.full((1, 3), -1), None, r"\[0, 64\)"),
        (jnp.full((1, 3), -1), jnp.array([[0, 1, 1]], jnp.int32), r"\[0, 64\)"),
        (jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 2), jnp.int32), "segment_ids"),
        (jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), jnp.float32), "segment_ids"),
        (jnp.zeros((1, 3), jnp.int32), jnp.array([[2, 1, 1]], jnp.int32), "decrease"),
    ],
)
def test_bad_inputs(toy, toy_variables, tokens, segment_ids, message):
    with pytest.raises(ValueError, match=message):
        HybridLM(toy).apply(toy_variables, tokens, segment_ids)
