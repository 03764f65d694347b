"""Pure functions of arrays: everything the modules compute. See each function's docstring for shapes and errors."""

from .activations import situ_glu, swiglu
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
from .histogram import expert_load
from .norms import rms_norm
from .routing import Routing, route
from .short_conv import short_conv

__all__ = [
    "BALANCE_RULES",
    "BalanceRule",
    "BalanceStrength",
    "DepthPartial",
    "LoadMetrics",
    "Routing",
    "attention_residual",
    "aux_loss",
    "balance_rule",
    "bias_from_histogram",
    "centre",
    "combine_statistics",
    "depth_attention",
    "depth_attention_merge",
    "depth_attention_snapshots",
    "ema_bias",
    "expert_load",
    "load_metrics",
    "load_quantile_bias",
    "margin_histogram",
    "median_band_bias",
    "quantile_bias",
    "rms_norm",
    "route",
    "router_statistics",
    "short_conv",
    "sign_bias",
    "situ_glu",
    "swiglu",
    "updated_bias",
]
