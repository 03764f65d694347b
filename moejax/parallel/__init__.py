"""The mesh and the table from logical axes to mesh axes."""

from .axes import AxisRules, batch_sharding, logical_axes, parameter_shardings, partition_spec
from .mesh import MeshConfig, make_mesh

__all__ = [
    "AxisRules",
    "MeshConfig",
    "batch_sharding",
    "logical_axes",
    "make_mesh",
    "parameter_shardings",
    "partition_spec",
]
