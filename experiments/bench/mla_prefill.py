"""A chunk of a long prompt over its cache of latents on this machine: the fused form of Kimi K3's MLA and the blockwise one.

    python experiments/bench/mla_prefill.py                # 8192 queries of 8 heads over 8K, 64K, 256K and 1M entries
    python experiments/bench/mla_prefill.py --queries 64 --caches 512 --heads 2 --plain 512 --repeats 3      # on a CPU

The chunk stands at the end of the cache: queries x entries minus the triangle that is not seen are its visible pairs. TFLOP/s
counts 2 (K + V) a visible pair and head and 2 C (N + V) an entry and head, what no expanded form can do without; "floor" is
that work at --peak. "temp" is the compiled program's temporary memory. Times are medians of --repeats calls. The distance
of the fused form from the blockwise one is a relative L2 distance, where both run.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tyro
from attention import distance
from expert_exchange import median_ms

from moejax.ops.attention_gpu import AttentionFacts
from moejax.ops.mla_prefill import cached_latent_attention, prefill_implementation


@dataclass(frozen=True)
class Study:
    """Sizes of one row's chunk and cache, and what runs."""

    queries: int = 8192
    caches: tuple[int, ...] = (8192, 65536, 262144, 1048576)
    plain: tuple[int, ...] = (65536,)
    """Caches that the blockwise form is timed with too."""
    heads: int = 8
    latent: int = 512
    nope: int = 128
    shared: int = 64
    value: int = 128
    peak: float = 790
    """TFLOP/s of this card's bfloat16 products."""
    repeats: int = 3


def operands(study: Study, entries: int):
    """(q, latent, shared_key, k_up, v_up) in bfloat16; made on the device, since a cache of 1M entries has 1.2 GB."""
    s = study
    shapes = [
        (1, s.queries, s.heads, s.nope + s.shared),
        (1, entries, s.latent),
        (1, entries, s.shared),
        (s.latent, s.heads, s.nope),
        (s.latent, s.heads, s.value),
    ]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    scales = [1, 1, 1, s.latent**-0.5, s.latent**-0.5]
    return [
        (scale * jax.random.normal(k, shape, jnp.bfloat16)).block_until_ready()
        for k, scale, shape in zip(keys, scales, shapes, strict=True)
    ]


def work(study: Study, entries: int) -> float:
    """Operations of a chunk at the end of `entries` entries."""
    s = study
    pairs = s.queries * entries - s.queries * (s.queries - 1) / 2
    return 2.0 * s.heads * (pairs * (s.nope + s.shared + s.value) + entries * s.latent * (s.nope + s.value))


def measure(study: Study, entries: int, name: str, arrays):
    """(milliseconds, GB of temporary memory, the output)."""
    starts, counts = (jnp.full((1,), n, jnp.int32) for n in (entries - study.queries, study.queries))

    def run(starts, counts, *arrays):
        return cached_latent_attention(*arrays, starts=starts, counts=counts, implementation=name)

    compiled = jax.jit(run).lower(starts, counts, *arrays).compile()
    out = jax.block_until_ready(compiled(starts, counts, *arrays))
    memory = compiled.memory_analysis()
    temporary = float("nan") if memory is None else memory.temp_size_in_bytes / 1e9
    return median_ms(compiled, (starts, counts, *arrays), study.repeats), temporary, out


def main(study: Study) -> dict[tuple[str, int], float]:
    """Print the table; -> milliseconds by (implementation, entries)."""
    s, device = study, jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {device.client.platform_version.splitlines()[0]}")
    print(f"T={s.queries} H={s.heads} C={s.latent} N={s.nope} R={s.shared} V={s.value} bfloat16, median of {s.repeats}")
    choice = prefill_implementation(facts=AttentionFacts("bfloat16", s.nope + s.shared, s.value, s.queries, s.queries))
    print(f"chosen: {choice.name} ({choice.reason})")
    print(f"{'entries':>9} {'form':<6}{'ms':>10}{'TFLOP/s':>9}{'floor ms':>10}{'temp GB':>9}{'distance':>10}")
    table = {}
    for entries in s.caches:
        arrays, flops, wanted = operands(s, entries), work(s, entries), None
        for name in [*(["xla"] if entries in s.plain else []), *(["cudnn"] if choice.name == "cudnn" else [])]:
            ms, temporary, out = measure(s, entries, name, arrays)
            table[name, entries] = ms
            far = "" if wanted is None else f"{distance(out, wanted):.1e}"
            wanted = out if wanted is None else wanted
            rates = f"{flops / ms / 1e9:9.0f}{flops / s.peak / 1e9:10.2f}"
            print(f"{entries:>9} {name:<6}{ms:10.2f}{rates}{temporary:9.2f}{far:>10}", flush=True)
    return table


if __name__ == "__main__":
    main(tyro.cli(Study))
