"""The answer to one accepted request on its way to the client: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from .server_answers import Answer, LogProb, Piece, dumps, log_prob
from .server_engine import End, Gone, Job, Token
from .server_protocol import Ask, RequestError, unavailable
from .server_text import TextStream

if TYPE_CHECKING:
    from .server import Service

WHOLE = ("stop", "length")  # why an answer ends that did not break off
GONE = 499  # what the metrics call an answer whose client went away


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class Disconnected(Exception):
    """The client went away before its answer was whole."""


class Reply:
    """An ASGI application of one answer. However it ends, its slot is free at the next step of the engine."""

    def __init__(self, service: Service, route: str, job: Job, answer: Answer, text: TextStream, ask: Ask, stop_ids: Sequence[int]):
        self.service, self.route, self.job, self.answer, self.text, self.ask = service, route, job, answer, text, ask
        self.stop_ids = frozenset(stop_ids)
        self.tokens = 0  # of the answer, up to its end
        self._marks: list[LogProb] = []  # log-probs of tokens whose text is not sent yet
        self._last: float | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            status = await (self._stream(send) if self.ask.stream else self._whole(scope, receive, send))
        except (Disconnected, OSError, TimeoutError):
            status = GONE  # or does not read
        finally:
            watcher.cancel()
            self.service.engine.cancel(self.job)
        self.service.metrics.request(self.route, status)  # a fault is counted where its 500 is made

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.job.events.put_nowait(Gone())

    async def _whole(self, scope: Any, receive: Any, send: Any) -> int:
        try:
            pieces = [piece async for piece in self._pieces()]
            response = JsonResponse(self.answer.whole(pieces, self.tokens))
        except RequestError as error:
            response = JsonResponse(error.body(), status_code=error.status, headers=error.headers)
        await self._within(response(scope, receive, send))
        return response.status_code

    async def _stream(self, send: Any) -> int:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._within(send({"type": "http.response.start", "status": 200, "headers": headers}))
        status = 200
        try:
            if (opening := self.answer.opening()) is not None:
                await self._event(send, dumps(opening))
            async for piece in self._pieces():
                await self._event(send, dumps(self.answer.chunk(piece)))
            if self.ask.include_usage:
                await self._event(send, dumps(self.answer.usage_chunk(self.tokens)))
            await self._event(send, b"[DONE]")
        except RequestError as error:
            status = error.status
            await self._event(send, dumps(error.body()))
        await self._within(send({"type": "http.response.body", "body": b"", "more_body": False}))
        return status

    async def _event(self, send: Any, data: bytes) -> None:
        await self._within(send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True}))

    async def _within(self, sending: Any) -> None:
        """A client that does not read must not keep its slot."""
        async with asyncio.timeout(self.service.stall_seconds):
            await sending

    async def _pieces(self) -> AsyncIterator[Piece]:
        """The answer part by part: what has come since the last part is one. RequestError when it breaks off."""
        while True:
            events = [await self.job.events.get()]
            while not self.job.events.empty():
                events.append(self.job.events.get_nowait())
            text, end = "", None
            for event in events:
                if isinstance(event, Gone):
                    raise Disconnected
                event = _checked(event)
                text += self._take(event)
                if self.text.stopped:
                    yield Piece(text, self._ready(final=False), "stop")
                    return
                if isinstance(event, End):
                    end = event
                    break
            if end is not None and end.reason in WHOLE:
                yield Piece(text, self._ready(final=True), end.reason)
                return
            ready = self._ready(final=False)
            if text or ready:
                yield Piece(text, ready)
            if end is not None:
                raise _broken_off(end)

    def _take(self, event: Token | End) -> str:
        if isinstance(event, End):
            return self.text.end() if event.reason in WHOLE else ""
        metrics = self.service.metrics
        if self._last is None:
            metrics.first_token.observe(event.time - self.job.arrived)
        else:
            metrics.token.observe(event.time - self._last)
        self._last = event.time
        self.tokens += 1
        if self.answer.log_probs:
            self._marks.append(log_prob(self.service.tokenizer, event.id, event.log_prob, self.text.decoded))
        return "" if event.id in self.stop_ids else self.text.add(event.id)

    def _ready(self, final: bool) -> list[LogProb]:
        """The log-probs that go with the text sent so far; those of a stop string never go."""
        ready = [mark for mark in self._marks if final or mark.offset < self.text.sent]
        del self._marks[: len(ready)]  # offsets never fall
        return ready


def _checked(event: Token | End) -> Token | End:
    """A token that no distribution gave ends the answer: JSON has no NaN, and the tokens after it are worth nothing."""
    if isinstance(event, Token) and not math.isfinite(event.log_prob):
        return End("error", f"token {event.id} has the log-prob {event.log_prob}")
    return event


def _broken_off(end: End) -> RequestError:
    if end.reason == "cancelled":
        return unavailable("the server is shutting down")
    return RequestError(500, f"the answer could not be finished: {end.error}", code="engine_error")
