"""Races on shared memory and missing fences.

Every partition and each of its in-order actors (plain code, wgmma, TMA stores, cp.async) counts its steps; a partition's clock says which
steps of which actors have happened before now. Barriers and waits hand clocks on.
"""

from collections import namedtuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from .state import KernelError, current, kernel_line


def merge(into, other):
    for actor, step in other.items():
        if into.get(actor, 0) < step:
            into[actor] = step


def next_step(st, kind):
    """-> actor, its next step"""
    st.steps[kind] += 1
    return (st.id, kind), st.steps[kind]


def plain_step(st):
    actor, step = next_step(st, "plain")
    st.clock[actor] = step
    return actor, step


def known(st, kind, left=0):
    """The partition now knows that all but the last `left` steps of its actor are done."""
    merge(st.clock, {(st.id, kind): st.steps[kind] - left})


# One use of shared memory (the array a, bytes lo to hi) that later uses must be ordered after.
_Access = namedtuple("_Access", "a lo hi write actor step what line")


def touch(mem, write, what, actor=None, step=0):
    """Race check: every earlier use of these bytes (with a write among the two) must be known to have happened before.

    actor and step name who does it; without, the partition itself, whose plain steps are in order.
    """
    st = current()
    if not st.cta.race:
        return
    lo, hi = byte_bounds(mem.a)
    dense = mem.a.nbytes == hi - lo
    if actor is None:
        actor, step = plain_step(st)
    keep = []
    for e in st.cta.log:
        if e.lo < hi and lo < e.hi:
            ordered = st.clock.get(e.actor, 0) >= e.step
            if not ordered and (write or e.write) and _overlap(e.a, mem.a):
                raise KernelError(
                    f"race on {mem.name}: {what} at {kernel_line()} is not ordered after {e.what} at {e.line} "
                    "(no barrier or wait between them)"
                )
            if ordered and dense and lo <= e.lo and e.hi <= hi and (write or (not e.write and e.actor == actor)):
                continue
        keep.append(e)
    st.cta.log = [*keep, _Access(mem.a, lo, hi, write, actor, step, what, kernel_line())]


def _overlap(a, b):
    try:
        return np.shares_memory(a, b, max_work=10**5)
    except np.exceptions.TooHardError:
        return False


def generic_write(a, actor=None, step=0):
    """A write that TMA stores and wgmma see only after fence_async_shared()."""
    st = current()
    if st.cta.fence:
        if actor is None:
            actor, step = plain_step(st)
        st.cta.unfenced.append((a, kernel_line(), actor, step))


def check_fence(mem, what):
    for a, line, _actor, _step in current().cta.unfenced:
        if np.may_share_memory(a, mem.a) and _overlap(a, mem.a):
            raise KernelError(f"{what} of {mem.name} reads what {line} stored, without fence_async_shared() between")


def fence_async_shared(cluster=False):
    st = current()
    st.cta.poke()
    st.cta.unfenced = [e for e in st.cta.unfenced if st.clock.get(e[2], 0) < e[3]]  # those not yet known here stay
