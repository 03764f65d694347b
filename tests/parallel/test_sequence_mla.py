"""Sequence-parallel MLA against the plain op on the whole row: values, every gradient, packing, memory, collectives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import Mesh

from moejax.ops.mla import MLAWeights, gated_mla, latent_attention
from moejax.ops.rotary import positions_from_segments
from moejax.parallel.latent_blocks import Chunk, _range, make_layout, make_queries, pack
from moejax.parallel.sequence_mla import sequence_gated_mla, sequence_latent_attention, sequence_positions

H, N, R, C, V = 3, 6, 4, 10, 5
TOKENS, WEIGHTS = P(None, "sequence"), P()
FORMS = ("gather", "ring")


def mesh(shards):
    return Mesh(np.array(jax.devices()[:shards]), ("sequence",))


def inputs(T, seed=0, dtype="float32", H=H):
    """q, latent, shared key, k_up, v_up and a cotangent of the output."""
    rng = np.random.default_rng(seed)
    shapes = [(2, T, H, N + R), (2, T, C), (2, T, R), (C, H, N), (C, H, V), (2, T, H, V)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def packed(shards, length, seed=0):
    """Documents of all lengths across shards, holes inside; where it can be, one shard of padding inside a document."""
    T = shards * length
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(1, max(3, T // 12), (2, T)), axis=1)
    ids[rng.random((2, T)) < 0.15] = 0
    if shards > 2:  # one document from the end of the first shard to the end of the third
        document = ids[0, :length].max() + 1
        ids[0] = np.where((ids[0] > 0) & (np.arange(T) >= length), np.maximum(ids[0], document), ids[0])
        ids[0, max(length - 2, 0) : 3 * length] = document
        ids[0, length : 2 * length] = 0
    ids[1, : T // 3] = 0
    return jnp.asarray(ids, jnp.int32)


def value_and_gradients(function):
    """jit of (arrays, ids, ct) -> (out, gradients of arrays)."""

    def run(arrays, ids, ct):
        out, pull = jax.vjp(lambda *a: function(*a, ids), *arrays)
        return out, pull(ct)

    return jax.jit(run)


def under_shard_map(devices, form, block, is_packed):
    """sequence_latent_attention of whole arrays."""
    specs = (*(TOKENS,) * 3, *(WEIGHTS,) * 2, TOKENS if is_packed else None)

    def local(*a):
        return sequence_latent_attention(*a[:5], axis="sequence", segment_ids=a[5], form=form, block=block)

    return jax.shard_map(local, mesh=devices, in_specs=specs, out_specs=TOKENS)


@functools.cache
def sharded(shards, form, block=None, is_packed=True):
    """Value and gradients; cached, so that tests of equal shapes share a compile."""
    return value_and_gradients(under_shard_map(mesh(shards), form, block, is_packed))


plain = value_and_gradients(lambda *a: latent_attention(*a[:5], segment_ids=a[5]))


def close(actual, expected, tolerance=1e-5):
    """Every array within `tolerance` of the largest entry of its reference."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


CASES = [  # form, shards, local length, packed, block
    ("gather", 1, 33, True, 16),
    ("ring", 1, 33, True, 16),
    ("gather", 2, 33, True, 16),
    ("ring", 2, 33, True, 16),
    ("gather", 4, 16, False, 8),
    ("ring", 4, 16, False, 8),
    ("gather", 8, 5, True, None),
    ("ring", 8, 5, True, None),
    ("ring", 8, 1, True, None),
]
EVERY = [
    (form, shards, length, is_packed, block)
    for form in FORMS
    for shards in (2, 4, 8)
    for length in (1, 5, 16, 33)
    for is_packed, block in ((True, None), (True, 8), (False, 8))
]


def check_case(form, shards, length, is_packed, block):
    *arrays, ct = inputs(shards * length)
    ids = packed(shards, length) if is_packed else None
    close(sharded(shards, form, block, is_packed)(arrays, ids, ct), plain(arrays, ids, ct))


@pytest.mark.parametrize("case", CASES)
def test_equals_the_whole_row(case):
    check_case(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY)
def test_equals_the_whole_row_everywhere(case):
    check_case(*case)


def test_the_cases_hold_what_they_promise():
    """A document over three shards with a shard of padding inside it; otherwise the tests above would show less."""
    ids = np.asarray(packed(4, 16))
    shards = ids[0].reshape(4, 16)
    assert not shards[1].any()
    assert shards[2].min() == shards[2].max() == shards[0].max() < shards[3].max()
    assert not ids[1, :21].any()


@pytest.mark.parametrize("form", FORMS)
def test_padding_is_never_read_and_gets_nothing(form):
    *arrays, ct = inputs(64)
    ids = packed(4, 16)

    def at_padding(value):
        hole = ids == 0
        filled = [jnp.where(hole.reshape(2, 64, *(1,) * (x.ndim - 2)), value, x) for x in (*arrays[:3], ct)]
        return sharded(4, form, 8)([*filled[:3], *arrays[3:]], ids, filled[3])

    dirty = at_padding(jnp.nan)
    same_bits(dirty, at_padding(0))
    out, gradients = dirty
    for x in (out, *gradients[:3]):
        assert np.all(np.asarray(x)[np.asarray(ids) == 0] == 0)
    close(dirty, plain(arrays, ids, jnp.where((ids > 0)[:, :, None, None], ct, 0)))


@pytest.mark.parametrize("form", FORMS)
def test_prefix_is_bit_equal_when_only_the_future_changes(form):
    *arrays, ct = inputs(64)
    cut = 37  # inside the third of four shards

    def before(x):
        return (jnp.arange(64) < cut).reshape(1, 64, *(1,) * (x.ndim - 2))

    changed = [jnp.where(before(x), x, 30 * y) for x, y in zip(arrays[:3], inputs(64, seed=9), strict=False)] + arrays[3:]
    ct = jnp.where(before(ct), ct, 0)
    run = sharded(4, form, 8, False)
    (out, gradients), (other, other_gradients) = run(arrays, None, ct), run(changed, None, ct)
    same_bits([x[:, :cut] for x in (out, *gradients[:3])], [x[:, :cut] for x in (other, *other_gradients[:3])])
    assert np.abs(out[:, cut:] - other[:, cut:]).max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_the_future_and_of_older_documents_are_skipped(form):
    """A masked block that is computed all the same turns NaN latents into NaN outputs (0 * NaN): none may show."""
    *arrays, ct = inputs(64)
    ids = jnp.asarray(np.repeat([[1, 2, 3, 4]] * 2, 16, axis=1), jnp.int32)
    clean, _ = sharded(4, form, 8, False)(arrays, None, ct)
    clean_packed, _ = sharded(4, form, 8)(arrays, ids, ct)
    for start, stop in ((0, 16), (16, 32), (40, 48)):  # two whole shards, the second block of the third
        dirty = [arrays[0], *(x.at[:, start:stop].set(jnp.nan) for x in arrays[1:3]), *arrays[3:]]
        out, _ = sharded(4, form, 8, False)(dirty, None, ct)
        same_bits(out[:, :start], clean[:, :start])
        assert np.isnan(out[:, start:]).all()
        out, _ = sharded(4, form, 8)(dirty, ids, ct)
        same_bits(np.delete(out, np.r_[start:stop], axis=1), np.delete(clean_packed, np.r_[start:stop], axis=1))


def test_no_block_is_expanded_in_vain():
    """Key blocks [first, stop) of each of four shards, two blocks of 8 each, over the chunk of all and over shard 1's."""
    (q, latent, *_, _ct), own = inputs(64), np.arange(4)
    one = jnp.asarray(np.repeat([[1, 1, 2, 2]] * 2, 16, axis=1), jnp.int32)

    def local(q, latent, ids):
        layout = make_layout(q, latent, ids, "sequence", 1.0, 8)
        queries, words = make_queries(q, ids, layout), pack(latent, ids, layout)
        every = jax.lax.all_gather(words, "sequence", tiled=True)
        ranges = [_range(queries, chunk, layout) for chunk in (Chunk(every, 0), Chunk(every[2:4], 1))]
        return [jnp.stack([r.first, r.stop])[None] for r in ranges]

    for ids, whole, second in (
        (None, [own * 0, 2 * own + 2], [own * 0, [0, 2, 2, 2]]),
        (one, [[0, 0, 4, 4], 2 * own + 2], [[0, 0, 2, 2], [0, 2, 2, 2]]),
    ):
        specs = (TOKENS, TOKENS, None if ids is None else TOKENS)
        run = jax.jit(jax.shard_map(local, mesh=mesh(4), in_specs=specs, out_specs=P("sequence")))
        same_bits([x.T for x in run(q, latent, ids)], [np.stack(whole), np.stack(second)])


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form):
    """Beside float32 on the same numbers; no further off than the plain op in bfloat16 is, but for a fifth."""
    *arrays, ct = inputs(64, dtype="bfloat16")
    ids = packed(4, 16)
    actual = sharded(4, form, 8)(arrays, ids, ct)
    narrow = plain(arrays, ids, ct)
    wide = plain([x.astype(jnp.float32) for x in arrays], ids, ct.astype(jnp.float32))
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(actual))
    close(actual[0], wide[0], 1e-2)
    close(actual[1], wide[1], 2e-2)

    def error(result):
        pairs = zip(jax.tree.leaves(result), jax.tree.leaves(wide), strict=True)
        return max(float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max()) for a, b in pairs)

    assert error(actual) < 1.2 * error(narrow)


def test_float64(x64):
    *arrays, ct = inputs(64, dtype="float64")
    ids = packed(4, 16)
    expected = plain(arrays, ids, ct)
    for form in FORMS:
        close(value_and_gradients(under_shard_map(mesh(4), form, 8, True))(arrays, ids, ct), expected, 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_beside_sharded_batch_and_heads(form):
    """Mesh data 2 x sequence 2 x tensor 2 from jax.set_mesh: heads sharded, latents replicated over tensor."""
    devices = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "sequence", "tensor"))
    *arrays, ct = inputs(18, H=4)
    ids = packed(2, 9)
    tokens, heads = P("data", "sequence"), P("data", "sequence", "tensor")
    specs = (heads, tokens, tokens, P(None, "tensor"), P(None, "tensor"), tokens)

    def local(*a):
        return sequence_latent_attention(*a[:5], axis="sequence", segment_ids=a[5], form=form)

    with jax.set_mesh(devices):
        run = value_and_gradients(jax.shard_map(local, in_specs=specs, out_specs=heads)).lower(arrays, ids, ct).compile()
        actual = run(arrays, ids, ct)
    close(actual, plain(arrays, ids, ct))
    moved = set(collectives(run.as_text()))
    assert moved == {"all-reduce", *(["all-gather", "reduce-scatter"] if form == "gather" else ["collective-permute"])}
    gathers = re.findall(r"\[([\d,]+)\]\S* all-gather", run.as_text())
    assert bool(gathers) == (form == "gather")
    assert all(dims.endswith(f",{C + R + 1}") for dims in gathers)  # words of latents and ids, no queries, keys or values


def layer_inputs(T):
    rng = np.random.default_rng(2)
    D, Q = 12, 8
    shapes = MLAWeights((D, Q), (Q,), (Q, H, N + R), (D, C + R), (C,), (C, H, N), (C, H, V), (D, H, V), (H, V, D))
    weights = MLAWeights(*(jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32) for shape in shapes))
    return [jnp.asarray(rng.normal(size=(2, T, D)), jnp.float32) for _ in range(2)], weights


@pytest.mark.parametrize(("form", "rotary"), [("gather", True), ("ring", False)])
def test_whole_layer_twice_under_scan_and_remat(form, rotary):
    (x, ct), weights = layer_inputs(64)
    ids = packed(4, 16)

    def twice(layer):
        def run(x, weights, ids):
            step = jax.checkpoint(lambda x, _: (x + layer(x, weights, ids), None))
            return jax.lax.scan(step, x, None, length=2)[0]

        return run

    def local(x, weights, ids):
        positions = sequence_positions(ids, axis="sequence") if rotary else None
        return sequence_gated_mla(x, weights, axis="sequence", segment_ids=ids, positions=positions, rotary_base=50.0, form=form, block=8)

    def whole(x, weights, ids):
        positions = positions_from_segments(ids) if rotary else None
        return gated_mla(x, weights, segment_ids=ids, positions=positions, rotary_base=50.0)

    shard = jax.shard_map(twice(local), mesh=mesh(4), in_specs=(TOKENS, P(), TOKENS), out_specs=TOKENS)
    actual = value_and_gradients(shard)((x, weights), ids, ct)
    close(actual, value_and_gradients(twice(whole))((x, weights), ids, ct))
    if rotary:  # positions change the result: a layer that ignored them would not pass
        assert np.abs(actual[0] - jax.jit(twice(lambda *a: gated_mla(*a[:2], segment_ids=a[2])))(x, weights, ids)).max() > 1e-2


@pytest.mark.parametrize(("shards", "length"), [(1, 40), (4, 16), (8, 1), (8, 5)])
def test_positions(shards, length):
    local = functools.partial(sequence_positions, axis="sequence")
    run = jax.jit(jax.shard_map(local, mesh=mesh(shards), in_specs=TOKENS, out_specs=TOKENS))
    for seed in range(5):
        ids = packed(shards, length, seed)
        np.testing.assert_array_equal(run(ids), positions_from_segments(ids))
    one = jnp.ones((2, shards * length), jnp.int32)
    np.testing.assert_array_equal(run(one), np.arange(shards * length)[None].repeat(2, 0))


def collectives(text):
    """Names of the collectives of a compiled program, sorted."""
    names = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all|collective-broadcast"
    return sorted(re.findall(rf" ({names})(?:-start)?\(", text))


def largest(text):
    """Elements of the largest array a compiled program names."""
    return max(int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text))


def test_collectives_and_no_array_of_all_keys():
    """Forward and gradient move words and the latents' gradient; the weights' gradients are summed once."""
    *arrays, ct = inputs(64, H=8)
    ids = packed(4, 16)

    def texts(form):
        value = jax.jit(under_shard_map(mesh(4), form, 8, True)).lower(*arrays, ids).compile().as_text()
        return value, sharded(4, form, 8).lower(arrays, ids, ct).compile().as_text()

    value, both = texts("gather")
    assert collectives(value) == ["all-gather"]
    moved = collectives(both)
    assert moved.count("all-gather") <= 2  # the backward's own, unless XLA found it equal to the forward's
    assert [name for name in moved if name != "all-gather"] in (["all-reduce"] * n + ["reduce-scatter"] for n in (1, 2))
    keys, values = 2 * 64 * 8 * (N + R), 2 * 64 * 8 * V
    assert largest(both) < values < keys
    assert largest(plain.lower(arrays, ids, ct).compile().as_text()) >= keys  # the plain op has them

    value, both = texts("ring")
    assert collectives(value) == ["collective-permute"]  # in a loop of 3
    assert re.findall(r'known_trip_count":\{"n":"(\d+)"', value) == ["3"]
    assert set(collectives(both)) == {"all-reduce", "collective-permute"}
    assert collectives(both).count("collective-permute") == 4  # words forward and backward, gradient in the loop and home
    assert re.findall(r'known_trip_count":\{"n":"(\d+)"', both) == ["3", "3"]
    assert largest(both) < values


def test_memory_of_the_ring_does_not_grow_with_the_shards():
    def temporaries(shards, form):
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(64 * shards)]
        ids = jax.ShapeDtypeStruct((2, 64 * shards), jnp.int32)
        compiled = sharded(shards, form, 16).lower(arrays[:-1], ids, arrays[-1]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    two, four, eight = (temporaries(shards, "ring") for shards in (2, 4, 8))
    assert max(two, four, eight) < 1.02 * min(two, four, eight)
    gathered = temporaries(8, "gather") - temporaries(2, "gather")
    words = 6 * 2 * 64 * (C + R) * 4  # of six more shards: the gathered form does hold them, and their gradient
    assert gathered > 1.5 * words


def test_bad_input_is_refused():
    *arrays, _ = inputs(8)
    q = arrays[0]
    call = sequence_latent_attention
    (x, _), weights = layer_inputs(8)

    def inside(function, *a):
        jax.eval_shape(jax.shard_map(function, mesh=mesh(2), in_specs=TOKENS, out_specs=TOKENS), *a)

    bad = [
        (lambda: call(*arrays, axis="sequence"), "inside jax.shard_map"),
        (lambda: sequence_gated_mla(x, weights, axis="sequence"), "inside jax.shard_map"),
        (lambda: sequence_positions(jnp.ones((2, 8), jnp.int32), axis="sequence"), "inside jax.shard_map"),
        (lambda: call(*arrays, axis="sequence", form="ulysses"), "gather, ring"),
        (lambda: call(*arrays, axis="sequence", block=0), "block=0"),
        (lambda: call(q.astype(jnp.bfloat16), *arrays[1:], axis="sequence"), "one dtype"),
        (lambda: call(q[:, :4], *arrays[1:], axis="sequence"), "4 queries and 8 latents"),
        (lambda: call(q[..., 1:], *arrays[1:], axis="sequence"), "N\\+R"),
        (lambda: call(*arrays, axis="sequence", segment_ids=jnp.ones((2, 8))), "int32"),
        (lambda: sequence_positions(jnp.ones((2, 8)), axis="sequence"), "int32"),
        (lambda: inside(lambda x: sequence_gated_mla(x, weights._replace(q_norm=None), axis="sequence"), x), "q_norm"),
    ]
    for function, message in bad:
        with pytest.raises(ValueError, match=message):
            function()
