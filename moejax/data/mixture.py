"""Sources weighted by tokens or documents, each shuffled anew every epoch.

The next document of a source is a pure function of (seed, cursor), the cursor being the number drawn from it: epoch and place in that
epoch's order follow from it, so there is no shuffle buffer to save or lose, and cursors carry over to another mixture: every source
goes on where it stopped. Which source gives the next row is decided by the tokens each has given (`Balance`), not by chance: every
batch holds every source by its weight to within a row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .counter import CounterHash
from .sources import Source, json_digest

MAX_SOURCES = 127  # a batch numbers them in int8


class Mixture:
    """Sources and the shares they are drawn with.

    sources: in the order of their numbers in `batch["domains"]`, at most 127, of different names. Keep one list for all stages of a
        curriculum, so that a source keeps its number.
    weights: {name: weight > 0} of those drawn from; they need not sum to 1. The others are only known by number. None: every source
        by its size, so that all epochs end together.
    by: what a weight counts. "tokens": a source's share of the TOKENS given out, padding aside. "documents": its share of the documents,
        over whole epochs (its share of the tokens is weight x mean length).

    ValueError: no sources, two of one name, an unknown name, a weight that is 0, negative or not finite.
    """

    def __init__(self, sources: Sequence[Source], weights: Mapping[str, float] | None = None, *, by: str = "tokens"):
        self.sources = tuple(sources)
        self.names = [source.name for source in self.sources]
        if not self.sources or len(self.sources) > MAX_SOURCES or len(set(self.names)) < len(self.names):
            raise ValueError(f"sources {self.names}: needed are 1 to {MAX_SOURCES}, each with a name of its own.")
        if by not in ("tokens", "documents"):
            raise ValueError(f"by={by!r}; weights are by 'tokens' or by 'documents'.")
        self.by = by
        self.lengths = [source.lengths() for source in self.sources]
        for name, lengths in zip(self.names, self.lengths, strict=True):
            if not len(lengths) or lengths.min() < 1:
                raise ValueError(f"source {name!r}: {len(lengths)} documents; needed: at least one, each of at least 1 token.")
        if weights is None:
            sizes = [float(lengths.sum()) if by == "tokens" else float(len(lengths)) for lengths in self.lengths]
            weights = dict(zip(self.names, sizes, strict=True))
        self.weights = self._checked(weights)
        self._digests: dict[str, str] = {}

    def _checked(self, weights: Mapping[str, float]) -> dict[str, float]:
        if not weights:
            raise ValueError("weights are empty; name at least one source.")
        for name, weight in weights.items():
            if name not in self.names:
                raise ValueError(f"weights name {name!r}, which is no source; the sources are {', '.join(self.names)}.")
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"the weight of {name!r} is {weight}; it must be above 0 and finite. "
                    f"Drop {name!r} from the weights to draw nothing from it."
                )
        total = math.fsum(weights.values())  # exact, so the order of the names does not matter
        return {name: weights[name] / total for name in self.names if name in weights}

    def shares(self) -> dict[str, float]:
        """{name: share of the tokens} of the sources with a weight; they sum to 1."""
        if self.by == "tokens":
            return self.weights
        sizes = {name: w * float(self.lengths[self.names.index(name)].mean()) for name, w in self.weights.items()}
        return {name: size / math.fsum(sizes.values()) for name, size in sizes.items()}

    def digest(self, name: str) -> str:
        """16 hex digits of the named source's fingerprint."""
        if name not in self._digests:
            self._digests[name] = json_digest(self.sources[self.names.index(name)].fingerprint())
        return self._digests[name]

    def fingerprint(self) -> dict[str, Any]:
        """JSON: the sources drawn from with their numbers, their weights (shares to 12 digits) and what the weights count."""
        drawn = {name: self.sources[self.names.index(name)] for name in self.weights}
        return {
            "sources": {name: {"number": self.names.index(name), **source.fingerprint()} for name, source in drawn.items()},
            "weights": {name: round(weight, 12) for name, weight in self.weights.items()},
            "by": self.by,
        }


class Draws:
    """The documents of each source one after another, from given cursors on.

    cursors: {name: documents drawn}, changed by every draw; names that the mixture does not know stay as they are.
    repeat: False ends a source after its first epoch.
    """

    def __init__(self, mixture: Mixture, *, seed: int, cursors: Mapping[str, int] | None = None, repeat: bool = True):
        self.mixture, self.seed, self.repeat = mixture, seed, repeat
        self.cursors = {name: int(count) for name, count in (cursors or {}).items()}
        for name in mixture.weights:
            self.cursors.setdefault(name, 0)
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def next(self, number: int) -> tuple[int, int] | None:
        """(document, its tokens) of source `number`; None when the source has ended."""
        name, lengths = self.mixture.names[number], self.mixture.lengths[number]
        cursor = self.cursors.get(name, 0)
        epoch, at = divmod(cursor, len(lengths))
        if epoch and not self.repeat:
            return None
        document = int(self._order(number, epoch)[at])
        self.cursors[name] = cursor + 1
        return document, int(lengths[document])

    def _order(self, number: int, epoch: int) -> np.ndarray:
        """The documents of a source in the order of an epoch: by its name, not its number, which may change."""
        known = self._orders.get(number)
        if known is None or known[0] != epoch:
            text = f"{self.mixture.names[number]}\0{epoch}"
            stream = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            known = epoch, CounterHash(self.seed, stream=stream).permutation(len(self.mixture.lengths[number]))
            self._orders[number] = known
        return known[1]


class Balance:
    """Whose turn it is to give a row: of (tokens given + half a row) / weight the least, the first of equals.

    Webster's rule for seats: shares are kept to within about a row at every moment, whatever the rows' padding, and a source that
    ends leaves the others their weights among themselves.

    given: {name: tokens} since the mixture began.
    """

    def __init__(self, mixture: Mixture, context: int, given: Mapping[str, int] | None = None):
        self._shares = mixture.shares()
        self._half = context / 2
        self.given = {name: int((given or {}).get(name, 0)) for name in self._shares}
        self._score = {name: self._of(name) for name in self._shares}

    def names(self) -> list[str]:
        """The sources in the order in which they should be asked for a row."""
        return sorted(self._score, key=self._score.__getitem__)

    def next(self) -> str:
        """The first of `names()`."""
        return min(self._score, key=self._score.__getitem__)

    def add(self, name: str, tokens: int) -> None:
        self.given[name] += tokens
        self._score[name] = self._of(name)

    def _of(self, name: str) -> float:
        return (self.given[name] + self._half) / self._shares[name]
