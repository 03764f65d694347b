"""Every GPU kernel of KDA compiles to PTX and lowers for cuda on a machine without a GPU.

ptxas comes with Triton.
"""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, os.path.dirname(__file__))
from lowering import absent_h200, launches

from moejax.kernels.kda import gated_kda, kda, kda_decode, triton, triton_launch

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The PTX of each kernel compiled in this file: {name: [(ptx, shared bytes)]}. A kernel that is asked for again is not in it twice."""
    triton_launch._jax_triton()
    from jax_triton import triton_lib

    found, compile_kernel = {}, triton_lib.TritonFunction._compile_kernel

    def record(self, *args):
        out = compile_kernel(self, *args)
        found.setdefault(self.name, []).append((out[-1].binary, out[-1].shared_mem_bytes))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_lib.TritonFunction, "_compile_kernel", record)
        yield found


def operands(batch, tokens, heads, value_heads, K, V, *, wide=F32, documents=None):
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype)
    rows = () if documents is None else (documents,)
    row = (batch, tokens)
    arrays = [shape(BF16, *row, heads, K)] * 2 + [shape(BF16, *row, value_heads, V)]
    arrays += [shape(wide, *row, value_heads, K), shape(wide, *row, value_heads)]
    return arrays, [shape(F32, value_heads), shape(F32, value_heads, K)], shape(F32, batch, *rows, value_heads, K, V)


def total(o, final):
    return jnp.sum(o.astype(F32)) + jnp.sum(final)


def fused_loss(arrays, gate, initial, ids=None, num_segments=None):
    options = dict(initial_state=initial, segment_ids=ids, num_segments=num_segments, output_final_state=True)
    return total(*gated_kda(*arrays, *gate, **options))


def plain_loss(arrays, initial, ids=None):
    return total(*kda(*arrays, lower_bound=-5.0, initial_state=initial, segment_ids=ids, output_final_state=True))


FORWARD, BACKWARD = 2, 3  # launches a window: prep, walk; prep, both walks, grads


def test_training_step_of_a_layer():
    """K = V = 128, 96 heads, gate and norms inside: one window, five launches; no kernel asks for global scratch (call checks it)."""
    count = launches(jax.grad(fused_loss, argnums=(0, 1, 2)), *operands(1, 8192, 96, 96, 128, 128, wide=BF16))
    assert count == FORWARD + BACKWARD


def test_windows_and_packing():
    arrays, gate, initial = operands(2, 8192, 24, 48, 64, 64)
    ids = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
    window, segment = triton.cut(2, 48, 64, 64, 8192)
    assert segment == 0
    count = launches(jax.grad(fused_loss, argnums=(0, 1, 2)), arrays, gate, initial, ids)
    assert count == -(-8192 // window) * (FORWARD + BACKWARD)


def test_buffers_taken_over_are_the_last_outputs():
    """XLA passes outputs in order behind the operands, and an aliased one has no parameter: in front it would shift the others by one."""
    arrays, gate, initial = operands(1, 2048, 96, 96, 128, 128)
    assert triton.cut(1, 96, 128, 128, 16384)[0] < 16384
    long = [jax.ShapeDtypeStruct((1, 16384, *x.shape[2:]), x.dtype) for x in arrays]
    text = jax.jit(jax.grad(fused_loss, argnums=(0, 1, 2))).trace(long, gate, initial, None).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@triton_kernel_call_ffi" in line]
    taken = 0
    for line in calls:
        outputs = line[line.rindex("->") :].count("tensor<")
        aliased = [int(x) for x in re.findall(r"output_tuple_indices = \[(\d+)\]", line)]
        assert aliased == list(range(outputs - len(aliased), outputs)), line[-400:]
        taken += len(aliased)
    assert taken == 1 + 5  # o, and the five gradients of tokens


def in_a_loop(monkeypatch, place=None):
    """A map over rows, each in two windows with their gradients, and a scan of decoding steps; lowered for the card."""
    monkeypatch.setattr(triton, "cut", lambda *sizes: (64, 0))
    arrays, gate, state = operands(1, 128, 2, 2, 128, 128)
    row = lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    token = lambda x: jax.ShapeDtypeStruct((3, 1, *x.shape[2:]), x.dtype)

    def both(rows, tokens, gate, state):
        def row(x):
            o, vjp = jax.vjp(lambda *x: gated_kda(*x, *gate)[0], *x)
            return o, vjp(o)

        return jax.lax.map(row, rows), jax.lax.scan(lambda s, x: kda_decode(*x, *gate, s)[::-1], state, tokens)

    arguments = (tuple(map(row, arrays)), tuple(map(token, arrays)), gate, state)
    if place is not None:
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    return jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",))


def test_a_kernel_that_writes_in_place_stands_between_barriers(monkeypatch):
    """What XLA fuses with slices and stacks in a loop must not write through an operand: the stack would not change."""
    lines = in_a_loop(monkeypatch).as_text().splitlines()
    barriers = [line for line in lines if "optimization_barrier" in line]
    behind = {line.split("=")[0].strip().split(":")[0] for line in barriers}
    calls = [line for line in lines if "@triton_kernel_call_ffi" in line and "output_tuple_indices" in line]
    for line in calls:
        read = re.findall(r"(%\w+)(?:#\d+)?", line.split("@triton_kernel_call_ffi(")[1].split(")")[0])
        assert set(read) <= behind, (read, line[-300:])
        result = re.escape(line.split("=")[0].strip().split(":")[0])
        assert any(re.search(rf"optimization_barrier .*{result}\b", barrier) for barrier in barriers), line[-300:]
    assert len(calls) == 1 + 1 + 1  # the second window of o and of the gradients, the state of the decoding step


def test_no_kernel_in_a_fusion_writes_in_place(monkeypatch):
    inside, found = "", []
    for line in in_a_loop(monkeypatch, absent_h200()).compile().as_text().splitlines():
        inside = line if line.startswith(("%", "ENTRY")) else inside
        if "output_to_operand_aliasing" in line and "triton_kernel_call_ffi" in line:
            found.append("fusion" not in inside.split("(")[0])
    assert found == [True] * 3


def test_few_heads_in_segments():
    """Forward also the summaries and their folding, backward also the first reverse walk and its folding."""
    arrays, _, initial = operands(1, 16384, 4, 4, 128, 128, wide=BF16)
    count = launches(jax.grad(plain_loss, argnums=(0, 1)), arrays, initial)
    assert count == FORWARD + 2 + BACKWARD + 2


def test_a_state_per_document():
    arrays, gate, initial = operands(1, 1000, 2, 2, 128, 64, documents=7)
    ids = jax.ShapeDtypeStruct((1, 1000), jnp.int32)
    count = launches(jax.grad(functools.partial(fused_loss, num_segments=7), argnums=(0, 1, 2)), arrays, gate, initial, ids)
    assert count == FORWARD + BACKWARD


def test_256_channels():
    arrays, gate, initial = operands(1, 64, 1, 2, 256, 256)
    assert launches(jax.grad(fused_loss, argnums=(0, 1, 2)), arrays, gate, initial) == FORWARD + BACKWARD


def test_lowering_for_other_platforms_has_no_kernel():
    arrays, gate, initial = operands(1, 64, 1, 1, 64, 64)
    for platform in ("cpu", "tpu"):
        text = jax.jit(jax.grad(fused_loss)).trace(arrays, gate, initial).lower(lowering_platforms=(platform,)).as_text()
        assert "triton" not in text


def ptxas(ptx, folder):
    """Registers, spilled bytes and the warnings of ptxas about wgmma (C75xx)."""
    from triton.backends.nvidia.compiler import get_ptxas

    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(file), "-o", str(folder / "kernel.cubin")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    numbers = [int(x) for x in re.findall(r"Used (\d+) registers", text)]
    spilled = sum(int(x) for x in re.findall(r"(\d+) bytes spill", text))
    return max(numbers), spilled, re.findall(r"C75\d\d", text)


@pytest.mark.parametrize("layers, window", [(1, 2048), (4, 8192)])
def test_what_xla_makes_of_it(monkeypatch, layers, window):
    """Compiled for an H200 that is not here: no branch is left, the windows write in place, and what lies between kernels is bounded.

    One layer in windows of an eighth; four layers, whose forward passes must not keep what the backward pass prepares again.
    """
    T, H, D = (16384, 32, 128) if layers == 1 else (8192, 32, 128)
    monkeypatch.setattr(triton, "cut", lambda *sizes: (window, 0))
    place = absent_h200()
    arrays, gate, _ = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), operands(1, T, H, H, D, D, wide=BF16))

    def loss(arrays, gate):
        q, *others = arrays
        for _ in range(layers):
            q = q + gated_kda(q, *others, *gate)[0]
        return jnp.sum(q.astype(F32))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(arrays, gate).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') >= layers * (T // window) * BACKWARD
    assert " copy(" not in text and " conditional(" not in text
    token = T * H * D * 2  # bytes of q
    between = min(window, T) * H * (3 * 2 * D + 2 * 2 * 32 + 4 * D // 32 + 2 * 2 * D * D // 32 + 2 * 2 * D)
    # q of each layer, its gradient, o and its gradient, gradients of a layer and their sums: eight arrays of this size at least.
    assert compiled.memory_analysis().temp_size_in_bytes <= between + (layers + 10) * token


# Bytes that may spill: a few values around a loop cost nothing that can be measured; a spilled accumulator is kilobytes.
SPILLED, SHARED = 512, 227 * 1024


def test_what_ptxas_says(compiled, tmp_path):
    """The kernels of training at K = V = 128: no wgmma is serialised (C7510 to C7516), next to nothing spills, shared memory fits, every
    barrier is closed where the kernel ends, so that no tile takes its place (triton_barriers).

    C7517, a wait that ptxas adds before registers of a wgmma are read, is let pass once a kernel: where a walk ends.
    """
    for stage in triton.stages():
        for kernel in vars(sys.modules[stage.__module__]).values():
            getattr(kernel, "_jT_kernel_cache", {}).clear()
    compiled.clear()
    launches(jax.grad(fused_loss, argnums=(0, 1, 2)), *operands(1, 4096, 96, 96, 128, 128, wide=BF16))
    assert compiled
    for name, builds in compiled.items():
        for ptx, shared in builds:
            registers, spilled, warnings = ptxas(ptx, tmp_path)
            report = f"{name}: {registers} registers, {spilled} bytes spilled, {shared} bytes of shared memory {warnings or ''}"
            print(report)
            assert warnings in ([], ["C7517"]) and spilled <= SPILLED and shared <= SHARED, report
            assert ptx.count("mbarrier.init") == ptx.count("mbarrier.inval"), report
            last = max(ptx.rfind("mbarrier.init"), ptx.rfind("mbarrier.try_wait"), ptx.rfind("mbarrier.arrive"))
            assert last < 0 or last < ptx.find("mbarrier.inval"), report
    closing = {name for name, builds in compiled.items() if "mbarrier.inval" in builds[0][0]}
    assert closing >= {"forward_kernel", "both_kernel", "grads_kernel"}
