"""Muon against AdamW on the main job: the same model, text, tokens and learning rates, several seeds.

    python -m experiments.optimizers                          # tiny preset, 200 steps, 3 seeds each: about 25 minutes on 2 CPU cores
    python -m experiments.optimizers --steps 20 --seeds 1     # a look

Prints a table of held-out bits per byte, and writes optimizers.json and optimizers.png into --out.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from moejax import HybridLM, presets
from moejax.config import ModelConfig
from moejax.data import ByteTokenizer, Corpus, CorpusSource, DataStream, Mixture, PackedBatches, TokenStream, standard_library
from moejax.modules.model import compute_dtype
from moejax.train import init_state, make_eval_step, make_train_step
from moejax.train.optimizers import OptimizerConfig, make_optimizer
from moejax.train.run_config import configure_compile_cache

SMOOTH = 10  # steps whose mean is the training loss shown


@dataclasses.dataclass(frozen=True)
class Study:
    """Train with each optimizer and each seed, and score held-out text."""

    preset: str = "tiny"
    """Model by name."""
    kinds: tuple[str, ...] = ("adamw", "muon")
    learning_rates: tuple[float, ...] = (3e-3,)
    """Peaks that each optimizer is tried with."""
    steps: int = 200
    seeds: int = 3
    batch: int = 8
    context: int = 256
    warmup_fraction: float = 0.05
    heldout_rows: int = 128
    out: str = "runs/optimizers"
    """Folder of the results."""
    compile_cache: str = "auto"
    """As of experiments.pretrain: the seeds of one optimizer share their programs."""

    def __post_init__(self) -> None:
        for name in ("steps", "seeds", "batch", "heldout_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1.")
        if self.heldout_rows < self.batch:
            raise ValueError(f"--heldout-rows is {self.heldout_rows}; it must be at least --batch = {self.batch}.")
        for kind in self.kinds:
            for rate in self.learning_rates:
                self.optimizer(kind, rate)  # raises for what is unknown

    def optimizer(self, kind: str, learning_rate: float) -> OptimizerConfig:
        return OptimizerConfig(
            kind=kind,  # pyright: ignore[reportArgumentType]  (checked by OptimizerConfig)
            learning_rate=learning_rate,
            total_steps=self.steps,
            warmup_fraction=self.warmup_fraction,
        )


def main(study: Study) -> None:
    configure_compile_cache(study.compile_cache)
    console, corpus = Console(), standard_library()
    model = presets.get(study.preset)
    model = model.replace(dtype=str(compute_dtype(model)))
    records = []
    for kind in study.kinds:
        for rate in study.learning_rates:
            for record in train_seeds(study, model, corpus, study.optimizer(kind, rate)):
                records.append(record)
                console.print(
                    f"{kind} {rate:g} seed {record['seed']}: held out {record['heldout']:.4f} bits a byte, "
                    f"{record['step_ms']:.0f} ms a step, {record['skipped']} updates skipped"
                )
    folder = pathlib.Path(study.out)
    folder.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0]
    header = {"study": dataclasses.asdict(study), "device": device.device_kind, "jax": jax.__version__, "corpus": corpus.manifest.to_dict()}
    (folder / "optimizers.json").write_text(json.dumps(header | {"runs": records}) + "\n")
    console.print(table(records))
    draw(folder / "optimizers.png", records)


def train_seeds(study: Study, config: ModelConfig, corpus: Corpus, settings: OptimizerConfig):
    """Yield a record for each seed; the programs are compiled once."""
    model, optimizer = HybridLM(config), make_optimizer(settings)
    init = jax.jit(lambda key: init_state(model, optimizer, key))
    step = jax.jit(make_train_step(model, optimizer), donate_argnums=0)
    evaluate = jax.jit(make_eval_step(model))
    source = CorpusSource("files", corpus.train)
    for seed in range(study.seeds):
        state = init(jax.random.key(seed))
        mixture = Mixture([source])
        stream = DataStream(mixture, context=study.context, rows=study.batch, packing="concat_split", seed=seed)
        losses, skipped, times = [], 0, []
        for _ in range(study.steps):
            batch, _ = next(stream)
            started = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]) / np.log(2))
            skipped += int(metrics["skipped"])
            times.append(time.perf_counter() - started)
        yield {
            "kind": settings.kind,
            "learning_rate": settings.learning_rate,
            "seed": seed,
            "heldout": heldout(study, corpus, evaluate, state),
            "losses": losses,
            "skipped": skipped,
            "step_ms": 1e3 * float(np.median(times)),
        }


def heldout(study: Study, corpus: Corpus, evaluate: Any, state: Any) -> float:
    """Bits a target on the held-out rows of the main job."""
    rows = PackedBatches(TokenStream(corpus.heldout, ByteTokenizer()), context=study.context, batch_size=study.batch, seed=0)
    nats = tokens = 0.0
    for index in range(min(study.heldout_rows, rows.rows_per_epoch) // study.batch):
        result = evaluate(state, rows.batch(index))
        nats, tokens = nats + float(result["loss_sum"]), tokens + float(result["tokens"])
    return nats / tokens / np.log(2)


def table(records: list[dict[str, Any]]) -> Table:
    out = Table("optimizer", "peak rate", "held-out bits", "by seed", "ms a step", title="the same tokens, mean over seeds")
    for kind, rate in dict.fromkeys((r["kind"], r["learning_rate"]) for r in records):
        own = [r for r in records if (r["kind"], r["learning_rate"]) == (kind, rate)]
        values = [r["heldout"] for r in own]
        by_seed = " ".join(f"{value:.4f}" for value in values)
        out.add_row(kind, f"{rate:g}", f"{np.mean(values):.4f}", by_seed, f"{np.median([r['step_ms'] for r in own]):.0f}")
    return out


def draw(path: pathlib.Path, records: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, (kind, rate) in enumerate(dict.fromkeys((r["kind"], r["learning_rate"]) for r in records)):
        own = [r for r in records if (r["kind"], r["learning_rate"]) == (kind, rate)]
        width = min(SMOOTH, len(own[0]["losses"]))
        for r in own:
            smooth = np.convolve(r["losses"], np.ones(width) / width, mode="valid")
            label = f"{kind}, peak {rate:g}: {np.mean([o['heldout'] for o in own]):.3f} held out" if r is own[0] else None
            axes.plot(np.arange(width, len(r["losses"]) + 1), smooth, color=f"C{number}", linewidth=1, alpha=0.8, label=label)
    axes.set(xlabel="step", ylabel=f"bits a byte, mean of {width} steps", title="a line a seed")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Study))
