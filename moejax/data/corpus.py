"""Where the text comes from: this Python's standard library, a folder, or a seeded generator.

A corpus is split into training and held-out documents by file, never inside one, by a hash of the relative path: a
file keeps its side when others come or go. Exact duplicates are dropped before the split, so that no held-out file was
trained on.
"""

import dataclasses
import hashlib
import os
import pathlib
import platform
import re
import sysconfig
from collections.abc import Iterable

import numpy as np

from .counter import CounterHash

HELD_OUT_PERCENT = 5
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
# Tables written by a program: character maps, ABI lists, build variables. The documentation topics are made by one
# too, but are prose.
GENERATED = re.compile(rb"generated (and used )?(by|from)", re.IGNORECASE)
GENERATED_BUT_PROSE = {"pydoc_data/topics.py"}
LARGEST_FILE = 16 << 20


@dataclasses.dataclass(frozen=True)
class Document:
    """name: path relative to the source's root, with forward slashes; data: its bytes."""

    name: str
    data: bytes


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What identifies a corpus: two corpora with one sha256 hold the same bytes under the same names, split alike."""

    source: str
    sha256: str
    python: str
    train_documents: int
    train_bytes: int
    heldout_documents: int
    heldout_bytes: int
    duplicates_dropped: int
    files_skipped: int

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """train, heldout: documents in order of name; manifest: what they are."""

    train: tuple[Document, ...]
    heldout: tuple[Document, ...]
    manifest: Manifest


def standard_library() -> Corpus:
    """The `.py` files of the running Python's standard library: about 30 MB of code, of some 1,700 documents on 3.11.

    Installed packages and files that a program generated are left out. The text depends on the Python version, so the
    manifest belongs into every run's record. ValueError when the interpreter comes without its library's sources.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    documents, skipped = [], 0
    for name in _walk(root, skip=SKIPPED_FOLDERS, suffix=".py"):
        data = (root / name).read_bytes()
        if name not in GENERATED_BUT_PROSE and GENERATED.search(data[:400]):
            skipped += 1
        elif data:
            documents.append(Document(name, data))
    if len(documents) < 100:
        raise ValueError(
            f"the standard library at {root} has {len(documents)} .py files; a full one has over 500. "
            "Give a folder of text instead: --corpus FOLDER."
        )
    return make_corpus("standard library", documents, skipped=skipped)


def folder_corpus(folder: str | os.PathLike) -> Corpus:
    """Every text file (UTF-8, no zero byte, at most 16 MiB) under `folder`, hidden ones and links to folders aside.

    What is not text is skipped and counted in the manifest. ValueError when the folder is missing or holds fewer than
    two text files that differ (the split is by file).
    """
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise ValueError(f"the corpus folder {str(folder)!r} is no folder; give one that holds text files.")
    documents, skipped = [], 0
    for name in _walk(root, skip=set(), suffix=""):
        path = root / name
        data = path.read_bytes() if path.stat().st_size <= LARGEST_FILE else b""
        if data and _is_text(data):
            documents.append(Document(name, data))
        else:
            skipped += 1
    return make_corpus(f"folder {root.name or root.resolve().name}", documents, skipped=skipped)


def synthetic_corpus(*, documents: int = 64, seed: int = 0, mean_words: int = 400) -> Corpus:
    """Made-up text that is the same bytes on every Python and NumPy: for tests, which may assert exact numbers on it.

    Words of 3-8 letters from a fixed list of 96, drawn with weights falling as 1/rank; half of the words are
    followed by the one word that belongs to them. A model that sees whole words beats a bigram of bytes clearly.
    """
    if documents < 2 or mean_words < 1:
        raise ValueError(f"documents={documents}, mean_words={mean_words}; needed: at least 2 documents of 1 word.")
    words = _word_list(CounterHash(seed, stream=0))
    cumulative = np.cumsum(1.0 / np.arange(1, len(words) + 1))
    made = []
    for index in range(documents):
        numbers = CounterHash(seed, stream=index + 1)
        length = mean_words // 2 + numbers.integers(0, 1, mean_words + 1).item() + 1
        draws = numbers.uniform(1, length)
        follows = numbers.uniform(1 + length, length) < 0.5
        chosen = np.searchsorted(cumulative, draws * cumulative[-1])
        for i in range(1, length):
            if follows[i]:
                chosen[i] = (chosen[i - 1] * 31 + 7) % len(words)
        text = " ".join(words[c] + ("." if c % 8 == 7 else "") for c in chosen)
        made.append(Document(f"synthetic/{index:05d}.txt", (text + "\n").encode()))
    return make_corpus(f"synthetic seed {seed}", made)


def make_corpus(source: str, documents: Iterable[Document], *, skipped: int = 0) -> Corpus:
    """Drop exact duplicates (the first name stays), split by name, and write the manifest.

    Held out are the names whose hash modulo 100 is below 5. When that puts every document on one side (small folders),
    the one document with the smallest hash is held out. ValueError when fewer than two documents remain.
    """
    unique: dict[bytes, Document] = {}
    total = 0
    for document in sorted(documents, key=lambda d: d.name):
        total += 1
        unique.setdefault(hashlib.sha256(document.data).digest(), document)
    if len(unique) < 2:
        raise ValueError(f"{source}: {len(unique)} distinct text files; needed: 2, as whole files are held out for scoring.")
    lines = [f"{d.name}\t{len(d.data)}\t{digest.hex()}\n" for digest, d in unique.items()]
    held = {d.name for d in unique.values() if name_hash(d.name) % 100 < HELD_OUT_PERCENT}
    if not held or len(held) == len(unique):
        held = {min((name_hash(d.name), d.name) for d in unique.values())[1]}
    train = tuple(d for d in unique.values() if d.name not in held)
    heldout = tuple(d for d in unique.values() if d.name in held)
    manifest = Manifest(
        source=source,
        sha256=hashlib.sha256("".join([*lines, *sorted(held)]).encode("utf-8", "surrogateescape")).hexdigest(),
        python=platform.python_version(),
        train_documents=len(train),
        train_bytes=sum(len(d.data) for d in train),
        heldout_documents=len(heldout),
        heldout_bytes=sum(len(d.data) for d in heldout),
        duplicates_dropped=total - len(unique),
        files_skipped=skipped,
    )
    return Corpus(train, heldout, manifest)


def name_hash(name: str) -> int:
    """The 64-bit hash of a relative path that decides its side of the split."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def _walk(root: pathlib.Path, *, skip: set[str], suffix: str) -> list[str]:
    names = []
    for folder, children, files in os.walk(root):
        children[:] = sorted(c for c in children if c not in skip and not c.startswith("."))
        for file in files:
            path = pathlib.Path(folder, file)
            if file.endswith(suffix) and not file.startswith(".") and path.is_file():
                names.append(path.relative_to(root).as_posix())
    return sorted(names)


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _word_list(numbers: CounterHash, count: int = 96) -> list[str]:
    lengths = 3 + numbers.integers(0, count, 6)
    letters = numbers.integers(count, int(lengths.sum()), 26)
    ends = np.cumsum(lengths)
    return [
        "".join(chr(97 + int(letter)) for letter in letters[end - length : end])
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
    ]
