"""Unigram and bigram count models: what a language model must beat, scored on the same targets as the model.

B: rows, T: tokens a row, V: vocabulary.
"""

import numpy as np

from .batches import TokenStream

CHUNK = 4 << 20  # pairs counted at a time: 32 MiB of int64


def valid_targets(tokens: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
    """bool [B,T-1]: whether tokens[:, t + 1] is a target of position t: both in one segment that is not padding (0)."""
    return (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, :-1] != 0)


class CountModels:
    """Next-token probabilities from counts over a token stream.

    Unigram: (c(b) + 1) / (N + V). Bigram: (c(a, b) + p(b)) / (c(a) + 1), one more pair for each first token, spread as
    the unigram. Pairs that cross documents are not counted.
    """

    def __init__(self, stream: TokenStream):
        vocab = stream.tokenizer.vocab_size
        pairs = np.zeros(vocab * vocab, np.int64)
        tokens = stream.tokens
        for start in range(0, len(tokens) - 1, CHUNK):
            piece = tokens[start : start + CHUNK + 1].astype(np.int64)
            first, second = piece[:-1], piece[1:]
            inside = first != stream.tokenizer.eos_id
            pairs += np.bincount(first[inside] * vocab + second[inside], minlength=vocab * vocab)
        counts = pairs.reshape(vocab, vocab)
        unigram = (counts.sum(axis=0) + 1.0) / (counts.sum() + vocab)
        bigram = (counts + unigram) / (counts.sum(axis=1, keepdims=True) + 1.0)
        self.num_bytes = stream.tokenizer.num_bytes
        self.unigram_bits = -np.log2(unigram)  # [V]
        self.bigram_bits = -np.log2(bigram)  # [V,V]: first token, second token

    def score(self, batch: dict[str, np.ndarray]) -> dict[str, float]:
        """Sums over the targets of a batch (int32 [B,T] tokens, segment_ids): bits by each model, bytes among them."""
        tokens = batch["tokens"]
        valid = valid_targets(tokens, batch["segment_ids"])
        first, second = tokens[:, :-1][valid], tokens[:, 1:][valid]
        return {
            "unigram": float(self.unigram_bits[second].sum()),
            "bigram": float(self.bigram_bits[first, second].sum()),
            "bytes": float((second < self.num_bytes).sum()),
        }
