"""Dialogs in the form that a published model was trained on: its own chat template (Jinja), rendered to token ids.

A template is rendered as `transformers` does it. What people wrote goes in behind it: while the template runs, marks stand in the place
of each message's text, so that no text is read as a template, and a text that spells a control token ("<|im_end|>") cannot forge a
turn. Needs jinja2 (pip install moejax[hub]).

N: tokens.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FILE_NAME = "chat_template.jinja"
ROLES = ("system", "user", "assistant")
MARK = re.compile("\ue000([0-9]+)\ue001")  # private-use characters around the number of a message


def template_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, ask: bool = True) -> np.ndarray:
    """Messages -> int32 ids [N] by `tokenizer.chat_template`.

    messages: {"role": "system" | "user" | "assistant", "content": str}.
    ask: whether the ids end where the assistant begins to write (add_generation_prompt).

    Text that spells an added token of the tokenizer is encoded by itself, as text; all else is encoded together with the template
    around it, so that the ids are those of `transformers`.

    ValueError: no template, no message, another role, content that is no text, a template that fails or drops a message.
    ImportError: no jinja2.
    """
    return _encoded(tokenizer, _pieces(tokenizer, messages, ask))


def following_ids(tokenizer: Any, message: Mapping[str, Any]) -> np.ndarray:
    """What stands between an answer of the assistant and its next: the end of its turn, `message`, its marker; int32 [N].

    To go on with a cache, whose answer keeps the ids that were drawn. Errors as of `template_ids`.
    """
    return _behind_an_answer(tokenizer, message, ask=True)


def turn_end_ids(tokenizer: Any) -> tuple[int, ...]:
    """The special id that ends an answer by the template, as a tuple; empty where the template puts none there."""
    return tuple(i for i in _behind_an_answer(tokenizer, ask=False)[:1].tolist() if i in tokenizer.added_tokens)


def template_of(config: Mapping[str, Any], file_text: str | None, place: str) -> str | None:
    """The template of a tokenizer's files: `chat_template.jinja` beside them, else "chat_template" of the config (one, or the one named
    "default" of several); None: there is none. ValueError: one that is no text."""
    found: Any = config.get("chat_template") if file_text is None else file_text
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if isinstance(entry, dict) and entry.get("name") == "default"), None)
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{place}: `chat_template` is a {type(found).__name__}; it must be a text, or a list with one named 'default'.")
    return found


def _pieces(tokenizer: Any, messages: Sequence[Mapping[str, Any]], ask: bool) -> list[tuple[int, str]]:
    """(index of the message that the text is the content of, or -1 for the template's own; the text), in order."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(f"{tokenizer!r} has no chat template ({FILE_NAME}, or `chat_template` in its config).")
    if not messages:
        raise ValueError("the dialog has no messages; give at least one.")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise ValueError(f"message {index}: role {role!r}, content {type(content).__name__}; allowed: {', '.join(ROLES)} and a text.")
    marked = [{"role": message["role"], "content": f"\ue000{index}\ue001"} for index, message in enumerate(messages)]
    parts = MARK.split(_render(tokenizer, marked, ask))
    pieces = [(int(part), messages[int(part)]["content"]) if odd % 2 else (-1, part) for odd, part in enumerate(parts)]
    found = [index for index, _ in pieces if index >= 0]
    if found != list(range(len(messages))):
        raise ValueError(f"the chat template writes messages {found} of {len(messages)}; each must stand in it once, in order.")
    return pieces


def _behind_an_answer(tokenizer: Any, *messages: Mapping[str, Any], ask: bool) -> np.ndarray:
    """ids of what the template writes behind the text of an answer that `messages` follow."""
    pieces = _pieces(tokenizer, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, *messages], ask)
    answer = [owner for owner, _ in pieces].index(1)
    return _encoded(tokenizer, pieces[answer + 1 :])


def _encoded(tokenizer: Any, pieces: list[tuple[int, str]]) -> np.ndarray:
    """Runs of text whose control tokens count are encoded whole, texts that spell one by themselves."""
    spelled = [token.content for token in tokenizer.added_tokens.values()]
    runs: list[tuple[str, bool]] = [("", True)]
    for owner, text in pieces:
        control = owner < 0 or not any(name in text for name in spelled)
        runs[-1:] = [(runs[-1][0] + text, True)] if control and runs[-1][1] else [runs[-1], (text, control)]
    return np.concatenate([tokenizer.encode(text, control_tokens=control) for text, control in runs])


def _render(tokenizer: Any, messages: list[dict[str, str]], ask: bool) -> str:
    try:
        import jinja2
    except ImportError:
        raise ImportError("chat templates need jinja2: pip install 'moejax[hub]'") from None

    ends = {f"{end}_token": _content(tokenizer, getattr(tokenizer, f"{end}_id")) for end in ("bos", "eos", "pad")}
    try:
        return _compiled(tokenizer.chat_template).render(messages=messages, tools=None, add_generation_prompt=ask, **ends)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template of {tokenizer!r} failed: {error}") from None


def _content(tokenizer: Any, token: int | None) -> str:
    return "" if token is None else tokenizer.added_tokens[token].content


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """In a sandbox: the template is a file that somebody published."""
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return environment.from_string(template)
