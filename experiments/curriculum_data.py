"""What the curriculum demo reads: the standard library, facts among it, and the held-out sets that the stages are judged by."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from moejax.data import ByteTokenizer, Corpus, Document, load_tokenizer, standard_library
from moejax.data.bpe import train_bpe
from moejax.data.generators import RecallSource
from moejax.data.mixture import Mixture
from moejax.data.needles import NeedleRows, NeedleSource, needle_rows
from moejax.data.sources import CorpusSource, Source
from moejax.evals import document_rows
from moejax.train.curriculum import Curriculum, Stage

DIGITS = 2  # of a value: two needles fit into 64 tokens
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Two letters, one digit or " is " a token: a fact is ten tokens, and its value follows its key within the four taps of
# KDA's convolution, as it would with the words of a large vocabulary.
PATTERN = r" is |[0-9]|[A-Za-z]{1,2}|\s+|[^\sA-Za-z0-9]+"
VOCABULARY = 640


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much data a run makes: files and documents of a source, haystacks at each depth (rows_per_depth: by length; `rows` at the
    lengths that it does not name), held-out long files."""

    code_files: int = 120
    long_files: int = 24
    documents: int = 4000
    rows: int = 8
    rows_per_depth: dict[int, int] = dataclasses.field(default_factory=lambda: {64: 32, 512: 16})
    long_rows: int = 8


class DemoData:
    """Sources, mixtures by stage and evaluation sets. The tokenizer lies in the run's folder and is read from there on resume."""

    def __init__(self, curriculum: Curriculum, sizes: Sizes, folder: pathlib.Path, *, seed: int):
        self.curriculum, self.sizes, self.seed = curriculum, sizes, seed
        self.corpus = standard_library()
        self.train = every(self.corpus.train, sizes.code_files)
        self.tokenizer = self._tokenizer(folder / "tokenizer")
        contexts = [stage.context_length for stage in curriculum.stages]
        self.haystack = text_of(self.train[::5])
        self.sources = self._sources()
        held_out = text_of(every(self.corpus.heldout, 20))
        self.needles: dict[int, NeedleRows] = {
            length: needle_rows(
                length,
                DEPTHS,
                needle_keys(length),
                seed,
                rows_per_depth=sizes.rows_per_depth.get(length, sizes.rows),
                filler=held_out,
                digits=DIGITS,
                tokenizer=self.tokenizer,
            )
            for length in contexts
        }
        longest = sorted(self.corpus.heldout, key=lambda document: -len(document.data))[: sizes.long_rows]
        encoded = [CorpusSource("held out", [document], self.tokenizer)[0].ids for document in longest]
        self.long_rows = document_rows(encoded, length=contexts[-1], rows=1, pad_id=self.tokenizer.pad_id)

    def mixture(self, stage: Stage) -> Mixture:
        """The stage's mixture over the one list of sources of the whole run; "needles" are those of the stage's own length."""
        weights = {needles_name(stage) if name == "needles" else name: weight for name, weight in stage.mixture.items()}
        return Mixture(self.sources, weights)

    def _tokenizer(self, folder: pathlib.Path) -> Any:
        if folder.is_dir():
            return load_tokenizer(folder)
        plain = ByteTokenizer()
        recall = RecallSource("recall", seed=self.seed, documents=300, pairs=(1, 32), digits=DIGITS)
        facts = [plain.decode(recall[i].ids) for i in range(len(recall))]
        return train_bpe([*(document.data for document in self.train[::2]), *facts], VOCABULARY, folder=folder, pattern=PATTERN)

    def _sources(self) -> list[Source]:
        made: dict[str, Any] = {"seed": self.seed, "documents": self.sizes.documents, "digits": DIGITS, "tokenizer": self.tokenizer}
        sources: list[Source] = [RecallSource("recall", pairs=(1, 3), queries=1, **made), CorpusSource("code", self.train, self.tokenizer)]
        for stage in self.curriculum.stages:
            length = stage.context_length
            sources.append(NeedleSource(needles_name(stage), length=length, needles=(1, needle_keys(length)), filler=self.haystack, **made))
        least = max((stage.min_doc_tokens or {}).get("long", 0) for stage in self.curriculum.stages)
        if least:
            # A token is about two bytes; those of one to ten rows, so that one file is not a whole stage.
            long = tuple(document for document in self.corpus.train if 2.5 * least < len(document.data) < 20 * least)
            sources.append(CorpusSource("long", every(long, self.sizes.long_files), self.tokenizer))
        return sources


def needles_name(stage: Stage) -> str:
    return f"needles {stage.name}"


def needle_keys(length: int) -> int:
    """Facts in a haystack: four, or the two that fit into 64 tokens."""
    return 4 if length >= 128 else 2


def every(documents: tuple[Document, ...], count: int) -> tuple[Document, ...]:
    """At most `count` documents, evenly from all."""
    return documents[:: max(1, len(documents) // count)][:count]


def text_of(documents: tuple[Document, ...]) -> str:
    return "\n".join(document.data.decode("utf-8", "replace") for document in documents)


__all__ = ["Corpus", "DemoData", "Sizes"]
