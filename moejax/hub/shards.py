"""Safetensors files on disk: checked headers, ranged reads, streamed writes.

The format's own package gives NumPy no bfloat16, holds a whole file in memory to write one, and does not say where a
tensor's bytes are. Here a read takes the bytes that were asked for and nothing else, and a write holds one tensor.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # bytes; the limit of the format's own reader
SHORT_RANGE = 4096  # bytes of a row: below it a disk reads the pages between two ranges anyway


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype code ("BF16", "F32", "U8", ...) of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class _Place:
    file: str
    offset: int


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], int]:
    """(header, first data byte) of one file. ValueError naming the file when it is truncated or damaged."""
    size = path.stat().st_size

    def refuse(problem: str) -> ValueError:
        return ValueError(f"{path} is truncated or damaged: {problem}; fetch the file again.")

    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(size - 8, LARGEST_HEADER):
            raise refuse(f"its header of {length} bytes does not fit into {size} bytes")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise refuse(f"its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise refuse("its header is no JSON object")
    _check_offsets(header, size - 8 - length, refuse)
    return header, 8 + length


def _check_offsets(header: dict[str, Any], size: int, refuse: Callable[[str], ValueError]) -> None:
    """Tensors must lie one after the other, each as long as its shape says, up to the file's last byte."""
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if not isinstance(header.get("__metadata__", {}), dict):
        raise refuse("its __metadata__ is no table")
    for name, entry in tensors.items():
        if not isinstance(entry, dict) or not (_lengths(entry.get("shape")) and _lengths(entry.get("data_offsets"), 2)):
            raise refuse(f"the entry of {name} has no shape or no data_offsets")
        if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in DTYPES:
            raise refuse(f"{name} has dtype {entry.get('dtype')!r}, known are {', '.join(DTYPES)}")
    stop = 0
    for name, entry in sorted(tensors.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        begin, end = entry["data_offsets"]
        if begin != stop:
            raise refuse(f"the data of {name} begins at byte {begin}, the tensor before it ends at {stop}")
        if end - begin != TensorSpec(tuple(entry["shape"]), entry["dtype"]).nbytes:
            raise refuse(f"{name} has {end - begin} bytes, its shape {entry['shape']} and dtype {entry['dtype']} need another number")
        stop = end
    if stop != size:
        raise refuse(f"its header promises {stop} bytes of data, the file holds {size}")


def _lengths(value: Any, count: int | None = None) -> bool:
    """Whether a header's value is a list of (`count`) integers of at least 0."""
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value) and count in (None, len(value))


class ShardReader:
    """Every tensor of a folder of safetensors files, by name. Opening reads headers only. Threads may share a reader."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = pathlib.Path(folder)
        self.metadata: dict[str, str] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.bytes_read = 0
        """Data bytes read so far; headers are not counted."""
        self._places: dict[str, _Place] = {}
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        self._open_all()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    @property
    def weight_map(self) -> dict[str, str]:
        """{tensor: file name}."""
        return {name: place.file for name, place in self._places.items()}

    def _open_all(self) -> None:
        index = self.folder / INDEX
        listed: dict[str, str] | None = None
        if index.is_file():
            listed = _read_weight_map(index)
            files = sorted(set(listed.values()))
        elif (self.folder / SINGLE).is_file():
            files = [SINGLE]
        else:
            raise FileNotFoundError(f"{self.folder} has neither {INDEX} nor {SINGLE}; give a folder of safetensors weights.")
        if missing := [name for name in files if not (self.folder / name).is_file()]:
            raise FileNotFoundError(f"{index} names files that are not in the folder: {', '.join(missing)}; fetch them.")
        for file in files:
            self._add(file)
        if listed is not None:
            self._compare(index, listed)

    def _add(self, file: str) -> None:
        header, first = read_header(self.folder / file)
        self.metadata.update(header.pop("__metadata__", {}))
        for name, entry in header.items():
            if name in self.specs:
                raise ValueError(f"tensor {name} is in {self._places[name].file} and in {file}; a tensor has one place.")
            self.specs[name] = TensorSpec(tuple(entry["shape"]), entry["dtype"])
            self._places[name] = _Place(file, first + entry["data_offsets"][0])

    def _compare(self, index: pathlib.Path, listed: dict[str, str]) -> None:
        found = self.weight_map
        lines = [
            f"  {name}: {listed.get(name, 'not in the index')} in the index, {found.get(name, 'in no file')} on disk"
            for name in sorted(listed.keys() | found.keys())
            if listed.get(name) != found.get(name)
        ]
        if lines:
            raise ValueError(f"{index} and the files beside it disagree on {len(lines)} tensors:\n" + "\n".join(lines))

    def read(self, name: str, ranges: Sequence[tuple[int, int]] | None = None) -> np.ndarray:
        """The tensor, or the part of it inside `ranges` (one start and stop an axis), as a NumPy array of its dtype.

        Only the wanted rows are read; of their columns too where a row's part is at least 4 KiB.
        """
        spec, place = self.specs[name], self._places[name]
        dtype = DTYPES[spec.dtype]
        ranges = [(0, length) for length in spec.shape] if ranges is None else list(ranges)
        if not spec.shape:
            return self._bytes(place, 0, dtype.itemsize).view(dtype).reshape(())
        (start, stop), rest = ranges[0], spec.shape[1:]
        row = math.prod(rest) * dtype.itemsize
        if len(rest) == 1 and self._worthwhile(ranges[1], rest[0], dtype):
            low, high = ranges[1]
            out = np.empty((stop - start, high - low), dtype)
            raw = out.view(np.uint8)
            for index in range(start, stop):
                raw[index - start] = self._bytes(place, index * row + low * dtype.itemsize, raw.shape[1])
            return out
        block = self._bytes(place, start * row, (stop - start) * row).view(dtype).reshape(stop - start, *rest)
        return block[(slice(None), *(slice(*part) for part in ranges[1:]))]

    @staticmethod
    def _worthwhile(part: tuple[int, int], length: int, dtype: np.dtype) -> bool:
        return part[1] - part[0] < length and (part[1] - part[0]) * dtype.itemsize >= SHORT_RANGE

    def _bytes(self, place: _Place, offset: int, count: int) -> np.ndarray:
        out = np.empty(count, np.uint8)
        view, at = out.data, place.offset + offset
        descriptor, done = self._descriptor(place.file), 0
        while done < count:
            more = os.preadv(descriptor, [view[done:]], at + done)
            if more == 0:
                raise ValueError(f"{self.folder / place.file} ends before byte {at + count}: it was cut while it was read.")
            done += more
        with self._lock:
            self.bytes_read += count
        return out

    def _descriptor(self, file: str) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(self.folder / file, os.O_RDONLY)
            return self._files[file]


def _read_weight_map(index: pathlib.Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text())["weight_map"]
        if not isinstance(listed, dict) or not all(isinstance(value, str) for value in listed.values()):
            raise TypeError("weight_map is no table of file names")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is damaged: {error!r}; it must be JSON with a weight_map of tensor to file.") from None
    if outside := [name for name in set(listed.values()) if pathlib.PurePath(name).name != name]:
        raise ValueError(f"{index} names files outside its folder: {', '.join(sorted(outside))}.")
    return listed


def write_shard(
    path: pathlib.Path, specs: dict[str, TensorSpec], tensors: Callable[[str], np.ndarray], metadata: dict[str, str] | None = None
) -> int:
    """Write one file, tensor by tensor in the order of `specs`, flushed to the disk; -> its size in bytes.

    tensors(name) gives each array when its turn comes; its shape and dtype must be those of `specs`.
    """
    header: dict[str, Any] = {} if not metadata else {"__metadata__": metadata}
    offset = 0
    for name, spec in specs.items():
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes]}
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, spec in specs.items():
            _write_array(file, name, spec, tensors(name))
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + offset


def _write_array(file: BinaryIO, name: str, spec: TensorSpec, array: np.ndarray) -> None:
    if tuple(array.shape) != spec.shape or array.dtype != DTYPES[spec.dtype]:
        raise ValueError(f"{name} came as {array.dtype}{list(array.shape)}; the header says {spec}.")
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def order_for_file(specs: Iterable[tuple[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """The format's usual order: widest dtype first, so that every tensor is aligned, then by name."""
    return dict(sorted(specs, key=lambda item: (-DTYPES[item[1].dtype].itemsize, item[0])))
