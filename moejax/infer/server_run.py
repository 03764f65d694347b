"""Serving the application until a signal ends it: a socket, uvicorn, and a shutdown in which streams finish."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import FrameType

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ImportError("the server needs starlette and uvicorn: pip install 'moejax[serve]'") from error

from .server import Service, create_app

LAST_SECONDS = 5  # for answers to leave after the engine has ended them
KEEP_ALIVE_SECONDS = 30
HEAD_SECONDS = 30.0  # for the head of a request; the body has `server.BODY_SECONDS`
SPARE_CONNECTIONS = 64  # for probes, and requests that are refused
BACKLOG = 2048


class HttpServer:
    """The application of a `Service` on one socket, which is bound at once: connections wait there until `run`.

    SIGTERM, SIGINT (when `run` is on the main thread) or `stop` end it: new requests get a 503, those that run have `grace` seconds to
    finish and are cut off then, with an error as their last event. A second signal cuts them off at once.

    A connection without a whole head of a request for 30 seconds is closed. There may be 2 x (slots + max_queue) + 64 connections:
    those whose answers run or wait, as many that are idle between two requests, and some for probes and requests that are refused.
    Those beyond get a bare 503, which the metrics do not count. With 8 slots and a queue of 256 it is 592, within the 1024 files
    that a process usually may open.

    Args:
      port: 0 takes any free one, see `.port`.
      grace: seconds.

    Raises ValueError: an address or port that cannot be had.
    """

    def __init__(self, service: Service, *, host: str = "127.0.0.1", port: int = 8000, grace: float = 30.0):
        if not 0 <= port <= 65535:
            raise ValueError(f"port is {port}; it must lie in [0, 65535] (0: any free one).")
        if not grace >= 0:
            raise ValueError(f"grace is {grace}; it must be at least 0 seconds.")
        self._service, self._grace = service, grace
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        engine = service.engine.engine
        config = uvicorn.Config(
            create_app(service),
            http=_Connection,
            ws="none",
            lifespan="on",
            log_config=None,  # logging belongs to the program
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            limit_concurrency=2 * (engine.slots + engine.max_queue) + SPARE_CONNECTIONS + 1,  # uvicorn refuses at the limit itself
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        self._server = _Server(config, self)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task | None = None
        self._asked = 0

    def run(self) -> int:
        """Serve until the end; -> the exit status: 0, or 1 when the engine failed."""
        try:
            asyncio.run(self._serve())
        finally:
            self._socket.close()
        return 0 if self._service.engine.failure is None else 1

    def stop(self) -> None:
        """Begin the shutdown; the second call cuts answers off. From any thread, or a signal handler; nothing happens after the end."""
        self._asked += 1
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it is over
                self._loop.call_soon_threadsafe(self._stop)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._service.engine.on_failure = self.stop
        if self._asked:  # before the loop was there
            self._stop()
        await self._server.serve(sockets=[self._socket])

    def _stop(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        elif self._asked > 1:
            self._service.engine.cancel_all()

    async def _end(self) -> None:
        await self._service.drain(self._grace if self._service.engine.failure is None else 0.0)
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to `HttpServer`: by itself it would refuse connections at once, and raise the signal again at the
    end, so that the exit status is never 0."""

    def __init__(self, config: uvicorn.Config, owner: HttpServer):
        super().__init__(config)
        self._owner = owner

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._owner.stop()


class _Connection(H11Protocol):
    """uvicorn's, closed when a head does not come: by itself it waits for ever for one that has begun, and for the first one."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # ends the time of keep-alive, whatever has come
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """The time runs while no request is being answered, and more bytes do not make it longer."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise ValueError(
            f"{host}:{port} cannot be served: {error.strerror or error}; give another --host or --port (0: any free)."
        ) from None
    return made
