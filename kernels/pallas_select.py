"""Selection as one kernel: the largest keys of each row, a program a row, with the row's keys in registers.

The k-th largest key is found bit by bit, by counting; one scan then gives each chosen column its place. Rows that are
too wide for that choose groups of columns first.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k2i_jax._radix import seen_keys
from k2i_jax._varying import shaped, varying
from k2i_jax.implementations import refuse_platform
from k2i_jax.kernels._jax_private import load_bytes
from k2i_jax.kernels.ops import iota, opaque

LIMIT = 16384  # keys a program: 32 a thread on NVIDIA GPUs, which need half of a thread's registers there
MAX_RESULTS = 2**29 - 1  # entries of all rows: Pallas' stores count bytes in 31 bits


def _kernel(
    keys_ref,  # u32 keys or f32 logits [R, size], size a power of two
    bound_ref,  # i32[R or 1]: how many keys to choose; of logits, the row's end
    columns_ref,  # out: i32[R, k]
    found_ref,  # out: i32[R]
):
    row, size, k = pl.program_id(0), keys_ref.shape[1], columns_ref.shape[1]
    column = iota((size,), 0)
    keys = load_bytes(keys_ref, row, column, jnp.int32(0))
    bound = plt.load(bound_ref.at[jnp.minimum(row, bound_ref.shape[0] - 1)])
    if keys.dtype == jnp.float32:
        keys, count = seen_keys(keys, column, bound), jnp.int32(k)
    else:
        count = jnp.clip(bound, 0, k)

    def chosen(threshold, limit):  # keys above the threshold, and those that equal it in columns below the limit
        return keys > jnp.where(column < limit, threshold - 1, threshold)

    def search(bit, bound, total, choose, keep):
        """Sets those bits of ``bound``, from ``bit`` down, with which the total is kept; ends where it is ``count``."""

        def step(state):
            bit, bound, _ = state
            total = _total(choose(bound | bit))
            return bit >> 1, jnp.where(keep(total), bound | bit, bound), total

        return lax.while_loop(lambda state: (state[0] > 0) & (state[2] != count), step, (bit, bound, total))[1:]

    existing = _total(keys > 0)
    more = existing > count
    bit = jnp.where(more, jnp.uint32(1 << 31), jnp.uint32(0))
    threshold, _ = search(bit, jnp.uint32(0), existing, lambda key: keys >= key, lambda total: total >= count)
    threshold = jnp.maximum(threshold, jnp.uint32(1))
    total = _total(keys >= threshold)
    tied = total > count
    bit, limit = jnp.where(tied, jnp.int32(size // 2), 0), jnp.where(tied, jnp.int32(0), size)
    limit, _ = search(bit, limit, total, functools.partial(chosen, threshold), lambda total: total <= count)

    marks = chosen(threshold, limit)
    # others' places lie outside: interpret mode would write back there what it read, after or before the column
    place = jnp.where(marks, jnp.cumsum(marks.astype(jnp.int32), dtype=jnp.int32) - 1, k)
    place = opaque(place)  # the mask is of the places alone: keys held until the store would be too many registers
    plt.store(columns_ref.at[row, place], column, mask=place < k)
    found, place = jnp.minimum(existing, count), iota((pl.next_power_of_2(k),), 0)
    plt.store(columns_ref.at[row, place], jnp.full_like(place, -1), mask=(place >= found) & (place < k))
    plt.store(found_ref.at[row], found)


def _total(marks):
    return jnp.sum(marks.astype(jnp.int32), dtype=jnp.int32)


def _call(keys, bound, k, interpret, lanes):
    """One launch; ``lanes`` a warp. At least four warps, so that all of a GPU core's parts are at work."""
    rows, n = keys.shape
    size = pl.next_power_of_2(n)  # keys that are no choice fill it: a load that stops short has an address a key
    keys, most = jnp.pad(keys, ((0, 0), (0, size - n))), size // lanes
    params = plt.CompilerParams(num_warps=max(most // 32, min(most, 4), 1), num_stages=1)
    keys, bound = varying((keys, bound), keys, bound)
    out = shaped((rows, k), jnp.int32, keys), shaped((rows,), jnp.int32, keys)
    return tuple(
        pl.pallas_call(_kernel, out_shape=out, grid=(rows,), interpret=interpret, compiler_params=params)(keys, bound)
    )


def top_columns(keys, count, k: int, *, interpret: bool = False):
    """The columns of each row's largest non-zero keys, of equal ones those at the lowest columns.

    Args:
      keys: u32[rows, n]; 0 is no choice.
      count: i32[rows] columns to choose, at most ``k`` of them; i32[1] where all rows choose as many.
      k: entries a row.
      interpret: run in Pallas' interpret mode, on any host.

    Returns:
      i32[rows, k] ascending, then -1; i32[rows] how many there are.

    Raises:
      ValueError: k above ``LIMIT // 2`` where there are more than ``LIMIT`` columns, or results of 2 GiB.
      NotImplementedError: lowered for a platform other than cuda and rocm.
    """
    rows, n = keys.shape
    if 0 in (rows, k, n):
        return jnp.full((rows, k), -1, jnp.int32), jnp.zeros(rows, jnp.int32)
    if k > n:
        columns, found = top_columns(keys, count, n, interpret=interpret)
        return jnp.pad(columns, ((0, 0), (0, k - n)), constant_values=-1), found
    if rows * k > MAX_RESULTS:
        raise ValueError(f"implementation: pallas selects {MAX_RESULTS} entries at most, got {rows} x {k}; use xla")
    if n > LIMIT:
        return _top_of_groups(keys, count, k, interpret)
    if interpret:
        return _call(keys, count, k, True, 64)
    run = lambda lanes: functools.partial(_call, k=k, interpret=False, lanes=lanes)
    shapes = (rows, k), (rows,)
    refuse = lambda *x: tuple(refuse_platform(varying(jnp.zeros(shape, jnp.int32), x)) for shape in shapes)
    return lax.platform_dependent(keys, count, cuda=run(32), rocm=run(64), default=refuse)


def top_of_logits(logits, row_ends, k: int, *, interpret: bool = False):
    """``top_columns`` of f32[rows, n] below each row's end, NaN and -inf left out; rows that fit need one launch."""
    if logits.shape[1] <= LIMIT:
        return top_columns(logits, row_ends, k, interpret=interpret)
    keys = seen_keys(logits, jnp.arange(logits.shape[1], dtype=jnp.int32), row_ends[:, None])
    return top_columns(keys, jnp.full(1, k, jnp.int32), k, interpret=interpret)


def _top_of_groups(keys, count, k, interpret):
    """``top_columns`` by way of the k groups of neighbouring columns with the largest keys.

    They hold all the columns wanted: one in another group has k groups before its own, each of which holds a key that
    is larger, or equal and at a lower column.
    """
    rows, n = keys.shape
    if 2 * k > LIMIT:
        raise ValueError(
            f"implementation: pallas chooses {LIMIT // 2} of more than {LIMIT} columns at most, got {k} of {n}; use xla"
        )
    size = 2
    while 2 * size * k <= LIMIT and size * size * k < n:  # until there are no more groups than columns of k groups
        size *= 2
    grouped = jnp.pad(keys, ((0, 0), (0, -n % size))).reshape(rows, -1, size)
    groups, _ = top_columns(jnp.max(grouped, axis=2), count, k, interpret=interpret)
    inside = jnp.take_along_axis(grouped, jnp.maximum(groups, 0)[:, :, None], axis=1)
    inside = jnp.where(groups[:, :, None] >= 0, inside, 0).reshape(rows, k * size)
    columns, found = top_columns(inside, count, k, interpret=interpret)
    group = jnp.take_along_axis(groups, jnp.maximum(columns, 0) // size, axis=1)
    return jnp.where(columns >= 0, group * size + columns % size, -1), found
