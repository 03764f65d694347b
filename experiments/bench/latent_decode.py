"""Decoding attention over a cache of latents on one Hopper GPU: values against float64, then time against the bytes of the cache.

    python -m experiments.bench.latent_decode [check] [shapes] [xla]

Without names: all of them. Floor: every entry of the rows' lengths read once at 4.3 TB/s (copy speed of one H200). A time is the median of
5 rounds; a round queues up to 50 calls or 50 ms and waits once. What would start after 85 seconds is left out, and said.

    check    relative error (largest difference over the largest value) against float64: ragged rows, more than 2^31 values
    shapes   the kernel, over rows, lengths and heads
    xla      the loop in plain XLA
"""

from __future__ import annotations

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.attention import milliseconds
from moejax.kernels.latent_decode import latent_decode
from moejax.kernels.latent_decode.reference import latent_decode_reference

SPEED = 4.3e12
ROUNDS, SECONDS = 5, 85
C, R, SCALE = 512, 64, 192**-0.5
M = 2**20
START = time.perf_counter()


@functools.partial(jax.jit, static_argnames="shape")
def noise(seed, shape):
    """Uniform in [-1, 1) by a hash of the place, without a temporary of the shape: 19 GB of jax.random need twice that beside them."""
    x = jnp.uint32(seed)
    for axis, factor in enumerate((0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)[: len(shape)]):
        x = x + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(factor)
        x = (x ^ (x >> 15)) * jnp.uint32(0x2C1B3C6D)
    x = (x ^ (x >> 13)) >> 8
    return (x.astype(jnp.float32) * 2**-23 - 1).astype(jnp.bfloat16)


def operands(B, S, H, lengths=None, T=1):
    lengths = jnp.full(B, S, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    return 4 * noise(1, (B, T, H, C + R)), noise(2, (B, S, C)), noise(3, (B, S, R)), lengths


def ragged(B, S):
    """Lengths from S down to 1, each row a fixed part of the one before; row 1 is empty."""
    lengths = np.round(S ** (1 - np.arange(B) / (B - 1))).astype(np.int32)
    lengths[1] = 0
    return lengths


def truth(q, latent, shared_key, lengths):
    """float64; of long rows one after another: 1.5M entries are 7 GB."""
    with jax.enable_x64(True):
        f64 = lambda x: x.astype(jnp.float64)
        wide = jax.jit(lambda q, x, y, n: latent_decode_reference(f64(q), f64(x), f64(y), n, None, scale=SCALE))
        if latent.shape[1] < 100_000:
            return np.asarray(wide(q, latent, shared_key, lengths))
        rows = [slice(b, b + 1) for b in range(len(q))]
        return np.concatenate([np.asarray(wide(*(x[b] for x in (q, latent, shared_key, lengths)))) for b in rows])


def apart(got, wanted) -> float:
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


@jax.jit
def kernel(*arguments):
    return latent_decode(*arguments, scale=SCALE, implementation="triton")


@jax.jit
def plain(*arguments):
    return latent_decode(*arguments, scale=SCALE, implementation="xla")


def check() -> None:
    for T, H in ((1, 16), (2, 24), (1, 8)):
        arguments = operands(8, 8192, H, [8192, 0, 1, 63, 64, 65, 4097, 777], T)
        wanted = truth(*arguments)
        gone = (jnp.arange(8192) >= arguments[3][:, None])[..., None]
        dirty = (arguments[0], *(jnp.where(gone, jnp.nan, x) for x in arguments[1:3]), arguments[3])
        ours, theirs = (apart(call(*dirty), wanted) for call in (kernel, plain))
        print(f"check B=8 S=8192 ragged, NaN behind, T={T} H={H}: {ours:.1e}, in XLA {theirs:.1e}", flush=True)
    arguments = operands(3, 1_500_000, 16, [1_500_000, 100, 1_499_999])  # 2.3e9 values
    got, again = (kernel(*arguments) for _ in range(2))
    same = np.array_equal(np.asarray(got, np.float32), np.asarray(again, np.float32))
    print(f"check B=3 S=1.5M H=16: {apart(got, truth(*arguments)):.1e}; the same bits again: {same}", flush=True)


SHAPES = {
    "B=16 S=1M H=16": (16, M, 16),
    "B=512 S=8k H=16": (512, 8192, 16),
    "B=1 S=1M H=16": (1, M, 16),
    "B=64 S=128k ragged H=16": (64, M // 8, 16, ragged(64, M // 8)),
    "B=16 S=1M, one row long H=16": (16, M, 16, [M] + [100] * 15),
    "B=64 S=4k H=16": (64, 4096, 16),
    "B=1 S=8k H=16": (1, 8192, 16),
    "B=16 S=128k H=8": (16, M // 8, 8),
    "B=16 S=128k H=12": (16, M // 8, 12),
    "B=16 S=128k H=32": (16, M // 8, 32),
    "B=16 S=128k H=96": (16, M // 8, 96),
    "B=16 S=128k H=16 T=2": (16, M // 8, 16, None, 2),
}


def timed(names, config: str, call) -> None:
    for name in names:
        if time.perf_counter() - START > SECONDS:
            print(f"{name}: left out, the time is over", flush=True)
            continue
        arguments = operands(*SHAPES[name])
        took, size = milliseconds(call, arguments, ROUNDS), int(np.asarray(arguments[3]).sum()) * (C + R) * 2
        floor = size / SPEED * 1e3
        print(f"{name:31}{config:8}{took:9.4f}{floor:9.4f}{size / took / 1e9:7.2f}{100 * floor / took:6.0f}%", flush=True)


def shapes() -> None:
    timed(SHAPES, "kernel", kernel)


def xla() -> None:
    timed(list(SHAPES)[:4], "xla", plain)


def main() -> None:
    from moejax.kernels.kda.triton_launch import available

    device = jax.devices()[0]
    if device.platform != "gpu" or (reason := available()) is not None:
        raise SystemExit(f"These kernels need an NVIDIA GPU and Triton: {device.device_kind}; {reason if device.platform == 'gpu' else ''}")
    parts = {"check": check, "shapes": shapes, "xla": xla}
    unknown = set(sys.argv[1:]) - set(parts)
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(parts)}")
    print(f"{device.device_kind}, jax {jax.__version__}, bfloat16, C={C} R={R}")
    print(f"{'shape':31}{'form':8}{'ms':>9}{'floor':>9}{'TB/s':>7}{'floor%':>7}", flush=True)
    for name, part in parts.items():
        if name in (sys.argv[1:] or parts):
            part()
    print(f"{time.perf_counter() - START:.0f} s in all")


if __name__ == "__main__":
    main()
