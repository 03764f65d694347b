"""The short convolution against a token-by-token twin: values, every gradient, packing, padding, history."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "kernels"))
from conv_taps import selections

from moejax.ops import short_conv, short_conv_step
from moejax.ops.short_conv import short_conv_steps


def plain(x, weight, history, chosen):
    taps, kept = (jnp.asarray(a, x.dtype) for a in chosen)
    inputs = jnp.concatenate([history, x], axis=1)
    total = jnp.einsum("jbtp,bpc,jc->btc", taps, inputs, weight)
    return total * jax.nn.sigmoid(total), jnp.einsum("bwp,bpc->bwc", kept, inputs)


def make(batch, tokens, channels, width, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, tokens, channels), (width, channels), (batch, width - 1, channels)]
    arrays = [rng.normal(size=s) for s in shapes]
    cotangents = (rng.normal(size=shapes[0]), rng.normal(size=shapes[2]))
    return arrays, cotangents


def value_and_gradients(f, arrays, cotangents, dtype):
    arrays = [jnp.asarray(a, dtype) for a in arrays]
    cotangents = tuple(jnp.asarray(c, dtype) for c in cotangents)

    @jax.jit
    def both(*arrays):
        out, back = jax.vjp(f, *arrays)
        return *out, *back(cotangents)

    return [np.asarray(a) for a in both(*arrays)]


def compare(arrays, cotangents, segment_ids=None, tolerance=1e-5):
    """Float32 (jitted) against float64 autodiff of the twin: y, history, and the gradients of x, weight, history."""
    ids = None if segment_ids is None else jnp.asarray(segment_ids)

    def fast(x, w, h):
        return short_conv(x, w, history=h, segment_ids=ids)

    chosen = selections(np.ones(arrays[0].shape[:2], int) if segment_ids is None else segment_ids, arrays[1].shape[0])
    with jax.enable_x64(True):
        want = value_and_gradients(lambda x, w, h: plain(x, w, h, chosen), arrays, cotangents, jnp.float64)
        exact = value_and_gradients(fast, arrays, cotangents, jnp.float64)
    got = value_and_gradients(fast, arrays, cotangents, jnp.float32)
    for g, e, w in zip(got, exact, want, strict=True):
        if w.size:
            scale = max(np.abs(w).max(), 1e-30)
            assert np.abs(e - w).max() / scale < 1e-12 and np.abs(g - w).max() / scale < tolerance
        assert g.shape == w.shape


@pytest.mark.parametrize("name", ["T1", "T2", "T65", "no_history_T65", "packed_T64"])
def test_golden(name, golden):
    file = golden(f"kda/conv_{name}.npz")
    ids = jnp.asarray(file["segment_ids"]) + 1 if "segment_ids" in file else None
    history = None if name.startswith("no_history") else jnp.asarray(file["in_history"])
    (y, kept), back = jax.vjp(
        lambda x, w, h: short_conv(x, w.T, history=h, segment_ids=ids),
        jnp.asarray(file["in_u"]),
        jnp.asarray(file["in_w"]),
        history,
    )
    got = [y, kept, *back((jnp.asarray(file["in_wy"]), jnp.asarray(file["in_wh"])))]
    want = [file[n] for n in ("out_y", "out_history", "grad_u", "grad_w", "grad_history")]
    for g, w in zip(got, want, strict=True):
        if g is not None:
            assert np.abs(np.asarray(g) - w).max() / max(np.abs(w).max(), 1e-30) < 1e-5


@pytest.mark.parametrize("width, tokens", [(1, 1), (1, 6), (2, 2), (3, 1), (3, 6), (4, 1), (4, 2), (4, 6), (5, 2), (5, 6)])
def test_k9_widths_and_short_rows(width, tokens):
    compare(*make(2, tokens, 3, width))


@pytest.mark.parametrize("width", [2, 4, 5])
def test_k9_weight_gradient_sees_a_constant_history(width):
    (x, w, h), (ct, _) = make(2, 6, 3, width)
    x, w, h, ct = (jnp.asarray(a, jnp.float32) for a in (x, w, h, ct))

    def loss(w, h):
        return (short_conv(x, w, history=h)[0] * ct).sum()

    closed = jax.grad(lambda w: loss(w, h))(w)
    stopped = jax.grad(lambda w: loss(w, jax.lax.stop_gradient(h)))(w)
    joined = jnp.concatenate([h, x], 1)
    whole = jax.grad(lambda w: (short_conv(joined, w)[0][:, width - 1 :] * ct).sum())(w)
    np.testing.assert_allclose(closed, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(closed, stopped)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_k9_wrong_history_length(rows):
    x = jnp.ones((2, 6, 3))
    with pytest.raises(ValueError, match=r"B,W-1,C"):
        short_conv(x, jnp.ones((4, 3)), history=jnp.ones((2, rows, 3)))


PACKED = {
    "boundaries": [[1] * 5 + [2] + [3] * 11, [1] * 16 + [2]],
    "padding at both ends": [[0] * 3 + [1] * 6 + [2] * 5 + [0] * 3, [0] * 16 + [1]],
    "padding inside documents": [
        [1, 0, 1, 1, 0, 0, 0, 1, 2, 0, 2, 2, 0, 0, 3, 0, 3],
        [0, 1, 0, 2, 0, 2, 0, 3, 3, 0, 0, 3, 4, 0, 4, 0, 0],
    ],
    "a row of padding, ids that skip": [[0] * 17, [2, 2, 2, 5, 5, 0, 5, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]],
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("width", [1, 4])
def test_packed_values_and_gradients(name, width):
    compare(*make(2, 17, 5, width), segment_ids=np.asarray(PACKED[name], np.int32))


@pytest.mark.parametrize("tokens", [15, 63, 65, 130])
def test_random_packing(tokens):
    rng = np.random.default_rng(tokens)
    ids = np.sort(rng.integers(1, 8, size=(2, tokens)), axis=1)
    ids = np.where(rng.random((2, tokens)) < 0.2, 0, ids).astype(np.int32)
    compare(*make(2, tokens, 4, 4, seed=tokens), segment_ids=ids)


def test_packed_equals_each_document_alone():
    (x, w, _), _ = make(1, 17, 4, 4)
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    ids = np.asarray(PACKED["padding inside documents"][:1], np.int32)
    y, kept = short_conv(x, w, segment_ids=jnp.asarray(ids))
    for document in (1, 2, 3):
        where = np.flatnonzero(ids[0] == document)
        alone, last = short_conv(x[:, where], w)
        np.testing.assert_allclose(y[:, where], alone, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(kept, last)


def test_padding_is_never_read():
    (x, w, h), (ct, ch) = make(2, 17, 5, 4)
    ids = jnp.asarray(PACKED["padding inside documents"], jnp.int32)
    x, w, h, ct, ch = (jnp.asarray(a, jnp.float32) for a in (x, w, h, ct, ch))

    @jax.jit
    def run(x, ct):
        out, back = jax.vjp(lambda x, w, h: short_conv(x, w, history=h, segment_ids=ids), x, w, h)
        return out, back((ct, ch))

    nan = jnp.where((ids == 0)[..., None], jnp.nan, 0)
    clean, dirty = run(x, ct), run(x + nan, ct + nan)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(clean[0][0])[np.asarray(ids) == 0] == 0).all()
    assert (np.asarray(clean[1][0])[np.asarray(ids) == 0] == 0).all()


@pytest.mark.parametrize("packed", [False, True])
def test_prefix_is_bit_equal_when_the_future_changes(packed):
    (x, w, h), _ = make(2, 65, 6, 4)
    x, w, h = (jnp.asarray(a, jnp.float32) for a in (x, w, h))
    ids = np.ones((2, 65), np.int32)
    ids[:, 20:] = 2
    ids[:, 7] = 0
    other = ids.copy()
    other[:, 45:] = 0
    other[:, 50:] = 3

    @jax.jit
    def run(x, ids):
        def f(x, h):
            return short_conv(x, w, history=h, segment_ids=ids if packed else None)[0]

        y, back = jax.vjp(f, x, h)
        return y, *back(jnp.where(jnp.arange(65)[:, None] < 40, 1.0, 0.0) * jnp.ones_like(y))

    a = run(x, jnp.asarray(ids))
    b = run(x.at[:, 40:].set(1e6), jnp.asarray(other))
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left[:, :40], right[:, :40])


def test_continuing_in_pieces_equals_the_whole():
    (x, w, h), _ = make(2, 17, 3, 4)
    x, w, h = (jnp.asarray(a, jnp.float32) for a in (x, w, h))
    whole, last = short_conv(x, w, history=h)
    pieces, history = [], h
    for start, end in ((0, 1), (1, 3), (3, 4), (4, 17)):
        y, history = short_conv(x[:, start:end], w, history=history)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(history, last)


def test_bfloat16_sums_in_float32():
    (x, w, h), _ = make(2, 17, 3, 4)
    x, w, h = (jnp.asarray(a, jnp.bfloat16) for a in (x, w, h))
    for ids in (None, jnp.asarray(PACKED["padding inside documents"], jnp.int32)):
        y, kept = short_conv(x, w, history=h, segment_ids=ids)
        wide = short_conv(*(a.astype(jnp.float32) for a in (x, w)), history=h.astype(jnp.float32), segment_ids=ids)[0]
        assert y.dtype == kept.dtype == jnp.bfloat16
        np.testing.assert_array_equal(y, wide.astype(jnp.bfloat16))


def test_bad_input_is_named():
    x, w = jnp.ones((2, 6, 3)), jnp.ones((4, 3))
    for call, text in (
        (lambda: short_conv(x.astype(jnp.float16), w), "float16"),
        (lambda: short_conv(x[:, :0], w), "empty"),
        (lambda: short_conv(x[0], w), "3 axes"),
        (lambda: short_conv(x, w.T), "C = 3"),
        (lambda: short_conv(x, w[:0]), "W >= 1"),
        (lambda: short_conv(x, w, segment_ids=jnp.ones((2, 5), jnp.int32)), r"segment_ids is int32\[2, 5\]"),
        (lambda: short_conv(x, w, segment_ids=jnp.ones((2, 6))), "must be integers"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("width", [1, 4])
def test_steps_equal_the_whole_and_inactive_rows_stand_still(width):
    """Row 1 rests at every third token, with NaN as its input."""
    (x, w, h), _ = make(2, 9, 3, width)
    x, w, h = (jnp.asarray(a, jnp.float32) for a in (x, w, h))
    real = np.ones((2, 9), bool)
    real[1, ::3] = False
    whole, last = short_conv(x, w, history=h, segment_ids=jnp.asarray(real, jnp.int32))
    step, history = jax.jit(short_conv_step), h
    for t in range(9):
        active = jnp.asarray(real[:, t])
        y, history = step(jnp.where(active[:, None], x[:, t], jnp.nan), w, history, active=active)
        np.testing.assert_allclose(y, whole[:, t], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(history, last)
    np.testing.assert_array_equal(step(x[:, 0], w, h)[0], step(x[:, 0], w, h, active=jnp.ones(2, bool))[0])


@pytest.mark.parametrize("channels", [(3, 3, 5), (3, 4)])
def test_several_steps_equal_each_alone(channels):
    """Outputs, histories and gradients to the bit; row 1 rests, with NaN as its input."""
    made = [make(2, 1, C, 4, seed)[0] for seed, C in enumerate(channels)]
    inputs, weights, histories = ([jnp.asarray(a, jnp.float32) for a in part] for part in zip(*made, strict=True))
    active = jnp.asarray([True, False])
    inputs = [jnp.where(active[:, None], x[:, 0], jnp.nan) for x in inputs]

    def together(weights):
        outputs, moved = short_conv_steps(inputs, weights, histories, active=active)
        return sum(y.sum() for y in outputs), (outputs, moved)

    def alone(weights):
        pairs = [short_conv_step(x, w, h, active=active) for x, w, h in zip(inputs, weights, histories, strict=True)]
        return sum(y.sum() for y, _ in pairs), ([y for y, _ in pairs], [moved for _, moved in pairs])

    got, wanted = (jax.jit(jax.value_and_grad(f, has_aux=True))(weights) for f in (together, alone))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_names_bad_input():
    x, w, h = jnp.ones((2, 3)), jnp.ones((4, 3)), jnp.ones((2, 3, 3))
    for call, text in (
        (lambda: short_conv_step(x[:, None], w, h), r"\[B,C\]"),
        (lambda: short_conv_step(x[0], w, h), r"\[B,C\]"),
        (lambda: short_conv_step(x[:0], w, h[:0]), r"no axis of \[B,C\] may be empty"),
        (lambda: short_conv_step(x, w, h[:, 1:]), r"B,W-1,C"),
        (lambda: short_conv_step(x.astype(jnp.float16), w, h), "float16"),
        (lambda: short_conv_step(x, w, h, active=jnp.ones(1, bool)), r"active is bool\[1\]; it must be bool \[B\] = \[2\]"),
        (lambda: short_conv_step(x, w, h, active=jnp.ones(2)), r"active is float32\[2\]"),
        (lambda: short_conv_step(x, w, h, active=jnp.ones((2, 1), bool)), r"active is bool\[2, 1\]"),
        (lambda: short_conv_steps([x], [w], [h[:, 1:]]), r"B,W-1,C"),
        (lambda: short_conv_steps([x], [w], [h], active=jnp.ones(1, bool)), r"active is bool\[1\]"),
        (lambda: short_conv_steps([x, x[:1]], [w, w], [h, h[:1]]), "1, 2 rows"),
        (lambda: short_conv_steps([x, x], [w], [h]), "shorter"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
