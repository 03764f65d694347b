"""What a batch of training or evaluation holds, and what the loss reads of it.

Shapes: M micro-batches, B rows, T tokens, D domains, P position buckets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..ops.rotary import positions_from_segments
from .loss import next_token_targets

Batch = dict[str, jax.Array]
REQUIRED = ("tokens", "segment_ids")
OPTIONAL = ("targets", "loss_mask", "positions", "domains")
POSITION_BUCKETS = 21  # bucket b holds positions 2**b to 2**(b+1) - 1 of a segment, 0 belongs to bucket 0: up to 2M tokens


class Targets(NamedTuple):
    """targets [B,T] int32, valid [B,T] bool: what the loss counts; groups [B,T] int32: domain * P + position bucket, or None."""

    targets: jax.Array
    valid: jax.Array
    groups: jax.Array | None


def check_batch(batch: Mapping[str, jax.Array]) -> None:
    """Raise ValueError unless `batch` has tokens and segment_ids of one shape [B,T] or [M,B,T], and nothing unknown beside.

    targets and loss_mask come together; without them the target is the next token of the same segment.
    """
    for name in REQUIRED:
        if name not in batch:
            raise ValueError(f"the batch has {sorted(batch)}; it must have 'tokens' and 'segment_ids'.")
    if unknown := sorted(set(batch) - {*REQUIRED, *OPTIONAL}):
        raise ValueError(f"the batch has {', '.join(unknown)}, which nothing reads; known: {', '.join((*REQUIRED, *OPTIONAL))}.")
    if ("targets" in batch) != ("loss_mask" in batch):
        raise ValueError("the batch has one of targets and loss_mask; give both, or neither.")
    shape = batch["tokens"].shape
    if len(shape) not in (2, 3) or batch["segment_ids"].shape != shape:
        raise ValueError(f"tokens has shape {shape} and segment_ids {batch['segment_ids'].shape}; both must be [B,T] or [M,B,T], equal.")
    for name, x in batch.items():
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, tokens {shape}; they must be equal.")
    if "loss_mask" in batch and batch["loss_mask"].dtype != jnp.bool_:
        raise ValueError(f"loss_mask holds {batch['loss_mask'].dtype}; it must be bool: a token counts once or not at all.")


def as_micro_batches(batch: Mapping[str, jax.Array]) -> Batch:
    """Every array as [M,B,T]."""
    return {name: x if x.ndim == 3 else x[None] for name, x in batch.items()}


def read_targets(batch: Mapping[str, jax.Array], domains: int) -> Targets:
    """Of a batch [B,T]. domains: D, or 0 for no groups. A target in padding never counts, whatever the mask says."""
    tokens, segment_ids = batch["tokens"], batch["segment_ids"]
    if "targets" in batch:
        targets, valid = batch["targets"], batch["loss_mask"] & (segment_ids != 0)
    else:
        targets, valid = next_token_targets(tokens, segment_ids)
    if not domains:
        return Targets(targets, valid, None)
    positions = batch.get("positions")
    positions = positions_from_segments(segment_ids) if positions is None else positions
    # The highest bit: exact for every int32, unlike a rounded logarithm.
    bucket = 31 - jax.lax.clz(jnp.maximum(positions, 1).astype(jnp.int32))
    domain = jnp.zeros_like(tokens) if "domains" not in batch else jnp.clip(batch["domains"].astype(jnp.int32), 0, domains - 1)
    return Targets(targets, valid, domain * POSITION_BUCKETS + jnp.minimum(bucket, POSITION_BUCKETS - 1))
