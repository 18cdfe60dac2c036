"""Rotary positions: YaRN frequencies of the compressed layers, and the rotation of each position."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int

from k2i_jax._check import AnyArray, as_int32, check_array


def rope_frequencies(
    *,
    theta: float = 160000.0,
    dims: int = 64,
    factor: float = 16.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_length: int = 65536,
) -> np.ndarray:
    """Radians a position of each pair of dims, f32[dims / 2]: YaRN as DeepSeek-V4's code has it, in float32.

    A pair turns ``theta^(-2i / dims)`` a position. Pairs of fewer than ``beta_slow`` turns over the original length
    are slowed down by ``factor``, those of more than ``beta_fast`` are kept, with a linear ramp between.

    Args:
      theta: base of the geometric series; V4.1's compressed layers have 160000.
      dims: rotated dims, even.
      factor: by how much the context was extended.
      beta_fast, beta_slow: turns over the original length that bound the ramp.
      original_length: positions before the extension; 0 turns YaRN off.

    Raises:
      ValueError: odd or no dims, theta not above 1, factor below 1, a negative length, or beta_fast below beta_slow.
    """
    if dims < 2 or dims % 2:
        raise ValueError(f"dims: expected an even number of at least 2, got {dims}")
    if not theta > 1 or not factor >= 1 or original_length < 0 or not beta_fast >= beta_slow > 0:
        raise ValueError(
            "theta, factor, original_length, beta_fast, beta_slow: expected theta > 1, factor >= 1, "
            f"original_length >= 0, beta_fast >= beta_slow > 0, got {theta}, {factor}, {original_length}, "
            f"{beta_fast}, {beta_slow}"
        )
    # float64 where only the last rounding counts, so that no machine's float32 power decides the bits
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    frequencies = np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)
    if original_length == 0:
        return frequencies

    def pair_of(turns: float) -> float:
        return dims * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(beta_fast)), 0), min(math.ceil(pair_of(beta_slow)), dims - 1)
    pairs = np.arange(dims // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(low)) / np.float32(high - low or 0.001), 0, 1).astype(np.float32)
    kept = np.float32(1) - ramp
    return frequencies / np.float32(factor) * (np.float32(1) - kept) + frequencies * kept


def rope_rotations(
    positions: Int[AnyArray, "*n"], frequencies: Float32[AnyArray, "pairs"]
) -> Float32[Array, "*n pairs 2"]:
    """Cosine and sine of each position's angles (the real and imaginary part of the reference code's ``freqs_cis``).

    The angle is rounded to float32 before its cosine is taken, as in the reference code: at position 2^20 that is
    up to 0.03 radians, which every producer and reader of keys must share.

    Args:
      positions: token positions. A key of ratio r stands at its group's first token, ``j * r``.
      frequencies: f32[pairs], of :func:`rope_frequencies`.

    Raises:
      TypeError, ValueError: wrong types or ranks.
    """
    positions = as_int32("positions", positions)
    check_array("frequencies", frequencies, (jnp.float32,), ("pairs",))
    return _rotations(positions, jnp.asarray(frequencies))


@jax.jit
def _rotations(positions, frequencies):
    angles = lax.optimization_barrier(positions.astype(jnp.float32)[..., None] * frequencies)
    return lax.optimization_barrier(jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1))
