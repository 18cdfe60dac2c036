"""Groups of rows that a program scores together: how many there can be, and which one a program has.

Each sequence's rows are cut into groups of ``rows``, numbered from ``start // rows + sequence``, which leaves each its
own numbers, or from ``start`` if ``rows`` is 1. Some numbers may have no rows.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k2i_jax.kernels.ops import iota, uniform


def count_groups(rows: int, sequences: int, shared: int) -> int:
    """How many numbers ``find_group`` may give to the groups of ``rows`` rows in all."""
    return rows if shared == 1 else rows // shared + sequences


def likely_group(starts_ref, group, rows, longest):
    """Sequence and first row of a group, if all sequences have ``longest`` rows."""
    stride = int(rows > 1)
    guess = jnp.minimum(lax.div(group * rows, jnp.int32(longest + rows * stride)), starts_ref.shape[0] - 2)
    return guess, jnp.maximum(group - guess * stride, 0) * rows


def find_group(starts_ref, group, rows, num_rows, longest):
    """(sequence, first row, end of the sequence's rows) of a group of rows; sequence -1 where there is none.

    A program finds its own group: a loop over a sequence's groups would keep the addresses of their queries in
    registers all the time. It tries where the group is if all sequences have ``longest`` rows, and else counts the
    sequences that start before.
    """
    sequences, stride = starts_ref.shape[0] - 1, int(rows > 1)

    def number(start, sequence):
        return lax.div(start, jnp.int32(rows)) + sequence * stride

    def start_of(sequence):
        return jnp.clip(plt.load(starts_ref.at[sequence]), 0, num_rows)

    guess, _ = likely_group(starts_ref, group, rows, longest)
    alone = (guess + 1 >= sequences) | (number(start_of(guess + 1), guess + 1) > group)
    found = alone & (number(start_of(guess), guess) <= group)
    block = min(pl.next_power_of_2(sequences), 1024)

    def count(i, before):
        s = i * block + iota((block,), 0)
        start = jnp.clip(plt.load(starts_ref.at[s], mask=s < sequences, other=0), 0, num_rows)
        mine = (s < sequences) & (number(start, s) <= group)
        return before + jnp.sum(mine.astype(jnp.int32), dtype=jnp.int32)

    blocks = jnp.where(found, jnp.int32(0), pl.cdiv(sequences, block))
    before = lax.fori_loop(jnp.int32(0), blocks, count, jnp.int32(0))
    sequence = uniform(jnp.where(found, guess, before - 1))
    here = jnp.maximum(sequence, 0)
    start = start_of(here)
    end = jnp.maximum(start_of(here + 1), start)
    first = start + (group - number(start, here)) * rows
    return jnp.where(first < end, sequence, -1), first, end
