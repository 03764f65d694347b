"""Matrix products: asynchronous wgmma, mma, tl.dot."""

import numpy as np
import triton.language as tl

from .checks import check_fence, known, next_step, touch
from .dtypes import np_dtype, the, unwrap
from .partitions import complete, drain
from .shared import MemDesc
from .state import KernelError, current
from .values import Tensor, tensor


class Acc:
    """The result of an asynchronous wgmma; its value exists after the matching wait."""

    def __init__(self, shape, dtype):
        self.hidden = self.value = None  # hidden: computed, but not yet waited for
        self.shape, self.dtype = list(shape), dtype

    def __str__(self):
        return "an asynchronous wgmma result before warpgroup_mma_wait returned it"

    def _used(self, *args, **kwargs):
        raise KernelError(f"{self} was used")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __getitem__ = to = _used


def _product(a, b, acc, out_dtype):
    """a @ b + acc; the operands exactly as given, products and sums in float32."""
    out = np.matmul(a.a.astype(np.float32), b.a.astype(np.float32))
    if acc is not None:
        out += acc.a
    return Tensor(out.astype(np_dtype(out_dtype)), out_dtype)


def _check(a, b, acc, what):
    shape = [*a.shape[:-1], b.shape[-1]]
    if len(a.shape) != len(b.shape) or a.shape[-1] != b.shape[-2] or (acc is not None and acc.shape != shape):
        raise KernelError(f"{what}: {a.shape} x {b.shape} -> {acc.shape if acc is not None else shape}")
    if a.dtype is not b.dtype or a.dtype not in (tl.bfloat16, tl.float32):
        raise KernelError(f"{what}: operands {a.dtype} and {b.dtype}")


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    st = current()
    st.cta.poke()
    if not isinstance(b, MemDesc) or not isinstance(a, MemDesc | Tensor):
        raise KernelError("warpgroup_mma: a is a tensor or shared memory, b shared memory")
    if not isinstance(acc, Tensor | Acc):
        raise KernelError("warpgroup_mma: acc is a tensor or the result of another one")
    _check(a, b, acc, "warpgroup_mma")
    if a.shape[0] % 64:
        raise KernelError(f"warpgroup_mma: M = {a.shape[0]} is not a multiple of 64")
    in_shared = [mem for mem in (a, b) if isinstance(mem, MemDesc)]
    for mem in in_shared:
        check_fence(mem, "warpgroup_mma")
    is_async = bool(unwrap(is_async))
    who = next_step(st, "wgmma") if is_async else ()
    for mem in in_shared:
        touch(mem, False, "the wgmma", *who)
    keep = bool(tensor(use_acc))
    result = Acc(acc.shape, acc.dtype)

    def multiply():
        old = acc.hidden if isinstance(acc, Acc) else acc
        result.hidden = _product(a, b, old if keep else None, acc.dtype)

    def finish():
        if result.hidden is None:
            multiply()
        result.value = result.hidden

    if not is_async:
        known(st, "wgmma")
        drain(st.queues["wgmma"])  # the wait after a synchronous one is for all of them
        finish()
        return result.value
    if not st.cta.delay:
        multiply()  # at once, but hidden until the wait
    st.queues["wgmma"].append(finish)
    st.cta.poke()
    return result


def warpgroup_mma_wait(num_outstanding=0, deps=()):
    if not deps:
        raise ValueError("warpgroup_mma_wait deps must be given")
    complete("wgmma", num_outstanding)
    done = tuple(d.value if isinstance(d, Acc) and d.value is not None else d for d in deps)
    return done[0] if len(done) == 1 else done


def mma_v2(a, b, acc, input_precision=None):
    _check(a, b, acc, "mma_v2")
    return _product(a, b, acc, acc.dtype)


def dot(input, other, acc=None, input_precision=None, allow_tf32=None, max_num_imprecise_acc=None, out_dtype=tl.float32):
    _check(input, other, acc, "dot")
    return _product(input, other, acc, the(out_dtype) if acc is None else acc.dtype)
