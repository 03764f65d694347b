"""The list of a checkpoint's files, with size and checksum of each: written last, read first.

A folder counts as a checkpoint only when its list is there. Files are checksummed in pieces by several threads, because one
thread's CRC-32 (2.3 GB/s measured) is slower than a good disk; the pieces also say where in a large file the damage is.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from ..data.atomic import sync_folder

FILES = "files.json"
VERSION = 2
PIECE = 32 << 20  # bytes that have a checksum of their own
BLOCK = 1 << 20  # bytes read at a time: a thread costs this much memory
THREADS = min(8, os.cpu_count() or 1)
MAX_NAMED = 8  # damaged files named in one message


def write_json_durably(path: pathlib.Path, value: Any) -> None:
    """Replace `path` in one step: after a power cut it holds the old or the new text."""
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)


def write_share(folder: pathlib.Path, index: int) -> None:
    """What process `index` does for the list of a run of several: checksum the files it wrote itself, and leave them for process 0.

    It raises nothing: the others wait for this process at a barrier. `write_files_list` raises what went wrong.
    """
    try:
        names = [name for name in _names(folder) if name.startswith(_own(index))]
        share: Any = _checksums(folder, dict.fromkeys(names, PIECE), sync=True)
    except OSError as error:
        share = f"{type(error).__name__}: {error}"
    write_json_durably(folder / _share(index), share)


def write_files_list(folder: pathlib.Path, facts: dict[str, Any], *, processes: int = 1) -> dict[str, Any]:
    """Make every file below `folder` durable, then write their list with `facts` beside it; -> what was written.

    processes: how many wrote; each but the first has called `write_share` before.
    """
    sums: dict[str, Any] = {}
    for index in range(1, processes):
        share = json.loads((folder / _share(index)).read_text())
        if isinstance(share, str):
            raise OSError(f"process {index} could not read back what it wrote: {share}")
        sums |= share
    sums |= _checksums(folder, dict.fromkeys(set(_names(folder)) - sums.keys(), PIECE), sync=True)
    for index in range(1, processes):
        (folder / _share(index)).unlink()
    names = sorted(sums)
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
    sync_folder(folder.parent)  # the folder's own name, which Orbax's rename made
    listing = {"version": VERSION, **facts, "piece": PIECE, "files": {name: list(sums[name]) for name in names}}
    write_json_durably(folder / FILES, listing)
    return listing


def read_files_list(folder: pathlib.Path) -> dict[str, Any]:
    """ValueError when the list is missing, unreadable, or of another version."""
    try:
        listing = json.loads((folder / FILES).read_text())
    except FileNotFoundError:
        raise ValueError(f"{FILES} is missing (the save was interrupted)") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{FILES} is unreadable ({error})") from None
    if not isinstance(listing, dict) or listing.get("version") != VERSION:
        raise ValueError(f"{FILES} is not of version {VERSION}, the one this program reads")
    return listing


def signature(folder: pathlib.Path) -> tuple:
    """Names, sizes and times of the files: as long as it stays the same, nobody wrote to them."""
    found = []
    for name in [FILES, *_names(folder)]:
        try:
            facts = (folder / name).stat()
        except FileNotFoundError:
            continue
        found.append((name, facts.st_size, facts.st_mtime_ns, facts.st_ino))
    return tuple(found)


def damage(folder: pathlib.Path, *, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with a checkpoint's folder, naming the files; None when every file is as it was written.

    share: (index, count): only every count-th file is read, from the index-th on, for processes that divide the work.
    """
    try:
        listing = read_files_list(folder)
    except ValueError as error:
        return str(error)
    index, count = share
    files, piece, wrong = listing["files"], listing["piece"], []
    readable = []
    for name in sorted(files)[index::count]:
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            wrong.append(f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} is unreadable ({error})")
            continue
        if size != files[name][0]:
            wrong.append(f"{name} has {size} bytes, {files[name][0]} were written")
        else:
            readable.append(name)
    try:
        found = _checksums(folder, dict.fromkeys(readable, piece))
    except OSError as error:
        return "; ".join([*wrong, f"{error.filename} is unreadable ({error})"])
    for name in readable:
        wanted, here = files[name][1], found[name][1]
        bad = [i for i, (a, b) in enumerate(zip(wanted, here, strict=True)) if a != b]
        if bad:
            where = f" near byte {bad[0] * piece}" if len(wanted) > 1 else ""
            wrong.append(f"{name} differs from what was written{where}")
    if not wrong:
        return None
    rest = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
    return "; ".join(wrong[:MAX_NAMED]) + rest


def _share(index: int) -> str:
    return f"files.{index}.part"


def _own(index: int) -> str:
    return f"state/ocdbt.process_{index}/"  # where Orbax lets each process write


def _names(folder: pathlib.Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if name != FILES and not (name.startswith("files.") and name.endswith(".part")))


def _checksums(folder: pathlib.Path, pieces: dict[str, int], *, sync: bool = False) -> dict[str, tuple[int, list[int]]]:
    """{name: (bytes, CRC-32 of each piece)}; `pieces` gives each file's piece. sync: make them durable as well."""
    sizes = {name: (folder / name).stat().st_size for name in pieces}
    jobs = [(name, start) for name, piece in pieces.items() for start in range(0, max(sizes[name], 1), piece)]
    sums: dict[str, list[int]] = {name: [0] * len(range(0, max(sizes[name], 1), piece)) for name, piece in pieces.items()}

    def one(job: tuple[str, int]) -> None:
        name, start = job
        sums[name][start // pieces[name]] = _crc32(folder / name, start, pieces[name], sync=sync and start == 0)

    _in_threads(one, jobs)
    return {name: (sizes[name], sums[name]) for name in pieces}


def _in_threads(work: Callable[[Any], None], jobs: Iterable[Any]) -> None:
    jobs = list(jobs)
    if len(jobs) <= 1 or THREADS == 1:
        for job in jobs:
            work(job)
        return
    with concurrent.futures.ThreadPoolExecutor(THREADS, thread_name_prefix="moejax-checksum") as pool:
        for _ in pool.map(work, jobs):
            pass


def _crc32(path: pathlib.Path, start: int, length: int, *, sync: bool = False) -> int:
    value, block = 0, memoryview(bytearray(min(BLOCK, length)))
    with path.open("rb", buffering=0) as file:
        if sync:
            os.fsync(file.fileno())
        file.seek(start)
        while length > 0 and (count := file.readinto(block[: min(len(block), length)])):
            value = zlib.crc32(block[:count], value)
            length -= count
    return value
