"""The report of a run: complete, self-contained, bounded in size, and honest about what is missing."""

import base64
import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from moejax.train import html_report, report_panels
from moejax.train.html_report import PANELS, main, page, write_report
from moejax.train.run_history import Thinned, read_history
from moejax.train.sinks import POSITION_BUCKETS

EVIL = "<script>alert('x')</script> & \"quoted\""
LAYERS, EXPERTS, STEPS = 93, 896, 40


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 93 layers of 896 experts with every file, one step whose loss is not finite, and text that needs escaping."""
    folder, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(0)

    def metrics(step):
        tokens = rng.integers(1, 900, (2, POSITION_BUCKETS))
        tokens[:, 14:] = 0
        record = {"step": step, "loss": "nan" if step == 7 else 4.0 / step, "skipped": int(step == 7)}
        record |= {"grad_norm": 1.0, "learning_rate": 1e-3}
        record |= {name: rng.random(LAYERS).tolist() for name in ("max_violation", "load_cv", "load_cv_floor", "bias_max", "dead_experts")}
        record |= {"bias_min": (-rng.random(LAYERS)).tolist(), "token_groups": tokens.ravel().tolist()}
        record |= {"loss_groups": (tokens * np.array([[2.0], [3.0]])).ravel().tolist()}
        return record | {"wall": {"seconds": 0.5, "data_wait": 0.05, "checkpoint": 0.0, "tokens_per_second": 1e4, "mfu": 0.4}}

    def probe(step):
        record = {"step": step, "state_norm": rng.random((70, 96)).tolist(), "half_life_histogram": np.full((70, 24), 1 / 24).tolist()}
        record |= {"half_life_above_1k": [0.5] * 70, "decay_at_floor": [0.01] * 70, "beta_mean": [0.5] * 70, "mla_gate_mean": [0.5] * 23}
        record |= {"depth_weights": np.full((187, 9), 1 / 9).tolist(), "depth_entropy": [2.0] * 187, "hidden_rms": [1.0] * LAYERS}
        return record | {"weight_rms": {"head": 0.02, "depth_query": 0.0}}

    lines(folder / "metrics.jsonl", [metrics(step) for step in range(1, STEPS + 1)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo')  # cut short by a crash
    loads = rng.integers(0, 4000, (5, LAYERS, EXPERTS))
    lines(folder / "expert_load.jsonl", [{"step": 10 * i, "load": load.tolist()} for i, load in enumerate(loads)])
    lines(folder / "heldout.jsonl", [{"step": 0, "bits_per_byte": 8.0}, {"step": STEPS, "bits_per_byte": 2.5}])
    lines(folder / "probes.jsonl", [probe(step) for step in (1, 20, 40)])
    events = [{"event": "checkpoint_saved", "step": step} for step in range(250)]
    alarm = {"version": 1, "run": "c0ffee", "time": "2026-11-30T09:00:00.123+00:00", "event": "alarm", "step": 40, "reason": EVIL}
    lines(folder / "events.jsonl", [*events, alarm])
    (folder / "summary.json").write_text(json.dumps({"step": 40, "speed": {"mfu": 0.4321}}))
    config = {"config": {"note": EVIL}, "domains": ["code", "prose"], "model": {"residual": "block"}, "versions": {"jax": "9.9"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_report_of_a_large_run(folder):
    path = write_report(folder)
    assert path == folder / "report.html" and not list(folder.glob("*.part"))
    text = path.read_text(encoding="utf-8")
    print(f"93 layers of 896 experts: {len(text) / 1e6:.2f} MB")
    assert len(text.encode()) < 3_000_000
    found = Page(text)
    pictures = [link for link in found.links if link.startswith("data:image/png;base64,")]
    assert len(pictures) == len(PANELS)
    for picture in pictures:
        assert base64.b64decode(picture.split(",")[1])[:8] == b"\x89PNG\r\n\x1a\n"
    assert all(link.startswith(("data:", "#")) for link in found.links) and not {"script", "link", "iframe"} & set(found.tags)
    assert "default-src 'none'" in text and not re.search(r"https?://", text)
    assert "No data" not in text
    assert found.text.count(EVIL) == 2 and "<script" not in text  # as text, in events and settings
    assert "The last 200 of 251." in text and "checkpoint_saved 250, alarm 1" in text
    for words in (
        "last step40",
        "code",
        "versions.jax9.9",
        "speed.mfu0.4321",
        "402026-11-30T09:00:00alarmreason: ",
        "8.0000 and 2.5000 bits a byte",
        "10.00% of all steps",
    ):
        assert words in found.text


def test_history_reads_what_was_written(folder):
    run = read_history(folder)
    assert run.steps.tolist() == list(range(1, STEPS + 1)) and not run.missing
    loss = run.series("loss")
    assert np.isnan(loss[6]) and loss[7] == 0.5 and np.isfinite(np.delete(loss, 6)).all()
    nats, tokens = run.groups()
    np.testing.assert_allclose(nats.sum((0, 2)) / tokens.sum((0, 2)), [2.0, 3.0])
    assert [r["step"] for r in run.loads] == [0, 20, 40] and run.domains(3) == ["code", "prose", "domain 2"]
    steps, norms = run.probe("state_norm")
    assert steps.tolist() == [1, 20, 40] and norms.shape == (3, 70, 96) and run.probe("nothing") is None
    assert run.series("wall.mfu").shape == (STEPS,) and run.series("nothing") is None


def test_missing_files_are_named(folder, tmp_path):
    """Each panel on its own: without its file it says so, and the others' are not touched."""
    with pytest.raises(ValueError, match=r"is no run folder: it has neither config\.json nor any of metrics\.jsonl"):
        read_history(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    run = read_history(tmp_path)
    assert all(panel.draw(run) is None for panel in PANELS)
    text = page(run)
    for panel in PANELS:
        assert html.escape(panel.title) in text
    assert text.count("No data") == len(PANELS) + 2 and "metrics.jsonl, expert_load.jsonl, heldout.jsonl" in text
    lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0, "wall": {"seconds": 1.0}}])
    lines(tmp_path / "events.jsonl", [{"event": "stage", "step": 1}])
    (tmp_path / "heldout.jsonl").write_text('{"step": 0}\nrubbish\n')
    with pytest.raises(ValueError, match=r"heldout\.jsonl, line 2, is not JSON"):
        read_history(tmp_path)
    (tmp_path / "heldout.jsonl").unlink()
    run = read_history(tmp_path)
    drawn = [panel.draw.__name__ for panel in PANELS if panel.draw(run) is not None]
    assert drawn == ["loss", "step_time"]


def test_long_runs_are_thinned_without_bias():
    """5,000 steps in at most 1,000 points: means of equal stretches; what is not finite is left out, of a ratio on both sides."""
    thinned = Thinned(1000)
    for step in range(1, 5001):
        nats = [2.0 * step, "nan" if step % 7 == 0 else 0.0]
        thinned.add({"step": step, "x": "inf" if step == 9 else float(step), "loss_groups": nats, "token_groups": [step, 0]})
    steps, x = thinned.steps, thinned.means("x")
    assert 500 <= len(steps) <= 1000 and steps[-1] == 5000 and (np.diff(steps) > 0).all()
    width = int(np.diff(steps)[0])
    assert x[-1] == np.arange(steps[-2] + 1, 5001).mean()
    first = np.arange(1, width + 1.0)
    assert x[0] == first[first != 9].mean() and x[2] == np.arange(2 * width + 1, 3 * width + 1).mean()
    nats, tokens = thinned.means("loss_groups"), thinned.means("token_groups")
    np.testing.assert_allclose(nats[:, 0] / tokens[:, 0], 2.0)
    thinned.add({"step": 5001, "y": [1.0, 2.0]})
    assert np.isnan(thinned.means("y")[:-1]).all() and thinned.means("z") is None


def test_changed_sizes_do_not_break_a_report():
    """A mixture that gains a domain in a later stage."""
    thinned = Thinned(4)
    for step in range(8):
        thinned.add({"step": step, "groups": [1.0] * (1 if step < 5 else 2)})
    assert thinned.means("groups").shape[1] == 2


def test_smoothing_looks_back_and_skips_gaps():
    values = np.array([1.0, 3.0, np.nan, 5.0, 7.0])
    np.testing.assert_allclose(report_panels._smooth(values, 2), [1.0, 2.0, 3.0, 5.0, 6.0])
    np.testing.assert_allclose(report_panels._smooth(values, 9), [1.0, 2.0, 2.0, 3.0, 4.0])


def test_command_line(tmp_path, capsys, monkeypatch):
    assert main([]) == 2 and "usage: python -m moejax.train.html_report RUN_FOLDER" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2 and "error:" in capsys.readouterr().err
    monkeypatch.setattr(html_report, "PANELS", ())
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path)]) == 0 and capsys.readouterr().out.strip() == str(tmp_path / "report.html")
