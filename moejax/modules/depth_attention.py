"""Flax module of one depth-attention query (Block Attention Residuals, K3 report section 2.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..ops.depth_attention import attention_residual, depth_attention


class AttentionResidual(nn.Module):
    """One pseudo-query over the sources in depth: owns a norm weight [D] and a query [D].

    The query starts at zero, which makes the first mix a plain average (arXiv 2603.15031).
    """

    eps: float = 1e-5
    param_dtype: str = "float32"

    @nn.compact
    def __call__(
        self,
        sources: jax.Array,
        prefix: jax.Array | None = None,
        *,
        count: jax.Array | int | None = None,
        prefix_valid: jax.Array | bool | None = None,
    ) -> jax.Array:
        """sources [S,B,T,D] (the first `count` valid) and optionally one more, prefix [B,T,D] -> [B,T,D]."""
        width = (sources.shape[-1],)
        norm_weight = self.param("norm_weight", nn.initializers.ones, width, jnp.dtype(self.param_dtype))
        query = self.param("query", nn.initializers.zeros, width, jnp.dtype(self.param_dtype))
        with jax.named_scope("depth_attention"):
            if prefix is None:
                return attention_residual(sources, norm_weight, query, count=count, eps=self.eps)
            return depth_attention(
                sources, prefix, norm_weight, query, count=count, prefix_valid=prefix_valid, eps=self.eps
            )
