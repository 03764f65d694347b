"""Bytes as tokens: 256 byte values and 64 reserved ids, so that text of any kind round-trips exactly."""

from typing import ClassVar

import numpy as np

SPECIAL_NAMES = (
    "pad",
    "bos",
    "eos",
    "doc_sep",
    "system",
    "user",
    "assistant",
    "tool_call",
    "tool_result",
    "turn_end",
    "image_start",
    "image_patch",
    "image_end",
    "video_start",
    "video_end",
)


class ByteTokenizer:
    """Token ids 0-255 are byte values; 256-319 are special ids that no text can produce.

    Every special has an id of its own. In particular padding is not the end of a document: a model that shares one id
    for both never learns to end, since padding is masked from the loss.
    """

    num_bytes = 256
    num_reserved = 64
    vocab_size = num_bytes + num_reserved

    pad_id, bos_id, eos_id, doc_sep_id = 256, 257, 258, 259
    special_ids: ClassVar[dict[str, int]] = {name: 256 + i for i, name in enumerate(SPECIAL_NAMES)}

    def encode(self, text: str | bytes, *, bos: bool = False, eos: bool = False, control_tokens: bool = False) -> np.ndarray:
        """text -> int32 ids [N]. A str is taken as UTF-8; lone surrogates are kept, so that any str round-trips.

        control_tokens: as in `FileTokenizer`, for code that takes either; here no text spells one, so True is refused.
        """
        if control_tokens:
            raise ValueError("control_tokens=True, but no text spells a special token of bytes; put their ids between encoded texts.")
        if isinstance(text, str):
            text = text.encode("utf-8", "surrogatepass")
        elif not isinstance(text, bytes | bytearray | memoryview):
            raise ValueError(f"text is {type(text).__name__}; it must be str or bytes.")
        parts = [np.frombuffer(text, np.uint8).astype(np.int32)]
        if bos:
            parts.insert(0, np.array([self.bos_id], np.int32))
        if eos:
            parts.append(np.array([self.eos_id], np.int32))
        return np.concatenate(parts)

    def decode_bytes(self, ids) -> bytes:
        """ids [N] -> the bytes among them; special ids are left out. ValueError for an id outside the vocabulary."""
        ids = self.check(ids)
        return ids[ids < self.num_bytes].astype(np.uint8).tobytes()

    def decode(self, ids, *, errors: str = "surrogatepass", show_special: bool = False) -> str:
        """ids [N] -> text, the exact inverse of `encode` for a str.

        errors: what to do with bytes that are no UTF-8, as in `bytes.decode`; use "replace" for sampled text.
        show_special: write special ids as <|name|> instead of leaving them out.
        """
        if not show_special:
            return self.decode_bytes(ids).decode("utf-8", errors)
        ids = self.check(ids)
        names = {i: f"<|{name}|>" for name, i in self.special_ids.items()}
        # Cut at the specials, so that a special inside a multi-byte character does not glue its halves together.
        cuts = np.flatnonzero(ids >= self.num_bytes)
        pieces, start = [], 0
        for cut in [*cuts.tolist(), len(ids)]:
            pieces.append(ids[start:cut].astype(np.uint8).tobytes().decode("utf-8", errors))
            if cut < len(ids):
                pieces.append(names.get(int(ids[cut]), f"<|reserved_{int(ids[cut])}|>"))
            start = cut + 1
        return "".join(pieces)

    def check(self, ids) -> np.ndarray:
        """ids as a NumPy array; ValueError unless all are integers in [0, vocab_size)."""
        return checked_ids(ids, self.vocab_size)


def checked_ids(ids, vocab_size: int) -> np.ndarray:
    """ids as a NumPy array; ValueError unless all are integers in [0, vocab_size)."""
    array = np.asarray(ids)
    if not array.size:
        return array.astype(np.int32)
    rule = f"they must be integers in [0, {vocab_size})."
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids hold {array.dtype}; {rule}")
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise ValueError(f"token ids hold {outside[0]}; {rule}")
    return array
