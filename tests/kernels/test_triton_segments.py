"""Folding the segments' affine maps (kernels/kda/triton_segments.py): the kernel's own source, run on NumPy, against float64."""

import os
import sys

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernel is Triton's; its source cannot be read without it")

sys.path.insert(0, os.path.dirname(__file__))
import gluon_numpy as gn

from moejax.kernels.kda import triton_launch, triton_segments


def launch(kernel, *operands, out_type, grid, num_warps, **arguments):
    outputs = [np.full(x.shape, np.nan, x.dtype) for x in out_type]
    gn.run(kernel, grid, *operands, *outputs, num_warps=num_warps, **arguments)
    return tuple(outputs)


@pytest.mark.parametrize("b, s, hv, k, v", [(1, 1, 1, 64, 64), (2, 5, 3, 64, 128), (1, 3, 2, 128, 64), (1, 2, 1, 256, 64)])
def test_folds(monkeypatch, b, s, hv, k, v):
    monkeypatch.setattr(triton_launch, "call", launch)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    state, add, matrix = draw(b, hv, k, v), draw(b, s, hv, k, v), draw(b, s, hv, k, k) / np.float32(k**0.5)
    exact, want = state.astype(np.float64), []
    for i in range(s):
        want.append(exact)
        exact = matrix[:, i].astype(np.float64) @ exact + add[:, i]
    states, last = triton_segments.fold_states(state, add, matrix)
    np.testing.assert_allclose(states, np.stack(want, axis=1), atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(last, exact, atol=2e-5, rtol=2e-5)
    exact, want = state.astype(np.float64), []
    for i in reversed(range(s)):
        want.append(exact)
        exact = np.swapaxes(matrix[:, i], -1, -2).astype(np.float64) @ exact + add[:, i]
    states, last = triton_segments.fold_gradients(state, add, matrix)
    np.testing.assert_allclose(states, np.stack(want[::-1], axis=1), atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(last, exact, atol=2e-5, rtol=2e-5)
