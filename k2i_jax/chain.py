"""What comes before the score: from projections to FP4 keys, FP4 queries and head weights, and keys into the plane.

Every rounding of the reference code happens here too. ``reduce_precision`` rounds to bfloat16 where a compiler
would remove a cast there and back; barriers keep products from being contracted into the addition after them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from k2i_jax._check import FLOATS, AnyArray, as_int32, as_size, check_array
from k2i_jax.fp4 import FP4Array, FP4Recipe, fake_quant_fp4, quantize_fp4
from k2i_jax.layout import HEAD_DIM
from k2i_jax.page_table import PageTable, check_table


def _to_bf16(x: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
    """The nearest bfloat16 values, still as float32."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def rms_norm(x: Float32[Array, "*n 128"], weight: Float32[Array, "128"], eps: float) -> Float32[Array, "*n 128"]:
    """``weight * (x / sqrt(mean(x^2) + eps))`` in float32, rounded to bfloat16 values at the end.

    The squares are added by halving, in the same order whatever the shapes around them.
    """
    squares = lax.optimization_barrier(x * x)
    total = squares
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    inverse = 1.0 / jnp.sqrt(lax.optimization_barrier(total / x.shape[-1]) + jnp.float32(eps))
    return _to_bf16(weight * lax.optimization_barrier(x * inverse))


def rope_tail(x: Float32[Array, "*n dims"], rotations: Float32[Array, "*n pairs 2"]) -> Float32[Array, "*n dims"]:
    """Turns the last ``2 * pairs`` dims, adjacent ones as a complex number; the tail comes out in bfloat16 values."""
    pairs = rotations.shape[-2]
    head, tail = x[..., : x.shape[-1] - 2 * pairs], x[..., x.shape[-1] - 2 * pairs :]
    even, odd = tail.reshape(*tail.shape[:-1], pairs, 2)[..., 0], tail.reshape(*tail.shape[:-1], pairs, 2)[..., 1]
    cosine, sine = rotations[..., 0], rotations[..., 1]
    products = lax.optimization_barrier((even * cosine, odd * sine, even * sine, odd * cosine))
    turned = jnp.stack([products[0] - products[1], products[2] + products[3]], axis=-1)
    return jnp.concatenate([head, _to_bf16(turned).reshape(tail.shape)], axis=-1)


@jax.jit
def _pack(x: Float32[Array, "*n 128"]) -> FP4Array:
    """Quantised twice, as SGLang's chain does: the reference code's fake quantisation, then its own packer."""
    return quantize_fp4(fake_quant_fp4(x), FP4Recipe.SGLANG)


def index_keys(
    x: Float[AnyArray, "keys 128"],
    norm_weight: Float[AnyArray, "128"],
    rotations: Float32[AnyArray, "keys pairs 2"],
    *,
    eps: float = 1e-20,
) -> FP4Array:
    """Index keys from ``wk``'s output: RMSNorm, RoPE of the last dims, fake quantisation, packing.

    At ratio 2 a key belongs to a group of two tokens: ``x`` is ``wk`` of the group's pooled latent (pooling is the
    attention's compressor and not part of the lookup), and it turns by the group's first position, ``j * 2``.

    Args:
      x: f32 or bf16 [keys, 128]; rounded to bfloat16 first.
      norm_weight: f32 or bf16 [128], ``k_norm.weight``.
      rotations: f32[keys, pairs, 2] of each key's position ``j * ratio``; see ``rope_rotations``.
      eps: added to the mean of squares.

    Returns:
      payload u8[keys, 64], scale u8[keys, 4], as SGLang's writer stores them.

    Raises:
      TypeError, ValueError: wrong types or shapes.
    """
    check_array("x", x, FLOATS, ("keys", HEAD_DIM))
    check_array("norm_weight", norm_weight, FLOATS, (HEAD_DIM,))
    _check_rotations(rotations, x.shape[0])
    return _keys(x, norm_weight, rotations, eps)


@jax.jit
def _keys(x, norm_weight, rotations, eps):
    x = rms_norm(_to_bf16(x.astype(jnp.float32)), norm_weight.astype(jnp.float32), eps)
    return _pack(rope_tail(x, rotations))


def index_queries(x: Float[AnyArray, "rows heads 128"], rotations: Float32[AnyArray, "rows pairs 2"]) -> FP4Array:
    """Index queries from ``wq_b``'s output: as :func:`index_keys` without the norm, all heads of a row alike.

    Args:
      x: f32 or bf16 [rows, H, 128]; rounded to bfloat16 first.
      rotations: f32[rows, pairs, 2] of each row's token position.

    Returns:
      payload u8[rows, H, 64], scale u8[rows, H, 4].

    Raises:
      TypeError, ValueError: wrong types or shapes.
    """
    check_array("x", x, FLOATS, ("rows", "heads", HEAD_DIM))
    _check_rotations(rotations, x.shape[0])
    return _queries(x, rotations)


@jax.jit
def _queries(x, rotations):
    return _pack(rope_tail(_to_bf16(x.astype(jnp.float32)), rotations[:, None]))


def _check_rotations(rotations, rows):
    check_array("rotations", rotations, (jnp.float32,), (rows, "pairs", 2))
    if not 2 * rotations.shape[1] <= HEAD_DIM:
        raise ValueError(f"rotations: expected at most {HEAD_DIM // 2} pairs, got {rotations.shape[1]}")


def head_weights(x: Float[AnyArray, "rows heads"], *, scale: float | None = None) -> Float32[Array, "rows heads"]:
    """Head weights from ``weights_proj``'s output: times ``scale`` in float32, rounded to bfloat16, as float32.

    Args:
      x: f32 or bf16 [rows, H]; rounded to bfloat16 first.
      scale: None for ``128^-0.5 * H^-0.5``.

    Raises:
      TypeError, ValueError: wrong types or shapes.
    """
    check_array("x", x, FLOATS, ("rows", "heads"))
    if not x.shape[1]:
        raise ValueError(f"x: expected at least one head, got {list(x.shape)}")
    return _weights(x, np.float32((HEAD_DIM * x.shape[1]) ** -0.5 if scale is None else scale))


@jax.jit
def _weights(x, scale):
    return _to_bf16(_to_bf16(x.astype(jnp.float32)) * scale)


def key_slots(table: PageTable, positions: Int[AnyArray, "rows"], *, ratio: int = 1) -> Int32[Array, "rows"]:
    """Slot of the key that each row's token completes, for ``write_keys``; -1 where it completes none.

    A group of ``ratio`` tokens has its key when its last token is there: the token at position p writes key
    ``p // ratio`` if ``(p + 1) % ratio == 0``. Padding (a negative position, a row that does not see its own key or
    is in no sequence) writes nothing.

    Args:
      table: page table of the rows, with row ends counted in keys of this ratio.
      positions: i32[rows] token positions.
      ratio: tokens a key.

    Raises:
      TypeError, ValueError: wrong types or shapes, a ratio below 1.
    """
    check_table(table)
    positions = as_int32("positions", positions, table.row_ends.shape)
    ratio = as_size("ratio", ratio)
    keys = positions // ratio
    complete = (positions >= 0) & (positions % ratio == ratio - 1) & (keys < table.live_ends())
    return table.slots(jnp.where(complete, keys, -1)[:, None])[:, 0]
