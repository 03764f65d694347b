"""What the engine runs on the device: three programs over one cache whose rows are the slots.

Shapes: B slots, S capacity of a slot in tokens, T tokens of a chunk, M MoE layers, k experts a token.

Every program has fixed shapes, takes the slot as data and the cache as a donation, so that a request comes and goes without a compile.

A chunk of a prompt runs on the one row it belongs to, read and written where it lies: over all rows at once it would cost B chunks of
arithmetic, whoever has tokens, and a row copied out would move 1.2 GB of latents a layer at 1M tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from .cache import HybridCache, clear_rows, new_cache
from .decode import decode_step
from .prefill import prefill_chunk
from .sampling import Drawn, Sampling, sample
from .weights import Weights


def empty_slots(weights: Weights, slots: int, capacity: int, state_dtype: str | None) -> tuple[jax.Array, HybridCache]:
    """`last` int32 [B] and the cache of slots that hold nothing, where the weights are.

    Both are committed to their devices as the programs' results are: with weights that are, the second call of a program would
    otherwise be another one to jit, and compile again.
    """
    cache = new_cache(weights, slots, capacity, state_dtype=state_dtype)
    if weights.parallel is not None:
        place = NamedSharding(weights.parallel.mesh, weights.parallel.spec())
    else:
        place = weights.embedding.sharding if len(weights.embedding.devices()) == 1 else None  # several: as XLA spreads it
    return jax.device_put(jnp.zeros((slots,), jnp.int32), place), cache


@partial(jax.jit, donate_argnames=("cache",))
def clear_slot(cache: HybridCache, slot) -> HybridCache:
    """`cache` with the row `slot` empty."""
    return clear_rows(cache, slot[None])


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("return_experts",))
def prefill_slot(
    weights: Weights, cache: HybridCache, last, sampling: Sampling, slot, tokens, count, *, return_experts: bool
) -> tuple[HybridCache, jax.Array, jax.Array, Any]:
    """Append tokens[:count] (int32 [T]) to the row `slot` and draw what follows them, which counts after a prompt's last chunk.

    Returns: the cache, `last` int32 [B] with the drawn token at `slot`, the draw packed [2,1], experts [T,M,k] or None.
    """
    step = prefill_chunk(weights, cache, tokens[None], count[None], rows=slot[None], return_experts=return_experts)
    own = Sampling(*(jax.lax.dynamic_slice_in_dim(jnp.asarray(values), slot, 1) for values in sampling))
    drawn = sample(step.logits, own, step.cache.lengths[slot][None])
    last = last.at[slot].set(jnp.maximum(drawn.tokens[0], 0))
    return step.cache, last, _packed(drawn), None if step.experts is None else step.experts[0]


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
