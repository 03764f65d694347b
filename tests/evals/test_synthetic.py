"""Accuracy over the answers of synthetic tasks: readers of known skill, and a model beside its own plain logits."""

import json
from typing import cast

import jax
import numpy as np
import pytest

from moejax import HybridLM
from moejax.data.synthetic_tasks import MQAR, KeyedRecall, Palindrome, Stack
from moejax.evals.synthetic import answer_accuracy, task_predict

TASKS = [MQAR(vocab_size=256, length=64, pairs=6), Stack(stacks=4, length=63, elements=9), Palindrome(length=20), KeyedRecall(pairs=4)]


def reader(task, skill):
    """Answers from the text read so far: `skill(read tokens of a row, the row's token at the position)`."""

    def predict(tokens, at):
        assert at.shape[0] == tokens.shape[0] and (at >= 0).all()
        return np.array([[skill(row[: place + 1].tolist()) for place in places] for row, places in zip(tokens, at, strict=True)])

    return predict


def recall(read):
    first = read.index(read[-1])
    return read[first + 1] if first + 1 < len(read) else 0


def pop(read):
    held = []
    for operation, stack, element in zip(read[0::3], read[1::3], read[2::3], strict=False):
        if stack == read[-1]:
            held = [*held, element] if operation == 0 else held[:-1]
    return held[-1] if held else 0


def reverse(read):
    if 0 not in read:
        return 0
    half = read.index(0)
    return read[2 * half - len(read)]


@pytest.mark.parametrize(("task", "skill"), list(zip(TASKS, (recall, pop, reverse, recall), strict=True)), ids=lambda v: type(v).__name__)
def test_a_reader_with_the_skill_is_always_right(task, skill):
    made = answer_accuracy(reader(task, skill), task, rows=50, batch=20)
    expected = sum(int(task.batch(i, 20, split="eval").loss_mask.sum()) for i in range(3))
    assert (made.accuracy, made.rows_right, made.answers) == (1, 1, expected)
    assert made.task == type(task).__name__ and made.length == task.length and made.chance == task.chance()
    assert json.loads(json.dumps(made.to_dict()))["answers"] == expected
    assert (made.copy_last is None) == isinstance(task, Palindrome)


def test_counts_of_a_reader_that_is_sometimes_right():
    task, batch = TASKS[0], TASKS[0].batch(0, 30, split="eval")
    forgets = answer_accuracy(reader(task, lambda read: recall(read) if read[-1] % 3 else 0), task, rows=30, batch=30)
    right = (batch.tokens % 3 > 0) & batch.loss_mask
    assert forgets.accuracy == right.sum() / batch.loss_mask.sum() and 0.5 < forgets.accuracy < 0.8
    assert forgets.rows_right == (right.sum(axis=1) == 6).mean()
    nearest = answer_accuracy(lambda tokens, at: np.take_along_axis(task.copy_last(tokens), at, axis=1), task, rows=30, batch=15)
    assert nearest.accuracy == nearest.copy_last == nearest.copy_any == pytest.approx(1 / 6)
    later = answer_accuracy(reader(task, recall), task, rows=30, batch=15, first=2, split="train")
    assert later.accuracy == 1


class Bigram:
    """A model of the least: the hidden state is the token, the head a table of what follows it."""

    def apply(self, variables, tokens, segment_ids, return_hidden):
        assert return_hidden and segment_ids.shape == tokens.shape
        return jax.nn.one_hot(tokens, variables["params"]["head"].shape[0])


def test_the_predict_of_a_model():
    """One compile for all batches, although the count of answers a row differs. `make_predict` itself is tested in test_evals."""
    task, table = Stack(stacks=3, length=24, elements=5), np.random.default_rng(0).permutation(10)
    predict = task_predict(cast("HybridLM", Bigram()), {"params": {"head": np.eye(10, dtype=np.float32)[table]}})
    shapes = set()

    def counted(tokens, at):
        shapes.add((tokens.shape, at.shape))
        return predict(tokens, at)

    made = answer_accuracy(counted, task, rows=40, batch=10)
    batches = [task.batch(i, 10, split="eval") for i in range(4)]
    right = sum(int((table[batch.tokens] == batch.targets)[batch.loss_mask].sum()) for batch in batches)
    assert made.answers == sum(int(batch.loss_mask.sum()) for batch in batches) and made.accuracy == right / made.answers > 0
    assert len(shapes) == 1 and len(set(batches[0].loss_mask.sum(axis=1).tolist())) > 1


def test_bad_input():
    with pytest.raises(ValueError, match="at least one of each"):
        answer_accuracy(reader(TASKS[0], recall), TASKS[0], rows=0)
    with pytest.raises(ValueError, match=r"the shape \(4,\) for positions"):
        answer_accuracy(lambda tokens, at: np.zeros(4, int), TASKS[0], rows=4, batch=4)
