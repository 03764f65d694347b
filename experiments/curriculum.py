"""A context-length curriculum on a CPU: what each stage adds at the lengths it was trained on, and beyond them.

    python -m experiments.curriculum                     # the demo: 64 -> 512 -> 2K -> 8K tokens, K3's ratios, under 10 CPU minutes
    python -m experiments.curriculum --resume runs/...   # go on from the last switch
    python -m experiments.curriculum --preset k3 --plan  # 8K -> 64K -> 256K -> 1M: stages, rows, memory; trains nothing

A model of two layers (KDA, then MLA) learns to find facts among this Python's standard library: short recall
documents, haystacks as long as a row, and code. Before the first and after every stage it is asked for needles at all four lengths
(values and keys of a split of their own, in held-out code), and its loss on long held-out files is taken by position. What stands
after a stage is what stood before the next: at a seam only the data change. Needs tokenizers (pip install 'moejax[hub,plot]').
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import resource
import sys
import time
from typing import Any, Literal

import jax
import numpy as np
import tyro
from rich.table import Table

from experiments.curriculum_data import DemoData, Sizes
from experiments.curriculum_picture import draw
from moejax import presets
from moejax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moejax.data.stream import DataStream, check_fingerprint
from moejax.evals import make_predict, needle_grid, position_loss
from moejax.modules.model import HybridLM
from moejax.parallel.mesh import MeshConfig
from moejax.planning import Plan, Step, Topology, plan
from moejax.train import OptimizerConfig, adamw, init_state, make_eval_step, make_train_step
from moejax.train.checkpoint import Checkpointer
from moejax.train.checkpoint_write import CheckpointError
from moejax.train.compile_ahead import CompileAhead, abstract
from moejax.train.curriculum import Curriculum, Stage, demo, from_steps, k3
from moejax.train.display import Display
from moejax.train.run_config import write_json
from moejax.train.tracker import JsonLines

READ = ("tokens", "segment_ids", "targets", "loss_mask")  # of a batch; the step is compiled for these


@dataclasses.dataclass(frozen=True)
class CurriculumRun:
    """Train a tiny model through a curriculum of context lengths, or plan the one of K3."""

    preset: Literal["demo", "k3", "smoke"] = "demo"
    """demo: minutes on two CPU cores. k3: to --plan. smoke: a few steps of two stages, to see that it runs."""
    plan: bool = False
    """Print stages, steps, rows and memory; train nothing."""
    model: str = "small"
    """With --plan: the model by name (python -m moejax.presets)."""
    topology: str = "h200:64"
    """With --plan: the chips, as in experiments.plan."""
    mesh: MeshConfig = dataclasses.field(default_factory=lambda: MeshConfig(fsdp=2, expert=16, sequence=2))
    """With --plan: the devices along each axis."""
    seed: int = 0
    """Of the weights and the order of the data."""
    out: str = "runs"
    """Folder in which the run's folder is made."""
    resume: str | None = None
    """Run folder to go on with, from its newest checkpoint."""
    stop_after: int | None = None
    """End after this step, with a checkpoint."""

    def check(self) -> None:
        """ValueError for settings that exclude each other."""
        if self.preset == "k3" and not self.plan:
            raise ValueError("--preset k3 is 13 trillion tokens; it is planned here, not run: add --plan.")
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"--stop-after is {self.stop_after}; it must be at least 1.")
        if self.plan and (self.resume, self.stop_after) != (None, None):
            raise ValueError("--plan trains nothing; leave --resume and --stop-after out.")


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a preset trains."""

    curriculum: Curriculum
    sizes: Sizes
    learning_rate: float = 5e-3


def setup(preset: str) -> Setup:
    if preset == "k3":
        return Setup(k3(), Sizes())
    if preset == "demo":
        return Setup(demo(shortest=64, total_steps=320, batch_tokens=8192), Sizes())
    mixture = {"recall": 0.4, "needles": 0.4, "code": 0.2}
    two = from_steps((64, 128), (mixture, mixture), total_steps=4, batch_tokens=256, shares=(1, 1))
    return Setup(two, Sizes(code_files=30, documents=200, rows_per_depth={64: 2, 128: 2}, long_rows=1))


def demo_model(vocab_size: int) -> ModelConfig:
    """One KDA layer and one of gated MLA, dense: a step of 8192 tokens takes 0.3 CPU seconds. (Experts double that.)"""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden=64,
        layers=2,
        pattern="KM",
        dense_width=128,
        dense_layers=2,
        residual="plain",
        remat="none",
        kda=KDAConfig(heads=2, key_dim=32, value_dim=32),
        mla=MLAConfig(heads=2, nope_dim=24, rope_dim=8, value_dim=32, kv_latent=32),
        moe=MoEConfig(experts=2, experts_per_token=1, expert_width=32),  # of no layer
    )


class Training:
    """One run: model, data, checkpoints, records. `run` goes through the stages."""

    def __init__(self, config: CurriculumRun, folder: pathlib.Path, display: Display):
        self.config, self.folder, self.display = config, folder, display
        self.setup = setup(config.preset)
        self.curriculum = self.setup.curriculum
        with display.phase("reading the text, training the tokenizer"):
            self.data = DemoData(self.curriculum, self.setup.sizes, folder, seed=config.seed)
        self.model = HybridLM(demo_model(self.data.tokenizer.vocab_size))
        self.curriculum.check_model(self.model.config)
        self.curriculum.check(rows_divisor=1)
        total = self.curriculum.total_steps
        self.optimizer = adamw(OptimizerConfig(learning_rate=self.setup.learning_rate, total_steps=total, warmup_fraction=0.05))
        self.train_step = jax.jit(make_train_step(self.model, self.optimizer), donate_argnums=0)
        self.evaluate_step = jax.jit(make_eval_step(self.model, domains=1))
        self.predict = make_predict(self.model)
        self.metrics, self.results = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "results.jsonl")
        self.events = JsonLines(folder / "events.jsonl")
        self.ahead: CompileAhead | None = None

    def initial_state(self) -> Any:
        # It runs once: LLVM's optimiser would take longer than it saves.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(self.fresh_state, compiler_options=options)(jax.random.key(self.config.seed))

    def fresh_state(self, key: jax.Array) -> Any:
        return init_state(self.model, self.optimizer, key)

    def stream(self, stage: Stage) -> DataStream:
        return DataStream(
            self.data.mixture(stage),
            context=stage.context_length,
            rows=stage.rows,
            packing=stage.packing,
            seed=self.config.seed,
            tokenizer=self.data.tokenizer,
        )

    def restore(self, checkpoints: Checkpointer) -> tuple[Any, DataStream, int]:
        """The newest checkpoint: state, stream and step, each checked against this run's."""
        state, saved = checkpoints.restore(jax.eval_shape(self.fresh_state, jax.random.key(self.config.seed)))
        step = int(state.step)
        self.curriculum.check_position(saved["curriculum"], step)
        stream = self.stream(self.curriculum.at(step).stage)
        check_fingerprint(saved["data_fingerprint"], stream.fingerprint())
        stream.restore(saved["data"])
        self.metrics.rewind(step)
        self.results.rewind(step)
        self.events.rewind(step - 1)  # the switch at this step is made once more
        return state, stream, step

    def save(self, checkpoints: Checkpointer, step: int, state: Any, stream: DataStream) -> None:
        metadata = {"step": step, "curriculum": self.curriculum.position(step), "stages": self.curriculum.to_dict()}
        metadata |= {"data": stream.state(), "data_fingerprint": stream.fingerprint(), "model": self.model.config.to_dict()}
        checkpoints.save(step, state, metadata)

    def run(self) -> None:
        last = min(self.curriculum.total_steps, self.config.stop_after or self.curriculum.total_steps)
        with Checkpointer(self.folder / "checkpoint", keep=2) as checkpoints:
            if self.config.resume:
                state, stream, step = self.restore(checkpoints)
                self.display.note(f"going on after step {step} of {self.curriculum.total_steps}")
            else:
                state, stream, step = self.initial_state(), self.stream(self.curriculum.stages[0]), 0
                self.evaluate(0, "start", state)
            while step < last:
                place = self.curriculum.at(step)
                end = place.first_step + place.stage.steps
                state = self.train(place.index, state, stream, step, min(end, last))
                step = min(end, last)
                if step == end:
                    self.evaluate(step, place.stage.name, state)
                    if step < self.curriculum.total_steps:  # the checkpoint at a switch holds the next stage's data state
                        stream = self.switch(stream, self.curriculum.at(step).stage)
                self.save(checkpoints, step, state, stream)

    def switch(self, stream: DataStream, stage: Stage) -> DataStream:
        mixture = self.data.mixture(stage)
        return stream.switch(context=stage.context_length, mixture=mixture, rows=stage.rows, packing=stage.packing)

    def train(self, index: int, state: Any, stream: DataStream, first: int, last: int) -> Any:
        """Steps first + 1 .. last of stage `index`; the next stage's step is compiled meanwhile."""
        stage = self.curriculum.stages[index]
        compiled = self.compiled(stage, state, first)
        shares = " ".join(f"{name} {share:.0%}" for name, share in stage.shares.items())
        self.display.note(f"stage {stage.name}: {last - first} steps of {stage.rows} x {stage.context_length} tokens ({shares})")
        for step in range(first + 1, last + 1):
            if step == first + 2 and index + 1 < len(self.curriculum.stages):  # behind a step that runs: lowering takes seconds
                following = self.curriculum.stages[index + 1]
                self.ahead = CompileAhead(following.name, self.train_step, abstract(state), self.batch_shape(following))
            start = time.perf_counter()
            batch, _ = next(stream)
            state, metrics = compiled(state, {name: batch[name] for name in READ})
            metrics = jax.device_get({name: metrics[name] for name in ("loss", "tokens", "grad_norm", "skipped")})
            record = {"step": step, "stage": stage.name, "loss": float(metrics["loss"]), "targets": int(metrics["tokens"])}
            record |= {"grad_norm": float(metrics["grad_norm"]), "skipped": int(metrics["skipped"])}
            self.metrics.append(record | {"seconds": round(time.perf_counter() - start, 4), "cpu_seconds": round(cpu_seconds(), 2)})
            if step % 50 == 0 or step == last:
                self.display.note(f"  step {step}: loss {metrics['loss'] / np.log(2):.3f} bits, {cpu_seconds():.0f} CPU seconds so far")
        return state

    def compiled(self, stage: Stage, state: Any, step: int) -> Any:
        """The stage's program: the one compiled ahead, or compiled now."""
        ahead, self.ahead = self.ahead, None
        how = "ahead"
        if ahead is None or ahead.name != stage.name:
            ahead, how = CompileAhead(stage.name, self.train_step, abstract(state), self.batch_shape(stage)), "now"
        program = ahead.result()
        self.events.append({"step": step, "event": "stage", "stage": stage.name, "compiled": how, **ahead.facts()})
        self.display.note(f"switch to {stage.name}: compiled {how}, {ahead.stall_seconds:.2f} s of waiting")
        return program

    def batch_shape(self, stage: Stage) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (stage.rows, stage.context_length)
        return {name: jax.ShapeDtypeStruct(shape, np.bool_ if name == "loss_mask" else np.int32) for name in READ}

    def evaluate(self, step: int, after: str, state: Any) -> None:
        """Needles at every stage's length, and loss by position, of this state."""
        begin = cpu_seconds()
        with self.display.phase(f"needles and loss by position after {after}"):
            variables = {"params": state.params, "router_state": state.router_state}
            grid = needle_grid(self.predict, variables, self.data.needles, batch_tokens=self.curriculum.batch_tokens)
            positions = position_loss(self.evaluate_step, state, self.data.long_rows)
        record = {"step": step, "after": after, "needles": grid.to_dict(), "positions": positions.to_dict()}
        self.results.append(record | {"bits": positions.total_bits, "cpu_seconds": round(cpu_seconds() - begin, 2)})
        found = "  ".join(f"{length}: {share:.0%}" for length, share in grid.by_length().items())
        self.display.note(f"  found  {found}   loss {positions.total_bits:.3f} bits a token")


def cpu_seconds() -> float:
    """User and system time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary_tables(results: list[dict[str, Any]], curriculum: Curriculum) -> list[Table]:
    """Whole values found by length (mean over depths), and bits a token by position; one row a moment."""
    lengths = results[0]["needles"]["lengths"]
    needles = Table(title="needles found (* a trained length)", title_justify="left")
    for column in ("after stage", *map(str, lengths)):
        needles.add_column(column, justify="left" if column == "after stage" else "right")
    trained = {stage.name: stage.context_length for stage in curriculum.stages}
    for result in results:
        reach = trained.get(result["after"], 0)
        means = [np.mean(row) for row in result["needles"]["accuracy"]]
        marked = (f"{mean:.0%}{'*' if length <= reach else ' '}" for mean, length in zip(means, lengths, strict=True))
        needles.add_row(result["after"], *marked)
    needles.add_section()
    first = results[0]["needles"]
    needles.add_row("copy the nearest value", *(f"{np.mean(row):.0%} " for row in first["copy_last"]))
    needles.add_row("copy any value", *(f"{share:.0%} " for share in first["copy_any"]))
    needles.add_row("guess the digits", *(f"{share:.0%} " for share in first["guess"]))
    buckets = list(results[0]["positions"])
    positions = Table(title="bits a token by position, held-out long files", title_justify="left")
    for column in ("after stage", *buckets, "all"):
        positions.add_column(column, justify="left" if column == "after stage" else "right")
    for result in results:
        bits = [result["positions"][bucket]["bits"] for bucket in buckets]
        positions.add_row(result["after"], *(f"{value:.2f}" for value in [*bits, result["bits"]]))
    return [needles, positions]


def plan_stage(stage: Stage, model: ModelConfig, mesh: MeshConfig, topology: Topology) -> tuple[Plan, int]:
    """The plan with the fewest micro-batches that fits, or with the most that the rows allow; and how many."""
    shards, micro = mesh.data * mesh.fsdp * mesh.expert, 1
    while True:
        made = plan(model, mesh, Step(stage.rows // micro, stage.context_length, "bfloat16"), topology)
        if not made.problems or stage.rows % (2 * micro * shards):
            return made, micro
        micro *= 2


def plan_table(config: CurriculumRun) -> tuple[Table, list[str]]:
    """Stages, rows and memory on a mesh; and what does not fit."""
    curriculum, model, topology = setup(config.preset).curriculum, presets.get(config.model), Topology.parse(config.topology)
    model = model.replace(dtype="bfloat16")
    curriculum.check_model(model)
    title = f"{config.preset}: {curriculum.total_tokens:.3g} tokens in {curriculum.total_steps:,} steps of {curriculum.batch_tokens:,}"
    table = Table(title=f"{title}; {config.model} on {topology.name}", title_justify="left")
    numbers = ("context", "rows a step", "micro-batches", "steps", "tokens", "GiB a device")
    for column in ("stage", *numbers, "mixture"):
        table.add_column(column, justify="right" if column in numbers else "left")
    problems = []
    for stage in curriculum.stages:
        made, micro = plan_stage(stage, model, config.mesh, topology)
        problems += [f"stage {stage.name}: {problem}" for problem in made.problems]
        shares = ", ".join(f"{name} {share:.0%}" for name, share in stage.shares.items())
        memory = f"{made.needed / 2**30:,.1f} of {made.topology.memory / 2**30:,.1f}"
        figures = (f"{stage.context_length:,}", f"{stage.rows:,}", str(micro), f"{stage.steps:,}", f"{stage.tokens:.3g}", memory)
        table.add_row(stage.name, *figures, shares)
    try:
        curriculum.check(config.mesh.data * config.mesh.fsdp * config.mesh.expert)
    except ValueError as error:
        problems.append(str(error))
    return table, problems


def show(training: Training) -> None:
    results, display = training.results.read(), training.display
    for table in summary_tables(results, training.curriculum):
        display.show(table)
    used = cpu_seconds()
    stalls = [event["stall_seconds"] for event in training.events.read() if event["compiled"] == "ahead"]
    display.note(f"CPU time of this process: {used:.0f} s ({used / 60:.1f} minutes); waits at switches: {stalls} s")
    summary = {"curriculum": training.curriculum.to_dict(), "results": results, "cpu_seconds": used, "stalls": stalls}
    write_json(training.folder / "summary.json", summary)
    draw(training.folder / "curriculum.png", results, training.metrics.read(), training.curriculum)
    display.note(f"Files: {training.folder}/ (summary.json, curriculum.png, results.jsonl, metrics.jsonl, events.jsonl, checkpoint/)")


def run_folder(config: CurriculumRun) -> pathlib.Path:
    """A new folder with config.json; with --resume the old one, whose settings must be the same."""
    if config.resume:
        folder = pathlib.Path(config.resume)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{config.resume!r} is no run folder: it has no config.json.")
        saved = json.loads((folder / "config.json").read_text())
        for name in ("preset", "seed"):
            if saved[name] != getattr(config, name):
                raise ValueError(f"a run keeps its settings: --{name} was {saved[name]!r}, given is {getattr(config, name)!r}.")
        return folder
    for number in range(1000):
        folder = pathlib.Path(config.out) / f"{time.strftime('%Y%m%d-%H%M%S')}-curriculum-{config.preset}{f'-{number}' if number else ''}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        write_json(folder / "config.json", {"preset": config.preset, "seed": config.seed, "jax": jax.__version__})
        return folder
    raise ValueError(f"{config.out} is full of runs; give another --out.")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; -> the exit status: 0, 1 when a plan does not fit or a checkpoint cannot be written, 2 for bad input."""
    display = Display(width=None if sys.stdout.isatty() else 150)
    try:
        config = tyro.cli(CurriculumRun, args=arguments, prog="python -m experiments.curriculum", description=__doc__)
        config.check()
        if config.plan:
            table, problems = plan_table(config)
            display.show(table)
            for problem in problems:
                display.note(f"does not fit: {problem}")
            return 1 if problems else 0
        training = Training(config, run_folder(config), display)
        display.note(f"run: {training.folder}; {training.curriculum.total_steps} steps of {training.curriculum.batch_tokens} tokens")
        training.run()
        show(training)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, OSError) as error:  # a full disk: the checkpoints before it are whole
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
