"""The sections of `latency.py` that decode. Each gives its rows to `Bench.add` as soon as they are measured."""

from __future__ import annotations

import statistics
from typing import Any

import jax
import numpy as np
from kda import gpu_kernels
from latency_bench import Bench
from latency_floor import step_bytes, tree_bytes
from latency_subject import Decoder, Program, Subject, chunk_request, decode_request, filled_cache, with_length

from moejax.infer import cache_bytes

GB = 1e9
MOST_STEPS = 64  # of one measurement: the cache has room for them
SCANNED = 32  # steps of a program of `scan`


def measure_decode(bench: Bench, subject: Subject, program: Program, rows: int, capacity: int, length: int, **more: Any) -> dict[str, Any]:
    """ms a step, queued (one wait at the end) and waited for one by one, beside the floor of bytes."""
    decoder = Decoder(subject, program, rows, capacity, length)
    try:
        return _timed_decode(bench, decoder, length, **more)
    finally:
        decoder.free()


def _timed_decode(bench: Bench, decoder: Decoder, length: int, *, steps_a_call: int = 1, **more: Any) -> dict[str, Any]:
    decoder.run(2)
    decoder.rewind(length)
    once = decoder.run(2) / 2
    calls = max(2, min(MOST_STEPS // steps_a_call, round(bench.size.measured_s / 5 / once)))

    def repeat(times: int, **options: Any) -> list[float]:
        found = []
        for _ in range(times):
            decoder.rewind(length)
            found.append(decoder.run(calls, **options) / calls / steps_a_call * 1e3)
        return found

    queued, waited, rows = repeat(5), repeat(3, wait_each=True), decoder.rows
    ms, floor = statistics.median(queued), step_bytes(decoder.subject.shapes, rows, length)
    return bench.add(model=decoder.subject.name, length=length, rows=rows, steps_a_call=steps_a_call, ms=ms, fastest_ms=min(queued),
                     waited_ms=statistics.median(waited), tokens_s=rows / ms * 1e3, floor_ms=floor.milliseconds,
                     ratio=ms / floor.milliseconds, gbytes=floor.total / GB,
                     temporary_gb=decoder.program.temporary / GB, **more)  # fmt: skip


def decode(bench: Bench) -> None:
    """Steps of the hybrid at every length with many rows, then of one row at every length of one capacity.

    Two programs at a time: rows come early, and not all of them ask the card at once which form of a product is the fastest.
    """
    size, subject = bench.size, bench.subject("hybrid")
    for cases in (size.decode[at : at + 2] for at in range(0, len(size.decode), 2)):
        if not bench.can_compile():
            bench.skip(f"length, rows {cases}")
            continue
        requests = [decode_request(subject, rows, length + size.room) for length, rows in cases]
        programs = bench.compile({key: one for request in requests for key, one in request.items()}, subject)
        for (length, rows), (key,) in zip(cases, requests, strict=True):
            if key not in programs or bench.over():
                continue
            try:
                measure_decode(bench, subject, programs[key], rows, length + size.room, length)
            except jax.errors.JaxRuntimeError as error:  # the next case is worth having
                bench.fail(f"{rows} rows of {length} tokens", error)
    if not bench.can_compile():
        return bench.skip("one row")
    longest = max(size.single) + size.room
    for program in bench.compile(decode_request(subject, 1, longest)).values():
        decoder = Decoder(subject, program, 1, longest, size.single[0])
        for length in size.single:
            _timed_decode(bench, decoder, length, capacity=longest)
        decoder.free()


def scan(bench: Bench) -> None:
    """Many steps in one program (lax.scan) against one call a step, which is what an engine does: one row, bound by launches."""
    subject, length = bench.subject("hybrid"), bench.size.single[0]
    capacity = length + bench.size.room
    requests = decode_request(subject, 1, capacity) | decode_request(subject, 1, capacity, scan=SCANNED)
    for (*_, steps), program in bench.compile(requests, subject).items():
        if bench.over():
            bench.skip(f"{steps} steps a call")
            continue
        measure_decode(bench, subject, program, 1, capacity, length, steps_a_call=steps)


def stable(bench: Bench) -> None:
    """Tokens/s over windows of one long answer."""
    length, rows, total, window = bench.size.stable
    subject, capacity = bench.subject("hybrid"), length + total + bench.size.room
    (program,) = bench.compile(decode_request(subject, rows, capacity), subject).values()
    decoder = Decoder(subject, program, rows, capacity, length)
    decoder.run(window)  # the first steps of a process are slower
    decoder.rewind(length)
    speeds = []
    while len(speeds) < total // window and not bench.over():
        speeds.append(rows * window / decoder.run(window))
    if not speeds:
        return bench.skip("windows")
    floors = [step_bytes(subject.shapes, rows, at).milliseconds for at in (length, length + window * (len(speeds) - 1))]
    bench.add(model=subject.name, length=length, rows=rows, window=window, decoded=window * len(speeds), tokens_s=speeds,
              last_over_first=speeds[-1] / speeds[0], floor_last_over_first=floors[0] / floors[1])  # fmt: skip
    decoder.free()


def compare(bench: Bench) -> None:
    """Hybrid and all-MLA at the longest context: the same batch, and the largest that each one's memory takes."""
    size, length = bench.size, bench.size.long[-1]
    capacity = length + size.room
    subjects = [bench.subject(name) for name in ("hybrid", "all-MLA")]
    bytes_of = [cache_bytes(s.config, 1, length, dtype=s.shapes.dtype).total for s in subjects]
    bench.add(length=length, hybrid_gb=bytes_of[0] / GB, all_mla_gb=bytes_of[1] / GB, share=bytes_of[0] / bytes_of[1])
    # Both models stay. A program of a batch that may not fit is compiled all the same: only then its needs are known.
    held = tree_bytes([s.shapes for s in subjects])
    batches = {"same": [size.compare_rows] * 2, "largest": [_largest_batch(bench, s, capacity, held) for s in subjects]}
    for batch, rows in batches.items():
        if batch != "same" and not bench.can_compile():
            bench.skip(f"the {batch} batch")
            continue
        requests = [decode_request(s, n, capacity) for s, n in zip(subjects, rows, strict=True)]
        programs = bench.compile(requests[0] | requests[1], *subjects)
        measured = [_until_it_fits(bench, s, programs, n, capacity, length) for s, n in zip(subjects, rows, strict=True)]
        speeds = [row["tokens_s"] for row in measured if row is not None]
        if len(speeds) == 2:
            bench.add(length=length, batch=batch, hybrid_over_all_mla=speeds[0] / speeds[1])


def _memory() -> int:
    """Bytes of the device; 0 where the backend does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def _largest_batch(bench: Bench, subject: Subject, capacity: int, held: int) -> int:
    """Rows whose cache fits beside the weights with 2% to spare; on a CPU one or two more than the common batch."""
    limit = _memory()
    if not limit:
        return bench.size.compare_rows + (2 if subject.name == "hybrid" else 1)
    row = cache_bytes(subject.config, 1, capacity, dtype=subject.shapes.dtype).total
    return max(1, int((0.98 * limit - held) // row))


def _until_it_fits(bench: Bench, subject: Subject, programs: dict[Any, Program], rows: int, capacity: int, length: int):
    """The row of a measurement; where the memory does not do, with a row of the batch less, down to three quarters. Or None."""
    least, limit = max(1, 3 * rows // 4), _memory()
    while not bench.over():
        (key,) = request = decode_request(subject, rows, capacity)
        program = programs.get(key) or bench.compile(request).get(key)
        if program is None:
            return None
        if not limit or program.needed <= limit:
            try:
                return measure_decode(bench, subject, program, rows, capacity, length)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    return bench.fail(f"{subject.name}, {rows} rows", error)
                bench.add(model=subject.name, rows=rows, too_large=str(error).splitlines()[0][:90])
        else:
            bench.add(model=subject.name, rows=rows, too_large=f"{program.needed / GB:.1f} of {limit / GB:.1f} GB")
        rows -= 1
        if rows < least or not bench.can_compile():
            break
    bench.skip(f"{subject.name}, {rows} rows")
    return None


def profile(bench: Bench) -> None:
    """The longest kernels, by the profiler, of the steps and the chunk compiled so far; alone, of one each. Last: it slows what follows."""
    size, subject = bench.size, bench.subject("hybrid")
    steps = {case: decode_request(subject, case[1], case[0] + size.room) for case in size.decode}
    capacity, start = size.long[-1] + size.room, size.long[0] - size.chunk
    piece = chunk_request(subject, capacity, size.chunk)
    if not any(key in bench.programs for request in (piece, *steps.values()) for key in request):
        bench.compile({**piece, **steps[size.decode[0]]}, subject)
    for (length, rows), (key,) in steps.items():
        if key not in bench.programs:
            continue
        if bench.left() < 0:
            bench.skip(f"profile of {rows} rows of {length}")
            continue
        decoder = Decoder(subject, bench.programs[key], rows, length + size.room, length)
        decoder.run(2)
        _kernels(bench, gpu_kernels(decoder.run, (1,)), what="step", length=length, rows=rows)
        decoder.free()
    (key,) = piece
    if key not in bench.programs:
        return
    if bench.left() < 0:
        return bench.skip("profile of a chunk")
    cache, tokens = filled_cache(subject, 1, capacity, start), np.ones((1, size.chunk), np.int32)

    def one() -> jax.Array:
        nonlocal cache
        cache, following = bench.programs[key].call(subject.weights, with_length(cache, start), tokens, np.array([size.chunk], np.int32))
        return following

    one()
    _kernels(bench, gpu_kernels(one, ()), what="chunk", length=size.long[0], rows=1)


def _kernels(bench: Bench, found: dict[str, float], **row: Any) -> None:
    total = sum(found.values())
    bench.add(**row, kernels=len(found), device_ms=total)
    for name, ms in sorted(found.items(), key=lambda item: -item[1])[:12]:
        bench.add(**row, kernel=name[:80], ms=ms, share=ms / max(total, 1e-9))
