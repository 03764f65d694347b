"""KDA on an NVIDIA H200: the table of shapes, gate regimes, byte floors and peers, and the errors against float64.

    python experiments/bench/kda.py                                  # all rows, about five minutes
    python experiments/bench/kda.py --kinds forward --shapes 96x8192 16x8192 --regimes production "slow channel"
    python experiments/bench/kda.py --stages --kinds                 # the kernels one by one, no rows
    python experiments/bench/kda.py --cpu-dry                        # the same program on tiny shapes with implementation="xla"

B = 1, K = V = 128, bfloat16, every fusion inside (gated_kda with raw gates, A_log, dt_bias). Columns, medians over repeats:
  ms     kernel time: a jit call holds `chain` layers (the output of one is v of the next, q, k and gates are each layer's own), calls
         are queued until >= 50 ms of work, one block at the end, divided by the layers. Rows "layers": every such call is blocked on
         by itself, so that dispatch and synchronisation count; its minimum and aim are the kernel time + 5% and + 2%.
  call   the same queue of calls that hold one layer each
  floor  bytes that must move (1282 a token and head forward, 2308 more backward: every operand and result once) at 4.3 TB/s
  peer   the fastest other implementation, measured in this run in its own process; a star marks a stored figure (kda_peers.py)
Input sets alternate and are larger than the 60 MB L2. Host clock throughout. Nothing is tuned or chosen at run time. After the table,
what the profiler says of one call of each shape: every kernel's own time, and so what is neither (the table's ms less their sum).
"""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from kda_peers import LOWER_BOUND, REGIMES, dt_bias, figure

from moejax.kernels.kda import gated_kda, kda, kda_implementation

FORWARD_BYTES, BACKWARD_BYTES, RATE = 1282, 2308, 4.3e12  # RATE: what a device-to-device copy reaches on an H200, reads plus writes
OPERANDS = ("q", "k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias")
TILE = 65536  # longer inputs repeat this many tokens: no generator is asked for more than 2^31 numbers


class Row(NamedTuple):
    kind: str  # "forward", "layers" (wall time of ten in a jit call), "both" (forward + backward)
    heads: int
    tokens: int
    minimum: float | None = None
    aim: float | None = None


ROWS = (
    Row("forward", 96, 8192, 1.0, 0.6),
    Row("layers", 96, 8192),
    Row("both", 96, 8192, 5.5, 3.0),
    Row("forward", 32, 65536, 2.9, 1.8),
    Row("both", 32, 65536, 14, 7),
    Row("forward", 16, 8192, 0.30, 0.15),
    Row("layers", 16, 8192),
    Row("forward", 4, 65536, 0.6, 0.35),
    Row("layers", 32, 8192),
    Row("forward", 32, 2**20, 60, 25),
)
DRY = {96: 3, 32: 2, 16: 2, 4: 1, 8192: 48, 65536: 64, 2**20: 80}  # sizes of the rehearsal


class Settings(NamedTuple):
    implementation: str
    channels: int
    dtype: Any
    chain: int
    chain_both: int
    min_ms: float
    repeats: int
    dry: bool


class Clock:
    """The budget: `left` seconds; what does not fit is left out, not cut off."""

    def __init__(self, seconds):
        self.end = time.perf_counter() + seconds

    @property
    def left(self):
        return self.end - time.perf_counter()


class Timer:
    """Median ms of a call. The first call of each function is kept apart: it compiles."""

    def __init__(self, min_ms, repeats):
        self.min_ms, self.repeats, self.first = min_ms, repeats, []

    def start(self, function, sets):
        begin = time.perf_counter()
        jax.block_until_ready(function(*sets[0]))
        self.first.append(time.perf_counter() - begin)
        for args in sets:
            jax.block_until_ready(function(*args))
        begin = time.perf_counter()
        jax.block_until_ready(function(*sets[0]))
        return max(1, math.ceil(self.min_ms / 1e3 / (time.perf_counter() - begin)))

    def queued(self, function, sets) -> float:
        n = max(self.start(function, sets), len(sets))
        spent = []
        for _ in range(self.repeats):
            begin, out = time.perf_counter(), None
            for i in range(n):
                out = function(*sets[i % len(sets)])
            jax.block_until_ready(out)
            spent.append((time.perf_counter() - begin) / n * 1e3)
        return statistics.median(spent)

    def blocked(self, function, args) -> float:
        """Each call is waited for: what a caller sees. After `queued`, so that nothing compiles."""
        spent, end = [], time.perf_counter() + 8 * self.min_ms / 1e3
        while len(spent) < 3 or time.perf_counter() < end:
            begin = time.perf_counter()
            jax.block_until_ready(function(*args))
            spent.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(spent)


def gpu_kernels(function, args, calls=3) -> dict[str, float]:
    """{kernel: ms a call} from the profiler's trace of the device's streams; empty where there is no such trace."""
    found: dict[str, float] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(calls):
                    jax.block_until_ready(function(*args))
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    for event in line.events if line.name.startswith("Stream") else ():
                        found[event.name] = found.get(event.name, 0.0) + event.duration_ns / 1e6 / calls
    except Exception as error:  # a measurement beside the others: the table goes on without it
        print(f"  profiler: {type(error).__name__}: {error}", file=sys.stderr)
    return found


def draw(key, tokens, heads, settings, wide=True):
    channels = (settings.channels,) if wide else ()
    short = jax.random.normal(key, (1, min(tokens, TILE), heads, *channels), settings.dtype)
    return short if tokens <= TILE else jnp.tile(short, (1, tokens // TILE, 1, *(1,) * len(channels)))


@functools.cache
def functions(implementation):
    """(layer, chain, the same with gradients), jitted once, so that a shape that comes back is not compiled again."""

    def layer(v, q, k, raw, logits, A_log, bias):
        return gated_kda(q, k, v, raw, logits, A_log, bias, lower_bound=LOWER_BOUND, implementation=implementation)[0]

    def chain(v, q, k, raw, logits, A_log, bias):
        for layer_inputs in zip(q, k, raw, logits, strict=True):
            v = layer(v, *layer_inputs, A_log, bias)
        return v

    def both(function):
        """Output and the gradients of every operand, cotangent d_o given."""

        def run(d_o, *args):
            o, pull = jax.vjp(function, *args)
            return o, pull(d_o)

        return run

    return tuple(map(jax.jit, (layer, chain, both(layer), both(chain))))


class Shape:
    """Inputs of one (H, T). The regimes differ in dt_bias alone."""

    def __init__(self, heads, tokens, settings, timer):
        self.heads, self.tokens, self.settings, self.timer = heads, tokens, settings, timer
        wide_bytes = tokens * heads * settings.channels * 2
        self.n = int(max(1, min(settings.chain, 24e9 // (4 * wide_bytes))))
        self.n_both = min(self.n, settings.chain_both)
        make = jax.jit(lambda key, wide: draw(key, tokens, heads, settings, wide), static_argnums=1)
        keys = iter(jax.random.split(jax.random.key(heads), 4 * self.n + 4))
        many = lambda n, wide=True: tuple(make(next(keys), wide) for _ in range(n))
        self.q, self.k, self.raw, self.logits = many(self.n), many(self.n), many(self.n), many(self.n, False)
        self.v = many(min(self.n, 2))
        self.A_log = 0.1 * jax.random.normal(next(keys), (heads,), jnp.float32)
        self.found: dict = {}

    def bias(self, regime):
        return jnp.asarray(dt_bias(regime, self.heads, self.settings.channels))

    def arguments(self, direction, regime):
        """(function of one layer, its input sets, function of n layers, its input sets, n)"""
        ends = (self.A_log, self.bias(regime))
        lead = (self.v[-1],) if direction == "both" else ()  # d_o
        layer, chain, layer_both, chain_both = functions(self.settings.implementation)
        one, many, n = (layer_both, chain_both, self.n_both) if direction == "both" else (layer, chain, self.n)
        inner = (self.q, self.k, self.raw, self.logits)
        single = [(*lead, self.v[i % len(self.v)], *(x[i] for x in inner), *ends) for i in range(min(n, 4))]
        chained = [(*lead, v, *(x[:n] for x in inner), *ends) for v in self.v]
        return one, single, many, chained, n

    def measure(self, direction, regime):
        """{"call", "kernel", "wall", "layers"}: ms a layer. Once a regime; the rows "forward" and "layers" share it."""
        if (direction, regime) not in self.found:
            one, single, many, chained, n = self.arguments(direction, regime)
            result = {"call": self.timer.queued(one, single), "layers": n, "wall": None}
            result["kernel"] = self.timer.queued(many, chained) / n if n > 1 else result["call"]
            if direction == "forward":
                result["wall"] = self.timer.blocked(many if n > 1 else one, (chained if n > 1 else single)[0]) / n
            self.found[direction, regime] = result
        return self.found[direction, regime]


# ---- accuracy ------------------------------------------------------------------------------------------------------------------


def accuracy_inputs(tokens, heads, channels) -> dict[str, np.ndarray]:
    """Operands rounded to bfloat16, held in float32; unit_q and unit_k are what a peer without the L2 norm gets."""
    rng = np.random.default_rng(0)
    rounded = lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32)
    wide = (1, tokens, heads, channels)
    stored = {name: rounded(rng.normal(size=wide)) for name in ("q", "k", "v", "raw_gate", "d_o")}
    stored["beta_logits"] = rounded(rng.normal(size=wide[:3]))
    stored["A_log"] = (0.1 * rng.normal(size=heads)).astype(np.float32)
    for name in ("q", "k"):
        x = stored[name].astype(np.float64)
        stored[f"unit_{name}"] = rounded(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6))
    return stored


@functools.cache
def with_gradients(implementation, fused):
    """A jitted function of (d_o, *operands) -> {"o", "state", "dq", ...}; one for all regimes."""
    options = {"lower_bound": LOWER_BOUND, "output_final_state": True, "implementation": implementation}

    def run(d_o, *args):
        function: Any = gated_kda if fused else kda
        (o, state), pull = jax.vjp(lambda *x: function(*x, **options), *args)
        names = OPERANDS if fused else ("q", "k", "v", "g", "beta")
        return {"o": o, "state": state} | {f"d{name}": x for name, x in zip(names, pull((d_o, jnp.zeros_like(state))), strict=True)}

    return jax.jit(run)


def relative(value, wanted) -> float:
    value, wanted = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm((value - wanted).ravel()) / np.linalg.norm(wanted.ravel()))


def exact(stored, regime, fused):
    """Float64 token recurrence on this machine's CPU, its gradients by JAX's own differentiation of it."""
    bias = dt_bias(regime, *stored["q"].shape[2:])
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        put = lambda x: jnp.asarray(np.asarray(x, np.float64))
        if fused:
            args = [put(bias if name == "dt_bias" else stored[name]) for name in OPERANDS]
        else:
            half = lambda x: 0.5 * (1 + np.tanh(0.5 * np.asarray(x, np.float64)))
            rate = np.exp(stored["A_log"].astype(np.float64))[:, None]
            gate = LOWER_BOUND * half(rate * (stored["raw_gate"].astype(np.float64) + bias))
            args = [put(x) for x in (stored["unit_q"], stored["unit_k"], stored["v"], gate, half(stored["beta_logits"]))]
        found = with_gradients("reference", fused)(put(stored["d_o"]), *args)
        return {name: np.asarray(x) for name, x in found.items()}


def accuracy(stored, regime, settings, peers):
    """[(who, {output: relative L2 error})]; peers: {"who:output": array} of this regime."""
    bias = dt_bias(regime, *stored["q"].shape[2:])
    low = lambda name: jnp.asarray(stored[name], settings.dtype)
    args = [jnp.asarray({"A_log": stored["A_log"], "dt_bias": bias}[x]) if x in ("A_log", "dt_bias") else low(x) for x in OPERANDS]
    ours = with_gradients(settings.implementation, True)(low("d_o"), *args)
    wanted = exact(stored, regime, True)
    rows = {"ours": {name: relative(x, wanted[name]) for name, x in ours.items()}}
    plain = exact(stored, regime, False) if any(name.startswith("cuDNN bare") for name in peers) else {}
    for label, value in peers.items():
        who, name = label.split(":")
        target = (plain if who == "cuDNN bare" else wanted)[name]
        rows.setdefault(who, {})[name] = relative(value, target.reshape(value.shape))
    return list(rows.items())


# ---- peers ---------------------------------------------------------------------------------------------------------------------


def run_peers(rows, regimes, stored, options, settings, seconds):
    """-> (measured rows, {regime: {"who:output": array}}, notes, versions), from a process of its own: kda_peers.py."""
    here = pathlib.Path(__file__).parent
    shapes = sorted({("both" if row.kind == "both" else "forward", row.heads, row.tokens) for row in rows if row.tokens < 2**20})
    with tempfile.TemporaryDirectory() as folder:
        place = lambda name: str(pathlib.Path(folder) / name)
        np.savez(place("inputs.npz"), **stored)
        spec = {
            "out": place("out.json"), "accuracy": place("inputs.npz"), "accuracy_out": place("outputs.npz"), "regimes": regimes,
            "shapes": shapes, "min_ms": settings.min_ms, "repeats": settings.repeats, "budget_seconds": seconds * 0.8,
            "fla": options.peers == "fla",
        }  # fmt: skip
        pathlib.Path(place("spec.json")).write_text(json.dumps(spec))
        environment = dict(os.environ)
        if options.peer_path:
            environment["PYTHONPATH"] = options.peer_path
        command = [options.peer_python, str(here / "kda_peers.py"), place("spec.json")]
        notes, outputs = [], {}
        try:
            done = subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True)
            text = done.stderr
            if done.returncode:
                notes.append(f"the peers' process ended with {done.returncode}: {text.strip().splitlines()[-1:]}")
        except subprocess.TimeoutExpired as error:
            text = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
            notes.append(f"the peers' process was stopped after {seconds:.0f} s")
        except OSError as error:
            text = str(error)
            notes.append(f"the peers' process did not start: {error}")
        result = {"rows": [], "notes": [], "versions": {}}
        with contextlib.suppress(OSError, ValueError):
            result = json.loads(pathlib.Path(place("out.json")).read_text())
        with contextlib.suppress(OSError, ValueError), np.load(place("outputs.npz")) as saved:
            for label in saved.files:
                regime, name = label.split("|")
                outputs.setdefault(regime, {})[name] = saved[label]
    if options.verbose and text:
        print(text[-6000:], file=sys.stderr)
    return result["rows"], outputs, result["notes"] + notes, result["versions"]


def best_peer(measured, direction, heads, tokens, regime):
    """(ms, "who" with a star where the figure is a stored one) or None. A peer measured now replaces its stored figure."""
    found = {name: (ms, name + "*") for name, ms in figure(direction, heads, tokens, regime).items()}
    for row in measured:
        if (row["kind"], row["heads"], row["tokens"], row["regime"]) == (direction, heads, tokens, regime):
            found[row["peer"]] = (row["ms"], row["peer"])
    return min(found.values()) if found else None


# ---- the program ---------------------------------------------------------------------------------------------------------------


def number(value, digits=3, width=8):
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def tokens_name(tokens):
    return f"{tokens // 2**20}M" if tokens % 2**20 == 0 else f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def fits(row, settings) -> str | None:
    """None, or why the row is left out: inputs, two outputs and a fifth for scratch must be free."""
    stats = jax.devices()[0].memory_stats() or {}
    wide = row.tokens * row.heads * settings.channels * 2
    need = 1.2 * wide * (4 + 2 + (6 if row.kind == "both" else 0))
    free = stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)
    return None if need <= free else f"needs {need / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"


def versions(settings):
    import importlib.metadata

    def version(name):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
        return "-"

    names = ("jax", "jaxlib", "triton", "jax-triton")
    driver = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(ask, capture_output=True, text=True, timeout=20).stdout.strip()
    return {name: version(name) for name in names} | {
        "python": platform.python_version(), "device": jax.devices()[0].device_kind, "driver": driver or "-",
        "implementation": settings.implementation, "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }  # fmt: skip


HEADER = (
    f"{'row':<28} {'gates':<13} {'ms':>8} {'call':>8} {'floor':>8} {'x floor':>8} {'peer':>8} {'who':<12} "
    f"{'x peer':>7} {'minimum':>8} {'aim':>7}  verdict"
)


def table_line(row, regime, found, floor, peer, dry):
    """Prints one line; returns it as a record."""
    layers = row.kind == "layers"
    ms: float = found["wall"] if layers else found["kernel"]
    minimum = found["kernel"] * 1.05 if layers else row.minimum
    aim = found["kernel"] * 1.02 if layers else row.aim
    names = {"forward": "forward", "both": "forward+backward", "layers": f"wall, a layer of {found['layers']}"}
    name = f"{names[row.kind]} H={row.heads} T={tokens_name(row.tokens)}"
    verdict = (
        "-" if minimum is None else "aim" if ms <= aim else "minimum" if ms <= minimum else f"misses by {100 * (ms / minimum - 1):.0f}%"
    )
    verdict = "rehearsal" if dry else verdict
    peer_ms, who = peer if peer else (None, "")
    print(
        f"{name:<28} {regime:<13} {number(ms)} {number(found['call'])} {number(floor)} {number(ms / floor, 2)} "
        f"{number(peer_ms)} {who:<12} {number(peer_ms and peer_ms / ms, 2, 7)} {number(minimum)} {number(aim, 3, 7)}  {verdict}",
        flush=True,
    )
    return row._asdict() | {
        "regime": regime, "ms": ms, "floor_ms": floor, "peer_ms": peer_ms, "peer": who, "verdict": verdict, **found,
    } | {"minimum": minimum, "aim": aim}  # fmt: skip


def print_table(records, rows, regimes, settings, timer, clock, measured, save):
    """Appends to records, and saves after every line: a crash of the GPU loses one row."""
    cached = {}
    print(HEADER)
    for row in rows:
        direction = "both" if row.kind == "both" else "forward"
        key = (row.heads, row.tokens)
        if key not in cached:
            cached.clear()  # the inputs of the shape before are given back
            why = fits(row, settings)
            if why or clock.left < 20 * (not settings.dry):
                print(f"{row.kind} H={row.heads} T={tokens_name(row.tokens)}: left out, {why or 'the budget is spent'}")
                continue
            cached[key] = Shape(*key, settings, timer)
        per_token = FORWARD_BYTES + (BACKWARD_BYTES if direction == "both" else 0)
        floor = row.heads * row.tokens * per_token * settings.channels / 128 / RATE * 1e3
        for regime in regimes:
            if clock.left < 10 * (not settings.dry):
                print(f"{row.kind} H={row.heads} T={tokens_name(row.tokens)}, {regime}: left out, the budget is spent")
                continue
            try:
                found = cached[key].measure(direction, regime)
            except Exception as error:  # out of memory, a kernel that does not launch: the other rows are still wanted
                lines = f"{type(error).__name__}: {error}".splitlines()
                print(f"{row.kind} H={row.heads} T={tokens_name(row.tokens)}, {regime}: FAILED, {lines[0][:200]}", flush=True)
                records.append(row._asdict() | {"regime": regime, "error": "\n".join(lines)[:4000]})
                break
            peer = best_peer(measured, direction, row.heads, row.tokens, regime)
            records.append(table_line(row, regime, found, floor, peer, settings.dry))
            save()


def print_profiles(records, settings, timer, clock):
    """Kernels of one call of each measured shape, longest first. Last of all: the profiler slows what runs after it."""
    profiles = []
    done = {("both" if x["kind"] == "both" else "forward", x["heads"], x["tokens"]): x for x in reversed(records) if "kernel" in x}
    for (direction, heads, tokens), record in reversed(done.items()):
        if clock.left < 15 * (not settings.dry) or tokens >= 2**20:
            continue
        one, single, *_ = Shape(heads, tokens, settings._replace(chain=1), timer).arguments(direction, record["regime"])
        jax.block_until_ready(one(*single[0]))
        found = dict(sorted(gpu_kernels(one, single[0]).items(), key=lambda item: -item[1]))
        total = sum(found.values())
        if found:
            print(f"{direction} H={heads} T={tokens_name(tokens)}, {record['regime']}: kernels {total:.3f} ms of {record['kernel']:.3f}")
            for name, ms in list(found.items())[:8]:
                print(f"  {ms:>8.3f}  {name[:100]}", flush=True)
        profiles.append({"direction": direction, "heads": heads, "tokens": tokens, "ms": total, "kernels": found})
    if not any(x["kernels"] for x in profiles):
        print("profiler: no kernels in its trace")
    return profiles


def print_stages(rows, settings, timer, clock, only):
    import kda_kernels

    kernels = kda_kernels.stand_in() if settings.dry else kda_kernels.kernels()
    records = []
    print(f"\n{'stage':<28} {'H':>4} {'T':>6} {'ms':>8} {'GB':>8} {'TB/s':>7} {'x bytes':>8}")
    for heads, tokens in dict.fromkeys((row.heads, row.tokens) for row in rows if row.tokens < 2**20):
        if clock.left < 20 * (not settings.dry):
            print(f"H={heads} T={tokens_name(tokens)}: left out, the budget is spent")
            continue
        shape = Shape(heads, tokens, settings._replace(chain=1), timer)
        operands = (shape.q[0], shape.k[0], shape.v[0], shape.raw[0], shape.logits[0], shape.A_log, shape.bias("production"))
        try:
            found = kda_kernels.time_stages(kernels, operands, LOWER_BOUND, timer.queued, only=only)
        except Exception as error:  # the arrays that all stages share could not be made
            print(f"H={heads} T={tokens_name(tokens)}: FAILED, {type(error).__name__}: {str(error)[:300]}")
            continue
        for name, ms, nbytes, error in found:
            lead = f"{name:<28} {heads:>4} {tokens_name(tokens):>6}"
            if ms is None:
                print(f"{lead} FAILED: {error}")
            else:
                print(f"{lead} {ms:>8.3f} {nbytes / 1e9:>8.3f} {nbytes / ms / 1e9:>7.2f} {ms / (nbytes / RATE * 1e3):>8.2f}", flush=True)
            records.append({"stage": name, "heads": heads, "tokens": tokens, "ms": ms, "bytes": nbytes, "error": error})
        shape = operands = None
    return records


def print_accuracy(stored, regimes, settings, clock, outputs):
    _, tokens, heads, _ = stored["q"].shape
    short = {"beta_logits": "dlogits", "raw_gate": "draw", "dt_bias": "dbias"}
    names = ["o", "state", *(f"d{name}" for name in OPERANDS)]
    print(f"\nrelative L2 error against the float64 token recurrence, T={tokens} H={heads} (bare peers: dg, dbeta of plain kda)")
    print(f"{'gates':<13} {'who':<11}" + "".join(f"{short.get(x[1:], x):>10}" for x in names))
    records = []
    for regime in regimes:
        if clock.left < 10 * (not settings.dry):
            print(f"{regime}: left out, the budget is spent")
            continue
        try:
            rows = accuracy(stored, regime, settings, outputs.get(regime, {}))
        except Exception as error:
            print(f"{regime}: FAILED, {type(error).__name__}: {str(error)[:300]}")
            continue
        for who, errors in rows:
            place = {
                "draw_gate": errors.get("draw_gate", errors.get("dg")),
                "dbeta_logits": errors.get("dbeta_logits", errors.get("dbeta")),
            }
            values = [place.get(name, errors.get(name)) for name in names]
            print(f"{regime:<13} {who:<11}" + "".join(f"{'-':>10}" if x is None else f"{x:>10.1e}" for x in values), flush=True)
            records.append({"regime": regime, "who": who, "errors": errors})
    return records


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=["forward", "layers", "both"], help="forward, layers, both; none: no table")
    parser.add_argument("--shapes", nargs="+", help="HxT as 96x8192; default: the rows of the table")
    parser.add_argument("--regimes", nargs="+", default=list(REGIMES), choices=list(REGIMES))
    parser.add_argument("--stages", nargs="*", metavar="STAGE", help="time the kernels alone; with names: those that contain one of them")
    parser.add_argument("--peers", choices=("auto", "none", "fla"), default="auto", help="fla: FLA's errors too, minutes of tuning")
    parser.add_argument("--peer-python", default=sys.executable, help="the Python that holds PyTorch and the peers")
    parser.add_argument("--peer-path", help="the peers' PYTHONPATH, instead of this process's")
    parser.add_argument("--implementation", choices=("triton", "xla"), help="default: what kda chooses here")
    parser.add_argument("--no-accuracy", action="store_true")
    parser.add_argument("--no-profile", action="store_true", help="no kernels by the profiler")
    parser.add_argument("--budget-seconds", type=float, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="PATH", help="every number, and the kernels of each profiled call")
    parser.add_argument("--cpu-dry", action="store_true", help="rehearsal without a GPU: tiny shapes, implementation='xla'")
    parser.add_argument("--verbose", action="store_true", help="what the peers' process wrote to stderr")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)
    # The million-token row holds 60 GB; the default is three quarters of the card. Read when the device is first used.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    clock, dry = Clock(options.budget_seconds), options.cpu_dry
    rows = [row for row in ROWS if row.kind in options.kinds and (not options.shapes or f"{row.heads}x{row.tokens}" in options.shapes)]
    wanted = rows or [row for row in ROWS if not options.shapes or f"{row.heads}x{row.tokens}" in options.shapes]
    if dry:
        small = lambda row: row._replace(heads=DRY[row.heads], tokens=DRY[row.tokens])
        rows, wanted = [small(row) for row in rows], [small(row) for row in wanted]
    channels = 16 if dry else 128
    settings = Settings("xla", channels, jnp.bfloat16, 2 if dry else 10, 1 if dry else 4, 0 if dry else 50, options.repeats, dry)
    stored = accuracy_inputs(48 if dry else 1024, 2 if dry else 4, channels)
    measured, outputs, notes, peer_versions = [], {}, [], {}
    if options.peers != "none":  # before this process takes the GPU's memory
        share = 0.45 if options.peers == "auto" else 0.8
        measured, outputs, notes, peer_versions = run_peers(rows, options.regimes, stored, options, settings, clock.left * share)
    if not dry:
        settings = settings._replace(implementation=options.implementation or kda_implementation())
    timer = Timer(settings.min_ms, settings.repeats)
    about = versions(settings)
    print(", ".join(f"{name} {value}" for name, value in about.items() if value))
    print("peers: " + (", ".join(f"{name} {value}" for name, value in peer_versions.items() if value) or "none in this run"))
    for note in notes:
        print(f"  {note}")
    if dry:
        print("REHEARSAL on tiny shapes without the kernels: no number below means anything")
    print(
        f"B=1, K=V={channels}, bfloat16; ms are medians of {settings.repeats}; floor: {FORWARD_BYTES} B a token and head forward, "
        f"{BACKWARD_BYTES} B backward, at {RATE / 1e12} TB/s; * = stored figure of an earlier run\n"
    )
    result = {"versions": about | {f"peer {name}": value for name, value in peer_versions.items()}, "peers": measured, "notes": notes}

    def save():
        if options.json:
            pathlib.Path(options.json).write_text(json.dumps(result, indent=1, default=str))

    if not options.no_accuracy:  # first: a wrong kernel need not be timed
        result["accuracy"] = print_accuracy(stored, options.regimes, settings, clock, outputs)
        print()
        save()
    result["rows"] = []
    if rows:
        print_table(result["rows"], rows, options.regimes, settings, timer, clock, measured, save)
    if options.stages is not None:
        if settings.implementation == "triton" or dry:
            result["stages"] = print_stages(wanted, settings, timer, clock, options.stages)
        else:
            print("stages: only implementation='triton' has kernels of its own")
    if not options.no_profile and result["rows"]:
        print()
        result["profiles"] = print_profiles(result["rows"], settings, timer, clock)
    if timer.first:
        result["longest_first_call_s"], result["first_calls_s"] = max(timer.first), sum(timer.first)
        print(f"\nfirst calls (tracing, compilation, one run): longest {max(timer.first):.1f} s, together {sum(timer.first):.1f} s")
    save()
    return result


if __name__ == "__main__":
    main()
