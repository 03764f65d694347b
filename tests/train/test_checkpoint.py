import json
import os
import subprocess
import sys
import time
import warnings
import zlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.train import checkpoint
from moejax.train.checkpoint import Checkpointer


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


def test_round_trip_is_exact_and_the_newest_are_kept(tmp_path):
    writer = Checkpointer(tmp_path / "run", keep=2)
    assert writer.latest_step() is None
    for step in (3, 5, 8):
        writer.save(step, _state(step), {"step": step, "nested": {"text": "ü", "list": [1, 2.5, None]}})
    writer.close()
    reader = Checkpointer(tmp_path / "run")
    assert reader.steps() == [5, 8] and reader.latest_step() == 8
    state, metadata = reader.restore(_state(0.0))
    _assert_same(state, _state(8))
    assert metadata == reader.metadata() == {"step": 8, "nested": {"text": "ü", "list": [1, 2.5, None]}}
    state, _ = reader.restore(jax.eval_shape(lambda: _state(0.0)), step=5)
    _assert_same(state, _state(5))


def test_restore_follows_the_template_sharding(tmp_path):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    array = jnp.arange(32.0).reshape(8, 4)
    Checkpointer(tmp_path).save(1, {"w": jax.device_put(array, NamedSharding(mesh, PartitionSpec("x")))})
    other = NamedSharding(mesh, PartitionSpec(None, "x"))
    restored, _ = Checkpointer(tmp_path).restore({"w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=other)})
    assert restored["w"].sharding == other
    assert (np.asarray(restored["w"]) == np.asarray(array)).all()


def test_every_difference_is_named_at_once(tmp_path):
    Checkpointer(tmp_path).save(1, {"a": jnp.zeros(3), "b": jnp.zeros(2), "gone": jnp.zeros(1)})
    wanted = {"a": jnp.zeros(4), "b": jnp.zeros(2, jnp.bfloat16), "new": jnp.zeros(1)}
    with pytest.raises(ValueError, match="4 leaves differ") as error:
        Checkpointer(tmp_path).restore(wanted)
    for part in (
        "a: saved float32[3], expected float32[4]",
        "b: saved float32[2], expected bfloat16[2]",
        "gone: saved, not expected",
        "new: expected, not saved",
    ):
        assert part in str(error.value)


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
    with pytest.raises(ValueError, match="keep=1; it must be at least 2"):
        Checkpointer(tmp_path, keep=1)
    writer.save(4, {"a": jnp.zeros(1)})
    for step in (4, 3):
        with pytest.raises(ValueError, match=f"step {step} comes after step 4"):
            writer.save(step, {"a": jnp.zeros(1)})


def test_an_interrupted_save_leaves_the_step_before_it(tmp_path, monkeypatch):
    writer = Checkpointer(tmp_path)
    writer.save(1, _state(1))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_files_list", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            writer.save(2, _state(2))
    (tmp_path / "3").mkdir()
    (tmp_path / "4.orbax-checkpoint-tmp").mkdir()
    again = Checkpointer(tmp_path)
    with pytest.warns(UserWarning, match=r"2 is not used: files.json is missing"):
        assert again.latest_step() == 1
    again.save(2, _state(20))  # the same step can be written; what lay there is kept aside
    assert again.latest_step() == 2
    _assert_same(again.restore(_state())[0], _state(20))
    assert (tmp_path / "incomplete-2-0" / "state").is_dir()


@pytest.mark.parametrize("harm", ["flip a byte", "remove", "truncate"])
def test_a_damaged_file_is_named_and_the_step_before_is_used(tmp_path, harm):
    writer = Checkpointer(tmp_path)
    writer.save(1, _state(1))
    writer.save(2, _state(2))
    files = json.loads((tmp_path / "2" / "files.json").read_text())
    name = max(files, key=lambda n: files[n][0])
    path = tmp_path / "2" / name
    data = path.read_bytes()
    path.unlink()
    if harm != "remove":
        path.write_bytes(data[:-1] if harm == "truncate" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.warns(UserWarning, match="2 is not used") as record:
        state, _ = writer.restore(_state())
    assert name in str(record[0].message)
    _assert_same(state, _state(1))
    with pytest.raises(ValueError, match="cannot be used") as error:
        writer.restore(_state(), step=2)
    assert name in str(error.value)


def test_a_save_reads_no_checkpoint_but_its_own(tmp_path, monkeypatch):
    writer, read = Checkpointer(tmp_path), []
    writer.save(1, _state(1))
    crc32 = checkpoint._crc32
    monkeypatch.setattr(checkpoint, "_crc32", lambda path: read.append(path) or crc32(path))
    writer.save(2, _state(2))
    assert read and all(path.is_relative_to(tmp_path / "2") for path in read)
    with pytest.raises(ValueError, match="step 2 comes after step 2"):
        writer.save(2, _state(2))


def test_a_damaged_step_can_be_written_again(tmp_path):
    for step in (1, 2):
        Checkpointer(tmp_path).save(step, _state(step))
    next((tmp_path / "2" / "state").glob("_*")).write_text("harmed")
    again = Checkpointer(tmp_path)
    again.save(2, _state(20))
    _assert_same(again.restore(_state())[0], _state(20))
    assert again.steps() == [1, 2] and (tmp_path / "incomplete-2-0").is_dir()


def test_checksums_are_those_of_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PIECE", 7)
    for size in (0, 6, 7, 8, 30):
        (tmp_path / "x").write_bytes(data := bytes(range(size)))
        assert checkpoint._crc32(tmp_path / "x") == zlib.crc32(data)


WRITER = """
import sys, jax.numpy as jnp
from moejax.train.checkpoint import Checkpointer
writer = Checkpointer(sys.argv[1], keep=2)
first = (writer.latest_step() or 0) + 1
for step in range(first, first + 1000):
    writer.save(step, {str(i): jnp.full((50_000,), step + i, jnp.float32) for i in range(8)}, {"step": step})
    print(step, flush=True)
"""


def test_killed_at_any_moment_the_last_reported_step_survives(tmp_path):
    """SIGKILL three times at moments spread over a save (about 0.1 s); each run goes on from what the last one left."""
    reported = 0
    for delay in (0.0, 0.03, 0.07):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)
        assert process.stdout is not None
        for line in process.stdout:
            reported = int(line)
            if reported % 3 == 0:
                break
        time.sleep(delay)
        process.kill()
        process.wait()
        rest = process.stdout.read().split()
        process.stdout.close()
        reported = int(rest[-1]) if rest else reported
        reader = Checkpointer(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an incomplete step may lie there
            step = reader.latest_step()
            assert step is not None and step in (reported, reported + 1)
            state, metadata = reader.restore({str(i): jnp.zeros(50_000) for i in range(8)})
        assert metadata == {"step": step}
        assert all((np.asarray(state[str(i)]) == step + i).all() for i in range(8))
