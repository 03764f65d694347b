"""What a run shows while it goes: a live display on a terminal, plain lines elsewhere. Imports Rich on first use."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

HEARTBEAT = 10.0  # seconds between signs of life where nothing can be redrawn


class Display:
    """Phases (things that take a while), notes, and the training progress."""

    def __init__(self, *, width: int | None = None, silent: bool = False):
        """silent: show nothing, as every process of a run but the first."""
        from rich.console import Console

        self.console = Console(width=width, highlight=False, quiet=silent)
        self.live = self.console.is_terminal
        self._progress: Any = None
        self._task: Any = None
        self._first = self._total = 0
        self._last_line = 0.0

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def show(self, renderable: Any) -> None:
        """Print a Rich table, or text."""
        self.console.print(renderable)

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Within: a spinner with the seconds, or a line now and one more every 10 seconds; then how long it took."""
        start, over = time.monotonic(), threading.Event()
        status = self.console.status(text) if self.live else None
        if status is None:
            self.note(f"{text} ...")

        def beat() -> None:
            while not over.wait(1.0 if status else HEARTBEAT):
                seconds = time.monotonic() - start
                if status:
                    status.update(f"{text} ... {seconds:.0f} s")
                else:
                    self.note(f"  still at it after {seconds:.0f} s")

        thread = threading.Thread(target=beat, daemon=True)
        with status or contextlib.nullcontext():
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
        self.note(f"{text}: {time.monotonic() - start:.1f} s")

    @contextlib.contextmanager
    def training(self, *, first: int, total: int) -> Iterator[None]:
        """Within: `step` updates a progress bar, or prints a line at most every 10 seconds.

        The bar appears with the first step, so that a phase (compiling) may come before it: Rich shows one live thing.
        """
        self._first, self._total = first, total
        try:
            yield
        finally:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def step(self, step: int, figures: str) -> None:
        """`step` is done; `figures` is a short line of numbers."""
        if self.live:
            progress = self._progress or self._start_progress()
            progress.update(self._task, completed=step, figures=figures)
        elif time.monotonic() - self._last_line > HEARTBEAT or step in (1, self._total):
            self._last_line = time.monotonic()
            self.note(f"step {step}/{self._total}  {figures}")

    def _start_progress(self) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        self._progress = Progress(*columns, console=self.console, refresh_per_second=4)
        self._task = self._progress.add_task("train", total=self._total, completed=self._first, figures="")
        self._progress.start()
        return self._progress
