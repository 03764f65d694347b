"""latency.py: the floor's bytes by hand, the command line, the picture; a whole rehearsal is `slow`."""

import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from moejax.counting import count_parameters

BENCH = pathlib.Path(__file__).parents[2] / "experiments" / "bench"
MODULES = ("latency_floor", "latency_subject", "latency_bench", "latency_decode", "latency_prefill", "latency_picture", "latency")


@pytest.fixture
def bench(monkeypatch):
    """{module name: module} of experiments/bench."""
    monkeypatch.syspath_prepend(str(BENCH))
    return {name: importlib.import_module(name) for name in MODULES}


def test_floor_by_hand(bench):
    """The measured model: 12 KDA layers of 8 heads of 128 x 128, 4 MLA layers of 512 + 64, bfloat16."""
    floor, subject = bench["latency_floor"], bench["latency_subject"].Subject("hybrid", bench["latency_subject"].FULL)
    config, weights = subject.config, subject.shapes
    counts = count_parameters(config)
    assert 290e6 <= counts.total <= 330e6
    rows, length = 16, 2**20
    found = floor.step_bytes(weights, rows, length)
    assert found.recurrent == rows * 12 * 8 * 128 * 128 * 4 * 2
    assert found.convolution == rows * 12 * 3 * (3 * 1024) * 2 * 2
    assert found.latent == rows * length * 4 * (512 + 64) * 2
    assert found.total == pytest.approx(sum(found)) and found.milliseconds == pytest.approx(found.total / 4.3e9)
    # Two bytes a parameter; a few hundred thousand are kept in float32 (norms, convolutions, routers).
    everything = 2 * (counts.total - counts.embedding)
    assert everything < floor.weight_bytes(weights, 10**9) - 10**9 * 2 * config.hidden < 1.01 * everything
    one = 2 * (counts.active + config.hidden)
    assert one < floor.weight_bytes(weights, 1) < 1.01 * one


def test_experts_touched(bench):
    touched = bench["latency_floor"].touched_experts
    assert touched(24, 4, 1) == pytest.approx(4) and touched(24, 4, 2) == pytest.approx(4 + 4 * 20 / 24)
    assert touched(24, 4, 1000) == pytest.approx(24) and touched(8, 8, 1) == 8


def test_estimate_is_a_parabola(bench):
    rows = []

    class Bench:
        add = staticmethod(lambda **row: rows.append(row))

    seconds = lambda n: 3e-6 * n + 2e-12 * n * n
    bench["latency_prefill"]._estimate(Bench, "all-MLA", {n: seconds(n) for n in (2**16, 2**17, 2**18)}, 2**20)
    assert rows[0]["estimate_ms"] == pytest.approx(seconds(2**20) * 1e3) and rows[0]["estimated_from"] == [2**17, 2**18]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decode", "8192"], "'8192'; a case is LENGTHxBATCH"),
        (["--seconds", "decode"], "'decode'; it must be SECTION=N"),
        (["--plan", "3"], "argument --plan: invalid choice"),
        (["--plan", "1", "--sections", "decode"], "argument --sections: not allowed with argument --plan"),
    ],
)
def test_bad_arguments(bench, arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench["latency"].main(arguments)
    assert message in capsys.readouterr().err


def test_plans_are_everything_and_fit(bench):
    """Two calls of 500 s each: their sections' seconds fit, and none is in neither."""
    latency = bench["latency"]
    assert set().union(*latency.PLANS.values()) == set(latency.SECTIONS) == set(latency.SECONDS)
    assert all(sum(latency.SECONDS[name] for name in names) <= 500 for names in latency.PLANS.values())


def test_a_program_that_fails_leaves_the_others(bench, capsys):
    """While tracing or in the compiler; the good one runs, is kept, and the failures are rows."""
    subject, made = bench["latency_subject"], bench["latency_bench"].Bench(bench["latency_subject"].TINY, None)
    one = jax.ShapeDtypeStruct((2,), jnp.float32)
    bad = lambda x: x @ jnp.ones((3, 3))
    requests = {("bad",): subject.Request(bad, (one,), None), ("good",): subject.Request(lambda x: 2 * x, (one,), None, timed=False)}
    programs = made.compile(requests)
    assert set(programs) == {("good",)} and programs["good",].call(jnp.ones(2)).tolist() == [2, 2]
    assert "compile bad: TypeError" in made.rows[0]["failed"] and made.rows[1]["programs"] == 2
    assert made.compile({("good",): requests["good",]})["good",] is programs["good",] and made.rows[-1]["programs"] == 0


def test_a_section_that_fails_leaves_the_others(bench, capsys, monkeypatch):
    def broken(bench):
        raise RuntimeError("no such card")

    monkeypatch.setitem(bench["latency"].SECTIONS, "decode", broken)
    monkeypatch.setitem(bench["latency"].SECTIONS, "stable", lambda bench: bench.add(reached=True))
    assert bench["latency"].main(["--size", "tiny", "--sections", "decode", "stable", "kda", "--seconds", "kda=9999"]) == 1
    text = capsys.readouterr().out
    assert "the section: RuntimeError: no such card" in text and "reached True" in text
    assert "kda     left_out the section" in text  # less than 60% of its seconds are left: it would be half measured


def test_one_section_and_its_picture(bench, tmp_path, capsys, monkeypatch):
    """The smallest one for real, on two layers: its rows are in the file at once, and the table and the picture read them."""
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "rows.jsonl", tmp_path / "latency.png"
    tiny = bench["latency"].SIZES["tiny"]
    monkeypatch.setitem(bench["latency"].SIZES, "tiny", tiny._replace(config=tiny.config.replace(layers=2, pattern="KM")))
    for name in ("latency", "latency_subject"):
        monkeypatch.setattr(bench[name], "PATTERNS", {"hybrid": "KM"})
    seconds = ["--seconds", "scan=0", "stable=500", "--budget", "600"]
    assert bench["latency"].main(["--size", "tiny", "--sections", "stable", "scan", "--out", str(out), *seconds]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    (row,) = [row for row in rows if "last_over_first" in row]
    assert row["decoded"] == 32 and len(row["tokens_s"]) == 4 and min(row["tokens_s"]) > 0 and row["floor_last_over_first"] < 1
    text = capsys.readouterr().out
    assert "tokens/s, last window over first of 32" in text and "left out" in text
    decoded = {"section": "decode", "model": "hybrid", "length": 8192, "rows": 4, "ratio": 1.4, "ms": 2.0, "tokens_s": 2000.0}
    first = {"section": "first", "model": "hybrid", "prompt": 1024, "p50_ms": 5.0, "p95_ms": 6.0}
    compared = {**decoded, "section": "compare"}
    out.write_text("".join(json.dumps(row) + "\n" for row in [*rows, decoded, first, compared, {**compared, "model": "all-MLA"}]))
    assert bench["latency_picture"].main([str(out), "--out", str(picture)]) == 0 and picture.stat().st_size > 10_000
    out.write_text(json.dumps(rows[0]) + "\n")
    assert bench["latency_picture"].main([str(out)]) == 2 and "no measurement of latency.py" in capsys.readouterr().err


@pytest.mark.slow  # four minutes on two cores: 30 programs
def test_rehearsal(bench, capsys):
    bench["latency"].main(["--size", "tiny", "--seconds", *(f"{name}=600" for name in bench["latency"].SECTIONS), "--budget", "3000"])
    text = capsys.readouterr().out
    assert "failed" not in text and "left out" not in text
    for line in (
        "float32, chunks of 64",
        "cache, hybrid of all-MLA",
        "largest batch",
        "an ESTIMATE",
        "32 a call",
        "from float32",
        "KDA layers,",
    ):
        assert line in text, line
