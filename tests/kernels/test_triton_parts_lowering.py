"""Convolution, gated norm and one-token steps compile for sm_90a and lower for cuda on a machine without a GPU, under every transform.

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
from lowering import absent_h200, launches, lowered

from moejax.kernels.kda import triton_conv, triton_conv_step, triton_decode, triton_launch, triton_norm

BF16, F32 = jnp.bfloat16, jnp.float32
P = PartitionSpec
S = jax.ShapeDtypeStruct


def conv_step(inputs, weights, histories, active=None):
    return triton_conv_step.conv_step_triton(inputs, weights, histories, active=active)


def conv_loss(x, weight, history, ids):
    y, last = triton_conv.conv_silu_triton(x, weight, history=history, segment_ids=ids)
    return (y.astype(F32) ** 2).sum() + (last.astype(F32) ** 2).sum()


def norm_loss(x, gate, weight):
    return (triton_norm.gated_rms_norm_triton(x, gate, weight, eps=1e-5).astype(F32) ** 2).sum()


CONV = S((2, 130, 520), BF16), S((4, 520), F32), S((2, 3, 520), BF16), S((2, 130), jnp.int32)
NORM = S((2, 130, 4, 128), BF16), S((2, 130, 4, 128), BF16), S((128,), F32)
STEP = [S((2, h, 128), BF16) for h in (2, 2, 4, 4)] + [S((2, 4), BF16), S((4,), F32), S((4, 128), F32), S((2, 4, 128, 128), F32)]
CONV_STEP = tuple(S((2, C), BF16) for C in (256, 256, 520)), tuple(S((4, C), F32) for C in (256, 256, 520))
CONV_STEP += (tuple(S((2, 3, C), BF16) for C in (256, 256, 520)), S((2,), jnp.bool_))
stacked = lambda a, n=3: S((n, *a.shape), a.dtype)


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_conv(history, packed):
    x, weight, past, ids = CONV
    operands = (x, weight, past if history else None, ids if packed else None)
    assert launches(jax.grad(conv_loss, argnums=(0, 1, 2) if history else (0, 1)), *operands) == 2


def test_vmap_is_one_launch():
    x, weight, past, ids = CONV
    gradient = jax.grad(conv_loss, argnums=(0, 1, 2))
    assert launches(jax.vmap(gradient, in_axes=(0, None, 0, 0)), stacked(x), weight, stacked(past), stacked(ids)) == 2
    assert launches(jax.vmap(gradient, in_axes=(0, 0, 0, None)), stacked(x), stacked(weight), stacked(past), ids) == 2  # in a loop
    assert launches(jax.vmap(jax.grad(norm_loss, argnums=(0, 1, 2)), in_axes=(0, 0, None)), *map(stacked, NORM[:2]), NORM[2]) == 2
    step = jax.vmap(lambda *a: triton_decode.kda_decode_triton(*a), in_axes=(0,) * 5 + (None, None, 0))
    assert launches(step, *(stacked(a) if i not in (5, 6) else a for i, a in enumerate(STEP))) == 1
    inputs, weights, histories, active = CONV_STEP
    inputs, histories = jax.tree.map(stacked, (inputs, histories))
    assert launches(jax.vmap(conv_step, in_axes=(0, None, 0, None)), inputs, weights, histories, active) == 1
    assert launches(jax.vmap(conv_step, in_axes=(0, 0, 0)), inputs, jax.tree.map(stacked, weights), histories) == 1  # in a loop


def test_remat_and_scan_keep_the_inputs_only():
    def loss(x, weight):
        layer = jax.checkpoint(lambda carry, _: (triton_conv.conv_silu_triton(carry, weight)[0], None))
        return jax.lax.scan(layer, x, None, length=3)[0].astype(F32).sum()

    assert launches(jax.grad(loss, argnums=(0, 1)), *CONV[:2]) == 2


def test_shard_map():
    """Rows and channels, heads: the gradient of a replicated weight is added up over the rows' axis."""
    mesh = jax.make_mesh((2, 2), ("rows", "model"), axis_types=(AxisType.Auto,) * 2)
    x, weight, _, ids = S((2, 130, 1040), BF16), S((4, 1040), F32), None, CONV[3]
    conv = jax.grad(lambda x, w, i: conv_loss(x, w, None, i), argnums=(0, 1))
    specs = (P("rows", None, "model"), P(None, "model"))
    assert launches(jax.shard_map(conv, mesh=mesh, in_specs=(*specs, P("rows")), out_specs=specs), x, weight, ids) == 2
    specs = (P("rows", None, "model"), P("rows", None, "model"), P())
    norm = jax.shard_map(jax.grad(norm_loss, argnums=(0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=specs)
    assert launches(norm, *NORM) == 2
    rows = P("rows", "model")
    specs = (rows,) * 5 + (P("model"), P("model"), rows)
    step = jax.shard_map(lambda *a: triton_decode.kda_decode_triton(*a), mesh=mesh, in_specs=specs, out_specs=(rows, rows))
    assert launches(step, *STEP) == 1
    wide = jax.tree.map(lambda a: S((*a.shape[:-1], 1040), a.dtype), CONV_STEP[:3])
    specs = (P("rows", "model"), P(None, "model"), P("rows", None, "model"))
    step = jax.shard_map(conv_step, mesh=mesh, in_specs=(*specs, P("rows")), out_specs=specs[::2])
    assert launches(step, *wide, CONV_STEP[3]) == 1


def test_convolution_step_overwrites_the_histories():
    text = lowered(conv_step, *CONV_STEP)
    # Last of the outputs: the kernel gets the buffers of q, k and v as the first ones behind the operands.
    for i in range(3):
        assert f"output_tuple_indices = [{3 + i}], operand_index = {i}" in text
    float_histories = tuple(S(a.shape, F32) for a in CONV_STEP[2])
    for operands in (CONV_STEP[:3], (*CONV_STEP[:2], float_histories, CONV_STEP[3])):
        assert launches(conv_step, *operands, donate_argnums=2) == 1


def test_donated_histories_are_not_copied():
    """Compiled for an H200 that is not here: beside the launch, the inputs are joined."""
    place = absent_h200()
    args = jax.tree.map(lambda a: S(a.shape, a.dtype, sharding=place), CONV_STEP[:3])
    text = jax.jit(conv_step, donate_argnums=2).lower(*args).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    assert " copy(" not in entry and entry.count(" fusion(") == 1 and entry.count(" custom-call(") == 1


def test_step_overwrites_the_state():
    text = jax.jit(lambda *a: triton_decode.kda_decode_triton(*a)).trace(*STEP).lower(lowering_platforms=("cuda",)).as_text()
    # Last of the outputs: the kernel gets o's buffer as the first one behind the operands.
    assert "output_tuple_indices = [1], operand_index = 0" in text
    paged = lambda *a: triton_decode.kda_decode_triton(*a[:-1], slots=a[-1], lower_bound=None)
    for dtype in (F32, BF16):
        pool = [*STEP[:5], None, None, S((7, 4, 128, 128), dtype), S((2,), jnp.int32)]
        assert launches(paged, *pool, donate_argnums=7) == 1


def test_nothing_spills(monkeypatch, tmp_path):
    """W = 4 packed, V = 128, K = V = 128, one token of W = 8, bfloat16, of shapes that no other test here compiles."""
    triton_launch._jax_triton()
    from jax_triton import triton_lib
    from triton.backends.nvidia.compiler import get_ptxas

    found, compile_kernel = [], triton_lib.TritonFunction._compile_kernel

    def record(self, *args):
        out = compile_kernel(self, *args)
        found.append((self.name, out[-1].binary))
        return out

    monkeypatch.setattr(triton_lib.TritonFunction, "_compile_kernel", record)
    wide = S((1, 8192, 12288), BF16), S((4, 12288), F32), None, S((1, 8192), jnp.int32)
    launches(jax.grad(conv_loss, argnums=(0, 1)), *wide)
    launches(jax.grad(norm_loss, argnums=(0, 1, 2)), S((1, 8192, 96, 128), BF16), S((1, 8192, 96, 128), BF16), S((128,), BF16))
    wide = [S((2, 16, 128), BF16)] * 4 + [S((2, 16), BF16), None, None, S((2, 16, 128, 128), F32)]
    launches(lambda *a: triton_decode.kda_decode_triton(*a), *wide)
    step = [tuple(S((*shape, 4096), BF16) for _ in range(3)) for shape in ((2,), (8,), (2, 7))]
    launches(conv_step, *step, S((2,), jnp.bool_))
    assert len(found) == 6
    for name, ptx in found:
        (tmp_path / "kernel.ptx").write_text(ptx)
        command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel.cubin")]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        assert sum(int(x) for x in re.findall(r"(\d+) bytes spill", text)) == 0, (name, text)
