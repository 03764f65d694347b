"""Shared test set-up: 8 forced CPU devices, and a loader for the golden vectors in tests/golden."""

import gc
import os
import pathlib
import sys

# pytest -m gpu: the card first, and the CPU for float64 references.
os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if "gpu" in sys.argv else "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"] and "gpu" not in sys.argv:
    # Tests compile far more than they compute: without LLVM's optimiser a train step compiles in less than half the time.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"

import numpy as np
import pytest

MOST_MAPS = 20000
GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def no_cache_of_programs():
    """A test that leaves JAX's cache of compiled programs on makes later ones read programs of other processes, which can crash them."""
    import jax

    before = jax.config.jax_compilation_cache_dir
    yield
    after = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", before)
    assert after == before, f"this test left jax_compilation_cache_dir at {after}; pass --compile-cache none"


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Every compiled program takes memory maps, and Linux gives a process 65530: past them XLA's compiler crashes the worker."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MOST_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def golden():
    """golden("kda/prod_T17.npz") -> {name: numpy array}."""

    def load(name: str) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / name) as file:
            return {key: file[key] for key in file.files}

    return load


@pytest.fixture(scope="session")
def golden_folder() -> pathlib.Path:
    return GOLDEN


@pytest.fixture
def x64():
    """Run one test with float64 enabled."""
    import jax

    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def toy():
    """Every part of the model with the fewest channels and the fewest layers to compile: KDA, MLA, KDA in blocks of 2."""
    from moejax import KDAConfig, MLAConfig, ModelConfig, MoEConfig

    return ModelConfig(
        vocab_size=64,
        hidden=24,
        layers=3,
        pattern="KMK",
        dense_width=40,
        residual_block=2,
        remat="none",
        kda=KDAConfig(heads=2, key_dim=8, value_dim=12, value_heads=4),
        mla=MLAConfig(heads=2, nope_dim=8, rope_dim=4, value_dim=12, q_latent=16, kv_latent=16),
        moe=MoEConfig(experts=6, experts_per_token=2, expert_width=16, latent=20, shared_width=16),
    )


@pytest.fixture(scope="session")
def short_toy(toy):
    """KDA with a dense feed-forward, then MLA with experts, in two blocks: every part and kind of cache in two layers."""
    return toy.replace(dtype="float32", layers=2, pattern="KM", residual_block=1)


@pytest.fixture(scope="session")
def small():
    """For programs in processes of their own: the tiny preset, of bytes, with one KDA and one MLA layer and the fewest channels."""
    from moejax import presets

    return presets.get("tiny").replace(
        hidden=16,
        layers=2,
        pattern="KM",
        dense_width=16,
        residual_block=1,
        kda={"heads": 1, "key_dim": 8, "value_dim": 8},
        mla={"heads": 1, "nope_dim": 8, "rope_dim": 4, "value_dim": 8, "q_latent": 8, "kv_latent": 8},
        moe={"experts": 4, "experts_per_token": 2, "expert_width": 8, "latent": 8, "shared_width": 8},
    )


@pytest.fixture(scope="session")
def drawn():
    """drawn(model): every variable from a normal distribution, norms around 1: what init and noise would give, without its compile."""
    import jax
    import jax.numpy as jnp

    def draw(model):
        rng = np.random.default_rng(1)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))
        around = lambda path: float("norm" in path[-1].key or path[-1].key == "weight")
        one = lambda path, leaf: jnp.asarray(around(path) + 0.2 * rng.normal(size=leaf.shape), leaf.dtype)
        return jax.tree_util.tree_map_with_path(one, shapes)

    return draw


def seeded(tree, key, scale=0.3):
    """`tree` plus noise, so that zero-initialised queries and equal norms do not hide mistakes."""
    import jax

    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noisy = [leaf + scale * jax.random.normal(k, leaf.shape, leaf.dtype) for leaf, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, noisy)


@pytest.fixture(scope="session")
def noisy():
    """seeded(tree, key, scale): a copy with noise on every leaf."""
    return seeded


@pytest.fixture(scope="session")
def rewrite_checkpoint():
    """rewrite_checkpoint("k3_tiny", folder, tensors=..., config=...): a golden checkpoint with changes, in one file.

    tensors({name: array}) and config(config.json as a dict) change what they are given.
    """
    import json

    from moejax.hub.shards import CODES, ShardReader, TensorSpec, write_shard

    def rewrite(name, folder, *, tensors=None, config=None):
        with ShardReader(GOLDEN / name) as reader:
            arrays = {key: reader.read(key) for key in reader.specs}
        settings = json.loads((GOLDEN / name / "config.json").read_text())
        if tensors is not None:
            tensors(arrays)
        if config is not None:
            config(settings)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").unlink(missing_ok=True)
        specs = {key: TensorSpec(tuple(value.shape), CODES[value.dtype]) for key, value in arrays.items()}
        write_shard(folder / "model.safetensors", specs, lambda key: arrays[key], {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    return rewrite


@pytest.fixture(scope="session")
def sparse_checkpoint():
    """sparse_checkpoint(config, folder, files=1, vision=None): headers and config.json of a published checkpoint whose
    weights are holes in the files, read as zeros. It takes no space on the disk, whatever its size."""
    import json
    import struct

    from moejax import hub
    from moejax.hub.written_config import published_config

    def write(config, folder, *, files=1, vision=None):
        outer = config.kda.lower_bound is not None
        specs = hub.inventory(config, vision=vision)
        names, weight_map = list(specs), {}
        for number in range(files):
            file = f"model-{number + 1:05}-of-{files:06}.safetensors"
            header, offset = {}, 0
            for name in names[number::files]:
                spec = specs[name]
                header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, offset + spec.nbytes]}
                offset += spec.nbytes
                weight_map[name] = file
            text = json.dumps(header).encode()
            with (folder / file).open("wb") as out:
                out.write(struct.pack("<Q", len(text)) + text)
                out.truncate(8 + len(text) + offset)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        made = published_config(config, None, outer=outer, packed=outer, dtype="bfloat16").raw
        (folder / "config.json").write_text(json.dumps(made if vision is None else {**made, "vision_config": vision}))
        return specs

    return write


@pytest.fixture(scope="session")
def gpu():
    """For tests marked `gpu`: the card is there, the default, and the kernels can be used."""
    import jax

    from moejax.kernels.kda import kda_implementation

    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("needs an NVIDIA GPU: python -m pytest -m gpu, in a process of its own")
    assert kda_implementation("cuda") == "triton" and jax.default_backend() == "gpu"
