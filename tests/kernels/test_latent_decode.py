"""latent_decode on every platform: the loop in XLA against the formula in float64, what must never be read, errors, the choice.

Shapes: B rows, T new tokens, H heads, S capacity, C latent width, R width of the shared key.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.kda import triton_launch
from moejax.kernels.latent_decode import api, latent_decode

B, H, S, C, R = 4, 3, 150, 6, 4
LENGTHS = (150, 0, 1, 67)


def make(T=1, dtype=np.float64, seed=0, lengths=LENGTHS, S=S, C=C, R=R):
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    arrays = (rng.normal(size=shape) for shape in ((rows, T, H, C + R), (rows, S, C), (rows, S, R)))
    return *(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(lengths, jnp.int32)


def softmax_of_one(q, latent, shared_key, seen):
    """One query [C+R] over the entries where seen [S] is true, by NumPy -> [C]"""
    keys = np.concatenate([latent, shared_key], -1)[seen]
    if not len(keys):
        return np.zeros(latent.shape[-1])
    scores = 0.3 * keys @ q
    p = np.exp(scores - scores.max())
    return (p / p.sum()) @ latent[seen]


def relative(got, wanted):
    return np.abs(np.asarray(got, np.float64) - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("holes", [False, True])
def test_reference_is_the_formula(x64, holes):
    """Three queries a row, of rows that hold fewer tokens too: a query before position 0 sees nothing."""
    q, latent, shared_key, lengths = make(T=3)
    valid = jnp.asarray(np.random.default_rng(1).random((B, S)) < 0.5) if holes else None
    got = latent_decode(q, latent, shared_key, lengths, valid=valid, scale=0.3, implementation="reference")
    for b, length in enumerate(LENGTHS):
        for t in range(3):
            seen = np.arange(S) <= length - 3 + t
            if holes:
                seen &= np.asarray(valid[b])
            for h in range(H):
                wanted = softmax_of_one(*(np.asarray(x) for x in (q[b, t, h], latent[b], shared_key[b])), seen)
                np.testing.assert_allclose(got[b, t, h], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("T", "block", "holes"), [(1, 16, False), (1, 1024, True), (3, 7, True), (5, 150, False)])
def test_loop_equals_reference(x64, T, block, holes):
    """Ragged rows, one empty, in blocks that do not divide S; what no query may use holds NaN."""
    q, latent, shared_key, lengths = make(T=T)
    valid = jnp.asarray(np.random.default_rng(1).random((B, S)) < 0.5) if holes else None
    wanted = latent_decode(q, latent, shared_key, lengths, valid=valid, scale=0.3, implementation="reference")
    exists = (jnp.arange(S) < lengths[:, None]) & (True if valid is None else valid)
    dirty = [jnp.where(exists[..., None], x, jnp.nan) for x in (latent, shared_key)]
    for name in ("xla", "reference"):
        run = jax.jit(lambda *a, name=name: latent_decode(*a, valid=valid, scale=0.3, block=block, implementation=name))
        got = run(q, *dirty, lengths)
        assert got.shape == (B, T, H, C) and got.dtype == jnp.float64
        assert relative(got, wanted) < 1e-13
        assert not np.any(got[1])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 1e-2)])
def test_dtypes(dtype, tolerance):
    operands = make(T=2, dtype=dtype)
    got = jax.jit(lambda *a: latent_decode(*a, scale=0.3, block=32))(*operands)
    assert got.dtype == dtype
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in operands[:3]]
        wanted = latent_decode(*wide, operands[3], scale=0.3, implementation="reference")
    assert relative(got, wanted) < tolerance


def test_lengths_past_the_capacity_and_a_future_that_changes():
    """More entries than there is room for are those there are; what lies after a row's length changes no bit."""
    q, latent, shared_key, _ = make(dtype=np.float32)
    run = jax.jit(lambda *a: latent_decode(*a, scale=0.3, block=64))
    full = run(q, latent, shared_key, jnp.full(B, S, jnp.int32))
    np.testing.assert_array_equal(full, latent_decode(q, latent, shared_key, jnp.full(B, S), scale=0.3, block=64, implementation="xla"))
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    gone = (jnp.arange(S) >= lengths[:, None])[..., None]
    changed = [jnp.where(gone, -7 * x, x) for x in (latent, shared_key)]
    np.testing.assert_array_equal(run(q, latent, shared_key, lengths), run(q, *changed, lengths))


def test_vmap():
    one, two = make(dtype=np.float32), make(dtype=np.float32, seed=1, lengths=(3, 9, 150, 20))
    run = lambda *a: latent_decode(*a, scale=0.3, block=64)
    both = jax.vmap(run)(*(jnp.stack(x) for x in zip(one, two, strict=True)))
    for got, operands in zip(both, (one, two), strict=True):
        np.testing.assert_allclose(got, run(*operands), rtol=1e-5, atol=1e-6)


def test_bad_input():
    q, latent, shared_key, lengths = make(dtype=np.float32)
    operands = dict(q=q, latent=latent, shared_key=shared_key, lengths=lengths, scale=0.3)
    for changed, match in (
        ({"q": q[:, 0]}, r"q has shape .* 4 axes"),
        ({"latent": latent[0]}, r"latent has shape .* 3 axes"),
        ({"q": q.astype(jnp.float16)}, "float16"),
        ({"q": q[:, :0]}, "empty"),
        ({"q": q[:2]}, "do not agree"),
        ({"shared_key": shared_key[:, :3]}, "do not agree"),
        ({"q": q[..., 1:]}, r"C\+R = 6\+4"),
        ({"lengths": lengths[:2]}, "lengths"),
        ({"lengths": lengths.astype(jnp.float32)}, "lengths"),
        ({"valid": jnp.ones((B, S))}, "valid"),
        ({"valid": jnp.ones((B, 3), bool)}, "valid"),
        ({"block": 0}, "block"),
        ({"scale": None}, "scale=None"),
        ({"scale": "large"}, "scale"),
        ({"implementation": "cuda"}, "known: xla, reference, triton"),
    ):
        with pytest.raises(ValueError, match=match):
            latent_decode(**(operands | changed))


def test_choice(monkeypatch):
    """By name the kernel runs or says why not; the choice puts it where a call is lowered for cuda and nowhere else."""
    operands = make(dtype=jnp.bfloat16, C=64, R=16)
    monkeypatch.setattr(triton_launch, "available", lambda: None)
    with pytest.raises(NotImplementedError, match="of latent_decode cannot run: its kernels run on NVIDIA GPUs, this is 'cpu'"):
        latent_decode(*operands, scale=0.3, implementation="triton")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    widths = (32, 16), (192, 64), (1024, 64), (64, 8), (64, 48), (64, 128)
    for other, options, match in (
        (make(dtype=np.float32, C=64, R=16), {}, "takes bfloat16, here float32"),
        (make(dtype=jnp.bfloat16), {}, "powers of two, C from 64 to 512 and R from 16 to 64, here 6 and 4"),
        *((make(dtype=jnp.bfloat16, C=C, R=R, S=3), {}, f"here {C} and {R}") for C, R in widths),
        (make(dtype=jnp.bfloat16, T=5, C=64, R=16), {}, "at most 4 new tokens, here 5"),
        (operands, {"valid": jnp.ones((B, S), bool)}, "no `valid`"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            latent_decode(*other, scale=0.3, implementation="triton", **options)

    def with_stand_in(name, what, kernels, plain, operands, run=api.run_differentiating_plain):
        return run(name, what, lambda q, latent, *_: latent[:, : q.shape[1], None, :] + 0 * q[..., :64], plain, operands)

    monkeypatch.setattr(api, "run_differentiating_plain", with_stand_in)
    for platform, loops in (("cuda", 0), ("cpu", 1), ("tpu", 1)):
        text = jax.jit(lambda *a: latent_decode(*a, scale=0.3)).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.while") == loops
