"""What a user of the engine holds: a request, and the ticket that follows it from the queue to its end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
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
    prompt = token_ids("tokens", request.tokens, vocab_size)
    if len(prompt) == 0:
        raise ValueError("tokens is empty; a request needs at least one token, e.g. the tokenizer's beginning of text.")
    token_ids("stop_ids", request.stop_ids, vocab_size)
    most = at_least_one("max_new_tokens", request.max_new_tokens)
    if len(prompt) + most > capacity:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is {most}: {len(prompt) + most} in all, and a slot holds "
            f"{capacity}. Shorten one of them, or make the engine with a larger capacity."
        )
    sampling = make_sampling(1, temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, seed=request.seed)
    return prompt, sampling


def at_least_one(name: str, value: Any) -> int:
    """`value` as an int. ValueError: no integer (True and 2.0 are none), or below 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1.")
    return int(value)


def token_ids(name: str, values: Any, vocab_size: int) -> np.ndarray:
    """`values`, a sequence of N ids or an array [N], as int32 [N]; N may be 0.

    ValueError: another shape, anything but integers (True is none), an id outside [0, vocab_size). Ids are compared as they come: 2**32
    would be 0 as int32.
    """
    if not isinstance(values, np.ndarray | jax.Array) or values.dtype == object:
        # Python's integers have no limit: NumPy makes objects or floats of those above 64 bits, and numbers of True among integers.
        flags = [value for value in values if isinstance(value, bool | np.bool_)] if isinstance(values, Sequence | np.ndarray) else []
        if flags:
            raise ValueError(f"{name} holds {flags[0]}; it must be a sequence of integers.")
        values = _as_array(name, values)
    ids = np.asarray(values)
    if ids.shape == (0,):
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iuO":
        raise ValueError(f"{name} is {ids.dtype}{list(ids.shape)}; it must be a sequence of integers.")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{name} holds {outside[0]}; ids must lie in [0, {vocab_size}), the vocabulary.")
    return ids.astype(np.int32)


def _as_array(name: str, values: Any) -> np.ndarray:
    """A sequence as an array; of integers alone as objects when they do not fit int64."""
    try:
        ids = np.asarray(values)
        if ids.ndim == 1 and ids.dtype.kind in "fuO" and all(isinstance(value, int | np.integer) for value in values):
            return np.asarray([int(value) for value in values], object)
    except ValueError:  # sequences of different lengths
        raise ValueError(f"{name} holds sequences; it must be a sequence of integers.") from None
    if ids.dtype.kind == "O":
        raise ValueError(f"{name} is {values!r:.80}; it must be a sequence of integers.")
    return ids
