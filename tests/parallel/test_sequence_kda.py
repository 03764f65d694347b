"""KDA with the tokens of a row on several devices: values and every gradient, on every shard and head, against the token-by-token
recurrence in float64 on the whole row.

Shapes: R shards, B batch, T tokens of the whole row, H query/key heads, HV value heads, K, V channels, N documents.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moejax.ops import kda
from moejax.parallel.sequence_kda import sequence_gated_kda, sequence_kda

P = jax.P
TOKENS = P(None, "sequence")
NAMES = ("o", "final", "q", "k", "v", "g", "beta", "initial")


def mesh_of(shards):
    return jax.make_mesh((shards,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])


def collectives(compiled):
    """{kind: how many} in the compiled text, asynchronous pairs counted once."""
    kinds = r" (all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
    return collections.Counter(re.findall(kinds, compiled.as_text()))


def documents(shards, local):
    """[2,T] ids with a document over several shards, some inside one, padding between, inside and as a whole shard, a gap."""
    tokens = shards * local
    ids = np.zeros((2, tokens), np.int32)
    cuts = np.round(np.cumsum([0.2, 0.1, 0.3, 0.25, 0.15]) * tokens).astype(int)
    for start, end, document in zip([0, *cuts[:-1]], cuts, [1, 2, 4, 5, 6], strict=True):
        ids[0, start:end] = document
    ids[0, local : 2 * local] = 0  # in the middle of a document or between two
    ids[0, -1] = 0
    ids[1, min(local, tokens // 2) :] = 3  # padding before the only document, and a shard of padding inside it
    ids[1, -2 * local : -local] = 0
    return ids


def operands(rng, tokens, ids=None, documents=None, heads=2, value_heads=4, channels=5, size=3, batch=2, dtype=jnp.float32):
    """q, k, v, g, beta, the initial state; cotangents of o and the final state. NaN at padding."""
    normal = lambda *shape: rng.normal(size=shape)
    q, k, v = normal(batch, tokens, heads, channels), normal(batch, tokens, heads, channels), normal(batch, tokens, value_heads, size)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -5 / (1 + np.exp(3 - normal(batch, tokens, value_heads, channels)))
    beta = 1 / (1 + np.exp(-normal(batch, tokens, value_heads)))
    state = normal(batch, *(() if documents is None else (documents,)), value_heads, channels, size)
    d_o, d_final = normal(*v.shape), normal(*state.shape)
    if ids is not None:
        for x in (q, k, v, g, beta):
            x[ids == 0] = np.nan
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v, g, beta)] + [jnp.asarray(state, jnp.float32)]
    return arrays, (jnp.asarray(d_o, dtype), jnp.asarray(d_final, jnp.float32))


def with_gradients(fn):
    """fn(*arrays) -> (o, final)  =>  jitted (arrays, cotangents) -> o, final, gradient of each array."""

    def run(arrays, cotangents):
        out, vjp = jax.vjp(fn, *arrays)
        return *out, *vjp(cotangents)

    return jax.jit(run)


def on_mesh(shards, packed, **options):
    """jitted (arrays, cotangents, ids) -> o, final, gradients of the sharded op. ids None where not packed."""

    def local(*arrays):
        *tokens, state = arrays[:6]
        ids = arrays[6] if packed else None
        options_ = dict(initial_state=state, segment_ids=ids, output_final_state=True, axis="sequence")
        return sequence_kda(*tokens, **options_, **options)

    specs = (*[TOKENS] * 5, P(), *[TOKENS] * packed)
    call = jax.shard_map(local, mesh=mesh_of(shards), in_specs=specs, out_specs=(TOKENS, P()), check_vma=True)
    return jax.jit(lambda arrays, cotangents, *ids: with_gradients(lambda *a: call(*a, *ids))(arrays, cotangents))


def oracle(arrays, cotangents, ids=None, num_segments=None):
    """The same of the whole row, token by token in float64. Needs x64."""
    wide = [x.astype(jnp.float64) for x in arrays]
    options = dict(segment_ids=ids, num_segments=num_segments, output_final_state=True, implementation="reference")
    run = with_gradients(lambda *a: kda(*a[:5], initial_state=a[5], **options))
    return run(wide, tuple(x.astype(jnp.float64) for x in cotangents))


def error(got, wanted):
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    return np.max(np.abs(got - wanted)) / max(np.max(np.abs(wanted)), 1e-30)


def assert_close(got, wanted, shards, tolerance=1e-5):
    """Each array within `tolerance` of its largest entry; and within twice that of the largest entry in every shard and head,
    or a tenth of it of the whole array's: a slice may be one number that is almost 0."""
    for name, x, y in zip(NAMES, got, wanted, strict=True):
        assert x.shape == y.shape and error(x, y) < tolerance, (name, error(x, y))
        if name in ("final", "initial"):
            continue
        parts = [np.asarray(a, np.float64).reshape(a.shape[0], shards, -1, *a.shape[2:]) for a in (x, y)]
        for shard in range(shards):
            for head in range(x.shape[2]):
                a, b = (part[:, shard, :, head] for part in parts)
                allowed = tolerance * max(2 * np.max(np.abs(b)), 0.1 * np.max(np.abs(parts[1])))
                assert np.max(np.abs(a - b)) <= allowed, (name, shard, head, error(a, b))


CASES = {  # shards, local tokens, packed, lower bound
    "2 x 33 packed": (2, 33, True, -5.0),
    "4 x 16": (4, 16, False, None),
    "8 x 5 packed": (8, 5, True, -5.0),
    "8 x 1 packed": (8, 1, True, None),
}
CROSS = [(r, t, packed, bound) for r in (2, 4, 8) for t in (1, 5, 16, 33) for packed in (False, True) for bound in (-5.0, None)]


def check_case(shards, local, packed, bound):
    rng = np.random.default_rng(shards * local)
    ids = documents(shards, local) if packed else None
    arrays, cotangents = operands(rng, shards * local, ids)
    extra = () if ids is None else (jnp.asarray(ids),)
    compiled = on_mesh(shards, packed, lower_bound=bound).lower(arrays, cotangents, *extra).compile()
    assert_close(compiled(arrays, cotangents, *extra), oracle(arrays, cotangents, *extra), shards)
    return compiled


@pytest.mark.parametrize("case", CASES)
def test_whole_row(x64, case):
    """Local lengths 1, 5, 16, 33; documents over several shards, a shard of padding, NaN there; states with their gradients."""
    found = collectives(check_case(*CASES[case]))
    # Forward: the summaries, and the final state's sum. Backward: the gather's transpose, and the sum for the initial state.
    assert found["all-gather"] == found["reduce-scatter"] == 1 and set(found) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found["all-reduce"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("case", CROSS, ids=lambda case: "{}x{}-packed:{}-{}".format(*case))
def test_whole_row_cross(x64, case):
    check_case(*case)


def test_forward_is_one_gather():
    """Without a final state the op is one all-gather of [B,HV,K,V+K] float32 numbers a shard, for bfloat16 inputs too."""
    arrays, _ = operands(np.random.default_rng(0), 64, dtype=jnp.bfloat16)
    call = jax.shard_map(
        lambda *a: sequence_kda(*a, axis="sequence", lower_bound=-5.0)[0], mesh=mesh_of(4), in_specs=(TOKENS,) * 5, out_specs=TOKENS
    )
    compiled = jax.jit(call).lower(*arrays[:5]).compile()
    assert collectives(compiled) == {"all-gather": 1}
    shape = re.search(r"= f32\[([\d,]+)\]\S* all-gather\(", compiled.as_text())
    assert shape and np.prod([int(n) for n in shape[1].split(",")]) == 4 * 2 * 4 * 5 * (3 + 5)
    exact = kda(*(x.astype(jnp.float32) for x in arrays[:5]), implementation="reference")[0]
    whole = kda(*arrays[:5], lower_bound=-5.0)[0]
    got = compiled(*arrays[:5])
    assert got.dtype == jnp.bfloat16 and error(got, exact) <= 1.1 * error(whole, exact)


@pytest.mark.parametrize("with_state", [True, False])
def test_absent_documents(x64, with_state):
    """K5 on a mesh (FlashKDA #32, vllm-ascend #11893): an absent document returns its state bit for bit and shifts nothing.

    Absent: 2, as in the case; the first two; the last two; all (a row of padding). Documents span four shards.
    """
    tokens, half = 256, 128
    ids = np.zeros((4, tokens), np.int32)
    for row, pair in enumerate([(1, 3), (3, 4), (1, 2)]):
        ids[row] = np.repeat(pair, half)
    heads = 4 if with_state else 1
    sizes = dict(heads=heads, value_heads=heads, channels=16, size=16, batch=4)
    arrays, cotangents = operands(np.random.default_rng(5), tokens, ids, documents=4, **sizes)
    if not with_state:
        arrays[5] = jnp.zeros_like(arrays[5])
    got = on_mesh(8, True, lower_bound=-5.0, num_segments=4)(arrays, cotangents, jnp.asarray(ids))
    assert_close(got, oracle(arrays, cotangents, jnp.asarray(ids), 4), 8)
    for row, absent in enumerate([[1, 3], [0, 1], [2, 3], [0, 1, 2, 3]]):
        assert np.array_equal(got[1][row, np.array(absent)], arrays[5][row, np.array(absent)])
        assert np.array_equal(got[7][row, np.array(absent)], cotangents[1][row, np.array(absent)])
    assert not np.any(got[0][3])
    if not with_state:  # None is zeros
        options = dict(axis="sequence", lower_bound=-5.0, num_segments=4, output_final_state=True)
        local = lambda ids, *a: sequence_kda(*a, segment_ids=ids, **options)
        call = jax.shard_map(local, mesh=mesh_of(8), in_specs=(TOKENS,) * 6, out_specs=(TOKENS, P()))
        for x, y in zip(jax.jit(call)(jnp.asarray(ids), *arrays[:5]), got, strict=False):
            assert np.array_equal(x, y)


def test_state_of_each_document(x64):
    """num_segments with short documents, several a shard and across shards, local length not a multiple of a chunk."""
    ids = documents(4, 10)
    arrays, cotangents = operands(np.random.default_rng(6), 40, ids, documents=7)
    got = on_mesh(4, True, num_segments=7)(arrays, cotangents, jnp.asarray(ids))
    assert_close(got, oracle(arrays, cotangents, jnp.asarray(ids), 7), 4)


def test_prefix_bits():
    """What stands in later shards changes no bit of earlier outputs, nor of the gradients of a loss on them."""
    rng = np.random.default_rng(7)
    (first, (d_o, d_final)), (second, _) = operands(rng, 40), operands(rng, 40)
    cut = 23  # inside shard 4 of 8
    d_o, d_final = d_o.at[:, cut:].set(0), jnp.zeros_like(d_final)
    changed = [jnp.concatenate([x[:, :cut], y[:, cut:]], axis=1) for x, y in zip(first[:5], second[:5], strict=True)]
    run = on_mesh(8, False, lower_bound=-5.0)
    a, b = run(first, (d_o, d_final)), run([*changed, first[5]], (d_o, d_final))
    for name, x, y in zip(NAMES, a, b, strict=True):
        if name == "initial":
            assert np.array_equal(x, y)
        elif name != "final":
            assert np.array_equal(x[:, :cut], y[:, :cut]) and (name == "o" or not np.any(np.asarray(x)[:, cut:])), name
    assert not np.array_equal(a[1], b[1])


def test_axis_of_size_one_is_the_plain_op():
    arrays, cotangents = operands(np.random.default_rng(8), 20)
    got = on_mesh(1, False, lower_bound=-5.0)(arrays, cotangents)
    plain = with_gradients(lambda *a: kda(*a[:5], initial_state=a[5], lower_bound=-5.0, output_final_state=True))(arrays, cotangents)
    for x, y in zip(got, plain, strict=True):
        assert np.array_equal(x, y)


def test_refusals():
    arrays, _ = operands(np.random.default_rng(9), 16)

    def trace(*arrays, fn=sequence_kda, **options):
        specs = (TOKENS,) * 5 + (P(),) * (len(arrays) - 5)
        local = lambda *a: fn(*a, axis="sequence", **options)[0]
        jax.eval_shape(jax.shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=TOKENS), *arrays)

    tokens, state = arrays[:5], arrays[5]
    empty = [x[:, :0] for x in tokens]
    for call, message in {
        lambda: trace(*empty): "T = 0",
        lambda: trace(*tokens, initial_state=state[:, :2]): r"initial_state has shape \(2, 2, 5, 3\); here it must be \[B,HV,K,V\]",
        lambda: trace(*tokens, num_segments=2): "num_segments=2 without segment_ids",
        lambda: trace(*tokens, lower_bound=-7.0): "lower_bound=-7.0",
        lambda: trace(*tokens, implementation="fast"): "implementation='fast'",
        lambda: trace(*tokens[:2], tokens[2].astype(jnp.float16), *tokens[3:]): "v has dtype float16",
        lambda: trace(*tokens[:3], tokens[3][..., :2], tokens[4]): "g has shape",
        functools.partial(trace, *tokens[:3], tokens[3][..., :2], tokens[4], None, None, fn=sequence_gated_kda): "raw_gate has shape",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
