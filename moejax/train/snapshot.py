"""Snapshots of the training state in host memory: what a run goes back to without reading the disk.

A snapshot costs this process's own shards once (replicas on several local devices are held once), in ordinary host memory.
It does not outlive the process: checkpoints on the disk are for that.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from typing import Any

import jax
import numpy as np

from . import checkpoint_tree as tree


class Snapshots:
    """The last `keep` snapshots. Each process holds its own shards; `restore` makes no collective call.

    Args:
      every: steps between two snapshots, for `due`.
      keep: how many are held, at least 1. While one is taken, one more: peak memory is (keep + 1) x `nbytes` of one.
    """

    def __init__(self, *, every: int, keep: int = 1):
        for name, value in (("every", every), ("keep", keep)):
            if value < 1:
                raise ValueError(f"{name}={value}; it must be at least 1. Without snapshots, make no Snapshots.")
        self.every, self.keep = every, keep
        self.seconds = 0.0
        """How long the last `take` blocked."""
        self._held: dict[int, _Snapshot] = {}

    def due(self, step: int) -> bool:
        """Whether `step` is one of every `every`."""
        return step % self.every == 0

    def take(self, step: int, state: Any, metadata: dict | None = None) -> None:
        """Copy `state` (a pytree of arrays, typed keys included) and `metadata` (JSON) to the host; back when it is done.

        It waits for the step that computes `state` and for nothing else; the arrays may be donated afterwards. Snapshots of
        `step` and later ones, left from before a rollback, are dropped. ValueError: a leaf that is no array, metadata that
        JSON cannot hold.
        """
        start = time.perf_counter()
        leaves = tree.named_leaves(state)
        exact = tree.exact_json(metadata or {})
        plain = {name: tree.words(leaf) for name, leaf in leaves.items()}
        shards = {name: _own_shards(leaf) for name, leaf in plain.items()}
        for own in shards.values():  # all copies run while the first is waited for
            for shard in own.values():
                shard.copy_to_host_async()
        held = {name: _HostArray.copy_of(leaf, shards[name]) for name, leaf in plain.items()}
        templates = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        snapshot = _Snapshot(jax.tree.structure(state), templates, held, exact)
        before = [s for s in sorted(self._held) if s < step]
        for old in before[: len(before) - self.keep + 1] + [s for s in self._held if s >= step]:
            del self._held[old]
        self._held[step] = snapshot
        self.seconds = time.perf_counter() - start

    def restore(self, template: Any = None, *, step: int | None = None) -> tuple[Any, dict]:
        """-> (state, metadata) of `step`, by default the newest; new arrays, the snapshot stays as it is.

        template: a pytree of arrays or `jax.ShapeDtypeStruct`; a sharding on a leaf is followed, and every leaf without one
        (or without a template) goes where it was. A process that holds a part of an array only (a run of several) can put
        back just that part: ValueError for another sharding. ValueError: no such step, or leaves that differ, all named.
        """
        if step is None:
            step = self.latest_step()
        if step not in self._held:
            raise ValueError(f"no snapshot of step {step}; there are {self.steps()}.")
        snapshot = self._held[step]
        if template is None:
            template = jax.tree.unflatten(snapshot.structure, list(snapshot.templates.values()))
        leaves = tree.named_leaves(template)
        saved = {name: tree.describe_leaf(leaf) for name, leaf in snapshot.templates.items()}
        tree.check_fits(f"the snapshot of step {step}", saved, leaves)
        values = []
        for name, leaf in leaves.items():
            plain = snapshot.held[name].on_devices(name, getattr(leaf, "sharding", None))
            values.append(tree.from_words(plain, snapshot.templates[name]))
        return jax.tree.unflatten(jax.tree.structure(template), values), copy.deepcopy(snapshot.metadata)

    def rewind(self, step: int) -> None:
        """Drop the snapshots above `step`, for a run that goes back to it: they are of the branch that is left."""
        for later in [s for s in self._held if s > step]:
            del self._held[later]

    def steps(self) -> list[int]:
        """The steps that are held, in order."""
        return sorted(self._held)

    def latest_step(self) -> int | None:
        """The newest step that is held; None without one."""
        return max(self._held, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the snapshots of this process take."""
        return sum(leaf.nbytes for snapshot in self._held.values() for leaf in snapshot.held.values())


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    structure: Any
    templates: dict[str, jax.ShapeDtypeStruct]
    held: dict[str, _HostArray]
    metadata: dict


Index = tuple[tuple[int, int], ...]  # (first, end) on each axis


@dataclasses.dataclass(frozen=True)
class _HostArray:
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any
    """None: a NumPy array, or one that JAX placed by itself; to commit it would compile every program anew."""
    pieces: dict[Index, np.ndarray]

    @classmethod
    def copy_of(cls, leaf: Any, shards: dict[Index, Any]) -> _HostArray:
        if not isinstance(leaf, jax.Array):
            whole = np.array(leaf)
            return cls(whole.shape, whole.dtype, None, {_index((slice(None),) * whole.ndim, whole.shape): whole})
        pieces = {}
        for index, shard in shards.items():
            host = np.asarray(shard)
            # On the CPU that is a view of the device's own memory, which the next step may be given to write into.
            pieces[index] = np.array(host) if shard.platform() == "cpu" else host
        return cls(leaf.shape, leaf.dtype, leaf.sharding if leaf.committed else None, pieces)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces.values())

    def on_devices(self, name: str, sharding: Any) -> jax.Array:
        sharding = self.sharding if sharding is None else sharding
        # Copies throughout: on the CPU a device array may lie in the very memory of the NumPy array it came from.
        if sharding is None:
            return jax.device_put(np.array(self._whole(name)))
        read = lambda index: np.array(self._read(name, _index(index, self.shape)))
        places = sharding.addressable_devices_indices_map(self.shape)
        shards = [jax.device_put(read(index), device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays(self.shape, sharding, shards, dtype=self.dtype)

    def _read(self, name: str, index: Index) -> np.ndarray:
        if index in self.pieces:
            return self.pieces[index]
        return self._whole(name)[tuple(slice(first, end) for first, end in index)]

    def _whole(self, name: str) -> np.ndarray:
        if len(self.pieces) == 1 and next(iter(self.pieces.values())).shape == self.shape:
            return next(iter(self.pieces.values()))
        if sum(piece.size for piece in self.pieces.values()) != math.prod(self.shape):
            raise ValueError(
                f"leaf {name}: this process holds a part of it only, and it can go back just where it was. "
                "Restore a checkpoint from the disk for another placement."
            )
        whole = np.empty(self.shape, self.dtype)
        for index, piece in self.pieces.items():
            whole[tuple(slice(first, end) for first, end in index)] = piece
        return whole


def _index(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(s.indices(size)[:2] for s, size in zip(slices, shape, strict=True))


def _own_shards(leaf: Any) -> dict[Index, Any]:
    """{place: array on one local device}; of replicas the first."""
    if not isinstance(leaf, jax.Array):
        return {}
    shards: dict[Index, Any] = {}
    for shard in leaf.addressable_shards:
        shards.setdefault(_index(shard.index, leaf.shape), shard.data)
    return shards
