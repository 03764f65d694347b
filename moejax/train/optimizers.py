"""Optimizers: AdamW, and per-head Muon with AdamW for what is no matrix. Schedules are in schedules.py."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from ..parallel.layers import ModelParallel
from .muon import partitioned_muon
from .schedules import DECAY_SHAPES, SCHEDULES, cosine_schedule, decay_steps, make_schedule, warmup_steps, wsd_schedule

NO_DECAY = ("A_log", "dt_bias", "norm_weight", "query", "out_norm", "weight", "q_norm", "kv_norm", "latent_norm")
"""Parameters without weight decay: gate parameters (decay would shorten every memory), norms and depth queries."""
KINDS = ("adamw", "muon")
NEWTON_SCHULZ_DTYPES = ("float32", "bfloat16")
READ_BY: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "muon": ("kind", "muon", ("momentum", "nesterov", "newton_schulz_steps", "newton_schulz_dtype", "muon_scale")),
    "wsd": ("schedule", "wsd", ("decay_fraction", "decay_shape")),
}
"""Settings that only one kind or schedule reads: (the setting that chooses, its value, what it makes be read)."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and schedule. As it is: AdamW with a linear warm-up and a cosine to a floor.

    Kimi K3: kind="muon", schedule="cosine", warmup_fraction=0.01, weight_decay=0.1; its rates are not published.
    """

    learning_rate: float = 3e-3
    """Peak learning rate. Muon's updates are scaled to the RMS of AdamW's, so both parts of "muon" take the same."""
    total_steps: int = 1000
    """Updates that the schedule spans."""
    warmup_fraction: float = 0.01
    """Share of the updates with a linear warm-up (at least one update)."""
    final_ratio: float = 0.1
    """Floor of the learning rate over its peak."""
    b1: float = 0.9
    """Of AdamW's first moment."""
    b2: float = 0.95
    """Of AdamW's second moment."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate; see NO_DECAY."""
    kind: Literal["adamw", "muon"] = "adamw"
    """muon: per-head Muon for matrices, AdamW for the rest (moejax.train.muon_layout)."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """wsd: warm-up, stable, decay."""
    decay_fraction: float = 0.2
    """Of "wsd": share of the updates, the last ones, in which the rate falls to its floor (at least one update)."""
    decay_shape: Literal["linear", "sqrt", "cosine"] = "linear"
    """Of "wsd": how it falls. "sqrt" is 1 - sqrt(share)."""
    momentum: float = 0.95
    """Of "muon"."""
    nesterov: bool = True
    """Of "muon": look one update ahead, as optax does. Kimi K2's rule has it off."""
    newton_schulz_steps: int = 5
    """Of "muon": iterations of the orthogonalisation."""
    newton_schulz_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of "muon": operands of the iteration's products; sums and everything else stay float32."""
    muon_scale: float = 0.2
    """Of "muon": an update is this times sqrt(the longer side) times an orthogonal matrix, which gives it this RMS."""
    qk_clip: float | None = None
    """Largest attention logit of an MLA head before its query and key weights shrink (Kimi K2: 100); None: never. The train
    step applies it, with either kind (moejax.train.qk_clip)."""

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"OptimizerConfig.learning_rate is {self.learning_rate}; it must be positive.")
        for name in ("total_steps", "newton_schulz_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"OptimizerConfig.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("warmup_fraction", "final_ratio", "b1", "b2", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"OptimizerConfig.{name} is {getattr(self, name)}; it must lie in [0, 1].")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"OptimizerConfig.momentum is {self.momentum}; it must lie in [0, 1).")
        if not self.weight_decay >= 0:
            raise ValueError(f"OptimizerConfig.weight_decay is {self.weight_decay}; it must not be negative.")
        for name in ("muon_scale", "qk_clip"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"OptimizerConfig.{name} is {getattr(self, name)}; it must be positive.")
        self._check_choices()
        self._check_ignored()
        if self.schedule == "wsd" and warmup_steps(self) + decay_steps(self) > self.total_steps:
            raise ValueError(
                f"OptimizerConfig: {warmup_steps(self)} updates of warm-up and {decay_steps(self)} of decay are more than "
                f"total_steps = {self.total_steps}; lower warmup_fraction or decay_fraction."
            )

    def _check_choices(self) -> None:
        allowed = {"kind": KINDS, "schedule": SCHEDULES, "decay_shape": tuple(DECAY_SHAPES), "newton_schulz_dtype": NEWTON_SCHULZ_DTYPES}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"OptimizerConfig.{name} is {getattr(self, name)!r}; allowed: {', '.join(values)}.")

    def _check_ignored(self) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for chooser, value, names in READ_BY.values():
            for name in names:
                if getattr(self, chooser) != value and getattr(self, name) != defaults[name]:
                    raise ValueError(
                        f"OptimizerConfig.{name} is {getattr(self, name)!r}, which only {chooser}={value!r} reads, and {chooser} is "
                        f"{getattr(self, chooser)!r}; set {chooser}={value!r}, or leave {name} at {defaults[name]!r}."
                    )


def decay_mask(params):
    """True where weight decay applies: every matrix and convolution but those in `NO_DECAY`."""

    def decays(path, leaf) -> bool:
        return getattr(path[-1], "key", None) not in NO_DECAY

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig, parallel: ModelParallel | None = None) -> optax.GradientTransformation:
    """The optimizer that `config.kind` names. Moments and arithmetic are float32 (float64 for float64) whatever the
    parameters' dtype. Gradient clipping belongs to the train step, which reports the norm; so does `config.qk_clip`.

    Args:
      parallel: mesh and rules by which the parameters are sharded; Muon then shares its matrices among the devices. Without
        it, on a mesh, the compiler gathers every matrix on every device: the same numbers, slower. AdamW does not read it.
    """
    return muon(config, parallel) if config.kind == "muon" else adamw(config)


def adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW for all parameters.

    Raises:
      ValueError: the configuration is of another kind.
    """
    _check_kind(config, "adamw")
    return in_float32(_adamw(config))


def muon(config: OptimizerConfig, parallel: ModelParallel | None = None) -> optax.GradientTransformation:
    """Per-head Muon for matrices, AdamW for the other parameters; see make_optimizer and moejax.train.muon.

    Raises:
      ValueError: the configuration is of another kind; a parameter that MUON_LAYOUT does not know (when it is used).
    """
    _check_kind(config, "muon")
    return in_float32(partitioned_muon(config, _adamw(config), decay_mask, parallel))


def _check_kind(config: OptimizerConfig, kind: str) -> None:
    if config.kind != kind:
        raise ValueError(f"OptimizerConfig.kind is {config.kind!r}; this is {kind}. Use make_optimizer(config).")


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.adamw(make_schedule(config), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=decay_mask)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on parameters and gradients in at least float32: its state and its arithmetic are then wide too."""

    def init(params):
        return inner.init(widened(params))

    def update(updates, state, params=None):
        return inner.update(widened(updates), state, widened(params))

    return optax.GradientTransformation(init, update)


def widened(tree):
    """Every leaf in at least float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


__all__ = [
    "OptimizerConfig",
    "adamw",
    "cosine_schedule",
    "decay_mask",
    "make_optimizer",
    "make_schedule",
    "muon",
    "wsd_schedule",
]
