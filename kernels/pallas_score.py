"""The Pallas kernels of the score: one frame for whole contexts and for candidate tables, two arithmetic bodies.

A program takes some rows of one sequence and every ``splits``-th step of its keys; a step's keys are read and decoded
once for all of these rows. Rows, lengths and tables are run-time values; the grid follows from shapes alone.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from k2i_jax._varying import shaped, varying
from k2i_jax.kernels._jax_private import gpu_kind, prefetch
from k2i_jax.kernels.config import Config, check_config, default_config
from k2i_jax.kernels.ops import limit_registers
from k2i_jax.kernels.pallas_bodies import Decode, DotScaled
from k2i_jax.kernels.pallas_frame import cdiv, fill, score_rows
from k2i_jax.kernels.pallas_groups import count_groups, find_group, likely_group


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
        score_rows(refs, pages_ref, sequence, indices, body=body, buffers=buffers, part=part, splits=splits)

    def outside(row, carry):
        fill(refs[-1], [row], jnp.int32(0), part, splits, 64 * body.order.groups)
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
    score_rows(refs, table_ref, row, [row], body=body, buffers=buffers, part=part, splits=splits)


def _body(config, layout, unit, heads):
    if config.body == "decode":
        return Decode(layout, unit, heads)
    return DotScaled(layout, unit, heads, config.keys // 64)


def _call(kernel, grid, shape, config, interpret, *operands):
    params = plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    operands = varying(operands, operands)
    logits = shaped(shape, jnp.float32, operands)
    return pl.pallas_call(kernel, out_shape=logits, grid=grid, interpret=interpret, compiler_params=params)(*operands)


def _check_somewhere(config, heads, devices):
    """Raises unless one of the devices that the code may be lowered for can run the configuration."""
    first = None
    for device in devices:
        try:
            return check_config(config, heads=heads, device=device)
        except ValueError as error:
            first = first or error
    assert first is not None
    raise first


def _for_each_device(run, config, interpret, heads, facts):
    """Runs ``run(config)`` with the configuration given, or with the default of what the code is lowered for."""
    kind = gpu_kind()
    rocm = "gfx942" if kind.startswith("gfx94") or "MI300" in kind or "MI325" in kind else "gfx950"
    amd = kind.startswith(("gfx", "AMD"))
    if config is not None:
        _check_somewhere(config, heads, (rocm,) if amd else ("cuda",) if kind else (rocm, "cuda"))
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
        longest = table.max_query_len or cdiv(rows, sequences)
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
