"""Seeded synthetic sources: recall of key-value facts, and long documents whose questions need facts from all over the window.

Every document is a function of (seed, split, index) alone. `split="eval"` has random streams, keys and values of its own
(`facts`), so that nothing asked there was seen in training. Sizes are in tokens of the tokenizer in use. The needle in a haystack
is in `needles`.

N: tokens of a document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from .corpus import Document
from .facts import Draws, check_distinct, check_generator, check_index
from .sources import TokenDocument, digest_of, tokenizer_fingerprint
from .tokenizer import ByteTokenizer

RECALL, LONG = 1, 3  # `Draws.kind`; 2 is `needles`
ORDERS = ("permuted", "folders")


class Pieces:
    """Encoded text laid end to end, with what is to be learned. Each piece is encoded by itself: a value has the same ids wherever it
    stands, and a fact takes the same number of tokens."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._ids: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []

    def add(self, text: str | np.ndarray, *, learned: bool = False) -> None:
        ids = self.tokenizer.encode(text, control_tokens=False) if isinstance(text, str) else text
        self._ids.append(ids)
        self._mask.append(np.full(len(ids), learned))

    def line(self, start: str, value: str, *, learned: bool = False) -> None:
        """A line of its own that ends with a value: the fact "key is " + value, or the question "? key is " + its answer."""
        self.add(f"\n{start}")
        self.add(value, learned=learned)
        self.add(".\n")

    def end(self, token: int | None) -> None:
        """BOS or EOS, where the tokenizer has one."""
        if token is not None:
            self.add(np.array([token], np.int32))

    def __len__(self) -> int:
        return sum(map(len, self._ids))

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate(self._ids).astype(np.int32)

    @property
    def learned(self) -> np.ndarray:
        return np.concatenate(self._mask)


class RecallSource:
    """Facts "key is value", in an order of their own, then questions "? key is value"; only the answers' values are learned.

    pairs: facts a document, a number or (fewest, most): mixed difficulty, uniform. queries: how many of them are asked, each once,
    in another order; None: all. digits: of a value. documents: an epoch.

    Chance: an answer's digit by guessing 1/10; by a copy of some fact's value in the document, the whole answer 1/pairs.
    The text form of multi-query associative recall (Zoology, arXiv 2312.04927; Kimi Linear section 5.1, arXiv 2510.26692).

    ValueError: pairs or queries out of range, more pairs than half of the split's values, another split.
    """

    def __init__(
        self,
        name: str,
        *,
        pairs: int | tuple[int, int],
        seed: int,
        documents: int,
        queries: int | None = None,
        split: str = "train",
        digits: int = 4,
        tokenizer: Any = None,
    ):
        check_generator(name, split=split, documents=documents, digits=digits)
        self.name, self.seed, self.documents, self.split, self.digits = name, seed, documents, split, digits
        self.pairs = (pairs, pairs) if isinstance(pairs, int) else tuple(pairs)
        low, high = self.pairs
        if not 1 <= low <= high or (queries is not None and not 1 <= queries <= low):
            raise ValueError(
                f"source {name!r}: pairs={pairs}, queries={queries}; needed: at least 1 pair, and 1 to {low} queries or None for all."
            )
        check_distinct(name, keys=high, digits=digits, split=split)
        self.queries = queries
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self._lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, index: int, /) -> TokenDocument:
        draws = self._draws(check_index(self.name, index, self.documents))
        pairs = self._num_pairs(draws)
        keys, values = draws.keys(1, pairs), draws.values(2, pairs, self.digits)
        pieces = Pieces(self.tokenizer)
        pieces.end(self.tokenizer.bos_id)
        for key, value in zip(keys, values, strict=True):
            pieces.line(f"{key} is ", value)
        for asked in draws.numbers(3).permutation(pairs)[: self.queries].tolist():
            pieces.line(f"? {keys[asked]} is ", values[asked], learned=True)
        pieces.end(self.tokenizer.eos_id)
        return TokenDocument(pieces.ids, pieces.learned)

    def lengths(self) -> np.ndarray:
        """int64 [documents]. In bytes a fact has the same size always; with another tokenizer every document is made once."""
        if self._lengths is None:
            self._lengths = self._byte_lengths() if isinstance(self.tokenizer, ByteTokenizer) else self._made_lengths()
        return self._lengths

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "recall",
            "documents": self.documents,
            "pairs": list(self.pairs),
            "queries": self.queries,
            "digits": self.digits,
            "seed": self.seed,
            "split": self.split,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
        }

    def _draws(self, index: int) -> Draws:
        return Draws(self.seed, self.split, index, RECALL)

    def _num_pairs(self, draws: Draws) -> int:
        return draws.between(0, *self.pairs)

    def _byte_lengths(self) -> np.ndarray:
        fact = len("\nbakide is .\n") + self.digits
        pairs = np.array([self._num_pairs(self._draws(i)) for i in range(self.documents)], np.int64)
        return 2 + pairs * fact + (pairs if self.queries is None else self.queries) * (fact + len("? "))

    def _made_lengths(self) -> np.ndarray:
        return np.array([len(self[i].ids) for i in range(self.documents)], np.int64)


class LongDocuments:
    """Documents of exactly `length` tokens: files laid end to end under "# file: path" headers, with sub-tasks across the window.

    corpus: the files; each document takes them in an order of its own until it is full; the last one is cut. order: "permuted", or
        "folders": the folders are permuted and the files of one follow each other by name, as in a repository, from any file of the
        first folder on.
    tasks: sub-tasks a document. One is a chain of `hops` facts, "a is b", "b is c", ..., the last with a number, each in another
        `hops`-th of the window and in an order of its own, asked at the end: "? a leads to <the number>". So every answer needs `hops`
        facts from all over the window. 0: no sub-tasks, only the files.
    loss: "all" tokens, or the "answer" alone.

    A fact is put after the end of a line where one ends within 256 tokens before its place. Chance: a digit 1/10; any
    number planted in the document, 1/tasks.
    K3 report, data for long contexts: long documents by permuting and concatenating documents and sub-tasks.

    ValueError: a corpus with fewer than `length` tokens (text would repeat in one document), a length too short for the sub-tasks.
    """

    def __init__(
        self,
        name: str,
        corpus: Iterable[Document],
        *,
        length: int,
        seed: int,
        documents: int,
        tasks: int = 1,
        hops: int = 3,
        order: str = "permuted",
        loss: str = "all",
        split: str = "train",
        digits: int = 4,
        tokenizer: Any = None,
    ):
        check_generator(name, split=split, documents=documents, digits=digits)
        if tasks < 0 or hops < 1 or order not in ORDERS or loss not in ("all", "answer") or (loss == "answer" and not tasks):
            raise ValueError(
                f"source {name!r}: tasks={tasks}, hops={hops}, order={order!r}, loss={loss!r}; needed: tasks >= 0, hops >= 1, order in "
                f'{ORDERS}, loss "all", or "answer" with at least one task.'
            )
        check_distinct(name, keys=max(1, tasks * hops), digits=digits, split=split)
        self.name, self.length, self.seed, self.documents, self.split = name, length, seed, documents, split
        self.tasks, self.hops, self.order, self.loss, self.digits = tasks, hops, order, loss, digits
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        files = sorted(corpus, key=lambda d: d.name)
        self._sha256 = digest_of(part for d in files for part in (d.name.encode("utf-8", "surrogateescape"), d.data))
        self._newline = self.tokenizer.encode("\n", control_tokens=False)
        self._files = [self._encode(d) for d in files]
        self._folders = _folders(files)
        total = sum(map(len, self._files))
        if total < length:
            raise ValueError(f"source {name!r}: the corpus has {total} tokens, a document {length}; give more files or a smaller length.")
        shortest = max(len(self._ends(self._draws(i))[0]) for i in range(min(documents, 8))) + 2 * tasks * hops * 16
        if length < shortest:
            raise ValueError(f"source {name!r}: length={length} is short for {tasks} sub-tasks of {hops} hops; give at least {shortest}.")

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, index: int, /) -> TokenDocument:
        draws = self._draws(check_index(self.name, index, self.documents))
        questions, facts = self._ends(draws)
        pieces = Pieces(self.tokenizer)
        pieces.end(self.tokenizer.bos_id)
        for part in self._scattered(draws, self.length - len(pieces) - len(questions) - sum(map(len, facts)), facts):
            pieces.add(part)
        body = pieces.ids
        ids = np.concatenate([body, questions.ids])
        if self.loss == "all":
            return TokenDocument(ids)
        return TokenDocument(ids, np.concatenate([np.zeros(len(body), bool), questions.learned]))

    def lengths(self) -> np.ndarray:
        return np.full(self.documents, self.length, np.int64)

    def fingerprint(self) -> dict[str, Any]:
        names = ("documents", "length", "tasks", "hops", "order", "loss", "digits", "seed", "split")
        own = {name: getattr(self, name) for name in names}
        return {"kind": "long documents", **own, "corpus": self._sha256, "tokenizer": tokenizer_fingerprint(self.tokenizer)}

    def _draws(self, index: int) -> Draws:
        return Draws(self.seed, self.split, index, LONG)

    def _encode(self, document: Document) -> np.ndarray:
        header = self.tokenizer.encode(f"# file: {document.name}\n", control_tokens=False)
        ids = np.concatenate([header, self.tokenizer.encode(document.data, control_tokens=False), self._newline])
        return ids.astype(np.uint16) if self.tokenizer.vocab_size <= 1 << 16 else ids  # the whole corpus is held: half the memory

    def _ends(self, draws: Draws) -> tuple[Pieces, list[np.ndarray]]:
        """-> (questions with EOS, the facts: those of task t are entries t * hops ... in the order of the chain)."""
        keys = draws.keys(1, max(1, self.tasks * self.hops))
        values = draws.values(2, max(1, self.tasks), self.digits)
        facts, questions = [], Pieces(self.tokenizer)
        for task in range(self.tasks):
            chain = [*keys[task * self.hops : (task + 1) * self.hops], values[task]]
            for key, following in itertools.pairwise(chain):
                fact = Pieces(self.tokenizer)
                fact.line(f"{key} is ", following)
                facts.append(fact.ids)
        for task in draws.numbers(3).permutation(self.tasks).tolist():
            questions.line(f"? {keys[task * self.hops]} leads to ", values[task], learned=True)
        questions.end(self.tokenizer.eos_id)
        return questions, facts

    def _body(self, draws: Draws, count: int) -> np.ndarray:
        """int32 [count]: files in this document's order, the last one cut."""
        order = draws.numbers(4).permutation(len(self._files if self.order == "permuted" else self._folders)).tolist()
        files = order
        if self.order == "folders":
            files = [file for folder in order for file in self._folders[folder]]
            first = draws.between(7, 0, len(self._folders[order[0]]) - 1)
            files = files[first:] + files[:first]
        parts, left = [], count
        for file in files:
            if left <= 0:
                break
            parts.append(self._files[file][:left])
            left -= len(parts[-1])
        return np.concatenate(parts)

    def _scattered(self, draws: Draws, count: int, facts: list[np.ndarray]) -> list[np.ndarray]:
        """The body in pieces with the facts between them: a chain's facts each in a part of the window of their own."""
        body = self._body(draws, count)
        places = []
        for task in range(self.tasks):
            parts = draws.numbers(5).bits(task * self.hops, self.hops).argsort(kind="stable").tolist()
            offsets = draws.numbers(6).uniform(task * self.hops, self.hops).tolist()
            for hop, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
                low, high = count * part // self.hops, count * (part + 1) // self.hops
                places.append((self._line_end(body, low, low + int(offset * (high - low))), task * self.hops + hop))
        pieces, start = [], 0
        for place, fact in sorted(places):
            pieces += [body[start:place], facts[fact]]
            start = place
        return [*pieces, body[start:]]

    def _line_end(self, body: np.ndarray, low: int, place: int) -> int:
        """The nearest place at or before `place` that follows a line end, within 256 tokens and not before `low`; else `place`."""
        low = max(low, place - 256)
        if len(self._newline) != 1:
            return place
        ends = np.flatnonzero(body[low:place] == self._newline[0])
        return low + int(ends[-1]) + 1 if len(ends) else place


def _folders(files: list[Document]) -> list[list[int]]:
    """The files' numbers by folder, both by name."""
    folders: dict[str, list[int]] = {}
    for number, file in enumerate(files):
        folders.setdefault(file.name.rpartition("/")[0], []).append(number)
    return [folders[name] for name in sorted(folders)]
