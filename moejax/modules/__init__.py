"""Flax Linen modules: they own the weights and call `moejax.ops`."""

from .block import DecoderLayer, RMSNorm
from .depth_attention import AttentionResidual
from .feed_forward import FeedForward
from .kda import KimiDeltaAttention
from .mla import GatedMLA
from .model import HybridLM
from .moe import LatentMoE

__all__ = [
    "AttentionResidual",
    "DecoderLayer",
    "FeedForward",
    "GatedMLA",
    "HybridLM",
    "KimiDeltaAttention",
    "LatentMoE",
    "RMSNorm",
]
