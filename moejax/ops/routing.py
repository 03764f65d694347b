"""Expert routing: sigmoid scores, a bias that only selects, the top k.

Shapes: N tokens, E experts, k experts a token. logits and scores [N,E], bias [E].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from moejax.kernels.common import accumulation_dtype, require_float, require_rank


class Routing(NamedTuple):
    """experts int32 [N,k], best first; weights [N,k]; scores [N,E]; cutoff [N] = the (k+1)-th biased score, +inf when
    k = E."""

    experts: Array
    weights: Array
    scores: Array
    cutoff: Array


def route(logits: Array, bias: Array | None, k: int, *, scaling: float = 1.0, renormalize: bool = True) -> Routing:
    """Choose the k experts of largest `sigmoid(logits) + bias` and weigh them by their scores without the bias.

    The bias decides who is chosen and nothing else; choice and cutoff carry no gradient, the weights do, through the
    chosen scores. Computed in float32 (float64 for float64 inputs). Equal biased scores go to the lower expert index.
    Source: DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; Kimi K3 report section 2.3, eq. 11-13.

    Args:
      logits: [N,E]; the router's product must itself be float32, bfloat16 logits only move the rounding elsewhere.
      bias: [E] float32 or float64, or None for none. bfloat16 is refused: of 238 values around 7 it keeps 9.
      k: experts a token, 1 <= k <= E. scaling: factor on the weights. renormalize: weights / (sum + 1e-20).
    Returns: Routing.
    Raises ValueError: a shape, dtype or k that breaks the rules above.
    """
    require_float(logits=logits, bias=bias)
    require_rank(2, "[N,E]", logits=logits)
    check_top_k(k, logits.shape[1])
    if logits.shape[0] == 0:
        raise ValueError(f"logits has shape {logits.shape}; there must be at least one token.")
    dtype = accumulation_dtype(logits, bias)
    scores = jax.nn.sigmoid(logits.astype(dtype))
    experts, cutoff = select(scores, bias, k)
    weights = jnp.take_along_axis(scores, experts, axis=1, mode="promise_in_bounds")
    if renormalize:
        weights = _share_of_sum(weights)
    return Routing(experts, weights * scaling, scores, cutoff)


@jax.custom_jvp
def _share_of_sum(scores: Array) -> Array:
    return scores / (scores.sum(axis=1, keepdims=True) + 1e-20)


@_share_of_sum.defjvp
def _share_of_sum_jvp(primals, tangents):
    # Plain autodiff squares the denominator: 1e-40 underflows, and where all chosen scores are 0 it gives 0 * inf.
    (scores,), (change,) = primals, tangents
    shares = _share_of_sum(scores)
    return shares, (change - shares * change.sum(axis=1, keepdims=True)) / (scores.sum(axis=1, keepdims=True) + 1e-20)


def select(scores: Array, bias: Array | None, k: int) -> tuple[Array, Array]:
    """The k experts [N,k] of largest `scores + bias` and the (k+1)-th such sum [N] (+inf when k = E)."""
    tokens, experts = scores.shape
    check_bias(bias, experts)
    biased = jax.lax.stop_gradient(scores if bias is None else scores + bias.astype(scores.dtype))
    values, indices = (_kept_apart(x) for x in jax.lax.top_k(biased, min(k + 1, experts)))
    cutoff = values[:, k] if k < experts else jnp.full((tokens,), jnp.inf, scores.dtype)
    return indices[:, :k].astype(jnp.int32), cutoff


def _kept_apart(x: Array) -> Array:
    """x behind a barrier, or as it is where the call is lowered for cuda.

    The barriers keep slices from being fused into the top-k, which XLA on a CPU then does by a full sort: 1.7 s instead of 0.06 s at
    8192 x 896, k = 16. One barrier a result: a barrier over the pair aborts XLA under a mesh. On a GPU the sort is a kernel of its own
    anyway, and each barrier one more launch.
    """
    return jax.lax.platform_dependent(x, cuda=lambda x: x, default=jax.lax.optimization_barrier)


def check_top_k(k: int, experts: int, *, balancing: bool = False) -> None:
    """Raise ValueError unless 1 <= k <= experts, or k < experts where there is something to balance."""
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k}; each token needs between 1 and all {experts} experts.")
    if balancing and k == experts:
        raise ValueError(
            f"k is {k} of {experts} experts: every expert gets every token, nothing to balance. Use the rule 'none'."
        )


def check_bias(bias: Array | None, experts: int) -> None:
    """Raise ValueError unless bias is None or float32/float64 [experts]."""
    if bias is None:
        return
    if bias.shape != (experts,):
        raise ValueError(f"bias has shape {bias.shape}; it must be [E] = [{experts}], one value an expert.")
    if bias.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"bias has dtype {bias.dtype}; the selection bias must be float32 or float64 (bfloat16 moves most tokens)."
        )
