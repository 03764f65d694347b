"""Model configuration: frozen dataclasses, validated once when they are built. Reads nothing of the package."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

MIN_LOWER_BOUND = -5.9  # past row-0 anchors stay finite in float32 up to |g| = 5.915 a token (kernels/kda)
MXFP4_GROUP = 32  # input columns that share a scale
DTYPES = ("float32", "bfloat16", "float64")
BALANCE_RULES = (
    "quantile",
    "quantile_exact",
    "sign",
    "load_quantile",
    "median_band",
    "aux_loss",
    "none",
)


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; it must be an integer of at least 1.")


def _known(owner: type, values: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(owner)}
    if unknown := set(values) - known:
        names = ", ".join(sorted(known))
        raise ValueError(f"unknown {owner.__name__} fields: {', '.join(sorted(unknown))}; known: {names}.")


def _one_of(owner: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in allowed:
        raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; allowed: {', '.join(allowed)}.")


def _whole_blocks(owner: object, name: str, expert_weights: str) -> None:
    value = getattr(owner, name)
    if value is not None and value % MXFP4_GROUP:
        raise ValueError(
            f"{type(owner).__name__}.{name} is {value}; with expert_weights = {expert_weights!r} it must be a multiple of "
            f"{MXFP4_GROUP}, the block of MXFP4. Change it, or set expert_weights='float'."
        )


@dataclasses.dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (K3 report section 2.1.1)."""

    heads: int
    """Query and key heads."""
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    value_heads: int | None = None
    """Value heads, a multiple of `heads`; None: as many as `heads`."""
    conv_width: int = 4
    """Taps of the causal depthwise convolution on q, k and v."""
    gate_rank: int | None = None
    """Width of the low-rank projection of the decay; None: `key_dim`."""
    output_gate_rank: int | None = None
    """Width of a low-rank output gate (Kimi-Linear); None: one full matrix (K3)."""
    lower_bound: float | None = -5.0
    """Lower bound of the log decay of one token in nats, in [-5.9, 0); None: the unbounded softplus gate of Kimi-Linear."""

    def __post_init__(self) -> None:
        _positive(self, "heads", "key_dim", "value_dim", "value_heads", "conv_width", "gate_rank", "output_gate_rank")
        if self.value_heads is not None and self.value_heads % self.heads:
            raise ValueError(
                f"KDAConfig.value_heads is {self.value_heads}; it must be a multiple of heads = {self.heads}."
            )
        if self.lower_bound is not None and not MIN_LOWER_BOUND <= self.lower_bound < 0:
            raise ValueError(
                f"KDAConfig.lower_bound is {self.lower_bound}; it must lie in [{MIN_LOWER_BOUND}, 0), or be None for the unbounded gate."
            )

    @property
    def num_value_heads(self) -> int:
        return self.value_heads or self.heads

    @property
    def decay_rank(self) -> int:
        return self.gate_rank or self.key_dim


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention (K3 report section 2.1.2)."""

    heads: int
    nope_dim: int
    """Channels of a head that come from the latent."""
    rope_dim: int
    """Channels of the key that all heads share. Without positions they are plain content channels."""
    value_dim: int
    kv_latent: int
    """Width of the cached latent."""
    q_latent: int | None = None
    """Width of the query latent; None: queries come straight from the input."""
    gate: bool = True
    """Element-wise sigmoid gate on the heads' outputs."""
    positions: Literal["none", "rotary"] = "none"
    """"rotary" turns the shared channels by position: a control, not K3."""
    rotary_base: float = 10000.0
    rotary_scale: float = 1.0
    """Position interpolation: positions are divided by this factor (rotary only)."""

    def __post_init__(self) -> None:
        _positive(self, "heads", "nope_dim", "rope_dim", "value_dim", "kv_latent", "q_latent")
        _one_of(self, "positions", ("none", "rotary"))
        if self.positions == "rotary" and self.rope_dim % 2:
            raise ValueError(f"MLAConfig.rope_dim is {self.rope_dim}; rotary positions need an even number.")
        if self.positions == "none" and (self.rotary_scale, self.rotary_base) != (1.0, 10000.0):
            raise ValueError(
                f"MLAConfig has rotary_scale = {self.rotary_scale} and rotary_base = {self.rotary_base}, but positions is "
                "'none', which would ignore them; set positions='rotary' or drop them."
            )
        for name in ("rotary_scale", "rotary_base"):
            if not getattr(self, name) > 0:
                raise ValueError(f"MLAConfig.{name} is {getattr(self, name)}; it must be positive.")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Latent mixture of experts (K3 report section 2.3)."""

    experts: int
    experts_per_token: int
    expert_width: int
    latent: int | None = None
    """Width of the experts' input and output; None: the model's width, without projections (Kimi-Linear)."""
    latent_norm: bool = True
    """RMS norm of the experts' sum before it is projected up (only with a latent)."""
    shared_width: int | None = None
    """Width of the shared expert; None: no shared expert."""
    scaling: float = 1.0
    """Factor on the routing weights."""
    renormalize: bool = True
    """Divide the chosen scores by their sum."""
    balance: str = "quantile"
    """Rule that moves the selection bias once per optimizer step."""
    histogram_bins: int = 1000
    """Bins of the quantile rule (K3: 1000)."""
    expert_weights: Literal["float", "mxfp4_qat", "mxfp4"] = "float"
    """Routed experts: "mxfp4_qat" computes with their MXFP4 rounding and trains the float weights (straight-through gradient);
    "mxfp4" holds packed codes and scales, which are read-only."""

    def __post_init__(self) -> None:
        _positive(self, "experts", "experts_per_token", "expert_width", "latent", "shared_width", "histogram_bins")
        _one_of(self, "balance", BALANCE_RULES)
        _one_of(self, "expert_weights", ("float", "mxfp4_qat", "mxfp4"))
        if self.expert_weights != "float":
            _whole_blocks(self, "expert_width", self.expert_weights)
            _whole_blocks(self, "latent", self.expert_weights)
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"MoEConfig.experts_per_token is {self.experts_per_token}; it must not exceed experts = {self.experts}."
            )
        if self.experts_per_token == self.experts and self.balance != "none":
            raise ValueError(
                f"MoEConfig.balance is {self.balance!r}, but every token goes to all {self.experts} experts; set balance='none'."
            )
        if self.scaling <= 0:
            raise ValueError(f"MoEConfig.scaling is {self.scaling}; it must be positive.")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A hybrid language model: KDA and MLA layers, dense and mixture-of-experts feed-forwards, attention over depth."""

    vocab_size: int
    hidden: int
    layers: int
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    dense_width: int
    """Feed-forward width of the first `dense_layers` layers."""
    pattern: str = "KKKM"
    """K = KDA, M = MLA. Either one letter a layer, or a period that divides `layers` and repeats."""
    dense_layers: int = 1
    """How many first layers have a dense feed-forward instead of experts."""
    residual: Literal["plain", "full", "block"] = "block"
    """"plain": running sum; "full": attention over every sub-layer's output; "block": over snapshots of the sum."""
    residual_block: int = 12
    """Decoder layers (two sub-layers each) a block, for residual="block"."""
    activation: Literal["situ", "swiglu"] = "situ"
    gate_cap: float = 4.0
    up_cap: float = 25.0
    """Caps of SiTU-GLU."""
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    param_dtype: str = "float32"
    dtype: str | None = None
    """Dtype of the computation; None: bfloat16 on an accelerator, float32 on a CPU."""
    remat: Literal["none", "full"] = "full"
    """"full": the backward pass recomputes. residual="block" keeps block boundaries only, the others one stream a layer."""
    scan_layers: bool = True
    """False unrolls the loops over layers. Same parameters, same numbers, a longer compile."""

    def __post_init__(self) -> None:
        _positive(self, "vocab_size", "hidden", "layers", "dense_width", "residual_block")
        _one_of(self, "residual", ("plain", "full", "block"))
        _one_of(self, "activation", ("situ", "swiglu"))
        _one_of(self, "remat", ("none", "full"))
        _one_of(self, "param_dtype", DTYPES)
        if self.dtype is not None:
            _one_of(self, "dtype", DTYPES)
        if self.moe.expert_weights != "float" and self.moe.latent is None:
            _whole_blocks(self, "hidden", self.moe.expert_weights)
        self._check_pattern()
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(
                f"ModelConfig.dense_layers is {self.dense_layers}; it must lie in [0, layers = {self.layers}]."
            )
        for name in ("gate_cap", "up_cap", "norm_eps", "initializer_range"):
            if not getattr(self, name) > 0:
                raise ValueError(f"ModelConfig.{name} is {getattr(self, name)}; it must be positive.")
        if self.activation == "swiglu" and (self.gate_cap, self.up_cap) != (4.0, 25.0):
            raise ValueError(
                f"ModelConfig has gate_cap = {self.gate_cap} and up_cap = {self.up_cap}, but activation is 'swiglu', which has "
                "no caps; set activation='situ' or drop them."
            )
        if self.residual == "full" and self.scan_layers:
            raise ValueError(
                "ModelConfig.residual='full' gives every layer another number of sources and cannot be scanned; set scan_layers=False."
            )

    def _check_pattern(self) -> None:
        if not self.pattern or set(self.pattern) - set("KM"):
            raise ValueError(
                f"ModelConfig.pattern is {self.pattern!r}; it must be made of the letters K (KDA) and M (MLA)."
            )
        if self.layers % len(self.pattern):
            raise ValueError(
                f"ModelConfig.pattern {self.pattern!r} has {len(self.pattern)} letters and does not fill layers = {self.layers}; "
                f"give a length that divides {self.layers}, or one letter a layer."
            )

    @property
    def mixers(self) -> str:
        """One letter a layer."""
        return self.pattern * (self.layers // len(self.pattern))

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers

    def replace(self, **changes: Any) -> ModelConfig:
        """A changed copy. A dict for `kda`, `mla` or `moe` changes single fields: replace(moe={"balance": "sign"})."""
        for name in ("kda", "mla", "moe"):
            if isinstance(changes.get(name), dict):
                part = getattr(self, name)
                _known(type(part), changes[name])
                changes[name] = dataclasses.replace(part, **changes[name])
        _known(type(self), changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. An unknown field is an error."""
        parts = {"kda": KDAConfig, "mla": MLAConfig, "moe": MoEConfig}
        _known(cls, values)
        for name, part in parts.items():
            _known(part, values.get(name, {}))
        return cls(**{key: parts[key](**value) if key in parts else value for key, value in values.items()})
