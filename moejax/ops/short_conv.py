"""Causal depthwise convolution of a few taps with SiLU: the token mixing before KDA's queries, keys and values.

Shapes: B batch, T tokens, C channels, W taps (4 in the published models). x [B,T,C], weight [W,C], history [B,W-1,C].
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from moejax.kernels.common import accumulation_dtype, require_float, require_rank
from moejax.kernels.kda.choice import choose, run_differentiating_plain, run_keeping_inputs

# Limits of the kernel: taps of a channel live in registers; rows and blocks of 128 tokens are axes of a grid of at most 65535.
MOST_TAPS, MOST_ROWS, MOST_TOKENS = 8, 65535, 2**22


def short_conv(
    x: Array,
    weight: Array,
    *,
    history: Array | None = None,
    segment_ids: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """`silu(sum_j weight[j] * x[t - (W-1) + j])`, causal, restarting at each document, carrying its last inputs.

    Sums are float32 (float64 for float64 inputs). A tap never crosses a document boundary. Padding (segment id 0)
    takes no tap position and is never read, wherever it stands: a document with padding inside goes on after it.
    Source: Kimi K3 report section 2.1.1 (kernel 4, no bias, last tap = current token).

    Args:
      x: [B,T,C] float32, bfloat16 or float64; T >= 1.
      weight: [W,C], W >= 1; the last tap meets the current token.
      history: [B,W-1,C], the inputs before the first token, oldest first, for the first document only. None = zeros.
      segment_ids: [B,T] integers, 0 = padding, documents 1, 2, ... in order. None = one document without padding.
      implementation: "xla"; "triton" (one pass over the tokens, for NVIDIA Hopper; float32 or bfloat16, W <= 8); None: "triton"
        when the call is lowered for cuda and the kernel takes it, else "xla". Over several GPUs call it inside jax.shard_map
        (rows and channels may be cut): a jit alone cannot cut a kernel's launch. Forward-mode differentiation (jax.jvp) needs
        "xla" by name, and no segment_ids.
    Returns: (y [B,T,C] in `x.dtype`, 0 at padding; the last W-1 inputs [B,W-1,C] of the last document in `x.dtype`,
      padding not counted, zeros before the start of a document that is not the first; a row of padding only
      returns its history).
    Raises ValueError: a shape, dtype or name that breaks the rules above.
    Raises NotImplementedError: implementation="triton" that cannot run, with the reason.
    """
    check_short_conv(x, weight, history, segment_ids)
    name = choose("short_conv", implementation, _refused(x, weight), loss="2 to 5 times slower")
    history = None if history is None else history.astype(x.dtype)
    return run_keeping_inputs(name, _kernels, _plain, (x, weight, history, segment_ids))


def short_conv_step(x: Array, weight: Array, history: Array, *, active: Array | None = None) -> tuple[Array, Array]:
    """One token of `short_conv` for every row.

    x [B,C], weight [W,C], history [B,W-1,C]; active: [B] bool or None (all). Returns (y [B,C] in x.dtype, the history with x behind it);
    an inactive row gives 0 and keeps its history, and its x is not read.
    Raises ValueError: a shape or dtype that breaks these rules (float16 too).
    """
    return _step(x, weight, history, check_short_conv_step(x, weight, history, active))


def _step(x: Array, weight: Array, history: Array, active: Array | None) -> tuple[Array, Array]:
    """short_conv_step of checked operands."""
    inputs = jnp.concatenate([history.astype(x.dtype), x[:, None]], axis=1)
    y = _silu_of_taps([inputs[:, tap] for tap in range(weight.shape[0])], weight).astype(x.dtype)
    moved = inputs[:, 1:].astype(history.dtype)
    if active is None:
        return y, moved
    return jnp.where(active[:, None], y, 0), jnp.where(active[:, None, None], moved, history)


def short_conv_steps(
    inputs: Sequence[Array],
    weights: Sequence[Array],
    histories: Sequence[Array],
    *,
    active: Array | None = None,
    implementation: str | None = None,
) -> tuple[list[Array], list[Array]]:
    """`short_conv_step` of several convolutions: those of queries, keys and values.

    inputs: each [B,C], C of its own; weights: each [W,C]; histories: each [B,W-1,C]; active: as there.
    implementation: "xla"; "triton" (one launch for three of them, histories overwritten in place; NVIDIA Hopper, float32 and bfloat16,
      2 <= W <= 8); None: "triton" when the call is lowered for cuda and the kernel takes it, else "xla". Over several GPUs call it
      inside jax.shard_map (rows and channels may be cut).
    Returns (outputs, histories). Donate the histories to the jit around the call, else they are copied first. Differentiable, except by
    implementation="triton".
    Raises ValueError as short_conv_step, and NotImplementedError, with the reason, for a kernel that cannot run.
    """
    for x, weight, history in zip(inputs, weights, histories, strict=True):
        active = check_short_conv_step(x, weight, history, active)
    if len(rows := sorted({x.shape[0] for x in inputs})) > 1:
        raise ValueError(f"inputs have {', '.join(map(str, rows))} rows; they must be [B,C] with one B.")
    refused = _step_refused(inputs, weights, histories)
    name = choose("short_conv_steps", implementation, refused, loss="in 7 or 8 more launches")

    def plain(inputs, weights, histories, active):
        steps = [_step(x, w, h, active) for x, w, h in zip(inputs, weights, histories, strict=True)]
        return tuple(y for y, _ in steps), tuple(history for _, history in steps)

    def kernels(inputs, weights, histories, active):
        from moejax.kernels.kda.triton_conv_step import conv_step_triton  # Triton, at the first use

        return conv_step_triton(inputs, weights, histories, active=active)

    operands = (tuple(inputs), tuple(weights), tuple(histories), active)
    outputs, moved = run_differentiating_plain(name, "short_conv_steps", kernels, plain, operands)
    return list(outputs), list(moved)


def _refused(x: Array, weight: Array) -> str | None:
    """Why the kernel does not take these operands, or None."""
    if jnp.float64 in (x.dtype, weight.dtype):
        return "its kernel takes float32 and bfloat16, here float64"
    if weight.shape[0] > MOST_TAPS:
        return f"its kernel takes at most {MOST_TAPS} taps, here {weight.shape[0]}"
    if x.shape[0] > MOST_ROWS or x.shape[1] > MOST_TOKENS:
        return f"its kernel takes at most {MOST_ROWS} rows of {MOST_TOKENS} tokens, here {x.shape[0]} of {x.shape[1]}"
    return None


def _step_refused(inputs: Sequence[Array], weights: Sequence[Array], histories: Sequence[Array]) -> str | None:
    """Why the kernel of one step does not take these operands, or None."""
    if len(inputs) != 3:
        return f"its kernel takes three convolutions, here {len(inputs)}"
    if any(a.dtype == jnp.float64 for a in (*inputs, *weights, *histories)):
        return "its kernel takes float32 and bfloat16, here float64"
    dtypes = sorted({str(x.dtype) for x in inputs})
    if len(dtypes) > 1:
        return f"its kernel takes inputs of one dtype, here {', '.join(dtypes)}"
    taps = sorted({weight.shape[0] for weight in weights})
    if len(taps) > 1 or not 2 <= taps[0] <= MOST_TAPS:
        return f"its kernel takes from 2 to {MOST_TAPS} taps, the same for all, here {', '.join(map(str, taps))}"
    rows = inputs[0].shape[0]
    return f"its kernel takes at most {MOST_ROWS} rows, here {rows}" if rows > MOST_ROWS else None


def _kernels(x: Array, weight: Array, history: Array | None, segment_ids: Array | None) -> tuple[Array, Array]:
    from moejax.kernels.kda.triton_conv import conv_silu_triton  # Triton, at the first use

    return conv_silu_triton(x, weight, history=history, segment_ids=segment_ids)


def _plain(x: Array, weight: Array, history: Array | None, segment_ids: Array | None) -> tuple[Array, Array]:
    batch, tokens, channels = x.shape
    width = weight.shape[0]
    if history is None:
        history = jnp.zeros((batch, width - 1, channels), x.dtype)
    if segment_ids is None:
        inputs = jnp.concatenate([history, x], axis=1)
        taps = [inputs[:, j : j + tokens] for j in range(width)]
        return _silu_of_taps(taps, weight).astype(x.dtype), inputs[:, tokens:]
    return _packed(x, weight, history, segment_ids)


def _packed(x: Array, weight: Array, history: Array, segment_ids: Array) -> tuple[Array, Array]:
    """The documents' own tokens moved together (a permutation), shifted taps within one id, and the way back."""
    tokens, width = x.shape[1], weight.shape[0]
    real = segment_ids > 0
    place, source = _compaction(real)
    # Select before anything is read, so that NaN at padding stays out of values and gradients.
    compact = _permute(jnp.where(real[..., None], x, 0), source, place)
    ids = jnp.take_along_axis(segment_ids, source, axis=1)
    # After compaction the first id is the first document's (0 in a row of padding), which the history belongs to.
    ids = jnp.concatenate([jnp.broadcast_to(ids[:, :1], (ids.shape[0], width - 1)), ids], axis=1)
    inputs = jnp.concatenate([history, compact], axis=1)
    own = ids[:, width - 1 :]
    taps = [jnp.where((ids[:, j : j + tokens] == own)[..., None], inputs[:, j : j + tokens], 0) for j in range(width)]
    y = _permute(_silu_of_taps(taps, weight).astype(x.dtype), place, source)
    last = real.sum(axis=1, dtype=jnp.int32)[:, None] + jnp.arange(width, dtype=jnp.int32)
    last_ids = jnp.take_along_axis(ids, last, axis=1, mode="clip") if width > 1 else ids[:, :1]
    kept = jnp.take_along_axis(inputs, last[:, :-1, None], axis=1)
    # The row just before the end of the real tokens names the last document; in a row of padding it is the history's 0.
    same = last_ids[:, :-1] == last_ids[:, width - 2 : width - 1]
    return jnp.where(real[..., None], y, 0), jnp.where(same[..., None], kept, 0)


def _silu_of_taps(taps: list[Array], weight: Array) -> Array:
    dtype = accumulation_dtype(taps[0], weight)
    # The first product starts the sum: a single tap must not be added to a zero (-0.0 would lose its sign).
    total = taps[0].astype(dtype) * weight[0].astype(dtype)
    for tap, row in zip(taps[1:], weight[1:], strict=True):
        total = total + tap.astype(dtype) * row.astype(dtype)
    return total * jax.nn.sigmoid(total)


def _compaction(real: Array) -> tuple[Array, Array]:
    """Two inverse permutations [B,T]: each token's place when the real tokens go first, and each place's token."""
    ahead = jnp.cumsum(real, axis=1, dtype=jnp.int32)
    padding = jnp.cumsum(~real, axis=1, dtype=jnp.int32)
    place = jnp.where(real, ahead, ahead[:, -1:] + padding) - 1
    tokens = jnp.broadcast_to(jnp.arange(real.shape[1], dtype=jnp.int32), real.shape)
    rows = jnp.arange(real.shape[0], dtype=jnp.int32)[:, None]
    return place, jnp.zeros_like(place).at[rows, place].set(tokens, unique_indices=True)


@jax.custom_vjp
def _permute(x: Array, index: Array, inverse: Array) -> Array:
    """Rows of x [B,T,C] in the order `index` [B,T]. The transpose is the gather by `inverse`.

    Autodiff would scatter: forward and backward at [2,2048,512] on 2 CPU cores took 28 ms that way, 16 ms this way.
    """
    return jnp.take_along_axis(x, index[..., None], axis=1, mode="promise_in_bounds")


_permute.defvjp(
    lambda x, index, inverse: (_permute(x, index, inverse), (index, inverse)),
    lambda saved, cotangent: (_permute(cotangent, saved[1], saved[0]), None, None),
)


def check_short_conv_step(x: Array, weight: Array, history: Array, active: Array | None) -> Array | None:
    """The errors of short_conv_step; -> active as an array."""
    require_rank(2, "[B,C]", x=x)
    if 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; no axis of [B,C] may be empty (skip the call when there are no rows).")
    check_short_conv(x[:, None], weight, history, None)
    active = None if active is None else jnp.asarray(active)
    if active is not None and (active.shape != x.shape[:1] or active.dtype != jnp.bool_):
        raise ValueError(
            f"active is {active.dtype}{list(active.shape)}; it must be bool [B] = [{x.shape[0]}], False for a row without a token."
        )
    return active


def check_short_conv(x: Array, weight: Array, history: Array | None, segment_ids: Array | None) -> None:
    require_float(x=x, weight=weight, history=history)
    require_rank(3, "[B,T,C]", x=x)
    require_rank(2, "[W,C]", weight=weight)
    if 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; no axis of [B,T,C] may be empty (skip the call when there are no tokens).")
    batch, tokens, channels = x.shape
    width = weight.shape[0]
    if width < 1 or weight.shape[1] != channels:
        raise ValueError(f"weight has shape {weight.shape}; it must be [W,C] with W >= 1 taps and C = {channels} channels.")
    if history is not None and history.shape != (batch, width - 1, channels):
        raise ValueError(
            f"history has shape {history.shape}; it must be [B,W-1,C] = {[batch, width - 1, channels]}: the "
            f"last {width - 1} inputs before the first token, oldest first."
        )
    if segment_ids is not None:
        if segment_ids.shape != (batch, tokens) or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
            raise ValueError(
                f"segment_ids is {segment_ids.dtype}{list(segment_ids.shape)}; it must be integers [B,T] = "
                f"{[batch, tokens]} with 0 = padding and documents 1, 2, ..."
            )
