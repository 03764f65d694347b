"""Continue a text, or talk with a model in the terminal; the answer is written as it comes.

    python experiments/generate.py --run runs/20260101-120000-tiny --prompt "def "
    python experiments/generate.py --hub Kimi-Linear-48B-A3B-Instruct --chat
    python experiments/generate.py --preset tiny --random-weights --prompt "def "      # nonsense, to try it

--prompt - reads the prompt from standard input. In a chat the cache is kept between turns and only what is new is read; Ctrl-C ends the
answer, not the chat; /clear forgets the dialog, /exit or Ctrl-D ends it. Standard output holds the answers and nothing else.
"""

from __future__ import annotations

import dataclasses
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import tyro

if not __package__:  # started as a file
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments.answering import Conversation
from experiments.load_model import Loaded, Source, chat_ids, following_ids, has_chat, prompt_ids, stop_ids
from moejax.infer.requests import at_least_one
from moejax.infer.sampling import Sampling, make_sampling
from moejax.infer.server_text import TextStream

CLEAR, EXIT = "/clear", "/exit"


@dataclasses.dataclass(frozen=True)
class Generate(Source):
    """Continue a text, or talk with a model in the terminal."""

    prompt: str | None = None
    """Text to continue; "-" reads it from standard input."""
    chat: bool = False
    """Talk, turn by turn."""
    system: str | None = None
    """With --chat: the system's message."""
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    temperature: float = 0.7
    """0: always the likeliest token."""
    top_k: int = 0
    """Draw from so many likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    seed: int = 0
    """The same seed draws the same answer."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer and are not shown."""
    context: int | None = None
    """Tokens that prompt and answers may have together. None: as many as --prompt needs; 8192 for a chat."""
    chunk: int = 512
    """Prompt tokens read at once."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage of the KDA states."""

    def check(self) -> None:
        """ValueError for settings that no model could serve, before one is read."""
        if self.chat == (self.prompt is not None):
            raise ValueError("give either --prompt TEXT to continue, or --chat to talk.")
        if self.system is not None and not self.chat:
            raise ValueError("--system is for --chat; a text to continue has no system's message.")
        for name in ("max_new_tokens", "chunk", "context"):
            if (value := getattr(self, name)) is not None:
                at_least_one(f"--{name.replace('_', '-')}", value)
        if "" in self.stop:
            raise ValueError("--stop holds an empty text, which is everywhere; leave it out.")
        self.sampling()

    def sampling(self) -> Sampling:
        return make_sampling(1, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed)


class Interrupt:
    """While it is entered, Ctrl-C sets `asked` instead of breaking into a step, whose cache would be lost; the second one does."""

    def __enter__(self) -> Interrupt:
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; -> the exit status: 0, 1 when a step failed, 2 for bad input, 130 when aborted."""
    try:
        config = tyro.cli(Generate, args=arguments, prog="python experiments/generate.py", description=__doc__)
        return run(config)
    except (ValueError, FileNotFoundError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("aborted", file=sys.stderr)
        return 130


def run(config: Generate) -> int:
    """One completion, or a chat."""
    config.check()
    loaded = config.load()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[attr-defined]  # a terminal that cannot show a character
    return chat(config, loaded) if config.chat else complete(config, loaded)


def complete(config: Generate, loaded: Loaded) -> int:
    text = sys.stdin.read() if config.prompt == "-" else config.prompt or ""
    ids = prompt_ids(loaded.tokenizer, text)
    if not ids:
        raise ValueError("the prompt has no tokens; give some text.")
    capacity = config.context or len(ids) + config.max_new_tokens
    conversation = Conversation(loaded, capacity=capacity, chunk=config.chunk, state_dtype=config.state_dtype)
    return 130 if _write(conversation, ids, config, loaded.tokenizer) else 0


def chat(config: Generate, loaded: Loaded) -> int:
    tokenizer = loaded.tokenizer
    if not has_chat(tokenizer):
        raise ValueError(f"{tokenizer!r} has neither markers of turns nor a chat template, so this model cannot chat; give --prompt.")
    conversation = Conversation(loaded, capacity=config.context or 8192, chunk=config.chunk, state_dtype=config.state_dtype)
    print(f"{CLEAR} forgets the dialog, {EXIT} or Ctrl-D ends it, Ctrl-C ends an answer.", file=sys.stderr)
    for text in _lines():
        if text == EXIT:
            break
        if text == CLEAR:
            conversation.clear()
            continue
        message = {"role": "user", "content": text}
        ids = next_turn(conversation, tokenizer, message, config.system)
        try:
            _write(conversation, ids, config, tokenizer)
        except ValueError as error:  # no room: the dialog is as it was
            print(f"{error} {CLEAR} begins a new dialog.", file=sys.stderr)
    return 0


def next_turn(conversation: Conversation, tokenizer: Any, message: dict[str, str], system: str | None) -> list[int]:
    """What a turn adds to the conversation's ids: up to the assistant's marker.

    An answer that did not end its turn has it ended here: one that was cut short, and one that ended with eos, in whose place turn_end
    stands, for in training eos ends a document and stands inside none.
    """
    if not conversation.read:
        start = [] if system is None else [{"role": "system", "content": system}]
        return chat_ids(tokenizer, [*start, message])
    conversation.forget_last(stop_ids(tokenizer))
    following = following_ids(tokenizer, message)
    return following[1:] if conversation.pending[-1:] == following[:1] else following


def _lines() -> Iterator[str]:
    """What the user enters; Ctrl-C at the prompt begins a new line."""
    while True:
        try:
            print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            print(f"\n{EXIT} or Ctrl-D ends the chat.", file=sys.stderr)
            continue
        if not line:
            return
        if text := line.strip():
            yield text


def _write(conversation: Conversation, ids: Sequence[int], config: Generate, tokenizer: Any) -> bool:
    """One answer to standard output, a whole character at a time, and its speed to standard error; -> whether Ctrl-C cut it short."""
    stream, times, stops = TextStream(tokenizer, config.stop), [time.perf_counter()], stop_ids(tokenizer, chat=config.chat)
    with Interrupt() as interrupt:
        for token in conversation.answer(ids, most=config.max_new_tokens, sampling=config.sampling(), stop_ids=stops):
            times.append(time.perf_counter())
            if not conversation.closed:  # the token that ends a turn is no text
                _show(stream.add(token))
            if stream.stopped or interrupt.asked:
                break
        _show(stream.end() + "\n")
        why = "interrupted" if interrupt.asked else "stop" if stream.stopped or conversation.closed else "length"
        later = times[2:]  # between the first token and the second, the step may have been compiled
        speed = f", {(len(later) - 1) / (later[-1] - later[0]):.1f} tokens/s after the second" if len(later) > 1 else ""
        print(f"[{len(times) - 1} tokens, {why}; first after {times[1] - times[0]:.2f} s{speed}]", file=sys.stderr)
        return interrupt.asked


def _show(text: str) -> None:
    """To a terminal without control characters, which sampled text may hold: they could do anything there."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
