"""The picture of a curriculum run: needles by depth and length after each stage, accuracy, loss by position, training loss."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from moejax.train.curriculum import Curriculum, length_name


def draw(path: pathlib.Path, results: list[dict[str, Any]], metrics: list[dict[str, Any]], curriculum: Curriculum) -> None:
    """Write a PNG. results, metrics: the lines of results.jsonl and metrics.jsonl. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure: Any = plt.figure(figsize=(13, 7), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.3))
    _grids(upper, results)
    left, middle, right = lower.subplots(1, 3)
    _accuracy(left, results)
    _positions(middle, results)
    _training(right, metrics, curriculum)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _grids(figure: Any, results: list[dict[str, Any]]) -> None:
    """One heat map a moment: depth down, length across."""
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    image = None
    for panel, result in zip(panels, results, strict=True):
        grid = result["needles"]
        found = np.array(grid["accuracy"]).T
        image = panel.imshow(found, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (depth, length), value in np.ndenumerate(found):
            panel.text(length, depth, f"{value:.0%}", ha="center", va="center", fontsize=7)
        panel.set_xticks(range(len(grid["lengths"])), [length_name(length) for length in grid["lengths"]])
        panel.set_yticks(range(len(grid["depths"])), [f"{depth:.0%}" for depth in grid["depths"]])
        panel.set_title("before training" if result["step"] == 0 else f"after stage {result['after']}", fontsize=9)
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(panels), label="values found")


def _accuracy(panel: Any, results: list[dict[str, Any]]) -> None:
    for result in results:
        grid = result["needles"]
        panel.plot(grid["lengths"], np.mean(grid["accuracy"], axis=1), marker="o", label=result["after"])
    first = results[0]["needles"]
    panel.plot(first["lengths"], np.mean(first["copy_last"], axis=1), color="black", linestyle=":", label="copy nearest")
    panel.set(xscale="log", xlabel="length (tokens)", ylabel="needles found", ylim=(-0.03, 1.03))
    panel.legend(fontsize=7, title="after stage", title_fontsize=7)


def _positions(panel: Any, results: list[dict[str, Any]]) -> None:
    for result in results[1:]:
        starts = [int(bucket.split("-")[0]) for bucket in result["positions"]]
        bits = [entry["bits"] for entry in result["positions"].values()]
        panel.plot(np.maximum(starts, 1), bits, marker=".", label=result["after"])
    panel.set(xscale="log", xlabel="position (tokens)", ylabel="bits a token, held-out long files")
    panel.legend(fontsize=7, title="after stage", title_fontsize=7)


def _training(panel: Any, metrics: list[dict[str, Any]], curriculum: Curriculum) -> None:
    panel.plot([m["step"] for m in metrics], [m["loss"] / np.log(2) for m in metrics], linewidth=0.8)
    for seam in curriculum.seams():
        panel.axvline(seam, color="grey", linestyle=":")
    panel.set(xlabel="step (dotted: a seam)", ylabel="training loss, bits a target")
