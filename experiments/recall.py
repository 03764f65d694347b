"""Recall and state tracking: what the delta rule, the gate of KDA and its initial values are for.

    python -m experiments.recall --task stack                              # kda, gdn, no_delta, mla; 2,000 steps, 3 seeds: for a GPU
    python -m experiments.recall --task mqar --mixers kda kda_zero_bias    # does the initial gate bias decide whether recall is learned?
    python -m experiments.recall --task recall --mixers kda,mla mla_rotary --eval-lengths 256 1024 8192
    python -m experiments.recall_suite --out F                             # all that on one H200

The setting is that of Kimi Linear's synthetic tests (arXiv 2510.26692 section 5.1): 2 layers, 2 heads of 128 channels, fresh rows at
every step. All seeds of a model train in one program. An answer counts at the positions that ask for one; `chance` is guessing a
value, `copy` answers with the value that came last. Writes recall.jsonl (every block) and results.json into --out, prints a table.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from experiments.recall_models import MIXERS, Shape
from experiments.recall_train import score, train
from moejax.data.synthetic_tasks import MQAR, ZOOLOGY_MIX, KeyedRecall, Palindrome, Stack, SyntheticTask
from moejax.train import OptimizerConfig

EVAL_SEED = 1_000_003  # the eval split has streams of its own; all models answer the same rows
SETTINGS: dict[str, tuple[type, dict[str, int]]] = {
    "stack": (Stack, {"length": 255, "stacks": 64, "elements": 62}),
    "mqar": (MQAR, {"length": 256, "vocab_size": 8192, "pairs": 64}),
    "palindrome": (Palindrome, {"length": 256, "vocab_size": 128}),
    "recall": (KeyedRecall, {"length": 256, "vocab_size": 512, "pairs": 16}),
}
"""Each task, and what it reads with its default."""


@dataclasses.dataclass(frozen=True)
class Study:
    """Train every mixer on a task and score it."""

    task: Literal["stack", "mqar", "palindrome", "recall"] = "stack"
    mixers: tuple[str, ...] = ("kda", "gdn", "no_delta", "mla")
    """One name for all layers, or one for each, with commas between."""
    steps: int = 2000
    batch: int = 64
    """Rows a step, of each seed."""
    seeds: int = 3
    together: int | None = None
    """Seeds in one program (vmap), a divisor of --seeds; None: all. With KDA's GPU kernels 1 is fastest: weights that differ between the
    seeds become a loop over launches there. The program is compiled once in any case."""
    learning_rate: float = 1e-3
    block: int = 100
    """Steps a call of the device; divides --steps."""
    layers: int = 2
    width: int = 256
    heads: int = 2
    head_dim: int = 128
    tied: bool | None = None
    """Output matrix = embedding. None: for mqar, as in Zoology: with output rows of their own 4,096 values are not learned in 2,000
    steps, for a row is learned only once recall finds its value, and recall only once rows are right."""
    length: int | None = None
    """Tokens a row; None: 255 for stack, 256 for the others."""
    vocab_size: int | None = None
    """Of mqar (8192), palindrome (128) and recall (512)."""
    stacks: int | None = None
    """Of stack: 64."""
    elements: int | None = None
    """Of stack: 62."""
    pairs: int | None = None
    """Of mqar (64; trained on Zoology's mixture of difficulties when all sizes are the defaults) and recall (16)."""
    eval_rows: int = 64
    """Rows a call of the scoring; fewer when they are longer than 1,024 tokens."""
    eval_calls: int = 8
    eval_lengths: tuple[int, ...] = ()
    """Of recall: score at these lengths too, rotary models with positions as they are and interpolated."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations. KDA's GPU kernels need bfloat16."""
    out: Path | None = None
    """Folder of recall.jsonl and results.json. None: print only."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "seeds", "block", "layers", "eval_rows", "eval_calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1.")
        if self.steps % self.block:
            raise ValueError(f"--steps {self.steps} is no multiple of --block {self.block}.")
        if not self.mixers:
            raise ValueError(f"--mixers is empty; there are {', '.join(MIXERS)}.")
        if self.eval_lengths and self.task != "recall":
            raise ValueError(f"--eval-lengths is of --task recall; {self.task} grows harder with its length, not only longer.")
        if self.together is not None and (self.together < 1 or self.seeds % self.together):
            raise ValueError(f"--together {self.together} does not divide --seeds {self.seeds}.")
        for name in ("vocab_size", "stacks", "elements", "pairs"):
            if getattr(self, name) is not None and name not in SETTINGS[self.task][1]:
                raise ValueError(f"--{name.replace('_', '-')} is not read by --task {self.task}; leave it out.")
        task = self.make_task(0)
        for mixers in self.mixers:
            self.shape(mixers, task)  # raises for unknown names

    def make_task(self, seed: int, length: int | None = None) -> SyntheticTask:
        kind, defaults = SETTINGS[self.task]
        chosen = {name: default if getattr(self, name) is None else getattr(self, name) for name, default in defaults.items()}
        mixed = {"mixed": ZOOLOGY_MIX} if self.task == "mqar" and chosen == defaults else {}
        return kind(**chosen | mixed | {"length": length or chosen["length"], "seed": seed})

    def shape(self, mixers: str, task: SyntheticTask, rotary_scale: float = 1.0) -> Shape:
        names = tuple(mixers.split(","))
        if len(names) not in (1, self.layers):
            raise ValueError(f"--mixers {mixers}: {len(names)} names for {self.layers} layers; give one, or one a layer.")
        names = names * self.layers if len(names) == 1 else names
        tied = self.task == "mqar" if self.tied is None else self.tied
        return Shape(task.vocab_size, names, self.width, self.heads, self.head_dim, self.dtype, tied, rotary_scale)

    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(learning_rate=self.learning_rate, total_steps=self.steps, warmup_fraction=0.05)


def run_one(study: Study, mixers: str, record: Any) -> dict[str, Any]:
    """Train and score one kind of model. record: called with every event, a dict of plain values."""
    start = time.perf_counter()
    tasks = [study.make_task(seed) for seed in range(study.seeds)]

    def on_block(seed: int, step: int, means: dict[str, list[float]]) -> None:
        seconds = round(time.perf_counter() - start, 2)
        record({"event": "block", "task": study.task, "mixers": mixers, "seed": seed, "step": step, **means, "seconds": seconds})

    options: dict[str, Any] = dict(batch=study.batch, block=study.block, together=study.together, on_block=on_block)
    trained = train(study.shape(mixers, tasks[0]), study.optimizer(), tasks, **options)
    curve = trained.accuracy.reshape(-1, study.block, study.seeds).mean(axis=(1, 2)).tolist()
    scores = []
    for length, scale in evaluations(study, mixers):
        scores.append(evaluate(study, mixers, trained.params, length, scale))
        record({"event": "score", "task": study.task, "mixers": mixers, **scores[-1]})
    return {
        **identity(study, mixers),
        "status": "done",
        "accuracy": scores[0]["accuracy"],
        "mean": float(np.mean(scores[0]["accuracy"])),
        "chance": tasks[0].chance(),
        "copy": scores[0]["copy"],
        "scores": scores,
        "curve": curve,
        "step_ms": None if trained.step_s is None else 1e3 * trained.step_s,
        "seconds": time.perf_counter() - start,
    }


def identity(study: Study, mixers: str) -> dict[str, Any]:
    """What a result belongs to."""
    names = ("task", "steps", "batch", "seeds", "learning_rate", "width", "head_dim", "dtype")
    task = study.make_task(0)
    tied = study.shape(mixers, task).tied
    return {"mixers": mixers, **{name: getattr(study, name) for name in names}, "tied": tied, "length": task.length}


def evaluations(study: Study, mixers: str) -> list[tuple[int, float]]:
    """(length, factor of position interpolation), the trained length first."""
    trained = study.make_task(0).length
    longer = [length for length in study.eval_lengths if length != trained]
    rotary = "mla_rotary" in mixers.split(",")
    return [(trained, 1.0), *((length, 1.0) for length in longer), *((length, length / trained) for length in longer if rotary)]


def evaluate(study: Study, mixers: str, params: Any, length: int, scale: float) -> dict[str, Any]:
    start = time.perf_counter()
    task = study.make_task(EVAL_SEED, length)
    rows = max(1, min(study.eval_rows, study.eval_rows * 1024 // length))
    scores = score(study.shape(mixers, task, scale), params, task, rows=rows, calls=study.eval_calls)
    return {
        "length": length,
        "rotary_scale": scale,
        "accuracy": [one.accuracy for one in scores],
        "rows_right": [one.rows_right for one in scores],
        "copy": scores[0].copy_last,
        "answers": scores[0].answers,
        "seconds": round(time.perf_counter() - start, 2),
    }


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table."""
    heads = ["task", "mixers", "T", "steps", "accuracy, mean", "each seed", "chance", "copy", "ms a step", "seconds"]
    lines = []
    for run in runs:
        first = [run["task"], run["mixers"], str(run["length"]), str(run["steps"])]
        if run["status"] != "done":
            lines.append([*first, run["status"] + ": " + run["reason"].strip().splitlines()[-1][:80], *[""] * 5])
            continue
        copy = "-" if run["copy"] is None else f"{run['copy']:.3f}"
        numbers = [f"{run['chance']:.4f}", copy, "-" if run["step_ms"] is None else f"{run['step_ms']:.1f}", f"{run['seconds']:.0f}"]
        lines.append([*first, f"{run['mean']:.4f}", _each(run["accuracy"]), *numbers])
        for other in run["scores"][1:]:
            note = "  scored at this length" + ("" if other["rotary_scale"] == 1 else f", positions / {other['rotary_scale']:g}")
            accuracy = other["accuracy"]
            lines.append(["", note, str(other["length"]), "", f"{np.mean(accuracy):.4f}", _each(accuracy), *[""] * 4])
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    join = lambda line: "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
    return [join(heads), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(join, lines)]


def _each(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


def write_results(out: Path, runs: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    document = {"settings": settings, "runs": runs}
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n")


def main(study: Study) -> list[dict[str, Any]]:
    if study.out:
        study.out.mkdir(parents=True, exist_ok=True)
        (study.out / "recall.jsonl").write_text("")

    def record(event: dict[str, Any]) -> None:
        line = json.dumps(event)
        if study.out:
            with (study.out / "recall.jsonl").open("a") as file:
                file.write(line + "\n")
        if event["event"] == "block":
            course = f"loss {_each(event['loss'])}  accuracy {_each(event['accuracy'])}"
            print(f"{event['mixers']:14} seed {event['seed']}  step {event['step']:6}  {course}", flush=True)

    chosen = {name: str(value) for name, value in dataclasses.asdict(study).items()}
    settings = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "study": chosen}
    runs = []
    for mixers in study.mixers:
        runs.append(run_one(study, mixers, record))
        if study.out:
            write_results(study.out, runs, settings)
    print("\n".join(table(runs)))
    return runs


if __name__ == "__main__":
    main(tyro.cli(Study))
