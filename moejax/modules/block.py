"""Decoder layers, and the units and blocks that they form (K3 report section 2; grouping in `plan.py`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..config import ModelConfig
from ..ops.norms import rms_norm
from ..parallel.layers import ModelParallel
from .depth_attention import AttentionResidual
from .feed_forward import FeedForward
from .kda import KimiDeltaAttention
from .mla import GatedMLA
from .moe import LatentMoE
from .plan import BlockSpec, LayerSpec

COLLECTIONS = ("router_stats", "intermediates", "attention_stats")
"""Collections that a forward pass may write. Gradients do not flow through them (but for the balancing loss)."""


class RMSNorm(nn.Module):
    """RMS norm with a weight [D]: statistics in float32, rounded to the activation dtype before the weight."""

    eps: float
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), jnp.dtype(self.param_dtype))
        return rms_norm(x, weight, eps=self.eps)


class SubLayers(nn.Module):
    """The mixer and the feed-forward of one layer, each behind its norm."""

    config: ModelConfig
    spec: LayerSpec
    parallel: ModelParallel | None = None

    def setup(self) -> None:
        c = self.config
        common = {"initializer_range": c.initializer_range, "param_dtype": c.param_dtype}
        self.mixer_norm = RMSNorm(c.norm_eps, c.param_dtype)
        self.ffn_norm = RMSNorm(c.norm_eps, c.param_dtype)
        if self.spec.mixer == "K":
            self.mixer = KimiDeltaAttention(c.kda, norm_eps=c.norm_eps, parallel=self.parallel, **common)
        else:
            self.mixer = GatedMLA(c.mla, parallel=self.parallel, **common)
        glu = {"activation": c.activation, "gate_cap": c.gate_cap, "up_cap": c.up_cap, **common}
        if self.spec.dense:
            self.ffn = FeedForward(c.dense_width, **glu)
        else:
            self.ffn = LatentMoE(c.moe, norm_eps=c.norm_eps, parallel=self.parallel, **glu)

    def mix(self, h: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """h [B,T,D] -> the mixer's output [B,T,D]."""
        with jax.named_scope("kda" if self.spec.mixer == "K" else "mla"):
            return self.mixer(self.mixer_norm(h), segment_ids)

    def feed_forward(self, h: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """h [B,T,D] -> the feed-forward's output [B,T,D]."""
        with jax.named_scope("dense" if self.spec.dense else "moe"):
            h = self.ffn_norm(h)
            return self.ffn(h, segment_ids) if isinstance(self.ffn, LatentMoE) else self.ffn(h)


Carry = tuple[jax.Array, jax.Array]
"""The residual sum [B,T,D], and whether it holds anything yet (a block starts from an empty sum)."""


class DecoderLayer(nn.Module):
    """One layer over a running sum, with depth attention over snapshots of it unless the residual is plain."""

    config: ModelConfig
    spec: LayerSpec
    parallel: ModelParallel | None = None

    @nn.compact
    def __call__(self, carry: Carry, snapshots: jax.Array | None, count: jax.Array | int, segment_ids) -> Carry:
        """carry, snapshots [S,B,T,D] (the first `count` valid; None: plain residual) -> carry."""
        prefix, valid = carry
        layers = SubLayers(self.config, self.spec, self.parallel, name="sub")

        def read(name: str, prefix: jax.Array, valid: jax.Array | bool) -> jax.Array:
            if snapshots is None:
                return prefix
            query = AttentionResidual(self.config.norm_eps, self.config.param_dtype, name=name)
            return query(snapshots, prefix, count=count, prefix_valid=valid)

        prefix = prefix + layers.mix(read("mixer_residual", prefix, valid), segment_ids)
        prefix = prefix + layers.feed_forward(read("ffn_residual", prefix, True), segment_ids)
        self.sow("intermediates", "stream", prefix)
        return prefix, jnp.ones_like(valid)


class SourcesLayer(nn.Module):
    """One layer whose sub-layers read every earlier sub-layer's output (residual="full")."""

    config: ModelConfig
    spec: LayerSpec
    parallel: ModelParallel | None = None

    @nn.compact
    def __call__(self, sources: jax.Array, segment_ids) -> tuple[jax.Array, jax.Array]:
        """sources [S,B,T,D] -> the two outputs [B,T,D] that become sources."""
        layers = SubLayers(self.config, self.spec, self.parallel, name="sub")

        def read(name: str, sources: jax.Array) -> jax.Array:
            return AttentionResidual(self.config.norm_eps, self.config.param_dtype, name=name)(sources)

        mixed = layers.mix(read("mixer_residual", sources), segment_ids)
        sources = jnp.concatenate([sources, mixed[None]])
        return mixed, layers.feed_forward(read("ffn_residual", sources), segment_ids)


class Unit(nn.Module):
    """The layers that repeat together inside a block."""

    config: ModelConfig
    specs: tuple[LayerSpec, ...]
    parallel: ModelParallel | None = None

    @nn.compact
    def __call__(self, carry: Carry, snapshots, count, segment_ids) -> tuple[Carry, None]:
        layer = nn.remat(DecoderLayer) if self.config.remat == "full" else DecoderLayer
        for index, spec in enumerate(self.specs):
            carry = layer(self.config, spec, self.parallel, name=f"layer_{index}")(carry, snapshots, count, segment_ids)
        return carry, None


class Block(nn.Module):
    """The layers between two snapshots. Each run of equal units is one scan, the snapshots are its constants."""

    config: ModelConfig
    runs: BlockSpec
    parallel: ModelParallel | None = None

    @nn.compact
    def __call__(self, prefix: jax.Array | None, snapshots: jax.Array | None, count, segment_ids) -> jax.Array:
        """From the sum `prefix` (None: an empty one) to the sum after the block's last layer, [B,T,D]."""
        if prefix is None:
            assert snapshots is not None
            carry = (jnp.zeros_like(snapshots[0]), jnp.array(False))
        else:
            carry = (prefix, jnp.array(True))
        for index, (unit, repeats) in enumerate(self.runs):
            run = nn.scan(
                Unit,
                variable_axes={"params": 0, "router_state": 0, **dict.fromkeys(COLLECTIONS, 0)},
                split_rngs={"params": True},
                in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                length=repeats,
                unroll=1 if self.config.scan_layers else repeats,
            )
            carry, _ = run(self.config, unit, self.parallel, name=f"run_{index}")(carry, snapshots, count, segment_ids)
        return carry[0]
