"""Why the gate has a lower bound: where dense 16-row tiles of KDA overflow, and what they cost in accuracy.

    python experiments/bench/lower_bound.py

A tile's pair scores, sum_d q_id k_jd e^(G_i - G_j), as one dense product need the factors e^(G_i - a) and e^(a - G_j) one by one.
With every gate >= -5 they stay within e^(+-40) and fit bfloat16 (which has float32's range). Without a bound they overflow once
the gates of a tile sum below about -128, and only a pairwise form is left. The table takes keys and gates as in training: unit
vectors, gates around each size, all of them equal ("saturated") or spread as `size * sigmoid(normal)`.
"""

import argparse

import jax.numpy as jnp
import numpy as np

from moejax.kernels.kda import kda
from moejax.kernels.kda.layout import CHUNK as ROWS
from moejax.kernels.kda.pairwise import pair_scores
from moejax.kernels.kda.tiles import decay_factors

SIZES = (0.1, 1.0, 2.5, 5.0, 5.9, 7.0, 8.0, 8.25, 8.5, 9.0, 12.0, 20.0, 100.0)
BOUND = -5.0


def exact_tiles(q, k, g):
    """The pair scores [n,R,R] in float64, each from its own sum of gates."""
    total = np.cumsum(g, axis=1)
    span = total[:, :, None] - total[:, None, :]
    span = np.where(np.tri(q.shape[1], dtype=bool)[:, :, None], span, -np.inf)
    return np.einsum("nik,njk,nijk->nij", q, k, np.exp(span))


def dense_tiles(q, k, g):
    """The same by one dense product with bfloat16 operands, on the path for gates >= -5: [n,R,R] float32."""
    decays = decay_factors(jnp.asarray(g, jnp.float32), BOUND)
    assert decays.own is not None  # there is a bound
    rows = jnp.asarray(q, jnp.float32) * decays.row
    columns = jnp.asarray(k, jnp.float32) * decays.own
    operands = (x.astype(jnp.bfloat16) for x in (rows, columns))
    scores = jnp.einsum("nik,njk->nij", *operands, preferred_element_type=jnp.float32)
    return jnp.where(np.tri(ROWS, dtype=bool), scores, 0)


def pairwise_tiles(q, k, g):
    """The same pair by pair, with q and k rounded to bfloat16: [n,R,R] float32."""
    q, k = (jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)[:, None] for x in (q, k))
    return pair_scores(q, k, jnp.exp(jnp.asarray(g, jnp.float32))[:, None])[0][:, 0]


def relative_error(value, wanted) -> float:
    """Largest difference over the largest entry; inf when anything is not finite."""
    value = np.asarray(value, np.float64)
    return float(np.max(np.abs(value - wanted)) / np.max(np.abs(wanted))) if np.all(np.isfinite(value)) else float("inf")


def study(size: float, *, spread: bool, tiles: int = 64, channels: int = 128, seed: int = 0) -> dict[str, float]:
    """Errors against float64 for gates of one size: of the tiles, and of whole `kda` calls with and without the promise."""
    rng = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(rng.normal(size=(tiles, ROWS, channels))).astype(np.float32) for _ in range(2))
    factor = 1 / (1 + np.exp(-rng.normal(size=q.shape))) if spread else np.ones(q.shape)
    g = (-size * factor).astype(np.float32)
    wanted = exact_tiles(*(x.astype(np.float64) for x in (q, k, g)))
    found = {"dense": relative_error(dense_tiles(q, k, g), wanted), "pairwise": relative_error(pairwise_tiles(q, k, g), wanted)}
    row = lambda x: jnp.asarray(x.reshape(1, -1, 1, channels))
    v, beta = jnp.asarray(rng.normal(size=(1, tiles * ROWS, 1, 16)), jnp.float32), jnp.full((1, tiles * ROWS, 1), 0.5)
    args = (row(q), row(k), v, row(g), beta)
    wanted = np.asarray(kda(*args, implementation="reference")[0], np.float64)
    for name, bound in (("kda(lower_bound=-5)", BOUND), ("kda(lower_bound=None)", None)):
        found[name] = relative_error(kda(*args, lower_bound=bound)[0], wanted)
    return found


def first_overflow(*, spread: bool, step: float = 0.05, most: float = 40.0) -> float | None:
    """The first gate size, in steps of `step`, at which a dense tile holds inf or NaN."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(64, ROWS, 128)) / np.sqrt(128)
    factor = 1 / (1 + np.exp(-rng.normal(size=q.shape))) if spread else np.ones(q.shape)
    for size in np.arange(step, most, step):
        if not np.all(np.isfinite(dense_tiles(q, q, -size * factor))):
            return float(size)
    return None


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    columns = ("dense", "pairwise", "kda(lower_bound=-5)", "kda(lower_bound=None)")
    print("relative error against float64 (tiles: bfloat16 operands; kda: float32); inf = inf or NaN in the result")
    print(f"{'gates':>10} {'size':>7}", *(f"{name:>22}" for name in columns))
    for spread in (False, True):
        for size in SIZES:
            found = study(size, spread=spread)
            print(f"{'spread' if spread else 'saturated':>10} {-size:7.2f}", *(f"{found[name]:22.1e}" for name in columns))
    for spread in (False, True):
        size = first_overflow(spread=spread)
        print(f"first overflow of the dense path, {'spread' if spread else 'saturated'} gates: size -{size:.2f} a token")


if __name__ == "__main__":
    main()
