"""A model, a mesh and a batch -> what lies on each device, what it computes and sends, what does not fit and what to change.

Pure formulas with the default AxisRules: nothing is allocated or compiled. Sizes of weights and optimizer are exact; activations
are an estimate; see the modules beside this one.
"""

from __future__ import annotations

import dataclasses

from ..config import ModelConfig
from ..parallel.mesh import MeshConfig
from .changes import RESERVE, budget, changes
from .checks import check_step, divisibility, notes
from .flops import PartFlops, part_flops
from .memory import Memory, memory
from .topology import GIB, Topology
from .traffic import Step, Transfer, traffic


@dataclasses.dataclass(frozen=True)
class Plan:
    """See the module. Bytes and FLOPs are those of one device, FLOPs a token excepted."""

    config: ModelConfig
    mesh: MeshConfig
    step: Step
    topology: Topology
    optimizer: str
    memory: Memory
    flops: list[PartFlops]
    traffic: list[Transfer]
    problems: list[str]
    """What makes the plan impossible; empty: it can run."""
    changes: list[str]
    """What would make it fit, when memory is the problem."""
    notes: list[str]
    """What is wasted or stays whole."""
    compiles: bool
    """Nothing but memory, if anything, stands against it."""

    @property
    def needed(self) -> int:
        """Bytes of one device."""
        return self.memory.inference if self.optimizer == "none" else self.memory.training

    @property
    def tokens(self) -> int:
        """Of one device, padding included."""
        rows, length = self.step.local(self.mesh)
        return rows * length

    @property
    def step_flops(self) -> float:
        """FLOPs of one device in a step, recomputation included."""
        return self.tokens * sum(part.executed for part in self.flops) / self.mesh.tensor


def plan(config: ModelConfig, mesh: MeshConfig, step: Step, topology: Topology, optimizer: str = "adamw") -> Plan:
    """Plan a train step (optimizer="adamw") or inference with full caches ("none").

    Raises:
      ValueError: rows, context, dtype, attention, transport or optimizer that no step can have.
    """
    check_step(step)
    problems = divisibility(config, mesh)
    if mesh.size != topology.devices:
        problems.append(
            f"the mesh has {mesh.size:,} devices, {topology.name} has {topology.devices:,}: "
            + (f"multiply an axis by {topology.devices // mesh.size}" if topology.devices % mesh.size == 0 else "change the axes")
            + f" until their product is {topology.devices:,}."
        )
    if optimizer != "none" and config.moe.expert_weights == "mxfp4":
        problems.append("expert_weights='mxfp4' holds read-only experts; plan with --optimizer none, or --expert-weights mxfp4_qat.")
    found = memory(config, mesh, step, optimizer)
    made = Plan(
        config=config,
        mesh=mesh,
        step=step,
        topology=topology,
        optimizer=optimizer,
        memory=found,
        flops=part_flops(config, step.context, mesh),
        traffic=traffic(config, mesh, step) if optimizer != "none" else [],
        problems=problems,
        changes=[],
        notes=notes(config, mesh, step),
        compiles=not problems,
    )
    if made.needed <= budget(topology):
        return made
    over = made.needed / budget(topology)
    problems.append(
        f"{made.needed / GIB:,.2f} GiB a device is {over:.2f} times the {budget(topology) / GIB:.2f} GiB that {topology.kind} has "
        f"({topology.memory / GIB:.2f} less {RESERVE:.0%})."
    )
    return dataclasses.replace(made, changes=[] if divisibility(config, mesh) else changes(made))
