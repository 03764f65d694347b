"""What to change in a plan that does not fit: other meshes, other forms, more devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..config import MXFP4_GROUP, ModelConfig
from ..parallel.mesh import MeshConfig
from .checks import divisibility
from .memory import memory
from .topology import GIB, Topology
from .traffic import Step, traffic

if TYPE_CHECKING:
    from .planner import Plan

RESERVE = 0.05
"""Share of the memory that a plan leaves free, for the program and what the estimate of activations misses."""
MOST_FACTOR = 4096


def budget(topology: Topology) -> int:
    """Bytes of one device that a plan may use."""
    return int(topology.memory * (1 - RESERVE))


def memory_of(made: Plan, *, config: ModelConfig | None = None, mesh: MeshConfig | None = None, step: Step | None = None) -> int:
    """Bytes of one device after a change."""
    found = memory(config or made.config, mesh or made.mesh, step or made.step, made.optimizer)
    return found.inference if made.optimizer == "none" else found.training


def changes(made: Plan) -> list[str]:
    """What fits: meshes of the same devices first, then other forms and dtypes, then meshes of more devices. Smallest factors."""
    axes = (("fsdp", "cuts rows and weights"), ("expert", "cuts rows and experts"), ("sequence", "cuts time"), ("tensor", "cuts heads"))
    same, more = [], []
    for axis, what in axes:
        mesh = _grown(made, axis)
        if mesh is not None:
            line = f"mesh.{axis} {getattr(made.mesh, axis)} -> {getattr(mesh, axis)} ({what}"
            if mesh.size == made.mesh.size:
                same.append(f"{line}; mesh.data {made.mesh.data} -> {mesh.data}, same devices)")
            else:
                more.append(f"{line}; {mesh.size:,} devices)")
    return (same or _other_mesh(made)) + _other_settings(made) + more


def _other_settings(made: Plan) -> list[str]:
    c, step, mesh = made.config, made.step, made.mesh
    over = mesh.data * mesh.fsdp * mesh.expert
    tried: list[tuple[str, ModelConfig, Step]] = []
    if c.remat == "none" and made.optimizer != "none":
        tried.append(("--remat full: keep block boundaries only", c.replace(remat="full"), step))
    if c.param_dtype == "float32":
        tried.append(("--param-dtype bfloat16 (moments stay float32)", c.replace(param_dtype="bfloat16"), step))
    if c.moe.expert_weights == "float" and made.optimizer == "none" and _packable(c):
        tried.append(("--expert-weights mxfp4: packed experts", c.replace(moe={"expert_weights": "mxfp4"}), step))
    if step.attention == "gather" and mesh.sequence > 1:
        tried.append(("--attention ring: one shard's latents at a time", c, dataclasses.replace(step, attention="ring")))
    if step.rows > over:
        tried.append((f"--batch {over}, and micro-batches in training", c, dataclasses.replace(step, rows=over)))
    return [text for text, config, changed in tried if memory_of(made, config=config, step=changed) <= budget(made.topology)]


def _packable(config: ModelConfig) -> bool:
    """Experts' widths are whole blocks of MXFP4."""
    return not (config.moe.latent or config.hidden) % MXFP4_GROUP and not config.moe.expert_width % MXFP4_GROUP


def _other_mesh(made: Plan) -> list[str]:
    """Of all meshes of the topology's devices: the one that fits and sends least, or how far the best is from fitting."""
    over = [mesh for mesh in meshes(made.topology.devices) if mesh.data * mesh.fsdp * mesh.expert <= made.step.rows]
    over = [mesh for mesh in over if mesh.sequence <= made.step.context and not divisibility(made.config, mesh)]
    if not over:
        return [f"no mesh of {made.topology.devices:,} devices divides the model and has a row for each device: give a larger --batch."]
    sized = [(memory_of(made, mesh=mesh), mesh) for mesh in over]
    good = [mesh for size, mesh in sized if size <= budget(made.topology)]
    if good and made.optimizer == "none":
        best = min(sized, key=lambda pair: pair[0])[1]
        return [f"several axes: {flags(best)}, same devices (of {len(good)} meshes that fit, it needs least)"]
    if good:
        best = min(good, key=lambda mesh: sum(transfer.sent for transfer in traffic(made.config, mesh, made.step)))
        return [f"several axes: {flags(best)}, same devices (of {len(good)} meshes that fit, it sends least)"]
    size, mesh = min(sized, key=lambda pair: pair[0])
    nearest = dataclasses.replace(made, memory=memory(made.config, mesh, made.step, made.optimizer))
    what, most = max(_parts(nearest).items(), key=lambda pair: pair[1])
    return [
        f"no mesh of {made.topology.devices:,} devices fits {made.step.rows} rows of {made.step.context:,} tokens; {flags(mesh)} "
        f"comes nearest with {size / GIB:,.1f} GiB, of which {most / GIB:,.1f} GiB are: {what}. "
        "Take more chips, a smaller --batch or a shorter --context."
    ]


def meshes(devices: int) -> Iterator[MeshConfig]:
    """Every mesh of so many devices."""

    def split(rest: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (rest,)
            return
        for size in (n for n in range(1, rest + 1) if rest % n == 0):
            for more in split(rest // size, axes - 1):
                yield (size, *more)

    for sizes in split(devices, 5):
        yield MeshConfig(*sizes)


def flags(mesh: MeshConfig) -> str:
    """As the command line takes it; axes of size 1 are left out."""
    return " ".join(f"--mesh.{name} {size}" for name, size in dataclasses.asdict(mesh).items() if size > 1) or "one device"


def _parts(made: Plan) -> dict[str, int]:
    m = made.memory
    if made.optimizer == "none":
        return {"parameters": m.parameters, **m.caches}
    return {"parameters, gradients and optimizer": m.parameters + m.gradients + m.optimizer, **m.activations}


def _grown(made: Plan, axis: str) -> MeshConfig | None:
    """The mesh with one axis grown until it fits: by devices of `data` where it has them, else by more devices."""
    for factor in (2**n for n in range(1, MOST_FACTOR.bit_length())):
        mesh = dataclasses.replace(made.mesh, **{axis: getattr(made.mesh, axis) * factor})
        if made.mesh.data % factor == 0:
            mesh = dataclasses.replace(mesh, data=made.mesh.data // factor)
        if divisibility(made.config, mesh) or (axis == "sequence" and mesh.sequence > made.step.context):
            return None
        if memory_of(made, mesh=mesh) <= budget(made.topology):
            return mesh
    return None
