"""Expert exchange on forced CPU devices against the single-device layer: values, every gradient, skew, masks, collectives."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.ops.experts import LatentMoEWeights, PackedExperts, expert_mlp, latent_moe
from moejax.ops.mxfp4 import mxfp4_encode
from moejax.parallel import exchange
from moejax.parallel.dispatch import plan_dispatch
from moejax.parallel.expert_parallel import expert_parallel_latent_moe, expert_parallel_mlp

N, K, E, L, F = 80, 3, 16, 7, 6  # 7, 6: nothing divides by a shard count by accident


def mesh_of(**axes):
    count = int(np.prod(list(axes.values())))
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=jax.devices()[:count])


def relative(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)


def close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative(a, b) < tolerance


def equal_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def routing(kind, tokens=N, seed=1):
    """experts [tokens,K]: "even", "skewed" (half of all tokens choose expert 0), "one" (only expert 5), "last" (the last three)."""
    rng = np.random.default_rng(seed)
    if kind == "one":
        experts = np.full((tokens, K), 5)
    elif kind == "last":
        experts = np.stack([E - 1 - rng.permutation(K) for _ in range(tokens)])
    else:
        share = np.full(E, 1 / E) if kind == "even" else np.r_[0.5, 0.2, 0, np.full(E - 3, 0.3 / (E - 3))]
        experts = np.stack([rng.choice(E, K, replace=False, p=share) for _ in range(tokens)])
    return jnp.asarray(experts, jnp.int32)


def inputs(kind="skewed", tokens=N, dtype=jnp.float32, width=F, latent=L):
    rng = np.random.default_rng(0)
    x, ct = (normal(rng, tokens, latent, dtype=dtype) for _ in range(2))
    weights = jnp.asarray(rng.random((tokens, K)), jnp.float32)
    shapes = ((E, latent, width), (E, latent, width), (E, width, latent))
    return x, routing(kind, tokens), weights, *(normal(rng, *shape, dtype=dtype) for shape in shapes), ct


def with_gradients(call):
    """jit of (x, experts, weights, matrices..., ct, mask) -> value and the gradients of x, weights and the matrices."""

    def run(x, experts, weights, w_gate, w_up, w_down, ct, mask):
        y, pull = jax.vjp(lambda x, w, *m: call(x, experts, w, *m, mask), x, weights, w_gate, w_up, w_down)
        return y, *pull(ct)

    return jax.jit(run)


@functools.cache
def single(implementation="reference"):
    return with_gradients(lambda *a: expert_mlp(*a[:-1], mask=a[-1], implementation=implementation))


OWN = P("expert")


def sharded(mesh, tokens=OWN, up=OWN, down=OWN, **options):
    def call(x, experts, weights, w_gate, w_up, w_down, mask):
        return expert_parallel_mlp(x, experts, weights, w_gate, w_up, w_down, axis="expert", mask=mask, **options)

    return jax.shard_map(call, mesh=mesh, in_specs=(*(tokens,) * 3, up, up, down, tokens), out_specs=tokens)


def some_mask(tokens=N):
    return jnp.asarray(np.random.default_rng(2).random(tokens) < 0.8)


def rounds_of(experts, mask, shards):
    """Rounds of the "padded" transport, counted in numpy."""
    slot = -(-int(np.ceil(exchange.SLACK * N * K / shards**2)) // exchange.SLOT_MULTIPLE) * exchange.SLOT_MULTIPLE
    owner = np.where(np.asarray(mask)[:, None], np.asarray(experts) // (E // shards), shards)
    pairs = [np.bincount(part.reshape(-1), minlength=shards + 1)[:shards].max() for part in np.split(owner, shards)]
    return -(-max(pairs) // slot)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_any_routing_equals_one_device(shards):
    """Even, skewed, all to one expert, empty experts; NaN where masked; several rounds; the same numbers for every R."""
    run, mask = with_gradients(sharded(mesh_of(expert=shards))), some_mask()
    rounds = set()
    for kind in ("even", "skewed", "one", "last"):
        x, experts, weights, *rest = arguments = inputs(kind)
        hole = ~mask[:, None]
        dirty = [jnp.where(hole, jnp.nan, a) for a in (x, weights, rest[-1])]
        got = run(dirty[0], experts, dirty[1], *rest[:-1], dirty[2], mask)
        close(got, single()(*arguments, mask), 1e-6)
        equal_bits(got[0], single("xla")(*arguments, mask)[0])
        empty = np.setdiff1d(np.arange(E), np.asarray(experts)[np.asarray(mask)])
        assert all(np.all(np.asarray(g)[empty] == 0) for g in got[3:])
        rounds.add(rounds_of(experts, mask, shards))
    assert min(rounds) == 1 and max(rounds) > 1
    equal_bits(run(*arguments, mask), run(*arguments, mask))


def test_one_shard_is_the_plain_op_and_the_loop_over_experts_runs_inside_shards():
    arguments, mask = inputs("skewed"), some_mask()
    alone = jax.jit(sharded(mesh_of(expert=1)))(*arguments[:-1], mask)
    equal_bits(alone, single("xla")(*arguments, mask)[0])
    run = with_gradients(sharded(mesh_of(expert=2), implementation="reference"))
    close(run(*arguments, mask), single()(*arguments, mask), 1e-6)


def test_gather_equals_one_device():
    run, mask = with_gradients(sharded(mesh_of(expert=4), transport="gather")), some_mask()
    for kind in ("skewed", "one"):
        x, *rest = inputs(kind)
        x = jnp.where(mask[:, None], x, jnp.nan)
        close(run(x, *rest, mask), single()(x, *rest, mask), 1e-6)


def emulated_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What the operation is documented to do; offsets and sizes that do not agree give NaN."""
    shards, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    rows, *pieces = (lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets))
    start, size, target = (a.reshape(shards, shards, -1)[:, me].reshape(-1, 1) for a in pieces)  # [source * piece,1]
    source = jnp.arange(len(start)) // (len(start) // shards)
    place = jnp.arange(output.shape[0])
    written = (place >= target) & (place < target + size)
    piece = jnp.argmax(written, axis=0)
    taken = rows[source[piece], jnp.clip(start[piece, 0] + place - target[piece, 0], 0, operand.shape[0] - 1)]
    inside = (start >= 0) & (start + size <= operand.shape[0]) & (target >= 0) & (target + size <= len(place))
    right = jnp.all(inside) & jnp.all(size[:, 0] == recv_sizes) & jnp.all(written.sum(0) <= 1)
    return jnp.where(right, jnp.where(written.any(0)[:, None], taken, output), jnp.nan)


def test_ragged_equals_padded_on_an_emulation(monkeypatch):
    """XLA:CPU has no ragged_all_to_all: windows, offsets and sizes, each pair's in 2 pieces, are checked on an emulation."""
    monkeypatch.setitem(exchange.UPDATES, "default", 8)
    monkeypatch.setattr(lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    monkeypatch.setattr(exchange, "_refuse_cpu", lambda counts: counts)
    mesh, mask = mesh_of(expert=4), some_mask()
    ragged, padded = (with_gradients(sharded(mesh, transport=name)) for name in ("ragged", "padded"))
    for kind in ("even", "skewed", "one", "last"):
        arguments = inputs(kind)
        a, b = ragged(*arguments, mask), padded(*arguments, mask)
        equal_bits(a[:3], b[:3])
        close(a[3:], b[3:], 1e-6)


@pytest.mark.parametrize("transport", ["padded", "gather"])
def test_with_data_and_tensor_axes_gradients_are_summed_once(transport):
    """Case M7: the matrices are replicated over data and sharded over expert and, in F, over tensor."""
    specs = {"tokens": P(("data", "expert")), "up": P("expert", None, "tensor"), "down": P("expert", "tensor")}
    mesh = mesh_of(data=2, expert=2, tensor=2)
    run = with_gradients(sharded(mesh, **specs, tensor_axis="tensor", transport=transport))
    arguments, mask = inputs("skewed"), some_mask()
    close(run(*arguments, mask), single()(*arguments, mask), 1e-6)


def test_bfloat16():
    """Values bit for bit; gradients within two roundings (2^-8 each) of one device's, the matrices' over several rounds."""
    run, mask = with_gradients(sharded(mesh_of(expert=4))), some_mask()
    arguments = inputs("one", dtype=jnp.bfloat16)
    assert rounds_of(arguments[1], mask, 4) > 1
    got, expected = run(*arguments, mask), single("xla")(*arguments, mask)
    equal_bits(got[:3], expected[:3])
    close(got[3:], expected[3:], 2 * 2**-8)


def test_packed_experts():
    x, experts, weights, *matrices, ct = inputs("skewed", width=32, latent=32)
    packed = [PackedExperts(*mxfp4_encode(jnp.swapaxes(w, 1, 2))) for w in matrices]
    mask = some_mask()

    def gradients(call):
        def run(x, weights):
            y, pull = jax.vjp(lambda x, w: call(x, experts, w, *packed, mask), x, weights)
            return y, *pull(ct)

        return jax.jit(run)(x, weights)

    got, expected = gradients(sharded(mesh_of(expert=2))), gradients(lambda *a: expert_mlp(*a[:-1], mask=a[-1]))
    equal_bits(got[:2], expected[:2])
    close(got[2], expected[2], 1e-6)


def kept_assignments(experts, mask, shards, capacity):
    """By hand: columns first, then tokens, until the owner has its fill."""
    kept, part = np.zeros(experts.shape, bool), len(experts) // shards
    for first in range(0, len(experts), part):
        taken = np.zeros(shards, int)
        for column in range(K):
            for token in range(first, first + part):
                owner = experts[token, column] // (E // shards)
                if mask[token] and taken[owner] < capacity:
                    kept[token, column], taken[owner] = True, taken[owner] + 1
    return kept


@pytest.mark.parametrize("transport", ["padded", "gather"])
def test_capacity_drops_last_choices_first_and_counts_them(transport):
    shards, capacity, mask = 4, 16, some_mask()

    def call(*arguments):
        options = {"axis": "expert", "capacity": capacity, "transport": transport}
        y, overflow = expert_parallel_mlp(*arguments[:-1], mask=arguments[-1], **options)
        return y, overflow[None]

    run = jax.jit(jax.shard_map(call, mesh=mesh_of(expert=shards), in_specs=P("expert"), out_specs=P("expert")))
    x, experts, weights, *matrices, _ = inputs("skewed")
    kept = kept_assignments(np.asarray(experts), np.asarray(mask), shards, capacity)
    y, overflow = run(x, experts, weights, *matrices, mask)
    expected = expert_mlp(x, experts, weights * kept, *matrices, mask=mask)
    assert relative(y, expected) < 1e-6
    dropped = (np.asarray(mask)[:, None] & ~kept).reshape(shards, -1).sum(1)
    np.testing.assert_array_equal(overflow, dropped)
    assert dropped.min() > 0
    text = run.lower(x, experts, weights, *matrices, mask).compile().as_text()
    assert len(re.findall(r"all-to-all\(", text)) == (3 if transport == "padded" else 0)  # sizes, there, back: no loop


def collectives(text):
    """{name: largest number of elements of its results} and how many there are of each."""
    found = re.findall(r"= (\(?[^=]*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", text)
    names = [name for _, name in found]
    largest = {}
    for shapes, name in found:
        for shape in re.findall(r"\[([\d,]*)\]", shapes):
            largest[name] = max(largest.get(name, 0), int(np.prod([int(n) for n in shape.split(",") if n])))
    return {name: names.count(name) for name in set(names)}, largest


def test_compiled_program_exchanges_rows_and_never_experts():
    arguments = (*inputs(), some_mask())
    stack = E * L * F
    text = with_gradients(sharded(mesh_of(expert=4))).lower(*arguments).compile().as_text()
    count, largest = collectives(text)
    # sizes; there and back, straight and in a loop, forward and backward; the number of rounds
    assert count == {"all-to-all": 9, "all-reduce": 1}
    assert largest["all-reduce"] == 1
    text = with_gradients(sharded(mesh_of(expert=4), transport="gather")).lower(*arguments).compile().as_text()
    count, largest = collectives(text)
    assert set(count) <= {"all-gather", "reduce-scatter", "all-reduce"} and max(largest.values()) < stack


def test_memory_of_a_shard_does_not_grow_with_the_number_of_shards():
    """40 tokens a shard: the rounds bound what arrives, although all tokens of all shards may choose one expert."""
    sizes = {}
    for shards in (2, 8):
        call = jax.jit(sharded(mesh_of(expert=shards)))
        compiled = call.lower(*inputs(tokens=40 * shards)[:-1], some_mask(40 * shards)).compile()
        sizes[shards] = compiled.memory_analysis().temp_size_in_bytes
    assert sizes[8] < 1.5 * sizes[2], sizes


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_the_platform_that_is_lowered_for_chooses_the_transport(platform):
    gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    device = {"abstract_device": gpu} if platform == "cuda" else {}
    mesh = AbstractMesh((4,), ("expert",), (AxisType.Auto,), **device)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*inputs(), some_mask())]
    with jax.sharding.use_abstract_mesh(mesh) if device else contextlib.nullcontext():
        text = with_gradients(sharded(mesh)).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    ragged = len(re.findall("ragged_all_to_all", text))
    assert (ragged, text.count("stablehlo.all_to_all")) == ((0, 9) if platform == "cpu" else (8, 2))


def layer_inputs(tokens, D=12, S=10):
    rng = np.random.default_rng(3)
    shapes = ((D, E), (D, L), (L,), (L, D), (E, L, F), (E, L, F), (E, F, L), (D, S), (D, S), (S, D))
    weights = LatentMoEWeights(*(normal(rng, *shape) for shape in shapes))
    return normal(rng, *tokens, D), jnp.asarray(rng.normal(size=E), jnp.float32), weights, normal(rng, *tokens, D)


def layer_specs(tensor):
    experts = P("expert", None, tensor), P("expert", None, tensor), P("expert", tensor)
    return LatentMoEWeights(P(), P(), P(), P(), *experts, P(None, tensor), P(None, tensor), P(tensor))


def layer_gradients(layer):
    """-> y, logits, experts, and gradients of x and all weights."""

    def run(x, bias, weights, ct, mask):
        def call(x, weights):
            y, logits, experts = layer(x, bias, weights, mask)
            return y, (logits, experts)

        y, pull, rest = jax.vjp(call, x, weights, has_aux=True)
        return (y, *rest), pull(ct)

    return jax.jit(run)


def outputs(out):
    return out.y, out.logits, out.routing.experts


single_layer = layer_gradients(lambda x, bias, weights, mask: outputs(latent_moe(x, bias, weights, K, mask=mask)))


def sharded_layer(mesh, tensor=None, tokens="expert"):
    def call(x, bias, weights, mask):
        out = expert_parallel_latent_moe(x, bias, weights, K, axis="expert", tensor_axis=tensor, mask=mask)
        return outputs(out)

    specs = (P(tokens), P(), layer_specs(tensor), P(tokens))
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(tokens))


def test_layer_on_data_expert_and_tensor_axes():
    """[B,T,D] tokens, padding that holds NaN: outputs, logits, routing and the gradient of every weight."""
    x, bias, weights, ct = layer_inputs((4, 9))
    mask = jnp.asarray(np.random.default_rng(4).random((4, 9)) < 0.8)
    x = jnp.where(mask[..., None], x, jnp.nan)
    run = layer_gradients(sharded_layer(mesh_of(data=2, expert=2, tensor=2), "tensor", ("data", "expert")))
    got, expected = run(x, bias, weights, ct, mask), single_layer(x, bias, weights, ct, mask)
    np.testing.assert_array_equal(got[0][2], expected[0][2])
    close(got, expected, 1e-6)


def test_fewer_tokens_than_shards():
    """Case M7: 1, 2, 3, 5 tokens on 8 shards, one each, the others masked (NaN): expert gradients as on one device, not doubled."""
    run = layer_gradients(sharded_layer(mesh_of(expert=8)))
    x, bias, weights, ct = layer_inputs((8,))
    for tokens in (1, 2, 3, 5):
        mask = jnp.arange(8) < tokens
        dirty = jnp.where(mask[:, None], x, jnp.nan)
        got = run(dirty, bias, weights, ct, mask)
        expected = single_layer(dirty, bias, weights, ct, mask)
        close(got[0], expected[0], 1e-6)
        close(got[1], expected[1], 1e-5)
        assert all(np.all(np.asarray(a)[tokens:] == 0) for a in (got[0][0], got[1][0]))


@pytest.mark.slow
def test_tpu_program_computes_the_shared_expert_while_rows_travel(monkeypatch):
    """Compiled for four v5p chips: the three products stand between the start and the end of the first exchange."""
    pytest.importorskip("libtpu", reason="compiling for a TPU needs libtpu (extra tpu-aot)")
    from jax.experimental import topologies

    settings = "TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5p-8 TPU_WORKER_HOSTNAMES=localhost TPU_WORKER_ID=0"
    for setting in f"{settings} ALLOW_MULTIPLE_LIBTPU_LOAD=1".split():
        monkeypatch.setenv(*setting.split("="))
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    mesh = Mesh(np.array(devices).reshape(4), ("expert",))
    specs, (D, latent, width, S) = layer_specs(None), (1024, 512, 256, 1024)
    up, down = (64, latent, width), (64, width, latent)
    shapes = LatentMoEWeights((D, 64), (D, latent), (latent,), (latent, D), up, up, down, (D, S), (D, S), (S, D))

    def array(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    def call(x, weights):
        return expert_parallel_latent_moe(x, None, weights, 4, axis="expert").y

    run = jax.shard_map(call, mesh=mesh, in_specs=(P("expert"), specs), out_specs=P("expert"))
    weights = LatentMoEWeights(*(array(*pair) for pair in zip(shapes, specs, strict=True)))
    text = jax.jit(run).lower(array((8192, D), P("expert")), weights).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    travelling = entry[entry.index("ragged-all-to-all-start(") : entry.index("ragged-all-to-all-done(")]
    assert len(re.findall(r"fusion\(.*dot_general", travelling)) == 3


def test_inside_scan_and_remat():
    x, experts, weights, *matrices, ct = inputs("skewed")
    mask = some_mask()

    def loss(call):
        def run(x, *matrices):
            layer = jax.checkpoint(lambda x, _: (call(x, experts, weights, *matrices, mask), None))
            return jnp.sum(lax.scan(layer, x, None, length=2)[0] * ct)

        return jax.jit(jax.grad(run, (0, 1, 2, 3)))(x, *matrices)

    close(loss(sharded(mesh_of(expert=2))), loss(lambda *a: expert_mlp(*a[:-1], mask=a[-1])), 5e-6)


def test_bad_input_is_refused():
    x, experts, weights, *matrices, _ = inputs()
    mesh, mask = mesh_of(expert=4), some_mask()
    for options, message in [
        ({"transport": "nccl"}, "transport='nccl'"),
        ({"transport": "ragged"}, "XLA has no ragged_all_to_all"),
        ({"capacity": 0}, "capacity is 0"),
        ({"implementation": "fast"}, "fast"),
    ]:
        with pytest.raises(ValueError, match=message):
            jax.jit(sharded(mesh, **options))(x, experts, weights, *matrices, mask)
    with pytest.raises(ValueError, match="10 experts over 4 shards"):
        plan_dispatch(experts, 10, 4)
    with pytest.raises(ValueError, match=r"router .* \(12, 32\)"):
        x, bias, weights, _ = layer_inputs((8,))
        specs = layer_specs(None)._replace(w_gate=P(), w_up=P(), w_down=P())
        call = lambda x, b, w: expert_parallel_latent_moe(x, b, w, K, axis="expert").y
        jax.shard_map(call, mesh=mesh_of(expert=2), in_specs=(P("expert"), P(), specs), out_specs=P("expert"))(x, bias, weights)


def test_float64_with_the_platforms_own_transport(x64):
    """The counts stay int32 with 64-bit numbers on; values and gradients of two shards within 1e-12 of one device's."""
    x, experts, weights, *rest = inputs(dtype=jnp.float64)
    given = (x, experts, weights.astype(jnp.float64), *rest, some_mask())
    for got, wanted in zip(with_gradients(sharded(mesh_of(expert=2)))(*given), with_gradients(reference_mlp)(*given), strict=True):
        close(got, wanted, 1e-12)


def reference_mlp(x, experts, weights, w_gate, w_up, w_down, mask):
    return expert_mlp(x, experts, weights, w_gate, w_up, w_down, mask=mask, implementation="reference")
