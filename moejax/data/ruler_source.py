"""RULER's tasks as a source of training documents: a model that was never shown their form fails for that reason alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from .facts import check_index
from .ruler import RULER_TASKS, Task, make_filler, ruler_samples
from .ruler_parts import RulerFiller
from .sources import TokenDocument, tokenizer_fingerprint


class RulerSource:
    """Questions with their answers, each exactly `length` tokens, the tasks in turn; document i has task i modulo their number.

    tasks: names or (name, settings), as in `ruler_samples`, so are filler and tokenizer. loss: the "answer" alone with the EOS behind
    it, or "all" tokens. split: "train" shares no key, value, corpus word or depth with the questions of an evaluation.

    ValueError: what `ruler_samples` refuses, for any of the tasks; no tasks; another loss.
    """

    def __init__(
        self,
        name: str,
        *,
        length: int,
        seed: int,
        documents: int,
        tasks: Sequence[str | tuple[str, Task]] = tuple(RULER_TASKS),
        filler: RulerFiller | str | bytes | None = None,
        loss: str = "answer",
        split: str = "train",
        tokenizer: Any = None,
    ):
        if not tasks or loss not in ("answer", "all"):
            raise ValueError(f'source {name!r}: {len(tasks)} tasks, loss={loss!r}; needed: at least one task, loss "answer" or "all".')
        if isinstance(filler, RulerFiller) and tokenizer is not None and tokenizer is not filler.tokenizer:
            raise ValueError(f"source {name!r}: tokenizer is not the one of the RulerFiller given; leave it out.")
        if documents < 1:
            raise ValueError(f"source {name!r}: documents={documents}; it needs at least one an epoch.")
        self.name, self.length, self.seed, self.documents, self.split, self.loss = name, length, seed, documents, split, loss
        self.tasks = [(task, RULER_TASKS.get(task)) if isinstance(task, str) else task for task in tasks]
        self.filler = filler if isinstance(filler, RulerFiller) else make_filler(tokenizer, filler)
        for number in range(min(len(self.tasks), documents)):
            self[number]

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, index: int, /) -> TokenDocument:
        turn, task = divmod(check_index(self.name, index, self.documents), len(self.tasks))
        name, spec = self.tasks[task]
        asked = name if spec is None else (name, spec)
        made = ruler_samples(asked, length=self.length, count=1, split=self.split, seed=self.seed, filler=self.filler, first=turn)[0]
        ids = np.concatenate([made.prompt_tokens, made.answer_tokens])
        return TokenDocument(ids, np.arange(self.length) >= len(made.prompt_tokens) if self.loss == "answer" else None)

    def lengths(self) -> np.ndarray:
        return np.full(self.documents, self.length, np.int64)

    def fingerprint(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("documents", "length", "loss", "seed", "split")}
        tasks = {name: {"kind": type(spec).__name__, **dataclasses.asdict(spec)} for name, spec in self.tasks if spec is not None}
        tokenizer = tokenizer_fingerprint(self.filler.tokenizer)
        return {"kind": "ruler", **own, "tasks": tasks, "filler": self.filler.sha256, "tokenizer": tokenizer}
