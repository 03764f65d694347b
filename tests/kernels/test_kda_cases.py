"""KDA cases from public bug threads, and the promise that a prefix does not depend on later tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.kda import gated_kda, kda, kda_gate, l2_normalize
from moejax.kernels.kda.xla import kda_chunked

QUICK = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=QUICK)


def error(value, wanted) -> float:
    wanted = np.asarray(wanted, np.float64)
    return float(np.max(np.abs(np.asarray(value, np.float64) - wanted)) / max(np.max(np.abs(wanted)), 1e-300))


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape))


def test_zero_rows_and_left_padding(x64):
    """K4 (maxtext #5295, transformers #46773): gradients of all-zero q, k rows and of left padding stay finite, call after call."""
    rng = np.random.default_rng(0)
    q, k, v = (np.array(normal(rng, 2, 24, 2, 16)) for _ in range(3))
    ids = np.ones((2, 24), np.int32)
    ids[0, :9] = 0
    q[0, :9] = k[0, :9] = 0
    q[1, 10:13] = k[1, 10:13] = 0
    raw, logits = normal(rng, 2, 24, 2, 16), normal(rng, 2, 24, 2)

    def loss(args, implementation, calls=1):
        q, k, v, raw, logits = args
        for _ in range(calls):
            o, _ = gated_kda(q, k, v, raw, logits, None, None, segment_ids=ids, implementation=implementation)
            q = k = o
        return jnp.sum(o**2)

    args = (q, k, v, raw, logits)
    got = jit(jax.grad(lambda a: loss(a, "xla")))(args)
    wanted = jit(jax.grad(lambda a: loss(a, "reference")))(args)
    for x, y in zip(got, wanted, strict=True):
        assert error(x, y) < 1e-12 and not np.any(np.asarray(x)[ids == 0])
    chained = jit(jax.grad(lambda a: loss(a, "reference", calls=8)))(tuple(jnp.asarray(x, jnp.float32) for x in args))
    assert all(np.all(np.isfinite(x)) for x in chained)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_absent_documents(implementation):
    """K5 (FlashKDA #32, vllm-ascend #11893): an absent document returns its state bit for bit and shifts nothing."""
    rng = np.random.default_rng(1)
    args = [jnp.asarray(x, jnp.float32) for x in (*(normal(rng, 1, 256, 1, 16) for _ in range(3)), normal(rng, 1, 256, 1, 16))]
    args[0], args[1], args[3] = l2_normalize(args[0]), l2_normalize(args[1]), -jnp.abs(args[3])
    args.append(jax.nn.sigmoid(jnp.asarray(normal(rng, 1, 256, 1), jnp.float32)))
    states = jnp.asarray(normal(rng, 1, 6, 1, 16, 16), jnp.float32)
    ids = jnp.repeat(jnp.asarray([[2, 5]], jnp.int32), 128, axis=1)  # 1, 3, 4, 6 are absent: first, two in a row, last

    @jit
    def run(states, ids):
        call = lambda s: kda(
            *args, initial_state=s, segment_ids=ids, num_segments=6, output_final_state=True, implementation=implementation
        )
        (o, final), vjp = jax.vjp(call, states)
        return o, final, vjp((jnp.ones_like(o), jnp.arange(final.size, dtype=final.dtype).reshape(final.shape)))[0]

    o, final, d_states = run(states, ids)
    cotangent = np.arange(final.size, dtype=np.float32).reshape(final.shape)
    for absent in (0, 2, 3, 5):
        assert np.array_equal(final[:, absent], states[:, absent])
        assert np.array_equal(d_states[:, absent], cotangent[:, absent])
    for n, document in enumerate((1, 4)):
        part = [x[:, 128 * n : 128 * (n + 1)] for x in args]
        alone, state = kda(*part, initial_state=states[:, document], output_final_state=True, implementation=implementation)
        assert error(o[:, 128 * n : 128 * (n + 1)], alone) < 1e-6
        assert state is not None and error(final[:, document], state) < 1e-6
    o, final, d_states = run(states, jnp.zeros_like(ids))
    assert not np.any(o) and np.array_equal(final, states) and np.array_equal(d_states, cotangent)
    o, final, _ = run(jnp.zeros_like(states), ids)
    assert not np.any(final[:, 0]) and np.all(np.isfinite(o))


def test_gate_bias_is_per_channel():
    """K6 (mlx-lm #1792): dt_bias is [HV,K]; other shapes are refused, not broadcast."""
    raw, A_log = jnp.zeros((1, 1, 2, 4)), jnp.asarray([0.0, np.log(2.0)])
    dt_bias = jnp.asarray([[0.0, 1, -1, 2], [0.5, -0.5, 0, 1]])
    wanted = [[-2.5, -3.655293, -1.344707, -4.403985], [-3.655293, -1.344707, -2.5, -4.403985]]
    assert np.allclose(kda_gate(raw, A_log, dt_bias, lower_bound=-5)[0, 0], wanted, atol=1e-6)
    for bad in (dt_bias[:, 0], dt_bias.reshape(-1), dt_bias[None]):
        with pytest.raises(ValueError, match="dt_bias has shape"):
            kda_gate(raw, A_log, bad)
    for bad in (A_log[:, None], A_log[:1], jnp.float32(0)):
        with pytest.raises(ValueError, match="A_log has shape"):
            kda_gate(raw, bad, dt_bias)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gated_is_kda_of_its_parts(implementation):
    rng = np.random.default_rng(2)
    q, k, v, raw = (jnp.asarray(normal(rng, 1, 20, 2, 4), jnp.float32) for _ in range(4))
    logits, A_log = jnp.asarray(normal(rng, 1, 20, 2), jnp.float32), jnp.asarray([0.0, 0.5])
    bias = jnp.asarray(normal(rng, 2, 4), jnp.float32)
    for bound in (-5.0, None):
        whole, _ = gated_kda(q, k, v, raw, logits, A_log, bias, lower_bound=bound, implementation=implementation)
        g = kda_gate(raw, A_log, bias, lower_bound=bound)
        parts, _ = kda(l2_normalize(q), l2_normalize(k), v, g, jax.nn.sigmoid(logits), lower_bound=bound, implementation=implementation)
        assert np.array_equal(whole, parts)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gate_finite_when_saturated(lower_bound):
    raw = jnp.asarray([-1e4, -100.0, 0.0, 100.0, 1e4]).reshape(1, 1, 1, 5)
    A_log, bias = jnp.asarray([3.0]), jnp.zeros((1, 5))
    g, vjp = jax.vjp(lambda *a: kda_gate(*a, lower_bound=lower_bound), raw, A_log, bias)
    grads = vjp(jnp.ones_like(g))
    assert all(np.all(np.isfinite(x)) for x in (g, *grads)) and np.all(np.asarray(g) <= 0)
    if lower_bound is not None:
        assert np.array_equal(np.asarray(grads[0]).ravel() == 0, [True, True, False, True, True])


def test_no_forgetting(x64):
    """K7 (flash-linear-attention #389, #104): g = 0, -0.0 and 0 on every second token are as accurate as other gates."""
    rng = np.random.default_rng(3)
    q, k = (l2_normalize(normal(rng, 2, 200, 2, 100)) for _ in range(2))
    v, beta, weights = normal(rng, 2, 200, 2, 100), jax.nn.sigmoid(normal(rng, 2, 200, 2)), normal(rng, 2, 200, 2, 100)

    def run(implementation, lower_bound):
        def call(q, k, v, g, beta):
            return kda(q, k, v, g, beta, lower_bound=lower_bound, implementation=implementation)[0]

        return jit(lambda w, *a: (lambda o, f: (o, *f(w)))(*jax.vjp(call, *a)))

    exact, forms = run("reference", None), (run("xla", -5.0), run("xla", None))
    zero = jnp.zeros_like(q)
    gates = {"small": zero - 0.1, "zero": zero, "minus zero": -zero, "alternating": zero.at[:, 1::2].set(-5.0)}
    found = {}
    for name, g in gates.items():
        wanted = exact(weights, q, k, v, g, beta)
        single = [x.astype(jnp.float32) for x in (weights, q, k, v, g, beta)]
        for n, form in enumerate(forms):
            got = form(*single)
            found[name, n] = error(got[0], wanted[0])
            assert found[name, n] < 1e-5, (name, n)
            for x, y in zip(got[1:], wanted[1:], strict=True):
                assert error(x, y) < 5e-5, (name, n, error(x, y))
    for (name, n), value in found.items():
        assert value < 3 * max(found["small", n], 3e-7), (name, n, found)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extremes_of_the_gate(lower_bound):
    """g = 0 keeps the state bit for bit over many chunks; small queries survive e^-80, which float32 can barely hold."""
    rng = np.random.default_rng(6)
    q, k, v = (jnp.asarray(normal(rng, 1, 160, 2, 8), jnp.float32) for _ in range(3))
    state = jnp.asarray(normal(rng, 1, 2, 8, 8), jnp.float32)
    run = jit(lambda q, k, v, g, beta: kda(q, k, v, g, beta, lower_bound=lower_bound, initial_state=state, output_final_state=True))
    _, final = run(q, k, v, jnp.zeros_like(k), jnp.zeros_like(v[..., 0]))
    assert np.array_equal(final, state)
    args = (1e-4 * q, l2_normalize(k), v, jnp.full_like(k, -5.0), jnp.ones_like(v[..., 0]))
    wanted, _ = kda(*args, initial_state=state, implementation="reference")
    assert error(run(*args)[0][:, 16:], wanted[:, 16:]) < 1e-5


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_large_state(implementation):
    """K8 (attention-gym #464): a large float32 state and a tiny cotangent survive; float16 operands are refused."""
    q = jnp.zeros((1, 1, 1, 16)).at[..., 0].set(1)
    zero, beta = jnp.zeros_like(q), jnp.zeros((1, 1, 1))
    state = jnp.zeros((1, 1, 16, 16)).at[0, 0, 0, 0].set(65536.0)
    g = jnp.full_like(q, -4.0)
    options = {"scale": 1.0, "output_final_state": True, "implementation": implementation}
    for at, length in ((0, 1), (20, 40)):
        place = lambda x, at=at, length=length: jnp.pad(x, [(0, 0), (at, length - 1 - at)] + [(0, 0)] * (x.ndim - 2))
        args = [place(x) for x in (q, zero, zero, g, beta)]

        def run(g, state, args=args):
            return kda(*args[:3], g, args[4], initial_state=state, **options)

        (o, final), vjp = jax.vjp(run, args[3], state)
        d_g, d_state = vjp((jnp.zeros_like(o), jnp.zeros_like(final).at[0, 0, 0, 0].set(2.0**-25)))
        assert np.isclose(final[0, 0, 0, 0], 1200.3337, rtol=1e-6) and np.isclose(o[0, at, 0, 0], 1200.3337, rtol=1e-6)
        assert np.isclose(d_g[0, at, 0, 0], 3.5773e-5, rtol=1e-4) and np.isclose(d_state[0, 0, 0, 0], 5.4585e-10, rtol=1e-4)
        assert all(np.all(np.isfinite(x)) for x in (o, final, d_g, d_state))
    with pytest.raises(ValueError, match="float16"):
        kda(*(x.astype(jnp.float16) for x in (q, zero, zero, g, beta)), initial_state=state, **options)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("packed", [False, True])
def test_prefix_does_not_depend_on_the_future(lower_bound, packed):
    """Outputs of a prefix, and the gradients of a loss on it, keep every bit when only later tokens change.

    The prefix ends inside a tile, a chunk and a window; the later tokens are random, saturated, zero or large.
    """
    rng = np.random.default_rng(4)
    shape, cut = (2, 200, 2, 16), 71
    q, k = (l2_normalize(jnp.asarray(normal(rng, *shape), jnp.float32)) for _ in range(2))
    v, raw = (jnp.asarray(normal(rng, *shape), jnp.float32) for _ in range(2))
    beta, g = jax.nn.sigmoid(v[..., 0]), -5 * jax.nn.sigmoid(raw)
    documents = jnp.asarray(np.repeat([[1, 2, 3]], [30, 70, 100], axis=1).repeat(2, axis=0)) if packed else None
    zero = jnp.zeros((2, 2, 16, 16), jnp.float32)

    @jax.jit
    def run(*args):
        def loss(*args):
            o, _ = kda_chunked(*args, scale=0.25, lower_bound=lower_bound, initial_state=zero, documents=documents, window=128)
            return jnp.sum(jnp.sin(o[:, :cut])), o[:, :cut]

        (_, o), grads = jax.value_and_grad(loss, argnums=range(5), has_aux=True)(*args)
        return o, grads

    o, grads = run(q, k, v, g, beta)
    noise = jnp.asarray(normal(rng, *shape), jnp.float32)
    low = -5.0 if lower_bound else -200.0
    for later_g, later in ((low, noise), (0.0, 0 * noise), (low * jax.nn.sigmoid(noise), 50 * noise)):
        change = lambda x, y: x.at[:, cut:].set(jnp.broadcast_to(y, x.shape)[:, cut:])
        changed = (change(q, later), change(k, l2_normalize(later)), change(v, later), change(g, later_g), change(beta, 1.0))
        o_changed, grads_changed = run(*changed)
        assert np.array_equal(o, o_changed)
        for x, y in zip(grads, grads_changed, strict=True):
            assert np.array_equal(x[:, :cut], y[:, :cut]) and not np.any(np.asarray(y)[:, cut:])
