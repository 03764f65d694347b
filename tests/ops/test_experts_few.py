"""Routed experts of a decoding batch: every form against the loop over all experts, extreme routings, masks, packed experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.ops import experts_few
from moejax.ops.activations import swiglu
from moejax.ops.experts import PackedExperts, expert_mlp
from moejax.ops.experts_few import FORMS, few_token_experts, few_token_form, slots_per_round
from moejax.ops.mxfp4 import mxfp4_decode, mxfp4_encode

EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def make(N, k, E=6, L=7, F=5, seed=0, dtype="float32"):
    """(x, experts, weights, w_gate, w_up, w_down); a token's experts differ."""
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(E)[:k] for _ in range(N)])
    weights = jnp.asarray(rng.random((N, k)), "float64" if dtype == "float64" else "float32")
    x, *matrices = (jnp.asarray(rng.normal(size=shape), dtype) for shape in [(N, L), (E, L, F), (E, L, F), (E, F, L)])
    return x, jnp.asarray(experts, jnp.int32), weights, *matrices


def reference(x, experts, weights, *matrices, **options):
    """expert_mlp's loop, in float64."""
    wide = [a.astype(jnp.float64) for a in (x, weights, *matrices)]
    return np.asarray(jax.jit(lambda x, w, *m, **o: expert_mlp(x, experts, w, *m, implementation="reference", **o, **options))(*wide))


def relative(actual, expected):
    return np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()


def run(arguments, **options):
    return jax.jit(lambda *a: few_token_experts(*a, **options))(*arguments)


@EVERY_FORM
@pytest.mark.parametrize(("N", "k", "dtype"), [(1, 1, "float32"), (17, 6, "float64"), (65, 2, "float32"), (130, 3, "float32")])
def test_against_the_loop_over_all_experts(x64, N, k, dtype, form):
    arguments = make(N, k, dtype=dtype)
    got = run(arguments, form=form)
    assert got.dtype == dtype and relative(got, reference(*arguments)) < (1e-13 if dtype == "float64" else 2e-6)


@EVERY_FORM
def test_bfloat16_rounds_where_expert_mlp_does(form):
    """Each product's sum is float32 in both; another order of it can move a bfloat16 output by one place."""
    arguments = make(33, 3, L=24, F=16, dtype="bfloat16")
    got = run(arguments, form=form, activation=swiglu)
    wanted = jax.jit(lambda *a: expert_mlp(*a, activation=swiglu))(*arguments)
    assert got.dtype == jnp.bfloat16 and relative(got, np.asarray(wanted, np.float64)) < 8e-3
    assert np.mean(np.asarray(got == wanted)) > 0.9


@EVERY_FORM
def test_all_tokens_on_one_expert_and_the_same_expert_twice(x64, form, monkeypatch):
    """100 assignments in one queue, which 32 slots serve in four rounds."""
    monkeypatch.setattr(experts_few, "LEAST_SLOTS", 4)
    x, _, weights, *matrices = make(50, 2, E=12)
    assert slots_per_round(50, 2, 12) == 32
    for experts in (jnp.full((50, 2), 5, jnp.int32), jnp.tile(jnp.asarray([[2, 0]], jnp.int32), (50, 1))):
        arguments = (x, experts, weights, *matrices)
        assert relative(run(arguments, form=form), reference(*arguments)) < 2e-6


@EVERY_FORM
def test_masked_tokens_are_never_read_and_give_0(x64, form):
    x, experts, weights, *matrices = make(40, 2)
    mask = jnp.asarray(np.random.default_rng(1).random(40) < 0.6)
    wanted = reference(x, experts, weights, *matrices, mask=mask)
    dirty = (jnp.where(mask[:, None], x, jnp.nan), jnp.where(mask[:, None], experts, 999), jnp.where(mask[:, None], weights, jnp.nan))
    got = run((*dirty, *matrices), form=form, mask=mask)
    assert relative(got, wanted) < 2e-6
    assert not np.any(np.asarray(got)[~np.asarray(mask)])
    empty = run((*dirty, *matrices), form=form, mask=jnp.zeros_like(mask))
    assert not np.any(np.asarray(empty))


@EVERY_FORM
def test_an_expert_that_nobody_chose_may_be_nan(form):
    x, experts, weights, *matrices = make(40, 2)
    experts = jnp.where(experts == 3, 4, experts)
    clean = run((x, experts, weights, *matrices), form=form)
    broken = [m.at[3].set(jnp.nan) for m in matrices]
    np.testing.assert_array_equal(run((x, experts, weights, *broken), form=form), clean)


@EVERY_FORM
def test_a_token_does_not_see_what_the_others_choose(form):
    """All of the first 140 tokens on expert 3 move the others that chose it to the last of its rounds: each keeps its bits."""
    x, experts, weights, *matrices = make(200, 5, E=64, L=24, F=16)
    experts = np.array(experts)
    experts[np.arange(140, 200), np.arange(60) % 5] = 3  # in every column
    even = run((x, jnp.asarray(experts), weights, *matrices), form=form)
    experts[:140] = 3
    skewed = run((x, jnp.asarray(experts), weights, *matrices), form=form)
    np.testing.assert_array_equal(even[140:], skewed[140:])


@EVERY_FORM
def test_rounds_over_tokens_bound_memory(x64, form, monkeypatch):
    arguments = make(37, 3, L=16, F=8)
    budget, expected = {"gather": (5 * 3 * 3 * 16 * 8 * 4, 5), "all": (5 * 3 * 3 * 16 * 8 * 4, 20), "slots": (25_000, 13)}[form]
    monkeypatch.setattr(experts_few, "TEMPORARY_BYTES", budget)
    rows = {"gather": experts_few._gather_rows, "all": experts_few._all_rows, "slots": experts_few._slots_rows}[form]
    assert rows(*arguments[:2], arguments[3:]) == expected
    assert relative(run(arguments, form=form), reference(*arguments)) < 2e-6


def test_slots_keep_their_bits_in_rounds_of_tokens(monkeypatch):
    """Three rounds of 13 tokens, the last one filled up, and tokens that are masked."""
    arguments, mask = make(37, 3, L=16, F=8), jnp.arange(37) % 4 > 0
    whole = run(arguments, form="slots", mask=mask)
    monkeypatch.setattr(experts_few, "TEMPORARY_BYTES", 25_000)
    np.testing.assert_array_equal(run(arguments, form="slots", mask=mask), whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_of_a_prompt_stay_within_the_bound(dtype, monkeypatch):
    """4096 tokens would take 40 MB (float32): with 4 MB they are served in rounds. Argument copies, of 2 MB at most, come on top."""
    N, k, E, L, F = 4096, 8, 64, 64, 32
    number = jax.ShapeDtypeStruct
    others = [number((N, L), dtype), number((N, k), jnp.int32), number((N, k), jnp.float32)]
    matrices = [number(shape, dtype) for shape in [(E, L, F), (E, L, F), (E, F, L)]]
    monkeypatch.setattr(experts_few, "TEMPORARY_BYTES", 2**22)
    lowered = jax.jit(lambda *a: few_token_experts(*a, form="slots")).lower(*others, *matrices)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 2**22 + 2**21


@EVERY_FORM
@pytest.mark.parametrize("budget", [2**30, 3 * 3 * 64 * 32 * 4])
def test_packed_experts_are_decoded_step_by_step(x64, form, budget, monkeypatch):
    """A budget of three float32 experts cuts six of them into two groups."""
    monkeypatch.setattr(experts_few, "TEMPORARY_BYTES", budget)
    x, experts, weights, *matrices = make(21, 2, L=64, F=32)
    packed = [PackedExperts(*mxfp4_encode(m.swapaxes(1, 2))) for m in matrices]
    decoded = [mxfp4_decode(*p).swapaxes(1, 2) for p in packed]
    got = run((x, experts, weights, *packed), form=form)
    assert relative(got, reference(x, experts, weights, *decoded)) < 2e-6


def test_groups_of_packed_experts_never_exist_decoded_together():
    E, L, F = 8, 128, 64
    shapes = [((E, F, L // 2), (E, F, L // 32))] * 2 + [((E, L, F // 2), (E, L, F // 32))]
    packed = [PackedExperts(*(jax.ShapeDtypeStruct(s, jnp.uint8) for s in pair)) for pair in shapes]
    others = [jax.ShapeDtypeStruct(s, d) for s, d in [((2, L), jnp.float32), ((2, 2), jnp.int32), ((2, 2), jnp.float32)]]
    stack = E * 3 * L * F * 4

    def temporary(budget):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts_few, "TEMPORARY_BYTES", budget)
            lowered = jax.jit(lambda *a: few_token_experts(*a, form="all")).lower(*others, *packed)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(stack // E) < stack / 3 < temporary(stack)


def test_experts_over_a_mesh_axis_of_tokens(x64):
    arguments = make(16, 2)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    specs = (P("data"), P("data"), P("data"), P(), P(), P())
    for form in FORMS:
        local = lambda *a, form=form: few_token_experts(*a, form=form)
        got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data")))(*arguments)
        assert relative(got, reference(*arguments)) < 2e-6


def test_choice_counts_bytes():
    assert few_token_form(1, 16, 896).name == "gather"
    assert few_token_form(37, 16, 896).name == "gather" and few_token_form(38, 16, 896).name == "all"
    assert few_token_form(128, 16, 896).name == "all" and few_token_form(129, 16, 896).name == "slots"
    assert few_token_form(1024, 4, 24, expert_flops=6 * 512 * 256).name == "all"  # 1.9e10 operations
    assert few_token_form(1024, 8, 256, expert_flops=1.4e7).name == "slots"  # 3.7e12
    assert few_token_form(4, 16, 112).name == "gather" and few_token_form(5, 16, 112).name == "all"
    assert few_token_form(1, 4, 8, form="slots").reason == "it was named"
    assert slots_per_round(1024, 16, 896) == 64 and slots_per_round(129, 16, 896) == 32 and slots_per_round(20, 16, 896) == 20


def test_bad_input_raises():
    arguments = make(4, 2)
    with pytest.raises(ValueError, match="'blocks'; known: gather, all, slots"):
        few_token_experts(*arguments, form="blocks")
    with pytest.raises(ValueError, match="experts has dtype float32"):
        few_token_experts(arguments[0], arguments[1].astype(jnp.float32), *arguments[2:])
    with pytest.raises(ValueError, match="float16"):
        few_token_experts(arguments[0].astype(jnp.float16), *arguments[1:])
    with pytest.raises(ValueError, match="mask has shape"):
        few_token_experts(*arguments, mask=jnp.ones((3,), bool))


@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 33, 200])
def test_values_on_the_card(N):
    """bfloat16 against float64: relative L2 distance 8e-3 (three rounded products and a rounded output)."""
    arguments = make(N, 4, E=32, L=256, F=128, dtype="bfloat16")
    arguments = (*arguments[:3], *((m * 0.06).astype(m.dtype) for m in arguments[3:]))
    with jax.enable_x64(True):
        wanted = reference(*arguments)
    for form in FORMS:
        far = np.linalg.norm(np.asarray(run(arguments, form=form), np.float64) - wanted) / np.linalg.norm(wanted)
        print(f"N={N} {form}: {far:.1e}")
        assert far <= 8e-3
