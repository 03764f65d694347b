"""Prefill of a chunk of tokens over a cache of latents, in expanded form: keys and values are written out block by block.

Kimi K3 report section 2.1.2 (gated MLA); the cache is that of mla.py. A chunk of thousands of queries is bound by
arithmetic, where writing keys and values out pays: a pair of query and entry costs 2 (N+R+V) operations a head, against
2 (2C+R) in the absorbed form (640 against 2176 for Kimi K3), and an entry 2 C (N+V) a head once. The two meet at
T = C (N+V) / (2C - N - V) queries, 171 for Kimi K3; `absorbed_latent_attention` does less below.

Shapes: B batch, T new tokens, S cached tokens, C key-value latent, H heads, N key width a head from the latent, R width
of the shared key, V value width a head, W and X widths of keys and values in a fused kernel.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.common import accumulation_dtype, require_rank
from moejax.kernels.varying import match_varying
from moejax.ops.attention import check_block, from_blocks, online_step, split_rows, take_block, to_blocks
from moejax.ops.attention_gpu import AttentionChoice, AttentionFacts, attention_implementation, padded_width, widen
from moejax.ops.mla import CACHE_BLOCK, check_latent

QUERY_ROWS = 512  # queries a step of the blockwise form: with 1024 entries, 2 MB of float32 scores a head
EXPANDED_BYTES = 2**29  # keys and values of one block of past entries in the fused form: 65536 entries of 8 heads
UNEQUAL_WIDTHS = 91000  # cuDNN 9.10
MOST_FUSED_BLOCK, LEAST_FUSED_BLOCK = 65536, 1024


def cached_latent_attention(
    q, latent, shared_key, k_up, v_up, *, starts, counts, rows=None, scale=None, block=None, implementation=None
) -> jax.Array:
    """Attention of a chunk of new tokens, whose own entries are in the cache already, over the whole cache before them.

    Query t of row b stands at position starts[b] + t and sees the entries at or before it. Memory beside the operands is
    that of one block of entries, whatever S: the cache is never copied or padded, and the loop over blocks stops after
    the longest row. There is no reverse-mode gradient (use latent_attention for training).

    Args:
      q: [B,T,H,N+R], the N dimensions of the latent's key first. Queries t >= counts[b] are never read.
      latent, shared_key: [B,S,C], [B,S,R], the cache ([Z,S,C], [Z,S,R] with `rows`). Entries at or after
        starts[b] + counts[b] are never read (they may be NaN).
      k_up, v_up: [C,H,N], [C,H,V].
      starts: [B] int32, tokens in the cache before the chunk.
      counts: [B] int32 in 0..T, new tokens of each row; starts + counts <= S.
      rows: None, or [B] int32: row b of the chunk is row rows[b] of the cache, so that no row must be copied out of it.
      scale: of the scores; None is (N+R)**-0.5.
      block: most cache entries a step; None is 1024, or in the fused form what fills 512 MB with keys and values.
      implementation: "xla" (blockwise, runs everywhere), "cudnn" (bfloat16 on an NVIDIA card), or None to choose when it
        is lowered: see prefill_implementation.

    Returns:
      [B,T,H,V] in the latent's dtype, 0 for queries t >= counts[b]. Statistics and sums are float32 (float64 for float64
      inputs); "cudnn" rounds the output of each block to bfloat16 before it is weighted.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an unknown implementation.
      NotImplementedError: a named implementation that cannot run here, with the reason.
    """
    own_latent, own_key = (latent, shared_key) if rows is None else _of_rows(q.shape[0], latent, shared_key)
    check_latent(q, own_latent, own_key, k_up, v_up)
    _check_rows(q.shape[0], starts=starts, counts=counts, **({} if rows is None else {"rows": rows}))
    check_block(block)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    name = prefill_implementation("cuda", _facts(q, latent, shared_key, k_up, v_up), implementation=implementation).name
    blockwise = partial(blockwise_prefill, scale=scale, block=block)
    fused = partial(fused_prefill, scale=scale, block=block)
    operands = (q, latent, shared_key, k_up, v_up, starts, counts, rows)
    if name == "xla":
        return blockwise(*operands)
    if implementation is not None:
        return fused(*operands)
    return lax.platform_dependent(*operands, cuda=fused, default=blockwise)


def prefill_implementation(
    platform: str | None = None, facts: AttentionFacts | None = None, *, implementation: str | None = None
) -> AttentionChoice:
    """What `cached_latent_attention(implementation=...)` runs when it is lowered for `platform`, and why.

    The rules and errors are those of `attention_implementation` for a chunk of `facts.queries` tokens over itself; there
    is no "mosaic" here, since no log-sum-exp of it can be merged over blocks.
    """
    if implementation == "mosaic":
        raise ValueError("implementation='mosaic' has no form over a cache; known: xla, cudnn, or None to choose.")
    return attention_implementation(platform, facts, implementation=implementation)


def _facts(q, latent, shared_key, k_up, v_up) -> AttentionFacts:
    dtypes = {str(x.dtype) for x in (q, latent, shared_key, k_up, v_up)}
    dtype = dtypes.pop() if len(dtypes) == 1 else "mixed"
    return AttentionFacts(dtype, q.shape[3], v_up.shape[2], q.shape[1], q.shape[1], causal=True, packed=False)


def _of_rows(batch, latent, shared_key):
    """Shapes of `batch` rows of a cache whose own two parts agree."""
    require_rank(3, "[Z,S,C], [Z,S,R]", latent=latent, shared_key=shared_key)
    if latent.shape[:2] != shared_key.shape[:2]:
        raise ValueError(f"latent {latent.shape} and shared_key {shared_key.shape} must be [Z,S,C] and [Z,S,R].")
    return [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (latent, shared_key)]


def _check_rows(batch, **numbers):
    for name, x in numbers.items():
        if tuple(x.shape) != (batch,) or x.dtype != jnp.int32:
            raise ValueError(f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; it must be int32 of shape [{batch}].")


def blockwise_prefill(q, latent, shared_key, k_up, v_up, starts, counts, cache_rows=None, *, scale: float, block: int | None):
    """The contract of cached_latent_attention in plain XLA: blocks of entries outside, blocks of queries inside.

    Entries lead, so that each is expanded once; the running statistics of all queries are the loop's state.
    """
    T, H, V, S = q.shape[1], q.shape[2], v_up.shape[2], latent.shape[1]
    block = min(block or CACHE_BLOCK, S)
    queries, rows = split_rows(T, QUERY_ROWS)
    qs = to_blocks(q, queries, rows, (H, 1))  # [n,B,H,1,rows,N+R]
    t = jnp.arange(queries * rows, dtype=jnp.int32)
    at_query = jnp.where(t < counts[:, None], starts[:, None] + t, -1)  # [B,n*rows]; a query at -1 sees nothing
    real = jnp.moveaxis((at_query >= 0).reshape(-1, queries, rows), 1, 0)[:, :, None, None, :, None]
    qs = jnp.where(real, qs, 0)
    at_query = jnp.moveaxis(at_query.reshape(-1, queries, rows), 1, 0)
    stops = jnp.where(counts > 0, starts + counts, 0)
    latest = jnp.max(jnp.where(counts > 0, starts, 0))
    last = (jnp.max(counts) + rows - 1) // rows

    def key_block(index, carry):
        start = jnp.minimum(index * block, S - block)  # the last block is a full one: no copy of the cache to pad it
        at_key = start + jnp.arange(block, dtype=jnp.int32)
        exists = (at_key >= index * block) & (at_key < stops[:, None])
        entries = (lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in (latent, shared_key))
        values, shared = (jnp.where(exists[..., None], x if cache_rows is None else x[cache_rows], 0) for x in entries)
        k, v = _keys_and_values(values, shared, k_up, v_up)

        def query_block(i, carry):
            seen = exists[:, None, :] & (at_key <= take_block(at_query, i)[:, :, None])
            part = tuple(take_block(x, i) for x in carry)
            part = online_step(part, take_block(qs, i), k, v, seen[:, None, None], scale)
            return tuple(lax.dynamic_update_index_in_dim(x, y, i, 0) for x, y in zip(carry, part, strict=True))

        first = jnp.clip((index * block - latest) // rows, 0, last)  # earlier queries stand before every entry of the block
        return lax.fori_loop(first, last, query_block, carry)

    dtype = accumulation_dtype(q, latent)
    shape = qs.shape[:-1]
    arrays = jax.tree.leaves((q, latent, shared_key, k_up, v_up, starts, counts, cache_rows))
    empty = (jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros((*shape, V), dtype))
    carry = tuple(match_varying(x, *arrays) for x in empty)
    blocks = jnp.minimum((stops.max() + block - 1) // block, -(-S // block))
    _, total, acc = lax.fori_loop(jnp.zeros_like(blocks), blocks, key_block, carry)
    return from_blocks(acc / jnp.where(total == 0, 1, total)[..., None], T).astype(latent.dtype)


def _keys_and_values(latent, shared_key, k_up, v_up):
    """[B,n,C], [B,n,R] -> keys [B,H,n,N+R] and values [B,H,n,V] in the latent's dtype."""
    k = jnp.einsum("bsc,chn->bhsn", latent, k_up)
    shared = jnp.broadcast_to(shared_key[:, None], (*k.shape[:3], shared_key.shape[-1]))
    return jnp.concatenate([k, shared], -1), jnp.einsum("bsc,chv->bhsv", latent, v_up)


def fused_prefill(
    q, latent, shared_key, k_up, v_up, starts, counts, cache_rows=None, *, scale: float, block: int | None, implementation: Any = "cudnn"
):
    """The same by a fused kernel: the chunk over itself, causal, then over blocks of its past; parts merge in float32.

    implementation: of the parts; "xla" is the same algebra without the kernel.
    """
    T, V, S = q.shape[1], v_up.shape[2], latent.shape[1]
    width, value_width = fused_widths(q.shape[3], V, implementation)
    block = min(block or fused_block(q.shape[0] * q.shape[2], width + value_width, q.dtype.itemsize), S)
    real = (jnp.arange(T, dtype=jnp.int32) < counts[:, None])[:, :, None]  # [B,T,1]
    q = widen(jnp.where(real[..., None], q, 0), width)
    key_map, value_map = _key_map(k_up, shared_key.shape[2], width), widen(v_up, value_width)
    part = partial(fused_part, scale=scale, implementation=implementation)
    dtype = accumulation_dtype(q, latent)

    def expanded(start, count, lengths):
        """Keys [B,count,H,W] and values of the entries from start[b] on, 0 from lengths[b] on."""
        n = jnp.arange(count, dtype=jnp.int32)
        at = jnp.minimum(start[:, None] + n, S - 1)[..., None]
        entries = (_entries(x, at, cache_rows) for x in (latent, shared_key))
        values, shared = (jnp.where((n < lengths[:, None])[..., None], x, 0) for x in entries)
        k = jnp.einsum("bsc,chw->bshw", jnp.concatenate([values, shared], -1), key_map)
        return k, jnp.einsum("bsc,chv->bshv", values, value_map)

    def merge(carry, new, new_lse, used):
        out, lse = carry  # what a kernel leaves where nothing is used may be NaN
        new, new_lse = jnp.where(used[..., None], new[..., :V].astype(dtype), 0), jnp.where(used, new_lse.astype(dtype), -jnp.inf)
        both = jnp.logaddexp(lse, new_lse)
        return out * jnp.exp(lse - both)[..., None] + new * jnp.exp(new_lse - both)[..., None], both

    def step(index, carry, *, full):
        lengths = jnp.clip(past - index * block, 0, block)
        k, v = expanded(jnp.full_like(starts, index * block), block, lengths)
        new = part(q, k, v, mask="none") if full else part(q, k, v, mask="lengths", lengths=(counts, lengths))
        return merge(carry, *new, real & (lengths > 0)[:, None, None])

    own, own_lse = part(q, *expanded(starts, T, counts), mask="causal")
    carry = jnp.where(real[..., None], own[..., :V].astype(dtype), 0), jnp.where(real, own_lse.astype(dtype), 0)
    past = jnp.where(counts > 0, starts, 0)
    blocks = jnp.minimum((past.max() + block - 1) // block, -(-S // block))
    shortest = jnp.min(jnp.where(counts > 0, starts, S))
    full = jnp.minimum(shortest // block, blocks)  # blocks that every row's past fills: no mask, 15% faster on an H200
    carry = lax.fori_loop(jnp.zeros_like(full), full, partial(step, full=True), carry)
    out, _ = lax.fori_loop(full, blocks, partial(step, full=False), carry)
    return out.astype(latent.dtype)


def _entries(x, at, rows):
    """Entries at [B,n,1] of a cache [B,S,D], or of its rows [B]."""
    if rows is None:
        return jnp.take_along_axis(x, at, axis=1, mode="clip")
    return x.at[rows[:, None], at[..., 0]].get(mode="clip")


def fused_block(rows: int, widths: int, itemsize: int) -> int:
    """Past entries a step: the power of two whose keys and values of `rows` = B * H fill EXPANDED_BYTES, within limits."""
    entries = EXPANDED_BYTES // (rows * widths * itemsize)
    return min(max(1 << max(entries.bit_length() - 1, 0), LEAST_FUSED_BLOCK), MOST_FUSED_BLOCK)


def fused_widths(key_width: int, value_width: int, implementation: str) -> tuple[int, int]:
    """Widths of keys and values in the kernel: multiples of 8, and equal ones where it takes no others.

    JAX passes values narrower than keys to cuDNN from 9.10 on: 192/128 takes 4.5 ms where 192/192 takes 5.2.
    """
    width = padded_width(key_width, value_width)
    if implementation != "cudnn":
        return width, width
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    return width, padded_width(value_width, value_width) if check_cudnn_version() >= UNEQUAL_WIDTHS else width


def _key_map(k_up, shared, width):
    """Map [C+R,H,W] from (latent, shared key) to keys, zero columns included.

    The shared key goes through an identity, which is exact: one product writes whole keys. Joined afterwards, they would
    be read and written once more.
    """
    _, H, N = k_up.shape
    below = jnp.zeros((shared, H, width), k_up.dtype)
    eye = jnp.broadcast_to(jnp.eye(shared, dtype=k_up.dtype)[:, None], (shared, H, shared))
    return jnp.concatenate([widen(k_up, width), below.at[:, :, N : N + shared].set(eye)])


def fused_part(q, k, v, *, scale: float, mask: str, lengths=(None, None), implementation: Any = "cudnn"):
    """Softmax attention of one part and its log-sum-exp: q [B,T,H,W], k [B,n,H,W], v [B,n,H,X] -> [B,T,H,X], [B,T,H].

    mask: "causal" (n = T), "none", or "lengths": (real queries [B], real keys [B]); what stands behind them is anything.
    """
    queries, keys = lengths
    if implementation != "cudnn":
        call = partial(jax.nn.dot_product_attention, query_seq_lengths=queries, key_value_seq_lengths=keys)
        return call(q, k, v, scale=scale, is_causal=mask == "causal", implementation=implementation, return_residual=True)
    # Private: jax.nn.dot_product_attention rounds the log-sum-exp to bfloat16, between 8 and 16 up to 3% of a part's weight.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    kind = {"causal": MaskType.CAUSAL, "none": MaskType.NO_MASK, "lengths": MaskType.PADDING}[mask]
    out: Any = dot_product_attention(q, k, v, q_seqlen=queries, kv_seqlen=keys, scale=scale, mask_type=kind, return_residual=True)
    return out[0], jnp.moveaxis(out[1], 1, 2)
