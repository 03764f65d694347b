"""Flax module of a LatentMoE layer: owns weights, selection bias and routing counts (K3 report section 2.3)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..config import MXFP4_GROUP, MoEConfig
from ..ops.balance_measures import aux_loss
from ..ops.balance_rules import router_statistics
from ..ops.experts import LatentMoEWeights, PackedExperts, latent_moe
from ..ops.mxfp4 import mxfp4_encode, mxfp4_fake_quant
from ..parallel.layers import ModelParallel, sharded_latent_moe
from .feed_forward import gated_activation


class LatentMoE(nn.Module):
    """Routed experts in a latent space plus a shared expert: [B,T,D] -> [B,T,D] for any D.

    Collections: `router_state` holds `bias` [E] float32, read here and never written; ask for
    `mutable=["router_stats"]` to get this call's counts, which `moejax.ops.balance_rules.updated_bias` turns into the
    next bias. Under the rule "aux_loss" they include `aux_loss`, the only entry that gradients may see.
    """

    config: MoEConfig
    activation: str = "situ"
    gate_cap: float = 4.0
    up_cap: float = 25.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    param_dtype: str = "float32"
    implementation: str | None = None
    parallel: ModelParallel | None = None
    """Spread over a mesh, rows exchanged between experts; None: as the arrays are."""

    @nn.compact
    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """x [B,T,D] (already normed), segment_ids [B,T] int32 or None (0 = padding, not routed) -> [B,T,D] in x.dtype."""
        c = self.config
        bias = self.variable("router_state", "bias", jnp.zeros, (c.experts,), jnp.float32)
        weights, counting = self._weights(x.shape[-1]), self.is_mutable_collection("router_stats") and not self.is_initializing()
        options: Any = dict(
            scaling=c.scaling,
            renormalize=c.renormalize,
            activation=gated_activation(self.activation, self.gate_cap, self.up_cap),
            eps=self.norm_eps,
            implementation=self.implementation,
        )
        if self.parallel is not None:
            rule = c.balance if counting else None
            options |= {"segment_ids": segment_ids, "rule": rule, "bins": c.histogram_bins}
            y, statistics = sharded_latent_moe(self.parallel, x, bias.value, weights, c.experts_per_token, **options)
        else:
            mask = None if segment_ids is None else segment_ids != 0
            out = latent_moe(x, bias.value, weights, c.experts_per_token, mask=mask, **options)
            y, statistics = out.y, self._statistics(out, bias.value, segment_ids) if counting else {}
        for name, value in statistics.items():
            self.put_variable("router_stats", name, value)
        return y

    def _statistics(self, out, bias: jax.Array, segment_ids: jax.Array | None) -> dict[str, jax.Array]:
        c, mask = self.config, None if segment_ids is None else (segment_ids != 0).reshape(-1)
        statistics = router_statistics(
            c.balance, out.routing, out.logits, bias, c.experts_per_token, mask=mask, bins=c.histogram_bins
        )
        if c.balance == "aux_loss":
            statistics["aux_loss"] = aux_loss(out.logits, out.routing.experts, mask=mask)
        return statistics

    def _weights(self, hidden: int) -> LatentMoEWeights:
        c = self.config
        normal = nn.initializers.normal(self.initializer_range)

        def param(name: str, *shape: int) -> jax.Array:
            return self.param(name, normal, shape, jnp.dtype(self.param_dtype))

        def experts(name: str, inputs: int, outputs: int) -> jax.Array | PackedExperts:
            if c.expert_weights == "mxfp4":
                return self._packed(name, inputs, outputs)
            w = param(name, c.experts, inputs, outputs)
            return mxfp4_fake_quant(w, axis=-2) if c.expert_weights == "mxfp4_qat" else w

        width = c.latent or hidden
        latent, shared = c.latent is not None, c.shared_width or 0
        norm = None
        if latent and c.latent_norm:
            norm = self.param("latent_norm", nn.initializers.ones, (width,), jnp.dtype(self.param_dtype))
        return LatentMoEWeights(
            router=param("router", hidden, c.experts),
            down=param("latent_down", hidden, width) if latent else None,
            norm=norm,
            up=param("latent_up", width, hidden) if latent else None,
            w_gate=experts("expert_gate", width, c.expert_width),
            w_up=experts("expert_up", width, c.expert_width),
            w_down=experts("expert_down", c.expert_width, width),
            shared_gate=param("shared_gate", hidden, shared) if shared else None,
            shared_up=param("shared_up", hidden, shared) if shared else None,
            shared_down=param("shared_down", shared, hidden) if shared else None,
        )

    def _packed(self, name: str, inputs: int, outputs: int) -> PackedExperts:
        """Codes [E,out,in/2] and scales [E,out,in/32], initialised as the rounding of one normal draw."""

        def init():
            def one(key):  # one expert at a time: the whole draw is 8 times as large as its codes
                return mxfp4_encode(self.initializer_range * jax.random.normal(key, (outputs, inputs)))

            return PackedExperts(*jax.lax.map(one, jax.random.split(self.make_rng("params"), self.config.experts)))

        drawn = init() if self.is_initializing() else None

        def param(part: str, columns: int) -> jax.Array:
            shape = (self.config.experts, outputs, columns)

            def value(_):  # Flax also calls it, abstractly, to check the shape of a given parameter
                return jnp.zeros(shape, jnp.uint8) if drawn is None else getattr(drawn, part)

            return self.param(f"{name}_{part}", value)

        return PackedExperts(param("codes", inputs // 2), param("scales", inputs // MXFP4_GROUP))
