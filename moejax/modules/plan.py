"""How the layers of a model are grouped into loops: blocks that repeat, and units of layers that repeat inside a block.

Repeated groups are compiled once, so the program of a 93-layer model is hardly larger than that of a 25-layer one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TypeVar

from ..config import ModelConfig

Item = TypeVar("Item", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What kind of layer it is."""

    mixer: str
    """"K" (KDA) or "M" (MLA)."""
    dense: bool
    """Dense feed-forward instead of experts."""


Run = tuple[tuple[LayerSpec, ...], int]
"""A unit of layers and how often it repeats."""
BlockSpec = tuple[Run, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """One block of layers and how often it repeats."""

    name: str
    block: BlockSpec
    repeats: int


@dataclasses.dataclass(frozen=True)
class LayerLocation:
    """Where layer `i` keeps its parameters: `tree[group][run][layer]`, leaves indexed by [repeat, unit]."""

    path: tuple[str, str, str]
    index: tuple[int, int]


def run_lengths(items: Sequence[Item], longest_period: int) -> list[tuple[tuple[Item, ...], int]]:
    """Write `items` as units with repeat counts, preferring the unit that covers most, then the shortest."""
    runs: list[tuple[tuple[Item, ...], int]] = []
    start = 0
    while start < len(items):
        best = (tuple(items[start : start + 1]), 1)
        for period in range(1, min(longest_period, (len(items) - start) // 2) + 1):
            unit = tuple(items[start : start + period])
            repeats = 1
            while tuple(items[start + repeats * period : start + (repeats + 1) * period]) == unit:
                repeats += 1
            if repeats > 1 and repeats * period > best[1] * len(best[0]):
                best = (unit, repeats)
        runs.append(best)
        start += len(best[0]) * best[1]
    return runs


def layer_specs(config: ModelConfig) -> list[LayerSpec]:
    """One spec a layer, first to last."""
    return [LayerSpec(mixer, index < config.dense_layers) for index, mixer in enumerate(config.mixers)]


def block_starts(config: ModelConfig) -> range:
    """The layers (0-indexed) before which a snapshot of the residual stream is taken."""
    return range(0, config.layers, config.residual_block if config.residual == "block" else config.layers)


def plan(config: ModelConfig) -> tuple[Group, ...]:
    """The groups of `config`, in order. Without snapshots the whole depth is one block."""
    specs, starts = layer_specs(config), block_starts(config)
    period = len(config.pattern) if len(config.pattern) <= 8 else 8
    blocks = [tuple(run_lengths(specs[start : start + starts.step], period)) for start in starts]
    groups = []
    for (block,), repeats in run_lengths(blocks, 1):
        groups.append(Group(f"blocks_{len(groups)}", block, repeats))
    return tuple(groups)


def layer_locations(config: ModelConfig) -> list[LayerLocation]:
    """One location a layer, first to last (block and plain residuals)."""
    locations = []
    for group in plan(config):
        for repeat in range(group.repeats):
            for run, (unit, count) in enumerate(group.block):
                for position in range(count):
                    locations += [
                        LayerLocation((group.name, f"run_{run}", f"layer_{layer}"), (repeat, position))
                        for layer in range(len(unit))
                    ]
    return locations
