"""The balancing rules behind one contract, for a train step: statistics in the forward pass, sums, one update a step.

Shapes: N tokens, E experts, k experts a token. logits and scores [N,E], bias [E], mask [N] bool (False = padding).

    statistics = router_statistics(rule, routing, logits, bias, k, mask=mask)   # in the forward pass
    statistics = combine_statistics(statistics, of_another_micro_batch)         # or psum (all_gather scores, mask)
    bias = updated_bias(rule, statistics, bias, k, strength)                    # once an optimizer step

Every function is pure and carries no gradient; `jax.vmap` gives the leading layer axis [L,...] of a layer scan.
"""

from collections.abc import Callable
from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import balancing
from .balance_measures import probability_sums
from .histogram import expert_load
from .routing import Routing, check_bias, check_top_k

Statistics = dict[str, Array]
PER_TOKEN = {"scores": -2, "mask": -1}  # statistics with one row a token, and the axis of the tokens; all others add


@flax.struct.dataclass
class BalanceStrength:
    """The rules' strengths: float32 scalars in the train state, so that changing one compiles nothing.

    ema: weight of the old bias in the two quantile rules, in [0, 1). step: of `sign` and `load_quantile`. quantile:
    of the loads in `load_quantile`. band_step, band_low, band_high: of `median_band`. aux_coefficient: factor on the
    auxiliary loss.
    """

    ema: balancing.Scalar = np.float32(0.0)
    step: balancing.Scalar = np.float32(1e-3)
    quantile: balancing.Scalar = np.float32(0.5)
    band_step: balancing.Scalar = np.float32(0.1)
    band_low: balancing.Scalar = np.float32(0.8)
    band_high: balancing.Scalar = np.float32(1.2)
    aux_coefficient: balancing.Scalar = np.float32(1e-2)

    def change(self, **strengths: float) -> "BalanceStrength":
        """A copy with some strengths changed, checked like `create`; a compiled step goes on with it."""
        return type(self).create(**({name: float(getattr(self, name)) for name in self.__dataclass_fields__} | strengths))

    @classmethod
    def create(cls, **strengths: float) -> "BalanceStrength":
        """From Python numbers. ValueError: an unknown name, a value out of range, a band upside down."""
        unknown = sorted(set(strengths) - set(cls.__dataclass_fields__))
        if unknown:
            raise ValueError(
                f"unknown balance strength {', '.join(unknown)}; known: {', '.join(cls.__dataclass_fields__)}."
            )
        made = cls(**{name: np.float32(value) for name, value in strengths.items()})
        for name, low, high in (
            ("ema", 0, 1),
            ("step", 0, np.inf),
            ("quantile", 0, 1),
            ("band_step", 0, np.inf),
            ("aux_coefficient", 0, np.inf),
        ):
            value = float(getattr(made, name))
            if not low <= value <= high or not np.isfinite(value) or (name == "ema" and value == 1):
                rule = "in [0, 1)" if name == "ema" else "in [0, 1]" if name == "quantile" else "finite and >= 0"
                raise ValueError(f"{name} is {value}; it must be {rule}.")
        if not 0 <= made.band_low <= made.band_high < np.inf:
            raise ValueError(
                f"the band is {made.band_low:g} to {made.band_high:g}; it must be 0 <= band_low <= band_high."
            )
        return made


@dataclass(frozen=True)
class BalanceRule:
    """What a rule needs beside load and tokens, and its new bias before centring. `update` None: the bias is never
    changed."""

    statistics: Callable[[Routing, Array, Array, int, Array, int], Statistics]
    update: Callable[[Statistics, Array, int, BalanceStrength], Array] | None
    smoothed: bool = False


def _nothing(routing, logits, bias, k, mask, bins) -> Statistics:
    return {}


def _histogram(routing, logits, bias, k, mask, bins) -> Statistics:
    counts = balancing.margin_histogram(routing.scores, bias, k, bins=bins, mask=mask, cutoff=routing.cutoff)
    return {"histogram": counts}


def _scores(routing, logits, bias, k, mask, bins) -> Statistics:
    return {"scores": jnp.where(mask[:, None], routing.scores, 0), "mask": mask}


def _probability(routing, logits, bias, k, mask, bins) -> Statistics:
    return {"probability": probability_sums(logits, mask).astype(jnp.float32)}


BALANCE_RULES: dict[str, BalanceRule] = {
    "quantile": BalanceRule(
        _histogram, lambda s, bias, k, w: balancing.bias_from_histogram(s["histogram"], bias, k), smoothed=True
    ),
    "quantile_exact": BalanceRule(
        _scores, lambda s, bias, k, w: balancing.quantile_bias(s["scores"], bias, k, mask=s["mask"]), smoothed=True
    ),
    "sign": BalanceRule(_nothing, lambda s, bias, k, w: balancing.sign_bias(s["load"], bias, w.step)),
    "load_quantile": BalanceRule(
        _nothing, lambda s, bias, k, w: balancing.load_quantile_bias(s["load"], bias, w.step, quantile=w.quantile)
    ),
    "median_band": BalanceRule(
        _probability,
        lambda s, bias, k, w: balancing.median_band_bias(
            s["probability"], bias, step=w.band_step, low=w.band_low, high=w.band_high
        ),
    ),
    "aux_loss": BalanceRule(_nothing, None),
    "none": BalanceRule(_nothing, None),
}


def balance_rule(name: str) -> BalanceRule:
    """The rule of that name. Raises ValueError naming the known ones."""
    if name not in BALANCE_RULES:
        raise ValueError(f"unknown balance rule {name!r}; known: {', '.join(BALANCE_RULES)}.")
    return BALANCE_RULES[name]


def router_statistics(
    rule: str, routing: Routing, logits: Array, bias: Array, k: int, *, mask: Array | None = None, bins: int = 1000
) -> Statistics:
    """What the update needs from these tokens, without gradient; padding is neither counted nor read.

    Args: routing: `route(logits, bias, k)`; logits [N,E]; bias [E] used for that choice; mask [N] bool or None.
    Returns: "load" int32 [E] and "tokens" int32 [], and by rule "histogram" int32 [E,bins] (quantile), "scores" [N,E]
      with "mask" [N] (quantile_exact), or "probability" float32 [E] (median_band).
    Raises ValueError: unknown rule, shapes or dtypes that break the rules, k = E for a rule other than none.
    """
    chosen = balance_rule(rule)
    experts = logits.shape[-1]
    check_top_k(k, experts, balancing=rule != "none")
    check_bias(bias, experts)
    if routing.experts.shape != (logits.shape[0], k):
        raise ValueError(
            f"routing.experts has shape {routing.experts.shape}; with these logits it must be {(logits.shape[0], k)}."
        )
    mask = balancing.checked_mask(mask, logits.shape[0])
    routing, logits, bias = jax.lax.stop_gradient((routing, logits, bias))
    common = {"load": expert_load(routing.experts, mask, experts), "tokens": mask.sum(dtype=jnp.int32)}
    return common | chosen.statistics(routing, logits, bias, k, mask, bins)


def combine_statistics(a: Statistics, b: Statistics) -> Statistics:
    """Statistics of two sets of tokens that shared one bias, pooled: sums; scores and mask are joined along N.

    Works on stacked statistics [L,...] too. Raises ValueError when the two come from different rules.
    """
    if a.keys() != b.keys():
        raise ValueError(f"statistics of different rules cannot be combined: {sorted(a)} and {sorted(b)}.")
    return {
        name: jnp.concatenate([a[name], b[name]], PER_TOKEN[name]) if name in PER_TOKEN else a[name] + b[name] for name in a
    }


def updated_bias(rule: str, statistics: Statistics, bias: Array, k: int, strength: BalanceStrength) -> Array:
    """The next selection bias [E], mean 0, from one optimizer step's pooled statistics.

    `none` and `aux_loss` return `bias` as it is, and so does every rule when no token was counted. The two quantile
    rules are smoothed by `strength.ema`; the others change the old bias by a step.
    Raises ValueError: unknown rule, k = E for a rule other than none.
    """
    chosen = balance_rule(rule)
    check_top_k(k, bias.shape[0], balancing=rule != "none")
    if chosen.update is None:
        return bias
    statistics, bias = jax.lax.stop_gradient((statistics, bias))
    new = chosen.update(statistics, bias, k, strength)
    new = (
        balancing.ema_bias(bias, new, jnp.asarray(strength.ema, bias.dtype))
        if chosen.smoothed
        else balancing.centre(new)
    )
    return jnp.where(statistics["tokens"] > 0, new, bias)
