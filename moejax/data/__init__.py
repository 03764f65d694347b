"""Text for training: tokenizers, corpora, sources, mixtures, packing, and the stream of batches. NumPy only at import."""

from .batches import PackedBatches, TokenStream
from .bpe import train_bpe, utf8_documents
from .corpus import Corpus, Document, Manifest, folder_corpus, standard_library, synthetic_corpus
from .counts import CountModels, valid_targets
from .dialog import render_dialog, special_id
from .files import FilesSource, JsonlSource
from .generators import LongDocuments, RecallSource
from .mixture import Mixture
from .needles import NeedleRows, NeedleSource, needle_baselines, needle_rows
from .packing import Packing
from .queue_source import QueueStream, put_item
from .ruler import RULER_TASKS, ruler_samples
from .ruler_parts import RulerFiller, Sample
from .ruler_tasks import CommonWords, FrequentWords, Needles, Variables
from .sources import CorpusSource, LengthRange, Source, TokenDocument, TokenSource
from .stream import DataStream, check_fingerprint
from .synthetic_tasks import MQAR, ZOOLOGY_MIX, KeyedRecall, Palindrome, Stack, SyntheticTask, TaskBatch
from .tokenizer import ByteTokenizer
from .tokenizer_file import FileTokenizer, load_tokenizer

__all__ = [
    "MQAR",
    "RULER_TASKS",
    "ZOOLOGY_MIX",
    "ByteTokenizer",
    "CommonWords",
    "Corpus",
    "CorpusSource",
    "CountModels",
    "DataStream",
    "Document",
    "FileTokenizer",
    "FilesSource",
    "FrequentWords",
    "JsonlSource",
    "KeyedRecall",
    "LengthRange",
    "LongDocuments",
    "Manifest",
    "Mixture",
    "NeedleRows",
    "NeedleSource",
    "Needles",
    "PackedBatches",
    "Packing",
    "Palindrome",
    "QueueStream",
    "RecallSource",
    "RulerFiller",
    "Sample",
    "Source",
    "Stack",
    "SyntheticTask",
    "TaskBatch",
    "TokenDocument",
    "TokenSource",
    "TokenStream",
    "Variables",
    "check_fingerprint",
    "folder_corpus",
    "load_tokenizer",
    "needle_baselines",
    "needle_rows",
    "put_item",
    "render_dialog",
    "ruler_samples",
    "special_id",
    "standard_library",
    "synthetic_corpus",
    "train_bpe",
    "utf8_documents",
    "valid_targets",
]
