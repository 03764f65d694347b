"""A whole KDA layer with tokens, rows and heads on several devices, against the plain layer on the whole arrays.

Shapes: B batch, T tokens, D model width, H query/key heads, G value heads, K and V channels, R and P gate ranks, W taps.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moejax.ops.kda_layer import KDAState, KDAWeights, kda_layer
from moejax.parallel.sequence_kda_layer import sequence_kda_layer

B, T, D, H, G, K, V, R, W = 2, 20, 6, 2, 4, 3, 5, 3, 4
P = jax.P
HEADS = KDAWeights(  # heads over the axis "tensor": a head's channels stand together in the convolutions
    q_proj=P(None, "tensor"),
    k_proj=P(None, "tensor"),
    v_proj=P(None, "tensor"),
    q_conv=P(None, "tensor"),
    k_conv=P(None, "tensor"),
    v_conv=P(None, "tensor"),
    decay_down=P(),
    decay_up=P(None, "tensor"),
    A_log=P("tensor"),
    dt_bias=P("tensor"),
    beta_proj=P(None, "tensor"),
    out_gate=P(None, "tensor"),
    out_gate_down=None,
    out_gate_up=None,
    out_norm=P(),
    out_proj=P("tensor"),
)


def mesh_of(**sizes):
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=jax.devices()[: np.prod(list(sizes.values()))])


def collectives(compiled):
    kinds = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return collections.Counter(re.findall(kinds, compiled.as_text()))


@pytest.fixture(scope="module")
def arrays():
    """x with NaN at padding, weights with the full output gate, a state, ids, cotangents of y and of the state."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    ids = np.array([[1] * 9 + [0] * 5 + [1] + [2] * 3 + [0] * 2, [0] * 5 + [1] * 15], np.int32)  # rows 0: a shard of padding
    x = jnp.where(jnp.asarray(ids)[..., None] == 0, jnp.nan, normal(B, T, D))
    weights = KDAWeights(
        *(normal(D, H, K), normal(D, H, K), normal(D, G, V), normal(W, H * K), normal(W, H * K), normal(W, G * V)),
        *(normal(D, R), normal(R, G, K), 0.3 * normal(G), normal(G, K), normal(D, G)),
        *(normal(D, G, V), None, None, 1 + 0.1 * normal(V), normal(G, V, D)),
    )
    state = lambda: KDAState(normal(B, W - 1, H * K), normal(B, W - 1, H * K), normal(B, W - 1, G * V), normal(B, G, K, V))
    return x, weights, state(), jnp.asarray(ids), (normal(B, T, D), state())


def test_whole_row_and_heads(arrays, x64):
    """Tokens over four devices, heads over two, rematerialised: y, the state and every gradient; x, weights and state within 1e-5."""
    x, weights, state, ids, cotangents = arrays

    def local(x, weights, state, ids):
        layer = lambda x, w, s: sequence_kda_layer(x, w, axis="sequence", state=s, segment_ids=ids, return_state=True)
        y, state = jax.checkpoint(layer)(x, weights, state)
        return jax.lax.psum(y, "tensor"), state

    channels = P(None, None, "tensor")
    states, tokens = KDAState(channels, channels, channels, P(None, "tensor")), P(None, "sequence")
    mesh, specs = mesh_of(sequence=4, tensor=2), (tokens, HEADS, states, tokens)
    call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(tokens, states), check_vma=True)

    def value_and_gradients(fn, wide):
        cast = lambda tree: jax.tree.map(lambda a: a.astype(jnp.float64), tree) if wide else tree
        out, vjp = jax.vjp(fn, *cast((x, weights, state)))
        return out, vjp(cast(cotangents))

    plain = lambda *a: kda_layer(*a[:2], state=a[2], segment_ids=ids, return_state=True, implementation="reference")
    wanted = jax.jit(lambda: value_and_gradients(plain, True))()
    got = jax.jit(lambda: value_and_gradients(lambda *a: call(*a, ids), False))()
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert np.max(np.abs(a - b)) <= 1e-5 * np.max(np.abs(b)), (jax.tree_util.keystr(path), np.max(np.abs(a - b)) / np.max(np.abs(b)))
    assert not np.any(np.asarray(got[0][0])[np.asarray(ids) == 0]) and not np.any(np.asarray(got[1][0])[np.asarray(ids) == 0])


def test_two_gathers_over_two_axes(arrays):
    """The tokens over two mesh axes at once, unpacked, no state: two all-gathers, nothing else; the plain layer within 1e-5."""
    _, weights, *_ = arrays
    x = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)), jnp.float32)
    low_rank = weights._replace(out_gate=None, out_gate_down=weights.decay_down, out_gate_up=weights.v_proj[:R])
    tokens, options = P("data", ("sequence", "more")), dict(lower_bound=None, norm_eps=1e-4)
    local = lambda x, w: sequence_kda_layer(x, w, axis=("sequence", "more"), **options)[0]
    mesh = mesh_of(data=2, sequence=2, more=2)
    call = jax.shard_map(local, mesh=mesh, in_specs=(tokens, P()), out_specs=tokens, check_vma=True)
    compiled = jax.jit(call).lower(x, low_rank).compile()
    assert collectives(compiled) == {"all-gather": 2}
    wanted = jax.jit(lambda x, w: kda_layer(x, w, **options)[0])(x, low_rank)
    assert np.max(np.abs(compiled(x, low_rank) - wanted)) <= 1e-5 * np.max(np.abs(wanted))


def test_refusals(arrays):
    x, weights, *_ = arrays

    def trace(weights, **options):
        local = lambda x, w: sequence_kda_layer(x, w, axis="sequence", **options)[0]
        tokens = P(None, "sequence")
        jax.eval_shape(jax.shard_map(local, mesh=mesh_of(sequence=2), in_specs=(tokens, P()), out_specs=tokens), x, weights)

    with pytest.raises(ValueError, match="A_log has shape"):
        trace(weights._replace(A_log=weights.A_log[:1]))
    with pytest.raises(ValueError, match="norm_eps=0"):
        trace(weights, norm_eps=0)
    with pytest.raises(ValueError, match="output gate weights given"):
        trace(weights._replace(out_gate=None))
