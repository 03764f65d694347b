"""The kernel of latent_decode lowers for cuda and compiles for sm_90a on a machine without a GPU; the cache is never copied.

Needs Python 3.12, jax-triton, Triton and the CUDA plugin of JAX (jax-cuda13-plugin; its libraries are not used).
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

sys.path.insert(0, os.path.dirname(__file__))
from lowering import absent_h200, launches

from moejax.kernels.kda import triton_launch
from moejax.kernels.latent_decode import latent_decode
from moejax.ops.mla import absorbed_latent_attention

BF16 = jnp.bfloat16
P = PartitionSpec
S = jax.ShapeDtypeStruct


def operands(B=2, T=1, H=4, capacity=300, C=64, R=16, dtype=BF16):
    return S((B, T, H, C + R), dtype), S((B, capacity, C), dtype), S((B, capacity, R), dtype), S((B,), jnp.int32)


def decode(*a, **options):
    return latent_decode(*a, scale=0.1, **options)


def test_choice():
    assert launches(decode, *operands()) == 2  # the parts, and what merges them
    for platform in ("cpu", "tpu"):
        assert launches(decode, *operands(), platform=platform) == 0
    for other in (operands(dtype=jnp.float32), operands(T=5), operands(C=192), operands(R=48)):
        assert launches(decode, *other) == 0
    assert launches(lambda *a: decode(*a[:-1], valid=a[-1]), *operands(), S((2, 300), jnp.bool_)) == 0
    assert launches(lambda *a: decode(*a, implementation="xla"), *operands()) == 0


def test_attention_over_the_cache():
    q, latent, shared_key, lengths = operands(T=2)
    up = S((64, 4, 8), BF16), S((64, 4, 24), BF16)
    run = lambda q, *a: absorbed_latent_attention(q[..., :24], *a[:4], lengths=a[4])
    assert launches(run, q, latent, shared_key, *up, lengths) == 2
    plain = lambda q, *a: absorbed_latent_attention(q[..., :24], *a[:4], lengths=a[4], implementation="xla")
    assert launches(plain, q, latent, shared_key, *up, lengths) == 0


def test_vmap_and_shard_map():
    stacked = [S((3, *a.shape), a.dtype) for a in operands()]
    assert launches(jax.vmap(decode), *stacked) == 2
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
    specs = P("rows", None, "heads"), P("rows"), P("rows"), P("rows")
    assert launches(jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=specs[0]), *operands()) == 2


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_nothing_spills(heads, monkeypatch, tmp_path):
    """At the published widths; the tensor cores read the tiles from shared memory, two of which fit a processor."""
    triton_launch._jax_triton()
    from jax_triton import triton_lib
    from triton.backends.nvidia.compiler import get_ptxas

    found, compile_kernel = [], triton_lib.TritonFunction._compile_kernel

    def record(self, *args):
        out = compile_kernel(self, *args)
        found.append((self.name, out[-1]))
        return out

    monkeypatch.setattr(triton_lib.TritonFunction, "_compile_kernel", record)
    assert launches(decode, *operands(B=5, H=heads, capacity=4096, C=512, R=64)) == 2
    assert [name for name, _ in found] == ["part_kernel", "merge_kernel"]
    for name, result in found:
        (tmp_path / "kernel.ptx").write_text(result.binary)
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel.cubin")]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        assert sum(int(x) for x in re.findall(r"(\d+) bytes spill", text)) == 0, (name, text)
        assert "C7517" not in text  # products that ptxas made wait for one another
        assert result.shared_mem_bytes <= 227 * 1024
    code = found[0][1].binary
    # 36 and 32 products of 16 channels or entries; 8 copies of 64 channels and one of the shared key
    assert code.count("wgmma.mma_async") == 68 and len(re.findall(r"cp\.async\.bulk\.tensor", code)) == 9


def test_the_cache_is_not_copied():
    """Compiled for an H200 that is not here: the kernel reads the program's own parameters, and the 19 GB of cache need 5 MB beside."""
    place = absent_h200()
    args = jax.tree.map(lambda a: S(a.shape, a.dtype, sharding=place), operands(B=16, H=16, capacity=2**20, C=512, R=64))
    program = jax.jit(decode).lower(*args).compile()
    text = program.as_text()
    entry = text[text.index("ENTRY") :]
    assert " conditional(" not in text and entry.count('custom_call_target="triton_kernel_call_ffi"') == 2
    parameters = dict(re.findall(r"(%\S+) = \S+ parameter\((\d)\)", entry))
    parameters |= {name: parameters.get(of) for name, of in re.findall(r"(%\S+) = \S+ bitcast\((%[\w.-]+)\)", entry)}
    read = re.search(r"custom-call\((.*?)\), custom_call_target=\"triton_kernel_call_ffi\"", entry)[1]
    named = [parameters.get(x) for x in re.findall(r"%[\w.-]+", read)]
    assert named[:4] == ["0", "1", "2", "3"]
    assert program.memory_analysis().temp_size_in_bytes < 5.5e6
