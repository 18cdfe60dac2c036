"""Candidate blocks (8 positions each) and the table of virtual pages that scores them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from k2i_jax._check import INT32_MAX, AnyArray, as_int32, check_array
from k2i_jax.layout import PAGE_SIZE, SUB_PAGE_SIZE
from k2i_jax.page_table import PageTable, check_table

_PER_PAGE = PAGE_SIZE // SUB_PAGE_SIZE


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ids", "count"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class CandidateBlocks:
    """The blocks a row may choose from.

    Attributes:
      ids: i32[rows, B] block ids, ascending, then -1. Block b is positions ``[8b, 8b + 8)``.
      count: i32[rows] ids that are not padding.
    """

    ids: Int32[Array, "rows B"]
    count: Int32[Array, "rows"]

    @classmethod
    def from_ids(cls, ids: Int[AnyArray, "rows B"]) -> "CandidateBlocks":
        """From a list in any order, with repeats, padded by any negative ids (SGLang's, say).

        Raises:
          TypeError, ValueError: not integers of rank 2.
        """
        return _canonical(as_int32("ids", ids, ("rows", "B")))


@jax.jit
def _canonical(ids):
    def ascending(x):  # padding last
        return jnp.sort(jnp.where(x < 0, INT32_MAX, x), axis=1)

    ids = ascending(ids)
    if ids.shape[1]:
        ids = ascending(jnp.where(jnp.pad(ids[:, 1:] == ids[:, :-1], ((0, 0), (1, 0))), -1, ids))
    ids = jnp.where(ids == INT32_MAX, -1, ids)
    return CandidateBlocks(ids, jnp.sum(ids >= 0, axis=1, dtype=jnp.int32))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ids", "virtual_pages", "row_ends"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class CandidateTable:
    """The pages of candidate blocks: a page table of 8-slot virtual pages, one row a query.

    Column ``8 i + t`` of the candidates' logits is position ``8 ids[i] + t``.

    Attributes:
      ids: i32[rows, B] block ids, ascending, then -1.
      virtual_pages: i32[rows, B] ``8 * page + sub``; -1 where the block has no page of the pool.
      row_ends: i32[rows] columns a row can reach: a prefix, since the newest block is the last one.
    """

    ids: Int32[Array, "rows B"]
    virtual_pages: Int32[Array, "rows B"]
    row_ends: Int32[Array, "rows"]

    @property
    def width(self) -> int:
        """Columns of this table's logits."""
        return self.ids.shape[1] * SUB_PAGE_SIZE

    def positions(self, columns: Int32[Array, "rows n"]) -> Int32[Array, "rows n"]:
        """Positions of logits columns, -1 for -1."""
        ids = self._entries(self.ids, columns)
        return jnp.where((columns >= 0) & (ids >= 0), ids * SUB_PAGE_SIZE + columns % SUB_PAGE_SIZE, -1)

    def slots(self, columns: Int32[Array, "rows n"]) -> Int32[Array, "rows n"]:
        """Pool slots of logits columns, -1 for -1 and for blocks without a page."""
        pages = self._entries(self.virtual_pages, columns)
        return jnp.where((columns >= 0) & (pages >= 0), pages * SUB_PAGE_SIZE + columns % SUB_PAGE_SIZE, -1)

    def _entries(self, values, columns):
        if self.ids.shape[1] == 0:
            return jnp.full_like(columns, -1)
        return jnp.take_along_axis(values, jnp.maximum(columns, 0) // SUB_PAGE_SIZE, axis=1)


def candidate_table(blocks: CandidateBlocks, table: PageTable) -> CandidateTable:
    """Looks the candidate blocks of each row up in its page table.

    Args:
      blocks: ascending ids, one list a row, as ``select_candidate_blocks`` or ``CandidateBlocks.from_ids`` give.
      table: the page table of the same rows.

    Returns:
      The table, whose reachable columns are ``(kept - 1) * 8 + span``: span is what the row sees of its last block.

    Raises:
      TypeError, ValueError: wrong types, or another number of rows.
    """
    check_table(table)
    check_blocks(blocks, table.row_ends.shape[0])
    return _candidate_table(blocks, table)


@jax.jit
def _candidate_table(blocks, table):
    ids, ends = blocks.ids, table.live_ends()
    # A foreign list may name blocks past the row's end: they hold nothing it may see.
    seen = (ids >= 0) & (ids < (ends[:, None] + SUB_PAGE_SIZE - 1) // SUB_PAGE_SIZE)
    pages = table.row_pages(jnp.where(seen, ids // _PER_PAGE, -1))
    inside = (pages >= 0) & (pages <= INT32_MAX // PAGE_SIZE - 1)  # 8 * page must not wrap into another page
    virtual = jnp.where(seen & inside, pages * _PER_PAGE + ids % _PER_PAGE, -1)
    kept = jnp.sum(seen, axis=1, dtype=jnp.int32)
    newest = jnp.max(jnp.where(seen, ids, -1), axis=1, initial=-1)
    span = jnp.clip(ends - newest * SUB_PAGE_SIZE, 0, SUB_PAGE_SIZE)
    row_ends = jnp.where(kept > 0, (kept - 1) * SUB_PAGE_SIZE + span, 0)
    return CandidateTable(jnp.where(seen, ids, -1), virtual, row_ends)


def check_blocks(blocks, rows: int | str) -> None:
    """Raises unless ``blocks`` is a ``CandidateBlocks`` for ``rows`` rows."""
    if not isinstance(blocks, CandidateBlocks):
        raise TypeError(f"blocks: expected a k2i_jax.CandidateBlocks, got {type(blocks).__name__}")
    check_array("blocks.ids", blocks.ids, (jnp.int32,), (rows, "B"))
    check_array("blocks.count", blocks.count, (jnp.int32,), (blocks.ids.shape[0],))


def check_candidates(candidates) -> None:
    """Raises unless ``candidates`` is a ``CandidateTable`` whose arrays belong together."""
    if not isinstance(candidates, CandidateTable):
        raise TypeError(f"candidate_table: expected a k2i_jax.CandidateTable, got {type(candidates).__name__}")
    check_array("candidate_table.ids", candidates.ids, (jnp.int32,), ("rows", "B"))
    check_array("candidate_table.virtual_pages", candidates.virtual_pages, (jnp.int32,), candidates.ids.shape)
    check_array("candidate_table.row_ends", candidates.row_ends, (jnp.int32,), (candidates.ids.shape[0],))
