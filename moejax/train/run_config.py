"""Settings of a pre-training run, its folder, and what may change when it is taken up again."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import time
from collections.abc import Sequence
from typing import Any, Literal

import jax

from .. import __version__, presets
from ..config import ModelConfig
from ..counting import count_parameters
from ..modules.model import compute_dtype
from ..parallel import MeshConfig
from .alarms import MonitorConfig
from .caretaker import SafetyConfig
from .observation import ObserveConfig
from .optimizers import OptimizerConfig
from .strength import Strength

DEFAULT_STEPS = 200
DEFAULT_MINUTES = 4.3  # with 15-20 s of scoring and pictures after it: under 5 minutes

# What a resumed run may be given anew; everything else decides the numbers.
FREE_ON_RESUME = ("resume", "minutes", "stop_after", "checkpoint_every", "profile", "compile_cache", "prompt")
FREE_ON_RESUME += ("sample_bytes", "temperature", "corpus", "mesh")  # the corpus is checked by its hash; any mesh, same numbers
FREE_ON_RESUME += ("data_workers", "safety", "observe", "metrics_port", "on_damage")
FREE_ON_EVALUATE = ("on_damage", "evaluate", "heldout_rows", "corpus", "compile_cache", "mesh")
PROFILED_STEPS = (3, 8)  # of this process: past the compile, and few enough for a small trace


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Train a hybrid language model on text. Without arguments: the tiny model on this Python's standard library, a few
    minutes on two CPU cores. Ctrl-C ends a run cleanly; --resume goes on from where it stopped, bit for bit."""

    preset: str = "tiny"
    """Model size by name (python -m moejax.presets lists them), or a JSON file that holds a ModelConfig."""
    steps: int | None = None
    """Optimizer steps, which the learning-rate schedule spans. None: 200, ended after 4.3 minutes if need be."""
    minutes: float | None = None
    """End cleanly after so many minutes of training (--resume goes on). None: no limit when --steps is given."""
    stop_after: int | None = None
    """End cleanly after this step; the schedule still spans --steps."""
    batch: int = 8
    """Rows of a batch (of one micro-batch)."""
    micro_batches: int = 1
    """Batches whose gradients are summed for one step."""
    context: int = 256
    """Tokens of a row."""
    packing: Literal["concat_split", "first_fit", "best_fit", "one_doc"] = "concat_split"
    """How documents become rows (moejax.data.packing). "concat_split" pads nothing and cuts documents at every row's end."""
    data_workers: int = 0
    """Processes that make batches ahead (grain). 0: batches are made between steps, which suits text in memory."""
    optimizer: Literal["adamw", "muon"] = "muon"
    """"muon": per-head Muon for the matrices, AdamW for the rest (K3)."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Of the learning rate after the warm-up: down a cosine, or level and then down."""
    qk_clip: float | None = None
    """Scale MLA's query and key projections of a head back when its largest attention logit exceeds this (K2, K3: 100)."""
    learning_rate: float = 3e-3
    """Peak of the schedule."""
    warmup_fraction: float = 0.05
    """Share of the steps in which the learning rate rises to its peak (K3: 1%, which would be 2 of 200 steps)."""
    weight_decay: float = 0.1
    balance: str | None = None
    """Balancing rule: quantile, quantile_exact, sign, load_quantile, median_band, aux_loss, none. None: as preset."""
    strength: Strength = dataclasses.field(default_factory=Strength)
    """Strengths of the balancing rule; those that it does not read must keep their defaults. A run keeps its own: they
    cannot be given anew with --resume."""
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    """Devices along each mesh axis; all 1: one device. The same numbers on any mesh, within float32 rounding."""
    seed: int = 0
    """Of the initial weights and the order of the text."""
    corpus: str | None = None
    """Folder of text files to learn instead of the standard library."""
    heldout_rows: int = 128
    """Rows of held-out text that are scored before and after."""
    out: str = "runs"
    """Folder in which the run's folder is made."""
    resume: str | None = None
    """Run folder whose latest checkpoint to go on from, with the settings it was started with."""
    evaluate: str | None = None
    """Run folder whose latest checkpoint to score on the held-out text; trains nothing."""
    on_damage: Literal["raise", "previous"] = "raise"
    """When the newest checkpoint's files are not what was written: "raise" says what is wrong, "previous" takes the one before."""
    checkpoint_every: int = 100
    """Steps between checkpoints (one more at the end)."""
    safety: SafetyConfig = dataclasses.field(default_factory=SafetyConfig)
    """Alarms, rollback, snapshots, probes of the hardware, stalls."""
    observe: ObserveConfig = dataclasses.field(default_factory=ObserveConfig)
    """What is written beside metrics.jsonl."""
    metrics_port: int | None = None
    """Serve the metrics for Prometheus on this port of 127.0.0.1; 0: any free one."""
    profile: bool = False
    """Record steps 3 to 8 with jax.profiler into the run folder."""
    compile_cache: str = "auto"
    """Folder that keeps compiled programs between runs; "auto": JAX_COMPILATION_CACHE_DIR, else in the user's cache folder; "none":
    keep nothing."""
    prompt: str = "def "
    """Text that the sample at the end continues."""
    sample_bytes: int = 160
    """Length of the sample; 0: none."""
    temperature: float = 0.7
    """Of the sample; 0: always the likeliest byte."""

    def __post_init__(self) -> None:
        for name in ("steps", "stop_after", "batch", "micro_batches", "heldout_rows", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
        if self.context < 2:
            raise ValueError(f"--context is {self.context}; it must be at least 2: a token and its target.")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"--minutes is {self.minutes}; it must be positive.")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"--metrics-port is {self.metrics_port}; it must lie in [0, 65535] (0: any free port).")
        if self.data_workers and importlib.util.find_spec("grain") is None:
            raise ValueError(
                f"--data-workers is {self.data_workers}, and grain is not installed: pip install 'moejax[data]', or 0 workers."
            )
        if self.data_workers < 0:
            raise ValueError(f"--data-workers is {self.data_workers}; it must not be negative.")
        if self.sample_bytes < 0 or self.temperature < 0:
            raise ValueError(f"--sample-bytes is {self.sample_bytes}, --temperature {self.temperature}; neither may be negative.")
        if self.sample_bytes and not self.prompt:
            raise ValueError("--prompt is empty; give at least one character, or --sample-bytes 0 for no sample.")
        if self.resume and self.evaluate:
            raise ValueError("--resume and --evaluate exclude each other: train on, or score.")
        rows = self.mesh.data * self.mesh.fsdp * self.mesh.expert
        if self.batch % rows:
            raise ValueError(f"--batch is {self.batch}; --mesh.data x fsdp x expert = {rows} must divide it.")
        if self.context % self.mesh.sequence:
            raise ValueError(f"--context is {self.context}; --mesh.sequence {self.mesh.sequence} must divide it.")
        last = min(self.total_steps, self.stop_after or self.total_steps)
        if self.profile and not self.resume and last < PROFILED_STEPS[0]:
            raise ValueError(f"--profile records from step {PROFILED_STEPS[0]} on, but the run ends at step {last}.")
        self.safety.promotion(self.checkpoint_every)  # raises when no checkpoint could become known good
        _ = self.optimizer_config  # raises for a bad rate or decay now, not after the text is read

    @property
    def optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(
            kind=self.optimizer,
            schedule=self.schedule,
            qk_clip=self.qk_clip,
            learning_rate=self.learning_rate,
            total_steps=self.total_steps,
            warmup_fraction=self.warmup_fraction,
            weight_decay=self.weight_decay,
        )

    @property
    def total_steps(self) -> int:
        return DEFAULT_STEPS if self.steps is None else self.steps

    @property
    def time_limit(self) -> float | None:
        """Minutes."""
        return DEFAULT_MINUTES if self.steps is None and self.minutes is None else self.minutes

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.micro_batches * self.context

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def model_config(config: PretrainConfig, vocab_size: int) -> ModelConfig:
    """The model that `config` asks for, with the dtype of this machine written in: a run that goes on elsewhere keeps it.

    ValueError: no such model, a vocabulary smaller than the tokenizer's, a strength that its balancing rule ignores.
    """
    if config.preset.endswith(".json"):
        try:
            model = ModelConfig.from_dict(_json_object(pathlib.Path(config.preset)))
        except FileNotFoundError:
            raise ValueError(f"--preset names the file {config.preset!r}, which does not exist.") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"--preset {config.preset!r} holds no ModelConfig: {error}") from None
    else:
        model = presets.get(config.preset)
    if config.balance is not None:
        model = model.replace(moe={"balance": config.balance})
    if model.vocab_size < vocab_size:
        raise ValueError(f"the model's vocab_size is {model.vocab_size}; the byte tokenizer needs {vocab_size}.")
    config.strength.check(model.moe.balance)
    return model.replace(dtype=str(compute_dtype(model)))


def check_memory(name: str, model: ModelConfig, memory: int | None = None, devices: int = 1) -> None:
    """ValueError when training `model` cannot fit: 16 bytes a float32 parameter (itself, gradient, two moments).

    memory: bytes; None: what `devices` devices may use together, or the host's when they are a CPU's. Activations and copies
    come on top, so a model that passes may still be too large.
    """
    memory = _memory(devices) if memory is None else memory
    parameters = count_parameters(model).total
    size = jax.numpy.dtype(model.param_dtype).itemsize
    needed = parameters * (2 * size + 2 * max(size, 4))  # moments are float32 at least
    if memory and needed > memory:
        raise ValueError(
            f"--preset {name}: {parameters / 1e6:,.1f} million parameters need {needed / 2**30:,.0f} GiB (parameters, gradient and two "
            f"moments), and the memory here is {memory / 2**30:,.1f} GiB. Take a smaller model (python -m moejax.presets lists them with "
            "their sizes; tiny runs anywhere), or more devices (--mesh.fsdp, --mesh.expert)."
        )


def _memory(devices: int) -> int | None:
    """Bytes of so many devices; None where the platform does not say."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return devices * (device.memory_stats() or {}).get("bytes_limit", 0) or None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def new_run_folder(config: PretrainConfig) -> pathlib.Path:
    """Make <out>/<time>-<preset>, never one that exists."""
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{pathlib.Path(config.preset).stem}"
    for number in range(1, 1000):
        folder = pathlib.Path(config.out) / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise ValueError(f"{config.out} holds 999 runs called {name}; give another --out.")


def write_run(folder: pathlib.Path, config: PretrainConfig, model: ModelConfig, manifest: dict, domains: Sequence[str] = ()) -> None:
    """config.json: what reproduces the run, and the names of its domains by number."""
    versions = {"moejax": __version__, "jax": jax.__version__, "python": platform.python_version()}
    device = jax.devices()[0]
    record = {"config": config.to_dict(), "model": model.to_dict(), "corpus": manifest, "versions": versions}
    record["domains"] = list(domains)
    write_json(folder / "config.json", record | {"device": f"{device.platform} {device.device_kind}"})


def load_run(folder: str) -> tuple[PretrainConfig, ModelConfig]:
    """-> (the settings a run was started with, its model)."""
    path = pathlib.Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder!r} is no run folder: it has no config.json (runs lie in runs/, or in --out).")
    try:
        record = _json_object(path)
        missing = [name for name in ("config", "model") if not isinstance(record.get(name), dict)]
        if missing:
            raise ValueError(f"it has no {' and no '.join(missing)}.")
        settings = _known("PretrainConfig", PretrainConfig, record["config"])
        for name, kind in {"strength": Strength, "mesh": MeshConfig, "safety": SafetyConfig, "observe": ObserveConfig}.items():
            if name in settings:
                values = _known(name, kind, settings[name])
                if "monitors" in values:
                    values["monitors"] = MonitorConfig(**_known("monitors", MonitorConfig, values["monitors"]))
                settings[name] = kind(**values)
        return PretrainConfig(**settings), ModelConfig.from_dict(record["model"])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be used: {error}") from None


def _json_object(path: pathlib.Path) -> dict[str, Any]:
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}, not an object.")
    return values


def _known(name: str, kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """A copy of `values`. ValueError naming those that are no fields of the dataclass `kind`."""
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown {name} fields: {', '.join(unknown)}. They may come from another version of moejax.")
    return dict(values)


def check_same_run(saved: PretrainConfig, given: PretrainConfig) -> None:
    """ValueError naming every setting that a resumed run, or its evaluation, may not change, with both values."""
    free = FREE_ON_EVALUATE if given.evaluate else FREE_ON_RESUME
    before, now = _flat(saved.to_dict()), _flat(given.to_dict())
    changed = [
        f"--{name.replace('_', '-')}: the run has {before[name]!r}, given is {now[name]!r}"
        for name in before
        if name.split(".")[0] not in free and before[name] != now[name]
    ]
    if changed:
        raise ValueError("a run keeps the settings it was started with.\n  " + "\n  ".join(changed))


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """{"strength": {"ema": 0}} -> {"strength.ema": 0}: names as the command line has them."""
    flat = {}
    for name, value in values.items():
        flat |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def configure_compile_cache(setting: str) -> str | None:
    """Let JAX keep compiled programs in the folder (or gs:// address) `setting` names; -> it, None when nothing is kept.

    "auto" leaves what JAX_COMPILATION_CACHE_DIR has set.
    """
    if setting == "none":
        return None
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(home / "moejax" / "jax")
    folder = own if setting == "auto" else setting
    jax.config.update("jax_compilation_cache_dir", folder)
    return folder


def write_json(path: pathlib.Path, record: dict) -> None:
    """Write a whole file or none."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=2) + "\n")
    part.replace(path)
