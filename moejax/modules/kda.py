"""Flax module of a KDA layer: owns the weights of `moejax.ops.kda_layer` and calls it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..config import KDAConfig
from ..ops.kda_layer import KDAState, KDAWeights, kda_layer
from ..parallel.layers import ModelParallel, sharded_kda_layer
from .initializers import dt_bias


class KimiDeltaAttention(nn.Module):
    """KDA with its projections, convolutions, gates and output norm (K3 report section 2.1.1).

    `KimiDeltaAttention(KDAConfig(heads=4, key_dim=32, value_dim=32))` maps [B,T,D] to [B,T,D] for any D.
    Parameters in `param_dtype`; convolutions, A_log, dt_bias and the output norm are always float32.
    """

    config: KDAConfig
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    param_dtype: str = "float32"
    implementation: str | None = None
    parallel: ModelParallel | None = None
    """Spread over a mesh (without `state`); None: as the arrays are."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        state: KDAState | None = None,
        return_state: bool = False,
    ) -> Any:
        """x [B,T,D] (already normed) -> y [B,T,D] in x.dtype; with `return_state` -> (y, KDAState)."""
        weights = self._weights(x.shape[-1])
        options: Any = dict(lower_bound=self.config.lower_bound, norm_eps=self.norm_eps, implementation=self.implementation)
        if self.parallel is not None:
            if state is not None or return_state:
                raise ValueError("parallel and state exclude each other here; use moejax.parallel.sequence_kda_layer.")
            return sharded_kda_layer(self.parallel, x, weights, segment_ids=segment_ids, **options)
        y, state = kda_layer(x, weights, state=state, segment_ids=segment_ids, return_state=return_state, **options)
        return (y, state) if return_state else y

    def _weights(self, hidden: int) -> KDAWeights:
        c, g = self.config, self.config.num_value_heads
        normal = nn.initializers.normal(self.initializer_range)
        taps = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # U(-1, 1) / sqrt(taps)

        def matrix(name: str, *shape: int) -> jax.Array:
            return self.param(name, normal, shape, jnp.dtype(self.param_dtype))

        def wide(name: str, init, *shape: int) -> jax.Array:
            return self.param(name, init, shape, jnp.float32)

        full = c.output_gate_rank is None
        return KDAWeights(
            q_proj=matrix("q_proj", hidden, c.heads, c.key_dim),
            k_proj=matrix("k_proj", hidden, c.heads, c.key_dim),
            v_proj=matrix("v_proj", hidden, g, c.value_dim),
            q_conv=wide("q_conv", taps, c.conv_width, c.heads * c.key_dim),
            k_conv=wide("k_conv", taps, c.conv_width, c.heads * c.key_dim),
            v_conv=wide("v_conv", taps, c.conv_width, g * c.value_dim),
            decay_down=matrix("decay_down", hidden, c.decay_rank),
            decay_up=matrix("decay_up", c.decay_rank, g, c.key_dim),
            A_log=wide("A_log", nn.initializers.zeros, g),
            dt_bias=wide("dt_bias", dt_bias, g, c.key_dim),
            beta_proj=matrix("beta_proj", hidden, g),
            out_gate=matrix("out_gate", hidden, g, c.value_dim) if full else None,
            out_gate_down=None if full else matrix("out_gate_down", hidden, c.output_gate_rank or 0),
            out_gate_up=None if full else matrix("out_gate_up", c.output_gate_rank or 0, g, c.value_dim),
            out_norm=wide("out_norm", nn.initializers.ones, c.value_dim),
            out_proj=matrix("out_proj", g, c.value_dim, hidden),
        )
