"""Documents into rows of `context` tokens: planned on lengths alone, a row at a time, with a small JSON state; nothing is dropped.

A piece is (document, start, stop): tokens start..stop - 1 of a document of the packer's source. A row is a list of pieces, laid end to
end, padded at its end; each piece is a segment of its own. A document longer than a row is cut into continuation pieces, given out in
order.

| packing      | documents | waste |
| first_fit    | whole; only those longer than a row are cut, into full rows and a rest that is packed like a document | some padding |
| best_fit     | as first_fit, into the open row with the least room that is enough | the same or a little less |
| concat_split | cut at every row's end | none; only the last row of all is padded |
| one_doc      | one a row | all that a document is shorter than a row |

Long documents are read `lanes` at a time, a row from each in turn. Otherwise a file of a megabyte would fill hundreds of rows one
after another, and whole batches with them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

Piece = tuple[int, int, int]
Row = list[Piece]
Draw = Callable[[], Piece | None]  # the next document, or None when there is none left

KINDS = ("first_fit", "best_fit", "concat_split", "one_doc")


@dataclasses.dataclass(frozen=True)
class Packing:
    """How documents become rows (see the file's head).

    bins: rows kept open for first_fit and best_fit; more give less padding and a larger state. None: 32 up to a context of 16K, then
        as many as hold 512K tokens, at least 4. Padding of best_fit with 8, 32 and 64: 0.8%, 0.3% and 0.3% for the standard library at
        context 8192; 7%, 3% and 2% for documents of 1 to 1024 tokens at context 1024, a hard case (first_fit 9%, 5% and 4%).
    lanes: long documents read at the same time; 1: one after the other.
    max_segments: the most pieces a row may have, for kernels with a limit; None: no limit.
    """

    kind: str = "first_fit"
    bins: int | None = None
    lanes: int = 16
    max_segments: int | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"packing {self.kind!r}; known are {', '.join(KINDS)}.")
        for name in ("bins", "lanes", "max_segments"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; it must be at least 1.")

    def open_rows(self, context: int) -> int:
        """The number of bins at this context."""
        return self.bins or min(32, max(4, (512 << 10) // context))

    def fingerprint(self, context: int) -> dict[str, Any]:
        """JSON: the settings that decide the rows of this kind."""
        settings = {"kind": self.kind, "lanes": self.lanes, "max_segments": self.max_segments}
        return settings | ({"bins": self.open_rows(context)} if self.kind in ("first_fit", "best_fit") else {})

    def packer(self, context: int) -> Packer:
        """A packer with nothing in it, for rows of `context` tokens."""
        kinds = {"first_fit": FirstFit, "best_fit": BestFit, "concat_split": ConcatSplit, "one_doc": OneDocument}
        return kinds[self.kind](self, context)


class Packer:
    """next_row(draw) -> the next row, or None when draw() has given None and nothing is left here.

    Rows depend on the documents drawn and their order, never on how many rows are asked for at a time. draw() is called only as
    often as the row needs. `state()` is everything held: a packer restored from it goes on with the same rows.
    """

    def __init__(self, packing: Packing, context: int):
        if context < 1:
            raise ValueError(f"context={context}; a row needs at least 1 token.")
        self.packing, self.context = packing, context
        self.open_rows = packing.open_rows(context)
        self.max_segments = packing.max_segments or context  # a piece has at least one token
        self.lanes: deque[Piece] = deque()  # documents in progress: what is left of each
        self.ready: deque[Row] = deque()  # closed rows
        self.bins: list[Row] = []  # open rows, the oldest first
        self.room: list[int] = []  # tokens free in each

    def next_row(self, draw: Draw) -> Row | None:
        raise NotImplementedError

    def pieces(self) -> list[Piece]:
        """All that is held, in the order in which it would come out, neighbours of one document joined."""
        held = [*(p for row in self.ready for p in row), *self.lanes, *(p for row in self.bins for p in row)]
        return joined(held)

    def state(self) -> dict[str, Any]:
        """JSON: rows as flat lists of 3 integers a piece."""
        return {"lanes": flat(self.lanes), "ready": [flat(row) for row in self.ready], "bins": [flat(row) for row in self.bins]}

    def restore(self, state: dict[str, Any]) -> None:
        self.lanes = deque(unflat(state["lanes"]))
        self.ready = deque(unflat(row) for row in state["ready"])
        self.bins = [unflat(row) for row in state["bins"]]
        self.room = [self.context - tokens_of(row) for row in self.bins]

    def _take(self, upto: int) -> Piece:
        """At most `upto` tokens of the document whose turn it is; what is left of it goes to the end of the line."""
        document, start, stop = self.lanes.popleft()
        cut = min(stop, start + upto)
        if cut < stop:
            self.lanes.append((document, cut, stop))
        return document, start, cut


class OneDocument(Packer):
    """A document a row; a longer one takes several rows."""

    def next_row(self, draw: Draw) -> Row | None:
        while True:
            if self.ready:
                return self.ready.popleft()
            if len(self.lanes) < self.packing.lanes and (piece := draw()) is not None:
                self._place(piece)
            elif self.lanes:
                return self._row_of_lane()
            elif self.bins:
                return self._close(0)
            else:
                return None

    def _place(self, piece: Piece) -> None:
        length = piece[2] - piece[1]
        if length > self.context:
            self.lanes.append(piece)
        elif length == self.context:
            self.ready.append([piece])
        else:
            self._place_short(piece, length)

    def _place_short(self, piece: Piece, length: int) -> None:
        self.ready.append([piece])

    def _row_of_lane(self) -> Row:
        row = [self._take(self.context)]
        if self.lanes and self.lanes[-1][2] - self.lanes[-1][1] < self.context:  # only what was just put back can be so short
            self._place(self.lanes.pop())
        return row

    def _close(self, number: int) -> Row:
        del self.room[number]
        return self.bins.pop(number)


class FirstFit(OneDocument):
    """Into the oldest open row with room; if none has and all bins are open, the fullest row is closed for a new one.

    Closing the oldest instead gives a third more padding.
    """

    def _place_short(self, piece: Piece, length: int) -> None:
        number = self._find(length)
        if number is None:
            if len(self.bins) == self.open_rows:
                self.ready.append(self._close(self.room.index(min(self.room))))
            self.bins.append([])
            self.room.append(self.context)
            number = len(self.bins) - 1
        self.bins[number].append(piece)
        self.room[number] -= length
        if not self.room[number] or len(self.bins[number]) >= self.max_segments:
            self.ready.append(self._close(number))

    def _find(self, length: int) -> int | None:
        return next((number for number, room in enumerate(self.room) if room >= length), None)


class BestFit(FirstFit):
    """Into the open row with the least room that is enough, the oldest of equals."""

    def _find(self, length: int) -> int | None:
        least = min((room for room in self.room if room >= length), default=None)
        return None if least is None else self.room.index(least)


class ConcatSplit(Packer):
    """Each lane is a text of documents end to end; rows are cut from the lanes in turn."""

    def next_row(self, draw: Draw) -> Row | None:
        row: Row = []
        room = self.context
        # A full house of documents first, so that the row's lane is the one that has waited longest.
        while len(self.lanes) < self.packing.lanes and (piece := draw()) is not None:
            self.lanes.append(piece)
        while room and self.lanes and len(row) < self.max_segments:
            row.append(self._take(room))
            room -= row[-1][2] - row[-1][1]
            if room and len(row) < self.max_segments and (piece := draw()) is not None:
                self.lanes.appendleft(piece)  # the lane goes on with a new document
        return row or None


def tokens_of(row: Iterable[Piece]) -> int:
    """Tokens in the pieces."""
    return sum(stop - start for _, start, stop in row)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces with neighbours that continue each other made one, as a longer row can take them whole."""
    out: list[Piece] = []
    for piece in pieces:
        if out and out[-1][0] == piece[0] and out[-1][2] == piece[1]:
            out[-1] = (piece[0], out[-1][1], piece[2])
        else:
            out.append(piece)
    return out


def flat(pieces: Iterable[Piece]) -> list[int]:
    return [number for piece in pieces for number in piece]


def unflat(numbers: list[int]) -> list[Piece]:
    return list(zip(*(iter(numbers),) * 3, strict=True))
