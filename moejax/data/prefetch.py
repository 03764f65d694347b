"""Batches made ahead in worker processes, by grain (the extra `moejax[data]`); imported only where a stream has workers.

Worker w of W plans every batch and makes batches w, w + W, ... Each batch travels with the position after it, so what the trainer
saves is the position of the batch it was given, however far ahead the workers are.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import Any

import grain
import numpy as np
from absl import flags

Make = Callable[[int, int], Iterator[Any]]  # (worker, workers) -> what that worker makes, in order


class _Share(grain.IterDataset):
    """What one worker makes."""

    def __init__(self, make: Make, worker: int, workers: int):
        super().__init__()
        self._make, self._worker, self._workers = make, worker, workers

    def __iter__(self) -> grain.DatasetIterator:
        return _ShareIterator(self._make(self._worker, self._workers))


class _ShareIterator(grain.DatasetIterator):
    """grain asks for a state with every element; ours is in the element, and a stream that is restored starts new workers."""

    def __init__(self, elements: Iterator[Any]):
        super().__init__()
        self._elements, self._given = elements, 0

    def __next__(self) -> Any:
        element = next(self._elements)
        self._given += 1
        return element

    def get_state(self) -> dict[str, int]:
        return {"given": self._given}

    def set_state(self, state: dict[str, int]) -> None:
        raise NotImplementedError("a prefetching stream is restored by DataStream.restore, which starts new workers")


class Prefetcher:
    """`get()` -> the next element, (arrays by name, state), in the order in which one process would make them all.

    Workers stop when what they made is not taken: `ahead` elements wait here (at least one for each worker), and up to five more a
    worker are in grain's queues or in hand. An exception of a worker is raised by `get` in its turn. `depth()`: elements that wait here.
    """

    def __init__(self, make: Make, *, workers: int, ahead: int):
        if not flags.FLAGS.is_parsed():  # grain reads its own flags, which absl refuses before a program has parsed any
            flags.FLAGS.mark_as_parsed()
        options = grain.multiprocessing.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=1)
        self._stop = threading.Event()
        self._queues: list[queue.Queue[tuple[str, Any]]] = [queue.Queue(maxsize=-(-ahead // workers)) for _ in range(workers)]
        self._turn, self._last = 0, None
        self._threads = []
        for worker, ready in enumerate(self._queues):
            share = iter(_Share(make, worker, workers).mp_prefetch(options, worker_init_fn=_ignore_signals))
            # The threads must not hold this object, or it would never be collected and its workers never stop.
            arguments = (share, ready, self._stop)
            self._threads.append(threading.Thread(target=_collect, args=arguments, daemon=True, name=f"moejax-prefetch-{worker}"))
            self._threads[-1].start()
        # At exit too, and before grain's own finalizers (priority 1), which would close the same iterators at the same time.
        self._at_exit = util.Finalize(None, _stop_all, args=(self._stop, self._threads), exitpriority=10)

    def get(self) -> Any:
        if self._last is not None:
            raise self._last
        kind, value = self._queues[self._turn].get()
        self._turn = (self._turn + 1) % len(self._queues)
        if kind == "element":
            return value
        self._last = value
        raise value

    def depth(self) -> int:
        return sum(ready.qsize() for ready in self._queues)

    def close(self) -> None:
        """Stop the workers; waits for the batches they are at."""
        self._at_exit()

    def __del__(self):
        if hasattr(self, "_stop"):
            self._stop.set()


def _ignore_signals(worker: int, workers: int) -> None:
    """A terminal and a scheduler send their signals to the whole group; the run ends by itself and needs batches until then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _stop_all(stop: threading.Event, threads: list[threading.Thread]) -> None:
    stop.set()
    for thread in threads:
        thread.join(timeout=30)  # a worker that hangs in its source must not keep the program from ending


def _collect(share: Any, ready: queue.Queue, stop: threading.Event) -> None:
    """Elements of one worker until it ends or fails, or the stop is asked for."""
    try:
        while not stop.is_set():
            try:
                batch, state = next(share)
                # grain hands over views of shared memory; copies are freed like any array, and the shared memory now.
                item = "element", ({name: np.array(array) for name, array in batch.items()}, state)
                del batch
            except Exception as error:  # StopIteration too: the end comes in its turn
                item = "end", error
            _put(ready, item, stop)
            if item[0] == "end":
                break
    finally:
        share.close()


def _put(ready: queue.Queue, item: tuple[str, Any], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            return ready.put(item, timeout=0.1)
        except queue.Full:
            continue
