"""One static page about a run, from the files in its folder: `python -m moejax.train.html_report RUN_FOLDER`.

The page needs nothing but itself: pictures are inside it, there is no script, and its own policy forbids the browser any request.
"""

from __future__ import annotations

import base64
import html
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import report_panels as panels
from .run_history import MOST_EVENTS, RunHistory, read_history

NAME = "report.html"
COLUMNS = ("event", "step", "time", "version", "run")  # of events.jsonl, shown on their own or the same for all
LONGEST_TEXT = 300  # characters of one cell of a table


class Panel(NamedTuple):
    """A picture with its place in the page."""

    title: str
    source: str
    """The file that it needs."""
    draw: Callable[[RunHistory], Any]


PANELS = (
    Panel("Loss", "metrics.jsonl", panels.loss),
    Panel("Loss by domain", "metrics.jsonl with loss_groups", panels.loss_by_domain),
    Panel("Loss by position", "metrics.jsonl with loss_groups", panels.loss_by_position),
    Panel("Optimisation", "metrics.jsonl", panels.optimisation),
    Panel("Expert load, layers x experts", "expert_load.jsonl", panels.expert_load),
    Panel("Balance over time", "metrics.jsonl of a model with experts", panels.balance),
    Panel("Bias drift", "metrics.jsonl of a model with experts", panels.bias_drift),
    Panel("KDA state norms", "probes.jsonl", panels.state_norms),
    Panel("KDA decay", "probes.jsonl", panels.decays),
    Panel("Depth attention", "probes.jsonl of a model with depth attention", panels.depth_attention),
    Panel("Residual stream, gates and weights", "probes.jsonl", panels.streams),
    Panel("Step time", "metrics.jsonl", panels.step_time),
)

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 980px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin-top: 34px; border-bottom: 1px solid #ccc; }
img { max-width: 100%; height: auto; } table { border-collapse: collapse; font-size: 13px; }
td, th { text-align: left; padding: 2px 14px 2px 0; vertical-align: top; border-bottom: 1px solid #eee; overflow-wrap: anywhere; }
.none { color: #777; } nav { font-size: 13px; }
"""


def write_report(folder: str | os.PathLike) -> pathlib.Path:
    """Write report.html into the run folder, replaced at once and never half; -> its path. It is under 3 MB for any run.

    Reads metrics.jsonl, expert_load.jsonl, heldout.jsonl, probes.jsonl, events.jsonl, config.json and summary.json. A panel whose
    file is missing says so.

    Raises:
      ValueError: no run folder. ImportError: without matplotlib.
    """
    run = read_history(folder)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("the report needs matplotlib: pip install 'moejax[plot]'") from None
    path = pathlib.Path(folder) / NAME
    part = path.with_suffix(".part")
    part.write_text(page(run), encoding="utf-8")
    part.replace(path)
    return path


def page(run: RunHistory) -> str:
    """The whole page as text."""
    name = html.escape(run.folder.resolve().name)
    sections = [("At a glance", _table(_headline(run)))]
    sections += [(panel.title, _panel(panel, run)) for panel in PANELS]
    sections += [("Events", _events(run))]
    sections += [("Summary at the end of the run", _table(_flat(run.summary)))] if run.summary else []
    sections += [("Settings and versions", _settings(run))]
    links = " · ".join(f'<a href="#s{number}">{html.escape(title)}</a>' for number, (title, _) in enumerate(sections))
    body = "\n".join(f'<h2 id="s{number}">{html.escape(title)}</h2>\n{inner}' for number, (title, inner) in enumerate(sections))
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{name}</title><style>{STYLE}</style></head>\n'
        f"<body><h1>Run {name}</h1><nav>{links}</nav>\n{body}\n</body></html>\n"
    )


def _panel(panel: Panel, run: RunHistory) -> str:
    figure = panel.draw(run)
    if figure is None:
        return f'<p class="none">No data: this panel is drawn from {html.escape(panel.source)}.</p>'
    data = base64.b64encode(panels.png(figure)).decode()
    return f'<img alt="{html.escape(panel.title)}" src="data:image/png;base64,{data}">'


def _headline(run: RunHistory) -> list[tuple[str, str]]:
    rows = [("written", time.strftime("%Y-%m-%d %H:%M:%S %Z"))]
    if len(run.steps):
        rows.append(("last step", f"{run.steps[-1]:,}"))
    tail = slice(-max(1, len(run.steps) // 100), None)
    for name, label, form in (
        ("loss", "loss, last 1%", "{:.4f} nats a token"),
        ("max_violation", "MaxVio, last 1%, mean of the layers", "{:.2f}"),
        ("load_cv", "load CV, last 1%", "{:.3f}"),
        ("load_cv_floor", "its sampling floor", "{:.3f}"),
    ):
        values = run.series(name)
        if values is not None and np.isfinite(values[tail]).any():
            rows.append((label, form.format(np.nanmean(values[tail]))))
    held = [r["bits_per_byte"] for r in run.heldout if "bits_per_byte" in r]
    if held:
        rows.append(("held out, first and last", f"{held[0]:.4f} and {held[-1]:.4f} bits a byte"))
    speed, seconds = run.series("wall.tokens_per_second"), run.series("wall.seconds")
    if speed is not None:
        rows.append(("speed, median", f"{np.nanmedian(speed):,.0f} tokens a second"))
    for name, label in (("wall.data_wait", "waiting for data"), ("wall.checkpoint", "on checkpoints")):
        part = run.series(name)
        if part is not None and seconds is not None:
            rows.append((f"time {label}", f"{100 * np.nansum(part) / max(np.nansum(seconds), 1e-9):.2f}% of all steps"))
    counts = ", ".join(f"{name} {count}" for name, count in run.event_counts.most_common())
    rows.append(("events", counts or "none"))
    if run.missing:
        rows.append(("files not there", ", ".join(run.missing)))
    return rows


def _events(run: RunHistory) -> str:
    if not run.events:
        return '<p class="none">No data: events.jsonl is empty or missing.</p>'
    total = sum(run.event_counts.values())
    note = f"<p>The last {MOST_EVENTS} of {total:,}.</p>" if total > len(run.events) else ""
    rows = []
    for event in run.events:
        facts = ", ".join(f"{name}: {_text(value)}" for name, value in event.items() if name not in COLUMNS)
        rows.append((str(event.get("step", "")), str(event.get("time", ""))[:19], str(event.get("event", "?")), facts))
    return note + _table(rows, ("step", "time, UTC", "event", "facts"))


def _settings(run: RunHistory) -> str:
    if not run.settings:
        return '<p class="none">No data: config.json is missing.</p>'
    return _table(_flat(run.settings))


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        name = f"{prefix}{name}"
        rows += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, _text(value))]
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(rows: list[tuple[str, ...]], header: tuple[str, ...] = ()) -> str:
    def cells(row: tuple[str, ...], tag: str) -> str:
        short = (cell if len(cell) <= LONGEST_TEXT else cell[:LONGEST_TEXT] + " ..." for cell in row)
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in short) + "</tr>"

    return "<table>" + (cells(header, "th") if header else "") + "\n".join(cells(row, "td") for row in rows) + "</table>"


def main(arguments: list[str] | None = None) -> int:
    """-> the exit status: 0, or 2 with one line about what is wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m moejax.train.html_report RUN_FOLDER", file=sys.stderr)
        return 2
    try:
        print(write_report(arguments[0]))
    except (ValueError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
