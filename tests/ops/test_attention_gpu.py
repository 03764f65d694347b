"""Attention of an NVIDIA card: the choice, its reasons, and what surrounds the kernels, which run in the tests marked gpu."""

import importlib
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from moejax.ops import attention_gpu
from moejax.ops.attention import attention
from moejax.ops.attention_gpu import (
    MOST_RUNS,
    AttentionChoice,
    AttentionFacts,
    attention_implementation,
    cudnn_attention,
    mosaic_attention,
    mosaic_packed,
    packed_attention,
    run_offsets,
    runs,
)

K3 = AttentionFacts()
NO_TOKAMAX = importlib.util.find_spec("tokamax") is None


def inputs(T, heads=4, kv_heads=2, K=24, V=16, batch=2, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, T, heads, K), (batch, T, kv_heads, K), (batch, T, kv_heads, V), (batch, T, heads, V)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def value_and_gradients(function):
    """jit of (q, k, v, ct) -> (out, dq, dk, dv)."""

    def run(q, k, v, ct):
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(ct)

    return jax.jit(run)


def distance(actual, expected) -> list[float]:
    """Relative L2 distance of each pair of arrays."""
    pairs = zip(actual, expected, strict=True)
    wide = ((np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)
    return [float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in wide]


def documents(*stretches):
    """[(id, tokens), ...] a row -> ids [B,T]."""
    return jnp.asarray([[i for i, tokens in row for _ in range(tokens)] for row in stretches], jnp.int32)


WHOLE = documents([(1, 20), (2, 1), (0, 9), (3, 35)], [(0, 30), (4, 30), (0, 5)])  # every document is one stretch
TORN = documents([(1, 20), (0, 1), (1, 44)], [(1, 65)])  # padding inside document 1
MANY = documents([(i + 1, 1) for i in range(65)], [(1, 65)])  # more documents than cuDNN's tables hold


@pytest.fixture
def card(monkeypatch):
    """Let this process believe in a Hopper card with cuDNN 9.13: tracing and lowering need no more, running would."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(attention_gpu, "missing_card", lambda: None)
    monkeypatch.setattr(attention_gpu, "_missing_mosaic", lambda: None)
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(fused, "check_compute_capability", lambda wanted: True)


def lowered(function, arguments, platform):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    traced = jax.jit(function).trace(*arguments)
    with jax.sharding.use_abstract_mesh(mesh):
        return traced.lower(lowering_platforms=(platform,)).as_text()


def test_choice_without_a_card_is_blockwise_and_says_why():
    for platform in ("cpu", "tpu", "rocm"):
        choice = attention_implementation(platform)
        assert choice.name == "xla" and platform in choice.reason
    choice = attention_implementation("cuda")
    assert choice.name == "xla" and "default backend is cpu" in choice.reason
    assert attention_implementation() == attention_implementation("cpu")
    assert attention_implementation("tpu", implementation="xla").name == "xla"


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        (K3, "cudnn", "takes this call"),
        (K3._replace(key_width=20, value_width=7), "cudnn", "takes this call"),
        (K3._replace(causal=False, keys=9000), "cudnn", "takes this call"),
        (K3._replace(queries=783, keys=783), "cudnn", "takes this call"),
        (K3._replace(queries=127, keys=127), "xla", "one block"),
        (K3._replace(packed=True), "xla", "named"),
        (K3._replace(packed=True, causal=False), "xla", "causal"),
        (K3._replace(keys=9000), "xla", "9000 keys"),
        (K3._replace(dtype="float32"), "xla", "float32"),
        (K3._replace(key_width=264), "xla", "256"),
        (K3._replace(value_width=264), "xla", "256"),
    ],
)
def test_choice_on_a_card(card, facts, name, reason):
    choice = attention_implementation("cuda", facts)
    assert choice.name == name and reason in choice.reason, choice
    assert attention_implementation("cpu", facts).name == "xla"


def test_packed_rows_go_to_cudnn_where_that_is_the_default(card, monkeypatch):
    monkeypatch.setattr(attention_gpu, "CUDNN_PACKED_BY_DEFAULT", True)
    choice = attention_implementation("cuda", K3._replace(packed=True))
    assert choice.name == "cudnn" and f"more than {MOST_RUNS}" in choice.reason


def test_named_implementations_run_or_raise_with_the_reason(card, monkeypatch):
    packed = attention_implementation("cuda", K3._replace(packed=True), implementation="cudnn")
    assert packed.name == "cudnn" and "blockwise form at run time" in packed.reason
    cases = [
        ("cudnn", K3._replace(dtype="mixed"), "mixed"),
        ("cudnn", K3._replace(value_width=300), "300"),
        ("cudnn", K3._replace(keys=9000), "8192 queries"),
        ("mosaic", K3._replace(dtype="float32"), "float32"),
        ("mosaic", K3._replace(packed=True, causal=False), "causal"),
    ]
    for name, facts, reason in cases:
        with pytest.raises(NotImplementedError, match=rf"{name}.*{reason}.*'xla'"):
            attention_implementation("cuda", facts, implementation=name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"tokamax is not installed \(pip install"):
        attention_implementation("cuda", implementation="mosaic")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert attention_implementation("cuda", implementation="mosaic").name == "mosaic"
    with pytest.raises(NotImplementedError, match="platform is tpu"):
        attention_implementation("tpu", implementation="cudnn")
    with pytest.raises(ValueError, match=r"'flash'.*xla, cudnn, mosaic"):
        attention_implementation(implementation="flash")
    with pytest.raises(ValueError, match="'metal'"):
        attention_implementation("metal")


def test_jax_says_why_cudnn_is_missing(monkeypatch):
    """JAX's own words are the reason: what it refuses is never tried."""
    monkeypatch.setattr(attention_gpu, "missing_card", lambda: None)
    with pytest.raises(NotImplementedError, match=r"cuDNN is not detected|head dim must be <= 128"):
        attention_implementation("cuda", implementation="cudnn")
    assert attention_implementation("cuda").name == "xla"


def test_named_implementation_of_a_call_raises_before_anything_runs():
    q, k, v, _ = inputs(130, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="default backend is cpu"):
        attention(q, k, v, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="float32"):
        attention(*(x.astype(jnp.float32) for x in (q, k, v)), implementation="cudnn")
    with pytest.raises(ValueError, match="flash"):
        attention(q, k, v, implementation="flash")


@pytest.mark.parametrize(("K", "V"), [(24, 16), (16, 24), (9, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_zero_columns_change_nothing(K, V, causal):
    q, k, v, ct = inputs(65, K=K, V=V)

    def padded(q, k, v):
        return cudnn_attention(q, k, v, scale=K**-0.5, causal=causal, implementation="xla")

    def blockwise(q, k, v):
        return attention(q, k, v, causal=causal, block=16)

    got, wanted = (value_and_gradients(f)(q, k, v, ct) for f in (padded, blockwise))
    assert [x.shape for x in got] == [x.shape for x in wanted]
    assert max(distance(got, wanted)) < 2e-6


def test_runs_of_packed_rows():
    own = runs(documents([(1, 2), (0, 1), (2, 3)], [(0, 1), (1, 1), (0, 1), (1, 2), (0, 1)]))
    np.testing.assert_array_equal(own.first, [[0, 0, 2, 3, 3, 3], [0, 1, 2, 3, 3, 5]])
    np.testing.assert_array_equal(own.index, [[0, 0, 1, 2, 2, 2], [0, 1, 2, 3, 3, 4]])
    np.testing.assert_array_equal(own.count, [3, 5])
    np.testing.assert_array_equal(own.torn, [False, True])
    offsets, lengths = run_offsets(own, 6)
    np.testing.assert_array_equal(offsets, [[0, 2, 3, -1, -1, -1, -1], [0, 1, 2, 3, 5, -1, -1]])
    np.testing.assert_array_equal(lengths, [[2, 1, 3, -1, -1, -1], [1, 1, 1, 2, 1, -1]])
    offsets, lengths = run_offsets(own, 3)  # a full table: the last entry has no run
    np.testing.assert_array_equal(offsets[0], [0, 2, 3, -1])
    np.testing.assert_array_equal(lengths[0], [2, 1, 3])


@pytest.mark.parametrize("count", [1, 7, MOST_RUNS])
def test_jax_makes_of_the_tables_segments_that_tile_every_row(count):
    """What JAX hands to cuDNN: a start in elements and a length a segment, absent ones last and empty."""
    from jax._src.cudnn.fused_attention_stablehlo import _fix_seqlen_offsets

    B, T, H, K = 3, 97, 4, 24
    ids = np.sort(np.random.default_rng(count).integers(1, count + 1, (B, T)), axis=1)
    ids[0] = np.arange(T) * count // T + 1
    own = runs(jnp.asarray(ids, jnp.int32))
    offsets, lengths = run_offsets(own, MOST_RUNS)
    x = jnp.zeros((B, T, H, K))
    q_length, k_length, q_start, k_start = (np.asarray(y).ravel() for y in _fix_seqlen_offsets(lengths, lengths, offsets, offsets, x, x))
    np.testing.assert_array_equal(q_length, k_length)
    np.testing.assert_array_equal(q_start, k_start)
    total = int(own.count.sum())
    np.testing.assert_array_equal(np.cumsum(q_length[:total]) * H * K, q_start[1 : total + 1])  # each ends where the next starts
    assert q_start[0] == 0 and np.all(q_length[:total] > 0) and not q_length[total:].any() and np.all(q_start[total:] == B * T * H * K)
    segment = own.index + np.cumsum([0, *own.count[:-1]])[:, None]  # of every token, counted over the batch
    np.testing.assert_array_equal(np.repeat(np.arange(total), q_length[:total]), segment.ravel())


def table_kernel(q, k, v, own, *, scale):
    """What cuDNN does with the tables, as their documentation has it, on a [T,T] mask."""
    offsets, lengths = run_offsets(own, MOST_RUNS)
    offsets, at = offsets[:, :-1, None], jnp.arange(q.shape[1])
    member = (offsets >= 0) & (at >= offsets) & (at < offsets + lengths[:, :, None])  # [B,M,T]
    seen = jnp.einsum("bmt,bms->bts", member, member, preferred_element_type=jnp.int32) > 0
    seen &= at <= at[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=scale, implementation="xla")


def first_key_kernel(q, k, v, own, *, scale):
    """What tokamax does with the first key of every query, on a [T,T] mask."""
    at = jnp.arange(q.shape[1])
    seen = (at >= own.first[:, :, None]) & (at <= at[:, None])
    return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], scale=scale, implementation="xla")


@pytest.mark.parametrize("ids", [WHOLE, TORN, MANY], ids=["whole", "torn", "many"])
@pytest.mark.parametrize("kernel", [table_kernel, first_key_kernel])
def test_packed_rows_equal_the_blockwise_form(kernel, ids, monkeypatch):
    """Rows that a kernel takes, and rows that go to the blockwise form at run time, in one compiled function."""
    q, k, v, ct = inputs(65, K=16, V=16)
    hole = (ids == 0)[:, :, None, None]
    dirty = [jnp.where(hole, jnp.nan, x) for x in (q, k, v, ct)]
    name = {table_kernel: "cudnn", first_key_kernel: "mosaic"}[kernel]
    monkeypatch.setattr(attention_gpu, "cudnn_packed", table_kernel)
    monkeypatch.setattr(attention_gpu, "mosaic_packed", first_key_kernel)
    # The module by its name: moejax.ops.attention is the function.
    module = importlib.import_module("moejax.ops.attention")
    choose = lambda *a, implementation: AttentionChoice(implementation, "")
    monkeypatch.setattr(module, "attention_implementation", choose)

    def through(implementation):
        return value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ids=ids, block=16, implementation=implementation))(*dirty)

    got, wanted = through(name), through("xla")
    assert max(distance(got, wanted)) < 2e-6
    assert all(np.all(np.where(np.broadcast_to(hole, x.shape), x, 0) == 0) for x in got)


@pytest.mark.parametrize(
    ("ids", "most", "fits"),
    [
        (WHOLE, MOST_RUNS, True),
        (WHOLE, 3, False),
        (TORN, None, False),
        (TORN, MOST_RUNS, False),
        (MANY, MOST_RUNS, False),
        (MANY, None, True),
        (MANY, 65, True),
    ],
)
def test_rows_that_do_not_fit_never_reach_the_kernel(ids, most, fits):
    q, k, v, _ = inputs(65)

    def kernel(q, k, v, own, *, scale):
        return v + scale

    run = jax.jit(lambda ids: packed_attention(kernel, lambda q, k, v: v, q, k, v, ids, scale=1.0, most=most))
    np.testing.assert_array_equal(run(ids), v + fits)


@pytest.mark.skipif(NO_TOKAMAX, reason="tokamax is not installed")
def test_tokamax_means_the_same_by_its_arguments():
    """Its XLA form on this machine takes the very arguments that its GPU kernel gets."""
    q, k, v, ct = inputs(65)
    plain = value_and_gradients(lambda q, k, v: mosaic_attention(q, k, v, scale=0.2, causal=True, implementation="xla"))
    assert max(distance(plain(q, k, v, ct), value_and_gradients(lambda *a: attention(*a, scale=0.2))(q, k, v, ct))) < 2e-6
    real = (WHOLE > 0)[:, :, None, None]
    q, k, v, ct = (jnp.where(real, x, 0) for x in (q, k, v, ct))
    packed = value_and_gradients(lambda q, k, v: mosaic_packed(q, k, v, runs(WHOLE), scale=0.2, implementation="xla"))
    wanted = value_and_gradients(lambda *a: attention(*a, scale=0.2, segment_ids=WHOLE))(q, k, v, ct)
    out, *gradients = packed(q, k, v, ct)
    assert max(distance((jnp.where(real, out, 0), *gradients), wanted)) < 2e-6


def gradients(implementation=None):
    """(q, k, v, ids) -> gradients of a loss."""

    def loss(q, k, v, ids):
        out = attention(q, k, v, segment_ids=ids, block=128, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1, 2))


def test_lowering_is_the_blockwise_form_without_a_card():
    q, k, v, _ = inputs(256, dtype="bfloat16")
    for platform in ("cpu", "tpu", "cuda"):
        for ids in (None, jnp.ones((2, 256), jnp.int32)):
            assert lowered(gradients(), (q, k, v, ids), platform) == lowered(gradients("xla"), (q, k, v, ids), platform)


def test_lowering_with_a_card(card, monkeypatch):
    """One traced function: cuDNN where it is lowered for CUDA, the blockwise form elsewhere."""
    q, k, v, _ = inputs(256, dtype="bfloat16")
    text = lowered(gradients(), (q, k, v, None), "cuda")
    assert "fmhaSoftmax" in text and "fmhaSoftmaxBackward" in text and "stablehlo.while" not in text
    for platform in ("cpu", "tpu"):
        text = lowered(gradients(), (q, k, v, None), platform)
        assert "fmha" not in text and "stablehlo.while" in text
    ids = jnp.ones((2, 256), jnp.int32)
    assert "fmha" not in lowered(gradients(), (q, k, v, ids), "cuda")
    text = lowered(gradients("cudnn"), (q, k, v, ids), "cuda")
    assert "fmhaSoftmaxBackward" in text and "PADDING_CAUSAL" in text and f"max_seg_per_batch\\22: {MOST_RUNS}" in text
    assert "stablehlo.while" in text  # the blockwise form, for rows that do not fit
    with pytest.raises(NotImplementedError):  # a named kernel never gives way to another form
        lowered(gradients("cudnn"), (q, k, v, None), "cpu")


@pytest.mark.parametrize("is_packed", [False, True])
def test_lowering_with_a_card_under_shard_map_and_remat(card, monkeypatch, is_packed):
    monkeypatch.setattr(attention_gpu, "CUDNN_PACKED_BY_DEFAULT", True)
    q, k, v, _ = inputs(256, dtype="bfloat16")
    ids = jnp.ones((2, 256), jnp.int32) if is_packed else None
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "heads"))
    tensor = P("data", None, "heads", None)

    def local(q, k, v, ids):
        return jax.checkpoint(lambda *a: attention(*a, segment_ids=ids, block=128))(q, k, v)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(tensor, tensor, tensor, None if ids is None else P("data", None)), out_specs=tensor)

    def run(q, k, v):
        return jax.grad(lambda *a: jnp.sum(mapped(*a, ids).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    text = jax.jit(run).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert "fmhaSoftmaxBackward" in text


def exact(q, k, v, ids):
    """Float64 softmax over the whole [T,T]; on the host's numbers, so that no accelerator rounds."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    at = jnp.arange(q.shape[1])
    seen = (at <= at[:, None])[None] & (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, :, None]
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * q.shape[-1] ** -0.5
    p = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1) * seen.any(-1)[:, None, :, None]
    return jnp.einsum("bhts,bshv->bthv", p, v, precision="highest")


def rows(T, kind):
    """Ids [2,T] or None: "whole" documents of many lengths (1 as well) with padding around, one "torn" by padding, too "many"."""
    if kind == "none":
        return None
    ids = np.ones((2, T), np.int32)
    ids[1, : T // 5] = ids[1, T - T // 9 :] = 0
    if kind == "whole":
        ids[0] = 1 + np.searchsorted([T // 4, T // 4 + 1, T // 2], np.arange(T), side="right")
        ids[0, T // 2 - 30 : T // 2] = 0
    elif kind == "torn":
        ids[0, T // 3 : T // 3 + 40] = 0
    else:
        ids[0] = np.arange(T) // 8 + 1
    return jnp.asarray(ids)


def available(name):
    try:
        attention_implementation("cuda", implementation=name)
    except NotImplementedError as error:
        pytest.skip(reason=f"{name} cannot run here: {error}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["xla", "cudnn", "mosaic"])
@pytest.mark.parametrize(
    ("T", "kv_heads", "K", "V", "kind"),
    [
        (1024, 4, 192, 128, "none"),
        (783, 4, 192, 128, "none"),
        (783, 2, 128, 128, "none"),
        (130, 1, 64, 80, "none"),
        (1024, 4, 192, 128, "whole"),
        (783, 4, 192, 128, "whole"),
        (783, 2, 128, 128, "whole"),
        (783, 4, 192, 128, "torn"),
        (783, 4, 192, 128, "many"),
    ],
)
def test_values_and_gradients_on_the_card(name, T, kv_heads, K, V, kind):
    """Relative L2 distance from float64: 5e-3 for the output, 1e-2 for gradients. NaN in padding is never read."""
    available(name)
    narrow = inputs(T, kv_heads=kv_heads, K=K, V=V, dtype="bfloat16")
    ids = rows(T, kind)
    wanted_ids = jnp.ones((2, T), jnp.int32) if ids is None else ids
    hole = (wanted_ids == 0)[:, :, None, None]
    with jax.enable_x64(True):
        wide = [jnp.where(hole, 0, x.astype(jnp.float64)) for x in narrow]
        wanted = value_and_gradients(lambda q, k, v: exact(q, k, v, wanted_ids))(*wide)
        wanted = [np.asarray(x) for x in wanted]
    dirty = [jnp.where(hole, jnp.nan, x).astype(jnp.bfloat16) for x in narrow]
    run = value_and_gradients(lambda q, k, v: attention(q, k, v, segment_ids=ids, implementation=name))
    got = run(*dirty)
    far = distance(got, wanted)
    print(f"{name} T={T} J={kv_heads} {K}/{V} {kind}: " + " ".join(f"{x:.1e}" for x in far))
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert far[0] <= 5e-3 and max(far[1:]) <= 1e-2
    assert all(np.all(np.where(np.broadcast_to(hole, x.shape), np.asarray(x, np.float32), 0) == 0) for x in got)


@pytest.mark.gpu
def test_the_choice_on_the_card_is_cudnn_and_runs():
    available("cudnn")
    choice = attention_implementation(facts=K3)
    assert choice.name == "cudnn", choice
    q, k, v, _ = inputs(256, K=192, V=128, dtype="bfloat16")
    chosen, named = (jax.jit(lambda *a, name=name: attention(*a, implementation=name))(q, k, v) for name in (None, "cudnn"))
    np.testing.assert_array_equal(chosen, named)
    assert "fmhaSoftmax" in jax.jit(attention).lower(q, k, v).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "mosaic"])
@pytest.mark.parametrize("kind", ["none", "whole"])
def test_prefix_is_bit_equal_when_only_the_future_changes_on_the_card(name, kind):
    available(name)
    T, cut = 783, 300
    q, k, v, _ = inputs(T, K=192, V=128, dtype="bfloat16")
    others = inputs(T, K=192, V=128, dtype="bfloat16", seed=9)
    before = (jnp.arange(T) < cut)[None, :, None, None]
    changed = [jnp.where(before, x, 9 * y) for x, y in zip((q, k, v), others, strict=False)]
    run = jax.jit(lambda *a: attention(*a, segment_ids=rows(T, kind), implementation=name))
    one, other = run(q, k, v), run(*changed)
    np.testing.assert_array_equal(one[:, :cut], other[:, :cut])
    assert np.any(np.asarray(one != other))
