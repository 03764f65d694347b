"""Writing a published checkpoint: one tensor in memory at a time, the whole folder or nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..ops.mxfp4 import mxfp4_encode
from ..parallel.agreement import raised_on_all
from .checkpoint import Checkpoint, Source
from .expected import unused_names
from .folder import check_target, remove, replace, work_folder, write_bytes
from .names import CODE_SUFFIX, GROUP, SCALE_SUFFIX, Layout, Parameter, Rule, parameter_table
from .published_config import DTYPE_NAMES, MODEL_DTYPES
from .shards import CODES, DTYPES, INDEX, SINGLE, TensorSpec, order_for_file, write_shard
from .written_config import published_config

SHARD_BYTES = 5 << 30  # of a file, unless one tensor is larger: the usual size on the Hugging Face hub


def save(path: str | os.PathLike, checkpoint: Checkpoint, *, pack_experts: bool | None = None, dtype: str | None = None) -> None:
    """Write `checkpoint` as a folder of safetensors weights with config.json, in the published layout.

    What was loaded is written the way its files were: names, dtypes, shards, `extra` and `files` verbatim. The folder
    appears whole: a save that fails or is killed leaves the old folder as it was. In a run of several processes all call it, the
    first writes (parameters are gathered one tensor at a time), and an error of the first is raised on all.

    Args:
      path: folder to write; a link is followed. An existing checkpoint there is replaced, but only if everything else in the
        folder is among the new checkpoint's `files`.
      checkpoint: from `load`, or `Checkpoint(config, params, router_state)` of your own.
      pack_experts: routed experts as MXFP4 (True) or in the matrices' dtype (False). None: as they were loaded, else
        packed if config.moe.expert_weights is "mxfp4" or "mxfp4_qat". Rounding to MXFP4 loses nothing that was loaded from it.
      dtype: "bfloat16", "float32" or "float64" for the matrices; None: as they were loaded, else config.param_dtype.
        Convolutions, A_log, dt_bias, KDA's output norm and the selection bias are written in float32 (the first four as they
        were loaded, where Kimi-Linear files had them in the matrices' dtype).

    Raises:
      ValueError: leaves that are missing, not expected or of another shape; a configuration that published files cannot
        hold; experts that are not finite; a folder at `path` with files that a checkpoint does not have.
    """
    plan = _plan(checkpoint, pack_experts, dtype)
    with raised_on_all("saving"):
        target = check_target(path, checkpoint.files) if jax.process_index() == 0 else pathlib.Path(path)
        work = work_folder(target) if jax.process_index() == 0 else None
    names = plan.names()
    with raised_on_all("saving", at_last=lambda: [plan.gather(name) for name in names]):
        if work is not None:
            try:
                _write(work, plan, names)
                replace(target, work, checkpoint.files)
            finally:
                if work.exists():
                    remove(work)


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
    gathered: tuple[str, np.ndarray | None] = ("", None)
    encoded: tuple[str, dict[str, np.ndarray]] = ("", {})

    def names(self) -> Iterator[str]:
        """Every tensor in the order of writing: what all processes gather, in step."""
        return iter([name for specs in self.files.values() for name in specs])

    def gather(self, name: str) -> np.ndarray | None:
        """Fetch from the devices what `name` is made of; codes and scales of one matrix come together."""
        if name not in self.checkpoint.extra and self.gathered[0] != self.writers[name].name:
            self.gathered = (self.writers[name].name, self.writers[name].fetch())
        return self.gathered[1]

    def tensor(self, name: str) -> np.ndarray:
        if name in self.checkpoint.extra:
            return np.asarray(self.checkpoint.extra[name]).astype(DTYPES[self.specs[name].dtype], copy=False)
        values = self.gather(name)
        if self.encoded[0] != self.gathered[0]:
            assert values is not None
            self.encoded = (self.gathered[0], self.writers[name].arrays(values))
        return self.encoded[1][name]


@dataclasses.dataclass
class _Tensor:
    """One stored matrix, and the slices of parameters that it is put together from."""

    name: str
    rule: Rule
    specs: dict[str, TensorSpec]
    parts: list[tuple[Rule, Any, tuple[int, ...]]]
    """(rule, parameter, index over its stacked axes)."""

    def fetch(self) -> np.ndarray:
        """The values on the host, in the file's order."""
        return _merge(self.parts)

    def arrays(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """{stored name: array}."""
        if self.rule.kind == "packed":
            return self._packed(values.reshape(self.rule.stored_shape))
        ((name, spec),) = self.specs.items()
        values = values.reshape(-1)
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
    published = published_config(config, source and source.config, outer=outer, packed=packed, dtype=DTYPE_NAMES[code])
    writers = _writers(checkpoint, parameter_table(config, Layout(outer, packed)), code)
    specs = {stored: spec for writer in writers.values() for stored, spec in writer.specs.items()}
    _add_extra(specs, checkpoint.extra, unused_names(config, Layout(outer, packed)))
    _check_files(checkpoint.files)
    files = _files(specs, source)
    by_name = {stored: writer for writer in writers.values() for stored in writer.specs}
    single = list(files) == [SINGLE]
    metadata = dict(source.metadata) if source is not None else {"format": "pt"}
    return _Plan(published.raw, checkpoint, files, single, specs, by_name, metadata)


def _add_extra(specs: dict[str, TensorSpec], extra: dict[str, np.ndarray], unused: set[str]) -> None:
    """Put the tensors of `extra` among those to write; only of unused ones may `params` have values, too."""
    for name, array in extra.items():
        if array.dtype not in CODES:
            raise ValueError(f"extra holds {name} as {array.dtype}; safetensors files hold {', '.join(map(str, CODES))}.")
        if name == "__metadata__":
            raise ValueError("extra holds a tensor called __metadata__, a name that safetensors files keep for themselves.")
        if name not in specs:
            specs[name] = TensorSpec(tuple(array.shape), CODES[array.dtype])
        elif name not in unused:
            raise ValueError(f"extra holds {name}, which params hold, too; remove it from extra.")
        elif specs[name].shape != array.shape:
            wanted = specs[name].shape
            raise ValueError(f"extra holds {name} of shape {array.shape}; this configuration's has {wanted}. Remove it from extra.")


def _check_files(files: dict[str, bytes]) -> None:
    for name in files:
        if pathlib.PurePath(name).name != name or name in ("config.json", INDEX) or name.endswith(".safetensors"):
            raise ValueError(f"files holds {name!r}; it must be a plain file name, and none that save writes itself.")


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
        if width % GROUP or checkpoint.config.moe.expert_width % GROUP:
            raise ValueError(
                f"pack_experts=True, but the experts are {width} x {checkpoint.config.moe.expert_width}; MXFP4 needs multiples of {GROUP}."
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
    for stored, spec in specs.items():
        form = source.forms.get(stored) if source is not None else None
        if source is None or form is None or rule.with_shape(form.shape) is None:
            continue
        follows = form.dtype == source.dtype and spec.dtype != source.dtype  # was in the matrices' dtype: stays with them
        specs[stored] = TensorSpec(form.shape, code if follows else form.dtype)
    return specs


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


def _write(folder: pathlib.Path, plan: _Plan, names: Iterator[str]) -> None:
    """Write every file; `names` advances with the tensors, so that the other processes' part is known if one fails."""

    def tensor(name: str) -> np.ndarray:
        next(names)
        return plan.tensor(name)

    for file, specs in plan.files.items():
        write_shard(folder / file, specs, tensor, plan.metadata)
    if not plan.single:
        weight_map = {name: file for file, specs in plan.files.items() for name in specs}
        total = sum(spec.nbytes for specs in plan.files.values() for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_bytes(folder / INDEX, json.dumps(index, indent=2).encode())
    for name, content in plan.checkpoint.files.items():
        write_bytes(folder / name, content)
    write_bytes(folder / "config.json", json.dumps(plan.config, indent=2, ensure_ascii=False).encode())
