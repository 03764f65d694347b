"""Global memory: pointers, load, store."""

import numpy as np
import triton.language as tl

from .dtypes import poison
from .state import KernelError, current, kernel_line
from .values import Tensor, fit, tensor


class Memory:
    """Global memory of one array, flat."""

    def __init__(self, array, name):
        self.flat, self.name = array.reshape(-1), name
        if array.size and not np.shares_memory(self.flat, array):
            raise ValueError(f"{name}: pass a C-contiguous array")


class Pointer(Tensor):
    """Element offsets `a` (int64) into `mem`."""

    __slots__ = ("mem",)

    def __init__(self, mem, a, dtype):
        self.mem, self.a, self.dtype = mem, a, dtype

    def like(self, a):
        return Pointer(self.mem, a, self.dtype)

    def _move(self, o, sign):
        o = tensor(o)
        if isinstance(o, Pointer) or not o.dtype.is_int():
            raise KernelError("a pointer moves by integers only")
        fit(self.a, o.a)
        return self.like(self.a + sign * o.a.astype(np.int64))

    def __add__(self, o):
        return self._move(o, 1)

    __radd__ = __add__

    def __sub__(self, o):
        return self._move(o, -1)

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        raise KernelError("casts of pointers have no stand-in")


def _keep(mask, shape):
    """-> bools [shape]"""
    return np.broadcast_to(tensor(mask).to(tl.int1).a, shape)


def _check_bounds(pointer, off, what):
    lo, hi, size = off.min(), off.max(), pointer.mem.flat.size
    if lo < 0 or hi >= size:
        raise KernelError(f"{what} of {pointer.mem.name} at element {lo if lo < 0 else hi}; it has {size} ({kernel_line()})")


def load(pointer, mask=None, other=None, cache_modifier="", eviction_policy="", volatile=False):
    off, flat, dtype = np.asarray(pointer.a), pointer.mem.flat, pointer.dtype.element_ty
    shape = off.shape if mask is None else np.broadcast_shapes(off.shape, tensor(mask).a.shape)
    keep = None if mask is None else _keep(mask, shape)
    if keep is None or keep.all():
        off = np.broadcast_to(off, shape)
        _check_bounds(pointer, off, "load")
        return Tensor(flat[off], dtype)
    out = poison(shape, flat.dtype)
    if other is not None:
        out[...] = tensor(other).to(dtype).a
    if keep.any():
        inside = np.broadcast_to(off, shape)[keep]
        _check_bounds(pointer, inside, "load")
        out[keep] = flat[inside]
    result = Tensor.__new__(Tensor)  # not checked for finite=True: a masked lane is poison by design, not a value of the kernel
    result.a, result.dtype = out, dtype
    return result


def store(pointer, value, mask=None, cache_modifier="", eviction_policy=""):
    off, flat = np.asarray(pointer.a), pointer.mem.flat
    value = tensor(value).to(pointer.dtype.element_ty).a
    if current().gluon and np.broadcast_shapes(np.shape(value), off.shape) != off.shape:
        raise KernelError(f"store of {np.shape(value)} through pointers {off.shape}")
    value = np.broadcast_to(value, off.shape)
    keep = np.ones(off.shape, bool) if mask is None else _keep(mask, off.shape)
    if keep.any():
        inside = off[keep]
        _check_bounds(pointer, inside, "store")
        flat[inside] = value[keep]
