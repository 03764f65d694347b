"""Routed experts and LatentMoE: golden vectors, blocks against the loop, extreme distributions, masks, rounding, packed experts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from moejax.ops.activations import swiglu
from moejax.ops.experts import LatentMoEWeights, PackedExperts, expert_mlp, latent_moe
from moejax.ops.mxfp4 import mxfp4_decode, mxfp4_encode

IMPLEMENTATIONS = ("reference", "xla")
TOLERANCES = {"float64": (1e-9, 1e-9), "float32": (1e-5, 5e-5)}
NAMES = {  # our name -> (published name, axes to published order)
    "router": ("gate", (1, 0)),
    "down": ("down", (1, 0)),
    "norm": ("norm", (0,)),
    "up": ("up", (1, 0)),
    "w_gate": ("w1", (0, 2, 1)),
    "w_up": ("w3", (0, 2, 1)),
    "w_down": ("w2", (0, 2, 1)),
    "shared_gate": ("shared_gate", (1, 0)),
    "shared_up": ("shared_up", (1, 0)),
    "shared_down": ("shared_down", (1, 0)),
}


def relative(actual, expected):
    expected = np.asarray(expected, np.float64)
    return np.abs(np.asarray(actual, np.float64) - expected).max() / max(np.abs(expected).max(), 1e-30)


def golden_weights(case, dtype):
    def take(name, axes):
        return jnp.asarray(case[f"in_{name}"].transpose(axes), dtype)

    return LatentMoEWeights(**{ours: take(*theirs) for ours, theirs in NAMES.items()})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["latent_moe", "latent_moe_many"])
def test_golden_layer_and_every_gradient(x64, golden, name, dtype, implementation):
    case, (value_tolerance, gradient_tolerance) = golden(f"moe/{name}.npz"), TOLERANCES[dtype]
    weights, x, k = golden_weights(case, dtype), jnp.asarray(case["in_x"], dtype), int(case["top_k"])

    @jax.jit
    def run(x, weights):
        def layer(x, w):
            return latent_moe(x, jnp.asarray(case["in_bias"]), w, k, implementation=implementation)

        _, pull, rest = jax.vjp(lambda x, w: ((out := layer(x, w)).y, out), x, weights, has_aux=True)
        return rest, pull(jnp.asarray(case["in_ct"], dtype))

    out, (dx, d_weights) = run(x, weights)
    assert relative(out.y, case["out_y"]) < value_tolerance
    assert relative(out.routing.scores, case["out_scores"]) < value_tolerance
    ours, theirs = np.argsort(out.routing.experts, 1), np.argsort(case["out_idx"], 1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(out.routing.experts), ours, 1), np.take_along_axis(case["out_idx"], theirs, 1)
    )
    sorted_weights = np.take_along_axis(np.asarray(out.routing.weights), ours, 1)
    assert relative(sorted_weights, np.take_along_axis(case["out_weights"], theirs, 1)) < value_tolerance
    assert relative(dx, case["grad_x"]) < gradient_tolerance
    assert {f"grad_{theirs}" for theirs, _ in NAMES.values()} == {n for n in case if n.startswith("grad_")} - {"grad_x"}
    for ours, (theirs, axes) in NAMES.items():
        gradient = np.asarray(getattr(d_weights, ours)).transpose(axes)
        assert relative(gradient, case[f"grad_{theirs}"]) < gradient_tolerance, theirs


def make(N, k, E=6, L=7, F=5, seed=0, dtype=jnp.float64):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    experts = np.stack([rng.permutation(E)[:k] for _ in range(N)])
    weights = jnp.asarray(rng.random((N, k)), jnp.promote_types(dtype, jnp.float32))
    matrices = (normal(E, L, F), normal(E, L, F), normal(E, F, L))
    return normal(N, L), jnp.asarray(experts, jnp.int32), weights, *matrices, normal(N, L)


def gradients(implementation, **options):
    """jit of (x, experts, weights, matrices..., ct, mask) -> value and all five gradients."""

    def run(x, experts, weights, w_gate, w_up, w_down, ct, mask=None):
        def call(x, weights, *matrices):
            return expert_mlp(x, experts, weights, *matrices, mask=mask, implementation=implementation, **options)

        y, pull = jax.vjp(call, x, weights, w_gate, w_up, w_down)
        return y, *pull(ct)

    return jax.jit(run)


@pytest.mark.parametrize(("N", "k", "activation"), [(1, 1, None), (15, 6, None), (65, 2, swiglu), (130, 3, None)])
def test_blocks_equal_the_loop(x64, N, k, activation):
    options = {} if activation is None else {"activation": activation}
    arguments = make(N, k)
    for a, b in zip(
        gradients("xla", **options)(*arguments), gradients("reference", **options)(*arguments), strict=True
    ):
        assert relative(a, b) < 1e-12


def test_distributions_empty_experts_all_to_one_and_the_first_or_last_empty(x64):
    """No token is dropped; experts without tokens get gradient exactly 0 (public case M5)."""
    x, _, weights, *rest = make(33, 2)
    fast, slow = gradients("xla"), gradients("reference")
    for pair in ([2, 3], [0, 5], [5, 4], [0, 1]):
        experts = jnp.broadcast_to(jnp.asarray(pair, jnp.int32), (33, 2))
        got, expected = fast(x, experts, weights, *rest), slow(x, experts, weights, *rest)
        for a, b in zip(got, expected, strict=True):
            assert relative(a, b) < 1e-12
        empty = np.setdiff1d(np.arange(6), pair)
        assert all(np.all(np.asarray(g)[empty] == 0) for g in got[3:])


def test_the_order_of_a_tokens_experts_and_of_tokens_does_not_matter(x64):
    x, experts, weights, *matrices, _ = make(40, 3)
    y = expert_mlp(x, experts, weights, *matrices)
    order = np.random.default_rng(1).permutation(40)
    flipped = expert_mlp(x[order], experts[order, ::-1], weights[order, ::-1], *matrices)
    assert relative(flipped, y[order]) < 1e-13


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_tokens_are_not_routed_and_never_read(x64, implementation):
    *arguments, ct = make(65, 2)
    mask = jnp.asarray(np.random.default_rng(2).random(65) < 0.6)
    x, experts, weights, *matrices = arguments
    hole = ~mask[:, None]
    dirty = [jnp.where(hole, jnp.nan, a) for a in (x, weights, ct)]
    got = gradients(implementation)(dirty[0], experts, dirty[1], *matrices, dirty[2], mask)
    kept = np.flatnonzero(mask)
    alone = gradients("reference")(x[kept], experts[kept], weights[kept], *matrices, ct[kept])
    for index in (0, 1, 2):
        assert np.all(np.where(hole, got[index], 0) == 0)
        assert relative(got[index][kept], alone[index]) < 1e-12
    for a, b in zip(got[3:], alone[3:], strict=True):
        assert relative(a, b) < 1e-12
    nothing = gradients(implementation)(*arguments, ct, jnp.zeros(65, bool))
    assert all(np.all(np.asarray(g) == 0) for g in nothing)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_expert_output_is_rounded_before_the_float32_sum(implementation):
    """bfloat16 has steps of 2 above 256. Each expert gives 257, rounded to 256.

    Halves of three: 384; without the rounding 385.5, which ends as 386. Factors 1, 1/256, 1/256: 258; a bfloat16
    sum drops both ones and gives 256.
    """

    def one(*shape):
        return jnp.ones(shape, jnp.bfloat16)

    w_down = jnp.concatenate([256 * one(3, 1, 1), one(3, 1, 1)], axis=1)
    experts = jnp.asarray([[0, 1, 2]], jnp.int32)

    def product(gate, up):
        return gate * up

    for factors, expected in (([0.5, 0.5, 0.5], 384.0), ([1.0, 1 / 256, 1 / 256], 258.0)):
        matrices = (one(3, 1, 2), one(3, 1, 2), w_down)
        factors = jnp.asarray([factors], jnp.float32)
        y = expert_mlp(one(1, 1), experts, factors, *matrices, activation=product, implementation=implementation)
        assert y.dtype == jnp.bfloat16 and float(y[0, 0]) == expected


def test_bfloat16_within_its_rounding(x64):
    arguments = make(130, 3, dtype=jnp.bfloat16)
    wide = [a.astype(jnp.float64) if a.dtype != jnp.int32 else a for a in arguments]
    for a, b in zip(gradients("xla")(*arguments), gradients("reference")(*wide), strict=True):
        assert relative(a, b) < 2e-2


def test_layer_without_latent_norm_or_shared_expert_and_with_padding(x64, golden):
    """Kimi-Linear's form: experts on x itself. [B,T,D] input; padding holds NaN and takes no expert."""
    case = golden("moe/latent_moe.npz")
    full = golden_weights(case, jnp.float64)
    rng = np.random.default_rng(3)

    def wide(*shape):
        return jnp.asarray(rng.normal(size=shape))

    bare = full._replace(down=None, up=None, norm=None, shared_gate=None, shared_up=None, shared_down=None)
    bare = bare._replace(w_gate=wide(16, 24, 9), w_up=wide(16, 24, 9), w_down=wide(16, 9, 24))
    x = jnp.asarray(case["in_x"], jnp.float64).reshape(2, 24, 24)
    mask = jnp.asarray(rng.random((2, 24)) < 0.7)
    bias = jnp.asarray(case["in_bias"])
    for weights in (bare, full):
        out = jax.jit(lambda x, m, w: latent_moe(x, bias, w, 4, mask=m))(
            jnp.where(mask[..., None], x, jnp.nan), mask, weights
        )
        expected = jax.jit(lambda x, w: latent_moe(x, bias, w, 4, implementation="reference"))(x[mask], weights)
        assert out.y.shape == x.shape and np.isfinite(out.logits).all()
        assert np.all(np.asarray(out.y)[~np.asarray(mask)] == 0)
        assert relative(out.y[mask], expected.y) < 1e-12


def test_inside_scan_remat_vmap_and_shard_map(x64):
    x, experts, weights, *matrices, ct = make(32, 2)

    def loss(x, *m):
        return jnp.sum(expert_mlp(x, experts, weights, *m) * ct)

    def twice(call):
        return lambda x, *m: jnp.sum(call(call(x, *m), *m) * ct)

    def slow(x, *m):
        return expert_mlp(x, experts, weights, *m, implementation="reference")

    expected = jax.jit(jax.value_and_grad(twice(slow), (0, 1, 2, 3)))(x, *matrices)

    def scanned(x, *m):
        layer = jax.checkpoint(lambda x, _: (expert_mlp(x, experts, weights, *m), None))
        return jnp.sum(jax.lax.scan(layer, x, None, length=2)[0] * ct)

    def same(got, expected):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert relative(a, b) < 1e-12

    same(jax.jit(jax.value_and_grad(scanned, (0, 1, 2, 3)))(x, *matrices), expected)

    one = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(slow(*a) * ct), (0, 1, 2, 3)))
    stacked = jax.jit(jax.vmap(jax.value_and_grad(loss, (0, 1, 2, 3))))(*(jnp.stack([-a, a]) for a in (x, *matrices)))
    same(jax.tree.map(lambda a: a[1], stacked), one(x, *matrices))

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    shard = jax.shard_map(expert_mlp, mesh=mesh, in_specs=(P("data"),) * 3 + (P(),) * 3, out_specs=P("data"))
    sharded = jax.value_and_grad(lambda x, *m: jnp.sum(shard(x, experts, weights, *m) * ct), (0, 1, 2, 3))
    same(jax.jit(sharded)(x, *matrices), one(x, *matrices))


def test_repeated_calls_give_identical_bits():
    arguments = make(130, 3, dtype=jnp.float32)
    run = gradients("xla")
    for a, b in zip(run(*arguments), run(*arguments), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_input_is_refused(golden):
    x, experts, weights, *matrices, _ = make(8, 2, dtype=jnp.float32)
    layer = golden_weights(golden("moe/latent_moe.npz"), jnp.float32)
    tokens, bias = jnp.ones((4, 24)), jnp.zeros(16)
    bad = [
        (lambda: expert_mlp(x[0], experts, weights, *matrices), "axes"),
        (lambda: expert_mlp(x.astype(jnp.float16), experts, weights, *matrices), "float16"),
        (lambda: expert_mlp(x.astype(jnp.bfloat16), experts, weights, *matrices), "one dtype"),
        (lambda: expert_mlp(x[:0], experts[:0], weights[:0], *matrices), "empty"),
        (lambda: expert_mlp(x, experts, weights[:, :1], *matrices), r"\[N,k\]"),
        (lambda: expert_mlp(x, experts.astype(jnp.float32), weights, *matrices), "int32"),
        (lambda: expert_mlp(x, experts, weights, matrices[0], matrices[1], matrices[0]), r"\[E,F,L\]"),
        (lambda: expert_mlp(x, experts, weights, *matrices, mask=jnp.ones(8)), "bool"),
        (lambda: expert_mlp(x, experts, weights, *matrices, implementation="triton"), "not in this version"),
        (lambda: expert_mlp(x, experts, weights, *matrices, implementation="fast"), "fast"),
        (lambda: latent_moe(tokens, bias, layer, 17), "17"),
        (lambda: latent_moe(tokens, bias, layer._replace(up=None), 4), "together"),
        (lambda: latent_moe(tokens, bias, layer._replace(shared_up=None), 4), "together"),
        (lambda: latent_moe(tokens[:, :5], bias, layer, 4), "router"),
        (lambda: latent_moe(tokens, bias, layer, 4, mask=jnp.ones(3, bool)), "mask"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()


def make_packed(N, k, E=6, L=64, F=96, dtype=jnp.float64):
    """-> (x, experts, weights, packed matrices, the same decoded to [E,in,out], cotangent)."""
    x, experts, weights, *matrices, ct = make(N, k, E, L, F, dtype=dtype)
    packed = [PackedExperts(*mxfp4_encode(jnp.swapaxes(w, 1, 2))) for w in matrices]
    return x, experts, weights, packed, [jnp.swapaxes(mxfp4_decode(*w, dtype=dtype), 1, 2) for w in packed], ct


def packed_gradients(implementation):
    """jit of (x, experts, weights, matrices, ct, mask) -> value, dx, d_weights: what LoRA on frozen experts needs."""

    def run(x, experts, weights, matrices, ct, mask=None):
        call = lambda x, weights: expert_mlp(x, experts, weights, *matrices, mask=mask, implementation=implementation)
        y, pull = jax.vjp(call, x, weights)
        return y, *pull(ct)

    return jax.jit(run)


@pytest.mark.parametrize(("N", "k", "dtype"), [(1, 1, "float32"), (17, 2, "bfloat16"), (130, 3, "float64")])
def test_packed_experts_equal_decoded_ones(x64, N, k, dtype):
    """Bit for bit in blocks, values and gradients; the loop over all experts to rounding. Masked NaN rows are not read."""
    x, experts, weights, packed, decoded, ct = make_packed(N, k, dtype=dtype)
    mask = jnp.arange(N) % 5 != 3
    x = jnp.where(mask[:, None], x, jnp.nan)
    fast, slow = packed_gradients("xla"), packed_gradients("reference")
    expected = fast(x, experts, weights, decoded, ct, mask)
    for a, b in zip(fast(x, experts, weights, packed, ct, mask), expected, strict=True):
        assert np.isfinite(np.asarray(b, np.float64)).all() and np.abs(np.asarray(b, np.float64)).max() > 0
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    tolerance = {"float32": 1e-6, "bfloat16": 1.6e-2, "float64": 1e-14}[dtype]  # bfloat16 sums over experts in dx
    for a, b in zip(slow(x, experts, weights, packed, ct, mask), slow(x, experts, weights, decoded, ct, mask), strict=True):
        assert relative(a, b) < tolerance


def test_gradient_of_packed_experts_against_float64_autodiff(x64):
    x, experts, weights, packed, decoded, ct = make_packed(65, 2)
    for a, b in zip(
        packed_gradients("xla")(x, experts, weights, packed, ct),
        packed_gradients("reference")(x, experts, weights, decoded, ct),
        strict=True,
    ):
        assert relative(a, b) < 1e-12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_experts_are_never_decoded_as_a_stack(implementation):
    """No array of the compiled value-and-gradient program is as large as one decoded stack, in any dtype."""
    x, experts, weights, packed, decoded, ct = make_packed(8, 2, E=16, L=128, F=128, dtype=jnp.float32)
    run, stack = packed_gradients(implementation), 16 * 128 * 128

    def largest(matrices):
        program = run.lower(x, experts, weights, matrices, ct).compile()
        shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", program.as_text())
        return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes), program.memory_analysis()

    elements, memory = largest(packed)
    assert elements <= stack // 2  # the codes
    assert memory.temp_size_in_bytes < stack * 4 // 2
    assert largest(decoded)[0] >= stack


def test_layer_with_packed_experts():
    """latent_moe: bit-equal to the layer with decoded experts, in the dtype of x, whatever that of the other weights."""
    x, _, _, packed, decoded, _ = make_packed(33, 2, dtype=jnp.float32)
    normal = jax.random.normal(jax.random.key(0), (6, 64))
    layer = LatentMoEWeights(normal.T, normal.T @ normal, jnp.ones(64), normal.T @ normal, None, None, None, None, None, None)
    run = jax.jit(lambda x, layer: latent_moe(x, jnp.zeros(6), layer, 2).y)
    names = ("w_gate", "w_up", "w_down")
    for dtype in ("float32", "bfloat16"):
        matrices = (dict(zip(names, kind, strict=True)) for kind in (packed, decoded))
        a, b = (run(x.astype(dtype), layer._replace(**weights)) for weights in matrices)
        assert a.dtype == dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_bad_packed_experts():
    x, experts, weights, packed, decoded, _ = make_packed(5, 2, dtype=jnp.float32)
    gate, up, down = packed
    bad = [
        ((gate, up, decoded[2]), "w_gate packed, w_up packed, w_down not: .* together or not at all"),
        ((decoded[0], up, down), "together or not at all"),
        ((gate._replace(codes=gate.codes.astype(jnp.int8)), up, down), "w_gate.codes is int8"),
        ((gate, up._replace(scales=up.scales[:, :, :1]), down), r"w_up.scales uint8\[6, 96, 1\]"),
        ((gate, up, down._replace(codes=down.codes[0])), r"w_down.codes is uint8\[64, 48\]"),
        ((gate, up, gate), r"\[E,F,L\]"),
    ]
    for matrices, message in bad:
        with pytest.raises(ValueError, match=message):
            expert_mlp(x, experts, weights, *matrices)
