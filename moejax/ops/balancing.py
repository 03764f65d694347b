"""Balancing without a loss: the next selection bias from what the router did with this step's tokens.

Shapes: N tokens, E experts, k experts a token, bins of the histogram. scores [N,E] (before the bias), bias [E], mask
[N] bool (False = padding, never read), load [E] integers = tokens that chose the expert. Nothing here carries a
gradient.
The margin of token i and expert j is r_ij = cutoff_i - score_ij: the bias that expert j would need to be chosen for
token i.
Source: Kimi K3 report section 2.3.3, eq. 13-14, appendices C-D (quantile balancing); DeepSeek-V3, arXiv 2412.19437
  (sign).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .histogram import count_bins
from .routing import check_bias, check_top_k, select

Scalar = Array | np.floating | float


def centre(bias: Array) -> Array:
    """bias [E] minus its mean: a common shift selects the same experts, and uncentred it would drift."""
    return bias - jnp.mean(bias)


def ema_bias(bias: Array, new: Array, weight: Scalar) -> Array:
    """`centre(weight * bias + (1 - weight) * new)`: smooths an estimate's noise over steps; weight 0: `new` itself."""
    return centre(weight * bias + (1 - weight) * new)


def quantile_bias(scores: Array, bias: Array, k: int, *, mask: Array | None = None) -> Array:
    """Quantile balancing with the exact quantile: the bias with which each expert would have been chosen k N / E times.

    `centre(quantile_{k/E}(r[:, j]))` over the counted tokens, with linear interpolation at (k/E)(N-1).

    Args: scores [N,E] float32 or float64; bias [E] used for this step's choice; k < E; mask [N] bool or None.
    Returns: new bias [E], mean 0; `bias` itself when no token counts.
    Raises ValueError: shapes or dtypes that break the rules, k >= E.
    """
    margins, mask = _margins(scores, bias, k, None, mask)
    tokens = mask.sum(dtype=jnp.int32)
    # The quantile is among the smallest N k / E margins: a partial sort, several times faster than jnp.sort of [N,E].
    kept = min((scores.shape[0] - 1) * k // scores.shape[1] + 2, scores.shape[0])
    order = -jax.lax.top_k(jnp.where(mask[:, None], -margins, -jnp.inf).T, kept)[0].T
    low, fraction = _times_share(jnp.maximum(tokens - 1, 0), k, scores.shape[1], scores.dtype)
    last = jnp.maximum(tokens - 1, 0)
    below = jax.lax.dynamic_index_in_dim(order, low, axis=0, keepdims=False)
    above = jax.lax.dynamic_index_in_dim(order, jnp.minimum(low + 1, last), axis=0, keepdims=False)
    new = centre(below + fraction * (above - below))
    return jnp.where(tokens > 0, new, bias)


def margin_histogram(
    scores: Array, bias: Array, k: int, *, bins: int = 1000, mask: Array | None = None, cutoff: Array | None = None
) -> Array:
    """Count each expert's margins in `bins` equal bins over [min(bias) - 1, max(bias) + 1], which holds them all.

    Args: scores [N,E] float32 or float64, in [0, 1]; bias [E] used for this step's choice; k < E; bins >= 1;
      mask [N] bool or None; cutoff [N] = `Routing.cutoff` saves the second top-k.
    Returns: int32 [E,bins], exact; adds over shards and micro-batches that share one bias. A margin on an edge that
      float32 rounds down counts in the bin below.
    Raises ValueError: shapes or dtypes that break the rules, k >= E.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; there must be at least one.")
    margins, mask = _margins(scores, bias, k, cutoff, mask)
    low, high = _margin_range(bias)
    # bins / range, not division by a width: with a zero bias the factor is exactly 500 and margins of 0 fall in bin
    # 500 as in float64.
    index = jnp.clip(jnp.floor((margins - low) * (bins / (high - low))), 0, bins - 1).astype(jnp.int32)
    return count_bins(index, mask, bins)


def bias_from_histogram(counts: Array, bias: Array, k: int) -> Array:
    """Quantile balancing from pooled counts: each expert's (k/E)-quantile, linear inside its bin, then centred.

    Args: counts int32 [E,bins] of `margin_histogram`, summed over everything that shares this step's bias [E]; k < E.
    Returns: new bias [E], mean 0; `bias` itself when nothing was counted. Exact ranks up to 2**31 - 1 tokens.
    Raises ValueError: shapes or dtypes that break the rules, k >= E.
    """
    _check_integers(counts=counts)
    if counts.ndim != 2 or 0 in counts.shape:
        raise ValueError(f"counts has shape {counts.shape}; it must be [E,bins] with at least one bin.")
    experts, bins = counts.shape
    check_bias(bias, experts)
    check_top_k(k, experts, balancing=True)
    cumulative = jnp.cumsum(counts, axis=1, dtype=jnp.int32)
    tokens = cumulative[:, -1:]
    whole, fraction = _times_share(tokens, k, experts, bias.dtype)
    rank = whole + (fraction > 0)
    place = jnp.sum(cumulative < jnp.maximum(rank, 1), axis=1, keepdims=True, dtype=jnp.int32)
    place = jnp.minimum(place, bins - 1)
    inside = jnp.take_along_axis(counts, place, axis=1)
    before = jnp.take_along_axis(cumulative, place, axis=1) - inside
    part = ((whole - before).astype(bias.dtype) + fraction) / jnp.maximum(inside, 1).astype(bias.dtype)
    low, high = _margin_range(bias)
    new = low + (place.astype(bias.dtype) + jnp.clip(part, 0, 1)) * ((high - low) / bins)
    return jnp.where(jnp.min(tokens) > 0, centre(new[:, 0]), bias)


def sign_bias(load: Array, bias: Array, step: Scalar) -> Array:
    """DeepSeek's rule: an expert above the mean load loses `step`, one below gains it. Not centred.

    The comparison is exact in integers: in float32 a load of 16777217 equals a mean of 16777216 and would not move.

    Args: load integers [E], each below 2**31; bias [E]; step >= 0, may be traced.
    Returns: [E]. Raises ValueError: shapes or dtypes that break the rules; more than 32768 experts.
    """
    _check_load(load, bias)
    return bias + jnp.asarray(step, bias.dtype) * _sign_of_mean_minus(load).astype(bias.dtype)


def load_quantile_bias(load: Array, bias: Array, step: Scalar, *, quantile: Scalar = 0.5) -> Array:
    """An expert whose load is above the `quantile` of the loads loses `step`, one below gains it. Not centred.

    The quantile is the linear interpolation at quantile * (E-1); no load lies strictly between two neighbours of the
    order, so the comparisons are exact in integers. A rule described in the press, kept as a control.

    Args: load integers [E]; bias [E]; step >= 0 and quantile in [0, 1], may be traced.
    Returns: [E]. Raises ValueError: shapes or dtypes that break the rules, a static quantile outside [0, 1].
    """
    _check_load(load, bias)
    if isinstance(quantile, int | float) and not 0 <= quantile <= 1:
        raise ValueError(f"quantile is {quantile}; it must be in [0, 1].")
    last = load.shape[0] - 1
    order = jnp.sort(load)
    place = jnp.clip(jnp.asarray(quantile, jnp.float32), 0, 1) * last
    index = jnp.floor(place).astype(jnp.int32)
    low, high = order[index], order[jnp.minimum(index + 1, last)]
    above = load > low
    below = load < jnp.where(place > index, high, low)
    return bias + jnp.asarray(step, bias.dtype) * (below.astype(bias.dtype) - above.astype(bias.dtype))


def median_band_bias(
    probability_sums: Array,
    bias: Array,
    *,
    step: Scalar = 0.1,
    low: Scalar = 0.8,
    high: Scalar = 1.2,
) -> Array:
    """An expert above `high` times the median load loses `step`, one below `low` times gains it. Not centred.

    Loads are softmax probabilities summed over tokens, not counts. A rule described in the press, kept as a control.

    Args: probability_sums float [E]; bias [E]; step, low, high: may be traced.
    Returns: [E]. Raises ValueError: shapes or dtypes that break the rules.
    """
    check_bias(bias, bias.shape[0])
    if probability_sums.shape != bias.shape or not jnp.issubdtype(probability_sums.dtype, jnp.floating):
        raise ValueError(
            f"probability_sums is {probability_sums.dtype}{list(probability_sums.shape)}; "
            f"it must be floating [E] = {list(bias.shape)}."
        )
    median = jnp.median(probability_sums)
    direction = (probability_sums < low * median).astype(bias.dtype) - (probability_sums > high * median).astype(
        bias.dtype
    )
    return bias + jnp.asarray(step, bias.dtype) * direction


def _margins(scores: Array, bias: Array, k: int, cutoff: Array | None, mask: Array | None) -> tuple[Array, Array]:
    """r [N,E] without gradient, 0 where masked, and the mask [N]."""
    if scores.ndim != 2 or 0 in scores.shape or scores.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"scores is {scores.dtype}{list(scores.shape)}; it must be float32 or float64 [N,E] with N >= 1."
        )
    tokens, experts = scores.shape
    check_bias(bias, experts)
    check_top_k(k, experts, balancing=True)
    mask = checked_mask(mask, tokens)
    scores = jax.lax.stop_gradient(jnp.where(mask[:, None], scores, 0))
    if cutoff is None:
        cutoff = select(scores, bias, k)[1]
    elif cutoff.shape != (tokens,):
        raise ValueError(f"cutoff has shape {cutoff.shape}; it must be [N] = [{tokens}].")
    cutoff = jax.lax.stop_gradient(jnp.where(mask, cutoff, 0))
    return cutoff[:, None] - scores, mask


def checked_mask(mask: Array | None, tokens: int) -> Array:
    """mask as bool [N]; all True for None. Raises ValueError for another shape or dtype."""
    if mask is None:
        return jnp.ones((tokens,), bool)
    if mask.shape != (tokens,) or mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype}{list(mask.shape)}; it must be bool [N] = [{tokens}], False = padding.")
    return mask


def _margin_range(bias: Array) -> tuple[Array, Array]:
    """Scores are in [0, 1], so every margin is in [min(bias) - 1, max(bias) + 1]."""
    return jnp.min(bias) - 1, jnp.max(bias) + 1


def _times_share(count: Array, k: int, experts: int, dtype) -> tuple[Array, Array]:
    """count * k / experts as whole int32 and fraction, without the int32 overflow of count * k."""
    groups, rest = count // experts, count % experts
    return groups * k + rest * k // experts, (rest * k % experts).astype(dtype) / experts


def _sign_of_mean_minus(load: Array) -> Array:
    """sign(mean(load) - load) in integers: sum(load) - E * load in two 16-bit limbs, none of which overflows int32."""
    experts = load.shape[0]
    high = jnp.sum(load >> 16) - (load >> 16) * experts
    low = jnp.sum(load & 0xFFFF) - (load & 0xFFFF) * experts
    high, low = high + (low >> 16), low & 0xFFFF
    return jnp.where(high != 0, jnp.sign(high), jnp.sign(low))


def _check_load(load: Array, bias: Array) -> None:
    _check_integers(load=load)
    if load.ndim != 1 or not 1 <= load.shape[0] <= 32768:
        raise ValueError(f"load has shape {load.shape}; it must be [E] with 1 to 32768 experts.")
    check_bias(bias, load.shape[0])


def _check_integers(**arrays: Array) -> None:
    for name, x in arrays.items():
        if x.dtype not in (jnp.int32, jnp.int64):
            raise ValueError(
                f"{name} has dtype {x.dtype}; it must be int32 (counts summed in a float lose the small differences)."
            )
