"""What the sections of `latency.py` share: sizes, models, compiled programs, rows that are printed and written at once."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import jax
from latency_subject import Program, Request, Size, Subject, compile_all, random_key

GRACE = 45  # seconds beyond a section's budget in which what was compiled is still measured


class Bench:
    """What all sections share: the sizes, the models and programs made so far, the rows, the clock of the section."""

    def __init__(self, size: Size, out: pathlib.Path | None):
        self.size, self.out = size, out
        self.rows: list[dict[str, Any]] = []
        self.section, self.end = "", float("inf")
        self.programs: dict[Any, Program] = {}
        self._subjects: dict[str, Subject] = {}
        self.longest_compile = 0.0

    def begin(self, section: str, seconds: float) -> None:
        self.section, self.end = section, time.perf_counter() + seconds

    def left(self) -> float:
        """Seconds of the section's budget."""
        return self.end - time.perf_counter()

    def over(self) -> bool:
        """Whether not even a measurement of a few seconds, whose program is compiled, should begin."""
        return self.left() < -GRACE

    def can_compile(self) -> bool:
        """Whether more programs and a few seconds of measuring fit, by what the slowest group took."""
        return self.left() > self.longest_compile

    def subject(self, name: str) -> Subject:
        if name not in self._subjects:
            self._subjects[name] = Subject(name, self.size)
        return self._subjects[name]

    def add(self, **row: Any) -> dict[str, Any]:
        """Print a row and write it to the file at once: what a later row does to the process does not cost this one."""
        row = {"section": self.section} | row
        self.rows.append(row)
        shown = "  ".join(f"{key} {_shown(value)}" for key, value in row.items() if key != "section")
        print(f"{self.section:8}{shown}", flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return row

    def skip(self, what: str) -> None:
        self.add(left_out=f"{what}: the section's time is used up")

    def fail(self, what: str, error: BaseException) -> None:
        self.add(failed=f"{what}: {type(error).__name__}: {str(error)[:300]}")

    def compile(self, requests: dict[Any, Request], *subjects: Subject) -> dict[Any, Program]:
        """The programs of `requests`, side by side with those that make the weights of `subjects`. One that fails is a row and left out."""
        begin = time.perf_counter()
        wanted = {("weights", s.name): s.request() for s in subjects if s.weights is None}
        wanted |= {key: request for key, request in requests.items() if key not in self.programs}
        found = compile_all(wanted)
        for key, program in found.items():
            if isinstance(program, Exception):
                self.fail("compile " + " ".join(map(str, key)), program)
            else:
                self.programs[key] = program
        seconds = [program.compile_s for program in found.values() if isinstance(program, Program)]
        took = time.perf_counter() - begin
        self.longest_compile = max(self.longest_compile, took)
        self.add(programs=len(found), compile_s=took, longest_s=max(seconds, default=0.0))
        for subject in subjects:
            if subject.weights is None:
                program = self.programs.pop(("weights", subject.name))  # KeyError: it failed, so the section does
                subject.weights = jax.block_until_ready(program.call(random_key(0)))
        return {key: self.programs[key] for key in requests if key in self.programs}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, list):
        return "[" + " ".join(map(_shown, value)) + "]"
    return str(value)
