"""Every balancing rule on one skewed synthetic router: how fast the load becomes even, and how even it stays.

Router: sigmoid scores of logits = popularity of the expert + a few directions that tokens share + noise, fresh tokens at
each step; 896 experts, 16 a token, 8192 tokens a step by default. Reported: MaxVio (max / mean - 1) and CV (standard
deviation / mean) of the load of the step that follows 0, 1, 2, 10 and 100 updates, beside sqrt(E / (tokens k)), the CV that
sampling alone leaves. `aux_loss` has no router weights to train here and `none` changes nothing: `none` stands for both.

    python experiments/bench/balance_rules.py [--tokens 8192] [--experts 896] [--k 16] [--updates 100] [--seed 0]
        [--out balance.png]
"""

import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.progress import track

from moejax.ops import BalanceStrength, load_metrics, route, router_statistics, updated_bias

RUNS = {
    "quantile": ("quantile", {}),
    "quantile, ema 0.9": ("quantile", {"ema": 0.9}),
    "quantile_exact": ("quantile_exact", {}),
    "sign, step 1e-3": ("sign", {}),
    "sign, step 1e-2": ("sign", {"step": 1e-2}),
    "load_quantile, step 1e-3": ("load_quantile", {}),
    "median_band, step 0.1": ("median_band", {}),
    "none": ("none", {}),
}


@dataclass(frozen=True)
class Study:
    """Sizes of the study."""

    tokens: int = 8192
    experts: int = 896
    k: int = 16
    updates: int = 100
    seed: int = 0
    out: Path | None = None
    """Write a picture of CV by update here (PNG; needs matplotlib)."""


def fresh_logits(study: Study, key: jax.Array) -> jax.Array:
    """[tokens, experts]: popularity with standard deviation 1, 8 shared directions, noise. Popularity and directions
    are fixed."""
    fixed = jax.random.split(jax.random.key(study.seed), 2)
    popularity = jax.random.normal(fixed[0], (study.experts,))
    directions = jax.random.normal(fixed[1], (8, study.experts)) / 8**0.5
    topic, noise = jax.random.split(key)
    shared = jax.random.normal(topic, (study.tokens, 8)) @ directions
    return popularity + 0.5 * shared + 0.7 * jax.random.normal(noise, (study.tokens, study.experts)) - 2.0


def make_step(study: Study, rule: str):
    """step(bias, logits, strength) -> new bias, (MaxVio, CV, dead experts) of the load before the update."""

    @jax.jit
    def step(bias, logits, strength):
        statistics = router_statistics(rule, route(logits, bias, study.k), logits, bias, study.k)
        m = load_metrics(statistics["load"], statistics["tokens"], study.k)
        measured = jnp.stack([m.max_violation, m.load_cv, m.dead_experts.astype(jnp.float32)])
        return updated_bias(rule, statistics, bias, study.k, strength), measured

    return step


def run(study: Study) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """All rules on the same fresh tokens: measured [updates + 1, 3] and median milliseconds of a step."""
    steps = {rule: make_step(study, rule) for rule in {rule for rule, _ in RUNS.values()}}
    strengths = {name: BalanceStrength.create(**values) for name, (_, values) in RUNS.items()}
    biases = dict.fromkeys(RUNS, jnp.zeros(study.experts))
    rows, seconds = {name: [] for name in RUNS}, {name: [] for name in RUNS}
    draw = jax.jit(lambda key: fresh_logits(study, key))
    for key in track(jax.random.split(jax.random.key(study.seed + 1), study.updates + 1), description="updates"):
        logits = draw(key)
        for name, (rule, _) in RUNS.items():
            start = time.perf_counter()
            biases[name], row = jax.block_until_ready(steps[rule](biases[name], logits, strengths[name]))
            seconds[name].append(time.perf_counter() - start)
            rows[name].append(np.asarray(row))
    return {n: np.stack(r) for n, r in rows.items()}, {n: 1e3 * float(np.median(s)) for n, s in seconds.items()}


def picture(study: Study, out: Path, results: dict[str, np.ndarray], floor: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, rows in results.items():
        axes.plot(rows[:, 1], label=name, linewidth=1)
    axes.axhline(floor, color="black", linestyle=":", label="sampling floor")
    axes.set(
        xlabel="updates",
        ylabel="load CV",
        yscale="log",
        title=f"{study.experts} experts, top {study.k}, {study.tokens} tokens a step",
    )
    axes.legend(fontsize=7)
    figure.savefig(out, dpi=150)


def main(study: Study) -> dict[str, np.ndarray]:
    if study.updates < 0 or min(study.tokens, study.experts, study.k) < 1:
        raise ValueError(f"{study}: updates must be >= 0 and tokens, experts and k >= 1.")
    floor = (study.experts / (study.tokens * study.k)) ** 0.5
    results, milliseconds = run(study)
    marks = [n for n in (0, 1, 2, 10, 100) if n <= study.updates]
    print(
        f"{study.experts} experts, top {study.k}, {study.tokens} fresh tokens a step, seed {study.seed}; "
        f"jax {jax.__version__} on "
        f"{jax.default_backend()}; CV floor {floor:.3f}. Load after so many updates: MaxVio / CV"
    )
    print(f"{'rule':26}" + "".join(f"{n:>16}" for n in marks) + f"{'dead at end':>13}{'ms a step':>11}")
    for name, rows in results.items():
        cells = "".join(f"{rows[n, 0]:>8.2f} / {rows[n, 1]:5.3f}" for n in marks)
        print(f"{name:26}{cells}{int(rows[-1, 2]):>13}{milliseconds[name]:>11.0f}")
    if study.out:
        picture(study, study.out, results, floor)
        print(f"picture: {study.out}")
    return results


if __name__ == "__main__":
    main(tyro.cli(Study))
