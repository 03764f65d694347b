"""Inverses of unit triangles of 16 rows by tensor cores, for kernels that shared memory holds up.

Where each lane reads every line of its triangle, 4 warps make 770 accesses of 128 bytes to shared memory, stores of the result
included; the products here make 224. Their operands are float32 as the sum of two bfloat16: with one alone, keys that look alike (cosine
0.9) would cost the inverse 6e-3, so 1e-5.

Shapes: 4 tiles of 16x16, a warp each (NVMMADistributedLayout [4,1,1]).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

TILE = gl.constexpr(16)
WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@gluon.jit
def wide(x):
    """x in float32. Two bfloat16 of a register take two instructions so, three as the compiler does it by itself."""
    if x.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(WIDEN, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    return x


@gluon.jit
def two(x):
    """float32 x as a sum of two bfloat16: 16 bits of it."""
    high = x.to(gl.bfloat16)
    return high, (x - wide(high)).to(gl.bfloat16)


@gluon.jit
def put(x):
    """[4,16,16] float32 into shared memory: its two parts behind each other, right operands of `times`."""
    parts = gl.allocate_shared_memory(gl.bfloat16, [8, TILE, TILE], gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))
    high, low = two(x)
    parts.slice(0, 4).store(high)
    parts.slice(4, 4).store(low)
    return parts


@gluon.jit
def times(x, high, low, start):
    """start + x (high + low), right but for 2^-16 of each product; x becomes a left operand where it is."""
    left: gl.constexpr = gl.DotOperandLayout(0, x.type.layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, x.type.layout, 2)
    x_high, x_low = two(x)
    x_high = gl.convert_layout(x_high, left, assert_trivial=True)
    high = high.load(right)
    start = mma_v2(gl.convert_layout(x_low, left, assert_trivial=True), high, start)
    return mma_v2(x_high, high, mma_v2(x_high, low.load(right), start))


@gluon.jit
def times_each(x, parts, start):
    """Each of the 4 tiles of x, in a warp of its own, by its own tile of `put`."""
    return times(x, parts.slice(0, 4), parts.slice(4, 4), start)


@gluon.jit
def inverses(lower):
    """lower [4,16,16], strictly lower triangular L -> (I+L)^-1 of each, in registers and in shared memory.

    Substitution on tensor cores: x <- e - x L reads, for a column of x, later columns alone, so each turn makes one more of them right
    (where keys look alike a power series would lose all digits). Blocks of 4 columns first, D; with N, the rest of L, x <- D - x (N D)
    then makes 4 more columns right each turn."""
    layout: gl.constexpr = lower.type.layout
    r = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    c = gl.arange(0, TILE, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    block = (c >> 2) == (r >> 2)
    minus = gl.where(block, -lower, 0.0)
    factor = put(minus)
    x = times_each(minus, factor, minus)
    block_inverse = gl.where(c == r, 1.0, times_each(x, factor, minus))
    blocks = put(block_inverse)
    factor._keep_alive()  # a buffer in the place of one that is still read would cost a barrier
    step = put(times_each(gl.where(block, 0.0, -lower), blocks, gl.zeros([4, TILE, TILE], gl.float32, layout)))
    blocks._keep_alive()
    x = times_each(block_inverse, step, block_inverse)
    x = times_each(x, step, block_inverse)
    x = times_each(x, step, block_inverse)
    result = put(x)
    step._keep_alive()
    return x, result
