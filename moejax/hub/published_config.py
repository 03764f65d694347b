"""config.json of published checkpoints: to a ModelConfig and back (keys: config.json of Kimi-K3 and Kimi-Linear-48B-A3B)."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import warnings
from typing import Any

from ..config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from .shards import TensorSpec

OWN_KEY = "moejax"
"""Section of config.json for what published files have no key for."""
TRAINING_FIELDS = ("dtype", "remat", "scan_layers")
TRAINING_MOE_FIELDS = ("balance", "histogram_bins", "expert_weights")
MODEL_DTYPES = {"bfloat16": "BF16", "float32": "F32", "float64": "F64"}
DTYPE_NAMES = {code: name for name, code in MODEL_DTYPES.items()}
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
INTEGER, NUMBER, SWITCH, TEXT, LIST, TABLE = "an integer", "a number", "true or false", "a text", "a list of integers", "a table"
REQUIRED = {
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"), INTEGER),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), INTEGER),
    **dict.fromkeys(("num_experts", "num_experts_per_token", "moe_intermediate_size"), INTEGER),
    "hidden_act": TEXT,
    "rms_norm_eps": NUMBER,
    "linear_attn_config": TABLE,
}
OPTIONAL = {  # null means the same as a missing key
    **dict.fromkeys(("num_key_value_heads", "q_lora_rank", "num_shared_experts", "routed_expert_hidden_size"), INTEGER),
    **dict.fromkeys(("first_k_dense_replace", "attn_res_block_size", "num_nextn_predict_layers"), INTEGER),
    **dict.fromkeys(("activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor", "initializer_range"), NUMBER),
    **dict.fromkeys(("mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize"), SWITCH),
    **dict.fromkeys(("quantization_config", OWN_KEY), TABLE),
    **dict.fromkeys(("dtype", "torch_dtype"), TEXT),
}
LINEAR_REQUIRED = {"num_heads": INTEGER, "head_dim": INTEGER, "full_attn_layers": LIST}
LINEAR_OPTIONAL = {
    "kda_layers": LIST,
    "short_conv_kernel_size": INTEGER,
    "use_full_rank_gate": SWITCH,
    "gate_lower_bound": NUMBER,
}
READ = {*FIXED, *REQUIRED, *OPTIONAL, "mlp_layer_types"}
NOT_NEEDED = {
    # no positions: lengths and rotary settings change nothing; head_dim and the qk_head_dim follow from others
    *("max_position_embeddings", "model_max_length", "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "qk_head_dim"),
    # copies of linear_attn_config that transformers adds
    *("layer_types", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"),
    # one expert group: nothing to choose; the MTP layer is kept aside (see load)
    *("use_grouped_topk",),
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
    def mtp_layers(self) -> int:
        """Layers behind the trunk that predict further tokens; K3's release has none."""
        return self.text.get("num_nextn_predict_layers") or 0

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
    text = {key: value for key, value in published.text.items() if value is not None}
    _refuse_other_models(published, text)
    own = text.get(OWN_KEY, {})
    moe = _moe(text) | {key: value for key, value in own.items() if key in TRAINING_MOE_FIELDS}
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
        param_dtype=param_dtype,
        **own,
    )


def _refuse_other_models(published: PublishedConfig, text: dict[str, Any]) -> None:
    """Raise ValueError naming every setting that is missing, of another kind, or not this model's; warn of unknown ones."""
    lines = _schema(text, REQUIRED, OPTIONAL, "")
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict):
        linear = {key: value for key, value in linear.items() if value is not None}
        lines += _schema(linear, LINEAR_REQUIRED, LINEAR_OPTIONAL, "linear_attn_config.")
        unknown = sorted(linear.keys() - LINEAR_REQUIRED.keys() - LINEAR_OPTIONAL.keys())
        lines += [f"linear_attn_config.{key} is not known" for key in unknown]
    for section in (text, published.raw):
        others = [key for key, only in FIXED.items() if section.get(key, only) not in (only, None)]
        lines += [f"{key} is {section[key]!r}; only {FIXED[key]!r} is built" for key in others]
    if text.get("hidden_act") not in ("situ", "silu", None):
        lines.append(f"hidden_act is {text['hidden_act']!r}; situ and silu are built")
    heads = text.get("num_attention_heads")
    if text.get("num_key_value_heads", heads) != heads:
        lines.append(f"num_key_value_heads is {text['num_key_value_heads']}; it must equal num_attention_heads = {heads}")
    own = text.get(OWN_KEY)
    if isinstance(own, dict):
        lines += [f"{OWN_KEY}.{key} is not known" for key in sorted(own.keys() - set(TRAINING_FIELDS) - set(TRAINING_MOE_FIELDS))]
    if lines:
        listed = "\n".join(f"  {line}" for line in dict.fromkeys(lines))
        raise ValueError(f"config.json describes another model, or is damaged:\n{listed}")
    if unknown := sorted(text.keys() - READ - NOT_NEEDED):
        warnings.warn(f"config.json has keys that moejax does not know and does not use: {', '.join(unknown)}.", stacklevel=4)


def _schema(values: dict[str, Any], required: dict[str, str], optional: dict[str, str], prefix: str) -> list[str]:
    lines = [f"{prefix}{key} is missing" for key in required if key not in values]
    for key, kind in {**required, **optional}.items():
        if key in values and not _is(values[key], kind):
            lines.append(f"{prefix}{key} is {values[key]!r}; it must be {kind}")
    return lines


def _is(value: Any, kind: str) -> bool:
    if kind == LIST:
        return isinstance(value, list) and all(type(item) is int for item in value)
    types = {INTEGER: (int,), NUMBER: (int, float), SWITCH: (bool,), TEXT: (str,), TABLE: (dict,)}[kind]
    return type(value) in types


def _kda(linear: dict[str, Any]) -> KDAConfig:
    width = linear["head_dim"]
    return KDAConfig(
        heads=linear["num_heads"],
        key_dim=width,
        value_dim=width,
        conv_width=linear.get("short_conv_kernel_size") or 4,
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
    full, kda = linear["full_attn_layers"], linear.get("kda_layers")
    if kda is None:
        kda = sorted(set(range(1, layers + 1)) - set(full))
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


def comparable(config: ModelConfig) -> dict[str, Any]:
    """What two configurations must share to read the same files."""
    values = config.replace(pattern=config.mixers).to_dict()
    for key in (*TRAINING_FIELDS, "param_dtype"):
        values.pop(key)
    for key in TRAINING_MOE_FIELDS:
        values["moe"].pop(key)
    return values
