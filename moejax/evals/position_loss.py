"""Loss by position on held-out long documents: whether a model still gains from the tokens far behind.

Shapes: B rows, T tokens, P position buckets: bucket b holds positions 2**b to 2**(b+1) - 1 of a document, bucket 0 also 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from ..train.batch import POSITION_BUCKETS


@dataclasses.dataclass(frozen=True)
class PositionLoss:
    """nats, tokens: float64 [P], sums over the targets predicted from a position of each bucket."""

    nats: np.ndarray
    tokens: np.ndarray

    @property
    def bits(self) -> np.ndarray:
        """float64 [P]: bits a target; NaN where a bucket has none."""
        return np.where(self.tokens > 0, self.nats / np.maximum(self.tokens, 1) / np.log(2), np.nan)

    @property
    def total_bits(self) -> float:
        """Bits a target over all positions."""
        return float(self.nats.sum() / self.tokens.sum() / np.log(2))

    def to_dict(self) -> dict[str, dict[str, float]]:
        """ "64-127" -> {"bits", "tokens"}: the buckets that hold targets, plain JSON values."""
        held = np.flatnonzero(self.tokens)
        return {bucket_name(b): {"bits": float(self.bits[b]), "tokens": int(self.tokens[b])} for b in held.tolist()}


def position_loss(evaluate: Callable[[Any, Any], dict[str, jax.Array]], state: Any, batches: Iterable[Any]) -> PositionLoss:
    """Sum `evaluate(state, batch)` over batches of one shape (one compile).

    evaluate: `jax.jit(make_eval_step(model, domains=1))`, whose loss_groups and token_groups [P] are read. batches: as trained
    on, [B,T]; a document that begins inside a row is counted from its own start.
    ValueError: no batch, no target in any, or an evaluate without one group for each bucket.
    """
    nats, tokens = np.zeros(POSITION_BUCKETS), np.zeros(POSITION_BUCKETS)
    results = [evaluate(state, batch) for batch in batches]
    for result in jax.device_get(results):
        for name, total in (("loss_groups", nats), ("token_groups", tokens)):
            if name not in result or result[name].shape != (POSITION_BUCKETS,):
                raise ValueError(f"evaluate gave no {name} of shape [{POSITION_BUCKETS}]; build it by make_eval_step(model, domains=1).")
            total += result[name]
    if not tokens.sum():
        raise ValueError(f"{len(results)} batches hold no target; give rows of at least two tokens of one document.")
    return PositionLoss(nats, tokens)


def bucket_name(bucket: int) -> str:
    """0 -> "0-1", 6 -> "64-127"."""
    return f"{2**bucket if bucket else 0}-{2 ** (bucket + 1) - 1}"


def document_rows(documents: Iterable[np.ndarray], *, length: int, rows: int, pad_id: int) -> list[dict[str, np.ndarray]]:
    """The first `length` tokens of each document, one a row, in batches of `rows` [B,T]; shorter documents are padded.

    documents: int [N] each. The last batch is filled with rows of padding, so that all have one shape.
    """
    if length < 2 or rows < 1:
        raise ValueError(f"length={length}, rows={rows}; needed: length >= 2 (a token and its target) and rows >= 1.")
    cut = [np.asarray(document)[:length] for document in documents]
    if not cut:
        raise ValueError("no documents; position_loss needs at least one.")
    batches = []
    for start in range(0, len(cut), rows):
        tokens = np.full((rows, length), pad_id, np.int32)
        segments = np.zeros((rows, length), np.int32)
        for row, document in enumerate(cut[start : start + rows]):
            tokens[row, : len(document)] = document
            segments[row, : len(document)] = 1
        batches.append({"tokens": tokens, "segment_ids": segments})
    return batches
