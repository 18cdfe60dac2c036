"""Selection on an order of the IEEE bits, by radix: the k-th largest key two bits at a time, then what is above it.

No sort, so no backend's idea of ties, NaN or -0; of equal keys those at the lowest columns are taken, and columns come
out ascending. A GPU counts in other steps than a CPU does, to the same integers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from k2i_jax._varying import varying

NONE = np.uint32(0)  # order key of what is no choice
NEGATIVE_INF = np.uint32(0x007FFFFF)  # smallest key of a choice
PINNED = np.uint32(0xFFFFFFFF)
_SIGN = np.uint32(1 << 31)
_BLOCK = 32  # columns that a GPU counts together


def order_keys(x: Float32[Array, "... n"]) -> UInt32[Array, "... n"]:
    """Unsigned keys in the order of the floats; -0 equals +0, NaN becomes 0, -inf 0x7fffff."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == _SIGN, NONE, bits)
    keys = jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)
    return jnp.where(bits & ~_SIGN > np.uint32(0x7F800000), NONE, keys)


def seen_keys(x: Float32[Array, "... n"], column, row_end) -> UInt32[Array, "... n"]:
    """Keys of what may be chosen: columns below the row's end, and neither NaN nor -inf."""
    keys = order_keys(x)
    return jnp.where((column < row_end) & (keys > NEGATIVE_INF), keys, NONE)


def _by_platform(gpu, default, *args):
    """``gpu`` where the code is lowered for one, ``default`` elsewhere; both count the same."""
    return lax.platform_dependent(*args, cuda=gpu, rocm=gpu, default=default)


def _block_sums(x: Int32[Array, "rows n"]) -> Int32[Array, "rows n"]:
    """Inclusive sums along each row, block by block: a few large steps, where a scan would take many small ones."""
    rows, n = x.shape
    blocks = -(-n // _BLOCK)
    x = jnp.pad(x, ((0, 0), (0, blocks * _BLOCK - n))).reshape(rows, blocks, _BLOCK)
    inside = jnp.sum(jnp.where(np.tri(_BLOCK, dtype=bool), x[:, :, None, :], 0), axis=3, dtype=jnp.int32)
    if blocks > 1:
        totals = inside[:, :, -1]
        inside += (_block_sums(totals) - totals)[:, :, None]
    return inside.reshape(rows, blocks * _BLOCK)[:, :n]


def _scan_sums(x: Int32[Array, "rows n"]) -> Int32[Array, "rows n"]:
    return jnp.cumsum(x, axis=1, dtype=jnp.int32)


def top(keys: UInt32[Array, "rows n"], count: Int32[Array, "rows"]) -> Bool[Array, "rows n"]:
    """Marks the ``count`` largest non-zero keys of each row, of equal ones those at the lowest columns."""
    count = jnp.minimum(count, jnp.sum(keys > 0, axis=1, dtype=jnp.int32))

    def refine(i, threshold):
        shift = jnp.uint32(30) - 2 * i.astype(jnp.uint32)
        largest = jnp.zeros_like(threshold)
        for digit in (1, 2, 3):  # the largest one that still leaves ``count`` keys; counts fall with digits
            trial = threshold | (jnp.uint32(digit) << shift)
            enough = jnp.sum(keys >= trial[:, None], axis=1, dtype=jnp.int32) >= count
            largest += enough.astype(jnp.uint32)
        return threshold | (largest << shift)

    zeros = varying(jnp.zeros(keys.shape[0], jnp.uint32), keys, count)
    threshold = lax.fori_loop(jnp.int32(0), jnp.int32(16), refine, zeros)[:, None]
    above = keys > threshold
    equal = (keys == threshold) & (keys > 0)
    spare = count - jnp.sum(above, axis=1, dtype=jnp.int32)
    return above | (equal & (_by_platform(_block_sums, _scan_sums, equal.astype(jnp.int32)) <= spare[:, None]))


def columns_of(chosen: Bool[Array, "rows n"], k: int) -> Int32[Array, "rows k"]:
    """Ascending columns of the marks, at most ``k``, then -1."""
    columns = _by_platform(
        functools.partial(_find_in_blocks, k), functools.partial(_find_in_rows, k), chosen.astype(jnp.int32)
    )
    return jnp.where(columns < chosen.shape[1], columns, -1)


def _find_in_rows(k: int, marks: Int32[Array, "rows n"]) -> Int32[Array, "rows k"]:
    """Columns of the first ``k`` marks, n or more where there are fewer: by bisection."""
    wanted = jnp.arange(1, k + 1, dtype=jnp.int32)
    through = _scan_sums(marks)
    return jax.vmap(lambda row: jnp.searchsorted(row, wanted, side="left"))(through).astype(jnp.int32)


def _find_in_blocks(k: int, marks: Int32[Array, "rows n"]) -> Int32[Array, "rows k"]:
    """The same by counting, in blocks of blocks."""
    marks = jnp.pad(marks, ((0, 0), (0, -marks.shape[1] % _BLOCK)))
    return _count_below(_block_sums(marks), jnp.arange(1, k + 1, dtype=jnp.int32)[:, None])


def _count_below(through: Int32[Array, "rows n"], wanted: Int32[Array, "k 1"]) -> Int32[Array, "rows k"]:
    """How many of a row's rising sums lie below each wanted one: first whole blocks, then in the block after them."""
    rows, n = through.shape
    if n <= 4 * _BLOCK:
        return jnp.sum(through[:, None, :] < wanted, axis=2, dtype=jnp.int32)
    through = jnp.pad(through, ((0, 0), (0, -n % _BLOCK)), mode="edge").reshape(rows, -1, _BLOCK)
    block = _count_below(lax.optimization_barrier(through[:, :, -1]), wanted)  # the ends, side by side in memory
    within = jnp.take_along_axis(through, jnp.minimum(block, through.shape[1] - 1)[:, :, None], axis=1)
    return block * _BLOCK + jnp.sum(within < wanted, axis=2, dtype=jnp.int32)
