"""One token of KDA for every row: the public function `kda_decode`, its checks, and its form in plain XLA.

Shapes: B rows, H query/key heads, HV value heads (a multiple of H), K key channels, V value channels, N slots of a pool of states.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..common import accumulation_dtype, require_float, require_rank
from .api import as_arrays, check_scale
from .choice import choose, run_differentiating_plain
from .gate import check_lower_bound, kda_gate, l2_normalize

MOST_ROWS = 65535  # of a launch: the third axis of a grid


def kda_decode(
    q,
    k,
    v,
    raw_gate,
    beta_logits,
    A_log,
    dt_bias,
    state,
    *,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    slots=None,
    implementation: str | None = None,
):
    """One token of gated_kda: L2 norm of q and k, gate, sigmoid of beta, S <- Diag(e^g) S; S <- S + beta k (v - S^T k)^T; o = scale S^T q.

    q, k [B,H,K]; v [B,HV,V]; raw_gate [B,HV,K]; beta_logits [B,HV]; float32, bfloat16 or float64. A_log [HV] or None; dt_bias [HV,K]
    or None; lower_bound and scale as in gated_kda.
    state: float32, float64 or bfloat16 [B,HV,K,V], row b's own; or, with slots, a pool of states [N,HV,K,V]. bfloat16 is storage
    alone, half the bytes: a step widens it, computes in float32 and rounds the new state once. The error does not grow with the
    tokens, since each overwrites a part of the state: 0.5 percent of the output at a decay of 0.98 a token and K = V = 16, 2 percent
    at 0.9994 and K = V = 128, the same in every quarter of 10,000 steps (relative L2, against float64).
    slots: integers [B]; row b reads and writes state[slots[b]]. A row whose slot is not in 0..N-1 (such as -1) is skipped: its output
    is 0, its inputs may be NaN, it touches no state. Two rows must not name one slot (traced slots cannot be read: then the results
    of those rows are undefined).
    implementation: "xla"; "triton" (one kernel, one read and one write of the states; NVIDIA Hopper, float32 and bfloat16, K and V
    multiples of 16 up to 256); None: "triton" when the call is lowered for cuda and the kernel takes it, else "xla". Over several
    GPUs call it inside jax.shard_map (rows and heads may be cut).

    Returns (o [B,HV,V] in v.dtype, the new state, shaped and typed as `state`). Donate the state to the jit around the call, or carry
    it through a loop inside one: else it is copied first. Differentiable in every float input, except by implementation="triton".
    Raises ValueError for bad shapes, dtypes or values and NotImplementedError, with the reason, for a kernel that cannot run.
    """
    q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, slots = as_arrays(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, slots)
    check_decode(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, slots)
    check_lower_bound(lower_bound)
    scale = check_scale(scale, q.shape[2])
    operands = (q, k, v, raw_gate, beta_logits, A_log, dt_bias, state)
    name = choose("kda_decode", implementation, _refused(*operands), loss="two times slower")
    if slots is not None:
        wide = slots if slots.dtype.itemsize >= 4 else slots.astype(jnp.int32)  # N may be more than int8 holds
        slots = jnp.where((wide >= 0) & (wide < state.shape[0]), wide.astype(jnp.int32), -1)

    def plain(*operands):
        return decode_xla(*operands, lower_bound=lower_bound, scale=scale)

    def kernels(*operands):
        from .triton_decode import kda_decode_triton  # Triton, at the first use

        *operands, slots = operands
        return kda_decode_triton(*operands, slots=slots, lower_bound=lower_bound, scale=scale)

    return run_differentiating_plain(name, "kda_decode", kernels, plain, (*operands, slots))


def decode_xla(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, slots, *, lower_bound, scale):
    """The step in plain XLA, in float32, or float64 when an operand is. slots: int32 in -1..N-1, -1 is skipped; or None."""
    dtype = accumulation_dtype(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state)
    pool, out_dtype = state, v.dtype
    if slots is not None:
        active = slots >= 0
        keep = lambda x: jnp.where(active.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)  # before anything is computed: NaN stays out
        q, k, v, raw_gate, beta_logits = map(keep, (q, k, v, raw_gate, beta_logits))
        state = keep(pool[jnp.maximum(slots, 0)])
    g = kda_gate(raw_gate[:, None], A_log, dt_bias, lower_bound=lower_bound)[:, 0].astype(dtype)
    beta = jax.nn.sigmoid(beta_logits.astype(dtype))[..., None]
    q, k = (jnp.repeat(l2_normalize(x.astype(dtype)), v.shape[1] // q.shape[1], axis=1) for x in (q, k))
    # Both sums read the decayed state: o = scale (S^T q + (k.q) u) spares a third pass over the states.
    state = jnp.exp(g)[..., None] * state.astype(dtype)
    u = beta * (v.astype(dtype) - jnp.sum(state * k[..., None], axis=-2))
    o = scale * (jnp.sum(state * q[..., None], axis=-2) + jnp.sum(k * q, axis=-1, keepdims=True) * u)
    state = (state + k[..., None] * u[..., None, :]).astype(pool.dtype)
    if slots is not None:
        past_the_end = pool.shape[0] + jnp.arange(slots.shape[0], dtype=jnp.int32)  # all different, and dropped
        place = jnp.where(active, slots, past_the_end)
        state = pool.at[place].set(state, mode="drop", unique_indices=True)
    return o.astype(out_dtype), state


def _refused(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state) -> str | None:
    """Why the kernel does not take these operands, or None."""
    for x in (q, k, v, raw_gate, beta_logits, A_log, dt_bias, state):
        if x is not None and x.dtype == jnp.float64:
            return "its kernel takes float32 and bfloat16, here float64"
    K, V = q.shape[2], v.shape[2]
    if any(size % 16 or size > 256 for size in (K, V)):
        return f"its kernel takes multiples of 16 up to 256 channels, here K = {K}, V = {V}"
    return f"its kernel takes at most {MOST_ROWS} rows, here {q.shape[0]}" if q.shape[0] > MOST_ROWS else None


def check_decode(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, slots) -> None:
    """Raise ValueError where shapes or dtypes break the rules of kda_decode, or slots that can be read name one slot twice."""
    require_rank(3, "[B,H,K]", q=q)
    require_rank(3, "[B,HV,V]", v=v)
    floats = dict(q=q, k=k, v=v, raw_gate=raw_gate, beta_logits=beta_logits, A_log=A_log, dt_bias=dt_bias)
    require_float(**floats, state=state)
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"q has shape {q.shape} and v {v.shape}; every size must be at least 1.")
    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    if HV % H:
        raise ValueError(f"v has {HV} heads and q, k have {H}; the value heads must be a multiple of the query/key heads.")
    shapes = dict(k=(B, H, K), v=(B, HV, V), raw_gate=(B, HV, K), beta_logits=(B, HV), A_log=(HV,), dt_bias=(HV, K))
    for name, shape in shapes.items():
        x = floats[name]
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; with q {q.shape} and v {v.shape} it must be {shape}.")
    if slots is None:
        if state.shape != (B, HV, K, V):
            raise ValueError(f"state has shape {state.shape}; without slots it must be [B,HV,K,V] = {(B, HV, K, V)}.")
        return
    if state.shape[1:] != (HV, K, V) or state.shape[0] == 0:
        raise ValueError(f"state has shape {state.shape}; with slots it must be [N,HV,K,V] with N >= 1 and {(HV, K, V)} behind it.")
    if slots.shape != (B,) or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots is {slots.dtype}{list(slots.shape)}; it must be integers [B] = [{B}].")
    if isinstance(slots, Tracer) or not slots.is_fully_addressable:
        return  # nothing to read on this host
    named = np.asarray(slots)
    named = named[(named >= 0) & (named < state.shape[0])]
    numbers, counts = np.unique(named, return_counts=True)
    if np.any(counts > 1):
        raise ValueError(f"slots names slot {numbers[np.argmax(counts)]} {counts.max()} times; every row needs a slot of its own.")
