"""Attention of a few new tokens over a cache of latents, in one read of the cache (Triton and Gluon, NVIDIA Hopper).

Import it only where Triton is installed. Shapes: B rows, T new tokens, H heads, M = T*H queries of a row, S capacity of the cache,
C latent width, R width of the shared key, G programs, each with a run of tiles (schedule.py).

Bytes decide: an entry is (C+R)*2 = 1152 bytes at C=512, R=64, and 16 heads do 30 operations a byte, where the card can do 180. So 1M
entries are 1.2 GB, 0.28 ms at 4.3 TB/s, the copy speed of an H200. Measured on one (experiments/bench/latent_decode.py): 0.292 ms (96% of
that speed), 16 such rows 4.31 ms (104%), 512 rows of 8192 entries 1.15 ms (97%).

The queries are the narrow side of both products: scores^T = entries @ q^T and sums^T = entries^T @ p^T have the entries as the left
operand, of which wgmma takes 64 rows straight from shared memory, and a right operand as narrow as there are queries. Both products read
the one tile that was copied. A loading warp fills a ring of STAGES tiles by TMA; four warps attend. Slot i % STAGES is `full` for tile i,
after it is `empty` of tile i - STAGES. Where the attending threads copied (plain Triton), the one row took 0.32 ms and the 512 rows
1.25 ms at best.
"""

import math

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from triton.experimental import gluon  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon.language.nvidia.hopper import (  # pyright: ignore[reportMissingImports]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..kda.triton_barriers import close_barriers, open_barriers
from ..kda.triton_launch import call, descriptor
from ..kda.triton_rows import over_rows
from .schedule import schedule

LOG2E = math.log2(math.e)
# One program for each processor of an H100 or H200: two and four each took 2% longer over short rows, 4% and 11% over one long row.
PROCESSORS = 132
TILE = 64  # entries: the rows of a wgmma
BS = gl.constexpr(TILE)
SUB = gl.constexpr(64)  # channels of a swizzled row of 128 bytes
# Two tiles are 147 KB at C=512, R=64: one travels while the other is computed with, about 100 KB in flight on average, and a processor's
# share of the bandwidth needs 40. With a third, the queries and p do not fit into 227 KB.
STAGES = gl.constexpr(2)


@gluon.constexpr_function
def tile_layout(columns):
    """A [rows, columns] bfloat16 tile in shared memory."""
    return gl.NVMMASharedLayout(min(2 * columns, 128), 16, 2)


@gluon.constexpr_function
def _accumulator(queries):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, queries, 16])


@gluon.constexpr_function
def _rows(columns):
    """16 bytes a thread, rows of `columns` bfloat16."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _stretch(walk, rank, tile, stop):
    """The walk at `tile` of the row at place `rank` -> row, its first tile, the end (exclusive) of what this program has of it."""
    offsets, order = walk
    row = gl.load(order + rank)
    return row, gl.load(offsets + row), gl.minimum(gl.load(offsets + row + 1), stop)


@gluon.jit
def _load(latent, shared_key, rings, walk, place, S, C: gl.constexpr, R: gl.constexpr):
    """The loading warp: every tile of this program."""
    ring_x, ring_y, full, empty = rings
    _, _, rank, tile, stop = place
    i = 0
    while tile < stop:
        row, row_first, row_end = _stretch(walk, rank, tile, stop)
        at = row * S + (tile - row_first) * BS
        for _ in range(tile, row_end):
            stage = i % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, BS * (C + R) * 2)
            tma.async_copy_global_to_shared(latent, [at, 0], bar, ring_x.index(stage))
            tma.async_copy_global_to_shared(shared_key, [at, 0], bar, ring_y.index(stage))
            at += BS
            i += 1
        tile = row_end
        rank += 1


@gluon.jit
def _keep_first(tile, kept):
    """Rows from `kept` on become 0: they are no entries of this row, and 0 * NaN is NaN."""
    layout: gl.constexpr = _rows(SUB)
    row = gl.arange(0, BS, gl.SliceLayout(1, layout))[:, None]
    for part in gl.static_range(tile.shape[1] // SUB):
        view = tile.slice(part * SUB, SUB, dim=1)
        x = view.load(layout)
        view.store(gl.where(row < kept, x, gl.zeros([BS, SUB], gl.bfloat16, layout)))
    fence_async_shared()


@gluon.jit
def _read_queries(tile, q, first, width: gl.constexpr, M: gl.constexpr):
    """Queries from `first` on, `width` values apart, into shared memory; those that do not exist are 0."""
    columns: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = _rows(columns)
    query = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]
    tile.store(gl.load(q + query * width + column, mask=(query < M) & (column >= 0), other=0.0))


@gluon.jit
def _attend(
    rings, queries, arrays, walk, place, S, factor,
    M: gl.constexpr, H: gl.constexpr, T: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    ring_x, ring_y, full, empty = rings
    q_c, q_r, p_tile = queries
    q, lengths, sums, stats = arrays
    block, program, rank, tile, stop = place
    layout: gl.constexpr = _accumulator(BM)
    query = block * BM + gl.arange(0, BM, gl.SliceLayout(0, layout))
    entry = gl.arange(0, BS, gl.SliceLayout(1, layout))
    channel = gl.arange(0, C, gl.SliceLayout(1, layout))
    none = gl.zeros([BS, BM], gl.float32, layout)
    i = 0
    while tile < stop:
        row, row_first, row_end = _stretch(walk, rank, tile, stop)
        length = gl.load(lengths + row)
        q_row = q + row.to(gl.int64) * (M * (C + R))
        _read_queries(q_c, q_row, block * BM, C + R, M)
        _read_queries(q_r, q_row + C, block * BM, C + R, M)
        fence_async_shared()
        start = (tile - row_first) * BS
        end = gl.minimum(gl.minimum(length, S), (row_end - row_first) * BS)
        seen = gl.minimum(length - T + 1 + query // H, end)  # a query sees the entries before this one
        acc = gl.zeros([C, BM], gl.float32, layout)
        total = none
        top = gl.full([BM], float("-inf"), gl.float32, gl.SliceLayout(0, layout))
        for _ in range(tile, row_end):
            stage = i % STAGES
            x, y = ring_x.index(stage), ring_y.index(stage)
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            if start + BS > end:
                _keep_first(x, end - start)
            s = warpgroup_mma(x, q_c.permute((1, 0)), none, use_acc=False, is_async=True)
            s = warpgroup_mma(y, q_r.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            # By position alone, whatever lies in the shared keys of entries that are not this row's.
            s = gl.where((start + entry)[:, None] < seen[None, :], s * factor, float("-inf"))
            new = gl.maximum(top, gl.max(s, axis=0))
            shift = gl.where(new == float("-inf"), 0.0, new)  # nothing seen so far: no inf - inf
            fade = gl.exp2(top - shift)
            p = gl.exp2(s - shift[None, :])
            total = total * fade[None, :] + p
            p_tile.permute((1, 0)).store(p.to(gl.bfloat16))
            fence_async_shared()
            acc = warpgroup_mma(x.permute((1, 0)), p_tile.permute((1, 0)), acc * fade[None, :], is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage))
            top = new
            start += BS
            i += 1
        real = query < M
        slot = program + rank
        at = (slot.to(gl.int64) * M + query) * C
        gl.store(sums + at[None, :] + channel[:, None], acc, mask=real[None, :] & (channel >= 0)[:, None])
        gl.store(stats + slot * (2 * M) + query, top, mask=real)
        gl.store(stats + slot * (2 * M) + M + query, gl.sum(total, axis=0), mask=real)
        tile = row_end
        rank += 1


@gluon.jit
def part_kernel(
    q,  # [B,M,C+R]
    latent,  # descriptors of [B*S,C] and [B*S,R], BS entries each; entries are counted in int32: 2^31 of the narrowest are 343 GB
    shared_key,
    lengths,  # [B] int32
    offsets,  # [B+1], [B], [G], [1]: see Schedule
    order,
    firsts,
    sizes,
    sums,  # [G+B,M,C] float32: sums of latents times 2^(score - top)
    stats,  # [G+B,2,M] float32: top, the largest score in base 2, and the sum of 2^(score - top)
    S,
    B,
    factor,  # scale * log2(e)
    M: gl.constexpr,
    H: gl.constexpr,
    T: gl.constexpr,
    C: gl.constexpr,
    R: gl.constexpr,
    BM: gl.constexpr,  # queries of one program
):
    block, program = gl.program_id(0), gl.program_id(1)
    size, rank = gl.load(sizes), gl.load(firsts + program)
    tile = program * size
    stop = gl.minimum(tile + size, gl.load(offsets + B))
    q_c = gl.allocate_shared_memory(gl.bfloat16, [BM, C], tile_layout(C))
    q_r = gl.allocate_shared_memory(gl.bfloat16, [BM, R], tile_layout(R))
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [BM, BS], tile_layout(BS))
    ring_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BS, C], tile_layout(C))
    ring_y = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BS, R], tile_layout(R))
    full, empty = open_barriers(STAGES, 1), open_barriers(STAGES, 1)
    rings, walk, place = (ring_x, ring_y, full, empty), (offsets, order), (block, program, rank, tile, stop)
    queries, arrays = (q_c, q_r, p_tile), (q, lengths, sums, stats)
    gl.warp_specialize(
        [
            (_attend, (rings, queries, arrays, walk, place, S, factor, M, H, T, C, R, BM)),
            (_load, (latent, shared_key, rings, walk, place, S, C, R)),
        ],
        [1],
        [40],
    )
    close_barriers(full, STAGES)
    close_barriers(empty, STAGES)


@triton.jit
def merge_kernel(
    sums,  # [G+B,M,C] float32
    stats,  # [G+B,2,M] float32
    offsets,  # [B+1], [B], [1]: see Schedule
    ranks,
    sizes,
    out,  # [B,M,C]
    M: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,  # channels of one program, a divisor of C
    BP: tl.constexpr,  # slots of one step
):
    block, query, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, rank, size = tl.load(offsets + row), tl.load(offsets + row + 1), tl.load(ranks + row), tl.load(sizes)
    first, end = first // size + rank, tl.where(end > first, (end - 1) // size + rank + 1, 0)  # a slot for each program that saw the row
    channels = block * BC + tl.arange(0, BC)
    acc = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BP,), tl.float32)
    top = tl.full((1,), float("-inf"), tl.float32)
    for start in range(first, end, BP):
        slots = start + tl.arange(0, BP)
        there = slots < end
        slot_top = tl.load(stats + slots * (2 * M) + query, mask=there, other=float("-inf"))
        slot_total = tl.load(stats + slots * (2 * M) + M + query, mask=there, other=0.0)
        place = (slots.to(tl.int64) * M + query) * C
        x = tl.load(sums + place[:, None] + channels[None, :], mask=there[:, None], other=0.0)
        new = tl.maximum(top, tl.max(slot_top, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        fade, weight = tl.exp2(top - shift), tl.exp2(slot_top - shift)
        total = total * fade + weight * slot_total
        acc = acc * fade + tl.sum(x * weight[:, None], axis=0)
        top = new
    sum_of_all = tl.sum(total, axis=0)
    result = acc / tl.where(sum_of_all == 0.0, 1.0, sum_of_all)  # a query that sees nothing gives 0
    place = (row.to(tl.int64) * M + query) * C
    tl.store(out + place + channels, result.to(out.dtype.element_ty))


def latent_decode_triton(q, latent, shared_key, lengths, *, scale: float):
    """latent_decode without `valid`, its operands checked. Not differentiable.

    q [B,T,H,C+R], latent [B,S,C], shared_key [B,S,R], all bfloat16; C a power of two from 64 to 512, R one from 16 to 64; lengths
    int32 [B]. Under vmap every operand folds into the rows.
    """

    def launch(rows, _):
        """Every operand with an axis in front, which vmap folds into."""
        q, latent, shared_key, lengths = (x.reshape(-1, *x.shape[2:]) for x in rows)
        out = _launch(q, latent, shared_key, lengths, float(scale))
        return out.reshape(rows[0].shape[:-1] + rows[1].shape[-1:])

    return over_rows(launch, tuple(x[None] for x in (q, latent, shared_key, lengths)), ())[0]


def _launch(q, latent, shared_key, lengths, scale):
    (B, T, H, _), (_, S, C), R = q.shape, latent.shape, shared_key.shape[2]
    M = T * H
    # More than 32 queries are several programs, each of which copies the tiles: 96 heads, three programs, take 2.1 times as long as 32.
    BM = min(32, max(8, triton.next_power_of_2(M)))
    blocks = triton.cdiv(M, BM)
    G = max(1, PROCESSORS // blocks)
    plan = schedule(lengths, S, TILE, G)
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    how = {"out_type": (float32(G + B, M, C), float32(G + B, 2, M)), "grid": (blocks, G), "num_warps": 4}
    sizes = {"M": M, "H": H, "T": T, "C": C, "R": R, "BM": BM}
    tiles = [descriptor(x.reshape(B * S, -1), (TILE, x.shape[2]), tile_layout(x.shape[2])) for x in (latent, shared_key)]
    walk = lengths, plan.offsets, plan.order, plan.first, plan.size
    sums, stats = call(part_kernel, q.reshape(B, M, C + R), *tiles, *walk, S=S, B=B, factor=scale * LOG2E, **how, **sizes)
    # Many channels a program where there are programs enough, else many slots a step.
    width = min(C, 512 if B * M >= 1024 else 64)
    sizes = {"M": M, "C": C, "BC": width, "BP": 4096 // width}
    how = {"out_type": jax.ShapeDtypeStruct((B, M, C), latent.dtype), "grid": (C // width, M, B)}
    out = call(merge_kernel, sums, stats, plan.offsets, plan.ranks, plan.size, **how, **sizes, num_warps=4, num_stages=1)
    return out.reshape(B, T, H, C)
