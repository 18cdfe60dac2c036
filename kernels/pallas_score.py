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


# What the fast form of the decode body leaves to the exact pass, for each row and split.
KEYS_LEFT, ROW_LEFT = 1, 2


def _score_rows(refs, flag_ref, table_ref, table_row, rows, *, body, exact, buffers, part, splits):
    """Scores this program's steps for ``rows``, a list of row indices; they see ``table_ref[table_row]``'s pages.

    The decode body takes two kernels: the fast form, which notes in ``flag_ref`` i32[R, splits] what it cannot do, and
    with ``exact`` the rest of it, one row at a time. In one kernel the exact form's registers would slow the fast one.
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

    def clamp(entry):
        return jnp.clip(entry, 0, limit - 1)

    def load_keys(entry):
        entry = clamp(entry)
        return order.load_payload(payload_ref, entry), order.load_scale(scale_ref, entry, opaque_zero)

    def reach(column, entry):
        """The column; NEVER where its page does not exist (a negative id is a large one)."""
        return jnp.where(entry.astype(jnp.uint32) < limit, column, NEVER)

    def stored_columns(k, entry):
        if not order.flat:
            column = order.columns(index(k), order.store, opaque_zero)
            return column, reach(column, order.spread(entry, order.store))
        at, column = order.flat_columns(step_of(k), live)
        return column, reach(column, entry if unit == 64 else plt.load(table_ref.at[table_row, at]))

    def exact_step(k, flag):
        [row], [end] = rows, ends
        entry = load_entries(k)
        scale = order.load_scale(scale_ref, clamp(entry), opaque_zero).astype(jnp.int32)
        column, reached = stored_columns(k, entry)
        left = ((body.keys_outside(scale) > 0) | (flag >= ROW_LEFT)) & (reached < end)

        @pl.when(jnp.max(left.astype(jnp.int32)) > 0)
        def _():
            load_byte = functools.partial(order.load_payload, payload_ref, clamp(entry))
            value = body.exact_logits(load_byte, scale, q_ref, q_scale_ref, weight_ref, row)
            plt.store(out_ref.at[row, column], value, mask=left)

        return flag

    if exact:
        flag = plt.load(flag_ref.at[rows[0], part])
        lax.fori_loop(0, jnp.where(flag > 0, mine, 0), exact_step, flag)
        return
    if flag_ref is not None:
        for row in rows:
            plt.store(flag_ref.at[row, part], jnp.int32(0))

    @pl.when(mine > 0)
    def _():
        queries: list = []
        for row in rows:
            # one row's operands after the other's: side by side their loads would fill registers
            after = queries[-1][1] >> 31 if queries and isinstance(body, Decode) else 0
            queries.append(body.queries(q_ref, q_scale_ref, weight_ref, row + after))

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
        if flag_ref is not None:
            keys_left = jnp.max(outside) * KEYS_LEFT
            for row, (_, row_left) in zip(rows, queries, strict=True):
                plt.store(flag_ref.at[row, part], keys_left | row_left * ROW_LEFT)

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


def _refs(refs, exact):
    """(input refs and logits, flags or None) of a kernel's trailing refs."""
    if exact:
        *inputs, flag_ref, _, out_ref = refs  # the logits come in and go out in one buffer
        return (*inputs, out_ref), flag_ref
    inputs, (out_ref, *flag_ref) = refs[:6], refs[6:]
    return (*inputs, out_ref), (flag_ref or [None])[0]


def _index_kernel(
    pages_ref,  # i32[S, P]
    starts_ref,  # i32[S + 1]
    *refs,  # row ends i32[R], q u8[R, H, 64], its scale u8[R, H, 4], weights f32[R, H], plane u8[pages, 4096 and 256],
    body,  # with ``exact`` flags i32[R, splits] and logits f32[R, 64 P]; out: logits f32[R, 64 P], flags for "decode"
    rows,
    buffers,
    splits,
    chunks,
    exact,
):
    sequence, part, chunk = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    refs, flag_ref = _refs(refs, exact)
    num_rows = refs[0].shape[0]
    start = jnp.clip(plt.load(starts_ref.at[sequence]), 0, num_rows)
    end = jnp.clip(plt.load(starts_ref.at[sequence + 1]), start, num_rows)

    def group(i, carry):
        first = start + (chunk + i * chunks) * rows
        # absent rows repeat the last one: the same bits to the same place
        indices = [jnp.minimum(first + j, end - 1) for j in range(rows)]
        _score_rows(
            refs, flag_ref, pages_ref, sequence, indices,
            body=body, exact=exact, buffers=buffers, part=part, splits=splits,
        )  # fmt: skip
        return carry

    groups = _cdiv(end - start, rows)
    lax.fori_loop(0, _cdiv(jnp.maximum(groups - chunk, 0), chunks), group, jnp.int32(0))
    if exact:
        return

    def outside(row, carry):
        _fill(refs[-1], [row], jnp.int32(0), part, splits, 64 * body.order.groups)
        return carry

    # rows of no sequence: before the first one's start and past the last one's end
    before = jnp.where((sequence == 0) & (chunk == 0), start, 0)
    after = jnp.where((sequence == pl.num_programs(0) - 1) & (chunk == 0), end, num_rows)
    lax.fori_loop(0, before, outside, jnp.int32(0))
    lax.fori_loop(after, num_rows, outside, jnp.int32(0))


def _candidate_kernel(
    table_ref,  # i32[R, B], virtual pages
    *refs,  # as for ``_index_kernel``, with f32[R, 8 B]
    body,
    buffers,
    splits,
    exact,
):
    row, part = pl.program_id(0), pl.program_id(1)
    refs, flag_ref = _refs(refs, exact)
    _score_rows(
        refs, flag_ref, table_ref, row, [row], body=body, exact=exact, buffers=buffers, part=part, splits=splits
    )


def _body(config, layout, unit, heads):
    if config.body == "decode":
        return Decode(layout, unit, heads)
    return DotScaled(layout, unit, heads, config.keys // 64)


def _call(kernels, grids, shape, config, interpret, *operands):
    """Runs the kernel of the scores and, for the decode body, that of the exact pass; each has its grid."""
    logits = jax.ShapeDtypeStruct(shape, jnp.float32)
    flags = jax.ShapeDtypeStruct((shape[0], config.splits), jnp.int32)
    params = plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    call = functools.partial(pl.pallas_call, interpret=interpret, compiler_params=params)
    if config.body == "dot_scaled":
        return call(kernels[0], out_shape=logits, grid=grids[0])(*operands)
    out, left = call(kernels[0], out_shape=(logits, flags), grid=grids[0])(*operands)
    aliases = {len(operands) + 1: 0}
    return call(kernels[1], out_shape=logits, grid=grids[1], input_output_aliases=aliases)(*operands, left, out)


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
        longest = min(table.max_query_len or _cdiv(rows, sequences), rows)
        kernels, grids = [], []
        for exact, shared in ((False, config.rows), (True, 1)):
            chunks = min(_cdiv(longest, shared), 65535)
            facts = dict(rows=shared, buffers=config.buffers, splits=config.splits, chunks=chunks, exact=exact)
            kernels.append(functools.partial(_index_kernel, body=_body(config, layout, 64, heads), **facts))
            grids.append((sequences, config.splits, chunks))
        return _call(
            kernels, grids, (rows, 64 * entries), config, interpret,
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
        facts = dict(body=_body(config, layout, 8, heads), buffers=config.buffers, splits=config.splits)
        kernels = [functools.partial(_candidate_kernel, exact=exact, **facts) for exact in (False, True)]
        return _call(
            kernels, [(rows, config.splits)] * 2, (rows, 8 * blocks), config, interpret,
            candidates.virtual_pages, candidates.row_ends,
            queries.payload, queries.scale, weights, plane.payload, plane.scale,
        )  # fmt: skip

    facts = dict(rows=rows, sequences=rows, width=8 * blocks, layout=layout)
    return _for_each_device(run, config, interpret, heads, facts)
