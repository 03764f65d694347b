"""RULER's table (arXiv 2404.06654): the share of expected strings found in what a model writes, for each task and length.

Beside every score stand three that need no reading: blind guesses, candidates of the text at random, and the candidates nearest to
the question. Where the last is 1 the task tests the distance alone (`moejax.data.ruler`).

L: lengths, K: tasks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..data.ruler import RULER_TASKS, Task, named_task, ruler_samples
from ..data.ruler_parts import RulerFiller, Sample, ruler_filler
from ..train.curriculum import length_name

Generate = Callable[[list[np.ndarray], int], Sequence[str]]
"""generate(prompts, max_new_tokens) -> a text for each prompt, without the prompt. prompts: int32 arrays of about one length."""

LLAMA_2_AT_4K = 85.6
"""Percent: what Llama-2-7B scores at 4K tokens, RULER's threshold for a length that a model really uses."""


@dataclasses.dataclass(frozen=True)
class RulerTable:
    """Shares in [0, 1], float64 [K,L]: score of the model; guess: as many blind guesses of the right form as are asked for; copy_any:
    as many candidates of the text at random; copy_last: the candidates nearest to the question. samples: behind an entry."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    score: np.ndarray
    guess: np.ndarray
    copy_any: np.ndarray
    copy_last: np.ndarray
    samples: int

    def by_length(self) -> dict[int, float]:
        """Length -> mean score of all tasks, in percent."""
        return {length: 100 * float(mean) for length, mean in zip(self.lengths, self.score.mean(axis=0), strict=True)}

    def effective_length(self, threshold: float = LLAMA_2_AT_4K) -> int | None:
        """The longest length that reaches `threshold` (percent, mean of all tasks) with every shorter one; None: not even the first."""
        reached = None
        for length, mean in sorted(self.by_length().items()):
            if mean < threshold:
                break
            reached = length
        return reached

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        arrays = {name: getattr(self, name).tolist() for name in ("score", "guess", "copy_any", "copy_last")}
        return {"tasks": list(self.tasks), "lengths": list(self.lengths), "samples": self.samples, **arrays}

    def markdown(self, threshold: float = LLAMA_2_AT_4K) -> str:
        """A table of percents: score (candidates at random, the nearest candidates)."""
        head = ["task", *(length_name(length) for length in self.lengths)]
        lines = [head, ["---", *("---:" for _ in self.lengths)]]
        shares = 100 * np.stack([self.score, self.copy_any, self.copy_last], axis=-1)
        lines += [[task, *(f"{s:.1f} ({a:.1f}, {c:.1f})" for s, a, c in row)] for task, row in zip(self.tasks, shares, strict=True)]
        lines.append(["mean", *(f"**{s:.1f}** ({a:.1f}, {c:.1f})" for s, a, c in shares.mean(axis=0))])
        effective = self.effective_length(threshold)
        note = (
            f"Percent of the expected strings found, {self.samples} samples an entry. In brackets, without reading the question: any "
            f"candidates of the text, the candidates nearest to the question. Blind guesses: at most {100 * self.guess.max():.2g}. "
            f"Effective length at {threshold}: {'none' if effective is None else length_name(effective)}."
        )
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n" + note + "\n"


def score(outputs: Sequence[str], samples: Sequence[Sample]) -> float:
    """Mean share of a sample's answers that its output holds, in any order and case.

    An answer counts where it stands as a word: "1234" is not found in "12345" (RULER searches for the bare string).
    ValueError: not one output a sample.
    """
    if len(outputs) != len(samples) or not samples:
        raise ValueError(f"{len(outputs)} outputs for {len(samples)} samples; needed: one each, and at least one.")
    return float(np.mean([_found(output, sample.answers) for output, sample in zip(outputs, samples, strict=True)]))


def ruler(
    generate: Generate,
    tasks: Sequence[str | tuple[str, Task]] = tuple(RULER_TASKS),
    lengths: Sequence[int] = (4096, 8192, 16384, 32768, 65536, 131072),
    *,
    count: int = 100,
    batch: int = 8,
    seed: int = 0,
    split: str = "eval",
    tokenizer: Any = None,
    filler: RulerFiller | str | bytes | None = None,
    on_entry: Callable[[str, int, float], None] | None = None,
) -> RulerTable:
    """Ask `count` questions of every task at every length.

    Args:
      generate: see `Generate`. It may write as many tokens as the longest answer of the entry has, no more: a model that recites the
        text finds little. Prompt and answer together have `length` tokens; where a tokenizer gives answers of different sizes a row
        of the cache needs the difference besides.
      tasks: names, or (name, settings), as in `ruler_samples`.
      batch: prompts a call. A call has prompts of one task and length.
      tokenizer, filler, seed, split: as in `ruler_samples`.
      on_entry: called with (task, length, score) as each is known.

    Raises:
      ValueError: before anything is generated, what `ruler_samples` refuses for any task and length; later, too few outputs.
    """
    if not tasks or not lengths or batch < 1 or len(set(lengths)) != len(lengths):
        raise ValueError(f"{len(tasks)} tasks, lengths={tuple(lengths)}, batch={batch}; needed: one or more of each, no length twice.")
    common: dict[str, Any] = {"split": split, "seed": seed, "filler": ruler_filler(tokenizer, filler)}
    names = [name for name, _ in map(named_task, tasks)]
    if len(set(names)) != len(names):
        raise ValueError(f"tasks has a name twice: {names}.")
    for task in tasks:
        for length in lengths:
            ruler_samples(task, length=length, count=1, **common)
    parts = {name: np.zeros((len(tasks), len(lengths))) for name in ("score", "guess", "copy_any", "copy_last")}
    for place in np.ndindex(len(tasks), len(lengths)):
        length = lengths[place[1]]
        samples = ruler_samples(tasks[place[0]], length=length, count=count, **common)
        parts["score"][place] = score(_outputs(generate, samples, batch), samples)
        parts["guess"][place] = np.mean([sample.guess for sample in samples])
        parts["copy_any"][place] = np.mean([sample.copy_any for sample in samples])
        parts["copy_last"][place] = score([", ".join(sample.copied_last) for sample in samples], samples)
        if on_entry is not None:
            on_entry(names[place[0]], length, float(parts["score"][place]))
    return RulerTable(tasks=tuple(names), lengths=tuple(lengths), samples=count, **parts)


def _outputs(generate: Generate, samples: Sequence[Sample], batch: int) -> list[str]:
    most = max(len(sample.answer_tokens) for sample in samples)
    outputs: list[str] = []
    for start in range(0, len(samples), batch):
        asked = samples[start : start + batch]
        given = list(generate([sample.prompt_tokens for sample in asked], most))
        if len(given) != len(asked):
            raise ValueError(f"generate gave {len(given)} texts for {len(asked)} prompts; needed: one each.")
        outputs += given
    return outputs


def _found(output: str, answers: Sequence[str]) -> float:
    text = output.lower()
    hits = [re.search(rf"(?<![0-9a-z]){re.escape(answer.lower())}(?![0-9a-z])", text) is not None for answer in answers]
    return sum(hits) / len(hits)
