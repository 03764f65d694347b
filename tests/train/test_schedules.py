"""Schedules as functions of the update count, and the optimizer's settings."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.train.optimizers import OptimizerConfig, adamw, cosine_schedule, make_optimizer, make_schedule, muon


def test_cosine():
    """K3: 1% of linear warm-up by default, then a cosine to the floor; the first update already moves."""
    config = OptimizerConfig(learning_rate=2.0, total_steps=400)
    values = np.asarray(make_schedule(config)(np.arange(500)))
    np.testing.assert_allclose(values[:4], [0.5, 1.0, 1.5, 2.0], rtol=1e-6)
    share = (np.arange(4, 401) - 4) / 396
    np.testing.assert_allclose(values[4:401], 0.2 + 1.8 * 0.5 * (1 + np.cos(np.pi * share)), rtol=1e-5)
    np.testing.assert_allclose(values[400:], 0.2, rtol=1e-6)
    np.testing.assert_array_equal(values, cosine_schedule(config)(np.arange(500)))


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("sqrt", 1 - 0.5**0.5), ("cosine", 0.5)])
def test_wsd(shape, middle):
    config = OptimizerConfig(learning_rate=2.0, total_steps=100, warmup_fraction=0.1, schedule="wsd", decay_fraction=0.4, decay_shape=shape)
    values = np.asarray(make_schedule(config)(np.arange(120)))
    np.testing.assert_allclose(values[:10], np.arange(1, 11) / 5, rtol=1e-6)
    np.testing.assert_allclose(values[9:61], 2.0, rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(values[60:101]))
    np.testing.assert_allclose(values[80], 0.2 + 1.8 * middle, rtol=1e-5)
    np.testing.assert_allclose(values[100:], 0.2, rtol=1e-5)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_rate_is_that_of_the_count_of_updates(kind):
    """Three updates by zero gradients: the weight shrinks by the schedule's rates times the decay."""
    config = OptimizerConfig(
        learning_rate=0.5, total_steps=4, warmup_fraction=0.5, schedule="wsd", decay_fraction=0.5, kind=kind, weight_decay=0.2
    )
    optimizer, params = make_optimizer(config), {"router": jnp.ones((3, 2))}
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        params = optax.apply_updates(params, updates)
    want = np.prod(1 - 0.2 * np.asarray(make_schedule(config)(np.arange(3))))
    np.testing.assert_allclose(params["router"], want, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.9}, "momentum is 0.9, which only kind='muon' reads, and kind is 'adamw'"),
        ({"nesterov": False}, "set kind='muon', or leave nesterov at True"),
        ({"newton_schulz_steps": 6}, "only kind='muon'"),
        ({"newton_schulz_dtype": "bfloat16"}, "only kind='muon'"),
        ({"muon_scale": 0.3}, "only kind='muon'"),
        ({"decay_fraction": 0.3}, "only schedule='wsd' reads, and schedule is 'cosine'"),
        ({"decay_shape": "sqrt"}, "only schedule='wsd'"),
        ({"kind": "sgd"}, "kind is 'sgd'; allowed: adamw, muon"),
        ({"schedule": "step"}, "schedule is 'step'; allowed: cosine, wsd"),
        ({"schedule": "wsd", "decay_shape": "cliff"}, "allowed: linear, sqrt, cosine"),
        ({"kind": "muon", "newton_schulz_dtype": "float16"}, "allowed: float32, bfloat16"),
        ({"schedule": "wsd", "decay_fraction": 1.0}, "10 updates of warm-up and 1000 of decay are more than total_steps = 1000"),
        ({"schedule": "wsd", "decay_fraction": -0.1}, r"decay_fraction is -0.1; it must lie in \[0, 1\]"),
        ({"kind": "muon", "momentum": 1.0}, r"momentum is 1.0; it must lie in \[0, 1\)"),
        ({"kind": "muon", "newton_schulz_steps": 0}, "newton_schulz_steps is 0; it must be at least 1"),
        ({"kind": "muon", "muon_scale": 0.0}, "muon_scale is 0.0; it must be positive"),
        ({"qk_clip": -1.0}, "qk_clip is -1.0; it must be positive"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
    ],
)
def test_bad_settings(settings, message):
    """One error: the value, the rule and the way out; also for a setting that would be ignored."""
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


def test_every_setting_of_one_kind_is_checked():
    """A new setting must be read by all kinds, or be listed in READ_BY."""
    from moejax.train.optimizers import READ_BY

    always = {"learning_rate", "total_steps", "warmup_fraction", "final_ratio", "b1", "b2", "weight_decay", "kind", "schedule", "qk_clip"}
    listed = {name for _, _, names in READ_BY.values() for name in names}
    assert always | listed == {field.name for field in dataclasses.fields(OptimizerConfig)}


def test_optimizer_of_another_kind():
    with pytest.raises(ValueError, match=r"kind is 'muon'; this is adamw\. Use make_optimizer"):
        adamw(OptimizerConfig(kind="muon"))
    with pytest.raises(ValueError, match="kind is 'adamw'; this is muon"):
        muon(OptimizerConfig())
