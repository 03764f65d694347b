"""The pictures of a run's report: each a function of the run's history that gives a matplotlib figure, or None without data.

Matplotlib is imported on first use. Shapes: S points, L MoE layers, E experts, N KDA layers, G heads, D domains, P position buckets.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from .probes import HALF_LIFE_EDGES
from .run_history import RunHistory
from .sinks import relative_load

WIDTH = 9.5  # inches
DPI = 100
AGES = ("first", "middle", "last")
MOST_LINES = 12  # of a legend


def _figure(rows: int = 1, columns: int = 1, height: float = 3.2, **options: Any):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for ax in axes.flat:
        ax.tick_params(labelsize=8, which="both")
        ax.xaxis.label.set_size(9)
        ax.yaxis.label.set_size(9)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def png(figure: Any) -> bytes:
    """A figure as PNG of 256 colours: a third of the size of a full one, and nobody can tell."""
    from PIL import Image

    for ax in figure.axes:
        ax.title.set_size(10)
    full, small = io.BytesIO(), io.BytesIO()
    figure.savefig(full, format="png", dpi=DPI)
    Image.open(full).convert("RGB").quantize(256).save(small, format="png", optimize=True)
    return small.getvalue()


def _ages(count: int) -> list[tuple[str, int]]:
    """Names and indices of up to three points in time."""
    picks = sorted({0, (count - 1) // 2, count - 1})
    names = {1: AGES[-1:], 2: AGES[::2], 3: AGES}[len(picks)]
    return list(zip(names, picks, strict=True))


def _colors(count: int) -> list:
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0.85, 0.1, count)]  # dark is late: it reads best on white


def _legend(ax, **options: Any) -> None:
    ax.legend(frameon=False, fontsize=8, **options)


def _band(ax, steps: np.ndarray, values: np.ndarray, label: str, color: str) -> None:
    """values [S,n]: the mean over n as a line, the smallest to the largest as a band."""
    values = values.reshape(len(values), -1)
    kept = np.isfinite(values).any(axis=1)
    steps, values = steps[kept], values[kept]
    ax.plot(steps, np.nanmean(values, axis=1), color=color, linewidth=1.2, label=label)
    if values.shape[1] > 1:
        ax.fill_between(steps, np.nanmin(values, axis=1), np.nanmax(values, axis=1), color=color, alpha=0.18, linewidth=0)


def _image(ax, values: np.ndarray, label: str, *, extent=None, **options: Any) -> None:
    """values [rows, columns], the first row at the top, with a colour bar."""
    options = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis", **options}
    ax.spines[["top", "right"]].set_visible(True)
    drawn = ax.imshow(values, extent=extent, **options)
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _over_time(steps: np.ndarray, rows: int) -> tuple[float, float, float, float]:
    """The extent of an image [rows, S], rows from 0 at the top."""
    half = (steps[-1] - steps[0]) / max(2 * (len(steps) - 1), 1) or 0.5
    return steps[0] - half, steps[-1] + half, rows - 0.5, -0.5


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean of the finite among the last `width` values [S]."""
    finite = np.isfinite(values)
    total, count = np.cumsum(np.where(finite, values, 0)), np.cumsum(finite)
    total[width:], count[width:] = total[width:] - total[:-width], count[width:] - count[:-width]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def loss(run: RunHistory):
    values, held = run.series("loss"), [r for r in run.heldout if "bits_per_byte" in r]
    if values is None and not held:
        return None
    figure, ((left, right),) = _figure(1, 2)
    if values is not None:
        width = max(1, len(values) // 50)
        left.plot(run.steps, values, color="tab:blue", alpha=0.3, linewidth=0.8, label="as recorded")
        left.plot(run.steps, _smooth(values, width), color="tab:blue", linewidth=1.5, label=f"mean of {width} points")
        _legend(left)
    left.set(xlabel="step", ylabel="nats a token", title="training")
    if held:
        right.plot([r["step"] for r in held], [r["bits_per_byte"] for r in held], "o-", color="black", markersize=3.5, linewidth=1)
    else:
        right.text(0.5, 0.5, "no held-out score yet", ha="center", va="center", transform=right.transAxes, color="gray")
    right.set(xlabel="step", ylabel="bits a byte", title="held out")
    return figure


def loss_by_domain(run: RunHistory):
    groups = run.groups()
    if groups is None:
        return None
    nats, tokens = (x.sum(axis=2) for x in groups)  # [S,D]
    names = run.domains(nats.shape[1])
    order = np.argsort(-tokens.sum(axis=0))[:MOST_LINES]
    figure, ((left, right),) = _figure(1, 2)
    width = max(1, len(nats) // 50)
    for number, domain in enumerate(order):
        if tokens[:, domain].any():
            counted = _smooth(tokens[:, domain], width)
            rate = _smooth(nats[:, domain], width) / np.where(counted > 0, counted, np.nan)
            left.plot(run.steps, rate, linewidth=1.3, color=f"C{number % 10}", label=names[domain])
    shares = np.stack([_smooth(tokens[:, domain], width) for domain in order])
    total = np.maximum(_smooth(tokens.sum(axis=1), width), 1e-9)
    right.stackplot(run.steps, 100 * shares / total, colors=[f"C{n % 10}" for n in range(len(order))], alpha=0.75)
    left.set(xlabel="step", ylabel="nats a token", title=f"loss, mean of {width} points by tokens")
    right.set(xlabel="step", ylabel="% of the targets", title="share of each domain", ylim=(0, 100))
    _legend(left)
    return figure


def loss_by_position(run: RunHistory):
    groups = run.groups()
    if groups is None:
        return None
    nats, tokens = (x.sum(axis=1) for x in groups)  # [S,P]
    used = np.flatnonzero(tokens.sum(axis=0))
    if not used.size:
        return None
    figure, ((left, right),) = _figure(1, 2, width_ratios=(1, 1.25))
    parts = np.array_split(np.arange(len(nats)), min(10, len(nats)))
    ages = _ages(len(parts))
    for (name, index), color in zip(ages, _colors(len(ages)), strict=True):
        part = parts[index]
        total = tokens[part].sum(axis=0)
        seen = np.flatnonzero(total)
        label = f"{name} tenth" if len(parts) == 10 else name
        left.plot(2.0**seen, nats[part].sum(axis=0)[seen] / total[seen], "o-", color=color, markersize=3, linewidth=1.2, label=label)
    left.set_xscale("log", base=2)
    left.set(xlabel="position in the segment, from 2^n to 2^(n+1)", ylabel="nats a token", title="by position, over the run")
    _legend(left)
    rows = slice(used[0], used[-1] + 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = np.where(tokens > 0, nats / tokens, np.nan)[:, rows].T
    left_edge, right_edge, *_ = _over_time(run.steps, 1)
    _image(right, rates, "nats a token", origin="lower", extent=(left_edge, right_edge, used[0] - 0.5, used[-1] + 0.5))
    right.set(xlabel="step", ylabel="log2 of the position", title="by position and step")
    return figure


def expert_load(run: RunHistory):
    loads = [r for r in run.loads if np.ndim(r["load"]) == 2 and np.size(r["load"])]
    if not loads:
        return None
    layers = np.shape(loads[-1]["load"])[0]
    figure, axes = _figure(len(loads), 1, height=0.6 + len(loads) * (1.5 + min(layers, 96) / 60))
    for ax, record in zip(axes[:, 0], loads, strict=True):
        _image(ax, relative_load(record["load"]), "load / mean load", cmap="RdBu_r", vmin=0, vmax=2)
        ax.set(ylabel="MoE layer", title=f"step {record['step']}: tokens of each expert over its layer's mean (white: balanced)")
    axes[-1, 0].set(xlabel="expert")
    return figure


def balance(run: RunHistory):
    violation, cv, floor = (run.series(name) for name in ("max_violation", "load_cv", "load_cv_floor"))
    if violation is None or cv is None:
        return None
    figure, axes = _figure(2, 2, height=5.6)
    _band(axes[0, 0], run.steps, violation, "mean of the layers; band: least to most", "tab:blue")
    axes[0, 0].set(ylabel="max load / mean load - 1", title="MaxVio: the most loaded expert", ylim=(0, None))
    _band(axes[0, 1], run.steps, cv, "load CV, mean of the layers; band: least to most", "tab:blue")
    if floor is not None:
        axes[0, 1].plot(run.steps, np.nanmean(floor.reshape(len(floor), -1), axis=1), "k--", linewidth=1, label="sampling floor")
    axes[0, 1].set(ylabel="standard deviation / mean", title="spread of the loads", ylim=(0, None))
    _image(axes[1, 0], violation.reshape(len(violation), -1).T, "MaxVio", extent=_over_time(run.steps, violation[0].size), vmin=0)
    axes[1, 0].set(ylabel="MoE layer", title="MaxVio by layer")
    dead = run.series("dead_experts")
    if dead is not None:
        axes[1, 1].plot(run.steps, dead.reshape(len(dead), -1).sum(axis=1), color="tab:red", linewidth=1)
    axes[1, 1].set(ylabel="experts of all layers", title="experts without a token in a step", ylim=(0, None))
    for ax in axes.flat:
        ax.set(xlabel="step")
    for ax in axes[0]:
        _legend(ax)
    return figure


def bias_drift(run: RunHistory):
    low, high = run.series("bias_min"), run.series("bias_max")
    if low is None or high is None:
        return None
    figure, ((left, right),) = _figure(1, 2, width_ratios=(1, 1.25))
    _band(left, run.steps, high, "largest bias: mean of the layers and band", "tab:red")
    _band(left, run.steps, low, "smallest bias: mean of the layers and band", "tab:blue")
    left.set(xlabel="step", ylabel="selection bias", title="drift, in units of the router's score")
    _legend(left)
    span = (high - low).reshape(len(high), -1)
    _image(right, span.T, "largest - smallest bias", extent=_over_time(run.steps, span.shape[1]))
    right.set(xlabel="step", ylabel="MoE layer", title="range by layer")
    return figure


def state_norms(run: RunHistory):
    found = run.probe("state_norm")
    if found is None:
        return None
    steps, values = found  # [S,N,G]
    figure, ((left, right),) = _figure(1, 2)
    _image(left, values[-1], "Frobenius norm", vmin=0)
    left.set(xlabel="value head", ylabel="KDA layer", title=f"recurrent state at the end of the row, step {steps[-1]}")
    _depth_lines(right, steps, values.mean(axis=2), "KDA layer")
    right.set(xlabel="step", ylabel="Frobenius norm, mean of the heads", title="by layer over the run", ylim=(0, None))
    return figure


def _depth_lines(ax, steps: np.ndarray, values: np.ndarray, label: str) -> None:
    """A line a layer of values [S,n], the colour being the depth."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    depth = np.arange(values.shape[1])
    scale = ScalarMappable(Normalize(0, max(len(depth) - 1, 1)), "viridis")
    for layer, color in zip(depth, scale.to_rgba(depth), strict=True):
        ax.plot(steps, values[:, layer], linewidth=1, color=color)
    bar = ax.figure.colorbar(scale, ax=ax, pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.ax.yaxis.get_major_locator().set_params(integer=True)


def decays(run: RunHistory):
    found = run.probe("half_life_histogram")
    if found is None:
        return None
    steps, values = found  # [S,N,Q]
    figure, ((left, middle, right),) = _figure(1, 3, height=3.4, width_ratios=(1.25, 1, 1))
    exponents = np.log2(HALF_LIFE_EDGES)
    _image(left, 100 * values[-1], "% of the layer's channels", extent=(exponents[0], exponents[-1], values.shape[1] - 0.5, -0.5))
    left.set(xlabel="log2 of the half-life in tokens", ylabel="KDA layer", title=f"by layer, step {steps[-1]}")
    ages = _ages(len(steps))
    for (_, index), color in zip(ages, _colors(len(ages)), strict=True):
        middle.stairs(100 * values[index].mean(axis=0), exponents, color=color, linewidth=1.4, label=f"step {steps[index]}")
    middle.set(xlabel="log2 of the half-life in tokens", ylabel="% of all channels", title="all layers")
    ends = (("half_life_above_1k", "half-life over 1,000 tokens", "tab:green"), ("decay_at_floor", "at the lower bound", "tab:red"))
    for name, label, color in ends:
        share = run.probe(name)
        if share is not None:
            _band(right, share[0], 100 * share[1], label, color)
    right.set(xlabel="step", ylabel="% (mean of the layers and band)", title="long memory, and none", ylim=(0, None))
    for ax in (middle, right):
        _legend(ax)
    return figure


def depth_attention(run: RunHistory):
    found = run.probe("depth_weights")
    if found is None:
        return None
    steps, values = found  # [S,R,sources]
    reads = values.shape[1]
    figure, ((left, right),) = _figure(1, 2, height=min(3.2 + reads / 60, 6))
    _image(left, np.where(values[-1] > 0, values[-1], np.nan), "mean weight (white: not read)", vmin=0, vmax=1)
    last = "running sum" if run.settings.get("model", {}).get("residual", "block") == "block" else "newest output"
    xlabel = f"source: embedding, then each block (last: {last})"
    left.set(xlabel=xlabel, ylabel="reading sub-layer, first to output", title=f"step {steps[-1]}")
    left.xaxis.get_major_locator().set_params(integer=True)
    entropy = run.probe("depth_entropy")
    if entropy is not None:
        ages = _ages(len(entropy[0]))
        for (_, index), color in zip(ages, _colors(len(ages)), strict=True):
            right.plot(entropy[1][index], np.arange(reads), color=color, linewidth=1.2, label=f"step {entropy[0][index]}")
        right.set(xlabel="entropy of the weights, nats", ylabel="reading sub-layer", title="how spread the weights are")
        right.set_ylim(reads - 0.5, -0.5)
        _legend(right)
    return figure


def streams(run: RunHistory):
    hidden, names = run.probe("hidden_rms"), sorted(run.probes[-1].get("weight_rms", {})) if run.probes else []
    if hidden is None and not names:
        return None
    figure, ((left, middle, right),) = _figure(1, 3, height=3.4)
    if hidden is not None:
        ages = _ages(len(hidden[0]))
        for (_, index), color in zip(ages, _colors(len(ages)), strict=True):
            left.plot(hidden[1][index], color=color, linewidth=1.2, label=f"step {hidden[0][index]}")
        _legend(left)
    left.set(xlabel="layer", ylabel="RMS", title="residual stream after each layer")
    for name, label, color in (("beta_mean", "KDA write strength", "tab:blue"), ("mla_gate_mean", "MLA output gate", "tab:orange")):
        gate = run.probe(name)
        if gate is not None:
            _band(middle, *gate, label, color)
    middle.set(xlabel="step", ylabel="mean of the layers and band", title="gates", ylim=(0, 1))
    if middle.lines:
        _legend(middle)
    for number, name in enumerate(names):
        found = run.probe("weight_rms", name)
        if found is not None:
            style = ("-", "--")[number // 10 % 2]
            first = float(found[1][0]) or 1.0  # depth queries start at zero: their RMS itself
            right.plot(found[0], found[1] / first, linewidth=1.1, label=name, color=f"C{number % 10}", linestyle=style)
    right.set(xlabel="step", ylabel="RMS over that of the first probe", title="weights by group")
    if names:
        right.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def optimisation(run: RunHistory):
    norm, rate, skipped = (run.series(name) for name in ("grad_norm", "learning_rate", "skipped"))
    if norm is None and rate is None:
        return None
    figure, ((left, right),) = _figure(1, 2)
    if norm is not None:
        left.plot(run.steps, norm, color="tab:blue", linewidth=0.8)
        left.set_yscale("log")
    if skipped is not None:
        for step in run.steps[np.nan_to_num(skipped) > 0]:
            left.axvline(step, color="tab:red", linewidth=0.8, alpha=0.5)
    left.set(xlabel="step", ylabel="global norm, before clipping", title="gradient (red: skipped updates)")
    if rate is not None:
        right.plot(run.steps, rate, color="black", linewidth=1.2)
    right.set(xlabel="step", ylabel="learning rate", title="schedule", ylim=(0, None))
    return figure


def step_time(run: RunHistory):
    seconds = run.series("wall.seconds")
    if seconds is None:
        return None
    figure, ((left, right),) = _figure(1, 2)
    width = max(1, len(seconds) // 50)
    parts = {"waiting for data": run.series("wall.data_wait"), "checkpoint": run.series("wall.checkpoint")}
    known = {name: _smooth(np.nan_to_num(x), width) for name, x in parts.items() if x is not None}
    total = _smooth(seconds, width)
    rest = np.maximum(total - sum(known.values(), np.zeros_like(total)), 0)
    steps = run.steps
    left.stackplot(steps, rest, *known.values(), labels=["compute", *known], colors=["tab:blue", "tab:orange", "tab:red"], alpha=0.8)
    top = 1.6 * float(np.nanquantile(total, 0.95))  # the first step holds the compile
    left.set(xlabel="step", ylabel="seconds a step", title=f"where the time goes, mean of {width} points", ylim=(0, top))
    _legend(left)
    speed, mfu = run.series("wall.tokens_per_second"), run.series("wall.mfu")
    if speed is not None:
        right.plot(steps, _smooth(speed, width), color="tab:green", linewidth=1.2)
    right.set(xlabel="step", ylabel="tokens a second", title="speed", ylim=(0, None))
    if speed is not None and np.isfinite(speed).any():
        right.set_ylim(0, 1.15 * float(np.nanmax(_smooth(speed, width))) or 1.0)
    if mfu is not None and speed is not None:
        right.text(0.98, 0.05, f"MFU, median: {100 * np.nanmedian(mfu):.2g}%", ha="right", transform=right.transAxes, fontsize=9)
    return figure
