"""Where a run goes back to when it must: which checkpoints are known good, how often it may return, and what it says when it gives up.

Pure logic on step numbers with JSON state, the same on every process since its inputs are; `roll_back` carries a decision out through
functions that the caller gives. The data is *not* rewound: the run goes on with the batches after the failure, so the window between the
step returned to and the failure is trained once (its update undone) and never again (PaLM report section 5.1: skipping the batches
around a spike ended it, and the same batches from another checkpoint did no harm).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from .alarms import ADVICE
from .events import Event

RECOVERY_VERSION = 1  # of the saved state's layout
Tier = Literal["snapshot", "disk"]


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Return to the state of `step` in `tier`.

    failed: the step that failed. discard: steps of the disk's checkpoints to delete, taken after `step` by the course that
    is given up; left there, a restart would resume it.
    """

    tier: Tier
    step: int
    failed: int
    reason: str
    discard: tuple[int, ...] = ()

    @property
    def lost_steps(self) -> int:
        return self.failed - self.step


@dataclasses.dataclass(frozen=True)
class Stop:
    """End the run. events: the rollbacks so far; advice: what to try."""

    failed: int
    reason: str
    events: tuple[Event, ...]
    advice: tuple[str, ...]

    def report(self) -> list[str]:
        """Lines for a person."""
        lines = [f"Training stopped after step {self.failed}: {self.reason}."]
        lines += [
            f"  rolled back from step {e['step']} to {e['to']} ({e['tier']}), {e['lost_steps']} steps lost: {e['reason']}"
            for e in self.events
        ]
        return [*lines, "What to try:", *(f"  - {line}" for line in self.advice)]


class Recovery:
    """Decides about promotion and rollback. Tell it every step (`stepped`), every save (`saved`) and every deletion (`removed`).

    * A disk checkpoint is promoted to known good after `promote_after` healthy steps in a row that follow it.
    * A snapshot in memory counts as healthy when it was taken at a healthy step and `snapshot_after` healthy steps followed at once:
      damage shows some steps after it is done.
    * The target is the newest healthy snapshot if it is newer than the known-good checkpoint, else that checkpoint. A snapshot that was
      returned to is used up until healthy steps have confirmed it anew; the next failure goes further back.
    * More than `max_rollbacks` rollbacks end the run. The count returns to 0 when a checkpoint beyond the last failure is promoted.

    Raises:
      ValueError: a number below 1 (max_rollbacks: below 0).
    """

    def __init__(self, *, max_rollbacks: int = 3, promote_after: int = 100, snapshot_after: int = 10):
        least = {"max_rollbacks": 0, "promote_after": 1, "snapshot_after": 1}
        given = {"max_rollbacks": max_rollbacks, "promote_after": promote_after, "snapshot_after": snapshot_after}
        for name, value in given.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < least[name]:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least[name]}.")
        self.max_rollbacks, self.promote_after, self.snapshot_after = max_rollbacks, promote_after, snapshot_after
        self.known_good: int | None = None
        self.rollbacks = 0
        self._failed = -1  # the furthest step that failed
        self._last_healthy = True
        self._disk: dict[int, int] = {}  # step -> healthy steps in a row since; at most promote_after
        self._snapshots: dict[int, int] = {}  # the same; -1: taken at a step that was not healthy
        self._history: list[Event] = []

    def stepped(self, step: int, healthy: bool) -> list[Event]:
        """After each step, before a save of that step. -> a "promoted" event for a checkpoint that has now proved good."""
        self._last_healthy = healthy
        for step_of in self._disk:
            self._disk[step_of] = min(self._disk[step_of] + 1, self.promote_after) if healthy else 0
        for step_of, count in self._snapshots.items():
            if count >= 0 and count < self.snapshot_after:
                self._snapshots[step_of] = count + 1 if healthy else -1
        good = [step_of for step_of, count in self._disk.items() if count >= self.promote_after]
        if not good or (self.known_good is not None and max(good) <= self.known_good):
            return []
        self.known_good = max(good)
        if self.known_good > self._failed:
            self.rollbacks = 0
        return [{"event": "promoted", "step": step, "checkpoint": self.known_good}]

    def saved(self, step: int, tier: Tier) -> None:
        """The state after `step` is safe: committed on disk, or copied to memory."""
        if tier == "disk":
            self._disk[step] = 0
        else:
            self._snapshots[step] = 0 if self._last_healthy else -1

    def removed(self, step: int, tier: Tier) -> None:
        """The copy is gone: retention deleted it, or a newer snapshot took its memory. The known-good checkpoint must be kept."""
        if tier == "disk" and step == self.known_good:
            raise ValueError(f"the known-good checkpoint of step {step} was deleted; retention must keep it (`known_good`).")
        (self._disk if tier == "disk" else self._snapshots).pop(step, None)

    def decide(self, step: int, reason: str) -> Rollback | Stop:
        """The verdict "rollback" fell at `step`: where to go. Changes nothing; `carried_out` does."""
        healthy = [s for s, count in self._snapshots.items() if count >= self.snapshot_after and s < step]
        if self.rollbacks >= self.max_rollbacks:
            return self._stop(step, f"{reason}; {self.rollbacks} rollbacks without progress beyond step {self._failed} is the limit")
        snapshot = max(healthy, default=-1)
        if self.known_good is None and snapshot < 0:
            return self._stop(step, f"{reason}; no checkpoint has been followed by {self.promote_after} healthy steps yet")
        tier: Tier = "snapshot" if self.known_good is None or snapshot > self.known_good else "disk"
        return self._to(tier, snapshot if tier == "snapshot" else self.known_good or 0, step, reason)

    def without_snapshot(self, failed: Rollback) -> Rollback | Stop:
        """The snapshot of a decision could not be restored: the known-good checkpoint instead, or the end."""
        if self.known_good is None:
            return self._stop(failed.failed, f"{failed.reason}; the snapshot could not be restored and no checkpoint is known good")
        return self._to("disk", self.known_good, failed.failed, failed.reason)

    def stopped(self, step: int, reason: str) -> Stop:
        """The end that a verdict "stop" asks for."""
        return self._stop(step, reason)

    def carried_out(self, decision: Rollback) -> Event:
        """The run is back at `decision.step`. -> the "rollback" event."""
        self.rollbacks += 1
        self._failed = max(self._failed, decision.failed)
        self._last_healthy = True
        self._disk = {s: (count if s == self.known_good else 0) for s, count in self._disk.items() if s <= decision.step}
        self._snapshots = {s: 0 for s in self._snapshots if s <= decision.step}
        event = {
            "event": "rollback",
            "step": decision.failed,
            "to": decision.step,
            "tier": decision.tier,
            "lost_steps": decision.lost_steps,
            "reason": decision.reason,
            "rollbacks": self.rollbacks,
            "discarded": list(decision.discard),
        }
        self._history = [*self._history[-15:], event]
        return event

    def state(self) -> dict[str, Any]:
        """Strict JSON. Snapshots are left out: they end with the process."""
        return {
            "version": RECOVERY_VERSION,
            "known_good": self.known_good,
            "rollbacks": self.rollbacks,
            "failed": self._failed,
            "disk": sorted([step, count] for step, count in self._disk.items()),
            "history": [dict(event) for event in self._history],
        }

    def restore(self, state: dict[str, Any], *, on_disk: list[int], known_good: int | None = None) -> None:
        """Go on from `state()`, which a checkpoint held.

        on_disk: the steps whose checkpoints exist now. known_good: the promoted one by the folder's own record, which may be newer than
        the state. A checkpoint that the state does not know (its own among them: it was written before it was reported) starts unproved.

        Raises:
          ValueError: another layout.
        """
        if state.get("version") != RECOVERY_VERSION:
            raise ValueError(
                f"the saved recovery state has layout {state.get('version')}; this program's is {RECOVERY_VERSION}. "
                "Resume without it: checkpoints prove themselves anew."
            )
        counts = {int(step): int(count) for step, count in state["disk"]}
        self._disk = {step: counts.get(step, 0) for step in sorted(on_disk)}
        good = [step for step in (state["known_good"], known_good) if step is not None and step in self._disk]
        self.known_good = max(good, default=None)
        self.rollbacks, self._failed = int(state["rollbacks"]), int(state["failed"])
        self._history = [dict(event) for event in state["history"]]
        self._snapshots, self._last_healthy = {}, True

    def _to(self, tier: Tier, target: int, step: int, reason: str) -> Rollback:
        return Rollback(tier, target, step, reason, tuple(sorted(s for s in self._disk if s > target)))

    def _stop(self, step: int, reason: str) -> Stop:
        advice = [text for name, text in ADVICE.items() if name in reason]
        if self._history:
            first, last = min(e["to"] for e in self._history), max(e["step"] for e in self._history)
            advice.append(f"look at the batches of steps {first} to {last}; the same spike on other data is not the data's fault")
        good = self.known_good
        advice.append(f"the checkpoint of step {good} is known good" if good is not None else "start again; save and promote earlier")
        return Stop(step, reason, tuple(self._history), tuple(advice))


@dataclasses.dataclass(frozen=True)
class RolledBack:
    """state: of step `decision.step`, with what was saved beside it."""

    state: Any
    metadata: dict[str, Any]
    decision: Rollback


def roll_back(
    recovery: Recovery,
    step: int,
    reason: str,
    *,
    restore_snapshot: Callable[[int], tuple[Any, dict[str, Any]]],
    restore_disk: Callable[[int], tuple[Any, dict[str, Any]]],
    discard: Callable[[int], None],
    record: Callable[[Event], None],
) -> RolledBack | Stop:
    """Carry out a verdict "rollback". A collective act: every process calls it with the same arguments.

    Args:
      step, reason: where and why, from the verdict.
      restore_snapshot, restore_disk: step -> (state, metadata), the metadata as saved (monitors' state among it). The caller leaves the
        data position where it is, and gives `Monitors.rolled_back` the metadata's monitors.
      discard: delete the disk checkpoint of that step, once the state is back. A save still in progress is waited for first.
      record: takes the "rollback" or "stopped" event.

    Returns:
      The state to go on from, or the stop: its `report()` is for a person.

    Raises:
      What restore_disk raises: then no copy is left to go to. A failing snapshot falls to disk, and the event says so.
    """
    decision = recovery.decide(step, reason)
    failure = ""
    state, metadata = None, {}
    if isinstance(decision, Rollback) and decision.tier == "snapshot":
        try:
            state, metadata = restore_snapshot(decision.step)
        except Exception as error:  # memory may be what failed
            failure = f"{type(error).__name__}: {error}"
            decision = recovery.without_snapshot(decision)
    if isinstance(decision, Stop):
        record({"event": "stopped", "step": step, "reason": decision.reason, "report": decision.report()})
        return decision
    if decision.tier == "disk":
        state, metadata = restore_disk(decision.step)
    for later in decision.discard:
        discard(later)
    event = recovery.carried_out(decision)
    record(event | {"snapshot_error": failure} if failure else event)
    return RolledBack(state, metadata, decision)
