"""The folder of a run's checkpoints as it lies on the disk: which steps count, which are whole, and which have to go."""

from __future__ import annotations

import json
import pathlib
import threading
import warnings

import jax

from ..parallel.agreement import text_of_any, text_of_first
from . import checkpoint_files as files
from . import retention

FORMAT = 2


class DamagedCheckpointError(ValueError):
    """A checkpoint's files are not what was written. `step` says which."""

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class CheckpointFolder:
    """The steps below `path`. What was read once is remembered as long as the files' sizes and times stay the same."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._checked: dict[int, tuple[tuple, str | None]] = {}  # step: the files' signature and what was found
        self._metrics: dict[int, float | None] = {}
        self._removing = threading.Lock()  # a step that is being promoted must not be on its way out

    def folders(self) -> list[int]:
        """Every step that has a folder, whether or not it counts."""
        if not self.path.is_dir():
            return []
        return [int(p.name) for p in self.path.iterdir() if p.name.isdecimal() and p.is_dir()]

    def steps(self) -> list[int]:
        """The steps that count, in order: their list of files is there."""
        return sorted(step for step in self.folders() if (self.path / str(step) / files.FILES).is_file())

    def verify(self, step: int, share: tuple[int, int] = (0, 1)) -> str | None:
        """What is wrong with the files of `step`; share: (index, count), as in `checkpoint_files.damage`."""
        folder = self.path / str(step)
        signature = files.signature(folder)
        if step not in self._checked or self._checked[step][0] != signature:
            self._checked[step] = (signature, files.damage(folder, share=share))
        return self._checked[step][1]

    def choose(self, step: int | None, on_damage: str, *, together: bool = False) -> int:
        """The step to read, whole. together: all processes call it; they divide the reading and agree."""
        if on_damage not in ("raise", "previous"):
            raise ValueError(f"on_damage={on_damage!r}; it must be 'raise' or 'previous'.")
        share = (jax.process_index(), jax.process_count()) if together else (0, 1)
        agree = text_of_any if together else lambda text: text
        steps = json.loads(text_of_first(json.dumps(self.steps()))) if together else self.steps()
        if step is not None and step not in steps:
            raise FileNotFoundError(f"no whole checkpoint of step {step} in {self.path}; there are {steps}.")
        passed_over = []
        for candidate in sorted(steps, reverse=True) if step is None else [step]:
            problem = agree(self.verify(candidate, share) or "")
            if problem:  # found in another process's share, perhaps: every process knows it from here on
                self._checked[candidate] = (files.signature(self.path / str(candidate)), problem)
            if not problem:
                for line in passed_over:
                    warnings.warn(f"{line}; step {candidate} is used instead.", stacklevel=4)
                return candidate
            line = f"checkpoint {self.path / str(candidate)} cannot be used: {problem}"
            if step is not None or on_damage == "raise":
                out = "" if step is not None else " To go on from the newest step that is whole instead: on_damage='previous'."
                raise DamagedCheckpointError(f"{line}.{out}", candidate)
            passed_over.append(line)
        if passed_over:
            raise DamagedCheckpointError(f"no checkpoint in {self.path} is whole: " + "; ".join(passed_over), steps[-1])
        raise FileNotFoundError(f"no whole checkpoint in {self.path}.")

    def record(self, step: int) -> dict:
        """What was saved about `step`: leaves, mesh, metric, metadata."""
        record = json.loads((self.path / str(step) / "record" / "metadata").read_text())
        if record.get("format") != FORMAT:
            raise ValueError(f"checkpoint {step} has format {record.get('format')}; this version reads {FORMAT}.")
        return record

    def make_room(self, step: int) -> list[int]:
        """Before `step` is written: refuse one that would not be the newest, and remove what does not count; -> those steps.

        A step above that is damaged is set aside; so is one that was found damaged before, for else it would be the newest.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        counting = set(self.steps())
        for other in sorted(s for s in counting if s >= step or self._known_damaged(s)):
            if self.verify(other) is not None:
                retention.set_aside(self.path, other)
                self._forget(other)
            elif other >= step:
                raise ValueError(
                    f"step {step} comes after step {max(counting)} in {self.path}; steps grow, and no checkpoint is overwritten. "
                    "A run that goes back calls rewind(step) first."
                )
        unfinished = sorted(set(self.folders()) - counting)
        for rest in unfinished:
            retention.delete(self.path, rest)
        retention.remove_leftovers(self.path)
        return unfinished

    def clean_up(self, written: int, *, keep: int, keep_best: int, best: str) -> list[int]:
        """After `written` counts; -> the steps that were removed."""
        self._checked[written] = (files.signature(self.path / str(written)), None)  # read back when its list was made
        with self._removing:
            steps = self.steps()
            for step in set(steps) - self._metrics.keys() if keep_best else ():
                self._metrics[step] = self._metric(step)
            metrics = {step: value for step, value in self._metrics.items() if value is not None and step in steps}
            known_good = retention.read_known_good(self.path)
            stay = retention.kept(steps, newest=keep, best=keep_best, metrics=metrics, mode=best, known_good=known_good)
            leave = [step for step in steps if step not in stay]
            for step in leave:
                self._remove(step)
        return leave

    def _metric(self, step: int) -> float | None:
        try:
            return self.record(step)["metric"]
        except (OSError, ValueError, KeyError):
            return None  # damaged: `verify` and `restore` say so; here it is no candidate for the best, and ages out

    def promote(self, step: int) -> None:
        """Write down that `step` stays. ValueError: it is not there."""
        with self._removing:
            if step not in self.steps():
                raise ValueError(f"step {step} is not among the checkpoints {self.steps()} in {self.path}.")
            retention.write_known_good(self.path, step)

    def remove_above(self, step: int | None) -> None:
        """Remove every step above `step`; None: all. A known-good one among them is known no more."""
        known_good = retention.read_known_good(self.path)
        if known_good is not None and (step is None or known_good > step):
            (self.path / retention.KNOWN_GOOD).unlink()
        for later in [s for s in self.folders() if step is None or s > step]:
            self._remove(later)

    def _known_damaged(self, step: int) -> bool:
        return step in self._checked and self._checked[step][1] is not None

    def _remove(self, step: int) -> None:
        retention.delete(self.path, step)
        self._forget(step)

    def _forget(self, step: int) -> None:
        self._checked.pop(step, None)
        self._metrics.pop(step, None)
