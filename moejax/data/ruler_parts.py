"""What the RULER tasks are made of: depths, words and ids that belong to a split, and the prompt of an exact length.

F: filler tokens of a prompt. K: answers of a sample.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from .facts import EVAL_ONE_IN, NUM_KEYS, SPLITS, Draws, Filler, split_pool
from .generators import Pieces
from .tokenizer import ByteTokenizer

NOISE = "The road is long. The sea is wide. The sky is clear. On we go. So it goes on.\n"
# A depth belongs to one of 40 equal parts of the text (RULER: 40 depths); these are the evaluation's, both ends among them.
DEPTH_BINS = 40
EVAL_BINS = frozenset({*range(0, DEPTH_BINS, 4), DEPTH_BINS - 1})


@dataclasses.dataclass(frozen=True)
class Sample:
    """One question.

    prompt_tokens: int32 [N], from BOS to where the answer begins. answers: the strings to be found in the output, in the order in
    which `answer_tokens` (int32 [A], with EOS) writes them: what to train on. length: N + A, as asked for. depth: where the asked
    needles stand on average, from 0 (the beginning of the text) to 1; None where there is none. candidates: all strings of the text
    that could be an answer, in the order of their last appearance. pool: how many such strings there are at all.
    """

    task: str
    prompt_tokens: np.ndarray
    answers: tuple[str, ...]
    answer_tokens: np.ndarray
    length: int
    depth: float | None
    candidates: tuple[str, ...]
    pool: float

    @property
    def guess(self) -> float:
        """Expected share of the answers found by as many blind guesses of the right form."""
        return min(1.0, len(self.answers) / self.pool)

    @property
    def copy_any(self) -> float:
        """Expected share found by as many different candidates of the text as are asked for, at random."""
        return len(self.answers) / len(self.candidates)

    @property
    def copied_last(self) -> tuple[str, ...]:
        """The candidates nearest to the question, as many as are asked for: what a short memory would say."""
        return self.candidates[-len(self.answers) :]


class RulerFiller:
    """The text needles are hidden in, and the words to count; made once for all tasks and lengths.

    tokenizer: None for bytes. text: read on from a random place; None: made-up words. words: what the common-words task counts, one in
    eight of them the evaluation's; None: those of 4 to 8 small letters in `text`, made-up words where there is no text; "made up":
    made-up words in any case, of which there is no end. Encoding megabytes of text takes seconds: share the object.
    """

    def __init__(self, tokenizer: Any = None, text: str | bytes | None = None, *, words: Sequence[str] | None = None):
        self.tokenizer = tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.essay, self.noise = Filler(tokenizer, text), Filler(tokenizer, NOISE)
        if words is None and text is not None:
            words = words_of(text)
        self.words: dict[str, list[str]] | None = None
        if words is not None and words != "made up":
            if isinstance(words, str) or len(set(words)) != len(words):
                raise ValueError('words must be a list in which every word stands once, None, or "made up".')
            self.words = {split: [word for word in words if word_split(word) == split] for split in SPLITS}
        self.encode = functools.lru_cache(1 << 16)(lambda text: tokenizer.encode(text, control_tokens=False))

    def num_words(self, split: str) -> int:
        """How many words the split has; of made-up ones a prompt holds at most half."""
        return len(split_pool(NUM_KEYS, split)) if self.words is None else len(self.words[split])

    def draw_words(self, draws: Draws, purpose: int, count: int) -> list[str]:
        """`count` different words of the split."""
        if self.words is None:
            return draws.keys(purpose, count)
        pool = self.words[draws.split]
        return [pool[i] for i in draws.numbers(purpose).permutation(len(pool))[:count].tolist()]


def ruler_filler(tokenizer: Any, filler: RulerFiller | str | bytes | None) -> RulerFiller:
    """`filler`, made of its text where it is none yet. ValueError: a tokenizer beside another one's filler."""
    if not isinstance(filler, RulerFiller):
        return RulerFiller(tokenizer, filler)
    if tokenizer is not None and tokenizer is not filler.tokenizer:
        raise ValueError("tokenizer is not the one of the RulerFiller given; leave it out.")
    return filler


def words_of(text: str | bytes) -> list[str]:
    """The different words of 4 to 8 small letters, in order of the alphabet."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else bytes(text)
    return sorted({word.decode() for word in re.findall(rb"(?<![A-Za-z0-9_])[a-z]{4,8}(?![A-Za-z0-9_])", data)})


def word_split(word: str) -> str:
    """The split a word of a corpus or an id belongs to: one in eight is the evaluation's, by a hash."""
    return "eval" if hash64(word) % EVAL_ONE_IN == 0 else "train"


def hash64(text: str) -> int:
    """64 bits of a text, the same everywhere."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def places_of(split: str, last: int) -> np.ndarray:
    """int64: the places in 0 .. last whose depth, place / last, belongs to the split."""
    bins = np.minimum(DEPTH_BINS * np.arange(last + 1) // last, DEPTH_BINS - 1)
    return np.flatnonzero(np.isin(bins, list(EVAL_BINS)) == (split == "eval"))


def uuids(draws: Draws, purpose: int, count: int) -> list[str]:
    """`count` ids of this split (`word_split`), 128 random bits with the version and variant of RFC 9562."""
    tries = 10 * count + 100  # enough for the one in eight almost always; only what is needed is made
    while True:
        drawn = draws.numbers(purpose).bits(0, 2 * tries).reshape(tries, 2).tolist()
        ids = (str(uuid.UUID(int=high << 64 | low, version=4)) for high, low in drawn)
        kept = list(itertools.islice((one for one in ids if word_split(one) == draws.split), count))
        if len(kept) == count:
            return kept
        tries *= 2


class Prompt:
    """BOS, a context, a question and its answer, all in tokens; `room` is what is left for the context."""

    def __init__(self, filler: RulerFiller, length: int, question: str, answers: Sequence[str]):
        tokenizer, self.length, self.answers = filler.tokenizer, length, tuple(answers)
        self._front, self._tail, self._answer = Pieces(tokenizer), Pieces(tokenizer), Pieces(tokenizer)
        self._front.end(tokenizer.bos_id)
        self._tail.add(question)
        for number, answer in enumerate(self.answers):
            if number:
                self._answer.add(", ")
            self._answer.add(answer)
        self._answer.add(".\n")
        self._answer.end(tokenizer.eos_id)
        self.room = length - len(self._front) - len(self._tail) - len(self._answer)

    def sample(self, task: str, context: Sequence[np.ndarray], depth: float | None, candidates: Sequence[str], pool: float) -> Sample:
        """context: token arrays that fill `room` exactly."""
        self._front.add(np.concatenate(context))
        prompt = np.concatenate([self._front.ids, self._tail.ids])
        assert len(prompt) + len(self._answer) == self.length, (task, len(prompt), len(self._answer), self.length)
        return Sample(task, prompt, self.answers, self._answer.ids, self.length, depth, tuple(candidates), pool)


def one_token(filler: RulerFiller, text: str) -> np.ndarray:
    """int32 [1]. ValueError for a tokenizer in which `text` is not one token: an exact length needs one."""
    ids = filler.encode(text)
    if len(ids) != 1:
        raise ValueError(f"the tokenizer writes {text!r} as {len(ids)} tokens; an exact length needs one. Use a byte-level tokenizer.")
    return np.asarray(ids, np.int32)


def too_short(task: str, length: int, why: str) -> ValueError:
    return ValueError(f"ruler task {task!r}: length={length} is too short: {why}. Give a longer one.")
