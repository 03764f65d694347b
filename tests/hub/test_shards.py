"""Safetensors files: ranged reads, files that are cut or damaged, agreement with the format's own package."""

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from moejax import hub
from moejax.hub.shards import SHORT_RANGE, ShardReader, TensorSpec, write_shard

FIRST, SECOND = "model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"


@pytest.fixture
def k3(tmp_path, golden_folder):
    """A copy of the golden K3 checkpoint that a test may damage."""
    source = golden_folder / "k3_tiny"
    for path in [*source.glob("*.safetensors"), *source.glob("*.json")]:
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def write(folder, arrays, name="model.safetensors"):
    codes = {"float32": "F32", "bfloat16": "BF16", "uint8": "U8", "float64": "F64"}
    specs = {key: TensorSpec(value.shape, codes[value.dtype.name]) for key, value in arrays.items()}
    return write_shard(folder / name, specs, lambda key: arrays[key], {"format": "pt"})


def test_the_formats_own_package_reads_what_is_written(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.integers(0, 256, 7).astype(np.uint8),
        "scalar": np.array(2.5, np.float64),
        "empty": np.zeros((0, 4), np.float32),
    }
    size = write(tmp_path, arrays)
    assert size == (tmp_path / "model.safetensors").stat().st_size
    read = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert read.keys() == arrays.keys()
    for name, value in arrays.items():
        np.testing.assert_array_equal(read[name], value)
    with ShardReader(tmp_path) as reader:
        assert reader.metadata == {"format": "pt"}
        for name, value in arrays.items():
            np.testing.assert_array_equal(reader.read(name), value)


def test_what_the_formats_own_package_writes_is_read(tmp_path):
    arrays = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.arange(5, dtype=np.uint8)}
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        for name, value in arrays.items():
            np.testing.assert_array_equal(reader.read(name), value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_ranges_read_what_slicing_would_and_count_their_bytes(tmp_path, dtype):
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    wide = (np.arange(6 * 3 * SHORT_RANGE) % 251).astype(kind).reshape(6, -1)
    deep = (np.arange(5 * 3 * 4) % 200).astype(kind).reshape(5, 3, 4)
    write(tmp_path, {"wide": wide, "deep": deep})
    with ShardReader(tmp_path) as reader:
        rows = reader.read("wide", [(1, 4), (0, wide.shape[1])])
        np.testing.assert_array_equal(rows, wide[1:4])
        assert reader.bytes_read == rows.nbytes
        columns = reader.read("wide", [(0, 6), (7, 7 + SHORT_RANGE)])  # worth a read of its own for each row
        np.testing.assert_array_equal(columns, wide[:, 7 : 7 + SHORT_RANGE])
        assert reader.bytes_read == rows.nbytes + columns.nbytes
        np.testing.assert_array_equal(reader.read("wide", [(2, 5), (3, 9)]), wide[2:5, 3:9])
        np.testing.assert_array_equal(reader.read("deep", [(1, 3), (1, 2), (0, 3)]), deep[1:3, 1:2, 0:3])


def refused(folder, *words):
    with pytest.raises(ValueError) as error:
        hub.load(folder)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize("cut", [1, 1000, 500_000])
def test_truncated_shard_is_refused_by_name(k3, cut):
    path = k3 / SECOND
    path.write_bytes(path.read_bytes()[:-cut])
    refused(k3, SECOND, "truncated")


@pytest.mark.parametrize("content", [b"", b"\x01\x02\x03", b"\xff" * 64, struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"])
def test_damaged_header_is_refused_by_name(k3, content):
    (k3 / FIRST).write_bytes(content)
    refused(k3, FIRST, "damaged")


def edit_header(path, change):
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])


def move(header):
    entry = header["language_model.lm_head.weight"]
    entry["data_offsets"] = [offset + 2 for offset in entry["data_offsets"]]


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["language_model.lm_head.weight"].update(shape=[256, 63]),
        lambda header: header["language_model.lm_head.weight"].update(dtype="Q7"),
        lambda header: header["language_model.lm_head.weight"].pop("data_offsets"),
        lambda header: header["language_model.lm_head.weight"].update(data_offsets=[0]),
        lambda header: header["language_model.lm_head.weight"].update(data_offsets=None),
        lambda header: header["language_model.lm_head.weight"].update(shape=5),
        lambda header: header["language_model.lm_head.weight"].update(shape=[-256, -64]),
        lambda header: header["language_model.lm_head.weight"].update(dtype=[]),
        move,
    ],
)
def test_header_that_contradicts_itself_is_refused_by_name(k3, change):
    holder = next(p for p in (k3 / FIRST, k3 / SECOND) if b'"language_model.lm_head.weight"' in p.read_bytes())
    edit_header(holder, change)
    refused(k3, holder.name, "language_model.lm_head.weight")


def test_missing_file_and_index_that_disagrees(k3):
    index = json.loads((k3 / "model.safetensors.index.json").read_text())
    name = "language_model.model.norm.weight"
    place = index["weight_map"][name]
    index["weight_map"][name] = SECOND if place == FIRST else FIRST
    (k3 / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(k3, name, "disagree")
    (k3 / SECOND).unlink()
    with pytest.raises(FileNotFoundError, match=SECOND):
        hub.load(k3)
    index["weight_map"][name] = "../model.safetensors"
    (k3 / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(k3, "outside")
    (k3 / "model.safetensors.index.json").write_text("{")
    refused(k3, "index", "damaged")


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hub.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "kimi_linear"}')
    with pytest.raises(FileNotFoundError, match="safetensors"):
        hub.load(tmp_path)
