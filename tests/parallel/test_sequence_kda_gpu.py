"""The sequence-parallel KDA with the GPU kernels, on one card: the shards are the examples of a vmap whose axis has a name, so the
collectives are reads and sums of one array, and everything else is what each device of a mesh runs.

Run on a Hopper GPU: JAX_PLATFORMS=cuda,cpu python3 -m pytest -m gpu tests/parallel/test_sequence_kda_gpu.py

Shapes: R shards, B batch, T tokens of the whole row, H heads, K = V channels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.kda import triton
from moejax.ops import gated_kda
from moejax.parallel.sequence_kda import sequence_gated_kda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]
NAMES = ("o", "final", "q", "k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias", "initial")
BF16, F32 = jnp.bfloat16, jnp.float32


def make(T, H, K, B=1):
    rng = np.random.default_rng(T)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)
    raw = normal(B, T, H, K) + np.resize([0, -6, 2], H)[:, None]
    tokens = [jnp.asarray(x, BF16) for x in (normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, K), raw, normal(B, T, H))]
    rest = [jnp.asarray(x) for x in (0.3 * normal(H), 0.3 * normal(H, K), normal(B, H, K, K))]
    return tokens + rest, (jnp.asarray(normal(B, T, H, K), BF16), jnp.asarray(0.1 * normal(B, H, K, K)))


@functools.partial(jax.jit, static_argnums=3)
def by_shards(operands, cotangents, ids, shards):
    """-> o and final of the whole row, the gradients of the operands."""
    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], shards, -1, *x.shape[2:]), 1, 0)
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    def local(ids, d_o, *tokens):
        options = dict(axis="sequence", segment_ids=ids, output_final_state=True)
        (o, final), vjp = jax.vjp(lambda *a: sequence_gated_kda(*a[:-1], initial_state=a[-1], **options), *tokens, *operands[5:])
        # Such an axis sums the shards' cotangents of a result that all of them have.
        return o, final, *vjp((d_o, cotangents[1] / shards))

    mapped = jax.vmap(local, in_axes=(None if ids is None else 0, *[0] * 6), axis_name="sequence")
    o, final, *grads = mapped(None if ids is None else cut(ids), *map(cut, (cotangents[0], *operands[:5])))
    return join(o), final[0], *map(join, grads[:5]), *(jnp.sum(x, axis=0) for x in grads[5:])


@jax.jit
def whole(operands, cotangents, ids):
    run = lambda *a: gated_kda(*a[:-1], initial_state=a[-1], segment_ids=ids, output_final_state=True)
    out, vjp = jax.vjp(run, *operands)
    return *out, *vjp(cotangents)


@pytest.mark.parametrize("shards, local, heads, K, packed, cut", [
    (4, 783, 6, 128, True, None), (4, 500, 12, 64, False, (256, 0)), (2, 1000, 3, 128, True, (512, 128)), (8, 1, 4, 128, True, None),
])  # fmt: skip
def test_shards_against_the_whole_row(monkeypatch, shards, local, heads, K, packed, cut):
    """One window, several, segments in several; documents over shards and a shard of padding. Two runs give the same bits.

    The whole row by the same kernels is itself within 5e-3 (o) and 1e-2 (gradients) of float64: tests/kernels/test_triton_gpu.py.
    """
    if cut is not None:
        monkeypatch.setattr(triton, "cut", lambda *sizes: cut)
    T = shards * local
    ids = None
    if packed:
        ids = np.repeat([1, 2, 4], [T // 2, T // 8, T - T // 2 - T // 8])[None].astype(np.int32)
        ids[:, local : 2 * local] = 0
        ids = jnp.asarray(ids)
    operands, cotangents = make(T, heads, K)
    jax.clear_caches()  # the cut is not an argument
    got, again = (by_shards(operands, cotangents, ids, shards) for _ in range(2))
    wanted = whole(operands, cotangents, ids)
    for name, x, y, z in zip(NAMES, got, wanted, again, strict=True):
        assert np.array_equal(x, z), name
        x, y = (np.asarray(a.astype(F32), np.float64) for a in (x, y))
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        print(f"{name} {error:.1e}", end="  ")
        assert error <= (1e-2 if name in ("o", "final") else 2e-2), (name, error)
    print()
