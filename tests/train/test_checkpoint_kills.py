"""kill -9 before, during and after a write: the latest is always readable, and a run that goes on ends with the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train.checkpoint import Checkpointer

# One Python imports everything, then forks a run for each line it is told: an import costs seconds, a run tenths.
# Nothing has touched JAX's devices and no thread runs when it forks.
RUNS = """
import json, os, pathlib, shutil, signal, sys, threading, time
import jax, jax.numpy as jnp
import orbax.checkpoint
from moejax.train import checkpoint_files, checkpoint_folder, checkpoint_write, retention
from moejax.train.checkpoint import Checkpointer

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def before(real, condition):
    def call(*args, **kwargs):
        if condition():
            die()
        return real(*args, **kwargs)
    return call

def in_the_write(folder, step):
    tmp = pathlib.Path(folder) / f"{step}.orbax-checkpoint-tmp"
    try:
        while not any(path.is_file() for path in tmp.glob("state/**/d/*")):
            time.sleep(0.0005)
    except FileNotFoundError:
        pass  # a folder was renamed while it was looked through: the write is on
    die()

def arm(moment, folder, at, now):
    here = lambda: now[0] == at
    if moment == "before the write":
        real = checkpoint_write.Write.__init__
        checkpoint_write.Write.__init__ = before(real, here)
    elif moment == "in the write":
        threading.Thread(target=in_the_write, args=(folder, at), daemon=True).start()
    elif moment == "before the list of files":
        checkpoint_files.write_files_list = before(checkpoint_files.write_files_list, here)
    elif moment == "in the list of files":
        real = pathlib.Path.replace
        pathlib.Path.replace = lambda self, target: die() if here() and self.name == "files.json.part" else real(self, target)
    elif moment == "before the clean-up":
        retention.delete = before(retention.delete, here)
    elif moment == "in the clean-up":
        def half(path):
            sorted(p for p in pathlib.Path(path).rglob("*") if p.is_file())[0].unlink()
            die()
        real = shutil.rmtree
        retention.shutil.rmtree = lambda path: half(path) if here() else real(path)

def train(order):
    folder, last, at = order["folder"], order["last"], order.get("at")
    now = [0] if "moment" in order else None
    arm(order.get("moment"), folder, at, now)
    step_of = jax.jit(lambda s: {
        "w": [w * 0.5 + jax.random.normal(jax.random.fold_in(s["rng"], s["step"] * 10 + i), w.shape) for i, w in enumerate(s["w"])],
        "rng": s["rng"], "step": s["step"] + 1,
    }, donate_argnums=0)
    checkpoints = Checkpointer(folder, keep=order.get("keep", 2))
    state = {"w": [jnp.zeros(order["size"]) for _ in range(4)], "rng": jax.random.key(11), "step": jnp.int32(0)}
    if checkpoints.steps():
        state, metadata = checkpoints.restore(state)
        assert metadata == {"step": int(state["step"])} == {"step": checkpoints.latest_step()}
    print(f"from {int(state['step'])}", flush=True)
    for step in range(int(state["step"]) + 1, last + 1):
        state = step_of(state)
        checkpoints.check()
        if now is not None:
            checkpoints.wait()  # what is armed is for the write of this step
            now[0] = step
        checkpoints.save(step, state, {"step": step})
        print(f"saved {step}", flush=True)
    checkpoints.close()

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        train(json.loads(line))
        sys.stdout.flush()
        os._exit(0)
    print(f"pid {pid}", flush=True)
    _, status = os.waitpid(pid, 0)
    print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)
"""


class Runs:
    def __init__(self):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "OPENBLAS_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", RUNS], env=env, **pipes)

    def start(self, **order):
        """-> {"pid": of the run, "from": the step it goes on from}, when it has restored that."""
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return dict(self._word("pid", "from") for _ in range(2))

    def wait_for_saves(self, count):
        """Back when `save` was back `count` times; -> seconds the last one took from the one before it."""
        times = [time.monotonic()]
        for _ in range(count):
            self._word("saved")
            times.append(time.monotonic())
        return times[-1] - times[-2]

    def end(self):
        """-> the exit status of the run."""
        while (word := self._word("saved", "ended"))[0] != "ended":
            pass
        return word[1]

    def _word(self, *expected):
        line = self.process.stdout.readline()
        assert line.split()[:1] and line.split()[0] in expected, line + self.process.stdout.read()
        return line.split()[0], int(line.split()[1])

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self.process.stdout.close()


@pytest.fixture
def runs():
    runs = Runs()
    yield runs
    runs.close()


def _like(size):
    return {"w": [jnp.zeros(size) for _ in range(4)], "rng": jax.random.key(0), "step": jnp.int32(0)}


def _bits(state):
    return [np.asarray(x).tobytes() for x in [*state["w"], jax.random.key_data(state["rng"]), state["step"]]]


def _whole(runs, folder, size, last):
    """Bits of the state after each step of a run that nobody kills."""
    runs.start(folder=str(folder), last=last, size=size, keep=last)
    assert runs.end() == 0
    reader = Checkpointer(folder)
    return {step: _bits(reader.restore(_like(size), step=step)[0]) for step in range(1, last + 1)}


MOMENTS = {  # the latest step, as far as the one being saved
    "before the write": -1,
    "in the write": -1,
    "before the list of files": -1,
    "in the list of files": -1,
    "before the clean-up": 0,
    "in the clean-up": 0,
}


def test_killed_before_during_and_after_a_write_the_latest_is_readable_and_the_rest_the_same(tmp_path, runs):
    """Reliability bar, point 2. Each run goes on from what the last kill left, two steps further, and is killed at the next moment."""
    size, at = 30_000, 3
    whole = _whole(runs, tmp_path / "whole", size, at + len(MOMENTS) * 2 - 1)
    folder, latest = tmp_path / "run", 0
    for moment, change in MOMENTS.items():
        begun = runs.start(folder=str(folder), last=99, size=size, at=at, moment=moment)
        assert begun["from"] == latest
        assert runs.end() == -signal.SIGKILL, moment
        latest = at + change
        reader = Checkpointer(folder)
        assert reader.latest_step() == latest, moment
        for step in reader.steps():
            state, metadata = reader.restore(_like(size), step=step)
            assert metadata == {"step": step} and int(state["step"]) == step and _bits(state) == whole[step]
        at += 2
    last = max(whole)
    runs.start(folder=str(folder), last=last, size=size)
    assert runs.end() == 0
    assert _bits(Checkpointer(folder).restore(_like(size))[0]) == whole[last]
    assert sorted(path.name for path in folder.iterdir()) == [str(last - 1), str(last)]  # nothing is left of all the kills


def _kill_at_random(tmp_path, runs, *, kills, size, seed):
    """-> (seconds from the fork to the restored state of each run, latest step after each kill).

    A kill falls within one to four saves, at any moment from a save's return to the next one's: in seconds of this machine,
    however busy it is.
    """
    draw, folder, restored, steps = random.Random(seed), tmp_path / "run", [], [0]
    for _ in range(kills):
        start = time.monotonic()
        begun = runs.start(folder=str(folder), last=10_000, size=size)
        restored.append(time.monotonic() - start)
        assert begun["from"] == steps[-1]
        saves = draw.randint(2, 5)
        time.sleep(draw.random() * runs.wait_for_saves(saves))
        os.kill(begun["pid"], signal.SIGKILL)
        assert runs.end() == -signal.SIGKILL
        reader = Checkpointer(folder)
        steps.append(reader.latest_step() or 0)
        assert steps[-1] >= steps[-2] + saves - 1  # a save waits for the one before it
        for step in reader.steps():
            assert int(reader.restore(_like(size), step=step)[0]["step"]) == step
    return restored, steps


def test_killed_at_random_moments_the_last_state_is_that_of_a_run_nobody_killed(tmp_path, runs):
    _kill_at_random(tmp_path, runs, kills=3, size=30_000, seed=1)
    _same_as_unbroken(tmp_path, runs, 30_000)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path, runs):
    restored, steps = _kill_at_random(tmp_path, runs, kills=20, size=3_000_000, seed=2)
    _same_as_unbroken(tmp_path, runs, 3_000_000)
    print(f"48 MB state: fork to restored {np.median(restored[1:]):.2f} s (median); steps reached: {steps}")


def _same_as_unbroken(tmp_path, runs, size):
    last = (Checkpointer(tmp_path / "run").latest_step() or 0) + 1
    for name in ("run", "whole"):
        runs.start(folder=str(tmp_path / name), last=last, size=size)
        assert runs.end() == 0
    broken, whole = (Checkpointer(tmp_path / name).restore(_like(size), step=last)[0] for name in ("run", "whole"))
    assert _bits(broken) == _bits(whole)
