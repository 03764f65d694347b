"""One line of a JSON-lines file as a document: text, ready tokens with a mask, or a dialog."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

from .dialog import render_dialog, special_id
from .sources import TokenDocument

FORMS = ("text", "tokens", "messages")


@dataclasses.dataclass(frozen=True)
class Line:
    """data: its bytes; path, number: where it stands, counted from 1."""

    data: bytes
    path: str
    number: int


class LineReader:
    """Reads lines of one form; see `JsonlSource`. ValueError for another form."""

    def __init__(self, name: str, tokenizer: Any, form: str, field: str, mask_field: str):
        if form not in FORMS:
            raise ValueError(f"source {name!r}: form={form!r} must be one of {', '.join(FORMS)}.")
        self.tokenizer, self.form, self.field, self.mask_field = tokenizer, form, field, mask_field
        if form == "messages":
            for needed in ("bos", "eos", "turn_end"):
                special_id(tokenizer, needed)

    def settings(self) -> dict[str, Any]:
        return {"form": self.form, "field": self.field} | ({"mask_field": self.mask_field} if self.form == "tokens" else {})

    def read(self, line: Line) -> TokenDocument:
        """ValueError with file and line: what is wrong with it, and the way out."""
        try:
            return self._document(json.loads(line.data))
        except ValueError as error:  # json's and Unicode's errors are ValueErrors too
            what = f"is no JSON ({error})" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else f"is refused: {error}"
            raise ValueError(f"{line.path}, line {line.number} {what}. Repair the line or take it out.") from None

    def _document(self, value: Any) -> TokenDocument:
        if not isinstance(value, dict):
            raise ValueError(f"it holds a JSON {type(value).__name__}, and must be an object")
        if self.field not in value:
            raise ValueError(f"it has no field {self.field!r}, but {', '.join(map(repr, list(value)[:8])) or 'none at all'}")
        content = value[self.field]
        if self.form == "text":
            return self._text(content)
        if self.form == "messages":
            return self._messages(content)
        return self._tokens(content, value.get(self.mask_field))

    def _text(self, content: Any) -> TokenDocument:
        if not isinstance(content, str):
            raise ValueError(f"the field {self.field!r} holds {_kind(content)}, and must hold a str")
        return TokenDocument(self.tokenizer.encode(content, bos=True, eos=True, control_tokens=False))

    def _messages(self, content: Any) -> TokenDocument:
        if not isinstance(content, list):
            raise ValueError(f"the field {self.field!r} holds {_kind(content)}, and must hold a list of messages")
        dialog = render_dialog(content, self.tokenizer)
        bos, eos = ([special_id(self.tokenizer, name)] for name in ("bos", "eos"))
        ids = np.concatenate([bos, dialog.ids, eos]).astype(np.int32)
        return TokenDocument(ids, np.pad(np.asarray(dialog.mask), 1))  # nobody in the dialog wrote the ends: not learned

    def _tokens(self, content: Any, mask: Any) -> TokenDocument:
        if not isinstance(content, list) or not content or not all(type(i) is int for i in content):
            raise ValueError(f"the field {self.field!r} holds {_kind(content)}, and must hold a list of at least one integer id")
        ids = self.tokenizer.check(np.array(content)).astype(np.int32)
        if mask is None:
            return TokenDocument(ids)
        if not isinstance(mask, list) or len(mask) != len(ids) or not all(type(entry) in (bool, int) and entry in (0, 1) for entry in mask):
            size = f" of {len(mask)} entries" if isinstance(mask, list) else ""
            rule = f"must hold true or false for each of {len(ids)} ids"
            raise ValueError(f"the field {self.mask_field!r} holds {_kind(mask)}{size}, and {rule}")
        return TokenDocument(ids, np.array(mask, bool))


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return f"a {type(value).__name__}"
