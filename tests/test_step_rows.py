"""Rows of every kind: verify steps of any width, context-parallel prefill, prefill in parts of a memory budget."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from cases import random_batch, rows_of
from steps import TWO_LEVELS, built, check_against_numpy, random_problem, same

import k2i_jax as k
from k2i_jax import LayerInputs, PageTable, reference

LONG = pytest.mark.long


FIRST_ENDS = (295, 59, 1, 128, 64, 190, 27, 250, 300, 8, 120, 77)


def verify_batch(requests):
    """Six rows a request, each sees one key more; the same rows grouped, and a sequence each."""
    ends = np.concatenate([np.arange(6) + n for n in FIRST_ENDS[:requests]])
    batch = random_batch(requests, ends, starts=np.arange(requests + 1) * 6, heads=16, columns=5).in_layout("page8")
    grouped = PageTable.from_verify(batch.table.pages, ends, 6)
    return batch, grouped, PageTable.from_rows(np.repeat(batch.table.pages, 6, axis=0), ends)


@pytest.mark.parametrize("requests", range(1, 13))
def test_verify_rows(requests):
    """Grouped rows have the bits of rows that stand alone. One shape for all: what lies past these rows is empty."""
    batch, *tables = verify_batch(requests)
    fill = lambda x: np.pad(x, ((0, 72 - len(x)), *[(0, 0)] * (x.ndim - 1)))
    queries, weights = jax.tree.map(fill, batch.queries), fill(batch.weights)
    k2i, found = built(TWO_LEVELS), []
    for table in tables:
        starts = np.pad(np.asarray(table.query_start_loc), (0, 72 - len(table.pages)), mode="edge")
        table = PageTable.from_arrays(fill(np.asarray(table.pages)), fill(np.asarray(table.row_ends)), starts)
        selection, candidates = k2i.source(queries, weights, batch.plane, table)
        found.append((selection, candidates, k2i.reindex(queries, -weights, batch.plane, candidates)))
    assert same(*found)
    selection, candidates, again = found[0]
    allowed = [set(x) for x in candidates.ids.tolist()]
    for selected, weights_of, among in ((selection, weights, None), (again, -weights, allowed)):
        logits = np.asarray(k.index_logits(queries, weights_of, batch.plane, table))
        wanted = reference.select_topk(logits, table.row_ends, 20, among)
        assert [rows_of(row) for row in selected.positions] == wanted


@pytest.mark.parametrize("requests", [8, 9, *(pytest.param(n, marks=LONG) for n in (1, 2, 3, 4, 5, 6, 7, 12))])
def test_verify_widths(requests):
    """The same with the shapes that a verify step of so many requests has."""
    batch, *tables = verify_batch(requests)
    args = batch.queries, batch.weights, batch.plane
    assert same(*(built(TWO_LEVELS).full(*args, table) for table in tables))


@pytest.mark.long
@pytest.mark.parametrize("requests", [1, 3, 8, 9])
def test_verify_widths_pallas(requests):
    batch, *tables = verify_batch(requests)
    k2i = built(TWO_LEVELS, implementation="pallas", interpret=jax.default_backend() == "cpu")
    assert same(*(k2i.source(batch.queries, batch.weights, batch.plane, table) for table in tables))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=LONG), 4])
def test_context_parallel_prefill(ranks):
    """A rank's rows step by the rank count; all keys are written with their own slots. Together: the whole prefill."""
    spec, tokens = TWO_LEVELS, [72, 44]
    problem = random_problem(5, spec, tokens, tokens, columns=2, layouts="page8")
    rows, starts = np.arange(116), np.array([0, 72, 116])
    whole = built(spec).step(*problem.args)
    check_against_numpy(spec, problem, whole)
    slots = {r: k.key_slots(problem.tables[r], problem.positions, ratio=r) for r in spec.ratios}
    for rank in range(ranks):
        mine = [rows[a:b][rank::ranks] for a, b in itertools.pairwise(starts)]
        own_starts, index = np.cumsum([0, *map(len, mine)]), np.concatenate(mine)
        tables = {}
        for ratio in spec.ratios:
            ends = k.prefill_row_ends([rank, rank], own_starts, len(index), ratio=ratio, step=ranks)
            assert np.array_equal(ends, (problem.positions[index] + 1) // ratio)
            tables[ratio] = PageTable.from_arrays(problem.tables[ratio].pages, ends, own_starts)
        layers = {
            layer: LayerInputs(x.queries[index], x.weights[index], x.keys, x.norm_weight)
            for layer, x in problem.layers.items()
        }
        keys = {"key_positions": problem.positions, "key_slots": slots}
        found = built(spec).step(problem.planes, layers, problem.positions[index], tables, **keys)
        assert same(found.planes, whole.planes)
        assert same(found.selections, jax.tree.map(lambda x, i=index: x[i], whole.selections))


@pytest.mark.parametrize(
    ("rows_at_once", "implementation"),
    [(7, "xla"), pytest.param(1, "xla", marks=LONG), pytest.param(7, "pallas", marks=LONG)],
)
def test_the_memory_budget_changes_no_bit(rows_at_once, implementation):
    """Ragged prefill in parts of 1 and 7 rows, which cut sequences anywhere, and in one."""
    spec = TWO_LEVELS
    small = dataclasses.replace(spec, memory_budget=20 * 320 * rows_at_once)
    assert small.rows_per_step(320) == rows_at_once
    starts = np.array([0, 9, 9, 14, 22])  # an empty sequence, and rows past the last one
    ends = np.concatenate([np.arange(290, 299), np.arange(1, 6), np.arange(60, 68), [50, 320]])
    batch = random_batch(6, ends, starts=starts, heads=16, columns=5).in_layout("page8")
    found = []
    for numbers in (spec, small):
        k2i = built(numbers, implementation=implementation, interpret=implementation == "pallas")
        selection, candidates = k2i.source(*batch.args)
        again = k2i.reindex(batch.queries, -batch.weights, batch.plane, candidates)
        found.append((selection, candidates, again))
    assert same(*found)
