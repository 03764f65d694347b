"""run: every program of a grid, one after another."""

import itertools
import numbers
import random

import numpy as np
import triton.language as tl

from .dtypes import FROM_NP
from .language import convert
from .memory import Memory, Pointer
from .partitions import Cta, drain
from .state import KernelError, State, local
from .values import tensor


def _argument(name, value, constexpr):
    if constexpr or isinstance(value, tl.constexpr):
        return convert(value)  # may be a jit function
    if isinstance(value, np.ndarray):
        return Pointer(Memory(value, name), np.int64(0), tl.pointer_type(FROM_NP[value.dtype]))
    if isinstance(value, numbers.Number | np.generic):
        return tensor(value.item() if isinstance(value, np.generic) else value)
    return value


def run(
    kernel, grid, *args, num_warps=4, order="rows", programs=None, delay=False, seed=0, fence=False, finite=False, race=False, **kwargs
):  # fmt: skip
    """Runs the kernel; the head of the package says what the options do."""
    grid = tuple(grid) if isinstance(grid, tuple | list) else (grid,)
    grid += (1,) * (3 - len(grid))
    bound = kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    constexprs = {p.name for p in kernel.params if p.is_constexpr}
    rng = random.Random(seed)
    ids = list(itertools.product(*[range(n) for n in grid]) if programs is None else programs)
    if order == "shuffle":
        rng.shuffle(ids)
    call, saved = convert(kernel), local.state
    try:
        for program in ids:
            cta = Cta(program, grid, rng, delay, fence, race)
            local.state = state = State(cta, kernel.is_gluon(), finite, num_warps)
            cta.parts = [state]
            with np.errstate(all="ignore"):
                try:
                    call(**{name: _argument(name, value, name in constexprs) for name, value in bound.arguments.items()})
                except Exception as e:
                    e.add_note(f"in program {program} of grid {grid} of {kernel.fn.__name__}")
                    raise
                _finish(cta, state)
    finally:
        local.state = saved


def _finish(cta, state):
    drain(state.queues["bulk"])  # TMA stores in flight complete after the program
    for what, left in (("wgmma", state.queues["wgmma"]), ("TMA loads", cta.loads)):
        if left:
            raise KernelError(f"{len(left)} {what} were never waited for")
    if cta.barriers:
        raise KernelError(f"never invalidated: {next(iter(cta.barriers.values()))}")
