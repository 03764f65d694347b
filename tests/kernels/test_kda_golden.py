"""KDA against vectors computed in float64 by an independent implementation (tests/golden/kda): values and every gradient."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.kda import gated_kda, kda, kda_gate

FILES = sorted(p.stem for p in (pathlib.Path(__file__).parents[1] / "golden" / "kda").glob("*.npz"))
FILES = [name for name in FILES if not name.startswith("conv_")]
PLAIN = ("q", "k", "v", "g", "beta", "state")
RAW = ("q", "k", "v", "raw", "beta_logit", "A_log", "dt_bias", "state")
# The check is about results, not speed: without LLVM's optimisations a case compiles in a third of the time.
QUICK = {"xla_backend_optimization_level": 0}


def error(value, wanted) -> float:
    """Largest absolute difference over the largest magnitude."""
    wanted = np.asarray(wanted, np.float64)
    return float(np.max(np.abs(np.asarray(value, np.float64) - wanted)) / max(np.max(np.abs(wanted)), 1e-300))


@functools.cache
def compiled(op, bound, implementation, documents):
    """Values and gradients of one form; jit compiles it once for all files of a shape."""
    more = {"lower_bound": bound, "output_final_state": True, "implementation": implementation, "num_segments": documents}

    def run(args, cotangents, ids):
        out, vjp = jax.vjp(lambda *a: op(*a[:-1], initial_state=a[-1], segment_ids=ids, **more), *args)
        return out, vjp(cotangents)

    return jax.jit(run, compiler_options=QUICK)


def errors(data, bound, implementation, dtype):
    """(largest error of the outputs, of the gradients) for one file."""
    names = RAW if "in_raw" in data else PLAIN
    args = [jnp.asarray(data["in_" + name], dtype) for name in names]
    w_o, w_state = (jnp.asarray(data[name], dtype) for name in ("in_wo", "in_ws"))
    ids, documents = None, None
    if "segment_ids" in data:  # ids count from 0 in the files; states are per document
        args[-1], w_state = args[-1][None], w_state[None]
        ids, documents = jnp.asarray(data["segment_ids"] + 1, jnp.int32), args[-1].shape[1]
    run = compiled(gated_kda if names is RAW else kda, bound, implementation, documents)
    (o, state), grads = run(args, (w_o, w_state), ids)
    state, last = (x if ids is None else x[0] for x in (state, grads[-1]))
    grads = dict(zip(names, (*grads[:-1], last), strict=True))
    return (
        max(error(o, data["out_o"]), error(state, data["out_state"])),
        max(error(x, data["grad_" + name]) for name, x in grads.items()),
    )


def bounds(data) -> list[float | None]:
    """The gate forms a file can go through: with the promise of a lower bound where it holds, and without."""
    if "in_raw" in data:
        return [float(data["lower_bound"]) if "lower_bound" in data else None]
    return [-5.0, None] if data["in_g"].min() >= -5.0 else [None]


@pytest.mark.parametrize("name", FILES)
def test_chunked_float64(golden, x64, name):
    data = golden(f"kda/{name}.npz")
    tolerance = 1e-6 if name.startswith("full_dims") else 1e-12  # that file is stored in float32
    for bound in bounds(data):
        out, grad = errors(data, bound, "xla", jnp.float64)
        assert out < tolerance and grad < tolerance, (bound, out, grad)


@pytest.mark.parametrize("name", FILES)
def test_chunked_float32(golden, name):
    data = golden(f"kda/{name}.npz")
    out, grad = errors(data, bounds(data)[0], "xla", jnp.float32)
    assert out < 1e-5 and grad < 5e-5, (out, grad)


@pytest.mark.parametrize("name", ["mix_T17", "gva4_T64", "packed_states_T130"])
def test_pairwise_float32(golden, name):
    out, grad = errors(golden(f"kda/{name}.npz"), None, "xla", jnp.float32)
    assert out < 1e-5 and grad < 5e-5, (out, grad)


@pytest.mark.parametrize("name", ["prod_T17", "packed_states_T130", "raw_bounded_wild_T64", "raw_softplus_wild_T64"])
def test_reference_float64(golden, x64, name):
    data = golden(f"kda/{name}.npz")
    out, grad = errors(data, bounds(data)[0], "reference", jnp.float64)
    assert out < 1e-12 and grad < 1e-9, (out, grad)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("raw_")])
def test_gate(golden, name):
    data = golden(f"kda/{name}.npz")
    g = kda_gate(data["in_raw"], data["in_A_log"], data["in_dt_bias"], lower_bound=bounds(data)[0])
    assert g.dtype == jnp.float32 and error(g, data["out_g"]) < 2e-6
