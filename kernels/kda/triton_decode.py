"""One token of KDA for every row and value head, in one pass over the states (plain Triton, NVIDIA GPUs).

Import it only where Triton is installed. Shapes: B rows, H query/key heads, HV value heads (a multiple of H), K, V channels of a
key and a value head, N slots of a pool of states.

Bytes decide: a step reads and writes 2*K*V*4 bytes a head, 805 MB or 0.187 ms at B=64, HV=96, K=V=128 and 4.3 TB/s. XLA's
compiled step reads the state once more for the output (1.51 times the bytes) and its chunked path moves 5.3 times the bytes.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ..common import require_rank
from .gate import L2_EPS, check_lower_bound
from .triton_launch import call
from .triton_rows import over_rows, sigmoid


@triton.jit
def decode_kernel(
    state,  # [B,HV,K,V] or [N,HV,K,V] float32 or bfloat16, changed in place
    q,  # [B,H,K]
    k,  # [B,H,K]
    v,  # [B,HV,V]
    gate,  # [B,HV,K] raw gate, or g
    write,  # [B,HV] logit of beta, or beta
    A_log,  # [HV] or None
    dt_bias,  # [HV,K] or None
    slots,  # [B] int32, or None
    out,  # [B,HV,V]
    N,
    HV: tl.constexpr,
    GROUP: tl.constexpr,  # HV // H
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,  # power of two >= K
    BV: tl.constexpr,  # columns of one program: the columns of a state do not mix
    GATED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BOUND: tl.constexpr,  # lower bound, or 0.0 for the softplus gate
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
):
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = row
    active = row >= 0
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int32)
        active = (slot >= 0) & (slot < N)  # a slot that is not there is skipped, never read or written
        slot = tl.where(active, slot, 0)
    channels = tl.arange(0, BK)
    columns = block * BV + tl.arange(0, BV)
    in_k = (channels < K) & active
    in_v = (columns < V) & active

    # The state first: everything else hides behind its latency. int64: N*HV*K*V passes 2^31 at 1366 slots of 96 heads.
    tile = state + (slot.to(tl.int64) * HV + head) * (K * V) + channels[:, None] * V + columns[None, :]
    in_tile = in_k[:, None] & in_v[None, :]
    s = tl.load(tile, mask=in_tile, other=0.0).to(tl.float32)

    value_row = row.to(tl.int64) * HV + head
    key_row = row.to(tl.int64) * (HV // GROUP) + head // GROUP
    q_t = tl.load(q + key_row * K + channels, mask=in_k, other=0.0).to(tl.float32)
    k_t = tl.load(k + key_row * K + channels, mask=in_k, other=0.0).to(tl.float32)
    v_t = tl.load(v + value_row * V + columns, mask=in_v, other=0.0).to(tl.float32)
    g = tl.load(gate + value_row * K + channels, mask=in_k, other=0.0).to(tl.float32)
    beta = tl.load(write + value_row, mask=active, other=0.0).to(tl.float32)

    if GATED:
        if dt_bias is not None:
            g += tl.load(dt_bias + head * K + channels, mask=in_k, other=0.0).to(tl.float32)
        rate = 1.0
        if A_log is not None:
            rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        if BOUND < 0.0:
            g = BOUND * sigmoid(rate * g)
        else:
            # softplus without overflow; log(1 + e) is off by 6e-8 at most, which e^g does not show
            g = -rate * (tl.maximum(g, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(g))))
        beta = sigmoid(beta)

    # All sums over K read the decayed state, so none waits for another: o = scale (S^T q + (k.q) u), u = beta (v - S^T k).
    # The norms are single factors and are taken after the sums.
    s = s * tl.exp(g)[:, None]
    s_k = tl.sum(s * k_t[:, None], axis=0)
    s_q = tl.sum(s * q_t[:, None], axis=0)
    k_q = tl.sum(k_t * q_t, axis=0)
    if NORMALIZE:
        k_norm = tl.rsqrt(tl.sum(k_t * k_t, axis=0) + EPS)
        q_norm = tl.rsqrt(tl.sum(q_t * q_t, axis=0) + EPS)
        k_t = k_t * k_norm
        s_k = s_k * k_norm
        s_q = s_q * q_norm
        k_q = k_q * (k_norm * q_norm)
    u = beta * (v_t - s_k)
    tl.store(tile, (s + k_t[:, None] * u[None, :]).to(state.dtype.element_ty), mask=in_tile)
    o = SCALE * (s_q + k_q * u)
    tl.store(out + value_row * V + columns, tl.where(active, o, 0.0).to(out.dtype.element_ty), mask=columns < V)


def decode_config(K: int, V: int) -> dict[str, int]:
    """Sizes of one program. 32 columns keep 128-byte lines whole and give 4 programs a head, 128 for one row of 32 heads."""
    block = triton.next_power_of_2(K)
    return {"BK": block, "BV": 32 if V > 16 else 16, "warps": 4 if block <= 128 else 8}


def kda_decode_triton(
    q,
    k,
    v,
    raw_gate,
    beta_logits,
    A_log,
    dt_bias,
    state,
    *,
    slots=None,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    gated: bool = True,
    normalize: bool = True,
):
    """One token: S <- Diag(e^g) S; S <- S + beta k (v - S^T k)^T; o = scale S^T q. Not differentiable.

    q, k [B,H,K]; v [B,HV,V]; raw_gate [B,HV,K]; beta_logits [B,HV], float32 or bfloat16; A_log [HV] or None; dt_bias [HV,K] or
    None. Value head j reads query/key head j // (HV // H). K, V multiples of 16 up to 256.
    state: float32 [B,HV,K,V], or bfloat16, computed in float32 all the same and rounded once; or, with slots [B] integers, a pool
    [N,HV,K,V]: row b reads and writes slot slots[b], two rows must not name the same slot, and a row whose slot is outside 0..N-1
    (such as -1) is skipped: output 0, no state touched.
    gated=False: raw_gate is g and beta_logits is beta, as in `kda`. normalize=False: q and k are used as they are.
    lower_bound None: the softplus gate. scale None: K**-0.5.

    Returns (o [B,HV,V] in v.dtype, the new state). The state is updated in place where its buffer may be reused: donate it to the
    jit around the call (`donate_argnums`) or carry it through a loop inside one jit; else XLA copies it first. Under vmap every
    operand but A_log and dt_bias folds into the rows (at most 65535 of them).
    """
    check_decode(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, slots)
    check_lower_bound(lower_bound)
    K, HV, V = q.shape[2], *v.shape[1:]
    config = decode_config(K, V)
    warps = config.pop("warps")
    options = {
        "HV": HV,
        "GROUP": HV // q.shape[1],
        "K": K,
        "V": V,
        "GATED": gated,
        "NORMALIZE": normalize,
        "BOUND": 0.0 if lower_bound is None else float(lower_bound),
        "SCALE": float(K**-0.5 if scale is None else scale),
        "EPS": L2_EPS,
        **config,
    }

    def launch(rows, shared):
        """Every operand with an axis in front, which vmap folds into; pools then stand one behind another."""
        *rows, slots, state = rows
        if slots is not None:
            pools, pool = state.shape[:2]
            first = pool * jnp.arange(pools, dtype=jnp.int32)[:, None]
            slots = jnp.where((slots >= 0) & (slots < pool), slots.astype(jnp.int32) + first, -1).reshape(-1)
        operands = [x.reshape(-1, *x.shape[2:]) for x in (state, *rows)]
        out = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operands[0], operands[3]))
        grid = (triton.cdiv(V, options["BV"]), HV, operands[3].shape[0])
        sizes = {"N": operands[0].shape[0], **options}
        how = {"out_type": out, "grid": grid, "num_warps": warps, "num_stages": 1, "aliases": {"state": 0}}
        new, o = call(decode_kernel, *operands, *shared, slots, **how, **sizes)
        return o.reshape(rows[2].shape), new.reshape(state.shape)

    rows = jax.tree.map(lambda x: x[None], (q, k, v, raw_gate, beta_logits, slots, state))
    o, state = over_rows(launch, rows, (A_log, dt_bias))
    return o[0], state[0]


def check_decode(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, slots) -> None:
    """Raise ValueError where shapes or dtypes break the rules of kda_decode_triton."""
    require_rank(3, "[B,H,K]", q=q)
    require_rank(3, "[B,HV,V]", v=v)
    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    for name, size in (("K", K), ("V", V)):
        if size % 16 or not 16 <= size <= 256:
            raise ValueError(f"{name} = {size}; this kernel takes multiples of 16 from 16 to 256.")
    if H == 0 or HV % H or HV == 0 or B == 0:
        raise ValueError(f"q is {q.shape} and v {v.shape}; no axis may be empty and value heads must be a multiple of query/key heads.")
    expected = {"k": (k, (B, H, K)), "v": (v, (B, HV, V)), "raw_gate": (raw_gate, (B, HV, K)), "beta_logits": (beta_logits, (B, HV))}
    expected |= {"A_log": (A_log, (HV,)), "dt_bias": (dt_bias, (HV, K)), "slots": (slots, (B,))}
    expected["state"] = (state, (state.shape[:1] if slots is not None else (B,)) + (HV, K, V))
    for name, (x, shape) in expected.items():
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}; with q {q.shape} and v {v.shape} it must be {shape}.")
        if x is not None and name != "slots" and x.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"{name} has dtype {x.dtype}; this kernel takes float32 and bfloat16.")
    if slots is not None and not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots has dtype {slots.dtype}; it must be integers.")
