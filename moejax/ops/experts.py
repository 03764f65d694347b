"""Routed experts and the whole LatentMoE layer (Kimi K3 report section 2.3, eq. 11-13, 18-19).

Shapes: N tokens, k experts a token, E experts, D model width, L width the experts work in (the latent), F expert hidden
width, A = N * k assignments; a "row" is one assignment, rows are sorted by expert. "in" and "out" are the input and output
widths of one expert matrix.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.kernels.common import accumulation_dtype, require_float, require_rank
from moejax.kernels.grouped_matmul import blocks
from moejax.kernels.grouped_matmul.api import require_implementation
from moejax.kernels.varying import match_varying
from moejax.ops.activations import situ_glu
from moejax.ops.mxfp4 import GROUP, mxfp4_decode
from moejax.ops.norms import rms_norm
from moejax.ops.routing import Routing, route


class PackedExperts(NamedTuple):
    """One matrix [in,out] an expert in MXFP4, as the published files hold it: a row an output, columns are inputs."""

    codes: Any  # [E,out,in/2] uint8
    scales: Any  # [E,out,in/32] uint8


def expert_mlp(x, experts, weights, w_gate, w_up, w_down, *, activation=situ_glu, mask=None, implementation=None) -> jax.Array:
    """Weighted sum over each token's experts of `activation(x w_gate[e], x w_up[e]) w_down[e]`.

    Every distribution is exact: no token is dropped when all choose one expert, and an expert without tokens gets
    gradient 0. Each expert's output is rounded to x's dtype, then weighted and summed over k in float32, then rounded.

    Args:
      x: [N,L].
      experts: [N,k] int32 in 0..E-1; weights: [N,k] float32, their factors.
      w_gate, w_up: [E,L,F]; w_down: [E,F,L]; in x's dtype. Or all three PackedExperts: an expert is decoded to x's dtype
        where a block of its rows is multiplied, so that the stack never exists decoded; "xla" gives the bits that decoded
        weights give. Packed weights get no gradient, x and `weights` do.
      activation: a function of (gate, up), both [rows,F], that works on each row by itself. It must not close over
        traced arrays (it is a static argument of the gradient rule).
      mask: [N] bool or None; False tokens (padding) are not routed, never read and give 0.
      implementation: "reference" (every expert on every token), "xla" (sorted blocks), or None for "xla".

    Returns:
      [N,L] in x's dtype.

    Raises:
      ValueError: shapes or dtypes that do not fit, or an implementation that does not exist here.
    """
    check_expert_mlp(x, experts, weights, w_gate, w_up, w_down, mask)
    require_implementation(implementation)
    arguments = (x, experts, weights, w_gate, w_up, w_down, mask)
    arrays = jax.tree.leaves(arguments)
    # inside shard_map: gradients of what is replicated get summed
    arguments = jax.tree.map(lambda a: match_varying(a, *arrays), arguments)
    run: Any = _reference if implementation == "reference" else _blocked
    return run(*arguments, activation)


def check_expert_mlp(x, experts, weights, w_gate, w_up, w_down, mask):
    require_rank(2, "[N,L] or [N,k]", x=x, experts=experts, weights=weights)
    require_float(x=x, weights=weights)
    gate, up, down = _check_matrices(x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    E, L, F = gate
    if x.shape[1] != L or up != (E, L, F) or down != (E, F, L) or 0 in (*x.shape, *gate):
        raise ValueError(
            f"x {x.shape}, w_gate {gate}, w_up {up}, w_down {down}: they must be [N,L], [E,L,F], [E,L,F], [E,F,L] with no empty axis."
        )
    if experts.shape != weights.shape or experts.shape[0] != x.shape[0] or experts.shape[1] < 1:
        raise ValueError(f"experts {experts.shape} and weights {weights.shape} must both be [N,k] with N = {x.shape[0]}.")
    if experts.dtype != jnp.int32:
        raise ValueError(f"experts has dtype {experts.dtype}; it must be int32.")
    if mask is not None and (mask.shape != x.shape[:1] or mask.dtype != jnp.bool_):
        raise ValueError(f"mask has shape {mask.shape} and dtype {mask.dtype}; it must be bool of shape [{x.shape[0]}].")


def _check_matrices(x, **matrices) -> list[tuple[int, int, int]]:
    """-> the shapes [E,in,out] of the three matrices."""
    packed = [isinstance(w, PackedExperts) for w in matrices.values()]
    if all(packed):
        return [_check_packed(name, w) for name, w in matrices.items()]
    if any(packed):
        kinds = ", ".join(f"{name} {'packed' if p else 'not'}" for name, p in zip(matrices, packed, strict=True))
        raise ValueError(f"{kinds}: w_gate, w_up and w_down are PackedExperts together or not at all.")
    require_rank(3, "[E,L,F] or [E,F,L]", **matrices)
    require_float(**matrices)
    if any(w.dtype != x.dtype for w in matrices.values()):
        dtypes = ", ".join(f"{name} {w.dtype}" for name, w in matrices.items())
        raise ValueError(f"x {x.dtype}, {dtypes}: use one dtype.")
    return [w.shape for w in matrices.values()]


def _check_packed(name: str, w: PackedExperts) -> tuple[int, int, int]:
    codes, scales = w
    shapes = f"{name}.codes is {codes.dtype}{list(codes.shape)} and {name}.scales {scales.dtype}{list(scales.shape)}"
    if codes.dtype != jnp.uint8 or scales.dtype != jnp.uint8 or codes.ndim != 3 or scales.ndim != 3:
        raise ValueError(f"{shapes}; they must be uint8[E,out,in/2] and uint8[E,out,in/{GROUP}].")
    (E, out, half), groups = codes.shape, scales.shape[2]
    if scales.shape[:2] != (E, out) or 2 * half != GROUP * groups:
        raise ValueError(f"{shapes}; they must be [E,out,in/2] and [E,out,in/{GROUP}] of one matrix.")
    return E, 2 * half, out


def _matrix(w, dtype):
    """One expert's weights (PackedExperts or an array) -> [in,out].

    The barrier keeps the decoding out of the product: fused, products of few rows round otherwise than decoded weights.
    """
    return jax.lax.optimization_barrier(mxfp4_decode(*w, dtype=dtype).T) if isinstance(w, PackedExperts) else w


def _block_matrix(w, plan, block, dtype):
    """The matrix [in,out] of a block's expert: of packed experts only that one is decoded."""
    return _matrix(jax.tree.map(lambda a: blocks.read_group(a, plan, block), w), dtype)


def _width(w_gate) -> int:
    return w_gate.codes.shape[1] if isinstance(w_gate, PackedExperts) else w_gate.shape[2]


def num_experts(w) -> int:
    return jax.tree.leaves(w)[0].shape[0]


def _reference(x, experts, weights, w_gate, w_up, w_down, mask, activation):
    """Every expert on every token, one after the other."""
    dtype = accumulation_dtype(x, weights)
    if mask is not None:
        x, weights = jnp.where(mask[:, None], x, 0), jnp.where(mask[:, None], weights, 0)

    def add(total, expert):
        index, gate, up, down = expert
        y = mlp(x, _matrix(gate, x.dtype), _matrix(up, x.dtype), _matrix(down, x.dtype), activation)
        chosen = experts == index
        factor = jnp.sum(jnp.where(chosen, weights.astype(dtype), 0), axis=1, keepdims=True)
        return total + jnp.where(chosen.any(1, keepdims=True), factor * y.astype(dtype), 0), None

    index = jnp.arange(num_experts(w_gate), dtype=experts.dtype)
    zero = match_varying(jnp.zeros(x.shape, dtype), x)
    if isinstance(w_gate, PackedExperts):
        add = jax.checkpoint(add)  # else the scan keeps every decoded matrix for its backward pass
    total, _ = jax.lax.scan(add, zero, (index, w_gate, w_up, w_down))
    if mask is not None:  # also keeps the gradient of masked outputs away
        total = jnp.where(mask[:, None], total, 0)
    return total.astype(x.dtype)


def mlp(x, w_gate, w_up, w_down, activation):
    """activation(x w_gate, x w_up) w_down, with any leading axes that matmul broadcasts."""
    hidden = activation(product(x, w_gate), product(x, w_up))
    return product(hidden, w_down)


def product(a, b):
    """a @ b, summed in the accumulation dtype and rounded to a's."""
    return jnp.matmul(a, b, preferred_element_type=accumulation_dtype(a, b)).astype(a.dtype)


class _Rows(NamedTuple):
    """Assignments sorted by expert; those of masked tokens come last."""

    order: Any  # [A] assignment of each row
    row: Any  # [N,k] row of each assignment
    sizes: Any  # [E] rows an expert


def sort_by_expert(experts, mask, groups) -> _Rows:
    """experts [N,k] in 0..groups-1, or groups for an assignment that comes last and is not counted."""
    flat = experts if mask is None else jnp.where(mask[:, None], experts, groups)
    flat = flat.reshape(-1)
    count = jnp.arange(flat.shape[0], dtype=jnp.int32)
    if (groups + 1) * flat.shape[0] < 2**31:  # expert and position in one key: 0.3 ms against 1.2 ms for 8192 on a CPU
        order = jnp.sort(flat * flat.shape[0] + count) % flat.shape[0]
    else:
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row = jnp.zeros_like(count).at[order].set(count, unique_indices=True)
    every = jnp.arange(groups, dtype=flat.dtype)
    # Unrolled: as a loop it is 52 launches for 4096 rows on a GPU, whatever the groups.
    stops = jnp.searchsorted(flat[order], every, side="right", method="scan_unrolled").astype(jnp.int32)
    sizes = jnp.diff(stops, prepend=jnp.zeros_like(stops[:1]))
    return _Rows(order, row.reshape(experts.shape), sizes)


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def _blocked(x, experts, weights, w_gate, w_up, w_down, mask, activation):
    return blocked_forward(x, experts, weights, w_gate, w_up, w_down, mask, activation)[0]


def blocked_forward(x, experts, weights, w_gate, w_up, w_down, mask, activation):
    """Gather tokens to rows, run all three products block by block, gather rows back to tokens."""
    dtype = accumulation_dtype(x, weights)
    rows = sort_by_expert(experts, mask, num_experts(w_gate))
    plan = blocks.plan_blocks(rows.sizes, rows.order.shape[0])
    x_rows = _token_rows(x, rows, plan)

    def body(block, carry):
        gates, ups, outs = carry
        x_block = blocks.read_rows(x_rows, plan, block)
        gate = product(x_block, _block_matrix(w_gate, plan, block, x.dtype))
        up = product(x_block, _block_matrix(w_up, plan, block, x.dtype))
        out = product(activation(gate, up), _block_matrix(w_down, plan, block, x.dtype))

        def write(into, value):
            return blocks.write_rows(into, value, plan, block)

        return write(gates, gate), write(ups, up), write(outs, out)

    hidden = jnp.zeros((x_rows.shape[0], _width(w_gate)), x.dtype)
    gates, ups, outs = blocks.for_each_block(plan, body, (hidden, hidden, jnp.zeros_like(x_rows)), x_rows)
    y = sum_rows(outs, rows, mask, weights.astype(dtype)).astype(x.dtype)
    return y, (x, experts, weights, w_gate, w_up, w_down, mask, rows, gates, ups, outs)


def _token_rows(values, rows, plan):
    """[N,...] of tokens -> [A+R,...] of rows (the padding rows repeat the last one and are not used)."""
    token = jnp.pad(rows.order // rows.row.shape[1], (0, plan.rows), mode="edge")
    return values[token]


def sum_rows(values, rows, mask, factors):
    """[A+R,L] of rows -> [N,L]: each token's rows times their factors [N,k], summed in their dtype, 0 where masked.

    One gather for each of the k columns: 0.09 ms against 0.28 ms for one gather of [N,k,L] at 2048 tokens, k 4, L 64.
    """
    total = jnp.zeros((rows.row.shape[0], values.shape[1]), factors.dtype)
    for column in range(rows.row.shape[1]):
        total = total + values[rows.row[:, column]].astype(factors.dtype) * factors[:, column, None]
    return total if mask is None else jnp.where(mask[:, None], total, 0)


def _blocked_backward(activation, saved, dy):
    x, _, weights, *matrices = saved[:6]
    dx, d_weight, d_matrices = blocked_gradients(saved, dy, activation)
    d_matrices = (None if d is None else d.astype(w.dtype) for d, w in zip(d_matrices, matrices, strict=True))
    return (dx.astype(x.dtype), None, d_weight.astype(weights.dtype), *d_matrices, None)


def blocked_gradients(saved, dy, activation):
    """What blocked_forward saved and dy [N,L] -> gradients of x, weights and the three matrices (None for packed ones).

    All are still in the accumulation dtype, so that a caller can add parts before they are rounded.
    """
    x, _, weights, w_gate, w_up, w_down, mask, rows, gates, ups, outs = saved
    dtype = accumulation_dtype(x, weights)
    plan = blocks.plan_blocks(rows.sizes, rows.order.shape[0])
    x_rows, dy_rows = _token_rows(x, rows, plan), _token_rows(dy, rows, plan)
    factor = jnp.pad(weights.reshape(-1)[rows.order], (0, plan.rows)).astype(dtype)[:, None]
    d_weight = jnp.sum(outs.astype(dtype) * dy_rows.astype(dtype), axis=-1)[rows.row]
    d_outs = (dy_rows.astype(dtype) * factor).astype(x.dtype)

    matrices = (w_gate, w_up, w_down)
    packed = isinstance(w_gate, PackedExperts)

    def body(block, carry):
        dx, d_matrices = carry
        own = blocks.own_rows(plan, block)

        def read(values):
            return jnp.where(own, blocks.read_rows(values, plan, block), 0)

        x_block, d_out = read(x_rows), read(d_outs)
        gate_w, up_w, down_w = (_block_matrix(w, plan, block, x.dtype).T for w in matrices)
        hidden, pull = jax.vjp(activation, read(gates), read(ups))
        d_gate, d_up = pull(product(d_out, down_w).astype(hidden.dtype))
        dx = blocks.write_rows(dx, _wide(d_gate, gate_w) + _wide(d_up, up_w), plan, block)
        if packed:
            return dx, d_matrices
        parts = (_wide(x_block.T, d_gate), _wide(x_block.T, d_up), _wide(hidden.T, d_out))
        added = (blocks.add_group(total, part, plan, block) for total, part in zip(d_matrices, parts, strict=True))
        return dx, tuple(added)

    zeros = () if packed else tuple(jnp.zeros(w.shape, accumulation_dtype(w)) for w in matrices)
    dx_rows, d_matrices = blocks.for_each_block(plan, body, (jnp.zeros_like(x_rows), zeros), x_rows)
    dx = sum_rows(dx_rows, rows, mask, jnp.ones(rows.row.shape, dtype))
    if mask is not None:
        d_weight = jnp.where(mask[:, None], d_weight, 0)
    return dx, d_weight, (None, None, None) if packed else d_matrices


def _wide(a, b):
    return jnp.matmul(a, b, preferred_element_type=accumulation_dtype(a, b))


_blocked.defvjp(blocked_forward, _blocked_backward)


class LatentMoEWeights(NamedTuple):
    """Weights of one layer. All but the router and packed experts are cast to the activations' dtype before use."""

    router: Any  # [D,E]
    down: Any  # [D,L] to the latent, or None: experts work on x (L = D)
    norm: Any  # [L] of the summed latent, or None
    up: Any  # [L,D] from the latent, or None with down
    w_gate: Any  # [E,L,F], or all three PackedExperts
    w_up: Any  # [E,L,F]
    w_down: Any  # [E,F,L]
    shared_gate: Any  # [D,S], or None: no shared expert
    shared_up: Any  # [D,S]
    shared_down: Any  # [S,D]


class LatentMoEOutput(NamedTuple):
    y: Any  # like x
    logits: Any  # [N,E] float32 router logits
    routing: Routing


def router_logits(x, router):
    """x [N,D], router [D,E] -> [N,E] in float32 (float64 for float64): both operands are widened before the product."""
    dtype = accumulation_dtype(x, router)
    return jnp.matmul(x.astype(dtype), router.astype(dtype))


def gated_mlp(x, w_gate, w_up, w_down, *, activation=situ_glu):
    """Dense `activation(x w_gate, x w_up) w_down`: x [...,D], [D,S], [D,S], [S,D] -> [...,D]; casts to x's dtype."""
    return mlp(x, w_gate.astype(x.dtype), w_up.astype(x.dtype), w_down.astype(x.dtype), activation)


def latent_moe(
    x,
    bias,
    weights,
    k,
    *,
    mask=None,
    scaling=1.0,
    renormalize=True,
    activation=situ_glu,
    eps=1e-5,
    implementation=None,
) -> LatentMoEOutput:
    """The whole layer: route on x, project to the latent, experts, norm, project back, plus the shared expert.

    Args:
      x: [N,D] (or [...,D]; leading axes are flattened inside).
      bias: [E] float32 added to the scores for the selection only.
      weights: LatentMoEWeights.
      k: experts a token.
      mask: [N] (or x's leading shape) bool, False = padding: never read, not routed, output 0.
      scaling, renormalize: see ops.routing.route.
      activation: of all experts, the shared one too.
      eps: of the latent norm.
      implementation: of the expert products, see expert_mlp.

    Returns:
      LatentMoEOutput(y like x, logits [N,E], Routing over N flattened tokens).

    Raises:
      ValueError: shapes or dtypes that do not fit.
    """
    check_layer(x, weights, mask)
    entered = enter_latent(x, bias, weights, k, mask=mask, scaling=scaling, renormalize=renormalize)
    y = expert_mlp(
        entered.latent,
        entered.routing.experts,
        entered.routing.weights,
        *entered.matrices,
        activation=activation,
        mask=entered.mask,
        implementation=implementation,
    )
    y = leave_latent(y, weights, shared_expert(entered.flat, weights, activation), eps)
    return LatentMoEOutput(y.reshape(x.shape), entered.logits, entered.routing)


class EnteredLatent(NamedTuple):
    """What a layer computes before its experts."""

    flat: Any  # [N,D], 0 where masked
    mask: Any  # [N] or None
    logits: Any  # [N,E]
    routing: Routing
    latent: Any  # [N,L]
    matrices: Any  # w_gate, w_up, w_down as expert_mlp takes them


def enter_latent(x, bias, weights, k, *, mask, scaling, renormalize) -> EnteredLatent:
    """The part of latent_moe before the experts."""
    flat = x.reshape(-1, x.shape[-1])
    if mask is not None:
        mask = mask.reshape(-1)
        flat = jnp.where(mask[:, None], flat, 0)
    logits = router_logits(flat, weights.router)
    routing = route(logits, bias, k, scaling=scaling, renormalize=renormalize)
    latent = flat if weights.down is None else flat @ weights.down.astype(x.dtype)
    matrices = (weights.w_gate, weights.w_up, weights.w_down)
    matrices = tuple(w if isinstance(w, PackedExperts) else w.astype(x.dtype) for w in matrices)
    return EnteredLatent(flat, mask, logits, routing, latent, matrices)


def shared_expert(flat, weights, activation):
    """[N,D] -> [N,D], or None where there is none."""
    if weights.shared_gate is None:
        return None
    return gated_mlp(flat, weights.shared_gate, weights.shared_up, weights.shared_down, activation=activation)


def leave_latent(y, weights, shared, eps):
    """The part of latent_moe after the experts: their sum [N,L] and the shared expert's output or None -> [N,D]."""
    if weights.norm is not None:
        y = rms_norm(y, weights.norm, eps=eps)
    if weights.up is not None:
        y = y @ weights.up.astype(y.dtype)
    return y if shared is None else y + shared


def check_layer(x, weights, mask, *, shards: int = 1):
    """Raise ValueError unless they fit; `weights` may hold the experts of one of `shards` shards."""
    require_float(x=x, router=weights.router)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it must be [N,D] or [...,D].")
    if mask is not None and (tuple(mask.shape) != x.shape[:-1] or mask.dtype != jnp.bool_):
        raise ValueError(f"mask has shape {mask.shape} and dtype {mask.dtype}; it must be bool of shape {x.shape[:-1]}.")
    D, E = x.shape[-1], shards * num_experts(weights.w_gate)
    if tuple(weights.router.shape) != (D, E):
        raise ValueError(f"router has shape {weights.router.shape}; it must be [D,E] = ({D}, {E}).")
    if (weights.down is None) != (weights.up is None):
        raise ValueError("down and up belong together: give both (latent experts) or neither.")
    shared = [w is None for w in (weights.shared_gate, weights.shared_up, weights.shared_down)]
    if len(set(shared)) > 1:
        raise ValueError("shared_gate, shared_up and shared_down belong together: give all three or none.")
