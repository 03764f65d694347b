"""The parts of a KDA layer beside the recurrence on one GPU: short convolution, gated norm, one-token step; Triton against XLA.

    python -m experiments.bench.kda_parts [conv] [norm] [decode] [sizes]

Without names: the first three. "sizes" times other sizes of a program than those the library takes, Triton alone.

Floor: every operand read once and every result written once at 4.3 TB/s (copy speed of one H200). ratio: the Triton time over the
floor. apart: the largest relative L2 distance between the results of the two. Times are medians of 5 rounds; a round queues 20 calls
and waits once, and the operands of a round are more than the 60 MB of the L2 cache. A step of one row is too short for a call of its own:
one jit holds a step for each of `x` states, which Triton updates in place.
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kernels.kda.api import gated_kda
from moejax.ops.norms import rms_norm
from moejax.ops.short_conv import short_conv

SPEED = 4.3e12
QUEUED, ROUNDS = 20, 5
TOKENS, CHANNELS, HEADS, DIM = 8192, 3 * 96 * 128, 96, 128


_normal = jax.jit(jax.random.normal, static_argnames=("shape", "dtype"))


def noise(seed: int, *shape: int, dtype=jnp.bfloat16):
    return _normal(jax.random.key(seed), shape=shape, dtype=dtype)


def milliseconds(call) -> float:
    """Of one call; `call()` starts one and returns its results."""
    jax.block_until_ready(call())
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(QUEUED):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / QUEUED * 1e3)
    return float(np.median(times))


@jax.jit
def _distance(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())


def apart(ours, theirs) -> float:
    return max(float(_distance(a, b)) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


def row(name: str, shape: str, ours, theirs, size: float, operands) -> None:
    """One line; ours and theirs are functions of the operands, size the bytes of the floor."""
    ours, theirs = jax.jit(ours), jax.jit(theirs)
    difference = apart(ours(*operands), theirs(*operands))
    line(name, shape, milliseconds(lambda: ours(*operands)), milliseconds(lambda: theirs(*operands)), size, difference)


def line(name: str, shape: str, ours: float, theirs: float, size: float, difference: float) -> None:
    floor = size / SPEED * 1e3
    print(f"{name:22}{shape:30}{ours:9.4f}{theirs:9.4f}{floor:9.4f}{ours / floor:7.2f}{difference:10.1e}", flush=True)


def with_gradients(f):
    """f(*operands), and the gradients of its differentiated operands for a given cotangent, the last argument."""

    def both(*operands):
        y, back = jax.vjp(f, *operands[:-1])
        return y, back(operands[-1])

    return both


def conv() -> None:
    from moejax.kernels.kda.triton_conv import conv_silu_triton

    x, slope = noise(0, 1, TOKENS, CHANNELS), noise(1, 1, TOKENS, CHANNELS)
    weight = noise(2, 4, CHANNELS, dtype=jnp.float32)
    ids = np.repeat(np.arange(1, 9), TOKENS // 8)[None]
    ids[:, 1000:1100] = ids[:, -50:] = 0
    shape, size = f"T={TOKENS} C={CHANNELS} W=4", x.nbytes
    for name, packed in (("", None), (" packed", jnp.asarray(ids))):
        ours = lambda x, w, packed=packed: conv_silu_triton(x, w, segment_ids=packed)[0]
        theirs = lambda x, w, packed=packed: short_conv(x, w, segment_ids=packed, implementation="xla")[0]
        row(f"conv fwd{name}", shape, ours, theirs, 2 * size, (x, weight))
        row(f"conv fwd+bwd{name}", shape, with_gradients(ours), with_gradients(theirs), 5 * size, (x, weight, slope))


def norm() -> None:
    from moejax.kernels.kda.triton_norm import gated_rms_norm_triton

    o, gate, slope = (noise(i, 1, TOKENS, HEADS, DIM) for i in range(3))
    weight = noise(3, DIM, dtype=jnp.float32)
    ours = lambda o, gate, weight: gated_rms_norm_triton(o, gate, weight, eps=1e-5)

    def theirs(o, gate, weight):
        unit = rms_norm(o.astype(jnp.float32), weight, eps=1e-5)
        return (unit * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(o.dtype)

    shape, size = f"T={TOKENS} HV={HEADS} V={DIM}", o.nbytes
    row("norm fwd", shape, ours, theirs, 3 * size, (o, gate, weight))
    back = lambda f: lambda *operands: with_gradients(f)(*operands)[1]
    row("norm bwd", shape, back(ours), back(theirs), 5 * size, (o, gate, weight, slope))
    row("norm fwd+bwd", shape, with_gradients(ours), with_gradients(theirs), 8 * size, (o, gate, weight, slope))


def decode() -> None:
    from moejax.kernels.kda.triton_decode import kda_decode_triton

    def theirs(q, k, v, gate, write, A_log, dt_bias, state):
        operands = (x[:, None] for x in (q, k, v, gate, write))
        o, state = gated_kda(
            *operands, A_log=A_log, dt_bias=dt_bias, initial_state=state, output_final_state=True, implementation="reference"
        )
        return o[:, 0], state

    for rows, heads in ((1, 32), (1, 96), (64, 32), (64, 96)):
        one = rows * heads * DIM * DIM * 4
        copies = min(32, max(2, -(-130_000_000 // one)))
        q, k, gate = (noise(i, rows, heads, DIM) for i in range(3))
        values = [noise(100 + i, rows, heads, DIM) for i in range(copies)]  # a step of its own for each state
        rest = (gate, noise(4, rows, heads), noise(5, heads, dtype=jnp.float32), noise(6, heads, DIM, dtype=jnp.float32))
        results, times = [], []
        # XLA is not given the states to overwrite: it would write elsewhere all the same, and then copy.
        for step, donated in ((kda_decode_triton, (0,)), (theirs, ())):
            many = lambda states, values, q, k, *rest, step=step: [
                step(q, k, v, *rest, state=s) for v, s in zip(values, states, strict=True)
            ]
            run = jax.jit(many, donate_argnums=donated)
            out = run([noise(200 + i, rows, heads, DIM, DIM, dtype=jnp.float32) for i in range(copies)], values, q, k, *rest)
            results.append(jax.tree.map(jnp.copy, (out[0], out[-1])))
            held = [[state for _, state in out]]
            del out

            def again(run=run, held=held, operands=(values, q, k, *rest)):
                held[0] = [state for _, state in run(held[0], *operands)]
                return held[0]

            times.append(milliseconds(again) / copies)
        size = 2 * one + sum(x.nbytes for x in (q, k, values[0], values[0], gate))
        line("decode", f"B={rows} HV={heads} K=V={DIM} x{copies}", times[0], times[1], size, apart(*results))


def sizes() -> None:
    """Each line changes the library's choice in the entries named."""
    from moejax.kernels.kda import triton_conv, triton_decode, triton_norm

    def packed(x, w):
        return triton_conv.conv_silu_triton(x, w, segment_ids=ids)[0]

    x, slope, weight = noise(0, 1, TOKENS, CHANNELS), noise(1, 1, TOKENS, CHANNELS), noise(2, 4, CHANNELS, dtype=jnp.float32)
    ids = jnp.asarray(np.repeat(np.arange(1, 9), TOKENS // 8)[None])
    changes = [
        {},
        {"AHEAD": 2},
        {"AHEAD": 4},
        {"AHEAD": 8},
        {"STEPS": 64},
        {"STEPS": 256},
        {"BC": 256},
        {"BC": 1024},
        {"BC": 1024, "warps": 8},
    ]
    tried(triton_conv, "conv_config", changes, "conv fwd packed", lambda: lambda x, w: packed(x, w), (x, weight), 2 * x.nbytes)
    both = lambda: lambda *operands: with_gradients(packed)(*operands)[1]  # XLA drops the forward pass: its result is not asked for
    tried(triton_conv, "conv_config", changes, "conv bwd packed", both, (x, weight, slope), 3 * x.nbytes)

    o, gate, slope = (noise(i, 1, TOKENS, HEADS, DIM) for i in range(3))
    weight = noise(3, DIM, dtype=jnp.float32)
    back = lambda: lambda *operands: with_gradients(lambda *a: triton_norm.gated_rms_norm_triton(*a, eps=1e-5))(*operands)[1]
    changes = [{}, {"BR": 8}, {"BR": 32}, {"BR": 32, "warps": 8}, {"warps": 2}]
    tried(triton_norm, "norm_config", changes, "norm bwd", back, (o, gate, weight, slope), 5 * o.nbytes)

    q, k, v, gate = (noise(i, 64, HEADS, DIM) for i in range(4))
    rest = (noise(4, 64, HEADS), noise(5, HEADS, dtype=jnp.float32), noise(6, HEADS, DIM, dtype=jnp.float32))
    state = noise(7, 64, HEADS, DIM, DIM, dtype=jnp.float32)
    # Ten steps in a loop, in place; the state is copied into the loop once, a tenth of a step's bytes.
    loop = lambda: lambda s, *a: jax.lax.fori_loop(0, 10, lambda _, c: triton_decode.kda_decode_triton(*a, state=c[1]), (a[2], s))
    changes = [{}, {"BV": 16}, {"BV": 64}, {"BV": 64, "warps": 8}, {"BV": 128, "warps": 8}, {"warps": 2}]
    tried(triton_decode, "decode_config", changes, "10 decode steps", loop, (state, q, k, v, gate, *rest), 21 * state.nbytes)


def tried(module, config: str, changes: list[dict], name: str, make, operands, size: float) -> None:
    """make() gives a new function each time: a jit keeps what it compiled for the same one."""
    chosen = getattr(module, config)
    for change in changes:
        setattr(module, config, lambda *a, change=change, **k: chosen(*a, **k) | change)
        run = jax.jit(make())
        took, floor = milliseconds(lambda run=run: run(*operands)), size / SPEED * 1e3
        print(f"{name:22}{change!s:39}{took:9.4f}{'':9}{floor:9.4f}{took / floor:7.2f}", flush=True)
    setattr(module, config, chosen)


def main() -> None:
    from moejax.kernels.kda.triton_launch import available

    device = jax.devices()[0]
    if device.platform != "gpu" or (reason := available()) is not None:
        raise SystemExit(f"These kernels need an NVIDIA GPU and Triton: {device.device_kind}; {reason if device.platform == 'gpu' else ''}")
    start = time.perf_counter()
    print(f"{device.device_kind}, jax {jax.__version__}, bfloat16, states float32; ms a call")
    print(f"{'op':22}{'shape':30}{'Triton':>9}{'XLA':>9}{'floor':>9}{'ratio':>7}{'apart':>10}")
    wanted = sys.argv[1:] or ["conv", "norm", "decode"]
    for part in (conv, norm, decode, sizes):
        if part.__name__ in wanted:
            part()
    print(f"{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
