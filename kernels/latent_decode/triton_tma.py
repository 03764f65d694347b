"""The parts of latent_decode with the cache copied by TMA (Gluon, NVIDIA Hopper); what is computed is explained in triton.py.

A loading warp fills a ring of STAGES tiles; four warps attend. Slot i % STAGES is `full` for tile i, after it is `empty` of tile
i - STAGES. Two tiles of 64 entries are 147 KB: one travels while the other is computed with, about 100 KB in flight on average, and a
processor's share of the bandwidth needs 40. Entries of the whole cache are counted in int32: 2^31 of the narrowest are 343 GB. Shapes as
in triton.py.
"""

from triton.experimental import gluon  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon.language.nvidia.hopper import (  # pyright: ignore[reportMissingImports]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BS = gl.constexpr(64)  # entries of a tile: the rows of a wgmma
SUB = gl.constexpr(64)  # channels of a swizzled row of 128 bytes


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
def _load(latent, shared_key, rings, walk, place, S, C: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr):
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
    M: gl.constexpr, H: gl.constexpr, T: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
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
def part_kernel_tma(
    q, latent, shared_key, lengths, offsets, order, firsts, sizes, sums, stats, S, B, factor,
    M: gl.constexpr, H: gl.constexpr, T: gl.constexpr, C: gl.constexpr, R: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """part_kernel of triton.py, by the same operands but the cache: descriptors of [B*S,C] and [B*S,R], BS entries each."""
    block, program = gl.program_id(0), gl.program_id(1)
    size, rank = gl.load(sizes), gl.load(firsts + program)
    tile = program * size
    stop = gl.minimum(tile + size, gl.load(offsets + B))
    q_c = gl.allocate_shared_memory(gl.bfloat16, [BM, C], tile_layout(C))
    q_r = gl.allocate_shared_memory(gl.bfloat16, [BM, R], tile_layout(R))
    p_tile = gl.allocate_shared_memory(gl.bfloat16, [BM, BS], tile_layout(BS))
    ring_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BS, C], tile_layout(C))
    ring_y = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BS, R], tile_layout(R))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    rings, walk, place = (ring_x, ring_y, full, empty), (offsets, order), (block, program, rank, tile, stop)
    queries, arrays = (q_c, q_r, p_tile), (q, lengths, sums, stats)
    gl.warp_specialize(
        [
            (_attend, (rings, queries, arrays, walk, place, S, factor, M, H, T, C, R, BM, STAGES)),
            (_load, (latent, shared_key, rings, walk, place, S, C, R, STAGES)),
        ],
        [1],
        [40],
    )
