"""Routed experts over a mesh axis: the transports of the exchange, checked against one device and timed, forward and backward.

    python -m experiments.bench.expert_exchange                                 # all devices of this machine
    python -m experiments.bench.expert_exchange --tokens 512 --experts 16 --latent 128 --width 64 --dtype float32      # a CPU

Even routing spreads tokens over all experts; skewed routing sends three quarters of all choices to the first eighth of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moejax.ops import expert_mlp
from moejax.parallel import MeshConfig, exchange, expert_parallel_mlp, make_mesh


@dataclasses.dataclass(frozen=True)
class Study:
    """Sizes: tokens a device, experts in all, experts a token."""

    tokens: int = 16384
    experts: int = 64
    chosen: int = 8
    latent: int = 1024
    width: int = 512
    dtype: str = "bfloat16"
    repeats: int = 10
    transports: tuple[str, ...] = ()
    """Of "ragged", "padded", "gather"; none given: all that the platform has."""
    pieces: tuple[int, ...] = ()
    """Pieces that "ragged" cuts a shard's rows into on CUDA; none given: what the library takes."""


def routing(study: Study, tokens: int, skewed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(experts [N,k] all different in a row, weights [N,k])."""
    rng = np.random.default_rng(0)
    score = rng.random((tokens, study.experts))
    if skewed:
        score[:, : study.experts // 8] += rng.random((tokens, 1)) < 0.75
    chosen = np.argsort(-score, 1)[:, : study.chosen].astype(np.int32)
    return chosen, rng.dirichlet(np.ones(study.chosen), tokens).astype(np.float32)


def arguments(study: Study, devices: int, skewed: bool) -> tuple[Any, ...]:
    tokens = study.tokens * devices
    rng, dtype = np.random.default_rng(1), jnp.dtype(study.dtype)
    draw = lambda *shape, scale=1.0: jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)
    L, F, E = study.latent, study.width, study.experts
    matrices = (draw(E, L, F, scale=L**-0.5), draw(E, L, F, scale=L**-0.5), draw(E, F, L, scale=F**-0.5))
    return (draw(tokens, L), *routing(study, tokens, skewed), *matrices)


def value_and_gradients(function):
    def loss(x, weights, matrices, experts):
        y = function(x, experts, weights, *matrices)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    def run(x, experts, weights, *matrices):
        (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weights, matrices, experts)
        return y, grads

    return jax.jit(run)


def sharded(mesh, transport: str):
    spec = PartitionSpec("expert")
    call = functools.partial(expert_parallel_mlp, axis="expert", transport=transport)
    return value_and_gradients(jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 6, out_specs=spec))


def difference(got: Any, wanted: Any) -> float:
    """Largest difference of any leaf over its largest entry."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    errors = [np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max() for a, b in pairs]
    return float(max(errors))


def median_ms(function, given, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*given))
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description="The transports of the expert exchange.")
    for field in dataclasses.fields(Study):
        several, kind = isinstance(field.default, tuple), int if field.name == "pieces" else type(field.default)
        parser.add_argument(f"--{field.name}", default=field.default, type=str if kind is tuple else kind, nargs="*" if several else None)
    study = Study(**vars(parser.parse_args()))
    devices = jax.device_count()
    mesh = make_mesh(MeshConfig(expert=devices))
    placed = NamedSharding(mesh, PartitionSpec("expert"))
    every = ("padded", "gather") if jax.default_backend() == "cpu" else ("ragged", "padded", "gather")
    sizes = f"{study.tokens} tokens a device, {study.chosen} of {study.experts} experts, L {study.latent}, F {study.width}, {study.dtype}"
    print(f"{devices} x {jax.devices()[0].device_kind}, jax {jax.__version__}; {sizes}")
    print(f"{'routing':9}{'transport':12}{'ms, value and gradients':>24}{'against one device':>20}")
    for skewed in (False, True):
        given = arguments(study, devices, skewed)
        wanted = jax.tree.map(lambda x: np.asarray(x, np.float32), value_and_gradients(expert_mlp)(*given))
        spread = jax.device_put(given, placed)
        for transport in study.transports or every:
            for pieces in (study.pieces if transport == "ragged" else ()) or (exchange.UPDATES["cuda"],):
                exchange.UPDATES["cuda"] = pieces
                function = sharded(mesh, transport)
                error = difference(function(*spread), wanted)
                ms = median_ms(function, spread, study.repeats)
                label = f"{transport}/{pieces}" if study.pieces and transport == "ragged" else transport
                print(f"{'skewed' if skewed else 'even':9}{label:12}{ms:24.1f}{error:20.1e}", flush=True)


if __name__ == "__main__":
    main()
