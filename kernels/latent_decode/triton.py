"""Attention of a few new tokens over a cache of latents, in one read of the cache (plain Triton, NVIDIA Hopper).

Import it only where Triton is installed. Shapes: B rows, T new tokens, H heads, M = T*H queries of a row, S capacity of the cache,
C latent width, R width of the shared key, G programs, each with a run of tiles (schedule.py).

Bytes decide: an entry is (C+R)*2 = 1152 bytes at C=512, R=64, and 16 heads do 30 operations a byte, where the card can do 180. So 1M
entries are 1.2 GB, 0.28 ms at 4.3 TB/s. The queries are the narrow side of both products: scores^T = entries @ q^T and
sums^T = entries^T @ p^T have the entries as the left operand, of which wgmma takes 64 rows straight from shared memory, and a right
operand as narrow as there are queries. Both products read the one tile that was copied.
"""

import math

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ..kda.triton_launch import call, descriptor
from ..kda.triton_rows import over_rows
from .schedule import schedule

LOG2E = math.log2(math.e)
PROCESSORS = 132  # of an H100 or H200


@triton.jit
def part_kernel(
    q,  # [B,M,C+R]
    latent,  # [B,S,C]
    shared_key,  # [B,S,R]
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
    M: tl.constexpr,
    H: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,  # queries of one program
    BS: tl.constexpr,  # entries of a tile
    BC: tl.constexpr,  # powers of two >= C, R
    BR: tl.constexpr,
    SWAP: tl.constexpr,  # the entries are the left operand of both products; else the queries
):
    block, program = tl.program_id(0), tl.program_id(1)
    size, rank = tl.load(sizes), tl.load(firsts + program)
    tile = program * size
    stop = tl.minimum(tile + size, tl.load(offsets + B))
    queries = block * BM + tl.arange(0, BM)
    channels, key_channels, entries = tl.arange(0, BC), tl.arange(0, BR), tl.arange(0, BS)
    real, in_c, in_r = queries < M, channels < C, key_channels < R
    while tile < stop:
        row = tl.load(order + rank)
        row_first, row_end = tl.load(offsets + row), tl.minimum(tl.load(offsets + row + 1), stop)
        length = tl.load(lengths + row)
        row = row.to(tl.int64)
        first = (tile - row_first) * BS
        end = tl.minimum(tl.minimum(length, S), (row_end - row_first) * BS)
        seen = tl.minimum(length - T + 1 + queries // H, end)  # a query sees the entries before this one
        q_at = q + row * (M * (C + R))
        if SWAP:
            q_c = tl.load(q_at + queries[None, :] * (C + R) + channels[:, None], mask=real[None, :] & in_c[:, None], other=0.0)
            q_r = tl.load(q_at + C + queries[None, :] * (C + R) + key_channels[:, None], mask=real[None, :] & in_r[:, None], other=0.0)
            acc = tl.zeros((BC, BM), tl.float32)
            total = tl.zeros((BS, BM), tl.float32)
        else:
            q_c = tl.load(q_at + queries[:, None] * (C + R) + channels[None, :], mask=real[:, None] & in_c[None, :], other=0.0)
            q_r = tl.load(q_at + C + queries[:, None] * (C + R) + key_channels[None, :], mask=real[:, None] & in_r[None, :], other=0.0)
            acc = tl.zeros((BM, BC), tl.float32)
            total = tl.zeros((BM, BS), tl.float32)
        top = tl.full((BM,), float("-inf"), tl.float32)
        # int64: B*S*C passes 2^31. An entry at or after `end` is read as 0, not as what lies in the cache: 0 * NaN is NaN.
        x_tile = entries[:, None] * C + channels[None, :]
        y_tile = shared_key + (entries[:, None] * R + key_channels[None, :])
        there = first + entries < end
        y_mask = there[:, None] if BR == R else there[:, None] & in_r[None, :]
        next_y = tl.load(y_tile + (row * S + first) * R, mask=y_mask, other=0.0)
        for start in range(first, end, BS):
            at = row * S + start
            there, later = start + entries < end, start + BS + entries < end
            x_mask = there[:, None] if BC == C else there[:, None] & in_c[None, :]
            y_mask = later[:, None] if BR == R else later[:, None] & in_r[None, :]
            x = tl.load(latent + at * C + x_tile, mask=x_mask, other=0.0)
            # The next tile's shared keys wait in registers: three buffers of latents, the queries and three of keys are 236 KB.
            y, next_y = next_y, tl.load(y_tile + (at + BS) * R, mask=y_mask, other=0.0)
            if SWAP:
                s = tl.dot(y, q_r, acc=tl.dot(x, q_c))
                s = tl.where((start + entries)[:, None] < seen[None, :], s * factor, float("-inf"))
                new = tl.maximum(top, tl.max(s, axis=0))
            else:
                s = tl.dot(q_r, tl.permute(y, (1, 0)), acc=tl.dot(q_c, tl.permute(x, (1, 0))))
                s = tl.where((start + entries)[None, :] < seen[:, None], s * factor, float("-inf"))
                new = tl.maximum(top, tl.max(s, axis=1))
            shift = tl.where(new == float("-inf"), 0.0, new)  # nothing seen so far: no inf - inf
            fade = tl.exp2(top - shift)
            if SWAP:
                p = tl.exp2(s - shift[None, :])
                total = total * fade[None, :] + p
                acc = tl.dot(tl.permute(x, (1, 0)), p.to(x.dtype), acc=acc * fade[None, :])
            else:
                p = tl.exp2(s - shift[:, None])
                total = total * fade[:, None] + p
                acc = tl.dot(p.to(x.dtype), x, acc=acc * fade[:, None])
            top = new
        out = tl.permute(acc, (1, 0)) if SWAP else acc
        slot = program + rank
        place = slot.to(tl.int64) * M + queries
        tl.store(sums + place[:, None] * C + channels[None, :], out, mask=real[:, None] & in_c[None, :])
        tl.store(stats + slot * (2 * M) + queries, top, mask=real)
        tl.store(stats + slot * (2 * M) + M + queries, tl.sum(total, axis=0 if SWAP else 1), mask=real)
        tile = row_end
        rank += 1


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
    BC: tl.constexpr,  # channels of one program
    BP: tl.constexpr,  # slots of one step
):
    block, query, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end, rank, size = tl.load(offsets + row), tl.load(offsets + row + 1), tl.load(ranks + row), tl.load(sizes)
    first, end = first // size + rank, tl.where(end > first, (end - 1) // size + rank + 1, 0)  # a slot for each program that saw the row
    channels = block * BC + tl.arange(0, BC)
    in_c = channels < C
    acc = tl.zeros((BC,), tl.float32)
    total = tl.zeros((BP,), tl.float32)
    top = tl.full((1,), float("-inf"), tl.float32)
    for start in range(first, end, BP):
        slots = start + tl.arange(0, BP)
        there = slots < end
        slot_top = tl.load(stats + slots * (2 * M) + query, mask=there, other=float("-inf"))
        slot_total = tl.load(stats + slots * (2 * M) + M + query, mask=there, other=0.0)
        place = (slots.to(tl.int64) * M + query) * C
        x = tl.load(sums + place[:, None] + channels[None, :], mask=there[:, None] & in_c[None, :], other=0.0)
        new = tl.maximum(top, tl.max(slot_top, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        fade, weight = tl.exp2(top - shift), tl.exp2(slot_top - shift)
        total = total * fade + weight * slot_total
        acc = acc * fade + tl.sum(x * weight[:, None], axis=0)
        top = new
    sum_of_all = tl.sum(total, axis=0)
    result = acc / tl.where(sum_of_all == 0.0, 1.0, sum_of_all)  # a query that sees nothing gives 0
    place = (row.to(tl.int64) * M + query) * C
    tl.store(out + place + channels, result.to(out.dtype.element_ty), mask=in_c)


# Queries of a program -> its sizes, timed by experiments/bench/latent_decode.py: tiles copied by TMA or by the threads, entries the left
# operand (SWAP) or not, entries of a tile, warps that compute, stages of the copies, programs for each processor.
CONFIGS = {
    8: {"tma": True, "SWAP": True, "BS": 64, "warps": 4, "stages": 2, "programs": 1},
    16: {"tma": True, "SWAP": True, "BS": 64, "warps": 4, "stages": 2, "programs": 1},
    32: {"tma": True, "SWAP": True, "BS": 64, "warps": 4, "stages": 2, "programs": 1},
}
# Widths that TMA and its products do not take: C and R powers of two, C at least 64.
OTHER_WIDTHS = {"tma": False, "SWAP": True, "BS": 64, "warps": 8, "stages": 2, "programs": 1}


def decode_config(M: int, C: int, R: int) -> dict[str, int]:
    """Sizes of one program for M queries of a row; more than 32 are several programs a tile, which meet in the L2 cache."""
    if C < 64 or any(x & (x - 1) for x in (C, R)):
        return {"BM": 16 if M <= 16 else 32, **OTHER_WIDTHS}
    block = min(32, max(8, triton.next_power_of_2(M)))
    return {"BM": block, **CONFIGS[block]}


def latent_decode_triton(q, latent, shared_key, lengths, *, scale: float, config=None):
    """latent_decode without `valid`, its operands checked. Not differentiable.

    q [B,T,H,C+R], latent [B,S,C], shared_key [B,S,R], all bfloat16, C and R multiples of 16; lengths int32 [B].
    config: sizes of a program, see decode_config; None chooses. Under vmap every operand folds into the rows.
    """
    if config is None:
        config = decode_config(q.shape[1] * q.shape[2], latent.shape[2], shared_key.shape[2])

    def launch(rows, _):
        """Every operand with an axis in front, which vmap folds into."""
        q, latent, shared_key, lengths = (x.reshape(-1, *x.shape[2:]) for x in rows)
        out = _launch(q, latent, shared_key, lengths, float(scale), **config)
        return out.reshape(rows[0].shape[:-1] + rows[1].shape[-1:])

    return over_rows(launch, tuple(x[None] for x in (q, latent, shared_key, lengths)), ())[0]


def _launch(q, latent, shared_key, lengths, scale, *, BM, BS, SWAP, tma, warps, stages, programs):
    (B, T, H, _), (_, S, C), R = q.shape, latent.shape, shared_key.shape[2]
    M = T * H
    blocks = triton.cdiv(M, BM)
    G = max(1, PROCESSORS * programs // blocks)
    plan = schedule(lengths, S, BS, G)
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    how = {"out_type": (float32(G + B, M, C), float32(G + B, 2, M)), "grid": (blocks, G), "num_warps": warps}
    sizes = {"M": M, "H": H, "T": T, "C": C, "R": R, "BM": BM}
    scalars = {"S": S, "B": B, "factor": scale * LOG2E}
    q, walk = q.reshape(B, M, C + R), (lengths, plan.offsets, plan.order, plan.first, plan.size)
    if tma:
        from .triton_tma import part_kernel_tma, tile_layout

        tiles = [descriptor(x.reshape(B * S, -1), (BS, x.shape[2]), tile_layout(x.shape[2])) for x in (latent, shared_key)]
        sums, stats = call(part_kernel_tma, q, *tiles, *walk, **scalars, **how, **sizes, STAGES=stages)
    else:
        sizes |= {"BS": BS, "BC": triton.next_power_of_2(C), "BR": triton.next_power_of_2(R), "SWAP": SWAP}
        sums, stats = call(part_kernel, q, latent, shared_key, *walk, **scalars, **how, **sizes, num_stages=stages)
    # Many channels a program where there are programs enough, else many slots a step.
    width = min(triton.next_power_of_2(C), 512 if B * M >= 1024 else 64)
    sizes = {"M": M, "C": C, "BC": width, "BP": 4096 // width}
    how = {"out_type": jax.ShapeDtypeStruct((B, M, C), latent.dtype), "grid": (triton.cdiv(C, width), M, B)}
    out = call(merge_kernel, sums, stats, plan.offsets, plan.ranks, plan.size, **how, **sizes, num_warps=4, num_stages=1)
    return out.reshape(B, T, H, C)
