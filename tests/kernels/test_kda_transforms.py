"""KDA under jax's transformations (scan, remat, vmap, shard_map, lowering for other platforms), and its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from moejax.kernels.kda import gated_kda, kda, kda_gate, kda_implementation

P = PartitionSpec


@pytest.fixture(scope="module")
def operands():
    """q, k, v, raw gate, beta logits, A_log, dt_bias, B = 4, T = 40, H = HV = 2, K = V = 8."""
    rng = np.random.default_rng(0)
    shape = (4, 40, 2, 8)
    arrays = [rng.normal(size=s) for s in (shape, shape, shape, shape, shape[:3], (2,), (2, 8))]
    return [jnp.asarray(x, jnp.float32) for x in arrays]


def layer(*operands, **options):
    o, final = gated_kda(*operands, output_final_state=True, **options)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(final)), o


def close(tree, other, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert np.max(np.abs(x - y)) <= tolerance * max(np.max(np.abs(y)), 1e-30)


@pytest.mark.parametrize("bound", [-5.0, None])
def test_shard_map(operands, bound):
    """Batch over one axis, heads over the other, with the varying-axes check on; parameters are replicated over the batch."""
    ids = jnp.asarray(np.repeat([[1, 2]], 20, axis=1).repeat(4, axis=0), jnp.int32)

    def value_and_grads(operands, ids):
        loss, vjp, o = jax.vjp(lambda *a: layer(*a, lower_bound=bound, segment_ids=ids), *operands, has_aux=True)
        return o, vjp(jnp.ones_like(loss))

    wanted = jax.jit(value_and_grads)(operands, ids)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rows = P("data", None, "tensor")
    specs = ([rows] * 5 + [P("tensor")] * 2, P("data"))

    def local(operands, ids):
        # The loss of a shard; replicated parameters receive the sum over the batch axis from the transpose of shard_map.
        return layer(*operands, lower_bound=bound, segment_ids=ids)[0][None]

    def sharded(operands, ids):
        call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(("data", "tensor")), check_vma=True)
        return jax.grad(lambda a: jnp.sum(call(a, ids)))(operands)

    close(jax.jit(sharded)(operands, ids), list(wanted[1]))


def test_scan_remat_vmap(operands):
    """Two layers as a rematerialised scan, vmapped over rows, equal the plain loop."""

    def stack(step, x, operands):
        def body(x, scale):
            _, k, v, raw, logits, A_log, bias = operands
            return x + gated_kda(x * scale, k, v, raw, logits, A_log, bias)[0], None

        return step(body, x, jnp.asarray([1.0, 0.5]))

    def loop(body, x, scales):
        for scale in scales:
            x, _ = body(x, scale)
        return jnp.sum(jnp.sin(x))

    def scan(body, x, scales):
        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(body), x, scales)[0]))

    operands = [x[:2, :20] if x.ndim > 2 else x for x in operands]
    wanted = jax.jit(jax.grad(lambda x: stack(loop, x, operands)))(operands[0])
    one_row = lambda x, row: jax.grad(lambda x: stack(scan, x, [*row, *operands[5:]]))(x)
    rows = [x[:, None] for x in operands[:5]]
    close(jax.jit(jax.vmap(one_row))(rows[0], rows)[:, 0], wanted)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_other_platforms(operands, platform):
    grad = jax.grad(lambda *a: layer(*a, lower_bound=-5.0)[0], argnums=range(7))
    lowered = jax.jit(grad).trace(*operands).lower(lowering_platforms=(platform,))
    assert "custom_call" not in lowered.as_text() and kda_implementation(platform, dtype=jnp.float32) == "xla"


def test_implementation_names():
    assert kda_implementation() == "xla" and kda_implementation("cpu", implementation="reference") == "reference"
    with pytest.raises(ValueError, match="known: reference, xla, triton, tpu"):
        kda_implementation(implementation="cuda")
    with pytest.raises(ValueError, match="known platforms"):
        kda_implementation("metal")
    for name in ("triton", "tpu"):
        with pytest.raises(NotImplementedError, match="use implementation='xla'"):
            kda_implementation("cpu", implementation=name)


def small(**changes):
    q = jnp.zeros((2, 6, 2, 4))
    args = {"q": q, "k": q, "v": jnp.zeros((2, 6, 4, 3)), "g": jnp.zeros((2, 6, 4, 4)), "beta": jnp.zeros((2, 6, 4))}
    return args | changes


IDS = jnp.ones((2, 6), jnp.int32)
BAD = {
    "rank": ({"q": jnp.zeros((2, 6, 4))}, "q has shape .*4 axes"),
    "heads": ({"v": jnp.zeros((2, 6, 3, 3)), "g": jnp.zeros((2, 6, 3, 4)), "beta": jnp.zeros((2, 6, 3))}, "3 heads .*multiple"),
    "keys": ({"g": jnp.zeros((2, 6, 4, 5))}, "g has shape .*must be"),
    "tokens": ({name: x[:, :0] for name, x in small().items()}, "T = 0"),
    "float16": ({"k": jnp.zeros((2, 6, 2, 4), jnp.float16)}, "k has dtype float16"),
    "integer": ({"beta": jnp.zeros((2, 6, 4), jnp.int32)}, "beta has dtype int32"),
    "bound 0": ({"lower_bound": 0.0}, r"lower_bound=0.0; .*\[-5.9, 0\)"),
    "bound low": ({"lower_bound": -6.0}, "lower_bound=-6.0"),
    "bound nan": ({"lower_bound": float("nan")}, "lower_bound=nan"),
    "implementation": ({"implementation": "fla"}, "implementation='fla'; known: reference, xla"),
    "ids shape": ({"segment_ids": IDS[:1]}, "segment_ids has shape"),
    "ids dtype": ({"segment_ids": IDS.astype(jnp.float32)}, "segment_ids has dtype float32"),
    "ids negative": ({"segment_ids": -IDS}, "segment_ids holds -1"),
    "ids decrease": ({"segment_ids": IDS.at[1, 2].set(3).at[1, 4].set(2)}, "row 1 decrease"),
    "ids above": ({"segment_ids": 3 * IDS, "num_segments": 2}, "holds 3 but num_segments=2"),
    "no ids": ({"num_segments": 2}, "num_segments=2 without segment_ids"),
    "num_segments": ({"segment_ids": IDS, "num_segments": 0}, "num_segments=0"),
    "state": ({"initial_state": jnp.zeros((2, 2, 4, 3))}, r"initial_state has shape .*\[B,HV,K,V\]"),
    "states": ({"initial_state": jnp.zeros((2, 4, 4, 3)), "segment_ids": IDS, "num_segments": 2}, r"\[B,N,HV,K,V\]"),
    "scale": ({"scale": jnp.ones(2)}, "scale="),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        kda(**small(**changes))


def test_bad_input_of_the_gated_form():
    q, v, logits = jnp.zeros((1, 5, 1, 2)), jnp.zeros((1, 5, 2, 2)), jnp.zeros((1, 5, 2))
    with pytest.raises(ValueError, match="raw_gate has shape"):
        gated_kda(q, q, v, q, logits, None, None)
    with pytest.raises(ValueError, match="lower_bound=-7"):
        gated_kda(q, q, v, v, logits, None, None, lower_bound=-7)
    with pytest.raises(ValueError, match="raw has dtype float16"):
        kda_gate(v.astype(jnp.float16), None, None)


def test_traced_ids_are_not_read():
    """Under jit the ids cannot be checked on the host; valid ones work all the same."""
    wanted, _ = kda(**small(), segment_ids=IDS)
    got, _ = jax.jit(lambda ids: kda(**small(), segment_ids=ids))(IDS)
    assert np.array_equal(wanted, got)
