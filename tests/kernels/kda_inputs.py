"""Random operands of KDA for the tests of its GPU kernels, in four regimes of the gate, as NumPy arrays in the dtypes of a training step.

Shapes: B batch, T tokens, H query/key heads, HV value heads, K, V channels.
"""

import kda_stages as stages
import ml_dtypes
import numpy as np

REGIMES = ("production", "slow", "saturated", "mixed")  # saturated: every gate at its bound; mixed: one channel hardly decays


def bf16(x):
    return np.asarray(x, ml_dtypes.bfloat16)


def make(T, K=64, V=64, H=1, HV=1, B=1, regime="production", ids=None, fused=True, seed=0, bound=-5.0):
    """-> dict: q, k [B,T,H,K], v, d_o [B,T,HV,V], g [B,T,HV,K], beta [B,T,HV], A_log [HV], dt_bias [HV,K], state, d_state [B,HV,K,V], ids;
    fused, bound, scale as they were given or are usual.

    fused: g and beta are raw, for the front to normalise and gate; without, they and q, k are what the front makes of them (g and beta
    in float32) and A_log, dt_bias None.
    """
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape)
    raw = normal(B, T, HV, K)
    raw = {"production": raw, "slow": raw * 0.3 - 7, "saturated": raw + 12, "mixed": np.where(np.arange(K) == 3, -9, raw + 2)}[regime]
    x = dict(
        q=bf16(normal(B, T, H, K)), k=bf16(normal(B, T, H, K)), v=bf16(normal(B, T, HV, V)), g=bf16(raw), beta=bf16(normal(B, T, HV)),
        A_log=(0.3 * normal(HV)).astype(np.float32), dt_bias=(0.3 * normal(HV, K)).astype(np.float32), ids=ids,
        d_o=bf16(normal(B, T, HV, V)), state=(0.5 * normal(B, HV, K, V)).astype(np.float32),
        d_state=normal(B, HV, K, V).astype(np.float32), fused=fused, bound=bound, scale=K**-0.5,
    )  # fmt: skip
    if not fused:
        q, k, g, beta = stages.gated(*(x[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias")), bound)
        x |= dict(q=bf16(q), k=bf16(k), g=g.astype(np.float32), beta=beta.astype(np.float32), A_log=None, dt_bias=None)
    return x


def packed(T, *starts, B=1):
    """Filled ids of documents that start at these tokens."""
    return np.tile(1 + np.searchsorted(np.sort(starts), np.arange(T), side="right").astype(np.int32), (B, 1))
