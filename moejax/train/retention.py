"""Which checkpoints stay: the newest, the best by a metric, and the one promoted as known to be good."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Collection, Mapping

from ..data.atomic import sync_folder
from .checkpoint_files import write_json_durably

KNOWN_GOOD = "known_good.json"
DELETED = "deleted-"  # a folder on its way out; what is left of one is removed at the next save


def kept(
    steps: Collection[int],
    *,
    newest: int,
    best: int = 0,
    metrics: Mapping[int, float] | None = None,
    mode: str = "min",
    known_good: int | None = None,
) -> set[int]:
    """The steps that stay.

    newest: how many of the newest, at least 1: the best never push out the one to resume from.
    best: how many of the best by `metrics` ({step: value}; a step without a value is never among them). Of equal values the
      newer step is the better one.
    mode: "min" or "max".
    known_good: a step that stays whatever its age.
    """
    ordered = sorted(steps)
    stay = set(ordered[-newest:])
    sign = 1 if mode == "min" else -1
    measured = [step for step in ordered if metrics is not None and step in metrics]
    stay.update(sorted(measured, key=lambda step: (sign * (metrics or {})[step], -step))[:best])
    if known_good in ordered:
        stay.add(known_good)
    return stay


def delete(folder: pathlib.Path, step: int) -> None:
    """Remove folder/<step>. It vanishes in one step: a kill in the middle never leaves half a checkpoint under its name."""
    aside = free_name(folder, f"{DELETED}{step}")
    (folder / str(step)).rename(aside)
    sync_folder(folder)
    shutil.rmtree(aside)


def remove_leftovers(folder: pathlib.Path) -> None:
    """Remove what a kill left behind: folders half deleted, and Orbax's temporary ones."""
    for path in folder.iterdir():
        if path.is_dir() and (path.name.startswith(DELETED) or ".orbax-checkpoint-tmp" in path.name):
            shutil.rmtree(path)


def set_aside(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Rename a damaged folder/<step> to damaged-<step>-<number>, for a person to look at; -> the new path."""
    aside = free_name(folder, f"damaged-{step}")
    (folder / str(step)).rename(aside)
    sync_folder(folder)
    return aside


def free_name(folder: pathlib.Path, name: str) -> pathlib.Path:
    number = 0
    while (path := folder / f"{name}-{number}").exists():
        number += 1
    return path


def write_known_good(folder: pathlib.Path, step: int) -> None:
    write_json_durably(folder / KNOWN_GOOD, {"step": step})


def read_known_good(folder: pathlib.Path) -> int | None:
    """The promoted step, whether or not it is still there. ValueError when the file is unreadable."""
    try:
        return int(json.loads((folder / KNOWN_GOOD).read_text())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / KNOWN_GOOD} is unreadable ({error!r}); promote a step again, or remove the file.") from None
