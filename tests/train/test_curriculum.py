"""Curricula: what they refuse, where a step falls, and that nothing but the sequence length changes at a seam."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from moejax import HybridLM
from moejax.data.mixture import Mixture
from moejax.data.sources import TokenSource
from moejax.data.stream import DataStream
from moejax.train import OptimizerConfig, adamw, cosine_schedule, init_state, make_train_step
from moejax.train.checkpoint import Checkpointer
from moejax.train.curriculum import Curriculum, Stage, demo, from_steps, k3, length_name

SHORT = Stage("short", 16, 64 * 3, 64, {"text": 0.7, "facts": 0.3})
LONG = Stage("long", 32, 64 * 2, 64, {"facts": 1.0})
TWO = Curriculum((SHORT, LONG))


def changed(stage=SHORT, **fields):
    return lambda: dataclasses.replace(stage, **fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (changed(batch_tokens=72), "batch_tokens is 72, no multiple of context_length = 16.*64 or 80"),
        (changed(tokens=100), "tokens is 100, no multiple of batch_tokens = 64.*64 or 128"),
        (changed(tokens=3), "tokens is 3, no multiple of batch_tokens = 64.*: 64"),
        (changed(context_length=1), "context_length is 1; it must be at least 2"),
        (changed(context_length=16.0), "context_length is 16.0; it must be an integer"),
        (changed(tokens=True), "tokens is True; it must be an integer"),
        (changed(mixture={}), "mixture is empty"),
        (changed(mixture={"text": 0.0}), "weight of 'text' is 0.0; it must be positive. Leave out"),
        (changed(mixture={"text": float("nan")}), "weight of 'text' is nan"),
        (changed(packing="tight"), "packing is 'tight'; allowed: first_fit, best_fit, concat_split, one_doc"),
        (changed(rope_scale=0.0), "rope_scale is 0.0; it must be positive"),
        (changed(min_doc_tokens={"prose": 8}), "min_doc_tokens names 'prose', which is not in the mixture"),
        (changed(min_doc_tokens={"text": 0}), r"min_doc_tokens\['text'\] is 0"),
        (changed(eval_lengths=(64, 0)), "eval_lengths is 0"),
        (changed(name=""), "name ''"),
        (lambda: Curriculum(()), "at least one stage"),
        (lambda: Curriculum((SHORT, dataclasses.replace(LONG, name="short"))), "two stages are called 'short'"),
        (lambda: Curriculum((SHORT, dataclasses.replace(LONG, batch_tokens=32))), "batch_tokens differ .short: 64, long: 32."),
        (lambda: TWO.at(-1), "step -1 is outside the curriculum of 5 steps"),
        (lambda: TWO.at(6), "step 6 is outside the curriculum of 5 steps"),
        (lambda: TWO.check(4), "stage 'long' has 2 rows a step .64 tokens / 32., which 4 data-parallel shards do not divide.*128"),
        (lambda: TWO.check(0), "rows_divisor is 0"),
        (lambda: Stage.from_dict(SHORT.to_dict() | {"colour": 1}), "unknown or missing: colour"),
        (lambda: Stage.from_dict({"name": "a"}), "unknown or missing: batch_tokens, context_length, mixture, tokens"),
        (lambda: Curriculum.from_dict({}), "one field 'stages'; given: none"),
        (lambda: from_steps((8, 16), ({"a": 1},), total_steps=2, batch_tokens=16, shares=(1, 1)), "2 contexts, 1 mixtures, 2 shares"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_step_has_its_place():
    """Steps are proportional to tokens, every token is counted once, and a seam is the first place of the next stage."""
    places = [TWO.at(step) for step in range(6)]
    assert [(p.index, p.step_in_stage, p.first_step) for p in places] == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (1, 0, 3), (1, 1, 3), (1, 2, 3)]
    assert [p.tokens_seen for p in places] == [0, 64, 128, 192, 256, 320]
    assert TWO.total_tokens == 320 and TWO.total_steps == 5 and TWO.seams() == (3,)
    assert [stage.rows for stage in TWO.stages] == [4, 2]
    assert (
        SHORT.shares == pytest.approx({"text": 0.7, "facts": 0.3})
        and dataclasses.replace(SHORT, mixture={"a": 3, "b": 1}).shares["a"] == 0.75
    )
    TWO.check(2)


def test_one_schedule_over_all_tokens():
    """The learning rate is a function of tokens seen: the same whether the tokens come in one stage or in four."""
    curriculum = demo()
    whole = cosine_schedule(OptimizerConfig(total_steps=curriculum.total_steps))
    single = Curriculum((dataclasses.replace(curriculum.stages[-1], tokens=curriculum.total_tokens),))
    again = cosine_schedule(OptimizerConfig(total_steps=single.total_steps))
    for step in (0, 1, *curriculum.seams(), curriculum.total_steps - 1):
        assert float(whole(step)) == float(again(step))
        assert curriculum.at(step).tokens_seen == single.at(step).tokens_seen


@pytest.mark.parametrize("curriculum", [k3(), demo(), demo(shortest=64, total_steps=37)])
def test_presets(curriculum):
    """Lengths 1 : 8 : 32 : 128, tokens 60/20/12/8%, at least a quarter short or recalled data in every stage, JSON both ways."""
    lengths = [stage.context_length for stage in curriculum.stages]
    assert [length / lengths[0] for length in lengths] == [1, 8, 32, 128]
    shares = [stage.tokens / curriculum.total_tokens for stage in curriculum.stages]
    assert shares == pytest.approx([0.6, 0.2, 0.12, 0.08], abs=1 / curriculum.total_steps)
    for stage in curriculum.stages:
        assert stage.rows >= 1 and sum(stage.shares.values()) == pytest.approx(1)
        assert stage.shares.get("long", 0) <= 0.75
    again = Curriculum.from_dict(json.loads(json.dumps(curriculum.to_dict())))
    assert again == curriculum and again.fingerprint() == curriculum.fingerprint()


def test_k3_lengths():
    assert [stage.name for stage in k3().stages] == ["8K", "64K", "256K", "1M"]
    assert [length_name(n) for n in (100, 1536, 3 << 20)] == ["100", "1536", "3M"]
    k3().check(64)


def test_fingerprint_sees_the_data_only():
    changes = [
        {"packing": "one_doc"},
        {"mixture": {"facts": 1.0, "text": 1.0}},
        {"tokens": 192},
        {"rope_scale": 2.0},
        {"min_doc_tokens": {"facts": 2}},
    ]
    prints = [Curriculum((SHORT, dataclasses.replace(LONG, **change))).fingerprint() for change in changes]
    assert len({TWO.fingerprint(), *prints}) == 6
    assert Curriculum((SHORT, dataclasses.replace(LONG, eval_lengths=(8,)))).fingerprint() == TWO.fingerprint()
    # JSON may hand mixtures back in another order of keys: the same data
    assert dataclasses.replace(SHORT, mixture=dict(reversed(SHORT.mixture.items()))).to_dict() == SHORT.to_dict()


def test_position_in_a_checkpoint():
    saved = json.loads(json.dumps(TWO.position(4)))
    assert saved == {"curriculum": TWO.fingerprint(), "stage": 1, "stage_name": "long", "step_in_stage": 1, "tokens_seen": 256}
    TWO.check_position(saved, 4)
    other = Curriculum((SHORT, dataclasses.replace(LONG, mixture={"text": 1.0})))
    with pytest.raises(ValueError, match=r"another curriculum.*\n.*curriculum: saved"):
        other.check_position(saved, 4)
    with pytest.raises(ValueError, match=r"step_in_stage: saved 1, here 0\n.*tokens_seen: saved 256, here 192"):
        TWO.check_position(saved, 3)


def test_interpolation_needs_rotary_positions(toy):
    """rope_scale reaches the model as rotary_scale, is refused where nothing would read it, and divides positions."""
    stretched = Curriculum((SHORT, dataclasses.replace(LONG, rope_scale=2.0)))
    TWO.check_model(toy)
    with pytest.raises(ValueError, match=r"stage 'long': rope_scale is 2.0, but the model's MLA has positions = 'none'"):
        stretched.check_model(toy)
    turned = toy.replace(mla={"positions": "rotary"})
    stretched.check_model(turned)
    assert SHORT.model(turned) is turned and stretched.stages[1].model(turned).mla.rotary_scale == 2.0
    with pytest.raises(ValueError, match=r"the model has rotary_scale = 4.0; give one"):
        stretched.check_model(toy.replace(mla={"positions": "rotary", "rotary_scale": 4.0}))


class Run:
    """`TWO` on one layer, KDA and experts, up to its seam: everything that may not change there."""

    def __init__(self, config):
        self.model = HybridLM(config)
        optimizer = adamw(OptimizerConfig(learning_rate=1e-2, total_steps=TWO.total_steps))
        self.step = jax.jit(make_train_step(self.model, optimizer))
        state = jax.jit(lambda key: init_state(self.model, optimizer, key))(jax.random.key(0))
        rng = np.random.default_rng(0)
        documents = {name: [rng.integers(0, 64, n) for n in rng.integers(3, 30, 40)] for name in ("text", "facts")}
        self.sources = [TokenSource(name, documents[name]) for name in documents]
        self.mixtures = [Mixture(self.sources, stage.mixture) for stage in TWO.stages]
        self.stream = DataStream(self.mixtures[0], context=SHORT.context_length, rows=SHORT.rows, packing=SHORT.packing, seed=3)
        self.consumed = []
        for _ in range(SHORT.steps):
            batch, _ = next(self.stream)
            self.consumed.append(batch)
            state, _ = self.step(state, batch)
        self.state = state


@pytest.fixture(scope="module")
def run(toy):
    return Run(toy.replace(layers=1, pattern="K", dense_layers=0, residual="plain"))


def rows_of(documents, layout):
    """Documents of 16 tokens as a stream gives them: layout 1 puts one in each row of 16, 2 two in each row of 32."""
    mixture = Mixture([TokenSource("text", documents)])
    batch, _ = next(DataStream(mixture, context=16 * layout, rows=len(documents) // layout, repeat=False))
    assert batch["segment_ids"].max() == layout and batch["segment_ids"].min() == 1
    return batch


@pytest.fixture(scope="module")
def documents():
    return list(np.random.default_rng(5).integers(0, 64, (4, 16)))


@pytest.fixture(scope="module")
def both(run, documents):
    """The step after the seam on the same documents, in the rows of the stage that ends and in those of the next."""
    return run.step(run.state, rows_of(documents, 1)), run.step(run.state, rows_of(documents, 2))


def test_same_documents_same_loss_on_both_sides_of_a_seam(both):
    """The state at a stage's end scores the same documents alike in the rows of that stage and of the next."""
    (_, before), (_, after) = both
    assert int(before["tokens"]) == int(after["tokens"]) == 4 * 15
    np.testing.assert_allclose(after["loss"], before["loss"], rtol=2e-6)
    np.testing.assert_allclose(after["grad_norm"], before["grad_norm"], rtol=2e-5)


def test_only_the_length_changes_at_a_seam(run, both):
    """The step is the same in long rows: parameters, moments, router bias, counts, and the learning rate they imply.

    Adam divides by the root of the second moment, so a gradient of rounding size may move its parameter by the whole rate:
    each array's movement is compared as a whole.
    """
    (short, _), (long, _) = both
    assert int(short.step) == int(long.step) == SHORT.steps + 1 and int(long.skipped) == 0
    counts = [leaf for leaf in jax.tree.leaves(long.opt_state) if leaf.ndim == 0]
    assert counts and all(int(count) == SHORT.steps + 1 for count in counts)  # Adam's and the schedule's: not started anew
    for a, b in zip(jax.tree.leaves(short.opt_state), jax.tree.leaves(long.opt_state), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * float(np.abs(a).max()) + 1e-12)
    for a, b in zip(jax.tree.leaves(short.router_state), jax.tree.leaves(long.router_state), strict=True):
        assert np.any(np.asarray(a)) and float(np.abs(np.asarray(a) - np.asarray(b)).max()) < 2e-3  # a bin of the histogram is 1e-3 wide
    moved = [
        float(np.linalg.norm(np.asarray(a - b)) / np.linalg.norm(np.asarray(a - before)))
        for a, b, before in zip(*map(jax.tree.leaves, (short.params, long.params, run.state.params)), strict=True)
        if np.any(np.asarray(a - before))
    ]
    assert len(moved) > 15 and max(moved) < 1e-2, max(moved)


def test_data_go_on_at_a_seam(run):
    """Cursors and totals carry over, nothing is read twice and nothing dropped: a switch moves no document."""
    before = run.stream.state()
    second = run.stream.switch(context=LONG.context_length, mixture=run.mixtures[1], rows=LONG.rows)
    after = second.state()
    assert after["cursors"] == before["cursors"] and sum(before["cursors"].values()) > 0
    assert after["tokens"] == before["tokens"] and after["drawn_tokens"] == before["drawn_tokens"]
    batches = [*run.consumed]
    for _ in range(LONG.steps):
        batch, state = next(second)
        batches.append(batch)
        assert batch["tokens"].shape == (LONG.rows, LONG.context_length)
    assert second.metrics()["dropped_tokens"] == 0
    assert state["cursors"]["text"] == before["cursors"]["text"]  # the long stage draws facts only
    given = {
        name: np.concatenate([b["tokens"][(b["domains"] == i) & (b["segment_ids"] > 0)] for b in batches])
        for i, name in enumerate(("text", "facts"))
    }
    for source in run.sources:
        drawn = state["cursors"][source.name]
        assert drawn < len(source)  # within the first epoch, so every document came once at the most
        assert np.isin(given[source.name], np.concatenate(source.documents)).all()
        assert len(given[source.name]) == state["tokens"][source.name] <= sum(sorted(map(len, source.documents))[-drawn:])


def test_checkpoint_at_a_seam_is_the_state(run, tmp_path):
    """Saved at the end of a stage and restored for the next: bit for bit, with the place in the curriculum beside it."""
    checkpoints = Checkpointer(tmp_path)
    seam = TWO.seams()[0]
    checkpoints.save(seam, run.state, {"curriculum": TWO.position(seam)})
    restored, metadata = checkpoints.restore(jax.eval_shape(lambda: run.state))
    TWO.check_position(metadata["curriculum"], int(restored.step))
    assert TWO.at(int(restored.step)).stage is LONG
    for a, b in zip(jax.tree.leaves(run.state), jax.tree.leaves(restored), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.array_equal(a, b)
