"""Triton's dtypes: its own objects, one instance each, mapped to NumPy's; which type `a op b` has."""

import functools
import math

import ml_dtypes
import numpy as np
import triton.language as tl

bf16 = ml_dtypes.bfloat16
_SAME_NAME = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64".split()
_NP = {tl.int1: np.bool_, tl.bfloat16: bf16} | {getattr(tl, name): getattr(np, name) for name in _SAME_NAME}
_BY_NAME = {dtype.name: dtype for dtype in _NP}
_NP_BY_NAME = {dtype.name: np.dtype(n) for dtype, n in _NP.items()}
FROM_NP = {np.dtype(n): dtype for dtype, n in _NP.items()}


def unwrap(value):
    while isinstance(value, tl.constexpr):
        value = value.value
    return value


def the(dtype):
    """Triton dtype -> the one instance used here, so that `is` compares."""
    return _BY_NAME[unwrap(dtype).name]


def np_dtype(dtype):
    return _NP_BY_NAME[dtype.name]


def poison(shape, dtype):
    """What nothing was written to: NaN, integers 0x5a5a..., True."""
    if dtype == np.bool_:
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        return np.full((*shape, dtype.itemsize), 0x5A, np.uint8).view(dtype)[..., 0]
    return np.full(shape, np.nan, dtype)


def cast(a, dtype):
    """Array or NumPy scalar in another NumPy dtype, by Triton's rules."""
    if a.dtype == dtype:
        return a
    if dtype == np.bool_:
        return a != 0
    if dtype.kind in "iu" and a.dtype.kind not in "iub":
        return np.trunc(a.astype(np.float64)).astype(np.int64).astype(dtype)
    if a.dtype == bf16 or dtype == bf16:  # every other type reaches bf16 through float32
        return a.astype(np.float32).astype(dtype)
    return a.astype(dtype)


def scalar_type(x):
    """The type of a Python number."""
    if isinstance(x, bool | np.bool_):
        return tl.int1
    if isinstance(x, int | np.integer):
        if -(2**31) <= x < 2**31:
            return tl.int32
        if 2**31 <= x < 2**32:
            return tl.uint32
        return tl.int64 if x < 2**63 else tl.uint64
    x = abs(float(x))
    return tl.float32 if x == 0 or x != x or x == math.inf or 2.0**-126 <= x <= (2 - 2.0**-23) * 2.0**127 else tl.float64


@functools.cache
def promote(a, a_scalar, b, b_scalar, div):
    """Triton's rule for the type of `a op b`; *_scalar: a Python number, not a tensor."""
    if a_scalar != b_scalar:
        scalar, tensor = (a, b) if a_scalar else (b, a)
        if scalar.kind().value <= tensor.kind().value:
            return tl.float32 if div and tensor.is_bf16() else tensor
    if a.is_fp64() or b.is_fp64():
        return tl.float64
    if a.is_bf16() and b.is_bf16() and not div:
        return tl.bfloat16
    if a.is_floating() or b.is_floating():
        return tl.float32
    if a.int_signedness == b.int_signedness:
        return a if a.int_bitwidth > b.int_bitwidth else b
    if div:
        raise TypeError(f"cannot divide {a} by {b}: different signedness")
    unsigned, other = (a, b) if a.is_int_unsigned() else (b, a)
    return unsigned if unsigned.int_bitwidth >= other.int_bitwidth else other
