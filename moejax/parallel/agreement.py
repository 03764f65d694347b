"""Values of one process that all must share, and errors of one that all must raise: without them the others wait without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

LONGEST = 4096  # bytes of a text that travels


def text_of_first(text: str) -> str:
    """`text` of process 0, on every process (at most 4096 bytes of it). A collective call: all must make it."""
    if jax.process_count() == 1:
        return text
    from jax.experimental import multihost_utils

    return _text(np.asarray(multihost_utils.broadcast_one_to_all(_bytes(text))))


def text_of_any(text: str) -> str:
    """The first text that is not empty, by process number, on every process; "" if all are. A collective call."""
    if jax.process_count() == 1:
        return text
    from jax.experimental import multihost_utils

    texts = map(_text, np.asarray(multihost_utils.process_allgather(_bytes(text))))
    return next((text for text in texts if text), "")


def _bytes(text: str) -> np.ndarray:
    """A fixed number of bytes, zeros behind the text."""
    data = text.encode()[:LONGEST]
    return np.pad(np.frombuffer(data, np.uint8), (0, LONGEST - len(data)))


def _text(sent: np.ndarray) -> str:
    return sent.tobytes().rstrip(b"\0").decode(errors="replace")


@contextmanager
def raised_on_all(what: str, at_last: Callable[[], Any] | None = None) -> Iterator[None]:
    """Run a block on every process; an exception on the first is raised on all when the block ends.

    at_last: runs on every process at the end, error or not: the collective calls of the block that are still to be made.
    In a run of one process it does nothing.
    """
    if jax.process_count() == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if at_last is not None:
        at_last()
    said = text_of_first("" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if said:
        raise RuntimeError(f"{what} failed on process 0: {said}")
