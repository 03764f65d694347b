"""Bytes that a device sends over the mesh axes in one train step.

Counted as in `hlo_traffic`: R devices in a group, all-gather (R-1) of a device's part, reduce-scatter and all-to-all (R-1)/R of
its operand, all-reduce twice that. A step runs each layer's forward `forward_passes` times and its backward once.

Shapes: B rows and T tokens of a device, n = B T, D model width, L latent, k experts a token, A = n k assignments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from ..config import ModelConfig
from ..parallel.exchange import slot_rows
from ..parallel.mesh import MeshConfig
from ..shapes import ITEMSIZE, parameters
from .cuts import local_size, sharded_by
from .flops import forward_passes

TOKEN_AXES = ("data", "fsdp", "expert", "sequence")
LOSS_CHUNK = 1024
"""Tokens of a device whose logits exist at one time (moejax.train.step)."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One kind of traffic."""

    what: str
    axes: tuple[str, ...]
    """Mesh axes of the groups; more than one: over all of them at once."""
    sent: float
    """Bytes that a device sends in a step."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What a train step does to a batch."""

    rows: int
    """Of the whole batch."""
    context: int
    """Tokens a row."""
    dtype: str = "bfloat16"
    """Of the computation."""
    attention: str = "gather"
    """Form of MLA over the sequence axis: "gather" or "ring"."""
    transport: str = "ragged"
    """Of experts' rows: "ragged", "padded" or "gather"."""

    def local(self, mesh: MeshConfig) -> tuple[int, int]:
        """(B, T) of one device, padding included."""
        return -(-self.rows // (mesh.data * mesh.fsdp * mesh.expert)), -(-self.context // mesh.sequence)


def traffic(config: ModelConfig, mesh: MeshConfig, step: Step) -> list[Transfer]:
    """Everything that moves, but for a few integers and scalars; entries that move nothing are left out."""
    found = [
        *_weights(config, mesh, step),
        *_kda(config, mesh, step),
        *_mla(config, mesh, step),
        *_experts(config, mesh, step),
        *_tensor(config, mesh, step),
    ]
    return [transfer for transfer in found if transfer.sent > 0]


def by_axes(transfers: list[Transfer]) -> dict[str, float]:
    """-> {"data+fsdp": bytes, ...}, largest first."""
    total: dict[str, float] = {}
    for transfer in transfers:
        name = "+".join(transfer.axes)
        total[name] = total.get(name, 0.0) + transfer.sent
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))


def gather(part: float, size: int) -> float:
    """Bytes sent in an all-gather of `part` bytes a device, or in a reduce-scatter to such parts."""
    return part * (size - 1)


def reduce_all(whole: float, size: int) -> float:
    """Bytes sent in an all-reduce of `whole` bytes."""
    return 2 * whole * (size - 1) / size


def _size(mesh: MeshConfig, axes: tuple[str, ...]) -> int:
    return math.prod(getattr(mesh, axis) for axis in axes)


def _several(mesh: MeshConfig, *axes: str) -> tuple[str, ...]:
    return tuple(axis for axis in axes if getattr(mesh, axis) > 1)


def _weights(config: ModelConfig, mesh: MeshConfig, step: Step) -> Iterator[Transfer]:
    """Weights that fsdp shards come together before each use; gradients are summed over the axes that shard tokens.

    XLA casts before it gathers. Gradients are summed in the parameters' own dtype.
    """
    item, gathers, sums = ITEMSIZE[step.dtype], 0.0, {}
    for p in parameters(config):
        if p.part == "head":
            continue
        cut, cast = sharded_by(p, mesh), min(p.itemsize, item)
        if "fsdp" in cut:
            uses = 1 if p.part == "embedding" else forward_passes(config)
            gathers += gather(local_size(p, mesh) * cast, mesh.fsdp) * p.layers * uses
        axes = tuple(axis for axis in _several(mesh, *TOKEN_AXES) if axis not in cut or axis == "fsdp")
        whole = local_size(p, mesh, gathered=True) * p.itemsize * p.layers
        sums[axes] = sums.get(axes, 0.0) + reduce_all(whole, _size(mesh, axes))
    yield Transfer("weights gathered", ("fsdp",), gathers)
    for axes, sent in sums.items():
        yield Transfer("gradients summed", axes, sent)
    yield from _head(config, mesh, step)


def _head(config: ModelConfig, mesh: MeshConfig, step: Step) -> Iterator[Transfer]:
    """The loss runs over chunks of the batch's tokens. Each gathers the head forward and backward, and scatters its gradient."""
    (head,) = (p for p in parameters(config) if p.part == "head")
    cut, local, item = sharded_by(head, mesh), local_size(head, mesh), ITEMSIZE[step.dtype]
    chunks = -(-step.rows * step.context // (LOSS_CHUNK * _size(mesh, TOKEN_AXES)))
    if "fsdp" in cut:
        yield Transfer("head gathered, each chunk of the loss", ("fsdp",), 2 * chunks * gather(local * min(head.itemsize, item), mesh.fsdp))
        yield Transfer("head's gradient, each chunk of the loss", ("fsdp",), chunks * gather(local * _wide(step), mesh.fsdp))
    axes = tuple(axis for axis in _several(mesh, *TOKEN_AXES) if axis not in cut)
    if axes:
        yield Transfer("head's gradient summed", axes, reduce_all(local * min(head.itemsize, item), _size(mesh, axes)))


def _kda(config: ModelConfig, mesh: MeshConfig, step: Step) -> Iterator[Transfer]:
    """Forward one all-gather of the convolutions' last inputs and one of the float32 summaries; backward their transposes.

    Document ids travel with them, 4 digits each: 3 numbers a row with the inputs, 2 with the summaries.
    """
    c, (B, _), layers = config.kda, step.local(mesh), config.mixers.count("K")
    G, times = c.num_value_heads / mesh.tensor, forward_passes(config) + 1
    channels = 2 * c.heads / mesh.tensor * c.key_dim + G * c.value_dim
    halo = B * ((c.conv_width - 1) * channels + 12) * ITEMSIZE[step.dtype] if c.conv_width > 1 else 0
    summary = B * (G * c.key_dim * (c.value_dim + c.key_dim) + 8) * _wide(step)
    yield Transfer("KDA convolution halo", ("sequence",), layers * times * gather(halo, mesh.sequence))
    yield Transfer("KDA state summaries", ("sequence",), layers * times * gather(summary, mesh.sequence))


def _mla(config: ModelConfig, mesh: MeshConfig, step: Step) -> Iterator[Transfer]:
    """Latents and the shared key with one id a token; their gradients in the accumulation dtype."""
    c, (B, T), layers, R = config.mla, step.local(mesh), config.mixers.count("M"), mesh.sequence
    width = c.kv_latent + c.rope_dim
    latents, gradients = B * T * (width * ITEMSIZE[step.dtype] + 4), B * T * width * _wide(step)
    passes = forward_passes(config)
    if step.attention == "gather":  # the backward's own gather is the one of the last forward
        sent = passes * gather(latents, R) + gather(gradients, R)
    else:
        sent = (passes + 1) * gather(latents, R) + (R * gradients if R > 1 else 0)
    yield Transfer(f"MLA latents ({step.attention})", ("sequence",), layers * sent)


def exchange_rows(config: ModelConfig, mesh: MeshConfig, step: Step) -> int:
    """Rows that a device takes in one round of the expert exchange ("gather": tokens of all shards, k times)."""
    (B, T), R = step.local(mesh), mesh.expert
    assignments = B * T * config.moe.experts_per_token
    if step.transport == "gather":
        return R * assignments
    return R * slot_rows(assignments, R, most=assignments)


def _experts(config: ModelConfig, mesh: MeshConfig, step: Step) -> Iterator[Transfer]:
    """Forward: rows there and results back. Backward: rows with their gradient there, gradients of rows back.

    An even routing: "ragged" sends the rows there are, "padded" equal slots. Statistics for the bias are summed once a step.
    """
    c, (B, T), R, layers = config.moe, step.local(mesh), mesh.expert, config.moe_layers
    L, n, passes = c.latent or config.hidden, B * T, forward_passes(config)
    item, wide = ITEMSIZE[step.dtype], _wide(step)
    if step.transport == "gather":
        there = n * (L * item + c.experts_per_token * (4 + wide))
        back = n * L * wide
        sent = passes * gather(there + back, R) + gather(2 * back + n * c.experts_per_token * wide, R)
    else:
        rows = exchange_rows(config, mesh, step) if step.transport == "padded" else n * c.experts_per_token
        sent = (2 * passes + 3) * rows * L * item * (R - 1) / R
    yield Transfer(f"experts' rows ({step.transport})", ("expert",), layers * sent)
    axes = _several(mesh, *TOKEN_AXES)
    statistics = 4 * (1 + c.experts * (1 + (c.histogram_bins if c.balance == "quantile" else 0)))
    if c.balance != "none" and axes:
        yield Transfer("routing statistics", axes, layers * reduce_all(statistics, _size(mesh, axes)))


def _tensor(config: ModelConfig, mesh: MeshConfig, step: Step) -> Iterator[Transfer]:
    """Partial sums over heads and hidden channels, forward; the same of a layer's inputs, backward (XLA may merge some of those).

    Backward each product with a sharded weight gives a partial gradient of its input: KDA 5 of x and one of the decay's rank,
    MLA of the query latent, the key-value latent and (gate, queries without a latent) x, the experts those of latent, factors and
    shared. The shared expert's sum is not needed again where only gradients are.
    """
    (B, T), D, R = step.local(mesh), config.hidden, mesh.tensor
    item, wide, passes = ITEMSIZE[step.dtype], _wide(step), forward_passes(config)
    c, layers = config.mla, {kind: config.mixers.count(kind) for kind in "KM"}
    gate = D if config.kda.output_gate_rank is None else config.kda.output_gate_rank
    kda = passes * D + 4 * D + gate + config.kda.decay_rank
    mla = passes * D + (c.q_latent or D) + (D if c.gate else 0) + c.kv_latent + c.rope_dim
    dense = (passes + 1) * D * wide
    L, shared = config.moe.latent or D, D if config.moe.shared_width else 0
    moe = (passes * L + config.moe.experts_per_token) * wide + (L + 2 * shared + max(1, passes - 1) * shared) * item
    embedded = 2 * D  # embedding forward, head backward
    token = (layers["K"] * kda + layers["M"] * mla + embedded) * item + config.dense_layers * dense + config.moe_layers * moe
    yield Transfer("sums over heads and channels", ("tensor",), reduce_all(B * T * token, R))


def _wide(step: Step) -> int:
    return max(4, ITEMSIZE[step.dtype])
