"""The tiny Kimi K3 checkpoint against an independent float64 implementation: every stored number.

Tolerances are those of the golden files' README: float32 logits 5e-4 at most and 5e-5 root mean square, streams 1e-3,
gradients 3e-4 of each tensor's largest entry; float64 logits 1e-5. Shapes: B rows, T tokens, D width, V vocabulary.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM, hub
from moejax.modules import AttentionResidual, RMSNorm
from moejax.ops import route

CHECKPOINT = pathlib.Path(__file__).parent.parent / "golden" / "k3_tiny"


def load(dtype="float32", **options):
    checkpoint = hub.load(CHECKPOINT, param_dtype=dtype, **options)
    return checkpoint, checkpoint.config.replace(dtype=dtype)


@pytest.fixture(scope="module")
def k3():
    return load()[0]


def test_configuration(k3):
    """Layer lists count from 1, the bound, the caps and the block size are read, not assumed."""
    config = k3.config
    assert config.mixers == "KKKMKKKM"
    assert (config.residual, config.residual_block, config.dense_layers, config.activation) == ("block", 3, 1, "situ")
    assert (config.gate_cap, config.up_cap, config.norm_eps, config.kda.lower_bound) == (4.0, 25.0, 1e-5, -5.0)
    assert (config.kda.output_gate_rank, config.mla.gate, config.mla.positions) == (None, True, "none")
    moe = config.moe
    assert (moe.experts, moe.experts_per_token, moe.latent, moe.latent_norm, moe.shared_width) == (16, 4, 32, True, 128)
    assert (moe.scaling, moe.renormalize) == (1.0, True)


@pytest.fixture(scope="module")
def forward_file(golden):
    return golden("k3_tiny/forward.npz")


@pytest.fixture(scope="module")
def decode_file(golden):
    return golden("k3_tiny/decode.npz")


@pytest.fixture(scope="module")
def whole(k3, forward_file, run_whole):
    return run_whole(k3, forward_file["ids"], AttentionResidual | RMSNorm)


def test_logits_and_loss(whole, forward_file, assert_logits):
    assert_logits(whole["logits"], forward_file["out_logits"])
    np.testing.assert_allclose(whole["loss"], forward_file["out_loss"][0], rtol=0, atol=1e-5)


def test_streams_of_the_model(whole, k3, layer_streams, forward_file):
    written = whole["intermediates"]
    streams = layer_streams(k3.config, written)
    assert streams.shape == forward_file["out_stream"].shape
    np.testing.assert_allclose(streams, forward_file["out_stream"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(written["output_residual"]["__call__"][0], forward_file["out_mixed"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(written["final_norm"]["__call__"][0], forward_file["out_final"], rtol=0, atol=1e-3)


def test_gradients(whole, k3, file_tensors, golden, assert_close):
    """Every stored gradient, in the file's names and layout; A_log is padded to 128 entries with zeros."""
    expected = golden("k3_tiny/grads.npz")
    actual = file_tensors(k3.config, whole["grads"], k3.router_state)
    assert len(expected) == 36
    for name, want in expected.items():
        assert_close(actual[name.removeprefix("grad_")], want, 3e-4, name)
    assert not actual["model.layers.1.self_attn.A_log"][4:].any()


def test_every_weight(k3, published_tensors, file_tensors):
    """The loaded tree is the file's tensors, bit for bit: no name lost, swapped or transposed."""
    text = {k.removeprefix("language_model."): v for k, v in published_tensors("k3_tiny").items() if k.startswith("language_model.")}
    actual = file_tensors(k3.config, k3.params, k3.router_state)
    assert actual.keys() == text.keys()
    for name, want in text.items():
        np.testing.assert_array_equal(actual[name], want, err_msg=name)


# --- one layer after the other, through the functions ---------------------------------------------------------------


@pytest.fixture(scope="module")
def stepper(k3, make_stepper):
    return make_stepper(k3)


@pytest.fixture(scope="module")
def prefill(stepper, forward_file, decode_file):
    assert int(decode_file["prefill"]) == 37
    return stepper.prefill(forward_file["ids"][:, :37])


def test_sublayers(prefill, forward_file, assert_logits):
    """Causal: the first 37 tokens alone give the first 37 columns of every stored activation."""
    for name in ("attn", "mlp", "stream"):
        for layer, value in enumerate(getattr(prefill, name)):
            want = forward_file[f"out_{name}"][layer, :, :37]
            np.testing.assert_allclose(value, want, rtol=0, atol=1e-3, err_msg=f"{name} {layer}")
    np.testing.assert_allclose(prefill.mixed, forward_file["out_mixed"][:, :37], rtol=0, atol=1e-3)
    np.testing.assert_allclose(prefill.final, forward_file["out_final"][:, :37], rtol=0, atol=1e-3)
    assert_logits(prefill.logits, forward_file["out_logits"][:, :37])


@pytest.mark.parametrize("layer", range(1, 8))
def test_routes(prefill, forward_file, layer):
    """The same experts as sets, each with the same weight."""
    want, weights = (forward_file[name][:, :37].reshape(-1, 4) for name in (f"layer{layer}_routes", f"out_layer{layer}_weights"))
    routing = prefill.routing[layer]
    dense = [np.zeros((len(want), 16)) for _ in range(2)]
    for into, experts, values in zip(dense, (routing.experts, want), (routing.weights, weights), strict=True):
        np.put_along_axis(into, np.asarray(experts), np.asarray(values), 1)
    assert ((dense[0] > 0) == (dense[1] > 0)).all()
    assert ((dense[1] > 0).sum(1) == 4).all()
    np.testing.assert_allclose(dense[0], dense[1], rtol=0, atol=1e-4)


def test_renormalisation_epsilon():
    """It is 1e-20: chosen scores near 1e-12 still get weights that sum to 1. No stored logit shows it (1e-6 moves them by 1e-6)."""
    weights = route(jnp.full((1, 16), -27.6), None, 4).weights
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-6)


def test_caches_after_prefill(prefill, stored_caches, assert_close):
    for layer, (ours, stored) in enumerate(zip(prefill.caches, stored_caches(), strict=True)):
        assert type(ours) is type(stored)
        for part, (value, want) in enumerate(zip(ours, stored, strict=True)):
            assert value.dtype == jnp.float32
            assert_close(value, np.asarray(want), 1e-4, f"layer {layer}, part {part}")


def test_decoding_from_the_stored_caches(stepper, stored_caches, forward_file, decode_file, assert_logits):
    """Tokens 37..69 one at a time: recurrent step, convolution history, absorbed attention, two-phase depth attention."""
    caches = stepper.room(stored_caches())
    logits, _ = stepper.feed(forward_file["ids"][:, 37:], caches, 37)
    assert_logits(logits, decode_file["out_logits_decode"])
    assert_logits(logits, forward_file["out_logits"][:, 37:])


def test_greedy(stepper, forward_file, decode_file):
    assert decode_file["out_greedy_margin"].min() > 1e-3  # far above the float32 error: no tie decides
    tokens = stepper.greedy(jnp.asarray(forward_file["ids"][:, :37]), 12)
    np.testing.assert_array_equal(tokens, decode_file["greedy_tokens"])


# --- packed rows, packed experts, float64 -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed_row(golden):
    """(file, tokens [1,70], segment ids from 1)."""
    file = golden("k3_tiny/packed.npz")
    return file, jnp.asarray(file["ids"]), jnp.asarray(file["segment_ids"]) + 1


def run_packed(checkpoint, packed_row):
    model = HybridLM(checkpoint.config.replace(dtype="float32"))
    variables = {"params": checkpoint.params, "router_state": checkpoint.router_state}
    return jax.jit(model.apply)(variables, *packed_row[1:])


@pytest.fixture(scope="module")
def packed_logits(k3, packed_row):
    return run_packed(k3, packed_row)


def test_packed_documents(packed_logits, packed_row, assert_logits, mean_loss):
    file, tokens, segment_ids = packed_row
    assert [int((segment_ids == i).sum()) for i in (1, 2, 3)] == [19, 34, 17]
    assert_logits(packed_logits, file["out_logits"])
    np.testing.assert_allclose(mean_loss(packed_logits, tokens, segment_ids), file["out_loss"][0], rtol=0, atol=1e-5)


def test_experts_kept_packed(packed_logits, packed_row):
    """MXFP4 codes and scales in the tree give the bits of the decoded matrices."""
    checkpoint, config = load(keep_packed=True)
    assert config.moe.expert_weights == "mxfp4"
    held = {str(leaf.dtype) for leaf in jax.tree.leaves(checkpoint.params)}
    assert "uint8" in held
    np.testing.assert_array_equal(run_packed(checkpoint, packed_row), packed_logits)


def test_float64(x64, forward_file):
    """Stored as float32, computed in float64: 1e-5."""
    checkpoint, config = load("float64")
    variables = {"params": checkpoint.params, "router_state": checkpoint.router_state}
    logits = jax.jit(HybridLM(config).apply)(variables, jnp.asarray(forward_file["ids"]))
    assert logits.dtype == jnp.float64
    np.testing.assert_allclose(logits, forward_file["out_logits"], rtol=0, atol=1e-5)
