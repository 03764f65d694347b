"""Muon inside the train step of a whole model: it learns, and a mesh gives one device's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.parallel import MeshConfig, batch_sharding, make_mesh, parameter_shardings
from moejax.parallel.layers import ModelParallel
from moejax.train import OptimizerConfig, init_state, make_train_step
from moejax.train.optimizers import make_optimizer

STEPS = 6


@pytest.mark.slow
def test_learns_alike_on_a_mesh(toy):
    """Six steps on one batch: the loss falls, and on fsdp 2 x expert 2 x tensor 2 losses and weights are those of one device."""
    config = toy.replace(dtype="float32", kda={"value_heads": None}, moe={"experts": 8})
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    batch = {
        "tokens": jax.random.randint(jax.random.key(4), (4, 16), 0, 64),
        "segment_ids": jnp.asarray(np.repeat([[1] * 9 + [2] * 7], 4, axis=0), jnp.int32),
    }
    results = []
    for parallel in (None, ModelParallel(mesh)):
        model = HybridLM(config, parallel=parallel)
        optimizer = make_optimizer(OptimizerConfig(kind="muon", learning_rate=1e-2, total_steps=20), parallel)
        state = jax.jit(lambda key, model=model, optimizer=optimizer: init_state(model, optimizer, key))(jax.random.key(0))
        given, shardings = batch, None
        if parallel is not None:
            shardings = parameter_shardings(state, mesh)
            state, given = jax.device_put(state, shardings), jax.device_put(batch, batch_sharding(mesh))
            shardings = (shardings, jax.NamedSharding(mesh, jax.P()))
        step, losses = jax.jit(make_train_step(model, optimizer), out_shardings=shardings), []
        for _ in range(STEPS):
            state, metrics = step(state, given)
            losses.append(float(metrics["loss"]))
        results.append((losses, state.params))
    (alone, params), (spread, sharded) = results
    assert alone[-1] < alone[0] - 0.3
    np.testing.assert_allclose(spread, alone, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(sharded), strict=True):
        # The iteration multiplies the rounding of small singular directions by up to 3.44^5 = 485 an update.
        np.testing.assert_allclose(b, a, atol=2e-3 * float(jnp.abs(a).max()))
