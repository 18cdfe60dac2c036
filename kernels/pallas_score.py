"""The Pallas kernels of the score: one frame for whole contexts and for candidate tables, two arithmetic bodies.

A program takes some rows of one sequence and every ``splits``-th step of its keys; a step's keys are read and decoded
once for all of these rows. Rows, lengths and tables are run-time values; the grid follows from shapes alone.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import get_abstract_mesh

from k2i_jax.kernels._jax_private import prefetch, store_in_place
from k2i_jax.kernels.config import Config, check_config, default_config
from k2i_jax.kernels.dot_scaled import iota, limit_registers, uniform
from k2i_jax.kernels.pallas_bodies import Decode, DotScaled
from k2i_jax.kernels.pallas_groups import count_groups, find_group, likely_group


def _cdiv(a, b):
    return (a + b - 1) // b


def _steps(count, part, splits):
    """How many of the first ``count`` steps belong to program ``part``: every ``splits``-th."""
    return _cdiv(jnp.maximum(count - part, 0), splits)


def _score_rows(refs, table_ref, table_row, rows, *, body, buffers, part, splits):
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
    live = _cdiv(last, unit)  # table entries that some row sees; nothing is read for others
    decode = isinstance(body, Decode)
    mine = _steps(_cdiv(live, entries_a_step), part, splits)
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
        *_, excess = lax.fori_loop(start, _cdiv(mine, buffers), functools.partial(trip, True), carry)
        if decode:
            lefts = tuple(left for _, left in queries)
            some = functools.reduce(jnp.maximum, lefts, jnp.max(excess))
            # other threads may store the exact logit than stored the fast one: the maximum over all warps is the
            # barrier between the two
            lax.fori_loop(jnp.int32(0), jnp.where(some > 0, jnp.int32(len(rows)), 0), exact_row, lefts)

    _fill(out_ref, rows, live * unit, part, splits, 64 * order.groups)


def _fill(out_ref, rows, first_column, part, splits, block):
    """Writes -inf to the columns from ``first_column`` on that belong to this program."""
    width = out_ref.shape[1]
    start, stop = _steps(first_column // block, part, splits), _steps(_cdiv(width, block), part, splits)

    def step(k, _):
        column = (part + k * splits) * block + iota((block,), 0)
        for row in rows:
            value = jnp.full((block,), -jnp.inf, jnp.float32)
            plt.store(out_ref.at[row, column], value, mask=(column >= first_column) & (column < width))
        return _

    lax.fori_loop(start, stop, step, jnp.int32(0))


def _index_kernel(
    pages_ref,  # i32[S, P]
    starts_ref,  # i32[S + 1]
    *refs,  # row ends i32[R], q u8[R, H, 64], its scale u8[R, H, 4], weights f32[R, H], plane u8[pages, 4096 and 256];
    body,  # out: logits f32[R, 64 P]
    rows,
    longest,
    buffers,
    splits,
    registers,
):
    group, part = limit_registers(pl.program_id(0), registers), pl.program_id(1)
    num_rows = refs[0].shape[0]
    guess, row = likely_group(starts_ref, group, rows, longest)
    # the row's end and page ids would else be waited for one after the other
    group += prefetch(refs[0], jnp.minimum(row, num_rows - 1), jnp.int32(0))
    part += prefetch(pages_ref, guess, jnp.minimum(part * body.order.groups, pages_ref.shape[1] - 1))
    sequence, first, end = find_group(starts_ref, group, rows, num_rows, longest)

    @pl.when(sequence >= 0)
    def _():
        # absent rows repeat the last one: the same bits to the same place
        indices = [jnp.minimum(first + j, end - 1) for j in range(rows)]
        _score_rows(refs, pages_ref, sequence, indices, body=body, buffers=buffers, part=part, splits=splits)

    def outside(row, carry):
        _fill(refs[-1], [row], jnp.int32(0), part, splits, 64 * body.order.groups)
        return carry

    # rows of no sequence: before the first one's start and past the last one's end
    before = jnp.clip(plt.load(starts_ref.at[jnp.int32(0)]), 0, num_rows)
    after = jnp.clip(plt.load(starts_ref.at[jnp.int32(starts_ref.shape[0] - 1)]), before, num_rows)
    lax.fori_loop(jnp.int32(0), jnp.where(group == 0, before, 0), outside, jnp.int32(0))
    lax.fori_loop(jnp.where(group == 0, after, num_rows), jnp.int32(num_rows), outside, jnp.int32(0))


def _candidate_kernel(
    table_ref,  # i32[R, B], virtual pages
    *refs,  # as for ``_index_kernel``, with f32[R, 8 B]
    body,
    buffers,
    splits,
    registers,
):
    row, part = limit_registers(pl.program_id(0), registers), pl.program_id(1)
    part += prefetch(table_ref, row, jnp.minimum(part * body.order.groups * 8, table_ref.shape[1] - 1))
    _score_rows(refs, table_ref, row, [row], body=body, buffers=buffers, part=part, splits=splits)


def _body(config, layout, unit, heads):
    if config.body == "decode":
        return Decode(layout, unit, heads)
    return DotScaled(layout, unit, heads, config.keys // 64)


def _call(kernel, grid, shape, config, interpret, *operands):
    params = plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    logits = jax.ShapeDtypeStruct(shape, jnp.float32)
    return pl.pallas_call(kernel, out_shape=logits, grid=grid, interpret=interpret, compiler_params=params)(*operands)


def _for_each_device(run, config, interpret, heads, facts):
    """Runs ``run(config)`` with the configuration given, or with the default of what the code is lowered for."""
    mesh_device = getattr(get_abstract_mesh(), "abstract_device", None)
    kind = mesh_device.device_kind if mesh_device is not None else "gfx950"
    rocm = "gfx942" if kind.startswith("gfx94") or "MI300" in kind or "MI325" in kind else "gfx950"
    if config is not None:
        check_config(config, heads=heads, device=rocm)
    if interpret or config is not None:
        return run(config or default_config(rocm, heads=heads, **facts))
    choices = {
        name: default_config(device, heads=heads, **facts) for name, device in (("cuda", "cuda"), ("rocm", rocm))
    }
    return lax.platform_dependent(**{name: functools.partial(run, choice) for name, choice in choices.items()})


def index_logits(queries, weights, plane, table, *, config: Config | None = None, interpret: bool = False):
    """Logits of every position a row sees.

    Args:
      queries: ``payload`` u8[R, H, 64], ``scale`` u8[R, H, 4]; H a multiple of 16 up to 128.
      weights: f32[R, H], multiplied by the weight scale.
      plane: ``payload`` u8[pages, 4096], ``scale`` u8[pages, 256], ``layout`` "page64" or "page8".
      table: ``pages`` i32[S, P], ``row_ends`` i32[R], ``query_start_loc`` i32[S + 1], ``max_query_len`` a hint.
      config: overrides the default choice.
      interpret: run in Pallas' interpret mode, on any host.

    Returns:
      f32[R, 64 P], exactly -inf at and past a row's end, for rows of no sequence and where a page does not exist.
      A scale byte 255 touches its own column alone: NaN in interpret mode, broken dots may count as 0 on a GPU.

    Raises:
      ValueError: a configuration that cannot run, naming the field.
    """
    rows, heads = weights.shape
    sequences, entries = table.pages.shape
    if 0 in (rows, sequences, entries):
        return jnp.full((rows, 64 * entries), -jnp.inf, jnp.float32)
    layout = str(getattr(plane.layout, "value", plane.layout))

    def run(config):
        longest = table.max_query_len or _cdiv(rows, sequences)
        facts = dict(buffers=config.buffers, splits=config.splits, registers=config.registers, longest=longest)
        groups = count_groups(rows, sequences, config.rows)
        kernel = functools.partial(_index_kernel, body=_body(config, layout, 64, heads), rows=config.rows, **facts)
        return _call(
            kernel, (groups, config.splits), (rows, 64 * entries), config, interpret,
            table.pages, table.query_start_loc, table.row_ends,
            queries.payload, queries.scale, weights, plane.payload, plane.scale,
        )  # fmt: skip

    facts = dict(rows=rows, sequences=sequences, width=64 * entries, layout=layout, max_query_len=table.max_query_len)
    return _for_each_device(run, config, interpret, heads, facts)


def candidate_logits(queries, weights, plane, candidates, *, config: Config | None = None, interpret: bool = False):
    """Logits of each row's candidate blocks alone, with ``index_logits``' bits at the same positions.

    Args:
      queries, weights, plane, config, interpret: as for ``index_logits``.
      candidates: ``virtual_pages`` i32[R, B], ``8 page + sub``, -1 for absent ones; ``row_ends`` i32[R], how many
        of the 8 B columns a row reaches.

    Returns:
      f32[R, 8 B]; -inf at and past a row's end and where a page does not exist.

    Raises:
      ValueError: a configuration that cannot run, naming the field.
    """
    rows, heads = weights.shape
    blocks = candidates.virtual_pages.shape[1]
    if 0 in (rows, blocks):
        return jnp.full((rows, 8 * blocks), -jnp.inf, jnp.float32)
    layout = str(getattr(plane.layout, "value", plane.layout))

    def run(config):
        facts = dict(buffers=config.buffers, splits=config.splits, registers=config.registers)
        kernel = functools.partial(_candidate_kernel, body=_body(config, layout, 8, heads), **facts)
        return _call(
            kernel, (rows, config.splits), (rows, 8 * blocks), config, interpret,
            candidates.virtual_pages, candidates.row_ends,
            queries.payload, queries.scale, weights, plane.payload, plane.scale,
        )  # fmt: skip

    facts = dict(rows=rows, sequences=rows, width=8 * blocks, layout=layout)
    return _for_each_device(run, config, interpret, heads, facts)
