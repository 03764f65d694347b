"""Parameter counts from shapes alone: nothing is allocated. Reads only the configuration."""

from __future__ import annotations

import dataclasses

from .config import KDAConfig, MLAConfig, ModelConfig, MoEConfig


@dataclasses.dataclass(frozen=True)
class Counts:
    """Parameters of a model, by part. The routing bias is state, not a parameter, and is not counted."""

    embedding: int
    head: int
    mixers: int
    """KDA and MLA layers."""
    dense: int
    """Dense feed-forwards."""
    experts: int
    """Routed experts, all of them."""
    active_experts: int
    """Routed experts that one token uses."""
    moe_rest: int
    """Routers, latent projections and shared experts."""
    norms: int
    """Layer norms, depth attention and the final norm."""

    @property
    def total(self) -> int:
        return self.active - self.active_experts + self.experts + self.embedding

    @property
    def active(self) -> int:
        """Parameters that one token meets: the head is counted, the embedding table is not (K3 report, table 1)."""
        return self.head + self.mixers + self.dense + self.active_experts + self.moe_rest + self.norms


def kda_parameters(config: KDAConfig, hidden: int) -> int:
    query, value = config.heads * config.key_dim, config.num_value_heads * config.value_dim
    decay = config.num_value_heads * config.key_dim
    projections = hidden * (2 * query + value) + value * hidden
    convolutions = config.conv_width * (2 * query + value)
    gate = config.decay_rank * (hidden + decay) + decay + config.num_value_heads  # projections, dt_bias, A_log
    rank = config.output_gate_rank
    output_gate = hidden * value if rank is None else rank * (hidden + value)
    return projections + convolutions + gate + hidden * config.num_value_heads + output_gate + config.value_dim


def mla_parameters(config: MLAConfig, hidden: int) -> int:
    query = config.heads * (config.nope_dim + config.rope_dim)
    value = config.heads * config.value_dim
    queries = hidden * query if config.q_latent is None else config.q_latent * (hidden + 1 + query)
    keys = hidden * (config.kv_latent + config.rope_dim) + config.kv_latent
    up = config.kv_latent * (config.heads * config.nope_dim + value)
    return queries + keys + up + value * hidden * (2 if config.gate else 1)


def _expert(config: MoEConfig, hidden: int) -> int:
    return 3 * (config.latent or hidden) * config.expert_width


def _moe_rest(config: MoEConfig, hidden: int) -> int:
    latent = 0 if config.latent is None else 2 * hidden * config.latent + (config.latent if config.latent_norm else 0)
    return hidden * config.experts + latent + 3 * hidden * (config.shared_width or 0)


def count_parameters(config: ModelConfig) -> Counts:
    """Counts by part for `config`; equal to the sizes that `HybridLM(config).init` would allocate (packed experts: to the values
    that their codes stand for)."""
    mixers = sum(
        kda_parameters(config.kda, config.hidden) if kind == "K" else mla_parameters(config.mla, config.hidden)
        for kind in config.mixers
    )
    queries = 0 if config.residual == "plain" else 2 * config.layers + 1  # depth-attention queries, each with a norm
    expert = _expert(config.moe, config.hidden) * config.moe_layers
    return Counts(
        embedding=config.vocab_size * config.hidden,
        head=config.vocab_size * config.hidden,
        mixers=mixers,
        dense=3 * config.hidden * config.dense_width * config.dense_layers,
        experts=expert * config.moe.experts,
        active_experts=expert * config.moe.experts_per_token,
        moe_rest=_moe_rest(config.moe, config.hidden) * config.moe_layers,
        norms=config.hidden * (2 * config.layers + 1 + 2 * queries),
    )
