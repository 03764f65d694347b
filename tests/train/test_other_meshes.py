"""Reliability bar, point 1: a state saved on one mesh goes on, on three others, as if nothing had happened."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.parallel import MeshConfig, ModelParallel, batch_sharding, make_mesh, parameter_shardings
from moejax.train import OptimizerConfig, adamw, init_state, make_train_step
from moejax.train.checkpoint import Checkpointer

OPTIMIZER = adamw(OptimizerConfig(learning_rate=1e-2, total_steps=20))
MESHES = {"data 8": {"data": 8}, "fsdp 4, expert 2": {"fsdp": 4, "expert": 2}, "one device": {}}


@pytest.fixture(scope="module")
def config(toy):
    return toy.replace(layers=2, pattern="KM", dense_layers=0, residual="plain")


class OnMesh:
    def __init__(self, config, axes):
        self.mesh = make_mesh(MeshConfig(**axes)) if axes else None
        self.model = HybridLM(config, parallel=None if self.mesh is None else ModelParallel(self.mesh))
        self.shapes = jax.eval_shape(self.create, jax.random.key(0))
        self.shardings = None if self.mesh is None else parameter_shardings(self.shapes, self.mesh)
        replicated = None if self.mesh is None else (self.shardings, jax.NamedSharding(self.mesh, jax.P()))
        self.step = jax.jit(make_train_step(self.model, OPTIMIZER), out_shardings=replicated)

    def create(self, key):
        return init_state(self.model, OPTIMIZER, key)

    def template(self):
        if self.shardings is None:
            return self.shapes
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.shapes, self.shardings)

    def train(self, state, first, count):
        losses = []
        for i in range(first, first + count):
            tokens = jax.random.randint(jax.random.key(i), (8, 16), 0, 64)
            batch = {"tokens": tokens, "segment_ids": jnp.ones((8, 16), jnp.int32).at[3, 9:].set(2).at[5, 7:].set(0)}
            if self.mesh is not None:
                batch = jax.device_put(batch, batch_sharding(self.mesh))
            state, metrics = self.step(state, batch)
            losses.append(float(metrics["loss"]))
        return state, losses


def words(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def saved(config, tmp_path_factory):
    """Two steps on data 2 x fsdp 2 x expert 2, saved; and the losses of the next five there."""
    folder = tmp_path_factory.mktemp("meshes")
    run = OnMesh(config, {"data": 2, "fsdp": 2, "expert": 2})
    state = jax.jit(run.create, out_shardings=run.shardings)(jax.random.key(0))
    state, _ = run.train(state, 0, 2)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(2, state, {"step": 2})
    return folder, words(state), run.train(state, 2, 5)[1]


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_restored_on_another_mesh_bit_for_bit_and_the_losses_go_on(config, saved, axes):
    folder, expected, losses = saved
    run = OnMesh(config, axes)
    with Checkpointer(folder) as checkpoints:
        state, metadata = checkpoints.restore(run.template())
    assert metadata == {"step": 2} and int(state.step) == 2
    for a, b in zip(words(state), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(run.train(state, 2, 5)[1], losses, rtol=0, atol=1e-5)
