"""Tensors of a kernel and their arithmetic."""

import numbers
import types

import numpy as np
import triton.language as tl
from triton.experimental.gluon.language import _layouts

from .dtypes import bf16, cast, np_dtype, promote, scalar_type, the, unwrap
from .state import KernelError, current, kernel_line, local

METHODS = {}  # x.sum(0), x.reshape(...): filled by language.py


class _AnyLayout(_layouts.DistributedLayout):
    """The layout of every tensor here: nothing is known but its rank."""

    def __init__(self, rank):
        super().__setattr__("_rank", rank)

    rank = property(lambda self: self._rank)


class Tensor:
    """A value of the kernel: NumPy array `a` (0-d for a scalar) and triton dtype `dtype`. Never changed in place."""

    __slots__ = ("a", "dtype")
    __array_ufunc__ = None  # numpy scalars on the left leave the operator to us

    def __init__(self, a, dtype):
        self.a, self.dtype = a, dtype
        if local.state.finite and dtype is tl.bfloat16 and not np.isfinite(np.asarray(a, np.float32)).all():
            raise KernelError("a bf16 value is not finite")

    shape = property(lambda self: list(self.a.shape))
    ndim = rank = property(lambda self: self.a.ndim)
    type = property(lambda self: types.SimpleNamespace(scalar=self.dtype, shape=self.shape, layout=_AnyLayout(self.a.ndim)))

    def like(self, a):
        return Tensor(a, self.dtype)

    def __repr__(self):
        return f"Tensor({self.dtype}, {self.a})"

    def __bool__(self):
        if self.a.ndim:
            raise KernelError("the truth of a block tensor is not defined (`if`, `and`, `or`, `not` take scalars)")
        return bool(self.a)

    def __getitem__(self, index):
        index = tuple(unwrap(i) for i in (index if isinstance(index, tuple | list) else (index,)))
        if any(not (i is None or (isinstance(i, slice) and i == slice(None))) for i in index):
            raise KernelError(f"only None and : may index a tensor, got {index}")
        return self.like(np.asarray(self.a)[index])

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        dtype = the(dtype)
        if unwrap(bitcast):
            return Tensor(np.ascontiguousarray(self.a).view(np_dtype(dtype)).reshape(self.a.shape), dtype)
        return self if dtype is self.dtype else Tensor(cast(self.a, np_dtype(dtype)), dtype)

    def __neg__(self):
        return arith(np.subtract, 0, self)

    def __invert__(self):
        return self.like(np.invert(self.a))

    def __getattr__(self, name):
        fn = METHODS.get(name)
        if fn is None:
            raise AttributeError(f"tensor has no attribute {name!r}")
        return lambda *args, **kwargs: fn(self, *args, **kwargs)


def tensor(x):
    if isinstance(x, Tensor):
        return x
    x = unwrap(x)
    if isinstance(x, numbers.Number | np.generic):
        dtype = scalar_type(x)
        return Tensor(np_dtype(dtype).type(x), dtype)
    raise KernelError(f"not a tensor or number: {x}")


def integer(x):
    """A Python int from a constexpr, a number or a scalar of the kernel."""
    if isinstance(x, Tensor) and x.a.ndim:
        raise KernelError("a scalar is needed")
    return int(x.a if isinstance(x, Tensor) else unwrap(x))


def constant(x):
    if isinstance(x, Tensor):
        raise KernelError("a constexpr is needed here, got a runtime value")
    return int(unwrap(x))


def constants(shape):
    shape = unwrap(shape)
    return tuple(constant(s) for s in (shape if isinstance(shape, tuple | list) else (shape,)))


def fit(a, b):
    """Broadcast check: gluon wants equal ranks (or a scalar), triton pads on the left."""
    if a.ndim != b.ndim and a.ndim and b.ndim and current().gluon:
        raise KernelError(f"rank mismatch: {a.shape} and {b.shape}")


def _number(x):
    """The Python number that x is, or None."""
    if isinstance(x, Tensor):
        return None
    x = unwrap(x)
    return x.item() if isinstance(x, np.generic) else x if isinstance(x, numbers.Number) else None


def pair(a, b, div=False):
    """The two arrays in their common type, and that type."""
    if any(isinstance(x, Tensor) and x.dtype.is_ptr() for x in (a, b)):
        raise KernelError("pointers take only + and - with integers")
    na, nb = _number(a), _number(b)
    if (na is None) == (nb is None):
        a, b = tensor(a), tensor(b)
        fit(a.a, b.a)
        dtype = promote(a.dtype, False, b.dtype, False, div)
        return cast(a.a, np_dtype(dtype)), cast(b.a, np_dtype(dtype)), dtype
    x, number = (tensor(a), nb) if na is None else (tensor(b), na)
    dtype = promote(scalar_type(number), True, x.dtype, False, div)
    if number < 0 and dtype.is_int_unsigned():
        raise KernelError(f"negative number {number} with an unsigned tensor")
    value = np_dtype(dtype).type(number)  # an integer out of range raises OverflowError, as triton refuses it
    array = cast(x.a, np_dtype(dtype))
    return (array, value, dtype) if na is None else (value, array, dtype)


def float_op(op, dtype, *arrays):
    """op in the arithmetic of dtype: bf16 goes through float32 and rounds once."""
    if dtype is tl.bfloat16:
        return op(*[x.astype(np.float32) for x in arrays]).astype(bf16)
    return op(*arrays)


def _quotient(a, b):
    if not np.all(b):
        raise KernelError("integer division by zero")
    q = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -q, q).astype(np.result_type(a, b))


_CHECKED = {np.add, np.subtract, np.multiply, np.left_shift}


def arith(op, a, b, div=False, ints=False):
    x, y, dtype = pair(a, b, div)
    if op is np.divide and dtype.is_int():
        dtype, x, y = tl.float32, x.astype(np.float32), y.astype(np.float32)
    if dtype.is_floating():
        if ints:
            raise KernelError(f"{op.__name__} needs integers, got {dtype}")
        return Tensor(float_op(op, dtype, x, y), dtype)
    if dtype is tl.int1 and op in _CHECKED:
        raise KernelError(f"{op.__name__} of two int1; & | ^ are meant")
    if op in _CHECKED and dtype.int_bitwidth <= 32 and dtype.is_int_signed():
        exact = op(x.astype(np.int64), y.astype(np.int64))
        lo, hi = (int(exact),) * 2 if exact.ndim == 0 else (int(exact.min(initial=0)), int(exact.max(initial=0)))
        limit = 1 << (dtype.int_bitwidth - 1)
        if lo < -limit or hi >= limit:
            raise KernelError(f"{dtype} overflow: {op.__name__} gives {lo if lo < -limit else hi} ({kernel_line()})")
        return Tensor(exact.astype(np_dtype(dtype)), dtype)
    if op is np.fmod and not np.all(y):
        raise KernelError("integer modulo zero")
    return Tensor(op(x, y), dtype)


def _compare(op, a, b):
    x, y, _ = pair(a, b)
    return Tensor(op(x, y), tl.int1)


_INTS = dict(ints=True)
for _name, _op, _how in (
    ("add", np.add, {}), ("sub", np.subtract, {}), ("mul", np.multiply, {}), ("mod", np.fmod, dict(div=True)),
    ("truediv", np.divide, dict(div=True)), ("floordiv", _quotient, dict(div=True, ints=True)), ("and", np.bitwise_and, _INTS),
    ("or", np.bitwise_or, _INTS), ("xor", np.bitwise_xor, _INTS), ("lshift", np.left_shift, _INTS), ("rshift", np.right_shift, _INTS),
):  # fmt: skip
    setattr(Tensor, f"__{_name}__", lambda a, b, op=_op, how=_how: arith(op, a, b, **how))
    setattr(Tensor, f"__r{_name}__", lambda a, b, op=_op, how=_how: arith(op, b, a, **how))
for _name, _op in (
    ("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal), ("eq", np.equal), ("ne", np.not_equal),
):  # fmt: skip
    setattr(Tensor, f"__{_name}__", lambda a, b, op=_op: _compare(op, a, b))
