"""FP4 rows: two e2m1 codes a byte (even dim in the low nibble) and one e8m0 scale per 32 dims.

Everything works on the IEEE bits. XLA's log2 and exp2 are inexact, and its arithmetic may flush subnormals;
integer compares and shifts do neither, so a value quantises to the same bytes on every backend, jitted or not.
"""

import dataclasses
import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from k2i_jax._check import AnyArray, check_array
from k2i_jax.layout import GROUP, PAYLOAD_BYTES, SCALE_BYTES

_INF = 0x7F800000
# Midpoints of the e2m1 grid 0 .5 1 1.5 2 3 4 6 as float32 (exponent field, mantissa): .25 .75 1.25 1.75 2.5 3.5 5
_MIDPOINTS = (
    (125, 0),
    (126, 1 << 22),
    (127, 1 << 21),
    (127, 3 << 21),
    (128, 1 << 21),
    (128, 3 << 21),
    (129, 1 << 21),
)
_TIES_UP_IF_EVEN = (0, 1, 0, 1, 0, 1, 0)  # the midpoints whose even neighbour is the upper one


class FP4Recipe(enum.Enum):
    """How a quantiser rounds: ``(name, smallest scale byte, ties to even, sign kept)``.

    The last one says what a negative value that rounds to zero becomes: code 8 (-0), or code 0. An input of -0
    itself takes code 0 in all three.
    """

    DEEPSEEK = ("deepseek", 1, True, True)  # reference code: amax >= 6 * 2^-126
    SGLANG = ("sglang", 114, True, False)  # its writer and query packer: scale >= 1e-4, i.e. 2^-13
    SGLANG_V4_C4 = ("sglang_v4_c4", 114, False, False)  # V4's older pools: ties go down

    @property
    def label(self) -> str:
        return self.value[0]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["payload", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class FP4Array:
    """FP4 values of shape ``[..., D]``.

    Attributes:
      payload: u8[..., D // 2]; byte i holds dim 2i in its low nibble and dim 2i + 1 in its high one.
      scale: u8[..., D // 32]; e8m0, value ``2^(byte - 127)``, 255 is NaN.
    """

    payload: UInt8[Array, "*batch bytes"]
    scale: UInt8[Array, "*batch groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return (*self.payload.shape[:-1], 2 * self.payload.shape[-1])

    def dequantize(self, dtype: Any = jnp.float32) -> Float[Array, "*batch dims"]:
        """Values in ``dtype``: exact in float32 and bfloat16, save that a backend may flush 2^-127 and below."""
        return _dequantize(self, jnp.dtype(dtype))


def check_fp4(name: str, x: Any, shape: tuple[int | str, ...]) -> None:
    """Raises unless ``x`` is an ``FP4Array`` of ``shape + (128,)``, where a string stands for any size."""
    if not isinstance(x, FP4Array):
        raise TypeError(f"{name}: expected a k2i_jax.FP4Array, got {type(x).__name__}")
    check_array(f"{name}.payload", x.payload, (jnp.uint8,), (*shape, PAYLOAD_BYTES))
    check_array(f"{name}.scale", x.scale, (jnp.uint8,), (*x.payload.shape[:-1], SCALE_BYTES))


def decode_e2m1(codes: UInt8[Array, "*n"]) -> Float32[Array, "*n"]:
    """Values of e2m1 codes 0..15, put together from bits: a factor here could be merged with the scale and overflow."""
    codes = codes.astype(jnp.uint16)
    magnitude = codes & 7
    bits = jnp.where(magnitude >= 2, (magnitude << 9) + 0x3800, magnitude * 0x3800)  # 0x3800 is 0.5 in float16
    return lax.bitcast_convert_type(bits | ((codes & 8) << 12), jnp.float16).astype(jnp.float32)


def decode_e8m0(scale: UInt8[Array, "*n"]) -> Float32[Array, "*n"]:
    """Values of e8m0 bytes, 255 as NaN; byte 0 is the subnormal 2^-127, which a backend may flush to 0."""
    bits = scale.astype(jnp.int32) << 23
    bits = jnp.where(scale == 0, 1 << 22, jnp.where(scale == 255, 0x7FC00000, bits))
    return lax.bitcast_convert_type(bits, jnp.float32)


def scale_by_powers(x: Float32[Array, "*n"], exponent: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    """``x * 2^exponent`` for exponents in [-254, 254]: two factors, as one would not fit float32's range."""
    half = exponent >> 1
    power = lambda e: lax.bitcast_convert_type((jnp.maximum(e, -126) + 127) << 23, jnp.float32)  # 2^-127: zero anyway
    return x * power(half) * power(exponent - half)


def unpack_nibbles(payload: UInt8[Array, "*n bytes"]) -> UInt8[Array, "*n bytes 2"]:
    """Codes of each byte, low nibble (even dim) first."""
    return (payload[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(x: FP4Array, dtype):
    values = decode_e2m1(unpack_nibbles(x.payload)).reshape(*x.scale.shape, GROUP)
    return (values * decode_e8m0(x.scale)[..., None]).reshape(x.shape).astype(dtype)


def quantize_fp4(x: Float[AnyArray, "*batch dims"], recipe: FP4Recipe = FP4Recipe.SGLANG) -> FP4Array:
    """Quantises groups of 32 values along the last axis; the group's scale is ``ceil(log2(amax / 6))``.

    Args:
      x: float32, bfloat16 or float16 ``[..., D]`` with D a multiple of 32. A NaN takes code 0; a group with an
        inf takes scale byte 254 and code +-7 there; other groups are untouched by either.
      recipe: rounding and scale floor.

    Raises:
      TypeError: ``x`` or ``recipe`` of another type.
      ValueError: D is not a multiple of 32.
    """
    _check_floats(x)
    if not isinstance(recipe, FP4Recipe):
        raise TypeError(f"recipe: expected a k2i_jax.FP4Recipe, got {recipe!r}")
    return _quantize(x, recipe)


def _check_floats(x):
    check_array("x", x, (jnp.float32, jnp.bfloat16, jnp.float16), getattr(x, "shape", ("...", "dims")))
    if x.ndim == 0 or x.shape[-1] % GROUP:
        raise ValueError(f"x: the last axis must be a multiple of {GROUP}, got shape {x.shape}")


@functools.partial(jax.jit, static_argnames="recipe")
def _quantize(x, recipe: FP4Recipe) -> FP4Array:
    _, min_byte, ties_to_even, sign_kept = recipe.value
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32).reshape(
        *x.shape[:-1], x.shape[-1] // GROUP, GROUP
    )
    magnitude = bits & 0x7FFFFFFF
    magnitude = jnp.where(magnitude > _INF, 0, magnitude)  # NaN counts as zero
    scale = _scale_byte(jnp.max(magnitude, axis=-1), min_byte)
    code = jnp.zeros_like(magnitude)
    for (exponent, mantissa), up in zip(_MIDPOINTS, _TIES_UP_IF_EVEN, strict=True):
        threshold = _scaled_bits(exponent, mantissa, scale)[..., None]
        code += magnitude >= threshold + (0 if ties_to_even and up else 1)
    code = jnp.where(magnitude == _INF, 7, code)
    negative = (bits < 0) & ((magnitude if sign_kept else code) > 0)  # magnitude is 0 for NaN
    code = (code | jnp.where(negative, 8, 0)).astype(jnp.uint8).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    return FP4Array(code[..., 0] | (code[..., 1] << 4), scale.astype(jnp.uint8))


def _scale_byte(amax: Int32[Array, "*g"], min_byte: int) -> Int32[Array, "*g"]:
    """``127 + ceil(log2(amax / 6))`` from amax's bits: 6 is 1.5 * 2^2, so compare the mantissa with 1.5's."""
    byte = (amax >> 23) - 2 + ((amax & 0x7FFFFF) > 1 << 22)
    return jnp.where(amax == _INF, 254, jnp.clip(byte, min_byte, 254))


def _scaled_bits(exponent: int, mantissa: int, scale: Int32[Array, "*g"]) -> Int32[Array, "*g"]:
    """Bits of a midpoint times ``2^(scale - 127)``, gradual underflow included; inf's bits where it overflows."""
    field = exponent + scale - 127
    normal = jnp.minimum(field << 23 | mantissa, _INF)
    subnormal = ((1 << 23) | mantissa) >> jnp.clip(1 - field, 0, 31)
    return jnp.where(field >= 255, _INF, jnp.where(field >= 1, normal, subnormal))


def fake_quant_fp4(x: Float[Array, "*batch dims"]) -> Float[Array, "*batch dims"]:
    """Quantise (DEEPSEEK) and dequantise, in ``x``'s dtype; the gradient passes straight through.

    Raises:
      TypeError, ValueError: as :func:`quantize_fp4`.
    """
    _check_floats(x)
    return _fake_quant(x)


@jax.custom_jvp
def _fake_quant(x):
    return _dequantize(_quantize(x, FP4Recipe.DEEPSEEK), x.dtype)


@_fake_quant.defjvp
def _fake_quant_jvp(primals, tangents):
    return _fake_quant(*primals), tangents[0]
