"""Silent data corruption made loud: now and then the same step is run twice from the same bits, and the results must be the same bits.

Hardware that computes wrongly without an error is found by no checksum of files and by no loss curve. The comparison is of 32-bit
digests of every leaf, so that nothing large is fetched and the leaves that differ are named.

Cost of one probe: one more step, one copy of the state and four digests of it. A digest reads every byte once, as a copy does (CPU: the
same GB/s), so that a probe takes about two steps where the step's own arithmetic is long against reading the state; `every` = 1,000 then
costs 0.1% of the time. Memory: one more state beside the step's own needs, while the first run works on the copy, and on the CPU a
temporary of the largest leaf; if that does not fit, the probe cannot be used. Nothing is compiled anew but the digest: both runs are
the train step's own program, donation included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .events import Record

NAMED = 16  # leaves that an event lists; a wrong gradient reaches all of them


class ReplayMismatch(RuntimeError):
    """Two runs of one step differ. leaves: of the results; changed: of the input, by themselves, between the runs."""

    def __init__(self, step: int, leaves: Sequence[str], changed: Sequence[str]):
        self.step, self.leaves, self.changed = step, tuple(leaves), tuple(changed)
        fault = (
            f"{_listed(changed)} of the state changed while nothing wrote to it: a memory fault"
            if changed
            else f"the results differ in {_listed(leaves)}: a fault of computing, or an operation that is not deterministic"
        )
        super().__init__(
            f"step {step}, run twice from the same state and batch, gave different bits; {fault}. Do not keep this state: "
            "resume from the last checkpoint, on other hardware when it returns."
        )


@jax.jit
def digests(tree: Any) -> jax.Array:
    """The digest of each leaf, in the order of `jax.tree.leaves`: uint32 [leaves].

    A leaf's digest is the sum mod 2**32 over its elements of mix(bits + odd constant * position), mix being a bijection: any one changed
    element changes it for certain, two that changed places in all but 1 of 2**32 cases. Integer sums are exact in any order, so the digest
    does not depend on the sharding. Any dtype, 64-bit and narrow ones too; typed PRNG keys by their data. NaN counts by its bits.
    """
    leaves = jax.tree.leaves(tree)
    return jnp.stack([_digest(jnp.asarray(leaf)) for leaf in leaves]) if leaves else jnp.zeros(0, jnp.uint32)


def leaf_names(tree: Any) -> list[str]:
    """Names of the leaves as `digests` orders them."""
    return [jax.tree_util.keystr(path).lstrip(".") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def differing(tree: Any, a: np.ndarray, b: np.ndarray) -> list[str]:
    """Names of the leaves of `tree` whose digests `a` and `b` differ."""
    return [name for name, x, y in zip(leaf_names(tree), a, b, strict=True) if x != y]


class ReplayProbe:
    """Runs the train step, on every `every`-th step twice, and compares.

    Args:
      train_step: the jitted step(state, batch) -> (state, metrics); it may donate the state, not the batch.
      every: steps between probes.
      record: takes the "replay_mismatch" event.
      on_mismatch: "raise" ReplayMismatch; "record": go on with the second result (for a study of the hardware).

    Raises:
      ValueError: every below 1, another on_mismatch.
    """

    def __init__(
        self,
        train_step: Callable[[Any, Any], tuple[Any, Any]],
        *,
        every: int,
        record: Record,
        on_mismatch: Literal["raise", "record"] = "raise",
    ):
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every is {every!r}; it must be an integer of at least 1. Without probes, call the step itself.")
        if on_mismatch not in ("raise", "record"):
            raise ValueError(f"on_mismatch is {on_mismatch!r}; it must be 'raise' or 'record'.")
        self._train_step, self.every, self._record, self._raises = train_step, every, record, on_mismatch == "raise"
        self.probes = 0
        self.mismatches = 0

    def __call__(self, step: int, state: Any, batch: Any) -> tuple[Any, Any]:
        """Do step number `step`; -> its (state, metrics). `state` may have been donated."""
        return self._twice(step, state, batch) if step % self.every == 0 else self._train_step(state, batch)

    def _twice(self, step: int, state: Any, batch: Any) -> tuple[Any, Any]:
        self.probes += 1
        copy = jax.tree.map(_copied, state)
        before = np.asarray(digests((copy, batch)))
        result = self._train_step(copy, batch)
        del copy  # donated, or in the way of the second run
        first = np.asarray(digests(result))
        del result
        between = np.asarray(digests((state, batch)))
        names = differing((state, batch), before, between)
        changed = [name.removeprefix("[0].").removeprefix("[0]").replace("[1]", "batch", 1) for name in names]
        result = self._train_step(state, batch)
        leaves = differing(result, first, np.asarray(digests(result)))
        leaves = [name.removeprefix("[0].").removeprefix("[0]").replace("[1]", "metrics", 1) for name in leaves]
        if leaves or changed:
            self.mismatches += 1
            facts = {"leaves": leaves[:NAMED], "leaves_count": len(leaves), "changed": changed[:NAMED], "changed_count": len(changed)}
            self._record({"event": "replay_mismatch", "step": step, **facts})
            if self._raises:
                raise ReplayMismatch(step, leaves, changed)
        return result


def _digest(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype == jnp.bool_:
        bits = leaf.astype(jnp.uint32)
    elif leaf.dtype.itemsize >= 4:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32)  # 64 bits: one more axis, of two
    else:
        width = jnp.iinfo(leaf.dtype).bits if jnp.issubdtype(leaf.dtype, jnp.integer) else jnp.finfo(leaf.dtype).bits
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{width}")).astype(jnp.uint32)
    position, stride = jnp.zeros((), jnp.uint32), 1
    for axis in reversed(range(bits.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        position = position + along * jnp.uint32(stride % 2**32)
        stride *= bits.shape[axis]
    return jnp.sum(_mix(bits + jnp.uint32(0x9E3779B1) * (position + jnp.uint32(1))), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32-bit words in which every input bit moves about half of the output's (two multiply-xorshift rounds)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _copied(leaf: Any) -> Any:
    """A copy in memory of its own, with the same sharding."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else np.array(leaf)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
