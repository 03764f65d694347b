"""The walks over the chunks (kernels/kda/triton_walk.py): the kernels' own source, run on NumPy, against the stages in float64."""

import os
import sys

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are Triton's Gluon; their source cannot be read without it")

sys.path.insert(0, os.path.dirname(__file__))
import gluon_numpy as gn
import kda_stages as stages
from kda_inputs import REGIMES, make

from moejax.kernels.kda import triton_launch, triton_walk

bf16, C = gn.bf16, stages.C


def descriptor(array, block_shape, layout=None):
    return gn.Descriptor(np.ascontiguousarray(array), block_shape, layout)


class Launch:
    """triton_launch.call on the emulator: outputs poisoned, every launch with late TMA copies and products, as on the GPU."""

    def __init__(self, **options):
        self.options = dict(delay=True, fence=True, race=True, finite=True) | options

    def __call__(self, kernel, *operands, out_type, grid, num_warps, aliases=None, maxnreg=None, num_stages=None, name=None, **arguments):
        taken = {output: operand for operand, output in (aliases or {}).items()}
        many = isinstance(out_type, tuple)
        outputs = [np.full(x.shape, np.nan, x.dtype) for x in (out_type if many else (out_type,))]
        for output, operand in taken.items():
            outputs[output] = arguments[operand] = np.array(arguments[operand])
        free = [x for i, x in enumerate(outputs) if i not in taken]
        names = [x for x in kernel.arg_names if x not in arguments]
        arguments |= dict(zip(names[len(operands) :], free, strict=True))
        operands = [np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x for x in operands]
        gn.run(kernel, grid, *operands, num_warps=num_warps, **self.options, **arguments)
        return tuple(outputs) if many else outputs[0]


@pytest.fixture(autouse=True)
def launch(monkeypatch):
    monkeypatch.setattr(triton_launch, "descriptor", descriptor)
    monkeypatch.setattr(triton_launch, "call", Launch())


class Case:
    """Inputs of a walk: Prepared as the prep kernel leaves it (bfloat16), for float64 the same numbers."""

    def __init__(self, t, k, v, *, b=1, hv=1, regime="production", documents=False, seed=0):
        rng = np.random.default_rng(seed)
        n = -(-t // C)
        ids = None
        if documents:
            ids = np.cumsum(rng.random((b, t)) < 0.05, axis=1)
            ids[:, C:] += 1  # one boundary at a chunk's start
        x = make(t, k, v, H=hv, HV=hv, B=b, regime=regime, ids=ids, fused=False, seed=seed)
        exact = stages.prep(stages.operands(*(x[name] for name in ("q", "k", "g", "beta", "ids"))), k**-0.5)
        self.p = stages.Prepared(
            *[np.asarray(y, np.float32 if name == "decay" else bf16) for name, y in zip(exact._fields, exact, strict=True)]
        )
        self.exact = stages.Prepared(*[np.asarray(y, np.float64) for y in self.p])
        self.v, self.d_o, self.state = x["v"], x["d_o"], x["state"][:, None]
        self.bounds = np.tile(np.array([0, n], np.int32), (b, 1, 1))
        self.d_state = rng.normal(size=self.state.shape).astype(np.float32)
        self.n = n


def close(got, want, limit, what):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, what
    assert np.isfinite(got).all(), f"{what}: not written or not finite"
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
    assert error < limit, f"{what}: {error:.1e}"


def forward(case, **kw):
    return triton_walk.walk_forward(case.p, case.v, case.state, case.bounds, first=0, **kw)


def both(case):
    """The gradient of the final state is other numbers than the initial state, that a mix-up shows."""
    return triton_walk.walk_both(case.p, case.v, case.state, case.d_o, case.d_state, case.bounds, first=0)


def reverse(case):
    return triton_walk.walk_reverse(case.p, case.d_o, case.d_state, case.bounds, first=0)


def everything(case):
    return *forward(case), *both(case), reverse(case), *triton_walk.walk_summary(case.p, case.v, case.bounds, first=0)


def same_bits(one, two):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


def check(case):
    wanted = stages.forward(case.exact, case.v.astype(np.float64), case.state[:, 0])
    wanted += stages.reverse(case.exact, case.d_o.astype(np.float64), case.d_state[:, 0])
    o, final = forward(case)
    states, v_new, d_initial, d_states, d_v_new = both(case)
    found = o, final[:, 0], states, v_new, d_initial[:, 0], d_states, d_v_new
    for name, got, want in zip(("o", "final", "states", "v_new", "d_initial", "d_states", "d_v_new"), found, wanted, strict=True):
        close(got, want, 5e-3, name)
    np.testing.assert_array_equal(reverse(case), d_initial)


@pytest.mark.parametrize("regime", REGIMES)
def test_stages(regime):
    check(Case(130, 64, 64, hv=2, regime=regime))


@pytest.mark.parametrize("t", [1, 15, 16, 17, 33, 63, 65])
def test_lengths(t):
    check(Case(t, 64, 64, seed=t))


@pytest.mark.parametrize("k, v", [(128, 128), (64, 128), (128, 64), (256, 64), (64, 256)])
def test_sizes(k, v):
    check(Case(70, k, v, b=2))


def test_documents():
    check(Case(130, 64, 64, b=2, documents=True))


@pytest.mark.parametrize("k, v", [(64, 128), (128, 128), (64, 64)])
def test_more_programs_than_processors(monkeypatch, k, v):
    """128 columns a program, or two programs on a processor, change no bit."""
    case = Case(130, k, v, hv=2)
    one = everything(case)
    monkeypatch.setattr(triton_walk, "MULTIPROCESSORS", 1)
    assert triton_walk._shape(1, (128,), 64, tiles=3, squares=2, staged=True)["GROUPS"] == 2
    assert triton_walk._shape_of_one(2, 128, True) == (3, 1)
    same_bits(one, everything(case))
    check(case)


@pytest.mark.parametrize("seed", range(4))
def test_order_of_events(monkeypatch, seed):
    """Whatever the order in which copies, products and warps take effect: the same bits (more chunks than slots of the ring)."""
    case = Case(270, 64, 128, seed=1)
    monkeypatch.setattr(triton_walk, "MULTIPROCESSORS", 1 if seed % 2 else 132)
    results = []
    for options in (dict(delay=False), dict(seed=seed)):
        monkeypatch.setattr(triton_launch, "call", Launch(**options))
        results.append(everything(case))
    same_bits(*results)


def test_several_walks_windows_and_summaries():
    """Segments of a row from their own states, a window of the row, an empty walk, and state_out = matrix @ state + add."""
    case = Case(200, 64, 64, b=2, hv=2)
    o, final, states, v_new = stages.forward(case.exact, case.v.astype(np.float64), case.state[:, 0])
    # the window of chunks 2..6, three walks: 2..4, 4..4 (empty), 4..7
    window = stages.Prepared(*[x[:, :, 2:] for x in case.p])
    bounds = np.tile(np.array([[2, 4], [4, 4], [4, 7]], np.int32), (2, 1, 1))
    t = lambda x: np.swapaxes(x, -1, -2)
    start = np.stack([t(states[:, :, 2]), np.full_like(t(states[:, :, 2]), 7.0), t(states[:, :, 4])], axis=1).astype(np.float32)
    earlier = np.full(case.v.shape, 3.0, bf16)
    got_o, got_final = triton_walk.walk_forward(window, case.v, start, bounds, first=2, out=earlier)
    close(got_o[:, 64:], o[:, 64:], 5e-3, "o")
    assert (got_o[:, :64] == 3).all()  # the rows of the earlier window stay
    close(got_final[:, 0], t(states[:, :, 4]), 5e-3, "final of a segment")
    assert (got_final[:, 1] == 7).all()  # an empty walk
    close(got_final[:, 2], final, 5e-3, "final")
    add, matrix = triton_walk.walk_summary(window, case.v, bounds, first=2)
    out = matrix.astype(np.float64) @ start + add
    close(out[:, 0], t(states[:, :, 4]), 5e-3, "summary")
    close(out[:, 1], start[:, 1], 1e-12, "summary of an empty walk")
    close(out[:, 2], final, 5e-3, "summary")
    _, d_states, d_v_new = stages.reverse(case.exact, case.d_o.astype(np.float64), case.d_state[:, 0])
    end = np.stack([t(d_states[:, :, 3]), np.full_like(start[:, 0], 9.0), case.d_state[:, 0]], axis=1).astype(np.float32)
    got = triton_walk.walk_both(window, case.v, start, case.d_o, end, bounds, first=2)
    got_states, got_new, got_initial, got_d_states, got_d_new = got
    np.testing.assert_array_equal(triton_walk.walk_reverse(window, case.d_o, end, bounds, first=2), got_initial)
    close(got_states, states[:, :, 2:], 5e-3, "states")
    close(got_new, v_new[:, :, 2:], 5e-3, "v_new")
    close(got_initial[:, 0], t(d_states[:, :, 1]), 5e-3, "d_initial of a segment")
    assert (got_initial[:, 1] == 9).all()
    close(got_initial[:, 2], t(d_states[:, :, 3]), 5e-3, "d_initial of a segment")
    close(got_d_states, d_states[:, :, 2:], 5e-3, "d_states")
    close(got_d_new, d_v_new[:, :, 2:], 5e-3, "d_v_new")


def test_a_prefix_has_the_bits_of_its_own_run():
    whole, t = Case(130, 64, 64), 77
    prefix = Case(t, 64, 64)
    prefix.p = stages.Prepared(*[x[:, :, :3].copy() for x in whole.p])
    for x in ("neg_w", "q_in", "t", "p"):  # what belongs to tokens after the prefix
        getattr(prefix.p, x)[:, :, 2, t - 64 :] = 5
    prefix.p.p[:, :, 2] = np.tril(prefix.p.p[:, :, 2])
    prefix.p.k_out[:, :, 2, t - 64 :] = 5
    prefix.v, prefix.state, prefix.bounds = whole.v[:, :t], whole.state, np.array([[[0, 3]]], np.int32)
    np.testing.assert_array_equal(forward(prefix)[0], forward(whole)[0][:, :t])
