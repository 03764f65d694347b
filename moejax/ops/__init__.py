"""Pure functions of arrays: everything the modules compute. See each function's docstring for shapes and errors."""

from moejax.kernels.grouped_matmul import grouped_matmul
from moejax.kernels.latent_decode import latent_decode

from .activations import situ_glu, swiglu
from .attention import attention
from .balance_measures import LoadMetrics, aux_loss, load_metrics
from .balance_rules import (
    BALANCE_RULES,
    BalanceRule,
    BalanceStrength,
    balance_rule,
    combine_statistics,
    router_statistics,
    updated_bias,
)
from .balancing import (
    bias_from_histogram,
    centre,
    ema_bias,
    load_quantile_bias,
    margin_histogram,
    median_band_bias,
    quantile_bias,
    sign_bias,
)
from .depth_attention import (
    DepthPartial,
    attention_residual,
    depth_attention,
    depth_attention_merge,
    depth_attention_snapshots,
)
from .experts import (
    LatentMoEOutput,
    LatentMoEWeights,
    PackedExperts,
    expert_mlp,
    gated_mlp,
    latent_moe,
    router_logits,
)
from .experts_few import few_token_experts, few_token_form
from .histogram import expert_load
from .kda import gated_kda, kda, kda_decode, kda_gate, kda_implementation
from .kda_layer import KDAState, KDAWeights, kda_layer
from .mla import (
    MLAWeights,
    absorbed_latent_attention,
    gated_mla,
    latent_attention,
    mla_output,
    mla_project,
)
from .mla_prefill import cached_latent_attention, prefill_implementation
from .mxfp4 import mxfp4_decode, mxfp4_encode, mxfp4_fake_quant
from .norms import rms_norm
from .rotary import positions_from_segments, rotary
from .routing import Routing, route
from .short_conv import short_conv, short_conv_step

__all__ = [
    "BALANCE_RULES",
    "BalanceRule",
    "BalanceStrength",
    "DepthPartial",
    "KDAState",
    "KDAWeights",
    "LatentMoEOutput",
    "LatentMoEWeights",
    "LoadMetrics",
    "MLAWeights",
    "PackedExperts",
    "Routing",
    "absorbed_latent_attention",
    "attention",
    "attention_residual",
    "aux_loss",
    "balance_rule",
    "bias_from_histogram",
    "cached_latent_attention",
    "centre",
    "combine_statistics",
    "depth_attention",
    "depth_attention_merge",
    "depth_attention_snapshots",
    "ema_bias",
    "expert_load",
    "expert_mlp",
    "few_token_experts",
    "few_token_form",
    "gated_kda",
    "gated_mla",
    "gated_mlp",
    "grouped_matmul",
    "kda",
    "kda_decode",
    "kda_gate",
    "kda_implementation",
    "kda_layer",
    "latent_attention",
    "latent_decode",
    "latent_moe",
    "load_metrics",
    "load_quantile_bias",
    "margin_histogram",
    "median_band_bias",
    "mla_output",
    "mla_project",
    "mxfp4_decode",
    "mxfp4_encode",
    "mxfp4_fake_quant",
    "positions_from_segments",
    "prefill_implementation",
    "quantile_bias",
    "rms_norm",
    "rotary",
    "route",
    "router_logits",
    "router_statistics",
    "short_conv",
    "short_conv_step",
    "sign_bias",
    "situ_glu",
    "swiglu",
    "updated_bias",
]
