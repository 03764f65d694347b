"""Checkpoints that are either whole or not there: Orbax's atomic commit, and a list of every file's size and checksum.

A step counts only when its list of files is there and every file agrees with it. The list is written last, so a save
that was interrupted anywhere leaves the step before it as the latest; so does a file that was damaged later.
"""

import json
import os
import pathlib
import warnings
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..parallel.agreement import raised_on_all

FORMAT = 1
FILES = "files.json"
PIECE = 16 << 20  # bytes checksummed at a time: a file of any size costs this much memory


class Checkpointer:
    """Saves and restores pytrees of arrays under `folder`/<step>, at most `keep` of them (the newest).

    Reading changes nothing on disk. Orbax is imported on first use.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 2):
        if keep < 2:  # Orbax deletes the one before as soon as it has written a step, before our list of files is there
            raise ValueError(f"keep={keep}; it must be at least 2: one whole checkpoint while the next is written.")
        self.folder = pathlib.Path(folder).absolute()
        self.keep = keep
        self._manager: Any = None

    def save(self, step: int, state: Any, metadata: dict | None = None) -> None:
        """Write `state` (a pytree of arrays, typed keys included) and `metadata` (JSON) as `step`; back when safe.

        ValueError: a step not above the newest whole one, a leaf that is no array, metadata that JSON cannot hold.
        """
        import orbax.checkpoint as ocp

        leaves = _named_leaves(state)
        record = {
            "format": FORMAT,
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "metadata": _exact_json(metadata or {}),
        }
        first = self._manager is None
        whole = set(self.steps() if first else self._listed())  # files are read in full once a process, not at every save
        newest = max(whole, default=-1)
        if step <= newest:
            raise ValueError(f"step {step} comes after step {newest} in {self.folder}; steps grow, and no checkpoint is overwritten.")
        if first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._set_aside_incomplete(whole)
            self._manager = self._open()
        # Orbax refuses arrays without elements; their shape in the record is all there is to keep.
        stored = {name: leaf for name, leaf in leaves.items() if leaf.size}
        plain = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in stored.items()}
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(plain), record=ocp.args.JsonSave(record))  # pyright: ignore
        if not self._manager.save(step, args=items, force=True):
            raise RuntimeError(f"Orbax did not save step {step} in {self.folder}.")
        self._manager.wait_until_finished()
        with raised_on_all("saving a checkpoint"):  # all go on when the step counts
            if jax.process_index() == 0:
                _write_files_list(self.folder / str(step))

    def restore(self, template: Any, *, step: int | None = None) -> tuple[Any, dict]:
        """-> (state, metadata) of `step`, by default the latest whole one. `template` gives structure and placement.

        template: a pytree like the saved one, of arrays or `jax.ShapeDtypeStruct`; a sharding on a leaf is followed,
        a leaf without one comes back uncommitted on the default device. All leaves come back as JAX arrays.
        FileNotFoundError when nothing whole is there. ValueError naming every leaf that is missing, not expected, or of
        another shape or dtype: nothing is cast or padded.
        """
        import orbax.checkpoint as ocp

        chosen = self._choose(step)
        record = self._record(chosen)
        leaves = _named_leaves(template)
        self._compare(chosen, record["leaves"], {name: _describe(leaf) for name, leaf in leaves.items()})
        targets = {name: _target(leaf) for name, leaf in leaves.items() if leaf.size}
        restore_args = {name: _restore_args(ocp, target) for name, target in targets.items()}
        with ocp.PyTreeCheckpointer() as reader:
            plain = reader.restore(self.folder / str(chosen) / "state", item=targets, restore_args=restore_args)
        values = [_value(plain.get(name), leaf) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(template), values), record["metadata"]

    def metadata(self, *, step: int | None = None) -> dict:
        """The metadata saved with `step`, by default the latest whole one."""
        return self._record(self._choose(step))["metadata"]

    def latest_step(self) -> int | None:
        """The newest step that is whole, or None. Warns about a newer one that was committed and is damaged."""
        for step in sorted(self._folders(), reverse=True):
            problem = _damage(self.folder / str(step))
            if problem is None:
                return step
            warnings.warn(f"checkpoint {self.folder / str(step)} is not used: {problem}", stacklevel=2)
        return None

    def steps(self) -> list[int]:
        """All steps that are whole, in order."""
        return [step for step in sorted(self._folders()) if _damage(self.folder / str(step)) is None]

    def close(self) -> None:
        """Release Orbax's threads."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _folders(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir()]

    def _listed(self) -> list[int]:
        """The steps whose list of files was written; the files are not read."""
        return [step for step in self._folders() if (self.folder / str(step) / FILES).is_file()]

    def _choose(self, step: int | None) -> int:
        if step is None:
            step = self.latest_step()
            if step is None:
                raise FileNotFoundError(f"no whole checkpoint in {self.folder}.")
        elif (problem := _damage(self.folder / str(step))) is not None:
            raise ValueError(f"checkpoint {self.folder / str(step)} cannot be used: {problem}")
        return step

    def _record(self, step: int) -> dict:
        record = json.loads((self.folder / str(step) / "record" / "metadata").read_text())
        if record.get("format") != FORMAT:
            raise ValueError(f"checkpoint {step} has format {record.get('format')}; this version reads {FORMAT}.")
        return record

    def _compare(self, step: int, saved: dict, wanted: dict) -> None:
        lines = [f"  {name}: saved, not expected" for name in saved.keys() - wanted.keys()]
        lines += [f"  {name}: expected, not saved" for name in wanted.keys() - saved.keys()]
        lines += [
            f"  {name}: saved {saved[name]}, expected {wanted[name]}"
            for name in saved.keys() & wanted.keys()
            if saved[name] != wanted[name]
        ]
        if lines:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} does not fit: {len(lines)} leaves differ. "
                "Build the state with the configuration the run was started with.\n" + "\n".join(sorted(lines))
            )

    def _set_aside_incomplete(self, whole: set[int]) -> None:
        """Rename what is not whole, so that its step can be written again; nothing is deleted. Process 0 does it."""
        if jax.process_index() == 0:
            for step in set(self._folders()) - whole:
                number = 0
                while (aside := self.folder / f"incomplete-{step}-{number}").exists():
                    number += 1
                (self.folder / str(step)).rename(aside)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("moejax: incomplete checkpoints are set aside")

    def _open(self) -> Any:
        import orbax.checkpoint as ocp

        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep, enable_async_checkpointing=False, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self.folder, options=options)


def _named_leaves(tree: Any) -> dict[str, Any]:
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"leaf {name} is {type(leaf).__name__}; a checkpoint holds arrays, metadata the rest.")
        if name in named:
            raise ValueError(f"two leaves are called {name}; names must differ.")
        named[name] = leaf
    return named


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    # A key's sharding names its own axes; the words behind each key are one more axis, not sharded.
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=getattr(leaf, "sharding", None))


def _restore_args(ocp: Any, target: jax.ShapeDtypeStruct) -> Any:
    """Without a sharding the host's copy is read: an array committed to a device would compile every program anew."""
    if target.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=target.sharding, global_shape=target.shape, dtype=target.dtype)


def _value(plain: Any, leaf: Any) -> Any:
    if plain is None:
        return jnp.empty(leaf.shape, leaf.dtype)
    plain = jnp.asarray(plain)
    if not _is_key(leaf):
        return plain
    # A ShapeDtypeStruct names its generator in the dtype only ("key<fry>" is threefry2x32).
    return jax.random.wrap_key_data(plain, impl=leaf.dtype._impl.name)


def _exact_json(metadata: dict) -> dict:
    try:
        again = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata cannot be written as JSON: {error}") from None
    if again != metadata:
        raise ValueError("metadata changes when written as JSON (a tuple, a key that is no string); use plain values.")
    return again


def _checksums(folder: pathlib.Path) -> dict[str, list[int]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != FILES:
            found[path.relative_to(folder).as_posix()] = [path.stat().st_size, _crc32(path)]
    return found


def _crc32(path: pathlib.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            value = zlib.crc32(piece, value)
    return value


def _write_files_list(folder: pathlib.Path) -> None:
    text = json.dumps(_checksums(folder))
    part = folder / (FILES + ".part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(folder / FILES)


def _damage(folder: pathlib.Path) -> str | None:
    """What is wrong with a step's folder, naming the file; None when it is whole."""
    try:
        wanted = json.loads((folder / FILES).read_text())
    except FileNotFoundError:
        return f"{FILES} is missing (the save was interrupted)"
    except (OSError, ValueError) as error:
        return f"{FILES} is unreadable ({error})"
    found = _checksums(folder)
    for name, entry in wanted.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != entry:
            return f"{name} differs from what was written"
    return None
