"""kernels/kda/triton_grads.py on the NumPy emulator against the float64 stages of kda_stages.py, both from the same bfloat16 inputs.

What the kernel reads from the walks (T, states, V', their gradients) is what float64 walks give, rounded to bfloat16.
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
from kda_inputs import REGIMES, bf16, make, packed

from moejax.kernels.kda import triton_grads

C = stages.C
NAMES = ("dq", "dk", "dv", "dg", "dbeta", "d_rate", "d_bias")


def oracle(x, first=0, chunks=None):
    """-> the scratch of the walks, rounded, of the window; the float64 gradients from it (zero outside the window)."""
    T = x["q"].shape[1]
    front = [x[n] for n in ("q", "k", "g", "beta")]
    if x["fused"]:
        front = stages.gated(*front, x["A_log"], x["dt_bias"], x["bound"])
    op = stages.operands(*front, x["ids"])
    p = stages.prep(op, x["scale"])
    _, _, states, v_new = stages.forward(p, x["v"], x["state"])
    _, d_states, d_v_new = stages.reverse(p, x["d_o"], x["d_state"])
    n = states.shape[2]
    chunks = n - first if chunks is None else chunks
    scratch = [bf16(y) for y in (p.t, states, v_new, d_states, d_v_new)]
    dq, dk, dv, dg, dbeta = stages.grads(
        op, *(scratch[:1]), np.asarray(x["d_o"], float), *(np.asarray(y, float) for y in scratch[1:]), x["scale"], T
    )
    out = dict(dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta)
    if x["fused"]:
        raw = [x[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias", "bound")]
        *grads, d_rate = stages.gated_grads(*raw, dq, dk, dg, dbeta)
        out |= dict(zip(("dq", "dk", "dg", "dbeta"), grads, strict=True))
        part = lambda y: stages.chunks(y, y.shape[2], n).sum(axis=3)
        out |= dict(d_rate=part(d_rate).sum(-1), d_bias=part(out["dg"]))
    window = np.zeros(n * C, bool)
    window[first * C : (first + chunks) * C] = True
    for name in NAMES[:5]:
        out[name] = out[name] * window[:T].reshape(-1, *[1] * (out[name].ndim - 2))
    for name in NAMES[5:]:
        if name in out:
            out[name] = out[name][:, :, first : first + chunks]
    return [y[:, :, first : first + chunks].copy() for y in scratch], out


def padded(x, rows):
    """NaN rows behind the tokens."""
    return np.concatenate([x, np.full((x.shape[0], rows, *x.shape[2:]), np.nan, x.dtype)], axis=1)


def launch(x, scratch, first=0, warps=None, beyond=0, **options):
    """The kernel's outputs, poisoned before; beyond: NaN tokens behind the row's end (B = 1)."""
    (B, T, H, K), HV, V = x["q"].shape, x["d_o"].shape[2], x["d_o"].shape[3]
    N = scratch[0].shape[2]
    t, states, v_new, d_states, d_v_new = scratch
    q, k, g, beta, d_o = (padded(x[n], beyond) for n in ("q", "k", "g", "beta", "d_o"))
    nan = lambda dtype, *shape: np.full(shape, np.nan, dtype)
    rows = T + beyond
    out = [nan(gn.bf16, B, rows, HV, K), nan(gn.bf16, B, rows, HV, K), nan(gn.bf16, B, rows, HV, V), nan(g.dtype, B, rows, HV, K)]
    out += [nan(beta.dtype, B, rows, HV), nan(np.float32, B, HV, N), nan(np.float32, B, HV, N, K)]
    slab = triton_grads._slab(K, V)
    warps = warps or triton_grads.launch_shape(K, V)[0]
    dummy = np.zeros(1, np.float32)
    flag = lambda name: x[name] is not None
    ids = np.zeros(1, np.int32) if x["ids"] is None else np.asarray(x["ids"], np.int32)
    gn.run(
        triton_grads.grads_kernel, (HV * N, B),
        q, k, g, beta, x["A_log"] if flag("A_log") else dummy, x["dt_bias"] if flag("dt_bias") else dummy, ids,
        gn.Descriptor(t.reshape(-1, C), [C, C]), gn.Descriptor(states.reshape(-1, K), [slab, K]),
        gn.Descriptor(d_states.reshape(-1, K), [slab, K]), d_o, v_new, d_v_new,
        T, H, HV, N, first, *out, K=K, V=V, WARPS=warps, SCALE=x["scale"], BOUND=x["bound"], FUSED=x["fused"],
        HAS_RATE=flag("A_log"), HAS_BIAS=flag("dt_bias"), HAS_IDS=flag("ids"), GROUP=HV // H,
        num_warps=warps, fence=True, **{"finite": True, **options},
    )  # fmt: skip
    return dict(zip(NAMES, out, strict=True))


def errors(got, want, T, rows=None):
    """Relative L2 of each output; every element must be there."""
    out = {}
    for name, w in want.items():
        g = np.asarray(got[name], np.float64)
        if name in NAMES[:5]:
            g, w = (y[:, slice(None) if rows is None else rows] for y in (g[:, :T], w))
        assert np.isfinite(g).all(), name
        out[name] = np.linalg.norm(g - w) / max(np.linalg.norm(w), 1e-30)
    return out


def check(x, limit=6e-3, first=0, chunks=None, **options):
    T = x["q"].shape[1]
    scratch, want = oracle(x, first, chunks)
    got = launch(x, scratch, first, **options)
    last = None if chunks is None else (first + chunks) * C
    found = errors(got, want, T, slice(first * C, last))
    assert max(found.values()) < limit, found
    return got, found


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("fused", [True, False])
def test_gate_regimes(regime, fused):
    check(make(97, fused=fused, regime=regime, seed=1), limit=4e-3)


@pytest.mark.parametrize("T", [1, 15, 16, 17, 33, 63, 65, 130])
def test_lengths(T):
    """NaN behind the row's end is never used, and nothing is written there."""
    x = make(T, H=1, HV=2, seed=T)
    got, _ = check(x, limit=6e-3 if T > 8 else 2e-2, beyond=7)  # one token: dbeta is one sum that cancels
    for name in NAMES[:5]:
        assert np.isnan(np.asarray(got[name], np.float32)[:, T:]).all(), name


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("starts", [(1,), (15, 16, 17), (31, 33), (32,), (40, 64, 90)])
def test_packed(starts, fused):
    check(make(97, H=2, HV=4, fused=fused, regime="slow", ids=packed(97, *starts), seed=sum(starts)))


def test_rows_and_dtypes():
    x = make(70, B=2, H=1, HV=2, ids=np.stack([packed(70, 9)[0], packed(70, 35, 66)[0]]), seed=3)
    check(x)
    got, _ = check({**x, "g": x["g"].astype(np.float32), "beta": x["beta"].astype(np.float32)})
    assert got["dg"].dtype == got["dbeta"].dtype == np.float32


def test_document_is_alone():
    """The state that one document leaves, and the gradient that the next one sends back, reach no row of the other, not even as 0 * inf."""
    x = make(64, regime="slow", ids=packed(64, 40), seed=4)
    t, states, v_new, d_states, d_v_new = oracle(x)[0]
    got = launch(x, (t, states, v_new, d_states, d_v_new))
    broken = states.copy()
    broken[:, :, 1] = np.inf
    again = launch(x, (t, broken, v_new, d_states, d_v_new), finite=False)
    for name in NAMES[:5]:
        np.testing.assert_array_equal(got[name][:, 40:], again[name][:, 40:], err_msg=name)
    broken = d_states.copy()
    broken[:, :, 1] = np.inf
    again = launch(x, (t, states, v_new, broken, d_v_new), finite=False)
    for name in ("dq", "dk", "dv", "dbeta"):
        np.testing.assert_array_equal(got[name][:, :40], again[name][:, :40], err_msg=name)


def test_prefix_bits():
    """With no loss after token 40 the gradients before it do not change by a bit when all later inputs do."""
    P, T = 40, 64
    x = make(T, regime="slow", seed=5)
    (t, states, v_new, d_states, d_v_new), _ = oracle(x)
    x["d_o"][:, P:] = 0
    d_states[:, :, P // C :] = 0
    d_v_new.reshape(1, 1, T, -1)[:, :, P:] = 0
    got = launch(x, (t, states, v_new, d_states, d_v_new))
    y = make(T, regime="saturated", seed=6)
    late = {n: np.concatenate([x[n][:, :P], y[n][:, P:]], axis=1) for n in ("q", "k", "g", "beta")}
    t, v_new = t.copy(), v_new.copy()
    t[:, :, P // C, P % C :] = bf16(np.tril(np.random.default_rng(7).standard_normal((C, C))))[P % C :]
    v_new.reshape(1, 1, T, -1)[:, :, P:] *= bf16(-3)
    again = launch({**x, **late}, (t, states, v_new, d_states, d_v_new))
    for name in NAMES[:5]:
        np.testing.assert_array_equal(got[name][:, :P], again[name][:, :P], err_msg=name)


def test_window():
    """Chunks of a window alone: its tokens are written, no others; the partial sums are the window's."""
    x = make(150, H=1, HV=2, ids=packed(150, 64, 100), seed=8)
    got, _ = check(x, first=2, chunks=2)
    for name in NAMES[:5]:
        out = np.asarray(got[name], np.float32)
        assert np.isnan(out[:, : 2 * C]).all() and np.isnan(out[:, 4 * C :]).all(), name


@pytest.mark.parametrize("fused", [True, False])
def test_beta_of_zero(fused):
    """d beta also where beta is 0; with the sigmoid also where 1 - beta rounds to 0 in bfloat16."""
    x = make(40, fused=fused, seed=9)
    x["beta"][:, 3:9] = bf16(-200) if fused else 0
    x["beta"][:, 20] = bf16(12) if fused else 1
    scratch, want = oracle(x)
    if fused:  # the gradient of a logit with TINY_BETA in place of the sigmoid, as the forward pass has it
        beta = np.maximum(stages.sigmoid(np.asarray(x["beta"], float)), stages.TINY_BETA)
        op = stages.operands(*stages.gated(*(x[n] for n in ("q", "k", "g", "beta")), x["A_log"], x["dt_bias"], x["bound"]), None)
        dv, new = np.swapaxes(np.asarray(scratch[0], float), -1, -2) @ np.asarray(scratch[4], float), np.asarray(scratch[2], float)
        want["dbeta"] = stages.unchunks(((dv / op.beta) * new).sum(-1, keepdims=True), 40)[..., 0] * stages.sigmoid(
            -np.asarray(x["beta"], float)
        )
        assert (beta[:, 3:9] == stages.TINY_BETA).all()
    found = errors(launch(x, scratch), want, 40)
    assert max(found.values()) < 6e-3, found


def test_far_gates():
    """|raw| of 1e4: finite gradients, exactly 0 where the sigmoid is flat."""
    x = make(33, seed=10)
    x["g"][:, :, :, :16] = bf16(1e4)
    x["g"][:, :, :, 16:32] = bf16(-1e4)
    scratch, want = oracle(x)
    got = launch(x, scratch)
    assert max(errors(got, want, 33).values()) < 6e-3
    assert (np.asarray(got["dg"], np.float32)[..., :32] == 0).all()


@pytest.mark.parametrize("bound", [-5.9, -0.5])
def test_bounds(bound):
    check(make(64, regime="saturated", bound=bound, seed=11))


@pytest.mark.parametrize("K,V,warps", [(128, 128, 8), (128, 128, 4), (64, 128, 4), (128, 64, 8), (256, 64, 8), (64, 256, 4)])
def test_channels(K, V, warps):
    check(make(40, K=K, V=V, ids=packed(40, 20), seed=12), warps=warps)


def test_copies_that_come_late():
    """TMA, cp.async and their waits: the same bits when every copy lands as late as its wait allows."""
    for size in (64, 256):
        x = make(33, K=64, V=size, ids=packed(33, 20), seed=13)
        scratch, _ = oracle(x)
        got = launch(x, scratch)
        late = launch(x, scratch, delay=True, seed=1, order="shuffle")
        for name in NAMES:
            np.testing.assert_array_equal(got[name], late[name], err_msg=name)


@pytest.mark.parametrize("fused", [True, False])
def test_wrapper_lowers(fused):
    """The call compiles for the GPU inside a jit, with two windows one after the other in the same arrays, also where every size is 1."""
    pytest.importorskip("jax_triton", reason="jax-triton is not installed")
    import jax
    import jax.numpy as jnp

    def spec(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def lower(B, T, H, HV, N, windows):
        K = V = 64
        gate = (spec(B, T, HV, K), spec(B, T, HV), spec(HV, dtype=jnp.float32), spec(HV, K, dtype=jnp.float32))
        if not fused:
            gate = (spec(B, T, HV, K, dtype=jnp.float32), spec(B, T, HV, dtype=jnp.float32), None, None)
        ids = spec(B, T, dtype=jnp.int32) if fused else None
        scratch = [spec(B, HV, N, *s) for s in ((C, C), (V, K), (C, V), (V, K), (C, V))]
        operands = (spec(B, T, H, K), spec(B, T, H, K), *gate, ids, scratch[0], spec(B, T, HV, V), *scratch[1:])

        def run(*operands):
            out = None
            for first in windows:
                out = triton_grads.grads(*operands, first=first, scale=0.125, lower_bound=-5.0, fused=fused, out=out)
            return out

        lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
        shapes = [x.shape for x in jax.tree.leaves(lowered.out_info)]
        assert shapes[:5] == [(B, T, HV, K), (B, T, HV, K), (B, T, HV, V), (B, T, HV, K), (B, T, HV)]
        assert shapes[5:] == ([(B, HV, N), (B, HV, N, K)] if fused else [])
        return lowered.as_text()

    assert "output_operand_alias" in lower(2, 100, 2, 4, 2, (0, 2))
    lower(1, 1, 1, 1, 1, (0,))
