import hashlib
import platform

import numpy as np
import pytest

from moejax.data import Document, folder_corpus, standard_library, synthetic_corpus
from moejax.data.corpus import make_corpus, name_hash
from moejax.data.counter import CounterHash


@pytest.fixture(scope="module")
def library():
    return standard_library()


def test_standard_library_is_large_split_by_file_and_free_of_duplicates(library):
    manifest = library.manifest
    assert manifest.python == platform.python_version()
    assert manifest.train_bytes > 5e6 and manifest.heldout_bytes > 1e5
    names = [d.name for d in library.train + library.heldout]
    assert len(set(names)) == len(names) == manifest.train_documents + manifest.heldout_documents
    digests = {hashlib.sha256(d.data).digest() for d in library.train + library.heldout}
    assert len(digests) == len(names)
    assert all(name_hash(d.name) % 100 < 5 for d in library.heldout)
    assert all(name_hash(d.name) % 100 >= 5 for d in library.train)
    assert "json/decoder.py" in names
    assert not any("site-packages" in n or "_sysconfigdata" in n or n.startswith("encodings/cp12") for n in names)


def test_manifest_hash_is_of_content_names_and_split(library):
    assert standard_library().manifest == library.manifest
    documents = [Document(f"{i}.txt", b"%d" % i) for i in range(40)]
    base = make_corpus("x", documents).manifest.sha256
    assert make_corpus("other source", reversed(documents)).manifest.sha256 == base
    assert make_corpus("x", [*documents[:-1], Document("39.txt", b"!")]).manifest.sha256 != base
    assert make_corpus("x", [*documents[:-1], Document("renamed.txt", b"39")]).manifest.sha256 != base


def test_duplicates_are_dropped_whole_corpus_wide():
    documents = [Document(f"{i}.txt", b"same" if i % 2 else b"%d" % i) for i in range(100)]
    corpus = make_corpus("x", documents)
    assert corpus.manifest.duplicates_dropped == 49
    assert sum(d.data == b"same" for d in corpus.train + corpus.heldout) == 1


def test_small_folders_hold_out_one_file(tmp_path):
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("zweite Datei, größer")
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "latin").write_bytes(b"gr\xf6\xdfer")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c").write_text("secret")
    corpus = folder_corpus(tmp_path)
    assert len(corpus.train) == len(corpus.heldout) == 1
    assert {d.name for d in corpus.train + corpus.heldout} == {"a.txt", "sub/b.md"}
    assert corpus.manifest.files_skipped == 2


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'.*nowhere' is no folder"):
        folder_corpus(tmp_path / "nowhere")
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").write_text("text")
    with pytest.raises(ValueError, match="1 distinct text files; needed: 2"):
        folder_corpus(tmp_path)


def test_synthetic_text_never_changes():
    """The hash is pinned: other tests assert exact losses on this text, on every Python and NumPy."""
    corpus = synthetic_corpus(documents=8, seed=3, mean_words=50)
    assert corpus.manifest.sha256 == "60ad316bb0ee81877903727cd4290eab1f4734b57bb650114fe6d74f32afca56"
    assert synthetic_corpus(documents=8, seed=4, mean_words=50).manifest.sha256 != corpus.manifest.sha256
    with pytest.raises(ValueError, match="documents=1"):
        synthetic_corpus(documents=1)


def test_counter_hash_is_splitmix64():
    """Positions of one stream are SplitMix64's successive outputs, in Python integers of any size."""
    numbers = CounterHash(5, stream=9)
    mask, state, expected = 2**64 - 1, int(numbers._key[0]), []
    for _ in range(4):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        expected.append(z ^ (z >> 31))
    assert numbers.bits(0, 4).tolist() == expected
    assert numbers.bits(2, 2).tolist() == expected[2:]
    assert CounterHash(5, stream=10).bits(0, 4).tolist() != expected
    assert CounterHash(6, stream=9).bits(0, 4).tolist() != expected
    order = numbers.permutation(100)
    assert sorted(order.tolist()) == list(range(100)) and order.tolist() != list(range(100))
    uniform = numbers.uniform(0, 20000)
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01
    assert np.bincount(numbers.integers(0, 7000, 7), minlength=7).min() > 800
