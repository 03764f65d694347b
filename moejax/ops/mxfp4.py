"""MXFP4: blocks of 32 four-bit floats with one power-of-two scale (OCP Microscaling 1.0; Kimi K3's routed experts).

A code is sign, two exponent bits and one mantissa bit (E2M1): magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. A value is the code's
times 2^(scale byte - 127); byte 255 is NaN. A byte of codes holds an even column in its low and the next one in its high nibble.

All arithmetic is on integer bit patterns: XLA on a CPU flushes float32 subnormals to zero, and scale bytes 0 to 2 need them.

Shapes: n columns, a multiple of 32; codes uint8 [...,n/2], scales uint8 [...,n/32].
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moejax.kernels.common import FLOATS, require_float

from ..config import MXFP4_GROUP as GROUP

ZERO_SCALE = 125
"""Scale byte of a block of zeros, which any byte decodes: that of a block whose largest magnitude is 1."""
NAN_SCALE = 255
LARGEST_SCALE = 254
HOST_BLOCKS = 1024  # blocks a step on the host: temporaries of 64 to 256 KiB stay in the cache


class _Layout(NamedTuple):
    """How a float dtype spells its numbers."""

    bits: int
    mantissa: int
    lift: int  # exponent bias minus float32's
    nan: int  # upper 16 bits of NaN


_LAYOUTS = {
    "bfloat16": _Layout(16, 7, 0, 0x7FC0),
    "float32": _Layout(32, 23, 0, 0x7FC0),
    "float64": _Layout(64, 52, 896, 0x7FF8),
}
# Code i becomes i + 1 past midpoint i; on it only when i is odd (half to even). Exponent, mantissa in eighths, inclusive.
_MIDPOINTS = ((-2, 0, 0), (-1, 4, 1), (0, 2, 0), (0, 6, 1), (1, 2, 0), (1, 6, 1), (2, 2, 0))  # 0.25 0.75 1.25 1.75 2.5 3.5 5


def mxfp4_decode(codes, scales, *, dtype: Any = "float32") -> Any:
    """The values of packed weights, exactly.

    Args:
      codes: [...,n/2] uint8, low nibble = even column. NumPy arrays give a NumPy array without touching a device.
      scales: [...,n/32] uint8, value 2^(byte - 127).
      dtype: float32, bfloat16 or float64. Every value is exact in each, but float32 and bfloat16 end at 2^128: scale byte
        253 with codes 4.0 and 6.0, and byte 254 with codes from 2.0 on, give inf there.

    Returns:
      [...,n] in dtype. Scale byte 255 makes its 32 columns NaN. Subnormal values (bytes 0 to 2) keep their bits.

    Raises:
      ValueError: dtypes other than those above, or shapes that do not fit.
    """
    name = _dtype_name(dtype)
    _check_packed(codes, scales)
    if isinstance(codes, np.ndarray) and isinstance(scales, np.ndarray):
        return _decode_host(codes, scales, name)
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise ValueError("dtype float64 needs JAX's 64-bit mode; decode to float32, or enable it with jax.enable_x64(True).")
    return _decode_device(codes, scales, name)


def mxfp4_encode(w) -> tuple[Any, Any]:
    """Round weights to MXFP4: the scale of a block is 2^(floor(log2 of its largest magnitude) - 2), as K3's files use.

    Codes are rounded half to even and saturate at 6; the exponent saturates at scale bytes 0 and 254. The sign of -0.0 and of
    what rounds to zero is kept. A block of zeros gets scale byte 125. A decoded block that holds code 4.0 or 6.0 comes back
    byte for byte.

    Args:
      w: [...,n] float32, bfloat16 or float64, n the input columns. A NumPy array stays on the host.

    Returns:
      (codes [...,n/2] uint8, scales [...,n/32] uint8), of w's kind.

    Raises:
      ValueError: n not a positive multiple of 32, another dtype, or an inf or NaN weight (its position is named). Values of
        a traced array cannot be checked: a block with an inf or NaN gets scale byte 255 there and decodes to NaN.
    """
    require_float(w=w)
    if w.ndim == 0 or w.shape[-1] == 0 or w.shape[-1] % GROUP:
        raise ValueError(f"w has shape {tuple(w.shape)}; its last axis must be a positive multiple of {GROUP}, the block of MXFP4.")
    if isinstance(w, np.ndarray):
        return _encode_host(w)
    if not isinstance(w, Tracer):
        finite = jnp.isfinite(w)
        if not finite.all():
            _raise_non_finite(w, int(jnp.argmin(finite.reshape(-1))))
    return _encode_device(w)


def mxfp4_fake_quant(w, *, axis: int = -1) -> jax.Array:
    """w rounded to MXFP4 in blocks of 32 along `axis`; gradients pass straight through (K3 report: QAT from SFT onward).

    Args:
      w: float32, bfloat16 or float64; `axis` is the input axis, of a length that is a multiple of 32.
      axis: the axis of the blocks.

    Returns:
      Like w: `mxfp4_decode(*mxfp4_encode(w))` along `axis`, bit for bit. The derivative is the identity. A block with an
      inf or NaN becomes NaN, so that a diverged weight stays visible.

    Raises:
      ValueError: another dtype, or an axis that does not exist or has no multiple of 32 entries.
    """
    w = jnp.asarray(w)
    require_float(w=w)
    if not -w.ndim <= axis < w.ndim:
        raise ValueError(f"axis is {axis}; w has shape {w.shape}.")
    if w.shape[axis] == 0 or w.shape[axis] % GROUP:
        raise ValueError(f"w has shape {w.shape}; axis {axis} must be a positive multiple of {GROUP}, the block of MXFP4.")
    return _straight_through(w, axis % w.ndim)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _straight_through(w, axis):
    codes, scales = _round_device(w, axis)
    words = _upper_words(codes.astype(jnp.uint16), scales.astype(jnp.uint16), w.dtype.name, jnp)
    return _from_words(words, w.dtype.name).reshape(w.shape)


@_straight_through.defjvp
def _straight_through_jvp(axis, primals, tangents):
    return _straight_through(primals[0], axis), tangents[0]


def _dtype_name(dtype) -> str:
    name = np.dtype(dtype).name
    if name not in _LAYOUTS:
        raise ValueError(f"dtype is {name}; allowed: {', '.join(FLOATS)}.")
    return name


def _check_packed(codes, scales) -> None:
    if codes.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"codes has dtype {codes.dtype} and scales {scales.dtype}; both must be uint8.")
    fits = codes.ndim > 0 and codes.ndim == scales.ndim and codes.shape[:-1] == scales.shape[:-1]
    if not fits or codes.shape[-1] * 2 != scales.shape[-1] * GROUP or codes.shape[-1] == 0:
        raise ValueError(
            f"codes has shape {tuple(codes.shape)} and scales {tuple(scales.shape)}; they must be [...,n/2] and [...,n/{GROUP}], "
            f"n a positive multiple of {GROUP}."
        )


# Arithmetic on bit patterns, for NumPy and JAX alike.


def _upper_words(codes, scales, dtype: str, xp: ModuleType):
    """The upper 16 bits of each value: codes (0..15) and scales, uint16 and broadcastable -> uint16. All lower bits are 0."""
    layout = _LAYOUTS[dtype]
    magnitude = codes & 7
    exponent = magnitude >> 1
    half = magnitude & (exponent | exponent >> 1) & 1  # mantissa bit; code 1 (0.5) has none
    place = exponent + scales  # float32's exponent field plus 1
    if dtype == "float64":
        words = ((place + (layout.lift - 1)) << 4) | (half << 3)
    else:
        below = xp.minimum(place, 2)  # 0 and 1 are subnormal: the significand moves down, the exponent field is 0
        words = ((place - below) << 7) + (((half << 6) | 128) >> (2 - below))
        words = xp.minimum(words, 0x7F80)  # inf
    words = words * (magnitude != 0)
    words = xp.where(scales == NAN_SCALE, xp.asarray(layout.nan, words.dtype), words)
    return words | ((codes & 8) << 12)


def _scale_bytes(most, layout: _Layout, xp: ModuleType):
    """Largest magnitude pattern of a block -> floor(log2) + 125 clamped to 0..254, in most's dtype."""
    return xp.clip((most >> layout.mantissa) - (layout.lift + 2), 0, LARGEST_SCALE)


def _magnitude_codes(patterns, scales, layout: _Layout, xp: ModuleType):
    """Patterns of |w| (int32 or int64) and their blocks' scale bytes, broadcastable -> codes 0..7 uint8.

    A pattern minus the scale's exponent orders like the ratio of both, so seven comparisons with the midpoints round
    exactly: no bit is dropped before.
    """
    if layout.bits == 32:
        patterns = _continue_below_normal(patterns, xp)
    ratio = patterns - ((scales + layout.lift) << layout.mantissa)
    codes: Any = 0
    for exponent, eighths, inclusive in _MIDPOINTS:
        midpoint = (exponent << layout.mantissa) + (eighths << (layout.mantissa - 3)) - inclusive
        codes = codes + (ratio > midpoint).astype(np.uint8)
    return codes


def _continue_below_normal(patterns, xp: ModuleType):
    """float32 patterns with subnormals written as if the exponent field went below 0 (to -3: enough for scale byte 0)."""
    floats = patterns.astype(np.float32)  # a subnormal's pattern is its multiple of 2^-149, exact as a float
    wide = jax.lax.bitcast_convert_type(floats, jnp.int32) if xp is jnp else floats.view(np.int32)
    return xp.where(patterns < 1 << 23, xp.maximum(wide - (149 << 23), -(3 << 23)), patterns)


# On the host.


def _decode_host(codes: np.ndarray, scales: np.ndarray, dtype: str) -> np.ndarray:
    layout = _LAYOUTS[dtype]
    flat, per_block = codes.reshape(-1), scales.reshape(-1)
    out = np.empty(flat.size * 2, f"uint{layout.bits}")
    for start in range(0, per_block.size, HOST_BLOCKS):
        stop = min(start + HOST_BLOCKS, per_block.size)
        packed = flat[start * GROUP // 2 : stop * GROUP // 2]
        single = np.empty((packed.size, 2), np.uint16)
        single[:, 0], single[:, 1] = packed & 15, packed >> 4
        repeated = np.repeat(per_block[start:stop].astype(np.uint16), GROUP)
        words = _upper_words(single.reshape(-1), repeated, dtype, np)
        np.left_shift(words, layout.bits - 16, out=out[start * GROUP : stop * GROUP], dtype=out.dtype)
    return out.view(np.dtype(dtype)).reshape(*codes.shape[:-1], -1)


def _encode_host(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    flat = w.reshape(-1)
    codes, scales = np.empty(w.size // 2, np.uint8), np.empty(w.size // GROUP, np.uint8)
    for start in range(0, scales.size, HOST_BLOCKS):
        stop = min(start + HOST_BLOCKS, scales.size)
        patterns, sign, layout = _patterns_host(flat[start * GROUP : stop * GROUP])
        most = patterns.reshape(-1, GROUP).max(1)
        if most.max() >= _infinity(layout):
            _raise_non_finite(w, start * GROUP + int(np.argmax(patterns >= _infinity(layout))))
        scale = _scale_bytes(most, layout, np)
        single = _magnitude_codes(patterns, np.repeat(scale, GROUP), layout, np) | sign
        codes[start * GROUP // 2 : stop * GROUP // 2] = single[0::2] | (single[1::2] << 4)
        scales[start:stop] = np.where(most == 0, ZERO_SCALE, scale)
    return codes.reshape(*w.shape[:-1], -1), scales.reshape(*w.shape[:-1], -1)


def _patterns_host(part: np.ndarray) -> tuple[np.ndarray, np.ndarray, _Layout]:
    """-> (|w| as int32 or int64 patterns, sign bits as uint8 8 or 0, layout); bfloat16 as float32."""
    layout = _LAYOUTS[part.dtype.name]
    unsigned = np.ascontiguousarray(part).view(f"uint{layout.bits}")
    if layout.bits == 16:
        unsigned, layout = unsigned.astype(np.uint32) << 16, _LAYOUTS["float32"]
    sign = (unsigned >> (layout.bits - 4)).astype(np.uint8) & 8
    return (unsigned & ~np.array(1 << (layout.bits - 1), unsigned.dtype)).view(f"int{layout.bits}"), sign, layout


def _infinity(layout: _Layout) -> int:
    return ((1 << (layout.bits - 1 - layout.mantissa)) - 1) << layout.mantissa


def _raise_non_finite(w, index: int) -> None:
    position = tuple(int(i) for i in np.unravel_index(index, w.shape))
    raise ValueError(
        f"w{list(position)} is {float(w[position])}; MXFP4 holds finite weights only. Repair the weights, or keep them unpacked."
    )


# On a device.


@partial(jax.jit, static_argnums=2, inline=True)
def _decode_device(codes, scales, dtype: str):
    single = jnp.stack([codes & 15, codes >> 4], -1).reshape(*scales.shape, GROUP)
    words = _upper_words(single.astype(jnp.uint16), scales[..., None].astype(jnp.uint16), dtype, jnp)
    return _from_words(words, dtype).reshape(*codes.shape[:-1], -1)


def _from_words(words, dtype: str):
    layout = _LAYOUTS[dtype]
    wide = words.astype(f"uint{layout.bits}") << (layout.bits - 16)
    return jax.lax.bitcast_convert_type(wide, jnp.dtype(dtype))


@partial(jax.jit, inline=True)
def _encode_device(w):
    codes, scales = _round_device(w, w.ndim - 1)
    codes = codes.reshape(*w.shape[:-1], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4), scales[..., 0]


@partial(jax.jit, static_argnums=1, inline=True)
def _round_device(w, axis: int):
    """-> codes uint8 with `axis` split into [n/32,32], scales uint8 with [n/32,1] there. Blocks that are not finite: 255."""
    layout = _LAYOUTS[w.dtype.name]
    split = w.reshape(*w.shape[:axis], -1, GROUP, *w.shape[axis + 1 :])
    unsigned = jax.lax.bitcast_convert_type(split, jnp.dtype(f"uint{layout.bits}"))
    if layout.bits == 16:
        unsigned, layout = unsigned.astype(jnp.uint32) << 16, _LAYOUTS["float32"]
    sign = (unsigned >> (layout.bits - 4)).astype(jnp.uint8) & 8
    patterns = (unsigned & ((1 << (layout.bits - 1)) - 1)).astype(f"int{layout.bits}")
    most = jnp.max(patterns, axis=axis + 1, keepdims=True)
    scale = _scale_bytes(most, layout, jnp)
    codes = _magnitude_codes(patterns, scale, layout, jnp) | sign
    scale = jnp.where(most == 0, ZERO_SCALE, scale)
    return codes, jnp.where(most >= _infinity(layout), NAN_SCALE, scale).astype(jnp.uint8)
