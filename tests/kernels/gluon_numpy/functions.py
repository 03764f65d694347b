"""Operations on tensors: creation, elementwise, shapes, reductions and scans, loops."""

import math

import numpy as np
import triton.language as tl

from .dtypes import cast, np_dtype, the, unwrap
from .state import KernelError, current, kernel_line
from .values import Tensor, constant, constants, fit, float_op, integer, pair, tensor


def program_id(axis):
    return Tensor(np.int32(current().cta.ids[constant(axis)]), tl.int32)


def num_programs(axis):
    return Tensor(np.int32(current().cta.grid[constant(axis)]), tl.int32)


def static_assert(cond, msg=""):
    cond = unwrap(cond)
    if isinstance(cond, Tensor) or not cond:
        raise KernelError(f"static_assert: {msg} ({kernel_line()})")


def runtime_range(*args, **kwargs):
    """range and tl.range: the loop variable is a runtime scalar, int32 (int64 if a bound is)."""
    wide = any(isinstance(a, Tensor) and a.dtype.int_bitwidth > 32 for a in args)
    dtype = tl.int64 if wide else tl.int32
    return (Tensor(np_dtype(dtype).type(i), dtype) for i in range(*[integer(a) for a in args]))


def static_range(*args, **kwargs):
    return range(*[constant(a) for a in args])


def _powers_of_two(shape):
    if any(n <= 0 or n & (n - 1) for n in shape):
        raise KernelError(f"shape {shape}: not powers of two")
    return shape


def arange(start, end, layout=None):
    start, end = constant(start), constant(end)
    _powers_of_two((end - start,))
    return Tensor(np.arange(start, end, dtype=np.int32), tl.int32)


def full(shape, value, dtype, layout=None):
    dtype = the(dtype)
    return Tensor(np.broadcast_to(cast(np.asarray(tensor(value).a), np_dtype(dtype)), _powers_of_two(constants(shape))), dtype)


def zeros(shape, dtype, layout=None):
    return full(shape, 0, dtype)


# ---------------------------------------------------------------- elementwise


def where(condition, x, y):
    c = tensor(condition).to(tl.int1).a
    a, b, dtype = pair(x, y)
    fit(a, c)
    fit(b, c)
    return Tensor(np.where(c, a, b), dtype)


def _quiet(op):
    """A NaN gives way to the other operand, Triton's default."""

    def fn(x, y):
        a, b, dtype = pair(x, y)
        return Tensor(float_op(op, dtype, a, b), dtype)

    return fn


maximum, minimum = _quiet(np.fmax), _quiet(np.fmin)


def _unary(op):
    def fn(x):
        x = tensor(x)
        if x.dtype not in (tl.float32, tl.float64):
            raise KernelError(f"expected fp32 or fp64, got {x.dtype}")
        return Tensor(op(x.a), x.dtype)

    return fn


def flush(x):
    """Denormals become zero, as in ex2 and rsqrt .approx.ftz, which triton 3.7 makes of exp2 and rsqrt (exp keeps them)."""
    return x * (np.abs(x) >= np.float32(2.0**-126)) if x.dtype == np.float32 else x


exp, exp2, log = _unary(np.exp), _unary(lambda x: flush(np.exp2(x))), _unary(np.log)
rsqrt = _unary(lambda x: x.dtype.type(1) / np.sqrt(flush(x)))


def absolute(x):
    return tensor(x).like(np.abs(tensor(x).a))


def sigmoid(x):
    return 1 / (1 + exp(-x))


def cdiv(x, div):
    return (x + div - 1) // div


# ---------------------------------------------------------------- shapes


def reshape(input, *shape, can_reorder=False):
    shape = constants(shape[0] if len(shape) == 1 else shape)
    if math.prod(shape) != input.a.size:
        raise KernelError(f"reshape of {input.shape} to {shape}")
    return input.like(input.a.reshape(shape))


def permute(input, *dims):
    return input.like(input.a.transpose(constants(dims[0] if len(dims) == 1 else dims)))


def join(a, b):
    x, y, dtype = pair(a, b)
    return Tensor(np.stack(np.broadcast_arrays(x, y), -1), dtype)


def split(a):
    if a.a.shape[-1] != 2:
        raise KernelError(f"split of {a.shape}: the last axis must be 2")
    return a.like(a.a[..., 0]), a.like(a.a[..., 1])


def convert_layout(value, layout, assert_trivial=False):
    return tensor(value)


# ---------------------------------------------------------------- reductions and scans


def associative_scan(input, axis, combine_fn, reverse=False):
    """input: a tensor or a tuple of them."""
    xs, axis = input if isinstance(input, tuple | list) else (input,), constant(axis)
    rows = [np.moveaxis(x.a, axis, 0) for x in xs]
    outs, now = [np.empty_like(r) for r in rows], None
    for i in range(len(rows[0]))[:: -1 if unwrap(reverse) else 1]:
        new = [x.like(r[i]) for x, r in zip(xs, rows, strict=True)]
        now = new if now is None else combine_fn(*now, *new)
        now = now if isinstance(now, tuple | list) else (now,)
        for o, v in zip(outs, now, strict=True):
            o[i] = v.a
    out = tuple(x.like(np.moveaxis(o, 0, axis)) for x, o in zip(xs, outs, strict=True))
    return out if xs is input else out[0]


def _reduction(op):
    def fn(input, axis=None, keep_dims=False):
        if input.dtype not in (tl.float32, tl.float64, tl.int32, tl.int64):
            raise NotImplementedError(f"a reduction of {input.dtype}: make it float32 or int32 first, as Triton does for most")
        axis = None if unwrap(axis) is None else constant(axis)
        return input.like(op.reduce(input.a, axis, dtype=input.a.dtype, keepdims=bool(unwrap(keep_dims))))

    return fn


sum_, max_ = _reduction(np.add), _reduction(np.fmax)
