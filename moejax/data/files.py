"""Sources over files, on local disks or object stores (gs://, s3:// through `etils.epath`): a document a file, or a line.

A source is opened once: its files are listed, and what `lengths` and random access need is kept in memory, optionally also in a
cache file. A document that later does not have the length it was indexed with is an error, as batches are planned on lengths.

N: tokens of a document.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .file_index import cached
from .json_lines import Line, LineReader
from .sources import TokenDocument, digest_of, tokenizer_fingerprint
from .tokenizer import ByteTokenizer

Paths = str | os.PathLike | Sequence[str | os.PathLike]
CHUNK = 8 << 20  # bytes read at a time to hash a file


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """path: as epath opens it; name: the path relative to what all files share, with forward slashes; size: bytes; changed: when the
    file was last written (nanoseconds locally, else seconds, 0 where the store does not say), for the cache only."""

    path: str
    name: str
    size: int
    changed: int


class FilesSource:
    """Each file is a document: BOS, its text, EOS.

    files: a folder (every file below it whose name ends with `suffix`; hidden ones and links to folders aside), a glob
        ("corpus/**/*.txt"; "**" only locally), or a list of files; local or "gs://...". Order: by name; a list keeps its own.
    tokenizer: None: bytes, for which lengths are sizes + 2. With another, every file is read and encoded once at the first
        `lengths()`; files must be UTF-8 then.
    cache: a local file for what was computed (lengths, hashes), used again while names, sizes, times of change and tokenizer are
        the same. It is replaced whole.
    hash_content: False for stores too large to be read at the start: the fingerprint then knows names and sizes only, and says so.

    Empty files are left out and counted in the fingerprint. ValueError: nothing found, a file given twice, a file that is no text
    for the tokenizer, a file that changed since it was indexed.
    """

    def __init__(
        self,
        name: str,
        files: Paths,
        tokenizer: Any = None,
        *,
        suffix: str = "",
        cache: str | os.PathLike | None = None,
        hash_content: bool = True,
    ):
        self.name = name
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        found = list_files(name, files, suffix)
        self.files = [file for file in found if file.size]
        self.empty = len(found) - len(self.files)
        if not self.files:
            raise ValueError(f"source {name!r}: all {len(found)} files of {_shown(files)} are empty; give files with text.")
        self.hash_content = hash_content
        self._cache = None if cache is None else pathlib.Path(cache)
        self._lengths: np.ndarray | None = None
        self._sha256: str | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int, /) -> TokenDocument:
        file = self.files[index]
        ids = self._encode(file)
        wanted = self.lengths()[index]
        if len(ids) != wanted:
            raise ValueError(f"{file.path} has {len(ids)} tokens and had {wanted} when it was indexed; restart after files change.")
        return TokenDocument(ids)

    def lengths(self) -> np.ndarray:
        if self._lengths is None:
            if isinstance(self.tokenizer, ByteTokenizer):
                self._lengths = np.array([file.size + 2 for file in self.files], np.int64)
            else:
                self._lengths = cached(self._part("lengths"), self._key("lengths"), self._encoded_lengths)["lengths"]
        return self._lengths

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": "files",
            "documents": len(self),
            "bytes": sum(file.size for file in self.files),
            "empty_files": self.empty,
            "sha256_of": "names, sizes and contents" if self.hash_content else "names and sizes",
            "sha256": self._manifest_digest(),
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
        }

    def _manifest_digest(self) -> str:
        if self._sha256 is None:
            lines = [f"{file.name}\t{file.size}" for file in self.files]
            if self.hash_content:
                hashes = cached(self._part("hashes"), self._key("hashes"), lambda: {"sha256": _hashes(self.files)})["sha256"]
                lines = [f"{line}\t{sha256}" for line, sha256 in zip(lines, hashes.tolist(), strict=True)]
            self._sha256 = digest_of(line.encode("utf-8", "surrogateescape") for line in lines)
        return self._sha256

    def _encode(self, file: FileEntry) -> np.ndarray:
        data = _path(file.path).read_bytes()
        try:
            return self.tokenizer.encode(data, bos=True, eos=True, control_tokens=False)
        except ValueError as error:
            raise ValueError(f"source {self.name!r}, {file.path}: {error}") from None

    def _encoded_lengths(self) -> dict[str, np.ndarray]:
        return {"lengths": np.array([len(self._encode(file)) for file in self.files], np.int64)}

    def _part(self, part: str) -> pathlib.Path | None:
        """Lengths and hashes are computed at different times: a file each."""
        return None if self._cache is None else self._cache.with_name(f"{self._cache.name}.{part}.npz")

    def _key(self, part: str) -> dict[str, Any]:
        tokenizer = tokenizer_fingerprint(self.tokenizer) if part == "lengths" else None
        return {"kind": f"files {part}", "files": [[f.name, f.size, f.changed] for f in self.files], "tokenizer": tokenizer}


class JsonlSource:
    """Each line of JSON-lines files is a document.

    files: as in `FilesSource` (a folder's files end with `suffix`). Empty lines are passed over.
    form: "text": the field holds a str, the document is BOS, text, EOS. "tokens": the field holds the ids, taken as they are;
        `mask_field`, where a line has it, holds one true/false (or 1/0) for each: whether the token is learned as a target.
        "messages": the field holds a dialog, rendered between BOS and EOS as in `dialog`; only what the model wrote is learned.
    field: None: of the form's name.
    tokenizer: None: bytes. For "tokens" it is what ids are checked against.
    cache: a local file for the index of offsets and lengths, used again while files, form and tokenizer are the same.

    All lines are read once here, and each is checked. ValueError with file and line number: what is no JSON object, lacks the
    field, or has it of the wrong type; ids outside the vocabulary; a mask of another length.
    """

    def __init__(
        self,
        name: str,
        files: Paths,
        tokenizer: Any = None,
        *,
        form: str = "text",
        field: str | None = None,
        mask_field: str = "loss_mask",
        suffix: str = ".jsonl",
        cache: str | os.PathLike | None = None,
    ):
        self.name = name
        self.tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
        self.reader = LineReader(name, self.tokenizer, form, form if field is None else field, mask_field)
        self.files = list_files(name, files, suffix)
        key = {"kind": "jsonl", "files": [[f.name, f.size, f.changed] for f in self.files], "reads": self._reads()}
        index = cached(None if cache is None else pathlib.Path(cache), key, self._index)
        self._lines, self._lengths, self._sha256 = index["lines"], index["lengths"], str(index["sha256"])
        if not len(self._lengths):
            raise ValueError(f"source {name!r}: {_shown(files)} hold no line; give one JSON object a line.")

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int, /) -> TokenDocument:
        file, number, start, size = self._lines[index].tolist()
        with _path(self.files[file].path).open("rb") as handle:
            handle.seek(start)
            data = handle.read(size)
        document = self.reader.read(Line(data, self.files[file].path, number))
        if len(document.ids) != self._lengths[index]:
            raise ValueError(
                f"{self.files[file].path}, line {number} has {len(document.ids)} tokens and had {self._lengths[index]} when it was "
                "indexed; restart after files change."
            )
        return document

    def lengths(self) -> np.ndarray:
        return self._lengths

    def fingerprint(self) -> dict[str, Any]:
        size = sum(file.size for file in self.files)
        return {"kind": "jsonl", "documents": len(self), "files": len(self.files), "bytes": size, "sha256": self._sha256, **self._reads()}

    def _reads(self) -> dict[str, Any]:
        return {**self.reader.settings(), "tokenizer": tokenizer_fingerprint(self.tokenizer)}

    def _index(self) -> dict[str, np.ndarray]:
        """lines: int64 [documents, 4], each as file, line number (from 1), offset, bytes; lengths; sha256 of the manifest."""
        lines, lengths, manifest = [], [], []
        for number, file in enumerate(self.files):
            digest, offset = hashlib.sha256(), 0
            with _path(file.path).open("rb") as handle:
                for row, data in enumerate(handle, start=1):
                    digest.update(data)
                    if data.strip():
                        lengths.append(len(self.reader.read(Line(data, file.path, row)).ids))
                        lines.append((number, row, offset, len(data)))
                    offset += len(data)
            manifest.append(f"{file.name}\t{offset}\t{digest.hexdigest()}".encode("utf-8", "surrogateescape"))
        return {
            "lines": np.array(lines, np.int64).reshape(-1, 4),
            "lengths": np.array(lengths, np.int64),
            "sha256": np.array(digest_of(manifest)),
        }


def list_files(name: str, files: Paths, suffix: str = "") -> list[FileEntry]:
    """The files of a folder, a glob or a list, with their names relative to what they share.

    ValueError: nothing found, a path in a list that is no file, or twice in it.
    """
    paths, listed = _found(files, suffix)
    if not paths:
        below = f" with the suffix {suffix!r}" if suffix and not listed else ""
        raise ValueError(f"source {name!r}: nothing is found by {_shown(files)}{below}; give a folder, a glob or a list of files.")
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"source {name!r}: {twice} is given twice; every file once.")
    missing = next((path for path in paths if not _path(path).is_file()), None) if listed else None
    if missing is not None:
        raise ValueError(f"source {name!r}: {missing} is no file; give a folder, a glob or a list of files.")
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [FileEntry(path, os.path.relpath(path, shared).replace(os.sep, "/"), *_stat(path)) for path in paths]


def _found(files: Paths, suffix: str) -> tuple[list[str], bool]:
    """-> (paths, whether they were listed by the caller, so that each may be missing)."""
    if not isinstance(files, str | os.PathLike):
        return [_absolute(path) for path in files], True
    given = _absolute(files)
    if glob.has_magic(given):
        return sorted(_matches(given)), False
    root = _path(given)
    return (sorted(_below(root, suffix)), False) if root.is_dir() else ([given], True)


def _absolute(path: str | os.PathLike) -> str:
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(text)


def _path(path: str) -> Any:
    """The path as `etils.epath` opens it; imported on first use."""
    try:
        from etils import epath
    except ImportError as error:
        raise ImportError("files are read through etils.epath: pip install 'etils[epath]'") from error
    return epath.Path(path)


def _matches(pattern: str) -> list[str]:
    """Files of a glob. epath looks below the folder before the first wildcard, and knows no "**": a store has no folders to walk."""
    if "://" not in pattern:
        return [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if "**" in pattern:
        raise ValueError(f"{pattern!r} holds '**', which object stores have not; give the folder and a suffix, which takes all below it.")
    parts = pattern.split("/")
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return [os.fspath(path) for path in _path("/".join(parts[:first])).glob("/".join(parts[first:])) if path.is_file()]


def _below(folder: Any, suffix: str) -> list[str]:
    found = []
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            linked = "://" not in os.fspath(path) and os.path.islink(path)  # may lead back up
            found += [] if linked else _below(path, suffix)
        elif path.name.endswith(suffix):
            found.append(os.fspath(path))
    return found


def _stat(path: str) -> tuple[int, int]:
    if "://" not in path:
        local = os.stat(path)  # to the nanosecond: a file rewritten within the second is another
        return local.st_size, local.st_mtime_ns
    remote = _path(path).stat()
    return int(remote.length), int(remote.mtime or 0)


def _hashes(files: list[FileEntry]) -> np.ndarray:
    """[files]: sha256 of each, in hex."""
    found = []
    for file in files:
        digest = hashlib.sha256()
        with _path(file.path).open("rb") as handle:
            while chunk := handle.read(CHUNK):
                digest.update(chunk)
        found.append(digest.hexdigest())
    return np.array(found)


def _shown(files: Paths) -> str:
    return repr(os.fspath(files)) if isinstance(files, str | os.PathLike) else f"the list of {len(files)} files"
