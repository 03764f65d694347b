"""Grouped product: this library's loop over sorted blocks against its rivals, value and both gradients.

Rivals: one batched product over gathered blocks (copies a matrix a block), the masked loop over groups (the reference)
and jax.lax.ragged_dot. CPU time is the process time of a call; it is what to compare on a machine that others use too.

    python experiments/bench/grouped_matmul.py [--rows 8192] [--experts 32 64] [--inner 64] [--outer 128] [--repeats 8]
"""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from moejax.kernels.grouped_matmul import blocks, grouped_matmul


@dataclass(frozen=True)
class Study:
    """Sizes: rows [N], experts [E] (several), inner [K], outer [M]."""

    rows: int = 8192
    experts: tuple[int, ...] = (32, 64)
    inner: int = 64
    outer: int = 128
    repeats: int = 8
    seed: int = 0


def batched(x, w, group_sizes):
    """Rows gathered into [G,R,K], one batched product with [G,K,M] gathered matrices, rows gathered back."""
    plan = blocks.plan_blocks(group_sizes, x.shape[0])
    row = plan.start[:, None] + jnp.arange(plan.rows)
    used = (row < plan.stop[:, None]) & (jnp.arange(plan.group.shape[0]) < plan.count)[:, None]
    rows = jnp.where(used[..., None], jnp.take(x, row, axis=0, mode="clip"), 0)
    products = jnp.einsum("grk,gkm->grm", rows, w[plan.group])
    back = jnp.where(used, row, x.shape[0]).reshape(-1)
    slot = jnp.zeros(x.shape[0] + 1, jnp.int32).at[back].set(jnp.arange(back.shape[0], dtype=jnp.int32))[:-1]
    return products.reshape(-1, w.shape[2])[slot]


CANDIDATES = {
    "xla (loop over blocks)": lambda *a: grouped_matmul(*a, implementation="xla"),
    "batched blocks": batched,
    "reference (masked loop)": lambda *a: grouped_matmul(*a, implementation="reference"),
    "jax.lax.ragged_dot": jax.lax.ragged_dot,
}


def measure(function, *arguments, repeats):
    """(fastest call, mean process time of a call) in milliseconds, after one call to compile."""
    jax.block_until_ready(function(*arguments))
    fastest, start = float("inf"), time.process_time()
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        fastest = min(fastest, time.perf_counter() - began)
    return 1e3 * fastest, 1e3 * (time.process_time() - start) / repeats


def main(study: Study) -> dict[tuple[int, str], tuple[float, float]]:
    if min(study.rows, study.inner, study.outer, study.repeats, *study.experts) < 1:
        raise ValueError(f"{study}: every size must be at least 1.")
    rng, results = np.random.default_rng(study.seed), {}
    print(f"{study}, float32, jax {jax.__version__} on {jax.default_backend()}: value and both gradients")
    for experts in study.experts:
        sizes = jnp.asarray(rng.multinomial(study.rows, rng.dirichlet(np.full(experts, 4.0))), jnp.int32)
        x, w, ct = (
            jnp.asarray(rng.normal(size=s), jnp.float32)
            for s in ((study.rows, study.inner), (experts, study.inner, study.outer), (study.rows, study.outer))
        )
        expected = None
        for name, candidate in CANDIDATES.items():

            @jax.jit
            def step(x, w, sizes, candidate=candidate, ct=ct):
                out, pull = jax.vjp(lambda x, w: candidate(x, w, sizes), x, w)
                return out, *pull(ct)

            got = step(x, w, sizes)
            expected = got if expected is None else expected
            error = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(got, expected, strict=True))
            if error > 1e-5:
                raise RuntimeError(f"{name} differs from the first candidate by {error:.1e}")
            results[experts, name] = measure(step, x, w, sizes, repeats=study.repeats)
            wall, process = results[experts, name]
            print(f"  {experts:4d} experts  {name:26}{wall:10.1f} ms{process:10.1f} ms of CPU time", flush=True)
    return results


if __name__ == "__main__":
    main(tyro.cli(Study))
