"""A copy of a kernel that sees the stand-ins instead of Triton: which stand-in replaces which name."""

import types

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.runtime.jit import ConstexprFunction, JITFunction

from . import barriers, copies, functions, memory, partitions, products, shared
from .asm import inline_asm_elementwise
from .checks import fence_async_shared
from .dtypes import unwrap
from .functions import runtime_range
from .state import current
from .values import METHODS

_OPS = {
    name: getattr(functions, name)
    for name in (
        "program_id num_programs static_assert static_range arange full zeros where maximum minimum exp exp2 log rsqrt sigmoid cdiv "
        "reshape permute join split convert_layout associative_scan"
    ).split()
}
_OPS |= dict(sum=functions.sum_, max=functions.max_, abs=functions.absolute, range=runtime_range)
METHODS |= {name: _OPS[name] for name in "reshape permute split sum max abs exp exp2 log rsqrt sigmoid".split()}
_OPS |= dict(
    load=memory.load, store=memory.store, dot=products.dot, inline_asm_elementwise=inline_asm_elementwise,
    barrier=lambda **how: current().cta.poke(), debug_barrier=lambda: current().cta.poke(), warp_specialize=partitions.warp_specialize,
    allocate_shared_memory=shared.allocate_shared_memory, constexpr=lambda x=None: unwrap(x), num_warps=lambda: current().num_warps,
    static_print=print, device_print=print,
)  # fmt: skip
_HOPPER = dict(
    fence_async_shared=fence_async_shared, warpgroup_mma=products.warpgroup_mma, warpgroup_mma_wait=products.warpgroup_mma_wait,
    mma_v2=products.mma_v2,
)  # fmt: skip
_MBARRIER = {name: getattr(barriers, name) for name in "allocate_mbarrier init invalidate expect arrive wait".split()}
_TMA = dict(
    async_copy_global_to_shared=copies.tma_load, async_copy_shared_to_global=copies.tma_store, store_wait=copies.store_wait,
    make_tensor_descriptor=copies.make_tensor_descriptor,
)  # fmt: skip
_CP = dict(
    async_copy_global_to_shared=copies.cp_async, commit_group=copies.cp_commit, wait_group=copies.cp_wait,
    mbarrier_arrive=copies.cp_mbarrier_arrive,
)  # fmt: skip

_PLACES = [(module, _OPS) for module in (tl, tl.core, tl.math, tl.standard, gl, gl._core, gl._math, gl._standard)]
_PLACES += [(hopper, _HOPPER), (ampere, _HOPPER), (hopper.tma, _TMA), (hopper.async_copy, _CP), (hopper.mbarrier, _MBARRIER)]
# id of a real object -> (its stand-in, the object kept alive)
_known = {
    id(getattr(module, name)): (stand_in, getattr(module, name))
    for module, ops in _PLACES
    for name, stand_in in ops.items()
    if hasattr(module, name)
}


class _ModuleView:
    """A module whose members are replaced one by one when asked for."""

    def __init__(self, module):
        self._module = module

    def __getattr__(self, name):
        value = convert(getattr(self._module, name))
        setattr(self, name, value)
        return value


class _Callable:
    """A jit function as plain Python, copied at its first call."""

    def __init__(self, fn):
        self.fn, self.copy, self.__name__ = fn, None, fn.__name__

    def __call__(self, *args, **kwargs):
        if self.copy is None:
            self.copy = _rebuild(self.fn)
        return self.copy(*args, **kwargs)


def convert(value):
    """What stands for a global, a default or an argument of a kernel."""
    value = unwrap(value)
    if id(value) in _known:
        return _known[id(value)][0]
    if isinstance(value, JITFunction):
        out = _Callable(value.fn)
    elif isinstance(value, ConstexprFunction):
        out = _constexpr_call(value.fn)
    elif isinstance(value, types.ModuleType):
        out = _ModuleView(value)
    elif isinstance(value, types.FunctionType) and getattr(value, "__triton_builtin__", False):
        out = _missing(value)
    elif type(value) in (tuple, list):
        return type(value)(convert(v) for v in value)
    else:
        return value
    _known[id(value)] = (out, value)
    return out


def _missing(fn):
    def stub(*args, **kwargs):
        raise NotImplementedError(f"{fn.__module__}.{fn.__name__} has no stand-in in the NumPy emulator")

    return stub


def _constexpr_call(fn):
    def call(*args, **kwargs):
        return unwrap(fn(*[unwrap(a) for a in args], **{k: unwrap(v) for k, v in kwargs.items()}))

    return call


def _rebuild(fn):
    """A copy of fn with the stand-ins as its globals."""
    scope = {"__builtins__": __builtins__, "__name__": fn.__globals__.get("__name__", "kernel"), "range": runtime_range}
    scope |= {name: convert(fn.__globals__[name]) for name in fn.__code__.co_names if name in fn.__globals__}
    closure = tuple(types.CellType(convert(c.cell_contents)) for c in fn.__closure__ or ())
    defaults = tuple(convert(d) for d in fn.__defaults__ or ())
    return types.FunctionType(fn.__code__, scope, fn.__name__, defaults, closure)
