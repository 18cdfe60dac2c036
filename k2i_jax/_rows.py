"""Work on many rows in parts of few, so that what a part needs on the way does not grow with the rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from k2i_jax.page_table import PageTable


def map_rows(function: Callable[..., Any], rows_per_step: int, *arrays: Any) -> Any:
    """``function(first_row, *part)`` for parts of at most ``rows_per_step`` rows, put together again.

    Args:
      function: takes the first row's index and the parts of ``arrays``; returns a pytree with rows in front.
      rows_per_step: rows a part. The last part is filled up with zeros, whose results are dropped.
      arrays: pytrees whose leaves all have the same number of rows in front.
    """
    rows = jax.tree.leaves(arrays)[0].shape[0]
    if rows <= rows_per_step:
        return function(0, *arrays)
    steps = -(-rows // rows_per_step)
    size = -(-rows // steps)  # parts of equal size, so that few rows are filled up

    def split(x):
        x = jnp.pad(x, ((0, steps * size - rows), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(steps, size, *x.shape[1:])

    first = jnp.arange(steps, dtype=jnp.int32) * size
    out = lax.map(lambda part: function(part[0], *part[1]), (first, jax.tree.map(split, arrays)))
    return jax.tree.map(lambda x: x.reshape(steps * size, *x.shape[2:])[:rows], out)


def table_part(table: PageTable, first, row_ends) -> PageTable:
    """The table of the rows from ``first`` on that ``row_ends`` holds; rows past the table's are in no sequence."""
    if row_ends is table.row_ends:  # all rows: nothing to compute
        return table
    starts = jnp.clip(table.query_start_loc, first, first + row_ends.shape[0]) - first
    return PageTable(table.pages, row_ends, starts, table.max_query_len)
