"""Kimi Delta Attention: linear attention with a gated delta rule and a decay per channel."""

from .api import gated_kda, kda, kda_implementation
from .decode import kda_decode
from .gate import kda_gate, l2_normalize

__all__ = ["gated_kda", "kda", "kda_decode", "kda_gate", "kda_implementation", "l2_normalize"]
