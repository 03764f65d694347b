"""The replay probe: one flipped bit anywhere is found and named; a sound step passes without a trace."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.train.replay import ReplayMismatch, ReplayProbe, differing, digests, leaf_names


def plain_digest(array):
    """The definition, one element after the other, in Python integers."""
    array = np.ascontiguousarray(array)
    words = array.view(np.uint32) if array.dtype.itemsize >= 4 else array.view(f"uint{8 * array.dtype.itemsize}")
    total = 0
    for position, word in enumerate(words.reshape(-1).tolist()):
        x = (word + 0x9E3779B1 * (position + 1)) % 2**32
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        total += x ^ (x >> 16)
    return total % 2**32


LEAVES = {
    "float32": np.random.default_rng(0).normal(size=(3, 5, 2)).astype(np.float32),
    "bfloat16": np.asarray(jnp.linspace(-3, 3, 12, dtype=jnp.bfloat16)).reshape(4, 3),
    "float8": np.asarray(jnp.linspace(-3, 3, 6, dtype=jnp.float8_e4m3fn)),
    "int32": np.arange(7, dtype=np.int32),
    "int8": np.arange(-3, 3, dtype=np.int8),
    "bool": np.array([True, False, True]),
    "scalar": np.float32(2.5),
    "empty": np.zeros((0, 3), np.float32),
}


def test_digest_is_the_definition():
    got = np.asarray(digests(LEAVES))
    assert got.dtype == np.uint32
    for name, value in zip(sorted(LEAVES), got.tolist(), strict=True):
        assert value == plain_digest(LEAVES[name]), name
    assert leaf_names(LEAVES) == [f"['{name}']" for name in sorted(LEAVES)]


def test_digest_of_64_bits(x64):
    wide = np.random.default_rng(1).normal(size=(2, 3))
    assert np.asarray(digests([wide, np.int64(2**40)])).tolist() == [plain_digest(wide), plain_digest(np.int64(2**40))]


def test_digest_of_keys():
    assert np.asarray(digests(jax.random.key(0)))[0] != np.asarray(digests(jax.random.key(1)))[0]
    assert np.asarray(digests({})).shape == (0,)


def test_every_flipped_bit_is_seen():
    array = np.linspace(-1, 1, 6, dtype=np.float32)
    flipped = np.repeat(array[None], 6 * 32, 0)
    bits = flipped.view(np.uint32)
    for case in range(6 * 32):
        bits[case, case // 32] ^= np.uint32(1 << (case % 32))
    seen = jax.jit(jax.vmap(lambda x: digests([x])[0]))(np.concatenate([array[None], flipped]))
    assert len(set(np.asarray(seen).tolist())) == 6 * 32 + 1


def test_swaps_and_signs_are_seen():
    """x and -x differ in the highest bit only: a plain weighted sum of bits would miss their exchange."""
    array = np.array([[1.0, -1.0, 0.0], [-0.0, np.nan, 2.0]], np.float32)
    seen = {int(digests([array])[0])}
    for a in range(6):
        for b in range(a):
            other = array.reshape(-1).copy()
            other[[a, b]] = other[[b, a]]
            seen.add(int(digests([other.reshape(2, 3)])[0]))
    assert len(seen) == 16
    assert int(digests([array.T.copy()])[0]) not in seen


def test_digest_does_not_depend_on_the_sharding():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    array = np.random.default_rng(2).normal(size=(8, 6)).astype(np.float32)
    narrow = jnp.asarray(array, jnp.bfloat16)
    want = np.asarray(digests([array, narrow]))
    for spec in (PartitionSpec("a", "b"), PartitionSpec(None, "b"), PartitionSpec(("a", "b"), None), PartitionSpec()):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (array, narrow)]
        np.testing.assert_array_equal(digests(placed), want)


@jax.jit
def _update(state, batch):
    grads = jax.grad(lambda w: jnp.sum((batch["x"] @ w["in"] @ w["out"] - 1) ** 2))(state["params"])
    params = jax.tree.map(lambda w, g: w - 0.01 * g, state["params"], grads)
    return {"params": params, "step": state["step"] + 1, "key": state["key"]}, {"loss": jnp.sum(grads["in"])}


donating = jax.jit(_update, donate_argnums=0)


def start(sharding=None):
    rng = np.random.default_rng(3)
    make = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32), sharding)
    return {"params": {"in": make(8, 8), "out": make(8, 8)}, "step": jnp.int32(0), "key": jax.random.key(5)}, {"x": make(8, 8)}


def flip(array, word, bit):
    """Flip one bit in the memory of a device array, behind JAX's back, as a fault would."""
    buffer = array.addressable_shards[0].data
    ctypes.c_uint32.from_address(buffer.unsafe_buffer_pointer() + 4 * word).value ^= 1 << bit


@pytest.mark.parametrize("step_function", [_update, donating])
def test_a_sound_step_passes(step_function):
    events = []
    state, batch = start()
    want, _ = start()
    probe = ReplayProbe(step_function, every=2, record=events.append)
    for step in range(1, 6):
        state, metrics = probe(step, state, batch)
        want, want_metrics = _update(want, batch)
    assert probe.probes == 2 and probe.mismatches == 0 and events == []
    np.testing.assert_array_equal(digests((state, metrics)), digests((want, want_metrics)))


@pytest.mark.parametrize("bit", [0, 31])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_bit_flipped_in_a_weight_between_the_runs_is_named(bit, sharded):
    """Donating step; the bit flips in the memory of the weight after the first run."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    state, batch = start(NamedSharding(mesh, PartitionSpec("x")) if sharded else None)
    weight, events, calls = state["params"]["out"], [], []

    def step(state, batch):
        result = donating(state, batch)
        if not calls:
            jax.block_until_ready(result)
            flip(weight, 3, bit)
        calls.append(1)
        return result

    probe = ReplayProbe(step, every=5, record=events.append)
    with pytest.raises(ReplayMismatch, match=r"step 5.*\['params'\]\['out'\] of the state changed.*memory fault") as caught:
        probe(5, state, batch)
    assert caught.value.changed == ("['params']['out']",)
    assert events[0]["event"] == "replay_mismatch" and events[0]["step"] == 5
    assert events[0]["changed"] == ["['params']['out']"] and events[0]["changed_count"] == 1
    assert "['params']['in']" in events[0]["leaves"] or bit == 0  # the lowest bit may round away in the other weight


def test_a_wrong_result_is_named_and_may_be_recorded_only():
    """The computing goes wrong, the input does not: one leaf of the second result."""

    def faulty():
        calls = []

        def step(state, batch):
            state, metrics = _update(state, batch)
            calls.append(1)
            if len(calls) == 2:
                jax.block_until_ready(state)
                flip(state["params"]["in"], 63, 7)
            return state, metrics

        return step

    events = []
    state, batch = start()
    with pytest.raises(ReplayMismatch, match=r"results differ in \['params'\]\['in'\]"):
        ReplayProbe(faulty(), every=1, record=events.append)(1, state, batch)
    probe = ReplayProbe(faulty(), every=1, record=events.append, on_mismatch="record")
    result, _ = probe(1, state, batch)
    assert int(result["step"]) == 1 and probe.mismatches == 1
    assert [event["leaves"] for event in events] == [["['params']['in']"]] * 2 and events[0]["changed"] == []


def test_metrics_and_batch_are_compared_too():
    calls, events = [], []
    state, batch = start()

    def step(state, batch):
        calls.append(1)
        state, metrics = _update(state, batch)
        return state, metrics | {"loss": metrics["loss"] + len(calls)}

    with pytest.raises(ReplayMismatch, match=r"metrics\['loss'\]"):
        ReplayProbe(step, every=1, record=events.append)(1, state, batch)
    calls.clear()

    def overwrites(state, batch):
        result = _update(state, batch)
        if not calls:
            jax.block_until_ready(result)
            flip(batch["x"], 0, 30)
        calls.append(1)
        return result

    with pytest.raises(ReplayMismatch) as caught:
        ReplayProbe(overwrites, every=1, record=events.append)(1, state, batch)
    assert caught.value.changed == ("batch['x']",)


def test_the_copy_keeps_its_sharding_and_both_runs_share_one_compile():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    state, batch = start(NamedSharding(mesh, PartitionSpec("x")))
    seen = []
    step = jax.jit(lambda state, batch: _update.__wrapped__(state, batch), donate_argnums=0)

    def noting(state, batch):
        seen.append(state["params"]["in"].sharding)
        return step(state, batch)

    ReplayProbe(noting, every=1, record=lambda event: None)(1, state, batch)
    assert seen[0] == seen[1] and step._cache_size() == 1  # pyright: ignore[reportAttributeAccessIssue]


def test_event_lists_a_bounded_number_of_leaves():
    events = []
    state, batch = {str(i): jnp.float32(i) for i in range(40)}, jnp.zeros(1)
    calls = []

    def step(state, batch):
        calls.append(1)
        return jax.tree.map(lambda x: x + len(calls), state), {}

    with pytest.raises(ReplayMismatch, match="and 37 more"):
        ReplayProbe(step, every=1, record=events.append)(1, state, batch)
    assert len(events[0]["leaves"]) == 16 and events[0]["leaves_count"] == 40
    assert differing(state, np.zeros(40), np.zeros(40)) == []


@pytest.mark.parametrize(
    ("settings", "message"), [({"every": 0}, "every is 0"), ({"every": 1, "on_mismatch": "ignore"}, "must be 'raise'")]
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ReplayProbe(_update, record=lambda event: None, **settings)
