"""What is in a published checkpoint: layers, kinds, parameters, dtypes, bytes. Reads headers and config.json, no weights.

    python -m experiments.inspect_checkpoint FOLDER
    python -m experiments.inspect_checkpoint FOLDER --verify            # names, shapes, dtypes; exit status 1 if they differ
    python -m experiments.inspect_checkpoint FOLDER --verify --preset kimi_k3
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import sys
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from moejax.config import ModelConfig
from moejax.hub.names import CODE_SUFFIX, SCALE_SUFFIX
from moejax.hub.published_config import read_config
from moejax.hub.shards import ShardReader, TensorSpec
from moejax.hub.verify import Verification, verify

LAYER = re.compile(r"(?:.*\.)?model\.layers\.(\d+)\.")
MOST = 40
MIXERS = {"K": "KDA", "M": "MLA"}


@dataclasses.dataclass
class Part:
    """Tensors counted together: a layer, or what stands outside the layers."""

    tensors: int = 0
    parameters: int = 0
    """Values: a packed byte holds two, scales are none."""
    nbytes: int = 0
    dtypes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Bytes by dtype."""

    def add(self, name: str, spec: TensorSpec) -> None:
        packed = name.endswith((CODE_SUFFIX, SCALE_SUFFIX))
        self.tensors += 1
        self.parameters += 0 if name.endswith(SCALE_SUFFIX) else 2 * spec.size if name.endswith(CODE_SUFFIX) else spec.size
        self.nbytes += spec.nbytes
        self.dtypes["MXFP4" if packed else spec.dtype] += spec.nbytes

    def merge(self, other: Part) -> None:
        self.tensors += other.tensors
        self.parameters += other.parameters
        self.nbytes += other.nbytes
        self.dtypes += other.dtypes


def parts(specs: dict[str, TensorSpec]) -> tuple[dict[int, Part], dict[str, Part]]:
    """-> ({layer: its tensors}, {name of a part outside the layers: its tensors})."""
    layers: dict[int, Part] = collections.defaultdict(Part)
    rest: dict[str, Part] = collections.defaultdict(Part)
    for name, spec in specs.items():
        layer = LAYER.match(name)
        outside = name.removeprefix("language_model.").removeprefix("model.").split(".")[0]
        (layers[int(layer.group(1))] if layer else rest[outside]).add(name, spec)
    return dict(sorted(layers.items())), dict(rest)


def kind(config: ModelConfig, layer: int) -> str:
    if layer >= config.layers:
        return "beyond the trunk (MTP): kept, not run"
    feed_forward = "dense" if layer < config.dense_layers else f"{config.moe.experts} experts, {config.moe.experts_per_token} a token"
    return f"{MIXERS[config.mixers[layer]]}, {feed_forward}"


def table(folder: pathlib.Path, config: ModelConfig, specs: dict[str, TensorSpec], files: int) -> Table:
    layers, rest = parts(specs)
    result = Table(title=f"{folder.name}: {config.layers} layers, hidden {config.hidden}, {len(specs):,} tensors in {files} files")
    for column in ("part", "kind"):
        result.add_column(column)
    for column in ("tensors", "parameters", "bytes"):
        result.add_column(column, justify="right")
    result.add_column("dtypes (share of bytes)")
    total = Part()

    def row(name: str, what: str, part: Part) -> None:
        share = ", ".join(f"{dtype} {size / part.nbytes:.1%}" for dtype, size in part.dtypes.most_common())
        result.add_row(name, what, f"{part.tensors:,}", f"{part.parameters:,}", decimal(part.nbytes), share)

    for layer, part in layers.items():
        row(f"layer {layer}", kind(config, layer), part)
        total.merge(part)
    result.add_section()
    for name, part in rest.items():
        row(name, "kept, not run" if name in ("vision_tower", "mm_projector") else "", part)
        total.merge(part)
    result.add_section()
    row("all", "", total)
    return result


def show_verification(console: Console, result: Verification, most: int) -> None:
    against = f"preset {result.preset}" if result.preset else "its own config.json (no preset has these sizes)"
    if not result.problems:
        console.print(f"verified against {against}: every name, shape and dtype is as expected.")
        return
    console.print(f"{len(result.problems)} differences from {against}:", style="bold")
    for line in result.problems[:most]:
        console.print(f"  {line}", markup=False)
    if len(result.problems) > most:
        console.print(f"  and {len(result.problems) - most} more (--most N shows more)")


def main(
    path: Annotated[pathlib.Path, tyro.conf.Positional],
    verify_names: Annotated[bool, tyro.conf.arg(name="verify"), tyro.conf.FlagCreatePairsOff] = False,
    preset: Literal["tiny", "small", "kimi_linear_48b", "kimi_k3"] | None = None,
    most: int = MOST,
) -> int:
    """Show what a published checkpoint holds, without reading its weights.

    Args:
        path: Folder with config.json and safetensors files.
        verify_names: Also compare every name, shape and dtype with the preset.
        preset: The preset to compare with; None: the one that config.json describes.
        most: Differences to show.
    """
    if not verify_names and (preset is not None or most != MOST):
        print("error: --preset and --most say how to --verify; give --verify, too.", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    try:
        published = read_config(path)
        with ShardReader(path) as reader:
            result = verify(reader, published, preset)
            console.print(table(path.absolute(), result.config, reader.specs, len(set(reader.weight_map.values()))))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not verify_names:
        return 0
    show_verification(console, result, most)
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
