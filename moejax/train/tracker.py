"""What a run writes down while it goes: JSON lines that survive a crash, and how often the train step was compiled.

Shapes: L MoE layers, E experts.
"""

import json
import os
import pathlib
from typing import Any

import jax
import jax.monitoring
import numpy as np

from .events import plain

COMPILED = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"
LOAD_SNAPSHOTS = 64  # of [L,E] counts a run: enough for a picture, 0.5 MB each at 92 layers of 896 experts as text


class JsonLines:
    """A file with one JSON object a line, each with a "step"; appended line by line and flushed."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)

    def append(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a last line that a crash cut short is left out."""
        if not self.path.exists():
            return []
        lines = self.path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1] if line]

    def rewind(self, step: int) -> None:
        """Drop the lines after `step`, which a resumed run writes again. The file is replaced at once, never half."""
        if not self.path.exists():
            return
        kept = [record for record in self.read() if record["step"] <= step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(record) + "\n" for record in kept))
        part.replace(self.path)


class Tracker:
    """The records of one run folder.

    metrics.jsonl: a line a step, everything that is a function of the seed at the top and times under "wall".
    expert_load.jsonl: [L,E] token counts at most 64 times a run. heldout.jsonl: each scoring of the held-out text.
    """

    def __init__(self, folder: str | os.PathLike, *, total_steps: int):
        folder = pathlib.Path(folder)
        self.metrics = JsonLines(folder / "metrics.jsonl")
        self.load = JsonLines(folder / "expert_load.jsonl")
        self.heldout = JsonLines(folder / "heldout.jsonl")
        self._load_every = max(1, -(-total_steps // (LOAD_SNAPSHOTS - 1)))  # step 1 is one more

    def log(self, step: int, metrics: dict[str, Any], wall: dict[str, float]) -> dict[str, Any]:
        """Write the host metrics of `step` (numbers and arrays [L]; expert_load [L,E] goes to its own file)."""
        values = {name: plain(value) for name, value in metrics.items() if name != "expert_load"}
        record = {"step": step, **values, "wall": wall}
        if "expert_load" in metrics and (step == 1 or step % self._load_every == 0):
            self.load.append({"step": step, "load": np.asarray(metrics["expert_load"]).tolist()})
        self.metrics.append(record)
        return record

    def rewind(self, step: int) -> None:
        """Make the records those of a run that has just done `step` steps."""
        for lines in (self.metrics, self.load, self.heldout):
            lines.rewind(step)


class CompileCounter:
    """Counts how often XLA compiled (or loaded from the cache) the function jitted under `name`. One is expected."""

    def __init__(self, name: str):
        self.name = f"jit({name})"
        self.count = 0
        self.seconds = 0.0
        self.cache_hits = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == COMPILED and kwargs.get("fun_name") == self.name:
            self.count += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **kwargs: Any) -> None:
        self.cache_hits += event == CACHE_HIT
