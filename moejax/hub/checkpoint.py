"""A published checkpoint in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..config import ModelConfig
from .published_config import PublishedConfig
from .shards import TensorSpec


@dataclasses.dataclass(frozen=True)
class Source:
    """How the files that a checkpoint came from are written, so that saving writes them the same way."""

    config: PublishedConfig
    packed: bool
    """Routed experts are MXFP4 in the files."""
    dtype: str
    """Dtype code of the matrices."""
    spelling: dict[str, str]
    """{name of our table: name in the files} where they differ."""
    forms: dict[str, TensorSpec]
    """{name in the files: shape and dtype} where they differ from our table's."""
    weight_map: dict[str, str]
    """{name in the files: file}."""
    metadata: dict[str, str]
    """Of the files' headers."""


@dataclasses.dataclass
class Checkpoint:
    """What `load` gives and `save` takes.

    `HybridLM(config).apply({"params": params, "router_state": router_state}, tokens)` runs it. A checkpoint of your own
    training is `Checkpoint(config, params, router_state)`.
    """

    config: ModelConfig
    params: Any
    """Tree of arrays, as `HybridLM(config).init` gives it."""
    router_state: Any
    """Selection biases, float32."""
    extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """{name in the files: array}: tensors of parts that are not built (vision, projector, MTP layers) and those that no
    computation reads (depth attention before layer 0), verbatim. `save` writes them back; they win over `params`."""
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """Small files beside the weights (tokenizer, chat template, generation settings), verbatim."""
    skipped: tuple[str, ...] = ()
    """With strict=False: every tensor that was not taken as it is and what was done instead, a line each."""
    source: Source | None = None
    """Spelling, dtypes and file of each stored tensor; None for a checkpoint that was not loaded."""
