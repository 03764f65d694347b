"""Train a byte-level BPE with the `tokenizers` library, and write it as the two files that `load_tokenizer` reads.

V: vocab_size, S: special tokens. Ids: 0 .. V-S-1 belong to the BPE (256 of them to the single bytes), the last S to the
special tokens, so that text encoded as text (`control_tokens=False`) cannot give one.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .atomic import write_atomic
from .corpus import Document
from .tiktoken_file import KIMI_PATTERN
from .tokenizer import SPECIAL_NAMES
from .tokenizer_file import CONFIG_NAME, FileTokenizer
from .tokenizer_model import MAX_IDS, AddedToken, load_library

SPECIAL_TOKENS = tuple(f"<|{name}|>" for name in SPECIAL_NAMES)
NEEDED = ("<|pad|>", "<|bos|>", "<|eos|>", "<|doc_sep|>")
LONGEST_TOKEN = 32  # characters, one a byte: without a bound a licence header repeated in every file becomes one token


def train_bpe(
    documents: Iterable[str | bytes | Document],
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    folder: str | os.PathLike | None = None,
    min_frequency: int = 2,
    pattern: str = KIMI_PATTERN,
) -> FileTokenizer:
    """A BPE trained on `documents`; the same documents in any order give the same tokenizer.

    documents: str, UTF-8 bytes, or `Document`s of a corpus. Every valid Unicode text round-trips exactly afterwards, seen or not.
    vocab_size: V, all ids together: 256 bytes + merges + special tokens.
    special_tokens: their contents, in the order of their ids; pad, bos, eos and doc_sep must be among them. All are distinct
        ids: where padding and the end share one, the end is masked from the loss and the model never learns to stop.
    folder: where to write tokenizer.json and tokenizer_config.json (made if missing; files there are replaced whole). None: nothing
        is written.
    min_frequency: a pair is merged only if it occurs this often. pattern: how text is cut before BPE, a regular expression; no
        token crosses a cut.

    ValueError: a vocabulary that does not hold the bytes and special tokens; special tokens missing, empty or given twice; a
    document that is no UTF-8; too little text for `vocab_size`. ImportError: no `tokenizers` library.
    """
    specials = list(special_tokens)
    _check(vocab_size, specials, min_frequency)
    spec = _train(documents, vocab_size - len(specials), min_frequency, pattern)
    first = vocab_size - len(specials)
    added = {first + i: AddedToken(content, special=True) for i, content in enumerate(specials)}
    ends = {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|eos|>"}
    place = "the BPE just trained"
    if folder is not None:
        place = str(_write(pathlib.Path(folder), spec, added, ends))
    return FileTokenizer(spec, added, {end: first + specials.index(content) for end, content in ends.items()}, place)


def utf8_documents(documents: Iterable[Document]) -> tuple[list[Document], list[str]]:
    """-> (the documents that are UTF-8, the names of the others), for a tokenizer of text; Python's library has a few in Latin-1."""
    kept, others = [], []
    for document in documents:
        try:
            document.data.decode()
            kept.append(document)
        except UnicodeDecodeError:
            others.append(document.name)
    return kept, others


def _check(vocab_size: int, specials: list[str], min_frequency: int) -> None:
    missing = [name for name in NEEDED if name not in specials]
    if missing:
        raise ValueError(f"special_tokens lacks {', '.join(missing)}; padding, both ends and the separator each need an id of their own.")
    twice = next((name for name in specials if specials.count(name) > 1), None)
    if twice is not None or not all(specials):
        raise ValueError(f"special_tokens holds {twice or ''!r}{' twice' if twice else ''}; each is a distinct string, and none is empty.")
    if not 256 + len(specials) <= vocab_size <= MAX_IDS:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least {256 + len(specials)}: 256 bytes and {len(specials)} special tokens "
            f"(and at most {MAX_IDS})."
        )
    if min_frequency < 1:
        raise ValueError(f"min_frequency={min_frequency} must be at least 1.")


def _train(documents: Iterable[str | bytes | Document], size: int, min_frequency: int, pattern: str) -> dict[str, Any]:
    """-> the object of a tokenizer.json with `size` tokens and no added ones."""
    library = load_library()
    tokenizer = library.Tokenizer(library.models.BPE())
    try:
        cut = library.pre_tokenizers.Split(library.Regex(pattern), "isolated")
    except Exception as error:  # the library's own
        raise ValueError(f"pattern={pattern!r} does not compile: {error}") from None
    spelling = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([cut, spelling])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=LONGEST_TOKEN,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents), trainer)
    spec = json.loads(tokenizer.to_str())
    reached = len(spec["model"]["vocab"])
    if reached != size:
        raise ValueError(
            f"the documents give {reached} tokens where {size} were asked for (vocab_size less the special tokens): no further pair "
            f"occurs {min_frequency} times. Give more text, or lower vocab_size by {size - reached}."
        )
    spec["added_tokens"] = []
    return spec


def _texts(documents: Iterable[str | bytes | Document]) -> Iterator[str]:
    for index, document in enumerate(documents):
        data = document.data if isinstance(document, Document) else document
        name = f"document {index}" + (f" ({document.name})" if isinstance(document, Document) else "")
        if not isinstance(data, str | bytes):
            raise ValueError(f"{name} is {type(data).__name__}; it must be str, bytes or a Document.")
        try:
            text = data.decode() if isinstance(data, bytes) else data
            text.encode()  # a lone surrogate would be lost in the library
        except UnicodeError as error:
            raise ValueError(f"{name} is no UTF-8 text: {error}. `utf8_documents` leaves such out; ByteTokenizer keeps any.") from None
        yield text


def _write(folder: pathlib.Path, spec: dict[str, Any], added: dict[int, AddedToken], ends: dict[str, str]) -> pathlib.Path:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = [{"id": i, "content": token.content, **flags} for i, token in added.items()]
    config = {
        "added_tokens_decoder": {str(i): {"content": token.content, **flags} for i, token in added.items()},
        **{f"{end}_token": content for end, content in ends.items()},
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in (("tokenizer.json", {**spec, "added_tokens": tokens}), (CONFIG_NAME, config)):
        write_atomic(folder / name, json.dumps(value, ensure_ascii=False, indent=1).encode())
    return folder / "tokenizer.json"
