"""The dots of FP4 keys and queries, as primitives for kernel bodies: by FP4 matrix instruction, or of f16 operands.

Each has two rules: one that lowers to Triton, and one in jax.numpy for interpret mode, written so that its bits do
not depend on tile shapes or on what else XLA puts into the same program.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from k2i_jax.fp4 import scale_by_powers
from k2i_jax.kernels import _jax_private as private
from k2i_jax.kernels.ops import e2m1, e8m0

GROUP_BYTES = 16  # payload bytes that share one scale: 32 dims
HEADS = 32  # heads a dot


def dot_scaled(a, a_scale, b, b_scale):
    """Scaled FP4 matrix product.

    Args:
      a: u8[M, 64], e2m1 pairs along K = 128, the even k in the low nibble.
      a_scale: u8[M, 4], e8m0 per 32 k.
      b: u8[64, N].
      b_scale: u8[N, 4].

    Returns:
      f32[M, N]. In a Triton kernel ``tt.dot_scaled``, gfx950's FP4 matrix instruction; on AMD GPUs without one an
      exact bf16 decode and two dots, where a code times its own scale must fit bf16. In interpret mode every group is
      exact and the four are added in a fixed order. A scale byte 255 gives NaN; on gfx950 that NaN may have its sign
      set, which ``sum_heads`` counts as zero.
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


def add_groups(group):
    """Sum of four scale groups' partial dots, in the project's fixed order."""
    return (group(0) + group(1)) + (group(2) + group(3))


def _group_sums(a, b):
    """[M, 4, n] x [4, n, N] -> [4, M, N]. Exact for codes times one power of two a group, so in any order."""
    dims = (((2,), (1,)), ((1,), (0,)))
    return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
