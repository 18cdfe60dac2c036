"""Operations Pallas lacks, as primitives for kernel bodies: the FP4 dot, exact FP4 decoding, the sum over heads.

Each has two rules: one that lowers to Triton, and one in jax.numpy for interpret mode, written so that its bits do
not depend on tile shapes or on what else XLA puts into the same program.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from k2i_jax.fp4 import scale_by_powers
from k2i_jax.kernels import _jax_private as private

GROUP_BYTES = 16  # payload bytes that share one scale: 32 dims
HEADS = 32  # heads a dot


def iota(shape, dim):
    """``broadcasted_iota`` in int32, whatever jax_enable_x64 says."""
    return lax.broadcasted_iota(jnp.int32, shape, dim)


def float_bits(bits):
    """The f32 with these int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def e8m0(scale):
    """f32 value of e8m0 bytes given as int32: 2^(scale - 127); 255 is NaN; 0, a subnormal, may become zero."""
    bits = jnp.where(scale == 0, 0x00400000, scale << 23)
    return float_bits(jnp.where(scale == 255, 0x7FC00000, bits))


def e2m1(code):
    """f32 value of e2m1 codes given as int32 0..15."""
    magnitude = code & 7
    bits = jnp.where(magnitude >= 2, (magnitude << 22) + 0x3F000000, magnitude * 0x3F000000)
    return float_bits(bits | ((code & 8) << 28))


def add_groups(group):
    """Sum of four scale groups' partial dots, in the project's fixed order."""
    return (group(0) + group(1)) + (group(2) + group(3))


def _group_sums(a, b):
    """[M, 4, n] x [4, n, N] -> [4, M, N]. Exact for codes times one power of two a group, so in any order."""
    dims = (((2,), (1,)), ((1,), (0,)))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


# --- dot_scaled -----------------------------------------------------------------------------------------------------


def dot_scaled(a, a_scale, b, b_scale):
    """Scaled FP4 matrix product.

    Args:
      a: u8[M, 64], e2m1 pairs along K = 128, the even k in the low nibble.
      a_scale: u8[M, 4], e8m0 per 32 k.
      b: u8[64, N].
      b_scale: u8[N, 4].

    Returns:
      f32[M, N]. In a Triton kernel ``tt.dot_scaled``, gfx950's FP4 matrix instruction; on AMD GPUs without one an
      exact bf16 decode and two dots. In interpret mode every group is exact and the four are added in a fixed order.
      A scale byte 255 gives NaN; on gfx950 that NaN may have its sign set, which ``sum_heads`` counts as zero.
    """
    return _dot_scaled_p.bind(a, a_scale, b, b_scale)


def _dot_scaled_shape(a, a_scale, b, b_scale):
    m, n = a.shape[0], b.shape[1]
    expected = ((m, 64), (m, 4), (64, n), (n, 4))
    if (a.shape, a_scale.shape, b.shape, b_scale.shape) != expected:
        raise ValueError(f"dot_scaled: expected shapes {expected}, got {[x.shape for x in (a, a_scale, b, b_scale)]}")
    return (m, n), jnp.float32


def _dot_scaled_jnp(a, a_scale, b, b_scale):
    m, n = a.shape[0], b.shape[1]
    a = a.astype(jnp.int32).reshape(m, 4, GROUP_BYTES)
    b = b.astype(jnp.int32).reshape(4, GROUP_BYTES, n)
    a_scale, b_scale = a_scale.astype(jnp.int32), b_scale.astype(jnp.int32)
    sums = _group_sums(e2m1(a & 15), e2m1(b & 15)) + _group_sums(e2m1(a >> 4), e2m1(b >> 4))

    def group(c):
        ka, kb = a_scale[:, c, None], b_scale[None, :, c]
        return jnp.where((ka == 255) | (kb == 255), jnp.nan, scale_by_powers(sums[c], ka + kb - 254))

    return add_groups(group)


def _decoded_dot(a, a_scale, b, b_scale):
    """The same through bf16, which holds every e2m1 value times every e8m0 scale: for GPUs without an FP4 unit."""
    m, n = a.shape[0], b.shape[1]
    a_scale = jnp.broadcast_to(e8m0(a_scale.astype(jnp.int32))[:, :, None], (m, 4, GROUP_BYTES)).reshape(m, 64)
    b_scale = e8m0(b_scale.astype(jnp.int32)).T[:, None, :]
    b_scale = jnp.broadcast_to(b_scale, (4, GROUP_BYTES, n)).reshape(64, n)
    a, b = a.astype(jnp.int32), b.astype(jnp.int32)
    decode = lambda code, scale: (e2m1(code & 15) * scale).astype(jnp.bfloat16)
    low = plt.dot(decode(a, a_scale), decode(b, b_scale))
    return low + plt.dot(decode(a >> 4, a_scale), decode(b >> 4, b_scale))


def _dot_scaled_triton(ctx, *operands):
    if private.platform(ctx) == "rocm" and private.gpu_kind().startswith(("gfx90", "gfx94")):
        return private.triton_rule_of(_decoded_dot)(ctx, *operands)
    return private.build_dot_scaled(ctx, *operands)


_dot_scaled_p = private.new_primitive("k2i_dot_scaled", _dot_scaled_shape, _dot_scaled_jnp, _dot_scaled_triton)

# --- e2m1 codes to f16 ----------------------------------------------------------------------------------------------


def unpack_low(words):
    """The low nibbles' e2m1 values, times 2^-14, exactly.

    Args:
      words: i32[..., W], four bytes each, W even.

    Returns:
      f16[..., W, 2, 2]: byte ``2 h + e`` of word ``2 p + j`` at ``[..., 2 p + e, j, h]``. On NVIDIA GPUs a register
      then holds two bytes of one word; it takes for granted that a thread holds words 2p and 2p + 1 side by side.
    """
    return _unpack_low_p.bind(words)


def unpack_high(words):
    """The same of the high nibbles."""
    return _unpack_high_p.bind(words)


def f16_code(code):
    """f16 of e2m1 codes given as int32 0..15: their value times 2^-14, which is bits alone."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)


_join_p = private.new_primitive(
    "k2i_join",
    lambda x, y: ((*x.shape, 2), x.dtype),
    lambda x, y: jnp.stack([x, y], axis=-1),
    lambda ctx, x, y: private.build_join(x, y),
)

# A code goes to bits 1..3 and 7 of its byte, four at a time: the upper half of its f16. Then to two registers a word.
_PTX_WORD = """{code} lop3.b32 t, {sign}, 0x80808080, a, 0xEA;
prmt.b32 ${low}, t, 0, 0x1404; prmt.b32 ${high}, t, 0, 0x3424;"""
_PTX_LOW = "shl.b32 a, {word}, 1; and.b32 a, a, 0x0E0E0E0E; shl.b32 b, {word}, 4;"
_PTX_HIGH = "shr.b32 a, {word}, 3; and.b32 a, a, 0x0E0E0E0E;"


def _ptx(code: str, sign: str) -> str:
    """Two words' codes, ``$4`` and ``$5``, to ``$0`` to ``$3``."""
    words = [
        _PTX_WORD.format(code=code.format(word=word), sign=sign.format(word=word), low=2 * j, high=2 * j + 1)
        for j, word in enumerate(("$4", "$5"))
    ]
    return "{ .reg .b32 a, b, t; " + " ".join(words) + " }"


def _new_unpack(name: str, shift: int, ptx: str):
    def decode(words):
        pairs = words.reshape(*words.shape[:-1], -1, 2)
        codes = [f16_code((pairs >> (8 * byte + shift)) & 15) for byte in range(4)]
        halves = _join_p.bind(_join_p.bind(codes[0], codes[1]), _join_p.bind(codes[2], codes[3]))  # [.., p, j, e, h]
        return halves.swapaxes(-3, -2).reshape(*words.shape, 2, 2)

    def triton(ctx, words):
        if private.platform(ctx) != "cuda":
            return private.triton_rule_of(decode)(ctx, words)
        codes = private.build_unpack(ptx, "=&r,=&r,=&r,=&r,r,r", words)
        return private.build_join(private.build_join(codes[0], codes[2]), private.build_join(codes[1], codes[3]))

    return private.new_primitive(name, lambda x: ((*x.shape, 2, 2), jnp.float16), decode, triton)


_unpack_low_p = _new_unpack("k2i_unpack_low", 0, _ptx(_PTX_LOW, "b"))
_unpack_high_p = _new_unpack("k2i_unpack_high", 4, _ptx(_PTX_HIGH, "{word}"))

# --- a scalar that every lane shares ---------------------------------------------------------------------------------


def uniform(x):
    """The i32 scalar ``x``, held once for all lanes of a warp rather than in a register of each."""
    return _uniform_p.bind(x)


_uniform_p = private.new_primitive(
    "k2i_uniform",
    lambda x: (x.shape, x.dtype),
    lambda x: x,
    lambda ctx, x: private.build_uniform(x, private.platform(ctx)),
)


def opaque(x):
    """``x`` of 32-bit elements; in a GPU kernel the compiler keeps them, and computes none of them a second time."""
    return _opaque_p.bind(x)


_opaque_p = private.new_primitive(
    "k2i_opaque",
    lambda x: (x.shape, x.dtype),
    lambda x: x,
    lambda ctx, x: private.build_opaque(x, private.platform(ctx)),
)


@functools.cache
def _limit_registers_p(count: int):
    def lower(ctx, x):
        if private.platform(ctx) == "cuda":
            private.set_max_registers(count)
        return x

    return private.new_primitive(f"k2i_limit_registers_{count}", lambda x: (x.shape, x.dtype), lambda x: x, lower)


def limit_registers(x, count: int | None):
    """``x``; the kernel it is used in gets at most ``count`` registers a thread on NVIDIA GPUs."""
    return x if count is None else _limit_registers_p(count).bind(x)


# --- dot of decoded operands ----------------------------------------------------------------------------------------


def dot_decoded(low, high, q_low, q_high):
    """``low @ q_low + high @ q_high`` in f32 of f16[M, 64] and f16[64, N], K ordered [4, 2, group 4, 2]."""
    return _dot_decoded_p.bind(low, high, q_low, q_high)


def _dot_decoded_jnp(low, high, q_low, q_high):
    m, n = low.shape[0], q_low.shape[1]
    by_group = lambda x: x.astype(jnp.float32).reshape(m, 8, 4, 2).transpose(0, 2, 1, 3).reshape(m, 4, 16)
    q_by_group = lambda x: x.astype(jnp.float32).reshape(8, 4, 2, n).transpose(1, 0, 2, 3).reshape(4, 16, n)
    sums = _group_sums(by_group(low), q_by_group(q_low)) + _group_sums(by_group(high), q_by_group(q_high))
    return add_groups(lambda c: sums[c])


_dot_decoded_p = private.new_primitive(
    "k2i_dot_decoded",
    lambda low, high, q_low, q_high: ((low.shape[0], q_low.shape[1]), jnp.float32),
    _dot_decoded_jnp,
    private.build_dot_decoded,
)

# --- sum over heads -------------------------------------------------------------------------------------------------


def sum_heads(dots, weights):
    """``sum_h weights[h] * relu(dots[:, h])``.

    Args:
      dots: list of f32[M, 32], a group of heads each.
      weights: list of f32[32].

    Returns:
      f32[M]: products rounded in f32, groups added in order, the 32 sums of a group by a fixed tree.
    """
    return _sum_heads_p.bind(*dots, *weights)


def _sum_heads_jnp(*operands):
    groups = len(operands) // 2
    products = [jnp.maximum(s, 0.0) * w[None, :] for s, w in zip(operands[:groups], operands[groups:], strict=True)]
    products = lax.optimization_barrier(products)  # else a product and a sum may become one rounding
    total = functools.reduce(jnp.add, products)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def _sum_heads_plt(*operands):
    groups = len(operands) // 2
    products = []
    for s, w in zip(operands[:groups], operands[groups:], strict=True):
        # relu as an integer max: one instruction on AMD where a float max takes two; a negative NaN becomes zero
        positive = float_bits(jnp.maximum(lax.bitcast_convert_type(s, jnp.int32), 0))
        products.append(positive * w[None, :])
    return jnp.sum(functools.reduce(jnp.add, products), axis=1)


def _sum_heads_cuda(*operands):
    groups = len(operands) // 2
    pairs = zip(operands[:groups], operands[groups:], strict=True)
    products = [_twice_relu_p.bind(s) * (0.5 * w)[None, :] for s, w in pairs]
    return jnp.sum(functools.reduce(jnp.add, products), axis=1)


# x + |x| is exact, and a float addition runs at twice the rate of a maximum.
_twice_relu_p = private.new_primitive(
    "k2i_twice_relu",
    lambda x: (x.shape, x.dtype),
    lambda x: x + jnp.abs(x),
    lambda ctx, x: private.build_asm("{ .reg .f32 a; abs.f32 a, $1; add.f32 $0, $1, a; }", "=f,f", x),
)


def _sum_heads_triton(ctx, *operands):
    rule = _sum_heads_cuda if private.platform(ctx) == "cuda" else _sum_heads_plt
    return private.triton_rule_of(rule)(ctx, *operands)


_sum_heads_p = private.new_primitive(
    "k2i_sum_heads",
    lambda *operands: (operands[0].shape[:1], jnp.float32),
    _sum_heads_jnp,
    _sum_heads_triton,
)


def multiply(x, y):
    """``x * y``, rounded on its own in interpret mode too, where XLA may contract it with an addition."""
    return _multiply_p.bind(x, jnp.broadcast_to(y, x.shape))


_multiply_p = private.new_primitive(
    "k2i_multiply",
    lambda x, y: (x.shape, x.dtype),
    lambda x, y: lax.optimization_barrier(x * y),
    private.triton_rule_of(jnp.multiply),
)
