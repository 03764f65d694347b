"""BPE training: exact round trips, ids of its own for every special token, the same files for the same text."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.data import Document, load_tokenizer, synthetic_corpus
from moejax.data.bpe import SPECIAL_TOKENS, train_bpe, utf8_documents

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hub`")

TEXTS = [
    "def f(x):\n    return x + 1  # naïve café\n" * 3,
    "Привет, мир! 你好世界。 🚀👨‍👩‍👧 e\u0301 \u00a0\u3000\u2028 1234567 ½" * 2,
    "<|eos|> is text here, <|pad|><|turn_end|> too\x00\r\n\t\n",
]
SIZE = 400


@pytest.fixture(scope="module")
def documents():
    return [*synthetic_corpus(documents=12).train, *TEXTS]


@pytest.fixture(scope="module")
def folder(documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe") / "new"
    train_bpe(documents, SIZE, folder=folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_round_trip_of_text(tokenizer, documents):
    assert tokenizer.byte_level and tokenizer.vocab_size == SIZE
    for text in [*TEXTS, "", " ", "\n", "never seen: Ǆ ﷽ \U0010ffff \ud7ff \x7f", "".join(map(chr, range(1, 0x500)))]:
        for control in (False, True):
            ids = tokenizer.encode(text, control_tokens=control)
            assert ids.dtype == np.int32 and tokenizer.decode(ids, show_special=True) == text
        assert tokenizer.decode_bytes(tokenizer.encode(text, control_tokens=False)) == text.encode()
    data = documents[0].data
    assert len(tokenizer.encode(data)) < 0.6 * len(data)  # it merges


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text, control_tokens=False)
    assert tokenizer.decode(ids) == text
    assert (ids < SIZE - len(SPECIAL_TOKENS)).all()


def test_special_tokens_are_never_produced_from_plain_text(tokenizer):
    first = SIZE - len(SPECIAL_TOKENS)
    assert tokenizer.special_ids == {name: first + i for i, name in enumerate(SPECIAL_TOKENS)}
    for text in (*SPECIAL_TOKENS, "".join(SPECIAL_TOKENS), "a<|eos|>b", *TEXTS):
        ids = tokenizer.encode(text, control_tokens=False)
        assert ids.max() < first and tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|eos|>b")[1] == tokenizer.eos_id  # only where it is asked for
    single = tokenizer.encode("<|eos|>", bos=True, eos=True, control_tokens=False)
    assert single[0] == tokenizer.bos_id and single[-1] == tokenizer.eos_id and (single[1:-1] < first).all()


def test_unsloth_416_padding_is_not_the_end(tokenizer, folder):
    """https://github.com/unslothai/unsloth/issues/416: PAD = EOS, EOS masked with the padding, and the model never stops."""
    ends = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.special_ids["<|doc_sep|>"]]
    assert None not in ends and len(set(ends)) == 4
    assert len(set(tokenizer.special_ids.values())) == len(SPECIAL_TOKENS) == 15
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert len({config[f"{end}_token"] for end in ("pad", "bos", "eos")}) == 3
    with pytest.raises(ValueError, match=r"special_tokens lacks <\|pad\|>"):
        train_bpe(TEXTS, SIZE, special_tokens=SPECIAL_TOKENS[1:])
    with pytest.raises(ValueError, match=r"holds '<\|eos\|>' twice"):
        train_bpe(TEXTS, SIZE, special_tokens=(*SPECIAL_TOKENS, "<|eos|>"))


def test_what_is_returned_is_what_is_saved(documents, tokenizer, folder):
    made = train_bpe(documents, SIZE)
    text = "".join(TEXTS) + "The rest"
    assert (made.encode(text) == tokenizer.encode(text)).all() and made.special_ids == tokenizer.special_ids
    assert (made.pad_id, made.bos_id, made.eos_id) == (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))  # as others will read it
    assert library.encode(text).ids == tokenizer.encode(text).tolist() and library.get_vocab_size() == SIZE
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_the_same_text_gives_the_same_tokenizer(documents, folder, tmp_path):
    train_bpe(reversed(documents), SIZE, folder=tmp_path)
    saved = (folder / "tokenizer.json").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == saved
    merges = json.loads(saved)["model"]["merges"]
    assert len(merges) == SIZE - 256 - len(SPECIAL_TOKENS)
    # On every platform and version of the library: the merges in their order.
    digest = hashlib.sha256(json.dumps([m.split(" ") if isinstance(m, str) else m for m in merges]).encode()).hexdigest()
    assert digest == "c680a67cf2db5df512cc40d28f1cdbc4415698e4d38dea38ae2b1bfeecc6da3b"


def test_documents_in_another_encoding_are_told_apart(documents):
    latin = Document("latin.py", "# coding: latin-1 \u00e9".encode("latin-1"))
    kept, others = utf8_documents([*documents[:3], latin, *documents[3:5]])
    assert kept == documents[:5] and others == ["latin.py"]
    with pytest.raises(ValueError, match=r"document 5 \(latin.py\) is no UTF-8 text: .* `utf8_documents` leaves such out"):
        train_bpe([*kept, latin], SIZE)


def test_what_training_refuses(documents):
    for given_, size, options, message in (
        (documents, 270, {}, "vocab_size=270 must be at least 271: 256 bytes and 15 special tokens"),
        (["too little"], 400, {}, r"the documents give \d+ tokens where 385 were asked for .* lower vocab_size by \d+"),
        ([], 300, {}, "the documents give 256 tokens where 285"),
        ([b"fine", b"\xff"], 300, {}, "document 1 is no UTF-8 text"),
        (["\ud800"], 300, {}, "document 0 is no UTF-8 text"),
        ([5], 300, {}, "document 0 is int; it must be str, bytes or a Document"),
        (documents, 300, {"pattern": "("}, r"pattern='\(' does not compile"),
        (documents, 300, {"min_frequency": 0}, "min_frequency=0 must be at least 1"),
        (documents, 300, {"special_tokens": (*SPECIAL_TOKENS, "")}, "none is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            train_bpe(given_, size, **options)
