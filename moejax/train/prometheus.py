"""A page of metrics for Prometheus on this machine's loopback: text format 0.0.4 by the standard library's HTTP server.

Counters end in `_total` and start from 0 with the process, as Prometheus expects. Values a layer and an expert are quantiles over
both, at most ~200 series for 93 layers of 896 experts; values by layer come only when asked for.
"""

from __future__ import annotations

import errno
import http.server
import math
import re
import socketserver
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .sinks import GROUPS, LOAD_QUANTILES, Record, digested, group_losses, leaves

HOST = "127.0.0.1"
QUANTILES = (0.0, 0.5, 1.0)  # of an array of any size
MOST_EVENTS = 32  # names of events with a counter of their own

# Units belong into the names (Prometheus: base units, plural).
NAMES = {
    "loss": ("loss_nats", "Loss of the last step, nats a token"),
    "tokens": ("step_tokens", "Targets counted in the last step"),
    "wall_seconds": ("step_seconds", "Time of the last step"),
    "wall_data_wait": ("data_wait_seconds", "Time of the last step spent waiting for data"),
    "wall_checkpoint": ("checkpoint_seconds", "Time of the last step spent on checkpoints"),
    "wall_tokens_per_second": ("tokens_per_second", "Tokens a second in the last step"),
    "wall_mfu": ("mfu_ratio", "Model FLOPs over the peak of the devices"),
}
COUNTERS = {
    "tokens": ("tokens_total", "Targets trained on by this process"),
    "skipped": ("skipped_updates_total", "Updates skipped by this process"),
    "wall_seconds": ("step_seconds_total", "Time spent in steps"),
    "wall_data_wait": ("data_wait_seconds_total", "Time spent waiting for data"),
    "wall_checkpoint": ("checkpoint_seconds_total", "Time spent on checkpoints"),
}

Labels = tuple[tuple[str, str], ...]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks DNS for a name, which can take seconds
        self.server_name, self.server_port = self.server_address[:2]  # pyright: ignore[reportAttributeAccessIssue]


class PrometheusPage:
    """Serves http://127.0.0.1:<port>/metrics from a daemon thread; a `Sink`. Start it on process 0 only.

    Args:
      port: 1 to 65535, or 0 for any free one (see `.port`).
      domains: names of the mixture's sources, by number.
      per_layer: also a series a layer of each metric [L], labelled layer="0", ...: about 600 more at 93 layers.
      process: index of this process; ValueError unless 0, because every process has the same numbers.

    Raises:
      ValueError: a port out of range, in use, or not allowed; another process than 0.
    """

    def __init__(self, port: int, *, domains: Sequence[str] = (), per_layer: bool = False, process: int = 0):
        if process != 0:
            raise ValueError(f"process {process} asked for a metrics page; only process 0 serves one, the numbers are the same on all.")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ValueError(f"--metrics-port is {port!r}; it must be an integer from 0 (any free port) to 65535.")
        self._domains, self._per_layer = tuple(domains), per_layer
        self._lock = threading.Lock()
        self._help: dict[str, tuple[str, str]] = {}  # name -> (type, text)
        self._values: dict[tuple[str, Labels], float] = {}
        self._server = _listen(port, self.page)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/metrics"

    def write(self, step: int, record: Record) -> None:
        record = digested(record)
        with self._lock:
            self._gauge("step", step, text="Last step done")
            self._count("steps_total", 1, text="Steps done by this process")
            for path, array in leaves(record):
                if path[-1] not in GROUPS:
                    self._entry("_".join(path), array)
            self._groups(record)

    def event(self, event: Mapping[str, Any]) -> None:
        name = str(event["event"])
        with self._lock:
            known = [labels for kind, labels in self._values if kind == "events_total"]
            if len(known) >= MOST_EVENTS and (("event", name),) not in known:
                name = "other"
            self._count("events_total", 1, text="Happenings out of the ordinary, by name", event=name)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def page(self) -> str:
        """The metrics in text format."""
        with self._lock:
            values, described = sorted(self._values.items()), dict(self._help)
        lines, last = ["# Metrics of a moejax training run"], ""
        for (name, labels), value in values:
            if name != last:
                kind, text = described[name]
                lines += [f"# HELP moejax_{name} {_escape(text)}", f"# TYPE moejax_{name} {kind}"]
                last = name
            inner = ",".join(f'{key}="{_escape(text, quote=True)}"' for key, text in labels)
            lines.append(f"moejax_{name}{{{inner}}} {_number(value)}" if labels else f"moejax_{name} {_number(value)}")
        return "\n".join(lines) + "\n"

    def _entry(self, key: str, array: np.ndarray) -> None:
        name, text = NAMES.get(key, (metric_name(key), key.replace("_", " ")))
        if key in COUNTERS and array.ndim == 0 and math.isfinite(array):
            counter, about = COUNTERS[key]
            self._count(counter, float(array), text=about)
        if key == "relative_load":
            for q, value in zip(LOAD_QUANTILES, array.tolist(), strict=True):
                self._gauge("expert_relative_load", value, text="Tokens of an expert over its layer's mean", quantile=f"{q:g}")
        elif array.ndim == 0:
            self._gauge(name, float(array), text=text)
        elif array.size:
            for q, value in zip(QUANTILES, _quantiles(array), strict=True):
                self._gauge(name, value, text=f"{text}, quantiles over {array.size} values", quantile=f"{q:g}")
            if self._per_layer and array.ndim == 1:
                for layer, value in enumerate(array.tolist()):
                    self._gauge(f"layer_{name}", value, text=f"{text}, by layer", layer=str(layer))

    def _groups(self, record: Record) -> None:
        by_domain, by_position = group_losses(record, self._domains)
        for domain, (nats, tokens) in by_domain.items():
            self._gauge("domain_loss_nats", nats / tokens, text="Loss by domain in the last step that had it, nats a token", domain=domain)
            self._count("domain_tokens_total", tokens, text="Targets by domain", domain=domain)
        for first, (nats, tokens) in by_position.items():
            text = "Loss from this position to twice it, nats a token"
            self._gauge("position_loss_nats", nats / tokens, text=text, position=str(first))

    def _gauge(self, name: str, value: float, *, text: str, **labels: str) -> None:
        self._help.setdefault(name, ("gauge", text))
        self._values[name, tuple(labels.items())] = value

    def _count(self, name: str, more: float, *, text: str, **labels: str) -> None:
        self._help.setdefault(name, ("counter", text))
        key = (name, tuple(labels.items()))
        self._values[key] = self._values.get(key, 0.0) + more


def _listen(port: int, page) -> _Server:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.split("?")[0] in ("/", "/metrics")
            body = page().encode() if found else b"not found: the metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Scrapes do not belong on the training's terminal."""

    try:
        return _Server((HOST, port), Handler)
    except OSError as error:
        reason = {errno.EADDRINUSE: "is in use", errno.EACCES: "needs more rights than this user has"}.get(error.errno or 0, str(error))
        raise ValueError(f"--metrics-port {port} {reason}; give another port, or 0 for any free one.") from None


def metric_name(key: str) -> str:
    """`key` with every character that Prometheus does not allow as an underscore."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _quantiles(array: np.ndarray) -> list[float]:
    return np.quantile(array, QUANTILES).tolist()


def _escape(text: str, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"
