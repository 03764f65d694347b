"""Which tensors a checkpoint must hold, and the comparison with what its files do hold (headers only)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ..config import ModelConfig
from .names import CODE_SUFFIX, GROUP, Layout, Parameter, Rule, Slot, parameter_table, unused_names
from .shards import TensorSpec

NOT_BUILT = ("vision_tower.", "mm_projector.")
"""Beginnings of the names of parts that this version does not run."""
PUBLISHED_VISION: dict[str, Any] = {
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_hidden_layers": 27,
    "qkv_hidden_size": 1536,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "text_hidden_size": 7168,
}
"""Sizes of moonshotai/Kimi-K3's vision tower (its config.json)."""


def inventory(
    config: ModelConfig,
    *,
    outer: bool | None = None,
    packed: bool | None = None,
    dtype: str = "BF16",
    vision: dict[str, Any] | None = None,
) -> dict[str, TensorSpec]:
    """{name: shape and dtype} of every tensor that the published files of `config` hold, from shapes alone.

    outer: K3's names ("language_model." in front); None: for a bounded decay gate. packed: routed experts as MXFP4; None: like outer.
    dtype: code of the matrices. vision: a vision_config (for K3 `PUBLISHED_VISION`), to count its tensors in.
    """
    outer = config.kda.lower_bound is not None if outer is None else outer
    layout = Layout(outer, outer if packed is None else packed)
    sizes = (config.moe.latent or config.hidden, config.moe.expert_width)
    if layout.packed and any(size % GROUP for size in sizes):
        raise ValueError(f"packed experts need sizes that are multiples of {GROUP}; these are {sizes[0]} x {sizes[1]}. Use packed=False.")
    specs: dict[str, TensorSpec] = {}
    for parameter in parameter_table(config, layout):
        for slot in parameter.slots.values():
            if slot is not None:
                specs |= slot.rule.stored(slot.name, dtype)
    return specs | (vision_inventory(vision, dtype) if vision is not None else {})


def vision_inventory(vision: dict[str, Any], dtype: str = "BF16") -> dict[str, TensorSpec]:
    """The tensors of the vision tower and its projector (names and shapes: index of moonshotai/Kimi-K3)."""
    width, mlp, joint = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["qkv_hidden_size"]
    patch, text = vision["patch_size"], vision["text_hidden_size"]
    merged = width * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj": (width, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb": (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width),
        "vision_tower.encoder.final_layernorm": (width,),
        "mm_projector.proj.0": (merged, merged),
        "mm_projector.proj.2": (text, merged),
        "mm_projector.post_norm": (text,),
    }
    for block in range(vision["vt_num_hidden_layers"]):
        prefix = f"vision_tower.encoder.blocks.{block}."
        shapes |= {prefix + "norm0": (width,), prefix + "norm1": (width,)}
        shapes |= {prefix + "wqkv": (3 * joint, width), prefix + "wo": (width, joint)}
        shapes |= {prefix + "mlp.fc0": (mlp, width), prefix + "mlp.fc1": (width, mlp)}
    return {f"{name}.weight": TensorSpec(shape, dtype) for name, shape in shapes.items()}


FLOATING = {"BF16", "F16", "F32", "F64"}


@dataclasses.dataclass
class Match:
    """The parameter table fitted to what the files hold."""

    table: list[Parameter]
    """Slots carry the rule and the name that read the files; None where the files cannot fill one."""
    extra: list[str]
    """Stored tensors to keep verbatim."""
    spelling: dict[str, str]
    forms: dict[str, TensorSpec]
    differences: dict[str, str]
    """{stored tensor: what is wrong with it}."""

    @property
    def problems(self) -> list[str]:
        """One line for each tensor that is missing, not expected, of another shape or dtype."""
        return [f"{name}: {text}" for name, text in self.differences.items()]


def experts_packed(specs: dict[str, TensorSpec]) -> bool:
    """Whether routed experts are MXFP4: the stored names decide, not the patterns of quantization_config (K3: they leave
    out the latent projections, which are not packed)."""
    return any(name.endswith(CODE_SUFFIX) and ".experts." in name for name in specs)


def match(config: ModelConfig, layout: Layout, specs: dict[str, TensorSpec], dtype: str, mtp_layers: int = 0) -> Match:
    """Fit the table of `config` to the stored `specs`; every disagreement becomes one of `differences`.

    dtype: code of the matrices. mtp_layers: layers behind the trunk (num_nextn_predict_layers), kept as extra.
    """
    result = Match(parameter_table(config, layout), [], {}, {}, {})
    used: set[str] = set()
    for parameter in result.table:
        for index, slot in parameter.slots.items():
            assert slot is not None  # a table from parameter_table is full
            parameter.slots[index] = _fit(slot, specs, layout, dtype, result, used)
    _join_codes_and_scales(result.table)
    for name in sorted(specs.keys() - (used - unused_names(config, layout))):
        result.extra.append(name)
        if name not in used and not _not_built(name, config, layout, mtp_layers):
            result.differences[name] = f"{specs[name]} in the files, not expected"
    return result


def _fit(slot: Slot, specs: dict[str, TensorSpec], layout: Layout, dtype: str, result: Match, used: set[str]) -> Slot | None:
    name = slot.name
    if name not in specs and slot.alias in specs:
        name = slot.alias
        result.spelling[slot.name] = name
    rule, readable = slot.rule, True
    for stored, wanted in slot.rule.stored(name, dtype).items():
        found = specs.get(stored)
        if found is None:
            result.differences[stored] = f"missing, expected {wanted}"
            readable = False
            continue
        used.add(stored)
        fitted = _with_shape(rule, found, wanted)
        allowed = _dtypes(rule, wanted.dtype, dtype, layout)
        if fitted is None or found.dtype not in allowed:
            expected = " or ".join(str(TensorSpec(wanted.shape, code)) for code in allowed)
            result.differences[stored] = f"{found} in the files, expected {expected}"
        if fitted is None or (found.dtype not in allowed and not {found.dtype, wanted.dtype} <= FLOATING):
            readable = False
        else:
            rule = fitted
            if found != wanted and found.dtype in allowed:  # what had to be converted is written as our table says
                result.forms[stored] = found
    return Slot(name, rule, slot.alias) if readable else None


def _with_shape(rule: Rule, found: TensorSpec, wanted: TensorSpec) -> Rule | None:
    if rule.kind == "packed":
        return rule if found.shape == wanted.shape else None
    return rule.with_shape(found.shape)


def _join_codes_and_scales(table: list[Parameter]) -> None:
    """Of a matrix that is kept packed, codes and scales are both read or neither."""
    by_path = {(parameter.collection, parameter.path): parameter for parameter in table}
    for (collection, path), codes in by_path.items():
        if path[-1].endswith("_codes"):
            scales = by_path[collection, (*path[:-1], path[-1].removesuffix("_codes") + "_scales")]
            for index in codes.slots:
                if codes.slots[index] is None or scales.slots[index] is None:
                    codes.slots[index] = scales.slots[index] = None


def _dtypes(rule: Rule, wanted: str, model: str, layout: Layout) -> tuple[str, ...]:
    """Dtypes that a stored tensor may have. Kimi-Linear-48B keeps convolutions in bfloat16, K3 in float32."""
    return (wanted, model) if rule.kind == "wide" and not layout.outer and model != wanted else (wanted,)


def _not_built(name: str, config: ModelConfig, layout: Layout, mtp_layers: int) -> bool:
    if name.startswith(NOT_BUILT):
        return True
    layer = re.match(re.escape(f"{layout.prefix}model.layers.") + r"(\d+)\.", name)
    return layer is not None and config.layers <= int(layer.group(1)) < config.layers + mtp_layers
