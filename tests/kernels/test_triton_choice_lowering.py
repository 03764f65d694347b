"""Where a call is lowered for cuda its kernels are in it; where it is lowered for cpu or tpu they are not. No GPU is needed.

Needs Python 3.12, jax-triton, Triton and the CUDA plugin of JAX (jax-cuda13-plugin; its libraries are not used).
Shapes: B batch, T tokens, C channels, D model width, H heads, K = V channels of a head, R rank, W = 4 taps.
"""

import os
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

sys.path.insert(0, os.path.dirname(__file__))
from lowering import absent_h200, launches, lowered

from moejax.kernels.kda import kda_decode
from moejax.ops import KDAState, KDAWeights, kda_layer, short_conv
from moejax.ops.short_conv import short_conv_steps
from moejax.parallel import sequence_kda_layer, sequence_short_conv

BF16, F32 = jnp.bfloat16, jnp.float32
P = PartitionSpec
S = jax.ShapeDtypeStruct
CONV = S((2, 130, 64), BF16), S((4, 64), F32), S((2, 3, 64), BF16), S((2, 130), jnp.int32)


def conv_loss(x, weight, history, ids):
    y, last = short_conv(x, weight, history=history, segment_ids=ids)
    return (y.astype(F32) ** 2).sum() + (last.astype(F32) ** 2).sum()


def layer(B=1, T=40, D=32, H=1, K=64, R=8, dtype=BF16):
    w = lambda *shape: S(shape, F32)
    taps = w(4, H * K)
    gates = (w(D, R), w(R, H, K), w(H), w(H, K), w(D, H), w(D, H, K), None, None)
    weights = KDAWeights(w(D, H, K), w(D, H, K), w(D, H, K), taps, taps, taps, *gates, w(K), w(H, K, D))
    past = S((B, 3, H * K), dtype)
    return S((B, T, D), dtype), weights, S((B, T), jnp.int32), KDAState(past, past, past, S((B, H, K, K), F32))


def run_layer(x, weights, ids, state):
    return kda_layer(x, weights, segment_ids=ids, state=state, return_state=True)


def test_short_conv():
    gradient = jax.value_and_grad(conv_loss, argnums=(0, 1, 2))
    assert launches(gradient, *CONV) == 2
    assert launches(jax.grad(conv_loss), *CONV[:2], None, None) == 2
    for platform in ("cpu", "tpu"):
        assert launches(gradient, *CONV, platform=platform) == 0
    wide = S((9, 64), F32)  # more taps than the kernel takes
    assert launches(lambda x, w: short_conv(x, w)[0], CONV[0], wide) == 0
    assert launches(lambda x, w: short_conv(x, w, implementation="xla")[0], *CONV[:2]) == 0


def test_short_conv_steps():
    """Three convolutions of one token in one launch; what the kernel does not take runs as plain XLA."""
    steps = lambda C=(64, 64, 96), W=4, dtype=BF16: [
        tuple(S((*shape, c), t) for c in C) for shape, t in (((2,), dtype), ((W,), F32), ((2, W - 1), dtype))
    ]
    run = lambda *a: short_conv_steps(*a[:3], active=a[3] if len(a) > 3 else None)
    assert launches(run, *steps()) == launches(run, *steps(dtype=F32), S((2,), jnp.bool_)) == 1
    for platform in ("cpu", "tpu"):
        assert launches(run, *steps(), platform=platform) == 0
    for operands in (steps(W=1), steps(W=9), steps(C=(64, 64))):
        assert launches(run, *operands) == 0
    assert launches(lambda *a: short_conv_steps(*a, implementation="xla"), *steps()) == 0
    gradient = jax.grad(lambda x, *a: sum(y.astype(F32).sum() for y in run(x, *a)[0]))
    assert launches(gradient, *steps()) == 0  # through XLA


def test_layer():
    """Three convolutions, prep and walk of the recurrence, the output norm."""
    assert launches(run_layer, *layer()) == 3 + 2 + 1
    for platform in ("cpu", "tpu"):
        assert launches(run_layer, *layer(), platform=platform) == 0
    # The recurrence has no float32 kernel; convolutions and norm have.
    assert launches(run_layer, *layer(dtype=F32)) == 3 + 1
    assert launches(lambda *a: kda_layer(*a, implementation="xla")[0], *layer()[:2]) == 0
    assert launches(lambda *a: kda_layer(*a, implementation="reference")[0], *layer()[:2]) == 0


def test_a_scan_keeps_the_inputs_only():
    """Nothing of float32 [layers,B,T,C] goes from the forward loop to the backward one: XLA's sums would, as zeros."""

    def loss(x, weight):
        step = lambda carry, _: (short_conv(carry, weight)[0], None)
        return jax.lax.scan(step, x, None, length=3)[0].astype(F32).sum()

    text = lowered(jax.grad(loss, argnums=(0, 1)), *CONV[:2])
    assert text.count("@triton_kernel_call_ffi") == 2 and "3x2x130x64xbf16" in text and "3x2x130x64xf32" not in text


def test_vmap_and_remat():
    stacked = lambda a: S((3, *a.shape), a.dtype)
    gradient = jax.vmap(jax.grad(jax.checkpoint(conv_loss), argnums=(0, 1, 2)), in_axes=(0, None, 0, 0))
    x, weight, history, ids = CONV
    assert launches(gradient, stacked(x), weight, stacked(history), stacked(ids)) == 2


def test_tokens_over_several_devices():
    """Inside shard_map, varying axes checked; a replicated weight gets the sum of all shards' gradients."""
    mesh = jax.make_mesh((2, 2), ("rows", "tokens"), axis_types=(AxisType.Auto,) * 2)
    place = P("rows", "tokens")

    def conv(x, weight, ids):
        y, _ = sequence_short_conv(x, weight, axis="tokens", segment_ids=ids)
        return jax.lax.psum((y.astype(F32) ** 2).sum(), ("rows", "tokens"))

    over = jax.shard_map(conv, mesh=mesh, in_specs=(place, P(), place), out_specs=P())
    assert launches(jax.grad(over, argnums=(0, 1)), *CONV[:2], CONV[3]) == 2
    assert launches(jax.grad(over, argnums=(0, 1)), *CONV[:2], CONV[3], platform="cpu") == 0

    def loss(x, weights, ids):
        y, _ = sequence_kda_layer(x, weights, axis="tokens", segment_ids=ids)
        return jax.lax.psum((y.astype(F32) ** 2).sum(), ("rows", "tokens"))

    over = jax.shard_map(loss, mesh=mesh, in_specs=(place, P(), place), out_specs=P())
    assert launches(over, *layer(B=2, T=80)[:3]) >= 3 + 1
    assert launches(jax.grad(over), *layer(B=2, T=80)[:3], platform="cpu") == 0


STEP = [S((2, h, 64), BF16) for h in (2, 2, 4, 4)] + [S((2, 4), BF16), S((4,), F32), S((4, 64), F32)]


def test_decode():
    """One kernel; a step that is differentiated is XLA's; the state's buffer is given on."""
    state, pool, slots = S((2, 4, 64, 64), F32), S((7, 4, 64, 64), F32), S((2,), jnp.int32)
    step = lambda *a: kda_decode(*a)
    paged = lambda *a: kda_decode(*a[:-1], slots=a[-1], lower_bound=None)
    text = lowered(step, *STEP, state, donate_argnums=7)
    assert text.count("@triton_kernel_call_ffi") == 1
    assert re.search(r"tf.aliasing_output = 1|jax.buffer_donor", text)
    assert launches(paged, *STEP, pool, slots, donate_argnums=7) == 1
    stacked = lambda a: S((3, *a.shape), a.dtype)
    mapped = jax.vmap(step, in_axes=(0,) * 5 + (None, None, 0))
    assert launches(mapped, *map(stacked, STEP[:5]), *STEP[5:], stacked(state)) == 1
    loss = lambda *a: sum(jnp.sum(x.astype(F32)) for x in step(*a))
    assert launches(jax.grad(loss, argnums=range(8)), *STEP, state) == 0
    for platform in ("cpu", "tpu"):
        assert launches(step, *STEP, state, platform=platform) == 0
        assert launches(paged, *STEP, pool, slots, platform=platform) == 0


def test_what_xla_makes_of_it():
    """Compiled for an H200 that is not here: no branch is left, a donated state is written in place, a scan keeps inputs only."""
    place = absent_h200()

    def compiled(function, *args, **options):
        args = jax.tree.map(lambda a: S(a.shape, a.dtype, sharding=place), args)
        program = jax.jit(function, **options).lower(*args).compile()
        return program.as_text(), program.memory_analysis()

    def steps(state, rows, A_log, dt_bias):
        return jax.lax.scan(lambda state, x: kda_decode(*x, A_log, dt_bias, state)[::-1], state, rows)

    state = S((2, 4, 64, 64), F32)
    text, memory = compiled(steps, state, [S((8, *a.shape), a.dtype) for a in STEP[:5]], *STEP[5:], donate_argnums=0)
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1 and " conditional(" not in text
    assert memory.alias_size_in_bytes == 4 * state.size and memory.temp_size_in_bytes < state.size

    def loss(x, weight):
        layer = lambda carry, _: (short_conv(carry, weight)[0], None)
        return jax.lax.scan(layer, x, None, length=4)[0].astype(F32).sum()

    x, weight = S((1, 8192, 1024), BF16), S((4, 1024), F32)
    text, memory = compiled(jax.grad(loss, argnums=(0, 1)), x, weight)
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 2 and " conditional(" not in text
    assert memory.temp_size_in_bytes < 6 * 2 * x.size  # the inputs of four layers, and two more (XLA's own form: 64)
