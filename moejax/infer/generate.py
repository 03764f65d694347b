"""Continuing prompts: prefill, then a decoding step and a draw a token, until a stop token or the limit.

Shapes: B rows, T prompt tokens, N new tokens at most, M MoE layers, k experts a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..modules.model import HybridLM
from .cache import HybridCache, new_cache
from .decode import decode_step
from .prefill import prefill
from .requests import at_least_one, token_ids
from .sampling import Sampling, make_sampling, sample
from .weights import Weights, prepare

OnToken = Callable[[int, int, float], None]
"""on_token(row, token, log-prob), in order for each row."""


@dataclasses.dataclass(frozen=True)
class Generated:
    """What `generate` gives. Of row b the first counts[b] entries are new tokens; -1 (log-prob 0) stands behind them."""

    tokens: np.ndarray
    """int32 [B,N], a stop token included."""
    counts: np.ndarray
    """int32 [B]"""
    log_probs: np.ndarray
    """float32 [B,N] of the tokens under softmax(logits / temperature) over the whole vocabulary, temperature 1 for greedy rows."""
    reasons: list[str]
    """ "stop" or "length", one a row."""
    prompt_experts: np.ndarray | None
    """int32 [B,T,M,k] routed experts of the prompt's tokens, -1 at padding."""
    experts: np.ndarray | None
    """int32 [B,N,M,k] of each new token as it was read; -1 for the last one, which is not."""
    cache: HybridCache
    """After everything read: prompt and new tokens but each row's last."""

    def row(self, index: int) -> np.ndarray:
        """The new tokens of a row."""
        return self.tokens[index, : self.counts[index]]


def generate(
    model: HybridLM,
    variables: Any,
    tokens: Any,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] = (),
    on_token: OnToken | None = None,
    return_experts: bool = False,
    chunk: int = 2048,
    capacity: int | None = None,
    state_dtype: str | None = None,
    weights: Weights | None = None,
) -> Generated:
    """Continue a batch of prompts.

    Args:
      model, variables: the model and its {"params", "router_state"}. `weights=prepare(model, variables)` made once spares later calls
        the copy of the parameters; `variables` is then not read and may be None.
      tokens: [B,T] integers padded at the end with `lengths` [B], or a list of B sequences of any lengths.
      max_new_tokens: N, at least 1; a row stops earlier at one of `stop_ids`, which it keeps.
      temperature, top_k, top_p, seed: one value for all rows or one a row; see `make_sampling`. With one seed, equal rows draw equally.
      on_token: called for each new token as it comes; an exception ends the generation.
      return_experts: also return routed experts (routing replay in RL).
      chunk: prompt tokens a row and call, see `prefill`.
      capacity: of the cache; None: the longest prompt and N, rounded up to a power of two or a multiple of 4096, so that prompts of
        other lengths seldom compile anew.
      state_dtype: of the KDA states, see `init_cache`.

    Raises:
      ValueError: an empty prompt, ids outside the vocabulary, settings that are not allowed, a capacity that is too small.
      RuntimeError: a row's logits are not a distribution (NaN): the row and its position.
    """
    if weights is not None and weights.config != model.config:
        raise ValueError("weights were prepared for another model than the one given; give that model, or leave weights out.")
    at_least_one("max_new_tokens", max_new_tokens)
    weights = prepare(model, variables) if weights is None else weights
    prompts, counts = padded_prompts(tokens, lengths)
    rows = len(counts)
    stop = _padded_stop(token_ids("stop_ids", stop_ids, weights.config.vocab_size))
    needed = int(counts.max()) + max_new_tokens
    if capacity is not None and at_least_one("capacity", capacity) < needed:
        raise ValueError(f"capacity={capacity}, but the longest prompt and {max_new_tokens} new tokens make {needed}.")
    sampling = make_sampling(rows, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    cache = new_cache(weights, rows, capacity or _room(needed), state_dtype=state_dtype)
    step = prefill(weights, prompts, cache, counts=counts, chunk=chunk, return_experts=return_experts)
    out = _Collected(rows, max_new_tokens, on_token)
    cache, now = step.cache, _first(step.logits, sampling, jnp.asarray(counts), stop)
    for index in range(max_new_tokens):
        following = experts = None
        if index + 1 < max_new_tokens:  # on its way before the host looks at this step's tokens
            cache, following, experts = _advance(weights, cache, now, sampling, stop, return_experts=return_experts)
        if not out.add(now, experts) or following is None:
            break
        now = following
    return out.result(step.experts, cache)


class _Drawn(NamedTuple):
    """One new token a row, on the device."""

    token: jax.Array  # [B]
    log_prob: jax.Array  # [B]
    position: jax.Array  # [B] of the token in its sequence
    live: jax.Array  # [B] bool: the row had not stopped before it
    goes_on: jax.Array  # [B] bool: nor does it stop with it


def _draw(logits, sampling: Sampling, position, live, stop) -> _Drawn:
    drawn = sample(logits, sampling, position)
    ends = (drawn.tokens[:, None] == stop).any(axis=1)
    return _Drawn(drawn.tokens, drawn.log_probs, position, live, live & ~ends)


@jax.jit
def _first(logits, sampling, position, stop) -> _Drawn:
    return _draw(logits, sampling, position, jnp.ones(position.shape, bool), stop)


@partial(jax.jit, donate_argnames=("cache",), static_argnames=("return_experts",))
def _advance(weights, cache, now: _Drawn, sampling, stop, *, return_experts: bool):
    """Read the token of every row that goes on, and draw the next one."""
    step = decode_step(weights, cache, now.token, active=now.goes_on, return_experts=return_experts)
    return step.cache, _draw(step.logits, sampling, now.position + 1, now.goes_on, stop), step.experts


class _Collected:
    """New tokens on the host."""

    def __init__(self, rows: int, most: int, on_token: OnToken | None) -> None:
        self.tokens = np.full((rows, most), -1, np.int32)
        self.log_probs = np.zeros((rows, most), np.float32)
        self.counts = np.zeros(rows, np.int32)
        self.stopped = np.zeros(rows, bool)
        self.experts: list[Any] = []
        self.on_token = on_token

    def add(self, now: _Drawn, experts) -> bool:
        """Keep one step's tokens; whether any row goes on. experts: of the tokens as the next step reads them."""
        token, log_prob, position, live, goes_on = jax.device_get(now)
        if (bad := np.flatnonzero(live & (token < 0))).size:
            raise RuntimeError(f"the logits of row {bad[0]} at position {position[bad[0]]} are not a distribution (NaN or all -inf).")
        if experts is not None:
            self.experts.append(experts)
        for row in np.flatnonzero(live).tolist():
            self.tokens[row, self.counts[row]], self.log_probs[row, self.counts[row]] = token[row], log_prob[row]
            self.counts[row] += 1
            if self.on_token is not None:
                self.on_token(row, int(token[row]), float(log_prob[row]))
        self.stopped |= live & ~goes_on
        return bool(goes_on.any())

    def result(self, prompt_experts, cache: HybridCache) -> Generated:
        experts = None
        if prompt_experts is not None:
            rows, _, layers, chosen = prompt_experts.shape
            experts = np.full((rows, self.tokens.shape[1], layers, chosen), -1, np.int32)
            for index, read in enumerate(jax.device_get(self.experts)):
                experts[:, index] = read
            prompt_experts = np.asarray(prompt_experts)
        reasons = ["stop" if stopped else "length" for stopped in self.stopped]
        return Generated(self.tokens, self.counts, self.log_probs, reasons, prompt_experts, experts, cache)


def _padded_stop(ids: np.ndarray) -> jax.Array:
    """Padded to a multiple of 8 with what no token is, so that another number of stop ids is not another program."""
    return jnp.asarray(np.pad(ids, (0, 8 * max(-(-len(ids) // 8), 1) - len(ids)), constant_values=-2))


def _room(tokens: int) -> int:
    return min(1 << max(tokens - 1, 63).bit_length(), -(-tokens // 4096) * 4096)


def padded_prompts(tokens: Any, lengths: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """[B,T] with lengths [B], or B sequences -> (integers [B,T] padded with 0 at the end, int32 [B] lengths).

    ValueError: no prompt, an empty one, ids that are no integers, lengths beside sequences or outside 1..T.
    """
    if isinstance(tokens, list | tuple) and tokens and any(np.ndim(row) == 1 for row in tokens):
        if lengths is not None:
            raise ValueError("lengths is given beside a list of prompts, which have their own; drop it or pass one array [B,T].")
        rows = [np.asarray(row) for row in tokens]
        for given in rows:
            if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
                raise ValueError(f"a prompt is {given.dtype}{list(given.shape)}; each must be integers [T].")
        lengths = np.array([len(row) for row in rows])
        padded = np.zeros((len(rows), max(int(lengths.max()), 1)), np.int64)
        for row, given in zip(padded, rows, strict=True):
            row[: len(given)] = given
    else:
        padded = np.asarray(tokens)
        if padded.ndim != 2 or not np.issubdtype(padded.dtype, np.integer):
            raise ValueError(f"tokens is {padded.dtype}{list(padded.shape)}; it must be integers [B,T], or a list of sequences.")
        lengths = np.full(padded.shape[0], padded.shape[1]) if lengths is None else np.asarray(lengths)
    if (
        lengths.shape != padded.shape[:1]
        or lengths.dtype.kind not in "iu"
        or not lengths.size
        or lengths.min() < 1
        or lengths.max() > padded.shape[1]
    ):
        raise ValueError(
            f"prompts of {lengths.tolist()} tokens in an array {list(padded.shape)}; each needs at least one token (such as the "
            "tokenizer's start) and at most the array's."
        )
    return padded, lengths.astype(np.int32)  # ids keep their width until prefill has checked them
