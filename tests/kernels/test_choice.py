"""The switch between kernels and plain XLA without a GPU: what is chosen and said, and that a switch changes no value and no gradient."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from moejax.kernels.kda import choice, triton_launch
from moejax.kernels.varying import barrier_on_cuda
from moejax.ops import KDAWeights, gated_kda, kda_layer, short_conv
from moejax.ops.routing import select
from moejax.ops.short_conv import _refused, _step_refused, short_conv_steps

P = PartitionSpec


def plain(x, weight, shift, ids):
    """Of a few operands, one of them integer and one None, two results."""
    wide = jnp.exp(jnp.sin(x.astype(jnp.float32))) * weight
    return (wide if shift is None else wide + shift).astype(x.dtype), jnp.where(ids[:, None] > 0, wide, 0)


def stand_in(x, weight, shift, ids):
    return x + 1, 0 * plain(x, weight, shift, ids)[1]


OPERANDS = jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.ones(3), None, jnp.asarray([1, 0, 2, 0])
switched = functools.partial(choice.run_keeping_inputs, "lowered", stand_in, plain)


def loss(run, *operands):
    y, z = run(operands)
    return jnp.sum(jnp.sin(y)) + jnp.sum(z * z)


def test_a_switch_that_keeps_inputs_changes_nothing():
    """Values and gradients on the CPU, under jit, vmap and remat; for cuda the other function is lowered, in both directions."""
    plainly = lambda operands: plain(*operands)
    for x, y in zip(jax.jit(switched)(OPERANDS), plain(*OPERANDS), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    wanted = jax.grad(functools.partial(loss, plainly), (0, 1))(*OPERANDS)
    for run in (switched, jax.checkpoint(switched)):
        for x, y in zip(jax.jit(jax.grad(functools.partial(loss, run), (0, 1)))(*OPERANDS), wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
    axes = (0, None, None, 0)
    rows = [x if a is None else x[:, None] for x, a in zip(OPERANDS, axes, strict=True)]
    mapped = jax.jit(jax.vmap(jax.grad(functools.partial(loss, switched), (0, 1)), in_axes=axes))(*rows)
    np.testing.assert_allclose(mapped[0][:, 0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(mapped[1].sum(0), wanted[1], rtol=1e-6)
    for platform, count in (("cuda", 0), ("cpu", 1)):
        text = jax.jit(lambda x: switched((x, *OPERANDS[1:]))[0]).trace(OPERANDS[0]).lower(lowering_platforms=(platform,)).as_text()
        assert ("exponential" in text) == count


def test_shard_map():
    """Varying axes checked: the gradient of a replicated operand is the sum over the shards."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def local(x, weight, ids):
        return jax.lax.psum(loss(switched, x, weight, None, ids), "rows")

    over = jax.shard_map(local, mesh=mesh, in_specs=(P("rows"), P(), P("rows")), out_specs=P())
    x, weight, _, ids = OPERANDS
    got = jax.jit(jax.grad(over, (0, 1)))(x, weight, ids)
    for a, b in zip(got, jax.grad(functools.partial(loss, lambda o: plain(*o)), (0, 1))(*OPERANDS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_scan_keeps_the_inputs_only():
    def layers(run, x):
        narrow = lambda x: jnp.sin(x.astype(jnp.float16)).astype(x.dtype)
        step = lambda x, _: (run("lowered", lambda x: x * x, narrow, (x,)), None)
        return jax.lax.scan(step, x, None, length=5)[0].sum()

    for run, kept in ((choice.run_keeping_inputs, False), (choice.run, True)):
        text = jax.jit(jax.grad(functools.partial(layers, run))).trace(jnp.ones(7)).lower(lowering_platforms=("cuda",)).as_text()
        assert ("5x7xf16" in text) == kept and "5x7xf32" in text


def test_forward_mode_of_a_kernel_without_gradient():
    run = lambda x, name=None: choice.run_differentiating_plain(name, "it", lambda x, n: x, lambda x, n: jnp.sin(x), (x, None))
    x, one = jnp.asarray(0.3), jnp.asarray(1.0)
    for name in ("lowered", "xla"):
        value, slope = jax.jvp(functools.partial(run, name=name), (x,), (one,))
        np.testing.assert_allclose((value, slope), (np.sin(0.3), np.cos(0.3)), rtol=1e-6)
        np.testing.assert_allclose(jax.grad(functools.partial(run, name=name))(x), np.cos(0.3), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="'triton' of it has no gradient"):
        jax.grad(functools.partial(run, name="triton"))(x)


def test_a_barrier_on_cuda_alone():
    """It is in the program for cuda and in no other, and changes no value, gradient or vmap; over a mesh as well."""

    def run(x, n):
        x, n = barrier_on_cuda((x, n))
        return (jnp.sin(x) * n).sum()

    x, n = jnp.arange(6.0).reshape(2, 3), jnp.arange(3)
    for platform, count in (("cuda", 2), ("cpu", 0), ("tpu", 0)):
        text = jax.jit(run).trace(x, n).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == count
    gradient = jax.grad(run)
    np.testing.assert_allclose(jax.vmap(gradient, in_axes=(0, None))(x, n), jnp.cos(x) * n, rtol=1e-6)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    over = jax.shard_map(gradient, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    np.testing.assert_allclose(jax.jit(over)(x, n), jnp.cos(x) * n, rtol=1e-6)


def test_the_top_k_of_a_gpu_has_no_barrier():
    """XLA on a CPU needs one (1.7 s instead of 0.06 s); on a GPU it would be one more launch."""
    for platform, count in (("cuda", 0), ("cpu", 2), ("tpu", 2)):
        text = jax.jit(lambda scores: select(scores, None, 4)).trace(jnp.zeros((8, 24))).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("optimization_barrier") == count


def weights(D=4, H=1, K=4, dtype=jnp.float32, W=4):
    one = lambda *shape: jnp.ones(shape, dtype) / 2
    taps = one(W, H * K)
    gates = (one(D, 2), one(2, H, K), one(H), one(H, K), one(D, H), one(D, H, K), None, None)
    return KDAWeights(one(D, H, K), one(D, H, K), one(D, H, K), taps, taps, taps, *gates, one(K), one(H, K, D))


def test_what_is_chosen_and_said(monkeypatch):
    x, taps = jnp.ones((1, 5, 3)), jnp.ones((4, 3))
    monkeypatch.setattr(triton_launch, "available", lambda: "it is not there")
    with pytest.raises(NotImplementedError, match="of short_conv cannot run: its kernels run on NVIDIA GPUs, this is 'cpu'"):
        short_conv(x, taps, implementation="triton")
    with pytest.raises(ValueError, match="known: xla, triton, or None"):
        short_conv(x, taps, implementation="reference")
    with pytest.raises(NotImplementedError, match="NVIDIA GPUs"):
        kda_layer(jnp.ones((1, 5, 4), jnp.bfloat16), weights(), implementation="triton")
    wanted = kda_layer(jnp.ones((1, 5, 4)), weights(), implementation="reference")[0]
    np.testing.assert_allclose(kda_layer(jnp.ones((1, 5, 4)), weights(), implementation="xla")[0], wanted, rtol=1e-5)
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.setattr(jax, "default_backend", lambda: "gpu")
        for _ in range(2):
            short_conv(x, taps)
            kda_layer(jnp.ones((1, 5, 4)), weights())
        with pytest.raises(NotImplementedError, match="of short_conv cannot run: it is not there; use implementation='xla'"):
            short_conv(x, taps, implementation="triton")
    said = [str(w.message) for w in seen if w.category is RuntimeWarning]
    assert said.count("short_conv runs as plain XLA, 2 to 5 times slower than its kernels: it is not there.") == 1
    assert said.count("kda_layer's output norm runs as plain XLA, slower than its kernels: it is not there.") == 1


def test_what_the_convolution_refuses(x64):
    x = jnp.ones((1, 5, 3))
    for operands, word in (
        ((x.astype(jnp.float32), jnp.ones((9, 3), jnp.float32)), "at most 8 taps, here 9"),
        ((x, jnp.ones((4, 3), jnp.float32)), "float64"),
        ((x.astype(jnp.float32), jnp.ones((4, 3))), "float64"),
        ((jax.ShapeDtypeStruct((65536, 1, 1), jnp.float32), jnp.ones((4, 1), jnp.float32)), "65536 of 1"),
    ):
        assert word in _refused(*operands)
    assert _refused(x.astype(jnp.bfloat16), jnp.ones((8, 3), jnp.float32)) is None


def test_what_the_step_of_convolutions_refuses(x64, monkeypatch):
    def operands(C=(3, 3, 5), W=4, B=1, dtype=jnp.float32):
        number = jax.ShapeDtypeStruct
        return [[number((*shape, c), dtype) for c in C] for shape in ((B,), (W,), (B, W - 1))]

    x, taps, past = operands()
    for refused, word in (
        (operands(C=(3, 3)), "takes three convolutions, here 2"),
        (operands(W=1), "from 2 to 8 taps, the same for all, here 1"),
        ((x, [*taps[:2], operands(W=3)[1][2]], past), "here 3, 4"),
        (operands(dtype=jnp.float64), "float64"),
        (operands(B=65536), "65536"),
        (([*x[:2], operands(dtype=jnp.bfloat16)[0][2]], taps, past), "one dtype, here bfloat16, float32"),
    ):
        assert word in _step_refused(*refused)
    assert _step_refused(*operands()) is None
    ones = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), operands())
    monkeypatch.setattr(triton_launch, "available", lambda: None)
    with pytest.raises(NotImplementedError, match="of short_conv_steps cannot run: its kernels run on NVIDIA GPUs, this is 'cpu'"):
        short_conv_steps(*ones, implementation="triton")
    with pytest.raises(ValueError, match="known: xla, triton, or None"):
        short_conv_steps(*ones, implementation="reference")


@pytest.mark.parametrize("wide", ["A_log", "dt_bias"])
def test_float64_in_the_gate_is_not_for_the_kernels(monkeypatch, x64, wide):
    """One operand of float64 makes the state float64, which the kernels do not give: the two branches would differ in type."""
    monkeypatch.setattr(triton_launch, "available", lambda: None)
    x, beta = jnp.ones((1, 5, 2, 64), jnp.bfloat16), jnp.ones((1, 5, 2), jnp.bfloat16)
    gate = {"A_log": jnp.zeros(2, jnp.float32), "dt_bias": jnp.zeros((2, 64), jnp.float32)}
    gate[wide] = gate[wide].astype(jnp.float64)
    run = jax.jit(lambda gate: gated_kda(x, x, x, x, beta, **gate, output_final_state=True))
    o, state = run(gate)
    assert o.dtype == jnp.bfloat16 and state.dtype == jnp.float64
