import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data.packing import KINDS, Packing, joined, tokens_of


def _draw(lengths):
    documents = iter([(index, 0, length) for index, length in enumerate(lengths)])
    return lambda: next(documents, None)


def _rows(packing, context, lengths):
    packer, draw, rows = packing.packer(context), _draw(lengths), []
    while (row := packer.next_row(draw)) is not None:
        rows.append(row)
    return rows


def _tokens(row):
    return [(document, t) for document, start, stop in row for t in range(start, stop)]


@pytest.mark.parametrize("context", [4, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_trl_4554_no_packer_throws_tails_away(kind, context):
    """https://github.com/huggingface/trl/issues/4554: best-fit packing cut long documents and dropped what was left of them."""
    documents = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]
    rows = _rows(Packing(kind), context, map(len, documents))
    out = Counter(documents[d][t] for row in rows for d, t in _tokens(row))
    assert out == Counter(range(1, 12))
    assert all(0 < tokens_of(row) <= context for row in rows)
    if kind == "concat_split":
        assert len(rows) == -(-11 // context)
    if kind == "one_doc":
        assert len(rows) == sum(-(-len(d) // context) for d in documents)


CASES = dict(
    kind=st.sampled_from(KINDS),
    context=st.integers(1, 24),
    lengths=st.lists(st.integers(1, 60), max_size=50),
    bins=st.integers(1, 5),
    lanes=st.integers(1, 5),
    max_segments=st.none() | st.integers(1, 4),
)


@settings(max_examples=150, deadline=None)
@given(**CASES, stop=st.integers(0, 40))
def test_every_token_once_in_order_and_the_state_is_all_there_is(kind, context, lengths, bins, lanes, max_segments, stop):
    packing = Packing(kind, bins=bins, lanes=lanes, max_segments=max_segments)
    rows = _rows(packing, context, lengths)
    assert Counter(x for row in rows for x in _tokens(row)) == Counter((d, t) for d, n in enumerate(lengths) for t in range(n))
    next_token = dict.fromkeys(range(len(lengths)), 0)
    pieces = Counter()
    for row in rows:
        assert 0 < tokens_of(row) <= context
        assert len(row) <= (max_segments or context)
        for document, start, end in row:
            assert start == next_token[document] < end
            next_token[document] = end
            pieces[document] += 1
    if kind == "concat_split":
        if max_segments is None:
            assert all(tokens_of(row) == context for row in rows[:-1])
    else:  # whole, or in as few pieces as there can be
        assert all(pieces[d] == -(-n // context) for d, n in enumerate(lengths))
        assert kind != "one_doc" or all(len(row) == 1 for row in rows)

    packer, draw, drawn = packing.packer(context), _draw(lengths), []

    def noted():
        document = draw()
        drawn.extend(_tokens([document]) if document else [])
        return document

    head = [row for _ in range(stop) if (row := packer.next_row(noted)) is not None]
    state = json.loads(json.dumps(packer.state()))
    again = packing.packer(context)
    again.restore(state)
    assert again.state() == packer.state()
    assert sorted([*_tokens(again.pieces()), *(x for row in head for x in _tokens(row))]) == sorted(drawn)
    tail = []
    while (row := again.next_row(draw)) is not None:
        tail.append(row)
    assert head + tail == rows


@pytest.mark.parametrize("kind", ["first_fit", "best_fit", "concat_split"])
def test_grain_1215_maxtext_2774_a_row_has_no_more_segments_than_the_limit(kind):
    """https://github.com/google/grain/pull/1215, https://github.com/AI-Hypercomputer/maxtext/pull/2774: more segments in a row than
    the attention kernel takes: a crash or wrong data."""
    lengths = [1] * 40 + [3, 2] * 20
    limited = _rows(Packing(kind, max_segments=5), 16, lengths)
    assert max(map(len, limited)) == 5 < max(map(len, _rows(Packing(kind), 16, lengths)))
    assert sum(map(tokens_of, limited)) == sum(lengths)


def test_first_fit_and_best_fit_choose_their_rows():
    lengths = [6, 8, 2, 4]  # rooms 4 and 2 after the first two; the 2 goes to the first row, or to the tightest
    first, best = (_rows(Packing(kind), 10, lengths) for kind in ("first_fit", "best_fit"))
    documents = lambda rows: sorted([piece[0] for piece in row] for row in rows)
    assert documents(first) == [[0, 2], [1], [3]]
    assert documents(best) == [[0, 3], [1, 2]]


def test_a_full_set_of_bins_closes_the_fullest():
    rows = _rows(Packing("first_fit", bins=2), 10, [6, 8, 7, 4])
    assert [[piece[0] for piece in row] for row in rows] == [[1], [0, 3], [2]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_document_does_not_fill_whole_batches(kind):
    """A file of 4,000 tokens among others, context 8: neighbouring rows come from different documents, `lanes` of them in turn."""
    lengths = [4000, *[160] * 100]
    rows = _rows(Packing(kind, lanes=8), 8, lengths)
    first = [row[0][0] for row in rows]
    while_others = first[: 8 * 100]
    assert max(sum(d == 0 for d in while_others[i : i + 16]) for i in range(len(while_others) - 16)) == 2
    one_by_one = [row[0][0] for row in _rows(Packing(kind, lanes=1), 8, lengths)]
    assert one_by_one[:500] == [0] * 500


def test_a_longer_row_takes_pieces_of_one_document_together():
    pieces = [(3, 0, 4), (3, 4, 9), (3, 10, 12), (4, 12, 13), (4, 13, 14)]
    assert joined(pieces) == [(3, 0, 9), (3, 10, 12), (4, 12, 14)]


def test_bins_shrink_with_the_context():
    sizes = [Packing().open_rows(context) for context in (64, 16384, 65536, 262144, 1 << 20)]
    assert sizes == [32, 32, 8, 4, 4] and Packing(bins=3).open_rows(64) == 3


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="'tight'; known are first_fit"):
        Packing("tight")
    for setting in ("bins", "lanes", "max_segments"):
        with pytest.raises(ValueError, match=f"{setting}=0"):
            Packing(**{setting: 0})
    with pytest.raises(ValueError, match="context=0"):
        Packing().packer(0)
