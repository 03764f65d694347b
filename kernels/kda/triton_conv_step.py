"""One token of the short convolutions before queries, keys and values, in one launch (plain Triton, NVIDIA GPUs).

Import it only where Triton is installed. Shapes: B rows, C channels of one of the three inputs, W taps.

Launches decide: a row of 3 x 1024 channels is 49 KB, nothing beside the 2.5 us of a launch, of which XLA's form takes nine (a copy of
each history, which its result overwrites, then one for each output and each new history).
"""
# ruff: noqa: RUF005  (Triton's front end joins tuples with + and knows no starred items)

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from ..common import require_rank
from .triton_launch import call
from .triton_rows import over_rows, sigmoid

WIDEST = 8  # taps: W inputs and W weights of a channel are registers
BLOCK, WARPS = 256, 2  # channels of a program: 4 a thread, loads of 8 bytes of bfloat16


@triton.jit
def step_channels(x, weight, history, y, row, block, active, C: tl.constexpr, W: tl.constexpr, BC: tl.constexpr, ROW: tl.constexpr):
    """One block of channels: y = silu(sum of taps), and the history moves up by one. An inactive row gives 0 and nothing of it is read.

    ROW: from one row of x to the next.
    """
    columns = block * BC + tl.arange(0, BC)
    in_c = (columns < C) | (C % BC == 0)
    read = in_c & active
    past = history + row.to(tl.int64) * ((W - 1) * C) + columns
    inputs = ()
    for j in tl.static_range(W - 1):
        # As in the plain form: a history wider than x is read in x's dtype.
        inputs = inputs + (tl.load(past + j * C, mask=read, other=0.0).to(x.dtype.element_ty),)
    inputs = inputs + (tl.load(x + row.to(tl.int64) * ROW + columns, mask=read, other=0.0),)
    total = inputs[0].to(tl.float32) * tl.load(weight + columns, mask=in_c, other=0.0).to(tl.float32)
    for j in tl.static_range(1, W):
        total += inputs[j].to(tl.float32) * tl.load(weight + j * C + columns, mask=in_c, other=0.0).to(tl.float32)
    result = tl.where(active, total * sigmoid(total), 0.0)
    tl.store(y + row.to(tl.int64) * C + columns, result.to(y.dtype.element_ty), mask=in_c)
    for j in tl.static_range(1, W):
        tl.store(past + (j - 1) * C, inputs[j].to(history.dtype.element_ty), mask=read)


@triton.jit
def conv_step_kernel(
    q_history,  # [B,W-1,CQ], changed in place, as the next two
    k_history,  # [B,W-1,CK]
    v_history,  # [B,W-1,CV]
    x,  # [B,CQ+CK+CV]
    q_weight,  # [W,CQ]
    k_weight,  # [W,CK]
    v_weight,  # [W,CV]
    active,  # [B] int32, 0 or 1, or None
    q,  # [B,CQ]
    k,  # [B,CK]
    v,  # [B,CV]
    CQ: tl.constexpr,  # constants: jax-triton tells Triton nothing of an integer's divisors
    CK: tl.constexpr,
    CV: tl.constexpr,
    W: tl.constexpr,
    BC: tl.constexpr,
):
    block, row = tl.program_id(0), tl.program_id(1)
    q_blocks = (CQ + BC - 1) // BC
    k_blocks = (CK + BC - 1) // BC
    reads = row >= 0
    if active is not None:
        reads = tl.load(active + row) != 0
    if block < q_blocks:
        step_channels(x, q_weight, q_history, q, row, block, reads, CQ, W, BC, CQ + CK + CV)
    elif block < q_blocks + k_blocks:
        step_channels(x + CQ, k_weight, k_history, k, row, block - q_blocks, reads, CK, W, BC, CQ + CK + CV)
    else:
        step_channels(x + CQ + CK, v_weight, v_history, v, row, block - q_blocks - k_blocks, reads, CV, W, BC, CQ + CK + CV)


def conv_step_triton(inputs, weights, histories, *, active=None):
    """One token of three convolutions with SiLU. Not differentiable.

    inputs: three [B,C], C may differ, the dtype may not; weights: three [W,C], 2 <= W <= 8, the last tap meets the input; histories:
    three [B,W-1,C], oldest first; float32 or bfloat16. active: bool [B] or None (all); an inactive row gives 0 and keeps its history,
    and neither its inputs nor its history are read.

    Returns (three outputs [B,C] in the inputs' dtype, three histories with the inputs behind them). Histories are updated in place
    where their buffers may be reused (see kda_decode_triton). Under vmap all but the weights fold into the rows (at most 65535).
    """
    inputs, weights, histories = tuple(inputs), tuple(weights), tuple(histories)
    check_conv_step(inputs, weights, histories, active)
    W, widths = weights[0].shape[0], [x.shape[1] for x in inputs]

    def launch(rows, weights):
        """Every operand of `rows` with an axis in front, which vmap folds into."""
        inputs, histories, active = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
        like = lambda arrays: tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        grid = (sum(triton.cdiv(C, BLOCK) for C in widths), inputs[0].shape[0])
        sizes = dict(zip(("CQ", "CK", "CV"), widths, strict=True), W=W, BC=BLOCK)
        how = {"out_type": (like(inputs), like(histories)), "grid": grid, "num_warps": WARPS, "num_stages": 1}
        aliases = {"q_history": 3, "k_history": 4, "v_history": 5}
        # One operand: XLA makes the three projections one product, and of its result this is one slice instead of three.
        joint = jnp.concatenate(inputs, axis=1)
        out = call(conv_step_kernel, *histories, joint, *weights, active, aliases=aliases, **how, **sizes)
        return jax.tree.map(lambda x, like: x.reshape(like.shape), out, rows[:2])

    active = None if active is None else active.astype(jnp.int32)
    out = over_rows(launch, jax.tree.map(lambda x: x[None], (inputs, histories, active)), weights)
    return jax.tree.map(lambda x: x[0], out)


def check_conv_step(inputs, weights, histories, active) -> None:
    """Raise ValueError where shapes or dtypes break the rules of conv_step_triton."""
    if not len(inputs) == len(weights) == len(histories) == 3:
        raise ValueError(f"{len(inputs)} inputs, {len(weights)} weights, {len(histories)} histories; this kernel takes three of each.")
    B, W = inputs[0].shape[0], weights[0].shape[0]
    for x, weight, history in zip(inputs, weights, histories, strict=True):
        require_rank(2, "[B,C] or [W,C]", x=x, weight=weight)
        C = x.shape[1]
        if 0 in x.shape or not 2 <= W <= WIDEST or x.shape[0] != B or weight.shape != (W, C) or history.shape != (B, W - 1, C):
            raise ValueError(
                f"x is {x.shape}, weight {weight.shape}, history {history.shape}; they must be [B,C], no axis empty, [W,C] and [B,W-1,C], "
                f"2 <= W <= {WIDEST}, with one B and one W."
            )
        for name, a in (("x", x), ("weight", weight), ("history", history)):
            if a.dtype not in (jnp.float32, jnp.bfloat16):
                raise ValueError(f"{name} has dtype {a.dtype}; this kernel takes float32 and bfloat16.")
        if x.dtype != inputs[0].dtype:
            raise ValueError(f"inputs have dtypes {inputs[0].dtype} and {x.dtype}; this kernel takes one.")
    if active is not None and (active.shape != (B,) or active.dtype != jnp.bool_):
        raise ValueError(f"active is {active.dtype}{list(active.shape)}; it must be bool [B] = [{B}].")
