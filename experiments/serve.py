"""Serve a model over HTTP in the OpenAI shape, with continuous batching, on one process.

    python experiments/serve.py --run runs/20260101-120000-tiny
    python experiments/serve.py --hub Kimi-Linear-48B-A3B-Instruct --slots 32 --capacity 131072
    python experiments/serve.py --preset tiny --random-weights            # nonsense, to try the server
    curl localhost:8000/v1/completions -d '{"model": "tiny", "prompt": "def ", "max_tokens": 64, "stream": true}'

GET /v1/models, /healthz and /metrics tell what it has, whether it takes requests, and how it fares. Ctrl-C and SIGTERM let streams
finish (--grace), then end it with status 0. Needs pip install 'moejax[serve]'.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
from typing import Any, Literal

import tyro

if not __package__:  # started as a file: its folder is on the path, and the one above it is not
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.load_model import Source, chat_ids, has_chat, prompt_ids, stop_ids
from moejax.infer.engine import Engine
from moejax.infer.requests import at_least_one


@dataclasses.dataclass(frozen=True)
class Serve(Source):
    """Serve a model over HTTP in the OpenAI shape, with continuous batching, on one process."""

    seed: int = 0
    """Of the random weights."""
    name: str | None = None
    """What requests call the model. None: the folder's or preset's name."""
    host: str = "127.0.0.1"
    """Address to listen on. There is no key and no encryption: other than the loopback only behind something that has both."""
    port: int = 8000
    """0: any free one."""
    slots: int = 8
    """Answers that are decoded at once."""
    capacity: int = 4096
    """Tokens of a request, prompt and answer together."""
    chunk: int = 512
    """Prompt tokens read in one step."""
    max_queue: int = 256
    """Requests that may wait for a slot; beyond it a request gets a 429."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage of the KDA states."""
    grace: float = 30.0
    """Seconds that running answers have to finish after SIGTERM or Ctrl-C."""

    def check(self) -> None:
        """ValueError for settings that no model could be served with, before one is read."""
        for name in ("slots", "capacity", "chunk", "max_queue"):
            at_least_one(f"--{name.replace('_', '-')}", getattr(self, name))
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port is {self.port}; it must lie in [0, 65535] (0: any free one).")
        if not self.grace >= 0:
            raise ValueError(f"--grace is {self.grace}; it must be at least 0 seconds.")

    def model_name(self) -> str:
        """What requests call the model: a folder's whole name, whose dots are no suffix."""
        if self.preset is not None and self.preset.endswith(".json"):
            return self.name or pathlib.Path(self.preset).stem
        return self.name or os.path.basename(os.path.abspath(self.run or self.hub or self.preset or ""))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; -> the exit status: 0, 1 when the engine failed, 2 for bad input, 130 when aborted before serving."""
    try:
        try:
            server = start(tyro.cli(Serve, args=arguments, prog="python -m experiments.serve", description=__doc__))
        except (ValueError, FileNotFoundError, ImportError, RuntimeError) as error:  # RuntimeError: the device's, such as of its memory
            print(f"error: {error}", file=sys.stderr)
            return 2
        status = server.run()
    except KeyboardInterrupt:
        print("aborted", file=sys.stderr)
        return 130
    print("ended" if status == 0 else "ended: the engine failed", file=sys.stderr, flush=True)
    return status


def start(config: Serve) -> Any:
    """Load, listen, compile; -> the `HttpServer`, ready to run until a signal ends it."""
    config.check()
    from moejax.infer.server import Service  # here, so that --help needs neither starlette nor uvicorn
    from moejax.infer.server_run import HttpServer

    loaded = config.load(seed=config.seed)
    tokenizer = loaded.tokenizer
    engine = Engine(
        loaded.model,
        loaded.variables,
        slots=config.slots,
        capacity=config.capacity,
        chunk=config.chunk,
        max_queue=config.max_queue,
        state_dtype=config.state_dtype,
    )
    name = config.model_name()
    service = Service(
        engine,
        tokenizer,
        model_name=name,
        encode=functools.partial(prompt_ids, tokenizer),
        render=functools.partial(chat_ids, tokenizer) if has_chat(tokenizer) else None,
        stop_ids=stop_ids(tokenizer),
        chat_stop_ids=stop_ids(tokenizer, chat=True),
    )
    server = HttpServer(service, host=config.host, port=config.port, grace=config.grace)  # before the compile: a port in use fails fast
    print("compiling", file=sys.stderr, flush=True)
    engine.warm_up()
    print(f"serving {name} at {server.url}", flush=True)
    return server


if __name__ == "__main__":
    sys.exit(main())
