"""The requests of the OpenAI shape: which fields there are, what they may hold, and the one error that a bad one gives."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MOST_STOPS, LONGEST_STOP = 4, 256  # as the public service; the search for stops costs their length a token
MOST_ID = 2**31 - 1  # int32: the engine checks ids against the vocabulary
COMPLETION_TOKENS = 16  # the public service's default
MESSAGE_FIELDS = ("role", "content", "tool_calls")
RETRY_AFTER = {"Retry-After": "1"}  # seconds


class RequestError(Exception):
    """An answer that is an error. status: of HTTP. param: the field that is wrong. code: for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A checked request."""

    prompt: str | list[int] | None
    """Of a completion; None for a chat."""
    messages: list[dict[str, Any]] | None
    """Of a chat."""
    max_tokens: int | None
    """None: as many as the slot holds."""
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    """None: drawn by the server."""
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    log_probs: bool


def parse(body: bytes, *, chat: bool, model: str) -> Ask:
    """The body of a POST -> what it asks for. RequestError: 404 for another model than `model`, 400 for anything else that is wrong."""
    values = _object(body)
    fields = CHAT if chat else COMPLETION
    if unknown := [name for name in values if name not in fields]:
        names = ", ".join(map(repr, unknown[:8]))
        raise bad(f"unknown field{'s' if len(unknown) > 1 else ''} {names}; known are {', '.join(fields)}.", unknown[0], "unknown_field")
    for name in ("model", "messages" if chat else "prompt"):
        if values.get(name) is None:
            raise bad(f"{name} is missing.", name, "missing_field")
    # null is how a client's library spells a field that was not given.
    given = {name: fields[name](name, value) for name, value in values.items() if value is not None}
    if given["model"] != model:
        raise RequestError(
            404, f"there is no model {given['model']!r} here; this server has {model!r}.", param="model", code="model_not_found"
        )
    return _ask(given, chat)


def _ask(given: dict[str, Any], chat: bool) -> Ask:
    stream = given.get("stream", False)
    if "stream_options" in given and not stream:
        raise bad("stream_options is given and stream is not true; leave it out.", "stream_options")
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise bad("max_tokens and max_completion_tokens are two names of one number; give one.", "max_completion_tokens")
    if given.get("top_logprobs") is not None and not given.get("logprobs"):
        raise bad("top_logprobs is given and logprobs is not true; leave it out.", "top_logprobs")
    most = given.get("max_completion_tokens", given.get("max_tokens"))
    return Ask(
        prompt=given.get("prompt"),
        messages=given.get("messages"),
        max_tokens=COMPLETION_TOKENS if most is None and not chat else most,
        temperature=given.get("temperature", 1.0),
        top_p=given.get("top_p", 1.0),
        top_k=given.get("top_k", 0),
        seed=given.get("seed"),
        stop=given.get("stop", ()),
        stream=stream,
        include_usage=given.get("stream_options", False),
        log_probs=given.get("logprobs", False),
    )


def bad(message: str, param: str | None = None, code: str | None = None) -> RequestError:
    """-> status 400."""
    return RequestError(400, message, param=param, code=code)


def busy(reason: str) -> RequestError:
    """-> status 429."""
    return RequestError(429, f"the server is busy: {reason}", code="queue_full", headers=RETRY_AFTER)


def unavailable(reason: str) -> RequestError:
    """-> status 503."""
    return RequestError(503, f"{reason}; no new request is taken.", code="unavailable", headers=RETRY_AFTER)


def _object(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body.decode(), parse_constant=_no_constant, object_pairs_hook=_fields)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, numbers of thousands of digits, a million brackets
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise bad(f"the body is no JSON: {reason}.", code="invalid_json") from None
    if not isinstance(values, dict):
        raise bad(f"the body is a JSON {_kind(values)}; it must be an object.", code="invalid_json")
    return values


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of two values of one name, neither is better than the other."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise bad(f"the field {_shown(name)} stands in one object more than once; give it once.", name, "duplicate_field")
        values[name] = value
    return values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _shown(value: Any) -> str:
    """A value in a message, never a page of it."""
    text = json.dumps(value) if isinstance(value, int | float | str) or value is None else _kind(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


Check = Callable[[str, Any], Any]


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise bad(f"{name} is {_shown(value)}; it must be true or false.", name)
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad(f"{name} is {_shown(value)}; it must be a string.", name)
    return value


def _integer(least: int, most: int) -> Check:
    def check(name: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise bad(f"{name} is {_shown(value)}; it must be an integer in [{least}, {most}].", name)
        return value

    return check


def _number(good: Callable[[float], bool], rule: str) -> Check:
    def check(name: str, value: Any) -> float:
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:  # an integer of 400 digits
            number = math.inf
        if not (math.isfinite(number) and good(number)):
            raise bad(f"{name} is {_shown(value)}; it must be a number {rule}.", name)
        return number

    return check


def _only(allowed: Any, why: str) -> Check:
    """A field whose other values this server does not have."""

    def check(name: str, value: Any) -> Any:
        if (type(value) is bool and type(allowed) is not bool) or value != allowed:
            raise bad(f"{name} is {_shown(value)}; only {json.dumps(allowed)} is supported: {why}.", name, "unsupported_value")
        return value

    return check


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    good = isinstance(stops, list) and len(stops) <= MOST_STOPS and all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops)
    if not good:
        raise bad(f"{name} must be a string or up to {MOST_STOPS} strings, each of 1 to {LONGEST_STOP} characters.", name)
    return tuple(stops)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict):
        raise bad(f"{name} is {_shown(value)}; it must be an object.", name)
    if unknown := [key for key in value if key != "include_usage"]:
        raise bad(f"unknown field {unknown[0]!r} in {name}; known is include_usage.", f"{name}.{unknown[0]}", "unknown_field")
    return _boolean(f"{name}.include_usage", value.get("include_usage", False))


def _prompt(name: str, value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a list of one prompt
    if isinstance(value, list) and any(isinstance(entry, str | list) for entry in value):
        raise bad(f"{name} holds {len(value)} entries; one prompt a request: a string, a list of one string, or a list of ids.", name)
    if isinstance(value, list):
        if wrong := [entry for entry in value if type(entry) is not int or not 0 <= entry <= MOST_ID]:
            raise bad(f"{name} holds {_shown(wrong[0])}; token ids are integers from 0.", name)
    elif not isinstance(value, str):
        raise bad(f"{name} is {_shown(value)}; it must be a string, a list of one string, or a list of token ids.", name)
    if not value:
        raise bad(f"{name} is empty; give at least one character or token.", name, "empty_prompt")
    return value


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise bad(f"{name} is {_shown(value) if value != [] else 'empty'}; it must be a list of at least one message.", name)
    return [_message(f"{name}[{index}]", message) for index, message in enumerate(value)]


def _message(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(f"{place} is {_shown(value)}; a message is an object with role and content.", place)
    if unknown := [key for key in value if key not in MESSAGE_FIELDS]:
        known = ", ".join(MESSAGE_FIELDS)
        raise bad(f"unknown field {unknown[0]!r} in {place}; known are {known}.", f"{place}.{unknown[0]}", "unknown_field")
    message = dict(value)
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise bad(f"{place}.tool_calls is {_shown(calls)}; it must be a list of strings or objects.", f"{place}.tool_calls")
    content = message.get("content")
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        message["content"] = "".join(part["text"] for part in content)
    return message


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)


_COMMON: dict[str, Check] = {
    "model": _string,
    "max_tokens": _integer(1, MOST_ID),
    "temperature": _number(lambda x: x >= 0, "of at least 0 (0: greedy)"),
    "top_p": _number(lambda x: 0 < x <= 1, "in (0, 1]"),
    "top_k": _integer(0, MOST_ID),
    "seed": _integer(0, 2**32 - 1),
    "stop": _stop,
    "stream": _boolean,
    "stream_options": _stream_options,
    "n": _only(1, "one answer a request"),
    "presence_penalty": _only(0, "no penalties"),
    "frequency_penalty": _only(0, "no penalties"),
    "logit_bias": _only({}, "no biases"),
    "user": _string,  # a label of the caller's; it changes no answer
}
COMPLETION: dict[str, Check] = _COMMON | {
    "prompt": _prompt,
    "logprobs": lambda name, value: _only(0, "the log-prob of the chosen token, no alternatives")(name, value) == 0,
    "echo": _only(False, "the prompt is not sent back"),
    "best_of": _only(1, "one answer a request"),
}
CHAT: dict[str, Check] = _COMMON | {
    "messages": _messages,
    "max_completion_tokens": _integer(1, MOST_ID),
    "logprobs": _boolean,
    "top_logprobs": _only(0, "the log-prob of the chosen token, no alternatives"),
}
