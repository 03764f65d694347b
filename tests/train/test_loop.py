import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train.loop import MAX_SKIPPED, StopRequest, run_loop, stop_on_signals
from moejax.train.tracker import CompileCounter, JsonLines, Tracker, plain_value


def _run(first, last, *, save_every=100, at=lambda step, request: None, skip=lambda step: 0, deadline=None):
    """A loop whose state is the list of batches seen. -> (result, metrics in order, saves with what was logged)."""
    request, seen, saves = StopRequest(), [], []

    def train_step(state, batch):
        at(batch + 1, request)
        return [*state, batch], {"loss": jnp.float32(batch), "skipped": jnp.int32(skip(batch + 1))}

    result = run_loop(
        train_step,
        list(range(first)),
        lambda step: step,
        first=first,
        last=last,
        on_metrics=lambda step, metrics, seconds: seen.append((step, float(metrics["loss"]))),
        save=lambda step, state: saves.append((step, len(state), len(seen))),
        save_every=save_every,
        request=request,
        deadline=deadline,
    )
    return result, seen, saves


def test_every_step_once_in_order_and_saved_after_its_metrics():
    result, seen, saves = _run(3, 10, save_every=4)
    assert result.state == list(range(10)) and result.step == 10 and result.reason == ""
    assert seen == [(step, step - 1.0) for step in range(4, 11)]
    assert saves == [(4, 4, 1), (8, 8, 5), (10, 10, 7)]


def test_nothing_to_do():
    result, seen, saves = _run(5, 5)
    assert (result.step, result.reason, seen, saves) == (5, "", [], [])


def test_a_request_ends_after_the_step_with_a_checkpoint():
    def at(step, request):
        if step == 6:
            request.reason = "Ctrl-C"

    result, seen, saves = _run(0, 10, at=at)
    assert (result.step, result.reason) == (6, "Ctrl-C")
    assert len(seen) == 6 and saves == [(6, 6, 6)]


def test_the_time_budget_ends_the_run():
    result, _, saves = _run(0, 1000, at=lambda step, request: time.sleep(0.01), deadline=time.monotonic() + 0.05)
    assert result.reason == "the time budget" and 1 <= result.step < 100
    assert saves[-1][0] == result.step


def test_updates_skipped_in_a_row_end_the_run_but_single_ones_do_not():
    result, _, _ = _run(0, 50, skip=lambda step: step % 3 == 0)
    assert result.step == 50
    result, _, saves = _run(0, 50, skip=lambda step: step >= 20)
    assert "not finite" in result.reason and f"{MAX_SKIPPED} steps" in result.reason
    assert result.step in (19 + MAX_SKIPPED, 20 + MAX_SKIPPED)  # metrics come one step behind
    assert saves[-1][0] == result.step


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
    assert plain_value(np.array([1.0, np.inf])) == [1.0, "inf"]


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
    request, asked, saved = StopRequest(), [], []

    def train_step(state, batch):
        if batch == 1:
            request.reason = "SIGTERM"
        return state + 1, {"skipped": np.int32(0)}

    def agree(reason):
        asked.append(reason)
        return reason

    result = run_loop(
        train_step,
        0,
        lambda index: index,
        first=0,
        last=9,
        on_metrics=lambda step, metrics, seconds: None,
        save=lambda step, state: saved.append(step),
        save_every=100,
        request=request,
        agree=agree,
        agree_every=4,
    )
    assert (result.step, result.reason, asked, saved) == (4, "SIGTERM", ["SIGTERM"], [4])
