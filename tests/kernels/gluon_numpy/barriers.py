"""mbarriers: phases, arrivals, bytes still to come."""

import triton.language as tl

from .checks import merge
from .shared import allocate_shared_memory
from .state import KernelError, current, kernel_line
from .values import constant, integer, tensor


class Barrier:
    def __init__(self, count, name):
        self.count = self.pending = count
        self.tx, self.phase, self.name = 0, 0, name
        self.clock, self.arriving = {}, {}  # what a waiter learns; what those who arrived in this phase know

    def update(self, arrive=0, tx=0, clock=None):
        self.pending -= arrive
        self.tx += tx
        merge(self.arriving, clock or {})
        if self.pending < 0:
            raise KernelError(f"{self.name}: more arrivals than its count {self.count}")
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            merge(self.clock, self.arriving)
            self.clock[self.name] = self.phase  # its TMA loads are done
            self.arriving = {}

    def __str__(self):
        return f"{self.name} in phase {self.phase}, {self.pending} of {self.count} arrivals and {self.tx} bytes missing"


def barrier_at(mem) -> Barrier:
    found = current().cta.barriers.get(mem.a.ctypes.data)
    if found is None:
        raise KernelError(f"barrier {mem.name} is not initialised")
    return found


def allocate_mbarrier(batch=None, two_ctas=False):
    return allocate_shared_memory(tl.int64, [1] if batch is None else [integer(batch), 1])


def init(mbarrier, count):
    current().cta.barriers[mbarrier.a.ctypes.data] = Barrier(constant(count), f"barrier {mbarrier.name}")


def invalidate(mbarrier):
    current().cta.poke()
    if barrier_at(mbarrier).tx:
        raise KernelError(f"invalidated: {barrier_at(mbarrier)}")
    del current().cta.barriers[mbarrier.a.ctypes.data]


def expect(mbarrier, bytes_per_cta=None, pred=True):
    current().cta.poke()
    if tensor(pred):
        barrier_at(mbarrier).update(arrive=1, tx=constant(bytes_per_cta), clock=current().clock)


def arrive(mbarrier, *, count=1, pred=True):
    current().cta.poke()
    if tensor(pred):
        barrier_at(mbarrier).update(arrive=constant(count), clock=current().clock)


def wait(mbarrier, phase, pred=True, deps=()):
    cta = current().cta
    cta.poke()
    if not tensor(pred):
        return
    bar, phase = barrier_at(mbarrier), integer(phase)
    if phase not in (0, 1):
        raise KernelError(f"{bar.name}: wait for phase {phase}; only the parities 0 and 1 exist")
    line = kernel_line()
    cta.wait_until(lambda: (bar.phase & 1) != phase, lambda: f"waits at {line} for parity {phase} of {bar}")
    merge(current().clock, bar.clock)
