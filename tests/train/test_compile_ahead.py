"""Compiling ahead: the same program, at no change to what runs meanwhile; errors come out at the switch."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.train.compile_ahead import CompileAhead, abstract


@pytest.fixture(scope="module")
def step():
    """Enough work that a compile overlaps it: step(state, batch) -> (state, metrics)."""

    def train_step(state, batch):
        def body(x, _):
            x = jnp.tanh(x @ state["w"] + batch.mean())
            return x, x.sum()

        x, sums = jax.lax.scan(body, state["x"], None, length=50)
        return {"w": state["w"] * 0.999, "x": x, "count": state["count"] + 1}, sums

    return train_step


def start(size=64):
    key = jax.random.key(0)
    return {"w": jax.random.normal(key, (size, size)) / size**0.5, "x": jnp.ones((8, size)), "count": jnp.zeros((), jnp.int32)}


def run(step, state, batches, between=lambda i: None):
    results = []
    for i, batch in enumerate(batches):
        between(i)
        state, sums = step(state, batch)
        results.append(np.asarray(sums))
    return state, results


def test_the_switch_uses_the_compiled_program_and_the_running_steps_keep_their_bits(step):
    short, long = np.ones((4, 16), np.float32), np.full((2, 32), 0.5, np.float32)
    plain = jax.jit(step)
    wanted, results = run(plain, start(), [short] * 6 + [long] * 2)
    jitted, made = jax.jit(step), []

    def begin(i):
        if i == 1:
            made.append(CompileAhead("long", jitted, *abstract((start(), long))))

    state, first = run(jitted, start(), [short] * 6, begin)
    ahead, programs = made[0], jitted._cache_size()
    compiled = ahead.result()
    state, second = run(compiled, state, [long] * 2)
    assert jitted._cache_size() == programs  # the long program was never compiled a second time, by a call
    for a, b in zip(results, first + second, strict=True):
        assert np.array_equal(a, b)
    for name in wanted:
        assert np.array_equal(wanted[name], state[name])
    assert (
        ahead.lower_seconds > 0
        and ahead.compile_seconds > 0
        and set(ahead.facts()) == {"lower_seconds", "compile_seconds", "stall_seconds"}
    )
    assert ahead.done and ahead.result() is compiled


def test_donated_state_and_wrong_shapes(step):
    """Donation survives, and the program refuses what it was not compiled for instead of compiling again."""
    state, batch = start(), np.ones((4, 16), np.float32)
    compiled = CompileAhead("short", jax.jit(step, donate_argnums=0), *abstract((state, batch))).result()
    compiled(state, batch)
    assert state["w"].is_deleted()
    with pytest.raises(TypeError, match=r"Argument types differ|compiled with|called with"):
        compiled(start(), np.ones((4, 17), np.float32))


class Failing:
    """A function whose compile fails, or takes as long as `release` is not set."""

    def __init__(self, release=None):
        self.release = release
        self.lowered_on = self.compiled_on = ""

    def lower(self, *args):
        self.lowered_on = threading.current_thread().name
        return self

    def compile(self):
        self.compiled_on = threading.current_thread().name
        if self.release is not None:
            self.release.wait(10)
            return "the program"
        raise MemoryError("RESOURCE_EXHAUSTED: out of memory")


def test_an_error_surfaces_at_the_switch_with_the_stage_named():
    function = Failing()
    ahead = CompileAhead("64K", function)
    for _ in range(2):  # as often as it is asked for
        with pytest.raises(RuntimeError, match=r"compiling 64K ahead failed after .* out of memory") as caught:
            ahead.result()
        assert isinstance(caught.value.__cause__, MemoryError)
    assert function.lowered_on == threading.current_thread().name and function.compiled_on == "compile 64K"


def test_an_error_of_tracing_is_raised_at_once():
    with pytest.raises(TypeError, match=r"incompatible shapes|add got"):
        CompileAhead("bad", jax.jit(lambda a, b: a + b), np.zeros(3), np.zeros(4))


def test_the_wait_is_measured_as_the_stall():
    release = threading.Event()
    ahead = CompileAhead("slow", Failing(release))
    assert not ahead.done and ahead.stall_seconds == 0
    timer = threading.Timer(0.2, release.set)
    timer.start()
    start = time.perf_counter()
    assert ahead.result() == "the program"
    assert 0.1 < ahead.stall_seconds <= time.perf_counter() - start
    timer.join()


def test_shapes_keep_dtypes_weak_types_and_shardings():
    mesh = jax.make_mesh((4,), ("a",))
    spread = jax.device_put(np.zeros((8, 2), np.float32), jax.NamedSharding(mesh, jax.P("a")))
    tree = {
        "spread": spread,
        "free": jnp.zeros(3, jnp.bfloat16),
        "host": np.zeros(2, np.int32),
        "weak": jnp.asarray(1.0),
        "again": jax.ShapeDtypeStruct((1,), jnp.int8),
    }
    shapes = abstract(tree)
    assert shapes["spread"].sharding == spread.sharding and shapes["free"].sharding is None
    assert shapes["free"].dtype == jnp.bfloat16 and shapes["host"].dtype == np.int32 and shapes["again"] is tree["again"]
    assert shapes["weak"].weak_type and not shapes["free"].weak_type
    compiled = CompileAhead("spread", jax.jit(lambda t: t["spread"] * 2), {"spread": spread}).result()
    assert compiled({"spread": spread}).sharding.is_equivalent_to(spread.sharding, 2)
