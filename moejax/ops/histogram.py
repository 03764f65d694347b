"""Exact integer counting on every platform.

Shapes: N tokens, E experts, k choices a token. index int32 [N,E] with values in [0, bins), mask bool [N].
"""

import math

import jax
import jax.numpy as jnp
from jax import Array


def count_bins(index: Array, mask: Array, bins: int) -> Array:
    """int32 [E,bins]: how many unmasked tokens have `index[i, j] == b`. Indices must lie in [0, bins).

    Scatter-add of integers (on 2 CPU cores at 8192 x 896 and 1000 bins 28 ms, against 250 ms by sorting and 395 ms by
    one-hot products; a GPU has integer atomics); on TPU, which runs a scatter row by row, two-digit one-hot products
    on the matrix unit.
    """
    return jax.lax.platform_dependent(
        index,
        mask,
        default=lambda i, m: count_bins_scatter(i, m, bins),
        tpu=lambda i, m: count_bins_product(i, m, bins),
    )


def count_bins_scatter(index: Array, mask: Array, bins: int) -> Array:
    experts = index.shape[1]
    flat = index + bins * jnp.arange(experts, dtype=jnp.int32)
    ones = jnp.broadcast_to(mask[:, None], index.shape).astype(jnp.int32)
    counts = jnp.zeros((experts * bins,), jnp.int32)
    return counts.at[flat.reshape(-1)].add(ones.reshape(-1), mode="promise_in_bounds").reshape(experts, bins)


def count_bins_product(index: Array, mask: Array, bins: int, *, block: int = 256) -> Array:
    """b = high * base + low: counts[e, high, low] is a product of two narrow one-hot matrices over the tokens.

    bfloat16 holds 0 and 1, float32 sums of 256 of them are exact, and blocks are added as integers.
    """
    tokens, experts = index.shape
    base = math.isqrt(bins - 1) + 1
    block = min(block, tokens)
    spare = -tokens % block
    index = jnp.pad(index, ((0, spare), (0, 0))).reshape(-1, block, experts)
    mask = jnp.pad(mask, (0, spare)).reshape(-1, block)
    digits = jnp.arange(base, dtype=jnp.int32)

    def add(counts, rows):
        i, m = rows
        high = ((i // base)[..., None] == digits) & m[:, None, None]
        low = (i % base)[..., None] == digits
        product = jnp.einsum(
            "neh,nel->ehl", high.astype(jnp.bfloat16), low.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        return counts + product.astype(jnp.int32), None

    # Made from the indices so that inside shard_map the sum is device-varying from the start, as scan requires.
    zeros = jnp.zeros((experts, base, base), jnp.int32) + 0 * index[0, 0, :, None, None]
    counts, _ = jax.lax.scan(add, zeros, (index, mask))
    return counts.reshape(experts, base * base)[:, :bins]


def expert_load(experts: Array, mask: Array, num_experts: int) -> Array:
    """int32 [E]: how many unmasked tokens [N] chose each expert; experts int32 [N,k]."""
    ones = jnp.broadcast_to(mask[:, None], experts.shape).astype(jnp.int32)
    load = jnp.zeros((num_experts,), jnp.int32)
    return load.at[experts.reshape(-1)].add(ones.reshape(-1), mode="drop")
