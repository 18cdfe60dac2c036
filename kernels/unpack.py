"""Words of e2m1 codes to f16, exactly, as primitives for kernel bodies; on NVIDIA GPUs four codes at a time.

Each has two rules: one that lowers to Triton, and one in jax.numpy for interpret mode, written so that its bits do
not depend on tile shapes or on what else XLA puts into the same program.
"""

import jax.numpy as jnp
from jax import lax

from k2i_jax.kernels import _jax_private as private


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
