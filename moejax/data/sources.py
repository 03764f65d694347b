"""What a mixture draws from: a named, finite, indexable list of documents as token ids, whose lengths are known beforehand.

N: tokens of a document. Batches are planned on lengths alone (`lengths`), on every process; only the process that owns a row reads
the documents in it. So `lengths` must be cheap, and exactly what `source[i]` gives.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .corpus import Document
from .tokenizer import ByteTokenizer


@dataclasses.dataclass(frozen=True)
class TokenDocument:
    """ids: int32 [N], N >= 1, BOS and EOS included where the producer wants them.

    mask: None, or bool [N]: token i counts in the loss as a target. False for what is to be read but not learned: a prompt, a
    tool's output. The first token of a piece is never a target, whatever the mask says.
    """

    ids: np.ndarray
    mask: np.ndarray | None = None


@runtime_checkable
class Source(Protocol):
    """A finite list of documents that gives the same document for the same index in every process and every run."""

    @property
    def name(self) -> str:
        """Its name in mixtures, states and metrics: two sources of one name are the same source."""
        ...

    def __len__(self) -> int:
        """Documents an epoch."""
        ...

    def __getitem__(self, index: int, /) -> TokenDocument: ...

    def lengths(self) -> np.ndarray:
        """int64 [len(self)]: tokens of each document, each at least 1, computed at most once."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the content, small and JSON: equal fingerprints mean equal documents under equal indices."""
        ...


class CorpusSource:
    """Documents of a `Corpus` (its train or heldout), each as BOS, its text, EOS.

    With a `ByteTokenizer` the lengths are those of the data + 2; any other tokenizer encodes all documents at the first use,
    once, and the ids are kept.
    """

    def __init__(self, name: str, documents: Iterable[Document], tokenizer: Any = None):
        self.name = name
        self.documents = tuple(documents)
        if not self.documents:
            raise ValueError(f"source {name!r} has no documents; it needs at least one.")
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self._lengths: np.ndarray | None = None
        self._ids: list[np.ndarray] | None = None
        self._sha256: str | None = None

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int, /) -> TokenDocument:
        return TokenDocument(self._encode(self.documents[index]) if self._bytes else self._encoded()[index])

    def lengths(self) -> np.ndarray:
        if self._lengths is None:
            lengths = (len(d.data) + 2 for d in self.documents) if self._bytes else map(len, self._encoded())
            self._lengths = np.fromiter(lengths, np.int64, len(self.documents))
        return self._lengths

    def fingerprint(self) -> dict[str, Any]:
        if self._sha256 is None:
            self._sha256 = digest_of(d.data for d in self.documents)
        return {"kind": "corpus", "documents": len(self), "sha256": self._sha256, "tokenizer": tokenizer_fingerprint(self.tokenizer)}

    @property
    def _bytes(self) -> bool:
        return type(self.tokenizer) is ByteTokenizer  # one derived from it may encode in its own way

    def _encode(self, document: Document) -> np.ndarray:
        return self.tokenizer.encode(document.data, bos=True, eos=True, control_tokens=False)

    def _encoded(self) -> list[np.ndarray]:
        if self._ids is None:
            self._ids = [self._encode(d) for d in self.documents]
        return self._ids


class TokenSource:
    """Ready token lists, with BOS and EOS where they want them.

    documents: int [N] each, N >= 1. masks: one bool [N] for each document, or None for all targets (`TokenDocument`).
    ValueError: no documents, an empty one, ids that are no non-negative integers, a mask of another length.
    """

    def __init__(self, name: str, documents: Iterable[Sequence[int] | np.ndarray], masks: Iterable[Any] | None = None):
        self.name = name
        self.documents = [_ids(name, i, ids) for i, ids in enumerate(documents)]
        if not self.documents:
            raise ValueError(f"source {name!r} has no documents; it needs at least one.")
        self.masks = None if masks is None else [np.asarray(mask, bool) for mask in masks]
        if self.masks is not None:
            sizes, wanted = [m.shape for m in self.masks], [d.shape for d in self.documents]
            if sizes != wanted:
                raise ValueError(f"source {name!r}: the masks have shapes {sizes[:8]}, the documents {wanted[:8]}; one entry a token.")
        self._lengths = np.array([len(d) for d in self.documents], np.int64)
        self._sha256: str | None = None

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int, /) -> TokenDocument:
        return TokenDocument(self.documents[index], None if self.masks is None else self.masks[index])

    def lengths(self) -> np.ndarray:
        return self._lengths

    def fingerprint(self) -> dict[str, Any]:
        if self._sha256 is None:
            parts = [d.astype("<i4").tobytes() for d in self.documents]
            self._sha256 = digest_of(parts + [m.tobytes() for m in self.masks or ()])
        return {"kind": "tokens", "documents": len(self), "masked": self.masks is not None, "sha256": self._sha256}


class LengthRange:
    """The documents of `source` that have min_tokens to max_tokens tokens: natural long documents, to be weighted apart.

    It is another source than the whole, with a name of its own. ValueError when no document has such a length.
    """

    def __init__(self, name: str, source: Source, *, min_tokens: int = 1, max_tokens: int | None = None):
        lengths = source.lengths()
        keep = lengths >= min_tokens if max_tokens is None else (lengths >= min_tokens) & (lengths <= max_tokens)
        if not keep.any():
            raise ValueError(
                f"source {name!r}: no document of {source.name!r} has {min_tokens} to {max_tokens or 'more'} tokens; "
                f"they have {lengths.min()} to {lengths.max()}."
            )
        self.name, self.source, self.range = name, source, (min_tokens, max_tokens)
        self._indices = np.flatnonzero(keep)
        self._lengths = lengths[self._indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int, /) -> TokenDocument:
        return self.source[int(self._indices[index])]

    def lengths(self) -> np.ndarray:
        return self._lengths

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "length range", "range": list(self.range), "of": self.source.fingerprint()}


def digest_of(parts: Iterable[bytes]) -> str:
    """sha256 of byte strings one after another, each with its length: moving a byte from one to the next changes it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def json_digest(value: Any) -> str:
    """16 hex digits that identify a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=8)  # half a second for 160,000 ids
def tokenizer_fingerprint(tokenizer: Any) -> dict[str, Any]:
    """What identifies a tokenizer: its own `fingerprint()` if it has one, else its sizes, ends and the text of every id."""
    own: Callable[[], dict[str, Any]] | None = getattr(tokenizer, "fingerprint", None)
    if own is not None:
        return own()
    texts = (tokenizer.decode([i], errors="backslashreplace", show_special=True) for i in range(tokenizer.vocab_size))
    ends = {name: getattr(tokenizer, f"{name}_id", None) for name in ("pad", "bos", "eos")}
    sha256 = digest_of(text.encode("utf-8", "surrogatepass") for text in texts)
    return {"kind": type(tokenizer).__name__, "vocab_size": tokenizer.vocab_size, **ends, "sha256": sha256}


def _ids(name: str, index: int, ids: Any) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= 2**31:
        raise ValueError(
            f"source {name!r}, document {index}: {array.dtype} of shape {array.shape}; needed: at least one id, all in [0, 2**31)."
        )
    return array.astype(np.int32)
