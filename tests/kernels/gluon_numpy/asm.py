"""Inline assembly: NumPy functions that stand for it, by its text."""

import re

import numpy as np

from .dtypes import np_dtype, the, unwrap
from .functions import flush
from .values import Tensor, tensor

_ASM = {}


def _key(text):
    return re.sub(r"\s+", " ", text).strip().rstrip(";").strip()


def register_asm(text, fn):
    """fn(*numpy arrays) -> array stands for this assembly; white space and the last semicolon do not matter."""
    _ASM[_key(text)] = fn


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    key = _key(unwrap(asm))
    if key not in _ASM:
        raise NotImplementedError(f"no stand-in for this assembly; call register_asm({key!r}, fn)")
    out = _ASM[key](*np.broadcast_arrays(*[tensor(a).a for a in args]))
    return Tensor(np.asarray(out, np_dtype(the(dtype))), the(dtype))


# What the kernels use. A result is rounded to the type that the call names.
register_asm("ex2.approx.ftz.f32 $0, $1", lambda x: flush(np.exp2(flush(x))))
register_asm("{ .reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t; }", lambda x: flush(np.exp2(-x)))
register_asm("{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }", lambda x: flush(np.exp2(-np.abs(x))))
register_asm("rcp.approx.ftz.f32 $0, $1", lambda x: flush(np.reciprocal(flush(x))))
register_asm("mov.b32 $0, $1", lambda x: x)
register_asm("cvt.rn.bf16x2.f32 $0, $2, $1", lambda x: x)
register_asm("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000", lambda x: x.astype(np.float32))  # two bfloat16 -> two float32
register_asm("and.b32 $0, $1, $2", lambda x, bits: np.where(bits != 0, x, x.dtype.type(0)))  # bits: all or none of an element
