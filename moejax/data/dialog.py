"""Dialogs with tools as token ids and a loss mask that says who wrote each token.

    [system] text [turn_end] [user] text [turn_end] [assistant] text [tool_call] body [turn_end] [tool_result] text [turn_end] ...

A name in brackets is one special id, which no text can spell, so that a message cannot forge a turn. The model is trained on
what it wrote - the text of an assistant, its tool calls with their markers, and the turn_end by which it hands over - and on
nothing else: the [assistant] marker is put there by whoever asks for an answer, and a tool's output is the tool's.

The mask is decided piece by piece, from the piece's producer. A mask of "everything from the assistant's marker to its end"
trains on tool output wherever that stands inside an assistant's message (swiss-ai/Megatron-LM pull 121). And each piece is
encoded by itself, so that the ids of a dialog are those of its beginning and then those of what was added, also between
consecutive tool results (THUDM/slime issue 2263: equal lengths, other ids).

N: tokens of the dialog.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .sources import TokenDocument

ROLES = ("system", "user", "assistant", "tool")
PARTS = ("text", "tool_call", "tool_result")
SHOWN = 60  # characters of a wrong value in an error


@dataclasses.dataclass(frozen=True)
class Piece:
    """One special id, or one run of text. learned: written by the model."""

    content: int | str
    learned: bool


def render_dialog(messages: Sequence[Mapping[str, Any]], tokenizer, *, start: bool = True) -> TokenDocument:
    """Messages -> int32 ids [N] and bool mask [N]: whether the model wrote the token, and learns it as a target.

    messages: {"role": "system" | "user" | "assistant" | "tool", "content": str}. An assistant's content may also be a list of parts
        {"type": "text" | "tool_call" | "tool_result", "text": str}; {"role": "assistant", ..., "tool_calls": [...]} appends a
        tool_call for each entry, a str or an object (written as JSON with sorted keys). A tool_result inside an assistant's message
        is the same tokens as a message of role "tool" between two of the assistant's.
    tokenizer: `ByteTokenizer`, or a `FileTokenizer` with the special tokens of `train_bpe`.
    start: False for messages that continue a dialog: `render(a).ids + render(b, start=False).ids == render(a + b).ids`.

    ValueError: no message, an unknown role or part, content that is no text, a tool result that answers no call, a tokenizer
    without the markers.
    """
    if not messages:
        raise ValueError("the dialog has no messages; give at least one.")
    ids, mask = [], []
    for piece in _pieces(messages, tokenizer, start):
        part = np.array([piece.content], np.int32) if isinstance(piece.content, int) else _encode(tokenizer, piece.content)
        ids.append(part)
        mask.append(np.full(len(part), piece.learned))
    return TokenDocument(np.concatenate(ids), np.concatenate(mask))


def special_id(tokenizer, name: str) -> int:
    """The id of the special token "pad", "bos", "turn_end", ...: as ByteTokenizer names it, or "<|name|>" as `train_bpe` does."""
    ids = tokenizer.special_ids
    found = ids.get(name, ids.get(f"<|{name}|>"))
    if found is None:
        raise ValueError(f"{tokenizer!r} has no special token {name!r}; train one with `train_bpe`, or use ByteTokenizer.")
    return int(found)


def _pieces(messages: Sequence[Mapping[str, Any]], tokenizer, start: bool) -> Iterator[Piece]:
    answers_call = not start  # of an earlier part of the dialog this knows nothing
    for index, message in enumerate(messages):
        parts = _parts(message, index)
        role = message["role"]
        if role == "tool":
            if not answers_call:
                raise ValueError(f"message {index} is a tool's, but no tool call stands before it; a tool answers an assistant's call.")
            yield from _turn(tokenizer, "tool_result", parts[0][1], learned=False)
        elif role == "assistant":
            answers_call = any(kind == "tool_call" for kind, _ in parts)
            yield from _assistant(tokenizer, parts, index)
        else:
            answers_call = False
            yield from _turn(tokenizer, role, parts[0][1], learned=False)


def _turn(tokenizer, marker: str, text: str, *, learned: bool) -> Iterator[Piece]:
    yield Piece(special_id(tokenizer, marker), False)
    yield Piece(text, learned)
    yield Piece(special_id(tokenizer, "turn_end"), learned)


def _assistant(tokenizer, parts: list[tuple[str, str]], index: int) -> Iterator[Piece]:
    """A tool result ends the turn before it, and what follows is a turn of its own."""
    speaking, called = False, False
    for kind, text in parts:
        if kind == "tool_result":
            if not called:
                raise ValueError(f"message {index}: a tool_result stands before any tool_call of the message; a tool answers a call.")
            if speaking:
                yield Piece(special_id(tokenizer, "turn_end"), True)
            yield from _turn(tokenizer, "tool_result", text, learned=False)
            speaking = False
            continue
        if not speaking:
            yield Piece(special_id(tokenizer, "assistant"), False)
            speaking = True
        if kind == "tool_call":
            called = True
            yield Piece(special_id(tokenizer, "tool_call"), True)
        yield Piece(text, True)
    if speaking:
        yield Piece(special_id(tokenizer, "turn_end"), True)


def _parts(message: Any, index: int) -> list[tuple[str, str]]:
    """-> [(kind, text)], checked; of other roles than the assistant's just one text."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, Mapping) else message
        raise ValueError(f"message {index} has the role {_shown(role)}; the roles are {', '.join(ROLES)}.")
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    calls = [] if calls is None else calls
    if not isinstance(calls, list):  # the letters of a string and the keys of an object would each be a call
        raise ValueError(f"message {index} has the tool_calls {_shown(calls)}; it must be a list of str or objects.")
    if role != "assistant" and calls:
        raise ValueError(f"message {index} of role {role!r} has tool_calls; only the assistant calls tools.")
    if isinstance(content, str):
        parts = [("text", content)] if content or not calls else []
    elif role == "assistant" and (content is None and calls):
        parts = []
    elif role == "assistant" and isinstance(content, list) and content:
        parts = [_part(entry, index) for entry in content]
    else:
        rule = "a str, or a list of parts that is not empty" if role == "assistant" else "a str"
        raise ValueError(f"message {index} of role {role!r} has the content {_shown(content)}; it must be {rule}.")
    return parts + [("tool_call", _call(entry, index)) for entry in calls]


def _part(entry: Any, index: int) -> tuple[str, str]:
    if not isinstance(entry, Mapping) or entry.get("type") not in PARTS or not isinstance(entry.get("text"), str):
        raise ValueError(
            f"message {index} has the part {_shown(entry)}; a part is an object with a `type` of {', '.join(PARTS)} and a `text`."
        )
    return entry["type"], entry["text"]


def _call(entry: Any, index: int) -> str:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Mapping):
        try:
            return json.dumps(entry, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        except RecursionError:
            raise ValueError(f"message {index} has the tool call {_shown(entry)}; it is nested too deeply.") from None
    raise ValueError(f"message {index} has the tool call {_shown(entry)}; it must be a str or an object.")


def _shown(value: Any) -> str:
    """A value in an error, never a page of it, nor a walk through all of it."""
    text = reprlib.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _encode(tokenizer, text: str) -> np.ndarray:
    return tokenizer.encode(text, control_tokens=False)
