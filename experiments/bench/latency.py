"""Latency of inference: time to the first token, decoding against its floor of bytes, the hybrid against an all-MLA model.

    python experiments/bench/latency.py --plan 1 --out latency.jsonl             # decoding; one H200, 300M parameters, at most 500 s
    python experiments/bench/latency.py --plan 2 --out latency.jsonl             # prefilling and the rest, as long
    python experiments/bench/latency.py --sections decode --decode 8192x256      # one section, one case
    python experiments/bench/latency.py --size tiny                              # the same program in two minutes on a CPU

Sections, in the order in which they run; a section begins when at least 60% of its seconds (--seconds) are left of --budget,
and what it compiled is measured up to 45 s beyond them:
  decode    plan 1  ms a step at 8K ... 1M tokens with many rows, then with one; "waited": the host reads every step's tokens
  compare   plan 1  hybrid and all-MLA at 1M: cache bytes, tokens/s at the same batch and at the largest that fits
  first     plan 2  time to the first token of the hybrid: p50 and p95 of 20 prompts up to 64K, median of 3 up to 1M (as time goes)
  kda       plan 1  time a token of the KDA layers over 64K and over 1M: one layer alone, and a model that has no other mixer
  stable    plan 1  tokens/s over windows of one long answer
  check     plan 2  prefill in chunks of 1, 7, 64, 1000 + decoding against one full forward: bfloat16 1e-2 of the largest logit,
                    float32 1e-5; beside it how far bfloat16 is from float32, which is 2e-2 for a full forward of 4 layers too
  mla       plan 2  time to the first token of the all-MLA model; 1M is estimated from 128K and 256K
  scan      plan 2  many steps in one program against one call a step, one row
  profile   both    the longest kernels of the steps and chunks that the plan compiled

Most of the time is compiling: a step of 16 layers is 500 to 700 kernels, and XLA times the forms of each product ("Delay kernel timed out"
comes from that and is harmless). Programs are kept in a folder of the temporary directory, so a second call is faster; XLA_FLAGS=
--xla_gpu_autotune_level=2 leaves out the checks of that timing and =0 all of it, at the price of slower products.
Leave XLA_PYTHON_CLIENT_PREALLOCATE as it is: one layer's latents of the largest batch are 28 GB, for which memory that grew had no room.
Models: random weights in bfloat16, KDA states in float32. Before decoding, caches are filled with random numbers, not by a prefill.
Every row is printed and written as soon as it is measured. Floors count each weight, state and latent once at 4.3 TB/s (latency_floor.py).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence

if __name__ == "__main__":  # before jax is imported
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")  # the largest batches need it
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(tempfile.gettempdir()) / "moejax-latency"))

import jax
from latency_bench import Bench
from latency_decode import compare, decode, profile, scan, stable
from latency_prefill import check, first_token, kda
from latency_subject import PATTERNS, SIZES

from moejax.counting import count_parameters

SECTIONS = {
    "decode": decode,
    "compare": compare,
    "first": lambda bench: first_token(bench, "hybrid"),
    "kda": kda,
    "stable": stable,
    "check": check,
    "mla": lambda bench: first_token(bench, "all-MLA"),
    "scan": scan,
    "profile": profile,
}
PLANS = {
    1: ("decode", "compare", "kda", "stable", "profile"),
    2: ("first", "check", "mla", "scan", "profile"),
}
SECONDS = {"decode": 210, "compare": 130, "first": 190, "kda": 70, "stable": 50, "check": 80, "mla": 110, "scan": 50, "profile": 30}
ENOUGH = 0.6  # share of a section's seconds without which it does not begin: nothing is left half measured


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="full")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    which.add_argument("--plan", type=int, choices=PLANS, help="the sections of one of two calls")
    parser.add_argument("--budget", type=float, default=500, help="seconds of everything; sections that begin later are left out")
    parser.add_argument("--seconds", nargs="*", default=[], type=_seconds, metavar="SECTION=N", help=f"budget of a section; {SECONDS}")
    parser.add_argument("--decode", nargs="+", type=_case, metavar="LENGTHxBATCH", help="instead of the cases of `decode`")
    parser.add_argument("--out", type=pathlib.Path, help="rows are appended to this file, one JSON object a line")
    return parser.parse_args(arguments)


def _case(text: str) -> tuple[int, int]:
    try:
        length, rows = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; a case is LENGTHxBATCH, as 8192x256.") from None
    return length, rows


def _seconds(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    if name not in SECTIONS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}; it must be SECTION=N with a section of {', '.join(SECTIONS)}.")
    return name, float(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """-> the exit status: 1 when a section failed."""
    began, options = time.perf_counter(), parse(arguments)
    size, seconds = SIZES[options.size], SECONDS | dict(options.seconds)
    if options.decode is not None:
        size = size._replace(decode=tuple(options.decode))
    bench = Bench(size, options.out)
    bench.begin("setting", float("inf"))
    flags = os.environ.get("XLA_FLAGS", "")
    bench.add(device=jax.devices()[0].device_kind, jax=jax.__version__, size=options.size, chunk=size.chunk, xla_flags=flags)
    for name, pattern in PATTERNS.items():
        counts = count_parameters(size.config.replace(pattern=pattern))
        bench.add(model=name, pattern=pattern, parameters=counts.total, active=counts.active)
    wanted = options.sections if options.plan is None else PLANS[options.plan]
    for name in (name for name in SECTIONS if name in wanted):
        left = options.budget - (time.perf_counter() - began)
        bench.begin(name, min(seconds[name], left))
        if seconds[name] <= 0 or left < ENOUGH * seconds[name]:
            bench.skip("the section")
            continue
        start = time.perf_counter()
        try:
            SECTIONS[name](bench)
        except Exception as error:  # the other sections are worth having
            traceback.print_exc()
            bench.fail("the section", error)
        bench.add(took_s=time.perf_counter() - start)
    print_table(bench.rows)
    return 1 if any("failed" in row for row in bench.rows) else 0


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
    if "from_float32" in row:
        what = f"{row['dtype']}, chunks of {row['chunk']}, from float32"
        yield what, f"{row['from_float32']:.1e}", f"full forward in {row['dtype']}: {row['full_from_float32']:.1e}"
    if "ratio" in row:
        what = f"{model} {row['length']} x {row['rows']}" + (f", {row['steps_a_call']} a call" if row["steps_a_call"] > 1 else "")
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
