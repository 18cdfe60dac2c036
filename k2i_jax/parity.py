"""The checks behind ``k2i-jax demo`` and ``k2i-jax selftest``: each returns what it measured and whether it holds."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k2i_jax import reference
from k2i_jax.candidates import CandidateTable, candidate_table
from k2i_jax.case import Case
from k2i_jax.fp4 import FP4Array, quantize_fp4
from k2i_jax.layout import PageLayout
from k2i_jax.page_table import PageTable
from k2i_jax.plane import IndexKPlane
from k2i_jax.plane_ops import repack, write_keys
from k2i_jax.score import candidate_logits, index_logits
from k2i_jax.select import reindex, select_candidate_blocks

FLOAT64_BOUND = 1e-6  # norm(ours - float64) / norm(sum |w| relu(q.k)), per row
SGLANG_BOUND = 1e-2  # its torch scorer rounds dots and products to bfloat16
LAYOUTS = (PageLayout.PAGE64, PageLayout.PAGE8)
BOUNDARY_LENGTHS = (0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513)


class Check(NamedTuple):
    """One line of a report."""

    name: str
    layout: str  # a PageLayout value, or "both"
    value: str
    holds: bool


def bits_equal(a: Any, b: Any) -> bool:
    """Whether two float32 arrays hold the same bits, NaN and signs of zero included."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool((a.view(np.int32) == b.view(np.int32)).all())


def measure_ms(f: Callable[[], Any], repeats: int = 7) -> float:
    """Median wall time of ``f`` in milliseconds, compiled beforehand, results awaited."""
    jax.block_until_ready(f())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f())
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def check_case(case: Case, options: dict[str, Any]) -> Iterator[Check]:
    """Compares everything that SGLang recorded in a case, layout by layout, and the layouts with each other."""
    logits: dict[PageLayout, np.ndarray] = {}
    for layout, plane in case.planes.items():
        yield from _check_layout(case, layout, plane, options, logits)
    equal = bits_equal(*logits.values())
    yield Check("logits: same bits in both layouts", "both", "equal" if equal else "differ", equal)


def _check_layout(case, layout, plane, options, logits) -> Iterator[Check]:
    arrays, table = case.arrays, case.table
    written = write_keys(IndexKPlane.zeros(plane.num_pages, layout), arrays["slots"], quantize_fp4(arrays["k_input"]))
    same = all(bool((a == b).all()) for a, b in zip(jax.tree.leaves(written), jax.tree.leaves(plane), strict=True))
    yield Check("planes written from the bf16 keys: SGLang's bytes", layout, _equal(same), same)

    scores = np.asarray(index_logits(case.queries, case.weights, plane, table, **options))
    logits[layout] = scores
    _, magnitude = reference.index_logits(case.queries, case.weights, plane, table)
    error = float(reference.relative_error(scores, arrays["logits_fp64"], magnitude).max())
    tails = bool(((scores == -np.inf) == (arrays["logits_fp64"] == -np.inf)).all())
    yield Check("logits: error against float64", layout, f"{error:.1e}", error <= FLOAT64_BOUND)
    yield Check("logits: exactly -inf past each row's end", layout, _equal(tails), tails)
    error = float(reference.relative_error(arrays["sglang_torch_logits"], scores, magnitude).max())
    yield Check("logits: distance of SGLang's bf16 torch scorer", layout, f"{error:.1e}", error <= SGLANG_BOUND)

    blocks = select_candidate_blocks(scores, table.live_ends(), topk_blocks=case.topk_blocks)
    pairs = zip(np.asarray(blocks.ids), arrays["candidate_ids"], strict=True)
    same = all(set(a[a >= 0]) == set(b[b >= 0]) for a, b in pairs)
    yield Check(f"candidate blocks (up to {case.topk_blocks}): SGLang's", layout, _equal(same), same)
    candidates = candidate_table(blocks, table)
    same = bool((np.asarray(candidates.row_ends) == arrays["page8_lens"]).all())
    yield Check("reachable candidate columns: SGLang's", layout, _equal(same), same)
    same = candidates_match(case.queries, case.weights, plane, scores, candidates, options)
    yield Check("candidate logits: the bits of the FULL logits", layout, _equal(same), same)
    chosen = reindex(case.queries, case.weights, plane, table, blocks, k=case.k, **options)
    for field, golden in (("positions", "topk_positions"), ("slots", "topk_slots")):
        same = bool((np.asarray(getattr(chosen, field)) == arrays[golden]).all())
        yield Check(f"top {case.k} {field} (REINDEX): SGLang's", layout, _equal(same), same)


def _equal(same: bool) -> str:
    return "equal" if same else "differ"


def candidates_match(queries, weights, plane, logits, candidates: CandidateTable, options) -> bool:
    """Whether candidate logits have the FULL logits' bits at the same positions, and -inf elsewhere."""
    ours = np.asarray(candidate_logits(queries, weights, plane, candidates, **options))
    columns = np.broadcast_to(np.arange(ours.shape[1], dtype=np.int32), ours.shape)
    reachable = columns < np.asarray(candidates.row_ends)[:, None]
    positions = np.asarray(candidates.positions(jnp.asarray(columns)))
    full = np.take_along_axis(np.asarray(logits), np.maximum(positions, 0), axis=1)
    return bits_equal(ours, np.where(reachable, full, np.float32(-np.inf)))


def random_problem(seed: int, heads: int, lengths: tuple[int, ...], layout: PageLayout = PageLayout.PAGE64):
    """Queries, weights, plane and table of one row a sequence: permuted pages, garbage in every byte not live."""
    rng = np.random.default_rng(seed)
    rows, pages_each = len(lengths), max(1, -(-max(lengths) // 64))
    num_pages = rows * pages_each + 8
    pages = 1 + rng.permutation(num_pages - 1)[: rows * pages_each].astype(np.int32).reshape(rows, pages_each)
    table = PageTable.from_rows(pages, np.array(lengths, np.int32))
    plane = IndexKPlane.from_arrays(
        np.full((num_pages, 4096), 0xFF, np.uint8),
        np.full((num_pages, 256), 0xFF, np.uint8),
        PageLayout.PAGE64,
    )
    slots = np.concatenate([np.asarray(reference.row_slots(table, row), np.int32) for row in range(rows)])
    keys = _random_fp4(rng, (len(slots),))
    plane = repack(write_keys(plane, slots, keys), layout)
    weights = jnp.asarray(rng.normal(size=(rows, heads)).astype(np.float32) / 64)
    return _random_fp4(rng, (rows, heads)), weights, plane, table


def _random_fp4(rng, shape) -> FP4Array:
    return FP4Array(
        jnp.asarray(rng.integers(0, 256, (*shape, 64), dtype=np.uint8)),
        jnp.asarray(rng.integers(118, 132, (*shape, 4), dtype=np.uint8)),
    )
