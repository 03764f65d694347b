"""RULER's tasks: exact lengths, and every answer found again by a solver that reads nothing but the prompt's text."""

import collections
import hashlib
import re

import numpy as np
import pytest

from moejax.data import ByteTokenizer
from moejax.data.ruler import RULER_TASKS, ruler_samples
from moejax.data.ruler_parts import DEPTH_BINS, EVAL_BINS, RulerFiller, places_of, word_split, words_of
from moejax.data.ruler_tasks import CommonWords, FrequentWords, Needles, Variables

BYTES = ByteTokenizer()
TEXT = "".join(f"Some line {chr(97 + i % 26) * 3} of text, to read through. " for i in range(200))
FACT = re.compile(r"(?<=\n)(\S+) is (\S+)\.\n")
RULE = re.compile(r"(?<=\n)(\w+) = (\w+)\.\n")
NEEDLES = [name for name in RULER_TASKS if name.startswith("niah")]


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers", reason="needs the extra `hub`")
    from moejax.data.bpe import train_bpe

    return train_bpe([TEXT, "\nbakide is 1234.\n\n? is are the 0123456789\n" * 5], 330)


def solve(task, text):
    """The answers, from the text alone."""
    context, _, question = text.rpartition("\n? ")
    if task.startswith("niah"):
        facts = collections.defaultdict(list)
        for key, value in FACT.findall(context + "\n"):
            facts[key].append(value)
        asked = re.fullmatch(r"(?:the \d+ values of )?(.*?) (?:is|are) ", question)
        return [value for key in asked[1].split(", ") for value in facts[key]]
    if task.startswith("vt"):
        rules = dict(RULE.findall(context + "\n"))
        wanted, found = re.fullmatch(r"the \d+ names for (\d+) are ", question)[1], []
        for name in rules:
            end = name
            while end in rules:
                end = rules[end]
            found += [name] if end == wanted else []
        return found
    words = [word for word in re.findall(r"[a-z]+", context) if len(word) > 1]
    number = int(re.search(r"the (\d+) most", question)[1])
    ranked = collections.Counter(words).most_common()
    assert ranked[number - 1][1] > ranked[number][1]  # determined: no tie
    return [word for word, _ in ranked[:number]]


def text_of(sample, tokenizer=BYTES):
    return tokenizer.decode(sample.prompt_tokens)


@pytest.mark.parametrize("task", RULER_TASKS)
@pytest.mark.parametrize("own_text", [False, True])
def test_exact_length_and_the_answer_determined_by_the_prompt(task, own_text):
    filler = RulerFiller(BYTES, TEXT if own_text else None, words="made up")
    for length in (1000, 1031, 2500):
        for sample in ruler_samples(task, length=length, count=4, seed=3, filler=filler):
            assert len(sample.prompt_tokens) + len(sample.answer_tokens) == sample.length == length
            assert sample.prompt_tokens.dtype == sample.answer_tokens.dtype == np.int32
            text = text_of(sample)
            assert sorted(solve(task, text)) == sorted(sample.answers), text[-200:]
            assert BYTES.decode(sample.answer_tokens) == ", ".join(sample.answers) + ".\n"
            assert sample.prompt_tokens[0] == BYTES.bos_id and sample.answer_tokens[-1] == BYTES.eos_id
            assert set(sample.answers) <= set(sample.candidates) and len(set(sample.candidates)) == len(sample.candidates)
            assert 0 < sample.guess < 1e-3 < sample.copy_any <= 1


@pytest.mark.parametrize("task", RULER_TASKS)
def test_exact_length_with_a_bpe(task, bpe):
    for length in (900, 1203):
        for sample in ruler_samples(task, length=length, count=2, tokenizer=bpe, filler=TEXT if "cwe" != task else None):
            assert len(sample.prompt_tokens) + len(sample.answer_tokens) == length
            assert sorted(solve(task, text_of(sample, bpe))) == sorted(sample.answers)
            assert bpe.decode(sample.answer_tokens) == ", ".join(sample.answers) + ".\n"


def test_candidates_are_in_the_order_of_their_last_appearance():
    for task in RULER_TASKS:
        for sample in ruler_samples(task, length=1500, count=2):
            text = text_of(sample).rpartition("\n? ")[0] + "\n"
            if task == "vt":
                shown = [name for name, _ in RULE.findall(text)]
            elif task.startswith("niah"):
                shown = [value for _, value in FACT.findall(text)]
            else:
                shown = list(dict.fromkeys(reversed([w for w in re.findall("[a-z]+", text) if len(w) > 1])))[::-1]
            assert list(sample.candidates) == shown
            assert sample.copied_last == tuple(shown[-len(sample.answers) :])


def test_answers_are_in_the_order_of_the_text_or_of_the_question():
    for task in ("niah_multivalue", "niah_multiquery", "vt", "cwe"):
        for sample in ruler_samples(task, length=1200, count=8):
            context, _, question = text_of(sample).rpartition("\n? ")
            if task == "niah_multiquery":
                facts = dict(FACT.findall(context + "\n"))
                assert list(sample.answers) == [facts[key] for key in question.removesuffix(" are ").split(", ")]
            else:
                assert list(sample.answers) == sorted(sample.answers, key=context.index)


def test_depth_is_the_share_of_filler_before_the_asked_needle():
    filler, lone = RulerFiller(), set()
    for sample in ruler_samples("niah_single_2", length=600, count=40, filler=filler):
        start = text_of(sample).index(f" is {sample.answers[0]}.") - len("\nbakide")
        room = 600 - len("\nbakide is 123456.\n") - len("\n? bakide is 123456.\n") - 2
        assert sample.depth == start / room
        lone.add(sample.depth)
    assert 0 <= min(lone) < 0.1 and max(lone) > 0.9
    for sample in ruler_samples("niah_multikey_2", length=900, count=20, filler=filler):
        values = [value for _, value in FACT.findall(text_of(sample))]
        assert sample.depth == values.index(sample.answers[0]) / (len(values) - 1)


def test_train_and_eval_share_no_key_value_word_or_depth():
    words = sorted({"".join(np.random.default_rng(i).choice(list("abcdefgh"), 5)) for i in range(900)})
    filler = RulerFiller(BYTES, TEXT, words=words)
    for task in RULER_TASKS:
        seen = {}
        for split in ("train", "eval"):
            strings, depths = set(), set()
            for sample in ruler_samples(task, length=1500, count=25, split=split, filler=filler):
                text = text_of(sample)
                strings.update(part for fact in FACT.findall(text) + RULE.findall(text) for part in fact)
                strings.update(sample.candidates)
                assert all(word_split(one) == split for one in sample.candidates if "-" in one)  # ids: by a rule, not by luck
                if len(sample.answers) == 1:
                    depths.add(sample.depth)
                    assert depth_split(sample.depth) == split
                if task.startswith("niah_multi") and len(sample.answers) > 1:
                    assert all(depth_split(depth) == split for depth in needle_depths(text, sample.answers))
            seen[split] = (strings, depths)
        assert len(seen["eval"][0]) > 20 and not seen["train"][0] & seen["eval"][0], task
        assert not seen["train"][1] & seen["eval"][1]


def depth_split(depth):
    return "eval" if min(int(depth * DEPTH_BINS + 1e-9), DEPTH_BINS - 1) in EVAL_BINS else "train"


def needle_depths(text, answers):
    """Share of the filler before each asked needle."""
    context = text.rpartition("\n? ")[0]
    spans = [(m.start() - 1, m.end(), m[2]) for m in FACT.finditer(context + "\n")]
    filler = len(context) - sum(end - start for start, end, _ in spans)
    before = 0
    for start, end, value in spans:
        if value in answers:
            yield (start - before) / filler
        before += end - start


def test_places_belong_to_one_split():
    for last in (7, 40, 53, 999):
        train, evaluation = places_of("train", last), places_of("eval", last)
        assert sorted([*train, *evaluation]) == list(range(last + 1))
        assert {0, last} <= set(evaluation.tolist()) and len(train)
        assert all(depth_split(place / last) == "train" for place in train)
    assert len(EVAL_BINS) == 11


def test_samples_are_functions_of_their_number():
    filler = RulerFiller()
    for task in RULER_TASKS:
        whole = ruler_samples(task, length=1200, count=5, seed=9, filler=filler)
        part = ruler_samples(task, length=1200, count=2, first=3, seed=9)
        for a, b in zip(whole[3:], part, strict=True):
            assert np.array_equal(a.prompt_tokens, b.prompt_tokens) and a.answers == b.answers and a.depth == b.depth
        other = ruler_samples(task, length=1200, count=5, seed=10, filler=filler)
        assert not {a.answers for a in whole} & {b.answers for b in other}


def test_a_key_that_the_text_has_is_not_asked():
    made = ruler_samples("niah_single_2", length=500, count=1, seed=4)[0]
    key = re.search(r"\? (\w+) is $", text_of(made))[1]
    made = ruler_samples("niah_single_2", length=500, count=1, seed=4, filler=f" {key} is 111111 or so.")[0]
    asked = re.search(r"\? (\w+) is $", text_of(made))[1]
    assert key in text_of(made) and asked != key


def test_chains_that_must_be_traced():
    task = ("vt of 4", Variables(chains=4, hops=2))
    for sample in ruler_samples(task, length=900, count=10):
        assert len(sample.candidates) == 12 and len(sample.answers) == 3 and sample.copy_any == 0.25
        assert sorted(solve("vt", text_of(sample))) == sorted(sample.answers)
        places = [text_of(sample).index(f"\n{name} = ") for name in sample.answers]
        assert places == sorted(places)  # explained before used


def test_counts_of_common_and_frequent_words():
    def counts(sample):
        text = text_of(sample).rpartition("\n? ")[0]
        return collections.Counter(word for word in re.findall("[a-z]+", text) if len(word) > 1), text

    for length, times in ((1500, (6, 1)), (6000, (30, 3))):
        common, text = counts(ruler_samples("cwe", length=length, count=1)[0])
        assert sorted(common.values(), reverse=True)[:10] == [times[0]] * 10 and set(common.values()) == set(times)
        assert re.findall(r"(\d+)\.", text) == [str(i + 1) for i in range(sum(common.values()))]
    frequent, text = counts(ruler_samples("fwe", length=8000, count=1)[0])
    top = [count for _, count in frequent.most_common(6)]
    noise = text.split().count("...") + 1  # the first follows the padding
    assert all(abs(count / noise - rank**-2) < 0.02 for rank, count in enumerate(top, start=2))


def test_words_of_a_corpus():
    assert words_of("The cat sat_down beside Mixed mixed2 under_score abcdefghi under") == ["beside", "under"]
    assert {word_split(w) for w in words_of(TEXT)} <= {"train", "eval"}
    words = [f"{a}{b}word" for a in "abcdefghijklmnopq" for b in "abcdefghijklmnopq"]
    filler = RulerFiller(BYTES, words=words)
    sample = ruler_samples("cwe", length=900, count=1, split="train", filler=filler)[0]
    assert set(sample.candidates) <= set(words)


def test_the_same_samples_everywhere():
    """One digest for all Python and NumPy versions: two runs are asked the same questions."""
    digest = hashlib.sha256()
    for task in RULER_TASKS:
        for sample in ruler_samples(task, length=1100, count=2, seed=1) + ruler_samples(task, length=1100, count=1, split="train"):
            digest.update(sample.prompt_tokens.astype("<i4").tobytes())
            digest.update(sample.answer_tokens.astype("<i4").tobytes())
    assert digest.hexdigest() == "b3d54124d1316106a20dc648fbe813d6af7a26d2462dd2281fb72240d68cf765"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: ruler_samples("qa_1", length=500, count=1), "is none of niah_single_1"),
        (lambda: ruler_samples("vt", length=500, count=0), "at least one"),
        (lambda: ruler_samples("vt", length=500, count=1, split="test"), '"train" or "eval"'),
        (lambda: ruler_samples("vt", length=500, count=1, first=-1), "first=-1"),
        (lambda: ruler_samples("vt", length=150, count=1), "too short"),
        (lambda: ruler_samples("niah_single_1", length=60, count=1), "too short"),
        (lambda: ruler_samples("niah_multikey_3", length=600, count=1), "needles fit"),
        (lambda: ruler_samples("cwe", length=500, count=1), "too short"),
        (lambda: ruler_samples("fwe", length=150, count=1), "too short"),
        (lambda: ruler_samples("cwe", length=900, count=1, filler=TEXT), "words; at least 20 are needed"),
        (lambda: ruler_samples("vt", length=500, count=1, tokenizer=BYTES, filler=RulerFiller()), "leave it out"),
        (lambda: ruler_samples(("x", Needles("hay")), length=500, count=1), 'haystack "noise"'),
        (lambda: ruler_samples(("x", Needles("needles", keys=4)), length=500, count=1), "one asked key"),
        (lambda: ruler_samples(("x", Needles(keys=4, digits=1)), length=500, count=1), "more digits"),
        (lambda: ruler_samples(("x", Needles("needles", digits=2)), length=900, count=1), "more digits"),
        (lambda: ruler_samples(("x", Variables(hops=0)), length=500, count=1), "one hop"),
        (lambda: ruler_samples(("x", CommonWords(common_times=3)), length=500, count=1), "more often"),
        (lambda: ruler_samples(("x", FrequentWords(asked=0)), length=500, count=1), "1 to 8"),
        (lambda: RulerFiller(BYTES, words=["a", "a"]), "stands once"),
        (lambda: RulerFiller(BYTES, words="invented"), '"made up"'),
    ],
)
def test_bad_input(ask, message):
    with pytest.raises(ValueError, match=message):
        ask()


def test_a_word_list_too_short_for_the_length():
    words = [f"{a}{b}word" for a in "abcdefghijklmnopq" for b in "abcdefghijklmnopq"]
    with pytest.raises(ValueError, match=r'too few for length=60000.*words="made up"'):
        ruler_samples("cwe", length=60_000, count=1, split="eval", filler=RulerFiller(BYTES, words=words))


def test_a_tokenizer_that_needs_two_tokens_for_a_line_end():
    class Pairs(ByteTokenizer):
        def encode(self, text, **settings):
            ids = super().encode(text, **settings)
            return np.repeat(ids, 2) if text == "\n" else ids

    with pytest.raises(ValueError, match="as 2 tokens; an exact length needs one"):
        ruler_samples("niah_multikey_2", length=900, count=1, tokenizer=Pairs())
