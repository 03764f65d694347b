"""Loading and saving a published checkpoint: bytes a second, and memory beyond what is kept.

    python experiments/bench/load_checkpoint.py                   # about 1 GiB of packed experts, 4 GiB decoded to bfloat16
    python experiments/bench/load_checkpoint.py --experts 16      # smaller

Writes a checkpoint with K3's layout and random experts into a temporary folder, then loads it in fresh processes. The floor is reading the
same bytes from the same files with nothing done to them (after the first read they come from the page cache).
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from moejax import HybridLM, KDAConfig, MLAConfig, ModelConfig, MoEConfig, hub

VARIANTS = {"decoded to bfloat16": {}, "kept packed": {"keep_packed": True}}


def config(experts: int) -> ModelConfig:
    """Four layers of K3's pattern; the experts are 1/14 of K3's in values, the rest is small."""
    return ModelConfig(
        vocab_size=1024,
        hidden=512,
        layers=4,
        dense_width=1024,
        residual_block=4,
        param_dtype="bfloat16",
        kda=KDAConfig(heads=4, key_dim=64, value_dim=64),
        mla=MLAConfig(heads=4, nope_dim=64, rope_dim=32, value_dim=64, q_latent=128, kv_latent=128),
        moe=MoEConfig(
            experts=experts, experts_per_token=4, expert_width=1536, latent=1536, shared_width=1536, expert_weights="mxfp4"
        ),
    )


def write(folder: pathlib.Path, experts: int) -> None:
    shapes = jax.eval_shape(HybridLM(config(experts)).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    rng = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if leaf.dtype == np.uint8:
            return rng.integers(115, 125, leaf.shape, np.uint8)
        return np.full(leaf.shape, 0.02, leaf.dtype)

    started = time.perf_counter()
    hub.save(folder, hub.Checkpoint(config(experts), *(jax.tree.map(fill, shapes[name]) for name in ("params", "router_state"))))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"saved {size / 1e9:.2f} GB in {time.perf_counter() - started:.1f} s, flushed to the disk, random numbers included")


def status(key: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:"))


def measure(folder: str, options: dict) -> dict[str, float]:
    """In this process: seconds, bytes in the files and kept, peak memory beyond what is kept."""
    jax.block_until_ready(jax.device_put(0.0))
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = status("VmRSS"), time.perf_counter()
    checkpoint = hub.load(folder, **options)
    seconds = time.perf_counter() - started
    leaves = jax.tree.leaves((checkpoint.params, checkpoint.router_state))
    kept = sum(leaf.nbytes for leaf in leaves)
    return {
        "seconds": seconds,
        "kept": kept,
        "largest": max(leaf.nbytes for leaf in leaves),
        "beyond": status("VmHWM") - before - (kept if jax.default_backend() == "cpu" else 0),  # else kept in the device's memory
    }


def plain_read(folder: pathlib.Path) -> float:
    """Seconds to read every byte once, in pieces of 16 MiB."""
    started = time.perf_counter()
    piece = bytearray(16 << 20)
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Loading and saving a published checkpoint.")
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure[0], VARIANTS[given.measure[1]])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary) / "checkpoint"
        write(folder, given.experts)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        floor = min(plain_read(folder) for _ in range(given.repeats))
        print(f"floor: reading {size / 1e9:.2f} GB takes {floor:.2f} s ({size / floor / 1e9:.1f} GB/s)")
        print(f"{'':24}{'seconds':>9}{'file GB/s':>11}{'kept GB':>9}{'kept GB/s':>11}{'beyond / largest':>18}")
        for name in VARIANTS:
            command = [sys.executable, __file__, "--measure", str(folder), name]
            runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(given.repeats)]
            run = sorted(runs, key=lambda r: r["seconds"])[len(runs) // 2]
            most = max(r["beyond"] / r["largest"] for r in runs)
            rates = (size / run["seconds"] / 1e9, run["kept"] / 1e9, run["kept"] / run["seconds"] / 1e9)
            print(f"{name:24}{run['seconds']:9.2f}{rates[0]:11.2f}{rates[1]:9.2f}{rates[2]:11.2f}{most:18.2f}")


if __name__ == "__main__":
    main()
