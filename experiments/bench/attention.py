"""Causal softmax attention on this machine: blockwise XLA, cuDNN, and tokamax's Mosaic kernel where it is installed.

    python experiments/bench/attention.py                      # B=1 T=8192 H=32, 192/128, bfloat16: the shape of baselines
    python experiments/bench/attention.py --documents 1 8      # one document without segment ids, and 8 packed ones
    python experiments/bench/attention.py --length 512 --heads 2 --repeats 3        # on a CPU

A row's distances are relative L2 distances from the blockwise form, output and worst gradient. Milliseconds are medians over
--repeats queues: calls are queued until 50 ms are full and the last one is waited for, so the host's time is hidden
behind the device's. TFLOP/s counts what the mask leaves: 2 (K + V) a visible pair of query and key forward, 2 (4 K + 3 V)
forward and backward. "temp" is the compiled program's temporary memory, forward and backward; documents are equally long.
Which form a model gets is printed first; a form that cannot run is a row with the reason.
"""

import importlib.metadata
import importlib.util
import statistics
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from moejax.ops.attention import attention
from moejax.ops.attention_gpu import IMPLEMENTATIONS, AttentionFacts, attention_implementation

QUEUE = 0.05  # seconds


@dataclass(frozen=True)
class Study:
    """Sizes of [batch, length, heads, key or value], the numbers of packed documents, and what runs."""

    batch: int = 1
    length: int = 8192
    heads: int = 32
    key: int = 192
    value: int = 128
    documents: tuple[int, ...] = (1, 8, 24)
    """Documents a row; 1 means no segment ids."""
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    repeats: int = 10


@dataclass(frozen=True)
class Row:
    """Milliseconds, TFLOP/s, distances from the blockwise form, and temporary memory in GB."""

    forward: float
    both: float
    forward_rate: float
    both_rate: float
    output_distance: float
    gradient_distance: float
    temporary: float


def distance(a, b) -> float:
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def milliseconds(call, arguments, repeats: int) -> float:
    """Median time of one call in a queue of calls, after one that is not counted."""
    jax.block_until_ready(call(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(call(*arguments))
    queued = max(1, min(50, int(QUEUE / (time.perf_counter() - start))))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(queued):
            last = call(*arguments)
        jax.block_until_ready(last)
        times.append((time.perf_counter() - start) / queued)
    return 1e3 * statistics.median(times)


def segments(study: Study, documents: int):
    if documents == 1:
        return None
    ids = np.arange(study.length) * documents // study.length + 1
    return jnp.asarray(np.tile(ids, (study.batch, 1)), jnp.int32)


def visible_pairs(study: Study, documents: int) -> float:
    lengths = np.bincount(np.arange(study.length) * documents // study.length)
    return float(study.batch * study.heads * np.sum(lengths * (lengths + 1) / 2))


def measure(study: Study, name: str, documents: int, arrays, wanted):
    """(Row, the output and gradients for the distances of the others)."""
    ids = segments(study, documents)

    def form(q, k, v):
        return attention(q, k, v, segment_ids=ids, implementation=name)

    def both(q, k, v, ct):
        out, pull = jax.vjp(form, q, k, v)
        return out, *pull(ct)

    forward = jax.jit(form).lower(*arrays[:3]).compile()
    compiled = jax.jit(both).lower(*arrays).compile()
    results = [np.asarray(x) for x in compiled(*arrays)]
    far = [distance(a, b) for a, b in zip(results, wanted or results, strict=True)]
    times = milliseconds(forward, arrays[:3], study.repeats), milliseconds(compiled, arrays, study.repeats)
    pairs = visible_pairs(study, documents)
    work = 2 * pairs * (study.key + study.value), 2 * pairs * (4 * study.key + 3 * study.value)
    rates = [flops / ms / 1e9 for flops, ms in zip(work, times, strict=True)]
    memory = compiled.memory_analysis()
    temporary = float("nan") if memory is None else memory.temp_size_in_bytes / 1e9
    return Row(times[0], times[1], rates[0], rates[1], far[0], max(far[1:]), temporary), results


def main(study: Study) -> dict[tuple[str, int], Row]:
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {device.client.platform_version.splitlines()[0]}")
    if importlib.util.find_spec("tokamax"):
        print(f"tokamax {importlib.metadata.version('tokamax')}")
    print(f"B={study.batch} T={study.length} H={study.heads} {study.key}/{study.value} bfloat16, median of {study.repeats}")
    rng = np.random.default_rng(0)
    widths = (study.key, study.key, study.value, study.value)
    arrays = [jnp.asarray(rng.normal(size=(study.batch, study.length, study.heads, width)), jnp.bfloat16) for width in widths]
    table = {}
    for documents in study.documents:
        facts = AttentionFacts("bfloat16", study.key, study.value, study.length, study.length, True, documents > 1)
        choice = attention_implementation(facts=facts)
        kind = "one document, no segment ids" if documents == 1 else f"{documents} packed documents"
        print(f"\n{kind}; chosen: {choice.name} ({choice.reason})")
        print(f"  {'':<8}{'forward ms':>12}{'TFLOP/s':>9}{'fwd+bwd ms':>12}{'TFLOP/s':>9}{'output':>10}{'gradients':>11}{'temp GB':>9}")
        wanted = None
        for name in study.implementations:
            try:
                row, results = measure(study, name, documents, arrays, wanted)
            except Exception as error:  # a row with the reason: the other forms are still to be measured
                print(f"  {name:<8}{type(error).__name__}: {str(error).splitlines()[0][:300]}", flush=True)
                continue
            wanted = results if wanted is None else wanted
            table[name, documents] = row
            print(
                f"  {name:<8}{row.forward:12.3f}{row.forward_rate:9.0f}{row.both:12.3f}{row.both_rate:9.0f}"
                f"{row.output_distance:10.1e}{row.gradient_distance:11.1e}{row.temporary:9.2f}",
                flush=True,
            )
    return table


if __name__ == "__main__":
    main(tyro.cli(Study))
