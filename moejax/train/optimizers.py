"""Optimizers and learning-rate schedules."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

NO_DECAY = ("A_log", "dt_bias", "norm_weight", "query", "out_norm", "weight", "q_norm", "kv_norm", "latent_norm")
"""Parameters without weight decay: gate parameters (decay would shorten every memory), norms and depth queries."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and a cosine to a floor (K3: cosine, 1% warm-up, decay 0.1)."""

    learning_rate: float = 3e-3
    """Peak learning rate."""
    total_steps: int = 1000
    """Steps until the cosine reaches its floor."""
    warmup_fraction: float = 0.01
    """Share of the steps with a linear warm-up (at least one step)."""
    final_ratio: float = 0.1
    """Floor of the learning rate over its peak."""
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"OptimizerConfig.learning_rate is {self.learning_rate}; it must be positive.")
        if self.total_steps < 1:
            raise ValueError(f"OptimizerConfig.total_steps is {self.total_steps}; it must be at least 1.")
        for name in ("warmup_fraction", "final_ratio", "b1", "b2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"OptimizerConfig.{name} is {getattr(self, name)}; it must lie in [0, 1].")
        if self.weight_decay < 0:
            raise ValueError(f"OptimizerConfig.weight_decay is {self.weight_decay}; it must not be negative.")


def cosine_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Step -> learning rate: linear warm-up from 0 (the first update already moves), then a cosine to the floor."""
    warmup = max(1, round(config.total_steps * config.warmup_fraction))
    decay = optax.cosine_decay_schedule(
        config.learning_rate, max(1, config.total_steps - warmup), alpha=config.final_ratio
    )
    ramp = optax.linear_schedule(config.learning_rate / warmup, config.learning_rate, max(1, warmup - 1))
    return optax.join_schedules([ramp, decay], [warmup])


def decay_mask(params):
    """True where weight decay applies: every matrix and convolution but those in `NO_DECAY`."""

    def decays(path, leaf) -> bool:
        return getattr(path[-1], "key", None) not in NO_DECAY

    return jax.tree_util.tree_map_with_path(decays, params)


def adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW whose moments and arithmetic are float32 (float64 for float64), whatever the parameters' dtype.

    Gradient clipping belongs to the train step, which reports the norm.
    """
    inner = optax.adamw(
        cosine_schedule(config), b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=decay_mask
    )

    def init(params):
        return inner.init(widened(params))

    def update(updates, state, params=None):
        return inner.update(widened(updates), state, widened(params))

    return optax.GradientTransformation(init, update)


def widened(tree):
    """Every leaf in at least float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)
