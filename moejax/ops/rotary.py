"""Rotary positions, a control for models that by default have none, and positions inside packed rows.

Shapes: B batch, T tokens, H heads, R rotated width (even).
"""

import jax.numpy as jnp
from jax import lax

from moejax.kernels.common import accumulation_dtype, require_float, require_rank
from moejax.ops.attention import check_segment_ids


def rotary(x, positions, *, base=10000.0, scale=1.0):
    """Rotate the pairs (i, i + R/2) of the last axis by the angle `positions / scale * base ** (-2 i / R)`.

    Su et al. 2021 (arXiv 2104.09864), in the layout that pairs the two halves. `scale` above 1 is position
    interpolation (Chen et al. 2023, arXiv 2306.15595): a context `scale` times longer keeps the trained angles.

    Args:
      x: [B,T,H,R].
      positions: [B,T] integers or floats, counted in tokens.
      base: inverse of the lowest frequency, above 0.
      scale: above 0; 1 leaves the positions as they are.

    Returns:
      [B,T,H,R] in x's dtype; angles, sines and products are float32 (float64 for float64 inputs).

    Raises:
      ValueError: odd R, shapes or dtypes that do not fit, base or scale not above 0.
    """
    require_rank(4, "[B,T,H,R]", x=x)
    require_float(x=x)
    width = x.shape[-1]
    if width % 2 or 0 in x.shape:
        raise ValueError(
            f"x has shape {x.shape}: the last axis is rotated in pairs and must be even, no axis may be empty."
        )
    if tuple(positions.shape) != x.shape[:2]:
        raise ValueError(f"positions has shape {positions.shape}; it must be [B,T] = {x.shape[:2]}.")
    if not base > 0 or not scale > 0:
        raise ValueError(f"base={base}, scale={scale}: both must be above 0.")
    dtype = accumulation_dtype(x)
    frequency = base ** (-2 * jnp.arange(width // 2, dtype=dtype) / width)
    angle = (positions.astype(dtype) / scale)[:, :, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def positions_from_segments(segment_ids):
    """segment_ids [B,T] int32 (0 = padding) -> [B,T] int32 position inside the document; padding does not count."""
    require_rank(2, "[B,T]", segment_ids=segment_ids)
    check_segment_ids(segment_ids, segment_ids.shape)
    real = segment_ids > 0
    count = jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    highest = lax.cummax(segment_ids, axis=1)
    before = jnp.pad(highest, ((0, 0), (1, 0)))[:, :-1]
    start = lax.cummax(jnp.where(real & (segment_ids > before), count, 0), axis=1)
    return jnp.where(real, count - start, 0)
