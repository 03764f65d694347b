"""Published golden checkpoints on an accelerator: logits, MXFP4 bits, packed experts. Prints a short table.

    JAX_DEFAULT_MATMUL_PRECISION=highest python -m experiments.bench.gpu_golden

float32 products are asked for in full precision: TF32, a GPU's default, has 10 bits of mantissa.
"""

from __future__ import annotations

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from moejax import HybridLM, hub
from moejax.ops import mxfp4_decode, mxfp4_encode

GOLDEN = pathlib.Path(__file__).parents[2] / "tests" / "golden"


def logits_error(name: str, **options) -> tuple[float, float]:
    """Largest and root mean square difference from the stored logits."""
    checkpoint = hub.load(GOLDEN / name, **options)
    model = HybridLM(checkpoint.config.replace(dtype="float32"))
    stored = np.load(GOLDEN / name / "forward.npz")
    variables = {"params": checkpoint.params, "router_state": checkpoint.router_state}
    got = jax.jit(model.apply)(variables, jnp.asarray(stored["ids"], jnp.int32))
    error = np.asarray(got, np.float64) - stored["out_logits"]
    return float(np.abs(error).max()), float(np.sqrt((error**2).mean()))


def mxfp4_bits() -> tuple[int, int]:
    """(values, how many of them differ from NumPy's) for every code at every scale byte but NaN's, and for random weights encoded."""
    codes = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 16)).reshape(1, 256, 16).repeat(255, 0)
    scales = np.arange(255, dtype=np.uint8)[:, None, None].repeat(256, 1)
    different = total = 0
    for dtype in ("float32", "bfloat16"):
        device = np.asarray(jax.jit(lambda c, s, dtype=dtype: mxfp4_decode(c, s, dtype=dtype))(codes, scales))
        host = mxfp4_decode(codes, scales, dtype=dtype)
        total += host.size
        different += int((device.view(np.uint8) != host.view(np.uint8)).reshape(*host.shape, -1).any(-1).sum())
    weights = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32) * np.float32(2.0) ** np.arange(-20, 12).repeat(32)
    for device, host in zip(jax.jit(mxfp4_encode)(weights), mxfp4_encode(weights), strict=True):
        total += host.size
        different += int((np.asarray(device) != host).sum())
    return total, different


def main() -> None:
    device, precision = jax.devices()[0], os.environ.get("JAX_DEFAULT_MATMUL_PRECISION", "default")
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}, precision {precision}")
    print(f"{'checkpoint':32}{'logits max':>12}{'rms':>12}   limits 5e-4, 5e-5")
    rows = {
        "k3_tiny": ("k3_tiny", {"param_dtype": "float32"}),
        "k3_tiny, experts kept packed": ("k3_tiny", {"param_dtype": "float32", "keep_packed": True}),
        "kimi_linear_tiny": ("kimi_linear_tiny", {}),
    }
    worst = 0.0
    for label, (name, options) in rows.items():
        most, rms = logits_error(name, **options)
        worst = max(worst, most / 5e-4, rms / 5e-5)
        print(f"{label:32}{most:12.2e}{rms:12.2e}")
    total, different = mxfp4_bits()
    print(f"MXFP4: {different} of {total:,} values differ from NumPy's bits")
    if worst > 1 or different:
        raise SystemExit("outside the limits")


if __name__ == "__main__":
    main()
