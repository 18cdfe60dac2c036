"""Which page holds which positions of which sequence, and how far each row sees: pytrees, usable inside jit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from k2i_jax._check import INT32_MAX, AnyArray, as_int32, as_size, check_array, is_traced
from k2i_jax.layout import PAGE_SIZE

FULL_PAGE_SIZE = 256  # tokens a page of SGLang's main KV pool, whose tables index pages are derived from
MANY = 1 << 20  # pairs of a row and a sequence that are worth a search


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "row_ends", "query_start_loc"],
    meta_fields=["max_query_len"],
)
@dataclasses.dataclass(frozen=True)
class PageTable:
    """Page table of a batch. The rows (queries) of a sequence are consecutive.

    Attributes:
      pages: i32[sequences, P] 64-slot page ids; what lies past every row end never matters.
      row_ends: i32[rows] how many positions each row sees. An input: nothing here derives it.
      query_start_loc: i32[sequences + 1] first row of each sequence, and one past the last row. Rows outside belong
        to no sequence and see nothing.
      max_query_len: most rows a sequence, as a tuning hint for kernels; results do not depend on it.
    """

    pages: Int32[Array, "sequences P"]
    row_ends: Int32[Array, "rows"]
    query_start_loc: Int32[Array, "sequences+1"]
    max_query_len: int | None = None

    @property
    def width(self) -> int:
        """Columns of this table's logits: ``64 P``."""
        return self.pages.shape[1] * PAGE_SIZE

    @classmethod
    def from_arrays(cls, pages, row_ends, query_start_loc, *, max_query_len: int | None = None) -> "PageTable":
        """A table of any shape; see the class for the arguments (wider integers saturate to int32).

        Raises:
          TypeError, ValueError: not integers, or shapes that do not belong together.
        """
        if max_query_len is not None:
            max_query_len = as_size("max_query_len", max_query_len)
        table = cls(
            as_int32("pages", pages),
            as_int32("row_ends", row_ends),
            as_int32("query_start_loc", query_start_loc),
            max_query_len,
        )
        check_table(table)
        return table

    @classmethod
    def from_rows(cls, pages: Int[AnyArray, "rows P"], row_ends: Int[AnyArray, "rows"]) -> "PageTable":
        """A sequence a row: decode, or a table that repeats a sequence's pages for each of its rows."""
        row_ends = as_int32("row_ends", row_ends, ("rows",))
        starts = jnp.arange(row_ends.shape[0] + 1, dtype=jnp.int32)
        return cls.from_arrays(pages, row_ends, starts, max_query_len=1)

    @classmethod
    def from_verify(
        cls, pages: Int[AnyArray, "sequences P"], row_ends: Int[AnyArray, "rows"], rows_per_sequence: int
    ) -> "PageTable":
        """``rows_per_sequence`` rows each, as speculative verify has (drafts + 1)."""
        pages, row_ends = as_int32("pages", pages, ("sequences", "P")), as_int32("row_ends", row_ends, ("rows",))
        sequences, rows = pages.shape[0], row_ends.shape[0]
        rows_per_sequence = as_size("rows_per_sequence", rows_per_sequence)
        if sequences * rows_per_sequence != rows:
            raise ValueError(
                f"rows_per_sequence: {sequences} sequences x {rows_per_sequence} rows do not make the {rows} row_ends"
            )
        starts = jnp.arange(sequences + 1, dtype=jnp.int32) * rows_per_sequence
        return cls.from_arrays(pages, row_ends, starts, max_query_len=rows_per_sequence)

    @classmethod
    def from_full_pages(
        cls,
        full_pages: Int[AnyArray, "sequences F"],
        row_ends: Int[AnyArray, "rows"],
        *,
        ratio: int,
        query_start_loc=None,
    ) -> "PageTable":
        """From a table of 256-token pages: index page ``full * B + k`` with ``B = 256 // ratio // 64``.

        Args:
          full_pages: i32[sequences, F]; negative ids stay negative.
          row_ends: i32[rows], counted in index keys (not tokens).
          ratio: tokens a key, 1 or 2 (up to 4: a page must hold whole index pages).
          query_start_loc: i32[sequences + 1]; None for a sequence a row.

        Raises:
          TypeError, ValueError: no integers, wrong ranks, a ratio whose pages do not divide.
        """
        ratio = as_size("ratio", ratio)
        if ratio not in (1, 2, 4):
            raise ValueError(f"ratio: expected 1, 2 or 4 (256 tokens must make whole 64-key pages), got {ratio}")
        per_full = FULL_PAGE_SIZE // ratio // PAGE_SIZE
        full = as_int32("full_pages", full_pages, ("sequences", "F"))
        full = jnp.where((full < 0) | (full > INT32_MAX // per_full - 1), -1, full)
        pages = full[..., None] * per_full + jnp.arange(per_full, dtype=jnp.int32)
        pages = jnp.where(full[..., None] < 0, -1, pages).reshape(full.shape[0], -1)
        if query_start_loc is None:
            return cls.from_rows(pages, row_ends)
        return cls.from_arrays(pages, row_ends, query_start_loc)

    def row_sequences(self) -> Int32[Array, "rows"]:
        """Sequence of each row, -1 for rows in no sequence."""
        sequence = _last_start(self.query_start_loc, self.row_ends.shape[0])
        return jnp.where(sequence < self.pages.shape[0], sequence, -1)

    def live_ends(self) -> Int32[Array, "rows"]:
        """Row ends as the ops read them: within 0..width, and 0 for rows in no sequence."""
        rows, starts = jnp.arange(self.row_ends.shape[0], dtype=jnp.int32), self.query_start_loc
        live = (rows >= starts[0]) & (rows < starts[-1])
        return jnp.where(live, jnp.clip(self.row_ends, 0, self.width), 0)

    def row_pages(self, columns: Int32[Array, "rows n"]) -> Int32[Array, "rows n"]:
        """Page ids in ``columns`` of each row's own table; -1 outside the table and for rows in no sequence."""
        sequence = self.row_sequences()[:, None]
        inside = (columns >= 0) & (columns < self.pages.shape[1]) & (sequence >= 0)
        if 0 in self.pages.shape:
            return jnp.full(columns.shape, -1, jnp.int32)
        return jnp.where(inside, self.pages[jnp.maximum(sequence, 0), jnp.where(inside, columns, 0)], -1)

    def slots(self, positions: Int[AnyArray, "rows n"]) -> Int32[Array, "rows n"]:
        """Pool slots ``page * 64 + position % 64``; -1 for padding (-1), past the table and for negative pages."""
        positions = as_int32("positions", positions, (self.row_ends.shape[0], "n"))
        pages = self.row_pages(jnp.where(positions >= 0, positions // PAGE_SIZE, -1))
        live = (pages >= 0) & (pages <= INT32_MAX // PAGE_SIZE - 1)
        return jnp.where(live, pages * PAGE_SIZE + positions % PAGE_SIZE, -1)

    def check(self, plane) -> None:
        """Raises on values that the ops would only mask; eager only.

        Args:
          plane: the ``IndexKPlane`` that the table points into.

        Raises:
          ValueError: query_start_loc that decreases or leaves the rows, a row end past the table, or a page id
            outside the pool below a row end; each names the first row and value.
          TypeError: called with traced values, under ``jit``.
        """
        if is_traced(self.pages, self.row_ends, self.query_start_loc):
            raise TypeError("table: check() needs values; call it outside jit, the ops themselves stay safe inside")
        starts, rows = np.asarray(self.query_start_loc), self.row_ends.shape[0]
        if (np.diff(starts) < 0).any() or starts[0] < 0 or starts[-1] > rows:
            raise ValueError(f"query_start_loc: must not decrease and stay in 0..{rows}, got {starts.tolist()}")
        ends, sequences, pages = (
            np.asarray(self.row_ends),
            np.asarray(self.row_sequences()),
            np.asarray(self.pages),
        )
        past = (ends > self.width) & (sequences >= 0)
        if past.any():
            row = int(past.argmax())
            raise ValueError(f"row_ends: row {row} ends at {ends[row]}, its table holds {self.width} positions")
        for row in np.flatnonzero(sequences >= 0).tolist():
            used = pages[sequences[row], : -(-max(int(ends[row]), 0) // PAGE_SIZE)]
            bad = (used < 0) | (used >= plane.num_pages)
            if bad.any():
                column = int(bad.argmax())
                raise ValueError(
                    f"pages: row {row} sees page {used[column]} in column {column}, the plane has pages "
                    f"0..{plane.num_pages - 1}"
                )


def check_table(table, name: str = "table", rows: int | str = "rows") -> None:
    """Raises unless ``table`` is a ``PageTable`` of ``rows`` rows whose arrays belong together."""
    if not isinstance(table, PageTable):
        raise TypeError(f"{name}: expected a k2i_jax.PageTable, got {type(table).__name__}")
    check_array(f"{name}.pages", table.pages, (jnp.int32,), ("sequences", "P"))
    check_array(f"{name}.row_ends", table.row_ends, (jnp.int32,), (rows,))
    check_array(f"{name}.query_start_loc", table.query_start_loc, (jnp.int32,), (table.pages.shape[0] + 1,))


def decode_row_ends(seq_lens: Int[AnyArray, "sequences"], *, ratio: int = 1) -> Int32[Array, "sequences"]:
    """Row ends of a decode step: the row at position ``seq_len - 1`` sees ``seq_len // ratio`` keys.

    Raises:
      TypeError, ValueError: no integers, wrong ranks, a ratio below 1.
    """
    return _visible(as_int32("seq_lens", seq_lens, ("sequences",)) - 1, ratio)


def verify_row_ends(
    first_positions: Int[AnyArray, "sequences"], rows_per_sequence: int, *, ratio: int = 1
) -> Int32[Array, "rows"]:
    """Row ends of a verify step, whose rows stand at ``first_position + 0 .. rows_per_sequence - 1``.

    Raises:
      TypeError, ValueError: no integers, wrong ranks, a size below 1.
    """
    first = as_int32("first_positions", first_positions, ("sequences",))
    offsets = jnp.arange(as_size("rows_per_sequence", rows_per_sequence), dtype=jnp.int32)
    positions = _moved(first[:, None], offsets)
    return _visible(positions.reshape(-1), ratio)


def prefill_row_ends(
    first_positions: Int[AnyArray, "sequences"],
    query_start_loc: Int[AnyArray, "sequences+1"],
    num_rows: int,
    *,
    ratio: int = 1,
    step: int = 1,
) -> Int32[Array, "rows"]:
    """Row ends of ragged prefill rows.

    Args:
      first_positions: position of each sequence's first row; under context parallelism, of this rank's first row.
      query_start_loc: first row of each sequence and one past the last.
      num_rows: rows, padding included; a row in no sequence ends at 0.
      ratio: tokens a key; a query at position p sees ``(p + 1) // ratio`` keys.
      step: distance between a sequence's rows: the rank count of context-parallel prefill, else 1.

    Raises:
      TypeError, ValueError: no integers, shapes that do not belong together, a size below 1 (num_rows: below 0).
    """
    first = as_int32("first_positions", first_positions, ("sequences",))
    starts = as_int32("query_start_loc", query_start_loc, (first.shape[0] + 1,))
    num_rows = as_size("num_rows", num_rows, 0)
    if first.shape[0] == 0:
        return jnp.zeros(num_rows, jnp.int32)
    rows, sequence = jnp.arange(num_rows, dtype=jnp.int32), _last_start(starts, num_rows)
    live: Bool[Array, "rows"] = (sequence >= 0) & (sequence < first.shape[0])
    sequence = jnp.where(live, sequence, 0)
    positions = _moved(first[sequence], as_size("step", step) * (rows - starts[sequence]))
    return jnp.where(live, _visible(positions, ratio), 0)


def _last_start(starts, num_rows):
    """For each row, the last sequence that starts at it or before; -1 before the first."""
    few = starts.shape[0] * num_rows <= MANY  # compared at once: a search is a loop, of several launches a trip on GPUs
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    method = "compare_all" if few else "scan"
    return jnp.searchsorted(starts, rows, side="right", method=method).astype(jnp.int32) - 1


def _moved(first, offsets):
    """``first + offsets``, which are not negative, and not past the last position that has a successor."""
    return jnp.minimum(first, INT32_MAX - 1 - offsets) + offsets


def _visible(positions, ratio):
    return jnp.maximum(positions + 1, 0) // as_size("ratio", ratio)
