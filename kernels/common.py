"""What every kernel shares: the accumulation dtype and the dtype rule."""

import jax.numpy as jnp

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
