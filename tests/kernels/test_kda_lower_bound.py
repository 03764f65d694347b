"""The point of the lower bound: bounded tiles are finite and accurate in bfloat16; unbounded gates overflow the dense path."""

import importlib.util
import math
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "experiments" / "bench" / "lower_bound.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("lower_bound", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("spread", [False, True])
def test_bounded_gates_fit_dense_tiles(bench, spread):
    """At saturation (all g = -5) and with gates as in training, bfloat16 tiles are within 1e-2 of float64."""
    found = bench.study(5.0, spread=spread)
    assert found["dense"] < 1e-2 and found["pairwise"] < 1e-2
    assert found["kda(lower_bound=-5)"] < 1e-5 and found["kda(lower_bound=None)"] < 1e-5


def test_unbounded_gates_overflow_dense_tiles(bench):
    """A little past the bound the same dense path holds inf or NaN; the pairwise path stays exact."""
    first = bench.first_overflow(spread=False)
    assert first is not None and 5.9 < first < 9
    for size in (9.0, 100.0):
        found = bench.study(size, spread=False)
        assert math.isinf(found["dense"]) and math.isinf(found["kda(lower_bound=-5)"])
        assert found["pairwise"] < 1e-2 and found["kda(lower_bound=None)"] < 1e-5
