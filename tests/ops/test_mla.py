"""Gated MLA: golden vectors (whole, packed, padded, one decode step), absorbed against expanded, gradients, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.ops.mla import (
    MLAWeights,
    absorbed_latent_attention,
    gated_mla,
    latent_attention,
    mla_output,
    mla_project,
)

FOLDERS = ("qlora_gate", "no_qlora_no_gate", "small_latents")
TOLERANCES = {"float64": (1e-9, 1e-9), "float32": (1e-5, 5e-5)}
absorbed = jax.jit(absorbed_latent_attention, static_argnames="block")


def weights_of(case, dtype) -> MLAWeights:
    """Published layout [out,in], rows heads x (nope | rope) and heads x (nope | v) -> MLAWeights."""
    H, N, V, C = (int(case[name]) for name in ("heads", "nope", "v", "kv_lora"))

    def take(name):
        return jnp.asarray(case[f"in_{name}"], dtype)

    D = case["in_x"].shape[-1]
    lora = "in_q_a_proj" in case
    q_up = take("q_b_proj" if lora else "q_proj").T
    kv_up = take("kv_b_proj").T.reshape(C, H, N + V)
    return MLAWeights(
        q_down=take("q_a_proj").T if lora else None,
        q_norm=take("q_a_layernorm") if lora else None,
        q_up=q_up.reshape(q_up.shape[0], H, -1),
        kv_down=take("kv_a_proj_with_mqa").T,
        kv_norm=take("kv_a_layernorm"),
        k_up=kv_up[..., :N],
        v_up=kv_up[..., N:],
        gate=take("g_proj").T.reshape(D, H, V) if "in_g_proj" in case else None,
        out=take("o_proj").T.reshape(H, V, D),
    )


def published_gradients(grad: MLAWeights) -> dict:
    """MLAWeights of gradients -> arrays in the published layout."""

    def two(g):
        return np.asarray(g).reshape(g.shape[0], -1).T

    kv_up = np.concatenate([grad.k_up, grad.v_up], -1)
    out = {
        "kv_a_proj_with_mqa": two(grad.kv_down),
        "kv_a_layernorm": grad.kv_norm,
        "kv_b_proj": two(kv_up),
        "o_proj": np.asarray(grad.out).reshape(-1, grad.out.shape[-1]).T,
    }
    if grad.gate is not None:
        out["g_proj"] = two(grad.gate)
    if grad.q_down is None:
        return out | {"q_proj": two(grad.q_up)}
    return out | {"q_a_proj": two(grad.q_down), "q_a_layernorm": grad.q_norm, "q_b_proj": two(grad.q_up)}


def relative(actual, expected):
    return np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_golden_whole_packed_and_gradients(x64, golden, folder, dtype):
    case, (value_tolerance, gradient_tolerance) = golden(f"mla/{folder}/mla.npz"), TOLERANCES[dtype]
    weights, x = weights_of(case, dtype), jnp.asarray(case["in_x"], dtype)
    _, latent, shared_key = jax.jit(mla_project)(x, weights)
    assert relative(latent, case["out_latent"]) < value_tolerance
    assert relative(shared_key, case["out_shared_key"]) < value_tolerance

    @jax.jit
    def run(x, weights):
        y, pull = jax.vjp(gated_mla, x, weights)
        return y, pull(jnp.asarray(case["in_ct"], dtype))

    y, (dx, d_weights) = run(x, weights)
    assert relative(y, case["out_y"]) < value_tolerance
    assert relative(dx, case["grad_x"]) < gradient_tolerance
    stored = {name[5:] for name in case if name.startswith("grad_")} - {"x"}
    gradients = published_gradients(d_weights)
    assert set(gradients) == stored
    for name, gradient in gradients.items():
        assert relative(gradient, case[f"grad_{name}"]) < gradient_tolerance, name
    packed = jax.jit(gated_mla)(x, weights, segment_ids=jnp.asarray(case["segment_ids"] + 1, jnp.int32))
    assert relative(packed, case["out_y_packed"]) < value_tolerance


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("folder", FOLDERS)
def test_golden_padded_rows_and_one_decode_step(x64, golden, folder, dtype):
    case, tolerance = golden(f"mla/{folder}/mla.npz"), TOLERANCES[dtype][0]
    weights, x = weights_of(case, dtype), jnp.asarray(case["in_x"], dtype)
    lengths = jnp.asarray(case["valid_len"], jnp.int32)
    B, T = x.shape[:2]
    real = jnp.arange(T) < lengths[:, None]
    y = jax.jit(gated_mla)(jnp.where(real[..., None], x, jnp.nan), weights, segment_ids=real.astype(jnp.int32))
    assert relative(y, case["out_y_padded"]) < tolerance

    project = jax.jit(mla_project)
    _, latent, shared_key = project(x, weights)
    q, new_latent, new_key = project(jnp.asarray(case["in_x_new"], dtype), weights)
    assert relative(new_latent, case["out_latent_new"]) < tolerance
    assert relative(new_key, case["out_shared_key_new"]) < tolerance

    def cache(old, new):  # room for three more entries; what is not written holds NaN
        old = jnp.where(real[..., None], old, jnp.nan)
        old = jnp.pad(old, ((0, 0), (0, 3), (0, 0)), constant_values=jnp.nan)
        return old.at[jnp.arange(B), lengths].set(new[:, 0])

    arguments = (q, cache(latent, new_latent), cache(shared_key, new_key), weights.k_up, weights.v_up)
    for block in (7, 256):
        heads = absorbed(*arguments, lengths=lengths + 1, block=block)
        y_new = mla_output(heads, jnp.asarray(case["in_x_new"], dtype), weights)
        assert relative(y_new, case["out_y_new"]) < tolerance


def parts(B, T, H=3, N=6, R=4, C=10, V=5, seed=0, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    shapes = [(B, T, H, N + R), (B, T, C), (B, T, R), (C, H, N), (C, H, V)]
    return [jnp.asarray(rng.normal(size=s), dtype) for s in shapes]


@pytest.mark.parametrize(("new", "block"), [(1, 16), (4, 5), (40, 16)])
def test_absorbed_equals_expanded_for_one_and_several_new_tokens(x64, new, block):
    """Rows of different length in one cache; `new` = 40 is a whole prefill. The last block overlaps the one before."""
    q, latent, shared_key, k_up, v_up = parts(3, 43)
    lengths = jnp.asarray([40, 43, 41], jnp.int32)
    expanded = jax.jit(latent_attention)(q, latent, shared_key, k_up, v_up)
    at = (lengths - new)[:, None] + jnp.arange(new)
    gone = (jnp.arange(43) >= lengths[:, None])[..., None]
    out = absorbed(
        jnp.take_along_axis(q, at[:, :, None, None], axis=1),
        *(jnp.where(gone, jnp.nan, x) for x in (latent, shared_key)),
        k_up,
        v_up,
        lengths=lengths,
        block=block,
    )
    expected = jnp.take_along_axis(expanded, at[:, :, None, None], axis=1)
    assert relative(out, expected) < 1e-12


def test_absorbed_leaves_out_invalid_entries_and_queries_before_the_start(x64):
    q, latent, shared_key, k_up, v_up = parts(2, 20)
    lengths = jnp.asarray([20, 2], jnp.int32)
    valid = jnp.asarray(np.random.default_rng(1).random((2, 20)) < 0.6).at[:, 0].set(True)
    hole = ~valid[..., None]
    dirty = (jnp.where(hole, jnp.nan, x) for x in (latent, shared_key))
    out = absorbed(q[:, -3:], *dirty, k_up, v_up, lengths=lengths, valid=valid, block=8)
    assert np.isfinite(out).all()
    kept = np.flatnonzero(valid[0])
    assert np.all(np.asarray(out[1, 0]) == 0)  # the row holds two tokens, so the first of three queries is before it
    scores = jnp.einsum("hn,chn,kc->hk", q[0, -1, :, :6], k_up, latent[0, kept])
    scores += q[0, -1, :, 6:] @ shared_key[0, kept].T
    p = jax.nn.softmax(scores * 10**-0.5, axis=-1)
    assert relative(out[0, -1], jnp.einsum("hk,kc,chv->hv", p, latent[0, kept], v_up)) < 1e-12


@pytest.mark.parametrize("new", [1, 3])
def test_absorbed_by_any_implementation(x64, new):
    """One softmax over all entries, and the loop over blocks: the same, an empty row and one shorter than what is new included."""
    q, latent, shared_key, k_up, v_up = parts(3, 20)
    lengths = jnp.asarray([20, 0, 2], jnp.int32)
    arguments = (q[:, :new], latent, shared_key, k_up, v_up)
    plain = absorbed_latent_attention(*arguments, lengths=lengths, implementation="reference")
    loop = absorbed_latent_attention(*arguments, lengths=lengths, block=8, implementation="xla")
    assert relative(loop, plain) < 1e-13 and not np.any(plain[1])
    np.testing.assert_array_equal(absorbed_latent_attention(*arguments, lengths=lengths, block=8), loop)


def test_absorbed_block_count_follows_the_longest_row():
    """A cache of a million entries that holds 5 tokens reads one block: NaN everywhere else, and no large temporary."""
    q, latent, shared_key, k_up, v_up = parts(1, 5, dtype=jnp.float32)
    expected = jax.jit(latent_attention)(q, latent, shared_key, k_up, v_up)[:, -1:]
    cache = [jnp.pad(x, ((0, 0), (0, 2**20 - 5), (0, 0)), constant_values=jnp.nan) for x in (latent, shared_key)]
    step = jax.jit(lambda *a: absorbed_latent_attention(*a, lengths=jnp.asarray([5], jnp.int32)))
    compiled = step.lower(q[:, -1:], *cache, k_up, v_up).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1e6
    assert relative(compiled(q[:, -1:], *cache, k_up, v_up), expected) < 1e-5


def test_padding_reaches_neither_output_nor_any_gradient(x64, golden):
    case = golden("mla/small_latents/mla.npz")
    weights, x = weights_of(case, "float64"), jnp.asarray(case["in_x"], jnp.float64)
    ids = np.repeat([[0, 1, 1, 0, 1, 2, 0, 3]], 3, axis=1).reshape(1, -1)
    ids = jnp.asarray(np.sort(ids, axis=1) * (np.arange(24) % 5 != 2), jnp.int32).repeat(2, axis=0)
    hole = (ids == 0)[..., None]

    @jax.jit
    def run(x, ct):
        y, pull = jax.vjp(lambda x, w: gated_mla(x, w, segment_ids=ids), x, weights)
        return y, pull(ct)

    ct = jnp.asarray(case["in_ct"], jnp.float64)
    dirty, clean = run(jnp.where(hole, jnp.nan, x), jnp.where(hole, 7.0, ct)), run(jnp.where(hole, 0, x), ct * ~hole)
    for a, b in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.all(np.where(hole, dirty[0], 0) == 0)


def test_rotary_control_rotates_only_the_shared_key_dimensions(x64, golden):
    """Shifting all positions changes nothing; the positions themselves do; decode after rotation agrees."""
    case = golden("mla/qlora_gate/mla.npz")
    weights, x = weights_of(case, "float64"), jnp.asarray(case["in_x"], jnp.float64)
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    layer, project = jax.jit(gated_mla), jax.jit(mla_project)
    rotated = layer(x, weights, positions=positions)
    assert relative(layer(x, weights, positions=positions + 1000), rotated) < 1e-9
    assert relative(layer(x, weights), rotated) > 1e-2
    q, latent, shared_key = project(x, weights, positions=positions)
    plain = project(x, weights)
    np.testing.assert_array_equal(q[..., : weights.k_up.shape[2]], plain[0][..., : weights.k_up.shape[2]])
    lengths = jnp.full((x.shape[0],), x.shape[1], jnp.int32)
    last = absorbed(q[:, -1:], latent, shared_key, weights.k_up, weights.v_up, lengths=lengths)
    assert relative(mla_output(last, x[:, -1:], weights), rotated[:, -1:]) < 1e-9


def test_prefix_is_bit_equal_when_only_the_future_changes(golden):
    case = golden("mla/qlora_gate/mla.npz")
    weights, x = weights_of(case, "float32"), jnp.asarray(case["in_x"])
    before = (jnp.arange(x.shape[1]) < 33)[None, :, None]

    @jax.jit
    def run(x):
        y, pull = jax.vjp(lambda x: gated_mla(x, weights), x)
        return y, pull(jnp.where(before, case["in_ct"], 0))[0]

    for a, b in zip(run(x), run(jnp.where(before, x, -5 * x)), strict=True):
        np.testing.assert_array_equal(a[:, :33], b[:, :33])


def test_bfloat16_stays_within_its_rounding(golden):
    case = golden("mla/qlora_gate/mla.npz")
    y = jax.jit(gated_mla)(jnp.asarray(case["in_x"], jnp.bfloat16), weights_of(case, "float32"))
    assert y.dtype == jnp.bfloat16
    assert relative(y, case["out_y"]) < 2e-2


def test_bad_input_is_refused(golden):
    case = golden("mla/small_latents/mla.npz")
    weights, x = weights_of(case, "float32"), jnp.asarray(case["in_x"])
    q, latent, shared_key, k_up, v_up = parts(2, 6, dtype=jnp.float32)
    lengths = jnp.asarray([6, 6], jnp.int32)

    def refused(*a, **kw):
        return absorbed_latent_attention(*a, **({"lengths": lengths} | kw))

    bad = [
        (lambda: gated_mla(x[0], weights), "axes"),
        (lambda: gated_mla(x.astype(jnp.float16), weights), "float16"),
        (lambda: gated_mla(x[:, :0], weights), "empty"),
        (lambda: gated_mla(x, weights._replace(out=weights.out[:1])), "out has shape"),
        (lambda: gated_mla(x, weights._replace(gate=weights.gate[..., :1])), "gate has shape"),
        (lambda: gated_mla(x, weights._replace(q_norm=None)), "together"),
        (lambda: gated_mla(x, weights, segment_ids=jnp.ones((2, 3), jnp.int32)), "segment_ids"),
        (lambda: latent_attention(q[:, :3], latent, shared_key, k_up, v_up), "one latent a query"),
        (lambda: latent_attention(q, latent, shared_key[..., :2], k_up, v_up), r"N\+R"),
        (lambda: latent_attention(q, latent, shared_key, k_up[:, :2], v_up), "heads"),
        (lambda: refused(q, latent, shared_key, k_up, v_up, lengths=lengths[:1]), "lengths"),
        (lambda: refused(q, latent, shared_key, k_up, v_up, valid=jnp.ones((2, 6))), "bool"),
        (lambda: refused(q, latent, shared_key, k_up, v_up, implementation="cuda"), "known: xla, reference, triton"),
        (lambda: refused(q, latent, shared_key, k_up, v_up, block=0), "block=0"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
