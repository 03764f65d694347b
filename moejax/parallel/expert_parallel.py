"""Experts sharded over a mesh axis: the routed experts and the whole LatentMoE layer on the tokens of one shard.

To be called inside jax.shard_map. Shapes: N tokens of this shard, k experts a token, E experts in all, R shards of the
expert axis, D model width, L width the experts work in (the latent), F expert hidden width on this shard (of the tensor
axis, if there is one), A = N * k assignments, C rows that a shard takes in one round (see exchange.py).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.common import accumulation_dtype
from moejax.kernels.grouped_matmul.api import require_implementation
from moejax.kernels.varying import match_varying

from ..ops import experts as ops
from ..ops.activations import situ_glu
from ..ops.experts import LatentMoEOutput, PackedExperts
from .dispatch import plan_dispatch
from .exchange import arrivals, check_transport, for_later_rounds, meet, plan_route, send, send_back


def expert_parallel_mlp(
    x,
    experts,
    weights,
    w_gate,
    w_up,
    w_down,
    *,
    axis,
    tensor_axis=None,
    activation=situ_glu,
    mask=None,
    transport=None,
    capacity=None,
    implementation=None,
):
    """`ops.expert_mlp` over the experts of all shards of `axis`: this shard's tokens go to their experts and come back.

    The same numbers as on one device: each expert's output is rounded to x's dtype where it is computed, travels back, and
    is weighted and summed here in float32 in the order of the k columns, so the result does not depend on who came first.

    Args:
      x: [N,L] this shard's tokens. Fewer tokens than shards: give every shard at least one and mask what is not there.
      experts: [N,k] int32, global numbers in 0..E-1; weights: [N,k] float32, their factors.
      w_gate, w_up: [E/R,L,F]; w_down: [E/R,F,L], this shard's experts, in x's dtype or PackedExperts.
      axis: name(s) of the mesh axis that shards experts and tokens.
      tensor_axis: mesh axis that shards F, or None. Each of its shards sends the same rows and gets partial sums; they are
        added over the axis in float32 once, on [N,L] after the sum over k. In bfloat16 each partial output is therefore
        rounded by itself; adding rows before that one rounding would move k times the bytes, and in float32.
      activation, implementation: as in ops.expert_mlp.
      mask: [N] bool or None; False tokens are not sent, never read and give 0.
      transport: "ragged" (lax.ragged_all_to_all; TPU and GPU), "padded" (lax.all_to_all of equal slots), "gather" (all
        tokens to all shards, float32 partial sums back; for a few tokens, e.g. decoding: its cost grows with R and its sum
        runs over shards, not columns), or None: "ragged" where the program is lowered for TPU or CUDA, "padded" for CPU.
      capacity: None drops nothing. A number is the most rows that one shard sends to another one: first choices first,
        then earlier tokens; a dropped assignment adds 0. Then one round is enough and slots have that many rows.

    Returns:
      [N,L] in x's dtype; with a capacity the pair (that, [] int32 assignments dropped on this shard).

    Raises:
      ValueError: as ops.expert_mlp; an unknown transport; a capacity below 1.

    Gradients: of x, weights and the matrices, summed over every axis over which an argument is replicated. The hidden
    layer is computed again in the backward pass, so a layer keeps only x, the [A,L] outputs and the plan: skewed routing
    then takes more rounds, not more memory.
    """
    out, overflow, _ = _run(
        x,
        experts,
        weights,
        (w_gate, w_up, w_down),
        mask,
        axis=axis,
        tensor_axis=tensor_axis,
        transport=transport,
        capacity=capacity,
        local=_Local(activation, implementation),
    )
    return out if capacity is None else (out, overflow)


def _run(x, experts, weights, matrices, mask, *, axis, tensor_axis, transport, capacity, local, beside=None):
    """-> (output [N,L], overflow, beside): `beside` is an array that is computed while rows travel."""
    gate, up, down = matrices
    ops.check_expert_mlp(x, experts, weights, gate, up, down, mask)
    require_implementation(local.implementation)
    check_transport(transport)
    (N, k), shards, own = experts.shape, lax.axis_size(axis), ops.num_experts(matrices[0])
    arguments = (x, experts, weights, matrices, mask, beside)
    x, experts, weights, matrices, mask, beside = _vary(arguments, (axis, tensor_axis))
    plan = plan_dispatch(experts, own * shards, shards, mask=mask, capacity=capacity)
    if transport == "gather":
        total = _gathered(x, jnp.where(plan.sent, experts, own * shards), weights, matrices, mask, axis, local)
    else:
        most = N * k if capacity is None else min(capacity, N * k)
        route = plan_route(axis, transport, N * k, most, one_round=capacity is not None)
        exchanged: Any = _exchanged
        total, beside = exchanged((route, local), x, weights, matrices, plan, meet(plan, route), mask, beside)
    overflow = plan.overflow
    if tensor_axis is not None:
        total, overflow = lax.psum(total, tensor_axis), lax.pmax(overflow, tensor_axis)
    return total.astype(x.dtype), overflow, beside


def _vary(tree, axes):
    """Mark all arrays as varying over the axes that any of them, or this layer, varies over: sums their gradients."""
    names = sum(((a,) if isinstance(a, str) else tuple(a) for a in axes if a is not None), ())
    anchor = lax.pcast(jnp.zeros((), jnp.float32), names, to="varying")
    arrays = jax.tree.leaves(tree)
    return jax.tree.map(lambda a: match_varying(a, anchor, *arrays), tree)


class _Local(NamedTuple):
    """How a shard runs its own experts."""

    activation: Any
    implementation: str | None

    def forward(self, rows, expert, matrices):
        """rows [C,L], expert [C] int32 in 0..E/R-1 or E/R for a row to ignore -> [C,L], 0 for ignored rows."""
        mask = expert < ops.num_experts(matrices[0])
        options = {"activation": self.activation, "mask": mask, "implementation": self.implementation}
        gate, up, down = matrices
        return ops.expert_mlp(rows, expert[:, None], self._one(rows), gate, up, down, **options)

    def backward(self, rows, expert, matrices, d_out):
        """-> gradients of rows and, not yet rounded, of the matrices (None for packed ones)."""
        if self.implementation == "reference":
            return self._reference_backward(rows, expert, matrices, d_out)
        mask = expert < ops.num_experts(matrices[0])
        gate, up, down = matrices
        _, saved = ops.blocked_forward(rows, expert[:, None], self._one(rows), gate, up, down, mask, self.activation)
        d_rows, _, d_matrices = ops.blocked_gradients(saved, d_out, self.activation)
        return d_rows.astype(rows.dtype), d_matrices

    def _reference_backward(self, rows, expert, matrices, d_out):
        if isinstance(matrices[0], PackedExperts):
            _, pull = jax.vjp(lambda r: self.forward(r, expert, matrices), rows)
            return pull(d_out)[0], (None, None, None)
        _, pull = jax.vjp(lambda r, m: self.forward(r, expert, m), rows, matrices)
        d_rows, d_matrices = pull(d_out)
        return d_rows, tuple(d.astype(accumulation_dtype(d)) for d in d_matrices)

    def _one(self, rows):
        return match_varying(jnp.ones((rows.shape[0], 1), accumulation_dtype(rows)), rows)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(static, x, weights, matrices, plan, meeting, mask, beside):
    """-> [N,L] float32 sum over k of what the experts returned, times their weights; and `beside` as it came."""
    return _exchanged_forward(static, x, weights, matrices, plan, meeting, mask, beside)[0]


def _exchanged_forward(static, x, weights, matrices, plan, meeting, mask, beside):
    route, local = static
    rows = x[plan.order // weights.shape[1]]

    def one_round(turn, outs, beside=None):
        mine = send(rows, meeting, turn, route)
        if beside is not None:  # without the tie the TPU compiler puts it after the exchange, where it hides nothing
            mine, beside = lax.optimization_barrier((mine, beside))
        results = local.forward(mine, arrivals(meeting, turn, route), matrices)
        return send_back(results, outs, meeting, turn, route), beside

    first, beside = one_round(0, jnp.zeros_like(rows), beside)
    outs = for_later_rounds(lambda turn, outs: one_round(turn, outs)[0], first, meeting, route)
    total = ops.sum_rows(outs, plan, mask, weights.astype(accumulation_dtype(x, weights)))
    return (total, beside), (x, weights, matrices, plan, meeting, mask, outs)


def _exchanged_backward(static, saved, cotangents):
    d_total, d_beside = cotangents
    x, weights, matrices, plan, meeting, mask, outs = saved
    (route, local), dtype, width = static, accumulation_dtype(x, weights), x.shape[1]
    token = plan.order // weights.shape[1]
    d_rows = d_total.astype(x.dtype)[token]  # exact: the output was rounded to x's dtype, so its gradient is a widened one
    d_weights = jnp.where(plan.sent, jnp.sum(outs.astype(dtype) * d_rows.astype(dtype), axis=-1)[plan.row], 0)
    d_outs = (d_rows.astype(dtype) * weights.reshape(-1)[plan.order].astype(dtype)[:, None]).astype(x.dtype)
    rows = jnp.concatenate([x[token], d_outs], axis=1)

    def one_round(turn, carry):
        dx_rows, d_matrices = carry
        mine = send(rows, meeting, turn, route)
        dx, parts = local.backward(mine[:, :width], arrivals(meeting, turn, route), matrices, mine[:, width:])
        return send_back(dx, dx_rows, meeting, turn, route), jax.tree.map(jnp.add, d_matrices, parts)

    packed = isinstance(matrices[0], PackedExperts)
    zeros = tuple(None if packed else jnp.zeros(w.shape, accumulation_dtype(w)) for w in matrices)
    start = jax.tree.map(lambda a: match_varying(a, rows), (jnp.zeros_like(d_outs), zeros))
    dx_rows, d_matrices = for_later_rounds(one_round, one_round(0, start), meeting, route)
    dx = ops.sum_rows(dx_rows, plan, mask, jnp.ones_like(weights, dtype))
    d_matrices = tuple(None if packed else d.astype(w.dtype) for d, w in zip(d_matrices, matrices, strict=True))
    return dx.astype(x.dtype), d_weights.astype(weights.dtype), d_matrices, None, None, None, d_beside


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


def _gathered(x, experts, weights, matrices, mask, axis, local: _Local):
    """All tokens on all shards; each runs its own experts and the float32 sums are added where the tokens came from."""
    own = ops.num_experts(matrices[0])
    dtype = accumulation_dtype(x, weights)
    if mask is not None:
        x, weights = jnp.where(mask[:, None], x, 0), jnp.where(mask[:, None], weights, 0)
    gather_rows: Any = _gather_rows
    tokens = gather_rows(x, axis)
    index, factors = (lax.all_gather(a, axis, tiled=True) for a in (experts, weights.astype(dtype)))
    index = index - lax.axis_index(axis) * own
    index = jnp.where((index >= 0) & (index < own), index, own)
    k = index.shape[1]
    outs = local.forward(jnp.repeat(tokens, k, axis=0), index.reshape(-1), matrices).reshape(-1, k, x.shape[1])
    total = jnp.zeros(tokens.shape, dtype)
    for column in range(k):
        total = total + outs[:, column].astype(dtype) * factors[:, column, None]
    return lax.psum_scatter(total, axis, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather_rows(x, axis):
    return lax.all_gather(x, axis, tiled=True)


def _gather_rows_backward(axis, _, d):
    wide = d.astype(accumulation_dtype(d))  # bfloat16 parts are summed in float32, as on one device
    return (lax.psum_scatter(wide, axis, tiled=True).astype(d.dtype),)


_gather_rows.defvjp(lambda x, axis: (_gather_rows(x, axis), None), _gather_rows_backward)


def expert_parallel_latent_moe(
    x,
    bias,
    weights,
    k,
    *,
    axis,
    tensor_axis=None,
    mask=None,
    scaling=1.0,
    renormalize=True,
    activation=situ_glu,
    eps=1e-5,
    transport=None,
    capacity=None,
    implementation=None,
):
    """`ops.latent_moe` on this shard's tokens: the router sees the full vectors, the exchange carries the latent ones.

    The shared expert is computed between the two halves of the exchange, while the rows of its first round travel.

    Args:
      x: [N,D] (or [...,D]) this shard's tokens; bias: [E], replicated.
      weights: LatentMoEWeights; w_gate, w_up, w_down hold this shard's E/R experts and, with a tensor axis, its slice of F,
        as shared_gate [D,S], shared_up [D,S] and shared_down [S,D] hold its slice of S. All others are replicated.
      axis, tensor_axis, transport, capacity: see expert_parallel_mlp.
      mask, scaling, renormalize, activation, eps, implementation: see ops.latent_moe.

    Returns:
      LatentMoEOutput of this shard's tokens: y like x, logits [N,E], Routing over N flattened tokens. Nothing is summed
      over shards: add statistics of the routing over every axis that shards tokens. With a capacity the pair (that, []
      int32 assignments dropped on this shard).

    Raises:
      ValueError: as ops.latent_moe and expert_parallel_mlp; E that is not R times this shard's experts.
    """
    ops.check_layer(x, weights, mask, shards=lax.axis_size(axis))
    entered = ops.enter_latent(x, bias, weights, k, mask=mask, scaling=scaling, renormalize=renormalize)
    y, overflow, shared = _run(
        entered.latent,
        entered.routing.experts,
        entered.routing.weights,
        entered.matrices,
        entered.mask,
        axis=axis,
        tensor_axis=tensor_axis,
        transport=transport,
        capacity=capacity,
        local=_Local(activation, implementation),
        beside=ops.shared_expert(entered.flat, weights, activation),
    )
    if shared is not None and tensor_axis is not None:
        shared = lax.psum(shared.astype(accumulation_dtype(shared)), tensor_axis).astype(x.dtype)
    y = ops.leave_latent(y, weights, shared, eps).reshape(x.shape)
    out = LatentMoEOutput(y, entered.logits, entered.routing)
    return out if capacity is None else (out, overflow)
