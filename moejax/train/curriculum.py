"""A curriculum as data: stages of growing context, each with its own mixture, under one schedule over all tokens.

Tokens a step are the same in every stage, so rows a step shrink as rows grow longer, steps are proportional to tokens, and
a learning rate that is a function of the step is one of tokens seen. At a seam only the data change (K3 has no positions, so
nothing in the model does); parameters, moments, router biases, step counts and data cursors go on.
Stages of K3: 8K and 64K in pre-training, 256K and 1M in the cooldown (Kimi K3 report, arXiv 2607.24653); tokens, batch and
mixtures are not published, those of the presets are ours.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from ..config import ModelConfig
from ..data.packing import KINDS

SHARES = (0.60, 0.20, 0.12, 0.08)
"""Tokens of the four stages over all tokens."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stretch of training on one context length and one mixture."""

    name: str
    context_length: int
    """Tokens a row."""
    tokens: int
    """Tokens of the stage, padding included: a whole number of steps."""
    batch_tokens: int
    """Tokens a step over all devices: a whole number of rows, the same in every stage."""
    mixture: dict[str, float]
    """Source -> weight. Weights are relative; a source that is not used is left out, not 0."""
    packing: str = "first_fit"
    """One of `moejax.data.packing.KINDS`."""
    rope_scale: float = 1.0
    """Position interpolation: positions are divided by it. Other than 1 only for models with rotary positions."""
    min_doc_tokens: dict[str, int] | None = None
    """Source -> shortest document taken from it."""
    eval_lengths: tuple[int, ...] = ()
    """Lengths at which the stage is evaluated; empty: its own context."""

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a stage has the name {self.name!r}; give a non-empty string.")
        object.__setattr__(self, "mixture", {str(source): float(weight) for source, weight in self.mixture.items()})
        object.__setattr__(self, "eval_lengths", tuple(self.eval_lengths))
        for name in ("context_length", "tokens", "batch_tokens"):
            _positive_integer(f"{where}: {name}", getattr(self, name))
        if self.context_length < 2:
            raise ValueError(f"{where}: context_length is {self.context_length}; it must be at least 2: a token and its target.")
        if self.batch_tokens % self.context_length:
            raise ValueError(
                f"{where}: batch_tokens is {self.batch_tokens}, no multiple of context_length = {self.context_length}; a step is a "
                f"whole number of rows: {_around(self.batch_tokens, self.context_length)}."
            )
        if self.tokens % self.batch_tokens:
            raise ValueError(
                f"{where}: tokens is {self.tokens}, no multiple of batch_tokens = {self.batch_tokens}; a stage is a whole number of "
                f"steps: {_around(self.tokens, self.batch_tokens)}."
            )
        if not self.mixture:
            raise ValueError(f"{where}: the mixture is empty; name at least one source with its weight.")
        for source, weight in self.mixture.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"{where}: the weight of {source!r} is {weight}; it must be positive. Leave out what is not used.")
        if self.packing not in KINDS:
            raise ValueError(f"{where}: packing is {self.packing!r}; allowed: {', '.join(KINDS)}.")
        if not 0 < self.rope_scale < float("inf"):
            raise ValueError(f"{where}: rope_scale is {self.rope_scale}; it must be positive (1: positions as they are).")
        for source, least in (self.min_doc_tokens or {}).items():
            if source not in self.mixture:
                raise ValueError(f"{where}: min_doc_tokens names {source!r}, which is not in the mixture {sorted(self.mixture)}.")
            _positive_integer(f"{where}: min_doc_tokens[{source!r}]", least)
        for length in self.eval_lengths:
            _positive_integer(f"{where}: an entry of eval_lengths", length)

    @property
    def rows(self) -> int:
        """Rows a step, over all devices."""
        return self.batch_tokens // self.context_length

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    @property
    def shares(self) -> dict[str, float]:
        """The mixture, summing to 1."""
        total = sum(self.mixture.values())
        return {source: weight / total for source, weight in self.mixture.items()}

    def model(self, config: ModelConfig) -> ModelConfig:
        """`config` as this stage runs it: with its position interpolation, else as it is."""
        if self.rope_scale == 1.0:
            return config
        if config.mla.positions != "rotary":
            raise ValueError(
                f"stage {self.name!r}: rope_scale is {self.rope_scale}, but the model's MLA has positions = "
                f"{config.mla.positions!r}, which would ignore it; drop rope_scale, or set positions='rotary'."
            )
        if config.mla.rotary_scale != 1.0:
            raise ValueError(
                f"stage {self.name!r}: rope_scale is {self.rope_scale}, and the model has rotary_scale = {config.mla.rotary_scale}; "
                "give one of the two."
            )
        return config.replace(mla={"rotary_scale": self.rope_scale})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self) | {"eval_lengths": list(self.eval_lengths)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Stage:
        """The inverse of `to_dict`. An unknown or missing field is an error."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        needed = {name for name, field in fields.items() if _required(field)}
        if wrong := (set(values) - set(fields)) | (needed - set(values)):
            raise ValueError(f"Stage fields unknown or missing: {', '.join(sorted(wrong))}; known: {', '.join(fields)}.")
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run stands after a number of steps: the stage that the next step belongs to."""

    stage: Stage
    index: int
    """Of the stage, from 0."""
    step_in_stage: int
    """Steps of this stage that were taken."""
    first_step: int
    """Steps taken before this stage."""
    tokens_seen: int
    """Tokens of all steps taken."""


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Stages in order; checked once, here. A step is counted by how many were taken before it, from 0."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        stages = tuple(self.stages)
        object.__setattr__(self, "stages", stages)
        if not stages:
            raise ValueError("a curriculum needs at least one stage.")
        names = [stage.name for stage in stages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages are called {', '.join(map(repr, twice))}; names must differ.")
        if len({stage.batch_tokens for stage in stages}) > 1:
            listed = ", ".join(f"{stage.name}: {stage.batch_tokens}" for stage in stages)
            raise ValueError(
                f"batch_tokens differ ({listed}); tokens a step must be the same in all stages, so that one learning rate fits "
                "and steps are proportional to tokens. Change the rows with the context length instead."
            )

    @property
    def batch_tokens(self) -> int:
        """Tokens a step."""
        return self.stages[0].batch_tokens

    @property
    def total_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def total_tokens(self) -> int:
        return sum(stage.tokens for stage in self.stages)

    def at(self, step: int) -> Place:
        """The place after `step` steps, in [0, total_steps]; at the very end the last stage, all of its steps taken."""
        if not 0 <= step <= self.total_steps:
            raise ValueError(f"step {step} is outside the curriculum of {self.total_steps} steps; it must lie in [0, {self.total_steps}].")
        first = 0
        for index, stage in enumerate(self.stages):
            if step < first + stage.steps or index == len(self.stages) - 1:
                return Place(stage, index, step - first, first, step * self.batch_tokens)
            first += stage.steps
        raise AssertionError("unreachable")

    def seams(self) -> tuple[int, ...]:
        """Steps taken before each stage but the first: where the data are switched and a checkpoint is due."""
        firsts, step = [], 0
        for stage in self.stages[:-1]:
            step += stage.steps
            firsts.append(step)
        return tuple(firsts)

    def check(self, rows_divisor: int) -> None:
        """ValueError unless every stage's rows divide over `rows_divisor` data-parallel shards (data x fsdp x expert)."""
        _positive_integer("rows_divisor", rows_divisor)
        for stage in self.stages:
            if stage.rows % rows_divisor:
                raise ValueError(
                    f"stage {stage.name!r} has {stage.rows} rows a step ({stage.batch_tokens} tokens / {stage.context_length}), which "
                    f"{rows_divisor} data-parallel shards do not divide. Take more tokens a step ({rows_divisor * stage.context_length} "
                    "or a multiple), or fewer shards and more devices on the sequence axis."
                )

    def check_model(self, config: ModelConfig) -> None:
        """ValueError when a stage asks for something that this model cannot do (position interpolation without rotary)."""
        for stage in self.stages:
            stage.model(config)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"stages": [stage.to_dict() for stage in self.stages]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Curriculum:
        """The inverse of `to_dict`."""
        if set(values) != {"stages"}:
            raise ValueError(f"a curriculum has the one field 'stages'; given: {', '.join(sorted(values)) or 'none'}.")
        return cls(tuple(Stage.from_dict(stage) for stage in values["stages"]))

    def fingerprint(self) -> str:
        """Hash of everything that decides which data come when. The lengths of evaluation do not."""
        stages = [{key: value for key, value in stage.to_dict().items() if key != "eval_lengths"} for stage in self.stages]
        return hashlib.sha256(json.dumps(stages, sort_keys=True).encode()).hexdigest()[:16]

    def position(self, step: int) -> dict[str, Any]:
        """What a checkpoint after `step` steps records of the curriculum (JSON)."""
        place = self.at(step)
        return {
            "curriculum": self.fingerprint(),
            "stage": place.index,
            "stage_name": place.stage.name,
            "step_in_stage": place.step_in_stage,
            "tokens_seen": place.tokens_seen,
        }

    def check_position(self, saved: dict[str, Any], step: int) -> None:
        """ValueError naming each entry of a checkpoint's `position` that differs from this curriculum's at `step`."""
        here = self.position(step)
        lines = [f"{key}: saved {saved.get(key)!r}, here {value!r}" for key, value in here.items() if saved.get(key) != value]
        if lines:
            raise ValueError(
                f"the checkpoint of step {step} was made under another curriculum. Go on with the one it was started with.\n  "
                + "\n  ".join(lines)
            )


def from_steps(
    contexts: Sequence[int], mixtures: Sequence[dict[str, float]], *, total_steps: int, batch_tokens: int, shares: Sequence[float] = SHARES
) -> Curriculum:
    """Stages named after their contexts ("8K"), whose steps are `shares` of `total_steps`; they sum to it exactly."""
    if not len(contexts) == len(mixtures) == len(shares):
        raise ValueError(f"{len(contexts)} contexts, {len(mixtures)} mixtures, {len(shares)} shares; each stage has one of each.")
    ends = [round(total_steps * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    steps = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return Curriculum(
        tuple(
            Stage(length_name(context), context, count * batch_tokens, batch_tokens, mixture)
            for context, count, mixture in zip(contexts, steps, mixtures, strict=True)
        )
    )


def length_name(length: int) -> str:
    """8192 -> "8K", 1048576 -> "1M", 100 -> "100"."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length >= size and length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def k3(*, total_steps: int = 200_000, batch_tokens: int = 1 << 26) -> Curriculum:
    """8K -> 64K -> 256K -> 1M (K3 report). 60/20/12/8% of the tokens; 2^26 tokens a step as K2 had, 8192 to 64 rows."""
    mixtures = (
        {"code": 0.6, "prose": 0.3, "recall": 0.1},
        {"code": 0.4, "prose": 0.2, "long": 0.25, "recall": 0.15},
        {"code": 0.25, "prose": 0.1, "long": 0.45, "recall": 0.2},
        {"long": 0.5, "recall": 0.2, "dialog": 0.15, "image": 0.15},
    )
    return from_steps((8192, 65536, 262144, 1048576), mixtures, total_steps=total_steps, batch_tokens=batch_tokens)


def demo(*, shortest: int = 64, total_steps: int = 320, batch_tokens: int | None = None) -> Curriculum:
    """K3's ratios of lengths and tokens (1 : 8 : 32 : 128 from `shortest`) for minutes on a CPU.

    Of a haystack only the answer counts in the loss, of code every token: with 5% of the tokens, code is over half of the loss.

    Sources: "recall" (short documents of facts and questions), "needles" (haystacks of the stage's own length), "code" (files), "long"
    (files longer than the longest row). batch_tokens: None: one row of the longest stage.
    """
    mixtures = (
        {"recall": 0.6, "needles": 0.35, "code": 0.05},
        {"recall": 0.4, "needles": 0.52, "code": 0.08},
        {"recall": 0.3, "needles": 0.6, "code": 0.05, "long": 0.05},
        {"recall": 0.3, "needles": 0.6, "code": 0.05, "long": 0.05},
    )
    contexts = tuple(shortest * ratio for ratio in (1, 8, 32, 128))
    made = from_steps(contexts, mixtures, total_steps=total_steps, batch_tokens=batch_tokens or contexts[-1])
    least = {"long": contexts[-1]}
    return Curriculum(tuple(dataclasses.replace(s, min_doc_tokens=least) if "long" in s.mixture else s for s in made.stages))


def _positive_integer(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} is {value!r}; it must be an integer of at least 1.")


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _around(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
