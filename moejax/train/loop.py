"""The loop around a train step: feeds it, has its metrics judged and its state kept, goes back, and stops cleanly when asked to."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np


@dataclasses.dataclass
class StopRequest:
    """Why the run should end early; empty while it should go on."""

    reason: str = ""


@contextlib.contextmanager
def stop_on_signals(announce: Callable[[str], None]) -> Iterator[StopRequest]:
    """Within: the first SIGINT or SIGTERM asks for a clean end, a second one aborts with KeyboardInterrupt."""
    request = StopRequest()

    def handle(number: int, frame: Any) -> None:
        name = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[signal.Signals(number)]
        if request.reason:
            raise KeyboardInterrupt
        request.reason = name
        # In a thread of its own: the handler may have cut into a print, which a console would then repeat.
        text = f"{name}: ending after this step with a checkpoint and a summary; once more to abort"
        threading.Thread(target=announce, args=(text,)).start()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclasses.dataclass(frozen=True)
class LoopResult:
    """state after `step` steps, data: the position in the data then; reason: why the loop ended before its last step, else empty."""

    state: Any
    step: int
    data: Any
    reason: str


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, as the host sees them: seconds from one step's end to the next, of which data_wait were spent in `next`."""

    seconds: float
    data_wait: float


class Caretaker(Protocol):
    """What the loop asks while it runs. Every process of a run gets the same answers."""

    def check(self) -> None:
        """Before each step: raises what went wrong in the background."""
        ...

    def observe(self, step: int, metrics: dict[str, np.ndarray], times: StepTimes) -> str:
        """The host metrics of `step`, in order, one step behind the device. -> "go", "rollback" or "stop"."""
        ...

    def due(self, step: int) -> bool:
        """Whether `keep` wants the state after `step`."""
        ...

    def keep(self, step: int, state: Any, data: Any) -> None:
        """Save or copy the state after `step`, whose metrics were observed; data: the position after its batch."""
        ...

    def roll_back(self, data: Any) -> tuple[Any, int] | None:
        """After "rollback": -> (state, step) to go on from with the data after `data`, or None to end the run."""
        ...

    @property
    def reason(self) -> str:
        """Why it said "stop", or returned None."""
        ...


def run_loop(
    train_step: Callable[[Any, Any], tuple[Any, dict]],
    state: Any,
    batches: Iterator[tuple[Any, Any]],
    caretaker: Caretaker,
    *,
    first: int,
    last: int,
    data: Any,
    request: StopRequest,
    deadline: float | None = None,
    before_step: Callable[[int], None] = lambda step: None,
    agree: Callable[[str], str] = lambda reason: reason,
    agree_every: int = 1,
) -> LoopResult:
    """Run steps first + 1 .. last; a rollback takes the number of the step back, never the data.

    batches: (batch, the position in the data after it); its end ends the run. data: the position before the first. deadline:
    `time.monotonic()` past which the loop ends. agree: from this process's reason to end to that of all processes, called after every
    `agree_every` steps; between them no request ends the loop. The state at the end is not kept here.
    """
    behind = _OneBehind(caretaker.observe)
    step, reason = first, ""
    while step < last and not reason:
        caretaker.check()
        before_step(step + 1)
        started = time.perf_counter()
        try:
            batch, data = next(batches)
        except StopIteration:
            reason = "the end of the data"
            break
        waited = time.perf_counter() - started
        step += 1
        state, metrics = train_step(state, batch)
        verdict = behind.push(step, metrics, waited)
        if step % agree_every == 0:
            reason = agree(request.reason or _late(deadline))
        if verdict == "go" and (caretaker.due(step) or reason or step == last):
            verdict = behind.flush()
            if verdict == "go" and caretaker.due(step):
                caretaker.keep(step, state, data)
                behind.restart_clock()
        if verdict == "rollback":
            behind.drop()
            back = caretaker.roll_back(data)
            if back is None:
                return LoopResult(state, step, data, caretaker.reason)
            state, step = back
            reason = ""  # asked again after the next step: this one is on the disk already
            behind.restart_clock()
        elif verdict == "stop":
            reason = caretaker.reason
    if behind.flush() != "go" and not reason:
        reason = caretaker.reason
    return LoopResult(state, step, data, reason if step < last else "")


class _OneBehind:
    def __init__(self, observe: Callable[[int, dict[str, np.ndarray], StepTimes], str]):
        self._observe = observe
        self._pending: tuple[int, dict, float] | None = None
        self._clock = time.perf_counter()

    def push(self, step: int, metrics: dict, waited: float) -> str:
        """-> the verdict on the step before."""
        verdict = self.flush()
        self._pending = (step, metrics, waited)
        return verdict

    def flush(self) -> str:
        if self._pending is None:
            return "go"
        step, metrics, waited = self._pending
        self._pending = None
        host = jax.device_get(metrics)
        now = time.perf_counter()
        times = StepTimes(now - self._clock, waited)
        self._clock = now
        return self._observe(step, host, times)

    def drop(self) -> None:
        """Forget a step that was given up."""
        self._pending = None

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()


def _late(deadline: float | None) -> str:
    return "the time budget" if deadline is not None and time.monotonic() > deadline else ""
