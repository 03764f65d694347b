"""The library's tokenizers behind `FileTokenizer`: one that recognises added tokens and one to which they do not exist."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

UNREACHABLE = "\ufdd0"  # a noncharacter: byte-level BPE never looks up a name that holds it
MAX_IDS = 1 << 24  # sixteen million: a damaged id above it would only fill memory


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token that stands beside the BPE: found in text by its content, before the text is cut.

    special: left out of decoded text. lstrip, rstrip: takes the white space on that side with it. single_word: not inside a word.
    normalized: looked for after the normaliser.
    """

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @classmethod
    def from_json(cls, entry: Any, place: str) -> AddedToken:
        """ValueError for an entry without content or with a field of another type."""
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not entry["content"]:
            raise ValueError(f"{place}: {entry!r} is no added token; it needs a `content`.")
        flags = {f.name: entry[f.name] for f in dataclasses.fields(cls) if f.name != "content" and f.name in entry}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{place}: `{name}` of the added token {entry['content']!r} is {value!r}; it must be true or false.")
        # The library's default: text is searched for special tokens as it is, for others after the normaliser.
        return cls(entry["content"], **{"normalized": not flags.get("special", False), **flags})


def load_library() -> Any:
    """The `tokenizers` module, imported when the first file is loaded; ImportError says how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("tokenizer files are read by the `tokenizers` library: pip install moejax[hub]") from error
    return tokenizers


def vocabulary(model: dict[str, Any], place: str) -> dict[str, int]:
    """name -> id of the model's own tokens; ValueError for a vocabulary of another form or an id given twice."""
    vocab = model.get("vocab")
    if model.get("type") == "Unigram" and isinstance(vocab, list):  # [name, score] in the order of the ids
        if not all(isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in vocab):
            raise ValueError(f"{place}: the model's `vocab` is no list of tokens and scores.")
        vocab = {entry[0]: i for i, entry in enumerate(vocab)}
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(f"{place}: the model's `vocab` is no table of tokens and ids.")
    names: dict[int, str] = {}
    for name, i in vocab.items():
        if type(i) is not int or not 0 <= i < MAX_IDS:
            raise ValueError(f"{place}: token {name!r} of the vocabulary has the id {i!r}; ids are integers in [0, {MAX_IDS}).")
        if i in names:
            raise ValueError(f"{place}: the tokens {names[i]!r} and {name!r} of the vocabulary share the id {i}.")
        names[i] = name
    return dict(vocab)


def with_added(spec: dict[str, Any], added: Mapping[int, AddedToken], place: str) -> tuple[Any, dict[int, int]]:
    """-> (the tokenizer that finds the added tokens in text, {id that it gives to an added token: the id of the file}).

    The library numbers added tokens itself, on from the vocabulary and without holes, except for those that the vocabulary lists.
    """
    spec = _copy(spec)
    clash = {token.content for i, token in added.items()}
    _rename(spec["model"], lambda name, i: name in clash and i not in added)
    spec["added_tokens"] = [{"id": i, **dataclasses.asdict(token)} for i, token in sorted(added.items())]
    tokenizer = _build(spec, place)
    return tokenizer, {tokenizer.token_to_id(token.content): i for i, token in added.items()}


def without_added(spec: dict[str, Any], added: Mapping[int, AddedToken], place: str) -> Any:
    """The tokenizer to which text is only text: added tokens that the model's own vocabulary lists are taken out of its reach."""
    spec = _copy(spec)
    spec["added_tokens"] = []
    _rename(spec["model"], lambda name, i: i in added)
    return _build(spec, place)


def lost_id(spec: dict[str, Any]) -> int | None:
    """By which a BPE without an unknown token reports text that it has no token for; None where the model has an unknown token."""
    model = spec["model"]
    return max(model["vocab"].values()) + 1 if model.get("type") == "BPE" and model.get("unk_token") is None else None


def unknown_id(spec: dict[str, Any]) -> int | None:
    """The id that the model's file gives to what it has no token for."""
    model = spec["model"]
    if isinstance(model["vocab"], list):
        return model.get("unk_id")
    return model["vocab"].get(model.get("unk_token"))


def _copy(spec: dict[str, Any]) -> dict[str, Any]:
    """Changeable where this file changes it; a deep copy of 160,000 merges takes a second."""
    return {**spec, "model": {**spec["model"], "vocab": copy.copy(spec["model"]["vocab"])}}


def _rename(model: dict[str, Any], chosen: Callable[[str, int], bool]) -> None:
    """Give the tokens (name, id) that are `chosen` names that no text has, and drop the merges that they are part of."""
    vocab = model["vocab"]
    pairs = [(entry[0], i) for i, entry in enumerate(vocab)] if isinstance(vocab, list) else list(vocab.items())
    new = {name: f"{UNREACHABLE}{i}" for name, i in pairs if chosen(name, i)}
    if not new:
        return
    if isinstance(vocab, list):
        model["vocab"] = [[new.get(entry[0], entry[0]), *entry[1:]] for entry in vocab]
    else:
        model["vocab"] = {new.get(name, name): i for name, i in pairs}
    if model.get("unk_token") in new:
        model["unk_token"] = new[model["unk_token"]]
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        kept = []
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            if not {left, right, left + right[prefix:]} & new.keys():
                kept.append(merge)
        model["merges"] = kept


def _build(spec: dict[str, Any], place: str) -> Any:
    """The library's tokenizer of a tokenizer.json object, with nothing cut or put around the text. Changes spec["model"]."""
    model, lost = spec["model"], lost_id(spec)
    if isinstance(vocab := model["vocab"], dict):
        used = set(vocab.values())  # the library counts on from the vocabulary's length: let that be the largest id + 1
        vocab.update({f"{UNREACHABLE}{i}": i for i in range(max(used)) if i not in used})
    if lost is not None:
        # The library drops what such a model has no token for and says nothing; `FileTokenizer.encode` refuses this id instead.
        name = f"{UNREACHABLE}lost"
        model["vocab"][name], model["unk_token"] = lost, name
    try:
        whole = json.dumps({**spec, "post_processor": None, "truncation": None, "padding": None})
        return load_library().Tokenizer.from_str(whole)
    except Exception as error:  # the library raises bare Exception for all that it cannot read
        raise ValueError(f"{place}: the tokenizers library refuses it: {error}") from None
