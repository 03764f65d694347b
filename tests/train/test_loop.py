import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train.events import plain
from moejax.train.loop import StopRequest, run_loop, stop_on_signals
from moejax.train.tracker import CompileCounter, JsonLines, Tracker


class Care:
    """A caretaker that writes down what it is asked, and says what it is told to. Batch i is the number i."""

    reason = "told to"

    def __init__(self, *, every=100, verdicts=None, back=None):
        self.every, self.verdicts, self.back = every, dict(verdicts or {}), back
        self.seen, self.saves, self.checks = [], [], 0

    def check(self):
        self.checks += 1

    def observe(self, step, metrics, times):
        assert times.seconds >= 0 and times.data_wait >= 0
        self.seen.append((step, float(metrics["loss"])))
        return self.verdicts.pop(step, "go")

    def due(self, step):
        return step % self.every == 0

    def keep(self, step, state, data):
        self.saves.append((step, len(state), data, len(self.seen)))

    def roll_back(self, data):
        return self.back


def _run(care, first, last, *, at=lambda batch, request: None, deadline=None, batches=None, **more):
    """A loop whose state is the list of batches seen."""
    request = StopRequest()

    def train_step(state, batch):
        at(batch, request)
        return [*state, batch], {"loss": jnp.float32(batch)}

    numbers = range(first, 10**6) if batches is None else batches
    options = dict(first=first, last=last, data=first, request=request, deadline=deadline, **more)
    return run_loop(train_step, list(range(first)), ((i, i + 1) for i in numbers), care, **options)


def test_every_step_once_in_order_and_kept_after_its_metrics():
    care = Care(every=4)
    result = _run(care, 3, 10)
    assert (result.state, result.step, result.data, result.reason) == (list(range(10)), 10, 10, "")
    assert care.seen == [(step, step - 1.0) for step in range(4, 11)]
    assert care.saves == [(4, 4, 4, 1), (8, 8, 8, 5)] and care.checks == 7


def test_nothing_to_do():
    care = Care()
    result = _run(care, 5, 5)
    assert (result.step, result.data, result.reason, care.seen, care.saves) == (5, 5, "", [], [])


def test_a_request_ends_after_the_step_it_came_in():
    def at(batch, request):
        if batch == 5:
            request.reason = "Ctrl-C"

    care = Care()
    result = _run(care, 0, 10, at=at)
    assert (result.step, result.data, result.reason) == (6, 6, "Ctrl-C") and len(care.seen) == 6


def test_the_time_budget_ends_the_run():
    result = _run(Care(), 0, 1000, at=lambda batch, request: time.sleep(0.01), deadline=time.monotonic() + 0.05)
    assert result.reason == "the time budget" and 1 <= result.step < 100


def test_the_end_of_the_data_ends_the_run():
    care = Care()
    result = _run(care, 0, 10, batches=range(4))
    assert (result.step, result.data, result.reason) == (4, 4, "the end of the data") and len(care.seen) == 4


def test_a_rollback_takes_the_step_back_and_never_the_data():
    """Step 6 is judged bad while step 7 is on its way: both are given up, and steps 5.. are done with the batches after them."""
    care = Care(every=4, verdicts={6: "rollback"}, back=(list(range(4)), 4))
    result = _run(care, 0, 9)
    assert result.state == [0, 1, 2, 3, 7, 8, 9, 10, 11] and (result.step, result.data) == (9, 12)
    assert [step for step, _ in care.seen] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]
    assert [save[0] for save in care.saves] == [4, 8]


def test_a_bad_step_is_never_kept():
    """The metrics of a step that is due are judged before its state is."""
    care = Care(every=4, verdicts={4: "rollback"}, back=([], 0))
    result = _run(care, 0, 5)
    assert result.state == [4, 5, 6, 7, 8] and [save[:3] for save in care.saves] == [(4, 4, 8)]


@pytest.mark.parametrize("verdict", ["rollback", "stop"])
def test_the_caretaker_ends_the_run(verdict):
    result = _run(Care(verdicts={3: verdict}), 0, 9)
    assert result.reason == "told to" and result.step == 4  # its metrics come one step behind
    result = _run(Care(verdicts={9: verdict}), 0, 9)
    assert result.step == 9


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_the_first_signal_asks_and_the_second_aborts(number, name):
    before, notes = signal.getsignal(number), []
    with stop_on_signals(notes.append) as request:
        assert request.reason == ""
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        assert request.reason == name and len(notes) == 1 and "once more to abort" in notes[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(1)
    assert signal.getsignal(number) is before


def test_records_survive_a_cut_line_and_rewind(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    assert lines.read() == []
    for step in range(1, 6):
        lines.append({"step": step})
    with lines.path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [r["step"] for r in lines.read()] == [1, 2, 3, 4, 5]
    lines.rewind(3)
    lines.append({"step": 4, "again": True})
    assert [r["step"] for r in lines.read()] == [1, 2, 3, 4]
    assert lines.read()[-1]["again"]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tracker_writes_numbers_and_at_most_64_load_snapshots(tmp_path):
    tracker = Tracker(tmp_path, total_steps=200)
    for step in range(1, 201):
        metrics = {"loss": np.float32(np.nan if step == 7 else 0.1), "max_violation": np.ones(2, np.float32)}
        tracker.log(step, metrics | {"expert_load": np.full((2, 3), step)}, {"seconds": 1.0})
    history = tracker.metrics.read()
    assert history[6]["loss"] == "nan" and history[0]["loss"] == float(np.float32(0.1))
    assert history[0]["max_violation"] == [1.0, 1.0] and "expert_load" not in history[0]
    loads = tracker.load.read()
    assert loads[0] == {"step": 1, "load": [[1, 1, 1], [1, 1, 1]]}
    assert 40 <= len(loads) <= 64 and loads[-1]["step"] == 200
    most = Tracker(tmp_path / "most", total_steps=128)
    most.load.path.parent.mkdir()
    for step in range(1, 129):
        most.log(step, {"expert_load": np.zeros((1, 2))}, {})
    assert 30 <= len(most.load.read()) <= 64  # step 1 counts too
    assert plain(np.array([1.0, np.inf])) == [1.0, "inf"]


def test_compile_counter_counts_its_function_only():
    import jax

    counter = CompileCounter("counted_here")

    def counted_here(x):
        return x + 1

    jitted = jax.jit(counted_here)
    for _ in range(3):
        jitted(jnp.zeros(3))
    jax.jit(lambda x: x * 3)(jnp.zeros(5))
    assert counter.count == 1 and counter.seconds > 0
    jitted(jnp.zeros(4))
    assert counter.count == 2


def test_processes_agree_on_the_end_every_few_steps():
    """This process is asked to stop in step 2; all stop where they ask each other, in step 4."""
    asked = []

    def at(batch, request):
        if batch == 1:
            request.reason = "SIGTERM"

    def agree(reason):
        asked.append(reason)
        return reason

    result = _run(Care(), 0, 9, at=at, agree=agree, agree_every=4)
    assert (result.step, result.reason, asked) == (4, "SIGTERM", ["SIGTERM"])
