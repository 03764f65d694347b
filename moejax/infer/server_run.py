"""Serving the application until a signal ends it: a socket, uvicorn, and a shutdown in which streams finish."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from types import FrameType
from typing import Any

try:
    import uvicorn
except ImportError as error:
    raise ImportError("the server needs starlette and uvicorn: pip install 'moejax[serve]'") from error

LAST_SECONDS = 5  # for answers to leave after the engine has ended them
KEEP_ALIVE_SECONDS = 30
BACKLOG = 2048


class HttpServer:
    """One application of `create_app` on one socket, which is bound at once: connections wait there until `run`.

    SIGTERM, SIGINT (when `run` is on the main thread) or `stop` end it: new requests get a 503, those that run have `grace` seconds to
    finish and are cut off then, with an error as their last event. A second signal cuts them off at once.

    Args:
      port: 0 takes any free one, see `.port`.
      grace: seconds.

    Raises ValueError: an address or port that cannot be had.
    """

    def __init__(self, app: Any, *, host: str = "127.0.0.1", port: int = 8000, grace: float = 30.0):
        if not 0 <= port <= 65535:
            raise ValueError(f"port is {port}; it must lie in [0, 65535] (0: any free one).")
        if not grace >= 0:
            raise ValueError(f"grace is {grace}; it must be at least 0 seconds.")
        self._service, self._grace = app.state.service, grace
        self._socket = _bind(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self.started = threading.Event()
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,  # logging belongs to the program
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
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
        self._service.on_failure = self.stop
        if self._asked:  # before the loop was there
            self._stop()
        await self._server.serve(sockets=[self._socket])

    def _stop(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end(self._grace))
        elif self._asked > 1:
            self._service.engine.cancel_all()

    async def _end(self, grace: float) -> None:
        await self._service.drain(0.0 if self._service.engine.failure is not None else grace)
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn's, which tells when it listens, and leaves signals to `HttpServer`: by itself it would refuse connections at once, and
    raise the signal again at the end, so that the exit status is never 0."""

    def __init__(self, config: uvicorn.Config, owner: HttpServer):
        super().__init__(config)
        self._owner = owner

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._owner.started.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._owner.stop()


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
