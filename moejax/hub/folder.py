"""Replacing a folder whole: written beside its place, flushed, swapped in; nothing that is not a checkpoint's is deleted."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable

from .shards import INDEX, SINGLE

RENAME_EXCHANGE = 2  # linux/fs.h
WORK = ".moejax-saving-"


def check_target(path: str | os.PathLike, files: Iterable[str]) -> pathlib.Path:
    """The folder to write, links followed; ValueError where replacing it could lose something.

    files: names beside the weights that the new checkpoint has, too.
    """
    target = pathlib.Path(path).resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder.")
    if target == pathlib.Path.cwd() or target in pathlib.Path.cwd().parents:
        raise ValueError(f"{target} holds the working directory, which replacing it would remove; give a folder inside it.")
    if os.path.ismount(target):
        raise ValueError(f"{target} is a mount point and cannot be replaced whole; give a folder inside it.")
    if target.exists() and (foreign := foreign_entries(target, files)):
        raise ValueError(
            f"{target} holds {', '.join(foreign[:8])}{' and more' if len(foreign) > 8 else ''}, which the new checkpoint does not; "
            "replacing the folder would delete it. Save to a new folder, or move these away."
        )
    return target


def foreign_entries(folder: pathlib.Path, files: Iterable[str]) -> list[str]:
    """What the folder holds beside its checkpoint's own files and `files`."""
    own = {"config.json", INDEX, SINGLE, *files}
    try:
        own |= set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # no index, or none that names files
    return [p.name for p in sorted(folder.iterdir()) if p.name not in own or (p.is_dir() and not p.is_symlink())]


def work_folder(target: pathlib.Path) -> pathlib.Path:
    """A new folder beside `target`. Warns of those that killed saves left there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if left := [str(p) for p in target.parent.glob(f"{WORK}*")]:
        warnings.warn(f"{', '.join(left)}: of a save that was killed, or of one that runs now; delete it if none runs.", stacklevel=4)
    work = pathlib.Path(tempfile.mkdtemp(prefix=WORK, dir=target.parent))
    work.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o777 & ~_umask())  # mkdtemp made it private
    return work


def _umask() -> int:
    mask = os.umask(0)  # there is no other way to read it
    os.umask(mask)
    return mask


def replace(target: pathlib.Path, work: pathlib.Path, files: Iterable[str]) -> None:
    """Put the finished folder `work` at `target` in one step, then delete what stood there."""
    sync(work)
    if not target.exists():
        os.rename(work, target)
    else:
        if not _rename_exchange(work, target):
            _rename_twice(work, target)
        for name in foreign_entries(work, files):  # put there while the new checkpoint was written
            os.rename(work / name, target / name)
    sync(target.parent)
    remove(work)


def remove(folder: pathlib.Path) -> None:
    """Delete a folder that is no longer needed; warns if it cannot."""

    def complain(_: Callable, path: str, error: object) -> None:
        if pathlib.Path(path).exists():
            warnings.warn(f"{path} could not be deleted ({error}); it is not needed any more.", stacklevel=2)

    shutil.rmtree(folder, onerror=complain)


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Write a new file, flushed to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: pathlib.Path) -> None:
    """Flush a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_exchange(work: pathlib.Path, target: pathlib.Path) -> bool:
    """Swap two folders atomically where the system can (Linux renameat2 on most file systems)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here = -100  # AT_FDCWD
    return rename(here, os.fsencode(work), here, os.fsencode(target), RENAME_EXCHANGE) == 0


def _rename_twice(work: pathlib.Path, target: pathlib.Path) -> None:
    """Without an atomic swap: a crash between the two renames leaves both checkpoints whole, beside the empty place."""
    aside = target.parent / f"{work.name}-before"
    os.rename(target, aside)
    try:
        os.rename(work, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, work)
