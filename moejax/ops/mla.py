"""Gated multi-head latent attention (MLA), expanded for training and absorbed for decoding; no positions by default.

Kimi K3 report section 2.1.2, eq. 7. Keys and values are linear maps of one small latent a token; a second small key is
shared by all heads. A cache holds the normed latent and the shared key: C + R values a token.

Shapes: B batch, T new tokens, S cached tokens, D model width, Q query latent, C key-value latent, H heads,
N key width a head from the latent, R width of the shared key, V value width a head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.kernels.common import accumulation_dtype, require_float, require_rank
from moejax.kernels.latent_decode import latent_decode
from moejax.ops.attention import attention, check_segment_ids
from moejax.ops.norms import rms_norm
from moejax.ops.rotary import rotary

LATENT_EPS = 1e-6  # of the two latent norms; every other norm of the model has 1e-5
CACHE_BLOCK = 1024  # cache entries a decoding step reads at a time: 1 MB of 512 + 64 bfloat16 values


class MLAWeights(NamedTuple):
    """Weights of one layer. They are cast to the activations' dtype before use."""

    q_down: Any  # [D,Q], or None: queries straight from x
    q_norm: Any  # [Q], or None with q_down
    q_up: Any  # [Q,H,N+R], or [D,H,N+R] without q_down
    kv_down: Any  # [D,C+R]: latent, then shared key
    kv_norm: Any  # [C]
    k_up: Any  # [C,H,N]
    v_up: Any  # [C,H,V]
    gate: Any  # [D,H,V], or None: no output gate
    out: Any  # [H,V,D]


def gated_mla(x, weights, *, segment_ids=None, scale=None, positions=None, rotary_base=10000.0, rotary_scale=1.0):
    """The whole layer for training and prefill: projections, causal latent attention, output gate, output projection.

    Args:
      x: [B,T,D], the normed layer input.
      weights: MLAWeights.
      segment_ids: [B,T] int32, 0 = padding, documents 1, 2, ...; see attention. Output at padding is 0.
      scale: of the scores; None is (N+R)**-0.5.
      positions: None (the published model), or [B,T] positions that rotate the R shared-key dimensions.
      rotary_base, rotary_scale: see rotary; used with positions only.

    Returns:
      [B,T,D] in x's dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    check_segment_ids(segment_ids, x.shape[:2])
    if segment_ids is not None:
        x = jnp.where((segment_ids > 0)[:, :, None], x, 0)
    q, latent, shared_key = mla_project(x, weights, positions=positions, rotary_base=rotary_base, rotary_scale=rotary_scale)
    k_up, v_up = weights.k_up.astype(x.dtype), weights.v_up.astype(x.dtype)
    heads = latent_attention(q, latent, shared_key, k_up, v_up, scale=scale, segment_ids=segment_ids)
    return mla_output(heads, x, weights)


def mla_project(x, weights, *, positions=None, rotary_base=10000.0, rotary_scale=1.0):
    """x [B,T,D] -> (q [B,T,H,N+R], normed latent [B,T,C], shared key [B,T,R]); the last two are what a cache holds."""
    _check_layer(x, weights)

    def cast(w):
        return w.astype(x.dtype)

    hidden = x
    if weights.q_down is not None:
        hidden = rms_norm(jnp.einsum("btd,dq->btq", x, cast(weights.q_down)), weights.q_norm, eps=LATENT_EPS)
    q = jnp.einsum("btq,qhn->bthn", hidden, cast(weights.q_up))
    width = weights.kv_norm.shape[0]
    joint = jnp.einsum("btd,dc->btc", x, cast(weights.kv_down))
    latent = rms_norm(joint[..., :width], weights.kv_norm, eps=LATENT_EPS)
    shared_key = joint[..., width:]
    if positions is not None:

        def turn(y):
            return rotary(y, positions, base=rotary_base, scale=rotary_scale)

        plain = weights.k_up.shape[2]
        q = jnp.concatenate([q[..., :plain], turn(q[..., plain:])], -1)
        shared_key = turn(shared_key[:, :, None])[:, :, 0]
    return q, latent, shared_key


def mla_output(heads, x, weights):
    """Attention output [B,T,H,V] and layer input [B,T,D] -> [B,T,D]: sigmoid gate on every channel, output projection.

    The gate and its product are in the activations' dtype, as in the published model.
    """
    if weights.gate is not None:
        logits = jnp.einsum("btd,dhv->bthv", x, weights.gate.astype(x.dtype))
        heads = heads * jax.nn.sigmoid(logits)
    return jnp.einsum("bthv,hvd->btd", heads, weights.out.astype(x.dtype))


def latent_attention(q, latent, shared_key, k_up, v_up, *, scale=None, segment_ids=None, block=None):
    """Causal attention in expanded form: keys and values of every head are written out, then attended to in blocks.

    Args:
      q: [B,T,H,N+R], the N dimensions of the latent's key first.
      latent: [B,T,C], after its norm.
      shared_key: [B,T,R], one key for all heads.
      k_up, v_up: [C,H,N], [C,H,V].
      scale: None is (N+R)**-0.5.
      segment_ids, block: see attention. Padding is never read.

    Returns:
      [B,T,H,V] in the latent's dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    check_latent(q, latent, shared_key, k_up, v_up)
    if q.shape[1] != latent.shape[1]:
        raise ValueError(f"{q.shape[1]} queries and {latent.shape[1]} latents: the expanded form needs one latent a query.")
    check_segment_ids(segment_ids, q.shape[:2])
    if segment_ids is not None:  # before the projections, or a NaN would reach the gradient of k_up and v_up
        real = (segment_ids > 0)[:, :, None]
        latent, shared_key = jnp.where(real, latent, 0), jnp.where(real, shared_key, 0)
    k = jnp.einsum("btc,chn->bthn", latent, k_up)
    shared = jnp.broadcast_to(shared_key[:, :, None], (*k.shape[:3], shared_key.shape[-1]))
    v = jnp.einsum("btc,chv->bthv", latent, v_up)
    return attention(q, jnp.concatenate([k, shared], -1), v, scale=scale, segment_ids=segment_ids, block=block)


def absorbed_latent_attention(
    q, latent, shared_key, k_up, v_up, *, lengths, valid=None, scale=None, block=CACHE_BLOCK, implementation=None
):
    """Decode form: queries are mapped into the latent space, so the cache is read as it is; see kernels.latent_decode.

    Query t of row b stands at position lengths[b] - T + t and sees the entries at or before it; the new tokens' own
    entries are already in the cache. It has no reverse-mode gradient (use latent_attention for training).

    Args:
      q: [B,T,H,N+R], one or a few new tokens.
      latent, shared_key: [B,S,C], [B,S,R], the cache. Entries at or after lengths[b] are never read (they may be NaN).
      k_up, v_up: [C,H,N], [C,H,V].
      lengths: [B] int32, tokens in the cache, the new ones included. A query before position 0 gives 0.
      valid: [B,S] bool or None; False entries (padding inside the cache) are never read.
      scale: None is (N+R)**-0.5.
      block: most cache entries a step of "xla"; None is 1024.
      implementation: "reference", "xla", "triton" (NVIDIA Hopper, bfloat16, no valid, T at most 4) or None, which chooses; see
        latent_decode.

    Returns:
      [B,T,H,V] in the latent's dtype; statistics and sums are float32 (float64 for float64 inputs).

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: an implementation that cannot run, with the reason.
    """
    check_latent(q, latent, shared_key, k_up, v_up)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = accumulation_dtype(q, latent)
    q_latent = jnp.einsum("bthn,chn->bthc", q[..., : k_up.shape[2]], k_up, preferred_element_type=dtype)
    q_all = jnp.concatenate([q_latent.astype(latent.dtype), q[..., k_up.shape[2] :]], -1)
    options = {"valid": valid, "scale": scale, "block": CACHE_BLOCK if block is None else block, "implementation": implementation}
    summed = latent_decode(q_all, latent, shared_key, lengths, **options)
    return jnp.einsum("bthc,chv->bthv", summed, v_up)


def check_latent(q, latent, shared_key, k_up, v_up):
    require_rank(4, "[B,T,H,N+R]", q=q)
    require_rank(3, "[B,S,C], [B,S,R], [C,H,N], [C,H,V]", latent=latent, shared_key=shared_key, k_up=k_up, v_up=v_up)
    require_float(q=q, latent=latent, shared_key=shared_key, k_up=k_up, v_up=v_up)
    shapes = f"q {q.shape}, latent {latent.shape}, shared_key {shared_key.shape}, k_up {k_up.shape}, v_up {v_up.shape}"
    if 0 in q.shape or 0 in latent.shape or 0 in v_up.shape:
        raise ValueError(f"{shapes}: no axis may be empty.")
    if q.shape[0] != latent.shape[0] or latent.shape[:2] != shared_key.shape[:2]:
        raise ValueError(f"{shapes}: batches, or latents and shared keys, do not agree.")
    heads = {q.shape[2], k_up.shape[1], v_up.shape[1]}
    if len(heads) > 1 or {k_up.shape[0], v_up.shape[0]} != {latent.shape[2]}:
        raise ValueError(f"{shapes}: k_up and v_up must be [C,H,N] and [C,H,V] with q's heads and the latent's width.")
    if k_up.shape[2] + shared_key.shape[2] != q.shape[3]:
        raise ValueError(f"{shapes}: q's last axis must be N+R = {k_up.shape[2]}+{shared_key.shape[2]}.")


def _check_layer(x, weights):
    require_rank(3, "[B,T,D]", x=x)
    require_float(x=x)
    if (weights.q_down is None) != (weights.q_norm is None):
        raise ValueError("q_down and q_norm belong together: give both (query latent) or neither.")
    D, H, V = x.shape[2], weights.v_up.shape[1], weights.v_up.shape[2]
    C, R = weights.kv_norm.shape[0], weights.kv_down.shape[1] - weights.kv_norm.shape[0]
    query_in = D if weights.q_down is None else weights.q_norm.shape[0]
    expected = {
        "q_down": (D, query_in),
        "q_up": (query_in, H, weights.k_up.shape[2] + R),
        "kv_down": (D, C + R),
        "k_up": (C, H, weights.k_up.shape[2]),
        "v_up": (C, H, V),
        "gate": (D, H, V),
        "out": (H, V, D),
    }
    for name, shape in expected.items():
        weight = getattr(weights, name)
        if weight is not None and tuple(weight.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(weight.shape)}; with x {x.shape} and the other weights it must be {shape}.")
