"""Alarms over the host metrics of each step: what is wrong with a run, whether to roll back, and what a person should do.

An alarm fires once, and clears once its value has stayed below a lower threshold for a while (hysteresis). All rules that may roll a run
back read loss, gradient norm and skipped updates only, which are the same on every process: so is the verdict.

Shapes: L MoE layers.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from .events import Event, plain

MONITOR_VERSION = 1  # of the saved state's layout
Action = Literal["go", "warn", "rollback", "stop"]
_ORDER = ("go", "warn", "rollback", "stop")

ADVICE = {
    "non_finite": "roll back and skip the data window; when it returns, lower the learning rate and replay the step to rule out hardware",
    "loss_spike": "watch it; look at the batches of these steps",
    "loss_divergence": "roll back and skip the data window; when it returns, lower the learning rate or warm up longer",
    "grad_norm": "watch it; lower clip_norm or the learning rate when it stays",
    "balance": "raise the balancing strength / check the router",
    "dead_experts": "raise the balancing strength / check the router",
    "max_logit": "turn on QK-Clip or lower the learning rate of the attention projections",
    "data_wait": "add data workers or prefetch more batches",
}


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """Thresholds of all alarms. Each *_clear is the lower threshold under which an alarm may clear."""

    window: int = 128
    """Steps whose loss, gradient norm and data wait are compared with."""
    window_min: int = 32
    """Steps without judgement at the start, and after a stage switch."""
    clear_steps: int = 16
    """Steps in a row below the clear threshold that end an alarm."""
    skipped_limit: int = 5
    """Updates skipped in a row (loss or gradient not finite) that call for on_non_finite."""
    on_non_finite: Literal["rollback", "stop"] = "rollback"
    spike_z: float = 6.0
    """Robust z of the loss: (loss - median) / (1.4826 MAD) over the window. One step above warns."""
    spike_clear_z: float = 3.0
    spike_floor: float = 0.002
    """Smallest spread, as a share of the median: a loss that hardly moves has no spikes of a thousandth."""
    divergence_steps: int = 3
    """Steps in a row above spike_z that call for on_divergence."""
    on_divergence: Literal["warn", "rollback", "stop"] = "rollback"
    grad_ratio: float = 10.0
    """Gradient norm as a multiple of the window's median."""
    grad_clear_ratio: float = 5.0
    violation: float = 4.0
    """MaxVio (largest load / mean load - 1) of any one layer."""
    violation_clear: float = 3.0
    violation_steps: int = 50
    dead_steps: int = 50
    """Steps over which the dead experts of a layer are averaged."""
    dead_rise: float = 1.0
    """Dead experts of a layer above its lowest average so far; never below 8 standard errors, which are noise."""
    max_logit: float = 100.0
    """Largest attention logit of an MLA layer (QK-Clip's threshold, Kimi K2 report section 2.1)."""
    max_logit_clear: float = 90.0
    data_wait: float = 0.2
    """Share of the step time spent waiting for data, over the window."""
    data_wait_clear: float = 0.1

    def __post_init__(self) -> None:
        for name in ("window", "window_min", "clear_steps", "skipped_limit", "divergence_steps", "violation_steps", "dead_steps"):
            least = 2 if name in ("window", "window_min", "dead_steps") else 1
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"MonitorConfig.{name} is {value!r}; it must be an integer of at least {least}.")
        if self.window_min > self.window:
            raise ValueError(f"MonitorConfig.window_min is {self.window_min}; it must not exceed window, {self.window}.")
        pairs = {"spike_z": "spike_clear_z", "grad_ratio": "grad_clear_ratio", "violation": "violation_clear"}
        pairs |= {"max_logit": "max_logit_clear", "data_wait": "data_wait_clear"}
        for high, low in pairs.items():
            fire, clear = getattr(self, high), getattr(self, low)
            if not (math.isfinite(fire) and 0 < clear < fire):
                raise ValueError(f"MonitorConfig.{high} is {fire} and {low} {clear}; 0 < {low} < {high} must hold, or alarms flicker.")
        if not self.data_wait < 1:
            raise ValueError(f"MonitorConfig.data_wait is {self.data_wait}; it is a share of the step time, below 1.")
        for name in ("spike_floor", "dead_rise"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"MonitorConfig.{name} is {getattr(self, name)}; it must be positive and finite.")
        for name, allowed in (("on_non_finite", ("rollback", "stop")), ("on_divergence", ("warn", "rollback", "stop"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"MonitorConfig.{name} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}.")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What to do after a step. action: "go", "rollback" or "stop"; reason: why, empty with "go"; events: to be recorded."""

    action: Literal["go", "rollback", "stop"]
    events: tuple[Event, ...] = ()
    reason: str = ""


@dataclasses.dataclass
class Alarm:
    """One rule with hysteresis: fires after `fire_after` bad values in a row, clears after `clear_after` good ones in a row.

    A value between the two thresholds is neither bad nor good: it ends both runs.
    """

    name: str
    rule: str
    action: Action = "warn"
    fire_after: int = 1
    clear_after: int = 1
    active: bool = False
    bad: int = 0
    good: int = 0

    def update(self, step: int, value: Any, *, bad: bool, good: bool) -> Event | None:
        """Judge one value; -> the event when the alarm fires or clears."""
        self.bad = self.bad + 1 if bad else 0
        self.good = self.good + 1 if good and not bad else 0
        if not self.active and self.bad >= self.fire_after:
            self.active = True
            return self.event("alarm", step, value) | {"advice": ADVICE[self.name]}
        if self.active and self.good >= self.clear_after:
            self.active = False
            return self.event("alarm_cleared", step, value)
        return None

    def event(self, name: str, step: int, value: Any) -> Event:
        facts = {"alarm": self.name, "value": plain(value), "rule": self.rule, "action": self.action}
        return {"event": name, "step": step, **facts}

    def state(self) -> dict[str, Any]:
        return {"active": self.active, "bad": self.bad, "good": self.good}


def robust_z(value: float, window: list[float], floor: float) -> float:
    """(value - median) / (1.4826 MAD), the spread at least `floor` of the median: Gaussian noise gives a standard normal."""
    median = statistics.median(window)  # of a plain list: a tenth of NumPy's overhead at 128 values
    spread = 1.4826 * statistics.median([abs(other - median) for other in window])
    return (value - median) / max(spread, floor * abs(median), 1e-12)


class DeadTrend:
    """Averages of the dead experts of each layer over blocks of steps, against the lowest average so far."""

    def __init__(self, steps: int, rise: float):
        self.steps, self.rise = steps, rise
        self.block: dict[str, Any] = {"count": 0, "sum": [], "squares": []}
        self.lowest: dict[str, list[float]] = {"mean": [], "variance": []}

    def push(self, dead: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Add one step's [L]; -> (rise [L], threshold [L]) when a block is full, from the second block on."""
        block = self.block
        if block["count"] == 0 or len(block["sum"]) != len(dead):
            block.update(count=0, sum=[0.0] * len(dead), squares=[0.0] * len(dead))
        block["count"] += 1
        block["sum"] = (np.asarray(block["sum"]) + dead).tolist()
        block["squares"] = (np.asarray(block["squares"]) + dead**2).tolist()
        if block["count"] < self.steps:
            return None
        mean = np.asarray(block["sum"]) / self.steps
        variance = np.maximum(np.asarray(block["squares"]) / self.steps - mean**2, 0.0)
        block["count"] = 0
        if len(self.lowest["mean"]) != len(dead):
            self.lowest = {"mean": mean.tolist(), "variance": variance.tolist()}
            return None
        low, low_variance = (np.asarray(self.lowest[name]) for name in ("mean", "variance"))
        # The lowest of many averages lies some 4 standard errors below the truth by chance, the highest as much above.
        threshold = np.maximum(self.rise, 8 * np.sqrt((variance + low_variance) / self.steps))
        below = mean < low
        self.lowest = {
            "mean": np.where(below, mean, low).tolist(),
            "variance": np.where(below, variance, low_variance).tolist(),
        }
        return mean - low, threshold


class Monitors:
    """All alarms of a run. `observe` once a step; `state` goes into the checkpoint, and decisions after `restore` are the same bits.

    Values that are not finite and skipped steps never enter a window.
    """

    def __init__(self, config: MonitorConfig | None = None):
        c = self.config = MonitorConfig() if config is None else config
        self.skipped = 0
        self.skipped_in_a_row = 0
        self._windows: dict[str, list[float]] = {"loss": [], "grad_norm": [], "seconds": [], "data_wait": []}
        self._over: list[int] = []  # [L] steps in a row with MaxVio above the threshold
        self._dead = DeadTrend(c.dead_steps, c.dead_rise)
        z = f"robust z of the loss over {c.window} steps > {c.spike_z:g}"
        rules: dict[str, tuple[str, Action, int, int]] = {
            "non_finite": (f"{c.skipped_limit} updates skipped in a row", c.on_non_finite, 1, c.clear_steps),
            "loss_spike": (z, "warn", 1, c.clear_steps),
            "loss_divergence": (f"{z} for {c.divergence_steps} steps", c.on_divergence, c.divergence_steps, c.clear_steps),
            "grad_norm": (f"gradient norm > {c.grad_ratio:g} x median of {c.window} steps", "warn", 1, c.clear_steps),
            "balance": (f"MaxVio of a layer > {c.violation:g} for {c.violation_steps} steps", "warn", 1, c.clear_steps),
            "dead_experts": (f"dead experts of a layer rising, averages of {c.dead_steps} steps", "warn", 1, 1),
            "max_logit": (f"largest MLA logit > {c.max_logit:g}", "warn", 1, c.clear_steps),
            "data_wait": (f"data wait > {c.data_wait:.0%} of the step time over {c.window} steps", "warn", 1, c.clear_steps),
        }
        self.alarms = {name: Alarm(name, *rule) for name, rule in rules.items()}

    @property
    def healthy(self) -> bool:
        """The last update was not skipped, and no alarm about loss or finiteness stands: what a known-good checkpoint needs."""
        return self.skipped_in_a_row == 0 and not any(self.alarms[name].active for name in ("non_finite", "loss_spike", "loss_divergence"))

    def observe(self, step: int, metrics: Mapping[str, Any]) -> Verdict:
        """Judge the host metrics of one step.

        Args:
          step: the step's number; it may go back after a rollback.
          metrics: "loss", "grad_norm" and "skipped" (0 or 1); where the run has them "max_violation" [L], "dead_experts" [L],
            "max_logit" (any shape), and "wall" with "seconds" and "data_wait" (seconds of the step).

        Raises:
          ValueError: one of the first three is missing.
        """
        missing = [name for name in ("loss", "grad_norm", "skipped") if name not in metrics]
        if missing:
            raise ValueError(f"the metrics of step {step} lack {', '.join(missing)}; the alarms need them.")
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        skipped = bool(metrics["skipped"]) or not (math.isfinite(loss) and math.isfinite(norm))
        events = self._finite(step, skipped, loss, norm)
        if not skipped:
            events += self._optimisation(step, loss, norm)
            events += self._balance(step, metrics)
            events += self._logits(step, metrics) + self._data(step, metrics)
        fired = [event for event in events if event["event"] == "alarm" and event["action"] != "warn"]
        if not fired:
            return Verdict("go", tuple(events))
        worst = max(fired, key=lambda event: _ORDER.index(event["action"]))
        return Verdict(worst["action"], tuple(events), f"{worst['alarm']}: {worst['rule']} (step {step})")

    def new_stage(self) -> None:
        """Other data from here on: the loss and gradient norm of the last stage are no measure of this one's."""
        self._windows["loss"], self._windows["grad_norm"] = [], []
        self._dead = DeadTrend(self.config.dead_steps, self.config.dead_rise)  # tokens a step may differ, and so the dead

    def rolled_back(self, step: int, saved: dict[str, Any]) -> list[Event]:
        """After a rollback to the state that was saved with `saved` (this object's `state` then): its windows, and an event
        for each alarm that no longer stands. `step` is the step returned to. The count of all skipped updates stays."""
        standing = [name for name, alarm in self.alarms.items() if alarm.active]
        skipped = self.skipped
        self.restore(saved)
        self.skipped = max(skipped, self.skipped)
        for name, alarm in self.alarms.items():
            alarm.active &= name in standing  # one that cleared since then has said so; it may fire anew
        ended = [self.alarms[name] for name in standing if not self.alarms[name].active]
        return [alarm.event("alarm_cleared", step, None) | {"by": "rollback"} for alarm in ended]

    def state(self) -> dict[str, Any]:
        """Everything that later decisions depend on, as strict JSON; a copy."""
        return {
            "version": MONITOR_VERSION,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "windows": {name: list(window) for name, window in self._windows.items()},
            "alarms": {name: alarm.state() for name, alarm in self.alarms.items()},
            "over": list(self._over),
            "dead": {"block": {**self._dead.block}, "lowest": {**self._dead.lowest}},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`. With another `window` the newest values are kept.

        Raises:
          ValueError: another layout.
        """
        if state.get("version") != MONITOR_VERSION or set(state.get("alarms", ())) != set(self.alarms):
            raise ValueError(
                f"the saved monitors have layout {state.get('version')} and alarms {sorted(state.get('alarms', ()))}; this program's are "
                f"{MONITOR_VERSION} and {sorted(self.alarms)}. Resume without the saved monitors: the windows fill anew."
            )
        self.skipped, self.skipped_in_a_row = int(state["skipped"]), int(state["skipped_in_a_row"])
        self._windows = {name: list(values)[-self.config.window :] for name, values in state["windows"].items()}
        for name, saved in state["alarms"].items():
            alarm = self.alarms[name]
            alarm.active, alarm.bad, alarm.good = bool(saved["active"]), int(saved["bad"]), int(saved["good"])
        self._over = list(state["over"])
        self._dead.block = dict(state["dead"]["block"])
        self._dead.lowest = dict(state["dead"]["lowest"])

    def _finite(self, step: int, skipped: bool, loss: float, norm: float) -> list[Event]:
        self.skipped += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        row = self.skipped_in_a_row
        events: list[Event] = []
        if skipped:
            facts = {"in_a_row": row, "total": self.skipped, "loss": plain(loss), "grad_norm": plain(norm)}
            events.append({"event": "skipped_update", "step": step, **facts})
        return events + self._judge("non_finite", step, row, bad=row >= self.config.skipped_limit, good=row == 0)

    def _optimisation(self, step: int, loss: float, norm: float) -> list[Event]:
        c, events = self.config, []
        if len(self._windows["loss"]) >= c.window_min:
            z = robust_z(loss, self._windows["loss"], c.spike_floor)
            for name in ("loss_spike", "loss_divergence"):
                events += self._judge(name, step, z, bad=z > c.spike_z, good=z < c.spike_clear_z)
        if len(self._windows["grad_norm"]) >= c.window_min:
            ratio = norm / max(statistics.median(self._windows["grad_norm"]), 1e-30)
            events += self._judge("grad_norm", step, ratio, bad=ratio > c.grad_ratio, good=ratio < c.grad_clear_ratio)
        self._push("loss", loss)
        self._push("grad_norm", norm)
        return events

    def _balance(self, step: int, metrics: Mapping[str, Any]) -> list[Event]:
        c, events = self.config, []
        if "max_violation" in metrics:
            violation = np.asarray(metrics["max_violation"], np.float64).reshape(-1)
            before = np.asarray(self._over if len(self._over) == len(violation) else np.zeros(len(violation)), np.int64)
            over = np.where(violation > c.violation, before + 1, 0)
            self._over = over.tolist()
            bad = over >= c.violation_steps
            value = {
                "layers": np.flatnonzero(bad if bad.any() else violation == violation.max()).tolist(),
                "max_violation": violation.max(),
            }
            events += self._judge("balance", step, value, bad=bool(bad.any()), good=bool((violation < c.violation_clear).all()))
        if "dead_experts" in metrics:
            judged = self._dead.push(np.asarray(metrics["dead_experts"], np.float64).reshape(-1))
            if judged is not None:
                rise, threshold = judged
                bad = rise > threshold
                layers = np.flatnonzero(bad) if bad.any() else np.flatnonzero(rise == rise.max())
                value = {"layers": layers.tolist(), "rise": rise[layers]}
                events += self._judge("dead_experts", step, value, bad=bool(bad.any()), good=bool((rise < threshold / 2).all()))
        return events

    def _logits(self, step: int, metrics: Mapping[str, Any]) -> list[Event]:
        if "max_logit" not in metrics:
            return []
        largest = float(np.max(np.asarray(metrics["max_logit"], np.float64)))  # NaN: neither bad nor good
        c = self.config
        return self._judge("max_logit", step, largest, bad=largest > c.max_logit, good=largest < c.max_logit_clear)

    def _data(self, step: int, metrics: Mapping[str, Any]) -> list[Event]:
        wall = metrics.get("wall", {})
        if "seconds" not in wall or "data_wait" not in wall:
            return []
        self._push("seconds", float(wall["seconds"]))
        self._push("data_wait", float(wall["data_wait"]))
        if len(self._windows["seconds"]) < self.config.window_min:
            return []
        share = math.fsum(self._windows["data_wait"]) / max(math.fsum(self._windows["seconds"]), 1e-9)
        return self._judge("data_wait", step, share, bad=share > self.config.data_wait, good=share < self.config.data_wait_clear)

    def _judge(self, name: str, step: int, value: Any, *, bad: bool, good: bool) -> list[Event]:
        event = self.alarms[name].update(step, value, bad=bad, good=good)
        return [] if event is None else [event]

    def _push(self, name: str, value: float) -> None:
        if math.isfinite(value):
            window = self._windows[name]
            window.append(value)
            del window[: -self.config.window]
