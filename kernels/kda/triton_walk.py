"""The walks over the chunks of a sequence on Hopper: forward, forward that keeps what the backward pass needs, reverse, and summary.

One program walks one (row, walk, head, block of value columns) through its chunks. The state is kept transposed, [64 value columns, K], in
float32 accumulators of one group of 4 warps, with a bfloat16 copy in registers as left operand of the products; so the serial part of a
chunk is two products and two conversions. A further warp loads the next chunks through TMA into a ring of tiles, so the consumers never
wait for an address. GROUPS = 2 puts two such groups (128 columns) on one ring: the chunk's operands are read once for both, which pays
where the programs fill the card; the bits are the same, for columns do not mix.

Shapes: B rows, S walks a row, HV heads, N chunks of the window of C = 32 tokens, K, V channels. Prepared: neg_w, q_in, k_out [B,HV,N,C,K],
t, p [B,HV,N,C,C] bfloat16, decay [B,HV,N,K] float32. v, o, d_o [B,T,HV,V]; state, final [B,S,HV,K,V]; states, d_states [B,HV,N,V,K];
v_new, d_v_new [B,HV,N,C,V]; bounds [B,S,2] absolute chunk numbers, chunk `first` is the window's first.

    forward   V' = T V - W S     o = Q~ S + P V'     S+ = D S + K^^T V'
    reverse   dV' = P^T dO + K^ dS+     dS = D dS+ + Q~^T dO - W^T dV'

Tokens from T on are zero rows of the TMA tile (the descriptor's bound is T of that row), never read.
"""

import math

import jax
import jax.numpy as jnp
from triton.experimental import gluon  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon.language.nvidia.hopper import (  # pyright: ignore[reportMissingImports]
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import triton_launch

C = gl.constexpr(32)
COLUMNS = gl.constexpr(64)  # value columns of a group: the 64 rows of a wgmma


@gluon.constexpr_function
def _accumulator(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _left(columns):
    """Register left operand of a product with that many columns."""
    return gl.DotOperandLayout(0, _accumulator(columns), 2)


@gluon.constexpr_function
def _tile(columns):
    """A [rows, columns] bfloat16 tile in shared memory."""
    return gl.NVMMASharedLayout(min(2 * columns, 128), 16, 2)


@gluon.constexpr_function
def _rows(columns):
    """16 bytes a thread, rows of `columns` bfloat16, 4 warps."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def _rounded(x):
    """x in bfloat16, here and not later: without an order of its own the compiler moves the conversion below the products issued next,
    and ptxas then serialises those (C7517)."""
    return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=False, pack=2)


@gluon.jit
def _state_grid(K: gl.constexpr):
    """-> value column [64,1], key channel [1,K] of the state's elements."""
    layout: gl.constexpr = _accumulator(K)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))[:, None]
    channel = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    return column, channel


@gluon.jit
def _store_tokens(ptr, base, pitch, staging, valid):
    """The staged [C,64] -> C rows of 64 columns at base, row r where r < valid; 16 bytes a thread."""
    layout: gl.constexpr = _rows(COLUMNS)
    row = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    tile = staging.load(layout)
    gl.store(ptr + base + row.to(gl.int64) * pitch + column, tile, mask=(row < valid) & (column >= 0))


@gluon.jit
def _store_state(ptr, base, staging, K: gl.constexpr):
    """The staged state -> 64 rows of K at base, 16 bytes a thread."""
    layout: gl.constexpr = _rows(K)
    row = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))[:, None]
    channel = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    gl.store(ptr + base + (row * K + channel), staging.load(layout))


@gluon.jit
def _decay(slot, K: gl.constexpr):
    """The decay [1,K] in the layout of the state."""
    flat = slot._reinterpret(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return flat.load(gl.SliceLayout(0, _accumulator(K)))[None, :]


@gluon.jit
def _load(
    arrays, rings, place, step: gl.constexpr,
    K: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, READS_Q: gl.constexpr, READS_T: gl.constexpr, READS_P: gl.constexpr,
):  # fmt: skip
    """The loading warp: chunk begin + i * step of the window into slot i % STAGES."""
    neg_w, q_in, k_out, t, p, values, decay = arrays
    ring_w, ring_q, ring_k, ring_t, ring_p, ring_v, ring_d, full, empty = rings
    row, batch, value_column, value_token, begin, count, _, _ = place
    for i in range(count):
        stage = i % STAGES
        chunk = begin + i * step
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        tiles: gl.constexpr = 2 + READS_Q
        squares: gl.constexpr = READS_T + READS_P
        mbarrier.expect(bar, tiles * C * K * 2 + squares * C * C * 2 + GROUPS * C * COLUMNS * 2 + K * 4)
        token = (row + chunk) * C
        for group in gl.static_range(GROUPS):
            at = [batch, value_token + chunk * C, value_column + group * COLUMNS]
            tma.async_copy_global_to_shared(values, at, bar, ring_v.index(stage * GROUPS + group))
        if READS_T:
            tma.async_copy_global_to_shared(t, [token, 0], bar, ring_t.index(stage))
        tma.async_copy_global_to_shared(neg_w, [token, 0], bar, ring_w.index(stage))
        tma.async_copy_global_to_shared(k_out, [token, 0], bar, ring_k.index(stage))
        tma.async_copy_global_to_shared(decay, [row + chunk, 0], bar, ring_d.index(stage))
        if READS_Q:
            tma.async_copy_global_to_shared(q_in, [token, 0], bar, ring_q.index(stage))
        if READS_P:
            tma.async_copy_global_to_shared(p, [token, 0], bar, ring_p.index(stage))


@gluon.jit
def _copy_tile(ring, stage, array, token, COLS: gl.constexpr):
    """32 rows of scratch from row `token` by cp.async."""
    layout: gl.constexpr = _rows(COLS)
    row = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLS, gl.SliceLayout(0, layout))[None, :]
    async_copy.async_copy_global_to_shared(ring.index(stage), array + token * COLS + (row * COLS + column))


@gluon.jit
def _copy(
    arrays, rings, place, step: gl.constexpr,
    K: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, READS_Q: gl.constexpr, READS_T: gl.constexpr, READS_P: gl.constexpr,
):  # fmt: skip
    """_load by cp.async from pointers, for 4 warps (TMA = False)."""
    neg_w, q_in, k_out, t, p, values, decay = arrays
    ring_w, ring_q, ring_k, ring_t, ring_p, ring_v, ring_d, full, empty = rings
    scratch_row, batch, value_column, value_token, begin, count, T, pitch = place
    layout: gl.constexpr = _rows(COLUMNS)
    row = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    channel = gl.arange(0, K, gl.BlockedLayout([4], [32], [4], [0]))
    for i in range(count):
        stage = i % STAGES
        chunk = begin + i * step
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        at = value_token + chunk * C
        source = values + (batch.to(gl.int64) * T + at) * pitch + value_column
        valid = (at + row < T) & (column >= 0)
        for group in gl.static_range(GROUPS):
            tile = ring_v.index(stage * GROUPS + group).reshape([C, COLUMNS])
            async_copy.async_copy_global_to_shared(tile, source + row.to(gl.int64) * pitch + (column + group * COLUMNS), mask=valid)
        token = (scratch_row + chunk).to(gl.int64) * C
        if READS_T:
            _copy_tile(ring_t, stage, t, token, C)
        _copy_tile(ring_w, stage, neg_w, token, K)
        _copy_tile(ring_k, stage, k_out, token, K)
        flat = ring_d.index(stage)._reinterpret(gl.float32, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        async_copy.async_copy_global_to_shared(flat, decay + (scratch_row + chunk).to(gl.int64) * K + channel)
        if READS_Q:
            _copy_tile(ring_q, stage, q_in, token, K)
        if READS_P:
            _copy_tile(ring_p, stage, p, token, C)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def _forward(
    rings, stagings, arrays, place, GROUP: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    KEEP: gl.constexpr, WRITE_O: gl.constexpr, SUMMARY: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """Forward for the value columns of group GROUP."""
    ring_w, ring_q, ring_k, ring_t, ring_p, ring_v, ring_d, full, empty = rings
    initial, o, final, matrix, states, v_new = arrays
    walk, sequence, head, column, T, N, HV, first, begin, count = place
    staging = stagings[0].index(GROUP)
    new_staging = stagings[1].index(GROUP)
    state_staging = stagings[2].index(GROUP)
    column += GROUP * COLUMNS
    narrow: gl.constexpr = _accumulator(C)
    none = gl.zeros([COLUMNS, C], gl.float32, narrow)
    value, channel = _state_grid(K)
    value += column
    if SUMMARY:  # value columns [V | identity]
        state = gl.where(value - V == channel, 1.0, 0.0)
    else:
        state = gl.load(initial + walk * K * V + (channel * V + value))
    spot = ((sequence // HV) * T * HV + head) * V + column
    token = (first + begin).to(gl.int64) * C
    out = none
    for i in range(count):
        stage = i % STAGES
        state16 = _rounded(state)
        left = gl.convert_layout(state16, _left(C))
        if WRITE_O:
            out16 = _rounded(out)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        if not TMA:
            fence_async_shared()  # cp.async writes as an ordinary store does; the products read otherwise
        tile = ring_v.index(stage * GROUPS + GROUP).reshape([C, COLUMNS]).permute((1, 0))
        new = warpgroup_mma(tile, ring_t.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        new = warpgroup_mma(left, ring_w.index(stage).permute((1, 0)), new, is_async=True)
        # Beside these products: staging for the stores below, and the state's decay. ptxas says (C7517) that it adds a wait for the
        # decay; it puts it where the wait for `new` is anyway, after the multiplications, so it costs nothing.
        decay = _decay(ring_d.index(stage), K)
        if KEEP:
            state_staging.store(state16)
        if WRITE_O:
            staging.permute((1, 0)).store(out16)
        state = state * decay
        new = warpgroup_mma_wait(0, deps=[new])
        new16 = _rounded(new)
        change = gl.convert_layout(new16, _left(K))
        state = warpgroup_mma(change, ring_k.index(stage), state, is_async=True)
        if WRITE_O:
            out = warpgroup_mma(left, ring_q.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            out = warpgroup_mma(change, ring_p.index(stage).permute((1, 0)), out, is_async=True)
        if KEEP:
            new_staging.permute((1, 0)).store(new16)
        # The slot of the chunk before, all of whose products are done; here, where the barrier of 4 warps that this takes costs least.
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
        if WRITE_O:
            _store_tokens(o, spot + (token - C) * HV * V, HV * V, staging, gl.where(i > 0, C, 0))
        if KEEP:
            _store_state(states, ((sequence * N + begin + i) * V + column) * K, state_staging, K)
            _store_tokens(v_new, (sequence * N + begin + i) * C * V + column, V, new_staging, C)
        if WRITE_O:
            state, out = warpgroup_mma_wait(0, deps=[state, out])
        else:
            state = warpgroup_mma_wait(0, deps=[state])
        token += C
    if WRITE_O:
        staging.permute((1, 0)).store(_rounded(out))
        before = token - C
        _store_tokens(o, spot + before * HV * V, HV * V, staging, gl.where(count > 0, T - before, 0))
    if SUMMARY:
        if column < V:
            gl.store(final + walk * K * V + (channel * V + value), state)
        else:
            gl.store(matrix + walk * K * K + (channel * K + value - V), state)
    else:
        gl.store(final + walk * K * V + (channel * V + value), state)


@gluon.jit
def _reverse(
    rings, stagings, arrays, place, GROUP: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    """Reverse for the value columns of group GROUP; begin: last chunk of the walk in the window."""
    ring_w, ring_q, ring_k, _, ring_p, ring_v, ring_d, full, empty = rings
    d_final, d_initial, d_states, d_v_new = arrays
    walk, sequence, column, N, begin, count = place
    new_staging = stagings[0].index(GROUP)
    state_staging = stagings[1].index(GROUP)
    column += GROUP * COLUMNS
    narrow: gl.constexpr = _accumulator(C)
    none = gl.zeros([COLUMNS, C], gl.float32, narrow)
    value, channel = _state_grid(K)
    value += column
    state = gl.load(d_final + walk * K * V + (channel * V + value))
    for i in range(count):
        stage = i % STAGES
        chunk = sequence * N + begin - i
        state16 = _rounded(state)
        left = gl.convert_layout(state16, _left(C))
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        if not TMA:
            fence_async_shared()  # cp.async writes as an ordinary store does; the products read otherwise
        tile = ring_v.index(stage * GROUPS + GROUP).reshape([C, COLUMNS]).permute((1, 0))
        new = warpgroup_mma(tile, ring_p.index(stage), none, use_acc=False, is_async=True)
        new = warpgroup_mma(left, ring_k.index(stage).permute((1, 0)), new, is_async=True)
        decay = _decay(ring_d.index(stage), K)
        state_staging.store(state16)
        state = state * decay
        new = warpgroup_mma_wait(0, deps=[new])
        new16 = _rounded(new)
        change = gl.convert_layout(new16, _left(K))
        state = warpgroup_mma(tile, ring_q.index(stage), state, is_async=True)
        state = warpgroup_mma(change, ring_w.index(stage), state, is_async=True)
        new_staging.permute((1, 0)).store(new16)
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
        _store_state(d_states, (chunk * V + column) * K, state_staging, K)
        _store_tokens(d_v_new, chunk * C * V + column, V, new_staging, C)
        state = warpgroup_mma_wait(0, deps=[state])
    gl.store(d_initial + walk * K * V + (channel * V + value), state)


@gluon.jit
def _place(bounds, S, HV, first, BLOCKS: gl.constexpr):
    """-> block of value columns, head, row, walk [B,S,HV], sequence [B,HV], begin (chunk of the window), count of this program.
    The blocks of one head are neighbours, so that its operands come from L2 for all but one."""
    program = gl.program_id(0)
    block = program % BLOCKS
    head = (program // BLOCKS) % HV
    part = program // BLOCKS // HV  # of [B,S]
    batch = part // S
    begin = gl.load(bounds + 2 * part)
    count = gl.maximum(gl.load(bounds + 2 * part + 1) - begin, 0)
    return block, head, batch, (part * HV + head).to(gl.int64), (batch * HV + head).to(gl.int64), begin - first, count


@gluon.jit
def _ring(columns: gl.constexpr, SLOTS: gl.constexpr):
    return gl.allocate_shared_memory(gl.bfloat16, [SLOTS, C, columns], _tile(columns))


@gluon.jit
def _value_rings(K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Of value tiles, one a group, and of decays."""
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, 1, C, COLUMNS], gl.NVMMASharedLayout(128, 16, 3))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], gl.NVMMASharedLayout(0, 32, 2))
    return values, decays


@gluon.jit
def _state_staging(K: gl.constexpr, GROUPS: gl.constexpr):
    return gl.allocate_shared_memory(gl.bfloat16, [GROUPS, COLUMNS, K], _tile(K))


@gluon.jit
def _bars(STAGES: gl.constexpr, GROUPS: gl.constexpr, TMA: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 if TMA else 128)  # cp.async: each of its threads arrives
        mbarrier.init(empty.index(i), count=GROUPS)
    return full, empty


@gluon.jit
def _walk_forward(
    loaded, arrays, bounds, T, N, HV, S, first, K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    KEEP: gl.constexpr, WRITE_O: gl.constexpr, SUMMARY: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    total: gl.constexpr = V + K if SUMMARY else V
    block, head, batch, walk, sequence, begin, count = _place(bounds, S, HV, first, total // (COLUMNS * GROUPS))
    ring_w = _ring(K, STAGES)
    ring_k = _ring(K, STAGES)
    ring_t = _ring(C, STAGES)
    ring_q = _ring(K, STAGES) if WRITE_O else ring_w
    ring_p = _ring(C, STAGES) if WRITE_O else ring_t
    ring_v, ring_d = _value_rings(K, STAGES, GROUPS)
    full, empty = _bars(STAGES, GROUPS, TMA)
    rings = (ring_w, ring_q, ring_k, ring_t, ring_p, ring_v, ring_d, full, empty)
    # A buffer that a kernel does not have is another one here, and not used.
    staging = _ring(COLUMNS, GROUPS) if WRITE_O else ring_w
    new_staging = _ring(COLUMNS, GROUPS) if KEEP else ring_w
    state_staging = _state_staging(K, GROUPS) if KEEP else ring_w
    stagings = (staging, new_staging, state_staging)
    column = block * (COLUMNS * GROUPS)
    value_token = first * C
    if SUMMARY:  # identity columns have no values: a token outside gives zeros
        value_token = gl.where(column < V, value_token, 1 << 30)
    source = (sequence.to(gl.int32) * N, batch, head * V + column, value_token, begin, count, T, HV * V)
    place = (walk, sequence, head, column, T, N, HV, first, begin, count)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_forward, (rings, stagings, arrays, place, 0, K, V, GROUPS, STAGES, KEEP, WRITE_O, SUMMARY, TMA)),
                (_load if TMA else _copy, (loaded, rings, source, 1, K, GROUPS, STAGES, WRITE_O, True, WRITE_O)),
            ],
            [1 if TMA else 4],
        )
    else:
        gl.warp_specialize(
            [
                (_forward, (rings, stagings, arrays, place, 0, K, V, GROUPS, STAGES, KEEP, WRITE_O, SUMMARY, TMA)),
                (_forward, (rings, stagings, arrays, place, 1, K, V, GROUPS, STAGES, KEEP, WRITE_O, SUMMARY, TMA)),
                (_load if TMA else _copy, (loaded, rings, source, 1, K, GROUPS, STAGES, WRITE_O, True, WRITE_O)),
            ],
            [4, 1 if TMA else 4],
            # Triton gives the first group what is left, at most 256; the three are to stay below 504, the registers of 3 x 4 warps.
            [216 if TMA else 184, 24 if TMA else 72],
        )


@gluon.jit
def reverse_kernel(
    neg_w, q_in, k_out, p, d_o, decay, d_final, bounds, T, N, HV, S, first, d_initial, d_states, d_v_new,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    block, head, batch, walk, sequence, begin, count = _place(bounds, S, HV, first, V // (COLUMNS * GROUPS))
    ring_w = _ring(K, STAGES)
    ring_q = _ring(K, STAGES)
    ring_k = _ring(K, STAGES)
    ring_p = _ring(C, STAGES)
    ring_v, ring_d = _value_rings(K, STAGES, GROUPS)
    full, empty = _bars(STAGES, GROUPS, TMA)
    rings = (ring_w, ring_q, ring_k, ring_p, ring_p, ring_v, ring_d, full, empty)
    stagings = (_ring(COLUMNS, GROUPS), _state_staging(K, GROUPS))
    column = block * (COLUMNS * GROUPS)
    last = begin + count - 1
    loaded = (neg_w, q_in, k_out, p, p, d_o, decay)
    source = (sequence.to(gl.int32) * N, batch, head * V + column, first * C, last, count, T, HV * V)
    arrays = (d_final, d_initial, d_states, d_v_new)
    place = (walk, sequence, column, N, last, count)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_reverse, (rings, stagings, arrays, place, 0, K, V, GROUPS, STAGES, TMA)),
                (_load if TMA else _copy, (loaded, rings, source, -1, K, GROUPS, STAGES, True, False, True)),
            ],
            [1 if TMA else 4],
        )
    else:
        gl.warp_specialize(
            [
                (_reverse, (rings, stagings, arrays, place, 0, K, V, GROUPS, STAGES, TMA)),
                (_reverse, (rings, stagings, arrays, place, 1, K, V, GROUPS, STAGES, TMA)),
                (_load if TMA else _copy, (loaded, rings, source, -1, K, GROUPS, STAGES, True, False, True)),
            ],
            [4, 1 if TMA else 4],
            [216 if TMA else 184, 24 if TMA else 72],  # see _walk_forward
        )


# Entry points: one for each set of outputs, for a kernel's outputs are its last parameters. An array that a kernel does not have is
# another one here, and not used.


@gluon.jit
def forward_kernel(
    neg_w, q_in, k_out, t, p, v, decay, initial, bounds, T, N, HV, S, first, o, final,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    loaded = (neg_w, q_in, k_out, t, p, v, decay)
    arrays = (initial, o, final, final, o, o)
    _walk_forward(loaded, arrays, bounds, T, N, HV, S, first, K, V, GROUPS, STAGES, False, True, False, TMA)


@gluon.jit
def forward_keep_kernel(
    neg_w, q_in, k_out, t, p, v, decay, initial, bounds, T, N, HV, S, first, o, final, states, v_new,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    loaded = (neg_w, q_in, k_out, t, p, v, decay)
    arrays = (initial, o, final, final, states, v_new)
    _walk_forward(loaded, arrays, bounds, T, N, HV, S, first, K, V, GROUPS, STAGES, True, True, False, TMA)


@gluon.jit
def keep_kernel(
    neg_w, k_out, t, v, decay, initial, bounds, T, N, HV, S, first, final, states, v_new,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    loaded = (neg_w, neg_w, k_out, t, t, v, decay)
    arrays = (initial, states, final, final, states, v_new)
    _walk_forward(loaded, arrays, bounds, T, N, HV, S, first, K, V, GROUPS, STAGES, True, False, False, TMA)


@gluon.jit
def final_kernel(
    neg_w, k_out, t, v, decay, initial, bounds, T, N, HV, S, first, final,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    loaded = (neg_w, neg_w, k_out, t, t, v, decay)
    arrays = (initial, final, final, final, final, final)
    _walk_forward(loaded, arrays, bounds, T, N, HV, S, first, K, V, GROUPS, STAGES, False, False, False, TMA)


@gluon.jit
def summary_kernel(
    neg_w, k_out, t, v, decay, bounds, T, N, HV, S, first, add, matrix,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TMA: gl.constexpr,
):  # fmt: skip
    loaded = (neg_w, neg_w, k_out, t, t, v, decay)
    arrays = (add, add, add, matrix, add, add)
    _walk_forward(loaded, arrays, bounds, T, N, HV, S, first, K, V, GROUPS, STAGES, False, False, True, TMA)


SHARED_BYTES = 227 * 1024  # of a program, Hopper
MULTIPROCESSORS = 132
TMA = True  # False: the loads by cp.async from pointers, for a jax-triton whose TMA descriptors do not work


def _shape(walks, columns, k, *, tiles, squares, keeps):
    """-> constexprs GROUPS, STAGES, TMA. Functions of sizes alone, never of T: a prefix takes the same program.

    columns: sizes of the parts of the value columns. Two groups when one-group programs would fill the card anyway (at K = V = 128
    and 8k tokens a sixth faster with 96 heads, a third slower with 32). Not at K = 256, where the state alone takes 128 registers of
    the 168 a thread then has.
    """
    pairs = k <= 128 and math.gcd(*columns) % 128 == 0
    groups = 2 if pairs and walks * (sum(columns) // 64) >= MULTIPROCESSORS else 1
    stage = tiles * 32 * k * 2 + squares * 32 * 32 * 2 + groups * 32 * 64 * 2 + k * 4
    fixed = groups * 2 * 32 * 64 * 2 + keeps * groups * 64 * k * 2 + 1024
    return {"GROUPS": groups, "STAGES": min(4, (SHARED_BYTES - fixed) // stage), "TMA": TMA}


def _operands(p, values, names):
    """What the loading warp reads: `names` of Prepared, values [B,T,HV,V], decay; as TMA descriptors, of C rows of scratch each."""
    scratch = [getattr(p, x) for x in names]
    if not TMA:
        return *scratch, values, p.decay
    tiles = []
    for x in scratch:
        columns = x.shape[-1]
        layout = gl.NVMMASharedLayout(min(2 * columns, 128), 16, 2)
        tiles.append(triton_launch.descriptor(x.reshape(-1, columns), (32, columns), layout))
    b, t, hv, d = values.shape
    rows = triton_launch.descriptor(values.reshape(b, t, hv * d), (1, 32, 64), gl.NVMMASharedLayout(128, 16, 3))
    k = p.decay.shape[-1]
    decay = triton_launch.descriptor(p.decay.reshape(-1, k), (1, k), gl.NVMMASharedLayout(0, 32, 2))
    return *tiles, rows, decay


def walk_forward(p, v, state, bounds, *, first, out=None, keep=False, write_o=True):
    """-> o [B,T,HV,V] or None, final [B,S,HV,K,V], states [B,HV,N,V,K] and v_new [B,HV,N,C,V] with keep, else None.

    p: Prepared of the window whose first chunk is `first`. bounds [B,S,2]: the chunks [begin, end) of each walk, inside the window;
    none: final = state. Rows of o outside the walks are not written; out: o of an earlier window, taken over in place.
    """
    b, t, hv, d = v.shape
    s, k, n = state.shape[1], p.neg_w.shape[-1], p.t.shape[2]
    final = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    o = jax.ShapeDtypeStruct(v.shape, jnp.bfloat16)
    kept = (jax.ShapeDtypeStruct((b, hv, n, d, k), jnp.bfloat16), jax.ShapeDtypeStruct((b, hv, n, 32, d), jnp.bfloat16)) if keep else ()
    shape = _shape(b * s * hv, (d,), k, tiles=2 + write_o, squares=1 + write_o, keeps=keep)
    launch = dict(grid=(b * s * hv * (d // (64 * shape["GROUPS"])),), num_warps=4, K=k, V=d, **shape)
    if not write_o:
        operands = *_operands(p, v, ("neg_w", "k_out", "t")), state, bounds, t, n, hv, s, first
        final, *kept = triton_launch.call(keep_kernel if keep else final_kernel, *operands, out_type=(final, *kept), **launch)
        return None, final, *(kept or (None, None))
    operands = *_operands(p, v, ("neg_w", "q_in", "k_out", "t", "p")), state, bounds, t, n, hv, s, first
    if out is not None:
        launch |= dict(o=out, aliases={"o": 0})
    kernel = forward_keep_kernel if keep else forward_kernel
    o, final, *kept = triton_launch.call(kernel, *operands, out_type=(o, final, *kept), **launch)
    return o, final, *(kept or (None, None))


def walk_reverse(p, d_o, d_state, bounds, *, first):
    """-> d_initial [B,S,HV,K,V], d_states [B,HV,N,V,K] (of the state after each chunk), d_v_new [B,HV,N,C,V].

    d_state: of the walks' final states. Chunks outside the walks are not written.
    """
    b, t, hv, d = d_o.shape
    s, k, n = d_state.shape[1], p.neg_w.shape[-1], p.t.shape[2]
    shape = _shape(b * s * hv, (d,), k, tiles=3, squares=1, keeps=True)
    outputs = (
        jax.ShapeDtypeStruct(d_state.shape, jnp.float32),
        jax.ShapeDtypeStruct((b, hv, n, d, k), jnp.bfloat16),
        jax.ShapeDtypeStruct((b, hv, n, 32, d), jnp.bfloat16),
    )
    operands = *_operands(p, d_o, ("neg_w", "q_in", "k_out", "p")), d_state, bounds, t, n, hv, s, first
    grid = (b * s * hv * (d // (64 * shape["GROUPS"])),)
    return triton_launch.call(reverse_kernel, *operands, out_type=outputs, grid=grid, num_warps=4, K=k, V=d, **shape)


def walk_summary(p, v, bounds, *, first):
    """-> add [B,S,HV,K,V], matrix [B,S,HV,K,K] float32: final = matrix @ state + add of each walk."""
    b, t, hv, d = v.shape
    s, k, n = bounds.shape[1], p.neg_w.shape[-1], p.t.shape[2]
    shape = _shape(b * s * hv, (d, k), k, tiles=2, squares=1, keeps=False)
    outputs = tuple(jax.ShapeDtypeStruct((b, s, hv, k, x), jnp.float32) for x in (d, k))
    operands = *_operands(p, v, ("neg_w", "k_out", "t")), bounds, t, n, hv, s, first
    grid = (b * s * hv * ((d + k) // (64 * shape["GROUPS"])),)
    return triton_launch.call(summary_kernel, *operands, out_type=outputs, grid=grid, num_warps=4, K=k, V=d, **shape)
