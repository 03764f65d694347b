"""Transports of an expert exchange: rows of one shard to the shards of their experts, and the results back.

Shapes: A rows of this shard, W width of a row, R shards of the axis, E experts in all, S rows a slot, C = R * S rows that
a shard takes in one round.

Nothing is dropped and memory is bounded, however skewed the routing is: rows travel in rounds, and a round brings at most
C rows to a shard. Its memory and bytes are those of an even routing times SLACK; a routing whose fullest pair ("padded")
or fullest shard ("ragged") holds f times its even share takes ceil(f / SLACK) rounds. The worst case in a single round
would need R * N * min(k, E / R) rows: 52 GB of bfloat16 latents for N = 8192, k = 16, E = 896, R = 64, L = 3584.

"padded": every round is one all_to_all of equal slots, S rows for each pair; also the empty part of a slot is sent.
"ragged": all rows for a shard are numbered by source; a round carries the next C of them in one ragged_all_to_all, which
sends no padding. XLA has it for TPU and GPU, not for CPU.

The first round is straight-line code, so that XLA can run other work while its rows travel; the others are a loop that
most often does not turn.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from moejax.kernels.varying import match_varying

from .dispatch import DispatchPlan, starts

TRANSPORTS = ("ragged", "padded", "gather")
SLACK = 1.25  # a slot over its even share: room for chance; 8192 tokens x 16 over 64 shards vary by 2 % (one sigma)
SLOT_MULTIPLE = 8
UPDATES = {"cuda": 512, "default": 1}
"""Pieces that a shard's rows are cut into for ragged_all_to_all, at least one a pair. XLA's GPU kernel copies a piece with one
thread block: a step of routed experts on 2 H200 takes 354 ms in 2 pieces, 114 in 128, 111 in 512 (experiments/bench/expert_exchange.py)."""


class Route(NamedTuple):
    """What is known when the program is built."""

    axis: Any  # name(s) of the mesh axis
    transport: str | None  # "ragged", "padded", or None: by the platform that is lowered for
    shards: int  # R
    slot: int  # S
    rounds: int  # rounds in the worst case


class Meeting(NamedTuple):
    """What the shards tell each other first."""

    starts: Any  # [R] my first row for each shard
    counts: Any  # [R] my rows for each shard
    arriving: Any  # [R,E/R] rows from each shard for each of my experts
    there: Any  # [R] number of my first row among all rows for that shard ("ragged")
    their_starts: Any  # [R] each shard's first row for me ("ragged")
    rounds: Any  # [] the same on all shards


def plan_route(axis, transport: str | None, assignments: int, most: int, *, one_round: bool = False) -> Route:
    """Route for `assignments` rows a shard of which at most `most` go to one shard; one_round: slots of `most` rows."""
    shards = lax.axis_size(axis)
    slot = most if one_round else slot_rows(assignments, shards, most=most)
    return Route(axis, transport, shards, slot, -(-most // slot))


def slot_rows(assignments: int, shards: int, *, most: int) -> int:
    """Rows of a slot: the even share of `assignments` with slack, at most `most`."""
    return min(-(-math.ceil(SLACK * assignments / shards) // SLOT_MULTIPLE) * SLOT_MULTIPLE, most)


def check_transport(transport: str | None) -> None:
    """Raise ValueError unless it is None or one of TRANSPORTS."""
    if transport is not None and transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: choose one of {', '.join(TRANSPORTS)}, or None for the platform's own.")


def meet(plan: DispatchPlan, route: Route) -> Meeting:
    """Tell every shard how many rows it gets: one all_to_all of E + R numbers, for "ragged" one more of R numbers."""
    counts = jnp.sum(plan.sizes, axis=1, dtype=jnp.int32)
    if route.transport == "ragged":
        counts = _refuse_cpu(counts)
    told = _all_to_all(jnp.concatenate([plan.sizes, plan.starts[:, None]], axis=1), route)
    arriving = told[:, :-1]
    from_each = jnp.sum(arriving, axis=1, dtype=jnp.int32)
    there = _choose(route, lambda x: _all_to_all(starts(x), route), jnp.zeros_like, from_each)
    mean = lambda _, mine: -(-jnp.sum(mine, dtype=jnp.int32) // route.shards)
    fullest = _choose(route, mean, lambda own, _: jnp.max(own), counts, from_each)
    rounds = lax.pmax(-(-fullest // route.slot), route.axis)
    return Meeting(plan.starts, counts, arriving, there, told[:, -1], rounds.astype(jnp.int32))


def for_later_rounds(body, carry, meeting: Meeting, route: Route):
    """body(round, carry) -> carry over the rounds after the first, if any."""
    return carry if route.rounds == 1 else lax.fori_loop(1, meeting.rounds, body, carry)


def send(rows, meeting: Meeting, turn, route: Route):
    """rows [A,W] sorted by owner -> [C,W], this round's rows for my experts; see `arrivals` for what they are."""

    def ragged(rows, meeting):
        return _ragged(rows, _empty(rows, route), _departing(meeting, turn, route), _arriving(meeting, turn, route), route)

    def padded(rows, meeting):
        index = meeting.starts[:, None] + turn * route.slot + jnp.arange(route.slot, dtype=jnp.int32)
        index = jnp.minimum(index.reshape(-1), rows.shape[0] - 1)  # beyond the pair's rows: anything, the owner knows
        return _all_to_all(rows[index], route)

    return _choose(route, ragged, padded, rows, meeting)


def arrivals(meeting: Meeting, turn, route: Route):
    """-> [C] int32: which of my experts each row of the round is for, E / R where there is no row."""

    def ragged(position, _):
        return turn * position.shape[0] + position, jnp.broadcast_to(stops[-1], position.shape)

    def padded(position, meeting):
        source = position // route.slot
        from_each = jnp.sum(meeting.arriving, axis=1, dtype=jnp.int32)
        first = starts(from_each)[source]
        return first + turn * route.slot + position % route.slot, first + from_each[source]

    own = meeting.arriving.shape[1]
    stops = jnp.cumsum(meeting.arriving.reshape(-1), dtype=jnp.int32)
    position = match_varying(jnp.arange(route.shards * route.slot, dtype=jnp.int32), stops)
    number, stop = _choose(route, ragged, padded, position, meeting)
    expert = jnp.searchsorted(stops, number, side="right").astype(jnp.int32) % own
    return jnp.where(number < stop, expert, own)


def send_back(results, into, meeting: Meeting, turn, route: Route):
    """results [C,W] of the rows that `send` brought -> `into` [A,W] with this round's rows written."""

    def ragged(results, into, meeting):
        return _ragged(results, into, _arriving(meeting, turn, route), _departing(meeting, turn, route), route)

    def padded(results, into, meeting):
        back = _all_to_all(results, route)
        row = jnp.arange(into.shape[0], dtype=jnp.int32)
        stops = meeting.starts + meeting.counts
        owner = jnp.minimum(jnp.searchsorted(stops, row, side="right"), route.shards - 1)
        place = row - meeting.starts[owner] - turn * route.slot
        written = (place >= 0) & (place < route.slot) & (row < stops[-1])
        return jnp.where(written[:, None], back[owner * route.slot + jnp.clip(place, 0, route.slot - 1)], into)

    return _choose(route, ragged, padded, results, into, meeting)


def _refuse(*_):
    raise ValueError(
        'transport="ragged" was lowered for a CPU, where XLA has no ragged_all_to_all. Use "padded" or "gather" there, or None: '
        '"padded" on a CPU, "ragged" on TPU and CUDA.'
    )


# The platform is known no earlier than at lowering: this primitive returns its input, or on a CPU raises.
_not_on_cpu = Primitive("ragged_all_to_all_not_on_cpu")
_not_on_cpu.def_impl(lambda x: jax.jit(_refuse_cpu)(x))
_not_on_cpu.def_abstract_eval(lambda x: x)
mlir.register_lowering(_not_on_cpu, lambda _, x: [x])
mlir.register_lowering(_not_on_cpu, _refuse, platform="cpu")


def _refuse_cpu(x):
    return _not_on_cpu.bind(x)


class _Pieces(NamedTuple):
    """One piece of consecutive rows for or from each shard."""

    offset: Any  # [R] in the array here
    size: Any  # [R]
    remote: Any  # [R] in the array there


def _departing(meeting: Meeting, turn, route: Route) -> _Pieces:
    """The part of my rows for each shard whose numbers there lie in this round."""
    first, size, base = _window(meeting.there, meeting.counts, turn, route)
    return _Pieces(meeting.starts + first - meeting.there, size, first - base)


def _arriving(meeting: Meeting, turn, route: Route) -> _Pieces:
    """The part of each shard's rows for me whose numbers lie in this round."""
    from_each = jnp.sum(meeting.arriving, axis=1, dtype=jnp.int32)
    number = starts(from_each)
    first, size, base = _window(number, from_each, turn, route)
    return _Pieces(first - base, size, meeting.their_starts + first - number)


def _window(number, counts, turn, route: Route):
    base = turn * route.shards * route.slot
    first, stop = (jnp.clip(x, base, base + route.shards * route.slot) for x in (number, number + counts))
    return first, stop - first, base


def _ragged(rows, into, leaving: _Pieces, coming: _Pieces, route: Route):
    def run(updates, rows, into, leaving, coming):
        (offset, size, remote), (_, expected, _) = (_cut(pieces, max(1, updates // route.shards)) for pieces in (leaving, coming))
        return lax.ragged_all_to_all(rows, into, offset, size, remote, expected, axis_name=route.axis)

    by_platform = {platform: partial(run, updates) for platform, updates in UPDATES.items()}
    return lax.platform_dependent(rows, into, leaving, coming, **by_platform)


def _cut(pieces: _Pieces, parts: int) -> _Pieces:
    """[R] pieces -> [R * parts], each cut into parts of equal size but for the last ones."""
    step = -(-pieces.size // parts)
    start = jnp.minimum(jnp.arange(parts, dtype=jnp.int32) * step[:, None], pieces.size[:, None])
    size = jnp.minimum(pieces.size[:, None] - start, step[:, None])
    used = size > 0  # offsets of empty pieces may lie outside
    offset, remote = (jnp.where(used, x[:, None] + start, 0) for x in (pieces.offset, pieces.remote))
    return _Pieces(offset.reshape(-1), size.reshape(-1), remote.reshape(-1))


def _empty(rows, route: Route):
    return match_varying(jnp.zeros((route.shards * route.slot, rows.shape[1]), rows.dtype), rows)


def _all_to_all(x, route: Route):
    """[R*n,...] -> [R*n,...]: block i goes to shard i, block i of the result is from shard i."""
    return lax.all_to_all(x, route.axis, 0, 0, tiled=True)


def _choose(route: Route, ragged, padded, *arguments):
    """The transport's function; without a name, that of the platform which is lowered for."""
    if route.transport is None:
        return lax.platform_dependent(*arguments, tpu=ragged, cuda=ragged, cpu=padded)
    return {"ragged": ragged, "padded": padded}[route.transport](*arguments)
