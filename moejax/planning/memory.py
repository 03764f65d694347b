"""Bytes on one device: weights and their optimizer exactly, activations as an estimate of the largest live set.

Shapes: B rows and T tokens of a device, n = B T, D model width, S snapshots, A = n k assignments of tokens to experts.
"""

from __future__ import annotations

import dataclasses

from ..config import ModelConfig
from ..parallel.mesh import MeshConfig
from ..shapes import ITEMSIZE, Parameter, parameters
from .cuts import local_size
from .traffic import LOSS_CHUNK, Step, exchange_rows

PREFILL = 4096
"""Tokens that a device reads at one time in inference: a prompt is read in chunks."""
OPTIMIZERS = ("adamw", "none")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    parameters: int
    optimizer: int
    """Moments in float32 and counters."""
    state: int
    """The rest of a train state: selection biases, strengths of the rule, counters, the random key."""
    batch: int
    """Tokens and segment ids."""
    gradients: int
    activations: dict[str, int]
    """What is alive at the peak of the backward pass (inference: of a chunk's forward), by what it is. An estimate."""
    caches: dict[str, int]
    """Inference: what each row carries, of the rows of a device at the full context."""

    @property
    def arguments(self) -> int:
        """What a train step is given: exactly XLA's argument bytes."""
        return self.parameters + self.optimizer + self.state + self.batch

    @property
    def training(self) -> int:
        return self.arguments + self.gradients + sum(self.activations.values())

    @property
    def inference(self) -> int:
        """Parameters, biases, caches, and one layer at work."""
        return self.parameters + self.state + sum(self.caches.values()) + sum(self.activations.values())


def memory(config: ModelConfig, mesh: MeshConfig, step: Step, optimizer: str) -> Memory:
    """Bytes of one device for a train step (optimizer "adamw"), or for inference with full caches ("none")."""
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer is {optimizer!r}; known: {', '.join(OPTIMIZERS)}.")
    known = parameters(config)
    held = sum(local_size(p, mesh) * p.layers * p.itemsize for p in known)
    trains = optimizer != "none"
    moments = sum(2 * local_size(p, mesh) * p.layers * max(4, p.itemsize) for p in known)
    B, T = step.local(mesh)
    chunk = step if trains else dataclasses.replace(step, context=min(step.context, mesh.sequence * max(1, PREFILL // B)))
    return Memory(
        parameters=held,
        optimizer=moments + 2 * 4 if trains else 0,  # two int32 counts: of Adam and of the schedule
        state=config.moe_layers * config.moe.experts * 4 + (2 * 4 + 7 * 4 + 2 * 4 if trains else 0),
        batch=2 * B * T * 4,
        gradients=held if trains else 0,  # in the parameters' dtype: the update widens them as it reads them
        activations=_activations(config, mesh, chunk, known, trains),
        caches=caches(config, mesh, step),
    )


def caches(config: ModelConfig, mesh: MeshConfig, step: Step) -> dict[str, int]:
    """KDA: one float32 state and the convolutions' last inputs a row, whatever the length. MLA: latent and shared key a token."""
    B, T = step.local(mesh)
    kda, mla, item = config.kda, config.mla, ITEMSIZE[step.dtype]
    layers = {kind: config.mixers.count(kind) for kind in "KM"}
    state = kda.num_value_heads * kda.key_dim * kda.value_dim * max(4, item) // mesh.tensor
    inputs = (kda.conv_width - 1) * (2 * kda.heads * kda.key_dim + kda.num_value_heads * kda.value_dim) * item // mesh.tensor
    return {
        "KDA states": B * layers["K"] * state,
        "KDA convolution inputs": B * layers["K"] * inputs,
        "MLA latents": B * T * layers["M"] * (mla.kv_latent + mla.rope_dim) * item,
    }


def _activations(config, mesh: MeshConfig, step: Step, known: list[Parameter], trains: bool) -> dict[str, int]:
    (B, T), item = step.local(mesh), ITEMSIZE[step.dtype]
    stream = B * T * config.hidden * item
    block = config.residual_block if config.residual == "block" else config.layers
    snapshots = -(-config.layers // block) if config.residual == "block" else 0
    found: dict[str, int] = {}
    layer = max(_mixer(config, kind, mesh, step) for kind in set(config.mixers)) + max(
        _feed_forward(config, dense, mesh, step) for dense in _kinds(config)
    )
    if config.residual == "block":
        found["snapshots"] = snapshots * stream
    if trains:
        if config.residual == "block":  # the running gradient and the one of the block at work
            found["gradients of snapshots"] = 2 * snapshots * stream
        if config.residual == "full":
            found["sources of all layers and their gradient"] = 2 * (2 * config.layers + 1) * stream
        if config.remat == "full":
            found["inputs of a block's layers"] = min(block, config.layers) * stream
        else:
            found["what all layers keep"] = config.layers * (layer + stream)
        found["logits of a chunk"] = 2 * min(LOSS_CHUNK, B * T) * config.vocab_size * 4 // mesh.tensor
    found["working set of a layer"] = (2 if trains else 1) * (layer + 6 * stream)
    if trains and step.attention == "gather" and mesh.sequence > 1 and "M" in config.mixers:
        width = config.mla.kv_latent + config.mla.rope_dim
        found["latents of the whole row"] = B * T * mesh.sequence * width * (item + max(4, item))
    gathered = _largest_layer(config, mesh, known)
    if mesh.fsdp > 1 and gathered:
        found["weights of a layer, gathered"] = gathered * (2 if trains else 1)  # and their gradient
    return found


def _kinds(config: ModelConfig) -> set[bool]:
    return {index < config.dense_layers for index in range(config.layers)}


def _largest_layer(config: ModelConfig, mesh: MeshConfig, known: list[Parameter]) -> int:
    size = {part: 0 for part in ("kda", "mla", "dense", "experts", "moe")}
    for p in known:
        if p.part in size and p.layers:
            size[p.part] += local_size(p, mesh, gathered=True) * p.itemsize
    return max(size["kda"], size["mla"]) + max(size["dense"], size["experts"] + size["moe"])


def _mixer(config: ModelConfig, kind: str, mesh: MeshConfig, step: Step) -> int:
    """Bytes that one mixer keeps for its gradient: what enters each product, and float32 gates and sums."""
    (B, T), item = step.local(mesh), ITEMSIZE[step.dtype]
    wide = max(4, item)
    if kind == "K":
        c = config.kda
        G, K, V = c.num_value_heads, c.key_dim, c.value_dim
        channels = 2 * c.heads * K + G * V
        token = 2 * channels * item + G * K * (item + wide) + 2 * c.heads * K * wide + G * V * (3 * item + 2 * wide)
        if mesh.sequence > 1:  # values and outputs with K more channels, in float32
            token += 2 * G * (V + K) * wide
    else:
        c = config.mla
        token = c.heads * ((c.nope_dim + c.rope_dim) * item + c.value_dim * (2 * wide + 2 * item))
        if mesh.sequence == 1:  # keys and values written out
            token += c.heads * (c.nope_dim + c.rope_dim + c.value_dim) * item
        token += (c.kv_latent + c.rope_dim + (c.q_latent or 0)) * 2 * item * mesh.tensor
    return B * T * token // mesh.tensor


def _feed_forward(config: ModelConfig, dense: bool, mesh: MeshConfig, step: Step) -> int:
    (B, T), item = step.local(mesh), ITEMSIZE[step.dtype]
    if dense:
        return B * T * 3 * config.dense_width * item // mesh.tensor
    c = config.moe
    L, n = c.latent or config.hidden, B * T
    rows = exchange_rows(config, mesh, step)
    tokens = n * (c.experts * 4 + 2 * L * item + 3 * (c.shared_width or 0) * item // mesh.tensor)
    own = n * c.experts_per_token * 3 * L * item  # rows that leave, results, rows with their gradients
    return tokens + own + rows * (2 * L + 3 * c.expert_width // mesh.tensor) * item
