"""Kimi Delta Attention of a row whose tokens are sharded over a mesh axis, exact and differentiable.

A shard maps the state that enters it to the one that leaves by S -> B + M S, and its outputs are O + Q S. So the heavy work needs
nothing of other shards; after one all-gather of the summaries [B | M] each shard folds the earlier ones. Two ways to get there:

* In XLA one pass over the tokens with the value channels [v | 0_K] and the entry state [0 | I_K] gives [O | Q] and [B | M], all in
  float32, and Q S is added after the gather. A separate pass for the summaries would prepare every chunk (scores, inverse) twice
  and let the second pass wait for the gather.
* The GPU kernels prepare once, a walk gives [B | M], another one from the true entry state gives the outputs (triton_shards): the
  backward pass then works on V columns, not on V + K. Backward: a walk gives what a shard's own outputs contribute to the gradient
  of its entry state, c; one all-gather of [c | M] and a fold from the right, dS = c + M^T dS', give each shard the true gradient at
  its end, and its own backward pass does the rest.

All shards do this work at the same time, so sparing the last one its summary would make nothing faster.

Shapes: R shards along `axis`, B batch, T local tokens, H query/key heads, HV value heads, K key channels, V value channels,
N documents of a row. "float32" means float32, or float64 when an input is float64.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..kernels.common import accumulation_dtype
from ..kernels.kda import api, choice, gated_kda, kda
from ..kernels.kda.gate import check_gate, check_lower_bound
from ..kernels.kda.segments import document_ids, drop_padding
from ..kernels.kda.triton import CLOSED
from ..kernels.kda.triton_shards import kda_triton_shards
from ..kernels.varying import match_varying
from .sequence_documents import Axis, Documents, all_documents, first_and_last, gather_shards, of_last_shard, own_row


def sequence_kda(
    q,
    k,
    v,
    g,
    beta,
    *,
    axis: Axis,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state=None,
    segment_ids=None,
    num_segments: int | None = None,
    output_final_state: bool = False,
    implementation: str | None = None,
):
    """`moejax.ops.kda` of a whole row, on this shard's tokens. Call it inside `jax.shard_map`.

    One all-gather of [B,HV,K,V+K] float32 a shard forward (its transpose, a reduce-scatter, backward; with the kernels an
    all-gather of the same size); one all-reduce of the final state when it is wanted. With an axis of size 1 it is `kda` itself.

    axis: the mesh axis (or axes) that shards the tokens, shards in order along the row.
    q, k, v, g, beta, segment_ids: this shard's tokens, any T >= 1; ids count along the whole row. Documents may span shards,
    a shard may hold padding only.
    initial_state: that of the whole row, the same on all shards: [B,HV,K,V], or [B,N,HV,K,V] with num_segments=N.
    num_segments: over several shards it runs in XLA; implementation="triton" then raises NotImplementedError, None chooses "xla".
    The other arguments and the errors are those of kda.

    Returns (o [B,T,HV,V] in v.dtype, final state of the whole row, which does not vary over `axis`, or None unless
    output_final_state). Source: Kimi K3 report section 2.1.1; the summaries are the chunk form of arXiv 2406.06484 for one big chunk.
    """
    q, k, v, g, beta, initial_state, segment_ids = api.as_arrays(q, k, v, g, beta, initial_state, segment_ids)
    api.check_operands(q, k, v, g, beta)
    check_lower_bound(lower_bound)
    options: dict[str, Any] = dict(lower_bound=lower_bound, scale=scale, num_segments=num_segments, implementation=implementation)
    return _over_shards(kda, (q, k, v, g, beta), (), initial_state, segment_ids, output_final_state, axis, options)


def sequence_gated_kda(
    q,
    k,
    v,
    raw_gate,
    beta_logits,
    A_log,
    dt_bias,
    *,
    axis: Axis,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state=None,
    segment_ids=None,
    num_segments: int | None = None,
    output_final_state: bool = False,
    implementation: str | None = None,
):
    """`moejax.ops.gated_kda` of a whole row, on this shard's tokens: L2 norm of q and k, gate, sigmoid, recurrence.

    A_log [HV] and dt_bias [HV,K] are the same on all shards. The other arguments, the results and the errors are those of
    gated_kda and sequence_kda.
    """
    q, k, v, raw_gate, beta_logits, A_log, dt_bias = api.as_arrays(q, k, v, raw_gate, beta_logits, A_log, dt_bias)
    initial_state, segment_ids = api.as_arrays(initial_state, segment_ids)
    api.check_operands(q, k, v, raw_gate, beta_logits, names=("q", "k", "v", "raw_gate", "beta_logits"))
    check_gate(raw_gate, A_log, dt_bias, lower_bound)
    options: dict[str, Any] = dict(lower_bound=lower_bound, scale=scale, num_segments=num_segments, implementation=implementation)
    operands, gate = (q, k, v, raw_gate, beta_logits), (A_log, dt_bias)
    return _over_shards(gated_kda, operands, gate, initial_state, segment_ids, output_final_state, axis, options)


def _over_shards(run: Any, operands, gate, initial_state, segment_ids, output_final_state, axis, options):
    """run(*operands, *gate), which is kda or gated_kda, of the whole row; the operands are checked. options: lower_bound, scale,
    num_segments, implementation."""
    q, k, v, g, beta = operands
    num_segments, lower_bound = options["num_segments"], options["lower_bound"]
    api.check_segments(segment_ids, num_segments, q.shape[:2])
    api.check_initial_state(initial_state, num_segments, v.shape, q.shape[3])
    scale = api.check_scale(options["scale"], q.shape[3])
    if lax.axis_size(axis) == 1:
        options |= dict(initial_state=initial_state, segment_ids=segment_ids, output_final_state=output_final_state)
        o, final = run(*operands, *gate, **options)
        return o, None if final is None else of_last_shard(final, axis=axis)

    name = api.resolve(options["implementation"], q, k, v, g, beta, initial_state, lower_bound, *gate)
    if num_segments is not None and name in ("triton", "lowered"):
        if options["implementation"] == "triton":
            raise NotImplementedError(
                "implementation='triton' of sequence_kda cannot run: its kernels take no num_segments over several shards; "
                "use implementation='xla' (or None), which runs on every platform."
            )
        name = "xla"
    dtype = accumulation_dtype(*operands, *(x for x in gate if x is not None), initial_state)
    rows = () if num_segments is None else (num_segments,)
    shape = (q.shape[0], *rows, v.shape[2], q.shape[3], v.shape[3])
    start = jnp.zeros(shape, dtype) if initial_state is None else initial_state.astype(dtype)
    edges = None if segment_ids is None else first_and_last(segment_ids)

    def wide(operands, gate, start, segment_ids, edges):
        run_as = dict(options, implementation="reference" if name == "reference" else "xla")
        return _wide_pass(run, operands, gate, start, segment_ids, edges, axis, run_as)

    def kernels(operands, gate, start, segment_ids, edges):
        documents = None
        if segment_ids is not None:
            documents, (q, k, v, g, beta) = document_ids(segment_ids), drop_padding(segment_ids, *operands)
            if gate:
                g = jnp.where((segment_ids > 0)[..., None, None], operands[3], jnp.asarray(CLOSED, g.dtype))
            operands = q, k, v, g, beta
        operands = (match_varying(operands[0], lax.axis_index(axis)), *operands[1:])
        known: dict[str, Any] = dict(scale=scale, lower_bound=lower_bound, fused=bool(gate), documents=documents, edges=edges)
        return kda_triton_shards(*operands, *gate, initial_state=start, exchange=Shards(axis), **known)

    arguments = (operands, gate, start, segment_ids, edges)
    if num_segments is None:
        o, own = choice.run("xla" if name == "reference" else name, kernels, lambda *a: wide(*a)[:2], arguments)
        return o, of_last_shard(own, axis=axis) if output_final_state else None
    o, own, documents = wide(*arguments)
    return o, _table_of_all(own, start, segment_ids, documents, axis) if output_final_state else None


def _wide_pass(run, operands, gate, start, segment_ids, edges, axis, options):
    """-> o, the states at the end of this shard (like start; of its own documents), the documents of all shards or None."""
    q, k, v, g, beta = operands
    channels, size = start.shape[-2:]
    wide = jnp.concatenate([v.astype(start.dtype), jnp.zeros((*v.shape[:3], channels), start.dtype)], axis=-1)
    options |= dict(initial_state=_augmented(start, edges), segment_ids=segment_ids, output_final_state=True)
    o, end = run(q, k, wide, g, beta, *gate, **options)

    table = start if start.ndim == 5 else None
    (summaries,), ids = gather_shards([end if table is None else _row(end, edges[:, 1])], edges, axis=axis)
    documents = None if ids is None else all_documents(ids[..., 0], ids[..., 1])
    entry = _entry_state(summaries, start, table, documents, axis)
    read = jnp.einsum("bthk,bhkv->bthv", o[..., size:], entry, precision=lax.Precision.HIGHEST)
    own = _through(end, entry) if table is None else _own_states(end, entry, edges)
    return (o[..., :size] + read).astype(v.dtype), own, documents


@dataclasses.dataclass(frozen=True)
class Shards:
    """The collectives of the kernels' path: one all-gather in `entry`, one in `leaving`. No gradient goes through them."""

    axis: Axis

    def entry(self, add, matrix, initial, edges):
        """-> the state that enters this shard [B,HV,K,V], and the documents of all shards. edges [B,2]: this shard's, or None."""
        summary = jnp.concatenate([add, matrix], axis=-1)
        (summaries,), ids = gather_shards([summary], edges, axis=self.axis)
        documents = None if ids is None else all_documents(ids[..., 0], ids[..., 1])
        return _entry_state(summaries, initial, None, documents, self.axis), documents

    def leaving(self, d_add, matrix, others: Documents | None):
        """Fold of the later shards: d_add [B,HV,K,V] of each, at its start -> the gradient at this shard's end.

        The matrices are gathered once more: kept since the forward pass they would take R [B,HV,K,K] a layer.
        """
        (parts,), _ = gather_shards([jnp.concatenate([d_add, matrix], axis=-1)], None, axis=self.axis)
        number, size = lax.axis_index(self.axis), d_add.shape[-1]
        first, before = (None, None) if others is None else (others.first, others.before)

        def step(d_end, shard):
            r, part, first, before = shard
            carried = jnp.einsum("bhjk,bhjv->bhkv", part[..., size:], d_end, precision=lax.Precision.HIGHEST)
            if first is not None:  # a shard of padding changes nothing, bit for bit
                carried = jnp.where((first == 0)[:, None, None, None], d_end, carried)
            d_start = _entering(part[..., :size] + carried, first, before, None)
            return jnp.where(r > number, d_start, d_end), None

        shards = (jnp.arange(parts.shape[0]), parts, first, before)
        d_end = match_varying(jnp.zeros_like(d_add), parts)  # nothing comes after the last shard
        # The first shard's part leaves the row.
        return lax.scan(step, d_end, jax.tree.map(lambda x: x[1:], shards), reverse=True)[0]

    def of_first(self, d_entry):
        """The row's initial state enters the first shard, as it is."""
        return jnp.where(lax.axis_index(self.axis) == 0, d_entry, 0)


def _augmented(start, edges):
    """Entry state of the pass over [v | 0_K]: [0 | I_K] for the shard's first document.

    With a table every other document is known to start here, from its own state: [start | 0]. Without one the state of a later
    document is 0, as kda has it.
    """
    channels = start.shape[-2]
    identity = jnp.broadcast_to(jnp.eye(channels, dtype=start.dtype), (*start.shape[:-1], channels))
    opened = jnp.concatenate([jnp.zeros_like(start), identity], axis=-1)
    if start.ndim == 4:
        return opened
    return jnp.where(_first_row(start, edges), opened, jnp.concatenate([start, jnp.zeros_like(identity)], axis=-1))


def _first_row(table, edges):
    """Where a table [B,N,...] holds the shard's first document, [B,N,1,1,1]."""
    return (jnp.arange(1, table.shape[1] + 1) == edges[:, :1])[:, :, None, None, None]


def _own_states(end, entry, edges):
    """The table that the pass left [B,N,HV,K,V+K] with the true entry state put in: the shard's own final states."""
    leaving = _through(_row(end, edges[:, 0]), entry)
    return jnp.where(_first_row(end, edges), leaving[:, None], end[..., : entry.shape[-1]])


def _row(table, document):
    """The state of `document` [B] (row document - 1) of a table [B,N,...]; of any row where it is 0."""
    index = jnp.maximum(document - 1, 0).reshape(-1, *(1,) * (table.ndim - 1))
    return jnp.take_along_axis(table, index, axis=1)[:, 0]


def _through(summary, state):
    """B + M S for summary = [B | M] [B,HV,K,V+K] and S [B,HV,K,V]."""
    size = state.shape[-1]
    return summary[..., :size] + jnp.matmul(summary[..., size:], state, precision=lax.Precision.HIGHEST)


def _entering(state, first, before, table):
    """What a shard's first document starts from, when the last document before it ended with `state`.

    first, before [B]: ids, None without documents. The row's first document goes on from the row's initial state.
    """
    if first is None:
        return state
    if table is None:
        goes_on = (first == 0) | (before == 0) | (first == before)
        return jnp.where(goes_on[:, None, None, None], state, 0)
    return jnp.where((first == before)[:, None, None, None], state, _row(table, first))


def _entry_state(summaries, start, table, documents: Documents | None, axis):
    """Fold of the earlier shards' summaries [R,B,HV,K,V+K] -> this shard's entry state [B,HV,K,V]."""
    number = lax.axis_index(axis)
    state = start if table is None else jnp.zeros_like(start[:, 0])  # with a table nothing reads it before it is set
    first, before = (None, None) if documents is None else (documents.first, documents.before)

    def step(state, shard):
        r, summary, first, before = shard
        end = _through(summary, _entering(state, first, before, table))
        if first is not None:  # a shard of padding changes nothing, bit for bit
            end = jnp.where((first == 0)[:, None, None, None], state, end)
        return jnp.where(r < number, end, state), None

    shards = (jnp.arange(summaries.shape[0]), summaries, first, before)
    # The last shard's summary enters no one.
    state, _ = lax.scan(step, match_varying(state, summaries), jax.tree.map(lambda x: x[:-1], shards))
    own = (None, None) if documents is None else (own_row(documents.first, axis=axis), own_row(documents.before, axis=axis))
    return _entering(state, *own, table)


def _table_of_all(own_states, table, segment_ids, documents, axis):
    """Each document's state from the last shard that holds it, its initial state where none does. [B,N,HV,K,V]

    Owners add their states and a flag; all other shards add 0.
    """
    batch, rows = table.shape[:2]
    present = jnp.zeros((batch, rows + 1), bool).at[jnp.arange(batch)[:, None], segment_ids].set(True)[:, 1:]
    later = jnp.arange(documents.first.shape[0])[:, None] > lax.axis_index(axis)
    ids = jnp.arange(1, rows + 1, dtype=segment_ids.dtype)
    goes_on = jnp.any(later[..., None] & (documents.first[..., None] == ids), axis=0)
    owned = present & ~goes_on
    flat = jnp.where(owned[..., None], own_states.reshape(batch, rows, -1), 0)
    total = lax.psum(jnp.concatenate([flat, owned[..., None].astype(flat.dtype)], axis=-1), axis)
    return jnp.where(total[..., -1:] > 0, total[..., :-1], table.reshape(batch, rows, -1)).reshape(table.shape)
