"""A whole KDA layer of a row whose tokens are sharded over a mesh axis (K3 report section 2.1.1, equations 1-6).

Shapes: B batch, T local tokens, D model width; the rest as in `moejax.ops.kda_layer`.
"""

from __future__ import annotations

from typing import Any

import jax

from ..ops.kda_layer import KDAState, KDAWeights, check_kda_layer, layer_around, of_parts
from .sequence_conv import sequence_short_convs
from .sequence_documents import Axis
from .sequence_kda import sequence_gated_kda


def sequence_kda_layer(
    x: jax.Array,
    weights: KDAWeights,
    *,
    axis: Axis,
    lower_bound: float | None = -5.0,
    norm_eps: float = 1e-5,
    state: KDAState | None = None,
    segment_ids: jax.Array | None = None,
    return_state: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, KDAState | None]:
    """`moejax.ops.kda_layer` of a whole row, on this shard's tokens. Call it inside `jax.shard_map`.

    Two all-gathers forward (the convolutions' inputs, then the recurrence's summaries; their transposes backward) and, with
    return_state, two all-reduces. `state` and the state returned are those of the whole row, the same on all shards.

    weights: the same on all shards of `axis`. With heads sharded over another mesh axis (all of a head's weights together, the
    narrow gate matrices whole) y is this shard's part of the sum over heads: the caller adds them with `lax.psum` over that axis.
    x, segment_ids: this shard's tokens, shards in order along the row. The other arguments, the results and the errors are
    those of kda_layer.
    """
    check_kda_layer(x, weights, lower_bound, norm_eps, state, segment_ids, implementation)

    def convolve(inputs, taps, histories):
        return sequence_short_convs(
            inputs,
            taps,
            axis=axis,
            histories=histories,
            segment_ids=segment_ids,
            output_final_history=return_state,
            implementation=of_parts(implementation),
        )

    def recur(*operands):
        return sequence_gated_kda(
            *operands,
            axis=axis,
            lower_bound=lower_bound,
            initial_state=None if state is None else state.recurrent,
            segment_ids=segment_ids,
            output_final_state=return_state,
            implementation=implementation,
        )

    options: Any = dict(norm_eps=norm_eps, state=state, segment_ids=segment_ids, implementation=implementation)
    return layer_around(x, weights, convolve, recur, **options)
