"""Needles in a haystack by teacher forcing: a grid of depth x length, without sampling a token.

A row hides facts, then asks for one of them and spells the answer. It counts as found when the likeliest token at every
position of the answer is the answer's, given the tokens before it: exactly when greedy decoding would write the whole value.
Beside the model stand two that read no key: the guess of every digit, and the copy of the value nearest to the question.

Shapes: R rows, B rows of a batch, T tokens, A tokens of an answer, L lengths, D depths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data.needles import NeedleRows, needle_baselines
from ..modules.model import HybridLM

Predict = Callable[[Any, Any, Any, Any], Any]
"""predict(variables, tokens [B,T], segment_ids [B,T], at [B,A]) -> int [B,A]: the likeliest next token after each position `at`."""


@dataclasses.dataclass(frozen=True)
class NeedleGrid:
    """Shares of rows whose whole value is right.

    accuracy: of the model, copy_last: of a copy of the value nearest to the question, both float64 [L,D]; guess: of guessing
    digits, copy_any: of copying any needle's value, both float64 [L]; rows: int [L,D], how many stand behind an entry.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    accuracy: np.ndarray
    copy_last: np.ndarray
    guess: np.ndarray
    copy_any: np.ndarray
    rows: np.ndarray

    def by_length(self) -> dict[int, float]:
        """Length -> accuracy, every depth counting the same."""
        return {length: float(row.mean()) for length, row in zip(self.lengths, self.accuracy, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        arrays = {name: getattr(self, name).tolist() for name in ("accuracy", "copy_last", "guess", "copy_any", "rows")}
        return {"lengths": list(self.lengths), "depths": list(self.depths), **arrays}


def make_predict(model: HybridLM) -> Predict:
    """The jitted `Predict` of a model. Logits exist at the answers only, whatever the length and the vocabulary."""

    @jax.jit
    def predict(variables, tokens, segment_ids, at):
        hidden: Any = model.apply(variables, tokens, segment_ids, return_hidden=True)
        asked = jnp.take_along_axis(hidden, at[..., None], axis=1)
        head = variables["params"]["head"].astype(asked.dtype)
        wide = jnp.promote_types(asked.dtype, jnp.float32)
        return jnp.argmax(jnp.matmul(asked, head, preferred_element_type=wide), axis=-1)

    return predict


def needle_grid(predict: Predict, variables: Any, rows: Mapping[int, NeedleRows], *, batch_tokens: int) -> NeedleGrid:
    """Score every length x depth.

    Args:
      predict: see `Predict` and `make_predict`.
      variables: handed to it: {"params", "router_state"} of the model.
      rows: length T -> its rows (`moejax.data.needle_rows`), the same depths at every length.
      batch_tokens: tokens of a batch: max(1, batch_tokens // T) rows. One compile a length.

    Raises:
      ValueError: no length, rows of another length than their key, depths that differ between lengths.
    """
    if not rows or batch_tokens < 1:
        raise ValueError(f"rows of {len(rows)} lengths, batch_tokens={batch_tokens}; needed: at least one length, and a positive number.")
    depths = {length: tuple(np.unique(made.depths).tolist()) for length, made in rows.items()}
    for length, made in rows.items():
        if made.tokens.shape[1] != length:
            raise ValueError(f"the rows under {length} have {made.tokens.shape[1]} tokens; the key is their length.")
    if len(set(depths.values())) > 1:
        raise ValueError(f"the depths differ between lengths: {depths}; a grid needs the same ones.")
    parts = [_score(predict, variables, made, max(1, batch_tokens // length)) for length, made in rows.items()]
    baselines = [needle_baselines(made) for made in rows.values()]
    return NeedleGrid(
        lengths=tuple(rows),
        depths=next(iter(depths.values())),
        accuracy=np.stack([part[0] for part in parts]),
        copy_last=np.stack([part[1] for part in parts]),
        guess=np.array([baseline["guess"] for baseline in baselines]),
        copy_any=np.array([baseline["copy_any"] for baseline in baselines]),
        rows=np.stack([part[2] for part in parts]),
    )


def _score(predict: Predict, variables: Any, made: NeedleRows, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> (accuracy, copy of the last, rows), each [D]."""
    at = np.maximum(made.positions - 1, 0)
    given = []
    for start in range(0, len(at), batch):
        chosen = np.arange(start, start + batch)
        chosen = np.where(chosen < len(at), chosen, start)  # one shape: the last batch repeats its first row
        segments = np.ones((batch, made.tokens.shape[1]), np.int32)
        given.append(predict(variables, made.tokens[chosen], segments, at[chosen]))
    predicted = np.concatenate([np.asarray(part) for part in given])[: len(at)]
    hits = ((predicted == made.expected) | (made.positions < 0)).all(axis=1)
    copied = (made.last == made.expected).all(axis=1)
    _, depth = np.unique(made.depths, return_inverse=True)
    count = np.bincount(depth)
    return np.bincount(depth, hits) / count, np.bincount(depth, copied) / count, count
