"""Runs the Python source of a @gluon.jit or @triton.jit kernel on NumPy, so that its values can be tested without a GPU.

How to (needs an importable triton, no GPU; start the test file with pytest.importorskip("triton")):
    sys.path.insert(0, os.path.dirname(__file__)); import gluon_numpy as gn
    out = np.full((T, 128), np.nan, gn.bf16)                       # poison every output, so that an unwritten element shows
    gn.run(kernel, (n_blocks, heads), x, out, T, BLOCK=64)         # arrays are pointers to their flat memory (C-contiguous)
    gn.run(kernel, grid, gn.Descriptor(x2d, [64, 128]), ...)       # a host TMA descriptor; out of range: zeros / dropped
    numbers are constexprs where the parameter is annotated so (or wrapped in gl.constexpr), else runtime scalars
  run(..., num_warps=4)      how many threads arrive by cp.async
  run(..., order="shuffle")  programs in random order;   programs=[(x, y, z), ...] only these (for huge np.zeros arrays)
  run(..., race=True)        raises when two uses of the same shared bytes (one a write) are not ordered by program order, an mbarrier or
                             the wait of their copy or wgmma; needs no luck of seeds
  run(..., fence=True)       a TMA store or wgmma that reads shared memory stored to without fence_async_shared() raises
  run(..., delay=True, seed=n)  TMA copies, cp.async and asynchronous wgmma take effect as late as their wait allows, or at a random
                             moment before; partitions of warp_specialize switch at random. Run several seeds: a missing wait or a
                             buffer reused too early gives NaN or wrong numbers. Without delay they take effect where they are issued.
  run(..., finite=True)      raises at the first bf16 value that is not finite
  gn.register_asm("ex2.approx.ftz.f32 $0, $1;", fn)               # fn(*numpy arrays) -> array; those of the kernels stand in asm.py
An operation without a stand-in raises NotImplementedError: write one (functions.py) and enter it in language.py.
Errors: pointers out of bounds, overflow of int32, a barrier never signalled (a deadlock; names every barrier), a wgmma result used
before its wait, copies and wgmma never waited for. Shared memory starts as NaN (integers 0x5a5a...); masked lanes without `other` are
that too.
Not modelled: aggregates, layouts, registers, missing CTA barriers between plain shared stores and loads of one partition (the compiler
inserts those), fma contraction, .value of a constexpr (constexprs are plain Python values here), `not`/`and`/`or` on block tensors.
Numbers: every fp32 operation is NumPy's float32 (exp2 and the like to 1 ulp, not the hardware's approximation; exp2 and rsqrt flush
denormals as it does); bf16 operations go through float32 and round once; matrix products take the operands exactly as given (fp32 too) and
multiply and add in float32 by BLAS, whose order of adding is not the hardware's.

The parts, each built on those before it:
    state       what the running partition knows, errors             barriers    mbarriers
    dtypes      Triton's types and their promotion                   copies      TMA and cp.async
    values      tensors and their arithmetic                         products    wgmma, mma, dot
    memory      pointers, load, store                                functions   elementwise, shapes, reductions
    checks      races and fences                                     asm         inline assembly
    partitions  asynchronous work, warp_specialize                   language    which stand-in replaces which name of Triton
    shared      views of shared memory                               launch      run
"""

from .asm import register_asm
from .copies import Descriptor
from .dtypes import bf16
from .launch import run
from .state import KernelError

__all__ = ["Descriptor", "KernelError", "bf16", "register_asm", "run"]
