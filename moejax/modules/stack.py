"""All layers of a model: blocks over a static buffer of snapshots, with a backward pass that keeps nothing else.

A scan that carries the snapshot buffer would save the whole buffer at every iteration. But snapshot i is the input of
block i, so the final buffer already holds every block's input: the backward pass here saves that buffer alone and
recomputes each block from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..config import ModelConfig
from ..parallel.layers import ModelParallel
from .block import COLLECTIONS, Block, SourcesLayer
from .plan import block_starts, layer_specs, plan


class StackOutput(NamedTuple):
    """What leaves the layers."""

    prefix: jax.Array | None
    """[B,T,D] the running sum (None: residual="full")."""
    sources: jax.Array | None
    """[S,B,T,D] snapshots, or every sub-layer's output (None: residual="plain")."""
    aux_loss: jax.Array
    """[] sum over layers of the balancing loss (0 unless the rule is aux_loss)."""


BlockFn = Callable[..., tuple[jax.Array, jax.Array, Any]]
"""(params, state, prefix or None, snapshots or None, count, segment_ids) -> (prefix, aux loss, written collections)."""


class LayerStack(nn.Module):
    """The decoder layers between embedding and output. Parameters of a group are stacked [repeats, units, ...]."""

    config: ModelConfig
    parallel: ModelParallel | None = None

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> StackOutput:
        """x [B,T,D] -> see `StackOutput`."""
        if self.config.residual == "full":
            return self._full(x, segment_ids)
        groups = plan(self.config)
        if self.is_initializing():
            for group in groups:
                self._init_group(group, x)
            return StackOutput(x, None, jnp.zeros((), jnp.float32))
        params = [self.get_variable("params", group.name) for group in groups]
        if missing := [group.name for group, found in zip(groups, params, strict=True) if found is None]:
            raise ValueError(
                f"the parameters have no {', '.join(missing)}, which this configuration's layers need; "
                "they were made for another pattern, depth or residual."
            )
        states = [self.get_variable("router_state", group.name, {}) for group in groups]
        blocks = [(self._block_fn(group.block), group.repeats) for group in groups]
        if self.config.residual == "plain":
            prefix, aux, written = blocks[0][0](_first(params[0]), _first(states[0]), x, None, 0, segment_ids)
            self._write(groups[0].name, jax.tree.map(lambda leaf: leaf[None], written))
            return StackOutput(prefix, None, aux)
        run = snapshot_stack(
            blocks,
            len(block_starts(self.config)),
            unroll=not self.config.scan_layers,
            save_all=self.config.remat == "none",
        )
        prefix, snapshots, aux, written = run(params, states, x, segment_ids)
        for group, values in zip(groups, written, strict=True):
            self._write(group.name, values)
        return StackOutput(prefix, snapshots, aux)

    def _init_group(self, group, x: jax.Array) -> None:
        """Initialise the repeats of one block under vmap, from an input of one token: shapes need no more."""
        prefix = jnp.zeros((1, 1, x.shape[-1]), x.dtype)
        plain = self.config.residual == "plain"
        block = Block(self.config, group.block, parent=None)

        def init(key):
            return block.init(key, prefix if plain else None, None if plain else prefix[None], 1, None)

        variables = jax.vmap(init)(jax.random.split(self.make_rng("params"), group.repeats))
        for collection in ("params", "router_state"):
            if collection in variables:
                self.put_variable(collection, group.name, variables[collection])

    def _block_fn(self, runs) -> BlockFn:
        collections = [name for name in COLLECTIONS if self.is_mutable_collection(name)]
        block = Block(self.config, runs, self.parallel, parent=None)

        def call(params, state, prefix, snapshots, count, segment_ids):
            variables = {"params": params, "router_state": state}
            prefix, written = block.apply(variables, prefix, snapshots, count, segment_ids, mutable=collections)
            return prefix, total_aux_loss(written), jax.tree.map(jax.lax.stop_gradient, written)

        return call

    def _write(self, name: str, written: Any) -> None:
        for collection, values in written.items():
            self.put_variable(collection, name, values)

    def _full(self, x: jax.Array, segment_ids: jax.Array | None) -> StackOutput:
        layer = nn.remat(SourcesLayer) if self.config.remat == "full" else SourcesLayer
        sources = [x]
        for index, spec in enumerate(layer_specs(self.config)):
            sources += layer(self.config, spec, self.parallel, name=f"layer_{index}")(jnp.stack(sources), segment_ids)
        stats = self.variables.get("router_stats", {}) if self.is_mutable_collection("router_stats") else {}
        return StackOutput(None, jnp.stack(sources), total_aux_loss({"router_stats": stats}))


def _first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def total_aux_loss(written: Any) -> jax.Array:
    """Sum of every `aux_loss` that the layers wrote into router_stats."""
    total = jnp.zeros((), jnp.float32)
    for path, leaf in jax.tree_util.tree_leaves_with_path(written.get("router_stats", {})):
        if getattr(path[-1], "key", None) == "aux_loss":
            total = total + jnp.sum(leaf)
    return total


def snapshot_stack(blocks: Sequence[tuple[BlockFn, int]], num_snapshots: int, *, unroll: bool, save_all: bool):
    """The blocks as one function of (params, states, x, segment_ids) -> (prefix, snapshots, aux loss, written).

    Args:
      blocks: one (block function, repeats) a group; params and states are lists with leaves stacked [repeats, ...].
      num_snapshots: blocks in all; snapshot i is the input of block i.
      unroll: unroll the loop over repeats.
      save_all: let autodiff save every intermediate, instead of recomputing each block from its snapshot.
    """
    first = [sum(repeats for _, repeats in blocks[:group]) for group in range(len(blocks))]

    def forward(params, states, x, segment_ids):
        prefix, snapshots = x, jnp.zeros((num_snapshots, *x.shape), x.dtype)
        aux, written = jnp.zeros((), jnp.float32), []
        for group, (block, repeats) in enumerate(blocks):

            def body(carry, inputs, block=block):
                prefix, snapshots, aux = carry
                index, block_params, block_state = inputs
                snapshots = jax.lax.dynamic_update_index_in_dim(snapshots, prefix, index, 0)
                prefix, more, values = block(block_params, block_state, None, snapshots, index + 1, segment_ids)
                return (prefix, snapshots, aux + more), values

            inputs = (first[group] + jnp.arange(repeats), params[group], states[group])
            (prefix, snapshots, aux), values = jax.lax.scan(
                body, (prefix, snapshots, aux), inputs, unroll=repeats if unroll else 1
            )
            written.append(values)
        return prefix, snapshots, aux, written

    if save_all:
        return forward

    def forward_saving(params, states, x, segment_ids):
        out = forward(params, states, x, segment_ids)
        return out, (params, states, out[1], segment_ids)

    def backward(saved, cotangents):
        params, states, snapshots, segment_ids = saved
        d_prefix, d_snapshots, d_aux, _ = cotangents
        d_params = []
        for group, (block, repeats) in reversed(list(enumerate(blocks))):

            def body(carry, inputs, block=block):
                d_prefix, d_snapshots = carry
                index, block_params, block_state = inputs

                def recompute(block_params, snapshots):
                    return block(block_params, block_state, None, snapshots, index + 1, segment_ids)[:2]

                _, vjp = jax.vjp(recompute, block_params, snapshots)
                d_block, more = vjp((d_prefix, d_aux))
                d_snapshots = d_snapshots + more
                # Snapshot `index` is the block's input; before this block the slot held nothing.
                d_prefix = d_snapshots[index]
                return (d_prefix, d_snapshots.at[index].set(0)), d_block

            inputs = (first[group] + jnp.arange(repeats), params[group], states[group])
            (d_prefix, d_snapshots), d_group = jax.lax.scan(
                body, (d_prefix, d_snapshots), inputs, reverse=True, unroll=repeats if unroll else 1
            )
            d_params.insert(0, d_group)
        d_states = jax.tree.map(jnp.zeros_like, states)
        return d_params, d_states, d_prefix, None

    run = jax.custom_vjp(forward)
    run.defvjp(forward_saving, backward)
    return run


__all__ = ["LayerStack", "StackOutput", "snapshot_stack"]
