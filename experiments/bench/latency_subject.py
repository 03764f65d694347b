"""What `latency.py` measures: the models, their compiled programs, caches filled with random numbers, clocks.

B rows, S capacity of a cache in tokens, N tokens of a chunk.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax import HybridLM, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from moejax.infer import clear_rows, decode_step, init_cache, prefill_chunk, prepare

PATTERNS = {"hybrid": "KKKM", "all-MLA": "M", "all-KDA": "K"}


class Size(NamedTuple):
    """The models and the lengths of one rehearsal or measurement."""

    config: ModelConfig
    prompts: tuple[int, ...]
    """Lengths whose time to first token is taken many times."""
    prompts_mla: tuple[int, ...]
    """The same for the all-MLA model."""
    long: tuple[int, ...]
    """Longer ones, marks of one and the same prefill; the last is the longest context measured."""
    long_mla: tuple[int, ...]
    """The same for the all-MLA model; what is beyond them is estimated."""
    chunk: int
    decode: tuple[tuple[int, int], ...]
    """(length, batch): one program each"""
    single: tuple[int, ...]
    """Lengths at batch 1, in one cache of the longest capacity."""
    compare_rows: int
    stable: tuple[int, int, int, int]
    """(length, batch, tokens decoded, window)"""
    check: tuple[int, int, tuple[int, ...], int]
    """(prompt, decoded tokens, chunk sizes, layers)"""
    room: int
    """Tokens of capacity beyond the context."""
    measured_s: float
    """Seconds that one measurement of decoding should last."""


K, M = 1024, 1024**2
FULL = Size(
    config=ModelConfig(
        vocab_size=16384,
        hidden=1024,
        layers=16,
        dense_width=4096,
        residual_block=4,
        param_dtype="bfloat16",
        dtype="bfloat16",
        kda=KDAConfig(heads=8, key_dim=128, value_dim=128),
        mla=MLAConfig(heads=8, nope_dim=128, rope_dim=64, value_dim=128, kv_latent=512, q_latent=512),
        moe=MoEConfig(experts=24, experts_per_token=4, expert_width=256, latent=512, shared_width=512),
    ),
    prompts=(1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K),
    prompts_mla=(1 * K, 8 * K, 64 * K),
    long=(64 * K, 128 * K, 256 * K, 512 * K, M),
    long_mla=(64 * K, 128 * K, 256 * K),
    chunk=8 * K,  # the attention over the cache takes 9.6 us a token and layer at 1M, in chunks of 2048 11.5
    decode=((8 * K, 1024), (64 * K, 128), (256 * K, 64), (M, 16)),
    single=(8 * K, 64 * K, 256 * K, M),
    compare_rows=4,
    stable=(8 * K, 64, 4 * K, 256),
    check=(260, 12, (1, 7, 64, 1000), 4),
    room=1 * K,
    measured_s=1.0,
)
TINY = Size(
    config=FULL.config.replace(
        vocab_size=64,
        hidden=32,
        layers=4,
        dense_width=48,
        residual_block=2,
        kda={"heads": 2, "key_dim": 8, "value_dim": 8},
        mla={"heads": 2, "nope_dim": 8, "rope_dim": 4, "value_dim": 8, "kv_latent": 16, "q_latent": 16},
        moe={"experts": 8, "experts_per_token": 2, "expert_width": 16, "latent": 16, "shared_width": 16},
    ),
    prompts=(16, 32),
    prompts_mla=(32,),
    long=(32, 64, 128),
    long_mla=(32, 64),
    chunk=32,
    decode=((32, 4), (128, 2)),
    single=(32, 128),
    compare_rows=2,
    stable=(32, 2, 32, 8),
    check=(40, 4, (1, 7, 64), 4),
    room=64,
    measured_s=0.02,
)
SIZES = {"full": FULL, "tiny": TINY}


def random_key(seed: int) -> jax.Array:
    """Keys of the "rbg" generator: the program that draws 300M weights compiles in half the time of "threefry2x32"."""
    return jax.random.key(seed, impl="rbg")


class Request(NamedTuple):
    """A function to compile, with its arguments or their shapes."""

    function: Any
    arguments: tuple
    donated: int | None = 1
    timed: bool = True
    """False: XLA need not time the forms of its products."""


class Program(NamedTuple):
    """A compiled function; most are of (weights, cache, tokens ...) and take the cache's memory over."""

    call: Any
    compile_s: float
    temporary: int
    """Bytes beside arguments and results."""
    needed: int
    """Bytes of arguments, results and temporaries together."""


class Subject:
    """One model with random weights: enough for time. Programs are compiled for its shapes; `Bench.compile` then makes the weights."""

    def __init__(self, name: str, size: Size):
        self.name = name
        self.config = size.config.replace(pattern=PATTERNS[name])
        self.shapes: Any = jax.eval_shape(self._make, random_key(0))
        self.weights: Any = None

    def _make(self, key):
        model = HybridLM(self.config)
        return prepare(model, model.init(key, jnp.zeros((1, 1), jnp.int32)))

    def request(self) -> Request:
        """Of the program that makes the weights."""
        return Request(self._make, (random_key(0),), donated=None, timed=False)

    def cache_shapes(self, rows: int, capacity: int) -> Any:
        return jax.eval_shape(lambda: init_cache(self.config, rows, capacity, dtype=self.shapes.dtype))


def _next_tokens(logits: jax.Array) -> jax.Array:
    """Greedy, moved by the row's number: with random weights all rows would soon repeat one token and meet the same few experts."""
    return (jnp.argmax(logits, -1).astype(jnp.int32) + jnp.arange(logits.shape[0], dtype=jnp.int32)) % logits.shape[1]


def step(weights, cache, tokens):
    """One decoding step: (cache, tokens [B]) -> (cache, next tokens [B])."""
    out = decode_step(weights, cache, tokens)
    return out.cache, _next_tokens(out.logits)


def steps(weights, cache, tokens, *, count: int):
    """`count` decoding steps in one program."""
    return jax.lax.scan(lambda carry, _: (step(weights, *carry), None), (cache, tokens), length=count)[0]


def chunk(weights, cache, tokens, counts):
    """One chunk of a prefill: tokens [B,N] -> (cache, next tokens [B])."""
    out = prefill_chunk(weights, cache, tokens, counts)
    return out.cache, _next_tokens(out.logits)


def decode_request(subject: Subject, rows: int, capacity: int, *, scan: int | None = None) -> dict[Any, Request]:
    """{("step", model, rows, capacity, steps a call): its request}"""
    function = step if scan is None else functools.partial(steps, count=scan)
    request = Request(function, (subject.shapes, subject.cache_shapes(rows, capacity), jax.ShapeDtypeStruct((rows,), jnp.int32)))
    return {("step", subject.name, rows, capacity, scan or 1): request}


def chunk_request(subject: Subject, capacity: int, length: int) -> dict[Any, Request]:
    """{("chunk", model, length, capacity): its request}, of one row"""
    arguments = (jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32))
    return {("chunk", subject.name, length, capacity): Request(chunk, (subject.shapes, subject.cache_shapes(1, capacity), *arguments))}


def compile_all(requests: dict[Any, Request]) -> dict[Any, Program | Exception]:
    """A Program for each request, or the error that it met. Each compiles while the next is lowered, which needs the interpreter."""

    def build(lowered, timed: bool) -> Program:
        begin = time.perf_counter()
        compiled = lowered.compile() if timed else lowered.compile({"xla_gpu_autotune_level": 0})
        seconds, memory = time.perf_counter() - begin, _memory_of(compiled)
        if memory is None:
            return Program(compiled, seconds, 0, 0)
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return Program(compiled, seconds, memory.temp_size_in_bytes, held + memory.temp_size_in_bytes)

    begun: dict[Any, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for key, (function, arguments, donated, timed) in requests.items():
            try:
                lowered = jax.jit(function, donate_argnums=() if donated is None else donated).lower(*arguments)
                begun[key] = pool.submit(build, lowered, timed)
            except Exception as error:  # the other programs are worth having
                begun[key] = error
    return {key: one if isinstance(one, Exception) else (one.exception() or one.result()) for key, one in begun.items()}


def _memory_of(compiled):
    """None where the backend does not say, as of programs out of the compilation cache on some."""
    try:
        return compiled.memory_analysis()
    except jax.errors.JaxRuntimeError:
        return None


def filled_cache(subject: Subject, rows: int, capacity: int, length: int) -> Any:
    """A cache of `length` tokens a row, of random numbers: the time of a step does not depend on them, and no prefill is waited for."""
    shapes = subject.cache_shapes(rows, capacity)
    leaves, treedef = jax.tree.flatten(shapes.layers)
    keys = jax.random.split(random_key(1), len(leaves))
    layers = jax.tree.unflatten(treedef, [_random(key, leaf.shape, leaf.dtype) for leaf, key in zip(leaves, keys, strict=True)])
    return jax.block_until_ready(shapes._replace(layers=layers, lengths=jnp.full(rows, length, jnp.int32)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key, shape: tuple[int, ...], dtype):
    """An array of random numbers. Of a latent [B,S,C] a few tokens repeat: its numbers would fill the memory twice over."""
    if len(shape) != 3:
        return 0.1 * jax.random.normal(key, shape, dtype)
    rows, capacity, width = shape
    tile = math.gcd(capacity, 64)
    part = jax.random.normal(key, (rows, 1, tile, width), dtype)
    return jnp.broadcast_to(part, (rows, capacity // tile, tile, width)).reshape(shape)


@functools.partial(jax.jit, donate_argnums=0)
def emptied(cache):
    """The same memory as an empty cache."""
    return clear_rows(cache, jnp.arange(cache.rows))


def prefill_seconds(subject: Subject, program: Program, cache, tokens: np.ndarray, size: int, marks: tuple[int, ...]):
    """Prefill one row in chunks of `size`, which divides the marks. -> ({mark: seconds until the token after it is on the host}, cache)."""
    cache, begin, times = jax.block_until_ready(emptied(cache)), time.perf_counter(), {}
    for start in range(0, marks[-1], size):
        part = tokens[:, start : start + size]
        cache, following = program.call(subject.weights, cache, part, np.full((1,), size, np.int32))
        if start + size in marks:
            np.asarray(following)
            times[start + size] = time.perf_counter() - begin
    return times, cache


def with_length(cache, length: int):
    return cache._replace(lengths=jnp.full_like(cache.lengths, length))


def delete(tree: Any) -> None:
    """Give the memory back now, whoever still holds the arrays."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


class Decoder:
    """Steps of one compiled program over one filled cache."""

    def __init__(self, subject: Subject, program: Program, rows: int, capacity: int, length: int):
        self.subject, self.program, self.rows = subject, program, rows
        self.cache = filled_cache(subject, rows, capacity, length)
        self.tokens = jax.random.randint(jax.random.key(2), (rows,), 0, subject.config.vocab_size, jnp.int32)

    def run(self, calls: int, *, wait_each: bool = False) -> float:
        """Seconds of `calls` calls, the last one waited for."""
        begin = time.perf_counter()
        for _ in range(calls):
            self.cache, self.tokens = self.program.call(self.subject.weights, self.cache, self.tokens)
            if wait_each:
                np.asarray(self.tokens)
        jax.block_until_ready(self.tokens)
        return time.perf_counter() - begin

    def rewind(self, length: int) -> None:
        self.cache = jax.block_until_ready(with_length(self.cache, length))

    def free(self) -> None:
        delete((self.cache, self.tokens))
