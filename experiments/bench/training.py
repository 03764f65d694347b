"""What training costs beside its steps: data, checkpoints, snapshots, alarms, optimizers, sums by domain and position.

    python experiments/bench/training.py              # all; about 3 minutes on 2 CPU cores
    python experiments/bench/training.py data files   # parts: data, files, alarms, optimizers, sums

Seconds are wall time, but for `optimizers` and `sums` CPU time. Medians, the smallest in brackets.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax import HybridLM, presets
from moejax.data import CorpusSource, DataStream, Mixture, TokenSource, standard_library
from moejax.train import Checkpointer, Monitors, OptimizerConfig, Snapshots, init_state, make_optimizer, make_train_step


def timed(run: Callable[[], Any], times: int, clock: Callable[[], float] = time.perf_counter) -> str:
    seconds = []
    for _ in range(times):
        start = clock()
        jax.block_until_ready(run())
        seconds.append(clock() - start)
    return f"{1e3 * statistics.median(seconds):.2f} ms ({1e3 * min(seconds):.2f})"


def data() -> None:
    """Batches made by one process without workers, after the first 20; padding over the whole of them."""
    rng = np.random.default_rng(0)
    short = TokenSource("short", [rng.integers(0, 256, n) for n in rng.geometric(1 / 134, 20_000)])
    even = TokenSource("even", [rng.integers(0, 256, n) for n in rng.integers(1, 1025, 5_000)])
    code = CorpusSource("code", standard_library().train)
    for source, context in ((short, 1024), (short, 8192), (even, 1024), (code, 8192)):
        stream = DataStream(Mixture([source]), context=context, rows=32, packing="best_fit")
        for _ in range(20):
            next(stream)
        start = time.perf_counter()
        for _ in range(100):
            next(stream)
        speed = 100 * 32 * context / (time.perf_counter() - start)
        padding = stream.metrics()["padding_share_total"]
        print(f"data  {source.name:6} context {context}: {speed / 1e6:.0f} million tokens/s, padding {padding:.1%}")


def files() -> None:
    """A state of 48 MB in 192 arrays."""
    keys = jax.random.split(jax.random.key(0), 192)
    state = {f"w{i:03}": jax.random.normal(key, (256, 256)) for i, key in enumerate(keys)}
    events: list[dict] = []
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, record=events.append) as checkpoints:
        for step in range(6):
            checkpoints.save(step, state)
            checkpoints.wait()
        saved = [event for event in events if event["event"] == "checkpoint_saved"][1:]
        for name in ("blocked_s", "write_s"):
            print(f"files {name}: {1e3 * statistics.median(event[name] for event in saved):.0f} ms for {saved[0]['bytes'] / 1e6:.1f} MB")
        # A reader of its own each time: it verifies every byte anew.
        print("files restore and verify:", timed(lambda: Checkpointer(folder).restore(state)[0], 5))
    snapshots = Snapshots(every=1)
    print("files snapshot taken:", timed(lambda: snapshots.take(1, state), 5))
    print("files snapshot restored:", timed(lambda: snapshots.restore()[0], 5))


def alarms() -> None:
    """Realistic noisy losses that must not fire, 100 seeds of 1,000 steps; and what one look costs."""
    fired = steps = 0
    start = time.perf_counter()
    for seed in range(100):
        rng, monitors = np.random.default_rng(seed), Monitors()
        for step in range(1, 1001):
            loss = 2 + 4 * np.exp(-step / 200) + 0.05 * rng.standard_normal()
            norm = 0.5 * np.exp(0.3 * rng.standard_normal())
            verdict = monitors.observe(step, {"loss": loss, "grad_norm": norm, "skipped": 0})
            fired += sum(event["event"] == "alarm" for event in verdict.events)
            steps += 1
    print(f"alarms {fired} fired in {steps} steps; {1e3 * (time.perf_counter() - start) / steps:.3f} ms a step")


def optimizers() -> None:
    """One update of the `tiny` preset's tree."""
    shapes = jax.eval_shape(HybridLM(presets.get("tiny")).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), shapes)
    for kind in ("adamw", "muon"):
        optimizer = make_optimizer(OptimizerConfig(kind=kind))
        state = optimizer.init(params)

        @jax.jit
        def update(state, params, optimizer=optimizer):
            updates, state = optimizer.update(params, state, params)
            return optax.apply_updates(params, updates), state

        update(state, params)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e6
        print(f"optimizers {kind}: {timed(lambda state=state, update=update: update(state, params), 10, time.process_time)}, {size:.1f} MB")


def sums() -> None:
    """The step of `tiny` with and without the loss by domain and position, in turn."""
    model, optimizer = HybridLM(presets.get("tiny").replace(dtype="float32")), make_optimizer(OptimizerConfig(kind="muon"))
    state = jax.jit(lambda key: init_state(model, optimizer, key))(jax.random.key(0))
    ones = jnp.ones((8, 256), jnp.int32)
    tokens = jax.random.randint(jax.random.key(1), ones.shape, 0, 256)
    batch = {"tokens": tokens, "segment_ids": ones, "domains": ones.astype(jnp.int8)}
    steps = {domains: jax.jit(make_train_step(model, optimizer, domains=domains)) for domains in (0, 2)}
    seconds: dict[int, list[float]] = {0: [], 2: []}
    for turn in range(15):
        for domains, step in steps.items():
            start = time.process_time()
            jax.block_until_ready(step(state, batch))
            if turn:
                seconds[domains].append(time.process_time() - start)
    for domains, values in seconds.items():
        print(f"sums {domains} domains: {statistics.median(values):.3f} s ({min(values):.3f})")


PARTS = {part.__name__: part for part in (data, files, alarms, optimizers, sums)}

if __name__ == "__main__":
    chosen = sys.argv[1:] or list(PARTS)
    if unknown := sorted(set(chosen) - set(PARTS)):
        sys.exit(f"error: no part {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for name in chosen:
        PARTS[name]()
