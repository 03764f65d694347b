"""The sections of `latency.py` that prefill: correctness, time to the first token, the KDA layers alone.

Each gives its rows to `Bench.add` as soon as they are measured.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from latency_bench import Bench
from latency_subject import Program, Request, Subject, chunk_request, delete, filled_cache, prefill_seconds, random_key

from moejax import HybridLM
from moejax.infer import decode_step, init_cache, prefill_chunk, prepare
from moejax.modules.kda import KimiDeltaAttention


def check(bench: Bench) -> None:
    """Prefill in chunks + decoding against one full forward: the largest error over every position that gave logits.

    All experts are chosen. With some of them, near ties of random weights route otherwise under bfloat16's rounding, and the full
    forward in bfloat16 is itself 0.9 of the largest logit away from float32. With all of them it is 0.02 in 4 layers (0.01 in one).
    """
    prompt, extra, sizes, layers = bench.size.check
    config = bench.size.config.replace(layers=layers, moe={"experts_per_token": bench.size.config.moe.experts, "balance": "none"})
    models = {name: HybridLM(config.replace(param_dtype=name, dtype=name)) for name in ("bfloat16", "float32")}
    lengths = np.array([prompt, prompt // 2 + 1], np.int32)  # ragged: the second row ends in the middle of the chunks of the first
    tokens = np.asarray(jax.random.randint(jax.random.key(4), (2, prompt + extra), 0, config.vocab_size, jnp.int32))

    def make(key):
        """The same numbers in both dtypes: {dtype: (variables, weights)}."""
        narrow = models["bfloat16"].init(key, jnp.zeros((1, 1), jnp.int32))
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)
        return {name: (own, prepare(models[name], own)) for name, own in (("bfloat16", narrow), ("float32", wide))}

    made, ints = jax.eval_shape(make, random_key(3)), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    requests: dict[Any, Request] = {("check", "make"): Request(make, (random_key(3),), donated=None)}
    full = jax.ShapeDtypeStruct((*tokens.shape, config.vocab_size), jnp.float32)
    for name, model in models.items():
        variables, weights = made[name]
        cached = jax.eval_shape(functools.partial(init_cache, model.config, *tokens.shape, dtype=name))
        references = (full,) * (2 if name == "bfloat16" else 1)
        requests["check", name, 0] = Request(_exact(name, model.apply), (variables, ints(*tokens.shape)), donated=None)
        requests["check", name, "one"] = Request(_exact(name, _one), (weights, cached, references, ints(2)))
        requests |= {("check", name, n): Request(_exact(name, _piece), (weights, cached, references, ints(2, n), ints(2))) for n in sizes}
    programs = bench.compile({key: request._replace(timed=False) for key, request in requests.items()})
    made = programs["check", "make"].call(random_key(3))
    exact, rounded = (programs["check", name, 0].call(made[name][0], tokens) for name in ("float32", "bfloat16"))
    largest = float(jnp.max(jnp.abs(exact)))
    away = float(jnp.max(jnp.abs(rounded - exact))) / largest
    bench.add(dtype="bfloat16", layers=layers, full_forward_against_float32=away)
    for name, bound, references in (("bfloat16", 1e-2, (rounded, exact)), ("float32", 1e-5, (exact,))):
        for size in (n for n in sizes if ("check", name, n) in programs):
            if bench.over():
                bench.skip(f"{name}, chunks of {size}")
                continue
            cache = init_cache(models[name].config, *tokens.shape, dtype=name)
            piece, one = programs["check", name, size], programs["check", name, "one"]
            errors = _errors(piece, one, made[name][1], cache, references, tokens, lengths, size, extra)
            first, later = (found.max(axis=(0, 2)) / largest for found in errors)  # by reference
            error = float(max(first[0], later[0]))
            row = dict(dtype=name, layers=layers, chunk=size, prompt=prompt, decoded=extra, error=error, bound=bound)
            row |= {"prefill_error": float(first[0]), "decode_error": float(later[0])}
            if len(references) == 2:  # what rounding alone does to the full forward is the yardstick
                row |= {"from_float32": float(max(first[1], later[1])), "full_from_float32": away}
            bench.add(**row)


def _exact(dtype: str, function):
    """float32 products take tf32 on the card unless they are told not to."""

    def run(*arguments):
        with jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext():
            return function(*arguments)

    return run


def _piece(weights, cache, references, tokens, counts):
    at = cache.lengths + counts - 1
    out = prefill_chunk(weights, cache, tokens, counts)
    return out.cache, _error(out.logits, references, at, counts)


def _one(weights, cache, references, tokens):
    out = decode_step(weights, cache, tokens)
    return out.cache, _error(out.logits, references, cache.lengths, jnp.ones_like(cache.lengths))


def _error(logits, references, at, counts):
    """Logits [B,V] of positions `at` [B] -> the largest difference from each of R references [B,T,V]: [R,B], 0 in rows without tokens."""
    there = [jnp.take_along_axis(full, jnp.maximum(at, 0)[:, None, None], axis=1)[:, 0] for full in references]
    return jnp.stack([jnp.max(jnp.where((counts > 0)[:, None], jnp.abs(logits - own), 0), axis=-1) for own in there])


def _errors(piece: Program, one: Program, weights, cache, references, tokens, lengths, size: int, extra: int):
    """Errors of every chunk [.,R,B] of the ragged prompts, and of every decoded token."""
    first, later = [], []
    for start in range(0, lengths.max(), size):
        part = tokens[:, start : start + size]
        part = np.pad(part, [(0, 0), (0, size - part.shape[1])])
        cache, errors = piece.call(weights, cache, references, part, np.clip(lengths - start, 0, size))
        first.append(errors)
    for step in range(extra):
        cache, errors = one.call(weights, cache, references, tokens[np.arange(len(lengths)), lengths + step])
        later.append(errors)
    return np.asarray(jnp.stack(first)), np.asarray(jnp.stack(later))


def first_token(bench: Bench, name: str) -> None:
    """Time to the first token: one whole prefill of the longest prompt with marks on the way, many shorter prompts, two more long ones."""
    size, subject = bench.size, bench.subject(name)
    prompts, long = (size.prompts, size.long) if name == "hybrid" else (size.prompts_mla, size.long_mla)
    capacity = long[-1] + size.room
    (program,) = bench.compile(chunk_request(subject, capacity, size.chunk), subject).values()
    tokens = np.random.default_rng(5).integers(0, subject.config.vocab_size, (1, long[-1]), np.int32)
    cache, runs = filled_cache(subject, 1, capacity, 0), []
    _, cache = prefill_seconds(subject, program, cache, tokens, size.chunk, (size.chunk,))  # warm
    took, cache = prefill_seconds(subject, program, cache, tokens, size.chunk, long)
    runs.append(took)
    for mark in long:
        bench.add(model=name, prompt=mark, chunk=size.chunk, runs=1, first_run_ms=took[mark] * 1e3)
    for length in (n for n in prompts if n >= size.chunk):
        cache = _many(bench, subject, program, cache, tokens, size.chunk, length)
    small = [n for n in prompts if n < size.chunk]
    if small and not bench.can_compile():
        bench.skip(f"{name}, prompts of {small}")
    elif small:
        requests = [chunk_request(subject, capacity, n) for n in small]
        programs = bench.compile({key: request for one in requests for key, request in one.items()})
        for (*_, length, _), program_of_one in programs.items():
            cache = _many(bench, subject, program_of_one, cache, tokens, length, length)
    while len(runs) < 3 and bench.left() > runs[-1][long[-1]]:
        took, cache = prefill_seconds(subject, program, cache, tokens, size.chunk, long)
        runs.append(took)
    delete(cache)
    middle = {mark: statistics.median(run[mark] for run in runs) for mark in long}
    for mark in long:
        bench.add(model=name, prompt=mark, chunk=size.chunk, runs=len(runs), median_ms=middle[mark] * 1e3, tokens_s=mark / middle[mark])
    if long[-1] < size.long[-1]:
        _estimate(bench, name, middle, size.long[-1])


def _many(bench: Bench, subject: Subject, program: Program, cache, tokens, chunk: int, length: int):
    """20 prompts of one length, or as many as there is time for, 3 at least. -> the cache."""
    times: list[float] = []
    _, cache = prefill_seconds(subject, program, cache, tokens, chunk, (length,))  # warm
    while len(times) < 20 and (bench.left() > 0 or len(times) < 3):
        took, cache = prefill_seconds(subject, program, cache, tokens, chunk, (length,))
        times.append(took[length])
    p50, p95 = np.percentile(times, [50, 95]).tolist()
    bench.add(model=subject.name, prompt=length, chunk=chunk, runs=len(times), p50_ms=p50 * 1e3, p95_ms=p95 * 1e3, tokens_s=length / p50)
    return cache


def _estimate(bench: Bench, name: str, middle: dict[int, float], length: int) -> None:
    """t = a n + b n^2 through the two longest measured prompts; said to be an estimate."""
    (n1, t1), (n2, t2) = sorted(middle.items())[-2:]
    b = (t2 / n2 - t1 / n1) / (n2 - n1)
    seconds = (t1 / n1 - b * n1) * length + b * length**2
    bench.add(model=name, prompt=length, estimate_ms=seconds * 1e3, estimated_from=[n1, n2])


def kda(bench: Bench) -> None:
    """Time a token of the KDA layers, over a prefill of 64K and of the longest: one layer alone, and a model of nothing else."""
    size, lengths, piece = bench.size, (bench.size.long[0], bench.size.long[-1]), bench.size.chunk
    config, subject = size.config, bench.subject("all-KDA")
    layer = KimiDeltaAttention(config.kda, config.norm_eps, param_dtype=config.param_dtype)
    x = jax.random.normal(random_key(6), (1, piece, config.hidden), config.dtype)
    variables = jax.jit(layer.init)(random_key(7), x[:, :1])
    _, empty = jax.eval_shape(lambda x: layer.apply(variables, x, return_state=True), x)  # type: ignore[misc]
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), empty)

    def run(variables, state, x):
        y, state = layer.apply(variables, x, state=state, return_state=True)  # type: ignore[misc]
        return state, y

    alone: dict[Any, Request] = {("layer",): Request(run, (variables, state, x))}
    (key,) = model = chunk_request(subject, lengths[1], piece)
    programs = bench.compile(alone | model, subject)

    def seconds(length: int) -> float:
        nonlocal state
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for _ in range(length // piece):
            state, y = programs["layer",].call(variables, state, x)
        jax.block_until_ready(y)
        return time.perf_counter() - begin

    if ("layer",) in programs:
        seconds(piece)  # warm
        found = {length: statistics.median(seconds(length) for _ in range(5)) / length for length in lengths}
        bench.add(what="one KDA layer alone", chunk=piece, **_a_token(found, lengths))
    if key not in programs:
        return
    if bench.over():
        return bench.skip("a model of KDA layers")
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, (1, lengths[1]), np.int32)
    cache, runs = filled_cache(subject, 1, lengths[1], 0), []
    _, cache = prefill_seconds(subject, programs[key], cache, tokens, piece, (piece,))  # warm
    while len(runs) < 3 and (bench.left() > 0 or not runs):
        took, cache = prefill_seconds(subject, programs[key], cache, tokens, piece, lengths)
        runs.append(took)
    found = {length: statistics.median(run[length] for run in runs) / length for length in lengths}
    bench.add(what="a model of KDA layers", runs=len(runs), **_a_token(found, lengths))


def _a_token(found: dict[int, float], lengths: tuple[int, int]) -> dict[str, Any]:
    short, long = (found[length] for length in lengths)
    return {"lengths": list(lengths), "ns_a_token": [short * 1e9, long * 1e9], "long_over_short": long / short}
