"""Whole published checkpoints: an independent reading of their files, and the model run layer by layer with its caches.

Nothing here uses moejax.hub: the files are read with numpy, the names are written out again, and the layers are called
as functions. Shapes: B rows, T tokens, S cache entries, D width, V vocabulary.
"""

import dataclasses
import json
import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import HybridLM, ops
from moejax.modules.feed_forward import gated_activation
from moejax.modules.plan import layer_locations, layer_specs
from moejax.ops.depth_attention import depth_attention_merge, depth_attention_snapshots
from moejax.ops.experts import LatentMoEWeights, gated_mlp, latent_moe
from moejax.ops.kda_layer import KDAState, KDAWeights, kda_layer
from moejax.ops.mla import MLAWeights, absorbed_latent_attention, latent_attention, mla_output, mla_project
from moejax.ops.norms import rms_norm
from moejax.train.loss import next_token_targets

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

# --- the files -----------------------------------------------------------------------------------------------------


def read_tensors(folder: str) -> dict[str, np.ndarray]:
    """Every tensor of a golden checkpoint as stored, bfloat16 widened to float32, packed experts decoded."""
    tensors = {}
    for path in sorted((GOLDEN / folder).glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, last = (start + offset for offset in entry["data_offsets"])
                tensors[name] = _array(data[first:last], entry["dtype"]).reshape(entry["shape"])
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        tensors[stem] = decode_mxfp4(tensors.pop(name), tensors.pop(stem + "_scale"))
    return tensors


def _array(raw: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, {"F32": "<f4", "U8": "u1"}[dtype])


def decode_mxfp4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """packed [n,m/2], scale [n,m/32] -> [n,m]: the low nibble is the even column, bit 3 the sign, the scale 2^(byte - 127)."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    signed = np.where(codes & 8, -FP4[codes & 7], FP4[codes & 7])
    return signed * np.repeat(np.exp2(scale.astype(np.float32) - 127), 32, axis=1)


@pytest.fixture(scope="session")
def published_tensors():
    """published_tensors("k3_tiny") -> {name in the file: numpy array}; experts decoded, as `...w1.weight`."""
    return read_tensors


# --- names: a tree shaped like the parameters -> tensors named and laid out as in the file ----------------------------


def _transposed(x):
    """[in, ...] -> [out, in]"""
    return x.reshape(x.shape[0], -1).T


def _merged(x):
    """[..., out] -> [out, in]"""
    return x.reshape(-1, x.shape[-1]).T


def _padded(x):
    """A_log [heads] -> a multiple of 128 entries, zeros after the heads."""
    return np.pad(x, (0, -len(x) % 128))


def _joint(k_up, v_up):
    """[C,H,N], [C,H,V] -> [H (N + V), C]"""
    return _transposed(np.concatenate([k_up, v_up], -1))


def _kda_tensors(p, low_rank):
    out = {f"{n}_proj.weight": _transposed(p[f"{n}_proj"]) for n in "qkv"}
    out |= {f"{n}_conv1d.weight": p[f"{n}_conv"].T[:, None] for n in "qkv"}
    out |= {"f_a_proj.weight": _transposed(p["decay_down"]), "f_b_proj.weight": _transposed(p["decay_up"])}
    if low_rank:
        out |= {"g_a_proj.weight": _transposed(p["out_gate_down"]), "g_b_proj.weight": _transposed(p["out_gate_up"])}
        out["A_log"] = p["A_log"].reshape(1, 1, -1, 1)
    else:
        out |= {"g_proj.weight": _transposed(p["out_gate"]), "A_log": _padded(p["A_log"])}
    out |= {"b_proj.weight": _transposed(p["beta_proj"]), "dt_bias": p["dt_bias"].reshape(-1)}
    return out | {"o_norm.weight": p["out_norm"], "o_proj.weight": _merged(p["out_proj"])}


def _mla_tensors(p):
    out = {"kv_a_proj_with_mqa.weight": _transposed(p["kv_down"]), "kv_a_layernorm.weight": p["kv_norm"]}
    out |= {"kv_b_proj.weight": _joint(p["k_up"], p["v_up"]), "o_proj.weight": _merged(p["out"])}
    if "q_down" not in p:
        return out | {"q_proj.weight": _transposed(p["q_up"])}
    out |= {"q_a_proj.weight": _transposed(p["q_down"]), "q_a_layernorm.weight": p["q_norm"]}
    return out | {"q_b_proj.weight": _transposed(p["q_up"]), "g_proj.weight": _transposed(p["gate"])}


def _moe_tensors(p, bias):
    out = {"gate.weight": _transposed(p["router"]), "gate.e_score_correction_bias": bias}
    if "latent_down" in p:
        out |= {f"routed_expert_{n}_proj.weight": _transposed(p[f"latent_{n}"]) for n in ("down", "up")}
        out["routed_expert_norm.weight"] = p["latent_norm"]
    out |= {f"shared_experts.{n}_proj.weight": _transposed(p[f"shared_{n}"]) for n in ("gate", "up", "down")}
    for expert in range(len(bias)):
        for name, ours in (("w1", "expert_gate"), ("w3", "expert_up"), ("w2", "expert_down")):
            out[f"experts.{expert}.{name}.weight"] = p[ours][expert].T
    return out


def to_file(config, params, router_state) -> dict[str, np.ndarray]:
    """The tree as the text model's tensors: matrices [out, in], names without `language_model.`."""
    params, router_state = jax.tree.map(np.asarray, (params, router_state))
    out = {"model.embed_tokens.weight": params["embedding"], "lm_head.weight": params["head"].T}
    out["model.norm.weight"] = params["final_norm"]["weight"]
    residuals = [("model.output_attn_res", params.get("output_residual"))]
    for index, (spec, own, bias) in enumerate(layers_of(config, params, router_state)):
        name, sub = f"model.layers.{index}", own["sub"]
        residuals += [(f"{name}.{s}_res", own.get(f"{o}_residual")) for s, o in (("self_attention", "mixer"), ("mlp", "ffn"))]
        out[f"{name}.input_layernorm.weight"] = sub["mixer_norm"]["weight"]
        out[f"{name}.post_attention_layernorm.weight"] = sub["ffn_norm"]["weight"]
        low_rank = config.kda.output_gate_rank is not None
        mixer = _kda_tensors(sub["mixer"], low_rank) if spec.mixer == "K" else _mla_tensors(sub["mixer"])
        out |= {f"{name}.self_attn.{key}": value for key, value in mixer.items()}
        if not spec.dense:
            out |= {f"{name}.block_sparse_moe.{key}": value for key, value in _moe_tensors(sub["ffn"], bias).items()}
            continue
        # transformers 5.24.0 saves the dense layer of Kimi Linear under the name of the sparse ones.
        place = "mlp" if config.residual != "plain" else "block_sparse_moe"
        out |= {f"{name}.{place}.{key}.weight": _transposed(value) for key, value in sub["ffn"].items()}
    for name, weights in residuals:
        if weights is not None:
            out |= {f"{name}_norm.weight": weights["norm_weight"], f"{name}_proj.weight": weights["query"][None]}
    return out


@pytest.fixture(scope="session")
def file_tensors():
    """file_tensors(config, params, router_state) -> {name: array [out, in]}, for any tree shaped like the parameters."""
    return to_file


# --- layers ---------------------------------------------------------------------------------------------------------


def _slice(tree, location):
    for key in location.path:
        tree = tree[key]
    return jax.tree.map(lambda leaf: leaf[location.index], tree)


def layers_of(config, params, router_state):
    """[(spec, the layer's parameters, its selection bias or None)], first to last."""
    out = []
    for spec, location in zip(layer_specs(config), layer_locations(config), strict=True):
        own = _slice(params["stack"], location)
        bias = None if spec.dense else _slice(router_state["stack"], location)["sub"]["ffn"]["bias"]
        out.append((spec, own, bias))
    return out


@pytest.fixture(scope="session")
def layer_streams():
    """layer_streams(config, written intermediates) -> [layers,B,T,D]: the running sum after each layer."""

    def collect(config, intermediates):
        return np.stack([_slice(intermediates["stack"], at)["stream"][0] for at in layer_locations(config)])

    return collect


# --- the layers called as functions, with their caches ------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Trace:
    """What a forward pass of the functions leaves."""

    logits: Any
    caches: list[Any]
    """A layer: KDAState, or (latent [B,S,C], shared key [B,S,R])."""
    attn: list[Any] = dataclasses.field(default_factory=list)
    mlp: list[Any] = dataclasses.field(default_factory=list)
    stream: list[Any] = dataclasses.field(default_factory=list)
    routing: list[Any] = dataclasses.field(default_factory=list)
    mixed: Any = None
    final: Any = None


def _mixer(config, spec, weights, x, cache, position):
    """One mixer over a prompt (cache None) or over one more token at `position` -> (y [B,T,D], its cache)."""
    if spec.mixer == "K":
        own = KDAWeights(**{name: weights.get(name) for name in KDAWeights._fields})
        bound = config.kda.lower_bound
        return kda_layer(x, own, lower_bound=bound, norm_eps=config.norm_eps, state=cache, return_state=True)
    own = MLAWeights(**{name: weights.get(name) for name in MLAWeights._fields})
    q, *new = mla_project(x, own)
    if cache is None:
        return mla_output(latent_attention(q, *new, own.k_up, own.v_up), x, own), tuple(new)
    cache = tuple(jax.lax.dynamic_update_slice_in_dim(old, part, position, 1) for old, part in zip(cache, new, strict=True))
    lengths = jnp.full(x.shape[:1], position + 1)
    return mla_output(absorbed_latent_attention(q, *cache, own.k_up, own.v_up, lengths=lengths), x, own), cache


def _feed_forward(config, spec, weights, bias, x):
    """-> (y [B,T,D], Routing or None)."""
    c, activation = config.moe, gated_activation(config.activation, config.gate_cap, config.up_cap)
    if spec.dense:
        return gated_mlp(x, weights["gate_proj"], weights["up_proj"], weights["down_proj"], activation=activation), None
    renamed = {"router": "router", "norm": "latent_norm", "down": "latent_down", "up": "latent_up"}
    renamed |= {f"w_{n}": f"expert_{n}" for n in ("gate", "up", "down")}
    names = {name: renamed.get(name, name) for name in LatentMoEWeights._fields}
    own = LatentMoEWeights(**{name: weights.get(key) for name, key in names.items()})
    rule = {"scaling": c.scaling, "renormalize": c.renormalize, "activation": activation, "eps": config.norm_eps}
    out = latent_moe(x, bias, own, c.experts_per_token, **rule)
    return out.y, out.routing


class Plain:
    """Residual sum without attention over depth."""

    def __init__(self, config, layers, params):
        self.config, self.prefix, self.empty = config, None, False

    def open_layer(self, index):
        pass

    def read(self, _):
        return self.prefix

    def close_block(self, index):
        """Between the mixer's query and the mixer."""

    def add(self, y):
        self.prefix, self.empty = y if self.empty else self.prefix + y, False


class DirectDepth(Plain):
    """Every query over all its sources at once, as k3-spec section 5 writes it."""

    def __init__(self, config, layers, params):
        super().__init__(config, layers, params)
        self.snapshots = []

    def read(self, weights):
        if not self.snapshots:
            return self.prefix
        sources = jnp.stack([*self.snapshots, self.prefix])
        return ops.attention_residual(sources, weights["norm_weight"], weights["query"], eps=self.config.norm_eps)

    def close_block(self, index):
        if index % self.config.residual_block == 0:
            self.snapshots.append(self.prefix)
            self.empty = True


class TwoPhaseDepth(Plain):
    """All queries of a block against its snapshots at once, then one merge with the running sum each."""

    def __init__(self, config, layers, params):
        super().__init__(config, layers, params)
        own = [[layer["mixer_residual"], layer["ffn_residual"]] for _, layer, _ in layers]
        per_block = [own[at : at + config.residual_block] for at in range(0, len(own), config.residual_block)]
        self.queries = [[query for pair in block for query in pair] for block in per_block]
        self.queries[-1].append(params["output_residual"])
        self.snapshots, self.shares = [], []

    def open_layer(self, index):
        """Phase one where a block begins: the newest snapshot is the sum so far, and the sum starts empty."""
        if index % self.config.residual_block:
            return
        norms, queries = (jnp.stack([q[key] for q in self.queries[len(self.snapshots)]]) for key in ("norm_weight", "query"))
        self.snapshots.append(self.prefix)
        share = depth_attention_snapshots(jnp.stack(self.snapshots), norms, queries, eps=self.config.norm_eps)
        self.shares = [jax.tree.map(lambda part, at=at: part[at], share) for at in range(len(queries))]
        self.empty = True

    def read(self, weights):
        prefix = None if self.empty else self.prefix
        return depth_attention_merge(self.shares.pop(0), prefix, weights["norm_weight"], weights["query"], eps=self.config.norm_eps)


def forward(config, depth_class, params, router_state, tokens, caches=None, position=0) -> Trace:
    """tokens [B,T] from the start (caches None), or one token a row at `position` with the caches of those before it."""
    layers = layers_of(config, params, router_state)
    depth = depth_class(config, layers, params)
    depth.prefix = params["embedding"][tokens]
    trace = Trace(None, [])
    for index, (spec, own, bias) in enumerate(layers):
        sub = own["sub"]
        depth.open_layer(index)
        h = depth.read(own.get("mixer_residual"))
        depth.close_block(index)
        x = rms_norm(h, sub["mixer_norm"]["weight"], eps=config.norm_eps)
        y, cache = _mixer(config, spec, sub["mixer"], x, caches and caches[index], position)
        depth.add(y)
        trace.attn.append(y)
        trace.caches.append(cache)
        x = rms_norm(depth.read(own.get("ffn_residual")), sub["ffn_norm"]["weight"], eps=config.norm_eps)
        y, routing = _feed_forward(config, spec, sub["ffn"], bias, x)
        depth.add(y)
        trace.mlp.append(y)
        trace.stream.append(depth.prefix)
        trace.routing.append(routing)
    trace.mixed = depth.read(params.get("output_residual"))
    trace.final = rms_norm(trace.mixed, params["final_norm"]["weight"], eps=config.norm_eps)
    trace.logits = trace.final @ params["head"]
    return trace


class Stepper:
    """Prefill and decoding of one checkpoint by `forward`, compiled once each; caches have space for `size` tokens."""

    def __init__(self, config, params, router_state, size=70):
        self.size, self.variables = size, (params, router_state)
        plain = config.residual == "plain"
        self._prompt = jax.jit(partial(forward, config, Plain if plain else DirectDepth))
        self._token = jax.jit(partial(forward, config, Plain if plain else TwoPhaseDepth))

    def prefill(self, tokens) -> Trace:
        """tokens [B,T], a whole prompt."""
        return self._prompt(*self.variables, tokens)

    def room(self, caches):
        """The caches with space for all tokens to come; the free entries hold NaN, which nothing may read."""

        def grow(part):
            return jnp.pad(part, ((0, 0), (0, self.size - part.shape[1]), (0, 0)), constant_values=np.nan)

        return [tuple(grow(part) for part in c) if type(c) is tuple else c for c in caches]

    def feed(self, tokens, caches, position):
        """tokens [B,n] one at a time -> (logits [B,n,V], caches)."""
        logits = []
        for at in range(tokens.shape[1]):
            trace = self._token(*self.variables, tokens[:, at : at + 1], caches, position + at)
            caches = trace.caches
            logits.append(trace.logits[:, 0])
        return np.stack(logits, 1), caches

    def greedy(self, prompt, count):
        """The `count` most likely tokens after prompt [B,n], one at a time -> [B,count]."""
        trace = self.prefill(prompt)
        caches, last, out = self.room(trace.caches), trace.logits[:, -1:], []
        for at in range(count):
            out.append(jnp.argmax(last, -1))
            last, caches = self.feed(out[-1], caches, prompt.shape[1] + at)
        return np.concatenate(out, 1)


@pytest.fixture(scope="session")
def make_stepper():
    """make_stepper(checkpoint) -> Stepper."""
    return lambda checkpoint: Stepper(checkpoint.config, checkpoint.params, checkpoint.router_state)


@pytest.fixture(scope="session")
def layerwise():
    """(forward, DirectDepth): the plain reading of the specification, and its bookkeeping of snapshots."""
    return forward, DirectDepth


@pytest.fixture(scope="session")
def stored_caches(golden):
    """stored_caches() -> the K3 caches after 37 tokens as the functions take them, a layer each."""

    def read():
        file = {key.removeprefix("out_"): jnp.asarray(value) for key, value in golden("k3_tiny/decode.npz").items()}
        kda = lambda layer: KDAState(*(file[f"layer{layer}_{part}"] for part in ("conv_q", "conv_k", "conv_v", "state")))
        mla = lambda layer: (file[f"layer{layer}_c"], file[f"layer{layer}_ks"])
        return [mla(layer) if layer in (3, 7) else kda(layer) for layer in range(8)]

    return read


# --- what every golden test measures --------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def mean_loss():
    """mean_loss(logits, tokens, segment_ids=None) -> mean next-token cross-entropy in nats over pairs inside a document."""

    def loss(logits, tokens, segment_ids=None):
        targets, valid = next_token_targets(tokens, segment_ids)
        nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(valid, nats, 0)) / jnp.sum(valid)

    return loss


@pytest.fixture(scope="session")
def assert_logits():
    """assert_logits(actual, expected): float32 logits within 5e-4 everywhere and 5e-5 root mean square."""

    def check(actual, expected):
        error = np.abs(np.asarray(actual, np.float64) - expected)
        rms = np.sqrt(np.mean(error**2))
        assert error.max() < 5e-4 and rms < 5e-5, (error.max(), rms)

    return check


@pytest.fixture(scope="session")
def assert_close():
    """assert_close(actual, expected, tolerance, name): largest difference below tolerance times the largest entry."""

    def check(actual, expected, tolerance, name):
        assert actual.shape == expected.shape, name
        scale = np.abs(expected).max()
        assert scale > 0, f"{name} is zero in the file, which would compare nothing"
        worst = np.abs(np.asarray(actual, np.float64) - expected).max() / scale
        assert worst < tolerance, (name, worst)

    return check


@pytest.fixture(scope="session")
def run_whole(mean_loss):
    """run_whole(checkpoint, tokens, modules) -> HybridLM in float32, compiled once: loss, logits, gradients, and what `modules` give."""

    def run(checkpoint, tokens, modules):
        model = HybridLM(checkpoint.config.replace(dtype="float32"))
        seen = lambda module, _: isinstance(module, modules)

        def objective(params, tokens):
            variables = {"params": params, "router_state": checkpoint.router_state}
            logits, written = model.apply(variables, tokens, mutable=["intermediates"], capture_intermediates=seen)
            return mean_loss(logits, tokens), (logits, written["intermediates"])

        (loss, (logits, written)), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(checkpoint.params, tokens)
        return {"loss": loss, "logits": logits, "intermediates": written, "grads": grads}

    return run
