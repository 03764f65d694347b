"""The picture of `latency.py`: first token, a step beside its floor, hybrid beside all-MLA, the speed of one long answer.

    python experiments/bench/latency_picture.py latency.jsonl --out docs/latency.png        # needs matplotlib

Several files may be named; of a row that was measured twice the last one counts.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from moejax.evals.pictures import FIRST_TOKEN, Panel, latency_picture

Rows = list[dict[str, Any]]
PANELS = (
    FIRST_TOKEN,
    Panel("over_floor", "time of a step / floor of its bytes", x="length", xlabel="context (tokens)", by="batch", reference=(1.5, "1.5")),
    Panel("speed", "tokens/s of all rows, longest context", x="rows", xlabel="rows", log=False),
    Panel("window_speed", "tokens/s of all rows", x="decoded_to", xlabel="tokens of an answer", by="answer", log=False),
)


def read_rows(paths: Sequence[pathlib.Path]) -> Rows:
    """The rows of the files, in order."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line.strip()]


def draw(path: pathlib.Path, rows: Rows) -> None:
    """Write a PNG of the panels that `rows` fill. ValueError where they fill none."""
    longest = max((row["length"] for row in rows if "ratio" in row), default=0)
    points = [point for row in rows for point in _points(row, longest)]
    panels = [panel for panel in PANELS if any(panel.y in point for point in points)]
    if not panels:
        raise ValueError("no measurement of latency.py among the rows; give the file of its --out.")
    parameters = next((row["parameters"] for row in rows if row.get("model") == "hybrid" and "parameters" in row), 0)
    device = next((row["device"] for row in rows if "device" in row), "unknown device")
    latency_picture(path, points, panels, title=f"{device}: {parameters / 1e6:,.0f}M parameters, bfloat16")


def _points(row: dict[str, Any], longest: int) -> Rows:
    """What a row of latency.py puts into the panels. longest: context that was decoded at."""
    section = row.get("section")
    if "p50_ms" in row:
        return [row]
    if "median_ms" in row:
        return [{"model": row["model"], "prompt": row["prompt"], "p50_ms": row["median_ms"]}]
    if "estimate_ms" in row:
        return [{"model": f"{row['model']}, estimated", "prompt": row["prompt"], "p50_ms": row["estimate_ms"]}]
    if "last_over_first" in row:
        answer = f"{row['rows']} rows, last over first {row['last_over_first']:.3f}"
        windows = enumerate(row["tokens_s"], start=1)
        return [{"answer": answer, "decoded_to": row["window"] * number, "window_speed": speed} for number, speed in windows]
    if section == "compare" and "ratio" in row:
        return [{"model": row["model"], "rows": row["rows"], "speed": row["tokens_s"]}]
    if section == "decode" and "ratio" in row:  # batches grow within a length: the last one counts
        batch = "one row, bound by launches" if row["rows"] == 1 else "largest batch measured"
        speed = [{"model": row["model"], "rows": row["rows"], "speed": row["tokens_s"]}] if row["length"] == longest else []
        return [{"batch": batch, "length": row["length"], "over_floor": row["ratio"]}, *speed]
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the exit status: 2 for files that hold nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=pathlib.Path, help="files written by latency.py --out")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("latency.png"))
    options = parser.parse_args(arguments)
    try:
        draw(options.out, read_rows(options.rows))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
