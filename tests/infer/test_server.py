"""The HTTP server: requests and errors over a scripted engine, and one process with the real one."""

import gc
import http.client
import itertools
import json
import math
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from experiments import serve as cli
from experiments.load_model import Loaded
from moejax.data import ByteTokenizer
from moejax.infer import server_run
from moejax.infer.requests import Ticket
from moejax.infer.server import Service
from moejax.infer.server_answers import Answer
from moejax.infer.server_engine import Job
from moejax.infer.server_reply import Reply
from moejax.infer.server_run import HttpServer
from moejax.infer.server_text import TextStream

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from scripted_server import ASK, ScriptedEngine, endless, events, get, mirror, open_stream, read_events, send, serving, text_of, until

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plain():
    """One server for all tests that leave it as it was."""
    with serving(ScriptedEngine(mirror)) as server:
        yield server


# Answers.


def test_a_stream_is_the_whole_answer_in_pieces(plain):
    prompt = "naïve 漢字 → 😀😀 é\u0301 end"
    ask = {**ASK, "prompt": prompt, "stream_options": {"include_usage": True}, "logprobs": 0}
    status, _, whole = send(plain.port, {k: v for k, v in ask.items() if k != "stream_options"})
    assert status == 200 and whole["object"] == "text_completion" and whole["model"] == "m"
    choice = whole["choices"][0]
    assert choice["text"] == prompt and choice["finish_reason"] == "stop" and choice["index"] == 0
    count = len(prompt.encode())
    assert whole["usage"] == {"prompt_tokens": count, "completion_tokens": count + 1, "total_tokens": 2 * count + 1}
    *parts, usage, done = events(plain.port, ask)
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert text_of(parts) == prompt
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert len({part["id"] for part in parts}) == 1 and parts[0]["object"] == "text_completion"
    marks = choice["logprobs"]
    assert marks["token_logprobs"] == pytest.approx([-0.5 - 0.001 * (i + 1) for i in range(count + 1)])
    assert marks["tokens"][-1] == "<|eos|>" and marks["text_offset"][0] == 0 and len(marks["text_offset"]) == count + 1
    streamed = [part["choices"][0]["logprobs"] for part in parts if part["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [entry for part in streamed for entry in part[name]] == marks[name]


def test_prompts_as_ids_and_in_a_list(plain):
    for prompt in ("abc", ["abc"], [97, 98, 99], [[97, 98, 99]]):
        _, _, answer = send(plain.port, {**ASK, "prompt": prompt})
        assert answer["choices"][0]["text"] == "abc"
    _, _, answer = send(plain.port, {**ASK, "prompt": "abcdef", "max_tokens": 2})
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["finish_reason"] == "length"
    _, _, answer = send(plain.port, {"model": "m", "prompt": "x" * 40})  # without max_tokens: 16
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_frees_the_slot(plain, stream):
    ask = {**ASK, "prompt": "one two→three four", "stop": ["o→t", "four"], "logprobs": 0}
    if stream:
        parts = [part["choices"][0] for part in events(plain.port, ask) if part != "[DONE]"]
        text, reason = "".join(part["text"] for part in parts), parts[-1]["finish_reason"]
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
    else:
        answer = send(plain.port, ask)[2]
        assert answer["usage"]["completion_tokens"] == len("one two→t".encode())
        text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        tokens = answer["choices"][0]["logprobs"]["tokens"]
    assert (text, reason, "".join(tokens)) == ("one tw", "stop", "one tw")
    until(lambda: get(plain.port, "/healthz")[2]["busy"] == 0)


def test_a_stop_id_gives_no_text_though_it_has_some():
    with serving(ScriptedEngine(mirror), stop_ids=(ord("!"),)) as server:
        answer = send(server.port, {**ASK, "prompt": "ab!c"})[2]
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3


def test_chats(plain):
    ask = {"model": "m", "messages": [{"role": "system", "content": "é"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    answer = send(plain.port, {**ask, "logprobs": True, "max_completion_tokens": 30}, "/v1/chat/completions")[2]
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion" and choice["message"] == {"role": "assistant", "content": "éhi"}
    # bos, [system] é [turn_end] [user] hi [turn_end] [assistant], as the model was trained; the answer ends with eos.
    assert answer["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    first = choice["logprobs"]["content"][0]
    assert first == {"token": "\ufffd", "logprob": pytest.approx(-0.501), "bytes": [0xC3], "top_logprobs": []}
    head, *parts, done = events(plain.port, ask, "/v1/chat/completions")
    assert head["choices"][0]["delta"] == {"role": "assistant", "content": ""} and head["object"] == "chat.completion.chunk"
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == "éhi" and done == "[DONE]"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    refused = send(plain.port, {**ask, "messages": [{"role": "tool", "content": "x"}]}, "/v1/chat/completions")
    assert refused[0] == 400 and refused[2]["error"]["param"] == "messages" and "no tool call" in refused[2]["error"]["message"]


def test_without_a_dialog_there_are_no_chats():
    with serving(ScriptedEngine(mirror), render=None) as server:
        status, _, answer = send(server.port, {"model": "m", "messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions")
    assert status == 400 and answer["error"]["code"] == "no_chat" and server.status == 0


# Errors.

BAD = [  # (change to ASK, status, param, a word of the message)
    ({"prompt": None}, 400, "prompt", "missing"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": ["a", "b"]}, 400, "prompt", "one prompt"),
    ({"prompt": [1, "b"]}, 400, "prompt", "one prompt"),
    ({"prompt": [1, -1]}, 400, "prompt", "-1"),
    ({"prompt": [None]}, 400, "prompt", "holds null"),
    ({"prompt": [1, None, -5]}, 400, "prompt", "holds null"),
    ({"prompt": [1, True]}, 400, "prompt", "true"),
    ({"prompt": [1, 10**30]}, 400, "prompt", "integers"),
    ({"prompt": [329, 330]}, 400, None, "[0, 330)"),
    ({"prompt": 5}, 400, "prompt", "string"),
    ({"prompt": "x" * 151}, 400, "prompt", "holds 200 tokens"),
    ({"max_tokens": 196}, 400, "prompt", "5 tokens and max_tokens is 196"),
    ({"max_tokens": 0}, 400, "max_tokens", "[1,"),
    ({"max_tokens": 1.0}, 400, "max_tokens", "integer"),
    ({"max_tokens": True}, 400, "max_tokens", "integer"),
    ({"temperature": -0.1}, 400, "temperature", "at least 0"),
    ({"temperature": "1"}, 400, "temperature", "number"),
    ({"temperature": 1e-9}, 400, None, "1e-06"),
    ({"temperature": 10**400}, 400, "temperature", "number"),
    ({"top_p": 0}, 400, "top_p", "(0, 1]"),
    ({"top_p": 1.5}, 400, "top_p", "(0, 1]"),
    ({"top_k": -1}, 400, "top_k", "integer"),
    ({"seed": 2**32}, 400, "seed", "integer"),
    ({"stop": ""}, 400, "stop", "characters"),
    ({"stop": ["a"] * 5}, 400, "stop", "up to 4"),
    ({"stop": [1]}, 400, "stop", "string"),
    ({"stream": 1}, 400, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream is not true"),
    ({"stream": True, "stream_options": {"usage": True}}, 400, "stream_options.usage", "unknown field"),
    ({"n": 2}, 400, "n", "only 1"),
    ({"best_of": 2}, 400, "best_of", "only 1"),
    ({"echo": True}, 400, "echo", "only false"),
    ({"logprobs": 1}, 400, "logprobs", "only 0"),
    ({"logprobs": False}, 400, "logprobs", "only 0"),
    ({"presence_penalty": 0.5}, 400, "presence_penalty", "only 0"),
    ({"messages": []}, 400, "messages", "unknown field 'messages'"),
    ({"temprature": 1, "\ud800": 1}, 400, "temprature", "unknown fields 'temprature'"),
    ({"\ud800": 1}, 400, "\ud800", "unknown field"),
    ({"model": None}, 400, "model", "missing"),
    ({"model": "gpt"}, 404, "model", "no model 'gpt'"),
    ({"model": 5}, 400, "model", "string"),
]
BAD_CHATS = [
    ({"messages": None}, "messages", "missing"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": ["x"]}, "messages[0]", "object"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name", "unknown field"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages", "the roles are"),
    ({"messages": [{"role": "user"}]}, "messages", "must be a str"),
    ({"messages": [{"role": "user", "content": {"a": "x" * 5000}}]}, "messages", "x...x"),
    *(
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}]},
            "messages[0].tool_calls",
            f"is {shown}; it must be a list",
        )
        for calls, shown in ((5, "5"), (True, "true"), (False, "false"), ("abc", '"abc"'), ({"a": 1}, "object"))
    ),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [5]}]}, "messages", "the tool call 5"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens", "give one"),
    ({"top_logprobs": 3}, "top_logprobs", "only 0"),
    ({"tools": []}, "tools", "unknown field"),
    ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages", "holds 200 tokens"),
]


def test_every_bad_request_is_one_clear_error(plain):
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    cases = [("/v1/completions", {**ASK, **change}, *rest) for change, *rest in BAD]
    cases += [("/v1/chat/completions", {**chat, **change}, 400, *rest) for change, *rest in BAD_CHATS]
    for path, body, status, param, words in cases:
        got, _, answer = send(plain.port, body, path)
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, body
        error = answer["error"]
        assert (got, error["param"], error["type"]) == (status, param, "invalid_request_error"), (body, answer)
        assert words in error["message"] and len(error["message"]) < 1000, (body, error)
    assert get(plain.port, "/healthz")[2] == {"status": "ok", "slots": 4, "busy": 0, "queued": 0}


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "no JSON"),
        (b'{"model": "m", ', "no JSON"),
        (b"\xff\xfe{}", "no JSON"),
        (b"[]", "must be an object"),
        (b'{"model": "m", "prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": ' + b"[" * 100_000, "nested"),
        (b'{"model": "m", "prompt": "x", "seed": 1, "seed": 2}', 'the field "seed" stands in one object more than once'),
        (b'{"model": "m", "prompt": "x", "stream_options": {"include_usage": true, "include_usage": false}}', '"include_usage"'),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "no JSON"),
    ],
)
def test_bodies_that_are_no_request(plain, body, words):
    status, _, answer = send(plain.port, body)
    assert status == 400 and words in answer["error"]["message"]


def test_routes_methods_and_sizes(plain):
    assert send(plain.port, ASK, "/v1/completion")[0] == 404
    status, headers, answer = get(plain.port, "/v1/completions")
    assert status == 405 and headers["Allow"] == "POST" and "use POST" in answer["error"]["message"]
    assert send(plain.port, ASK, "/metrics")[0] == 405
    status, _, answer = get(plain.port, "/v1/models")
    assert status == 200 and [entry["id"] for entry in answer["data"]] == ["m"]
    status, _, answer = send(plain.port, {**ASK, "prompt": "x" * (1 << 20)})
    assert status == 413 and answer["error"]["code"] == "body_too_large"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"  # without a length in the header
    with socket.create_connection(("127.0.0.1", plain.port), timeout=20) as made:
        made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + 17 * chunk)
        assert made.recv(12) == b"HTTP/1.1 413"


def test_a_full_queue_asks_to_come_back():
    engine = ScriptedEngine(mirror, slots=1, max_queue=1)
    with serving(engine) as server:
        engine.gate.clear()
        first = open_stream(server.port, {**ASK, "stream": True})
        until(lambda: engine.stats()["admitted"] == 1)
        second = open_stream(server.port, {**ASK, "stream": True})
        until(lambda: engine.stats()["queued"] == 1)
        status, headers, answer = send(server.port, ASK)
        assert status == 429 and headers["Retry-After"] == "1" and answer["error"]["type"] == "rate_limit_error"
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as made:  # said at once, before the body is there
            made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
            assert made.recv(12) == b"HTTP/1.1 429"
        engine.gate.set()
        for made in (first, second):
            assert text_of(read_events(made)[:-1]) == "Hello"
        page = get(server.port, "/metrics")[2]
    assert 'moejax_server_requests_total{route="/v1/completions",status="429"} 2' in page
    assert 'moejax_server_requests_total{route="/v1/completions",status="200"} 2' in page


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(stream):
    engine = endless(slots=2)
    with serving(engine) as server:
        gone = open_stream(server.port, {**ASK, "max_tokens": 9_000_000, "stream": stream})
        until(lambda: engine.stats()["generated_tokens"] > 5)
        if stream:
            assert b"data: " in gone.recv(4096)
        waiting = [open_stream(server.port, {**ASK, "max_tokens": 9_000_000, "stream": stream}) for _ in range(2)]
        until(lambda: engine.stats()["queued"] == 1)
        for made in (gone, *waiting):
            made.close()
        until(lambda: engine.stats()["cancelled"] == 3)
        until(lambda: get(server.port, "/healthz")[2]["busy"] == 0)
        assert engine.stats()["queued"] == 0
        until(lambda: 'status="499"} 3' in get(server.port, "/metrics")[2])
        assert send(server.port, {**ASK, "max_tokens": 3})[2]["choices"][0]["text"] == "aaa"
        answer = send(server.port, {**ASK, "max_tokens": 9_000_000, "stop": ["aaaa"]})[2]  # an answer that its stop string ends
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 4)
        until(lambda: engine.stats()["cancelled"] == 4 and engine.stats()["busy"] == 0)


def test_nothing_of_a_request_is_kept():
    def kept():
        gc.collect()
        return [kind for kind in map(type, gc.get_objects()) if kind in (Job, Reply, TextStream, Ticket)]

    before = len(kept())
    engine = ScriptedEngine(mirror)
    with serving(engine) as server:
        for number in range(12):
            send(server.port, {**ASK, "max_tokens": 0 if number % 3 else 5})
            events(server.port, {**ASK, "stop": "l"})
            open_stream(server.port, {**ASK, "stream": True}).close()
        until(lambda: len(kept()) == before)


def test_a_client_that_does_not_read_is_cut_off():
    engine = ScriptedEngine(lambda prompt: itertools.repeat(97), capacity=1_000_000)
    name = "m" * 100_000  # in every event: the sockets' buffers fill soon
    with serving(engine, model_name=name, stall_seconds=0.3) as server:
        made = open_stream(server.port, {"model": name, "prompt": "x", "max_tokens": 900_000, "stream": True}, receive_buffer=4096)
        until(lambda: engine.stats()["cancelled"] == 1)
        until(lambda: get(server.port, "/healthz")[2]["busy"] == 0)
        made.close()


def test_an_answer_that_the_engine_cannot_finish():
    script = lambda prompt: [97, "the logits are NaN"] if prompt[0] == 33 else mirror(prompt)
    with serving(ScriptedEngine(script)) as server:
        status, _, answer = send(server.port, {**ASK, "prompt": "!"})
        assert status == 500 and "logits are NaN" in answer["error"]["message"] and answer["error"]["code"] == "engine_error"
        *parts, last = events(server.port, {**ASK, "prompt": "!"})
        assert text_of(parts) == "a" and "logits are NaN" in last["error"]["message"]
        assert send(server.port, ASK)[2]["choices"][0]["text"] == "Hello"
    assert server.status == 0


def test_a_log_prob_that_is_no_number_ends_the_answer():
    engine = ScriptedEngine(mirror)
    engine.log_prob = lambda count: math.nan if count == 3 else -0.5
    with serving(engine) as server:
        for ask in (ASK, {**ASK, "logprobs": 0}):
            status, _, answer = send(server.port, ask)
            assert status == 500 and answer["error"]["code"] == "engine_error" and "log-prob nan" in answer["error"]["message"]
            *parts, last = events(server.port, ask)
            assert text_of(parts) == "He" and "log-prob nan" in last["error"]["message"]
        until(lambda: engine.stats()["busy"] == 0)
        page = get(server.port, "/metrics")[2]
    assert 'status="500"} 4' in page and 'status="499"' not in page


def test_a_dead_engine_ends_the_server_with_an_error(caplog):
    engine = ScriptedEngine(mirror)
    with serving(engine) as server:
        engine.broken = MemoryError("the device is gone")
        status, _, answer = send(server.port, ASK)
        assert status == 500 and "the device is gone" in answer["error"]["message"]
        until(lambda: server.status is not None)
    assert server.status == 1 and "the engine's thread failed" in caplog.text


def test_a_fault_of_the_server_is_an_error_too(caplog):
    def encode(text):
        raise KeyError(text)

    with serving(ScriptedEngine(mirror), encode=encode) as server:
        status, _, answer = send(server.port, ASK)
        assert status == 500 and answer["error"]["type"] == "server_error" and "Hello" not in answer["error"]["message"]
        assert send(server.port, {**ASK, "prompt": [97]})[2]["choices"][0]["text"] == "a"
    assert "KeyError" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_in_an_answer_is_counted_once_and_not_as_the_clients(stream, caplog, monkeypatch):
    def fault(*_):
        raise KeyError("fault")

    monkeypatch.setattr(Answer, "chunk" if stream else "whole", fault)
    engine = ScriptedEngine(mirror)
    with serving(engine) as server:
        if stream:
            with pytest.raises(http.client.IncompleteRead):
                events(server.port, ASK)
        else:
            assert send(server.port, ASK)[0] == 500
        until(lambda: engine.stats()["busy"] == 0)
        counted = [line for line in get(server.port, "/metrics")[2].splitlines() if line.startswith("moejax_server_requests_total")]
    assert counted == ['moejax_server_requests_total{route="/v1/completions",status="500"} 1'] and "KeyError" in caplog.text


def test_a_connection_without_a_request_is_closed(monkeypatch):
    monkeypatch.setattr(server_run, "HEAD_SECONDS", 0.2)
    ask = json.dumps(ASK).encode()
    whole = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(ask) + ask
    engine = ScriptedEngine(mirror)
    with serving(engine) as server:
        engine.gate.clear()
        opened = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(3)]
        opened[1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        opened[2].sendall(whole)
        assert opened[0].recv(1) == opened[1].recv(1) == b""
        time.sleep(0.3)
        engine.gate.set()  # an answer takes the time that it takes
        until(lambda: engine.stats()["finished"] == 1)
        opened[2].sendall(b"POST /v1/comp")  # the next request, on the same connection
        answer = b""
        while part := opened[2].recv(65536):
            answer += part
        assert b'"Hello"' in answer and answer.count(b"HTTP/1.1") == 1
        for made in opened:
            made.close()


def test_connections_have_a_limit(monkeypatch):
    monkeypatch.setattr(server_run, "SPARE_CONNECTIONS", 1)
    with serving(ScriptedEngine(mirror, slots=1, max_queue=1)) as server:
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(4)]
        assert send(server.port, ASK)[0] == 200
        held.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        until(lambda: send(server.port, ASK)[0] == 503)
        for made in held:
            made.close()
        until(lambda: send(server.port, ASK)[0] == 200)


# The page of metrics, and the end.


def test_metrics():
    engine = ScriptedEngine(mirror)
    with serving(engine) as server:
        for prompt in ("abc", "de"):
            send(server.port, {**ASK, "prompt": prompt})
        send(server.port, {**ASK, "n": 2})
        send(server.port, ASK, "/secret/path")
        status, headers, page = get(server.port, "/metrics")
    assert status == 200 and headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = [line for line in page.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [0-9.e+-]+', line) for line in lines)
    values = dict(line.rsplit(" ", 1) for line in lines)
    expected = {
        'requests_total{route="/v1/completions",status="200"}': 2,
        'requests_total{route="/v1/completions",status="400"}': 1,
        'requests_total{route="other",status="404"}': 1,
        "prompt_tokens_total": 5,
        "generated_tokens_total": 7,
        "busy_slots": 0,
        "queue_length": 0,
        "slots": 4,
        "finished_total": 2,
        "first_token_seconds_count": 2,
        'first_token_seconds_bucket{le="+Inf"}': 2,
        "token_seconds_count": 5,
    }
    assert {name: float(values[f"moejax_server_{name}"]) for name in expected} == expected
    helps = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(helps) == len(set(helps))


def test_the_time_to_the_first_token_begins_with_the_request():
    with serving(ScriptedEngine(mirror), encode=lambda text: (time.sleep(0.2), ByteTokenizer().encode(text))[1]) as server:
        send(server.port, ASK)
        page = get(server.port, "/metrics")[2]
    assert float(re.search(r"first_token_seconds_sum (\S+)", page)[1]) >= 0.2


def test_a_shutdown_lets_streams_finish_and_takes_nothing_new():
    engine = ScriptedEngine(mirror)
    with serving(engine) as server:
        engine.gate.clear()
        made = open_stream(server.port, {**ASK, "stream": True})
        until(lambda: engine.stats()["admitted"] == 1)
        server.stop()
        until(lambda: get(server.port, "/healthz")[2]["status"] == "draining")
        assert get(server.port, "/healthz")[0] == 503
        status, headers, answer = send(server.port, ASK)
        assert status == 503 and "shutting down" in answer["error"]["message"] and headers["Retry-After"] == "1"
        engine.gate.set()
        *parts, done = read_events(made)
        assert text_of(parts) == "Hello" and done == "[DONE]"
        until(lambda: server.status == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_shutdown_cuts_off_what_does_not_finish(stream):
    engine = endless()
    with serving(engine, grace=0.1) as server:
        made = open_stream(server.port, {**ASK, "max_tokens": 9_000_000, "stream": stream})
        until(lambda: engine.stats()["generated_tokens"] > 5)
        server.stop()
        if stream:
            assert "shutting down" in read_events(made)[-1]["error"]["message"]
        else:
            answer = http.client.HTTPResponse(made)
            answer.begin()
            assert answer.status == 503 and "shutting down" in json.loads(answer.read())["error"]["message"]
            made.close()
        until(lambda: server.status == 0)


def test_ports_that_cannot_be_had(plain):
    service = Service(ScriptedEngine(mirror), ByteTokenizer(), model_name="m")
    with pytest.raises(ValueError, match=rf"127.0.0.1:{plain.port} cannot be served"):
        HttpServer(service, port=plain.port)
    with pytest.raises(ValueError, match=r"\[0, 65535\]"):
        HttpServer(service, port=70000)


# The command line.


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--slots", "0"], "--slots is 0"),
        (["--max-queue", "-1"], "--max-queue is -1"),
        (["--port", "99999"], "--port is 99999; it must lie in [0, 65535]"),
        (["--grace", "nan"], "--grace is nan"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_read(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(cli.Serve, "load", lambda *_, **options: pytest.fail("the model was loaded"))
    assert cli.main(["--preset", "tiny", "--random-weights", "--compile-cache", "none", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_compile_that_fails_is_one_clear_error(monkeypatch, capsys):
    engine = ScriptedEngine(mirror)
    engine.warm_up = lambda: (_ for _ in ()).throw(RuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    monkeypatch.setattr(cli.Serve, "load", lambda *_, **options: Loaded(None, None, ByteTokenizer()))
    monkeypatch.setattr(cli, "Engine", lambda *arguments, **settings: engine)
    assert cli.main(["--preset", "tiny", "--random-weights", "--compile-cache", "none", "--port", "0"]) == 2
    assert "error: RESOURCE_EXHAUSTED: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "source, name",
    [
        ({"hub": "weights/Kimi-K2.5"}, "Kimi-K2.5"),
        ({"run": "runs/20260101-lr0.1/"}, "20260101-lr0.1"),
        ({"hub": "weights/Kimi-K2.5/sub/.."}, "Kimi-K2.5"),
        ({"preset": "sizes/small.v2.json"}, "small.v2"),
        ({"preset": "tiny"}, "tiny"),
        ({"preset": "tiny", "name": "mine"}, "mine"),
    ],
)
def test_the_served_name(source, name):
    assert cli.Serve(**source).model_name() == name


# One process, the real engine.


@pytest.fixture(scope="module")
def process(tmp_path_factory, small):
    """experiments/serve.py with a small model; -> (process, port)."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "model.json").write_text(json.dumps(small.to_dict()))
    command = [sys.executable, "experiments/serve.py", "--preset", str(folder / "model.json"), "--random-weights", "--port", "0"]
    command += ["--slots", "3", "--capacity", "96", "--chunk", "16", "--compile-cache", str(folder / "cache"), "--grace", "20"]
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # half of the compile's time
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    line = ""
    if select.select([process.stdout], [], [], 120)[0]:
        line = process.stdout.readline()
    assert line.startswith("serving model at http://127.0.0.1:"), line
    yield process, int(line.rsplit(":", 1)[1])
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_real_engine_serves_and_ends_with_status_0(process):
    process, port = process
    ask = {"model": "model", "prompt": "def f(", "max_tokens": 24, "temperature": 0}
    _, _, whole = send(port, ask)
    assert whole["usage"]["prompt_tokens"] == 7 and whole["usage"]["completion_tokens"] <= 24  # bos and 6 bytes
    drawn = {**ask, "temperature": 1.0, "seed": 7}
    expected = [send(port, drawn)[2]["choices"][0]["text"], whole["choices"][0]["text"]]
    streams = [open_stream(port, {**(ask if i % 2 else drawn), "stream": True}) for i in range(8)]  # more than there are slots
    texts = [text_of(read_events(made)[:-1]) for made in streams]
    assert texts == expected * 4
    chat = send(port, {"model": "model", "messages": [{"role": "user", "content": "hé"}], "max_tokens": 4}, "/v1/chat/completions")
    assert chat[0] == 200 and chat[2]["usage"]["prompt_tokens"] == 7
    assert send(port, {**ask, "prompt": "x" * 90})[0] == 400  # with bos and the answer: 115 tokens
    gone = open_stream(port, {**ask, "max_tokens": 80, "stream": True})
    gone.recv(100)
    gone.close()
    until(lambda: get(port, "/healthz")[2] == {"status": "ok", "slots": 3, "busy": 0, "queued": 0})
    last = open_stream(port, {**ask, "max_tokens": 80, "stream": True})
    assert last.recv(12) == b"HTTP/1.1 200"
    process.send_signal(signal.SIGTERM)
    rest = b""
    while part := last.recv(65536):
        rest += part
    last.close()
    assert b"[DONE]" in rest and process.wait(30) == 0
