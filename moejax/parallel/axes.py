"""The one table from logical axes to mesh axes, and the logical axes of every parameter.

No other file writes a PartitionSpec by hand. Mesh axes: data, fsdp, expert, sequence, tensor; each may be absent.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config import ModelConfig

MESH_AXES = ("data", "fsdp", "expert", "sequence", "tensor")
Axis = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Mesh axis, or axes, of each logical axis; None = replicated."""

    batch: Axis = ("data", "fsdp", "expert")
    time: Axis = "sequence"
    embed: Axis = "fsdp"
    vocab: Axis = "tensor"
    heads: Axis = "tensor"
    experts: Axis = "expert"
    width: Axis = "tensor"
    """Hidden channels of a feed-forward or an expert."""

    def mesh_axes(self, logical: str | None, mesh: Mesh) -> tuple[str, ...]:
        """The axes of `mesh` that shard the logical axis."""
        if logical is None:
            return ()
        if logical not in {field.name for field in dataclasses.fields(self)}:
            known = ", ".join(field.name for field in dataclasses.fields(self))
            raise ValueError(f"unknown logical axis {logical!r}; known: {known}.")
        axes = getattr(self, logical)
        axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
        return tuple(axis for axis in axes if axis in mesh.shape)


PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    # model
    "embedding": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    # KDA
    "q_proj": ("embed", "heads", None),
    "k_proj": ("embed", "heads", None),
    "v_proj": ("embed", "heads", None),
    "q_conv": (None, "heads"),
    "k_conv": (None, "heads"),
    "v_conv": (None, "heads"),
    "decay_down": ("embed", None),
    "decay_up": (None, "heads", None),
    "A_log": ("heads",),
    "dt_bias": ("heads", None),
    "beta_proj": ("embed", "heads"),
    "out_gate": ("embed", "heads", None),
    "out_gate_down": ("embed", None),
    "out_gate_up": (None, "heads", None),
    "out_norm": (None,),
    "out_proj": ("heads", None, "embed"),
    # MLA
    "q_down": ("embed", None),
    "q_norm": (None,),
    "q_up": (None, "heads", None),
    "kv_down": ("embed", None),
    "kv_norm": (None,),
    "k_up": (None, "heads", None),
    "v_up": (None, "heads", None),
    "gate": ("embed", "heads", None),
    "out": ("heads", None, "embed"),
    # dense feed-forward
    "gate_proj": ("embed", "width"),
    "up_proj": ("embed", "width"),
    "down_proj": ("width", "embed"),
    # LatentMoE
    "router": ("embed", None),
    "latent_down": ("embed", None),
    "latent_norm": (None,),
    "latent_up": (None, "embed"),
    "expert_gate": ("experts", "embed", "width"),
    "expert_up": ("experts", "embed", "width"),
    "expert_down": ("experts", "width", "embed"),
    "expert_gate_codes": ("experts", "width", "embed"),  # packed experts: rows are outputs, as in the published files
    "expert_gate_scales": ("experts", "width", "embed"),
    "expert_up_codes": ("experts", "width", "embed"),
    "expert_up_scales": ("experts", "width", "embed"),
    "expert_down_codes": ("experts", "embed", "width"),
    "expert_down_scales": ("experts", "embed", "width"),
    "shared_gate": ("embed", "width"),
    "shared_up": ("embed", "width"),
    "shared_down": ("width", "embed"),
    # norms and depth attention
    "weight": (None,),
    "norm_weight": (None,),
    "query": (None,),
    # routing bias
    "bias": (None,),
}
"""Logical axes of each parameter by its name; leading axes of scanned layers are replicated."""
CACHE_AXES: dict[str, tuple[str | None, ...]] = {
    # KDA: moejax.ops.KDAState
    "q_history": ("batch", None, "heads"),
    "k_history": ("batch", None, "heads"),
    "v_history": ("batch", None, "heads"),
    "recurrent": ("batch", "heads", None, None),
    # MLA: what mla_project gives
    "latent": ("batch", None, None),
    "shared_key": ("batch", None, None),
    "lengths": ("batch",),
}
"""Logical axes of what decoding carries from token to token: rows and heads are sharded, cached time is whole."""


def partition_spec(logical: tuple[str | None, ...], mesh: Mesh, rules: AxisRules | None = None) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes.

    Raises:
      ValueError: an unknown logical axis, or a mesh axis that two of the array's axes would use.
    """
    rules = rules or AxisRules()
    used: dict[str, str | None] = {}
    entries: list[Axis] = []
    for name in logical:
        axes = rules.mesh_axes(name, mesh)
        for axis in axes:
            if axis in used:
                raise ValueError(
                    f"logical axes {used[axis]!r} and {name!r} of one array both map to mesh axis {axis!r}; change the AxisRules."
                )
            used[axis] = name
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return PartitionSpec(*entries)


def logical_axes(name: str, ndim: int) -> tuple[str | None, ...]:
    """Logical axes of the parameter `name` with `ndim` axes, the leading ones of scanned layers included."""
    if name not in PARAMETER_AXES:
        raise ValueError(f"parameter {name!r} has no logical axes; add it to moejax.parallel.axes.PARAMETER_AXES.")
    own = PARAMETER_AXES[name]
    if ndim < len(own):
        raise ValueError(f"{name!r} has {ndim} axes here; its logical axes are {own}. Shard factored states by hand.")
    return (None,) * (ndim - len(own)) + own


def parameter_shardings(tree: Any, mesh: Mesh, rules: AxisRules | None = None) -> Any:
    """A NamedSharding for each leaf of a tree of parameters (arrays or ShapeDtypeStructs). A dict's last key is the name.

    An axis whose length the mesh does not divide stays whole. Leaves without a name (counters) are replicated.
    """

    def shard(path, leaf):
        name = next((key.key for key in reversed(path) if isinstance(getattr(key, "key", None), str)), None)
        if name is None or leaf.ndim == 0:
            return NamedSharding(mesh, PartitionSpec())
        return _sharding(logical_axes(name, leaf.ndim), leaf, mesh, rules)

    return jax.tree_util.tree_map_with_path(shard, tree)


def cache_shardings(tree: Any, mesh: Mesh, rules: AxisRules | None = None) -> Any:
    """A NamedSharding for each leaf of a tree of decoding caches: KDAStates, and latents and shared keys by these names.

    Leading axes of stacked layers are replicated; an axis whose length the mesh does not divide stays whole.

    Raises:
      ValueError: a leaf whose last key or field is not in CACHE_AXES.
    """

    def shard(path, leaf):
        name = str(getattr(path[-1], "key", getattr(path[-1], "name", None)))
        if name not in CACHE_AXES:
            raise ValueError(f"cache leaf {jax.tree_util.keystr(path)} is none of {', '.join(CACHE_AXES)}; add it to CACHE_AXES.")
        own = CACHE_AXES[name]
        return _sharding((None,) * (leaf.ndim - len(own)) + own, leaf, mesh, rules)

    return jax.tree_util.tree_map_with_path(shard, tree)


def _sharding(logical: tuple[str | None, ...], leaf: Any, mesh: Mesh, rules: AxisRules | None) -> NamedSharding:
    return NamedSharding(mesh, _divisible(partition_spec(logical, mesh, rules), leaf.shape, mesh))


def divided_sizes(config: ModelConfig) -> dict[str, tuple[int, str]]:
    """{name: (size, logical axis)} of what the layers on a mesh need whole parts of."""
    return {
        "kda.heads": (config.kda.heads, "heads"),
        "mla.heads": (config.mla.heads, "heads"),
        "moe.expert_width": (config.moe.expert_width, "width"),
        "moe.shared_width": (config.moe.shared_width or 0, "width"),
        "moe.experts": (config.moe.experts, "experts"),
    }


def batch_sharding(mesh: Mesh, rules: AxisRules | None = None, *, micro_batches: bool = False) -> NamedSharding:
    """The sharding of tokens and segment ids [B,T], or [M,B,T] with `micro_batches`. The mesh must divide B and T."""
    leading: tuple[None, ...] = (None,) if micro_batches else ()
    return NamedSharding(mesh, partition_spec((*leading, "batch", "time"), mesh, rules))


def _divisible(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    def keep(axis: Axis, length: int) -> Axis:
        axes = () if axis is None else (axis,) if isinstance(axis, str) else axis
        size = 1
        for name in axes:
            size *= mesh.shape[name]
        return axis if length % size == 0 else None

    return PartitionSpec(*(keep(axis, length) for axis, length in zip(spec, shape, strict=True)))
