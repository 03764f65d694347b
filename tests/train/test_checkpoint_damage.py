"""Damaged checkpoints are named and never used unasked; checksums, the list of files, and how often they are read."""

import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train import checkpoint_files as files
from moejax.train.checkpoint import Checkpointer, DamagedCheckpointError


def _state(value=1.0):
    return {"w": jnp.full((30, 4), float(value)), "step": jnp.int32(value), "key": jax.random.key(int(value))}


def _assert_same(a, b):
    for name in ("w", "step"):
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes()
    assert (jax.random.key_data(a["key"]) == jax.random.key_data(b["key"])).all()


def _save_all(folder, steps):
    with Checkpointer(folder) as writer:
        for step in steps:
            writer.save(step, _state(step), {"step": step})


@pytest.mark.parametrize("harm", ["flip a byte", "remove", "truncate"])
def test_a_damaged_file_is_named_and_skipped_only_when_asked(tmp_path, harm):
    _save_all(tmp_path, [1, 2])
    listed = files.read_files_list(tmp_path / "2")["files"]
    name = max(listed, key=lambda n: listed[n][0])
    path = tmp_path / "2" / name
    data = path.read_bytes()
    path.unlink()
    if harm != "remove":
        path.write_bytes(data[:-1] if harm == "truncate" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    reader = Checkpointer(tmp_path)
    for read in (reader.latest_step, reader.metadata, lambda: reader.restore(_state())):
        with pytest.raises(DamagedCheckpointError, match=r"2 cannot be used.*on_damage='previous'") as error:
            read()
        assert name in str(error.value) and error.value.step == 2
    with pytest.raises(ValueError, match="2 cannot be used") as error:
        reader.restore(_state(), step=2, on_damage="previous")  # a step asked for is never replaced
    assert name in str(error.value) and name in (reader.verify(2) or "") and reader.verify(1) is None
    with pytest.warns(UserWarning, match="2 cannot be used.*step 1 is used instead") as record:
        state, metadata = reader.restore(_state(), on_damage="previous")
    assert name in str(record[0].message) and metadata == {"step": 1}
    _assert_same(state, _state(1))
    reader.save(2, _state(20))  # the damaged one is set aside, not deleted
    reader.close()
    assert reader.latest_step() == 2 and (tmp_path / "damaged-2-0").is_dir()
    _assert_same(Checkpointer(tmp_path).restore(_state())[0], _state(20))


def test_a_damaged_list_or_none_that_is_whole_is_an_error(tmp_path):
    _save_all(tmp_path, [1, 2])
    for step in (1, 2):
        (tmp_path / str(step) / "files.json").write_text('{"state')
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint in .* is whole: .*2 cannot.*files.json is unreadable.*1 cannot"):
        Checkpointer(tmp_path).restore(_state(), on_damage="previous")
    with pytest.raises(DamagedCheckpointError, match=r"files.json is unreadable"):
        Checkpointer(tmp_path).latest_step()


def test_a_newer_damaged_step_does_not_stay_the_newest(tmp_path):
    """Resumed from 1 past a damaged 5, the next save is 3 or 7: either way it is the latest afterwards."""
    for go_on in (3, 7):
        folder = tmp_path / str(go_on)
        _save_all(folder, [1, 5])
        (folder / "5" / "record" / "metadata").write_text("{}")
        writer = Checkpointer(folder)
        with pytest.warns(UserWarning, match="step 1 is used instead"):
            writer.restore(_state(), on_damage="previous")
        writer.save(go_on, _state(go_on))
        writer.close()
        assert (folder / "damaged-5-0").is_dir()
        assert Checkpointer(folder).latest_step() == go_on and Checkpointer(folder).steps() == [1, go_on]


def test_a_damaged_file_that_was_put_back_counts_again(tmp_path):
    _save_all(tmp_path, [1, 5])
    path = tmp_path / "5" / "record" / "metadata"
    good = path.read_bytes()
    path.write_text("{}")
    writer = Checkpointer(tmp_path)
    assert "record/metadata has 2 bytes" in (writer.verify(5) or "")
    path.write_bytes(good)
    with pytest.raises(ValueError, match="step 3 comes after step 5"):
        writer.save(3, _state(3))
    writer.save(6, _state(6))
    writer.close()
    assert writer.steps() == [5, 6] and writer.verify(5) is None


def test_files_are_read_once_and_again_only_when_they_changed(tmp_path, monkeypatch):
    read, crc32 = [], files._crc32
    monkeypatch.setattr(files, "_crc32", lambda path, *a, **k: read.append(path) or crc32(path, *a, **k))
    writer = Checkpointer(tmp_path)
    writer.save(1, _state(1))
    writer.wait()
    assert read and all(path.is_relative_to(tmp_path / "1") for path in read)
    read.clear()
    writer.save(2, _state(2))
    writer.wait()
    assert all(path.is_relative_to(tmp_path / "2") for path in read)
    read.clear()
    assert writer.latest_step() == 2 and writer.metadata() == {} and not read  # this process read them back when it wrote them
    reader = Checkpointer(tmp_path)
    reader.latest_step()
    count = len(read)
    assert count == len(files.read_files_list(tmp_path / "2")["files"])
    reader.restore(_state()), reader.latest_step(), reader.steps()
    assert len(read) == count
    path = next((tmp_path / "2" / "state").glob("_METADATA"))
    path.write_bytes(path.read_bytes()[::-1])
    for instance in (reader, writer):
        with pytest.raises(DamagedCheckpointError, match="_METADATA differs"):
            instance.latest_step()
    writer.close()


def test_checksums_are_those_of_the_pieces_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 7)
    monkeypatch.setattr(files, "BLOCK", 3)
    for size in (0, 1, 6, 7, 8, 30):
        (tmp_path / str(size)).write_bytes(bytes(range(size)))
    listing = files.write_files_list(tmp_path, {"step": 1})
    assert json.loads((tmp_path / "files.json").read_text()) == listing == files.read_files_list(tmp_path)
    for size in (0, 1, 6, 7, 8, 30):
        data = bytes(range(size))
        assert listing["files"][str(size)] == [size, [zlib.crc32(data[i : i + 7]) for i in range(0, max(size, 1), 7)]]
    assert files.damage(tmp_path) is None
    (tmp_path / "30").write_bytes(bytes([*range(15), 99, *range(16, 30)]))
    (tmp_path / "0").write_bytes(b"x")
    assert files.damage(tmp_path) == "0 has 1 bytes, 0 were written; 30 differs from what was written near byte 14"
    shares = [files.damage(tmp_path, share=(i, 2)) for i in range(2)]  # two processes divide the files between them
    assert [s for s in shares if s] and "; ".join(sorted(s for s in shares if s)) == files.damage(tmp_path)


def test_write_shares_of_several_processes_make_one_list(tmp_path):
    for index in range(3):
        folder = tmp_path / "state" / f"ocdbt.process_{index}"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(bytes([index]) * (index + 1))
    alone = files.write_files_list(tmp_path, {})
    (tmp_path / "files.json").unlink()
    for index in (1, 2):
        files.write_share(tmp_path, index)
    assert files.write_files_list(tmp_path, {}, processes=3) == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files.json", "state"]
    (tmp_path / "files.1.part").write_text('"OSError: disk"'), files.write_share(tmp_path, 2)
    with pytest.raises(OSError, match="process 1 could not read back what it wrote: OSError: disk"):
        files.write_files_list(tmp_path, {}, processes=3)
