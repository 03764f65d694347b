"""What the engine runs on the device: three programs over one cache whose rows are the slots.

Shapes: B slots, S capacity of a slot in tokens, T tokens of a chunk, M MoE layers, k experts a token.

Every program has fixed shapes, takes the slot as data and the cache as a donation, so that a request comes and goes without a compile.

A chunk of a prompt runs on the one row it belongs to: over all rows at once it would cost B chunks of arithmetic, whoever has tokens.
The row is copied out of the cache, as far as it is in use: the first `size` of its latents, where size is one of a few (`view_sizes`),
at most 4 times the tokens seen or 4096, and only the chunk's own entries are written back. The copy reads and writes those latents once
more than the chunk's attention does. By arithmetic, at 1M tokens of 576 bfloat16 numbers that is 2.4 GB a layer, half a millisecond at
4.8 TB/s, beside 5.5e12 operations of 512 queries with 16 heads, 7 ms at 790 TFLOP/s. States of KDA layers are small and move whole.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ..ops.kda_layer import KDAState
from ..parallel.axes import cache_shardings
from .cache import HybridCache, LatentCache, clear_rows, init_cache
from .decode import decode_step
from .prefill import prefill_chunk
from .sampling import Drawn, Sampling, sample
from .weights import Weights

LEAST_VIEW = 4096  # entries: 4.7 MB a layer at 576 bfloat16 numbers, not worth another compile
VIEW_GROWTH = 4  # each size is one compile; 4 gives five up to 1M tokens


def view_sizes(capacity: int, chunk: int) -> tuple[int, ...]:
    """Lengths of latents that a chunk of a prompt may be given, rising; the last is the capacity."""
    sizes, size = [], max(LEAST_VIEW, chunk)
    while size < capacity:
        sizes.append(size)
        size *= VIEW_GROWTH
    return (*sizes, capacity)


def empty_slots(weights: Weights, slots: int, capacity: int, state_dtype: str) -> tuple[jax.Array, HybridCache]:
    """`last` int32 [B] and the cache of slots that hold nothing, where the weights are.

    Both are committed to their devices as the programs' results are: with weights that are, the second call of a program would
    otherwise be another one to jit, and compile again.
    """
    make = partial(init_cache, weights.config, slots, capacity, dtype=weights.dtype, state_dtype=state_dtype)
    if weights.parallel is None:
        devices = weights.embedding.devices()
        place = weights.embedding.sharding if len(devices) == 1 else None  # several: as XLA spreads it
        return jax.device_put((jnp.zeros((slots,), jnp.int32), make()), place)
    mesh, rules = weights.parallel.mesh, weights.parallel.rules
    whole = NamedSharding(mesh, weights.parallel.spec())
    layers = cache_shardings(jax.eval_shape(make).layers, mesh, rules)
    cache = jax.jit(make, out_shardings=HybridCache(layers, whole))()  # pyright: ignore[reportArgumentType]
    return jax.device_put(jnp.zeros((slots,), jnp.int32), whole), cache


def take_slot(cache: HybridCache, slot: jax.Array, size: int) -> HybridCache:
    """A cache of the one row `slot`, with the first `size` of its latents."""

    def row(leaf, *sizes):
        return jax.lax.dynamic_slice(leaf, (slot, *(0,) * (leaf.ndim - 1)), (1, *sizes, *leaf.shape[1 + len(sizes) :]))

    layers = tuple(
        LatentCache(*(row(leaf, size) for leaf in layer)) if isinstance(layer, LatentCache) else KDAState(*map(row, layer))
        for layer in cache.layers
    )
    return HybridCache(layers, row(cache.lengths))


def put_slot(cache: HybridCache, slot: jax.Array, view: HybridCache, start: jax.Array, chunk: int) -> HybridCache:
    """`cache` with row `slot` as in `view`, whose latents differ from the row's at start .. start + chunk - 1 only."""

    def put(leaf, new, at: Any = 0):
        return jax.lax.dynamic_update_slice(leaf, new, (slot, at, *(0,) * (leaf.ndim - 2))[: leaf.ndim])

    def changed(leaf):
        return jax.lax.dynamic_slice_in_dim(leaf, start, chunk, axis=1)

    layers = tuple(
        LatentCache(*(put(leaf, changed(new), start) for leaf, new in zip(ours, theirs, strict=True)))
        if isinstance(ours, LatentCache)
        else KDAState(*(put(leaf, new) for leaf, new in zip(ours, theirs, strict=True)))
        for ours, theirs in zip(cache.layers, view.layers, strict=True)
    )
    return HybridCache(layers, put(cache.lengths, view.lengths))


@partial(jax.jit, donate_argnames=("cache",))
def clear_slot(cache: HybridCache, slot) -> HybridCache:
    """`cache` with the row `slot` empty."""
    return clear_rows(cache, slot[None])


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("size", "return_experts"))
def prefill_slot(
    weights: Weights, cache: HybridCache, last, sampling: Sampling, slot, tokens, count, *, size: int, return_experts: bool
) -> tuple[HybridCache, jax.Array, jax.Array, Any]:
    """Append tokens[:count] (int32 [T]) to the row `slot` and draw what follows them, which counts after a prompt's last chunk.

    Returns: the cache, `last` int32 [B] with the drawn token at `slot`, the draw packed [2,1], experts [T,M,k] or None.
    """
    view = take_slot(cache, slot, size)
    step = prefill_chunk(weights, view, tokens[None], count[None], return_experts=return_experts)
    cache = put_slot(cache, slot, step.cache, view.lengths[0], tokens.shape[0])
    own = Sampling(*(jax.lax.dynamic_slice_in_dim(jnp.asarray(values), slot, 1) for values in sampling))
    drawn = sample(step.logits, own, step.cache.lengths)
    last = last.at[slot].set(jnp.maximum(drawn.tokens[0], 0))
    return cache, last, _packed(drawn), None if step.experts is None else step.experts[0]


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("return_experts",))
def decode_slots(
    weights: Weights, cache: HybridCache, last, sampling: Sampling, active, *, return_experts: bool
) -> tuple[HybridCache, jax.Array, jax.Array, Any]:
    """Append `last` (int32 [B]) to the active (bool [B]) rows and draw the next tokens.

    Returns: the cache, `last` with the drawn tokens, the draws packed [2,B], experts [B,M,k] of the appended tokens or None.
    """
    step = decode_step(weights, cache, last, active=active, return_experts=return_experts)
    # A row that is free, or reads its prompt, keeps its settings; only active ones may call for noise or the sort.
    sampling = sampling._replace(temperature=jnp.where(active, sampling.temperature, 0))
    drawn = sample(step.logits, sampling, step.cache.lengths)
    last = jnp.where(active, jnp.maximum(drawn.tokens, 0), last)
    return step.cache, last, _packed(drawn), step.experts


def _packed(drawn: Drawn) -> jax.Array:
    """int32 [2,B], tokens and the bits of their log-probs: one array to bring to the host."""
    return jnp.stack([drawn.tokens, jax.lax.bitcast_convert_type(drawn.log_probs.astype(jnp.float32), jnp.int32)])


def unpacked(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """tokens int32 [B] and log-probs float32 [B], on the host."""
    return packed[0], packed[1].view(np.float32)
