"""The progress bar of loading."""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax


class Progress:
    """A bar over the bytes that this process reads, on stderr; inside its `with` block, a function that is told of more bytes."""

    def __init__(self, total: int, show: bool | None):
        """show: None = on the first process, if stderr is a terminal."""
        self.total = total
        self.show = sys.stderr.isatty() and jax.process_index() == 0 if show is None else show

    def __enter__(self) -> Callable[[int], None]:
        if not self.show:
            return lambda count: None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        task = self.bar.add_task("", total=self.total)
        return lambda count: self.bar.advance(task, count)

    def __exit__(self, *error: object) -> None:
        if self.show:
            self.bar.stop()
