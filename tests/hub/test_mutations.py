"""Deliberate defects: each one, alone, must move the golden logits beyond the tolerance that the correct model meets.

This shows that the golden tests can fail: a wrong epsilon, order, sign or layout does not hide below the tolerance. A defect
edits the loaded weights, the configuration or one function; a table of all of them is printed at the end. By hand:
pytest -m slow tests/hub/test_mutations.py (about seven minutes on one core).
"""

import importlib
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM, hub
from moejax.ops.kda_layer import KDAState
from moejax.ops.norms import rms_norm
from moejax.ops.routing import Routing

pytestmark = pytest.mark.slow
GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
TOLERANCE = {"float32": 5e-4, "float64": 1e-5}  # largest absolute error of a logit that the golden tests allow
K3, LINEAR = "k3_tiny", "kimi_linear_tiny"


def module(name):
    """moejax.<name>; some functions hide the module of their name in a package's attributes."""
    return importlib.import_module(f"moejax.{name}")


KDA, KDA_LAYER, MLA = module("kernels.kda.api"), module("ops.kda_layer"), module("ops.mla")
EXPERTS, ROUTING, CONV, DEPTH = module("ops.experts"), module("ops.routing"), module("ops.short_conv"), module("ops.depth_attention")
BLOCK, DEPTH_MODULE = module("modules.block"), module("modules.depth_attention")
ACTIVATION_USERS = module("modules.feed_forward"), module("modules.moe")


class Run:
    """One model about to be run: a defect changes it."""

    def __init__(self, checkpoint, dtype, patch):
        self.config, self.params, self.state = checkpoint.config.replace(dtype=dtype), checkpoint.params, checkpoint.router_state
        self.patch, self.patched, self.depth = patch, False, None

    def change(self, **fields):
        """Fields of the configuration."""
        self.config = self.config.replace(**fields)

    def edit(self, name, fn, inside=""):
        """Every layer's leaf called `name` (below a key `inside`): fn sees one layer's array, without the stacked axes."""
        hits = 0

        def each(path, leaf):
            nonlocal hits
            keys = [key.key for key in path]
            if keys[-1] != name or (inside and inside not in keys):
                return leaf
            hits += 1
            return jax.vmap(jax.vmap(fn))(leaf) if "stack" in keys else fn(leaf)

        self.params = jax.tree_util.tree_map_with_path(each, self.params)
        assert hits, name

    def exchange(self, first, second):
        """Two leaves, or two subtrees, of equal shapes change places in every layer."""

        def walk(tree):
            if not isinstance(tree, dict):
                return tree
            if first in tree and second in tree:
                tree = {**tree, first: tree[second], second: tree[first]}
            return {key: walk(value) for key, value in tree.items()}

        self.params = walk(self.params)

    def set(self, owner, name, make):
        """Replace a function or constant by make(the original)."""
        self.patch.setattr(owner, name, make(getattr(owner, name)))
        self.patched = True


# --- norms --------------------------------------------------------------------------------------------------------------


def with_eps(eps):
    return lambda original: lambda x, weight, **_: original(x, weight, eps=eps)


def without_norm(original):
    return lambda x, weight, **_: x * weight.astype(x.dtype)


DEPTH_EPS = lambda original: lambda *a, eps, **k: original(*a, eps=1e-6, **k)

NORM_ROWS = {
    "latent norms of MLA: eps 1e-5": lambda run: run.set(MLA, "LATENT_EPS", lambda _: 1e-5),
    "every other norm: eps 1e-6": lambda run: run.change(norm_eps=1e-6),
    "layer norms and final norm: eps 1e-6": lambda run: run.set(BLOCK, "rms_norm", with_eps(1e-6)),
    "KDA output norm: eps 1e-6": lambda run: run.set(KDA_LAYER, "rms_norm", with_eps(1e-6)),
    "latent norm of MoE: eps 1e-6": lambda run: run.set(EXPERTS, "rms_norm", with_eps(1e-6)),
    "depth attention: eps 1e-6": lambda run: run.set(DEPTH_MODULE, "depth_attention", DEPTH_EPS),
    "mixer norm and feed-forward norm exchanged": lambda run: run.exchange("mixer_norm", "ffn_norm"),
    "final norm without its weight": lambda run: run.edit("weight", jnp.ones_like, "final_norm"),
    "latent norm of MoE missing": lambda run: run.change(moe={"latent_norm": False}),
    "latent norms of MLA missing": lambda run: run.set(MLA, "rms_norm", without_norm),
}

# --- KDA ----------------------------------------------------------------------------------------------------------------


def l2(eps_factor=1.0, mean=False):
    def normalize(x):
        total = jnp.sum(x * x, -1, keepdims=True)
        return x * jax.lax.rsqrt((total / x.shape[-1] if mean else total) + 1e-6 * eps_factor)

    return lambda _: normalize


def wrapped_kda(change):
    """kda with changed arguments: change(g, beta, options) -> (g, beta, options)."""

    def make(original):
        def run(q, k, v, g, beta, **options):
            g, beta, options = change(g, beta, options)
            return original(q, k, v, g, beta, **options)

        return run

    return make


def recurrence(order):
    """Token by token with the steps of one token in another order; "decay write read" is right."""

    def run(q, k, v, g, beta, *, scale, initial_state, **_):
        def step(state, token):
            q, k, v, g, beta = token
            o = None
            for part in order.split():
                if part == "decay":
                    state = state * jnp.exp(g)[..., None]
                elif part == "write":
                    kept = jnp.einsum("bhkv,bhk->bhv", state, k)
                    state = state + jnp.einsum("bhk,bhv->bhkv", k, beta[..., None] * (v - kept))
                elif part == "add":  # no delta rule
                    state = state + jnp.einsum("bhk,bhv->bhkv", k, beta[..., None] * v)
                else:
                    o = scale * jnp.einsum("bhkv,bhk->bhv", state, q)
            return state, o

        state, o = jax.lax.scan(step, initial_state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta)))
        return jnp.moveaxis(o, 0, 1), state

    return lambda _: run


def gate(formula):
    """The decay from formula(raw, dt_bias, A_log [HV,1]) in place of the bounded gate."""
    return lambda _: lambda raw, A_log, dt_bias, **_: formula(raw, dt_bias, A_log[:, None])


def output(formula):
    """The gated output norm from formula(o, gate logits, norm of an array) in place of norm, then gate."""

    def run(o, x, weights, eps, _=None):
        logits = jnp.einsum("btd,dhv->bthv", x, weights.out_gate)
        return formula(o, logits, lambda y: rms_norm(y, weights.out_norm, eps=eps))

    return lambda _: run


def norm_over_heads(o, logits, _):
    flat = o.reshape(*o.shape[:2], -1)
    return rms_norm(flat, jnp.ones(flat.shape[-1]), eps=1e-5).reshape(o.shape) * jax.nn.sigmoid(logits)


SIGMOID = jax.nn.sigmoid
L2, GATE, OUT = ((KDA, "l2_normalize"), (KDA, "kda_gate"), (KDA_LAYER, "_gated_norm"))

KDA_ROWS = {
    "L2 norm: eps on the mean (1e-6 K)": lambda run: run.set(*L2, l2(eps_factor=32)),
    "L2 norm: mean instead of sum": lambda run: run.set(*L2, l2(mean=True)),
    "L2 norm missing": lambda run: run.set(*L2, lambda _: lambda x: x),
    "queries not scaled by K^-1/2": lambda run: run.set(KDA, "kda", wrapped_kda(lambda g, b, o: (g, b, o | {"scale": 1.0}))),
    "beta times 2": lambda run: run.set(KDA, "kda", wrapped_kda(lambda g, b, o: (g, 2 * b, o))),
    "decay after the write": lambda run: run.set(KDA, "kda_chunked", recurrence("write decay read")),
    "read before the write": lambda run: run.set(KDA, "kda_chunked", recurrence("decay read write")),
    "write without the delta rule": lambda run: run.set(KDA, "kda_chunked", recurrence("decay add read")),
    "lower bound -4": lambda run: run.change(kda={"lower_bound": -4.0}),
    "softplus gate instead of the bounded one": lambda run: run.change(kda={"lower_bound": None}),
    "softplus gate clamped at -5": lambda run: run.set(*GATE, gate(lambda r, d, a: jnp.maximum(-jnp.exp(a) * jax.nn.softplus(r + d), -5))),
    "A_log not exponentiated": lambda run: run.set(*GATE, gate(lambda r, d, a: -5 * SIGMOID(a * (r + d)))),
    "A_log negated": lambda run: run.edit("A_log", jnp.negative),
    "A_log dropped": lambda run: run.edit("A_log", jnp.zeros_like),
    "A_log of the heads in reverse": lambda run: run.edit("A_log", lambda a: a[::-1]),
    "dt_bias dropped": lambda run: run.edit("dt_bias", jnp.zeros_like),
    "dt_bias outside exp(A_log)": lambda run: run.set(*GATE, gate(lambda r, d, a: -5 * SIGMOID(jnp.exp(a) * r + d))),
    "dt_bias laid out channels first": lambda run: run.edit("dt_bias", lambda d: d.reshape(d.shape[::-1]).T),
    "convolution taps reversed": lambda run: [run.edit(f"{n}_conv", lambda w: w[::-1]) for n in "qkv"],
    "convolution without SiLU": lambda run: run.set(
        CONV, "_silu_of_taps", lambda _: lambda taps, w: sum(t * row for t, row in zip(taps, w, strict=True))
    ),
    "convolutions of q and k exchanged": lambda run: run.exchange("q_conv", "k_conv"),
    "projections of q and k exchanged": lambda run: run.exchange("q_proj", "k_proj"),
    "output gate before the norm": lambda run: run.set(*OUT, output(lambda o, z, norm: norm(o * SIGMOID(z)))),
    "KDA output gate missing": lambda run: run.set(*OUT, output(lambda o, z, norm: norm(o))),
    "KDA output gate SiLU": lambda run: run.set(*OUT, output(lambda o, z, norm: norm(o) * jax.nn.silu(z))),
    "g_proj of KDA in its role in MLA (no norm)": lambda run: run.set(*OUT, output(lambda o, z, norm: o * SIGMOID(z))),
    "KDA output norm over all heads": lambda run: run.set(*OUT, output(norm_over_heads)),
    "KDA output norm without its weight": lambda run: run.edit("out_norm", jnp.ones_like),
    "o_proj of KDA laid out channels first": lambda run: run.edit("out_proj", lambda w: jnp.swapaxes(w.reshape(32, 4, 64), 0, 1), "mixer"),
}

# --- MLA ----------------------------------------------------------------------------------------------------------------


def projected(change):
    """mla_project with a changed result: change(q, latent, shared key)."""
    return lambda original: lambda *a, **k: change(*original(*a, **k))


def scaled(scale):
    return lambda original: lambda *a, **k: original(*a, **k | {"scale": scale})


def value_first(run):
    """Rows of kv_b_proj read as heads x (v | nope)."""

    def split(tree):
        if not isinstance(tree, dict):
            return tree
        if "k_up" in tree:
            joint = jnp.concatenate([tree["k_up"], tree["v_up"]], -1)
            values, keys = jnp.split(joint, [tree["v_up"].shape[-1]], -1)
            return {**tree, "k_up": keys, "v_up": values}
        return {key: split(value) for key, value in tree.items()}

    run.params = split(run.params)


def gate_in_the_role_of_kda(original):
    """The heads are normed before the gate."""

    def run(heads, x, weights):
        normed = rms_norm(heads, jnp.ones(heads.shape[-1]), eps=1e-5)
        return original(normed, x, weights)

    return run


MLA_ROWS = {
    "rotary positions on the shared key": lambda run: run.change(mla={"positions": "rotary"}),
    "shared key normed": lambda run: run.set(
        MLA, "mla_project", projected(lambda q, c, s: (q, c, rms_norm(s, jnp.ones(s.shape[-1]), eps=1e-6)))
    ),
    "shared key dropped": lambda run: run.set(MLA, "mla_project", projected(lambda q, c, s: (q, c, 0 * s))),
    "softmax scale nope^-1/2 (128 for 192)": lambda run: run.set(MLA, "latent_attention", scaled(16**-0.5)),
    "softmax scale missing": lambda run: run.set(MLA, "latent_attention", scaled(1.0)),
    "MLA output gate missing": lambda run: run.change(mla={"gate": False}),
    "g_proj of MLA in its role in KDA (norm before)": lambda run: run.set(MLA, "mla_output", gate_in_the_role_of_kda),
    "q_b_proj rows read as (rope | nope)": lambda run: run.edit("q_up", lambda w: jnp.roll(w, 16, -1)),
    "q_b_proj rows read channels first": lambda run: run.edit("q_up", lambda w: jnp.swapaxes(w.reshape(48, 24, 4), 1, 2)),
    "kv_b_proj rows read as (v | nope)": value_first,
    "kv_a_proj rows read as (shared key | latent)": lambda run: run.edit("kv_down", lambda w: jnp.roll(w, -8, -1)),
}

# --- router and experts -------------------------------------------------------------------------------------------------


def weighed(formula):
    """route with weights from formula(scores, biased scores, chosen experts)."""

    def run(logits, bias, k, **_):
        scores = SIGMOID(logits)
        experts, cutoff = ROUTING.select(scores, bias, k)
        take = lambda x: jnp.take_along_axis(x, experts, 1)
        return Routing(experts, formula(take(scores), take(scores + bias)), scores, cutoff)

    return lambda _: run


def chosen(scores_of):
    """route with selection by scores_of(logits, bias)."""

    def run(logits, bias, k, **_):
        experts = jax.lax.top_k(scores_of(logits, bias), k)[1]
        picked = jnp.take_along_axis(SIGMOID(logits), experts, 1)
        return Routing(experts, picked / picked.sum(1, keepdims=True), SIGMOID(logits), jnp.zeros(len(logits)))

    return lambda _: run


def softmax_scores(original):
    def run(logits, bias, k, **_):
        scores = jax.nn.softmax(logits)
        experts, cutoff = ROUTING.select(scores, bias, k)
        picked = jnp.take_along_axis(scores, experts, 1)
        return Routing(experts, picked / picked.sum(1, keepdims=True), scores, cutoff)

    return run


def bfloat16_logits(original):
    return lambda x, router: original(x.astype(jnp.bfloat16), router.astype(jnp.bfloat16)).astype(jnp.bfloat16).astype(jnp.float32)


def capped_sigmoid(run):
    """SiTU whose sigmoid reads the capped gate."""

    def activation(gate, up):
        capped = 4 * jnp.tanh(gate / 4)
        return capped * SIGMOID(capped) * 25 * jnp.tanh(up / 25)

    for user in ACTIVATION_USERS:
        run.set(user, "gated_activation", lambda _: lambda *_: activation)


def share(x):
    return x / x.sum(1, keepdims=True)


def expert_matrices(run, fn):
    for name in ("expert_gate", "expert_up", "expert_down"):
        run.edit(name, fn)


ROUTE = (EXPERTS, "route")

EXPERT_ROWS = {
    "bias included in the weights": lambda run: run.set(*ROUTE, weighed(lambda s, b: share(b))),
    "bias ignored in the selection": lambda run: setattr(run, "state", jax.tree.map(jnp.zeros_like, run.state)),
    "bias subtracted": lambda run: setattr(run, "state", jax.tree.map(jnp.negative, run.state)),
    "bias added before the sigmoid": lambda run: run.set(*ROUTE, chosen(lambda z, b: z + b)),
    "softmax scores": lambda run: run.set(*ROUTE, softmax_scores),
    "weights not renormalised": lambda run: run.change(moe={"renormalize": False}),
    "renormalisation epsilon 1e-3": lambda run: run.set(*ROUTE, weighed(lambda s, b: s / (s.sum(1, keepdims=True) + 1e-3))),
    "router logits in bfloat16": lambda run: run.set(EXPERTS, "router_logits", bfloat16_logits),
    "one expert a token less": lambda run: run.change(moe={"experts_per_token": 3}),
    "routing weights times 2.446": lambda run: run.change(moe={"scaling": 2.446}),
    "nibbles swapped": lambda run: expert_matrices(run, lambda w: w.reshape(len(w), -1, 2, w.shape[2])[:, :, ::-1].reshape(w.shape)),
    "scale byte off by one": lambda run: expert_matrices(run, lambda w: 2 * w),
    "w1 and w3 of the experts exchanged": lambda run: run.exchange("expert_gate", "expert_up"),
    "gate and up of the shared expert exchanged": lambda run: run.exchange("shared_gate", "shared_up"),
    "gate and up of the dense layer exchanged": lambda run: run.exchange("gate_proj", "up_proj"),
    "experts in reverse order": lambda run: expert_matrices(run, lambda w: w[::-1]),
    "shared expert dropped": lambda run: run.edit("shared_down", jnp.zeros_like),
    "SiTU caps exchanged": lambda run: run.change(gate_cap=25.0, up_cap=4.0),
    "SiTU with the sigmoid of the capped gate": capped_sigmoid,
    "SwiGLU instead of SiTU": lambda run: run.change(activation="swiglu", gate_cap=4.0, up_cap=25.0),
}

# --- attention over depth -----------------------------------------------------------------------------------------------


def normed_sources(_):
    def mix(snapshots, prefix, norm_weight, query, valid, eps):
        sources = jnp.concatenate([snapshots, prefix[None]])
        normed = sources * jax.lax.rsqrt(jnp.mean(sources**2, -1, keepdims=True) + eps)
        logits = jnp.where(valid[:, None, None], normed @ (norm_weight * query), -jnp.inf)
        return jnp.sum(jax.nn.softmax(logits, 0)[..., None] * normed, 0)

    return mix


def depth(change):
    """Run layer by layer with another bookkeeping of snapshots: change(the class that does it right) -> a subclass."""
    return lambda run: setattr(run, "depth", change)


def closing(at):
    """Blocks start at the layers for which at(index) holds."""

    def change(base):
        class Closing(base):
            def close_block(self, index):
                if at(index):
                    self.snapshots.append(self.prefix)
                    self.empty = True

        return Closing

    return change


def keeps_sum(base):
    class KeepsSum(base):
        def close_block(self, index):
            super().close_block(index)
            self.empty = False

    return KeepsSum


def reads(sources_of):
    """The query reads sources_of(snapshots, prefix)."""

    def change(base):
        class Reads(base):
            def read(self, weights):
                kept = self.snapshots, self.prefix
                *self.snapshots, self.prefix = sources_of(*kept)
                out = super().read(weights)
                self.snapshots, self.prefix = kept
                return out

        return Reads

    return change


DEPTH_ROWS = {
    "residual query scaled by d^-1/2": lambda run: run.edit("query", lambda w: w / 8),
    "norm weight of the residual queries dropped": lambda run: run.edit("norm_weight", jnp.ones_like),
    "residual keys not normed": lambda run: run.set(DEPTH, "_rsqrt_mean_square", lambda _: lambda v, eps: jnp.ones(v.shape[:-1])),
    "mix of the normed sources": lambda run: run.set(DEPTH, "_mix", normed_sources),
    "queries of mixer and feed-forward exchanged": lambda run: run.exchange("mixer_residual", "ffn_residual"),
    "final mix missing": lambda run: run.set(HybridLM, "_output", lambda _: lambda self, out: out.prefix),
    "snapshots one layer late": depth(closing(lambda index: index % 3 == 1)),
    "snapshots one layer early": depth(closing(lambda index: index == 0 or index % 3 == 2)),
    "blocks of 2 layers": depth(closing(lambda index: index % 2 == 0)),
    "blocks of 4 layers": depth(closing(lambda index: index % 4 == 0)),
    "the sum goes on across blocks": depth(keeps_sum),
    "embedding is no source": depth(reads(lambda snapshots, prefix: [*(snapshots[1:] or snapshots), prefix])),
    "running sum is no source": depth(reads(lambda snapshots, prefix: snapshots or [prefix])),
    "layers of a run in reverse order": lambda run: setattr(
        run, "params", {**run.params, "stack": jax.tree.map(lambda w: w[:, ::-1], run.params["stack"])}
    ),
    "head is the embedding": lambda run: setattr(run, "params", {**run.params, "head": run.params["embedding"].T}),
}

# --- Kimi Linear --------------------------------------------------------------------------------------------------------

LINEAR_ROWS = {
    "bounded gate": lambda run: run.change(kda={"lower_bound": -5.0}),
    "A_log inside the softplus": lambda run: run.set(*GATE, gate(lambda r, d, a: -jax.nn.softplus(jnp.exp(a) * (r + d)))),
    "A_log not exponentiated": lambda run: run.set(*GATE, gate(lambda r, d, a: -jnp.abs(a) * jax.nn.softplus(r + d))),
    "norms: eps 1e-6": lambda run: run.change(norm_eps=1e-6),
    "low-rank output gate missing": lambda run: run.set(*OUT, lambda _: lambda o, x, w, eps, _: rms_norm(o, w.out_norm, eps=eps)),
    "routing scale 2.446 dropped": lambda run: run.change(moe={"scaling": 1.0}),
    "bias ignored in the selection": lambda run: setattr(run, "state", jax.tree.map(jnp.zeros_like, run.state)),
    "SiTU instead of SwiGLU": lambda run: run.change(activation="situ"),
    "rotary positions on the shared key": lambda run: run.change(mla={"positions": "rotary"}),
}

# --- too small for float32: caught by the float64 runs and their 1e-5 ----------------------------------------------------

# A renormalisation epsilon of 1e-6 instead of 1e-20 moves no K3 logit by more than 1.1e-6 in float64 (the chosen scores sum
# to 1 or more), so no whole model shows it: test_golden_k3.py has scores near 0 for it.

LINEAR_FLOAT64_ROWS = {
    "latent norm of MLA: eps 1e-5": lambda run: run.set(MLA, "LATENT_EPS", lambda _: 1e-5),
    "L2 norm: eps on the mean (1e-6 K)": lambda run: run.set(*L2, l2(eps_factor=16)),
}

# --- what must not move: nothing changed, and the ways in which the defects are run -------------------------------------

NOTHING = {"nothing": lambda run: None}
K3_CONTROLS = NOTHING | {
    "nothing, layer by layer": depth(lambda base: base),
    "nothing, blocks of 3 layers": depth(closing(lambda index: index % 3 == 0)),
    "nothing, recurrence token by token": lambda run: run.set(KDA, "kda_chunked", recurrence("decay write read")),
    "nothing, gate written out": lambda run: run.set(*GATE, gate(lambda r, d, a: -5 * SIGMOID(jnp.exp(a) * (r + d)))),
    "nothing, output written out": lambda run: run.set(*OUT, output(lambda o, z, norm: norm(o) * SIGMOID(z))),
    "nothing, weights written out": lambda run: run.set(*ROUTE, weighed(lambda s, b: share(s))),
    "nothing, L2 norm written out": lambda run: run.set(*L2, l2()),
}


# --- running them -------------------------------------------------------------------------------------------------------


def cases(k3, linear, dtype="float32"):
    """One test parameter a row: text, model, dtype, defect."""
    pairs = [(K3, text, fn) for text, fn in k3.items()] + [(LINEAR, text, fn) for text, fn in linear.items()]
    return [pytest.param(text, model, dtype, fn, id=f"{model}: {text}, {dtype}") for model, text, fn in pairs]


@pytest.fixture(scope="module")
def measure(golden, layerwise):
    """measure(model, dtype, defect, monkeypatch) -> largest absolute difference from the golden logits."""
    compiled = {}
    forward, direct = layerwise

    def program(run, tokens):
        """The compiled model. It is kept where weights alone changed; a changed function must be traced again."""
        if run.depth is not None:
            fn = lambda params, state, tokens: forward(run.config, run.depth(direct), params, state, tokens).logits
        else:
            fn = lambda params, state, tokens: HybridLM(run.config).apply({"params": params, "router_state": state}, tokens)
        changed = run.patched or run.depth is not None
        if changed or run.config not in compiled:
            jax.clear_caches()
            made = jax.jit(fn).lower(run.params, run.state, tokens).compile()
            if changed:
                return made
            compiled[run.config] = made
        return compiled[run.config]

    def error(name, dtype, change, monkeypatch):
        oracle = dtype == "float64" and name == LINEAR
        tokens = golden(f"{name}/forward.npz")["ids"]
        expected = golden(f"{name}/{'oracle_float64' if oracle else 'forward'}.npz")["out_logits"]
        with jax.enable_x64(dtype == "float64"):
            run = Run(hub.load(GOLDEN / name, param_dtype=dtype), dtype, monkeypatch)
            change(run)
            logits = np.asarray(program(run, tokens)(run.params, run.state, tokens), np.float64)
        return float(np.abs(logits - expected).max())

    return error


def caught(moved, dtype="float32"):
    """Whether the golden tests fail; NaN is no pass."""
    return not moved < TOLERANCE[dtype]


@pytest.fixture(scope="module")
def table(request):
    """Rows (model, defect, change, dtype); printed when the last test is over."""
    rows = []
    yield rows
    lines = [f"{'model':17} {'change':56} {'logits moved by':>15}   tolerance"]
    for model, text, moved, dtype in rows:
        verdict = "caught" if caught(moved, dtype) else "within"
        lines.append(f"{model:17} {text:56} {moved:15.2e}   {TOLERANCE[dtype]:.0e} {verdict}")
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *lines, sep="\n")


@pytest.mark.parametrize(("text", "model", "dtype", "change"), [*cases(K3_CONTROLS, NOTHING), *cases(NOTHING, NOTHING, "float64")])
def test_control_is_within_the_tolerance(text, model, dtype, change, measure, monkeypatch, table):
    moved = measure(model, dtype, change, monkeypatch)
    table.append((model, text, moved, dtype))
    assert not caught(moved, dtype)


@pytest.mark.parametrize(
    ("text", "model", "dtype", "change"),
    [
        *cases(NORM_ROWS | KDA_ROWS | MLA_ROWS | EXPERT_ROWS | DEPTH_ROWS, LINEAR_ROWS),
        *cases({}, LINEAR_FLOAT64_ROWS, "float64"),
    ],
)
def test_defect_is_caught(text, model, dtype, change, measure, monkeypatch, table):
    moved = measure(model, dtype, change, monkeypatch)
    table.append((model, text, moved, dtype))
    assert caught(moved, dtype)


def kda_part(fn):
    """fn on every KDAState of a list of caches."""
    return lambda caches: [fn(cache) if isinstance(cache, KDAState) else cache for cache in caches]


CACHE_ROWS = {
    "recurrent state transposed": kda_part(lambda c: c._replace(recurrent=jnp.swapaxes(c.recurrent, 2, 3))),
    "recurrent state lost": kda_part(lambda c: c._replace(recurrent=jnp.zeros_like(c.recurrent))),
    "convolution history in reverse": kda_part(
        lambda c: c._replace(**{f"{n}_history": getattr(c, f"{n}_history")[:, ::-1] for n in "qkv"})
    ),
    "convolution history one token old": kda_part(
        lambda c: c._replace(**{f"{n}_history": jnp.roll(getattr(c, f"{n}_history"), 1, 1) for n in "qkv"})
    ),
    "histories of q and k exchanged": kda_part(lambda c: c._replace(q_history=c.k_history, k_history=c.q_history)),
    "latents one entry late": lambda caches: [c if isinstance(c, KDAState) else (jnp.roll(c[0], 1, 1), c[1]) for c in caches],
    "caches of layers 0 and 1 exchanged": lambda caches: [caches[1], caches[0], *caches[2:]],
}


@pytest.mark.parametrize("text", ["nothing", *CACHE_ROWS])
def test_caches(text, stored_caches, make_stepper, golden, table):
    """One token after the stored caches of 37, with one thing wrong in them."""
    stepper = make_stepper(hub.load(GOLDEN / K3, param_dtype="float32"))
    caches = CACHE_ROWS.get(text, list)(stored_caches())
    logits, _ = stepper.feed(golden(f"{K3}/forward.npz")["ids"][:, 37:39], stepper.room(caches), 37)
    moved = float(np.abs(logits - golden(f"{K3}/decode.npz")["out_logits_decode"][:, :2]).max())
    table.append((K3, f"caches: {text}", moved, "float32"))
    assert caught(moved) == (text != "nothing")


@pytest.mark.parametrize(("name", "shift"), [(K3, -1), (K3, 1), (LINEAR, -1), (LINEAR, 1)])
def test_layer_lists_count_from_one(name, shift, tmp_path):
    """Lists shifted by one do not fit the files' tensors: the loader refuses before anything runs."""
    for file in (GOLDEN / name).glob("*"):
        if file.suffix != ".npz":
            shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    lists = config.get("text_config", config)["linear_attn_config"]
    for key in ("full_attn_layers", "kda_layers"):
        lists[key] = [layer + shift for layer in lists[key]]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="layer"):
        hub.load(tmp_path)
