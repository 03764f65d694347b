"""What the sections of `latency.py` share: sizes, models, compiled programs, rows that are printed and written at once."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

from latency_subject import Program, Size, Subject, compile_all, make_subject

GB = 1e9


class Bench:
    """What all sections share: the sizes, the models made so far, the rows, the clock of the section."""

    def __init__(self, size: Size, state_dtype: str, scan: int, out: pathlib.Path | None):
        self.size, self.state_dtype, self.scan, self.out = size, state_dtype, scan, out
        self.rows: list[dict[str, Any]] = []
        self.section, self.end = "", float("inf")
        self._subjects: dict[str, Subject] = {}

    def begin(self, section: str, seconds: float) -> None:
        self.section, self.end = section, time.perf_counter() + seconds

    def left(self) -> float:
        """Seconds of the section's budget."""
        return self.end - time.perf_counter()

    def subject(self, name: str) -> Subject:
        if name not in self._subjects:
            self._subjects[name] = make_subject(name, self.size, self.state_dtype)
        return self._subjects[name]

    def forget(self, name: str) -> None:
        self._subjects.pop(name, None)

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

    def compile(self, requests: dict[Any, Any]) -> dict[Any, Program]:
        begin = time.perf_counter()
        programs = compile_all(requests)
        longest = max(program.compile_s for program in programs.values())
        self.add(programs=len(programs), compile_s=time.perf_counter() - begin, longest_s=longest)
        return programs


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, list):
        return "[" + " ".join(map(_shown, value)) + "]"
    return str(value)
