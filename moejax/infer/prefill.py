"""Reading a prompt into a HybridCache, in chunks of any size.

Shapes: B rows, T tokens, V vocabulary, M MoE layers, k experts a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .cache import HybridCache, check_cache
from .forward import Mixers, logits_of, run_layers
from .mixers import kda_chunk, mla_chunk
from .requests import at_least_one
from .weights import Weights


class Step(NamedTuple):
    """What reading tokens gives."""

    logits: jax.Array
    """[B,V] float32 after each row's last token; 0 in a row without new tokens."""
    cache: HybridCache
    experts: jax.Array | None
    """int32 [B,T,M,k] (prefill) or [B,M,k] (decode) routed experts, best first, -1 where there is no token; None: not asked for."""


def prefill(
    weights: Weights,
    tokens: Any,
    cache: HybridCache,
    *,
    counts: Any = None,
    chunk: int = 2048,
    return_experts: bool = False,
) -> Step:
    """Append tokens to the rows of a cache, `chunk` tokens a row at a time; the cache handed in is consumed (take_rows keeps a copy).

    Any chunk size gives the same numbers up to rounding: states, convolutions and latents go on where the last chunk ended, and
    padding behind a row's count is never read, in no chunk.

    Args:
      weights: of `prepare`.
      tokens: [B,T] integers, rows padded at the end.
      cache: of `init_cache`, B rows; row b goes on at cache.lengths[b].
      counts: [B] tokens of each row, 0 to T; None: T each. A row with 0 stays as it is.
      chunk: tokens a row and call. Larger chunks are faster until the card is full, and take more memory: depth attention alone holds
        8 D bytes a token, row and layer of a block. One compile for each shape [B,chunk]; shorter prompts take the next power of two.
      return_experts: also return the routed experts.

    Raises:
      ValueError: shapes, ids or counts that do not fit, or more tokens than the cache has room for.
    """
    tokens = np.asarray(tokens)
    counts = _checked(weights, tokens, cache, counts, chunk)
    rows, length = tokens.shape
    chunk = min(chunk, 1 << (max(int(counts.max()), 1) - 1).bit_length())  # short prompts: few compiles, a power of two each
    logits, experts = None, []
    for start in range(0, max(int(counts.max()), 1), chunk):
        part = np.zeros((rows, chunk), np.int32)
        given = tokens[:, start : start + chunk]
        part[:, : given.shape[1]] = given
        now = np.clip(counts - start, 0, chunk).astype(np.int32)
        part[np.arange(chunk) >= now[:, None]] = 0  # padding ids may be anything
        step = _jitted_chunk(weights, cache, part, now, return_experts=return_experts)
        cache = step.cache
        logits = step.logits if logits is None else jnp.where((now > 0)[:, None], step.logits, logits)
        experts.append(step.experts)
    assert logits is not None
    if not return_experts or experts[0] is None:
        return Step(logits, cache, None)
    return Step(logits, cache, _fit(jnp.concatenate(experts, axis=1), length))


def prefill_chunk(weights: Weights, cache: HybridCache, tokens, counts, *, rows=None, return_experts: bool = False) -> Step:
    """One chunk, as a pure function for jit: tokens [B,T] int32, of row b the first counts[b] (int32 [B]) appended to the cache.

    rows: int32 [N] or None; tokens [N,T] and counts [N] then belong to these rows of the cache, which must differ, and the work is
    that of N rows, whatever the cache has. Not under a mesh that cuts rows, whose devices hold rows of their own.

    No value is checked, so that all may be traced: the caller sees to it that lengths + counts stay within the capacity.
    Donate the cache to the jit around it, or each call copies all of it.
    """
    check_cache(weights, cache)
    if rows is not None and weights.parallel is not None and weights.parallel.size("batch") > 1:
        raise ValueError("rows and a mesh that cuts rows exclude each other: give tokens for every row, with count 0 where there are none.")
    mask = jnp.arange(tokens.shape[1], dtype=jnp.int32) < counts[:, None]
    starts = cache.lengths if rows is None else cache.lengths[rows]
    mixers: Mixers = {"K": (kda_chunk, (counts, rows)), "M": (mla_chunk, (starts, counts, rows))}
    h, layers, experts = run_layers(weights, cache, tokens, mask, mixers, return_experts=return_experts)
    last = jnp.take_along_axis(h, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = jnp.where((counts > 0)[:, None], logits_of(weights, last), 0)
    lengths = cache.lengths + counts if rows is None else cache.lengths.at[rows].add(counts)
    return Step(logits, HybridCache(layers, lengths), experts)


_jitted_chunk: Any = jax.jit(prefill_chunk, donate_argnames=("cache",), static_argnames=("return_experts",))


def _fit(experts, length: int):
    """[B,T',M,k] -> [B,length,M,k], -1 where no chunk reached."""
    short = max(length - experts.shape[1], 0)
    return jnp.pad(experts, ((0, 0), (0, short), (0, 0), (0, 0)), constant_values=-1)[:, :length]


def _checked(weights: Weights, tokens: np.ndarray, cache: HybridCache, counts, chunk: int) -> np.ndarray:
    check_cache(weights, cache)
    if tokens.ndim != 2 or tokens.shape[1] == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens is {tokens.dtype}{list(tokens.shape)}; it must be integers [B,T] with T >= 1.")
    if tokens.shape[0] != cache.rows:
        raise ValueError(f"tokens has {tokens.shape[0]} rows and the cache {cache.rows}; a row without new tokens has count 0.")
    at_least_one("chunk", chunk)
    counts = np.full(tokens.shape[0], tokens.shape[1]) if counts is None else np.asarray(counts)
    if counts.shape != tokens.shape[:1] or counts.dtype.kind not in "iu" or counts.min() < 0 or counts.max() > tokens.shape[1]:
        raise ValueError(f"counts is {counts.tolist()}; it must be integers [B] between 0 and T = {tokens.shape[1]}.")
    real = tokens[np.arange(tokens.shape[1]) < counts[:, None]]
    if real.size and (real.min() < 0 or real.max() >= weights.config.vocab_size):
        raise ValueError(f"token ids span [{real.min()}, {real.max()}]; they must lie in [0, {weights.config.vocab_size}), the vocabulary.")
    check_room(cache, counts)
    return counts.astype(np.int64)  # unsigned ones would wrap where a chunk begins behind a row's end


def check_room(cache: HybridCache, counts) -> None:
    """Raise ValueError where counts [B] more tokens do not fit into the rows of `cache`."""
    capacity = cache.capacity
    if capacity is None:
        return
    lengths = np.asarray(cache.lengths)
    full = np.flatnonzero(lengths + counts > capacity)
    if full.size:
        row = int(full[0])
        raise ValueError(
            f"row {row} holds {lengths[row]} tokens and {int(np.asarray(counts)[row])} more exceed the cache's capacity of {capacity}; "
            "make it larger with init_cache(capacity=...)."
        )
