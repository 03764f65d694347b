"""QK-Clip: shrink the query and key weights of MLA heads whose attention logits grew too large.

Kimi K2, arXiv 2507.20534 section 2.1 (MuonClip); Kimi K3 report section 2.5 keeps it. A head's logit is
q_nope.k_nope + q_rope.k_shared (times a constant): the first product shrinks by sqrt(g) on both sides, the second by g on the
head's side alone, because the shared key belongs to all heads. So every logit of the head becomes g times itself.

Shapes: L leading axes of scanned layers, Q query input, C latent, H heads, N key width from the latent, R of the shared key.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def qk_clip(params: Any, max_logits: Any, threshold: float) -> Any:
    """Parameters whose next logits are at most `threshold`, for the inputs and weights that `max_logits` was taken of.

    Pure; in float32 whatever the parameters' dtype. A head at or under the threshold keeps its bits, one whose largest logit
    is not finite too (the loss of such a step is not finite either).

    Args:
      params: the model's parameters, with q_up [L..,Q,H,N+R] and k_up [L..,C,H,N] for each MLA layer.
      max_logits: the collection `attention_stats` of the forward pass: the same tree down to the layer, there
        {"max_logits": [L..,H]}. Of several micro-batches: their maximum.
      threshold: largest logit (Kimi K2: 100).

    Raises:
      ValueError: a threshold that is not positive; an MLA layer without statistics, or statistics without a layer.
    """
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it must be positive.")
    by_layer = {_names(path)[:-1]: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(max_logits)}
    named = [(_names(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    nope = {names[:-1]: leaf.shape[-1] for names, leaf in named if names[-1] == "k_up"}
    if odd := set(nope) ^ set(by_layer):
        raise ValueError(
            f"attention statistics and MLA layers do not agree on: {', '.join(sorted(map('/'.join, odd)))}. "
            "Apply the model with mutable=['attention_stats', ...]."
        )

    def clip(path, leaf):
        layer, name = _names(path)[:-1], _names(path)[-1]
        if layer not in by_layer or name not in ("q_up", "k_up"):
            return leaf
        shrink = clip_factors(by_layer[layer], threshold)[..., None, :, None]
        factor = jnp.sqrt(shrink)
        if name == "q_up":
            factor = jnp.where(jnp.arange(leaf.shape[-1]) < nope[layer], factor, shrink)
        return (leaf * factor).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(clip, params)


def clip_factors(max_logits: jax.Array, threshold: float) -> jax.Array:
    """g = min(1, threshold / S) of each head, for S of any shape; 1 where S is negative or not finite."""
    high = (max_logits > threshold) & jnp.isfinite(max_logits)
    return jnp.where(high, threshold / jnp.where(high, max_logits, 1), 1)


def _names(path) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", key)) for key in path)
