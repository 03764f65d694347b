"""A state saved on one mesh and number of processes, restored on others: equal bit for bit."""

import json
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.train import checkpoint_files as files
from moejax.train.checkpoint import Checkpointer

OPTIMIZER = optax.adamw(1e-2)


def _mesh(*sizes):
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("expert", "tensor"))


def _create(key):
    """All that a training state has: parameters, optimizer, selection bias, typed key, counters."""
    params = {
        "up": jax.random.normal(key, (8, 16, 32)) / 4,
        "down": jax.random.normal(jax.random.fold_in(key, 1), (8, 32, 16)) / 6,
        "norm": jnp.ones(16),
    }
    return {
        "params": params,
        "opt_state": OPTIMIZER.init(params),
        "router_state": {"bias": jnp.linspace(6.8, 7.1, 8, dtype=jnp.float32)},
        "rng": jax.random.fold_in(key, 2),
        "step": jnp.int32(0),
    }


def _shardings(mesh):
    specs = {"up": P("expert", None, "tensor"), "down": P("expert", "tensor", None), "norm": P()}
    shapes = jax.eval_shape(_create, jax.random.key(0))
    spec = lambda path, leaf: next((s for name, s in specs.items() if name in jax.tree_util.keystr(path)), P())
    return jax.tree.map(lambda s: NamedSharding(mesh, s), jax.tree_util.tree_map_with_path(spec, shapes))


def _template(mesh):
    shapes = jax.eval_shape(_create, jax.random.key(0))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, _shardings(mesh))


def _train_step(state):
    """One step on a batch drawn from the state's own key: the random numbers are part of what is restored."""
    x = jax.random.normal(jax.random.fold_in(state["rng"], state["step"]), (8, 16))

    def loss(p):
        h = jnp.einsum("ehf,efd->ehd", jax.nn.silu(jnp.einsum("bd,edf->ebf", x * p["norm"], p["up"])), p["down"])
        return jnp.mean((h.sum(0) - jnp.sin(x)) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return state | {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, value


def _bits(state):
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(plain(x)).tobytes() for x in jax.tree.leaves(state)]


def _run(state, steps, mesh):
    train, losses = jax.jit(_train_step, out_shardings=(_shardings(mesh), None)), []
    for _ in range(steps):
        state, loss = train(state)
        losses.append(float(loss))
    return state, losses


def test_saved_on_one_mesh_restored_on_three_others(tmp_path):
    """Reliability bar, point 1: every leaf equal bit for bit, and the next five losses those of the run that went on."""
    first = _mesh(2, 4)
    state = jax.jit(_create, out_shardings=_shardings(first))(jax.random.key(0))
    state, _ = _run(state, 2, first)
    with Checkpointer(tmp_path) as writer:
        writer.save(2, state, {"step": 2})
        _, losses = _run(state, 5, first)
    facts = Checkpointer(tmp_path).describe()
    assert facts["mesh"] == {"expert": 2, "tensor": 4} and facts["processes"] == 1 and facts["leaves"] == len(jax.tree.leaves(state))
    assert facts["placement"]["params.up"] == "('expert', None, 'tensor')"
    for sizes in ((4, 2), (8, 1), (1, 1)):
        mesh = _mesh(*sizes)
        restored, _ = Checkpointer(tmp_path).restore(_template(mesh))
        assert _bits(restored) == _bits(state) and int(restored["step"]) == 2
        assert restored["params"]["up"].sharding == NamedSharding(mesh, P("expert", None, "tensor"))
        assert int(jax.random.bits(restored["rng"])) == int(jax.random.bits(state["rng"]))
        np.testing.assert_allclose(_run(restored, 5, mesh)[1], losses, rtol=1e-5, atol=0)


TWO = """
import sys
import jax
folder, number, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(address, 2, number)

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from moejax.parallel.agreement import text_of_any
from moejax.train import checkpoint_files as files
from moejax.train.checkpoint import CheckpointError, Checkpointer, DamagedCheckpointError
from moejax.train.snapshot import Snapshots

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
like = {
    "w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, P("x", "y"))),
    "copies": jax.ShapeDtypeStruct((5,), np.int32, sharding=NamedSharding(mesh, P())),
    "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=NamedSharding(mesh, P())),
}

def raises(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")

events = []
checkpoints = Checkpointer(folder, keep=2, record=events.append)
state, metadata = checkpoints.restore(like)  # what one process saved
assert metadata == {"step": 1} and checkpoints.describe()["processes"] == 1
assert checkpoints.describe()["mesh"] == {}

held = Snapshots(every=1)
held.take(1, state)
add = jax.jit(lambda s: {**s, "w": s["w"] + 1, "copies": s["copies"] + 1}, donate_argnums=0)
after = add(state)
again, _ = held.restore()
assert again["w"].sharding == like["w"].sharding
for a, b in zip(again["w"].addressable_shards, after["w"].addressable_shards, strict=True):
    assert (np.asarray(a.data) + 1 == np.asarray(b.data)).all()
whole = {**like, "w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(mesh, P()))}
assert "leaf w: this process holds a part of it only" in raises(ValueError, lambda: held.restore(whole))

checkpoints.save(2, after, {"step": 2})
for _ in range(3):
    after = add(after)  # collectives and donation while the write goes on
checkpoints.wait()
assert checkpoints.steps() == [1, 2] and [e["event"] for e in events] == ["checkpoint_saved"]
assert "comes after step 2" in raises((ValueError, RuntimeError), lambda: checkpoints.save(2, after))

# A failure on either process is raised on both.
for failing in (0, 1):
    name = "write_files_list" if failing == 0 else "_checksums"
    real = getattr(files, name)
    if number == failing:
        setattr(files, name, lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left")))
    checkpoints.save(3, after, {"step": 3})
    assert "No space left" in raises(CheckpointError, checkpoints.wait)
    setattr(files, name, real)
    assert checkpoints.steps() == [1, 2]

checkpoints.save(3, after, {"step": 3})
checkpoints.wait()
checkpoints.promote(3)
assert checkpoints.known_good() == 3 and checkpoints.steps() == [2, 3]
assert "is not among" in raises((ValueError, RuntimeError), lambda: checkpoints.promote(1))

# Each process reads a half of the files; a byte flipped in one half is named on both.
reader = Checkpointer(folder)
listed = sorted(files.read_files_list(checkpoints.folder / "3")["files"])
harmed = checkpoints.folder / "3" / listed[1]  # in the share of process 1
good = harmed.read_bytes()
text_of_any("")
if number == 0:
    harmed.write_bytes(bytes([good[0] ^ 1]) + good[1:])
text_of_any("")
assert listed[1] in raises(DamagedCheckpointError, lambda: reader.restore(like))
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state, metadata = reader.restore(like, on_damage="previous")
assert metadata == {"step": 2} and any(listed[1] in str(w.message) for w in caught)
text_of_any("")
if number == 0:
    harmed.write_bytes(good)
text_of_any("")
state, metadata = Checkpointer(folder).restore(like)
assert metadata == {"step": 3}
checkpoints.rewind(2)
assert checkpoints.steps() == [2] and checkpoints.known_good() is None
checkpoints.save(3, after, {"step": 3})
checkpoints.close()
print("done", number)
"""


def test_one_process_two_processes_and_back(tmp_path):
    """Saved by one process, restored by two, saved by both, restored by one; errors and damage are known to both."""
    key, copies = jax.random.key(9), jnp.arange(5, dtype=jnp.int32)
    with Checkpointer(tmp_path / "run") as writer:
        writer.save(1, {"w": jnp.arange(64.0).reshape(8, 8), "copies": copies, "key": key}, {"step": 1})
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", TWO, str(tmp_path / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, str(i), address], env=env, **pipes) for i in range(2)]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (process, text) in enumerate(zip(processes, said, strict=True)):
        assert process.returncode == 0 and f"done {number}" in text, "\n\n".join(said)
    reader = Checkpointer(tmp_path / "run")
    assert reader.steps() == [2, 3] and reader.describe()["processes"] == 2 and reader.describe()["mesh"] == {"x": 2, "y": 4}
    listed = json.loads((tmp_path / "run" / "3" / "files.json").read_text())["files"]
    assert any(name.startswith("state/ocdbt.process_1/d/") for name in listed)  # both wrote, and both are in the list
    assert not list((tmp_path / "run" / "3").glob("*.part"))
    template = {"w": jnp.zeros((8, 8)), "copies": copies, "key": key}
    for step, added in ((2, 1), (3, 4)):
        state, metadata = reader.restore(template, step=step)
        assert metadata == {"step": step}
        assert (np.asarray(state["w"]) == np.arange(64.0).reshape(8, 8) + added).all()
        assert (np.asarray(state["copies"]) == np.arange(5) + added).all()
        assert (jax.random.bits(state["key"], (3,)) == jax.random.bits(key, (3,))).all()
    assert files.damage(tmp_path / "run" / "3") is None


@pytest.mark.slow
def test_verification_reads_at_the_speed_that_is_stated(tmp_path):
    """A study: GB/s of `verify` on 512 MB in the page cache. Printed; the limit is what one thread of CRC-32 must give."""
    import time

    block = np.random.default_rng(0).bytes(1 << 26)
    for i in range(8):
        (tmp_path / f"{i}").write_bytes(block)
    files.write_files_list(tmp_path, {})
    start = time.perf_counter()
    assert files.damage(tmp_path) is None
    speed = 8 * len(block) / (time.perf_counter() - start) / 1e9
    print(f"{speed:.2f} GB/s with {files.THREADS} threads")
    assert speed > 0.5
