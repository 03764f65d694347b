"""The recall study as one command for one GPU: every model in a thread of one process, several at a time, within a time budget.

    python -m experiments.recall_suite --out F                   # H200: stack, mqar and length extrapolation, 3 seeds each
    python -m experiments.recall_suite --out F --parts stack     # one part

Threads, because each model has programs of its own to compile, and that is half of the time; on the device one runs at a time. Not
processes: where five shared a card, training with KDA's kernels became NaN (BUILD_NOTES, "One GPU for several processes").
What does not fit the budget is not started, or stopped, and stands in the results as such. Writes results.json (of all, after every
end), recall.jsonl (all events) and errors.txt into --out.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

import tyro

from experiments.recall import Study, identity, run_one, table, write_results

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
PARTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "stack": ({"task": "stack"}, ("kda", "no_delta", "gdn", "mla")),
    "mqar": ({"task": "mqar"}, ("kda", "kda_zero_bias")),
    "extrapolation": ({"task": "recall", "eval_lengths": LENGTHS}, ("kda,mla", "kda,mla_rotary", "kda", "mla_rotary")),
}
LONGER = {"mqar": 2, "extrapolation-mla_rotary": 5}
"""Parts, or single models, that take so many times --steps."""
ORDER = (
    ("mqar", 0),
    ("extrapolation", 0),
    ("mqar", 1),
    ("extrapolation", 1),
    ("stack", 0),
    ("stack", 2),
    ("extrapolation", 2),
    ("extrapolation", 3),
    ("stack", 1),
    ("stack", 3),
)
"""(part, which of its models): what the claims rest on first."""
SHARED = ("steps", "batch", "seeds", "together", "block", "dtype")
"""Settings of the suite that its studies take over."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """Run the parts within a budget."""

    out: Path
    """Folder of the results."""
    parts: tuple[Literal["stack", "mqar", "extrapolation"], ...] = ("stack", "mqar", "extrapolation")
    steps: int = 2000
    batch: int = 64
    seeds: int = 3
    together: int | None = 1
    """See `recall`."""
    block: int = 100
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16: KDA's kernels run on a Hopper GPU."""
    budget_s: float = 510.0
    """Seconds from the start until no model takes another block of steps."""
    least_s: float = 60.0
    """No model is started with less than this left."""
    jobs: int = 5
    """Models at a time."""


class OutOfTime(Exception):
    """The budget is spent."""


def studies(suite: Suite) -> list[tuple[str, Study]]:
    """(name, a study of one model), the most important first."""
    found = []
    for part, index in ORDER:
        if part in suite.parts:
            settings, mixers = PARTS[part]
            name = f"{part}-{mixers[index].replace(',', '-')}"
            shared: dict[str, Any] = {setting: getattr(suite, setting) for setting in SHARED}
            shared["steps"] *= LONGER.get(name, LONGER.get(part, 1))
            found.append((name, Study(mixers=(mixers[index],), **settings, **shared)))
    return found


def run_within(
    study: Study, record: Callable[[dict[str, Any]], None], end: float, least_s: float, turn: Any, run: Any = run_one
) -> dict[str, Any]:
    """The run of a study of one model for results.json: its results, or why there are none and how far it came.

    end: of the budget, of time.monotonic. turn: see `recall_train.train`. run: as `recall.run_one`."""
    (mixers,) = study.mixers
    last: dict[str, Any] | None = None

    def watched(event: dict[str, Any]) -> None:
        nonlocal last
        record(event)
        last = event if event["event"] == "block" else last
        if event["event"] == "block" and time.monotonic() > end:
            raise OutOfTime

    def ended(status: str, reason: str) -> dict[str, Any]:
        reason += "" if last is None else f"; after step {last['step']} of seed {last['seed']} its training accuracy was {last['accuracy']}"
        return {**identity(study, mixers), "status": status, "reason": reason}

    if end - time.monotonic() < least_s:
        return ended("skipped", f"less than {least_s:.0f} s of the budget were left")
    try:
        return run(study, mixers, watched, turn)
    except OutOfTime:
        return ended("stopped", "the budget was spent")
    except Exception as error:  # the other models are worth having
        return ended("failed", f"{type(error).__name__}: {error}") | {"traceback": traceback.format_exc()}


def main(suite: Suite) -> list[dict[str, Any]]:
    suite.out.mkdir(parents=True, exist_ok=True)
    start, runs, lock, turn = time.monotonic(), [], threading.Lock(), threading.Lock()
    for name in ("recall.jsonl", "errors.txt"):
        (suite.out / name).write_text("")

    def append(name: str, text: str) -> None:
        with lock, (suite.out / name).open("a") as file:
            file.write(text + "\n")

    record = lambda event: append("recall.jsonl", json.dumps(event))
    with ThreadPoolExecutor(suite.jobs) as pool:
        end = start + suite.budget_s
        futures = {pool.submit(run_within, study, record, end, suite.least_s, turn): name for name, study in studies(suite)}
        for future in as_completed(futures):
            run = future.result()
            if trace := run.pop("traceback", None):
                append("errors.txt", f"== {futures[future]}\n{trace}")
            runs.append(run)
            print(f"{time.monotonic() - start:6.1f} s  {futures[future]}: {run['status']} {run.get('reason', '')}", flush=True)
            write_results(suite.out, runs, {"suite": {k: str(v) for k, v in dataclasses.asdict(suite).items()}})
    runs.sort(key=lambda run: (run["task"], run["mixers"]))
    print("\n".join(table(runs)))
    print(f"{len(runs)} models in {time.monotonic() - start:.0f} s; files in {suite.out}/ (results.json, recall.jsonl, errors.txt)")
    return runs


if __name__ == "__main__":
    main(tyro.cli(Suite))
