"""The two arithmetic bodies of the score kernel: what a row's queries are loaded into, and logits of a tile of keys.

A body has ``order`` (how keys are loaded), ``queries`` (a row's operands), ``prepare`` (loaded keys -> operand, once
for all rows) and ``logits`` (operand and a row's queries -> f32 over the order's ``store`` dims).
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from k2i_jax.fp4 import scale_by_powers
from k2i_jax.kernels._jax_private import load_words
from k2i_jax.kernels.dot_scaled import HEADS, dot_decoded, dot_scaled
from k2i_jax.kernels.ops import e2m1, float_bits, iota, multiply
from k2i_jax.kernels.pallas_loads import Digit, KeyOrder, t
from k2i_jax.kernels.sum_heads import sum_heads
from k2i_jax.kernels.unpack import unpack_high, unpack_low

_R, _WORD = Digit("r", 0, 16), Digit("r", 2, 4)
_C0, _C1, _C = Digit("c", 0, 2), Digit("c", 1, 2), Digit("c", 0, 4)


def _load_heads(ref, row, head, index, heads, other=0):
    """``ref[row, head, index]``, with ``other`` for heads that do not exist."""
    exists = head < heads
    head = head if heads % HEADS == 0 else jnp.minimum(head, heads - 1)
    where = ref.at[row, head] if index is None else ref.at[row, head, index]
    if heads % HEADS == 0:
        return plt.load(where)
    return plt.load(where, mask=exists, other=other)


@dataclasses.dataclass(frozen=True)
class DotScaled:
    """Keys as M of the scaled FP4 dot, 64 keys a warp. The operand's order is gfx950's 32x32x64 instruction's."""

    layout: str
    unit: int
    heads: int
    groups: int  # 64-key groups a step: one a warp

    @property
    def order(self) -> KeyOrder:
        if self.layout == "page64" and self.unit == 64:
            register, lanes = t(4), [t(5), t(0, 16)]
        else:
            register, lanes = t(0), [t(1), t(3, 8), t(2)]
        group = Digit("g", 0, self.groups)
        # Bytes that lie side by side go last, to be one load; a page-64 candidate's scales have no such neighbours.
        scale = (_C1, group, _C0, *lanes)
        paired = self.unit == 64 or self.layout == "page8"
        return KeyOrder(
            self.layout,
            self.unit,
            payload=(register, _C1, group, _C0, *lanes, _R),
            scale=(*scale, register) if paired else (register, *scale),
            store=(group, register, *lanes),
            own=(register, _C1),
        )

    def queries(self, q_ref, scale_ref, weight_ref, row):
        """Per 32 heads: codes u8[64, 32], scales u8[32, 4], weights f32[32]."""
        found = []
        for first in range(0, self.heads, HEADS):
            shape = (64, HEADS)
            q = _load_heads(q_ref, row, first + iota(shape, 1), iota(shape, 0), self.heads)
            shape = (HEADS, 4)
            scale = _load_heads(scale_ref, row, first + iota(shape, 0), iota(shape, 1), self.heads, other=127)
            weight = _load_heads(weight_ref, row, first + iota((HEADS,), 0), None, self.heads)
            found.append((q, scale, weight))
        return found

    def prepare(self, keys):
        """Load order -> u8[M, 64], u8[M, 4] with rows (register, group, lanes): no data moves. No key needs care."""
        payload, scale = keys
        order, m = self.order, 64 * self.groups
        rows = [d for d in order.payload if d.axis in "tg"]
        arrange = lambda x, digits, dims: x.transpose([digits.index(d) for d in dims]).reshape(m, -1)
        payload = arrange(payload, order.payload, [*rows, _C1, _C0, _R])
        return (payload, arrange(scale, order.scale, [*rows, _C1, _C0])), None

    def logits(self, keys, queries):
        payload, key_scale = keys
        dots = [dot_scaled(payload, key_scale, q, scale) for q, scale, _ in queries]
        total = sum_heads(dots, [weight for *_, weight in queries])
        group, register, *lanes = (digit.size for digit in self.order.store)
        return total.reshape(register, group, *lanes).swapaxes(0, 1)


# Limits of the decode body's fast form. Keys and rows outside get the exact form, each on its own account, so that
# a logit's bits never depend on the company its key is in.
_SPREAD = 20  # powers of two between a key's (or a head's) four scales: exact in f16, subnormals included
_LEAST, _MOST = 67, 187  # scales of a key or head: 2^-60 to 2^60, far from f32's limits


def _excess(scale, largest):
    """i32 over 0 for scales that put their key or head outside."""
    return jnp.maximum(jnp.maximum(largest - _SPREAD, _LEAST) - scale, largest - _MOST)


def _f16_power(exponent):
    """2^exponent in f16 for i32 exponents up to 15; zero below -14."""
    bits = jnp.maximum(exponent + 15, 0) << 10
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)


def _f32_power(scale):
    """2^(scale - 127) for the scales of the fast form; anything for others."""
    return float_bits(scale << 23)


def _to_operand(x):
    """f16 in load order (half, warp, 2, 4, group, and ``unpack_low``'s 4, 2, 2) -> [64, 64]: no data moves.

    K counts (the last two 4, the high half of the one before 2, group 4, its low half 2).
    """
    return x.reshape(2, 4, 2, 4, 4, 2, 2, 2, 2).transpose(1, 0, 2, 3, 7, 8, 5, 4, 6).reshape(64, 64)


def _to_columns(x):
    """f16[32 heads, group, 4, 2, 2] -> [64, 32], K as above."""
    return x.reshape(HEADS, 4, 2, 2, 2, 2).transpose(4, 5, 2, 1, 3, 0).reshape(64, HEADS)


def _to_rows(x):
    """Load order (half, warp, 2, 4) -> [64], the operand's rows."""
    return x.transpose(1, 0, 2, 3).reshape(64)


@dataclasses.dataclass(frozen=True)
class Decode:
    """Keys decoded to f16 as M of an ordinary dot, 64 keys a step. The order is that of NVIDIA's matrix operands.

    K is permuted so that lane % 4 holds one whole scale group of the key of lane // 4: one 16-byte load, one scale.
    Fast form: codes times 2^(scale - largest of the key), likewise for a head; the largest ones multiply afterwards.
    """

    layout: str
    unit: int
    heads: int

    @property
    def order(self) -> KeyOrder:
        rows = (t(3), t(4, 4), t(2), t(0, 4))
        return KeyOrder(
            self.layout,
            self.unit,
            payload=(*rows, _C, _WORD),
            scale=(*rows, _C),
            store=(t(0, 64),),
            own=(t(3),),
            opaque_scale=True,
        )

    def queries(self, q_ref, scale_ref, weight_ref, row):
        """Per 32 heads: f16[64, 32] low and high nibbles, f32[32] weights; and i32 over 0 where the fast form fails."""
        found, excess = [], jnp.int32(-1)
        for first in range(0, self.heads, HEADS):
            head = first + iota((HEADS,), 0)
            here = head if self.heads % HEADS == 0 else jnp.minimum(head, self.heads - 1)  # absent ones weigh nothing
            shape = (HEADS, 4, 4)  # head, group, word
            word = here[:, None, None] * 16 + iota(shape, 1) * 4 + iota(shape, 2)
            words = load_words(q_ref, row, word, jnp.int32(0))
            scale = plt.load(scale_ref.at[row, here[:, None], iota((HEADS, 4), 1)]).astype(jnp.int32)
            largest = jnp.max(scale, axis=1)
            excess = jnp.maximum(excess, jnp.max(_excess(scale, largest[:, None])))
            factor = _f16_power(scale - largest[:, None] + 14)[..., None, None, None]
            low, high = (_to_columns(unpack(words) * factor) for unpack in (unpack_low, unpack_high))
            weight = _load_heads(weight_ref, row, head, None, self.heads) * _f32_power(largest)
            found.append((low, high, weight))
        return found, excess

    def prepare(self, keys):
        """Load order -> operand; and i32 over the scale's dims, over 0 where the fast form fails."""
        payload, scale = keys
        largest = jnp.max(scale, axis=4)
        factor = _f16_power(scale - largest[..., None] + 14)[..., None, None, None]
        low = _to_operand(unpack_low(payload) * factor)
        high = _to_operand(unpack_high(payload) * factor)
        return (low, high, _to_rows(_f32_power(largest))), _excess(scale, largest[..., None])

    def logits(self, keys, queries):
        low, high, largest = keys
        dots = [dot_decoded(low, high, q_low, q_high) for q_low, q_high, _ in queries[0]]
        return sum_heads(dots, [weight for *_, weight in queries[0]]) * largest

    def exact_logits(self, load_byte, key_scale, q_ref, scale_ref, weight_ref, row):
        """Logits of a tile for any scale bytes, by head and by byte. A scale byte 255 makes a dot NaN.

        Slow: rare, and made for few registers and a short compilation.

        Args:
          load_byte: r -> u8 over the scale's dims: byte r of each (key, group).
          key_scale: i32, the tile's scales.
        """

        def add_head(head, total):
            def add_byte(r, sums):
                code = load_byte(r).astype(jnp.int32)
                q = plt.load(q_ref.at[row, head, iota((4,), 0) * 16 + r]).astype(jnp.int32)
                return sums + (e2m1(code & 15) * e2m1(q & 15) + e2m1(code >> 4) * e2m1(q >> 4))

            sums = lax.fori_loop(0, 16, add_byte, jnp.zeros(key_scale.shape, jnp.float32))  # exact in any order
            scale = plt.load(scale_ref.at[row, head, iota((4,), 0)]).astype(jnp.int32)
            groups = scale_by_powers(sums, key_scale + scale - 254)
            groups = jnp.where((key_scale == 255) | (scale == 255), jnp.nan, groups)
            pairs = jnp.sum(groups.reshape(*groups.shape[:4], 2, 2), axis=-1)
            dot = jnp.sum(pairs, axis=-1)
            return total + multiply(jnp.maximum(dot, 0.0), plt.load(weight_ref.at[row, head]))

        return _to_rows(lax.fori_loop(0, self.heads, add_head, jnp.zeros((2, 4, 2, 4), jnp.float32)))

    def keys_outside(self, scale):
        """Which keys of a tile with these i32 scales need ``exact_logits``: i32[64], over 0."""
        return _to_rows(jnp.max(_excess(scale, jnp.max(scale, axis=4)[..., None]), axis=4))
