"""Figures from inside the model, taken now and then on a few rows by a program of its own: the train step stays as it is.

A Flax interceptor reads the arguments of the layers while the program is traced and sows small summaries into `intermediates`, the
collection that scans and remat already carry, so no module knows of it.

Cost: one forward pass over the probe's rows, and once more, at no more than 4,096 tokens a row, the decay projections of each KDA
layer, the gate of each MLA layer and the logits of each depth attention. Without a mesh that is under 1.2 times a forward pass in
FLOPs (tested), so under half a train step of the same rows: with 1 row of 64 every 100 steps less than 0.01% of the time. Over a mesh
each KDA layer runs once more, because the sharded one gives no state. Memory: what the forward pass needs, plus at most a KDA
layer's decays at 4,096 tokens. It is compiled once a length of the rows.

Shapes: B rows, T tokens, L layers, N KDA layers, A MLA layers, G value heads, K key channels, R = 2 L + 1 reads over depth (mixer and
feed-forward of each layer, then the output), S sources, Q bins.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec

from ..config import ModelConfig
from ..kernels.common import accumulation_dtype
from ..kernels.kda.gate import kda_gate
from ..modules.block import DecoderLayer, SourcesLayer
from ..modules.depth_attention import AttentionResidual
from ..modules.kda import KimiDeltaAttention
from ..modules.mla import GatedMLA
from ..modules.model import HybridLM, pad_to_mesh
from ..modules.plan import layer_locations
from ..ops.kda_layer import KDAWeights, kda_layer

HALF_LIFE_EDGES = 2.0 ** np.arange(-3, 22)
"""[Q+1] tokens: 1/8 (a decay of 5.5 nats a token) to 2M, a factor of 2 apart. What lies outside counts in the end bins."""
LONG_HALF_LIFE = 1000.0  # tokens
NEAR_FLOOR = 0.99  # of the lower bound: a decay this strong is at the floor
MOST_TOKENS = 4096  # of a row, evenly spaced, that means are taken over: decays [B,T,G,K] of 1M tokens would be 50 GB
PREFIX = "probe_"


class Probe:
    """Computes the figures of `model` every so many steps: `if probe.due(step): record = probe(state.params, ...)`.

    Call it on all processes alike: over a mesh it is a collective program. Its result is on the host, the same on each.

    Args:
      model: the model that trains, with its mesh if it has one.
      every: steps between two probes, >= 1; step 1 is probed too.
      rows: of the batch that are read, >= 1 (over a mesh they are padded to its batch axis).

    Raises:
      ValueError: every or rows below 1.
    """

    def __init__(self, model: HybridLM, *, every: int = 100, rows: int = 1):
        for name, value in (("every", every), ("rows", rows)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Probe {name} is {value!r}; it must be an integer of at least 1 (leave the probe out for none).")
        self.every, self.rows = every, rows

        def probe(params, router_state, *batch):
            return probe_values(model, params, router_state, *(x.reshape(-1, x.shape[-1])[:rows] for x in batch))

        replicated = None if model.parallel is None else NamedSharding(model.parallel.mesh, PartitionSpec())
        self._run = jax.jit(probe) if replicated is None else jax.jit(probe, out_shardings=replicated)

    def due(self, step: int) -> bool:
        return step == 1 or step % self.every == 0

    def __call__(self, params: Any, router_state: Any, tokens: Any, segment_ids: Any) -> dict[str, Any]:
        """tokens, segment_ids [B,T] or [M,B,T] int32, placed as for the train step -> `probe_values` of the first rows, on the host."""
        return jax.device_get(self._run(params, router_state, tokens, segment_ids))


def probe_values(model: HybridLM, params: Any, router_state: Any, tokens: jax.Array, segment_ids: jax.Array) -> dict[str, Any]:
    """The figures of one batch, pure. Means are over tokens that are not padding, at most 4,096 a row; float32.

    Returns (a model without such a layer lacks its entries):
      state_norm [N,G]: Frobenius norm of the recurrent state [K,V] after the last document, mean over the rows.
      half_life_histogram [N,Q]: share of the channels (G*K a layer) by the half-life of their mean decay, in tokens; see
        `HALF_LIFE_EDGES`. A channel's half-life is ln 2 over its mean -log decay.
      half_life_above_1k [N]: share of the channels with a half-life over 1,000 tokens.
      decay_at_floor [N]: share of (token, channel) within 1% of the lower bound (not for the unbounded gate).
      beta_mean [N]: mean write strength.
      mla_gate_mean [A]: mean output gate (not without one).
      depth_weights [R,S]: mean weight of each source. The last column is the running sum, or, for residual="full", sources are
        sub-layers' outputs. depth_entropy [R]: mean entropy of the weights in nats. Both not for residual="plain".
      hidden_rms [L]: root mean square of the running sum after each layer (residual="full": of the feed-forward's output).
      weight_rms: {group: root mean square of its parameters over all layers}.

    Raises:
      ValueError: as the model's.
    """
    if model.parallel is not None:
        tokens, padded = pad_to_mesh(tokens, segment_ids, model.parallel)
        segment_ids = segment_ids if padded is None else padded
    mask = (segment_ids != 0).astype(jnp.float32)
    variables = {"params": params, "router_state": router_state}
    with nn.intercept_methods(_interceptor(mask)):
        _, written = model.apply(variables, tokens, segment_ids, return_hidden=True, mutable=["intermediates"])
    return _by_layer(model.config, written["intermediates"]) | {"weight_rms": weight_rms(params)}


def probe_record(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """A line of probes.jsonl: 5 significant digits, NaN and infinities as text. About 20 kB for 93 layers of 96 heads."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: plain(inner) for name, inner in value.items()}
        if np.ndim(value):
            return [plain(inner) for inner in np.asarray(value).tolist()]
        number = float(value)
        return float(f"{number:.5g}") if math.isfinite(number) else str(number)

    return {"step": step, **plain(values)}


class _Means:
    """Means over the tokens that count. mask [B,T]: 1 at tokens that are not padding."""

    def __init__(self, mask: jax.Array):
        self._stride = -(-mask.shape[1] // MOST_TOKENS)
        self.used = mask.sum(1) > 0  # [B] rows with any token
        self._mask = self.sample(mask)

    def sample(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Every so many entries along the axis of time."""
        return x if self._stride == 1 else jax.lax.slice_in_dim(x, 0, x.shape[axis], self._stride, axis)

    def __call__(self, x: jax.Array, *, keep: int = 0) -> jax.Array:
        """x [B,t,...] of sampled tokens -> float32 mean over all axes but the last `keep`."""
        weights = self._mask.reshape(*self._mask.shape, *(1,) * (x.ndim - 2))
        x = jnp.where(weights > 0, x.astype(jnp.float32), 0)  # padding may hold NaN
        reduced = x.shape[2 : x.ndim - keep]
        return x.sum(tuple(range(x.ndim - keep))) / jnp.maximum(self._mask.sum() * math.prod(reduced), 1)


def _interceptor(mask: jax.Array):
    means = _Means(mask)

    def read(module, call, args, kwargs) -> tuple[Any, dict[str, jax.Array]]:
        if isinstance(module, KimiDeltaAttention):
            return _read_kda(module, call, args, means)
        out = call(*args, **kwargs)
        if isinstance(module, GatedMLA):
            return out, _read_mla(module, means.sample(args[0]), means)
        if isinstance(module, AttentionResidual):
            return out, _read_depth(module, means, *args, **kwargs)
        if isinstance(module, DecoderLayer | SourcesLayer):
            stream = means.sample(out[0] if isinstance(module, DecoderLayer) else out[1])
            return out, {"hidden_rms": jnp.sqrt(means(jnp.square(stream.astype(jnp.float32))))}
        return out, {}

    def intercept(call, args, kwargs, context):
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        out, values = read(context.module, call, args, kwargs)
        for name, value in values.items():
            context.module.sow("intermediates", PREFIX + name, value, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        return out

    return intercept


def _parameter(module: nn.Module, name: str) -> Any:
    return module.get_variable("params", name)


def _read_kda(module: KimiDeltaAttention, call, args, means: _Means) -> tuple[jax.Array, dict[str, jax.Array]]:
    x, segment_ids = args
    weights = KDAWeights(**{name: _parameter(module, name) for name in KDAWeights._fields})
    if module.parallel is None:
        y, state = call(x, segment_ids, return_state=True)
    else:  # the sharded layer gives no state
        y = call(x, segment_ids)
        options: Any = dict(lower_bound=module.config.lower_bound, norm_eps=module.norm_eps, implementation="xla")
        _, state = kda_layer(x, weights, segment_ids=segment_ids, return_state=True, **options)
    assert state is not None
    norms = jnp.sqrt(jnp.sum(jnp.square(state.recurrent.astype(jnp.float32)), axis=(-2, -1)))  # [B,G]
    x, used = means.sample(x), means.used[:, None]
    return y, {
        "state_norm": jnp.where(used, norms, 0).sum(0) / jnp.maximum(used.sum(), 1),
        "beta_mean": means(jax.nn.sigmoid((x @ weights.beta_proj.astype(x.dtype)).astype(jnp.float32))),
        **_decays(x, weights, module.config.lower_bound, means),
    }


def _decays(x: jax.Array, weights: KDAWeights, lower_bound: float | None, means: _Means) -> dict[str, jax.Array]:
    raw = jnp.einsum("btr,rgk->btgk", x @ weights.decay_down.astype(x.dtype), weights.decay_up.astype(x.dtype))
    g = kda_gate(raw, weights.A_log, weights.dt_bias, lower_bound=lower_bound)
    half_life = math.log(2) / jnp.maximum(-means(g, keep=2), 1e-30).reshape(-1)  # [G*K] tokens
    bins = jnp.searchsorted(jnp.asarray(HALF_LIFE_EDGES[1:-1], jnp.float32), half_life, side="right")
    values = {
        "half_life_histogram": jnp.mean(jax.nn.one_hot(bins, len(HALF_LIFE_EDGES) - 1), axis=0),
        "half_life_above_1k": jnp.mean(half_life > LONG_HALF_LIFE, dtype=jnp.float32),
    }
    if lower_bound is not None:
        values["decay_at_floor"] = means((g <= NEAR_FLOOR * lower_bound).astype(jnp.float32))
    return values


def _read_mla(module: GatedMLA, x: jax.Array, means: _Means) -> dict[str, jax.Array]:
    if not module.config.gate:
        return {}
    gate = jnp.einsum("btd,dhv->bthv", x, _parameter(module, "gate").astype(x.dtype))
    return {"mla_gate_mean": means(jax.nn.sigmoid(gate.astype(jnp.float32)))}


def _read_depth(module: AttentionResidual, means: _Means, sources, prefix=None, **valid) -> dict[str, jax.Array]:
    norm_weight, query = _parameter(module, "norm_weight"), _parameter(module, "query")
    prefix = None if prefix is None else means.sample(prefix)
    weights = depth_weights(means.sample(sources, 2), prefix, norm_weight, query, eps=module.eps, **valid)
    by_token = jnp.moveaxis(weights, 0, -1)  # [B,t,S]
    entropy = -jnp.sum(jax.scipy.special.xlogy(by_token, by_token), axis=-1)
    return {"depth_weights": means(by_token, keep=1), "depth_entropy": means(entropy)}


def depth_weights(sources, prefix, norm_weight, query, *, count=None, prefix_valid=None, eps: float) -> jax.Array:
    """The softmax weights of `moejax.ops.depth_attention`: sources [S,B,T,D], prefix [B,T,D] or None -> [S (+1),B,T], which sum to 1.

    A source that is not valid has weight 0 and is not read.
    """
    dtype = accumulation_dtype(sources)
    folded = norm_weight.astype(dtype) * query.astype(dtype)

    def logits(v: jax.Array, valid: jax.Array) -> jax.Array:
        v = jnp.where(valid[:, None, None, None], v, 0).astype(dtype)
        logit = jnp.sum(v * folded, axis=-1) * jax.lax.rsqrt(jnp.mean(v * v, axis=-1) + eps)
        return jnp.where(valid[:, None, None], logit, -jnp.inf)

    stored = sources.shape[0]
    parts = [logits(sources, jnp.arange(stored) < (stored if count is None else count))]
    if prefix is not None:
        parts.append(logits(prefix[None], jnp.asarray(True if prefix_valid is None else prefix_valid, bool).reshape(1)))
    return jax.nn.softmax(jnp.concatenate(parts), axis=0)


def _by_layer(config: ModelConfig, written: Mapping[str, Any]) -> dict[str, jax.Array]:
    """What the layers sowed, first layer to last."""
    places: dict[str, list[jax.Array]] = {}

    def take(node: Mapping[str, Any], index: tuple[int, ...]) -> None:
        for name, value in node.items():
            if name.startswith(PREFIX):
                places.setdefault(name.removeprefix(PREFIX), []).append(value[index])

    for layer in range(config.layers):
        index: tuple[int, ...] = ()
        if config.residual == "full":
            node = written["stack"][f"layer_{layer}"]
        else:
            location = layer_locations(config)[layer]
            node, index = written["stack"], location.index
            for part in location.path:
                node = node[part]
        for part in (node.get("mixer_residual"), node.get("ffn_residual"), node["sub"].get("mixer"), node):
            take(part or {}, index)
    take(written.get("output_residual", {}), ())
    return {name: jnp.stack(_same_length(values)) for name, values in places.items()}


def _same_length(values: list[jax.Array]) -> list[jax.Array]:
    """Zeros behind the shorter ones: with residual="full" every read has one source more than the one before."""
    if values[0].ndim != 1:
        return values
    longest = max(value.shape[0] for value in values)
    return [jnp.pad(value, (0, longest - value.shape[0])) for value in values]


GROUPS = (
    ("depth_query", r".*_residual/query"),
    ("norms", r".*norm(/weight|_weight)?"),
    ("kda_conv", r".*/mixer/[qkv]_conv"),
    ("kda_gates", r".*/mixer/(A_log|dt_bias|decay_down|decay_up|beta_proj|out_gate.*)"),
    ("mla_gate", r".*/mixer/gate"),
    ("mixers", r".*/mixer/.*"),
    ("router", r".*/ffn/router"),
    ("experts", r".*/ffn/expert_.*"),
    ("shared_expert", r".*/ffn/shared_.*"),
    ("latent", r".*/ffn/latent_.*"),
    ("dense", r".*/ffn/.*"),
)
"""Groups of parameters by the pattern of their path, the first that fits; others (embedding, head) by their own name."""


def weight_rms(params: Any) -> dict[str, jax.Array]:
    """{group: root mean square over all its parameters, float32}. Packed codes (integers) are left out."""
    sums: dict[str, list[jax.Array]] = {}
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            name = "/".join(str(getattr(part, "key", part)) for part in path)
            group = next((group for group, pattern in GROUPS if re.fullmatch(pattern, name)), name)
            sums.setdefault(group, []).append(jnp.sum(jnp.square(leaf.astype(jnp.float32))))
            sizes[group] = sizes.get(group, 0) + leaf.size
    return {group: jnp.sqrt(sum(parts) / sizes[group]) for group, parts in sorted(sums.items())}
