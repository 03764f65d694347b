"""The sections of `latency.py` that decode. Each gives its rows to `Bench.add` as soon as they are measured."""

from __future__ import annotations

import statistics
from typing import Any

import jax
import numpy as np
from latency_bench import GB, Bench
from latency_floor import step_bytes
from latency_subject import Decoder, Program, Subject, chunk_request, compile_all, decode_request, filled_cache

from moejax.infer import cache_bytes

MOST_STEPS = 64  # of one measurement: the cache has room for them


def measure_decode(bench: Bench, subject: Subject, program: Program, rows: int, capacity: int, length: int, **more: Any) -> dict[str, Any]:
    """ms a step, queued (one wait at the end) and waited for one by one, beside the floor of bytes."""
    decoder = Decoder(subject, program, rows, capacity, length)
    row = _timed_decode(bench, decoder, subject, rows, length, **more)
    decoder.free()
    return row


def _timed_decode(bench: Bench, decoder: Decoder, subject: Subject, rows: int, length: int, *, a_call: int = 1, **more: Any):
    decoder.run(2)
    decoder.rewind(length)
    once = decoder.run(2) / 2
    calls = max(2, min(MOST_STEPS // a_call, round(bench.size.measured_s / 5 / once)))

    def repeat(times: int, calls: int, **options: Any) -> list[float]:
        found = []
        for _ in range(times):
            decoder.rewind(length)
            found.append(decoder.run(calls, **options) / calls / a_call * 1e3)
        return found

    queued, waited = repeat(5, calls), repeat(3, calls, wait_each=True)
    ms, floor = statistics.median(queued), step_bytes(subject.weights, rows, length, state_dtype=subject.state_dtype)
    return bench.add(model=subject.name, length=length, rows=rows, ms=ms, fastest_ms=min(queued), waited_ms=statistics.median(waited),
                     tokens_s=rows / ms * 1e3, floor_ms=floor.milliseconds, ratio=ms / floor.milliseconds, gbytes=floor.total / GB,
                     temporary_gb=decoder.program.temporary / GB, **more)  # fmt: skip


def decode(bench: Bench) -> None:
    """Steps of the hybrid at every length and batch, and of one row."""
    size, subject = bench.size, bench.subject("hybrid")
    cases = [(length, rows) for length, batches in size.decode for rows in batches]
    longest = max(size.single) + size.room
    requests: dict[Any, Any] = {case: decode_request(subject, case[1], case[0] + size.room) for case in cases}
    programs = bench.compile(requests | {"one": decode_request(subject, 1, longest)})
    for length, rows in cases:
        if bench.left() < 0:
            bench.skip(f"{rows} rows of {length} tokens")
            continue
        measure_decode(bench, subject, programs[length, rows], rows, length + size.room, length)
    if bench.left() < 0:
        return bench.skip("one row")
    decoder = Decoder(subject, programs["one"], 1, longest, size.single[0])
    for length in size.single:
        _timed_decode(bench, decoder, subject, 1, length, capacity=longest)
    decoder.free()


def scan(bench: Bench) -> None:
    """Many steps in one program (lax.scan) against one call a step, which is what an engine does."""
    size, subject, a_call = bench.size, bench.subject("hybrid"), bench.scan
    cases = [(size.decode[0][0], size.decode[0][1][0]), (size.decode[0][0], 1)]
    requests = {case: decode_request(subject, case[1], case[0] + size.room, scan=a_call) for case in cases}
    requests |= {(*case, 1): decode_request(subject, case[1], case[0] + size.room) for case in cases}
    programs = bench.compile(requests)
    for length, rows in cases:
        for key, count in (((length, rows), a_call), ((length, rows, 1), 1)):
            if bench.left() < 0:
                bench.skip(f"{rows} rows, {count} steps a call")
                continue
            measure_decode(bench, subject, programs[key], rows, length + size.room, length, a_call=count, steps_a_call=count)


def stable(bench: Bench) -> None:
    """Tokens/s over windows of one long answer."""
    length, rows, total, window = bench.size.stable
    subject, capacity = bench.subject("hybrid"), length + total + bench.size.room
    program = bench.compile({0: decode_request(subject, rows, capacity)})[0]
    decoder = Decoder(subject, program, rows, capacity, length)
    decoder.run(4)
    decoder.rewind()
    speeds = []
    while len(speeds) < total // window and bench.left() > 0:
        speeds.append(rows * window / decoder.run(window))
    if not speeds:
        return bench.skip("windows")
    floors = [step_bytes(subject.weights, rows, at).milliseconds for at in (length, length + window * (len(speeds) - 1))]
    bench.add(model=subject.name, length=length, rows=rows, window=window, decoded=window * len(speeds), tokens_s=speeds,
              last_over_first=speeds[-1] / speeds[0], floor_last_over_first=floors[0] / floors[1])  # fmt: skip
    decoder.free()


def compare(bench: Bench) -> None:
    """Hybrid and all-MLA at the longest context: the same batch, and the largest that each one's memory takes."""
    size, length = bench.size, bench.size.long[-1]
    capacity = length + size.room
    subjects = [bench.subject(name) for name in ("hybrid", "all-MLA")]
    bytes_of = [cache_bytes(s.config, 1, length, dtype=s.weights.dtype, state_dtype=s.state_dtype).total for s in subjects]
    bench.add(length=length, hybrid_gb=bytes_of[0] / GB, all_mla_gb=bytes_of[1] / GB, share=bytes_of[0] / bytes_of[1])
    limit = _memory()
    held = sum(leaf.nbytes for s in subjects for leaf in jax.tree.leaves(s.weights))  # both models stay
    requests: dict[Any, Any] = {(s.name, size.compare_rows): decode_request(s, size.compare_rows, capacity) for s in subjects}
    for s in subjects:
        most = _largest_batch(bench, s, capacity, limit, held)
        if most is not None:
            requests[s.name, most] = decode_request(s, most, capacity)
    programs = bench.compile(requests)
    found: dict[Any, list[float]] = {}
    for (name, rows), program in programs.items():
        subject = next(s for s in subjects if s.name == name)
        row = _until_it_fits(bench, subject, program, rows, capacity, length)
        if row is not None:
            found.setdefault(("same" if rows == size.compare_rows else "largest"), []).append(row["tokens_s"])
    for batch, speeds in found.items():
        if len(speeds) == 2:
            bench.add(length=length, batch=batch, hybrid_over_all_mla=speeds[0] / speeds[1])


def _memory() -> int:
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0)


def _largest_batch(bench: Bench, subject: Subject, capacity: int, limit: int, held: int) -> int | None:
    """Rows whose cache fits beside the weights with 2% to spare; on a CPU two more than the common batch."""
    if not limit:
        return bench.size.compare_rows + (2 if subject.name == "hybrid" else 1)
    row = cache_bytes(subject.config, 1, capacity, dtype=subject.weights.dtype, state_dtype=subject.state_dtype).total
    return max(1, int((0.98 * limit - held) // row))


def _until_it_fits(bench: Bench, subject: Subject, program: Program, rows: int, capacity: int, length: int) -> dict[str, Any] | None:
    """Measure; where the memory does not do, with a row less, down to three quarters of the rows."""
    least, limit = max(1, 3 * rows // 4), _memory()
    while bench.left() > 0:
        try:
            if limit and program.needed > limit and rows > least:
                raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: the program needs {program.needed / GB:.1f} of {limit / GB:.1f} GB")
            return measure_decode(bench, subject, program, rows, capacity, length)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or rows <= least:
                raise
            bench.add(model=subject.name, rows=rows, too_large=str(error).splitlines()[0][:90])
        rows -= 1
        program = compile_all({0: decode_request(subject, rows, capacity)})[0]
    bench.skip(f"{subject.name}, {rows} rows")
    return None


def profile(bench: Bench) -> None:
    """The longest kernels of one step (first batch of each length) and of one chunk, by the profiler. Last: it slows what follows."""
    from kda import gpu_kernels

    size, subject = bench.size, bench.subject("hybrid")
    cases = [(length, batches[-1]) for length, batches in size.decode]
    requests: dict[Any, Any] = {case: decode_request(subject, case[1], case[0] + size.room) for case in cases}
    long = size.long[0] + size.room
    programs = bench.compile(requests | {"chunk": chunk_request(subject, long, size.chunk)})
    for length, rows in cases:
        if bench.left() < 0:
            bench.skip(f"profile of {rows} rows of {length}")
            continue
        decoder = Decoder(subject, programs[length, rows], rows, length + size.room, length)
        decoder.run(2)
        _kernels(bench, gpu_kernels(decoder.run, (1,)), what="step", length=length, rows=rows)
        decoder.free()
    held = [filled_cache(subject, 1, long, size.long[0] - size.chunk)]
    tokens, counts = np.ones((1, size.chunk), np.int32), np.full((1,), size.chunk, np.int32)

    def one() -> jax.Array:
        held[0], following = programs["chunk"].call(subject.weights, held[0]._replace(lengths=start), tokens, counts)
        return following

    start = np.full((1,), size.long[0] - size.chunk, np.int32)
    one()
    _kernels(bench, gpu_kernels(one, ()), what="chunk", length=size.long[0], rows=1)


def _kernels(bench: Bench, found: dict[str, float], **row: Any) -> None:
    total = sum(found.values())
    bench.add(**row, kernels=len(found), device_ms=total)
    for name, ms in sorted(found.items(), key=lambda item: -item[1])[:12]:
        bench.add(**row, kernel=name[:80], ms=ms, share=ms / max(total, 1e-9))
