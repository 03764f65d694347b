"""The tiny Kimi Linear checkpoint, written by the public transformers package, against that package's own results.

Logits, loss, hidden states, gradients and greedy tokens come from transformers 5.24.0; `oracle_float64.npz` is an
independent float64 implementation on the same files. Tolerances as in `test_golden_k3.py`. Shapes: B rows, T tokens.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM, hub
from moejax.modules import RMSNorm

CHECKPOINT = pathlib.Path(__file__).parent.parent / "golden" / "kimi_linear_tiny"


@pytest.fixture(scope="module")
def checkpoint():
    return hub.load(CHECKPOINT, param_dtype="float32")


@pytest.fixture(scope="module")
def forward_file(golden):
    return golden("kimi_linear_tiny/forward.npz")


@pytest.fixture(scope="module")
def oracle(golden):
    return golden("kimi_linear_tiny/oracle_float64.npz")


@pytest.fixture(scope="module")
def whole(checkpoint, forward_file, run_whole):
    return run_whole(checkpoint, forward_file["ids"], RMSNorm)


def test_configuration(checkpoint):
    config = checkpoint.config
    assert config.mixers == "KKKMKM"
    assert (config.residual, config.activation, config.kda.lower_bound, config.kda.output_gate_rank) == ("plain", "swiglu", None, 16)
    assert (config.mla.q_latent, config.mla.gate, config.moe.latent, config.moe.scaling) == (None, False, None, 2.446)


def test_logits_and_loss(whole, forward_file, oracle, assert_logits):
    for file in (forward_file, oracle):
        assert_logits(whole["logits"], file["out_logits"])
        np.testing.assert_allclose(whole["loss"], file["out_loss"][0], rtol=0, atol=1e-5)


def test_hidden_states(whole, checkpoint, layer_streams, forward_file):
    """0 is the embedding, l the sum after layer l, the last one the final norm's output."""
    want = forward_file["out_hidden_states"]
    streams = layer_streams(checkpoint.config, whole["intermediates"])
    assert len(want) == len(streams) + 1
    np.testing.assert_array_equal(checkpoint.params["embedding"][forward_file["ids"]], want[0])
    np.testing.assert_allclose(streams[:-1], want[1:-1], rtol=0, atol=1e-3)
    np.testing.assert_allclose(whole["intermediates"]["final_norm"]["__call__"][0], want[-1], rtol=0, atol=1e-3)


def test_gradients(whole, checkpoint, file_tensors, forward_file, assert_close):
    """Under the package's parameter names, which differ from those in the file for the gate and the router."""
    actual = file_tensors(checkpoint.config, whole["grads"], checkpoint.router_state)
    expected = {name: value for name, value in forward_file.items() if name.startswith("grad_")}
    assert len(expected) == 10
    for name, want in expected.items():
        stored = name.removeprefix("grad_").replace("forget_gate.", "").replace("mlp.gate", "block_sparse_moe.gate")
        assert_close(actual[stored], want, 3e-4, name)


def test_every_weight(checkpoint, published_tensors, file_tensors):
    """The loaded tree is the file's tensors, bit for bit."""
    expected = published_tensors("kimi_linear_tiny")
    actual = file_tensors(checkpoint.config, checkpoint.params, checkpoint.router_state)
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        np.testing.assert_array_equal(actual[name], want, err_msg=name)


@pytest.fixture(scope="module")
def stepper(checkpoint, make_stepper):
    return make_stepper(checkpoint)


def test_step_by_step(stepper, forward_file, assert_logits):
    """A prompt of 20 tokens through the functions, then 50 tokens one at a time from the caches that it left."""
    prefill = stepper.prefill(forward_file["ids"][:, :20])
    logits, _ = stepper.feed(forward_file["ids"][:, 20:], stepper.room(prefill.caches), 20)
    assert_logits(np.concatenate([prefill.logits, logits], 1), forward_file["out_logits"])


def test_greedy(stepper, golden):
    """The 16 tokens that the package's generate() appended to each prompt."""
    file = golden("kimi_linear_tiny/generate.npz")
    assert file["out_margin"].min() > 1e-3  # no tie decides
    prompt, want = np.split(file["tokens"], [int(file["prefill"])], axis=1)
    assert want.shape == (2, 16)
    np.testing.assert_array_equal(stepper.greedy(jnp.asarray(prompt), 16), want)


def test_float64(x64, oracle, forward_file):
    """The float64 implementation's logits, stored as float32: 1e-5."""
    checkpoint = hub.load(CHECKPOINT, param_dtype="float64")
    variables = {"params": checkpoint.params, "router_state": checkpoint.router_state}
    logits = jax.jit(HybridLM(checkpoint.config.replace(dtype="float64")).apply)(variables, jnp.asarray(forward_file["ids"]))
    assert logits.dtype == jnp.float64
    np.testing.assert_allclose(logits, oracle["out_logits"], rtol=0, atol=1e-5)
