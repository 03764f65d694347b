"""The layers of a model on a mesh: each runs inside one `jax.shard_map`, on local tokens, heads and experts.

Between layers the tokens [B,T,...] are sharded over the mesh axes of "batch" and "time", and nothing else is. What crosses
devices is explicit here: the convolution halo and the state summaries of KDA, the latent of MLA, the experts' rows, one sum
over heads and one over the routing counts. Weights that fsdp shards are gathered at the border by XLA.

Shapes: B batch, T tokens, D model width, E experts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..config import ModelConfig
from ..kernels.varying import match_varying
from ..ops.balance_measures import aux_loss
from ..ops.balance_rules import PER_TOKEN, router_statistics
from ..ops.experts import LatentMoEOutput, LatentMoEWeights, PackedExperts
from ..ops.kda_layer import KDAWeights, kda_layer
from ..ops.mla import MLAWeights, gated_mla
from ..ops.rotary import positions_from_segments
from .axes import PARAMETER_AXES, AxisRules, divided_sizes, partition_spec
from .exchange import check_transport
from .expert_parallel import expert_parallel_latent_moe
from .sequence_kda_layer import sequence_kda_layer
from .sequence_mla import FORMS, sequence_gated_mla, sequence_positions


@dataclasses.dataclass(frozen=True)
class ModelParallel:
    """How a model is spread over a mesh: `HybridLM(config, parallel=ModelParallel(mesh))`."""

    mesh: Mesh
    rules: AxisRules = dataclasses.field(default_factory=AxisRules)
    attention: Literal["gather", "ring"] = "gather"
    """MLA over the sequence axis: all latents on every device, or a ring that holds one shard's at a time."""
    transport: str | None = None
    """Of experts' rows: "ragged", "padded", "gather", or None for what the platform has (see expert_parallel_mlp)."""

    def __post_init__(self) -> None:
        if self.attention not in FORMS:
            raise ValueError(f"ModelParallel.attention is {self.attention!r}; allowed: {', '.join(FORMS)}.")
        check_transport(self.transport)

    def axes(self, logical: str) -> tuple[str, ...]:
        """Mesh axes that shard the logical axis, those of one device too."""
        return self.rules.mesh_axes(logical, self.mesh)

    def size(self, logical: str) -> int:
        """Parts that the logical axis is cut into."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(logical))

    def spec(self, *logical: str | None) -> PartitionSpec:
        return partition_spec(logical, self.mesh, self.rules)

    def constrain(self, x: jax.Array, *logical: str | None) -> jax.Array:
        """Pin the sharding of an array inside a jitted program."""
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, self.spec(*logical)))

    def check(self, config: ModelConfig) -> None:
        """Raise ValueError naming the sizes of `config` that this mesh does not divide."""
        sizes = divided_sizes(config).items()
        lines = [
            f"  {name} is {size}, the mesh cuts {axis} into {self.size(axis)}" for name, (size, axis) in sizes if size % self.size(axis)
        ]
        if lines:
            raise ValueError("the mesh does not divide the model; change one of them:\n" + "\n".join(lines))


def weight_specs(weights: Any, names: dict[str, str], parallel: ModelParallel) -> Any:
    """The PartitionSpecs that a layer's weights have inside its shard_map: their own, with the fsdp axis gathered."""

    def spec(name: str) -> PartitionSpec:
        return parallel.spec(*(None if axis == "embed" else axis for axis in PARAMETER_AXES[name]))

    def of(field: str, value: Any) -> Any:
        name = names.get(field, field)
        if isinstance(value, PackedExperts):
            return PackedExperts(spec(f"{name}_codes"), spec(f"{name}_scales"))
        return None if value is None else spec(name)

    return type(weights)(*(of(field, value) for field, value in zip(weights._fields, weights, strict=True)))


def _over_tokens(parallel: ModelParallel, call, x, weights, specs, segment_ids, out_specs=None):
    """call(x, weights, segment_ids) on local arrays."""
    tokens = parallel.spec("batch", "time", None)

    def local(x, weights, segment_ids):
        # Before any cast to x's dtype: so gradients are summed over the token axes in the weights' own dtype, not in bfloat16.
        return call(x, jax.tree.map(lambda w: match_varying(w, x), weights), segment_ids)

    mapped = jax.shard_map(
        local,
        mesh=parallel.mesh,
        in_specs=(tokens, specs, None if segment_ids is None else parallel.spec("batch", "time")),
        out_specs=tokens if out_specs is None else out_specs,
    )
    return mapped(x, weights, segment_ids)


def _one(axes: tuple[str, ...]) -> Any:
    """The name alone where there is one: not every collective takes a tuple."""
    return axes[0] if len(axes) == 1 else axes


def _sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.psum(x, axes) if axes else x


def sharded_kda_layer(parallel: ModelParallel, x: jax.Array, weights: KDAWeights, *, segment_ids=None, **options) -> jax.Array:
    """`moejax.ops.kda_layer` over the mesh: x [B,T,D] -> [B,T,D]. options: lower_bound, norm_eps, implementation."""
    heads, time = parallel.axes("heads"), parallel.axes("time")

    def call(x, weights, segment_ids):
        if parallel.size("time") > 1:
            y, _ = sequence_kda_layer(x, weights, axis=_one(time), segment_ids=segment_ids, **options)
        else:
            y, _ = kda_layer(x, weights, segment_ids=segment_ids, **options)
        return _sum_over(y, heads)

    return _over_tokens(parallel, call, x, weights, weight_specs(weights, {}, parallel), segment_ids)


def sharded_gated_mla(
    parallel: ModelParallel, x: jax.Array, weights: MLAWeights, *, segment_ids=None, rotary: dict[str, float] | None = None
) -> jax.Array:
    """`moejax.ops.gated_mla` over the mesh: x [B,T,D] -> [B,T,D]. rotary: its rotary_base and rotary_scale, or None."""
    heads, time = parallel.axes("heads"), parallel.axes("time")

    def call(x, weights, segment_ids):
        options: dict[str, Any] = dict(rotary or {})
        if rotary is not None:
            ids = jnp.ones(x.shape[:2], jnp.int32) if segment_ids is None else segment_ids
            options["positions"] = sequence_positions(ids, axis=_one(time)) if time else positions_from_segments(ids)
        if parallel.size("time") > 1:
            y = sequence_gated_mla(x, weights, axis=_one(time), segment_ids=segment_ids, form=parallel.attention, **options)
        else:
            y = gated_mla(x, weights, segment_ids=segment_ids, **options)
        return _sum_over(y, heads)

    return _over_tokens(parallel, call, x, weights, weight_specs(weights, {}, parallel), segment_ids)


MOE_NAMES = {
    "down": "latent_down",
    "norm": "latent_norm",
    "up": "latent_up",
    "w_gate": "expert_gate",
    "w_up": "expert_up",
    "w_down": "expert_down",
}
"""Parameter names of the fields of LatentMoEWeights that are called otherwise."""


def sharded_latent_moe(
    parallel: ModelParallel,
    x: jax.Array,
    bias: jax.Array,
    weights: LatentMoEWeights,
    k: int,
    *,
    segment_ids: jax.Array | None,
    rule: str | None,
    bins: int,
    **options: Any,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`moejax.ops.latent_moe` over the mesh, with the routing statistics of all tokens.

    rule: balancing rule whose statistics are wanted (see `router_statistics`), or None for none; sums are taken once over every
    axis that shards tokens. options: scaling, renormalize, activation, eps, implementation.
    Returns (y [B,T,D], statistics: {} or those of router_statistics, with "aux_loss" under that rule).
    """
    experts, width = parallel.axes("experts"), parallel.axes("width")
    if not experts:
        raise ValueError(f"the mesh has axes {tuple(parallel.mesh.shape)} and none for experts; give it one, of size 1 if need be.")
    tokens = (*parallel.axes("batch"), *parallel.axes("time"))

    def call(x, inputs, segment_ids):
        bias, weights = inputs
        mask = None if segment_ids is None else segment_ids != 0
        shared = {"axis": _one(experts), "tensor_axis": _one(width) if width else None, "transport": parallel.transport}
        out: Any = expert_parallel_latent_moe(x, bias, weights, k, mask=mask, **shared, **options)
        return out.y, {} if rule is None else _statistics(rule, out, bias, k, mask, bins, tokens)

    statistics = {} if rule is None else _statistics_specs(rule, tokens)
    specs = (PartitionSpec(), weight_specs(weights, MOE_NAMES, parallel))
    out_specs = (parallel.spec("batch", "time", None), statistics)
    return _over_tokens(parallel, call, x, (bias, weights), specs, segment_ids, out_specs)


def _statistics(rule: str, out: LatentMoEOutput, bias, k: int, mask, bins: int, tokens: tuple[str, ...]) -> dict[str, jax.Array]:
    """Of all tokens of the mesh: sums are added over its token axes; one row a token stays where it is."""
    mask = None if mask is None else mask.reshape(-1)
    local = router_statistics(rule, out.routing, out.logits, bias, k, mask=mask, bins=bins)
    statistics = {name: value if name in PER_TOKEN else _sum_over(value, tokens) for name, value in local.items()}
    if rule == "aux_loss":
        statistics["aux_loss"] = aux_loss(out.logits, out.routing.experts, mask=mask, axes=tokens)
    return statistics


def _statistics_specs(rule: str, tokens: tuple[str, ...]) -> dict[str, PartitionSpec]:
    names = {"quantile": ["histogram"], "quantile_exact": ["scores", "mask"], "median_band": ["probability"], "aux_loss": ["aux_loss"]}
    return {
        name: PartitionSpec(tokens) if name in PER_TOKEN else PartitionSpec() for name in ["load", "tokens", *names.get(rule, [])]
    }
