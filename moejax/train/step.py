"""The train step and the evaluation step: pure functions for the caller to jit.

Shapes: M micro-batches, B rows, T tokens, G = domains x position buckets. A batch is {"tokens": int32 [B,T] or [M,B,T],
"segment_ids": the same shape}, and what else `moejax.train.batch` names.
"""

from __future__ import annotations

import dataclasses
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
from .batch import POSITION_BUCKETS, Batch, Targets, as_micro_batches, check_batch, read_targets
from .loss import chunked_cross_entropy
from .optimizers import widened
from .qk_clip import qk_clip as clip_queries_and_keys
from .state import TrainState

Metrics = dict[str, jax.Array]


def make_train_step(
    model: HybridLM,
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: float | None = 1.0,
    loss_chunk: int = 1024,
    domains: int = 0,
    qk_clip: float | None = None,
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
      domains: how many domains the batch's "domains" number; the metrics then have loss_groups and token_groups [G] float32: nats and
        targets of each domain at each range of positions (index domain * 21 + floor(log2(position))). 0: not asked.
      qk_clip: after the update, shrink the query and key weights of each MLA head whose largest attention logit in this step
        exceeded it (`moejax.train.qk_clip`; Kimi K2 and K3: 100). It costs a second product of queries and keys in the forward. None: not.

    Returns:
      The step. Metrics: loss, tokens, grad_norm, skipped (this step: 0 or 1), updates (made before it: where the schedule stood), per
      MoE layer [L] the figures of `moejax.train.balance.balance_metrics`, and with qk_clip max_logit [], the largest of all heads.

    Raises:
      ValueError: clip_norm or qk_clip not positive, domains negative, qk_clip for a model without MLA, or a model with packed experts
        (expert_weights="mxfp4"), which are read-only.
    """
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}; it must be positive, or None for no clipping.")
    config = model.config
    loss_chunk = _over_devices(model, loss_chunk)
    _check_domains(domains)
    if qk_clip is not None and not (qk_clip > 0 and "M" in config.mixers):
        raise ValueError(f"qk_clip is {qk_clip} for layers {config.pattern!r}; it must be positive, for a model with MLA layers, or None.")
    if config.moe.expert_weights == "mxfp4":
        raise ValueError(
            "MoEConfig.expert_weights is 'mxfp4': packed experts are read-only and cannot be trained. Load the checkpoint "
            "unpacked and set expert_weights='mxfp4_qat' (or 'float')."
        )
    stacked = config.residual != "full"

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        check_batch(batch)
        batch = as_micro_batches(batch)
        count = jnp.sum(read_targets(_flat(batch), 0).valid)
        scale = 1.0 / jnp.maximum(count, 1)

        def objective(params, micro):
            read = read_targets(micro, domains)
            sums, aux, stats, logits = _forward(model, params, state.router_state, micro, read, loss_chunk, domains, qk_clip is not None)
            weight = jnp.sum(read.valid) * scale
            total = sums[0] * scale + state.balance.aux_coefficient * aux * weight
            return total, (sums, stats, logits)

        grads, (nats, groups), stats, logits = _accumulate(objective, state.params, batch, stacked)
        loss = nats * scale
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(grads)
            if clip_norm is not None:
                shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-12))
                grads = jax.tree.map(lambda g: g * shrink, grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            if qk_clip is not None:
                params = clip_queries_and_keys(params, logits, qk_clip)
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
        updates_before = state.step - state.skipped
        state = dataclasses.replace(
            state, step=state.step + 1, params=params, opt_state=opt_state, router_state=router_state, skipped=state.skipped + skipped
        )
        metrics = {"loss": loss, "tokens": count, "grad_norm": norm, "skipped": skipped, "updates": updates_before}
        if qk_clip is not None:
            metrics["max_logit"] = jnp.max(jnp.stack([jnp.max(x) for x in jax.tree.leaves(logits)]))
        if domains:
            metrics |= {"loss_groups": groups[0], "token_groups": groups[1]}
        return state, metrics | balance_metrics(config, stats, router_state)

    return step


def make_eval_step(model: HybridLM, *, loss_chunk: int = 1024, domains: int = 0) -> Callable[[TrainState, Batch], Metrics]:
    """Build evaluate(state, batch) -> {"loss_sum": nats, "tokens": count}; with `domains` also loss_groups and token_groups [G].

    The router counts nothing and stays as it is.
    """
    loss_chunk = _over_devices(model, loss_chunk)
    _check_domains(domains)

    def evaluate(state: TrainState, batch: Batch) -> Metrics:
        check_batch(batch)
        batch = _flat(as_micro_batches(batch))
        read = read_targets(batch, domains)
        variables = {"params": state.params, "router_state": state.router_state}
        hidden = model.apply(variables, batch["tokens"], batch["segment_ids"], return_hidden=True)
        nats, groups = _cross_entropy(hidden, state.params["head"], read, loss_chunk, domains)
        metrics = {"loss_sum": nats, "tokens": jnp.sum(read.valid)}
        return metrics | ({"loss_groups": groups[0], "token_groups": groups[1]} if domains else {})

    return evaluate


def _check_domains(domains: int) -> None:
    if domains < 0:
        raise ValueError(f"domains is {domains}; it must be the number of domains, or 0 for no loss by domain.")


def _over_devices(model: HybridLM, loss_chunk: int) -> int:
    """Tokens of a chunk over all devices that share the tokens."""
    return loss_chunk if model.parallel is None else loss_chunk * model.parallel.size("batch") * model.parallel.size("time")


def _flat(batch: Batch) -> Batch:
    """[M,B,T] -> [M*B,T]."""
    return {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items()}


def _forward(model, params, router_state, micro, read: Targets, loss_chunk, domains, logits: bool) -> tuple[Any, ...]:
    """-> (summed nats, sums by group), balancing loss, routing statistics, largest attention logits (empty unless `logits`)."""
    variables = {"params": params, "router_state": router_state}
    mutable = ["router_stats", *(["attention_stats"] if logits else [])]
    hidden, written = model.apply(variables, micro["tokens"], micro["segment_ids"], return_hidden=True, mutable=mutable)
    stats = written.get("router_stats", {})
    sums = _cross_entropy(hidden, params["head"], read, loss_chunk, domains)
    return sums, stats.get("aux_loss_total", 0.0), by_layer(stats), written.get("attention_stats", {})


def _cross_entropy(hidden, head, read: Targets, chunk: int, domains: int) -> tuple[jax.Array, Any]:
    """-> summed nats, [2,G] nats and targets by group (None when not asked)."""
    hidden, targets, valid = hidden.reshape(-1, hidden.shape[-1]), read.targets.reshape(-1), read.valid.reshape(-1)
    if read.groups is None:
        return chunked_cross_entropy(hidden, head, targets, valid, chunk=chunk), None
    size = domains * POSITION_BUCKETS
    return chunked_cross_entropy(hidden, head, targets, valid, chunk=chunk, groups=read.groups.reshape(-1), num_groups=size)


def _accumulate(objective, params, batch: Batch, stacked: bool) -> tuple[Any, Any, Statistics, Any]:
    """Gradients, sums of the loss, statistics and largest logits of all micro-batches: summed, except per-token statistics, which are
    joined, and logits, of which the largest remain."""

    def gradient(*arguments):
        grads, aux = jax.grad(objective, has_aux=True)(*arguments)
        return widened(grads), aux  # sums and norms of bfloat16 gradients keep 8 bits

    if batch["tokens"].shape[0] == 1:
        grads, (sums, stats, logits) = gradient(params, jax.tree.map(lambda x: x[0], batch))
        return grads, sums, stats, logits

    def part(micro):
        grads, (sums, stats, logits) = gradient(params, micro)
        return (grads, sums, select_statistics(stats, per_token=False)), (select_statistics(stats, per_token=True), logits)

    def body(total, micro):
        more, apart = part(micro)
        return jax.tree.map(jnp.add, total, more), apart

    shapes, _ = jax.eval_shape(part, jax.tree.map(lambda x: x[0], batch))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    (grads, sums, summed), (per_token, logits) = jax.lax.scan(body, zeros, batch)
    return grads, sums, join_statistics(summed, per_token, stacked), jax.tree.map(lambda x: jnp.max(x, axis=0), logits)
