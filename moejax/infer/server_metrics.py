"""The server's page for Prometheus, text format 0.0.4: requests, queue, slots, tokens, latencies."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Mapping, Sequence
from typing import Any

PREFIX = "moejax_server"
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# name on the page: (key of Engine.stats, type, text)
ENGINE = {
    "slots": ("slots", "gauge", "Sequences that are decoded at once"),
    "busy_slots": ("busy", "gauge", "Slots in use"),
    "queue_length": ("queued", "gauge", "Requests that wait for a slot"),
    "admitted_total": ("admitted", "counter", "Requests that got a slot"),
    "finished_total": ("finished", "counter", "Answers that ended by themselves"),
    "cancelled_total": ("cancelled", "counter", "Answers that were cut off: a client went away, a stop string, a shutdown"),
    "failed_total": ("failed", "counter", "Answers that the engine could not finish"),
    "prompt_tokens_total": ("prompt_tokens", "counter", "Prompt tokens read"),
    "generated_tokens_total": ("generated_tokens", "counter", "Tokens drawn"),
    "steps_total": ("steps", "counter", "Steps of the engine"),
}


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, text: str) -> list[str]:
        out, total = [f"# HELP {name} {text}", f"# TYPE {name} histogram"], 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            out.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*out, f"{name}_sum {self.sum!r}", f"{name}_count {total}"]


class ServerMetrics:
    """What the server counts itself; written and read on the event loop's thread only."""

    def __init__(self) -> None:
        self.requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.token = Histogram(TOKEN_SECONDS)

    def request(self, route: str, status: int) -> None:
        """An answer was sent. 499: the client went away before its end."""
        self.requests[route, status] += 1

    def page(self, stats: Mapping[str, Any], open_requests: int) -> str:
        """stats: of `Engine.stats`."""
        out = _head("requests_total", "counter", "Answers by route and status; 499: the client went away first")
        for (route, status), count in sorted(self.requests.items()):
            out.append(f'{PREFIX}_requests_total{{route="{route}",status="{status}"}} {count}')
        out += _head("open_requests", "gauge", "Requests being answered, waiting ones included")
        out.append(f"{PREFIX}_open_requests {open_requests}")
        for name, (key, kind, text) in ENGINE.items():
            if key in stats:
                out += [*_head(name, kind, text), f"{PREFIX}_{name} {stats[key]}"]
        out += self.first_token.lines(f"{PREFIX}_first_token_seconds", "From a request's head, before its body is read, to its first token")
        out += self.token.lines(f"{PREFIX}_token_seconds", "From a token of an answer to its next")
        return "\n".join(out) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {PREFIX}_{name} {text}", f"# TYPE {PREFIX}_{name} {kind}"]
