"""Largest attention logit of each head against all logits written out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.attention_logits import latent_max_logits, max_logits


def segments(rows, length, seed=0):
    """Documents of random lengths, padding at the start of one row and the end of another."""
    rng = np.random.default_rng(seed)
    ids = 1 + np.cumsum(rng.random((rows, length)) < 0.1, axis=1)
    ids[0, : length // 4] = 0
    ids[-1, length - length // 3 :] = 0
    return jnp.asarray(ids, jnp.int32)


def naive(q, k, segment_ids, scale):
    """All logits in NumPy; -inf where none is visible."""
    q, k = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), q.shape[2] // k.shape[2], axis=2)
    logits = np.einsum("bthd,bshd->bhts", q, k) * scale
    seen = np.tril(np.ones(logits.shape[-2:], bool))[None, None]
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        seen = seen & ((ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0))[:, None]
    return np.where(seen, logits, -np.inf).max((0, 2, 3))


@pytest.mark.parametrize(("length", "block"), [(1, None), (15, None), (17, 8), (63, 16), (65, 32), (130, None)])
@pytest.mark.parametrize("packed", [True, False])
def test_against_all_logits(length, block, packed, x64):
    """Odd lengths; 4 query heads over 2 key heads; every logit negative, so the zeros that fill a block would win."""
    rng = np.random.default_rng(length)
    q = jnp.asarray(rng.uniform(0.5, 2, (2, length, 4, 5)))
    k = jnp.asarray(-rng.uniform(0.5, 2, (2, length, 2, 5)))
    ids = segments(2, length) if packed else None
    got = jax.jit(lambda q, k: max_logits(q, k, segment_ids=ids, scale=0.3, block=block))(q, k)
    assert got.dtype == jnp.float64 and (got < 0).all()
    np.testing.assert_allclose(got, naive(q, k, ids, 0.3), rtol=1e-12)


def test_padding_and_the_future_are_not_read():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(2, 40, 2, 6)), jnp.float32) for _ in range(2))
    ids = segments(2, 40)
    packed = jax.jit(lambda q, k: max_logits(q, k, segment_ids=ids, block=16))
    row = jax.jit(lambda q, k: max_logits(q, k, block=16))
    clean = packed(q, k)
    real = (ids > 0)[:, :, None, None]
    np.testing.assert_array_equal(packed(jnp.where(real, q, jnp.nan), jnp.where(real, k, jnp.nan)), clean)
    late = k.at[:, -1].set(1e6)  # only the last query may see it, and it looks away
    looking = q.at[:, -1].set(0)
    np.testing.assert_array_equal(row(looking, late), row(looking, k.at[:, -1].set(0)))
    np.testing.assert_array_equal(max_logits(q, k, segment_ids=jnp.zeros_like(ids)), -np.inf)


@pytest.mark.parametrize("length", [17, 130])
def test_from_latents_and_for_a_part_of_the_queries(length):
    """Keys written out a block at a time give the same numbers, and two parts of a row the row's."""
    rng = np.random.default_rng(length)
    q, latent, shared, k_up = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, length, 3, 8), (2, length, 7), (2, length, 3), (7, 3, 5))
    )
    ids = segments(2, length)
    k = jnp.concatenate([jnp.einsum("btc,chn->bthn", latent, k_up), jnp.broadcast_to(shared[:, :, None], (2, length, 3, 3))], -1)
    want = naive(q, k, ids, 8**-0.5)
    padded = [jnp.where((ids > 0).reshape(2, length, *[1] * (x.ndim - 2)), x, jnp.nan) for x in (q, latent, shared)]
    whole = jax.jit(lambda *x: latent_max_logits(*x, k_up, segment_ids=ids, block=32))
    np.testing.assert_allclose(whole(*padded), want, rtol=1e-5)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def part(first, last):
        rows = slice(first, last)
        ids_of = {"segment_ids": ids[:, rows], "key_segment_ids": ids, "first_query": jnp.int32(first)}
        return latent_max_logits(q[:, rows], latent, shared, k_up, block=16, **ids_of)

    cut = length * 2 // 3
    np.testing.assert_allclose(jnp.maximum(part(0, cut), part(cut, length)), want, rtol=1e-5)


def test_no_gradient_and_no_square():
    """No gradient; of 600 x 600 logits a block exists at a time, in value and in a gradient around it."""
    q = k = jnp.ones((1, 600, 2, 4))

    def loss(q, k):
        return jnp.sum(q * 2) + jnp.sum(max_logits(q, k))

    np.testing.assert_array_equal(jax.grad(loss, 1)(q, k), 0)
    np.testing.assert_array_equal(jax.grad(loss, 0)(q, k), 2)
    text = jax.jit(jax.grad(loss)).lower(q, k).as_text() + jax.jit(max_logits).lower(q, k).as_text()
    assert "120x120xf32" in text and "600x600" not in text


def test_bad_arguments():
    q = jnp.ones((1, 4, 4, 2))
    for other, message in [
        (jnp.ones((1, 4, 3, 2)), "J dividing H"),
        (jnp.ones((1, 3, 4, 2)), r"\[B,T,J,K\]"),
        (jnp.ones((1, 4, 4)), r"\[B,T,H,K\]"),
        (jnp.ones((1, 4, 4, 2), jnp.float16), "float16"),
    ]:
        with pytest.raises(ValueError, match=message):
            max_logits(q, other)
    with pytest.raises(ValueError, match="at least 1"):
        max_logits(q[:, :0], q[:, :0])
    with pytest.raises(ValueError, match="int32"):
        max_logits(q, q, segment_ids=jnp.ones((1, 4)))
