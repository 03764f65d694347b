"""Routed experts of a decoding batch on this machine: every form of few_token_experts beside expert_mlp.

    python experiments/bench/experts_few.py                                     # Kimi Linear's experts, 1 to 1024 tokens
    python experiments/bench/experts_few.py --experts 112 --latent 3584 --width 3072 --k 2    # an eighth of Kimi K3's, by 8 devices
    python experiments/bench/experts_few.py --experts 8 --latent 64 --width 32 --k 2 --tokens 4 64 --repeats 3     # on a CPU

Milliseconds are medians of --repeats queues of up to 50 calls or 50 ms. "floor" is the time to read the matrices of the experts that the
tokens chose (random routing) once at --bandwidth. The form that few_token_form names is marked *.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from attention import milliseconds

from moejax.ops.experts import expert_mlp
from moejax.ops.experts_few import FORMS, few_token_experts, few_token_form


@dataclass(frozen=True)
class Study:
    """Sizes of the layer and of the batches."""

    experts: int = 256
    latent: int = 2304
    width: int = 1024
    k: int = 8
    tokens: tuple[int, ...] = (1, 4, 8, 16, 64, 128, 256, 1024)
    most_gathered: int = 64
    """Tokens up to which "gather" is timed."""
    bandwidth: float = 4.8
    """TB/s of this card's memory."""
    repeats: int = 5


def main(study: Study) -> dict[tuple[str, int], float]:
    """Print the table; -> milliseconds by (form, tokens)."""
    s, device = study, jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {device.client.platform_version.splitlines()[0]}")
    print(f"E={s.experts} L={s.latent} F={s.width} k={s.k} bfloat16, milliseconds, median of {s.repeats}")
    print(f"{'tokens':>7}{'expert_mlp':>12}" + "".join(f"{name:>10}" for name in FORMS) + f"{'floor':>10}")
    shapes = [(s.experts, s.latent, s.width), (s.experts, s.latent, s.width), (s.experts, s.width, s.latent)]
    keys = jax.random.split(jax.random.key(0), 3)
    matrices = [shape[1] ** -0.5 * jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]
    calls = {"expert_mlp": jax.jit(expert_mlp)}
    calls |= {name: jax.jit(lambda *a, name=name: few_token_experts(*a, form=name)) for name in FORMS}
    table, rng = {}, np.random.default_rng(0)
    for N in s.tokens:
        chosen = np.stack([rng.permutation(s.experts)[: s.k] for _ in range(N)])
        x = jnp.asarray(rng.normal(size=(N, s.latent)), jnp.bfloat16)
        arguments = (x, jnp.asarray(chosen, jnp.int32), jnp.full((N, s.k), 1 / s.k, jnp.float32), *matrices)
        best, line = few_token_form(N, s.k, s.experts, expert_flops=6 * s.latent * s.width).name, f"{N:>7}"
        for name, call in calls.items():
            cell = "-"
            if name != "gather" or s.most_gathered >= N:
                table[name, N] = milliseconds(call, arguments, s.repeats)
                cell = f"{table[name, N]:.3f}" + ("*" if name == best else "")
            line += f"{cell:>{12 if name == 'expert_mlp' else 10}}"
        floor = len(np.unique(chosen)) * 6 * s.latent * s.width / s.bandwidth / 1e9
        print(line + f"{floor:>10.3f}", flush=True)
    return table


if __name__ == "__main__":
    main(tyro.cli(Study))
