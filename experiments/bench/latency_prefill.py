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
from latency_subject import chunk_request, filled_cache, prefill_seconds

from moejax import HybridLM
from moejax.infer import decode_step, init_cache, prefill_chunk, prepare
from moejax.modules.kda import KimiDeltaAttention


def check(bench: Bench) -> None:
    """Prefill in chunks + decoding against one full forward: the largest error over every position that gave logits."""
    prompt, extra, sizes, layers = bench.size.check
    for dtype, bound in (("bfloat16", 1e-2), ("float32", 1e-5)):
        if bench.left() < 0:
            bench.skip(dtype)
            continue
        # float32 products take tf32 on the card unless they are told not to.
        exact = jax.default_matmul_precision("highest") if dtype == "float32" else contextlib.nullcontext()
        with exact:
            _check_dtype(bench, dtype, bound, prompt, extra, sizes, layers)


def _check_dtype(bench: Bench, dtype: str, bound: float, prompt: int, extra: int, sizes: tuple[int, ...], layers: int) -> None:
    model = HybridLM(bench.size.config.replace(layers=layers, param_dtype=dtype, dtype=dtype))
    variables = jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))
    weights = prepare(model, variables)
    lengths = np.array([prompt, prompt // 2 + 1], np.int32)  # ragged: the second row ends in the middle of the chunks of the first
    capacity = prompt + extra
    tokens = np.asarray(jax.random.randint(jax.random.key(4), (2, capacity), 0, model.config.vocab_size, jnp.int32))
    full = jax.jit(model.apply)(variables, tokens)
    largest = float(jnp.max(jnp.abs(full)))
    if dtype == "bfloat16":  # what rounding alone does to the full forward: a yardstick for the errors below
        exact = HybridLM(model.config.replace(param_dtype="float32", dtype="float32"))
        with jax.default_matmul_precision("highest"):
            wide = jax.jit(exact.apply)(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), variables), tokens)
        bench.add(dtype=dtype, layers=layers, full_forward_against_float32=float(jnp.max(jnp.abs(full - wide))) / largest)

    def error(logits, expected, at, counts):
        there = jnp.take_along_axis(expected, jnp.maximum(at, 0)[:, None, None], axis=1)[:, 0]
        return jnp.max(jnp.where((counts > 0)[:, None], jnp.abs(logits - there), 0), axis=-1)

    def piece(weights, cache, expected, tokens, counts):
        at = cache.lengths + counts - 1
        out = prefill_chunk(weights, cache, tokens, counts)
        return out.cache, error(out.logits, expected, at, counts)

    def one(weights, cache, expected, tokens):
        at = cache.lengths
        out = decode_step(weights, cache, tokens)
        return out.cache, error(out.logits, expected, at, jnp.ones_like(at))

    empty = lambda: init_cache(model.config, 2, capacity, state_dtype="float32")
    shapes, ints = jax.eval_shape(empty), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    requests: dict[Any, Any] = {size: (piece, (weights, shapes, full, ints(2, size), ints(2))) for size in sizes}
    programs = bench.compile(requests | {"one": (one, (weights, shapes, full, ints(2)))})
    for size in sizes:
        cache, found = empty(), []
        for start in range(0, prompt, size):
            counts = np.clip(lengths - start, 0, size).astype(np.int32)
            part = np.zeros((2, size), np.int32)
            given = tokens[:, start : min(start + size, prompt)]
            part[:, : given.shape[1]] = given
            cache, errors = programs[size].call(weights, cache, full, part, counts)
            found.append(errors)
        decoded = []
        for step in range(extra):
            cache, errors = programs["one"].call(weights, cache, full, tokens[np.arange(2), lengths + step])
            decoded.append(errors)
        prefilled, later = np.asarray(jnp.stack(found)), np.asarray(jnp.stack(decoded))
        worst = float(max(prefilled.max(), later.max())) / largest
        bench.add(dtype=dtype, layers=layers, chunk=size, prompt=prompt, decoded=extra, error=worst, bound=bound, ok=worst <= bound,
                  prefill_error=float(prefilled.max()) / largest, prefill_p90=float(np.quantile(prefilled, 0.9)) / largest,
                  decode_error=float(later.max()) / largest)  # fmt: skip


def first_token(bench: Bench, name: str) -> None:
    """Time to the first token: many prompts up to 64K, then whole prefills of the longest with marks on the way."""
    size, subject = bench.size, bench.subject(name)
    long = size.long if name == "hybrid" else size.long_mla
    short, capacity = size.prompts[-1] + size.room, long[-1] + size.room
    sizes = sorted({min(size.chunk, length) for length in size.prompts})
    requests: dict[Any, Any] = {("short", one): chunk_request(subject, short, one) for one in sizes}
    programs = bench.compile(requests | {("long", size.chunk): chunk_request(subject, capacity, size.chunk)})
    tokens = np.random.default_rng(5).integers(0, subject.config.vocab_size, (1, long[-1]), np.int32)
    cache = filled_cache(subject, 1, short, 0)
    ready = {one: programs["short", one] for one in sizes}
    for length in size.prompts:
        one = min(size.chunk, length)
        times: list[float] = []
        _, cache = prefill_seconds(subject, ready, cache, tokens, one, (length,))  # warm
        while len(times) < 20 and (bench.left() > 0 or len(times) < 3):
            took, cache = prefill_seconds(subject, ready, cache, tokens, one, (length,))
            times.append(took[length])
        p50, p95 = np.percentile(times, [50, 95]).tolist()
        bench.add(model=name, prompt=length, chunk=one, runs=len(times), p50_ms=p50 * 1e3, p95_ms=p95 * 1e3, tokens_s=length / p50)
    _delete(cache)
    cache, runs = filled_cache(subject, 1, capacity, 0), []
    ready = {size.chunk: programs["long", size.chunk]}
    _, cache = prefill_seconds(subject, ready, cache, tokens, size.chunk, (size.chunk,))  # warm
    while len(runs) < 3 and bench.left() > (runs[-1][long[-1]] if runs else 0):
        took, cache = prefill_seconds(subject, ready, cache, tokens, size.chunk, long)
        runs.append(took)
        for mark in long if len(runs) == 1 else ():
            bench.add(model=name, prompt=mark, chunk=size.chunk, runs=1, first_run_ms=took[mark] * 1e3)
    _delete(cache)
    if not runs:
        return bench.skip(f"{name}, prompts beyond {size.prompts[-1]}")
    middle = {mark: statistics.median(run[mark] for run in runs) for mark in long}
    for mark in long:
        bench.add(model=name, prompt=mark, chunk=size.chunk, runs=len(runs), median_ms=middle[mark] * 1e3, tokens_s=mark / middle[mark])
    if long[-1] < size.long[-1]:
        _estimate(bench, name, middle, size.long[-1])


def _estimate(bench: Bench, name: str, middle: dict[int, float], length: int) -> None:
    """t = a n + b n^2 through the two longest measured prompts; said to be an estimate."""
    (n1, t1), (n2, t2) = sorted(middle.items())[-2:]
    b = (t2 / n2 - t1 / n1) / (n2 - n1)
    seconds = (t1 / n1 - b * n1) * length + b * length**2
    bench.add(model=name, prompt=length, estimate_ms=seconds * 1e3, estimated_from=[n1, n2])


def kda(bench: Bench) -> None:
    """Time a token of the KDA layers, over a prefill of 64K and of the longest: one layer alone, and a model of nothing else."""
    size, lengths = bench.size, (bench.size.long[0], bench.size.long[-1])
    config, piece = size.config, size.chunk
    layer = KimiDeltaAttention(config.kda, config.norm_eps, param_dtype=config.param_dtype)
    x = jax.random.normal(jax.random.key(6), (1, piece, config.hidden), jnp.dtype(config.dtype or "float32"))
    variables = jax.jit(layer.init)(jax.random.key(7), x[:, :1])

    @functools.partial(jax.jit, donate_argnums=2)
    def run(variables, x, state):
        return layer.apply(variables, x, state=state, return_state=True)

    first = jax.jit(lambda variables, x: layer.apply(variables, x, return_state=True))(variables, x)
    state = run(variables, x, first[1])[1]  # type: ignore[index]

    def seconds(length: int) -> float:
        nonlocal state
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for _ in range(length // piece):
            y, state = run(variables, x, state)
        jax.block_until_ready(y)
        return time.perf_counter() - begin

    found = {length: statistics.median(seconds(length) for _ in range(5)) / length for length in lengths}
    bench.add(what="one KDA layer alone", chunk=piece, **_a_token(found, lengths))
    if bench.left() < 0:
        return bench.skip("a model of KDA layers")
    subject = bench.subject("all-KDA")
    programs = bench.compile({piece: chunk_request(subject, lengths[1], piece)})
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, (1, lengths[1]), np.int32)
    cache, runs = filled_cache(subject, 1, lengths[1], 0), []
    _, cache = prefill_seconds(subject, programs, cache, tokens, piece, (piece,))
    while len(runs) < 3 and (bench.left() > 0 or not runs):
        took, cache = prefill_seconds(subject, programs, cache, tokens, piece, lengths)
        runs.append(took)
    found = {length: statistics.median(run[length] for run in runs) / length for length in lengths}
    bench.add(what="a model of KDA layers", runs=len(runs), **_a_token(found, lengths))
    bench.forget("all-KDA")


def _a_token(found: dict[int, float], lengths: tuple[int, int]) -> dict[str, Any]:
    short, long = (found[length] for length in lengths)
    return {"lengths": list(lengths), "ns_a_token": [short * 1e9, long * 1e9], "long_over_short": long / short}


def _delete(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        leaf.delete()
