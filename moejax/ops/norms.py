"""Root-mean-square normalisation.

Shapes: [..., D] with D the normalised width; any leading axes.
"""

import jax
import jax.numpy as jnp
from jax import Array

from moejax.kernels.common import accumulation_dtype, require_float


def rms_norm(x: Array, weight: Array, *, eps: float) -> Array:
    """`weight * x / sqrt(mean(x**2) + eps)` over the last axis, with the rounding of the published model code.

    The statistics and the division are float32 (float64 for float64 inputs); the normalised value is rounded to
    `x.dtype` and only then multiplied by the weight in `x.dtype`. In bfloat16 the order shows.
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467). Kimi K3 uses eps 1e-5, and 1e-6 in the two latent norms of MLA.

    Args:
      x: [..., D] float32, bfloat16 or float64. weight: [D]. eps: added to the mean square, > 0.
    Returns: [..., D] in `x.dtype`.
    Raises ValueError: dtype not allowed, weight not [D], an empty axis, or eps <= 0.
    """
    require_float(x=x, weight=weight)
    if x.ndim < 1 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; it must have at least one axis and none may be empty.")
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {weight.shape}; it must be [D] = {list(x.shape[-1:])}, the last axis of x.")
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it must be > 0 (an all-zero row would divide by 0).")
    wide = x.astype(accumulation_dtype(x))
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * weight.astype(x.dtype)
