"""The ledger of a run's time: every second once, over rollbacks, crashes and restarts."""

import json
import os
import random
import subprocess
import sys
import time

import pytest

from moejax.train import goodput as module
from moejax.train.goodput import BADPUT, PHASES, Goodput, process_started, read_goodput


class World:
    """A clock that the test moves; UTC runs along, at another zero, and goes on while no process runs."""

    def __init__(self):
        self.now = 50.0

    def process(self, started_ago=0.0, saved=None, step=0):
        ledger = Goodput(process_start=self.utc() - started_ago, clock=lambda: self.now, utc=self.utc)
        if saved is not None:
            ledger.restore(json.loads(json.dumps(saved, allow_nan=False)), step=step)
        return ledger

    def utc(self):
        return 1e9 + self.now

    def steps(self, ledger, first, last, seconds=2.0, **facts):
        ledger.begin()
        for step in range(first, last + 1):
            self.now += seconds
            ledger.step(step, **facts)

    def phase(self, ledger, name, seconds):
        with ledger.phase(name):
            self.now += seconds


def spent(ledger):
    return {name: value for name, value in ledger.figures()["seconds"].items() if value}


@pytest.fixture
def world():
    return World()


def test_every_second_is_booked_on_its_cause(world):
    ledger = world.process(started_ago=3.0)
    world.now += 4.0
    world.phase(ledger, "restore", 5.0)
    world.phase(ledger, "compile", 60.0)
    ledger.step(1)
    world.steps(ledger, 2, 11)
    world.steps(ledger, 12, 12, 5.0, data_wait=3.0)
    world.phase(ledger, "checkpoint", 1.5)
    world.steps(ledger, 13, 13, 9.0, stall=7.0)
    world.steps(ledger, 14, 14, skipped=True)
    with ledger.phase("evaluation"):
        world.now += 4.0
        world.phase(ledger, "data", 1.0)
    ledger.finish()
    world.now += 0.5
    want = {"productive": 24.0, "start": 7.0, "restore": 5.0, "compile": 60.0, "data": 4.0, "checkpoint": 1.5}
    assert spent(ledger) == want | {"stall": 7.0, "skipped": 2.0, "evaluation": 4.0, "other": 0.5}
    figures = ledger.figures()
    assert figures["wall"] == 115.0 and figures["goodput"] == 24.0 / 115.0 and figures["steps"] == 13
    text = "\n".join(ledger.report())
    assert "Goodput: 20.9% of 115 s (13 steps that count, 0 restarts)" in text and "52.2%  compiling" in text


def test_a_rollback_takes_the_lost_steps_time(world):
    ledger = world.process()
    world.steps(ledger, 1, 10)
    ledger.saved(10)
    world.steps(ledger, 11, 15)
    ledger.saved(15)
    world.steps(ledger, 16, 20, 3.0)
    ledger.failed()
    world.now += 1.0  # of a step that will not end
    world.phase(ledger, "restore", 6.0)
    ledger.rolled_back(10)
    assert spent(ledger) == {"productive": 20.0, "rollback_lost": 26.0, "restore": 6.0}
    assert ledger.figures()["steps"] == 10 and ledger.figures()["lost_steps"] == 10
    world.steps(ledger, 11, 20)
    assert ledger.figures()["recoveries"] == []
    world.steps(ledger, 21, 21, skipped=True)  # beyond the lost one, but not productive
    world.steps(ledger, 22, 23)
    assert ledger.figures()["recoveries"] == [{"from": 20, "lost_steps": 10, "seconds": 1.0 + 6.0 + 20.0 + 2.0 + 2.0}]
    assert ledger.figures()["seconds"]["productive"] == 44.0
    assert "recovery in 31.0 s: 10 steps lost, up to step 20" in "\n".join(ledger.report())


def test_a_second_failure_on_the_way_belongs_to_the_same_recovery(world):
    ledger = world.process()
    world.steps(ledger, 1, 10)
    ledger.saved(4)
    ledger.rolled_back(4)
    world.steps(ledger, 5, 7)
    ledger.rolled_back(4)
    world.steps(ledger, 5, 11)
    assert ledger.figures()["recoveries"] == [{"from": 10, "lost_steps": 9, "seconds": 20.0}]


def test_a_restart_goes_on_with_the_books(world):
    """Crash after step 17, last record at 16, checkpoint at 10; nothing runs for 100 s."""
    ledger = world.process(started_ago=1.0)
    world.steps(ledger, 1, 10)
    ledger.saved(10)
    world.steps(ledger, 11, 16)
    record = ledger.state()
    world.steps(ledger, 17, 17)
    world.now += 100.0
    world.now += 5.0  # the new process starts, and imports
    second = world.process(started_ago=5.0, saved=record, step=10)
    world.phase(second, "restore", 8.0)
    world.steps(second, 11, 17)
    seconds = second.figures()["seconds"]
    assert seconds["productive"] == 20.0 + 14.0 and seconds["rollback_lost"] == 12.0
    assert seconds["down"] == 102.0  # with the step that no record knows
    assert seconds["start"] == 6.0
    assert second.figures()["restarts"] == 1
    assert second.figures()["recoveries"] == [{"from": 16, "lost_steps": 6, "down": 102.0, "seconds": 5.0 + 8.0 + 14.0}]
    assert second.figures()["wall"] == 1.0 + 34.0 + 100.0 + 5.0 + 8.0 + 14.0
    assert "(and 102.0 s between the processes)" in "\n".join(second.report())


def test_a_crash_during_a_recovery(world):
    ledger = world.process()
    world.steps(ledger, 1, 10)
    ledger.saved(5)
    ledger.rolled_back(5)
    world.steps(ledger, 6, 7)
    second = world.process(saved=ledger.state(), step=5)
    world.steps(second, 6, 10)
    assert second.figures()["recoveries"] == []
    world.steps(second, 11, 11)
    assert second.figures()["recoveries"] == [{"from": 10, "lost_steps": 7, "down": 0.0, "seconds": 12.0}]


def test_a_clean_restart_loses_nothing(world):
    ledger = world.process()
    world.steps(ledger, 1, 4)
    ledger.saved(4)
    ledger.finish()
    second = world.process(saved=ledger.state(), step=4)
    world.steps(second, 5, 6)
    assert spent(second) == {"productive": 12.0}
    assert second.figures()["recoveries"] == [{"from": 4, "lost_steps": 0, "down": 0.0, "seconds": 2.0}]


def test_clocks_that_disagree_count_no_second_twice(world):
    """The new process believes that it began before the last record was written."""
    ledger = world.process()
    world.steps(ledger, 1, 4)
    second = world.process(started_ago=3.0, saved=ledger.state(), step=4)
    assert second.figures()["wall"] == 8.0 and second.figures()["seconds"]["down"] == 0


def test_marks_are_bounded_and_older_ones_estimated(world):
    ledger = world.process()
    for step in range(1, 201):
        world.steps(ledger, step, step)
        ledger.saved(step)
    assert len(ledger.state()["marks"]) == module.MARKS
    ledger.rolled_back(50)
    assert spent(ledger) == {"productive": 100.0, "rollback_lost": 300.0}
    assert ledger.figures()["steps"] == 50


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_are_never_more_than_the_wall(seed):
    """Random runs with wrong figures handed in, failures and restarts: the sum is the clock's own time, every part at least 0."""
    rng, world = random.Random(seed), World()
    began, ledger, step, saves = world.now, world.process(), 0, [0]
    for _ in range(400):
        world.now += rng.random()
        act = rng.randrange(8)
        if act < 4:
            step += 1
            ledger.step(step, data_wait=rng.choice([0, 0.1, 99, -5]), stall=rng.choice([0, 0, 99]), skipped=rng.random() < 0.1)
        elif act == 4:
            world.phase(ledger, rng.choice(PHASES), rng.random())
        elif act == 5:
            ledger.saved(step)
            saves.append(step)
        elif act == 6 and rng.random() < 0.3:
            step = rng.choice(saves)
            saves = [s for s in saves if s <= step]
            ledger.rolled_back(step)
        elif act == 7 and rng.random() < 0.3:
            record = ledger.state()
            ahead = rng.random()
            world.now += ahead
            step = rng.choice(saves)
            saves = [s for s in saves if s <= step]
            ledger = world.process(started_ago=rng.random() * ahead * 2, saved=record, step=step)
        figures = ledger.figures()
        assert figures["wall"] == pytest.approx(world.now - began, abs=1e-6)
        assert sum(figures["seconds"].values()) == pytest.approx(figures["wall"]) and min(figures["seconds"].values()) >= 0
        assert set(figures["seconds"]) == {"productive", *BADPUT} and figures["steps"] >= 0
    assert figures["restarts"] > 3 and figures["lost_steps"] > 3 and figures["recoveries"]


def test_a_clock_that_jumps_back_is_ignored(world):
    ledger = world.process()
    world.steps(ledger, 1, 2)
    world.now -= 30
    ledger.step(3)
    assert min(ledger.figures()["seconds"].values()) >= 0 and ledger.figures()["wall"] == 4.0


def test_the_file_is_replaced_whole(world, tmp_path):
    path = tmp_path / "goodput.json"
    assert read_goodput(path) is None
    ledger = world.process()
    world.steps(ledger, 1, 3)
    ledger.write(path)
    assert read_goodput(path) == ledger.state() and os.listdir(tmp_path) == ["goodput.json"]


def test_the_processes_start_is_known():
    own = time.time() - process_started()
    assert 0 <= own < 3600
    code = "import runpy, sys, time; time.sleep(0.2); print(time.time() - runpy.run_path(sys.argv[1])['process_started']())"
    out = subprocess.run([sys.executable, "-c", code, module.__file__], capture_output=True, text=True, check=True).stdout
    assert 0.19 < float(out) < 10


def test_bad_use(world):
    ledger = world.process()
    with pytest.raises(ValueError, match="'lunch' is no phase; it must be one of start"), ledger.phase("lunch"):
        pass
    with pytest.raises(ValueError, match="layout 3"):
        ledger.restore({"version": 3}, step=0)
    world.steps(ledger, 1, 1)
    with pytest.raises(ValueError, match="begun already"):
        ledger.restore(ledger.state(), step=1)
