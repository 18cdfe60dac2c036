"""The weighted sum over heads, as a primitive for kernel bodies.

It has two rules: one that lowers to Triton, and one in jax.numpy for interpret mode, written so that its bits do
not depend on tile shapes or on what else XLA puts into the same program.
"""

import functools

import jax.numpy as jnp
from jax import lax

from k2i_jax.kernels import _jax_private as private
from k2i_jax.kernels.ops import float_bits


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
