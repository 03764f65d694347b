"""How the GPU kernels of KDA are put together, without a GPU: `kda_triton` over stand-ins of the kernels in jax.numpy and float64.

The stand-ins are those of kda_stand_ins.py. Everything between the kernels is the real thing: windows, segments, a state per document,
padding, groups, vmap, shard_map, and which implementation is chosen.
"""

import functools
import os
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

sys.path.insert(0, os.path.dirname(__file__))
import kda_stand_ins

from moejax.kernels.kda import api, gated_kda, kda, kda_implementation, triton, triton_launch
from moejax.kernels.kda.segments import document_ids

NAN = float("nan")
P = PartitionSpec
QUICK = {"xla_backend_optimization_level": 0}
jit = functools.partial(jax.jit, compiler_options=QUICK)


@pytest.fixture
def kernels(monkeypatch, x64):
    kda_stand_ins.use(monkeypatch)
    return monkeypatch


def make(rng, batch, tokens, heads, value_heads, K, V, documents=None):
    """q, k, v, raw gate, beta logits, A_log, dt_bias, initial state."""
    rows = () if documents is None else (documents,)
    shapes = [(batch, tokens, heads, K)] * 2 + [
        (batch, tokens, value_heads, V),
        (batch, tokens, value_heads, K),
        (batch, tokens, value_heads),
    ]
    shapes += [(value_heads,), (value_heads, K), (batch, *rows, value_heads, K, V)]
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def plain(q, k, v, raw, logits, A_log, dt_bias, initial, **options):
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    g = -5 * jax.nn.sigmoid(raw)
    return kda(unit(q), unit(k), v, g, jax.nn.sigmoid(logits), initial_state=initial, lower_bound=-5.0, output_final_state=True, **options)


def fused(q, k, v, raw, logits, A_log, dt_bias, initial, **options):
    return gated_kda(q, k, v, raw, logits, A_log, dt_bias, initial_state=initial, output_final_state=True, **options)


@functools.cache
def compiled(run, options, _cut):
    """Jitted once for each way of cutting rows."""

    def both(args, cotangents, ids):
        out, vjp = jax.vjp(lambda args: run(*args, segment_ids=ids, **dict(options)), args)
        return out, vjp(jax.tree.map(lambda x: jnp.resize(cotangents, x.shape), out))[0]

    return jit(both)


def value_and_gradients(run, args, segment_ids=None, **options):
    weights = jnp.asarray(np.random.default_rng(9).normal(size=4099))
    return compiled(run, tuple(options.items()), triton.cut)(args, weights, segment_ids)


WANTED = {}


def check(run, args, tolerance=1e-9, **options):
    """The kernels' path against the token recurrence: output, final state, every gradient."""
    got = value_and_gradients(run, args, **options)
    key = (run, *(x if x is None else float(jnp.sum(x)) for x in (*args, *options.values())))  # cases share their operands
    if key not in WANTED:
        WANTED[key] = value_and_gradients(run, args, implementation="reference", **options)
    wanted = WANTED[key]
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, y), x in zip(paths, jax.tree.leaves(got), strict=True):
        error = np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-300)
        assert error <= tolerance or np.max(np.abs(y)) == np.max(np.abs(x)) == 0, (jax.tree_util.keystr(path), error)
    return got


TOKENS = 101  # the last chunk, window and segment are not full
ROWS = [[1] * 20 + [2] * 20 + [0] * 3 + [2] * 7 + [4] * 40 + [5] * 11, [0] * 5 + [1] * 50 + [2] * 1 + [3] * 39 + [0] * 6]
PACKED = jnp.asarray(ROWS, jnp.int32)  # boundaries inside chunks and windows; some documents are absent


CASES = [(fused, None, 512, 0), (plain, None, 64, 0), (fused, PACKED, 64, 0), (plain, None, 64, 32), (fused, PACKED, 64, 32)]


@pytest.mark.parametrize("run, ids, window, segment", CASES)
def test_against_the_recurrence(kernels, run, ids, window, segment):
    """One window, several, and segments in several; one document and packed ones; two value heads to a key head."""
    kda_stand_ins.cut(kernels, window, segment)
    check(run, make(np.random.default_rng(0), 2, TOKENS, 1, 2, 8, 16), segment_ids=ids)


@pytest.mark.parametrize("run, window", [(plain, 512), (fused, 64)])
def test_a_state_per_document(kernels, run, window):
    """Documents start a chunk each; document 3 is absent in the first row, 4 and 5 in the second."""
    kda_stand_ins.cut(kernels, window, 64)
    check(run, make(np.random.default_rng(1), 2, TOKENS, 1, 2, 8, 8, documents=5), segment_ids=PACKED, num_segments=5)


@pytest.mark.parametrize("run, tokens, K, V", [(fused, 1, 6, 20), (plain, 33, 3, 16)])
def test_sizes(kernels, run, tokens, K, V):
    """Channels that no kernel has, and rows shorter than a chunk or one token longer."""
    check(run, make(np.random.default_rng(2), 1, tokens, 2, 2, K, V))


def test_without_gate_parameters(kernels):
    args = make(np.random.default_rng(3), 1, 40, 1, 1, 8, 8)
    args[5] = args[6] = None
    check(fused, args)
    args[6] = jnp.ones((1, 8))
    check(fused, args)


def test_padding_is_never_read(kernels):
    """NaN in padded tokens changes nothing: outputs, states and gradients stay what they are, gradients there are 0."""
    padded = PACKED == 0
    args = make(np.random.default_rng(4), 2, TOKENS, 1, 2, 8, 8)
    bare = lambda q, k, v, g, beta, *_, **options: (*kda(q, k, v, g, beta, lower_bound=-5.0, **options), None)[:1]
    for run in (bare, fused):
        changed = args if run is fused else [0.3 * x for x in args[:3]] + [-jnp.abs(x) for x in args[3:4]] + args[4:]
        poisoned = [jnp.where(padded.reshape(2, TOKENS, *(1,) * (x.ndim - 2)), NAN, x) for x in changed[:5]] + changed[5:]
        wanted = value_and_gradients(run, changed, segment_ids=PACKED)
        got = value_and_gradients(run, poisoned, segment_ids=PACKED)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert np.array_equal(x, y) and not np.any(np.isnan(x))
        assert all(not np.any(np.asarray(x)[np.asarray(padded)]) for x in got[1][:5])


@pytest.mark.parametrize("case", ["together", "in groups", "a gate of its own"])
def test_vmap(kernels, case):
    """Mapped over rows: all at once, one after the other, and each with parameters of its own."""
    args = make(np.random.default_rng(5), 3, 40, 1, 1, 8, 8)
    ids = jnp.asarray(np.repeat([[1, 2, 4]], [20, 15, 5], axis=1).repeat(3, axis=0), jnp.int32)

    def loss(*args):
        o, final = fused(*args[:-1], segment_ids=args[-1])
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.sin(final))

    one = jax.grad(loss, argnums=range(8))
    rows = [*(x[:, None] for x in args[:5]), *args[5:7], args[7][:, None], ids[:, None]]
    quick, shared = jit(one), (5, 6)
    wanted = [quick(*(x if j in shared else x[i] for j, x in enumerate(rows))) for i in range(3)]
    axes = [None if j in shared else 0 for j in range(9)]
    if case == "in groups":
        kernels.setattr(triton, "_most_rows", lambda plan, rows: 2)  # three rows: one at a time
    if case == "a gate of its own":
        rows, axes = [jnp.broadcast_to(x, (3, *x.shape)) if j in shared else x for j, x in enumerate(rows)], 0
    got = jit(jax.vmap(one, in_axes=axes))(*rows)
    for x, *y in zip(got, *wanted, strict=True):
        np.testing.assert_allclose(x, jnp.stack(y), rtol=1e-9, atol=1e-11)


def test_vmap_over_cotangents(kernels):
    """A backward pass that is mapped where the forward pass was not."""
    args = make(np.random.default_rng(5), 1, 9, 1, 1, 8, 8)
    out, vjp = jax.vjp(lambda *a: gated_kda(*a)[0], *args[:7])
    cotangents, one = jnp.asarray(np.random.default_rng(6).normal(size=(2, *out.shape))), jit(vjp)
    for x, *y in zip(jit(jax.vmap(vjp))(cotangents), *(one(c) for c in cotangents), strict=True):
        np.testing.assert_allclose(x, jnp.stack(y), rtol=1e-9, atol=1e-11)


def test_shard_map_and_remat(kernels):
    """Rows over one mesh axis and heads over another, varying axes checked; a gate shared by the rows gets the sum of them."""
    *args, _ = make(np.random.default_rng(7), 4, 40, 2, 2, 8, 8)
    kda_stand_ins.cut(kernels, 32, 0)
    ids = jnp.asarray(np.repeat([[1, 2]], 20, axis=1).repeat(4, axis=0), jnp.int32)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = P("data", None, "tensor")
    specs = ([rows] * 5 + [P("tensor")] * 2, P("data"))

    def local(args, ids):
        o, final = jax.checkpoint(lambda args: gated_kda(*args, segment_ids=ids, output_final_state=True))(args)
        return (jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(final)))[None]

    def sharded(args, ids):
        call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(("data", "tensor")), check_vma=True)
        return jax.grad(lambda a: jnp.sum(call(a, ids)))(args)

    wanted = jit(jax.grad(lambda args: local(args, ids)[0]))(args)
    for x, y in zip(jit(sharded)(args, ids), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)


def test_how_a_row_is_cut():
    """By the sizes alone; more tokens never change the window."""
    assert triton.cut(1, 96, 128, 128, 8192) == (8192, 0)
    assert triton.cut(1, 32, 128, 128, 8192) == triton.cut(1, 32, 128, 128, 2**20) == (16384, 0)
    assert triton.cut(1, 4, 128, 128, 65536) == (131072, 4096) and triton.cut(1, 4, 128, 128, 4096)[1] == 0
    assert triton.cut(2, 4, 256, 256, 8192)[0] % 4096 == 0 and triton.cut(3, 4, 128, 128, 8192)[1] == 0
    assert triton.cut(64, 96, 256, 256, 8192) == (512, 0)


def test_what_is_chosen(monkeypatch):
    """Without Triton: xla, and a warning on a GPU. With it: by the platform that is lowered for; by name: it runs or says why not."""
    x = jnp.zeros((1, 5, 1, 16), jnp.bfloat16)
    args = (x, x, x, x, x[..., 0])
    monkeypatch.setattr(triton_launch, "available", lambda: "jax-triton is not installed")
    assert kda_implementation("cuda") == "xla"
    with pytest.raises(NotImplementedError, match="jax-triton is not installed; use implementation='xla'"):
        kda_implementation("cuda", implementation="triton")
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.setattr(jax, "default_backend", lambda: "gpu")
        for _ in range(2):
            kda(*args, lower_bound=-5.0)
    assert [str(w.message) for w in seen].count(
        "kda runs as plain XLA, several times slower than its kernels: jax-triton is not installed."
    ) == 1

    monkeypatch.setattr(triton_launch, "available", lambda: None)
    assert kda_implementation("cuda") == kda_implementation("cuda", implementation="triton") == "triton"
    assert kda_implementation("cpu") == kda_implementation("tpu") == kda_implementation("rocm") == "xla"
    for options in (dict(dtype=jnp.float32), dict(lower_bound=None), dict(key_dim=272), dict(value_dim=512)):
        assert kda_implementation("cuda", **options) == "xla"
        with pytest.raises(NotImplementedError, match="its kernels"):
            kda_implementation("cuda", implementation="triton", **options)
    with pytest.raises(NotImplementedError, match="NVIDIA GPUs, this is 'cpu'"):
        kda(*args, lower_bound=-5.0, implementation="triton")

    def kernels(q, k, v, *rest, initial_state, fused, **_):
        return v + 1 + fused, initial_state

    monkeypatch.setattr(api, "kda_triton", kernels)
    wide = [a.astype(jnp.float32) for a in args]
    for run in (lambda *a: kda(*a, lower_bound=-5.0)[0], lambda *a: gated_kda(*a, None, None)[0]):
        assert not np.any(jax.jit(run)(*args))  # on the CPU: xla, zeros in, zeros out
        for platform in ("cuda", "cpu"):
            text = jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
            assert ("while" in text or "dot_general" in text) == (platform == "cpu")
            assert "dot_general" in jax.jit(run).trace(*wide).lower(lowering_platforms=(platform,)).as_text()


def test_import_needs_no_triton():
    import subprocess
    import sys

    code = "import sys, moejax, moejax.ops; assert not {'triton', 'jax_triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ids_are_filled():
    """What kda_triton gets: padding has the id of the document before it."""
    assert document_ids(jnp.asarray([[0, 1, 0, 2, 0]])).tolist() == [[1, 1, 1, 2, 2]]


@pytest.mark.parametrize(
    "triton_version, word", [((3, 6, 0), "miscompile"), ((3, 9, 0), "never checked"), (None, "not installed"), ((3, 7, 1), None)]
)
def test_versions(monkeypatch, triton_version, word):
    """Only the versions that were checked on a card are used; the reason names what to install."""
    monkeypatch.setattr(triton_launch, "_version", lambda package: triton_version if package == "triton" else (0, 4, 1))
    monkeypatch.setattr(triton_launch.sys, "version_info", (3, 12, 0))
    reason = triton_launch._software.__wrapped__()
    assert (reason is None) if word is None else (word in reason and "3.7.1" in reason)
