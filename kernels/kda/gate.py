"""The forget gate and the normalisation in front of the KDA recurrence.

Shapes: B batch, T tokens, HV value heads, K key channels.
"""

import math

import jax
import jax.numpy as jnp

from ..common import accumulation_dtype, require_float, require_rank

# With row 0 of a 16-row tile as the anchor the largest factor is e^(15 * 5.9) = 2.7e38, just below float32's 3.4e38.
LOWEST_BOUND = -5.9
L2_EPS = 1e-6


def check_lower_bound(lower_bound: float | None) -> None:
    """Raise ValueError unless lower_bound is None or a number in [-5.9, 0)."""
    if lower_bound is None:
        return
    ok = isinstance(lower_bound, (int, float)) and not isinstance(lower_bound, bool) and math.isfinite(lower_bound)
    if not ok or not LOWEST_BOUND <= lower_bound < 0:
        raise ValueError(
            f"lower_bound={lower_bound!r}; it must be a Python number in [{LOWEST_BOUND}, 0) "
            "(a 16-row tile of larger decays overflows float32), or None for the unbounded gate."
        )


def check_gate(raw, A_log, dt_bias, lower_bound: float | None) -> None:
    """The errors of kda_gate, for arrays or None."""
    require_rank(4, "[B,T,HV,K]", raw=raw)
    require_float(raw=raw, A_log=A_log, dt_bias=dt_bias)
    check_lower_bound(lower_bound)
    heads, channels = raw.shape[2:]
    for name, x, shape in (("A_log", A_log, (heads,)), ("dt_bias", dt_bias, (heads, channels))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; for raw {raw.shape} it must be {shape}, or None. Reshape it.")


def kda_gate(raw, A_log, dt_bias, *, lower_bound: float | None = -5.0):
    """Log decay of each token, head and key channel.

    bounded:    g = lower_bound * sigmoid(exp(A_log) * (raw + dt_bias))        (Kimi K3 report section 2.1.1)
    unbounded:  g = -exp(A_log) * softplus(raw + dt_bias)                      (Kimi Linear, arXiv 2510.26692)

    raw [B,T,HV,K]; A_log [HV] or None (factor 1); dt_bias [HV,K] or None (0); lower_bound in natural-log units per token,
    in [-5.9, 0), or None for the unbounded gate. Returns g [B,T,HV,K] in float32 (float64 when an input is float64), g <= 0.
    Other shapes raise ValueError: nothing is broadcast, because [HV] and [HV,K] are different gates. Value and gradient are
    finite for |raw| up to at least 1e4; a saturated entry has gradient exactly 0.
    """
    raw = jnp.asarray(raw)
    A_log, dt_bias = (None if x is None else jnp.asarray(x) for x in (A_log, dt_bias))
    check_gate(raw, A_log, dt_bias, lower_bound)
    dtype = accumulation_dtype(raw, A_log, dt_bias)
    x = raw.astype(dtype)
    if dt_bias is not None:
        x = x + dt_bias.astype(dtype)
    rate = None if A_log is None else jnp.exp(A_log.astype(dtype))[:, None]
    if lower_bound is None:
        g = -jax.nn.softplus(x)
        return g if rate is None else rate * g
    # The derivative is (sg (1 - sg)) first and the large factors after it: at |x| = 1e4 that is 0 * 1e4, never 0 * inf.
    return lower_bound * jax.nn.sigmoid(x if rate is None else rate * x)


def l2_normalize(x):
    """x * rsqrt(sum x^2 + 1e-6) over the last axis, in float32 (float64 for float64). A zero row has a finite gradient."""
    x = x.astype(accumulation_dtype(x))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)
