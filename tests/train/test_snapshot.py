"""Snapshots in host memory: exact, untouched by what training does to its buffers, back on any placement."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moejax.train.snapshot import Snapshots

P = PartitionSpec


def _mesh(*sizes):
    return jax.sharding.Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("x", "y"))


def _state(mesh=None):
    place = lambda array, spec: array if mesh is None else jax.device_put(array, NamedSharding(mesh, spec))
    params = {
        "both": place(jnp.arange(64.0).reshape(8, 8), P("x", "y")),
        "one": place(jnp.arange(24.0, dtype=jnp.bfloat16).reshape(8, 3), P("y")),
        "copies": place(jnp.arange(5.0), P()),
    }
    return {
        "params": params,
        "moments": optax.scale_by_adam().init(params),
        "key": place(jax.random.key(3, impl="rbg"), P()),
        "step": place(jnp.int32(16777217), P()),
        "empty": jnp.zeros((0, 2)),
    }


def _words(tree):
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.array(plain(x)) for x in jax.tree.leaves(tree)]


def _same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [x.dtype for x in jax.tree.leaves(a)] == [x.dtype for x in jax.tree.leaves(b)]
    return all(x.tobytes() == y.tobytes() for x, y in zip(_words(a), _words(b), strict=True))


@pytest.mark.parametrize("sizes", [None, (2, 4)], ids=["one device", "mesh"])
def test_a_snapshot_outlives_donation_twice(sizes):
    """Taken, trained on with donated buffers, restored, trained on again: each time the very bits, where they were."""
    state = _state(None if sizes is None else _mesh(*sizes))
    want, places = _words(state), [x.sharding for x in jax.tree.leaves(state)]
    train = jax.jit(
        lambda tree: jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x + 1, tree), donate_argnums=0
    )
    held = Snapshots(every=10)
    held.take(10, state, {"data": {"position": 7}})
    for _ in range(2):
        jax.block_until_ready(train(train(state)))
        state, metadata = held.restore()
        assert metadata == {"data": {"position": 7}}
        metadata["data"]["position"] = 8  # a caller's own copy
        assert [a.tobytes() for a in _words(state)] == [b.tobytes() for b in want]
        assert [x.sharding for x in jax.tree.leaves(state)] == places
        assert state["params"]["copies"].committed == (sizes is not None)  # committed arrays would compile the step anew
    assert (jax.random.bits(state["key"], (2,)) == jax.random.bits(jax.random.key(3, impl="rbg"), (2,))).all()


def test_it_holds_each_shard_once_and_so_many_snapshots():
    state = _state(_mesh(2, 4))
    one = sum(word.nbytes for word in _words(state))  # the eight replicas of `copies` count once
    held = Snapshots(every=5, keep=2)
    for step in (5, 10, 15):
        held.take(step, state)
    assert held.steps() == [10, 15] and held.latest_step() == 15 and held.nbytes == 2 * one and held.seconds > 0
    assert [step for step in range(1, 16) if held.due(step)] == [5, 10, 15]
    held.take(12, state)  # after a rollback to 10 the snapshot of 15 is of a branch that was left
    assert held.steps() == [10, 12]
    held.take(12, state)
    assert held.steps() == [10, 12]
    held.rewind(11)
    assert held.steps() == [10] and held.nbytes == one


def test_it_goes_back_on_another_mesh():
    state = _state(_mesh(2, 4))
    held = Snapshots(every=1)
    held.take(1, state)
    for sizes in ((4, 2), (8, 1), (1, 1)):
        whole, turned = (NamedSharding(_mesh(*sizes), spec) for spec in (P(), P("y", "x")))
        template = jax.tree.map(lambda x, whole=whole: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)
        template["params"]["both"] = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=turned)
        restored, _ = held.restore(template)
        assert _same(restored, state) and restored["params"]["both"].sharding.spec == P("y", "x")


def test_what_does_not_fit_is_refused_by_name():
    held = Snapshots(every=1)
    with pytest.raises(ValueError, match=r"no snapshot of step None; there are \[\]"):
        held.restore()
    held.take(3, {"a": jnp.zeros(3), "b": jnp.zeros(2), "gone": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"no snapshot of step 2; there are \[3\]"):
        held.restore(step=2)
    with pytest.raises(ValueError, match="the snapshot of step 3 does not fit: 3 leaves differ") as error:
        held.restore({"a": jnp.zeros(4), "b": jnp.zeros(2, jnp.int32), "gone": jnp.zeros(1), "new": jnp.zeros(1)})
    for line in (
        "a: saved float32[3], expected float32[4]",
        "b: saved float32[2], expected int32[2]",
        "new: expected float32[1], not saved",
    ):
        assert line in str(error.value)
    for options in ({"every": 0}, {"every": 1, "keep": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            Snapshots(**options)
    with pytest.raises(ValueError, match="leaf a is int"):
        held.take(4, {"a": 3})
    with pytest.raises(ValueError, match="metadata"):
        held.take(4, {"a": jnp.zeros(1)}, {"x": float("nan")})
    assert held.steps() == [3]  # what was there stays


def test_a_numpy_leaf_is_copied():
    array = np.arange(4.0, dtype=np.float32)
    held = Snapshots(every=1)
    held.take(1, {"a": array})
    array[:] = -1
    assert np.asarray(held.restore()[0]["a"]).tolist() == [0, 1, 2, 3]
