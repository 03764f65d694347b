"""The gated RMS norm's Triton kernels: their own source on NumPy, and on the card, against the formulas in float64."""

import os
import sys

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the norm kernels are Triton's; install moejax[triton] (Python 3.12)")
sys.path.insert(0, os.path.dirname(__file__))

import gluon_numpy as gn  # noqa: E402

from moejax.kernels.kda import triton_norm as norm  # noqa: E402

bf16 = gn.bf16
EPS = 1e-5


def case(batch, rows, channels, dtype=np.float32, seed=0):
    """x, gate, weight, dy. One row is zero, one gate is far out on either side."""
    rng = np.random.default_rng(seed)
    x, gate, dy = (rng.normal(size=(batch, rows, channels)).astype(dtype) for _ in range(3))
    x[:, 0], gate[:, -1, 0], gate[:, -1, 1] = 0, 1e4, -1e4
    return x, gate, (1 + 0.3 * rng.normal(size=channels)).astype(np.float32), dy


def expected(x, gate, weight, dy):
    """y, dx, dgate, dweight"""
    x, gate, weight, dy = (np.asarray(a, np.float64) for a in (x, gate, weight, dy))
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    unit, opened = x * scale, 0.5 * (1 + np.tanh(0.5 * gate))
    grad = dy * weight * opened
    dx = scale * (grad - unit * (grad * unit).mean(-1, keepdims=True))
    return unit * weight * opened, dx, grad * unit * (1 - opened), (dy * unit * opened).sum((0, 1))


def emulated(x, gate, weight, dy, tiles=2):
    (batch, rows, channels), config = x.shape, norm.norm_config(x.shape[2])
    config.pop("warps")
    y, dx, dgate = (np.full(x.shape, np.nan, x.dtype) for _ in range(3))
    blocks = triton.cdiv(rows, config["BR"] * tiles)
    parts = np.full((batch, blocks, channels), np.nan, np.float32)
    sizes = {"V": channels, "EPS": EPS, **config}
    with np.errstate(over="ignore"):  # e^1e4 is inf and 1 / (1 + inf) the 0 that is meant
        gn.run(norm.norm_forward_kernel, (triton.cdiv(rows, config["BR"]), batch), x, gate, weight, y, rows, order="shuffle", **sizes)
        operands = (x, gate, weight, dy, dx, dgate, parts, rows)
        gn.run(norm.norm_backward_kernel, (blocks, batch), *operands, TILES=tiles, order="shuffle", **sizes)
    return y, dx, dgate, parts.sum((0, 1))


def close(got, want, tolerance):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all() and np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("channels", [128, 64, 48, 256, 16])
@pytest.mark.parametrize("rows", [1, 2, 3, 15, 17, 63, 130])
def test_values_and_gradients(rows, channels):
    data = case(2, rows, channels)
    if rows == 1:
        data[0][:] += 1  # the zero row alone has nothing to compare with
    for got, want in zip(emulated(*data), expected(*data), strict=True):
        close(got, want, 2e-6)


@pytest.mark.parametrize("tiles", [1, 3])
def test_bfloat16(tiles):
    data = case(1, 200, 128, bf16)
    for got, want in zip(emulated(*data, tiles=tiles), expected(*data), strict=True):
        close(got, want, 4e-3)


def test_rows_are_apart():
    """NaN in one row stays there (padding), in values and in the gradients of x and gate."""
    x, gate, weight, dy = case(1, 40, 64)
    clean = emulated(x, gate, weight, dy)
    x[:, 7] = gate[:, 7] = np.nan
    for got, before in zip(emulated(x, gate, weight, dy)[:3], clean[:3], strict=True):
        keep = np.arange(40) != 7
        np.testing.assert_array_equal(got[:, keep], before[:, keep])


def test_offsets_beyond_int32():
    """The last tile of 2^31 values and more (np.zeros: the rest takes no memory)."""
    rows, channels = 2**31 // 128 + 16, 128
    short = case(1, 16, channels, bf16)
    x, gate, dy, y, dx, dgate = (np.zeros((1, rows, channels), bf16) for _ in range(6))
    for whole, part in ((x, short[0]), (gate, short[1]), (dy, short[3])):
        whole[:, -16:] = part
    config = norm.norm_config(channels)
    config.pop("warps")
    sizes, blocks = {"V": channels, "EPS": EPS, **config}, rows // config["BR"]
    parts = np.zeros((1, blocks, channels), np.float32)
    with np.errstate(over="ignore"):
        gn.run(norm.norm_forward_kernel, (blocks, 1), x, gate, short[2], y, rows, programs=[(blocks - 1, 0, 0)], **sizes)
        operands = (x, gate, short[2], dy, dx, dgate, parts, rows)
        gn.run(norm.norm_backward_kernel, (blocks, 1), *operands, TILES=1, programs=[(blocks - 1, 0, 0)], **sizes)
    want = expected(*short)
    for got, w in zip((y[:, -16:], dx[:, -16:], dgate[:, -16:], parts[0, -1]), want, strict=True):
        close(got, w, 4e-3)


def test_the_layer_uses_this_formula():
    """The same as moejax.ops.kda_layer's output norm on float32."""
    import jax.numpy as jnp

    from moejax.ops.kda_layer import KDAWeights, _gated_norm

    x, gate, weight, _ = case(1, 3, 16)
    o, logits = x.reshape(1, 1, 3, 16), gate.reshape(1, 1, 3, 16)
    eye = jnp.zeros((48, 3, 16)).at[jnp.arange(48), jnp.arange(48) // 16, jnp.arange(48) % 16].set(1)
    weights = KDAWeights(*[None] * 11, eye, None, None, jnp.asarray(weight), None)
    got = _gated_norm(jnp.asarray(o), jnp.asarray(logits).reshape(1, 1, 48), weights, EPS)
    close(np.asarray(got).reshape(1, 3, 16), expected(*case(1, 3, 16))[0], 2e-6)


def test_refusals():
    import jax.numpy as jnp

    x, w = jnp.ones((2, 3, 16)), jnp.ones(16)
    for operands, eps, match in (
        ((x, x[:1], w), 1e-5, "gate"),
        ((x, x, w[:3]), 1e-5, "weight"),
        ((x, x, w), 0.0, "eps"),
        ((x.astype(jnp.float16), x, w), 1e-5, "float16"),
    ):
        with pytest.raises(ValueError, match=match):
            norm.gated_rms_norm_triton(*operands, eps=eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, bf16])
@pytest.mark.parametrize("shape", [(2, 5, 3, 128), (1, 130, 96, 128), (1, 1, 1, 64), (2, 17, 4, 48), (1, 63, 2, 256)])
def test_on_the_card(shape, dtype):
    import jax
    import jax.numpy as jnp

    batch, channels = shape[0], shape[-1]
    data = case(batch, int(np.prod(shape[1:-1])), channels, dtype)
    if data[0].shape[1] == 1:
        data[0][:] += 1
    x, gate, dy = (jnp.asarray(a).reshape(shape) for a in (data[0], data[1], data[3]))

    @jax.jit
    def run(x, gate, weight, dy):
        y, back = jax.vjp(lambda *a: norm.gated_rms_norm_triton(*a, eps=EPS), x, gate, weight)
        return y, *back(dy)

    got, again = run(x, gate, jnp.asarray(data[2]), dy), run(x, gate, jnp.asarray(data[2]), dy)
    for g, a, want in zip(got, again, expected(*data), strict=True):
        close(np.asarray(g).reshape(want.shape), want, 4e-3 if dtype == bf16 else 2e-5)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(a))


@pytest.mark.gpu
def test_on_the_card_vmap_of_gradients():
    import jax
    import jax.numpy as jnp

    x, gate, weight, dy = (jnp.asarray(a) for a in case(3, 200, 128, bf16))
    gradients = jax.grad(
        lambda x, g, w, ct: (norm.gated_rms_norm_triton(x[None], g[None], w, eps=EPS) * ct).sum().astype(jnp.float32), (0, 1, 2)
    )
    together = jax.jit(jax.vmap(gradients, in_axes=(0, 0, None, 0)))(x, gate, weight, dy)
    for n in range(3):
        for g, a in zip(together, jax.jit(gradients)(x[n], gate[n], weight, dy[n]), strict=True):
            close(np.asarray(g[n]), np.asarray(a, np.float64), 1e-6)
