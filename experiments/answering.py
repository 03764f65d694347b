"""One conversation over one row of a HybridCache: what was said is read once, and answers go on from there.

N: tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.load_model import Loaded
from moejax.infer import decode_step, prefill, prepare
from moejax.infer.cache import new_cache
from moejax.infer.sampling import Sampling, sample


class Conversation:
    """The cache of one dialog or text, and the token that was drawn last and not read yet."""

    def __init__(self, loaded: Loaded, *, capacity: int, chunk: int, state_dtype: str = "float32"):
        """capacity: tokens in all; chunk: tokens read at once. The same numbers for any chunk, up to rounding.

        Turns of any length compile few shapes: those of a chunk, and of the powers of two below it (`prefill`).
        """
        self.weights = prepare(loaded.model, loaded.variables)
        self._make = partial(new_cache, self.weights, 1, capacity, state_dtype=state_dtype)
        self.capacity, self.chunk = capacity, chunk
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.cache: Any = self._make()
        self.read = 0
        """Tokens in the cache."""
        self.pending: list[int] = []
        """The last token drawn: its own step has not run."""
        self.closed = False
        """The last answer ended with one of its stop ids."""

    def forget_last(self, tokens: Sequence[int]) -> None:
        """The newest token, which was not read yet, is dropped if it is one of these."""
        if self.pending and self.pending[-1] in tokens:
            self.pending = []

    def answer(self, ids: Sequence[int], *, most: int, sampling: Sampling, stop_ids: Sequence[int]) -> Iterator[int]:
        """Read ids [N], then draw up to `most` tokens, one at a time; the caller may stop at any of them.

        Ends with the first of `stop_ids` (`closed`), after `most`, or where the capacity does. The draw at a position depends on the
        sampling settings and the position alone, as in `moejax.infer.generate`.
        ValueError: ids that the vocabulary has not, no room for them and one more token; the conversation is then as it was.
        RuntimeError: logits that are no distribution (NaN).
        """
        ids = [*self.pending, *ids]
        if self.read + len(ids) >= self.capacity:
            raise ValueError(
                f"{self.read} tokens were read and {len(ids)} are new, which leaves no room for an answer in a context of {self.capacity}; "
                "make it larger (--context)."
            )
        step = prefill(self.weights, [ids], self.cache, chunk=self.chunk)
        self.cache, self.read = step.cache, self.read + len(ids)
        self.pending, self.closed = [], False
        drawn = _first(step.logits, sampling, np.array([self.read], np.int32))
        for left in range(min(most, self.capacity - self.read), 0, -1):
            token = int(drawn.tokens[0])
            if token < 0:
                raise RuntimeError(f"the logits at position {self.read} are not a distribution (NaN or all -inf).")
            self.pending, self.closed = [token], token in stop_ids
            yield token
            if self.closed or left == 1:
                return
            self.pending = []
            self.cache, drawn = _next(self.weights, self.cache, drawn.tokens, sampling, np.array([self.read + 1], np.int32))
            self.read += 1


_first = jax.jit(sample)


@partial(jax.jit, donate_argnames=("cache",))
def _next(weights, cache, token, sampling, position):
    step = decode_step(weights, cache, token)
    return step.cache, sample(step.logits, sampling, position)
