"""The three kinds of index layer - FULL, SOURCE, REINDEX - as a spec has them: from FP4 queries to slots."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float32

from k2i_jax._check import FLOATS, check_array
from k2i_jax._rows import map_rows, table_part
from k2i_jax.candidates import CandidateTable, candidate_table, check_candidates
from k2i_jax.fp4 import FP4Array, check_fp4
from k2i_jax.layout import PageLayout
from k2i_jax.page_table import PageTable, check_table
from k2i_jax.plane import IndexKPlane, check_plane
from k2i_jax.score import candidate_logits, index_logits
from k2i_jax.select import Selection, select_topk, selection_options, source
from k2i_jax.spec import K2iSpec

Candidates = CandidateTable | PageTable  # what a REINDEX layer scores: the page table itself where nothing is left out


@dataclasses.dataclass(frozen=True)
class Lookup:
    """The lookups of a spec. More rows than fit ``spec.memory_budget`` go in parts; no bit depends on it.

    Attributes:
      spec: the model's numbers.
      page8: layout of the ratio-1 plane: True PAGE8, False PAGE64, None whichever a plane has.
      implementation, interpret: as for ``index_logits``.
      selection: ``implementation`` of ``select_topk`` and ``select_candidate_blocks``.
    """

    spec: K2iSpec
    page8: bool | None = None
    implementation: str | None = None
    interpret: bool = False
    selection: str | None = None

    def full(
        self,
        queries: FP4Array,
        weights: Float32[Array, "rows heads"],
        plane: IndexKPlane,
        table: PageTable,
        *,
        ratio: int = 1,
    ) -> Selection:
        """Scores every position that a row sees and selects ``spec.topk`` (FULL).

        Args:
          queries: payload u8[rows, H, 64], scale u8[rows, H, 4], H as the spec has it.
          weights: f32[rows, H], finished: ``head_weights`` scales and rounds them.
          plane: the layer's keys.
          table: page ids and row ends, counted in keys of ``ratio``.
          ratio: tokens a key. It decides nothing but which layouts a fixed ``page8`` allows.

        Raises:
          TypeError, ValueError: wrong types or shapes, another number of heads, a layout that ``page8`` refuses.
        """
        check_table(table)
        self._check(queries, weights, plane, table.row_ends.shape[0], ratio)

        def select(first, queries, weights, row_ends):
            part = table_part(table, first, row_ends)
            return self._select(index_logits(queries, weights, plane, part, **self._options), part)

        return map_rows(select, self.spec.rows_per_step(table.width), queries, weights, table.row_ends)

    def source(
        self,
        queries: FP4Array,
        weights: Float32[Array, "rows heads"],
        plane: IndexKPlane,
        table: PageTable,
        *,
        ratio: int = 1,
    ) -> tuple[Selection, Candidates]:
        """As :meth:`full`, and the candidate table that the REINDEX layers share (SOURCE).

        Up to ``8 * topk_blocks`` positions (by the table's width) every block would be a candidate: no blocks are
        chosen and the page table itself comes back, with which :meth:`reindex` selects the same.
        """
        check_table(table)
        if not self.spec.binds(table.width):
            return self.full(queries, weights, plane, table, ratio=ratio), table
        self._check(queries, weights, plane, table.row_ends.shape[0], ratio)
        selection, blocks = source(
            queries,
            weights,
            plane,
            table,
            k=self.spec.topk,
            topk_blocks=self.spec.topk_blocks,
            rows_per_step=self.spec.rows_per_step(table.width),
            selection=self.selection,
            **self._options,
        )
        return selection, candidate_table(blocks, table)

    def reindex(
        self,
        queries: FP4Array,
        weights: Float32[Array, "rows heads"],
        plane: IndexKPlane,
        candidates: Candidates,
        *,
        ratio: int = 1,
    ) -> Selection:
        """Scores the candidates alone, with this layer's queries and the source's keys (REINDEX).

        Args:
          candidates: what :meth:`source` returned for the same rows. Its cost is theirs, whatever the context.
          queries, weights, plane, ratio: as for :meth:`full`.

        Raises:
          TypeError, ValueError: as :meth:`full`; a page table so wide that candidates must have been chosen.
        """
        if isinstance(candidates, PageTable):
            if self.spec.binds(candidates.width):
                raise ValueError(
                    f"candidates: a page table of {candidates.width} positions is no candidate table (topk_blocks = "
                    f"{self.spec.topk_blocks}); pass what source() returned"
                )
            return self.full(queries, weights, plane, candidates, ratio=ratio)
        check_candidates(candidates)
        self._check(queries, weights, plane, candidates.row_ends.shape[0], ratio)

        def select(_, queries, weights, part):
            return self._select(candidate_logits(queries, weights, plane, part, **self._options), part)

        return map_rows(select, self.spec.rows_per_step(candidates.width), queries, weights, candidates)

    @property
    def _options(self) -> dict[str, Any]:
        return {"implementation": self.implementation, "interpret": self.interpret}

    def _select(self, logits, table):
        return select_topk(logits, table, k=self.spec.topk, **selection_options(self.selection, self.interpret))

    def _check(self, queries, weights, plane, rows, ratio):
        check_plane(plane)
        check_layout(plane, ratio, self.page8)
        if ratio not in self.spec.ratios:
            raise ValueError(f"ratio: expected one of the spec's {list(self.spec.ratios)}, got {ratio!r}")
        check_fp4("queries", queries, (rows, self.spec.heads))
        check_array("weights", weights, FLOATS, (rows, self.spec.heads))


def check_layout(plane: IndexKPlane, ratio: int, page8: bool | None, name: str = "plane") -> None:
    """Raises where a fixed ``page8`` does not allow the plane's layout.

    Only ratio-1 pools are ever PAGE8, so ``page8`` speaks of these, and keys of other ratios are always PAGE64.
    """
    if page8 is None:
        return
    wanted = PageLayout.PAGE8 if page8 and ratio == 1 else PageLayout.PAGE64
    if plane.layout is not wanted:
        raise ValueError(
            f"{name}: page8={page8} means {wanted} for keys of ratio {ratio}, got {plane.layout}; "
            f"repack(plane, {str(wanted)!r}), or build with page8=None to take each plane as it is"
        )
