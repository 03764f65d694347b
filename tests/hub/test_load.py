"""hub.load: the traps of the published layout, strictness, dtypes, shardings. Whole-model numbers: test_golden_*.py."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moejax import HybridLM, hub
from moejax.hub.fill import PIECE, pieces
from moejax.hub.names import Layout, parameter_table
from moejax.hub.shards import ShardReader
from moejax.parallel import MeshConfig, make_mesh

hub_load = sys.modules["moejax.hub.load"]  # `hub.load` is the function
K3 = "language_model.model.layers."
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def k3(golden_folder):
    return hub.load(golden_folder / "k3_tiny")


def leaf(tree, path):
    for key in path:
        tree = tree[key]
    return tree


# --- traps ------------------------------------------------------------------------------------------------------------


def test_padded_A_log_is_cut_and_a_tail_that_is_not_zero_refused(tmp_path, rewrite_checkpoint, k3):
    name = K3 + "2.self_attn.A_log"
    assert k3.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["mixer"]["A_log"].shape[-1] == 4
    for position, value in ((4, 1e-30), (127, np.nan)):

        def change(tensors, position=position, value=value):
            tensors[name] = tensors[name].copy()
            tensors[name][position] = value

        rewrite_checkpoint("k3_tiny", tmp_path / str(position), tensors=change)
        with pytest.raises(ValueError, match=rf"{name} holds .* at entry {position}; entries from 4 on"):
            hub.load(tmp_path / str(position))


def test_A_log_of_as_many_entries_as_heads_is_taken_and_saved_back_so(tmp_path, rewrite_checkpoint, k3):
    def change(tensors):
        for name in [name for name in tensors if name.endswith("A_log")]:
            tensors[name] = tensors[name][:4]

    rewrite_checkpoint("k3_tiny", tmp_path / "in", tensors=change)
    loaded = hub.load(tmp_path / "in")
    jax.tree.map(np.testing.assert_array_equal, loaded.params, k3.params)
    hub.save(tmp_path / "out", loaded)
    with ShardReader(tmp_path / "out") as reader:
        assert reader.specs[K3 + "2.self_attn.A_log"].shape == (4,)


def test_layer_lists_count_from_one(tmp_path, rewrite_checkpoint):
    def change(config):
        linear = config["text_config"]["linear_attn_config"]
        linear["full_attn_layers"], linear["kda_layers"] = [3, 7], [0, 1, 2, 4, 5, 6]

    with pytest.raises(ValueError, match="count from 1"):
        hub.load(rewrite_checkpoint("k3_tiny", tmp_path, config=change))


def test_experts_are_packed_because_the_names_say_so(tmp_path, rewrite_checkpoint, k3):
    """The ignore patterns of quantization_config do not name the latent projections, which are not packed; and without
    any quantization_config packed names are still packed."""
    sub = k3.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]
    assert sub["latent_down"].dtype == sub["expert_gate"].dtype == jnp.bfloat16
    folder = rewrite_checkpoint("k3_tiny", tmp_path, config=lambda c: c["text_config"].pop("quantization_config"))
    jax.tree.map(np.testing.assert_array_equal, hub.load(folder).params, k3.params)


def test_another_quantization_is_refused(tmp_path, rewrite_checkpoint):
    def change(config):
        config["text_config"]["quantization_config"]["format"] = "nvfp4-pack-quantized"

    with pytest.raises(ValueError, match="nvfp4-pack-quantized"):
        hub.load(rewrite_checkpoint("k3_tiny", tmp_path, config=change))


def test_parts_that_are_not_built_are_kept_verbatim(k3, golden_folder):
    with ShardReader(golden_folder / "k3_tiny") as reader:
        unused = {K3 + f"0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
        vision = {name for name in reader.specs if name.startswith(("vision_tower.", "mm_projector."))}
        assert len(vision) == 24
        assert k3.extra.keys() == unused | vision
        for name, value in k3.extra.items():
            assert value.tobytes() == reader.read(name).tobytes() and value.dtype == reader.read(name).dtype


def test_mtp_layers_behind_the_trunk_are_kept(tmp_path, rewrite_checkpoint):
    name = K3 + "8.eh_proj.weight"
    more = lambda t: t.update({name: np.ones((2, 3), BF16)})
    told = lambda c: c["text_config"].update(num_nextn_predict_layers=1)
    assert hub.load(rewrite_checkpoint("k3_tiny", tmp_path, tensors=more, config=told)).extra[name].shape == (2, 3)
    with pytest.raises(ValueError, match=r"layers\.8\.eh_proj\.weight: BF16\[2, 3\] in the files, not expected"):
        hub.load(rewrite_checkpoint("k3_tiny", tmp_path, tensors=more))


def test_half_a_model_is_refused(tmp_path, rewrite_checkpoint):
    def change(config):
        config["text_config"]["num_hidden_layers"] = 4
        config["text_config"]["linear_attn_config"].update(full_attn_layers=[4], kda_layers=[1, 2, 3])

    with pytest.raises(ValueError, match=r"layers\.7\..*not expected"):
        hub.load(rewrite_checkpoint("k3_tiny", tmp_path, config=change))


def test_dense_layer_under_either_name(golden_folder, tmp_path, rewrite_checkpoint):
    def change(tensors):
        for part in ("gate", "up", "down"):
            old = f"model.layers.0.block_sparse_moe.{part}_proj.weight"
            tensors[old.replace("block_sparse_moe", "mlp")] = tensors.pop(old)

    theirs = hub.load(golden_folder / "kimi_linear_tiny")
    ours = hub.load(rewrite_checkpoint("kimi_linear_tiny", tmp_path, tensors=change))
    assert len(theirs.source.spelling) == 3 and not ours.source.spelling
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_convolutions_in_bfloat16_as_kimi_linear_48b_keeps_them(tmp_path, rewrite_checkpoint):
    """Read without loss into float32, written back as bfloat16; K3 keeps float32 and nothing else is taken there."""

    def narrow(tensors):
        for name, value in tensors.items():
            if not name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
                tensors[name] = value.astype(BF16)

    source = rewrite_checkpoint("kimi_linear_tiny", tmp_path / "in", tensors=narrow, config=lambda c: c.update(dtype="bfloat16"))
    loaded = hub.load(source)
    mixer = loaded.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["mixer"]
    assert (mixer["q_conv"].dtype, mixer["q_proj"].dtype) == (jnp.float32, jnp.bfloat16)
    hub.save(tmp_path / "out", loaded)
    with ShardReader(source) as a, ShardReader(tmp_path / "out") as b:
        assert a.specs == b.specs
        assert all(a.read(name).tobytes() == b.read(name).tobytes() for name in a.specs)
    name = K3 + "1.self_attn.q_conv1d.weight"
    folder = rewrite_checkpoint("k3_tiny", tmp_path / "k3", tensors=lambda t: t.update({name: t[name].astype(BF16)}))
    with pytest.raises(ValueError, match=r"q_conv1d.weight: BF16\[128, 1, 4\] in the files, expected F32"):
        hub.load(folder)


# --- strictness ---------------------------------------------------------------------------------------------------------


def damage(tensors):
    tensors.pop("language_model.model.norm.weight")
    tensors.pop(K3 + "1.block_sparse_moe.experts.3.w2.weight_scale")
    tensors[K3 + "4.self_attn.q_proj.weight"] = tensors[K3 + "4.self_attn.q_proj.weight"][:-1]
    tensors[K3 + "5.block_sparse_moe.gate.e_score_correction_bias"] = np.ones(16, BF16)
    tensors["language_model.model.layers.3.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)


LINES = (
    "language_model.model.norm.weight: missing, expected BF16[64]",
    K3 + "1.block_sparse_moe.experts.3.w2.weight_scale: missing, expected U8[32, 2]",
    K3 + "4.self_attn.q_proj.weight: BF16[127, 64] in the files, expected BF16[128, 64]",
    K3 + "5.block_sparse_moe.gate.e_score_correction_bias: BF16[16] in the files, expected F32[16]",
    K3 + "3.self_attn.rotary_emb.inv_freq: F32[4] in the files, not expected",
)


def test_every_tensor_that_does_not_fit_is_in_one_error(tmp_path, rewrite_checkpoint):
    with pytest.raises(ValueError) as error:
        hub.load(rewrite_checkpoint("k3_tiny", tmp_path, tensors=damage))
    assert "5 tensors" in str(error.value)
    for line in LINES:
        assert line in str(error.value)


def test_not_strict_takes_the_rest_and_names_what_it_did(tmp_path, rewrite_checkpoint, k3):
    folder = rewrite_checkpoint("k3_tiny", tmp_path, tensors=damage)
    with pytest.warns(UserWarning, match="5 tensors") as warned:
        loaded = hub.load(folder, strict=False)
    assert set(loaded.skipped) == set(LINES) and all(line in str(warned[0].message) for line in LINES)
    np.testing.assert_array_equal(loaded.params["final_norm"]["weight"], np.ones(64))  # initial value
    block = loaded.params["stack"]["blocks_0"]
    down, kept = (
        block["run_1"]["layer_0"]["sub"]["ffn"]["expert_down"],
        k3.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]["expert_down"],
    )
    assert np.any(np.asarray(down[0, 0, 3] != kept[0, 0, 3])) and 0.01 < np.std(np.asarray(down[0, 0, 3], np.float32)) < 0.03
    np.testing.assert_array_equal(np.delete(down[0, 0], 3, 0), np.delete(kept[0, 0], 3, 0))
    biases = jax.tree.leaves(loaded.router_state)
    assert all(bias.dtype == np.float32 for bias in biases) and any((np.asarray(bias) == 1).all(-1).any() for bias in biases)
    assert LINES[-1].split(":")[0] in loaded.extra
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(k3.params), strict=True)]
    assert same.count(False) == 3  # final norm, one expert, one q_proj


def test_not_strict_keeps_codes_and_scales_together(tmp_path, rewrite_checkpoint):
    """A kept-packed matrix without its scales gets initial codes, too: the file's codes would be of a wrong size."""
    name = K3 + "1.block_sparse_moe.experts.3.w2.weight_scale"
    folder = rewrite_checkpoint("k3_tiny", tmp_path, tensors=lambda t: t.pop(name))
    with pytest.warns(UserWarning, match="1 tensors"):
        loaded = hub.load(folder, strict=False, keep_packed=True)
    ffn = loaded.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]
    values = hub.mxfp4_decode(np.asarray(ffn["expert_down_codes"])[0, 0], np.asarray(ffn["expert_down_scales"])[0, 0])
    assert 0.015 < values[3].std() < 0.025 and values[2].std() > 0.05  # initial values; the file's are larger
    with ShardReader(folder) as reader:
        assert not np.array_equal(ffn["expert_down_codes"][0, 0, 3], reader.read(name.replace("_scale", "_packed")))


def test_what_was_converted_is_saved_as_it_should_be(tmp_path, rewrite_checkpoint):
    """M3: a selection bias that a file held in bfloat16 is float32 here, and stays so."""
    name = K3 + "5.block_sparse_moe.gate.e_score_correction_bias"
    folder = rewrite_checkpoint("k3_tiny", tmp_path / "in", tensors=lambda t: t.update({name: t[name].astype(BF16)}))
    with pytest.warns(UserWarning, match="1 tensors"):
        loaded = hub.load(folder, strict=False)
    hub.save(tmp_path / "out", loaded)
    with ShardReader(tmp_path / "out") as reader:
        assert reader.specs[name].dtype == "F32"
    assert hub.load(tmp_path / "out").skipped == ()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_act", "gelu", "hidden_act is 'gelu'; situ and silu"),
        ("moe_router_activation_func", "softmax", "moe_router_activation_func is 'softmax'; only 'sigmoid'"),
        ("num_expert_group", 8, "num_expert_group is 8"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True"),
        ("mla_use_nope", False, "mla_use_nope is False"),
        ("num_key_value_heads", 2, "num_key_value_heads is 2; it must equal num_attention_heads = 4"),
        ("hidden_size", None, "hidden_size is missing"),
        ("dtype", "float16", "dtype 'float16'"),
        ("model_type", "deepseek_v3", "model_type 'deepseek_v3'"),
    ],
)
def test_settings_of_another_model_are_refused(tmp_path, rewrite_checkpoint, key, value, words):
    def change(config):
        config["text_config"].update({key: value})
        if value is None:
            del config["text_config"][key]

    with pytest.raises(ValueError, match=words):
        hub.load(rewrite_checkpoint("k3_tiny", tmp_path, config=change))


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("linear_attn_config", {"head_dim": None}, "linear_attn_config.head_dim is missing"),
        ("linear_attn_config", {"num_heads": "4"}, "linear_attn_config.num_heads is '4'; it must be an integer"),
        ("linear_attn_config", {"full_attn_layers": None}, "linear_attn_config.full_attn_layers is missing"),
        ("linear_attn_config", {"allow_neg_eigval": True}, "linear_attn_config.allow_neg_eigval is not known"),
        ("moejax", {"remta": "full"}, "moejax.remta is not known"),
        (None, {"linear_attn_config": None}, "linear_attn_config is missing"),
        (None, {"num_experts": None}, "num_experts is missing"),
        (None, {"num_hidden_layers": "8"}, "num_hidden_layers is '8'; it must be an integer"),
        (None, {"rms_norm_eps": True}, "rms_norm_eps is True; it must be a number"),
    ],
)
def test_damaged_settings_are_one_error(tmp_path, rewrite_checkpoint, section, changes, words):
    def change(config):
        text = config["text_config"]
        (text if section is None else text.setdefault(section, {})).update(changes)

    with pytest.raises(ValueError, match=words):
        hub.load(rewrite_checkpoint("k3_tiny", tmp_path, config=change))


def test_unknown_settings_are_named(tmp_path, rewrite_checkpoint):
    folder = rewrite_checkpoint("k3_tiny", tmp_path, config=lambda c: c["text_config"].update(new_thing=1))
    with pytest.warns(UserWarning, match="does not use: new_thing"):
        hub.load(folder)


def test_bad_arguments(golden_folder):
    with pytest.raises(ValueError, match="float16"):
        hub.load(golden_folder / "k3_tiny", param_dtype="float16")
    with pytest.raises(ValueError, match="jax_enable_x64"):
        hub.load(golden_folder / "k3_tiny", param_dtype="float64")
    with pytest.raises(ValueError, match="not packed"):
        hub.load(golden_folder / "kimi_linear_tiny", keep_packed=True)
    with pytest.raises(ValueError, match="shardings has no entry for params/embedding"):
        hub.load(golden_folder / "k3_tiny", shardings={"params": {}, "router_state": {}})
    loaded = hub.load(golden_folder / "kimi_linear_tiny")
    mesh = make_mesh(MeshConfig(fsdp=8))
    tree = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), {"params": loaded.params, "router_state": loaded.router_state})
    with pytest.raises(ValueError, match=r"leaves, the model"):
        hub.load(golden_folder / "kimi_linear_tiny", shardings={**tree, "other": NamedSharding(mesh, PartitionSpec())})
    seven = make_mesh(MeshConfig(fsdp=7))
    tree["params"]["final_norm"]["weight"] = NamedSharding(seven, PartitionSpec("fsdp"))  # of 48 channels
    with pytest.raises(ValueError, match="params/final_norm/weight does not fit"):
        hub.load(golden_folder / "kimi_linear_tiny", shardings=tree)


# --- dtypes, packing ------------------------------------------------------------------------------------------------------


def test_dtypes_as_stored_or_as_asked(k3, golden_folder):
    wide = {"q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "out_norm"}
    for path, value in jax.tree_util.tree_leaves_with_path(k3.params):
        assert value.dtype == (jnp.float32 if path[-1].key in wide else jnp.bfloat16), path
    assert k3.config.param_dtype == "bfloat16"
    asked = hub.load(golden_folder / "k3_tiny", param_dtype="float32")
    assert asked.config == k3.config.replace(param_dtype="float32")
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b, np.float32)), asked.params, k3.params)
    expected = jax.eval_shape(HybridLM(k3.config).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    shapes = {"params": k3.params, "router_state": k3.router_state}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), dict(expected))


def test_kept_packed_is_the_files_bytes(golden_folder):
    packed = hub.load(golden_folder / "k3_tiny", keep_packed=True)
    assert packed.config.moe.expert_weights == "mxfp4"
    ffn = packed.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]
    with ShardReader(golden_folder / "k3_tiny") as reader:
        for leaf_name, part in (("expert_gate", "w1"), ("expert_up", "w3"), ("expert_down", "w2")):
            stored = f"{K3}1.block_sparse_moe.experts.5.{part}.weight"
            np.testing.assert_array_equal(ffn[f"{leaf_name}_codes"][0, 0, 5], reader.read(stored + "_packed"))
            np.testing.assert_array_equal(ffn[f"{leaf_name}_scales"][0, 0, 5], reader.read(stored + "_scale"))
    assert not {"expert_gate", "expert_up", "expert_down"} & ffn.keys()


@pytest.mark.parametrize("keep_packed", [False, True])
def test_F1_scale_bytes_at_the_ends(tmp_path, rewrite_checkpoint, keep_packed):
    """Scale byte 0 is 2^-127, not 0; 134 is 128, no NaN mark; 255 is NaN and refused by name."""
    name = K3 + "1.block_sparse_moe.experts.2.w1.weight"

    def change(byte):
        def apply(tensors):
            codes, scales = tensors[name + "_packed"].copy(), tensors[name + "_scale"].copy()
            codes[3], scales[3] = 0x26, byte  # code 6 (= 4.0) in the even columns, code 2 (= 1.0) in the odd ones
            tensors[name + "_packed"], tensors[name + "_scale"] = codes, scales

        return apply

    values = {
        0: (2.3509887e-38, 5.877472e-39),
        1: (4.7019774e-38, 1.1754944e-38),
        127: (4, 1),
        134: (512, 128),
        254: (np.inf, 1.7014118e38),
    }
    for byte, wanted in values.items():
        folder = rewrite_checkpoint("k3_tiny", tmp_path / "in", tensors=change(byte))
        loaded = hub.load(folder, param_dtype="float32", keep_packed=keep_packed)
        ffn = loaded.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]
        if keep_packed:
            row = hub.mxfp4_decode(np.asarray(ffn["expert_gate_codes"])[0, 0, 2, 3], np.asarray(ffn["expert_gate_scales"])[0, 0, 2, 3])
        else:
            row = np.asarray(ffn["expert_gate"])[0, 0, 2, :, 3]
        np.testing.assert_array_equal(row, np.tile(np.float32(wanted), 16))
        if byte < 254:  # infinite weights cannot be packed again, kept codes can
            hub.save(tmp_path / "out", loaded)
        elif not keep_packed:
            with pytest.raises(ValueError, match=r"experts\.2\.w1 cannot be packed"):
                hub.save(tmp_path / "out", loaded)
        if keep_packed:
            hub.save(tmp_path / "out", loaded)
            with ShardReader(folder) as a, ShardReader(tmp_path / "out") as b:
                assert all(a.read(part).tobytes() == b.read(part).tobytes() for part in a.specs)
    with pytest.raises(ValueError, match=r"experts\.2\.w1\.weight_scale holds scale byte 255"):
        hub.load(rewrite_checkpoint("k3_tiny", tmp_path / "in", tensors=change(255)), keep_packed=keep_packed)


# --- shardings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_packed", [False, True])
def test_loads_straight_into_shards(golden_folder, keep_packed):
    plain = hub.load(golden_folder / "k3_tiny", keep_packed=keep_packed)
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    sharded = hub.load(golden_folder / "k3_tiny", shardings=mesh, keep_packed=keep_packed)
    jax.tree.map(np.testing.assert_array_equal, sharded.params, plain.params)
    jax.tree.map(np.testing.assert_array_equal, sharded.router_state, plain.router_state)
    experts = sharded.params["stack"]["blocks_0"]["run_1"]["layer_0"]["sub"]["ffn"]["expert_gate_codes" if keep_packed else "expert_gate"]
    assert len({str(shard.index) for shard in experts.addressable_shards}) == 8
    assert not experts.sharding.is_fully_replicated


def test_any_tree_of_shardings(golden_folder, k3):
    mesh = make_mesh(MeshConfig(fsdp=8))
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: whole, {"params": k3.params, "router_state": k3.router_state})
    shardings["params"]["embedding"] = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    loaded = hub.load(golden_folder / "k3_tiny", shardings=shardings)
    assert loaded.params["embedding"].sharding == shardings["params"]["embedding"]
    jax.tree.map(np.testing.assert_array_equal, loaded.params, k3.params)


@pytest.mark.parametrize("keep_packed", [False, True])
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"fsdp": 2, "tensor": 4}, {"fsdp": 2, "expert": 4}], ids=str)
def test_no_byte_is_read_twice_and_the_bar_ends_full(golden_folder, monkeypatch, axes, keep_packed):
    """Shards of 8 to 64 columns, whose rows are read once for all of them. Read twice: kv_b_proj, for keys and for values,
    and what goes to `extra` as well."""
    seen, done, bars = [], [], []
    close, start = ShardReader.close, hub_load.Progress.__init__
    monkeypatch.setattr(ShardReader, "close", lambda reader: (seen.append(reader.bytes_read), close(reader)))
    monkeypatch.setattr(hub_load.Progress, "__init__", lambda bar, total, show: (bars.append(total), start(bar, total, show))[1])
    monkeypatch.setattr(hub_load.Progress, "__enter__", lambda bar: done.append)
    loaded = hub.load(golden_folder / "k3_tiny", shardings=make_mesh(MeshConfig(**axes)), keep_packed=keep_packed)
    with ShardReader(golden_folder / "k3_tiny") as reader:
        once = sum(spec.nbytes for spec in reader.specs.values())
        again = lambda name: "kv_b_proj" in name or name.startswith(K3 + "0.self_attention_res")
        twice = sum(spec.nbytes for name, spec in reader.specs.items() if again(name))
    assert seen[0] == once + twice
    assert sum(done) == bars[0] > 0
    assert loaded.params["head"].sharding.mesh.size == 8


def test_pieces_cover_a_parameter_once_along_the_stored_rows(k3):
    config = k3.config.replace(vocab_size=3 * PIECE // 64 + 5)
    for parameter in parameter_table(config, Layout(True, True)):
        if parameter.path in (("embedding",), ("head",)):
            rule = parameter.rule
            seen = np.zeros(rule.shape, np.int32)
            cut = list(pieces(rule, tuple(slice(0, size) for size in rule.shape)))
            for piece in cut:
                seen[piece] += 1
            assert len(cut) == 4 and (seen == 1).all()


# --- what it must not need --------------------------------------------------------------------------------------------------


def test_never_imports_torch_or_the_formats_package(golden_folder):
    code = (
        "import sys; from moejax import hub; hub.load(sys.argv[1], progress=True);"
        "bad = {'torch', 'safetensors', 'transformers', 'tensorflow', 'orbax'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code, str(golden_folder / "k3_tiny")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "loading weights" in done.stderr and not done.stdout
