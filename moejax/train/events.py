"""The record of what happened out of the ordinary in a run: one JSON object a line, safe against crashes.

An event is {"event": name, "step": int, ...facts}. Names in use: skipped_update, alarm, alarm_cleared, rollback, stopped, promoted,
checkpoint_saved, checkpoint_failed, restored, stage, stall, stall_cleared, replay_mismatch. A line adds "version", "run" and "time".
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np

EVENTS_VERSION = 1  # of a line's layout
RESERVED = ("version", "run", "time")

Event = dict[str, Any]
Record = Callable[[Event], None]
"""What the parts of a run hand their events to; `EventLog.record` in a real one."""

_open_here: set[pathlib.Path] = set()


class EventLog:
    """Appends events to `path`, for one process. Threads may share it.

    A line is one write, then an fsync (milliseconds; events are rare), so that a crash can cut the last line at most. What a crash
    cut is removed when the file is opened again. Lines are never rewound: steps that a rollback undid stay on record.

    Args:
      path: the file; its folder must exist. `<path>.lock` beside it says who writes. A local or network folder, not gs://.
      run_id: the same for all lines of one start; None: 12 random hexadecimal digits.
      clock: UTC seconds since 1970.

    Raises:
      RuntimeError: another process has the file open: only the first process of a run records.
      ValueError: the file holds lines of another layout.
    """

    def __init__(self, path: str | os.PathLike, *, run_id: str | None = None, clock: Callable[[], float] = time.time):
        self.path = pathlib.Path(path).absolute()
        self.run_id = uuid.uuid4().hex[:12] if run_id is None else run_id
        self._clock = clock
        self._process = os.getpid()
        self._thread = threading.Lock()
        self._lock_file = _lock(self.path)
        try:
            read_events(self.path)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(self._file, _whole_bytes(self.path.read_bytes()))
        except BaseException:
            _unlock(self.path, self._lock_file)
            raise

    def record(self, event: Event) -> None:
        """Write one event down. ValueError unless it has a name and a step; NaN and infinities become text."""
        if not (isinstance(event.get("event"), str) and event["event"]):
            raise ValueError(f"the event {event} has no name; give 'event': a text, such as 'rollback'.")
        if isinstance(event.get("step"), bool) or not isinstance(event.get("step"), int | np.integer):
            raise ValueError(f"the event {event['event']!r} has step {event.get('step')!r}; it must be an integer.")
        taken = [name for name in RESERVED if name in event]
        if taken:
            raise ValueError(f"the event {event['event']!r} has {', '.join(taken)}; the log writes these itself: use other names.")
        moment = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        line = {"version": EVENTS_VERSION, "run": self.run_id, "time": moment, **plain(event)}
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        if os.getpid() != self._process:
            raise RuntimeError(f"{self.path} was opened by process {self._process}; process {os.getpid()} must not write to it.")
        with self._thread:
            if self._file < 0:
                raise RuntimeError(f"{self.path} is closed; the event {event['event']!r} came too late.")
            written = os.write(self._file, data)
            if written != len(data):  # a full disk: no half line may stand before the next one
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise OSError(f"{self.path}: only {written} of {len(data)} bytes could be written. Make room on the disk.")
            os.fsync(self._file)

    def read(self) -> list[Event]:
        """All events of the file, earlier runs' too."""
        return read_events(self.path)

    def close(self) -> None:
        with self._thread:
            if self._file >= 0 and os.getpid() == self._process:
                os.close(self._file)
                self._file = -1
                _unlock(self.path, self._lock_file)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_events(path: str | os.PathLike) -> list[Event]:
    """All whole lines of an event file, oldest first; [] without a file. A last line that a crash cut short is left out.

    Raises:
      ValueError: a line that is no event, or has a newer layout, named by its number.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    data = path.read_bytes()
    events = []
    for number, line in enumerate(data[: _whole_bytes(data)].split(b"\n")[:-1], 1):
        try:
            event = json.loads(line)
            version = event["version"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{path}, line {number} is no event: {line[:80]!r}. Move the file away to start a new one.") from None
        if version != EVENTS_VERSION:
            raise ValueError(f"{path}, line {number} has layout version {version}; this program reads {EVENTS_VERSION}.")
        events.append(event)
    return events


def plain(value: Any) -> Any:
    """`value` as strict JSON holds it: arrays as lists, NaN and infinities as text ("nan", "inf", "-inf")."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    array = np.asarray(value)
    if array.dtype.kind in "iub":
        return array.tolist()
    if array.dtype.kind == "O" or array.dtype.kind in "SU":
        raise ValueError(f"{value!r} ({type(value).__name__}) cannot be written as JSON; give numbers, texts, lists or dicts of them.")
    array = array.astype(np.float64)
    return array.tolist() if np.isfinite(array).all() else plain(array.tolist())


def _whole_bytes(data: bytes) -> int:
    """Bytes up to the end of the last whole line."""
    return data.rfind(b"\n") + 1


def _lock(path: pathlib.Path) -> int:
    """Take the lock. A lock of the process (fcntl's record lock): it ends with the process, and children do not inherit it, so that
    a data worker that outlives a killed run cannot keep the next start out."""
    import fcntl

    refused = f"{path} is being written by another process. Only the first process of a run records events; end the other run first."
    if path in _open_here:  # the system's lock does not tell apart two openings in one process
        raise RuntimeError(refused.replace("another process", "this process"))
    file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(file)
        raise RuntimeError(refused) from None
    except OSError as error:
        os.close(file)
        raise RuntimeError(f"{path} cannot be locked ({error}); choose a folder whose file system has locks.") from None
    _open_here.add(path)
    return file


def _unlock(path: pathlib.Path, file: int) -> None:
    _open_here.discard(path)
    os.close(file)
