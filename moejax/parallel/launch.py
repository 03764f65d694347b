"""A run of several processes: `initialize()` first thing in a program, then `barrier()` and `leave()`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .place import Place, resolve, split_address
from .roll_call import Member, ranges, roll_call

TIMEOUT_S = 1800  # JAX's 300 s ends a large run that starts cold: images, pods and names come minutes apart
HEARTBEAT_S = 100  # JAX's own


@dataclasses.dataclass
class Run:
    """The run of several processes that this one has joined."""

    place: Place
    members: list[Member]
    """In order of their numbers."""
    barriers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Calls so far, by name."""

    @property
    def me(self) -> Member:
        return self.members[self.place.process_id]


_run: Run | None = None


def initialize(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    local_devices: Sequence[int] | None = None,
    timeout_s: float | None = None,
    heartbeat_s: int | None = None,
    expect_processes: int | None = None,
    expect_devices: int | None = None,
    quiet: bool = False,
) -> None:
    """Join this process to the others of its run. Call it first thing in the program, before anything touches a device.

    Each setting comes from its argument, else MOEJAX_<NAME>, else JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID,
    JAX_LOCAL_DEVICE_IDS, else from what JAX detects (SLURM, Cloud TPU, GKE, Open MPI, Kubernetes jobs). Where none of them
    speaks of other processes it does nothing, however often it is called. In a run of several processes it does a roll call
    (`roll_call`), starts `jax.distributed`, checks the counts, lets process 0 print one line for each process, and makes an
    uncaught exception end this process at once (`leave`) instead of after JAX's wait of 300 s for the others.

    Args:
      coordinator: "host:port" of process 0 as the others reach it; the port must be free there (without one: MOEJAX_PORT,
        JAX_COORDINATOR_PORT, 8476; MOEJAX_PORT also replaces the port that JAX detects).
      processes: how many there are.
      process_id: the number of this one, from 0.
      local_devices: GPUs of this host that this process uses, as ids; None: all that it sees, and one each where the scheduler
        runs several processes a host. An error where there are no GPUs. In the environment: "0,1".
      timeout_s: seconds to wait for the others; default MOEJAX_TIMEOUT_S, 1800.
      heartbeat_s: seconds without a sign of life after which a process counts as dead and all others end; default
        MOEJAX_HEARTBEAT_S, 100.
      expect_processes: the number the program needs; None: any.
      expect_devices: devices of all processes together that the program needs; None: any.
      quiet: print nothing; `who_is_who` has the lines.

    Raises:
      ValueError: a bad or missing setting, another number of processes or devices than expected, processes that disagree.
      TimeoutError: somebody did not come; the message says who.
      RuntimeError: a second call in a run of several processes, or devices were touched before.
    """
    timeout = _number("timeout_s", timeout_s, "MOEJAX_TIMEOUT_S", TIMEOUT_S)
    heartbeat = _number("heartbeat_s", heartbeat_s, "MOEJAX_HEARTBEAT_S", HEARTBEAT_S)
    global _run
    if _run is not None:
        raise RuntimeError(f"initialize() was called before: this is {_run.me} of {len(_run.members)}. Call it once a program.")
    place = resolve(os.environ, coordinator, processes, process_id, local_devices, timeout)
    count = place.processes if place else 1
    if expect_processes is not None and count != expect_processes:
        said = place.source if place else "nothing in the arguments, the environment or the scheduler speaks of others"
        raise ValueError(
            f"This run has {count} process{'es' if count > 1 else ''} ({said}); the program expects {expect_processes}. Start that "
            "many (experiments/launch has a script for each scheduler) or change expect_processes."
        )
    if place is None:
        if local_devices is not None or os.environ.get("MOEJAX_LOCAL_DEVICES"):
            raise ValueError("local_devices has a meaning among several processes only; for one process set CUDA_VISIBLE_DEVICES.")
        _check_devices(expect_devices)
        if not quiet:
            print("One process: nothing to connect to.", flush=True)
        return
    _check_untouched()
    host, port = split_address(place.coordinator)
    me = Member(place.process_id, place.processes, socket.gethostname(), os.getpid(), jax.__version__)
    run = Run(place, roll_call(me, host, port, timeout))
    jax.distributed.initialize(
        place.coordinator,
        num_processes=place.processes,
        process_id=place.process_id,
        local_device_ids=place.local_devices,
        cluster_detection_method="deactivate",  # else JAX hands each SLURM task one GPU, also where a task has a whole host
        initialization_timeout=math.ceil(timeout),
        heartbeat_timeout_seconds=math.ceil(heartbeat),
    )
    _run = run
    _leave_on_errors()
    try:
        _check_devices(expect_devices, place)
    except ValueError:
        _run = None
        jax.distributed.shutdown()  # all processes raise this: each waits for the others, none is cut off before its message
        raise
    if place.process_id == 0 and not quiet:
        print("\n".join(who_is_who()), flush=True)


def barrier(name: str, *, timeout_s: float) -> None:
    """Wait until every process has called this with the same name; in a run of one process it does nothing.

    Raises:
      TimeoutError: it took longer than `timeout_s` seconds, or a process ended; the message says who did not come.
    """
    if _run is None:
        return
    client = _client()
    _run.barriers[name] += 1
    key = f"moejax/barrier/{name}/{_run.barriers[name]}"
    try:
        client.key_value_set(f"{key}/{_run.place.process_id}", "here")
        client.wait_at_barrier(key, math.ceil(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise TimeoutError(
            f"{_run.me} waited at the barrier {name!r} for at most {timeout_s:g} s. {_missing_at(client, key, _run.members)} Look at the "
            f"output of those; a slow step needs a longer timeout_s. JAX says: {str(error).splitlines()[0]}"
        ) from None
    if _run.place.process_id == 0:
        client.key_value_delete(key)


def _missing_at(client, key: str, members: list[Member]) -> str:
    try:
        here = {int(found.rsplit("/", 1)[1]) for found, _ in client.key_value_dir_get(key)}
    except jax.errors.JaxRuntimeError:
        return f"{members[0]}, which keeps the list, does not answer."
    missing = [member for member in members if member.process_id not in here]
    return f"Missing ({len(missing)} of {len(members)}): {', '.join(map(str, missing[:16])) or 'nobody, but somebody came late'}."


def leave(status: int) -> None:
    """End this process with an exit status. In a run of several processes a status other than 0 ends it at once, without exit handlers.

    Otherwise JAX's exit handler would first wait 300 s for the others, which wait for this one; so they, the scheduler and the
    launcher hear of it at once.
    """
    if status == 0 or _run is None:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _client() -> Any:
    """The key-value store and barriers of the coordinator; JAX has them, Orbax uses them, no public name yet."""
    from jax._src import distributed

    return distributed.global_state.client


def _check_untouched() -> None:
    from jax._src import xla_bridge

    if jax.distributed.is_initialized():
        raise RuntimeError("jax.distributed is initialized already; leave it to moejax.parallel.initialize(), or do not call that.")
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "A device was touched before initialize(): this process already sees its own devices only. Call initialize() first thing in "
            "the program; jax.devices(), jax.numpy arrays and jax.random keys (also at import) come after it."
        )


def _check_devices(expected: int | None, place: Place | None = None) -> None:
    """The same error on all processes: all know of all devices."""
    if place is not None and place.local_devices is not None and jax.default_backend() != "gpu":
        raise ValueError(
            f"local_devices is {place.local_devices}: it chooses among GPUs, and the devices here are of kind {jax.default_backend()}; "
            "leave it out."
        )
    if place is not None and jax.process_count() != place.processes:
        raise ValueError(
            f"{place.processes} processes were started, but the {jax.default_backend()} devices belong to {jax.process_count()}: start one "
            "process a host of the slice, each with the whole host's devices."
        )
    if expected is not None and jax.device_count() != expected:
        counts = collections.Counter(device.process_index for device in jax.devices())
        groups = [f"{count} on {'each of processes' if len(who) > 1 else 'process'} {ranges(who)}" for count, who in _grouped(counts)]
        raise ValueError(
            f"There are {jax.device_count()} {jax.devices()[0].device_kind} devices ({'; '.join(groups)}); the program expects {expected}. "
            "Start as many hosts as that needs and let each process see all of its host's devices (CUDA_VISIBLE_DEVICES, SLURM's "
            "--gpus-per-node; on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=N), or change expect_devices."
        )


def _grouped(counts: Mapping[int, int]) -> list[tuple[int, list[int]]]:
    order = sorted(counts, key=lambda who: (counts[who], who))
    return [(count, list(who)) for count, who in itertools.groupby(order, key=lambda who: counts[who])]


def who_is_who() -> list[str]:
    """One line for the run and one for each process, for a program that shows them in its own way; alone: none."""
    if _run is None:
        return []
    kinds: dict[int, list[str]] = collections.defaultdict(list)
    for device in jax.devices():
        kinds[device.process_index].append(device.device_kind)
    place = _run.place
    lines = [f"{place.processes} processes, {jax.device_count()} devices, coordinator {place.coordinator} (from {place.source})"]
    for member in _run.members:
        found = collections.Counter(kinds[member.process_id])
        devices = ", ".join(f"{count} x {kind}" for kind, count in found.items()) or "no devices"
        lines.append(f"  {member}: {devices}")
    return lines


def _leave_on_errors() -> None:
    """An uncaught exception shows its traceback, then ends this process without the wait for the others."""
    show = sys.excepthook

    def hook(kind, error, traceback):
        show(kind, error, traceback)
        if _run is not None:  # not when initialize() itself refused
            print(f"{_run.me} failed: it ends now and does not wait for the others.", file=sys.stderr)
            leave(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def _number(name: str, value: float | None, variable: str, default: float) -> float:
    if value is None and os.environ.get(variable):
        name, text = variable, os.environ[variable]
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{variable} is {text!r}; it must be a number of seconds.") from None
    value = default if value is None else value
    if not (0 < value < math.inf):
        raise ValueError(f"{name} is {value!r}; it must be a number of seconds above 0.")
    return value
