"""generate.py: a kept cache gives what a fresh reading gives, interrupted or not, and the terminal gets whole characters."""

import io
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import answering
from experiments import generate as cli
from experiments.answering import Conversation
from experiments.load_model import Loaded, chat_ids, stop_ids
from moejax import HybridLM
from moejax.data import ByteTokenizer
from moejax.infer import generate
from moejax.infer.prefill import _jitted_chunk
from moejax.infer.sampling import make_sampling

TOKENIZER = ByteTokenizer()
END = TOKENIZER.special_ids["turn_end"]


@pytest.fixture(scope="module")
def loaded(toy):
    """Random weights large enough to keep logits apart, so that greedy answers are not decided by rounding."""
    model, rng = HybridLM(toy.replace(vocab_size=TOKENIZER.vocab_size, dtype="float32")), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    variables = jax.tree.map(lambda leaf: jnp.asarray(0.4 * rng.standard_normal(leaf.shape), leaf.dtype), shapes)
    return Loaded(model, variables, TOKENIZER)


@pytest.fixture(scope="module")
def conversation(loaded):
    return Conversation(loaded, capacity=96, chunk=16)


@pytest.fixture
def terminal(monkeypatch, loaded, conversation):
    """terminal(lines, *arguments): run the command line with these lines typed, on the shapes that are compiled already."""
    monkeypatch.setattr(cli.Generate, "load", lambda _: loaded)
    monkeypatch.setattr(answering, "prepare", lambda model, variables: conversation.weights)

    def run(lines, *arguments):
        monkeypatch.setattr(cli.sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return cli.main(["--preset", "toy", "--compile-cache", "none", "--chunk", "16", "--context", "96", *arguments])

    return run


def play(conversation, text, *, most=5, stop=(), cut=None, temperature=0.0, tokenizer=TOKENIZER):
    """One turn; -> (all it read, the answer). cut: stop after so many tokens, as Ctrl-C does.

    Texts of 5 letters and more are read in one shape.
    """
    ids = cli.next_turn(conversation, tokenizer, {"role": "user", "content": text}, None)
    read, tokens = [*conversation.pending, *ids], []
    for token in conversation.answer(ids, most=most, sampling=make_sampling(1, temperature=temperature, seed=7), stop_ids=stop):
        tokens.append(token)
        if len(tokens) == cut:
            break
    return read, tokens


def fresh(loaded, conversation, ids, *, most, **settings):
    settings |= {"weights": conversation.weights, "max_new_tokens": most, "capacity": 96, "chunk": 16, "seed": 7}
    return generate(loaded.model, None, [np.array(ids)], **settings).row(0).tolist()


def test_a_kept_cache_is_a_fresh_reading(loaded, conversation):
    """Three turns, the first cut short by Ctrl-C, the last one sampled: each answer is that to the whole dialog read anew."""
    conversation.clear()
    dialog, tokens = play(conversation, "hello", cut=2)
    assert dialog == chat_ids(TOKENIZER, [{"role": "user", "content": "hello"}])
    assert tokens == fresh(loaded, conversation, dialog, most=5)[:2]
    assert conversation.read == len(dialog) + 1 and conversation.pending == tokens[-1:]
    added, second = play(conversation, "an answer that was cut short, \u00e4?")
    assert added[0] == tokens[-1] and added[1] == END  # its turn is ended for it
    dialog += [tokens[0], *added]
    assert second == fresh(loaded, conversation, dialog, most=5)
    added, third = play(conversation, "and so on", temperature=1.0)
    dialog += [*second[:-1], *added]
    assert third == fresh(loaded, conversation, dialog, most=5, temperature=1.0)


def test_an_answer_that_ends_its_turn(loaded, conversation):
    """With turn_end it is closed by its own end, which the next turn reads first; no other end is put there."""
    conversation.clear()
    play(conversation, "hello", cut=1)
    conversation.pending = [END]  # as if that had been drawn
    added, _ = play(conversation, "again", most=1)
    assert added[:2] == [END, TOKENIZER.special_ids["user"]]


def test_an_answer_that_ends_with_eos(loaded, conversation):
    """Its turn is ended with turn_end, in eos's place: the next turn reads what training has between two turns."""
    asked = chat_ids(TOKENIZER, [{"role": "user", "content": "hello"}])

    class Early(ByteTokenizer):
        eos_id = fresh(loaded, conversation, asked, most=2)[1]  # what the model says, whatever it is

    conversation.clear()
    _, tokens = play(conversation, "hello", stop=stop_ids(Early(), chat=True), tokenizer=Early())
    assert tokens[-1] == Early.eos_id and len(tokens) <= 2 and conversation.closed
    added, answer = play(conversation, "again", tokenizer=Early())
    assert added[:2] == [END, TOKENIZER.special_ids["user"]]
    assert answer == fresh(loaded, conversation, [*asked, *tokens[:-1], *added], most=5)


def test_turns_of_any_length_compile_few_shapes(conversation):
    """One of a chunk for all that are longer than half of it; and a cache lies where the programs leave it, or each would compile twice."""
    before = _jitted_chunk._cache_size()
    for length in (5, 6, 12, 30, 33):
        conversation.clear()
        play(conversation, "x" * length, most=3)
    assert _jitted_chunk._cache_size() - before <= 1 and answering._next._cache_size() == 1


def test_room_and_bad_ids(conversation):
    conversation.clear()
    play(conversation, "hello", most=2)
    before = conversation.read, list(conversation.pending)
    with pytest.raises(ValueError, match=r"leaves no room for an answer in a context of 96.*--context"):
        play(conversation, "x" * 90)
    with pytest.raises(ValueError, match=r"token ids span \[\d+, 320\]; they must lie in \[0, 320\)"):
        next(conversation.answer([320], most=1, sampling=make_sampling(1), stop_ids=()))
    assert before == (conversation.read, conversation.pending)
    _, tokens = play(conversation, "x" * (96 - conversation.read - 8), most=50)
    assert conversation.read <= 96 and 1 <= len(tokens) < 50  # it ends where the context does


def test_completion(terminal, capsys):
    assert terminal([], "--prompt", "def f(x):", "--max-new-tokens", "12", "--temperature", "1") == 0
    first = capsys.readouterr()
    assert first.out.endswith("\n") and "[12 tokens, length; first after" in first.err
    terminal(["def f(x):"], "--prompt", "-", "--max-new-tokens", "12", "--temperature", "1")  # with its line end: another prompt
    assert capsys.readouterr().out != first.out
    assert terminal([], "--prompt", "def f(x):", "--max-new-tokens", "12", "--temperature", "1", "--stop", first.out[2]) == 0
    again = capsys.readouterr()
    assert again.out.rstrip("\n") == first.out[: first.out.index(first.out[2])] and ", stop;" in again.err


def test_chat(terminal, capsys):
    lines = ["hello", "", "x" * 300, "/clear", "hello", "/exit", "never read"]
    assert terminal(lines, "--chat", "--max-new-tokens", "4") == 0
    seen = capsys.readouterr()
    assert seen.err.count("[4 tokens") == 2 and "/clear begins a new dialog" in seen.err
    half = len(seen.out) // 2
    assert seen.out[:half] == seen.out[half:]  # after /clear the same question has the same answer


def test_ctrl_c_ends_the_answer_not_the_program(terminal, capsys, monkeypatch):
    show = cli._show

    def press(text):
        show(text)
        if not text.endswith("\n"):  # not after the answer
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli, "_show", press)
    before = signal.getsignal(signal.SIGINT)
    assert terminal(["hello", "more"], "--chat", "--max-new-tokens", "9") == 0
    assert capsys.readouterr().err.count("[1 tokens, interrupted") == 2 and signal.getsignal(signal.SIGINT) == before
    assert terminal([], "--prompt", "def f(x):", "--max-new-tokens", "9") == 130


def test_no_control_characters_reach_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True, raising=False)
    cli._show("a\x1b[2J\u00e4\n")
    assert capsys.readouterr().out == "a\ufffd[2J\u00e4\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --prompt TEXT to continue, or --chat"),
        (["--prompt", "x", "--chat"], "either --prompt TEXT"),
        (["--prompt", "x", "--system", "y"], "--system is for --chat"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--prompt", "x", "--stop", ""], "--stop holds an empty text"),
        (["--prompt", "x"], "no source given"),
        (["--prompt", "x", "--run", "/no/such"], "no run folder"),
    ],
)
def test_bad_input(arguments, message, capsys):
    assert cli.main([*arguments, "--compile-cache", "none"]) == 2
    assert message in capsys.readouterr().err


def test_a_tokenizer_without_turns_cannot_chat(loaded, monkeypatch, capsys):
    class Plain:
        vocab_size, special_ids = 10, {}

        def __repr__(self):
            return "Plain()"

    monkeypatch.setattr(cli.Generate, "load", lambda _: loaded._replace(tokenizer=Plain()))
    assert cli.main(["--chat", "--preset", "toy", "--compile-cache", "none"]) == 2
    assert "Plain() has neither markers of turns nor a chat template" in capsys.readouterr().err
