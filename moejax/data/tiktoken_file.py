"""Tiktoken-style files (a base64 token and its rank a line) as the byte-level BPE of the `tokenizers` library."""

from __future__ import annotations

import base64
import binascii
import pathlib
import re
from typing import Any

# How Kimi K2 and K3 cut text before BPE (`pat_str` in the `tokenization_kimi.py` of their checkpoints): runs of Han, words with
# an optional leading mark and English contraction, up to three digits, punctuation, newlines, white space.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_MARK, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        _MARK + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _MARK + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE files (GPT-2's table)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    table = {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}
    return [table[byte] for byte in range(256)]


BYTE_CHARACTERS = _byte_characters()
_TO_CHARACTERS = {byte: character for byte, character in enumerate(BYTE_CHARACTERS)}
_TO_BYTES = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}


def spelled(token: bytes) -> str:
    """A token's bytes as byte-level BPE files write them: a character a byte."""
    return token.decode("latin-1").translate(_TO_CHARACTERS)


def unspelled(name: str) -> bytes:
    """The inverse of `spelled`; a name with other characters in it stands for itself, as in the library's decoder."""
    try:
        return bytes([_TO_BYTES[character] for character in name])
    except KeyError:
        return name.encode()


def read_ranks(path: pathlib.Path) -> list[bytes]:
    """The tokens of a tiktoken-style file, in the order of their ranks, which are their ids.

    ValueError, with file and line: a line that is not base64, a space and a number; a token or rank given twice; ranks that
    are not 0, 1, ..., N - 1.
    """
    tokens: dict[bytes, int] = {}
    ranks: dict[int, int] = {}  # rank -> its line
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        token, rank = _read_line(line, f"{path}, line {number}")
        if token in tokens:
            raise ValueError(f"{path}, line {number}: the token {token!r} has a rank already, {tokens[token]}; a token has one rank.")
        if rank in ranks:
            raise ValueError(f"{path}, line {number}: rank {rank} stands on line {ranks[rank]} already; each rank has one token.")
        tokens[token], ranks[rank] = rank, number
    if not tokens:
        raise ValueError(f"{path} holds no token; expected lines of a base64 token, a space and its rank.")
    missing = next((i for i in range(len(ranks)) if i not in ranks), None)
    if missing is not None:
        raise ValueError(f"{path} holds {len(ranks)} tokens up to rank {max(ranks)} but none of rank {missing}; ranks have no holes.")
    return sorted(tokens, key=tokens.__getitem__)


def _read_line(line: bytes, place: str) -> tuple[bytes, int]:
    fields = line.split()
    if len(fields) != 2 or not re.fullmatch(rb"[0-9]{1,9}", fields[1]):
        raise ValueError(f"{place}: {line[:60]!r} is not a base64 token, a space and a rank; is this a tiktoken-style file?")
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise ValueError(f"{place}: {fields[0][:60]!r} is no base64 ({error}).") from None
    if not token:
        raise ValueError(f"{place}: the token is empty.")
    return token, int(fields[1])


def merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """For each token that two others make, that pair, in the order of the ranks.

    One pair a token is enough, although tiktoken merges any neighbours whose concatenation has a rank. When it comes to merge two
    into the token t, nothing has been merged across t's ends, so that the merges inside t's bytes were those, in that order, which
    would be made if t stood alone; and of t alone they leave just one pair. Where they leave three or more, no merge makes t and
    only a whole piece of text equal to t is (`ignore_merges`).
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    halves = [_two_parts(ranks, token) for token in tokens if len(token) > 1]
    return [pair for pair in halves if pair]


def _two_parts(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes] | None:
    """What BPE (the pair of lowest rank first, the leftmost among equals) has of `token` when two parts are left; None: more stay."""
    none, find = len(ranks), ranks.get
    ends = list(range(len(token) + 1))  # part i is token[ends[i] : ends[i + 1]]
    scores = [find(token[i : i + 2], none) for i in range(len(token) - 1)]  # of part i and the next
    while len(scores) > 1:
        best = min(scores)
        if best == none:
            return None
        i = scores.index(best)
        del ends[i + 1], scores[i]
        if i > 0:
            scores[i - 1] = find(token[ends[i - 1] : ends[i + 1]], none)
        if i < len(scores):
            scores[i] = find(token[ends[i] : ends[i + 2]], none)
    return token[: ends[1]], token[ends[1] :]


def check_pattern(pattern: str) -> None:
    """ValueError for what the library's regular expressions (Oniguruma) read otherwise than tiktoken's do, without saying so."""
    bare = re.sub(r"\\[xpPuk]\{[^}]*\}|\\.", "", pattern, flags=re.DOTALL)
    while bare != (bare := re.sub(r"\[[^\[\]]*\]", "", bare)):  # classes, the innermost first
        pass
    if re.search(r"\{\d*,?\d*\}\+", bare):
        raise ValueError(f"pattern {pattern!r}: a possessive count {{m,n}}+ would be read as a repeated one; write (?>x{{m,n}}).")
    if re.search(r"(?<!\(\?)[\^$]", bare):
        raise ValueError(f"pattern {pattern!r}: ^ and $ would match at every line; write \\A and \\z for the ends of the text.")
    if re.search(r"\(\?[a-z]*m", bare):
        raise ValueError(f"pattern {pattern!r}: the flag m would be read as other engines' s; leave it out, and write [\\s\\S] for any.")


def tokenizer_json(path: pathlib.Path, pattern: str) -> dict[str, Any]:
    """A tiktoken-style file as the object that `tokenizer.json` would hold: byte-level BPE, text cut by `pattern`."""
    check_pattern(pattern)
    tokens = read_ranks(path)
    names = [spelled(token) for token in tokens]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # a piece that is a token is that token, whatever its merges; so does tiktoken
            "vocab": {name: rank for rank, name in enumerate(names)},
            "merges": [[spelled(left), spelled(right)] for left, right in merges(tokens)],
        },
    }
