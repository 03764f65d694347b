"""`moejax.ops.attention_logits` of an MLA layer on a mesh: local heads and queries, the keys of whole rows.

Over a sequence axis the latents and shared keys are gathered once (C + R values a token), as in the "gather" form of
sequence_mla; keys are written out a block at a time. Shapes: B batch, T tokens, D model width, H heads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..ops.attention_logits import latent_max_logits
from ..ops.mla import MLAWeights, mla_project
from ..ops.rotary import positions_from_segments
from .layers import ModelParallel, weight_specs
from .sequence_mla import sequence_positions


def sharded_mla_max_logits(
    parallel: ModelParallel, x: jax.Array, weights: MLAWeights, *, segment_ids=None, rotary: dict[str, float] | None = None
) -> jax.Array:
    """`moejax.ops.attention_logits.mla_max_logits` over the mesh: x [B,T,D] -> [H], sharded as heads are.

    rotary: rotary_base and rotary_scale, or None. The arguments of sharded_gated_mla. No gradient flows.
    """
    time, tokens = parallel.axes("time"), (*parallel.axes("batch"), *parallel.axes("time"))
    x, weights = lax.stop_gradient((x, weights))
    ids = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids

    def local(x, weights, ids):
        options: dict[str, Any] = dict(rotary or {})
        x = jnp.where((ids > 0)[:, :, None], x, 0)
        if rotary is not None:
            options["positions"] = sequence_positions(ids, axis=time) if time else positions_from_segments(ids)
        q, latent, shared_key = mla_project(x, weights, **options)
        key_ids, first = ids, 0
        if time:
            latent, shared_key, key_ids = (lax.all_gather(a, time, axis=1, tiled=True) for a in (latent, shared_key, ids))
            first = lax.axis_index(time) * x.shape[1]
        top = latent_max_logits(q, latent, shared_key, weights.k_up, segment_ids=ids, key_segment_ids=key_ids, first_query=first)
        return lax.pmax(top, tokens) if tokens else top

    mapped = jax.shard_map(
        local,
        mesh=parallel.mesh,
        in_specs=(parallel.spec("batch", "time", None), weight_specs(weights, {}, parallel), parallel.spec("batch", "time")),
        out_specs=parallel.spec("heads"),
    )
    return mapped(x, weights, ids)
