"""The bad-input table, row by row: values that cannot raise under jit spoil nothing but their own results."""

import jax
import numpy as np
import pytest
from cases import bits, random_batch, random_fp4, rows_of

import k2i_jax as k
from k2i_jax import CandidateBlocks, FP4Array, IndexKPlane, PageTable

ENDS = [130, 65, 64, 1]  # four rows, each with pages of its own; three columns
CANDIDATES = CandidateBlocks.from_ids(np.tile(np.arange(24), (4, 1)))


@pytest.fixture
def batch(layout):
    return random_batch(10, ENDS, columns=3, num_pages=16, layout=layout)


def with_table(batch, pages=None, row_ends=None, starts=None):
    table = batch.table
    fields = (table.pages, table.row_ends, table.query_start_loc)
    new = [old if x is None else np.asarray(x) for x, old in zip((pages, row_ends, starts), fields, strict=True)]
    return batch._replace(table=PageTable.from_arrays(*new))


def outputs(batch, implementation):
    """Logits, and what the two levels of selection make of the same input."""
    logits = k.index_logits(*batch.args, **implementation)
    blocks = k.select_candidate_blocks(logits, batch.table.live_ends(), topk_blocks=24)
    candidates = k.candidate_logits(*batch.args[:3], k.candidate_table(CANDIDATES, batch.table), **implementation)
    assert np.array_equal(bits(candidates), bits(logits))  # every block is a candidate: the same columns
    return np.asarray(logits), blocks, k.select_topk(logits, batch.table, k=9)


def is_empty(row, logits, blocks, selection):
    return (
        np.isneginf(logits[row]).all()
        and rows_of(blocks.ids[row]) == rows_of(selection.positions[row]) == rows_of(selection.slots[row]) == []
        and blocks.count[row] == selection.count[row] == 0
    )


@pytest.mark.parametrize("end", [0, -1, -(2**31)])
def test_row_end_not_above_zero(batch, implementation, end):
    base = outputs(batch, implementation)
    found = outputs(with_table(batch, row_ends=[130, end, 64, end]), implementation)
    for row in (1, 3):
        assert is_empty(row, *found)
    for row in (0, 2):
        assert np.array_equal(bits(found[0][row]), bits(base[0][row]))
        assert np.array_equal(found[2].positions[row], base[2].positions[row])


def test_every_row_end_is_zero(batch, implementation):
    found = outputs(with_table(batch, row_ends=np.zeros(4, int)), implementation)
    assert all(is_empty(row, *found) for row in range(4))


@pytest.mark.parametrize("end", [193, 2**31 - 1, 2**40])
def test_row_end_past_the_table(batch, implementation, end):
    """Positions past the table do not exist; one row's whole table is live here."""
    full = with_table(batch, pages=np.tile(batch.table.pages[:1], (4, 1)))
    inside = outputs(with_table(full, row_ends=[192, 192, 192, 1]), implementation)
    past = outputs(with_table(full, row_ends=[end, 192, end, 1]), implementation)
    assert np.array_equal(bits(past[0]), bits(inside[0]))
    for a, b in zip(jax.tree.leaves(past[1:]), jax.tree.leaves(inside[1:]), strict=True):
        assert np.array_equal(a, b)


def test_rows_in_no_sequence(batch, implementation):
    """Before query_start_loc[0] and past its last entry: two of four rows belong to the middle sequences."""
    pages = np.asarray(batch.table.pages)
    base = outputs(batch, implementation)
    found = outputs(with_table(batch, pages=pages[[1, 2, 0, 3]], starts=[1, 2, 3, 3, 3]), implementation)
    assert is_empty(0, *found)
    assert is_empty(3, *found)
    assert np.array_equal(bits(found[0][1:3]), bits(base[0][1:3]))


def test_two_writes_to_one_slot(layout):
    keys = random_fp4(np.random.default_rng(0), 65, scales=(0, 255))
    slots = np.append(np.full(64, 77), 78)
    read = k.read_keys(k.write_keys(IndexKPlane.zeros(2, layout), slots, keys), np.array([77, 78, 76]))
    assert np.array_equal(read.payload, np.stack([keys.payload[63], keys.payload[64], np.zeros(64)]))
    assert np.array_equal(read.scale, np.stack([keys.scale[63], keys.scale[64], np.zeros(4)]))


@pytest.mark.parametrize("page", [-1, 16, 2**25 + 3, 2**28 + 3, 2**29, 2**31 - 1, -(2**31), 2**32 + 3])
def test_page_id_out_of_range_below_a_row_end(batch, implementation, page):
    """-inf there: not the last page's scores, not page 0's, not those of a wrapped id; the others stay."""
    pages = np.array(batch.table.pages, np.int64)
    base = outputs(batch, implementation)
    pages[0, 1], pages[3, 0] = page, page
    logits, blocks, selection = outputs(with_table(batch, pages=pages), implementation)
    expected = base[0].copy()
    expected[0, 64:128], expected[3] = -np.inf, -np.inf
    assert np.array_equal(bits(logits), bits(expected))
    assert selection.count.tolist() == [9, 9, 9, 0]
    assert not set(range(64, 128)) & set(rows_of(selection.positions[0]))
    reindexed = k.reindex(*batch.args[:3], with_table(batch, pages=pages).table, blocks, k=9, **implementation)
    assert np.array_equal(reindexed.positions, selection.positions)
    assert np.array_equal(reindexed.slots, selection.slots)


def test_page_ids_past_every_row_end(batch, implementation):
    base = outputs(batch, implementation)
    live = np.arange(3) < -(-np.array(ENDS)[:, None] // 64)
    for padding in (0, -1, 15, 16, 2**31 - 1, -(2**31)):
        found = outputs(with_table(batch, pages=np.where(live, batch.table.pages, padding)), implementation)
        assert np.array_equal(bits(found[0]), bits(base[0]))
        assert np.array_equal(found[2].slots, base[2].slots)


def test_dead_bytes_never_reach_a_live_result(batch, layout, implementation):
    """Page 0, pages of nobody and the rest of a last page: any bytes there, the same bits."""
    base = outputs(batch, implementation)
    live = random_batch(10, ENDS, columns=3, num_pages=16, layout=layout)
    garbage = np.random.default_rng(1).integers(0, 256, (16, 4352), dtype=np.uint8)
    dirty = IndexKPlane.from_arrays(garbage[:, :4096], garbage[:, 4096:], layout)
    dirty = k.write_keys(dirty, live.slots, live.keys)
    found = outputs(batch._replace(plane=dirty), implementation)
    assert np.array_equal(bits(found[0]), bits(base[0]))
    assert not np.isnan(found[0]).any()


@pytest.mark.parametrize("group", [0, 3])
def test_nan_scale_touches_its_own_column(batch, implementation, group):
    """The column is NaN, or its broken dots count as 0; every other column keeps its bits."""
    base = outputs(batch, implementation)
    slot = int(batch.table.pages[0, 1]) * 64 + 7  # position 71 of row 0
    index = int(np.flatnonzero(batch.slots == slot)[0])
    scale = batch.keys.scale.copy()
    scale[index, group] = 255
    broken = k.write_keys(batch.plane, np.array([slot]), FP4Array(batch.keys.payload[[index]], scale[[index]]))
    logits, _, selection = outputs(batch._replace(plane=broken), implementation)
    others = np.ones(logits.shape, bool)
    others[0, 71] = False
    assert np.array_equal(bits(logits)[others], bits(base[0])[others])
    assert not np.isinf(logits[0, 71])
    assert selection.count[0] == 9
    if np.isnan(logits[0, 71]):
        assert 71 not in rows_of(selection.positions[0])


def test_a_nan_query_or_weight_stays_in_its_row(batch, implementation):
    base = outputs(batch, implementation)
    scale, weights = batch.queries.scale.copy(), batch.weights.copy()
    scale[1, 5, 2], weights[2, 3] = 255, np.nan
    queries = FP4Array(batch.queries.payload, scale)
    logits, _, selection = outputs(batch._replace(queries=queries, weights=weights), implementation)
    assert np.array_equal(bits(logits)[[0, 3]], bits(base[0])[[0, 3]])
    assert np.isneginf(logits).tolist() == np.isneginf(base[0]).tolist()
    assert rows_of(selection.positions[2]) == []


@pytest.mark.parametrize("slot", [-1, -64, 16 * 64, 2**31 - 1, -(2**31)])
def test_a_bad_slot_is_not_written(batch, slot):
    keys = random_fp4(np.random.default_rng(2), 2)
    plane = k.write_keys(batch.plane, np.array([slot, 70]), keys)
    alone = k.write_keys(batch.plane, np.array([70]), FP4Array(keys.payload[1:], keys.scale[1:]))
    assert np.array_equal(plane.payload, alone.payload)
    assert np.array_equal(plane.scale, alone.scale)


def test_empty_batches(batch):
    """No rows, and a table without columns: shapes, no fault."""
    queries = FP4Array(np.zeros((0, 32, 64), np.uint8), np.zeros((0, 32, 4), np.uint8))
    none = PageTable.from_rows(np.zeros((0, 3), int), np.zeros(0, int))
    assert k.index_logits(queries, np.zeros((0, 32), np.float32), batch.plane, none).shape == (0, 192)
    thin = PageTable.from_rows(np.zeros((4, 0), int), np.array(ENDS))
    logits = k.index_logits(batch.queries, batch.weights, batch.plane, thin)
    assert logits.shape == (4, 0)
    selection, blocks = k.source(batch.queries, batch.weights, batch.plane, thin, k=5)
    assert blocks.ids.shape == (4, 0)
    assert (selection.positions == -1).all()
    again = k.reindex(batch.queries, batch.weights, batch.plane, thin, blocks, k=5)
    assert again.positions.shape == (4, 5)
    assert (again.slots == -1).all()
