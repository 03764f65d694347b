"""Text for training: tokenizer, corpora, deterministic batches, and count models to compare with. NumPy only."""

from .batches import PackedBatches, TokenStream
from .corpus import Corpus, Document, Manifest, folder_corpus, standard_library, synthetic_corpus
from .counts import CountModels, valid_targets
from .tokenizer import ByteTokenizer

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "CountModels",
    "Document",
    "Manifest",
    "PackedBatches",
    "TokenStream",
    "folder_corpus",
    "standard_library",
    "synthetic_corpus",
    "valid_targets",
]
