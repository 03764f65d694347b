"""Initial values of parameters."""

import jax
import jax.numpy as jnp

DT_RANGE = (1e-3, 0.1)
DT_FLOOR = 1e-4


def dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """softplus^-1(dt) with dt log-uniform in [1e-3, 0.1] (K3 report section 2.1.1).

    It gives memories of about 2 to 200 tokens under the bounded gate. With a zero bias a KDA model does not learn recall.
    """
    low, high = jnp.log(jnp.array(DT_RANGE))
    dt = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high)), DT_FLOOR)
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)
