"""Run any program as N processes on this machine's CPU, as a cluster would: to try a multi-host run before it costs anything.

    python -m experiments.launch.local 2 -- experiments/pretrain.py --mesh.expert 4
    python -m experiments.launch.local 4 --devices-per-process 2 --initialize -- -m some.module

What follows -- goes to this Python: a file and its arguments, -m MODULE or -c CODE. Output lines start with the number of
their process. The first process that fails ends the others; its exit status is the status here (128 + signal for a signal).
Ctrl-C asks all to end, and ends them when they have not within --grace-s.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Annotated

import tyro

FORCED = "--xla_force_host_platform_device_count"
START = "from moejax.parallel import initialize as i; i(); import runpy, sys; sys.argv = sys.argv[1:]; "
RUN_FILE = "import os; sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0]))); runpy.run_path(sys.argv[0], run_name='__main__')"
RUN_MODULE = "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How many processes, and how they end."""

    processes: tyro.conf.Positional[int]
    """How many processes to start."""
    devices_per_process: int = 4
    """CPU devices that JAX shows in each of them."""
    initialize: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Call moejax.parallel.initialize() before the program, for one that does not call it itself."""
    timeout_s: float = 120
    """Seconds that the processes wait for each other at the start (MOEJAX_TIMEOUT_S)."""
    heartbeat_s: int = 10
    """Seconds without a sign of life after which a process counts as dead (MOEJAX_HEARTBEAT_S)."""
    grace_s: float = 15
    """Seconds for the others to end by themselves, with their own message, after a failure or Ctrl-C."""

    def __post_init__(self) -> None:
        for name in ("processes", "devices_per_process", "heartbeat_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.timeout_s <= 0 or self.grace_s < 0:
            raise ValueError(f"timeout_s is {self.timeout_s:g} and grace_s is {self.grace_s:g}; they are seconds, not negative.")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; -> the exit status: the first failure's, 2 for bad input, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    split = arguments.index("--") if "--" in arguments else len(arguments)
    try:
        settings = tyro.cli(Settings, args=arguments[:split], prog="python -m experiments.launch.local", description=__doc__)
        command = program(settings, arguments[split + 1 :])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    say(f"{settings.processes} processes x {settings.devices_per_process} CPU devices: {shlex.join(arguments[split + 1 :])}")
    return run(settings, command)


def program(settings: Settings, given: list[str]) -> list[str]:
    """The command of each process."""
    if not given:
        raise ValueError("nothing to run; give the program after --, say: local.py 2 -- experiments/pretrain.py --steps 20")
    if not settings.initialize:
        return [sys.executable, "-u", *given]
    if given[0] == "-m" and len(given) > 1:
        return [sys.executable, "-u", "-c", START + RUN_MODULE, *given[1:]]
    if given[0].startswith("-"):
        raise ValueError(f"--initialize runs a file or -m MODULE, not {given[0]}; code can call moejax.parallel.initialize() itself.")
    return [sys.executable, "-u", "-c", START + RUN_FILE, *given]


def environment(settings: Settings, number: int, port: int) -> dict[str, str]:
    """What a scheduler's script would set. MOEJAX_* goes before what a surrounding SLURM job or pod says."""
    flags = re.sub(rf"{FORCED}=\S+", "", os.environ.get("XLA_FLAGS", ""))
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} {FORCED}={settings.devices_per_process}".strip(),
        "MOEJAX_COORDINATOR": f"127.0.0.1:{port}",
        "MOEJAX_PROCESSES": str(settings.processes),
        "MOEJAX_PROCESS_ID": str(number),
        "MOEJAX_TIMEOUT_S": f"{settings.timeout_s:g}",
        "MOEJAX_HEARTBEAT_S": str(settings.heartbeat_s),
    }


def run(settings: Settings, command: list[str]) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Each in a session of its own: Ctrl-C comes to this program alone, which passes it on once, and a kill takes grandchildren along.
    started: list[subprocess.Popen] = []
    # SIGINT too: what a shell starts in the background inherits it as ignored.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in range(settings.processes):
            started.append(
                subprocess.Popen(
                    command,
                    env=environment(settings, number, port),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        readers = [threading.Thread(target=copy, args=(number, process), daemon=True) for number, process in enumerate(started)]
        for reader in readers:
            reader.start()
        status = wait(settings, started)
        for reader in readers:
            reader.join(5)  # longer only when a stray grandchild holds the pipe
        return status
    except KeyboardInterrupt:
        say(f"asked to end; the processes have {settings.grace_s:g} s")
        _signal(started, signal.SIGINT)
        _until_ended(started, settings.grace_s)
        return 130
    finally:
        _signal(started, signal.SIGKILL)
        for process in started:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def wait(settings: Settings, started: list[subprocess.Popen]) -> int:
    """Until all have ended, or one has failed and the others had their time; -> the exit status."""
    while True:
        codes = [process.poll() for process in started]
        for number, code in enumerate(codes):
            if code:
                name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                say(f"process {number} ended with {name}; the others have {settings.grace_s:g} s")
                left = _until_ended(started, settings.grace_s)
                if left:
                    say(f"killing process {', '.join(map(str, left))}")
                    _signal(started, signal.SIGKILL)
                return 128 - code if code < 0 else code
        if None not in codes:
            return 0
        time.sleep(0.05)


def copy(number: int, process: subprocess.Popen) -> None:
    """A process's lines, each with its number in front, whole."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"[{number}] {line.decode(errors='replace').rstrip()}\n")
        sys.stdout.flush()


def say(text: str) -> None:
    print(f"[local] {text}", flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _signal(started: list[subprocess.Popen], what: signal.Signals) -> None:
    """To every process that still runs, and to what it has started."""
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, what)


def _until_ended(started: list[subprocess.Popen], seconds: float) -> list[int]:
    """Wait for all, at most so long; -> the numbers of those that still run."""
    end = time.monotonic() + seconds
    while (left := [number for number, process in enumerate(started) if process.poll() is None]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


if __name__ == "__main__":
    sys.exit(main())
