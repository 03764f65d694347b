"""One token for every row of a HybridCache.

Shapes: B rows, V vocabulary, M MoE layers, k experts a token.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .cache import HybridCache, check_cache
from .forward import Mixers, logits_of, run_layers
from .mixers import kda_token, mla_token
from .prefill import Step, check_room
from .requests import token_ids
from .weights import Weights


def decode_step(weights: Weights, cache: HybridCache, tokens, *, active=None, return_experts: bool = False) -> Step:
    """Append one token to each row and predict the next: a pure function, `jax.jit(decode_step, donate_argnames="cache")`.

    Latents are read in absorbed form, states in one pass; the selection bias of the routers is frozen. Without donation every call
    copies the whole cache.

    Args:
      weights: of `prepare`.
      cache: B rows.
      tokens: [B] integers in the vocabulary.
      active: [B] bool; of an inactive row nothing is read or changed and the logits are 0. None: all are active.
      return_experts: also return the routed experts [B,M,k].

    Raises:
      ValueError: shapes that do not fit, a cache of another model; a full row or an id outside the vocabulary (when nothing is traced;
        inside jit the caller sees to it).
    """
    check_cache(weights, cache)
    tokens = jnp.asarray(tokens)
    if tokens.shape != (cache.rows,) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens is {tokens.dtype}{list(tokens.shape)}; it must be integers [B] = [{cache.rows}], one a row of the cache.")
    active = None if active is None else jnp.asarray(active)
    if active is not None and (active.shape != tokens.shape or active.dtype != jnp.bool_):
        raise ValueError(f"active is {active.dtype}{list(active.shape)}; it must be bool [B] = [{cache.rows}].")
    added = jnp.ones_like(cache.lengths) if active is None else active.astype(jnp.int32)
    if not any(isinstance(x, Tracer) for x in (cache.lengths, added, tokens)):
        check_room(cache, added)
        token_ids("tokens", np.asarray(tokens)[np.asarray(added) > 0], weights.config.vocab_size)
    mask = None if active is None else active[:, None]
    mixers: Mixers = {"K": (kda_token, (active,)), "M": (mla_token, (cache.lengths, active))}
    h, layers, experts = run_layers(weights, cache, tokens[:, None], mask, mixers, return_experts=return_experts)
    logits = logits_of(weights, h[:, 0])
    if mask is not None:
        logits = jnp.where(mask, logits, 0)
    return Step(logits, HybridCache(layers, cache.lengths + added), None if experts is None else experts[:, 0])
