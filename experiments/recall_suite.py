"""The recall study as one command for one GPU: every model in a process of its own, several at a time, within a time budget.

    python -m experiments.recall_suite --out F                   # H200: stack, mqar and length extrapolation, 3 seeds each
    python -m experiments.recall_suite --out F --parts stack     # one part

Several at a time, because each model has programs of its own to compile, and that is half of the time; the card turns from one process to
the next. Not threads of one process: where one loaded a program with cuDNN's attention while another trained, loading failed or the
other's rows were garbage (jax 0.11.2).
What does not fit the budget is not started, or stopped, and stands in the results as such. Writes results.json (of all, after every
end), recall.jsonl (all events) and errors.txt into --out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
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
LONGER = {"mqar": 2, "extrapolation-kda": 2, "extrapolation-mla_rotary": 5}
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
    """Seconds from the start until no model takes another block of steps or scores at another length."""
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


def run_within(study: Study, events: Path, end: float, least_s: float, run: Callable = run_one) -> dict[str, Any]:
    """The run of a study of one model for results.json: its results, or why there are none and how far it came.

    events: a file that every event is appended to. end: of the budget, of time.monotonic. run: as `recall.run_one`."""
    (mixers,) = study.mixers
    seen: dict[str, list[dict[str, Any]]] = {"block": [], "score": []}

    def record(event: dict[str, Any]) -> None:
        append(events, json.dumps(event))
        seen[event["event"]].append(event)
        if time.monotonic() > end:
            raise OutOfTime

    def ended(status: str, reason: str) -> dict[str, Any]:
        for last in seen["block"][-1:]:
            reason += f"; after step {last['step']} of seed {last['seed']} its training accuracy was {last['accuracy']}"
        return {**identity(study, mixers), "status": status, "reason": reason, "scores": seen["score"]}

    if end - time.monotonic() < least_s:
        return ended("skipped", f"less than {least_s:.0f} s of the budget were left")
    try:
        return run(study, mixers, record)
    except OutOfTime:
        return ended("stopped", "the budget was spent")
    except Exception as error:  # the other models are worth having
        return ended("failed", f"{type(error).__name__}: {error}") | {"traceback": traceback.format_exc()}


def in_a_process(function: Callable[[], dict[str, Any]], study: Study) -> dict[str, Any]:
    """function() in a process of its own; a process that dies is a model that failed."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function).result()
        except Exception as error:
            return {**identity(study, study.mixers[0]), "status": "failed", "reason": f"its process: {type(error).__name__}: {error}"}


def append(file: Path, text: str) -> None:
    """A line by one write: processes share the file."""
    with file.open("ab", buffering=0) as raw:
        raw.write(text.encode() + b"\n")


def main(suite: Suite) -> list[dict[str, Any]]:
    suite.out.mkdir(parents=True, exist_ok=True)
    start, runs = time.monotonic(), []
    events, errors = suite.out / "recall.jsonl", suite.out / "errors.txt"
    for file in (events, errors):
        file.write_text("")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of the processes: each takes the memory that it needs
    end = start + suite.budget_s
    with ThreadPoolExecutor(suite.jobs) as pool:
        futures = {}
        for name, study in studies(suite):
            within = functools.partial(run_within, study, events, end, suite.least_s)
            futures[pool.submit(in_a_process, within, study)] = name
        for future in as_completed(futures):
            run = future.result()
            if trace := run.pop("traceback", None):
                append(errors, f"== {futures[future]}\n{trace}")
            runs.append(run)
            print(f"{time.monotonic() - start:6.1f} s  {futures[future]}: {run['status']} {run.get('reason', '')}", flush=True)
            write_results(suite.out, runs, {"suite": {k: str(v) for k, v in dataclasses.asdict(suite).items()}})
    runs.sort(key=lambda run: (run["task"], run["mixers"]))
    print("\n".join(table(runs)))
    print(f"{len(runs)} models in {time.monotonic() - start:.0f} s; files in {suite.out}/ (results.json, recall.jsonl, errors.txt)")
    return runs


if __name__ == "__main__":
    main(tyro.cli(Suite))
