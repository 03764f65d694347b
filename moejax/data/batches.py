"""Batches as a pure function of (seed, step): nothing to save but the step, so a resumed run reads the very same rows.

B: rows a batch, T: tokens a row (the context), S: rows an epoch.
"""

import functools
from collections.abc import Iterable

import numpy as np

from .corpus import Document
from .counter import CounterHash
from .tokenizer import ByteTokenizer


class TokenStream:
    """Documents as tokens in memory.

    tokens: uint16 [N], each document as BOS, its bytes, EOS; offsets: int64 [documents + 1], where each begins, and N.
    """

    def __init__(self, documents: Iterable[Document], tokenizer: ByteTokenizer):
        documents = list(documents)
        if not documents:
            raise ValueError("no documents; a token stream needs at least one.")
        lengths = [len(d.data) + 2 for d in documents]
        self.tokenizer = tokenizer
        self.offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.tokens = np.empty(int(self.offsets[-1]), np.uint16)
        for document, start, end in zip(documents, self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            self.tokens[start] = tokenizer.bos_id
            self.tokens[start + 1 : end - 1] = np.frombuffer(document.data, np.uint8)
            self.tokens[end - 1] = tokenizer.eos_id

    def __len__(self) -> int:
        return len(self.tokens)


class PackedBatches:
    """Rows of `context` tokens cut from shuffled documents laid end to end; every token comes once an epoch.

    batch(step) -> {"tokens": int32 [B,T], "segment_ids": int32 [B,T]}. Within a row each piece of a document has a
    segment of its own, 1, 2, ..., so no attention, state or target crosses documents. Only the last row of an epoch is
    padded (pad id, segment 0). Documents and then rows are shuffled anew each epoch; without the second shuffle a batch
    would be neighbouring pieces of one long file.

    ValueError for context < 2 (no target), batch_size < 1 or a negative step.
    """

    def __init__(self, stream: TokenStream, *, context: int, batch_size: int, seed: int):
        if context < 2 or batch_size < 1:
            raise ValueError(f"context={context}, batch_size={batch_size}; needed: context >= 2 and batch_size >= 1.")
        self.stream, self.context, self.batch_size, self.seed = stream, context, batch_size, seed
        self.rows_per_epoch = -(-len(stream) // context)
        self._epoch = functools.lru_cache(maxsize=2)(self._make_epoch)  # two: the batch at an epoch's end reads both

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of global step `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"step={step}; steps are counted from 0.")
        tokens = np.full((self.batch_size, self.context), self.stream.tokenizer.pad_id, np.int32)
        segments = np.zeros((self.batch_size, self.context), np.int32)
        for i in range(self.batch_size):
            self._fill(step * self.batch_size + i, tokens[i], segments[i])
        return {"tokens": tokens, "segment_ids": segments}

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> (documents in their order, where each starts in the epoch's stream plus its end, rows in their order)."""
        documents = CounterHash(self.seed, stream=2 * epoch).permutation(len(self.stream.offsets) - 1)
        starts = np.concatenate([[0], np.cumsum(np.diff(self.stream.offsets)[documents])])
        return documents, starts, CounterHash(self.seed, stream=2 * epoch + 1).permutation(self.rows_per_epoch)

    def _fill(self, row: int, tokens: np.ndarray, segments: np.ndarray) -> None:
        epoch, place = divmod(row, self.rows_per_epoch)
        documents, starts, order = self._epoch(epoch)
        begin = int(order[place]) * self.context
        end = min(begin + self.context, len(self.stream))
        index, segment = int(np.searchsorted(starts, begin, side="right")) - 1, 1
        position = begin
        while position < end:
            upto = min(int(starts[index + 1]), end)
            source = int(self.stream.offsets[documents[index]]) + position - int(starts[index])
            tokens[position - begin : upto - begin] = self.stream.tokens[source : source + upto - position]
            segments[position - begin : upto - begin] = segment
            position, index, segment = upto, index + 1, segment + 1
