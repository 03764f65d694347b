"""Items that arrive while the run goes on, each trained on once: acknowledged only after the checkpoint that contains it.

A stream is not indexable, so it is no `Source` and no part of a mixture. It joins a run like this:

    stream.take()                      an item goes into the batch of a step (in flight from here on)
    state = stream.state(step)         with every checkpoint: the ids that its parameters have seen; goes into its data state
    stream.acknowledge(step)           when that checkpoint is durable, not when its write begins: its items are done with
    stream.restore(state)              after a restart, or to go back: what the state does not name comes again, in its old order

So a kill between `take` and the checkpoint gives the item again, and one between the checkpoint and `acknowledge` does not: the
restored state names it. What was acknowledged never comes again, also after going back to an older checkpoint. One reader a
stream; of several processes each has a stream of its own, or one takes and hands on.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from .atomic import sync_folder, write_atomic
from .sources import TokenDocument

ITEM_SUFFIX = ".json"
LEDGER = "acknowledged.txt"
LONGEST_ID = 200  # characters: with its suffix it is a file's name
POLL_SECONDS = 0.01


class QueueStream:
    """Items from a `queue.Queue` of (id, TokenDocument), or from a folder of files that `put_item` writes.

    items: the queue (with a maxsize: the bound on what waits), or the folder. In a folder what waits comes by name, and its ids
        are the names; what is acknowledged is written to the folder's ledger, then deleted. In a queue they come as put; its
        ledger is the list of ids in `state`, which grows by an id an item: take a folder where a run sees over some 100,000.
    capacity: how many may be in flight. At that bound `take` refuses, so that no more is lost or held in memory than one
        checkpoint's worth.

    in_flight: the ids taken and not acknowledged, in their order. duplicates: deliveries refused, as their id was in flight or
    acknowledged. All methods may be called from any thread.

    ValueError: an unbounded queue, capacity < 1, no folder.
    """

    def __init__(self, items: queue.Queue | str | os.PathLike, *, capacity: int):
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1 item in flight.")
        self.capacity, self.duplicates = capacity, 0
        self._transport = _Memory(items) if isinstance(items, queue.Queue) else _Folder(pathlib.Path(items))
        self._flight: dict[str, TokenDocument] = {}
        self._again: list[str] = []  # of those in flight: to be handed out anew, after `restore`
        self._marks: list[tuple[int, tuple[str, ...]]] = []  # checkpoint -> the ids in flight when it was made
        self._lock = threading.RLock()

    @property
    def in_flight(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(i for i in self._flight if i not in self._again)

    @property
    def full(self) -> bool:
        """Whether `take` would refuse: make a checkpoint first."""
        return len(self.in_flight) >= self.capacity

    def take(self, timeout: float = 0.0) -> tuple[str, TokenDocument]:
        """-> (id, document): the next item, in flight from now on. queue.Empty when none arrives within `timeout` seconds.

        RuntimeError at `capacity`. ValueError for an item that cannot be read; it stays where it is.
        """
        if self.full:
            raise RuntimeError(
                f"{self.capacity} items are in flight, which is the capacity; make a checkpoint and acknowledge it, or raise the capacity."
            )
        until = time.monotonic() + timeout
        while True:
            with self._lock:
                if self._again:
                    item = self._again.pop(0)
                    return item, self._flight[item]
                found = self._transport.next(self._flight)
                if found is not None and found[1] is None:
                    self.duplicates += 1
                    continue
                if found is not None:
                    self._flight[found[0]] = found[1]
                    return found
            if time.monotonic() >= until:
                raise queue.Empty
            time.sleep(min(POLL_SECONDS, max(0.0, until - time.monotonic())))

    def state(self, checkpoint: int, *, waiting: Iterable[str] = ()) -> dict[str, Any]:
        """The JSON that belongs into checkpoint number `checkpoint`; its items can be acknowledged from now on.

        waiting: ids taken that no step has trained on yet, as those in batches that were made ahead: the checkpoint is without them.
        ValueError for a number below an earlier one, or an id in `waiting` that is not in flight.
        """
        with self._lock:
            if self._marks and checkpoint < self._marks[-1][0]:
                raise ValueError(f"checkpoint {checkpoint} comes after checkpoint {self._marks[-1][0]}; the numbers must not fall.")
            late = set(waiting)
            if unknown := late.difference(self.in_flight):
                raise ValueError(f"waiting holds {sorted(unknown)[0]!r}, which is not in flight; give ids that take returned.")
            held = tuple(i for i in self.in_flight if i not in late)
            self._marks.append((checkpoint, held))
            return {"checkpoint": checkpoint, "in_flight": list(held), "acknowledged": self._transport.acknowledged_ids()}

    def acknowledge(self, up_to_checkpoint: int) -> tuple[str, ...]:
        """Done with all items in durable checkpoints up to this one -> their ids. ValueError for one that `state` never made."""
        with self._lock:
            if not any(number == up_to_checkpoint for number, _ in self._marks):
                known = ", ".join(str(number) for number, _ in self._marks) or "none"
                raise ValueError(f"checkpoint {up_to_checkpoint} has no state here (those to acknowledge: {known}); call state first.")
            done = [i for number, held in self._marks if number <= up_to_checkpoint for i in held]
            done = [i for i in dict.fromkeys(done) if i in self._flight]
            self._done(done)
            self._marks = [mark for mark in self._marks if mark[0] > up_to_checkpoint]
            return tuple(done)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the checkpoint that holds `state`: its items are acknowledged, all others in flight come again.

        ValueError for a state of another form.
        """
        lists = [state.get(name) for name in ("in_flight", "acknowledged")] if isinstance(state, dict) else [None]
        if not all(isinstance(ids, list) and all(isinstance(i, str) for i in ids) for ids in lists):
            raise ValueError(f"{str(state)[:80]!r} is no state of a QueueStream; give what state(checkpoint) returned.")
        with self._lock:
            self._done([*state["acknowledged"], *state["in_flight"]])
            self._marks = []
            self._again = list(self._flight)

    def _done(self, ids: Iterable[str]) -> None:
        """The ledger first: a kill between the two leaves a file whose id is known to be done."""
        ids = list(ids)
        self._transport.acknowledge(ids)
        for item in ids:
            self._flight.pop(item, None)
        self._again = [i for i in self._again if i in self._flight]


def put_item(folder: str | os.PathLike, item: str, document: TokenDocument, *, limit: int) -> None:
    """Put an item into a folder: written beside, then renamed into place, so that no reader sees half of it.

    item: its id, a file's name without suffix; readers take them by name, so begin it with a number of fixed width.
    limit: how many files may be there, those in flight included; queue.Full beyond it, which is the producer's back-pressure.
    ValueError: an id that is no plain name, or is there already. One that was acknowledged is refused by the reader.
    """
    root = pathlib.Path(folder)
    _check_id(item)
    ids = np.asarray(document.ids)
    value: dict[str, Any] = {"tokens": ids.tolist()}
    if document.mask is not None:
        value["loss_mask"] = np.asarray(document.mask).astype(int).tolist()
    _read_item(value, item)
    root.mkdir(parents=True, exist_ok=True)
    waiting = {path.name for path in root.glob(f"*{ITEM_SUFFIX}")}
    if item + ITEM_SUFFIX in waiting:
        raise ValueError(f"item {item!r} is in {root} already; every item has an id of its own.")
    if len(waiting) >= limit:
        raise queue.Full
    write_atomic(root / f"{item}{ITEM_SUFFIX}", json.dumps(value, separators=(",", ":")).encode())


class _Memory:
    """A queue.Queue, and the ids acknowledged so far."""

    def __init__(self, items: queue.Queue):
        if items.maxsize <= 0:
            raise ValueError("the queue has no maxsize, so a fast producer fills the memory; give queue.Queue(maxsize=...).")
        self._items, self._acknowledged = items, {}

    def next(self, flight: dict[str, TokenDocument]) -> tuple[str, Any] | None:
        """-> (id, document), (id, None) for a duplicate, or None where nothing waits."""
        try:
            item, document = self._items.get_nowait()
        except queue.Empty:
            return None
        _check_id(item)
        return item, None if item in flight or item in self._acknowledged else document

    def acknowledge(self, ids: list[str]) -> None:
        self._acknowledged.update(dict.fromkeys(ids))

    def acknowledged_ids(self) -> list[str]:
        return list(self._acknowledged)


class _Folder:
    """Files that appear whole, and a ledger of ids, one a line; a line that a kill cut short does not count."""

    def __init__(self, root: pathlib.Path):
        if not root.is_dir():
            raise ValueError(f"{root} is no folder; make it before the stream is opened.")
        self._root, self._acknowledged = root, _read_ledger(root / LEDGER)
        self._listed: list[str] = []

    def next(self, flight: dict[str, TokenDocument]) -> tuple[str, Any] | None:
        if not self._listed:
            found = (path.name.removesuffix(ITEM_SUFFIX) for path in self._root.glob(f"*{ITEM_SUFFIX}") if not path.name.startswith("."))
            self._listed = sorted((item for item in found if item not in flight), reverse=True)
        if not self._listed:
            return None
        item = self._listed[-1]
        path = self._root / f"{item}{ITEM_SUFFIX}"
        if item in self._acknowledged:
            path.unlink(missing_ok=True)
            self._listed.pop()
            return item, None
        document = _read_file(path, item)
        self._listed.pop()
        return item, document

    def acknowledge(self, ids: list[str]) -> None:
        new = [i for i in ids if i not in self._acknowledged]
        if new:
            _append(self._root / LEDGER, new)
            self._acknowledged.update(dict.fromkeys(new))
        for item in ids:
            (self._root / f"{item}{ITEM_SUFFIX}").unlink(missing_ok=True)
        self._listed = [i for i in self._listed if i not in self._acknowledged]

    def acknowledged_ids(self) -> list[str]:
        return []  # the ledger has them


def _read_ledger(path: pathlib.Path) -> dict[str, None]:
    if not path.is_file():
        return {}
    whole, _, _ = path.read_bytes().rpartition(b"\n")  # a cut may be inside a character
    return dict.fromkeys(whole.decode().split("\n") if whole else [])


def _append(path: pathlib.Path, ids: list[str]) -> None:
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if end := file.tell():
            file.seek(end - 1)
            if file.read(1) != b"\n":  # cut short by a kill: cut off what does not count
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write("".join(f"{i}\n" for i in ids).encode())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _read_file(path: pathlib.Path, item: str) -> TokenDocument:
    try:
        return _read_item(json.loads(path.read_bytes()), item)
    except ValueError as error:
        raise ValueError(f"{path} cannot be taken: {error}. Repair the file or move it away.") from None


def _read_item(value: Any, item: str) -> TokenDocument:
    tokens, mask = (value.get("tokens"), value.get("loss_mask")) if isinstance(value, dict) else (None, None)
    if not isinstance(tokens, list) or not tokens or not all(type(i) is int and 0 <= i < 2**31 for i in tokens):
        raise ValueError(f"item {item!r} must hold `tokens`, a list of at least one id in [0, 2**31)")
    if mask is not None and (not isinstance(mask, list) or len(mask) != len(tokens) or not all(entry in (0, 1) for entry in mask)):
        raise ValueError(f"item {item!r} must hold a `loss_mask` of {len(tokens)} entries 0 or 1, or none")
    return TokenDocument(np.array(tokens, np.int32), None if mask is None else np.array(mask, bool))


def _check_id(item: Any) -> None:
    good = isinstance(item, str) and 0 < len(item) <= LONGEST_ID and not item.startswith(".") and not set(item) & set("/\\\n\r\0")
    if not good:
        raise ValueError(f"the item id {item!r} must be a str of 1 to {LONGEST_ID} characters without slashes, newlines or a leading dot.")
