"""Where the time of a run went: the share that moved training forward, and what took the rest.

Goodput is productive step time / wall time, from the start of the first process to now, restarts and the time between them included;
the rest, badput, is split by cause (the definition of MaxText's page "ML workload diagnostics: goodput", and of ml-goodput-measurement:
steps whose progress was lost in a disruption are not productive, however well they ran).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

GOODPUT_VERSION = 1  # of the saved state's layout
BADPUT = {
    "start": "starting: process, imports, devices, text",
    "restore": "restoring checkpoints",
    "compile": "compiling (the first step with it)",
    "data": "waiting for data",
    "checkpoint": "saving checkpoints",
    "evaluation": "scoring held-out data",
    "skipped": "steps whose update was skipped",
    "rollback_lost": "steps lost to rollbacks and crashes",
    "stall": "stalls",
    "down": "between two processes",
    "other": "anything else",
}
PHASES = ("start", "restore", "compile", "data", "checkpoint", "evaluation", "other")
MARKS = 64  # saves whose productive time is remembered


class Goodput:
    """A ledger of the run's time. Every second since the process began is booked once: on a phase, a step, or a cause.

    Outside phases time counts as "start" until `begin`, then for the step that ends next, and after `finish` as "other".
    One thread keeps it. The state is for a file of its own, written every few steps (`write`): a crash loses what came after the last
    checkpoint, and only a record newer than that checkpoint knows how much.

    Args:
      process_start: UTC seconds at which this process began (`process_started()`); None: now. What lies before now is "start".
      clock: seconds that never go back. utc: UTC seconds, for the time between processes.
    """

    def __init__(
        self,
        *,
        process_start: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        utc: Callable[[], float] = time.time,
    ):
        self._clock, self._utc = clock, utc
        self._mark = clock()  # everything before is booked
        now = utc()
        self._process_start = now if process_start is None else min(process_start, now)
        self._seconds = dict.fromkeys(("productive", *BADPUT), 0.0)
        self._seconds["start"] = now - self._process_start
        self._began = self._mark - self._seconds["start"]  # on `clock`
        self._phases: list[str] = []
        self._base = "start"  # what time outside phases counts as; "step": for the step that ends next
        self._open = 0.0  # seconds for the step that ends next
        self._step = 0
        self._productive_steps = 0  # lost ones are taken off
        self._lost_steps = 0
        self._marks: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # step saved -> productive seconds and steps then
        self._restarts = 0
        self._failure: dict[str, float] | None = None  # a recovery under way
        self._recoveries: list[dict[str, float]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time within counts as `name`, one of PHASES; nested, as the inner one."""
        if name not in PHASES:
            raise ValueError(f"{name!r} is no phase; it must be one of {', '.join(PHASES)}.")
        self._book()
        self._phases.append(name)
        try:
            yield
        finally:
            self._book()
            self._phases.pop()

    def begin(self) -> None:
        """Training begins: time outside phases is the next step's from here on. The first `step` does the same at its end."""
        self._book()
        self._base = "step"

    def step(self, step: int, *, data_wait: float = 0.0, stall: float = 0.0, skipped: bool = False) -> None:
        """Step number `step` has ended. The time outside phases since the last one is its own.

        data_wait, stall: seconds of that time spent so, not more than there are (time in a "data" phase is not given again here).
        skipped: its update was skipped, so that its time was not productive.
        """
        self.begin()
        rest = self._open
        for name, given in (("stall", stall), ("data", data_wait)):
            part = min(max(given, 0.0), rest)
            self._seconds[name] += part
            rest -= part
        self._seconds["skipped" if skipped else "productive"] += rest
        self._open = 0.0
        self._productive_steps += not skipped
        self._step = step
        if self._failure is not None and step > self._failure["from"] and not skipped:
            self._recoveries.append(self._failure | {"seconds": self._clock() - self._failure["began"]})
            del self._recoveries[-1]["began"]
            self._failure = None

    def saved(self, step: int) -> None:
        """The state after `step` can be returned to, from disk or memory."""
        self._book()
        self._marks.pop(step, None)
        self._marks[step] = self._seconds["productive"], self._productive_steps
        while len(self._marks) > MARKS:
            self._marks.pop(next(iter(self._marks)))

    def failed(self) -> None:
        """A failure was noticed: the time to recover runs from here (without a call: from `rolled_back`, or the process's start)."""
        self._book()
        if self._failure is None:
            self._failure = {"from": self._step, "began": self._clock()}

    def rolled_back(self, to: int) -> None:
        """The run has gone back to the state after `to`; the productive time of the later steps was lost."""
        self._book()
        self.failed()
        self._lose(to)

    def finish(self) -> None:
        """The last step is done; what follows is no step's."""
        self._book()
        self._base = "other"
        self._seconds["other"] += self._open
        self._open = 0.0

    def figures(self) -> dict[str, Any]:
        """{"wall", "goodput", "seconds": {"productive" and each badput}, "steps", "lost_steps", "restarts", "recoveries"}.

        The seconds sum to the wall time. A recovery: "seconds" from the failure, or the process's start, to the first productive step
        beyond the "from" that was lost; "lost_steps"; after a restart "down" seconds before the process began.
        """
        self._book()
        seconds = dict(self._seconds)
        seconds["other"] += self._open  # of a step that has not ended
        wall = sum(seconds.values())
        return {
            "wall": wall,
            "goodput": seconds["productive"] / wall if wall else 0.0,
            "seconds": seconds,
            "steps": self._productive_steps,
            "lost_steps": self._lost_steps,
            "restarts": self._restarts,
            "recoveries": [dict(recovery) for recovery in self._recoveries],
        }

    def report(self) -> list[str]:
        """Lines for a person."""
        f = self.figures()
        wall = f["wall"]
        lines = [f"Goodput: {f['goodput']:.1%} of {wall:,.0f} s ({f['steps']} steps that count, {f['restarts']} restarts)"]
        parts = sorted(((f["seconds"][name], name) for name in BADPUT), reverse=True)
        lines += [f"  {s:10,.1f} s {s / wall:6.1%}  {BADPUT[name]}" for s, name in parts if s > 0 and wall]
        for r in f["recoveries"]:
            down = f" (and {r['down']:,.1f} s between the processes)" if "down" in r else ""
            lines.append(f"  recovery in {r['seconds']:,.1f} s{down}: {r['lost_steps']:.0f} steps lost, up to step {r['from']:.0f}")
        return lines

    def state(self) -> dict[str, Any]:
        """Strict JSON; with the UTC time, so that the next process knows how long nothing ran."""
        self._book()
        figures = self.figures()
        failure = None if self._failure is None else {**self._failure, "began": self._clock() - self._failure["began"]}
        return {
            "version": GOODPUT_VERSION,
            "utc": self._utc(),
            "step": self._step,
            "seconds": figures["seconds"],
            "productive_steps": self._productive_steps,
            "lost_steps": self._lost_steps,
            "marks": [[step, *mark] for step, mark in self._marks.items()],
            "restarts": self._restarts,
            "failure": failure,
            "recoveries": figures["recoveries"],
        }

    def restore(self, state: dict[str, Any], *, step: int) -> None:
        """Go on in a new process from `state()` of an earlier one; `step`: the checkpoint this one resumes from.

        Call it once, before the first step. The time from the last record to this process's start is "down", and steps that the record
        knows and the checkpoint does not are lost.

        Raises:
          ValueError: another layout, or a ledger that has steps already.
        """
        if state.get("version") != GOODPUT_VERSION:
            raise ValueError(
                f"the saved goodput has layout {state.get('version')}; this program's is {GOODPUT_VERSION}. Start without it: the "
                "time before is then not counted."
            )
        if self._step or self._restarts:
            raise ValueError("this ledger has begun already; restore once, before the first step.")
        self._book()
        down = max(self._process_start - float(state["utc"]), 0.0)
        # Clocks that disagree must not count a second twice: the overlap is taken from the start, which is the later record.
        overlap = min(max(float(state["utc"]) - self._process_start, 0.0), self._seconds["start"])
        self._seconds["start"] -= overlap
        for name, seconds in state["seconds"].items():
            self._seconds[name] += float(seconds)
        self._seconds["down"] += down
        self._step = int(state["step"])
        self._productive_steps, self._lost_steps = int(state["productive_steps"]), int(state["lost_steps"])
        self._marks = {int(at): (float(seconds), int(steps)) for at, seconds, steps in state["marks"]}
        self._restarts = int(state["restarts"]) + 1
        self._recoveries = [dict(recovery) for recovery in state["recoveries"]]
        before = state["failure"] or {"from": step}  # a recovery that the last process did not live to end
        self._failure = {
            "from": max(self._step, step, before["from"]),
            "lost_steps": before.get("lost_steps", 0),
            "began": self._began,
            "down": down + before.get("down", 0.0),
        }
        self._lose(step)

    def write(self, path: str | os.PathLike) -> None:
        """Replace the file `path` by the state: whole or not at all."""
        path = pathlib.Path(path)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.state(), allow_nan=False))
        part.replace(path)

    def _lose(self, to: int) -> None:
        """Move the productive time of the steps after `to` to rollback_lost, and the time of a step that will not end."""
        lost = max(self._step - to, 0)
        productive, steps = self._seconds["productive"], self._productive_steps
        if lost and to in self._marks:
            kept, kept_steps = self._marks[to]
        elif lost:  # saved before the marks that are kept: by the mean step
            kept_steps = max(steps - lost, 0)
            kept = productive * kept_steps / max(steps, 1)
        else:
            kept, kept_steps = productive, steps
        self._seconds["productive"], self._productive_steps = kept, kept_steps
        self._seconds["rollback_lost"] += productive - kept + self._open
        self._open = 0.0
        self._lost_steps += lost
        self._marks = {at: mark for at, mark in self._marks.items() if at < to} | {to: (kept, kept_steps)}
        if self._failure is not None:
            self._failure["lost_steps"] = self._failure.get("lost_steps", 0) + lost
        self._step = to

    def _book(self) -> None:
        now = self._clock()
        passed, self._mark = max(now - self._mark, 0.0), max(now, self._mark)
        if self._phases:
            self._seconds[self._phases[-1]] += passed
        elif self._base == "step":
            self._open += passed
        else:
            self._seconds[self._base] += passed


def read_goodput(path: str | os.PathLike) -> dict[str, Any] | None:
    """What `Goodput.write` wrote; None without a file."""
    path = pathlib.Path(path)
    return json.loads(path.read_text()) if path.exists() else None


def process_started() -> float:
    """UTC seconds at which this process began, by the kernel's books (to 0.01 s); where there are none, now."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ago = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.time()
    return time.time() - max(ago, 0.0)
