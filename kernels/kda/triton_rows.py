"""What the kernels with rows of their own share: vmap folds into the batch axis, and a sigmoid of few instructions.

Shapes: N size of a vmapped axis, B batch.
"""

import functools

import jax
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from .rows import fold_into_rows


@triton.jit
def sigmoid(x):
    """1 / (1 + 2^(-x log2 e)) by the two approximate instructions (2 ulp each): 5 instructions, where exp and / take 13.

    -inf gives 0 and inf 1. These kernels issue so many instructions that this decides their time.
    """
    one_more = 1.0 + tl.exp2(x * -1.4426950408889634)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [one_more], dtype=tl.float32, is_pure=True, pack=1)


def over_rows(launch, rows, shared):
    """launch(rows, shared) -> arrays; every leaf of `rows` and of the result has the batch axis B first, `shared` has none.

    Under vmap N and B become one axis. A vmapped `shared` runs one call for each of the N. Leaves may be None.
    """

    call = jax.custom_batching.custom_vmap(lambda shared, rows: launch(rows, shared))
    call.def_vmap(functools.partial(fold_into_rows, call))
    return call(shared, rows)
