"""The engine on a thread of its own, and its answers on the event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .requests import Request, Ticket

logger = logging.getLogger(__name__)


class Token(NamedTuple):
    """A new token."""

    id: int
    log_prob: float
    time: float  # of `time.monotonic`, when the engine handed it out


class End(NamedTuple):
    """The engine is done with a request."""

    reason: str  # "stop", "length", "cancelled", "error"
    error: str | None


class Gone(NamedTuple):
    """The client went away."""


class EngineStopped(RuntimeError):
    """The engine's thread has ended."""


class Job:
    """A request as the event loop sees it: `events` gives `Token`s and then one `End`; `Gone` may come from the connection."""

    def __init__(self, arrived: float) -> None:
        self.events: asyncio.Queue[Token | End | Gone] = asyncio.Queue()
        self.arrived = arrived  # of `time.monotonic`
        self.ticket: Ticket  # the engine's, from `EngineThread.submit` on


class EngineThread:
    """Steps an engine while it has work, and sleeps otherwise.

    All methods but `close` are for the event loop's thread.
    """

    def __init__(self, engine: Any):
        self.engine = engine
        self.stats: dict[str, Any] = engine.stats()
        """As of the last step."""
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        """Called on the event loop when the engine's thread has died of an error."""
        self._jobs: set[Job] = set()
        self._wake = threading.Condition()
        self._work = self._closing = False
        self._out: list[tuple[Job, Token | End]] = []  # of the engine's thread only
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def jobs(self) -> int:
        """Requests that have not ended."""
        return len(self._jobs)

    @property
    def full(self) -> bool:
        """Whether `submit` would find no place in the queue now."""
        return self.engine.stats()["queued"] >= self.engine.max_queue

    def start(self) -> None:
        """On the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, request: Request, *, arrived: float) -> Job:
        """arrived: when the client began to wait, of `time.monotonic`. ValueError and QueueFull as `Engine.submit`; EngineStopped."""
        if self.failure is not None or self._closing:
            raise EngineStopped("the engine has stopped")
        job = Job(arrived)
        job.ticket = self.engine.submit(
            request,
            on_token=lambda ticket, token, log_prob: self._out.append((job, Token(int(token), float(log_prob), time.monotonic()))),
            on_done=lambda ticket: self._out.append((job, End(ticket.finish_reason, ticket.error))),
        )
        self._jobs.add(job)
        self._notify()
        return job

    def cancel(self, job: Job) -> None:
        """Free the job's slot at the next step; nothing happens to one that has ended."""
        if job in self._jobs:
            self.engine.cancel(job.ticket)
            self._notify()

    def cancel_all(self) -> None:
        for job in self._jobs:
            self.cancel(job)

    def close(self) -> None:
        """End the thread after the step that runs. Blocks; call it when no job is left, or after `cancel_all`."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _notify(self) -> None:
        with self._wake:
            self._work = True
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                more = self.engine.step()
                self._flush()
                if more:
                    self._notify()
        except BaseException as error:
            logger.exception("the engine's thread failed")
            self.failure = error
            self._call(self._fail)

    def _wait(self) -> bool:
        """Block until there is work; False: the thread is to end."""
        with self._wake:
            while not (self._work or self._closing):
                self._wake.wait()
            work, self._work = self._work, False
            return work

    def _flush(self) -> None:
        """Hand what a step gave to the event loop: one wake-up for all streams."""
        out, self._out = self._out, []
        self._call(self._deliver, out, self.engine.stats())

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self._closing = True

    def _deliver(self, out: list[tuple[Job, Token | End]], stats: dict[str, Any]) -> None:
        self.stats = stats
        for job, event in out:
            if isinstance(event, End):
                self._jobs.discard(job)
            job.events.put_nowait(event)

    def _fail(self) -> None:
        end = End("error", f"the engine failed: {type(self.failure).__name__}: {self.failure}")
        self._deliver([(job, end) for job in self._jobs], self.stats)
        self.on_failure()
