"""Runs the Python source of a @gluon.jit or @triton.jit kernel on NumPy, so that its values can be tested without a GPU.

How to (kernel authors; needs an importable triton, no GPU; start the test file with pytest.importorskip("triton")):
    sys.path.insert(0, os.path.dirname(__file__)); import gluon_numpy as gn
    out = np.full((T, 128), np.nan, gn.bf16)                       # poison every output, so that an unwritten element shows
    gn.run(kernel, (n_blocks, heads), x, out, T, BLOCK=64)         # arrays are pointers to their flat memory (C-contiguous)
    gn.run(kernel, grid, gn.Descriptor(x2d, [64, 128]), ...)       # a host TMA descriptor; out of range: zeros / dropped
    numbers are constexprs where the parameter is annotated so (or wrapped in gl.constexpr), else runtime scalars
  run(..., num_warps=4)      what gl.num_warps() says and how many threads arrive by cp.async; num_ctas is always 1
  run(..., order="shuffle")  programs in random order;   programs=[(x, y, z), ...] only these (for huge np.zeros arrays)
  run(..., race=True)        raises when two uses of the same shared bytes (one a write) are not ordered by program order, an mbarrier or
                             the wait of their copy or wgmma; needs no luck of seeds
  run(..., fence=True)       a TMA store or wgmma that reads shared memory stored to without fence_async_shared() raises
  run(..., delay=True, seed=n)  TMA copies, cp.async and asynchronous wgmma take effect as late as their wait allows, or at a random
                             moment before; partitions of warp_specialize switch at random. Run several seeds: a missing wait or a
                             buffer reused too early gives NaN or wrong numbers. Without delay they take effect where they are issued.
  run(..., finite=True)      raises at the first bf16 value that is not finite;   prints=True lets static_print/device_print print
  run(..., dot="float64")    matrix products in float64;   tf32="truncate" cuts fp32 operands of tf32 products to 10 mantissa bits
  gn.register_asm("ex2.approx.ftz.f32 $0, $1;", fn)               # fn(*numpy arrays) -> array or tuple; white space is ignored
Errors: pointers out of bounds, overflow of int32 (wrap=True lets it wrap), a barrier never signalled (a deadlock; names every barrier), a
wgmma result used before its wait, copies and wgmma never waited for. Shared memory starts as NaN (integers 0x5a5a...); masked lanes without
`other` are that too.
Not modelled: layouts, registers, missing CTA barriers between plain shared stores and loads of one partition (the compiler inserts those),
fma contraction, .value of a constexpr (constexprs are plain Python values here), `not`/`and`/`or` on block tensors.
Numbers: every fp32 operation is NumPy's float32 (exp2 and the like to 1 ulp, not the hardware's approximation; exp2, sqrt and rsqrt flush
denormals as it does); bf16 operations go through float32 and round once; matrix products take the operands exactly as given (fp32 too) and
multiply and add in float32 by BLAS, whose order of adding is not the hardware's.
"""

import contextlib
import inspect
import itertools
import linecache
import math
import numbers
import random
import re
import sys
import threading
import types

import ml_dtypes
import numpy as np
import triton
import triton.experimental.gluon.language as _gl
import triton.language as tl
from numpy.lib.array_utils import byte_bounds
from triton.experimental.gluon.language import _layouts
from triton.experimental.gluon.language.nvidia import ampere as _ampere
from triton.experimental.gluon.language.nvidia import hopper as _hopper
from triton.runtime.jit import ConstexprFunction, JITFunction

bf16 = ml_dtypes.bfloat16
_HERE = __file__


class KernelError(Exception):
    """A mistake of the kernel that the emulator found."""


class _Abort(BaseException):
    """Ends the other partitions after one failed."""


# ---------------------------------------------------------------- dtypes: triton's own objects, one instance each, mapped to NumPy's

_NP = {
    tl.int1: np.bool_,
    tl.int8: np.int8,
    tl.int16: np.int16,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.uint8: np.uint8,
    tl.uint16: np.uint16,
    tl.uint32: np.uint32,
    tl.uint64: np.uint64,
    tl.float16: np.float16,
    tl.bfloat16: bf16,
    tl.float32: np.float32,
    tl.float64: np.float64,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    tl.float8e5: ml_dtypes.float8_e5m2,
}
_BY_NAME = {dt.name: dt for dt in _NP}
_NP_BY_NAME = {dt.name: np.dtype(n) for dt, n in _NP.items()}
_FROM_NP = {np.dtype(n): dt for dt, n in _NP.items()}
_SMALL_FLOAT = {"bf16", "fp16", "fp8e4nv", "fp8e5"}


def _dt(dtype):
    """Triton dtype -> the one instance used here, so that `is` compares."""
    dtype = _unwrap(dtype)
    return _BY_NAME[dtype.name]


def _np_dtype(dtype):
    return _NP_BY_NAME[dtype.name]


def _unwrap(value):
    while isinstance(value, tl.constexpr):
        value = value.value
    return value


def _poison(shape, np_dtype):
    out = np.empty(shape, np_dtype)
    if np.dtype(np_dtype) in (np.dtype(np.bool_),):
        out[...] = True
    elif np.issubdtype(np_dtype, np.integer):
        out.view(np.uint8).reshape(-1)[...] = 0x5A
    else:
        out[...] = np.nan
    return out


_PROMOTE = {}


def _promote(a, a_scalar, b, b_scalar, div):
    """Triton's rule for the type of `a op b`; *_scalar: a Python number, not a tensor."""
    key = (a.name, a_scalar, b.name, b_scalar, div)
    found = _PROMOTE.get(key)
    if found is None:
        found = _PROMOTE[key] = _promote_rule(a, a_scalar, b, b_scalar, div)
    return found


def _promote_rule(a, a_scalar, b, b_scalar, div):
    if a_scalar != b_scalar:
        scalar, tensor = (a, b) if a_scalar else (b, a)
        if scalar.kind().value <= tensor.kind().value:
            return tl.float32 if div and tensor.name in ("fp16", "bf16") else tensor
    if a.is_fp64() or b.is_fp64():
        return tl.float64
    if a.is_fp32() or b.is_fp32():
        return tl.float32
    if a.is_fp16() or b.is_fp16():
        return tl.float32 if div else tl.float16
    if a.is_bf16() and b.is_bf16():
        return tl.float32 if div else tl.bfloat16
    if a.is_bf16() or b.is_bf16():
        return tl.float32
    if a.is_fp8() and b.is_fp8():
        return a if a is b else tl.float16
    if not a.is_int() or not b.is_int():
        raise TypeError(f"unexpected types {a} and {b}")
    if div and a.int_signedness != b.int_signedness:
        raise TypeError(f"cannot divide {a} by {b}: different signedness")
    if a.int_signedness == b.int_signedness:
        return a if a.int_bitwidth > b.int_bitwidth else b
    unsigned, other = (a, b) if a.is_int_unsigned() else (b, a)
    return unsigned if unsigned.int_bitwidth >= other.int_bitwidth else other


def _scalar_type(x):
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


# ---------------------------------------------------------------- tensors


def _fit(a, b):
    """Broadcast check: gluon wants equal ranks (or a scalar), triton pads on the left."""
    if a.ndim != b.ndim and a.ndim and b.ndim and _state().gluon:
        raise KernelError(f"rank mismatch: {a.shape} and {b.shape}")


def _cast_array(a, np_dtype):
    if a.dtype == np_dtype:
        return a
    if np_dtype == np.bool_:
        return a != 0
    if np_dtype.kind in "iu" and a.dtype.kind not in "iub":
        return np.trunc(a.astype(np.float64)).astype(np.int64).astype(np_dtype)
    if a.dtype == bf16 or np_dtype == bf16:  # every other type reaches bf16 through float32
        return a.astype(np.float32).astype(np_dtype)
    return a.astype(np_dtype)


class _Type:
    """Stand-in of tensor.type."""

    def __init__(self, scalar, shape):
        self.scalar = self.element_ty = scalar
        self.shape = shape
        self.layout = _AnyLayout(len(shape))

    def is_block(self):
        return len(self.shape) > 0

    def __getattr__(self, name):
        return getattr(self.scalar, name)


class _AnyLayout(_layouts.DistributedLayout):
    """The layout of every tensor here: nothing is known but its rank."""

    def __init__(self, rank):
        super().__setattr__("_rank", rank)

    rank = property(lambda self: self._rank)

    def mangle(self):
        return "any"


class Tensor:
    """A value of the kernel: NumPy array `a` (0-d for a scalar) and triton dtype `dtype`. Never changed in place."""

    __slots__ = ("a", "dtype")
    __array_ufunc__ = None  # numpy scalars on the left leave the operator to us

    def __init__(self, a, dtype):
        self.a = a
        self.dtype = dtype
        st = _tls.state
        if st.finite and dtype is tl.bfloat16 and not np.isfinite(np.asarray(a, np.float32)).all():
            raise KernelError("a bf16 value is not finite")

    def _like(self, a):
        return Tensor(a, self.dtype)

    def _with_dtype(self, dtype):
        return self.to(dtype)

    @property
    def shape(self):
        return list(self.a.shape)

    @property
    def type(self):
        return _Type(self.dtype, self.shape) if self.a.ndim else self.dtype

    @property
    def ndim(self):
        return self.a.ndim

    rank = ndim

    @property
    def numel(self):
        return self.a.size

    @property
    def T(self):
        return self._like(self.a.T)

    def __repr__(self):
        return f"Tensor({self.dtype}, {self.a})"

    def __bool__(self):
        if self.a.ndim:
            raise KernelError("the truth of a block tensor is not defined (`if`, `and`, `or`, `not` take scalars)")
        return bool(self.a)

    def __getitem__(self, index):
        index = index if isinstance(index, tuple | list) else (index,)
        index = tuple(_unwrap(i) for i in index)
        if any(not (i is None or (isinstance(i, slice) and i == slice(None))) for i in index):
            raise KernelError(f"only None and : may index a tensor, got {index}")
        return self._like(np.asarray(self.a)[index])

    def __hash__(self):
        return id(self)

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        dtype = _unwrap(dtype)
        if isinstance(dtype, tl.pointer_type):
            raise KernelError("a number cannot become a pointer here")
        dtype = _dt(dtype)
        if _unwrap(bitcast):
            return Tensor(np.ascontiguousarray(self.a).view(_np_dtype(dtype)).reshape(self.a.shape), dtype)
        if dtype is self.dtype:
            return self
        return Tensor(_cast_array(self.a, _np_dtype(dtype)), dtype)

    cast = to

    # arithmetic
    def __add__(self, o):
        if isinstance(o, Pointer):
            return o + self
        return _arith(np.add, self, o)

    def __radd__(self, o):
        return _arith(np.add, o, self)

    def __sub__(self, o):
        return _arith(np.subtract, self, o)

    def __rsub__(self, o):
        return _arith(np.subtract, o, self)

    def __mul__(self, o):
        return _arith(np.multiply, self, o)

    def __rmul__(self, o):
        return _arith(np.multiply, o, self)

    def __truediv__(self, o):
        return _div(self, o)

    def __rtruediv__(self, o):
        return _div(o, self)

    def __floordiv__(self, o):
        return _arith(_trunc_div, self, o, div=True, ints=True)

    def __rfloordiv__(self, o):
        return _arith(_trunc_div, o, self, div=True, ints=True)

    def __mod__(self, o):
        return _arith(np.fmod, self, o, div=True)

    def __rmod__(self, o):
        return _arith(np.fmod, o, self, div=True)

    def __neg__(self):
        return _arith(np.subtract, 0, self)

    def __pos__(self):
        return self

    def __and__(self, o):
        return _arith(np.bitwise_and, self, o, ints=True)

    __rand__ = __and__

    def __or__(self, o):
        return _arith(np.bitwise_or, self, o, ints=True)

    __ror__ = __or__

    def __xor__(self, o):
        return _arith(np.bitwise_xor, self, o, ints=True)

    __rxor__ = __xor__

    def __lshift__(self, o):
        return _arith(np.left_shift, self, o, ints=True)

    def __rlshift__(self, o):
        return _arith(np.left_shift, o, self, ints=True)

    def __rshift__(self, o):
        return _arith(np.right_shift, self, o, ints=True)

    def __rrshift__(self, o):
        return _arith(np.right_shift, o, self, ints=True)

    def __invert__(self):
        return self._like(np.invert(self.a))

    def __lt__(self, o):
        return _compare(np.less, self, o)

    def __le__(self, o):
        return _compare(np.less_equal, self, o)

    def __gt__(self, o):
        return _compare(np.greater, self, o)

    def __ge__(self, o):
        return _compare(np.greater_equal, self, o)

    def __eq__(self, o):
        return _compare(np.equal, self, o)

    def __ne__(self, o):
        return _compare(np.not_equal, self, o)

    def logical_and(self, o):
        return self.to(tl.int1) & _tensor(o).to(tl.int1)

    def logical_or(self, o):
        return self.to(tl.int1) | _tensor(o).to(tl.int1)

    def __getattr__(self, name):  # x.sum(0), x.exp(), x.reshape(...)
        fn = _METHODS.get(name)
        if fn is None:
            raise AttributeError(f"tensor has no attribute {name!r}")
        return lambda *args, **kwargs: fn(self, *args, **kwargs)


class _Memory:
    """Global memory of one array, flat."""

    def __init__(self, array, name):
        self.flat = array.reshape(-1)
        if array.size and not np.shares_memory(self.flat, array):
            raise ValueError(f"{name}: pass a C-contiguous array")
        self.name = name


class Pointer(Tensor):
    """Element offsets `a` (int64) into `mem`."""

    __slots__ = ("mem",)

    def __init__(self, mem, a, dtype):
        self.mem, self.a, self.dtype = mem, a, dtype

    def _like(self, a):
        return Pointer(self.mem, a, self.dtype)

    def _move(self, o, sign):
        o = _tensor(o)
        if isinstance(o, Pointer) or not o.dtype.is_int():
            raise KernelError("a pointer moves by integers only")
        if o.a.ndim and self.a.ndim:
            _fit(self.a, o.a)
        off = o.a.astype(np.int64)
        return self._like(self.a + off if sign > 0 else self.a - off)

    def __add__(self, o):
        return self._move(o, 1)

    __radd__ = __add__

    def __sub__(self, o):
        return self._move(o, -1)

    def to(self, dtype, fp_downcast_rounding=None, bitcast=False):
        dtype = _unwrap(dtype)
        if not isinstance(dtype, tl.pointer_type):
            raise KernelError("a pointer cannot become a number here")
        old, new = _np_dtype(self.dtype.element_ty).itemsize, _np_dtype(_dt(dtype.element_ty))
        mem = _Memory.__new__(_Memory)
        mem.name = self.mem.name
        raw = self.mem.flat.view(np.uint8)
        mem.flat = raw[: len(raw) // new.itemsize * new.itemsize].view(new)
        where = self.a * old
        if (where % new.itemsize).any():
            raise KernelError("pointer cast: misaligned")
        return Pointer(mem, where // new.itemsize, tl.pointer_type(_dt(dtype.element_ty)))

    cast = to


def _tensor(x):
    if isinstance(x, Tensor):
        return x
    x = _unwrap(x)
    if isinstance(x, numbers.Number | np.generic):
        dt = _scalar_type(x)
        return Tensor(_np_dtype(dt).type(x), dt)
    if isinstance(x, Acc):
        raise KernelError("an asynchronous wgmma result was used before warpgroup_mma_wait returned it")
    raise TypeError(f"not a tensor or number: {x!r}")


def _number(x):
    x = _unwrap(x)
    if isinstance(x, np.generic):
        return x.item()
    return x if isinstance(x, numbers.Number) else None


def _pair(a, b, div=False):
    """The two arrays in their common type, and that type."""
    na = None if isinstance(a, Tensor) else _number(a)
    nb = None if isinstance(b, Tensor) else _number(b)
    if na is None and nb is None:
        a, b = _tensor(a), _tensor(b)
        if a.a.ndim != b.a.ndim:
            _fit(a.a, b.a)
        if a.dtype is b.dtype and not div:
            return a.a, b.a, a.dtype
        dt = _promote(a.dtype, False, b.dtype, False, div)
        np_dt = _np_dtype(dt)
        return _cast_array(a.a, np_dt), _cast_array(b.a, np_dt), dt
    if na is not None and nb is not None:
        a, b = _tensor(a), _tensor(b)
        dt = _promote(a.dtype, False, b.dtype, False, div)
        np_dt = _np_dtype(dt)
        return _cast_array(a.a, np_dt), _cast_array(b.a, np_dt), dt
    tensor, number = (a, nb) if na is None else (b, na)
    if isinstance(tensor, Pointer):
        raise KernelError("pointers take only + and - with integers")
    dt = _promote(_scalar_type(number), True, tensor.dtype, False, div)
    np_dt = _np_dtype(dt)
    if number < 0 and dt.is_int_unsigned():
        raise KernelError(f"negative number {number} with an unsigned tensor")
    value = np_dt.type(number)  # an integer out of range raises OverflowError, as triton refuses it
    array = _cast_array(tensor.a, np_dt)
    return (array, value, dt) if na is None else (value, array, dt)


def _trunc_div(a, b):
    if (np.min(a, initial=0) if np.size(a) else 0) >= 0 and np.min(b, initial=1) > 0:
        return a // b
    if not np.all(b):
        raise KernelError("integer division by zero")
    q = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -q, q).astype(np.result_type(a, b))


def _float_op(op, dt, *arrays):
    """op in the arithmetic of dt: the small floats go through float32 and round once."""
    if dt.name in _SMALL_FLOAT:
        return op(*[x.astype(np.float32) for x in arrays]).astype(_np_dtype(dt))
    return op(*arrays)


_CHECKED = {np.add, np.subtract, np.multiply, np.left_shift}


def _arith(op, a, b, div=False, ints=False):
    if isinstance(b, Pointer) or isinstance(a, Pointer):
        raise KernelError("pointers take only + and - with integers")
    x, y, dt = _pair(a, b, div)
    if dt.is_floating():
        if ints:
            raise KernelError(f"{op.__name__} needs integers, got {dt}")
        return Tensor(_float_op(op, dt, x, y), dt)
    if dt is tl.int1:
        if op is np.add:
            op = np.bitwise_xor
        elif op is np.multiply:
            op = np.bitwise_and
        elif op is np.subtract:
            op = np.bitwise_xor
    elif op in _CHECKED and dt.int_bitwidth <= 32 and dt.is_int_signed() and not _state().wrap:
        exact = op(x.astype(np.int64), y.astype(np.int64))
        limit = 1 << (dt.int_bitwidth - 1)
        if exact.ndim == 0:
            lo = hi = int(exact)
        else:
            lo, hi = int(exact.min(initial=0)), int(exact.max(initial=0))
        if lo < -limit or hi >= limit:
            raise KernelError(f"{dt} overflow: {op.__name__} gives {lo if lo < -limit else hi} ({_kernel_line()})")
        return Tensor(exact.astype(_np_dtype(dt)), dt)
    if op is np.fmod and not np.all(y):
        raise KernelError("integer modulo zero")
    return Tensor(op(x, y), dt)


def _div(a, b):
    x, y, dt = _pair(a, b, True)
    if dt.is_int():
        dt = tl.float32
        x, y = x.astype(np.float32), y.astype(np.float32)
    return Tensor(_float_op(np.divide, dt, x, y), dt)


def _compare(op, a, b):
    if b is None or isinstance(b, str):
        return op is np.not_equal
    if isinstance(a, Pointer) and isinstance(b, Pointer):
        return Tensor(op(a.a, b.a), tl.int1)
    x, y, _dtype = _pair(a, b)
    return Tensor(op(x, y), tl.int1)


# ---------------------------------------------------------------- per-thread and per-program state


class _State:
    """What the running partition knows."""

    def __init__(self, cta, gluon, finite, num_warps):
        self.cta, self.gluon, self.finite, self.num_warps = cta, gluon, finite, num_warps
        self.name = "main"
        self.id = 0
        self.clock = {}  # actor -> the last of its steps known to have happened before now
        self.steps = {"plain": 0, "wgmma": 0, "bulk": 0, "cp": 0}
        self.wrap = cta is None or cta.o["wrap"]
        self.wgmma = []  # issued, not completed, in order
        self.bulk = []  # TMA stores
        self.cp_open, self.cp_groups = [], []  # cp.async: not committed; committed
        self.go = threading.Semaphore(0)
        self.done, self.ready, self.waits_for = False, None, ""


class _Tls(threading.local):
    state = _State(None, False, False, 4)


_tls = _Tls()


def _state():
    return _tls.state


def _merge(into, other):
    for actor, step in other.items():
        if into.get(actor, 0) < step:
            into[actor] = step


def _step(st, kind, n=1):
    """The next step of one of the partition's in-order actors."""
    st.steps[kind] += n
    return (st.id, kind), st.steps[kind]


def _known(st, kind, left=0):
    """The partition now knows that all but the last `left` steps of its actor are done."""
    _merge(st.clock, {(st.id, kind): st.steps[kind] - left})


class _Access:
    """One use of shared memory that later uses must be ordered after."""

    __slots__ = ("a", "actor", "hi", "line", "lo", "step", "what", "write")


def _touch(mem, write, what, actor=None, step=0, record=True):
    """Race check: every earlier use of these bytes (with a write among the two) must be known to have happened before.

    actor and step name who does it; without, the partition itself, whose plain steps are in order.
    """
    st = _state()
    cta = st.cta
    if not cta.o["race"]:
        return
    lo, hi = byte_bounds(mem.a)
    dense = mem.a.nbytes == hi - lo
    if actor is None:
        actor, step = _step(st, "plain")
        st.clock[actor] = step
    keep = []
    for e in cta.log:
        if e.lo < hi and lo < e.hi:
            ordered = st.clock.get(e.actor, 0) >= e.step
            if not ordered and (write or e.write) and _overlap(e.a, mem.a):
                raise KernelError(
                    f"race on {mem.name}: {what} at {_kernel_line()} is not ordered after {e.what} at {e.line} "
                    "(no barrier or wait between them)"
                )
            if ordered and dense and lo <= e.lo and e.hi <= hi and (write or (not e.write and e.actor == actor)):
                continue
        keep.append(e)
    new = _Access()
    new.a, new.lo, new.hi, new.write, new.actor, new.step = mem.a, lo, hi, write, actor, step
    new.line, new.what = _kernel_line(), what
    keep.append(new)
    cta.log = keep


def _overlap(a, b):
    try:
        return np.shares_memory(a, b, max_work=10**5)
    except np.exceptions.TooHardError:
        return False


def _kernel_line():
    """file:line of the kernel statement that runs now."""
    f = sys._getframe(1)
    while f is not None and f.f_code.co_filename == _HERE:
        f = f.f_back
    if f is None:
        return "?"
    text = linecache.getline(f.f_code.co_filename, f.f_lineno).strip()
    return f"{f.f_code.co_filename.rsplit('/', 1)[-1]}:{f.f_lineno} `{text}`"


class _Cta:
    """One program: its ids, shared memory, barriers, asynchronous work and partitions."""

    def __init__(self, ids, grid, options):
        self.ids, self.grid, self.o = ids, grid, options
        self.rng = options["rng"]
        self.delay = options["delay"]
        # how readily pending work happens before its wait: from never to at once, another value for every program
        self.early = self.rng.choice([0.0, 0.03, 0.2, 0.6]) if options["early"] is None else options["early"]
        self.roots, self.barriers, self.loads, self.unfenced, self.log = [], {}, [], [], []
        self.parts = []
        self.error = None

    # asynchronous work: a thunk in one of the queues; running it makes its effect visible
    def _queues(self, signalling):
        heads = [(self.loads, self.rng.randrange(len(self.loads)))] if self.loads else []
        for p in self.parts:
            heads += [(q, 0) for q in ((p.cp_groups,) if signalling else (p.wgmma, p.bulk, p.cp_groups)) if q]
        return heads

    def run_one(self, signalling=False):
        """Lets one piece of pending asynchronous work happen (only of the kinds that signal barriers); False when there is none."""
        heads = self._queues(signalling)
        if not heads:
            return False
        queue, i = self.rng.choice(heads)
        queue.pop(i)()
        return True

    def poke(self):
        """A moment at which the hardware may do anything that is pending, and another partition may run."""
        if not self.delay:
            return
        while self.rng.random() < self.early:
            if not self.run_one():
                break
        if len(self.parts) > 1 and self.rng.random() < 0.5:
            others = [p for p in self.parts if p is not _tls.state and self._can_run(p)]
            if others:
                self._hand_over(self.rng.choice(others))

    # partitions take turns: exactly one runs at a time
    @staticmethod
    def _can_run(p):
        return not p.done and (p.ready is None or p.ready())

    def _hand_over(self, other):
        me = _tls.state
        other.go.release()
        if not me.done:
            me.go.acquire()
            if self.error is not None:
                raise _Abort

    def wait_until(self, ready, what):
        """Blocks the running partition until ready(); an error when nothing can make that happen."""
        me = _tls.state
        me.ready, me.waits_for = ready, what
        while not ready():
            if not self._let_go(me):
                raise KernelError(self._deadlock())
        me.ready = None

    def _let_go(self, me):
        others = [p for p in self.parts if p is not me and self._can_run(p)]
        if others and not (self.delay and self.rng.random() < self.early and self.run_one()):
            self._hand_over(self.rng.choice(others) if self.delay else others[0])
            return True
        return bool(others) or self.run_one(signalling=True)

    def _deadlock(self):
        lines = [f"  partition {p.name}: {p.waits_for}" for p in self.parts if not p.done]
        return "deadlock: nothing can go on\n" + "\n".join(lines)

    def finish_partition(self, me):
        me.done = True
        while not all(p.done for p in self.parts):
            others = [p for p in self.parts if self._can_run(p)]
            if others:
                self._hand_over(self.rng.choice(others) if self.delay else others[0])
                return
            if not self.run_one(signalling=True):
                raise KernelError(self._deadlock())


# ---------------------------------------------------------------- shared memory


class MemDesc:
    """A view `a` of shared memory; all views of one allocation share its bytes."""

    def __init__(self, a, dtype, layout, name):
        self.a, self.dtype, self.layout, self.name = a, dtype, layout, name

    shape = property(lambda self: list(self.a.shape))
    rank = property(lambda self: self.a.ndim)
    numel = property(lambda self: self.a.size)

    @property
    def type(self):
        t = _Type(self.dtype, self.shape)
        t.layout = self.layout
        return t

    def _view(self, a, what, dtype=None, layout=None):
        return MemDesc(a, dtype or self.dtype, layout or self.layout, self.name + what)

    def load(self, layout=None):
        _state().cta.poke()
        _touch(self, False, "the load")
        return Tensor(self.a.copy(), self.dtype)

    def store(self, value):
        cta = _state().cta
        cta.poke()
        value = _tensor(value)
        if list(value.a.shape) != self.shape:
            raise KernelError(f"store of {list(value.a.shape)} into shared {self.shape}")
        if value.dtype is not self.dtype:
            raise KernelError(f"store of {value.dtype} into shared memory of {self.dtype}")
        _touch(self, True, "the store")
        self.a[...] = value.a
        _generic_write(self.a)

    def gather(self, indices, axis):
        return _gather(self.load(), indices, axis)

    def scatter(self, values, indices, axis):
        _touch(self, True, "the scatter")
        _generic_write(self.a)
        np.put_along_axis(self.a, indices.a.astype(np.int64), values.a, _unwrap(axis))

    def slice(self, start, length, dim=0):
        start, length, dim = _int_const(start), _int_const(length), _int_const(dim)
        if start < 0 or start + length > self.a.shape[dim]:
            raise KernelError(f"slice {start}+{length} of {self.name}{self.shape} dim {dim}")
        index = [slice(None)] * self.a.ndim
        index[dim] = slice(start, start + length)
        return self._view(self.a[tuple(index)], f"[{start}:{start + length}]")

    def index(self, index):
        index = _int(index)
        if not 0 <= index < self.a.shape[0]:
            raise KernelError(f"index {index} of {self.name}{self.shape}")
        return self._view(self.a[index : index + 1].reshape(self.a.shape[1:]), f"[{index}]")

    def permute(self, order):
        return self._view(self.a.transpose([_int(i) for i in order]), "")

    def reshape(self, shape):
        return self._shape_view(self.a, [_int(s) for s in shape])

    def _shape_view(self, a, shape, dtype=None, layout=None):
        out = a.reshape(shape)
        if a.size and not np.shares_memory(out, a):
            raise KernelError(f"reshape of {self.name}{self.shape} to {shape} is not a view")
        return self._view(out, "", dtype, layout)

    def _reinterpret(self, dtype, shape, layout=None):
        dtype = _dt(dtype)
        if not self.a.flags.c_contiguous:
            raise KernelError(f"_reinterpret of {self.name}: not contiguous")
        shape = [_int(s) for s in shape]
        raw = self.a.reshape(-1).view(np.uint8)
        nbytes = math.prod(shape) * _np_dtype(dtype).itemsize
        if nbytes > raw.size:
            raise KernelError(f"_reinterpret of {self.name}: {nbytes} bytes from {raw.size}")
        return self._view(raw[:nbytes].view(_np_dtype(dtype)).reshape(shape), "", dtype, _unwrap(layout))

    def _keep_alive(self):
        pass


def _int(x):
    x = _unwrap(x)
    if isinstance(x, Tensor):
        if x.a.ndim:
            raise KernelError("a scalar is needed")
        return int(x.a)
    return int(x)


def _int_const(x):
    x = _unwrap(x)
    if isinstance(x, Tensor):
        raise KernelError("a constexpr is needed here, got a runtime value")
    return int(x)


def _shape(shape):
    shape = _unwrap(shape)
    return tuple(_int_const(s) for s in (shape if isinstance(shape, tuple | list) else (shape,)))


def allocate_shared_memory(element_ty, shape, layout=None, value=None):
    dtype, cta = _dt(element_ty), _state().cta
    shape = _shape(shape)
    if value is not None:
        a = np.array(_tensor(value).to(dtype).a).reshape(shape)
    else:
        a = _poison(shape, _np_dtype(dtype))
    cta.roots.append(a)
    return MemDesc(a, dtype, _unwrap(layout), f"shared{len(cta.roots) - 1}({_kernel_line()})")


def _generic_write(a, actor=None, step=0):
    """A write that TMA stores and wgmma see only after fence_async_shared()."""
    st = _state()
    if st.cta.o["fence"]:
        if actor is None:
            actor, step = _step(st, "plain")
            st.clock[actor] = step
        st.cta.unfenced.append((a, _kernel_line(), actor, step))


def _fence_check(mem, what):
    for a, line, _actor, _n in _state().cta.unfenced:
        if np.may_share_memory(a, mem.a) and _overlap(a, mem.a):
            raise KernelError(f"{what} of {mem.name} reads what {line} stored, without fence_async_shared() between")


def fence_async_shared(cluster=False):
    st = _state()
    st.cta.poke()
    st.cta.unfenced = [e for e in st.cta.unfenced if st.clock.get(e[2], 0) < e[3]]  # those not yet known here stay


def barrier(*, cluster=False):
    _state().cta.poke()


# ---------------------------------------------------------------- mbarriers


class _Barrier:
    def __init__(self, count, name):
        self.count = self.pending = count
        self.tx, self.phase, self.name = 0, 0, name
        self.clock, self.arriving = {}, {}  # what a waiter learns; what those who arrived in this phase know

    def update(self, arrive=0, tx=0, clock=None):
        self.pending -= arrive
        self.tx += tx
        if clock:
            _merge(self.arriving, clock)
        if self.pending < 0:
            raise KernelError(f"{self.name}: more arrivals than its count {self.count}")
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.pending = self.count
            _merge(self.clock, self.arriving)
            self.clock[self.name] = self.phase  # its TMA loads are done
            self.arriving = {}

    def __str__(self):
        return f"{self.name} in phase {self.phase}, {self.pending} of {self.count} arrivals and {self.tx} bytes missing"


def _bar(mem):
    bar = _state().cta.barriers.get(mem.a.ctypes.data)
    if bar is None:
        raise KernelError(f"barrier {mem.name} is not initialised")
    return bar


def _allocate_mbarrier(batch=None, two_ctas=False):
    shape = [1] if batch is None else [_int(batch), 1]
    return allocate_shared_memory(tl.int64, shape)


def _mbarrier_init(mbarrier, count):
    _state().cta.barriers[mbarrier.a.ctypes.data] = _Barrier(_int_const(count), f"barrier {mbarrier.name}")


def _mbarrier_invalidate(mbarrier):
    _bar(mbarrier)
    del _state().cta.barriers[mbarrier.a.ctypes.data]


def _mbarrier_expect(mbarrier, bytes_per_cta=None, pred=True):
    _state().cta.poke()
    if _tensor(pred):
        _bar(mbarrier).update(arrive=1, tx=_int_const(bytes_per_cta), clock=_state().clock)


def _mbarrier_arrive(mbarrier, *, count=1, pred=True):
    _state().cta.poke()
    if _tensor(pred):
        _bar(mbarrier).update(arrive=_int_const(count), clock=_state().clock)


def _mbarrier_wait(mbarrier, phase, pred=True, deps=()):
    cta = _state().cta
    cta.poke()
    if not _tensor(pred):
        return
    bar, phase = _bar(mbarrier), _int(phase)
    if phase not in (0, 1):
        raise KernelError(f"{bar.name}: wait for phase {phase}; only the parities 0 and 1 exist")
    line = _kernel_line() if cta.parts[1:] or (bar.phase & 1) == phase else ""
    what = _Lazy(lambda: f"waits at {line} for parity {phase} of {bar}")
    cta.wait_until(lambda: (bar.phase & 1) != phase, what)
    _merge(_state().clock, bar.clock)


class _Lazy:
    def __init__(self, fn):
        self.fn = fn

    def __str__(self):
        return self.fn()


# ---------------------------------------------------------------- TMA


class Descriptor:
    """A TMA tensor descriptor: reads out of range give zeros, writes out of range are dropped."""

    def __init__(self, array, block_shape, layout=None):
        self._set(array, block_shape, layout, "descriptor")

    def _set(self, array, block_shape, layout, name):
        self.array, self.name = array, name
        self.block_shape = [_int_const(s) for s in block_shape]
        if len(self.block_shape) != array.ndim:
            raise ValueError(f"block shape {block_shape} for an array of rank {array.ndim}")
        self.layout = _unwrap(layout)
        self.dtype = _FROM_NP[array.dtype]
        self.block_type = tl.block_type(self.dtype, self.block_shape)
        self.nbytes_per_cta = math.prod(self.block_shape) * array.dtype.itemsize
        self.shape = [Tensor(np.int32(s), tl.int32) for s in array.shape]
        self.strides = [Tensor(np.int64(s // array.dtype.itemsize), tl.int64) for s in array.strides]

    @property
    def type(self):
        return self

    def _window(self, coord):
        coord = [_int(c) for c in coord]
        if len(coord) != self.array.ndim:
            raise KernelError(f"{len(coord)} coordinates for a descriptor of rank {self.array.ndim}")
        outer, inner = [], []
        for c, n, size in zip(coord, self.block_shape, self.array.shape, strict=True):
            lo, hi = max(c, 0), max(min(c + n, size), max(c, 0))
            outer.append(slice(lo, hi) if lo < size else slice(0, 0))
            inner.append(slice(lo - c, hi - c) if lo < size else slice(0, 0))
        return tuple(outer), tuple(inner)

    def read(self, coord):
        outer, inner = self._window(coord)
        block = np.zeros(self.block_shape, self.array.dtype)
        block[inner] = self.array[outer]
        return block

    def write(self, coord, block):
        outer, inner = self._window(coord)
        self.array[outer] = block[inner]

    def load(self, offsets):  # plain triton's tl.make_tensor_descriptor(...).load
        return Tensor(self.read(offsets), self.dtype)

    def store(self, offsets, value):
        self.write(offsets, _tensor(value).to(self.dtype).a)


def _make_tensor_descriptor(base, shape, strides, block_shape, layout=None, padding_option="zero"):
    shape, strides = [_int(s) for s in shape], [_int(s) for s in strides]
    if not isinstance(base, Pointer) or base.a.ndim:
        raise KernelError("make_tensor_descriptor needs a scalar pointer")
    item = base.mem.flat.dtype.itemsize
    if strides[-1] != 1 or any(s * item % 16 for s in strides[:-1]):
        raise KernelError(f"descriptor strides {strides}: the last must be 1, the others multiples of 16 bytes")
    if int(base.a) * item % 16:
        raise KernelError(f"descriptor base at byte {int(base.a) * item}: must be a multiple of 16")
    start = int(base.a)
    end = start + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    if min(shape) < 1 or start < 0 or end > base.mem.flat.size:
        raise KernelError(f"descriptor over {base.mem.name}[{start}:{end}] of {base.mem.flat.size} elements")
    view = np.lib.stride_tricks.as_strided(base.mem.flat[start:], shape, [s * item for s in strides])
    desc = Descriptor.__new__(Descriptor)
    desc._set(view, block_shape, layout, f"descriptor of {base.mem.name}")
    return desc


def _tma_check(desc, mem, what):
    if mem.shape != desc.block_shape or _np_dtype(mem.dtype) != desc.array.dtype:
        raise KernelError(f"{what}: shared {mem.dtype}{mem.shape}, descriptor block {desc.dtype}{desc.block_shape}")


def _tma_load(tensor_desc, coord, barrier, result, pred=True, multicast=False):
    cta = _state().cta
    if not _tensor(pred):
        return
    cta.poke()
    _tma_check(tensor_desc, result, "TMA load")
    bar, coord = _bar(barrier), [_int(c) for c in coord]
    _touch(result, True, "the TMA load", bar.name, bar.phase + 1)

    def land():
        result.a[...] = tensor_desc.read(coord)
        bar.update(tx=-tensor_desc.nbytes_per_cta)

    if cta.delay:
        result.a[...] = _poison(result.a.shape, result.a.dtype)  # what lies there until it lands
        cta.loads.append(land)
        cta.poke()
    else:
        land()


def _tma_store(tensor_desc, coord, src):
    st = _state()
    st.cta.poke()
    _tma_check(tensor_desc, src, "TMA store")
    _fence_check(src, "TMA store")
    _touch(src, False, "the TMA store", *_step(st, "bulk"))
    coord = [_int(c) for c in coord]
    _later(st, st.bulk, lambda: tensor_desc.write(coord, src.a))


def _later(st, queue, thunk):
    if st.cta.delay:
        queue.append(thunk)
        st.cta.poke()
    else:
        thunk()


def _drain(queue, left=0):
    while len(queue) > left:
        queue.pop(0)()


def _store_wait(pendings):
    st = _state()
    st.cta.poke()
    _drain(st.bulk, _int_const(pendings))
    _known(st, "bulk", _int_const(pendings))


# ---------------------------------------------------------------- cp.async


def _cp_async(smem, pointer, mask=None, cache_modifier="", eviction_policy="", volatile=False):
    st = _state()
    st.cta.poke()
    if smem.shape != list(pointer.a.shape):
        raise KernelError(f"cp.async: shared {smem.shape}, pointers {list(pointer.a.shape)}")
    if smem.dtype is not pointer.dtype.element_ty:
        raise KernelError(f"cp.async: shared {smem.dtype}, pointers to {pointer.dtype.element_ty}")
    value = load(pointer, mask=mask, other=0 if mask is not None else None).a  # cp.async fills masked elements with zeros
    actor, step = (st.id, "cp"), st.steps["cp"] + 1  # of the group that the next commit closes
    _touch(smem, True, "the cp.async", actor, step)
    _generic_write(smem.a, actor, step)  # it writes like a plain store: a wgmma that reads it needs the fence

    def land():
        smem.a[...] = value

    if st.cta.delay:
        smem.a[...] = _poison(smem.a.shape, smem.a.dtype)
        st.cp_open.append(land)
    else:
        land()


def _cp_commit():
    st = _state()
    group, st.cp_open = st.cp_open, []
    _step(st, "cp")
    st.cp_groups.append(lambda: [f() for f in group])
    if not st.cta.delay:
        _drain(st.cp_groups)
    st.cta.poke()


def _cp_wait(num_outstanding=0):
    st = _state()
    st.cta.poke()
    _drain(st.cp_groups, _int_const(num_outstanding))
    _known(st, "cp", _int_const(num_outstanding))


def _cp_mbarrier_arrive(mbarrier, increment_count=True):
    """Every thread of the partition arrives when its earlier copies are done; by default the count grows by as much beforehand."""
    st = _state()
    st.cta.poke()
    bar, threads = _bar(mbarrier), 32 * st.num_warps
    if _unwrap(increment_count):
        bar.pending += threads
    group, st.cp_open = st.cp_open, []
    actor, step = _step(st, "cp")
    clock = {**st.clock, actor: step}

    def land():
        for f in group:
            f()
        bar.update(arrive=threads, clock=clock)

    st.cp_groups.append(land)
    if not st.cta.delay:
        _drain(st.cp_groups)


# ---------------------------------------------------------------- matrix products


class Acc:
    """The result of an asynchronous wgmma; its value exists after the matching wait."""

    def __init__(self, shape, dtype):
        self.hidden = self.value = None  # hidden: computed, but not yet waited for
        self.shape, self.dtype = list(shape), dtype

    @property
    def type(self):
        return _Type(self.dtype, self.shape)

    def _used(self, *args, **kwargs):
        raise KernelError("an asynchronous wgmma result was used before warpgroup_mma_wait returned it")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __getitem__ = to = _used


def _matmul(a, b, acc, out_dtype, tf32_ok=True):
    """a @ b + acc; the operands exactly as given, products and sums in float32 (or float64 by option)."""
    wide = np.float64 if a.dtype == np.float64 or _state().cta.o["dot"] == "float64" else np.float32
    if np.issubdtype(a.dtype, np.integer):
        out = np.matmul(a.astype(np.int64), b.astype(np.int64))
        return (out if acc is None else out + acc).astype(_np_dtype(out_dtype))
    x, y = a.astype(wide), b.astype(wide)
    if a.dtype == np.float32 and tf32_ok and _state().cta.o["tf32"] == "truncate":
        x, y = _tf32(a).astype(wide), _tf32(b).astype(wide)
    out = np.matmul(x, y)
    if acc is not None:
        out += acc
    return out.astype(_np_dtype(out_dtype))


def _tf32(x):
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _dot_shapes(a, b, acc_shape, what):
    sa, sb = list(a.shape), list(b.shape)
    if len(sa) != len(sb) or sa[-1] != sb[-2] or (acc_shape is not None and list(acc_shape) != [*sa[:-1], sb[-1]]):
        raise KernelError(f"{what}: {sa} x {sb} -> {acc_shape}")
    if a.dtype is not b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        raise KernelError(f"{what}: operands {a.dtype} and {b.dtype}")


def warpgroup_mma_init(value):
    acc = Acc(value.shape, value.dtype)
    acc.hidden = acc.value = value
    return acc


def warpgroup_mma(a, b, acc, *, use_acc=True, precision=None, max_num_imprecise_acc=None, is_async=False):
    st = _state()
    st.cta.poke()
    if not isinstance(b, MemDesc) or not isinstance(a, MemDesc | Tensor):
        raise KernelError("warpgroup_mma: a is a tensor or shared memory, b shared memory")
    if not isinstance(acc, Tensor | Acc):
        raise KernelError("warpgroup_mma: acc is a tensor or the result of another one")
    _dot_shapes(a, b, acc.shape, "warpgroup_mma")
    if a.shape[0] % 64:
        raise KernelError(f"warpgroup_mma: M = {a.shape[0]} is not a multiple of 64")
    for mem in (a, b):
        if isinstance(mem, MemDesc):
            _fence_check(mem, "warpgroup_mma")
    wait_later = bool(_unwrap(is_async))
    who = _step(st, "wgmma") if wait_later else ()
    for mem in (a, b):
        if isinstance(mem, MemDesc):
            _touch(mem, False, "the wgmma", *who)
    keep = bool(_tensor(use_acc))
    result = Acc(acc.shape, acc.dtype)

    def multiply():
        old = acc.hidden if isinstance(acc, Acc) else acc
        result.hidden = Tensor(_matmul(a.a, b.a, old.a if keep else None, acc.dtype), acc.dtype)

    def finish():
        if result.hidden is None:
            multiply()
        result.value = result.hidden

    if not wait_later:
        _known(st, "wgmma")
        _drain(st.wgmma)  # the wait after a synchronous one is for all of them
        finish()
        return result.value
    if not st.cta.delay:
        multiply()  # at once, but hidden until the wait
    st.wgmma.append(finish)
    st.cta.poke()
    return result


def warpgroup_mma_wait(num_outstanding=0, deps=None):
    if deps is None:
        raise ValueError("warpgroup_mma_wait deps must be given")
    st = _state()
    st.cta.poke()
    _drain(st.wgmma, _int_const(num_outstanding))
    _known(st, "wgmma", _int_const(num_outstanding))
    done = tuple(d.value if isinstance(d, Acc) and d.value is not None else d for d in deps)
    return done[0] if len(done) == 1 else done


def mma_v2(a, b, acc, input_precision=None):
    _dot_shapes(a, b, acc.shape, "mma_v2")
    return Tensor(_matmul(a.a, b.a, acc.a, acc.dtype, input_precision in (None, "tf32")), acc.dtype)


def dot_fma(a, b, acc):
    _dot_shapes(a, b, acc.shape, "dot_fma")
    return Tensor(_matmul(a.a, b.a, acc.a, acc.dtype, False), acc.dtype)


def dot(input, other, acc=None, input_precision=None, allow_tf32=None, max_num_imprecise_acc=None, out_dtype=tl.float32):
    out_dtype = _dt(acc.dtype if acc is not None else out_dtype)
    if input.dtype.is_int():
        out_dtype = tl.int32
    _dot_shapes(input, other, None if acc is None else acc.shape, "dot")
    return Tensor(_matmul(input.a, other.a, None if acc is None else acc.a, out_dtype, input_precision in (None, "tf32")), out_dtype)


# ---------------------------------------------------------------- loads and stores


def _mask_of(mask, shape):
    mask = _tensor(mask)
    if mask.dtype is not tl.int1:
        mask = mask.to(tl.int1)
    return np.broadcast_to(mask.a, shape)


def _check_bounds(ptr, off, what):
    lo, hi = off.min(), off.max()
    if lo < 0 or hi >= ptr.mem.flat.size:
        bad = lo if lo < 0 else hi
        raise KernelError(f"{what} of {ptr.mem.name} at element {bad}; it has {ptr.mem.flat.size} ({_kernel_line()})")


def load(pointer, mask=None, other=None, boundary_check=(), padding_option="", cache_modifier="", eviction_policy="", volatile=False):
    if not isinstance(pointer, Pointer):
        raise KernelError(f"load needs a pointer, got {pointer!r}")
    off, flat = np.asarray(pointer.a), pointer.mem.flat
    dtype = pointer.dtype.element_ty
    if mask is None:
        _check_bounds(pointer, off, "load")
        return Tensor(flat[off], dtype)
    shape = np.broadcast_shapes(off.shape, _tensor(mask).a.shape)
    keep, off = _mask_of(mask, shape), np.broadcast_to(off, shape)
    if keep.all():
        _check_bounds(pointer, off, "load")
        return Tensor(flat[off], dtype)
    out = _poison(shape, flat.dtype) if other is None else np.empty(shape, flat.dtype)
    if other is not None:
        out[...] = _tensor(other).to(dtype).a
    if keep.any():
        inside = off[keep]
        _check_bounds(pointer, inside, "load")
        out[keep] = flat[inside]
    return _loaded(out, dtype, other)


def _loaded(out, dtype, other):
    st = _state()
    if other is None and st.finite:  # a masked lane is poison by design, not a value of the kernel
        finite, st.finite = st.finite, False
        try:
            return Tensor(out, dtype)
        finally:
            st.finite = finite
    return Tensor(out, dtype)


def store(pointer, value, mask=None, boundary_check=(), cache_modifier="", eviction_policy=""):
    if not isinstance(pointer, Pointer):
        raise KernelError(f"store needs a pointer, got {pointer!r}")
    off, flat = np.asarray(pointer.a), pointer.mem.flat
    value = _tensor(value).to(pointer.dtype.element_ty).a
    if _state().gluon and np.ndim(value) and np.shape(value) != off.shape and np.broadcast_shapes(np.shape(value), off.shape) != off.shape:
        raise KernelError(f"store of {np.shape(value)} through pointers {off.shape}")
    value = np.broadcast_to(value, off.shape)
    if mask is None:
        _check_bounds(pointer, off, "store")
        flat[off] = value
        return
    keep = _mask_of(mask, off.shape)
    if keep.any():
        inside = off[keep]
        _check_bounds(pointer, inside, "store")
        flat[inside] = value[keep]


def _atomic(op):
    def atomic(pointer, val, mask=None, sem=None, scope=None):
        off = np.asarray(pointer.a)
        keep = np.ones(off.shape, bool) if mask is None else _mask_of(mask, off.shape)
        _check_bounds(pointer, off[keep], "atomic")
        old = pointer.mem.flat[off]
        op.at(pointer.mem.flat, off[keep], np.broadcast_to(_tensor(val).to(pointer.dtype.element_ty).a, off.shape)[keep])
        return Tensor(old, pointer.dtype.element_ty)

    return atomic


# ---------------------------------------------------------------- plain operations


def program_id(axis):
    return Tensor(np.int32(_state().cta.ids[_int_const(axis)]), tl.int32)


def num_programs(axis):
    return Tensor(np.int32(_state().cta.grid[_int_const(axis)]), tl.int32)


def arange(start, end, layout=None):
    start, end = _int_const(start), _int_const(end)
    n = end - start
    if n <= 0 or n & (n - 1):
        raise KernelError(f"arange({start}, {end}): the length must be a power of two")
    return Tensor(np.arange(start, end, dtype=np.int32), tl.int32)


def full(shape, value, dtype, layout=None):
    dtype = _dt(dtype)
    shape = _shape(shape)
    if any(n <= 0 or n & (n - 1) for n in shape):
        raise KernelError(f"shape {shape}: not powers of two")
    return Tensor(np.broadcast_to(_cast_array(np.asarray(_tensor(value).a), _np_dtype(dtype)), shape), dtype)


def zeros(shape, dtype, layout=None):
    return full(shape, 0, dtype)


def full_like(input, value, shape=None, dtype=None, layout=None):
    return full(input.shape if shape is None else shape, value, input.dtype if dtype is None else dtype)


def zeros_like(input, shape=None, dtype=None, layout=None):
    return full_like(input, 0, shape, dtype)


def cast(input, dtype, fp_downcast_rounding=None, bitcast=False):
    return _tensor(input).to(dtype, fp_downcast_rounding, bitcast)


def where(condition, x, y):
    c = _tensor(condition)
    if c.dtype is not tl.int1:
        c = c.to(tl.int1)
    if isinstance(x, Pointer):
        return x._like(np.where(c.a, x.a, y.a))
    a, b, dt = _pair(x, y)
    for v in (a, b):
        if np.ndim(v) != c.a.ndim:
            _fit(np.asarray(v), np.asarray(c.a))
    return Tensor(np.where(c.a, a, b), dt)


def _minmax(nan_op, quiet_op):
    def fn(x, y, propagate_nan=None):
        a, b, dt = _pair(x, y)
        op = quiet_op if dt.is_floating() and _unwrap(propagate_nan) in (None, tl.PropagateNan.NONE) else nan_op
        return Tensor(_float_op(op, dt, a, b) if dt.is_floating() else op(a, b), dt)

    return fn


maximum = _minmax(np.maximum, np.fmax)
minimum = _minmax(np.minimum, np.fmin)


def clamp(x, min, max, propagate_nan=None):
    return minimum(maximum(x, min), max)


def _unary(op, floats=True):
    def fn(x, *args, **kwargs):
        x = _tensor(x)
        if floats and x.dtype.name not in ("fp32", "fp64"):
            raise KernelError(f"expected fp32 or fp64, got {x.dtype}")
        return Tensor(op(x.a), x.dtype)

    return fn


def _abs(x):
    x = _tensor(x)
    return x._like(np.abs(x.a))


def _erf(x):
    return np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype)


def _rsqrt(x):
    return x.dtype.type(1) / np.sqrt(x)


def _flush(x):
    """Denormals become zero, as in ex2, sqrt and rsqrt .approx.ftz, which triton 3.7 makes of exp2, sqrt and rsqrt (exp keeps them)."""
    return x * (np.abs(x) >= np.float32(2.0**-126)) if x.dtype == np.float32 else x


def _exp2_ftz(x):
    return _flush(np.exp2(x))


def _sqrt_ftz(x):
    return np.sqrt(_flush(x))


def _rsqrt_ftz(x):
    return _rsqrt(_flush(x))


exp, exp2, log, log2 = _unary(np.exp), _unary(_exp2_ftz), _unary(np.log), _unary(np.log2)
sin, cos, sqrt, rsqrt, erf = _unary(np.sin), _unary(np.cos), _unary(_sqrt_ftz), _unary(_rsqrt_ftz), _unary(_erf)
floor, ceil = _unary(np.floor), _unary(np.ceil)


def sigmoid(x):
    return 1 / (1 + exp(-x))


def fma(x, y, z):
    a, b, dt = _pair(x, y)
    ab = Tensor(np.broadcast_to(a, np.broadcast_shapes(np.shape(a), np.shape(b))), dt)
    c, _unused, dt = _pair(z, ab)
    wide = np.float64 if dt.name in ("fp32", "fp64") else np.float32  # the product is exact there, so one rounding (nearly)
    return Tensor((np.asarray(a).astype(wide) * np.asarray(b).astype(wide) + np.asarray(c).astype(wide)).astype(_np_dtype(dt)), dt)


def fdiv(x, y, ieee_rounding=False):
    return _div(x, y)


def umulhi(x, y):
    a, b, dt = _pair(x, y)
    if dt.int_bitwidth != 32:
        raise NotImplementedError("umulhi of 64 bits")
    return Tensor(((a.astype(np.uint32).astype(np.uint64) * b.astype(np.uint32).astype(np.uint64)) >> 32).astype(_np_dtype(dt)), dt)


def cdiv(x, div):
    return (x + div - 1) // div


def expand_dims(input, axis):
    axis = _unwrap(axis)
    axes = sorted(_int_const(a) for a in axis) if isinstance(axis, tuple | list) else [_int_const(axis)]
    return input._like(np.expand_dims(input.a, tuple(axes)))


def broadcast_to(input, *shape):
    shape = _shape(shape[0] if len(shape) == 1 else shape)
    return _tensor(input)._like(np.broadcast_to(_tensor(input).a, shape))


def broadcast(input, other):
    a, b = _tensor(input), _tensor(other)
    shape = np.broadcast_shapes(a.a.shape, b.a.shape)
    return a._like(np.broadcast_to(a.a, shape)), b._like(np.broadcast_to(b.a, shape))


def reshape(input, *shape, can_reorder=False):
    shape = _shape(shape[0] if len(shape) == 1 else shape)
    if math.prod(shape) != input.a.size:
        raise KernelError(f"reshape of {input.shape} to {shape}")
    return input._like(input.a.reshape(shape))


def permute(input, *dims):
    return input._like(input.a.transpose(_shape(dims[0] if len(dims) == 1 else dims)))


def trans(input, *dims):
    if not dims:
        return input._like(np.swapaxes(input.a, -1, -2))
    return permute(input, *dims)


def ravel(x, can_reorder=False):
    return x._like(x.a.reshape(-1))


def join(a, b):
    x, y, dt = _pair(a, b)
    return Tensor(np.stack(np.broadcast_arrays(x, y), -1), dt)


def split(a):
    if a.a.shape[-1] != 2:
        raise KernelError(f"split of {a.shape}: the last axis must be 2")
    return a._like(a.a[..., 0]), a._like(a.a[..., 1])


def interleave(a, b):
    c = join(a, b)
    return c._like(c.a.reshape(*c.a.shape[:-2], -1))


def cat(input, other, can_reorder=False, dim=0):
    return input._like(np.concatenate([input.a, other.a], _unwrap(dim)))


def flip(x, dim=None):
    return x._like(np.flip(x.a, -1 if dim is None else _int_const(dim)))


def _gather(src, index, axis):
    axis, i = _int_const(axis), index.a.astype(np.int64)
    if i.min() < 0 or i.max() >= src.a.shape[axis]:
        raise KernelError(f"gather index {i.min()}..{i.max()} on an axis of {src.a.shape[axis]}")
    return src._like(np.take_along_axis(src.a, i, axis))


def convert_layout(value, layout, assert_trivial=False):
    if not isinstance(value, Tensor):
        _tensor(value)
        raise KernelError(f"convert_layout of {value!r}")
    return value


def histogram(input, num_bins, mask=None, layout=None):
    keep = np.ones(input.a.shape, bool) if mask is None else _mask_of(mask, input.a.shape)
    return Tensor(np.bincount(input.a[keep], minlength=_int(num_bins))[: _int(num_bins)].astype(np.int32), tl.int32)


# reductions and scans. A combine function that is + * max min is found by trying it, and then NumPy's own is used.
_KNOWN = {}


def _known_op(fn):
    key = id(getattr(fn, "original", fn))
    if key not in _KNOWN:
        rng = np.random.default_rng(0)
        x, y = (Tensor(rng.standard_normal(64).astype(np.float32), tl.float32) for _ in range(2))
        try:
            got = fn(x, y)
            got = got.a if isinstance(got, Tensor) else None
        except Exception:
            got = None
        _KNOWN[key] = None, fn
        if got is not None:
            for op in (np.add, np.multiply, np.maximum, np.minimum):
                if np.array_equal(got, op(x.a, y.a)):
                    _KNOWN[key] = op, fn  # fn kept alive: its id is the key
    return _KNOWN[key][0]


def reduce(input, axis, combine_fn, keep_dims=False, reduction_ordering=None):
    many = isinstance(input, tuple | list)
    xs = list(input) if many else [input]
    axis, keep_dims = _unwrap(axis), _unwrap(keep_dims)
    if axis is None:
        rank = xs[0].a.ndim
        xs, axis = [x._like(x.a.reshape(-1)) for x in xs], 0
    else:
        rank, axis = None, _int_const(axis)
    op = None if many else _known_op(combine_fn)
    x = xs[0]
    if op is not None and x.dtype.name in ("fp32", "fp64", "int32", "int64", "uint32"):
        if op in (np.maximum, np.minimum) and x.dtype.is_floating():
            op = np.fmax if op is np.maximum else np.fmin
        out = [x._like(op.reduce(x.a, axis, dtype=x.a.dtype))]
    else:
        parts = [np.moveaxis(x.a, axis, 0) for x in xs]
        while parts[0].shape[0] > 1:  # neighbours first, so the order of the elements is kept
            args = [x._like(p[s::2]) for s in (0, 1) for x, p in zip(xs, parts, strict=True)]
            got = combine_fn(*args)
            parts = [_tensor(g).a for g in (got if isinstance(got, tuple | list) else (got,))]
        out = [x._like(p[0]) for x, p in zip(xs, parts, strict=True)]
    if keep_dims:
        out = [o._like(np.expand_dims(o.a, axis) if rank is None else np.reshape(o.a, (1,) * rank)) for o in out]
    return tuple(out) if many else out[0]


def associative_scan(input, axis, combine_fn, reverse=False):
    many = isinstance(input, tuple | list)
    xs = list(input) if many else [input]
    axis, reverse = _int_const(axis), _unwrap(reverse)
    parts = [np.moveaxis(x.a, axis, 0) for x in xs]
    if reverse:
        parts = [p[::-1] for p in parts]
    op = None if many else _known_op(combine_fn)
    if op is not None and xs[0].dtype.name in ("fp32", "fp64", "int32", "int64", "uint32"):
        outs = [op.accumulate(parts[0], 0, dtype=parts[0].dtype)]
    else:
        outs = [np.empty_like(p) for p in parts]
        now = [x._like(p[0]) for x, p in zip(xs, parts, strict=True)]
        for i in range(parts[0].shape[0]):
            if i:
                got = combine_fn(*now, *[x._like(p[i]) for x, p in zip(xs, parts, strict=True)])
                now = list(got) if isinstance(got, tuple | list) else [got]
            for o, v in zip(outs, now, strict=True):
                o[i] = v.a
    if reverse:
        outs = [o[::-1] for o in outs]
    outs = [x._like(np.moveaxis(o, 0, axis)) for x, o in zip(xs, outs, strict=True)]
    return tuple(outs) if many else outs[0]


def _wider(x):
    """Sums and maxima of small types run in 32 bits."""
    if x.dtype.is_floating():
        return x
    return x.to(tl.int32 if x.dtype.is_int_signed() else tl.uint32) if x.dtype.int_bitwidth < 32 else x


def _plus(a, b):
    return a + b


def sum_(input, axis=None, keep_dims=False, dtype=None):
    x = input.to(dtype) if _unwrap(dtype) is not None else _wider(input)
    if x.dtype.name in _SMALL_FLOAT:
        return reduce(x, axis, _plus, keep_dims)
    return _plain_reduce(np.add, x, axis, keep_dims)


def _plain_reduce(op, x, axis, keep_dims):
    axis = _unwrap(axis)
    return x._like(op.reduce(x.a, axis if axis is None else _int_const(axis), dtype=x.a.dtype, keepdims=bool(_unwrap(keep_dims))))


def _extreme(quiet, pick, plain):
    def fn(input, axis=None, return_indices=False, return_indices_tie_break_left=True, keep_dims=False, propagate_nan=None):
        x = input.to(tl.float32) if input.dtype.name in _SMALL_FLOAT else _wider(input)
        best = _plain_reduce(quiet if x.dtype.is_floating() else plain, x, axis, keep_dims)
        if not _unwrap(return_indices):
            return best
        where_ = pick(x.a, _unwrap(axis), keepdims=bool(_unwrap(keep_dims)))
        return best, Tensor(np.asarray(where_).astype(np.int32), tl.int32)

    return fn


max_, min_ = _extreme(np.fmax, np.argmax, np.maximum), _extreme(np.fmin, np.argmin, np.minimum)


def argmax(input, axis, tie_break_left=True, keep_dims=False):
    return max_(input, axis, True, True, keep_dims)[1]


def argmin(input, axis, tie_break_left=True, keep_dims=False):
    return min_(input, axis, True, True, keep_dims)[1]


def xor_sum(input, axis=None, keep_dims=False):
    return _plain_reduce(np.bitwise_xor, input, axis, keep_dims)


def reduce_or(input, axis, keep_dims=False):
    return _plain_reduce(np.bitwise_or, input, axis, keep_dims)


def _scan_of(op):
    def fn(input, axis=0, reverse=False, dtype=None):
        x = input.to(dtype) if _unwrap(dtype) is not None else _wider(input)
        x = x.to(tl.float32) if x.dtype is tl.bfloat16 else x
        axis = _int_const(axis)
        a = np.flip(x.a, axis) if _unwrap(reverse) else x.a
        a = op.accumulate(a, axis, dtype=a.dtype)
        return x._like(np.flip(a, axis) if _unwrap(reverse) else a)

    return fn


cumsum, cumprod = _scan_of(np.add), _scan_of(np.multiply)


def map_elementwise(scalar_fn, *args, pack=1):
    raise NotImplementedError("map_elementwise")


# ---------------------------------------------------------------- inline assembly

_ASM = {}


def _asm_key(text):
    return re.sub(r"\s+", " ", text).strip().rstrip(";").strip()


def register_asm(text, fn):
    """fn(*numpy arrays) stands for this assembly; white space and the last semicolon do not matter."""
    _ASM[_asm_key(text)] = fn


register_asm("ex2.approx.f32 $0, $1", np.exp2)
register_asm("ex2.approx.ftz.f32 $0, $1", lambda x: _flush(np.exp2(_flush(x))))
register_asm("lg2.approx.f32 $0, $1", np.log2)
register_asm("lg2.approx.ftz.f32 $0, $1", lambda x: np.log2(_flush(x)))
register_asm("rcp.approx.f32 $0, $1", np.reciprocal)
register_asm("rcp.approx.ftz.f32 $0, $1", lambda x: _flush(np.reciprocal(_flush(x))))
register_asm("sqrt.approx.f32 $0, $1", np.sqrt)
register_asm("sqrt.approx.ftz.f32 $0, $1", lambda x: _flush(np.sqrt(_flush(x))))
register_asm("rsqrt.approx.f32 $0, $1", _rsqrt)
register_asm("rsqrt.approx.ftz.f32 $0, $1", lambda x: _rsqrt(_flush(x)))
register_asm("tanh.approx.f32 $0, $1", np.tanh)
register_asm("mov.b32 $0, $1", lambda x: x)


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    key = _asm_key(_unwrap(asm))
    fn = _ASM.get(key)
    if fn is None:
        raise NotImplementedError(f"no stand-in for this assembly; call register_asm({key!r}, fn)")
    arrays = np.broadcast_arrays(*[_tensor(a).a for a in args]) if args else []
    out = fn(*arrays)
    dtype = _unwrap(dtype)
    if isinstance(dtype, tuple | list):
        return tuple(Tensor(np.asarray(o, _np_dtype(_dt(d))), _dt(d)) for o, d in zip(out, dtype, strict=True))
    return Tensor(np.asarray(out, _np_dtype(_dt(dtype))), _dt(dtype))


# ---------------------------------------------------------------- control


class _Range:
    """range and tl.range: the loop variable is a runtime scalar, int32 (int64 if a bound is)."""

    def __new__(cls, *args, **kwargs):
        bounds = [_int(a) for a in args]
        wide = any(isinstance(a, Tensor) and a.dtype.int_bitwidth > 32 for a in args)
        dt = tl.int64 if wide else tl.int32
        make = _np_dtype(dt).type
        return (Tensor(make(i), dt) for i in range(*bounds))


def _static_range(*args, **kwargs):
    return range(*[_int_const(a) for a in args])


def static_assert(cond, msg=""):
    cond = _unwrap(cond)
    if isinstance(cond, Tensor) or not cond:
        raise KernelError(f"static_assert: {msg} ({_kernel_line()})")


def device_assert(cond, msg="", mask=None):
    cond = _tensor(cond)
    ok = np.asarray(cond.a, bool) if mask is None else np.asarray(cond.a, bool) | ~_mask_of(mask, cond.a.shape)
    if not ok.all():
        raise KernelError(f"device_assert: {msg} ({_kernel_line()})")


def _print(*args, **kwargs):
    if _state().cta.o["prints"]:
        print(*args)


def _builtin_min(*args):
    return _fold(min, minimum, args)


def _builtin_max(*args):
    return _fold(max, maximum, args)


def _fold(plain, op, args):
    if not any(isinstance(a, Tensor) for a in args):
        return plain(*args)
    out = args[0]
    for a in args[1:]:
        out = op(out, a)
    return out


def warp_specialize(functions_and_args, worker_num_warps, worker_num_regs=None):
    """Partitions as threads that take turns, so that a deadlock is found at once and every run of a seed is the same."""
    main = _state()
    cta = main.cta
    if len(cta.parts) > 1:
        raise KernelError("warp_specialize inside warp_specialize")
    if len(functions_and_args) != len(worker_num_warps) + 1:
        raise KernelError(f"{len(functions_and_args)} partitions, {len(worker_num_warps)} worker_num_warps")
    threads = []
    for i, ((fn, args), warps) in enumerate(zip(functions_and_args[1:], worker_num_warps, strict=True), 1):
        part = _State(cta, main.gluon, main.finite, _int_const(warps))
        part.id, part.clock = i, dict(main.clock)
        part.name = f"{i} ({getattr(fn, '__name__', fn)})"
        if any(isinstance(a, Tensor) and a.a.ndim for a in args):
            raise KernelError(f"partition {part.name}: only scalars and shared memory can be passed to a worker")
        cta.parts.append(part)
        threads.append(threading.Thread(target=_worker, args=(cta, part, fn, args), daemon=True))
    main.name = f"0 ({getattr(functions_and_args[0][0], '__name__', '?')})"
    for t in threads:
        t.start()
    try:
        fn, args = functions_and_args[0]
        result = fn(*args)
        cta.wait_until(lambda: all(p.done for p in cta.parts if p is not main), "waits for the other partitions")
    except BaseException as e:
        if cta.error is None:
            cta.error = e
        _wake(cta, main)
        if isinstance(e, _Abort):
            raise cta.error from None
        raise
    finally:
        for t in threads:
            t.join(20)
        for p in cta.parts[1:]:
            _merge(main.clock, p.clock)
            main.bulk += p.bulk  # stores still in flight land before the kernel ends
            if cta.error is None and p.wgmma:
                cta.error = KernelError(f"partition {p.name} ended with wgmma in flight")
        del cta.parts[1:]
    if cta.error is not None:
        raise cta.error
    return result


def _wake(cta, me):
    for p in cta.parts:
        if p is not me and not p.done:
            p.go.release()


def _worker(cta, part, fn, args):
    part.go.acquire()
    _tls.state = part
    try:
        if cta.error is not None:
            return
        with np.errstate(all="ignore"):
            fn(*args)
            cta.finish_partition(part)
    except BaseException as e:
        part.done = True
        if cta.error is None:
            cta.error = e
        if not isinstance(e, _Abort):
            _wake(cta, part)


# ---------------------------------------------------------------- putting the stand-ins into a copy of the kernel

_IDENTITY = lambda x, *args, **kwargs: x
_NOTHING = lambda *args, **kwargs: None


class _ConstexprMeta(type):
    def __instancecheck__(cls, x):
        return not isinstance(x, Tensor | Pointer | MemDesc | Descriptor | Acc)


class _Constexpr(metaclass=_ConstexprMeta):
    """gl.constexpr(x) is x."""

    def __new__(cls, x=None):
        return _unwrap(x)


_OPS = dict(
    program_id=program_id, num_programs=num_programs, arange=arange, full=full, zeros=zeros, zeros_like=zeros_like, full_like=full_like,
    load=load, store=store, cast=cast, where=where, maximum=maximum, minimum=minimum, clamp=clamp, exp=exp, exp2=exp2, log=log, log2=log2,
    sin=sin, cos=cos, sqrt=sqrt, sqrt_rn=sqrt, rsqrt=rsqrt, erf=erf, floor=floor, ceil=ceil, abs=_abs, fma=fma, fdiv=fdiv, div_rn=fdiv,
    umulhi=umulhi, sigmoid=sigmoid, cdiv=cdiv, expand_dims=expand_dims, broadcast_to=broadcast_to, broadcast=broadcast, reshape=reshape,
    view=reshape, permute=permute, trans=trans, ravel=ravel, join=join, split=split, interleave=interleave, cat=cat, flip=flip,
    gather=_gather, convert_layout=convert_layout, set_auto_layout=convert_layout, histogram=histogram, reduce=reduce,
    associative_scan=associative_scan, sum=sum_, max=max_, min=min_, argmax=argmax, argmin=argmin, xor_sum=xor_sum, reduce_or=reduce_or,
    cumsum=cumsum, cumprod=cumprod, inline_asm_elementwise=inline_asm_elementwise, dot=dot, dot_fma=dot_fma, range=_Range,
    static_range=_static_range, static_assert=static_assert, static_print=_print, device_print=_print, device_assert=device_assert,
    assume=_NOTHING, multiple_of=_IDENTITY, max_contiguous=_IDENTITY, max_constancy=_IDENTITY, debug_barrier=barrier, barrier=barrier,
    warp_specialize=warp_specialize, num_warps=lambda: _state().num_warps, num_ctas=lambda: 1,
    allocate_shared_memory=allocate_shared_memory, constexpr=_Constexpr, tensor=Tensor, shared_memory_descriptor=MemDesc,
    tuple=lambda x=(): tuple(x), to_tensor=_tensor, add=lambda a, b: a + b, sub=lambda a, b: a - b, mul=lambda a, b: a * b,
    make_tensor_descriptor=_make_tensor_descriptor, map_elementwise=map_elementwise,
    atomic_add=_atomic(np.add), atomic_max=_atomic(np.maximum), atomic_min=_atomic(np.minimum),
    to_linear_layout=_NOTHING, bank_conflicts=lambda *a: 0,
)  # fmt: skip
_METHODS = {k: v for k, v in _OPS.items() if k in (
    "reshape view permute trans expand_dims broadcast_to sum max min argmax argmin xor_sum cumsum cumprod exp exp2 log log2 sin cos sqrt "
    "sqrt_rn rsqrt erf floor ceil abs sigmoid ravel split gather reduce associative_scan flip store"
).split()}  # fmt: skip
_MBARRIER = dict(
    allocate_mbarrier=_allocate_mbarrier, init=_mbarrier_init, invalidate=_mbarrier_invalidate, expect=_mbarrier_expect,
    arrive=_mbarrier_arrive, wait=_mbarrier_wait, fence_init_release_cluster=_NOTHING, sync_cluster_init=_NOTHING,
)  # fmt: skip
_TMA = dict(
    async_copy_global_to_shared=_tma_load, async_copy_shared_to_global=_tma_store, store_wait=_store_wait,
    make_tensor_descriptor=_make_tensor_descriptor,
)  # fmt: skip
_CP = dict(
    async_copy_global_to_shared=_cp_async, commit_group=_cp_commit, wait_group=_cp_wait, mbarrier_arrive=_cp_mbarrier_arrive,
)  # fmt: skip
_HOPPER = dict(
    fence_async_shared=fence_async_shared, warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait,
    warpgroup_mma_init=warpgroup_mma_init, mma_v2=mma_v2,
)  # fmt: skip

_STAND_IN = {}  # id of the real object -> (stand-in, the object kept alive)


def _fill_stand_ins():
    places = [(m, _OPS) for m in (tl, tl.core, tl.math, tl.standard, _gl, _gl._core, _gl._math, _gl._standard)]
    places += [(m, _HOPPER) for m in (_hopper, _ampere)]
    places += [(_hopper.tma, _TMA), (_hopper.async_copy, _CP), (_ampere.async_copy, _CP)]
    places += [(_hopper.mbarrier, _MBARRIER), (_ampere.mbarrier, _MBARRIER)]
    for module, ops in places:
        for name, stand_in in ops.items():
            real = getattr(module, name, None)
            if real is not None:
                _STAND_IN[id(real)] = (stand_in, real)
    with contextlib.suppress(ImportError):
        from triton.language.extra import libdevice
        from triton.language.extra.cuda import libdevice as cuda_libdevice

        for module in (libdevice, cuda_libdevice):
            for name, op in dict(tanh=np.tanh, log1p=np.log1p, expm1=np.expm1, exp=np.exp, exp2=np.exp2, rsqrt=_rsqrt).items():
                if hasattr(module, name):
                    _STAND_IN[id(getattr(module, name))] = (_unary(op), getattr(module, name))


_fill_stand_ins()
_BUILTINS = dict(range=_Range, min=_builtin_min, max=_builtin_max, print=_print)


class _ModuleView:
    """A module whose members are replaced one by one when asked for."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        value = _convert(getattr(self._module, name))
        setattr(self, name, value)
        return value


class _Callable:
    """A jit function as plain Python with the stand-ins as its globals."""

    def __init__(self, fn, original):
        self.fn, self.original, self.__name__ = fn, original, fn.__name__
        self.call = None

    def __call__(self, *args, **kwargs):
        if self.call is None:
            self.call = _rebuild(self.fn)
        return self.call(*args, **kwargs)

    def __get__(self, obj, cls=None):
        return self if obj is None else types.MethodType(self, obj)


_DONE = {}


def _convert(value):
    value = _unwrap(value)
    known = _STAND_IN.get(id(value)) or _DONE.get(id(value))
    if known is not None:
        return known[0]
    if isinstance(value, JITFunction):
        out = _Callable(value.fn, value)
    elif isinstance(value, ConstexprFunction):
        out = _constexpr_call(value.fn)
    elif isinstance(value, types.ModuleType):
        out = _ModuleView(value)
    elif isinstance(value, type) and getattr(value, "__triton_aggregate__", False):
        out = _aggregate(value)
    elif isinstance(value, triton.runtime.autotuner.Autotuner | triton.runtime.autotuner.Heuristics):
        out = _convert(value.fn)
    elif isinstance(value, types.FunctionType) and getattr(value, "__triton_builtin__", False):
        out = _missing(value)
    elif type(value) in (tuple, list):
        return type(value)(_convert(v) for v in value)
    else:
        return value
    _DONE[id(value)] = (out, value)
    return out


def _missing(fn):
    def stub(*args, **kwargs):
        raise NotImplementedError(f"{fn.__module__}.{fn.__name__} has no stand-in in the NumPy emulator")

    return stub


def _constexpr_call(fn):
    def call(*args, **kwargs):
        return _unwrap(fn(*[_unwrap(a) for a in args], **{k: _unwrap(v) for k, v in kwargs.items()}))

    return call


def _names(code):
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names(const)
    return names


def _rebuild(fn):
    """A copy of fn that sees the stand-ins instead of triton."""
    scope = {"__builtins__": __builtins__, "__name__": fn.__globals__.get("__name__", "kernel"), **_BUILTINS}
    for name in _names(fn.__code__):
        if name in fn.__globals__:
            scope[name] = _convert(fn.__globals__[name])
    closure = None
    if fn.__closure__:
        closure = tuple(types.CellType(_convert(c.cell_contents)) for c in fn.__closure__)
    defaults = tuple(_convert(d) for d in fn.__defaults__) if fn.__defaults__ else None
    out = types.FunctionType(fn.__code__, scope, fn.__name__, defaults, closure)
    if fn.__kwdefaults__:
        out.__kwdefaults__ = {k: _convert(v) for k, v in fn.__kwdefaults__.items()}
    return out


def _aggregate(cls):
    """A gluon aggregate as a plain class with the same methods."""
    out = type(cls.__name__, (), {})
    _DONE[id(cls)] = (out, cls)  # before its methods, which name the class
    for member in cls.hash_attrs:
        fn = getattr(member, "fn", member)
        if isinstance(fn, types.FunctionType):
            setattr(out, fn.__name__, _rebuild(fn))
    return out


def _argument(name, value, constexpr):
    if constexpr or isinstance(value, tl.constexpr):
        return _convert(value)  # may be a jit function
    if isinstance(value, np.ndarray):
        mem = _Memory(value, name)
        return Pointer(mem, np.int64(0), tl.pointer_type(_FROM_NP[value.dtype]))
    if isinstance(value, numbers.Number | np.generic):
        return _tensor(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, tuple | list):
        return tuple(_argument(f"{name}[{i}]", v, False) for i, v in enumerate(value))
    return value


def run(
    kernel, grid, *args, num_warps=4, order="rows", programs=None, delay=False, early=None, seed=0, fence=False, finite=False,
    dot="float32", tf32="exact", wrap=False, race=False, prints=False, **kwargs,
):  # fmt: skip
    """Runs every program of the grid, one after another; see the head of this file."""
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    grid = tuple(grid) if isinstance(grid, tuple | list) else (grid,)
    grid = grid + (1,) * (3 - len(grid))
    fn = kernel.fn
    signature = inspect.signature(fn)
    if "num_warps" in signature.parameters:
        kwargs.setdefault("num_warps", num_warps)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    rng = random.Random(seed)
    options = dict(delay=delay, early=early, fence=fence, dot=dot, tf32=tf32, wrap=wrap, race=race, prints=prints, rng=rng)
    ids = list(programs) if programs is not None else list(itertools.product(*[range(n) for n in grid]))
    ids = [tuple(i) + (0,) * (3 - len(i)) for i in ids]
    if order == "shuffle":
        rng.shuffle(ids)
    call = _convert(kernel)
    saved = _tls.state
    try:
        for program in ids:
            cta = _Cta(program, grid, options)
            state = _State(cta, kernel.is_gluon(), finite, num_warps)
            cta.parts = [state]
            _tls.state = state
            values = {}
            for name, value in bound.arguments.items():
                note = signature.parameters[name].annotation
                values[name] = _argument(name, value, note is tl.constexpr or (isinstance(note, str) and "constexpr" in note))
            with np.errstate(all="ignore"):
                try:
                    call(**values)
                except Exception as e:
                    e.add_note(f"in program {program} of grid {grid} of {fn.__name__}")
                    raise
                _finish_program(cta, state)
    finally:
        _tls.state = saved


def _finish_program(cta, state):
    _drain(state.bulk)  # TMA stores in flight complete after the program
    if state.wgmma:
        raise KernelError(f"{len(state.wgmma)} wgmma were never waited for")
    if cta.loads:
        raise KernelError(f"{len(cta.loads)} TMA loads were never waited for")
    for bar in cta.barriers.values():
        if bar.tx:
            raise KernelError(f"at the end: {bar}")
