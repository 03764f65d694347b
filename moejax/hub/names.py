"""Where each parameter is in the published files: one table of rules, read by loading, saving and the inventory.

A rule says how a stored matrix [out,in] becomes a parameter: `split` factors the stored axes, `axes` orders the factors,
`window` takes a part of one factor. Names and shapes: the index of moonshotai/Kimi-K3 and Kimi-Linear-48B-A3B.

Shapes: D model width, H heads, K and V channels of a KDA head (V of an MLA head too), N and R key channels from the
latent and of the shared key, C and Q latents, E experts, L and F expert input and hidden width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..config import MXFP4_GROUP as GROUP
from ..config import ModelConfig
from ..modules.plan import layer_locations, layer_specs
from .shards import TensorSpec

PAD_HEADS = 128  # K3 stores A_log padded with zeros to a multiple of this
CODE_SUFFIX, SCALE_SUFFIX = ".weight_packed", ".weight_scale"


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one stored tensor becomes (one slice of) one parameter."""

    name: str
    """Of the stored tensor, after the prefix of the layer; `{expert}` stands for the expert's number."""
    split: tuple[tuple[int, ...], ...]
    """Factors of each stored axis; () for an axis of length 1."""
    axes: tuple[int, ...]
    """The parameter's axes, as positions among the factors."""
    window: tuple[int, int, int] | None = None
    """(factor, start, stop) that the parameter takes; other parameters take the rest."""
    kind: str = "model"
    """Stored dtype: "model" (the configuration's), "wide" (float32; Kimi-Linear: or the model's), "bias" (float32 everywhere),
    "bytes", or "packed" (MXFP4: two tensors, codes and scales)."""
    alias: str | None = None
    """Another name that published files use."""
    padded: bool = False
    """A vector of heads: stored plain, or padded with zeros beyond `window`."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(group) for group in self.split)

    @property
    def factors(self) -> tuple[int, ...]:
        return tuple(size for group in self.split for size in group)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter, without stacked axes."""
        sizes = list(self.factors)
        if self.window is not None:
            factor, start, stop = self.window
            sizes[factor] = stop - start
        return tuple(sizes[axis] for axis in self.axes)

    def stored(self, name: str, model_dtype: str) -> dict[str, TensorSpec]:
        """{name: spec} of what the file holds under `name`: two tensors for a packed matrix, else one."""
        shape = self.stored_shape
        if self.kind == "packed":
            codes, scales = (*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // GROUP)
            return {name + CODE_SUFFIX: TensorSpec(codes, "U8"), name + SCALE_SUFFIX: TensorSpec(scales, "U8")}
        dtype = {"model": model_dtype, "bytes": "U8"}.get(self.kind, "F32")
        return {name: TensorSpec(shape, dtype)}

    def with_shape(self, shape: tuple[int, ...]) -> Rule | None:
        """The rule for a file that stores this tensor in `shape`, or None if it cannot be read so."""
        if shape == self.stored_shape:
            return self
        if not self.padded or self.window is None or math.prod(shape) not in (self.window[2], _padded(self.window[2])):
            return None
        if len(shape) != 1 and math.prod(shape) != max(shape):
            return None
        return dataclasses.replace(self, split=tuple((size,) if size == max(shape) else () for size in shape))


class Slot(NamedTuple):
    """One slice of a parameter and the tensor it comes from."""

    name: str
    """Full name in the file; without suffix for a packed matrix."""
    rule: Rule
    alias: str | None


@dataclasses.dataclass
class Parameter:
    """One leaf of the parameter tree and its slices."""

    collection: str
    """"params" or "router_state"."""
    path: tuple[str, ...]
    rule: Rule
    """Of every slice: its shape and kind."""
    stack: tuple[int, ...]
    """Lengths of the stacked leading axes."""
    slots: dict[tuple[int, ...], Slot | None]
    """By index over the stacked axes; None: no tensor of the files fills this slice."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack + self.rule.shape

    @property
    def label(self) -> str:
        return "/".join((self.collection, *self.path))


@dataclasses.dataclass(frozen=True)
class Layout:
    """What differs between published families of files."""

    outer: bool
    """Names begin with "language_model.", the configuration has a text_config (K3); else a bare text model."""
    packed: bool
    """Routed experts are MXFP4 in the files."""

    @property
    def prefix(self) -> str:
        return "language_model." if self.outer else ""


def _padded(heads: int) -> int:
    return -(-heads // PAD_HEADS) * PAD_HEADS


def _linear(name: str, out: tuple[int, ...] | int, width: tuple[int, ...] | int, **changes: Any) -> Rule:
    """A matrix stored [out,in] that the parameter keeps as [in..., out...]."""
    out, width = (out,) if isinstance(out, int) else out, (width,) if isinstance(width, int) else width
    axes = (*range(len(out), len(out) + len(width)), *range(len(out)))
    return Rule(f"{name}.weight", (out, width), axes, **changes)


def _vector(name: str, *sizes: int, **changes: Any) -> Rule:
    return Rule(name, (sizes,), tuple(range(len(sizes))), **changes)


def _a_log(heads: int, layout: Layout) -> Rule:
    stored = ((_padded(heads),),) if layout.outer else ((), (), (heads,), ())
    return Rule("self_attn.A_log", stored, (0,), (0, 0, heads), kind="wide", padded=True)


def kda_rules(config: ModelConfig, layout: Layout) -> dict[str, Rule]:
    c, d = config.kda, config.hidden
    queries, values, decay = (c.heads, c.key_dim), (c.num_value_heads, c.value_dim), (c.num_value_heads, c.key_dim)

    def conv(name: str, heads: tuple[int, int]) -> Rule:
        return Rule(f"self_attn.{name}_conv1d.weight", ((math.prod(heads),), (), (c.conv_width,)), (1, 0), kind="wide")

    rules = {
        "q_proj": _linear("self_attn.q_proj", queries, d),
        "k_proj": _linear("self_attn.k_proj", queries, d),
        "v_proj": _linear("self_attn.v_proj", values, d),
        "q_conv": conv("q", queries),
        "k_conv": conv("k", queries),
        "v_conv": conv("v", values),
        "decay_down": _linear("self_attn.f_a_proj", c.decay_rank, d),
        "decay_up": _linear("self_attn.f_b_proj", decay, c.decay_rank),
        "A_log": _a_log(c.num_value_heads, layout),
        "dt_bias": _vector("self_attn.dt_bias", *decay, kind="wide"),
        "beta_proj": _linear("self_attn.b_proj", c.num_value_heads, d),
        "out_norm": _vector("self_attn.o_norm.weight", c.value_dim, kind="wide"),
        "out_proj": _linear("self_attn.o_proj", d, values),
    }
    if c.output_gate_rank is None:
        return rules | {"out_gate": _linear("self_attn.g_proj", values, d)}
    rank = c.output_gate_rank
    return rules | {
        "out_gate_down": _linear("self_attn.g_a_proj", rank, d),
        "out_gate_up": _linear("self_attn.g_b_proj", values, rank),
    }


def mla_rules(config: ModelConfig) -> dict[str, Rule]:
    c, d = config.mla, config.hidden
    queries, both = (c.heads, c.nope_dim + c.rope_dim), c.nope_dim + c.value_dim
    rules = {
        "kv_down": _linear("self_attn.kv_a_proj_with_mqa", c.kv_latent + c.rope_dim, d),
        "kv_norm": _vector("self_attn.kv_a_layernorm.weight", c.kv_latent),
        "k_up": _linear("self_attn.kv_b_proj", (c.heads, both), c.kv_latent, window=(1, 0, c.nope_dim)),
        "v_up": _linear("self_attn.kv_b_proj", (c.heads, both), c.kv_latent, window=(1, c.nope_dim, both)),
        "out": _linear("self_attn.o_proj", d, (c.heads, c.value_dim)),
    }
    if c.gate:
        rules["gate"] = _linear("self_attn.g_proj", (c.heads, c.value_dim), d)
    if c.q_latent is None:
        return rules | {"q_up": _linear("self_attn.q_proj", queries, d)}
    return rules | {
        "q_down": _linear("self_attn.q_a_proj", c.q_latent, d),
        "q_norm": _vector("self_attn.q_a_layernorm.weight", c.q_latent),
        "q_up": _linear("self_attn.q_b_proj", queries, c.q_latent),
    }


def dense_rules(config: ModelConfig) -> dict[str, Rule]:
    """Published files say mlp; transformers 5.24 writes the dense layer as block_sparse_moe, too."""
    d, width = config.hidden, config.dense_width
    sizes = {"gate_proj": (width, d), "up_proj": (width, d), "down_proj": (d, width)}
    return {name: _linear(f"mlp.{name}", *size, alias=f"block_sparse_moe.{name}.weight") for name, size in sizes.items()}


def moe_rules(config: ModelConfig) -> dict[str, Rule]:
    """All of a MoE layer but its routed experts."""
    c, d = config.moe, config.hidden
    rules = {"router": _linear("block_sparse_moe.gate", c.experts, d)}
    if c.latent is not None:
        rules["latent_down"] = _linear("block_sparse_moe.routed_expert_down_proj", c.latent, d)
        rules["latent_up"] = _linear("block_sparse_moe.routed_expert_up_proj", d, c.latent)
        if c.latent_norm:
            rules["latent_norm"] = _vector("block_sparse_moe.routed_expert_norm.weight", c.latent)
    if c.shared_width:
        rules["shared_gate"] = _linear("block_sparse_moe.shared_experts.gate_proj", c.shared_width, d)
        rules["shared_up"] = _linear("block_sparse_moe.shared_experts.up_proj", c.shared_width, d)
        rules["shared_down"] = _linear("block_sparse_moe.shared_experts.down_proj", d, c.shared_width)
    return rules


def expert_rules(config: ModelConfig, layout: Layout) -> dict[str, Rule]:
    """The three matrices of a routed expert: w1 gate, w3 up, w2 down."""
    c = config.moe
    width = c.latent or config.hidden
    sizes = {"gate": ("w1", c.expert_width, width), "up": ("w3", c.expert_width, width), "down": ("w2", width, c.expert_width)}
    rules = {}
    for part, (name, out, into) in sizes.items():
        name = f"block_sparse_moe.experts.{{expert}}.{name}"
        if c.expert_weights == "mxfp4":  # codes and scales are parameters, kept as they are stored
            rules[f"expert_{part}_codes"] = Rule(name + CODE_SUFFIX, ((out,), (into // 2,)), (0, 1), kind="bytes")
            rules[f"expert_{part}_scales"] = Rule(name + SCALE_SUFFIX, ((out,), (into // GROUP,)), (0, 1), kind="bytes")
        elif layout.packed:
            rules[f"expert_{part}"] = Rule(name, ((out,), (into,)), (1, 0), kind="packed")
        else:
            rules[f"expert_{part}"] = _linear(name, out, into)
    return rules


def residual_rules(config: ModelConfig) -> dict[tuple[str, str], Rule]:
    d = (config.hidden,)
    return {
        (ours, part): Rule(f"{theirs}_{kind}.weight", ((), d) if part == "query" else (d,), (0,))
        for ours, theirs in (("mixer_residual", "self_attention_res"), ("ffn_residual", "mlp_res"))
        for part, kind in (("norm_weight", "norm"), ("query", "proj"))
    }


def layer_rules(config: ModelConfig, layout: Layout, layer: int) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...], Rule]]:
    """(collection, path inside the layer, index of the expert or (), rule) of every tensor of one layer."""
    spec = layer_specs(config)[layer]
    d = config.hidden
    yield "params", ("sub", "mixer_norm", "weight"), (), _vector("input_layernorm.weight", d)
    yield "params", ("sub", "ffn_norm", "weight"), (), _vector("post_attention_layernorm.weight", d)
    if config.residual == "block":
        for path, rule in residual_rules(config).items():
            yield "params", path, (), rule
    for leaf, rule in (kda_rules(config, layout) if spec.mixer == "K" else mla_rules(config)).items():
        yield "params", ("sub", "mixer", leaf), (), rule
    for leaf, rule in (dense_rules(config) if spec.dense else moe_rules(config)).items():
        yield "params", ("sub", "ffn", leaf), (), rule
    if not spec.dense:
        bias = _vector("block_sparse_moe.gate.e_score_correction_bias", config.moe.experts, kind="bias")
        yield "router_state", ("sub", "ffn", "bias"), (), bias
        for leaf, rule in expert_rules(config, layout).items():
            for expert in range(config.moe.experts):
                yield "params", ("sub", "ffn", leaf), (expert,), rule


def global_rules(config: ModelConfig) -> dict[tuple[str, ...], Rule]:
    d, vocabulary = config.hidden, config.vocab_size
    rules = {
        ("embedding",): Rule("model.embed_tokens.weight", ((vocabulary,), (d,)), (0, 1)),
        ("head",): _linear("lm_head", vocabulary, d),
        ("final_norm", "weight"): _vector("model.norm.weight", d),
    }
    if config.residual == "block":
        rules["output_residual", "norm_weight"] = _vector("model.output_attn_res_norm.weight", d)
        rules["output_residual", "query"] = Rule("model.output_attn_res_proj.weight", ((), (d,)), (0,))
    return rules


def parameter_table(config: ModelConfig, layout: Layout) -> list[Parameter]:
    """Every leaf of the model's `params` and `router_state`, with the stored tensor of each of its slices."""
    table: dict[tuple[str, tuple[str, ...]], Parameter] = {}

    def add(collection: str, path: tuple[str, ...], index: tuple[int, ...], name: str, rule: Rule, alias: str | None) -> None:
        parameter = table.setdefault((collection, path), Parameter(collection, path, rule, (), {}))
        parameter.slots[index] = Slot(name, rule, alias)

    for path, rule in global_rules(config).items():
        add("params", path, (), layout.prefix + rule.name, rule, None)
    for layer, location in enumerate(layer_locations(config)):
        prefix = f"{layout.prefix}model.layers.{layer}."
        for collection, path, expert, rule in layer_rules(config, layout, layer):
            alias = None if rule.alias is None else prefix + rule.alias
            name = prefix + (rule.name.format(expert=expert[0]) if expert else rule.name)
            add(collection, ("stack", *location.path, *path), (*location.index, *expert), name, rule, alias)
    for parameter in table.values():
        parameter.stack = tuple(1 + last for last in map(max, zip(*parameter.slots, strict=True)))
    return list(table.values())


def unused_names(config: ModelConfig, layout: Layout) -> set[str]:
    """Stored tensors that no computation reads: depth attention before layer 0 has one source only."""
    if config.residual != "block":
        return set()
    prefix = f"{layout.prefix}model.layers.0."
    return {prefix + rule.name for (query, _), rule in residual_rules(config).items() if query == "mixer_residual"}
