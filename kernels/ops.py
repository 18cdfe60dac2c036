"""Small operations of kernel bodies: codes and bits, a product rounded on its own, hints to the GPU's compiler."""

import functools

import jax.numpy as jnp
from jax import lax

from k2i_jax.kernels import _jax_private as private


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


def multiply(x, y):
    """``x * y``, rounded on its own in interpret mode too, where XLA may contract it with an addition."""
    return _multiply_p.bind(x, jnp.broadcast_to(y, x.shape))


_multiply_p = private.new_primitive(
    "k2i_multiply",
    lambda x, y: (x.shape, x.dtype),
    lambda x, y: lax.optimization_barrier(x * y),
    private.triton_rule_of(jnp.multiply),
)


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
