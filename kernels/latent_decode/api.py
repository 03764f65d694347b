"""The public function `latent_decode`, its checks, and which implementation runs.

Shapes: B rows, T new tokens, H heads, S capacity of the cache, C latent width, R width of the shared key.
"""

import jax.numpy as jnp

from ..common import require_float, require_rank
from ..kda.api import as_arrays, check_scale
from ..kda.choice import choose, run_differentiating_plain
from .reference import latent_decode_reference
from .xla import latent_decode_xla

MOST_NEW = 4  # tokens of a row that the kernel takes: beyond, its blocks of queries read the cache again and again
# C and R of the kernel, powers of two: at least a swizzled row of shared memory and a step of the tensor cores; at the most, two tiles of
# 64 entries and the queries take 188 of 227 KB of a processor.
WIDTHS = ((64, 512), (16, 64))


def latent_decode(q, latent, shared_key, lengths, *, valid=None, scale: float, block: int = 1024, implementation: str | None = None):
    """Softmax-weighted latents: multi-head latent attention whose queries are already mapped into the latent space.

    sum_s p[s] latent[b,s], p = softmax over s of scale * (q[..., :C] . latent[b,s] + q[..., C:] . shared_key[b,s]). Query t of row b
    stands at position lengths[b] - T + t and sees the entries at or before it. Kimi K3 report section 2.1.2.

    Args:
      q: [B,T,H,C+R], the latent's dimensions first; float32, bfloat16 or float64.
      latent, shared_key: [B,S,C], [B,S,R], the cache. Entries at or after lengths[b] are never used (they may be NaN).
      lengths: integers [B], entries of each row, the new tokens' own included. A query before position 0, and so every query of a
        row of length 0, gives 0.
      valid: bool [B,S] or None; False entries are never used.
      scale: of the scores, a Python number.
      block: entries a step of "xla", at most.
      implementation: "reference" (scores of all entries at once); "xla" (a loop over blocks, up to the longest row); "triton" (one read
        of the cache at the card's speed, each row up to its own length; NVIDIA Hopper, bfloat16, no `valid`, T at most 4, C and R
        powers of two, 64 to 512 and 16 to 64); None: "triton" when the call is lowered for cuda and the kernel takes it, else "xla". Over
        several GPUs call it inside jax.shard_map (rows and heads may be cut).

    Returns:
      [B,T,H,C] in the latent's dtype; statistics and sums are float32 (float64 when an input is). No reverse-mode gradient.

    Raises:
      ValueError: shapes, dtypes or values that do not fit.
      NotImplementedError: a kernel that cannot run, with the reason.
    """
    q, latent, shared_key, lengths, valid = as_arrays(q, latent, shared_key, lengths, valid)
    check_latent_decode(q, latent, shared_key, lengths, valid, block)
    if scale is None:
        raise ValueError("scale=None; the width of a head before its query was mapped is not known here: give N+R to the power -0.5.")
    scale = check_scale(scale, q.shape[3])
    lengths = lengths.astype(jnp.int32)
    refused = _refused(q, latent, shared_key, valid)
    name = choose("latent_decode", implementation, refused, loss="7 to 100 times slower", plain=("xla", "reference"))

    def plain(q, latent, shared_key, lengths, valid):
        if name == "reference":
            out = latent_decode_reference(q, latent, shared_key, lengths, valid, scale=scale)
        else:
            out = latent_decode_xla(q, latent, shared_key, lengths, valid, scale=scale, block=min(block, latent.shape[1]))
        return out.astype(latent.dtype)

    def kernels(q, latent, shared_key, lengths, valid):
        from .triton import latent_decode_triton  # Triton, at the first use

        return latent_decode_triton(q, latent, shared_key, lengths, scale=scale)

    return run_differentiating_plain(name, "latent_decode", kernels, plain, (q, latent, shared_key, lengths, valid))


def _refused(q, latent, shared_key, valid) -> str | None:
    """Why the kernel does not take these operands, or None."""
    for x in (q, latent, shared_key):
        if x.dtype != jnp.bfloat16:
            return f"its kernel takes bfloat16, here {x.dtype}"
    if valid is not None:
        return "its kernel takes no `valid`"
    if q.shape[1] > MOST_NEW:
        return f"its kernel takes at most {MOST_NEW} new tokens, here {q.shape[1]}"
    widths = latent.shape[2], shared_key.shape[2]
    if any(size & (size - 1) or not least <= size <= most for size, (least, most) in zip(widths, WIDTHS, strict=True)):
        (c_least, c_most), (r_least, r_most) = WIDTHS
        wanted = f"C from {c_least} to {c_most} and R from {r_least} to {r_most}"
        return f"its kernel takes powers of two, {wanted}, here {widths[0]} and {widths[1]}"
    return f"its kernel takes at most 65535 rows, here {q.shape[0]}" if q.shape[0] > 65535 else None


def check_latent_decode(q, latent, shared_key, lengths, valid, block) -> None:
    """Raise ValueError where shapes, dtypes or the block break the rules of latent_decode."""
    require_rank(4, "[B,T,H,C+R]", q=q)
    require_rank(3, "[B,S,C], [B,S,R]", latent=latent, shared_key=shared_key)
    require_float(q=q, latent=latent, shared_key=shared_key)
    shapes = f"q {q.shape}, latent {latent.shape}, shared_key {shared_key.shape}"
    if 0 in q.shape or 0 in latent.shape or 0 in shared_key.shape:
        raise ValueError(f"{shapes}: no axis may be empty.")
    if q.shape[0] != latent.shape[0] or latent.shape[:2] != shared_key.shape[:2]:
        raise ValueError(f"{shapes}: rows, or entries of the two parts of the cache, do not agree.")
    if q.shape[3] != latent.shape[2] + shared_key.shape[2]:
        raise ValueError(f"{shapes}: q's last axis must be C+R = {latent.shape[2]}+{shared_key.shape[2]}.")
    if lengths.shape != q.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths is {lengths.dtype}{list(lengths.shape)}; it must be integers [B] = [{q.shape[0]}].")
    if valid is not None and (valid.shape != latent.shape[:2] or valid.dtype != jnp.bool_):
        raise ValueError(f"valid is {valid.dtype}{list(valid.shape)}; it must be bool [B,S] = {list(latent.shape[:2])}.")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block={block!r}; it must be a positive integer, such as 1024.")
