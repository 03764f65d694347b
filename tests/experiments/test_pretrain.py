"""The main job end to end, as someone would start it: whole runs of a very small model in processes of their own."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from moejax import presets
from moejax.data import folder_corpus, synthetic_corpus
from moejax.train.checkpoint import Checkpointer
from moejax.train.run_config import PretrainConfig, check_same_run, load_run, model_config, new_run_folder

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 6


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """A folder with a text corpus, a model of one KDA and one MLA layer, and a compile cache that all runs share."""
    folder = tmp_path_factory.mktemp("pretrain")
    corpus = synthetic_corpus(documents=30, mean_words=40)
    for document in corpus.train + corpus.heldout:
        path = folder / "corpus" / document.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(document.data)
    model = presets.get("tiny").replace(
        hidden=16,
        layers=2,
        pattern="KM",
        dense_width=16,
        residual_block=1,
        kda={"heads": 1, "key_dim": 8, "value_dim": 8},
        mla={"heads": 1, "nope_dim": 8, "rope_dim": 4, "value_dim": 8, "q_latent": 8, "kv_latent": 8},
        moe={"experts": 4, "experts_per_token": 2, "expert_width": 8, "latent": 8, "shared_width": 8},
    )
    (folder / "model.json").write_text(json.dumps(model.to_dict()))
    return folder


def _command(workshop, *arguments, script=False):
    start = ["experiments/pretrain.py"] if script else ["-m", "experiments.pretrain"]
    return [sys.executable, *start, *arguments, "--compile-cache", str(workshop / "cache")]


def _new_run(workshop, out):
    return [
        *("--preset", str(workshop / "model.json"), "--corpus", str(workshop / "corpus"), "--out", str(workshop / out)),
        *("--steps", str(STEPS), "--batch", "2", "--context", "24", "--heldout-rows", "3", "--checkpoint-every", "4"),
        *("--sample-bytes", "3"),
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
    """(run folder, output) of the same run, ended by Ctrl-C while its train step was compiled."""
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
            process.send_signal(signal.SIGINT)
    assert process.wait(timeout=600) == 0, "".join(output)
    return _only_run(workshop / "parts"), "".join(output)


def test_a_run_leaves_its_records_pictures_and_a_summary(whole):
    run, output = whole
    names = {path.name for path in run.iterdir()}
    assert names == {
        *("config.json", "metrics.jsonl", "expert_load.jsonl", "heldout.jsonl", "summary.json", "summary.txt"),
        *("loss.png", "expert_load.png", "checkpoint"),
    }
    for picture in ("loss.png", "expert_load.png"):
        assert (run / picture).read_bytes().startswith(b"\x89PNG")
    metrics = _lines(run / "metrics.jsonl")
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    assert all(np.isfinite(record["loss"]) and record["wall"]["compiles"] == 1 for record in metrics)
    assert metrics[-1]["learning_rate"] < metrics[1]["learning_rate"]
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


def test_ctrl_c_ends_cleanly_with_a_checkpoint_and_a_summary(interrupted):
    run, output = interrupted
    assert "Ctrl-C: ending after this step" in output and f"1 of {STEPS} steps, ended early by Ctrl-C" in output
    assert f"--resume {run}" in output
    assert json.loads((run / "summary.json").read_text())["step"] == 1
    assert Checkpointer(run / "checkpoint").latest_step() == 1
    assert len(_lines(run / "metrics.jsonl")) == 1


def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(workshop, whole, interrupted):
    run, _ = interrupted
    done = _execute(_command(workshop, "--resume", str(run)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on after step 1" in done.stdout

    def deterministic(folder):
        return [{k: v for k, v in record.items() if k != "wall"} for record in _lines(folder / "metrics.jsonl")]

    assert deterministic(run) == deterministic(whole[0])
    assert _lines(run / "expert_load.jsonl") == _lines(whole[0] / "expert_load.jsonl")
    assert _lines(run / "heldout.jsonl")[-1] == _lines(whole[0] / "heldout.jsonl")[-1]
    a, b = (json.loads((folder / "summary.json").read_text()) for folder in (run, whole[0]))
    assert a["heldout"] == b["heldout"] and a["balance"] == b["balance"] and a["sample"] == b["sample"]
    leaves = [json.loads((f / "checkpoint" / str(STEPS) / "record" / "metadata").read_text()) for f in (run, whole[0])]
    assert leaves[0]["leaves"] == leaves[1]["leaves"]


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
    from moejax.train.run_config import write_run

    folder = folders.pop()
    model = model_config(dataclasses.replace(config, balance="sign"), 320)
    assert model.moe.balance == "sign"
    write_run(folder, config, model, {})
    assert load_run(str(folder)) == (config, model)
    check_same_run(config, dataclasses.replace(config, minutes=3.0, profile=True))
    with pytest.raises(ValueError, match="vocab_size is 320"):
        model_config(config, 321)
    assert PretrainConfig().time_limit is not None and config.time_limit is None
