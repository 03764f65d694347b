"""TensorBoard event files without TensorFlow.

A file is a sequence of records: length (uint64), masked CRC32C of the length, data, masked CRC32C of the data, all little-endian.
The data of each is an Event message; its fields are encoded by hand, with the numbers of tensorflow/core/util/event.proto and
tensorflow/core/framework/summary.proto.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .sinks import GROUPS, LOAD_QUANTILES, Record, digested, group_losses, leaves

_NUMBER = itertools.count()  # files of one process and second


def _crc_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)  # Castagnoli, bits reversed
        table.append(value)
    return table


_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of `data`."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> bytes:
    """The checksum as event files hold it: rotated and shifted, so that a checksum of checksums does not vanish."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(data: bytes) -> bytes:
    """One record of the file."""
    length = struct.pack("<Q", len(data))
    return length + masked_crc(length) + data + masked_crc(data)


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, data: bytes) -> bytes:
    """A field of bytes, text or a message (wire type 2)."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    with np.errstate(over="ignore"):  # past float32 is infinity, as the format has it
        return _varint(number << 3 | 5) + struct.pack("<f", np.float32(value))


def scalar_value(tag: str, value: float) -> bytes:
    """A Summary with one scalar; concatenated Summaries are one message with them all."""
    return _field(1, _field(1, tag.encode()) + _float(2, value))


def text_value(tag: str, text: str) -> bytes:
    """A Summary with one text: a string tensor [1] for the "text" plugin."""
    shape = _field(2, _integer(1, 1))
    tensor = _integer(1, 7) + _field(2, shape) + _field(8, text.encode())  # 7: DT_STRING
    metadata = _field(1, _field(1, b"text"))
    return _field(1, _field(1, tag.encode()) + _field(8, tensor) + _field(9, metadata))


class TensorBoardWriter:
    """Writes `events.out.tfevents.*` into a folder; a `Sink`.

    A scalar is one curve. An array (a value a layer, say) is three: its min, mean and max. Expert counts [L,E] are quantiles of the
    load over its mean; sums by domain and position are losses in nats a token. Each step is written out at once.

    Args:
      folder: made when missing. A resumed run writes one more file into the same folder.
      domains: names of the mixture's sources, by number.
      purge_step: of a resumed run: its first step. TensorBoard then drops what an earlier file has from there on.
    """

    def __init__(self, folder: str | os.PathLike, *, domains: Sequence[str] = (), purge_step: int | None = None):
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBER)}"
        self.path = folder / name
        self._domains = tuple(domains)
        self._file = self.path.open("xb", buffering=0)  # one write a record: a crash cuts the last record at most
        self._write(0, _field(3, b"brain.Event:2"))
        if purge_step is not None:
            self._write(purge_step, _field(7, _integer(1, 1)))  # SessionLog.START

    def write(self, step: int, record: Record) -> None:
        values = scalars(record, self._domains)
        self._write(step, _field(5, b"".join(scalar_value(tag, value) for tag, value in values.items())))

    def event(self, event: Mapping[str, Any]) -> None:
        facts = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "step"))
        self._write(int(event["step"]), _field(5, text_value(f"events/{event['event']}", facts or "-")))

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, what: bytes) -> None:
        when = _varint(1 << 3 | 1) + struct.pack("<d", time.time())
        self._file.write(framed(when + _integer(2, step) + what))


def scalars(record: Record, domains: Sequence[str] = ()) -> dict[str, float]:
    """The curves of a record, by tag. At most three an entry, 16 + 1 domains and 21 positions."""
    values: dict[str, float] = {}
    record = digested(record)
    for path, array in leaves(record):
        name = path[-1]
        if name in GROUPS:
            continue
        tag = "/".join(path) if len(path) > 1 else f"train/{name}"
        if name == "relative_load":
            values |= {f"balance/{name}/q{q:g}": value for q, value in zip(LOAD_QUANTILES, array.tolist(), strict=True)}
        elif array.ndim == 0:
            values[tag] = float(array)
        elif array.size:
            tag = f"balance/{name}" if len(path) == 1 else tag
            values |= {f"{tag}/min": float(array.min()), f"{tag}/mean": float(array.mean()), f"{tag}/max": float(array.max())}
    by_domain, by_position = group_losses(record, domains)
    values |= {f"loss_by_domain/{name}": nats / tokens for name, (nats, tokens) in by_domain.items()}
    values |= {f"loss_by_position/from_{first:07d}": nats / tokens for first, (nats, tokens) in by_position.items()}
    return values
