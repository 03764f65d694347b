"""A whole KDA layer as a function of its weights (K3 report section 2.1.1, equations 1-6).

Shapes: B batch, T tokens, D model width, H query/key heads, G value heads (a multiple of H), K and V channels of a
key and a value head, R and P ranks of the decay and output gates, W taps of the convolution.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..kernels.common import accumulation_dtype, require_float, require_rank
from ..kernels.kda.choice import choose, run_keeping_inputs
from ..kernels.kda.gate import check_lower_bound
from ..kernels.varying import barrier_on_cuda
from .attention import check_segment_ids
from .kda import gated_kda, kda_implementation
from .norms import rms_norm
from .short_conv import short_conv

# Limits of the output norm's kernel: rows are an axis of a grid, the channels of a head lie in registers.
MOST_ROWS, MOST_CHANNELS = 65535, 4096


class KDAWeights(NamedTuple):
    """Weights of one KDA layer. The output gate is `out_gate`, or `out_gate_down` and `out_gate_up`; the other form is None."""

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
    out_gate: jax.Array | None  # [D,G,V]
    out_gate_down: jax.Array | None  # [D,P]
    out_gate_up: jax.Array | None  # [P,G,V]
    out_norm: jax.Array  # [V] float32
    out_proj: jax.Array  # [G,V,D]


class KDAState(NamedTuple):
    """What a KDA layer carries from one call to the next: a constant size, whatever the length."""

    q_history: jax.Array  # [B,W-1,H*K] inputs of the convolution
    k_history: jax.Array  # [B,W-1,H*K]
    v_history: jax.Array  # [B,W-1,G*V]
    recurrent: jax.Array  # [B,G,K,V] float32


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

    Source: K3 report section 2.1.1, equations 1-6; `lower_bound=None` and the low-rank output gate are those of Kimi Linear
    (arXiv 2510.26692).

    Args:
      x: [B,T,D] the layer's normed input, float32, bfloat16 or float64; T >= 1.
      weights: see `KDAWeights`; matrices are cast to x.dtype, gates and norms are computed in float32 (float64 for float64).
      lower_bound: lower bound of the log decay in nats a token, in [-5.9, 0), or None for the unbounded softplus gate.
      norm_eps: epsilon of the output norm, > 0.
      state: continues an earlier call (the first document of each row goes on).
      segment_ids: [B,T] int32, 0 = padding, documents 1, 2, ... in order; see `kda`. Convolutions and recurrence restart at
        each document. Padding is never read (it may hold NaN); y and the gradient of x are 0 there.
      return_state: also return the state after the last document.
      implementation: of the recurrence, and of convolutions and output norm where they have it; "reference" (token by token), "xla"
        (chunks), "triton" (kernels for NVIDIA Hopper), or None to choose each of them by itself; see `kda` and `short_conv`.

    Returns:
      (y [B,T,D] in x.dtype, KDAState or None).

    Raises:
      ValueError: shapes or dtypes that do not fit, none or both forms of the output gate, a lower_bound, norm_eps or
        implementation that is not allowed, segment ids that decrease.
      NotImplementedError: an implementation that this version lacks or that cannot run here, with the reason.
    """
    check_kda_layer(x, weights, lower_bound, norm_eps, state, segment_ids, implementation)

    def convolve(inputs, taps, histories):
        options: Any = dict(segment_ids=segment_ids, implementation=of_parts(implementation))
        pairs = [short_conv(a, w, history=h, **options) for a, w, h in zip(inputs, taps, histories, strict=True)]
        return [y for y, _ in pairs], [history for _, history in pairs]

    def recur(*operands):
        return gated_kda(
            *operands,
            lower_bound=lower_bound,
            initial_state=None if state is None else state.recurrent,
            segment_ids=segment_ids,
            output_final_state=return_state,
            implementation=implementation,
        )

    options: Any = dict(norm_eps=norm_eps, state=state, segment_ids=segment_ids, implementation=implementation)
    return layer_around(x, weights, convolve, recur, **options)


def of_parts(implementation: str | None) -> str | None:
    """The implementation of a layer's convolutions and output norm, which have no reference of their own."""
    return "xla" if implementation == "reference" else implementation


def layer_around(
    x: jax.Array,
    weights: KDAWeights,
    convolve: Callable,
    recur: Callable,
    *,
    norm_eps: float,
    state: KDAState | None,
    segment_ids: jax.Array | None,
    implementation: str | None,
) -> tuple[jax.Array, KDAState | None]:
    """All of the layer that works token by token, around its two parts that work along time. Arguments have been checked.

    convolve(inputs, taps, histories), lists for q, k, v: [B,T,H*K], [W,H*K], [B,W-1,H*K] or None -> outputs, new histories.
    recur(q, k, v, raw_gate, beta_logits, A_log, dt_bias) as gated_kda -> o, final state. No final state: no KDAState.
    """
    if segment_ids is not None:  # first of all: NaN at padding would make the gradient of every projection NaN
        x = jnp.where((segment_ids > 0)[..., None], x, 0)
    projections = (weights.q_proj, weights.k_proj, weights.v_proj)
    inputs = [x @ projection.reshape(projection.shape[0], -1).astype(x.dtype) for projection in projections]
    histories = [None] * 3 if state is None else [state.q_history, state.k_history, state.v_history]
    mixed, carried = convolve(inputs, [weights.q_conv, weights.k_conv, weights.v_conv], histories)
    q, k, v = (y.reshape(*x.shape[:2], *projection.shape[1:]) for y, projection in zip(mixed, projections, strict=True))
    with jax.named_scope("kda_gates"):
        raw_decay = jnp.einsum("btr,rhk->bthk", x @ weights.decay_down.astype(x.dtype), weights.decay_up.astype(x.dtype))
        # Of one token: XLA makes one product of this and decay_down, and copies both weights together for it at every step. Apart,
        # decay_down joins the other projections: two launches fewer up to 8 rows, one at 16, none more at any number.
        alone = barrier_on_cuda(x) if x.shape[1] == 1 else x
        beta_logits = alone @ weights.beta_proj.astype(x.dtype)
    with jax.named_scope("kda_scan"):
        o, recurrent = recur(q, k, v, raw_decay, beta_logits, weights.A_log, weights.dt_bias)
    with jax.named_scope("kda_output"):
        normed = _gated_norm(o, x, weights, norm_eps, of_parts(implementation))
        y = jnp.einsum("bthv,hvd->btd", normed, weights.out_proj.astype(x.dtype))
    if recurrent is None:
        return y, None
    q_history, k_history, v_history = carried
    return y, KDAState(q_history, k_history, v_history, recurrent)


def _gated_norm(o, x, weights, eps, implementation=None):
    """Per-head RMS norm, then the sigmoid gate, both in float32: the gate comes after the norm."""
    if weights.out_gate is None:
        logits = jnp.einsum("btr,rhv->bthv", x @ weights.out_gate_down.astype(x.dtype), weights.out_gate_up.astype(x.dtype))
    else:
        logits = jnp.einsum("btd,dhv->bthv", x, weights.out_gate.astype(x.dtype))

    def plain(o, logits, weight):
        wide = accumulation_dtype(o)
        normed = rms_norm(o.astype(wide), weight.astype(wide), eps=eps)
        return (normed * jax.nn.sigmoid(logits.astype(wide))).astype(x.dtype)

    def kernels(o, logits, weight):
        from ..kernels.kda.triton_norm import gated_rms_norm_triton  # Triton, at the first use

        return gated_rms_norm_triton(o, logits, weight, eps=eps).astype(x.dtype)

    name = choose("kda_layer's output norm", implementation, _norm_refused(o, logits, weights.out_norm), loss="slower")
    return run_keeping_inputs(name, kernels, plain, (o, logits, weights.out_norm))


def _norm_refused(o, logits, weight) -> str | None:
    """Why the kernel of the output norm does not take these operands, or None."""
    if jnp.float64 in (o.dtype, logits.dtype, weight.dtype):
        return "its kernel takes float32 and bfloat16, here float64"
    if o.shape[0] > MOST_ROWS or o.shape[-1] > MOST_CHANNELS:
        return f"its kernel takes at most {MOST_ROWS} rows and {MOST_CHANNELS} channels, here {o.shape[0]} and {o.shape[-1]}"
    return None


def check_kda_layer(x, weights: Any, lower_bound, norm_eps, state, segment_ids, implementation) -> None:
    """The errors of kda_layer."""
    check_lower_bound(lower_bound)
    kda_implementation(implementation=implementation)
    if not norm_eps > 0:
        raise ValueError(f"norm_eps={norm_eps!r}; it must be > 0 (an all-zero row would divide by 0).")
    require_rank(3, "[B,T,D]", x=x)
    require_float(x=x, **weights._asdict(), **({} if state is None else state._asdict()))
    if 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; no axis of [B,T,D] may be empty (skip the call when there are no tokens).")
    check_segment_ids(segment_ids, x.shape[:2])
    low_rank = (weights.out_gate_down is not None, weights.out_gate_up is not None)
    if low_rank != (weights.out_gate is None,) * 2:
        given = [name for name in ("out_gate", "out_gate_down", "out_gate_up") if getattr(weights, name) is not None]
        raise ValueError(f"output gate weights given: {given}; pass either out_gate, or out_gate_down and out_gate_up.")
    for name, shape in _expected_shapes(x, weights).items():
        weight = getattr(weights, name)
        if tuple(weight.shape) != shape or 0 in shape:
            raise ValueError(
                f"{name} has shape {tuple(weight.shape)}; with x {tuple(x.shape)} and the other weights it must be {shape}, no axis empty."
            )
    heads, value_heads = weights.q_proj.shape[1], weights.v_proj.shape[1]
    if value_heads % heads:
        raise ValueError(f"v_proj has {value_heads} heads and q_proj {heads}; value heads must be a multiple of query/key heads.")
    if state is not None:
        _check_state(state, x.shape[0], weights)


def _check_state(state, batch, weights):
    (H, K), (G, V), W = weights.q_proj.shape[1:], weights.v_proj.shape[1:], weights.q_conv.shape[0]
    history = (batch, W - 1, H * K)
    expected = {"q_history": history, "k_history": history, "v_history": (batch, W - 1, G * V), "recurrent": (batch, G, K, V)}
    for name, shape in expected.items():
        part = getattr(state, name)
        if part is None or tuple(part.shape) != shape:
            raise ValueError(
                f"state.{name} has shape {None if part is None else tuple(part.shape)}; with these weights and {batch} rows it must be "
                f"{shape}. Pass the state that a call with return_state=True gave, or None."
            )


def _expected_shapes(x, weights: Any) -> dict[str, tuple[int, ...]]:
    """Sizes come from x, q_proj (H, K), v_proj (G, V), q_conv (W), decay_down (R) and out_gate_down (P)."""
    require_rank(3, "[D,heads,channels]", q_proj=weights.q_proj, v_proj=weights.v_proj)
    require_rank(2, "", q_conv=weights.q_conv, decay_down=weights.decay_down, out_gate_down=weights.out_gate_down)
    D, (H, K), (G, V) = x.shape[2], weights.q_proj.shape[1:], weights.v_proj.shape[1:]
    W, R = weights.q_conv.shape[0], weights.decay_down.shape[1]
    expected = {
        "q_proj": (D, H, K),
        "k_proj": (D, H, K),
        "v_proj": (D, G, V),
        "q_conv": (W, H * K),
        "k_conv": (W, H * K),
        "v_conv": (W, G * V),
        "decay_down": (D, R),
        "decay_up": (R, G, K),
        "A_log": (G,),
        "dt_bias": (G, K),
        "beta_proj": (D, G),
        "out_norm": (V,),
        "out_proj": (G, V, D),
    }
    if weights.out_gate is not None:
        return expected | {"out_gate": (D, G, V)}
    P = weights.out_gate_down.shape[1]
    return expected | {"out_gate_down": (D, P), "out_gate_up": (P, G, V)}
