"""The device mesh."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import AxisType, Mesh


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis."""

    data: int = 1
    """Copies of the model that read different rows."""
    fsdp: int = 1
    """Rows and parameters, both sharded."""
    expert: int = 1
    """Rows and experts, both sharded."""
    sequence: int = 1
    """Time."""
    tensor: int = 1
    """Heads and hidden channels."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"MeshConfig.{field.name} is {value!r}; it must be an integer of at least 1.")

    @property
    def size(self) -> int:
        return math.prod(dataclasses.astuple(self))


def make_mesh(config: MeshConfig) -> Mesh:
    """A mesh over the first `config.size` devices with Auto axes; axes of size 1 are kept so that every name resolves.

    Raises:
      ValueError: more devices wanted than there are.
    """
    devices = jax.devices()
    if config.size > len(devices):
        hint = ""
        if devices[0].platform == "cpu":
            hint = f" XLA_FLAGS=--xla_force_host_platform_device_count={config.size} makes so many of one CPU."
        raise ValueError(f"{config} needs {config.size} devices; there are {len(devices)} of kind {devices[0].platform}.{hint}")
    shape = dataclasses.asdict(config)
    types = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=types, devices=devices[: config.size])
