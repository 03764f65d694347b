"""The cache of a hybrid model: a state of constant size for each KDA layer, a latent a token for each MLA layer.

Shapes: B rows (slots), S capacity in tokens, W taps of the convolution, H query/key heads, G value heads, K and V channels of a key
and a value head, C latent width, R width of the shared key. Source: Kimi K3 report section 2.1; sizes in section 8 of the specification:
576 numbers a token and MLA layer, K x V numbers a head and KDA layer whatever the length.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..config import ModelConfig
from ..modules.model import compute_dtype
from ..ops.kda_layer import KDAState
from ..parallel.axes import cache_shardings
from .requests import at_least_one
from .weights import Weights, checked_dtype


class LatentCache(NamedTuple):
    """What an MLA layer keeps of the tokens seen, in the compute dtype. Entries at or after a row's length are never read."""

    latent: jax.Array  # [B,S,C] after its norm
    shared_key: jax.Array  # [B,S,R]


class HybridCache(NamedTuple):
    """The cache of all layers, first to last: a pytree of arrays whose first axis is the row."""

    layers: tuple[KDAState | LatentCache, ...]
    lengths: jax.Array
    """[B] int32 tokens seen."""

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int | None:
        """Tokens a row can hold; None: no layer keeps any, so there is no limit."""
        return next((layer.latent.shape[1] for layer in self.layers if isinstance(layer, LatentCache)), None)


class CacheBytes(NamedTuple):
    """Bytes of a cache by part."""

    recurrent: int
    convolution: int
    latent: int

    @property
    def total(self) -> int:
        return sum(self)


def new_cache(weights: Weights, rows: int, capacity: int, *, state_dtype: str | None = None) -> HybridCache:
    """`init_cache` for prepared weights: their dtype, on their device or spread over their mesh.

    Committed to its devices as the results of jitted functions are, or the second call of one would be another program to jit.
    """
    make = partial(init_cache, weights.config, rows, capacity, dtype=weights.dtype, state_dtype=state_dtype)
    if weights.parallel is not None:
        shardings = cache_shardings(jax.eval_shape(make), weights.parallel.mesh, weights.parallel.rules)
        return jax.jit(make, out_shardings=shardings)()
    devices = weights.embedding.devices()
    return jax.device_put(make(), weights.embedding.sharding if len(devices) == 1 else None)  # several: as XLA spreads it


def init_cache(config: ModelConfig, rows: int, capacity: int, *, dtype: str | None = None, state_dtype: str | None = None) -> HybridCache:
    """An empty cache of `rows` sequences of at most `capacity` tokens. With weights at hand, `new_cache` takes dtype and place from them.

    dtype: of latents and convolution histories, which must be that of the weights; None: the compute dtype of the configuration on this
    backend.
    state_dtype: storage of the KDA states, "float32", "bfloat16" (half the bytes; the step computes in float32 and rounds what it
    stores) or "float64"; None: float64 for float64, else float32.
    ValueError: rows or capacity below 1, a dtype that is not one of these. Under `jax.jit` with `out_shardings` it is made in shards.
    """
    layers = _abstract(config, rows, capacity, dtype, state_dtype)
    return HybridCache(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layers), jnp.zeros((rows,), jnp.int32))


def cache_bytes(config: ModelConfig, rows: int, capacity: int, *, dtype: str | None = None, state_dtype: str | None = None) -> CacheBytes:
    """Bytes that `init_cache` with the same arguments would take; nothing is allocated."""
    layers = _abstract(config, rows, capacity, dtype, state_dtype)
    states = [layer for layer in layers if isinstance(layer, KDAState)]
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    recurrent = size([state.recurrent for state in states])
    return CacheBytes(recurrent, size(states) - recurrent, size(layers) - size(states))


def take_rows(cache: HybridCache, rows) -> HybridCache:
    """A copy of some rows, in the given order: a snapshot of a conversation, or the start of several branches from one.

    rows: integers [N], each in 0..B-1 and allowed to repeat. The copy stays as it is when the cache goes on (or is donated).
    ValueError: rows that are not there (when their values are known).
    """
    rows = _row_numbers(rows, cache.rows)
    return jax.tree.map(lambda leaf: leaf[rows], cache)


def put_rows(cache: HybridCache, rows, other: HybridCache) -> HybridCache:
    """`cache` with its `rows` [N] replaced by those of `other` (N rows of the same model): restores a snapshot bit for bit.

    ValueError: rows that repeat or are not there, another number of rows, another model, capacity or dtype.
    """
    rows = _row_numbers(rows, cache.rows, distinct=True)
    ours, theirs = (jax.tree.map(lambda leaf: (leaf.shape[1:], str(leaf.dtype)), part) for part in (cache, other))
    if ours != theirs:
        raise ValueError(
            f"the two caches differ: capacity {cache.capacity} and {other.capacity}, {len(cache.layers)} and {len(other.layers)} layers, "
            "or other dtypes or widths; rows can be moved between caches made by init_cache with the same model, capacity and dtypes."
        )
    if other.rows != rows.shape[0]:
        raise ValueError(f"{rows.shape[0]} rows are named and the other cache has {other.rows}; they must be as many.")
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new), cache, other)


def clear_rows(cache: HybridCache, rows) -> HybridCache:
    """`cache` with `rows` [N] empty again: states and histories zero, length 0. Latents stay; nothing reads beyond a length.

    ValueError: rows that are not there (when their values are known).
    """
    rows = _row_numbers(rows, cache.rows)
    clear = lambda leaf: leaf.at[rows].set(0)
    layers = tuple(KDAState(*map(clear, layer)) if isinstance(layer, KDAState) else layer for layer in cache.layers)
    return HybridCache(layers, clear(cache.lengths))


def check_cut(cache: HybridCache, row: int, length: int) -> None:
    """Raise ValueError unless `row` already has exactly `length` tokens: a cache cannot be cut back.

    A KDA state is a sum over all tokens seen, and none of them can be taken out again; latents alone would be cut by their length.
    """
    have = int(np.asarray(cache.lengths)[_row_numbers(row, cache.rows)[0]])
    if have != length:
        raise ValueError(
            f"row {row} has seen {have} tokens and cannot be set back to {length}: KDA states hold no past. Restore a snapshot taken at "
            f"{length} tokens (take_rows, put_rows), or clear_rows and prefill the {length} tokens again."
        )


def _abstract(config: ModelConfig, rows: int, capacity: int, dtype: str | None, state_dtype: str | None) -> tuple[Any, ...]:
    """Every layer's part as shapes and dtypes, arguments checked."""
    dtype = checked_dtype("dtype", dtype or compute_dtype(config))
    state_dtype = checked_dtype("state_dtype", state_dtype or ("float64" if dtype == "float64" else "float32"))
    rows, capacity = at_least_one("rows", rows), at_least_one("capacity", capacity)
    part: Any = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct((rows, *shape), jnp.dtype(dtype))
    kda, mla = config.kda, config.mla
    width, keys, values = kda.conv_width - 1, kda.heads * kda.key_dim, kda.num_value_heads * kda.value_dim
    state = part(kda.num_value_heads, kda.key_dim, kda.value_dim, dtype=state_dtype)
    of_kda = KDAState(part(width, keys), part(width, keys), part(width, values), state)
    of_mla = LatentCache(part(capacity, mla.kv_latent), part(capacity, mla.rope_dim))
    return tuple(of_kda if mixer == "K" else of_mla for mixer in config.mixers)


def check_cache(weights: Weights, cache: HybridCache) -> None:
    """Raise ValueError unless the cache was made for these weights and still exists. Shapes and dtypes only: free, also inside jit."""
    if not isinstance(cache.lengths, Tracer) and cache.lengths.is_deleted():
        raise ValueError(
            "this cache was consumed by the call it was given to (its memory is reused): go on with the cache that the call returned, or "
            "keep a copy beforehand with take_rows."
        )
    if len(cache.layers) != weights.config.layers:
        raise ValueError(
            f"the cache has {len(cache.layers)} layers and the model {weights.config.layers}; make it with new_cache(weights, ...)."
        )
    stored = next((str(layer.recurrent.dtype) for layer in cache.layers if isinstance(layer, KDAState)), None)  # any will do
    needed = _abstract(weights.config, cache.rows, cache.capacity or 1, weights.dtype, stored)
    for index, (part, want) in enumerate(zip(cache.layers, needed, strict=True)):
        if _described(part) != _described(want):
            raise ValueError(
                f"layer {index} of the cache is {_described(part)}, and the model needs {_described(want)}; make it with "
                "new_cache(weights, rows, capacity)."
            )


def _described(part: Any) -> str:
    return f"{type(part).__name__}({', '.join(f'{leaf.dtype}{list(leaf.shape)}' for leaf in part)})"


def _row_numbers(rows, count: int, *, distinct: bool = False) -> jax.Array:
    rows = jnp.atleast_1d(jnp.asarray(rows))
    if rows.ndim != 1 or not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(f"rows is {rows.dtype}{list(rows.shape)}; it must be one integer or integers [N].")
    if isinstance(rows, Tracer):
        return rows
    named = np.asarray(rows)
    if named.size and (named.min() < 0 or named.max() >= count):
        raise ValueError(f"rows {named.tolist()}: the cache has rows 0 to {count - 1}.")
    if distinct and len(set(named.tolist())) < len(named):
        raise ValueError(f"rows {named.tolist()} repeat one; each row can take one replacement.")
    return rows
