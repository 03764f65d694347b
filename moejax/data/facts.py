"""Keys, values and filler for the synthetic sources: pure functions of (seed, split, index), the same on every platform.

Keys are words of three syllables ("bakide"), values are decimal numbers of a fixed width, filler words have two or four
syllables and so are never keys. Training and evaluation draw from disjoint sets of keys and values (one in eight belongs to
evaluation, chosen by a hash, so that no digit or syllable tells the sets apart): what evaluation asks for was never seen.

N: tokens. K: facts.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from .counter import CounterHash

SPLITS = ("train", "eval")
SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvwyzcx" for vowel in "aeiou"]
NUM_KEYS = len(SYLLABLES) ** 3
EVAL_ONE_IN = 8
MAX_DIGITS = 6
# Streams of random numbers that belong to no document: which numbers are for evaluation, and the filler's words.
_SPLIT_SEED, _FILLER_SEED = 0x73706C6974, 0x66696C6C6572
_PURPOSES, _KINDS = 8, 8


@dataclasses.dataclass(frozen=True)
class Draws:
    """The random numbers of document `index`; kind: which generator asks. Every (kind, split, index) has streams of its own."""

    seed: int
    split: str
    index: int
    kind: int

    def numbers(self, purpose: int) -> CounterHash:
        place = (self.index * len(SPLITS) + SPLITS.index(self.split)) * _KINDS + self.kind
        return CounterHash(self.seed, stream=place * _PURPOSES + purpose)

    def between(self, purpose: int, low: int, high: int) -> int:
        """An integer in [low, high], both included."""
        return low + self.numbers(purpose).integers(0, 1, high - low + 1).item()

    def keys(self, purpose: int, count: int) -> list[str]:
        """`count` distinct keys of this split."""
        return [key_word(k) for k in self._distinct(purpose, count, split_pool(NUM_KEYS, self.split))]

    def values(self, purpose: int, count: int, digits: int) -> list[str]:
        """`count` distinct numbers of this split, written with `digits` digits."""
        return [f"{v:0{digits}d}" for v in self._distinct(purpose, count, split_pool(10**digits, self.split))]

    def _distinct(self, purpose: int, count: int, pool: np.ndarray) -> list[int]:
        """Draws without those that came before; a pool of at least twice the count keeps the number of draws small."""
        tries = 2 * count + 16
        while True:
            drawn = self.numbers(purpose).integers(0, tries, len(pool))
            first = np.sort(np.unique(drawn, return_index=True)[1])
            if len(first) >= count:
                return pool[drawn[first[:count]]].tolist()
            tries *= 2


@functools.lru_cache(maxsize=16)
def split_pool(bound: int, split: str) -> np.ndarray:
    """int64: the numbers in [0, bound) that belong to the split."""
    for_eval = CounterHash(_SPLIT_SEED).bits(0, bound) % np.uint64(EVAL_ONE_IN) == 0
    return np.flatnonzero(for_eval == (split == "eval"))


def key_word(number: int) -> str:
    """The word of a number in [0, NUM_KEYS)."""
    n = len(SYLLABLES)
    return SYLLABLES[number // (n * n)] + SYLLABLES[number // n % n] + SYLLABLES[number % n]


class Filler:
    """Text in which facts are hidden: the given text, read on from a random place, or made-up words.

    text: None for words, drawn with weights falling as 1/rank. tokens(numbers, N) -> int32 [N]. It is cut where N ends, which may
    be inside a word.
    """

    def __init__(self, tokenizer: Any, text: str | bytes | None):
        self.given = None if text is None else tokenizer.encode(text, control_tokens=False)
        if self.given is not None and not len(self.given):
            raise ValueError("the filler text is empty; give text, or None for made-up words.")
        words = [tokenizer.encode(word, control_tokens=False) for word in _filler_words()]
        self._sizes = np.array([len(w) for w in words])
        self._table = np.zeros((len(words), self._sizes.max()), np.int32)
        for row, word in zip(self._table, words, strict=True):
            row[: len(word)] = word
        self._cumulative = np.cumsum((1 << 24) // np.arange(1, len(words) + 1))  # integers: no rounding to differ by platform

    def tokens(self, numbers: CounterHash, count: int) -> np.ndarray:
        if self.given is not None:
            start = numbers.integers(0, 1, len(self.given)).item()
            return np.take(self.given, np.arange(start, start + count), mode="wrap").astype(np.int32)
        words = count // int(self._sizes.min()) + 1
        drawn = np.searchsorted(self._cumulative, numbers.integers(0, words, int(self._cumulative[-1])), side="right")
        inside = np.arange(self._table.shape[1]) < self._sizes[drawn, None]
        return self._table[drawn][inside][:count]


def _filler_words(count: int = 96) -> list[str]:
    numbers = CounterHash(_FILLER_SEED)
    draws = numbers.integers(0, 4 * count, len(SYLLABLES)).reshape(count, 4)
    words = ("".join(SYLLABLES[s] for s in row[: 2 if i % 2 else 4]) for i, row in enumerate(draws.tolist()))
    return [word + (". " if i % 8 == 7 else " ") for i, word in enumerate(words)]


def check_generator(name: str, *, split: str, documents: int, digits: int) -> None:
    """ValueError for what every generator refuses."""
    if split not in SPLITS:
        raise ValueError(f'source {name!r}: split={split!r} must be "train" or "eval".')
    if documents < 1:
        raise ValueError(f"source {name!r}: documents={documents}; it needs at least one an epoch.")
    if not 1 <= digits <= MAX_DIGITS:
        raise ValueError(f"source {name!r}: digits={digits} must be 1 to {MAX_DIGITS}.")


def check_distinct(name: str, *, keys: int, digits: int, split: str) -> None:
    """ValueError where a document asks for more distinct keys or values than half of what its split has."""
    for what, needed, bound in (("keys", keys, NUM_KEYS), (f"values of {digits} digits", keys, 10**digits)):
        there = len(split_pool(bound, split))
        if 2 * needed > there:
            raise ValueError(
                f"source {name!r}: {needed} distinct {what} in a document, but the {split} split has {there}, and at most half of "
                "them are used. Ask for fewer, or give more digits."
            )


def check_index(name: str, index: int, documents: int) -> int:
    """The index as int; IndexError outside [0, documents), which is also how a for loop over a source ends."""
    if not 0 <= index < documents:
        raise IndexError(f"source {name!r} has documents 0 to {documents - 1}, not {index}.")
    return int(index)
