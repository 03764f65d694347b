"""The train step lowers for GPUs and TPUs on a machine that has neither."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moejax import HybridLM
from moejax.train import OptimizerConfig, adamw, init_state, make_train_step

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_train_step_lowers(toy, platform):
    model, optimizer = HybridLM(toy.replace(dtype="bfloat16", remat="full")), adamw(OptimizerConfig())
    state = jax.eval_shape(lambda key: init_state(model, optimizer, key), jax.random.key(0))
    ids = jax.ShapeDtypeStruct((2, 70), jnp.int32)
    traced = jax.jit(make_train_step(model, optimizer)).trace(state, {"tokens": ids, "segment_ids": ids})
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=H200)
    with jax.sharding.use_abstract_mesh(mesh) if platform == "cuda" else contextlib.nullcontext():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text and "bf16" in text
