"""Grouping of layers into loops, and what it buys at 93 layers: program size, lowering time, saved activations."""

import time

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import HybridLM, presets
from moejax.modules.plan import layer_locations, plan, run_lengths
from moejax.train.loss import chunked_cross_entropy


def k3_shaped(layers, residual="block"):
    """The layer pattern of K3 (every fourth layer and the last are MLA) with few channels."""
    pattern = "KKKM" * (layers // 4) + "M" * (layers % 4)
    return presets.get("kimi_k3").replace(
        vocab_size=64,
        hidden=32,
        layers=layers,
        pattern=pattern,
        dense_width=32,
        residual=residual,
        kda={"heads": 1, "key_dim": 16, "value_dim": 16},
        mla={"heads": 1, "nope_dim": 16, "rope_dim": 8, "value_dim": 16, "q_latent": 16, "kv_latent": 16},
        moe={"experts": 4, "experts_per_token": 2, "expert_width": 16, "latent": 16, "shared_width": 16},
        dtype="float32",
    )


def lower_gradient(config, tokens):
    model = HybridLM(config)
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))

    def loss(params, state, tokens):
        hidden = model.apply({"params": params, "router_state": state}, tokens, return_hidden=True)
        targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
        return chunked_cross_entropy(
            hidden.reshape(-1, config.hidden), params["head"], targets, jnp.ones(targets.shape, bool)
        )

    shape = jax.ShapeDtypeStruct(tokens, jnp.int32)
    return jax.jit(jax.grad(loss)).lower(variables["params"], variables["router_state"], shape)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from("KMD"), min_size=1, max_size=40), st.integers(1, 6))
def test_run_lengths_lose_nothing(items, period):
    runs = run_lengths(items, period)
    assert [item for unit, repeats in runs for _ in range(repeats) for item in unit] == items
    assert all(len(unit) <= period and repeats >= 1 for unit, repeats in runs)


def test_run_lengths_prefer_coverage():
    assert run_lengths("KKKMKKKMKKKM", 4) == [(tuple("KKKM"), 3)]
    assert run_lengths("DKKM", 4) == [(("D",), 1), (("K",), 2), (("M",), 1)]


@pytest.mark.parametrize("name", presets.NAMES)
def test_locations_cover_every_layer_once(name):
    config = presets.get(name)
    locations = layer_locations(config)
    assert len(set(locations)) == config.layers == len(locations)


def test_k3_compiles_few_layers():
    """93 layers are 16 bodies, the 25-layer model is 12."""

    def bodies(config):
        return sum(len(unit) for group in plan(config) for unit, _ in group.block)

    assert bodies(presets.get("kimi_k3")) == 16
    assert bodies(k3_shaped(25)) == 12


def test_lowering_93_layers_costs_at_most_twice_25_layers():
    sizes, seconds = {}, {}
    for layers in (25, 93):
        start = time.process_time()
        lowered = lower_gradient(k3_shaped(layers), (1, 16))
        seconds[layers] = time.process_time() - start
        sizes[layers] = len(lowered.as_text())
    print(f"lowering {seconds}, HLO characters {sizes}")
    assert sizes[93] <= 2 * sizes[25]
    assert seconds[93] <= 2 * seconds[25]


@pytest.mark.slow
def test_saved_activations_at_93_layers():
    """Depth attention keeps its snapshots once: at most 1.3 x the memory of the plain-residual stack."""
    bytes_used = {}
    for residual in ("plain", "block"):
        compiled = lower_gradient(k3_shaped(93, residual), (8, 512)).compile()
        bytes_used[residual] = compiled.memory_analysis().temp_size_in_bytes
    unit = 8 * 512 * 32 * 4
    print({residual: f"{size / 2**20:.1f} MiB = {size / unit:.0f} streams" for residual, size in bytes_used.items()})
    assert bytes_used["block"] <= 1.3 * bytes_used["plain"]
