"""Random numbers for whole batches of rows at once: row r has a stream of its own, whatever batch it stands in.

The stream of a row is a function of (seed, split, kind, purpose, row number) alone, as everything in `facts`; here the rows are
drawn together, which is what makes a generator fast enough to feed a training step.

B: rows, N: numbers a row.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .counter import _GOLDEN, CounterHash, _mix
from .facts import SPLITS

_ROWS_SEED = 0x726F7773  # apart from the streams of `facts.Draws` with the same seed
_PURPOSES, _KINDS = 8, 16


@dataclasses.dataclass(frozen=True)
class RowDraws:
    """The random numbers of rows first .. first + rows - 1 of a split; kind: which generator asks."""

    seed: int
    split: str
    kind: int
    first: int
    rows: int

    def bits(self, purpose: int, count: int) -> np.ndarray:
        """uint64 [B,count]. More numbers of a row begin with the fewer: bits(p, 3) == bits(p, 5)[:, :3]."""
        stream = (SPLITS.index(self.split) * _KINDS + self.kind) * _PURPOSES + purpose
        keys = CounterHash(self.seed ^ _ROWS_SEED, stream=stream).bits(self.first, self.rows)
        return _mix(keys[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)

    def integers(self, purpose: int, count: int, bound: int) -> np.ndarray:
        """int32 [B,count] in [0, bound), bound at most 2**31: the high half of the bits scaled down, with a bias below bound / 2**32."""
        high = self.bits(purpose, count) >> np.uint64(32)
        return ((high * np.uint64(bound)) >> np.uint64(32)).astype(np.int32)

    def uniform(self, purpose: int, count: int) -> np.ndarray:
        """float64 [B,count] in (0, 1): never 0, so that a logarithm exists."""
        return ((self.bits(purpose, count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def distinct(self, purpose: int, count: int, bound: int) -> np.ndarray:
        """int32 [B,count] in [0, bound), different within a row, in random order: every ordered choice is equally likely."""
        if 8 * count > bound:
            return np.argsort(self.bits(purpose, bound), axis=1, kind="stable")[:, :count].astype(np.int32)
        tries = count + count // 4 + 8
        while True:  # the first `count` different numbers of a row's stream: more tries change none of them
            drawn = self.integers(purpose, tries, bound)
            places = np.arange(tries, dtype=np.int64)
            ordered = np.sort((drawn.astype(np.int64) << 32) | places, axis=1)
            repeated = np.zeros(drawn.shape, bool)
            np.put_along_axis(repeated, ordered[:, 1:] & 0xFFFFFFFF, ordered[:, 1:] >> 32 == ordered[:, :-1] >> 32, axis=1)
            if ((~repeated).sum(axis=1) >= count).all():
                chosen = np.argsort(repeated, axis=1, kind="stable")[:, :count]
                return np.take_along_axis(drawn, chosen, axis=1)
            tries *= 2

    def weighted(self, purpose: int, count: int, weights: np.ndarray) -> np.ndarray:
        """int32 [B,count]: different entries of `weights`, drawn one after another in proportion to what is left.

        The order of exponential arrival times with rates `weights` is that of drawing without replacement (Efraimidis and
        Spirakis, 2006).
        """
        arrivals = -np.log(self.uniform(purpose, len(weights))) / weights
        return np.argsort(arrivals, axis=1, kind="stable")[:, :count].astype(np.int32)
