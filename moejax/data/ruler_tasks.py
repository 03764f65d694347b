"""The four kinds of RULER task (arXiv 2404.06654, section 3 and appendix B): needles, variable tracking, common and frequent words.

Each function makes one `Sample` of exactly `length` tokens. The text is RULER's in structure, in the words of this project's other
sources ("key is value", "? key is "), so that a model trained on those can be asked; there is no worked example in the prompt
(RULER gives one for variable tracking and common words): `split="train"` is what a model learns the format from.

F: filler tokens, K: answers of a sample.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .facts import NUM_KEYS, Draws, check_distinct, split_pool
from .ruler_parts import DEPTH_BINS, Prompt, RulerFiller, Sample, one_token, places_of, too_short, uuids

MIN_NEEDLES = 8  # of a haystack of needles: with fewer, a split has no depth of its own
ZETA_2 = np.pi**2 / 6


@dataclasses.dataclass(frozen=True)
class Needles:
    """Needle in a haystack. haystack: "noise" (one sentence again and again), "essay" (the filler), "needles" (nothing but
    needles). keys: needles with a key of their own, of which the first `asked` are asked; values: needles a key. uuid_keys,
    uuid_values: ids of 36 characters, else words of three syllables and numbers of `digits` digits."""

    haystack: str = "essay"
    keys: int = 1
    asked: int = 1
    values: int = 1
    uuid_keys: bool = False
    uuid_values: bool = False
    digits: int = 6


@dataclasses.dataclass(frozen=True)
class Variables:
    """Variable tracking in noise: `chains` chains "a = 12345", "b = a", "c = b", ..., each of hops + 1 names, in order; asked for are
    all names of the first. With one chain, RULER's setting, every name of the text is an answer; more chains need the tracing."""

    chains: int = 1
    hops: int = 4
    digits: int = 5


@dataclasses.dataclass(frozen=True)
class CommonWords:
    """A numbered list in which `common` words stand `common_times` and all others `other_times`; in a short prompt, where that
    leaves no room for 10 others, a fifth of it, 6 times, and once (RULER: below 4,096 tokens)."""

    common: int = 10
    common_times: int = 30
    other_times: int = 3


@dataclasses.dataclass(frozen=True)
class FrequentWords:
    """Coded words with counts falling as rank**-2 (a Zeta distribution); the first rank is noise, "...", asked are the next three.
    A word for every 50 tokens of the length, but at least 32 in all."""

    asked: int = 3


def make_needles(task: str, spec: Needles, draws: Draws, length: int, filler: RulerFiller) -> Sample:
    if spec.haystack == "needles":
        return _needles_only(task, spec, draws, length, filler)
    hidden = {"noise": filler.noise, "essay": filler.essay}[spec.haystack]
    keyed = max(spec.keys, spec.asked)
    check_distinct(task, keys=keyed * spec.values, digits=spec.digits, split=draws.split)
    text = hidden.tokens(draws.numbers(4), length)  # more than is shown
    keys = _keys(spec, draws, keyed, avoid=filler.tokenizer.decode(text, errors="replace"))
    values = _values(spec, draws, keyed * spec.values)
    lines = [_line(filler, f"{keys[i // spec.values]} is ", value) for i, value in enumerate(values)]
    asked = list(range(spec.asked * spec.values))
    room = Prompt(filler, length, _question(spec, keys), [values[i] for i in asked]).room - sum(map(len, lines))
    cuts = _cuts(task, draws, length, room, len(asked), len(lines))
    order = np.argsort(cuts, kind="stable").tolist()
    if spec.values > 1:  # the values of a key are answered in the order of the text
        asked.sort(key=order.index)
    prompt = Prompt(filler, length, _question(spec, keys), [values[i] for i in asked])
    context = _spread(text[:room], cuts, order, lines)
    depth = float(np.mean([cuts[i] for i in asked])) / room
    return prompt.sample(task, context, depth, [values[i] for i in order], _value_pool(spec))


def make_variables(task: str, spec: Variables, draws: Draws, length: int, filler: RulerFiller) -> Sample:
    names = spec.hops + 1
    check_distinct(task, keys=spec.chains * names, digits=spec.digits, split=draws.split)
    variables = draws.keys(1, spec.chains * names)
    values = draws.values(2, spec.chains, spec.digits)
    lines = [_line(filler, f"{name} = ", variables[i - 1] if i % names else values[i // names]) for i, name in enumerate(variables)]
    prompt = Prompt(filler, length, f"\n? the {names} names for {values[0]} are ", variables[:names])
    room = prompt.room - sum(map(len, lines))
    cuts = _cuts(task, draws, length, room, names, len(lines)).reshape(spec.chains, names)
    cuts = np.sort(cuts, axis=1).reshape(-1)  # a name is explained before it is used
    order = np.argsort(cuts, kind="stable").tolist()
    context = _spread(filler.noise.tokens(draws.numbers(4), room), cuts, order, lines)
    depth = float(cuts[:names].mean()) / room
    return prompt.sample(task, context, depth, [variables[i] for i in order], len(split_pool(NUM_KEYS, draws.split)))


def make_common_words(task: str, spec: CommonWords, draws: Draws, length: int, filler: RulerFiller) -> Sample:
    newline, pool = one_token(filler, "\n"), filler.num_words(draws.split)
    most = pool // 2 if filler.words is None else pool
    if pool < spec.common + 10:
        raise ValueError(f"ruler task {task!r}: the {draws.split} split has {pool} words; at least {spec.common + 10} are needed.")
    words = filler.draw_words(draws, 1, spec.common + 10)
    question = f"\n? the {spec.common} most common words are "
    room = Prompt(filler, length, question, words[: spec.common]).room

    def cost(others: int, times: tuple[int, int]) -> int:
        """Tokens of a list with so many other words."""
        of_words = [len(filler.encode(word)) for word in words[: spec.common + others]]
        of_numbers = [len(filler.encode(_number(i))) for i in range(times[0] * spec.common + times[1] * others)]
        return times[0] * sum(of_words[: spec.common]) + times[1] * sum(of_words[spec.common :]) + sum(of_numbers)

    times = (spec.common_times, spec.other_times)
    if cost(10, times) > room:
        times = (max(2, spec.common_times // 5), 1)
    if cost(1, times) > room:
        raise too_short(task, length, f"{spec.common} words {times[0]} times each, and one more, take {cost(1, times)} of {room} tokens")
    while cost(len(words) - spec.common, times) <= room:
        if len(words) == most:
            raise ValueError(
                f"ruler task {task!r}: the {draws.split} split has {most} words, too few for length={length}; give a longer text, a list "
                'of more words, or words="made up" to `RulerFiller`.'
            )
        words = filler.draw_words(draws, 1, min(2 * len(words), most))
    others = bisect.bisect_right(range(len(words) - spec.common), room, key=lambda n: cost(n, times)) - 1  # the most that fit
    listed = words[: spec.common] * times[0] + words[spec.common : spec.common + others] * times[1]
    listed = [listed[i] for i in draws.numbers(3).permutation(len(listed)).tolist()]
    common = set(words[: spec.common])
    prompt = Prompt(filler, length, question, list(dict.fromkeys(word for word in listed if word in common)))
    entries = [filler.encode(text) for i, word in enumerate(listed) for text in (_number(i), word)]
    padding = np.repeat(newline, room - sum(map(len, entries)))
    return prompt.sample(task, [padding, *entries], None, _by_last(listed), pool)


def make_frequent_words(task: str, spec: FrequentWords, draws: Draws, length: int, filler: RulerFiller) -> Sample:
    dot, space = one_token(filler, "."), one_token(filler, " ")
    ranks = max(32, length // 50)
    words = ["...", *draws.keys(1, ranks - 1)]
    prompt = Prompt(filler, length, f"\n? the {spec.asked} most frequent words are ", words[1 : 1 + spec.asked])
    encoded = [np.concatenate([space, filler.encode(word)]) for word in words]
    sizes = np.array([len(ids) for ids in encoded])
    weights = np.arange(1, ranks + 1) ** -2.0 / ZETA_2

    def counts(total: int) -> np.ndarray:
        return (total * weights + 1e-9).astype(np.int64)

    total = bisect.bisect_right(range(length), prompt.room, key=lambda n: (counts(n) * sizes).sum()) - 1  # the most that fits
    times = counts(total)
    if times[spec.asked] <= times[spec.asked + 1] or times[spec.asked] < 1:
        raise too_short(task, length, f"the last asked word stands {times[spec.asked]} times, the next {times[spec.asked + 1]}")
    listed = np.repeat(np.arange(ranks), times)
    listed = listed[draws.numbers(3).permutation(len(listed))].tolist()
    padding = np.repeat(dot, prompt.room - int((times * sizes).sum()))
    shown = _by_last([words[i] for i in listed if i])
    pool = len(split_pool(NUM_KEYS, draws.split))
    return prompt.sample(task, [padding, *(encoded[i] for i in listed)], None, shown, pool)


MAKERS: dict[type, Callable[[str, Any, Draws, int, RulerFiller], Sample]] = {
    Needles: make_needles,
    Variables: make_variables,
    CommonWords: make_common_words,
    FrequentWords: make_frequent_words,
}


def _needles_only(task: str, spec: Needles, draws: Draws, length: int, filler: RulerFiller) -> Sample:
    """As many needles as fit, one of them asked; the tokens left over are line ends before the first."""
    newline = one_token(filler, "\n")
    most = length  # keys and values of which there is no end
    if not spec.uuid_keys:
        most = len(split_pool(NUM_KEYS, draws.split)) // 2
    if not spec.uuid_values:
        most = min(most, len(split_pool(10**spec.digits, draws.split)) // 2)
    count, lines = min(16, most), []
    while True:
        keys, values = _keys(spec, draws, count), _values(spec, draws, count)  # they begin with those of the last round
        lines += [_line(filler, f"{key} is ", value) for key, value in zip(keys[len(lines) :], values[len(lines) :], strict=True)]
        prompt, used = Prompt(filler, length, _question(spec, keys), values[:1]), np.cumsum([0, *map(len, lines)])
        if used[-1] > prompt.room:
            break
        if count == most:
            raise ValueError(f"ruler task {task!r}: {most} different needles do not fill length={length}; give more digits or uuids.")
        count = min(max(count + 16, int(1.1 * prompt.room * count / used[-1])), most)
    number = int(np.searchsorted(used, prompt.room, side="right")) - 1
    if number < MIN_NEEDLES:
        raise too_short(task, length, f"{number} needles fit, and {MIN_NEEDLES} are needed")
    places = places_of(draws.split, number - 1)
    place = int(places[draws.numbers(5).integers(0, 1, len(places)).item()])
    order = [*range(1, place + 1), 0, *range(place + 1, number)]  # the asked needle is number 0
    context = [np.repeat(newline, prompt.room - used[number]), *(lines[i] for i in order)]
    return prompt.sample(task, context, place / (number - 1), [values[i] for i in order], _value_pool(spec))


def _cuts(task: str, draws: Draws, length: int, room: int, asked: int, needles: int) -> np.ndarray:
    """int64 [needles]: how many filler tokens stand before each. The asked ones, first, at depths of the split, others anywhere."""
    if room < DEPTH_BINS:
        raise too_short(task, length, f"{room} tokens are left for the filler, and {DEPTH_BINS} are needed")
    places = places_of(draws.split, room)
    numbers = draws.numbers(5)
    return np.concatenate([places[numbers.integers(0, asked, len(places))], numbers.integers(asked, needles - asked, room + 1)])


def _spread(words: np.ndarray, cuts: np.ndarray, order: Sequence[int], lines: Sequence[np.ndarray]) -> list[np.ndarray]:
    first, *others = np.split(words, cuts[order])
    return [first, *(piece for i, part in zip(order, others, strict=True) for piece in (lines[i], part))]


def _keys(spec: Needles, draws: Draws, count: int, avoid: str = "") -> list[str]:
    """Keys that `avoid` does not have: in a text of one's own, "module" would be a word of three syllables too."""
    if spec.uuid_keys:
        return uuids(draws, 1, count)
    tries = count if not avoid else 2 * count + 8
    while len(kept := [key for key in draws.keys(1, tries) if key not in avoid]) < count:
        tries *= 2
    return kept[:count]


def _values(spec: Needles, draws: Draws, count: int) -> list[str]:
    return uuids(draws, 2, count) if spec.uuid_values else draws.values(2, count, spec.digits)


def _value_pool(spec: Needles) -> float:
    return 2.0**122 if spec.uuid_values else 10.0**spec.digits


def _question(spec: Needles, keys: Sequence[str]) -> str:
    if spec.values > 1:
        return f"\n? the {spec.values} values of {keys[0]} are "
    return f"\n? {', '.join(keys[: spec.asked])} {'are' if spec.asked > 1 else 'is'} "


def _line(filler: RulerFiller, start: str, value: str) -> np.ndarray:
    """As `Pieces.line`, whose end is encoded once: a prompt of 128K tokens holds ten thousand lines."""
    return np.concatenate([filler.encode(f"\n{start}"), filler.encode(value), filler.encode(".\n")])


def _number(index: int) -> str:
    return f" {index + 1}. "


def _by_last(listed: Sequence[str]) -> list[str]:
    """The different words, ordered by where each stands last."""
    return list(dict.fromkeys(reversed(listed)))[::-1]
