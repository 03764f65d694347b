"""mbarriers in shared memory, from the first use to the last. A kernel that opens barriers closes them where it ends.

The memory of a barrier that was not invalidated must not serve as anything else (PTX, mbarrier.inval), and the compiler gives the
place of a tile, so of a barrier, to the next one once nobody reads it. Alone on a card that goes unnoticed. When the GPU turns to
another process in the middle of the kernel, the barrier's state comes back over what has been stored in its place: seen on an H200,
four channels of KDA's gate gradient, and the next step's loss NaN.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def open_barriers(COUNT: gl.constexpr, arrivals: gl.constexpr):
    """COUNT barriers, each of `arrivals` arrivals a phase."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def close_barriers(bars, COUNT: gl.constexpr):
    """Nobody waits for `bars` or arrives at them any more. Until here nothing takes their place."""
    for i in gl.static_range(COUNT):
        mbarrier.invalidate(bars.index(i))
