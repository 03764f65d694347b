"""Every balancing rule on one skewed synthetic router: how fast the load becomes even, and how even it stays.

Router: sigmoid scores of logits = popularity of the expert + a few directions that tokens share + noise, fresh tokens at
each step; 896 experts, 16 a token, 8192 tokens a step by default. Reported: MaxVio (max / mean - 1) and CV (standard
deviation / mean) of the load of the step that follows 0, 1, 2, 10 and 100 updates, and the mean CV of the last tenth of the
steps over its floor. The floor is what sampling alone leaves: the row "even router", measured on logits of noise only, whose CV
is sqrt(E / (tokens k)) up to the factor sqrt(1 - k / E) for drawing k different experts.

`aux_loss` moves no bias; it needs a router that is trained. Here that is one logit an expert, added to the popularity and
trained by Adam on the auxiliary loss alone: no language-model loss pulls against it, so it stands better here than in a run.

    python -m experiments.balance [--tokens 8192] [--experts 896] [--k 16] [--updates 100] [--seed 0] [--out runs/balance]
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.progress import track

from moejax.ops import BalanceStrength, aux_loss, load_metrics, route, router_statistics, updated_bias

EVEN = "even router (floor)"
RUNS = {
    "quantile": ("quantile", {}),
    "quantile, ema 0.9": ("quantile", {"ema": 0.9}),
    "quantile_exact": ("quantile_exact", {}),
    "sign, step 1e-3": ("sign", {}),
    "sign, step 1e-2": ("sign", {"step": 1e-2}),
    "load_quantile, step 1e-3": ("load_quantile", {}),
    "load_quantile, step 1e-2": ("load_quantile", {"step": 1e-2}),
    "median_band, step 0.1": ("median_band", {}),
    "aux_loss, Adam 3e-2": ("aux_loss", {}),
    "none": ("none", {}),
    EVEN: ("none", {}),
}
AUX_RATE = 3e-2
MARKS = (0, 1, 2, 10, 100)


@dataclass(frozen=True)
class Study:
    """Sizes of the study."""

    tokens: int = 8192
    experts: int = 896
    k: int = 16
    updates: int = 100
    seed: int = 0
    out: Path | None = None
    """Folder for balance.png, balance.md and balance.json (made; the picture needs matplotlib). None: print only."""

    def __post_init__(self) -> None:
        if self.updates < 1 or min(self.tokens, self.experts, self.k) < 1:
            raise ValueError(f"{self}: updates, tokens, experts and k must be at least 1.")
        if self.k >= self.experts:
            raise ValueError(f"k is {self.k} of {self.experts} experts: every token goes to all of them, and no rule has work.")

    @property
    def formula_floor(self) -> float:
        """CV of a Poisson count whose mean is tokens k / E."""
        return (self.experts / (self.tokens * self.k)) ** 0.5


def fresh_logits(study: Study, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[tokens, experts] twice: popularity with standard deviation 1, 8 shared directions, noise; and the noise alone.

    Popularity and directions are fixed."""
    fixed = jax.random.split(jax.random.key(study.seed), 2)
    popularity = jax.random.normal(fixed[0], (study.experts,))
    directions = jax.random.normal(fixed[1], (8, study.experts)) / 8**0.5
    topic, noise = jax.random.split(key)
    shared = jax.random.normal(topic, (study.tokens, 8)) @ directions
    noise = 0.7 * jax.random.normal(noise, (study.tokens, study.experts)) - 2.0
    return popularity + 0.5 * shared + noise, noise


def make_step(study: Study, rule: str):
    """step((bias, moments), logits, strength) -> (new bias, moments), (MaxVio, CV, dead experts) before the update.

    Under `aux_loss` the "bias" is the trained logit of each expert."""
    adam = optax.adam(AUX_RATE)

    @jax.jit
    def step(carry, logits, strength):
        bias, moments = carry
        offset, bias = (bias, jnp.zeros_like(bias)) if rule == "aux_loss" else (jnp.zeros_like(bias), bias)
        routing = route(logits + offset, bias, study.k)
        statistics = router_statistics(rule, routing, logits + offset, bias, study.k)
        m = load_metrics(statistics["load"], statistics["tokens"], study.k)
        measured = jnp.stack([m.max_violation, m.load_cv, m.dead_experts.astype(jnp.float32)])
        if rule == "aux_loss":
            grad = jax.grad(lambda offset: aux_loss(logits + offset, routing.experts))(offset)
            updates, moments = adam.update(grad, moments)
            return (optax.apply_updates(offset, updates), moments), measured
        return (updated_bias(rule, statistics, bias, study.k, strength), moments), measured

    zeros = jnp.zeros(study.experts)
    return step, (zeros, adam.init(zeros))


def run(study: Study) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """All rules on the same fresh tokens: measured [updates + 1, 3] and median milliseconds of a step."""
    steps = {rule: make_step(study, rule) for rule in {rule for rule, _ in RUNS.values()}}
    strengths = {name: BalanceStrength.create(**values) for name, (_, values) in RUNS.items()}
    carries = {name: steps[rule][1] for name, (rule, _) in RUNS.items()}
    rows, seconds = {name: [] for name in RUNS}, {name: [] for name in RUNS}
    draw = jax.jit(lambda key: fresh_logits(study, key))
    for key in track(jax.random.split(jax.random.key(study.seed + 1), study.updates + 1), description="updates"):
        logits, even = jax.block_until_ready(draw(key))
        for name, (rule, _) in RUNS.items():
            start = time.perf_counter()
            step = steps[rule][0]
            carries[name], row = jax.block_until_ready(step(carries[name], even if name == EVEN else logits, strengths[name]))
            seconds[name].append(time.perf_counter() - start)
            rows[name].append(np.asarray(row))
    return {n: np.stack(r) for n, r in rows.items()}, {n: 1e3 * float(np.median(s)) for n, s in seconds.items()}


def settled(rows: np.ndarray) -> np.ndarray:
    """[3]: the means of the last tenth of the steps, at least one."""
    return rows[-max(1, len(rows) // 10) :].mean(axis=0)


def table(study: Study, results: dict[str, np.ndarray], milliseconds: dict[str, float]) -> list[str]:
    """Lines of a Markdown table."""
    marks = [n for n in MARKS if n <= study.updates]
    heads = ["rule, MaxVio / CV after updates:", *map(str, marks), "CV / floor at the end", "dead at the end", "ms a step"]
    floor = settled(results[EVEN])[1]
    lines = []
    for name, rows in results.items():
        cells = [f"{rows[n, 0]:.2f} / {rows[n, 1]:.3f}" for n in marks]
        lines.append([name, *cells, f"{settled(rows)[1] / floor:.2f}", str(int(rows[-1, 2])), f"{milliseconds[name]:.0f}"])
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    join = lambda line: "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
    return [join(heads), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(join, lines)]


def picture(study: Study, out: Path, results: dict[str, np.ndarray]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for column, (panel, label) in enumerate(zip(axes, ("MaxVio (max / mean - 1)", "load CV"), strict=True)):
        for name, rows in results.items():
            if name == EVEN:
                panel.axhline(rows[:, column].mean(), color="black", linestyle=":", label="sampling floor")
            else:
                panel.plot(rows[:, column], label=name, linewidth=1)
        panel.set(xlabel="updates", ylabel=label, yscale="log")
    axes[1].legend(fontsize=7)
    figure.suptitle(f"{study.experts} experts, top {study.k}, {study.tokens} fresh tokens a step")
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main(study: Study) -> dict[str, np.ndarray]:
    results, milliseconds = run(study)
    even = results[EVEN].mean(axis=0)
    lines = [
        f"{study.experts} experts, top {study.k}, {study.tokens} fresh tokens a step, seed {study.seed}; jax {jax.__version__} on "
        f"{jax.default_backend()}. Sampling floor: CV {even[1]:.4f} measured, {study.formula_floor:.4f} = sqrt(E / (tokens k)); "
        f"MaxVio {even[0]:.3f}.",
        "",
        *table(study, results, milliseconds),
    ]
    print("\n".join(lines))
    if study.out:
        study.out.mkdir(parents=True, exist_ok=True)
        (study.out / "balance.md").write_text("\n".join(lines) + "\n")
        (study.out / "balance.json").write_text(json.dumps(record(study, results)) + "\n")
        picture(study, study.out / "balance.png", results)
        print(f"\nFiles: {study.out}/ (balance.png, balance.md, balance.json)")
    return results


def record(study: Study, results: dict[str, np.ndarray]) -> dict[str, Any]:
    """The curves as plain JSON values."""
    sizes = {name: getattr(study, name) for name in ("tokens", "experts", "k", "updates", "seed")}
    curves = {
        name: {label: rows[:, i].tolist() for i, label in enumerate(("max_violation", "load_cv", "dead_experts"))}
        for name, rows in results.items()
    }
    return {"study": sizes, "jax": jax.__version__, "cv_floor_formula": study.formula_floor, "rules": curves}


if __name__ == "__main__":
    main(tyro.cli(Study))
