"""A thread that notices when no step ends any more, and writes down where every thread stands.

A run on many machines hangs in a collective call when one of them is lost: no error, no log line. The record of all stacks says which
call; ending the process lets the scheduler start the job again.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import math
import os
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from .events import Event, Record

STALL_STATUS = 75  # EX_TEMPFAIL of sysexits.h: trying again may help
REPORT_SECONDS = 30.0  # for writing stacks and event before an abort: a file system may be what hangs


class Watchdog:
    """Watches from `with` to its end that `step_done` comes in time.

    The limit is max(factor x median step time, floor_s); within `busy` the limit that was given there. Past it: one "stall" event
    with the stacks of all threads in `stacks`, then silence until a step ends ("stall_cleared"), or the end of the process.

    Args:
      stacks: file to append stacks to.
      record: takes the events; it is called from another thread, with `EventLog.record` as from any.
      factor, floor_s: see above; floor_s in seconds, which also holds before the first step.
      abort: end the process with status 75 once the stacks are written (os._exit: no clean-up, which could hang as well).
      poll_s: seconds between looks; None: a twentieth of floor_s, at least 0.05 and at most 10.
      clock, exit: for tests.

    Limits: it is a Python thread; code that holds the interpreter's lock while it hangs holds the watchdog too.

    Raises:
      ValueError: factor or floor_s not positive (factor at least 1).
    """

    def __init__(
        self,
        stacks: str | os.PathLike,
        record: Record,
        *,
        factor: float = 5.0,
        floor_s: float = 300.0,
        abort: bool = False,
        poll_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        exit: Callable[[int], object] = os._exit,
    ):
        if not (math.isfinite(factor) and factor >= 1):
            raise ValueError(f"factor is {factor}; a stall is at least 1 median step time: 5 is usual.")
        if not (math.isfinite(floor_s) and floor_s > 0):
            raise ValueError(f"floor_s is {floor_s}; it must be positive seconds. Without a watchdog, make none.")
        if poll_s is not None and not poll_s > 0:
            raise ValueError(f"poll_s is {poll_s}; it must be positive seconds.")
        self.stacks, self._record = pathlib.Path(stacks), record
        self.factor, self.floor_s, self.abort = factor, floor_s, abort
        self._poll = min(max(floor_s / 20, 0.05), 10.0) if poll_s is None else poll_s
        self._clock, self._exit = clock, exit
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = 0
        self._since = clock()  # the last sign of life
        self._seconds: collections.deque[float] = collections.deque(maxlen=64)  # of the last steps
        self._phases: list[tuple[str, float]] = []
        self._reported = False
        self.stalls = 0
        self.stalled_s = 0.0
        """Seconds of all stalls that ended, from the last sign of life on."""

    def step_done(self, step: int) -> None:
        """After every step; under a microsecond."""
        with self._lock:
            now = self._clock()
            if not self._phases and self._step:
                self._seconds.append(now - self._since)
            self._step = step
            ended = self._alive(now)
        if ended:
            self._record(ended)

    @contextlib.contextmanager
    def busy(self, name: str, limit_s: float) -> Iterator[None]:
        """Within, no step is expected for up to `limit_s` seconds: compiling, saving, scoring. Its time counts for no step.

        Nested, the inner limit holds; the clock starts anew at each begin and end.
        """
        if not (math.isfinite(limit_s) and limit_s > 0):
            raise ValueError(f"limit_s of {name!r} is {limit_s}; it must be positive seconds.")
        self._turn(lambda: self._phases.append((name, limit_s)))
        try:
            yield
        finally:
            self._turn(self._phases.pop)

    def limit(self) -> float:
        """Seconds without a sign of life that are a stall now."""
        with self._lock:
            return self._limit()

    def check(self) -> Event | None:
        """Look once; the thread does this. -> the "stall" event if one has begun since the last look."""
        with self._lock:
            waited, limit = self._clock() - self._since, self._limit()
            if self._reported or waited <= limit:
                return None
            self._reported = True
            self.stalls += 1
            event: Event = {
                "event": "stall",
                "step": self._step,
                "seconds": waited,
                "limit": limit,
                "phase": self._phases[-1][0] if self._phases else "step",
                "stacks": str(self.stacks),
                "abort": self.abort,
            }
        # In a thread of its own: the disk that hangs the run hangs this as well, and must not keep the process from ending.
        report = threading.Thread(target=self._report, args=(event,), name="stall report", daemon=True)
        report.start()
        report.join(REPORT_SECONDS)
        if self.abort:
            self._exit(STALL_STATUS)
        return event

    def __enter__(self) -> Watchdog:
        if self._thread is not None:
            raise RuntimeError("this watchdog has been started before; make a new one.")
        self._since = self._clock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(self._poll + 1.0)

    def _watch(self) -> None:
        while not self._end.wait(self._poll):
            self.check()

    def _limit(self) -> float:
        if self._phases:
            return self._phases[-1][1]
        return max(self.factor * statistics.median(self._seconds), self.floor_s) if self._seconds else self.floor_s

    def _turn(self, change: Callable[[], object]) -> None:
        """Begin or end a phase. The part of a step before it and after it is not a step's time either."""
        with self._lock:
            change()
            ended = self._alive(self._clock())
        if ended:
            self._record(ended)

    def _alive(self, now: float) -> Event | None:
        waited, self._since = now - self._since, now
        if not self._reported:
            return None
        self._reported = False
        self.stalled_s += waited
        return {"event": "stall_cleared", "step": self._step, "seconds": waited}

    def _report(self, event: Event) -> None:
        try:
            with self.stacks.open("a") as file:
                moment = datetime.now(UTC).isoformat(timespec="seconds")
                file.write(
                    f"\n{moment} no sign of life for {event['seconds']:.1f} s (limit {event['limit']:.1f} s) in {event['phase']!r} "
                    f"after step {event['step']}, process {os.getpid()}\n"
                )
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            event = event | {"stacks_error": str(error)}
        self._record(event)
