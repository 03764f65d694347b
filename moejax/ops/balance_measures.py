"""How uneven the experts' load is, as numbers to watch and as a loss.

Shapes: N tokens, E experts, k experts a token. load int32 [E], logits [N,E], experts int32 [N,k], mask [N] bool
(False = padding).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moejax.kernels.common import accumulation_dtype, require_float, require_rank

from .balancing import checked_mask
from .histogram import expert_load


class LoadMetrics(NamedTuple):
    """max_violation = max / mean - 1; load_cv = standard deviation / mean; load_cv_floor = sqrt(E / (tokens k)), what
    a perfectly balanced router shows by sampling alone; dead_experts = how many got no token. float32, float32,
    float32, int32."""

    max_violation: Array
    load_cv: Array
    load_cv_floor: Array
    dead_experts: Array


def load_metrics(load: Array, tokens: Array | int, k: int) -> LoadMetrics:
    """Balance of one layer's load int32 [E] over `tokens` counted tokens that chose k experts each.

    All 0, with every expert dead, when nothing was counted. MaxVio: Wang et al. 2024 (arXiv 2408.15664); the floor is
    the Poisson spread of a count whose mean is tokens * k / E.

    Raises ValueError: load is not [E] integers.
    """
    if load.ndim != 1 or not jnp.issubdtype(load.dtype, jnp.integer):
        raise ValueError(f"load is {load.dtype}{list(load.shape)}; it must be integers [E].")
    counts = load.astype(jnp.float32)
    mean = counts.mean()
    some = mean > 0
    scale = jnp.where(some, mean, 1)
    draws = jnp.maximum(jnp.asarray(tokens, jnp.float32) * k, 1)
    return LoadMetrics(
        jnp.where(some, counts.max() / scale - 1, 0),
        jnp.where(some, jnp.std(counts) / scale, 0),
        jnp.where(some, jnp.sqrt(load.shape[0] / draws), 0),
        jnp.sum(load == 0, dtype=jnp.int32),
    )


def aux_loss(logits: Array, experts: Array, *, mask: Array | None = None, axes: tuple[str, ...] = ()) -> Array:
    """`E * sum_e f_e P_e`: f_e the share of the choices that went to expert e, P_e the mean softmax probability.

    1 when balanced. The gradient flows through P only. Source: Switch Transformer (arXiv 2101.03961) eq. 4-6, with
    k choices a token.
    Args: logits [N,E] float32, bfloat16 or float64; experts int32 [N,k]; mask [N] bool, padding is neither counted
      nor read; axes: inside shard_map, the mesh axes that shard the tokens, whose shares are added up first.
    Returns: scalar float32 (float64 for float64 inputs), 0 when no token counts.
    Raises ValueError: shapes or dtypes that break the rules.
    """
    require_float(logits=logits)
    require_rank(2, "[N,E]", logits=logits)
    require_rank(2, "[N,k]", experts=experts)
    tokens, num_experts = logits.shape
    if experts.shape[0] != tokens or tokens == 0:
        raise ValueError(f"experts has shape {experts.shape} and logits {logits.shape}; both need the same N >= 1.")
    mask = checked_mask(mask, tokens)
    dtype = accumulation_dtype(logits)
    sums = mask.sum(), expert_load(experts, mask, num_experts), probability_sums(logits, mask)
    count, load, probability = jax.lax.psum(sums, axes) if axes else sums
    counted = jnp.maximum(count, 1).astype(dtype)
    share = load.astype(dtype) / (counted * experts.shape[1])
    return num_experts * jnp.sum(share * probability / counted)


def probability_sums(logits: Array, mask: Array) -> Array:
    """softmax(logits) summed over the unmasked tokens: [E] float32 (float64 for float64 logits)."""
    safe = jnp.where(mask[:, None], logits, 0).astype(accumulation_dtype(logits))
    return jnp.sum(jnp.where(mask[:, None], jax.nn.softmax(safe, axis=-1), 0), axis=0)
