"""Grouped product: every implementation against a numpy loop over groups, for every kind of distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.kernels.grouped_matmul import grouped_matmul
from moejax.kernels.grouped_matmul.blocks import block_rows, plan_blocks

IMPLEMENTATIONS = ("reference", "xla")


def by_loop(x, w, sizes, ct):
    """Float64 numpy loop: (out, dx, dw)."""
    x, w, ct = (np.asarray(a, np.float64) for a in (x, w, ct))
    out, dx, dw = np.zeros((x.shape[0], w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    start = 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        out[rows] = x[rows] @ w[group]
        dx[rows] = ct[rows] @ w[group].T
        dw[group] = x[rows].T @ ct[rows]
        start += size
    return out, dx, dw


def make(N, E, K, M, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in ((N, K), (E, K, M), (N, M)))


def run(implementation):
    def both(x, w, ct, sizes):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation), x, w)
        return out, *pull(ct)

    return jax.jit(both)


def close(actual, expected, tolerance):
    for a, b in zip(actual, expected, strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= tolerance * max(np.abs(b).max(), 1e-12)


def sizes_of(N, E):
    """N rows over E groups: even, skewed, empty first and last, all in one, rows left over, nothing."""
    rng = np.random.default_rng(N)
    skewed = rng.multinomial(N, rng.dirichlet(np.full(E, 0.3)))
    one = np.zeros(E, int)
    one[E // 2] = N
    ends = np.zeros(E, int)
    ends[1:-1] = rng.multinomial(N, np.full(E - 2, 1 / (E - 2)))
    return [rng.multinomial(N, np.full(E, 1 / E)), skewed, ends, one, one[::-1], skewed // 2, np.zeros(E, int)]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("N", [1, 15, 65, 130])
def test_value_and_gradients_for_every_distribution(x64, implementation, N):
    E = 5
    x, w, ct = make(N, E, 7, 6, jnp.float64)
    both = run(implementation)  # one compilation: the sizes are traced
    for sizes in sizes_of(N, E):
        past = (np.arange(N) >= sizes.sum())[:, None]
        got = both(jnp.where(past, jnp.nan, x), w, jnp.where(past, jnp.nan, ct), jnp.asarray(sizes, jnp.int32))
        close(got, by_loop(x, w, sizes, ct), 1e-12)
        assert np.all(np.where(past, got[0], 0) == 0) and np.all(np.where(past, got[1], 0) == 0)
        assert np.all(np.asarray(got[2])[sizes == 0] == 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_experts_have_zero_weight_gradient_tokamax_887_1016(implementation):
    """Public case M5: 18 groups with rows for six only, and bfloat16 with every second group empty."""
    x, w, ct = make(32, 18, 64, 43, jnp.float32)
    sizes = np.array([8, 3, 1, 9, 6, 5] + [0] * 12)
    got = run(implementation)(x, w, ct, jnp.asarray(sizes, jnp.int32))
    close(got, by_loop(x, w, sizes, ct), 1e-5)
    assert np.all(np.asarray(got[2])[6:] == 0)

    x, w, ct = make(16, 4, 64, 32, jnp.bfloat16)
    both = run(implementation)
    for sizes in ([8, 0, 8, 0], [0, 8, 0, 8], [0, 0, 0, 16], [16, 0, 0, 0], [0, 0, 0, 0]):
        sizes = np.array(sizes)
        got = both(x, w, ct, jnp.asarray(sizes, jnp.int32))
        assert all(g.dtype == jnp.bfloat16 for g in got)
        close(got, by_loop(x, w, sizes, ct), 1e-2)
        assert np.all(np.asarray(got[2], np.float64)[sizes == 0] == 0)


def test_a_nan_row_stays_in_its_group():
    """A block's slice reaches into the next group's rows; their values must not."""
    x, w, ct = make(40, 3, 4, 5, jnp.float32)
    sizes = jnp.asarray([13, 14, 13], jnp.int32)
    out, dx, dw = run("xla")(x.at[13].set(jnp.nan), w, ct, sizes)
    assert np.isfinite(out[:13]).all() and np.isnan(out[13]).all() and np.isfinite(out[14:]).all()
    assert np.isfinite(dx).all()
    assert np.isfinite(dw[0]).all() and np.isnan(dw[1]).any() and np.isfinite(dw[2]).all()


def test_plan_covers_every_row_once():
    rng = np.random.default_rng(0)
    for E, N in [(1, 1), (3, 50), (32, 8192), (64, 40), (7, 1000)]:
        for sizes in (rng.multinomial(N, rng.dirichlet(np.full(E, 0.2))), np.eye(E, dtype=int)[E - 1] * N):
            plan = plan_blocks(jnp.asarray(sizes, jnp.int32), N)
            used = int(plan.count)
            assert used == sum(-(-s // plan.rows) for s in sizes) <= plan.group.shape[0]
            group, start, stop = (np.asarray(a)[:used] for a in (plan.group, plan.start, plan.stop))
            rows = np.concatenate([np.arange(a, b) for a, b in zip(start, stop, strict=True)])
            np.testing.assert_array_equal(rows, np.arange(N))
            np.testing.assert_array_equal(np.repeat(group, stop - start), np.repeat(np.arange(E), sizes))
    assert [block_rows(*a) for a in ((1, 8), (8192, 32), (640, 32), (10**6, 4))] == [8, 128, 32, 128]


def test_inside_scan_remat_vmap_and_shard_map(x64):
    x, w, ct = make(48, 4, 6, 6, jnp.float64)
    sizes = jnp.asarray([10, 0, 30, 5], jnp.int32)

    def call(x, w, sizes):
        return grouped_matmul(x, w, sizes, implementation="xla")

    def loss(call):
        return lambda x, w: jnp.sum(call(call(x, w, sizes), w, sizes) * ct)

    expected = jax.jit(jax.value_and_grad(loss(lambda *a: grouped_matmul(*a, implementation="reference")), (0, 1)))(
        x, w
    )

    def scanned(x, w):
        layer = jax.checkpoint(lambda x, _: (call(x, w, sizes), None))
        return jnp.sum(jax.lax.scan(layer, x, None, length=2)[0] * ct)

    def flat(tree):
        return [np.asarray(a) for a in jax.tree.leaves(tree)]

    close(flat(jax.jit(jax.value_and_grad(scanned, (0, 1)))(x, w)), flat(expected), 1e-12)

    def stack(a):
        return jnp.stack([a, 2 * a])

    many = jax.jit(jax.vmap(jax.value_and_grad(lambda x, w, s: jnp.sum(call(x, w, s) * ct), (0, 1))))
    one = by_loop(2 * x, 2 * w, sizes, ct)
    value, (dx, dw) = many(stack(x), stack(w), jnp.stack([sizes[::-1], sizes]))
    close((value[1], dx[1], dw[1]), (np.sum(one[0] * ct), *one[1:]), 1e-12)

    mesh = Mesh(np.array(jax.devices()[:2]), ("expert",))
    shard = jax.shard_map(call, mesh=mesh, in_specs=(P("expert"),) * 3, out_specs=P("expert"))
    halves = jnp.asarray([20, 4, 0, 24], jnp.int32)  # two groups and 24 rows a device
    got = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(shard(x, w, halves) * ct), (0, 1)))(x, w)
    whole = by_loop(x, w, halves, ct)
    close(flat(got), [np.sum(whole[0] * ct), *whole[1:]], 1e-12)

    both = jax.shard_map(call, mesh=mesh, in_specs=(P("expert"), P(), P("expert")), out_specs=P("expert"))
    split = jnp.asarray([7, 2, 0, 11, 1, 1, 20, 2], jnp.int32)  # all four matrices on both devices
    got = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(both(x, w, split) * ct), (0, 1)))(x, w)
    halves = [by_loop(x[i : i + 24], w, split[i // 6 : i // 6 + 4], ct[i : i + 24]) for i in (0, 24)]
    out, dx = (np.concatenate([h[j] for h in halves]) for j in (0, 1))
    close(flat(got), [np.sum(out * ct), dx, halves[0][2] + halves[1][2]], 1e-12)


def test_bad_input_is_refused():
    x, w, _ = make(8, 2, 3, 4, jnp.float32)
    sizes = jnp.asarray([4, 4], jnp.int32)
    bad = [
        (lambda: grouped_matmul(x[0], w, sizes), "axes"),
        (lambda: grouped_matmul(x.astype(jnp.float16), w, sizes), "float16"),
        (lambda: grouped_matmul(x.astype(jnp.bfloat16), w, sizes), "single dtype"),
        (lambda: grouped_matmul(x[:, :2], w, sizes), r"\[N,K\]"),
        (lambda: grouped_matmul(x[:0], w, sizes), "empty"),
        (lambda: grouped_matmul(x, w, sizes[:1]), r"\[E\]"),
        (lambda: grouped_matmul(x, w, sizes.astype(jnp.float32)), "int32"),
        (lambda: grouped_matmul(x, w, sizes, implementation="fast"), "fast"),
        (lambda: grouped_matmul(x, w, sizes, implementation="triton"), "not in this version"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
