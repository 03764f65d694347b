"""RULER's eleven generated tasks (arXiv 2404.06654) over any text: retrieval, multi-hop tracing and aggregation at an exact length.

    niah_single_1, 2, 3     one needle: in noise, in text, with an id of 36 characters as its value
    niah_multikey_1, 2, 3   4 needles of which one is asked; a haystack of nothing but needles; the same with ids as keys and values
    niah_multivalue         one key with 4 values, all asked            niah_multiquery    4 keys, all asked
    vt                      variables: a chain of 4 hops                cwe, fwe           common words, frequent words

RULER's two question-answering sets need downloads and are left out. What differs from RULER: the words of the prompt (`ruler_tasks`),
numbers of 6 digits (7), no worked example, keys, values, words and depths of the evaluation that training never has, and the
length is met exactly, in tokens of the tokenizer in use, answer included.

What a score means without reading is part of every sample (`Sample.guess`, `copy_any`, `copied_last`): where all needles of a text
are asked (single, multivalue, multiquery, vt with one chain), copying what looks like a needle is enough, and the task tests the
distance alone; the multikey tasks, cwe and fwe test the choice too.
"""

from __future__ import annotations

from typing import Any

from .counter import CounterHash
from .facts import Draws, check_generator
from .ruler_parts import RulerFiller, Sample, hash64, ruler_filler
from .ruler_tasks import MAKERS, CommonWords, FrequentWords, Needles, Variables

Task = Needles | Variables | CommonWords | FrequentWords
RULER_TASKS: dict[str, Task] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", uuid_values=True),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", uuid_keys=True, uuid_values=True),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", asked=4),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}
_KIND = 5  # `Draws.kind`; 1 to 4 are the other generators'


def ruler_samples(
    task: str | tuple[str, Task],
    *,
    length: int,
    count: int,
    split: str = "eval",
    seed: int = 0,
    tokenizer: Any = None,
    filler: RulerFiller | str | bytes | None = None,
    first: int = 0,
) -> list[Sample]:
    """Samples first .. first + count - 1 of a task at a length; each is a function of (seed, split, task name, length, number).

    Args:
      task: a name of `RULER_TASKS`, or (name, settings) for one's own, as ("vt 4 chains", Variables(chains=4)).
      length: tokens of prompt and answer together, BOS and EOS included.
      split: "train" and "eval" share no key, value, corpus word, or depth of an asked needle.
      tokenizer: None with a `RulerFiller`, which has its own, or for bytes.
      filler: the text to hide needles in and to take words from, or a `RulerFiller` made of it (do so for more than one call: it
        holds the encoded text). None: made-up words.

    Raises:
      ValueError: an unknown task or split, a length too short for the task, too few words, a tokenizer beside another one's filler.
    """
    name, spec = named_task(task)
    check_generator(f"ruler task {name}", split=split, documents=count, digits=getattr(spec, "digits", 1))
    if first < 0:
        raise ValueError(f"first={first} must be at least 0.")
    filler = ruler_filler(tokenizer, filler)
    own_seed = int(CounterHash(seed, stream=hash64(f"{name} {length}")).bits(0, 1)[0])
    make = MAKERS[type(spec)]
    return [make(name, spec, Draws(own_seed, split, first + i, _KIND), length, filler) for i in range(count)]


def named_task(task: str | tuple[str, Task]) -> tuple[str, Task]:
    """-> (name, settings). ValueError: a name that `RULER_TASKS` has not, settings that make no task."""
    name, spec = (task, RULER_TASKS.get(task)) if isinstance(task, str) else task
    if spec is None:
        raise ValueError(f"task={name!r} is none of {', '.join(RULER_TASKS)}; give one of them, or (name, settings).")
    if isinstance(spec, Needles):
        good = spec.haystack in ("noise", "essay", "needles") and min(spec.keys, spec.asked, spec.values) >= 1
        good &= spec.haystack != "needles" or spec.asked == spec.keys == spec.values == 1
        good &= spec.values == 1 or spec.asked == 1
        rule = 'haystack "noise", "essay" or "needles" (there one asked key with one value); several values only with one asked key'
    elif isinstance(spec, Variables):
        good, rule = spec.chains >= 1 and spec.hops >= 1, "at least one chain and one hop"
    elif isinstance(spec, CommonWords):
        good, rule = spec.common >= 1 and spec.common_times > spec.other_times >= 1, "common words more often than others"
    else:
        good, rule = 1 <= spec.asked <= 8, "1 to 8 asked words"
    if not good:
        raise ValueError(f"ruler task {name!r}: {spec}; needed: {rule}.")
    return name, spec
