"""Pictures: files that open, with titles, axes in units, a legend and the line of chance."""

import numpy as np
import pytest

from moejax.evals.needles import NeedleGrid
from moejax.evals.ruler import RulerTable

matplotlib = pytest.importorskip("matplotlib", reason="needs the extra `plot`")

from moejax.evals import pictures  # noqa: E402

LENGTHS, DEPTHS = (1024, 4096, 100), (0.0, 0.25, 1.0)
GRID = NeedleGrid(LENGTHS, DEPTHS, np.eye(3), np.full((3, 3), 0.5), np.full(3, 1e-4), np.full(3, 0.25), np.full((3, 3), 5))
TABLE = RulerTable(("vt", "cwe"), (4096, 1024), np.array([[0.9, 1], [0.8, 0.95]]), np.zeros((2, 2)), np.ones((2, 2)), np.eye(2), 9)
ROWS = [
    {"model": "hybrid", "prompt": 1024, "p50_ms": 20.0, "p95_ms": 30.0, "speed": 5},
    {"model": "hybrid", "prompt": 4096, "p50_ms": 90.0},
    {"model": "all-MLA", "prompt": 1024, "p50_ms": 25.0},
    {"section": "other"},
    {"model": "hybrid", "prompt": 4096, "p50_ms": 80.0},
]
CURVES = {"hybrid": {256: [1.0, 0.9], 512: [0.5, 0.7]}, "rotary": {256: 1.0, 1024: 0.1}}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """draw(function, ...) -> (the texts of the figure, its axes), the file opened."""
    figures = []
    from matplotlib.figure import Figure

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **settings: (figures.append(self), save(self, *args, **settings))[1])

    def draw(function, *args, **settings):
        path = tmp_path / "picture.png"
        function(path, *args, **settings)
        image = matplotlib.image.imread(path)
        assert image.shape[0] > 400 and image.shape[1] > 600 and image.std() > 0.05
        (figure,) = figures
        return {text.get_text() for text in figure.findobj(matplotlib.text.Text)} - {""}, figure.axes

    return draw


def test_needle_grid(drawn):
    texts, axes = drawn(pictures.needle_picture, GRID, title="Needles of a model")
    assert {"Needles of a model", "length (tokens)", "needles found (%)", "1K", "4K", "copy of any value", "guess of the digits"} <= texts
    assert "depth of the needle (% of the text, 0: the beginning)" in texts and {"0", "25", "100"} <= texts
    assert np.array_equal(axes[0].images[0].get_array(), 100 * GRID.accuracy.T)  # depth down, length across
    assert np.allclose(axes[1].lines[0].get_ydata(), 100 / 3) and axes[1].lines[2].get_ydata().tolist() == [25] * 3


def test_ruler_table(drawn):
    texts, axes = drawn(pictures.ruler_picture, TABLE)
    assert {"RULER", "vt", "cwe", "90 (100)", "80 (0)", "4K", "1K", "mean of tasks (%)", "copy of the nearest"} <= texts
    assert "threshold 85.6; effective length: 1K" in texts
    model = axes[1].lines[0]
    assert model.get_xdata().tolist() == [1024, 4096] and model.get_ydata() == pytest.approx([97.5, 85.0])


def test_extrapolation(drawn):
    texts, axes = drawn(pictures.extrapolation_picture, CURVES, trained_length=256, chance=1 / 64, copy={256: 0.25, 1024: 0.25})
    assert {"trained at 256", "chance (1.6%)", "copy of the last value", "rotary", "hybrid (2 seeds: mean, range)"} <= texts
    assert {"length evaluated (tokens)", "answers right (%)", "256", "512", "1K"} <= texts
    assert axes[0].lines[0].get_ydata() == pytest.approx([95, 60]) and axes[0].lines[1].get_ydata() == pytest.approx([100, 10])


def test_latency(drawn):
    speed = pictures.Panel("speed", "decode (tokens/s)", log=False, reference=(3.0, "floor"))
    texts, axes = drawn(pictures.latency_picture, ROWS, (pictures.FIRST_TOKEN, speed), title="Latency on a test")
    assert {"Latency on a test", "hybrid", "all-MLA", "prompt (tokens)", "decode (tokens/s)", "floor"} <= texts
    first = axes[0].lines
    assert first[0].get_ydata() == pytest.approx([0.02, 0.08])  # of a row measured twice the later counts
    assert first[1].get_ydata() == pytest.approx([0.03]) and axes[0].get_yscale() == "log" and axes[1].get_yscale() == "linear"


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda path: pictures.extrapolation_picture(path, {}, trained_length=1, chance=0), "curves holds"),
        (lambda path: pictures.extrapolation_picture(path, {"a": {}}, trained_length=1, chance=0), "at least one length"),
        (lambda path: pictures.latency_picture(path, ROWS, ()), "panels is empty"),
        (lambda path: pictures.latency_picture(path, ROWS, (pictures.Panel("p99_ms", "p99"),)), "none of 5 rows holds"),
    ],
)
def test_bad_input_writes_nothing(draw, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        draw(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
