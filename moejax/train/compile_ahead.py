"""The next stage's train step, compiled in the background while the present stage trains, so that a switch does not stall."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax


class CompileAhead:
    """A jitted function compiled for given shapes in a thread of its own; `result()` hands the program over.

    `CompileAhead("64K", jax.jit(train_step, donate_argnums=0), *abstract((state, batch)))`. Tracing and lowering happen here,
    on the calling thread: JAX's contexts (mesh, x64, default dtypes) belong to a thread, and a trace in another one would
    miss them. Only XLA's compile, the long part, which holds no lock of Python, runs beside the training. The program is
    the one that calling the function would have compiled. Results of running steps do not change; their speed does, while
    both want the same cores.

    The thread is no daemon: a process that ends early waits for XLA, because leaving it mid-compile may crash the exit.
    """

    def __init__(self, name: str, function: Any, *args: Any, **kwargs: Any):
        """name: for messages. function: what `jax.jit` returned. args, kwargs: arrays or shapes of the call to come.

        An error of tracing is raised here, one of the compile by `result()`.
        """
        self.name = name
        start = time.perf_counter()
        lowered = function.lower(*args, **kwargs)
        self.lower_seconds = time.perf_counter() - start
        """Time that the calling thread spent on tracing and lowering."""
        self.compile_seconds = 0.0
        """Time that XLA took, known once it is done."""
        self.stall_seconds = 0.0
        """Time that `result()` waited for the thread: what the switch cost."""
        self._compiled: jax.stages.Compiled | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._compile, args=(lowered,), name=f"compile {name}")
        self._thread.start()

    def _compile(self, lowered: jax.stages.Lowered) -> None:
        start = time.perf_counter()
        try:
            self._compiled = lowered.compile()
        except BaseException as error:
            self._error = error
        self.compile_seconds = time.perf_counter() - start

    @property
    def done(self) -> bool:
        """Whether `result()` would return at once."""
        return not self._thread.is_alive()

    def result(self) -> jax.stages.Compiled:
        """The compiled program: call it with arrays of the shapes given. Waits when it is not done; the wait is measured.

        RuntimeError naming the stage when the compile failed, from XLA's error.
        """
        start = time.perf_counter()
        self._thread.join()
        self.stall_seconds += time.perf_counter() - start
        if self._error is not None:
            raise RuntimeError(f"compiling {self.name} ahead failed after {self.compile_seconds:.1f} s: {self._error}") from self._error
        assert self._compiled is not None
        return self._compiled

    def facts(self) -> dict[str, float]:
        """Seconds, for an event record: lower (before, on the training thread), compile (beside), stall (at the switch)."""
        return {
            "lower_seconds": round(self.lower_seconds, 3),
            "compile_seconds": round(self.compile_seconds, 3),
            "stall_seconds": round(self.stall_seconds, 3),
        }


def abstract(tree: Any) -> Any:
    """Arrays -> their shapes, dtypes and, where they are committed to devices, shardings: what a program is compiled for."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))

    return jax.tree.map(shape, tree)
