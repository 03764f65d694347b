"""The short convolution's Triton kernels: their own source on NumPy, and on the card, against a token-by-token float64 twin."""

import os
import sys

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the convolution kernels are Triton's; install moejax[triton] (Python 3.12)")
sys.path.insert(0, os.path.dirname(__file__))

import gluon_numpy as gn  # noqa: E402
from conv_taps import selections  # noqa: E402

from moejax.kernels.kda import triton_conv as conv  # noqa: E402

bf16 = gn.bf16
PACKED = {
    "one and two tokens": [[1, 2, 2, 3, 4, 4, 5, 6, 7, 7, 8, 8, 9, 9, 10, 11, 12], [1] + [2] * 2 + [3] * 14],
    "padding at both ends": [[0] * 3 + [1] * 6 + [2] * 5 + [0] * 3, [0] * 16 + [1]],
    "padding inside": [[1, 0, 1, 1, 0, 0, 0, 1, 2, 0, 2, 2, 0, 0, 3, 0, 3], [0, 1, 0, 2, 0, 2, 0, 3, 3, 0, 0, 3, 4, 0, 4, 0, 0]],
    "a row of padding, ids that skip": [[0] * 17, [2, 2, 2, 5, 5, 0, 5, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]],
}


def expected(x, weight, history, ids, dy, dlast):
    """Values and gradients in float64: y, last, dx, dweight, dhistory."""
    x, weight, dy, dlast = (np.asarray(a, np.float64) for a in (x, weight, dy, dlast))
    (batch, tokens, channels), width = x.shape, weight.shape[0]
    ids = np.ones((batch, tokens), int) if ids is None else ids
    taps, kept = selections(ids, width)
    real = (ids > 0)[..., None]
    past = np.zeros((batch, width - 1, channels)) if history is None else np.asarray(history, np.float64)
    inputs = np.concatenate([past, np.where(real, x, 0)], axis=1)
    z = np.einsum("jbtp,bpc,jc->btc", taps, inputs, weight)
    gate = 0.5 * (1 + np.tanh(0.5 * z))
    dz = np.where(real, dy, 0) * gate * (1 + z * (1 - gate))
    dweight = np.einsum("jbtp,bpc,btc->jc", taps, inputs, dz)
    dinputs = np.einsum("jbtp,jc,btc->bpc", taps, weight, dz) + np.einsum("bwp,bwc->bpc", kept, dlast)
    return z * gate, np.einsum("bwp,bpc->bwc", kept, inputs), dinputs[:, width - 1 :], dweight, dinputs[:, : width - 1]


def case(batch, tokens, channels, width, dtype=np.float32, *, ids=None, seed=0):
    """x, weight, history, ids, dy, dlast; NaN at padding."""
    rng = np.random.default_rng(seed)
    x, dy = (rng.normal(size=(batch, tokens, channels)).astype(dtype) for _ in range(2))
    history, dlast = (rng.normal(size=(batch, width - 1, channels)).astype(dtype) for _ in range(2))
    weight = rng.normal(size=(width, channels)).astype(np.float32)
    ids = None if ids is None else np.asarray(ids, np.int32)
    if ids is not None:
        x[ids == 0] = np.nan
        dy[ids == 0] = np.nan
    return x, weight, history, ids, dy, dlast


def emulated(x, weight, history, ids, dy, *, steps=None, block=16, ahead=None):
    """The two kernels on NumPy: y, dx, dweight, dhistory (None without history)."""
    (batch, tokens, channels), width = x.shape, weight.shape[0]
    walk = None if ids is None else np.asarray(conv.walk_codes(ids, width))
    if width == 1:
        history = None
    out = []
    for backward in (False, True):
        config = conv.conv_config(batch, tokens, channels, width, backward=backward) | {"BC": block}
        config |= {} if steps is None else {"STEPS": steps}
        config |= {} if ahead is None else {"AHEAD": ahead}
        warps = config.pop("warps")
        blocks = triton.cdiv(tokens, config["STEPS"])
        grid = (triton.cdiv(channels, block), blocks, batch)
        poison = lambda shape, dtype: np.full(shape, np.nan, dtype)
        if backward:
            parts = poison((batch, blocks, width, channels), np.float32)
            dx = poison(x.shape, x.dtype)
            dhistory = None if history is None else poison(history.shape, x.dtype)
            operands = (x, weight, history, walk, dy, dx, parts, dhistory, tokens, channels)
            gn.run(conv.conv_backward_kernel, grid, *operands, W=width, num_warps=warps, order="shuffle", **config)
            out += [dx, parts.sum((0, 1)), dhistory]
        else:
            y = poison(x.shape, x.dtype)
            operands = (x, weight, history, walk, y, tokens, channels)
            gn.run(conv.conv_forward_kernel, grid, *operands, W=width, num_warps=warps, order="shuffle", **config)
            out.append(y)
    return out


def close(got, want, tolerance, scale=None):
    if want.size:
        got = np.asarray(got, np.float64)
        assert np.isfinite(got).all() and np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)


def compare(data, tolerance=2e-6, **options):
    x, weight, history, ids, dy, dlast = data
    y, _, dx, dweight, dhistory = expected(x, weight, history, ids, dy, 0 * dlast)
    got = emulated(x, weight, history, ids, dy, **options)
    for g, w in zip(got, (y, dx, dweight, dhistory), strict=True):
        if g is not None:
            close(g, w, tolerance)
    if ids is not None:
        np.testing.assert_array_equal(np.asarray(got[0], np.float32)[ids == 0], 0)
        np.testing.assert_array_equal(np.asarray(got[1], np.float32)[ids == 0], 0)


@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 17, 63, 130])
def test_lengths(tokens):
    compare(case(1, tokens, 5, 4))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tokens", [2, 21])
def test_widths(width, tokens):
    compare(case(2, tokens, 18, width), steps=8)


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_packed(name, width, history):
    x, weight, past, ids, dy, dlast = case(2, 17, 5, width, ids=PACKED[name])
    compare((x, weight, past if history else None, ids, dy, dlast), steps=8, ahead=4)


@pytest.mark.parametrize("tokens", [1, 2, 3, 15, 63, 130])
def test_random_packing_and_bfloat16(tokens):
    rng = np.random.default_rng(tokens)
    ids = np.sort(rng.integers(1, 8, size=(2, tokens)), axis=1)
    ids = np.where(rng.random((2, tokens)) < 0.2, 0, ids)
    compare(case(2, tokens, 4, 4, ids=ids, seed=tokens), steps=16)
    compare(case(2, tokens, 4, 4, bf16, ids=ids, seed=tokens), tolerance=6e-3)


def test_blocks_do_not_change_bits():
    """y, dx and dhistory do not depend on how the walk is cut; a changed future does not change a prefix of y."""
    data = case(1, 45, 20, 4, bf16, ids=[[1] * 20 + [0] * 3 + [2] * 22])[:5]
    one, other = emulated(*data, steps=64), emulated(*data, steps=8, ahead=2)
    for place in (0, 1, 3):
        np.testing.assert_array_equal(one[place], other[place])
    changed = data[0].copy()
    changed[:, 30:] = 1e4
    np.testing.assert_array_equal(emulated(changed, *data[1:], steps=8)[0][:, :30], one[0][:, :30])


def test_offsets_beyond_int32():
    """The last block of a row of 2^31 values and more, of which only the end is not zero (np.zeros: the rest takes no memory)."""
    channels, steps = 2**16, 16
    tokens = 2**15 + steps
    short = case(1, 4 * steps, channels, 4, bf16)
    x, dy, y, dx = (np.zeros((1, tokens, channels), bf16) for _ in range(4))
    tail = 2 * steps
    x[:, -tail:], dy[:, -tail:] = short[0][:, -tail:], short[4][:, -tail:]
    parts = np.zeros((1, tokens // steps, 4, channels), np.float32)
    sizes = {"W": 4, "STEPS": steps, "BC": 512, "AHEAD": 4}
    last = [(channels // 512 - 1, tokens // steps - 1, 0)]
    grid = (channels // 512, tokens // steps, 1)
    gn.run(conv.conv_forward_kernel, grid, x, short[1], None, None, y, tokens, channels, programs=last, **sizes)
    operands = (x, short[1], None, None, dy, dx, parts, None, tokens, channels)
    gn.run(conv.conv_backward_kernel, grid, *operands, programs=last, **sizes)
    end = np.s_[:, -steps:, -512:]
    want = expected(*(a[..., -512:] for a in (x[:, -tail:], short[1])), None, None, dy[:, -tail:, -512:], np.zeros((1, 3, 512)))
    close(y[end], want[0][:, -steps:], 6e-3)
    close(dx[end], want[2][:, -steps:], 6e-3)


def test_last_inputs_and_refusals():
    """The carried inputs are XLA's part and run anywhere."""
    import jax.numpy as jnp

    for width in (1, 2, 4):
        for ids in [None, *PACKED.values()]:
            x, weight, history, ids, dy, dlast = case(2, 17, 3, width, ids=ids)
            walk = None if ids is None else conv.walk_codes(ids, width)
            token, in_x, old, in_history = conv._last_inputs(walk, x.shape, width)
            last = np.where(in_x, np.take_along_axis(x, np.asarray(token), 1), 0)
            if width > 1:
                last = np.where(in_history, np.take_along_axis(history, np.asarray(old), 1), last)
            np.testing.assert_array_equal(last, expected(x, weight, history, ids, dy, dlast)[1])
    x = jnp.ones((2, 6, 3))
    for options, match in (
        ({"weight": jnp.ones((9, 3))}, "W <= 8"),
        ({"weight": jnp.ones((4, 3)), "history": jnp.ones((2, 4, 3))}, "history"),
        ({"weight": jnp.ones((4, 3)), "segment_ids": jnp.ones((2, 6))}, "integers"),
        ({"weight": jnp.ones((4, 3), jnp.float16)}, "float16"),
    ):
        with pytest.raises(ValueError, match=match):
            conv.conv_silu_triton(x, **options)


def on_card(data, dtype):
    import jax
    import jax.numpy as jnp

    x, weight, history, ids, dy, dlast = (None if a is None else jnp.asarray(a) for a in data)

    @jax.jit
    def run(x, weight, history, dy, dlast):
        f = lambda x, w, h: conv.conv_silu_triton(x, w, history=h, segment_ids=ids)
        out, back = jax.vjp(f, x, weight, history)
        return *out, *back((dy, dlast))

    return [np.asarray(a) for a in run(x, weight, history, dy, dlast)], [np.asarray(a) for a in run(x, weight, history, dy, dlast)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, bf16])
@pytest.mark.parametrize("tokens", [1, 3, 17, 130, 515])
def test_on_the_card(tokens, dtype):
    rng = np.random.default_rng(tokens)
    ids = np.where(rng.random((2, tokens)) < 0.2, 0, np.sort(rng.integers(1, 8, size=(2, tokens)), axis=1))
    for options in ({}, {"ids": ids}):
        data = case(2, tokens, 520, 4, dtype, **options)
        got, again = on_card(data, dtype)
        for g, a, w in zip(got, again, expected(*data), strict=True):
            close(g, w, 5e-6 if dtype == np.float32 else 8e-3)
            np.testing.assert_array_equal(g, a)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 8])
def test_on_the_card_widths_and_documents(width):
    for ids in PACKED.values():
        data = case(2, 17, 96, width, ids=ids)
        for g, w in zip(on_card(data, np.float32)[0], expected(*data), strict=True):
            close(g, w, 5e-6)


@pytest.mark.gpu
def test_on_the_card_vmap_of_gradients():
    """Three examples under vmap equal three calls; the weight is shared."""
    import jax
    import jax.numpy as jnp

    x, weight, _, ids, dy, _ = case(3, 130, 64, 4, ids=np.sort(np.random.default_rng(0).integers(0, 5, size=(3, 130)), axis=1))
    loss = lambda x, w, i, ct: (jnp.where(i[..., None] > 0, conv.conv_silu_triton(x, w, segment_ids=i)[0] * ct, 0)).sum()
    x, ids, dy = (jnp.asarray(a)[:, None] for a in (x, ids, dy))
    gradients = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None, 0, 0)))(x, jnp.asarray(weight), ids, dy)
    for n in range(3):
        alone = jax.jit(jax.grad(loss, argnums=(0, 1)))(x[n], jnp.asarray(weight), ids[n], dy[n])
        np.testing.assert_array_equal(np.asarray(gradients[0][n]), np.asarray(alone[0]))
        close(gradients[1][n], np.asarray(alone[1], np.float64), 1e-6)  # XLA may add the parts in another order
