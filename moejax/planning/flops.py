"""FLOPs a token by part of the model, 2 a multiply-add: what the model needs, and what a step with recomputation runs.

Norms' elementwise work, softmax, gates and the mixes of depth attention are not counted; the sum of `model` over the parts is
`moejax.train.flops.flops_per_token`.
"""

from __future__ import annotations

import dataclasses
import math

from ..config import ModelConfig
from ..counting import kda_scan_flops
from ..parallel.mesh import MeshConfig
from ..shapes import PARTS, parameters
from .cuts import sharded_by


@dataclasses.dataclass(frozen=True)
class PartFlops:
    """One part of the model."""

    part: str
    forward: float
    """FLOPs a token, forward."""
    executed: float
    """FLOPs a token of a whole step as this package runs it, over the tensor axis together: with recomputation and the work
    that sharding repeats."""

    @property
    def model(self) -> float:
        """FLOPs a token of a training step, without recomputation."""
        return 3 * self.forward


def forward_passes(config: ModelConfig) -> int:
    """How often a step runs a layer's forward: remat="full" runs it again for the block, and again for the layer in it."""
    if config.remat == "none":
        return 1
    return 3 if config.residual == "block" and config.residual_block > 1 else 2


def part_flops(config: ModelConfig, context: int, mesh: MeshConfig | None = None) -> list[PartFlops]:
    """By part, for documents of `context` tokens. Causal attention reads half the context on average."""
    passes, mesh = forward_passes(config), mesh or MeshConfig()
    kda, mla, shards = config.kda, config.mla, mesh.sequence
    layers = {kind: config.mixers.count(kind) for kind in "KM"}
    step = passes + 2
    forward, repeated = _products(config, MeshConfig()), _products(config, mesh)

    recurrence = layers["K"] * kda.num_value_heads * kda_scan_flops(kda.key_dim, kda.value_dim)
    # A shard carries K more value channels, which become its summary; the kernel's backward runs the forward once more.
    wide = kda.value_dim + (kda.key_dim if shards > 1 else 0)
    run = (step + 1) * layers["K"] * kda.num_value_heads * kda_scan_flops(kda.key_dim, wide)
    scores = layers["M"] * 2 * mla.heads * (mla.nope_dim + mla.rope_dim + mla.value_dim) * context / 2
    # Shard r writes out the keys and values of r + 1 shards' latents: (R + 1) / 2 on average.
    expansion = layers["M"] * 2 * mla.kv_latent * mla.heads * (mla.nope_dim + mla.value_dim)
    return [
        PartFlops("KDA projections", forward["kda"], step * repeated["kda"]),
        PartFlops("KDA recurrence", recurrence, run),
        PartFlops("MLA projections", forward["mla"], step * (repeated["mla"] + expansion * (shards - 1) / 2)),
        PartFlops("MLA attention", scores, (passes + 2.5) * scores),  # backward: 5 products where the forward has 2
        PartFlops("experts", forward["experts"], (step + 1) * repeated["experts"]),  # hidden again where rows arrive
        PartFlops("router, latent, shared", forward["moe"], step * repeated["moe"]),
        PartFlops("dense feed-forward", forward["dense"], step * repeated["dense"]),
        PartFlops("head", forward["head"], 4 * repeated["head"]),  # in chunks, whose logits the backward computes again
        PartFlops("norms", forward["norms"], step * forward["norms"]),
    ]


def _products(config: ModelConfig, mesh: MeshConfig) -> dict[str, float]:
    """FLOPs a token of each part's weights, forward, over all shards of the tensor axis: those that it does not cut all run."""
    found = dict.fromkeys(PARTS, 0.0)
    for p in parameters(config.replace(moe={"expert_weights": "float"})):
        times = 1 if "tensor" in sharded_by(p, mesh) else mesh.tensor
        share = config.moe.experts_per_token / config.moe.experts if p.part == "experts" else 1.0
        found[p.part] += 2 * math.prod(p.shape) * p.layers * share * times
    return found
