"""Fused softmax attention of an NVIDIA card, and the choice between it and the blockwise form of attention.py.

Shapes: B batch, T queries, S keys, H query heads, J key and value heads (J divides H), K query and key width, V value
width, M runs of a packed row.

"cudnn" needs nothing but JAX's CUDA packages: `jax.nn.dot_product_attention`, whose value width must be the key width,
so values get zero columns (192 instead of 128 for Kimi K3) and the output loses them. "mosaic" is tokamax's kernel,
which takes 192/128 as it is; it runs only when it is named.

Three things differ from the blockwise form. Both kernels round the output to bfloat16 before the gradient uses it (the
blockwise form keeps float32). cuDNN sums the gradient of the queries in no fixed order, so two runs differ in the last
bits, unless XLA_FLAGS holds --xla_gpu_exclude_nondeterministic_ops=true. And packed rows go through a kernel only when
their layout allows it, which is known at run time: see `packed_attention`.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.kda.choice import checked_platform
from moejax.kernels.varying import match_varying

IMPLEMENTATIONS = ("xla", "cudnn", "mosaic")
MOST_WIDTH = 256  # of a head, in both kernels on Hopper
SHORT = 128  # queries: what the blockwise form does in one block without a loop
MOST_RUNS = 32  # of a packed row in cuDNN, which saves M log-sum-exps a query and head: 34 MB at M=32, T=8192, H=32
CUDNN_PACKED_BY_DEFAULT = False  # whether implementation=None sends packed rows to cuDNN; by name it always may


class AttentionChoice(NamedTuple):
    """Which implementation runs, and why."""

    name: str
    reason: str


class AttentionFacts(NamedTuple):
    """All that the choice depends on besides the platform: static properties of one call."""

    dtype: str = "bfloat16"  # of q, k and v; "mixed" where they differ
    key_width: int = 192
    value_width: int = 128
    queries: int = 8192
    keys: int = 8192
    causal: bool = True
    packed: bool = False


def attention_implementation(
    platform: str | None = None, facts: AttentionFacts | None = None, *, implementation: str | None = None
) -> AttentionChoice:
    """What `attention(implementation=...)` runs when a call with these `facts` is lowered for `platform`, and why.

    A process that has no CUDA device as its default backend cannot know the card, nor whether cuDNN exists: what it
    lowers for CUDA holds the blockwise form.

    Args:
      platform: "cpu", "cuda", "gpu", "rocm" or "tpu"; None is this process's default backend.
      facts: of the call; None is a Kimi K3 layer, 8192 tokens of one document.
      implementation: None (chosen), "xla" (blockwise, runs everywhere), "cudnn" or "mosaic" (tokamax).

    Raises:
      ValueError: an unknown platform or name.
      NotImplementedError: a named implementation that cannot run, with the reason.
    """
    platform = checked_platform(platform)
    facts = AttentionFacts() if facts is None else facts
    if implementation is None:
        return _chosen(platform, facts)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}; known: {', '.join(IMPLEMENTATIONS)}, or None to choose.")
    if implementation != "xla":
        missing = _not_cuda(platform) or _refusal(implementation, facts)
        if missing:
            raise NotImplementedError(
                f"implementation={implementation!r} of attention cannot run: {missing}. implementation='xla' (or None) runs everywhere."
            )
    return AttentionChoice(implementation, "it was named" + (_packed_note(implementation) if facts.packed else ""))


def _chosen(platform: str, facts: AttentionFacts) -> AttentionChoice:
    if facts.queries < SHORT:
        return AttentionChoice("xla", f"{facts.queries} queries are one block")
    refusal = _not_cuda(platform) or _refusal("cudnn", facts)
    if refusal:
        return AttentionChoice("xla", f"no cuDNN: {refusal}")
    if not facts.packed:
        return AttentionChoice("cudnn", "cuDNN takes this call")
    if CUDNN_PACKED_BY_DEFAULT:
        return AttentionChoice("cudnn", "cuDNN takes this call" + _packed_note("cudnn"))
    return AttentionChoice("xla", "packed rows go to a kernel only when it is named" + _packed_note("cudnn"))


def _packed_note(name: str) -> str:
    if name == "xla":
        return ""
    most = f" or more than {MOST_RUNS} documents and stretches of padding" if name == "cudnn" else ""
    return f"; {name} hands a batch with padding inside a document{most} to the blockwise form at run time"


def _not_cuda(platform: str) -> str | None:
    return None if platform in ("cuda", "gpu") else f"the platform is {platform}"


def _refusal(name: str, facts: AttentionFacts) -> str | None:
    """Why `name` cannot run here, or None."""
    f = facts
    if f.dtype != "bfloat16":
        return f"it takes bfloat16, q, k and v are {f.dtype}"
    if max(f.key_width, f.value_width) > MOST_WIDTH:
        return f"heads are {f.key_width} (keys) and {f.value_width} (values) wide, the most is {MOST_WIDTH}"
    if f.causal and f.queries != f.keys:
        return f"it aligns a causal mask with the first key, here {f.queries} queries end with {f.keys} keys"
    if f.packed and not f.causal:
        return "its packed rows are causal"
    if name == "mosaic" and importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed (pip install 'moejax[fast]', Python 3.12)"
    return missing_card() or (missing_cudnn(f) if name == "cudnn" else _missing_mosaic())


def missing_card() -> str | None:
    """Why this process cannot use a CUDA card, or None. JAX's own checks read the default backend too."""
    backend = jax.default_backend()
    if backend != "gpu":
        return f"this process's default backend is {backend}, so no CUDA card (nor its cuDNN) can be seen while tracing"
    runtime = jax.local_devices()[0].client.platform_version
    return None if "cuda" in runtime else f"this process's GPU runtime is {runtime!r}, not CUDA"


def missing_cudnn(facts: AttentionFacts) -> str | None:
    """What JAX says against a call of these widths (cuDNN not found, an old card), or None."""
    if not facts.causal and (facts.queries % 2 or facts.keys % 2):
        return f"cuDNN's gradient takes even lengths, not {facts.queries} and {facts.keys}"
    q, k = ((1, length, 1, padded_width(facts.key_width, facts.value_width)) for length in (facts.queries, facts.keys))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q, k, k)]
    try:
        jax.eval_shape(lambda *a: jax.nn.dot_product_attention(*a, is_causal=facts.causal, implementation="cudnn"), *shapes)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).rstrip(".")
    return None


def _missing_mosaic() -> str | None:
    capability = jax.local_devices()[0].compute_capability
    if int(float(capability)) in (9, 10):
        return None
    return f"tokamax's gradient needs compute capability 9 or 10, this card has {capability}"


def gpu_attention(name: str, blockwise: Callable, q, k, v, segment_ids, *, scale: float, causal: bool):
    """Attention by the kernel `name`: the contract of `attention`, whose padding is already 0 in q, k and v.

    blockwise(q, k, v): the same result without the kernel, for packed rows that the kernel cannot take.
    """
    if name == "cudnn" and q.shape[1] % 2:  # its gradient takes even lengths: one token of padding behind, which no query sees
        q, k, v = (jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)]) for x in (q, k, v))
        segment_ids = None if segment_ids is None else jnp.pad(segment_ids, [(0, 0), (0, 1)])
        return gpu_attention(name, _with_padding_cut(blockwise), q, k, v, segment_ids, scale=scale, causal=causal)[:, :-1]
    kernel = {"cudnn": cudnn_attention, "mosaic": mosaic_attention}[name]
    if segment_ids is None:
        return kernel(q, k, v, scale=scale, causal=causal)
    segment_ids = match_varying(segment_ids, q)
    most = {"cudnn": MOST_RUNS, "mosaic": None}[name]
    packed_kernel = {"cudnn": cudnn_packed, "mosaic": mosaic_packed}[name]
    return packed_attention(packed_kernel, blockwise, q, k, v, segment_ids, scale=scale, most=most)


def _with_padding_cut(blockwise):
    """For operands with one token of padding behind; the output of the added token is 0."""
    return lambda q, k, v: jnp.pad(blockwise(q[:, :-1], k[:, :-1], v[:, :-1]), [(0, 0), (0, 1), (0, 0), (0, 0)])


def padded_width(key_width: int, value_width: int) -> int:
    """One width for keys and values that cuDNN takes: a multiple of 8."""
    return -(-max(key_width, value_width) // 8) * 8


def widen(x, width):
    """Zero columns up to `width` at the end of the last axis."""
    return x if x.shape[-1] == width else jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))


def cudnn_attention(q, k, v, *, scale: float, causal: bool, implementation: Any = "cudnn"):
    """q [B,T,H,K], k [B,S,J,K], v [B,S,J,V] -> [B,T,H,V]. Zero columns add 0 to the scores; those of v are cut off."""
    width = padded_width(k.shape[-1], v.shape[-1])
    wide = (widen(x, width) for x in (q, k, v))
    out = jax.nn.dot_product_attention(*wide, scale=scale, is_causal=causal, implementation=implementation)
    return out[..., : v.shape[-1]]


def mosaic_attention(q, k, v, *, scale: float, causal: bool, implementation: Any = "mosaic"):
    """The same by tokamax, at the widths as they are."""
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.dot_product_attention(q, k, v, scale=scale, is_causal=causal, implementation=implementation)


class Runs(NamedTuple):
    """A packed row as stretches of equal ids; a stretch of padding is one too, its tokens attend to zeros."""

    first: Any  # [B,T] where the token's run starts: the first key that it sees
    index: Any  # [B,T] the token's run, from 0
    count: Any  # [B]
    torn: Any  # [B] whether a document goes on after padding: then its tokens are no single run


def runs(segment_ids) -> Runs:
    """Runs of ids [B,T]: 0 = padding, documents never decreasing but for padding."""
    before = jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    starts = segment_ids != before
    highest = lax.cummax(before, axis=1)  # the last document before each token
    torn = starts & (segment_ids > 0) & (segment_ids == highest)
    at = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    index = jnp.cumsum(starts, axis=1, dtype=jnp.int32) - 1
    return Runs(lax.cummax(jnp.where(starts, at, 0), axis=1), index, index[:, -1] + 1, torn.any(axis=1))


def run_offsets(own: Runs, most: int):
    """cuDNN's tables of the first `most` runs: (offsets [B,most+1], lengths [B,most]) int32, -1 where there is no run."""
    number = jnp.arange(most + 1, dtype=jnp.int32)
    start = jnp.sum(own.index[:, :, None] < number, axis=1, dtype=jnp.int32)  # tokens of earlier runs
    exists = number < own.count[:, None]
    lengths = jnp.diff(start, axis=1)
    return jnp.where(exists, start, -1), jnp.where(exists[:, :-1], lengths, -1)


def packed_attention(kernel, blockwise, q, k, v, segment_ids, *, scale: float, most: int | None):
    """Causal attention of packed rows [B,T]: by `kernel` where every document of the batch is one run.

    A kernel is told where documents start, by one number a query or a table of `most` runs; no [T,T] mask exists. Rows
    that do not fit (padding inside a document, more than `most` runs) are known at run time only: the whole batch then
    takes the blockwise form. The result is exact either way; its last bits depend on which form ran.
    """
    own = runs(segment_ids)
    fits = ~own.torn.any()
    if most is not None:
        fits &= own.count.max() <= most
    # jax.checkpoint: a cond saves what either branch needs, and the blockwise form would save a float32 output more.
    return lax.cond(fits, lambda q, k, v: kernel(q, k, v, own, scale=scale), jax.checkpoint(blockwise), q, k, v)


def cudnn_packed(q, k, v, own: Runs, *, scale: float):
    """cuDNN on at most MOST_RUNS runs a row, attended to one by one."""
    # Private: jax.nn.dot_product_attention has no argument for offsets.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    # JAX 0.10.2 places grouped keys by the number of query heads, which reads the wrong rows: give it one key a query head.
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    width = padded_width(k.shape[-1], v.shape[-1])
    offsets, lengths = run_offsets(own, MOST_RUNS)
    out: Any = dot_product_attention(
        *(widen(x, width) for x in (q, k, v)),
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL,
    )
    return out[..., : v.shape[-1]]


def mosaic_packed(q, k, v, own: Runs, *, scale: float, implementation: str = "mosaic_gpu"):
    """tokamax with the first visible key of every query."""
    # Private: tokamax.dot_product_attention has no argument for it.
    from tokamax._src.ops.attention import api, base  # pyright: ignore[reportMissingImports]

    mask = base.Mask(is_causal=True, k_start=own.first[:, None])
    return api.IMPLEMENTATIONS[implementation](q, k, v, mask=mask, logits_scale=scale)
