"""hub.save: byte-equal round trips, checkpoints of one's own, F3 and M3, and saves that are killed."""

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moejax import HybridLM, MoEConfig, hub, presets
from moejax.hub.shards import ShardReader, TensorSpec
from moejax.parallel import MeshConfig, make_mesh
from moejax.train import make_state
from moejax.train.checkpoint import Checkpointer

saving, folder_module = sys.modules["moejax.hub.save"], sys.modules["moejax.hub.folder"]  # `hub.save` is the function
NAME = "language_model.model.layers.1.block_sparse_moe"


def compare(first, second):
    """Every tensor byte for byte, with its name, dtype, shape and file; the headers' metadata; config.json."""
    with ShardReader(first) as a, ShardReader(second) as b:
        assert a.specs == b.specs
        assert a.weight_map == b.weight_map and a.metadata == b.metadata
        different = [name for name in a.specs if a.read(name).tobytes() != b.read(name).tobytes()]
        assert not different, different
    assert json.loads((first / "config.json").read_text()) == json.loads((second / "config.json").read_text())


@pytest.fixture(scope="module")
def own(toy, noisy):
    """A checkpoint of one's own: the toy model with experts that MXFP4 can hold, never loaded from files."""
    config = toy.replace(
        hidden=32,
        pattern="KMK",
        kda={"value_heads": None, "value_dim": 8},
        moe=MoEConfig(experts=6, experts_per_token=2, expert_width=32, latent=32, shared_width=64, histogram_bins=50),
    )
    variables = jax.jit(HybridLM(config).init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    params, state = (noisy(variables[name], jax.random.key(i), 0.1) for i, name in enumerate(("params", "router_state")))
    return hub.Checkpoint(config, params, state)


# --- round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("k3_tiny", {"keep_packed": True}),
        ("k3_tiny", {}),
        ("k3_tiny", {"param_dtype": "float32"}),
        ("kimi_linear_tiny", {}),
    ],
)
def test_load_and_save_gives_every_byte_back(golden_folder, tmp_path, name, options):
    """Unpacked experts too: each block of k3_tiny holds a code of at least 4.0."""
    loaded = hub.load(golden_folder / name, **options)
    hub.save(tmp_path / "a", loaded)
    compare(golden_folder / name, tmp_path / "a")
    if name == "kimi_linear_tiny":
        assert (tmp_path / "a" / "generation_config.json").read_bytes() == (golden_folder / name / "generation_config.json").read_bytes()
    else:
        index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
        assert index == json.loads((golden_folder / name / "model.safetensors.index.json").read_text())


def test_sharded_parameters_save_the_same_bytes(golden_folder, tmp_path):
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    hub.save(tmp_path / "a", hub.load(golden_folder / "k3_tiny", shardings=mesh))
    compare(golden_folder / "k3_tiny", tmp_path / "a")


def test_blocks_with_small_codes_keep_their_values(golden_folder, tmp_path, rewrite_checkpoint):
    """Another encoder may leave a block's largest code below 4.0: the bytes change, the values do not."""
    name = f"{NAME}.experts.2.w1.weight"

    def change(tensors):
        codes = np.random.default_rng(0).integers(0, 4, (2, *tensors[name + "_packed"].shape))  # magnitudes 0 to 1.5
        tensors[name + "_packed"] = (codes[0] | 0x80 | codes[1] << 4).astype(np.uint8)

    source = rewrite_checkpoint("k3_tiny", tmp_path / "in", tensors=change)
    hub.save(tmp_path / "out", hub.load(source))
    with ShardReader(source) as a, ShardReader(tmp_path / "out") as b:
        parts = [(r.read(name + "_packed"), r.read(name + "_scale")) for r in (a, b)]
    assert not np.array_equal(parts[0][0], parts[1][0])
    np.testing.assert_array_equal(hub.mxfp4_decode(*parts[0]), hub.mxfp4_decode(*parts[1]))


def blocks_of_maxima(shape, rng):
    """[...,n] random weights, and the n = -8..8 of each block's largest magnitude 6 * 2^n."""
    values = rng.uniform(-6, 6, (*shape[:-1], shape[-1] // 32, 32))
    values[..., 5] = 6.0
    powers = rng.integers(-8, 9, values.shape[:-1])
    return (values * 2.0 ** powers[..., None]).reshape(shape).astype(np.float32), powers


def test_F3_three_rounds_keep_scales_and_weights(own, tmp_path):
    """The exponent's offset is applied once: the file's own bytes decode to weights of the same size, each round alike."""
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda leaf: leaf, own.params)
    ffn = params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]
    original = {part: blocks_of_maxima((1, 1, 6, 32, 32), rng) for part in ("gate", "up", "down")}
    for part, (value, _) in original.items():
        ffn[f"expert_{part}"] = jnp.asarray(np.swapaxes(value, -1, -2))
    checkpoint = dataclasses.replace(own, params=params)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    rounds, logits = [], []
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    for number in range(3):
        hub.save(tmp_path / f"round{number}", checkpoint, pack_experts=True)
        read, wanted = [], []
        with ShardReader(tmp_path / f"round{number}") as reader:
            for (part, name), expert in itertools.product({"gate": "w1", "up": "w3", "down": "w2"}.items(), range(6)):
                stem = f"{NAME}.experts.{expert}.{name}.weight"
                codes, scales = reader.read(stem + "_packed"), reader.read(stem + "_scale")
                value, powers = (array[0, 0, expert] for array in original[part])
                np.testing.assert_array_equal(scales, 127 + powers)
                pairs = table[np.stack([codes & 15, codes >> 4], -1)].reshape(32, 32)
                read.append(pairs * 2.0 ** (scales.astype(np.float64) - 127 - powers))
                wanted.append(value / 2.0**powers)
                rounds.append((codes.tobytes(), scales.tobytes()))
        ratio = np.abs(read).mean() / np.abs(wanted).mean()
        assert abs(ratio - 1) < 0.003, ratio  # an offset applied twice gives 0.25
        checkpoint = hub.load(tmp_path / f"round{number}")
        variables = {"params": checkpoint.params, "router_state": checkpoint.router_state}
        logits.append(jax.jit(HybridLM(checkpoint.config).apply)(variables, tokens))
    assert rounds[:18] == rounds[18:36] == rounds[36:]
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])


def test_M3_selection_bias_stays_float32_bit_for_bit(tmp_path, own):
    """238 biases, a small spread on a large offset: 9 of them would be left in bfloat16."""
    bias = np.linspace(6.817, 7.063, 238, dtype=np.float32)
    assert len(np.unique(bias)) == 238 and len(np.unique(bias.astype(jnp.bfloat16))) == 9
    config = own.config.replace(param_dtype="bfloat16", moe={"experts": 238})
    shapes = jax.eval_shape(HybridLM(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes["params"])
    state = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(bias), x.shape), shapes["router_state"])
    hub.save(tmp_path / "a", hub.Checkpoint(config, params, state))
    loaded = hub.load(tmp_path / "a")
    assert loaded.config.param_dtype == "bfloat16" and loaded.params["embedding"].dtype == jnp.bfloat16
    for leaf in jax.tree.leaves(loaded.router_state):
        assert leaf.dtype == jnp.float32 and np.asarray(leaf).reshape(-1, 238)[0].tobytes() == bias.tobytes()
    hub.save(tmp_path / "b", loaded)
    with ShardReader(tmp_path / "b") as reader:
        assert reader.read(f"{NAME}.gate.e_score_correction_bias").tobytes() == bias.tobytes()
    train = make_state(loaded.params, loaded.router_state, optax.sgd(0.1))
    store = Checkpointer(tmp_path / "train")
    store.save(1, train)
    restored, _ = store.restore(train)
    store.close()
    jax.tree.map(np.testing.assert_array_equal, restored.router_state, loaded.router_state)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(restored.router_state))


# --- checkpoints of one's own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_own_checkpoint_comes_back(own, tmp_path, dtype):
    hub.save(tmp_path / "a", own, dtype=dtype)
    loaded = hub.load(tmp_path / "a")
    if dtype is None:
        assert loaded.config == own.config
        jax.tree.map(np.testing.assert_array_equal, loaded.params, own.params)
    else:
        assert loaded.params["head"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(loaded.params["head"], own.params["head"].astype(jnp.bfloat16))
    jax.tree.map(np.testing.assert_array_equal, loaded.router_state, own.router_state)
    assert not (tmp_path / "a" / "model.safetensors.index.json").exists()
    unused = {f"language_model.model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert loaded.extra.keys() == unused


def test_training_settings_come_back(own, tmp_path):
    config = own.config.replace(remat="full", scan_layers=False, dtype="bfloat16", moe={"balance": "sign", "expert_weights": "mxfp4_qat"})
    hub.save(tmp_path / "a", dataclasses.replace(own, config=config))
    text = json.loads((tmp_path / "a" / "config.json").read_text())["text_config"]
    assert text["moejax"]["balance"] == "sign" and text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    loaded = hub.load(tmp_path / "a")
    assert loaded.config == config
    packed = hub.load(tmp_path / "a", keep_packed=True)
    assert packed.config.moe.expert_weights == "mxfp4"
    hub.save(tmp_path / "b", packed)
    assert hub.load(tmp_path / "b").config == config  # keeping them packed does not forget how they are trained


ODD = {
    "no latent": {"moe": {"latent": None, "shared_width": None}},
    "all dense, all K": {"pattern": "K", "dense_layers": 3},
    "no dense, all M": {"pattern": "M", "dense_layers": 0, "mla": {"q_latent": None, "gate": False}},
    "plain": {"residual": "plain", "residual_block": 12, "activation": "swiglu", "pattern": "MKM"},
    "unbounded, low rank": {"kda": {"lower_bound": None, "output_gate_rank": 8, "conv_width": 7}},
    "many heads": {"kda": {"heads": 130, "key_dim": 2, "value_dim": 2}, "layers": 5, "pattern": "KKMKM", "dense_layers": 2},
    "blocks of 1": {"residual_block": 1, "moe": {"latent_norm": False, "renormalize": False, "scaling": 2.5}},
}


@pytest.mark.parametrize("changes", ODD.values(), ids=ODD)
def test_any_configuration_comes_back(own, tmp_path, changes):
    """From shapes alone: every leaf filled with numbers of its own."""
    config = own.config.replace(**changes)
    shapes = jax.eval_shape(HybridLM(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    rng = np.random.default_rng(0)
    draw = lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype)
    trees = [jax.tree.map(draw, shapes.get(name, {})) for name in ("params", "router_state")]
    hub.save(tmp_path / "a", hub.Checkpoint(config, *trees))
    for options in ({}, {"shardings": make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))}):
        loaded = hub.load(tmp_path / "a", **options)
        assert loaded.config.replace(pattern=config.mixers) == config.replace(pattern=config.mixers)
        jax.tree.map(np.testing.assert_array_equal, loaded.params, trees[0])
        jax.tree.map(np.testing.assert_array_equal, loaded.router_state, trees[1])


def test_several_shards(own, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SHARD_BYTES", 20_000)
    hub.save(tmp_path / "a", own)
    files = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):06}.safetensors"
    jax.tree.map(np.testing.assert_array_equal, hub.load(tmp_path / "a").params, own.params)


def test_other_dtype_for_what_was_loaded(golden_folder, tmp_path):
    """Everything that was in the matrices' dtype follows, the tensors that no parameter needs too."""
    hub.save(tmp_path / "a", hub.load(golden_folder / "k3_tiny"), dtype="float32", pack_experts=False)
    loaded = hub.load(tmp_path / "a")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, hub.load(golden_folder / "k3_tiny", param_dtype="float32").params)
    with ShardReader(tmp_path / "a") as reader:
        assert reader.specs[f"{NAME}.experts.0.w1.weight"] == TensorSpec((64, 32), "F32")
        assert reader.specs["vision_tower.patch_embed.proj.weight"].dtype == "BF16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"residual": "full", "scan_layers": False}, "residual is 'full'"),
        ({"mla": {"positions": "rotary"}}, "mla.positions is 'rotary'"),
        ({"kda": {"value_heads": 4}}, "kda has 4 value heads"),
        ({"kda": {"gate_rank": 4}}, "kda.gate_rank is 4"),
        ({"moe": {"shared_width": 48}}, "moe.shared_width is 48"),
    ],
)
def test_what_published_files_cannot_hold_is_refused(own, tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        hub.save(tmp_path / "a", dataclasses.replace(own, config=own.config.replace(**changes)))
    assert not list(tmp_path.iterdir())


def test_leaves_that_do_not_fit_are_in_one_error(own, tmp_path):
    params = {**own.params, "head": own.params["head"][:, :-1], "other": jnp.zeros(3)}
    del params["embedding"]
    with pytest.raises(ValueError) as error:
        hub.save(tmp_path / "a", dataclasses.replace(own, params=params))
    for line in ("params/embedding: missing, expected (64, 32)", "params/head: (32, 63), expected (32, 64)", "params/other: not expected"):
        assert line in str(error.value)


def test_bad_arguments(own, golden_folder, tmp_path):
    packed = hub.load(golden_folder / "k3_tiny", keep_packed=True)
    with pytest.raises(ValueError, match="without keep_packed"):
        hub.save(tmp_path / "a", packed, pack_experts=False)
    with pytest.raises(ValueError, match="float16"):
        hub.save(tmp_path / "a", own, dtype="float16")
    for extra, words in (
        ({"language_model.model.norm.weight": np.ones(32, np.float32)}, "which params hold, too"),
        ({"__metadata__": np.ones(1, np.float32)}, "keep for themselves"),
        ({"x": np.ones(1, np.complex64)}, "as complex64"),
    ):
        with pytest.raises(ValueError, match=words):
            hub.save(tmp_path / "a", dataclasses.replace(own, extra=extra))
    for name in ("config.json", "../x", "model.safetensors"):
        with pytest.raises(ValueError, match="plain file name"):
            hub.save(tmp_path / "a", dataclasses.replace(own, files={name: b""}))
    params = jax.tree.map(lambda leaf: leaf, own.params)
    ffn = params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]
    ffn["expert_up"] = ffn["expert_up"].at[0, 0, 4, 7, 3].set(jnp.nan)
    with pytest.raises(ValueError, match=r"experts\.4\.w3 cannot be packed: w\[3, 7\] is nan"):
        hub.save(tmp_path / "a", dataclasses.replace(own, params=params), pack_experts=True)
    narrow = dataclasses.replace(own, config=own.config.replace(moe={"expert_width": 24, "shared_width": 48}))
    with pytest.raises(ValueError, match="MXFP4 needs multiples of 32"):
        hub.save(tmp_path / "a", narrow, pack_experts=True)
    assert not list(tmp_path.iterdir())


# --- nothing is lost ------------------------------------------------------------------------------------------------------------


def test_only_a_checkpoints_own_files_are_deleted(own, tmp_path, monkeypatch):
    """Not the adapter beside the weights, and not what comes while the new weights are written."""
    folder = tmp_path / "a"
    hub.save(folder, own)
    (folder / "lora_adapter.safetensors").write_bytes(b"adapter")
    with pytest.raises(ValueError, match=r"holds lora_adapter\.safetensors"):
        hub.save(folder, hub.load(folder))
    (folder / "lora_adapter.safetensors").unlink()
    write = saving.write_shard
    monkeypatch.setattr(saving, "write_shard", lambda *a: ((folder / "late.txt").write_text("late"), write(*a))[1])
    hub.save(folder, own)
    assert (folder / "late.txt").read_text() == "late" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_links_modes_and_places_that_cannot_be_replaced(own, tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    hub.save(link, own)
    assert link.is_symlink() and (real / "config.json").is_file() and real.stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]
    monkeypatch.chdir(real)
    with pytest.raises(ValueError, match="working directory"):
        hub.save(".", own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(ValueError, match="mount point"):
        hub.save(real, own)


def test_a_killed_saves_folder_is_named(own, tmp_path):
    (tmp_path / ".moejax-saving-x").mkdir()
    with pytest.warns(UserWarning, match=r"\.moejax-saving-x: of a save that was killed"):
        hub.save(tmp_path / "a", own)


def test_a_folder_with_other_things_is_not_replaced(own, tmp_path):
    folder = tmp_path / "a"
    hub.save(folder, own)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt"):
        hub.save(folder, own)
    assert (folder / "notes.txt").read_text() == "mine"
    hub.save(folder, hub.load(folder))  # it carries the file along
    assert (folder / "notes.txt").read_text() == "mine"
    (tmp_path / "b").write_text("a file")
    with pytest.raises(ValueError, match="is a file"):
        hub.save(tmp_path / "b", own)


@pytest.mark.parametrize("exchange", [True, False], ids=["atomic swap", "two renames"])
def test_saving_over_a_checkpoint_replaces_it(own, golden_folder, tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(folder_module, "_rename_exchange", lambda work, target: False)
    hub.save(tmp_path / "a", own)
    hub.save(tmp_path / "a", hub.load(golden_folder / "k3_tiny"))
    compare(golden_folder / "k3_tiny", tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("where", ["write_shard", "write_bytes", "replace"])
def test_a_save_that_fails_leaves_the_old_folder(own, golden_folder, tmp_path, monkeypatch, where):
    loaded = hub.load(golden_folder / "k3_tiny")
    loaded.files.clear()
    hub.save(tmp_path / "a", loaded)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(saving, where, fail)
    with pytest.raises(OSError, match="disk full"):
        hub.save(tmp_path / "a", own)
    compare(golden_folder / "k3_tiny", tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_save_that_is_killed_leaves_the_old_folder(golden_folder, tmp_path):
    """SIGKILL in the middle of the second file."""
    folder = tmp_path / "a"
    hub.save(folder, hub.load(golden_folder / "k3_tiny"))
    code = (
        "import os, signal, sys; from moejax import hub; save = sys.modules['moejax.hub.save']; write = save.write_shard; count = []\n"
        "def stop(path, specs, tensors, metadata):\n"
        "    count.append(0)\n"
        "    def tensor(name):\n"
        "        if len(count) == 2 and name == list(specs)[len(specs) // 2]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return tensors(name)\n"
        "    return write(path, specs, tensor, metadata)\n"
        "save.write_shard = stop; hub.save(sys.argv[1], hub.load(sys.argv[2]), dtype='float32')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder), str(golden_folder / "k3_tiny")], timeout=300)
    assert done.returncode == -signal.SIGKILL
    compare(golden_folder / "k3_tiny", folder)
    left = [p for p in tmp_path.iterdir() if p != folder]
    assert len(left) == 1 and left[0].name.startswith(".moejax-saving-")  # of the killed process; no reader takes it for a checkpoint
    assert os.listdir(left[0])


def test_slices_of_replicated_and_sharded_arrays(own):
    mesh = make_mesh(MeshConfig(expert=2))
    value = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    for spec in (PartitionSpec(), PartitionSpec("expert"), PartitionSpec(None, None, "expert")):
        array = jax.device_put(value, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(saving._fetch(array, (1, 2)), value[1, 2])
    np.testing.assert_array_equal(saving._fetch(value, ()), value)


def test_presets_describe_themselves():
    """config.json of every preset reads back as the preset (all of it: K3's is also what the published file says)."""
    from moejax.hub.published_config import model_config
    from moejax.hub.written_config import published_config

    for name in presets.NAMES:
        config = presets.get(name)
        outer = config.kda.lower_bound is not None
        made = published_config(config, None, outer=outer, packed=outer, dtype="bfloat16")
        json.dumps(made.raw)
        assert model_config(made, param_dtype=config.param_dtype).replace(pattern=config.pattern) == config
