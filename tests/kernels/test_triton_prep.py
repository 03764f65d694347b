"""The prep kernel of KDA (kernels/kda/triton_prep.py), run from its source on NumPy, against the stages in float64 (kda_stages.py).

Shapes: B rows, T tokens, H query/key heads, HV value heads, K channels, n chunks of 32 tokens.
"""

import pathlib
import sys

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be read")
pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this triton has no Gluon for Hopper")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import gluon_numpy as gn
import kda_stages as stages
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moejax.kernels.kda.triton_inverse import WIDEN, inverses
from moejax.kernels.kda.triton_prep import KEEP, NEGATED, Prepared, launch_constants, prep_kernel

gn.register_asm(NEGATED.value, lambda x: np.exp2(-x))
gn.register_asm(KEEP.value, lambda x, bits: np.where(bits != 0, x, x.dtype.type(0)))
gn.register_asm(WIDEN.value, lambda x: x.astype(np.float32))

GATES = {"usual": (-0.3, 1.5), "slow": (-9.0, 1.0), "closed": (9.0, 1.0), "mixed": (0.0, 3.0)}


def inputs(seed, B, T, H, HV, K, gate, fused, wide, spare=0, lower_bound=-5.0):
    """q, k, g, beta, A_log, dt_bias; `spare` rows of NaN behind the T tokens of the last row."""
    rng = np.random.default_rng(seed)
    mean, spread = GATES[gate]
    raw = rng.normal(mean, spread, (B, T, HV, K))
    if gate == "mixed":
        raw[..., :4] = -12  # a few channels that hardly decay
    q, k = rng.standard_normal((2, B, T, H, K))
    beta = rng.standard_normal((B, T, HV))
    A_log, dt_bias = rng.uniform(-0.5, 0.5, HV).astype(np.float32), (0.3 * rng.standard_normal((HV, K))).astype(np.float32)
    if not fused:
        q, k, raw, beta = stages.gated(q, k, raw, beta, A_log, dt_bias, lower_bound)
        beta[:, ::7] = 0
    narrow = np.float32 if wide else gn.bf16
    arrays = q.astype(gn.bf16), k.astype(gn.bf16), raw.astype(narrow), beta.astype(narrow)
    if spare:
        assert B == 1
        arrays = tuple(np.concatenate([x, np.full((1, spare, *x.shape[2:]), np.nan, x.dtype)], axis=1) for x in arrays)
    return *arrays, A_log, dt_bias


def run(q, k, g, beta, A_log, dt_bias, ids, tokens, first, chunks, fused, lower_bound=-5.0, **options):
    B, _, H, K = q.shape
    HV = g.shape[2]
    poison = lambda *shape, dtype=gn.bf16: np.full((B, HV, chunks, *shape), np.nan, dtype)
    out = Prepared(poison(32, K), poison(32, K), poison(32, K), poison(32, 32), poison(32, 32), poison(K, dtype=np.float32))
    unused = lambda x: beta if x is None else x
    gn.run(
        prep_kernel, (HV, chunks, B), q, k, g, beta, unused(A_log), unused(dt_bias), unused(ids), *out,
        tokens, first, chunks,
        **launch_constants(H, HV, K, K**-0.5, lower_bound, fused, A_log, dt_bias, ids), **options,
    )  # fmt: skip
    return out


def expected(q, k, g, beta, A_log, dt_bias, ids, tokens, first, chunks, fused, lower_bound=-5.0):
    q, k, g, beta = (x[:, :tokens].astype(np.float64) for x in (q, k, g, beta))
    if fused:
        q, k, g, beta = stages.gated(q, k, g, beta, A_log, dt_bias, lower_bound)
    out = stages.prep(stages.operands(q, k, g, beta, ids), q.shape[-1] ** -0.5)
    return Prepared(*(x[:, :, first : first + chunks] for x in out))


def compare(out, oracle, bound, least=1e-30):
    """least: the norm that an error is compared with at least (one product of two random vectors may cancel)."""
    for name, x, y in zip(Prepared._fields, out, oracle, strict=True):
        x = x.astype(np.float64)
        assert np.isfinite(x).all(), name
        error = np.linalg.norm(x - y) / max(np.linalg.norm(y), least)
        assert error < (1e-4 if name == "decay" else bound), (name, error)
        # Exact zeros: above the diagonal, between documents, after a boundary.
        if name in ("p", "t"):
            assert not np.any(x[y == 0]), name


CASES = [
    # B, T, H, HV, K, gate, fused, wide (float32 gate and beta), packed
    (1, 1, 1, 1, 64, "usual", True, False, False),
    (2, 33, 1, 2, 64, "usual", True, False, True),
    (1, 15, 2, 2, 64, "slow", True, True, False),
    (1, 16, 1, 1, 64, "closed", True, False, False),
    (1, 17, 1, 1, 64, "mixed", True, False, True),
    (1, 63, 1, 2, 64, "closed", False, True, True),
    (1, 65, 1, 1, 64, "mixed", False, False, False),
    (1, 130, 1, 1, 64, "slow", False, True, True),
    (1, 70, 1, 2, 128, "usual", True, False, False),
    (1, 64, 1, 1, 128, "mixed", True, True, True),
    (1, 40, 1, 1, 128, "closed", True, False, False),
    (1, 34, 1, 1, 256, "usual", True, False, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_against_float64(case):
    B, T, H, HV, K, gate, fused, wide, packed = case
    x = inputs(1, B, T, H, HV, K, gate, fused, wide)
    ids = np.sort(np.random.default_rng(2).integers(1, 2 + T // 9, (B, T)), axis=1).astype(np.int32) if packed else None
    n = -(-T // 32)
    compare(run(*x, ids, T, 0, n, fused, fence=True), expected(*x, ids, T, 0, n, fused), 5e-3, K**-0.5 if T == 1 else 1e-30)


@pytest.mark.parametrize("fused", [True, False])
def test_lowest_bound(fused):
    """-5.9 a token: the widest factors that a tile can have."""
    x = inputs(3, 1, 64, 1, 1, 64, "closed", fused, True, lower_bound=-5.9)
    compare(run(*x, None, 64, 0, 2, fused, -5.9), expected(*x, None, 64, 0, 2, fused, -5.9), 5e-3)


def test_rows_past_the_end_are_never_read():
    x = inputs(4, 1, 45, 1, 1, 64, "usual", True, False, spare=19)
    exact = tuple(np.ascontiguousarray(y[:, :45]) for y in x[:4])
    for a, b in zip(run(*x, None, 45, 0, 2, True), run(*exact, *x[4:], None, 45, 0, 2, True), strict=True):
        np.testing.assert_array_equal(a, b)


def test_window_is_a_part_of_the_whole():
    x = inputs(5, 2, 130, 1, 1, 64, "usual", True, False)
    ids = np.repeat(np.arange(1, 14, dtype=np.int32), 10)[None].repeat(2, 0)
    whole = run(*x, ids, 130, 0, 5, True, order="shuffle")
    for a, b in zip(run(*x, ids, 130, 2, 3, True), whole, strict=True):
        np.testing.assert_array_equal(a, b[:, :, 2:])


@pytest.mark.parametrize("seed", range(3))
def test_every_wait_is_there(seed):
    """Asynchronous products take effect as late as their waits allow."""
    x = inputs(10, 1, 33, 1, 1, 64, "usual", True, False)
    late = run(*x, None, 33, 0, 2, True, fence=True, delay=True, seed=seed)
    for a, b in zip(late, run(*x, None, 33, 0, 2, True), strict=True):
        np.testing.assert_array_equal(a, b)


def test_offsets_beyond_int32():
    """The last chunk of a row whose q holds more than 2^31 elements; only that chunk is touched."""
    H, K, T = 256, 128, 2**16 + 32
    n = T // 32
    q = np.zeros((1, T, H, K), gn.bf16)
    small = inputs(12, 1, 32, 1, 1, K, "usual", False, False)
    q[:, -32:, -1:] = small[0]
    beta = np.ones((1, T, H), gn.bf16)
    out = Prepared(*(np.zeros((1, H, n, 32, w), gn.bf16) for w in (K, K, K, 32, 32)), np.zeros((1, H, n, K), np.float32))
    constants = launch_constants(H, H, K, K**-0.5, -5.0, False, None, None, None)
    last = [(H - 1, n - 1, 0)]
    gn.run(prep_kernel, (H, n, 1), q, q, q, beta, beta, beta, beta, *out, T, 0, n, **constants, programs=last)
    tail = np.ascontiguousarray(q[:, -32:, -1:])
    for x, y in zip(out, run(tail, tail, tail, beta[:, :32, :1].copy(), None, None, None, 32, 0, 1, False), strict=True):
        np.testing.assert_array_equal(x[:, -1:, -1:], y)


@pytest.mark.parametrize("cut", [1, 8, 16, 23])
def test_prefix_bits_do_not_depend_on_the_future(cut):
    """Rows before `cut` of every output that has rows (K^ and the decay are about the chunk's end)."""
    x = inputs(6, 1, 32, 1, 1, 64, "mixed", True, False)
    other = inputs(7, 1, 32, 1, 1, 64, "closed", True, False)
    later = tuple(np.concatenate([a[:, :cut], b[:, cut:]], axis=1) for a, b in zip(x[:4], other[:4], strict=True)) + x[4:]
    shorter = tuple(np.ascontiguousarray(a[:, :cut]) for a in x[:4]) + x[4:]
    a, b, c = run(*x, None, 32, 0, 1, True), run(*later, None, 32, 0, 1, True), run(*shorter, None, cut, 0, 1, True)
    for name in ("neg_w", "q_in", "t", "p"):
        for y in (b, c):
            np.testing.assert_array_equal(getattr(a, name)[..., :cut, :], getattr(y, name)[..., :cut, :], err_msg=name)


def test_keys_that_look_alike():
    """Pairwise cosine 0.9, no decay: the inverse's entries stay right (a power series loses them all)."""
    q, k, g, beta, A_log, dt_bias = inputs(8, 1, 32, 1, 1, 64, "slow", True, True)
    k = (np.random.default_rng(9).standard_normal(64) * 3 + k.astype(np.float32)).astype(gn.bf16)
    x = q, k, g - 20, beta + 4, A_log, dt_bias
    out, oracle = run(*x, None, 32, 0, 1, True), expected(*x, None, 32, 0, 1, True)
    compare(out, oracle, 1.5e-2)


@gluon.jit
def inverse_kernel(lower, out):
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    at = tile * 256 + row * 16 + column
    x, _ = inverses(gl.load(lower + at))
    gl.store(out + at, x)


@pytest.mark.parametrize("alike", [0, 0.5, 0.9, 1])
def test_inverse_is_as_good_as_float32(alike):
    """Four triangles of keys with this cosine: where bfloat16 alone would leave 6e-3, two of them leave 1e-5."""
    k = np.random.default_rng(13).standard_normal((4, 16, 64)) / 8
    gram = alike + (1 - alike) * k @ k.swapaxes(1, 2)
    lower = np.tril(gram, -1).astype(np.float32)
    out = np.full((4, 16, 16), np.nan, np.float32)
    gn.run(inverse_kernel, (1,), lower, out)
    oracle = np.linalg.inv(np.eye(16) + lower.astype(np.float64))
    assert np.linalg.norm(out - oracle) < 3e-5 * np.linalg.norm(oracle)
    assert not np.any(np.triu(out, 1))
