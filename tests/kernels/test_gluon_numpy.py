"""The NumPy emulator of Gluon and Triton kernels (gluon_numpy.py) against plain NumPy; every kernel here also compiles for sm_90a."""

import pathlib
import sys

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be read")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this triton has no Gluon for Hopper")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import gluon_numpy as gn  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: E402
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

rng = np.random.default_rng(0)


def compiles(kernel, signature, constants, **options):
    """Builds for sm_90a on the CPU: what runs in the emulator is what the real compiler takes."""
    source = GluonASTSource if kernel.is_gluon() else triton.compiler.ASTSource
    names = kernel.arg_names
    src = source(kernel, {n: signature.get(n, "constexpr") for n in names}, {(names.index(n),): v for n, v in constants.items()})
    return triton.compile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})


# ---------------------------------------------------------------- 1: pointers, mask, promotion


@gluon.jit
def scale_rows(x_ptr, s_ptr, out_ptr, T, stride, ROWS: gl.constexpr, COLS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    t = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    at = t.to(gl.int64)[:, None] * stride + c[None, :]
    keep = (t < T)[:, None]
    x = gl.load(x_ptr + at, mask=keep, other=0.0)
    s = gl.load(s_ptr + t, mask=t < T, other=0.0)
    y = gl.where(s[:, None] > 0, x * s[:, None], x * 2)
    gl.store(out_ptr + at, y, mask=keep)


def test_pointers_with_mask():
    T, C = 37, 64
    x = rng.standard_normal((T, C)).astype(gn.bf16)
    s = rng.standard_normal(T).astype(np.float32)
    out = np.full((T, C), np.nan, gn.bf16)
    gn.run(scale_rows, (3,), x, s, out, T, C, ROWS=16, COLS=C, order="shuffle")
    wide = np.where(s[:, None] > 0, x.astype(np.float32) * s[:, None], (x.astype(np.float32) * 2))
    np.testing.assert_array_equal(out, wide.astype(gn.bf16))
    with pytest.raises(gn.KernelError, match="element 2431; it has 2368"):
        gn.run(scale_rows, (3,), x, s, out, T + 1, C, ROWS=16, COLS=C)
    compiles(scale_rows, dict(x_ptr="*bf16", s_ptr="*fp32", out_ptr="*bf16", T="i32", stride="i32"), dict(ROWS=16, COLS=64))


# ---------------------------------------------------------------- 2: TMA, mbarriers, asynchronous wgmma, two partitions


@gluon.jit
def _produce(x_desc, w_desc, xs, ws, full, empty, row, n, STAGES: gl.constexpr, BK: gl.constexpr):
    for i in range(n):
        slot = i % STAGES
        mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), x_desc.block_type.nbytes + w_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [row, i * BK], full.index(slot), xs.index(slot))
        tma.async_copy_global_to_shared(w_desc, [i * BK, 0], full.index(slot), ws.index(slot))


@gluon.jit
def _consume(o_desc, xs, ws, out_s, full, empty, row, n, STAGES: gl.constexpr, ARRIVE_EARLY: gl.constexpr, WAIT_FULL: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout)
    for i in range(n):
        slot = i % STAGES
        if WAIT_FULL:
            mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        acc = warpgroup_mma(xs.index(slot), ws.index(slot), acc, is_async=True)
        if ARRIVE_EARLY:
            mbarrier.arrive(empty.index(slot))
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not ARRIVE_EARLY:
            mbarrier.arrive(empty.index(slot))
    out_s.store(acc.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(o_desc, [row, 0], out_s)
    tma.store_wait(0)


@gluon.jit
def pipeline(x, w, o, M, K, STAGES: gl.constexpr, BK: gl.constexpr, ARRIVE_EARLY: gl.constexpr, WAIT_FULL: gl.constexpr):
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    x_desc = tma.make_tensor_descriptor(x, [M, K], [K, 1], [64, BK], tile)
    w_desc = tma.make_tensor_descriptor(w, [K, 64], [64, 1], [BK, 64], tile)
    o_desc = tma.make_tensor_descriptor(o, [M, 64], [64, 1], [64, 64], tile)
    row = gl.program_id(0) * 64
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BK], tile)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, 64], tile)
    out_s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    n = gl.cdiv(K, BK)
    gl.warp_specialize(
        [
            (_consume, (o_desc, xs, ws, out_s, full, empty, row, n, STAGES, ARRIVE_EARLY, WAIT_FULL)),
            (_produce, (x_desc, w_desc, xs, ws, full, empty, row, n, STAGES, BK)),
        ],
        [1],
        [24],
    )
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
        mbarrier.invalidate(empty.index(i))


M, K = 100, 200
PIPE = dict(STAGES=2, BK=64)


def _run_pipeline(early, wait, **options):
    x, w = rng.standard_normal((M, K)).astype(gn.bf16), rng.standard_normal((K, 64)).astype(gn.bf16)
    out = np.full((M, 64), np.nan, gn.bf16)
    gn.run(pipeline, (2,), x, w, out, M, K, **PIPE, ARRIVE_EARLY=early, WAIT_FULL=wait, **options)
    return out.astype(np.float32), x.astype(np.float32) @ w.astype(np.float32)


@pytest.mark.parametrize("delay", [False, True])
def test_pipeline(delay):
    for seed in range(10 if delay else 1):
        got, want = _run_pipeline(False, True, delay=delay, seed=seed, fence=True, race=True)
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-1)
    compiles(pipeline, dict(x="*bf16", w="*bf16", o="*bf16", M="i32", K="i32"), dict(**PIPE, ARRIVE_EARLY=False, WAIT_FULL=True))


@pytest.mark.parametrize("early,wait", [(True, True), (False, False)])
def test_delay_shows_a_missing_wait(early, wait):
    """A slot freed before its wgmma has read it, or read before it is full: right at best by luck, so some seed must show it."""
    wrong = 0
    for seed in range(20):
        try:
            got, want = _run_pipeline(early, wait, delay=True, seed=seed)
        except gn.KernelError:  # the consumer, which never waits, may also lap the producer
            wrong += 1
            continue
        wrong += not np.allclose(got, want, rtol=1e-2, atol=1e-1)
    assert wrong > 0
    with pytest.raises(gn.KernelError, match="race on shared" if early else "race on shared|more arrivals|deadlock"):
        _run_pipeline(early, wait, race=True)


@gluon.jit
def _waits(bar):
    mbarrier.wait(bar, 0)


@gluon.jit
def stuck(STORE: gl.constexpr):
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=2)
    mbarrier.arrive(bar)
    gl.warp_specialize([(_waits, (bar,)), (_waits, (bar,))], [4])


def test_deadlock_names_the_barrier():
    with pytest.raises(gn.KernelError, match=r"(?s)deadlock.*partition 0 .*barrier.*1 of 2 arrivals.*partition 1"):
        gn.run(stuck, (1,), STORE=0)
    compiles(stuck, {}, dict(STORE=0))


@gluon.jit
def left_open(EXPECT: gl.constexpr, CLOSE: gl.constexpr, AGAIN: gl.constexpr):
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    if EXPECT:
        mbarrier.expect(bar, 16)
    if CLOSE:
        mbarrier.invalidate(bar)
    if AGAIN:
        mbarrier.arrive(bar)


@pytest.mark.parametrize(
    "expect,close,again,message",
    [(0, 0, 0, "never invalidated: barrier"), (1, 1, 0, "invalidated: barrier.*16 bytes missing"), (0, 1, 1, "is not initialised")],
)
def test_a_barrier_is_closed_once_and_for_all(expect, close, again, message):
    """Its place in shared memory may become another's: on a shared H200 an open barrier destroyed what was stored there."""
    with pytest.raises(gn.KernelError, match=message):
        gn.run(left_open, (1,), EXPECT=expect, CLOSE=close, AGAIN=again)
    gn.run(left_open, (1,), EXPECT=0, CLOSE=1, AGAIN=0)


@gluon.jit
def reads_unwritten(out, WAIT: gl.constexpr, FENCE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    a.store(gl.full([64, 64], 1.0, gl.bfloat16, layout))
    if FENCE:
        fence_async_shared()
    acc = warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, layout), is_async=True)
    if WAIT:
        acc = warpgroup_mma_wait(0, deps=[acc])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    gl.store(out + i[:, None] * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :], acc * 1.0)


def test_errors():
    out = np.zeros((64, 64), np.float32)
    gn.run(reads_unwritten, (1,), out, True, True, fence=True)
    assert np.isnan(out).all()
    with pytest.raises(gn.KernelError, match="before warpgroup_mma_wait"):
        gn.run(reads_unwritten, (1,), out, False, True)
    with pytest.raises(gn.KernelError, match="without fence_async_shared"):
        gn.run(reads_unwritten, (1,), out, True, False, fence=True)
    compiles(reads_unwritten, dict(out="*fp32"), dict(WAIT=True, FENCE=True))


# ---------------------------------------------------------------- 3: scan, tuples, views of shared memory, cp.async


@gluon.jit
def _affine(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@gluon.constexpr_function
def half(n):
    return n // 2


@gluon.jit
def _both(x, y, N: gl.constexpr):
    return x + N, (y - N, x * y)


@gluon.jit
def scans(x_ptr, a_ptr, b_ptr, sum_ptr, ROWS: gl.constexpr, COLS: gl.constexpr, REV: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([ROWS, 1], [1, 32], [1, 4], [0, 1])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    at = r[:, None] * COLS + c[None, :]
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    smem = gl.allocate_shared_memory(gl.float32, [2, ROWS, COLS], flat)
    async_copy.async_copy_global_to_shared(smem.index(0), x_ptr + at)
    async_copy.commit_group()
    async_copy.wait_group(0)
    x = smem.index(0).load(layout)
    smem.index(1).slice(0, half(ROWS)).store(gl.full([half(ROWS), COLS], 3.0, gl.float32, layout))
    raw = smem.index(1)._reinterpret(gl.int32, [ROWS * COLS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bits = raw.slice(0, COLS).load(gl.SliceLayout(0, layout))
    p, qs = _both(x, bits.to(gl.float32, bitcast=True)[None, :], half(8))
    a, b = gl.associative_scan((gl.exp2(-p * p), qs[0] + qs[1]), 0, _affine, reverse=REV)
    gl.store(a_ptr + at, a)
    gl.store(b_ptr + at, b)
    total = gl.sum(x, 0) + gl.max(x, 0)
    for i in gl.static_range(3, 0, -1):
        total += i
    gl.store(sum_ptr + c, total)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_scan_reduce_views(reverse, delay):
    R, C = 16, 128
    x = rng.standard_normal((R, C)).astype(np.float32)
    a, b, s = np.full((R, C), np.nan, np.float32), np.full((R, C), np.nan, np.float32), np.full(C, np.nan, np.float32)
    gn.run(scans, (1,), x, a, b, s, ROWS=R, COLS=C, REV=reverse, delay=delay)
    f, g = np.exp2(-((x + 4) ** 2)), -1 + x * 3
    order = range(R - 1, -1, -1) if reverse else range(R)
    A, B = np.ones(C), np.zeros(C)
    for i in order:
        A, B = A * f[i], B * f[i] + g[i]
        np.testing.assert_allclose(a[i], A, rtol=1e-4, atol=1e-35)
        np.testing.assert_allclose(b[i], B, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(s, x.sum(0) + x.max(0) + 6, rtol=1e-5, atol=1e-5)
    compiles(scans, dict(x_ptr="*fp32", a_ptr="*fp32", b_ptr="*fp32", sum_ptr="*fp32"), dict(ROWS=R, COLS=C, REV=reverse))


# ---------------------------------------------------------------- 4: plain triton


@triton.jit
def _act(x):
    return x * tl.sigmoid(x)


@triton.jit
def matmul(x_ptr, w_ptr, o_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=2):
        k = k0 + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(x, w, acc)
    if M > 0 and N > 0:
        acc = _act(acc)
    tl.store(o_ptr + m[:, None] * N + n[None, :], acc.to(tl.bfloat16), mask=(m[:, None] < M) & (n[None, :] < N))


def test_plain_triton_dot():
    M, N, K = 50, 70, 90
    x, w = rng.standard_normal((M, K)).astype(gn.bf16), rng.standard_normal((K, N)).astype(gn.bf16)
    out = np.full((M, N), np.nan, gn.bf16)
    gn.run(matmul, (2, 3), x, w, out, M, N, K, 32, 32, 32)
    y = x.astype(np.float32) @ w.astype(np.float32)
    np.testing.assert_allclose(out.astype(np.float32), y / (1 + np.exp(-y)), rtol=1e-2, atol=1e-2)
    compiles(matmul, dict(x_ptr="*bf16", w_ptr="*bf16", o_ptr="*bf16", M="i32", N="i32", K="i32"), dict(BM=32, BN=32, BK=32))


# ---------------------------------------------------------------- 5: two wgmma in flight, a shared tile stored by TMA and used again


@gluon.jit
def products(x, o, o2, T, WAIT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    x_desc = tma.make_tensor_descriptor(x, [T, 64], [64, 1], [64, 64], tile)
    o_desc = tma.make_tensor_descriptor(o, [T, 64], [64, 1], [64, 64], tile)
    s = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    out = gl.allocate_shared_memory(gl.bfloat16, [64, 64], tile)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    zero = gl.zeros([64, 64], gl.float32, layout)
    for i in range(gl.cdiv(T, 64)):
        mbarrier.expect(bar, x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [i * 64, 0], bar, s)
        mbarrier.wait(bar, i & 1)
        c0 = warpgroup_mma(s, s.permute([1, 0]), zero, is_async=True)
        c1 = warpgroup_mma(s, s, zero, use_acc=False, is_async=True)
        c0 = warpgroup_mma_wait(1, deps=[c0])
        if WAIT:
            tma.store_wait(0)
        out.store(c0.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [i * 64, 0], out)
        c1 = warpgroup_mma_wait(0, deps=[c1])
        row = i * 64 + r
        gl.store(o2 + row[:, None] * 64 + c[None, :], c1, mask=row[:, None] < T)
    tma.store_wait(0)
    mbarrier.invalidate(bar)


def test_products_in_flight():
    T = 160
    x = rng.standard_normal((T, 64)).astype(gn.bf16)
    X = np.zeros((192, 64), np.float32)
    X[:T] = x
    blocks = X.reshape(3, 64, 64)
    want, want2 = (
        (blocks @ b).reshape(192, 64)[:T] for b in (blocks.transpose(0, 2, 1), np.where(np.arange(192).reshape(3, 64, 1) < T, blocks, 0))
    )
    wrong = 0
    for wait in (True, False):
        for seed in range(10):
            o, o2 = np.full((T, 64), np.nan, gn.bf16), np.full((T, 64), np.nan, np.float32)
            gn.run(products, (1,), x, o, o2, T, WAIT=wait, delay=True, seed=seed, fence=True, race=wait)
            np.testing.assert_allclose(o2, want2, rtol=1e-4, atol=1e-4)
            good = np.allclose(o.astype(np.float32), want, rtol=1e-2, atol=1e-2)
            assert good or not wait
            wrong += not good
    assert wrong > 0  # the tile was overwritten under its TMA store
    with pytest.raises(gn.KernelError, match=r"the store at .* is not ordered after the TMA store at"):
        gn.run(products, (1,), x, o, o2, T, WAIT=False, race=True)
    compiles(products, dict(x="*bf16", o="*bf16", o2="*fp32", T="i32"), dict(WAIT=True))


def test_host_descriptor_out_of_range():
    @gluon.jit
    def copy(i_desc, o_desc, row):
        s = gl.allocate_shared_memory(i_desc.dtype, i_desc.block_shape, i_desc.layout)
        bar = mbarrier.allocate_mbarrier()
        mbarrier.init(bar, count=1)
        mbarrier.expect(bar, i_desc.nbytes_per_cta)
        tma.async_copy_global_to_shared(i_desc, [row, 0], bar, s)
        mbarrier.wait(bar, 0)
        mbarrier.invalidate(bar)
        tma.async_copy_shared_to_global(o_desc, [0, 0], s)
        tma.store_wait(0)

    x = np.arange(80, dtype=np.float32).reshape(10, 8) + 1
    for row in (-3, 0, 7, 10, -8):
        out = np.full((6, 8), np.nan, np.float32)
        gn.run(copy, (1,), gn.Descriptor(x, [8, 8]), gn.Descriptor(out, [8, 8]), row)
        want = np.zeros((8, 8), np.float32)
        for r in range(8):
            if 0 <= row + r < 10:
                want[r] = x[row + r]
        np.testing.assert_array_equal(out, want[:6])


# ---------------------------------------------------------------- 6: cp.async arriving on a barrier, while, assembly


SCALE: gl.constexpr = gl.constexpr(0.5)


@gluon.jit
def ringed(x_ptr, o_ptr, n, COLS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    bars = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=128)  # every one of the 128 threads arrives
    at = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))[:, None] * COLS + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))[None, :]
    s = gl.allocate_shared_memory(gl.float32, [2, 16, COLS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    total = gl.zeros([16, COLS], gl.float32, layout)
    j = 0
    while j < n:
        async_copy.async_copy_global_to_shared(s.index(j % 2), x_ptr + at, mask=at < 8 * COLS)
        async_copy.mbarrier_arrive(bars.index(j % 2), increment_count=False)
        mbarrier.wait(bars.index(j % 2), (j // 2) & 1)
        total += s.index(j % 2).load(layout) * SCALE
        j += 1
    for i in gl.static_range(2):
        mbarrier.invalidate(bars.index(i))
    total = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [total], dtype=gl.float32, is_pure=True, pack=1)
    even, odd = gl.split(total.reshape([16, COLS // 2, 2]))
    gl.store(o_ptr + at, gl.convert_layout(gl.join(odd, even).reshape([16, COLS]), layout))


@pytest.mark.parametrize("delay", [False, True])
def test_cp_async_barrier(delay):
    x = rng.standard_normal((16, 128)).astype(np.float32)
    o = np.full_like(x, np.nan)
    gn.run(ringed, (1,), x, o, 5, COLS=128, delay=delay, race=True)
    total = np.exp2(2.5 * np.where(np.arange(16)[:, None] < 8, x, 0))
    np.testing.assert_allclose(o, total.reshape(16, 64, 2)[..., ::-1].reshape(16, 128), rtol=1e-5)
    compiles(ringed, dict(x_ptr="*fp32", o_ptr="*fp32", n="i32"), dict(COLS=128))


# ---------------------------------------------------------------- rules of types


@triton.jit
def types(out, x_ptr, y_ptr):
    i = tl.arange(0, 4)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.static_assert((x * 0.5).dtype == tl.bfloat16)
    tl.static_assert((x * y).dtype == tl.float32)
    tl.static_assert((x / 2).dtype == tl.float32)
    tl.static_assert((i * 2.0).dtype == tl.float32)
    tl.static_assert((i < 2).dtype == tl.int1)
    z = (-7 + i) // 2 * 100 + (-7 + i) % 4 + (x * 1.001).to(tl.int32)
    tl.store(out + i, z)


def test_types():
    x, y = np.array([1, 2, 300, 4], gn.bf16), np.ones(4, np.float32)
    out = np.zeros(4, np.int32)
    gn.run(types, (1,), out, x, y)
    n = np.arange(-7, -3)
    want = np.trunc(n / 2) * 100 + np.fmod(n, 4) + [1, 2, 300, 4]
    np.testing.assert_array_equal(out, want)
    compiles(types, dict(out="*i32", x_ptr="*bf16", y_ptr="*fp32"), {})
