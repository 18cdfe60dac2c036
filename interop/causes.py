"""The usual reasons why two scorers disagree, each tried out on our side: would that fault give their numbers?"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from k2i_jax.candidates import CandidateTable
from k2i_jax.fp4 import FP4Array
from k2i_jax.interop.report import Cause
from k2i_jax.layout import PageLayout, convert_pages, query_scale_to_aiter
from k2i_jax.page_table import PageTable
from k2i_jax.plane import IndexKPlane
from k2i_jax.score import candidate_logits, index_logits

_OTHER = {PageLayout.PAGE64: PageLayout.PAGE8, PageLayout.PAGE8: PageLayout.PAGE64}


class Inputs(NamedTuple):
    """What a scorer is called with; ``options`` are keywords of ``index_logits``."""

    queries: FP4Array
    weights: Any
    plane: IndexKPlane
    table: PageTable | CandidateTable
    weight_scale: float
    options: dict[str, Any]

    def score(self, *, absolute: bool = False) -> np.ndarray:
        """f32[rows, columns]; with ``absolute`` weights the magnitude that errors are measured against."""
        op: Callable[..., Any] = candidate_logits if isinstance(self.table, CandidateTable) else index_logits
        weights = jnp.abs(self.weights) if absolute else self.weights
        scale = abs(self.weight_scale) if absolute else self.weight_scale
        return np.asarray(op(self.queries, weights, self.plane, self.table, weight_scale=scale, **self.options))

    def take(self, rows: np.ndarray) -> "Inputs":
        """The same for some of the rows, a sequence each."""
        table = self.table
        if isinstance(table, CandidateTable):
            table = CandidateTable(table.ids[rows], table.virtual_pages[rows], table.row_ends[rows])
        else:
            columns = jnp.broadcast_to(
                jnp.arange(table.pages.shape[1]), (table.row_ends.shape[0], table.pages.shape[1])
            )
            table = PageTable.from_rows(table.row_pages(columns)[rows], table.live_ends()[rows])
        queries = FP4Array(jnp.asarray(self.queries.payload)[rows], jnp.asarray(self.queries.scale)[rows])
        return self._replace(queries=queries, weights=jnp.asarray(self.weights)[rows], table=table)


def row_errors(ours: np.ndarray, theirs: np.ndarray, live: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """``norm(theirs - ours) / norm(magnitude)`` per row over the ``live`` columns that both sides score.

    A row in which one side alone scores some column has error inf.
    """
    mine, yours = np.isfinite(ours) & live, np.isfinite(theirs) & live
    both = mine & yours
    with np.errstate(invalid="ignore"):
        difference = np.where(both, theirs.astype(np.float64) - ours, 0.0)
    size = np.linalg.norm(np.where(both, magnitude, 0.0), axis=1)
    error = np.linalg.norm(difference, axis=1) / np.where(size > 0, size, 1.0)
    return np.where((mine != yours).any(axis=1), np.inf, error)


def find_causes(
    inputs: Inputs, theirs: np.ndarray, ends: np.ndarray, error: np.ndarray, tolerance: float
) -> list[Cause]:
    """Tries every fault on the given rows, ``error`` being that without one; the best explanation comes first."""
    magnitude, plain = inputs.score(absolute=True), float(error.max(initial=0.0))
    columns = np.arange(theirs.shape[1])
    live = columns < ends[:, None]
    causes = []
    for name, faulty, first, last in _faults(inputs):
        ours, known = faulty.score(), live & (columns >= first) & (columns < last)
        left = float(row_errors(ours, theirs, known, magnitude).max(initial=0.0))
        explains = known.any() and (left <= tolerance or left <= plain / 10)
        causes.append(Cause(name, left, bool(explains)))
    ours = inputs.score()
    left = float(row_errors(ours, theirs, columns < ends[:, None] - 1, magnitude).max(initial=0.0))
    newest = np.maximum(ends - 1, 0)[:, None]  # must be what differs, in every row
    alike = np.isclose(np.take_along_axis(ours, newest, 1), np.take_along_axis(theirs, newest, 1), rtol=1e-3)
    causes.append(Cause("row ends one lower", left, bool(left <= tolerance and not alike[ends > 0].any())))
    return sorted(causes, key=lambda cause: (not cause.explains, cause.error))


def _faults(inputs: Inputs) -> Iterator[tuple[str, Inputs, int, float]]:
    """Name, inputs with the fault, and the columns (from, to) whose scores they determine."""
    for name, changes in _byte_faults(inputs.queries, inputs.plane):
        yield name, inputs._replace(**changes), 0, np.inf
    weights = jnp.asarray(inputs.weights)
    for dtype in (jnp.bfloat16, jnp.float16):
        if weights.dtype == jnp.float32:
            rounded = weights.astype(dtype).astype(jnp.float32)
            yield f"weights rounded to {jnp.dtype(dtype)}", inputs._replace(weights=rounded), 0, np.inf
    if inputs.weight_scale != 1:
        yield "weight scale left out", inputs._replace(weight_scale=1.0), 0, np.inf
    candidates, table = isinstance(inputs.table, CandidateTable), inputs.table
    changed: Callable[..., Any] = dataclasses.replace
    field, what, unit = ("virtual_pages", "virtual page", 8) if candidates else ("pages", "page", 64)
    pages = getattr(table, field)
    for step in (1, -1):
        moved = inputs._replace(table=changed(table, **{field: jnp.roll(pages, -step, axis=1)}))
        known = (0, table.width - unit) if step > 0 else (unit, np.inf)
        yield f"page table shifted: column {step:+d}", moved, *known
        moved = inputs._replace(table=changed(table, **{field: pages + step}))
        yield f"page table shifted: {what} ids {step:+d}", moved, 0, np.inf


def _byte_faults(queries: FP4Array, plane: IndexKPlane) -> Iterator[tuple[str, dict[str, Any]]]:
    swap = dataclasses.replace
    if plane.layout in _OTHER and plane.scale is not None:
        other = _OTHER[plane.layout]
        yield f"layouts swapped: key pages read as {other}", {"plane": swap(plane, layout=other)}
        _, wrong = convert_pages(other, plane.layout, plane.payload, plane.scale)
        yield f"scale order: key scales read in {other}'s order", {"plane": swap(plane, scale=wrong)}
        fused = jnp.concatenate([plane.payload, plane.scale], axis=1)
        _, wrong = convert_pages(PageLayout.FUSED, plane.layout, fused, None)
        yield "scale order: key scales read key by key", {"plane": swap(plane, scale=wrong)}
    codes, scale = jnp.asarray(queries.payload), jnp.asarray(queries.scale)
    swapped = FP4Array((codes >> 4) | (codes << 4), scale)  # in the keys it would do the same to the dots
    yield "nibbles swapped, in keys or in queries", {"queries": swapped}
    yield "scale order: query scale groups in reverse", {"queries": FP4Array(codes, scale[..., ::-1])}
    heads = scale.shape[1]
    if heads <= 64:
        flat = query_scale_to_aiter(scale).reshape(len(scale), -1)[:, : heads * 4]  # the same as the way back
        wrong = FP4Array(codes, flat.reshape(scale.shape))
        yield "scale order: natural and aiter's order of query scales mixed up", {"queries": wrong}
