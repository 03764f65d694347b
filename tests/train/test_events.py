"""The event file: strict JSON, one writer, whole lines whatever a crash cut."""

import json
import os
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train import events
from moejax.train.events import EventLog, read_events

LOAD = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("events", sys.argv[2])  # the file alone: the package would load JAX, a second each time
events = importlib.util.module_from_spec(spec)
spec.loader.exec_module(events)
EventLog = events.EventLog
"""

CRASH = """
log = EventLog(sys.argv[1], run_id="killed")
log.record({"event": "stage", "step": 7})
os.write(log._file, b'{"version": 1, "run": "killed", "event": "rollb')
os._exit(9)
"""

SECOND = """
try:
    EventLog(sys.argv[1])
except RuntimeError as error:
    print(error)
"""


def _python(code, path):
    done = subprocess.run([sys.executable, "-c", LOAD + code, str(path), events.__file__], capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def test_a_line_has_version_run_time_and_step(path):
    with EventLog(path, run_id="r1", clock=lambda: 1_800_000_000.25) as log:
        log.record({"event": "rollback", "step": np.int64(3), "to": 1, "layers": [1, 2]})
    assert json.loads(path.read_text()) == {
        "version": 1,
        "run": "r1",
        "time": "2027-01-15T08:00:00.250+00:00",
        "event": "rollback",
        "step": 3,
        "to": 1,
        "layers": [1, 2],
    }


def test_everything_is_strict_json(path):
    values = {"loss": float("nan"), "norm": np.float32("inf"), "logits": jnp.asarray([1.0, -jnp.inf], jnp.bfloat16), "n": np.arange(2)}
    with EventLog(path) as log:
        log.record({"event": "alarm", "step": 1, "nested": {"values": values}})

    def refuse(word):
        raise AssertionError(word)

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line["nested"]["values"] == {"loss": "nan", "norm": "inf", "logits": [1.0, "-inf"], "n": [0, 1]}


def test_runs_follow_each_other_in_one_file(path):
    for run in ("a", "b"):
        with EventLog(path, run_id=run) as log:
            log.record({"event": "restored", "step": 5})
            assert log.read()[-1]["run"] == run
    assert [event["run"] for event in read_events(path)] == ["a", "b"]
    assert len({EventLog(path.with_name(name)).run_id for name in ("x", "y")}) == 2


def test_a_killed_process_leaves_whole_lines_and_no_lock(path):
    assert _python(CRASH, path).returncode == 9
    assert path.read_bytes().endswith(b"rollb")
    assert [line["event"] for line in read_events(path)] == ["stage"]
    with EventLog(path, run_id="next") as log:
        log.record({"event": "restored", "step": 7})
    assert [(event["run"], event["event"]) for event in read_events(path)] == [("killed", "stage"), ("next", "restored")]


def test_every_cut_of_the_last_line_is_tolerated(path):
    with EventLog(path, run_id="r") as log:
        for step in (1, 2):
            log.record({"event": "stage", "step": step})
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [event["step"] for event in read_events(path)] == [1]
    assert read_events(path.with_name("absent")) == []


def test_never_two_writers(path):
    with EventLog(path) as log:
        log.record({"event": "stage", "step": 1})
        log.read()  # reading must not let the lock go
        assert "another process" in _python(SECOND, path).stdout
        with pytest.raises(RuntimeError, match="this process"):
            EventLog(path)
    assert _python(SECOND, path).stdout == ""
    with pytest.raises(RuntimeError, match="closed"):
        log.record({"event": "stage", "step": 2})


def test_a_forked_child_does_not_write(path, monkeypatch):
    with EventLog(path) as log:
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(RuntimeError, match="must not write"):
            log.record({"event": "stage", "step": 1})
        monkeypatch.undo()


def test_threads_share_a_log(path):
    with EventLog(path) as log:
        write = lambda number: [log.record({"event": "stage", "step": number, "text": "x" * 500}) for _ in range(20)]
        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps = [event["step"] for event in read_events(path)]
    assert sorted(steps) == sorted([0, 1, 2, 3] * 20)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"step": 1}, "no name"),
        ({"event": "", "step": 1}, "no name"),
        ({"event": "stage"}, "must be an integer"),
        ({"event": "stage", "step": 1.5}, "must be an integer"),
        ({"event": "stage", "step": True}, "must be an integer"),
        ({"event": "stage", "step": 1, "time": 3}, "the log writes these itself"),
        ({"event": "stage", "step": 1, "why": object()}, "cannot be written"),
    ],
)
def test_bad_events_leave_the_file_as_it_is(path, event, message):
    with EventLog(path) as log:
        with pytest.raises(ValueError, match=message):
            log.record(event)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "message"), [("{oops", "line 2 is no event"), ('{"version": 2}', "line 2 has layout version 2"), ("[]", "no event")]
)
def test_a_damaged_line_is_named(path, line, message):
    path.write_text('{"version": 1, "event": "stage", "step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_events(path)
    with pytest.raises(ValueError, match=message):
        EventLog(path)
    path.unlink()
    EventLog(path).close()  # the refusal let the lock go
