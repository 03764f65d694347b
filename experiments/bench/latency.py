"""Latency of inference: time to the first token, decoding against its floor of bytes, the hybrid against an all-MLA model.

    python experiments/bench/latency.py --out latency.jsonl                      # one H200, 300M parameters, under ten minutes
    python experiments/bench/latency.py --sections decode --decode 8192x256      # one section, one case
    python experiments/bench/latency.py --size tiny                              # the same program in a minute on a CPU

Sections, in the order in which they run:
  check     prefill in chunks of 1, 7, 64, 1000 + decoding against one full forward: bfloat16 within 1e-2 of the largest logit, float32 1e-5
  decode    ms a step at 8K ... 1M tokens and several batches; "waited": the host reads every step's tokens before the next
  compare   hybrid and all-MLA at 1M: cache bytes, tokens/s at the same batch and at the largest that fits
  stable    tokens/s over windows of one long answer
  first     time to the first token of the hybrid: p50 and p95 of 20 prompts up to 64K, median of 3 beyond (as far as time goes)
  kda       time a token of the KDA layers over 64K and over 1M: one layer alone, and a model that has no other mixer
  mla       time to the first token of the all-MLA model; 1M is estimated from 128K and 256K
  scan      many steps in one program against one call a step
  profile   the longest kernels of a step and of a chunk

Models: random weights in bfloat16, KDA states in float32. Before decoding, caches are filled with random numbers, not by a prefill.
Every row is printed and written as soon as it is measured. Floors count each weight, state and latent once at 4.3 TB/s (latency_floor.py).
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # before jax; the largest batches need it

import argparse
import pathlib
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

import jax
from latency_bench import Bench
from latency_decode import compare, decode, profile, scan, stable
from latency_prefill import check, first_token, kda
from latency_subject import PATTERNS, SIZES, Size

from moejax.counting import count_parameters

SECTIONS = {
    "check": check,
    "decode": decode,
    "compare": compare,
    "stable": stable,
    "first": lambda bench: first_token(bench, "hybrid"),
    "kda": kda,
    "mla": lambda bench: first_token(bench, "all-MLA"),
    "scan": scan,
    "profile": profile,
}
SECONDS = {"check": 90, "decode": 120, "compare": 100, "stable": 30, "first": 120, "kda": 40, "mla": 60, "scan": 40, "profile": 60}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[name for name in SECTIONS if name != "profile"])
    parser.add_argument("--budget", type=float, default=520, help="seconds of everything; sections that begin later are left out")
    parser.add_argument("--seconds", nargs="*", default=[], metavar="SECTION=N", help=f"budget of a section; {SECONDS}")
    parser.add_argument("--chunk", type=int, help="tokens of a chunk of a prefill")
    parser.add_argument("--longest", type=int, help="tokens of the longest context of `first`, a power of two; default 1M")
    parser.add_argument("--decode", nargs="+", metavar="LENGTHxBATCH", help="instead of the cases of `decode` and `profile`")
    parser.add_argument("--scan-steps", type=int, default=32, help="steps of a program of `scan`")
    parser.add_argument("--state-dtype", choices=("float32", "bfloat16"), default="float32", help="storage of the KDA states")
    parser.add_argument("--out", type=pathlib.Path, help="rows are appended to this file, one JSON object a line")
    return parser.parse_args(arguments)


def sized(options: argparse.Namespace) -> Size:
    """The sizes with what the command line changes. ValueError for a case that is none."""
    size: Size = SIZES[options.size]
    if options.chunk is not None:
        size = size._replace(chunk=options.chunk)
    if options.longest is not None:
        size = size._replace(long=tuple(mark for mark in size.long if mark <= options.longest))
    if not size.long:
        raise ValueError(f"--longest is {options.longest}; it must be at least {SIZES[options.size].long[0]}.")
    if size.chunk < 1 or any(mark % min(size.chunk, mark) for mark in (*size.prompts, *size.long)):
        raise ValueError(f"--chunk is {size.chunk}; it must divide every longer prompt: a power of two.")
    if options.decode is not None:
        try:
            cases = [tuple(map(int, case.split("x"))) for case in options.decode]
            size = size._replace(decode=tuple((length, (rows,)) for length, rows in cases))
        except ValueError:
            raise ValueError(f"--decode is {options.decode}; a case is LENGTHxBATCH, as 8192x256.") from None
    return size


def budgets(options: argparse.Namespace) -> dict[str, float]:
    found: dict[str, float] = dict(SECONDS)
    for text in options.seconds:
        name, _, number = text.partition("=")
        if name not in SECTIONS or not number.replace(".", "", 1).isdigit():
            raise ValueError(f"--seconds has {text!r}; it must be SECTION=N with a section of {', '.join(SECTIONS)}.")
        found[name] = float(number)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the exit status: 1 when a section failed, 2 for bad arguments."""
    began, options = time.perf_counter(), parse(arguments)
    try:
        size, seconds = sized(options), budgets(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bench, failed = Bench(size, options.state_dtype, options.scan_steps, options.out), []
    bench.begin("setting", float("inf"))
    bench.add(device=jax.devices()[0].device_kind, jax=jax.__version__, size=options.size, chunk=size.chunk, state=options.state_dtype,
              xla_flags=os.environ.get("XLA_FLAGS", ""))  # fmt: skip
    for name, pattern in PATTERNS.items():
        counts = count_parameters(size.config.replace(pattern=pattern))
        bench.add(model=name, pattern=pattern, parameters=counts.total, active=counts.active)
    for name in (name for name in SECTIONS if name in options.sections):
        left = options.budget - (time.perf_counter() - began)
        bench.begin(name, min(seconds[name], left))
        if bench.left() <= 0:
            bench.skip("the section")
            continue
        start = time.perf_counter()
        try:
            SECTIONS[name](bench)
        except Exception as error:  # the other sections are worth having
            traceback.print_exc()
            bench.add(failed=f"{type(error).__name__}: {str(error)[:200]}")
            failed.append(name)
        bench.add(took_s=time.perf_counter() - start)
    print_table(bench.rows)
    return 1 if failed else 0


def print_table(rows: list[dict]) -> None:
    """What was measured against what was wanted, in few lines."""
    print("\nsection   what                                            measured      wanted")
    for row in rows:
        for what, value, wanted in _verdicts(row):
            print(f"{row['section']:10}{what:47} {value:13} {wanted}")


def _verdicts(row: dict) -> Iterator[tuple[str, str, str]]:
    """(what, measured, wanted) of a row; nothing for a row that only tells."""
    model, speed = row.get("model", ""), f"{row['tokens_s']:,.0f} tokens/s" if isinstance(row.get("tokens_s"), float) else ""
    first = f"{model} first token of {row.get('prompt')}"
    if "error" in row:
        yield f"{row['dtype']}, chunks of {row['chunk']}", f"{row['error']:.1e}", f"<= {row['bound']:g}"
    if "ratio" in row:
        what = f"{model} {row['length']} x {row['rows']}" + (f", {row['steps_a_call']} a call" if "steps_a_call" in row else "")
        yield what, f"{row['ratio']:.2f} floors", f"<= 1.5; {row['ms']:.3f} ms, waited {row['waited_ms']:.3f}, {speed}"
    if "hybrid_gb" in row:
        yield "cache, hybrid of all-MLA", f"{row['share']:.1%}", "<= 27%"
    if "hybrid_over_all_mla" in row:
        wanted = 2.2 if row["batch"] == "same" else 3.5
        yield f"tokens/s, hybrid over all-MLA, {row['batch']} batch", f"{row['hybrid_over_all_mla']:.2f}", f">= {wanted}"
    if "last_over_first" in row:
        what = f"tokens/s, last window over first of {row['decoded']}"
        yield what, f"{row['last_over_first']:.3f}", f"of the floor {row['floor_last_over_first']:.3f}"
    if "long_over_short" in row:
        yield f"{row['what']}, longest over 64K", f"{row['long_over_short']:.2f}", "<= 1.3"
    if "p50_ms" in row:
        yield first, f"{row['p50_ms']:.1f} ms", f"p95 {row['p95_ms']:.1f}, {speed}"
    if "median_ms" in row:
        yield first, f"{row['median_ms']:.0f} ms", f"median of {row['runs']}, {speed}"
    if "estimate_ms" in row:
        yield first, f"{row['estimate_ms']:.0f} ms", f"an ESTIMATE from {row['estimated_from']}"
    for key in ("left_out", "failed"):
        if key in row:
            yield key.replace("_", " "), "", row[key]


if __name__ == "__main__":
    sys.exit(main())
