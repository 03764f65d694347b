"""Packed documents do not meet: when one changes, not a bit of the other's outputs and gradients does, wherever in a chunk they touch.

flash-linear-attention PR 1184: the reference itself leaked, so tests against it passed; here it is tested like the fast form.

Shapes: T tokens, H heads, K = V channels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.kda import gated_kda

T, H, K = 40, 2, 8


def operands(seed):
    rng = np.random.default_rng(seed)
    shapes = [(1, T, H, K)] * 4 + [(1, T, H)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@functools.cache
def runner(lower_bound, implementation):
    A_log, dt_bias = jnp.asarray([0.3, -0.4]), jnp.asarray(np.random.default_rng(9).normal(size=(H, K)), jnp.float32)

    @jax.jit
    def run(tokens, ids, d_o):
        call = lambda *x: gated_kda(*x, A_log, dt_bias, lower_bound=lower_bound, segment_ids=ids, implementation=implementation)[0]
        o, vjp = jax.vjp(call, *tokens)
        return o, *vjp(d_o)

    return run


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_one_document_changes_and_the_others_keep_their_bits(implementation, lower_bound):
    run, one, two = runner(lower_bound, implementation), operands(0), operands(1)
    d_o = jnp.asarray(np.random.default_rng(5).normal(size=(1, T, H, K)), jnp.float32)
    for boundary in (1, 3, 15, 16, 17, 39):
        ids = jnp.asarray(np.where(np.arange(T) < boundary, 1, 2)[None], jnp.int32)
        whole = run(one, ids, d_o)
        first_changed = run([jnp.concatenate([y[:, :boundary], x[:, boundary:]], 1) for x, y in zip(one, two, strict=True)], ids, d_o)
        second_changed = run([jnp.concatenate([x[:, :boundary], y[:, boundary:]], 1) for x, y in zip(one, two, strict=True)], ids, d_o)
        for name, a, b, c in zip(("o", "q", "k", "v", "gate", "beta"), whole, first_changed, second_changed, strict=True):
            assert np.array_equal(a[:, boundary:], b[:, boundary:]), (name, boundary)
            assert np.array_equal(a[:, :boundary], c[:, :boundary]), (name, boundary)
            if boundary not in (1, 39) or name not in ("q", "gate"):
                assert not np.array_equal(a[:, :boundary], b[:, :boundary]), (name, boundary)
