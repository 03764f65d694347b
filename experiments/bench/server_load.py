"""Load for the HTTP server: many streams at once for minutes, clients that go away, and what must hold meanwhile.

    python experiments/bench/server_load.py                                    # 64 clients, 10 minutes, the tiny model untrained
    python experiments/bench/server_load.py --seconds 60 --clients 16 -- --run runs/20260101-120000-tiny --slots 16

What follows `--` goes to experiments/serve.py, which is started, loaded and ended with SIGTERM. It fails (status 1) when an answer is an
error or breaks off, has another number of tokens than its usage says, when equal greedy prompts get different texts, when a slot is
not free at the end, or the server's exit status is not 0.

The first token's time is what a client sees, from its connection to the first event with a choice; with more clients than slots most of
it is the wait for a slot.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import pathlib
import random
import signal
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVED = ["--preset", "tiny", "--random-weights", "--slots", "16", "--capacity", "512", "--chunk", "128"]
PATIENCE = 300.0  # seconds without an event after which a stream counts as broken off
EQUAL = 8  # prompts that are sent again and again, greedy
GOES_AWAY = 0.15  # share of the requests whose client does not wait for the end


@dataclasses.dataclass
class Outcome:
    """What was seen of one request."""

    kind: str  # "whole", "left" (the client went away) or "error"
    tokens: int = 0
    first: float | None = None
    gaps: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    problem: str = ""


class Load:
    """The clients and what they found."""

    def __init__(self, port: int, model: str, most: int, seed: int):
        self.port, self.model, self.most, self.random = port, model, most, random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.tokens = 0
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.problems: list[str] = []
        self.equal = [self._ask(greedy=True) for _ in range(EQUAL)]
        self.texts: dict[int, str] = {}

    async def client(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            number = self.random.randrange(4 * EQUAL)
            ask = self.equal[number] if number < EQUAL else self._ask(greedy=self.random.random() < 0.3)
            leave = self.random.randrange(ask["max_tokens"]) if self.random.random() < GOES_AWAY else None
            try:
                outcome = await request(self.port, ask, leave)
            except Exception as error:  # any: the other clients go on, and it is reported
                outcome = Outcome("error", problem=f"{type(error).__name__}: {error}")
            self._count(outcome, number if number < EQUAL else None)

    def _ask(self, *, greedy: bool) -> dict:
        prompt, answer = self.random.randint(1, self.most // 2), self.random.randint(1, self.most // 3)
        ids = [self.random.randrange(256) for _ in range(prompt)]
        ask = {"model": self.model, "prompt": ids, "max_tokens": answer, "stream": True, "stream_options": {"include_usage": True}}
        drawn = {"temperature": 0} if greedy else {"temperature": 0.8, "top_p": 0.95, "seed": self.random.randrange(2**32)}
        return ask | drawn

    def _count(self, outcome: Outcome, number: int | None) -> None:
        self.counts[outcome.kind] += 1
        self.tokens += outcome.tokens
        self.gaps += outcome.gaps
        if outcome.first is not None:
            self.first.append(outcome.first)
        if number is not None and outcome.kind == "whole":
            self.counts["compared"] += 1
            if self.texts.setdefault(number, outcome.text) != outcome.text:
                outcome.problem = f"equal greedy prompts got {self.texts[number]!r} and {outcome.text!r}"
        if outcome.problem:
            self.problems.append(outcome.problem)


async def request(port: int, ask: dict, leave: int | None) -> Outcome:
    """One stream, read to its end, or left after `leave` events."""
    started = last = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    outcome, reason, usage, done = Outcome("whole"), None, None, False
    try:
        data = json.dumps(ask).encode()
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: load\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        if leave == 0:
            return dataclasses.replace(outcome, kind="left")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
        if not head.startswith(b"HTTP/1.1 200"):
            return Outcome("error", problem=head.split(b"\r\n")[0].decode())
        async for event in events(reader):
            if event == "[DONE]":
                done = True
                break
            now = time.monotonic()
            if "error" in event:
                return Outcome("error", problem=json.dumps(event["error"]))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                outcome.text += choice["text"]
                reason = choice["finish_reason"] or reason
                if outcome.first is None:
                    outcome.first = now - started
                else:
                    outcome.gaps.append(now - last)
                last, outcome.tokens = now, outcome.tokens + 1
            if leave is not None and outcome.tokens >= leave:
                return dataclasses.replace(outcome, kind="left")
    finally:
        writer.close()
    return _checked(outcome, ask, reason, usage, done)


def _checked(outcome: Outcome, ask: dict, reason: str | None, usage: dict | None, done: bool) -> Outcome:
    if not done or usage is None or reason not in ("stop", "length"):
        return Outcome("error", problem=f"a stream broke off: finish_reason {reason}, usage {usage}, [DONE] {done}")
    outcome.tokens = usage["completion_tokens"]
    expected = ask["max_tokens"] if reason == "length" else outcome.tokens
    if outcome.tokens != expected or usage["prompt_tokens"] != len(ask["prompt"]):
        outcome.problem = f"usage {usage} for {len(ask['prompt'])} prompt tokens and max_tokens {ask['max_tokens']}, {reason}"
    return outcome


async def events(reader: asyncio.StreamReader):
    """The events of a body in chunks: objects and "[DONE]"."""
    rest = b""
    while size := int(await asyncio.wait_for(reader.readline(), PATIENCE), 16):
        rest += (await asyncio.wait_for(reader.readexactly(size + 2), PATIENCE))[:-2]
        *whole, rest = rest.split(b"\n\n")
        for event in whole:
            text = event.removeprefix(b"data: ").decode()
            yield text if text == "[DONE]" else json.loads(text)


def memory(pid: int) -> float:
    """Resident MB."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def health(port: int) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
        return json.load(answer)


async def run(load: Load, pid: int, clients: int, seconds: float) -> list[tuple[float, float]]:
    """-> [(second, resident MB)]."""
    started = time.monotonic()
    tasks = [asyncio.create_task(load.client(started + seconds)) for _ in range(clients)]
    resident, shown = [(0.0, memory(pid))], started
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.5)
        now = time.monotonic()
        resident.append((now - started, memory(pid)))
        if now - shown > 30:
            shown = now
            print(f"{now - started:5.0f} s  {dict(load.counts)}  {len(load.problems)} problems  {resident[-1][1]:.0f} MB", flush=True)
    await asyncio.gather(*tasks)
    return resident


def percentile(values: list[float], share: float) -> float | None:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None


def summary(load: Load, resident: list[tuple[float, float]], seconds: float) -> dict:
    def median_between(begin: float, end: float) -> float:
        last = resident[-1][0]
        return percentile([mb for at, mb in resident if begin * last <= at <= end * last], 0.5) or 0.0

    times = {"first_token": load.first, "between_events": load.gaps}
    return {
        "requests": dict(load.counts),
        "problems": load.problems[:20],
        "problem_count": len(load.problems),
        "seconds": seconds,
        "tokens_per_second": load.tokens / seconds,
        **{f"{name}_{p}_s": percentile(values, share) for name, values in times.items() for p, share in (("p50", 0.5), ("p95", 0.95))},
        # A tenth of the time each; the first tenth has the caches filling.
        "resident_mb": {
            "begin": resident[0][1],
            **{f"{begin}-{end}": median_between(begin, end) for begin, end in ((0.1, 0.2), (0.45, 0.55), (0.9, 1.0))},
            "largest": max(mb for _, mb in resident),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--longest", type=int, default=192, help="prompts have up to half as many tokens, answers a third")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("server_load.json"))
    parser.add_argument("served", nargs="*", help="arguments of experiments/serve.py, after --")
    given = parser.parse_args()
    command = [sys.executable, str(ROOT / "experiments" / "serve.py"), *(given.served or SERVED), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        if not line.startswith("serving "):
            print("error: the server did not start", file=sys.stderr)
            return 2
        _, name, _, url = line.split()
        port = int(url.rsplit(":", 1)[1])
        load = Load(port, name, given.longest, given.seed)
        started = time.monotonic()
        resident = asyncio.run(run(load, server.pid, given.clients, given.seconds))
        result = summary(load, resident, time.monotonic() - started)
        deadline = time.monotonic() + 30  # what left last is dropped at the engine's next step
        while ((state := health(port))["busy"] or state["queued"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        server.send_signal(signal.SIGTERM)
        result |= {"clients": given.clients, "served": given.served or SERVED, "end": state, "exit_status": server.wait(60)}
    finally:
        server.kill()
        server.wait()
    given.out.write_text(json.dumps(result, indent=2) + "\n")
    for key, value in result.items():
        print(f"{key:<24}{value:.4g}" if isinstance(value, float) else f"{key:<24}{value}")
    good = not load.problems and load.counts["whole"] and state["busy"] == state["queued"] == 0 and result["exit_status"] == 0
    print("ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
