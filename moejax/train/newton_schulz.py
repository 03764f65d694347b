"""Newton-Schulz orthogonalisation of stacks of matrices, on one device or spread over a mesh by whole matrices.

Shapes: N matrices, M rows, K columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .muon_layout import Matrices

QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of p(s) = a s + b s^3 + c s^5 on the singular values: steepest at 0; five steps bring them near 1, not onto it."""
NORM_EPS = 1e-8  # added to the Frobenius norm, as optax.contrib.muon does: a matrix of zeros stays one


def newton_schulz(x: jax.Array, *, steps: int = 5, matmul_dtype: str | None = None) -> jax.Array:
    """Nearly orthogonal matrices with the singular vectors of x's: `steps` times X <- aX + (bA + cA^2)X with A = X X^T.

    Each matrix is first divided by its own Frobenius norm, never by that of the stack (marin #8621). The rule commutes with
    the transpose, so the shorter side is taken for A.

    Args:
      x: [N,M,K] float32 or float64.
      steps: iterations.
      matmul_dtype: "bfloat16" rounds the operands of the products (the sums stay float32); None: x's dtype, unrounded.

    Returns:
      [N,M,K] in x's dtype. Source: Jordan et al. 2024; arXiv 2502.16982 section 2.
    """
    tall = x.shape[1] > x.shape[2]
    x = x.swapaxes(1, 2) if tall else x
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + NORM_EPS)
    a, b, c = QUINTIC

    def product(left, right):
        if matmul_dtype is not None:
            left, right = left.astype(matmul_dtype), right.astype(matmul_dtype)
        # The default of a GPU or TPU would round float32 operands.
        return jnp.matmul(left, right, precision=lax.Precision.HIGHEST, preferred_element_type=x.dtype)

    for _ in range(steps):
        gram = product(x, x.swapaxes(1, 2))
        x = a * x + product(b * gram + c * product(gram, gram), x)
    return x.swapaxes(1, 2) if tall else x


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the local part of a stack becomes whole matrices of one device: mesh axes by what is done with them."""

    exchange: tuple[tuple[str, int], ...]
    """(mesh axis, matrix axis 1 or 2 that it shards): an all-to-all turns parts of N matrices into N / size whole ones."""
    gather: tuple[tuple[str, int], ...]
    """The same, but each device has at most one matrix already: gathered, every device of the axis computes the same."""
    share: tuple[str, ...]
    """Mesh axes along which the stack is replicated: each device takes its share of the matrices, results are gathered."""

    def parts(self, mesh: Mesh) -> int:
        return math.prod(mesh.shape[axis] for axis in (*(axis for axis, _ in self.exchange), *self.share))


class _Kind(NamedTuple):
    """What matrices share that go through the iteration together. Rows are the shorter side of the whole matrix."""

    rows: int
    columns: int
    dtype: jnp.dtype
    row_axes: tuple[str, ...] = ()
    column_axes: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()


class _Part(NamedTuple):
    """One parameter: how it is a stack of matrices, and what they have in common with others'."""

    layout: Matrices
    tall: bool
    kind: _Kind

    def stacked(self, x: jax.Array) -> jax.Array:
        """Local leaf -> [N,M,K] with the shorter side of the whole matrix first."""
        x = self.layout.stacked(x)
        return x.swapaxes(1, 2) if self.tall else x

    def unstacked(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return self.layout.unstacked(x.swapaxes(1, 2) if self.tall else x, shape)


def _part(leaf: jax.Array, layout: Matrices, spec: PartitionSpec | None, mesh: Mesh | None) -> _Part:
    """Of a whole leaf and its sharding. Mesh axes of one device shard nothing."""
    _, rows, columns = layout.sizes(leaf.shape)
    tall = rows > columns
    small, large = (columns, rows) if tall else (rows, columns)
    if mesh is None or spec is None:
        return _Part(layout, tall, _Kind(small, large, leaf.dtype))

    def axes(dims: tuple[int, ...]) -> tuple[str, ...]:
        entries = [spec[dim] for dim in dims if dim < len(spec) and spec[dim] is not None]
        names = [name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry)]
        return tuple(name for name in names if mesh.shape[name] > 1)

    used = axes(tuple(range(leaf.ndim)))
    replicated = tuple(name for name in mesh.axis_names if name not in used and mesh.shape[name] > 1)
    sides = (axes(layout.columns), axes(layout.rows)) if tall else (axes(layout.rows), axes(layout.columns))
    return _Part(layout, tall, _Kind(small, large, leaf.dtype, *sides, replicated))


def choose_spread(count: int, row_axes: Sequence[str], column_axes: Sequence[str], replicated: Sequence[str], mesh: Mesh) -> Spread:
    """Axis by axis, those that shard the matrices first, until each device has one matrix or none.

    `count` is that of a device's own stack. Along what axes remain the computation is deliberately left replicated: where a
    device's one matrix is sharded it is gathered, and the devices of that axis compute the same; no device would finish
    earlier otherwise. Replicated stacks are shared only if every device gets a matrix: else more zeros than results would be
    gathered.
    """
    exchange, gather, share, parts = [], [], [], 1
    for axis, side in [(axis, 1) for axis in row_axes] + [(axis, 2) for axis in column_axes]:
        if count > parts:
            exchange.append((axis, side))
            parts *= mesh.shape[axis]
        else:
            gather.append((axis, side))
    for axis in replicated:
        if count >= parts * mesh.shape[axis]:
            share.append(axis)
            parts *= mesh.shape[axis]
    return Spread(tuple(exchange), tuple(gather), tuple(share))


def whole_matrices(x: jax.Array, spread: Spread, mesh: Mesh) -> jax.Array:
    """Inside shard_map: local parts [N,M',K'] -> whole matrices [ceil(N / parts),M,K] of this device, zeros at the end."""
    x = jnp.pad(x, ((0, -x.shape[0] % spread.parts(mesh)), (0, 0), (0, 0)))
    for axis in spread.share:
        x = _own_part(x, axis, 0)
    for axis, side in spread.exchange:
        # XLA of a CPU sends an all-to-all as slices; it would take them past the concatenation of the stacks, where their
        # layouts differ, and then refuses its own program.
        x = lax.all_to_all(lax.optimization_barrier(x), axis, split_axis=0, concat_axis=side, tiled=True)
    for axis, side in spread.gather:
        x = lax.all_gather(x, axis, axis=side, tiled=True)
    return x


def local_parts(x: jax.Array, count: int, spread: Spread) -> jax.Array:
    """Inverse of whole_matrices, for `count` matrices. What is gathered is the device's own shard and less than as many zeros."""
    for axis, side in reversed(spread.gather):
        x = _own_part(x, axis, side)
    for axis, side in reversed(spread.exchange):
        x = lax.all_to_all(lax.optimization_barrier(x), axis, split_axis=side, concat_axis=0, tiled=True)
    for axis in reversed(spread.share):
        x = lax.all_gather(x, axis, axis=0, tiled=True)
    return x[:count]


def _own_part(x: jax.Array, axis: str, side: int) -> jax.Array:
    size = x.shape[side] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, axis=side)


def orthogonalize(
    leaves: Sequence[jax.Array],
    layouts: Sequence[Matrices],
    specs: Sequence[PartitionSpec] | None = None,
    mesh: Mesh | None = None,
    **options,
) -> list[jax.Array]:
    """newton_schulz of every matrix of every leaf; leaves whose matrices have one shape (and sharding) go through it together.

    On a mesh each device gets whole matrices of its own by one all-to-all for each mesh axis that shards them, and their
    parts go back the same way: no device ever holds a whole stack (goodfire-ai/spd PR 978 measures 3.3 times slower steps
    with the gathers that XLA would choose; PaddleFleet PR 1704 orthogonalised shards). Where a parameter is replicated, its
    devices share the matrices and gather the results. With fewer matrices than devices part of the work is replicated: see
    `choose_spread`.

    Args:
      leaves: float32 or float64 arrays.
      layouts: their matrices.
      specs: their PartitionSpecs on `mesh`.
      options: of newton_schulz.
    """
    mesh = None if mesh is None or mesh.size == 1 else mesh
    known: Sequence[PartitionSpec | None] = [None] * len(leaves) if specs is None else specs
    parts = [_part(leaf, layout, spec, mesh) for leaf, layout, spec in zip(leaves, layouts, known, strict=True)]
    if mesh is None:
        return _by_kind(leaves, parts, None, options)
    if specs is None:
        raise ValueError(f"a mesh {dict(mesh.shape)} and no specs; give the PartitionSpec of each leaf.")
    mapped = jax.shard_map(
        lambda *local: tuple(_by_kind(local, parts, mesh, options)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=tuple(specs),
        check_vma=False,  # the gathered results are equal along `share`, which the check cannot know
    )
    return list(mapped(*leaves))


def _by_kind(leaves: Sequence[jax.Array], parts: Sequence[_Part], mesh: Mesh | None, options) -> list[jax.Array]:
    """Local leaves -> local leaves. One batch of products a kind: few kernels, and more matrices to spread."""
    out: dict[int, jax.Array] = {}
    for kind in dict.fromkeys(part.kind for part in parts):
        members = [index for index, part in enumerate(parts) if part.kind == kind]
        stacks = [parts[index].stacked(leaves[index]) for index in members]
        x = stacks[0] if len(stacks) == 1 else jnp.concatenate(stacks)
        if mesh is None:
            x = newton_schulz(x, **options)
        else:
            spread = choose_spread(x.shape[0], kind.row_axes, kind.column_axes, kind.replicated, mesh)
            x = local_parts(newton_schulz(whole_matrices(x, spread, mesh), **options), x.shape[0], spread)
        start = 0
        for index, stack in zip(members, stacks, strict=True):
            out[index] = parts[index].unstacked(x[start : start + stack.shape[0]], leaves[index].shape)
            start += stack.shape[0]
    return [out[index] for index in range(len(leaves))]
