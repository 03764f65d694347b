"""The needle in a haystack: facts "key is value" planted in filler, one of them asked for at the end.

    BOS  filler .. "\\nkey is value.\\n" .. filler  "\\n? key is " value ".\\n"  EOS

Depth d: the asked needle begins at token round(d * (R - n)) of the R tokens between BOS and the question, n its own length:
exactly, whatever the tokenizer (filler is cut where it must be). With several needles the others stand anywhere else.

Chance: 10 ** -digits for a whole answer by guessing digits, 1/needles by a copy of some needle's value. A model that copies the
needle nearest to the question - a short memory - scores what `needle_baselines` counts: 1 where there is one needle, so evaluate
with four or more. RULER (arXiv 2404.06654): single and multi-key needles.

R: rows, T: tokens a row, A: tokens of an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .facts import Draws, Filler, check_distinct, check_generator, check_index
from .generators import Pieces
from .sources import TokenDocument, digest_of, tokenizer_fingerprint
from .tokenizer import ByteTokenizer

NEEDLE, GRID = 2, 4  # `Draws.kind`


@dataclasses.dataclass(frozen=True)
class Haystack:
    """One document. start: where the asked needle begins; answer: where its value begins at the end; value, last: the ids of the
    expected value and of the value nearest to the question; learned: bool [T], true on the answer."""

    ids: np.ndarray
    start: int
    answer: int
    value: np.ndarray
    last: np.ndarray

    @property
    def learned(self) -> np.ndarray:
        mask = np.zeros(len(self.ids), bool)
        mask[self.answer : self.answer + len(self.value)] = True
        return mask


@dataclasses.dataclass(frozen=True)
class NeedleRows:
    """An evaluation grid, rows ordered by depth.

    tokens: int32 [R,T], the answers in place. positions: int32 [R,A], where an answer's tokens stand, so that the logits at
    positions - 1 predict them; expected: int32 [R,A], what stands there. -1 in both where an answer is shorter than A.
    depths: float64 [R], as asked for; starts: int32 [R], the token where the asked needle begins. last: int32 [R,A], the value
    nearest to the question. needles, digits: as asked for.
    """

    tokens: np.ndarray
    positions: np.ndarray
    expected: np.ndarray
    depths: np.ndarray
    starts: np.ndarray
    last: np.ndarray
    needles: int
    digits: int

    def correct(self, predicted: np.ndarray) -> np.ndarray:
        """bool [R]: whether every token of the answer is right. predicted: int [R,T], the argmax of the logits at each position."""
        if predicted.shape != self.tokens.shape:
            raise ValueError(f"predicted has the shape {predicted.shape}; needed: that of the tokens, {self.tokens.shape}.")
        given = np.take_along_axis(predicted, np.maximum(self.positions - 1, 0), axis=1)
        return ((given == self.expected) | (self.positions < 0)).all(axis=1)


class NeedleSource:
    """Haystacks of exactly `length` tokens, the asked needle at a uniformly drawn depth.

    needles: facts a document, of which one is asked; a number or (fewest, most). depths: (lowest, highest), within [0, 1].
    filler: text to hide them in, read on from a random place; None: made-up words. loss: the "answer" alone, or "all" tokens.
    split: "eval" has streams, keys and values of its own.

    ValueError: a length too short for the needles, depths outside [0, 1], another split or loss.
    """

    def __init__(
        self,
        name: str,
        *,
        length: int,
        seed: int,
        documents: int,
        needles: int | tuple[int, int] = 1,
        depths: tuple[float, float] = (0.0, 1.0),
        filler: str | bytes | None = None,
        loss: str = "answer",
        split: str = "train",
        digits: int = 4,
        tokenizer: Any = None,
    ):
        check_generator(name, split=split, documents=documents, digits=digits)
        self.needles = (needles, needles) if isinstance(needles, int) else tuple(needles)
        self.depths = (float(depths[0]), float(depths[1]))
        if not 1 <= self.needles[0] <= self.needles[1] or loss not in ("answer", "all"):
            raise ValueError(f'source {name!r}: needles={needles}, loss={loss!r}; needed: 1 or more needles, loss "answer" or "all".')
        if not 0 <= self.depths[0] <= self.depths[1] <= 1:
            raise ValueError(f"source {name!r}: depths={depths} must be (lowest, highest) within [0, 1].")
        check_distinct(name, keys=self.needles[1], digits=digits, split=split)
        self.name, self.length, self.seed, self.documents, self.split = name, length, seed, documents, split
        self.loss, self.digits = loss, digits
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self._filler, self._filler_sha256 = Filler(self.tokenizer, filler), _sha256(filler)
        _check_length(self.name, length, self.needles[1], digits, self.tokenizer)

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, index: int, /) -> TokenDocument:
        draws = Draws(self.seed, self.split, check_index(self.name, index, self.documents), NEEDLE)
        low, high = self.depths
        depth = low + (high - low) * draws.numbers(5).uniform(0, 1).item()
        made = _haystack(draws, self.length, depth, draws.between(0, *self.needles), self.digits, self._filler, self.tokenizer)
        return TokenDocument(made.ids, made.learned if self.loss == "answer" else None)

    def lengths(self) -> np.ndarray:
        return np.full(self.documents, self.length, np.int64)

    def fingerprint(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("documents", "length", "loss", "digits", "seed", "split")}
        ranges = {"needles": list(self.needles), "depths": list(self.depths), "filler": self._filler_sha256}
        return {"kind": "needles", **own, **ranges, "tokenizer": tokenizer_fingerprint(self.tokenizer)}


def needle_rows(
    length: int,
    depths: Sequence[float],
    keys: int,
    seed: int,
    *,
    rows_per_depth: int = 1,
    filler: str | bytes | None = None,
    digits: int = 4,
    split: str = "eval",
    tokenizer: Any = None,
) -> NeedleRows:
    """The evaluation grid of one length: `rows_per_depth` haystacks at each depth, with `keys` needles each, one of them asked.

    depths: within [0, 1], as (0.0, 0.1, ..., 1.0). The rows differ from those of every `NeedleSource`, also with the same seed, and
    with split="eval" (the default) have keys and values that no training split has.

    ValueError: as `NeedleSource`; no depths.
    """
    check_generator("needle rows", split=split, documents=rows_per_depth, digits=digits)
    if not len(depths) or not all(0 <= d <= 1 for d in depths) or keys < 1:
        raise ValueError(f"depths={tuple(depths)}, keys={keys}; needed: at least one depth, all within [0, 1], and at least one key.")
    check_distinct("needle rows", keys=keys, digits=digits, split=split)
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    _check_length("needle rows", length, keys, digits, tokenizer)
    hidden = Filler(tokenizer, filler)
    at = [float(depth) for depth in depths for _ in range(rows_per_depth)]
    rows = [_haystack(Draws(seed, split, i, GRID), length, depth, keys, digits, hidden, tokenizer) for i, depth in enumerate(at)]
    most = max(max(len(row.value), len(row.last)) for row in rows)
    positions = [np.arange(row.answer, row.answer + len(row.value)) for row in rows]
    return NeedleRows(
        tokens=np.stack([row.ids for row in rows]),
        positions=_padded(positions, most),
        expected=_padded([row.value for row in rows], most),
        depths=np.array(at),
        starts=np.array([row.start for row in rows], np.int32),
        last=_padded([row.last for row in rows], most),
        needles=keys,
        digits=digits,
    )


def needle_baselines(rows: NeedleRows) -> dict[str, float]:
    """What needs no reading of the key: shares of whole answers right.

    guess: every digit by chance. copy_any: the value of a needle of the row at random. copy_last: the value nearest to the question,
    counted on these rows (deep needles are often the last: compare with it at each depth).
    """
    return {
        "guess": 10.0**-rows.digits,
        "copy_any": 1.0 / rows.needles,
        "copy_last": float((rows.last == rows.expected).all(axis=1).mean()),
    }


def _haystack(draws: Draws, length: int, depth: float, needles: int, digits: int, filler: Filler, tokenizer: Any) -> Haystack:
    """Fact 0 is the asked one; each other goes before or behind it, wherever it fits, in proportion to the room there."""
    keys, values = draws.keys(1, needles), draws.values(2, needles, digits)
    facts = [_fact(tokenizer, key, value) for key, value in zip(keys, values, strict=True)]
    front, tail = Pieces(tokenizer), Pieces(tokenizer)
    front.end(tokenizer.bos_id)
    question = tokenizer.encode(f"\n? {keys[0]} is ", control_tokens=False)
    tail.add(question)
    tail.add(values[0])
    tail.add(".\n")
    tail.end(tokenizer.eos_id)
    room = length - len(front) - len(tail) - len(facts[0])
    before = round(depth * room)
    sides: tuple[list[int], list[int]] = ([], [])
    left = [before, room - before]
    for fact, draw in enumerate(draws.numbers(3).uniform(0, needles - 1).tolist(), start=1):
        side = int(draw * (left[0] + left[1]) >= left[0])
        side = side if left[side] >= len(facts[fact]) else 1 - side
        sides[side].append(fact)
        left[side] -= len(facts[fact])
    words = filler.tokens(draws.numbers(4), left[0] + left[1])
    parts = [_spread(draws, words[: left[0]], sides[0], facts), [facts[0]], _spread(draws, words[left[0] :], sides[1], facts)]
    for piece in (piece for part in parts for piece in part):
        front.add(piece)
    context, end = front.ids, tail.ids
    starts = {0: before, **_starts(parts[0], sides[0], 0), **_starts(parts[2], sides[1], before + len(facts[0]))}
    last = max(starts, key=starts.__getitem__)
    return Haystack(
        ids=np.concatenate([context, end]),
        start=before + (tokenizer.bos_id is not None),
        answer=len(context) + len(question),
        value=tokenizer.encode(values[0], control_tokens=False),
        last=tokenizer.encode(values[last], control_tokens=False),
    )


def _fact(tokenizer: Any, key: str, value: str) -> np.ndarray:
    pieces = Pieces(tokenizer)
    pieces.line(f"{key} is ", value)
    return pieces.ids


def _spread(draws: Draws, words: np.ndarray, chosen: list[int], facts: list[np.ndarray]) -> list[np.ndarray]:
    """The filler cut at random places, with the chosen facts in between: filler, fact, filler, ..., filler."""
    cuts = sorted(draws.numbers(6).integers(fact, 1, len(words) + 1).item() for fact in chosen)
    pieces, start = [], 0
    for cut, fact in zip(cuts, chosen, strict=True):
        pieces += [words[start:cut], facts[fact]]
        start = cut
    return [*pieces, words[start:]]


def _starts(pieces: list[np.ndarray], chosen: list[int], offset: int) -> dict[int, int]:
    """{fact: where it begins} for what `_spread` made."""
    ends = offset + np.cumsum([len(piece) for piece in pieces])
    return {fact: int(ends[2 * i]) for i, fact in enumerate(chosen)}


def _check_length(name: str, length: int, needles: int, digits: int, tokenizer: Any) -> None:
    """At any depth one side of the asked needle has half of the room, and must hold all others: bytes bound any byte-level BPE."""
    fact = len("\nbakide is .\n") + digits
    shortest = 2 + fact + len("? ") + fact + 2 * (needles - 1) * fact
    if length < shortest:
        raise ValueError(
            f"{name!r}: length={length} is too short for {needles} needles at any depth; give at least {shortest} tokens, or fewer needles."
        )


def _padded(rows: list[np.ndarray], width: int) -> np.ndarray:
    padded = np.full((len(rows), width), -1, np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _sha256(filler: str | bytes | None) -> str | None:
    if filler is None:
        return None
    return digest_of([filler.encode("utf-8", "surrogatepass") if isinstance(filler, str) else filler])
