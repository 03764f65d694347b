"""The short convolution with the tokens of a row on several devices, against the plain op on the whole row.

Shapes: R shards, B batch, T tokens of the whole row, C channels, W taps.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moejax.ops import short_conv
from moejax.parallel.sequence_conv import sequence_short_conv, sequence_short_convs
from moejax.parallel.sequence_documents import gather_shards

P = jax.P
TOKENS = P(None, "sequence")

PACKED = np.array(
    [
        [1, 1, 0, 1, 0, 0, 1, 1, 2, 0, 0, 2, 3, 3, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0],  # padding inside; documents shorter than the taps
        [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 4, 4, 4, 4, 4, 4, 4],  # a document of widely spaced tokens
        [0] * 24,  # the history goes on
        [2] * 24,
    ],
    np.int32,
)


def mesh_of(shards):
    return jax.make_mesh((shards,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])


def with_gradients(fn, ids):
    def run(arrays, cotangents):
        out, vjp = jax.vjp(lambda *a: fn(*a, *ids), *arrays)
        return *out, *vjp(cotangents)

    return jax.jit(run)


def collectives(compiled):
    kinds = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return collections.Counter(re.findall(kinds, compiled.as_text()))


CASES = {  # shards, tokens, taps, packed
    "length 1": (8, 8, 4, False),
    "length 2, 5 taps": (4, 8, 5, False),
    "length 5": (4, 20, 4, False),
    "one tap": (2, 6, 1, False),
    "one shard": (1, 9, 4, False),
    "packed, length 3": (8, 24, 4, True),
    "packed, length 6": (4, 24, 4, True),
    "packed, length 1": (8, 8, 4, True),
    "packed, one tap": (2, 24, 1, True),
}


@pytest.mark.parametrize("case", CASES)
def test_whole_row(case):
    """Outputs and the last inputs bit for bit; gradients of inputs, taps and the row's history within 1e-6; NaN at padding."""
    shards, tokens, width, packed = CASES[case]
    rng = np.random.default_rng(len(case))
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    ids = (jnp.asarray(PACKED[:, -tokens:]),) if packed else ()
    arrays = (normal(4, tokens, 3), normal(width, 3), normal(4, width - 1, 3))
    cotangents = (normal(4, tokens, 3), normal(4, width - 1, 3))
    if packed:
        arrays = (jnp.where(ids[0][..., None] == 0, jnp.nan, arrays[0]), *arrays[1:])
    plain = lambda x, w, h, i=None: short_conv(x, w, history=h, segment_ids=i)
    local = lambda x, w, h, i=None: sequence_short_conv(x, w, axis="sequence", history=h, segment_ids=i)
    specs = (TOKENS, P(), P(), *[TOKENS] * packed)
    call = jax.shard_map(local, mesh=mesh_of(shards), in_specs=specs, out_specs=(TOKENS, P()), check_vma=True)
    compiled = with_gradients(call, ids).lower(arrays, cotangents).compile()
    got, wanted = compiled(arrays, cotangents), with_gradients(plain, ids)(arrays, cotangents)
    for n, (x, y) in enumerate(zip(got, wanted, strict=True)):
        x, y = np.asarray(x), np.asarray(y)
        if n < 2:
            assert np.array_equal(x, y)
        elif y.size:
            assert np.max(np.abs(x - y)) <= 1e-6 * np.max(np.abs(y)), n
    found = collectives(compiled)
    halo = int(shards > 1 and width > 1)
    assert (found["all-gather"], found["reduce-scatter"]) == (halo, halo)
    assert set(found) <= {"all-gather", "reduce-scatter", "all-reduce"}


def test_several_with_one_gather():
    """q, k and v of different widths in bfloat16, packed: one all-gather and nothing else, bit for bit the plain ops."""
    rng = np.random.default_rng(0)
    sizes = (4, 4, 6)
    xs = [jnp.asarray(rng.normal(size=(4, 24, size)), jnp.bfloat16) for size in sizes]
    weights = [jnp.asarray(rng.normal(size=(4, size)), jnp.float32) for size in sizes]
    ids = jnp.asarray(PACKED + (PACKED > 0) * 300)  # ids that bfloat16 cannot hold

    def local(xs, weights, ids):
        return sequence_short_convs(xs, weights, axis="sequence", segment_ids=ids, output_final_history=False)[0]

    call = jax.shard_map(local, mesh=mesh_of(8), in_specs=(TOKENS, P(), TOKENS), out_specs=TOKENS, check_vma=True)
    compiled = jax.jit(call).lower(xs, weights, ids).compile()
    assert collectives(compiled) == {"all-gather": 1}
    for y, x, weight in zip(compiled(xs, weights, ids), xs, weights, strict=True):
        assert np.array_equal(y, jax.jit(short_conv)(x, weight, segment_ids=ids)[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_integers_travel_exactly(dtype):
    """Ids ride in the gather of the floats, bit for bit up to the largest int32; the floats come back as they were."""
    ids = jnp.asarray([[0, 1, 255], [256, 65537, 2**24 + 1], [2**31 - 1, 2**30 + 1, 2**31 - 2**8]], jnp.int32)
    floats = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 5)), dtype)

    def local(floats, ids):
        parts, integers = gather_shards([floats, floats[:, 0]], ids, axis="sequence")
        return *parts, integers

    everyone = P(None, "sequence")
    call = jax.shard_map(local, mesh=mesh_of(3), in_specs=(P("sequence"), P("sequence")), out_specs=(everyone, everyone, everyone))
    whole, first, integers = jax.jit(call)(floats, ids)
    for got, sent in ((whole, floats), (first, floats[:, 0]), (integers, ids)):
        assert got.dtype == sent.dtype
        for copy in range(3):  # the shards' copies stand side by side
            assert np.array_equal(got[:, copy], sent)


def test_refusals():
    x, weight = jnp.ones((1, 8, 3)), jnp.ones((4, 3))

    def trace(xs, weights, **options):
        local = lambda xs, weights: sequence_short_convs(xs, weights, axis="sequence", **options)[0]
        jax.eval_shape(jax.shard_map(local, mesh=mesh_of(2), in_specs=(TOKENS, P()), out_specs=TOKENS), xs, weights)

    for arguments, options, message in [
        (([x], [weight]), dict(histories=[jnp.ones((1, 4, 3))]), "history has shape"),
        (([x[:, :0]], [weight]), {}, "no axis of"),
        (([x, x.astype(jnp.bfloat16)], [weight] * 2), {}, "dtypes .'float32', 'bfloat16'"),
        (([x, x], [weight, weight[1:]]), {}, r"with \[4, 3\] taps"),
    ]:
        with pytest.raises(ValueError, match=message):
            trace(*arguments, **options)
