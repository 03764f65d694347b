"""The first kernel of KDA on Hopper: from the inputs of one chunk and head to what the walk over the states needs (`Prepared`).

One program of 4 warps takes one chunk of 32 tokens of one head. At K = 128 it lives on 105 registers a thread and 45 KB of shared memory,
so that 4 programs (16 warps) share an SM: the kernel waits for memory and short dependent steps, and only other programs fill that time.
(5 programs of 96 registers are 10% slower: one H200, 96 heads, 8192 tokens, 0.438 ms against 0.400.)
Shared memory is what they compete for: 1276 accesses of 128 bytes a chunk, none of them a bank conflict (2400 before triton_inverse).
Two layouts, each for what it is good at: a thread holds 16 rows x K/64 channels while the gates are summed down a tile (no shuffles), and
8 channels of a row for everything else (16-byte loads and stores of q, k, operands and outputs; norms by 4 shuffles).

Shapes: B rows, T tokens, H query/key heads, HV value heads, K channels; n chunks of C = 32 tokens = two tiles of 16 rows. Inside a tile
Gl is the sum of log2 decays from the tile's start (its first row included), E = Gl at the tile's end, c = OFF:

    row factor 2^(Gl+c), column factor 2^(-Gl-c)
    tile 1 sees the columns of tile 0 as k 2^(E0-Gl) <= 1; its anchor, the end of tile 0, lies before all its rows
    Q~ = scale q 2^Gl (tile 0), scale q 2^(Gl+E0) (tile 1)     K~ alike     K^ = k 2^(E0-Gl+E1), k 2^(E1-Gl)

c = 0 down to a bound of -5.4 a token: 16 tokens are 125 log2 units, both factors are normal numbers, and the rows of tile 0 are Q~ and K~
at once. A row operand below 2^-126 is a bfloat16 subnormal, which the tensor cores keep. Down to -5.9 (137 units) c is half the span.

No number of a row depends on a later row of the chunk, not even by its rounding.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mma_v2, warpgroup_mma, warpgroup_mma_wait

from . import triton_launch
from .triton_inverse import inverses, put, times, times_each, wide

C, TILE = gl.constexpr(32), gl.constexpr(16)
TINY_BETA = gl.constexpr(1e-18)  # takes the place of any smaller |beta|: V'/beta gives beta's gradient also where beta is 0
NORM_EPS = gl.constexpr(1e-6)
LOG2E = gl.constexpr(math.log2(math.e))
CLOSED = gl.constexpr(-3e38)  # raw gate and beta of the rows from T on: the sigmoid is exactly 0


class Prepared(NamedTuple):
    neg_w: Any  # [B,HV,n,C,K]  -T K~
    q_in: Any  # [B,HV,n,C,K]  Q~
    k_out: Any  # [B,HV,n,C,K]  K^
    t: Any  # [B,HV,n,C,C]  (I + Diag(beta) L)^-1 Diag(beta)
    p: Any  # [B,HV,n,C,C]
    decay: Any  # [B,HV,n,K] float32


@gluon.constexpr_function
def _columns(channels):
    """[2 tiles,16 rows,K]: a thread holds all rows of a tile for its channels."""
    return gl.BlockedLayout([1, 16, channels // 64], [1, 1, 32], [2, 1, 2], [2, 1, 0])


@gluon.constexpr_function
def _rows(channels):
    """[rows,K]: a thread holds 8 channels, 16 bytes of bfloat16."""
    return gl.BlockedLayout([1, 8], [256 // channels, channels // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def _gates_shared(channels):
    """float32 [C,K] whose 16-byte pieces 0, 2, 4, .. 14 of a row (one phase of a _rows load) lie in 8 different bank groups."""
    bits = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 36]]
    bits += [[0, 2**i] for i in range(6, channels.bit_length() - 1)]
    return gl.SharedLinearLayout(bits + [[2**i, 0] for i in range(5)])


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


NEGATED = gl.constexpr("{ .reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t; }")


@gluon.jit
def _exp2_negated(x):
    """2^-x: the sign costs nothing inside, an instruction outside."""
    return gl.inline_asm_elementwise(NEGATED, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


KEEP = gl.constexpr("and.b32 $0, $1, $2;")


@gluon.jit
def _kept(x, where):
    """bfloat16 x, 0 where not `where`, two elements an instruction (a select takes them apart)."""
    bits = gl.where(where, -1, 0).to(gl.int16)
    return gl.inline_asm_elementwise(KEEP, "=r,r,r", [x, bits], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _halves(x, layout: gl.constexpr):
    """[64,32] -> its columns 0..15 and 16..31, without moving anything between threads."""
    left, right = gl.split(gl.permute(gl.reshape(x, [64, 2, TILE]), [0, 2, 1]))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _normed(x, SCALE: gl.constexpr, FUSED: gl.constexpr):
    x = wide(x)
    if FUSED:
        x = x * (SCALE * gl.rsqrt(gl.sum(x * x, axis=1) + NORM_EPS))[:, None]
    elif SCALE != 1:
        x = x * SCALE
    return x


@gluon.jit
def _factors(
    q, k, e0, e1, gates, segments, rows, own, cross, TILE_AT: gl.constexpr,
    SCALE: gl.constexpr, OFF: gl.constexpr, FUSED: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Tile TILE_AT of q, k [16,K]: operands of the products to shared memory -> Q~, K^, K~. e0, e1 = 2^E of the tiles, [1,K]."""
    layout: gl.constexpr = q.type.layout
    START: gl.constexpr = TILE_AT * TILE
    q = _normed(q, SCALE, FUSED)
    k = _normed(k, 1, FUSED)
    sums = gates.slice(START, TILE).load(layout)
    if OFF != 0:
        sums = sums + OFF
    factor = _exp2(sums)
    q = q * factor
    rows.slice(START, TILE).store(q.to(gl.bfloat16))
    k_row = k * factor
    rows.slice(C + START, TILE).store(k_row.to(gl.bfloat16))
    k_column = k * _exp2_negated(sums)
    if TILE_AT == 0:
        own.store(k_column.to(gl.bfloat16))
        # With c the column factor is 2^(-Gl-c); times 2^(E0+c), which is in range where 2^E0 is not.
        k_column = k_column * (e0 if OFF == 0 else _exp2(gates.slice(TILE - 1, 1).load(layout) + OFF))
        cross.slice(0, TILE).store(k_column.to(gl.bfloat16))
        k_column = k_column * e1
        if OFF != 0:
            q = q * 2.0**-OFF
    else:
        cross.slice(TILE, TILE).store(k_column.to(gl.bfloat16))
        k_column = k_column * (e1 if OFF == 0 else _exp2(gates.slice(C - 1, 1).load(layout) + OFF))
        start = e0
        if OFF != 0:
            start = e0 * 2.0**-OFF
        q = q * start
        k_row = k_row * start
    if PACKED:
        segment = segments.slice(START, TILE).load(gl.SliceLayout(1, layout))[:, None]
        last = segments.slice(C - 1, 1).load(gl.SliceLayout(1, layout))[:, None]
        return _kept(q.to(gl.bfloat16), segment == 0), _kept(k_column.to(gl.bfloat16), segment == last), k_row.to(gl.bfloat16)
    return q.to(gl.bfloat16), k_column.to(gl.bfloat16), k_row.to(gl.bfloat16)


@gluon.jit
def _loads(
    row, chunk, head, q, k, g, beta, rate, bias, ids, tokens, first,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, FUSED: gl.constexpr, HAS_RATE: gl.constexpr, HAS_BIAS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Everything that is read of one chunk and head, asked for at once. No row from T on."""
    COLUMNS: gl.constexpr = _columns(K)
    ROWS: gl.constexpr = _rows(K)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    start = (first + chunk) * C  # token
    left = tokens - start  # rows of this chunk that exist
    base = row * tokens + start

    tile = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, COLUMNS)))[:, None, None]
    step = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, COLUMNS)))[None, :, None]
    channel = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, COLUMNS)))[None, None, :]
    at = (tile.to(gl.int64) * TILE + step.to(gl.int64)) * (HV * K) + channel
    raw = gl.load(g + (base * HV + head) * K + at, mask=(step < left - tile * TILE) & (channel >= 0), other=CLOSED if FUSED else 0.0)

    line = gl.arange(0, TILE, gl.SliceLayout(1, ROWS))[:, None]
    lane = gl.arange(0, K, gl.SliceLayout(0, ROWS))[None, :]
    at = (base * H + head // (HV // H)) * K + line.to(gl.int64) * (H * K) + lane
    mask0 = (line < left) & (lane >= 0)
    mask1 = (line + TILE < left) & (lane >= 0)
    q0 = gl.load(q + at, mask=mask0, other=0.0)
    k0 = gl.load(k + at, mask=mask0, other=0.0)
    q1 = gl.load(q + at + TILE * H * K, mask=mask1, other=0.0)
    k1 = gl.load(k + at + TILE * H * K, mask=mask1, other=0.0)

    i = gl.arange(0, 2 * C, LINE) - C  # 32 sectors for every warp that loads: every other one does
    b = gl.load(beta + (base + i) * HV + head, mask=(i >= 0) & (i < left), other=CLOSED if FUSED else 0.0)
    speed = 1.0
    if HAS_RATE:
        speed = gl.load(rate + head)
    shift = gl.zeros([1, 1, K], gl.float32, COLUMNS)
    if HAS_BIAS:
        shift = gl.load(bias + head * K + channel)
    j = gl.arange(0, C, LINE)
    now = j
    before = j
    if PACKED:
        # Rows from T on belong to the last document; the row's first token has none before it that differs.
        now = gl.load(ids + row * tokens + gl.minimum(start + j, tokens - 1))
        before = gl.load(ids + row * tokens + gl.minimum(gl.maximum(start + j - 1, 0), tokens - 1))
    return raw, q0, k0, q1, k1, b, speed, shift, now, before


@gluon.jit
def prep_kernel(
    q, k, g, beta, rate, bias, ids, neg_w, q_in, k_out, t_out, p_out, decay, tokens, first, chunks,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, SCALE: gl.constexpr, LOWER: gl.constexpr, OFF: gl.constexpr,
    FUSED: gl.constexpr, HAS_RATE: gl.constexpr, HAS_BIAS: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Operands, outputs (from neg_w on), scalars. Grid (HV, chunks, B): heads are the fastest, for a token's heads lie side by side."""
    ROWS: gl.constexpr = _rows(K)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    OWN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    CROSS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, WIDE, 2)
    ONE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    TILES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    head = gl.program_id(0)
    chunk = gl.program_id(1)
    row = gl.program_id(2).to(gl.int64)
    raw, q0, k0, q1, k1, b, speed, shift, now, before = _loads(
        row, chunk, head, q, k, g, beta, rate, bias, ids, tokens, first, H, HV, K, FUSED, HAS_RATE, HAS_BIAS, PACKED
    )
    place = (row * HV + head) * chunks + chunk  # of this chunk in the outputs
    line = gl.arange(0, TILE, gl.SliceLayout(1, ROWS))[:, None]
    lane = gl.arange(0, K, gl.SliceLayout(0, ROWS))[None, :]
    # The compiler would move loads behind the work on the gates, to save registers. No load passes a barrier; and with the gates' factor
    # read back from behind it, no work on them passes it the other way.
    there = gl.allocate_shared_memory(gl.float32, [1, 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    if HAS_RATE:
        there.store(gl.zeros([1, 1, 1], gl.float32, _columns(K)) + speed)
        speed = there.load(_columns(K))
    else:
        gl.barrier()
    # beta, and 1 for the rows of q: what multiplies row i of the products.
    b = b.to(gl.float32)
    if FUSED:
        b = _reciprocal(1.0 + _exp2(-LOG2E * b))
    b = gl.where(gl.abs(b) < TINY_BETA, TINY_BETA, b)
    betas = gl.allocate_shared_memory(gl.float32, [2 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    betas.store(gl.where(gl.arange(0, 2 * C, LINE) < C, 1.0, b))
    segments = gl.allocate_shared_memory(gl.int32, [2 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if PACKED:
        # Documents that started in this chunk up to row j; twice, for the rows of q and of k.
        started = gl.associative_scan((now != before).to(gl.int32), 0, _add)
        segments.slice(0, C).store(started)
        segments.slice(C, C).store(started)

    # Log2 decays, summed from each tile's start on.
    raw = wide(raw)
    if FUSED:
        if HAS_RATE:
            # The floor only keeps CLOSED closed: a gate this slow is a constant in float32.
            speed = gl.maximum(gl.exp(speed), 1e-30)
        speed = speed * -LOG2E
        x = raw * speed
        if HAS_BIAS:
            x = raw * speed + shift * speed
        raw = (LOWER * LOG2E) * _reciprocal(1.0 + _exp2(x))
    else:
        raw = raw * LOG2E
    gates = gl.allocate_shared_memory(gl.float32, [C, K], _gates_shared(K))
    gates.store(gl.reshape(gl.associative_scan(raw, 1, _add), [C, K]))
    there._keep_alive()

    rows = gl.allocate_shared_memory(gl.bfloat16, [2 * C, K], OPERAND)  # 16-row tiles of q, q, k, k; those of tile 0 are Q~, K~ too
    own = gl.allocate_shared_memory(gl.bfloat16, [TILE, K], OPERAND)  # columns of tile 0 as its rows see them
    cross = gl.allocate_shared_memory(gl.bfloat16, [C, K], OPERAND)  # columns of both tiles as tile 1 sees them
    e0 = _exp2(gates.slice(TILE - 1, 1).load(ROWS))
    e1 = _exp2(gates.slice(C - 1, 1).load(ROWS))
    out = place * (C * K) + line * K + lane
    q0, k0, _ = _factors(q0, k0, e0, e1, gates, segments, rows, own, cross, 0, SCALE, OFF, FUSED, PACKED)
    gl.store(q_in + out, q0)
    gl.store(k_out + out, k0)
    q1, k1, k_in = _factors(q1, k1, e0, e1, gates, segments, rows, own, cross, 1, SCALE, OFF, FUSED, PACKED)

    # All pairs: rows of q and k against the columns of their own tile and, for tile 1, of tile 0.
    fence_async_shared()
    near = warpgroup_mma(rows, own.permute([1, 0]), gl.zeros([2 * C, TILE], gl.float32, OWN), use_acc=False, is_async=True)
    far = warpgroup_mma(rows, cross.permute([1, 0]), gl.zeros([2 * C, C], gl.float32, CROSS), use_acc=False, is_async=True)
    gl.store(q_in + out + TILE * K, q1)
    gl.store(k_out + out + TILE * K, k1)
    # Once for each channel, in float32 and without c: a channel that hardly decays keeps its last bits over many chunks.
    end0 = gates.slice(TILE - 1, 1).load(ONE)
    end1 = gates.slice(C - 1, 1).load(ONE)
    total = _exp2(end0 + end1)
    if PACKED:
        total = gl.where(segments.slice(C - 1, 1).load(gl.SliceLayout(1, ONE))[:, None] == 0, total, 0.0)
    one = gl.arange(0, 1, gl.SliceLayout(1, ONE))[:, None] + gl.arange(0, K, gl.SliceLayout(0, ONE))[None, :]
    gl.store(decay + place * K + one, total)
    near, far = warpgroup_mma_wait(0, deps=[near, far])
    far, right = _halves(far, OWN)
    keys = gl.allocate_shared_memory(gl.bfloat16, [TILE, K], OPERAND)  # K~ of tile 1; where operands were, so that 5 programs fit
    keys.store(k_in)

    r = gl.arange(0, 2 * C, gl.SliceLayout(1, OWN))[:, None]
    c = gl.arange(0, TILE, gl.SliceLayout(0, OWN))[None, :]
    second = (r & TILE) != 0  # tile 1
    lower = c <= (r & (TILE - 1)) - gl.where(r < C, 0, 1)
    beta_row = betas.load(gl.SliceLayout(1, OWN))[:, None]
    near = gl.where(second, right, near) * beta_row
    if OFF != 0:
        beta_row = beta_row * 2.0**-OFF
    far = far * beta_row
    if PACKED:
        segment = segments.load(gl.SliceLayout(1, OWN))[:, None]
        segment0 = segments.slice(0, TILE).load(gl.SliceLayout(0, OWN))[None, :]
        segment1 = segments.slice(TILE, TILE).load(gl.SliceLayout(0, OWN))[None, :]
        lower = lower & (segment == gl.where(second, segment1, segment0))
        far = gl.where(segment == segment0, far, 0.0)  # of tile 0 too, for nothing
    near = gl.where(lower, near, 0.0)

    # T = [[X0, 0], [-X1 L10 X0, X1]] Diag(beta), X = (I+L)^-1 of each tile of k. The tiles of q go along, for nothing.
    below = put(gl.convert_layout(gl.reshape(-far, [4, TILE, TILE]), TILES, assert_trivial=True))
    x, inverse = inverses(gl.convert_layout(gl.reshape(near, [4, TILE, TILE]), TILES, assert_trivial=True))
    corner = times_each(x, below, gl.zeros([4, TILE, TILE], gl.float32, TILES))
    x = gl.convert_layout(gl.reshape(x, [2 * C, TILE]), PAIRS, assert_trivial=True)
    corner = gl.convert_layout(gl.reshape(corner, [2 * C, TILE]), PAIRS, assert_trivial=True)
    inverse0 = inverse.reshape([8 * TILE, TILE])
    corner = times(corner, inverse0.slice(C, TILE), inverse0.slice(3 * C, TILE), gl.zeros([2 * C, TILE], gl.float32, PAIRS))
    near = gl.convert_layout(near, PAIRS, assert_trivial=True)
    far = gl.convert_layout(far, PAIRS, assert_trivial=True)
    beta0 = betas.slice(C, TILE).load(gl.SliceLayout(0, PAIRS))[None, :]
    beta1 = betas.slice(C + TILE, TILE).load(gl.SliceLayout(0, PAIRS))[None, :]
    r = gl.arange(0, 2 * C, gl.SliceLayout(1, PAIRS))[:, None]
    second = (r & TILE) != 0
    squares = gl.allocate_shared_memory(gl.bfloat16, [2 * C, C], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))  # P, under it T
    half = gl.where(r < C, gl.where(second, far, near), gl.where(second, corner, x) * beta0)
    squares.slice(0, TILE, 1).store(half.to(gl.bfloat16))
    half = gl.where(second, gl.where(r < C, near, x * beta1), 0.0)
    squares.slice(TILE, TILE, 1).store(half.to(gl.bfloat16))
    y = gl.arange(0, C, gl.SliceLayout(1, SQUARE))[:, None]
    z = gl.arange(0, C, gl.SliceLayout(0, SQUARE))[None, :]
    square = place * (C * C) + y * C + z
    gl.store(p_out + square, squares.slice(0, C).load(SQUARE))
    gl.store(t_out + square, squares.slice(C, C).load(SQUARE))

    # Rows after a boundary read no state: K~ = 0 there, here as columns of T. K~ of tile 0 has been a row operand already.
    t0 = squares.slice(C, C).slice(0, TILE, 1).load(LEFT)
    t1 = squares.slice(C, C).slice(TILE, TILE, 1).load(LEFT)
    below._keep_alive()
    inverse._keep_alive()
    # The minus of -T K~ is cheapest here.
    t0 = t0 * -1.0
    t1 = t1 * -1.0
    if PACKED:
        t0 = gl.where(segments.slice(0, TILE).load(gl.SliceLayout(0, LEFT))[None, :] == 0, t0, 0.0)
        t1 = gl.where(segments.slice(TILE, TILE).load(gl.SliceLayout(0, LEFT))[None, :] == 0, t1, 0.0)
    w = mma_v2(t0, rows.slice(C, TILE).load(RIGHT), gl.zeros([C, K], gl.float32, WIDE))
    if OFF != 0:
        w = w * 2.0**-OFF
    w = mma_v2(t1, keys.load(RIGHT), w)
    turned = gl.allocate_shared_memory(gl.bfloat16, [C, K], OPERAND)
    turned.store(w.to(gl.bfloat16))
    y = gl.arange(0, C, gl.SliceLayout(1, ROWS))[:, None]
    gl.store(neg_w + place * (C * K) + y * K + lane, turned.load(ROWS))


def prep(
    q, k, g, beta, A_log, dt_bias, ids, *, first: int, chunks: int, scale: float, lower_bound: float, fused: bool
) -> Prepared:  # fmt: skip
    """Chunks first .. first+chunks-1 of every row.

    q, k [B,T,H,K] bfloat16; g [B,T,HV,K] bfloat16 or float32: the raw gate when fused, else the log decay, in [lower_bound, 0];
    beta [B,T,HV]: logits when fused; A_log [HV], dt_bias [HV,K] or None; ids [B,T] int32 document ids (filled) or None.
    fused: q and k are L2-normalised here, g = lower_bound sigmoid(exp(A_log) (g + dt_bias)), beta = sigmoid(beta).
    """
    batch, tokens, heads, channels = q.shape
    values = g.shape[2]
    if not -5.9 <= lower_bound < 0:
        raise ValueError(f"lower_bound {lower_bound} is not in [-5.9, 0): the factors of a tile would leave float32's range.")
    if channels not in (64, 128, 256):
        raise ValueError(f"K = {channels}; the kernel takes 64, 128 or 256.")
    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((batch, values, chunks, *dims), dtype)
    token_like, square = shape(32, channels), shape(32, 32)
    # An operand that is absent is never read; another one stands in its place.
    as_f32 = lambda x: beta if x is None else x.astype(jnp.float32)
    outputs = triton_launch.call(
        prep_kernel,
        q,
        k,
        g,
        beta,
        as_f32(A_log),
        as_f32(dt_bias),
        beta if ids is None else ids,
        out_type=(token_like, token_like, token_like, square, square, shape(channels, dtype=jnp.float32)),
        grid=(values, chunks, batch),
        num_warps=4,
        **launch_constants(heads, values, channels, scale, lower_bound, fused, A_log, dt_bias, ids),
        tokens=tokens,
        first=first,
        chunks=chunks,
    )
    return Prepared(*outputs)


def launch_constants(heads, values, channels, scale, lower_bound, fused, A_log, dt_bias, ids):
    return dict(
        H=heads,
        HV=values,
        K=channels,
        SCALE=float(scale),
        LOWER=float(lower_bound),
        # 16 steps of 5.4 are 125 log2 units, in range without a shift.
        OFF=0 if lower_bound >= -5.4 else round(8 * -lower_bound * math.log2(math.e)),
        FUSED=fused,
        HAS_RATE=fused and A_log is not None,
        HAS_BIAS=fused and dt_bias is not None,
        PACKED=ids is not None,
    )
