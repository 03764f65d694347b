"""Train a hybrid language model on real text, watch its experts, and see whether it beats counting.

No argument is needed: the `tiny` preset learns this Python's standard library in under 5 minutes on 2 CPU cores.
Run it as `make demo`, `python -m experiments.pretrain` or `python experiments/pretrain.py`; --help lists the settings.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shlex
import sys
import traceback

import jax
import tyro

from moejax.config import ModelConfig
from moejax.data import ByteTokenizer, Corpus, folder_corpus, standard_library
from moejax.modules.model import compute_dtype
from moejax.ops.attention_gpu import AttentionFacts, attention_implementation
from moejax.parallel import initialize, leave, who_is_who
from moejax.parallel.agreement import raised_on_all, text_of_first
from moejax.train.checkpoint_write import CheckpointError
from moejax.train.display import Display
from moejax.train.pretraining import Pretraining, by_domain
from moejax.train.replay import ReplayMismatch
from moejax.train.report import summary_lines
from moejax.train.run_config import (
    PretrainConfig,
    check_memory,
    check_same_run,
    configure_compile_cache,
    load_run,
    model_config,
    new_run_folder,
    write_run,
)

PROGRAM = "python -m experiments.pretrain"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; -> the exit status: 0, 1 when training failed, 2 for bad input, 130 when aborted."""
    try:
        initialize(quiet=True)  # joins the other processes of the run, where there are any (experiments/launch)
        display = Display(silent=jax.process_index() > 0)
        for line in who_is_who():
            display.note(line)
        config = parse(sys.argv[1:] if arguments is None else arguments)
        if config.evaluate:
            return evaluate(config, display)
        return train(config, display)
    except (ValueError, FileNotFoundError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (CheckpointError, ReplayMismatch, OSError, RuntimeError) as error:
        if not isinstance(error, (CheckpointError, ReplayMismatch)):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("aborted; what the last checkpoint holds is safe", file=sys.stderr)
        return 130


def parse(arguments: list[str]) -> PretrainConfig:
    """The settings; those of the run itself where --resume or --evaluate names one, refused where they differ."""
    given = tyro.cli(PretrainConfig, args=arguments, prog=PROGRAM)
    run = given.resume or given.evaluate
    if not run:
        return given
    saved, _ = load_run(run)
    saved = dataclasses.replace(saved, minutes=None, stop_after=None, profile=False, resume=None, evaluate=None)
    given = tyro.cli(PretrainConfig, args=arguments, default=saved, prog=PROGRAM)
    check_same_run(saved, given)
    return given


def train(config: PretrainConfig, display: Display) -> int:
    """Start a run, or take one up again, and show its summary."""
    cache = configure_compile_cache(config.compile_cache)
    if jax.process_count() > 1 and config.mesh.size != jax.device_count():
        raise ValueError(
            f"the mesh has {config.mesh.size} devices, the {jax.process_count()} processes have {jax.device_count()}; "
            "the numbers after --mesh.* must multiply to that."
        )
    if config.resume:
        folder = pathlib.Path(config.resume)
        _, model = load_run(config.resume)
        check_memory(config.preset, model, devices=config.mesh.size)
        corpus = read_corpus(config, display)
    else:
        model = model_config(config, ByteTokenizer.vocab_size)
        check_memory(config.preset, model, devices=config.mesh.size)
        corpus = read_corpus(config, display)
        folder = pathlib.Path()
        with raised_on_all("making the run folder"):
            if jax.process_index() == 0:
                folder = new_run_folder(config)
                write_run(folder, config, model, corpus.manifest.to_dict(), list(by_domain(corpus)))
        folder = pathlib.Path(text_of_first(str(folder)))
    devices = jax.devices()
    more = f" ({config.mesh.size} of {len(devices)})" if len(devices) > 1 else ""
    display.note(f"run: {folder}  device: {devices[0].device_kind}{more}")
    display.note(f"attention: {attention_note(config, model)}")
    run = Pretraining(config, model, corpus, folder, display)
    summary = run.run(resume=bool(config.resume))
    if jax.process_index() == 0:
        show(summary, folder, display)
    if summary["speed"]["cache_hits"]:
        display.note(f"Compiled programs came from {cache}")
    return 1 if summary["failure"] else 0


def attention_note(config: PretrainConfig, model: ModelConfig) -> str:
    """Which attention the MLA layers run, and why."""
    if config.mesh.sequence > 1:
        return "xla (the mesh shards time)"
    dtype, length = str(compute_dtype(model)), config.context
    facts = AttentionFacts(dtype, model.mla.nope_dim + model.mla.rope_dim, model.mla.value_dim, length, length, packed=True)
    choice = attention_implementation(facts=facts)
    return f"{choice.name} ({choice.reason})"


def read_corpus(config: PretrainConfig, display: Display) -> Corpus:
    with display.phase("reading the text"):
        return folder_corpus(config.corpus) if config.corpus else standard_library()


def show(summary: dict, folder: pathlib.Path, display: Display) -> None:
    display.note("")
    for line in summary_lines(summary):
        display.note(line)
    files = ["config.json", "metrics.jsonl", "summary.txt", *summary["pictures"], "checkpoint/"]
    files += ["profile/"] if (folder / "profile").is_dir() else []
    display.note("")
    display.note(f"Files: {folder}/ ({', '.join(files)})")
    if summary["step"] < summary["steps"]:
        display.note(f"Go on:  {command('--resume', folder)}")
    display.note(f"Score:  {command('--evaluate', folder)}")


def command(option: str, folder: pathlib.Path) -> str:
    """A line to paste into a shell. By this interpreter and this file: the system's python may not have moejax."""
    program = [os.path.relpath(sys.executable), os.path.relpath(__file__)]
    return shlex.join([*program, option, str(folder)])


def evaluate(config: PretrainConfig, display: Display) -> int:
    """Score a run's latest checkpoint on the held-out text. Changes nothing in the run's folder."""
    configure_compile_cache(config.compile_cache)
    assert config.evaluate
    _, model = load_run(config.evaluate)
    run = Pretraining(config, model, read_corpus(config, display), pathlib.Path(config.evaluate), display)
    state, metadata = run.restore()
    step = metadata["step"]
    with display.phase("scoring the held-out text"):
        score = run.score(state)
    display.note(f"{config.evaluate}, checkpoint of step {step}: held-out bits per byte")
    for name in ("model", "bigram", "unigram"):
        display.note(f"  {name:<10}{score[name]:.6f}")
    return 0


if __name__ == "__main__":
    leave(main())  # not sys.exit: a process that fails must not wait for the others, which wait for it
