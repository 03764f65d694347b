"""config.json for a ModelConfig: that of the files it came from with what differs, or a new one."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from ..config import ModelConfig
from .published_config import FIXED, OWN_KEY, TRAINING_FIELDS, TRAINING_MOE_FIELDS, PublishedConfig, comparable, model_config


def check_representable(config: ModelConfig) -> None:
    """Raise ValueError naming what published files have no place for."""
    kda, moe = config.kda, config.moe
    lines = []
    if config.residual == "full":
        lines.append("residual is 'full'; 'block' and 'plain' have names")
    if config.mla.positions != "none":
        lines.append(f"mla.positions is {config.mla.positions!r}; 'none' only")
    if kda.num_value_heads != kda.heads or kda.value_dim != kda.key_dim:
        value = f"{kda.num_value_heads} value heads of {kda.value_dim}"
        lines.append(f"kda has {value}; as many and as wide as its {kda.heads} key heads of {kda.key_dim}")
    if kda.decay_rank != kda.key_dim or kda.output_gate_rank not in (None, kda.key_dim):
        ranks = f"kda.gate_rank is {kda.gate_rank}, kda.output_gate_rank {kda.output_gate_rank}"
        lines.append(f"{ranks}; None or key_dim = {kda.key_dim}")
    if (moe.shared_width or 0) % moe.expert_width:
        lines.append(f"moe.shared_width is {moe.shared_width}; a multiple of expert_width = {moe.expert_width}")
    if lines:
        raise ValueError("published checkpoints cannot hold this configuration:\n" + "\n".join(f"  {line}" for line in lines))


def published_config(config: ModelConfig, source: PublishedConfig | None, *, outer: bool, packed: bool, dtype: str) -> PublishedConfig:
    """config.json for `config`: that of `source` with the settings that differ, or a new one.

    outer: wrap the settings as K3 does; packed: experts are MXFP4; dtype: of the matrices in the files.
    """
    check_representable(config)
    raw = copy.deepcopy(source.raw) if source is not None else _skeleton(outer)
    published = PublishedConfig(raw)
    text = published.text
    if source is None or not _says(published, config, packed, dtype):
        linear = {**text.get("linear_attn_config", {}), **_linear_settings(config)}
        text.update(_text_settings(config), linear_attn_config=linear)
        text.pop("torch_dtype", None)
        text["dtype"] = dtype
        for key in ("layer_types", "mlp_layer_types"):
            text.pop(key, None)
        if not packed:
            text.pop("quantization_config", None)
            raw.pop("quantization_config", None)
        elif published.quantization is None:
            text["quantization_config"] = quantization_config()
    before = text.pop(OWN_KEY, None) or {}
    if own := _own_settings(published, config, before):
        text[OWN_KEY] = own
    return published


def _says(published: PublishedConfig, config: ModelConfig, packed: bool, dtype: str) -> bool:
    """Whether a config.json already describes `config` (but for what only training needs)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        says = model_config(published, param_dtype=config.param_dtype)
    same_files = published.dtype in (None, dtype) and (published.quantization is not None) == packed
    return same_files and comparable(says) == comparable(config)


def _own_settings(published: PublishedConfig, config: ModelConfig, before: dict[str, Any]) -> dict[str, Any]:
    """The fields of `config` that loading this config.json would not give; `before`: what its own section held."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        says = model_config(published, param_dtype=config.param_dtype)
    own = {key: getattr(config, key) for key in TRAINING_FIELDS if getattr(config, key) != getattr(says, key)}
    for key in TRAINING_MOE_FIELDS:
        value = getattr(config.moe, key)
        if (key, value) == ("expert_weights", "mxfp4"):  # keep_packed made it so: what the file said stays
            value = before.get(key, "float")
        if value != getattr(says.moe, key):
            own[key] = value
    return own


def _skeleton(outer: bool) -> dict[str, Any]:
    text: dict[str, Any] = {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
    if not outer:
        return text
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def _linear_settings(config: ModelConfig) -> dict[str, Any]:
    kda = config.kda
    layers = {kind: [1 + layer for layer, letter in enumerate(config.mixers) if letter == kind] for kind in "KM"}
    return {
        "full_attn_layers": layers["M"],
        "kda_layers": layers["K"],
        "num_heads": kda.heads,
        "head_dim": kda.key_dim,
        "short_conv_kernel_size": kda.conv_width,
        "use_full_rank_gate": kda.output_gate_rank is None,
        "gate_lower_bound": kda.lower_bound,
    }


def _text_settings(config: ModelConfig) -> dict[str, Any]:
    mla, moe = config.mla, config.moe
    settings = {
        **FIXED,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "intermediate_size": config.dense_width,
        "num_attention_heads": mla.heads,
        "num_key_value_heads": mla.heads,
        "q_lora_rank": mla.q_latent,
        "kv_lora_rank": mla.kv_latent,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "mla_use_output_gate": mla.gate,
        "num_experts": moe.experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_shared_experts": (moe.shared_width or 0) // moe.expert_width,
        "moe_intermediate_size": moe.expert_width,
        "routed_expert_hidden_size": moe.latent,
        "latent_moe_use_norm": moe.latent_norm if moe.latent is not None else False,
        "moe_renormalize": moe.renormalize,
        "routed_scaling_factor": moe.scaling,
        "first_k_dense_replace": config.dense_layers,
        "attn_res_block_size": config.residual_block if config.residual == "block" else None,
        "hidden_act": "situ" if config.activation == "situ" else "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.initializer_range,
    }
    if config.activation == "situ":
        settings |= {"activation_situ_beta": config.gate_cap, "activation_situ_linear_beta": config.up_cap}
    return settings


def quantization_config() -> dict[str, Any]:
    """The section that marks MXFP4 experts, in the words of compressed-tensors (K3's config.json)."""
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    ignored = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head", "vision_tower", "mm_projector")
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{name}.*" for name in ignored],
    }
