"""What keeps a training run alive: alarms, rollback, checkpoints and snapshots, events, the stall watchdog, goodput; asked by the loop.

All decisions follow from values that every process has, so that all processes of a run take them alike.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..parallel.agreement import text_of_any, text_of_first
from .alarms import MonitorConfig, Monitors
from .checkpoint import Checkpointer
from .checkpoint_files import write_json_durably
from .events import Event
from .goodput import Goodput, process_started, read_goodput
from .loop import StepTimes
from .recovery import Recovery, Stop, roll_back
from .retention import kept
from .snapshot import Snapshots
from .watchdog import Watchdog

MINUTES_EVERY = 10  # steps between looks at the clock when several processes must agree on the time
GOODPUT_EVERY = 10  # steps between writes of the ledger: a small file


@dataclasses.dataclass(frozen=True)
class SafetyConfig:
    """How a run is kept alive. None of it changes the numbers of a run in which nothing goes wrong."""

    checkpoint_minutes: float | None = None
    """Also save when so many minutes passed since the last checkpoint."""
    keep: int = 2
    """Newest checkpoints that stay; the known good one stays besides."""
    snapshot_every: int | None = None
    """Steps between copies of the state in host memory, to which a rollback returns first. Two are held, three while one is taken.
    None: no copies."""
    promote_after: int | None = None
    """Healthy steps after which a checkpoint is known good. None: 50, or all that a checkpoint lives for where that is less."""
    max_rollbacks: int = 3
    """Rollbacks without progress before the run ends."""
    replay_every: int | None = None
    """Steps between two that are run twice and compared bit for bit (hardware that computes wrongly). None: never."""
    stall_seconds: float = 300.0
    """Without a step for so long, and for 5 median steps, the stacks of all threads are written down."""
    stall_abort: bool = False
    """End the process with status 75 when it stalls, for a scheduler that starts it again."""
    monitors: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
    """Thresholds of the alarms."""

    def __post_init__(self) -> None:
        for name in ("snapshot_every", "replay_every", "promote_after"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--safety.{name.replace('_', '-')} is {value}; it must be at least 1, or None.")
        if self.keep < 1:
            raise ValueError(f"--safety.keep is {self.keep}; it must be at least 1.")
        if self.max_rollbacks < 0:
            raise ValueError(f"--safety.max-rollbacks is {self.max_rollbacks}; it must be 0 (the first failure ends the run) or more.")
        if self.checkpoint_minutes is not None and not self.checkpoint_minutes > 0:
            raise ValueError(f"--safety.checkpoint-minutes is {self.checkpoint_minutes}; it must be positive.")
        if not self.stall_seconds > 0:
            raise ValueError(f"--safety.stall-seconds is {self.stall_seconds}; it must be positive.")

    def promotion(self, save_every: int) -> int:
        """Healthy steps until promotion when a checkpoint is made every `save_every` steps. ValueError: none would live that long."""
        life = self.keep * save_every
        if self.promote_after is None:
            return min(50, life)
        if self.promote_after > life:
            raise ValueError(
                f"--safety.promote-after is {self.promote_after}, but a checkpoint lives {life} steps ({self.keep} are kept, one every "
                f"{save_every}); it would be deleted before it is known good. Promote earlier, keep more or save less often."
            )
        return self.promote_after


class Caretaker:
    """The loop's `Caretaker` for a run in `folder`.

    folder: of the checkpoints, which all processes see; stacks-<process>.txt lies beside it. scratch: this process's own, for goodput.json.
    metadata: (step, data position) -> what a checkpoint holds beside the state and this object's own part. template: -> the state's shapes
    and shardings. write: takes each step's metrics, after they were judged. rewound: takes the step that a rollback returned to.
    events: where events go; on every process but the first a function that does nothing.
    """

    def __init__(
        self,
        config: SafetyConfig,
        folder: pathlib.Path,
        *,
        save_every: int,
        scratch: pathlib.Path,
        metadata: Callable[[int, Any], dict[str, Any]],
        template: Callable[[], Any],
        write: Callable[[int, dict[str, np.ndarray], StepTimes], None],
        rewound: Callable[[int], None],
        events: Callable[[Event], None],
    ):
        self.config, self.save_every = config, save_every
        self._metadata, self._template, self._write, self._rewound, self._events = metadata, template, write, rewound, events
        self.monitors = Monitors(config.monitors)
        every = config.snapshot_every
        # Of two snapshots the older one has lived for at least `every` steps: long enough to be known healthy.
        self.snapshots = None if every is None else Snapshots(every=every, keep=2)
        proved = min(10, every or 10)
        self.recovery = Recovery(max_rollbacks=config.max_rollbacks, promote_after=config.promotion(save_every), snapshot_after=proved)
        self.checkpoints = Checkpointer(folder, keep=config.keep, record=events)
        self.goodput = Goodput(process_start=process_started())
        self._ledger = scratch / "goodput.json"
        stacks = folder.parent / f"stacks-{jax.process_index()}.txt"  # of each process, for any may be the one that hangs
        self._course = folder / "rollback.json"
        self.watchdog = Watchdog(stacks, self._events, floor_s=config.stall_seconds, abort=config.stall_abort)
        self.report: list[str] = []
        """Why the run could not go on, for a person."""
        self._reason, self._rollback_reason = "", ""
        self._step, self._saved_step = 0, -1
        self._saved_at = time.monotonic()
        self.save_seconds = 0.0
        """How long the last `keep` or `save` stopped the run; taken back to 0 by who reads it."""
        self._by_clock = False

    @property
    def reason(self) -> str:
        return self._reason

    def check(self) -> None:
        if jax.process_count() == 1:  # several agree on a failure at the next save
            self.checkpoints.check()

    def observe(self, step: int, metrics: dict[str, np.ndarray], times: StepTimes) -> str:
        self._step = step
        stalled = self.watchdog.stalled_s
        self.watchdog.step_done(step)
        stalled = self.watchdog.stalled_s - stalled
        self.goodput.step(step, data_wait=times.data_wait, stall=stalled, skipped=bool(metrics["skipped"]))
        if step % GOODPUT_EVERY == 0:
            self.goodput.write(self._ledger)
        wall = {"wall": {"seconds": times.seconds, "data_wait": times.data_wait}}
        verdict = self.monitors.observe(step, {**metrics, **wall})
        for event in verdict.events:
            self._events(event)
        for event in self.recovery.stepped(step, self.monitors.healthy):
            with self.watchdog.busy("waiting for a checkpoint", 3600.0):
                self.checkpoints.wait()  # counted from where the save began, which every process and every repetition of the run knows
                self.checkpoints.promote(event["checkpoint"])
        self._write(step, metrics, times)
        if verdict.action == "rollback":
            self._rollback_reason = verdict.reason
        elif verdict.action == "stop":
            self._events({"event": "stopped", "step": step, "reason": verdict.reason})
            self._end(self.recovery.stopped(step, verdict.reason))
        return verdict.action

    def due(self, step: int) -> bool:
        self._by_clock = self._late(step)
        return step % self.save_every == 0 or self._by_clock or (self.snapshots is not None and self.snapshots.due(step))

    def keep(self, step: int, state: Any, data: Any) -> None:
        started = time.perf_counter()
        if step % self.save_every == 0 or self._by_clock:
            self.save(step, state, data)
        if self.snapshots is not None and self.snapshots.due(step) and self.monitors.healthy:  # else it would push out a good one
            before = self.snapshots.steps()
            self.snapshots.take(step, state, self.own_metadata())
            self.recovery.saved(step, "snapshot")
            self.goodput.saved(step)
            for gone in set(before) - set(self.snapshots.steps()):
                self.recovery.removed(gone, "snapshot")
        self.save_seconds += time.perf_counter() - started

    def save(self, step: int, state: Any, data: Any) -> None:
        """Begin a checkpoint; nothing when `step` is the newest one already."""
        with self.goodput.phase("checkpoint"), self.watchdog.busy("saving a checkpoint", 3600.0):
            if step != self._saved_step:
                self.checkpoints.save(step, state, {**self._metadata(step, data), **self.own_metadata()})
                self.goodput.saved(step)
                self._count(step)
                if jax.process_index() == 0:  # the checkpoint on its way knows it; if it fails, the run ends here
                    self._course.unlink(missing_ok=True)
        self._saved_at, self._saved_step = time.monotonic(), step

    def own_metadata(self) -> dict[str, Any]:
        return {"monitors": self.monitors.state(), "recovery": self.recovery.state()}

    def course(self, step: int) -> dict[str, Any] | None:
        """What a rollback to the checkpoint of `step` left when nothing was saved since: {"position", "recovery"}, else None.

        Without it a run that crashes soon after a rollback would read the skipped window again, and count its rollbacks from 0.
        """
        if not self._course.is_file():
            return None
        record = json.loads(self._course.read_text())
        return record if record["step"] == step else None

    def resume(self, metadata: dict[str, Any]) -> None:
        """Go on from the metadata of the checkpoint that was restored. The data position is the caller's: see `course`."""
        step = self._saved_step = int(metadata["step"])
        self.monitors.restore(metadata["monitors"])
        # A later checkpoint is there when this one was taken because that one is damaged: it must not prove good.
        good, on_disk = self.checkpoints.known_good(), [s for s in self.checkpoints.steps() if s <= step]
        recovery = (self.course(step) or metadata)["recovery"]
        self.recovery.restore(recovery, on_disk=on_disk, known_good=good if good in on_disk else None)
        if (ledger := read_goodput(self._ledger)) is not None:
            self.goodput.restore(ledger, step=step)
        self._events({"event": "restored", "step": step})

    def roll_back(self, data: Any) -> tuple[Any, int] | None:
        self.goodput.failed()
        with self.goodput.phase("restore"), self.watchdog.busy("rolling back", 3600.0):
            self.checkpoints.wait()
            back = roll_back(
                self.recovery,
                self._step,
                self._rollback_reason,
                restore_snapshot=self._from_snapshot,
                restore_disk=lambda step: self.checkpoints.restore(self._template(), step=step),
                discard=lambda step: None,  # all at once below
                record=self._events,
            )
            if isinstance(back, Stop):
                self._end(back)
                return None
            step = back.decision.step
            self.checkpoints.rewind(step)
            if self.snapshots is not None:
                self.snapshots.rewind(step)
            self._saved_step = step if step in self.checkpoints.steps() else -1
            for event in self.monitors.rolled_back(step, back.metadata["monitors"]):
                self._events(event)
            if jax.process_index() == 0:
                write_json_durably(self._course, {"step": step, "position": data, "recovery": self.recovery.state()})
            self.goodput.rolled_back(step)
            self._rewound(step)
            return back.state, step

    def close(self) -> None:
        """Wait for the last checkpoint; its error is raised here at the latest."""
        with self.goodput.phase("checkpoint"), self.watchdog.busy("saving a checkpoint", 3600.0):
            self.checkpoints.close()
        self.goodput.write(self._ledger)

    def _from_snapshot(self, step: int) -> tuple[Any, dict[str, Any]]:
        """Fails on all processes when it fails on one: they must go to the disk together."""
        back, problem = None, ""
        try:
            back = None if self.snapshots is None else self.snapshots.restore(self._template(), step=step)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        problem = text_of_any(problem or ("" if back is not None else "this run takes no snapshots"))
        if back is None or problem:
            raise RuntimeError(problem)
        return back

    def abandon(self) -> None:
        """After an error: let a write that is under way end, without a word to the other processes, and keep the ledger."""
        self.checkpoints.join()
        self.goodput.write(self._ledger)

    def _end(self, stop: Stop) -> None:
        self.report = stop.report()
        self._reason = stop.reason

    def _late(self, step: int) -> bool:
        minutes, promotion = self.config.checkpoint_minutes, self.config.promotion(self.save_every)
        if minutes is None or (jax.process_count() > 1 and step % MINUTES_EVERY):
            return False
        if step - self._saved_step < -(-promotion // self.config.keep):  # saved more often, none would live until it is known good
            return False
        return text_of_first("late" if time.monotonic() - self._saved_at > 60 * minutes else "") == "late"

    def _count(self, step: int) -> None:
        """Tell the recovery of the checkpoint that was begun, and of those that will make room for it."""
        known = {step for step, _ in self.recovery.state()["disk"]}
        for gone in known - kept({*known, step}, newest=self.config.keep, known_good=self.recovery.known_good):
            self.recovery.removed(gone, "disk")
        self.recovery.saved(step, "disk")
