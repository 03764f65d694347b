"""Arrays that took a pass over the data to compute, kept in a local file for the next start."""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np

from .atomic import write_atomic


def cached(path: pathlib.Path | None, key: dict[str, Any], compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What `compute` gives, from `path` if that was written for an equal key; else computed, and written there whole.

    key: JSON; all that the result depends on. A file of another key, or a damaged one, is replaced. path=None: no file.
    """
    if path is None:
        return compute()
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    found = _read(path)
    if found is not None and str(found.pop("key", "")) == digest:
        return found
    made = compute()
    buffer = io.BytesIO()
    np.savez(buffer, key=np.array(digest), **made)  # pyright: ignore[reportArgumentType]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())
    return made


def _read(path: pathlib.Path) -> dict[str, np.ndarray] | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
