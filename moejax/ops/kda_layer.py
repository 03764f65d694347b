"""A whole KDA layer as a function of its weights (K3 report section 2.1.1, equations 1-6).

Shapes: B batch, T tokens, D model width, H query/key heads, G value heads (a multiple of H), K and V channels of a
key and a value head, R and P ranks of the decay and output gates, W taps of the convolution.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..kernels.common import accumulation_dtype
from .kda import gated_kda
from .norms import rms_norm
from .short_conv import short_conv


class KDAWeights(NamedTuple):
    """Weights of one KDA layer. Either `gate_proj`, or `gate_down` and `gate_up`, is None."""

    q_proj: jax.Array  # [D,H,K]
    k_proj: jax.Array  # [D,H,K]
    v_proj: jax.Array  # [D,G,V]
    q_conv: jax.Array  # [W,H*K] float32, last tap = current token
    k_conv: jax.Array  # [W,H*K]
    v_conv: jax.Array  # [W,G*V]
    decay_down: jax.Array  # [D,R]
    decay_up: jax.Array  # [R,G,K]
    A_log: jax.Array  # [G] float32
    dt_bias: jax.Array  # [G,K] float32
    beta_proj: jax.Array  # [D,G]
    gate_proj: jax.Array | None  # [D,G,V]
    gate_down: jax.Array | None  # [D,P]
    gate_up: jax.Array | None  # [P,G,V]
    out_norm: jax.Array  # [V] float32
    out_proj: jax.Array  # [G,V,D]


class KDAState(NamedTuple):
    """What a KDA layer carries from one call to the next: a constant size, whatever the length."""

    q_history: jax.Array  # [B,W-1,H*K] inputs of the convolution
    k_history: jax.Array  # [B,W-1,H*K]
    v_history: jax.Array  # [B,W-1,G*V]
    recurrent: jax.Array | None  # [B,G,K,V] float32


def kda_layer(
    x: jax.Array,
    weights: KDAWeights,
    *,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    state: KDAState | None = None,
    segment_ids: jax.Array | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, KDAState | None]:
    """Projections, short convolutions, gated KDA, output norm and gate, output projection.

    Args:
      x: [B,T,D] the layer's normed input.
      weights: see `KDAWeights`; matrices are cast to x.dtype, gates and norms are computed in float32.
      lower_bound: lower bound of the log decay in nats, or None for the unbounded softplus gate.
      norm_eps: epsilon of the output norm.
      state: continues an earlier call (the first document of each row goes on).
      segment_ids: [B,T] int32; see `kda`.
      return_state: also return the state after the last document.

    Returns:
      (y [B,T,D] in x.dtype, KDAState or None).
    """
    q, q_history = _convolved(x, weights.q_proj, weights.q_conv, state and state.q_history, segment_ids)
    k, k_history = _convolved(x, weights.k_proj, weights.k_conv, state and state.k_history, segment_ids)
    v, v_history = _convolved(x, weights.v_proj, weights.v_conv, state and state.v_history, segment_ids)
    with jax.named_scope("kda_gates"):
        raw_decay = jnp.einsum("btr,rhk->bthk", x @ weights.decay_down.astype(x.dtype), weights.decay_up.astype(x.dtype))
        beta_logits = x @ weights.beta_proj.astype(x.dtype)
    with jax.named_scope("kda_scan"):
        o, recurrent = gated_kda(
            q,
            k,
            v,
            raw_decay,
            beta_logits,
            weights.A_log,
            weights.dt_bias,
            lower_bound=lower_bound,
            initial_state=None if state is None else state.recurrent,
            segment_ids=segment_ids,
            output_final_state=return_state,
            implementation=implementation,
        )
    with jax.named_scope("kda_output"):
        y = jnp.einsum("bthv,hvd->btd", _gated_norm(o, x, weights, norm_eps), weights.out_proj.astype(x.dtype))
    return y, KDAState(q_history, k_history, v_history, recurrent) if return_state else None


def _convolved(x, projection, taps, history, segment_ids):
    """Project to heads and convolve along time -> ([B,T,H,K], new history [B,W-1,H*K])."""
    heads, channels = projection.shape[1:]
    projected = x @ projection.reshape(projection.shape[0], -1).astype(x.dtype)
    y, history = short_conv(projected, taps, history=history, segment_ids=segment_ids)
    return y.reshape(*x.shape[:2], heads, channels), history


def _gated_norm(o, x, weights, eps):
    """Per-head RMS norm, then the sigmoid gate, both in float32: the gate comes after the norm."""
    wide = accumulation_dtype(o)
    if weights.gate_proj is None:
        logits = jnp.einsum("btr,rhv->bthv", x @ weights.gate_down.astype(x.dtype), weights.gate_up.astype(x.dtype))
    else:
        logits = jnp.einsum("btd,dhv->bthv", x, weights.gate_proj.astype(x.dtype))
    normed = rms_norm(o.astype(wide), weights.out_norm.astype(wide), eps=eps)
    return (normed * jax.nn.sigmoid(logits.astype(wide))).astype(x.dtype)
