"""Newton-Schulz: the polynomial, and stacks of matrices spread over meshes of 8 devices."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.parallel import MeshConfig, make_mesh, parameter_shardings
from moejax.parallel.layers import ModelParallel
from moejax.train.newton_schulz import QUINTIC, Spread, choose_spread, newton_schulz
from moejax.train.optimizers import OptimizerConfig, make_optimizer

SHAPES = {
    "q_proj": (2, 3, 16, 4, 8),
    "out_proj": (2, 3, 4, 8, 16),
    "gate_proj": (1, 1, 16, 40),
    "expert_gate": (2, 3, 8, 16, 12),
    "expert_down": (2, 3, 8, 12, 16),
    "weight": (2, 3, 16),
}
"""24 heads' blocks, 6 whole matrices (fewer than the devices), one alone, 48 + 48 experts of one size, and AdamW's."""
LONE = 16 * 40
MESHES = {
    "fsdp": MeshConfig(fsdp=8),
    "fsdp-expert-tensor": MeshConfig(fsdp=2, expert=2, tensor=2),
    "data-fsdp": MeshConfig(data=2, fsdp=4),
}
COUNTS = {  # all-to-alls go there and back for each mesh axis that shards a kind of matrix
    "fsdp": {"all-to-all": 6, "all-gather": 1},
    "fsdp-expert-tensor": {"all-to-all": 10, "all-gather": 3},
    "data-fsdp": {"all-to-all": 6, "all-gather": 3},
}
"""The lone matrix is gathered over each axis that shards it; the results of what devices share are gathered too."""


def tree(seed):
    rng = np.random.default_rng(seed)
    return {"layer": {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}}


@pytest.fixture(scope="module")
def one_device():
    optimizer = make_optimizer(OptimizerConfig(kind="muon"))
    return jax.jit(optimizer.update)(tree(1), optimizer.init(tree(0)), tree(0))


def compiled_update(mesh, parallel):
    """-> (the program, its arguments) with everything sharded as parameters are."""
    optimizer = make_optimizer(OptimizerConfig(kind="muon"), parallel)
    place = lambda values: jax.device_put(values, parameter_shardings(values, mesh))
    params, grads = place(tree(0)), place(tree(1))
    state = place(optimizer.init(params))
    shardings = (parameter_shardings(params, mesh), parameter_shardings(state, mesh))
    return jax.jit(optimizer.update, out_shardings=shardings).lower(grads, state, params).compile(), (grads, state, params)


def collectives(text):
    """[(name, elements that a device receives or holds)] of a compiled program."""
    found = []
    for line in text.splitlines():
        match = re.search(r"= (.*?) (all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)(?:-start)?\(", line)
        if match:
            shapes = re.findall(r"f32\[([\d,]*)\]", match[1])
            found.append((match[2], sum(math.prod(map(int, shape.split(","))) for shape in shapes)))
    return found


@pytest.mark.parametrize("name", MESHES)
def test_sharded_is_unsharded(one_device, name):
    """PaddleFleet PR 1704: updates and state are those of one device, on every mesh."""
    mesh = make_mesh(MESHES[name])
    program, arguments = compiled_update(mesh, ModelParallel(mesh))
    got = jax.tree.leaves(program(*arguments))
    for (path, want), have in zip(jax.tree_util.tree_leaves_with_path(one_device), got, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-5 * float(np.abs(want).max()), err_msg=str(path))
    found = collectives(program.as_text())
    assert collections.Counter(kind for kind, _ in found) == COUNTS[name]
    # A device gathers its own shard at most (both kinds of experts go together), or the one matrix that has no others.
    experts = arguments[0]["layer"]["expert_gate"]
    shard = 2 * math.prod(experts.sharding.shard_shape(experts.shape))
    assert max(size for kind, size in found if kind == "all-gather") <= max(LONE, shard) < 2 * experts.size


def test_what_the_compiler_would_do():
    """goodfire-ai/spd PR 978: without the exchange every device gathers whole stacks. This is what the counts above exclude."""
    mesh = make_mesh(MESHES["fsdp"])
    found = collectives(compiled_update(mesh, None)[0].as_text())
    assert len(found) > 2 * sum(COUNTS["fsdp"].values())
    assert max(size for kind, size in found if kind == "all-gather") >= math.prod(SHAPES["q_proj"])


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (4, 9), (9, 4)])
def test_the_polynomial_on_singular_values(rows, columns, x64):
    """In float64: the singular vectors stay, each singular value over the matrix's own norm goes through the polynomial.

    marin #8621: matrices 10 orders of magnitude apart in one stack; one common norm would leave the small ones at 0.
    """
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(3, rows, columns)) * np.array([1e-5, 1.0, 1e5])[:, None, None]
    u, s, v = np.linalg.svd(x, full_matrices=False)
    for steps in (1, 5):
        values = s / (np.sqrt((s**2).sum(1, keepdims=True)) + 1e-8)
        for _ in range(steps):
            values = sum(factor * values**power for factor, power in zip(QUINTIC, (1, 3, 5), strict=True))
        got = jax.jit(functools.partial(newton_schulz, steps=steps))(jnp.asarray(x))
        np.testing.assert_allclose(got, (u * values[:, None]) @ v, atol=1e-11)


def test_zeros_and_rounded_operands():
    """A matrix of zeros stays one. bfloat16 operands: within 2 steps of 2^-8 or so an iteration; the result is float32."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16, 24)), jnp.float32).at[1].set(0)
    exact = newton_schulz(x)
    np.testing.assert_array_equal(exact[1], 0)
    rounded = newton_schulz(x, matmul_dtype="bfloat16")
    assert rounded.dtype == jnp.float32
    assert 1e-4 < float(jnp.abs(rounded - exact).max() / jnp.abs(exact).max()) < 0.05


@pytest.mark.parametrize(
    ("count", "spread"),
    [
        (64, Spread((("fsdp", 1), ("tensor", 2)), (), ("data",))),  # 8 matrices a device
        (7, Spread((("fsdp", 1), ("tensor", 2)), (), ())),  # fewer than 8 devices: not shared over data
        (3, Spread((("fsdp", 1), ("tensor", 2)), (), ())),  # 2 a device after fsdp: tensor halves that
        (2, Spread((("fsdp", 1),), (("tensor", 2),), ())),  # one a device after fsdp
        (1, Spread((), (("fsdp", 1), ("tensor", 2)), ())),  # nothing to divide
    ],
)
def test_choice_of_the_spread(count, spread):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert choose_spread(count, ("fsdp",), ("tensor",), ("data",), mesh) == spread


def test_shardings_of_a_model_and_its_state(toy):
    """Every leaf of a model's optimizer state has a sharding: its parameter's, and counts are replicated."""
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    optimizer = make_optimizer(OptimizerConfig(kind="muon"), ModelParallel(mesh))
    params = jax.eval_shape(HybridLM(toy).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    state = jax.eval_shape(optimizer.init, params)
    specs = {}
    for tree in (params, state):
        for path, sharding in jax.tree_util.tree_leaves_with_path(parameter_shardings(tree, mesh)):
            name = getattr(path[-1], "key", "count")
            assert specs.setdefault((name, len(sharding.spec)), sharding.spec) == sharding.spec
    assert specs["count", 0] == jax.P()
    updates, _ = jax.eval_shape(optimizer.update, params, state, params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
