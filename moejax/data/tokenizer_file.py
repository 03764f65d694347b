"""Tokenizers from published files: `tokenizer.json`, or a tiktoken-style list of tokens and ranks.

N: tokens of a text.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import chat_template, tiktoken_file
from .tokenizer import checked_ids
from .tokenizer_model import MAX_IDS, AddedToken, load_library, lost_id, unknown_id, vocabulary, with_added, without_added

CONFIG_NAME = "tokenizer_config.json"
ENDS = ("bos", "eos", "pad")


class FileTokenizer:
    """A tokenizer read from files by `load_tokenizer`, with the interface of `ByteTokenizer`.

    vocab_size: the largest id + 1. A model's table may be larger (padded), and ids in between may have no token.
    bos_id, eos_id, pad_id: as `tokenizer_config.json` names them; None where it does not.
    added_tokens: {id: AddedToken}, all tokens beside the BPE; special_ids: {content: id}, those of them that are special.
    chat_template: the Jinja text by which the model's dialogs are written (see chat_template.py), or None.

    Byte-level BPE (every tiktoken file, most `tokenizer.json`) gives back any text exactly, where its file adds no normaliser,
    no leading space and no token that takes white space with it.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        added: Mapping[int, AddedToken],
        ends: Mapping[str, int | None],
        place: str,
        chat_template: str | None = None,
    ):
        """spec: the object of a `tokenizer.json`, checked, its `added_tokens` aside."""
        self.chat_template = chat_template
        model = spec["model"]
        self._place, self._lost = place, lost_id(spec)
        names = {i: name for name, i in vocabulary(model, place).items() if i not in added}
        self._own = frozenset(names)  # the ids of the model's own tokens
        self.added_tokens: dict[int, AddedToken] = dict(sorted(added.items()))
        self.special_ids: dict[str, int] = {token.content: i for i, token in self.added_tokens.items() if token.special}
        self.vocab_size: int = max(*names, *added, 0) + 1
        self.bos_id, self.eos_id, self.pad_id = (ends.get(name) for name in ENDS)
        self._with, library_ids = with_added(spec, added, place)
        self._from_library = np.array(sorted((a, b) for a, b in library_ids.items() if a != b), np.int64).reshape(-1, 2)
        self._to_library = {i: a for a, i in library_ids.items()}
        self._without = without_added(spec, added, place) if added else self._with
        self.byte_level: bool = _is_byte_level(spec)
        self._bytes = {i: tiktoken_file.unspelled(name) for i, name in names.items()} if self.byte_level else {}
        self._added_ids = np.array([i for i in added if i != unknown_id(spec)], np.int64)

    def __repr__(self) -> str:
        return f"FileTokenizer({self._place!r}, vocab_size={self.vocab_size}, added tokens: {len(self.added_tokens)})"

    def encode(self, text: str | bytes, *, bos: bool = False, eos: bool = False, control_tokens: bool = True) -> np.ndarray:
        """text -> int32 ids [N].

        text: str, or bytes that are UTF-8.
        bos, eos: put that token at the front, at the end; nothing is put there otherwise, whatever the files say.
        control_tokens: find added tokens ("<think>", "<|im_end|>") in the text. False for text that a user wrote: then it is only
            text, encoded from the BPE, and no id of an added token comes out.
        ValueError: a text that is no valid Unicode (a lone surrogate), or that has characters the vocabulary has no token for;
        bos or eos where the files name none.
        """
        front = [self._end("bos")] if bos else []
        back = [self._end("eos")] if eos else []
        text = _valid_text(text)
        try:
            encoding = (self._with if control_tokens else self._without).encode(text, add_special_tokens=False)
        except Exception as error:  # the library's own, as for a missing unknown token
            raise ValueError(f"{self._place}: the text cannot be encoded: {error}") from None
        ids = np.array(encoding.ids, np.int64)
        lost = np.flatnonzero(ids == self._lost) if self._lost is not None else ids[:0]
        if lost.size:
            start, end = encoding.offsets[int(lost[0])]
            raise ValueError(f"{self._place}: the vocabulary has no token for {text[start:end]!r} (character {start} of the text).")
        if control_tokens and len(self._from_library):
            library, own = self._from_library.T
            place = np.minimum(np.searchsorted(library, ids), len(library) - 1)
            ids = np.where(library[place] == ids, own[place], ids)
        if not control_tokens and np.isin(ids, self._added_ids).any():
            raise ValueError(f"{self._place}: the text holds an added token that its model cannot encode as text.")
        return np.concatenate([front, ids, back]).astype(np.int32)

    def decode_bytes(self, ids) -> bytes:
        """ids [N] -> the bytes of the text, special tokens left out. ValueError where the tokenizer is not byte-level."""
        if not self.byte_level:
            raise ValueError(f"{self._place}: its tokens are not bytes; only byte-level BPE has decode_bytes.")
        return b"".join(self._pieces(ids))

    def decode(self, ids, *, errors: str = "replace", show_special: bool = False) -> str:
        """ids [N] -> text, the exact inverse of `encode` (see the class).

        errors: what to do with bytes that are no UTF-8, as in `bytes.decode`. Only "replace" where the tokenizer is not byte-level.
        show_special: write special tokens too, and ids without a token as <|reserved_token_id|>, instead of leaving them out.
            Added tokens that are not special ("<think>") are always written.
        ValueError: an id outside [0, vocab_size).
        """
        if not self.byte_level:
            return self._decode_by_library(ids, errors, show_special)
        return b"".join(self._pieces(ids, show_special)).decode("utf-8", errors)

    def check(self, ids) -> np.ndarray:
        """ids as a NumPy array; ValueError unless all are integers in [0, vocab_size).

        An id in there that has no token passes (a model may give any); `decode` leaves it out.
        """
        return checked_ids(ids, self.vocab_size)

    def _end(self, name: str) -> int:
        value = getattr(self, f"{name}_id")
        if value is None:
            raise ValueError(f"{self._place}: no {name} token; `{name}_token` in {CONFIG_NAME} beside it would name one.")
        return value

    def _pieces(self, ids, show_special: bool = False) -> Iterator[bytes]:
        """The bytes of the tokens that are to be written."""
        for i in self.check(ids).ravel().tolist():
            piece = self._bytes.get(i)
            if piece is None:
                token = self.added_tokens.get(i)
                if not show_special and (token is None or token.special):
                    continue
                piece = (token.content if token else f"<|reserved_token_{i}|>").encode()
            yield piece

    def _decode_by_library(self, ids, errors: str, show_special: bool) -> str:
        if errors != "replace":
            raise ValueError(f'{self._place}: errors={errors!r}; a tokenizer that is not byte-level decodes with errors="replace".')
        kept = []
        for i in self.check(ids).ravel().tolist():
            token = self.added_tokens.get(i)
            if token is None and i not in self._own:
                if show_special:
                    raise ValueError(f"{self._place}: id {i} has no token to show.")
            elif show_special or token is None or not token.special:
                kept.append(self._to_library.get(i, i))
        return self._with.decode(kept, skip_special_tokens=False)


def load_tokenizer(path: str | os.PathLike, *, pattern: str | None = None) -> FileTokenizer:
    """A tokenizer from a file, or from a folder that holds one. Needs the `tokenizers` library: pip install moejax[hub].

    path: a `tokenizer.json`; or a tiktoken-style file (a line a token: base64, a space, the rank, which is the id); or a folder with
        one `tokenizer.json`, `tiktoken.model` or `*.tiktoken`. A `tokenizer_config.json` beside the file is read too: its
        `added_tokens_decoder` {id: {"content", "special", ...}}, and `bos_token`, `eos_token`, `pad_token`; and the chat template, from
        there or from `chat_template.jinja`.
    pattern: how a tiktoken-style file's text is cut before BPE, a regular expression; None: that of Kimi K2 and K3
        (`tokenization_kimi.py`). A `tokenizer.json` has its own, so that a pattern is refused.

    Of Kimi's own code two things are left out: it cuts runs of over 25,000 characters without (or of) white space before BPE, and
    finds "<|reserved_token_N|>" in text for the ids of its table that have no name.

    ValueError: damaged files, ids given twice, an added token on the id of another, a pattern that does not compile, a folder with
    no tokenizer or several. FileNotFoundError: no such path. ImportError: no `tokenizers` library.
    """
    load_library()
    file = _find(pathlib.Path(path))
    config_path = file.parent / CONFIG_NAME
    config = _json_object(config_path) if config_path.is_file() else {}
    is_json = file.suffix == ".json" or file.read_bytes()[:64].lstrip()[:1] == b"{"
    if is_json and pattern is not None:
        raise ValueError(f"{file} says itself how text is cut; pattern={pattern!r} is for tiktoken-style files. Leave it out.")
    if is_json:
        spec = _tokenizer_json(file)
    else:
        spec = tiktoken_file.tokenizer_json(file, tiktoken_file.KIMI_PATTERN if pattern is None else pattern)
    names = vocabulary(spec["model"], str(file))
    added = _added_tokens(spec.pop("added_tokens", None) or [], config.get("added_tokens_decoder") or {}, file)
    ends = _ends(config, added, names if is_json else {}, config_path)
    _check_added(added, names, file, is_json)
    own_file = file.parent / chat_template.FILE_NAME
    text = own_file.read_text(encoding="utf-8") if own_file.is_file() else None
    return FileTokenizer(spec, added, ends, str(file), chat_template.template_of(config, text, str(config_path)))


def _find(path: pathlib.Path) -> pathlib.Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; give a tokenizer.json, a tiktoken-style file or a folder that holds one.")
    found = [p for p in sorted(path.iterdir()) if p.name in ("tokenizer.json", "tiktoken.model") or p.suffix == ".tiktoken"]
    if not found:
        raise ValueError(f"{path} holds no tokenizer.json, tiktoken.model or *.tiktoken; name the file.")
    if len(found) > 1:
        raise ValueError(f"{path} holds {' and '.join(p.name for p in found)}; name the one to load.")
    return found[0]


def _json_object(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; expected an object.")
    return value


def _tokenizer_json(file: pathlib.Path) -> dict[str, Any]:
    spec = _json_object(file)
    if not isinstance(spec.get("model"), dict):
        raise ValueError(f"{file} has no `model`; is this a tokenizer.json of the tokenizers library?")
    if "merges" in spec["model"]:
        spec["model"].setdefault("type", "BPE")  # files of old versions of the library do not say it
    if spec["model"].get("dropout"):
        raise ValueError(f"{file}: the model's dropout is {spec['model']['dropout']}: encoding would be random. Set it to null.")
    return spec


def _added_tokens(own: Any, config: Any, file: pathlib.Path) -> dict[int, AddedToken]:
    """{id: token} of tokenizer.json and of the config; where both list one the config's flags count, as in `transformers`."""
    if not isinstance(own, list) or not all(isinstance(entry, dict) and type(entry.get("id")) is int for entry in own):
        raise ValueError(f"{file}: `added_tokens` must be a list of objects with an `id` and a `content`.")
    place = file.parent / CONFIG_NAME
    if not isinstance(config, dict) or not all(key.isascii() and key.isdigit() for key in config):
        raise ValueError(f"{place}: `added_tokens_decoder` must be an object of ids and tokens.")
    added: dict[int, AddedToken] = {}
    ids: dict[str, int] = {}
    flags: dict[int, dict[str, Any]] = {}
    entries = [(entry["id"], entry, str(file)) for entry in own] + [(int(key), entry, str(place)) for key, entry in config.items()]
    for i, entry, where in entries:
        token = AddedToken.from_json(entry, where)
        if not 0 <= i < MAX_IDS:
            raise ValueError(f"{where}: the added token {token.content!r} has the id {i}; ids are integers in [0, {MAX_IDS}).")
        if i in added and added[i].content != token.content:
            raise ValueError(f"{where}: the added tokens {added[i].content!r} and {token.content!r} share the id {i}.")
        if ids.setdefault(token.content, i) != i:
            raise ValueError(f"{where}: the added token {token.content!r} has two ids, {ids[token.content]} and {i}.")
        flags[i] = {**flags.get(i, {}), **entry}
        added[i] = AddedToken.from_json(flags[i], where)
    return added


def _ends(config: dict[str, Any], added: dict[int, AddedToken], names: dict[str, int], place: pathlib.Path) -> dict[str, int | None]:
    """The ids of bos, eos and pad. One that only the model's vocabulary lists becomes an added, special token."""
    ids = {token.content: i for i, token in added.items()}
    ends: dict[str, int | None] = {}
    for end in ENDS:
        content = config.get(f"{end}_token")
        content = content.get("content") if isinstance(content, dict) else content
        if content is not None and not isinstance(content, str):
            raise ValueError(f"{place}: `{end}_token` is {config[f'{end}_token']!r}; it must be a string, or an object with a `content`.")
        if content is not None and content not in ids and content in names:
            ids[content] = names[content]
            added[names[content]] = AddedToken(content, special=True)
        if content is not None and content not in ids:
            raise ValueError(f"{place}: `{end}_token` is {content!r}, which is no added token; `added_tokens_decoder` lists them by id.")
        ends[end] = None if content is None else ids[content]
    return ends


def _check_added(added: dict[int, AddedToken], names: dict[str, int], file: pathlib.Path, is_json: bool) -> None:
    """ValueError for an added token on the id of another; in tokenizer.json it may stand in the vocabulary, under its own id."""
    of_id = {i: name for name, i in names.items()}
    for i, token in added.items():
        if i in of_id and not (is_json and of_id[i] == token.content):
            raise ValueError(f"{file}: the added token {token.content!r} has the id {i} of the token {of_id[i]!r}.")
        if is_json and names.get(token.content, i) != i:
            raise ValueError(f"{file}: {token.content!r} is added as id {i}, but the vocabulary has it as {names[token.content]}.")


def _is_byte_level(spec: dict[str, Any]) -> bool:
    """Whether tokens are spelled a character a byte, so that they can be decoded here, byte for byte."""
    model, decoder = spec["model"], spec.get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    plain = not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")
    return plain and model.get("type") == "BPE" and [part.get("type") for part in parts] == ["ByteLevel"]


def _valid_text(text: str | bytes) -> str:
    if isinstance(text, bytes | bytearray | memoryview):
        try:
            return bytes(text).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"the bytes are no UTF-8: {error}; decode them as you see fit and give the str.") from None
    if not isinstance(text, str):
        raise ValueError(f"text is {type(text).__name__}; it must be str or bytes.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds a lone surrogate at character {error.start}; only ByteTokenizer keeps those, replace it first."
        ) from None
    return text
