"""Writing a published checkpoint: one tensor in memory at a time, the whole folder or nothing."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..ops.mxfp4 import mxfp4_encode
from .checkpoint import Checkpoint, Source
from .names import CODE_SUFFIX, SCALE_SUFFIX, Layout, Parameter, Rule, parameter_table
from .published_config import MODEL_DTYPES, published_config
from .shards import CODES, DTYPES, INDEX, SINGLE, TensorSpec, order_for_file, write_shard

SHARD_BYTES = 5 << 30  # of a file, unless one tensor is larger: the usual size on the Hugging Face hub
RENAME_EXCHANGE = 2  # linux/fs.h


def save(path: str | os.PathLike, checkpoint: Checkpoint, *, pack_experts: bool | None = None, dtype: str | None = None) -> None:
    """Write `checkpoint` as a folder of safetensors weights with config.json, in the published layout.

    What was loaded is written the way its files were: names, dtypes, shards, `extra` and `files` verbatim. The folder
    appears whole: a save that is killed leaves the old folder as it was. In a run of several processes all call it, the
    first writes (parameters are gathered one tensor at a time).

    Args:
      path: folder to write. An existing checkpoint there is replaced, but only if the new one has each of its small files.
      checkpoint: from `load`, or `Checkpoint(config, params, router_state)` of your own.
      pack_experts: routed experts as MXFP4 (True) or in the matrices' dtype (False). None: as they were loaded, else
        packed if config.moe.expert_weights is "mxfp4" or "mxfp4_qat". Rounding to MXFP4 loses nothing that was loaded from it.
      dtype: "bfloat16" or "float32" for the matrices; None: as they were loaded, else config.param_dtype. Convolutions,
        A_log, dt_bias, KDA's output norm and the selection bias are written in float32.

    Raises:
      ValueError: leaves that are missing, not expected or of another shape; a configuration that published files cannot
        hold; experts that are not finite; a folder at `path` with files that a checkpoint does not have.
    """
    plan = _plan(checkpoint, pack_experts, dtype)
    target = pathlib.Path(path).absolute()
    if jax.process_index() == 0:
        _check_target(target, plan)
        target.parent.mkdir(parents=True, exist_ok=True)
        work = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.saving-", dir=target.parent))
        try:
            _write(work, plan)
            _exchange(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)  # after the exchange it holds the old checkpoint
    else:
        for specs in plan.files.values():
            for name in specs:
                plan.tensor(name)  # take part in gathering
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("moejax.hub.save")


@dataclasses.dataclass
class _Plan:
    """What goes into which file."""

    config: dict[str, Any]
    checkpoint: Checkpoint
    files: dict[str, dict[str, TensorSpec]]
    single: bool
    """One file without an index."""
    specs: dict[str, TensorSpec]
    writers: dict[str, _Tensor]
    metadata: dict[str, str]
    cached: tuple[str, dict[str, np.ndarray]] = ("", {})

    def tensor(self, name: str) -> np.ndarray:
        if name in self.checkpoint.extra:
            return np.asarray(self.checkpoint.extra[name]).astype(DTYPES[self.specs[name].dtype], copy=False)
        writer = self.writers[name]
        if self.cached[0] != writer.name:  # codes and scales of one matrix come together
            self.cached = (writer.name, writer.arrays())
        return self.cached[1][name]


@dataclasses.dataclass
class _Tensor:
    """One stored matrix, and the slices of parameters that it is put together from."""

    name: str
    rule: Rule
    specs: dict[str, TensorSpec]
    parts: list[tuple[Rule, Any, tuple[int, ...]]]
    """(rule, parameter, index over its stacked axes)."""

    def arrays(self) -> dict[str, np.ndarray]:
        """{stored name: array}."""
        if self.rule.kind == "packed":
            return self._packed(_merge(self.parts).reshape(self.rule.stored_shape))
        ((name, spec),) = self.specs.items()
        values = _merge(self.parts).reshape(-1)
        if values.size < spec.size:  # A_log has zeros behind its heads
            values = np.pad(values, (0, spec.size - values.size))
        return {name: values.reshape(spec.shape).astype(DTYPES[spec.dtype], copy=False)}

    def _packed(self, matrix: np.ndarray) -> dict[str, np.ndarray]:
        try:
            codes, scales = mxfp4_encode(np.ascontiguousarray(matrix))
        except ValueError as error:
            raise ValueError(f"{self.name} cannot be packed: {error}") from None
        return {self.name + CODE_SUFFIX: codes, self.name + SCALE_SUFFIX: scales}


def _merge(parts: list[tuple[Rule, Any, tuple[int, ...]]]) -> np.ndarray:
    """The stored tensor in factors, from the parameters that share it."""
    if len(parts) == 1:
        rule, leaf, index = parts[0]
        return _to_factors(_fetch(leaf, index), rule)
    out = None
    for rule, leaf, index in parts:
        value = _to_factors(_fetch(leaf, index), rule)
        if out is None:
            out = np.zeros(rule.factors, value.dtype)
        assert rule.window is not None
        axis, start, stop = rule.window
        out[(slice(None),) * axis + (slice(start, stop),)] = value
    assert out is not None
    return out


def _to_factors(value: np.ndarray, rule: Rule) -> np.ndarray:
    return value.transpose(np.argsort(rule.axes)) if rule.axes else value


def _fetch(leaf: Any, index: tuple[int, ...]) -> np.ndarray:
    """One slice of a parameter on the host. A leaf that is on this host's CPU is not copied."""
    if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable and len(leaf.devices()) == 1 and _on_cpu(leaf)):
        return np.asarray(_take(leaf.sharding)(leaf, index))
    return np.asarray(leaf)[index]


def _on_cpu(leaf: jax.Array) -> bool:
    return next(iter(leaf.devices())).platform == "cpu"


@functools.lru_cache(maxsize=256)
def _take(sharding: Any):
    """Slice with a traced index: one program a shape, not one an index; the result is whole on every process."""
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None

    def take(leaf: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        for at in index:
            leaf = jax.lax.dynamic_index_in_dim(leaf, at, 0, keepdims=False)
        return leaf

    return jax.jit(take, out_shardings=whole)


def _plan(checkpoint: Checkpoint, pack_experts: bool | None, dtype: str | None) -> _Plan:
    config, source = checkpoint.config, checkpoint.source
    packed = _packed(checkpoint, pack_experts)
    code = _code(checkpoint, dtype)
    outer = source.config.outer if source is not None else config.kda.lower_bound is not None
    name = next(key for key, value in MODEL_DTYPES.items() if value == code)
    published = published_config(config, source and source.config, outer=outer, packed=packed, dtype=name)
    writers = _writers(checkpoint, parameter_table(config, Layout(outer, packed)), code)
    specs = {stored: spec for writer in writers.values() for stored, spec in writer.specs.items()}
    for stored, array in checkpoint.extra.items():
        if stored not in specs:
            specs[stored] = TensorSpec(tuple(array.shape), CODES[array.dtype])
        elif specs[stored].shape != array.shape:
            wanted = specs[stored].shape
            raise ValueError(f"extra holds {stored} of shape {array.shape}; this configuration's has {wanted}. Drop it from extra.")
    files = _files(specs, source)
    by_name = {stored: writer for writer in writers.values() for stored in writer.specs}
    single = list(files) == [SINGLE]
    metadata = dict(source.metadata) if source is not None else {"format": "pt"}
    return _Plan(published.raw, checkpoint, files, single, specs, by_name, metadata)


def _packed(checkpoint: Checkpoint, pack_experts: bool | None) -> bool:
    kept = checkpoint.config.moe.expert_weights
    if kept == "mxfp4":
        if pack_experts is False:
            raise ValueError("pack_experts=False, but these experts are packed; load the checkpoint without keep_packed to unpack them.")
        return True
    if pack_experts is None:
        return kept == "mxfp4_qat" or (checkpoint.source is not None and checkpoint.source.packed)
    if pack_experts:
        width = checkpoint.config.moe.latent or checkpoint.config.hidden
        if width % 32 or checkpoint.config.moe.expert_width % 32:
            raise ValueError(
                f"pack_experts=True, but the experts are {width} x {checkpoint.config.moe.expert_width}; MXFP4 needs multiples of 32."
            )
    return pack_experts


def _code(checkpoint: Checkpoint, dtype: str | None) -> str:
    if dtype is None:
        return checkpoint.source.dtype if checkpoint.source is not None else MODEL_DTYPES[checkpoint.config.param_dtype]
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be None or one of {', '.join(MODEL_DTYPES)}.")
    return MODEL_DTYPES[dtype]


def _writers(checkpoint: Checkpoint, table: list[Parameter], code: str) -> dict[str, _Tensor]:
    """{name in our table: stored matrix}; every leaf that does not fit is in one error."""
    leaves = _leaves(checkpoint)
    problems = [f"{label}: not expected" for label in leaves.keys() - {parameter.label for parameter in table}]
    writers: dict[str, _Tensor] = {}
    for parameter in table:
        leaf = leaves.get(parameter.label)
        if leaf is None or tuple(leaf.shape) != parameter.shape:
            problems.append(f"{parameter.label}: {'missing' if leaf is None else tuple(leaf.shape)}, expected {parameter.shape}")
            continue
        for index, slot in parameter.slots.items():
            assert slot is not None  # a table from parameter_table is full
            if slot.name not in writers:
                writers[slot.name] = _Tensor(slot.name, slot.rule, _specs(slot.name, slot.rule, checkpoint.source, code), [])
            writers[slot.name].parts.append((slot.rule, leaf, index))
    if problems:
        lines = "\n".join(f"  {line}" for line in sorted(problems))
        raise ValueError(f"{len(problems)} leaves of params and router_state do not fit the configuration:\n{lines}")
    return writers


def _leaves(checkpoint: Checkpoint) -> dict[str, Any]:
    trees = {"params": checkpoint.params, "router_state": checkpoint.router_state}
    paths = jax.tree_util.tree_leaves_with_path(trees)
    return {"/".join(str(getattr(key, "key", key)) for key in path): leaf for path, leaf in paths}


def _specs(name: str, rule: Rule, source: Source | None, code: str) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes to write: those of the source where it had its own."""
    spelling = source.spelling.get(name, name) if source is not None else name
    specs = rule.stored(spelling, code)
    if source is None:
        return specs
    return {stored: _as_stored(spec, source.forms.get(stored), source.dtype, code) for stored, spec in specs.items()}


def _as_stored(spec: TensorSpec, form: TensorSpec | None, old: str, new: str) -> TensorSpec:
    """A form of the source; where that was in the matrices' old dtype it follows them to the new one."""
    if form is None:
        return spec
    return TensorSpec(form.shape, new if form.dtype == old and spec.dtype != old else form.dtype)


def _files(specs: dict[str, TensorSpec], source: Source | None) -> dict[str, dict[str, TensorSpec]]:
    """{file: tensors}: as in the source if it holds the same tensors, else in order, SHARD_BYTES a file."""
    if source is not None and source.weight_map.keys() == specs.keys():
        files: dict[str, list[tuple[str, TensorSpec]]] = {}
        for name, spec in specs.items():
            files.setdefault(source.weight_map[name], []).append((name, spec))
        return {file: order_for_file(files[file]) for file in sorted(files)}
    groups: list[list[tuple[str, TensorSpec]]] = [[]]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + spec.nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((name, spec))
        size += spec.nbytes
    if len(groups) == 1:
        return {SINGLE: order_for_file(groups[0])}
    return {f"model-{i + 1:05}-of-{len(groups):06}.safetensors": order_for_file(group) for i, group in enumerate(groups)}


def _check_target(target: pathlib.Path, plan: _Plan) -> None:
    """Replacing a folder must lose nothing but the old weights."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder.")
    ours = {"config.json", INDEX, *plan.checkpoint.files}
    foreign = [p.name for p in sorted(target.iterdir()) if p.is_dir() or (p.name not in ours and p.suffix != ".safetensors")]
    if foreign:
        raise ValueError(
            f"{target} holds {', '.join(foreign[:8])}{' and more' if len(foreign) > 8 else ''}, which the new checkpoint does not; "
            "replacing the folder would delete it. Save to a new folder, or move these away."
        )


def _write(folder: pathlib.Path, plan: _Plan) -> None:
    total = 0
    for file, specs in plan.files.items():
        write_shard(folder / file, specs, plan.tensor, plan.metadata)
        total += sum(spec.nbytes for spec in specs.values())
    if not plan.single:
        names = {name: file for file, specs in plan.files.items() for name in specs}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
        _write_bytes(folder / INDEX, json.dumps(index, indent=2).encode())
    for name, content in plan.checkpoint.files.items():
        if pathlib.PurePath(name).name != name:
            raise ValueError(f"files holds {name!r}; names of files in the folder itself are possible.")
        _write_bytes(folder / name, content)
    _write_bytes(folder / "config.json", json.dumps(plan.config, indent=2, ensure_ascii=False).encode())
    _sync_folder(folder)


def _write_bytes(path: pathlib.Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: pathlib.Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(work: pathlib.Path, target: pathlib.Path) -> None:
    """Put the finished folder at `target` in one step; the old one ends at `work`."""
    os.chmod(work, 0o755)  # mkdtemp made it private
    if not target.exists():
        os.rename(work, target)
    elif not _rename_exchange(work, target):
        _rename_twice(work, target)
    _sync_folder(target.parent)


def _rename_exchange(work: pathlib.Path, target: pathlib.Path) -> bool:
    """Swap two folders atomically where the system can (Linux renameat2 on most file systems)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here = -100  # AT_FDCWD
    return rename(here, os.fsencode(work), here, os.fsencode(target), RENAME_EXCHANGE) == 0


def _rename_twice(work: pathlib.Path, target: pathlib.Path) -> None:
    """Without an atomic swap: a crash between the two steps leaves the old checkpoint beside, under the name told here."""
    aside = target.with_name(f".{target.name}.before-{work.name.rsplit('-', 1)[-1]}")
    os.rename(target, aside)
    try:
        os.rename(work, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, work)


