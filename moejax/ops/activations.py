"""Gated activations of the feed-forward blocks.

Shapes: [..., F] with F the hidden width of the feed-forward block; any leading axes.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from moejax.kernels.common import accumulation_dtype, require_float


def situ_glu(gate: Array, up: Array, *, gate_cap: float = 4.0, up_cap: float = 25.0) -> Array:
    """SiTU-GLU: `gate_cap * tanh(gate / gate_cap) * sigmoid(gate) * up_cap * tanh(up / up_cap)`.

    Both factors are bounded, so |output| <= gate_cap * up_cap (100 for the published 4 and 25), and value and
    gradient stay finite for any finite input. Computed in float32 (float64 for float64 inputs).
    Source: Kimi K3 report section 2.3, eq. 18-19 (`situ`, beta 4, linear_beta 25).

    Args:
      gate, up: [..., F], the two projections, of one shape and dtype (float32, bfloat16 or float64).
      gate_cap, up_cap: positive bounds of the two tanh.
    Returns: [..., F] in `up.dtype`.
    Raises ValueError: shapes or dtypes differ or are not allowed; a cap is not a positive finite number.
    """
    dtype = _check(gate, up)
    for name, cap in (("gate_cap", gate_cap), ("up_cap", up_cap)):
        if not (math.isfinite(cap) and cap > 0):
            raise ValueError(f"{name} is {cap}; it must be a positive finite number (published: 4 and 25).")
    g, u = gate.astype(dtype), up.astype(dtype)
    y = gate_cap * jnp.tanh(g / gate_cap) * jax.nn.sigmoid(g) * (up_cap * jnp.tanh(u / up_cap))
    return y.astype(up.dtype)


def swiglu(gate: Array, up: Array) -> Array:
    """SwiGLU, `gate * sigmoid(gate) * up` (Shazeer 2020, arXiv 2002.05202; the activation of Kimi Linear).

    Args and errors as `situ_glu`; unbounded. Computed in float32 (float64 for float64 inputs), returned in `up.dtype`.
    """
    dtype = _check(gate, up)
    g = gate.astype(dtype)
    return (g * jax.nn.sigmoid(g) * up.astype(dtype)).astype(up.dtype)


def _check(gate: Array, up: Array) -> jnp.dtype:
    require_float(gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype}{list(gate.shape)} and up is {up.dtype}{list(up.shape)}; they must have one shape "
            "and one dtype (split or cast the projection first)."
        )
    if 0 in gate.shape:
        raise ValueError(f"gate has shape {gate.shape}; no axis may be empty.")
    return accumulation_dtype(gate, up)
