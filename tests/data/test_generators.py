"""Synthetic sources: the same bytes everywhere, masks on answers alone, needles at exactly their depth, splits apart."""

import hashlib
import itertools
import json
import re

import numpy as np
import pytest

from moejax.data import ByteTokenizer, DataStream, Document, Mixture, synthetic_corpus
from moejax.data.facts import NUM_KEYS, key_word, split_pool
from moejax.data.generators import LongDocuments, RecallSource
from moejax.data.needles import NeedleSource, needle_baselines, needle_rows
from moejax.data.sources import Source

BYTES = ByteTokenizer()
FACT = re.compile(r"\n(\w{6}) is (\w+)\.\n")
LINE = re.compile(r"\n\? (\w{6}) (?:is|leads to) (\d+)\.\n")


@pytest.fixture(scope="module")
def corpus():
    """Two folders of files with lines."""
    made = synthetic_corpus(documents=24, mean_words=120).train
    return [Document(f"{'ab'[i % 2]}/{d.name[10:]}", d.data.replace(b". ", b".\n")) for i, d in enumerate(made)]


@pytest.fixture(scope="module")
def bpe(corpus):
    pytest.importorskip("tokenizers", reason="needs the extra `hub`")
    from moejax.data.bpe import train_bpe

    return train_bpe([*corpus, "\nbakide is 1234.\n\n? is leads to 0123456789\n" * 5], 420)


def sources(corpus, tokenizer=None, split="train", seed=7):
    common = {"seed": seed, "documents": 6, "split": split, "tokenizer": tokenizer}
    return [
        RecallSource("recall", pairs=(2, 9), **common),
        RecallSource("recall two", pairs=5, queries=2, digits=3, **common),
        NeedleSource("needle", length=300, **common),
        NeedleSource("needles", length=500, needles=(2, 5), loss="all", filler="Some text to hide in. ", depths=(0.25, 0.5), **common),
        LongDocuments("long", corpus, length=2500, tasks=2, loss="answer", **common),
        LongDocuments("plain", corpus, length=2000, tasks=0, **common),
    ]


def text_of(source, index, tokenizer=BYTES):
    return tokenizer.decode(source[index].ids)


def test_the_same_bytes_on_every_platform(corpus):
    """One digest for all Python and NumPy versions: a resumed run reads on in the same documents."""
    digest = hashlib.sha256()
    folders = LongDocuments("folders", corpus, length=2000, seed=7, documents=6, order="folders")
    for source in [*sources(corpus), folders]:
        for i in range(len(source)):
            document = source[i]
            digest.update(document.ids.astype("<i4").tobytes())
            digest.update(b"" if document.mask is None else document.mask.tobytes())
    rows = needle_rows(400, (0.0, 0.3, 1.0), 3, 5)
    for array in (rows.tokens, rows.positions, rows.expected, rows.starts, rows.last):
        digest.update(array.astype("<i4").tobytes())
    assert digest.hexdigest() == "f1c6c607e4e8713159fe92bcd86719cbc7f695ebdfefa4f476e135b972a7b8b0"


@pytest.mark.parametrize("with_bpe", [False, True])
def test_every_source_keeps_the_protocol(with_bpe, corpus, request):
    tokenizer = request.getfixturevalue("bpe") if with_bpe else None
    made, again = sources(corpus, tokenizer), sources(corpus, tokenizer)
    for source, twin in zip(made, again, strict=True):
        assert isinstance(source, Source) and len(source) == 6
        lengths = source.lengths()
        assert lengths.dtype == np.int64
        for i in (5, 0, 3):
            document, other = source[i], twin[i]  # in any order, from a fresh object: (seed, index) alone
            assert document.ids.dtype == np.int32 and len(document.ids) == lengths[i]
            assert (document.ids == other.ids).all()
            if document.mask is not None:
                assert document.mask.dtype == bool and document.mask.shape == document.ids.shape and (document.mask == other.mask).all()
        assert source.fingerprint() == twin.fingerprint() and json.loads(json.dumps(source.fingerprint())) == source.fingerprint()
        assert len({source[i].ids.tobytes() for i in range(6)}) == 6
        with pytest.raises(IndexError, match="documents 0 to 5, not 6"):
            source[6]
    others = sources(corpus, tokenizer, seed=8) + sources(corpus, tokenizer, split="eval")
    assert len({json.dumps(s.fingerprint()) for s in made + others}) == 18


@pytest.mark.parametrize("with_bpe", [False, True])
def test_only_answers_are_learned(with_bpe, corpus, request):
    """The mask covers the values after the questions, whole and nothing else, and each is what the facts say."""
    tokenizer = request.getfixturevalue("bpe") if with_bpe else BYTES
    for source in sources(corpus, tokenizer):
        for i in range(3):
            document = source[i]
            if document.mask is None:
                assert source.name in ("needles", "plain")
                continue
            text = tokenizer.decode(document.ids)
            asked = LINE.findall(text)
            assert asked and tokenizer.decode(document.ids[document.mask]) == "".join(value for _, value in asked)
            facts = dict(FACT.findall(text))
            for key, value in asked:
                hops = 0
                while key in facts:
                    key, hops = facts[key], hops + 1
                assert key == value and hops == (3 if source.name == "long" else 1)


def test_recall_mixes_difficulty(corpus):
    source = RecallSource("recall", pairs=(2, 9), seed=0, documents=200)
    pairs = [len(FACT.findall(text_of(source, i))) for i in range(200)]
    assert set(pairs) == set(range(2, 10))
    assert [len(LINE.findall(text_of(source, i))) for i in range(5)] == pairs[:5]
    keys, values = zip(*FACT.findall(text_of(source, pairs.index(9))), strict=True)
    assert len(set(keys)) == len(set(values)) == 9
    two = RecallSource("recall", pairs=5, queries=2, seed=0, documents=9)
    assert {len(LINE.findall(text_of(two, i))) for i in range(9)} == {2}


def test_generators_in_a_stream(corpus):
    """Haystacks of a row's length fill it, and the targets that count are the answers."""
    made = [NeedleSource("needle", length=256, seed=1, documents=30, needles=2), RecallSource("recall", pairs=3, seed=1, documents=60)]
    stream = DataStream(Mixture(made, {"needle": 1.0, "recall": 1.0}), context=256, rows=4, packing="first_fit")
    seen = {0: 0, 1: 0}
    for _ in range(24):  # the packer keeps rows open at first
        batch, _ = next(stream)
        for row in range(4):
            for segment in range(1, batch["segment_ids"][row].max() + 1):
                piece = batch["segment_ids"][row] == segment
                answers = "".join(value for _, value in LINE.findall(BYTES.decode(batch["tokens"][row][piece])))
                counted = batch["loss_mask"][row] & piece
                assert answers and BYTES.decode(batch["targets"][row][counted]) == answers
                domain = int(batch["domains"][row][piece][0])
                assert domain or piece.all()
                seen[domain] += 1
    assert min(seen.values()) > 3


def test_evaluation_never_overlaps_with_training(corpus):
    """Other streams, and no key or value of training at all, whatever the seeds."""
    found = {}
    for split in ("train", "eval"):
        texts = [text_of(s, i) for seed in range(4) for s in sources(corpus, None, split, seed)[:5] for i in range(6)]
        facts = [fact for text in texts for fact in FACT.findall(text)]
        keys = {word for fact in facts for word in fact if not word.isdigit()}
        found[split] = keys, {value for _, value in facts if value.isdigit() and len(value) == 4}
    assert len(found["train"][0]) > 100 and len(found["eval"][0]) > 100 and len(found["eval"][1]) > 50
    assert not found["train"][0] & found["eval"][0] and not found["train"][1] & found["eval"][1]
    for bound in (1000, NUM_KEYS):
        train, held = set(split_pool(bound, "train").tolist()), set(split_pool(bound, "eval").tolist())
        assert not train & held and len(train | held) == bound and 0.1 < len(held) / bound < 0.15
    assert len({key_word(i) for i in range(0, NUM_KEYS, 97)}) == len(range(0, NUM_KEYS, 97))
    shared = set(found["eval"][0]) and {v[-1] for v in found["eval"][1]}
    assert shared == set("0123456789")  # no digit tells the splits apart


@pytest.mark.parametrize("with_bpe", [False, True])
@pytest.mark.parametrize("keys", [1, 4])
def test_the_depth_is_exact_to_the_token(keys, with_bpe, request):
    tokenizer = request.getfixturevalue("bpe") if with_bpe else BYTES
    length, depths = 700, (0.0, 0.1, 0.333, 0.5, 0.9, 1.0)
    rows = needle_rows(length, depths, keys, 3, rows_per_depth=3, tokenizer=tokenizer)
    assert (
        rows.tokens.shape == (18, length)
        and rows.tokens.dtype == np.int32
        and rows.depths.tolist() == [d for d in depths for _ in range(3)]
    )
    for row in range(18):
        tokens, start = rows.tokens[row], int(rows.starts[row])
        inside = rows.positions[row] >= 0
        assert (tokens[rows.positions[row][inside]] == rows.expected[row][inside]).all()
        answer = tokenizer.decode(rows.expected[row][inside])
        key, value = LINE.search(tokenizer.decode(tokens)).groups()
        assert value == answer
        fact = np.concatenate([tokenizer.encode(part) for part in (f"\n{key} is ", value, ".\n")])
        assert (tokens[start : start + len(fact)] == fact).all()
        question = int(rows.positions[row][0]) - len(tokenizer.encode(f"\n? {key} is "))
        assert start - 1 == round(rows.depths[row] * (question - 1 - len(fact)))  # between BOS and the question
        assert len(FACT.findall(tokenizer.decode(tokens))) == keys
        assert tokens[0] == tokenizer.bos_id and tokens[-1] == tokenizer.eos_id


def test_needles_of_a_source_lie_in_its_depths():
    source = NeedleSource("needle", length=1000, seed=1, documents=60, depths=(0.25, 0.5), needles=3, filler=b"gr\xc3\xbcn and blue; ")
    places = []
    for i in range(60):
        text = BYTES.decode_bytes(source[i].ids).decode("utf-8", "replace")
        key, _ = LINE.search(text).groups()
        data = BYTES.decode_bytes(source[i].ids)
        places.append(data.index(f"\n{key} is ".encode()) / (data.index(b"\n?") - 18))
        assert "blue" in text
    assert min(places) >= 0.25 and max(places) <= 0.51 and max(places) - min(places) > 0.2


def test_baselines_are_counted():
    """Copying the last needle: always right for one, for deep needles too; over uniform depths about one in the number of needles."""
    depths = np.linspace(0, 1, 21)
    one, four = (needle_rows(600, depths, keys, 0, rows_per_depth=8) for keys in (1, 4))
    assert needle_baselines(one) == {"guess": 1e-4, "copy_any": 1.0, "copy_last": 1.0}
    baselines = needle_baselines(four)
    assert baselines["copy_any"] == 0.25 and 0.15 < baselines["copy_last"] < 0.35
    deepest = needle_rows(600, [1.0], 4, 0, rows_per_depth=8)
    assert needle_baselines(deepest)["copy_last"] == 1.0 and needle_baselines(needle_rows(600, [0.0], 4, 0, digits=2))["guess"] == 0.01
    for row in range(0, len(four.tokens), 5):  # counted by hand
        last = FACT.findall(BYTES.decode(four.tokens[row]))[-1][1]
        assert BYTES.decode(four.last[row]) == last


def test_correct_reads_the_position_before_each_answer_token():
    rows = needle_rows(300, [0.2, 0.8], 2, 0)
    right = np.roll(rows.tokens, -1, axis=1)  # a perfect model predicts the next token
    assert rows.correct(right).tolist() == [True, True]
    wrong = right.copy()
    wrong[0, rows.positions[0, -1] - 1] = 0
    assert rows.correct(wrong).tolist() == [False, True]
    elsewhere = np.zeros_like(right)
    for row in range(2):
        elsewhere[row, rows.positions[row] - 1] = rows.expected[row]
    assert rows.correct(elsewhere).all() and not rows.correct(rows.tokens).any()
    with pytest.raises(ValueError, match=r"predicted has the shape \(2, 299\)"):
        rows.correct(right[:, 1:])


def test_a_long_row_is_made_quickly_and_exactly():
    rows = needle_rows(1 << 18, [0.5], 8, 0)
    assert rows.tokens.shape == (1, 1 << 18) and abs(int(rows.starts[0]) - (1 << 17)) < 40


def test_long_documents_scatter_their_facts(corpus):
    """Each chain has one fact in each third of the window, on a line of its own between whole files under headers."""
    source = LongDocuments("long", corpus, length=3000, seed=0, documents=40, tasks=2)
    orders, whole, texts = set(), 0, {d.name: d.data.decode() for d in corpus}
    for i in range(40):
        document = source[i]
        assert document.mask is None and len(document.ids) == 3000
        text = BYTES.decode(document.ids)
        facts, starts, planted = {}, {}, 0
        for found in FACT.finditer(text):
            facts[found[1]], starts[found[1]] = found[2], found.start() - planted  # where the files' text was cut
            planted += len(found[0])
        body = len(text) - planted - sum(len(found[0]) for found in LINE.finditer(text))
        for key, _ in LINE.findall(text):
            places = []
            while key in facts:
                places.append(next(part for part in (2, 1, 0) if starts[key] >= body * part // 3))
                key = facts[key]
            orders.add(tuple(places))
        files = re.split(r"# file: (.*)\n", LINE.sub("", FACT.sub("", text)))[1:]
        names = files[::2]
        assert len(names) == len(set(names)) and set(names) <= set(texts)
        for name, content in list(zip(names, files[1::2], strict=True))[:-1]:
            assert content == texts[name] + "\n"
            whole += 1
    assert whole > 40
    assert orders == set(itertools.permutations(range(3)))  # one fact in each third, in every order


def test_long_documents_keep_folders_together(corpus):
    """The files of a folder by name, from any file of the first one on, whose beginning comes last."""
    of = {folder: sorted(d.name for d in corpus if d.name[0] == folder) for folder in "ab"}
    source = LongDocuments("long", corpus, length=9000, seed=0, documents=12, tasks=0, order="folders")
    firsts = set()
    for i in range(12):
        names = re.findall(r"# file: (.*)\n", text_of(source, i))
        first, other = names[0][0], "ab".replace(names[0][0], "")
        start = of[first].index(names[0])
        assert names == (of[first][start:] + of[other] + of[first][:start])[: len(names)] and len(names) > 8
        firsts.add(names[0])
    assert len(firsts) > 6 and {name[0] for name in firsts} == {"a", "b"}


def test_what_generators_refuse(corpus):
    common = {"seed": 0, "documents": 2}
    for make, message in (
        (lambda: RecallSource("r", pairs=0, **common), "source 'r': pairs=0"),
        (lambda: RecallSource("r", pairs=(3, 2), **common), r"pairs=\(3, 2\)"),
        (lambda: RecallSource("r", pairs=3, queries=4, **common), "1 to 3 queries or None for all"),
        (lambda: RecallSource("r", pairs=3, split="test", **common), 'split=\'test\' must be "train" or "eval"'),
        (lambda: RecallSource("r", pairs=3, seed=0, documents=0), "documents=0"),
        (lambda: RecallSource("r", pairs=3, digits=7, **common), "digits=7 must be 1 to 6"),
        (lambda: RecallSource("r", pairs=60, digits=2, **common), "60 distinct values of 2 digits .* give more digits"),
        (lambda: NeedleSource("n", length=30, **common), "length=30 is too short for 1 needles at any depth; give at least"),
        (lambda: NeedleSource("n", length=400, depths=(0.5, 0.2), **common), r"depths=\(0.5, 0.2\) must be \(lowest, highest\)"),
        (lambda: NeedleSource("n", length=400, loss="some", **common), "loss='some'"),
        (lambda: NeedleSource("n", length=400, filler="", **common), "the filler text is empty"),
        (lambda: needle_rows(400, [], 1, 0), "at least one depth"),
        (lambda: needle_rows(400, [1.5], 1, 0), "all within"),
        (lambda: LongDocuments("l", corpus, length=10**6, **common), r"the corpus has \d+ tokens, a document 1000000"),
        (lambda: LongDocuments("l", corpus, length=90, **common), "length=90 is short for 1 sub-tasks of 3 hops"),
        (lambda: LongDocuments("l", corpus, length=900, tasks=0, loss="answer", **common), '"answer" with at least one task'),
        (lambda: LongDocuments("l", corpus, length=900, order="random", **common), "order='random'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_the_shortest_length_holds_at_every_depth():
    for needles in (1, 2, 6):
        with pytest.raises(ValueError, match="give at least") as error:
            needle_rows(10, [0.5], needles, 0)
        shortest = int(re.search(r"give at least (\d+)", str(error.value)).group(1))
        rows = needle_rows(shortest, np.linspace(0, 1, 41), needles, 0)
        assert all(len(FACT.findall(BYTES.decode(row))) == needles for row in rows.tokens)
