"""Prefill of a chunk over a cache of latents: both forms against a float64 softmax a token, and what may not be read."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from moejax.ops import attention_gpu, mla_prefill
from moejax.ops.attention_gpu import AttentionFacts
from moejax.ops.mla import absorbed_latent_attention
from moejax.ops.mla_prefill import cached_latent_attention, fused_block, fused_prefill, prefill_implementation

STARTS, COUNTS = (0, 37, 60, 5, 99), (17, 1, 16, 0, 1)  # the last two rows: untouched, and one that fills the cache


def inputs(T, S=100, heads=3, C=20, N=12, R=4, V=10, batch=5, dtype="float32", seed=0):
    """(q, latent, shared_key, k_up, v_up) of scores with a spread of about 2."""
    rng = np.random.default_rng(seed)
    shapes = [(batch, T, heads, N + R), (batch, S, C), (batch, S, R), (C, heads, N), (C, heads, V)]
    scales = [2, 1, 1, C**-0.5, C**-0.5]
    return [jnp.asarray(scale * rng.normal(size=shape), dtype) for shape, scale in zip(shapes, scales, strict=True)]


def exact(q, latent, shared_key, k_up, v_up, starts, counts):
    """One float64 softmax a token, in NumPy."""
    q, latent, shared_key, k_up, v_up = (np.asarray(x, np.float64) for x in (q, latent, shared_key, k_up, v_up))
    out = np.zeros((*q.shape[:3], v_up.shape[2]))
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        stop = start + count
        shared = np.broadcast_to(shared_key[b, :stop, None], (stop, q.shape[2], shared_key.shape[2]))
        k = np.concatenate([np.einsum("sc,chn->shn", latent[b, :stop], k_up), shared], -1)
        v = np.einsum("sc,chv->shv", latent[b, :stop], v_up)
        scores = np.einsum("thd,shd->hts", q[b, :count], k) * q.shape[-1] ** -0.5
        scores[:, np.arange(stop) > start + np.arange(count)[:, None]] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
        out[b, :count] = np.einsum("hts,shv->thv", p / p.sum(-1, keepdims=True), v)
    return out


def dirty(operands, starts, counts, value=np.nan):
    """The same with `value` in every query and entry that must not be read."""
    q, latent, shared_key, *maps = operands
    starts, counts = np.asarray(starts)[:, None], np.asarray(counts)[:, None]
    beyond = (np.arange(latent.shape[1]) >= starts + counts) | (counts == 0)
    unread = np.arange(q.shape[1]) >= counts
    return [
        jnp.where(unread[..., None, None], value, q).astype(q.dtype),
        *(jnp.where(beyond[..., None], value, x).astype(x.dtype) for x in (latent, shared_key)),
        *maps,
    ]


def rows(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def relative(actual, expected):
    return np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()


def plain(*operands, starts, counts, block, scale=None, rows=None):
    keywords = {"starts": starts, "counts": counts, "rows": rows, "block": block, "scale": scale}
    return cached_latent_attention(*operands, **keywords, implementation="xla")


def algebra(*operands, starts, counts, block, scale=None, rows=None):
    """The fused form with its kernel's parts computed by XLA."""
    scale = operands[0].shape[-1] ** -0.5 if scale is None else scale
    return fused_prefill(*operands, starts, counts, rows, scale=scale, block=block, implementation="xla")


def relative_l2(actual, expected):
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)


absorbed_form = jax.jit(absorbed_latent_attention, static_argnames="block")
FORMS = pytest.mark.parametrize("form", [plain, algebra], ids=["plain", "fused"])


@FORMS
@pytest.mark.parametrize(
    ("T", "S", "heads", "block", "starts", "counts"),
    [
        (17, 100, 3, 32, STARTS, COUNTS),  # 100 is no multiple of 32: the last block overlaps the one before
        (17, 100, 1, None, STARTS, COUNTS),  # one head, one block
        (1, 65, 2, 16, (0, 1, 16, 64), (1, 1, 1, 1)),
        (63, 63, 2, 16, (0, 0), (63, 62)),  # no past at all
        (130, 65, 2, 24, (0, 15, 64), (65, 50, 1)),  # a padded chunk that is longer than the cache
        (15, 40, 2, 8, (20, 3), (0, 0)),
        (15, 60, 2, 8, (45, 20, 0), (15, 7, 0)),  # blocks that fill every past, then ragged ones
    ],
)
def test_against_a_softmax_a_token(form, T, S, heads, block, starts, counts):
    operands = inputs(T, S, heads, batch=len(starts))
    wanted = exact(*operands, starts, counts)
    run = jax.jit(partial(form, block=block))
    got = run(*dirty(operands, starts, counts), starts=rows(*starts), counts=rows(*counts))
    assert got.shape == wanted.shape and got.dtype == jnp.float32
    assert np.all(np.asarray(got)[wanted == 0] == 0)
    if any(counts):
        assert relative(got, wanted) < 2e-6
    # what stands where nothing is read leaves no trace in a bit
    other = run(*dirty(operands, starts, counts, 7.0), starts=rows(*starts), counts=rows(*counts))
    np.testing.assert_array_equal(got, other)


def test_several_blocks_of_queries_skip_what_they_cannot_see(monkeypatch):
    monkeypatch.setattr(mla_prefill, "QUERY_ROWS", 16)
    starts, counts = (3, 90, 0), (65, 10, 0)
    operands = inputs(70, batch=3)
    got = plain(*dirty(operands, starts, counts), starts=rows(*starts), counts=rows(*counts), block=24)
    assert relative(got, exact(*operands, starts, counts)) < 2e-6


def test_float64_and_bfloat16(x64):
    operands = inputs(17, dtype="float64")
    wanted = exact(*operands, STARTS, COUNTS)
    keywords = {"starts": rows(*STARTS), "counts": rows(*COUNTS), "block": 32}
    got = jax.jit(partial(plain, **keywords, scale=0.25))(*operands)  # 0.25 = 16**-0.5, the default
    assert got.dtype == jnp.float64 and relative(got, wanted) < 1e-14
    narrow = [x.astype(jnp.bfloat16) for x in operands]
    wanted = exact(*narrow, STARTS, COUNTS)
    for form in (plain, algebra):
        got = jax.jit(partial(form, **keywords))(*narrow)
        assert got.dtype == jnp.bfloat16 and relative(got, wanted) < 1.5e-2


@FORMS
def test_equals_the_absorbed_form_and_any_split_into_chunks(form):
    T, cut, starts, counts = 24, 12, (10, 0, 33), (24, 20, 7)
    operands = inputs(T, batch=3)
    form = jax.jit(form, static_argnames="block")
    q, *cache = operands
    whole = form(*operands, starts=rows(*starts), counts=rows(*counts), block=32)
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        row = [x[b : b + 1] for x in cache[:2]]
        absorbed = absorbed_form(q[b : b + 1], *row, *cache[2:], lengths=rows(start + T), block=16)[:, :count]
        assert relative(whole[b : b + 1, :count], np.asarray(absorbed, np.float64)) < 2e-6
    first = form(q[:, :cut], *cache, starts=rows(*starts), counts=jnp.minimum(rows(*counts), cut), block=32)
    rest = form(q[:, cut:], *cache, starts=rows(*starts) + cut, counts=jnp.maximum(rows(*counts) - cut, 0), block=32)
    assert relative(jnp.concatenate([first, rest], 1), np.asarray(whole, np.float64)) < 2e-6


@FORMS
def test_rows_of_a_larger_cache(form):
    """Rows 4 and 1 of five, read in place: the bits of the rows copied out."""
    starts, counts, own = rows(70, 3), rows(10, 17), rows(4, 1)
    q, latent, shared_key, *maps = inputs(17)
    run = jax.jit(partial(form, block=32))
    got = run(q[:2], latent, shared_key, *maps, starts=starts, counts=counts, rows=own)
    np.testing.assert_array_equal(got, run(q[:2], latent[own], shared_key[own], *maps, starts=starts, counts=counts))


@FORMS
def test_prefix_is_bit_equal_when_only_the_future_changes(form):
    cut, starts, counts = 11, (40, 0), (24, 24)
    operands, others = inputs(24, batch=2), inputs(24, batch=2, seed=9)
    query, entry = (np.arange(24) < cut)[:, None, None], (np.arange(100) < np.asarray(starts)[:, None] + cut)[..., None]
    changed = [jnp.where(x, a, 9 * b) for x, a, b in zip((query, entry, entry), operands[:3], others[:3], strict=True)]
    run = jax.jit(partial(form, starts=rows(*starts), counts=rows(*counts), block=32))
    one, other = run(*operands), run(*changed, *operands[3:])
    np.testing.assert_array_equal(one[:, :cut], other[:, :cut])
    assert np.any(np.asarray(one != other))


@FORMS
def test_memory_does_not_grow_with_the_cache(form):
    """Beside its operands a program needs the same for 10 and 100 thousand entries, which no block divides: no copy, no padding,
    of the row that is read neither."""

    def temporary(S):
        shapes = [(1, 64, 2, 16), (2, S, 20), (2, S, 4), (20, 2, 12), (20, 2, 10)]
        operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        compiled: Any = jax.jit(partial(form, block=512)).lower(*operands, starts=one, counts=one, rows=one).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert 0 < temporary(99_991) == temporary(9_991)


def test_heads_over_a_mesh():
    operands, starts, counts = inputs(17, heads=4), rows(*STARTS), rows(*COUNTS)
    mesh = Mesh(np.array(jax.devices()[:2]), ("heads",))
    specs = (P(None, None, "heads"), P(), P(), P(None, "heads"), P(None, "heads"), P(), P())
    for form in (plain, algebra):
        local = lambda *a, form=form: form(*a[:5], starts=a[5], counts=a[6], block=32)
        mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, None, "heads")))
        got = mapped(*operands, starts, counts)
        assert relative(got, exact(*operands, STARTS, COUNTS)) < 2e-6


def test_block_of_the_fused_form_fits_its_bytes():
    assert fused_block(8, 320, 2) == 65536 and fused_block(1, 320, 2) == 65536
    assert fused_block(96, 320, 2) == 8192 and 96 * 320 * 2 * 8192 <= mla_prefill.EXPANDED_BYTES
    assert fused_block(10_000, 320, 2) == 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"starts": jnp.zeros((5,), jnp.float32)}, r"starts .*float32.*int32 of shape \[5\]"),
        ({"counts": jnp.zeros((4,), jnp.int32)}, r"counts .*\(4,\).*int32 of shape \[5\]"),
        ({"rows": jnp.zeros((2,), jnp.int32)}, r"rows .*\(2,\).*int32 of shape \[5\]"),
        ({"block": 0}, "block=0"),
        ({"implementation": "mosaic"}, "mosaic.*xla, cudnn"),
        ({"implementation": "flash"}, "flash"),
    ],
)
def test_bad_input_raises(change, words):
    keywords = {"starts": rows(*STARTS), "counts": rows(*COUNTS)} | change
    with pytest.raises(ValueError, match=words):
        cached_latent_attention(*inputs(17), **keywords)


def test_bad_operands_raise():
    q, *rest = inputs(17)
    keywords = {"starts": rows(*STARTS), "counts": rows(*COUNTS)}
    with pytest.raises(ValueError, match="float16"):
        cached_latent_attention(q.astype(jnp.float16), *rest, **keywords)
    with pytest.raises(ValueError, match="empty"):
        cached_latent_attention(q[:, :0], *rest, **keywords)
    with pytest.raises(ValueError, match=r"must be \[Z,S,C\] and \[Z,S,R\]"):
        cached_latent_attention(q, rest[0][:3], *rest[1:], **keywords, rows=rows(0, 0, 0, 0, 0))
    with pytest.raises(NotImplementedError, match="float32"):
        cached_latent_attention(q, *rest, **keywords, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="default backend is cpu"):
        cached_latent_attention(*inputs(17, dtype="bfloat16"), **keywords, implementation="cudnn")


def lowered(function, arguments, platform):
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device)
    traced = jax.jit(function).trace(*arguments)
    with jax.sharding.use_abstract_mesh(mesh):
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def card(monkeypatch):
    """Let this process believe in a Hopper card with cuDNN 9.13: tracing and lowering need no more, running would."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(attention_gpu, "missing_card", lambda: None)
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(fused, "check_compute_capability", lambda wanted: True)


def test_choice_and_lowering(card, monkeypatch):
    """One traced function: cuDNN where a long bfloat16 chunk is lowered for CUDA, the blockwise form elsewhere."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    starts, counts = rows(*STARTS), rows(*COUNTS)

    def run(*operands):
        return cached_latent_attention(*operands, starts=starts, counts=counts)

    long, short, wide = inputs(256, N=20, dtype="bfloat16"), inputs(64, dtype="bfloat16"), inputs(256)
    text = lowered(run, long, "cuda")
    assert text.count("__cudnn$fmhaSoftmax") == 3 and all(f"{kind}\\22" in text for kind in ("CAUSAL", "NO_MASK", "PADDING"))
    assert "5x3x256x16xbf16" in text and "5x3x256x24xbf16" not in text  # values 10 wide beside keys of 24
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 90800)
    assert "5x3x256x24xbf16" in lowered(lambda *a: run(*a), long, "cuda")
    for operands, platform in ((long, "cpu"), (long, "tpu"), (short, "cuda"), (wide, "cuda")):
        assert "fmha" not in lowered(run, operands, platform)
    choice = prefill_implementation("cuda", AttentionFacts(queries=64, keys=64))
    assert choice.name == "xla" and "64 queries" in choice.reason
    assert prefill_implementation("cuda", AttentionFacts()).name == "cudnn"


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "R", "V"), [(16, 8, 16), (10, 3, 5), (128, 64, 64), (16, 0, 40), (64, 64, 128)])
def test_other_widths_on_the_card(N, R, V):
    starts, counts = (600, 0), (130, 129)
    operands = inputs(130, 1000, 3, C=64, N=N, R=R, V=V, batch=2, dtype="bfloat16")
    run = jax.jit(lambda *a: cached_latent_attention(*a, starts=rows(*starts), counts=rows(*counts), block=256, implementation="cudnn"))
    got = run(*operands)
    assert relative_l2(got, exact(*operands, starts, counts)) <= 5e-3
    turned = [operands[0], *(x[::-1] for x in operands[1:3]), *operands[3:]]
    keywords = {"starts": rows(*starts), "counts": rows(*counts), "rows": rows(1, 0), "block": 256}
    np.testing.assert_array_equal(got, cached_latent_attention(*turned, **keywords, implementation="cudnn"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["xla", "cudnn"])
@pytest.mark.parametrize(
    ("T", "S", "block", "starts", "counts"),
    [
        (1024, 5000, 1024, (0, 3000, 3976, 77, 0), (1024, 1000, 1024, 0, 1)),
        (783, 2048, None, (0, 1265, 1), (783, 783, 300)),
        (200, 3001, 777, (2801, 776, 777), (200, 200, 199)),
        (256, 4000, 512, (3744, 2000, 0), (256, 255, 0)),
        (1, 300, 128, (299, 0), (1, 1)),
    ],
)
def test_values_on_the_card(name, T, S, block, starts, counts):
    """Relative L2 distance from float64 5e-3 in bfloat16, at Kimi K3's widths; NaN where nothing is read."""
    if name == "cudnn":
        missing = attention_gpu.missing_card()
        if missing:
            pytest.skip(reason=missing)
    operands = inputs(T, S, 4, C=512, N=128, R=64, V=128, batch=len(starts), dtype="bfloat16")
    wanted = exact(*operands, starts, counts)
    run = jax.jit(lambda *a: cached_latent_attention(*a, starts=rows(*starts), counts=rows(*counts), block=block, implementation=name))
    got = np.asarray(run(*dirty(operands, starts, counts)), np.float64)
    far = relative_l2(got, wanted)
    print(f"{name} T={T} S={S} block={block}: {far:.1e}")
    assert np.all(got[wanted == 0] == 0)
    assert far <= 5e-3
