"""Tasks that ask for one ability each: recall (MQAR, KeyedRecall), state tracking (Stack), exact copying (Palindrome).

The synthetic tests of Kimi Linear (arXiv 2510.26692 section 5.1), generated while training: a row is a function of (seed, split,
row number), so there is no fixed set to memorise, a batch is the same on every host, and the evaluation's rows come from random
streams of their own. Loss and accuracy are over the answers alone.

Every task has `length`, `vocab_size`, `chance()` and `batch(index, rows, split=...)`. Where it makes sense, `copy_last(tokens)` is
what a model would say that knows the format but looks nothing up: the value that came last.

B: rows, T: tokens a row, P: pairs a row.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from .facts import SPLITS
from .row_draws import RowDraws

MQAR_KIND, STACK_KIND, PALINDROME_KIND, RECALL_KIND = 0, 1, 2, 3  # `RowDraws.kind`
ZOOLOGY_MIX = ((64, 4, 5), (128, 8, 1), (256, 16, 1), (256, 32, 1), (256, 64, 1))
"""Zoology's training set for MQAR: (length, pairs, weight), 100,000 rows of the first and 20,000 of each other."""


class TaskBatch(NamedTuple):
    """tokens: int32 [B,T]. targets: int32 [B,T], what must be predicted at a position (after reading the token there), 0 where
    nothing is asked. loss_mask: bool [B,T], the positions with an answer."""

    tokens: np.ndarray
    targets: np.ndarray
    loss_mask: np.ndarray


@runtime_checkable
class SyntheticTask(Protocol):
    """What `moejax.evals.answer_accuracy` and a training loop need."""

    @property
    def length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def batch(self, index: int, rows: int, *, split: str = "train") -> TaskBatch: ...
    def chance(self) -> float: ...


@dataclasses.dataclass(frozen=True)
class MQAR:
    """Multi-query associative recall, by Zoology's generator (arXiv 2312.04927, section 4 and appendix E).

        k1 v1 k2 v2 .. kP vP | filler and queries: each key once more, its value the target at that position

    Keys: P different of 1 .. vocab_size/2 - 1; values: P different of the upper half. A query stands an even number of tokens behind
    the pairs; how far is drawn from the power law d**(power_a - 1), without replacement, the first pair drawing first. The answer
    is not shown: what follows a query is filler.

    random_filler: whatever is neither pair nor query is any id of the vocabulary (Zoology's `random_non_queries`), else 0.
    mixed: the training split's difficulties, (length, pairs) or (length, pairs, weight) each, as `ZOOLOGY_MIX`; a row draws one, and
        is padded with 0 behind its own length. The evaluation split always has (length, pairs).

    ValueError: an odd length, one below 4 * pairs, a vocabulary too small for the pairs.
    """

    vocab_size: int = 8192
    length: int = 256
    pairs: int = 64
    power_a: float = 0.01
    random_filler: bool = True
    mixed: tuple[tuple[int, ...], ...] | None = None
    seed: int = 0

    def __post_init__(self):
        if self.mixed is not None:
            object.__setattr__(self, "mixed", tuple(tuple(level) for level in self.mixed))
        if self.power_a <= 0 or (self.mixed is not None and not self.mixed):
            raise ValueError(f"MQAR: power_a={self.power_a}, mixed={self.mixed}; needed: a positive power, and None or at least one level.")
        for level in ((self.length, self.pairs), *(self.mixed or ())):
            if len(level) not in (2, 3) or level[-1] <= 0:
                raise ValueError(f"MQAR: mixed has {level}; needed: (length, pairs) or (length, pairs, weight), the weight positive.")
            length, pairs = level[:2]
            if length % 2 or pairs < 1 or 4 * pairs > length or length > self.length:
                raise ValueError(
                    f"MQAR: length={length}, pairs={pairs}; needed: an even length of at least 4 * pairs, and at most length={self.length}."
                )
            if pairs > self.vocab_size // 2 - 1:
                raise ValueError(f"MQAR: {pairs} pairs need a vocabulary of at least {2 * pairs + 2} ids, not {self.vocab_size}.")

    def batch(self, index: int, rows: int, *, split: str = "train") -> TaskBatch:
        """Rows index * rows .. (index + 1) * rows - 1 of the split."""
        draws = _row_draws(self.seed, split, MQAR_KIND, index, rows)
        levels = [(self.length, self.pairs)] if self.mixed is None or split == "eval" else list(self.mixed)
        chosen = _choice(draws, 0, [level[2] if len(level) > 2 else 1 for level in levels])
        tokens = np.zeros((rows, self.length), np.int32)
        targets = np.zeros((rows, self.length), np.int32)
        for number, level in enumerate(levels):
            of_level = np.flatnonzero(chosen == number)
            if len(of_level):
                length, pairs = level[:2]
                tokens[of_level, :length], targets[of_level, :length] = (part[of_level] for part in self._rows(draws, length, pairs))
        return TaskBatch(tokens, targets, targets > 0)

    def _rows(self, draws: RowDraws, length: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (tokens, targets) [B,length] of one difficulty. All rows are drawn, also those of other levels: a few more numbers."""
        half = self.vocab_size // 2
        keys = 1 + draws.distinct(1, pairs, half - 1)
        values = half + draws.distinct(2, pairs, self.vocab_size - half)
        space = (length - 2 * pairs) // 2
        gaps = draws.weighted(3, pairs, np.arange(1, space + 1, dtype=np.float64) ** (self.power_a - 1))
        tokens = np.zeros((draws.rows, length), np.int32)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        targets = np.zeros_like(tokens)
        np.put_along_axis(tokens, 2 * pairs + 2 * gaps, keys, axis=1)
        np.put_along_axis(targets, 2 * pairs + 2 * gaps, values, axis=1)
        if self.random_filler:
            tokens = np.where(tokens == 0, draws.integers(4, length, self.vocab_size), tokens)
        return tokens, targets

    def chance(self) -> float:
        """Guessing any value of the vocabulary."""
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def copy_any(self) -> float:
        """Saying any value of the row's pairs."""
        return 1 / self.pairs

    def copy_last(self, tokens: np.ndarray) -> np.ndarray:
        """int32 [B,T]: the value of the pair that stands last, in a row of (length, pairs), as the evaluation's are."""
        return np.broadcast_to(tokens[:, 2 * self.pairs - 1, None], tokens.shape).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Stack:
    """Independent last-in-first-out stacks, three tokens an operation (Kimi Linear section 5.1: "<PUSH> 1 G", "<POP> 0 E").

        PUSH s e    the element e goes onto stack s
        POP s e     e is what was pushed onto s last and is still there: the target at the position of s

    An operation is a pop with probability `pop`, of a stack chosen uniformly among those that hold something (a push when none
    does); a push takes any stack and any element. So the answer is always defined, and the stacks fill slowly: at the default 0.4
    and 85 operations some 17 elements are left at the end. The paper gives neither the share of pops nor the number of elements.

    Ids: PUSH 0, POP 1, stack s: 2 + s, element e: 2 + stacks + e; 128 ids with the default 64 stacks and 62 elements.

    ValueError: a length that is no multiple of 3, or below 6.
    """

    stacks: int = 64
    length: int = 255
    elements: int = 62
    pop: float = 0.4
    seed: int = 0

    def __post_init__(self):
        if self.length % 3 or self.length < 6 or self.stacks < 1 or self.elements < 2 or not 0 < self.pop < 1:
            raise ValueError(
                f"Stack: length={self.length}, stacks={self.stacks}, elements={self.elements}, pop={self.pop}; needed: a length that is "
                "a multiple of 3 and at least 6, a stack, two elements, and a share of pops between 0 and 1."
            )

    @property
    def vocab_size(self) -> int:
        return 2 + self.stacks + self.elements

    def batch(self, index: int, rows: int, *, split: str = "train") -> TaskBatch:
        """Rows index * rows .. (index + 1) * rows - 1 of the split."""
        draws = _row_draws(self.seed, split, STACK_KIND, index, rows)
        operations = self.length // 3
        wants_pop = draws.uniform(0, operations) < self.pop
        pushed_to, element = draws.integers(1, operations, self.stacks), draws.integers(2, operations, self.elements)
        which = draws.uniform(3, operations)
        # A stack is a linked list of operations: `top` is the push on top of each stack, `below` the one under a push. -1: none.
        row = np.arange(rows)
        top = np.full((rows, self.stacks), -1, np.int32)
        below = np.full((rows, operations), -1, np.int32)
        stack, popped = np.empty_like(pushed_to), np.zeros((rows, operations), bool)
        for now in range(operations):
            filled = np.cumsum(top >= 0, axis=1, dtype=np.int32)
            count = filled[:, -1]
            pops = popped[:, now] = wants_pop[:, now] & (count > 0)
            nth = (which[:, now] * count).astype(np.int32)
            stack[:, now] = s = np.where(pops, (filled > nth[:, None]).argmax(axis=1), pushed_to[:, now])
            on_top = top[row, s]
            element[:, now] = np.where(pops, element[row, on_top], element[:, now])
            below[:, now] = on_top
            top[row, s] = np.where(pops, below[row, on_top], now)
        tokens = np.stack([popped, 2 + stack, 2 + self.stacks + element], axis=-1).reshape(rows, self.length).astype(np.int32)
        targets, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        mask[:, 1::3] = popped
        targets[:, 1::3] = np.where(popped, tokens[:, 2::3], 0)
        return TaskBatch(tokens, targets, mask)

    def chance(self) -> float:
        """Guessing any element."""
        return 1 / self.elements

    def copy_last(self, tokens: np.ndarray) -> np.ndarray:
        """int32 [B,T]: the element pushed last before each position, on whatever stack."""
        pushed = np.zeros(tokens.shape, bool)
        pushed[:, 2::3] = tokens[:, 0::3] == 0
        return _latest(tokens, pushed)


@dataclasses.dataclass(frozen=True)
class Palindrome:
    """A random string, a separator, the string reversed: every token of the second half is a target.

        a b c | SEP c b a       tokens a b c SEP c b: targets at SEP, c, b are c, b, a

    length: of the tokens fed, twice the string's. Ids: SEP 0, symbols 1 .. vocab_size - 1, drawn with replacement.
    Kimi Linear section 5.1 (whose table leaves out the first answer, the one at SEP, which repeats the token before).

    ValueError: an odd length, fewer than two symbols.
    """

    vocab_size: int = 128
    length: int = 256
    seed: int = 0

    def __post_init__(self):
        if self.length % 2 or self.length < 2 or self.vocab_size < 3:
            raise ValueError(f"Palindrome: length={self.length}, vocab_size={self.vocab_size}; needed: an even length and two symbols.")

    def batch(self, index: int, rows: int, *, split: str = "train") -> TaskBatch:
        """Rows index * rows .. (index + 1) * rows - 1 of the split."""
        draws = _row_draws(self.seed, split, PALINDROME_KIND, index, rows)
        half = self.length // 2
        text = 1 + draws.integers(0, half, self.vocab_size - 1)
        tokens = np.concatenate([text, np.zeros((rows, 1), np.int32), text[:, :0:-1]], axis=1)
        targets = np.concatenate([np.zeros_like(text), text[:, ::-1]], axis=1)
        return TaskBatch(tokens, targets, targets > 0)

    def chance(self) -> float:
        """Guessing any symbol."""
        return 1 / (self.vocab_size - 1)


@dataclasses.dataclass(frozen=True)
class KeyedRecall:
    """Recall for length extrapolation: few pairs anywhere in a row of any length, all asked at its end.

        filler .. k v .. filler .. k v .. filler | k v k v ..    the target at a key of the end is its value

    The number of pairs stays while the length grows, so a longer row asks for a longer memory, not for a larger one. Unlike MQAR's
    the filler has ids of its own: in 8,192 random tokens nearly every key would turn up by chance and the answers be ambiguous.

    Ids: filler 0 .. V/4 - 1, keys V/4 .. V/2 - 1, values V/2 .. V - 1 (V: vocab_size). Keys and values are different within a row; pairs
    stand at even positions, uniformly. queries: how many pairs are asked, in random order; None: all. The end shows the answers
    (teacher forcing), so the tokens are a text that a sampled model could write itself.

    ValueError: an odd length, or one below 2 * (pairs + queries); more queries than pairs, a vocabulary too small.
    """

    vocab_size: int = 8192
    length: int = 256
    pairs: int = 16
    queries: int | None = None
    seed: int = 0

    def __post_init__(self):
        if self.pairs < 1 or not 1 <= self.asked <= self.pairs or self.length % 2 or self.length < 2 * (self.pairs + self.asked):
            raise ValueError(
                f"KeyedRecall: length={self.length}, pairs={self.pairs}, queries={self.queries}; needed: 1 <= queries <= pairs, and an "
                "even length of at least 2 * (pairs + queries)."
            )
        if self.vocab_size < 4 * self.pairs or self.vocab_size % 4:
            raise ValueError(f"KeyedRecall: vocab_size={self.vocab_size} must be a multiple of 4, at least 4 * pairs = {4 * self.pairs}.")

    @property
    def asked(self) -> int:
        return self.pairs if self.queries is None else self.queries

    def batch(self, index: int, rows: int, *, split: str = "train") -> TaskBatch:
        """Rows index * rows .. (index + 1) * rows - 1 of the split."""
        draws = _row_draws(self.seed, split, RECALL_KIND, index, rows)
        quarter, end = self.vocab_size // 4, self.length - 2 * self.asked
        keys = quarter + draws.distinct(0, self.pairs, quarter)
        values = 2 * quarter + draws.distinct(1, self.pairs, 2 * quarter)
        places = 2 * draws.distinct(2, self.pairs, end // 2)
        asked = draws.distinct(3, self.asked, self.pairs)
        tokens = draws.integers(4, self.length, quarter)
        np.put_along_axis(tokens, places, keys, axis=1)
        np.put_along_axis(tokens, places + 1, values, axis=1)
        tokens[:, end::2] = np.take_along_axis(keys, asked, axis=1)
        tokens[:, end + 1 :: 2] = np.take_along_axis(values, asked, axis=1)
        targets, mask = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        targets[:, end::2], mask[:, end::2] = tokens[:, end + 1 :: 2], True
        return TaskBatch(tokens, targets, mask)

    def chance(self) -> float:
        """Guessing any value of the vocabulary."""
        return 2 / self.vocab_size

    def copy_any(self) -> float:
        """Saying any value of the row's pairs."""
        return 1 / self.pairs

    def copy_last(self, tokens: np.ndarray) -> np.ndarray:
        """int32 [B,T]: the value of the pair nearest to the questions (before it, of the nearest so far; 0 where there is none)."""
        end = self.length - 2 * self.asked
        return _latest(tokens, (tokens >= self.vocab_size // 2) & (np.arange(self.length) < end))


def _row_draws(seed: int, split: str, kind: int, index: int, rows: int) -> RowDraws:
    if split not in SPLITS or index < 0 or rows < 1:
        raise ValueError(f'split={split!r}, index={index}, rows={rows}; needed: "train" or "eval", index >= 0 and at least one row.')
    return RowDraws(seed, split, kind, index * rows, rows)


def _choice(draws: RowDraws, purpose: int, weights: list[int]) -> np.ndarray:
    """int [B]: an entry of `weights` for each row, in proportion to them."""
    bounds = np.cumsum(weights) / np.sum(weights)
    return np.minimum(np.searchsorted(bounds, draws.uniform(purpose, 1)[:, 0], side="right"), len(weights) - 1)


def _latest(tokens: np.ndarray, marked: np.ndarray) -> np.ndarray:
    """int32 [B,T]: the token at the nearest marked place at or before each position, 0 where there is none."""
    place = np.maximum.accumulate(np.where(marked, np.arange(tokens.shape[1]), -1), axis=1)
    return np.where(place >= 0, np.take_along_axis(tokens, np.maximum(place, 0), axis=1), 0).astype(np.int32)
