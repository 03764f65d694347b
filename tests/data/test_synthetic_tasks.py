"""Synthetic tasks: every answer found again by a slow interpreter that reads the tokens alone, streams apart, fast enough."""

import hashlib
import time

import numpy as np
import pytest

from moejax.data.row_draws import RowDraws
from moejax.data.synthetic_tasks import MQAR, ZOOLOGY_MIX, KeyedRecall, Palindrome, Stack, SyntheticTask

TASKS = {
    "mqar": MQAR(),
    "mqar zeros": MQAR(vocab_size=256, length=64, pairs=4, random_filler=False),
    "mqar mixed": MQAR(mixed=ZOOLOGY_MIX),
    "stack": Stack(),
    "small stack": Stack(stacks=3, length=96, elements=4, pop=0.5),
    "palindrome": Palindrome(),
    "recall": KeyedRecall(),
    "long recall": KeyedRecall(vocab_size=256, length=2048, pairs=8, queries=3),
}


@pytest.mark.parametrize("name", TASKS)
def test_shapes_and_determinism(name):
    """A row is a function of its number: of no batch, no order, no object."""
    task = TASKS[name]
    assert isinstance(task, SyntheticTask)
    tokens, targets, mask = task.batch(1, 6)
    assert tokens.shape == targets.shape == mask.shape == (6, task.length)
    assert tokens.dtype == targets.dtype == np.int32 and mask.dtype == bool
    assert tokens.min() >= 0 and tokens.max() < task.vocab_size and targets.max() < task.vocab_size
    assert mask.any(axis=1).all() and not targets[~mask].any() and 0 < task.chance() < 0.3
    for size in (1, 2, 3):
        parts = [task.batch(6 // size + i, size) for i in range(6 // size)]
        for whole, pieces in zip((tokens, targets, mask), zip(*parts, strict=True), strict=True):
            assert np.array_equal(whole, np.concatenate(pieces))
    assert np.array_equal(type(task)(**vars(task)).batch(1, 6).tokens, tokens)


@pytest.mark.parametrize("name", TASKS)
def test_splits_and_seeds_share_no_row(name):
    task = TASKS[name]
    other = type(task)(**{**vars(task), "seed": 1})
    made = [task.batch(0, 200), task.batch(0, 200, split="eval"), other.batch(0, 200), other.batch(0, 200, split="eval")]
    rows = [{row.tobytes() for row in batch.tokens} for batch in made]
    assert all(len(part) == 200 for part in rows) and len(set.union(*rows)) == 800


def test_mqar_answers_are_the_values_of_the_first_occurrence():
    for name in ("mqar", "mqar zeros"):
        task = TASKS[name]
        tokens, targets, mask = task.batch(3, 8)
        for row, target, asked in zip(tokens.tolist(), targets.tolist(), mask, strict=True):
            pairs = dict(zip(row[0 : 2 * task.pairs : 2], row[1 : 2 * task.pairs : 2], strict=True))
            assert len(pairs) == task.pairs and len(set(pairs.values())) == task.pairs
            assert all(1 <= k < task.vocab_size // 2 <= v for k, v in pairs.items())
            places = np.flatnonzero(asked).tolist()
            assert all(p >= 2 * task.pairs and p % 2 == 0 for p in places)
            assert sorted(row[p] for p in places) == sorted(pairs)  # each key is asked once
            assert [target[p] for p in places] == [pairs[row[p]] for p in places]
    assert not tokens[:, 2 * task.pairs :][~mask[:, 2 * task.pairs :]].any()  # the last task's filler is 0


def test_mqar_mixes_the_difficulties_of_training_only():
    task = TASKS["mqar mixed"]
    counts = task.batch(0, 900).loss_mask.sum(axis=1)
    share = {pairs: float((counts == pairs).mean()) for _, pairs, _ in ZOOLOGY_MIX}
    assert sum(share.values()) == 1 and abs(share[4] - 5 / 9) < 0.06 and all(abs(share[p] - 1 / 9) < 0.04 for p in (8, 16, 32, 64))
    tokens, targets, mask = task.batch(1, 64)
    for row, target, asked in zip(tokens, targets, mask, strict=True):
        pairs = int(asked.sum())
        length = next(length for length, p, _ in ZOOLOGY_MIX if p == pairs)
        assert not row[length:].any() and np.flatnonzero(asked)[-1] < length
        known = dict(zip(row[0 : 2 * pairs : 2].tolist(), row[1 : 2 * pairs : 2].tolist(), strict=True))
        assert [known[k] for k in row[asked].tolist()] == target[asked].tolist()
    assert (task.batch(0, 50, split="eval").loss_mask.sum(axis=1) == 64).all()
    plain = MQAR().batch(0, 50, split="eval")
    assert np.array_equal(task.batch(0, 50, split="eval").tokens, plain.tokens)


def test_mqar_gaps_follow_the_power_law():
    """The first pair draws first: the distance of its query has exactly the law's probabilities."""
    task, rows = MQAR(vocab_size=64, length=64, pairs=4, power_a=0.5), 20_000
    tokens, _, mask = task.batch(0, rows)
    place = ((tokens == tokens[:, :1]) & mask).argmax(axis=1)
    law = np.arange(1, 29) ** -0.5
    counted = np.bincount((place - 8) // 2, minlength=28) / rows
    assert np.abs(counted - law / law.sum()).max() < 0.01


@pytest.mark.parametrize("name", ["stack", "small stack"])
def test_stack_pops_what_was_pushed_last(name):
    task = TASKS[name]
    tokens, targets, mask = task.batch(2, 16)
    pops = depth = 0
    for row, target, asked in zip(tokens.tolist(), targets.tolist(), mask, strict=True):
        stacks: dict[int, list[int]] = {}
        for at in range(0, task.length, 3):
            operation, stack, element = row[at : at + 3]
            assert operation in (0, 1) and 2 <= stack < 2 + task.stacks <= element < task.vocab_size
            if operation == 0:
                stacks.setdefault(stack, []).append(element)
                depth = max(depth, len(stacks[stack]))
            else:
                pops += 1
                assert stacks[stack].pop() == element == target[at + 1]
            assert asked[at : at + 3].tolist() == [False, operation == 1, False]
    assert depth >= 2 and abs(pops / (16 * task.length / 3) - task.pop) < 0.08


def test_stack_fills_as_documented():
    tokens = Stack().batch(0, 400).tokens[:, 0::3]
    left = (tokens == 0).sum(axis=1) - (tokens == 1).sum(axis=1)
    assert 15 < left.mean() < 20


def test_palindrome_is_the_string_reversed():
    tokens, targets, mask = Palindrome(vocab_size=9, length=10).batch(0, 5)
    for row, target, asked in zip(tokens.tolist(), targets.tolist(), mask.tolist(), strict=True):
        text = row[:5]
        assert 0 not in text and row[5] == 0
        assert target[5:] == text[::-1] and asked == [False] * 5 + [True] * 5
        assert row[6:] == target[5:-1]  # teacher forcing: the next token of a position with an answer is that answer


@pytest.mark.parametrize("name", ["recall", "long recall"])
def test_recall_pairs_stand_once_and_are_asked_at_the_end(name):
    task = TASKS[name]
    quarter, end, first = task.vocab_size // 4, task.length - 2 * task.asked, []
    tokens, targets, mask = task.batch(0, 40)
    for row, target, asked in zip(tokens.tolist(), targets.tolist(), mask, strict=True):
        places = [at for at in range(end) if quarter <= row[at] < 2 * quarter]
        known = {row[at]: row[at + 1] for at in places}
        assert len(places) == len(known) == task.pairs == len(set(known.values())) and all(v >= 2 * quarter for v in known.values())
        assert sum(token >= quarter for token in row[:end]) == 2 * task.pairs  # all else is filler
        assert np.flatnonzero(asked).tolist() == list(range(end, task.length, 2))
        assert len({row[at] for at in range(end, task.length, 2)}) == task.asked
        for at in range(end, task.length, 2):
            assert known[row[at]] == target[at] == row[at + 1]
        first += [at / end for at in places]
    assert min(first) < 0.05 and max(first) > 0.95 and abs(np.mean(first) - 0.5) < 0.05


def test_copy_baselines_are_worth_what_they_should():
    def score(task):
        batch = task.batch(0, 600, split="eval")
        return float((task.copy_last(batch.tokens) == batch.targets)[batch.loss_mask].mean())

    assert score(TASKS["mqar"]) == TASKS["mqar"].copy_any() == 1 / 64  # each value is asked exactly once
    assert score(TASKS["recall"]) == TASKS["recall"].copy_any() == 1 / 16
    assert abs(score(TASKS["long recall"]) - 1 / 8) < 0.03
    assert 0.15 < score(Stack()) < 0.2
    push = Stack(stacks=2, elements=3, length=9)
    row = np.array([[0, 2, 5, 0, 3, 6, 1, 2, 5]])
    assert push.copy_last(row).tolist() == [[0, 0, 5, 5, 5, 6, 6, 6, 6]]  # the last pushed, also where another one is popped


def test_a_batch_of_64_by_256_takes_less_than_20_ms():
    for name in ("mqar", "mqar mixed", "stack", "palindrome", "recall"):
        times = []
        for i in range(5):
            start = time.perf_counter()
            TASKS[name].batch(i, 64)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.020, (name, times)


def test_row_draws_are_distinct_uniform_and_extend():
    draws = RowDraws(5, "train", 0, 10, 3000)
    for bound, count in ((9, 3), (2000, 40)):  # by a permutation, and by drawing again
        made = draws.distinct(1, count, bound)
        assert made.min() >= 0 and made.max() < bound and all(len(set(row)) == count for row in made.tolist())
        assert abs(made.mean() - (bound - 1) / 2) < 0.03 * bound
        assert np.array_equal(RowDraws(5, "train", 0, 12, 1).distinct(1, count, bound)[0], made[2])
    assert len(np.unique(draws.distinct(1, 2, 9), axis=0)) == 9 * 8  # every ordered choice
    assert np.array_equal(draws.bits(2, 3), draws.bits(2, 5)[:, :3])
    uniform = draws.uniform(3, 50)
    assert 0 < uniform.min() and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01


def test_the_same_rows_everywhere():
    """One digest for all Python and NumPy versions: a resumed run goes on with the same rows."""
    digest = hashlib.sha256()
    for task in TASKS.values():
        for part in (*task.batch(2, 5), *task.batch(0, 3, split="eval")):
            digest.update(part.astype("<i4").tobytes())
    assert digest.hexdigest() == "75ce1d83c9e219ccb06e5dec2e96691be29e61a64abe239253cbebf35a9d05c2"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MQAR(length=254), "at least 4"),
        (lambda: MQAR(length=255, pairs=4), "even length"),
        (lambda: MQAR(vocab_size=64), "at least 130 ids"),
        (lambda: MQAR(mixed=[(512, 4)]), "at most length=256"),
        (lambda: MQAR(mixed=[(64, 4, 0)]), "weight positive"),
        (lambda: MQAR(mixed=[]), "at least one level"),
        (lambda: MQAR(power_a=0.0), "positive power"),
        (lambda: Stack(length=256), "multiple of 3"),
        (lambda: Stack(pop=1.0), "between 0 and 1"),
        (lambda: Palindrome(length=7), "even length"),
        (lambda: KeyedRecall(length=62), "at least 2"),
        (lambda: KeyedRecall(queries=17), "queries <= pairs"),
        (lambda: KeyedRecall(vocab_size=62), "multiple of 4"),
        (lambda: Stack().batch(0, 4, split="test"), '"train" or "eval"'),
        (lambda: Stack().batch(-1, 4), "index >= 0"),
        (lambda: Palindrome().batch(0, 0), "at least one row"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
