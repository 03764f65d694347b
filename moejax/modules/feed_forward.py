"""Flax module of a gated feed-forward, dense or as the shared expert (K3 report section 2.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..ops.activations import situ_glu, swiglu
from ..ops.experts import gated_mlp


def gated_activation(name: str, gate_cap: float, up_cap: float):
    """The function (gate, up) -> hidden called `name` in a configuration: "situ" or "swiglu"."""
    if name == "swiglu":
        return swiglu
    if name == "situ":
        return lambda gate, up: situ_glu(gate, up, gate_cap=gate_cap, up_cap=up_cap)
    raise ValueError(f"activation is {name!r}; allowed: situ, swiglu.")


class FeedForward(nn.Module):
    """[..., D] -> [..., D] through a gated hidden layer of `width` channels. No biases."""

    width: int
    activation: str = "situ"
    gate_cap: float = 4.0
    up_cap: float = 25.0
    initializer_range: float = 0.02
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden, dtype = x.shape[-1], jnp.dtype(self.param_dtype)
        normal = nn.initializers.normal(self.initializer_range)
        gate = self.param("gate_proj", normal, (hidden, self.width), dtype)
        up = self.param("up_proj", normal, (hidden, self.width), dtype)
        down = self.param("down_proj", normal, (self.width, hidden), dtype)
        activate = gated_activation(self.activation, self.gate_cap, self.up_cap)
        return gated_mlp(x, gate, up, down, activation=activate)
