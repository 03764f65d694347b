"""Prefill and decoding steps with weights and cache sharded over 8 devices: one device's numbers, shards where the table puts them.

Public case M7's decode_step. Shapes: B rows, T tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.infer import decode_step, init_cache, prefill, prefill_chunk, prepare
from moejax.parallel import MeshConfig, make_mesh, parameter_shardings
from moejax.parallel.axes import cache_shardings
from moejax.parallel.layers import ModelParallel

TOKENS = np.random.default_rng(0).integers(1, 64, (8, 24)).astype(np.int32)
COUNTS = np.array([16, 3, 9, 16, 1, 0, 12, 7], np.int32)
ACTIVE = jnp.array([True, True, False, True, True, True, False, True])


@pytest.fixture(scope="module")
def config(short_toy):
    """Heads and experts that the meshes divide."""
    return short_toy.replace(kda={"heads": 4}, mla={"heads": 4}, moe={"experts": 8})


@pytest.fixture(scope="module")
def variables(config, drawn):
    return drawn(HybridLM(config))


def run(model, variables, place):
    """Two ragged chunks and three decoding steps: logits [5,B,V], experts of the last step, the cache."""
    weights = prepare(model, variables)
    cache = place(init_cache(model.config, 8, 32, dtype="float32"))
    chunk = jax.jit(prefill_chunk, donate_argnames="cache")
    step = jax.jit(decode_step, donate_argnames="cache", static_argnames="return_experts")
    logits = []
    for start in (0, 8):
        given = chunk(weights, cache, TOKENS[:, start : start + 8], np.clip(COUNTS - start, 0, 8))
        logits.append(given.logits)
        cache = given.cache
    for index in range(3):
        given = step(weights, cache, TOKENS[:, 16 + index], active=ACTIVE, return_experts=True)
        logits.append(given.logits)
        cache = given.cache
    return np.stack(logits), np.asarray(given.experts), cache


@pytest.fixture(scope="module")
def alone(config, variables):
    return run(HybridLM(config), variables, lambda cache: cache)


MESHES = [
    MeshConfig(data=2, expert=2, tensor=2),
    pytest.param(MeshConfig(fsdp=2, expert=4), marks=pytest.mark.slow),
    pytest.param(MeshConfig(expert=2, sequence=2, tensor=2), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_a_mesh_gives_the_numbers_of_one_device(config, variables, alone, shape):
    mesh = make_mesh(shape)
    placed = jax.device_put(variables, {name: parameter_shardings(part, mesh) for name, part in variables.items()})
    model, place = HybridLM(config, parallel=ModelParallel(mesh)), lambda cache: jax.device_put(cache, cache_shardings(cache, mesh))
    logits, experts, cache = run(model, placed, place)
    assert np.abs(logits - alone[0]).max() <= 1e-5 * np.abs(alone[0]).max()
    np.testing.assert_array_equal(experts, alone[1])
    assert cache.lengths.tolist() == alone[2].lengths.tolist() == (COUNTS + 3 * np.asarray(ACTIVE)).tolist()
    for leaf, sharding in zip(jax.tree.leaves(cache), jax.tree.leaves(cache_shardings(cache, mesh)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.shape, leaf.sharding)


def test_what_a_mesh_cannot_do_is_said(config, variables):
    mesh = make_mesh(MeshConfig(data=2, expert=2, tensor=2))
    weights = prepare(HybridLM(config, parallel=ModelParallel(mesh)), variables)
    with pytest.raises(ValueError, match="rows and a mesh that cuts rows exclude each other"):
        prefill_chunk(weights, init_cache(config, 8, 32, dtype="float32"), TOKENS[:1, :8], COUNTS[:1], rows=jnp.array([3]))
    with pytest.raises(ValueError, match=r"6 rows over 4 parts"):
        prefill(weights, TOKENS[:6], init_cache(config, 6, 32, dtype="float32"))
