"""The main job end to end, as someone would start it: whole runs of a very small model in processes of their own."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import presets
from moejax.counting import count_parameters
from moejax.data import folder_corpus, synthetic_corpus
from moejax.ops import BALANCE_RULES, BalanceStrength, route, router_statistics, updated_bias
from moejax.train.checkpoint import Checkpointer
from moejax.train.display import Display
from moejax.train.loop import StopRequest
from moejax.train.pretraining import Pretraining
from moejax.train.run_config import (
    PretrainConfig,
    check_memory,
    check_same_run,
    load_run,
    model_config,
    new_run_folder,
    write_run,
)
from moejax.train.strength import STRENGTHS, Strength

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 6


@pytest.fixture(scope="session")
def workshop(tmp_path_factory, small):
    """A folder with a text corpus, a model of one KDA and one MLA layer, and a compile cache that all runs share."""
    folder = tmp_path_factory.mktemp("pretrain")
    corpus = synthetic_corpus(documents=30, mean_words=40)
    for document in corpus.train + corpus.heldout:
        path = folder / "corpus" / document.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document.data)
    (folder / "model.json").write_text(json.dumps(small.to_dict()))
    return folder


def _command(workshop, *arguments, script=False):
    start = ["experiments/pretrain.py"] if script else ["-m", "experiments.pretrain"]
    return [sys.executable, *start, *arguments, "--compile-cache", str(workshop / "cache")]


def _new_run(workshop, out):
    return [
        *("--preset", str(workshop / "model.json"), "--corpus", str(workshop / "corpus"), "--out", str(workshop / out)),
        *("--steps", str(STEPS), "--batch", "2", "--context", "24", "--heldout-rows", "3", "--checkpoint-every", "4"),
        *("--sample-bytes", "3", "--strength.ema", "0.25"),
    ]


def _execute(command):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def _only_run(folder):
    (run,) = list(folder.iterdir())
    return run


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def whole(workshop):
    """(run folder, output) of an uninterrupted run."""
    done = _execute(_command(workshop, *_new_run(workshop, "whole"), script=True))
    assert done.returncode == 0, done.stdout + done.stderr
    return _only_run(workshop / "whole"), done.stdout


@pytest.fixture(scope="session")
def interrupted(workshop, whole):
    """(run folder, output) of the same run, ended by SIGTERM while its train step was compiled."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        _command(workshop, *_new_run(workshop, "parts")),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith("compiling the train step") and line.endswith("...\n"):
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 0, "".join(output)
    return _only_run(workshop / "parts"), "".join(output)


def test_a_run_leaves_its_records_pictures_and_a_summary(whole):
    run, output = whole
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("config.json", "metrics.jsonl", "expert_load.jsonl", "heldout.jsonl", "summary.json", "summary.txt"),
        *("loss.png", "expert_load.png", "checkpoint", "events.jsonl", "events.jsonl.lock", "goodput.json", "tensorboard", "report.html"),
    }
    events = _lines(run / "events.jsonl")
    assert [(event["event"], event["step"]) for event in events] == [("checkpoint_saved", 4), ("checkpoint_saved", STEPS)]
    text = (run / "report.html").read_text()
    assert text.lower().startswith("<!doctype html>") and "long_files" not in text and len(text) > 10_000
    for picture in ("loss.png", "expert_load.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
    metrics = _lines(run / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    assert all(np.isfinite(record["loss"]) and record["wall"]["compiles"] == 1 for record in metrics)
    assert metrics[-1]["learning_rate"] < metrics[1]["learning_rate"]
    assert all(record["token_groups"][0] + sum(record["token_groups"][1:]) == record["tokens"] for record in metrics)
    np.testing.assert_allclose([sum(r["loss_groups"]) / r["tokens"] for r in metrics], [r["loss"] for r in metrics], rtol=1e-5)
    assert all(record["wall"]["data_wait"] < record["wall"]["seconds"] for record in metrics)
    loads = np.array([record["load"] for record in _lines(run / "expert_load.jsonl")])
    assert loads.shape == (STEPS, 1, 4) and (loads.sum(axis=-1) == 2 * 2 * 24).all()
    config = json.loads((run / "config.json").read_text())
    assert config["config"]["steps"] == STEPS and config["model"]["layers"] == 2
    assert len(config["corpus"]["sha256"]) == 64 and {"jax", "moejax", "python"} <= set(config["versions"])
    summary = json.loads((run / "summary.json").read_text())
    assert 7 < summary["heldout"]["before"] < 10 and summary["heldout"]["after"] < summary["heldout"]["before"]
    assert summary["heldout"]["bigram"] < summary["heldout"]["unigram"] < 8
    assert summary["step"] == summary["steps"] == STEPS and summary["ended_by"] == ""
    assert summary["sample"].startswith("def ")
    for text in ("bigram counts", "MaxVio", "sampling floor", "tokens/s, MFU", "A sampled continuation"):
        assert text in output and text in (run / "summary.txt").read_text()
    assert "ABOVE the bigram counts" in output  # 6 steps are too few, and the summary says so
    assert f"--evaluate {run}" in output and "--resume" not in output


def test_a_run_shows_signs_of_life_where_it_takes_long(whole):
    output = whole[1]
    for text in ("initialising the model ...", "compiling the train step", "scoring the held-out text", "step 6/6"):
        assert text in output


def test_sigterm_ends_cleanly_with_a_checkpoint_and_a_summary(interrupted):
    """With exit status 0 (the fixture asserts it): the scheduler that sent it sees a run that did what it was told."""
    run, output = interrupted
    assert "SIGTERM: ending after this step" in output and f"1 of {STEPS} steps, ended early by SIGTERM" in output
    assert f"--resume {run}" in output
    assert json.loads((run / "summary.json").read_text())["step"] == 1
    assert Checkpointer(run / "checkpoint").latest_step() == 1
    assert len(_lines(run / "metrics.jsonl")) == 1


def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(workshop, whole, interrupted):
    """By the very line that the run printed, with --profile, data workers and steps run twice, which must not change a number.

    maxdiffusion PR 484: step, update count, schedule, place in the data and name of the folder agree.
    """
    run, output = interrupted
    (line,) = [line for line in output.splitlines() if line.startswith("Go on:")]
    printed = shlex.split(line.removeprefix("Go on:"))
    more = ["--data-workers", "1", "--safety.replay-every", "3", "--safety.snapshot-every", "2"]
    done = _execute([*printed, "--profile", *more, "--compile-cache", str(workshop / "cache")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on after step 1" in done.stdout and "profile/" in done.stdout
    traces = [path for path in (run / "profile").rglob("*.xplane.pb") if path.stat().st_size]
    assert len(traces) == 1

    def deterministic(folder):
        return [{k: v for k, v in record.items() if k != "wall"} for record in _lines(folder / "metrics.jsonl")]

    assert deterministic(run) == deterministic(whole[0])
    assert _lines(run / "expert_load.jsonl") == _lines(whole[0] / "expert_load.jsonl")
    assert _lines(run / "heldout.jsonl")[-1] == _lines(whole[0] / "heldout.jsonl")[-1]
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (run, whole[0]))
    assert a["heldout"] == b["heldout"] and a["balance"] == b["balance"] and a["sample"] == b["sample"]
    (one, more_one), (two, more_two) = (_checkpoint(workshop, folder) for folder in (run, whole[0]))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    words = lambda tree: [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]
    assert all(np.array_equal(x, y) for x, y in zip(words(one), words(two), strict=True))
    assert more_one["data"] == more_two["data"] and more_one["data"]["position"]["rows"] == 2 * STEPS
    assert more_one["step"] == STEPS and int(one.step) == STEPS
    counts = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(one.opt_state) if "count" in jax.tree_util.keystr(path)]
    assert counts and all(int(count) == STEPS for count in counts)
    assert [event["event"] for event in _lines(run / "events.jsonl")].count("restored") == 1


def _checkpoint(workshop, run):
    """-> (state, metadata) of the latest checkpoint."""
    config, model = load_run(str(run))
    return Pretraining(config, model, folder_corpus(workshop / "corpus"), run, Display()).restore()


def test_a_mesh_gives_the_same_loss_curve_and_a_run_may_change_it(workshop, whole):
    """Four steps on 4 devices of 2 processes, the rest on one device: the losses of the run that had one all the time."""
    launch = [sys.executable, "-m", "experiments.launch.local", "2", "--devices-per-process", "2", "--", "experiments/pretrain.py"]
    mesh = ["--mesh.expert", "2", "--mesh.sequence", "2", "--stop-after", "4", "--compile-cache", "none"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run([*launch, *_new_run(workshop, "mesh"), *mesh], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    others = [line for line in done.stdout.splitlines() if line.startswith("[1]") and "[Gloo]" not in line and "peer ranks" not in line]
    assert "(4 of 4)" in done.stdout and not others  # only the first process talks
    run = _only_run(workshop / "mesh")
    done = _execute(_command(workshop, "--resume", str(run), "--mesh.expert", "1", "--mesh.sequence", "1", "--stop-after", str(STEPS)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on after step 4" in done.stdout
    ours, theirs = ([record["loss"] for record in _lines(folder / "metrics.jsonl")] for folder in (run, whole[0]))
    assert len(ours) == STEPS
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_evaluate_scores_the_latest_checkpoint_and_changes_nothing(workshop, whole):
    run, _ = whole
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    done = _execute(_command(workshop, "--evaluate", str(run)))
    assert done.returncode == 0, done.stdout + done.stderr
    heldout = json.loads((run / "summary.json").read_text())["heldout"]
    assert f"step {STEPS}" in done.stdout
    for name, value in (("model", heldout["after"]), ("bigram", heldout["bigram"]), ("unigram", heldout["unigram"])):
        assert any(line.split() == [name, f"{value:.6f}"] for line in done.stdout.splitlines())
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_other_text_or_settings_are_refused_with_both_values(workshop, whole, tmp_path, capsys):
    from experiments.pretrain import main

    run = str(whole[0])
    (tmp_path / "a.txt").write_text("other text")
    (tmp_path / "b.txt").write_text("and more of it")
    shas = [folder_corpus(p).manifest.sha256[:16] for p in (workshop / "corpus", tmp_path)]
    cache = ["--compile-cache", "none"]
    assert main(["--resume", run, "--corpus", str(tmp_path), *cache]) == 2
    error = capsys.readouterr().err
    assert shas[0] in error and shas[1] in error and "--corpus" in error
    assert main(["--resume", run, "--batch", "3", "--seed", "9", *cache]) == 2
    error = capsys.readouterr().err
    assert "--batch: the run has 2, given is 3" in error and "--seed: the run has 0, given is 9" in error
    assert main(["--evaluate", run, "--minutes", "3", *cache]) == 2
    assert "--minutes: the run has None, given is 3.0" in capsys.readouterr().err
    assert main(["--resume", run, "--strength.ema", "0.5", *cache]) == 2
    assert "--strength.ema: the run has 0.25, given is 0.5" in capsys.readouterr().err


def test_the_state_carries_the_strengths_that_were_given(whole, workshop):
    state, metadata = _checkpoint(workshop, whole[0])
    assert metadata["step"] == STEPS and float(state.balance.ema) == 0.25 and float(state.balance.step) == np.float32(1e-3)


def test_every_strength_is_the_default_of_the_rules_and_read_where_the_table_says():
    assert Strength().create() == BalanceStrength()
    assert STRENGTHS.keys() == BALANCE_RULES.keys()
    logits = jax.random.normal(jax.random.key(0), (64, 8)) + jnp.linspace(-1, 1, 8)
    bias, other = jnp.linspace(-0.1, 0.1, 8), {"ema": 0.5, "quantile": 0.9, "band_low": 0.2, "band_high": 4.0}
    for rule in set(STRENGTHS) - {"aux_loss"}:  # its strength is a factor on the loss
        statistics = router_statistics(rule, route(logits, bias, 2), logits, bias, 2)
        update = jax.jit(functools.partial(updated_bias, rule, statistics, bias, 2))
        usual = update(BalanceStrength())
        for field in dataclasses.fields(Strength):
            strength = Strength(**{field.name: other.get(field.name, 0.05)})
            changed = bool((update(strength.create()) != usual).any())
            assert changed == (field.name in STRENGTHS[rule]), (rule, field.name)
            if changed:
                strength.check(rule)
            else:
                with pytest.raises(ValueError, match="would be ignored"):
                    strength.check(rule)


def test_the_compile_is_announced_once_whatever_the_counter_hears(tmp_path):
    """The counter listens to an event of JAX; when JAX renames it, no step may wait for its result or be announced."""
    phases, steps = [], []
    display = Display()
    phase = display.phase
    display.phase = lambda text: phases.append(text) or phase(text)  # pyright: ignore
    ledger = types.SimpleNamespace(phase=lambda name: contextlib.nullcontext(), begin=lambda: None, finish=lambda: None)
    care = types.SimpleNamespace(
        goodput=ledger,
        watchdog=types.SimpleNamespace(busy=lambda name, limit: contextlib.nullcontext()),
        check=lambda: None,
        observe=lambda step, metrics, times: steps.append(step) or "go",
        due=lambda step: False,
    )
    fake = types.SimpleNamespace(
        **{"config": PretrainConfig(steps=4), "model_config": presets.get("tiny"), "display": display, "start": 0.0},
        **{"caretaker": care, "observation": None, "record": None, "_ready": lambda made: made},
        stream=Numbers(),
        compiles=types.SimpleNamespace(count=0, seconds=0.0, cache_hits=0),
        _before_step=lambda first: lambda step: None,
        _train_step=lambda state, batch: (state, {"loss": jnp.float32(1)}),
    )
    result = Pretraining._train(fake, None, 0, StopRequest())  # pyright: ignore
    assert result.step == 4 and result.data == 4 and steps == [1, 2, 3, 4]
    assert len(phases) == 1 and phases[0].startswith("compiling the train step")


class Numbers:
    """A stream of numbers."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.given += 1
        return self.given - 1, self.given

    def state(self):
        return self.given


def test_ids_outside_the_vocabulary_are_refused_before_anything_is_compiled(tmp_path):
    corpus = synthetic_corpus(documents=30, mean_words=40)
    with pytest.raises(ValueError, match=r"vocab_size is 200; the tokenizer's ids go up to 319"):
        Pretraining(PretrainConfig(), presets.get("tiny").replace(vocab_size=200), corpus, tmp_path, Display())


def test_a_new_run_writes_down_the_dtype_that_it_computes_in(monkeypatch):
    assert presets.get("tiny").dtype is None and model_config(PretrainConfig(), 320).dtype == "float32"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert model_config(PretrainConfig(), 320).dtype == "bfloat16"


def test_a_model_larger_than_the_memory_is_refused():
    model = presets.get("tiny")
    needed = 16 * count_parameters(model).total
    check_memory("tiny", model, needed)
    with pytest.raises(ValueError, match=r"tiny: 4\.2 million parameters need 0 GiB .* memory here is 0\.1 GiB"):
        check_memory("tiny", model, needed - 1)
    with pytest.raises(ValueError, match="memory here is"):  # float32 moments
        check_memory("tiny", model.replace(param_dtype="bfloat16"), needed * 3 // 4 - 1)
    check_memory("tiny", model.replace(param_dtype="bfloat16"), needed * 3 // 4)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda record: record["config"].update(lucky=7), "unknown PretrainConfig fields: lucky"),
        (lambda record: record["config"]["strength"].update(wish=1), "unknown strength fields: wish"),
        (lambda record: record["model"].update(lucky=7), "unknown ModelConfig fields: lucky"),
        (lambda record: record["model"]["moe"].update(luck=7), "unknown MoEConfig fields: luck"),
        (lambda record: record["config"].update(steps="many"), "cannot be used"),
        (lambda record: record.pop("model"), "no model"),
    ],
)
def test_a_run_folder_that_cannot_be_read_is_one_message(harm, message, tmp_path, capsys):
    from experiments.pretrain import main

    config = PretrainConfig()
    write_run(tmp_path, config, model_config(config, 320), {})
    path = tmp_path / "config.json"
    record = json.loads(path.read_text())
    harm(record)
    path.write_text(json.dumps(record))
    assert main(["--resume", str(tmp_path), "--compile-cache", "none"]) == 2
    error = capsys.readouterr().err
    assert message in error and str(path) in error and error.startswith("error: ")
    if "model" in record:
        (tmp_path / "model.json").write_text(json.dumps(record["model"] | {"lucky": 7}))
        assert main(["--preset", str(tmp_path / "model.json"), "--compile-cache", "none"]) == 2
        assert "unknown ModelConfig fields: lucky" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "unknown preset 'huge'"),
        (["--preset", "missing.json"], "'missing.json', which does not exist"),
        (["--balance", "luck"], "'luck'; allowed"),
        (["--steps", "0"], "--steps is 0"),
        (["--context", "1"], "--context is 1"),
        (["--minutes", "-1"], "--minutes is -1"),
        (["--learning-rate", "0"], "learning_rate is 0"),
        (["--corpus", "/nowhere"], "'/nowhere' is no folder"),
        (["--resume", "nowhere"], "'nowhere' is no run folder"),
        (["--steps", "9", "--stop-after", "2", "--profile"], "--profile records from step 3"),
        (["--prompt", ""], "--prompt is empty"),
        (["--strength.ema", "1"], "--strength: ema is 1.0; it must be in [0, 1)"),
        (["--strength.step", "0.1"], "--strength.step 0.1 would be ignored: the balancing rule 'quantile' reads ema"),
        (["--preset", "kimi_k3"], "--preset kimi_k3: 2,779,484.4 million parameters need 41,418 GiB"),
    ],
)
def test_bad_input_is_one_message_and_leaves_no_folder(arguments, message, tmp_path, capsys, monkeypatch):
    from experiments.pretrain import main

    monkeypatch.chdir(tmp_path)
    try:  # the argument parser leaves by SystemExit, everything else by the returned status
        status = main([*arguments, "--compile-cache", "none"])
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    error = " ".join(capsys.readouterr().err.split())
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_run_folders_never_collide_and_settings_round_trip(tmp_path):
    config = PretrainConfig(out=str(tmp_path / "runs"), steps=5)
    folders = {new_run_folder(config) for _ in range(3)}
    assert len(folders) == 3 and all(folder.is_dir() for folder in folders)
    folder = folders.pop()
    model = model_config(dataclasses.replace(config, balance="sign"), 320)
    assert model.moe.balance == "sign"
    write_run(folder, config, model, {})
    assert load_run(str(folder)) == (config, model)
    check_same_run(config, dataclasses.replace(config, minutes=3.0, profile=True))
    with pytest.raises(ValueError, match="vocab_size is 320"):
        model_config(config, 321)
    assert PretrainConfig().time_limit is not None and config.time_limit is None
