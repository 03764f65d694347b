"""What of a parameter lies on one device of a mesh, by the default rules of the axis table."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from jax.sharding import AbstractMesh

from ..parallel.axes import MESH_AXES, AxisRules, logical_axes
from ..parallel.mesh import MeshConfig
from ..shapes import Parameter


@functools.cache
def _axes(name: str, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Mesh axes that may cut each axis of a parameter, by the default rules."""
    every: Any = AbstractMesh((1,) * len(MESH_AXES), MESH_AXES)
    return tuple(AxisRules().mesh_axes(logical, every) for logical in logical_axes(name, ndim))


def _cut(parameter: Parameter, mesh: MeshConfig) -> list[tuple[int, tuple[str, ...]]]:
    """(parts, mesh axes) of each axis; an axis that its mesh axes do not divide stays whole."""
    found = []
    for length, axes in zip(parameter.shape, _axes(parameter.name, len(parameter.shape)), strict=True):
        parts = math.prod(getattr(mesh, axis) for axis in axes)
        found.append((1, ()) if length % parts else (parts, axes))
    return found


def local_size(parameter: Parameter, mesh: MeshConfig, *, gathered: bool = False) -> int:
    """Values of one layer's parameter on one device; `gathered`: while its layer runs, fsdp's shards brought together."""
    mesh = dataclasses.replace(mesh, fsdp=1) if gathered else mesh
    return math.prod(parameter.shape) // math.prod(parts for parts, _ in _cut(parameter, mesh))


def sharded_by(parameter: Parameter, mesh: MeshConfig) -> tuple[str, ...]:
    """Mesh axes of more than one device that cut the parameter."""
    named = {axis for _, axes in _cut(parameter, mesh) for axis in axes}
    return tuple(axis for axis in MESH_AXES if axis in named and getattr(mesh, axis) > 1)
