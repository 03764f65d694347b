"""Text for training: tokenizers, corpora, deterministic batches, and count models to compare with. NumPy only at import."""

from .batches import PackedBatches, TokenStream
from .corpus import Corpus, Document, Manifest, folder_corpus, standard_library, synthetic_corpus
from .counts import CountModels, valid_targets
from .mixture import Mixture
from .packing import Packing
from .sources import CorpusSource, LengthRange, Source, TokenDocument, TokenSource
from .stream import DataStream, check_fingerprint
from .tokenizer import ByteTokenizer
from .tokenizer_file import FileTokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "CorpusSource",
    "CountModels",
    "DataStream",
    "Document",
    "FileTokenizer",
    "LengthRange",
    "Manifest",
    "Mixture",
    "PackedBatches",
    "Packing",
    "Source",
    "TokenDocument",
    "TokenSource",
    "TokenStream",
    "check_fingerprint",
    "folder_corpus",
    "load_tokenizer",
    "standard_library",
    "synthetic_corpus",
    "valid_targets",
]
