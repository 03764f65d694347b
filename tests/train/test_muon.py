"""Per-head Muon: which axes are a matrix, one matrix at a time, optax's arithmetic, state and decay."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax import HybridLM, presets
from moejax.parallel.axes import PARAMETER_AXES
from moejax.train.muon import scale_by_muon
from moejax.train.muon_layout import MUON_LAYOUT, Matrices, dimension_numbers, labels, layout_tree
from moejax.train.newton_schulz import QUINTIC
from moejax.train.newton_schulz import newton_schulz as orthogonal
from moejax.train.optimizers import OptimizerConfig, decay_mask, make_optimizer

MUON = OptimizerConfig(kind="muon", learning_rate=1e-2, total_steps=20)
D, HEADS, WIDTH, EXPERTS = 12, 4, 6, 3
SHAPES = {
    "q_proj": (2, 3, D, HEADS, WIDTH),
    "out_gate": (2, 3, D, HEADS, WIDTH),
    "out_proj": (2, 3, HEADS, WIDTH, D),
    "router": (2, 3, D, EXPERTS),
    "expert_gate": (2, 3, EXPERTS, D, 8),
    "expert_down": (2, 3, EXPERTS, 8, D),
    "q_conv": (2, 3, 4, HEADS * WIDTH),
    "dt_bias": (2, 3, HEADS, WIDTH),
    "weight": (2, 3, D),
    "embedding": (16, D),
    "head": (D, 16),
}
"""Parameters as the model stacks them, [repeats, units, ...]."""
MATRIX_SHAPES = {
    "q_proj": (24, D, WIDTH),
    "out_gate": (6, D, HEADS * WIDTH),
    "out_proj": (6, HEADS * WIDTH, D),
    "router": (6, D, EXPERTS),
    "expert_gate": (18, D, 8),
    "expert_down": (18, 8, D),
}
"""{name: (matrices, rows, columns)} of those that are Muon's."""


@functools.cache
def preset_shapes(name):
    model = HybridLM(presets.get(name))
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def tree(seed, dtype=jnp.float32):
    """Random leaves of SHAPES, each matrix of another size: a common norm would show."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in SHAPES.items():
        sizes = 10.0 ** rng.uniform(-3, 1, (*shape[:-2], 1, 1) if len(shape) > 2 else ())
        made[name] = (rng.normal(size=shape) * sizes).astype(dtype)
    return {"stack": {"layer_0": made}}


def layout_of(name, shape):
    return Matrices.of(dimension_numbers((jax.tree_util.DictKey(name),), shape), len(shape))


OPTIMIZER = make_optimizer(MUON)
INIT = jax.jit(OPTIMIZER.init)


@jax.jit
def step(grads, state, params):
    """-> (updates, state, params)."""
    updates, state = OPTIMIZER.update(grads, state, params)
    return updates, state, optax.apply_updates(params, updates)


@functools.cache
def two_updates(dtype=jnp.float32):
    """-> updates of two steps."""
    params, made = tree(0, dtype), []
    state = INIT(params)
    for seed in (1, 2):
        updates, state, params = step(tree(seed, dtype), state, params)
        made.append(jax.tree.map(np.asarray, updates["stack"]["layer_0"]))
    return made


def update_alone(matrix_gradients, matrix, steps=2):
    """Muon's updates of one matrix alone in float64 NumPy, without the rate and the decay."""
    momentum, made = np.zeros_like(matrix_gradients[0]), []
    for count, gradient in enumerate(matrix_gradients[:steps], 1):
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = 0.95 * momentum / (1 - 0.95 ** (count + 1)) + 0.05 * gradient / (1 - 0.95**count)
        u, s, v = np.linalg.svd(direction, full_matrices=False)
        s = s / (np.sqrt((s**2).sum()) + 1e-8)
        for _ in range(5):
            s = sum(factor * s**power for factor, power in zip(QUINTIC, (1, 3, 5), strict=True))
        made.append(0.2 * math.sqrt(max(matrix)) * (u * s) @ v)
    return made


@pytest.mark.parametrize("preset", presets.NAMES)
def test_every_parameter_of_every_preset_is_classified(preset):
    """MaxText #4798: by metadata. Heads and experts are counted, never a side; only matrices reach Muon."""
    config, shapes = presets.get(preset), preset_shapes(preset)
    counted = {"q_proj": config.kda.heads, "k_proj": config.kda.heads, "v_proj": config.kda.num_value_heads}
    counted |= dict.fromkeys(("q_up", "k_up", "v_up"), config.mla.heads)
    counted |= dict.fromkeys(("expert_gate", "expert_up", "expert_down"), config.moe.experts)
    seen = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name, matrix = path[-1].key, dimension_numbers(path, leaf.shape)
        seen.add(name)
        own, _ = MUON_LAYOUT[name]
        assert own == len(PARAMETER_AXES[name])
        if matrix is None:
            continue
        layout = Matrices.of(matrix, leaf.ndim)
        count, rows, columns = layout.sizes(leaf.shape)
        assert count == math.prod(leaf.shape[: leaf.ndim - own]) * counted.get(name, 1)
        assert count * rows * columns == leaf.size and min(rows, columns) > 1
    kept = {"embedding", "head", "A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "query"}
    assert {name for name in seen if MUON_LAYOUT[name][1] is None} == kept & seen | {n for n in seen if "norm" in n or n == "weight"}


def test_blocks_of_kimi_k3():
    """96 heads of 128 channels, 896 experts: the shapes that Newton-Schulz sees."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(preset_shapes("kimi_k3")):
        matrix = dimension_numbers(path, leaf.shape)
        if matrix is not None:
            found.setdefault(path[-1].key, set()).add(Matrices.of(matrix, leaf.ndim).sizes(leaf.shape)[1:])
    assert found["q_proj"] == found["k_proj"] == found["v_proj"] == {(7168, 128)}
    assert (found["q_up"], found["k_up"], found["v_up"]) == ({(1536, 192)}, {(512, 128)}, {(512, 128)})
    assert found["expert_gate"] == {(3584, 3072)} and found["expert_down"] == {(3072, 3584)}
    assert found["out_proj"] == {(96 * 128, 7168)} and found["router"] == {(7168, 896)}


def test_unknown_names_are_refused():
    for name in ("q_proj_bias", "expert_gate_codes", "my_norm"):  # a part of a known name is no known name
        with pytest.raises(ValueError, match=f"add '{name}' to moejax.train.muon_layout.MUON_LAYOUT"):
            make_optimizer(MUON).init({"layer": {name: jnp.ones((4, 4))}})
    with pytest.raises(ValueError, match="gives 'q_proj' at least 3 axes"):
        labels({"q_proj": jnp.ones((4, 4))})
    with pytest.raises(ValueError, match="Muon takes matrices only"):
        scale_by_muon(MUON).update({"head": jnp.ones((4, 4))}, scale_by_muon(MUON).init({"head": jnp.ones((4, 4))}))


def test_each_matrix_as_if_alone(x64):
    """marin #8621, MaxText #4798: every head's and expert's update is that of its slice alone, with a norm of its own.

    Against singular values and the polynomial on them in NumPy, for both updates of a run, decay included.
    """
    made = two_updates(dtype=jnp.float64)
    gradients = [tree(seed, jnp.float64)["stack"]["layer_0"] for seed in (1, 2)]
    params = tree(0, jnp.float64)["stack"]["layer_0"]
    for name, sizes in MATRIX_SHAPES.items():
        layout = layout_of(name, SHAPES[name])
        assert layout.sizes(SHAPES[name]) == sizes
        stacks = [layout.stacked(g[name]) for g in gradients]
        before = layout.stacked(params[name])
        got = [layout.stacked(m[name]) for m in made]
        for index in range(sizes[0]):
            want, weights = update_alone([stack[index] for stack in stacks], sizes[1:]), before[index]
            for count in range(2):  # a warm-up of one update, then the cosine's first: both at the peak
                expected = -1e-2 * (want[count] + 0.1 * weights)
                np.testing.assert_allclose(got[count][index], expected, rtol=0, atol=1e-7 * np.abs(expected).max(), err_msg=name)
                weights = weights + expected


def test_one_head_sliced_out():
    """The same in float32, by slicing the parameter: bits may differ by the order of the batched products only."""
    made = two_updates()
    part = (slice(1, 2), slice(2, 3), slice(None), slice(3, 4))  # one layer, one head
    cut = lambda seed: {"q_proj": tree(seed)["stack"]["layer_0"]["q_proj"][part]}
    params = cut(0)
    state = INIT(params)
    for count, seed in enumerate((1, 2)):
        updates, state, params = step(cut(seed), state, params)
        whole = made[count]["q_proj"][part]
        np.testing.assert_allclose(updates["q_proj"], whole, rtol=0, atol=1e-6 * np.abs(whole).max())


def test_as_optax_does(x64):
    """Momentum, Nesterov, scale and decay of optax.contrib.muon with this layout; its AdamW part has a mask of ours."""
    made = two_updates(dtype=jnp.float64)
    theirs = optax.contrib.muon(
        1e-2,
        weight_decay=0.1,
        weight_decay_mask=decay_mask,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=layout_tree,
    )
    params = tree(0, jnp.float64)
    state, update = jax.jit(theirs.init)(params), jax.jit(theirs.update)
    for count, seed in enumerate((1, 2)):
        updates, state = jax.tree.map(np.asarray, update(tree(seed, jnp.float64), state, params))
        params = optax.apply_updates(params, updates)
        for name in MATRIX_SHAPES:
            want = np.asarray(updates["stack"]["layer_0"][name])
            np.testing.assert_allclose(made[count][name], want, rtol=0, atol=1e-7 * np.abs(want).max(), err_msg=name)


def test_other_parameters_are_adamw():
    """Bit for bit the AdamW optimizer's, convolutions and [heads, width] biases included (MaxText #4798)."""
    made = two_updates()
    adamw = make_optimizer(OptimizerConfig(learning_rate=1e-2, total_steps=20))
    others = lambda seed: {name: leaf for name, leaf in tree(seed)["stack"]["layer_0"].items() if name not in MATRIX_SHAPES}
    assert sorted(others(0)) == ["dt_bias", "embedding", "head", "q_conv", "weight"]
    state, params, update = jax.jit(adamw.init)(others(0)), others(0), jax.jit(adamw.update)
    for count, seed in enumerate((1, 2)):
        updates, state = update(others(seed), state, params)
        params = jax.tree.map(np.add, params, updates)
        for name, want in updates.items():
            np.testing.assert_allclose(made[count][name], want, rtol=1e-6, err_msg=name)


def test_updates_are_nearly_orthogonal_with_one_rms():
    """Over the rate times 0.2 sqrt(longer side), all singular values of a head's, an expert's and a whole matrix's update lie
    in [0.68, 1.14], whatever those of the gradient between 0.005 and 1 times its norm: the polynomial's band, not 1. So the
    RMS of each update is near 0.2, the same for all shapes."""
    gradients = tree(5)
    rng = np.random.default_rng(5)
    for name, sizes in MATRIX_SHAPES.items():
        layout = layout_of(name, SHAPES[name])
        stack = rng.normal(size=sizes)
        u, _, v = np.linalg.svd(stack, full_matrices=False)
        values = 10.0 ** rng.uniform(-1, 0, (sizes[0], 1, u.shape[-1]))
        made = ((u * values) @ v).astype(np.float32)
        gradients["stack"]["layer_0"][name] = layout.unstacked(made, SHAPES[name])
    weights = jax.tree.map(np.zeros_like, tree(0))  # no decay
    updates = jax.tree.map(np.asarray, step(gradients, INIT(weights), weights)[0])
    for name, (_, rows, columns) in MATRIX_SHAPES.items():
        stack = layout_of(name, SHAPES[name]).stacked(updates["stack"]["layer_0"][name]).astype(np.float64) / 1e-2
        values = np.linalg.svd(stack, compute_uv=False) / (0.2 * math.sqrt(max(rows, columns)))
        assert 0.68 < values.min() and values.max() < 1.14, (name, values.min(), values.max())
        rms = np.sqrt((stack**2).mean((1, 2)))
        assert (0.68 * 0.2 < rms).all() and (rms < 1.14 * 0.2).all(), (name, rms)


def test_decay_reaches_weights_and_nothing_else():
    """With gradients of zero the update is the decay alone: on matrices, convolutions, embedding and head, not on norms and gates."""
    params = tree(0)
    updates, *_ = step(jax.tree.map(np.zeros_like, params), INIT(params), params)
    for name, update in updates["stack"]["layer_0"].items():
        decays = name not in ("dt_bias", "weight")
        want = -1e-2 * 0.1 * np.asarray(params["stack"]["layer_0"][name]) * decays
        np.testing.assert_allclose(update, want, rtol=1e-6, err_msg=name)


def test_state_is_float32_and_no_more_than_needed():
    """bfloat16 parameters: float32 moments; one array a matrix, two for AdamW's, and counts."""
    params = tree(0, jnp.bfloat16)
    state = INIT(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float32", "int32"}
    sizes = {name: math.prod(shape) * (1 if name in MATRIX_SHAPES else 2) for name, shape in SHAPES.items()}
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == sum(sizes.values())
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), (tree(1, jnp.bfloat16), params))
    got, want = (step(g, state, p)[:2] for g, p in ((tree(1, jnp.bfloat16), params), wide))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)  # nothing is rounded on the way


def test_resumes_bit_for_bit(tmp_path):
    """State through a checkpoint after the first of two updates; then the same bits as without it."""
    from moejax.train.checkpoint import Checkpointer

    params = tree(0)
    _, state, params = step(tree(1), INIT(params), params)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": params, "opt_state": state}, {})
        checkpoints.wait()
        template = jax.eval_shape(lambda: {"params": tree(0), "opt_state": OPTIMIZER.init(tree(0))})
        restored, _ = checkpoints.restore(template)
    assert jax.tree.structure(restored["opt_state"]) == jax.tree.structure(state)
    want, got = step(tree(2), state, params), step(tree(2), restored["opt_state"], restored["params"])
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


def test_settings_reach_the_update():
    """Without Nesterov the first update is that of the gradient alone; the scale and the number of iterations count."""
    gradient = {"q_proj": tree(1)["stack"]["layer_0"]["q_proj"]}
    layout = layout_of("q_proj", SHAPES["q_proj"])

    def first(**settings):
        rule = scale_by_muon(OptimizerConfig(kind="muon", **settings))
        updates, _ = jax.jit(lambda gradient: rule.update(gradient, rule.init(gradient)))(gradient)
        return layout.stacked(np.asarray(updates["q_proj"]))

    newton_schulz = jax.jit(functools.partial(orthogonal, matmul_dtype=None), static_argnames="steps")
    alone = newton_schulz(layout.stacked(gradient["q_proj"]), steps=5) * 0.2 * math.sqrt(12)
    np.testing.assert_allclose(first(nesterov=False), alone, atol=1e-5)
    np.testing.assert_allclose(first(muon_scale=0.4), 2 * first(), rtol=1e-6)
    few = newton_schulz(layout.stacked(gradient["q_proj"]), steps=2) * 0.2 * math.sqrt(12)
    np.testing.assert_allclose(first(newton_schulz_steps=2, nesterov=False), few, atol=1e-5)
    rounded = first(newton_schulz_dtype="bfloat16")
    assert 1e-4 < np.abs(rounded - first()).max() / np.abs(first()).max() < 0.1
