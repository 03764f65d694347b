"""vmap of kernels whose arrays start with a batch axis: the mapped axis becomes part of it.

Shapes: N size of the mapped axis, B batch.
"""

import jax
import jax.numpy as jnp
from jax import lax


def fold_into_rows(call, size: int, batched, shared, rows, most=None):
    """The rule of a `custom_vmap` of call(shared, rows), whose results and whose `rows` have B first; leaves may be None.

    batched: like (shared, rows). most(rows [N,B,...]): how many examples may go together, the others follow one group after the other;
    None: all. A mapped `shared` runs one call for each example.
    """
    spread = lambda x, is_batched: x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
    rows = jax.tree.map(spread, rows, batched[1])
    if any(jax.tree.leaves(batched[0])):
        shared = jax.tree.map(spread, shared, batched[0])
        out = lax.map(lambda x: call(*x), (shared, rows))
        return out, jax.tree.map(lambda _: True, out)
    allowed = size if most is None else most(rows)
    together = max(n for n in range(1, size + 1) if size % n == 0 and n <= allowed)
    groups = jax.tree.map(lambda x: x.reshape(size // together, together * x.shape[1], *x.shape[2:]), rows)
    if together == size:
        out = jax.tree.map(lambda x: x[None], call(shared, jax.tree.map(lambda x: x[0], groups)))
    else:
        out = lax.map(lambda x: call(shared, x), groups)
    out = jax.tree.map(lambda x: x.reshape(size, x.shape[1] // together, *x.shape[2:]), out)
    return out, jax.tree.map(lambda _: True, out)
