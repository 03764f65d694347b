"""What a mesh and a batch must be for a model, and what they waste."""

from __future__ import annotations

from ..config import ModelConfig
from ..parallel.axes import AxisRules, divided_sizes
from ..parallel.mesh import MeshConfig
from ..shapes import parameters
from .cuts import sharded_by
from .traffic import Step

STEP_FIELDS = {
    "attention": ("gather", "ring"),
    "transport": ("ragged", "padded", "gather"),
    "dtype": ("bfloat16", "float32", "float64"),
}


def check_step(step: Step) -> None:
    """Raise ValueError for a step that cannot be."""
    for name in ("rows", "context"):
        if getattr(step, name) < 1:
            raise ValueError(f"{name} is {getattr(step, name)}; it must be at least 1.")
    for name, allowed in STEP_FIELDS.items():
        if getattr(step, name) not in allowed:
            raise ValueError(f"{name} is {getattr(step, name)!r}; allowed: {', '.join(allowed)}.")


def divisibility(config: ModelConfig, mesh: MeshConfig) -> list[str]:
    """The sizes of `config` that the mesh does not divide, one line each: the rules of `ModelParallel.check`."""
    lines = []
    for name, (size, logical) in divided_sizes(config).items():
        axis = getattr(AxisRules(), logical)
        parts = getattr(mesh, axis)
        if size % parts:
            near = [n for n in range(1, size + 1) if size % n == 0]
            below, above = max(n for n in near if n < parts), min((n for n in near if n > parts), default=None)
            lines.append(
                f"{name} is {size}, and mesh.{axis} cuts it into {parts} parts: set mesh.{axis} to {below}"
                + (f" or {above}." if above else ".")
            )
    return lines


def notes(config: ModelConfig, mesh: MeshConfig, step: Step) -> list[str]:
    """Padding, and large arrays that an axis leaves whole because it does not divide them."""
    lines = []
    B, T = step.local(mesh)
    over = mesh.data * mesh.fsdp * mesh.expert
    if step.rows % over:
        lines.append(f"{step.rows} rows over data x fsdp x expert = {over}: {B * over - step.rows} rows of padding are computed.")
    if step.context % mesh.sequence:
        added = T * mesh.sequence - step.context
        lines.append(f"context {step.context} over mesh.sequence = {mesh.sequence}: {added} tokens of padding a row.")
    for axis, logical in (("fsdp", "hidden"), ("tensor", "dense_width"), ("tensor", "vocab_size")):
        size, parts = getattr(config, logical), getattr(mesh, axis)
        if size % parts:
            lines.append(f"{logical} is {size}, which mesh.{axis} = {parts} does not divide: its weights stay whole on that axis.")
    whole = max(parameters(config), key=lambda p: p.nbytes * p.layers)
    if mesh.size > 1 and not sharded_by(whole, mesh):
        lines.append(f"no axis cuts the largest weights ({whole.name}): mesh.fsdp or mesh.expert would.")
    return lines
