"""Writing a checkpoint in the background: Orbax writes the arrays, then the list of files makes the step count."""

from __future__ import annotations

import itertools
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from . import checkpoint_files as files

TIMEOUT_S = 600  # that one process waits for the others' writing before its own save fails
_numbers = itertools.count()  # barriers must have new names, and all processes write the same checkpoints in the same order


class CheckpointError(RuntimeError):
    """A checkpoint was not written. `step` says which."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Write:
    """One checkpoint on its way to the disk. The arrays were copied from the devices when the constructor is back.

    after: runs on process 0 when the step counts, for the clean-up; -> the steps it removed.
    """

    def __init__(
        self,
        orbax: Any,
        folder: pathlib.Path,
        step: int,
        items: Any,
        *,
        clock: Callable[[], float],
        after: Callable[[int], list[int]],
    ):
        import orbax.checkpoint as ocp

        self.step, self.error, self.committed = step, None, False
        self.facts: dict[str, Any] = {}
        self._orbax, self._folder, self._clock, self._after = orbax, folder / str(step), clock, after
        self._started = time.perf_counter()
        several = jax.process_count() > 1
        self._barrier = ocp.multihost.get_barrier_sync_fn() if several else None
        self._number = next(_numbers)
        orbax.save(self._folder, args=items)
        self._thread = threading.Thread(target=self._run, name=f"moejax-checkpoint-{step}")
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        # No collective call in here: the main thread makes its own, and the order of all must be the same on all processes.
        # What waits for other processes waits at barriers of JAX's coordination service.
        try:
            self._orbax.wait_until_finished()
            index, count = jax.process_index(), jax.process_count()
            if index > 0:
                files.write_share(self._folder, index)
            if self._barrier is not None:
                self._barrier(key=f"moejax_checkpoint_files_{self._number}", timeout_ms=TIMEOUT_S * 1000)
            if index == 0:
                listing = files.write_files_list(self._folder, {"step": self.step, "saved_at": self._clock()}, processes=count)
                self.committed = True
                self.facts["bytes"] = sum(size for size, _ in listing["files"].values())
                self.facts["write_s"] = time.perf_counter() - self._started
                self.facts["removed"] = self._after(self.step)
            else:
                self.facts["write_s"] = time.perf_counter() - self._started
        except BaseException as error:
            self.error = error
            if not threading.main_thread().is_alive():  # nobody is left who could ask
                print(f"{self.problem()} The program ended before Checkpointer.close().", file=sys.stderr)

    def problem(self) -> str:
        """What went wrong; "" when nothing did. Only after the write has ended."""
        if self.error is None:
            return ""
        what = f"{type(self.error).__name__}: {self.error}"
        if self.committed:
            return f"checkpoint {self._folder} is written, and cleaning up older ones failed: {what}"
        return f"writing checkpoint {self._folder} failed: {what}. Step {self.step} does not count; the one before it stays."


def open_orbax() -> Any:
    """An Orbax checkpointer that writes in the background."""
    import orbax.checkpoint as ocp

    return ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), timeout_secs=TIMEOUT_S)
