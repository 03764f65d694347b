"""Checkpoints that are either whole or not there, written in the background.

A step counts only when the list of its files (size and checksum of each) is on the disk; the list is written last, so a save
that was interrupted anywhere leaves the step before it as the latest. Older steps are removed only after that.
"""

from __future__ import annotations

import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..parallel.agreement import raised_on_all, text_of_any
from . import checkpoint_files as files
from . import checkpoint_tree as tree
from . import retention
from .checkpoint_folder import FORMAT, CheckpointFolder, DamagedCheckpointError
from .checkpoint_write import CheckpointError, Write, open_orbax

__all__ = ["CheckpointError", "Checkpointer", "DamagedCheckpointError"]


class Checkpointer:
    """Saves pytrees of arrays under folder/<step> and restores them, on any mesh and any number of processes.

    `save`, `wait`, `restore`, `promote`, `rewind` and `close` are called by all processes of a run alike; the others act alone.
    The folder is a path that all processes see. Reading changes nothing on disk. Orbax is imported on first use.
    `close` it, or use it in a `with`: a program that ends without loses the write that goes on, never the one before.

    Args:
      folder: where the steps lie; made at the first save.
      keep: how many of the newest steps stay, at least 1.
      keep_best: how many of the best by the `metric` given to `save` stay besides.
      best: "min" or "max": which metric is the best.
      record: gets an event {"event", "step", ...} for each checkpoint_saved (seconds `save` blocked and the write took, bytes,
        steps removed), checkpoint_failed and promoted, on the thread that calls the methods.
      clock: seconds since 1970, for the date in the list of files.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep: int = 2,
        keep_best: int = 0,
        best: str = "min",
        record: Callable[[dict], None] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}; it must be at least 1: the newest checkpoint is the one to resume from.")
        if keep_best < 0:
            raise ValueError(f"keep_best={keep_best}; it must be 0 (none) or more.")
        if best not in ("min", "max"):
            raise ValueError(f"best={best!r}; it must be 'min' (a loss) or 'max' (a score).")
        self.folder = pathlib.Path(folder).absolute()
        self._disk = CheckpointFolder(self.folder)
        self.keep, self.keep_best, self.best = keep, keep_best, best
        self._record, self._clock = record or (lambda event: None), clock
        self._orbax: Any = None
        self._write: Write | None = None
        self._begun = -1  # the step of the last save

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.join()

    # Saving

    def save(self, step: int, state: Any, metadata: dict | None = None, *, metric: float | None = None) -> None:
        """Begin to write `state` (a pytree of arrays, typed keys included) and `metadata` (JSON) as `step`.

        It is back when the arrays are copied from the devices: they may be donated then. It waits for the write before it and
        raises that one's error, in which case this step was not begun. metric: for `keep_best`; one that is not finite never
        is the best. ValueError: a step not above the newest, a leaf that is no array, metadata that JSON cannot hold.
        """
        import orbax.checkpoint as ocp

        started = time.perf_counter()
        leaves = tree.named_leaves(state)
        record = {
            "format": FORMAT,
            "leaves": {name: tree.describe_leaf(leaf) for name, leaf in leaves.items()},
            "placement": {name: where for name, leaf in leaves.items() if (where := tree.placement(leaf))},
            "mesh": tree.mesh_axes(leaves),
            "processes": jax.process_count(),
            "metric": metric if metric is not None and math.isfinite(metric) else None,
            "metadata": tree.exact_json(metadata or {}),
        }
        self.wait()
        with raised_on_all("starting a checkpoint"):
            rest = self._disk.make_room(step) if jax.process_index() == 0 else []
        for unfinished in rest if self._begun < 0 else ():  # one that failed in this process was reported already
            problem = "its save was interrupted in an earlier process; what lay there is removed"
            self._record({"event": "checkpoint_failed", "step": unfinished, "problem": problem})
        # Orbax refuses arrays without elements; their shape in the record is all there is to keep.
        plain = {name: tree.own_copy(tree.words(leaf)) for name, leaf in leaves.items() if leaf.size}
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(plain), record=ocp.args.JsonSave(record))  # pyright: ignore
        self._begun = step
        try:
            if self._orbax is None:
                self._orbax = open_orbax()
            self._write = Write(self._orbax, self.folder, step, items, clock=self._clock, after=self._clean_up)
        except Exception as error:
            self._fail(f"writing checkpoint {self.folder / str(step)} could not begin: {type(error).__name__}: {error}", error)
        else:
            self._write.facts["blocked_s"] = time.perf_counter() - started

    def check(self) -> None:
        """Call it at each step: raises CheckpointError when the write in the background failed, and never waits.

        It acts alone. In a run of several processes only the one that failed raises here; the others do at `save` or `wait`.
        `problem` tells the same without raising, for the processes to agree on first.
        """
        if self._write is not None and not self._write.running:
            self._conclude("")

    @property
    def problem(self) -> str:
        """What went wrong in the background since the last call that raised; "" when nothing did or the write goes on."""
        return self._write.problem() if self._write is not None and not self._write.running else ""

    @property
    def busy(self) -> bool:
        """Whether a write goes on in the background."""
        return self._write is not None and self._write.running

    def join(self) -> None:
        """Back when the write has ended, well or not. It acts alone: after an error the other processes may be anywhere."""
        if self._write is not None:
            self._write.join()

    def wait(self) -> None:
        """Back when the last step counts, on all processes. Raises CheckpointError when it does not."""
        if self._write is not None:
            self._write.join()
        problem = "" if self._write is None else self._write.problem()
        self._conclude(text_of_any(problem))

    def close(self) -> None:
        """Wait for the last write, raise its error, and release Orbax's threads."""
        try:
            self.wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None

    # Reading

    def restore(self, template: Any, *, step: int | None = None, on_damage: str = "raise", part: bool = False) -> tuple[Any, dict]:
        """-> (state, metadata) of `step`, by default the newest. `template` gives structure and placement.

        template: a pytree like the saved one, of arrays or `jax.ShapeDtypeStruct`; a sharding on a leaf is followed,
        a leaf without one comes back uncommitted on the default device. All leaves come back as JAX arrays.
        on_damage: what to do when the newest step's files are not what was written: "raise", or "previous": take the newest
        step that is whole, with a warning that names what was passed over. A step that was asked for is never replaced.
        part: the template may lack leaves that were saved; they take no memory (their files are compared all the same). What it
        has must be there: {"params": ..., "router_state": ...} of a `TrainState`, say.
        FileNotFoundError when there is none. DamagedCheckpointError (a ValueError) naming the files. ValueError naming every
        leaf that is missing, not expected, or of another shape or dtype: nothing is cast or padded.
        """
        import orbax.checkpoint as ocp

        if self._write is not None:
            self._write.join()  # its error, if any, is for `check`, `save` or `close`
        chosen = self._disk.choose(step, on_damage, together=True)
        record = self._disk.record(chosen)
        leaves = tree.named_leaves(template)
        saved = {name: kind for name, kind in record["leaves"].items() if name in leaves or not part}
        tree.check_fits(f"checkpoint {self.folder / str(chosen)}", saved, leaves)
        targets = {name: tree.target(leaf) for name, leaf in leaves.items() if leaf.size}
        restore_args = {name: _restore_args(ocp, target) for name, target in targets.items()}
        wanted = ocp.args.PyTreeRestore(item=targets, restore_args=restore_args, partial_restore=part)
        with ocp.PyTreeCheckpointer() as reader:
            plain = reader.restore(self.folder / str(chosen) / "state", args=wanted)
        values = [_value(plain.get(name), leaf) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(template), values), record["metadata"]

    def metadata(self, *, step: int | None = None, on_damage: str = "raise") -> dict:
        """The metadata saved with `step`, by default the newest."""
        return self._disk.record(self._disk.choose(step, on_damage))["metadata"]

    def latest_step(self, *, on_damage: str = "raise") -> int | None:
        """The newest step, its files compared with what was written (once, as long as nobody touches them); None without one.

        on_damage: as in `restore`. A save that was interrupted or failed is no step.
        """
        return self._disk.choose(None, on_damage) if self.steps() else None

    def steps(self) -> list[int]:
        """All steps that count, in order: their list of files is there. The files are not read; `verify` does that."""
        return self._disk.steps()

    def verify(self, step: int) -> str | None:
        """What is wrong with the files of `step`, by name; None when they are as written. Reads them once."""
        return self._disk.verify(step)

    def describe(self, step: int | None = None) -> dict:
        """Facts about `step` (by default the newest): when and where it was saved, its size, its metric.

        {"step", "saved_at" (seconds since 1970), "bytes", "leaves" (count), "metric", "known_good", "mesh" ({axis: size}),
        "processes", "placement" ({leaf: PartitionSpec}), "metadata"}. The mesh is for information: any may restore it.
        """
        chosen = self._disk.choose(step, "raise")
        record, listing = self._disk.record(chosen), files.read_files_list(self.folder / str(chosen))
        return {
            "step": chosen,
            "saved_at": listing["saved_at"],
            "bytes": sum(size for size, _ in listing["files"].values()),
            "leaves": len(record["leaves"]),
            "metric": record["metric"],
            "known_good": retention.read_known_good(self.folder) == chosen,
            **{name: record[name] for name in ("mesh", "processes", "placement", "metadata")},
        }

    # Which steps stay

    def promote(self, step: int) -> None:
        """Call `step` known to be good: it stays, whatever its age, until another is promoted.

        ValueError: no such step; one that is still being written counts after `wait`.
        """
        with raised_on_all("promoting a checkpoint"):
            if jax.process_index() == 0:
                self._disk.promote(step)
        self._record({"event": "promoted", "step": step})

    def known_good(self) -> int | None:
        """The step that was promoted last; None before any was. ValueError when its folder is gone."""
        step = retention.read_known_good(self.folder)
        if step is not None and step not in self.steps():
            raise ValueError(f"step {step} was promoted in {self.folder}, and its checkpoint is gone; there are {self.steps()}.")
        return step

    def rewind(self, step: int | None) -> None:
        """Remove all steps above `step` (None: all), which a run leaves when it goes back: the next save may follow on `step`."""
        if self._write is not None:
            self._write.join()
        with raised_on_all("rewinding the checkpoints"):
            if jax.process_index() == 0:
                self._disk.remove_above(step)

    # Inside

    def _conclude(self, elsewhere: str) -> None:
        """Report the write that has ended. elsewhere: the first problem of any process, when they have agreed."""
        write, self._write = self._write, None
        problem = write.problem() if write is not None else ""
        if write is not None and (write.committed or not (problem or elsewhere)):
            self._record({"event": "checkpoint_saved", "step": write.step, **write.facts})
        if problem or elsewhere:
            self._fail(problem or elsewhere, write.error if write is not None else None)

    def _fail(self, problem: str, cause: BaseException | None) -> None:
        self._record({"event": "checkpoint_failed", "step": self._begun, "problem": problem})
        raise CheckpointError(problem, self._begun) from cause

    def _clean_up(self, written: int) -> list[int]:
        return self._disk.clean_up(written, keep=self.keep, keep_best=self.keep_best, best=self.best)


def _restore_args(ocp: Any, target: jax.ShapeDtypeStruct) -> Any:
    """Without a sharding the host's copy is read: an array committed to a device would compile every program anew."""
    if target.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=target.sharding, global_shape=target.shape, dtype=target.dtype)


def _value(plain: Any, leaf: Any) -> Any:
    if plain is None:
        return jnp.empty(leaf.shape, leaf.dtype, device=getattr(leaf, "sharding", None))
    return tree.from_words(jnp.asarray(plain), leaf)
