"""What every kernel shares: the accumulation dtype and the dtype rule."""

import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "bfloat16", "float64")


def accumulation_dtype(*arrays) -> jnp.dtype:
    """float64 when any input is float64, else float32."""
    return jnp.dtype("float64" if any(x is not None and x.dtype == jnp.float64 for x in arrays) else "float32")


def require_float(**arrays) -> None:
    """Raise ValueError unless each array is float32, bfloat16 or float64 (float16 overflows at 65504)."""
    for name, x in arrays.items():
        if x is not None and str(x.dtype) not in FLOATS:
            raise ValueError(f"{name} has dtype {x.dtype}; allowed: {', '.join(FLOATS)}. Cast it, e.g. {name}.astype(jnp.float32).")


def require_rank(rank: int, layout: str, **arrays) -> None:
    """Raise ValueError unless each array has `rank` axes; `layout` names them, e.g. '[B,T,H,K]'."""
    for name, x in arrays.items():
        if x is not None and x.ndim != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have {rank} axes {layout}.")


def check_segment_order(ids: np.ndarray) -> None:
    """Raise ValueError unless segment ids [B,T] are 0 (padding) or 1, 2, ... that never decrease along T."""
    if ids.min() < 0:
        raise ValueError(f"segment_ids holds {ids.min()}; ids are 0 (padding) or 1, 2, ... .")
    falls = np.any((ids > 0) & (ids < np.maximum.accumulate(ids, axis=1)), axis=1)
    if falls.any():
        raise ValueError(
            f"segment_ids of row {int(np.argmax(falls))} decrease along T; documents must stand in order 1, 2, ... "
            "(0 = padding anywhere). Renumber them by first appearance."
        )
