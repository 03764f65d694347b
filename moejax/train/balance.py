"""Routing statistics of a step -> the next selection bias, and the figures people watch.

Statistics arrive as the forward's `router_stats` tree: one dict a MoE layer, leaves stacked [repeats, units, ...].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from ..config import ModelConfig
from ..modules.plan import layer_locations
from ..ops.balance_measures import load_metrics
from ..ops.balance_rules import PER_TOKEN, BalanceStrength, updated_bias

Statistics = dict[tuple[str, ...], dict[str, jax.Array]]
"""Path of a MoE layer -> its statistics."""


def by_layer(router_stats: Any) -> Statistics:
    """The `router_stats` collection as one dict a MoE layer."""
    layers: Statistics = {}
    flat: dict[tuple[str, ...], Any] = flatten_dict(router_stats)
    for path, leaf in flat.items():
        if path[-1] not in ("aux_loss", "aux_loss_total"):
            layers.setdefault(path[:-1], {})[path[-1]] = leaf
    return layers


def select_statistics(statistics: Statistics, *, per_token: bool) -> Statistics:
    """The statistics with one row a token (the exact rule's), or all others, which add over sets of tokens."""
    return {
        path: {name: leaf for name, leaf in stats.items() if (name in PER_TOKEN) == per_token}
        for path, stats in statistics.items()
    }


def join_statistics(summed: Statistics, per_token: Statistics, stacked: bool) -> Statistics:
    """Summed statistics, and per-token ones [M,...,N,...] of M micro-batches laid end to end along N."""
    axis = 2 if stacked else 0  # of N, after [repeats, units]

    def lay(leaf: jax.Array) -> jax.Array:
        leaf = jnp.moveaxis(leaf, 0, axis)
        return leaf.reshape(*leaf.shape[:axis], -1, *leaf.shape[axis + 2 :])

    return {path: summed[path] | {name: lay(leaf) for name, leaf in per_token[path].items()} for path in summed}


def update_router(
    rule: str, router_state: Any, statistics: Statistics, k: int, strength: BalanceStrength, stacked: bool
) -> Any:
    """The router state of the next step: every layer's bias moved by `rule` from the whole step's counts, centred."""
    flat: dict[tuple[str, ...], Any] = flatten_dict(router_state)

    def move(stats, bias):
        return updated_bias(rule, stats, bias, k, strength)

    with jax.named_scope("balance"):
        for path, stats in statistics.items():
            flat[(*path, "bias")] = (_over_stack(move) if stacked else move)(stats, flat[(*path, "bias")])
    return unflatten_dict(flat)


def _over_stack(function):
    """Map over the two leading axes [repeats, units] of a stacked group."""
    return jax.vmap(jax.vmap(function))


def layer_paths(config: ModelConfig) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(path of the MoE in the collections, index in its stacked leaves) of each MoE layer, first to last."""
    moe = range(config.dense_layers, config.layers)
    if config.residual == "full":
        return [(("stack", f"layer_{layer}", "sub", "ffn"), ()) for layer in moe]
    locations = layer_locations(config)
    return [(("stack", *locations[layer].path, "sub", "ffn"), locations[layer].index) for layer in moe]


def balance_metrics(config: ModelConfig, statistics: Statistics, router_state: Any) -> dict[str, jax.Array]:
    """Per MoE layer, first to last: load, MaxVio, load CV beside its sampling floor, dead experts, range of the bias."""
    places = layer_paths(config)
    if not places:
        return {}
    bias: dict[tuple[str, ...], Any] = flatten_dict(router_state)
    load = jnp.stack([statistics[path]["load"][index] for path, index in places])
    tokens = jnp.stack([statistics[path]["tokens"][index] for path, index in places])
    biases = jnp.stack([bias[(*path, "bias")][index] for path, index in places])
    metrics = jax.vmap(lambda load, tokens: load_metrics(load, tokens, config.moe.experts_per_token))(load, tokens)
    return {
        **metrics._asdict(),
        "expert_load": load,
        "bias_min": biases.min(axis=-1),
        "bias_max": biases.max(axis=-1),
    }
