"""The end of a run: figures as pictures and as one table. Matplotlib is imported on first use.

Shapes: S recorded steps, L MoE layers, E experts.
"""

import pathlib
from typing import Any

import numpy as np

from .tracker import Tracker

TAIL = 10  # last steps whose balance figures are averaged: one step's counts are noisy
PANELS = 12  # layers shown in the picture of expert loads, evenly spaced


def balance_figures(history: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{"first": ..., "last": ...} from the metrics of a run: step 1, and the mean of its last 10 steps.

    Each: max_violation (largest load over the mean, minus 1) as the layers' mean and the worst layer, load_cv and its
    sampling floor as the layers' means, dead_experts over all layers. Empty for a model without experts.
    """
    if not history or "max_violation" not in history[0]:
        return {}

    def figures(records: list[dict[str, Any]]) -> dict[str, float]:
        of = {n: np.array([r[n] for r in records], float) for n in ("max_violation", "load_cv", "load_cv_floor")}
        return {
            "max_violation": float(of["max_violation"].mean()),
            "max_violation_worst_layer": float(of["max_violation"].mean(axis=0).max()),
            "load_cv": float(of["load_cv"].mean()),
            "load_cv_floor": float(of["load_cv_floor"].mean()),
            "dead_experts": float(np.array([r["dead_experts"] for r in records]).sum(axis=1).mean()),
        }

    return {"first": figures(history[:1]), "last": figures(history[-TAIL:])}


def draw(folder: pathlib.Path, tracker: Tracker, baselines: dict[str, float]) -> list[str]:
    """Write loss.png and expert_load.png into `folder`; -> their names. ImportError without matplotlib.

    baselines: bits per byte of the count models by name.
    """
    import matplotlib

    matplotlib.use("Agg")
    history = tracker.metrics.read()
    names = []
    if history:
        _draw_loss(folder / "loss.png", history, tracker.heldout.read(), baselines)
        names.append("loss.png")
    loads = tracker.load.read()
    if loads:
        _draw_loads(folder / "expert_load.png", loads, history)
        names.append("expert_load.png")
    return names


def _draw_loss(path: pathlib.Path, history: list, heldout: list, baselines: dict[str, float]) -> None:
    import matplotlib.pyplot as plt

    steps = np.array([r["step"] for r in history])
    bits = np.array([float(r["loss"]) for r in history]) / np.log(2)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, bits, color="tab:blue", alpha=0.3, linewidth=1)
    width = max(1, len(bits) // 40)
    smooth = np.convolve(bits, np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :], smooth, color="tab:blue", label=f"training, mean of {width} steps")
    axes.plot(
        [r["step"] for r in heldout],
        [r["bits_per_byte"] for r in heldout],
        "o",
        color="black",
        label="held out",
    )
    for (name, value), style in zip(baselines.items(), (":", "--", "-."), strict=False):
        axes.axhline(value, color="tab:red", linestyle=style, label=f"{name} counts, held out: {value:.2f}")
    axes.set(xlabel="step", ylabel="bits a byte", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_loads(path: pathlib.Path, loads: list, history: list) -> None:
    import matplotlib.pyplot as plt

    counts = np.array([r["load"] for r in loads], float)  # [S,L,E]
    relative = counts / np.maximum(counts.mean(axis=-1, keepdims=True), 1e-9)
    layers = np.unique(np.linspace(0, counts.shape[1] - 1, PANELS).round().astype(int))
    rows = -(-len(layers) // 4)
    figure = plt.figure(figsize=(13, 2.4 * rows + 2.8), layout="constrained")
    grid = figure.add_gridspec(rows + 1, 4)
    first, last = loads[0]["step"], loads[-1]["step"]
    image, panels = None, []
    for index, layer in enumerate(layers):
        axes = figure.add_subplot(grid[index // 4, index % 4])
        image = axes.imshow(
            relative[:, layer].T,
            aspect="auto",
            origin="lower",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            interpolation="nearest",
            extent=(first - 0.5, last + 0.5, -0.5, counts.shape[2] - 0.5),
        )
        axes.set_title(f"MoE layer {layer + 1}", fontsize=9)
        axes.set(xlabel="step", ylabel="expert" if index % 4 == 0 else "")
        panels.append(axes)
    assert image is not None
    figure.colorbar(image, ax=panels, label="load / mean load", shrink=0.8)
    steps = [r["step"] for r in history]
    for column, (name, label) in enumerate((("max_violation", "MaxVio"), ("load_cv", "load CV"))):
        axes = figure.add_subplot(grid[rows, 2 * column : 2 * column + 2])
        axes.plot(steps, [r[name] for r in history], linewidth=0.8)
        if name == "load_cv":
            axes.plot(steps, [np.mean(r["load_cv_floor"]) for r in history], "k--", label="sampling floor")
            axes.legend(frameon=False)
        axes.set(xlabel="step", ylabel=f"{label}, a line a layer", ylim=(0, None))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary of a run as lines of text. Its fields, as summary.json has them:

    preset; step of steps done; ended_by: why it ended early, else "". heldout, bits per byte on the held-out rows: before
    (None when not scored) and after training, unigram and bigram count models. balance: see `balance_figures`.
    skipped_updates: not finite, since step 1. speed, of this process: tokens_per_second (median step), mfu (model FLOPs over
    peak_flops, FLOP/s from peak_source), compile_seconds and compiles of the train step (0 when no step was done),
    cache_hits (programs taken from the compile cache), seconds in all. sample: prompt and continuation, "" for none.
    corpus: the `Manifest` of the text. pictures: names of the files drawn.
    """
    held, lines = summary["heldout"], []
    done = f"{summary['step']} of {summary['steps']} steps"
    early = f", ended early by {summary['ended_by']}" if summary["ended_by"] else ""
    lines.append(f"{summary['preset']}: {done}{early}")
    lines.append("")
    lines.append("Held-out text, bits per byte (less is better)")
    rows = [("before training", held["before"]), ("after training", held["after"])]
    rows += [(f"{name} counts", held[name]) for name in ("unigram", "bigram")]
    lines += [f"  {name:<18}{value:8.3f}" for name, value in rows if value is not None]
    if held["after"] is not None:
        beaten = held["after"] < held["bigram"]
        lines.append(
            f"  The model is {abs(1 - held['after'] / held['bigram']):.1%} "
            + ("below the bigram counts." if beaten else "ABOVE the bigram counts: it has not learned enough yet.")
        )
    if summary["balance"]:
        lines += ["", "Load of the experts            step 1   last 10 steps"]
        names = (
            ("max_violation", "MaxVio, mean of layers"),
            ("max_violation_worst_layer", "MaxVio, worst layer"),
            ("load_cv", "load CV"),
            ("load_cv_floor", "  its sampling floor"),
            ("dead_experts", "experts without a token"),
        )
        first, last = summary["balance"]["first"], summary["balance"]["last"]
        lines += [f"  {label:<26}{first[name]:9.3f}{last[name]:16.3f}" for name, label in names]
    speed = summary["speed"]
    times = "" if speed["compiles"] == 1 else f", {speed['compiles']} compiles"
    compiled = f", of which the train step's compile {speed['compile_seconds']:.0f} s{times}" if speed["compiles"] else ""
    lines += [
        "",
        f"Speed: {speed['tokens_per_second']:,.0f} tokens/s, MFU {speed['mfu']:.1%} of "
        f"{speed['peak_flops'] / 1e9:,.0f} GFLOP/s ({speed['peak_source']})",
        f"Time: {speed['seconds']:.0f} s in all{compiled}",
    ]
    if summary["sample"]:
        # Sampled bytes may be anything, terminal commands too.
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in summary["sample"])
        lines += ["", "A sampled continuation", *(f"  | {line}" for line in shown.split("\n"))]
    return lines
