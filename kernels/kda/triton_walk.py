"""The walks over the chunks of a sequence on Hopper: forward, both walks of the backward pass, reverse, and summary.

One program walks one (row, walk, head, block of value columns) through its chunks. The state is kept transposed, [64 value columns, K], in
float32 accumulators of one group of 4 warps, with a bfloat16 copy in registers as left operand of the products; so the serial part of a
chunk is two products and two conversions. Another warp loads the next chunks through TMA into a ring of tiles, and in the backward pass
two more copy what the group leaves in shared memory (states, V') to the outputs. GROUPS = 2 puts two groups (128 columns) on one ring: the
chunk's operands are read once for both, which pays where the programs fill the card. The bits are the same, for columns do not mix.

The backward pass needs the forward walk again, for the states, and the reverse walk. Neither reads what the other writes, so one launch
does both, in programs of their own: neither walk alone fills the card with 16 or 32 heads, nor evenly with 96.

Shapes: B rows, S walks a row, HV heads, N chunks of the window of C = 32 tokens, K, V channels. Prepared: neg_w, q_in, k_out [B,HV,N,C,K],
t, p [B,HV,N,C,C] bfloat16, decay [B,HV,N,K] float32. v, o, d_o [B,T,HV,V]; state, final [B,S,HV,K,V]; states, d_states [B,HV,N,V,K];
v_new, d_v_new [B,HV,N,C,V]; bounds [B,S,2] absolute chunk numbers, chunk `first` is the window's first.
Tokens from T on are zero rows of the TMA tile (the descriptor's bound is T of that row), never read.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]

from . import triton_launch
from .triton_walk_kernels import both_kernel, forward_kernel, reverse_kernel, summary_kernel

SHARED_BYTES = 227 * 1024  # of a program, Hopper
SHARED_OF_TWO = 113 * 1024  # of each of two programs on one processor
MULTIPROCESSORS = 132


def _registers(k):
    """maxnreg for 8 warps: 128 are half of a processor's; K = 256 needs all that a thread can have."""
    return 128 if k <= 128 else 224


def _bytes(k, tiles, squares, groups):
    """Of one slot of the ring: `tiles` of C rows of K, `squares` of C rows of C, value tiles, decay."""
    return tiles * 32 * k * 2 + squares * 32 * 32 * 2 + groups * 32 * 64 * 2 + k * 4


def _shape(walks, columns, k, *, tiles, squares, staged):
    """-> constexprs GROUPS, STAGES. Functions of sizes alone, never of T: a prefix takes the same program.

    columns: sizes of the parts of the value columns; staged: whether an output tile a group is staged. Two groups when one-group
    programs would fill the card anyway (at K = V = 128 and 8k tokens a sixth faster with 96 heads, a third slower with 32). Not at
    K = 256, where the state alone takes 128 registers of the 168 a thread then has.
    """
    pairs = k <= 128 and math.gcd(*columns) % 128 == 0
    groups = 2 if pairs and walks * (sum(columns) // 64) >= MULTIPROCESSORS else 1
    fixed = staged * groups * 32 * 64 * 2 + 1024
    return {"GROUPS": groups, "STAGES": min(4, (SHARED_BYTES - fixed) // _bytes(k, tiles, squares, groups))}


def _shape_of_one(programs, k, keeps):
    """-> STAGES, SLOTS of programs of one group that walk in reverse too. More programs than processors: two on each, with half of its
    shared memory. The backward pass of 96 heads has 384; 192 programs of 128 columns would leave the memory to 60 in a second round."""
    two = programs > MULTIPROCESSORS and k <= 128
    slots = keeps * (1 if two or k > 128 else 2)
    room = (SHARED_OF_TWO if two else SHARED_BYTES) - slots * (32 * 64 * 2 + 64 * k * 2) - 512
    return min(4, room // _bytes(k, 3, 1, 1)), slots


def _operands(p, names, *values):
    """TMA descriptors of what the loading warp reads: `names` of Prepared, C rows each, values [B,T,HV,V], decay."""
    tiles = []
    for name in names:
        x = getattr(p, name)
        columns = x.shape[-1]
        layout = gl.NVMMASharedLayout(min(2 * columns, 128), 16, 2)
        tiles.append(triton_launch.descriptor(x.reshape(-1, columns), (32, columns), layout))
    for x in values:
        b, t, hv, d = x.shape
        tiles.append(triton_launch.descriptor(x.reshape(b, t, hv * d), (1, 32, 64), gl.NVMMASharedLayout(128, 16, 3)))
    k = p.decay.shape[-1]
    decay = triton_launch.descriptor(p.decay.reshape(-1, k), (1, k), gl.NVMMASharedLayout(0, 32, 2))
    return *tiles, decay


def walk_forward(p, v, state, bounds, *, first, out=None):
    """-> o [B,T,HV,V], final [B,S,HV,K,V].

    p: Prepared of the window whose first chunk is `first`. bounds [B,S,2]: the chunks [begin, end) of each walk, inside the window;
    none: final = state. Rows of o outside the walks are not written; out: o of an earlier window, taken over in place.
    """
    b, t, hv, d = v.shape
    s, k, n = state.shape[1], p.neg_w.shape[-1], p.t.shape[2]
    shape = _shape(b * s * hv, (d,), k, tiles=3, squares=2, staged=True)
    launch: dict[str, Any] = dict(grid=(b * s * hv * (d // (64 * shape["GROUPS"])),), num_warps=4, K=k, V=d, **shape)
    if out is not None:
        launch |= dict(o=out, aliases={"o": 0})
    outputs = jax.ShapeDtypeStruct(v.shape, jnp.bfloat16), jax.ShapeDtypeStruct(state.shape, jnp.float32)
    operands = *_operands(p, ("neg_w", "q_in", "k_out", "t", "p"), v), state, bounds, t, n, hv, s, first
    return triton_launch.call(forward_kernel, *operands, out_type=outputs, **launch)


def walk_both(p, v, state, d_o, d_state, bounds, *, first):
    """The two walks of the backward pass -> states [B,HV,N,V,K] before each chunk, v_new [B,HV,N,C,V]; d_initial [B,S,HV,K,V],
    d_states [B,HV,N,V,K] of the state after each chunk, d_v_new [B,HV,N,C,V].

    state, d_state: of the walks' initial states, and the gradient of their final states. Chunks outside the walks are not written.
    """
    b, t, hv, d = v.shape
    s, k, n = state.shape[1], p.neg_w.shape[-1], p.t.shape[2]
    states = jax.ShapeDtypeStruct((b, hv, n, d, k), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((b, hv, n, 32, d), jnp.bfloat16)
    outputs = states, tokens, jax.ShapeDtypeStruct(d_state.shape, jnp.float32), states, tokens
    programs = 2 * b * s * hv * (d // 64)
    stages, slots = _shape_of_one(programs, k, keeps=True)
    operands = *_operands(p, ("neg_w", "q_in", "k_out", "t", "p"), v, d_o), state, d_state, bounds, t, n, hv, s, first
    launch = dict(grid=(programs,), num_warps=4, maxnreg=_registers(k), K=k, V=d, STAGES=stages, SLOTS=slots)
    return triton_launch.call(both_kernel, *operands, out_type=outputs, **launch)


def walk_reverse(p, d_o, d_state, bounds, *, first):
    """-> d_initial [B,S,HV,K,V]. d_state: of the walks' final states."""
    b, t, hv, d = d_o.shape
    s, k, n = d_state.shape[1], p.neg_w.shape[-1], p.t.shape[2]
    programs = b * s * hv * (d // 64)
    stages, _ = _shape_of_one(programs, k, keeps=False)
    operands = *_operands(p, ("neg_w", "q_in", "k_out", "p"), d_o), d_state, bounds, t, n, hv, s, first
    launch = dict(grid=(programs,), num_warps=4, maxnreg=_registers(k), K=k, V=d, STAGES=stages)
    return triton_launch.call(reverse_kernel, *operands, out_type=jax.ShapeDtypeStruct(d_state.shape, jnp.float32), **launch)


def walk_summary(p, v, bounds, *, first):
    """-> add [B,S,HV,K,V], matrix [B,S,HV,K,K] float32: final = matrix @ state + add of each walk."""
    b, t, hv, d = v.shape
    s, k, n = bounds.shape[1], p.neg_w.shape[-1], p.t.shape[2]
    shape = _shape(b * s * hv, (d, k), k, tiles=2, squares=1, staged=False)
    outputs = tuple(jax.ShapeDtypeStruct((b, s, hv, k, x), jnp.float32) for x in (d, k))
    operands = *_operands(p, ("neg_w", "k_out", "t"), v), bounds, t, n, hv, s, first
    grid = (b * s * hv * ((d + k) // (64 * shape["GROUPS"])),)
    registers = _registers(k) if shape["GROUPS"] == 1 else None
    launch = dict(grid=grid, num_warps=4, maxnreg=registers, K=k, V=d, **shape)
    return triton_launch.call(summary_kernel, *operands, out_type=outputs, **launch)
