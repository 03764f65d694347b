"""Shared memory."""

import math

import numpy as np

from .checks import generic_write, touch
from .dtypes import np_dtype, poison, the, unwrap
from .state import KernelError, current, kernel_line
from .values import Tensor, constant, constants, integer, tensor


class MemDesc:
    """A view `a` of shared memory; all views of one allocation share its bytes."""

    def __init__(self, a, dtype, layout, name):
        self.a, self.dtype, self.layout, self.name = a, dtype, layout, name

    shape = property(lambda self: list(self.a.shape))
    rank = property(lambda self: self.a.ndim)

    def _view(self, a, what=""):
        return MemDesc(a, self.dtype, self.layout, self.name + what)

    def load(self, layout=None):
        current().cta.poke()
        touch(self, False, "the load")
        return Tensor(self.a.copy(), self.dtype)

    def store(self, value):
        current().cta.poke()
        value = tensor(value)
        if value.shape != self.shape:
            raise KernelError(f"store of {value.shape} into shared {self.shape}")
        if value.dtype is not self.dtype:
            raise KernelError(f"store of {value.dtype} into shared memory of {self.dtype}")
        touch(self, True, "the store")
        self.a[...] = value.a
        generic_write(self.a)

    def slice(self, start, length, dim=0):
        start, length, dim = constant(start), constant(length), constant(dim)
        if start < 0 or start + length > self.a.shape[dim]:
            raise KernelError(f"slice {start}+{length} of {self.name}{self.shape} dim {dim}")
        index = [slice(None)] * self.a.ndim
        index[dim] = slice(start, start + length)
        return self._view(self.a[tuple(index)], f"[{start}:{start + length}]")

    def index(self, index):
        index = integer(index)
        if not 0 <= index < self.a.shape[0]:
            raise KernelError(f"index {index} of {self.name}{self.shape}")
        return self._view(self.a[index : index + 1].reshape(self.a.shape[1:]), f"[{index}]")

    def permute(self, order):
        return self._view(self.a.transpose(constants(order)))

    def reshape(self, shape):
        out = self.a.reshape(constants(shape))
        if not np.shares_memory(out, self.a):
            raise KernelError(f"reshape of {self.name}{self.shape} to {shape} is not a view")
        return self._view(out)

    def _reinterpret(self, dtype, shape, layout=None):
        dtype, shape = the(dtype), constants(shape)
        if not self.a.flags.c_contiguous:
            raise KernelError(f"_reinterpret of {self.name}: not contiguous")
        raw = self.a.reshape(-1).view(np.uint8)
        nbytes = math.prod(shape) * np_dtype(dtype).itemsize
        if nbytes > raw.size:
            raise KernelError(f"_reinterpret of {self.name}: {nbytes} bytes from {raw.size}")
        return MemDesc(raw[:nbytes].view(np_dtype(dtype)).reshape(shape), dtype, unwrap(layout) or self.layout, self.name)

    def _keep_alive(self):
        pass


def allocate_shared_memory(element_ty, shape, layout=None):
    dtype, roots = the(element_ty), current().cta.roots
    a = poison(constants(shape), np_dtype(dtype))
    roots.append(a)
    return MemDesc(a, dtype, unwrap(layout), f"shared{len(roots) - 1}({kernel_line()})")
