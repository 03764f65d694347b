"""Strengths of the balancing rules as settings of a run, and which rule reads which."""

from __future__ import annotations

import dataclasses

from ..ops.balance_rules import BalanceStrength

STRENGTHS = {  # what each balancing rule reads
    "quantile": ("ema",),
    "quantile_exact": ("ema",),
    "sign": ("step",),
    "load_quantile": ("step", "quantile"),
    "median_band": ("band_step", "band_low", "band_high"),
    "aux_loss": ("aux_coefficient",),
    "none": (),
}


@dataclasses.dataclass(frozen=True)
class Strength:
    """Strengths of the balancing rule. One that the rule does not read must keep its default; a run keeps them."""

    ema: float = 0.0
    """quantile, quantile_exact: weight of the old bias, in [0, 1)."""
    step: float = 1e-3
    """sign, load_quantile: change of the bias in one step."""
    quantile: float = 0.5
    """load_quantile: quantile of the loads above which an expert loses."""
    band_step: float = 0.1
    """median_band: change of the bias in one step."""
    band_low: float = 0.8
    """median_band: share of the median load below which an expert gains."""
    band_high: float = 1.2
    """median_band: share of the median load above which an expert loses."""
    aux_coefficient: float = 1e-2
    """aux_loss: factor on the auxiliary loss."""

    def __post_init__(self) -> None:
        try:
            self.create()
        except ValueError as error:
            raise ValueError(f"--strength: {error}") from None

    def create(self) -> BalanceStrength:
        """As the train state carries them. ValueError for a value out of range."""
        return BalanceStrength.create(**dataclasses.asdict(self))

    def check(self, rule: str) -> None:
        """ValueError naming every strength that was changed and that `rule` does not read."""
        ignored = [
            f"--strength.{field.name.replace('_', '-')} {getattr(self, field.name):g}"
            for field in dataclasses.fields(self)
            if field.name not in STRENGTHS[rule] and getattr(self, field.name) != field.default
        ]
        if ignored:
            read = ", ".join(name.replace("_", "-") for name in STRENGTHS[rule]) or "none"
            raise ValueError(
                f"{', '.join(ignored)} would be ignored: the balancing rule {rule!r} reads {read}. Drop it, or pick another --balance."
            )
