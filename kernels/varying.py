"""Marks on arrays that change no value: the mesh axes they vary over inside shard_map, and a barrier for XLA's fusions."""

import jax
from jax import lax


def match_varying(x, *others):
    """x, marked as varying over every manual mesh axis that one of `others` varies over (no-op outside shard_map)."""
    axes = frozenset().union(*(jax.typeof(y).manual_axis_type.varying for y in others)) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def barrier_on_cuda(tree):
    """The arrays of `tree`, each behind an optimization barrier where the call is lowered for cuda: XLA fuses nothing across it.

    For small arrays whose consumers XLA would cut into more launches, one by one, than it makes of them when they simply lie there.
    """
    return jax.tree.map(lambda x: lax.platform_dependent(x, cuda=lax.optimization_barrier, default=lambda x: x), tree)
