"""Published checkpoints through moejax.infer: prefill and decoding against logits computed outside this project.

Tolerances of the golden files: 5e-4 everywhere, 5e-5 root mean square. Shapes: B rows, T tokens, V vocabulary.
"""

import jax
import numpy as np
import pytest

from moejax import HybridLM, hub
from moejax.infer import decode_step, init_cache, prefill, prepare

PROMPT = 37


CASES = [pytest.param("k3_tiny", False, marks=pytest.mark.slow), ("k3_tiny", True), ("kimi_linear_tiny", False)]


@pytest.mark.parametrize(("name", "packed"), CASES)
def test_prefill_and_decode(golden, golden_folder, name, packed):
    """The first 37 tokens in chunks of 16, the others one at a time; K3 also with its experts left in MXFP4."""
    checkpoint = hub.load(golden_folder / name, param_dtype="float32", keep_packed=packed)
    config = checkpoint.config.replace(dtype="float32")
    forward = golden(f"{name}/forward.npz")
    tokens, expected = forward["ids"].astype(np.int32), forward["out_logits"]
    weights = prepare(HybridLM(config), {"params": checkpoint.params, "router_state": checkpoint.router_state})
    given = prefill(weights, tokens[:, :PROMPT], init_cache(config, tokens.shape[0], tokens.shape[1], dtype="float32"), chunk=16)
    logits, step = [given.logits], jax.jit(decode_step, donate_argnames="cache")
    for token in tokens[:, PROMPT:].T:
        given = step(weights, given.cache, token)
        logits.append(given.logits)
    error = np.abs(np.stack(logits, axis=1).astype(np.float64) - expected[:, PROMPT - 1 :])
    assert error.max() < 5e-4 and np.sqrt(np.mean(error**2)) < 5e-5, error.max()
