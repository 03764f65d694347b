"""An HTTP server of the OpenAI shape over the engine: completions and chats, streamed or whole, on one process.

    POST /v1/completions, /v1/chat/completions     GET /v1/models, /healthz, /metrics

`create_app` makes the application (Starlette) of a `Service`, `moejax.infer.server_run.HttpServer` serves it: pip install
'moejax[serve]'. Nothing here knows who asks: there is no key and no encryption, so that it belongs on the loopback or behind something
that has both.

An answer that breaks off in a stream (the engine failed, the server ends) is an event with an `error` in place of `[DONE]`. A client that
goes away, or does not read for a minute, frees its slot at the next step of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError("the server needs starlette and uvicorn: pip install 'moejax[serve]'") from error

from . import requests as engine_requests
from .server_answers import Answer
from .server_engine import EngineStopped, EngineThread
from .server_metrics import ServerMetrics
from .server_protocol import Ask, RequestError, bad, busy, parse, unavailable
from .server_reply import GONE, JsonResponse, Reply
from .server_text import TextStream, Tokenizer

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/healthz", "/metrics")
LEAST_BODY, BODY_PER_TOKEN = 1 << 20, 16  # bytes: a token of a text has some 4, an id in a JSON list up to 8
BODY_SECONDS = 30.0


class Service:
    """What stands behind one application: `engine` on a thread of its own, the tokenizer and the counts.

    Args:
      engine: `moejax.infer.engine.Engine`, or what has its submit, cancel, step, stats, slots, capacity and max_queue.
      tokenizer: see `server_text.Tokenizer`.
      model_name: what requests must name.
      encode: text of a completion -> ids; None: `tokenizer.encode`. Here a beginning of text is put in front.
      render: messages of a chat -> ids that end where the assistant begins; None: there are no chats. ValueError becomes a 400.
      stop_ids, chat_stop_ids: ids that end an answer and give no text; None: a chat ends like a completion.
      stall_seconds: a client that does not read for so long is cut off.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        encode: Callable[[str], Iterable[int]] | None = None,
        render: Callable[[Sequence[Mapping[str, Any]]], Iterable[int]] | None = None,
        stop_ids: Sequence[int] = (),
        chat_stop_ids: Sequence[int] | None = None,
        stall_seconds: float = 60.0,
    ):
        self.engine, self.capacity = EngineThread(engine), int(engine.capacity)
        self.tokenizer, self.model_name = tokenizer, model_name
        self.encode, self.render = encode or tokenizer.encode, render
        self.stop_ids = tuple(stop_ids)
        self.chat_stop_ids = self.stop_ids if chat_stop_ids is None else tuple(chat_stop_ids)
        self.stall_seconds, self.max_body = stall_seconds, max(LEAST_BODY, BODY_PER_TOKEN * self.capacity)
        self.metrics = ServerMetrics()
        self.draining = False

    async def drain(self, seconds: float) -> None:
        """Take no new request; wait for those that run, and cancel what is left after `seconds`."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self.engine.jobs and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        self.engine.cancel_all()

    # Answers

    async def completions(self, request: Request) -> Response | Reply:
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response | Reply:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response | Reply:
        arrived = time.monotonic()
        self._check_open()
        if self.engine.full:  # as `submit` would say, but after the body of up to a million tokens was read
            raise busy(f"{self.engine.engine.max_queue} requests wait, as many as max_queue allows; try again later.")
        body = await self._body(request)
        ask, wanted = await asyncio.to_thread(self._read, body, chat)  # a million tokens take a second to read
        self._check_open()
        try:
            job = self.engine.submit(wanted, arrived=arrived)
        except engine_requests.QueueFull as error:
            raise busy(str(error)) from None
        except ValueError as error:
            raise bad(str(error)) from None
        except EngineStopped:
            raise unavailable("the engine has failed") from None
        answer = Answer(chat=chat, model=self.model_name, log_probs=ask.log_probs, prompt_tokens=len(wanted.tokens))
        return Reply(self, request.url.path, job, answer, TextStream(self.tokenizer, ask.stop), ask, wanted.stop_ids)

    def _check_open(self) -> None:
        if self.draining:
            raise unavailable("the server is shutting down")
        if self.engine.failure is not None:
            raise unavailable("the engine has failed")

    async def _body(self, request: Request) -> bytes:
        """The body, read no further than it may be long."""
        too_large = RequestError(
            413, f"the body is larger than {self.max_body} bytes, the most for {self.capacity} tokens.", code="body_too_large"
        )
        if int(request.headers.get("content-length", 0)) > self.max_body:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self.max_body:
                        raise too_large
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {BODY_SECONDS:g} s.", code="timeout") from None
        return bytes(body)

    def _read(self, body: bytes, chat: bool) -> tuple[Ask, engine_requests.Request]:
        ask = parse(body, chat=chat, model=self.model_name)
        return ask, self._request(ask, self._prompt(ask, chat), chat)

    def _prompt(self, ask: Ask, chat: bool) -> np.ndarray:
        """The prompt's ids, int64 [N]."""
        name = "messages" if chat else "prompt"
        try:
            if not chat:
                ids = self.encode(ask.prompt) if isinstance(ask.prompt, str) else ask.prompt or []
            elif self.render is not None:
                ids = self.render(ask.messages or [])
            else:
                raise bad("this model's tokenizer has no markers of a dialog; use /v1/completions.", name, "no_chat")
            return np.array(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
        except ValueError as error:  # text that the tokenizer refuses, roles in an order that the dialog does not have
            raise bad(f"{name}: {error}", name) from None

    def _request(self, ask: Ask, prompt: np.ndarray, chat: bool) -> engine_requests.Request:
        if not len(prompt):
            raise bad("prompt is empty: it gives no token.", "prompt", "empty_prompt")
        room = self.capacity - len(prompt)
        most = max(room, 1) if ask.max_tokens is None else ask.max_tokens
        if most > room:
            asked = f" and max_tokens is {most}" if ask.max_tokens is not None else ""
            raise bad(
                f"the prompt has {len(prompt)} tokens{asked}; a request holds {self.capacity} tokens, prompt and answer together. "
                "Shorten one of them.",
                "messages" if chat else "prompt",
                "context_length_exceeded",
            )
        return engine_requests.Request(
            tokens=prompt,  # pyright: ignore[reportArgumentType]
            max_new_tokens=most,
            temperature=ask.temperature,
            top_k=ask.top_k,
            top_p=ask.top_p,
            seed=secrets.randbits(32) if ask.seed is None else ask.seed,
            stop_ids=self.chat_stop_ids if chat else self.stop_ids,
        )

    # Everything else

    async def models(self, request: Request) -> Response:
        entry = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "moejax", "max_model_len": self.capacity}
        return self._counted(request, JsonResponse({"object": "list", "data": [entry]}))

    async def health(self, request: Request) -> Response:
        """Whether new requests are taken: 200, or 503."""
        state = "failed" if self.engine.failure is not None else "draining" if self.draining else "ok"
        stats = {name: self.engine.stats.get(name) for name in ("slots", "busy", "queued")}
        return self._counted(request, JsonResponse({"status": state, **stats}, status_code=200 if state == "ok" else 503))

    async def metrics_page(self, request: Request) -> Response:
        page = self.metrics.page(self.engine.stats, self.engine.jobs)
        return PlainTextResponse(page, media_type="text/plain; version=0.0.4")

    async def refused(self, request: Request, error: Exception) -> Response:
        """Any error as one JSON object."""
        if isinstance(error, HTTPException):  # Starlette's own: no such route, another method
            allowed = (error.headers or {}).get("Allow", "")
            message = f"there is nothing at {request.url.path}; there are {', '.join(ROUTES)}."
            if error.status_code == 405:
                message = f"{request.method} is not allowed here; use {allowed}."
            error = RequestError(error.status_code, message, headers=error.headers)
        elif isinstance(error, ClientDisconnect):
            error = RequestError(GONE, "the client went away.")  # nobody reads it
        elif not isinstance(error, RequestError):  # Starlette logs it with its traceback
            error = RequestError(500, "the server failed at this request; its log says why.", code="internal_error")
        return self._counted(request, JsonResponse(error.body(), status_code=error.status, headers=error.headers))

    def _counted(self, request: Request, response: Response) -> Response:
        route = request.url.path if request.url.path in ROUTES else "other"
        self.metrics.request(route, response.status_code)
        return response


def create_app(service: Service) -> Starlette:
    """The application, which from its start to its end has the service's engine stepped."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.engine.cancel_all()
        await asyncio.to_thread(service.engine.close)

    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/models", service.models, methods=["GET"]),
        Route("/healthz", service.health, methods=["GET"]),
        Route("/metrics", service.metrics_page, methods=["GET"]),
    ]
    handlers = {kind: service.refused for kind in (HTTPException, RequestError, ClientDisconnect, Exception)}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
