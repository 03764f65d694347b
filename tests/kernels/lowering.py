"""For tests that lower the GPU kernels without a GPU: importing this skips the test file where the software is missing.

Needs Python 3.12, jax-triton, Triton and the CUDA plugin of JAX (jax-cuda13-plugin; its libraries are not used).
"""

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

pytest.importorskip("jax_triton", reason="jax-triton is not installed (pip install 'moejax[triton]')")

from moejax.kernels.kda import triton_launch

if (reason := triton_launch.available()) is not None:
    pytest.skip(reason=f"the GPU kernels cannot be lowered by this installation: {reason}", allow_module_level=True)
if not hasattr(pytest.importorskip("jaxlib.gpu_triton"), "TritonKernel"):
    pytest.skip(reason="the CUDA plugin of JAX is not installed (pip install jax-cuda13-plugin)", allow_module_level=True)

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64  clock_rate_ghz: 1.98
  device_memory_size: 151397597184  shared_memory_per_block_optin: 232448  registers_per_core_limit: 65536
  registers_per_block_limit: 65536  device_address_bits: 64  device_vendor: "NVIDIA Corporation"  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"  runtime_version: "12.8.0"  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
}
platform_name: "CUDA"  dnn_version_info { major: 9 minor: 10 }  device_description_str: "NVIDIA H200"
"""


def lowered(function, *args, platform="cuda", **options) -> str:
    return jax.jit(function, **options).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def launches(function, *args, **options) -> int:
    """How many kernels the lowered program launches."""
    return lowered(function, *args, **options).count("@triton_kernel_call_ffi")


def absent_h200() -> NamedSharding:
    """One H200 that is not here, to compile for."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the CUDA runtime of JAX is not installed (pip install jax-cuda13-pjrt)")
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=TARGET, topology="1x1x1")
    return NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())
