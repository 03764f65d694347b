"""Tokenizers from files against an independent BPE by ranks, against the library's own loader, and case F6."""

import base64
import itertools
import json
import random
import re
import string
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data import ByteTokenizer, FileTokenizer, load_tokenizer
from moejax.data.tiktoken_file import KIMI_PATTERN, merges, unspelled

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hub`")
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers  # noqa: E402

# Words of several scripts, digits, contractions, blanks and newlines, Han beside other letters, an emoji of several code points.
SAMPLES = [
    "It's a test: don't WE'LL they'VE I'M he'd HELLOworld camelCase XMLHttp",
    "1234567 3.14159 ½ ٣٤٥ Ⅻ x1y22z",
    "你好世界。中国hello世界 々〇 日本語のテキスト、カタカナー",
    "Привет, мир! naïve café Ünïcödé ǅungla ſtraße e\u0301a\u0308 한국어",
    "a    b\t\tc \n\n  d\r\n\r\ne   \n\tf\u00a0\u3000g\u2028h\x85i   ",
    "🚀🔥👨‍👩‍👧 => <think>x</think> [BOS] <|im_end|> a_b-c/d...!!!\n;;\n",
]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ALPHABET = sorted({*"".join(SAMPLES), *string.printable})
SPACES = "\t\n\x0b\x0c\r \x85\u00a0\u2028\u3000"


def _kimi_pieces():
    """The pattern for ALPHABET in Python's `re`, each class written out from `unicodedata`."""

    def members(test):
        return "[" + "".join(re.escape(c) for c in ALPHABET if test(c, unicodedata.category(c))) + "]"

    def han(c):
        return unicodedata.name(c, "").startswith("CJK UNIFIED IDEOGRAPH") or c in "々〇"

    upper = members(lambda c, kind: (kind in ("Lu", "Lt", "Lm", "Lo") or kind[0] == "M") and not han(c))
    lower = members(lambda c, kind: (kind in ("Ll", "Lm", "Lo") or kind[0] == "M") and not han(c))
    mark = members(lambda c, kind: kind[0] not in "LN" and c not in "\r\n") + "?"
    blank, full = members(lambda c, _: c in SPACES), members(lambda c, _: c not in SPACES)
    other = members(lambda c, kind: c not in SPACES and kind[0] not in "LN")
    number = members(lambda _, kind: kind[0] == "N")
    tail = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = f"{mark}{upper}*{lower}+{tail}|{mark}{upper}+{lower}*{tail}"
    rest = rf"{number}{{1,3}}| ?{other}+[\r\n]*|{blank}*[\r\n]+|{blank}+(?!{full})|{blank}+"
    return re.compile(f"{members(lambda c, _: han(c))}+|{words}|{rest}")


PIECES = _kimi_pieces()


def by_ranks(ranks: dict[bytes, int], text: str, pieces=PIECES.findall) -> list[int]:
    """BPE by ranks as it is defined: in each piece merge the neighbours whose concatenation has the lowest rank, until none has."""
    ids, cut = [], pieces(text)
    assert "".join(cut) == text
    for piece in cut:
        data = piece.encode()
        parts = [data] if data in ranks else [bytes([b]) for b in data]
        while True:
            found = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not found:
                break
            _, i = min(found)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def write_ranks(path, tokens: list[bytes]):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def train(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    cut = [pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False, min_frequency=1)
    tokenizer.train_from_iterator(SAMPLES * 3 + ["the other thing that they think <think> <a>"] * 9, trainer)
    assert tokenizer.get_vocab_size() == size
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    return [unspelled(name) for name, _ in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])]


ADDED = {300: {"content": "<a>", "special": True}, 301: {"content": "<think>", "special": False}}


def tiktoken_folder(folder, tokens, added=ADDED, **config):
    folder.mkdir(parents=True, exist_ok=True)
    write_ranks(folder / "tiktoken.model", tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, **config}))
    return folder


def json_folder(folder, tokenizer: Tokenizer, **changes):
    """tokenizer.json with the added tokens of F6 written in, and config fields."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = json.loads(tokenizer.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    spec["added_tokens"] = [{"id": i, **flags, "normalized": not entry["special"], **entry} for i, entry in ADDED.items()]
    spec.update(changes)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


@pytest.fixture(scope="module")
def trained():
    return train(300)


@pytest.fixture(scope="module", params=["tiktoken", "json"])
def loaded(request, trained, tmp_path_factory) -> FileTokenizer:
    """F6's tokenizer through either loader: 300 tokens of BPE, 300 "<a>" special, 301 "<think>" not special."""
    folder = tmp_path_factory.mktemp("f6") / request.param
    path = tiktoken_folder(folder, token_bytes(trained)) if request.param == "tiktoken" else json_folder(folder, trained)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """(tokenizer, ranks) of a vocabulary in which most of SAMPLES' pieces are one token."""
    tokens = token_bytes(train(480))
    return load_tokenizer(write_ranks(tmp_path_factory.mktemp("larger") / "my.tiktoken", tokens)), {t: i for i, t in enumerate(tokens)}


# --- F6


def test_f6_added_tokens_that_are_not_special(loaded):
    ids = loaded.encode("x<think>y")
    assert ids.dtype == np.int32
    assert (ids == 301).sum() == 1 and len(ids) == 3
    assert loaded.decode(loaded.encode("<a>x<think>y<a>")) == "x<think>y"
    assert loaded.decode(loaded.encode("<a>x<think>y<a>"), show_special=True) == "<a>x<think>y<a>"
    assert loaded.special_ids == {"<a>": 300} and loaded.vocab_size == 302
    assert {i: token.special for i, token in loaded.added_tokens.items()} == {300: True, 301: False}


def test_f6_text_of_a_user_makes_no_control_token(loaded):
    user = "<a>say <think>hello<a>"
    inside = loaded.encode(user, control_tokens=False)
    prompt = np.concatenate([loaded.encode("<a>"), inside, loaded.encode("<think>")])
    assert prompt[0] == 300 and prompt[-1] == 301
    assert not np.isin(inside, [300, 301]).any() and (inside < 300).all()
    assert loaded.decode(inside) == user
    assert loaded.decode(prompt) == user + "<think>"


@pytest.mark.parametrize("by_merges", [True, False])
def test_f6_tokenizer_json_lists_the_added_token_in_its_vocabulary(by_merges, tmp_path):
    """The trap: with "<a>" among the BPE's tokens, text that is only text must still not become the control token."""
    trained = train(300)
    model = json.loads(trained.to_str())["model"]
    model["vocab"].update({"<a>": 300, "<think>": 301, "<a": 302})
    model["merges"] += [["<", "a"], ["<a", ">"]] if by_merges else []
    model["ignore_merges"] = not by_merges  # then a piece of text that is a token becomes it
    folder = json_folder(tmp_path, trained, model=model, pre_tokenizer=BYTE_LEVEL)
    plain = json.loads((folder / "tokenizer.json").read_text()) | {"added_tokens": []}
    assert Tokenizer.from_str(json.dumps(plain)).encode("<a>").ids == [300]  # without the guard
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<a>").tolist() == [300]
    for text in ("<a>", "<think>", "x<a>y<think>"):
        inside = tokenizer.encode(text, control_tokens=False)
        assert not np.isin(inside, [300, 301]).any() and tokenizer.decode(inside) == text


def test_f6_ranks_list_the_added_token(tmp_path):
    tokens = [*(t for t in token_bytes(train(300)) if t not in (b"<a", b"<a>")), b"<a", b"<a>", b"<think>"]
    added = {400: ADDED[300], 401: ADDED[301]}
    tokenizer = load_tokenizer(tiktoken_folder(tmp_path, tokens, added), pattern=r"[\s\S]+")
    assert tokenizer.encode("<a>").tolist() == [400] and tokenizer.encode("<think>").tolist() == [401]
    assert tokenizer.encode("<a<a>").tolist() == [tokens.index(b"<a"), 400]
    for text in ("<a>", "<think>"):  # a token of the BPE with that spelling is text
        inside = tokenizer.encode(text, control_tokens=False)
        assert inside.tolist() == [tokens.index(text.encode())] and tokenizer.decode(inside) == text


# --- encoding


def test_encoding_equals_bpe_by_ranks(larger, loaded):
    tokenizer, ranks = larger
    for text in SAMPLES:
        assert tokenizer.encode(text).tolist() == by_ranks(ranks, text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    small = {token: i for i, token in enumerate(token_bytes(train(300)))}
    rng = random.Random(0)
    strings = [*ALPHABET, "'s", "'RE", " it", "\r\n", "   ", "hello", "你好", "👨‍👩‍👧", "12", "st"]
    for _ in range(1500):
        text = "".join(rng.choices(strings, k=rng.randint(0, 25)))
        assert tokenizer.encode(text).tolist() == by_ranks(ranks, text), text
        assert loaded.encode(text, control_tokens=False).tolist() == by_ranks(small, text), text
    assert len(tokenizer.encode("the other thing")) == 3


def test_any_ranks_not_only_trained_ones(tmp_path):
    """Vocabularies of random strings of two letters: several pairs make one token, and some tokens no pair makes."""
    lone = 0
    for seed in range(40):
        rng = random.Random(seed)
        strings = {"".join(rng.choices("ab", k=rng.choice([2, 3, 3, 4, 5, 6]))).encode() for _ in range(rng.randint(3, 25))}
        tokens = [bytes([i]) for i in range(256)] + rng.sample(sorted(strings), len(strings))
        ranks = {token: i for i, token in enumerate(tokens)}
        tokenizer = load_tokenizer(write_ranks(tmp_path / "random.tiktoken", tokens), pattern=r"[^ ]+| ")
        for _ in range(60):
            text = "".join(rng.choices("aaaabbbb ", k=rng.randint(1, 24)))
            expected = by_ranks(ranks, text, pieces=re.compile("[^ ]+| ").findall)
            assert tokenizer.encode(text).tolist() == expected, (seed, text)
        for token in strings:  # each token alone is itself, whether or not a pair makes it
            assert tokenizer.encode(token).tolist() == [ranks[token]]
        lone += len(strings) - len(merges(tokens))
    assert lone > 10  # the cases that only `ignore_merges` gets right are among them


@settings(deadline=None, max_examples=150)  # a busy machine is no failure
@given(st.text(max_size=80), st.booleans())
def test_any_text_round_trips(loaded, text, control_tokens):
    ids = loaded.encode(text, control_tokens=control_tokens)
    assert loaded.decode(ids, errors="strict", show_special=True) == text
    assert loaded.decode_bytes(ids) == text.encode()
    assert (loaded.check(ids) == ids).all()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(["<a>", "<think>", "<", "a>", "think", "é", "你", " ", "\n", "🚀"]), max_size=12))
def test_added_tokens_in_text_are_found(loaded, parts):
    text = "".join(parts)
    ids = loaded.encode(text)
    assert (ids == 300).sum() == text.count("<a>") and (ids == 301).sum() == text.count("<think>")
    assert loaded.decode(ids, show_special=True) == text
    assert loaded.decode(ids) == "".join(text.split("<a>"))
    assert (loaded.encode(text, control_tokens=False) < 300).all()


def test_halves_of_characters_decode(loaded):
    a, b = (next(i for i in range(256) if loaded.decode_bytes([i]) == byte) for byte in (b"\xc3", b"\xa9"))
    assert loaded.decode([a]) == "\ufffd" and loaded.decode([b, a]) == "\ufffd\ufffd"
    assert loaded.decode([a, 301, b]) == "\ufffd<think>\ufffd"  # not glued to one character
    assert loaded.decode([a, 300, b]) == "é" and loaded.decode([a, 300, b], show_special=True) == "\ufffd<a>\ufffd"
    with pytest.raises(UnicodeDecodeError):
        loaded.decode([a], errors="strict")
    rng = np.random.default_rng(0)
    for _ in range(50):
        assert isinstance(loaded.decode(rng.integers(0, loaded.vocab_size, 30)), str)


# --- the interface


def test_ends_come_from_the_config(trained, tmp_path):
    added = {310: {"content": "[BOS]", "special": True}, 315: {"content": "[EOS]", "special": True}}
    names = {"bos_token": "[BOS]", "eos_token": {"content": "[EOS]", "lstrip": False}, "pad_token": None}
    for folder in (
        tiktoken_folder(tmp_path / "t", token_bytes(trained), added, **names),
        json_folder(tmp_path / "j", trained, added_tokens=[]),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, **names}))
        for path in (folder, next(p for p in folder.iterdir() if p.stem in ("tokenizer", "tiktoken"))):
            tokenizer = load_tokenizer(path)
            assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (310, 315, None)
            ids = tokenizer.encode("a", bos=True, eos=True)
            assert ids[0] == 310 and ids[-1] == 315 and len(ids) == 3 and ids.dtype == np.int32
            assert tokenizer.encode("[BOS]a[EOS]").tolist() == ids.tolist()
            assert tokenizer.vocab_size == 316
            # The ids between are no token's: left out, or shown by number.
            assert tokenizer.decode([310, 312, ids[1], 305]) == "a"
            assert tokenizer.decode([312, ids[1]], show_special=True) == "<|reserved_token_312|>a"
    assert "vocab_size=316" in repr(tokenizer)


def test_no_ends_without_a_config(larger):
    tokenizer, ranks = larger
    assert tokenizer.bos_id is tokenizer.eos_id is tokenizer.pad_id is None
    assert tokenizer.vocab_size == len(ranks) and tokenizer.special_ids == {}
    assert tokenizer.encode("").tolist() == [] and tokenizer.encode("").dtype == np.int32 and tokenizer.decode([]) == ""
    for end in ("bos", "eos"):
        with pytest.raises(ValueError, match=f"no {end} token"):
            tokenizer.encode("a", **{end: True})


def test_the_interface_is_that_of_bytes(loaded):
    for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "special_ids", "encode", "decode", "decode_bytes", "check"):
        assert hasattr(ByteTokenizer(), name) and hasattr(loaded, name)
    assert loaded.encode("né".encode()).tolist() == loaded.encode("né").tolist()


@pytest.mark.parametrize("ids", [[302], [-1], [0.5], [True, False]])
def test_ids_outside_the_vocabulary_are_refused(loaded, ids):
    with pytest.raises(ValueError, match=r"token ids hold .*\[0, 302\)"):
        loaded.decode(ids)


def test_only_valid_text_is_encoded(loaded):
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        loaded.encode("ab\ud800")
    with pytest.raises(ValueError, match="no UTF-8"):
        loaded.encode(b"\xff")
    with pytest.raises(ValueError, match="text is int"):
        loaded.encode(7)


def test_text_is_never_lost(tmp_path):
    """The library leaves out what it has no token for; here it is an error that names it."""
    path = write_ranks(tmp_path / "few.tiktoken", [b"a", b"b", b"ab", b"\xc3"])
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("abab").tolist() == [2, 2]
    with pytest.raises(ValueError, match=r"no token for 'é' \(character 2"):
        tokenizer.encode("abé")
    # An added token that is also the vocabulary's only way to write a character: as text it cannot be written.
    spec = {"model": {"type": "BPE", "vocab": {"a": 0, "!": 1}, "merges": []}, "decoder": BYTE_LEVEL, "pre_tokenizer": BYTE_LEVEL,
            "added_tokens": [{"id": 1, "content": "!", "special": True}]}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("a!").tolist() == [0, 1]
    with pytest.raises(ValueError, match="no token for '!'"):
        tokenizer.encode("a!", control_tokens=False)


# --- tokenizer.json as the library reads it


def test_tokenizer_json_equals_the_library(trained, tmp_path):
    """Added tokens with every flag, a normaliser, cutting and padding set in the file: the ids are the library's own."""
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.normalizer = normalizers.NFC()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(["<a>", AddedToken("<b>", lstrip=True), AddedToken("<c>", rstrip=True)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("word", single_word=True), "<a><b>", AddedToken("é!")])
    expected = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    here = load_tokenizer(tmp_path / "tokenizer.json")
    rng = random.Random(1)
    strings = ["<a>", "<b>", "<c>", "<think>", "word", "<a><b>", "é!", "e\u0301!", " ", "  ", "x", "你", "\n", "word."]
    for _ in range(500):
        text = "".join(rng.choices(strings, k=rng.randint(0, 14)))
        ids = expected.encode(text, add_special_tokens=False).ids
        assert here.encode(text).tolist() == ids, text
        if expected.token_to_id("é!") not in ids:  # the library takes such a token's characters for bytes: "\ufffd!"
            assert here.decode(ids) == expected.decode(ids, skip_special_tokens=True), text
        assert (here.encode(text, control_tokens=False) < 300).all()
    assert here.decode(here.encode("xe\u0301!")) == "xé!"


def _word_level():
    return Tokenizer(models.WordLevel({"[UNK]": 0, "hello": 1, "world": 2, "<a>": 3}, unk_token="[UNK]"))


def _metaspace():
    """As SentencePiece files are converted: a mark for blanks, bytes as tokens of their own."""
    vocab = {"<unk>": 0, "<s>": 1, "<a>": 2, **{f"<0x{i:02X}>": 3 + i for i in range(256)}}
    for name in ("▁", "h", "e", "l", "o", "w", "r", "d", "<", "a", ">", "he", "ll", "hell", "hello", "▁hello", "<a"):
        vocab.setdefault(name, len(vocab))
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("<", "a"), ("<a", ">")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _unigram():
    pieces = [("<unk>", 0.0), ("<a>", -1.0), ("▁hello", -2.0), ("▁", -3.0), ("<", -4.0), ("a", -4.0), (">", -4.0), ("hello", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


@pytest.mark.parametrize("make", [_word_level, _metaspace, _unigram])
def test_other_models_than_byte_level_bpe(make, tmp_path):
    tokenizer = make()
    if make is _word_level:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<a>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    here = load_tokenizer(tmp_path)
    special, think = here.special_ids["<a>"], tokenizer.token_to_id("<think>")
    for text in ("hello <a> world", "<a>hello hello", "hello<think>hello é", "", " <a>"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert here.encode(text).tolist() == ids
        assert here.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
        assert here.decode(ids, show_special=True) == tokenizer.decode(ids, skip_special_tokens=False)
        assert not np.isin(here.encode(text, control_tokens=False), [special, think]).any()
    assert here.encode("hello").tolist() == here.encode("hello", control_tokens=False).tolist()
    with pytest.raises(ValueError, match="only byte-level BPE"):
        here.decode_bytes([0])
    with pytest.raises(ValueError, match='errors="replace"'):
        here.decode([0], errors="strict")


def test_ends_that_only_the_vocabulary_lists(tmp_path):
    _metaspace().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    here = load_tokenizer(tmp_path)
    assert here.bos_id == 1 and here.special_ids == {"<s>": 1} and here.encode("<s>hello").tolist()[0] == 1
    assert 1 not in here.encode("<s>", control_tokens=False)


def test_the_config_has_the_last_word_on_flags(trained, tmp_path):
    folder = json_folder(tmp_path, trained)
    decoder = {300: {"content": "<a>", "special": False}, 302: {"content": "<b>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    here = load_tokenizer(folder)
    assert here.special_ids == {"<b>": 302} and here.decode([300, 301, 302]) == "<a><think>"
    assert here.encode("<a><think><b>").tolist() == [300, 301, 302]


def test_flags_that_the_config_leaves_out(trained, tmp_path):
    """As the library has it, special tokens are looked for in the text as it is and the others after the normaliser."""
    tokenizer = Tokenizer.from_str(trained.to_str())
    tokenizer.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    decoder = {310: {"content": "<S>", "special": True}, 311: {"content": "<T>"}, 320: {"content": "<s>", "special": True}}
    folder = json_folder(tmp_path, tokenizer, added_tokens=[])
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    here = load_tokenizer(folder)
    assert here.encode("<S><s><T><t>").tolist() == [310, 320, 311, 311]
    assert load_tokenizer(folder).decode([310, 311, 320, 311]) == "<T><T>"


def test_one_word_only(trained, tmp_path):
    """Inside a word such a token is text, also where the text is cut to just it and where the ranks list it."""
    tokens = [*token_bytes(trained), b"ab"]
    added = {400: {"content": "<q", "single_word": True}, 402: {"content": "ab", "single_word": True}}
    here = load_tokenizer(tiktoken_folder(tmp_path, tokens, added))
    assert here.encode("1 ab 1").tolist().count(402) == 1
    inside = here.encode("1ab1")
    assert 402 not in inside and here.decode(inside) == "1ab1"
    inside = load_tokenizer(tmp_path, pattern="<q|.").encode("1<q1")
    assert 400 not in inside and here.decode(inside) == "1<q1"


def test_ids_in_a_vocabulary_with_holes(tmp_path):
    """Added tokens before, between and after the vocabulary's ids, in every kind of model."""
    vocab = {"a": 2, "b": 3, "ab": 7, "[UNK]": 9}
    added = [{"id": i, "content": f"<{i}>", "special": i == 4, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
             for i in (0, 4, 8, 12, 10)]  # fmt: skip
    bpe = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
    words = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    unigram = {"type": "Unigram", "unk_id": 2, "vocab": [["<0>", -9.0], ["<1>", -9.0], ["a", -1.0], ["b", -1.0]], "byte_fallback": False}
    for model in (bpe, words, unigram):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))
        here = load_tokenizer(tmp_path)
        ids = here.encode("<8><4>a<0>b<12>ab<10>")
        assert ids.tolist() == [8, 4, 2, 0, 3, 12, *([2, 3] if model is unigram else [7]), 10] and here.vocab_size == 13
        assert here.decode(ids).replace(" ", "") == "<8>a<0>b<12>ab<10>"
        assert here.decode([5, 6, 11]) == ""  # nobody's
        assert not np.isin(here.encode("<8>", control_tokens=False) if model is not bpe else [], [0, 4, 8, 12, 10]).any()


# --- bad input


@pytest.mark.parametrize(
    ("added", "config", "message"),
    [
        ({5: {"content": "<a>"}}, {}, "'<a>' has the id 5 of the token"),
        ({300: {"content": "<a>"}, 301: {"content": "<a>"}}, {}, "'<a>' has two ids, 300 and 301"),
        ({"x": {"content": "<a>"}}, {}, "must be an object of ids and tokens"),
        ({300: {"special": True}}, {}, "needs a `content`"),
        ({300: {"content": "<a>", "special": "yes"}}, {}, "`special` of the added token '<a>' is 'yes'"),
        (ADDED, {"bos_token": "[BOS]"}, r"`bos_token` is '\[BOS\]', which is no added token"),
        (ADDED, {"eos_token": 7}, "`eos_token` is 7; it must be a string"),
        (ADDED, {"pad_token": {"content": ["<a>"]}}, "`pad_token` is {'content'"),
    ],
)
@pytest.mark.parametrize("loader", ["tiktoken", "json"])
def test_added_tokens_that_cannot_be(trained, tmp_path, loader, added, config, message):
    if loader == "tiktoken":
        tiktoken_folder(tmp_path, token_bytes(trained), added, **config)
    else:
        json_folder(tmp_path, trained, added_tokens=[])
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, **config}))
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_damaged_tokenizer_json(trained, tmp_path):
    path = tmp_path / "tokenizer.json"
    good = json.loads(trained.to_str())
    token = {"id": 300, "content": "<a>", "special": True}
    model = good["model"]
    repeated = {**model, "vocab": {**model["vocab"], "zzz": 3}}
    cases = [
        ("{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[1]", "holds a JSON list"),
        ("{}", "has no `model`"),
        ({**good, "model": {**model, "vocab": []}}, "no table of tokens"),
        ({**good, "model": repeated}, "share the id 3"),
        ({**good, "model": {**model, "vocab": {"a": "0"}}}, "has the id '0'"),
        ({**good, "model": {**model, "merges": [["zz", "zzz"]]}}, "library refuses it"),
        ({**good, "model": {**model, "dropout": 0.1}}, "encoding would be random"),
        ({**good, "pre_tokenizer": {"type": "Nothing"}}, "library refuses it"),
        ({**good, "added_tokens": [token, {**token, "content": "<b>"}]}, "share the id 300"),
        ({**good, "added_tokens": [{**token, "id": 7}]}, "has the id 7 of the token"),
        ({**good, "added_tokens": [{**token, "content": "a"}]}, "is added as id 300, but the vocabulary has it"),
        ({**good, "added_tokens": [{"content": "<a>"}]}, "must be a list of objects with an `id`"),
        ({**good, "added_tokens": [{**token, "id": -1}]}, "ids are integers in"),
    ]
    for content, message in cases:
        data = content if isinstance(content, bytes) else (content if isinstance(content, str) else json.dumps(content)).encode()
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(path)
    path.write_text(json.dumps(good))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not JSON"):
        load_tokenizer(path)


def test_which_file_of_a_folder(trained, tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer.json, tiktoken.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    json_folder(tmp_path, trained)
    with pytest.raises(ValueError, match="says itself how text is cut"):
        load_tokenizer(tmp_path, pattern=r"\w+")
    write_ranks(tmp_path / "tiktoken.model", token_bytes(trained))
    with pytest.raises(ValueError, match=r"holds tiktoken.model and tokenizer.json; name the one"):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.json").vocab_size == 302
    assert load_tokenizer(tmp_path / "tiktoken.model").vocab_size == 300


def test_the_library_is_needed_only_to_load(monkeypatch, tmp_path):
    probe = "import sys, moejax.data; moejax.data.load_tokenizer; print('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.strip() == "False"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install moejax\[hub\]"):
        load_tokenizer(write_ranks(tmp_path / "a.tiktoken", [b"a"]))
