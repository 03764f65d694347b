"""Latent attention with the latents going round a ring of shards: no shard ever holds those of another but one at a time.

Liu et al. 2023 (arXiv 2310.01889), on the C + R values a token that MLA caches instead of keys and values. Memory a
device does not depend on the number of shards.

Causal rows are uneven work: shard r attends to r + 1 chunks and the last shard sets the pace, so about half of the
devices' time is idle. Interleaving early and late pieces of the row on each shard would level it, but KDA passes its
state along contiguous pieces; the imbalance is accepted.

Shapes: see latent_blocks.
"""

from functools import partial

import jax.numpy as jnp
from jax import custom_vjp, lax

from ..kernels.varying import match_varying
from ..ops.attention import from_blocks
from .latent_blocks import (
    Chunk,
    Saved,
    attend,
    empty_state,
    finish,
    gradients,
    local_gradients,
    make_queries,
    output_gradient,
    pack,
    zero_gradients,
)


@partial(custom_vjp, nondiff_argnums=(5,))
def ring_latent_attention(q, joint, k_up, v_up, segment_ids, layout):
    """Local q [B,T,H,N+R], joint [B,T,C+R], k_up [C,H,N], v_up [C,H,V], segment_ids [B,T] or None -> [B,T,H,V].

    k_up and v_up are in the accumulation dtype, as their gradients are, and are rounded to joint's before use. All arrays
    must vary over the same manual axes. Forward: R - 1 steps of the latents. Backward: as many again, and R of their
    gradients, which travel with them in the accumulation dtype and end at home.
    """
    return _forward(q, joint, k_up, v_up, segment_ids, layout)[0]


def _next(x, layout):
    """What the shard before holds. One of a single shard is its own neighbour."""
    size = lax.axis_size(layout.axis)
    return x if size == 1 else lax.ppermute(x, layout.axis, [(i, (i + 1) % size) for i in range(size)])


def _source(step, layout):
    """Number of the shard whose latents are here after `step` steps."""
    return (lax.axis_index(layout.axis) - step) % lax.axis_size(layout.axis)


def _round(visit, carry, words, layout):
    """visit(carry, chunk) -> carry for each shard's words in turn: own, then those of the shards before."""
    size = lax.axis_size(layout.axis)

    def step(carry, number):
        words, inner = carry
        arriving = _next(words, layout)  # needs nothing of the visit: XLA may send while it computes
        return (arriving, visit(inner, Chunk(words, _source(number, layout)))), None

    if size > 1:
        (words, carry), _ = lax.scan(step, (words, carry), jnp.arange(size - 1, dtype=jnp.int32))
    return visit(carry, Chunk(words, _source(size - 1, layout)))


def _forward(q, joint, k_up, v_up, segment_ids, layout):
    queries = make_queries(q, segment_ids, layout)
    k_up, v_up = k_up.astype(joint.dtype), v_up.astype(joint.dtype)

    def visit(state, chunk):
        return attend(state, queries, chunk, k_up, v_up, layout)

    state = _round(visit, empty_state(queries, k_up, v_up, layout), pack(joint, segment_ids, layout), layout)
    out, lse = finish(state)
    result = from_blocks(out, layout.length).astype(joint.dtype)
    return result, Saved(q, joint, k_up, v_up, segment_ids, out, lse)


def _backward(layout, saved, d_out):
    queries = make_queries(saved.q, saved.segment_ids, layout)
    rows = output_gradient(saved, d_out, layout)
    words = pack(saved.joint, saved.segment_ids, layout)
    zeros = jnp.zeros((*words.shape[:3], saved.joint.shape[-1]), saved.lse.dtype)

    def visit(carry, chunk):
        # The step of d_joint has to wait for the visit. By arithmetic that is 1% of a full visit at T = 4096, H = 96:
        # 9.4 MB at 90 GB/s against 2.7 TFLOP at 200 TFLOP/s.
        sums, d_joint = carry
        sums, d_joint = gradients(sums, d_joint, queries, rows, chunk, saved, layout)
        return sums, _next(d_joint, layout)

    start = (zero_gradients(queries, saved), match_varying(zeros, saved.lse))
    sums, d_joint = _round(visit, start, words, layout)
    return (*local_gradients(sums, d_joint, saved, layout), None)


ring_latent_attention.defvjp(_forward, _backward)
