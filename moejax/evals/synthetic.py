"""Accuracy over the answers of a synthetic task (`moejax.data.synthetic_tasks`), beside what is right without looking anything up.

Shapes: B rows of a batch, T tokens a row, A answers of the row with the most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ..data.synthetic_tasks import SyntheticTask
from ..modules.model import HybridLM
from .needles import make_predict

TaskPredict = Callable[[np.ndarray, np.ndarray], Any]
"""predict(tokens int32 [B,T], at int32 [B,A]) -> int [B,A]: the likeliest answer at each position `at`, having read up to it."""


@dataclasses.dataclass(frozen=True)
class TaskScore:
    """accuracy: share of the answers that are right; rows_right: share of rows with every answer right; answers: how many were
    asked. chance: guessing in the vocabulary; copy_any: saying any value of the row, expected; copy_last: saying the value that came
    last, counted on these rows. None where the task has none."""

    task: str
    length: int
    accuracy: float
    rows_right: float
    answers: int
    chance: float
    copy_any: float | None
    copy_last: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def task_predict(model: HybridLM, variables: Any) -> TaskPredict:
    """A `TaskPredict` of a model; one compile a shape, logits at the answers only."""
    predict = make_predict(model)
    return lambda tokens, at: predict(variables, tokens, np.ones_like(tokens), at)


def answer_accuracy(
    predict: TaskPredict, task: SyntheticTask, *, split: str = "eval", rows: int = 256, batch: int = 64, first: int = 0
) -> TaskScore:
    """Score batches first, first + 1, ... of `batch` rows, at least `rows` rows together, all of one shape: one compile.

    ValueError: no rows, an answer of another shape than what was asked.
    """
    if rows < 1 or batch < 1:
        raise ValueError(f"rows={rows}, batch={batch}; needed: at least one of each.")
    batches = [task.batch(first + i, batch, split=split) for i in range(-(-rows // batch))]
    counts = [made.loss_mask.sum(axis=1) for made in batches]
    most = max(int(count.max()) for count in counts)
    copy_last, copy_any = getattr(task, "copy_last", None), getattr(task, "copy_any", None)
    right = rows_right = copied = asked = 0
    for made, count in zip(batches, counts, strict=True):
        real = np.arange(most) < count[:, None]
        at = np.argsort(~made.loss_mask, axis=1, kind="stable")[:, :most].astype(np.int32)  # the answers first, in order
        given = np.asarray(predict(made.tokens, at))
        if given.shape != at.shape:
            raise ValueError(f"predict gave the shape {given.shape} for positions of the shape {at.shape}; they must be the same.")
        hits = (given == np.take_along_axis(made.targets, at, axis=1)) & real
        right += int(hits.sum())
        asked += int(real.sum())
        rows_right += int((hits.sum(axis=1) == count).sum())
        if copy_last is not None:
            copied += int((copy_last(made.tokens) == made.targets)[made.loss_mask].sum())
    return TaskScore(
        task=type(task).__name__,
        length=task.length,
        accuracy=right / asked,
        rows_right=rows_right / (len(batches) * batch),
        answers=asked,
        chance=task.chance(),
        copy_any=None if copy_any is None else copy_any(),
        copy_last=None if copy_last is None else copied / asked,
    )
