"""The Gluon kernels of the walks over the chunks; launched, explained and shaped in triton_walk.py, whose legend holds here.

    forward   V' = T V - W S     o = Q~ S + P V'     S+ = D S + K^^T V'
    reverse   dV' = P^T dO + K^ dS+     dS = D dS+ + Q~^T dO - W^T dV'

Parts of a program, each in warps of its own, which talk through rings of shared memory and mbarriers:
    _load      one warp, by TMA: slot i % STAGES of the rings `full` for chunk i, after it is `empty` of chunk i - STAGES
    _forward_with_o, _forward, _reverse      4 warps for each group of 64 value columns, the serial part
    _store_kept      2 warps: what _forward and _reverse leave in slot i % SLOTS of the stagings, `ready` to `free`
"""

from triton.experimental import gluon  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon.language.nvidia.hopper import (  # pyright: ignore[reportMissingImports]
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .triton_barriers import close_barriers, open_barriers

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
def _rows(columns, warps):
    """16 bytes a thread, rows of `columns` bfloat16."""
    lanes = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


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
def _store_rows(ptr, pitch, tile, ROWS: gl.constexpr, columns: gl.constexpr, valid, WARPS: gl.constexpr = 2):
    """ROWS staged rows to rows at ptr, row r where r < valid; 16 bytes a thread."""
    layout: gl.constexpr = _rows(columns, WARPS)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, columns, gl.SliceLayout(0, layout))[None, :]
    gl.store(ptr + row.to(gl.int64) * pitch + column, tile.load(layout), mask=(row < valid) & (column >= 0))


@gluon.jit
def _store_kept(staged, place, states, v_new, step: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr):
    """The storing warps of a walk that keeps the state and V' of each chunk."""
    new_staging, state_staging, ready, free = staged
    chunk, column, count = place
    for i in range(count):
        slot = i % SLOTS
        mbarrier.wait(ready.index(slot), (i // SLOTS) & 1)
        at = states + (chunk * V + column) * K
        tile = state_staging.index(slot)
        for part in gl.static_range(4):  # not all at once: these warps have few registers
            _store_rows(at + part * 16 * K, K, tile.slice(part * 16, 16), 16, K, 16)
        _store_rows(v_new + chunk * C * V + column, V, new_staging.index(slot), C, COLUMNS, C)
        mbarrier.arrive(free.index(slot))
        chunk += step


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
    row, batch, value_column, value_token, begin, count = place
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
def _forward_with_o(
    rings, staging, arrays, place, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Forward for the value columns of group GROUP, its output included.

    Other warps for the output were slower (one H200, T = 8k: 0.185 ms against 0.141 with 16 heads): here its products fill the time in
    which the conversions of the next chunk cannot start anyway.
    """
    ring_w, ring_q, ring_k, ring_t, ring_p, ring_v, ring_d, full, empty = rings
    initial, o, final = arrays
    walk, column, spot, token, pitch, T, count = place
    column += GROUP * COLUMNS
    spot += GROUP * COLUMNS
    narrow: gl.constexpr = _accumulator(C)
    none = gl.zeros([COLUMNS, C], gl.float32, narrow)
    value, channel = _state_grid(K)
    value += column
    state = gl.load(initial + walk * K * V + (channel * V + value))
    out = none
    for i in range(count):
        stage = i % STAGES
        left = gl.convert_layout(_rounded(state), _left(C))
        out16 = _rounded(out)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        tile = ring_v.index(stage * GROUPS + GROUP).reshape([C, COLUMNS]).permute((1, 0))
        new = warpgroup_mma(tile, ring_t.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        new = warpgroup_mma(left, ring_w.index(stage).permute((1, 0)), new, is_async=True)
        # Beside these products: staging of the output of the chunk before, and the state's decay. ptxas says (C7517) that it adds a wait
        # for the decay; it puts it where the wait for `new` is anyway, after the multiplications, so it costs nothing.
        decay = _decay(ring_d.index(stage), K)
        staging.permute((1, 0)).store(out16)
        state = state * decay
        new = warpgroup_mma_wait(0, deps=[new])
        change = gl.convert_layout(_rounded(new), _left(K))
        state = warpgroup_mma(change, ring_k.index(stage), state, is_async=True)
        out = warpgroup_mma(left, ring_q.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        out = warpgroup_mma(change, ring_p.index(stage).permute((1, 0)), out, is_async=True)
        # The slot of the chunk before, all of whose products are done; here, where the barrier of 4 warps that this takes costs least.
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
        _store_rows(o + spot + (token - C) * pitch, pitch, staging, C, COLUMNS, gl.where(i > 0, C, 0), 4)
        state, out = warpgroup_mma_wait(0, deps=[state, out])
        token += C
    staging.permute((1, 0)).store(_rounded(out))
    before = token - C
    _store_rows(o + spot + before * pitch, pitch, staging, C, COLUMNS, gl.where(count > 0, T - before, 0), 4)
    gl.store(final + walk * K * V + (channel * V + value), state)


@gluon.jit
def _forward(
    rings, staged, arrays, place, GROUP: gl.constexpr,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """Forward without output for the value columns of group GROUP. KEEP: state and V' are left for _store_kept, and the final state is
    nobody's; else the summary of the value columns [V | identity]."""
    ring_w, _, ring_k, ring_t, _, ring_v, ring_d, full, empty = rings
    token_staging, state_staging, ready, free = staged
    initial, add, matrix = arrays
    walk, column, count = place
    column += GROUP * COLUMNS
    narrow: gl.constexpr = _accumulator(C)
    none = gl.zeros([COLUMNS, C], gl.float32, narrow)
    value, channel = _state_grid(K)
    value += column
    if KEEP:
        state = gl.load(initial + walk * K * V + (channel * V + value))
    else:
        state = gl.where(value - V == channel, 1.0, 0.0)
    gl.barrier()
    for i in range(count):
        stage = i % STAGES
        slot = i % SLOTS
        state16 = _rounded(state)
        left = gl.convert_layout(state16, _left(C))
        if KEEP:
            mbarrier.wait(free.index(slot), ((i // SLOTS) & 1) ^ 1)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        tile = ring_v.index(stage * GROUPS + GROUP).reshape([C, COLUMNS]).permute((1, 0))
        new = warpgroup_mma(tile, ring_t.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        new = warpgroup_mma(left, ring_w.index(stage).permute((1, 0)), new, is_async=True)
        # Beside these products, and with the barrier not in between their instructions, which would wait for loads then: staging for
        # the storing warps, and the state's decay (C7517: see _forward_with_o).
        gl.barrier()
        decay = _decay(ring_d.index(stage), K)
        if KEEP:
            state_staging.index(slot).store(state16)
        state = state * decay
        new = warpgroup_mma_wait(0, deps=[new])
        new16 = _rounded(new)
        change = gl.convert_layout(new16, _left(K))
        state = warpgroup_mma(change, ring_k.index(stage), state, is_async=True)
        # Beside the products too, for each of these takes a barrier of the 4 warps: what is staged, the slot of the chunk before, all of
        # whose products are done, and the barrier that Triton wants between an arrival and the next wait.
        if KEEP:
            token_staging.index(slot).permute((1, 0)).store(new16)
            mbarrier.arrive(ready.index(slot))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
        gl.barrier()
        state = warpgroup_mma_wait(0, deps=[state])
    if not KEEP:
        if column < V:
            gl.store(add + walk * K * V + (channel * V + value), state)
        else:
            gl.store(matrix + walk * K * K + (channel * K + value - V), state)


@gluon.jit
def _reverse(rings, staged, arrays, place, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, KEEP: gl.constexpr):
    """Reverse for 64 value columns. KEEP: leaves the state and dV' of each chunk to the storing warps."""
    ring_w, ring_q, ring_k, _, ring_p, ring_v, ring_d, full, empty = rings
    token_staging, state_staging, ready, free = staged
    d_final, d_initial = arrays
    walk, column, count = place
    narrow: gl.constexpr = _accumulator(C)
    none = gl.zeros([COLUMNS, C], gl.float32, narrow)
    value, channel = _state_grid(K)
    value += column
    state = gl.load(d_final + walk * K * V + (channel * V + value))
    gl.barrier()
    for i in range(count):
        stage = i % STAGES
        slot = i % SLOTS
        state16 = _rounded(state)
        left = gl.convert_layout(state16, _left(C))
        if KEEP:
            mbarrier.wait(free.index(slot), ((i // SLOTS) & 1) ^ 1)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        tile = ring_v.index(stage).reshape([C, COLUMNS]).permute((1, 0))
        new = warpgroup_mma(tile, ring_p.index(stage), none, use_acc=False, is_async=True)
        new = warpgroup_mma(left, ring_k.index(stage).permute((1, 0)), new, is_async=True)
        gl.barrier()  # see _forward
        decay = _decay(ring_d.index(stage), K)
        if KEEP:
            state_staging.index(slot).store(state16)
        state = state * decay
        new = warpgroup_mma_wait(0, deps=[new])
        new16 = _rounded(new)
        change = gl.convert_layout(new16, _left(K))
        state = warpgroup_mma(tile, ring_q.index(stage), state, is_async=True)
        state = warpgroup_mma(change, ring_w.index(stage), state, is_async=True)
        if KEEP:
            token_staging.index(slot).permute((1, 0)).store(new16)
            mbarrier.arrive(ready.index(slot))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=i > 0)
        gl.barrier()
        state = warpgroup_mma_wait(0, deps=[state])
    gl.store(d_initial + walk * K * V + (channel * V + value), state)


@gluon.jit
def _place(program, bounds, S, HV, first, BLOCKS: gl.constexpr):
    """-> block of value columns, head, row, walk [B,S,HV], sequence [B,HV], begin (chunk of the window), count of this program.
    The blocks of one head are neighbours, so that its operands come from L2 for all but one."""
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
def _state_staging(K: gl.constexpr, SLOTS: gl.constexpr):
    return gl.allocate_shared_memory(gl.bfloat16, [SLOTS, COLUMNS, K], _tile(K))


@gluon.jit
def _value_rings(K: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """Of value tiles, one a group, and of decays."""
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, 1, C, COLUMNS], gl.NVMMASharedLayout(128, 16, 3))
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], gl.NVMMASharedLayout(0, 32, 2))
    return values, decays


# A buffer or an array that a kernel does not have is another one here, and not used.


@gluon.jit
def forward_kernel(
    neg_w, q_in, k_out, t, p, v, decay, initial, bounds, T, N, HV, S, first, o, final,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    block, head, batch, walk, sequence, begin, count = _place(gl.program_id(0), bounds, S, HV, first, V // (COLUMNS * GROUPS))
    column = block * (COLUMNS * GROUPS)
    full, empty = open_barriers(STAGES, 1), open_barriers(STAGES, GROUPS)
    values, decays = _value_rings(K, STAGES, GROUPS)
    rings = (_ring(K, STAGES), _ring(K, STAGES), _ring(K, STAGES), _ring(C, STAGES), _ring(C, STAGES), values, decays, full, empty)
    staging = _ring(COLUMNS, GROUPS)
    source = (sequence.to(gl.int32) * N, batch, head * V + column, first * C, begin, count)
    spot = (batch.to(gl.int64) * T * HV + head) * V + column
    token = (first + begin).to(gl.int64) * C
    arrays, place = (initial, o, final), (walk, column, spot, token, HV * V, T, count)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_forward_with_o, (rings, staging.index(0), arrays, place, 0, K, V, GROUPS, STAGES)),
                (_load, ((neg_w, q_in, k_out, t, p, v, decay), rings, source, 1, K, GROUPS, STAGES, True, True, True)),
            ],
            [1],
        )
    else:
        gl.warp_specialize(
            [
                (_forward_with_o, (rings, staging.index(0), arrays, place, 0, K, V, GROUPS, STAGES)),
                (_forward_with_o, (rings, staging.index(1), arrays, place, 1, K, V, GROUPS, STAGES)),
                (_load, ((neg_w, q_in, k_out, t, p, v, decay), rings, source, 1, K, GROUPS, STAGES, True, True, True)),
            ],
            [4, 1],
            # Triton gives the first group what is left, at most 256; the three are to stay below 504, the registers of 3 x 4 warps.
            [216, 24],
        )
    close_barriers(full, STAGES)
    close_barriers(empty, STAGES)


@gluon.jit
def summary_kernel(
    neg_w, k_out, t, v, decay, bounds, T, N, HV, S, first, add, matrix,
    K: gl.constexpr, V: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    block, head, batch, walk, sequence, begin, count = _place(gl.program_id(0), bounds, S, HV, first, (V + K) // (COLUMNS * GROUPS))
    column = block * (COLUMNS * GROUPS)
    full, empty = open_barriers(STAGES, 1), open_barriers(STAGES, GROUPS)
    values, decays = _value_rings(K, STAGES, GROUPS)
    ring_w, ring_t = _ring(K, STAGES), _ring(C, STAGES)
    rings = (ring_w, ring_w, _ring(K, STAGES), ring_t, ring_t, values, decays, full, empty)
    staged = (ring_w, ring_w, full, empty)
    # Identity columns have no values: a token outside gives zeros.
    value_token = gl.where(column < V, first * C, 1 << 30)
    source = (sequence.to(gl.int32) * N, batch, head * V + column, value_token, begin, count)
    arrays, place = (add, add, matrix), (walk, column, count)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_forward, (rings, staged, arrays, place, 0, K, V, GROUPS, STAGES, 1, False)),
                (_load, ((neg_w, neg_w, k_out, t, t, v, decay), rings, source, 1, K, GROUPS, STAGES, False, True, False)),
            ],
            [1],
            [56],
        )
    else:
        gl.warp_specialize(
            [
                (_forward, (rings, staged, arrays, place, 0, K, V, GROUPS, STAGES, 1, False)),
                (_forward, (rings, staged, arrays, place, 1, K, V, GROUPS, STAGES, 1, False)),
                (_load, ((neg_w, neg_w, k_out, t, t, v, decay), rings, source, 1, K, GROUPS, STAGES, False, True, False)),
            ],
            [4, 1],
            [216, 56],
        )
    close_barriers(full, STAGES)
    close_barriers(empty, STAGES)


@gluon.jit
def reverse_kernel(
    neg_w, q_in, k_out, p, d_o, decay, d_final, bounds, T, N, HV, S, first, d_initial,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    block, head, batch, walk, sequence, begin, count = _place(gl.program_id(0), bounds, S, HV, first, V // COLUMNS)
    column = block * COLUMNS
    full, empty = open_barriers(STAGES, 1), open_barriers(STAGES, 1)
    values, decays = _value_rings(K, STAGES, 1)
    ring_w, ring_p = _ring(K, STAGES), _ring(C, STAGES)
    rings = (ring_w, _ring(K, STAGES), _ring(K, STAGES), ring_p, ring_p, values, decays, full, empty)
    staged = (ring_w, ring_w, full, empty)
    source = (sequence.to(gl.int32) * N, batch, head * V + column, first * C, begin + count - 1, count)
    gl.warp_specialize(
        [
            (_reverse, (rings, staged, (d_final, d_initial), (walk, column, count), K, V, STAGES, 1, False)),
            (_load, ((neg_w, q_in, k_out, p, p, d_o, decay), rings, source, -1, K, 1, STAGES, True, False, True)),
        ],
        [1],
        [56],
    )
    close_barriers(full, STAGES)
    close_barriers(empty, STAGES)


@gluon.jit
def _consume_either(
    back, rings, staged, forward, reverse, place, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr
):
    if back:
        _reverse(rings, staged, reverse, place, K, V, STAGES, SLOTS, True)
    else:
        _forward(rings, staged, forward, place, 0, K, V, 1, STAGES, SLOTS, True)


@gluon.jit
def _store_either(back, staged, place, states, v_new, d_states, d_v_new, K: gl.constexpr, V: gl.constexpr, SLOTS: gl.constexpr):
    if back:
        _store_kept(staged, place, d_states, d_v_new, -1, K, V, SLOTS)
    else:
        _store_kept(staged, place, states, v_new, 1, K, V, SLOTS)


@gluon.jit
def _load_either(back, forward, reverse, rings, source, K: gl.constexpr, STAGES: gl.constexpr):
    if back:
        _load(reverse, rings, source, -1, K, 1, STAGES, True, False, True)
    else:
        _load(forward, rings, source, 1, K, 1, STAGES, False, True, False)


@gluon.jit
def both_kernel(
    neg_w, q_in, k_out, t, p, v, d_o, decay, initial, d_final, bounds, T, N, HV, S, first, states, v_new, d_initial, d_states, d_v_new,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    # The programs of a head's columns stay neighbours, see _place.
    blocks: gl.constexpr = V // COLUMNS
    half = gl.program_id(0) // blocks
    back = half % 2 == 1
    program = half // 2 * blocks + gl.program_id(0) % blocks
    block, head, batch, walk, sequence, begin, count = _place(program, bounds, S, HV, first, blocks)
    column = block * COLUMNS
    full, empty = open_barriers(STAGES, 1), open_barriers(STAGES, 1)
    values, decays = _value_rings(K, STAGES, 1)
    square = _ring(C, STAGES)  # t forward, p in reverse
    rings = (_ring(K, STAGES), _ring(K, STAGES), _ring(K, STAGES), square, square, values, decays, full, empty)
    ready, free = open_barriers(SLOTS, 1), open_barriers(SLOTS, 1)
    staged = (_ring(COLUMNS, SLOTS), _state_staging(K, SLOTS), ready, free)
    start = gl.where(back, begin + count - 1, begin)
    source = (sequence.to(gl.int32) * N, batch, head * V + column, first * C, start, count)
    forward = (neg_w, neg_w, k_out, t, t, v, decay)
    reverse = (neg_w, q_in, k_out, p, p, d_o, decay)
    arrays = (initial, initial, initial)
    gl.warp_specialize(
        [
            (_consume_either, (back, rings, staged, arrays, (d_final, d_initial), (walk, column, count), K, V, STAGES, SLOTS)),
            (_store_either, (back, staged, (sequence * N + start, column, count), states, v_new, d_states, d_v_new, K, V, SLOTS)),
            (_load_either, (back, forward, reverse, rings, source, K, STAGES)),
        ],
        [2, 1],
        [56, 56],
    )
    close_barriers(full, STAGES)
    close_barriers(empty, STAGES)
    close_barriers(ready, SLOTS)
    close_barriers(free, SLOTS)
