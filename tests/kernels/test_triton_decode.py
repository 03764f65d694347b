"""The one-token KDA kernel: its own source on NumPy, and on the card, against the recurrence in float64."""

import os
import sys

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the decode kernel is Triton's; install moejax[triton] (Python 3.12)")
sys.path.insert(0, os.path.dirname(__file__))

import gluon_numpy as gn  # noqa: E402

from moejax.kernels.kda import triton_decode as decode  # noqa: E402

bf16 = gn.bf16
EPS = 1e-6


def case(B, H, HV, K, V, dtype=bf16, seed=0, slots=None, bound=-5.0):
    """Operands of kda_decode_triton by name."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, H, K), "k": (B, H, K), "v": (B, HV, V), "raw_gate": (B, HV, K), "beta_logits": (B, HV)}
    data = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    data["raw_gate"][:, :, 0] = -1e4  # saturated: no decay at all (bounded) and exactly none (softplus)
    data["raw_gate"][:, :, 1] = 30.0
    data["A_log"] = rng.normal(size=HV).astype(np.float32)
    data["dt_bias"] = rng.normal(size=(HV, K)).astype(np.float32)
    count = B if slots is None else 5
    data["state"] = rng.normal(size=(count, HV, K, V)).astype(np.float32)
    return data


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def expected(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, *, slots=None, bound=-5.0, gated=True, normalize=True):
    """One token by the formulas, float64. -> o, state"""
    q, k, v, g, beta, state = (np.array(x, np.float64) for x in (q, k, v, raw_gate, beta_logits, state))
    group, K = v.shape[1] // q.shape[1], q.shape[2]
    if normalize:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + EPS) for x in (q, k))
    if gated:
        rate = 1.0 if A_log is None else np.exp(np.float64(A_log))[:, None]
        g = g + (0.0 if dt_bias is None else np.float64(dt_bias))
        g = -rate * np.logaddexp(0, g) if bound is None else bound * sigmoid(rate * g)
        beta = sigmoid(beta)
    out = np.zeros(v.shape)
    for b in range(v.shape[0]):
        place = b if slots is None else int(slots[b])
        if not 0 <= place < state.shape[0]:
            continue
        for h in range(v.shape[1]):
            s = np.exp(g[b, h])[:, None] * state[place, h]
            s = s + beta[b, h] * np.outer(k[b, h // group], v[b, h] - s.T @ k[b, h // group])
            state[place, h] = s
            out[b, h] = K**-0.5 * s.T @ q[b, h // group]
    return out, state


def emulated(q, k, v, raw_gate, beta_logits, A_log, dt_bias, state, *, slots=None, bound=-5.0, gated=True, normalize=True):
    """The kernel on NumPy with the library's own grid and sizes. -> o, state"""
    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    config = decode.decode_config(K, V)
    warps = config.pop("warps")
    out, state = np.full(v.shape, np.nan, v.dtype), state.copy()
    options = dict(HV=HV, GROUP=HV // H, K=K, V=V, N=state.shape[0], GATED=gated, NORMALIZE=normalize, EPS=EPS, SCALE=K**-0.5, **config)
    grid = (triton.cdiv(V, config["BV"]), HV, B)
    operands = (state, q, k, v, raw_gate, beta_logits, A_log, dt_bias, slots, out)
    gn.run(decode.decode_kernel, grid, *operands, BOUND=0.0 if bound is None else bound, num_warps=warps, order="shuffle", **options)
    return out, state


def close(got, want, tolerance):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), 1e-30)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(
    "B, H, HV, K, V", [(2, 2, 2, 32, 32), (1, 2, 8, 128, 64), (1, 1, 1, 16, 16), (1, 1, 3, 48, 80), (1, 1, 1, 256, 240)]
)
def test_values(B, H, HV, K, V, bound):
    data = case(B, H, HV, K, V, np.float32)
    for got, want in zip(emulated(**data, bound=bound), expected(**data, bound=bound), strict=True):
        close(got, want, 1e-5)


def test_bfloat16_and_the_bare_recurrence():
    data = case(2, 1, 2, 32, 48)
    o, state = emulated(**data)
    want_o, want_state = expected(**data)
    close(o, want_o, 4e-3)
    close(state, want_state, 1e-5)
    bare = data | {"raw_gate": -np.abs(data["raw_gate"]), "beta_logits": np.abs(data["beta_logits"]), "A_log": None, "dt_bias": None}
    bare["raw_gate"][:, :, 0] = 0
    for got, want in zip(emulated(**bare, gated=False, normalize=False), expected(**bare, gated=False, normalize=False), strict=True):
        close(got, want, 4e-3)


def test_bfloat16_state():
    """Half the bytes: widened, computed in float32 and rounded once."""
    data = case(2, 1, 2, 32, 48, np.float32)
    data["state"] = data["state"].astype(bf16)
    o, state = emulated(**data)
    assert state.dtype == bf16
    want_o, want_state = expected(**data)
    close(o, want_o, 1e-5)
    close(state, want_state, 2e-3)
    slots = np.array([3, -1], np.int32)
    data = case(2, 1, 1, 16, 16, np.float32, slots=slots)
    data["state"] = data["state"].astype(bf16)
    _, state = emulated(**data, slots=slots)
    np.testing.assert_array_equal(state[[0, 1, 2, 4]], data["state"][[0, 1, 2, 4]])
    close(state, expected(**data, slots=slots)[1], 2e-3)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_gate_without_rate_and_bias(bound):
    data = case(1, 1, 1, 16, 16, np.float32) | {"A_log": None, "dt_bias": None}
    for got, want in zip(emulated(**data, bound=bound), expected(**data, bound=bound), strict=True):
        close(got, want, 1e-5)


def test_pool_of_states():
    """A skipped row gives 0, reads nothing and touches no state; slots that no row names keep their bits, NaN included."""
    slots = np.array([3, -1, 0, 5, -7], np.int32)  # 5 is one past the pool of 5
    data = case(5, 1, 2, 32, 32, np.float32, slots=slots)
    data["state"][[1, 2, 4]] = np.nan
    for name in ("q", "k", "v", "raw_gate", "beta_logits"):
        data[name][[1, 3, 4]] = np.nan
    o, state = emulated(**data, slots=slots)
    np.testing.assert_array_equal(o[[1, 3, 4]], 0)
    np.testing.assert_array_equal(state[[1, 2, 4]], data["state"][[1, 2, 4]])
    want_o, want_state = expected(**data, slots=slots)
    close(o[[0, 2]], want_o[[0, 2]], 1e-5)
    close(state[[0, 3]], want_state[[0, 3]], 1e-5)


def test_offsets_beyond_int32():
    """The last slot of a pool of 2.1e9 values and more (np.zeros: no memory is touched but that slot's)."""
    K = V = 256
    pool = 2**31 // (K * V) + 1
    data = case(1, 1, 1, K, V, np.float32)
    big = np.zeros((pool, 1, K, V), np.float32)
    big[-1] = data["state"][0]
    config = decode.decode_config(K, V)
    config.pop("warps")
    out = np.zeros((1, 1, V), np.float32)
    slots = np.array([pool - 1], np.int32)
    operands = (big, *(data[n] for n in ("q", "k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias")), slots, out)
    options = dict(HV=1, GROUP=1, K=K, V=V, N=pool, GATED=True, NORMALIZE=True, BOUND=-5.0, SCALE=K**-0.5, EPS=EPS, **config)
    gn.run(decode.decode_kernel, (V // config["BV"], 1, 1), *operands, **options)
    want_o, want_state = expected(**data)
    close(out, want_o, 1e-5)
    close(big[-1:], want_state, 1e-5)


def test_refusals():
    import jax.numpy as jnp

    data = {name: jnp.asarray(x) for name, x in case(1, 1, 2, 16, 16).items()}
    call = lambda **changed: decode.kda_decode_triton(**(data | changed))
    for changed, match in (
        ({"q": jnp.zeros((1, 1, 24)), "k": jnp.zeros((1, 1, 24))}, "multiples of 16"),
        ({"state": data["state"].astype(jnp.float16)}, "float16"),
        ({"beta_logits": jnp.zeros((1, 3))}, "beta_logits"),
        ({"v": jnp.zeros((1, 2, 16), jnp.float16)}, "float16"),
        ({"q": jnp.zeros((1, 3, 16))}, "value heads"),
        ({"slots": jnp.zeros((2,), jnp.int32)}, "slots"),
        ({"lower_bound": 1.0}, "lower_bound"),
    ):
        with pytest.raises(ValueError, match=match):
            call(**changed)


def jax_operands(data):
    import jax.numpy as jnp

    return {name: None if x is None else jnp.asarray(x) for name, x in data.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(
    "B, H, HV, K, V", [(3, 2, 4, 128, 128), (2, 1, 3, 64, 64), (1, 1, 1, 48, 80), (1, 1, 2, 256, 240), (1, 1, 1, 16, 16)]
)
def test_on_the_card(B, H, HV, K, V, bound):
    import jax

    data = case(B, H, HV, K, V)
    run = jax.jit(lambda data: decode.kda_decode_triton(**data, lower_bound=bound))
    got, again = run(jax_operands(data)), run(jax_operands(data))
    for g, a, want, tolerance in zip(got, again, expected(**data, bound=bound), (4e-3, 1e-5), strict=True):
        close(g, want, tolerance)
        np.testing.assert_array_equal(np.asarray(g), np.asarray(a))


@pytest.mark.gpu
def test_on_the_card_bfloat16_state():
    import jax

    data = case(3, 2, 4, 128, 128)
    data["state"] = data["state"].astype(bf16)
    o, state = jax.jit(lambda data: decode.kda_decode_triton(**data))(jax_operands(data))
    want_o, want_state = expected(**data)
    assert state.dtype == bf16
    close(o, want_o, 4e-3)
    close(state, want_state, 2e-3)


@pytest.mark.gpu
def test_on_the_card_in_place_pool_and_vmap():
    import jax
    import jax.numpy as jnp

    slots = np.array([3, -1, 0], np.int32)
    data = jax_operands(case(3, 1, 2, 128, 128, slots=slots))
    want_o, want_state = expected(**{n: np.asarray(x) for n, x in data.items()}, slots=slots)

    def step(state, data, slots):
        return decode.kda_decode_triton(**(data | {"state": state}), slots=slots)

    state = data.pop("state")
    untouched = np.asarray(state[jnp.asarray([1, 2, 4])])
    two = jnp.stack([state, 2 * state])
    batched = {n: x if n in ("A_log", "dt_bias") else jnp.stack([x, x]) for n, x in data.items()}
    axes = {n: None if n in ("A_log", "dt_bias") else 0 for n in data}
    o2, state2 = jax.jit(jax.vmap(step, in_axes=(0, axes, None)))(two, batched, jnp.asarray(slots))
    compiled = jax.jit(step, donate_argnums=0).lower(state, data, jnp.asarray(slots)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= state.nbytes
    o, new = compiled(state, data, jnp.asarray(slots))
    np.testing.assert_array_equal(np.asarray(o2[0]), np.asarray(o))
    np.testing.assert_array_equal(np.asarray(state2[0]), np.asarray(new))
    np.testing.assert_array_equal(np.asarray(new[jnp.asarray([1, 2, 4])]), untouched)
    np.testing.assert_array_equal(np.asarray(o[1]), 0)
    close(o, want_o, 4e-3)
    close(new, want_state, 1e-5)
