"""The records of a run folder read back in bounded memory: at most 1,000 points a curve, however long the run.

Shapes: S points, L MoE layers, E experts, D domains, P position buckets.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from .sinks import GROUPS, POSITION_BUCKETS, leaves

MOST_POINTS = 1000
MOST_PROBES = 200
MOST_EVENTS = 200  # rows of the table: the last ones
SNAPSHOTS = 3  # of expert loads: first, middle, last


class Thinned:
    """Means of consecutive records, in at most `most` bins: when they are full, neighbours are merged.

    Not finite values are left out of a mean. Sums whose ratio is asked for (loss_groups over token_groups) keep it.
    """

    def __init__(self, most: int = MOST_POINTS):
        self._most, self._stride = most, 1
        self._bins: list[_Bin] = []

    def add(self, record: dict[str, Any]) -> None:
        if not self._bins or self._bins[-1].records >= self._stride:
            self._bins.append(_Bin())
        self._bins[-1].merge(_Bin.of(record))
        if len(self._bins) > self._most:
            for left, right in zip(self._bins[::2], self._bins[1::2], strict=False):
                left.merge(right)
            self._bins, self._stride = self._bins[::2], 2 * self._stride

    @property
    def steps(self) -> np.ndarray:
        """[S] the last step of each bin."""
        return np.array([bin.step for bin in self._bins], int)

    def names(self) -> set[str]:
        return {name for bin in self._bins for name in bin.sums}

    def means(self, name: str) -> np.ndarray | None:
        """[S,...]: NaN where a bin has none; None when no bin has it. An array that changed its shape is given in its last one."""
        found = [bin.sums.get(name) for bin in self._bins]
        shapes = [pair[0].shape for pair in found if pair is not None]
        if not shapes:
            return None
        empty = np.full(shapes[-1], np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.stack([empty if p is None or p[0].shape != shapes[-1] else np.where(p[1] > 0, p[0] / p[1], np.nan) for p in found])


@dataclasses.dataclass
class _Bin:
    step: int = 0
    records: int = 0
    sums: dict[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)
    """Name -> (sum, count) of finite values, element by element."""

    @classmethod
    def of(cls, record: dict[str, Any]) -> _Bin:
        sums: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for path, value in leaves(record):
            finite = np.isfinite(value)
            sums[".".join(path)] = np.where(finite, value, 0.0), finite.astype(float)
        groups = [sums.pop(name) for name in GROUPS if name in sums]
        if len(groups) == 2 and groups[0][1].all():  # both or none: a skipped step has tokens, but nats that are not finite
            sums |= zip(GROUPS, groups, strict=True)
        return cls(int(record["step"]), 1, sums)

    def merge(self, other: _Bin) -> None:
        self.step, self.records = max(self.step, other.step), self.records + other.records
        for name, (total, count) in other.sums.items():
            mine = self.sums.get(name)
            same = mine is not None and mine[0].shape == total.shape
            self.sums[name] = (mine[0] + total, mine[1] + count) if mine is not None and same else (total, count)


@dataclasses.dataclass
class RunHistory:
    """What a run folder holds. Files that are missing leave their part empty."""

    folder: pathlib.Path
    metrics: Thinned
    loads: list[dict[str, Any]]
    """First, middle and last of expert_load.jsonl: {"step", "load" [L,E]}."""
    heldout: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    events: list[dict[str, Any]]
    """The last 200."""
    event_counts: Counter
    settings: dict[str, Any]
    """config.json."""
    summary: dict[str, Any]
    """summary.json, which a run has once it has ended; else empty."""
    missing: list[str]

    @property
    def steps(self) -> np.ndarray:
        return self.metrics.steps

    def series(self, name: str) -> np.ndarray | None:
        """[S,...] of metrics.jsonl, "wall.seconds" for nested ones; None without any value."""
        values = self.metrics.means(name)
        return None if values is None or not np.isfinite(values).any() else values

    def probe(self, name: str, group: str | None = None) -> tuple[np.ndarray, np.ndarray] | None:
        """(steps [S], values [S,...]) of probes.jsonl; `group`: of a nested entry."""
        found = [(r["step"], r.get(name) if group is None else r.get(name, {}).get(group)) for r in self.probes]
        found = [(step, np.asarray(value, float)) for step, value in found if value is not None]
        found = [pair for pair in found if pair[1].shape == found[-1][1].shape]
        return (np.array([step for step, _ in found]), np.stack([value for _, value in found])) if found else None

    def groups(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(nats, tokens) [S,D,P]: means of the sums by domain and position, 0 where there are none."""
        both = [self.series(name) for name in ("loss_groups", "token_groups")]
        if any(x is None or x.shape[-1] % POSITION_BUCKETS for x in both):
            return None
        nats, tokens = (np.nan_to_num(x).reshape(len(x), -1, POSITION_BUCKETS) for x in both if x is not None)
        return nats, tokens

    def domains(self, count: int) -> list[str]:
        """Names of the domains by number; "domain 0", ... where config.json has none for them."""
        names = self.settings.get("domains") or []
        return [str(names[i]) if i < len(names) else f"domain {i}" for i in range(count)]


def read_history(folder: str | os.PathLike) -> RunHistory:
    """Read a run folder. ValueError when there is no such folder, or none of its files."""
    folder = pathlib.Path(folder)
    names = ("metrics", "expert_load", "heldout", "probes", "events")
    missing = [f"{name}.jsonl" for name in names if not (folder / f"{name}.jsonl").is_file()]
    config = folder / "config.json"
    if len(missing) == len(names) and not config.is_file():
        raise ValueError(f"{str(folder)!r} is no run folder: it has neither config.json nor any of {', '.join(missing)}.")
    metrics = Thinned()
    for record in _records(folder / "metrics.jsonl"):
        metrics.add(record)
    events = list(_records(folder / "events.jsonl"))
    return RunHistory(
        folder=folder,
        metrics=metrics,
        loads=_some(folder / "expert_load.jsonl", SNAPSHOTS),
        heldout=_some(folder / "heldout.jsonl", MOST_POINTS),
        probes=_some(folder / "probes.jsonl", MOST_PROBES),
        events=events[-MOST_EVENTS:],
        event_counts=Counter(str(event.get("event", "?")) for event in events),
        settings=_object(config),
        summary=_object(folder / "summary.json"),
        missing=missing + ([] if config.is_file() else ["config.json"]),
    )


def _object(path: pathlib.Path) -> dict[str, Any]:
    """A JSON file with one object; {} without the file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Mend or remove it.") from None
    return found if isinstance(found, dict) else {"value": found}


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Whole lines that are not empty, with their numbers; a last one that a crash cut short is left out."""
    if path.is_file():
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if line.endswith("\n") and line.strip():
                    yield number, line


def _records(path: pathlib.Path, wanted: set[int] | None = None) -> Iterator[dict[str, Any]]:
    """The lines as JSON; wanted: the places, from 0, of those to parse."""
    for place, (number, line) in enumerate(_lines(path)):
        if wanted is None or place in wanted:
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}, is not JSON: {error}. Mend or remove that line.") from None


def _some(path: pathlib.Path, most: int) -> list[dict[str, Any]]:
    """At most `most` records, evenly spaced, the first and the last among them. Only these are parsed."""
    count = sum(1 for _ in _lines(path))
    wanted = set(np.linspace(0, count - 1, min(most, count)).round().astype(int).tolist()) if count else set()
    return list(_records(path, wanted))
