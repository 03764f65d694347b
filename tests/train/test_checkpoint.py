"""Saving and restoring in one process: exactness, what is refused, and what happens in the background."""

import os
import resource
import subprocess
import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.train import checkpoint_files as files
from moejax.train.checkpoint import Checkpointer, CheckpointError


def _state(value=1.0):
    block = {"w": jnp.full((3, 4), float(value)), "b/c": jnp.arange(5, dtype=jnp.bfloat16)}
    params = {"block": block, "list": [jnp.float32(0)]}
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "key": jax.random.key(7),
        "rbg": jax.random.split(jax.random.key(7, impl="rbg"), 2),
        "step": jnp.int32(value),
        "empty": jnp.zeros((0, 2)),
        "nothing": None,
    }


def _assert_same(a, b):
    chex.assert_trees_all_equal_structs(a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def _save_all(folder, steps, **options):
    with Checkpointer(folder, **options) as writer:
        for step in steps:
            writer.save(step, _state(step), {"step": step})


class Gate:
    """Holds every write just before its list of files, until it is opened."""

    def __init__(self, monkeypatch):
        self.reached, self.open = threading.Event(), threading.Event()
        write = files.write_files_list

        def held(*args, **kwargs):
            self.reached.set()
            assert self.open.wait(120)
            return write(*args, **kwargs)

        monkeypatch.setattr(files, "write_files_list", held)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def test_round_trip_is_exact_and_the_newest_are_kept(tmp_path):
    metadata = {"nested": {"text": "ü", "list": [1, 2.5, None]}}
    with Checkpointer(tmp_path / "run", keep=2) as writer:
        assert writer.latest_step() is None and writer.steps() == []
        for step in (3, 5, 8):
            writer.save(step, _state(step), {"step": step, **metadata})
    reader = Checkpointer(tmp_path / "run")
    assert reader.steps() == [5, 8] and reader.latest_step() == 8
    state, read = reader.restore(_state(0.0))
    _assert_same(state, _state(8))
    assert read == reader.metadata() == {"step": 8, **metadata}
    state, _ = reader.restore(jax.eval_shape(lambda: _state(0.0)), step=5)
    _assert_same(state, _state(5))


def test_a_part_is_restored_alone(tmp_path):
    saved = {"params": {"w": jnp.arange(3.0)}, "moments": {"w": jnp.ones(3)}, "rng": jax.random.key(1)}
    with Checkpointer(tmp_path) as writer:
        writer.save(1, saved, {"a": 1})
        part = {"params": {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}}
        state, metadata = writer.restore(part, part=True)
        assert jax.tree.structure(state) == jax.tree.structure(part) and metadata == {"a": 1}
        np.testing.assert_array_equal(state["params"]["w"], np.arange(3.0))
        with pytest.raises(ValueError, match=r"2 leaves differ[^$]*moments.w: saved float32\[3\], not expected"):
            writer.restore(part)
        with pytest.raises(ValueError, match=r"1 leaves differ[^$]*params.new: expected int32.*, not saved"):
            writer.restore({"params": {"new": jnp.zeros(1, jnp.int32)}}, part=True)


def test_every_difference_is_named_at_once(tmp_path):
    with Checkpointer(tmp_path) as writer:
        writer.save(1, {"a": jnp.zeros(3), "b": jnp.zeros(2), "gone": jnp.zeros(1)})
        wanted = {"a": jnp.zeros(4), "b": jnp.zeros(2, jnp.bfloat16), "new": jnp.zeros(1)}
        with pytest.raises(ValueError, match="4 leaves differ") as error:
            writer.restore(wanted)
    for part in (
        "a: saved float32[3], expected float32[4]",
        "b: saved float32[2], expected bfloat16[2]",
        "gone: saved float32[1], not expected",
        "new: expected float32[1], not saved",
    ):
        assert part in str(error.value)


def test_orbax_2972_sixteen_layers_do_not_fit_into_twelve(tmp_path):
    """Layers of their own names, and layers stacked on one axis: both refused, with every leaf that differs."""
    state = lambda layers: {
        "stacked": {"w": jnp.zeros((layers, 2)), "b": jnp.zeros((layers,))},
        **{f"layer_{i}": {"w": jnp.zeros((2, 3))} for i in range(layers)},
        "head": jnp.zeros(5),
    }
    with Checkpointer(tmp_path) as writer:
        writer.save(1, state(16))
        for other, count in ((12, "6 leaves differ (19 saved, 15 expected)"), (20, "6 leaves differ (19 saved, 23 expected)")):
            with pytest.raises(ValueError) as error:
                writer.restore(state(other))
            lines = str(error.value).splitlines()
            assert count in lines[0] and len(lines) == 7
            assert f"  stacked.w: saved float32[16,2], expected float32[{other},2]" in lines
            assert not any("head" in line for line in lines)
        assert "  layer_19.w: expected float32[2,3], not saved" in lines


READ = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
from moejax.train.checkpoint import Checkpointer

folder, out = sys.argv[1:]
params = {"w": jnp.zeros((2, 3)), "low": jnp.zeros(4, jnp.bfloat16)}
like = {"params": params, "opt": optax.adamw(1e-3).init(params), "key": jax.random.key(1),
        "rbg": jax.random.key(1, impl="rbg"), "tokens": jnp.int32(0)}
state, metadata = Checkpointer(folder).restore(like)
assert metadata == {"step": 4}
leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)]
draws = [jax.random.bits(state["key"], (3,)), jax.random.bits(state["rbg"], (3,))]
impls = [str(jax.random.key_impl(state[name])) for name in ("key", "rbg")]
np.savez(out, *[np.asarray(x).view(np.uint8) if x.dtype == jnp.bfloat16 else np.asarray(x) for x in [*leaves, *draws]], impls=impls)
"""


def test_orbax_2540_typed_keys_and_counters_come_back_exact_in_a_new_process(tmp_path):
    """C5: key words and generator, the next draw, int32 16777217 (which float32 cannot hold), and each dtype by leaf name."""
    params = {"w": jnp.arange(6.0).reshape(2, 3) / 7, "low": jnp.arange(4, dtype=jnp.bfloat16) / 3}
    optimizer = optax.adamw(1e-3)
    state = {
        "params": params,
        "opt": optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)[1],
        "key": jax.random.key(0),
        "rbg": jax.random.key(5, impl="rbg"),
        "tokens": jnp.int32(16777217),
    }
    with Checkpointer(tmp_path / "run") as writer:
        writer.save(4, state, {"step": 4})
    command = [sys.executable, "-c", READ, str(tmp_path / "run"), str(tmp_path / "read.npz")]
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)]
    draws = [jax.random.bits(state["key"], (3,)), jax.random.bits(state["rbg"], (3,))]
    with np.load(tmp_path / "read.npz") as read:
        assert list(read["impls"]) == [str(jax.random.key_impl(state[name])) for name in ("key", "rbg")]
        for i, leaf in enumerate([*leaves, *draws]):
            assert read[f"arr_{i}"].tobytes() == np.asarray(leaf).tobytes()
    reader = Checkpointer(tmp_path / "run")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    for name, change in (
        ("params.w: saved float32[2,3], expected bfloat16[2,3]", {"params": low}),
        ("tokens: saved int32[], expected float32[]", {"tokens": jnp.float32(0)}),
        ("key: saved key<fry>[], expected key<rbg>[]", {"key": jax.random.key(0, impl="rbg")}),
        ("key: saved key<fry>[], expected uint32[2]", {"key": jax.random.key_data(state["key"])}),
    ):
        with pytest.raises(ValueError, match="1 leaves differ") as error:
            reader.restore(state | change)
        assert name in str(error.value)


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    writer = Checkpointer(tmp_path / "run")
    with pytest.raises(ValueError, match="leaf a is int"):
        writer.save(1, {"a": 3})
    with pytest.raises(ValueError, match=r"two leaves are called a\.b"):
        writer.save(1, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})
    for metadata in ({"x": float("nan")}, {"x": (1, 2)}, {1: 2}, {"x": jnp.zeros(1)}):
        with pytest.raises(ValueError, match="metadata"):
            writer.save(1, {"a": jnp.zeros(1)}, metadata)
    assert not (tmp_path / "run").exists()
    with pytest.raises(FileNotFoundError, match="no whole checkpoint"):
        writer.restore({"a": jnp.zeros(1)})
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint of step 3 .*; there are \[\]"):
        writer.restore({"a": jnp.zeros(1)}, step=3)
    for options, text in (({"keep": 0}, "keep=0"), ({"keep_best": -1}, "keep_best=-1"), ({"best": "lowest"}, "best='lowest'")):
        with pytest.raises(ValueError, match=f"{text}; it must be"):
            Checkpointer(tmp_path, **options)
    writer.save(4, {"a": jnp.zeros(1)})
    for step in (4, 3):
        with pytest.raises(ValueError, match=f"step {step} comes after step 4"):
            writer.save(step, {"a": jnp.zeros(1)})
    with pytest.raises(ValueError, match="on_damage='ignore'; it must be"):
        writer.restore({"a": jnp.zeros(1)}, on_damage="ignore")
    writer.close()


def test_save_is_back_before_the_write_and_the_step_counts_after_it(tmp_path, gate):
    """KempnerForge #102: `latest` moved, and the good one was deleted, before the new one was durable."""
    gate.open.set()
    _save_all(tmp_path, [1], keep=1)
    gate.open.clear(), gate.reached.clear()
    events = []
    writer = Checkpointer(tmp_path, keep=1, record=events.append)
    writer.save(2, _state(2))
    assert gate.reached.wait(120) and writer.busy  # Orbax has committed, and still:
    assert writer.steps() == [1] and writer.latest_step() == 1 and (tmp_path / "1" / "files.json").is_file()
    _assert_same(Checkpointer(tmp_path).restore(_state())[0], _state(1))
    writer.check()
    assert not events and not writer.problem
    gate.open.set()
    writer.wait()
    assert writer.steps() == [2] and not (tmp_path / "1").exists() and not writer.busy
    event = events[0]
    assert len(events) == 1 and (event["event"], event["step"], event["removed"]) == ("checkpoint_saved", 2, [1])
    assert event["bytes"] == writer.describe()["bytes"] > 0 and 0 < event["blocked_s"] < event["write_s"]
    writer.close()


def _save_and_donate(folder):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    state = step({str(i): jnp.full((500_000,), float(i)) + jnp.arange(500_000.0) for i in range(8)})
    saved = jax.tree.map(lambda x: np.array(x, copy=True), state)
    with Checkpointer(folder) as writer:
        writer.save(1, state)
        ran = 0
        while writer.busy:
            state = jax.block_until_ready(step(state))
            ran += 1
        assert ran > 1  # steps that may write into the buffers ran while the write went on
        restored, _ = writer.restore(state)
    _assert_same(restored, saved)


def test_donated_buffers_do_not_reach_the_disk(tmp_path):
    """The train step donates the state right after `save`: what is written is the state of that moment."""
    _save_and_donate(tmp_path)


@pytest.mark.gpu
def test_donated_buffers_of_a_gpu_do_not_reach_the_disk(tmp_path, gpu):
    _save_and_donate(tmp_path)


def test_numpy_leaves_may_be_written_into_after_save(tmp_path, gate):
    array = np.arange(300_000.0, dtype=np.float32)
    with Checkpointer(tmp_path) as writer:
        writer.save(1, {"a": array})
        array[:] = -1
        gate.open.set()
        assert (np.asarray(writer.restore({"a": array})[0]["a"]) == np.arange(300_000)).all()


def _fail_once(monkeypatch):
    write = files.write_files_list

    def fail(*args, **kwargs):
        monkeypatch.setattr(files, "write_files_list", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_files_list", fail)


@pytest.mark.parametrize("call", ["check", "save", "wait", "close"])
def test_orbax_605_keras_23609_an_error_in_the_background_is_raised_at_the_next_call(tmp_path, monkeypatch, call):
    """MaxText PR 5260 too: the failed step is in no list, and later saves are made, not skipped in silence."""
    events = []
    writer = Checkpointer(tmp_path, record=events.append)
    writer.save(1, _state(1))
    writer.wait()
    _fail_once(monkeypatch)
    writer.save(2, _state(2))
    while writer.busy:
        pass
    assert "step 2 does not count".casefold() in writer.problem.casefold()
    with pytest.raises(CheckpointError, match=r"2 failed: OSError.*No space left on device.*Step 2 does not count") as error:
        getattr(writer, call)(*((3, _state(3)) if call == "save" else ()))
    assert error.value.step == 2 and isinstance(error.value.__cause__, OSError)
    assert writer.steps() == [1] == Checkpointer(tmp_path).steps()
    writer.check()  # raised once
    writer.save(2, _state(20))  # the same step can be written
    writer.close()
    assert writer.steps() == [1, 2]
    _assert_same(Checkpointer(tmp_path).restore(_state())[0], _state(20))
    assert [(e["event"], e["step"]) for e in events] == [("checkpoint_saved", 1), ("checkpoint_failed", 2), ("checkpoint_saved", 2)]


def test_a_disk_that_takes_no_more_bytes_is_an_error_of_its_step(tmp_path):
    """A real one from the operating system, within Orbax: files of this process may not grow beyond 100 kB."""
    _save_all(tmp_path, [1])
    big = {"w": jax.random.normal(jax.random.key(0), (1_000_000,))}
    writer, limits = Checkpointer(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"writing checkpoint .*2 ") as error:
            writer.save(2, big)
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.step == 2 and writer.steps() == [1] and writer.latest_step() == 1
    writer.save(2, big)
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_what_does_not_count_is_cleared_away_at_the_next_save(tmp_path):
    _save_all(tmp_path, [1])
    for name in ("3", "4.orbax-checkpoint-tmp", "deleted-1-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rest").write_text("of a killed run")
    events = []
    again = Checkpointer(tmp_path, record=events.append)
    assert again.steps() == [1] and again.latest_step() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "1",
        "3",
        "4.orbax-checkpoint-tmp",
        "deleted-1-0",
    ]  # reading changes nothing
    again.save(2, _state(2))
    assert [(e["event"], e["step"]) for e in events] == [("checkpoint_failed", 3)] and "was interrupted" in events[0]["problem"]
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
