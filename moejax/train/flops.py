"""FLOPs of the hybrid model, one token at a time, 2 a multiply-add. Norms, softmax, gates and the
mixes of depth attention are not counted."""

from __future__ import annotations

from ..config import ModelConfig
from ..counting import count_parameters, kda_scan_flops


def flops_per_token(config: ModelConfig, context: int) -> float:
    """Training FLOPs a token at documents of `context` tokens: forward, and twice that backward, no recomputation.

    Causal attention reads half the context on average. Model FLOPs utilisation = tokens/s * this / peak FLOP/s.
    """
    weights = 2 * count_parameters(config).active
    kda = config.kda.num_value_heads * kda_scan_flops(config.kda.key_dim, config.kda.value_dim)
    head = config.mla.nope_dim + config.mla.rope_dim + config.mla.value_dim
    mla = 2 * config.mla.heads * head * context / 2
    mixing = config.mixers.count("K") * kda + config.mixers.count("M") * mla
    return 3 * (weights + mixing)
