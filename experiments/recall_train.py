"""Training and scoring of the recall study: several seeds of one model in one program, many steps a call.

Shapes: S steps of a block, R seeds, B rows of a step, T tokens, A answers of a row, N vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.recall_models import RecallModel, Shape, initial_parameters
from moejax.data.synthetic_tasks import SyntheticTask
from moejax.evals.synthetic import TaskScore, answer_accuracy
from moejax.train import OptimizerConfig, adamw

CLIP = 1.0  # global norm of a gradient


class State(NamedTuple):
    """Every leaf has the seeds first."""

    params: Any
    moments: Any


class Rows(NamedTuple):
    """Rows to train on, [S,R,B,...]; A answers of a row, those beyond its own are not `real`. Logits are taken at answers only."""

    tokens: np.ndarray  # int32 [...,T]
    at: np.ndarray  # int32 [...,A] positions, in order
    targets: np.ndarray  # int32 [...,A]
    real: np.ndarray  # bool [...,A]


def block_of(tasks: Sequence[SyntheticTask], index: int, steps: int, rows: int) -> Rows:
    """[S,R,B,T]: seed r has rows of its own; block `index` is always the same. A is a multiple of 64, that blocks share their program."""
    parts = [task.batch(index, steps * rows) for task in tasks]
    made = jax.tree.map(lambda *x: np.stack([a.reshape(steps, rows, -1) for a in x], axis=1), *parts)
    most = min(-(-int(made.loss_mask.sum(-1).max()) // 64) * 64, made.tokens.shape[-1])
    at = np.argsort(~made.loss_mask, axis=-1, kind="stable")[..., :most].astype(np.int32)
    taken = (np.take_along_axis(x, at, axis=-1) for x in (made.targets, made.loss_mask))
    return Rows(made.tokens, at, *taken)


def blocks(tasks: Sequence[SyntheticTask], count: int, steps: int, rows: int) -> Iterator[Rows]:
    """Blocks 0 ... count - 1, the next one made while the device works on this one."""
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(block_of, tasks, 0, steps, rows)
        for index in range(count):
            block = upcoming.result()
            if index + 1 < count:
                upcoming = pool.submit(block_of, tasks, index + 1, steps, rows)
            yield block


def answers(model: RecallModel, params: Any, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """(cross-entropy, right or not) of every answer, 0 where none is due; [B,A] float32."""
    logits: Any = model.apply({"params": params}, rows.tokens, rows.at)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, rows.targets)
    right = jnp.argmax(logits, axis=-1) == rows.targets
    return jnp.where(rows.real, loss, 0), jnp.where(rows.real, right, False).astype(jnp.float32)


def make_train_block(shape: Shape, config: OptimizerConfig) -> Callable:
    """train_block(state, block) -> (state, {"loss", "accuracy", "norm"} [S,R] of each step before its update). Donates the state."""
    model, optimizer = RecallModel(shape), adamw(config)

    def loss_of(params, rows):
        loss, right = answers(model, params, rows)
        count = jnp.maximum(rows.real.sum(), 1)
        return loss.sum() / count, right.sum() / count

    def step(state: State, rows: Rows):
        (loss, accuracy), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params, rows)
        norm = optax.tree.norm(gradients)
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP / jnp.maximum(norm, 1e-12)), gradients)
        updates, moments = optimizer.update(gradients, state.moments, state.params)
        return State(optax.apply_updates(state.params, updates), moments), {"loss": loss, "accuracy": accuracy, "norm": norm}

    return jax.jit(lambda state, block: jax.lax.scan(jax.vmap(step), state, block), donate_argnums=0)


def initial_state(shape: Shape, config: OptimizerConfig, seeds: list[int]) -> State:
    def one(key):
        params = initial_parameters(shape, key)
        return State(params, adamw(config).init(params))

    return jax.jit(jax.vmap(one))(jnp.stack([jax.random.key(seed) for seed in seeds]))


@dataclasses.dataclass
class Trained:
    """Parameters with the seeds first, and the course of the training."""

    params: Any
    accuracy: np.ndarray  # [steps,R], of fresh rows, before each update
    step_s: float | None
    """A step of all seeds, without the first block of each; None with one block."""


def train(
    shape: Shape,
    config: OptimizerConfig,
    tasks: Sequence[SyntheticTask],
    *,
    batch: int,
    block: int,
    together: int | None = None,
    state: State | None = None,
    on_block: Callable[[int, int, dict[str, list[float]]], None] = lambda seed, step, means: None,
) -> Trained:
    """Train one model a task for config.total_steps, a multiple of `block`. All have one program, which takes `together` at a time.

    Model r starts from seed r, or from its part of `state`, which is used up. together: a divisor of the number of tasks; None: all.
    on_block(first seed of those that train, step, mean of each metric a seed).
    Raises FloatingPointError, with seed and step, when a loss or gradient is not finite: nothing that follows would mean anything."""
    together = len(tasks) if together is None else together
    if together < 1 or len(tasks) % together:
        raise ValueError(f"together={together}; it must divide the number of models, {len(tasks)}.")
    train_block = make_train_block(shape, config)
    done: list[Trained] = []
    for first in range(0, len(tasks), together):
        seeds = list(range(first, first + together))
        if state is None:
            begin = initial_state(shape, config, seeds)
        else:
            begin = jax.tree.map(lambda x, at=slice(first, first + together): x[at], state)
        report = lambda step, means, first=first: on_block(first, step, means)
        done.append(_train_some(train_block, begin, tasks[first : first + together], config.total_steps // block, block, batch, report))
    steps_s = [one.step_s for one in done if one.step_s is not None]
    return Trained(
        jax.tree.map(lambda *x: jnp.concatenate(x), *(one.params for one in done)),
        np.concatenate([one.accuracy for one in done], axis=1),
        step_s=sum(steps_s) if steps_s else None,
    )


def _train_some(train_block, state: State, tasks, count: int, block: int, batch: int, report) -> Trained:
    """The models of `state`, which has the seeds first, in one program."""
    accuracy, seconds = [], []
    for index, rows in enumerate(blocks(tasks, count, block, batch)):
        rows, start = jax.block_until_ready(jax.device_put(rows)), time.perf_counter()
        state, metrics = train_block(state, rows)
        metrics = jax.tree.map(np.asarray, metrics)
        seconds.append(time.perf_counter() - start)
        accuracy.append(metrics["accuracy"])
        bad = np.argwhere(~(np.isfinite(metrics["loss"]) & np.isfinite(metrics["norm"])))
        if len(bad):
            step, model = bad[0]
            raise FloatingPointError(f"step {index * block + step + 1} of seed {tasks[model].seed}: loss or gradient is not finite.")
        report((index + 1) * block, {name: values.mean(axis=0).tolist() for name, values in metrics.items()})
    return Trained(state.params, np.concatenate(accuracy), float(np.mean(seconds[1:])) / block if count > 1 else None)


def score(shape: Shape, params: Any, task: SyntheticTask, *, rows: int, calls: int) -> list[TaskScore]:
    """Each model of `params` (seeds first) on the same `calls` batches of `rows` rows; one program."""
    model = RecallModel(shape)

    def predict(params, tokens, at):
        logits: Any = model.apply({"params": params}, tokens, at)
        return jnp.argmax(logits, axis=-1)

    program = jax.jit(predict)
    params = jax.device_get(params)  # cut on the host: a slice on the device would compile for every shape
    seeds = [jax.device_put(jax.tree.map(lambda x, r=r: x[r], params)) for r in range(len(jax.tree.leaves(params)[0]))]
    return [answer_accuracy(functools.partial(program, one), task, rows=rows * calls, batch=rows) for one in seeds]
