"""Asynchronous copies: TMA with its descriptors, cp.async."""

import math

import numpy as np
import triton.language as tl

from .barriers import barrier_at
from .checks import check_fence, generic_write, next_step, touch
from .dtypes import FROM_NP, np_dtype, poison, unwrap
from .memory import Pointer, load
from .partitions import complete, drain, later
from .state import KernelError, current
from .values import constants, integer, tensor


class Descriptor:
    """A TMA tensor descriptor: reads out of range give zeros, writes out of range are dropped."""

    def __init__(self, array, block_shape, layout=None, name="descriptor"):
        self.array, self.name, self.layout = array, name, unwrap(layout)
        self.block_shape = list(constants(block_shape))
        if len(self.block_shape) != array.ndim:
            raise ValueError(f"block shape {block_shape} for an array of rank {array.ndim}")
        self.dtype = FROM_NP[array.dtype]
        self.block_type = tl.block_type(self.dtype, self.block_shape)
        self.nbytes_per_cta = math.prod(self.block_shape) * array.dtype.itemsize

    def _window(self, coord):
        """The slices of the array and of the block that lie on each other."""
        outer, inner = [], []
        for c, n, size in zip(coord, self.block_shape, self.array.shape, strict=True):
            lo = min(max(c, 0), size)
            hi = max(min(c + n, size), lo)
            outer.append(slice(lo, hi))
            inner.append(slice(lo - c, hi - c) if hi > lo else slice(0, 0))
        return tuple(outer), tuple(inner)

    def read(self, coord):
        outer, inner = self._window(coord)
        block = np.zeros(self.block_shape, self.array.dtype)
        block[inner] = self.array[outer]
        return block

    def write(self, coord, block):
        outer, inner = self._window(coord)
        self.array[outer] = block[inner]

    def check(self, mem, what):
        if mem.shape != self.block_shape or np_dtype(mem.dtype) != self.array.dtype:
            raise KernelError(f"{what}: shared {mem.dtype}{mem.shape}, descriptor block {self.dtype}{self.block_shape}")


def make_tensor_descriptor(base, shape, strides, block_shape, layout=None):
    shape, strides = [integer(s) for s in shape], [integer(s) for s in strides]
    if not isinstance(base, Pointer) or base.a.ndim:
        raise KernelError("make_tensor_descriptor needs a scalar pointer")
    start, flat, item = int(base.a), base.mem.flat, base.mem.flat.dtype.itemsize
    if strides[-1] != 1 or any(s * item % 16 for s in strides[:-1]):
        raise KernelError(f"descriptor strides {strides}: the last must be 1, the others multiples of 16 bytes")
    if start * item % 16:
        raise KernelError(f"descriptor base at byte {start * item}: must be a multiple of 16")
    end = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if min(shape) < 1 or start < 0 or end > flat.size:
        raise KernelError(f"descriptor over {base.mem.name}[{start}:{end}] of {flat.size} elements")
    view = np.lib.stride_tricks.as_strided(flat[start:], shape, [s * item for s in strides])
    return Descriptor(view, block_shape, layout, f"descriptor of {base.mem.name}")


def tma_load(tensor_desc, coord, barrier, result, pred=True, multicast=False):
    cta = current().cta
    if not tensor(pred):
        return
    cta.poke()
    tensor_desc.check(result, "TMA load")
    bar, coord = barrier_at(barrier), [integer(c) for c in coord]
    touch(result, True, "the TMA load", bar.name, bar.phase + 1)

    def land():
        result.a[...] = tensor_desc.read(coord)
        bar.update(tx=-tensor_desc.nbytes_per_cta)

    if cta.delay:
        result.a[...] = poison(result.a.shape, result.a.dtype)  # what lies there until it lands
    later(cta.loads, land)


def tma_store(tensor_desc, coord, src):
    st = current()
    st.cta.poke()
    tensor_desc.check(src, "TMA store")
    check_fence(src, "TMA store")
    touch(src, False, "the TMA store", *next_step(st, "bulk"))
    coord = [integer(c) for c in coord]
    later(st.queues["bulk"], lambda: tensor_desc.write(coord, src.a))


def store_wait(pendings):
    complete("bulk", pendings)


def cp_async(smem, pointer, mask=None, cache_modifier="", eviction_policy="", volatile=False):
    st = current()
    st.cta.poke()
    if smem.shape != pointer.shape:
        raise KernelError(f"cp.async: shared {smem.shape}, pointers {pointer.shape}")
    if smem.dtype is not pointer.dtype.element_ty:
        raise KernelError(f"cp.async: shared {smem.dtype}, pointers to {pointer.dtype.element_ty}")
    value = load(pointer, mask=mask, other=0).a  # cp.async fills masked elements with zeros
    actor, step = (st.id, "cp"), st.steps["cp"] + 1  # of the group that the next commit closes
    touch(smem, True, "the cp.async", actor, step)
    generic_write(smem.a, actor, step)  # it writes like a plain store: a wgmma that reads it needs the fence

    def land():
        smem.a[...] = value

    if st.cta.delay:
        smem.a[...] = poison(smem.a.shape, smem.a.dtype)
        st.cp_open.append(land)
    else:
        land()


def _close_group(st, then):
    """The copies since the last group, then `then`, as one piece of work."""
    group, st.cp_open = st.cp_open, []

    def land():
        drain(group)
        then()

    later(st.queues["cp"], land)


def cp_commit():
    next_step(current(), "cp")
    _close_group(current(), lambda: None)


def cp_wait(num_outstanding=0):
    complete("cp", num_outstanding)


def cp_mbarrier_arrive(mbarrier, increment_count=True):
    """Every thread of the partition arrives when its earlier copies are done; by default the count grows by as much beforehand."""
    st = current()
    st.cta.poke()
    bar, threads = barrier_at(mbarrier), 32 * st.num_warps
    if unwrap(increment_count):
        bar.pending += threads
    actor, step = next_step(st, "cp")
    clock = {**st.clock, actor: step}
    _close_group(st, lambda: bar.update(arrive=threads, clock=clock))
