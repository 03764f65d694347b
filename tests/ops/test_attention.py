"""Blockwise attention against a plain float64 softmax: values, gradients, packing, padding, prefixes, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.ops.attention import Layout, _bounds, attention, default_block, segment_blocks


def plain(q, k, v, segment_ids=None, causal=True):
    """The whole [T,S] score matrix at once; q [B,T,H,K], k [B,S,J,K], v [B,S,J,V]."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    T, S = scores.shape[2:]
    seen = jnp.ones((1, 1, T, S), bool)
    if causal:
        seen &= jnp.arange(S) <= jnp.arange(T)[:, None] + S - T
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids > 0)[:, :, None]
        seen = seen & same[:, None]
    p = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1) * seen.any(-1, keepdims=True)
    return jnp.einsum("bhts,bshv->bthv", p, v)


def inputs(T, S=None, heads=4, kv_heads=2, K=6, V=5, seed=0, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    S = T if S is None else S
    shapes = [(2, T, heads, K), (2, S, kv_heads, K), (2, S, kv_heads, V), (2, T, heads, V)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def packed(T, seed=0):
    """Two rows of documents of all lengths (1 as well) with padding in front, at the end and inside documents."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(1, 6, (2, T)), axis=1)
    ids[rng.random((2, T)) < 0.2] = 0
    ids[1, : T // 3] = 0
    ids[0, T - T // 5 :] = 0
    return jnp.asarray(ids, jnp.int32)


def value_and_gradients(function):
    """jit of (q, k, v, ct) -> (out, (dq, dk, dv))."""

    def run(q, k, v, ct):
        out, pull = jax.vjp(function, q, k, v)
        return out, pull(ct)

    return jax.jit(run)


def close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-3)


CASES = [  # T, S, key heads, causal, packed, block
    (1, 1, 4, True, False, 16),
    (15, 15, 4, True, True, 16),
    (17, 17, 1, True, False, 16),
    (65, 65, 2, True, True, 16),
    (130, 130, 4, True, True, 32),
    (63, 63, 4, False, True, 16),
    (40, 70, 2, True, False, 16),
    (17, 33, 2, False, False, 8),
]


@pytest.mark.parametrize(("T", "S", "kv_heads", "causal", "is_packed", "block"), CASES)
def test_value_and_gradients_equal_plain_attention(x64, T, S, kv_heads, causal, is_packed, block):
    q, k, v, ct = inputs(T, S, kv_heads=kv_heads)
    ids = packed(T) if is_packed else None

    def fast(q, k, v):
        return attention(q, k, v, segment_ids=ids, causal=causal, block=block)

    def slow(q, k, v):
        return plain(q, k, v, ids, causal)

    close(value_and_gradients(fast)(q, k, v, ct), value_and_gradients(slow)(q, k, v, ct), 1e-12)


@pytest.mark.parametrize(
    ("dtype", "value_tolerance", "gradient_tolerance"), [("float32", 1e-5, 5e-5), ("bfloat16", 1e-2, 2e-2)]
)
def test_narrow_dtypes_against_float64(x64, dtype, value_tolerance, gradient_tolerance):
    narrow = [x.astype(dtype) for x in inputs(130)]
    wide = [x.astype(jnp.float64) for x in narrow]
    ids = packed(130)

    def fast(q, k, v):
        return attention(q, k, v, segment_ids=ids, block=32)

    out, gradients = value_and_gradients(fast)(*narrow)
    expected, expected_gradients = value_and_gradients(lambda q, k, v: plain(q, k, v, ids))(*wide)
    assert all(a.dtype == dtype for a in (out, *gradients))
    close(out, expected, value_tolerance)
    close(gradients, expected_gradients, gradient_tolerance)


def test_padding_is_never_read_and_gets_nothing(x64):
    q, k, v, ct = inputs(65)
    ids = packed(65, seed=3)
    hole = (ids == 0)[:, :, None, None]
    clean = [jnp.where(hole, 0, x) for x in (q, k, v, ct)]
    dirty = [jnp.where(hole, jnp.nan, x) for x in (q, k, v, ct)]

    run = value_and_gradients(lambda *a: attention(*a, segment_ids=ids, block=16))
    for a, b in zip(jax.tree.leaves(run(*dirty)), jax.tree.leaves(run(*clean)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.all(np.where(np.broadcast_to(hole, a.shape), a, 0) == 0)


@pytest.mark.parametrize("block", [16, 256])
def test_prefix_is_bit_equal_when_only_the_future_changes(block):
    q, k, v, ct = inputs(65, dtype=jnp.float32)
    others = inputs(65, dtype=jnp.float32, seed=9)
    cut = 37
    before = (jnp.arange(65) < cut)[None, :, None, None]
    changed = [jnp.where(before, x, 30 * y) for x, y in zip((q, k, v), others, strict=False)]
    ct = jnp.where(before, ct, 0)

    run = value_and_gradients(lambda *a: attention(*a, block=block))
    one, other = (jax.tree.leaves(run(*a, ct)) for a in ((q, k, v), changed))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a[:, :cut], b[:, :cut])
    assert np.abs(one[0][:, cut:] - other[0][:, cut:]).max() > 0.1


def test_packed_row_equals_each_document_alone(x64):
    q, k, v, _ = inputs(63)
    lengths = (1, 20, 2, 40)
    ids = jnp.asarray(np.repeat(np.arange(1, 5), lengths)[None].repeat(2, 0), jnp.int32)
    out = jax.jit(lambda *a: attention(*a, segment_ids=ids, block=16))(q, k, v)
    start = 0
    for length in lengths:
        piece = slice(start, start + length)
        close(out[:, piece], jax.jit(plain)(q[:, piece], k[:, piece], v[:, piece]), 1e-12)
        start += length


def test_extreme_scores_stay_finite():
    q, k, v, ct = inputs(40, dtype=jnp.float32)
    run = value_and_gradients(lambda q, k, v: attention(q, k, v, block=16))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(run(1e4 * q, 1e4 * k, v, ct)))


def test_inside_scan_remat_vmap_and_shard_map(x64):
    """The four transformations that a layer stack applies, against direct calls."""
    q, k, v, ct = inputs(40, kv_heads=4, K=5, V=5)
    ids = packed(40)

    def call(q, k, v, ids):
        return attention(q, k, v, segment_ids=ids, block=16)

    def direct(q):
        return jnp.sum(call(call(q, k, v, ids), k, v, ids) * ct)

    def scanned(q):
        layer = jax.checkpoint(lambda q, _: (call(q, k, v, ids), None))
        return jnp.sum(jax.lax.scan(layer, q, None, length=2)[0] * ct)

    close(jax.jit(jax.value_and_grad(scanned))(q), jax.jit(jax.value_and_grad(direct))(q), 1e-12)

    def loss(q, k, v, ids, ct):
        return jnp.sum(call(q, k, v, ids) * ct)

    one = jax.value_and_grad(loss, argnums=(0, 1, 2))
    expected = jax.jit(one)(q, k, v, ids, ct)
    rows = [x[:, None] for x in (q, k, v, ids, ct)]
    values, gradients = jax.jit(jax.vmap(one))(*rows)
    close((values.sum(), [g[:, 0] for g in gradients]), expected, 1e-12)

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    shard = jax.shard_map(call, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data"))
    sharded = jax.value_and_grad(lambda q, k, v: jnp.sum(shard(q, k, v, ids) * ct), argnums=(0, 1, 2))
    close(jax.jit(sharded)(q, k, v), expected, 1e-12)


def test_memory_grows_linearly():
    """Temporaries of value and gradient at 32768 tokens: one float32 [T,T] array would be 4.3 GB."""

    def temporaries(T):
        q = jax.ShapeDtypeStruct((1, T, 1, 16), jnp.float32)
        step = jax.jit(jax.grad(lambda q: jnp.sum(attention(q, q, q) ** 2)))
        return step.lower(q).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(4096), temporaries(32768)
    assert long < 100e6
    assert long < 10 * short


def test_packed_rows_skip_blocks_of_other_documents():
    """The loop bounds leave out what lies before a block's documents: cost follows the documents, not the row."""
    layout = Layout(16, 16, 8, 8, 128, 128, True, 1.0)
    ids = jnp.asarray(np.repeat([1, 2, 3, 4], 32)[None], jnp.int32)
    blocks = segment_blocks(ids, 8, 16)
    bounds = _bounds(blocks, blocks, layout)
    np.testing.assert_array_equal(bounds.first_key, [0, 0, 2, 2, 4, 4, 6, 6])
    np.testing.assert_array_equal(bounds.last_query, [2, 2, 4, 4, 6, 6, 8, 8])


def test_bad_input_is_refused():
    q, k, v, _ = inputs(8, dtype=jnp.float32)
    ids = jnp.ones((2, 8), jnp.int32)
    assert [default_block(T) for T in (1, 256, 4096, 10**6)] == [128, 128, 256, 512]
    bad = [
        (lambda: attention(q[0], k, v), "axes"),
        (lambda: attention(q.astype(jnp.float16), k, v), "float16"),
        (lambda: attention(q[:, :0], k[:, :0], v[:, :0]), "at least 1"),
        (lambda: attention(q[:, :, :3], k, v), "divide"),
        (lambda: attention(q, k[:, :5], v[:, :5]), "keys must be at least"),
        (lambda: attention(q, k[..., :3], v), r"\[B,S,J,K\]"),
        (lambda: attention(q, k, v, segment_ids=ids[:, :4]), "segment_ids"),
        (lambda: attention(q, k, v, segment_ids=ids.astype(jnp.float32)), "int32"),
        (lambda: attention(q, k, v, block=0), "block=0"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
