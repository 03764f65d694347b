"""The data stream. Public threads that these tests answer:

* https://github.com/huggingface/datasets/issues/7901: resuming a buffered shuffle lost the buffer.
* https://github.com/google/grain/pull/1179: a state restored into a fresh iterator gave another order (tests ran in one process).
* https://github.com/AI-Hypercomputer/maxtext/issues/1760: resuming demanded the same number of processes.
* https://github.com/AI-Hypercomputer/maxtext/pull/3673: elastic resume excluded packing and mixing.
* https://github.com/google/grain/issues/1129: batches lost with more than one worker.
"""

import itertools
import json
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from moejax.data import ByteTokenizer, synthetic_corpus
from moejax.data.mixture import Draws, Mixture
from moejax.data.packing import KINDS, Packing
from moejax.data.sources import CorpusSource, TokenDocument, TokenSource
from moejax.data.stream import DataStream, check_fingerprint

PAD = ByteTokenizer.pad_id


def _unique(name, lengths, start, masked=False):
    """Documents whose ids come nowhere else, so that an id names its document and place."""
    ends = start + np.cumsum(lengths)
    documents = [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)]
    return TokenSource(name, documents, [d % 3 > 0 for d in documents] if masked else None)


SOURCES = [
    _unique("short", [3, 5, 4, 8, 1, 9, 2] * 5, 1000),
    _unique("long", [70, 131, 16, 15, 17, 40], 2000, masked=True),
    _unique("middle", [14] * 9, 3000),
]
MIXTURE = Mixture(SOURCES, {"short": 2, "long": 3, "middle": 1})


def _stream(mixture=MIXTURE, **settings):
    return DataStream(mixture, **{"context": 16, "rows": 12, "seed": 7} | settings)


def _take(stream, count):
    return [next(stream) for _ in range(count)]


def _same(left, right):
    return left.keys() == right.keys() and all((left[k] == right[k]).all() and left[k].dtype == right[k].dtype for k in left)


def _ids(batches):
    return Counter(int(t) for batch in batches for t in batch["tokens"][batch["segment_ids"] > 0])


def _drawn(state):
    """The tokens of all documents that the state counts as drawn."""
    draws, drawn = Draws(MIXTURE, seed=7), Counter()
    for number, source in enumerate(SOURCES):
        for _ in range(state["cursors"][source.name]):
            drawn.update(source.documents[draws.next(number)[0]].tolist())
    return drawn


def _held(state, packing):
    """The tokens that the state says are packed or in progress."""
    plan = _stream(packing=packing)._new_plan()
    plan.restore(state)
    sources = {source.name: source for source in SOURCES}
    return Counter(int(t) for name, pieces in plan.held().items() for d, a, b in pieces for t in sources[name].documents[d][a:b])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_hold_what_the_sources_say(kind):
    """Targets, masks, positions and domains token by token. MaxText commit d20a48da1: the loss weight was the segment id; here it is
    a bool, and False at each piece's last token."""
    for batch, _ in _take(_stream(packing=kind, rows=5), 12):
        dtypes = {name: array.dtype.name for name, array in batch.items()}
        assert dtypes == dict(tokens="int32", targets="int32", loss_mask="bool", segment_ids="int32", positions="int32", domains="int8")
        assert all(array.shape == (5, 16) for array in batch.values())
        for row in range(5):
            tokens, segments = batch["tokens"][row].tolist(), batch["segment_ids"][row].tolist()
            assert segments[0] == 1 and all(b - a in (0, 1) for a, b in itertools.pairwise(segments) if b)
            used = sum(s > 0 for s in segments)
            assert not any(segments[used:]) and tokens[used:] == [PAD] * (16 - used)
            place = 0
            for t in range(16):
                place = place + 1 if t and segments[t] and segments[t] == segments[t - 1] else 0
                inside = t + 1 < 16 and segments[t] > 0 and segments[t + 1] == segments[t]
                assert batch["positions"][row, t] == place
                assert batch["domains"][row, t] == (tokens[t] // 1000 - 1 if segments[t] else 0)
                assert batch["targets"][row, t] == (tokens[t + 1] if inside else 0)
                assert batch["loss_mask"][row, t] == (inside and (tokens[t + 1] // 1000 != 2 or tokens[t + 1] % 3 > 0))
                if inside:
                    assert tokens[t + 1] == tokens[t] + 1  # the piece is of one document


@pytest.mark.parametrize("kind", KINDS)
def test_maxtext_1760_3673_exactly_once_on_4_2_and_3_processes(kind):
    """1,008 packed rows of a mixture, stopped three times and gone on with on another number of processes: the rows of the unbroken run,
    and of the documents drawn every token that is not still held, once."""
    packing = Packing(kind, bins=4, lanes=3, max_segments=None if kind == "best_fit" else 5)
    whole = _take(_stream(packing=packing), 84)
    state, done = None, 0
    for count, batches in ((4, 20), (2, 27), (3, 21), (4, 16)):
        streams = [_stream(packing=packing, process=(p, count)) for p in range(count)]
        for stream in streams:
            if state is not None:
                stream.restore(state)
        for _ in range(batches):
            parts = [next(stream) for stream in streams]
            assert all(part["tokens"].shape == (12 // count, 16) for part, _ in parts)
            joined = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0]}
            assert _same(joined, whole[done][0])
            assert all(s == whole[done][1] for _, s in parts)
            done += 1
        assert len({json.dumps(stream.metrics()["tokens_total"]) for stream in streams}) == 1
        state = json.loads(json.dumps(parts[0][1]))
    assert state["rows"] == 84 * 12 == 1008

    held = _held(state, packing)
    assert _ids(batch for batch, _ in whole) + held == _drawn(state)
    assert held.total() == state["held_tokens"] and len(json.dumps(state)) < 3000


def test_rows_a_batch_and_workers_are_no_part_of_the_position():
    whole = np.concatenate([batch["tokens"] for batch, _ in _take(_stream(), 6)])
    stream, got = _stream(rows=2), []
    for rows, count in ((2, 3), (6, 4), (14, 3)):
        state = stream.state()
        stream = _stream(rows=rows)
        stream.restore(state)
        got += [batch["tokens"] for batch, _ in _take(stream, count)]
    assert (np.concatenate(got) == whole).all()
    assert _stream(rows=2).fingerprint() == _stream(rows=12, process=(1, 3), workers=2, prefetch=5).fingerprint()


RECORDS = """
import json, sys
from moejax.data.mixture import Mixture
from moejax.data.sources import TokenSource
from moejax.data.stream import DataStream

def make(workers, repeat=True):
    source = TokenSource("records", [[300 + i] * (2 + i % 4) for i in range(12)])
    return DataStream(Mixture([source]), context=8, rows=1, packing="one_doc", seed=42, workers=workers, repeat=repeat)

def take(stream, count):
    return [int(batch["tokens"][0, 0]) - 300 for _, (batch, _) in zip(range(count), stream)]

if __name__ == "__main__":
    out = []
    for workers, repeat, state in json.loads(sys.argv[1]):
        with make(workers, repeat) as stream:
            stream.restore(state)
            out.append(take(stream, 16))
    print(json.dumps(out))
"""


def test_datasets_7901_grain_1179_a_new_process_goes_on_item_by_item(tmp_path):
    """12 records, seed 42; stopped after 0, 1, 3, 11 items and at the epoch's end (12); the rest read by a new process, with 0 and 2
    prefetch workers. There is no shuffle buffer: the order of an epoch is a permutation that follows from the cursor."""
    names: dict = {"__name__": "records"}
    exec(RECORDS, names)
    whole = names["take"](names["make"](0), 28)
    assert sorted(whole[:12]) == sorted(whole[12:24]) == list(range(12)) and whole[:12] != whole[12:24]
    jobs = []
    for stop in (0, 1, 3, 11, 12):
        repeat = stop != 3  # one of the streams ends after its epoch
        stream = names["make"](0, repeat)
        assert names["take"](stream, stop) == whole[:stop]
        jobs += [[workers, repeat, stream.state()] for workers in (0, 2)]
    script = tmp_path / "records.py"
    script.write_text(RECORDS)
    done = subprocess.run([sys.executable, str(script), json.dumps(jobs)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    for (workers, repeat, state), rest in zip(jobs, json.loads(done.stdout), strict=True):
        assert rest == whole[state["rows"] : state["rows"] + 16 if repeat else 12], (workers, state["rows"])


def test_grain_1129_workers_lose_nothing_stop_when_full_and_report_errors(tmp_path):
    """Two workers: the batches and states of none; the state is of the batch given out, not of what is made ahead; a slow trainer
    stops them (back-pressure); a document that cannot be read raises here, in its turn."""
    log = tmp_path / "read"
    log.write_text("")

    class Logged:  # in a function, so that it travels to the workers by value
        name = "logged"

        def __init__(self, bad):
            self.bad = bad

        def __len__(self):
            return 400

        def __getitem__(self, index):
            if index == self.bad:
                raise OSError("document 250 cannot be read")
            with open(log, "a") as file:
                file.write("x")
            return TokenDocument(np.full(8, index, np.int32))

        def lengths(self):
            return np.full(400, 8)

        def fingerprint(self):
            return {"kind": "logged"}

    def make(workers, bad=None):
        return DataStream(Mixture([Logged(bad)]), context=8, rows=2, workers=workers, prefetch=2, seed=1)

    plain = make(0)
    expected = _take(plain, 150)
    place = next(i for i, (batch, _) in enumerate(expected) if 250 in batch["tokens"])
    assert place > 40
    with make(2, bad=250) as stream:
        log.write_text("")
        for wanted in expected[:5]:
            batch, state = next(stream)
            assert _same(batch, wanted[0]) and state == wanted[1] == stream.state()
            assert all(type(array) is np.ndarray for array in batch.values())  # no view of memory that a worker owns
        size = -1
        while size != log.stat().st_size:  # until the workers stand still
            size = log.stat().st_size
            time.sleep(0.5)
        assert 10 <= size <= 2 * (5 + 2 * 6)  # 2 documents a batch; 5 taken, at most 6 a worker on their way
        assert next(stream)[1] == expected[5][1]
        metrics = stream.metrics()
        assert metrics["queue_depth"] == 2 and metrics["tokens_total"] == {"logged": 96} and metrics["dropped_tokens"] == 0
        for wanted in expected[6:place]:
            assert next(stream)[1] == wanted[1]
        for _ in range(2):  # and again, not a hang
            with pytest.raises(OSError, match="document 250"):
                next(stream)
        assert stream.state() == expected[place - 1][1]


def test_a_state_of_another_pipeline_is_refused():
    """grain takes a state of other weights or another row length without a word and goes on with other data."""
    state = _take(_stream(), 3)[-1][1]
    others = {
        "weights.short": _stream(Mixture(SOURCES, {"short": 3, "long": 3, "middle": 1})),
        "by": _stream(Mixture(SOURCES, {"short": 2, "long": 3, "middle": 1}, by="documents")),
        "sources.middle.sha256": _stream(Mixture([*SOURCES[:2], _unique("middle", [14] * 9, 3001)], MIXTURE.weights)),
        "context": _stream(context=17),
        "packing.kind": _stream(packing="best_fit"),
        "packing.bins": _stream(packing=Packing(bins=3)),
        "seed": _stream(seed=8),
        "repeat": _stream(repeat=False),
        "pad_id": _stream(pad_id=0),
    }
    saved = json.loads(json.dumps(_stream().fingerprint()))
    check_fingerprint(saved, _stream(rows=4, process=(1, 2), workers=2).fingerprint())
    for entry, other in others.items():
        with pytest.raises(ValueError, match="check_fingerprint"):
            other.restore(state)
        with pytest.raises(ValueError, match=f"  {entry}: saved .*, here .*") as error:
            check_fingerprint(saved, other.fingerprint())
        assert "Use the saved settings" in str(error.value)
    with pytest.raises(ValueError) as error:
        check_fingerprint(saved, _stream(context=8, seed=1).fingerprint())
    assert "  context: saved 16, here 8\n  seed: saved 7, here 1\n" in str(error.value)
    with pytest.raises(ValueError, match=r"sources\.long\.kind: saved 'tokens', here '\(none\)'"):
        check_fingerprint(saved, _stream(Mixture(SOURCES, {"short": 1})).fingerprint())
    with pytest.raises(ValueError, match="version 99"):
        _stream().restore({**state, "version": 99})


@pytest.mark.parametrize("kind", KINDS)
def test_without_repeat_the_data_ends_with_a_padded_batch(kind):
    stream = _stream(packing=kind, repeat=False, rows=8)
    batches = list(stream)
    assert _ids(batch for batch, _ in batches) == Counter(t for s in SOURCES for d in s.documents for t in d.tolist())
    assert all((batch["segment_ids"][:, 0] > 0).all() for batch, _ in batches[:-1])
    last = batches[-1][0]
    empty = last["segment_ids"][:, 0] == 0
    assert empty.sum() < 8 and (last["tokens"][empty] == PAD).all() and not last["loss_mask"][empty].any()
    assert stream.metrics()["dropped_tokens"] == 0 == batches[-1][1]["held_tokens"]
    for state in (batches[-1][1], batches[-2][1]):
        again = _stream(packing=kind, repeat=False, rows=8)
        again.restore(state)
        assert len(list(again)) == (state is batches[-2][1])
    halves = [list(_stream(packing=kind, repeat=False, rows=8, process=(p, 2))) for p in range(2)]
    assert len(halves[0]) == len(halves[1]) == len(batches)  # one may have nothing but padding at the end


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_switch_loses_and_repeats_nothing(kind):
    """Other context, weights, packing and rows; a source pauses and comes back. Every token of the documents drawn comes once, or is
    still held; a document being read goes on in the new stage in longer pieces."""
    first = _stream(packing=Packing(kind, lanes=2, bins=2))
    batches = _take(first, 9)
    second = first.switch(context=48, mixture=Mixture(SOURCES, {"middle": 1, "long": 3}), packing="first_fit", rows=4)
    start = json.loads(json.dumps(second.state()))
    assert start["rows"] == 9 * 12 and start["held_tokens"] == batches[-1][1]["held_tokens"] > 0
    more = _take(second, 7)
    assert second.metrics()["dropped_tokens"] == 0
    assert any((batch["segment_ids"] == s).sum(1).max() > 16 for batch, _ in more for s in (1, 2))
    fresh = DataStream(second.mixture, context=48, rows=4, seed=7)  # a new process, from the seam and from later
    fresh.restore(start)
    assert all(_same(a[0], b[0]) for a, b in zip(more, _take(fresh, 7), strict=True))
    for done in range(1, 7):
        fresh.restore(json.loads(json.dumps(more[done - 1][1])))
        assert all(_same(a[0], b[0]) and a[1] == b[1] for a, b in zip(more[done:], _take(fresh, 7 - done), strict=True))
    left = Counter({t: n for t, n in _held(batches[-1][1], first.packing).items() if t < 2000})  # of the source that pauses
    assert Counter({t: n for t, n in _ids(batch for batch, _ in more).items() if t < 2000}) == left

    third = second.switch(context=16, mixture=Mixture(SOURCES[::-1]), packing=kind)  # other numbers
    last = _take(third, 30)
    assert third.metrics()["dropped_tokens"] == 0
    for batch, _ in last:
        assert (batch["domains"] == np.where(batch["segment_ids"] > 0, 3 - batch["tokens"] // 1000, 0)).all()
    drawn, given = _drawn(last[-1][1]), _ids(batch for batch, _ in [*batches, *more, *last])
    assert not given - drawn and (drawn - given).total() == last[-1][1]["held_tokens"]


def test_new_weights_hold_from_the_first_batch_of_a_stage():
    """What the sources gave in an earlier stage is no debt in the next."""
    stream = _stream(Mixture(SOURCES[:2], {"short": 1, "long": 9}), packing="concat_split", rows=20)
    _take(stream, 10)
    stream = stream.switch(context=16, mixture=Mixture(SOURCES[:2], {"short": 3, "long": 1}))
    for batch, _ in _take(stream, 3):
        assert [(batch["domains"][:, 0] == n).sum() for n in (0, 1)] == [15, 5]


def test_a_switch_that_would_lose_pieces_is_refused():
    stream = _stream(packing=Packing(lanes=2))
    _take(stream, 3)
    with pytest.raises(ValueError, match=r"the state holds pieces of long.*keep these among its sources"):
        stream.switch(context=16, mixture=Mixture([SOURCES[0], SOURCES[2]]))
    other = [*SOURCES[:2], _unique("middle", [14] * 9, 3001)]
    with pytest.raises(ValueError, match=r"source 'middle' holds other documents.*another name"):
        stream.switch(context=16, mixture=Mixture(other))
    _take(stream, 1)  # it still goes on


def test_mixture_proportions_padding_and_tokens_by_source():
    """Every batch holds the sources by weight to about a row, though documents of one are eight times as long as the other's."""
    corpora = {name: synthetic_corpus(documents=40, mean_words=words, seed=words) for name, words in (("a", 15), ("b", 120))}
    sources = [CorpusSource(name, corpus.train) for name, corpus in corpora.items()]
    stream = DataStream(Mixture(sources, {"a": 0.3, "b": 0.7}), context=128, rows=20)
    batches, counted, padding = [], np.zeros(2), 0
    for _ in range(60):
        batches += _take(stream, 1)
        batch, metrics = batches[-1][0], stream.metrics()
        used = batch["segment_ids"] > 0
        here = [int((used & (batch["domains"] == n)).sum()) for n in (0, 1)]
        assert here[0] / sum(here) == pytest.approx(0.3, abs=1.5 / 20)
        assert metrics["tokens"] == dict(zip("ab", here, strict=True))
        assert metrics["padding_share"] == pytest.approx(1 - used.mean())
        counted, padding = counted + here, padding + (~used).sum()
    assert counted[0] / counted.sum() == pytest.approx(0.3, abs=1 / 1000)
    assert metrics["tokens_total"] == dict(zip("ab", counted.tolist(), strict=True))
    assert metrics["padding_share_total"] == pytest.approx(padding / (60 * 20 * 128)) and 0 < padding
    assert metrics["dropped_tokens"] == 0 and metrics["wait"] > 0 and metrics["queue_depth"] == 0


def test_a_source_whose_lengths_are_wrong_is_named():
    class Wrong(TokenSource):
        def lengths(self):
            return super().lengths() + 1

    with pytest.raises(ValueError, match=r"source 'wrong', document \d+: 3 tokens .* lengths\(\) says 4"):
        next(DataStream(Mixture([Wrong("wrong", [[1, 2, 3]] * 4)]), context=8, rows=1))


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"rows=10 do not divide among 4 processes.*take 8 or 12 rows"):
        _stream(rows=10, process=(0, 4))
    with pytest.raises(ValueError, match="rows=2 do not divide among 3"):
        _stream(rows=2, process=(0, 3))
    with pytest.raises(ValueError, match="context=1"):
        _stream(context=1)
    with pytest.raises(ValueError, match="index < count"):
        _stream(process=(2, 2))
    with pytest.raises(ValueError, match="workers=-1"):
        _stream(workers=-1)
    with pytest.raises(ValueError, match="prefetch=0"):
        _stream(prefetch=0)

    class Other(ByteTokenizer):
        eos_id = 300

    text = CorpusSource("text", synthetic_corpus(documents=4).train)
    with pytest.raises(ValueError, match="'text' has another tokenizer"):
        DataStream(Mixture([text]), context=8, rows=1, tokenizer=Other())

    class NoPad(ByteTokenizer):
        pad_id = None

    with pytest.raises(ValueError, match="no pad token"):
        _stream(tokenizer=NoPad())
    assert _stream(tokenizer=NoPad(), pad_id=5).pad_id == 5
