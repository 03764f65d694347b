"""Grouped product as a loop over blocks of sorted rows, with its own gradient. Work grows with N + E * rows a block."""

import jax
import jax.numpy as jnp

from ..common import accumulation_dtype
from . import blocks


@jax.custom_vjp
def grouped_matmul(x, w, group_sizes):
    """x [N,K], w [E,K,M], group_sizes [E] -> [N,M]; see api.grouped_matmul."""
    plan = blocks.plan_blocks(group_sizes, x.shape[0])
    dtype = accumulation_dtype(x, w)
    padded = blocks.pad_rows(x, plan)

    def body(block, out):
        rows, matrix = blocks.read_rows(padded, plan, block), blocks.read_group(w, plan, block)
        return blocks.write_rows(out, jnp.matmul(rows, matrix, preferred_element_type=dtype), plan, block)

    out = jnp.zeros((padded.shape[0], w.shape[2]), x.dtype)
    return blocks.finish_rows(blocks.for_each_block(plan, body, out, padded), group_sizes, x.shape[0])


def _forward(x, w, group_sizes):
    return grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _backward(saved, d_out):
    x, w, group_sizes = saved
    plan = blocks.plan_blocks(group_sizes, x.shape[0])
    dtype = accumulation_dtype(x, w)
    padded, d_padded = blocks.pad_rows(x, plan), blocks.pad_rows(d_out.astype(x.dtype), plan)

    def body(block, carry):
        dx, dw = carry
        own = blocks.own_rows(plan, block)
        rows = jnp.where(own, blocks.read_rows(padded, plan, block), 0)
        d_rows = jnp.where(own, blocks.read_rows(d_padded, plan, block), 0)
        matrix = blocks.read_group(w, plan, block)
        dx = blocks.write_rows(dx, jnp.matmul(d_rows, matrix.T, preferred_element_type=dtype), plan, block)
        return dx, blocks.add_group(dw, jnp.matmul(rows.T, d_rows, preferred_element_type=dtype), plan, block)

    empty = (jnp.zeros(padded.shape, x.dtype), jnp.zeros(w.shape, dtype))
    dx, dw = blocks.for_each_block(plan, body, empty, padded)
    return blocks.finish_rows(dx, group_sizes, x.shape[0]), dw.astype(w.dtype), None


grouped_matmul.defvjp(_forward, _backward)
