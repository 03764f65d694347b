"""What the kernels with rows of their own share: vmap folds into the batch axis, and a sigmoid of few instructions.

Shapes: N size of a vmapped axis, B batch.
"""

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


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

    @jax.custom_batching.custom_vmap
    def call(rows, shared):
        return launch(rows, shared)

    @call.def_vmap
    def vmapped(size, batched, rows, shared):
        rows_batched, shared_batched = batched
        spread = lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        rows = jax.tree.map(spread, rows, rows_batched)
        if any(jax.tree.leaves(shared_batched)):
            shared = jax.tree.map(spread, shared, shared_batched)
            out = jax.lax.map(lambda pair: call(*pair), (rows, shared))
        else:
            out = call(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), shared)
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call(rows, shared)
