"""The chunked form of KDA against float64 autodiff of the token recurrence: every gradient, lengths, packing, padding, states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.kda import gated_kda, kda
from moejax.kernels.kda.reference import kda_reference
from moejax.kernels.kda.segments import document_ids
from moejax.kernels.kda.xla import kda_chunked

QUICK = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=QUICK)
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def error(value, wanted) -> float:
    wanted = np.asarray(wanted, np.float64)
    return float(np.max(np.abs(np.asarray(value, np.float64) - wanted)) / max(np.max(np.abs(wanted)), 1e-300))


def make(rng, batch, tokens, heads, value_heads, keys, values, low=-5.0, documents=None):
    """Random operands with unit q and k, gates in (low, 0) and a random initial state, float64 numpy."""
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(rng.normal(size=(batch, tokens, heads, keys))) for _ in range(2))
    v = rng.normal(size=(batch, tokens, value_heads, values))
    g = low / (1 + np.exp(-2 * rng.normal(size=(batch, tokens, value_heads, keys))))
    beta = 1 / (1 + np.exp(-rng.normal(size=(batch, tokens, value_heads))))
    rows = () if documents is None else (documents,)
    return [q, k, v, g, beta, rng.normal(size=(batch, *rows, value_heads, keys, values))]


def random_ids(rng, batch, tokens, documents, first=1):
    """Documents of random length, boundaries anywhere, padding sprinkled over the row (also inside documents)."""
    ids = np.sort(rng.integers(first, documents + 1, (batch, tokens)), axis=1)
    ids[rng.random((batch, tokens)) < 0.15] = 0
    ids[0, : tokens // 4] = 0
    return ids.astype(np.int32)


def value_and_gradients(args, weights, **options):
    """o, final state and the gradients of sum(o * wo) + sum(final * ws) in every operand."""

    def run(*args):
        out, vjp = jax.vjp(lambda *a: kda(*a[:-1], initial_state=a[-1], output_final_state=True, **options), *args)
        return out, vjp(tuple(w.astype(x.dtype) for w, x in zip(weights, out, strict=True)))

    (o, final), grads = jit(run)(*args)
    return {"o": o, "final": final, **dict(zip(NAMES, grads, strict=True))}


def compare(got, wanted, tolerance):
    for name in wanted:
        assert error(got[name], wanted[name]) < tolerance, (name, error(got[name], wanted[name]))


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 130])
def test_lengths_packed_with_padding(x64, tokens):
    """Any length, grouped heads, odd K and V, boundaries and padding anywhere; both gate forms; states per document or not."""
    rng = np.random.default_rng(tokens)
    ids = random_ids(rng, 2, tokens, 4)
    documents = 5 if tokens % 2 else None  # document 5 is absent
    args = [jnp.asarray(x) for x in make(rng, 2, tokens, 2, 4, 5, 3, documents=documents)]
    weights = [jnp.asarray(rng.normal(size=x.shape)) for x in (args[2], args[5])]
    options = {"segment_ids": jnp.asarray(ids), "num_segments": documents}
    wanted = value_and_gradients(args, weights, implementation="reference", **options)
    for bound in (-5.0, None):
        compare(value_and_gradients(args, weights, lower_bound=bound, **options), wanted, 1e-12)


def test_unbounded_gates(x64):
    """Gates down to -2400 beside a slow channel, then a token of -inf (a full reset): dense tiles would overflow."""
    rng = np.random.default_rng(5)
    args = make(rng, 1, 130, 2, 2, 7, 4, low=-60.0)
    args[3][:, ::7] *= 40
    args[3][..., 0] *= 1e-4  # so that the initial state still matters at the end
    args = [jnp.asarray(x) for x in args]
    weights = [jnp.asarray(rng.normal(size=x.shape)) for x in (args[2], args[5])]
    wanted = value_and_gradients(args, weights, implementation="reference")
    compare(value_and_gradients(args, weights), wanted, 1e-12)
    single = [x.astype(jnp.float32) for x in args]
    got = value_and_gradients(single, weights)
    compare({n: got[n] for n in ("o", "final")}, {n: wanted[n] for n in ("o", "final")}, 1e-5)
    compare(got, wanted, 5e-5)
    args[3] = args[3].at[:, 40].set(-jnp.inf)
    wanted = value_and_gradients(args, weights, implementation="reference")
    compare(value_and_gradients(args, weights), wanted, 1e-12)


@pytest.mark.parametrize("documents", [None, 3])
def test_windows(x64, documents):
    """Several windows of the two-level scan give what one gives, and what the recurrence gives."""
    rng = np.random.default_rng(6)
    args = [jnp.asarray(x) for x in make(rng, 2, 300, 1, 2, 4, 3, documents=documents)]
    ids = document_ids(jnp.asarray(random_ids(rng, 2, 300, 3)))
    weights = [jnp.asarray(rng.normal(size=x.shape)) for x in (args[2], args[5])]

    def run(function, **more):
        call = lambda *a: function(*a[:-1], scale=0.5, initial_state=a[-1], documents=ids, **more)
        out, vjp = jit(lambda *a: jax.vjp(call, *a))(*args)
        return {"o": out[0], "final": out[1], **dict(zip(NAMES, vjp(tuple(weights)), strict=True))}

    wanted = run(kda_reference)
    for window in (64, 192):
        compare(run(kda_chunked, lower_bound=-5.0, window=window), wanted, 1e-12)


def test_beta_zero_and_one(x64):
    """The gradient of beta is exact where beta is 0: nothing divides by it."""
    rng = np.random.default_rng(7)
    args = make(rng, 1, 40, 1, 1, 4, 4)
    args[4][:, ::3], args[4][:, 1::3] = 0, 1
    args = [jnp.asarray(x) for x in args]
    weights = [jnp.asarray(rng.normal(size=x.shape)) for x in (args[2], args[5])]
    wanted = value_and_gradients(args, weights, implementation="reference")
    compare(value_and_gradients(args, weights, lower_bound=-5.0), wanted, 1e-12)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_padding_is_not_read(bound):
    """NaN in padded tokens changes no bit of values or gradients; the gradient there is exactly 0."""
    rng = np.random.default_rng(8)
    ids = random_ids(rng, 2, 70, 3)
    args = make(rng, 2, 70, 1, 2, 4, 3)
    clean = [jnp.asarray(x, jnp.float32) for x in args]
    for x in args[:5]:
        x[ids == 0] = np.nan
    dirty = [jnp.asarray(x, jnp.float32) for x in args]

    @jit
    def run(q, k, v, raw, logits, state):
        def loss(*a):
            o, final = gated_kda(*a[:5], None, None, lower_bound=bound, initial_state=a[5], segment_ids=ids, output_final_state=True)
            return jnp.sum(o**2) + jnp.sum(final**2), o

        return jax.value_and_grad(loss, argnums=range(6), has_aux=True)(q, k, v, raw, logits, state)

    (_, o), grads = run(*dirty)
    (_, wanted), clean_grads = run(*clean)
    assert np.array_equal(o, wanted) and not np.any(np.asarray(o)[ids == 0])
    for x, y in zip(grads, clean_grads, strict=True):
        assert np.array_equal(x, y)
    for x in grads[:5]:
        assert not np.any(np.asarray(x)[ids == 0])


def test_bfloat16():
    """bfloat16 operands: o in bfloat16, float32 state, within 1e-2 of float64 on the same rounded numbers."""
    rng = np.random.default_rng(9)
    args = [jnp.asarray(x, jnp.bfloat16) for x in make(rng, 2, 100, 2, 2, 16, 16)]
    args[5] = args[5].astype(jnp.float32)
    for bound in (-5.0, None):
        o, final = kda(*args[:5], initial_state=args[5], lower_bound=bound, output_final_state=True)
        assert o.dtype == jnp.bfloat16 and final is not None and final.dtype == jnp.float32
        with jax.enable_x64(True):
            exact = [jnp.asarray(np.asarray(x, np.float64)) for x in args]
            want, want_final = kda_reference(*exact[:5], scale=0.25, initial_state=exact[5])
        assert error(o.astype(jnp.float32), want) < 1e-2 and error(final, want_final) < 1e-5
