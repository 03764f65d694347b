"""A server over an engine without a model, and a client of sockets: what test_server.py starts and talks to."""

import collections
import contextlib
import functools
import http.client
import itertools
import json
import socket
import threading
import time

from experiments.load_model import chat_ids
from moejax.data import ByteTokenizer
from moejax.infer.requests import QueueFull, Ticket, check_request
from moejax.infer.server import Service
from moejax.infer.server_run import HttpServer

EOS, TURN_END = ByteTokenizer.eos_id, ByteTokenizer.special_ids["turn_end"]
ASK = {"model": "m", "prompt": "Hello", "max_tokens": 50}


class ScriptedEngine:
    """The engine's interface without a model: `script(prompt)` gives the tokens of an answer, one a step."""

    def __init__(self, script, *, slots=4, capacity=200, max_queue=3):
        self.script, self.slots, self.capacity, self.max_queue = script, slots, capacity, max_queue
        self.gate = threading.Event()  # closed: steps wait, as for a slow device
        self.gate.set()
        self.broken = None  # raised by the next step
        self.log_prob = lambda count: -0.5 - 0.001 * count  # of an answer's token number `count`
        self._lock, self._ids = threading.Lock(), itertools.count()
        self._queue, self._running, self._counts = collections.deque(), {}, collections.Counter()

    def submit(self, request, *, on_token=None, on_done=None):
        prompt, sampling = check_request(request, vocab_size=330, capacity=self.capacity)
        with self._lock:
            if len(self._queue) >= self.max_queue:
                raise QueueFull(f"{len(self._queue)} requests wait")
            ticket = Ticket(next(self._ids), request, on_token=on_token, on_done=on_done, prompt=prompt, sampling=sampling)
            self._queue.append(ticket)
        return ticket

    def cancel(self, ticket):
        ticket.cancel_asked = True

    def step(self):
        if self.broken is not None:
            raise self.broken
        self._admit_and_drop()
        while not self.gate.wait(0.01):
            self._admit_and_drop()
        for ticket, tokens in list(self._running.items()):
            self._draw(ticket, tokens)
        self._counts["steps"] += 1
        return bool(self._queue or self._running)

    def _admit_and_drop(self):
        with self._lock:
            dropped = [ticket for ticket in [*self._queue, *self._running] if ticket.cancel_asked]
            self._queue = collections.deque(ticket for ticket in self._queue if not ticket.cancel_asked)
            for ticket in dropped:
                self._running.pop(ticket, None)
                self._end(ticket, "cancelled", "cancelled")
            while self._queue and len(self._running) < self.slots:
                ticket = self._queue.popleft()
                self._running[ticket] = iter(self.script(ticket.prompt.tolist()))
                self._counts["admitted"] += 1
                self._counts["prompt_tokens"] += len(ticket.prompt)

    def _draw(self, ticket, tokens):
        token = next(tokens, EOS)
        if isinstance(token, str):
            self._running.pop(ticket)
            self._end(ticket, "failed", "error", token)
            return
        ticket.tokens.append(token)
        self._counts["generated_tokens"] += 1
        ticket.on_token(ticket, token, self.log_prob(len(ticket.tokens)))
        if token in ticket.request.stop_ids or len(ticket.tokens) == ticket.request.max_new_tokens:
            self._running.pop(ticket)
            self._end(ticket, "done", "stop" if token in ticket.request.stop_ids else "length")

    def _end(self, ticket, state, reason, error=None):
        ticket.state, ticket.finish_reason, ticket.error = state, reason, error
        self._counts["finished" if state == "done" else state] += 1
        ticket.on_done(ticket)

    def stats(self):
        names = ("admitted", "finished", "cancelled", "failed", "prompt_tokens", "generated_tokens", "steps")
        return {"slots": self.slots, "busy": len(self._running), "queued": len(self._queue)} | {n: self._counts[n] for n in names}


def mirror(prompt):
    """The prompt's own bytes, then the end: an answer that depends on the prompt."""
    return [i for i in prompt if i < 256]


def endless(**settings):
    """An engine whose answers do not end, 2 ms a token."""
    engine = ScriptedEngine(lambda prompt: itertools.repeat(97), capacity=10_000_000, **settings)
    step = engine.step
    engine.step = lambda: (time.sleep(0.002), step())[1]
    return engine


@contextlib.contextmanager
def serving(engine, *, grace=5.0, **settings):
    """-> the server, which runs in a thread. Its exit status is `.status` afterwards."""
    render = functools.partial(chat_ids, ByteTokenizer())
    settings = {"model_name": "m", "stop_ids": (EOS,), "chat_stop_ids": (EOS, TURN_END), "render": render} | settings
    server = HttpServer(Service(engine, ByteTokenizer(), **settings), port=0, grace=grace)
    server.status = None
    thread = threading.Thread(target=lambda: setattr(server, "status", server.run()))
    thread.start()
    try:
        yield server
    finally:
        engine.gate.set()
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def send(port, body, path="/v1/completions", method="POST", headers=None):
    """-> (status, headers, body as JSON or text)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, headers or {})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, json.loads(text) if "json" in answer.headers["content-type"] else text


def get(port, path):
    return send(port, None, path, "GET")


def open_stream(port, body, path="/v1/completions", receive_buffer=None):
    """A socket with the request sent, nothing read."""
    data = json.dumps(body).encode()
    made = socket.socket()
    if receive_buffer:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(20)
    made.connect(("127.0.0.1", port))
    made.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return made


def read_events(made):
    """All events of a stream: objects, and "[DONE]"."""
    answer = http.client.HTTPResponse(made)
    answer.begin()
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.read().decode().split("\n\n")
    made.close()
    assert lines.pop() == "" and all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def text_of(parts):
    return "".join(part["choices"][0]["text"] for part in parts)


def events(port, body, path="/v1/completions"):
    return read_events(open_stream(port, {**body, "stream": True}, path))


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
