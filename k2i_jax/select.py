"""The two-level selection: 2048 candidate blocks of 8, then the top 512 positions, in fixed shapes.

Selection works on an order of the IEEE bits, by radix: find the k-th largest key two bits at a time, keep what is
above it, and of its equals those at the lowest columns. No sort, so no backend's idea of ties, NaN or -0, and the
columns come out ascending.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt32

from k2i_jax._check import AnyArray, as_int32, check_array
from k2i_jax.candidates import (
    CandidateBlocks,
    CandidateTable,
    candidate_table,
    check_blocks,
    check_candidates,
)
from k2i_jax.fp4 import FP4Array
from k2i_jax.kernels.config import Config
from k2i_jax.layout import SUB_PAGE_SIZE
from k2i_jax.page_table import PageTable, check_table
from k2i_jax.plane import IndexKPlane
from k2i_jax.score import candidate_logits, index_logits

_NONE = np.uint32(0)  # order key of what is no choice
_NEGATIVE_INF = np.uint32(0x007FFFFF)  # smallest key of a choice
_PINNED = np.uint32(0xFFFFFFFF)
_SIGN = np.uint32(1 << 31)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["positions", "slots", "count"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Selection:
    """The positions each row attends to.

    Attributes:
      positions: i32[rows, k] ascending, then -1 (SGLang's raw_indices).
      slots: i32[rows, k] their pool slots, then -1 (SGLang's page_indices).
      count: i32[rows] valid entries.
    """

    positions: Int32[Array, "rows k"]
    slots: Int32[Array, "rows k"]
    count: Int32[Array, "rows"]


def _order_keys(x: Float32[Array, "rows n"]) -> UInt32[Array, "rows n"]:
    """Unsigned keys in the order of the floats; -0 equals +0, NaN becomes 0, -inf 0x7fffff."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(bits == _SIGN, _NONE, bits)
    keys = jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)
    return jnp.where(bits & ~_SIGN > np.uint32(0x7F800000), _NONE, keys)


def _top(keys: UInt32[Array, "rows n"], count: Int32[Array, "rows"]) -> Bool[Array, "rows n"]:
    """Marks the ``count`` largest non-zero keys of each row, of equal ones those at the lowest columns."""
    count = jnp.minimum(count, jnp.sum(keys > 0, axis=1, dtype=jnp.int32))

    def refine(i, threshold):
        shift = jnp.uint32(30) - 2 * i.astype(jnp.uint32)
        for digit in (
            1,
            2,
            3,
        ):  # the largest digit that still leaves ``count`` keys wins; counts fall with digits
            trial = threshold & ~(jnp.uint32(3) << shift) | (jnp.uint32(digit) << shift)
            enough = jnp.sum(keys >= trial[:, None], axis=1, dtype=jnp.int32) >= count
            threshold = jnp.where(enough, trial, threshold)
        return threshold

    zeros = jnp.zeros(keys.shape[0], jnp.uint32)
    threshold = lax.fori_loop(jnp.int32(0), jnp.int32(16), refine, zeros)[:, None]
    above = keys > threshold
    equal = (keys == threshold) & (keys > 0)
    spare = count - jnp.sum(above, axis=1, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=1, dtype=jnp.int32) <= spare[:, None]))


def _columns(chosen: Bool[Array, "rows n"], k: int) -> Int32[Array, "rows k"]:
    """Ascending columns of the marks, at most ``k``, then -1."""
    through = jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
    wanted = jnp.arange(1, k + 1, dtype=jnp.int32)
    columns = jax.vmap(lambda row: jnp.searchsorted(row, wanted, side="left"))(through).astype(jnp.int32)
    return jnp.where(columns < chosen.shape[1], columns, -1)


def select_candidate_blocks(
    logits: Float32[AnyArray, "rows width"],
    row_ends: Int[AnyArray, "rows"],
    *,
    topk_blocks: int = 2048,
    block_size: int = SUB_PAGE_SIZE,
) -> CandidateBlocks:
    """Chooses the blocks with the highest maxima; the block of the row's last position always belongs.

    Args:
      logits: f32[rows, width]; what lies past a row's end is not read.
      row_ends: i32[rows]; with padded rows pass ``table.live_ends()``, which is 0 for rows in no sequence.
      topk_blocks: most blocks to keep. ``min(topk_blocks, ceil(n / block_size))`` are kept, whatever they score:
        NaN counts as -inf, ties go to the lower id.
      block_size: positions a block.

    Returns:
      ids i32[rows, min(topk_blocks, ceil(width / block_size))] ascending, then -1, and their count.

    Raises:
      TypeError, ValueError: wrong types or shapes, sizes below 1.
    """
    row_ends = as_int32("row_ends", row_ends)
    check_array("logits", logits, (jnp.float32,), ("rows", "width"))
    check_array("row_ends", row_ends, (jnp.int32,), (logits.shape[0],))
    if topk_blocks < 1 or block_size < 1:
        raise ValueError(f"topk_blocks, block_size: expected at least 1, got {topk_blocks}, {block_size}")
    return _select_blocks(jnp.asarray(logits), row_ends, topk_blocks, block_size)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _select_blocks(logits, row_ends, topk_blocks, block_size):
    rows, width = logits.shape
    blocks = -(-width // block_size)
    if blocks == 0:
        return CandidateBlocks(jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32))
    ends = jnp.clip(row_ends, 0, width)
    keys = jnp.where(jnp.arange(width, dtype=jnp.int32) < ends[:, None], _order_keys(logits), _NONE)
    keys = jnp.pad(keys, ((0, 0), (0, blocks * block_size - width))).reshape(rows, blocks, block_size)
    keys = jnp.maximum(jnp.max(keys, axis=2), _NEGATIVE_INF)
    ids, existing = jnp.arange(blocks, dtype=jnp.int32), (ends + block_size - 1) // block_size
    keys = jnp.where(ids == existing[:, None] - 1, _PINNED, keys)
    keys = jnp.where(ids < existing[:, None], keys, _NONE)
    count = jnp.minimum(existing, topk_blocks)
    return CandidateBlocks(_columns(_top(keys, count), min(topk_blocks, blocks)), count)


def select_topk(
    logits: Float32[AnyArray, "rows width"], table: PageTable | CandidateTable, *, k: int = 512
) -> Selection:
    """Chooses up to ``k`` columns a row by score, ties to the lowest position; NaN and -inf are never chosen.

    Args:
      logits: f32[rows, width] as ``index_logits`` (for a PageTable) or ``candidate_logits`` (for a CandidateTable)
        give; the table's row ends decide what is read.
      table: the table that the logits were made with.
      k: entries a row, also where k exceeds the width.

    Raises:
      TypeError, ValueError: wrong types, k below 1, or logits that are not as wide as the table.
    """
    if isinstance(table, CandidateTable):
        check_candidates(table)
    else:
        check_table(table)
    check_array("logits", logits, (jnp.float32,), (table.row_ends.shape[0], table.width))
    if k < 1:
        raise ValueError(f"k: expected at least 1, got {k}")
    return _select_topk(jnp.asarray(logits), table, k)


@functools.partial(jax.jit, static_argnums=2)
def _select_topk(logits, table, k):
    rows, width = logits.shape
    if 0 in (rows, width):
        empty = jnp.full((rows, k), -1, jnp.int32)
        return Selection(empty, empty, jnp.zeros(rows, jnp.int32))
    ends = table.live_ends() if isinstance(table, PageTable) else table.row_ends
    keys = _order_keys(logits)
    choice = (jnp.arange(width, dtype=jnp.int32) < ends[:, None]) & (keys > _NEGATIVE_INF)
    chosen = _top(jnp.where(choice, keys, _NONE), jnp.full(rows, k, jnp.int32))
    columns = _columns(chosen, k)
    positions = columns if isinstance(table, PageTable) else table.positions(columns)
    return Selection(positions, table.slots(columns), jnp.sum(chosen, axis=1, dtype=jnp.int32))


def reindex(
    queries: FP4Array,
    weights: Any,
    plane: IndexKPlane,
    table: PageTable,
    blocks: CandidateBlocks,
    *,
    k: int = 512,
    weight_scale: Any = 1.0,
    implementation: str | None = None,
    interpret: bool = False,
    config: Config | None = None,
) -> Selection:
    """Scores the candidate blocks with this layer's queries and selects among them (REINDEX).

    As a set, a row's selection is the top-k of its FULL logits with all other blocks masked out. The cost depends on
    the candidates, not on the context. Arguments and errors are those of the parts: ``candidate_table``,
    ``candidate_logits`` and ``select_topk``.
    """
    check_table(table)
    check_blocks(blocks, table.row_ends.shape[0])
    candidates = candidate_table(blocks, table)
    options: dict = {
        "weight_scale": weight_scale,
        "implementation": implementation,
        "interpret": interpret,
        "config": config,
    }
    return select_topk(candidate_logits(queries, weights, plane, candidates, **options), candidates, k=k)


def source(
    queries: FP4Array,
    weights: Any,
    plane: IndexKPlane,
    table: PageTable,
    *,
    k: int = 512,
    topk_blocks: int = 2048,
    rows_per_step: int = 8,
    weight_scale: Any = 1.0,
    implementation: str | None = None,
    interpret: bool = False,
    config: Config | None = None,
) -> tuple[Selection, CandidateBlocks]:
    """Scores everything, selects, and publishes candidate blocks (SOURCE), never holding all logits at once.

    Args:
      rows_per_step: rows whose logits are held at a time; the temporaries are about ``20 B * rows * width``.
      k, topk_blocks: as in ``select_topk`` and ``select_candidate_blocks``; the others as in ``index_logits``.

    Returns:
      What ``select_topk`` and ``select_candidate_blocks`` would return for the whole logits.
    """
    check_table(table)
    if rows_per_step < 1:
        raise ValueError(f"rows_per_step: expected at least 1, got {rows_per_step}")
    options: dict = {
        "weight_scale": weight_scale,
        "implementation": implementation,
        "interpret": interpret,
        "config": config,
    }

    def select(first, queries, weights, row_ends):
        starts = jnp.clip(table.query_start_loc - first, 0, row_ends.shape[0])
        part = PageTable(table.pages, row_ends, starts, table.max_query_len)
        logits = index_logits(queries, weights, plane, part, **options)
        blocks = select_candidate_blocks(logits, part.live_ends(), topk_blocks=topk_blocks)
        return select_topk(logits, part, k=k), blocks

    rows = table.row_ends.shape[0]
    if rows <= rows_per_step:
        return select(0, queries, weights, table.row_ends)
    steps = -(-rows // rows_per_step)

    def chunks(x):
        x = jnp.pad(x, ((0, steps * rows_per_step - rows), *[(0, 0)] * (x.ndim - 1)))
        return x.reshape(steps, rows_per_step, *x.shape[1:])

    first = jnp.arange(steps, dtype=jnp.int32) * rows_per_step
    parts = jax.tree.map(chunks, (queries, weights, table.row_ends))
    out = lax.map(lambda xs: select(xs[0], *xs[1]), (first, parts))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], out)
