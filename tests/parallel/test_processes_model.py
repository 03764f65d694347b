"""Two processes of 4 devices train as one process of 8 devices does, and twice the same."""

import os
import socket
import subprocess
import sys

import numpy as np

TRAIN = """
import sys
import jax
import numpy as np
import optax

out, count, number, address = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if count > 1:
    jax.distributed.initialize(address, count, number)

from moejax import HybridLM, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moejax.parallel import ModelParallel, batch_sharding, parameter_shardings
from moejax.train import init_state, make_train_step

config = ModelConfig(
    vocab_size=64, hidden=16, layers=2, pattern="KM", dense_width=16, residual_block=1, remat="none", dtype="float32",
    initializer_range=0.2,
    kda=KDAConfig(heads=2, key_dim=8, value_dim=8),
    mla=MLAConfig(heads=2, nope_dim=8, rope_dim=4, value_dim=8, kv_latent=8),
    moe=MoEConfig(experts=4, experts_per_token=2, expert_width=8, latent=8, shared_width=8),
)
# On two processes the neighbours along "expert" and those along "sequence" both belong to the other process.
expert, sequence, tensor = np.indices((2, 2, 2))
devices = np.asarray(jax.devices())[4 * (expert ^ sequence) + 2 * expert + tensor]
if count > 1:
    owners = np.vectorize(lambda device: device.process_index)(devices)
    assert (owners[0] != owners[1]).all() and (owners[:, 0] != owners[:, 1]).all()
mesh = jax.sharding.Mesh(devices, ("expert", "sequence", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)

model, optimizer = HybridLM(config, parallel=ModelParallel(mesh)), optax.sgd(0.1, momentum=0.9)
create = lambda key: init_state(model, optimizer, key)
shardings = parameter_shardings(jax.eval_shape(create, jax.random.key(0)), mesh)
random = np.random.default_rng(0)
tokens = random.integers(0, 64, (2, 22), dtype=np.int32)
segments = np.repeat(np.array([[1, 1, 2, 2], [0, 1, 1, 2]], np.int32), [4, 3, 6, 9], axis=1)  # one crosses the shards of 11
rows = batch_sharding(mesh)
batch = {
    name: jax.make_array_from_callback(value.shape, rows, lambda index, value=value: value[index])
    for name, value in (("tokens", tokens), ("segment_ids", segments))
}
step = jax.jit(make_train_step(model, optimizer, clip_norm=None), out_shardings=(shardings, None))
whole = jax.jit(lambda state: state, out_shardings=jax.NamedSharding(mesh, jax.P()))
start = jax.jit(create, out_shardings=shardings)(jax.random.key(0))

def train():
    state, losses = start, []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    state = state.replace(rng=jax.random.key_data(state.rng))
    return [*losses, *map(np.asarray, jax.tree.leaves(whole(state)))]

runs = [train(), train()]
assert jax.device_count() == 8 and jax.local_device_count() == 8 // count
for a, b in zip(*runs, strict=True):
    assert a.tobytes() == b.tobytes()  # two runs: the same bits
np.savez(out, *runs[0])
"""


def launch(out, count, address, devices):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", TRAIN, f"{out}.{number}.npz", str(count), str(number), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for number in range(count)
    ]


def results(out, running):
    for process in running:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said[-3000:]
    loaded = []
    for number in range(len(running)):
        with np.load(f"{out}.{number}.npz") as file:
            loaded.append([file[name] for name in file.files])
    return loaded


def test_two_processes_train_as_one(tmp_path):
    """Losses, parameters, momentum and selection bias after two steps; the processes hold the same."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    running = {count: launch(tmp_path / str(count), count, address, 8 // count) for count in (2, 1)}
    try:
        (one,) = results(tmp_path / "1", running[1])
        first, second = results(tmp_path / "2", running[2])
    finally:
        for process in (*running[1], *running[2]):
            process.kill()
    assert float(one[1]) < float(one[0])
    for a, b, c in zip(first, second, one, strict=True):
        assert a.tobytes() == b.tobytes()
        np.testing.assert_allclose(a, c, rtol=0, atol=1e-5 * max(float(np.abs(c).max()), 1e-3))
