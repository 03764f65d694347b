"""KDA of other packages on this GPU, in a process of their own (PyTorch): called by kda.py, which prints what comes back.

    python3 experiments/bench/kda_peers.py SPEC.json        # writes SPEC's "out" after every row, so that a crash loses one row

Peers: nvidia-cudnn-frontend (`cudnn.linear_attention.ops`): the forward pass with every fusion inside, and forward + backward
"bare", because its backward pass takes neither raw gates nor the L2 norm nor beta's logits; fla-core, errors only and only when
asked for (its first call tunes for minutes). A CUDA graph holds `calls` launches over input sets that alternate; the clock is the
host's, around a queue of replays, as in kda.py.

This file imports nothing but the standard library and NumPy at the top: kda.py takes the gates' regimes and the figures from it.
Shapes: T tokens, H heads, K = V = 128; B = 1, so cuDNN's packed [T,H,K] is [1,T,H,K] without its first axis.
"""

import json
import os
import pathlib
import shutil
import statistics
import sys
import time
import traceback

import numpy as np

LOWER_BOUND = -5.0
# The regimes differ in dt_bias alone (raw gates are N(0,1), A_log is N(0,0.1)): same inputs, same compiled code.
REGIMES = {"production": 0.0, "near 0": -8.0, "saturated": 8.0, "slow channel": 0.0}
SLOW = -16.0  # g = -6e-7: one channel a head that keeps over a third of its state after a million tokens

# ms on one H200 (its design page's table): used, and marked, where a peer does not run here. A list is one figure a regime.
FIGURES = {
    ("forward", 96, 8192): {"cuDNN": [1.494, 2.867, None, 2.803], "FlashKDA": [1.489] * 4, "FLA": [3.43] * 4},
    ("forward", 32, 8192): {"cuDNN": [0.549, 2.776, None, 2.682], "FlashKDA": [1.077] * 4},
    ("forward", 32, 65536): {"cuDNN": [2.51, 19.2, None, 19.3], "FlashKDA": [8.164] * 4},
    ("forward", 16, 8192): {"cuDNN": [0.378, 2.62, None, 2.62]},
    ("both", 96, 8192): {"cuDNN bare": [5.69, 6.10, None, None], "FLA": [13.1] * 4},
    ("both", 32, 65536): {"cuDNN bare": [12.3, 23.8, None, None]},
}


def dt_bias(regime: str, heads: int, channels: int) -> np.ndarray:
    bias = np.full((heads, channels), REGIMES[regime], np.float32)
    if regime == "slow channel":
        bias[:, 0] = SLOW
    return bias


def figure(kind: str, heads: int, tokens: int, regime: str) -> dict[str, float]:
    stored = FIGURES.get((kind, heads, tokens), {})
    column = list(REGIMES).index(regime)
    return {name: values[column] for name, values in stored.items() if values[column] is not None}


class Inputs:
    """One input set on the GPU. raw, logits, A_log, bias belong to the fused call; g, beta to the bare one."""

    def __init__(self, torch, tokens, heads, seed, fused, channels=128):
        make = torch.Generator(device="cuda").manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=make, device="cuda", dtype=torch.bfloat16)
        wide = (tokens, heads, channels)
        self.q, self.k, self.v = draw(*wide), draw(*wide), draw(*wide)
        if not fused:
            unit = torch.nn.functional.normalize
            self.q, self.k = unit(self.q.float(), dim=-1).bfloat16(), unit(self.k.float(), dim=-1).bfloat16()
        self.raw = draw(*wide).float()  # the kernels read fp32: what a model would hand over costs it no conversion
        self.logits = draw(tokens, heads).float()
        self.beta = torch.sigmoid(self.logits)
        self.A_log = 0.1 * torch.randn(heads, generator=make, device="cuda")
        self.bias = torch.zeros(heads, channels, device="cuda")
        self.g = None if fused else torch.empty_like(self.raw)
        self.d_o = None if fused else draw(*wide)
        self.cu = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")

    def set_regime(self, torch, regime):
        """In place: a captured graph reads the same addresses."""
        self.bias.copy_(torch.from_numpy(dt_bias(regime, *self.bias.shape)))
        if self.g is not None:
            self.g.copy_(LOWER_BOUND * torch.sigmoid(self.A_log.exp()[:, None] * (self.raw + self.bias)))


def cudnn_forward(ops, x):
    return ops.kimi_delta_attention(
        x.q, x.k, x.v, x.raw, x.logits, x.cu, output_final_state=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        safe_gate=True, gate_lower_bound=LOWER_BOUND, a_log=x.A_log, dt_bias=x.bias,
    )  # fmt: skip


def cudnn_both(torch, ops, x):
    """Forward and backward without the fusions, by the two operators that its autograd calls. -> o, (dq, dk, dv, dg, dbeta, ...)"""
    o, _ = ops.kimi_delta_attention(x.q, x.k, x.v, x.g, x.beta, x.cu)
    scale = x.q.shape[-1] ** -0.5
    return o, torch.ops.cudnn.kimi_delta_attention_bwd(x.d_o, x.q, x.k, x.v, x.g, x.beta, x.cu, scale)


def fla_forward(chunk_kda, x):
    o, state = chunk_kda(
        q=x.q[None], k=x.k[None], v=x.v[None], g=x.raw[None].bfloat16(), beta=x.logits[None].bfloat16(), A_log=x.A_log,
        dt_bias=x.bias.reshape(-1), output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, safe_gate=True, lower_bound=LOWER_BOUND,
    )  # fmt: skip
    return o[0], state[0]


def captured(torch, call, sets, calls):
    """A CUDA graph of `calls` launches; two eager rounds first (compilation, workspaces)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in [*sets, *sets]:
            call(x)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(sets[i % len(sets)])
    return graph


def timed(torch, graph, calls, min_ms, repeats):
    """(median ms a call by the host's clock around a queue of replays, the same by CUDA events)"""
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    n = max(1, int(min_ms / 1e3 / (time.perf_counter() - start)) + 1)
    host, events = [], []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start = time.perf_counter()
        begin.record()
        for _ in range(n):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        host.append((time.perf_counter() - start) * 1e3 / n / calls)
        events.append(begin.elapsed_time(end) / n / calls)
    return statistics.median(host), statistics.median(events)


def time_row(torch, ops, spec, kind, heads, tokens):
    """-> rows of one shape, a regime each."""
    fused = kind == "forward"
    call = (lambda x: cudnn_forward(ops, x)) if fused else (lambda x: cudnn_both(torch, ops, x))
    calls = 10 if tokens * heads <= 2**20 else 4
    sets = [Inputs(torch, tokens, heads, seed, fused) for seed in range(2)]
    for x in sets:
        x.set_regime(torch, "production")
    graph = captured(torch, call, sets, calls)
    rows = []
    for regime in spec["regimes"]:
        for x in sets:
            x.set_regime(torch, regime)
        host, events = timed(torch, graph, calls, spec["min_ms"], spec["repeats"])
        name = "cuDNN" if fused else "cuDNN bare"
        rows.append({"peer": name, "kind": kind, "heads": heads, "tokens": tokens, "regime": regime, "ms": host, "events_ms": events})
    return rows


def loaded(torch, stored, regime, fused):
    """The inputs of the accuracy check that kda.py wrote, as an Inputs."""
    x = Inputs.__new__(Inputs)
    place = lambda name, dtype: torch.from_numpy(stored[name][0] if stored[name].ndim > 2 else stored[name]).to("cuda", dtype)
    x.q, x.k = (place(name if fused else f"unit_{name}", torch.bfloat16) for name in ("q", "k"))
    x.v, x.d_o = place("v", torch.bfloat16), place("d_o", torch.bfloat16)
    x.raw, x.logits, x.A_log = (place(name, torch.float32) for name in ("raw_gate", "beta_logits", "A_log"))
    x.beta = torch.sigmoid(x.logits)
    x.bias = torch.from_numpy(dt_bias(regime, *x.raw.shape[1:])).cuda()
    x.g = LOWER_BOUND * torch.sigmoid(x.A_log.exp()[:, None] * (x.raw + x.bias))
    x.cu = torch.tensor([0, x.q.shape[0]], dtype=torch.int32, device="cuda")
    return x


def outputs(torch, ops, chunk_kda, stored, regime):
    """{peer:name of output: array in moejax's layout, without the batch axis}"""
    found = {}
    host = lambda x: x.float().cpu().numpy()
    if ops is not None:
        o, state = cudnn_forward(ops, loaded(torch, stored, regime, True))
        found["cuDNN:o"], found["cuDNN:state"] = host(o), host(state[0]).swapaxes(-1, -2)
        _, gradients = cudnn_both(torch, ops, loaded(torch, stored, regime, False))
        for name, x in zip(("dq", "dk", "dv", "dg", "dbeta"), gradients, strict=False):
            found[f"cuDNN bare:{name}"] = host(x)
    if chunk_kda is not None:
        o, state = fla_forward(chunk_kda, loaded(torch, stored, regime, True))
        found["FLA:o"], found["FLA:state"] = host(o), host(state)
    return found


def set_cuda_home():
    """cuDNN's kernels are compiled at the first call, from headers of which PyTorch's wheels hold only some (no crt/mma.h)."""
    compiler = shutil.which("nvcc")
    places = [pathlib.Path("/usr/local/cuda")] + ([pathlib.Path(compiler).resolve().parents[1]] if compiler else [])
    for place in places:
        if "CUDA_HOME" not in os.environ and (place / "include" / "crt" / "mma.h").is_file():
            os.environ["CUDA_HOME"] = str(place)


def version(name):
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(path):
    started = time.perf_counter()
    spec = json.loads(pathlib.Path(path).read_text())
    result = {"rows": [], "notes": [], "versions": {}, "errors_for": []}

    def save():
        pathlib.Path(spec["out"]).write_text(json.dumps(result))

    def attempt(what, call):
        """What fails is noted and the rest goes on."""
        try:
            return call()
        except Exception as error:
            traceback.print_exc()
            result["notes"].append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:240])
            save()
            return None

    def import_torch():
        import torch  # pyright: ignore[reportMissingImports]

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU")
        return torch

    def import_cudnn():
        set_cuda_home()
        from cudnn.linear_attention import ops  # pyright: ignore[reportMissingImports]

        return ops

    def import_fla():
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

        return chunk_kda

    torch = attempt("torch", import_torch)
    if torch is None:
        return
    torch.set_grad_enabled(False)
    ops = attempt("cuDNN", import_cudnn)
    names = ("torch", "triton", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13", "fla-core")
    result["versions"] = {name: version(name) for name in names}
    save()
    if spec.get("accuracy"):  # first: it is short, and a peer that is wrong need not be timed
        stored = dict(np.load(spec["accuracy"]))
        found = {}
        for regime in spec["regimes"]:
            if ops is not None:
                got = attempt(f"cuDNN, outputs, {regime}", lambda regime=regime: outputs(torch, ops, None, stored, regime)) or {}
                found |= {f"{regime}|{name}": x for name, x in got.items()}
        np.savez(spec["accuracy_out"], **found)
    for kind, heads, tokens in spec["shapes"] if ops is not None else ():
        if time.perf_counter() - started > spec["budget_seconds"]:
            result["notes"].append(f"{kind} H={heads} T={tokens}: no time left")
            continue
        label = f"cuDNN {kind} H={heads} T={tokens}"
        result["rows"] += attempt(label, lambda k=kind, h=heads, t=tokens: time_row(torch, ops, spec, k, h, t)) or []
        torch.cuda.empty_cache()
        save()
    if spec.get("fla") and spec.get("accuracy"):  # last: minutes of tuning
        chunk_kda = attempt("FLA", import_fla)
        for regime in spec["regimes"] if chunk_kda is not None else ():
            got = attempt(f"FLA, outputs, {regime}", lambda regime=regime: outputs(torch, None, chunk_kda, stored, regime)) or {}
            found |= {f"{regime}|{name}": x for name, x in got.items()}
            np.savez(spec["accuracy_out"], **found)
    result["seconds"] = time.perf_counter() - started
    save()


if __name__ == "__main__":
    main(sys.argv[1])
