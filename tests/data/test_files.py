"""Sources over files: what they list, read, count, refuse, and keep in a cache."""

import json
import os
import pickle
import sys

import numpy as np
import pytest

from moejax.data import ByteTokenizer
from moejax.data.file_index import cached
from moejax.data.files import FilesSource, JsonlSource
from moejax.data.sources import Source

pytest.importorskip("etils.epath", reason="files are read through etils.epath")
BYTES = ByteTokenizer()
TEXTS = {"a.txt": b"alpha", "b/c.txt": "gr\u00fcn".encode(), "b/d.md": b"delta\n", "b/e.txt": b"", ".hidden": b"no"}


class Pairs:
    """Two bytes a token: lengths that no file size gives. `encoded` counts the calls."""

    vocab_size, pad_id, bos_id, eos_id, special_ids = 320, 256, 257, 258, BYTES.special_ids

    def __init__(self):
        self.encoded = 0

    def fingerprint(self):
        return {"kind": "pairs"}

    def encode(self, text, **_):
        self.encoded += 1
        return np.concatenate([[257], BYTES.encode(text)[::2], [258]]).astype(np.int32)

    check = BYTES.check


@pytest.fixture
def folder(tmp_path):
    for name, data in TEXTS.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "corpus"


def lines(path, *values):
    path.write_text("".join(v if isinstance(v, str) else json.dumps(v) + "\n" for v in values))
    return path


# --- a file a document


def test_a_folder_a_glob_and_a_list(folder):
    whole = FilesSource("files", folder)
    assert isinstance(whole, Source)
    assert [f.name for f in whole.files] == ["a.txt", "b/c.txt", "b/d.md"] and whole.empty == 1
    assert [BYTES.decode_bytes(whole[i].ids) for i in range(len(whole))] == [b"alpha", TEXTS["b/c.txt"], b"delta\n"]
    assert whole[0].ids[0] == BYTES.bos_id and whole[0].ids[-1] == BYTES.eos_id and whole[0].mask is None
    assert whole.lengths().tolist() == [len(whole[i].ids) for i in range(3)] == [7, 7, 8]
    assert [f.name for f in FilesSource("files", folder, suffix=".txt").files] == ["a.txt", "b/c.txt"]
    assert [f.name for f in FilesSource("files", f"{folder}/**/*.md").files] == ["d.md"]
    assert [f.name for f in FilesSource("files", f"{folder}/*/[cd].*").files] == ["c.txt", "d.md"]
    listed = FilesSource("files", [folder / "b/d.md", folder / "a.txt"])
    assert [f.name for f in listed.files] == ["b/d.md", "a.txt"]
    (folder / "b" / "up").symlink_to(folder)
    assert FilesSource("files", folder).files == whole.files  # a link to a folder may lead back up
    again = pickle.loads(pickle.dumps(whole))  # as a worker process gets it
    assert (again[1].ids == whole[1].ids).all() and again.fingerprint() == whole.fingerprint()


def test_fingerprint_tells_content_names_and_tokenizer(folder, tmp_path):
    first = FilesSource("files", folder).fingerprint()
    assert first["documents"] == 3 and first["bytes"] == 16 and first["empty_files"] == 1 and json.loads(json.dumps(first)) == first
    moved = tmp_path / "elsewhere"
    os.rename(folder, moved)
    assert FilesSource("files", moved).fingerprint() == first  # where it lies is no part of it
    unread = FilesSource("files", moved, hash_content=False).fingerprint()
    (moved / "a.txt").write_bytes(b"alphA")
    assert FilesSource("files", moved).fingerprint()["sha256"] != first["sha256"]
    assert FilesSource("files", moved, hash_content=False).fingerprint() == unread and unread["sha256_of"] == "names and sizes"
    (moved / "a.txt").rename(moved / "z.txt")
    assert FilesSource("files", moved, hash_content=False).fingerprint()["sha256"] != unread["sha256"]
    assert FilesSource("files", moved, Pairs()).fingerprint()["tokenizer"] == {"kind": "pairs"}


def test_lengths_are_computed_once_and_cached(folder, tmp_path):
    cache = tmp_path / "cache" / "files"
    tokenizer = Pairs()
    source = FilesSource("files", folder, tokenizer, cache=cache)
    assert source.lengths().tolist() == source.lengths().tolist() == [5, 5, 5] and tokenizer.encoded == 3
    fingerprint, fresh = source.fingerprint(), Pairs()
    again = FilesSource("files", folder, fresh, cache=cache)
    assert again.lengths().tolist() == [5, 5, 5] and fresh.encoded == 0 and again.fingerprint() == fingerprint
    (folder / "a.txt").write_bytes(b"alphabet")  # another size: the cache does not fit
    changed = FilesSource("files", folder, fresh, cache=cache)
    assert changed.lengths().tolist() == [6, 5, 5] and fresh.encoded == 3 and changed.fingerprint() != fingerprint
    stat = os.stat(folder / "a.txt")
    (folder / "a.txt").write_bytes(b"ALPHABET")  # the same size, a later time
    os.utime(folder / "a.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert FilesSource("files", folder, fresh, cache=cache).fingerprint() != changed.fingerprint()
    assert sorted(p.name for p in cache.parent.iterdir()) == ["files.hashes.npz", "files.lengths.npz"]  # nothing half-written


def test_a_damaged_cache_is_replaced(tmp_path):
    path, calls = tmp_path / "index.npz", []

    def compute():
        calls.append(1)
        return {"lengths": np.arange(50)}

    for damage in (lambda data: data, lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"x" * 100):
        cached(path, {"a": 1}, compute)
        path.write_bytes(damage(path.read_bytes()))
        assert (cached(path, {"a": 1}, compute)["lengths"] == np.arange(50)).all()
    assert len(calls) == 4  # at the start, and after each of three damages
    cached(path, {"a": 2}, compute)
    assert len(calls) == 5


def test_what_files_refuse(folder, tmp_path):
    (tmp_path / "void").mkdir()
    (tmp_path / "void" / "e").touch()
    for files, message in (
        (tmp_path / "nowhere", "nowhere is no file; give a folder, a glob or a list"),
        (f"{folder}/*.rst", "nothing is found by '.*rst'; give"),
        ([], "nothing is found by the list of 0 files"),
        ([folder / "a.txt", folder / "a.txt"], "a.txt is given twice"),
        ([folder / "a.txt", folder / "b"], "b is no file"),
        (tmp_path / "void", "all 1 files .* are empty"),
    ):
        with pytest.raises(ValueError, match=message):
            FilesSource("files", files)
    with pytest.raises(ValueError, match=r"nothing is found by .* with the suffix '.rst'"):
        FilesSource("files", folder, suffix=".rst")
    source = FilesSource("files", folder)
    (folder / "a.txt").write_bytes(b"longer than before")
    with pytest.raises(ValueError, match=r"a.txt has 20 tokens and had 7 when it was indexed; restart after files change"):
        source[0]


@pytest.fixture
def store(monkeypatch):
    """gs:// in memory, behind epath as it is: no network. -> the file system, to put files into."""
    pytest.importorskip("fsspec", reason="epath reaches object stores through fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Stored(MemoryFileSystem):
        protocol, store, pseudo_dirs = ("gs", "gcs"), {}, [""]

        @classmethod
        def _strip_protocol(cls, path):
            return "/" + path.removeprefix("gs://").strip("/")

        def glob(self, path, **settings):  # names without a leading slash, as in a bucket
            return [found.lstrip("/") for found in super().glob(path, **settings)]

    for name in ("gs", "gcs"):
        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, name, Stored)
    yield Stored()
    from etils.epath import backend

    forget = getattr(getattr(backend._FileSystemSpecBackend, "_get_filesystem", None), "cache_clear", None)
    if forget is not None:  # epath keeps the file systems it has found
        forget()


def test_files_of_an_object_store_go_through_epath(folder, store):
    for path in folder.rglob("*"):
        if path.is_file():
            store.pipe(f"gs://bucket/corpus/{path.relative_to(folder).as_posix()}", path.read_bytes())
    store.pipe("gs://bucket/lines.jsonl", b'{"text": "one"}\n\n{"text": "two"}\n')
    remote, local = FilesSource("files", "gs://bucket/corpus", suffix=".txt"), FilesSource("files", folder, suffix=".txt")
    assert [(f.path, f.name) for f in remote.files] == [("gs://bucket/corpus/a.txt", "a.txt"), ("gs://bucket/corpus/b/c.txt", "b/c.txt")]
    assert [remote[i].ids.tolist() for i in range(2)] == [local[i].ids.tolist() for i in range(2)]
    assert remote.fingerprint() == local.fingerprint()
    assert [f.path for f in FilesSource("files", "gs://bucket/corpus/*/*.md").files] == ["gs://bucket/corpus/b/d.md"]
    assert BYTES.decode(JsonlSource("lines", ["gs://bucket/lines.jsonl"])[1].ids) == "two"
    with pytest.raises(ValueError, match="gs://bucket/none is no file"):
        FilesSource("files", "gs://bucket/none")
    with pytest.raises(ValueError, match=r"holds '\*\*', which object stores have not; give the folder"):
        FilesSource("files", "gs://bucket/**/*.md")


# --- a line a document


def test_lines_of_text(tmp_path):
    lines(tmp_path / "b.jsonl", {"text": "gr\u00fcn", "id": 1}, "\n", {"text": ""}, '{"text": "last without a line end"}')
    lines(tmp_path / "a.jsonl", {"text": "first"})
    source = JsonlSource("lines", tmp_path)
    texts = ["first", "gr\u00fcn", "", "last without a line end"]
    assert isinstance(source, Source) and len(source) == 4
    for i in (3, 1, 0, 2):  # in any order
        assert BYTES.decode(source[i].ids) == texts[i] and source[i].mask is None
        assert source[i].ids[0] == BYTES.bos_id and source[i].ids[-1] == BYTES.eos_id
    assert source.lengths().tolist() == [len(t.encode()) + 2 for t in texts]
    before = source.fingerprint()
    assert before["files"] == 2 and before["form"] == "text" and json.loads(json.dumps(before)) == before
    lines(tmp_path / "a.jsonl", {"text": "fIrst"})
    assert JsonlSource("lines", tmp_path).fingerprint()["sha256"] != before["sha256"]


def test_lines_of_tokens_and_masks(tmp_path):
    path = lines(
        tmp_path / "t.jsonl",
        {"ids": [257, 5, 6], "m": [False, True, False]},
        {"ids": [7]},
        {"ids": [8, 9], "m": [1, 0]},
    )
    source = JsonlSource("tokens", path, form="tokens", field="ids", mask_field="m")
    assert [source[i].ids.tolist() for i in range(3)] == [[257, 5, 6], [7], [8, 9]] and source[0].ids.dtype == np.int32
    assert source[0].mask.tolist() == [False, True, False] and source[1].mask is None and source[2].mask.tolist() == [True, False]
    assert source.lengths().tolist() == [3, 1, 2]


def test_lines_of_dialogs(tmp_path):
    dialog = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    document = JsonlSource("dialogs", lines(tmp_path / "d.jsonl", {"messages": dialog}), form="messages")[0]
    shown = "<|bos|><|user|>2+2?<|turn_end|><|assistant|>4<|turn_end|><|eos|>"
    assert BYTES.decode(document.ids, show_special=True) == shown
    assert BYTES.decode(document.ids[document.mask], show_special=True) == "4<|turn_end|>"


def test_lines_are_indexed_once_and_cached(tmp_path):
    path, cache = lines(tmp_path / "t.jsonl", {"text": "abcd"}, {"text": "ef"}), tmp_path / "index.npz"
    first, second = Pairs(), Pairs()
    source = JsonlSource("lines", path, first, cache=cache)
    assert first.encoded == 2 and source.lengths().tolist() == [4, 3]
    again = JsonlSource("lines", path, second, cache=cache)
    assert second.encoded == 0 and again.lengths().tolist() == [4, 3] and again.fingerprint() == source.fingerprint()
    assert (again[1].ids == source[1].ids).all()
    assert JsonlSource("lines", path, cache=cache).lengths().tolist() == [6, 4]  # another tokenizer: the cache does not fit
    lines(path, {"text": "abcdefgh"}, {"text": "ef"})
    with pytest.raises(ValueError, match=r"t.jsonl, line 1"):
        source[0]
    assert JsonlSource("lines", path, cache=cache).lengths().tolist() == [10, 4]


@pytest.mark.parametrize(
    ("bad", "settings", "message"),
    [
        ("{not json}\n", {}, "is no JSON .*Expecting property name"),
        ('["list"]\n', {}, "a JSON list, and must be an object"),
        ({"txt": "x"}, {}, "no field 'text', but 'txt'"),
        ({"text": 5}, {}, "field 'text' holds a int, and must hold a str"),
        ({"tokens": []}, {"form": "tokens"}, "holds an empty list, and must hold a list of at least one integer"),
        ({"tokens": [1, True]}, {"form": "tokens"}, "must hold a list of at least one integer"),
        ({"tokens": [1, 400]}, {"form": "tokens"}, r"token ids hold 400; they must be integers in \[0, 320\)"),
        ({"tokens": [1, 2], "loss_mask": [True]}, {"form": "tokens"}, "'loss_mask' holds a list of 1 entries, .* each of 2 ids"),
        ({"tokens": [1, 2], "loss_mask": [1, 2]}, {"form": "tokens"}, "must hold true or false for each of 2 ids"),
        ({"messages": [{"role": "bot", "content": "x"}]}, {"form": "messages"}, "message 0 has the role 'bot'"),
    ],
)
def test_a_bad_line_is_named(bad, settings, message, tmp_path):
    form = settings.get("form", "text")
    good = {"text": "x", "tokens": [1], "messages": [{"role": "user", "content": "x"}]}
    path = lines(tmp_path / "t.jsonl", {form: good[form]}, "\n", bad)
    with pytest.raises(ValueError, match=rf"t.jsonl, line 3 .*{message}.*Repair the line or take it out"):
        JsonlSource("lines", path, **settings)


def test_what_lines_refuse(tmp_path):
    (tmp_path / "bytes.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"bytes.jsonl, line 1 is no JSON \(.*utf-8"):
        JsonlSource("lines", tmp_path / "bytes.jsonl")
    with pytest.raises(ValueError, match="form='xml' must be one of text, tokens, messages"):
        JsonlSource("lines", tmp_path, form="xml")
    with pytest.raises(ValueError, match="hold no line"):
        JsonlSource("lines", lines(tmp_path / "none.jsonl", "\n"))
