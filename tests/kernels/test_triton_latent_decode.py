"""The kernel of latent_decode: its own source on NumPy, and on the card, against the formula in float64.

Shapes: B rows, T new tokens, H heads, M = T*H, S capacity, C latent width, R width of the shared key, G programs.
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="the kernel is Triton's; install moejax[triton] (Python 3.12)")
sys.path.insert(0, os.path.dirname(__file__))

import gluon_numpy as gn  # noqa: E402

from moejax.kernels.latent_decode import latent_decode  # noqa: E402
from moejax.kernels.latent_decode import triton as kernel  # noqa: E402
from moejax.kernels.latent_decode.reference import latent_decode_reference  # noqa: E402
from moejax.kernels.latent_decode.schedule import schedule  # noqa: E402

SCALE = 0.15


def make(B, T, H, S, C, R, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(gn.bf16) for shape in ((B, T, H, C + R), (B, S, C), (B, S, R))]


def expected(q, latent, shared_key, lengths):
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, latent, shared_key))
        return np.asarray(latent_decode_reference(*wide, jnp.asarray(lengths), None, scale=SCALE))


def poisoned(arrays, lengths):
    """NaN in the entries at or after a row's length."""
    gone = np.arange(arrays[0].shape[1]) >= np.asarray(lengths)[:, None]
    return [np.where(gone[..., None], np.array(np.nan, gn.bf16), x) for x in arrays]


def parts(q, latent, shared_key, lengths, G, *, BM=8, only=None, **options):
    """The kernel of the parts on NumPy. only: the programs that run. -> sums, stats, plan"""
    (B, T, H, _), (_, S, C), R = q.shape, latent.shape, shared_key.shape[2]
    M, lengths = T * H, np.asarray(lengths, np.int32)
    plan = jax.tree.map(np.asarray, schedule(jnp.asarray(lengths), S, kernel.TILE, G))
    sums, stats = np.full((G + B, M, C), np.nan, np.float32), np.full((G + B, 2, M), np.nan, np.float32)
    walk = (lengths, plan.offsets, plan.order, plan.first, plan.size, sums, stats, S, B, SCALE * kernel.LOG2E)
    cache = (gn.Descriptor(x.reshape(B * S, -1), [kernel.TILE, x.shape[2]]) for x in (latent, shared_key))
    options = dict(race=not options, fence=True, order="shuffle", programs=only) | options
    sizes = dict(M=M, H=H, T=T, C=C, R=R, BM=BM)
    gn.run(kernel.part_kernel, (triton.cdiv(M, BM), G), q.reshape(B, M, -1), *cache, *walk, **sizes, **options)
    return sums, stats, plan


def emulated(q, latent, shared_key, *rest, **options):
    """Both kernels on NumPy. -> [B,T,H,C]"""
    sums, stats, plan = parts(q, latent, shared_key, *rest, **options)
    (B, T, H, _), C = q.shape, latent.shape[2]
    out = np.full((B, T * H, C), np.nan, gn.bf16)
    operands, sizes = (sums, stats, plan.offsets, plan.ranks, plan.size, out), dict(M=T * H, C=C, BC=16, BP=4)
    gn.run(kernel.merge_kernel, (triton.cdiv(C, 16), T * H, B), *operands, **sizes, order="shuffle")
    return out.reshape(B, T, H, C)


def relative(got, wanted):
    got = np.asarray(got, np.float64)
    assert np.isfinite(got).all()
    return np.abs(got - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize(
    ("T", "H", "C", "R", "lengths", "G", "BM"),
    [
        (1, 5, 64, 64, (400, 0, 37, 64, 65, 1), 4, 8),
        (3, 7, 128, 16, (330, 2, 0, 70), 11, 16),
        (1, 33, 64, 32, (0, 0, 129), 1, 32),
        (4, 2, 64, 16, (65,), 2, 8),
    ],
)
def test_values(T, H, C, R, lengths, G, BM):
    """Ragged rows, empty ones, one that holds fewer tokens than are new, several blocks of queries, a tile that the last query alone sees.

    Shared memory checked for races and fences, then copies and products as late, or as early, as their waits allow.
    """
    q, *cache = make(len(lengths), T, H, max(lengths), C, R)
    wanted = expected(q, *cache, lengths)
    for options in ({}, {"delay": True, "seed": 1}, {"delay": True, "seed": 2}):
        got = emulated(q, *poisoned(cache, lengths), lengths, G, BM=BM, **options)
        assert relative(got, wanted) < 1e-2
        assert not np.any(np.asarray(got, np.float32)[[i for i, n in enumerate(lengths) if n == 0]])


def test_offsets_beyond_int32():
    """The end of the last row of a cache of 2.1e9 values (np.zeros: no memory is touched but that row's end)."""
    B, S, C, R = 3, 2**31 // (3 * 64) + 4096, 64, 16
    assert (B - 1) * S * C < 2**31 < B * S * C
    q, small, small_key = make(1, 1, 2, 40, C, R)
    latent, shared_key = np.zeros((B, S, C), gn.bf16), np.zeros((B, S, R), gn.bf16)
    latent[2, -40:], shared_key[2, -40:] = small[0], small_key[0]
    G = -(-S // 64)  # a program for each tile of the last row; the last two run
    sums, stats, plan = parts(np.repeat(q, B, 0), latent, shared_key, (0, 0, S), G, only=[(0, G - 2, 0), (0, G - 1, 0)])
    assert plan.size == 1 and plan.ranks[2] == 0
    seen = S - (G - 2) * 64
    weights = np.exp2(stats[G - 2 : G, 0] - stats[G - 2 : G, 0].max(0))  # [2,M]
    got = (sums[G - 2 : G] * weights[..., None]).sum(0) / (stats[G - 2 : G, 1] * weights).sum(0)[:, None]
    assert relative(got[None, None], expected(q, latent[2:, -seen:], shared_key[2:, -seen:], (seen,))) < 1e-2


@pytest.mark.parametrize("G", [1, 7, 132])
def test_schedule(G):
    """The programs' walks visit every tile once, in order; their slots are all different, and are those that the merge reads."""
    random = np.random.default_rng(0).integers(0, 5000, 100)
    run = jax.jit(lambda lengths: schedule(lengths, 2**21, 64, G))
    for lengths in ([0], [0, 0, 5], [2**20] * 16, [1] * 100, random, [0, 2**20, *[1, 0] * 30], [2**30, 5]):
        lengths = np.asarray([*lengths, *[0] * (100 - len(lengths))] if len(lengths) > 1 else lengths, np.int32)  # two shapes to compile
        plan = jax.tree.map(np.asarray, run(lengths))
        tiles, size = -(-np.minimum(lengths, 2**21) // 64), int(plan.size[0])
        np.testing.assert_array_equal(plan.offsets, np.concatenate([[0], np.cumsum(tiles)]))
        assert size == max(1, -(-int(tiles.sum()) // G))
        slots = {}
        for program in range(G):
            tile, rank = program * size, int(plan.first[program])
            stop = min(tile + size, plan.offsets[-1])
            while tile < stop:
                row = plan.order[rank]
                assert plan.offsets[row] <= tile < plan.offsets[row + 1] and plan.ranks[row] == rank
                assert slots.setdefault(program + rank, row) == row and program + rank < G + len(lengths)
                tile, rank = min(stop, plan.offsets[row + 1]), rank + 1
        for row, rank in enumerate(plan.ranks):
            first, end = plan.offsets[row : row + 2]
            read = range(first // size + rank, (end - 1) // size + rank + 1) if end > first else ()
            assert [slot for slot, owner in slots.items() if owner == row] == list(read)
        assert len(slots) == len(set(slots))


gpu = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def on_card(q, latent, shared_key, lengths, **options):
    run = jax.jit(lambda *a: latent_decode(*a, scale=SCALE, **options))
    return run(*(jnp.asarray(x) for x in (q, latent, shared_key)), jnp.asarray(lengths, jnp.int32))


class TestOnTheCard:
    pytestmark = gpu

    @pytest.mark.parametrize(("T", "H", "C", "R"), [(1, 16, 512, 64), (1, 8, 512, 64), (4, 24, 512, 64), (2, 5, 128, 32), (1, 3, 64, 16)])
    def test_ragged(self, T, H, C, R):
        lengths = (1000, 0, 1, 63, 64, 65, 2049, 2)
        q, *cache = make(len(lengths), T, H, 2050, C, R)
        dirty = poisoned(cache, lengths)
        got = on_card(q, *dirty, lengths, implementation="triton")
        np.testing.assert_array_equal(np.asarray(got), np.asarray(on_card(q, *dirty, lengths)))
        assert relative(got, expected(q, *cache, lengths)) < 6e-3
        assert not np.any(np.asarray(got[1], np.float32))

    def test_more_than_int32_values(self):
        """B*S*C = 2.3e9; the rows are told apart by their own values."""
        B, S = 3, 1_500_000
        key = jax.random.split(jax.random.key(0), 3)
        q = 2 * jax.random.normal(key[0], (B, 1, 8, 576), jnp.bfloat16)
        fill = jax.jit(lambda k, width: jax.lax.map(lambda k: jax.random.normal(k, (S, width), jnp.bfloat16), k), static_argnums=1)
        cache = [fill(jax.random.split(k, B), width) for k, width in zip(key[1:], (512, 64), strict=True)]
        lengths = (1_500_000, 77, 1_499_999)
        got = on_card(q, *cache, lengths)
        for b, length in enumerate(lengths):
            with jax.enable_x64(True):
                wide = (x.astype(jnp.float64) for x in (q[b : b + 1], *(x[b : b + 1, :length] for x in cache)))
                wanted = jax.jit(lambda *a: latent_decode_reference(*a, None, scale=SCALE))(*wide, jnp.asarray([length]))
            assert relative(got[b : b + 1], np.asarray(wanted)) < 6e-3

    def test_vmap(self):
        lengths = np.array([[700, 3], [0, 512]], np.int32)
        rows = [make(2, 1, 16, 700, 512, 64, seed=i) for i in range(2)]
        stacked = [jnp.stack([jnp.asarray(x) for x in pair]) for pair in zip(*rows, strict=True)]
        got = jax.jit(jax.vmap(lambda *a: latent_decode(*a, scale=SCALE)))(*stacked, jnp.asarray(lengths))
        for i in range(2):
            assert relative(got[i], expected(*rows[i], lengths[i])) < 6e-3
