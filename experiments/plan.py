"""What a model needs on a mesh before any device is rented: memory, FLOPs and traffic of a device, what does not fit, what to change.

    python -m experiments.plan --preset small --mesh.fsdp 2 --mesh.expert 16 --mesh.sequence 4 --topology v5p:4x4x8 --context 8192
    python -m experiments.plan --preset kimi_k3 --mesh.expert 128 --mesh.fsdp 8 --mesh.sequence 2 --topology v5p:8x16x16 \\
        --context 1048576 --optimizer none                               # inference: parameters and caches
    python -m experiments.plan --preset small ... --compile              # and what XLA says, without a TPU (extra `tpu-aot`)

Exit status: 0 it fits, 1 it does not (or did not compile), 2 bad input.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from experiments.compile_for_tpu import CompileError, compile_for_tpu
from moejax import presets
from moejax.config import ModelConfig
from moejax.parallel.mesh import MeshConfig
from moejax.planning import Plan, Step, Topology, by_axes, plan

WIDTH = 120


@dataclasses.dataclass(frozen=True)
class PlanConfig:
    """Settings of a plan."""

    preset: Literal["tiny", "small", "kimi_linear_48b", "kimi_k3"]
    topology: str
    """Chips, as "v5p:4x4x8", "v5e:16x16", "v6e:16x16", "tpu7x:4x4x4", "h100:64" or "h200:64"."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices along each axis; their product is the topology's devices."""
    context: int = 8192
    """Tokens a row."""
    batch: int | None = None
    """Rows of a step, over all devices; None: one for each of data x fsdp x expert."""
    optimizer: Literal["adamw", "none"] = "adamw"
    """"none": inference, every row at the full context."""
    param_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the parameters; None: the preset's."""
    expert_weights: Literal["float", "mxfp4_qat", "mxfp4"] | None = None
    """Of the routed experts; None: the preset's."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the computation."""
    remat: Literal["none", "full"] | None = None
    """None: the preset's."""
    attention: Literal["gather", "ring"] = "gather"
    """MLA over the sequence axis: all latents on every device, or one shard's at a time."""
    transport: Literal["ragged", "padded", "gather"] = "ragged"
    """How experts' rows travel."""
    compile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also compile the train step for the TPU topology, without a TPU. It needs libtpu (pip install 'moejax[tpu-aot]')."""
    compile_minutes: float = 60.0
    """Longest compile."""
    hlo: pathlib.Path | None = None
    """Write the compiled program's text there (with --compile)."""

    def model(self) -> ModelConfig:
        config = presets.get(self.preset).replace(dtype=self.dtype)
        given: dict[str, Any] = {name: getattr(self, name) for name in ("param_dtype", "remat") if getattr(self, name) is not None}
        if self.expert_weights is not None:
            given["moe"] = {"expert_weights": self.expert_weights}
        return config.replace(**given)

    def step(self) -> Step:
        rows = self.mesh.data * self.mesh.fsdp * self.mesh.expert if self.batch is None else self.batch
        return Step(rows, self.context, self.dtype, self.attention, self.transport)


def size(nbytes: float) -> str:
    """Bytes in the unit that leaves 1 to 1023 of it."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:,.1f} {unit}" if unit != "B" else f"{nbytes:,.0f} B"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def memory_table(made: Plan) -> Table:
    m, trains = made.memory, made.optimizer != "none"
    table = _table("memory of a device", ("what", "size", "share of the chip"))
    rows: list[tuple[str, int]] = [("parameters", m.parameters)]
    if trains:
        rows += [("optimizer (float32 moments)", m.optimizer), ("gradients", m.gradients)]
    rows.append(("router biases" + (", strengths, counters" if trains else ""), m.state))
    if trains:
        rows += [("tokens and segment ids", m.batch), *((f"activations: {name}", value) for name, value in m.activations.items())]
    else:
        rows += [*((f"cache: {name}", value) for name, value in m.caches.items())]
        rows.append(("one layer at work (estimate)", made.needed - m.parameters - m.state - sum(m.caches.values())))
    for name, value in rows:
        table.add_row(name, size(value), f"{value / made.topology.memory:.2%}")
    table.add_section()
    table.add_row("all", size(made.needed), f"{made.needed / made.topology.memory:.2%}")
    table.add_row(f"usable on {made.topology.kind}", size(made.topology.memory), "")
    return table


def cache_table(made: Plan) -> Table:
    """What inference would hold on this mesh, for the rows of this batch."""
    table = _table("inference caches of a device, the batch's rows at the full context", ("what", "size"))
    for name, value in made.memory.caches.items():
        table.add_row(name, size(value))
    return table


def flops_table(made: Plan) -> Table:
    trains = made.optimizer != "none"
    title = f"FLOPs a token at {made.step.context:,} tokens of context"
    title += " (executed: with recomputation and what sharding repeats)" if trains else ""
    table = _table(title, ("part", "forward", "share", *(("training", "executed") if trains else ())))
    total = sum(part.forward for part in made.flops)
    for part in made.flops:
        more = (f"{part.model:.3e}", f"{part.executed:.3e}") if trains else ()
        table.add_row(part.part, f"{part.forward:.3e}", f"{part.forward / total:.1%}", *more)
    table.add_section()
    sums = (f"{sum(p.model for p in made.flops):.3e}", f"{sum(p.executed for p in made.flops):.3e}") if trains else ()
    table.add_row("all", f"{total:.3e}", "", *sums)
    return table


def traffic_table(made: Plan) -> Table:
    table = _table("bytes a device sends in a step", ("mesh axes", "what", "bytes"))
    for axes in by_axes(made.traffic):
        for transfer in made.traffic:
            if "+".join(transfer.axes) == axes:
                table.add_row(axes, transfer.what, size(transfer.sent))
        table.add_section()
    return table


def comparison_table(made: Plan, result: dict[str, Any]) -> Table:
    """What the planner says beside what XLA says of the compiled step."""
    table = _table("planned and compiled, a device", ("what", "planned", "XLA"))
    table.caption = "A TPU pads arrays to tiles of 8 x 128 values: models with narrower heads take and send more than planned."
    table.caption_justify = "left"
    m, xla = made.memory, result["memory"]
    work = m.gradients + sum(m.activations.values())
    table.add_row("arguments: parameters, optimizer, batch", f"{m.arguments:,} B", f"{xla['argument']:,} B")
    table.add_row("temporaries: gradients, activations", size(work), size(xla["temp"]))
    table.add_row("program", "", size(xla["generated_code"]))
    table.add_row("FLOPs a step (XLA: the body of each loop once)", f"{made.step_flops:.3e}", f"{result['flops']:.3e}")
    table.add_section()
    planned, read = by_axes(made.traffic), result["bytes_by_axis"]
    for axes in sorted({*planned, *read}, key=lambda name: -max(planned.get(name, 0), read.get(name, 0))):
        table.add_row(f"bytes over {axes}", size(planned.get(axes, 0)), size(read.get(axes, 0)))
    table.add_row("bytes over all axes", size(sum(planned.values())), size(sum(read.values())))
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        text = column in ("what", "part", "mesh axes")
        table.add_column(column, justify="left" if text else "right")
    return table


def show(made: Plan, console: Console) -> None:
    mesh = ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(made.mesh).items())
    rows, length = made.step.local(made.mesh)
    console.print(f"{made.topology.name}: {made.topology.devices:,} devices; mesh: {mesh}")
    console.print(f"{made.step.rows:,} rows of {made.step.context:,} tokens; a device has {rows:,} of {length:,}\n")
    console.print(memory_table(made))
    if made.optimizer != "none":
        console.print(cache_table(made))
    console.print(flops_table(made))
    if made.traffic:
        console.print(traffic_table(made))
    if made.optimizer != "none":
        console.print(f"a device runs {made.step_flops:.3e} FLOPs a step")
    for note in made.notes:
        console.print(f"note: {note}", markup=False)
    for problem in made.problems:
        console.print(f"does not fit: {problem}", markup=False, style="bold red")
    for change in made.changes:
        console.print(f"  would fit: {change}" if not change.startswith("no ") else f"  {change}", markup=False)
    if not made.problems:
        left = made.topology.memory - made.needed
        console.print(f"fits: {size(left)} ({left / made.topology.memory:.0%}) of a device stay free", style="bold green")


def compiled(made: Plan, config: PlanConfig, console: Console) -> None:
    """Compile and show the comparison. CompileError as from `compile_for_tpu`."""
    request = {
        "config": made.config.to_dict(),
        "mesh": dataclasses.asdict(made.mesh),
        "topology": made.topology.name,
        "batch": made.step.rows,
        "context": made.step.context,
        "attention": made.step.attention,
        "transport": made.step.transport,
        "hlo": None if config.hlo is None else str(config.hlo.absolute()),
    }
    console.print(f"compiling the train step for {made.topology.name} ...")
    result = compile_for_tpu(request, timeout=60 * config.compile_minutes)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(
        f"lowered in {result['lower_seconds']:.1f} s, compiled in {result['compile_seconds']:.1f} s "
        f"({result['cpu_seconds']:.0f} CPU seconds in all; {versions})"
    )
    console.print(comparison_table(made, result))


def check(config: PlanConfig, topology: Topology) -> None:
    """Settings that exclude each other."""
    if config.compile and not topology.is_tpu:
        raise ValueError(f"--compile knows TPU topologies; {topology.kind} is none. Leave --compile out.")
    if config.compile and config.optimizer == "none":
        raise ValueError("--compile compiles the train step; --optimizer none has none.")
    if config.hlo is not None and not config.compile:
        raise ValueError("--hlo is the text of a compiled program; give --compile, too.")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; -> the exit status."""
    config = tyro.cli(PlanConfig, args=arguments, prog="python -m experiments.plan", description=__doc__)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    try:
        topology = Topology.parse(config.topology)
        check(config, topology)
        made = plan(config.model(), config.mesh, config.step(), topology, config.optimizer)
        show(made, console)
        if config.compile:
            if not made.compiles:
                raise ValueError("not compiled: memory is not all that stands against this plan, see above.")
            compiled(made, config, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if made.problems else 0


if __name__ == "__main__":
    sys.exit(main())
