"""Every parameter of a model by shape, from the configuration alone: nothing is allocated. Reads only the configuration.

Shapes: D model width, H heads, G value heads, K and V channels of a key and a value head, E experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from .config import MXFP4_GROUP, ModelConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float64": 8, "uint8": 1, "int32": 4}
PARTS: tuple[str, ...] = ("embedding", "head", "kda", "mla", "dense", "experts", "moe", "norms")
"""What parameters are counted by: "moe" is routers, latent projections and shared experts."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of one layer, or of none. `name` is its key in the tree and in the axis table."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    layers: int = 1
    """Layers that have one."""

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Of one layer's, all shards together."""
        return math.prod(self.shape) * self.itemsize


def parameters(config: ModelConfig) -> list[Parameter]:
    """All of `HybridLM(config)`'s, by the names that they have in its tree."""
    return [parameter for parameter in _parameters(config) if parameter.layers]


def _parameters(config: ModelConfig) -> Iterator[Parameter]:
    D, dtype = config.hidden, config.param_dtype
    kda, mla = config.mixers.count("K"), config.mixers.count("M")
    yield Parameter("embedding", "embedding", (config.vocab_size, D), dtype)
    yield Parameter("head", "head", (D, config.vocab_size), dtype)
    for name, shape in _mla(config):
        yield Parameter("mla", name, shape, dtype, mla)
    for name, shape in _kda(config):
        yield Parameter("kda", name, shape, "float32" if name in KDA_FLOAT32 else dtype, kda)
    for name, shape in _feed_forward("", config.dense_width, D):
        yield Parameter("dense", f"{name}_proj", shape, dtype, config.dense_layers)
    for name, shape, kind in _experts(config):
        yield Parameter("experts", name, shape, kind, config.moe_layers)
    for name, shape in _moe_rest(config):
        yield Parameter("moe", name, shape, dtype, config.moe_layers)
    yield Parameter("norms", "weight", (D,), dtype, 2 * config.layers + 1)
    if config.residual != "plain":
        for name in ("norm_weight", "query"):
            yield Parameter("norms", name, (D,), dtype, 2 * config.layers + 1)


KDA_FLOAT32 = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "out_norm")
"""Always float32, whatever param_dtype says."""


def _kda(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    c, D = config.kda, config.hidden
    H, G, K, V = c.heads, c.num_value_heads, c.key_dim, c.value_dim
    for name, heads, channels in (("q", H, K), ("k", H, K), ("v", G, V)):
        yield f"{name}_proj", (D, heads, channels)
        yield f"{name}_conv", (c.conv_width, heads * channels)
    yield "decay_down", (D, c.decay_rank)
    yield "decay_up", (c.decay_rank, G, K)
    yield "A_log", (G,)
    yield "dt_bias", (G, K)
    yield "beta_proj", (D, G)
    if c.output_gate_rank is None:
        yield "out_gate", (D, G, V)
    else:
        yield "out_gate_down", (D, c.output_gate_rank)
        yield "out_gate_up", (c.output_gate_rank, G, V)
    yield "out_norm", (V,)
    yield "out_proj", (G, V, D)


def _mla(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    c, D = config.mla, config.hidden
    if c.q_latent is not None:
        yield "q_down", (D, c.q_latent)
        yield "q_norm", (c.q_latent,)
    yield "q_up", (c.q_latent or D, c.heads, c.nope_dim + c.rope_dim)
    yield "kv_down", (D, c.kv_latent + c.rope_dim)
    yield "kv_norm", (c.kv_latent,)
    yield "k_up", (c.kv_latent, c.heads, c.nope_dim)
    yield "v_up", (c.kv_latent, c.heads, c.value_dim)
    if c.gate:
        yield "gate", (D, c.heads, c.value_dim)
    yield "out", (c.heads, c.value_dim, D)


def _feed_forward(prefix: str, width: int, D: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate", (D, width)
    yield f"{prefix}up", (D, width)
    yield f"{prefix}down", (width, D)


def _experts(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
    c = config.moe
    for name, (inputs, outputs) in {
        "expert_gate": (c.latent or config.hidden, c.expert_width),
        "expert_up": (c.latent or config.hidden, c.expert_width),
        "expert_down": (c.expert_width, c.latent or config.hidden),
    }.items():
        if c.expert_weights == "mxfp4":
            yield f"{name}_codes", (c.experts, outputs, inputs // 2), "uint8"
            yield f"{name}_scales", (c.experts, outputs, inputs // MXFP4_GROUP), "uint8"
        else:
            yield name, (c.experts, inputs, outputs), config.param_dtype


def _moe_rest(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    c, D = config.moe, config.hidden
    yield "router", (D, c.experts)
    if c.latent is not None:
        yield "latent_down", (D, c.latent)
        yield "latent_up", (c.latent, D)
        if c.latent_norm:
            yield "latent_norm", (c.latent,)
    if c.shared_width:
        yield from _feed_forward("shared_", c.shared_width, D)
