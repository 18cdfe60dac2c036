"""A conformance test for other people's scorers: any torch callable with the keywords of SGLang's row-group kernel."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import numpy as np

from k2i_jax import reference
from k2i_jax.candidates import CandidateTable, candidate_table
from k2i_jax.case import load_case
from k2i_jax.interop.devices import torch
from k2i_jax.layout import PageLayout, query_scale_to_aiter
from k2i_jax.page_table import PageTable
from k2i_jax.parity import BOUNDARY_LENGTHS, LAYOUTS, Check, bits_equal, random_problem
from k2i_jax.plane_ops import repack
from k2i_jax.select import select_candidate_blocks

_PAGES_PER_BLOCK = {"full": 8, "candidates": 1}  # pages_per_block: a 64-slot page a table entry, or a virtual page


@dataclasses.dataclass(frozen=True)
class ScorerReport:
    """What :func:`check_scorer` saw; true in a condition if everything holds."""

    checks: list[tuple[str, Check]]

    @property
    def ok(self) -> bool:
        return all(check.holds for _, check in self.checks)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        """One line a check; what fails is marked."""
        return "\n".join(f"{'ok  ' if c.holds else 'FAIL'} {problem}, {c.layout}: {c.name}: {c.value}"
                         for problem, c in self.checks)  # fmt: skip

    def to_json(self) -> str:
        return json.dumps([{"problem": problem, **check._asdict()} for problem, check in self.checks], indent=1)


@dataclasses.dataclass
class _Problem:
    """Inputs in both layouts, their exact logits, and the same as torch tensors for the callable."""

    name: str
    queries: Any
    weights: np.ndarray
    planes: dict[PageLayout, Any]
    table: PageTable

    def __post_init__(self):
        self.ends = np.asarray(self.table.live_ends())
        self.live = np.arange(self.table.width) < self.ends[:, None]

    @functools.cached_property
    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """Logits in float64, and what errors are measured against."""
        return reference.index_logits(self.queries, self.weights, self.planes[PageLayout.PAGE64], self.table)

    @functools.cached_property
    def candidates(self) -> CandidateTable:
        blocks = select_candidate_blocks(self.exact[0].astype(np.float32), self.ends, topk_blocks=6)
        return candidate_table(blocks, self.table)

    def arguments(self, layout: PageLayout, what: str, device: str) -> dict[str, Any]:
        """Keywords for one call. The block table is a strided view, as a bucket of a larger one would be."""
        t = torch()

        def tensor(x, dtype=None):
            made = t.tensor(np.asarray(x), device=device)
            return made if dtype is None else made.to(dtype)

        page8, plane = layout is PageLayout.PAGE8, self.planes[layout]
        full = what == "full"
        pages = np.asarray(self.table.pages if full else self.candidates.virtual_pages)
        pages = np.where(pages < 0, 0, pages)  # SGLang pads with page 0
        slab = t.zeros((len(pages), pages.shape[1] + 3), dtype=t.int32, device=device)
        slab[:, : pages.shape[1]] = tensor(pages)
        starts = self.table.query_start_loc if full else np.arange(len(self.ends) + 1)
        pages_each = plane.num_pages
        return {
            "q_fp4": tensor(np.asarray(self.queries.payload).view(np.int8)),
            "q_scale": tensor(query_scale_to_aiter(self.queries.scale)),
            "k_payload": tensor(np.asarray(plane.payload)).reshape(pages_each, 1, 4, 64, 16).view(t.float4_e2m1fn_x2),
            "k_scale": tensor(np.asarray(plane.scale)).reshape(pages_each, 1, 4, 64),
            "weights": tensor(self.weights, t.bfloat16),
            "weight_scale": 1.0,
            "block_tables": slab[:, : pages.shape[1]],
            "query_start_loc": tensor(starts, t.int32),
            "row_ends": tensor(self.ends if full else self.candidates.row_ends, t.int32),
            "max_query_len": int(np.diff(np.asarray(starts)).max(initial=1)),
            "max_seq_len": pages.shape[1] * (64 if full else 8),
            "page8": page8,
            "pages_per_block": _PAGES_PER_BLOCK[what] if page8 else 1,
            "is_decode": True,
        }


def check_scorer(
    fn: Callable[..., Any],
    *,
    device: str = "cpu",
    heads: tuple[int, ...] = (32, 64),
    tolerance: float = 1e-5,
    tails: str = "unwritten",
    repeats: int = 3,
    cuda_graph: bool = False,
) -> ScorerReport:
    """Runs a torch scorer over a case written by SGLang and a grid of boundary lengths, and reports what holds.

    ``fn`` takes the keywords of SGLang's ``rowgroup_paged_mqa_logits`` (q_fp4, q_scale, k_payload, k_scale, weights,
    weight_scale, block_tables, query_start_loc, row_ends, max_query_len, max_seq_len, page8, pages_per_block,
    is_decode) and returns f32[rows, >= max_seq_len]. It needs no GPU that JAX can see: the expected values are
    computed on the host.

    Checked: the error against float64; PAGE8 having the bits of PAGE64; candidate logits (PAGE8, one virtual page a
    table entry) having the bits of the FULL ones; REINDEX top-k sets; tails; the same bits on every repeat; and
    replay: arguments changed in place, A, B, A, must give what fresh ones give.

    Args:
      device: where the tensors live, e.g. "cuda".
      heads: head counts of the boundary grid (multiples of 16, at most 64).
      tolerance: bound on ``norm(error) / norm(sum_h |w| relu(q.k))`` of a row.
      tails: "exact" if ``fn`` promises -inf past each row's end, "unwritten" if it promises nothing.
      repeats: calls that must agree bit for bit.
      cuda_graph: replay through a captured CUDA (HIP) graph.

    Raises:
      ValueError: an unknown word for ``tails``.
    """
    if tails not in ("exact", "unwritten"):
        raise ValueError(f"tails: expected 'exact' or 'unwritten', got {tails!r}")
    checks: list[tuple[str, Check]] = []
    for problem, other in _problems(heads):
        found = _check(fn, problem, other, device, tolerance, tails, repeats, cuda_graph)
        try:
            checks.extend((problem.name, check) for check in found)
        except Exception as error:  # the callable's own; what it says is the finding
            checks.append((problem.name, Check("runs", "both", f"{type(error).__name__}: {error}", False)))
    return ScorerReport(checks)


def _problems(heads) -> Iterator[tuple[_Problem, _Problem]]:
    """Each problem with another one of the same shapes, for replays."""
    with resources.as_file(resources.files("k2i_jax.data") / "verify.npz") as path:
        case = load_case(path)
    table, weights = case.table, np.asarray(case.weights)
    shorter = PageTable.from_arrays(table.pages[::-1], np.maximum(table.row_ends - 9, 0), table.query_start_loc)
    yield (
        _Problem("SGLang's verify case", case.queries, weights, case.planes, table),
        _Problem("", case.queries, weights[::-1].copy(), case.planes, shorter),
    )
    for count in heads:
        made = []
        for seed in (0, 1):
            lengths = BOUNDARY_LENGTHS if seed == 0 else BOUNDARY_LENGTHS[::-1]
            queries, weights, plane, table = random_problem(seed, count, lengths)
            weights = np.asarray(weights.astype("bfloat16").astype("float32"))
            planes = {layout: repack(plane, layout) for layout in LAYOUTS}
            made.append(_Problem(f"boundary lengths, {count} heads", queries, weights, planes, table))
        yield made[0], made[1]


def _check(fn, problem, other, device, tolerance, tails, repeats, cuda_graph) -> Iterator[Check]:
    logits = {}
    for layout in LAYOUTS:
        arguments = problem.arguments(layout, "full", device)
        got = [_call(fn, arguments) for _ in range(repeats)]
        live, (exact, magnitude) = problem.live, problem.exact
        logits[layout] = np.where(live, got[0], -np.inf).astype(np.float32)
        error = reference.relative_error(got[0], np.where(live, exact, -np.inf), magnitude)
        worst = float(np.nan_to_num(error, nan=np.inf).max())
        yield Check("error against float64", layout, f"{worst:.1e}, allowed {tolerance:.0e}", worst <= tolerance)
        same = all(bits_equal(logits[layout], np.where(live, again, -np.inf).astype(np.float32)) for again in got[1:])
        yield Check(f"{repeats} calls give the same bits", layout, _word(same), same)
        if tails == "exact":
            masked = all(bool((x[~live] == -np.inf).all()) for x in got)
            yield Check("-inf past each row's end", layout, _word(masked), masked)
        yield _replay(fn, problem, other, layout, device, cuda_graph)
    same = bits_equal(*logits.values())
    yield Check("PAGE8 has the bits of PAGE64", "both", _word(same), same)
    yield from _check_candidates(fn, problem, logits[PageLayout.PAGE8], device)


def _word(holds: bool) -> str:
    return "yes" if holds else "no"


def _call(fn, arguments) -> np.ndarray:
    out = fn(**arguments)
    width, rows = arguments["max_seq_len"], arguments["q_fp4"].shape[0]
    if out.ndim != 2 or out.shape[0] != rows or out.shape[1] < width:
        raise ValueError(f"logits: expected [{rows}, >= {width}], got {list(out.shape)}")
    return out[:, :width].float().cpu().numpy().copy()


def _check_candidates(fn, problem, full, device) -> Iterator[Check]:
    """REINDEX: only virtual pages are scored, so columns are compared by the positions that they stand for."""
    table = problem.candidates
    got = _call(fn, problem.arguments(PageLayout.PAGE8, "candidates", device))
    columns = np.broadcast_to(np.arange(got.shape[1], dtype=np.int32), got.shape)
    reachable = columns < np.asarray(table.row_ends)[:, None]
    positions = np.where(reachable, np.asarray(table.positions(columns)), 0)
    expected = np.where(reachable, np.take_along_axis(full, positions, 1), -np.inf).astype(np.float32)
    same = bits_equal(np.where(reachable, got, -np.inf).astype(np.float32), expected)
    yield Check("candidate logits have the bits of the FULL ones", "page8", _word(same), same)
    k, ids = 16, np.asarray(table.ids)
    allowed = [set(row[row >= 0].tolist()) for row in ids]
    want = reference.select_topk(full, problem.ends, k, allowed)
    chosen = reference.select_topk(np.where(reachable, got, -np.inf), np.asarray(table.row_ends), k)
    theirs = [sorted(int(positions[row, c]) for c in columns_) for row, columns_ in enumerate(chosen)]
    yield Check("REINDEX top-k: that of the masked FULL logits", "page8", _word(theirs == want), theirs == want)


def _replay(fn, problem, other, layout, device, cuda_graph) -> Check:
    """Arguments overwritten in place, A, B, A: the results must follow. Shapes differ in no argument."""
    a, b = problem.arguments(layout, "full", device), other.arguments(layout, "full", device)
    if any(a[name].shape != b[name].shape for name in a if hasattr(a[name], "shape")):
        raise AssertionError("the two problems of a replay must have equal shapes")
    names = [name for name in a if hasattr(a[name], "shape")]
    fresh = [_call(fn, {n: v.clone() if n in names else v for n, v in x.items()}) for x in (a, b)]
    held = {n: v.clone() if n in names else v for n, v in a.items()}
    run = _graph(fn, held) if cuda_graph else lambda: _call(fn, held)
    live, same = (problem.live, other.live), True
    for which in (0, 1, 0):
        for name in names:
            held[name].view(torch().uint8).copy_((a, b)[which][name].contiguous().view(torch().uint8))
        got = run()
        same &= bits_equal(*(np.where(live[which], x, -np.inf).astype(np.float32) for x in (got, fresh[which])))
    return Check("replay A, B, A follows its arguments", layout, _word(same), same)


def _graph(fn, held) -> Callable[[], np.ndarray]:
    """``fn`` captured once; the returned function replays it."""
    t = torch()
    side = t.cuda.Stream()
    side.wait_stream(t.cuda.current_stream())
    with t.cuda.stream(side):  # compile and allocate before the capture
        fn(**held)
    t.cuda.current_stream().wait_stream(side)
    graph = t.cuda.CUDAGraph()
    with t.cuda.graph(graph):
        out = fn(**held)

    def replay() -> np.ndarray:
        graph.replay()
        t.cuda.synchronize()
        return out[:, : held["max_seq_len"]].float().cpu().numpy().copy()

    return replay
