"""The queue-backed stream: every item once in the parameters, whenever the process is killed."""

import json
import queue
import subprocess
import sys
import threading

import numpy as np
import pytest

from moejax.data.queue_source import LEDGER, QueueStream, put_item
from moejax.data.sources import TokenDocument


def item(number, mask=None):
    return TokenDocument(np.array([number, number + 1], np.int32), mask)


def filled(kind, folder, names, maxsize=100):
    """A queue or a folder with an item for each name."""
    if kind == "queue":
        items = queue.Queue(maxsize=maxsize)
        for i, name in enumerate(names):
            items.put((name, item(i)))
        return items
    folder.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        put_item(folder, name, item(i), limit=maxsize)
    return folder


def drained(stream):
    taken = []
    while True:
        try:
            taken.append(stream.take()[0])
        except queue.Empty:
            return taken


both = pytest.mark.parametrize("kind", ["queue", "folder"])


@both
def test_take_and_acknowledge(kind, tmp_path):
    stream = QueueStream(filled(kind, tmp_path / "q", ["a", "b", "c"]), capacity=4)
    name, document = stream.take()
    assert name == "a" and document.ids.tolist() == [0, 1] and document.ids.dtype == np.int32 and document.mask is None
    stream.take()
    state = stream.state(10)
    stream.take()
    assert json.loads(json.dumps(state)) == state and state["in_flight"] == ["a", "b"]
    assert stream.in_flight == ("a", "b", "c")
    assert stream.acknowledge(10) == ("a", "b") and stream.in_flight == ("c",)
    if kind == "folder":
        assert sorted(p.name for p in (tmp_path / "q").iterdir()) == [LEDGER, "c.json"]
    with pytest.raises(queue.Empty):
        stream.take(timeout=0.01)


def test_masks_travel(tmp_path):
    put_item(tmp_path, "m", item(3, np.array([False, True])), limit=1)
    assert QueueStream(tmp_path, capacity=1).take()[1].mask.tolist() == [False, True]


@both
@pytest.mark.parametrize("killed", ["before the checkpoint", "before acknowledge", "after acknowledge"])
def test_a_restart_gives_what_no_checkpoint_contains(kind, killed, tmp_path):
    """The trained parameters are those of the newest checkpoint: what they have seen never comes, what they have not comes again."""
    names = [f"{i:02d}" for i in range(8)]
    stream = QueueStream(filled(kind, tmp_path / "q", names), capacity=8)
    state = stream.state(0)
    seen = [stream.take()[0] for _ in range(3)]
    if killed != "before the checkpoint":
        state = stream.state(3)
        if killed == "after acknowledge":
            stream.acknowledge(3)
    stream.take()  # in flight at the kill
    del stream
    # A folder is what it was; the producer behind an in-process queue died too, and delivers all anew.
    again = QueueStream(tmp_path / "q" if kind == "folder" else filled(kind, tmp_path, names), capacity=9)
    again.restore(state)
    kept = [] if killed == "before the checkpoint" else seen
    assert kept + drained(again) == names


@both
def test_going_back_in_the_same_process(kind, tmp_path):
    """A rollback: what was trained on after the checkpoint comes again first, in its old order; what was acknowledged never."""
    stream = QueueStream(filled(kind, tmp_path / "q", "abcdef"), capacity=8)
    stream.take()
    stream.state(1)
    stream.acknowledge(1)
    stream.take()
    state = stream.state(2)
    assert [stream.take()[0] for _ in range(2)] == ["c", "d"]
    stream.restore(state)
    assert stream.in_flight == ()
    assert drained(stream) == ["c", "d", "e", "f"]


@both
def test_duplicates_are_refused(kind, tmp_path):
    source = filled(kind, tmp_path / "q", ["a", "b"])
    stream = QueueStream(source, capacity=4)
    stream.take()
    stream.state(1)
    stream.acknowledge(1)
    stream.take()
    for name in ("a", "b") if kind == "queue" else ("a",):  # one that is done, and one in flight
        filled(kind, tmp_path / "q", [name]) if kind == "folder" else source.put((name, item(0)))
    assert drained(stream) == [] and stream.duplicates == (2 if kind == "queue" else 1)
    if kind == "folder":
        with pytest.raises(ValueError, match=r"item 'b' is in .* already; every item has an id of its own"):
            put_item(source, "b", item(0), limit=9)
        assert drained(QueueStream(source, capacity=4)) == ["b"]  # a fresh reader knows the ledger


def test_a_batch_made_ahead_is_not_in_the_checkpoint(tmp_path):
    stream = QueueStream(filled("folder", tmp_path, "abc"), capacity=4)
    drained(stream)
    state = stream.state(1, waiting=["c"])
    assert state["in_flight"] == ["a", "b"] and stream.acknowledge(1) == ("a", "b") and stream.in_flight == ("c",)
    again = QueueStream(tmp_path, capacity=4)
    again.restore(state)
    assert drained(again) == ["c"]
    with pytest.raises(ValueError, match="waiting holds 'z', which is not in flight"):
        stream.state(2, waiting=["z"])


@both
def test_back_pressure(kind, tmp_path):
    source = filled(kind, tmp_path / "q", "abc", maxsize=3)
    with pytest.raises(queue.Full):  # the producer waits, or is told
        source.put_nowait(("d", item(3))) if kind == "queue" else put_item(source, "d", item(3), limit=3)
    stream = QueueStream(source, capacity=2)
    stream.take()
    assert not stream.full
    stream.take()
    assert stream.full
    with pytest.raises(RuntimeError, match="2 items are in flight, which is the capacity; make a checkpoint"):
        stream.take()
    stream.state(1)
    stream.acknowledge(1)
    assert stream.take()[0] == "c"


def test_an_earlier_checkpoint_that_failed_is_covered_by_the_next(tmp_path):
    stream = QueueStream(filled("folder", tmp_path, "abc"), capacity=3)
    stream.take()
    stream.state(1)  # its write fails: never acknowledged
    stream.take()
    stream.state(2)
    assert stream.acknowledge(2) == ("a", "b") and stream.acknowledge.__self__.in_flight == ()
    with pytest.raises(ValueError, match=r"checkpoint 1 has no state here \(those to acknowledge: none\)"):
        stream.acknowledge(1)
    with pytest.raises(ValueError, match="checkpoint 1 comes after checkpoint 4"):
        stream.state(4), stream.state(1)


def test_a_producer_in_another_thread(tmp_path):
    source, names = queue.Queue(maxsize=2), [f"{i:03d}" for i in range(40)]
    thread = threading.Thread(target=lambda: [source.put((name, item(0))) for name in names])
    thread.start()
    stream, taken = QueueStream(source, capacity=5), []
    for step in range(8):
        taken += [stream.take(timeout=10)[0] for _ in range(5)]
        stream.state(step)
        stream.acknowledge(step)
    thread.join()
    assert taken == names


def test_a_line_cut_short_in_the_ledger_does_not_count(tmp_path):
    filled("folder", tmp_path, ["aa", "b\u00fc", "cc"])
    (tmp_path / LEDGER).write_bytes(b"aa\nb\xc3")  # killed while the second line was written
    stream = QueueStream(tmp_path, capacity=4)
    assert drained(stream) == ["b\u00fc", "cc"]
    stream.state(1)
    stream.acknowledge(1)
    assert (tmp_path / LEDGER).read_bytes().decode() == "aa\nb\u00fc\ncc\n"


# One process imports the package; its forks consume and are killed.
CONSUMER = """
import json, os, pathlib, signal, sys, time
from moejax.data.atomic import write_atomic
from moejax.data.queue_source import QueueStream

folder, checkpoint = map(pathlib.Path, sys.argv[1:])

def consume():
    stream = QueueStream(folder, capacity=8)
    saved = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"trained": [], "data": None, "step": 0}
    if saved["data"]:
        stream.restore(saved["data"])
    trained, step = saved["trained"], saved["step"]
    while len(trained) < 90:
        for _ in range(3):
            trained.append(stream.take(timeout=5)[0])
        step += 1
        write_atomic(checkpoint, json.dumps({"trained": trained, "data": stream.state(step), "step": step}).encode())
        stream.acknowledge(step)

def start():
    child = os.fork()
    if not child:
        try:
            consume()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return child

killed = 0
for i in range(20):
    child = start()
    time.sleep(0.0011 * i)
    os.kill(child, signal.SIGKILL)
    killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(killed >= 5, os.waitpid(start(), 0)[1])
"""


def test_kills_at_any_moment_lose_and_repeat_nothing(tmp_path):
    """A consumer killed (-9) up to twenty times between take, checkpoint and acknowledge: in the end each item was trained on once."""
    names = [f"{i:03d}" for i in range(90)]
    folder, checkpoint = filled("folder", tmp_path / "q", names), tmp_path / "checkpoint.json"
    command = [sys.executable, "-c", CONSUMER, str(folder), str(checkpoint)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout == "True 0\n"
    assert json.loads(checkpoint.read_text())["trained"] == names
    assert (folder / LEDGER).read_text().split() == names and not list(folder.glob("*.json"))


def test_what_a_stream_refuses(tmp_path):
    with pytest.raises(ValueError, match="the queue has no maxsize"):
        QueueStream(queue.Queue(), capacity=1)
    with pytest.raises(ValueError, match="capacity=0"):
        QueueStream(tmp_path, capacity=0)
    with pytest.raises(ValueError, match="is no folder; make it"):
        QueueStream(tmp_path / "nowhere", capacity=1)
    for name in ("a/b", ".a", "", "a\nb", "x" * 201, 7):
        with pytest.raises(ValueError, match="item id"):
            put_item(tmp_path, name, item(0), limit=1)
    with pytest.raises(ValueError, match="must hold `tokens`, a list of at least one id"):
        put_item(tmp_path, "a", TokenDocument(np.zeros(0, np.int32)), limit=1)
    with pytest.raises(ValueError, match="is no state of a QueueStream"):
        QueueStream(tmp_path, capacity=1).restore({"in_flight": ["a"]})


@pytest.mark.parametrize("text", ["{", "[]", '{"tokens": ["a"]}', '{"tokens": [1], "loss_mask": [1, 0]}', '{"tokens": [1.5]}'])
def test_a_file_that_cannot_be_read_is_named_and_kept(text, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    stream = QueueStream(tmp_path, capacity=1)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"bad.json cannot be taken: .* Repair the file or move it away"):
            stream.take()
    (tmp_path / "bad.json").write_text('{"tokens": [1]}')
    assert stream.take()[0] == "bad"
