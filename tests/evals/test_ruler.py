"""The RULER table: scoring, a reader that finds all, one that copies what is near, and what it asks of a model."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM
from moejax.data import ByteTokenizer
from moejax.data.ruler import RULER_TASKS, ruler_samples
from moejax.data.ruler_parts import RulerFiller
from moejax.data.ruler_tasks import Variables
from moejax.evals import texts
from moejax.evals.ruler import RulerTable, ruler, score
from moejax.infer import generate

BYTES = ByteTokenizer()
LENGTHS = (1000, 2048)
COUNT = 6


def nearest(prompts, max_new_tokens):
    """Reads what stands before the question only: the last values, names or words, as many as are asked for."""
    outputs = []
    for prompt in prompts:
        context, _, question = BYTES.decode(prompt).rpartition("\n? ")
        number = int(found[1]) if (found := re.match(r"the (\d+)", question)) else question.count(",") + 1
        shown = [v for _, v in re.findall(r"(?<=\n)(\S+) is (\S+)\.\n", context + "\n")]
        shown = shown or re.findall(r"(?<=\n)(\w+) = \w+\.\n", context + "\n")
        shown = shown or [word for word in re.findall("[a-z]+", context) if len(word) > 1]
        outputs.append(" and ".join(list(dict.fromkeys(reversed(shown)))[:number]))
    return outputs


@pytest.fixture(scope="module")
def table():
    """Of a model that knows the answer of every prompt."""
    made = [ruler_samples(task, length=length, count=COUNT, seed=5) for task in RULER_TASKS for length in LENGTHS]
    known = {sample.prompt_tokens.tobytes(): BYTES.decode(sample.answer_tokens) for samples in made for sample in samples}
    return ruler(lambda prompts, most: [known[prompt.tobytes()] for prompt in prompts], lengths=LENGTHS, count=COUNT, batch=4, seed=5)


def test_a_model_that_finds_all_scores_one(table):
    assert table.tasks == tuple(RULER_TASKS) and table.lengths == LENGTHS and table.samples == COUNT
    assert np.array_equal(table.score, np.ones((11, 2)))
    assert table.effective_length() == table.effective_length(100.0) == 2048


def test_a_model_that_copies_the_nearest_scores_its_baseline(table):
    entries = []
    copied = ruler(nearest, lengths=LENGTHS, count=COUNT, batch=5, seed=5, on_entry=lambda *entry: entries.append(entry))
    assert np.array_equal(copied.score, table.copy_last) and np.array_equal(copied.copy_last, table.copy_last)
    assert entries == [(task, n, copied.score[i, j]) for i, task in enumerate(RULER_TASKS) for j, n in enumerate(LENGTHS)]
    by_task = dict(zip(table.tasks, table.copy_last.max(axis=1), strict=True))
    for task in ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multivalue", "niah_multiquery", "vt"):
        assert by_task[task] == 1  # no choice to make: the task tests the distance alone
    assert by_task["niah_multikey_1"] < 0.7 and by_task["niah_multikey_3"] < 0.5 and by_task["cwe"] < 0.8
    assert copied.effective_length() is None


def test_baselines_beside_the_score(table):
    of = {task: row for row, task in enumerate(table.tasks)}
    assert np.array_equal(table.copy_any[of["niah_multikey_1"]], [0.25, 0.25])
    assert (np.diff(table.copy_any[of["niah_multikey_2"]]) < 0).all() and table.copy_any[of["niah_multikey_2"]].max() < 0.03
    assert table.guess[of["niah_single_1"]] == pytest.approx([1e-6] * 2) and table.guess.max() < 1e-3
    assert (table.copy_any[of["vt"]] == 1).all()


def test_chains_leave_something_to_trace():
    task = ("vt of 5", Variables(chains=5))
    made = ruler(lambda prompts, most: ["nothing"] * len(prompts), [task], (1500,), count=20)
    assert made.tasks == ("vt of 5",) and made.score[0, 0] == 0
    assert made.copy_any[0, 0] == pytest.approx(0.2) and 0 < made.copy_last[0, 0] < 0.5


def test_scores_count_the_share_of_strings_found():
    samples = ruler_samples("niah_multivalue", length=800, count=2)
    first, second = (sample.answers for sample in samples)
    assert score([", ".join(first), "; ".join(reversed(second))], samples) == 1
    assert score([first[0], "x" + second[0]], samples) == 1 / 8
    assert score([f"{first[0]}0 {first[1]}, {first[1]}", ""], samples) == 1 / 8  # a longer number is another number
    words = ruler_samples("fwe", length=1000, count=1)
    one, two, three = words[0].answers
    assert score([f"They are {one.upper()}, {two}\n{three}ly"], words) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="1 outputs for 2 samples"):
        score(["a"], samples)


def test_what_a_model_is_asked():
    """Prompts of one task and length, at most `batch`, and tokens for the longest answer: prompt and answer fill the length."""
    calls = []

    def generate(prompts, most):
        calls.append([(len(prompt) + most, prompt.dtype) for prompt in prompts])
        return [""] * len(prompts)

    ruler(generate, ["niah_single_3", "cwe"], (900,), count=5, batch=2)
    assert [len(call) for call in calls] == [2, 2, 1] * 2
    assert all(size == 900 and dtype == np.int32 for call in calls for size, dtype in call)


def test_another_tokenizer_and_text():
    pytest.importorskip("tokenizers", reason="needs the extra `hub`")
    from moejax.data.bpe import train_bpe

    text = "".join(f"Line {i} of a text that goes on for a while.\n" for i in range(300))
    bpe = train_bpe([text, "0123456789 is are values of the\n" * 9], 320)
    filler = RulerFiller(bpe, text)
    seen = []

    def generate(prompts, most):
        seen.extend(bpe.decode(prompt) for prompt in prompts)
        return ["" for _ in prompts]

    made = ruler(generate, ["niah_single_2"], (500, 700), count=2, filler=filler)
    assert len(seen) == 4 and all("of a text that goes on" in prompt for prompt in seen) and not made.score.any()
    with pytest.raises(ValueError, match="leave it out"):
        ruler(generate, ["niah_single_2"], (500,), count=1, filler=filler, tokenizer=BYTES)


def test_effective_length_and_markdown():
    def table_of(score):
        shares = np.array([score])
        return RulerTable(("vt",), (8192, 4096, 16384, 100), shares, 0 * shares, 0.5 * np.ones((1, 4)), 0.25 * np.ones((1, 4)), 50)

    gap = table_of([0.5, 0.9, 0.95, 0.99])
    assert gap.effective_length() == 4096  # what lies behind a length that fails does not count
    assert gap.effective_length(40) == 16384 and gap.effective_length(99.5) is None
    assert gap.by_length()[8192] == 50
    lines = gap.markdown().splitlines()
    assert lines[0] == "| task | 8K | 4K | 16K | 100 |"
    assert lines[2] == "| vt | 50.0 (50.0, 25.0) | 90.0 (50.0, 25.0) | 95.0 (50.0, 25.0) | 99.0 (50.0, 25.0) |"
    assert lines[3].startswith("| mean | **50.0** (50.0, 25.0) |") and "Effective length at 85.6: 4K." in lines[-1]
    assert {line.count("|") for line in lines[:4]} == {6}
    assert "Effective length at 99.5: none." in gap.markdown(99.5)
    back = json.loads(json.dumps(gap.to_dict()))
    assert back["score"] == [[0.5, 0.9, 0.95, 0.99]] and back["lengths"] == [8192, 4096, 16384, 100] and back["samples"] == 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": []}, "0 tasks"),
        ({"lengths": ()}, "no length twice"),
        ({"lengths": (500, 500)}, "no length twice"),
        ({"batch": 0}, "batch=0"),
        ({"tasks": ["vt", ("vt", Variables(chains=2))]}, "a name twice"),
        ({"tasks": ["vt", "qa_1"]}, "none of niah_single_1"),
        ({"tasks": ["vt", "cwe"], "lengths": (2000, 400)}, "too short"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_asked(settings, message):
    def generate(prompts, most):
        raise AssertionError("asked")

    with pytest.raises(ValueError, match=message):
        ruler(generate, **{"lengths": (800,), "count": 1, **settings})


def test_too_few_texts_are_refused():
    with pytest.raises(ValueError, match="1 texts for 3 prompts"):
        ruler(lambda prompts, most: ["a"], ["vt"], (800,), count=3)


def test_a_model_writes_the_texts(monkeypatch):
    """What `text_generator` hands to `moejax.infer.generate`: full batches, the end as a stop; ids beyond the tokenizer left out."""
    calls = []

    class Made:
        def row(self, index):
            return np.array([72, 105 + index, 330, BYTES.eos_id], np.int32)

    def generate(model, variables, tokens, **settings):
        calls.append((len(tokens), settings))
        return Made()

    monkeypatch.setattr(texts, "prepare", lambda model, variables, dtype: ("weights", dtype))
    monkeypatch.setattr(texts, "generate", generate)
    write = texts.text_generator("a model", "variables", BYTES, rows=3, capacity=99, chunk=7, dtype="bfloat16")
    prompts = [np.arange(size, dtype=np.int32) for size in (5, 6)]
    assert write(prompts, 9) == ["Hi", "Hj"]
    rows, settings = calls[0]
    assert rows == 3 and settings["stop_ids"] == (BYTES.eos_id,) and settings["weights"] == ("weights", "bfloat16")
    assert (settings["max_new_tokens"], settings["capacity"], settings["chunk"], settings["state_dtype"]) == (9, 99, 7, None)
    with pytest.raises(ValueError, match="4 prompts in a call, rows=3"):
        write(prompts * 2, 9)


@pytest.mark.slow
def test_a_real_model_writes_the_same_in_any_batch(toy, noisy):
    """A minute of compilation: the texts of a batch are those of each prompt alone."""
    model = HybridLM(toy.replace(vocab_size=384))
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    variables = {**variables, "params": noisy(variables["params"], jax.random.key(1))}
    write = texts.text_generator(model, variables, BYTES, rows=3, chunk=128)
    samples = ruler_samples("niah_multiquery", length=300, count=2)
    for sample, text in zip(samples, write([sample.prompt_tokens for sample in samples], 12), strict=True):
        ids = generate(model, variables, [sample.prompt_tokens], max_new_tokens=12, stop_ids=(BYTES.eos_id,)).row(0)
        assert text == BYTES.decode(ids[ids < BYTES.vocab_size], errors="replace")
