"""Which axes of each parameter Muon orthogonalises as a matrix, and which parameters AdamW keeps.

The layout is a property of the parameter's own name and shape in `moejax.modules`, written down once for each; a name that is
not in the table is an error. (A pattern over paths took the experts' axis for a matrix axis and convolutions for matrices:
MaxText #4798.) Kimi K3 report section 2.5: the momentum of the query, key and value projections is split by head and each
block is orthogonalised alone; other matrices whole. Which MLA tensors count as such is not published: here those that make
a head's queries, keys and values out of a latent, as torchtitan splits them (its keys and values are one fused tensor).

By the same rule the router [D,E], the gates' projections and the low-rank decay projection are "other matrices": the
published exceptions (norms, biases, A_log, dt_bias, embedding, head, depth queries, convolutions) do not name them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers


def _matrix(rows: tuple[int, ...], columns: tuple[int, ...]) -> MuonDimensionNumbers:
    return MuonDimensionNumbers(reduction_axis=rows, output_axis=columns)


PER_HEAD = _matrix((0,), (2,))  # [in, heads, width]: one matrix [in, width] a head
SPLIT_OUTPUT = _matrix((0,), (1, 2))  # [in, heads, width]: one matrix [in, heads x width]
SPLIT_INPUT = _matrix((0, 1), (2,))  # [heads, width, out]: one matrix [heads x width, out]
PLAIN = _matrix((0,), (1,))
PER_EXPERT = _matrix((1,), (2,))  # [experts, in, out]: one matrix an expert
ADAMW = None

MUON_LAYOUT: dict[str, tuple[int, MuonDimensionNumbers | None]] = {
    # model
    "embedding": (2, ADAMW),
    "head": (2, ADAMW),
    # KDA
    "q_proj": (3, PER_HEAD),
    "k_proj": (3, PER_HEAD),
    "v_proj": (3, PER_HEAD),
    "q_conv": (2, ADAMW),
    "k_conv": (2, ADAMW),
    "v_conv": (2, ADAMW),
    "decay_down": (2, PLAIN),
    "decay_up": (3, SPLIT_OUTPUT),
    "A_log": (1, ADAMW),
    "dt_bias": (2, ADAMW),
    "beta_proj": (2, PLAIN),
    "out_gate": (3, SPLIT_OUTPUT),
    "out_gate_down": (2, PLAIN),
    "out_gate_up": (3, SPLIT_OUTPUT),
    "out_norm": (1, ADAMW),
    "out_proj": (3, SPLIT_INPUT),
    # MLA
    "q_down": (2, PLAIN),
    "q_norm": (1, ADAMW),
    "q_up": (3, PER_HEAD),
    "kv_down": (2, PLAIN),
    "kv_norm": (1, ADAMW),
    "k_up": (3, PER_HEAD),
    "v_up": (3, PER_HEAD),
    "gate": (3, SPLIT_OUTPUT),
    "out": (3, SPLIT_INPUT),
    # dense feed-forward
    "gate_proj": (2, PLAIN),
    "up_proj": (2, PLAIN),
    "down_proj": (2, PLAIN),
    # LatentMoE
    "router": (2, PLAIN),
    "latent_down": (2, PLAIN),
    "latent_norm": (1, ADAMW),
    "latent_up": (2, PLAIN),
    "expert_gate": (3, PER_EXPERT),
    "expert_up": (3, PER_EXPERT),
    "expert_down": (3, PER_EXPERT),
    "shared_gate": (2, PLAIN),
    "shared_up": (2, PLAIN),
    "shared_down": (2, PLAIN),
    # norms and depth attention
    "weight": (1, ADAMW),
    "norm_weight": (1, ADAMW),
    "query": (1, ADAMW),
}
"""{name: (its own axes, the matrix among them or ADAMW)}; leading axes of scanned layers, and own axes that belong to no
matrix (heads, experts), count matrices. Packed experts (mxfp4 codes) are read-only and not in it."""


def dimension_numbers(path: Any, shape: tuple[int, ...]) -> MuonDimensionNumbers | None:
    """The matrix axes of one parameter, counted from the front of `shape`; None: AdamW.

    Args:
      path: key path of the leaf, whose last key is the parameter's name.
      shape: of the leaf, leading axes of scanned layers included.

    Raises:
      ValueError: a name that is not in MUON_LAYOUT, or fewer axes than it has there.
    """
    name = str(getattr(path[-1], "key", path[-1])) if path else ""
    where = jax.tree_util.keystr(path)
    if name not in MUON_LAYOUT:
        raise ValueError(f"parameter {where} {shape} has no Muon layout; add {name!r} to moejax.train.muon_layout.MUON_LAYOUT.")
    own, matrix = MUON_LAYOUT[name]
    leading = len(shape) - own
    if leading < 0:
        raise ValueError(f"parameter {where} has shape {shape}; MUON_LAYOUT gives {name!r} at least {own} axes.")
    if matrix is None:
        return None
    rows, columns = (tuple(axis + leading for axis in _axes(axes)) for axes in matrix)
    return MuonDimensionNumbers(rows, columns)


def layout_tree(params: Any) -> Any:
    """`dimension_numbers` of every leaf: the argument `muon_weight_dimension_numbers` of optax.contrib.muon."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: dimension_numbers(path, leaf.shape), params)


def labels(params: Any) -> Any:
    """For every leaf "muon" or "adamw"."""
    label = lambda path, leaf: "adamw" if dimension_numbers(path, leaf.shape) is None else "muon"
    return jax.tree_util.tree_map_with_path(label, params)


@dataclasses.dataclass(frozen=True)
class Matrices:
    """One parameter as a stack of matrices: its axes in the order (stack, rows, columns)."""

    stack: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, matrix: MuonDimensionNumbers, ndim: int) -> Matrices:
        rows, columns = _axes(matrix.reduction_axis), _axes(matrix.output_axis)
        return cls(tuple(axis for axis in range(ndim) if axis not in rows + columns), rows, columns)

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(matrices, rows, columns) of an array of `shape`."""
        count, rows, columns = (math.prod(shape[axis] for axis in axes) for axes in (self.stack, self.rows, self.columns))
        return count, rows, columns

    def stacked(self, x: jax.Array) -> jax.Array:
        """-> [matrices, rows, columns]."""
        return x.transpose(self.stack + self.rows + self.columns).reshape(self.sizes(x.shape))

    def unstacked(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """[matrices, rows, columns] -> an array of `shape`."""
        order = self.stack + self.rows + self.columns
        inverse = tuple(order.index(axis) for axis in range(len(order)))
        return x.reshape(tuple(shape[axis] for axis in order)).transpose(inverse)


def _axes(axes: Any) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)
