"""Configuration: every bad value is refused at once, and presets count what they should."""

import dataclasses
import json
import subprocess
import sys

import pytest

from moejax import ModelConfig, presets
from moejax.counting import count_parameters
from moejax.parallel import MeshConfig


def test_round_trip_through_json():
    for name in presets.NAMES:
        config = presets.get(name)
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_k3_counts():
    """Published: 2.78T parameters, 104.2B active with the head and without the embedding table."""
    counts = count_parameters(presets.get("kimi_k3"))
    assert counts.total == 2_779_484_393_568
    assert round(counts.total / 1e12, 4) == 2.7795
    assert round(counts.active / 1e9, 2) == 104.19


def test_other_preset_counts():
    linear = count_parameters(presets.get("kimi_linear_48b"))
    assert round((linear.total - linear.embedding) / 1e9, 1) == 48.7
    assert round(linear.active / 1e9, 1) == 3.1
    small = presets.get("small")
    assert abs(count_parameters(small).active - 100e6) < 2e6
    assert small.moe.experts % 16 == 0 and small.kda.heads % 4 == 0 and small.mla.heads % 4 == 0
    tiny = presets.get("tiny")
    assert tiny.mixers.count("K") == 3 * tiny.mixers.count("M")
    assert tiny.moe.experts >= 32 and tiny.moe.experts_per_token == 4 and tiny.moe.shared_width and tiny.moe.latent


def test_preset_table_is_printed():
    out = subprocess.run([sys.executable, "-m", "moejax.presets"], capture_output=True, text=True, check=True).stdout
    assert "kimi_k3" in out and "2,779,484.4" in out and "104,189.5" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 7}, "'KKKM' has 4 letters and does not fill layers = 7"),
        ({"pattern": "KKXM"}, "letters K"),
        ({"kda": {"lower_bound": -6.0}}, r"\[-5.9, 0\)"),
        ({"kda": {"lower_bound": 0.0}}, r"\[-5.9, 0\)"),
        ({"kda": {"value_heads": 6}}, "multiple of heads"),
        ({"moe": {"experts_per_token": 33}}, "must not exceed experts = 32"),
        ({"moe": {"experts_per_token": 32}}, "balance='none'"),
        ({"moe": {"balance": "magic"}}, "quantile_exact"),
        ({"mla": {"rotary_scale": 4.0}}, "positions"),
        ({"mla": {"rotary_base": 500.0}}, "positions"),
        ({"activation": "swiglu", "gate_cap": 2.0}, "no caps"),
        ({"moe": {"expert": 3}}, "unknown MoEConfig fields: expert"),
        ({"depth": 3}, "unknown ModelConfig fields: depth"),
        ({"hidden": 0}, "at least 1"),
        ({"dense_layers": 9}, r"\[0, layers = 8\]"),
        ({"residual": "full"}, "scan_layers=False"),
        ({"residual": "blocks"}, r"plain, full, block"),
        ({"activation": "relu"}, "situ, swiglu"),
        ({"dtype": "float16"}, "float32, bfloat16, float64"),
        ({"norm_eps": 0.0}, "positive"),
    ],
)
def test_bad_values(changes, message):
    with pytest.raises(ValueError, match=message):
        presets.get("tiny").replace(**changes)


def test_one_lower_bound_rule():
    from moejax.config import MIN_LOWER_BOUND
    from moejax.kernels.kda.gate import LOWEST_BOUND

    assert MIN_LOWER_BOUND == LOWEST_BOUND


def test_unknown_names():
    with pytest.raises(ValueError, match=r"unknown preset 'huge'; known: tiny, small"):
        presets.get("huge")
    with pytest.raises(ValueError, match="unknown ModelConfig fields: depth"):
        ModelConfig.from_dict(presets.get("tiny").to_dict() | {"depth": 3})
    with pytest.raises(ValueError, match=r"MeshConfig\.data"):
        MeshConfig(data=0)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        presets.get("tiny").hidden = 3  # pyright: ignore[reportAttributeAccessIssue]
