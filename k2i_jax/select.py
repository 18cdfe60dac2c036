"""The two-level selection: 2048 candidate blocks of 8, then the top 512 positions, in fixed shapes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int, Int32

from k2i_jax._check import AnyArray, as_int32, as_size, check_array
from k2i_jax._radix import NEGATIVE_INF, NONE, PINNED, columns_of, order_keys, seen_keys, top
from k2i_jax._rows import map_rows, table_part
from k2i_jax.candidates import (
    CandidateBlocks,
    CandidateTable,
    candidate_table,
    check_blocks,
    check_candidates,
)
from k2i_jax.fp4 import FP4Array
from k2i_jax.implementations import check_name
from k2i_jax.kernels.config import Config
from k2i_jax.layout import SUB_PAGE_SIZE
from k2i_jax.page_table import PageTable, check_table
from k2i_jax.plane import IndexKPlane
from k2i_jax.score import candidate_logits, check_queries, index_logits


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


def select_candidate_blocks(
    logits: Float32[AnyArray, "rows width"],
    row_ends: Int[AnyArray, "rows"],
    *,
    topk_blocks: int = 2048,
    block_size: int = SUB_PAGE_SIZE,
    implementation: str | None = None,
    interpret: bool = False,
) -> CandidateBlocks:
    """Chooses the blocks with the highest maxima; the block of the row's last position always belongs.

    Args:
      logits: f32[rows, width]; what lies past a row's end is not read.
      row_ends: i32[rows]; with padded rows pass ``table.live_ends()``, which is 0 for rows in no sequence.
      topk_blocks: most blocks to keep. ``min(topk_blocks, ceil(n / block_size))`` are kept, whatever they score:
        NaN counts as -inf, ties go to the lower id.
      block_size: positions a block.
      implementation, interpret: as in :func:`select_topk`.

    Returns:
      ids i32[rows, min(topk_blocks, ceil(width / block_size))] ascending, then -1, and their count.

    Raises:
      TypeError, ValueError: wrong types or shapes, sizes below 1, an implementation that cannot do it.
      NotImplementedError: as in :func:`select_topk`.
    """
    check_array("logits", logits, (jnp.float32,), ("rows", "width"))
    row_ends = as_int32("row_ends", row_ends, (logits.shape[0],))
    topk_blocks, block_size = as_size("topk_blocks", topk_blocks), as_size("block_size", block_size)
    choice = check_name(implementation, interpret), interpret
    return _select_blocks(jnp.asarray(logits), row_ends, topk_blocks, block_size, choice)


def _top(keys, count, k):
    """Ascending columns of the largest keys, up to ``k``, then -1; and how many there are."""
    chosen = top(keys, count)
    return columns_of(chosen, k), jnp.sum(chosen, axis=1, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _select_blocks(logits, row_ends, topk_blocks, block_size, choice):
    rows, width = logits.shape
    blocks = -(-width // block_size)
    if blocks == 0:
        return CandidateBlocks(jnp.zeros((rows, 0), jnp.int32), jnp.zeros(rows, jnp.int32))
    ends = jnp.clip(row_ends, 0, width)
    keys = jnp.where(jnp.arange(width, dtype=jnp.int32) < ends[:, None], order_keys(logits), NONE)
    keys = jnp.pad(keys, ((0, 0), (0, blocks * block_size - width))).reshape(rows, blocks, block_size)
    keys = jnp.maximum(jnp.max(keys, axis=2), NEGATIVE_INF)
    ids, existing = jnp.arange(blocks, dtype=jnp.int32), (ends + block_size - 1) // block_size
    keys = jnp.where(ids == existing[:, None] - 1, PINNED, keys)
    keys = jnp.where(ids < existing[:, None], keys, NONE)
    count, k, (name, interpret) = jnp.minimum(existing, topk_blocks), min(topk_blocks, blocks), choice
    if name == "pallas":
        from k2i_jax.kernels import pallas_select  # its jax internals are needed by nothing else here

        return CandidateBlocks(pallas_select.top_columns(keys, count, k, interpret=interpret)[0], count)
    return CandidateBlocks(_top(keys, count, k)[0], count)


def select_topk(
    logits: Float32[AnyArray, "rows width"],
    table: PageTable | CandidateTable,
    *,
    k: int = 512,
    implementation: str | None = None,
    interpret: bool = False,
) -> Selection:
    """Chooses up to ``k`` columns a row by score, ties to the lowest position; NaN and -inf are never chosen.

    Args:
      logits: f32[rows, width] as ``index_logits`` (for a PageTable) or ``candidate_logits`` (for a CandidateTable)
        give; the table's row ends decide what is read.
      table: the table that the logits were made with.
      k: entries a row, also where k exceeds the width.
      implementation: None and "xla" are the same: plain JAX. "pallas" is one kernel a row (two or three where there
        are more than 16384 columns), not yet timed; the selection is the same.
      interpret: run the Pallas kernel in interpret mode, on any host.

    Raises:
      TypeError, ValueError: wrong types, k below 1, logits that are not as wide as the table, an implementation that
        does not exist or cannot do it.
      NotImplementedError: "pallas" lowered for a platform that it lacks.
    """
    if isinstance(table, CandidateTable):
        check_candidates(table)
    else:
        check_table(table)
    check_array("logits", logits, (jnp.float32,), (table.row_ends.shape[0], table.width))
    choice = check_name(implementation, interpret), interpret
    return _select_topk(jnp.asarray(logits), table, as_size("k", k), choice)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _select_topk(logits, table, k, choice):
    rows, width = logits.shape
    logits = lax.stop_gradient(logits)  # positions have no gradient, and kernels no rule for one
    if 0 in (rows, width):
        empty = jnp.full((rows, k), -1, jnp.int32)
        return Selection(empty, empty, jnp.zeros(rows, jnp.int32))
    ends = table.live_ends() if isinstance(table, PageTable) else table.row_ends
    name, interpret = choice
    if name == "pallas":
        from k2i_jax.kernels import pallas_select  # its jax internals are needed by nothing else here

        columns, count = pallas_select.top_of_logits(logits, ends, k, interpret=interpret)
    else:
        keys = seen_keys(logits, jnp.arange(width, dtype=jnp.int32), ends[:, None])
        columns, count = _top(keys, jnp.full(rows, k, jnp.int32), k)
    positions = columns if isinstance(table, PageTable) else table.positions(columns)
    return Selection(positions, table.slots(columns), count)


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
    selection: str | None = None,
) -> Selection:
    """Scores the candidate blocks with this layer's queries and selects among them (REINDEX).

    As a set, a row's selection is the top-k of its FULL logits with all other blocks masked out. The cost depends on
    the candidates, not on the context. Arguments and errors are those of the parts: ``candidate_table``,
    ``candidate_logits`` and ``select_topk``, whose implementation is ``selection``.
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
    logits = candidate_logits(queries, weights, plane, candidates, **options)
    return select_topk(logits, candidates, k=k, **selection_options(selection, interpret))


def selection_options(selection: str | None, interpret: bool) -> dict[str, Any]:
    """How ``select_topk`` runs beside a score that is interpreted, or not."""
    return {
        "implementation": check_name(selection, argument="selection"),
        "interpret": interpret and selection == "pallas",
    }


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
    selection: str | None = None,
) -> tuple[Selection, CandidateBlocks]:
    """Scores everything, selects, and publishes candidate blocks (SOURCE), never holding all logits at once.

    Args:
      rows_per_step: rows whose logits are held at a time; the temporaries are about ``20 B * rows * width``.
      k, topk_blocks: as in ``select_topk`` and ``select_candidate_blocks``.
      selection: these two's ``implementation``. The others are as in ``index_logits``.

    Returns:
      What ``select_topk`` and ``select_candidate_blocks`` would return for the whole logits.
    """
    check_table(table)
    weights = check_queries(queries, weights, weight_scale, table.row_ends.shape[0])
    rows_per_step = as_size("rows_per_step", rows_per_step)
    options: dict = {
        "weight_scale": weight_scale,
        "implementation": implementation,
        "interpret": interpret,
        "config": config,
    }

    how = selection_options(selection, interpret)

    def select(first, queries, weights, row_ends):
        part = table_part(table, first, row_ends)
        logits = index_logits(queries, weights, plane, part, **options)
        blocks = select_candidate_blocks(logits, part.live_ends(), topk_blocks=topk_blocks, **how)
        return select_topk(logits, part, k=k, **how), blocks

    return map_rows(select, rows_per_step, queries, weights, table.row_ends)
