"""Sampling by a full forward over a fixed window: no cache, one compile. For a look at a small model while it trains.

W: window, V: vocabulary.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def sample_window(
    apply: Callable[[Any, jax.Array, jax.Array], Any],
    variables: Any,
    prompt: np.ndarray,
    *,
    count: int,
    window: int,
    allowed: np.ndarray,
    stop_id: int,
    temperature: float,
    key: jax.Array,
) -> np.ndarray:
    """Continue `prompt` by up to `count` tokens, at most up to and without `stop_id`.

    apply(variables, tokens [1,W], segment_ids [1,W]) -> logits [1,W,V]; prompt: int [N], N >= 1; allowed: bool [V], ids
    that may come; temperature 0 takes the likeliest. -> int32 [<= count]. Each token costs a forward over the window;
    what lies more than `window` tokens back is forgotten.
    """
    if len(prompt) < 1 or window < 2 or temperature < 0:
        raise ValueError(
            f"prompt of {len(prompt)} tokens, window={window}, temperature={temperature}; "
            "needed: a token, a window of 2 and a temperature >= 0."
        )

    @jax.jit
    def choose(variables, tokens, length, key):
        segments = (jnp.arange(window) < length).astype(jnp.int32)[None]
        logits = apply(variables, tokens[None], segments)[0, length - 1]
        logits = jnp.where(jnp.asarray(allowed), logits, -jnp.inf)
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, jnp.argmax(logits))

    text = [int(token) for token in prompt]
    for index in range(count):
        recent = text[-window:]
        tokens = np.zeros(window, np.int32)
        tokens[: len(recent)] = recent
        token = int(choose(variables, tokens, len(recent), jax.random.fold_in(key, index)))
        if token == stop_id:
            break
        text.append(token)
    return np.array(text[len(prompt) :], np.int32)
