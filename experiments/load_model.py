"""A model to use, from a run folder, a published checkpoint or a preset: what generate.py and serve.py start from.

N: tokens of a prompt.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro

from moejax import hub as published
from moejax import presets
from moejax.config import ModelConfig
from moejax.counting import count_parameters
from moejax.data import ByteTokenizer, chat_template, load_tokenizer
from moejax.data.dialog import render_dialog, special_id
from moejax.modules.model import HybridLM
from moejax.train.checkpoint import Checkpointer
from moejax.train.run_config import configure_compile_cache, load_run

BYTES = "bytes"
NAME = tyro.conf.arg(metavar="PATH")


class Loaded(NamedTuple):
    """What `load_model` gives: `model.apply(variables, tokenizer.encode(text)[None])`."""

    model: HybridLM
    variables: dict[str, Any]
    """{"params", "router_state"} on the default device."""
    tokenizer: Any
    """ByteTokenizer or FileTokenizer."""


def load_model(
    *,
    run: str | os.PathLike | None = None,
    hub: str | os.PathLike | None = None,
    preset: str | None = None,
    random_weights: bool = False,
    tokenizer: str | None = None,
    seed: int = 0,
    step: int | None = None,
    keep_packed: bool = False,
) -> Loaded:
    """Model, weights and tokenizer from exactly one source, on the default device.

    Args:
      run: folder of `experiments.pretrain`; its newest checkpoint, or that of `step`.
      hub: folder of published weights (`moejax.hub.load`). keep_packed: leave K3's experts in MXFP4.
      preset: a name of `moejax.presets` or a JSON file with a ModelConfig, with random weights of `seed`; `random_weights` must say
        that they are wanted.
      tokenizer: "bytes", or a tokenizer file or folder. None: bytes for a run or a preset, the files beside the weights for `hub`.

    Raises:
      ValueError: no source or several, an option of another source, a model that does not fit into memory, a tokenizer with more
        ids than the model, and what the loaders refuse. FileNotFoundError: nothing there.
    """
    sources = {"run": run, "hub": hub, "preset": preset}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"{' and '.join(given) or 'no source'} given; name exactly one: a run folder, a hub folder or a preset.")
    source = given[0]
    _check_options(
        source,
        run={"step": step},
        hub={"keep_packed": keep_packed or None},
        preset={"random_weights": random_weights or None, "seed": seed or None},
    )
    if preset is not None and not random_weights:
        raise ValueError(f"preset {preset!r} has no weights: ask for random ones (random_weights=True, --random-weights), or name a run.")
    read = None if tokenizer is None else _tokenizer(tokenizer)  # before the weights: it fails fast
    if run is not None:
        loaded = Loaded(*_from_run(run, step), read or ByteTokenizer())
    elif hub is not None:
        read = read or _tokenizer_beside(hub)
        checkpoint = published.load(hub, keep_packed=keep_packed)
        variables = {"params": checkpoint.params, "router_state": checkpoint.router_state}
        loaded = Loaded(HybridLM(checkpoint.config), variables, read)
    else:
        assert preset is not None
        loaded = Loaded(*_random(preset, seed), read or ByteTokenizer())
    have, needed = loaded.model.config.vocab_size, loaded.tokenizer.vocab_size
    if needed > have:
        raise ValueError(f"the tokenizer has {needed} ids, the model {have}; they do not belong together: name the model's own tokenizer.")
    return loaded


@dataclasses.dataclass(frozen=True)
class Source:
    """The flags that name a model; a command line's settings derive from it."""

    run: Annotated[str | None, NAME] = None
    """Folder of a training run; its newest checkpoint is used."""
    hub: Annotated[str | None, NAME] = None
    """Folder of published weights."""
    preset: str | None = None
    """Model size by name, or a JSON file that holds a ModelConfig; with --random-weights."""
    random_weights: bool = False
    """With --preset: weights that nobody trained."""
    tokenizer: str | None = None
    """A tokenizer file or folder, or "bytes". None: bytes for a run or a preset, the files beside the weights of --hub."""
    keep_packed: bool = False
    """With --hub: leave K3's experts in MXFP4, a quarter of the memory."""
    compile_cache: str = "auto"
    """Folder that keeps compiled programs; "auto": as in experiments.pretrain, "none": keep nothing."""

    def load(self, *, seed: int = 0) -> Loaded:
        """What `load_model` gives, on the device; what is compiled from here on is kept in the `compile_cache`."""
        configure_compile_cache(self.compile_cache)
        return load_model(
            run=self.run,
            hub=self.hub,
            preset=self.preset,
            random_weights=self.random_weights,
            tokenizer=self.tokenizer,
            seed=seed,
            keep_packed=self.keep_packed,
        )


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Text to go on with -> ids [N]: what the training text looks like, a bos before it where the tokenizer is ours (bytes, `train_bpe`).

    Published tokenizers put nothing before a text by themselves, and special tokens spelled in the text are found.
    """
    if _is_ours(tokenizer):
        return tokenizer.encode(text, bos=True, control_tokens=False).tolist()
    return tokenizer.encode(text).tolist()


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Messages -> ids [N] that end where the assistant begins to write: by `render_dialog` with a bos before it where the tokenizer is
    ours, else by the chat template of its files.

    ValueError: messages that they refuse, a tokenizer that has neither.
    """
    if not _has_markers(tokenizer):
        return chat_template.template_ids(tokenizer, messages).tolist()
    dialog = render_dialog(messages, tokenizer).ids.tolist()
    return [special_id(tokenizer, "bos"), *dialog, special_id(tokenizer, "assistant")]


def following_ids(tokenizer: Any, message: Mapping[str, Any]) -> list[int]:
    """What stands between an answer and the next: the end of the assistant's turn (one id), the message, the assistant's marker."""
    if not _has_markers(tokenizer):
        return chat_template.following_ids(tokenizer, message).tolist()
    added = render_dialog([message], tokenizer, start=False).ids.tolist()
    return [special_id(tokenizer, "turn_end"), *added, special_id(tokenizer, "assistant")]


def has_chat(tokenizer: Any) -> bool:
    """Whether the tokenizer has the markers of a dialog, or a chat template."""
    return _has_markers(tokenizer) or getattr(tokenizer, "chat_template", None) is not None


def stop_ids(tokenizer: Any, *, chat: bool = False) -> tuple[int, ...]:
    """The ids that end an answer: eos, and for a chat the end of the assistant's turn."""
    ends = [getattr(tokenizer, "eos_id", None)]
    if chat and has_chat(tokenizer):
        ends += [special_id(tokenizer, "turn_end")] if _has_markers(tokenizer) else chat_template.turn_end_ids(tokenizer)
    return tuple(sorted({int(i) for i in ends if i is not None}))


def _has_markers(tokenizer: Any) -> bool:
    return all(_special(tokenizer, name) is not None for name in ("bos", "system", "user", "assistant", "tool_call", "turn_end"))


def _is_ours(tokenizer: Any) -> bool:
    return _special(tokenizer, "bos") is not None and _special(tokenizer, "doc_sep") is not None


def _special(tokenizer: Any, name: str) -> int | None:
    try:
        return special_id(tokenizer, name)
    except ValueError:
        return None


def _check_options(source: str, **options: dict[str, Any]) -> None:
    for owner, values in options.items():
        set_here = [name for name, value in values.items() if value is not None]
        if owner != source and set_here:
            raise ValueError(f"{' and '.join(set_here)}: only for a model from {owner}, and this one comes from {source}; leave it out.")


def _from_run(run: str | os.PathLike, step: int | None) -> tuple[HybridLM, dict[str, Any]]:
    """Every file is compared with its checksum; of the state only what the model needs is loaded."""
    _, model_config = load_run(str(run))
    folder = pathlib.Path(run) / "checkpoint"
    if not folder.is_dir():
        raise FileNotFoundError(f"{os.fspath(run)} has no checkpoint yet (no folder {folder.name}/ in it); train it further.")
    model = HybridLM(model_config)
    made = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32)), jax.random.key(0))
    template = {"params": made["params"], "router_state": made.get("router_state", {})}
    variables, _ = Checkpointer(folder).restore(template, step=step, part=True)
    return model, variables


def _random(preset: str, seed: int) -> tuple[HybridLM, dict[str, Any]]:
    config = _preset(preset)
    _check_memory(preset, config)
    model = HybridLM(config)
    # It runs once: on a CPU LLVM's optimiser would take longer than it saves.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    variables = jax.jit(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32)), compiler_options=options)(jax.random.key(seed))
    return model, {"params": variables["params"], "router_state": variables.get("router_state", {})}


def _preset(name: str) -> ModelConfig:
    if not name.endswith(".json"):
        return presets.get(name)
    try:
        return ModelConfig.from_dict(json.loads(pathlib.Path(name).read_text()))
    except FileNotFoundError:
        raise FileNotFoundError(f"the preset's file {name!r} does not exist.") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name!r} holds no ModelConfig: {error}") from None


def _check_memory(name: str, config: ModelConfig) -> None:
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    parameters = count_parameters(config).total
    needed = parameters * jnp.dtype(config.param_dtype).itemsize
    if memory and needed > memory:
        raise ValueError(
            f"preset {name}: {parameters / 1e6:,.0f} million parameters need {needed / 2**30:,.0f} GiB, and the memory here is "
            f"{memory / 2**30:,.1f} GiB; take a smaller one (python -m moejax.presets lists them)."
        )


def _tokenizer(name: str) -> Any:
    return ByteTokenizer() if name == BYTES else load_tokenizer(name)


def _tokenizer_beside(folder: str | os.PathLike) -> Any:
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{os.fspath(folder)} is no folder; give one with config.json and safetensors files.")
    try:
        return load_tokenizer(path)
    except ValueError as error:
        raise ValueError(f"{error} (the tokenizer option names one, or is {BYTES!r} for a model of bytes)") from None
