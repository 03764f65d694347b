"""Where generate.py and serve.py get their model from: run folders, published checkpoints, presets, and every wrong combination."""

import json

import jax
import numpy as np
import pytest

from experiments.load_model import chat_ids, has_chat, load_model, prompt_ids, stop_ids
from moejax import HybridLM, hub
from moejax.data import ByteTokenizer, train_bpe
from moejax.data.dialog import render_dialog
from moejax.train.checkpoint import Checkpointer
from moejax.train.optimizers import make_optimizer
from moejax.train.run_config import PretrainConfig, write_run
from moejax.train.state import init_state


@pytest.fixture(scope="module")
def made(tmp_path_factory, small):
    """-> (folder with run/, hub/, model.json; the state that both hold)."""
    folder = tmp_path_factory.mktemp("load_model")
    config = small.replace(param_dtype="float32")
    settings, rng = PretrainConfig(steps=3, optimizer="muon"), np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: init_state(HybridLM(config), make_optimizer(settings.optimizer_config), key), jax.random.key(0))
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    fill = lambda leaf: jax.random.key(0) if is_key(leaf) else np.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
    state = jax.tree.map(fill, shapes)
    (folder / "run").mkdir()
    write_run(folder / "run", settings, config, {})
    with Checkpointer(folder / "run" / "checkpoint") as checkpoints:
        checkpoints.save(2, jax.tree.map(lambda leaf: leaf if is_key(leaf) else leaf * 0, state))
        checkpoints.save(3, state)
    hub.save(folder / "hub", hub.Checkpoint(config, state.params, state.router_state))
    (folder / "model.json").write_text(json.dumps(config.to_dict()))
    return folder, state


def same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def test_a_run_gives_its_newest_weights_and_a_step_its_own(made):
    folder, state = made
    model, variables, tokenizer = load_model(run=folder / "run")
    same(variables, {"params": state.params, "router_state": state.router_state})
    assert isinstance(tokenizer, ByteTokenizer) and model.config.hidden == 16
    assert all(isinstance(leaf, jax.Array) and not leaf.committed for leaf in jax.tree.leaves(variables))
    older = load_model(run=folder / "run", step=2).variables
    assert not any(leaf.any() for leaf in jax.tree.leaves(older["params"]))


def test_a_published_checkpoint_and_the_tokenizer_beside_it(made, tmp_path):
    folder, state = made
    with pytest.raises(ValueError, match=r"no tokenizer.json.*'bytes' for a model of bytes"):
        load_model(hub=folder / "hub")
    _, variables, tokenizer = load_model(hub=folder / "hub", tokenizer="bytes")
    same(variables["params"], state.params)
    assert isinstance(tokenizer, ByteTokenizer)
    trained = train_bpe(["some text to learn from, some text"] * 3, 280, folder=tmp_path)
    for file in tmp_path.iterdir():
        (folder / "hub" / file.name).write_bytes(file.read_bytes())
    found = load_model(hub=folder / "hub").tokenizer
    assert found.vocab_size == 280 and found.encode("some").tolist() == trained.encode("some").tolist()


def test_wrong_combinations_are_refused_before_anything_is_read(made):
    folder, _ = made
    model = str(folder / "model.json")
    cases = [
        ({}, "no source given"),
        ({"run": "a", "hub": "b"}, "run and hub given"),
        ({"run": "nowhere"}, "is no run folder"),
        ({"run": folder / "hub"}, "cannot be used"),
        ({"run": folder / "run", "step": 9}, r"step 9.*there are \[2, 3\]"),
        ({"run": folder / "run", "seed": 1}, "seed: only for a model from preset"),
        ({"run": folder / "run", "random_weights": True}, "random_weights: only for a model from preset"),
        ({"run": folder / "run", "keep_packed": True}, "keep_packed: only for a model from hub"),
        ({"hub": "nowhere"}, "is no folder"),
        ({"hub": folder / "hub", "step": 3}, "step: only for a model from run"),
        ({"preset": model}, "has no weights: ask for random ones"),
        ({"preset": "huge", "random_weights": True}, "unknown preset 'huge'"),
        ({"preset": "kimi_k3", "random_weights": True}, "million parameters need"),
        ({"preset": "nowhere.json", "random_weights": True}, "does not exist"),
        ({"preset": str(folder / "run" / "config.json"), "random_weights": True}, "holds no ModelConfig"),
        ({"preset": model, "random_weights": True, "tokenizer": "nowhere"}, "does not exist"),
    ]
    for arguments, words in cases:
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            load_model(**arguments)


def test_a_tokenizer_larger_than_the_model(made, tmp_path):
    folder, _ = made
    train_bpe(["".join(map(chr, range(0x4E00, 0x4E80))) * 2], 340, folder=tmp_path)
    with pytest.raises(ValueError, match="the tokenizer has 340 ids, the model 320"):
        load_model(run=folder / "run", tokenizer=str(tmp_path))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), train_bpe(["some text to learn from, some text"] * 3, 280)], ids=["bytes", "bpe"])
def test_prompts_look_like_the_training_text(tokenizer):
    text = "so <|eos|>"  # only text, whatever it spells
    assert prompt_ids(tokenizer, text) == tokenizer.encode(text, bos=True, control_tokens=False).tolist()
    asked = [{"role": "system", "content": "é"}, {"role": "user", "content": text}]
    answered = render_dialog([*asked, {"role": "assistant", "content": "yes"}], tokenizer).ids.tolist()
    ids = chat_ids(tokenizer, asked)
    assert has_chat(tokenizer) and ids[0] == tokenizer.bos_id and answered[: len(ids) - 1] == ids[1:]
    assert stop_ids(tokenizer) == (tokenizer.eos_id,) and stop_ids(tokenizer, chat=True) == tuple(sorted((tokenizer.eos_id, answered[-1])))
