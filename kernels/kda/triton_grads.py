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

All of it is five products of 64 rows, the height of a wgmma. The rows are [dO; -dv]. The decays between two rows are products of a row
factor and a column factor, both from sums Gl of the log2 decays within a 16-row tile (in reach of float32: 16 tokens are at most 136):
    own tile     2^(Gl_i + SHIFT) 2^(-Gl_j - SHIFT)                     SHIFT: half of the largest range, which centres it
    tile 1 on 0  2^(Gl_i + SHIFT) 2^(E0 - Gl_j - SHIFT)                 E0: the sum over tile 0, so 2^(E0 - Gl_j) <= 1
so M is laid out [64 rows, 32 own | 32 cross columns] with zeros elsewhere, and serves both passes: M [own; cross keys], M^T [q; k] rows.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma, warpgroup_mma

from . import triton_launch

C = gl.constexpr(32)
TILE = gl.constexpr(16)
TINY_BETA = gl.constexpr(1e-18)  # |beta| below it counts as it, as in the forward pass: V' / beta is then finite
L2_EPS = gl.constexpr(1e-6)
LOG2E = gl.constexpr(math.log2(math.e))


@gluon.constexpr_function
def _shape(D, WARPS):
    """-> lanes along D, rows of a warp's lanes, neighbouring rows of a thread for a [32,D] tile on all threads."""
    lanes = min(32, D // 4)
    return lanes, 32 // lanes, C.value // (WARPS * (32 // lanes))


@gluon.constexpr_function
def _rows(D, WARPS):
    """[32,D]: 4 neighbouring channels and some neighbouring rows a thread; for D >= 128 a warp holds whole rows, so that sums over
    a row are shuffles, and every load and store is one line of 8 or 16 bytes a lane."""
    lanes, across, deep = _shape(D, WARPS)
    return gl.BlockedLayout([deep, 4], [across, lanes], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _lines(D, WARPS):
    """[32,D] bfloat16 in copies of 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // D if D <= 256 else 1, min(32, D // 8)], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _tiles(D, WARPS):
    """The same placement seen as [2 tiles,16,D]."""
    lanes, across, deep = _shape(D, WARPS)
    return gl.BlockedLayout([1, deep, 4], [1, across, lanes], [2, WARPS // 2, 1], [2, 1, 0])


@gluon.constexpr_function
def _groups(D, WARPS):
    """The same placement seen as [groups, rows of one thread, D]."""
    lanes, across, deep = _shape(D, WARPS)
    return gl.BlockedLayout([1, deep, 4], [across, 1, lanes], [WARPS, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _tile_groups(D, WARPS):
    """The same placement seen as [2 tiles, groups of a tile, rows of one thread, D]."""
    lanes, across, deep = _shape(D, WARPS)
    return gl.BlockedLayout([1, 1, deep, 4], [1, across, 1, lanes], [2, WARPS // 2, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _group_sums(D, WARPS):
    """[2,groups,D] with all groups in one thread: the second half of the warps takes the second sum."""
    _, across, _ = _shape(D, WARPS)
    return gl.BlockedLayout([1, WARPS * across, 1], [1, 1, 32], [2, 1, WARPS // 2], [2, 1, 0])


@gluon.constexpr_function
def _accumulator(D, WARPS):
    """[64,D] of a wgmma; the second 4 warps take the second half of the columns."""
    groups = WARPS // 4
    return gl.NVMMADistributedLayout([3, 0], [4, groups], [16, D // groups, 16])


@gluon.constexpr_function
def _diagonals(K, WARPS):
    """[K / 16 blocks,16,16] of mma.sync: the diagonals of these are the K sums of S dS over V."""
    blocks = min(WARPS, K // 16)
    return gl.NVMMADistributedLayout([2, 0], [blocks, 1, WARPS // blocks], [1, 16, 8])


@gluon.constexpr_function
def _shared(D):
    """A [rows,D] bfloat16 tile."""
    return gl.NVMMASharedLayout(min(2 * D, 128), 16, 2)


@gluon.constexpr_function
def _slab(K, V):
    """Value rows of S and dS in shared memory at a time: all of them where both fit twice on an SM."""
    return V if K <= 128 and V <= 128 else 64


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _exp2(x):
    """2^x in one instruction (gl.exp2 takes four, to keep denormals). 0 for a very negative x, also -inf."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2_minus(x):
    """2^-x; the sign costs nothing in this form."""
    text: gl.constexpr = "{ .reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t; }"
    return gl.inline_asm_elementwise(text, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2_minus_abs(x):
    text: gl.constexpr = "{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }"
    return gl.inline_asm_elementwise(text, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _inverse(x):
    """1/x in one instruction, to 1 ulp."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _float(x):
    """bfloat16 pairs -> float32 in one instruction an element (.to takes two for the upper half)."""
    if x.dtype == gl.bfloat16:
        text: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return gl.inline_asm_elementwise(text, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        return x


@gluon.jit
def _again(x):
    """x as something the compiler does not know: what is computed from it again is not kept in registers meanwhile."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.bfloat16, is_pure=False, pack=2)
    else:
        return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def _offsets(i, stride, D: gl.constexpr, WARPS: gl.constexpr):
    """Rows i [2,16] of a stride, D channels -> [2,16,D]; computed again in each place, for 4 pointers a tensor fill the registers."""
    return (_again(i) * stride)[:, :, None] + gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, _tiles(D, WARPS))))[None, None, :]


@gluon.jit
def _as(x, shape: gl.constexpr, layout: gl.constexpr):
    """The same elements in the same threads under another shape."""
    return gl.convert_layout(x.reshape(shape), layout, assert_trivial=True)


@gluon.jit
def _tiled(tile, K: gl.constexpr, WARPS: gl.constexpr):
    """A [32,K] tile of shared memory -> [2,16,K] float32."""
    return _as(_float(tile.load(_rows(K, WARPS))), [2, TILE, K], _tiles(K, WARPS))


@gluon.jit
def _flat(x, K: gl.constexpr, WARPS: gl.constexpr):
    """[2,16,K] -> [32,K]"""
    return _as(x, [C, K], _rows(K, WARPS))


@gluon.jit
def _suffix(x, A: gl.constexpr, R: gl.constexpr, B: gl.constexpr):
    """Sums of x [A,R,B] over axis 1 from each element on, where one thread has all R (a reverse scan would shuffle all the same)."""
    if R == 1:
        return x
    else:
        layout: gl.constexpr = x.type.layout
        first, second = x.reshape([A, 2, R // 2, B]).permute(0, 2, 3, 1).split()
        half: gl.constexpr = first.type.layout
        total = gl.sum(second, axis=1)
        first = gl.convert_layout(_suffix(first, A, R // 2, B), half) + total[:, None, :]
        second = gl.convert_layout(_suffix(second, A, R // 2, B), half)
        joined = gl.join(first, second).permute(0, 3, 1, 2)
        return gl.convert_layout(joined.reshape([A, R, B]), layout, assert_trivial=True)


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
    SHIFT: gl.constexpr = -BOUND * LOG2E * (TILE // 2)
    GROUPS: gl.constexpr = C // _shape(K, WARPS)[2]
    rows_v: gl.constexpr = _rows(SLAB, WARPS)
    lines: gl.constexpr = _lines(SLAB, WARPS)
    tiles: gl.constexpr = _tiles(K, WARPS)
    groups: gl.constexpr = _groups(K, WARPS)
    tile_groups: gl.constexpr = _tile_groups(K, WARPS)
    per_tile: gl.constexpr = gl.SliceLayout(1, tiles)  # [2,K]
    per_row: gl.constexpr = gl.SliceLayout(2, tiles)  # [2,16]
    wide: gl.constexpr = _accumulator(K, WARPS)
    square: gl.constexpr = _accumulator(C, WARPS)
    small: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, WARPS // 2], [16, 8])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    staged: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])  # float32: rows of a wgmma accumulator fall on different banks

    program = gl.program_id(0)
    chunk = program // HV
    head = program - chunk * HV
    batch = gl.program_id(1)
    scratch = ((batch * HV + head) * N + chunk).to(gl.int64)
    start = (first + chunk) * C
    token = (batch * T + start).to(gl.int64)  # of [B,T]
    ids_at = ids_ptr + (batch * T).to(gl.int64)

    # Three places, each with two tenants. The later ones: keys and rows, `out`, and the other accumulators on their way to rows.
    place_s = gl.allocate_shared_memory(gl.float32, [2 * C, K], staged)
    place_ds = gl.allocate_shared_memory(gl.float32, [2 * C, K], staged)
    place_stack = gl.allocate_shared_memory(gl.float32, [2 * C, K if K > V else V], staged)
    s_tile = place_s._reinterpret(gl.bfloat16, [SLAB, K], _shared(K))
    ds_tile = place_ds._reinterpret(gl.bfloat16, [SLAB, K], _shared(K))
    # Rows of [C,V] operands: dO, dv, V', dV'; so [dO; dv] and [V'; anything] are 64 rows for a wgmma.
    stack = place_stack._reinterpret(gl.bfloat16, [SLABS, 4 * C, SLAB], _shared(SLAB))
    operands = place_s._reinterpret(gl.bfloat16, [2, 2 * C, K], _shared(K))
    keys, rows = operands.index(0), operands.index(1)
    staging = place_stack._reinterpret(gl.float32, [2 * C, K], staged)

    # T, S and dS come by TMA, all at once.
    t_tile = gl.allocate_shared_memory(gl.bfloat16, [C, C], _shared(C))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    row32 = scratch.to(gl.int32)
    mbarrier.expect(bars.index(0), C * C * 2)
    tma.async_copy_global_to_shared(t_desc, [row32 * C, 0], bars.index(0), t_tile)
    mbarrier.expect(bars.index(1), 2 * SLAB * K * 2)
    tma.async_copy_global_to_shared(s_desc, [row32 * V, 0], bars.index(1), s_tile)
    tma.async_copy_global_to_shared(ds_desc, [row32 * V, 0], bars.index(1), ds_tile)

    i_l = gl.arange(0, C, gl.SliceLayout(1, lines))[:, None]
    d_l = gl.arange(0, SLAB, gl.SliceLayout(0, lines))[None, :]
    at_v = (token * HV + head) * V
    at_new = scratch * (C * V)
    off_new = i_l * V + d_l
    for slab in gl.static_range(SLABS):
        tile_v = stack.index(slab)
        in_row_l = (start + i_l < T) & (d_l >= 0)
        async_copy.async_copy_global_to_shared(tile_v.slice(0, C), d_o_ptr + at_v + slab * SLAB + (i_l * (HV * V) + d_l), mask=in_row_l)
        async_copy.async_copy_global_to_shared(tile_v.slice(2 * C, C), v_new_ptr + at_new + slab * SLAB + off_new)
        async_copy.async_copy_global_to_shared(tile_v.slice(3 * C, C), d_v_new_ptr + at_new + slab * SLAB + off_new)
    async_copy.commit_group()

    m_row = gl.arange(0, 2 * C, gl.SliceLayout(1, square))
    m_i = m_row % C
    m_j = gl.arange(0, C, gl.SliceLayout(0, square))[None, :]
    if HAS_IDS:
        id_i = gl.load(ids_at + gl.minimum(start + m_i, T - 1))
        id_j = gl.load(ids_at + gl.minimum(start + gl.arange(0, C, gl.SliceLayout(0, square)), T - 1))
        id_before = gl.load(ids_at + gl.maximum(start - 1, 0))
        id_last = gl.load(ids_at + gl.minimum(start + C - 1, T - 1))
        a_row = gl.arange(0, 2 * C, gl.SliceLayout(1, wide)) % C
        enters = gl.load(ids_at + gl.minimum(start + a_row, T - 1)) == id_before

    # q, k, the gate and its sums within a tile.
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
    if FUSED:
        # The raw gate of rows behind the end: so low that sigmoid and its derivative are 0, whatever the bias.
        raw = gl.load(g_ptr + at_k + _offsets(i, HV * K, K, WARPS), mask=in_row, other=-1e30)
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
    else:
        raw = gl.load(g_ptr + at_k + _offsets(i, HV * K, K, WARPS), mask=in_row, other=0.0)
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
        d_new_right = stack.index(slab).slice(3 * C, C).load(gl.DotOperandLayout(1, small, 2))
        dv = mma_v2(t_left, d_new_right, gl.zeros([C, SLAB], gl.float32, small))
        stack.index(slab).slice(C, C).store(dv.to(gl.bfloat16))
    fence_async_shared()

    # [dO; dv] V'^T, masked by select: what stands above the diagonal or between documents is finite, and never multiplied.
    m = gl.zeros([2 * C, C], gl.float32, square)
    for slab in gl.static_range(SLABS):
        m = warpgroup_mma(stack.index(slab).slice(0, 2 * C), stack.index(slab).slice(2 * C, C).permute((1, 0)), m, use_acc=slab > 0)
    m_last = (m_i - m_row // C)[:, None]  # M1 with the diagonal, M2 without
    m = m * gl.where(m_row < C, 1.0, -1.0)[:, None]
    if HAS_IDS:
        m = gl.where(id_i[:, None] == id_j[None, :], m, 0.0)
    own = gl.where((m_j >= (m_i // TILE * TILE)[:, None]) & (m_j <= m_last), m, 0.0)  # pairs within a tile
    cross = gl.where(m_j < (m_i // TILE * TILE)[:, None], m, 0.0)  # row of tile 1, column of tile 0
    mixer = gl.allocate_shared_memory(gl.bfloat16, [2 * C, 2 * C], _shared(64))
    mixer.slice(0, C, dim=1).store(own.to(gl.bfloat16))
    mixer.slice(C, C, dim=1).store(cross.to(gl.bfloat16))

    # dv and dbeta out. dv and V' both carry beta: 2^60 keeps their product in reach of float32 for the smallest one.
    i_v = gl.arange(0, C, gl.SliceLayout(1, rows_v))
    d_v = gl.arange(0, SLAB, gl.SliceLayout(0, rows_v))
    in_row_v = (start + i_v < T)[:, None]
    off_v = i_v[:, None] * (HV * V) + d_v[None, :]
    d_beta = gl.zeros([C], gl.float32, gl.SliceLayout(1, rows_v))
    for slab in gl.static_range(SLABS):
        dv_out = stack.index(slab).slice(C, C).load(rows_v)
        gl.store(dv_ptr + at_v + slab * SLAB + off_v, dv_out, mask=in_row_v)
        d_beta += gl.sum((_float(dv_out) * 2.0**60) * _float(stack.index(slab).slice(2 * C, C).load(rows_v)), axis=1)
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    d_beta = gl.convert_layout(d_beta, one_each)
    i_b = gl.arange(0, C, one_each)
    beta = gl.load(beta_ptr + (token + i_b) * HV + head, mask=start + i_b < T, other=0.0).to(gl.float32)
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

    # The products with the states, and sum_V S dS.
    mbarrier.wait(bars.index(1), 0)
    out = gl.zeros([2 * C, K], gl.float32, wide)
    # sum_V S dS: a sixteenth of S^T dS in blocks of 16 channels, of which the diagonals count. 15 of 16 products are wasted, and yet
    # it takes 150 instructions of 3250 less than the sums in registers.
    diagonals: gl.constexpr = _diagonals(K, WARPS)
    both = gl.zeros([K // 16, 16, 16], gl.float32, diagonals)
    for slab in gl.static_range(SLABS):
        if slab > 0:
            gl.barrier()
            mbarrier.expect(bars.index(1), 2 * SLAB * K * 2)
            tma.async_copy_global_to_shared(s_desc, [row32 * V + slab * SLAB, 0], bars.index(1), s_tile)
            tma.async_copy_global_to_shared(ds_desc, [row32 * V + slab * SLAB, 0], bars.index(1), ds_tile)
            mbarrier.wait(bars.index(1), slab % 2)
        s_left = s_tile.reshape([SLAB, K // 16, 16]).permute((1, 2, 0)).load(gl.DotOperandLayout(0, diagonals, 2))
        ds_right = ds_tile.reshape([SLAB, K // 16, 16]).permute((1, 0, 2)).load(gl.DotOperandLayout(1, diagonals, 2))
        both = mma_v2(s_left, ds_right, both)
        out = warpgroup_mma(stack.index(slab).slice(2 * C, 2 * C), ds_tile, out, use_acc=slab > 0)
    place_ds.store(out)
    b_row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, diagonals)))[None, :, None]
    b_column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, diagonals)))[None, None, :]
    both_sum = gl.allocate_shared_memory(gl.float32, [K // 16, 16], plain)
    both_sum.store(gl.sum(gl.where(b_row == b_column, both, 0.0), axis=2))
    off_qk = _offsets(i, H * K, K, WARPS)
    q = gl.load(q_ptr + at_qk + off_qk, mask=in_row, other=0.0)  # once more: 16 registers less meanwhile
    k = gl.load(k_ptr + at_qk + off_qk, mask=in_row, other=0.0)
    acc = gl.zeros([2 * C, K], gl.float32, wide)
    for slab in gl.static_range(SLABS):
        if SLABS > 1:  # S once more from its first slab on
            gl.barrier()
            mbarrier.expect(bars.index(1), SLAB * K * 2)
            tma.async_copy_global_to_shared(s_desc, [row32 * V + slab * SLAB, 0], bars.index(1), s_tile)
            mbarrier.wait(bars.index(1), (SLABS + slab) % 2)
        acc = warpgroup_mma(stack.index(slab).slice(0, 2 * C), s_tile, acc, use_acc=slab > 0)
    staging.store(acc)  # 32 registers less for the next steps

    # Operands with decays.
    end0 = ends.slice(0, 1).load(per_tile)
    tile = gl.arange(0, 2, gl.SliceLayout(1, per_tile))[:, None]
    to_cross = gl.where(tile == 0, end0, -1e30)  # tile 1 is no column of a cross pair: factor 0
    exponent = _again(exponent)
    k_hat = _float(k)
    if FUSED:
        k_hat = k_hat * k_unit[:, :, None]
    keys.slice(0, C).store(_flat((k_hat * _exp2_minus(exponent)).to(gl.bfloat16), K, WARPS))
    keys.slice(C, C).store(_flat((k_hat * _exp2(to_cross[:, None, :] - exponent)).to(gl.bfloat16), K, WARPS))
    row_factor = _exp2(exponent)
    rows.slice(C, C).store(_flat((k_hat * row_factor).to(gl.bfloat16), K, WARPS))
    if FUSED:
        q_scale = (q_unit * SCALE)[:, :, None]
    else:
        q_scale = SCALE
    rows.slice(0, C).store(_flat((_float(q) * q_scale * row_factor).to(gl.bfloat16), K, WARPS))
    # From the start of the row's tile to the chunk's start. Rows of dv enter with a minus.
    entries = gl.allocate_shared_memory(gl.float32, [4, K], plain)
    entry = _exp2(gl.where(tile == 0, 0.0, end0) - SHIFT)
    entries.slice(0, 2).store(entry)
    entries.slice(2, 2).store(-entry)
    fence_async_shared()  # before the barrier that the loads below need
    acc4 = staging.load(wide).reshape([4, TILE, K])
    acc4 = acc4 * entries.load(gl.SliceLayout(1, acc4.type.layout))[:, None, :]
    acc = gl.convert_layout(acc4.reshape([2 * C, K]), wide, assert_trivial=True)
    if HAS_IDS:  # rows behind a boundary do not read the state
        acc = gl.where(enters[:, None], acc, 0.0)
    acc = warpgroup_mma(mixer, keys, acc)
    staging.store(acc)

    # A pair (i,j) adds the same to `later` of i as it takes from j's, and so cancels in dg of the tokens up to j: exactly, where both
    # are formed from the same rounded operands. With unrounded ones, at strong gates, dg was off by 1.4e-2 and d_bias by 5e-2; now
    # by 2e-3 and 1e-3.
    q, k, exponent = _again(q), _again(k), _again(exponent)
    d_q = _tiled(staging.slice(0, C), K, WARPS)
    later = d_q * _tiled(rows.slice(0, C), K, WARPS)
    d_q = d_q * _exp2(exponent)
    if FUSED:  # through the norm: (d_q - q^ <q^, d_q>) / |q|
        q_raw = _float(q)
        along = gl.sum(q_raw * d_q, axis=2) * q_unit * q_unit
        d_q = (d_q - q_raw * along[:, :, None]) * q_scale
    else:
        d_q = d_q * SCALE
    gl.store(dq_ptr + at_k + _offsets(i, HV * K, K, WARPS), d_q.to(gl.bfloat16), mask=in_row)
    d_row = _tiled(staging.slice(C, C), K, WARPS)
    later += d_row * _tiled(rows.slice(C, C), K, WARPS)
    d_k = d_row * _exp2(exponent)

    if HAS_IDS:
        leaves = gl.load(ids_at + gl.minimum(start + i, T - 1)) == id_last
    column = gl.zeros([2 * C, K], gl.float32, wide)
    column = warpgroup_mma(mixer.permute((1, 0)), rows, column, use_acc=False)
    staging.store(column)
    exponent = _again(exponent)
    d_own = _tiled(staging.slice(0, C), K, WARPS)
    later -= d_own * _tiled(keys.slice(0, C), K, WARPS)
    d_k += d_own * _exp2_minus(exponent)
    to_cross = gl.where(tile == 0, ends.slice(0, 1).load(per_tile), -1e30)
    d_cross = _tiled(staging.slice(C, C), K, WARPS)
    later -= d_cross * _tiled(keys.slice(C, C), K, WARPS)
    d_k += d_cross * _exp2(to_cross[:, None, :] - exponent)

    end0 = ends.slice(0, 1).load(per_tile)
    end1 = ends.slice(1, 1).load(per_tile)
    to_end = gl.where(tile == 0, end0 + end1, end1) + SHIFT
    d_out = _tiled(place_ds.slice(0, C), K, WARPS) * _exp2(to_end[:, None, :] - exponent)
    if HAS_IDS:
        d_out = gl.where(leaves[:, :, None], d_out, 0.0)
    d_k += d_out
    k_hat = _float(k)
    if FUSED:
        k_hat = k_hat * k_unit[:, :, None]
        d_k = (d_k - k_hat * gl.sum(k_hat * d_k, axis=2)[:, :, None]) * k_unit[:, :, None]
    gl.store(dk_ptr + at_k + _offsets(i, HV * K, K, WARPS), d_k.to(gl.bfloat16), mask=in_row)
    written = k_hat * d_out

    off_k = _offsets(i, HV * K, K, WARPS)
    if FUSED:
        raw = gl.load(g_ptr + at_k + off_k, mask=in_row, other=-1e30)

    # dg: sums over the rows behind (later) and before (written).
    later = _as(later, [GROUPS, C // GROUPS, K], groups)
    written = _as(written, [GROUPS, C // GROUPS, K], groups)
    both_totals = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, K], plain)
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
    both_totals.reshape([2, GROUPS, K]).store(others)
    d_g = _suffix(later, GROUPS, C // GROUPS, K) + (gl.associative_scan(written, 1, _add) - written)
    d_g += (
        both_totals.slice(0, GROUPS).load(gl.SliceLayout(1, groups)) + both_totals.slice(GROUPS, GROUPS).load(gl.SliceLayout(1, groups))
    )[:, None, :]
    d_g = _as(d_g, [2, TILE, K], tiles)
    if FUSED:
        if HAS_BIAS:
            offset = (gl.load(bias_ptr + head * K + d) * slope)[None, None, :]
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


class Gradients(NamedTuple):
    dq: jax.Array  # [B,T,HV,K] bfloat16, of the value heads: the caller sums a group's
    dk: jax.Array
    dv: jax.Array  # [B,T,HV,V] bfloat16
    dg: jax.Array  # [B,T,HV,K] in g's dtype; fused: of the raw gate
    dbeta: jax.Array  # [B,T,HV] in beta's dtype; fused: of the logits
    d_rate: jax.Array | None  # [B,HV,N] float32, of A_log by chunk; None without A_log
    d_bias: jax.Array | None  # [B,HV,N,K] float32, of dt_bias by chunk; None without dt_bias


# variant: warps, most registers a thread. 8 warps of 128 registers and 4 of 255 both are two programs on an SM.
VARIANTS = {"8 warps": (8, 128), "4 warps": (4, None)}


def grads(
    q, k, g, beta, A_log, dt_bias, ids, t, d_o, states, v_new, d_states, d_v_new,
    *, first: int, scale: float, lower_bound: float, fused: bool, out=None, variant: str = "8 warps",
) -> Gradients:  # fmt: skip
    """The gradients of the chunks first .. first + N - 1 of each row; N is that of the scratch arrays.

    q, k, d_o, t, states, v_new, d_states, d_v_new bfloat16; g, beta bfloat16 or float32; ids [B,T] int32 or None; A_log [HV],
    dt_bias [HV,K] float32 or None. fused: g is the raw gate and beta the logits, and the gradients go through norm, gate and sigmoid;
    else g is the log decay, in [lower_bound, 0]. out: Gradients of another window of the same row, whose token arrays are written to
    in place; without it the tokens outside the window are undefined.
    """
    batch, tokens, heads, K = q.shape
    value_heads, V, chunks = d_o.shape[2], d_o.shape[3], t.shape[2]
    warps, registers = VARIANTS[variant]
    if max(K, V) > 128:
        warps, registers = 8, None  # one program on an SM in any case; 4 warps would spill 5 KB a thread
    slab = min(V, _slab(K, V))
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
