"""Which checkpoints stay: the rule, and the folders after each save of the class."""

import itertools
import json

import jax.numpy as jnp
import pytest

from moejax.train import retention
from moejax.train.checkpoint import Checkpointer, CheckpointError


def _save(writer, step, metric=None):
    writer.save(step, {"w": jnp.full(3, float(step))}, {"step": step}, metric=metric)
    writer.wait()


def _folders(folder):
    return sorted((path.name for path in folder.iterdir() if path.is_dir()), key=lambda name: (len(name), name))


def test_the_newest_the_best_and_the_known_good_stay():
    kept = lambda **options: sorted(retention.kept([1, 2, 3, 4, 5], **options))
    losses = {1: 0.5, 2: 0.1, 4: 0.1, 5: 0.9}
    assert kept(newest=2) == [4, 5]
    assert kept(newest=9) == [1, 2, 3, 4, 5]
    assert kept(newest=1, best=1, metrics=losses) == [4, 5]  # of equal values the newer
    assert kept(newest=1, best=2, metrics=losses) == [2, 4, 5]
    assert kept(newest=1, best=9, metrics=losses) == [1, 2, 4, 5]  # 3 was never measured
    assert kept(newest=1, best=1, metrics=losses, mode="max") == [5]
    assert kept(newest=1, best=1, metrics={1: -1.0, 9: -2.0}, known_good=3) == [1, 3, 5]  # 9 is no checkpoint
    assert kept(newest=2, known_good=8) == [4, 5]


def test_flowgym_51_the_best_never_push_out_the_newest_and_prime_rl_1537_clean_up_goes_on_after_a_resume(tmp_path):
    """C6: keep 3 and the best one; the metric gets worse from save to save. Stop, resume, save on."""
    seconds = itertools.count(1000.0, 60.0)
    make = lambda: Checkpointer(tmp_path, keep=3, keep_best=1, clock=lambda: next(seconds))
    writer, seen = make(), []
    for step in (100, 200, 300, 400, 500):
        _save(writer, step, metric=step / 100)
        seen.append(_folders(tmp_path))
    assert seen == [
        ["100"],
        ["100", "200"],
        ["100", "200", "300"],
        ["100", "200", "300", "400"],
        ["100", "300", "400", "500"],
    ]
    assert [writer.describe(step)["saved_at"] for step in (100, 500)] == [1000.0, 1240.0]
    writer.close()
    writer = make()
    state, metadata = writer.restore({"w": jnp.zeros(3)})
    assert metadata == {"step": 500} == writer.metadata() and float(state["w"][0]) == 500
    for step in (600, 700, 800, 900):
        _save(writer, step, metric=step / 100)
        assert len(_folders(tmp_path)) == 4
    assert _folders(tmp_path) == ["100", "700", "800", "900"]
    _save(writer, 1000, metric=0.5)  # now the best is among the newest
    assert _folders(tmp_path) == ["800", "900", "1000"]
    writer.close()


def test_a_metric_that_is_not_finite_or_missing_is_never_the_best(tmp_path):
    with Checkpointer(tmp_path, keep=1, keep_best=1, best="max") as writer:
        for step, metric in ((1, 0.25), (2, float("nan")), (3, float("inf")), (4, None), (5, 0.0)):
            _save(writer, step, metric)
        assert writer.steps() == [1, 5]
        assert [writer.describe(step)["metric"] for step in (1, 5)] == [0.25, 0.0]


def test_an_old_step_that_cannot_be_read_does_not_stop_the_clean_up(tmp_path):
    with Checkpointer(tmp_path, keep=2) as writer:
        for step in (1, 2):
            _save(writer, step, metric=step)
    (tmp_path / "1" / "record" / "metadata").write_text("{")
    with Checkpointer(tmp_path, keep=2, keep_best=1) as writer:
        _save(writer, 3, metric=3.0)
        assert writer.steps() == [2, 3]


def test_the_promoted_one_stays_until_another_is_promoted(tmp_path):
    events = []
    writer = Checkpointer(tmp_path, keep=1, record=events.append)
    assert writer.known_good() is None
    with pytest.raises(ValueError, match=r"step 1 is not among the checkpoints \[\]"):
        writer.promote(1)
    _save(writer, 1)
    writer.promote(1)
    for step in (2, 3):
        _save(writer, step)
        assert writer.steps() == [1, step]
    writer.close()
    writer = Checkpointer(tmp_path, keep=1, record=events.append)  # it outlives the process
    assert writer.known_good() == 1 and writer.describe(1)["known_good"] and not writer.describe(3)["known_good"]
    writer.promote(3)
    _save(writer, 4)
    assert writer.steps() == [3, 4] and writer.known_good() == 3
    assert float(writer.restore({"w": jnp.zeros(3)}, step=3)[0]["w"][0]) == 3
    assert [e["step"] for e in events if e["event"] == "promoted"] == [1, 3]
    writer.close()
    retention.delete(tmp_path, 3)
    with pytest.raises(ValueError, match=r"step 3 was promoted .* its checkpoint is gone"):
        writer.known_good()
    (tmp_path / retention.KNOWN_GOOD).write_text("{")
    with pytest.raises(ValueError, match=r"known_good.json is unreadable"):
        writer.known_good()


def test_a_run_that_goes_back_leaves_no_later_step_behind(tmp_path):
    """A rollback to 2: what came after it is of another branch, and a step of it may be written again."""
    writer = Checkpointer(tmp_path, keep=5, keep_best=1)
    for step in (1, 2, 3, 4):
        _save(writer, step, metric=-step)
    writer.promote(2)
    with pytest.raises(ValueError, match=r"step 3 comes after step 4 .* calls rewind\(step\) first"):
        writer.save(3, {"w": jnp.zeros(3)})
    writer.save(5, {"w": jnp.zeros(3)})
    writer.rewind(2)  # while 5 is being written
    assert writer.steps() == [1, 2] and writer.latest_step() == writer.known_good() == 2
    _save(writer, 4, metric=3.0)
    assert writer.describe(4)["metric"] == 3.0 and float(writer.restore({"w": jnp.zeros(3)})[0]["w"][0]) == 4
    writer.rewind(1)
    assert writer.steps() == [1] and writer.known_good() is None  # it was of the branch that was left
    writer.rewind(None)
    assert writer.steps() == [] and writer.latest_step() is None
    writer.close()


def test_a_clean_up_that_fails_is_reported_and_the_step_counts(tmp_path, monkeypatch):
    events = []
    writer = Checkpointer(tmp_path, keep=1, record=events.append)
    _save(writer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(retention.shutil, "rmtree", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        writer.save(2, {"w": jnp.zeros(3)})
        with pytest.raises(CheckpointError, match=r"2 is written, and cleaning up older ones failed: PermissionError"):
            writer.wait()
    assert writer.steps() == [2] and [e["event"] for e in events[1:]] == ["checkpoint_saved", "checkpoint_failed"]
    _save(writer, 3)
    assert _folders(tmp_path) == ["3"]  # what was left of step 1 is gone too
    writer.close()


def test_a_file_half_written_never_takes_the_place_of_the_promotion(tmp_path, monkeypatch):
    retention.write_known_good(tmp_path, 7)
    monkeypatch.setattr(retention.json, "dump", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        retention.write_known_good(tmp_path, 8)
    assert retention.read_known_good(tmp_path) == 7 == json.loads((tmp_path / retention.KNOWN_GOOD).read_text())["step"]
