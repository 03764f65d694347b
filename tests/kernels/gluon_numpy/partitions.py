"""One program: its asynchronous work and its partitions, which are threads that take turns (exactly one runs at a time), so that a deadlock
is found at once and every run of a seed is the same."""

import random
import threading

import numpy as np

from .checks import known, merge
from .state import Abort, KernelError, State, current, local
from .values import Tensor, constant


class Cta:
    """One program. Asynchronous work is a thunk in one of the queues; running it makes its effect visible."""

    def __init__(self, ids, grid, rng: random.Random, delay, fence, race):
        self.ids, self.grid, self.rng = ids, grid, rng
        self.delay, self.fence, self.race = delay, fence, race
        # how readily pending work happens before its wait: from never to at once, another value for every program
        self.early = rng.choice([0.0, 0.03, 0.2, 0.6])
        self.roots, self.barriers, self.loads, self.unfenced, self.log = [], {}, [], [], []
        self.parts, self.error = [], None

    def run_one(self, signalling=False):
        """Lets one piece of pending asynchronous work happen (only of the kinds that signal barriers); False when there is none."""
        heads = [(self.loads, self.rng.randrange(len(self.loads)))] if self.loads else []
        for p in self.parts:
            heads += [(p.queues[kind], 0) for kind in (("cp",) if signalling else p.queues) if p.queues[kind]]
        if not heads:
            return False
        queue, i = self.rng.choice(heads)
        queue.pop(i)()
        return True

    def poke(self):
        """A moment at which the hardware may do anything that is pending, and another partition may run."""
        if not self.delay:
            return
        while self.rng.random() < self.early:
            if not self.run_one():
                break
        if len(self.parts) > 1 and self.rng.random() < 0.5:
            self._hand_over()

    def _hand_over(self):
        """Lets another partition run until it hands back; False when none can."""
        me = current()
        others = [p for p in self.parts if p is not me and not p.done and (p.ready is None or p.ready())]
        if not others:
            return False
        (self.rng.choice(others) if self.delay else others[0]).go.release()
        if not me.done:
            me.go.acquire()
            if self.error is not None:
                raise Abort
        return True

    def _deadlock(self):
        lines = [f"  partition {p.name}: {p.waits_for()}" for p in self.parts if not p.done]
        return KernelError("deadlock: nothing can go on\n" + "\n".join(lines))

    def wait_until(self, ready, what):
        """Blocks the running partition until ready(); an error when nothing can make that happen. what(): says what it waits for."""
        me = current()
        me.ready, me.waits_for = ready, what
        while not ready():
            hurry = self.delay and self.rng.random() < self.early and self.run_one()
            if not hurry and not self._hand_over() and not self.run_one(signalling=True):
                raise self._deadlock()
        me.ready = None

    def finish_partition(self):
        current().done = True
        while not all(p.done for p in self.parts):
            if self._hand_over():
                return
            if not self.run_one(signalling=True):
                raise self._deadlock()

    def fail(self, error):
        """The first error of a partition ends all."""
        if self.error is None:
            self.error = error
        if not isinstance(error, Abort):
            for p in self.parts:
                if p is not current() and not p.done:
                    p.go.release()


def later(queue, thunk):
    if current().cta.delay:
        queue.append(thunk)
        current().cta.poke()
    else:
        thunk()


def drain(queue, left=0):
    while len(queue) > left:
        queue.pop(0)()


def complete(kind, left):
    """The wait of a partition for all but the last `left` pieces of its own work."""
    st, left = current(), constant(left)
    st.cta.poke()
    drain(st.queues[kind], left)
    known(st, kind, left)


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    main = current()
    cta = main.cta
    if len(cta.parts) > 1:
        raise KernelError("warp_specialize inside warp_specialize")
    threads = []
    for i, ((fn, args), warps) in enumerate(zip(functions_and_args[1:], worker_num_warps, strict=True), 1):
        part = State(cta, main.gluon, main.finite, constant(warps))
        part.id, part.name, part.clock = i, f"{i} ({fn.__name__})", dict(main.clock)
        if any(isinstance(a, Tensor) and a.a.ndim for a in args):
            raise KernelError(f"partition {part.name}: only scalars and shared memory can be passed to a worker")
        cta.parts.append(part)
        threads.append(threading.Thread(target=_worker, args=(cta, part, fn, args), daemon=True))
    fn, args = functions_and_args[0]
    main.name = f"0 ({fn.__name__})"
    for t in threads:
        t.start()
    try:
        result = fn(*args)
        cta.wait_until(lambda: all(p.done for p in cta.parts if p is not main), lambda: "waits for the other partitions")
    except BaseException as e:
        cta.fail(e)
        if isinstance(e, Abort):
            raise cta.error from None
        raise
    finally:
        for t in threads:
            t.join(20)
        for p in cta.parts[1:]:
            merge(main.clock, p.clock)
            for kind, queue in p.queues.items():  # stores still in flight land before the kernel ends, wgmma are an error there
                main.queues[kind] += queue
        del cta.parts[1:]
    return result


def _worker(cta, part, fn, args):
    part.go.acquire()
    local.state = part
    try:
        if cta.error is None:
            with np.errstate(all="ignore"):
                fn(*args)
                cta.finish_partition()
    except BaseException as e:
        cta.fail(e)
    part.done = True
