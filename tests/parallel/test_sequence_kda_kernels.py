"""The sequence-parallel KDA over the GPU kernels' stages, without a GPU: stand-ins of the kernels in float64, real collectives on CPU
devices; values and every gradient, on every shard and head, against the token-by-token recurrence on the whole row.

Shapes: R shards, B batch, T tokens of the whole row, H query/key heads, HV value heads, K, V channels.
"""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "kernels"))
import kda_stand_ins
from test_sequence_kda import collectives, documents

from moejax.ops import gated_kda, kda
from moejax.parallel.sequence_kda import sequence_gated_kda, sequence_kda

P = jax.P
GATED = ("q", "k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias", "initial")
BARE = ("q", "k", "v", "g", "beta", "initial")
SPECS = {name: P(None, "sequence", "tensor") for name in ("o", *GATED[:5], *BARE[:5])}
SPECS |= dict(A_log=P("tensor"), dt_bias=P("tensor"), initial=P(None, "tensor"), final=P(None, "tensor"), ids=P(None, "sequence"))
BOTH = {True: (GATED, gated_kda, sequence_gated_kda), False: (BARE, kda, sequence_kda)}


@pytest.fixture
def kernels(monkeypatch, x64):
    kda_stand_ins.use(monkeypatch)
    return monkeypatch


def make(rng, gated, tokens, ids=None, heads=2, value_heads=4, K=8, V=16):
    """The operands by name, NaN at padding, and cotangents of o and of the final state. float64."""
    batch, sigmoid = 2, lambda x: 1 / (1 + np.exp(-x))
    shapes = [(batch, tokens, heads, K)] * 2 + [(batch, tokens, value_heads, V), (batch, tokens, value_heads, K)]
    q, k, v, raw = (rng.normal(size=shape) for shape in shapes)
    logits, state = rng.normal(size=shapes[2][:3]), lambda: rng.normal(size=(batch, value_heads, K, V))
    if gated:
        arrays = [q, k, v, raw, logits, rng.normal(size=value_heads), rng.normal(size=(value_heads, K)), state()]
    else:
        arrays = [q, k / np.linalg.norm(k, axis=-1, keepdims=True), v, -5 * sigmoid(raw - 3), sigmoid(logits), state()]
    if ids is not None:
        for x in arrays[:5]:
            x[ids == 0] = np.nan
    return [jnp.asarray(x) for x in arrays], (jnp.asarray(rng.normal(size=v.shape)), jnp.asarray(state()))


def value_and_gradients(call):
    def run(arrays, cotangents, ids):
        out, vjp = jax.vjp(lambda *arrays: call(arrays, ids), *arrays)
        return *out, *vjp(cotangents)

    return run


def on_mesh(gated, shards, tensor, packed, wrap=lambda f: f):
    """(arrays, cotangents, ids) -> o, final, the gradients; the axes that arrays vary over are checked."""
    names, _, sequence = BOTH[gated]

    def local(arrays, ids):
        run = lambda *a: sequence(*a[:-1], initial_state=a[-1], axis="sequence", lower_bound=-5.0, segment_ids=ids, output_final_state=True)
        return wrap(run)(*arrays)

    types, sizes = (AxisType.Auto,) * 2, (shards, tensor)
    mesh = jax.make_mesh(sizes, ("sequence", "tensor"), axis_types=types, devices=jax.devices()[: shards * tensor])
    specs = (tuple(SPECS[name] for name in names), SPECS["ids"] if packed else None)
    call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(SPECS["o"], SPECS["final"]), check_vma=True)
    return jax.jit(value_and_gradients(call))


def recurrence(gated, arrays, cotangents, ids):
    """The same of the whole row."""
    options = dict(lower_bound=-5.0, segment_ids=ids, output_final_state=True, implementation="reference")
    call = lambda arrays, ids: BOTH[gated][1](*arrays[:-1], initial_state=arrays[-1], **options)
    return jax.jit(value_and_gradients(call))(arrays, cotangents, ids)


def check(got, wanted, names, shards, tolerance=1e-9):
    """Each array; and those of tokens on each shard and head by itself."""
    for name, x, y in zip(("o", "final", *names), got, wanted, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape and np.max(np.abs(x - y)) <= tolerance * np.max(np.abs(y)), (name, np.max(np.abs(x - y)))
        if SPECS[name] == SPECS["o"]:
            x, y = (np.moveaxis(a.reshape(a.shape[0], shards, -1, *a.shape[2:]), 3, 2) for a in (x, y))
            error, size = (np.max(np.abs(a), axis=(0, *range(3, a.ndim))) for a in (x - y, y))  # [R,H]
            assert np.all(error <= 10 * tolerance * np.maximum(size, 1e-3 * np.max(size))), (name, error / size)


CASES = {  # gated, shards, tensor, local tokens, packed, window, segment
    "4x2 devices, 37 tokens, packed, two windows": (True, 4, 2, 37, True, 32, 0),
    "8 x 1, packed": (True, 8, 1, 1, True, 512, 0),
    "4 x 70, packed, segments in two windows": (False, 4, 1, 70, True, 64, 32),
    "4 x 45, segments in a window": (True, 4, 1, 45, False, 64, 32),
    "8 x 5, one window": (False, 8, 1, 5, False, 512, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_whole_row(kernels, case):
    """Documents over several shards, a shard of padding, NaN there; two value heads to a key head; states with their gradients."""
    gated, shards, tensor, local, packed, window, segment = CASES[case]
    kda_stand_ins.cut(kernels, window, segment)
    ids = jnp.asarray(documents(shards, local)) if packed else None
    arrays, cotangents = make(np.random.default_rng(local), gated, shards * local, None if ids is None else np.asarray(ids))
    run = on_mesh(gated, shards, tensor, packed).lower(arrays, cotangents, ids).compile()
    check(run(arrays, cotangents, ids), recurrence(gated, arrays, cotangents, ids), BOTH[gated][0], shards)
    found = collectives(run)
    assert found["all-gather"] == 2 and set(found) == {"all-gather", "all-reduce"}  # summaries; gradients of the entry states
    if packed:
        return
    # What stands in later shards changes no bit of earlier outputs, nor of the gradients of a loss on them.
    tokens = shards * local
    change = lambda x: x.at[:, tokens - local - 1 :].multiply(0.7)
    d_o, d_final = cotangents[0].at[:, tokens - local - 1 :].set(0), jnp.zeros_like(cotangents[1])
    changed = [change(x) if i < 5 else x for i, x in enumerate(arrays)]
    a, b = (run(x, (d_o, d_final), ids) for x in (arrays, changed))
    for name, x, y in zip(("o", "final", *BOTH[gated][0]), a, b, strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if SPECS[name] == SPECS["o"]:
            assert np.array_equal(x[:, : tokens - local - 1], y[:, : tokens - local - 1]), name
            assert name == "o" or not np.any(y[:, tokens - local - 1 :]), name
        elif name != "final":
            assert np.array_equal(x, y), name


def test_remat_and_vmap(kernels):
    """Rematerialised under a vmap outside of shard_map's function body: two examples give what each gives alone."""
    kda_stand_ins.cut(kernels, 512, 0)
    ids = jnp.asarray(documents(2, 9))
    examples = [make(np.random.default_rng(i), True, 18, np.asarray(ids)) for i in range(2)]
    mapped = lambda f: lambda *a: jax.vmap(jax.checkpoint(f))(*a)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *examples)
    one = on_mesh(True, 2, 1, True)

    def local(arrays, ids):
        run = lambda *a: sequence_gated_kda(*a[:-1], initial_state=a[-1], axis="sequence", segment_ids=ids, output_final_state=True)
        return mapped(run)(*arrays)

    mesh = jax.make_mesh((2, 1), ("sequence", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:2])
    lead = lambda spec: P(None, *spec)
    specs = (tuple(lead(SPECS[name]) for name in GATED), SPECS["ids"])
    call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(lead(SPECS["o"]), lead(SPECS["final"])), check_vma=True)
    got = jax.jit(value_and_gradients(call))(*stacked, ids)
    wanted = [one(*example, ids) for example in examples]
    for x, *y in zip(got, *wanted, strict=True):
        np.testing.assert_allclose(x, jnp.stack(y), rtol=1e-9, atol=1e-11)


def test_shards_of_one_device(kernels):
    """A vmap whose axis has a name in the place of the mesh, as tests/parallel/test_sequence_kda_gpu.py has it: the same numbers."""
    kda_stand_ins.cut(kernels, 512, 0)
    ids = jnp.asarray(documents(2, 9))
    arrays, cotangents = make(np.random.default_rng(0), True, 18, np.asarray(ids))
    split = lambda x: jnp.moveaxis(x.reshape(2, 2, 9, *x.shape[2:]), 1, 0)
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(2, 18, *x.shape[3:])

    def local(ids, d_o, *tokens):
        options = dict(axis="sequence", segment_ids=ids, output_final_state=True)
        (o, final), vjp = jax.vjp(lambda *a: sequence_gated_kda(*a[:-1], initial_state=a[-1], **options), *tokens, *arrays[5:])
        # Such an axis sums the shards' cotangents of a result that all of them have.
        return o, final, *vjp((d_o, cotangents[1] / 2))

    mapped = jax.jit(jax.vmap(local, axis_name="sequence"))
    o, final, *grads = mapped(split(ids), *map(split, (cotangents[0], *arrays[:5])))
    got = join(o), final[0], *map(join, grads[:5]), *(jnp.sum(x, axis=0) for x in grads[5:])
    for x, y in zip(got, on_mesh(True, 2, 1, True)(arrays, cotangents, ids), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)


def test_num_segments_is_refused_or_xla(kernels):
    """A state per document over several shards has no kernels: by name an error, by itself XLA with the recurrence's result."""
    ids = jnp.asarray(documents(2, 9))
    (*arrays, _), _ = make(np.random.default_rng(3), True, 18, np.asarray(ids))
    mesh = jax.make_mesh((2,), ("sequence",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tokens = P(None, "sequence")

    def run(implementation):
        local = functools.partial(
            lambda ids, *a, **options: sequence_gated_kda(*a, segment_ids=ids, **options),
            axis="sequence",
            num_segments=6,
            output_final_state=True,
            implementation=implementation,
        )
        specs = (*[tokens] * 6, P(), P())
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(tokens, P())))(ids, *arrays)

    wanted = gated_kda(*arrays, segment_ids=ids, num_segments=6, output_final_state=True, implementation="reference")
    for x, y in zip(run(None), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11)
    kernels.setattr(kda_stand_ins.api, "resolve", lambda name, *_: name)
    with pytest.raises(NotImplementedError, match="no num_segments over several shards"):
        run("triton")
