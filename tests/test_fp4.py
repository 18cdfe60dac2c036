"""Quantisation to the byte: golden files, an exact quantiser in float64, and the inputs that break others."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, golden
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from k2i_jax import FP4Array, FP4Recipe, fake_quant_fp4, quantize_fp4

RECIPES = list(FP4Recipe)
MIN_BYTE = {FP4Recipe.DEEPSEEK: 1, FP4Recipe.SGLANG: 114, FP4Recipe.SGLANG_V4_C4: 114}
GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def exact_quantise(x, recipe):
    """``(codes u8[..., D], scale u8[..., D/32])`` of float values, by exact float64 arithmetic."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        groups = np.asarray(x).astype(np.float64).reshape(*np.shape(x)[:-1], -1, 32)
    magnitude = np.where(np.isnan(groups), 0, np.abs(groups))
    amax = magnitude.max(axis=-1)
    fraction, exponent = np.frexp(np.where(np.isinf(amax), 1.0, amax))  # 6 = 0.75 * 2^3
    byte = np.where(amax == 0, 0, 127 + exponent - 3 + (fraction > 0.75))
    byte = np.where(np.isinf(amax), 254, np.clip(byte, MIN_BYTE[recipe], 254))
    scaled = np.ldexp(np.minimum(magnitude, 1e300), 127 - byte[..., None])
    distance = np.abs(np.minimum(scaled, 6.0)[..., None] - GRID)
    ties_down = recipe is FP4Recipe.SGLANG_V4_C4  # argmin takes the first of equals
    order = np.arange(8) if ties_down else np.array([0, 2, 4, 6, 1, 3, 5, 7])
    codes = order[np.argmin(distance[..., order], axis=-1)]
    negative = (groups < 0) & ((codes > 0) | (recipe is FP4Recipe.DEEPSEEK))
    return (codes | np.where(negative, 8, 0)).reshape(np.shape(x)).astype(np.uint8), byte.astype(np.uint8)


def codes_of(x: FP4Array) -> np.ndarray:
    payload = np.asarray(x.payload)
    return np.stack([payload & 15, payload >> 4], axis=-1).reshape(x.shape)


def check_exact(x, recipe):
    ours = quantize_fp4(x, recipe)
    codes, scale = exact_quantise(x, recipe)
    assert np.array_equal(ours.scale, scale)
    assert np.array_equal(codes_of(ours), codes)


@pytest.mark.parametrize(("recipe", "name"), [(FP4Recipe.SGLANG, "rne"), (FP4Recipe.SGLANG_V4_C4, "threshold")])
def test_golden_quantise(recipe, name):
    file = golden("quantise")
    ours = quantize_fp4(file["x"], recipe)
    assert np.array_equal(ours.payload, file[f"{name}_bytes"])
    assert np.array_equal(ours.scale, cases.packed_scales(file[f"{name}_scale_i32"]))


def test_golden_fake_quant_and_twice():
    """Down to the signs of zero; the second quantisation starts from the first one's values."""
    file = golden("quantise")
    fake = fake_quant_fp4(jnp.asarray(file["x_bf16"], jnp.bfloat16))
    assert fake.dtype == jnp.bfloat16
    assert np.array_equal(bits(fake.astype(jnp.float32)), bits(file["fake_quant"]))
    twice = quantize_fp4(fake, FP4Recipe.SGLANG)
    assert np.array_equal(twice.payload, file["twice_bytes"])
    assert np.array_equal(twice.scale, cases.packed_scales(file["twice_scale_i32"]))


@pytest.mark.parametrize("side", ["k", "q"])
def test_golden_chain(side):
    chain = golden("chain")
    fake = fake_quant_fp4(jnp.asarray(chain[f"{side}_rope"], jnp.bfloat16))
    assert np.array_equal(bits(fake.astype(jnp.float32)), bits(chain[f"{side}_fake"]))
    packed = quantize_fp4(fake)
    assert np.array_equal(packed.payload, chain[f"{side}_bytes"])
    if side == "k":
        assert np.array_equal(packed.scale, cases.packed_scales(chain["k_scale_i32"]))
    else:
        head = np.arange(32)
        assert np.array_equal(packed.scale.swapaxes(1, 2), chain["q_scale"][:, 0][:, :, head % 16, head // 16])


@pytest.mark.parametrize("recipe", RECIPES)
@given(bits=hnp.arrays(np.uint32, (4, 64)))
def test_exact_for_any_bit_pattern(recipe, bits):
    check_exact(bits.view(np.float32), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(0, 254))
def test_exact_within_a_few_binades(recipe, seed, exponent):
    """Groups whose values are of one size, from the subnormals up to next to the maximum."""
    rng = np.random.default_rng(seed)
    field = np.clip(exponent + rng.integers(-5, 3, (64, 64)), 0, 254).astype(np.uint32)
    mantissa = rng.integers(0, 2**23, (64, 64), dtype=np.uint32)
    mantissa = np.where(rng.random((64, 64)) < 0.5, mantissa & 0x700000, mantissa)  # halves of them near ties
    check_exact(
        (field << 23 | mantissa | rng.integers(0, 2, (64, 64), dtype=np.uint32) << 31).view(np.float32),
        recipe,
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_16_bit_value(recipe, dtype):
    patterns = np.random.default_rng(0).permutation(2**16).astype(np.uint16).reshape(-1, 64)
    check_exact(patterns.view(dtype), recipe)
    check_exact(np.sort(patterns, axis=None).view(dtype).reshape(-1, 64), recipe)  # neighbours share a group


@pytest.mark.parametrize("recipe", RECIPES)
def test_jit_is_eager(recipe):
    x = golden("quantise")["x"]
    eager, jitted = quantize_fp4(x, recipe), jax.jit(lambda x: quantize_fp4(x, recipe))(x)
    assert np.array_equal(eager.payload, jitted.payload)
    assert np.array_equal(eager.scale, jitted.scale)
    fake = jax.jit(fake_quant_fp4)(x), fake_quant_fp4(x)
    assert np.array_equal(bits(fake[0]), bits(fake[1]))


# (scale byte, code) of a group's maximum: 6.0078125 separates a ceiling from rounding the exponent to even.
MAXIMA = {6.0: (127, 7), 6.0078125: (128, 5), 7.0: (128, 6), 7.5: (128, 6), 8.0: (128, 6)}


@pytest.mark.parametrize("amax", MAXIMA)
@pytest.mark.parametrize("recipe", RECIPES)
def test_scale_is_the_ceiling(recipe, amax):
    byte, code = MAXIMA[amax]
    if amax == 7.0 and recipe is FP4Recipe.SGLANG_V4_C4:
        code = 5  # 7 / 2 is a tie, which goes down there
    x = np.zeros(32, np.float32)
    x[0] = amax
    ours = quantize_fp4(x, recipe)
    assert (ours.scale.item(), codes_of(ours)[0]) == (byte, code)
    assert ours.dequantize()[0] == GRID[code] * 2.0 ** (byte - 127)


@pytest.mark.parametrize("sign", [1, -1])
def test_element_ties_go_to_even(sign):
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))
    x = np.zeros(32, np.float32)
    x[:22] = sign * np.concatenate([ties, below, above, [6.0]])
    even, down, up = [0, 2, 2, 4, 4, 6, 6], [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]
    expected = np.zeros(32, int)
    expected[:22] = [*even, *down, *up, 7]
    signed = np.where((sign < 0) & (expected > 0), expected | 8, expected)
    assert np.array_equal(codes_of(quantize_fp4(x, FP4Recipe.SGLANG)), signed)
    kept = np.where((sign < 0) & (x != 0), expected | 8, expected)  # also the sign of what became zero
    assert np.array_equal(codes_of(quantize_fp4(x, FP4Recipe.DEEPSEEK)), kept)
    expected[:7] = down
    threshold = np.where((sign < 0) & (expected > 0), expected | 8, expected)
    assert np.array_equal(codes_of(quantize_fp4(x, FP4Recipe.SGLANG_V4_C4)), threshold)


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_and_tiny_groups(recipe):
    normal = np.linspace(-3, 6, 32, dtype=np.float32)
    for zero in (np.zeros(32, np.float32), np.full(32, -0.0, np.float32)):
        ours = quantize_fp4(np.concatenate([zero, normal]), recipe)
        alone = quantize_fp4(normal, recipe)
        assert ours.scale[0] == MIN_BYTE[recipe]
        assert not np.asarray(ours.payload[:16]).any()
        assert ours.scale[1] == alone.scale[0]
        assert np.array_equal(ours.payload[16:], alone.payload)
    tiny = np.zeros(32, np.float32)
    tiny[3] = 1e-30
    ours = quantize_fp4(tiny, recipe)  # 1e-30 / 6 lies just above 2^-103
    assert ours.scale[0] == (127 - 102 if recipe is FP4Recipe.DEEPSEEK else 114)
    assert np.isfinite(ours.dequantize()).all()


def test_scale_of_exact_powers():
    """6 * 2^e has the exponent e and the next float above it e + 1, where XLA's log2 and exp2 are inexact."""
    exponents = np.arange(-125, 125)
    amax = np.ldexp(np.float32(6), exponents)
    x = np.zeros((250, 2, 32), np.float32)
    x[:, 0, 0], x[:, 1, 0] = amax, np.nextafter(amax, np.float32(np.inf))
    ours = quantize_fp4(x, FP4Recipe.DEEPSEEK)
    assert np.array_equal(ours.scale[:, 0, 0], 127 + exponents)
    assert np.array_equal(ours.scale[:, 1, 0], 128 + exponents)
    assert np.array_equal(ours.dequantize()[:, 0, 0], amax)


def test_code_table_and_nibble_order():
    payload = np.zeros((3, 16), np.uint8)
    payload[0, :8] = np.arange(0, 16, 2) | np.arange(1, 16, 2) << 4
    payload[1, :2] = 0x21, 0xF8
    values = np.asarray(FP4Array(payload, np.full((3, 1), 127, np.uint8)).dequantize())
    assert np.array_equal(bits(values[0, :16]), bits(np.concatenate([GRID, -GRID]).astype(np.float32)))
    assert np.array_equal(bits(values[1, :4]), bits(np.array([0.5, 1.0, -0.0, -6.0], np.float32)))
    x = np.zeros(32, np.float32)
    x[:3] = 0.5, 1.0, 6.0  # even dim in the low nibble
    assert quantize_fp4(x).payload[0] == 0x21


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_and_inf_stay_where_they_are(recipe):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((8, 128)).astype(np.float32)
    clean = quantize_fp4(x, recipe)
    x[2:] = np.nan
    ours = quantize_fp4(x, recipe)
    assert np.array_equal(ours.payload[:2], clean.payload[:2])
    assert np.array_equal(ours.scale[:2], clean.scale[:2])
    assert not np.asarray(ours.payload[2:]).any()

    x = rng.standard_normal((2, 128)).astype(np.float32)
    clean = quantize_fp4(x, recipe)
    x[0, 5], x[0, 40], x[0, 41] = np.inf, -np.inf, np.nan
    ours, codes = quantize_fp4(x, recipe), codes_of(quantize_fp4(x, recipe))
    assert np.asarray(ours.scale)[0, :2].tolist() == [254, 254]
    assert (codes[0, 5], codes[0, 40], codes[0, 41]) == (7, 15, 0)
    assert np.array_equal(ours.scale[:, 2:], clean.scale[:, 2:])
    assert np.array_equal(codes[:, 64:], codes_of(clean)[:, 64:])
    assert not np.isnan(ours.dequantize()).any()


def test_dequantise_every_scale_byte():
    """Exactly 2^(byte - 127); byte 255 is NaN; byte 0 is 2^-127, which a backend may flush."""
    payload = np.full((256, 16), 0x21, np.uint8)
    values = np.asarray(FP4Array(payload, np.arange(256, dtype=np.uint8)[:, None]).dequantize(), np.float64)
    assert np.array_equal(values[1:255, 1], 2.0 ** np.arange(1 - 127, 255 - 127))
    assert np.array_equal(values[2:255, 0], 2.0 ** np.arange(1 - 127, 254 - 127))
    assert values[0, 1] in (0.0, 2.0**-127)
    assert np.isnan(values[255]).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_quantise_inverts_dequantise(dtype):
    """Whatever a group holds, if its largest code is 7 (else a smaller scale would fit as well)."""
    rng = np.random.default_rng(2)
    keys = cases.random_fp4(rng, 50, scales=(120, 140))
    payload = np.asarray(keys.payload).reshape(50, 4, 16).copy()
    payload[..., 0] = 0x7F
    keys = FP4Array(payload.reshape(50, 64), keys.scale)
    values = keys.dequantize(dtype)
    assert values.dtype == dtype
    for recipe in RECIPES:
        again = quantize_fp4(values, recipe)
        assert np.array_equal(again.scale, keys.scale)
        assert np.array_equal(again.dequantize(), keys.dequantize())
        assert np.array_equal(codes_of(again)[codes_of(again) != 0], codes_of(keys)[codes_of(keys) % 8 != 0])


def test_fake_quant_is_straight_through():
    x = jnp.asarray(golden("quantise")["x"][40:42])
    cotangent = jnp.arange(256, dtype=jnp.float32).reshape(2, 128)
    for function in (fake_quant_fp4, jax.jit(fake_quant_fp4)):
        value, pullback = jax.vjp(function, x)
        assert np.array_equal(pullback(cotangent)[0], cotangent)
        assert not np.array_equal(value, x)


@pytest.mark.parametrize("function", [quantize_fp4, fake_quant_fp4])
def test_errors(function):
    with pytest.raises(TypeError, match=r"x: expected .*int32"):
        function(jnp.zeros((2, 32), jnp.int32))
    with pytest.raises(TypeError, match=r"x: expected .*list"):
        function([1.0] * 32)

    with pytest.raises(ValueError, match=r"x: .*32.*\(2, 33\)"):
        function(jnp.zeros((2, 33)))
    with pytest.raises(ValueError, match=r"x: .*32"):
        jax.jit(function)(jnp.zeros(()))


@pytest.mark.parametrize("function", [quantize_fp4, fake_quant_fp4])
def test_float64_is_refused(function):
    """Not rounded to float32 first, which would round twice."""
    with pytest.raises(TypeError, match=r"x: expected .*float64"):
        function(np.zeros((2, 32)))


def test_recipe_error():
    with pytest.raises(TypeError, match=r"recipe: expected .*FP4Recipe.*'sglang'"):
        quantize_fp4(jnp.zeros(32), "sglang")


def test_no_rows():
    empty = np.zeros((0, 128), np.float32)
    assert quantize_fp4(empty).payload.shape == (0, 64)
    assert fake_quant_fp4(empty).shape == (0, 128)
