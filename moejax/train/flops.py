"""FLOPs of the hybrid model, one token at a time, 2 a multiply-add. Norms, softmax, gates and the
mixes of depth attention are not counted."""

from __future__ import annotations

from ..config import ModelConfig
from ..counting import count_parameters

KDA_CHUNK = 64
TRIANGLE = 0.625
"""Share of a 64-token chunk's 16-row tiles on or under the diagonal."""


def kda_scan_flops(key_dim: int, value_dim: int) -> float:
    """Forward FLOPs of the chunked KDA scan for one token and one value head, projections not included."""
    state = 3 * 2 * key_dim * value_dim  # W S, Q S, K^T V'
    keys = 2 * 2 * KDA_CHUNK * key_dim  # Q K^T and K K^T
    values = 2 * KDA_CHUNK * (key_dim + 2 * value_dim)  # W, U and P V'
    return state + TRIANGLE * (keys + values)


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
