"""Entry point of the grouped product: checks, then the chosen implementation.

Shapes: N rows, K input width, M output width, E groups (experts).
"""

import jax.numpy as jnp

from ..common import require_float, require_rank
from ..varying import match_varying
from . import reference, xla

IMPLEMENTATIONS = ("reference", "xla")


def grouped_matmul(x, w, group_sizes, *, implementation=None):
    """Multiply consecutive groups of rows with the matrix of their group.

    The first group_sizes[0] rows of x take w[0], the next group_sizes[1] rows take w[1], and so on. Any distribution is
    exact: nothing is dropped when all rows fall into one group.

    Args:
      x: [N,K] rows sorted by group.
      w: [E,K,M].
      group_sizes: [E] int32, not negative, of sum at most N.
      implementation: "reference" (loop over all groups), "xla" (loop over blocks of rows), or None for "xla".

    Returns:
      [N,M] in x's dtype, accumulated in float32 (float64 for float64 inputs). Rows past the sum of group_sizes give
      0, get gradient 0 and are never read. The gradient of an empty group's matrix is exactly 0.

    Raises:
      ValueError: ranks, shapes or dtypes that do not fit, or an implementation that does not exist here.
    """
    require_rank(2, "[N,K]", x=x)
    require_rank(3, "[E,K,M]", w=w)
    require_rank(1, "[E]", group_sizes=group_sizes)
    require_float(x=x, w=w)
    if x.dtype != w.dtype:
        raise ValueError(
            f"x is {x.dtype} and w is {w.dtype}: cast one of them, the product is computed in a single dtype."
        )
    if x.shape[1] != w.shape[1] or group_sizes.shape[0] != w.shape[0] or 0 in x.shape or 0 in w.shape:
        raise ValueError(
            f"x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} must be [N,K], [E,K,M], [E], no axis empty."
        )
    if group_sizes.dtype != jnp.int32:
        raise ValueError(f"group_sizes has dtype {group_sizes.dtype}; it must be int32.")
    arrays = (x, w, group_sizes)  # inside shard_map a replicated w becomes varying, so that its gradient is summed
    return resolve(implementation)(*(match_varying(a, *arrays) for a in arrays))


def resolve(implementation):
    """The function behind an implementation's name, or ValueError."""
    require_implementation(implementation)
    return reference.grouped_matmul if implementation == "reference" else xla.grouped_matmul


def require_implementation(implementation):
    """Raise ValueError unless the name is None or one of IMPLEMENTATIONS."""
    if implementation == "triton":
        raise ValueError('implementation="triton" of the grouped product is not in this version; use "xla" or None.')
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: choose one of {', '.join(IMPLEMENTATIONS)}, or None.")
