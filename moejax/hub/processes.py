"""Errors of one process, raised on all of them: the others would wait for it without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

LONGEST = 4096  # bytes of a message that travels


@contextmanager
def agree(what: str, at_last: Callable[[], Any] | None = None) -> Iterator[None]:
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
    from jax.experimental import multihost_utils

    text = f"{type(error).__name__}: {error}".encode()[:LONGEST] if error is not None else b""
    sent = np.zeros(LONGEST, np.uint8)
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    first = bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent))).rstrip(b"\0").decode(errors="replace")
    if error is not None:
        raise error
    if first:
        raise RuntimeError(f"{what} failed on process 0: {first}")
