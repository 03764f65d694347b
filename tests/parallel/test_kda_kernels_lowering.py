"""KDA's GPU kernels on a mesh, lowered for cuda without a GPU: every launch gets this device's part, by rows, heads and tokens.

XLA cannot cut a kernel's launch: outside of shard_map it would gather the operands on every device. Needs what
tests/kernels/test_triton_lowering.py needs.
"""

import math
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "kernels"))
import lowering

from moejax.kernels.kda import triton
from moejax.ops.kda_layer import KDAWeights
from moejax.parallel.layers import ModelParallel, sharded_kda_layer, weight_specs
from moejax.parallel.mesh import MeshConfig, make_mesh
from moejax.parallel.sequence_kda import sequence_gated_kda

B, T, D, H, K = 4, 128, 32, 4, 64
BF16, F32 = jnp.bfloat16, jnp.float32
P = jax.P


def lowered(function, *args):
    """The text for cuda, and the shapes of every kernel's operands."""
    text = lowering.lowered(function, *args)
    calls = re.findall(r"custom_call @triton_kernel_call_ffi\(.*?\) .*? : \((.*?)\) -> ", text)
    shape = lambda x: tuple(int(n) for n in x.split("x")[:-1])
    return text, [[shape(x) for x in re.findall(r"tensor<([^>]*)>", call)] for call in calls]


def weights():
    bf16, f32 = (lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype) for dtype in (BF16, F32))
    projections = *(bf16(D, H, K) for _ in range(3)), *(f32(4, H * K) for _ in range(3))
    gates = bf16(D, 8), bf16(8, H, K), f32(H), f32(H, K), bf16(D, H), bf16(D, H, K), None, None
    return KDAWeights(*projections, *gates, f32(K), bf16(H, K, D))


@pytest.mark.parametrize("axes", [dict(data=2, fsdp=2, tensor=2), dict(data=2, sequence=2, tensor=2)], ids=str)
def test_layer_on_a_mesh(axes):
    """Forward and backward of the layer as HybridLM calls it."""
    parallel = ModelParallel(make_mesh(MeshConfig(**axes)))
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(parallel.mesh, spec))
    given = weights()
    given = jax.tree.map(place, given, weight_specs(given, {}, parallel))
    x = place(jax.ShapeDtypeStruct((B, T, D), BF16), parallel.spec("batch", "time", None))
    ids = place(jax.ShapeDtypeStruct((B, T), jnp.int32), parallel.spec("batch", "time"))

    def loss(x, weights, ids):
        return jnp.sum(sharded_kda_layer(parallel, x, weights, segment_ids=ids).astype(F32))

    _, calls = lowered(jax.grad(loss, argnums=(0, 1)), x, given, ids)
    rows, heads, tokens = B // parallel.size("batch"), H // parallel.size("heads"), T // parallel.size("time")
    # prep, walk; prep, both walks, grads; over shards a second walk forward and prep, reverse backward.
    assert len(calls) >= (5 if parallel.size("time") == 1 else 8)
    shapes = [shape for call in calls for shape in call]
    assert {shape for shape in shapes if len(shape) == 4 and shape[-1] == K} == {(rows, tokens, heads, K)}
    # The largest operand: a state [K,K] for each chunk of 32 tokens. One axis that is not cut would double it.
    assert max(math.prod(shape) for shape in shapes) == rows * heads * (tokens // 32) * K * K


def test_launches_of_a_sharded_row(monkeypatch):
    """Few heads, so segments: what runs on a shard forward and backward, and that XLA's wide pass is not part of the program."""
    mesh = make_mesh(MeshConfig(sequence=4))
    monkeypatch.setattr(triton, "cut", lambda *sizes: (64, 32))
    spec = P(None, "sequence")
    place = lambda dtype, *shape, spec=spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    tokens, size = 4 * 64, 2
    arrays = [place(BF16, B, tokens, size, K)] * 4 + [place(BF16, B, tokens, size)]
    gate = [place(F32, size, spec=P()), place(F32, size, K, spec=P())]

    def run(*arrays):
        local = lambda *a: sequence_gated_kda(*a, axis="sequence")[0]
        return jax.shard_map(local, mesh=mesh, in_specs=(*[spec] * 5, P(), P()), out_specs=spec)(*arrays)

    text, calls = lowered(run, *arrays, *gate)
    # prep; walk and fold of the shard's map; fold from the true state; the walk that gives the outputs
    gathers = lambda text: text.count('"stablehlo.all_gather"(')
    assert len(calls) == 5 and gathers(text) == 1
    loss = lambda *a: jnp.sum(run(*a).astype(F32))
    text, calls = lowered(jax.value_and_grad(loss, argnums=range(7)), *arrays, *gate)
    # and backward: prep, walk, fold for the gradient of the entry state; then the pass of one device: prep, walk, fold; both walks, grads
    assert len(calls) == 5 + 3 + 5 and gathers(text) == 2 and "reduce_scatter" not in text
    assert {shape for call in calls for shape in call if len(shape) == 4 and shape[2:] == (size, K)} == {(B, 64, size, K)}


def test_what_another_platform_runs():
    """The same program on CPU devices: the choice made where it is lowered changes no bit of what "xla" gives, gradients included."""
    rng, mesh = np.random.default_rng(0), make_mesh(MeshConfig(sequence=4))
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), BF16)
    arrays = [normal(1, 36, 2, 16) for _ in range(4)] + [normal(1, 36, 2), normal(2).astype(F32), normal(2, 16).astype(F32)]
    ids = jnp.asarray(np.repeat([[1, 2]], 18, axis=1), jnp.int32)
    spec = P(None, "sequence")

    def loss(arrays, implementation):
        local = lambda ids, *a: sequence_gated_kda(
            *a, axis="sequence", segment_ids=ids, output_final_state=True, implementation=implementation
        )
        o, final = jax.shard_map(local, mesh=mesh, in_specs=(*[spec] * 6, P(), P()), out_specs=(spec, P()))(ids, *arrays)
        return jnp.sum(jnp.sin(o.astype(F32))) + jnp.sum(jnp.cos(final))

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    for x, y in zip(*(jax.tree.leaves(run(arrays, name)) for name in (None, "xla")), strict=True):
        assert np.array_equal(x, y) and np.all(np.isfinite(x))
