"""The recall study in small: what the delta rule and the initial gate bias are for, the control without a delta rule, the commands."""

import dataclasses
import functools
import json
import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import recall, recall_picture, recall_suite
from experiments.recall_models import decayed_attention, initial_parameters
from experiments.recall_train import block_of, initial_state, score, train

SMALL = recall.Study(
    task="stack",
    mixers=("kda",),
    steps=90,
    batch=32,
    block=30,
    layers=1,
    width=32,
    heads=1,
    head_dim=16,
    length=48,
    stacks=8,
    elements=14,
    learning_rate=1e-2,
)
DELTA = dataclasses.replace(SMALL, steps=150, block=50, width=64, length=60, stacks=16, elements=62)


def accuracies(trained, study, mixers):
    task = study.make_task(recall.EVAL_SEED)
    scores = score(study.shape(mixers, task), trained.params, task, rows=128, calls=2)
    return [one.accuracy for one in scores], scores[0].copy_last


def test_the_initial_gate_bias_decides():
    """Three seeds each, in one program: only their start differs. A bias of 0 forgets within a token, and stays below copying."""
    tasks = [SMALL.make_task(seed) for seed in range(3)]
    optimizer = SMALL.optimizer()
    shape, control = (SMALL.shape(mixers, tasks[0]) for mixers in ("kda", "kda_zero_bias"))
    both = jax.tree.map(lambda *x: jnp.concatenate(x), *(initial_state(s, optimizer, [0, 1, 2]) for s in (shape, control)))
    trained = train(shape, optimizer, tasks * 2, batch=SMALL.batch, block=SMALL.block, state=both)
    found, copy = accuracies(trained, SMALL, "kda")
    print(f"default bias {found[:3]}, zero bias {found[3:]}, copy of the last element {copy}")
    assert min(found[:3]) > max(*found[3:], copy) + 0.2


@pytest.mark.slow
def test_delta_rule():
    """Three seeds each, the same rows and steps: 16 stacks of 62 elements, heads of 16 channels."""
    tasks = [DELTA.make_task(seed) for seed in range(3)]
    found = {}
    for mixers in ("kda", "no_delta"):
        trained = train(DELTA.shape(mixers, tasks[0]), DELTA.optimizer(), tasks, batch=DELTA.batch, block=DELTA.block)
        found[mixers], copy = accuracies(trained, DELTA, mixers)
    print(f"{found}, copy of the last element {copy}")
    assert min(found["kda"]) > copy + 0.3
    assert statistics.mean(found["kda"]) > statistics.mean(found["no_delta"]) + 0.1


def test_a_zero_bias_is_the_only_difference():
    shape = SMALL.shape("kda", SMALL.make_task(0))
    names = ("kda", "kda_zero_bias")
    kda, control = jax.jit(lambda key: [initial_parameters(dataclasses.replace(shape, mixers=(n,)), key) for n in names])(jax.random.key(0))
    differ = jax.tree.map(lambda a, b: bool(np.any(a != b)), kda, control)
    assert differ["mixer_0"].pop("dt_bias") and not any(jax.tree.leaves(differ))
    assert not np.any(control["mixer_0"]["dt_bias"])


def test_no_delta_equals_its_recurrence(x64):
    """Value and every gradient in float64 against the recurrence token by token, decays from almost none to 60 nats a token."""
    rng, tokens = np.random.default_rng(0), 17
    q, k, v = (jnp.asarray(rng.normal(size=(2, tokens, 3, 4))) for _ in range(3))
    g = jnp.asarray(-np.exp(rng.uniform(-8, np.log(60), size=(2, tokens, 3))))
    operands = (q, k, v, g, jnp.asarray(rng.uniform(size=(2, tokens, 3))))

    def recurrence(q, k, v, g, beta):
        def step(state, now):
            q, k, v, g, beta = now
            state = jnp.exp(g)[..., None, None] * state + beta[..., None, None] * k[..., None] * v[..., None, :]
            return state, jnp.einsum("bhk,bhkv->bhv", q, state) * q.shape[-1] ** -0.5

        moved = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta))
        return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((2, 3, 4, 4)), moved)[1], 0, 1)

    direction = jnp.asarray(rng.normal(size=v.shape))
    both = [jax.vjp(function, *operands) for function in (decayed_attention, recurrence)]
    for got, wanted in zip(*((value, *pull(direction)) for value, pull in both), strict=True):
        assert np.max(np.abs(got - wanted)) <= 1e-12 * np.max(np.abs(wanted))


def test_no_delta_never_reads_the_future():
    rng = np.random.default_rng(1)
    operands = [jnp.asarray(rng.normal(size=(1, 9, 2, 4)), jnp.float32) for _ in range(3)]
    operands += [-jnp.exp(jnp.asarray(rng.normal(size=(1, 9, 2)), jnp.float32)) for _ in range(2)]
    later = [x.at[:, 5:].add(3.0) for x in operands[:3]] + [x.at[:, 5:].multiply(200.0) for x in operands[3:]]
    run = jax.jit(decayed_attention)
    assert np.array_equal(run(*operands)[:, :5], run(*later)[:, :5]) and np.all(np.isfinite(run(*later)))


def test_seeds_have_rows_of_their_own_and_blocks_follow():
    tasks = [SMALL.make_task(seed) for seed in (0, 1)]
    block = block_of(tasks, 1, 2, 3)
    assert block.tokens.shape == (2, 2, 3, 48)
    made = tasks[1].batch(1, 6)
    wanted = made.tokens.reshape(2, 3, 48)
    assert np.array_equal(block.tokens[:, 1], wanted) and not np.array_equal(block.tokens[:, 0], wanted)
    at, targets, real = (x[:, 1].reshape(6, -1) for x in block[1:])
    for row in range(6):  # exactly the answers, in order
        assert np.array_equal(at[row][real[row]], np.flatnonzero(made.loss_mask[row]))
        assert np.array_equal(targets[row][real[row]], made.targets[row][made.loss_mask[row]])


TINY = dataclasses.replace(SMALL, steps=2, block=1, batch=2, width=16, eval_rows=2, eval_calls=1, seeds=2)


@pytest.mark.slow  # 20 s, nearly all of it compiling; the parts have tests of their own
def test_command(tmp_path):
    """Hybrid layers, lengths with and without interpolation, files, table, pictures."""
    settings = dict(task="recall", mixers=("no_delta,mla_rotary",), layers=2, length=32, pairs=2, vocab_size=16, stacks=None, elements=None)
    study = dataclasses.replace(TINY, **settings, eval_lengths=(32, 64), out=tmp_path)
    (run,) = recall.main(study)
    assert [(s["length"], s["rotary_scale"]) for s in run["scores"]] == [(32, 1.0), (64, 1.0), (64, 2.0)]
    assert run["chance"] == 2 / 16 and len(run["accuracy"]) == 2 and run["scores"][0]["answers"] == 4
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == [json.loads(json.dumps(run))]
    events = [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["block"] * 2 + ["score"] * 3
    assert any("positions / 2" in line for line in recall.table([run]))
    recall_picture.main(recall_picture.Picture((tmp_path / "results.json",), tmp_path))
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("recall.png", "extrapolation.png"))


def test_suite_runs_what_fits(tmp_path):
    """One model ends, one fails, one outlasts the budget, one is not started: all four stand in what is reported."""
    _, study = recall_suite.studies(recall_suite.Suite(out=tmp_path))[0]
    block, events = {"event": "block", "seed": 0, "step": 7, "accuracy": [0.5]}, tmp_path / "recall.jsonl"

    def run(study, mixers, record):
        record(block)
        return {"status": "done"}

    def fails(study, mixers, record):
        raise FloatingPointError("step 3 of seed 1: loss or gradient is not finite.")

    later = time.monotonic() + 60
    assert recall_suite.run_within(study, events, later, 1, run) == {"status": "done"} and json.loads(events.read_text()) == block
    failed = recall_suite.run_within(study, events, later, 1, fails)
    assert failed["status"] == "failed" and "FloatingPointError: step 3 of seed 1" in failed["reason"] and "fails" in failed["traceback"]
    stopped = recall_suite.run_within(study, events, time.monotonic(), -1, run)
    assert stopped["status"] == "stopped" and "after step 7 of seed 0 its training accuracy was [0.5]" in stopped["reason"]
    score = {"event": "score", "length": 256, "accuracy": [1.0]}
    scored = recall_suite.run_within(study, events, time.monotonic(), -1, lambda study, mixers, record: record(score))
    assert scored["status"] == "stopped" and scored["scores"] == [score]  # what was scored in time is kept
    skipped = recall_suite.run_within(study, events, time.monotonic() + 2, 5, run)
    assert skipped["status"] == "skipped" and skipped["task"] == "mqar" and len(recall.table([skipped, stopped, failed])) == 5


def test_suite_outlives_a_model_that_dies():
    """A process that is killed is a failed model with its name, not the end of the suite."""
    died = recall_suite.in_a_process(functools.partial(os._exit, 9), TINY)
    assert died["status"] == "failed" and "BrokenProcessPool" in died["reason"] and died["mixers"] == "kda"
    assert recall_suite.in_a_process(functools.partial(dict, status="done"), TINY) == {"status": "done"}


def test_one_program_for_seeds_one_by_one():
    """The same models as all at once, up to what a program of another shape rounds differently."""
    tasks = [TINY.make_task(seed) for seed in range(2)]
    shape, seen = TINY.shape("no_delta", tasks[0]), []
    options = dict(batch=TINY.batch, block=TINY.block)
    each = train(shape, TINY.optimizer(), tasks, **options, together=1, on_block=lambda seed, step, means: seen.append((seed, step)))
    both = train(shape, TINY.optimizer(), tasks, **options)
    assert seen == [(seed, step) for seed in (0, 1) for step in range(TINY.block, TINY.steps + 1, TINY.block)]
    assert each.accuracy.shape == both.accuracy.shape == (TINY.steps, 2)
    for a, b in zip(jax.tree.leaves(each.params), jax.tree.leaves(both.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_training_that_is_not_finite_ends():
    tasks = [TINY.make_task(seed) for seed in (4, 5)]
    shape = TINY.shape("no_delta", tasks[0])
    state = initial_state(shape, TINY.optimizer(), [4, 5])
    embedding = state.params["embedding"].at[1].set(jnp.nan)
    state = state._replace(params=state.params | {"embedding": embedding})
    with pytest.raises(FloatingPointError, match="step 1 of seed 5"):
        train(shape, TINY.optimizer(), tasks, batch=TINY.batch, block=TINY.block, state=state)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 100}, "no multiple of --block 30"),
        ({"batch": 0}, "--batch is 0"),
        ({"together": 2}, "--together 2 does not divide --seeds 3"),
        ({"pairs": 4}, "--pairs is not read by --task stack"),
        ({"eval_lengths": (96,)}, "--eval-lengths is of --task recall"),
        ({"mixers": ("mamba",)}, "mixer 'mamba'; there are kda"),
        ({"mixers": ("kda,mla",)}, "2 names for 1 layers"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
