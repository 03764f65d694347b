"""Reading a published checkpoint into parameters, streamed, straight into their shards."""

from __future__ import annotations

import os
import pathlib
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from ..config import DTYPES as PARAM_DTYPES
from ..config import ModelConfig
from ..modules.model import HybridLM
from ..parallel.axes import parameter_shardings
from .checkpoint import Checkpoint, Source
from .expected import Match, experts_packed, match
from .fill import Filler, bytes_to_fill
from .names import GROUP, Layout, Parameter
from .progress import Progress
from .published_config import DTYPE_NAMES, PublishedConfig, model_config, read_config, stored_dtype
from .shards import INDEX, ShardReader

THREADS = 4
LARGEST_FILE = 128 << 20  # bytes; a tokenizer.json of 160,000 tokens has some 20 MB


def load(
    path: str | os.PathLike,
    *,
    param_dtype: str | None = None,
    keep_packed: bool = False,
    shardings: Mesh | dict[str, Any] | None = None,
    strict: bool = True,
    progress: bool | None = None,
) -> Checkpoint:
    """Load a folder of published weights: Kimi K3 (kimi_k3 around kimi_linear) or Kimi-Linear-48B (kimi_linear).

    Memory on the host: what is kept, plus at most one parameter's part of this process (packed, if it is decoded) while it is
    filled. With `shardings` a process reads the bytes of its own shards, each once; of rows of which its part is under 4 KiB,
    the whole rows. `extra` is read by every process.

    Args:
      path: folder with config.json and model.safetensors, or its index and shards.
      param_dtype: "float32", "bfloat16" or "float64" for the matrices and norms; None: as stored. Tensors that K3 keeps in
        float32 (convolutions, A_log, dt_bias, output norm of KDA) stay float32, with "float64" they become float64.
      keep_packed: keep routed experts as MXFP4 codes and scales (config.moe.expert_weights = "mxfp4", a quarter of the
        bytes of bfloat16); they are decoded where they are used. False decodes them here, exactly.
      shardings: a Mesh (every parameter goes where `moejax.parallel.parameter_shardings` says), or
        {"params": tree, "router_state": tree} of Shardings. None: the default device.
      strict: refuse files with tensors that are missing, not expected, or of another shape or dtype, all named in one
        error. False: warn, and list them in `Checkpoint.skipped`; another floating dtype is converted, parameters without a
        tensor that fits get initial values (key 0; the stacked parameter that they are part of is made whole for it, on the
        host), tensors that are not expected go to `Checkpoint.extra`.
      progress: show a progress bar on stderr; None: when stderr is a terminal.

    Returns:
      Checkpoint(config, params, router_state, extra, files, skipped, source).

    Raises:
      FileNotFoundError: no checkpoint there, or a file is missing.
      ValueError: a truncated or damaged file (named), a configuration that this model does not have, tensors that do
        not fit, A_log with non-zero padding, an MXFP4 scale that means NaN (byte 255, the tensor is named).
    """
    folder = pathlib.Path(path)
    published = read_config(folder)
    if param_dtype is not None and param_dtype not in PARAM_DTYPES:
        raise ValueError(f"param_dtype is {param_dtype!r}; it must be None or one of {', '.join(PARAM_DTYPES)}.")
    with ShardReader(folder) as reader:
        config, matched, source = _match(published, reader, param_dtype, keep_packed)
        skipped = _report(folder, matched, strict)
        targets = _targets(matched.table, config, shardings)
        initial = _initial_values(config, matched.table)
        trees: dict[str, Any] = {"params": {}, "router_state": {}}
        total = sum(bytes_to_fill(parameter, *target) for parameter, target in zip(matched.table, targets, strict=True))
        with Progress(total, progress) as advance, ThreadPoolExecutor(THREADS) as pool:
            filler = Filler(reader, initial, pool, advance)
            for parameter, (leaf_dtype, sharding) in zip(matched.table, targets, strict=True):
                _put(trees[parameter.collection], parameter.path, filler.place(parameter, leaf_dtype, sharding))
        extra = {name: reader.read(name) for name in matched.extra}
    files = _small_files(folder, set(source.weight_map.values()))
    return Checkpoint(config, trees["params"], trees["router_state"], extra, files, skipped, source)


def _match(
    published: PublishedConfig, reader: ShardReader, param_dtype: str | None, keep_packed: bool
) -> tuple[ModelConfig, Match, Source]:
    specs = reader.specs
    layout = Layout(published.outer, experts_packed(specs))
    code = stored_dtype(published, specs.get(f"{layout.prefix}model.embed_tokens.weight"))
    config = model_config(published, param_dtype=DTYPE_NAMES[code])
    if param_dtype is not None:
        config = config.replace(param_dtype=param_dtype)
    if layout.packed:
        _check_quantization(published)
    if keep_packed:
        if not layout.packed:
            raise ValueError(f"keep_packed=True, but the experts in {reader.folder} are not packed; load without it.")
        config = config.replace(moe={"expert_weights": "mxfp4"})
    matched = match(config, layout, specs, code, published.mtp_layers)
    source = Source(published, layout.packed, code, matched.spelling, matched.forms, reader.weight_map, reader.metadata)
    return config, matched, source


def _check_quantization(published: PublishedConfig) -> None:
    section = published.quantization
    if section is None:
        return  # the names alone say that they are packed
    weights = [group.get("weights", {}) for group in section.get("config_groups", {}).values()]
    sizes = {entry.get("group_size", GROUP) for entry in weights}
    if section.get("format", "mxfp4-pack-quantized") != "mxfp4-pack-quantized" or sizes - {GROUP}:
        raise ValueError(
            f"quantization_config has format {section.get('format')!r} and groups of {sorted(sizes)}; "
            f"only mxfp4-pack-quantized in groups of {GROUP} can be read."
        )


def _report(folder: pathlib.Path, matched: Match, strict: bool) -> tuple[str, ...]:
    if not matched.problems:
        return ()
    text = "\n".join(f"  {line}" for line in matched.problems)
    if strict:
        raise ValueError(
            f"{len(matched.problems)} tensors in {folder} do not fit its config.json (strict=False takes the others):\n{text}"
        )
    warnings.warn(
        f"{len(matched.problems)} tensors in {folder} do not fit. Another dtype was converted, what is missing or has another shape got "
        f"initial values, what is not expected went to extra:\n{text}",
        stacklevel=3,
    )
    return tuple(matched.problems)


def _leaf_dtype(parameter: Parameter, config: ModelConfig) -> np.dtype:
    kind = parameter.rule.kind
    if kind == "bytes":
        return np.dtype(np.uint8)
    if kind == "bias" or (kind == "wide" and config.param_dtype == "bfloat16"):
        return np.dtype(np.float32)
    return np.dtype(jnp.dtype(config.param_dtype))


def _targets(
    table: list[Parameter], config: ModelConfig, shardings: Mesh | dict[str, Any] | None
) -> list[tuple[np.dtype, Sharding | None]]:
    """Dtype and sharding of each parameter."""
    dtypes = [_leaf_dtype(parameter, config) for parameter in table]
    if any(dtype == np.float64 for dtype in dtypes) and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError('param_dtype="float64" needs JAX with 64-bit numbers: jax.config.update("jax_enable_x64", True).')
    if shardings is None:
        return [(dtype, None) for dtype in dtypes]
    if isinstance(shardings, Mesh):
        shapes: dict[str, Any] = {"params": {}, "router_state": {}}
        for parameter, dtype in zip(table, dtypes, strict=True):
            _put(shapes[parameter.collection], parameter.path, jax.ShapeDtypeStruct(parameter.shape, dtype))
        shardings = {name: parameter_shardings(tree, shardings) for name, tree in shapes.items()}
    targets: list[tuple[np.dtype, Sharding | None]] = []
    for parameter, dtype in zip(table, dtypes, strict=True):
        targets.append((dtype, _get(shardings, parameter)))
    if (count := len(jax.tree.leaves(shardings))) != len(targets):
        raise ValueError(f"shardings has {count} leaves, the model {len(targets)}; give a Mesh, or a tree like params and router_state.")
    return targets


def _get(shardings: dict[str, Any], parameter: Parameter) -> Sharding:
    node: Any = shardings
    for key in (parameter.collection, *parameter.path):
        if not isinstance(node, dict) or key not in node:
            raise ValueError(
                f"shardings has no entry for {parameter.label}; give a Mesh, or a tree like the model's params and router_state."
            )
        node = node[key]
    if not isinstance(node, Sharding):
        raise ValueError(f"shardings at {parameter.label} is {type(node).__name__}; it must be a jax Sharding.")
    try:
        node.shard_shape(parameter.shape)
    except ValueError as error:
        raise ValueError(f"shardings at {parameter.label} does not fit its shape {parameter.shape}: {error}") from None
    return node


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _initial_values(config: ModelConfig, table: list[Parameter]) -> dict[str, np.ndarray]:
    """Initial values of the parameters that some tensor is missing for, by label. The rest of `init` is compiled away."""
    wanted = [parameter for parameter in table if None in parameter.slots.values()]
    if not wanted:
        return {}

    def init(key: jax.Array) -> dict[str, jax.Array]:
        variables = HybridLM(config).init(key, jnp.zeros((1, 1), jnp.int32))
        out = {}
        for parameter in wanted:
            leaf: Any = variables[parameter.collection]
            for name in parameter.path:
                leaf = leaf[name]
            out[parameter.label] = leaf
        return out

    return {label: np.asarray(value) for label, value in jax.jit(init)(jax.random.key(0)).items()}


def _small_files(folder: pathlib.Path, weights: set[str]) -> dict[str, bytes]:
    """Files beside the weights: tokenizer, chat template, generation settings, code, licence. Warns of those too large."""
    found = [p for p in sorted(folder.iterdir()) if p.is_file() and p.name not in {*weights, INDEX, "config.json"}]
    found = [p for p in found if p.suffix != ".safetensors"]
    if large := [p.name for p in found if p.stat().st_size > LARGEST_FILE]:
        warnings.warn(f"{folder}: {', '.join(large)} of over {LARGEST_FILE >> 20} MiB stays behind: not in Checkpoint.files.", stacklevel=3)
    return {p.name: p.read_bytes() for p in found if p.name not in large}
