"""Compares somebody's logits and selections with ours, and names the fault if it is one of the usual ones."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from k2i_jax.candidates import CandidateTable
from k2i_jax.fp4 import FP4Array
from k2i_jax.interop.causes import Inputs, find_causes, row_errors
from k2i_jax.interop.check_scorer import ScorerReport, check_scorer
from k2i_jax.interop.report import Cause, Report
from k2i_jax.page_table import PageTable
from k2i_jax.plane import IndexKPlane

__all__ = ["Cause", "Report", "ScorerReport", "check_scorer", "crosscheck"]

_ROWS_TRIED = 8  # on these the causes are looked for: the ones with the largest errors


def crosscheck(
    ours: Any,
    theirs: Any,
    row_ends: Any,
    *,
    queries: FP4Array | None = None,
    weights: Any = None,
    plane: IndexKPlane | None = None,
    table: PageTable | CandidateTable | None = None,
    weight_scale: float = 1.0,
    our_selection: Any = None,
    their_selection: Any = None,
    tolerance: float = 1e-5,
    tails: str = "unwritten",
    implementation: str | None = None,
    interpret: bool = False,
) -> Report:
    """Compares logits up to each row's end, and selections.

    Args:
      ours: f32[rows, columns]; None scores ``queries`` with ``plane`` and ``table`` here.
      theirs: f32[rows, columns], JAX, NumPy or torch. What lies past a row's end is not compared unless ``tails``
        says so (aiter's and SGLang's logits are uninitialised memory there); of unequal widths the common one counts.
      row_ends: i32[rows] columns each row can see, in these logits (for REINDEX: the candidate table's ``row_ends``).
      queries, weights, plane, table, weight_scale: what was scored, as ``index_logits`` (or ``candidate_logits``, with
        a ``CandidateTable``) takes it. With all four, errors are measured against ``sum_h |w| relu(q.k)`` and a
        difference is searched for its cause; without, against the norm of ``ours``.
      our_selection, their_selection: i32[rows, k] selected columns' positions in any order, negative for none (a
        ``k2i_jax.Selection`` works too); both or neither.
      tolerance: bound on ``norm(theirs - ours) / norm(magnitude)`` per row. 1e-5 suits float32 sums in another order;
        a scorer that rounds dots to bfloat16 (SGLang's torch and Triton ones) needs 1e-2.
      tails: "exact" if theirs promises -inf past each row's end; "unwritten" if it promises nothing.
      implementation, interpret: how our side scores.

    Returns:
      A :class:`~k2i_jax.interop.report.Report`.

    Raises:
      TypeError, ValueError: shapes that do not belong together, or neither ``ours`` nor the inputs to compute it.
    """
    if tails not in ("exact", "unwritten"):
        raise ValueError(f"tails: expected 'exact' or 'unwritten', got {tails!r}")
    given = {"queries": queries, "weights": weights, "plane": plane, "table": table}
    lacking = [name for name, value in given.items() if value is None]
    if lacking and (ours is None or lacking not in (list(given), ["queries", "weights", "plane"])):
        raise ValueError(f"{lacking[0]}: queries, weights, plane and table come together; {', '.join(lacking)} missing")
    if (our_selection is None) != (their_selection is None):
        raise ValueError("their_selection: our_selection and their_selection come together")
    options = {"implementation": implementation, "interpret": interpret}
    inputs = None
    if queries is not None and plane is not None and table is not None and not lacking:
        inputs = Inputs(queries, weights, plane, table, float(weight_scale), options)
    ours = inputs.score() if ours is None and inputs else to_numpy(ours)
    theirs, ends = to_numpy(theirs), to_numpy(row_ends)
    if ours.ndim != 2 or theirs.ndim != 2 or ours.shape[0] != theirs.shape[0] or ends.shape != ours.shape[:1]:
        shapes = f"ours {list(ours.shape)}, theirs {list(theirs.shape)}, row_ends {list(ends.shape)}"
        raise ValueError(f"theirs: expected [rows, columns] logits and [rows] row_ends of the same rows, got {shapes}")
    width = min(ours.shape[1], theirs.shape[1])
    if (ends > width).any():
        row = int(np.argmax(ends > width))
        raise ValueError(f"row_ends: row {row} sees {ends[row]} columns, the logits have {width} in common")
    ours, theirs = (np.ascontiguousarray(x[:, :width], np.float32) for x in (ours, theirs))
    ends = np.maximum(ends, 0)

    live = np.arange(width) < ends[:, None]
    magnitude = inputs.score(absolute=True)[:, :width] if inputs else np.abs(ours)
    error = row_errors(ours, theirs, live, magnitude)
    masks = _masks(ours, theirs, live, tails)
    same = bool((ours.view(np.int32) == theirs.view(np.int32))[live].all())
    with np.errstate(invalid="ignore"):
        differences = np.where(live, theirs - ours, np.nan).astype(np.float32)
    selection = None
    if our_selection is not None:
        selection = _selections(our_selection, their_selection, ours, table, tolerance, magnitude, ends)
    higher = _ends_higher(inputs, theirs, ends, tolerance, tails) if inputs else False
    good = bool((error <= tolerance).all()) and not any(masks.values())
    causes: list[Cause] = []
    if higher:
        causes.append(Cause("row ends one higher", 0.0, True))
    elif not good and inputs:
        rows = np.argsort(-error, kind="stable")[:_ROWS_TRIED]
        causes = find_causes(inputs.take(rows), _widen(theirs[rows], inputs), ends[rows], error[rows], tolerance)
    ok = good and not higher and not (selection and selection["rows unequal"])
    notes = []
    if not ends.any():
        notes.append("no row sees any column: nothing was compared")
    if lacking and not good:
        notes.append("pass queries, weights, plane and table to have the usual causes tried")
    return Report(
        verdict=_verdict(ok, same, good, causes, selection, float(error.max(initial=0.0)), tolerance),
        ok=ok,
        rows=ours.shape[0],
        columns=int(live.sum()),
        tolerance=tolerance,
        same_bits=same,
        error=_error(error, differences),
        masks=masks,
        worst=_worst(differences, live, ours, theirs, table),
        selection=selection,
        causes=causes,
        notes=notes,
        differences=differences,
    )


def to_numpy(x: Any) -> np.ndarray:
    """A JAX, NumPy or torch array as NumPy (bfloat16 becomes float32)."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if x.is_floating_point() else x
        return x.numpy()
    return np.asarray(x)


def _masks(ours, theirs, live, tails) -> dict[str, int]:
    mine, yours = np.isfinite(ours), np.isfinite(theirs)
    masks = {
        "visible to us, not finite there": int((mine & ~yours & live).sum()),
        "not finite here, visible to them": int((~mine & yours & live).sum()),
    }
    if tails == "exact":
        masks["past a row's end, not -inf there"] = int(((theirs != -np.inf) & ~live).sum())
    return masks


def _error(error, differences) -> dict[str, float]:
    size = np.abs(differences[np.isfinite(differences)])
    quantiles = {f"difference, quantile {q:g}": float(np.quantile(size, q)) if size.size else 0.0
                 for q in (0.5, 0.9, 0.99, 1.0)}  # fmt: skip
    return {"largest row error": float(error.max(initial=0.0)), "median row error": float(np.median(error))
            if error.size else 0.0, **quantiles}  # fmt: skip


def _worst(differences, live, ours, theirs, table, count: int = 5) -> list[dict[str, Any]]:
    size = np.where(np.isfinite(ours) != np.isfinite(theirs), np.inf, np.nan_to_num(np.abs(differences)))
    size = np.where(live, size, -1.0)
    order = np.argsort(-size, axis=None, kind="stable")[:count]
    rows, columns = np.unravel_index(order, size.shape) if size.size else (np.array([], int),) * 2
    worst = []
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        if size[row, column] < 0:
            break
        position, slot = (None, None) if table is None else _place(table, row, column)
        worst.append({"row": row, "column": column, "position": position, "slot": slot,
                      "ours": float(ours[row, column]), "theirs": float(theirs[row, column])})  # fmt: skip
    return worst


def _place(table, row: int, column: int) -> tuple[int, int]:
    columns = np.full((table.row_ends.shape[0], 1), column, np.int32)
    position = int(table.positions(jnp.asarray(columns))[row, 0]) if isinstance(table, CandidateTable) else column
    return position, int(table.slots(columns)[row, 0])


def _selections(ours, theirs, logits, table, tolerance, magnitude, ends) -> dict[str, Any]:
    """Compares sets of positions; a difference counts as a tie if our scores cannot tell its members apart."""
    mine, yours = (to_numpy(getattr(s, "positions", s)) for s in (ours, theirs))
    column_of: list[dict[int, int]] | None = None
    if isinstance(table, CandidateTable):
        columns = np.broadcast_to(np.arange(logits.shape[1], dtype=np.int32), logits.shape)
        positions = np.asarray(table.positions(jnp.asarray(columns)))
        column_of = [{int(p): c for c, p in enumerate(row[:end])} for row, end in zip(positions, ends, strict=True)]
    equal = tied = unequal = 0
    overlaps = []
    for row in range(len(mine)):
        a, b = set(mine[row][mine[row] >= 0].tolist()), set(yours[row][yours[row] >= 0].tolist())
        overlaps.append(len(a & b) / max(len(a), len(b), 1) if a or b else 1.0)
        if a == b:
            equal += 1
            continue
        changed = a ^ b
        where = [column_of[row].get(p, -1) if column_of else p for p in changed]
        inside = all(0 <= c < ends[row] for c in where)
        slack = 2 * tolerance * np.linalg.norm(np.where(np.isfinite(magnitude[row]), magnitude[row], 0.0))
        if len(a) == len(b) and inside and np.ptp(logits[row][where]) <= slack:
            tied += 1
        else:
            unequal += 1
    return {
        "rows equal": equal,
        "rows that differ by ties within tolerance": tied,
        "rows unequal": unequal,
        "overlap, smallest": min(overlaps, default=1.0),
        "overlap, mean": float(np.mean(overlaps)) if overlaps else 1.0,
    }


def _ends_higher(inputs: Inputs, theirs, ends, tolerance, tails) -> bool:
    """Whether theirs holds the score of the first column past each row's end, and no score right after it.

    A kernel that fills whole tiles would write more than one; rows whose ends have the same place in a page cannot
    tell the two apart, so they do not count. Where -inf is promised past the ends, the mask alone says it.
    """
    table = inputs.table
    if tails == "exact":
        some = (ends > 0) & (ends < theirs.shape[1])
        return bool(some.any() and (np.isfinite(theirs).sum(axis=1) == ends + 1)[some].all())
    rows = np.flatnonzero((ends > 0) & (ends + 2 <= theirs.shape[1]))[:_ROWS_TRIED]
    if isinstance(table, CandidateTable) or len({int(n) % 64 for n in ends[rows]}) < 2:
        return False
    some = inputs.take(rows)
    assert isinstance(some.table, PageTable)
    some = some._replace(table=PageTable.from_rows(some.table.pages, np.asarray(ends[rows] + 2, np.int32)))
    ours, magnitude, there = some.score(), some.score(absolute=True), theirs[rows]

    def matches(step):
        column = ends[rows][:, None] + step
        a, b, m = (np.take_along_axis(x, column, 1) for x in (ours, there, magnitude))
        return np.isfinite(a) & (a != 0) & (np.abs(b - a) <= np.maximum(10 * tolerance, 1e-6) * m)

    with np.errstate(invalid="ignore"):
        return bool(matches(0).all() and not matches(1).any())


def _widen(theirs: np.ndarray, inputs: Inputs) -> np.ndarray:
    """Theirs at our own width; what is added lies past every row's end."""
    missing = inputs.table.width - theirs.shape[1]
    return np.pad(theirs, ((0, 0), (0, missing)), constant_values=-np.inf) if missing > 0 else theirs


def _verdict(ok, same, good, causes, selection, error, tolerance) -> str:
    if ok:
        return (
            "same bits" if same else f"equal within tolerance: largest row error {error:.1e}, allowed {tolerance:.0e}"
        )
    found = [cause.name for cause in causes if cause.explains]
    if found:
        return f"differs, explained by: {found[0]}"
    if good:
        return f"scores agree, selections differ in {selection['rows unequal']} rows"
    tried = f", none of {len(causes)} usual causes explains it" if causes else ""
    return f"differs: largest row error {error:.1e}, allowed {tolerance:.0e}{tried}"
