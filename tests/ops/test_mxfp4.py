"""MXFP4: golden vectors, every byte and midpoint, NumPy against JAX bit for bit, the straight-through rounding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.ops import mxfp4_decode, mxfp4_encode, mxfp4_fake_quant

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
DTYPES = ("float32", "bfloat16", "float64")
UINTS = {"float32": np.uint32, "bfloat16": np.uint16, "float64": np.uint64}
decode = jax.jit(mxfp4_decode, static_argnames="dtype")
encode = jax.jit(mxfp4_encode)


@pytest.fixture(autouse=True)
def float64(x64):
    """float64 arrays exist on the device; float32 ones stay float32."""


def pack(codes):
    """[...,n] codes 0..15 -> [...,n/2]."""
    codes = np.asarray(codes, np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def bits(values):
    """Patterns, so that -0.0 and subnormals count; every NaN is one value."""
    values = np.asarray(values)
    patterns = values.view(UINTS[values.dtype.name]).copy()
    patterns[np.isnan(values)] = np.asarray(np.nan, values.dtype).view(patterns.dtype)
    return patterns


def same(actual, expected):
    assert np.asarray(actual).dtype == np.asarray(expected).dtype
    np.testing.assert_array_equal(bits(actual), bits(expected))


def nearest(w):
    """The specification in float64, one value after the other: w [n] of one block -> (codes, scale byte)."""
    w = np.asarray(w, np.float64)
    most = np.abs(w).max()
    if most == 0:
        return np.signbit(w) * 8, 125
    byte = min(max(int(np.frexp(most)[1]) - 1 - 2 + 127, 0), 254)
    codes = []
    for value in np.abs(w):
        ratio = min(np.ldexp(value, 127 - byte), 6.0)
        distance = np.abs(MAGNITUDES - ratio)
        closest = np.flatnonzero(distance == distance.min())
        codes.append(next(c for c in closest if len(closest) == 1 or c % 2 == 0))
    return np.array(codes) + np.signbit(w) * 8, byte


def test_golden(golden):
    case = golden("moe/mxfp4.npz")
    for name, source in (("in_w", "packed"), ("in_midpoints", "midpoints_packed")):
        scale, out = ("scale", "out_decoded") if name == "in_w" else ("midpoints_scale", "out_midpoints")
        for run in (mxfp4_encode, lambda w: encode(jnp.asarray(w))):
            codes, scales = run(case[name])
            np.testing.assert_array_equal(codes, case[source])
            np.testing.assert_array_equal(scales, case[scale])
        for dtype in DTYPES:
            expected = case[out].astype(dtype)
            same(mxfp4_decode(case[source], case[scale], dtype=dtype), expected)
            same(decode(jnp.asarray(case[source]), jnp.asarray(case[scale]), dtype=dtype), expected)
    codes = np.repeat(case["all_bytes"][:, None], 16, 1)
    values = mxfp4_decode(codes, np.full((256, 1), 127, np.uint8), dtype="float64")
    same(values.reshape(256, 16, 2), np.repeat(case["out_all_bytes"][:, None], 16, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_at_every_scale_byte(dtype):
    """4096 values against float64 arithmetic, subnormals, infinities and NaN included."""
    codes = np.broadcast_to(np.arange(32) % 16, (256, 32))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    value = np.where(codes >= 8, -1, 1) * np.ldexp(MAGNITUDES[codes & 7], scales.astype(int) - 127)
    with np.errstate(over="ignore"):  # bfloat16 through float32: both round these values to themselves or to inf
        expected = value.astype(np.float32).astype(dtype) if dtype == "bfloat16" else value.astype(dtype)
    expected[255] = np.nan
    host = mxfp4_decode(pack(codes), scales, dtype=dtype)
    assert isinstance(host, np.ndarray)
    same(host, expected)
    same(decode(jnp.asarray(pack(codes)), jnp.asarray(scales), dtype=dtype), expected)


def test_F1_scale_bytes_at_the_ends():
    """TransformerEngine #3262, sglang #25519: byte 0 read as 0, 255 as inf, 134 as the NaN mark."""
    codes = np.tile(np.array([6, 2], np.uint8), (6, 16))  # 4.0 and 1.0
    scales = np.array([0, 1, 127, 134, 254, 255], np.uint8)[:, None]
    for values in (mxfp4_decode(pack(codes), scales), np.asarray(decode(jnp.asarray(pack(codes)), jnp.asarray(scales)))):
        four, one = values[:, 0], values[:, 1]
        np.testing.assert_array_equal(four[:4], np.float32([2.3509887e-38, 4.7019774e-38, 4, 512]))
        np.testing.assert_array_equal(one[:5], np.float32([5.877472e-39, 1.1754944e-38, 1, 128, 1.7014118e38]))
        assert np.isinf(four[4]) and np.isnan(values[5]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_F2_midpoints_round_to_even_and_keep_sticky_bits(dtype):
    """tt-metal #51971, aiter #3992: midpoints rounded away from zero, and bits dropped before rounding."""
    ups = [] if dtype == "bfloat16" else [0.25000006]  # bfloat16 has no such number
    row = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.0, *ups]
    wanted = [6.0, 0.0, 1, 1, 2, 2, 4, 4, -0.0, -1, -1, -2, -2, -4, -4, -0.0, *([0.5] if ups else [])]
    w = np.array(row + [0.0] * (32 - len(row))).astype(dtype)
    expected = np.array(wanted + [0.0] * (32 - len(row))).astype(dtype)
    for power in (-20, 0, 3):  # a power of two moves the scale and nothing else
        factor = np.array(2.0**power).astype(dtype)
        for run in (mxfp4_encode, lambda w: map(np.asarray, encode(jnp.asarray(w)))):
            codes, scales = run(w * factor)
            assert scales.tolist() == [127 + power]
            same(mxfp4_decode(codes, scales, dtype=dtype), expected * factor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_F2_every_code_survives_decode_and_encode(dtype):
    codes = np.broadcast_to(np.arange(32) % 16, (249, 32)).copy()
    codes[:, ::5] = 6  # 4.0 leads some blocks, 6.0 all others
    codes[::2][codes[::2] % 8 == 7] -= 1
    scales = np.arange(2, 251, dtype=np.uint8)[:, None]
    again, bytes_again = mxfp4_encode(mxfp4_decode(pack(codes), scales, dtype=dtype))
    np.testing.assert_array_equal(again, pack(codes))
    np.testing.assert_array_equal(bytes_again, scales)
    again, bytes_again = encode(decode(jnp.asarray(pack(codes)), jnp.asarray(scales), dtype=dtype))
    np.testing.assert_array_equal(again, pack(codes))
    np.testing.assert_array_equal(bytes_again, scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_F2_blocks_of_zeros(dtype):
    w = np.zeros((3, 64), dtype)
    w[1, 5] = -0.0
    for codes, scales in (mxfp4_encode(w), map(np.asarray, encode(jnp.asarray(w)))):
        assert (scales == 125).all()
        same(mxfp4_decode(codes, scales, dtype=dtype), w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_F2_non_finite_weights_are_refused_by_position(dtype, value):
    w = np.ones((2, 50, 64), dtype)
    w[1, 40, 33] = value
    name = str(float(value)).replace("+", "")
    for array in (w, jnp.asarray(w)):
        with pytest.raises(ValueError, match=rf"w\[1, 40, 33\] is {name}; MXFP4 holds finite"):
            mxfp4_encode(array)
    codes, scales = encode(jnp.asarray(w))  # traced: the block says so itself
    decoded = np.asarray(decode(codes, scales))
    assert np.isnan(decoded[1, 40, 32:]).all() and (np.isnan(decoded).sum() == 32)
    np.testing.assert_array_equal(np.asarray(mxfp4_fake_quant(jnp.asarray(w)), np.float32), decoded)


patterns32 = st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32)
near = st.lists(st.sampled_from([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7]), min_size=32, max_size=32)


@settings(max_examples=60, deadline=None)
@given(patterns32, st.booleans(), st.integers(0, 255))
def test_any_finite_block_is_rounded_to_nearest(patterns, together, exponent):
    """Raw float32 patterns: any exponent, or all within a few octaves of one (subnormals with exponent 0)."""
    patterns = np.array(patterns, np.uint32)
    if together:
        field = np.maximum(exponent - (patterns >> 23 & 3), 0).clip(0, 254)
        patterns = (patterns & 0x807FFFFF) | field.astype(np.uint32) << 23
    w = patterns.view(np.float32).copy()
    w[~np.isfinite(w)] = 1.0
    check_block(w)


@settings(max_examples=60, deadline=None)
@given(near, st.integers(-155, 125), st.integers(0, 2**32 - 1))
def test_any_block_near_midpoints_is_rounded_to_nearest(values, power, seed):
    """Midpoints and their neighbours at any scale, down to where they are subnormal."""
    rng = np.random.default_rng(seed)
    w = np.ldexp(np.float32(values), power) * rng.choice([-1, 1], 32).astype(np.float32)
    for step in (np.inf, -np.inf):
        w = np.where(rng.random(32) < 0.3, np.nextafter(w, np.float32(step)), w)
    check_block(w[np.isfinite(w)].repeat(2)[:32] if not np.isfinite(w).all() else w)


def check_block(w):
    """NumPy and JAX against the specification, for float32, its float64 and its bfloat16 rounding; then a round trip."""
    wide = w.astype(np.float64) * 2.0**3
    with np.errstate(over="ignore"):
        narrow = w.astype(ml_dtypes.bfloat16)
    for block in (w, wide, narrow):
        if not np.isfinite(block).all():
            continue
        expected, byte = nearest(block)
        codes, scales = mxfp4_encode(block)
        np.testing.assert_array_equal(codes, pack(expected))
        assert scales.tolist() == [byte]
        for device, host in zip(encode(jnp.asarray(block)), (codes, scales), strict=True):
            np.testing.assert_array_equal(device, host)
        values = mxfp4_decode(codes, scales, dtype=block.dtype)
        again = mxfp4_decode(*mxfp4_encode(values), dtype=block.dtype)
        same(again, values)


def test_float64_beyond_float32():
    """Scale bytes saturate at 0 and 254, codes at 6; float64 holds 2^129, float32 does not."""
    w = np.zeros((3, 32))
    w[:, 0] = [2.0**129, 1e300, 1e-300]
    codes, scales = mxfp4_encode(w)
    assert scales[:, 0].tolist() == [254, 254, 0]
    np.testing.assert_array_equal(mxfp4_decode(codes, scales, dtype="float64")[:, 0], [2.0**129, 6 * 2.0**127, 0])
    assert np.isinf(mxfp4_decode(codes, scales)[0, 0])
    for device, host in zip(encode(jnp.asarray(w)), (codes, scales), strict=True):
        np.testing.assert_array_equal(device, host)


def test_any_layout_on_the_host():
    """Leading axes, more blocks than one step takes, strided and reversed input."""
    w = np.random.default_rng(0).normal(size=(3, 96, 700)).astype(np.float32)
    turned = w.transpose(0, 2, 1)[:, ::-1]
    codes, scales = mxfp4_encode(turned)
    assert codes.shape == (3, 700, 48) and scales.shape == (3, 700, 3)
    for got, expected in zip((codes, scales), mxfp4_encode(turned.copy()), strict=True):
        np.testing.assert_array_equal(got, expected)
    row, byte = nearest(turned[2, 699, 64:])
    np.testing.assert_array_equal(codes[2, 699, 32:], pack(row))
    assert scales[2, 699, 2] == byte
    same(mxfp4_decode(codes[:, ::2], scales[:, ::2]), mxfp4_decode(codes, scales)[:, ::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_quant_is_decode_of_encode_with_an_identity_gradient(dtype):
    w = np.random.default_rng(1).normal(size=(2, 64, 40)).astype(dtype)
    expected = np.swapaxes(mxfp4_decode(*mxfp4_encode(np.swapaxes(w, 1, 2)), dtype=dtype), 1, 2)
    for axis in (1, -2):
        same(jax.jit(mxfp4_fake_quant, static_argnames="axis")(w, axis=axis), expected)
    last = np.swapaxes(w, 1, 2)
    same(mxfp4_fake_quant(jnp.asarray(last)), np.swapaxes(expected, 1, 2))
    same(jax.vmap(lambda x: mxfp4_fake_quant(x, axis=0))(w), expected)
    assert not np.array_equal(expected, w)

    cotangent = np.random.default_rng(2).normal(size=w.shape).astype(dtype)
    value, pull = jax.vjp(lambda x: mxfp4_fake_quant(x, axis=1), jnp.asarray(w))
    same(value, expected)
    same(pull(jnp.asarray(cotangent))[0], cotangent)
    same(jax.jvp(lambda x: mxfp4_fake_quant(x, axis=1), (jnp.asarray(w),), (jnp.asarray(cotangent),))[1], cotangent)


def test_without_64_bit_mode():
    w = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    codes, scales = mxfp4_encode(w)
    with jax.enable_x64(False):
        same(mxfp4_fake_quant(jnp.asarray(w)), mxfp4_decode(codes, scales))
        with pytest.raises(ValueError, match="64-bit mode"):
            mxfp4_decode(jnp.asarray(codes), jnp.asarray(scales), dtype="float64")


def test_bad_input_is_one_clear_error():
    w, codes, scales = np.ones((2, 64), np.float32), np.zeros((2, 32), np.uint8), np.zeros((2, 2), np.uint8)
    bad = [
        (lambda: mxfp4_encode(w[:, :48]), r"\(2, 48\); its last axis must be a positive multiple of 32"),
        (lambda: mxfp4_encode(w[:, :0]), "multiple of 32"),
        (lambda: mxfp4_encode(w[0, 0]), "multiple of 32"),
        (lambda: mxfp4_encode(w.astype(np.float16)), "float16"),
        (lambda: mxfp4_encode(w.astype(np.int32)), "int32"),
        (lambda: mxfp4_decode(codes, scales, dtype="float16"), "float16"),
        (lambda: mxfp4_decode(codes, scales, dtype="int8"), "int8"),
        (lambda: mxfp4_decode(codes.astype(np.int8), scales), "must be uint8"),
        (lambda: mxfp4_decode(codes, scales[:, :1]), r"\[...,n/2\] and \[...,n/32\]"),
        (lambda: mxfp4_decode(codes[:1], scales), r"\(1, 32\)"),
        (lambda: mxfp4_decode(codes[0], scales), r"\(32,\)"),
        (lambda: mxfp4_decode(codes[:, :0], scales[:, :0]), "positive"),
        (lambda: mxfp4_fake_quant(w, axis=0), "axis 0 must be a positive multiple"),
        (lambda: mxfp4_fake_quant(w, axis=2), "axis is 2"),
        (lambda: mxfp4_fake_quant(w.astype(np.float16)), "float16"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
