"""Short causal convolution with SiLU, forward and backward, in one walk along time each (plain Triton, NVIDIA GPUs).

Import it only where Triton is installed. Shapes: B batch, T tokens, C channels, W taps, N blocks of tokens.

A program owns a block of channels and walks over a block of tokens, one token a step, with the last W-1 inputs (and, backward,
the W-1 unfinished gradients) in registers: x and dy are read once and every SiLU is computed once. Tiles of tokens by channels
would compute each SiLU W times in the backward pass, 0.67 ms of exponentials and divisions alone at T=8192, C=36864.

Bytes, T=8192, C=36864, bfloat16, 4.3 TB/s: forward 1.21 GB (0.281 ms), where XLA's one fusion moves the same; backward 1.81 GB
(0.421 ms), where XLA moves 6.1 GB because it keeps the sum before the SiLU in float32 and reads it for each weight gradient.

Packed rows: the walk goes over the real tokens in order, padding last (`walk_codes`), so padding takes no tap position wherever it
stands, and is never read. A tap of another document is dropped by a select.
"""
# ruff: noqa: RUF005  (Triton's front end joins tuples with + and knows no starred items)

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ..common import require_rank
from ..varying import match_varying
from .triton_launch import call
from .triton_rows import over_rows, sigmoid

WIDEST = 8  # taps: W-1 inputs, W-1 gradients, W weights and W weight gradients of a channel are registers


@triton.jit
def step_place(walk, row, base, first, ahead, T, C):
    """Of step i = first + ahead: where the token's channels start, its age in the document, whether it is a real token.

    base = (row * T + first) * C, int64: the steps of one round then differ by small multiples of C.
    """
    i = first + ahead
    real = i < T
    offset = base + ahead * C
    age = 0
    if walk is not None:
        code = tl.load(walk + row.to(tl.int64) * T + i, mask=real, other=0)
        offset = (row.to(tl.int64) * T + (code >> 4)) * C
        age = (code >> 1) & 7
        real = (code & 1) != 0
    return offset, age, real


@triton.jit
def past_inputs(x, history, walk, row, start, columns, in_c, T, C, W: tl.constexpr):
    """The W-1 inputs before step `start`, newest first, of whatever document; before the first step stands the history."""
    ring = ()
    for back in tl.static_range(1, W):
        i = start - back
        from_x = tl.maximum(i, 0)
        offset, _, real = step_place(walk, row, (row.to(tl.int64) * T + from_x) * C, from_x, 0, T, C)
        value = tl.load(x + offset + columns, mask=in_c & real & (i >= 0), other=0.0).to(tl.float32)
        if history is not None:
            old = row.to(tl.int64) * (W - 1) + tl.maximum(W - 1 + i, 0)
            value += tl.load(history + old * C + columns, mask=in_c & (i < 0), other=0.0).to(tl.float32)
        ring = ring + (value,)
    return ring


@triton.jit
def tap_sum(value, ring, taps, age, W: tl.constexpr, PACKED: tl.constexpr):
    """The convolution's sum, and the W-1 past inputs with those of another document replaced by 0, newest first."""
    total = taps[W - 1] * value
    seen = ()
    for back in tl.static_range(1, W):
        past = ring[back - 1]
        if PACKED:
            past = tl.where(age >= back, past, 0.0)
        total += taps[W - 1 - back] * past
        seen = seen + (past,)
    return total, seen


@triton.jit
def load_taps(weight, columns, in_c, C, W: tl.constexpr):
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + j * C + columns, mask=in_c, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def conv_forward_kernel(
    x,  # [B,T,C]
    weight,  # [W,C]
    history,  # [B,W-1,C] or None
    walk,  # [B,T] int32, see walk_codes, or None
    y,  # [B,T,C]
    T,
    C: tl.constexpr,  # a constant: jax-triton tells Triton nothing of an integer's divisors, and loads of 8 bytes need them
    W: tl.constexpr,
    STEPS: tl.constexpr,
    BC: tl.constexpr,
    AHEAD: tl.constexpr,  # steps whose loads are issued together; divides STEPS
):
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    start = tl.program_id(1) * STEPS
    row = tl.program_id(2)
    in_c = (columns < C) | (C % BC == 0)
    taps = load_taps(weight, columns, in_c, C, W)
    ring = past_inputs(x, history, walk, row, start, columns, in_c, T, C, W)
    for first in range(start, tl.minimum(start + STEPS, T), AHEAD):
        base = (row.to(tl.int64) * T + first) * C
        loaded = ()
        for ahead in tl.static_range(AHEAD):
            offset, age, real = step_place(walk, row, base, first, ahead, T, C)
            loaded = loaded + ((tl.load(x + offset + columns, mask=in_c & real, other=0.0), offset, age),)
        for ahead in tl.static_range(AHEAD):
            value, offset, age = loaded[ahead]
            value = value.to(tl.float32)
            total, _ = tap_sum(value, ring, taps, age, W, walk is not None)
            # At padding x and the age are 0, so the result is 0 without a select.
            tl.store(y + offset + columns, (total * sigmoid(total)).to(y.dtype.element_ty), mask=in_c & (first + ahead < T))
            if W > 1:
                ring = (value,) + ring[: W - 2]


@triton.jit
def slope_step(value, slope, ring, grads, taps, age, W: tl.constexpr, PACKED: tl.constexpr):
    """One step back: gradient of the sum, the past inputs it met, the finished gradient of input i-(W-1), the unfinished ones.

    At padding and past the end x and dy are 0, and so is dz.
    """
    total, seen = tap_sum(value, ring, taps, age, W, PACKED)
    gate = sigmoid(total)
    dz = (slope * gate) * (1.0 + total * (1.0 - gate))
    grown = (taps[W - 1] * dz,)
    for back in tl.static_range(1, W):
        own = dz
        if PACKED:
            own = tl.where(age >= back, dz, 0.0)
        grown = grown + (grads[back - 1] + taps[W - 1 - back] * own,)
    return dz, seen, grown[W - 1], grown[: W - 1]


@triton.jit
def store_input_gradient(dx, dhistory, walk, done, row, base, first, ahead, start, end, columns, in_c, T, C, W: tl.constexpr):
    """Input i - (W-1) has met all its taps at step i = first + ahead."""
    lag = first + (ahead - (W - 1))
    own = (lag >= start) & (lag < end)
    offset = base + (ahead - (W - 1)) * C
    if walk is not None:
        line = row.to(tl.int64) * T
        offset = (line + (tl.load(walk + line + lag, mask=own, other=0) >> 4)) * C
    tl.store(dx + offset + columns, done.to(dx.dtype.element_ty), mask=in_c & own)
    if dhistory is not None:
        old = row.to(tl.int64) * (W - 1) + first + ahead
        tl.store(dhistory + old * C + columns, done.to(dhistory.dtype.element_ty), mask=in_c & (lag < 0))


@triton.jit
def conv_backward_kernel(
    x,  # [B,T,C]
    weight,  # [W,C]
    history,  # [B,W-1,C] or None
    walk,  # [B,T] int32 or None
    dy,  # [B,T,C]
    dx,  # [B,T,C]
    dweight,  # [B,N,W,C] float32, one part a block of tokens: added up later, always in the same order
    dhistory,  # [B,W-1,C] or None
    T,
    C: tl.constexpr,  # a constant: jax-triton tells Triton nothing of an integer's divisors, and loads of 8 bytes need them
    W: tl.constexpr,
    STEPS: tl.constexpr,
    BC: tl.constexpr,
    AHEAD: tl.constexpr,
):
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    start = tl.program_id(1) * STEPS
    row = tl.program_id(2)
    in_c = (columns < C) | (C % BC == 0)
    end = tl.minimum(start + STEPS, T)
    taps = load_taps(weight, columns, in_c, C, W)
    ring = past_inputs(x, history, walk, row, start, columns, in_c, T, C, W)
    nothing = tl.zeros([BC], tl.float32)
    grads = ()
    parts = (nothing,)
    for _ in tl.static_range(W - 1):
        grads = grads + (nothing,)
        parts = parts + (nothing,)
    for first in range(start, end, AHEAD):
        base = (row.to(tl.int64) * T + first) * C
        loaded = ()
        for ahead in tl.static_range(AHEAD):
            offset, age, real = step_place(walk, row, base, first, ahead, T, C)
            value = tl.load(x + offset + columns, mask=in_c & real, other=0.0)
            slope = tl.load(dy + offset + columns, mask=in_c & real, other=0.0)
            loaded = loaded + ((value, slope, age),)
        for ahead in tl.static_range(AHEAD):
            value, slope, age = loaded[ahead]
            value = value.to(tl.float32)
            dz, seen, done, grads = slope_step(value, slope.to(tl.float32), ring, grads, taps, age, W, walk is not None)
            store_input_gradient(dx, dhistory, walk, done, row, base, first, ahead, start, end, columns, in_c, T, C, W)
            grown = ()
            for j in tl.static_range(W - 1):
                grown = grown + (parts[j] + dz * seen[W - 2 - j],)
            parts = grown + (parts[W - 1] + dz * value,)
            if W > 1:
                ring = (value,) + ring[: W - 2]
    # The last inputs of the block also meet the next block's first tokens.
    stop = start + tl.cdiv(end - start, AHEAD) * AHEAD
    base = (row.to(tl.int64) * T + stop) * C
    for more in tl.static_range(W - 1):
        offset, age, real = step_place(walk, row, base, stop, more, T, C)
        value = tl.load(x + offset + columns, mask=in_c & real, other=0.0).to(tl.float32)
        slope = tl.load(dy + offset + columns, mask=in_c & real, other=0.0).to(tl.float32)
        _, _, done, grads = slope_step(value, slope, ring, grads, taps, age, W, walk is not None)
        store_input_gradient(dx, dhistory, walk, done, row, base, stop, more, start, end, columns, in_c, T, C, W)
        ring = (value,) + ring[: W - 2]
    part = (row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * W
    for j in tl.static_range(W):
        tl.store(dweight + (part + j) * C + columns, parts[j], mask=in_c)


def conv_config(rows: int, tokens: int, channels: int, width: int, *, backward: bool = False) -> dict[str, int]:
    """Sizes of one program, from the shape alone.

    128 tokens cost 7% more reads for the inputs of the neighbours (backward) and 4% for the parts of dweight; fewer tokens where
    128 would give less than two programs for each of the 660 places of an H200. Registers decide the rest: the packed backward
    pass with 4 taps takes 100 with the loads of four steps together (5 programs a processor), 134 with those of eight (3 programs).
    """
    block = 512 if width <= 4 else 256
    steps = 128
    while steps > 32 and rows * triton.cdiv(channels, block) * triton.cdiv(tokens, steps) < 1320:
        steps //= 2
    return {"STEPS": steps, "BC": block, "AHEAD": 8 if width <= 4 and not backward else 4, "warps": 4}


def conv_silu_triton(x, weight, *, history=None, segment_ids=None):
    """`silu(sum_j weight[j] * x[t - (W-1) + j])` with the meaning, arguments and results of `moejax.ops.short_conv`.

    x [B,T,C] float32 or bfloat16; weight [W,C], W <= 8; history [B,W-1,C] or None; segment_ids [B,T] or None. Sums are float32.
    Returns (y [B,T,C], the last W-1 inputs [B,W-1,C] of the last document), both in x.dtype. Differentiable in x, weight and
    history; what the backward pass keeps is its inputs. vmap folds into B (at most 65535 rows).
    """
    check_conv(x, weight, history, segment_ids)
    walk = None if segment_ids is None else walk_codes(segment_ids, weight.shape[0])
    if weight.shape[0] == 1:
        history = None  # [B,0,C]
    operands = [a for a in (x, weight, history) if a is not None]
    x, weight = match_varying(x, *operands), match_varying(weight, *operands)
    if history is not None:
        history = match_varying(history.astype(x.dtype), *operands)
    return _conv(x, weight, history, walk)


def walk_codes(segment_ids, width: int):
    """What a walk over packed rows needs of step i, [B,T] int32: token << 4 | age << 1 | real.

    The real tokens go first and padding last, each in its own order. age: how many of the W-1 steps before belong to the same
    document, 0 at padding; steps before the first one hold the history and belong to the first document. T < 2^27.
    """
    real = segment_ids > 0
    # Counted and scattered: a sort of 65536 tokens is 21 launches on a GPU, this is 8.
    ahead = jnp.cumsum(real, axis=1, dtype=jnp.int32)
    behind = jnp.cumsum(~real, axis=1, dtype=jnp.int32)
    place = jnp.where(real, ahead, ahead[:, -1:] + behind) - 1
    tokens = jnp.broadcast_to(jnp.arange(real.shape[1], dtype=jnp.int32), real.shape)
    rows = jnp.arange(real.shape[0], dtype=jnp.int32)[:, None]
    token = jnp.zeros_like(place).at[rows, place].set(tokens, unique_indices=True)
    ids = jnp.take_along_axis(segment_ids, token, axis=1)
    before = jnp.pad(ids, ((0, 0), (width - 1, 0)), mode="edge")
    same = [before[:, width - 1 - back : width - 1 - back + ids.shape[1]] == ids for back in range(1, width)]
    age = sum((a.astype(jnp.int32) for a in same), jnp.zeros_like(token))
    return token << 4 | jnp.where(ids > 0, age << 1 | 1, 0)


def check_conv(x, weight, history, segment_ids) -> None:
    """Raise ValueError where shapes or dtypes break the rules of conv_silu_triton."""
    require_rank(3, "[B,T,C]", x=x)
    require_rank(2, "[W,C]", weight=weight)
    B, T, C = x.shape
    W = weight.shape[0]
    if 0 in x.shape or not 1 <= W <= WIDEST or weight.shape[1] != C:
        raise ValueError(f"x is {x.shape}, weight {weight.shape}; they must be [B,T,C], no axis empty, and [W,C] with 1 <= W <= {WIDEST}.")
    for name, a, shape in (("history", history, (B, W - 1, C)), ("segment_ids", segment_ids, (B, T))):
        if a is not None and a.shape != shape:
            raise ValueError(f"{name} has shape {a.shape}; with x {x.shape} and {W} taps it must be {shape}.")
    for name, a in (("x", x), ("weight", weight), ("history", history)):
        if a is not None and a.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"{name} has dtype {a.dtype}; this kernel takes float32 and bfloat16.")
    if segment_ids is not None and not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids has dtype {segment_ids.dtype}; it must be integers.")


@jax.custom_vjp
def _conv(x, weight, history, walk):
    y = over_rows(_forward, (x, history, walk), (weight,))
    token, from_x, old, from_history = _last_inputs(walk, x.shape, weight.shape[0])
    last = jnp.where(from_x, jnp.take_along_axis(x, token, axis=1), 0)
    if history is not None:
        last = jnp.where(from_history, jnp.take_along_axis(history, old, axis=1), last)
    return y, last


def _conv_fwd(x, weight, history, walk):
    return _conv(x, weight, history, walk), (x, weight, history, walk)


def _conv_bwd(saved, cotangents):
    x, weight, history, walk = saved
    dy, dlast = cotangents
    dx, parts, dhistory = over_rows(_backward, (x, history, walk, dy), (weight,))
    dweight = parts.sum((0, 1)).astype(weight.dtype)
    # W-1 rows each, which XLA adds in place.
    token, from_x, old, from_history = _last_inputs(walk, x.shape, weight.shape[0])
    rows = jnp.arange(x.shape[0])[:, None]
    dx = dx.at[rows, token[..., 0]].add(jnp.where(from_x, dlast, 0))
    if history is not None:
        dhistory = dhistory.at[rows, old[..., 0]].add(jnp.where(from_history, dlast, 0))
    return dx, dweight, dhistory, None


_conv.defvjp(_conv_fwd, _conv_bwd)


def _last_inputs(walk, shape, width):
    """Where the last W-1 inputs of the last document stand: a token of x, or a row of the history, or neither (zeros).

    Returns (token, is it there, row of the history, is it there), [B,W-1,1] each.
    """
    batch, tokens, _ = shape
    back = jnp.arange(width - 2, -1, -1, dtype=jnp.int32)  # steps before the last real one
    if walk is None:
        step = jnp.broadcast_to(tokens - 1 - back, (batch, width - 1))
        token, same = jnp.maximum(step, 0), True
    else:
        count = jnp.sum(walk & 1, axis=1, keepdims=True)
        step = count - 1 - back
        token = jnp.take_along_axis(walk, jnp.maximum(step, 0), axis=1) >> 4
        age = (jnp.take_along_axis(walk, jnp.maximum(count - 1, 0), axis=1) >> 1) & 7
        same = (back <= age) | (count == 0)  # a row of padding hands its history on
    old = jnp.minimum(step, -1) + width - 1
    return tuple(a[..., None] for a in (token, same & (step >= 0), old, same & (step < 0)))


def _launch(kernel, out_type, operands, shape, width, **more):
    config = conv_config(*shape, width, backward=kernel is conv_backward_kernel)
    grid = (triton.cdiv(shape[2], config["BC"]), triton.cdiv(shape[1], config["STEPS"]), shape[0])
    warps = config.pop("warps")
    sizes = {"T": shape[1], "C": shape[2], "W": width, **more, **config}
    return call(kernel, *operands, out_type=out_type, grid=grid, num_warps=warps, num_stages=1, **sizes)


def _forward(rows, shared):
    x, history, walk = rows
    operands = (x, shared[0], history, walk)
    return _launch(conv_forward_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), operands, x.shape, shared[0].shape[0])


def _backward(rows, shared):
    x, history, walk, dy = rows
    width = shared[0].shape[0]
    blocks = triton.cdiv(x.shape[1], conv_config(*x.shape, width)["STEPS"])
    parts = jax.ShapeDtypeStruct((x.shape[0], blocks, width, x.shape[2]), jnp.float32)
    out = (jax.ShapeDtypeStruct(x.shape, x.dtype), parts)
    operands = (x, shared[0], history, walk, dy)
    if history is None:
        return *_launch(conv_backward_kernel, out, operands, x.shape, width, dhistory=None), None
    out += (jax.ShapeDtypeStruct(history.shape, history.dtype),)
    return _launch(conv_backward_kernel, out, operands, x.shape, width)
