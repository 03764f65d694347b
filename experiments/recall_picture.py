"""The picture of recall results: what each model reaches, how it gets there, and recall beyond the trained length.

python -m experiments.recall_picture F/results.json [G/results.json ...] --out recall.png
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from moejax.evals.pictures import extrapolation_picture


@dataclasses.dataclass(frozen=True)
class Picture:
    """Draw results of experiments.recall or experiments.recall_suite. Needs matplotlib."""

    results: tyro.conf.Positional[tuple[Path, ...]]
    """results.json files; their runs are put together."""
    out: Path = Path(".")
    """Folder of the pictures."""


def main(picture: Picture) -> None:
    runs = [run for path in picture.results for run in json.loads(path.read_text())["runs"] if run["status"] == "done"]
    if not runs:
        raise ValueError(f"{', '.join(map(str, picture.results))}: no run is done; nothing to draw.")
    draw(runs, picture.out)


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """recall.png into `out`, and extrapolation.png when a run was scored at several lengths. runs: of results.json, status done."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5 * len(tasks), 4), layout="constrained", squeeze=False)
    for panel, task in zip(axes[0], tasks, strict=True):
        _curves(panel, task, [run for run in runs if run["task"] == task])
    figure.savefig(out / "recall.png", dpi=130)
    plt.close(figure)
    if longer := [run for run in runs if len(run["scores"]) > 1]:
        first, curves = longer[0], {name: curve for run in longer for name, curve in by_length(run).items()}
        copies = {score["length"]: score["copy"] for score in first["scores"]}
        title = f"Recall beyond the trained length ({first['task']}, 2 layers)"
        sizes: dict[str, Any] = {"trained_length": first["length"], "chance": first["chance"], "copy": copies}
        extrapolation_picture(out / "extrapolation.png", curves, title=title, **sizes)


def by_length(run: dict[str, Any]) -> dict[str, dict[int, list[float]]]:
    """name -> length -> accuracy of each seed; rotary models have a second name, for interpolated positions."""
    curves: dict[str, dict[int, list[float]]] = {}
    for score in run["scores"]:
        name = run["mixers"] + ("" if score["rotary_scale"] == 1 else ", interpolated")
        curves.setdefault(name, {})[score["length"]] = score["accuracy"]
    return curves


def _curves(panel: Any, task: str, runs: list[dict[str, Any]]) -> None:
    """Training accuracy on fresh rows, and the final scores: one dot a seed."""
    for run in runs:
        curve = run["curve"]
        steps = run["steps"] * (np.arange(len(curve)) + 1) / len(curve)
        line = panel.plot(steps, curve, linewidth=1, label=f"{run['mixers']}: {run['mean']:.3f}")[0]
        panel.scatter([run["steps"]] * len(run["accuracy"]), run["accuracy"], color=line.get_color(), s=12, zorder=3)
    panel.axhline(runs[0]["chance"], color="black", linestyle=":", linewidth=1, label="chance")
    if runs[0]["copy"] is not None:
        panel.axhline(runs[0]["copy"], color="grey", linestyle="--", linewidth=1, label="copy the last value")
    first = runs[0]
    panel.set(title=f"{task}, T = {first['length']}, {first['seeds']} seeds", xlabel="step", ylabel="answers right", ylim=(-0.03, 1.03))
    panel.legend(fontsize=7)


if __name__ == "__main__":
    main(tyro.cli(Picture))
