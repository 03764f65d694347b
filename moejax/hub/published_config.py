"""config.json of published checkpoints: to a ModelConfig and back (keys: config.json of Kimi-K3 and Kimi-Linear-48B-A3B)."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import warnings
from typing import Any

from ..config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from .shards import TensorSpec

OWN_KEY = "moejax"
"""Section of config.json for what published files have no key for."""
TRAINING_FIELDS = ("param_dtype", "dtype", "remat", "scan_layers")
TRAINING_MOE_FIELDS = ("balance", "histogram_bins", "expert_weights")
MODEL_DTYPES = {"bfloat16": "BF16", "float32": "F32", "float64": "F64"}
FIXED = {
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "mla_use_nope": True,
    "attention_bias": False,
}
"""Settings with one value that this model has; a file that lacks the key means this value."""
READ = {
    *FIXED,
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate"),
    *("linear_attn_config", "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size"),
    *("routed_expert_hidden_size", "latent_moe_use_norm", "moe_renormalize", "routed_scaling_factor", "first_k_dense_replace"),
    *("mlp_layer_types", "attn_res_block_size", "hidden_act", "activation_situ_beta", "activation_situ_linear_beta"),
    *("rms_norm_eps", "initializer_range", "dtype", "torch_dtype", "quantization_config", OWN_KEY),
}
NOT_NEEDED = {
    # no positions: lengths and rotary settings change nothing; head_dim and the qk_head_dim follow from others
    *("max_position_embeddings", "model_max_length", "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "qk_head_dim"),
    # copies of linear_attn_config that transformers adds
    *("layer_types", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"),
    # one expert group: nothing to choose; the MTP layer is kept aside (see load)
    *("use_grouped_topk", "num_nextn_predict_layers"),
    # about programs, tokens and outputs, not about the weights
    *("model_type", "architectures", "auto_map", "_name_or_path", "transformers_version", "use_cache", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "attention_dropout", "aux_loss_alpha", "seq_aux"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "tie_encoder_decoder"),
}


@dataclasses.dataclass(frozen=True)
class PublishedConfig:
    """A parsed config.json."""

    raw: dict[str, Any]

    @property
    def outer(self) -> bool:
        """The text model's settings are inside "text_config" (K3)."""
        return "text_config" in self.raw

    @property
    def text(self) -> dict[str, Any]:
        return self.raw["text_config"] if self.outer else self.raw

    @property
    def vision(self) -> dict[str, Any] | None:
        return self.raw.get("vision_config")

    @property
    def quantization(self) -> dict[str, Any] | None:
        return self.text.get("quantization_config", self.raw.get("quantization_config"))

    @property
    def dtype(self) -> str | None:
        """Of the stored weights, as config.json says it, or None."""
        for section in (self.text, self.raw):
            for key in ("dtype", "torch_dtype"):
                if section.get(key) is not None:
                    return str(section[key]).removeprefix("torch.")
        return None


def read_config(folder: pathlib.Path) -> PublishedConfig:
    """Parse folder/config.json. FileNotFoundError or ValueError says what is wrong with it."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give the folder of a published checkpoint.")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}.") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("text_config", {}), dict):
        raise ValueError(f"{path} must hold one JSON object.")
    config = PublishedConfig(raw)
    kind = config.text.get("model_type")
    if kind != "kimi_linear":
        raise ValueError(
            f"{path} describes model_type {kind!r}; this loader reads kimi_linear, alone (Kimi-Linear-48B) or as text_config (K3)."
        )
    return config


def model_config(published: PublishedConfig, *, param_dtype: str) -> ModelConfig:
    """The ModelConfig of a config.json. ValueError names every setting that this model does not have."""
    text = published.text
    _refuse_other_models(text)
    own = text.get(OWN_KEY, {})
    moe = _moe(text)
    moe |= {key: value for key, value in own.items() if key in TRAINING_MOE_FIELDS}
    own = {key: value for key, value in own.items() if key in TRAINING_FIELDS}
    residual = text.get("attn_res_block_size")
    situ = text["hidden_act"] == "situ"
    return ModelConfig(
        vocab_size=text["vocab_size"],
        hidden=text["hidden_size"],
        layers=text["num_hidden_layers"],
        kda=_kda(text["linear_attn_config"]),
        mla=_mla(text),
        moe=MoEConfig(**moe),
        dense_width=text["intermediate_size"],
        pattern=_pattern(text),
        dense_layers=_dense_layers(text),
        residual="plain" if residual is None else "block",
        residual_block=12 if residual is None else residual,
        activation="situ" if situ else "swiglu",
        gate_cap=text.get("activation_situ_beta", 4.0) if situ else 4.0,
        up_cap=text.get("activation_situ_linear_beta", 25.0) if situ else 25.0,
        norm_eps=text["rms_norm_eps"],
        initializer_range=text.get("initializer_range", 0.02),
        **{"param_dtype": param_dtype, **own},
    )


def _refuse_other_models(text: dict[str, Any]) -> None:
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "linear_attn_config")
    needed += ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts", "num_experts_per_token")
    needed += ("moe_intermediate_size", "hidden_act", "rms_norm_eps")
    lines = [f"  {key} is missing" for key in needed if key not in text]
    for key, only in FIXED.items():
        if text.get(key, only) not in (only, None):
            lines.append(f"  {key} is {text[key]!r}; only {only!r} is built")
    if text.get("hidden_act", "silu") not in ("situ", "silu"):
        lines.append(f"  hidden_act is {text['hidden_act']!r}; situ and silu are built")
    heads = text.get("num_attention_heads")
    if text.get("num_key_value_heads", heads) not in (heads, None):
        lines.append(f"  num_key_value_heads is {text['num_key_value_heads']}; it must equal num_attention_heads = {heads}")
    if lines:
        raise ValueError("config.json describes another model:\n" + "\n".join(lines))
    if unknown := sorted(text.keys() - READ - NOT_NEEDED):
        warnings.warn(f"config.json has keys that moejax does not know and does not use: {', '.join(unknown)}.", stacklevel=4)


def _kda(linear: dict[str, Any]) -> KDAConfig:
    width = linear["head_dim"]
    return KDAConfig(
        heads=linear["num_heads"],
        key_dim=width,
        value_dim=width,
        conv_width=linear.get("short_conv_kernel_size", 4),
        output_gate_rank=None if linear.get("use_full_rank_gate") else width,
        lower_bound=linear.get("gate_lower_bound"),
    )


def _mla(text: dict[str, Any]) -> MLAConfig:
    return MLAConfig(
        heads=text["num_attention_heads"],
        nope_dim=text["qk_nope_head_dim"],
        rope_dim=text["qk_rope_head_dim"],
        value_dim=text["v_head_dim"],
        kv_latent=text["kv_lora_rank"],
        q_latent=text.get("q_lora_rank"),
        gate=bool(text.get("mla_use_output_gate", False)),
    )


def _moe(text: dict[str, Any]) -> dict[str, Any]:
    experts, chosen, width = text["num_experts"], text["num_experts_per_token"], text["moe_intermediate_size"]
    latent = text.get("routed_expert_hidden_size")
    bounded = text["linear_attn_config"].get("gate_lower_bound") is not None
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_width": width,
        "latent": latent,
        "latent_norm": bool(text.get("latent_moe_use_norm", False)) if latent is not None else True,
        "shared_width": (text.get("num_shared_experts") or 0) * width or None,
        "scaling": float(text.get("routed_scaling_factor", 1.0)),
        "renormalize": bool(text.get("moe_renormalize", True)),
        # Not in published files: K3 was trained with quantile balancing, Kimi-Linear with the sign rule.
        "balance": "none" if chosen == experts else "quantile" if bounded else "sign",
    }


def _pattern(text: dict[str, Any]) -> str:
    """One letter a layer from the 1-indexed lists, shortened to its period."""
    layers, linear = text["num_hidden_layers"], text["linear_attn_config"]
    full = linear.get("full_attn_layers")
    if full is None:
        raise ValueError("linear_attn_config has no full_attn_layers; it must list the MLA layers, counted from 1.")
    kda = linear.get("kda_layers", sorted(set(range(1, layers + 1)) - set(full)))
    if sorted([*full, *kda]) != list(range(1, layers + 1)):
        raise ValueError(
            f"linear_attn_config: full_attn_layers {full} and kda_layers {kda} must list each of the layers 1 to {layers} once; "
            "published lists count from 1."
        )
    letters = "".join("M" if layer in set(full) else "K" for layer in range(1, layers + 1))
    period = next(size for size in range(1, layers + 1) if layers % size == 0 and letters[:size] * (layers // size) == letters)
    return letters[:period]


def _dense_layers(text: dict[str, Any]) -> int:
    first = text.get("first_k_dense_replace")
    kinds = text.get("mlp_layer_types")
    if kinds is None:
        if first is None:
            raise ValueError("config.json has neither first_k_dense_replace nor mlp_layer_types; one must say which layers are dense.")
        return first
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (text["num_hidden_layers"] - dense) or first not in (None, dense):
        raise ValueError(
            f"mlp_layer_types is {kinds} and first_k_dense_replace {first}; this model has its dense layers first, "
            f"{text['num_hidden_layers']} layers in all."
        )
    return dense


def stored_dtype(published: PublishedConfig, embedding: TensorSpec | None) -> str:
    """Dtype code of the model's matrices in the files: what config.json says, else that of the embedding."""
    if published.dtype is None and embedding is not None and embedding.dtype in MODEL_DTYPES.values():
        return embedding.dtype
    if published.dtype not in MODEL_DTYPES:
        raise ValueError(f"config.json has dtype {published.dtype!r}; {', '.join(MODEL_DTYPES)} can be read.")
    return MODEL_DTYPES[published.dtype]


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
    text.pop(OWN_KEY, None)
    if own := _own_settings(published, config):
        text[OWN_KEY] = own
    return published


def _says(published: PublishedConfig, config: ModelConfig, packed: bool, dtype: str) -> bool:
    """Whether a config.json already describes `config` (but for what only training needs)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        says = model_config(published, param_dtype=config.param_dtype)
    same_files = published.dtype in (None, dtype) and (published.quantization is not None) == packed
    return same_files and comparable(says) == comparable(config)


def comparable(config: ModelConfig) -> dict[str, Any]:
    """What two configurations must share to read the same files."""
    values = config.replace(pattern=config.mixers).to_dict()
    for key in TRAINING_FIELDS:
        values.pop(key)
    for key in TRAINING_MOE_FIELDS:
        values["moe"].pop(key)
    return values


def _own_settings(published: PublishedConfig, config: ModelConfig) -> dict[str, Any]:
    """The fields of `config` that loading this config.json would not give."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        says = model_config(published, param_dtype=config.param_dtype)
    own = {key: getattr(config, key) for key in TRAINING_FIELDS if getattr(config, key) != getattr(says, key)}
    for key in TRAINING_MOE_FIELDS:
        value = getattr(config.moe, key)
        if value != getattr(says.moe, key) and (key, value) != ("expert_weights", "mxfp4"):  # keep_packed decides that
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
