"""Small sequence models for the recall study: one kind of token mixing a layer, everything else alike.

A layer is `x + mixer(norm(x))`, then `x + feed_forward(norm(x))` (SiTU-GLU); a norm stands before the output.
The mixers, with short convolutions of 4 taps but for the attention:

  kda            Kimi Delta Attention as in moejax: delta rule, bounded decay of its own for every key channel
  kda_zero_bias  the same with a gate bias of 0 at the start: memories of less than one token (control)
  gdn            delta rule with one decay a head (the gate of Gated DeltaNet, arXiv 2412.06464, in KDA's bounded form)
  no_delta       one decay a head and no delta rule (linear attention with decay, as Mamba2, arXiv 2405.21060): nothing is erased
  mla            Gated MLA without positions
  mla_rotary     Gated MLA with rotary positions on the shared key channels (control)

Shapes: B batch, T tokens, D width, H heads, K channels of a head, N vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from moejax.config import KDAConfig, MLAConfig
from moejax.kernels.common import accumulation_dtype
from moejax.kernels.kda.gate import l2_normalize
from moejax.modules.block import RMSNorm
from moejax.modules.feed_forward import FeedForward
from moejax.modules.initializers import dt_bias
from moejax.modules.kda import KimiDeltaAttention
from moejax.modules.mla import GatedMLA
from moejax.ops import KDAWeights, kda_gate, kda_layer, short_conv
from moejax.ops.kda_layer import layer_around

MIXERS = ("kda", "kda_zero_bias", "gdn", "no_delta", "mla", "mla_rotary")
LOWER_BOUND = -5.0
EPS = 1e-5  # of the norms
NORMAL = nn.initializers.normal(0.02)  # of matrices, as in moejax's modules


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    vocabulary: int
    mixers: tuple[str, ...]
    """One name a layer."""
    width: int = 256
    heads: int = 2
    head_dim: int = 128
    dtype: str = "float32"
    """Of activations; parameters, gates, norms and logits are float32."""
    tied: bool = False
    """Whether the output matrix is the embedding, as in Zoology's models."""
    rotary_scale: float = 1.0
    """Position interpolation of "mla_rotary" (positions are divided by it); other mixers have no positions."""

    def __post_init__(self) -> None:
        for mixer in self.mixers:
            if mixer not in MIXERS:
                raise ValueError(f"mixer {mixer!r}; there are {', '.join(MIXERS)}.")


class RecallModel(nn.Module):
    """tokens [B,T] int32 -> logits [B,T,N] float32; with at [B,A] int32 those of positions `at` alone, [B,A,N]."""

    shape: Shape

    @nn.compact
    def __call__(self, tokens: jax.Array, at: jax.Array | None = None) -> jax.Array:
        s = self.shape
        embedding = self.param("embedding", NORMAL, (s.vocabulary, s.width), jnp.float32)
        x = embedding[tokens].astype(s.dtype)  # cast behind the lookup: its gradient sums many rows, in float32
        for i, mixer in enumerate(s.mixers):
            x = x + _mixer(s, mixer, f"mixer_{i}")(RMSNorm(EPS, name=f"mixer_norm_{i}")(x))
            x = x + FeedForward(2 * s.width, name=f"mlp_{i}")(RMSNorm(EPS, name=f"mlp_norm_{i}")(x))
        output = embedding.T if s.tied else self.param("output", NORMAL, (s.width, s.vocabulary), jnp.float32)
        if at is not None:
            x = jnp.take_along_axis(x, at[..., None], axis=1)
        x = RMSNorm(EPS, name="output_norm")(x)
        return jnp.einsum("btd,dn->btn", x, output.astype(s.dtype), preferred_element_type=jnp.float32)


def initial_parameters(shape: Shape, key: jax.Array) -> Any:
    """Parameters of RecallModel(shape) in float32."""
    params: Any = RecallModel(shape).init(key, jnp.zeros((1, 16), jnp.int32))["params"]  # none depends on the length
    for i, mixer in enumerate(shape.mixers):
        if mixer == "kda_zero_bias":
            layer = params[f"mixer_{i}"]
            params |= {f"mixer_{i}": layer | {"dt_bias": jnp.zeros_like(layer["dt_bias"])}}
    return params


def _mixer(s: Shape, mixer: str, name: str) -> nn.Module:
    if mixer in ("kda", "kda_zero_bias"):
        return KimiDeltaAttention(KDAConfig(s.heads, s.head_dim, s.head_dim, lower_bound=LOWER_BOUND), name=name)
    if mixer in ("gdn", "no_delta"):
        return ScalarDecay(s, delta=mixer == "gdn", name=name)
    rotated = s.head_dim // 4
    positions: Any = {"positions": "rotary", "rotary_scale": s.rotary_scale} if mixer == "mla_rotary" else {}
    config = MLAConfig(s.heads, s.head_dim - rotated, rotated, s.head_dim, kv_latent=s.width, **positions)
    return GatedMLA(config, name=name)


class ScalarDecay(nn.Module):
    """KDA's layer with one decay a head, with the delta rule or without: projections, convolutions, gates and norm are the same."""

    shape: Shape
    delta: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weights = self._weights(x.shape[-1])
        if self.delta:  # the gate equal over the channels: its weights are repeated, KDA's kernels serve
            channels = self.shape.head_dim
            weights = weights._replace(
                decay_up=jnp.repeat(weights.decay_up, channels, axis=2), dt_bias=jnp.repeat(weights.dt_bias, channels, axis=1)
            )
            return kda_layer(x, weights, lower_bound=LOWER_BOUND)[0]

        def convolve(inputs, taps, histories):
            pairs = [short_conv(a, w, history=h) for a, w, h in zip(inputs, taps, histories, strict=True)]
            return [y for y, _ in pairs], [history for _, history in pairs]

        def recur(q, k, v, raw_gate, beta_logits, A_log, bias):
            g = kda_gate(raw_gate, A_log, bias, lower_bound=LOWER_BOUND)[..., 0]
            beta = jax.nn.sigmoid(beta_logits.astype(g.dtype))
            return decayed_attention(l2_normalize(q), l2_normalize(k), v, g, beta), None

        options: Any = dict(norm_eps=EPS, state=None, segment_ids=None, implementation=None)
        return layer_around(x, weights, convolve, recur, **options)[0]

    def _weights(self, hidden: int) -> KDAWeights:
        """As KimiDeltaAttention's, the decay with one channel: decay_up [R,H,1], dt_bias [H,1]."""
        heads, channels = self.shape.heads, self.shape.head_dim
        taps = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")

        def matrix(name: str, *shape: int, init: Any = NORMAL) -> jax.Array:
            return self.param(name, init, shape, jnp.float32)

        return KDAWeights(
            **{name: matrix(name, hidden, heads, channels) for name in ("q_proj", "k_proj", "v_proj", "out_gate")},
            **{name: matrix(name, 4, heads * channels, init=taps) for name in ("q_conv", "k_conv", "v_conv")},
            decay_down=matrix("decay_down", hidden, channels),
            decay_up=matrix("decay_up", channels, heads, 1),
            A_log=matrix("A_log", heads, init=nn.initializers.zeros),
            dt_bias=matrix("dt_bias", heads, 1, init=dt_bias),
            beta_proj=matrix("beta_proj", hidden, heads),
            out_gate_down=None,
            out_gate_up=None,
            out_norm=matrix("out_norm", channels, init=nn.initializers.ones),
            out_proj=matrix("out_proj", heads, channels, hidden),
        )


def decayed_attention(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> jax.Array:
    """Linear attention with one decay a head and no delta rule, exact, as one product of [T,T] a head.

    S <- exp(g) S + beta k v^T;  o = K^-0.5 S^T q, which is o_t = sum over s <= t of exp(g_{s+1} + ... + g_t) (q_t k_s) beta_s v_s.
    q, k [B,T,H,K], v [B,T,H,V], g [B,T,H] log decay <= 0, beta [B,T,H] -> [B,T,H,V] in v's dtype; sums are float32 or float64.
    """
    dtype = accumulation_dtype(q, k, v, g, beta)
    total = jnp.cumsum(g.astype(dtype), axis=1)
    exponent = total[:, :, None] - total[:, None]  # [B,T,S,H]
    past = jnp.tril(jnp.ones(exponent.shape[1:3], bool))[None, :, :, None]
    weight = jnp.exp(jnp.where(past, exponent, -jnp.inf))  # masked before exp: a later token's exponent is positive and may overflow
    scores = jnp.einsum("bthk,bshk->btsh", q, k, preferred_element_type=dtype) * q.shape[-1] ** -0.5
    mixed = (scores * weight * beta.astype(dtype)[:, None]).astype(v.dtype)
    return jnp.einsum("btsh,bshv->bthv", mixed, v, preferred_element_type=dtype).astype(v.dtype)
