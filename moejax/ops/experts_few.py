"""Routed experts in a few large products: for a decoding batch, where reading weights is the cost, and on a GPU for a prompt too.

Kimi K3 report section 2.3, eq. 11-13. `expert_mlp` walks sorted blocks in a loop, one block after the other: right for
thousands of tokens on a CPU, but with one token an expert each turn reads one expert and waits for a handful of launches.

Shapes: N tokens, k experts a token, E experts, L width the experts work in, F expert hidden width, A = N * k assignments.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.common import accumulation_dtype
from moejax.kernels.varying import barrier_on_cuda, match_varying
from moejax.ops.activations import situ_glu
from moejax.ops.experts import PackedExperts, check_expert_mlp, mlp, num_experts, sort_by_expert
from moejax.ops.mxfp4 import mxfp4_decode

FORMS = ("gather", "all", "slots")
GATHER_COST = 1.5  # time of a gathered matrix over one of a batched product: 22 against 15 us (66 MB), 4.1 against 3.4 (14 MB)
MOST_TOKENS = 128  # of "all": N operations a byte of bfloat16 weights; an H200 does 165 in the time it reads one
MOST_FLOPS = 8e10  # of "all" beyond that: 0.1 ms of an H200, what the sort and the loop of "slots" cost; by arithmetic, not measured
LEAST_SLOTS = 32
TEMPORARY_BYTES = 2**30  # of gathered or decoded matrices, and of the experts' rows


class FormChoice(NamedTuple):
    """Which form runs, and why."""

    name: str
    reason: str


def few_token_experts(x, experts, weights, w_gate, w_up, w_down, *, activation=situ_glu, mask=None, form=None) -> jax.Array:
    """The same result as `expert_mlp`, up to rounding, in a few large products.

    Each expert's output is rounded to x's dtype, then weighted and summed over k in float32 (float64 for float64) in the
    order of the columns, then rounded: a token's result depends on its own row alone, whatever the others choose. No token is
    dropped. Any number of tokens: more than TEMPORARY_BYTES has room for are served in rounds, each of which reads the
    weights again. Meant for inference: use expert_mlp where gradients are wanted, and on a CPU above about a thousand tokens.

    Args:
      x: [N,L].
      experts: [N,k] int32 in 0..E-1; weights: [N,k] float32, their factors.
      w_gate, w_up: [E,L,F]; w_down: [E,F,L]; in x's dtype. Or all three PackedExperts (MXFP4): what one step multiplies is
        decoded to x's dtype, at most TEMPORARY_BYTES at a time.
      activation: a function of (gate, up), both [...,F], that works on each row by itself.
      mask: [N] bool or None; False tokens (idle slots) are never read, have no experts and give 0.
      form: "gather" (each assignment's matrices are gathered), "all" (every expert on every token), "slots" (every expert
        on the tokens that chose it, in rounds until the longest queue is served), or None: see few_token_form.

    Returns:
      [N,L] in x's dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an unknown form.
    """
    check_expert_mlp(x, experts, weights, w_gate, w_up, w_down, mask)
    N, k = experts.shape
    flops = 2.0 * _expert_bytes((w_gate, w_up, w_down), 1)
    form = few_token_form(N, k, num_experts(w_gate), expert_flops=flops, form=form).name
    arguments = (x, experts, weights, (w_gate, w_up, w_down), mask)
    arrays = jax.tree.leaves(arguments)
    arguments: Any = jax.tree.map(lambda a: match_varying(a, *arrays), arguments)
    x, experts, weights, matrices, mask = arguments
    if mask is not None:
        x, experts = jnp.where(mask[:, None], x, 0), jnp.where(mask[:, None], experts, 0)
        weights = jnp.where(mask[:, None], weights, 0)
    weights = weights.astype(accumulation_dtype(x, weights))
    run, rows = {"gather": (_gather, _gather_rows), "all": (_all, _all_rows), "slots": (_slots, _slots_rows)}[form]
    most = rows(x, experts, matrices)
    total = _in_rounds(lambda *round: run(*round, matrices, activation), most, x, experts, weights, mask)
    return (total if mask is None else jnp.where(mask[:, None], total, 0)).astype(x.dtype)


def few_token_form(tokens: int, k: int, experts: int, *, expert_flops: float = float("inf"), form: str | None = None) -> FormChoice:
    """What `few_token_experts(form=...)` runs for static sizes N, k, E, and why.

    expert_flops: operations of one expert on one token, 6 L F.

    The rule counts bytes of weights, in units of one expert: "gather" reads N k, at two thirds of the rate, "all" E, whatever
    the routing. "all" also does N operations for each byte, so above 128 tokens "slots" takes its place, which does about
    2 N k / E at the price of a sort and of a loop whose end the host must learn; small experts stay with "all" for longer.

    Milliseconds on an H200, bfloat16, 256 experts of 14 MB, k 8, for expert_mlp, gather, all, slots (reading the chosen
    experts once takes 0.09, 0.47, 0.74, 0.76 ms):
      N = 4: 1.41, 0.16, 0.86, 1.06; N = 32: 5.45, 1.03, 0.91, 1.28; N = 128: 8.74, -, 1.11, 1.25; N = 1024: 12.0, -, 7.70, 1.57.
    Command: python experiments/bench/experts_few.py

    Raises:
      ValueError: an unknown form.
    """
    if form is not None:
        if form not in FORMS:
            raise ValueError(f"form={form!r}; known: {', '.join(FORMS)}, or None to choose.")
        return FormChoice(form, "it was named")
    if GATHER_COST * tokens * k < experts:
        return FormChoice("gather", f"{GATHER_COST} x {tokens} tokens x {k} are less than {experts} experts")
    if tokens <= MOST_TOKENS:
        return FormChoice("all", f"{GATHER_COST} x {tokens} tokens x {k} are {experts} experts or more")
    if tokens * experts * expert_flops <= MOST_FLOPS:
        return FormChoice("all", f"{tokens} tokens on all {experts} experts are {tokens * experts * expert_flops:.1e} operations")
    return FormChoice("slots", f"{tokens} tokens are more than {MOST_TOKENS}, and too many operations on every expert")


def _in_rounds(run, rows, x, experts, weights, mask):
    """run(x, experts, weights, mask) on at most `rows` tokens at a time; the last round is filled with masked tokens."""
    N = x.shape[0]
    if rows >= N:
        return run(x, experts, weights, mask)
    rounds = -(-N // rows)
    rows = -(-N // rounds)
    mask = match_varying(jnp.ones((N,), bool), x) if mask is None else mask
    pad = lambda a: jnp.pad(a, ((0, rounds * rows - N), *((0, 0),) * (a.ndim - 1)))
    cut = tuple(pad(a).reshape(rounds, rows, *a.shape[1:]) for a in (x, experts, weights, mask))
    return lax.map(lambda round: run(*round), cut).reshape(rounds * rows, -1)[:N]


def _expert_bytes(matrices, itemsize) -> int:
    """Of one expert, decoded."""
    values = sum(a.size * (2 if isinstance(w, PackedExperts) else 1) for w in matrices for a in jax.tree.leaves(w)[:1])
    return values // num_experts(matrices[0]) * itemsize


def _gather_rows(x, experts, matrices) -> int:
    return max(TEMPORARY_BYTES // (experts.shape[1] * _expert_bytes(matrices, x.dtype.itemsize)), 1)


def _gather(x, experts, weights, _mask, matrices, activation):
    """Each assignment multiplies one row by its own matrices."""
    N, k = experts.shape
    flat, rows = experts.reshape(-1), jnp.repeat(x, k, axis=0)
    hidden = activation(_gathered_product(rows, matrices[0], flat), _gathered_product(rows, matrices[1], flat))
    out = _gathered_product(hidden, matrices[2], flat).reshape(N, k, -1)
    # not column by column, which XLA draws into the product: one token then takes 0.35 ms instead of 0.09
    return jnp.sum(out.astype(weights.dtype) * weights[..., None], axis=1)


def _gathered_product(rows, w, experts):
    """[A,in] by matrices [in,out] of `experts` [A] -> [A,out], as a sum of products: XLA reads the matrices where they lie.

    A batched matmul takes a gathered copy instead, three times the bytes: on an H200, for 32 experts of 66 MB, 1.6 ms against
    0.7 here (0.4 at the card's bandwidth).
    """
    dtype = accumulation_dtype(rows)
    chosen = _decoded(jax.tree.map(lambda a: a[experts], w), rows.dtype)
    return jnp.sum(rows[:, :, None].astype(dtype) * chosen.astype(dtype), axis=1).astype(rows.dtype)


def _all_rows(x, experts, matrices) -> int:
    (F, L), E = _widths(matrices[2]), num_experts(matrices[0])
    return max(TEMPORARY_BYTES // (E * (2 * F + 2 * L) * x.dtype.itemsize), 1)


def _all(x, experts, weights, _mask, matrices, activation):
    """[E,N,L] by [E,L,F], and back; then a token's rows are read. Rows it did not choose may hold anything."""
    N, L = x.shape
    E = num_experts(matrices[0])
    out = _batched(jnp.broadcast_to(x, (E, N, L)), matrices, activation)
    row = experts * N + jnp.arange(N, dtype=jnp.int32)[:, None]
    # XLA on a GPU fuses each column's slice with the weights' own computation: k launches for [N,k] numbers, with the barrier one.
    return _sum(out.reshape(E * N, L), row, barrier_on_cuda(weights))


def slots_per_round(tokens: int, k: int, experts: int) -> int:
    """Twice the mean queue of an expert, as a power of two from LEAST_SLOTS on, at most N."""
    mean = -(-tokens * k // experts)
    return min(max(1 << (2 * mean - 1).bit_length(), LEAST_SLOTS), tokens)


def _slots_rows(x, experts, matrices) -> int:
    """Of N tokens in equal rounds, the most a round that TEMPORARY_BYTES has room for, or 1."""
    (F, L), E, (N, k) = _widths(matrices[2]), num_experts(matrices[0]), experts.shape
    itemsize, wide = x.dtype.itemsize, accumulation_dtype(x).itemsize
    # Of a slot: what goes in and out, gate and up, and the products before they are rounded.
    slot = (2 * F + 2 * L) * itemsize + max(2 * F, L) * (wide - itemsize)
    for rounds in range(1, N + 1):
        rows = -(-N // rounds)
        if E * slots_per_round(rows, k, E) * slot + rows * L * (k * itemsize + wide) <= TEMPORARY_BYTES:
            return rows
    return 1


def _slots(x, experts, weights, mask, matrices, activation):
    """Every expert serves `slots` of its tokens a round. One round does unless the routing is far from even.

    What each assignment gave is kept until all are served, and summed column by column then: summed round by round, the order of a
    token's sum, and so its last bit, would depend on its places in the queues, which are the other tokens' choice.
    """
    (N, L), k, E = x.shape, experts.shape[1], num_experts(matrices[0])
    slots = slots_per_round(N, k, E)
    rows = sort_by_expert(experts, mask, E)
    first = jnp.cumsum(rows.sizes, dtype=jnp.int32) - rows.sizes
    turn = (rows.row - first[experts]).T  # [k,N] place in the expert's queue
    row = experts.T * slots + turn % slots

    def serve(index, kept):
        at = first[:, None] + index * slots + jnp.arange(slots, dtype=jnp.int32)
        token = rows.order[jnp.minimum(at, N * k - 1)] // k  # behind a queue's end: other tokens, whose output nobody reads
        out = _batched(x[token], matrices, activation).reshape(E * slots, L)
        return jnp.where((turn // slots == index)[..., None], out[row], kept)

    zero = match_varying(jnp.zeros((k, N, L), x.dtype), x, experts, weights)
    rounds = -(-rows.sizes.max() // slots)
    kept = lax.fori_loop(jnp.zeros_like(rounds), rounds, serve, zero)
    return _weighted(kept, weights)


def _batched(rows, matrices, activation):
    """rows [E,n,L] through their experts. Packed experts are decoded a group at a time."""

    def through(part):
        rows, matrices = part
        return mlp(rows, *(_decoded(w, rows.dtype) for w in matrices), activation=activation)

    E = rows.shape[0]
    most = max(TEMPORARY_BYTES // _expert_bytes(matrices, rows.dtype.itemsize), 1)
    group = next(g for g in range(min(most, E), 0, -1) if E % g == 0)
    if group == E or not isinstance(matrices[0], PackedExperts):
        return through((rows, matrices))
    parts = jax.tree.map(lambda a: a.reshape(E // group, group, *a.shape[1:]), (rows, matrices))
    return lax.map(through, parts).reshape(rows.shape)


def _widths(w) -> tuple[int, int]:
    """(in, out) of one matrix."""
    if isinstance(w, PackedExperts):
        return 2 * w.codes.shape[2], w.codes.shape[1]
    return w.shape[1], w.shape[2]


def _decoded(w, dtype):
    """[...,in,out] in dtype of an array or PackedExperts, whose rows are outputs."""
    return jnp.swapaxes(mxfp4_decode(*w, dtype=dtype), -1, -2) if isinstance(w, PackedExperts) else w


def _sum(values, row, weights):
    """Rows `row` [N,k] of values times weights [N,k], summed over k in the weights' dtype."""
    return _weighted((values[row[:, column]] for column in range(row.shape[1])), weights)


def _weighted(columns, weights):
    """k arrays [N,L] times weights [N,k], summed one after the other in the weights' dtype."""
    parts = (part.astype(weights.dtype) * weights[:, column, None] for column, part in enumerate(columns))
    return functools.reduce(operator.add, parts)
