"""The KDA layer against a token-by-token NumPy layer written from the report's equations 1-6: values, every gradient, state.

Shapes: B batch, T tokens, D model width, H query/key heads, G value heads, K and V channels, R and P gate ranks, W taps.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.kda_layer import KDAState, KDAWeights, kda_layer

B, T, D, H, G, K, V, R, P, W = 2, 21, 6, 2, 4, 3, 5, 3, 2, 4  # 21 tokens: one whole chunk of 16 and a part
EPS = 1e-5
PACKED = np.array(
    [
        [1] * 2 + [0] + [1] * 4 + [2] * 2 + [0] * 2 + [3] * 10,  # padding inside and between; documents shorter than the taps
        [0] * 3 + [1] * 14 + [2] * 3 + [0],  # padding first and last
        [0] * T,  # nothing but padding: the state goes on
    ],
    np.int32,
)
CASES = {  # lower_bound, low-rank output gate, segment ids
    "bounded-full": (-5.0, False, None),
    "softplus-low-rank": (None, True, None),
    "bounded-low-rank-packed": (-5.0, True, PACKED),
    "softplus-full-packed": (None, False, PACKED),
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_document(x, w, state, lower_bound):
    """One document, x [T,D], from `state` -> y [T,D] and the new state, token by token."""
    tokens = x.shape[0]
    mixed, histories = [], []
    for projection, taps, history in ((w.q_proj, w.q_conv, state[0]), (w.k_proj, w.k_conv, state[1]), (w.v_proj, w.v_conv, state[2])):
        inputs = np.concatenate([history, x @ projection.reshape(D, -1)])
        y = np.stack([(taps * inputs[t : t + W]).sum(0) for t in range(tokens)])
        mixed.append((y * sigmoid(y)).reshape(tokens, *projection.shape[1:]))
        histories.append(inputs[tokens:])
    q, k, v = mixed
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * K**-0.5
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    q, k = np.repeat(q, G // H, axis=1), np.repeat(k, G // H, axis=1)
    beta = sigmoid(x @ w.beta_proj)
    z = (x @ w.decay_down @ w.decay_up.reshape(R, -1)).reshape(tokens, G, K) + w.dt_bias
    rate = np.exp(w.A_log)[:, None]
    g = -rate * np.log1p(np.exp(z)) if lower_bound is None else lower_bound * sigmoid(rate * z)
    S, read = state[3], []
    for t in range(tokens):
        S = np.exp(g[t])[:, :, None] * S
        u = beta[t][:, None] * (v[t] - (S * k[t][:, :, None]).sum(1))
        S = S + k[t][:, :, None] * u[:, None, :]
        read.append((S * q[t][:, :, None]).sum(1))
    o = np.stack(read)
    o = w.out_norm * o / np.sqrt((o * o).mean(-1, keepdims=True) + EPS)
    gate = x @ w.out_gate.reshape(D, -1) if w.out_gate is not None else x @ w.out_gate_down @ w.out_gate_up.reshape(P, -1)
    o = o * sigmoid(gate.reshape(o.shape))
    return o.reshape(tokens, -1) @ w.out_proj.reshape(-1, D), (*histories, S)


def numpy_layer(x, w, state, ids, lower_bound):
    """x [B,T,D], each document by itself -> y [B,T,D] (0 at padding), the state after each row's last document."""
    ids = np.ones(x.shape[:2], np.int32) if ids is None else ids
    rows, finals = [], []
    for b in range(x.shape[0]):
        y, row_state = [None] * x.shape[1], tuple(part[b] for part in state)
        documents = [i for i in np.unique(ids[b]) if i > 0]
        for number, document in enumerate(documents):
            at = np.flatnonzero(ids[b] == document)
            start = row_state if number == 0 else tuple(np.zeros(part.shape[1:]) for part in state)
            out, row_state = numpy_document(x[b, at], w, start, lower_bound)
            for t, value in zip(at, out, strict=True):
                y[t] = value
        rows.append(np.stack([np.zeros(D) if value is None else value for value in y]))
        finals.append(row_state)
    return np.stack(rows), KDAState(*(np.stack(parts) for parts in zip(*finals, strict=True)))


def complex_step_gradients(loss, *trees):
    """Gradient of a real analytic `loss`, entry by entry: Im loss(p + ih) / h, exact to rounding (no difference is taken)."""
    leaves, treedef = jax.tree.flatten(trees)
    gradients = []
    for position, leaf in enumerate(leaves):
        gradient = np.zeros(leaf.shape)
        for index in np.ndindex(leaf.shape):
            moved = leaf.astype(complex)
            moved[index] += 1e-30j
            gradient[index] = loss(*jax.tree.unflatten(treedef, [*leaves[:position], moved, *leaves[position + 1 :]])).imag / 1e-30
        gradients.append(gradient)
    return jax.tree.unflatten(treedef, gradients)


def inner(a, b):
    return sum((x * y).sum() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def make(low_rank=False, batch=B, tokens=T, seed=0):
    """float64 NumPy (x, weights, state, cotangents of y and of the final state)."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return scale * rng.normal(size=shape)

    w = KDAWeights(
        q_proj=normal(D, H, K, scale=0.5),
        k_proj=normal(D, H, K, scale=0.5),
        v_proj=normal(D, G, V, scale=0.5),
        q_conv=normal(W, H * K, scale=0.6),
        k_conv=normal(W, H * K, scale=0.6),
        v_conv=normal(W, G * V, scale=0.6),
        decay_down=normal(D, R, scale=0.5),
        decay_up=normal(R, G, K, scale=0.5),
        A_log=normal(G, scale=0.5),
        dt_bias=normal(G, K) - 2,
        beta_proj=normal(D, G, scale=0.5),
        out_gate=None if low_rank else normal(D, G, V, scale=0.5),
        out_gate_down=normal(D, P, scale=0.7) if low_rank else None,
        out_gate_up=normal(P, G, V, scale=0.7) if low_rank else None,
        out_norm=1 + normal(V, scale=0.3),
        out_proj=normal(G, V, D, scale=0.3),
    )

    def carried():
        histories = (normal(batch, W - 1, H * K), normal(batch, W - 1, H * K), normal(batch, W - 1, G * V))
        return KDAState(*histories, normal(batch, G, K, V))

    return normal(batch, tokens, D), w, carried(), (normal(batch, tokens, D), carried())


@partial(jax.jit, static_argnames=("lower_bound", "implementation"))
def run(x, w, state, ids, cotangents, lower_bound=-5.0, implementation=None):
    """((y, final state), gradients of x, weights and state)."""

    outputs, pull = jax.vjp(lambda *args: forward(*args, ids, lower_bound, implementation), x, w, state)
    return outputs, pull(cotangents)


@partial(jax.jit, static_argnames=("lower_bound", "implementation"))
def forward(x, w, state, ids, lower_bound=-5.0, implementation=None):
    options = dict(lower_bound=lower_bound, norm_eps=EPS, implementation=implementation)
    return kda_layer(x, w, state=state, segment_ids=ids, return_state=True, **options)


def cast(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


def names_and_leaves(tree):
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def assert_close(actual, expected, tolerance):
    for (name, a), b in zip(names_and_leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape, name
        error = np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()
        assert error < tolerance, (name, error)


def assert_bit_equal(a, b):
    for (name, x), y in zip(names_and_leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_values_and_every_gradient_against_numpy(x64, case):
    """The NumPy layer takes each document by itself, so the packed cases also show that documents do not meet."""
    lower_bound, low_rank, ids = CASES[case]
    x, w, state, cotangents = make(low_rank, batch=B if ids is None else len(ids))
    expected = numpy_layer(x, w, state, ids, lower_bound)
    gradients = complex_step_gradients(lambda x, w, s: inner(numpy_layer(x, w, s, ids, lower_bound), cotangents), x, w, state)

    outputs, pulled = run(*cast((x, w, state), "float64"), ids, cast(cotangents, "float64"), lower_bound)
    assert_close(outputs, expected, 1e-13)
    assert_close(pulled, gradients, 1e-13)

    if ids is None:
        args = cast((x, w, state), "float32")
        outputs, pulled = run(*args, ids, cast(cotangents, "float32"), lower_bound)
        assert jax.tree.map(lambda a: a.dtype, (outputs, pulled)) == jax.tree.map(lambda a: a.dtype, (cast(expected, "float32"), args))
        assert_close(outputs, expected, 1e-5)
        assert_close(pulled, gradients, 5e-5)
    else:
        outputs = forward(*cast((x, w, state), "float64"), ids, lower_bound, implementation="reference")
        assert_close(outputs, expected, 1e-13)


@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_from_no_state_at_odd_lengths(x64, tokens):
    x, w, state, _ = make(tokens=tokens)
    expected = numpy_layer(x, w, jax.tree.map(np.zeros_like, state), None, -5.0)
    assert_close(forward(*cast((x, w), "float64"), None, None), expected, 1e-13)
    if tokens == 1:
        y, nothing = jax.jit(partial(kda_layer, norm_eps=EPS))(*cast((x, w), "float64"))
        assert nothing is None
        assert_close(y, expected[0], 1e-13)


@pytest.mark.parametrize(("case", "split"), [("bounded-full", 2), ("softplus-low-rank", 14), ("bounded-low-rank-packed", 14)])
def test_two_calls_equal_one(x64, case, split):
    """Also with a first part shorter than the taps (2 of 3 earlier inputs), and within a document of packed rows."""
    lower_bound, low_rank, ids = CASES[case]
    x, w, state, _ = cast(make(low_rank, batch=B if ids is None else len(ids)), "float64")
    parts = (None, None) if ids is None else (ids[:, :split], ids[:, split:])
    y, final = forward(x, w, state, ids, lower_bound)
    first, middle = forward(x[:, :split], w, state, parts[0], lower_bound)
    second, last = forward(x[:, split:], w, middle, parts[1], lower_bound)
    assert_close((jnp.concatenate([first, second], 1), last), (y, final), 1e-13)


def test_padding_is_never_read(x64):
    """NaN in x and a cotangent at padding: bit-equal values and gradients of x, weights and state, 0 at padding."""
    lower_bound, low_rank, ids = CASES["bounded-low-rank-packed"]
    x, w, state, (ct, ct_state) = cast(make(low_rank, batch=len(ids)), "float64")
    hole = (ids == 0)[..., None]
    clean = run(jnp.where(hole, 0, x), w, state, ids, (jnp.where(hole, 0, ct), ct_state), lower_bound)
    dirty = run(jnp.where(hole, jnp.nan, x), w, state, ids, (jnp.where(hole, 7.0, ct), ct_state), lower_bound)
    assert_bit_equal(dirty, clean)
    (y, final), (dx, *_) = dirty
    assert np.all(np.where(hole, y, 0) == 0) and np.all(np.where(hole, dx, 0) == 0)
    assert_bit_equal(jax.tree.map(lambda a: a[2], final), jax.tree.map(lambda a: a[2], state))


@pytest.mark.parametrize("case", ["bounded-full", "softplus-low-rank"])
def test_prefix_is_bit_equal_when_only_the_future_changes(x64, case):
    lower_bound, low_rank, _ = CASES[case]
    x, w, state, (ct, ct_state) = cast(make(low_rank), "float32")
    before = (jnp.arange(T) < 13)[None, :, None]
    cotangents = (jnp.where(before, ct, 0), jax.tree.map(jnp.zeros_like, ct_state))
    (y, _), (dx, dw, ds) = run(x, w, state, None, cotangents, lower_bound)
    (y2, _), (dx2, dw2, ds2) = run(jnp.where(before, x, -5 * x), w, state, None, cotangents, lower_bound)
    assert_bit_equal((y[:, :13], dx, dw, ds), (y2[:, :13], dx2, dw2, ds2))
    assert np.any(np.asarray(y[:, 13:]) != np.asarray(y2[:, 13:]))


def test_bfloat16_stays_within_its_rounding(x64):
    """bfloat16 activations with float32 weights, against NumPy on the same rounded input."""
    x, w, state, cotangents = make()
    x, state, cotangents = (cast(cast(tree, "bfloat16"), "float64") for tree in (x, state, cotangents))
    x, state, cotangents = jax.tree.map(np.asarray, (x, state, cotangents))
    expected = numpy_layer(x, w, state, None, -5.0)
    lowered = (*(part.astype(jnp.bfloat16) for part in state[:3]), state[3].astype(np.float32))
    y, final = forward(x.astype(jnp.bfloat16), cast(w, "float32"), KDAState(*lowered), None)
    assert y.dtype == jnp.bfloat16 and final.recurrent.dtype == jnp.float32
    assert_close((y, final), expected, 2e-2)


def test_bad_input_is_refused():
    x, w, state, _ = cast(make(), "float32")
    low = cast(make(low_rank=True)[1], "float32")
    ids = jnp.ones((B, T), jnp.int32)

    def changed(**fields):
        return w._replace(**fields)

    bad = [
        (lambda: kda_layer(x[0], w), r"x has shape \(21, 6\); it must have 3 axes"),
        (lambda: kda_layer(x[:, :0], w), "empty"),
        (lambda: kda_layer(x.astype(jnp.float16), w), "x has dtype float16"),
        (lambda: kda_layer(x, changed(A_log=w.A_log.astype(jnp.float16))), "A_log has dtype float16"),
        (lambda: kda_layer(x, changed(q_proj=w.q_proj.reshape(D, -1))), "q_proj has shape"),
        (lambda: kda_layer(x[..., :5], w), "q_proj has shape"),
        (lambda: kda_layer(x, changed(q_conv=w.q_conv[0])), "q_conv has shape"),
        (lambda: kda_layer(x, changed(v_proj=w.v_proj[:, :3])), "v_conv has shape"),
        (lambda: kda_layer(x, changed(decay_up=w.decay_up[:, :1])), "decay_up has shape"),
        (lambda: kda_layer(x, changed(out_proj=w.out_proj[:1])), "out_proj has shape"),
        (lambda: kda_layer(x, changed(out_norm=w.out_norm[:1])), "out_norm has shape"),
        (lambda: kda_layer(x, changed(out_gate=w.out_gate[..., :1])), "out_gate has shape"),
        (lambda: kda_layer(x, changed(out_gate=None)), r"given: \[\]"),
        (lambda: kda_layer(x, low._replace(out_gate=w.out_gate)), "given: .*out_gate_down"),
        (lambda: kda_layer(x, low._replace(out_gate_up=None)), "given: .*out_gate_down"),
        (lambda: kda_layer(x, low._replace(out_gate_down=low.out_gate_down[:, :1])), "out_gate_up has shape"),
        (lambda: kda_layer(x, _with_value_heads(w, 3)), "multiple"),
        (lambda: kda_layer(x, w, segment_ids=ids[:, 1:]), "segment_ids"),
        (lambda: kda_layer(x, w, segment_ids=ids.astype(jnp.float32)), "segment_ids"),
        (lambda: kda_layer(x, w, segment_ids=ids.at[0, :5].set(2)), "decrease"),
        (lambda: kda_layer(x, w, lower_bound=1.0), "lower_bound"),
        (lambda: kda_layer(x, w, norm_eps=0.0), "eps"),
        (lambda: kda_layer(x, w, implementation="fast"), "implementation"),
        (lambda: kda_layer(x, w, state=state._replace(recurrent=None)), "state.recurrent has shape None"),
        (lambda: kda_layer(x[:1], w, state=state), "state.q_history has shape"),
        (lambda: kda_layer(x, w, state=state._replace(q_history=state.q_history[:, 1:])), r"state.q_history has shape \(2, 2, 6\)"),
        (lambda: kda_layer(x, w, state=state._replace(recurrent=state.recurrent[..., 1:])), "state.recurrent has shape"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()


def _with_value_heads(w, heads):
    cut = {name: getattr(w, name)[:, :heads] for name in ("v_proj", "decay_up", "beta_proj", "out_gate")}
    cut |= {name: getattr(w, name)[:heads] for name in ("A_log", "dt_bias", "out_proj")}
    return w._replace(v_conv=w.v_conv[:, : heads * V], **cut)
