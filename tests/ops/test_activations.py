"""SiTU-GLU and SwiGLU against the golden grid and float64 autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops import situ_glu, swiglu


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / np.abs(b).max()


def test_situ_golden_grid_value_and_gradient(golden):
    file = golden("moe/situ.npz")
    gate, up = jnp.asarray(file["in_gate"]), jnp.asarray(file["in_up"])
    assert relative(situ_glu(gate, up), file["out_y"]) < 1e-6
    d_gate, d_up = jax.grad(lambda g, u: situ_glu(g, u).sum(), argnums=(0, 1))(gate, up)
    assert relative(d_gate, file["grad_gate"]) < 1e-5 and relative(d_up, file["grad_up"]) < 1e-5
    assert np.isfinite(d_gate).all() and np.isfinite(d_up).all()


def test_situ_golden_float64(golden, x64):
    file = golden("moe/situ.npz")
    gate, up = jnp.asarray(file["in_gate"], jnp.float64), jnp.asarray(file["in_up"], jnp.float64)
    assert relative(situ_glu(gate, up), file["out_y"]) < 1e-13


@pytest.mark.parametrize("size", [1e4, 3e38])
def test_situ_is_finite_and_bounded_for_huge_inputs(size):
    values = jnp.asarray([-size, -1.0, -0.0, 0.0, 1.0, size], jnp.float32)
    gate, up = (m.ravel() for m in jnp.meshgrid(values, values))
    y = situ_glu(gate, up)
    gradients = jax.grad(lambda g, u: situ_glu(g, u).sum(), argnums=(0, 1))(gate, up)
    assert np.abs(y).max() <= 100 and all(np.isfinite(g).all() for g in gradients)
    # Saturation: 4 * 25 with the sign of up when the gate is open, 0 when it is shut.
    assert (
        float(situ_glu(jnp.float32(size), jnp.float32(-size))) == -100
        and float(situ_glu(-jnp.float32(size), jnp.float32(size))) == 0
    )


def test_bfloat16_is_computed_in_float32_and_rounded_once():
    rng = np.random.default_rng(0)
    gate, up = (jnp.asarray(rng.normal(scale=4, size=(3, 17)), jnp.bfloat16) for _ in range(2))
    for f in (situ_glu, swiglu):
        y = f(gate, up)
        wide = f(gate.astype(jnp.float32), up.astype(jnp.float32))
        assert y.dtype == jnp.bfloat16 and np.array_equal(np.asarray(y), np.asarray(wide.astype(jnp.bfloat16)))


def test_swiglu_value_and_gradient():
    rng = np.random.default_rng(1)
    gate, up = (jnp.asarray(rng.normal(scale=3, size=(5, 7)), jnp.float32) for _ in range(2))
    g, u = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    s = 1 / (1 + np.exp(-g))
    assert relative(swiglu(gate, up), g * s * u) < 1e-6
    d_gate, d_up = jax.grad(lambda g, u: swiglu(g, u).sum(), argnums=(0, 1))(gate, up)
    assert relative(d_gate, u * s * (1 + g * (1 - s))) < 1e-6 and relative(d_up, g * s) < 1e-6


def test_bad_input_is_named():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="float16"):
        situ_glu(x.astype(jnp.float16), x.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"one shape"):
        situ_glu(x, x[:1])
    with pytest.raises(ValueError, match="one"):
        swiglu(x, x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="empty"):
        situ_glu(x[:0], x[:0])
    for cap in (0.0, -4.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="positive finite"):
            situ_glu(x, x, gate_cap=cap)
        with pytest.raises(ValueError, match="up_cap"):
            situ_glu(x, x, up_cap=cap)
