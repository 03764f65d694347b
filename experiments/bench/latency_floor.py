"""The fewest bytes a decoding step can move, and the time they take: what `latency.py` compares its steps with.

A step reads every weight once (of the routed experts those that some row chose; of the embedding one row a token), reads and writes
the KDA states and the convolutions' histories, and reads the latents of every token seen. Activations and logits are left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from moejax.infer import cache_bytes

RATE = 4.3e12  # bytes/s that a device-to-device copy reaches on an H200, reads plus writes
EXPERT_FIELDS = ("w_gate", "w_up", "w_down")


class StepBytes(NamedTuple):
    """Bytes that one decoding step must move, by part."""

    weights: float
    recurrent: float
    convolution: float
    latent: float

    @property
    def total(self) -> float:
        return sum(self)

    @property
    def milliseconds(self) -> float:
        """At the rate of a copy on an H200."""
        return self.total / RATE * 1e3


def touched_experts(experts: int, per_token: int, rows: int) -> float:
    """How many experts `rows` tokens choose together, on average, when every expert is equally likely."""
    return experts * (1 - (1 - per_token / experts) ** rows)


def weight_bytes(weights: Any, rows: int) -> float:
    """Bytes of weights that a step of `rows` tokens reads. weights: `moejax.infer.Weights`, of arrays or of their shapes."""
    moe = weights.config.moe
    share = touched_experts(moe.experts, moe.experts_per_token, rows) / moe.experts
    routed = sum(tree_bytes([getattr(layer.ffn, field, None) for field in EXPERT_FIELDS]) for layer in weights.layers)
    rest = tree_bytes((weights.layers, weights.output_query, weights.final_norm, weights.head)) - routed
    return rest + share * routed + rows * tree_bytes(weights.embedding) / weights.config.vocab_size


def step_bytes(weights: Any, rows: int, length: int) -> StepBytes:
    """The floor of a step of `rows` sequences that have seen `length` tokens each."""
    cache = cache_bytes(weights.config, rows, length, dtype=weights.dtype)
    return StepBytes(weight_bytes(weights, rows), 2 * cache.recurrent, 2 * cache.convolution, cache.latent)


def tree_bytes(tree: Any) -> int:
    """Of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
