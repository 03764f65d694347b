"""Folding the affine maps S -> M S + A of a row's segments, in order: the state at the start of each, and the gradient at the end of each.

One program carries 16 value columns of one head, as the 16 rows of S^T: a product of 16 rows a segment, and as many programs as heads
times V/16. Products in three tf32 terms: as exact as float32 (1e-6), 4 us a segment on an H200 where Triton's float32 ("ieee") takes 115.

Shapes: B rows, S segments, HV heads, K, V channels; matrix [B,S,HV,K,K], add [B,S,HV,K,V], state [B,HV,K,V], all float32.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax import lax

from . import triton_launch

ROWS = tl.constexpr(16)


@triton.jit
def fold_kernel(state, add, matrix, S, HV, states, last, K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr):
    """states [B,S,HV,K,V]: what each segment starts from (REVERSE: the last one first, M^T for M), last [B,HV,K,V]: what the end gives."""
    head = tl.program_id(0) // (V // ROWS)
    column = tl.program_id(0) % (V // ROWS) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, K)[:, None]
    j = tl.arange(0, K)[None, :]
    inside = j * V + column
    square = k * K + j if REVERSE else k + j * K  # of M: what takes channel k of S^T to channel j of the next one
    start = (head // HV).to(tl.int64) * S * HV + head % HV  # of [B,S,HV], segment 0
    x = tl.load(state + head.to(tl.int64) * K * V + inside)
    for i in tl.range(S, num_stages=2):
        at = start + (S - 1 - i if REVERSE else i) * HV
        tl.store(states + at * K * V + inside, x)
        x = tl.dot(x, tl.load(matrix + at * K * K + square), tl.load(add + at * K * V + inside), input_precision="tf32x3")
    tl.store(last + head.to(tl.int64) * K * V + inside, x)


def fold_states(state, add, matrix):
    """state: at the start of the first segment -> the state at the start of each [B,S,HV,K,V] and at the end of the last [B,HV,K,V]."""
    return _fold(state, add, matrix, False)


def fold_gradients(d_state, d_add, matrix):
    """d_state: at the end of the last segment; d_add: what each segment's own outputs give at its start -> the gradient at the end of
    each segment [B,S,HV,K,V] and at the start of the first [B,HV,K,V]. matrix: that of the forward pass, not transposed."""
    return _fold(d_state, d_add, matrix, True)


def _fold(state, add, matrix, reverse):
    b, s, hv, k, v = add.shape
    if k > 128:  # M fits neither the registers nor the shared memory of a program
        return _fold_by_xla(state, add, matrix, reverse)
    outputs = jax.ShapeDtypeStruct(add.shape, jnp.float32), jax.ShapeDtypeStruct(state.shape, jnp.float32)
    # A warp for 16 channels of the product: M takes 64 registers a thread then, and as many its rounding errors.
    launch = dict(grid=(b * hv * (v // 16),), num_warps=k // 16, K=k, V=v, REVERSE=reverse)
    return triton_launch.call(fold_kernel, state, add, matrix, s, hv, out_type=outputs, **launch)


def _fold_by_xla(state, add, matrix, reverse):
    states = []
    for s in range(add.shape[1])[:: -1 if reverse else 1]:
        states.append(state)
        m = jnp.swapaxes(matrix[:, s], -1, -2) if reverse else matrix[:, s]
        state = jnp.matmul(m, state, precision=lax.Precision.HIGHEST) + add[:, s]
    return jnp.stack(states[:: -1 if reverse else 1], axis=1), state
