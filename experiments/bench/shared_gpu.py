"""Does a kernel give the same bits while other processes use the card? For "One GPU for several processes" in BUILD_NOTES.

    python experiments/bench/shared_gpu.py                      # 5 processes, each kernel of a KDA layer in turn; a Hopper GPU
    python experiments/bench/shared_gpu.py --stages both grads --seconds 30

A kernel that breaks a rule of shared memory can look right on a card of its own (with a barrier left open 1 launch in 50 was wrong here).
Every process launches one kernel again and again on the same operands, queued for much longer than a process's turn on the card, so that
kernels are stopped in their middle, and counts on the device the numbers that differ from a first run that had the card to itself.
Prints, for each process and kernel: launches, launches with a difference, numbers that differ, numbers that are not finite.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kernels.kda.triton import stages as kda_stages
from moejax.ops import short_conv

QUEUED = 200  # launches between two looks by the host: 20 to 100 ms, where a turn is a few
ROWS, TOKENS, HEADS, CHANNELS = 64, 256, 2, 128
BOUND = -5.0
STAGES = ("prep", "forward", "both", "reverse", "summary", "grads", "conv", "norm")


def operands() -> dict[str, Any]:
    """Random operands of a layer as it is initialised."""
    draw = np.random.default_rng(0)
    normal = lambda *shape, scale: jnp.asarray(scale * draw.standard_normal(shape), jnp.bfloat16)
    shape = (ROWS, TOKENS, HEADS, CHANNELS)
    found: dict[str, Any] = {name: normal(*shape, scale=scale) for name, scale in dict(q=0.1, k=0.1, v=0.1, g=0.3, d_o=0.01).items()}
    return found | {
        "beta": normal(*shape[:3], scale=0.3),
        "A_log": jnp.zeros(HEADS, jnp.float32),
        "dt_bias": jnp.asarray(draw.uniform(-6.9, -2.25, (HEADS, CHANNELS)), jnp.float32),
        "state": jnp.zeros((ROWS, 1, HEADS, CHANNELS, CHANNELS), jnp.float32),
        "bounds": jnp.broadcast_to(jnp.asarray([[0, TOKENS // 32]], jnp.int32), (ROWS, 1, 2)),
        "taps": jnp.asarray(0.3 * draw.standard_normal((4, HEADS * CHANNELS)), jnp.float32),
    }


def stages() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """name -> kernel of the operands and of what earlier kernels gave (`p`, `walked`)."""
    from moejax.kernels.kda.triton_norm import gated_rms_norm_triton  # Triton, which --help need not have

    run = kda_stages()
    gate = lambda x: (x["q"], x["k"], x["g"], x["beta"], x["A_log"], x["dt_bias"], None)
    fixed: dict[str, Any] = dict(first=0, scale=CHANNELS**-0.5, lower_bound=BOUND, fused=True)

    def convolution(x):
        flat = x["v"].reshape(ROWS, TOKENS, -1)
        return jax.vjp(lambda a, w: short_conv(a, w)[0], flat, x["taps"])[1](flat)

    def grads(x):
        states, v_new, _, d_states, d_v_new = x["walked"]
        return run.grads(*gate(x), x["p"].t, x["d_o"], states, v_new, d_states, d_v_new, **fixed)

    return {
        "prep": lambda x: run.prep(*gate(x), chunks=TOKENS // 32, **fixed),
        "forward": lambda x: run.walk_forward(x["p"], x["v"], x["state"], x["bounds"], first=0),
        "both": lambda x: run.walk_both(x["p"], x["v"], x["state"], x["d_o"], x["state"], x["bounds"], first=0),
        "reverse": lambda x: run.walk_reverse(x["p"], x["d_o"], x["state"], x["bounds"], first=0),
        "summary": lambda x: run.walk_summary(x["p"], x["v"], x["bounds"], first=0),
        "grads": grads,
        "conv": convolution,
        "norm": lambda x: jax.vjp(lambda a, b: gated_rms_norm_triton(a, b, jnp.ones(CHANNELS), eps=1e-5), x["v"], x["k"])[1](x["d_o"]),
    }


def compared(kernel: Callable, x: dict[str, Any], wanted: Any) -> Any:
    """-> int32 [2]: numbers of kernel(x) whose bits are not those of `wanted`, and those that are not finite."""
    bits = lambda a: jax.lax.bitcast_convert_type(a, {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize])
    pairs = list(zip(jax.tree.leaves(kernel(x)), jax.tree.leaves(wanted), strict=True))
    return jnp.stack([sum(jnp.sum(bits(a) != bits(b)) for a, b in pairs), sum(jnp.sum(~jnp.isfinite(a)) for a, _ in pairs)])


def work(name: str, folder: pathlib.Path, options: argparse.Namespace) -> None:
    """One process: compile, a first run alone, then all stages together with the others."""
    x = operands()
    kernels = stages()
    with (folder / "alone").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        x["p"] = jax.block_until_ready(jax.jit(kernels["prep"])(x))
        x["walked"] = jax.block_until_ready(jax.jit(kernels["both"])(x))
        wanted = {stage: jax.block_until_ready(jax.jit(kernels[stage])(x)) for stage in options.stages}
        checks = {stage: jax.jit(functools.partial(compared, kernels[stage])) for stage in options.stages}
        for stage in options.stages:
            if (off := np.asarray(checks[stage](x, wanted[stage]))).any():
                print(f"{name}  {stage}: differs without company: {off.tolist()}", flush=True)
        (folder / f"ready-{name}").touch()
    while len(list(folder.glob("ready-*"))) < options.processes:
        time.sleep(0.02)
    for stage in options.stages:
        end, launches, differing, numbers = time.monotonic() + options.seconds / len(options.stages), 0, 0, np.zeros(2, np.int64)
        while time.monotonic() < end:
            found = np.asarray(jax.device_get([checks[stage](x, wanted[stage]) for _ in range(QUEUED)]))
            launches, differing, numbers = launches + QUEUED, differing + int((found[:, 0] > 0).sum()), numbers + found.sum(axis=0)
        row = {"process": name, "stage": stage, "launches": launches, "differing": differing}
        print(json.dumps(row | {"numbers": int(numbers[0]), "not_finite": int(numbers[1])}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the exit status: 1 when a process failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60, help="of all stages together, after compiling")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker[0], pathlib.Path(options.worker[1]), options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        own = list(sys.argv[1:] if arguments is None else arguments)
        commands = [[sys.executable, __file__, *own, "--worker", str(i), folder] for i in range(options.processes)]
        running = [subprocess.Popen(command) for command in commands]
        return int(any([process.wait() for process in running]))


if __name__ == "__main__":
    sys.exit(main())
