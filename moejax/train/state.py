"""What a training run carries from step to step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct

from ..ops.balance_rules import BalanceStrength


@struct.dataclass
class TrainState:
    """Everything that changes in training. Gradients see `params` only."""

    step: jax.Array
    """[] int32: batches consumed, skipped ones included."""
    params: Any
    """Model parameters."""
    opt_state: Any
    """State of the optimizer."""
    router_state: Any
    """Selection bias of each MoE layer, float32; moved once a step by the balancing rule."""
    balance: BalanceStrength
    """Strengths of the balancing rule: runtime scalars that may change without a recompile."""
    skipped: jax.Array
    """[] int32: updates skipped because the loss or the gradient was not finite."""
    rng: jax.Array
    """Typed key of what the run draws (its samples of text), folded with the step: it stays as it is."""


def init_state(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    *,
    balance: BalanceStrength | None = None,
) -> TrainState:
    """A fresh state. Pure: call it under `jax.jit` (with `out_shardings` to initialise straight into shards)."""
    variables = model.init(key, jnp.zeros((1, 1), jnp.int32))
    rng = jax.random.fold_in(key, 1)
    return make_state(variables["params"], variables.get("router_state", {}), optimizer, balance=balance, rng=rng)


def make_state(
    params: Any,
    router_state: Any,
    optimizer: optax.GradientTransformation,
    *,
    balance: BalanceStrength | None = None,
    rng: jax.Array | None = None,
) -> TrainState:
    """The state that starts training from given parameters and selection biases, as from `moejax.hub.load`.

    rng: a typed key; None: jax.random.key(0).
    """
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        router_state=router_state,
        balance=BalanceStrength() if balance is None else balance,
        skipped=jnp.zeros((), jnp.int32),
        rng=jax.random.key(0) if rng is None else rng,
    )
