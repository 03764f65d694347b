"""The recall study as one command for one GPU: every model in a process of its own, several at a time, within a time budget.

    python -m experiments.recall_suite --out F                   # H200: stack, mqar and length extrapolation, 3 seeds each
    python -m experiments.recall_suite --out F --parts stack     # one part

Such small models leave most of a GPU idle (a step is hundreds of short launches) and each has programs of its own to compile, so
processes side by side finish sooner than one after the other. What does not fit the budget is not started, or stopped, and stands in
the results as such. Writes results.json (of all, after every end), recall.jsonl (all events) and errors.txt into --out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

import tyro

from experiments.recall import Study, identity, table, write_results

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
PARTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "stack": ({"task": "stack"}, ("kda", "no_delta", "gdn", "mla")),
    "mqar": ({"task": "mqar"}, ("kda", "kda_zero_bias")),
    "extrapolation": ({"task": "recall", "eval_lengths": LENGTHS}, ("kda,mla", "mla_rotary", "kda")),
}
ORDER = (("stack", 0), ("mqar", 0), ("mqar", 1), ("stack", 1), *(("extrapolation", i) for i in range(3)), ("stack", 2), ("stack", 3))
"""(part, which of its models): what the claims rest on first."""
SHARED = ("steps", "batch", "seeds", "block", "dtype")
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
    block: int = 100
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16: KDA's kernels run on a Hopper GPU."""
    budget_s: float = 510.0
    """Seconds from the start until the last process is stopped."""
    least_s: float = 90.0
    """No process is started with less than this left."""
    jobs: int = 5
    """Processes at a time."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A process to be: name of its folder, what it stands for in the results, its command."""

    name: str
    identity: dict[str, Any]
    command: list[str]


def studies(suite: Suite) -> list[tuple[str, Study]]:
    """(name, a study of one model), the most important first."""
    found = []
    for part, index in ORDER:
        if part in suite.parts:
            settings, mixers = PARTS[part]
            shared: dict[str, Any] = {name: getattr(suite, name) for name in SHARED}
            found.append((f"{part}-{mixers[index].replace(',', '-')}", Study(mixers=(mixers[index],), **settings, **shared)))
    return found


def flags(study: Study) -> list[str]:
    """The command line that gives `study`."""
    words = []
    for field in dataclasses.fields(study):
        value = getattr(study, field.name)
        if value != field.default and value is not None:
            words += ["--" + field.name.replace("_", "-"), *map(str, value if isinstance(value, tuple) else (value,))]
    return words


def run_jobs(jobs: list[Job], folder: Path, *, parallel: int, budget_s: float, least_s: float, on_end: Any) -> None:
    """Run the commands, `parallel` at a time, in order. on_end(job, status, reason) once for each: done, failed, stopped or skipped."""
    end = time.monotonic() + budget_s
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # processes share the card: each takes what it needs

    def run(job: Job) -> tuple[str, str]:
        left = end - time.monotonic()
        if left < least_s:
            return "skipped", f"less than {least_s:.0f} s of the budget of {budget_s:.0f} s were left"
        (folder / job.name).mkdir(parents=True, exist_ok=True)
        with (folder / job.name / "log.txt").open("w") as log:
            try:
                done = subprocess.run(job.command, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=left)
            except subprocess.TimeoutExpired:
                return "stopped", f"the budget of {budget_s:.0f} s was spent, {left:.0f} s after its start"
        return "failed" if done.returncode else "done", f"exit status {done.returncode}"

    with ThreadPoolExecutor(parallel) as pool:
        futures = {pool.submit(run, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                on_end(futures[future], *future.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def outcome(job: Job, folder: Path, status: str, reason: str) -> dict[str, Any]:
    """A run of results.json: the process's own, or why there is none and how far it came."""
    results = folder / job.name / "results.json"
    if status == "done" and results.exists():
        return json.loads(results.read_text())["runs"][0]
    run = {**job.identity, "status": status if status != "done" else "failed", "reason": reason}
    blocks = [event for event in events(folder / job.name) if event["event"] == "block"]
    if blocks:
        run["last_block"] = blocks[-1]
        accuracy = statistics.mean(blocks[-1]["accuracy"])
        run["reason"] += f"; after step {blocks[-1]['step']} its training accuracy was {accuracy:.3f}"
    return run


def events(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of recall.jsonl."""
    path = folder / "recall.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main(suite: Suite) -> list[dict[str, Any]]:
    suite.out.mkdir(parents=True, exist_ok=True)
    start, runs = time.monotonic(), []
    for name in ("recall.jsonl", "errors.txt"):
        (suite.out / name).write_text("")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        jobs = []
        for name, study in studies(suite):
            command = [sys.executable, "-m", "experiments.recall", *flags(study), "--out", str(folder / name)]
            jobs.append(Job(name, identity(study, study.mixers[0]), command))

        def on_end(job: Job, status: str, reason: str) -> None:
            runs.append(outcome(job, folder, status, reason))
            print(f"{time.monotonic() - start:6.1f} s  {job.name}: {runs[-1]['status']} {runs[-1].get('reason', '')}", flush=True)
            with (suite.out / "recall.jsonl").open("a") as file:
                file.writelines(json.dumps(event) + "\n" for event in events(folder / job.name))
            log = folder / job.name / "log.txt"
            if runs[-1]["status"] != "done" and log.exists():
                with (suite.out / "errors.txt").open("a") as file:
                    file.write(f"== {job.name}: {reason}\n{log.read_text()[-4000:]}\n")
            write_results(suite.out, runs, {"suite": {k: str(v) for k, v in dataclasses.asdict(suite).items()}})

        run_jobs(jobs, folder, parallel=suite.jobs, budget_s=suite.budget_s, least_s=suite.least_s, on_end=on_end)
    runs.sort(key=lambda run: (run["task"], run["mixers"]))
    print("\n".join(table(runs)))
    print(f"{len(runs)} models in {time.monotonic() - start:.0f} s; files in {suite.out}/ (results.json, recall.jsonl, errors.txt)")
    return runs


if __name__ == "__main__":
    main(tyro.cli(Suite))
