"""Depth attention (attention residuals): each sub-layer reads a softmax mix of earlier stream values.

Shapes: S stored snapshots, B batch, T tokens, D width, Q queries of one block. snapshots [S,B,T,D], prefix [B,T,D]
(the running sum of the open block, one more source), norm_weight and query [D].
Source: Kimi K3 report section 2.2, eq. 8-10; Attention Residuals (arXiv 2603.15031) figure 2 and algorithm 1.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from moejax.kernels.common import accumulation_dtype, require_float, require_rank

Count = int | np.integer | Array | None
Valid = bool | np.bool_ | Array | None


def attention_residual(
    sources: Array, norm_weight: Array, query: Array, *, count: Count = None, eps: float = 1e-5
) -> Array:
    """Softmax mix of the first `count` sources, token by token.

    `logit_s = sum_d rms_normalised(source_s)_d * norm_weight_d * query_d` (no 1/sqrt(D)), softmax over the sources,
    mix of the raw sources. Logits, softmax and sums are float32 (float64 for float64 inputs).

    Args:
      sources: [S,B,T,D] float32, bfloat16 or float64.
      norm_weight, query: [D]. eps: added to the mean square of a source.
      count: how many sources are valid, 1 <= count <= S, a number or a traced int32; None = all. Others are not read.
    Returns: [B,T,D] in `sources.dtype`; one valid source is returned exactly (-0.0 as 0.0).
    Raises ValueError: a shape, dtype, count or eps that breaks the rules above.
    """
    return _checked_mix(sources, None, norm_weight, query, count, False, eps)


def depth_attention(
    snapshots: Array,
    prefix: Array,
    norm_weight: Array,
    query: Array,
    *,
    count: Count = None,
    prefix_valid: Valid = None,
    eps: float = 1e-5,
) -> Array:
    """`attention_residual` over `snapshots[:count]` and the running prefix, without building the [S+1,B,T,D] array.

    Args:
      snapshots: [S,B,T,D], S >= 0; prefix: [B,T,D] of the same dtype; norm_weight, query: [D].
      count: valid snapshots, 0 <= count <= S, a number or a traced int32; None = all. The rest is never read.
      prefix_valid: whether the prefix is a source, a bool or a traced bool; None = yes. No source at all: NaN.
    Returns: [B,T,D] in `prefix.dtype`; one valid source is returned exactly (-0.0 as 0.0).
    Raises ValueError: as `attention_residual`; also a static count of 0 together with prefix_valid=False.
    """
    return _checked_mix(
        snapshots, prefix, norm_weight, query, count, True if prefix_valid is None else prefix_valid, eps
    )


class DepthPartial(NamedTuple):
    """The snapshots' share of a softmax mix: m [Q,B,T] the largest logit, o [Q,B,T,D] the sum of e^(logit - m) v and
    l [Q,B,T] the sum of e^(logit - m)."""

    o: Array
    m: Array
    l: Array


def depth_attention_snapshots(
    snapshots: Array, norm_weights: Array, queries: Array, count: Count = None, *, eps: float = 1e-5
) -> DepthPartial:
    """Phase one of two-phase inference: the Q queries of a block against its snapshots, which are read once for all.

    Args: snapshots [S,B,T,D]; norm_weights, queries [Q,D]; count and eps as `attention_residual`.
    Returns: DepthPartial, float32 (float64 for float64 inputs). With count = 0: m = -inf, o = l = 0.
    Raises ValueError: as `attention_residual`.
    """
    _check(snapshots, None, norm_weights, queries, eps, rank=2)
    dtype = accumulation_dtype(snapshots)
    valid = _valid(count, snapshots.shape[0])[:, None, None]
    v = jnp.where(valid[..., None], snapshots, 0).astype(dtype)
    folded = norm_weights.astype(dtype) * queries.astype(dtype)
    # HIGHEST: the default on GPU and TPU rounds the operands, and the logits feed an exponential.
    logits = jnp.einsum("qd,sbtd->qsbt", folded, v, precision=jax.lax.Precision.HIGHEST) * _rsqrt_mean_square(v, eps)
    logits = jnp.where(valid, logits, -jnp.inf)
    m = jax.lax.stop_gradient(logits.max(axis=1))
    e = jnp.where(valid, jnp.exp(logits - jnp.where(m == -jnp.inf, 0, m)[:, None]), 0)
    return DepthPartial(jnp.einsum("qsbt,sbtd->qbtd", e, v, precision=jax.lax.Precision.HIGHEST), m, e.sum(axis=1))


def depth_attention_merge(
    snapshots_share: DepthPartial, prefix: Array | None, norm_weight: Array, query: Array, *, eps: float = 1e-5
) -> Array:
    """Phase two: one query's share (o [B,T,D], m and l [B,T]) joined with the running prefix [B,T,D].

    Args: prefix: None where it is no source (the first sub-layer of a block; needs count >= 1 in phase one);
      norm_weight, query: [D], the rows that made the share.
    Returns: [B,T,D] in `prefix.dtype`, or the share's dtype without a prefix.
    Raises ValueError: as `attention_residual`.
    """
    o, m, l = snapshots_share
    require_rank(3, "[B,T,D]", **{"snapshots_share.o": o})
    if prefix is None:
        return o / l[..., None]
    _check(prefix[None], None, norm_weight, query, eps)
    if prefix.shape != o.shape:
        raise ValueError(
            f"prefix has shape {prefix.shape} and the snapshots' share {o.shape}; both must be [B,T,D] of one query."
        )
    p = prefix.astype(o.dtype)
    folded = norm_weight.astype(o.dtype) * query.astype(o.dtype)
    logit = jnp.sum(p * folded, axis=-1) * _rsqrt_mean_square(p, eps)
    top = jax.lax.stop_gradient(jnp.maximum(m, logit))
    kept, own = jnp.exp(m - top), jnp.exp(logit - top)
    return ((kept[..., None] * o + own[..., None] * p) / (kept * l + own)[..., None]).astype(prefix.dtype)


def _checked_mix(snapshots, prefix, norm_weight, query, count, prefix_valid, eps) -> Array:
    _check(snapshots, prefix, norm_weight, query, eps)
    sources = snapshots.shape[0]
    if isinstance(count, int | np.integer) and not 0 <= count <= sources:
        raise ValueError(f"count is {count}; it must be between 0 and the {sources} stored sources.")
    no_prefix = isinstance(prefix_valid, bool | np.bool_) and not prefix_valid
    if no_prefix and (sources == 0 or (isinstance(count, int | np.integer) and count == 0)):
        raise ValueError(
            "there is no source to mix: count is 0 and there is no prefix; give at least one valid source."
        )
    valid = _valid(count, sources)
    if prefix is not None:
        valid = jnp.concatenate([valid, jnp.asarray(prefix_valid, bool).reshape(1)])
    return _mix(snapshots, prefix, norm_weight, query, valid, float(eps))


def _valid(count: Count, sources: int) -> Array:
    return jnp.arange(sources) < (sources if count is None else count)


def _rsqrt_mean_square(v: Array, eps: float) -> Array:
    return jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)


# A VJP of its own: autodiff would keep the float32 copy of every source and its normalised form (3 x [S,B,T,D]
# float32) for the backward pass; this one keeps the arguments only and recomputes two numbers a source and token.
@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _mix(snapshots, prefix, norm_weight, query, valid, eps):
    return _mix_forward(snapshots, prefix, norm_weight, query, valid, eps)[0]


def _mix_forward(snapshots, prefix, norm_weight, query, valid, eps):
    parts = _parts(snapshots, prefix, valid)
    folded = _folded(norm_weight, query, parts[0][0].dtype)
    shares = _shares([_logits(v, folded, eps) for v, _ in parts], valid)
    # A masked source is 0 here, and a single one has share 1 exactly: 1 * v + 0 = v.
    sums = [jnp.sum(share[..., None] * v, axis=0) for share, (v, _) in zip(shares, parts, strict=True)]
    total = sums[0] if prefix is None else sums[0] + sums[1]
    out = total.astype(snapshots.dtype)
    return out, (snapshots, prefix, norm_weight, query, valid)


def _mix_backward(eps, saved, cotangent):
    snapshots, prefix, norm_weight, query, valid = saved
    parts = _parts(snapshots, prefix, valid)
    dtype = parts[0][0].dtype
    folded = _folded(norm_weight, query, dtype)
    width = folded.shape[0]
    g = cotangent.astype(dtype)
    shares = _shares([_logits(v, folded, eps) for v, _ in parts], valid)
    along = [jnp.sum(g * v, axis=-1) for v, _ in parts]
    mean = sum(jnp.sum(a * c, axis=0) for a, c in zip(shares, along, strict=True))
    d_sources, d_folded = [], jnp.zeros_like(folded)
    for share, c, (v, ok) in zip(shares, along, parts, strict=True):
        d_logit = share * (c - mean)
        r = _rsqrt_mean_square(v, eps)
        dot = jnp.sum(v * folded, axis=-1)
        d_folded = d_folded + jnp.sum((d_logit * r)[..., None] * v, axis=(0, 1, 2))
        d_v = share[..., None] * g + (d_logit * r)[..., None] * folded - (d_logit * dot * r**3 / width)[..., None] * v
        d_sources.append(jnp.where(ok[:, None, None, None], d_v, 0).astype(snapshots.dtype))
    d_snapshots = d_sources[0]
    d_prefix = None if prefix is None else d_sources[1][0]
    d_weight = (d_folded * query.astype(dtype)).astype(norm_weight.dtype)
    d_query = (d_folded * norm_weight.astype(dtype)).astype(query.dtype)
    return d_snapshots, d_prefix, d_weight, d_query, None


_mix.defvjp(_mix_forward, _mix_backward)


def _parts(snapshots: Array, prefix: Array | None, valid: Array) -> list[tuple[Array, Array]]:
    """The sources as one or two arrays [S,B,T,D] with their validity [S], selected before anything else."""
    parts = [(snapshots, valid[: snapshots.shape[0]])]
    if prefix is not None:
        parts.append((prefix[None], valid[-1:]))
    dtype = accumulation_dtype(snapshots)
    return [(jnp.where(ok[:, None, None, None], v, 0).astype(dtype), ok) for v, ok in parts]


def _folded(norm_weight: Array, query: Array, dtype) -> Array:
    return norm_weight.astype(dtype) * query.astype(dtype)


def _logits(v: Array, folded: Array, eps: float) -> Array:
    return jnp.sum(v * folded, axis=-1) * _rsqrt_mean_square(v, eps)


def _shares(logits: list[Array], valid: Array) -> list[Array]:
    """Softmax over the sources of all parts, split as they came."""
    joined = jnp.where(valid[:, None, None], jnp.concatenate(logits), -jnp.inf)
    shares = jax.nn.softmax(joined, axis=0)
    return [shares[: logits[0].shape[0]], shares[logits[0].shape[0] :]][: len(logits)]


def _check(snapshots, prefix, norm_weight, query, eps, rank: int = 1) -> None:
    require_float(snapshots=snapshots, prefix=prefix, norm_weight=norm_weight, query=query)
    require_rank(4, "[S,B,T,D]", snapshots=snapshots)
    require_rank(rank, "[D]" if rank == 1 else "[Q,D]", norm_weight=norm_weight, query=query)
    if 0 in snapshots.shape[1:]:
        raise ValueError(f"the sources have shape {snapshots.shape}; no axis of [B,T,D] may be empty.")
    if prefix is not None and (prefix.shape != snapshots.shape[1:] or prefix.dtype != snapshots.dtype):
        raise ValueError(
            f"prefix is {prefix.dtype}{list(prefix.shape)}; it must be {snapshots.dtype}{list(snapshots.shape[1:])}, "
            "like one snapshot."
        )
    if norm_weight.shape != query.shape or query.shape[-1] != snapshots.shape[-1]:
        raise ValueError(
            f"norm_weight has shape {norm_weight.shape} and query {query.shape}; both must end in D = "
            f"{snapshots.shape[-1]}."
        )
    if not eps > 0:
        raise ValueError(f"eps is {eps}; it must be > 0 (an all-zero source would divide by 0).")
