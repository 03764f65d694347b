"""From token ids to text as it may be sent: whole characters only, and nothing of a stop string.

A byte tokenizer's token can be a quarter of a character, a BPE's token can end in the middle of one, and a stop string can begin in one
token and end in a later one. What cannot be sent yet waits here; what was sent is never taken back, and joined it is the text that
decoding all ids at once gives, cut at the first stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

LONGEST_CHARACTER = 8  # tokens: UTF-8 has at most 4 bytes a character; what is no character after 8 never becomes one
REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What the server needs of a tokenizer: `moejax.data`'s ByteTokenizer and FileTokenizer have it.

    One whose tokens are bytes also has `decode_bytes(ids) -> bytes`; where it can have none, `byte_level` is False.
    """

    vocab_size: int

    def encode(self, text: str) -> Any:
        """text -> integers [N]."""
        ...

    def decode(self, ids, *, errors: str = ..., show_special: bool = ...) -> str:
        """integers [N] -> text, special tokens left out unless `show_special`."""
        ...


def is_byte_level(tokenizer: Any) -> bool:
    """Whether a token of this tokenizer is a run of bytes."""
    return hasattr(tokenizer, "decode_bytes") and getattr(tokenizer, "byte_level", True)


class ByteDecoder:
    """Tokens that are runs of bytes -> text, a character when its last byte is there; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._utf8 = tokenizer, codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.decode_bytes([token]))

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """Tokens of any tokenizer -> text: what decoding a few of the last tokens gives more than decoding them without the newest.

    The window begins at a token with text: at the very front of a text, decoders drop the space that a token spells.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._ids = tokenizer, []
        self._begin = self._sent = 0

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._more(final=len(self._ids) - self._sent >= LONGEST_CHARACTER)

    def end(self) -> str:
        return self._more(final=True)

    def _more(self, final: bool) -> str:
        now = self._tokenizer.decode(self._ids[self._begin :])
        if now.endswith(REPLACEMENT) and not final:
            return ""
        before = self._tokenizer.decode(self._ids[self._begin : self._sent])
        if len(now) > len(before):
            self._begin = self._sent
        self._sent = len(self._ids)
        return now[len(before) :]


class StopText:
    """Cuts a text at the stop string that is complete first; of two that end together, at the longer."""

    def __init__(self, stops: Sequence[str]):
        self._stops, self._kept = tuple(stops), ""
        self.found = False

    def add(self, text: str) -> str:
        """-> what may be sent: neither a stop string nor what could be the beginning of one."""
        if self.found:
            return ""
        text = self._kept + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.found, self._kept = True, ""
            return text[: min(ends)[1]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        """The beginning of a stop string that did not go on."""
        text, self._kept = self._kept, ""
        return text


class TextStream:
    """One answer: tokens in, text out.

    stops: strings that end the answer and are not part of it. `stopped` says that one was found; later tokens give nothing.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._decoder = ByteDecoder(tokenizer) if is_byte_level(tokenizer) else WindowDecoder(tokenizer)
        self._stop, self._vocab_size = StopText(stops), tokenizer.vocab_size
        self.decoded = 0
        """Characters decoded, those that wait or were cut included."""
        self.sent = 0
        """Characters given out."""

    @property
    def stopped(self) -> bool:
        return self._stop.found

    def add(self, token: int) -> str:
        """-> the text that may be sent now, often ""."""
        if token >= self._vocab_size:
            return ""  # a model's table may be larger than its tokenizer
        return self._out(self._decoder.add(token))

    def end(self) -> str:
        """-> what was kept back, when no token follows."""
        text = self._out(self._decoder.end())
        rest = self._stop.end()
        self.sent += len(rest)
        return text + rest

    def _out(self, text: str) -> str:
        self.decoded += len(text)
        text = self._stop.add(text)
        self.sent += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
