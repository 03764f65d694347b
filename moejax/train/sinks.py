"""Where the records of a run go while it trains, beside its JSON lines: one protocol, and what all of them share.

Cardinality is bounded here: an array becomes a few figures, whatever its size, so that 93 layers of 896 experts cost a page of
numbers and not 83,328 series.

Shapes: L MoE layers, E experts, D domains, P position buckets.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .batch import POSITION_BUCKETS

MOST_DOMAINS = 16  # with series of their own; the rest of a mixture is summed as "other"
LOAD_QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)
GROUPS = ("loss_groups", "token_groups")

Record = Mapping[str, Any]
"""A step's metrics on the host: scalars, small arrays or lists, nested under "wall" (times) and "probes"."""


@runtime_checkable
class Sink(Protocol):
    """A place for records. One call at a time, metrics in order of the steps; a call may fail with OSError."""

    def write(self, step: int, record: Record) -> None:
        """Take the metrics of `step`. Steps may come again after a rollback."""
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """Take a happening out of the ordinary: {"event": name, "step": int, ...facts}."""
        ...

    def close(self) -> None:
        """Write out and release everything. A second call does nothing."""
        ...


class Sinks:
    """Several sinks as one. One that fails with OSError (a full disk) is closed and named once through `note`; training goes on.

    Threads may share it (a watchdog's events come from its own); what comes after `close` is dropped.
    """

    def __init__(self, sinks: Sequence[Sink], note: Callable[[str], None]):
        self._lock = threading.RLock()  # a note may itself become an event
        self._sinks = list(sinks)
        self._note = note

    def write(self, step: int, record: Record) -> None:
        self._each("write", step, digested(record))  # once for all: a pass over [L,E] takes 1 to 2 ms

    def event(self, event: Mapping[str, Any]) -> None:
        self._each("event", event)

    def close(self) -> None:
        with self._lock:
            self._each("close")
            self._sinks = []

    def _each(self, method: str, *arguments: Any) -> None:
        with self._lock:
            for sink in list(self._sinks):
                try:
                    getattr(sink, method)(*arguments)
                except OSError as error:
                    self._sinks.remove(sink)
                    self._note(f"warning: {type(sink).__name__} failed and is closed; the run goes on without it: {error}")
                    with contextlib.suppress(OSError):
                        sink.close()


def leaves(record: Record, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """(path, numbers as float64) of every numeric entry. "nan" and "inf", as JSON lines hold them, count as numbers; other text
    and the step are left out."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*prefix, name))
        elif (name, prefix) != ("step", ()):
            try:
                yield (*prefix, name), np.asarray(value, np.float64)
            except (TypeError, ValueError):
                continue


def relative_load(load: np.ndarray) -> np.ndarray:
    """Token counts [L,E] over their layer's mean, float32: 1 is balance. A layer without tokens is 0."""
    load = np.asarray(load, np.float32)
    return load / np.maximum(load.mean(axis=-1, keepdims=True), 1e-9)


def digested(record: Record) -> Record:
    """`record` with `relative_load` [5], the load's quantiles `LOAD_QUANTILES` over all layers and experts, in place of
    `expert_load` [L,E]. A record without counts comes back as it is."""
    if "expert_load" not in record:
        return record
    kept = {name: value for name, value in record.items() if name != "expert_load"}
    return kept | {"relative_load": np.quantile(relative_load(record["expert_load"]), LOAD_QUANTILES)}


def named_domains(domains: Sequence[str], count: int) -> list[str]:
    """A name for each of `count` domains; ValueError when `domains` names another number of them."""
    if domains and len(domains) != count:
        named = ", ".join(domains)
        raise ValueError(f"{len(domains)} domains are named ({named}), the record holds {count}; name each source of the mixture.")
    return list(domains) or [str(index) for index in range(count)]


def group_losses(record: Record, domains: Sequence[str] = ()) -> tuple[dict[str, tuple[float, float]], dict[int, tuple[float, float]]]:
    """(nats, tokens) by domain and by the first position of a bucket, where there are tokens.

    record: loss_groups and token_groups [D*P], domain by domain; without them both are empty. Domains past the first 16 are
    summed as "other". ValueError: sizes that do not fit.
    """
    if any(name not in record for name in GROUPS):
        return {}, {}
    nats, tokens = (np.asarray(record[name], np.float64).reshape(-1) for name in GROUPS)
    if nats.size != tokens.size or nats.size % POSITION_BUCKETS:
        raise ValueError(f"loss_groups has {nats.size} and token_groups {tokens.size} entries; both must have D * {POSITION_BUCKETS}.")
    nats, tokens = (x.reshape(-1, POSITION_BUCKETS) for x in (nats, tokens))
    names = named_domains(domains, len(nats))
    by_domain: dict[str, tuple[float, float]] = {}
    for index, (name, loss, count) in enumerate(zip(names, nats.sum(1), tokens.sum(1), strict=True)):
        name = name if index < MOST_DOMAINS else "other"
        before = by_domain.get(name, (0.0, 0.0))
        by_domain[name] = (before[0] + float(loss), before[1] + float(count))
    by_position = {2**b if b else 0: (float(n), float(t)) for b, (n, t) in enumerate(zip(nats.sum(0), tokens.sum(0), strict=True))}
    return {k: v for k, v in by_domain.items() if v[1]}, {k: v for k, v in by_position.items() if v[1]}


__all__ = ["Record", "Sink", "Sinks", "digested", "group_losses", "leaves", "relative_load"]
