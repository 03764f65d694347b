"""Continuous batching on one process: requests come and go, the rows of one cache are their slots.

A step of the engine puts at most one chunk of one prompt (the oldest) and one token of every answering slot on the device, and then
hands out what the step before it drew, so that the device computes while the host works. A slot that has ended computes one token too
many by then, which is thrown away; the limit of max_new_tokens is known beforehand and costs nothing.

Which requests run together changes no answer: rows do not see each other, a slot is cleared when it is taken, and draws depend on seed
and position only.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ..modules.model import HybridLM
from . import slots as device
from .cache import HybridCache
from .requests import FINISHED, QueueFull, Request, State, Ticket, at_least_one, check_request
from .sampling import INVALID, Sampling, make_sampling
from .weights import Weights, checked_dtype, prepare

__all__ = ["Engine", "QueueFull", "Request", "Ticket"]
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Slot:
    """A request in its row."""

    ticket: Ticket
    read: int = 0
    """Prompt tokens given to the device."""
    drawn: int = 0
    """New tokens that the device was asked for."""

    @property
    def decoding(self) -> bool:
        return self.read == len(self.ticket.prompt)


@dataclasses.dataclass
class _Chunk:
    """A part of a prompt on its way."""

    ticket: Ticket
    count: int
    last: bool
    packed: Any  # int32 [2,1]
    experts: Any  # [T,M,k]


@dataclasses.dataclass
class _Tokens:
    """One token of every answering slot on its way."""

    tickets: dict[int, Ticket]
    packed: Any  # int32 [2,B]
    experts: Any  # [B,M,k]


class Engine:
    """Serves requests from a queue in a fixed number of slots.

    `submit`, `cancel` and `stats` may be called from any thread, and from callbacks; `step`, `run` and `warm_up` from one thread at a
    time. Callbacks run on the stepping thread: one that is slow holds up all answers, one that raises fails its own request.
    """

    def __init__(
        self,
        model: HybridLM,
        variables: Mapping[str, Any] | None,
        *,
        slots: int,
        capacity: int,
        chunk: int = 512,
        max_queue: int = 256,
        dtype: str | None = None,
        state_dtype: str | None = None,
        return_experts: bool = False,
        weights: Weights | None = None,
    ) -> None:
        """Take the weights and allocate the cache; programs compile when they are first needed (`warm_up`).

        Args:
          model, variables: see `moejax.infer.prepare`. With `weights=prepare(model, variables)`, made once for several engines,
            `variables` is not read and may be None.
          slots: answers at a time, the batch of a decoding step.
          capacity: most tokens of a request, prompt and answer together. Each slot has room for them.
          chunk: prompt tokens a step: more is faster to the first token, and holds up the other answers for longer. Prompts are padded
            to whole chunks.
          max_queue: requests that may wait for a slot.
          dtype, state_dtype: of the weights and the cache, see `prepare` and `init_cache`.
          return_experts: tickets also carry the routed experts.
        Raises ValueError: a number below 1, an unknown dtype, experts of a model that has none, a mesh that cuts rows, dtype or
          another model beside weights.
        """
        self.slots, self.capacity = at_least_one("slots", slots), at_least_one("capacity", capacity)
        self.chunk, self.max_queue = min(at_least_one("chunk", chunk), self.capacity), at_least_one("max_queue", max_queue)
        self._state_dtype = None if state_dtype is None else checked_dtype("state_dtype", state_dtype)
        if return_experts and not model.config.moe_layers:
            raise ValueError("return_experts is True, but no layer of the model has routed experts; set it to False.")
        if weights is not None:
            _check_weights(weights, model, dtype)
        parallel = model.parallel if weights is None else weights.parallel
        if parallel is not None and parallel.size("batch") > 1:
            raise ValueError(
                f"the model's mesh cuts rows into {parallel.size('batch')}, and a prompt is read in one row; give the engine a mesh "
                "whose axes data, fsdp and expert are 1, or start one engine for each part."
            )
        self.return_experts = return_experts
        self._weights = prepare(model, variables or {}, dtype=dtype) if weights is None else weights
        self._lock = threading.Lock()
        self._stepping = threading.Lock()
        self._ids = itertools.count()
        self._queue: collections.deque[Ticket] = collections.deque()
        self._open: dict[int, Ticket] = {}  # admitted and not finished
        self._counts = collections.Counter()
        self._cache: HybridCache | None = None
        self._forget()
        self._allocate()

    def submit(
        self,
        request: Request,
        *,
        on_token: Callable[[Ticket, int, float], Any] | None = None,
        on_done: Callable[[Ticket], Any] | None = None,
    ) -> Ticket:
        """Queue a request.

        on_token(ticket, token, log_prob): called for each new token, in order. on_done(ticket): called once, when the ticket is done,
        cancelled or failed.
        Raises ValueError: a request that cannot be served (the field, its value and the rule); QueueFull.
        """
        prompt, sampling = check_request(request, vocab_size=self._weights.config.vocab_size, capacity=self.capacity)
        with self._lock:
            if len(self._queue) >= self.max_queue:
                raise QueueFull(f"{len(self._queue)} requests wait, as many as max_queue allows; try again later.")
            ticket = Ticket(next(self._ids), request, on_token=on_token, on_done=on_done, prompt=prompt, sampling=sampling)
            ticket.experts = [] if self.return_experts else None
            self._queue.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Give a request up, wherever it is. It gets no more tokens from the next step on, which also frees its slot."""
        ticket.cancel_asked = True

    def step(self) -> bool:
        """Admit what has come, one chunk and one token a slot, and hand out the tokens of the step before. False: nothing is left.

        An error on the device fails all requests that were running, and the engine goes on with a new cache. (An exception that is no
        `Exception`, such as KeyboardInterrupt, does the same and is then raised.)
        """
        with self._alone("step"):
            try:
                self._drop_cancelled()
                self._counts["steps"] += 1
                arrived, self._coming = self._coming, []
                self._admit()
                self._coming = self._dispatch()
                # One transfer for all of it; what was just dispatched computes meanwhile.
                values = jax.device_get([(part.packed, part.experts) for part in arrived])
                for part, (packed, experts) in zip(arrived, values, strict=True):
                    self._hand_out(part, packed, experts)
            except BaseException as error:
                self._fail_running(error)
                if not isinstance(error, Exception):
                    raise
            with self._lock:
                return bool(self._queue or self._open or self._coming)

    def run(self) -> None:
        """Step until nothing is left."""
        while self.step():
            pass

    def warm_up(self) -> None:
        """Compile everything that requests will need. On an idle engine (RuntimeError otherwise)."""
        with self._alone("warm_up"):
            if self._open or self._coming:
                raise RuntimeError("warm_up was called while requests run; call it before the first one.")
            for _ in range(2):  # on a mesh the first round leaves the cache as XLA spread it, for which the second compiles
                self._clear(0)
                self._run_chunk(0, np.zeros(self.chunk, np.int32), 0)
                self._run_token(np.zeros(self.slots, bool))
            jax.block_until_ready(self._cache)

    def stats(self) -> dict[str, int]:
        """Counts since the start (admitted, finished, cancelled, failed, prompt_tokens, generated_tokens, steps) and the state now."""
        names = ("admitted", "finished", "cancelled", "failed", "prompt_tokens", "generated_tokens", "steps")
        with self._lock:
            busy = sum(slot is not None for slot in self._slots)
            return {"slots": self.slots, "busy": busy, "queued": len(self._queue), **{name: self._counts[name] for name in names}}

    # The device.

    def _forget(self) -> None:
        """No request runs and no cache is held."""
        self._cache = None
        self._slots: list[_Slot | None] = [None] * self.slots
        self._coming: list[_Chunk | _Tokens] = []
        self._sampling = make_sampling(self.slots)

    def _allocate(self) -> None:
        if self._cache is None:
            self._last, self._cache = device.empty_slots(self._weights, self.slots, self.capacity, self._state_dtype)

    @contextlib.contextmanager
    def _alone(self, name: str):
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError(f"{name} was called while the engine steps, from another thread or a callback; only one thread may step.")
        try:
            yield
        finally:
            self._stepping.release()

    def _clear(self, slot: int) -> None:
        self._allocate()
        self._cache = device.clear_slot(self._cache, np.int32(slot))

    def _run_chunk(self, slot: int, tokens: np.ndarray, count: int) -> tuple[Any, Any]:
        self._cache, self._last, packed, experts = device.prefill_slot(
            self._weights,
            self._cache,
            self._last,
            self._sampling,
            np.int32(slot),
            tokens,
            np.int32(count),
            return_experts=self.return_experts,
        )
        return packed, experts

    def _run_token(self, active: np.ndarray) -> tuple[Any, Any]:
        self._cache, self._last, packed, experts = device.decode_slots(
            self._weights, self._cache, self._last, self._sampling, active, return_experts=self.return_experts
        )
        return packed, experts

    def _admit(self) -> None:
        for index, slot in enumerate(self._slots):
            if slot is not None:
                continue
            with self._lock:
                if not self._queue:
                    return
                ticket = self._queue.popleft()
                self._open[ticket.id] = ticket
                ticket.state = "prefill"
                self._slots[index] = _Slot(ticket)
                self._counts["admitted"] += 1
            self._clear(index)
            # New arrays: a call that is still running may read the old ones where they lie.
            self._sampling = Sampling(*(_replaced(all_, index, own) for all_, own in zip(self._sampling, ticket.sampling, strict=True)))

    def _dispatch(self) -> list[_Chunk | _Tokens]:
        parts: list[_Chunk | _Tokens] = []
        reading = [(slot.ticket.id, index) for index, slot in enumerate(self._slots) if slot is not None and not slot.decoding]
        if reading:
            parts.append(self._read_on(min(reading)[1]))
        answering = {index: slot for index, slot in enumerate(self._slots) if slot is not None and slot.decoding}
        # One token asked for is all there is: it came with the prompt.
        answering = {index: slot for index, slot in answering.items() if slot.drawn < slot.ticket.request.max_new_tokens}
        if answering:
            active = np.zeros(self.slots, bool)
            active[list(answering)] = True
            parts.append(_Tokens({index: slot.ticket for index, slot in answering.items()}, *self._run_token(active)))
            for slot in answering.values():
                slot.drawn += 1
        for index, slot in enumerate(self._slots):
            if slot is not None and slot.drawn == slot.ticket.request.max_new_tokens:
                self._slots[index] = None  # its last token is on its way; the row is not needed for it
        return parts

    def _read_on(self, index: int) -> _Chunk:
        slot = self._slots[index]
        assert slot is not None
        prompt, start = slot.ticket.prompt, slot.read
        part = prompt[start : start + self.chunk]
        tokens = np.zeros(self.chunk, np.int32)
        tokens[: len(part)] = part
        packed, experts = self._run_chunk(index, tokens, len(part))
        slot.read += len(part)
        if slot.decoding:
            slot.drawn, slot.ticket.state = 1, "decode"
        return _Chunk(slot.ticket, len(part), slot.decoding, packed, experts)

    # The host.

    def _hand_out(self, part: _Chunk | _Tokens, packed: np.ndarray, experts: np.ndarray | None) -> None:
        tokens, log_probs = (values.tolist() for values in device.unpacked(packed))
        if isinstance(part, _Tokens):
            for index, ticket in part.tickets.items():
                self._give(ticket, tokens[index], log_probs[index], None if experts is None else experts[index : index + 1])
            return
        if not _live(part.ticket):
            return
        self._counts["prompt_tokens"] += part.count
        own = None if experts is None else experts[: part.count]
        if part.last:
            self._give(part.ticket, tokens[0], log_probs[0], own)
        elif own is not None and part.ticket.experts is not None:
            part.ticket.experts.extend(own)

    def _give(self, ticket: Ticket, token: int, log_prob: float, experts: np.ndarray | None) -> None:
        """One new token; `experts` are those of the tokens read for it."""
        if not _live(ticket):
            return
        if ticket.experts is not None and experts is not None:
            ticket.experts.extend(experts.copy())  # a view would keep all slots' experts of the step
        if token == INVALID:
            place = len(ticket.prompt) + len(ticket.tokens)
            self._finish(ticket, "failed", error=f"the logits at position {place} are no distribution (NaN or infinite); nothing drawn.")
            return
        ticket.tokens.append(token)
        ticket.log_probs.append(log_prob)
        self._counts["generated_tokens"] += 1
        ended = token in ticket.request.stop_ids
        if ended or len(ticket.tokens) == ticket.request.max_new_tokens:
            ticket.finish_reason = "stop" if ended else "length"
            if ticket.experts:
                ticket.experts.append(np.full_like(ticket.experts[-1], -1))
        if ticket.on_token is not None:
            try:
                ticket.on_token(ticket, token, log_prob)
            except Exception as error:
                logger.warning("on_token of request %d raised", ticket.id, exc_info=error)
                self._finish(ticket, "failed", error=f"on_token raised {_text(error)}")
                return
        if ticket.finish_reason is not None:
            self._finish(ticket, "done")

    def _finish(self, ticket: Ticket, state: State, *, error: str | None = None) -> None:
        """Close a ticket, once, and free its slot if it still has one."""
        with self._lock:
            self._open.pop(ticket.id, None)
            for index, slot in enumerate(self._slots):
                if slot is not None and slot.ticket is ticket:
                    self._slots[index] = None
            self._counts["finished" if state == "done" else state] += 1
        ticket.error = error
        if state != "done":
            ticket.finish_reason = "cancelled" if state == "cancelled" else "error"
        ticket.state = state
        try:
            if ticket.on_done is not None:
                ticket.on_done(ticket)
        except Exception as raised:
            logger.warning("on_done of request %d raised", ticket.id, exc_info=raised)
        finally:
            ticket._finished.set()

    def _drop_cancelled(self) -> None:
        with self._lock:
            waiting = [ticket for ticket in self._queue if ticket.cancel_asked]
            for ticket in waiting:
                self._queue.remove(ticket)
                self._open[ticket.id] = ticket
        for ticket in [ticket for ticket in self._open.values() if ticket.cancel_asked]:
            self._finish(ticket, "cancelled")

    def _fail_running(self, error: BaseException) -> None:
        """The cache was handed to a call that failed: drop it, and the requests whose past it held."""
        running = list(self._open.values())
        logger.error("a step of the engine failed; %d requests fail with it", len(running), exc_info=error)
        self._forget()
        for ticket in running:
            self._finish(ticket, "failed", error=f"the step failed: {_text(error)}")


def _check_weights(weights: Weights, model: HybridLM, dtype: str | None) -> None:
    if dtype is not None:
        raise ValueError(f"weights are in {weights.dtype} already; drop dtype={dtype!r}, or give it to prepare.")
    if weights.config != model.config:
        fields = [field.name for field in dataclasses.fields(model.config)]
        other = [name for name in fields if getattr(weights.config, name) != getattr(model.config, name)]
        raise ValueError(
            f"weights are of another configuration than the model ({', '.join(other)}); give the model that they were prepared from."
        )


def _live(ticket: Ticket) -> bool:
    return ticket.state not in FINISHED and not ticket.cancel_asked


def _replaced(values: Any, index: int, own: Any) -> np.ndarray:
    changed = np.array(values)
    changed[index] = own[0]
    return changed


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
