import numpy as np
import pytest

from moejax.data import ByteTokenizer, Document, synthetic_corpus
from moejax.data.mixture import Balance, Draws, Mixture
from moejax.data.sources import CorpusSource, LengthRange, Source, TokenSource, tokenizer_fingerprint


def _source(name, lengths, start=0):
    ends = start + np.cumsum(lengths)
    return TokenSource(name, [np.arange(end - n, end) for n, end in zip(lengths, ends, strict=True)])


SOURCES = [_source("short", [3, 5, 4, 8]), _source("long", [700, 1300, 1000]), _source("middle", [50] * 7)]


def _rows(mixture, count, context=100, given=None):
    """The sources that give the next rows; half of the rows are a third empty."""
    balance, turns = Balance(mixture, context, given), []
    for i in range(count):
        turns.append(balance.next())
        balance.add(turns[-1], context if (i * 7) % 3 else context * 2 // 3)
    return turns, balance


@pytest.mark.parametrize("weights", [{"short": 1, "long": 1, "middle": 2}, {"short": 0.003, "middle": 0.997}, {"long": 3, "short": 2}])
def test_shares_of_the_tokens_are_kept_to_a_row(weights):
    mixture = Mixture(SOURCES, weights)
    for count in (1, 2, 7, 50, 2000):
        turns, balance = _rows(mixture, count)
        assert turns[0] == max(weights, key=weights.__getitem__)
        total = sum(balance.given.values())
        for name, share in mixture.shares().items():
            assert share == pytest.approx(weights[name] / sum(weights.values()))
            assert abs(balance.given[name] - share * total) < 1.2 * 100


def test_turns_are_a_function_of_what_was_given():
    mixture = Mixture(SOURCES, {"short": 1, "long": 1, "middle": 3})
    turns, _ = _rows(mixture, 90)
    for stop in (0, 3, 30, 87):  # the pattern of empty rows repeats after 3
        _, balance = _rows(mixture, stop)
        assert _rows(mixture, 90 - stop, given=balance.given)[0] == turns[stop:]
    assert _rows(Mixture(SOURCES, {"middle": 3, "long": 1, "short": 1}), 90)[0] == turns  # names in another order


def test_weights_by_documents():
    """Documents of 5 and of 1,000 tokens on average: as many of each is 200 times the tokens."""
    shares = Mixture(SOURCES, {"short": 1, "long": 1}, by="documents").shares()
    assert shares == {"short": pytest.approx(5 / 1005), "long": pytest.approx(1000 / 1005)}


def test_without_weights_all_epochs_end_together():
    for by in ("tokens", "documents"):
        shares = Mixture(SOURCES, by=by).shares()
        assert shares == {s.name: pytest.approx(s.lengths().sum() / 3370) for s in SOURCES} and sum(shares.values()) == pytest.approx(1)


def test_every_epoch_is_an_order_of_its_own_with_each_document_once():
    draws = Draws(Mixture(SOURCES), seed=1)
    for number, source in enumerate(SOURCES):
        drawn = [draws.next(number) for _ in range(40 * len(source))]
        assert all(length == source.lengths()[document] for document, length in drawn)
        epochs = [tuple(document for document, _ in drawn[i : i + len(source)]) for i in range(0, len(drawn), len(source))]
        assert all(sorted(epoch) == list(range(len(source))) for epoch in epochs) and len(set(epochs)) > 4
        assert draws.cursors[source.name] == len(drawn)


def test_a_draw_is_a_function_of_seed_and_cursor():
    """Whatever the other sources did, whatever the number of the source; so a cursor carries over to another mixture."""
    draws = Draws(Mixture(SOURCES), seed=5)
    drawn = [draws.next(2)[0] for _ in range(50)]
    other = Mixture([SOURCES[2], SOURCES[0]], {"short": 1})
    for stop in (0, 1, 6, 7, 49):
        again = Draws(other, seed=5, cursors={"middle": stop, "gone": 12})
        again.next(1)
        assert [again.next(0)[0] for _ in range(50 - stop)] == drawn[stop:]
        assert again.cursors == {"middle": 50, "gone": 12, "short": 1}
    different = Draws(Mixture(SOURCES), seed=6)
    assert [different.next(2)[0] for _ in range(50)] != drawn
    twin = Draws(Mixture([_source("twin", [50] * 7)]), seed=5)
    assert [twin.next(0)[0] for _ in range(50)] != drawn  # two sources do not share an order


def test_without_repeat_each_document_comes_once():
    draws = Draws(Mixture(SOURCES), seed=0, repeat=False)
    for number, source in enumerate(SOURCES):
        assert sorted(draws.next(number)[0] for _ in range(len(source))) == list(range(len(source)))
        assert draws.next(number) is None and draws.next(number) is None
    assert draws.cursors == {source.name: len(source) for source in SOURCES}


def test_bad_mixtures_are_refused():
    with pytest.raises(ValueError, match=r"weight of 'long' is 0.* Drop 'long' from the weights"):
        Mixture(SOURCES, {"short": 1, "long": 0})
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0 and finite"):
            Mixture(SOURCES, {"short": weight})
    with pytest.raises(ValueError, match="'prose', which is no source; the sources are short, long, middle"):
        Mixture(SOURCES, {"prose": 1})
    with pytest.raises(ValueError, match="name at least one"):
        Mixture(SOURCES, {})
    with pytest.raises(ValueError, match="name of its own"):
        Mixture([SOURCES[0], SOURCES[0]])
    with pytest.raises(ValueError, match="'tokens' or by 'documents'"):
        Mixture(SOURCES, by="rows")


def test_corpus_source():
    documents = [Document("a", b"hello"), Document("b", "é".encode())]
    source = CorpusSource("text", documents)
    assert isinstance(source, Source) and len(source) == 2
    assert source.lengths().tolist() == [7, 4] and source[1].mask is None
    assert source[0].ids.tolist() == [257, *b"hello", 258] and source[0].ids.dtype == np.int32
    renamed = CorpusSource("text", [Document("z", documents[0].data), documents[1]])
    assert renamed.fingerprint() == source.fingerprint() != CorpusSource("text", documents[::-1]).fingerprint()
    shifted = CorpusSource("text", [Document("a", b"hell"), Document("b", b"o" + documents[1].data)])
    assert shifted.fingerprint() != source.fingerprint()

    class Pairs(ByteTokenizer):
        """Two bytes a token: lengths are known only when all documents are encoded, which happens once."""

        calls = 0

        def encode(self, text, **settings):
            Pairs.calls += 1
            return super().encode(text, **settings)[::2]

    pairs = CorpusSource("text", documents, Pairs())
    assert pairs.lengths().tolist() == [4, 2] == [len(pairs[i].ids) for i in (0, 1)]
    assert Pairs.calls == 2
    assert pairs.fingerprint()["tokenizer"] != source.fingerprint()["tokenizer"] == tokenizer_fingerprint(ByteTokenizer())


def test_token_source():
    source = TokenSource("t", [[1, 2, 3], [4]], masks=[[True, False, True], [True]])
    assert source[0].ids.dtype == np.int32 and source[0].mask.tolist() == [True, False, True] and source.lengths().tolist() == [3, 1]
    plain = TokenSource("t", [[1, 2, 3], [4]])
    assert len({str(s.fingerprint()) for s in (source, plain, TokenSource("t", [[1, 2], [3, 4]]))}) == 3
    for bad in ([[]], [[1.5]], [[-1]], [[2**31]], [[[1]]]):
        with pytest.raises(ValueError, match="source 't', document 0"):
            TokenSource("t", bad)
    with pytest.raises(ValueError, match="masks have shapes"):
        TokenSource("t", [[1, 2]], masks=[[True]])
    with pytest.raises(ValueError, match="at least one"):
        TokenSource("t", [])


def test_length_range():
    corpus = synthetic_corpus(documents=30, mean_words=40)
    whole = CorpusSource("all", corpus.train)
    middle = int(np.median(whole.lengths()))
    long = LengthRange("long", whole, min_tokens=middle)
    assert 0 < len(long) < len(whole) and long.lengths().min() >= middle
    assert [len(long[i].ids) for i in range(len(long))] == long.lengths().tolist()
    assert long.fingerprint() != LengthRange("long", whole, max_tokens=middle).fingerprint()
    with pytest.raises(ValueError, match=r"no document of 'all' has 9999999 to more tokens; they have \d+ to \d+"):
        LengthRange("long", whole, min_tokens=9999999)
