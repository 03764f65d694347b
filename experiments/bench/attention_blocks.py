"""Softmax attention by block size: time of value and gradient, and temporary memory.

python experiments/bench/attention_blocks.py [--batch 1] [--length 4096] [--heads 4] [--key 48] [--value 32]
[--blocks 128 256 512 1024] [--repeats 6]
"""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from moejax.ops.attention import attention


@dataclass(frozen=True)
class Study:
    """Sizes of [batch, length, heads, key or value] and the block sizes to try."""

    batch: int = 1
    length: int = 4096
    heads: int = 4
    key: int = 48
    value: int = 32
    blocks: tuple[int, ...] = (128, 256, 512, 1024)
    repeats: int = 6


def main(study: Study) -> dict[int, tuple[float, float, float]]:
    rng, results = np.random.default_rng(0), {}
    widths = (study.key, study.key, study.value)
    q, k, v = (
        jnp.asarray(rng.normal(size=(study.batch, study.length, study.heads, width)), jnp.float32) for width in widths
    )
    print(f"{study}, float32, jax {jax.__version__} on {jax.default_backend()}: value and gradients")
    for block in study.blocks:
        loss = lambda q, k, v, block=block: jnp.sum(attention(q, k, v, block=block) ** 2)
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile()
        jax.block_until_ready(step(q, k, v))
        fastest, start = float("inf"), time.process_time()
        for _ in range(study.repeats):
            began = time.perf_counter()
            jax.block_until_ready(step(q, k, v))
            fastest = min(fastest, time.perf_counter() - began)
        process = (time.process_time() - start) / study.repeats
        memory = step.memory_analysis()
        assert memory is not None  # None only where a backend cannot tell
        results[block] = (1e3 * fastest, 1e3 * process, memory.temp_size_in_bytes / 1e6)
        print("  block {:5d}: {:9.1f} ms {:9.1f} ms of CPU time {:8.1f} MB".format(block, *results[block]), flush=True)
    return results


if __name__ == "__main__":
    main(tyro.cli(Study))
