"""The axis table, and the model on a small mesh of CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM, KDAConfig
from moejax.modules import KimiDeltaAttention
from moejax.parallel import (
    AxisRules,
    MeshConfig,
    batch_sharding,
    cache_shardings,
    logical_axes,
    make_mesh,
    parameter_shardings,
    partition_spec,
)
from moejax.train import OptimizerConfig, adamw, init_state, make_train_step
from moejax.train.loss import chunked_cross_entropy


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=2, expert=2, tensor=2))


def test_specs(mesh):
    assert partition_spec(("experts", "embed", "width"), mesh) == jax.P("expert", "fsdp", "tensor")
    assert batch_sharding(mesh).spec == jax.P(("data", "fsdp", "expert"), "sequence")
    assert batch_sharding(mesh, micro_batches=True).spec == jax.P(None, ("data", "fsdp", "expert"), "sequence")
    foreign = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    assert partition_spec(("batch", "heads"), foreign) == jax.P("data", None)


@pytest.mark.parametrize("expert", [1, 2, 3, 4])
def test_negative_biases_on_expert_meshes(toy, expert):
    """M6 (sglang #3705): six experts, all biases -3, on 1, 2, 3 devices and on 4, where 6 does not divide: as with bias 0."""
    model = HybridLM(toy.replace(layers=1, pattern="M", dense_layers=0, residual="plain"))
    mesh = make_mesh(MeshConfig(expert=expert))
    tokens = jax.random.randint(jax.random.key(1), (12, 8), 0, 64)
    segments = jnp.ones((12, 8), jnp.int32).at[0, 5:].set(0)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    run = jax.jit(lambda v, *batch: model.apply(v, *batch, mutable=["router_stats"]))
    logits, stats = run(variables, tokens, segments)
    lowered = variables | {"router_state": jax.tree.map(lambda bias: bias - 3, variables["router_state"])}
    sharded = jax.device_put(lowered, parameter_shardings(lowered, mesh))
    mesh_logits, mesh_stats = run(sharded, *jax.device_put((tokens, segments), batch_sharding(mesh)))
    loads = [
        leaf
        for tree in (stats, mesh_stats)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if path[-1].key == "load"
    ]
    np.testing.assert_array_equal(loads[0], loads[1])
    assert int(loads[0].sum()) == 93 * toy.moe.experts_per_token
    real = np.asarray(segments) != 0
    np.testing.assert_allclose(np.asarray(mesh_logits)[real], np.asarray(logits)[real], atol=1e-5)


def test_vocabulary_loss_is_shared_out(mesh):
    """Each device computes the logits of its own tokens: no gather of the hidden states."""
    rows = jax.NamedSharding(mesh, partition_spec(("batch", None), mesh))
    whole = jax.NamedSharding(mesh, jax.P())

    def loss(hidden, head):
        valid = jnp.ones(hidden.shape[0], bool)
        return chunked_cross_entropy(hidden, head, jnp.zeros(hidden.shape[0], jnp.int32), valid, chunk=16)

    arguments = (jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((8, 32), jnp.float32))
    text = jax.jit(jax.grad(loss, (0, 1)), in_shardings=(rows, whole)).lower(*arguments).compile().as_text()
    assert "all-gather" not in text and "[4,32]" in text and "[16,32]" not in text


def test_parameters_without_axes():
    with pytest.raises(ValueError, match="'mystery' has no logical axes"):
        logical_axes("mystery", 2)
    with pytest.raises(ValueError, match="'embedding' has 1 axes here"):
        logical_axes("embedding", 1)


def test_collisions_and_unknown_names(mesh):
    with pytest.raises(ValueError, match="'embed' and 'width' of one array both map to mesh axis 'tensor'"):
        partition_spec(("embed", "width"), mesh, AxisRules(embed="tensor"))
    with pytest.raises(ValueError, match="unknown logical axis 'depth'"):
        partition_spec(("depth",), mesh)
    with pytest.raises(ValueError, match="needs 16 devices"):
        make_mesh(MeshConfig(data=16))


@pytest.mark.parametrize(
    ("axes", "remat"),
    [({"data": 2, "expert": 2, "tensor": 2}, "none"), ({"fsdp": 2, "sequence": 2, "tensor": 2}, "full")],
    ids=["data, expert, tensor", "fsdp, sequence, tensor"],
)
def test_train_step_on_a_mesh_equals_one_device(toy, axes, remat):
    toy, mesh = toy.replace(remat=remat), make_mesh(MeshConfig(**axes))
    model, optimizer = HybridLM(toy), adamw(OptimizerConfig(total_steps=10))
    create = lambda key: init_state(model, optimizer, key)
    state = jax.jit(create)(jax.random.key(0))
    batch = {
        "tokens": jax.random.randint(jax.random.key(1), (4, 14), 0, 64),
        "segment_ids": jnp.ones((4, 14), jnp.int32).at[1, 5:].set(2).at[2, 9:].set(0),
    }
    shardings = parameter_shardings(state, mesh)
    sharded_state = jax.device_put(state, shardings)
    assert len(sharded_state.params["embedding"].sharding.device_set) == 8
    experts = sharded_state.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]["expert_gate"]
    assert experts.addressable_shards[0].data.shape[2] == toy.moe.experts // axes.get("expert", 1)
    sharded_batch = jax.device_put(batch, batch_sharding(mesh))
    step = make_train_step(model, optimizer)
    single, metrics = jax.jit(step)(state, batch)
    on_mesh, mesh_metrics = jax.jit(step, out_shardings=(shardings, None))(sharded_state, sharded_batch)
    np.testing.assert_allclose(mesh_metrics["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(mesh_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-4)
    np.testing.assert_array_equal(mesh_metrics["expert_load"], metrics["expert_load"])
    for a, b in zip(jax.tree.leaves(on_mesh.router_state), jax.tree.leaves(single.router_state), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    mu = [s.opt_state[0].mu for s in (on_mesh, single)]  # a tenth of the clipped gradient
    for a, b in zip(jax.tree.leaves(mu[0]), jax.tree.leaves(mu[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(float(jnp.abs(b).max()), 1e-6))


def test_caches_are_sharded_by_rows_and_heads():
    """One decoding step of a KDA layer on sharded rows and heads gives the state of one device, and keeps its sharding."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    module = KimiDeltaAttention(KDAConfig(heads=2, key_dim=4, value_dim=4))
    x = jax.random.normal(jax.random.key(0), (4, 5, 8))
    variables = module.init(jax.random.key(1), x)
    step = jax.jit(lambda v, x, state: module.apply(v, x, state=state, return_state=True))
    _, state = module.apply(variables, x, return_state=True)
    cache = {"kda": state, "mla": {"latent": jnp.ones((4, 9, 6)), "shared_key": jnp.ones((3, 4, 9, 2))}}
    shardings = cache_shardings(cache, mesh)
    rows = ("data", "fsdp", "expert")
    assert shardings["kda"].recurrent.spec == jax.P(rows, "tensor", None, None)
    assert shardings["mla"]["shared_key"].spec == jax.P(None, rows, None, None)
    placed = jax.device_put(cache, shardings)["kda"]
    wanted, got = (step(variables, x[:, :1], s) for s in (state, placed))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, wanted)
    assert got[1].recurrent.sharding.is_equivalent_to(shardings["kda"].recurrent, 4)
    with pytest.raises(ValueError, match=r"cache leaf .*other"):
        cache_shardings({"other": jnp.ones(3)}, mesh)
