"""Pictures of the evaluations as PNG files. Matplotlib is imported when one is drawn (`pip install 'moejax[plot]'`).

Every picture names its axes with units and shows what chance, or a reader of nothing, would score.

L: lengths, D: depths, K: tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..train.curriculum import length_name
from .needles import NeedleGrid
from .ruler import LLAMA_2_AT_4K, RulerTable

Path = str | os.PathLike
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
MARKERS = "osD^vP*X<"


@dataclasses.dataclass(frozen=True)
class Panel:
    """One set of axes of `latency_picture`: a line for each value of `by` in the rows that hold x and y.

    y, high: keys of the value drawn as a line and of the one drawn as a dash above it (p95); both times `scale`. reference: (value,
    label) of a dotted line across. log: a logarithmic y axis.
    """

    y: str
    ylabel: str
    x: str = "prompt"
    xlabel: str = "prompt (tokens)"
    by: str = "model"
    high: str | None = None
    scale: float = 1.0
    log: bool = True
    reference: tuple[float, str] | None = None


FIRST_TOKEN = Panel("p50_ms", "seconds to the first token, median (dash: p95)", high="p95_ms", scale=1e-3)


def needle_picture(path: Path, grid: NeedleGrid, *, title: str = "Needle in a haystack") -> None:
    """Depth by length as a heat map, and by length beside the readers of nothing."""
    with _figure(path, (11, 4.8), title) as figure:
        heat, line = figure.subplots(1, 2, width_ratios=(1.6, 1))
        shares = 100 * grid.accuracy.T
        image = _heat(heat, shares, [length_name(n) for n in grid.lengths], [f"{100 * d:g}" for d in grid.depths])
        heat.set(xlabel="length (tokens)", ylabel="depth of the needle (% of the text, 0: the beginning)")
        figure.colorbar(image, ax=heat, label="needles found (%)")
        line.plot(grid.lengths, shares.mean(axis=0), color="tab:blue", marker="o", label="model, mean of depths")
        line.plot(grid.lengths, 100 * grid.copy_last.mean(axis=1), color="tab:grey", marker="s", label="copy of the nearest value")
        line.plot(grid.lengths, 100 * grid.copy_any, color="black", linestyle="--", label="copy of any value")
        line.plot(grid.lengths, 100 * grid.guess, color="black", linestyle=":", label="guess of the digits")
        line.set(ylabel="needles found (%)", ylim=(-3, 103))
        _length_axis(line, grid.lengths, "length (tokens)")
        _legend(line, columns=2)


def ruler_picture(path: Path, table: RulerTable, *, title: str = "RULER") -> None:
    """Task by length as a heat map, the nearest copy's score in brackets; below, the mean of all tasks and the effective length."""
    with _figure(path, (2.6 + 1.15 * max(len(table.lengths), 4), 3.6 + 0.42 * len(table.tasks)), title) as figure:
        heat, line = figure.subplots(2, 1, height_ratios=(0.42 * len(table.tasks) + 0.6, 2.4))
        image = _heat(heat, 100 * table.score, [length_name(n) for n in table.lengths], table.tasks, below=100 * table.copy_last)
        heat.set(xlabel="length (tokens)")
        figure.colorbar(image, ax=heat, label="strings found (%)\n(in brackets: nearest copy)")
        order = np.argsort(table.lengths)
        lengths = [table.lengths[i] for i in order]
        line.plot(lengths, 100 * table.score.mean(axis=0)[order], color="tab:blue", marker="o", label="model, mean of tasks")
        line.plot(lengths, 100 * table.copy_last.mean(axis=0)[order], color="tab:grey", marker="s", label="copy of the nearest")
        line.plot(lengths, 100 * table.copy_any.mean(axis=0)[order], color="black", linestyle="--", label="copy of any candidate")
        effective = table.effective_length()
        name = "none" if effective is None else length_name(effective)
        line.axhline(LLAMA_2_AT_4K, color="tab:red", linestyle=":", label=f"threshold {LLAMA_2_AT_4K}; effective length: {name}")
        line.set(ylabel="mean of tasks (%)", ylim=(-3, 103))
        _length_axis(line, lengths, "length (tokens)")
        _legend(line, columns=2)


def extrapolation_picture(
    path: Path,
    curves: Mapping[str, Mapping[int, float | Sequence[float]]],
    *,
    trained_length: int,
    chance: float,
    copy: Mapping[int, float] | None = None,
    title: str = "Length extrapolation",
) -> None:
    """Accuracy against the evaluated length, for models that all were trained at one length.

    curves: name -> length -> a share in [0, 1], or one for each seed: the line is their mean, the band reaches from the lowest to the
    highest. chance: share by guessing; copy: length -> share of a baseline that copies.
    ValueError: no curve, a curve without a length.
    """
    if not curves or not all(curves.values()):
        raise ValueError(f"curves holds {[(name, len(curve)) for name, curve in curves.items()]}; needed: a name with at least one length.")
    with _figure(path, (8, 5), title) as figure:
        panel = figure.subplots()
        for number, (name, curve) in enumerate(curves.items()):
            at = sorted(curve)
            seeds = [100 * np.atleast_1d(curve[length]) for length in at]
            colour = COLOURS[number % len(COLOURS)]
            count = max(map(len, seeds))
            label = name if count == 1 else f"{name} ({count} seeds: mean, range)"
            panel.plot(at, [s.mean() for s in seeds], color=colour, marker=MARKERS[number % len(MARKERS)], label=label)
            if count > 1:
                panel.fill_between(at, [s.min() for s in seeds], [s.max() for s in seeds], color=colour, alpha=0.18, linewidth=0)
        panel.axvline(trained_length, color="tab:grey", linewidth=1, label=f"trained at {length_name(trained_length)}")
        panel.axhline(100 * chance, color="black", linestyle=":", label=f"chance ({100 * chance:.2g}%)")
        if copy is not None:
            panel.plot(sorted(copy), [100 * copy[n] for n in sorted(copy)], "k--", label="copy of the last value")
        panel.set(ylabel="answers right (%)", ylim=(-3, 103))
        _length_axis(panel, {trained_length}.union(*curves.values()), "length evaluated (tokens)")
        panel.grid(alpha=0.25)
        _legend(panel, columns=2)


def latency_picture(
    path: Path, rows: Sequence[Mapping[str, Any]], panels: Sequence[Panel] = (FIRST_TOKEN,), *, title: str = "Latency"
) -> None:
    """Lines of measured rows (dicts, as lines of a JSONL file), one set of axes for each panel, side by side.

    Of two rows with the same `by` and x the later counts. ValueError: no panel, or one for which no row holds both x and y.
    """
    if not panels:
        raise ValueError("panels is empty; give at least one.")
    for panel in panels:
        if not any(panel.x in row and panel.y in row for row in rows):
            raise ValueError(f"none of {len(rows)} rows holds {panel.x!r} and {panel.y!r}; needed for the panel {panel.ylabel!r}.")
    with _figure(path, (6 * len(panels), 4.8), title) as figure:
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _lines(axes, rows, panel)


def _lines(axes: Any, rows: Sequence[Mapping[str, Any]], panel: Panel) -> None:
    held = [row for row in rows if panel.x in row and panel.y in row]
    for number, name in enumerate(dict.fromkeys(row.get(panel.by) for row in held)):
        of_name = {row[panel.x]: row for row in held if row.get(panel.by) == name}
        at = sorted(of_name)
        colour = COLOURS[number % len(COLOURS)]
        values = [panel.scale * of_name[x][panel.y] for x in at]
        axes.plot(at, values, color=colour, marker=MARKERS[number % len(MARKERS)], label="" if name is None else str(name))
        above = {x: panel.scale * of_name[x][panel.high] for x in at if panel.high is not None and panel.high in of_name[x]}
        axes.plot(list(above), list(above.values()), color=colour, linestyle="none", marker="_", markersize=11)
    if panel.reference is not None:
        axes.axhline(panel.reference[0], color="black", linestyle=":", label=panel.reference[1])
    axes.set(ylabel=panel.ylabel)
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _length_axis(axes, {row[panel.x] for row in held}, panel.xlabel)
    axes.grid(alpha=0.25, which="both")
    if axes.get_legend_handles_labels()[1]:
        _legend(axes, columns=3)


def _heat(axes: Any, shares: np.ndarray, columns: Sequence[str], rows: Sequence[str], below: np.ndarray | None = None) -> Any:
    """shares: percents [rows, columns], written into the cells, with `below` in brackets."""
    image = axes.imshow(shares, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for (row, column), share in np.ndenumerate(shares):
        text = f"{share:.0f}" if below is None else f"{share:.0f} ({below[row, column]:.0f})"
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color="black" if share > 60 else "white")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    return image


def _legend(axes: Any, *, columns: int) -> None:
    """Under the axis label, where it hides no line."""
    from matplotlib.transforms import ScaledTranslation

    under = axes.transAxes + ScaledTranslation(0, -0.45, axes.figure.dpi_scale_trans)  # inches
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=under, ncols=columns)


def _length_axis(axes: Any, lengths: Collection[int], label: str) -> None:
    """A logarithmic axis; every length is named that is at least a tenth of the axis behind the last one named."""
    axes.set_xscale("log", base=2)
    apart, shown = (max(lengths) / min(lengths)) ** 0.0999, []
    for length in sorted(lengths):
        if not shown or length >= shown[-1] * apart:
            shown.append(length)
    axes.set_xticks(shown, [length_name(int(length)) for length in shown])
    axes.minorticks_off()
    axes.set_xlabel(label)


@contextlib.contextmanager
def _figure(path: Path, size: tuple[float, float], title: str) -> Iterator[Any]:
    """A figure of its own, written at the end; the caller's matplotlib backend and figures are left alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    yield figure
    figure.savefig(path, dpi=130)
