"""The token mixers with a cache: a chunk of a prompt, or one token, in KDA and in gated MLA layers.

Every function takes and returns its layer's part of the cache and works on each row by itself, so under a mesh it runs as it is on the
rows and heads of one device (`over_mesh`); only the sum over heads crosses devices.

Shapes: B rows, T new tokens, D model width, S capacity of the cache, H heads, C latent width, R width of the shared key.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config import MLAConfig, ModelConfig
from ..kernels.kda.decode import kda_decode
from ..kernels.varying import match_varying
from ..ops.kda_layer import KDAState, KDAWeights, kda_layer, layer_around
from ..ops.mla import MLAWeights, absorbed_latent_attention, mla_output, mla_project
from ..ops.mla_prefill import cached_latent_attention
from ..ops.short_conv import short_conv_steps
from ..parallel.axes import CACHE_AXES
from ..parallel.layers import ModelParallel, weight_specs
from .cache import LatentCache


def kda_chunk(x, weights: KDAWeights, cached: KDAState, counts, rows, *, config: ModelConfig) -> tuple[jax.Array, KDAState]:
    """x [B,T,D] normed, of row b the first counts[b] tokens new -> (y [B,T,D], 0 behind them, the state after them).

    rows: [B] the rows of the cache that x belongs to, or None: row b is row b.
    """
    state = cached if rows is None else KDAState(*(part[rows] for part in cached))
    segments = (jnp.arange(x.shape[1], dtype=jnp.int32) < counts[:, None]).astype(jnp.int32)
    stored = state.recurrent.dtype
    wide = state._replace(recurrent=state.recurrent.astype(jnp.promote_types(stored, jnp.float32)))
    options: Any = {"lower_bound": config.kda.lower_bound, "norm_eps": config.norm_eps}
    y, new = kda_layer(x, weights, state=wide, segment_ids=segments, return_state=True, **options)
    assert new is not None
    new = new._replace(recurrent=new.recurrent.astype(stored))
    return y, new if rows is None else KDAState(*(part.at[rows].set(own) for part, own in zip(cached, new, strict=True)))


def kda_token(x, weights: KDAWeights, state: KDAState, active, *, config: ModelConfig) -> tuple[jax.Array, KDAState]:
    """x [B,1,D] normed, active [B] bool or None (all) -> (y [B,1,D], the state after one token); inactive rows give 0 and keep theirs."""
    rows = jnp.arange(x.shape[0], dtype=jnp.int32)
    slots = None if active is None else jnp.where(active, rows, -1)

    def convolve(inputs, taps, histories):
        mixed, moved = short_conv_steps([a[:, 0] for a in inputs], taps, histories, active=active)
        return [y[:, None] for y in mixed], moved

    def recur(q, k, v, raw_gate, beta_logits, A_log, dt_bias):
        token: Any = (part[:, 0] for part in (q, k, v, raw_gate, beta_logits))
        o, new = kda_decode(*token, A_log=A_log, dt_bias=dt_bias, state=state.recurrent, lower_bound=config.kda.lower_bound, slots=slots)
        return o[:, None], new

    ids = None if active is None else active.astype(jnp.int32)[:, None]
    y, new = layer_around(x, weights, convolve, recur, norm_eps=config.norm_eps, state=state, segment_ids=ids, implementation=None)
    assert new is not None
    return (y if active is None else jnp.where(active[:, None, None], y, 0)), new


def mla_chunk(x, weights: MLAWeights, cache: LatentCache, starts, counts, rows, *, config: ModelConfig) -> tuple[jax.Array, LatentCache]:
    """x [B,T,D] normed, its first counts[b] tokens appended at starts[b] -> (y [B,T,D], 0 behind them, the cache with them).

    rows: as in kda_chunk.
    """
    offset = jnp.arange(x.shape[1], dtype=jnp.int32)
    at = starts[:, None] + offset
    new = offset < counts[:, None]
    x = jnp.where(new[..., None], x, 0)
    q, latent, shared_key = mla_project(x, weights, **_positions(config.mla, at))
    cache = _append(cache, latent, shared_key, jnp.where(new, at, cache.latent.shape[1]), rows)
    k_up, v_up = weights.k_up.astype(x.dtype), weights.v_up.astype(x.dtype)
    heads = cached_latent_attention(q, *cache, k_up, v_up, starts=starts, counts=counts, rows=rows)
    return mla_output(heads, x, weights), cache


def mla_token(x, weights: MLAWeights, cache: LatentCache, lengths, active, *, config: ModelConfig) -> tuple[jax.Array, LatentCache]:
    """x [B,1,D] normed, appended at lengths[b] -> (y [B,1,D], the cache); inactive rows give 0 and keep theirs."""
    at = lengths
    if active is not None:
        x = jnp.where(active[:, None, None], x, 0)
        at = jnp.where(active, lengths, cache.latent.shape[1])
        lengths = jnp.where(active, lengths, -1)
    q, latent, shared_key = mla_project(x, weights, **_positions(config.mla, lengths[:, None]))
    cache = _append(cache, latent, shared_key, at[:, None])
    k_up, v_up = weights.k_up.astype(x.dtype), weights.v_up.astype(x.dtype)
    heads = absorbed_latent_attention(q, *cache, k_up, v_up, lengths=lengths + 1)
    return mla_output(heads, x, weights), cache


def _positions(config: MLAConfig, at) -> dict[str, Any]:
    if config.positions == "none":
        return {}
    return {"positions": at, "rotary_base": config.rotary_base, "rotary_scale": config.rotary_scale}


def _append(cache: LatentCache, latent, shared_key, at, rows=None) -> LatentCache:
    """Entries [B,T,*] written at `at` [B,T]; places past the end are dropped. In place when the cache is donated."""
    rows = jnp.arange(at.shape[0], dtype=jnp.int32) if rows is None else rows
    put = lambda stored, new: stored.at[rows[:, None], at].set(new.astype(stored.dtype), mode="drop")
    return LatentCache(put(cache.latent, latent), put(cache.shared_key, shared_key))


def over_mesh(parallel: ModelParallel | None, mix, x, weights, cache, per_row: tuple) -> tuple[jax.Array, Any]:
    """mix(x, weights, cache, *per_row) -> (y, cache), on the rows and heads of each device; per_row: arrays [B] or None."""
    if parallel is None:
        return mix(x, weights, cache, *per_row)
    if x.shape[0] % parallel.size("batch"):
        raise ValueError(
            f"{x.shape[0]} rows over {parallel.size('batch')} parts of the mesh ({', '.join(parallel.axes('batch'))}); a cache needs a "
            "multiple, idle rows being inactive or of count 0."
        )
    heads, batch = parallel.axes("heads"), parallel.spec("batch")

    def local(x, weights, cache, per_row):
        y, cache = mix(x, jax.tree.map(lambda w: match_varying(w, x), weights), cache, *per_row)
        return (lax.psum(y, heads) if heads else y), cache

    cached = type(cache)(*(parallel.spec(*CACHE_AXES[name]) for name in cache._fields))
    tokens = parallel.spec("batch", None, None)
    specs = (tokens, weight_specs(weights, {}, parallel), cached, tuple(None if row is None else batch for row in per_row))
    mapped = jax.shard_map(local, mesh=parallel.mesh, in_specs=specs, out_specs=(tokens, cached))
    return mapped(x, weights, cache, per_row)
