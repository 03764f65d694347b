"""KDA on this machine's CPU: token scan, chunked form (bounded and unbounded gate) and tokamax's `xla_chunked`, in one run.

    python experiments/bench/kda_cpu.py                       # T = 2048, 8192, 32768, B = 1, H = 4, K = V = 64, float32
    python experiments/bench/kda_cpu.py --heads 8 --channels 128        # a real layer's head: products weigh more than passes
    python experiments/bench/kda_cpu.py --tokens 256 --batch 8 --channels 32

Every call takes raw gates and un-normalised q, k (L2 norm and gate are inside, as in a layer). Before a size is timed the outputs
are checked against the float64 token recurrence, and at the smallest size every gradient. The forms take turns, so that a slow spell
of the machine hits all alike; the table shows medians. tokamax (0.0.17, Python 3.12) is left out where it is not installed.
"""

import argparse
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kernels.kda import gated_kda

NAMES = ("q", "k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias")


def operands(batch, tokens, heads, channels):
    rng = np.random.default_rng(0)
    wide = (batch, tokens, heads, channels)
    shapes = (wide, wide, wide, wide, wide[:3], (heads,), (heads, channels))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def moejax_form(implementation, lower_bound):
    return lambda *a: gated_kda(*a, lower_bound=lower_bound, implementation=implementation)[0]


def tokamax_form():
    """The peer behind our argument order, or None where it is not installed. Its layout is [H,B,T,D]: no transpose is timed."""
    try:
        from tokamax.ops import kimi_delta_attention  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None

    def run(q, k, v, raw, logits, A_log, dt_bias):
        o, _ = kimi_delta_attention(
            q, k, v, raw, jax.nn.sigmoid(logits), a_log=A_log, delta_time_bias=dt_bias.reshape(-1), lower_bound=-5.0,
            use_qk_l2norm=True, use_gate_in_kernel=True, implementation="xla_chunked",
        )  # fmt: skip
        return o

    return run


def heads_first(args):
    """[B,T,H,...] -> [H,B,T,...] for the peer."""
    return [jnp.moveaxis(x, 2, 0) if x.ndim > 2 else x for x in args]


def with_gradients(form):
    """Outputs are not needed: the gradients of sum(o * w) in every operand."""
    return lambda w, *args: jax.grad(lambda a: jnp.sum(form(*a) * w))(args)


def error(value, wanted) -> float:
    wanted = np.asarray(wanted, np.float64)
    return float(np.max(np.abs(np.asarray(value, np.float64) - wanted)) / np.max(np.abs(wanted)))


def check(forms, args, weights, gradients):
    """Raise if a form is further than 1e-5 (outputs) or 1e-4 (gradients) from float64; print the errors."""
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x), jnp.float64) for x in args]
        w = jnp.asarray(np.asarray(weights), jnp.float64)
        wanted, wanted_grads = {}, {}
        for bound in (-5.0, None):
            form = moejax_form("reference", bound)
            wanted[bound] = np.asarray(jax.jit(form)(*exact))
            if gradients:
                wanted_grads[bound] = [np.asarray(x) for x in jax.jit(with_gradients(form))(w, *exact)]
    for name, (form, bound, layout) in forms.items():
        turn = heads_first if layout == "HBT" else (lambda x: x)
        back = (lambda x: np.moveaxis(np.asarray(x), 0, 2) if np.ndim(x) > 2 else np.asarray(x)) if layout == "HBT" else np.asarray
        found = error(back(jax.jit(form)(*turn(args))), wanted[bound])
        worst = 0.0
        if gradients:
            grads = jax.jit(with_gradients(form))(*turn([weights]), *turn(args))
            worst = max(error(back(x), y) for x, y in zip(grads, wanted_grads[bound], strict=True))
        print(f"  checked {name:<22} output {found:.1e}" + (f"  gradients {worst:.1e}" if gradients else ""), flush=True)
        # The peer is not ours to fix: its error is printed. Ours must hold.
        if layout == "BTH" and (found > 1e-5 or worst > 1e-4):
            raise SystemExit(f"{name} is wrong: output {found:.1e}, gradients {worst:.1e}; nothing was timed.")


def timed(calls, repeats):
    """Median seconds of each call; the calls take turns."""
    for call in calls.values():
        jax.block_until_ready(call())  # compile
    spent = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            spent[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in spent.items()}


def compiled(forms, args, weights, gradients):
    calls = {}
    for name, (form, _, layout) in forms.items():
        turn = heads_first if layout == "HBT" else (lambda x: x)
        inputs = [*turn([weights]), *turn(args)] if gradients else turn(args)
        function = jax.jit(with_gradients(form) if gradients else form)
        calls[name] = lambda function=function, inputs=inputs: function(*inputs)
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--channels", type=int, default=64, help="K = V")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scan-up-to", type=int, default=32768, help="longest T at which the token scan is differentiated (2 GiB)")
    options = parser.parse_args()
    forms = {
        "token scan": (moejax_form("reference", -5.0), -5.0, "BTH"),
        "chunked, bounded": (moejax_form("xla", -5.0), -5.0, "BTH"),
        "chunked, unbounded": (moejax_form("xla", None), None, "BTH"),
    }
    peer = tokamax_form()
    if peer is None:
        print("tokamax is not installed here; its row is left out (pip install 'moejax[fast]' on Python 3.12)")
    else:
        forms["tokamax xla_chunked"] = (peer, -5.0, "HBT")
    print(f"jax {jax.__version__}, {platform.machine()}, {jax.devices()[0].platform}; B={options.batch}, H={options.heads}, "
          f"K=V={options.channels}, float32, median of {options.repeats}")  # fmt: skip
    rows = []
    for tokens in sorted(options.tokens):
        args = operands(options.batch, tokens, options.heads, options.channels)
        weights = jnp.asarray(np.random.default_rng(1).normal(size=args[2].shape), jnp.float32)
        check(forms, args, weights, gradients=tokens == min(options.tokens))
        forward = timed(compiled(forms, args, weights, False), options.repeats)
        some = {name: form for name, form in forms.items() if name != "token scan" or tokens <= options.scan_up_to}
        both = timed(compiled(some, args, weights, True), options.repeats)
        rows += [(tokens, name, forward[name], both.get(name)) for name in forms]
    print(f"\n{'T':>7}  {'form':<22} {'forward ms':>11} {'x faster':>9} {'fwd+bwd ms':>11} {'x faster':>9}   (x: than the token scan)")
    for tokens, name, forward, both in rows:
        scan = next(row for row in rows if row[:2] == (tokens, "token scan"))
        ratio = "" if both is None or scan[3] is None else f"{scan[3] / both:9.1f}"
        shown = f"{both * 1e3:11.1f}" if both is not None else f"{'-':>11}"
        print(f"{tokens:>7}  {name:<22} {forward * 1e3:11.1f} {scan[2] / forward:9.1f} {shown} {ratio:>9}")


if __name__ == "__main__":
    main()
