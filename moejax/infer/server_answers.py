"""The objects of the OpenAI shape that answers are made of."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, NamedTuple

from .server_text import Tokenizer, is_byte_level


def dumps(value: Any) -> bytes:
    """JSON in UTF-8. A lone surrogate, which a client may send in a name, is written as the escape it came as."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "backslashreplace")


class LogProb(NamedTuple):
    """A token of an answer."""

    token: str
    log_prob: float
    offset: int  # in the text, characters
    data: list[int] | None  # its bytes


class Piece(NamedTuple):
    """A part of an answer that can be sent."""

    text: str
    log_probs: list[LogProb]
    finish_reason: str | None = None


def log_prob(tokenizer: Tokenizer, token: int, value: float, offset: int) -> LogProb:
    """A token beyond the tokenizer's ids, or half of a character, is shown as what it is."""
    if token >= tokenizer.vocab_size:
        return LogProb(f"<|{token}|>", value, offset, None)
    try:
        text = tokenizer.decode([token], errors="replace", show_special=True)
    except ValueError:  # an id without a token
        text = f"<|{token}|>"
    data = list(tokenizer.decode_bytes([token])) if is_byte_level(tokenizer) else None  # pyright: ignore[reportAttributeAccessIssue]
    return LogProb(text, value, offset, data)


class Answer:
    """One answer: its id and date, and how its parts are written."""

    def __init__(self, *, chat: bool, model: str, log_probs: bool, prompt_tokens: int):
        self.chat, self.model, self.log_probs, self.prompt_tokens = chat, model, log_probs, prompt_tokens
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())

    def whole(self, pieces: list[Piece], tokens: int) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        text = "".join(piece.text for piece in pieces)
        marks = [mark for piece in pieces for mark in piece.log_probs]
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": self._marks(marks), "finish_reason": pieces[-1].finish_reason}
        return {**self._head("chat.completion" if self.chat else "text_completion"), "choices": [choice], "usage": self.usage(tokens)}

    def opening(self) -> dict[str, Any] | None:
        """What a stream begins with, before the first token."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, [], None) if self.chat else None

    def chunk(self, piece: Piece) -> dict[str, Any]:
        if self.chat:
            content: dict[str, Any] = {"delta": {"content": piece.text} if piece.text else {}}
        else:
            content = {"text": piece.text}
        return self._chunk(content, piece.log_probs, piece.finish_reason)

    def usage_chunk(self, tokens: int) -> dict[str, Any]:
        return {**self._head(self._chunk_object), "choices": [], "usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, int]:
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": tokens, "total_tokens": self.prompt_tokens + tokens}

    @property
    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _chunk(self, content: dict[str, Any], marks: list[LogProb], reason: str | None) -> dict[str, Any]:
        log_probs = self._marks(marks) if marks else None
        return {**self._head(self._chunk_object), "choices": [{"index": 0, **content, "logprobs": log_probs, "finish_reason": reason}]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _marks(self, marks: list[LogProb]) -> dict[str, Any] | None:
        if not self.log_probs:
            return None
        if self.chat:
            return {"content": [{"token": m.token, "logprob": m.log_prob, "bytes": m.data, "top_logprobs": []} for m in marks]}
        return {
            "tokens": [m.token for m in marks],
            "token_logprobs": [m.log_prob for m in marks],
            "top_logprobs": None,
            "text_offset": [m.offset for m in marks],
        }
