"""A gradient that is not finite in one element of one leaf, the loss being fine: the update is skipped as if the batch had not been.

Point 6 of the reliability bar. The token at the front of a micro-batch switches the fault on, inside the compiled step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.ops import BalanceStrength
from moejax.parallel import MeshConfig, ModelParallel, batch_sharding, make_mesh, parameter_shardings
from moejax.train import OptimizerConfig, adamw, init_state, make_train_step

FAULTS = {"nan": (60, np.nan), "inf": (61, np.inf), "minus inf": (62, -np.inf)}
OPTIMIZER = adamw(OptimizerConfig(learning_rate=1e-2, total_steps=20))


@jax.custom_vjp
def _faulty(leaf, amount):
    """`leaf`; `amount` is added to the gradient of its last element."""
    return leaf


_faulty.defvjp(
    lambda leaf, amount: (leaf, amount),
    lambda amount, grad: (grad.reshape(-1).at[-1].add(amount.astype(grad.dtype)).reshape(grad.shape), jnp.zeros_like(amount)),
)


class FaultyModel:
    """A model whose backward pass goes wrong in the embedding when a micro-batch begins with one of the tokens above."""

    def __init__(self, model):
        self.model, self.config, self.parallel = model, model.config, model.parallel

    def apply(self, variables, tokens, *arguments, **options):
        amount = sum(jnp.where(tokens[0, 0] == token, value, 0.0) for token, value in FAULTS.values())
        params = variables["params"]
        params = {**params, "embedding": _faulty(params["embedding"], amount)}
        return self.model.apply({**variables, "params": params}, tokens, *arguments, **options)


@pytest.fixture(scope="module")
def shallow(toy):
    return toy.replace(layers=1, pattern="M", dense_layers=0, residual="plain")


def batches(rows):
    """A sound batch of two micro-batches, and those whose second one is at fault: [2,rows,18]."""
    tokens = np.random.default_rng(0).integers(1, 60, (2, rows, 18), dtype=np.int32)
    sound = {"tokens": tokens, "segment_ids": np.ones((2, rows, 18), np.int32)}
    faulty = {}
    for name, (token, _) in FAULTS.items():
        bad = tokens.copy()
        bad[1, 0, 0] = token
        faulty[name] = {**sound, "tokens": bad}
    return sound, faulty


def assert_same_bits(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = (np.ascontiguousarray(x).tobytes() for x in (a, b))
        assert a == b, jax.tree_util.keystr(path)


def check(step, state, sound, faulty):
    """One sound step, each fault, and a sound step after them."""
    state, metrics = step(state, sound)
    assert int(metrics["skipped"]) == 0
    want, _ = step(state, sound)  # what comes next without the faults
    before, skipped = state, int(state.skipped)
    assert jax.tree.leaves(state.router_state) and any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state.router_state))
    for number, batch in enumerate(faulty.values(), 1):
        state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"])) and not np.isfinite(float(metrics["grad_norm"]))
        assert int(metrics["skipped"]) == 1 and int(state.skipped) == skipped + number
        assert int(state.step) == int(before.step) + number
        for name in ("params", "opt_state", "router_state", "balance"):
            assert_same_bits(getattr(state, name), getattr(before, name))
    state, metrics = step(state, sound)
    assert int(metrics["skipped"]) == 0
    for name in ("params", "opt_state", "router_state"):
        assert_same_bits(getattr(state, name), getattr(want, name))
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*map(jax.tree.leaves, (state.params, before.params)), strict=True))


def start(model):
    return jax.jit(lambda key: init_state(model, OPTIMIZER, key, balance=BalanceStrength.create()))(jax.random.key(0))


def test_a_fault_in_one_element_skips_the_step(shallow):
    model = HybridLM(shallow)
    check(jax.jit(make_train_step(FaultyModel(model), OPTIMIZER)), start(model), *batches(2))


@pytest.mark.slow
def test_a_fault_on_one_of_8_devices_skips_the_step_on_all(shallow):
    """data 2, expert 2, sequence 2: the faulty element lies on some of the devices; no shard of any leaf moves."""
    mesh = make_mesh(MeshConfig(data=2, expert=2, sequence=2))
    model = HybridLM(shallow, parallel=ModelParallel(mesh))
    state = start(HybridLM(shallow))
    shardings = parameter_shardings(state, mesh)
    place = lambda batch: jax.device_put(batch, batch_sharding(mesh, micro_batches=True))
    sound, faulty = batches(8)
    with jax.set_mesh(mesh):
        step = jax.jit(make_train_step(FaultyModel(model), OPTIMIZER), out_shardings=(shardings, None))
        check(step, jax.device_put(state, shardings), place(sound), {name: place(batch) for name, batch in faulty.items()})
