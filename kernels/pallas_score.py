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

from k2i_jax.kernels.config import Config, check_config, default_config
from k2i_jax.kernels.dot_scaled import iota, uniform
from k2i_jax.kernels.pallas_bodies import Decode, DotScaled

NEVER = 2**31 - 1  # a column no row reaches


def _cdiv(a, b):
    return (a + b - 1) // b


def _score_rows(refs, table_ref, table_row, rows, *, body, num_pages, buffers, part, splits):
    """Scores this program's steps for ``rows``, a list of row indices; they see ``table_ref[table_row]``'s pages."""
    ends_ref, q_ref, q_scale_ref, weight_ref, payload_ref, scale_ref, out_ref = refs
    order, width = body.order, out_ref.shape[1]
    unit, entries = order.unit, table_ref.shape[1]
    entries_a_step = 64 * order.groups // unit
    limit = num_pages * 64 // unit
    ends = [jnp.clip(plt.load(ends_ref.at[row]), 0, width) for row in rows]
    if len(rows) > 1:
        ends = [uniform(end) for end in ends]  # registers are short with many rows
    last = functools.reduce(jnp.maximum, ends)
    live = _cdiv(last, unit)  # table entries that some row sees; nothing is read for others
    mine = _cdiv(jnp.maximum(_cdiv(live, entries_a_step) - part, 0), splits)  # steps
    opaque_zero = part >> 31

    # A step past the last repeats the last: loads ahead stay inside the live entries, a surplus step writes the
    # same bits to the same place, and no load or store of the loop needs a mask.
    def step_of(k):
        return part + jnp.minimum(k, mine - 1) * splits

    def index(k):
        return order.entry_index(step_of(k), live)

    def load_entries(k):
        return plt.load(table_ref.at[table_row, index(k)])

    def load_keys(entry):
        return order.load(payload_ref, scale_ref, jnp.clip(entry, 0, limit - 1), opaque_zero)

    def reach(column, entry):
        """The column; NEVER where its page does not exist (a negative id is a large one)."""
        return jnp.where(entry.astype(jnp.uint32) < limit, column, NEVER)

    def stored_columns(k, entry):
        if not order.flat:
            column = order.columns(index(k), order.store, opaque_zero)
            return column, reach(column, order.spread(entry, order.store))
        at, column = order.flat_columns(step_of(k), live)
        return column, reach(column, entry if unit == 64 else plt.load(table_ref.at[table_row, at]))

    def exact_pass(queries, outside):
        """Rewrites the logits that the decode body's fast form cannot give."""
        rows_outside = [of_row for _, of_row in queries]
        any_row = functools.reduce(jnp.bitwise_or, rows_outside)

        def of_step(k, _):
            entry = load_entries(k)
            keys = load_keys(entry)
            keys_outside = body.keys_outside(keys).astype(jnp.int32)
            column, reached = stored_columns(k, entry)

            def of_row(j, _):  # a loop, not unrolled: rare, and long to compile
                row = jnp.minimum(rows[0] + j, rows[-1])
                outside = keys_outside | sum(jnp.where(j == i, flag, 0) for i, flag in enumerate(rows_outside))
                end = jnp.clip(plt.load(ends_ref.at[row]), 0, width)
                value = body.exact_logits(keys, q_ref, q_scale_ref, weight_ref, row)
                plt.store(out_ref.at[row, column], value, mask=(outside > 0) & (reached < end))
                return _

            return lax.fori_loop(0, len(rows), of_row, _)

        @pl.when(jnp.max(outside) + any_row > 0)
        def _():
            lax.fori_loop(0, mine, of_step, jnp.int32(0))

    @pl.when(mine > 0)
    def _():
        queries = [body.queries(q_ref, q_scale_ref, weight_ref, row) for row in rows]

        def step(k, keys, entry, outside):
            operand, outside_keys = body.prepare(keys)
            column, reached = stored_columns(k, entry)
            for row, end, query in zip(rows, ends, queries, strict=True):
                plt.store(out_ref.at[row, column], jnp.where(reached < end, body.logits(operand, query), -jnp.inf))
            if outside_keys is not None:
                column = order.columns(index(k), order.scale, jnp.int32(0))
                outside = outside | (outside_keys & (column < last)).astype(jnp.int32)
            return outside

        def trip(i, carry):
            held, ahead, outside = list(carry[0]), list(carry[1]), carry[2]
            for b in range(buffers):
                k = i * buffers + b
                keys, entry = held[b]
                held[b] = (load_keys(ahead[b]), ahead[b])
                ahead[b] = load_entries(k + 2 * buffers)
                outside = step(k, keys, entry, outside)
            return tuple(held), tuple(ahead), outside

        first = [load_entries(jnp.int32(b)) for b in range(buffers)]
        held = tuple((load_keys(entry), entry) for entry in first)
        ahead = tuple(load_entries(jnp.int32(buffers + b)) for b in range(buffers))
        outside = jnp.zeros([d.size for d in order.scale], jnp.int32) if isinstance(body, Decode) else jnp.int32(0)
        *_, outside = lax.fori_loop(0, _cdiv(mine, buffers), trip, (held, ahead, outside))
        if isinstance(body, Decode):
            exact_pass(queries, outside)

    _fill(out_ref, rows, live * unit, part, splits, 64 * order.groups)


def _fill(out_ref, rows, first_column, part, splits, block):
    """Writes -inf to the columns from ``first_column`` on that belong to this program."""
    width = out_ref.shape[1]
    start = _cdiv(jnp.maximum(first_column // block - part, 0), splits)
    stop = _cdiv(jnp.maximum(_cdiv(width, block) - part, 0), splits)

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
    ends_ref,  # i32[R]
    q_ref,  # u8[R, H, 64]
    q_scale_ref,  # u8[R, H, 4]
    weight_ref,  # f32[R, H]
    payload_ref,  # u8[pages, 4096]
    scale_ref,  # u8[pages, 256]
    out_ref,  # f32[R, 64 P]
    *,
    body,
    config,
    chunks,
):
    sequence, part, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    num_rows = out_ref.shape[0]
    start = jnp.clip(plt.load(starts_ref.at[sequence]), 0, num_rows)
    end = jnp.clip(plt.load(starts_ref.at[sequence + 1]), start, num_rows)
    refs = (ends_ref, q_ref, q_scale_ref, weight_ref, payload_ref, scale_ref, out_ref)

    def group(i, _):
        first = start + (chunk + i * chunks) * config.rows
        # absent rows repeat the last one: the same bits to the same place
        rows = [jnp.minimum(first + j, end - 1) for j in range(config.rows)]
        _score_rows(
            refs, pages_ref, sequence, rows, body=body, num_pages=payload_ref.shape[0],
            buffers=config.buffers, part=part, splits=config.splits,
        )  # fmt: skip
        return _

    groups = _cdiv(end - start, config.rows)
    lax.fori_loop(0, _cdiv(jnp.maximum(groups - chunk, 0), chunks), group, jnp.int32(0))

    def outside(row, _):
        _fill(out_ref, [row], jnp.int32(0), part, config.splits, config.keys)
        return _

    # rows of no sequence: before the first one's start and past the last one's end
    before = jnp.where((sequence == 0) & (chunk == 0), start, 0)
    after = jnp.where((sequence == pl.num_programs(0) - 1) & (chunk == 0), end, num_rows)
    lax.fori_loop(0, before, outside, jnp.int32(0))
    lax.fori_loop(after, num_rows, outside, jnp.int32(0))


def _candidate_kernel(
    table_ref,  # i32[R, B], virtual pages
    ends_ref,  # i32[R]
    q_ref,  # u8[R, H, 64]
    q_scale_ref,  # u8[R, H, 4]
    weight_ref,  # f32[R, H]
    payload_ref,  # u8[pages, 4096]
    scale_ref,  # u8[pages, 256]
    out_ref,  # f32[R, 8 B]
    *,
    body,
    config,
):
    row, part = pl.program_id(0), pl.program_id(1)
    refs = (ends_ref, q_ref, q_scale_ref, weight_ref, payload_ref, scale_ref, out_ref)
    _score_rows(
        refs, table_ref, row, [row], body=body, num_pages=payload_ref.shape[0],
        buffers=config.buffers, part=part, splits=config.splits,
    )  # fmt: skip


def _body(config, layout, unit, heads):
    if config.body == "decode":
        return Decode(layout, unit, heads)
    return DotScaled(layout, unit, heads, config.keys // 64)


def _call(kernel, shape, grid, config, interpret, *operands):
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=grid,
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
    )(*operands)


def _for_each_device(run, config, interpret, heads, facts):
    """Runs ``run(config)`` with the configuration given, or with the default of what the code is lowered for."""
    mesh_device = getattr(get_abstract_mesh(), "abstract_device", None)
    kind = mesh_device.device_kind if mesh_device is not None else "gfx950"
    rocm = "gfx942" if kind.startswith("gfx94") or "MI300" in kind or "MI325" in kind else "gfx950"
    if config is not None:
        check_config(config, heads=heads, device=rocm)
    if interpret or config is not None:
        return run(config or default_config(rocm, heads=heads, **facts))
    choices = {name: default_config(device, heads=heads, **facts) for name, device in (("cuda", "cuda"), ("rocm", rocm))}
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
      A scale byte 255 makes its own column NaN (with "dot_scaled" on a GPU its broken dots may count as 0).

    Raises:
      ValueError: a configuration that cannot run, naming the field.
    """
    rows, heads = weights.shape
    sequences, entries = table.pages.shape
    if 0 in (rows, sequences, entries):
        return jnp.full((rows, 64 * entries), -jnp.inf, jnp.float32)
    layout = str(getattr(plane.layout, "value", plane.layout))

    def run(config):
        chunks = min(_cdiv(min(table.max_query_len or _cdiv(rows, sequences), rows), config.rows), 65535)
        kernel = functools.partial(_index_kernel, body=_body(config, layout, 64, heads), config=config, chunks=chunks)
        return _call(
            kernel, (rows, 64 * entries), (sequences, config.splits, chunks), config, interpret,
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
        kernel = functools.partial(_candidate_kernel, body=_body(config, layout, 8, heads), config=config)
        return _call(
            kernel, (rows, 8 * blocks), (rows, config.splits), config, interpret,
            candidates.virtual_pages, candidates.row_ends,
            queries.payload, queries.scale, weights, plane.payload, plane.scale,
        )  # fmt: skip

    facts = dict(rows=rows, sequences=rows, width=8 * blocks, layout=layout)
    return _for_each_device(run, config, interpret, heads, facts)
