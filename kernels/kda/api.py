"""Kimi Delta Attention: the public functions `kda` and `gated_kda`, their checks, and the choice of an implementation.

Shapes: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K key channels, V value channels,
N documents of a row. "float32" means float32, or float64 when an input is float64.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..common import accumulation_dtype, check_segment_order, require_float, require_rank
from ..varying import match_varying
from .choice import choose, implementation_on, run
from .gate import check_gate, check_lower_bound, kda_gate, l2_normalize
from .reference import kda_reference
from .segments import document_ids, drop_padding
from .triton import CLOSED, SIZES, kda_triton
from .xla import kda_chunked

NAMES: Any = dict(plain=("reference", "xla"), absent=("tpu",))


def kda_implementation(
    platform: str | None = None,
    *,
    implementation: str | None = None,
    dtype=jnp.bfloat16,
    lower_bound: float | None = -5.0,
    key_dim: int = 128,
    value_dim: int = 128,
) -> str:
    """The name of the implementation that `kda(implementation=...)` runs when it is lowered for `platform`.

    platform: "cpu", "cuda", "gpu" (taken for cuda), "rocm" or "tpu"; None is this process's default backend.
    dtype: of q, k and v; lower_bound, key_dim, value_dim: of the call. implementation=None is "triton" on cuda where the kernels can
    take the call (bfloat16, a lower bound, K, V <= 256, a Hopper GPU or none here, jax-triton installed), and "xla" everywhere else.
    Raises ValueError for an unknown name and NotImplementedError, with the reason, for one that cannot run there.
    """
    return implementation_on(platform, "kda", implementation, kernels_refuse(dtype, lower_bound, key_dim, value_dim), **NAMES)


def kernels_refuse(dtype, lower_bound: float | None, key_dim: int, value_dim: int) -> str | None:
    """Why the GPU kernels do not take such operands, or None. dtype: of q, k and v together."""
    if dtype != jnp.bfloat16:
        return f"its kernels need q, k and v in bfloat16 and the rest in bfloat16 or float32, here {jnp.dtype(dtype)}"
    if lower_bound is None:
        return "its kernels need a lower_bound of the log decay (the unbounded gate needs pairwise differences)"
    if max(key_dim, value_dim) > SIZES[-1]:
        return f"its kernels take at most {SIZES[-1]} channels, here K = {key_dim}, V = {value_dim}"
    return None


def resolve(implementation: str | None, q, k, v, g, beta, initial_state, lower_bound, *gate) -> str:
    """Which to run: "reference", "xla", "triton", or "lowered", which is triton when lowered for cuda and xla otherwise.

    gate: A_log and dt_bias of a gated call, or None; one operand of float64 makes the state float64.
    """
    wide = [x.dtype for x in (g, beta, initial_state, *gate) if x is not None and x.dtype == jnp.float64]
    dtype = jnp.result_type(q.dtype, k.dtype, v.dtype, *wide)
    refused = kernels_refuse(dtype, lower_bound, q.shape[3], v.shape[3])
    return choose("kda", implementation, refused, loss="several times slower", **NAMES)


def kda(
    q,
    k,
    v,
    g,
    beta,
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state=None,
    segment_ids=None,
    num_segments: int | None = None,
    output_final_state: bool = False,
    implementation: str | None = None,
):
    """The KDA recurrence (Kimi K3 report section 2.1.1): decay a channel, erase and write along the key, read by the query.

    S <- Diag(exp g) S;  S <- S + beta k (v - S^T k)^T;  o = scale S^T q

    q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV,K] natural-log decay <= 0 of one token; beta [B,T,HV]; float32, bfloat16 or float64.
    Value head j reads query/key head j // (HV // H). q and k are used as they are (see gated_kda for the L2 norm).
    lower_bound: a promise that every g >= lower_bound, in [-5.9, 0), which makes all tiles dense products; results are undefined
    where it is broken. None: no promise, exact for any g <= 0, slower.
    scale: a Python number; None is K**-0.5.
    initial_state: float32 [B,HV,K,V] of the row's first document; zeros when None.
    segment_ids: integer [B,T], 0 = padding, documents 1, 2, ... in order (ids other than 0 never decrease along T). The state
    restarts at each document. Padding neither reads nor writes: its output is 0, its gradient 0, its inputs may be NaN; it may
    stand anywhere, also inside a document, which goes on after it.
    num_segments=N: initial and final state are per document, [B,N,HV,K,V], document i in row i - 1; ids must be <= N. A
    document that is absent returns its initial state. Without it the final state is that of the last document.
    implementation: "reference" (token by token), "xla" (chunks of 16 tokens), "triton" (kernels for NVIDIA Hopper; bfloat16 q, k, v and
    a lower_bound), or None: "triton" when the call is lowered for cuda and the kernels can take it, else "xla"; see
    kda_implementation. Over several GPUs call it inside jax.shard_map (batch and heads may be cut): a jit alone cannot cut a
    kernel's launch and would gather the operands on every device.

    Returns (o [B,T,HV,V] in v.dtype, final state float32, or None unless output_final_state). Differentiable in every float
    input. Bad shapes, dtypes or values raise ValueError before anything is compiled; T = 0 and float16 are among them. Ids that
    are traced cannot be read: then decreasing ids give undefined results for that row.
    """
    q, k, v, g, beta, initial_state, segment_ids = as_arrays(q, k, v, g, beta, initial_state, segment_ids)
    check_operands(q, k, v, g, beta)
    check_lower_bound(lower_bound)
    check_segments(segment_ids, num_segments, q.shape[:2])
    check_initial_state(initial_state, num_segments, v.shape, q.shape[3])
    scale = check_scale(scale, q.shape[3])
    name = resolve(implementation, q, k, v, g, beta, initial_state, lower_bound)

    initial_state = _start(initial_state, num_segments, q, k, v, g, beta)
    documents = None
    if segment_ids is not None:
        q, k, v, g, beta = drop_padding(segment_ids, q, k, v, g, beta)
        documents = document_ids(segment_ids)
    operands = (q, k, v, g, beta, initial_state)
    q, k, v, g, beta, initial_state = (match_varying(x, *operands) for x in operands)
    if name == "reference":
        q, k, v_, g, beta = (x.astype(initial_state.dtype) for x in (q, k, v, g, beta))
        o, final = kda_reference(q, k, v_, g, beta, scale=scale, initial_state=initial_state, documents=documents)
    else:

        def chunked(q, k, v, g, beta, initial_state, documents):
            options: Any = dict(scale=scale, lower_bound=lower_bound, initial_state=initial_state, documents=documents)
            o, final = kda_chunked(q, k, v, g, beta, **options)
            return o.astype(v.dtype), final

        def kernels(q, k, v, g, beta, initial_state, documents):
            options: Any = dict(scale=scale, lower_bound=lower_bound, initial_state=initial_state, documents=documents)
            return kda_triton(q, k, v, g, beta, fused=False, **options)

        o, final = run(name, kernels, chunked, (q, k, v, g, beta, initial_state, documents))
    return o.astype(v.dtype), (final if output_final_state else None)


def gated_kda(
    q,
    k,
    v,
    raw_gate,
    beta_logits,
    A_log,
    dt_bias,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state=None,
    segment_ids=None,
    num_segments: int | None = None,
    output_final_state: bool = False,
    implementation: str | None = None,
):
    """All of a KDA layer between its projections: L2 norm of q and k, gate, sigmoid of beta, recurrence.

    q, k [B,T,H,K]; v [B,T,HV,V]; raw_gate [B,T,HV,K]; beta_logits [B,T,HV]; A_log [HV] or None; dt_bias [HV,K] or None.
    lower_bound in [-5.9, 0): g = lower_bound * sigmoid(exp(A_log) (raw_gate + dt_bias)), the Kimi K3 gate; None: the unbounded
    softplus gate of Kimi Linear (see kda_gate). The other arguments, the results and the errors are those of kda.
    """
    q, k, v, raw_gate, beta_logits, A_log, dt_bias = as_arrays(q, k, v, raw_gate, beta_logits, A_log, dt_bias)
    initial_state, segment_ids = as_arrays(initial_state, segment_ids)
    check_operands(q, k, v, raw_gate, beta_logits, names=("q", "k", "v", "raw_gate", "beta_logits"))
    check_gate(raw_gate, A_log, dt_bias, lower_bound)
    check_segments(segment_ids, num_segments, q.shape[:2])
    check_initial_state(initial_state, num_segments, v.shape, q.shape[3])
    scale = check_scale(scale, q.shape[3])
    name = resolve(implementation, q, k, v, raw_gate, beta_logits, initial_state, lower_bound, A_log, dt_bias)
    initial_state = _start(initial_state, num_segments, q, k, v, raw_gate, beta_logits)

    def unfused(q, k, v, raw_gate, beta_logits, A_log, dt_bias, initial_state, segment_ids):
        options: Any = dict(lower_bound=lower_bound, segment_ids=segment_ids, num_segments=num_segments)
        operands = gated_operands(q, k, v, raw_gate, beta_logits, A_log, dt_bias, **options)
        options |= dict(scale=scale, initial_state=initial_state, output_final_state=True)
        return kda(*operands, implementation="reference" if name == "reference" else "xla", **options)

    def kernels(q, k, v, raw_gate, beta_logits, A_log, dt_bias, initial_state, segment_ids):
        documents = None
        if segment_ids is not None:
            documents = document_ids(segment_ids)
            q, k, v, beta_logits = drop_padding(segment_ids, q, k, v, beta_logits)
            raw_gate = jnp.where((segment_ids > 0)[..., None, None], raw_gate, jnp.asarray(CLOSED, raw_gate.dtype))
        options: Any = dict(scale=scale, lower_bound=lower_bound, initial_state=initial_state, documents=documents)
        return kda_triton(q, k, v, raw_gate, beta_logits, A_log, dt_bias, fused=True, **options)

    operands = (q, k, v, raw_gate, beta_logits, A_log, dt_bias, initial_state, segment_ids)
    o, final = run("xla" if name == "reference" else name, kernels, unfused, operands)
    return o, (final if output_final_state else None)


def _start(initial_state, num_segments, q, k, v, g, beta):
    """The initial state in the dtype of the state; zeros for None."""
    dtype = accumulation_dtype(q, k, v, g, beta, initial_state)
    if initial_state is not None:
        return initial_state.astype(dtype)
    rows = () if num_segments is None else (num_segments,)
    return jnp.zeros((q.shape[0], *rows, v.shape[2], q.shape[3], v.shape[3]), dtype)


def gated_operands(q, k, v, raw_gate, beta_logits, A_log, dt_bias, *, lower_bound, segment_ids, num_segments):
    """What gated_kda gives to the recurrence: (q, k of unit length, v, g, beta), checked, padding set to 0."""
    q, k, v, raw_gate, beta_logits, segment_ids = as_arrays(q, k, v, raw_gate, beta_logits, segment_ids)
    check_operands(q, k, v, raw_gate, beta_logits, names=("q", "k", "v", "raw_gate", "beta_logits"))
    check_segments(segment_ids, num_segments, q.shape[:2])
    if segment_ids is not None:  # before the norm and the gate: the gradient of NaN is NaN even under a zero cotangent
        q, k, v, raw_gate, beta_logits = drop_padding(segment_ids, q, k, v, raw_gate, beta_logits)
    g = kda_gate(raw_gate, A_log, dt_bias, lower_bound=lower_bound)
    beta = jax.nn.sigmoid(beta_logits.astype(accumulation_dtype(beta_logits)))
    return l2_normalize(q), l2_normalize(k), v, g, beta


def as_arrays(*arrays) -> Any:
    return tuple(None if x is None else jnp.asarray(x) for x in arrays)


def check_operands(q, k, v, g, beta, names=("q", "k", "v", "g", "beta")):
    require_rank(4, "[B,T,H,K]", **{names[0]: q, names[1]: k})
    require_rank(4, "[B,T,HV,V]", **{names[2]: v})
    require_rank(4, "[B,T,HV,K]", **{names[3]: g})
    require_rank(3, "[B,T,HV]", **{names[4]: beta})
    require_float(**dict(zip(names, (q, k, v, g, beta), strict=True)))
    if q.shape[1] == 0:
        raise ValueError(f"q has shape {q.shape}: T = 0. KDA needs at least one token; skip the call for an empty row.")
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"q has shape {q.shape} and v {v.shape}; every size must be at least 1.")
    (batch, tokens, heads, channels), value_heads = q.shape, v.shape[2]
    wanted = {
        names[1]: (k, q.shape),
        names[2]: (v, (batch, tokens, value_heads, v.shape[3])),
        names[3]: (g, (batch, tokens, value_heads, channels)),
        names[4]: (beta, (batch, tokens, value_heads)),
    }
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; with q {q.shape} and v {v.shape} it must be {shape}.")
    if value_heads % heads:
        raise ValueError(f"v has {value_heads} heads and q, k have {heads}; the value heads must be a multiple of the query/key heads.")


def check_segments(segment_ids, num_segments, shape):
    if num_segments is not None:
        if segment_ids is None:
            raise ValueError(f"num_segments={num_segments!r} without segment_ids; pass both, or neither.")
        if isinstance(num_segments, bool) or not isinstance(num_segments, (int, np.integer)) or num_segments < 1:
            raise ValueError(f"num_segments={num_segments!r}; it must be a Python integer of at least 1.")
    if segment_ids is None:
        return
    if segment_ids.shape != shape:
        raise ValueError(f"segment_ids has shape {segment_ids.shape}; it must be [B,T] = {shape}.")
    if not jnp.issubdtype(segment_ids.dtype, jnp.signedinteger):
        raise ValueError(f"segment_ids has dtype {segment_ids.dtype}; it must be int32 (0 = padding, documents 1, 2, ...).")
    if isinstance(segment_ids, Tracer) or not segment_ids.is_fully_addressable:
        return  # nothing to read on this host
    ids = np.asarray(segment_ids)
    check_segment_order(ids)
    if num_segments is not None and ids.max() > num_segments:
        raise ValueError(f"segment_ids holds {ids.max()} but num_segments={num_segments}; ids must be at most num_segments.")


def check_initial_state(initial_state, num_segments, v_shape, channels):
    if initial_state is None:
        return
    require_float(initial_state=initial_state)
    rows, layout = ((), "[B,HV,K,V]") if num_segments is None else ((num_segments,), "[B,N,HV,K,V]")
    shape = (v_shape[0], *rows, v_shape[2], channels, v_shape[3])
    if initial_state.shape != shape:
        raise ValueError(f"initial_state has shape {initial_state.shape}; here it must be {layout} = {shape}.")


def check_scale(scale, channels) -> float:
    if scale is None:
        return channels**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.floating, np.integer)):
        raise ValueError(f"scale={scale!r}; it must be a Python number, or None for K**-0.5. Multiply q by an array instead.")
    return float(scale)
