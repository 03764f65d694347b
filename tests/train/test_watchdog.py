"""The stall watchdog: on a clock of its own for the rules, on real time for the thread and the end of the process."""

import json
import pathlib
import subprocess
import sys
import threading
import time

import pytest

from moejax.train import watchdog as module
from moejax.train.events import EventLog, read_events
from moejax.train.watchdog import STALL_STATUS, Watchdog


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Watched:
    """A watchdog on a fake clock, without its thread."""

    def __init__(self, folder, **settings):
        self.clock, self.events, self.exits = Clock(), [], []
        self.dog = Watchdog(
            folder / "stalls.txt", self.events.append, clock=self.clock, exit=self.exits.append, **{"floor_s": 10.0} | settings
        )

    def steps(self, first, last, seconds):
        for step in range(first, last + 1):
            self.clock.now += seconds
            self.dog.step_done(step)

    def wait(self, seconds):
        self.clock.now += seconds
        return self.dog.check()


def test_the_limit_is_five_medians_or_the_floor(tmp_path):
    w = Watched(tmp_path)
    assert w.dog.limit() == 10.0
    w.steps(1, 20, 1.0)
    assert w.dog.limit() == 10.0
    w.steps(21, 100, 4.0)
    w.steps(101, 101, 19.0)  # one slow step does not move the median
    assert w.dog.limit() == 20.0
    assert w.events == [] and w.wait(20.0) is None and w.wait(0.1) is not None


def test_one_event_a_stall_and_one_when_it_ends(tmp_path):
    w = Watched(tmp_path)
    w.steps(1, 5, 1.0)
    assert [w.wait(4.0) for _ in range(2)] == [None, None]
    event = w.wait(3.0)
    assert event == w.events[0] and [w.wait(50.0) for _ in range(3)] == [None] * 3
    assert (event["event"], event["step"], event["seconds"], event["limit"], event["phase"]) == ("stall", 5, 11.0, 10.0, "step")
    w.steps(6, 6, 1.0)
    assert w.events[1:] == [{"event": "stall_cleared", "step": 6, "seconds": 162.0}]
    assert w.dog.stalls == 1 and w.dog.stalled_s == 162.0
    w.steps(7, 9, 1.0)
    assert w.wait(11.0) is not None and w.dog.stalls == 2 and w.exits == []


def test_phases_have_their_own_limit_and_are_no_steps(tmp_path):
    w = Watched(tmp_path)
    with w.dog.busy("compiling", 100.0):
        assert w.wait(99.0) is None
        w.dog.step_done(1)  # the first step ends within
    w.steps(2, 9, 1.0)
    assert w.dog.limit() == 10.0
    with w.dog.busy("checkpoint", 30.0):
        assert w.wait(25.0) is None
        w.dog.step_done(9)  # a late one, whose metrics came while saving
        with w.dog.busy("inner", 5.0):
            assert w.dog.limit() == 5.0
        assert w.wait(29.0) is None  # the clock starts anew
        event = w.wait(2.0)
        assert event is not None and event["phase"] == "checkpoint"
    assert w.events[-1]["event"] == "stall_cleared"
    assert w.wait(9.0) is None
    w.steps(10, 10, 0.5)
    assert max(w.dog._seconds) < 10
    with pytest.raises(KeyError), w.dog.busy("fails", 1.0):
        raise KeyError
    assert w.dog.limit() == 10.0


def test_the_stacks_of_all_threads_are_written(tmp_path):
    w = Watched(tmp_path)
    release = threading.Event()

    def somewhere_in_a_collective_call():
        release.wait()

    thread = threading.Thread(target=somewhere_in_a_collective_call)
    thread.start()
    try:
        w.wait(11.0)
    finally:
        release.set()
        thread.join()
    text = (tmp_path / "stalls.txt").read_text()
    assert "somewhere_in_a_collective_call" in text and "test_the_stacks_of_all_threads_are_written" in text
    assert "no sign of life for 11.0 s (limit 10.0 s) in 'step' after step 0" in text
    assert w.events[0]["stacks"].endswith("stalls.txt")
    json.dumps(w.events)


def test_abort_ends_with_a_status_of_its_own_even_if_the_disk_hangs(tmp_path, monkeypatch):
    w = Watched(tmp_path, abort=True)
    w.wait(11.0)
    assert w.exits == [STALL_STATUS] and w.events[0]["abort"] and (tmp_path / "stalls.txt").exists()
    monkeypatch.setattr(module, "REPORT_SECONDS", 0.05)
    hang = threading.Event()
    stuck = Watched(tmp_path, abort=True)
    stuck.dog._record = lambda event: hang.wait()
    stuck.wait(11.0)
    assert stuck.exits == [STALL_STATUS]
    hang.set()


def test_stacks_that_cannot_be_written_do_not_hide_the_stall(tmp_path):
    w = Watched(tmp_path / "absent")
    w.wait(11.0)
    assert w.events[0]["event"] == "stall" and "absent" in w.events[0]["stacks_error"]


def test_the_thread_on_real_time(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as log:
        with Watchdog(tmp_path / "stalls.txt", log.record, floor_s=0.2, poll_s=0.02) as dog:
            for step in range(1, 6):
                time.sleep(0.01)
                dog.step_done(step)
            for _ in range(200):  # the stall
                if dog.stalls:
                    break
                time.sleep(0.02)
            dog.step_done(6)
        thread = dog._thread
        assert thread is not None and thread.daemon and not thread.is_alive()
        with pytest.raises(RuntimeError, match="started before"), dog:
            pass
    events = read_events(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["stall", "stall_cleared"]
    assert events[0]["step"] == 5 and events[1]["step"] == 6


ABORTS = """
import importlib.util, pathlib, sys, time, types
folder = pathlib.Path(sys.argv[1])
package = types.ModuleType("bare")  # the two files alone: the package would load JAX
package.__path__ = [sys.argv[2]]
sys.modules["bare"] = package
from bare.events import EventLog
from bare.watchdog import Watchdog
with EventLog(folder / "events.jsonl") as log, Watchdog(folder / "stalls.txt", log.record, floor_s=0.1, poll_s=0.02, abort=True):
    def hangs():
        time.sleep(60)
    hangs()
"""


def test_a_hung_process_ends_with_stacks_and_event(tmp_path):
    folder = pathlib.Path(module.__file__).parent
    done = subprocess.run([sys.executable, "-c", ABORTS, str(tmp_path), str(folder)], timeout=30, capture_output=True, text=True)
    assert done.returncode == STALL_STATUS, done.stderr
    assert "in hangs" in (tmp_path / "stalls.txt").read_text()
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["stall"]


def test_step_done_costs_nothing(tmp_path):
    with Watchdog(tmp_path / "stalls.txt", lambda event: None, floor_s=60.0) as dog:
        start = time.perf_counter()
        for step in range(10_000):
            dog.step_done(step)
        assert (time.perf_counter() - start) / 10_000 < 50e-6  # 0.5 us on an idle machine


@pytest.mark.parametrize(
    ("settings", "message"), [({"factor": 0.5}, "factor is 0.5"), ({"floor_s": 0.0}, "floor_s is 0"), ({"poll_s": 0.0}, "poll_s is 0")]
)
def test_bad_settings(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        Watchdog(tmp_path / "x", lambda event: None, **settings)
    with pytest.raises(ValueError, match="limit_s of 'compiling' is nan"), Watched(tmp_path).dog.busy("compiling", float("nan")):
        pass
