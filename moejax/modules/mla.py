"""Flax module of a gated MLA layer: owns the weights of `moejax.ops.mla` and calls it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..config import MLAConfig
from ..ops.attention_logits import mla_max_logits
from ..ops.mla import MLAWeights, gated_mla
from ..ops.rotary import positions_from_segments
from ..parallel.attention_logits import sharded_mla_max_logits
from ..parallel.layers import ModelParallel, sharded_gated_mla


class GatedMLA(nn.Module):
    """Causal latent attention with an output gate (K3 report section 2.1.2): [B,T,D] -> [B,T,D] for any D.

    `mutable=["attention_stats"]` gives `max_logits` [H] of this call, for moejax.train.qk_clip.
    """

    config: MLAConfig
    initializer_range: float = 0.02
    param_dtype: str = "float32"
    parallel: ModelParallel | None = None
    """Spread over a mesh; None: as the arrays are."""

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """x [B,T,D] (already normed), segment_ids [B,T] int32 or None -> [B,T,D] in x.dtype."""
        c = self.config
        weights, rotary = self._weights(x.shape[-1]), {"rotary_base": c.rotary_base, "rotary_scale": c.rotary_scale}
        counting = self.is_mutable_collection("attention_stats") and not self.is_initializing()
        if self.parallel is not None:
            options: Any = {"segment_ids": segment_ids, "rotary": rotary if c.positions == "rotary" else None}
            if counting:
                self.put_variable("attention_stats", "max_logits", sharded_mla_max_logits(self.parallel, x, weights, **options))
            return sharded_gated_mla(self.parallel, x, weights, **options)
        options = {"segment_ids": segment_ids, **rotary, "positions": None}
        if c.positions == "rotary":
            ids = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids
            options["positions"] = positions_from_segments(ids)
        if counting:
            self.put_variable("attention_stats", "max_logits", mla_max_logits(x, weights, **options))
        return gated_mla(x, weights, **options)

    def _weights(self, hidden: int) -> MLAWeights:
        c, ones = self.config, nn.initializers.ones
        normal = nn.initializers.normal(self.initializer_range)

        def param(name: str, init, *shape: int) -> jax.Array:
            return self.param(name, init, shape, jnp.dtype(self.param_dtype))

        queries = hidden if c.q_latent is None else c.q_latent
        return MLAWeights(
            q_down=None if c.q_latent is None else param("q_down", normal, hidden, c.q_latent),
            q_norm=None if c.q_latent is None else param("q_norm", ones, c.q_latent),
            q_up=param("q_up", normal, queries, c.heads, c.nope_dim + c.rope_dim),
            kv_down=param("kv_down", normal, hidden, c.kv_latent + c.rope_dim),
            kv_norm=param("kv_norm", ones, c.kv_latent),
            k_up=param("k_up", normal, c.kv_latent, c.heads, c.nope_dim),
            v_up=param("v_up", normal, c.kv_latent, c.heads, c.value_dim),
            gate=param("gate", normal, hidden, c.heads, c.value_dim) if c.gate else None,
            out=param("out", normal, c.heads, c.value_dim, hidden),
        )
