"""The loop around a train step: feeds it, writes its metrics down, saves, and stops cleanly when asked to."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

MAX_SKIPPED = 10  # updates skipped in a row before the run ends: the parameters do not move any more


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
    """state after `step` steps; reason: why the loop ended before its last step, else empty."""

    state: Any
    step: int
    reason: str


def run_loop(
    train_step: Callable[[Any, Any], tuple[Any, dict]],
    state: Any,
    batch_of: Callable[[int], Any],
    *,
    first: int,
    last: int,
    on_metrics: Callable[[int, dict[str, np.ndarray], float], None],
    save: Callable[[int, Any], None],
    save_every: int,
    request: StopRequest,
    deadline: float | None = None,
    before_step: Callable[[int], None] = lambda step: None,
    agree: Callable[[str], str] = lambda reason: reason,
    agree_every: int = 1,
) -> LoopResult:
    """Run steps first + 1 .. last. `batch_of(i)` is the batch after i steps, a pure function.

    on_metrics(step, host metrics, seconds): called once a step in order, one step behind the device, so that fetching
    never stalls it. save(step, state): every `save_every` steps and at the end, after the metrics up to `step` were
    handed over. deadline: `time.monotonic()` past which the loop ends. agree: from this process's reason to end to that of
    all processes, called after every `agree_every` steps; between them nothing ends the loop.
    """
    behind = _OneBehind(on_metrics)
    step, reason, saved = first, "", first
    for step in range(first + 1, last + 1):
        before_step(step)
        state, metrics = train_step(state, batch_of(step - 1))
        behind.push(step, metrics)
        reason = agree(request.reason or behind.problem or _late(deadline)) if step % agree_every == 0 else ""
        if step % save_every == 0 and not reason and step != last:
            behind.flush()
            save(step, state)
            saved = step
            behind.restart_clock()
        if reason:
            break
    behind.flush()
    if step > saved:
        save(step, state)
    return LoopResult(state, step, reason if step < last else "")


class _OneBehind:
    def __init__(self, on_metrics: Callable[[int, dict[str, np.ndarray], float], None]):
        self._on_metrics = on_metrics
        self._pending: tuple[int, dict] | None = None
        self._clock = time.perf_counter()
        self._skipped = 0
        self.problem = ""

    def push(self, step: int, metrics: dict) -> None:
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        host = jax.device_get(metrics)
        now = time.perf_counter()
        self._on_metrics(step, host, now - self._clock)
        self._clock = now
        self._skipped = self._skipped + 1 if host["skipped"] else 0
        if self._skipped >= MAX_SKIPPED:
            self.problem = f"loss or gradient not finite {MAX_SKIPPED} steps in a row (step {step})"

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()


def _late(deadline: float | None) -> str:
    return "the time budget" if deadline is not None and time.monotonic() > deadline else ""
