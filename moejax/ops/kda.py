"""Kimi Delta Attention as part of `moejax.ops`; the code lives in `kernels/kda`."""

from moejax.kernels.kda import gated_kda, kda, kda_decode, kda_gate, kda_implementation

__all__ = ["gated_kda", "kda", "kda_decode", "kda_gate", "kda_implementation"]
