"""The gradients of KDA chunk by chunk on Hopper, from what the two walks over the states left behind.

One program = one chunk of C = 32 tokens x one value head; no program reads what another one writes, and nothing is added by atomics.

Shapes: B rows, T tokens, H query/key heads, HV value heads, N chunks of the window, K key channels, V value channels.
q, k [B,T,H,K]; g, dq, dk, dg [B,T,HV,K]; d_o, dv [B,T,HV,V]; beta, dbeta [B,T,HV]; t [B,HV,N,C,C]; v_new, d_v_new [B,HV,N,C,V];
S = states before the chunk, dS = d_states after it, [B,HV,N,V,K]. V', dV' = v_new, d_v_new.

    dv = T^T dV'           M1 = tril(dO V'^T)        M2 = -stril(dv V'^T)
    dq_i    = scale (e^(G_i) dO_i S + sum_j M1_ij k_j e^(G_i - G_j))
    dk_i    = row: -e^(G_i) dv_i S + sum_j M2_ij k_j e^(G_i - G_j)
              col: sum_i (M1_ij scale q_i + M2_ij k_i) e^(G_i - G_j) for j       out: e^(G_C - G_j) V'_j dS
    dg_t    = sum_{i >= t} (q dq + k (row - col))_i + sum_{i < t} (k out)_i + e^(G_C) sum_V S dS
    dbeta_i = <dv_i, V'_i> / beta_i^2

The decays between two rows are products of a row factor and a column factor, both from sums Gl of the log2 decays within a 16-row
tile (in reach of float32: 16 tokens are at most 136):
    own tile     2^(Gl_i + SHIFT) 2^(-Gl_j - SHIFT)                     SHIFT: half of the largest range, which centres it
    tile 1 on 0  2^(Gl_i + SHIFT) 2^(E0 - Gl_j - SHIFT)                 E0: the sum over tile 0, so 2^(E0 - Gl_j) <= 1
so M is kept twice, [64 rows of M1 and M2, 32 own columns] and [.., 32 cross columns], with zeros elsewhere, and serves both passes.

Two placements of a [C,K] tensor in registers: by rows (whole rows a warp) for loads, stores and sums over channels; by channels
([K,C] accumulators of a wgmma, 16 channels x all tokens a warp) for everything between. The terms of the sums above and both operands of
the products (left ones come from registers) are then in the same threads: no accumulator goes through shared memory on its way to
the next product. Against accumulators by rows this takes 3400 shared-memory wavefronts a chunk instead of 4300, 900 instead of
1850 of wgmma operands, and 8 barriers fewer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import triton_launch
from .triton_barriers import close_barriers, open_barriers
from .triton_grads_parts import (
    L2_EPS,
    LOG2E,
    TILE,
    TINY_BETA,
    C,
    _accumulator,
    _add,
    _again,
    _as,
    _by_channel,
    _diagonals,
    _exp2,
    _exp2_minus_abs,
    _flat,
    _float,
    _group_sums,
    _groups,
    _inverse,
    _lines,
    _offsets,
    _operand,
    _rows,
    _shape,
    _shared,
    _slab,
    _suffix,
    _tile_groups,
    _tiled,
    _tiles,
)  # fmt: skip


@gluon.jit
def grads_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, rate_ptr, bias_ptr, ids_ptr, t_desc, s_desc, ds_desc, d_o_ptr, v_new_ptr, d_v_new_ptr,
    T, H, HV, N, first, dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, d_rate_ptr, d_bias_ptr,
    K: gl.constexpr, V: gl.constexpr, WARPS: gl.constexpr, SCALE: gl.constexpr, BOUND: gl.constexpr, FUSED: gl.constexpr,
    HAS_RATE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_IDS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Grid: (chunks x HV, HV fastest; B). GROUP: value heads of a query/key head. WARPS: of the launch. BOUND: lowest g in natural units.

    No name stays alive longer than needed: 8 warps with 128 registers each are two programs on an SM, and so are 112 KB of shared
    memory, whose tiles take over the place of tiles that are no longer used.
    """
    SLAB: gl.constexpr = _slab(K, V)
    SLABS: gl.constexpr = V // SLAB
    HELD: gl.constexpr = SLABS if K <= 128 and V <= 128 else 1  # slabs of S and dS in shared memory at a time
    SHIFT: gl.constexpr = -BOUND * LOG2E * (TILE // 2)
    GROUPS: gl.constexpr = C // _shape(K, WARPS)[2]
    rows_v: gl.constexpr = _rows(SLAB, WARPS)
    lines: gl.constexpr = _lines(SLAB, WARPS)
    tiles: gl.constexpr = _tiles(K, WARPS)
    groups: gl.constexpr = _groups(K, WARPS)
    tile_groups: gl.constexpr = _tile_groups(K, WARPS)
    per_tile: gl.constexpr = gl.SliceLayout(1, tiles)  # [2,K]
    per_row: gl.constexpr = gl.SliceLayout(2, tiles)  # [2,16]
    by_channel: gl.constexpr = _by_channel(K, WARPS)
    left: gl.constexpr = gl.DotOperandLayout(0, by_channel, 2)
    square: gl.constexpr = _accumulator(C, WARPS)
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, WARPS // 2], [16, 8])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    staged: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])  # float32: 8 channels x 4 pairs of tokens fall on all banks

    program = gl.program_id(0)
    chunk = program // HV
    head = program - chunk * HV
    batch = gl.program_id(1)
    scratch = ((batch * HV + head) * N + chunk).to(gl.int64)
    start = (first + chunk) * C
    token = (batch * T + start).to(gl.int64)  # of [B,T]
    ids_at = ids_ptr + (batch * T).to(gl.int64)

    # Every tile is an allocation of its own: two views of one would cost a barrier between any two accesses. The compiler lets tiles
    # that come later take the place of those that are no longer used.
    s_tiles = gl.allocate_shared_memory(gl.bfloat16, [HELD, SLAB, K], _shared(K))
    ds_tiles = gl.allocate_shared_memory(gl.bfloat16, [HELD, SLAB, K], _shared(K))
    pairs, news, d_news = (), (), ()  # of each slab: [dO; dv], 64 rows for a wgmma, V' and dV'
    for _ in gl.static_range(SLABS):
        pairs = pairs + (gl.allocate_shared_memory(gl.bfloat16, [2 * C, SLAB], _shared(SLAB)),)  # noqa: RUF005 (Gluon has no *)
        news = news + (gl.allocate_shared_memory(gl.bfloat16, [C, SLAB], _shared(SLAB)),)  # noqa: RUF005
        d_news = d_news + (gl.allocate_shared_memory(gl.bfloat16, [C, SLAB], _shared(SLAB)),)  # noqa: RUF005
    i_l = gl.arange(0, C, gl.SliceLayout(1, lines))[:, None]
    d_l = gl.arange(0, SLAB, gl.SliceLayout(0, lines))[None, :]
    at_v = (token * HV + head) * V
    at_new = scratch * (C * V)
    off_new = i_l * V + d_l
    for slab in gl.static_range(SLABS):
        in_row_l = (start + i_l < T) & (d_l >= 0)
        async_copy.async_copy_global_to_shared(
            pairs[slab].slice(0, C), d_o_ptr + at_v + slab * SLAB + (i_l * (HV * V) + d_l), mask=in_row_l
        )
        async_copy.async_copy_global_to_shared(news[slab], v_new_ptr + at_new + slab * SLAB + off_new)
        async_copy.async_copy_global_to_shared(d_news[slab], d_v_new_ptr + at_new + slab * SLAB + off_new)
    async_copy.commit_group()

    # q, k and the gate: asked for before the barriers of the TMA copies, for they are needed first.
    tile_of = gl.arange(0, 2, gl.SliceLayout(1, per_row))
    row_of = gl.arange(0, TILE, gl.SliceLayout(0, per_row))
    d = gl.arange(0, K, gl.SliceLayout(0, per_tile))
    i = tile_of[:, None] * TILE + row_of[None, :]
    in_row = (start + i < T)[:, :, None]
    at_qk = (token * H + head // GROUP) * K
    off_qk = _offsets(i, H * K, K, WARPS)
    at_k = (token * HV + head) * K
    q = gl.load(q_ptr + at_qk + off_qk, mask=in_row, other=0.0)
    k = gl.load(k_ptr + at_qk + off_qk, mask=in_row, other=0.0)
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    i_b = gl.arange(0, C, one_each)
    beta = gl.load(beta_ptr + (token + i_b) * HV + head, mask=start + i_b < T, other=0.0)
    # Of rows behind the end the raw gate is so low that sigmoid and its derivative are 0, whatever the bias.
    NO_GATE: gl.constexpr = -1e30 if FUSED else 0.0
    raw = gl.load(g_ptr + at_k + _offsets(i, HV * K, K, WARPS), mask=in_row, other=NO_GATE)

    # T, S and dS come by TMA, all at once.
    t_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], _shared(C))
    bars = open_barriers(2, 1)
    row32 = scratch.to(gl.int32)
    mbarrier.expect(bars.index(0), C * C * 2)
    tma.async_copy_global_to_shared(t_desc, [row32 * C, 0], bars.index(0), t_tile)
    mbarrier.expect(bars.index(1), HELD * 2 * SLAB * K * 2)
    for slab in gl.static_range(HELD):
        tma.async_copy_global_to_shared(s_desc, [row32 * V + slab * SLAB, 0], bars.index(1), s_tiles.index(slab))
        tma.async_copy_global_to_shared(ds_desc, [row32 * V + slab * SLAB, 0], bars.index(1), ds_tiles.index(slab))

    m_row = gl.arange(0, 2 * C, gl.SliceLayout(1, square))
    m_i = m_row % C
    m_j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    if HAS_IDS:
        id_i = gl.load(ids_at + gl.minimum(start + m_i, T - 1))
        id_j = gl.load(ids_at + gl.minimum(start + gl.arange(0, C, gl.SliceLayout(0, square)), T - 1))
        id_before = gl.load(ids_at + gl.maximum(start - 1, 0))
        id_last = gl.load(ids_at + gl.minimum(start + C - 1, T - 1))

    # The gate and its sums within a tile.
    if FUSED:
        rate = _exp2(gl.load(rate_ptr + head) * LOG2E) if HAS_RATE else 1.0
        slope = rate * -LOG2E
        if HAS_BIAS:
            offset = (gl.load(bias_ptr + head * K + d) * slope)[None, None, :]
        else:
            offset = 0.0
        log2 = _inverse(1.0 + _exp2(_float(raw) * slope + offset))
        UNIT: gl.constexpr = BOUND * LOG2E
        q_unit = gl.rsqrt(gl.sum(_float(q) * _float(q), axis=2) + L2_EPS)
        k_unit = gl.rsqrt(gl.sum(_float(k) * _float(k), axis=2) + L2_EPS)
        units = gl.allocate_shared_memory(gl.float32, [4, TILE], plain)
        units.slice(0, 2).store(q_unit)
        units.slice(2, 2).store(k_unit)
    else:
        log2 = _float(raw)
        UNIT: gl.constexpr = LOG2E
    # Sums: of the rows of a thread in registers, of the threads before it in shared memory. Only past rows enter, in fixed order.
    in_thread = _as(log2, [GROUPS, C // GROUPS, K], groups)
    in_thread = gl.associative_scan(in_thread, 1, _add)
    group_total = gl.sum(_as(log2, [GROUPS, C // GROUPS, K], groups), axis=1)
    totals = gl.allocate_shared_memory(gl.float32, [2, GROUPS // 2, K], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    totals.reshape([GROUPS, K]).store(group_total)
    before_group = gl.zeros([2, GROUPS // 2, K], gl.float32, gl.SliceLayout(2, tile_groups))
    tile_sum = gl.zeros([2, 1, K], gl.float32, gl.SliceLayout(2, tile_groups))
    group = gl.arange(0, GROUPS // 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(2, tile_groups))))[None, :, None]
    for earlier in gl.static_range(GROUPS // 2):
        one = totals.slice(earlier, 1, dim=1).load(gl.SliceLayout(2, tile_groups))
        before_group += gl.where(group > earlier, one, 0.0)
        tile_sum += one
    in_thread = in_thread * UNIT + _as(before_group * UNIT + SHIFT, [GROUPS, K], gl.SliceLayout(1, groups))[:, None, :]
    exponent = _as(in_thread, [2, TILE, K], tiles)
    ends = gl.allocate_shared_memory(gl.float32, [2, K], plain)
    ends.reshape([2, 1, K]).store(tile_sum * UNIT)

    # dv
    async_copy.wait_group(0)
    mbarrier.wait(bars.index(0), 0)
    t_left = t_tile.permute((1, 0)).load(gl.DotOperandLayout(0, small, 2))
    for slab in gl.static_range(SLABS):
        d_new_right = d_news[slab].load(gl.DotOperandLayout(1, small, 2))
        dv = mma_v2(t_left, d_new_right, gl.zeros([C, SLAB], gl.float32, small))
        pairs[slab].slice(C, C).store(dv.to(gl.bfloat16))
    fence_async_shared()

    # [dO; dv] V'^T, masked by select: what stands above the diagonal or between documents is finite, and never multiplied.
    m = gl.zeros([2 * C, C], gl.float32, square)
    for slab in gl.static_range(SLABS):
        m = warpgroup_mma(pairs[slab], news[slab].permute((1, 0)), m, use_acc=slab > 0)
    m_last = (m_i - m_row // C)[:, None]  # M1 with the diagonal, M2 without
    m = m * gl.where(m_row < C, 1.0, -1.0)[:, None]
    if HAS_IDS:
        m = gl.where(id_i[:, None] == id_j[None, :], m, 0.0)
    own = gl.where((m_j >= (m_i // TILE * TILE)[:, None]) & (m_j <= m_last), m, 0.0)  # pairs within a tile
    cross = gl.where(m_j < (m_i // TILE * TILE)[:, None], m, 0.0)  # row of tile 1, column of tile 0
    mix_own = gl.allocate_shared_memory(gl.bfloat16, [2 * C, C], _shared(C))
    mix_cross = gl.allocate_shared_memory(gl.bfloat16, [2 * C, C], _shared(C))
    mix_own.store(own.to(gl.bfloat16))
    mix_cross.store(cross.to(gl.bfloat16))
    fence_async_shared()

    # dv and dbeta out. dv and V' both carry beta: 2^60 keeps their product in reach of float32 for the smallest one.
    i_v = gl.arange(0, C, gl.SliceLayout(1, rows_v))
    d_v = gl.arange(0, SLAB, gl.SliceLayout(0, rows_v))
    in_row_v = (start + i_v < T)[:, None]
    off_v = i_v[:, None] * (HV * V) + d_v[None, :]
    d_beta = gl.zeros([C], gl.float32, gl.SliceLayout(1, rows_v))
    for slab in gl.static_range(SLABS):
        dv_out = pairs[slab].slice(C, C).load(rows_v)
        gl.store(dv_ptr + at_v + slab * SLAB + off_v, dv_out, mask=in_row_v)
        d_beta += gl.sum((_float(dv_out) * 2.0**60) * _float(news[slab].load(rows_v)), axis=1)
    d_beta = gl.convert_layout(d_beta, one_each)
    beta = beta.to(gl.float32)
    if FUSED:
        rest = _inverse(1.0 + _exp2(beta * LOG2E))  # 1 - sigmoid, also where that rounds to 0
        beta = _inverse(1.0 + _exp2(beta * -LOG2E))
    beta = gl.where(gl.abs(beta) < TINY_BETA, TINY_BETA, beta)
    d_beta = (d_beta / beta) * 2.0**-60
    if FUSED:
        d_beta = d_beta * rest
    else:
        d_beta = d_beta / beta
    gl.store(dbeta_ptr + (token + i_b) * HV + head, d_beta.to(dbeta_ptr.dtype.element_ty), mask=start + i_b < T)

    # The products with the states, [K,C]: channels down the rows of the accumulators, so that all that follows until the norms is
    # in the same threads. S and dS are read once, as left operands: S^T dO^T, S^T dv^T, dS^T V'^T, and for sum_V S dS.
    mbarrier.wait(bars.index(1), 0)
    d_q_t = gl.zeros([K, C], gl.float32, by_channel)
    d_k_t = gl.zeros([K, C], gl.float32, by_channel)
    out_t = gl.zeros([K, C], gl.float32, by_channel)
    # sum_V S dS: a sixteenth of S^T dS in blocks of 16 channels, of which the diagonals count. 15 of 16 products are wasted, and yet
    # it takes 150 instructions of 3250 less than the sums in registers.
    diagonals: gl.constexpr = _diagonals(K, WARPS)
    both = gl.zeros([K // 16, 16, 16], gl.float32, diagonals)
    for slab in gl.static_range(SLABS):
        s_tile, ds_tile = s_tiles.index(slab % HELD), ds_tiles.index(slab % HELD)
        if slab >= HELD:
            gl.barrier()
            mbarrier.expect(bars.index(1), 2 * SLAB * K * 2)
            tma.async_copy_global_to_shared(s_desc, [row32 * V + slab * SLAB, 0], bars.index(1), s_tile)
            tma.async_copy_global_to_shared(ds_desc, [row32 * V + slab * SLAB, 0], bars.index(1), ds_tile)
            mbarrier.wait(bars.index(1), slab % 2)
        s_left = s_tile.reshape([SLAB, K // 16, 16]).permute((1, 2, 0)).load(gl.DotOperandLayout(0, diagonals, 2))
        ds_right = ds_tile.reshape([SLAB, K // 16, 16]).permute((1, 0, 2)).load(gl.DotOperandLayout(1, diagonals, 2))
        s_t = gl.convert_layout(s_left.reshape([K, SLAB]), left, assert_trivial=True)
        ds_t = gl.convert_layout(ds_right.permute((0, 2, 1)).reshape([K, SLAB]), left, assert_trivial=True)
        out_t = warpgroup_mma(ds_t, news[slab].permute((1, 0)), out_t, use_acc=slab > 0, is_async=True)
        d_q_t = warpgroup_mma(s_t, pairs[slab].slice(0, C).permute((1, 0)), d_q_t, use_acc=slab > 0, is_async=True)
        d_k_t = warpgroup_mma(s_t, pairs[slab].slice(C, C).permute((1, 0)), d_k_t, use_acc=slab > 0, is_async=True)
        both = mma_v2(s_left, ds_right, both)
        if slab == SLABS - 1:  # q and k once more: 16 registers less meanwhile
            off_qk = _offsets(i, H * K, K, WARPS)
            q = gl.load(q_ptr + at_qk + off_qk, mask=in_row, other=0.0)
            k = gl.load(k_ptr + at_qk + off_qk, mask=in_row, other=0.0)
        out_t, d_q_t, d_k_t = warpgroup_mma_wait(0, (out_t, d_q_t, d_k_t))
    b_row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, diagonals)))[None, :, None]
    b_column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, diagonals)))[None, None, :]
    both_sum = gl.allocate_shared_memory(gl.float32, [K // 16, 16], plain)
    both_sum.store(gl.sum(gl.where(b_row == b_column, both, 0.0), axis=2))

    # q, k and the exponents, from rows to channels.
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], _shared(K))
    k_tile = gl.allocate_shared_memory(gl.bfloat16, [C, K], _shared(K))
    e_tile = gl.allocate_shared_memory(gl.float32, [C, K], staged)
    # What goes back to rows: here, so that none takes the place of another, which would cost a barrier.
    d_out_tile = gl.allocate_shared_memory(gl.float32, [C, K], staged)
    d_q_tile = gl.allocate_shared_memory(gl.float32, [C, K], staged)
    d_k_tile = gl.allocate_shared_memory(gl.float32, [C, K], staged)
    later_tile = gl.allocate_shared_memory(gl.float32, [C, K], staged)
    q_tile.store(_flat(q, K, WARPS))
    k_tile.store(_flat(k, K, WARPS))
    e_tile.store(_flat(_again(exponent), K, WARPS))
    e_t = e_tile.permute((1, 0)).load(by_channel)
    t_i = gl.arange(0, C, gl.SliceLayout(0, by_channel))
    in_tile0 = (t_i < TILE)[None, :]
    end0 = ends.slice(0, 1).permute((1, 0)).load(by_channel)
    end1 = ends.slice(1, 1).permute((1, 0)).load(by_channel)
    d_out_t = out_t * _exp2(gl.where(in_tile0, end0 + end1, end1) + SHIFT - e_t)
    if HAS_IDS:
        t_id = gl.load(ids_at + gl.minimum(start + t_i, T - 1))
        d_out_t = gl.where((t_id == id_last)[None, :], d_out_t, 0.0)
    d_out_tile.permute((1, 0)).store(d_out_t)
    up = _exp2(e_t)
    # In two halves: 2^E0 alone may be 0 where 2^(E0 - Gl_j) is 1. Tile 1 is no column of a cross pair: factor 0.
    half = gl.where(in_tile0, _exp2(end0 * 0.5), 0.0)
    down = _inverse(up)
    k_hat_t = _operand(k_tile.permute((1, 0)).load(left), by_channel)
    if FUSED:
        k_hat_t = k_hat_t * units.reshape([2, C]).slice(1, 1).load(by_channel)
    key_own = (k_hat_t * down).to(gl.bfloat16)
    key_cross = (k_hat_t * down * half * half).to(gl.bfloat16)

    # From the start of the row's tile to the chunk's start. Rows of dv enter with a minus.
    entry = gl.where(in_tile0, 2.0**-SHIFT, _exp2(end0 - SHIFT))
    d_q_t = d_q_t * entry
    d_k_t = d_k_t * -entry
    if HAS_IDS:
        enters = (t_id == id_before)[None, :]  # rows behind a boundary do not read the state
        d_q_t = gl.where(enters, d_q_t, 0.0)
        d_k_t = gl.where(enters, d_k_t, 0.0)
    left_own = gl.convert_layout(key_own, left, assert_trivial=True)
    left_cross = gl.convert_layout(key_cross, left, assert_trivial=True)
    d_q_t = warpgroup_mma(left_own, mix_own.slice(0, C).permute((1, 0)), d_q_t, is_async=True)
    d_q_t = warpgroup_mma(left_cross, mix_cross.slice(0, C).permute((1, 0)), d_q_t, is_async=True)
    d_k_t = warpgroup_mma(left_own, mix_own.slice(C, C).permute((1, 0)), d_k_t, is_async=True)
    d_k_t = warpgroup_mma(left_cross, mix_cross.slice(C, C).permute((1, 0)), d_k_t, is_async=True)

    # A pair (i,j) adds the same to `later` of i as it takes from j's, and so cancels in dg of the tokens up to j: exactly, where both
    # are formed from the same rounded operands. With unrounded ones, at strong gates, dg was off by 1.4e-2 and d_bias by 5e-2; now
    # by 2e-3 and 1e-3.
    up = _again(up)
    k_hat_t = _operand(k_tile.permute((1, 0)).load(left), by_channel)
    if FUSED:
        k_hat_t = k_hat_t * units.reshape([2, C]).slice(1, 1).load(by_channel)
    row_k = (k_hat_t * up).to(gl.bfloat16)
    q_hat_t = _operand(q_tile.permute((1, 0)).load(left), by_channel)
    if FUSED:
        q_hat_t = q_hat_t * (units.reshape([2, C]).slice(0, 1).load(by_channel) * SCALE)
    else:
        q_hat_t = q_hat_t * SCALE
    both_totals = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, K], plain)  # in the place of the exponents
    all_others = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, K], plain)
    row_q = (q_hat_t * up).to(gl.bfloat16)
    d_q_t, d_k_t = warpgroup_mma_wait(0, (d_q_t, d_k_t))
    later_t = d_q_t * _float(row_q) + d_k_t * _float(row_k)
    d_q_tile.permute((1, 0)).store(d_q_t * up)
    d_k_t = d_k_t * up
    left_q = gl.convert_layout(row_q, left, assert_trivial=True)
    left_k = gl.convert_layout(row_k, left, assert_trivial=True)
    own_t = warpgroup_mma(left_q, mix_own.slice(0, C), gl.zeros([K, C], gl.float32, by_channel), use_acc=False, is_async=True)
    own_t = warpgroup_mma(left_k, mix_own.slice(C, C), own_t, is_async=True)
    own_t = warpgroup_mma_wait(0, (own_t,))
    later_t -= own_t * _float(key_own)
    down = _inverse(_again(up))
    d_k_t += own_t * down
    cross_t = warpgroup_mma(left_q, mix_cross.slice(0, C), gl.zeros([K, C], gl.float32, by_channel), use_acc=False, is_async=True)
    cross_t = warpgroup_mma(left_k, mix_cross.slice(C, C), cross_t, is_async=True)
    cross_t = warpgroup_mma_wait(0, (cross_t,))
    later_t -= cross_t * _float(key_cross)
    d_k_t += cross_t * (down * half * half)
    d_k_tile.permute((1, 0)).store(d_k_t)
    later_tile.permute((1, 0)).store(later_t)

    # Rows again: the norms, and the stores of whole lines.
    gl.barrier()
    off_k = _offsets(i, HV * K, K, WARPS)
    if FUSED:
        raw = gl.load(g_ptr + at_k + off_k, mask=in_row, other=-1e30)
        if HAS_BIAS:
            offset = (gl.load(bias_ptr + head * K + d) * slope)[None, None, :]
    d_q = _tiled(d_q_tile, K, WARPS)
    if FUSED:  # through the norm: (d_q - q^ <q^, d_q>) / |q|
        q_unit = units.slice(0, 2).load(per_row)
        q_raw = _tiled(q_tile, K, WARPS)
        along = gl.sum(q_raw * d_q, axis=2) * q_unit * q_unit
        d_q = (d_q - q_raw * along[:, :, None]) * (q_unit * SCALE)[:, :, None]
    else:
        d_q = d_q * SCALE
    gl.store(dq_ptr + at_k + _offsets(i, HV * K, K, WARPS), d_q.to(gl.bfloat16), mask=in_row)
    d_out = _tiled(d_out_tile, K, WARPS)
    d_k = _tiled(d_k_tile, K, WARPS) + d_out
    k_hat = _tiled(k_tile, K, WARPS)
    if FUSED:
        k_unit = units.slice(2, 2).load(per_row)
        k_hat = k_hat * k_unit[:, :, None]
        d_k = (d_k - k_hat * gl.sum(k_hat * d_k, axis=2)[:, :, None]) * k_unit[:, :, None]
    gl.store(dk_ptr + at_k + _offsets(i, HV * K, K, WARPS), d_k.to(gl.bfloat16), mask=in_row)
    later = _tiled(later_tile, K, WARPS)
    written = k_hat * d_out

    # dg: sums over the rows behind (later) and before (written).
    later = _as(later, [GROUPS, C // GROUPS, K], groups)
    written = _as(written, [GROUPS, C // GROUPS, K], groups)
    both_totals.slice(0, GROUPS).store(gl.sum(later, axis=1))
    both_totals.slice(GROUPS, GROUPS).store(gl.sum(written, axis=1))
    sums: gl.constexpr = _group_sums(K, WARPS)
    total = both_totals.reshape([2, GROUPS, K]).load(sums)
    which = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, sums)))[:, None, None]
    others = gl.where(which == 0, _suffix(total, 2, GROUPS, K), gl.associative_scan(total, 1, _add)) - total
    # e^(G_C) sum_V S dS belongs to every row; it goes with the sums that every row gets
    per_sum: gl.constexpr = gl.SliceLayout(1, sums)
    decay = _exp2(ends.slice(0, 1).load(per_sum) + ends.slice(1, 1).load(per_sum))
    decay = decay * both_sum.reshape([1, K]).load(per_sum)
    if HAS_IDS:
        decay = gl.where(id_before == id_last, decay, 0.0)
    others += gl.where(which == 0, decay[:, None, :], 0.0)
    all_others.reshape([2, GROUPS, K]).store(others)
    d_g = _suffix(later, GROUPS, C // GROUPS, K) + (gl.associative_scan(written, 1, _add) - written)
    d_g += (all_others.slice(0, GROUPS).load(gl.SliceLayout(1, groups)) + all_others.slice(GROUPS, GROUPS).load(gl.SliceLayout(1, groups)))[
        :, None, :
    ]
    d_g = _as(d_g, [2, TILE, K], tiles)
    if FUSED:
        y = _float(raw) * slope + offset
        e = _exp2_minus_abs(y)
        inverse = _inverse(1.0 + e)
        # sigmoid' = e / (1 + e)^2 first: it is 0 for a large |y|, and then stays 0
        d_x = d_g * (e * inverse * inverse)
        d_g = d_x * (rate * BOUND)
        channels: gl.constexpr = gl.BlockedLayout([GROUPS, 1], [1, 32], [1, WARPS], [1, 0])
        part = totals.reshape([GROUPS, K])
        part.store(gl.sum(_as(d_g, [GROUPS, C // GROUPS, K], groups), axis=1))
        d_bias = gl.sum(part.load(channels), axis=0)
        gl.store(d_bias_ptr + scratch * K + gl.arange(0, K, gl.SliceLayout(0, channels)), d_bias)
        if HAS_RATE:
            d_rate = gl.sum((d_x * y).reshape([C * K]), axis=0)
            gl.store(d_rate_ptr + scratch, d_rate * (-BOUND / LOG2E))
    gl.store(dg_ptr + at_k + off_k, d_g.to(dg_ptr.dtype.element_ty), mask=in_row)
    close_barriers(bars, 2)  # not behind their last wait, where it would take a barrier of the warps


class Gradients(NamedTuple):
    dq: jax.Array  # [B,T,HV,K] bfloat16, of the value heads: the caller sums a group's
    dk: jax.Array
    dv: jax.Array  # [B,T,HV,V] bfloat16
    dg: jax.Array  # [B,T,HV,K] in g's dtype; fused: of the raw gate
    dbeta: jax.Array  # [B,T,HV] in beta's dtype; fused: of the logits
    d_rate: jax.Array | None  # [B,HV,N] float32, of A_log by chunk; None without A_log
    d_bias: jax.Array | None  # [B,HV,N,K] float32, of dt_bias by chunk; None without dt_bias


def launch_shape(K: int, V: int) -> tuple[int, int | None]:
    """-> warps, most registers a thread."""
    if K == 64:
        return 4, 168 if V == 64 else None  # a warp holds 16 channels; 168 registers are three programs on an SM
    if max(K, V) > 128:
        return 8, None  # one program on an SM in any case
    return 8, 128  # two programs on an SM; 4 warps of 255 registers take the same time (one H200, 96 heads, 8192 tokens)


def grads(
    q, k, g, beta, A_log, dt_bias, ids, t, d_o, states, v_new, d_states, d_v_new,
    *, first: int, scale: float, lower_bound: float, fused: bool, out=None,
) -> Gradients:  # fmt: skip
    """The gradients of the chunks first .. first + N - 1 of each row; N is that of the scratch arrays.

    q, k, d_o, t, states, v_new, d_states, d_v_new bfloat16; g, beta bfloat16 or float32; ids [B,T] int32 or None; A_log [HV],
    dt_bias [HV,K] float32 or None. fused: g is the raw gate and beta the logits, and the gradients go through norm, gate and sigmoid;
    else g is the log decay, in [lower_bound, 0]. out: Gradients of another window of the same row, whose token arrays are written to
    in place; without it the tokens outside the window are undefined.
    """
    batch, tokens, heads, K = q.shape
    value_heads, V, chunks = d_o.shape[2], d_o.shape[3], t.shape[2]
    warps, registers = launch_shape(K, V)
    slab = _slab(K, V)
    tile = lambda columns: gl.NVMMASharedLayout(min(2 * columns, 128), 16, 2)
    describe = lambda x, rows: triton_launch.descriptor(x.reshape(-1, x.shape[-1]), (rows, x.shape[-1]), tile(x.shape[-1]))
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)
    parts = (batch, value_heads, chunks)
    out_type = (
        shape(batch, tokens, value_heads, K), shape(batch, tokens, value_heads, K), shape(batch, tokens, value_heads, V),
        shape(batch, tokens, value_heads, K, dtype=g.dtype), shape(batch, tokens, value_heads, dtype=beta.dtype),
        shape(*(parts if fused else (1,)), dtype=jnp.float32), shape(*((*parts, K) if fused else (1,)), dtype=jnp.float32),
    )  # fmt: skip
    names = ("dq_ptr", "dk_ptr", "dv_ptr", "dg_ptr", "dbeta_ptr")
    earlier = {} if out is None else dict(zip(names, out[:5], strict=True))
    # An operand that is not there gets a pointer that is not read.
    results = triton_launch.call(
        grads_kernel, q, k, g, beta, beta if A_log is None else A_log, beta if dt_bias is None else dt_bias, beta if ids is None else ids,
        describe(t, C.value), describe(states, slab), describe(d_states, slab), d_o, v_new, d_v_new,
        tokens, heads, value_heads, chunks, first,
        out_type=out_type, grid=(value_heads * chunks, batch), num_warps=warps, maxnreg=registers,
        aliases={name: i for i, name in enumerate(earlier)}, **earlier,
        K=K, V=V, WARPS=warps, SCALE=float(scale), BOUND=float(lower_bound), FUSED=bool(fused),
        HAS_RATE=A_log is not None, HAS_BIAS=dt_bias is not None, HAS_IDS=ids is not None, GROUP=value_heads // heads,
    )  # fmt: skip
    *arrays, d_rate, d_bias = results
    return Gradients(*arrays, d_rate if A_log is not None else None, d_bias if dt_bias is not None else None)
