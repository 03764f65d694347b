"""What a user of the engine holds: a request, and the ticket that follows it from the queue to its end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from .sampling import Sampling, make_sampling

State = Literal["queued", "prefill", "decode", "done", "cancelled", "failed"]
FINISHED = ("done", "cancelled", "failed")


class QueueFull(RuntimeError):
    """The queue holds as many requests as it may; try again when some have finished."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to continue. Checked by `Engine.submit`."""

    tokens: Sequence[int]
    """The prompt, at least one id of the vocabulary."""
    max_new_tokens: int
    temperature: float = 0.0
    """0 is greedy; see `moejax.infer.make_sampling` for this and the next three."""
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    """With the same seed the same prompt draws the same tokens, whatever else is served."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the answer; the one that did is its last token."""


@dataclasses.dataclass(eq=False)
class Ticket:
    """A submitted request. Written by the thread that steps the engine; any thread may read it."""

    id: int
    request: Request
    state: State = "queued"
    tokens: list[int] = dataclasses.field(default_factory=list)
    """New tokens so far, a stop token included."""
    log_probs: list[float] = dataclasses.field(default_factory=list)
    """Of each new token under softmax(logits / temperature) over the whole vocabulary, temperature 1 when greedy."""
    experts: list[np.ndarray] | None = None
    """With return_experts: int32 [M,k] (MoE layers, experts a token) for each prompt token, then for each new token as it was read.
    The last new token of a finished answer is never read and has -1. As long as prompt and answer together."""
    finish_reason: Literal["stop", "length", "cancelled", "error"] | None = None
    """None until the end. At the last token's on_token it is set already."""
    error: str | None = None
    on_token: Callable[[Ticket, int, float], Any] | None = dataclasses.field(default=None, repr=False)
    on_done: Callable[[Ticket], Any] | None = dataclasses.field(default=None, repr=False)
    prompt: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32), repr=False)
    """int32 [T], the checked tokens."""
    sampling: Sampling = dataclasses.field(default_factory=lambda: make_sampling(1), repr=False)
    """One row."""
    cancel_asked: bool = False
    _finished: threading.Event = dataclasses.field(default_factory=threading.Event, repr=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the ticket is done, cancelled or failed (another thread steps the engine). False: `timeout` seconds passed."""
        return self._finished.wait(timeout)


def check_request(request: Request, *, vocab_size: int, capacity: int) -> tuple[np.ndarray, Sampling]:
    """The prompt as int32 [T] and the sampling settings of one row. ValueError: the field, its value and the rule."""
    prompt = _ids("tokens", request.tokens, vocab_size)
    if len(prompt) == 0:
        raise ValueError("tokens is empty; a request needs at least one token, e.g. the tokenizer's beginning of text.")
    _ids("stop_ids", request.stop_ids, vocab_size)
    most = request.max_new_tokens
    if isinstance(most, bool) or not isinstance(most, (int, np.integer)) or most < 1:
        raise ValueError(f"max_new_tokens is {most!r}; it must be an integer of at least 1.")
    if len(prompt) + most > capacity:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is {most}: {len(prompt) + most} in all, and a slot holds "
            f"{capacity}. Shorten one of them, or make the engine with a larger capacity."
        )
    sampling = make_sampling(1, temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, seed=request.seed)
    return prompt, sampling


def _ids(name: str, values: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(values)
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{name} is {ids.dtype}{list(ids.shape)}; it must be a sequence of integers.")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{name} holds {outside[0]}; ids must lie in [0, {vocab_size}), the vocabulary.")
    return ids.astype(np.int32)
