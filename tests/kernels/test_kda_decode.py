"""The one-token step in plain XLA against gated_kda with T = 1 and against a row of 20 tokens; pools, gradients, errors, the choice.

Shapes: B rows, H query/key heads, HV value heads, K, V channels, N slots.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.kda import decode, triton_launch
from moejax.ops import gated_kda, kda_decode

B, H, HV, K, V, N = 3, 2, 4, 5, 7, 6
NAMES = ("q", "k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias", "state")


def make(tokens=None, dtype=np.float64, seed=0, B=B, K=K, V=V):
    """Operands in NAMES; with `tokens` the first five are [B,T,...]."""
    rng = np.random.default_rng(seed)
    row = (B,) if tokens is None else (B, tokens)
    shapes = [(*row, H, K)] * 2 + [(*row, HV, V), (*row, HV, K), (*row, HV)]
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    wide = np.float64 if dtype == np.float64 else np.float32
    return arrays + [jnp.asarray(rng.normal(size=shape), wide) for shape in ((HV,), (HV, K), (B, HV, K, V))]


def one_token(*operands, **options):
    """gated_kda by the token recurrence."""
    *arrays, A_log, dt_bias, state = operands
    options = dict(implementation="reference") | options
    arrays = (x[:, None] for x in arrays)
    o, final = gated_kda(*arrays, A_log, dt_bias, initial_state=state, output_final_state=True, **options)
    return o[:, 0], final


def assert_close(got, wanted, tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lower_bound, scale, without", [(-5.0, None, ()), (None, 0.3, ()), (-5.0, None, (5, 6)), (None, None, (5,))])
def test_is_one_token_of_gated_kda(x64, lower_bound, scale, without):
    """Values and every gradient, in float64."""
    operands = [None if i in without else x for i, x in enumerate(make())]
    options = dict(lower_bound=lower_bound, scale=scale)
    results = []
    for step in (kda_decode, one_token):
        out, vjp = jax.vjp(lambda operands, step=step: step(*operands, **options), operands)
        results.append((out, vjp((out[0] + 1, out[1] - 1))))
    assert_close(*results, 1e-11)


def test_twenty_steps(x64):
    """A scan of steps gives what gated_kda gives for the row, output, state and gradients."""
    *rows, A_log, dt_bias, state = make(tokens=20, seed=1)

    def steps(rows, state):
        step = lambda state, x: kda_decode(*x, A_log, dt_bias, state)[::-1]
        final, o = jax.lax.scan(step, state, [jnp.moveaxis(x, 1, 0) for x in rows])
        return jnp.moveaxis(o, 0, 1), final

    def row(rows, state):
        return gated_kda(*rows, A_log, dt_bias, initial_state=state, output_final_state=True)

    results = []
    for run in (steps, row):
        out, vjp = jax.vjp(run, rows, state)
        results.append((out, vjp((out[0] + 1, out[1] - 1))))
    assert_close(*results, 1e-9)


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_dtypes(dtype, tolerance):
    operands = make(dtype=dtype)
    o, state = jax.jit(kda_decode)(*operands)
    assert o.dtype == dtype and state.dtype == jnp.float32
    with jax.enable_x64(True):
        wanted = kda_decode(*(np.asarray(x, np.float64) for x in operands))
    np.testing.assert_allclose(np.asarray(o, np.float64), wanted[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(state, wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [None, (4, -1, 0)])
def test_bfloat16_state_is_widened_and_rounded_once(slots):
    """The step of the same state in float32, rounded; a pool keeps its other slots' bits."""
    operands = make(dtype=np.float32)
    state = operands[7] if slots is None else jnp.asarray(np.random.default_rng(3).normal(size=(N, HV, K, V)), jnp.float32)
    narrow, slots = state.astype(jnp.bfloat16), None if slots is None else jnp.asarray(slots)
    run = jax.jit(lambda state: kda_decode(*operands[:7], state, slots=slots))
    o, new = run(narrow)
    wanted_o, wanted = run(narrow.astype(jnp.float32))
    assert o.dtype == jnp.float32 and new.dtype == jnp.bfloat16
    np.testing.assert_allclose(o, wanted_o, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(new.astype(jnp.float32), wanted, rtol=2**-8)  # 2^-9, or the next value where float32 differs in its order
    if slots is not None:
        np.testing.assert_array_equal(new[jnp.asarray([1, 2, 3, 5])], narrow[jnp.asarray([1, 2, 3, 5])])


@pytest.mark.parametrize("steps", [2000, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_bfloat16_state_does_not_drift(steps):
    """Against float64, heads of decays 0.9994, 0.98, 0.64 and 0.03 a token: 0.8 percent or less, as much at the end as in the middle.

    Every token overwrites a part of the state, so a rounding error is forgotten with what it belongs to.
    """
    heads, width, rng = 4, 16, np.random.default_rng(0)
    shapes = [(1, 1, width)] * 2 + [(1, heads, width)] * 2 + [(1, heads)]
    rows = [rng.normal(size=(steps, *shape)).astype(np.float32) for shape in shapes]
    rate, bias = np.zeros(heads, np.float32), np.broadcast_to(np.linspace(-9, 1, heads, dtype=np.float32)[:, None], (heads, width))

    def run(dtype, state_dtype):
        state = jnp.zeros((1, heads, width, width), state_dtype)
        operands = [jnp.asarray(x, dtype) for x in (*rows, rate, bias)]
        step = lambda state, x: kda_decode(*x, *operands[5:], state)[::-1]
        final, o = jax.jit(lambda rows: jax.lax.scan(step, state, rows))(operands[:5])
        return np.asarray(o, np.float64)[:, 0], np.asarray(final, np.float64)[0]

    with jax.enable_x64(True):
        wanted_o, wanted = run(np.float64, np.float64)
    o, final = run(np.float32, jnp.bfloat16)
    norm = lambda x: np.sqrt(np.square(x).sum((-2, -1)))
    assert np.all(norm(final - wanted) < 1.2e-2 * norm(wanted))
    halves = [norm((o - wanted_o)[part].swapaxes(0, 1)) / norm(wanted_o[part].swapaxes(0, 1)) for part in np.split(np.arange(steps), 2)]
    assert np.all(halves[1] < 1.2e-2) and np.all(halves[1] < 1.1 * halves[0])


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32"])
def test_pool(x64, dtype):
    """Rows work on the slots they name; a skipped row gives 0, may hold NaN, has gradient 0 and touches nothing."""
    named = np.array([4, 250, 0], np.uint32) if dtype == "uint32" else np.array([4, -1, 0], dtype)
    operands = make()
    pool = jnp.asarray(np.random.default_rng(3).normal(size=(N, HV, K, V)))
    wanted_o, wanted_state = one_token(*operands[:7], pool[jnp.asarray([4, 5, 0])])
    poisoned = [x.at[1].set(jnp.nan) for x in operands[:5]] + operands[5:7]
    pool = pool.at[jnp.asarray([1, 5])].set(jnp.nan)

    def run(operands, pool):
        return kda_decode(*operands, pool, slots=jnp.asarray(named))

    (o, new), vjp = jax.vjp(run, poisoned, pool)
    kept = np.array([0, 2])
    assert_close((o[kept], new[jnp.asarray([4, 0])]), (wanted_o[kept], wanted_state[kept]), 1e-11)
    assert not np.any(o[1])
    np.testing.assert_array_equal(new[jnp.asarray([1, 2, 3, 5])], pool[jnp.asarray([1, 2, 3, 5])])
    d_operands, d_pool = vjp((jnp.ones_like(o), jnp.ones_like(new)))
    assert all(np.all(np.isfinite(x)) for x in d_operands) and np.all(np.isfinite(d_pool))
    assert all(not np.any(x[1]) for x in d_operands[:5])
    np.testing.assert_array_equal(d_pool[jnp.asarray([1, 2, 3, 5])], 1)
    o2, new2 = jax.jit(lambda o, p, s: kda_decode(*o, p, slots=s))(poisoned, pool, jnp.asarray(named))
    assert_close((o2, jnp.nan_to_num(new2)), (o, jnp.nan_to_num(new)), 1e-12)


def test_a_pool_of_more_slots_than_the_dtype_holds():
    operands = make(dtype=np.float32, B=1)
    pool = jnp.zeros((300, HV, K, V))
    o, new = kda_decode(*operands[:7], pool, slots=jnp.asarray([100], jnp.int8))
    assert np.any(new[100]) and np.all(np.isfinite(o))


def test_bad_input():
    operands = dict(zip(NAMES, make(dtype=np.float32), strict=True))
    pool = jnp.zeros((N, HV, K, V))
    slots = lambda *numbers: jnp.asarray(numbers, jnp.int32)
    for changed, match in (
        ({"q": operands["q"][:, 0]}, r"q has shape .* 3 axes \[B,H,K\]"),
        ({"v": operands["v"][0]}, r"v has shape .* 3 axes \[B,HV,V\]"),
        ({"k": operands["k"][:, :1]}, "k has shape"),
        ({"raw_gate": operands["raw_gate"][..., :2]}, "raw_gate has shape"),
        ({"beta_logits": operands["beta_logits"][:, :1]}, "beta_logits has shape"),
        ({"A_log": operands["A_log"][:1]}, "A_log has shape"),
        ({"dt_bias": operands["dt_bias"][:, :1]}, "dt_bias has shape"),
        ({"v": jnp.zeros((B, 3, V))}, "multiple of the query/key heads"),
        ({"q": jnp.zeros((0, H, K))}, "at least 1"),
        ({"q": operands["q"].astype(jnp.float16)}, "float16"),
        ({"state": operands["state"].astype(jnp.float16)}, "float16"),
        ({"state": jnp.zeros((B, HV, K, V), jnp.int32)}, "state has dtype int32"),
        ({"state": operands["state"][:2]}, "state has shape"),
        ({"state": pool}, "without slots"),
        ({"state": pool[..., :1], "slots": slots(0, 1, 2)}, "with slots"),
        ({"state": pool, "slots": slots(0, 1)}, "slots is int32"),
        ({"state": pool, "slots": jnp.zeros(3)}, "slots is float32"),
        ({"state": pool, "slots": slots(2, -1, 2)}, "slot 2 2 times"),
        ({"lower_bound": -7.0}, "lower_bound"),
        ({"scale": "large"}, "scale"),
        ({"implementation": "reference"}, "known: xla, triton"),
    ):
        with pytest.raises(ValueError, match=match):
            kda_decode(**(operands | changed))
    kda_decode(**(operands | {"state": pool, "slots": slots(-1, -1, 9)}))  # skipped rows may name the same nothing


def test_choice(monkeypatch):
    """By name it runs or says why not; the kernel's own gradient is an error, that of the choice is XLA's."""
    operands = make(dtype=jnp.bfloat16, K=16, V=32)
    monkeypatch.setattr(triton_launch, "available", lambda: None)
    with pytest.raises(NotImplementedError, match="of kda_decode cannot run: its kernels run on NVIDIA GPUs, this is 'cpu'"):
        kda_decode(*operands, implementation="triton")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for other, match in (
        (make(dtype=np.float32), "multiples of 16 up to 256 channels, here K = 5"),
        (make(dtype=np.float32, K=272, V=16), "K = 272"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            kda_decode(*other, implementation="triton")
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        kda_decode(*make(K=16, V=16), implementation="triton")
    loss = lambda q, **options: jnp.sum(kda_decode(q, *operands[1:], **options)[1])
    with pytest.raises(NotImplementedError, match="'triton' of kda_decode has no gradient"):
        jax.grad(lambda q: loss(q, implementation="triton"))(operands[0])
    monkeypatch.setattr(decode, "run_differentiating_plain", with_stand_in(decode.run_differentiating_plain))
    for name in (None, "xla"):
        gradient = jax.jit(jax.grad(lambda q, name=name: loss(q, implementation=name)))
        assert np.array_equal(gradient(operands[0]), jax.jit(jax.grad(lambda q: loss(q, implementation="xla")))(operands[0]))
    for platform, count in (("cuda", 0), ("cpu", 1)):
        text = jax.jit(kda_decode).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
        assert ("exponential" in text) == count


def with_stand_in(run):
    """Kernels that return the value and the state they get."""

    def stand_in(name, what, kernels, plain, operands):
        return run(name, what, lambda *a: (a[2], a[7]), plain, operands)

    return stand_in
