"""From token ids to text that can be sent: whole characters, nothing of a stop string."""

import itertools

import numpy as np

from moejax.data import ByteTokenizer, train_bpe
from moejax.infer.server_text import StopText, TextStream

MIXED = "naïve 漢字 → 😀😀 é\u0301 end"


def test_only_whole_characters_are_given_out_and_joined_they_are_the_text():
    stream, out = TextStream(ByteTokenizer()), []
    for token in MIXED.encode():
        out.append(stream.add(token))
    assert "".join(out) == MIXED and stream.end() == "" and len([piece for piece in out if piece]) == len(MIXED)
    rng = np.random.default_rng(0)
    for _ in range(300):  # bytes that are no UTF-8, special tokens and ids beyond the tokenizer
        ids = rng.choice([*range(0x70, 0x100), 0xE2, 0x82, 0xAC, 0xF0, 0x9F, ByteTokenizer.eos_id, 400], 30).tolist()
        stream = TextStream(ByteTokenizer())
        joined = "".join(map(stream.add, ids)) + stream.end()
        assert joined == ByteTokenizer().decode([i for i in ids if i < 320], errors="replace")


def test_a_bpe_whose_tokens_end_inside_characters():
    tokenizer = train_bpe(["漢字漢字 kanji " * 5, MIXED * 3], 290)
    ids = tokenizer.encode(MIXED + "漢字漢字 😊 ").tolist()
    assert any("\ufffd" in tokenizer.decode([i]) for i in ids)  # else this tests nothing
    stream = TextStream(tokenizer)
    pieces = [stream.add(i) for i in ids]
    assert "".join(pieces) + stream.end() == MIXED + "漢字漢字 😊 " and not any("\ufffd" in piece for piece in pieces)


class Words:
    """A tokenizer that has no bytes: words that carry their space, dropped at the front of a text; pieces of a character."""

    vocab_size = 8
    pieces = ("▁the", "▁cat", "s", "▁", "\x01", "\x02", "", "▁ran")

    def decode(self, ids, *, errors="replace", show_special=False):
        text = "".join(self.pieces[i] for i in ids).replace("\x01\x02", "é").replace("\x01", "\ufffd").replace("\x02", "\ufffd")
        return text.replace("▁", " ").removeprefix(" ")


def test_a_tokenizer_without_bytes_gives_the_same_text_piece_by_piece():
    for length in range(1, 5):
        for ids in itertools.product(range(8), repeat=length):
            stream = TextStream(Words())
            pieces = [stream.add(i) for i in ids]
            if not set(ids) & {4, 5}:  # a lone half is text only when the other half does not follow
                assert "".join(pieces) + stream.end() == Words().decode(ids), ids
    stream = TextStream(Words())
    assert [stream.add(i) for i in (0, 6, 1, 4, 5, 2)] == ["the", "", " cat", "", "é", "s"]


def test_stop_strings_do_not_depend_on_where_tokens_end():
    cases = {
        ("abcabd", ("abd",)): "abc",
        ("aaab", ("aab",)): "a",
        ("xyz", ("xyz", "y")): "x",  # complete first, whatever begins first
        ("one STOP two", ("TOP", "STOP")): "one ",  # of two that end together the longer
        ("a→b😀c", ("→b",)): "a",
        ("nothing STO", ("STOP",)): "nothing STO",
    }
    for (text, stops), expected in cases.items():
        for cuts in itertools.product([False, True], repeat=len(text) - 1):
            parts, start = [], 0
            for place in [i + 1 for i, cut in enumerate(cuts) if cut] + [len(text)]:
                parts.append(text[start:place])
                start = place
            stop = StopText(stops)
            out = "".join(stop.add(part) for part in parts)
            assert stop.found == (expected != text) and out + stop.end() == expected, (text, parts)
