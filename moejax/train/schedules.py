"""Learning-rate schedules: functions of the optimizer's update count (an update that is skipped does not count).

Kimi K3 trains with the cosine and a 1% warm-up; its report (section 2.5) finds it better than WSD when each is tuned on its
own. WSD (warm-up, stable, decay) is the schedule of Kimi Linear (arXiv 2510.26692).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import optax

if TYPE_CHECKING:
    from .optimizers import OptimizerConfig

SCHEDULES = ("cosine", "wsd")
DECAY_SHAPES = {
    "linear": lambda share: 1 - share,
    "sqrt": lambda share: 1 - jnp.sqrt(share),
    "cosine": lambda share: 0.5 * (1 + jnp.cos(jnp.pi * share)),
}
"""What is left of the way from the peak to the floor, after a share in [0, 1] of the decay."""


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Update count (an integer or an array of them) -> learning rate, as `config.schedule` names it."""
    return wsd_schedule(config) if config.schedule == "wsd" else cosine_schedule(config)


def cosine_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up from 0 (the first update already moves), then a cosine to the floor."""
    warmup = warmup_steps(config)
    decay = optax.cosine_decay_schedule(config.learning_rate, max(1, config.total_steps - warmup), alpha=config.final_ratio)
    return optax.join_schedules([_ramp(config, warmup), decay], [warmup])


def wsd_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, the peak, then `decay_steps` updates down to the floor in the shape `config.decay_shape`."""
    warmup, steps = warmup_steps(config), decay_steps(config)
    shape, floor = DECAY_SHAPES[config.decay_shape], config.final_ratio

    def decay(count):
        share = jnp.clip(count / steps, 0, 1)
        return config.learning_rate * (floor + (1 - floor) * shape(share))

    stable = optax.constant_schedule(config.learning_rate)
    return optax.join_schedules([_ramp(config, warmup), stable, decay], [warmup, config.total_steps - steps])


def warmup_steps(config: OptimizerConfig) -> int:
    """Updates until the peak, at least one."""
    return max(1, round(config.total_steps * config.warmup_fraction))


def decay_steps(config: OptimizerConfig) -> int:
    """Updates of the decay of "wsd", at least one."""
    return max(1, round(config.total_steps * config.decay_fraction))


def _ramp(config: OptimizerConfig, warmup: int) -> optax.Schedule:
    return optax.linear_schedule(config.learning_rate / warmup, config.learning_rate, max(1, warmup - 1))
