"""The planner's formulas against the model's own shapes, XLA's analyses, and the collectives of one compiled train step."""

import dataclasses
import inspect
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from experiments.compile_for_tpu import lower_train_step, memory
from moejax import HybridLM, KDAConfig, MLAConfig, ModelConfig, MoEConfig, presets
from moejax.ops.experts import expert_mlp, gated_mlp
from moejax.ops.kda_layer import KDAWeights, kda_layer
from moejax.ops.mla import MLAWeights, gated_mla
from moejax.parallel import MeshConfig, make_mesh, parameter_shardings
from moejax.parallel.axes import MESH_AXES, PARAMETER_AXES
from moejax.parallel.layers import ModelParallel
from moejax.planning import Step, Topology, by_axes, divisibility, parameters, part_flops, plan, read_collectives, traffic
from moejax.planning import memory as planned_memory
from moejax.planning.changes import budget, memory_of, meshes
from moejax.planning.cuts import local_size
from moejax.planning.flops import forward_passes
from moejax.planning.hlo_traffic import bytes_by_axis
from moejax.planning.traffic import LOSS_CHUNK
from moejax.train.flops import flops_per_token
from moejax.train.step import make_train_step

MESH = MeshConfig(fsdp=2, expert=2, sequence=2)
STEP = Step(rows=8, context=32, dtype="float32", transport="padded")


@pytest.fixture(scope="module")
def two_layers():
    """A KDA layer with a dense feed-forward and an MLA layer with experts, a snapshot before each."""
    return ModelConfig(
        vocab_size=64,
        hidden=32,
        layers=2,
        pattern="KM",
        dense_width=40,
        residual_block=1,
        kda=KDAConfig(heads=2, key_dim=8, value_dim=12, value_heads=4),
        mla=MLAConfig(heads=2, nope_dim=8, rope_dim=4, value_dim=12, q_latent=16, kv_latent=16),
        moe=MoEConfig(experts=6, experts_per_token=2, expert_width=16, latent=20, shared_width=16),
    )


@pytest.fixture(scope="module")
def compiled(two_layers):
    """The only compiled program of this file."""
    model = HybridLM(two_layers, parallel=ModelParallel(make_mesh(MESH)))
    return lower_train_step(model, rows=STEP.rows, context=STEP.context).compile()


@pytest.fixture(scope="module")
def collectives(compiled):
    return read_collectives(compiled.as_text(), dataclasses.asdict(MESH))


def sent(collectives, name: str, *kinds: str) -> float:
    """Bytes of the collectives of these kinds in scopes that match, scalars and routing counts of the exchange left out."""
    return sum(c.sent for c in collectives if re.search(name, c.op_name) and c.kind in kinds and c.operand_bytes > 64)


def planned(config, what: str, mesh=MESH, step=STEP) -> float:
    return sum(transfer.sent for transfer in traffic(config, mesh, step) if transfer.what.startswith(what))


def test_arguments_are_exactly_XLAs(compiled, two_layers):
    """Parameters, moments, counters, biases, strengths and the batch: to the byte."""
    assert planned_memory(two_layers, MESH, STEP, "adamw").arguments == memory(compiled)["argument"]


def test_temporaries_are_of_the_right_size(compiled, two_layers):
    """An estimate: within a factor of 1.5 of XLA's here, 0.91 of it for `small` on 128 chips."""
    m = planned_memory(two_layers, MESH, STEP, "adamw")
    assert 1 / 1.5 < (m.gradients + sum(m.activations.values())) / memory(compiled)["temp"] < 1.5


def test_traffic_of_each_part_is_the_programs(collectives, two_layers):
    """What the package sends by explicit collectives, and the gathers of fsdp's shards, to the byte."""
    halo = sum(c.sent for c in collectives if "kda/mixer" in c.op_name and "252]" in str(c.shapes))
    assert planned(two_layers, "KDA convolution halo") == halo > 0
    assert planned(two_layers, "KDA state") == sent(collectives, "kda_scan", "all-gather", "reduce-scatter") > 0
    assert planned(two_layers, "MLA latents") == sum(
        c.sent for c in collectives if "mla/mixer" in c.op_name and c.axes == ("sequence",) and c.kind in ("all-gather", "reduce-scatter")
    )
    assert planned(two_layers, "experts' rows") == sent(collectives, "moe/ffn", "all-to-all") > 0
    assert planned(two_layers, "routing statistics") == sum(c.sent for c in collectives if "s32[6,1000]" in c.shapes) > 0
    assert planned(two_layers, "weights gathered") == sum(c.sent for c in collectives if c.axes == ("fsdp",) and c.kind == "all-gather")
    # The compiler brings the head together along another axis, for both uses: a permute, and a gather of as many bytes.
    assert planned(two_layers, "head gathered") == sum(c.sent for c in collectives if c.shapes == ("f32[16,64]",)) / 2 > 0
    of_layers = [c for c in collectives if c.kind == "all-reduce" and "shard_map" in c.op_name and "s32[6,1000]" not in c.shapes]
    experts = {t.axes: t.sent for t in traffic(two_layers, MESH, STEP) if t.what == "gradients summed"}
    assert sum(c.sent for c in of_layers if c.axes == ("fsdp", "sequence")) == experts["fsdp", "sequence"] > 0
    mixers = [p for p in parameters(two_layers) if p.part in ("kda", "mla", "moe")]
    whole = sum(local_size(p, MESH, gathered=True) * p.itemsize for p in mixers)
    assert sum(c.sent for c in of_layers if c.axes == ("fsdp", "expert", "sequence")) == 2 * whole * 7 / 8


def test_traffic_of_the_whole_step(compiled, two_layers):
    """Norms, embedding, head and the dense layer are the compiler's: in all within 10 per cent, over the exchange within 1."""
    read = bytes_by_axis(compiled.as_text(), dataclasses.asdict(MESH))
    said = by_axes(traffic(two_layers, MESH, STEP))
    assert sum(said.values()) == pytest.approx(sum(read.values()), rel=0.1)
    assert said["expert"] == pytest.approx(read["expert"], rel=0.01)


CONFIGS = {
    "value heads": lambda toy: toy,
    "full": lambda toy: toy.replace(residual="full", scan_layers=False, param_dtype="bfloat16"),
    "packed": lambda toy: toy.replace(moe={"expert_weights": "mxfp4", "latent": 32, "expert_width": 32}),
    "kimi_linear_48b": lambda _: presets.get("kimi_linear_48b"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_the_models(toy, name):
    """Names, shapes, dtypes and how many layers have them; and the bytes a device holds, by the shardings of training."""
    config = CONFIGS[name](toy)
    tree = jax.eval_shape(HybridLM(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    found: dict = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        key = path[-1].key
        own = leaf.shape[leaf.ndim - len(PARAMETER_AXES[key]) :]
        layers = leaf.size // math.prod(own)
        found[key, own, str(leaf.dtype)] = found.get((key, own, str(leaf.dtype)), 0) + layers
    said: dict = {}
    for p in parameters(config):
        said[p.name, p.shape, p.dtype] = said.get((p.name, p.shape, p.dtype), 0) + p.layers
    assert said == found
    for mesh in (MeshConfig(), MeshConfig(2, 4, 2, 2, 2), MeshConfig(fsdp=3, expert=5, tensor=7)):
        shardings = parameter_shardings(tree, AbstractMesh(dataclasses.astuple(mesh), MESH_AXES))
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
        held = sum(int(jnp.dtype(leaf.dtype).itemsize) * math.prod(s.shard_shape(leaf.shape)) for leaf, s in pairs)
        assert planned_memory(config, mesh, STEP, "none").parameters == held


def test_caches_of_K3():
    """k3-spec: 414 MiB of float32 states, 14.6 MiB of convolution inputs, 27.0 GiB of latents at 2**20 tokens."""
    caches = planned_memory(presets.get("kimi_k3"), MeshConfig(), Step(1, 2**20), "none").caches
    assert caches["KDA states"] == 414 * 2**20
    assert caches["KDA convolution inputs"] / 2**20 == pytest.approx(14.6, abs=0.05)
    assert caches["MLA latents"] == 27 * 2**30
    cut = planned_memory(presets.get("kimi_k3"), MeshConfig(sequence=4, tensor=2), Step(1, 2**20), "none").caches
    assert (cut["KDA states"], cut["MLA latents"]) == (207 * 2**20, 27 * 2**28)


@pytest.mark.parametrize("name", presets.NAMES)
def test_flops_add_up_to_the_models(name):
    config = presets.get(name)
    for context in (512, 2**20):
        assert sum(part.model for part in part_flops(config, context)) == pytest.approx(flops_per_token(config, context), rel=1e-12)


def xla_flops(function, *shapes) -> float:
    """Of the program as traced: nothing is compiled."""

    def array(shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    arguments = [jax.tree.map(array, s, is_leaf=lambda s: type(s) is tuple) for s in shapes]
    cost = jax.jit(function).lower(*arguments).cost_analysis()
    return float((cost[0] if isinstance(cost, list) else cost)["flops"])


def test_flops_of_each_part_are_XLAs():
    """Lengths that need no loop, whose body XLA counts once. Tolerances: XLA adds the elementwise work, 1 to 7 per cent here."""
    config = ModelConfig(
        vocab_size=512,
        hidden=512,
        layers=2,
        pattern="KM",
        dense_width=768,
        kda=KDAConfig(heads=2, key_dim=64, value_dim=64),
        mla=MLAConfig(heads=4, nope_dim=64, rope_dim=32, value_dim=64, q_latent=256, kv_latent=128),
        moe=MoEConfig(experts=1, experts_per_token=1, expert_width=256, latent=128, shared_width=256, balance="none"),
    )
    D, T = config.hidden, 64
    said = {part.part: part.forward for part in part_flops(config, 2 * T)}  # one block: the square, twice the causal half
    shapes = {p.name: p.shape for p in parameters(config)}
    x = (1, T, D)

    kda = KDAWeights(**{name: shapes.get(name) for name in KDAWeights._fields})
    found = xla_flops(lambda x, w: kda_layer(x, w, implementation="xla")[0], (1, 16, D), kda) / 16
    assert found == pytest.approx(said["KDA projections"] + said["KDA recurrence"], rel=0.1)
    mla = MLAWeights(**{name: shapes.get(name) for name in MLAWeights._fields})
    assert xla_flops(gated_mla, x, mla) / T == pytest.approx(said["MLA projections"] + said["MLA attention"], rel=0.05)
    experts = [shapes[f"expert_{name}"] for name in ("gate", "up", "down")]

    def one_expert(x, weights, *matrices):
        return expert_mlp(x, jnp.zeros((T, 1), jnp.int32), weights, *matrices, implementation="reference")

    assert xla_flops(one_expert, (T, 128), (T, 1), *experts) / T == pytest.approx(said["experts"], rel=0.05)
    dense = [shapes[f"{name}_proj"] for name in ("gate", "up", "down")]
    assert xla_flops(gated_mlp, (T, D), *dense) / T == pytest.approx(said["dense feed-forward"], rel=0.02)
    assert xla_flops(jnp.matmul, (T, D), shapes["head"]) / T == pytest.approx(said["head"], rel=1e-6)


def test_the_loss_chunk_is_that_of_the_train_step():
    """A copied number, because planning does not read the train step."""
    assert inspect.signature(make_train_step).parameters["loss_chunk"].default == LOSS_CHUNK


def test_recomputation_and_repeated_work(two_layers):
    c = two_layers
    assert [forward_passes(c), forward_passes(c.replace(residual_block=2)), forward_passes(c.replace(remat="none"))] == [2, 3, 1]

    def executed(mesh, config=c):
        return {part.part: part.executed for part in part_flops(config, 64, mesh)}

    one, four = executed(MeshConfig()), executed(MeshConfig(tensor=2))
    assert four["dense feed-forward"] == one["dense feed-forward"] and four["experts"] == one["experts"]
    assert one["router, latent, shared"] < four["router, latent, shared"] < 2 * one["router, latent, shared"]  # the router is whole
    many = executed(MeshConfig(sequence=4))
    assert many["KDA recurrence"] > one["KDA recurrence"] and many["MLA projections"] > one["MLA projections"]
    assert many["MLA attention"] == one["MLA attention"]


def test_ring_sends_each_shards_latents_around():
    """R - 1 steps of the latents a pass, as many backward, and R of their float32 gradients."""
    config, mesh = presets.get("small"), MeshConfig(sequence=4)
    ring = Step(1, 4096, attention="ring")
    words, gradients = 1024 * (288 * 2 + 4), 1024 * 288 * 4
    assert planned(config, "MLA latents", mesh, ring) == 4 * (4 * 3 * words + 4 * gradients)
    whole = planned_memory(config, mesh, dataclasses.replace(ring, attention="gather"), "adamw").activations
    assert whole["latents of the whole row"] == 4096 * 288 * (2 + 4)
    assert "latents of the whole row" not in planned_memory(config, mesh, ring, "adamw").activations


DIVIDING = [MeshConfig(), MeshConfig(expert=4), MeshConfig(tensor=3), MeshConfig(expert=3, tensor=2), MeshConfig(tensor=4)]


@pytest.mark.parametrize("mesh", DIVIDING)
def test_divisibility_is_that_of_the_model(toy, mesh):
    """The same sizes are named as by ModelParallel.check, and what is proposed passes."""
    lines = divisibility(toy, mesh)
    try:
        ModelParallel(AbstractMesh(dataclasses.astuple(mesh), MESH_AXES)).check(toy)  # pyright: ignore[reportArgumentType]
        named = []
    except ValueError as error:
        named = re.findall(r"^  ([\w.]+) is", str(error), re.M)
    assert [line.split(" ")[0] for line in lines] == named
    for line in lines:
        axis, value = re.findall(r"set mesh\.(\w+) to (\d+)", line)[0]
        assert not any(line.split(" ")[0] in other for other in divisibility(toy, dataclasses.replace(mesh, **{axis: int(value)})))


def test_what_does_not_fit_and_what_would():
    """Kimi K3 in training on 128 chips cannot fit; on 8192 it can. Each proposed change, applied, does fit."""
    k3, step = presets.get("kimi_k3"), Step(rows=1024, context=4096)
    small = plan(k3, MeshConfig(data=128), step, Topology.parse("v5p:4x4x8"))
    assert len(small.problems) == 1 and "times the 90.94 GiB that v5p has" in small.problems[0]
    assert small.changes and small.changes[0].startswith("no mesh of 128 devices fits 1024 rows of 4,096 tokens")
    assert any("no axis cuts the largest weights" in note for note in small.notes)
    made = plan(k3, MeshConfig(data=32, expert=128, tensor=2), step, Topology.parse("v5p:16x16x32"))
    assert made.problems and made.changes
    applied = 0
    for change in made.changes:
        if found := re.match(r"mesh\.(\w+) (\d+) -> (\d+) .*?(?:mesh\.data (\d+) -> (\d+))?", change):
            sizes = {found.group(1): int(found.group(3))}
            if data := re.search(r"mesh\.data \d+ -> (\d+)", change):
                sizes["data"] = int(data.group(1))
            mesh = dataclasses.replace(made.mesh, **sizes)
            assert not divisibility(k3, mesh) and memory_of(made, mesh=mesh) <= budget(made.topology)
            half = dataclasses.replace(mesh, **{found.group(1): int(found.group(3)) // 2})
            assert memory_of(made, mesh=half) > budget(made.topology)  # the smallest that fits
            applied += 1
    assert applied


def test_a_mesh_of_several_axes_is_found():
    """The devices are on the sequence axis, which cuts no weights: a mesh of as many devices is named that fits."""
    config, step = presets.get("kimi_linear_48b"), Step(rows=64, context=4096)
    made = plan(config, MeshConfig(sequence=64), step, Topology.parse("v6e:8x8"))
    line = made.changes[0]
    assert line.startswith("several axes: --mesh"), line
    mesh = MeshConfig(**{name: int(value) for name, value in re.findall(r"--mesh\.(\w+) (\d+)", line)})
    better = plan(config, mesh, step, made.topology)
    assert not better.problems and mesh.size == 64
    least = sum(transfer.sent for transfer in better.traffic)
    others = (m for m in meshes(64) if not divisibility(config, m) and memory_of(made, mesh=m) <= budget(made.topology))
    assert all(sum(t.sent for t in traffic(config, m, step)) >= least for m in others if m.data * m.fsdp * m.expert <= 64)


def test_other_problems_and_notes(toy):
    topology = Topology.parse("v5e:2x4")
    made = plan(toy, MeshConfig(data=2, sequence=2), Step(rows=3, context=33), topology)
    assert made.problems == ["the mesh has 4 devices, v5e:2x4 has 8: multiply an axis by 2 until their product is 8."]
    assert [note.split(":")[1] for note in made.notes][:2] == [" 1 rows of padding are computed.", " 1 tokens of padding a row."]
    packed = toy.replace(moe={"expert_weights": "mxfp4", "latent": 32, "expert_width": 32})
    assert "read-only" in plan(packed, MeshConfig(data=8), Step(8, 32), topology).problems[0]
    assert not plan(packed, MeshConfig(data=8), Step(8, 32), topology, "none").problems
    assert "hidden is 24, which mesh.fsdp = 5" in " ".join(plan(toy, MeshConfig(fsdp=5), Step(8, 32), topology).notes)
    assert len(set(meshes(8))) == 35 and all(mesh.size == 8 for mesh in meshes(8))
    for step, word in ((Step(0, 8), "rows is 0"), (Step(1, 8, attention="flash"), "attention"), (Step(1, 8, transport="x"), "transport")):
        with pytest.raises(ValueError, match=word):
            plan(toy, MeshConfig(), step, topology)
    with pytest.raises(ValueError, match="optimizer is 'sgd'"):
        plan(toy, MeshConfig(), Step(1, 8), topology, "sgd")


def test_topologies():
    v5p = Topology.parse("v5p:8x16x16")
    assert (v5p.devices, v5p.name, v5p.is_tpu, round(v5p.memory / 2**30, 2)) == (2048, "v5p:8x16x16", True, 95.73)
    assert Topology.parse("tpu7x:2x2x1").devices == 8  # two a chip
    assert Topology.parse("h200:8").devices == 8 and not Topology.parse("h200:8").is_tpu
    for name, word in (("v9:2x2", "unknown chip 'v9'"), ("v5p:4x4", "3 dimensions"), ("v5e:4x", "numbers of chips"), ("h100", "numbers")):
        with pytest.raises(ValueError, match=word):
            Topology.parse(name)


HLO = """HloModule m

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %all-gather.1 = f32[8,8]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={1}, metadata={op_name="a/b"}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %x)
}

%endless (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %all-to-all.1 = f32[8,4]{1,0} all-to-all(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %x)
}

%all-reduce-scatter.2 (p: f32[8,4]) -> f32[4,4] {
  %p = f32[8,4]{1,0:T(8,128)} parameter(0)
  %all-reduce.9 = f32[8,4]{1,0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add
  ROOT %s = f32[4,4]{1,0} dynamic-slice(%all-reduce.9, %i, %z)
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %sizes = s32[2]{0} parameter(1)
  %tuple = (s32[], f32[8,4]{1,0}) tuple(%i, %p)
  %while.1 = (s32[], f32[8,4]{1,0}) while(%tuple), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %while.2 = (s32[], f32[8,4]{1,0}) while(%tuple), condition=%c, body=%endless
  %fusion.1 = f32[4,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2
  %all-reduce.1 = (f32[8,4]{1,0}, s32[2]{0}) all-reduce(%p, /*index=1*/%sizes), replica_groups={}, to_apply=%add
  %permute.1 = (f32[8,4]{1,0}, f32[8,4]{1,0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %done.1 = f32[8,4]{1,0} collective-permute-done(%permute.1)
  %ragged.1 = bf16[16,4]{1,0} ragged-all-to-all(%p, %into, %sizes, %sizes, %sizes, %sizes), replica_groups=[1,4]<=[4]
  ROOT %alone.1 = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3}}, to_apply=%add
}
"""


def test_reader_of_compiled_text():
    """Loops count their turns, groups are named by axis, operands are counted, a reduce-scatter in disguise is one."""
    mesh = {"data": 2, "tensor": 2}
    found = {(c.kind, c.axes): (c.sent, c.times) for c in read_collectives(HLO, mesh)}
    assert found == {
        ("all-gather", ("data",)): (5 * 128, 5),
        ("all-to-all", ("tensor",)): (0, 0),
        ("reduce-scatter", ("tensor",)): (64, 1),
        ("all-reduce", ("data", "tensor")): (2 * 136 * 3 / 4, 1),
        ("collective-permute", ("tensor",)): (128, 1),
        ("ragged-all-to-all", ("data", "tensor")): (128 * 3 / 4, 1),
        ("all-reduce", ()): (0, 1),
    }
    assert bytes_by_axis(HLO, mesh) == {"data": 640, "data+tensor": 300, "tensor": 192}
    reordered = HLO.replace("mesh['a'=2,'b'=2] {'b'}", "mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}")
    assert ("reduce-scatter", ("data",)) in {(c.kind, c.axes) for c in read_collectives(reordered, mesh)}
    part = HLO.replace("mesh['a'=2,'b'=2] {'b'}", "mesh['a'=4] {'a':(2)2}")
    assert ("reduce-scatter", ("tensor",)) in {(c.kind, c.axes) for c in read_collectives(part, mesh)}
    with pytest.raises(ValueError, match="no ENTRY"):
        read_collectives("", mesh)
