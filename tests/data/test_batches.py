import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data import (
    ByteTokenizer,
    CountModels,
    Document,
    PackedBatches,
    TokenStream,
    synthetic_corpus,
    valid_targets,
)

TOKENIZER = ByteTokenizer()
DOCUMENTS = [Document(f"{i}", bytes([i]) * n) for i, n in enumerate([1, 40, 7, 130, 2, 64, 15])]


def _stream(documents=DOCUMENTS):
    return TokenStream(documents, TOKENIZER)


@settings(max_examples=40, deadline=None)
@given(context=st.integers(2, 300), batch_size=st.integers(1, 9), seed=st.integers(0, 2**40))
def test_every_token_comes_once_an_epoch_and_no_segment_crosses_documents(context, batch_size, seed):
    stream = _stream()
    batches = PackedBatches(stream, context=context, batch_size=batch_size, seed=seed)
    rows, step = [], 0
    while len(rows) < batches.rows_per_epoch:
        batch = batches.batch(step)
        rows += list(zip(batch["tokens"], batch["segment_ids"], strict=True))
        step += 1
    seen: Counter = Counter()
    for tokens, segments in rows[: batches.rows_per_epoch]:
        assert ((tokens == TOKENIZER.pad_id) == (segments == 0)).all()
        used = segments[segments > 0]
        assert (np.diff(used) >= 0).all() and set(used.tolist()) == set(range(1, used.max() + 1))
        assert (segments[len(used) :] == 0).all()
        for segment in range(1, used.max() + 1):
            piece = tokens[segments == segment]
            body = piece[piece < 256]
            assert len(set(body.tolist())) <= 1  # each document is one byte value here
            assert (piece[1:] != TOKENIZER.bos_id).all() and (piece[:-1] != TOKENIZER.eos_id).all()
            assert len(body) <= 130
        seen.update(tokens[segments > 0].tolist())
    assert seen == Counter(stream.tokens.tolist())


def test_batches_are_a_function_of_seed_and_step():
    def make(seed):
        return PackedBatches(_stream(), context=16, batch_size=3, seed=seed)

    forward = [make(0).batch(step) for step in range(20)]
    fresh = make(0)
    for step in reversed(range(20)):  # any order, across epochs
        again = fresh.batch(step)
        assert all((again[k] == forward[step][k]).all() for k in again)
        assert again["tokens"].dtype == again["segment_ids"].dtype == np.int32
    assert any((make(1).batch(s)["tokens"] != forward[s]["tokens"]).any() for s in range(3))
    rows = fresh.rows_per_epoch
    one = PackedBatches(_stream(), context=16, batch_size=rows, seed=0)
    assert (one.batch(0)["tokens"] != one.batch(1)["tokens"]).any()  # the next epoch has another order


def test_targets_are_the_next_byte_of_the_document():
    corpus = synthetic_corpus(documents=12, mean_words=30)
    batches = PackedBatches(_stream(corpus.train), context=33, batch_size=4, seed=2)
    pairs = Counter()
    for step in range(-(-batches.rows_per_epoch // 4) - 1):
        batch = batches.batch(step)
        valid = valid_targets(batch["tokens"], batch["segment_ids"])
        pairs.update(zip(batch["tokens"][:, :-1][valid].tolist(), batch["tokens"][:, 1:][valid].tolist(), strict=True))
    truth = Counter()
    for document in corpus.train:
        ids = TOKENIZER.encode(document.data, bos=True, eos=True).tolist()
        truth.update(itertools.pairwise(ids))
    assert not pairs - truth
    assert pairs.total() > 0.85 * truth.total()  # what falls on a row's first token is no target


def test_documents_shorter_than_a_row_are_padded_at_the_end():
    batch = PackedBatches(_stream(DOCUMENTS[:1]), context=8, batch_size=2, seed=0).batch(0)
    assert batch["tokens"].tolist() == [[257, 0, 258, 256, 256, 256, 256, 256]] * 2
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * 2


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="context=1"):
        PackedBatches(_stream(), context=1, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        PackedBatches(_stream(), context=8, batch_size=0, seed=0)
    with pytest.raises(ValueError, match="step=-1"):
        PackedBatches(_stream(), context=8, batch_size=1, seed=0).batch(-1)
    with pytest.raises(ValueError, match="no documents"):
        _stream([])


def test_count_models_against_brute_force(monkeypatch):
    monkeypatch.setattr("moejax.data.counts.CHUNK", 100)  # many chunks
    corpus = synthetic_corpus(documents=10, mean_words=20)
    models = CountModels(_stream(corpus.train))
    pairs, firsts, seconds = Counter(), Counter(), Counter()
    for document in corpus.train:
        ids = [257, *document.data, 258]
        for a, b in itertools.pairwise(ids):
            pairs[a, b] += 1
            firsts[a] += 1
            seconds[b] += 1
    batch = PackedBatches(_stream(corpus.heldout), context=50, batch_size=3, seed=0).batch(0)
    unigram = bigram = size = 0.0
    for row, segments in zip(batch["tokens"].tolist(), batch["segment_ids"].tolist(), strict=True):
        for t in range(49):
            if segments[t] == segments[t + 1] != 0:
                a, b = row[t], row[t + 1]
                p = (seconds[b] + 1) / (seconds.total() + 320)
                unigram -= np.log2(p)
                bigram -= np.log2((pairs[a, b] + p) / (firsts[a] + 1))
                size += b < 256
    score = models.score(batch)
    assert score["unigram"] == pytest.approx(unigram, rel=1e-12)
    assert score["bigram"] == pytest.approx(bigram, rel=1e-12)
    assert score["bytes"] == size > 0
    assert bigram < unigram


def test_count_models_are_distributions():
    models = CountModels(_stream())
    np.testing.assert_allclose((2.0**-models.unigram_bits).sum(), 1.0, rtol=1e-12)
    np.testing.assert_allclose((2.0**-models.bigram_bits).sum(axis=1), 1.0, rtol=1e-12)
