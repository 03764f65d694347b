"""Peak arithmetic of a device, for model FLOPs utilisation."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Dense bfloat16 FLOP/s of one device as its vendor states it; matched as a part of `device_kind`, longest first.
PEAK_BF16 = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


class Peak(NamedTuple):
    """flops: FLOP/s; source: where the figure comes from, in words."""

    flops: float
    source: str


def peak_flops(device: Any = None, *, size: int = 1024) -> Peak:
    """FLOP/s of one `jax.Device` (default: the first): from the vendor's table, else measured by a float32 matrix product."""
    device = jax.devices()[0] if device is None else device
    for name in sorted(PEAK_BF16, key=len, reverse=True):
        if name in device.device_kind:
            return Peak(PEAK_BF16[name], f"{device.device_kind}, bfloat16, vendor's figure")
    return Peak(_measure(device, size), f"{device.device_kind}, float32 [{size},{size}] product, measured")


def _measure(device: Any, size: int) -> float:
    x = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
