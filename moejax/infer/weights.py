"""The parameters of a model as inference reads them: one entry a layer, matrices in the compute dtype.

Training stacks the layers that repeat, for loops that compile once. A decoding step would copy every layer's slice of such a stack
before its product, three times the bytes of a weight, so the stacks are taken apart once, here.

Shapes: D model width, V vocabulary, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..config import DTYPES, ModelConfig
from ..modules.model import HybridLM, compute_dtype
from ..modules.plan import layer_locations, layer_specs
from ..ops.experts import LatentMoEWeights, PackedExperts
from ..ops.kda_layer import KDAWeights
from ..ops.mla import MLAWeights
from ..ops.mxfp4 import mxfp4_fake_quant
from ..parallel.layers import MOE_NAMES, ModelParallel
from ..shapes import KDA_FLOAT32

# Of a mixer or a feed-forward, kept as stored whatever the compute dtype: norms, gates and the router (its product is float32).
WIDE = (*KDA_FLOAT32, "q_norm", "kv_norm", "latent_norm", "router")


class DepthQuery(NamedTuple):
    """One pseudo-query over depth."""

    norm_weight: Any  # [D]
    query: Any  # [D]


class DenseWeights(NamedTuple):
    """A dense feed-forward."""

    gate: Any  # [D,F]
    up: Any  # [D,F]
    down: Any  # [F,D]


class LayerWeights(NamedTuple):
    """One decoder layer."""

    mixer_norm: Any  # [D]
    mixer: KDAWeights | MLAWeights
    ffn_norm: Any  # [D]
    ffn: LatentMoEWeights | DenseWeights
    bias: Any  # [E] float32 the frozen selection bias, or None
    mixer_query: DepthQuery | None  # None: plain residual
    ffn_query: DepthQuery | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["embedding", "layers", "output_query", "final_norm", "head"],
    meta_fields=["config", "dtype", "parallel"],
)
@dataclasses.dataclass(frozen=True)
class Weights:
    """A model made ready by `prepare`: a pytree that jitted functions take as an argument."""

    embedding: Any  # [V,D]
    layers: tuple[LayerWeights, ...]
    output_query: DepthQuery | None
    final_norm: Any  # [D]
    head: Any  # [D,V]
    config: ModelConfig
    dtype: str
    """Dtype of activations."""
    parallel: ModelParallel | None
    """The mesh, its sequence axis unused: every part of a sequence needs the state before it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all weights but the embedding table, of which a step reads one row a token."""
        leaves = jax.tree.leaves((self.layers, self.output_query, self.final_norm, self.head))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def prepare(model: HybridLM, variables: Mapping[str, Any], *, dtype: str | None = None) -> Weights:
    """Take the parameters of a model apart for inference: one copy of them, in the compute dtype.

    Args:
      model: its configuration, and its mesh (`parallel`) if it has one.
      variables: {"params", "router_state"} as `HybridLM(config).init` or `moejax.hub.load` gives them; the selection bias is frozen.
      dtype: of activations and matrices; None: the configuration's on this backend. Norms, gates, convolutions and router stay as
        they are stored. Experts under "mxfp4_qat" are rounded once; packed ones ("mxfp4") stay packed.

    Raises:
      ValueError: a collection is missing, or parameters of another configuration.
    """
    config = model.config
    dtype = checked_dtype("dtype", dtype or compute_dtype(config))
    _check_variables(variables, config)
    parallel = None
    if model.parallel is not None:
        model.parallel.check(config)
        parallel = dataclasses.replace(model.parallel, rules=dataclasses.replace(model.parallel.rules, time=None))
    parts: Any = _take_apart(variables["params"], variables.get("router_state", {}), config=config, dtype=dtype)
    return Weights(*parts, config=config, dtype=dtype, parallel=parallel)


def checked_dtype(name: str, dtype: Any) -> str:
    """The name of a dtype that inference takes. ValueError: another one, or float64 without jax_enable_x64."""
    try:
        found = str(jnp.dtype(dtype))
    except TypeError:
        found = str(dtype)
    if found not in DTYPES or (found == "float64" and not jax.config.jax_enable_x64):  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"{name} is {found}; allowed: {', '.join(DTYPES)} (float64 with jax.enable_x64 only).")
    return found


@lru_cache(maxsize=32)
def _shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    tree = jax.eval_shape(HybridLM(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return _named_shapes(tree)


def _named_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _check_variables(variables: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise ValueError unless the collections are those of the configuration, name by name and shape by shape."""
    for name in ("params", "router_state"):
        if name not in variables and (name == "params" or config.moe_layers):
            raise ValueError(f"variables has {', '.join(variables) or 'nothing'} and no {name!r}; give {{'params', 'router_state'}}.")
    given = _named_shapes({name: variables[name] for name in ("params", "router_state") if name in variables})
    needed = _shapes_of(config)
    wrong = [name for name in sorted({*given, *needed}) if given.get(name) != needed.get(name)]
    if wrong:
        first = f"{wrong[0]} is {given.get(wrong[0], 'missing')} and must be {needed.get(wrong[0], 'absent')}"
        raise ValueError(f"the parameters were made for another configuration: {first} ({len(wrong)} such differences).")


@partial(jax.jit, static_argnames=("config", "dtype"))
def _take_apart(params, router_state, *, config: ModelConfig, dtype: str):
    cast = partial(_cast, dtype=jnp.dtype(dtype))
    layers = []
    for spec, place in zip(layer_specs(config), _places(config), strict=True):
        own = place(params)
        sub = own["sub"]
        bias = None if spec.dense else place(router_state)["sub"]["ffn"]["bias"]
        mixer = {name: cast(name, value) for name, value in sub["mixer"].items()}
        ffn = {name: cast(name, value) for name, value in _rounded_experts(sub["ffn"], config).items()}
        kind: Any = KDAWeights if spec.mixer == "K" else MLAWeights
        layers.append(
            LayerWeights(
                mixer_norm=sub["mixer_norm"]["weight"],
                mixer=kind(**{field: mixer.get(field) for field in kind._fields}),
                ffn_norm=sub["ffn_norm"]["weight"],
                ffn=_dense(ffn) if spec.dense else _experts(ffn, config),
                bias=bias,
                mixer_query=_query(own, "mixer_residual"),
                ffn_query=_query(own, "ffn_residual"),
            )
        )
    head, embedding = cast("head", params["head"]), cast("embedding", params["embedding"])
    return embedding, tuple(layers), _query(params, "output_residual"), params["final_norm"]["weight"], head


def _cast(name: str, value, *, dtype):
    return value if name in WIDE or not jnp.issubdtype(value.dtype, jnp.floating) else value.astype(dtype)


def _places(config: ModelConfig) -> list[Callable[[Any], Any]]:
    """One function a layer, first to last: its part of a collection, out of the stacks."""
    if config.residual == "full":
        return [lambda tree, name=f"layer_{index}": tree["stack"][name] for index in range(config.layers)]

    def out_of_stack(tree, location):
        group, run, layer = location.path
        return jax.tree.map(lambda leaf: leaf[location.index], tree["stack"][group][run][layer])

    return [partial(out_of_stack, location=location) for location in layer_locations(config)]


def _query(tree, name: str) -> DepthQuery | None:
    return DepthQuery(tree[name]["norm_weight"], tree[name]["query"]) if name in tree else None


def _dense(ffn) -> DenseWeights:
    return DenseWeights(ffn["gate_proj"], ffn["up_proj"], ffn["down_proj"])


def _rounded_experts(ffn, config: ModelConfig):
    """Under "mxfp4_qat" the experts' MXFP4 rounding, taken before any cast as in training."""
    if config.moe.expert_weights != "mxfp4_qat":
        return ffn
    return {name: mxfp4_fake_quant(value, axis=-2) if name.startswith("expert_") else value for name, value in ffn.items()}


def _experts(ffn, config: ModelConfig) -> LatentMoEWeights:
    def weight(field: str):
        name = MOE_NAMES.get(field, field)
        if config.moe.expert_weights == "mxfp4" and field in ("w_gate", "w_up", "w_down"):
            return PackedExperts(ffn[f"{name}_codes"], ffn[f"{name}_scales"])
        return ffn.get(name)

    return LatentMoEWeights(**{field: weight(field) for field in LatentMoEWeights._fields})
