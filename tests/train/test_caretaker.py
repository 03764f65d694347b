"""Alarms, rollback, checkpoints, snapshots and events together, around a loop whose step is a few numbers."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train.alarms import MonitorConfig
from moejax.train.caretaker import Caretaker, SafetyConfig
from moejax.train.checkpoint_write import CheckpointError
from moejax.train.events import EventLog
from moejax.train.goodput import read_goodput
from moejax.train.loop import StopRequest, run_loop

MONITORS = MonitorConfig(window=8, window_min=4, skipped_limit=3)


class Run:
    """Batch i is the number i; a batch in `bad` gives a loss that is not finite, and its update is skipped as the real step does."""

    def __init__(self, folder, *, bad=(), start=None, **safety):
        folder.mkdir(exist_ok=True)
        self.folder, self.bad, self.written, self.rewound = folder, set(bad), [], []
        self.log = EventLog(folder / "events.jsonl")
        self.state = {"w": jnp.zeros(3), "step": jnp.zeros((), jnp.int32)} if start is None else start
        self.care = Caretaker(
            SafetyConfig(monitors=MONITORS, promote_after=4, **safety),
            folder / "checkpoint",
            scratch=folder,
            save_every=5,
            metadata=lambda step, data: {"step": step, "data": data},
            template=lambda: jax.eval_shape(lambda: self.state),
            write=lambda step, metrics, times: self.written.append(step),
            rewound=self.rewound.append,
            events=self.log.record,
        )

    def step(self, state, batch):
        good = batch not in self.bad
        w = jnp.where(good, state["w"] + batch, state["w"])
        loss = jnp.float32(1 + 0.01 * (batch % 3)) if good else jnp.float32(np.nan)
        metrics = {"loss": loss, "grad_norm": jnp.float32(1), "skipped": jnp.int32(not good)}
        return {"w": w, "step": state["step"] + 1}, metrics

    def train(self, first, last, data=0):
        batches = ((i, i + 1) for i in itertools.count(data))
        with self.log:
            result = run_loop(self.step, self.state, batches, self.care, first=first, last=last, data=data, request=StopRequest())
            if not self.care.report:
                self.care.save(result.step, result.state, result.data)
            self.care.close()
        return result

    def events(self, *names):
        found = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [event for event in found if event["event"] in names] if names else found


def test_a_quiet_run_saves_and_promotes_and_says_little(tmp_path):
    run = Run(tmp_path)
    result = run.train(0, 23)
    assert result.step == 23 and float(result.state["w"][0]) == sum(range(23)) and run.written == list(range(1, 24))
    assert {event["event"] for event in run.events()} == {"checkpoint_saved", "promoted"}
    assert [event["step"] for event in run.events("checkpoint_saved")] == [5, 10, 15, 20, 23]
    assert run.care.checkpoints.known_good() == 15 and set(run.care.checkpoints.steps()) == {15, 20, 23}
    figures = run.care.goodput.figures()
    assert figures["steps"] == 23 and figures["lost_steps"] == 0 and 0 < figures["goodput"] <= 1
    assert sum(figures["seconds"].values()) <= figures["wall"] * (1 + 1e-6)
    assert read_goodput(tmp_path / "goodput.json") is not None


@pytest.mark.parametrize("snapshot_every", [None, 2])
def test_updates_that_are_not_finite_roll_back_and_the_data_goes_on(tmp_path, snapshot_every):
    """Batches 30 to 32 are bad: three updates skipped in a row, then back; no batch comes twice and none is left out after."""
    run = Run(tmp_path, bad=range(30, 33), snapshot_every=snapshot_every)
    result = run.train(0, 40)
    (back,) = run.events("rollback")
    assert [event["in_a_row"] for event in run.events("skipped_update")] == [1, 2, 3]
    assert back["step"] == 33 and back["tier"] == ("disk" if snapshot_every is None else "snapshot")
    assert run.rewound == [back["to"]] and result.step == 40
    # Steps up to back["to"] took the batches of their number; the others those after the failure, of which one was on its way.
    expected = sum(range(back["to"])) + sum(range(34, 34 + 40 - back["to"]))
    assert float(result.state["w"][0]) == expected and result.data == 34 + 40 - back["to"]
    assert int(result.state["step"]) == 40 and run.care.checkpoints.latest_step() == 40


def test_a_crash_right_after_a_rollback_does_not_read_the_skipped_window_again(tmp_path):
    """Back at 5 from the failure at 13, and killed before the next save: the run goes on after batch 13, with one rollback counted."""
    run = Run(tmp_path, bad=range(10, 13))
    keep = run.care.roll_back

    def crash(data):
        keep(data)
        raise KeyboardInterrupt

    run.care.roll_back = crash
    with pytest.raises(KeyboardInterrupt):
        run.train(0, 40)
    run.care.abandon()
    again = Run(tmp_path, bad=range(10, 13))
    state, metadata = again.care.checkpoints.restore(jax.eval_shape(lambda: run.state))
    course = again.care.course(metadata["step"])
    assert metadata["step"] == metadata["data"] and course["position"] == 14
    first = metadata["step"]
    again.state = state
    again.care.resume(metadata)
    assert again.care.recovery.rollbacks == 1
    result = again.train(first, first + 7, data=course["position"])
    assert float(result.state["w"][0]) == sum(range(first)) + sum(range(14, 21)) and again.care.course(first + 7) is None


def test_without_a_known_good_checkpoint_the_run_ends_with_a_report_and_saves_nothing_bad(tmp_path):
    run = Run(tmp_path, bad=range(6, 99))
    result = run.train(0, 40)
    assert "not finite" in " ".join(run.care.report) or "skipped in a row" in " ".join(run.care.report)
    assert "non_finite" in result.reason and run.events("stopped")
    assert run.care.checkpoints.steps() == [5]


def test_the_same_failure_again_and_again_ends_the_run(tmp_path):
    run = Run(tmp_path, bad=range(12, 10**6), max_rollbacks=2)
    result = run.train(0, 60)
    assert len(run.events("rollback")) == 2 and result.reason and run.care.report[0].startswith("Training stopped")


def test_a_resumed_run_decides_as_an_unbroken_one(tmp_path):
    """The windows and counts of skipped updates are in the checkpoint: three in a row across the restart are three in a row."""
    one = Run(tmp_path / "one", bad=range(18, 21))
    one.train(0, 20)  # two were skipped
    state, metadata = one.care.checkpoints.restore(jax.eval_shape(lambda: one.state))
    two = Run(tmp_path / "one", bad=range(18, 21), start=state)
    two.care.resume(metadata)
    two.train(20, 30, data=metadata["data"])
    whole = Run(tmp_path / "whole", bad=range(18, 21))
    whole.train(0, 30)
    facts = lambda run: [{k: event[k] for k in ("step", "to", "lost_steps")} for event in run.events("rollback")]
    assert facts(two) == facts(whole) and len(facts(two)) == 1
    numbers = [run.care.monitors.state() for run in (two, whole)]
    for state in numbers:
        del state["windows"]["seconds"], state["windows"]["data_wait"]
    assert numbers[0] == numbers[1]


def test_a_failing_save_ends_the_run_at_the_next_step(tmp_path, monkeypatch):
    """orbax #605, keras #23609: an error in the background is not swallowed."""
    from moejax.train import checkpoint_files

    run = Run(tmp_path)

    def full(*arguments, **options):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint_files, "write_files_list", full)
    slow = run.step
    run.step = lambda state, batch: (run.care.checkpoints._write and run.care.checkpoints._write.join(), slow(state, batch))[1]
    with pytest.raises(CheckpointError, match="no space left"):
        run.train(0, 20)
    assert run.written[-1] in (5, 6, 7) and run.care.checkpoints.steps() == []


def test_promotion_fits_the_life_of_a_checkpoint():
    assert SafetyConfig().promotion(100) == 50 and SafetyConfig().promotion(4) == 8 and SafetyConfig(promote_after=7).promotion(4) == 7
    with pytest.raises(ValueError, match="a checkpoint lives 8 steps"):
        SafetyConfig(promote_after=9).promotion(4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "keep is 0"),
        ({"replay_every": 0}, "replay-every is 0"),
        ({"stall_seconds": 0}, "stall-seconds"),
        ({"max_rollbacks": -1}, "-1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SafetyConfig(**settings)
