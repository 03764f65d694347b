"""Parameter counts, and FLOPs of the recurrence, from shapes alone: nothing is allocated."""

from __future__ import annotations

import dataclasses
import math

from .config import ModelConfig
from .shapes import PARTS, parameters


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


def count_parameters(config: ModelConfig) -> Counts:
    """Counts by part for `config`; equal to the sizes that `HybridLM(config).init` would allocate (packed experts: to the values
    that their codes stand for)."""
    sizes = dict.fromkeys(PARTS, 0)
    for parameter in parameters(config.replace(moe={"expert_weights": "float"})):
        sizes[parameter.part] += math.prod(parameter.shape) * parameter.layers
    return Counts(
        embedding=sizes["embedding"],
        head=sizes["head"],
        mixers=sizes["kda"] + sizes["mla"],
        dense=sizes["dense"],
        experts=sizes["experts"],
        active_experts=sizes["experts"] // config.moe.experts * config.moe.experts_per_token,
        moe_rest=sizes["moe"],
        norms=sizes["norms"],
    )


KDA_CHUNK, TRIANGLE = 64, 0.625
"""Tokens of a chunk, and the share of its 16-row tiles on or under the diagonal."""


def kda_scan_flops(key_dim: int, value_dim: int) -> float:
    """Forward FLOPs of the chunked KDA scan for one token and one value head, projections not included."""
    state = 3 * 2 * key_dim * value_dim  # W S, Q S, K^T V'
    keys = 2 * 2 * KDA_CHUNK * key_dim  # Q K^T and K K^T
    values = 2 * KDA_CHUNK * (key_dim + 2 * value_dim)  # W, U and P V'
    return state + TRIANGLE * (keys + values)
