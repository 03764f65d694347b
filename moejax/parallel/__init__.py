"""The mesh, the table from logical axes to mesh axes, and the layers on a mesh.

`HybridLM(config, parallel=ModelParallel(make_mesh(MeshConfig(...))))` is all that a model needs. The functions called
sequence_* and expert_parallel_* run inside your own `jax.shard_map`, on local arrays.
"""

from .axes import AxisRules, batch_sharding, cache_shardings, logical_axes, parameter_shardings, partition_spec
from .expert_parallel import expert_parallel_latent_moe, expert_parallel_mlp
from .launch import barrier, initialize, leave, who_is_who
from .layers import ModelParallel
from .mesh import MeshConfig, make_mesh
from .sequence_conv import sequence_short_conv, sequence_short_convs
from .sequence_kda import sequence_gated_kda, sequence_kda
from .sequence_kda_layer import sequence_kda_layer
from .sequence_mla import sequence_gated_mla, sequence_latent_attention, sequence_positions

__all__ = [
    "AxisRules",
    "MeshConfig",
    "ModelParallel",
    "barrier",
    "batch_sharding",
    "cache_shardings",
    "expert_parallel_latent_moe",
    "expert_parallel_mlp",
    "initialize",
    "leave",
    "logical_axes",
    "make_mesh",
    "parameter_shardings",
    "partition_spec",
    "sequence_gated_kda",
    "sequence_gated_mla",
    "sequence_kda",
    "sequence_kda_layer",
    "sequence_latent_attention",
    "sequence_positions",
    "sequence_short_conv",
    "sequence_short_convs",
    "who_is_who",
]
