"""The frame of the score kernels: some rows' logits of every ``splits``-th step of their keys, -inf past their ends."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k2i_jax.kernels._jax_private import store_in_place
from k2i_jax.kernels.ops import iota, uniform
from k2i_jax.kernels.pallas_bodies import Decode


def cdiv(a, b):
    return (a + b - 1) // b


def _steps(count, part, splits):
    """How many of the first ``count`` steps belong to program ``part``: every ``splits``-th."""
    return cdiv(jnp.maximum(count - part, 0), splits)


def score_rows(refs, table_ref, table_row, rows, *, body, buffers, part, splits):
    """Scores this program's steps for ``rows``, a list of row indices; they see ``table_ref[table_row]``'s pages.

    The decode body's fast form notes what it cannot do; after the loop, where few registers are in use, the exact
    form writes over those logits, row after row.
    """
    ends_ref, q_ref, q_scale_ref, weight_ref, payload_ref, scale_ref, out_ref = refs
    order, width = body.order, out_ref.shape[1]
    unit = order.unit
    entries_a_step = 64 * order.groups // unit
    limit = payload_ref.shape[0] * 64 // unit
    ends = [jnp.clip(plt.load(ends_ref.at[row]), 0, width) for row in rows]
    if len(rows) > 1:
        ends = [uniform(end) for end in ends]  # registers are short with many rows
    last = functools.reduce(jnp.maximum, ends)
    all_see = functools.reduce(jnp.minimum, ends)  # every row sees the columns below
    live = cdiv(last, unit)  # table entries that some row sees; nothing is read for others
    decode = isinstance(body, Decode)
    mine = _steps(cdiv(live, entries_a_step), part, splits)
    whole = _steps(all_see // (64 * order.groups), part, splits) if decode else 0  # of them, without a tail
    opaque_zero = part >> 31

    # A step past the last repeats the last: loads ahead stay inside the live entries, a surplus step writes the
    # same bits to the same place, and no load or store of the loop needs a mask.
    def step_of(k):
        return part + jnp.minimum(k, mine - 1) * splits

    def index(k):
        return order.entry_index(step_of(k), live)

    def load_entries(k):
        return plt.load(table_ref.at[table_row, index(k)])

    def clamp(entry):
        return jnp.clip(entry, 0, limit - 1)

    def load_keys(entry):
        entry = clamp(entry)
        scale = order.load_scale(scale_ref, entry, opaque_zero)
        return order.load_payload(payload_ref, entry), scale.astype(jnp.int32) if decode else scale

    def stored_columns(k, entry):
        """Column, the part of it that is to be added, and whether the column's page exists."""
        if order.flat:
            at, column, fixed = order.flat_columns(step_of(k), live)
            entry = entry if unit == 64 else plt.load(table_ref.at[table_row, at])
        else:
            column, fixed = order.columns(index(k), order.store, opaque_zero), 0
            entry = order.spread(entry, order.store)
        return column, fixed, entry.astype(jnp.uint32) < limit  # a negative id is a large one

    def exact_row(j, lefts):
        row = jnp.minimum(rows[0] + j, rows[-1])
        end = jnp.clip(plt.load(ends_ref.at[row]), 0, width)
        row_left = functools.reduce(jnp.maximum, [jnp.where(j == i, left, 0) for i, left in enumerate(lefts)])

        def exact_step(k, carry):
            entry = load_entries(k)
            scale = order.load_scale(scale_ref, clamp(entry), opaque_zero).astype(jnp.int32)
            column, fixed, exists = stored_columns(k, entry)
            column += fixed
            left = ((body.keys_outside(scale) > 0) | (row_left > 0)) & exists & (column < end)

            @pl.when(jnp.max(left.astype(jnp.int32)) > 0)
            def _():
                load_byte = functools.partial(order.load_payload, payload_ref, clamp(entry))
                value = body.exact_logits(load_byte, scale, q_ref, q_scale_ref, weight_ref, row)
                plt.store(out_ref.at[row, column], value, mask=left)

            return carry

        lax.fori_loop(jnp.int32(0), mine, exact_step, jnp.int32(0))
        return lefts

    @pl.when(mine > 0)
    def _():
        def load_first():
            first = [load_entries(jnp.int32(b)) for b in range(buffers)]
            held = tuple((load_keys(entry), entry) for entry in first)
            return held, tuple(load_entries(jnp.int32(buffers + b)) for b in range(buffers))

        queries: list = []
        # Keys are on their way while the queries are prepared; but not with gfx950's body, whose loop would then wait
        # for more than its own loads.
        held, ahead = load_first() if decode else ((), ())
        for row in rows:
            # one row's operands after the other's: side by side their loads would fill registers. The zero is not
            # known to the compiler: no excess is below -1024
            after = (queries[-1][1] + 1024) >> 31 if queries and decode else 0
            queries.append(body.queries(q_ref, q_scale_ref, weight_ref, row + after))
        held, ahead = (held, ahead) if decode else load_first()

        def step(k, keys, entry, excess, tail):
            operand, key_excess = body.prepare(keys)
            column, fixed, exists = stored_columns(k, entry)
            reached = jnp.where(exists, column + fixed, width)  # no end is beyond the width
            for row, end, query in zip(rows, ends, queries, strict=True):
                seen = reached < end if tail else exists
                value = jnp.where(seen, body.logits(operand, query), -jnp.inf)
                if decode:
                    store_in_place(out_ref, row, column, fixed, value)
                else:
                    plt.store(out_ref.at[row, column], value)
            if decode:
                if tail:  # what lies past the rows' ends may be anything
                    key_excess = jnp.where(order.columns(index(k), order.scale, jnp.int32(0)) < last, key_excess, 0)
                excess = jnp.maximum(excess, jnp.max(key_excess, axis=0))
            return excess

        def trip(tail, i, carry):
            held, ahead, excess = list(carry[0]), list(carry[1]), carry[2]
            for b in range(buffers):
                k = i * buffers + b
                keys, entry = held[b]
                following, ahead[b] = ahead[b], load_entries(k + 2 * buffers)
                # two tiles ahead there is time, and a tile goes to the registers of the one that was just used
                if buffers == 1:
                    held[b] = (load_keys(following), following)
                excess = step(k, keys, entry, excess, tail)
                if buffers == 2:
                    held[b] = (load_keys(following), following)
            return tuple(held), tuple(ahead), excess

        excess = jnp.zeros([d.size for d in order.scale[1:]], jnp.int32) if decode else jnp.int32(0)
        carry, start = (held, ahead, excess), jnp.int32(0)
        if decode:  # most steps need no mask
            start = whole // buffers
            carry = lax.fori_loop(jnp.int32(0), start, functools.partial(trip, False), carry)
        *_, excess = lax.fori_loop(start, cdiv(mine, buffers), functools.partial(trip, True), carry)
        if decode:
            lefts = tuple(left for _, left in queries)
            some = functools.reduce(jnp.maximum, lefts, jnp.max(excess))
            # other threads may store the exact logit than stored the fast one: the maximum over all warps is the
            # barrier between the two
            lax.fori_loop(jnp.int32(0), jnp.where(some > 0, jnp.int32(len(rows)), 0), exact_row, lefts)

    fill(out_ref, rows, live * unit, part, splits, 64 * order.groups)


def fill(out_ref, rows, first_column, part, splits, block):
    """Writes -inf to the columns from ``first_column`` on that belong to this program."""
    width = out_ref.shape[1]
    start, stop = _steps(first_column // block, part, splits), _steps(cdiv(width, block), part, splits)

    def step(k, _):
        column = (part + k * splits) * block + iota((block,), 0)
        for row in rows:
            value = jnp.full((block,), -jnp.inf, jnp.float32)
            plt.store(out_ref.at[row, column], value, mask=(column >= first_column) & (column < width))
        return _

    lax.fori_loop(start, stop, step, jnp.int32(0))
