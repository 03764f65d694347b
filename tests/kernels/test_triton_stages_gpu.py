"""Each GPU kernel of KDA alone, on the card, against its stage in float64 (kda_stages.py), fed with what float64 gives before it.

Run on a Hopper GPU: python -m pytest -m gpu tests/kernels/test_triton_stages_gpu.py
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.gpu
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import kda_inputs as inputs  # noqa: E402
import kda_stages as stages  # noqa: E402

from moejax.kernels.kda import triton_grads, triton_prep, triton_walk  # noqa: E402

BOUND, B, H, HV = -5.0, 2, 1, 2


def bf16(x):
    return jnp.asarray(x, jnp.bfloat16)


def error(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)) if np.linalg.norm(wanted) else float(np.abs(found).max())


def make(regime, T, K, V, packed):
    seed = T * K + inputs.REGIMES.index(regime)
    ids = np.sort(np.random.default_rng(seed).integers(1, 6, (B, T)), axis=1).astype(np.int32) if packed else None
    x = inputs.make(T, K, V, H, HV, B, regime, ids, seed=seed, bound=BOUND)
    return {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in x.items()}


def reference(x, T, K):
    """Every stage in float64."""
    f = lambda name: np.asarray(x[name].astype(jnp.float32), np.float64)
    q, k, g, beta = stages.gated(f("q"), f("k"), f("g"), f("beta"), f("A_log"), f("dt_bias"), BOUND)
    ids = None if x["ids"] is None else np.asarray(x["ids"])
    op = stages.operands(q, k, g, beta, ids)
    p = stages.prep(op, K**-0.5)
    o, final, states, v_new = stages.forward(p, f("v"), f("state"))
    d_initial, d_states, d_v_new = stages.reverse(p, f("d_o"), f("d_state"))
    dq, dk, dv, dg, dbeta = stages.grads(op, p.t, f("d_o"), states, v_new, d_states, d_v_new, K**-0.5, T)
    front = [f(name) for name in ("q", "k", "g", "beta", "A_log", "dt_bias")]
    dq, dk, dg, dbeta, dA = stages.gated_grads(*front, BOUND, dq, dk, dg, dbeta)
    grads = dict(dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta, dA=dA.sum((0, 1, 3)), dbias=dg.sum((0, 1)))
    return p, dict(o=o, final=final, states=states, v_new=v_new), dict(d_initial=d_initial, d_states=d_states, d_v_new=d_v_new), grads


def bounds(chunks):
    return jnp.broadcast_to(jnp.asarray([[0, chunks]], jnp.int32), (B, 1, 2))


def check(found: dict, wanted, limit):
    errors = {name: error(value, getattr(wanted, name) if not isinstance(wanted, dict) else wanted[name]) for name, value in found.items()}
    print({name: f"{value:.1e}" for name, value in errors.items()})
    bad = {name: value for name, value in errors.items() if not value <= limit}
    assert not bad, bad


CASES = [
    ("production", 130, 64, 64, False),
    ("slow", 130, 128, 128, True),
    ("saturated", 65, 128, 128, False),
    ("mixed", 200, 128, 64, True),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: "-".join(map(str, c)))
def case(request):
    regime, T, K, V, packed = request.param
    x = make(regime, T, K, V, packed)
    return x, T, K, -(-T // 32), reference(x, T, K)


def rounded(p):
    cast = lambda name, value: jnp.asarray(value, jnp.float32) if name == "decay" else bf16(value)
    return triton_prep.Prepared(**{name: cast(name, value) for name, value in p._asdict().items()})


def test_prep(case):
    x, _, K, n, (p, *_) = case
    args = [x[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias", "ids")]
    run = jax.jit(lambda *a: triton_prep.prep(*a, first=0, chunks=n, scale=K**-0.5, lower_bound=BOUND, fused=True))
    found = run(*args)
    check(found._asdict(), p, 6e-3)
    again = run(*args)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(found, again, strict=True))


def test_walk_forward(case, monkeypatch):
    x, _, _, n, (p, forward, *_) = case
    found = []
    for processors in (132, 1):  # 1: as if the programs were more than the processors
        monkeypatch.setattr(triton_walk, "MULTIPROCESSORS", processors)
        run = jax.jit(lambda *a: triton_walk.walk_forward(*a, first=0))
        found.append(run(rounded(p), x["v"], x["state"][:, None], bounds(n)))
        check(dict(o=found[-1][0], final=found[-1][1][:, 0]), forward, 6e-3)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(*found, strict=True))


def test_walk_both(case, monkeypatch):
    x, _, _, n, (p, forward, reverse, _) = case
    found, ends = [], (x["d_o"], x["d_state"][:, None])
    for processors in (132, 1, 1):
        monkeypatch.setattr(triton_walk, "MULTIPROCESSORS", processors)
        run = jax.jit(lambda *a: triton_walk.walk_both(*a, first=0))
        states, v_new, d_initial, d_states, d_v_new = run(rounded(p), x["v"], x["state"][:, None], *ends, bounds(n))
        check(dict(states=states, v_new=v_new), forward, 6e-3)
        check(dict(d_initial=d_initial[:, 0], d_states=d_states, d_v_new=d_v_new), reverse, 6e-3)
        alone = jax.jit(lambda *a: triton_walk.walk_reverse(*a, first=0))(rounded(p), *ends, bounds(n))
        found.append((states, v_new, d_initial, d_states, d_v_new))
        assert np.array_equal(np.asarray(alone), np.asarray(d_initial))
    for other in found[1:]:
        assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(found[0], other, strict=True))


def test_walk_summary(case):
    x, _, _, n, (p, forward, *_) = case
    add, matrix = jax.jit(lambda p, v, b: triton_walk.walk_summary(p, v, b, first=0))(rounded(p), x["v"], bounds(n))
    state = np.asarray(x["state"], np.float64)
    final = np.asarray(matrix[:, 0], np.float64) @ state + np.asarray(add[:, 0], np.float64)
    check(dict(final=final), forward, 6e-3)


def test_grads(case):
    x, _, K, _, (p, forward, reverse, wanted) = case
    args = [x[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias", "ids")]
    args += [bf16(p.t), x["d_o"], bf16(forward["states"]), bf16(forward["v_new"]), bf16(reverse["d_states"]), bf16(reverse["d_v_new"])]
    run = jax.jit(lambda *a: triton_grads.grads(*a, first=0, scale=K**-0.5, lower_bound=BOUND, fused=True))
    dq, dk, dv, dg, dbeta, dA, dbias = run(*args)
    check(dict(dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta, dA=dA.sum((0, 2)), dbias=dbias.sum((0, 2))), wanted, 1e-2)
    again = run(*args)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip((dq, dk, dv, dg, dbeta, dA, dbias), again, strict=True))


def test_a_kernel_that_is_stopped_in_its_middle_gives_the_same_bits():
    """Three processes share the card, which turns from one to the next every few ms, whatever runs. With barriers left open in `grads`
    (triton_barriers) one launch in 50 came out wrong."""
    root = pathlib.Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": paths}
    command = [sys.executable, str(root / "experiments/bench/shared_gpu.py"), "--processes", "3", "--seconds", "24"]
    text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert len(rows) == 3 * 8 and all(row["launches"] > 500 for row in rows), text
    assert not any(row["differing"] or row["not_finite"] for row in rows) and "without company" not in text, text
