"""Choosing the next token: greedy, temperature, top-k, top-p, with a seed for each row.

Shapes: B rows, V vocabulary.

A row's draw depends on its logits, its sampling settings and the position of the token to draw, and on nothing else: the noise is a
counter-based function of (seed, position), so that a sequence draws the same tokens in any batch, in any slot and after a restart.
Log-probs are those of the distribution before any cut, which a learner can compute from logits and temperature alone (the cut one
would need the sampler's sort): with the logits [2, 0] and temperature 0.6 they are -0.03505 and -3.36839.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..kernels.common import accumulation_dtype, require_float, require_rank

MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 1e6  # all tokens are all but equal there; from 3.4e38 on it would be inf in float32
MIN_TOP_P = float(np.finfo(np.float32).tiny)  # smaller ones are subnormal, which XLA takes for 0
INVALID = -1


class Sampling(NamedTuple):
    """Settings of B rows, as `make_sampling` checks them. A pytree: settings change without a new compile."""

    temperature: jax.Array | np.ndarray  # [B] float32, 0 = greedy
    top_k: jax.Array | np.ndarray  # [B] int32, 0 = all
    top_p: jax.Array | np.ndarray  # [B] float32, 1 = all
    seed: jax.Array | np.ndarray  # [B] uint32


class Drawn(NamedTuple):
    """tokens [B] int32, -1 where a row's logits are no distribution; log_probs [B] float32 of them (NaN there)."""

    tokens: jax.Array
    log_probs: jax.Array


def make_sampling(
    rows: int,
    *,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] = 0,
) -> Sampling:
    """Settings for `rows` rows; each is one value for all or a sequence of one value a row.

    temperature: 0 (greedy), or from 1e-6 to 1e6: logits are divided by it. top_k: keep the k most likely tokens; 0, or more than there are,
    keeps all. top_p: keep the smallest set of most likely tokens whose mass reaches top_p, in [1.18e-38, 1]. seed: in [0, 2**32); with one
    seed for all, equal rows draw equal tokens.
    ValueError: a value outside its range, a sequence of another length. Runs on the host.
    """
    if not isinstance(rows, (int, np.integer)) or rows < 1:
        raise ValueError(f"rows is {rows!r}; it must be an integer of at least 1.")
    heat = _column("temperature", temperature, rows, integer=False)
    allowed = (heat == 0) | ((heat >= MIN_TEMPERATURE) & (heat <= MAX_TEMPERATURE))
    _within("temperature", heat, allowed, f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}")
    most = _column("top_k", top_k, rows, integer=True)
    _within("top_k", most, (most >= 0) & (most < 2**31), "at least 0 (0 = all tokens)")
    mass = _column("top_p", top_p, rows, integer=False)
    _within("top_p", mass, (mass >= MIN_TOP_P) & (mass <= 1), f"in [{MIN_TOP_P:.3g}, 1] (1 keeps all tokens)")
    seeds = _column("seed", seed, rows, integer=True)
    _within("seed", seeds, (seeds >= 0) & (seeds < 2**32), "in [0, 2**32)")
    return Sampling(heat.astype(np.float32), most.astype(np.int32), mass.astype(np.float32), seeds.astype(np.uint32))


def sample(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> Drawn:
    """Draw one token a row. Pure; works inside and outside `jax.jit`.

    Greedy rows take the largest logit, ties the lower id. The others draw from softmax(logits / temperature), cut to the top_k most
    likely tokens (ties keep the lower id), then to the smallest set of the most likely whose mass, as a share of what top_k left, is at
    least top_p; the token that crosses top_p stays in. Cuts decide from float32 sums.
    The vocabulary is sorted once, and only when a sampled row has a cut; the noise is made only when a row is sampled.

    Args:
      logits: [B,V] float32 (bfloat16 and float64 work); -inf forbids a token.
      sampling: B rows.
      positions: [B] int32, the place of the token to draw in its sequence (tokens before it); with the seed, the key of the draw.
    Returns: Drawn. log_probs are under softmax(logits / temperature) over all V tokens, temperature 1 for a greedy row.
      A row with a NaN, +inf or nothing but -inf gets token -1 and log-prob NaN: nothing can be drawn from it.
    Raises ValueError: a shape or dtype that breaks the rules above.
    """
    _check(logits, sampling, positions)
    logits = logits.astype(accumulation_dtype(logits))
    heat = jnp.asarray(sampling.temperature, logits.dtype)
    top = jnp.max(logits, axis=-1, keepdims=True)
    valid = jnp.isfinite(top[:, 0])  # a maximum carries NaN
    # Shifted before the division: a small temperature then gives -inf for the others and not inf - inf.
    scaled = (logits - top) / jnp.where(heat > 0, heat, 1)[:, None]
    best = _greedy(logits)
    drawn = jax.lax.cond(jnp.any(heat > 0), _draw, lambda *_: best, scaled, sampling, heat, positions)
    tokens = jnp.where(heat > 0, drawn, best)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1, mode="clip")[:, 0]
    log_probs = chosen - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1))
    return Drawn(jnp.where(valid, tokens, INVALID), jnp.where(valid, log_probs, jnp.nan))


def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _draw(scaled: jax.Array, sampling: Sampling, heat: jax.Array, positions: jax.Array) -> jax.Array:
    """Largest of logit plus Gumbel noise among the tokens that are kept: a draw from their softmax."""
    top_k, top_p = jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p, scaled.dtype)
    cut = (heat > 0) & ((top_k > 0) | (top_p < 1))
    last = jax.lax.cond(jnp.any(cut), _last_kept, lambda scaled, *_: _keep_all(scaled), scaled, top_k, top_p)
    ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    value, token = last[0][:, None], last[1][:, None]
    kept = (scaled > value) | ((scaled == value) & (ids <= token))
    noise = jax.vmap(lambda seed, position: _noise(seed, position, scaled))(jnp.asarray(sampling.seed), jnp.asarray(positions))
    return _greedy(jnp.where(kept, scaled + noise, -jnp.inf))


def _noise(seed: jax.Array, position: jax.Array, scaled: jax.Array) -> jax.Array:
    # The generator is named: a global default such as "rbg" would draw other numbers in another batch under vmap.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    # "high": 23 random bits a token would tie the largest of 163,840 in about one draw of a hundred, and ties favour low ids.
    return jax.random.gumbel(key, scaled.shape[1:], scaled.dtype, mode="high")


def _keep_all(scaled: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.full(scaled.shape[:1], -jnp.inf, scaled.dtype), jnp.full(scaled.shape[:1], scaled.shape[1], jnp.int32)


def _last_kept(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(value, id) of the last token that each row keeps, in order of falling value and rising id: all before it are kept."""
    ids = jax.lax.broadcasted_iota(jnp.int32, scaled.shape, 1)
    falling, order = jax.lax.sort((-scaled, ids), dimension=1, is_stable=True, num_keys=1)
    allowed = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[1]), scaled.shape[1])
    mass = jnp.where(ids < allowed[:, None], jnp.exp(-falling), 0)
    before = jnp.cumsum(mass, axis=1) - mass
    total = jnp.sum(mass, axis=1)
    # Mass before a token, not with it: the first token is always kept, and so is the one that crosses.
    within = jnp.sum(before < (top_p * total)[:, None], axis=1)
    # A product that a backend flushes to 0 has no mass before it: without the 1 nothing would be cut.
    count = jnp.where(top_p < 1, jnp.clip(within, 1, allowed), allowed)
    last = (count - 1)[:, None]
    value, token = (jnp.take_along_axis(x, last, axis=1, mode="clip")[:, 0] for x in (-falling, order))
    return value, token


def _check(logits: jax.Array, sampling: Sampling, positions: jax.Array) -> None:
    require_float(logits=logits)
    require_rank(2, "[B,V]", logits=logits)
    rows, vocabulary = logits.shape
    if rows < 1 or vocabulary < 1:
        raise ValueError(f"logits has shape {logits.shape}; there must be at least one row and one token.")
    for name, values in {**sampling._asdict(), "positions": positions}.items():
        if jnp.shape(values) != (rows,):
            raise ValueError(f"{name} has shape {jnp.shape(values)}; logits has {rows} rows, so it must be [{rows}].")
    if not jnp.issubdtype(jnp.result_type(positions), jnp.integer):
        raise ValueError(f"positions has dtype {jnp.result_type(positions)}; they must be integers.")


def _column(name: str, values, rows: int, *, integer: bool) -> np.ndarray:
    """`values` [rows] in their integer type (a cast would wrap 2**63), or as float64."""
    column = np.asarray(values)
    if column.dtype.kind not in ("iu" if integer else "iuf"):
        raise ValueError(f"{name} is {values!r}; it must be {'an integer' if integer else 'a number'}, or one a row.")
    if column.ndim > 1 or (column.ndim == 1 and len(column) != rows):
        raise ValueError(f"{name} has shape {column.shape}; it must be one value, or {rows}, one a row.")
    return np.broadcast_to(column if integer else column.astype(np.float64), (rows,))


def _within(name: str, column: np.ndarray, good: np.ndarray, rule: str) -> None:
    if not good.all():
        raise ValueError(f"{name} is {column[~good][0].item()!r}; it must be {rule}.")
