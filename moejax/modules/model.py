"""The hybrid language model: embedding, layers, depth attention at the output, final norm, head."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.core import Tracer

from ..config import ModelConfig
from ..kernels.common import check_segment_order
from ..parallel.layers import ModelParallel
from .block import RMSNorm
from .depth_attention import AttentionResidual
from .stack import LayerStack


class HybridLM(nn.Module):
    """A language model of the Kimi K3 class (arXiv 2607.24653).

    `apply({"params": p, "router_state": r}, tokens, segment_ids)` returns logits. Collections: `params` (gradients see
    nothing else), `router_state` (the selection bias of each MoE layer; changed by the train step, never here) and, when
    asked for with `mutable=["router_stats"]`, the routing counts of this call. Initialise under `jax.jit`; `init` runs no
    layer, so `init_with_output` gives no logits worth reading. With remat="full" only reverse-mode gradients exist.
    """

    config: ModelConfig
    parallel: ModelParallel | None = None
    """Spread over a mesh: rows, time, heads and experts in explicit exchanges (moejax.parallel.layers). Same parameters, same
    numbers. B and T that the mesh does not divide are padded with segment 0 inside. None: as the arrays are sharded."""

    @nn.compact
    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, *, return_hidden: bool = False
    ) -> jax.Array:
        """Next-token logits.

        Args:
          tokens: [B,T] integers in [0, vocab_size).
          segment_ids: [B,T] int32: 0 = padding, documents 1, 2, ... in order along T; None: one document a row.
          return_hidden: return the final hidden state [B,T,D] instead, for a loss in chunks (`params["head"]` goes on).

        Returns:
          logits [B,T,V] float32 (float64 when the configuration says so).

        Raises:
          ValueError: wrong rank or dtype, T = 0, ids outside the vocabulary (checked when the values are known).
        """
        c = self.config
        check_tokens(tokens, segment_ids, c.vocab_size)
        dtype, param_dtype = compute_dtype(c), jnp.dtype(c.param_dtype)
        parallel = None if self.is_initializing() else self.parallel
        rows, length = tokens.shape
        if parallel is not None:
            parallel.check(c)
            tokens, segment_ids = pad_to_mesh(tokens, segment_ids, parallel)
        normal = nn.initializers.normal(c.initializer_range)
        embedding = self.param("embedding", normal, (c.vocab_size, c.hidden), param_dtype)
        head = self.param("head", normal, (c.hidden, c.vocab_size), param_dtype)
        with jax.named_scope("embedding"):
            x = jnp.take(embedding, tokens, axis=0).astype(dtype)
            if segment_ids is not None:
                x = jnp.where((segment_ids != 0)[..., None], x, 0)  # padding ids may be anything
            if parallel is not None:
                x = parallel.constrain(x, "batch", "time", None)
        out = LayerStack(c, parallel, name="stack")(x, segment_ids)
        h = self._output(out)
        if parallel is not None:
            h = pin_uneven(parallel.constrain(h, "batch", "time", None)[:rows, :length], parallel)
        h = RMSNorm(c.norm_eps, c.param_dtype, name="final_norm")(h)
        if not self.is_initializing() and self.is_mutable_collection("router_stats"):
            self.put_variable("router_stats", "aux_loss_total", out.aux_loss)
        if return_hidden:
            return h
        with jax.named_scope("head"):
            wide = jnp.promote_types(dtype, jnp.float32)
            return jnp.matmul(h, head.astype(dtype), preferred_element_type=wide)

    def _output(self, out) -> jax.Array:
        """The stream that the final norm reads."""
        if self.config.residual == "plain":
            return out.prefix
        query = AttentionResidual(self.config.norm_eps, self.config.param_dtype, name="output_residual")
        if self.is_initializing() and out.sources is None:
            return query(out.prefix[None])
        return query(out.sources, out.prefix)


def pad_to_mesh(
    tokens: jax.Array, segment_ids: jax.Array | None, parallel: ModelParallel
) -> tuple[jax.Array, jax.Array | None]:
    """Rows and time up to multiples of their mesh axes, what is added being padding (segment 0)."""
    added = [(0, -size % parallel.size(axis)) for size, axis in zip(tokens.shape, ("batch", "time"), strict=True)]
    if any(count for _, count in added):
        if segment_ids is None:
            segment_ids = jnp.ones(tokens.shape, jnp.int32)
        tokens, segment_ids = (jnp.pad(pin_uneven(x, parallel), added) for x in (tokens, segment_ids))
    return tokens, segment_ids


def pin_uneven(x: jax.Array, parallel: ModelParallel) -> jax.Array:
    """x [B,T,...] with an axis that the mesh does not divide whole on every device, the others sharded as ever.

    Otherwise XLA cuts such an axis into unequal shards around the padding, also in the caller's loss, and as of jax 0.10.2
    gets them wrong: jnp.roll(x, -1, axis=1).at[:, -1].set(0) of 33 columns on 4 devices has another last column.
    """
    names = ("batch", "time")
    even = [name if size % parallel.size(name) == 0 else None for size, name in zip(x.shape[:2], names, strict=True)]
    return x if None not in even else parallel.constrain(x, *even, *(None,) * (x.ndim - 2))


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """The dtype of activations: as configured, else bfloat16 on an accelerator and float32 on a CPU."""
    if config.dtype is not None:
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


def check_tokens(tokens: jax.Array, segment_ids: jax.Array | None, vocab_size: int) -> None:
    """Raise ValueError for inputs that no model of `vocab_size` tokens can read. Values are checked when not traced."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}; it must be [B,T] with T >= 1.")
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens has dtype {tokens.dtype}; it must be an integer type.")
    if segment_ids is not None and (segment_ids.shape != tokens.shape or segment_ids.dtype != jnp.int32):
        raise ValueError(
            f"segment_ids is {segment_ids.dtype}{list(segment_ids.shape)}; it must be int32{list(tokens.shape)}, like tokens."
        )
    if segment_ids is not None and not isinstance(segment_ids, Tracer):
        check_segment_order(np.asarray(segment_ids))
    if not isinstance(tokens, Tracer):
        values = np.asarray(tokens)
        if segment_ids is not None and not isinstance(segment_ids, Tracer):
            values = values[np.asarray(segment_ids) != 0]  # padding may hold any id
        if values.size and (values.min() < 0 or values.max() >= vocab_size):
            raise ValueError(
                f"token ids span [{values.min()}, {values.max()}]; they must lie in [0, {vocab_size}), the vocabulary."
            )
