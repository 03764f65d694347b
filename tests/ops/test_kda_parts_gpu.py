"""On the card: short_conv, the KDA layer and the one-token step with their kernels against plain XLA, values and gradients.

Run on a Hopper GPU: python3 -m pytest -m gpu tests/ops/test_kda_parts_gpu.py
Shapes: B batch, T tokens, C channels, D model width, H query/key heads, G value heads, K, V channels of a head, W = 4 taps.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops import KDAState, KDAWeights, kda_decode, kda_layer, short_conv
from moejax.ops.short_conv import short_conv_steps

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
BF16, F32 = jnp.bfloat16, jnp.float32


def noise(seed, *shape, dtype=F32, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), dtype)


def apart(got, wanted):
    """Largest relative distance of two leaves, by norm."""
    distances = []
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape and np.all(np.isfinite(x))
        distances.append(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30) if np.any(y) else np.linalg.norm(x))
    return max(distances)


def value_and_gradients(run, operands):
    """run(*operands) and the gradients of a fixed mixture of its results, with the text that was compiled."""

    def loss(*operands):
        out = run(*operands)
        mixed = [jnp.sum(jnp.sin(jnp.arange(x.size).reshape(x.shape)) * x.astype(F32)) for x in jax.tree.leaves(out)]
        return sum(mixed), out

    both = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(operands))), has_aux=True)).lower(*operands).compile()
    (_, out), gradients = both(*operands)
    return out, gradients, both.as_text()


def packed(B, T):
    ids = np.repeat([[1, 2, 3, 5]], T // 4, axis=1).repeat(B, axis=0)
    ids = np.pad(ids, ((0, 0), (0, T - ids.shape[1])), constant_values=5)
    ids[:, 3:9] = ids[0, -7:] = 0
    return jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize("dtype, tolerance", [(F32, 1e-5), (BF16, 8e-3)])
@pytest.mark.parametrize("shape, history, pack", [((2, 200, 520), True, True), ((1, 1030, 256), False, False), ((2, 64, 48), True, False)])
def test_short_conv(shape, history, pack, dtype, tolerance):
    """The kernel sums in float32 and rounds once, as XLA does; chosen when nothing is said, and the same by its name."""
    B, T, C = shape
    ids = packed(B, T) if pack else None
    operands = [noise(0, *shape, dtype=dtype), noise(1, 4, C), *([noise(2, B, 3, C, dtype=dtype)] if history else [])]

    def run(x, weight, past=None, implementation=None):
        return short_conv(x, weight, history=past, segment_ids=ids, implementation=implementation)

    *got, text = value_and_gradients(run, operands)
    *named, _ = value_and_gradients(functools.partial(run, implementation="triton"), operands)
    *wanted, plain = value_and_gradients(functools.partial(run, implementation="xla"), operands)
    assert text.count("triton_kernel_call_ffi") == 2 and "triton_kernel_call_ffi" not in plain
    assert apart(got, wanted) < tolerance
    assert apart(got, named) == 0


@pytest.mark.parametrize("dtype, tolerance", [(F32, 1e-5), (BF16, 8e-3)])
@pytest.mark.parametrize("active", [None, (True, False, True)])
def test_short_conv_steps(active, dtype, tolerance):
    """Ten tokens, histories donated: one launch a token, chosen when nothing is said, the same by its name and as plain XLA."""
    widths = 256, 256, 520
    weights = [noise(i, 4, C) for i, C in enumerate(widths)]
    active = None if active is None else jnp.asarray(active)

    def run(implementation):
        step = lambda inputs, histories: short_conv_steps(inputs, weights, histories, active=active, implementation=implementation)
        step, out = jax.jit(step, donate_argnums=1), []
        histories = [noise(9 + i, 3, 3, C, dtype=dtype) for i, C in enumerate(widths)]
        for t in range(10):
            inputs = [noise(20 + 3 * t + i, 3, C, dtype=dtype) for i, C in enumerate(widths)]
            if active is not None:
                inputs = [jnp.where(active[:, None], x, jnp.nan) for x in inputs]
            if t == 0:
                text = step.lower(inputs, histories).compile().as_text()
            outputs, histories = step(inputs, histories)
            out.append(outputs)
        return out, histories, text

    (*got, text), (*named, _), (*wanted, plain) = run(None), run("triton"), run("xla")
    assert text.count("triton_kernel_call_ffi") == 1 and "triton_kernel_call_ffi" not in plain
    assert apart(got[0], wanted[0]) < tolerance
    assert apart(got[1], wanted[1]) == 0 and apart(got, named) == 0


def layer(dtype, D=256, H=2, G=4, K=128, V=128, R=64):
    w = lambda seed, *shape: noise(seed, *shape, scale=shape[0] ** -0.5)
    weights = KDAWeights(
        q_proj=w(0, D, H, K),
        k_proj=w(1, D, H, K),
        v_proj=w(2, D, G, V),
        q_conv=w(3, 4, H * K),
        k_conv=w(4, 4, H * K),
        v_conv=w(5, 4, G * V),
        decay_down=w(6, D, R),
        decay_up=w(7, R, G, K),
        A_log=noise(8, G, scale=0.3),
        dt_bias=noise(9, G, K, scale=0.3) - 2,
        beta_proj=w(10, D, G),
        out_gate=None,
        out_gate_down=w(11, D, R),
        out_gate_up=w(12, R, G, V),
        out_norm=1 + noise(13, V, scale=0.1),
        out_proj=w(14, G, V, D),
    )
    past = lambda seed, heads: noise(seed, 2, 3, heads, dtype=dtype)
    state = KDAState(past(15, H * K), past(16, H * K), past(17, G * V), noise(18, 2, G, K, V, scale=0.1))
    return noise(19, 2, 200, D, dtype=dtype), weights, state


@pytest.mark.parametrize("pack", [True, False])
def test_layer(pack):
    """bfloat16 with all kernels is as far from the float32 layer in plain XLA as bfloat16 in plain XLA is, and near that one."""
    x, weights, state = layer(BF16)
    ids = packed(2, 200) if pack else None

    def run(x, weights, state, implementation=None):
        return kda_layer(x, weights, state=state, segment_ids=ids, return_state=True, implementation=implementation)

    plainly = functools.partial(run, implementation="xla")
    *got, text = value_and_gradients(run, (x, weights, state))
    *narrow, plain = value_and_gradients(plainly, (x, weights, state))
    wide = [jax.tree.map(lambda a: a.astype(F32), tree) for tree in (x, weights, state)]
    with jax.default_matmul_precision("highest"):
        *wanted, _ = value_and_gradients(plainly, wide)
    assert text.count("triton_kernel_call_ffi") == 3 * 2 + 2 + 2 + 3 and "triton_kernel_call_ffi" not in plain
    ours, theirs = apart(got, wanted), apart(narrow, wanted)
    print(f"distance from float32: kernels {ours:.2e}, XLA {theirs:.2e}")
    assert ours < max(2 * theirs, 2e-2)


def test_layer_in_float32():
    """Convolutions and output norm have float32 kernels, the recurrence has none."""
    operands = layer(F32)

    def run(*operands, implementation=None):
        x, weights, state = operands
        return kda_layer(x, weights, state=state, return_state=True, implementation=implementation)

    with jax.default_matmul_precision("highest"):
        *got, text = value_and_gradients(run, operands)
        *wanted, _ = value_and_gradients(functools.partial(run, implementation="xla"), operands)
    assert text.count("triton_kernel_call_ffi") == 3 * 2 + 2
    assert apart(got, wanted) < 1e-4


def step_operands(B=3, H=2, HV=4, K=128, V=128, steps=20):
    rows = [noise(i, steps, B, *shape, dtype=BF16) for i, shape in enumerate([(H, K), (H, K), (HV, V), (HV, K), (HV,)])]
    return rows, noise(5, HV, scale=0.3), noise(6, HV, K, scale=0.3), noise(7, 5, HV, K, V)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_twenty_steps(lower_bound):
    """Over a pool of states, donated: the kernel writes in place, also behind the choice at lowering."""
    rows, A_log, dt_bias, pool = step_operands()
    slots = jnp.asarray([3, -1, 0], jnp.int32)

    def steps(pool, rows, implementation=None):
        options = dict(slots=slots, lower_bound=lower_bound, implementation=implementation)
        return jax.lax.scan(lambda pool, x: kda_decode(*x, A_log, dt_bias, pool, **options)[::-1], pool, rows)

    wanted = jax.jit(functools.partial(steps, implementation="xla"))(pool, rows)
    compiled = jax.jit(steps, donate_argnums=0).lower(pool, rows).compile()
    assert compiled.as_text().count("triton_kernel_call_ffi") == 1
    assert compiled.memory_analysis().alias_size_in_bytes >= pool.nbytes
    kept = np.asarray(pool[jnp.asarray([1, 2, 4])])
    new, o = compiled(pool, rows)
    assert apart(new, wanted[0]) < 1e-5 and apart(o, wanted[1]) < 4e-3
    np.testing.assert_array_equal(new[jnp.asarray([1, 2, 4])], kept)
    assert not np.any(np.asarray(o[:, 1], np.float32))


def test_a_step_is_differentiated_by_xla():
    rows, A_log, dt_bias, pool = step_operands(steps=1)
    operands = (*(x[0] for x in rows), A_log, dt_bias, pool[:3])
    *got, text = value_and_gradients(kda_decode, operands)
    *wanted, _ = value_and_gradients(functools.partial(kda_decode, implementation="xla"), operands)
    assert "triton_kernel_call_ffi" not in text and apart(got, wanted) < 1e-5
    with pytest.raises(NotImplementedError, match="no gradient"):
        value_and_gradients(functools.partial(kda_decode, implementation="triton"), operands)
