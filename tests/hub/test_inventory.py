"""Names and shapes from the presets, and the comparison with a checkpoint's headers."""

import numpy as np
import pytest

from moejax import hub, presets
from moejax.hub.published_config import read_config
from moejax.hub.shards import ShardReader
from moejax.hub.verify import verify


def test_K3_has_exactly_the_published_tensors():
    """497,220 tensors and 1,503,647,073,024 stored elements: the index of moonshotai/Kimi-K3."""
    vision = hub.vision_inventory(hub.PUBLISHED_VISION)
    assert len(vision) == 168
    tower = sum(spec.size for name, spec in vision.items() if name.startswith("vision_tower."))
    assert round(tower / 1e6, 1) == 401.2 and round((sum(spec.size for spec in vision.values()) - tower) / 1e6, 1) == 46.1
    specs = hub.inventory(presets.get("kimi_k3"), vision=hub.PUBLISHED_VISION)
    assert len(specs) == 497_220
    assert sum(spec.size for spec in specs.values()) == 1_503_647_073_024
    assert specs["language_model.model.layers.1.self_attn.A_log"] == hub.TensorSpec((128,), "F32")
    assert specs["language_model.model.layers.3.self_attn.g_proj.weight"] == hub.TensorSpec((12288, 7168), "BF16")
    assert specs["language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"] == hub.TensorSpec((3584, 96), "U8")


def test_kimi_linear_has_the_published_names():
    specs = hub.inventory(presets.get("kimi_linear_48b"))
    assert specs["model.layers.0.self_attn.A_log"] == hub.TensorSpec((1, 1, 32, 1), "F32")
    assert specs["model.layers.0.mlp.gate_proj.weight"] == hub.TensorSpec((9216, 2304), "BF16")
    assert specs["model.layers.26.self_attn.q_proj.weight"] == hub.TensorSpec((6144, 2304), "BF16")
    assert specs["model.layers.1.block_sparse_moe.experts.255.w3.weight"] == hub.TensorSpec((1024, 2304), "BF16")
    assert round(sum(spec.size for spec in specs.values()) / 1e9, 1) == 49.1


@pytest.mark.parametrize(("name", "vision"), [("k3_tiny", True), ("kimi_linear_tiny", False)])
def test_inventory_is_what_the_golden_files_hold(golden_folder, name, vision):
    published = read_config(golden_folder / name)
    loaded = hub.load(golden_folder / name)
    with ShardReader(golden_folder / name) as reader:
        specs = hub.inventory(loaded.config, dtype=loaded.source.dtype, vision=published.vision)
        spelled = {loaded.source.spelling.get(key, key): spec for key, spec in specs.items()}
        assert spelled == reader.specs
        assert vision == (published.vision is not None)
        assert verify(reader, published).problems == ()


def test_packed_parameters_have_the_same_inventory():
    config = presets.get("tiny")
    assert hub.inventory(config) == hub.inventory(config.replace(moe={"expert_weights": "mxfp4"}))


def test_experts_that_cannot_be_packed_are_refused():
    with pytest.raises(ValueError, match="multiples of 32; these are 64 x 40"):
        hub.inventory(presets.get("tiny").replace(moe={"expert_width": 40, "shared_width": 80}))


def test_differences_are_named(golden_folder, tmp_path, rewrite_checkpoint):
    def change(tensors):
        tensors["vision_tower.encoder.final_layernorm.weight"] = np.ones(33, np.float32)
        del tensors["language_model.lm_head.weight"]

    folder = rewrite_checkpoint("k3_tiny", tmp_path, tensors=change)
    with ShardReader(folder) as reader:
        problems = verify(reader, read_config(folder)).problems
        assert problems == (
            "language_model.lm_head.weight: missing, expected BF16[256, 64]",
            "vision_tower.encoder.final_layernorm.weight: F32[33], expected BF16[32]",
        )
        against = verify(reader, read_config(folder), "kimi_k3").problems
    assert "layers is 8 in config.json, 93 in the preset kimi_k3" in against
    assert "moe.experts is 16 in config.json, 896 in the preset kimi_k3" in against
