"""The train step and the evaluation step: pure functions for the caller to jit.

Shapes: M micro-batches, B rows, T tokens. A batch is {"tokens": int32 [B,T] or [M,B,T], "segment_ids": the same shape}.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..modules.model import HybridLM
from .balance import (
    Statistics,
    balance_metrics,
    by_layer,
    join_statistics,
    select_statistics,
    update_router,
)
from .loss import chunked_cross_entropy, next_token_targets
from .optimizers import widened
from .state import TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


def make_train_step(
    model: HybridLM, optimizer: optax.GradientTransformation, *, clip_norm: float | None = 1.0, loss_chunk: int = 1024
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Build step(state, batch) -> (state, metrics), pure; jit it with `donate_argnums=0`.

    The loss is the sum over valid tokens of all micro-batches divided by their count, in nats. The selection bias moves
    once, from the counts of the whole step, for the next step. When the loss, the gradient or the new bias is not finite,
    or no target counts, parameters, optimizer and router stay bit for bit and only `step` and `skipped` advance.

    Args:
      model: the model; its configuration names the balancing rule.
      optimizer: any optax transformation of `params`.
      clip_norm: largest global gradient norm; None: no clipping.
      loss_chunk: tokens whose logits exist at one time, on each of the devices that share the tokens (a chunk gathers the head).

    Returns:
      The step. Metrics: loss, tokens, grad_norm, skipped (this step: 0 or 1), and per MoE layer [L] the figures of
      `moejax.train.balance.balance_metrics`.

    Raises:
      ValueError: clip_norm not positive, or a model with packed experts (expert_weights="mxfp4"), which are read-only.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}; it must be positive, or None for no clipping.")
    config = model.config
    loss_chunk = _over_devices(model, loss_chunk)
    if config.moe.expert_weights == "mxfp4":
        raise ValueError(
            "MoEConfig.expert_weights is 'mxfp4': packed experts are read-only and cannot be trained. Load the checkpoint "
            "unpacked and set expert_weights='mxfp4_qat' (or 'float')."
        )
    stacked = config.residual != "full"

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_batch(batch)
        tokens, segment_ids = (_micro_batches(batch[name]) for name in ("tokens", "segment_ids"))
        count = jnp.sum(next_token_targets(*map(_flat, (tokens, segment_ids)))[1])
        scale = 1.0 / jnp.maximum(count, 1)

        def objective(params, tokens, segment_ids):
            nats, aux, stats = _forward(model, params, state.router_state, tokens, segment_ids, loss_chunk)
            weight = jnp.sum(next_token_targets(tokens, segment_ids)[1]) * scale
            total = nats * scale + state.balance.aux_coefficient * aux * weight
            return total, (nats, stats)

        grads, nats, stats = _accumulate(objective, state.params, tokens, segment_ids, stacked)
        loss = nats * scale
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(grads)
            if clip_norm is not None:
                shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
                grads = jax.tree.map(lambda g: g * shrink, grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        k = config.moe.experts_per_token
        router_state = update_router(config.moe.balance, state.router_state, stats, k, state.balance, stacked)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & (count > 0)
        for bias in jax.tree.leaves(router_state):  # a NaN where no target stands reaches the bias alone
            finite &= jnp.all(jnp.isfinite(bias))
        kept = (state.params, state.opt_state, state.router_state)
        params, opt_state, router_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, opt_state, router_state), kept
        )
        skipped = 1 - finite.astype(jnp.int32)
        state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            router_state=router_state,
            balance=state.balance,
            skipped=state.skipped + skipped,
        )
        metrics = {"loss": loss, "tokens": count, "grad_norm": norm, "skipped": skipped}
        return state, metrics | balance_metrics(config, stats, router_state)

    return step


def make_eval_step(model: HybridLM, *, loss_chunk: int = 1024) -> Callable[[TrainState, Batch], Metrics]:
    """Build evaluate(state, batch) -> {"loss_sum": nats, "tokens": count}. The router counts nothing and stays as it is."""
    loss_chunk = _over_devices(model, loss_chunk)

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        check_batch(batch)
        tokens, segment_ids = (_flat(_micro_batches(batch[name])) for name in ("tokens", "segment_ids"))
        variables = {"params": state.params, "router_state": state.router_state}
        hidden = model.apply(variables, tokens, segment_ids, return_hidden=True)
        nats = _cross_entropy(hidden, state.params["head"], tokens, segment_ids, loss_chunk)
        return {"loss_sum": nats, "tokens": jnp.sum(next_token_targets(tokens, segment_ids)[1])}

    return evaluate


def _over_devices(model: HybridLM, loss_chunk: int) -> int:
    """Tokens of a chunk over all devices that share the tokens."""
    return loss_chunk if model.parallel is None else loss_chunk * model.parallel.size("batch") * model.parallel.size("time")


def check_batch(batch: Batch) -> None:
    """Raise ValueError unless `batch` has tokens and segment_ids of one shape [B,T] or [M,B,T]."""
    for name in ("tokens", "segment_ids"):
        if name not in batch:
            raise ValueError(f"the batch has {sorted(batch)}; it must have 'tokens' and 'segment_ids'.")
    shape = batch["tokens"].shape
    if len(shape) not in (2, 3) or batch["segment_ids"].shape != shape:
        raise ValueError(
            f"tokens has shape {shape} and segment_ids {batch['segment_ids'].shape}; both must be [B,T] or [M,B,T], equal."
        )


def _micro_batches(x: jax.Array) -> jax.Array:
    return x if x.ndim == 3 else x[None]


def _flat(x: jax.Array) -> jax.Array:
    """[M,B,T] -> [M*B,T]."""
    return x.reshape(-1, x.shape[-1])


def _forward(model, params, router_state, tokens, segment_ids, loss_chunk) -> tuple[jax.Array, jax.Array, Statistics]:
    """-> (summed nats, balancing loss, routing statistics)."""
    variables = {"params": params, "router_state": router_state}
    hidden, written = model.apply(variables, tokens, segment_ids, return_hidden=True, mutable=["router_stats"])
    nats = _cross_entropy(hidden, params["head"], tokens, segment_ids, loss_chunk)
    stats = written.get("router_stats", {})
    return nats, stats.get("aux_loss_total", 0.0), by_layer(stats)


def _cross_entropy(hidden, head, tokens, segment_ids, chunk) -> jax.Array:
    targets, valid = next_token_targets(tokens, segment_ids)
    return chunked_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1), valid.reshape(-1), chunk=chunk
    )


def _accumulate(objective, params, tokens, segment_ids, stacked: bool) -> tuple[Any, jax.Array, Statistics]:
    """Gradients, nats and statistics of all micro-batches: summed, except per-token statistics, which are joined."""

    def gradient(*arguments):
        grads, aux = jax.grad(objective, has_aux=True)(*arguments)
        return widened(grads), aux  # sums and norms of bfloat16 gradients keep 8 bits

    if tokens.shape[0] == 1:
        grads, (nats, stats) = gradient(params, tokens[0], segment_ids[0])
        return grads, nats, stats

    def part(micro):
        grads, (nats, stats) = gradient(params, *micro)
        return (grads, nats, select_statistics(stats, per_token=False)), select_statistics(stats, per_token=True)

    def body(total, micro):
        more, per_token = part(micro)
        return jax.tree.map(jnp.add, total, more), per_token

    micro_batches = (tokens, segment_ids)
    shapes, _ = jax.eval_shape(part, jax.tree.map(lambda x: x[0], micro_batches))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (grads, nats, summed), per_token = jax.lax.scan(body, zeros, micro_batches)
    return grads, nats, join_statistics(summed, per_token, stacked)
