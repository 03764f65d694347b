"""One helper for `jax.shard_map(check_vma=True)`: arrays of one loop must vary over the same manual mesh axes."""

import jax
from jax import lax


def match_varying(x, *others):
    """x, marked as varying over every manual mesh axis that one of `others` varies over (no-op outside shard_map)."""
    axes = frozenset().union(*(jax.typeof(y).manual_axis_type.varying for y in others)) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
