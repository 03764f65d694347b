"""Files that are whole or absent, whenever the process is killed."""

import os
import pathlib
import secrets


def write_atomic(path: pathlib.Path, data: bytes) -> None:
    """Write `data` beside `path`, flush it to the disk, and move it into place over whatever is there.

    Only local paths: on object stores a rename is a copy, but there an upload is whole or absent by itself.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: pathlib.Path) -> None:
    """Flush the names in a folder, so that a rename survives a loss of power. Nothing where the system cannot (Windows)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
