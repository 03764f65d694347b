"""Where a process stands among the others of its run, from arguments, the environment and the scheduler. Connects to nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

PORT = 8476  # where a coordinator is named without one; Cloud TPU's firewall rules open it. JAX >= 0.8.1 alone would take 8482


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this process stands among the others, and who said so."""

    coordinator: str
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None
    source: str


def resolve(
    environment: Mapping[str, str],
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    local_devices: Sequence[int] | None = None,
    timeout_s: float = 300.0,
) -> Place | None:
    """The settings that are given, filled up from MOEJAX_*, then JAX_*, then JAX's detection; None: this process is alone.

    timeout_s: how long JAX's detection may wait for the name of process 0's host to become known (pods).
    Raises ValueError for a setting that is bad or missing.
    """
    get = environment.get
    source = ["arguments"] if (coordinator, processes, process_id) != (None, None, None) else []
    for name, prefix in (("MOEJAX_*", "MOEJAX_"), ("JAX_*", "JAX_")):
        variables = _variables(prefix)
        before = (coordinator, processes, process_id)
        coordinator = coordinator or get(variables[0]) or None
        processes = _integer(variables[1], get(variables[1]), 1) if processes is None else processes
        process_id = _integer(variables[2], get(variables[2]), 0) if process_id is None else process_id
        if local_devices is None and get(variables[3]):
            local_devices = [_integer(variables[3], part, 0) or 0 for part in environment[variables[3]].split(",")]
        source += [name] if (coordinator, processes, process_id) != before else []
    if None in (coordinator, processes, process_id) and processes != 1 and _may_be_cluster(environment):
        given = (coordinator, processes, process_id)
        coordinator, processes, process_id, ids = _detected(*given, local_devices, math.ceil(timeout_s))
        if (coordinator, processes, process_id) != given:
            source.append("JAX's detection of the cluster")
            if get("MOEJAX_PORT") and given[0] is None and coordinator:
                coordinator = f"{split_address(coordinator)[0]}:{_integer('MOEJAX_PORT', get('MOEJAX_PORT'), 1)}"
        local_devices = local_devices if local_devices is not None or not _shares_host(environment) else ids
    if processes == 1 or (coordinator, processes, process_id) == (None, None, None):
        return None
    return _checked(environment, coordinator, processes, process_id, local_devices, " and ".join(source))


def _variables(prefix: str) -> tuple[str, str, str, str]:
    if prefix == "JAX_":
        return "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS"
    return "MOEJAX_COORDINATOR", "MOEJAX_PROCESSES", "MOEJAX_PROCESS_ID", "MOEJAX_LOCAL_DEVICES"


def _checked(environment, coordinator, processes, process_id, local_devices, source) -> Place:
    settings = {"coordinator": coordinator, "processes": processes, "process_id": process_id}
    missing = [name for name, value in settings.items() if value is None]
    if missing:
        given = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
        ways = ", ".join(f"{name}= or MOEJAX_{name.upper()}" for name in missing)
        raise ValueError(f"{given} (from {source}) is only a part of what is needed to find the other processes; also give {ways}.")
    if not isinstance(processes, int) or processes < 1:
        raise ValueError(f"processes is {processes!r}; it must be an integer of at least 1.")
    if not isinstance(process_id, int) or not 0 <= process_id < processes:
        raise ValueError(
            f"process_id is {process_id!r} of {processes} processes (from {source}); the numbers are 0 to {processes - 1}, each once."
        )
    if ":" not in coordinator.rsplit("]", 1)[-1]:  # an IPv6 address stands in brackets
        port = environment.get("MOEJAX_PORT") or environment.get("JAX_COORDINATOR_PORT") or PORT
        coordinator = f"{coordinator}:{port}"
    host, port = split_address(coordinator)
    if not host or not 0 < port < 65536:
        raise ValueError(f"coordinator is {coordinator!r}; it must be HOST:PORT of process 0, say node1:{PORT} (IPv6: [::1]:{PORT}).")
    if host in ("localhost", "127.0.0.1", "[::1]") and int(environment.get("SLURM_STEP_NUM_NODES") or 1) > 1:
        raise ValueError(f"coordinator is {coordinator!r}, but this run has several hosts; give process 0's host as the others see it.")
    return Place(coordinator, processes, process_id, None if local_devices is None else tuple(local_devices), source)


def split_address(coordinator: str) -> tuple[str, int]:
    """HOST:PORT -> host, port (0 when it is no number)."""
    host, _, port = coordinator.rpartition(":")
    return host, int(port) if port.isdecimal() else 0


def _may_be_cluster(environment: Mapping[str, str]) -> bool:
    """A pod that is no numbered member of a job is alone; JAX's detection would fail there instead of saying so."""
    pod = "KUBERNETES_SERVICE_HOST" in environment and not {"TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"} & set(environment)
    return not pod or "JOB_COMPLETION_INDEX" in environment


def _shares_host(environment: Mapping[str, str]) -> bool:
    """Whether several processes run on this host and none was given its own GPU by the scheduler."""
    if len(environment.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1:  # srun --gpus-per-task=1: what it sees is its own
        return False
    tasks, nodes = environment.get("SLURM_NTASKS"), environment.get("SLURM_STEP_NUM_NODES")
    if tasks and nodes:
        return int(tasks) > int(nodes)
    return int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1) > 1


def _detected(coordinator, processes, process_id, local_devices, timeout_s):
    """What JAX's detection would fill in. It has no public form that does not connect, and connecting ends the process when it fails."""
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(coordinator, processes, process_id, local_devices, None, timeout_s)


def _integer(name: str, text: str | None, least: int) -> int | None:
    if not text:
        return None
    if not text.strip().isdecimal() or int(text) < least:
        raise ValueError(f"{name} is {text!r}; it must be an integer of at least {least}.")
    return int(text)
