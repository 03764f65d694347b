"""Layouts and small functions of the gradient kernel, triton_grads.py. D: channels of a tile, K keys', V values'; WARPS of the launch.

A [32,D] tile has two placements: by rows (4 channels a thread, whole rows a warp) for loads, stores and sums over channels, and by
channels (`_by_channel`) around the products.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
def _by_channel(K, WARPS):
    """[K,32] of a wgmma: 16 channels a warp, all tokens. A left operand in registers has the same elements in the same threads."""
    assert WARPS <= K // 16
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C.value, 16])


@gluon.constexpr_function
def _diagonals(K, WARPS):
    """[K / 16 blocks,16,16] of mma.sync: the diagonals of these are the K sums of S dS over V."""
    return gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def _shared(D):
    """A [rows,D] bfloat16 tile."""
    return gl.NVMMASharedLayout(min(2 * D, 128), 16, 2)


@gluon.constexpr_function
def _slab(K, V):
    """Value rows of a copy of S or dS: the registers of more would spill."""
    return min(V, 64)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _exp2(x):
    """2^x in one instruction (gl.exp2 takes four, to keep denormals). 0 for a very negative x, also -inf."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


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
def _operand(x, layout: gl.constexpr):
    """A left operand's elements as float32, where the accumulator has them."""
    return _float(gl.convert_layout(x, layout, assert_trivial=True))


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
