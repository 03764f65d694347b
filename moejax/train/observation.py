"""What is shown of a run beside its JSON lines while it trains: TensorBoard files, a metrics page, probes of the model."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..modules.model import HybridLM
from .events import Event
from .probes import Probe, probe_record
from .sinks import Sink, Sinks
from .tracker import JsonLines


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """What is written and served beside metrics.jsonl, which is always there."""

    tensorboard: bool = True
    """Write event files into <run>/tensorboard (no TensorFlow needed)."""
    probe_every: int | None = None
    """Steps between probes of the model: state norms, decays, depth weights. Each costs about a forward of one row. None: never."""

    def __post_init__(self) -> None:
        if self.probe_every is not None and self.probe_every < 1:
            raise ValueError(f"--observe.probe-every is {self.probe_every}; it must be at least 1, or None for never.")


class Observation:
    """The sinks and the probe of one run; on every process but the first the sinks are none.

    first: the step that the run goes on from. port: of the metrics page, or None. note: shows a line to the person at the terminal.
    """

    def __init__(
        self,
        config: ObserveConfig,
        model: HybridLM,
        domains: Sequence[str],
        folder: pathlib.Path,
        *,
        first: int,
        port: int | None,
        note: Callable[[str], None],
    ):
        self._probe = None if config.probe_every is None else Probe(model, every=config.probe_every)
        self.probes = JsonLines(folder / "probes.jsonl")
        sinks: list[Sink] = []
        if jax.process_index() == 0:
            if config.tensorboard:
                from .tensorboard_writer import TensorBoardWriter

                purge = first + 1 if first else None
                sinks.append(TensorBoardWriter(folder / "tensorboard", domains=domains, purge_step=purge))
            if port is not None:
                from .prometheus import PrometheusPage

                page = PrometheusPage(port, domains=domains)
                note(f"metrics: {page.url}")
                sinks.append(page)
        self._sinks = Sinks(sinks, note)
        self._last: dict[str, Any] = {}
        self.rewind(first)

    def rewind(self, step: int) -> None:
        """Drop the probes after `step`, to which the run returned."""
        self.probes.rewind(step)

    def look(self, step: int, state: Any, batch: Mapping[str, Any]) -> None:
        """Probe the state after `step` when it is time to. Waits for the device then."""
        if self._probe is not None and self._probe.due(step):
            values = self._probe(state.params, state.router_state, batch["tokens"], batch["segment_ids"])
            self._last = probe_record(step, values)
            self.probes.append(self._last)

    def write(self, step: int, record: Mapping[str, Any], metrics: Mapping[str, np.ndarray]) -> None:
        """record: the step's line of metrics.jsonl; metrics: where it comes from, with the expert counts [L,E]."""
        more: dict[str, Any] = {"expert_load": metrics["expert_load"]} if "expert_load" in metrics else {}
        if self._last.get("step") == step:
            more["probes"] = {name: value for name, value in self._last.items() if name != "step"}
        self._sinks.write(step, {**record, **more})

    def event(self, event: Event) -> None:
        self._sinks.event(event)

    def close(self) -> None:
        self._sinks.close()
