"""Batches as plans (which piece of which document lies where), and plans made into arrays.

B: rows of this process, T: tokens a row. Planning needs lengths only and is done in full by every process and worker; arrays are made
for the rows a process owns. So a position in the data knows nothing of processes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np

from .mixture import Balance, Draws, Mixture
from .packing import Packer, Packing, Piece, Row, flat, joined, tokens_of, unflat
from .sources import TokenDocument

SourceRow = tuple[int, Row]  # the number of the row's source, its pieces
STATE_VERSION = 1
CACHED_TOKENS = 32 << 20  # of documents kept, as a long one is read a row at a time: 128 MB


class BatchPlan:
    """The endless list of rows of a mixture, from any position on. Every row holds documents of one source, so that short documents of
    one do not wait for the long ones of another.

    `rows(count)` -> the next rows with their source numbers, fewer than count only at the end of the data (repeat=False). `state()` ->
    JSON, the position after them, with totals since the start of the run: documents drawn and tokens given out by source, padding.
    """

    def __init__(self, mixture: Mixture, packing: Packing, *, context: int, seed: int, repeat: bool, fingerprint: str):
        self.mixture, self.packing, self.context, self.fingerprint = mixture, packing, context, fingerprint
        self.seed, self.repeat = seed, repeat
        self.given = 0
        self.padding = 0
        self.drawn_tokens = 0
        self.tokens = dict.fromkeys(mixture.names, 0)
        self._digests: dict[str, str] = {}  # of sources of earlier stages that this mixture does not know
        self._begin({}, {})

    def _begin(self, cursors: dict[str, int], stage: dict[str, int]) -> None:
        self.draws = Draws(self.mixture, seed=self.seed, cursors=cursors, repeat=self.repeat)
        self.balance = Balance(self.mixture, self.context, stage)
        self.numbers = {name: number for number, name in enumerate(self.mixture.names)}
        self.packers: dict[str, Packer] = {name: self.packing.packer(self.context) for name in self.mixture.weights}
        # What an earlier stage left of each source, to be packed before anything is drawn.
        self.pending: dict[str, deque[Piece]] = {}

    def rows(self, count: int) -> list[SourceRow]:
        out: list[SourceRow] = []
        while len(out) < count and (found := self._next()) is not None:
            name, row = found
            tokens = tokens_of(row)
            out.append((self.numbers[name], row))
            self.tokens[name] += tokens
            self.padding += self.context - tokens
        self.given += len(out)
        return out

    def _next(self) -> tuple[str, Row] | None:
        weights = self.mixture.weights
        if len(self.packers) > len(weights):  # sources without a weight from here on: what is left of them comes first
            for name in [n for n in self.packers if n not in weights]:
                if (row := self.packers[name].next_row(lambda: self._left(name))) is not None:  # noqa: B023 (called at once)
                    return name, row
                del self.packers[name]
        name = self.balance.next()
        if (row := self._row(name)) is not None:
            return name, row
        for name in self.balance.names():  # repeat=False: a source has ended
            if (row := self._row(name)) is not None:
                return name, row
        return None

    def _row(self, name: str) -> Row | None:
        row = self.packers[name].next_row(lambda: self._draw(name))
        if row is not None:
            self.balance.add(name, tokens_of(row))
        return row

    def _left(self, name: str) -> Piece | None:
        return self.pending[name].popleft() if self.pending.get(name) else None

    def _draw(self, name: str) -> Piece | None:
        if (left := self._left(name)) is not None:
            return left
        drawn = self.draws.next(self.numbers[name])
        if drawn is None:
            return None
        document, length = drawn
        self.drawn_tokens += length
        return document, 0, length

    def held(self) -> dict[str, list[Piece]]:
        """{name: pieces drawn and not given out yet, in the order in which they would come}."""
        return {name: [*packer.pieces(), *self.pending.get(name, ())] for name, packer in self.packers.items()}

    def state(self) -> dict[str, Any]:
        drawn = {name: self.mixture.digest(name) for name, count in self.draws.cursors.items() if count and name in self.numbers}
        return {
            "version": STATE_VERSION,
            "fingerprint": self.fingerprint,
            "rows": self.given,
            "cursors": dict(self.draws.cursors),
            "sources": {**self._digests, **drawn},
            "packers": {name: packer.state() for name, packer in self.packers.items()},
            "pending": {name: flat(pieces) for name, pieces in self.pending.items() if pieces},
            "stage_tokens": dict(self.balance.given),
            "tokens": dict(self.tokens),
            "drawn_tokens": self.drawn_tokens,
            "held_tokens": sum(map(tokens_of, self.held().values())),
            "padding": self.padding,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a position of a plan with the same fingerprint."""
        if state.get("fingerprint") != self.fingerprint:
            raise ValueError(
                f"the data state is of a pipeline with fingerprint {state.get('fingerprint')}, this one has {self.fingerprint}; "
                "check_fingerprint(saved, here) names what differs. Restore with the settings it was saved with."
            )
        self._carry(state, state.get("stage_tokens", {}))
        for name, packer in state["packers"].items():
            self.packers.setdefault(name, self.packing.packer(self.context)).restore(packer)
        self.pending = {name: deque(unflat(pieces)) for name, pieces in state["pending"].items()}

    def adopt(self, state: dict[str, Any], packing: Packing, context: int) -> None:
        """Go on where another stage stopped: its cursors and totals, and all it held packed first."""
        self._carry(state, {})
        for name, packer in state["packers"].items():
            old = packing.packer(context)
            old.restore(packer)
            held = joined([*old.pieces(), *unflat(state["pending"].get(name, []))])
            if held:
                self.packers.setdefault(name, self.packing.packer(self.context))
                self.pending[name] = deque(held)

    def _carry(self, state: dict[str, Any], stage: dict[str, int]) -> None:
        """Take over cursors and totals, after checks that what they count is still there."""
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"the data state has version {state.get('version')}; this moejax reads version {STATE_VERSION}.")
        for name, digest in state["sources"].items():
            if name in self.numbers and self.mixture.digest(name) != digest:
                raise ValueError(
                    f"source {name!r} holds other documents than when the state was saved, so its position means nothing; "
                    "give the new source another name, or restore with the old one."
                )
        packers = {name: [*p["lanes"], *p["ready"], *p["bins"]] for name, p in state["packers"].items()}
        lost = sorted(name for name, held in packers.items() if name not in self.numbers and (held or state["pending"].get(name)))
        if lost:
            raise ValueError(
                f"the state holds pieces of {', '.join(lost)}, which the mixture does not know; "
                "keep these among its sources (they need no weight)."
            )
        self._begin(state["cursors"], stage)
        self._digests = {name: digest for name, digest in state["sources"].items() if name not in self.numbers}
        self.tokens = {**dict.fromkeys(self.numbers, 0), **state["tokens"]}
        self.given, self.padding, self.drawn_tokens = state["rows"], state["padding"], state["drawn_tokens"]


class RowReader:
    """Planned rows -> arrays. Documents read lately are kept, up to CACHED_TOKENS."""

    def __init__(self, mixture: Mixture, *, context: int, pad_id: int):
        self.mixture, self.context, self.pad_id = mixture, context, pad_id
        self._documents: OrderedDict[tuple[int, int], TokenDocument] = OrderedDict()
        self._cached = 0

    def batch(self, rows: list[SourceRow], count: int) -> dict[str, np.ndarray]:
        """rows, at most `count`, -> the batch [count,T]; rows that are missing are padding."""
        shape = (count, self.context)
        tokens = np.full(shape, self.pad_id, np.int32)
        segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        domains, counts = np.zeros(shape, np.int8), np.zeros(shape, bool)
        ramp = np.arange(self.context, dtype=np.int32)
        for r, (number, row) in enumerate(rows):
            begin = 0
            for segment, (index, start, stop) in enumerate(row, 1):
                end = begin + stop - start
                document = self._document(number, index)
                tokens[r, begin:end] = document.ids[start:stop]
                counts[r, begin:end] = True if document.mask is None else document.mask[start:stop]
                segments[r, begin:end] = segment
                positions[r, begin:end] = ramp[: end - begin]
                begin = end
            domains[r, :begin] = number
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        targets, loss_mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        np.multiply(tokens[:, 1:], same, out=targets[:, :-1])
        np.logical_and(same, counts[:, 1:], out=loss_mask[:, :-1])
        return {
            "tokens": tokens,
            "targets": targets,
            "loss_mask": loss_mask,
            "segment_ids": segments,
            "positions": positions,
            "domains": domains,
        }

    def _document(self, number: int, index: int) -> TokenDocument:
        key = number, index
        document = self._documents.get(key)
        if document is not None:
            self._documents.move_to_end(key)
            return document
        document = self.mixture.sources[number][index]
        planned = int(self.mixture.lengths[number][index])
        if len(document.ids) != planned or (document.mask is not None and len(document.mask) != planned):
            raise ValueError(
                f"source {self.mixture.names[number]!r}, document {index}: {len(document.ids)} tokens "
                f"(mask: {None if document.mask is None else len(document.mask)}), but lengths() says {planned}; has the data changed?"
            )
        self._documents[key] = document
        self._cached += planned
        while self._cached > CACHED_TOKENS and len(self._documents) > 1:
            self._cached -= len(self._documents.popitem(last=False)[1].ids)
        return document
