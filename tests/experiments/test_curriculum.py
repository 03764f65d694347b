"""The curriculum's script: plans, refusals, tables and picture; and (slow) a small run that stops, goes on, and is the same run."""

import json

import numpy as np
import pytest

from experiments import curriculum, curriculum_picture
from moejax.train.curriculum import demo


def test_plan_of_k3(capsys):
    """The four stages with rows, micro-batches and memory; exit status 1 with the reason when something stands against it."""
    assert curriculum.main(["--preset", "k3", "--plan"]) == 0
    text = capsys.readouterr().out
    for words in (
        "1.34e+13 tokens in 200,000 steps of 67,108,864",
        "1,048,576",
        "8,192",
        "120,000",
        "code 60%, prose 30%, recall 10%",
        "of 139.8",
    ):
        assert words in text, words
    assert curriculum.main(["--preset", "k3", "--plan", "--mesh.expert", "32", "--mesh.fsdp", "4", "--topology", "h200:256"]) == 1
    assert "does not fit: stage '1M' has 64 rows a step" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "k3"], "planned here, not run: add --plan"),
        (["--stop-after", "0"], "--stop-after is 0"),
        (["--plan", "--stop-after", "3"], "--plan trains nothing"),
        (["--resume", "/nowhere"], "no run folder: it has no config.json"),
        (["--preset", "k3", "--plan", "--topology", "abacus:4"], "abacus"),
    ],
)
def test_refuses(arguments, message, capsys):
    assert curriculum.main(arguments) == 2
    assert message in capsys.readouterr().err


def made_up_results(stages):
    lengths = [stage.context_length for stage in stages]
    for number, after in enumerate(["start", *(stage.name for stage in stages)]):
        accuracy = [[min(1.0, 0.25 * number)] * 2 for _ in lengths]
        grid = {"lengths": lengths, "depths": [0.0, 1.0], "accuracy": accuracy, "copy_last": [[0.0, 1.0]] * 4}
        grid |= {"guess": [0.01] * 4, "copy_any": [0.25] * 4}
        positions = {"0-1": {"bits": 9.0 - number, "tokens": 3}, "128-255": {"bits": 8.0 - number, "tokens": 200}}
        yield {"step": number, "after": after, "needles": grid, "positions": positions, "bits": 8.5 - number}


def test_tables_and_picture(tmp_path):
    """A star stands at the lengths trained on by then, and only there; the picture has one grid a moment."""
    stages = demo().stages
    results = list(made_up_results(stages))
    needles, positions = curriculum.summary_tables(results, demo())
    columns = [list(column.cells) for column in needles.columns]
    assert columns[0] == ["start", "64", "512", "2K", "8K", "copy the nearest value", "copy any value", "guess the digits"]
    assert columns[1] == ["0% ", "25%*", "50%*", "75%*", "100%*", "50% ", "25% ", "1% "]
    assert columns[3] == ["0% ", "25% ", "50% ", "75%*", "100%*", "50% ", "25% ", "1% "]
    assert list(positions.columns[1].cells) == ["9.00", "8.00", "7.00", "6.00", "5.00"]
    metrics = [{"step": step, "loss": 3.0 / step} for step in range(1, 9)]
    curriculum_picture.draw(tmp_path / "picture.png", results, metrics, demo())
    assert (tmp_path / "picture.png").stat().st_size > 20_000


@pytest.fixture
def compile_cache(tmp_path):
    """Four runs in one process compile the same programs; the last three read them."""
    import jax

    settings = {"jax_compilation_cache_dir": str(tmp_path / "cache"), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
def test_a_run_that_stops_and_goes_on_is_the_same_run(tmp_path, compile_cache):
    """Two stages of two steps: stopped inside the first and again inside the second; losses and needles bit for bit."""
    smoke = ["--preset", "smoke"]
    assert curriculum.main([*smoke, "--out", str(tmp_path / "whole")]) == 0
    assert curriculum.main([*smoke, "--out", str(tmp_path / "parts"), "--stop-after", "1"]) == 0
    (whole,), (parts,) = ((tmp_path / name).iterdir() for name in ("whole", "parts"))
    assert curriculum.main([*smoke, "--resume", str(parts), "--stop-after", "3"]) == 0
    assert curriculum.main([*smoke, "--resume", str(parts)]) == 0
    records = []
    for folder in (whole, parts):
        losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
        assert len(losses) == 4 and np.isfinite(losses).all() and [r["after"] for r in results] == ["start", "64", "128"]
        records.append((losses, [(r["needles"], r["positions"]) for r in results]))
        for name in ("summary.json", "curriculum.png", "config.json", "checkpoint/4"):
            assert (folder / name).exists(), name
    assert records[0] == records[1]
    events = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    assert [(e["step"], e["stage"], e["compiled"]) for e in events] == [(0, "64", "now"), (2, "128", "ahead")]
    assert curriculum.main([*smoke, "--seed", "1", "--resume", str(parts)]) == 2
