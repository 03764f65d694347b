"""Whether files hold a model, from their headers and config.json: no weights are read."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import presets
from ..config import ModelConfig
from .expected import NOT_BUILT, experts_packed, match, vision_inventory
from .names import Layout
from .published_config import PublishedConfig, comparable, model_config, stored_dtype
from .shards import ShardReader, TensorSpec


@dataclasses.dataclass(frozen=True)
class Verification:
    """Whether files hold a model, from their headers and config.json."""

    config: ModelConfig
    """What config.json describes."""
    preset: str | None
    """The preset that was compared with, or None: config.json alone."""
    problems: tuple[str, ...]
    """A line each; none: names, shapes and dtypes are as expected."""


def verify(reader: ShardReader, published: PublishedConfig, preset: str | None = None) -> Verification:
    """Compare the headers of `reader` with what `preset` must hold; None: the preset that config.json describes, if one does."""
    layout = Layout(published.outer, experts_packed(reader.specs))
    code = stored_dtype(published, reader.specs.get(f"{layout.prefix}model.embed_tokens.weight"))
    config = model_config(published, param_dtype="float32")
    if preset is None:
        preset = next((name for name in presets.NAMES if comparable(presets.get(name)) == comparable(config)), None)
    wanted = config if preset is None else presets.get(preset)
    problems = [] if preset is None else _different_settings(config, wanted, preset)
    problems += match(wanted, layout, reader.specs, code, published.mtp_layers).problems
    if published.vision is not None:
        problems += _vision_problems(published.vision, reader.specs, code)
    return Verification(config, preset, tuple(problems))


def _different_settings(config: ModelConfig, wanted: ModelConfig, preset: str) -> list[str]:
    found, expected = _flat(comparable(config)), _flat(comparable(wanted))
    different = [key for key in found if found[key] != expected[key]]
    return [f"{key} is {found[key]!r} in config.json, {expected[key]!r} in the preset {preset}" for key in different]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _vision_problems(vision: dict[str, Any], specs: dict[str, TensorSpec], code: str) -> list[str]:
    wanted = vision_inventory(vision, code)
    found = {name: spec for name, spec in specs.items() if name.startswith(NOT_BUILT)}
    return [
        f"{name}: {found.get(name, 'missing')}, expected {wanted.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
