"""Tiktoken-style files: how text is cut, damaged files, patterns that another engine would read otherwise."""

import base64
import random
import time

import pytest

from moejax.data import load_tokenizer
from moejax.data.tiktoken_file import KIMI_PATTERN, spelled, unspelled

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hub`")

BYTES = [bytes([i]) for i in range(256)]


def write_ranks(path, tokens: list[bytes]):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def test_the_pattern_cuts_as_tiktoken_does():
    cases = {
        "it's IT'S don't He'LL": ["it's", " IT'S", " don't", " He'LL"],
        "camelCase XMLHttp HELLO": ["camel", "Case", " XMLHttp", " HELLO"],
        "1234567a": ["123", "456", "7", "a"],
        "hello世界abc 世界": ["hello", "世界", "abc", " ", "世界"],
        "日本語のテキスト": ["日本語", "のテキスト"],
        "a    b": ["a", "   ", " b"],
        "a  \n\n  b": ["a", "  \n\n", " ", " b"],
        "x!!\r\n\ry": ["x", "!!\r\n\r", "y"],
        "e\u0301 \u0301e(word": ["e\u0301", " \u0301e", "(word"],
        " ½ Ⅻ  ": [" ", "½", " ", "Ⅻ", "  "],
    }
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(KIMI_PATTERN), "isolated")
    for text, pieces in cases.items():
        assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["YQ== 0", "Y*== 1"], r"bad.tiktoken, line 2: b'Y\*==' is no base64"),
        (["YQ== 0", "YQ 1"], "line 2: b'YQ' is no base64"),
        (["YQ== 0", "Yg== 0"], "line 2: rank 0 stands on line 1 already"),
        (["YQ== 0", "YQ== 1"], "line 2: the token b'a' has a rank already"),
        (["YQ== 0", "Yg== 2"], "none of rank 1; ranks have no holes"),
        (["YQ== 1"], "none of rank 0"),
        (["YQ== 0", "Yg=="], "line 2: b'Yg==' is not a base64 token, a space and a rank"),
        (["YQ== 0 1"], "line 1"),
        (["YQ== -1"], "line 1"),
        (["YQ== 0x1"], "line 1"),
        ([""], "holds no token"),
    ],
)
def test_damaged_ranks(tmp_path, lines, message):
    path = tmp_path / "bad.tiktoken"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("([a", "library refuses it: Oniguruma"),
        (r"\p{N}{1,3}+|.", "possessive count"),
        (r"\s+$|.", r"\^ and \$ would match at every line"),
        (r"^a|.", "at every line"),
        (r"(?im:.)", "as other engines' s"),
    ],
)
def test_patterns_that_cannot_be(tmp_path, pattern, message):
    path = write_ranks(tmp_path / "a.tiktoken", BYTES)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path, pattern=pattern)
    assert load_tokenizer(path, pattern=r"[\]^$]{1,2}|\x{41}+|\p{L}+|\$|[\s\S]").encode("A$^b").size  # the same signs with other meanings


@pytest.mark.slow
def test_a_file_of_kimis_size_loads_in_20_seconds(tmp_path):
    """163,584 tokens of up to 12 bytes, 10 on average; those of the real file have 7."""
    rng = random.Random(0)
    tokens = list(BYTES)
    seen = set(tokens)
    while len(tokens) < 163_584:
        token = rng.choice(tokens) + rng.choice(tokens)
        if len(token) <= 12 and token not in seen:
            seen.add(token)
            tokens.append(token)
    path = write_ranks(tmp_path / "tiktoken.model", tokens)
    start = time.monotonic()
    assert load_tokenizer(path).vocab_size == len(tokens)
    assert time.monotonic() - start < 20


def test_names_of_bytes():
    assert len({spelled(bytes([i])) for i in range(256)}) == 256
    assert spelled(b" \n\xe9a") == "ĠĊéa" and unspelled(spelled(bytes(range(256)))) == bytes(range(256))
