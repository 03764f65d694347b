"""Per-head Muon for the matrices of a model, AdamW for the rest (Kimi K3 report section 2.5, Kimi K2 arXiv 2507.20534).

W -= rate (0.2 sqrt(max(M,K)) NS(momentum) + decay W), with M x K the size of the matrix that is orthogonalised: of a head's
block, or of one expert. The report does not say whether the block or the whole projection counts; the block keeps the
update's RMS the same for every matrix, which is what the factor is for (arXiv 2502.16982).

The arithmetic is that of `optax.contrib.muon` with the dimension numbers of `muon_layout`; only its Newton-Schulz
iteration, which optax does not let one replace, is that of `newton_schulz`, which a mesh can share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..parallel.axes import parameter_shardings
from ..parallel.layers import ModelParallel
from .muon_layout import Matrices, dimension_numbers, labels
from .newton_schulz import orthogonalize
from .schedules import make_schedule

if TYPE_CHECKING:
    from .optimizers import OptimizerConfig


class MuonState(NamedTuple):
    """What Muon carries of its own parameters."""

    count: jax.Array
    """[] int32: updates."""
    momentum: Any
    """Running means of the gradients, in the dtype of `updates` (float32 at least)."""


def scale_by_muon(config: OptimizerConfig, parallel: ModelParallel | None = None) -> optax.GradientTransformation:
    """Gradients of matrices -> 0.2 sqrt(max(M,K)) NS(momentum); every leaf must have a matrix in MUON_LAYOUT.

    Reads momentum, nesterov, newton_schulz_steps, newton_schulz_dtype and muon_scale of the configuration. parallel: its
    mesh and rules, which say how the parameters are sharded (moejax.parallel.parameter_shardings).
    """

    def init(params):
        return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates, state, params=None):
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        momentum = optax.tree.update_moment(updates, state.momentum, config.momentum, 1)
        direction = optax.tree.bias_correction(momentum, config.momentum, count)
        if config.nesterov:  # as optax does: the next step's momentum, were the gradient to stay
            ahead = optax.tree.bias_correction(momentum, config.momentum, optax.safe_increment(count))
            now = optax.tree.bias_correction(updates, config.momentum, count)
            direction = jax.tree.map(lambda m, g: config.momentum * m + (1 - config.momentum) * g, ahead, now)
        return _orthogonal(direction, config, parallel), MuonState(count, momentum)

    return optax.GradientTransformation(init, update)


def _orthogonal(tree: Any, config: OptimizerConfig, parallel: ModelParallel | None) -> Any:
    """NS of every matrix of the tree, times the scale of its size."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves, layouts = [leaf for _, leaf in paths], []
    for path, leaf in paths:
        matrix = dimension_numbers(path, leaf.shape)
        if matrix is None:
            raise ValueError(f"{jax.tree_util.keystr(path)} is AdamW's in MUON_LAYOUT; Muon takes matrices only.")
        layouts.append(Matrices.of(matrix, leaf.ndim))
    specs = None
    if parallel is not None:
        specs = [sharding.spec for sharding in jax.tree.leaves(parameter_shardings(tree, parallel.mesh, parallel.rules))]
    matmul_dtype = None if config.newton_schulz_dtype == "float32" else config.newton_schulz_dtype
    with jax.named_scope("newton_schulz"):
        done = orthogonalize(
            leaves,
            layouts,
            specs,
            None if parallel is None else parallel.mesh,
            steps=config.newton_schulz_steps,
            matmul_dtype=matmul_dtype,
        )
    scaled = [x * (config.muon_scale * max(layout.sizes(x.shape)[1:]) ** 0.5) for x, layout in zip(done, layouts, strict=True)]
    return jax.tree.unflatten(treedef, scaled)


def partitioned_muon(
    config: OptimizerConfig, adamw: optax.GradientTransformation, decay_mask: Any, parallel: ModelParallel | None = None
) -> optax.GradientTransformation:
    """Muon with decoupled weight decay for the matrices of MUON_LAYOUT, `adamw` for its other parameters."""
    muon = optax.chain(
        scale_by_muon(config, parallel),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(make_schedule(config)),
    )
    return optax.partition({"muon": muon, "adamw": adamw}, labels)
