"""The short convolutions' one-token kernel: its own source on NumPy, and on the card, against the formula in float64."""

import os
import sys

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the convolution kernels are Triton's; install moejax[triton] (Python 3.12)")
sys.path.insert(0, os.path.dirname(__file__))

import gluon_numpy as gn  # noqa: E402

from moejax.kernels.kda import triton_conv_step as step  # noqa: E402

bf16 = gn.bf16
ACTIVE = np.array([True, False, True])


def case(B, widths, W, dtype=np.float32, *, history=None, active=None, seed=0):
    """inputs, weights, histories, active; of inactive rows inputs are NaN, and histories where they stand still as well."""
    rng = np.random.default_rng(seed)
    inputs = [rng.normal(size=(B, C)).astype(dtype) for C in widths]
    weights = [rng.normal(size=(W, C)).astype(np.float32) for C in widths]
    histories = [rng.normal(size=(B, W - 1, C)).astype(history or dtype) for C in widths]
    if active is not None:
        for a in (*inputs, *histories):
            a[~active] = np.nan
    return inputs, weights, histories, active


def expected(inputs, weights, histories, active):
    """By the formula, float64: outputs, and the histories, which only ever move."""
    active = np.ones(inputs[0].shape[0], bool) if active is None else active
    outputs, moved = [], []
    for x, weight, history in zip(inputs, weights, histories, strict=True):
        taps = np.concatenate([history.astype(x.dtype), x[:, None]], axis=1).astype(np.float64)
        z = np.einsum("bwc,wc->bc", taps, weight.astype(np.float64))
        outputs.append(np.where(active[:, None], z * 0.5 * (1 + np.tanh(0.5 * z)), 0))
        moved.append(np.where(active[:, None, None], taps[:, 1:].astype(history.dtype), history))
    return outputs, moved


def emulated(inputs, weights, histories, active, **options):
    """The kernel on NumPy with the library's own grid and sizes."""
    widths, W, B = [x.shape[1] for x in inputs], weights[0].shape[0], inputs[0].shape[0]
    outputs, histories = [np.full(x.shape, np.nan, x.dtype) for x in inputs], [h.copy() for h in histories]
    grid = (sum(triton.cdiv(C, step.BLOCK) for C in widths), B)
    active = None if active is None else active.astype(np.int32)
    sizes = dict(zip(("CQ", "CK", "CV"), widths, strict=True), W=W, BC=step.BLOCK)
    operands = (*histories, np.concatenate(inputs, axis=1), *weights, active, *outputs)
    gn.run(step.conv_step_kernel, grid, *operands, num_warps=step.WARPS, order="shuffle", **sizes, **options)
    return outputs, histories


def close(got, want, tolerance):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)


def compare(got, data, tolerance):
    """Outputs to within rounding, histories to the bit, NaN of rows that stand still included."""
    outputs, moved = expected(*data)
    for g, w, x in zip(got[0], outputs, data[0], strict=True):
        assert g.dtype == x.dtype
        close(g, w, tolerance)
    for g, w, history in zip(got[1], moved, data[2], strict=True):
        assert g.dtype == history.dtype
        np.testing.assert_array_equal(np.asarray(g, np.float32), w.astype(np.float32))


@pytest.mark.parametrize("active", [None, ACTIVE])
@pytest.mark.parametrize("dtype", [np.float32, bf16])
@pytest.mark.parametrize("widths, W", [((5, 5, 7), 2), ((256, 256, 512), 4), ((260, 1, 255), 3), ((16, 48, 300), 8)])
def test_values(widths, W, dtype, active):
    data = case(3, widths, W, dtype, active=active)
    compare(emulated(*data), data, 2e-6 if dtype == np.float32 else 6e-3)


@pytest.mark.parametrize("dtype, history", [(np.float32, bf16), (bf16, np.float32)])
def test_histories_of_another_dtype(dtype, history):
    data = case(3, (16, 16, 40), 4, dtype, history=history, active=ACTIVE)
    compare(emulated(*data), data, 2e-6 if dtype == np.float32 else 6e-3)


@pytest.mark.parametrize("dtype", [np.float32, bf16])
def test_equals_the_plain_form(dtype):
    """Histories are the same bits, outputs the same float32 sum rounded once; infinite taps of an inactive row do not show."""
    import jax.numpy as jnp

    from moejax.ops.short_conv import short_conv_steps

    data = case(3, (40, 40, 56), 4, dtype, active=ACTIVE)
    data[1][2][:, 3] = np.inf
    as_jax = [[jnp.asarray(a) for a in part] for part in data[:3]]
    wanted = short_conv_steps(*as_jax, active=jnp.asarray(ACTIVE), implementation="xla")
    got = emulated(*data)
    for g, w in zip(got[0], wanted[0], strict=True):
        g, w = (np.asarray(a, np.float32) for a in (g, w))
        np.testing.assert_allclose(g, w, rtol=2e-6 if dtype == np.float32 else 8e-3, atol=1e-6)
        np.testing.assert_array_equal(g[1], 0)
    for g, w in zip(got[1], wanted[1], strict=True):
        np.testing.assert_array_equal(g.astype(np.float32), np.asarray(w, np.float32))


def test_offsets_beyond_int32():
    """The last row of inputs and histories of 2^31 values and more (np.zeros: no memory is touched but that row's)."""
    channels = 2**16
    rows = 2**31 // channels + 1
    inputs, weights, histories, _ = case(1, (16, 16, channels), 2, bf16)
    x = np.zeros((rows, 32 + channels), bf16)
    x[-1] = np.concatenate(inputs, axis=1)[0]
    big = [np.zeros((rows, *a.shape[1:]), bf16) for a in histories]
    for a, history in zip(big, histories, strict=True):
        a[-1] = history[0]
    outputs = [np.zeros((rows, a.shape[1]), bf16) for a in inputs]
    blocks = 2 + channels // step.BLOCK
    sizes = {"CQ": 16, "CK": 16, "CV": channels, "W": 2, "BC": step.BLOCK}
    programs = [(block, rows - 1, 0) for block in (0, 1, blocks - 1)]
    gn.run(step.conv_step_kernel, (blocks, rows), *big, x, *weights, None, *outputs, programs=programs, num_warps=step.WARPS, **sizes)
    for g, w, moved, last in zip(outputs, expected(inputs, weights, histories, None)[0], big, inputs, strict=True):
        close(g[-1, -16:], w[0, -16:], 6e-3)
        np.testing.assert_array_equal(moved[-1, 0, -16:], last[0, -16:])


def test_refusals():
    import jax.numpy as jnp

    inputs, weights, histories, _ = ([jnp.asarray(a) for a in part or ()] for part in case(2, (4, 4, 6), 3))
    for operands, match in (
        ((inputs[:2], weights, histories), "three of each"),
        ((inputs, [w[:1] for w in weights], [h[:, :0] for h in histories]), "2 <= W <= 8"),
        ((inputs, weights, [*histories[:2], histories[2][:, 1:]]), r"history \(2, 1, 6\)"),
        (([*inputs[:2], inputs[2][:1]], weights, histories), "one B"),
        ((inputs, [*weights[:2], weights[2].astype(jnp.float16)], histories), "float16"),
        (([*inputs[:2], inputs[2].astype(jnp.bfloat16)], weights, histories), "takes one"),
    ):
        with pytest.raises(ValueError, match=match):
            step.conv_step_triton(*operands)
    with pytest.raises(ValueError, match=r"active is int32\[2\]"):
        step.conv_step_triton(inputs, weights, histories, active=jnp.ones(2, jnp.int32))


def jax_operands(data):
    import jax.numpy as jnp

    return [
        None if part is None else jnp.asarray(part) if isinstance(part, np.ndarray) else [jnp.asarray(a) for a in part] for part in data
    ]


def bits(x):
    """NumPy takes a bfloat16 NaN for another number than itself."""
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def run_triton(inputs, weights, histories, active):
    return step.conv_step_triton(inputs, weights, histories, active=active)


@pytest.mark.gpu
@pytest.mark.parametrize("active", [None, ACTIVE])
@pytest.mark.parametrize("dtype", [np.float32, bf16])
@pytest.mark.parametrize("widths, W", [((1024, 1024, 1024), 4), ((5, 5, 7), 2), ((256, 256, 512), 3), ((520, 520, 1040), 8)])
def test_on_the_card(widths, W, dtype, active):
    import jax

    data = case(3, widths, W, dtype, active=active)
    run = jax.jit(run_triton)
    got, again = run(*jax_operands(data)), run(*jax_operands(data))
    compare(got, data, 5e-6 if dtype == np.float32 else 8e-3)
    for g, a in zip(jax.tree.leaves(got), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(bits(g), bits(a))


@pytest.mark.gpu
def test_on_the_card_in_place_and_vmap():
    import jax
    import jax.numpy as jnp

    data = case(3, (520, 520, 1040), 4, bf16, active=ACTIVE)
    inputs, weights, histories, active = jax_operands(data)
    twice = lambda arrays: [jnp.stack([a, 2 * a]) for a in arrays]
    both = jax.jit(jax.vmap(run_triton, in_axes=(0, None, 0, None)))(twice(inputs), weights, twice(histories), active)
    compiled = jax.jit(run_triton, donate_argnums=2).lower(inputs, weights, histories, active).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(h.nbytes for h in histories)
    got = compiled(inputs, weights, histories, active)
    compare(got, data, 8e-3)
    for one, pair in zip(jax.tree.leaves(got), jax.tree.leaves(both), strict=True):
        np.testing.assert_array_equal(bits(pair[0]), bits(one))
