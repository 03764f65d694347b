"""What the running partition knows, and the errors."""

import linecache
import os
import sys
import threading

HERE = os.path.dirname(__file__) + os.sep


class KernelError(Exception):
    """A mistake of the kernel that the emulator found."""


class Abort(BaseException):
    """Ends the other partitions after one failed."""


class State:
    """One partition of a program; a program starts with one, warp_specialize adds others."""

    def __init__(self, cta, gluon=False, finite=False, num_warps=4):
        self.cta, self.gluon, self.finite, self.num_warps = cta, gluon, finite, num_warps
        self.name, self.id = "main", 0
        self.clock = {}  # actor -> the last of its steps known to have happened before now
        self.steps = {"plain": 0, "wgmma": 0, "bulk": 0, "cp": 0}
        self.queues = {"wgmma": [], "bulk": [], "cp": []}  # issued, not completed, in order; bulk: TMA stores, cp: committed cp.async
        self.cp_open = []  # cp.async of no group yet
        self.go = threading.Semaphore(0)
        self.done, self.ready, self.waits_for = False, None, ""


class _Local(threading.local):
    state = State(None)


local = _Local()


def current():
    return local.state


def kernel_line():
    """file:line of the kernel statement that runs now."""
    f = sys._getframe(1)
    while f is not None and f.f_code.co_filename.startswith(HERE):
        f = f.f_back
    if f is None:
        return "?"
    text = linecache.getline(f.f_code.co_filename, f.f_lineno).strip()
    return f"{os.path.basename(f.f_code.co_filename)}:{f.f_lineno} `{text}`"
