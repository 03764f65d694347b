"""One pass over all layers with a cache: the residual stream, depth attention in two phases, feed-forwards, and the output head.

Depth attention reads its snapshots once a block, for all queries of the block together, and joins the running sum later, query by query
(Kimi K3 report section 2.2; Attention Residuals, arXiv 2603.15031, algorithm 1). The result is the same softmax mix.

Shapes: B rows, T new tokens, D model width, V vocabulary, M MoE layers, k experts a token, Q queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config import ModelConfig
from ..modules.feed_forward import gated_activation
from ..modules.plan import block_starts
from ..ops.depth_attention import DepthPartial, attention_residual, depth_attention, depth_attention_merge, depth_attention_snapshots
from ..ops.experts import (
    EnteredLatent,
    LatentMoEWeights,
    PackedExperts,
    enter_latent,
    expert_mlp,
    gated_mlp,
    leave_latent,
    num_experts,
    router_logits,
    shared_expert,
)
from ..ops.experts_few import MOST_TOKENS, few_token_experts, few_token_form
from ..ops.norms import rms_norm
from ..ops.routing import route
from ..parallel.layers import sharded_latent_moe
from .cache import HybridCache
from .mixers import over_mesh
from .weights import DenseWeights, LayerWeights, Weights

Mixers = dict[str, tuple[Callable[..., tuple[jax.Array, Any]], tuple]]
"""Of "K" and "M": a function of mixers.py, and its arguments by row."""


def run_layers(
    weights: Weights, cache: HybridCache, tokens: jax.Array, mask: jax.Array | None, mixers: Mixers, *, return_experts: bool
) -> tuple[jax.Array, tuple, jax.Array | None]:
    """tokens [B,T] -> the stream [B,T,D] behind all layers and the output's depth attention, the cache's new layers, and the routed
    experts [B,T,M,k] or None. mask: [B,T] bool, False where there is no token, or None."""
    config, cached = weights.config, list(cache.layers)
    walk = {"plain": _plain, "block": _blocks, "full": _full}[config.residual]
    experts: list[jax.Array] = []

    def feed(layer: LayerWeights, h: jax.Array) -> jax.Array:
        return _feed_forward(weights, layer, h, mask, experts if return_experts else None)

    def mixed(index: int, h: jax.Array) -> jax.Array:
        layer = weights.layers[index]
        call, per_row = mixers[config.mixers[index]]
        with jax.named_scope(f"layer_{index}"):
            h = rms_norm(h, layer.mixer_norm, eps=config.norm_eps)
            y, cached[index] = over_mesh(weights.parallel, partial(call, config=config), h, layer.mixer, cached[index], per_row)
        return y

    out = walk(weights, _embed(weights, tokens, mask), mixed, feed)
    return out, tuple(cached), jnp.stack(experts, axis=2) if experts else None


def logits_of(weights: Weights, h: jax.Array) -> jax.Array:
    """The stream [B,D] -> logits [B,V] float32 (float64 for float64)."""
    h = rms_norm(h, weights.final_norm, eps=weights.config.norm_eps)
    wide = jnp.promote_types(h.dtype, jnp.float32)
    return jnp.matmul(h, weights.head.astype(h.dtype), preferred_element_type=wide)


def _embed(weights: Weights, tokens: jax.Array, mask: jax.Array | None) -> jax.Array:
    """tokens [B,T] -> [B,T,D]; 0 where mask [B,T] is False, whose ids may be anything."""
    x = jnp.take(weights.embedding, tokens, axis=0, mode="clip").astype(weights.dtype)
    return x if mask is None else jnp.where(mask[..., None], x, 0)


def _plain(weights: Weights, prefix, mixed, feed):
    for index, layer in enumerate(weights.layers):
        prefix = prefix + mixed(index, prefix)
        prefix = prefix + feed(layer, prefix)
    return prefix


def _full(weights: Weights, x, mixed, feed):
    sources, eps = [x], weights.config.norm_eps
    for index, layer in enumerate(weights.layers):
        sources.append(mixed(index, attention_residual(jnp.stack(sources), *layer.mixer_query, eps=eps)))  # pyright: ignore[reportOptionalIterable]
        sources.append(feed(layer, attention_residual(jnp.stack(sources), *layer.ffn_query, eps=eps)))  # pyright: ignore[reportOptionalIterable]
    return attention_residual(jnp.stack(sources), *weights.output_query, eps=eps)  # pyright: ignore[reportOptionalIterable]


def _blocks(weights: Weights, x, mixed, feed):
    config, snapshots = weights.config, []
    starts, dtype = block_starts(config), x.dtype
    for start in starts:
        layers = weights.layers[start : start + starts.step]
        snapshots.append(x)
        shares = _snapshots_share(jnp.stack(snapshots), layers, config.norm_eps)
        prefix: Any = None
        for offset, layer in enumerate(layers):
            h = _joined(shares, 2 * offset, prefix, layer.mixer_query, config).astype(dtype)
            added = mixed(start + offset, h)
            prefix = added if prefix is None else prefix + added
            prefix = prefix + feed(layer, _joined(shares, 2 * offset + 1, prefix, layer.ffn_query, config))
        x = prefix
    return depth_attention(jnp.stack(snapshots), x, *weights.output_query, eps=config.norm_eps)  # pyright: ignore[reportOptionalIterable]


def _snapshots_share(snapshots, layers, eps: float) -> DepthPartial:
    """Phase one: all queries of the block against the snapshots."""
    queries = [query for layer in layers for query in (layer.mixer_query, layer.ffn_query)]
    norms, vectors = (jnp.stack(part) for part in zip(*queries, strict=True))
    return depth_attention_snapshots(snapshots, norms, vectors, eps=eps)


def _joined(shares: DepthPartial, index: int, prefix, query, config: ModelConfig):
    """Phase two: the share of query `index` of the block with the running sum."""
    return depth_attention_merge(DepthPartial(*(part[index] for part in shares)), prefix, *query, eps=config.norm_eps)


def _feed_forward(weights: Weights, layer: LayerWeights, h, mask, experts: list | None):
    config = weights.config
    h = rms_norm(h, layer.ffn_norm, eps=config.norm_eps)
    activation = gated_activation(config.activation, config.gate_cap, config.up_cap)
    if isinstance(layer.ffn, DenseWeights):
        with jax.named_scope("dense"):
            return gated_mlp(h, *layer.ffn, activation=activation)
    with jax.named_scope("moe"):
        y, chosen = _moe(weights, layer, h, mask, activation, want=experts is not None)
    if experts is not None:
        experts.append(chosen)
    return y


def _moe(weights: Weights, layer: LayerWeights, h, mask, activation, *, want: bool):
    """h [B,T,D] -> (y [B,T,D], experts [B,T,k], -1 where mask is False, or None)."""
    c, ffn, eps = weights.config.moe, layer.ffn, weights.config.norm_eps
    assert isinstance(ffn, LatentMoEWeights)
    options: Any = {"scaling": c.scaling, "renormalize": c.renormalize}
    if weights.parallel is None:
        entered = enter_latent(h, layer.bias, ffn, c.experts_per_token, mask=mask, **options)
        y = _expert_products(entered, activation)
        y = leave_latent(y, ffn, shared_expert(entered.flat, ffn, activation), eps).reshape(h.shape)
        chosen = entered.routing.experts
    else:
        options |= {"activation": activation, "eps": eps, "implementation": None, "rule": None, "bins": c.histogram_bins}
        ids = None if mask is None else mask.astype(jnp.int32)
        y, _ = sharded_latent_moe(weights.parallel, h, layer.bias, ffn, c.experts_per_token, segment_ids=ids, **options)
        chosen = route(router_logits(h.reshape(-1, h.shape[-1]), ffn.router), layer.bias, c.experts_per_token).experts
    if not want:
        return y, None
    chosen = chosen.reshape(*h.shape[:2], -1)
    return y, chosen if mask is None else jnp.where(mask[..., None], chosen, -1)


def _expert_products(entered: EnteredLatent, activation):
    """The routed experts' sum. A GPU takes the batched form at any number of tokens: it has no kernel for expert_mlp's loop, 128 rows a
    turn, whose turns cost a handful of launches each."""
    operands: Any = (entered.latent, entered.routing.experts, entered.routing.weights, *entered.matrices)
    few, many = (partial(product, activation=activation) for product in (few_token_experts, expert_mlp))
    tokens, chosen = entered.routing.experts.shape
    form = few_token_form(tokens, chosen, num_experts(entered.matrices[0])).name
    if isinstance(entered.matrices[0], PackedExperts):  # decoding MXFP4 costs more than launches: 17.5 against 14.7 ms at 64 tokens
        return (few if form == "gather" else many)(*operands, mask=entered.mask)
    if tokens <= MOST_TOKENS:  # beyond, a CPU has no arithmetic to waste
        return few(*operands, mask=entered.mask)
    by_platform = {"cuda": few, "default": many}
    calls = {name: lambda mask, *operands, run=run: run(*operands, mask=mask) for name, run in by_platform.items()}
    return lax.platform_dependent(entered.mask, *operands, **calls)
